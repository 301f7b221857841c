"""
Score checkpoints: on text by perplexity far beyond the training length, on a synthetic task by its errors on every test set.

    python eval.py                                   the newest checkpoint; text at 1, 2, 4, 8 and 16 x its training length
    python eval.py out/cable-* out/rope-*            several, in one table and one figure
    python eval.py --lengths 512 16384 --tokens 0    other lengths, the whole split
    python eval.py out/tra-flipflop-nano --lengths 128 1024 --sequences 10000

Text is cut into windows that do not overlap; **every length scores the same tokens**. A task's sequences are drawn anew, the
same for every model, each number with its 95 % interval. Writes a JSON and a figure.
"""
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import runs
from data import auc, binned, tvd


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


def position_edges(T, first=16):
    """Bins of positions that grow by sqrt(2): [0, 16, 23, 32, 45, ... T]."""
    return sorted({0, T} | {e for i in range(60) if first <= (e := round(2 ** (i / 2))) < T})


def by_position(losses, T):
    """Mean loss at the positions of a window of T, binned -> [[first, last, loss], ...]."""
    mean = losses[:len(losses) // T * T].reshape(-1, T).mean(0)
    edges = position_edges(T)
    return [[a, b - 1, float(y)] for a, b, y in zip(edges, edges[1:], binned(mean, edges))]


def interval(count, out_of):
    """
    count (N,) hits out of out_of (N,) trials in each of N independent sequences -> (rate, low, high): Wilson's 95 % interval,
    for as many independent trials as vary like these do: the reads of one string are not independent.
    """
    n, p, z = out_of.sum(), count.sum() / out_of.sum(), 1.96
    spread = ((count - p * out_of) ** 2).sum() / n**2  # variance of the rate, whole sequences being drawn
    m = p * (1 - p) / spread if spread > 1e-12 * p * (1 - p) else (out_of > 0).sum()
    middle, half = p + z * z / (2 * m), z * math.sqrt(p * (1 - p) / m + z * z / (4 * m * m))
    return tuple(min(max(float(v), 0.0), 1.0) for v in (p, (middle - half) / (1 + z * z / m), (middle + half) / (1 + z * z / m)))


@torch.no_grad()
def task_scores(model, task, split, sequences, seed, device, context):
    """
    -> {metric: dict(value, low, high)} over so many new sequences of a split, the same for every model; and {metric: (T,) by position}:
    the total variation distance of a task with a known target, the AUC (NaN where it is not defined) of one with a contrast.
    """
    counts, contrast, distance, chunk = {}, [], [], 500
    for first in range(0, sequences, chunk):
        rng = np.random.default_rng([seed, 1 << 41, task.splits.index(split), first])  # training has [seed, step]
        drawn = [torch.from_numpy(a).to(device) for a in task.batch(split, min(chunk, sequences - first), rng)]
        for x, y in zip(*(a.split(max(1, 2**14 // a.size(1))) for a in drawn)):
            with context:
                logits = model(x)[0]
            for metric, pair in task.score(logits, x, y).items():
                counts.setdefault(metric, []).append([n.double().cpu().numpy() for n in pair])
            if hasattr(task, "contrast"):
                contrast.append([a.cpu().numpy() for a in task.contrast(logits.float(), x)])
            if hasattr(task, "target"):
                distance.append(tvd(logits, task.target(x)).cpu().numpy())
    by_position = dict(tvd=np.concatenate(distance).mean(0)) if distance else {}
    by_position |= dict(auc=auc(*map(np.concatenate, zip(*contrast)))) if contrast else {}
    scores = {metric: dict(zip(("value", "low", "high"), interval(*map(np.concatenate, zip(*pairs))))) for metric, pairs in counts.items()}
    return scores, by_position


def evaluate_task(args, paths, loaded, device, context, dtype):
    """A synthetic task: every model, length and split -> what goes into the JSON."""
    first = loaded[0][1]
    for path, (_, config, _) in zip(paths, loaded):
        if config["data"] != first["data"]:
            runs.fail(f"{path} was trained on {config['data']}, {paths[0]} on {first['data']}: score them one by one")
        for k, v in runs.pick(runs.task_class(first["data"]), config).items():
            if v != first.get(k, v) and not (k == "block_size" and args.lengths):
                runs.fail(f"{path} was trained with {k}={v}, {paths[0]} with {k}={first[k]}: their sequences differ, score them one by one")
    if args.tokens is not None:
        runs.fail(f"--tokens is for text; {first['data']} has --sequences")
    tasks = {T: runs.make_task(first | dict(block_size=T)) for T in args.lengths or [first["block_size"]]}
    task = next(iter(tasks.values()))
    if args.lengths and not getattr(task, "stretches", True):
        runs.fail(f"--lengths does not make the sequences of {first['data']} longer: leave it out")
    splits = [args.split] if args.split else [s for s in task.splits if s != "train"]
    if splits[0] not in task.splits:
        runs.fail(f"unknown split {args.split!r}: {runs.nearest(args.split, task.splits)}")
    print(f"{first['data']}: {args.sequences:,} new sequences a split, % [95 % interval]; {device}, {dtype}")
    results = []
    for path, (model, config, checkpoint) in zip(paths, loaded):
        row, start = describe(path, model, config, checkpoint, args.bema) | dict(scores={}), time.time()
        for T, task in tasks.items():
            print(f"{row['name']}, block_size {T:,}")
            scores = row["scores"][T] = {}
            for split in splits:
                torch.manual_seed(args.seed)
                try:
                    scores[split], by_position = task_scores(model, task, split, args.sequences, args.seed, device, context)
                except ValueError as e:  # an encoding that ends
                    print(f"  {split:8} - {e}")
                    continue
                print(f"  {split:8}" + "".join(f"{m:>17} {100 * v['value']:7.3f} [{100 * v['low']:.3f}, {100 * v['high']:.3f}]"
                                               for m, v in scores[split].items()), flush=True)
                for metric, ys in by_position.items():
                    row.setdefault(metric, {}).setdefault(T, {})[split] = [None if np.isnan(y) else float(y) for y in ys]
                    edges = position_edges(len(ys), first=1)
                    cells = [f"{a + 1}{f'-{b}' * (b > a + 1)} {'-' if np.isnan(y) else f'{y:.4f}'}"
                             for a, b, y in zip(edges, edges[1:], binned(ys, edges))]
                    print(f"  {'':8}{f'{metric} by position':>17} " + ", ".join(cells))
        if any(row["scores"].values()):
            results.append(row | dict(eval_seconds=round(time.time() - start, 2)))
    return dict(data=dict(corpus=first["data"], source=f"data/{first['data']}.py"), sequences=args.sequences, splits=splits, runs=results)


def evaluate_text(args, paths, loaded, device, context, dtype):
    """Text: every model at every window length -> what goes into the JSON."""
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
    split = args.split or "test"
    if split not in task.splits:
        runs.fail(f"unknown split {split!r}: {runs.nearest(split, task.splits)}")
    tokens = 131072 if args.tokens is None else args.tokens
    stream = task.tokens(split)
    stream = stream[:tokens + 1] if tokens else stream
    lengths = sorted(set(args.lengths or [first["block_size"] * m for m in (1, 2, 4, 8, 16)]))
    if not args.lengths and len(stream) <= lengths[-1]:
        lengths = [T for T in lengths if T < len(stream)] or lengths[:1]
        print(f"the split has {len(stream):,} tokens: lengths up to {lengths[-1]} only")
    if len(stream) <= lengths[-1]:
        runs.fail(f"{len(stream):,} tokens of the {split} split are too few for a window of {lengths[-1]}: "
                  "take --tokens 0, shorter --lengths or more text")

    print(f"perplexity on {len(stream) - 1:,} tokens of {task.meta['corpus']} ({split}), the same at every length; {device}, {dtype}")
    width = max(len(p.resolve().parent.name + " (BEMA)" * args.bema) for p in paths)
    print(" " * width + "".join(f"{T:>10}" for T in lengths))
    results = []
    for path, (model, config, checkpoint) in zip(paths, loaded):
        row = describe(path, model, config, checkpoint, args.bema) | dict(perplexity={}, eval_seconds={})
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
    return dict(data=task.meta, split=split, tokens=len(stream) - 1, lengths=lengths, runs=results)


def describe(path, model, config, checkpoint, bema):
    """What a row of the JSON says about the run itself."""
    return dict(name=path.resolve().parent.name + " (BEMA)" * bema, model=config["model"], seed=config["seed"], checkpoint=path.name,
                iter=checkpoint["iter"], train_seconds=round(checkpoint["seconds"]), block_size=config["block_size"],
                parameters=sum(p.numel() for p in model.parameters()), config=config)


def main():
    parser = runs.make_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", help="run folders or checkpoint files; default: the newest under out/")
    parser.add_argument("--lengths", type=int, nargs="+",
                        help="window or sequence lengths; default: 1, 2, 4, 8, 16 x the training length on text, 1 x on a task")
    parser.add_argument("--tokens", type=int, help="text: how much of the split to score; 0 is all (default: 131072)")
    parser.add_argument("--sequences", type=int, help="task: how many to score, per split (default: 2000)")
    parser.add_argument("--split", help="default: test on text, every test split of a task")
    parser.add_argument("--data", type=runs.absolute, help="another corpus, file or folder than the runs were trained on")
    parser.add_argument("--out", help="where to write, without extension; default: eval.json and eval.png in the run's folder, "
                                      "out/eval for several runs")
    parser.add_argument("--seed", type=int, default=1337, help="of a task's sequences, and of models that draw at test time (label)")
    parser.add_argument("--bema", action="store_true", help="score the BEMA weights of runs trained with --bema")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 (default: auto)")
    parser.add_argument("--kernel", default="auto", help="Triton attention: auto (on cuda, where there is one), off (default: auto)")
    args = runs.parse(parser)
    device = runs.pick_device(args.device)
    context, dtype = runs.autocast(device, args.dtype)
    paths = [runs.find_checkpoint(p) for p in args.checkpoints or [None]]
    loaded = [runs.load_run(p, device, args.bema) for p in paths]
    paths_taken = {config["model"]: runs.use_kernel(args.kernel, model, device, dtype) for model, config, _ in loaded}
    print("; ".join(f"{name}: {said}" for name, said in paths_taken.items()))

    for path, (_, config, _) in zip(paths, loaded):
        kinds = {d: hasattr(runs.task_class(d), "score") for d in (config["data"], args.data or config["data"])}
        if len(kinds) > 1 and any(kinds.values()):
            runs.fail(f"{path} was trained on {config['data']}, not on {args.data}: it can be scored on {config['data']} only")
    sizes = (args.lengths or []) + ([] if args.sequences is None else [args.sequences])
    if min(sizes, default=1) < 1 or min(args.tokens or 0, args.seed) < 0 or args.seed >= 1 << 63:
        runs.fail("--lengths and --sequences must be at least 1, --tokens and --seed 0 or more")
    synthetic = hasattr(runs.task_class(loaded[0][1]["data"]), "score")
    if args.sequences and not synthetic:
        runs.fail("--sequences is for synthetic tasks; text has --tokens")
    args.sequences = args.sequences or 2000
    found = (evaluate_task if synthetic else evaluate_text)(args, paths, loaded, device, context, dtype)
    if not found["runs"]:
        runs.fail("no length could be scored")

    base = Path(args.out or (paths[0].parent if len(paths) == 1 else runs.ROOT / "out") / ("eval.bema" if args.bema else "eval"))
    base.parent.mkdir(parents=True, exist_ok=True)
    runs.write_json(base.with_name(base.name + ".json"), dict(
        command=" ".join(["python eval.py", *sys.argv[1:]]), environment=runs.environment(), dtype=dtype, bema=args.bema,
        attention=paths_taken, peak_memory_GB=runs.peak_memory(device), **found))
    print(f"wrote {base}.json", flush=True)
    sys.exit(runs.script("plot.py", "scores" if synthetic else "lengths", f"{base}.json"))


if __name__ == "__main__":
    runs.run(main)
