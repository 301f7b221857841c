"""
Score checkpoints far beyond the training length: perplexity by length, and loss by position in the longest window.

    python eval.py                                   the newest checkpoint, at 1, 2, 4, 8 and 16 x its training length
    python eval.py out/cable-* out/rope-*            several, in one table and one figure
    python eval.py --lengths 512 16384 --tokens 0    other lengths, the whole split

The text is cut into windows that do not overlap; **every length scores the same tokens**. Writes a JSON and a figure.
"""
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import runs


@torch.no_grad()
def token_losses(model, stream, T, device, context):
    """
    stream (N + 1,) tokens -> (N,) losses, each token seeing only its own window of at most T tokens.
    Long windows go through the model in pieces, over a cache: memory does not grow with T x T, nor with T x vocabulary.
    """
    N, piece, losses = len(stream) - 1, runs.piece(model), []
    whole = N // T * T
    group = max(1, piece // T) * T  # several short windows make a batch
    for a, b in [(a, min(a + group, whole)) for a in range(0, whole, group)] + [(whole, N)] * (whole < N):
        t = min(T, b - a)  # the last window may be shorter
        x, y = (torch.from_numpy(stream[a + s:b + s].astype(np.int64)).view(-1, t).to(device) for s in (0, 1))
        cache = runs.new_cache(model, t) if t > piece else None
        loss = []
        for p in range(0, t, piece):
            with context:
                logits = model(x[:, p:p + piece], cache=cache)[0]
            loss.append(F.cross_entropy(logits.float().transpose(1, 2), y[:, p:p + piece], reduction="none"))
        losses.append(torch.cat(loss, 1).flatten().cpu())
    return torch.cat(losses).numpy()


def by_position(losses, T):
    """Mean loss at the positions of a window of T, in bins that grow by sqrt(2) -> [[first, last, loss], ...]."""
    mean = losses[:len(losses) // T * T].reshape(-1, T).mean(0)
    edges = [0, *(e for i in range(8, 60) if (e := round(2 ** (i / 2))) < T), T]  # 0, 16, 23, 32, 45, ... T
    return [[a, b - 1, float(mean[a:b].mean())] for a, b in zip(edges, edges[1:])]


def main():
    parser = runs.make_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", help="run folders or checkpoint files; default: the newest under out/")
    parser.add_argument("--lengths", type=int, nargs="+", help="window lengths; default: 1, 2, 4, 8, 16 x the training length")
    parser.add_argument("--tokens", type=int, default=131072, help="how much of the split to score; 0 is all (default: 131072)")
    parser.add_argument("--split", default="test", help="train, val or test (default: test)")
    parser.add_argument("--data", type=runs.absolute, help="another corpus, file or folder than the runs were trained on")
    parser.add_argument("--out", help="where to write, without extension; default: eval.json and eval.png in the run's folder, "
                                      "out/eval for several runs")
    parser.add_argument("--seed", type=int, default=1337, help="of models that draw at test time (label)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 (default: auto)")
    args = runs.parse(parser)
    device = runs.pick_device(args.device)
    context, dtype = runs.autocast(device, args.dtype)
    paths = [runs.find_checkpoint(p) for p in args.checkpoints or [None]]
    loaded = [runs.load_run(p, device) for p in paths]

    first = loaded[0][1]
    for path, (_, config, _) in zip(paths, loaded):
        if not args.data and config["data"] != first["data"]:
            runs.fail(f"{path} was trained on {config['data']}, {paths[0]} on {first['data']}: say which to score with --data")
        if config["tokenizer"] != first["tokenizer"]:
            runs.fail("perplexities of different tokenizers cannot be compared: "
                      f"{path} has {config['tokenizer']}, {paths[0]} {first['tokenizer']}")
    task = runs.make_task(first | dict(data=args.data or first["data"], block_size=1))
    for path, (*_, checkpoint) in zip(paths, loaded):
        if not args.data and checkpoint["source"] != task.meta["sha256"]:
            runs.fail(f"the text behind {first['data']} is not what {path} was trained on: its training documents may be in this split. "
                      f"To score it all the same, name the text: --data {first['data']}")
    if args.split not in task.splits:
        runs.fail(f"unknown split {args.split!r}: {runs.nearest(args.split, task.splits)}")
    if args.tokens < 0 or min(args.lengths or [1]) < 1 or not 0 <= args.seed < 1 << 63:
        runs.fail("--lengths must be at least 1, --tokens and --seed 0 or more")
    stream = task.tokens(args.split)
    stream = stream[:args.tokens + 1] if args.tokens else stream
    lengths = sorted(set(args.lengths or [first["block_size"] * m for m in (1, 2, 4, 8, 16)]))
    if not args.lengths and len(stream) <= lengths[-1]:
        lengths = [T for T in lengths if T < len(stream)] or lengths[:1]
        print(f"the split has {len(stream):,} tokens: lengths up to {lengths[-1]} only")
    if len(stream) <= lengths[-1]:
        runs.fail(f"{len(stream):,} tokens of the {args.split} split are too few for a window of {lengths[-1]}: "
                  "take --tokens 0, shorter --lengths or more text")

    print(f"perplexity on {len(stream) - 1:,} tokens of {task.meta['corpus']} ({args.split}), the same at every length; {device}, {dtype}")
    width = max(len(str(p.parent.name)) for p in paths)
    print(" " * width + "".join(f"{T:>10}" for T in lengths))
    results = []
    for path, (model, config, checkpoint) in zip(paths, loaded):
        row = dict(name=path.parent.name, model=config["model"], seed=config["seed"], checkpoint=path.name, iter=checkpoint["iter"],
                   train_seconds=round(checkpoint["seconds"]), block_size=config["block_size"],
                   parameters=sum(p.numel() for p in model.parameters()), config=config, perplexity={}, eval_seconds={})
        print(f"{row['name']:<{width}}", end="", flush=True)
        notes = []
        for T in lengths:
            torch.manual_seed(args.seed)
            start = time.time()
            try:
                losses = token_losses(model, stream, T, device, context)
            except ValueError as e:  # an encoding that ends
                notes.append(f"  {row['name']}: {e}")
                print(f"{'-':>10}", end="", flush=True)
                continue
            row["perplexity"][T], row["eval_seconds"][T] = float(np.exp(losses.mean())), round(time.time() - start, 2)
            row["by_position"] = by_position(losses, T)  # the longest that worked stays
            print(f"{row['perplexity'][T]:>10.3f}", end="", flush=True)
        print("".join("\n" + n for n in notes[-1:]), flush=True)
        if row["perplexity"]:
            results.append(row)
    if not results:
        runs.fail("no length could be scored")

    base = args.out or (paths[0].parent / "eval" if len(paths) == 1 else runs.ROOT / "out" / "eval")
    base = Path(base)
    base.parent.mkdir(parents=True, exist_ok=True)
    runs.write_json(base.with_name(base.name + ".json"), dict(
        command=" ".join(["python eval.py", *sys.argv[1:]]), environment=runs.environment(), dtype=dtype, data=task.meta,
        peak_memory_GB=runs.peak_memory(device), split=args.split, tokens=len(stream) - 1, lengths=lengths, runs=results))
    print(f"wrote {base}.json", flush=True)
    sys.exit(runs.script("plot.py", "lengths", f"{base}.json"))


if __name__ == "__main__":
    runs.run(main)
