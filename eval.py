"""
Score checkpoints: on text by perplexity far beyond the training length, on a task by its errors on
every test set, in retrieval by nDCG@10.

    python eval.py                                   the newest checkpoint
    python eval.py out/cable-* out/rope-*            several, in one table and one figure
    python eval.py --lengths 512 16384 --tokens 0    other lengths, the whole split
    python eval.py out/tra-flipflop-nano --lengths 128 1024 --sequences 10000

Text is cut into windows of 1, 2, 4, 8 and 16 x the training length that do not overlap; every
length scores the same tokens. In longer windows fewer tokens have little context, which alone can
make the curve fall; --strided removes that. A task's sequences are drawn anew, the same for every
model. Writes a JSON and a figure; of --tokens 0 `python -m lab.tables FILE.json` says how
far apart the runs are, with intervals over the documents.
"""
import dataclasses
import itertools
import json
import math
import shlex
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import data
from common import names
from common.checkpoint import check_same, check_text, folder_for, load_run
from common.device import environment, setup
from common.exits import fail, in_one_line, script
from common.files import write_json
from common.flags import Parser, add_run_flags
from data import text

TOKENS = 131072            # of text that are scored if --tokens says nothing
SEQUENCES = 2000           # of a task, a split
LONGER = (1, 2, 4, 8, 16)  # times the training length: the windows of text
BATCH_TOKENS = 2**14       # that go through a model at once, in short windows or sequences
CHUNK = 500                # sequences of a task that are drawn at once
PASSAGES = 64              # that come a second time, each of a quarter of the training length
GAPS = (0, 1, 4, 16)       # between the two, times the training length
FIGURES = dict(tokens="lengths", sequences="scores", queries="ndcg")  # of figures/plot.py, by unit


def device_of(model):
    return next(model.parameters()).device


# -----------------------------------------------------------------------------
# text: perplexity

@torch.no_grad()
def token_losses(model, stream, T, skip=0, seed=1337):
    """
    stream (N + 1,) tokens -> (N - skip,) losses, each token seeing only its own window of at most T
    tokens. Of every window the first `skip` are context alone; the window before has scored them.
    """
    torch.manual_seed(seed)  # some models draw at test time
    device, losses = device_of(model), []
    at_once = min(BATCH_TOKENS, data.LOGITS // model.config.vocab_size)
    for batch in windows(stream, T, at_once, T - skip):
        x, y = (torch.from_numpy(a.astype(np.int64)).to(device) for a in batch)
        targets, loss = y.split(data.piece(model, x.size(1)), dim=1), []
        for logits, target in zip(data.in_pieces(model, x), targets):
            logits = logits.float().transpose(1, 2)  # (B, vocab, piece)
            loss.append(F.cross_entropy(logits, target, reduction="none"))
        losses.append(torch.cat(loss, 1)[:, skip:].flatten().cpu())
    return torch.cat(losses).double().numpy()  # beyond e^88 a perplexity needs float64


def windows(stream, T, tokens, step):
    """
    Windows of T tokens of stream (N + 1,), one every `step` -> batches x, y (B, T) of about
    `tokens` tokens, y the next ones. What is left at the end is a shorter window, alone.
    """
    N = len(stream) - 1
    starts = np.arange(0, N - T + 1, step)  # of whole windows
    group = max(1, tokens // T)
    for n in range(0, len(starts), group):
        at = starts[n:n + group, None] + np.arange(T)
        yield stream[at], stream[at + 1]
    rest = len(starts) * step
    if rest + T - step < N:
        yield stream[None, rest:N], stream[None, rest + 1:]


def by_position(losses, T, first=16):
    """
    Mean loss at the positions of a window of T, in bins that grow by sqrt(2) from 0, 16, 23, 32 on
    -> [[first, last, loss], ...].
    """
    grown = [round(2 ** (i / 2)) for i in range(60)]
    edges = sorted({0, T, *(edge for edge in grown if first <= edge < T)})
    means = losses[:len(losses) // T * T].reshape(-1, T).mean(0)
    return [[a, b - 1, float(means[a:b].mean())] for a, b in zip(edges, edges[1:])]


def documents_in(stream, tokenizer):
    """stream (N + 1,) -> (N,): a loss is of the document of the token that it is predicted from."""
    begins = stream[:-1] == text.get_encoding(tokenizer).eot_token
    return np.cumsum(begins) - begins[0]


def bits_per_byte(perplexity, stream, tokenizer):
    """Perplexities {length: perplexity} of a stream's tokens, of what bytes of text they are."""
    encoding = text.get_encoding(tokenizer)
    size = text.sizes_of(encoding)
    size[encoding.eot_token] = 0
    tokens_per_byte = (len(stream) - 1) / int(size[stream[1:]].sum())
    return {T: math.log2(value) * tokens_per_byte for T, value in perplexity.items()}


def gain_of_repeats(model, stream, size, gap, seed=1337):
    """
    -> (PASSAGES,): by how many nats a token a passage of `size` is cheaper for having stood there
    before: passage, the text that follows it, `gap` long, and the passage again; against another
    passage in the first place. A model that copies gains most of what the passage cost.
    """
    width = 2 * size + gap
    if len(stream) < width + PASSAGES + 2 * size:  # the other passage is another
        raise ValueError(f"{len(stream):,} tokens are too few for a passage again after {gap:,}")
    starts = np.linspace(0, len(stream) - width, PASSAGES).astype(int)
    same = stream[starts[:, None] + np.arange(size + gap)]
    passages, other = same[:, :size], same.copy()
    other[:, :size] = np.roll(passages, PASSAGES // 2, 0)
    strings = np.stack([np.concatenate((text, passages), 1) for text in (same, other)])
    stream = np.append(strings, strings[0, 0, 0])  # what the last token is followed by
    losses = token_losses(model, stream, width, seed=seed)
    again, without = losses.reshape(2, PASSAGES, width)[:, :, -size - 1:-1].mean(-1)
    return without - again


def gains(run, stream, seed):
    """{gap: [mean gain of passages that come again, its 95 % interval by the bootstrap]}"""
    T, found = run.config["block_size"], {}
    for gap in [n * T for n in GAPS]:
        try:
            gain = gain_of_repeats(run.model, stream, max(1, T // 4), gap, seed)
        except ValueError as e:  # positions that end, or too short a text
            print(f"  {run.name}: {e}")
            break
        rng = np.random.default_rng(0)
        means = [rng.choice(gain, len(gain)).mean() for _ in range(1000)]
        low, high = np.quantile(means, (0.025, 0.975))
        found[gap] = [gain.mean(), low, high]
        print(f"  a passage again after {gap:,}: {gain.mean():.3f} nats a token cheaper "
              f"[{low:.3f}, {high:.3f}]")
    return found


def window_lengths(asked, block_size, have, split):
    """The window lengths to score, given so many tokens in the split."""
    lengths = sorted(set(asked or [block_size * m for m in LONGER]))
    if not asked and have <= lengths[-1]:
        lengths = [T for T in lengths if T < have] or [have - 1]
        print(f"{have - 1:,} tokens to score: lengths up to {lengths[-1]} only")
    if have <= lengths[-1]:
        fail(f"{have:,} tokens of the {split} split are too few for a window of {lengths[-1]}: "
             "take --tokens 0, shorter --lengths or more text")
    return lengths


def losses_of(model, stream, T, longest, args):
    """
    -> {"perplexity": (N,)}, the losses in windows of T; with --strided those in windows that
    overlap by half, of which the second half is scored: every token has at least half a window to
    look back on, and at every length up to `longest` the tokens are the same.
    """
    losses = dict(perplexity=token_losses(model, stream, T, seed=args.seed))
    if args.strided:
        half = T // 2
        rest = stream[longest // 2 - half:]
        losses["strided"] = token_losses(model, rest, T, skip=half, seed=args.seed)
    return losses


def add_windows(row, T, losses, stream, tokenizer, by_document):
    """One window length, as a row of the JSON has it."""
    for kind, values in losses.items():
        row.setdefault(kind, {})[T] = float(np.exp(values.mean()))
        if by_document:
            of = documents_in(stream, tokenizer)[-len(values):]
            sums = row.setdefault("documents", {}).setdefault(kind, {})
            sums |= {"tokens": np.bincount(of).tolist(), T: np.bincount(of, values).tolist()}
    row["by_position"] = by_position(losses["perplexity"], T)  # of the longest that worked


def evaluate_text(task, runs, args):
    """
    Every run in windows of every length, on the same tokens -> what the JSON says, and a row for
    each run. Of a whole split (--tokens 0) a row has the sum of losses in each document, though a
    window may span several.
    """
    check_same(runs, {"tokenizer"})
    split = args.split or "test"
    limits = [run.config["max_tokens"] for run in runs]  # 0 is all
    task = dataclasses.replace(task, max_tokens=max(limits) if all(limits) else 0)
    stream = task.streams[split]
    if args.tokens != 0:
        stream = stream[:(args.tokens or TOKENS) + 1]
    lengths = window_lengths(args.lengths, runs[0].config["block_size"], len(stream), split)
    about = dict(data=task.meta, split=split, tokens=len(stream) - 1, lengths=lengths)
    print(f"perplexity on {about['tokens']:,} tokens of {task.meta['corpus']} ({split}), the same "
          "at every length")
    if args.strided:
        about["strided_tokens"] = about["tokens"] - lengths[-1] // 2
        print("strided: windows that overlap by half, the second halves scored: "
              f"{about['strided_tokens']:,} tokens, the same at every length")
    width = max(len("  bits_per_byte"), *(len(run.name) for run in runs))
    print(" " * width + "".join(f"{T:>10,}" for T in lengths))

    rows = []
    for run in runs:
        print(f"{run.name:<{width}}", end="", flush=True)
        row, note = dict(perplexity={}, eval_seconds={}), ""
        for T in lengths:
            start = time.monotonic()
            try:
                losses = losses_of(run.model, stream, T, lengths[-1], args)
            except ValueError as e:  # positions that end
                print(f"{'-':>10}", end="")
                note = f"  {run.name}: {e}"
                continue
            add_windows(row, T, losses, stream, task.tokenizer, by_document=args.tokens == 0)
            row["eval_seconds"][T] = round(time.monotonic() - start, 2)
            print(f"{row['perplexity'][T]:>10.3f}", end="", flush=True)
        print()
        if task.tokenizer != "bytes":
            row["bits_per_byte"] = bits_per_byte(row["perplexity"], stream, task.tokenizer)
        for key in ("strided", "bits_per_byte"):
            if row.get(key):
                cells = "".join(f"{value:>10.3f}" for value in row[key].values())
                print(f"{'  ' + key:<{width}}{cells}")
        if note:
            print(note)
        if args.again:
            row["again"] = gains(run, stream, args.seed)
        rows.append(row if row["perplexity"] else {})
    return about, rows


# -----------------------------------------------------------------------------
# tasks: rates

@torch.no_grad()
def task_scores(model, task, split, sequences, seed=1337):
    """
    Over new sequences of a split, the same for every model -> {metric: dict(value, low, high)}, and
    what of these the task knows: tvd and auc, a list by position; by_answer, {answer: [sequences,
    the first metric]}.
    """
    torch.manual_seed(seed)  # some models draw at test time
    counts, found = {}, {}
    for x, y in new_batches(task, split, sequences, seed):
        x, y = x.to(device_of(model)), y.to(device_of(model))
        logits, _ = task.forward(partial(in_full, model), x, y)
        if logits.isnan().any() or logits.isposinf().any():
            raise FloatingPointError("its logits are not finite")  # the largest of NaN is no answer
        for metric, pair in task.score(logits, x, y).items():
            add_batch(counts, metric, *pair)
        if task.target:
            add_batch(found, "tvd", data.tvd(logits, task.target(x)))
        if task.contrast:
            add_batch(found, "auc", *task.contrast(logits.float(), x))
        if task.answer:
            add_batch(found, "by_answer", task.answer(x, y))

    scores, details = {}, {}
    counts = {metric: joined(batches) for metric, batches in counts.items()}
    for metric, (count, out_of) in counts.items():
        if not out_of.any():
            raise ValueError("nothing is scored in it")
        scores[metric] = interval(count.astype(np.float64), out_of.astype(np.float64))
    for name, batches in found.items():
        arrays = joined(batches)
        if name == "tvd":
            details[name] = arrays[0].mean(0).tolist()
        elif name == "auc":
            details[name] = auc(*arrays).tolist()
        else:
            details[name] = by_group(*arrays, *next(iter(counts.values())))
    return scores, details


def add_batch(found, name, *tensors):
    found.setdefault(name, []).append([a.cpu().numpy() for a in tensors])


def joined(batches):
    return [np.concatenate(arrays) for arrays in zip(*batches)]


def new_batches(task, split, sequences, seed):
    """Batches that training, of [seed, step], has not seen."""
    for first in range(0, sequences, CHUNK):
        rng = np.random.default_rng([seed, 1 << 41, task.splits.index(split), first])
        x, y = task.tensors(split, min(CHUNK, sequences - first), rng)
        at_once = max(1, BATCH_TOKENS // x.size(1))
        yield from zip(x.split(at_once), y.split(at_once))


def in_full(model, x, y):
    """What model(x, y) is, where a long x goes through it in pieces."""
    if x.size(1) <= data.piece(model, x.size(1)):
        return model(x, y)
    logits = torch.cat(list(data.in_pieces(model, x)), 1)
    return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)


def interval(count, out_of):
    """
    count (N,) hits out of out_of (N,) trials in each of N independent sequences -> the rate with
    Wilson's 95 % interval. The trials of one sequence are not independent; it is taken for as many
    independent ones as would have the same variance.
    """
    n, z = out_of.sum(), 1.96
    p = count.sum() / n
    spread = ((count - p * out_of) ** 2).sum() / n**2  # the rate's variance, sequences being drawn
    m = (out_of > 0).sum()  # independent trials
    if spread > 1e-12 * p * (1 - p):
        m = p * (1 - p) / spread
    middle = p + z * z / (2 * m)
    half = z * math.sqrt(p * (1 - p) / m + z * z / (4 * m * m))
    shrink = 1 + z * z / m
    low = min(max((middle - half) / shrink, 0.0), p)  # rounding must not put p outside
    high = max(min((middle + half) / shrink, 1.0), p)
    return dict(value=float(p), low=float(low), high=float(high))


def auc(logits, positive):
    """
    ROC AUC at every position: logits, positive (N, T) -> (T,), how often a positive's logit is
    above a negative's, ties 1/2. NaN where there is no such pair, and where a logit is NaN.
    """
    areas = []
    for column, good in zip(logits.T, positive.T):
        p, n = good.sum(), (~good).sum()
        if not p or not n or np.isnan(column).any():
            areas.append(np.nan)
            continue
        _, where, counts = np.unique(column, return_inverse=True, return_counts=True)
        ranks = counts.cumsum() - (counts - 1) / 2  # from 1; equal logits share their mean rank
        areas.append((ranks[where][good].sum() - p * (p + 1) / 2) / (p * n))
    return np.array(areas)


def by_group(keys, count, out_of):
    """keys, count, out_of (N,) -> {key: [sequences, rate]}, in order."""
    rates = {}
    for key in np.unique(keys):
        these = keys == key
        rates[int(key)] = [int(these.sum()), float(count[these].sum() / out_of[these].sum())]
    return rates


def of_lengths(task, runs, lengths):
    """{block_size: the task}; it has to be the same for all runs."""
    settings = {field.name for field in dataclasses.fields(task)}
    check_same(runs, settings - {"block_size"} if lengths else settings)
    state = task.state()
    for run in runs:
        kept = run.checkpoint["kept"]
        if any(not torch.equal(kept[name], state[name]) for name in state):
            fail(f"{run.path} has another {' and '.join(kept)} than {runs[0].path}: score them one "
                 "by one")
    tasks, widths = {}, set()
    for T in [task.block_size, *(lengths or [])]:
        tasks[T] = names.make_task(vars(task) | dict(block_size=T), state)
        x, _ = tasks[T].batch(task.splits[1], 1, np.random.default_rng(0))
        widths.add(x.shape[1])
    if lengths and (not task.stretches or len(widths) < len(tasks)):
        fail(f"--lengths does not make the sequences of {task.data} longer: leave it out")
    return {T: tasks[T] for T in lengths or tasks}


def evaluate_task(task, runs, args):
    """Every run at every length on every test split -> what the JSON says, a row for each run."""
    sequences = args.sequences or SEQUENCES
    splits = [args.split] if args.split else list(task.splits[1:])
    tasks, rows = of_lengths(task, runs, args.lengths), []
    print(f"{task.data}: {sequences:,} new sequences a split, % [95 % interval]")
    for run in runs:
        row, start = dict(scores={}), time.monotonic()
        for T, longer in tasks.items():
            print(f"\n{run.name}, block_size {T:,}")
            row["scores"][T] = {}
            for split in splits:
                try:
                    scores, details = task_scores(run.model, longer, split, sequences, args.seed)
                except FloatingPointError as e:
                    print(f"  {split:10}-  {e}")
                    row["scores"][T], row["not_finite"] = {}, True  # at this length, of no split
                    break
                except ValueError as e:  # positions that end before the sequences do
                    print(f"  {split:10}-  {e}")
                    continue
                row["scores"][T][split] = scores
                for name, values in details.items():
                    row.setdefault(name, {}).setdefault(T, {})[split] = values
                print_scores(split, scores, details)
        row["eval_seconds"] = round(time.monotonic() - start, 2)
        rows.append(row if any(row["scores"].values()) else {})
    source = dict(corpus=task.data, source=names.file_of(task))
    return dict(data=source, sequences=sequences, splits=splits), rows


def print_scores(split, scores, details):
    """The table's rows for one split."""
    for metric, score in scores.items():
        value, low, high = (100 * score[key] for key in ("value", "low", "high"))
        print(f"  {split:10}{metric:16}{value:8.3f}  [{low:.3f}, {high:.3f}]", flush=True)
    if "by_answer" in details:
        rates = details["by_answer"].items()
        cells = [f"{key}={100 * rate:.2f} of {n:,}" for key, (n, rate) in rates]
        line = f"{metric} by answer: {', '.join(cells)}"
        print(textwrap.indent(textwrap.fill(line, 86), " " * 12))


# -----------------------------------------------------------------------------
# the runs, and the task that they are scored on

def task_of(runs, text):
    """
    The task that all runs are scored on. `text` may name another than the one they were trained on;
    if it does not, theirs has to be the same, known, and as it was.
    """
    first = runs[0]
    name = first.config["data"]
    cls = names.trained_on(first.config)
    flag = names.text_setting(first.config)
    for run in runs:
        if names.trained_on(run.config) is not cls:
            fail(f"{first.path} was trained on {name}, {run.path} on {run.config['data']}: score "
                 "them one by one")
    if text is not None:
        if flag == "data" and names.find_task(text) is not cls:
            fail(f"{first.path} was trained on {name}: it cannot be scored on {text}")
        return names.make_task(first.config | {flag: text}, first.checkpoint["kept"])
    for run in reversed(runs):  # the first is the last, and its task is returned
        where = run.config[flag]
        if where != first.config[flag]:
            fail(f"{run.path} was trained on {where}, {first.path} on {first.config[flag]}: say "
                 "which to score with --data")
        check_text(run.config, run.checkpoint["source"])
        task = names.make_task(run.config, run.checkpoint["kept"])
        if task.source != run.checkpoint["source"]:
            fail(f"the text behind {where} is not what {run.path} was trained on: its training "
                 "documents may be in this split. To score it all the same, name the text: "
                 f"--data {where}")
    return task


def check_flags(args, task):
    """A flag that is for another kind of task is a mistake."""
    for unit in FIGURES:
        if getattr(args, unit) is not None and unit != task.unit:
            fail(f"--{unit} is not for {task.data}, which has --{task.unit}")
    if (args.strided or args.again) and task.unit != "tokens":
        fail(f"--strided and --again are for text, not for {task.data}")
    if args.split and args.split not in task.splits:
        fail(f"unknown split {args.split!r}: choose from {', '.join(task.splits)}")


def describe(run):
    """What the JSON says about a run (see common/checkpoint.py)."""
    trained = run.checkpoint["config"]
    row = dict(
        name=run.name, model=run.config["model"], seed=run.config["seed"],
        checkpoint=run.path.name, iter=run.checkpoint["iter"],
        train_seconds=round(run.checkpoint["seconds"]), block_size=run.config["block_size"],
        parameters=sum(p.numel() for p in run.model.parameters()), config=trained)
    changed = {name: value for name, value in run.config.items() if trained.get(name) != value}
    return row | (dict(set=changed) if changed else {})


def where_to_write(out, runs, command):
    """--out, or eval in the runs' folder; with a number where another command's are there."""
    if out:
        return out
    for n in itertools.count(1):
        path = folder_for(runs) / (f"eval-{n}.json" if n > 1 else "eval.json")
        if not path.exists() or f'"command": {json.dumps(command)}' in path.read_text("utf-8"):
            return path.with_suffix("")


def parse(argv):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoints", nargs="*",
        help="run folders or checkpoint files; default: the newest under out/")
    add("--lengths", type=int, nargs="+",
        help="window or sequence lengths; default: 1, 2, 4, 8, 16 x the training length on text, "
             "also 32 x in a search, 1 x on a task")
    add("--tokens", type=int,
        help="text: how much of the split to score; 0 is all, by document (default: 131072)")
    add("--strided", action="store_true",
        help="text: also windows that overlap by half, only their second halves scored, so that "
             "every token has at least half a window to look back on")
    add("--again", action="store_true",
        help="text: also how much cheaper a passage is when it comes a second time, by the gap")
    add("--sequences", type=int, help="task: how many to score, per split (default: 2000)")
    add("--queries", type=int, help="search: how many queries to ask (default: 1000)")
    add("--split", help="default: test on text and in a search, every test split of a task")
    add("--data", help="text or search: another corpus, file or folder than the run's own")
    add("--out", help="where to write, without extension; default: eval.json and eval.png in the "
                      "run's folder, in out/ for several runs or results/weights; "
                      "eval-2, eval-3, ... where another command has written these")
    add("--seed", type=int, default=1337,
        help="of a task's sequences, and of models that draw at test time (default: 1337)")
    add_run_flags(parser, bema="score the BEMA weights of runs trained with --bema")
    args = parser.parse_args(argv)
    numbers = [*(args.lengths or ()), args.sequences, args.queries]
    if any(n is not None and n < 1 for n in numbers) or min(args.tokens or 0, args.seed) < 0:
        fail("--lengths, --sequences and --queries must be at least 1, --tokens and --seed 0 or "
             "more")
    return args


def main(argv=None):
    args = parse(argv)
    device, context, words = setup(args)
    runs = [load_run(path, device, args.bema, args.set) for path in args.checkpoints or [None]]
    task = task_of(runs, args.data)
    check_flags(args, task)
    asked = sys.argv[1:] if argv is None else map(str, argv)
    command = shlex.join(["python", "eval.py", *asked])
    out = Path(where_to_write(args.out, runs, command))
    out.parent.mkdir(parents=True, exist_ok=True)  # before hours of scoring, not after

    print(words)
    own = evaluate_text if task.unit == "tokens" else evaluate_task
    evaluate = task.evaluate or partial(own, task)
    with context:
        about, rows = evaluate(runs, args)
    rows = [describe(run) | row for run, row in zip(runs, rows) if row]
    if not rows:
        fail("no length could be scored")

    _, dtype, attention = words.split(", ", maxsplit=2)
    made = dict(command=command, environment=environment(), dtype=dtype, bema=args.bema,
                attention=attention)
    write_json(f"{out}.json", made | about | dict(runs=rows))
    print(f"wrote {out}.json", flush=True)
    script("figures.plot", FIGURES[task.unit], f"{out}.json")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
