"""
Speed and memory: of whole models, each beside the plain one (nope, which is torch's scaled_dot_product_attention alone), and of
the attention functions, each beside that function itself.

    python bench.py                            everything below but kernels, at nano size
    python bench.py train --models cable rope  training steps: tok/s, and the ratio to nope
    python bench.py decode --context 4096      one cached token after a long context: ms, and the ratio to nope
    python bench.py generate --length 2048     a whole text with and without the cache
    python bench.py memory --length 16384      peak memory of eval.py on one long window
    python bench.py attention                  every method's attention alone: plain, compiled, as FlexAttention, by kernel, as in its paper
    python bench.py kernels                    registers, spilled bytes and shared memory of every kernel, with no GPU

Ratios come from one run in which the models take turns, so that a noisy machine disturbs all alike; each number
is the median of --repeats. Writes results/bench.<device>.json.
"""
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import runs
from data.text import Task
from model_baseline import attention as plain_attention
from model_cable import cable_attention
from model_cope import cope_attention
from model_diff import diff_attention
from model_fox import fox_attention
from model_tra import tra_attention

WAYS = ("plain", "kernel", "compiled", "flex", "listing")


def clock(device, f):
    """Seconds that f takes, GPU work included."""
    def sync():
        return torch.cuda.synchronize() if device.type == "cuda" else None
    sync()
    start = time.perf_counter()
    f()
    sync()
    return time.perf_counter() - start


def turns(device, steps, repeats, warmup=2):
    """{name: f} -> {name: median seconds}; every round runs each f once."""
    seconds = {name: [] for name in steps}
    for r in range(warmup + repeats):
        for name, f in steps.items():
            t = clock(device, f)
            if r >= warmup:
                seconds[name].append(t)
    return {name: statistics.median(ts) for name, ts in seconds.items()}


def build(args, models, **changes):
    """{name: model} on the device, all with the same shape."""
    made = {}
    for name in models:
        torch.manual_seed(0)
        config = Task.defaults[args.size] | runs.find_model(name)[1] | dict(model=name, vocab_size=args.vocab_size) | changes
        made[name] = runs.make_model(config).to(args.device)
    return made


def train(args):
    steps = {}
    for name, model in build(args, args.models).items():
        B, T = Task.defaults[args.size]["batch_size"], model.config.block_size
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
    return {name: dict(tok_s=round(B * T / t), of_nope=seconds["nope"] / t) for name, t in seconds.items()}


@torch.no_grad()
def decode(args):
    steps, n = {}, args.context
    for name, model in build(args, args.models, block_size=n + 256).items():
        model.eval()
        cache, idx = runs.new_cache(model, n + 256), torch.randint(0, args.vocab_size, (1, n), device=args.device)
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
    return {name: dict(ms=t * 100, times_nope=t / seconds["nope"]) for name, t in seconds.items()}


@torch.no_grad()
def generate(args):
    model = build(args, ["cable"], block_size=args.length)["cable"].eval()
    idx = torch.randint(0, args.vocab_size, (1, args.length), device=args.device)

    def cached():
        cache = runs.new_cache(model, args.length)
        for t in range(args.length):
            model(idx[:, t:t + 1], cache=cache)

    def again():  # the whole text once more for every token, as without a cache
        for t in range(args.length):
            model(idx[:, :t + 1])
    with args.autocast:
        a, b = clock(args.device, cached), clock(args.device, again)
    return {"cable": dict(cached_s=a, uncached_s=b, times_faster=b / a)}


def memory(args):
    """Peak memory of `eval.py --lengths T`, as it reports itself, on a model that was hardly trained."""
    found = {}
    with tempfile.TemporaryDirectory() as tmp:
        for name in args.models:
            flags = ["--n_label", str(args.length)] if name == "label" else []
            flags += ["--block_size", str(args.length)] if name == "learned" else []  # has no other way to be this long
            run = [sys.executable, str(runs.ROOT / "train.py"), "--model", name, "--size", args.size, "--max_iters", "1",
                   "--eval_iters", "1", "--batch_size", "1", "--no-evaluate", "--out_dir", f"{tmp}/{name}",
                   "--device", str(args.device), *flags]
            evaluate = [sys.executable, str(runs.ROOT / "eval.py"), f"{tmp}/{name}", "--lengths", str(args.length),
                        "--tokens", str(args.length), "--device", str(args.device)]
            for command in (run, evaluate):
                if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
                    runs.fail(f"{Path(command[1]).name} failed for {name}")
            found[name] = dict(peak_GB=json.loads(Path(f"{tmp}/{name}/eval.json").read_text())["peak_memory_GB"])
    return found


def listing_attention(q, k, v, pos_emb):
    """CoPE as its paper's Listing 1 goes about it: whole matrices, the gates flipped, summed and flipped back."""
    T = q.size(2)
    s = q @ k.transpose(-1, -2) / math.sqrt(q.size(3)) + torch.full((T, T), float("-inf"), device=q.device).triu(1)
    p = s.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=pos_emb.size(1) - 1)
    z, low, high = q @ pos_emb, p.floor().long(), p.ceil().long()
    w = p - low
    return (s + w * z.gather(-1, high) + (1 - w) * z.gather(-1, low)).softmax(-1) @ v


def flex(T, device, bias):
    """FlexAttention, torch's compiler of biases: bias(b, h, i, j) is added to the logits. Not for CoPE and TRA, which sum over keys."""
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=device)
    return lambda q, k, v: compiled(q, k, v, score_mod=lambda s, b, h, i, j: s + bias(b, h, i, j), block_mask=mask)


def kernel_of(f, q):
    """The Triton kernel that equals f, or None where there is none or it does not run."""
    try:
        import kernels
    except ImportError:
        return None
    return getattr(kernels, getattr(f, "__name__", ""), None) if kernels.usable(q) else None


METHODS = ("sdpa", "cable", "fox", "diff", "tra, decay 0.5", "tra, decay 0.99", "cope, gates 0.5", "cope, gates 0.03")


def case(method, way, T, device, dtype):
    """
    -> (f, its inputs) at B1 H8 d64 on the CPU and B4 H12 d64 on a GPU; None where this way does not exist for the method. CoPE's work
    depends on how soon the counts reach P - 1: gates of 0.5 on average, and of 0.03; TRA's on the decay a survivor, 0.5 and 0.99.
    FlexAttention takes S, g and F as constants: its backward has no gradient for them.
    """
    torch.manual_seed(0)
    B, H, d = (4, 12, 64) if device.type == "cuda" else (1, 8, 64)
    q, k, v = torch.randn(3, B, H, T, d, device=device).to(dtype)
    pos_emb, z = 0.1 * torch.randn(d, 64, device=device), torch.randn(B, H, T, device=device)
    name, _, kind = method.partition(", ")
    if kind == "gates 0.03":
        q[..., 0], k[..., 0] = 7.0, -4.0  # q . k / 8 is 3.5 lower
    S, g, log_f = F.softplus(z).cumsum(-1), F.softplus(z), F.logsigmoid(z).cumsum(-1)
    f, more = dict(sdpa=(plain_attention, ()), cable=(cable_attention, (S, g)), fox=(fox_attention, (log_f,)),
                   diff=(functools.partial(diff_attention, lam=0.5), ()), cope=(cope_attention, (pos_emb,)),
                   tra=(tra_attention, (torch.full_like(z, math.log(float(kind.split()[-1] or 1))),) if name == "tra" else ()))[name]
    if way == "kernel":
        f = kernel_of(f, q)
    elif way == "compiled" and name != "sdpa":
        f = torch.compile(f, dynamic=False)
    elif way == "flex":
        bias = dict(cable=lambda b, h, i, j: -g[b, h, i] * (S[b, h, i] - S[b, h, j]),
                    fox=lambda b, h, i, j: log_f[b, h, i] - log_f[b, h, j])
        f, more = flex(T, device, bias[name]) if name in bias else None, ()
    elif way == "listing":
        f, more = listing_attention if method == "cope, gates 0.5" and T <= 4096 else None, (pos_emb.to(dtype),)
    elif way != "plain":
        f = None
    return f and (f, (q, k, v, *more))


def call(f, inputs, backward):
    """-> what to time: forward alone without gradients, or forward and backward to every input."""
    if not backward:
        return torch.no_grad()(lambda: f(*inputs))
    inputs = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(f(*inputs).sum(), inputs)


def extra_memory(method, way, T, device, dtype, backward, threads):
    """Peak memory of one call beyond its inputs, in GB. On the CPU this is resident memory, and wants a process of its own."""
    step = call(*case(method, way, T, device, dtype), backward)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) / 1e9
    else:
        torch.set_num_threads(threads)
        before = runs.peak_memory(device)
    step()
    return runs.peak_memory(device) - before


def attention(args):
    """Forward alone, and forward and backward, by length. A way that fails (no compiler, memory or backward) has its reason instead."""
    found, dtype = {}, getattr(torch, args.dtype)
    for T in args.lengths or ([1024, 4096] if args.device.type == "cpu" else [1024, 2048, 4096, 8192, 16384, 65536]):
        rows = found[T] = {}
        longest = 16384 if args.device.type == "cuda" else 4096  # with backward: the plain functions keep their rows' biases for it
        for key in ("forward", "both")[:1 if T > longest else 2]:
            steps = {}
            for method, way in [("sdpa", "plain"), *((m, w) for m in METHODS[1:] for w in args.ways)]:
                made, name = case(method, way, T, args.device, dtype), f"{method}: {way}" if way != "plain" else method
                if made is None:
                    continue
                step = call(*made, key == "both")
                try:
                    step()
                    steps[name] = step
                except Exception as e:  # whatever another library says
                    rows.setdefault(name, {})[f"{key}_failed"] = (str(e).strip() or type(e).__name__).splitlines()[0][:100]
            seconds = turns(args.device, steps, args.repeats, warmup=1)
            del steps
            for name, t in seconds.items():
                row = rows.setdefault(name, {})
                row |= {f"{key}_ms": 1000 * t, f"{key}_of_sdpa": t / seconds["sdpa"]}
                method, _, way = name.partition(": ")
                if way in ("compiled", "flex") or not runs.peak_memory(args.device):
                    continue  # the compiler's own memory would be counted too
                what = (method, way or "plain", T, args.device, dtype, key == "both", torch.get_num_threads())
                if args.device.type == "cpu":
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        row[f"{key}_GB"] = pool.apply(extra_memory, what)
                else:
                    row[f"{key}_GB"] = extra_memory(*what)
        print(f"  T = {T:,}: {len(rows)} ways", flush=True)
    return found


def kernel_report(fn, constants, target):
    """Registers, spilled bytes and shared memory of one Triton function with these tiles and switches, by the ptxas that Triton brings."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kinds = dict.fromkeys("q k v gk z o do dq dk dv dgk Q K V Out dOut dQ dK dV".split(), "bf16")
    kinds |= dict(limit="i32", first="i32", start="i64", last="i64")  # all else are float32
    numbers = ("H", "Tq", "Tk", "qb", "qh", "qt", "kb", "kh", "kt", "vb", "vh", "vt")
    signature = {a: "constexpr" if a in constants else "i32" if a in numbers else "fp32" if a == "scale" else "*" + kinds.get(a, "fp32")
                 for a in fn.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, a in enumerate(fn.arg_names) if signature[a][0] == "*" or a[1:] in ("b", "h", "t")}
    source = ASTSource(fn, signature, {(n,): constants[a] for n, a in enumerate(fn.arg_names) if a in constants}, aligned)
    options = {k: constants[k] for k in ("num_warps", "num_stages")}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(compiled.asm["ptx"])
        f.flush()
        for name in ("ptxas", "ptxas-blackwell"):  # the one that knows this version of PTX
            command = [str(Path(triton.__file__).parent / "backends/nvidia/bin" / name), "-v",
                       f"--gpu-name=sm_{target}{'a' * (target == 90)}", f.name, "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True)
            if not said.returncode:
                break
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said.stderr)
    return dict(registers=int(re.search(r"Used (\d+) registers", said.stderr)[1]), spill_stores=int(spills[1]), spill_loads=int(spills[2]),
                shared_bytes=compiled.metadata.shared)


def kernel_jobs(d):
    """-> (name, Triton function, its tiles and switches) of every kernel as it runs for bfloat16 heads of size d."""
    from kernels import cope, separable, tra
    q = torch.empty(1, 1, 1, d, dtype=torch.bfloat16)
    for log in (False, True):
        tiles = separable.tiles(d, q.dtype, log)
        for fn, (BM, BN, warps, stages) in zip((separable.forward_kernel, separable.row_kernel, separable.column_kernel), tiles):
            C = 1 << (d - 1).bit_length()
            yield f"separable {fn.__name__}{' log' * log}", fn, dict(D=d, C=C, BM=BM, BN=BN, LOG=log, num_warps=warps, num_stages=stages)
    for fn in (cope.prepare, cope.forward, cope.backward_rows, cope.backward_columns):
        for kind, sep in (("band", False), ("band", True), ("tail", False)):
            if fn is cope.prepare and (kind, sep) != ("band", False):
                continue
            tiles = cope.tiles(q, "tail_columns" if fn is cope.backward_columns and kind == "tail" else kind)
            yield f"cope {fn.__name__} {kind}{' sep' * sep}", fn, dict(P=64, SEP=sep, BAND=kind == "band", **tiles)
    for fn in (tra.forward, tra.backward_rows, tra.backward_columns):
        yield f"tra {fn.__name__}", fn, tra.tiles(q)


def kernels(args):
    """Every kernel in bfloat16, for head sizes 64 and 128, compiled for an A100 and an H100. No GPU is needed."""
    if not importlib.util.find_spec("triton"):
        runs.fail("there is no Triton here: pip install triton")
    return {f"{name}, d {d}, sm_{target}": kernel_report(fn, constants, target)
            for target in (80, 90) for d in (64, 128) for name, fn, constants in kernel_jobs(d)}


def main():
    parser = runs.make_parser(__doc__)
    kinds = dict(attention=attention, train=train, decode=decode, generate=generate, memory=memory, kernels=kernels)
    parser.add_argument("kinds", nargs="*", help=f"which: {' '.join(kinds)}; default: all but kernels")
    parser.add_argument("--models", nargs="+", default=list(runs.models()), help="default: every model there is")
    parser.add_argument("--size", default="nano", help="nano tiny small medium (default: nano)")
    parser.add_argument("--context", type=int, default=4096, help="decode: tokens in the cache (default: 4096)")
    parser.add_argument("--length", type=int, default=0, help="tokens: generate (default: 2048), memory (16384)")
    parser.add_argument("--lengths", type=int, nargs="+", help="attention: tokens (default: 1024 4096, on a GPU to 65536)")
    parser.add_argument("--ways", nargs="+", default=[], help=f"attention: which of {' '.join(WAYS)}; default: all, on the CPU plain and "
                                                              "listing, as compiling takes minutes there")
    parser.add_argument("--repeats", type=int, default=9, help="rounds; the median counts (default: 9)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 (default: auto)")
    parser.add_argument("--out", help="where to write the JSON (default: results/bench.<device>.json)")
    args = runs.parse(parser)
    for given, known in ((args.kinds, kinds), (args.models, runs.models()), ([args.size], Task.defaults), (args.ways, WAYS)):
        for word in given:
            if word not in known:
                runs.fail(f"unknown {word!r}: {runs.nearest(word, known)}")
    if args.length < 0 or min(args.context, args.repeats, *(args.lengths or [1])) < 1:
        runs.fail("--length must be 0 (the default) or more, --lengths, --context and --repeats at least 1")
    if args.length and args.kinds == ["attention"]:
        runs.fail("attention takes --lengths, one or several")
    args.models = ["nope", *(m for m in args.models if m != "nope")]  # what the others are measured by
    args.device = runs.pick_device(args.device)
    args.autocast, dtype = runs.autocast(args.device, args.dtype)
    args.dtype = dtype.split()[0]
    args.ways = args.ways or (["plain", "listing"] if args.device.type == "cpu" else WAYS)
    args.vocab_size = 257 if args.size == "nano" else 50304
    print(f"{args.size} on {args.device}, {dtype}, {torch.get_num_threads()} threads")
    result = dict(command=" ".join(["python bench.py", *sys.argv[1:]]), environment=runs.environment(), size=args.size, dtype=dtype)
    out = Path(args.out or runs.ROOT / "results" / f"bench.{args.device.type}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    length = args.length
    for kind in args.kinds or list(kinds)[:-1]:
        args.length = length or dict(generate=2048, memory=16384).get(kind)
        result[kind] = found = kinds[kind](args)
        print(f"\n{kind}")
        rows = {f"{T:,} {name}": row for T, rows in found.items() for name, row in rows.items()} if kind == "attention" else found
        for name, row in rows.items():
            cells = (f"{k} {v:<10.4g}" if isinstance(v, (int, float)) else f"{k}: {v} " for k, v in row.items())
            print(f"  {name:{max(map(len, rows)) + 2}}" + "".join(cells), flush=True)
        runs.write_json(out, result)
    print(f"\nwrote {out}")
    if "attention" in result:
        sys.exit(runs.script("plot.py", "attention", out))


if __name__ == "__main__":
    runs.run(main)
