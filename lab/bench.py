"""
Speed and memory of whole models, beside the plain GPT, and of attentions alone, beside torch's own
scaled_dot_product_attention on the same q, k and v.

    python -m lab.bench train --size small --models cable tra
        training steps: tok/s, and the ratio to nope; on a GPU compiled, 8 sequences a step
    python -m lab.bench decode --lengths 4096 --models rope "rope, rerope"
        one cached token after a long context: ms; also of RoPE repaired at test time
    python -m lab.bench attention --models cable [--run out/cable-stdlib-nano] [--ways kernel]
        plain as in the model file, which keeps T x T, and the way of kernels/

Candidates take turns: a noisy machine disturbs all alike. A time is the median of --repeats.
"""
import json
import shlex
import statistics
import sys
import time
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
from common.names import (
    is_encoder,
    main_models,
    make_model,
    make_task,
    models,
    new_cache,
    that_read,
)
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
    """nope and --models; without these the causal ones of all model files."""
    names = args.models or [name for name in main_models() if name in that_read(False)]
    return list(dict.fromkeys(["nope", *names]))


def train(args):
    steps = {}
    on_gpu = args.device.type == "cuda"
    shape = dict(batch_size=8) if on_gpu else {}
    for name, model, idx in build(args, compared(args), **shape):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        run = torch.compile(model) if on_gpu else model

        def step(run=run, optimizer=optimizer, idx=idx):
            with args.autocast:
                loss = run(idx[:, :-1], idx[:, 1:])[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps[name] = step
    seconds = turns(args, steps)
    return {name: dict(tok_s=round(idx[:, 1:].numel() / t), of_nope=seconds["nope"] / t)
            for name, t in seconds.items()}


def decode(args):
    steps = {}
    n = (args.lengths or [4096])[0]
    with torch.no_grad(), args.autocast:
        for name, model, idx in build(args, compared(args), block_size=n + 10, batch_size=1):
            cache = new_cache(model.eval(), n + 10)
            for part in idx[:, :n].split(piece(model, n), 1):
                model(part, cache=cache)

            def step(model=model, cache=cache, idx=idx):
                for token in idx[:, :10].split(1, 1):
                    model(token, cache=cache)
                cache.t = n  # back to where we were
            steps[name] = step
        seconds = turns(args, steps)
    return {name: dict(ms=1000 * t / 10, times_nope=t / seconds["nope"])
            for name, t in seconds.items()}


# -----------------------------------------------------------------------------
# attentions alone

def attention(args):
    """By length and name: forward alone, and forward and backward; sdpa's is of the first case."""
    rows = {}
    for T in args.lengths or [1024, 4096]:
        rows[T] = {}
        for name, model, calls in inputs(args, T):
            functions = ways(args, name, model, calls)
            for key in ("forward", "both"):
                steps = {label: step_of(f, calls, key == "both") for label, f in functions.items()}
                seconds = turns(args, steps)
                for label, t in seconds.items():
                    row = rows[T].setdefault(label, {})
                    row.setdefault(f"{key}_ms", 1000 * t)
                    row.setdefault(f"{key}_of_sdpa", t / seconds["sdpa"])
                    if args.device.type == "cuda":
                        row.setdefault(f"{key}_GB", memory_of(steps[label]))
    return rows


def inputs(args, T):
    """
    -> name, model, calls: the arguments of a model's plain function, a tuple for every layer.
    B1 H8 d64 on the CPU, B4 H12 d64 on a GPU; or all layers of --run.
    """
    B, H = (4, 12) if args.device.type == "cuda" else (1, 8)
    first = {module: name for name, (module, _) in reversed(models().items())}
    cases = build(args, args.models or first.values(), n_layer=1, n_head=H, n_embd=64 * H,
                  block_size=T, batch_size=B)
    if args.run:
        run = load_run(args.run, args.device, changes=args.set)
        check_text(run.config, run.checkpoint["source"])
        task = make_task(run.config | dict(block_size=T))
        x, _ = task.tensors(task.splits[1], 1, np.random.default_rng(0))
        cases = [(run.name, run.model, x.to(args.device))]
    for name, model, idx in cases:
        with (torch.no_grad(), args.autocast, attention_inputs(model) as calls,
              value_errors_fail()):  # positions that end
            model(idx[:, :T])
        yield name, model, calls


def ways(args, name, model, calls):
    """{label: function} of what can be had here; the first is torch's own."""
    plain = plain_function(attention_module(model))
    causal = not is_encoder(model)
    functions = {"sdpa": lambda q, k, v, *_: F.scaled_dot_product_attention(
        q, k, v, is_causal=causal)}
    if "plain" in args.ways:
        functions[name] = plain
    with torch.no_grad():
        fast = has_ways(model) and kernels.faster(plain.__name__, *calls[0][:3])
        if "kernel" in args.ways and fast and fast(*calls[0]) is not None:  # it may decline
            functions[f"{name}: kernel"] = fast
    return functions


def step_of(f, calls, backward):
    """-> a function to time: all layers' outputs, and with backward all inputs' gradients."""
    leaves = []

    def leaf(x):
        if not torch.is_tensor(x) or not x.is_floating_point():
            return x
        leaves.append(x.detach().requires_grad_(backward))
        return leaves[-1]
    calls = [[leaf(x) for x in inputs] for inputs in calls]

    def step():
        with torch.set_grad_enabled(backward):
            total = sum(f(*inputs).sum() for inputs in calls)
        if backward:
            torch.autograd.grad(total, leaves, allow_unused=True)
    return step


def memory_of(step):
    """The most GB that it needs beyond what is held before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


# -----------------------------------------------------------------------------

WHAT = dict(train=train, decode=decode, attention=attention)
WAYS = "plain", "kernel"


def parse(argv):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("what", nargs="+", choices=WHAT)
    add("--models", nargs="+", help="default: the causal ones of the model files; attention: the "
                                    "first name of every file")
    add("--run", help="attention: a trained run, whose layers' inputs to take")
    add("--size", default="nano", choices=Task.defaults, help="default: nano")
    add("--lengths", type=int, nargs="+", help="tokens; default: attention 1024 4096, decode 4096")
    add("--ways", nargs="+", default=WAYS, choices=WAYS, help="attention; default: both")
    add("--repeats", type=int, default=9, help="rounds; the median counts (default: 9)")
    add("--out", help="where to write the JSON (default: in results/, by what and device)")
    add_run_flags(parser)
    args = parser.parse_args(argv)
    if min(args.repeats, *(args.lengths or [1])) < 1:
        fail("--lengths and --repeats must be at least 1")
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    args.device, args.autocast, words = setup(args)
    args.vocab_size = 257 if args.size == "nano" else 50304
    out = args.out or ROOT / "results" / ".".join(["bench", *args.what, args.device.type, "json"])
    result = dict(command=shlex.join(["python", "-m", "lab.bench", *argv]),
                  environment=environment(), size=args.size, where=words)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    for what in args.what:
        result[what] = WHAT[what](args)
        print(json.dumps(result[what], indent=1), flush=True)
        write_json(out, result)
    print(f"wrote {out}")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
