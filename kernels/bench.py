"""
Speed and memory of whole models, beside the plain GPT, and of attentions alone, beside torch's own
scaled_dot_product_attention on the same q, k and v.

    python -m kernels.bench train --size small
        training steps: tok/s, and the ratio to nope; on a GPU compiled, 8 sequences a step
    python -m kernels.bench decode --lengths 4096 --models rope "rope, rerope"
        one cached token after a long context: ms; also of RoPE repaired at test time
    python -m kernels.bench attention --models cable [--run out/cable-stdlib-nano]
        plain as in the model file, and the way of kernels/, which is compared with it; beyond
        4,096 tokens no plain one, which keeps T x T, unless --ways names it

Candidates take turns: a noisy machine disturbs all alike. A time is the median of --repeats.
"""
import argparse
import multiprocessing
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import kernels
from common import ROOT
from common.attention import attention_inputs, attention_module, has_ways, plain_function
from common.checkpoint import check_text, load_run
from common.device import environment, setup
from common.exits import fail, in_one_line, value_errors_fail
from common.files import write_json
from common.flags import Parser, add_run_flags
from common.names import is_encoder, make_model, make_task, models, new_cache, that_read
from data import piece
from data.text import Task


def turns(args, steps):
    """{name: f} -> {name: median seconds}; a round runs each f once, two warm up."""
    on_cpu = args.device.type == "cpu"
    wait = (torch.cpu if on_cpu else torch.accelerator).synchronize
    seconds = {name: [] for name in steps}
    for _ in range(2 + args.repeats):
        for name, f in steps.items():
            start = time.perf_counter()
            f()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[2:]) for name, times in seconds.items()}


def show(title, rows):
    """Print rows, a line each -> rows"""
    print(title)
    for name, row in rows.items():
        cells = [f"{key} {y:.4g}" for key, y in row.items()]
        print(f"  {name:26}", *cells, sep="  ", flush=True)
    return rows


# -----------------------------------------------------------------------------
# whole models

def build(args, names, **shape):
    """-> name, model and random tokens (B, T + 1) of models of the same shape."""
    usual = Task.defaults[args.size]
    for name in names:
        torch.manual_seed(0)
        base, _, repair = name.partition(", ")
        config = usual | dict(vocab_size=args.vocab_size) | shape | models()[base][1]
        if repair:  # of a model that was trained on the usual length
            config |= dict(repair=repair, block_size=usual["block_size"])
        model = make_model(config | dict(model=base)).to(args.device)
        size = config["batch_size"], config["block_size"] + 1
        yield name, model, torch.randint(args.vocab_size, size, device=args.device)


def compared(args):
    """nope and --models. Without these: at nano size the causal ones of all model files."""
    names = ["rope", "alibi", "cable", "fox", "tra", "cope"]
    if args.size == "nano":  # but for those of experiments/
        names = [name for name in that_read(False)
                 if not models()[name][0].__name__.startswith("experiments.")]
    return list(dict.fromkeys(["nope", *(args.models or names)]))


def training_step(args, name):
    """-> a step of training a model, compiled on a GPU, and how many tokens it takes."""
    on_gpu = args.device.type == "cuda"
    (_, model, idx), = build(args, [name], **dict(batch_size=8) if on_gpu else {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run = torch.compile(model) if on_gpu else model

    def step():
        with args.autocast:
            loss = run(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step, idx[:, 1:].numel()


def compile_first(args, name):
    """In a process of its own: what is compiled here is found on disk by whoever comes next."""
    args.device, args.autocast, _ = setup(args)
    training_step(args, name)[0]()


def train(args, _):
    names = compared(args)
    if args.device.type == "cuda":  # one after the other, seven models took 15 minutes
        asked = argparse.Namespace(**vars(args) | dict(autocast=None))  # the child makes its own
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(3, context) as pool:  # GPT-2 small may take 20 GB each
            list(pool.map(compile_first, [asked] * len(names), names))
    steps = {}
    for name in names:
        steps[name], tokens = training_step(args, name)
    seconds = turns(args, steps)
    return show("train", {
        name: dict(tok_s=round(tokens / t), of_nope=seconds["nope"] / t)
        for name, t in seconds.items()})


def decode(args, _):
    n = (args.lengths or [4096])[0]

    def prepare(model, idx):
        cache = new_cache(model.eval(), n + 10)
        for part in idx[:, :n].split(piece(model, n), 1):
            model(part, cache=cache)

        def step():
            for token in idx[:, :10].split(1, 1):
                model(token, cache=cache)
            cache.t = n  # back to where we were
        return step
    with torch.no_grad(), args.autocast:
        cases = build(args, compared(args), block_size=n + 10, batch_size=1)
        seconds = turns(args, {name: prepare(model, idx) for name, model, idx in cases})
    return show("decode", {
        name: dict(ms=1000 * t / 10, times_nope=t / seconds["nope"])
        for name, t in seconds.items()})


# -----------------------------------------------------------------------------
# attentions alone

def attention(args, save):
    """By length and name: forward alone, and forward and backward. save(rows) after each."""
    rows = {}
    for T in args.lengths or [1024, 4096]:
        rows[T] = {}
        much = T > MANY and "plain" in args.ways  # which keeps T x T for backward
        for name, model, calls in inputs(args, T):
            for key in ("forward",) if much else ("forward", "both"):
                measure(args, rows[T], name, model, calls, key)
                save(rows)
        show(f"attention, {T:,} tokens", rows[T])
        for name, row in rows[T].items():
            if not row.get("differs", 0) < 0.1:
                fail(f"{name} is not equal to the plain function at {T:,} tokens: use --kernel off")
    return rows


def inputs(args, T):
    """
    -> name, model, calls: the arguments of a model's plain function, a tuple for every layer.
    B1 H8 d64 on the CPU, B4 H12 d64 on a GPU; or all layers of --run.
    """
    B, H = (4, 12) if args.device.type == "cuda" else (1, 8)
    first = {module: name for name, (module, _) in reversed(models().items())}
    cases = build(
        args, args.models or first.values(),
        n_layer=1, n_head=H, n_embd=64 * H, block_size=T, batch_size=B)
    if args.run:
        run = load_run(args.run, args.device, changes=args.set)
        check_text(run.config, run.checkpoint["source"])
        task = make_task(run.config | dict(block_size=T))
        x, _ = task.tensors(task.splits[1], 1, np.random.default_rng(0))
        cases = [(run.name, run.model, x.to(args.device))]
    for name, model, idx in cases:
        if T > MANY and not (args.ways or has_ways(model)):
            continue
        with (torch.no_grad(), args.autocast, attention_inputs(model) as calls,
              value_errors_fail()):  # positions that end
            model(idx[:, :T])
        yield name, model, calls


def ways(args, name, model, calls):
    """{label: function} of what can be had here; the first is torch's own."""
    plain, causal = plain_function(attention_module(model)), not is_encoder(model)
    T = calls[0][1].size(2)
    functions = {"sdpa": lambda q, k, v, *_: F.scaled_dot_product_attention(
        q, k, v, is_causal=causal)}
    chosen = args.ways or (WAYS if T <= MANY else ["kernel"])
    if "plain" in chosen:
        functions[name] = plain
    with torch.no_grad():
        fast = has_ways(model) and kernels.faster(plain.__name__, *calls[0][:3])
        if "kernel" in chosen and fast and fast(*calls[0]) is not None:  # it may decline
            functions[f"{name}: kernel"] = fast
    return functions


def step_of(f, model, calls, backward):
    """-> a function to time: all layers' outputs, and with backward all inputs' gradients."""
    tensors = [*model.parameters()]  # an argument may be a function of them

    def leaf(x):
        if not torch.is_tensor(x) or not x.is_floating_point():
            return x
        tensors.append(x.detach().requires_grad_(backward))
        return tensors[-1]
    calls = [[leaf(x) for x in inputs] for inputs in calls]

    def step():
        with torch.set_grad_enabled(backward):
            outputs = [f(*inputs) for inputs in calls]
        if backward:
            total = sum(y.sum() for y in outputs)
            outputs += torch.autograd.grad(total, tensors, allow_unused=True)
        return outputs
    return step


def measure(args, rows, name, model, calls, key):
    """One case, forward or both, into {label: row}; sdpa's row is that of the first case."""
    kernel, backward = f"{name}: kernel", key == "both"
    steps = {label: step_of(f, model, calls, backward)
             for label, f in ways(args, name, model, calls).items()}
    seconds = turns(args, steps)
    for label, t in seconds.items():
        row = rows.setdefault(label, {})
        row.setdefault(f"{key}_ms", 1000 * t)
        row.setdefault(f"{key}_of_sdpa", t / seconds["sdpa"])
        if args.device.type == "cuda":  # the most that it needs beyond what is held before
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.max_memory_allocated()
            steps[label]()
            row.setdefault(f"{key}_GB", (torch.cuda.max_memory_allocated() - before) / 1e9)
    if backward and {name, kernel} <= steps.keys():
        rows[kernel]["differs"] = difference(steps[kernel](), steps[name]())


def difference(ours, theirs):
    """The largest difference of an output or a gradient, over the largest value of the same."""
    return max(((a - b).abs().max() / b.abs().max()).item()
               for a, b in zip(ours, theirs) if b is not None)


# -----------------------------------------------------------------------------

WHAT = dict(train=train, decode=decode, attention=attention)
WAYS = "plain", "kernel"
MANY = 4096  # tokens: beyond, a matrix of T x T for every head is too large


def parse(argv):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("what", nargs="+", choices=WHAT)
    add("--models", nargs="+", help="default: the causal ones of the model files; at other sizes "
                                    "seven; attention: the first name of every file")
    add("--run", help="attention: a trained run, whose layers' inputs to take")
    add("--size", default="nano", choices=Task.defaults, help="default: nano")
    add("--lengths", type=int, nargs="+", help="tokens; default: attention 1024 4096, decode 4096")
    add("--ways", nargs="+", default=(), choices=WAYS,
        help="attention; default: both, beyond 4,096 tokens kernel")
    add("--repeats", type=int, default=9, help="rounds; the median counts (default: 9)")
    add("--out", help="where to write the JSON (default: in results/, by what and device)")
    add_run_flags(parser)
    args = parser.parse_args(argv)
    if min(args.repeats, *(args.lengths or [1])) < 1:
        fail("--lengths and --repeats must be at least 1")
    if args.set and not args.run:
        fail("--set is for the model of --run")
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    args.device, args.autocast, words = setup(args)
    args.vocab_size = 257 if args.size == "nano" else 50304
    stem = ".".join(["bench", *args.what, args.device.type])
    out = Path(args.out or ROOT / "results" / f"{stem}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "kernels.bench", *argv])
    result = dict(command=command, environment=environment(), size=args.size, where=words)
    for what in args.what:
        def save(rows, what=what):  # what was measured stays, should time or memory end
            result[what] = rows
            write_json(out, result)
        save(WHAT[what](args, save))
    print(f"wrote {out}")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
