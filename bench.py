"""
Speed and memory: of whole models, each beside the plain one (nope, which is torch's scaled_dot_product_attention alone), and of
the attention functions, each beside that function itself.

    python bench.py                            everything below, at nano size
    python bench.py train --models cable rope  training steps: tok/s, and the ratio to nope
    python bench.py decode --context 4096      one cached token after a long context: ms, and the ratio to nope
    python bench.py generate --length 2048     a whole text with and without the cache
    python bench.py memory --length 16384      peak memory of eval.py on one long window
    python bench.py attention --length 4096    every method's attention alone, and CoPE as in its paper's listing

Ratios come from one run in which the models take turns, so that a noisy machine disturbs all alike; each number
is the median of --repeats. Writes results/bench.<device>.json.
"""
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import runs
from data.text import Task
from model_baseline import attention as plain_attention
from model_cable import cable_attention
from model_cope import cope_attention
from model_diff import diff_attention
from model_fox import fox_attention
from model_tra import tra_attention


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


def attentions(length, device):
    """{name: f} at B1 H8 d64. CoPE's work depends on how soon the counts reach P - 1: gates of 0.5 on average, and of 0.03."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, length, 64, device=device)
    far_q, far_k = q.clone(), k.clone()
    far_q[..., 0], far_k[..., 0] = 7.0, -4.0  # q . k / 8 is 3.5 lower
    pos_emb = 0.1 * torch.randn(64, 64, device=device)
    z = torch.randn(1, 8, length, device=device)
    S, log_f = F.softplus(z).cumsum(-1), F.logsigmoid(z)
    return {"sdpa": lambda: plain_attention(q, k, v), "cable": lambda: cable_attention(q, k, v, S, F.softplus(z)),
            "fox": lambda: fox_attention(q, k, v, log_f.cumsum(-1)), "diff": lambda: diff_attention(q, k, v, 0.5),
            "tra": lambda: tra_attention(q, k, v, log_f), "cope, gates 0.5": lambda: cope_attention(q, k, v, pos_emb),
            "cope, gates 0.03": lambda: cope_attention(far_q, far_k, v, pos_emb),
            "cope, listing": lambda: listing_attention(q, k, v, pos_emb)}


def extra_memory(name, length, threads):
    """Peak resident memory of one call in a process of its own, less that of its inputs, in GB."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        f, before = attentions(length, "cpu")[name], runs.peak_memory(torch.device("cpu"))
        f()
    return runs.peak_memory(torch.device("cpu")) - before


@torch.no_grad()
def attention(args):
    """Forward alone. The paper's listing is left out above 4,096 tokens, where its matrices fill the memory."""
    steps = attentions(args.length, args.device)
    if args.length > 4096:
        del steps["cope, listing"]
    seconds = turns(args.device, steps, args.repeats, warmup=1)
    rows = {name: dict(ms=1000 * t, times_sdpa=t / seconds["sdpa"], of_cope=t / seconds["cope, gates 0.5"]) for name, t in seconds.items()}
    if args.device.type == "cpu" and runs.peak_memory(args.device):
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for name, row in rows.items():
                row["extra_GB"] = pool.apply(extra_memory, (name, args.length, torch.get_num_threads()))
    return rows


def main():
    parser = runs.make_parser(__doc__)
    kinds = dict(attention=attention, train=train, decode=decode, generate=generate, memory=memory)
    parser.add_argument("kinds", nargs="*", help=f"which: {' '.join(kinds)}; default: all")
    parser.add_argument("--models", nargs="+", default=list(runs.models()), help="default: every model there is")
    parser.add_argument("--size", default="nano", help="nano tiny small medium (default: nano)")
    parser.add_argument("--context", type=int, default=4096, help="decode: tokens in the cache (default: 4096)")
    parser.add_argument("--length", type=int, default=0, help="tokens: attention (default: 4096), generate (2048), memory (16384)")
    parser.add_argument("--repeats", type=int, default=9, help="rounds; the median counts (default: 9)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 (default: auto)")
    parser.add_argument("--out", help="where to write the JSON (default: results/bench.<device>.json)")
    args = runs.parse(parser)
    for given, known in ((args.kinds, kinds), (args.models, runs.models()), ([args.size], Task.defaults)):
        for word in given:
            if word not in known:
                runs.fail(f"unknown {word!r}: {runs.nearest(word, known)}")
    if args.length < 0 or args.context < 1 or args.repeats < 1:
        runs.fail("--length must be 0 (the default) or more, --context and --repeats at least 1")
    args.models = ["nope", *(m for m in args.models if m != "nope")]  # what the others are measured by
    args.device = runs.pick_device(args.device)
    args.autocast, dtype = runs.autocast(args.device, args.dtype)
    args.vocab_size = 257 if args.size == "nano" else 50304
    print(f"{args.size} on {args.device}, {dtype}, {torch.get_num_threads()} threads")
    result = dict(command=" ".join(["python bench.py", *sys.argv[1:]]), environment=runs.environment(), size=args.size, dtype=dtype)
    out = Path(args.out or runs.ROOT / "results" / f"bench.{args.device.type}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    length = args.length
    for kind in args.kinds or kinds:
        args.length = length or dict(generate=2048, memory=16384, attention=4096).get(kind)
        result[kind] = kinds[kind](args)
        print(f"\n{kind}")
        for name, row in result[kind].items():
            print(f"  {name:20}" + "".join(f"{k} {v:<12.4g}" for k, v in row.items()), flush=True)
        runs.write_json(out, result)
    print(f"\nwrote {out}")


if __name__ == "__main__":
    runs.run(main)
