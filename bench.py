"""
Speed and memory: of whole models, each beside the plain GPT; and of attentions alone, each beside
torch's scaled_dot_product_attention on the same q, k and v.

    python bench.py                            everything below but gpu and kernels, at nano size
    python bench.py train --models cable rope  training steps: tok/s, and the ratio to nope
    python bench.py decode --context 4096      one cached token after a long context: ms
    python bench.py generate --length 2048     a whole text with and without the cache
    python bench.py memory --length 16384      peak memory of eval.py on one long window
    python bench.py attention --models cable   an attention alone, up to four ways: plain (as the
                                               model file has it), kernel (kernels/), compiled,
                                               literal (T x T, as its paper has it)
    python bench.py attention --run out/cable-stdlib-nano      on what a trained model computes
    python bench.py gpu                        all there is to know of the kernels on a GPU, in 10
                                               minutes: tests, 1,000 repeats, times, a verdict
    python bench.py kernels                    what the compiler says about every kernel, with no
                                               GPU: registers, spilled bytes, instructions a tile

Ratios come from one run in which the candidates take turns, so that a noisy machine disturbs all
alike; each time is the median of --repeats, but for generate, which runs once. What is timed is the
model file's own function.
Writes results/bench.<kinds>.<device>.json (gpu: bench.gpu.json and .md), and results/README.md
anew.
"""
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import pickle
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import runs
from data.text import Task
from experiments import tables

BESIDE, ONE = "nope", "cable"  # the defaults: whom to measure by, and whom to let generate
WAYS = ("plain", "kernel", "compiled", "literal")
LITERAL_UP_TO = 4096  # tokens: it holds whole T x T matrices


# -----------------------------------------------------------------------------
# clocks

def clock(device, f):
    """Seconds that f takes, GPU work included."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    f()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def turns(device, steps, repeats, warmup=2):
    """{name: f} -> {name: median seconds}; every round runs each f once."""
    seconds = {name: [] for name in steps}
    for _ in range(warmup + repeats):
        for name, f in steps.items():
            seconds[name].append(clock(device, f))
    return {name: statistics.median(ts[warmup:]) for name, ts in seconds.items()}


# -----------------------------------------------------------------------------
# whole models

def build(args, names, **changes):
    """{name: model} on the device, all with the same shape."""
    made = {}
    for name in names:
        torch.manual_seed(0)
        config = Task.defaults[args.size] | runs.models()[name][1]
        config |= dict(model=name, vocab_size=args.vocab_size) | changes
        made[name] = runs.make_model(config).to(args.device)
    return made


def compared(args):
    """
    The models to measure, first the one that the others are measured by. If none are named, the
    causal ones of the model files; not those of experiments/, where plainness comes before speed.
    """
    names = args.models or [
        name for name, (module, _) in runs.models().items()
        if not runs.is_encoder(module.GPT) and module.__name__.startswith("model_")]
    return [args.beside, *(name for name in names if name != args.beside)]


def train(args):
    steps, B = {}, Task.defaults[args.size]["batch_size"]
    for name, model in build(args, compared(args)).items():
        T = model.config.block_size
        idx = torch.randint(0, args.vocab_size, (B, T + 1), device=args.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        run = torch.compile(model) if args.device.type == "cuda" else model

        def step(run=run, optimizer=optimizer, x=idx[:, :-1], y=idx[:, 1:]):
            with args.autocast:
                loss = run(x, y)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps[name] = step
    seconds = turns(args.device, steps, args.repeats, warmup=3)
    first = seconds[args.beside]
    return {name: {"tok_s": round(B * T / t), f"of_{args.beside}": first / t}
            for name, t in seconds.items()}


@torch.no_grad()
def decode(args):
    steps, n = {}, args.context
    for name, model in build(args, compared(args), block_size=n + 256).items():
        model.eval()
        cache = runs.new_cache(model, n + 256)
        idx = torch.randint(0, args.vocab_size, (1, n), device=args.device)
        with args.autocast:
            for part in idx.split(runs.piece(model), 1):
                model(part, cache=cache)

        def step(model=model, cache=cache, x=idx[:, :1]):
            for _ in range(10):
                model(x, cache=cache)
            cache.t = n  # back to where we were
        steps[name] = step
    with args.autocast:
        seconds = turns(args.device, steps, args.repeats)
    first = seconds[args.beside]
    return {name: {"ms": 1000 * t / 10, f"times_{args.beside}": t / first}
            for name, t in seconds.items()}


@torch.no_grad()
def generate(args):
    found = {}
    for name, model in build(args, args.models or [ONE], block_size=args.length).items():
        model.eval()
        idx = torch.randint(0, args.vocab_size, (1, args.length), device=args.device)

        def cached(model=model, idx=idx):
            cache = runs.new_cache(model, args.length)
            for t in range(args.length):
                model(idx[:, t:t + 1], cache=cache)

        def again(model=model, idx=idx):  # the whole text once more for every token
            for t in range(args.length):
                model(idx[:, :t + 1])
        with args.autocast:
            a, b = clock(args.device, cached), clock(args.device, again)
        found[name] = dict(cached_s=a, uncached_s=b, times_faster=b / a)
    return found


def memory(args):
    """Peak memory of `eval.py --lengths T`, as it reports itself, on a model hardly trained."""
    found = {}
    for name in compared(args):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "short")
            said = evaluate(args, name, run)
            if said:  # a table of positions may end before T: then it is trained that long
                run = Path(folder, "long")
                said = evaluate(args, name, run, "--block_size", args.length)
            if said:
                runs.fail(f"{name} could not be measured: {said}")
            result = json.loads((run / "eval.json").read_text())
            found[name] = dict(peak_GB=result["peak_memory_GB"])
    return found


def evaluate(args, name, run, *flags):
    """Train for a step, in the folder `run`, evaluate at the length -> "", or what went wrong."""
    where = ["--device", args.device, "--dtype", args.dtype, "--kernel", args.kernel]
    commands = [
        ["train.py", "--model", name, "--size", args.size, "--max_iters", 1, "--eval_iters", 1,
         "--batch_size", 1, "--no-evaluate", "--out_dir", run, *flags],
        ["eval.py", run, "--lengths", args.length, "--tokens", args.length]]
    for script, *words in commands:
        command = [sys.executable, runs.ROOT / script, *words, *where]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode:
            return f"{script} said {done.stderr.strip()}"
    return ""


# -----------------------------------------------------------------------------
# attentions alone

def attention(args, found=None):
    """
    By length and name: forward alone, and forward and backward. A way that fails (no compiler, no
    memory, no backward) has the reason instead. found is filled as it goes.
    """
    found = {} if found is None else found
    on_cpu = args.device.type == "cpu"
    # beyond it forward only: for its backward a plain function keeps every bias
    longest = 4096 if on_cpu and "plain" in args.ways else 16384
    for T in args.lengths or ([1024, 4096] if on_cpu else [1024, 2048, 4096, 8192, 16384, 65536]):
        rows = found.setdefault(T, dict(sdpa={}))
        for name, model, calls in inputs(args, T):
            for key in ("forward", "both")[:1 if T > longest else 2]:
                measure(args, rows, name, model, calls, T, key)
        print(f"  T = {T:,}: {len(rows)} ways", flush=True)
    return found


def inputs(args, T):
    """
    -> (name, model, calls) of every case: calls are the arguments of the model's plain function, a
    tuple for every layer. B1 H8 d64 on the CPU, B4 H12 d64 on a GPU; or all layers of --run.
    """
    if args.run:
        name, model, idx = trained(args, T)
        yield from cases(args, name, model, idx)
        return
    B, H = (4, 12) if args.device.type == "cuda" else (1, 8)
    for name in args.models or first_names().values():
        torch.manual_seed(0)
        shape = dict(vocab_size=257, n_layer=1, n_head=H, n_embd=64 * H, block_size=T)
        config = dict(model=name) | runs.models()[name][1] | shape
        idx = torch.randint(0, 257, (B, T), device=args.device)
        yield from cases(args, name, runs.make_model(config).to(args.device), idx)


def trained(args, T):
    """-> its name, the model of --run, a sequence (1, T) of its task."""
    path = runs.find_checkpoint(args.run)
    model, config, checkpoint = runs.load_run(path, args.device)
    runs.check_text(path, checkpoint)
    task = runs.make_task(config | dict(block_size=T))
    x, _ = task.batch(task.splits[1], 1, np.random.default_rng(0))
    if not task.stretches:
        runs.fail(f"{config['data']} has no longer sequences: its block_size stays as it is")
    return path.resolve().parent.name, model, torch.from_numpy(x).to(args.device)


def cases(args, name, model, idx):
    """
    The calls as they are; then, for each of kernels.REGIMES, changed so that a kernel has more or
    less to do.
    """
    try:
        with torch.no_grad(), args.autocast, runs.spy(model) as calls:
            model(idx)
    except ValueError as e:  # an encoding that ends
        runs.fail(e)
    yield name, model, calls
    if runs.kernels and not args.run:
        plain = runs.plain_function(runs.attention_module(model))
        for regime, change in runs.kernels.REGIMES.get(plain.__name__, {}).items():
            yield f"{name}, {regime}", model, [change(*call) for call in calls]


def ways(args, model, calls, T):
    """{way: its function} of what can be had here."""
    module = runs.attention_module(model)
    plain = runs.plain_function(module)
    found = dict(plain=plain)
    fast = runs.kernels and runs.kernels.faster(plain, *calls[0])
    if fast:
        with torch.no_grad():
            does_it = fast(*calls[0]) is not None  # it may pass on these options
        found["kernel"] = fast if does_it else None
    if "compiled" in args.ways:
        found["compiled"] = torch.compile(plain, dynamic=False)
    if T <= LITERAL_UP_TO:
        found["literal"] = getattr(module, "literal", None)
    return {way: found[way] for way in args.ways if found.get(way)}


def sdpa(q, k, v, *options):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_both_ways(q, k, v, *options):
    """What an encoder is measured by."""
    return F.scaled_dot_product_attention(q, k, v)


def unfused(q, k, v, *options):
    """
    Plain attention with a torch call for every step, without positions: what a method without a
    fused kernel takes at least.
    """
    rows, T, y = 64, k.size(2), []
    for start in range(0, T, rows):
        end = min(start + rows, T)
        later = torch.full((end - start, end), -math.inf, device=q.device).triu(start + 1)
        logits = q[:, :, start:end] @ k[:, :, :end].transpose(-1, -2) / math.sqrt(q.size(3))
        y.append((logits + later.to(q.dtype)).softmax(-1) @ v[:, :, :end])
    return torch.cat(y, dim=2)


def call(f, model, calls, backward):
    """
    -> a function to time: all layers' forward without gradients, or forward and backward, to every
    input.
    """
    if not backward:
        return torch.no_grad()(lambda: [output(f, inputs) for inputs in calls])
    calls = [[leaf(x) for x in inputs] for inputs in calls]
    tensors = [x for x in itertools.chain(*calls) if torch.is_tensor(x) and x.requires_grad]
    tensors += model.parameters()  # an argument may be a function of them

    def both():
        total = sum(output(f, inputs).sum() for inputs in calls)
        return torch.autograd.grad(total, tensors, allow_unused=True)
    return both


def output(f, inputs):
    """literal returns its parts, too."""
    y = f(*inputs)
    return y[0] if isinstance(y, tuple) else y


def leaf(x):
    is_number = torch.is_tensor(x) and x.is_floating_point()
    return x.detach().clone().requires_grad_() if is_number else x


def measure(args, rows, name, model, calls, T, key):
    """
    One case, forward or both, into {label: row}; sdpa's time is of the same q, k and v, of an
    encoder both ways. The row sdpa itself is that of the first case.
    """
    both_ways = runs.is_encoder(model)
    steps, functions = {}, dict(sdpa=sdpa_both_ways if both_ways else sdpa)
    if args.device.type == "cpu" and "plain" in args.ways and not both_ways:
        functions["unfused"] = unfused
    for way, f in ways(args, model, calls, T).items():
        functions[name if way == "plain" else f"{name}: {way}"] = f
    for label, f in functions.items():
        step = call(f, model, calls, key == "both")
        try:
            step()
            steps[label] = step
        except Exception as e:  # whatever another library says
            said = str(e).strip() or type(e).__name__
            rows.setdefault(label, {})[f"{key}_failed"] = said.splitlines()[0][:100]
    seconds = turns(args.device, steps, args.repeats, warmup=1)
    del steps
    for label, t in seconds.items():
        row = rows.setdefault(label, {})
        if f"{key}_ms" in row:
            continue  # sdpa's row is that of the first case
        row[f"{key}_ms"] = 1000 * t
        if "sdpa" in seconds:  # it may have met the end of memory alone
            row[f"{key}_of_sdpa"] = t / seconds["sdpa"]
        if not label.endswith(": compiled"):  # the compiler's own memory would be counted, too
            extra = extra_memory(args.device, functions[label], model, calls, key == "both")
            row |= {} if extra is None else {f"{key}_GB": extra}


def extra_memory(device, *what):
    """Peak memory of one call beyond its inputs, in GB; resident memory wants its own process."""
    if device.type == "cuda":
        step = call(*what)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) / 1e9
        step()
        return runs.peak_memory(device) - before
    try:
        pickle.dumps(what)
    except (AttributeError, pickle.PicklingError):  # an argument may be a local function
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(resident_memory, (torch.get_num_threads(), *what))


def resident_memory(threads, f, model, calls, backward):
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    own = [[x.clone() if torch.is_tensor(x) else x for x in call] for call in calls]
    step = call(f, model, own, backward)
    before = runs.peak_memory(cpu)
    if before is None:
        return None
    step()
    return runs.peak_memory(cpu) - before


# -----------------------------------------------------------------------------
# kernels

def no_triton():
    """Why there are no Triton kernels here; empty where there are."""
    if not runs.kernels:
        return "there is no folder kernels/"
    if not importlib.util.find_spec("triton"):
        return "there is no Triton here: pip install triton"
    return ""


def compile_kernels(args):
    """Every kernel, for heads of 64 and 128, for an A100 and an H100, without a GPU."""
    if no_triton():
        runs.fail(no_triton())
    from kernels import report
    found = {}
    cases = itertools.product((torch.bfloat16, torch.float32), (80, 90), (64, 128))
    for dtype, target, d in cases:
        short = report.SHORT[dtype]
        for name, fn, constants in report.jobs(d, dtype):
            where = f"{short}, d {d}, sm_{target}"
            found[f"{name}, {where}"] = report.of(fn, constants, target, dtype)
    return found


# -----------------------------------------------------------------------------
# all of it on a GPU, within ten minutes

SECONDS = 480  # no step begins later: the last one has two minutes


def why_no_gpu():
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    return no_triton()


def gpu(args, result, keep):
    """
    Fills result step by step, and keeps it after each: what was measured stays, whatever comes.
    torch.compile takes long: it comes last and at one length.
    """
    begun = time.monotonic()
    result["attention"], result["repeats"] = {}, {}
    names = with_kernels()
    steps = [("tests", kernel_tests, result)]
    steps += [(f"repeats of {name}", repeats, args, name, result["repeats"]) for name in names]
    lengths = 1024, 4096, 16384
    ways = "plain", "kernel", "literal"
    for T, name in itertools.product(lengths, names):
        steps.append((f"{name} at {T:,}", times, args, name, T, ways, result["attention"]))
    for name in names:
        steps.append((f"{name} compiled", times, args, name, 1024, ["compiled"],
                      result["attention"]))
    for what, step, *more in steps:
        if time.monotonic() - begun > SECONDS:
            result["stopped"] = f"before {what}, as time was up"
        else:
            try:
                step(*more)
                clock(args.device, lambda: None)  # is the device still there?
            except Exception as e:  # a device that is lost, say: what follows would fail as well
                said = str(e).strip() or type(e).__name__
                result["stopped"] = f"at {what}: {said.splitlines()[0][:200]}"
        result["seconds"] = round(time.monotonic() - begun)
        keep()
        if "stopped" in result:
            print(f"stopped {result['stopped']}", flush=True)
            break
        print(f"  {result['seconds']} s: {what}", flush=True)


def with_kernels():
    """The first name of every model file that has a Triton kernel."""
    return [name for module, name in first_names().items()
            if getattr(runs.plain_function(module), "__name__", "") in runs.kernels.ON_GPU]


def first_names():
    """{model file: the first of its names}"""
    names = {}
    for name, (module, _) in runs.models().items():
        names.setdefault(module, name)
    return names


def kernel_tests(result):
    """Every test of the kernels, on this GPU."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-q",
               runs.ROOT / "test_all.py", "-m", "not slow", "-k", "interpreted"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(command, cwd=runs.ROOT, env=env, capture_output=True, text=True,
                              timeout=240)
    except subprocess.TimeoutExpired:
        result["tests"] = dict(ok=False, said="not done after 240 s", failed=[])
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    result["tests"] = dict(ok=done.returncode == 0, said=last, failed=lines)


def repeats(args, name, found, times=1000):
    """Whether outputs and gradients are the same bits, a thousand times."""
    args.models = [name]
    for label, model, calls in inputs(args, 1024):
        plain = runs.plain_function(runs.attention_module(model))
        fast = runs.kernels.faster(plain, *calls[0])
        if fast is None:
            found[label] = dict(times=0, different=0)
            continue
        step = call(fast, model, calls, True)
        first = [x for x in step() if x is not None]
        different = 0
        for _ in range(times):
            again = [x for x in step() if x is not None]
            different += not all(map(torch.equal, first, again))
        found[label] = dict(times=times, different=different)


def times(args, name, T, ways, found):
    args.models, args.lengths, args.ways = [name], [T], ways
    attention(args, found)


def verdict(out, result):
    """One page beside the JSON: what was promised, and what came of it."""
    page = out.with_suffix(".md")
    runs.write_safely(page, lambda tmp: tmp.write_text(tables.verdict(result) + "\n"))
    print(f"wrote {page}")


# -----------------------------------------------------------------------------
# command line

KINDS = dict(attention=attention, train=train, decode=decode, generate=generate, memory=memory,
             kernels=compile_kernels, gpu=gpu)


def make_flags():
    parser = runs.make_parser(description=__doc__)
    add = parser.add_argument
    add("kinds", nargs="*", help=f"which: {' '.join(KINDS)}; default: all but kernels and gpu")
    add("--models", nargs="+", help="default: the causal ones of the model files; attention: the "
                                    f"first of every file; generate: {ONE}")
    add("--beside", default=BESIDE, metavar="MODEL",
        help=f"the model that others are measured by (default: {BESIDE})")
    add("--run", help="attention: a trained run, whose layers' inputs to take")
    add("--size", default="nano", help=f"{' '.join(Task.defaults)} (default: nano)")
    add("--context", type=int, default=4096, help="decode: tokens in the cache (default: 4096)")
    add("--length", type=int, default=0,
        help="tokens: for generate (default: 2048) and memory (default: 16384)")
    add("--lengths", type=int, nargs="+",
        help="attention: tokens (default: 1024 4096, on a GPU to 65536)")
    add("--ways", nargs="+", help=f"attention: which of {' '.join(WAYS)}; default: all, on the CPU "
                                  "all but compiled, as compiling takes minutes there")
    add("--repeats", type=int, default=9, help="rounds; the median counts (default: 9)")
    add("--out", help="where to write the JSON (default: in results/, by kinds and device)")
    runs.add_run_flags(parser)
    return parser


def check(args):
    for name in [args.beside, *(args.models or [])]:
        module, _ = runs.models()[name]
        if runs.is_encoder(module.GPT) and args.kinds != ["attention"]:
            runs.fail(f"{name} is an encoder: only its attention is measured here, by "
                      "python bench.py attention")
    for given, known in ((args.kinds, KINDS), ([args.size], Task.defaults), (args.ways, WAYS)):
        for word in given or []:
            if word not in known:
                runs.fail(f"unknown {word!r}: {runs.nearest(word, known)}")
    if args.length < 0 or min(args.context, args.repeats, *(args.lengths or [1])) < 1:
        runs.fail("--length must be 0 (the default) or more, "
                  "--lengths, --context and --repeats at least 1")
    if "gpu" in args.kinds:
        if args.kinds != ["gpu"]:
            runs.fail("gpu measures by itself: python bench.py gpu")
        if why_no_gpu():
            runs.fail(f"no GPU to measure: {why_no_gpu()}")
    if args.length and args.kinds == ["attention"]:
        runs.fail("attention takes --lengths, one or several")
    if args.run and args.kinds != ["attention"]:
        runs.fail("--run is for attention: python bench.py attention --run RUN")
    if args.run and args.models:
        runs.fail("--run is a model already: leave out --models")


def show(kind, found):
    """Print a table: a line per row."""
    rows = found
    if kind == "attention":
        rows = {}
        for T, by_name in found.items():
            rows |= {f"{T:,} {name}": row for name, row in by_name.items()}
    width = max(map(len, rows)) + 2
    print(f"\n{kind}")
    for name, row in rows.items():
        cells = []
        for key, value in row.items():
            cells.append(f"{key} {value:<10.4g}" if isinstance(value, int | float) else
                         f"{key}: {value} ")
        print(f"  {name:{width}}" + "".join(cells), flush=True)


def main(argv=None):
    args = runs.parse(make_flags(), argv)
    check(args)
    args.device, args.autocast, said = runs.setup(args)
    print(f"{args.size} on {said}")
    on_cpu = args.device.type == "cpu"
    args.ways = args.ways or [way for way in WAYS if way != "compiled" or not on_cpu]
    args.vocab_size = 257 if args.size == "nano" else 50304
    words = sys.argv[1:] if argv is None else map(str, argv)
    result = dict(command=shlex.join(["python", "bench.py", *words]),
                  environment=runs.environment(), size=args.size, where=said)
    stem = "gpu" if args.kinds == ["gpu"] else ".".join([*args.kinds, args.device.type])
    out = Path(args.out or runs.ROOT / "results" / f"bench.{stem}.json")
    if out.is_dir():
        runs.fail(f"{out} is a folder: name a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    length = args.length
    if args.kinds == ["gpu"]:
        gpu(args, result, lambda: runs.write_json(out, result))
        verdict(out, result)
    else:
        for kind in args.kinds or list(KINDS)[:-2]:
            args.length = length or dict(generate=2048, memory=16384).get(kind)
            result[kind] = KINDS[kind](args)
            show(kind, result[kind])
            runs.write_json(out, result)
    print(f"\nwrote {out}")
    failed = int(bool(result.get("stopped")) or not result.get("tests", dict(ok=True))["ok"])
    if result.get("attention"):
        failed |= runs.script("plot.py", "attention", out)
    if out.resolve().parent == runs.ROOT / "results":
        tables.write_page()
        print("wrote results/README.md")
    sys.exit(failed)


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    main()
