"""
Score checkpoints: on text by perplexity far beyond the training length, on a task by its errors on
every test set, in a search by nDCG@10.

    python eval.py                                   the newest checkpoint
    python eval.py out/cable-* out/rope-*            several, in one table and one figure
    python eval.py --lengths 512 16384 --tokens 0    other lengths, the whole split
    python eval.py out/tra-flipflop-nano --lengths 128 1024 --sequences 10000

Text is cut into windows of 1, 2, 4, 8 and 16 x the training length that do not overlap; **every
length scores the same tokens**. In longer windows fewer tokens have little context, which alone can
make the curve fall; --strided removes that. A task's sequences are drawn anew, the same for every
model, each number with its 95 % interval. Writes a JSON and a figure.
"""
import itertools
import math
import re
import shlex
import signal
import sys
import textwrap
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

import data
import runs

CHUNK = 500           # sequences of a task that are drawn at once
BATCH_TOKENS = 2**14  # tokens of these that go through the model at once
LONGER = (1, 2, 4, 8, 16, 32)  # times the training length: what documents are cut to


# {kind of data: what a message calls it}
CALLED = dict(text="text", symbols="a synthetic task", pairs="a search")


class Run(NamedTuple):
    """A checkpoint that was loaded."""
    path: Path
    name: str  # its folder
    model: torch.nn.Module
    config: dict
    checkpoint: dict


# -----------------------------------------------------------------------------
# text: loss by token, at every window length

def windows(stream, T, tokens, step):
    """
    Cut stream (N + 1,) into windows of T tokens, one every `step` -> batches x, y (B, T) of about
    `tokens` tokens, y the next ones. What is left at the end is a shorter window, a batch of its
    own.
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


@torch.no_grad()
def token_losses(model, stream, T, device, context, skip=0):
    """
    stream (N + 1,) tokens -> (N - skip,) losses, each token seeing only its own window of at most T
    tokens. Of every window the first `skip` are context alone; the window before has scored them.
    Long windows go through the model in pieces, over a cache: memory does not grow with T x T, nor
    with T x vocabulary.
    """
    piece = runs.piece(model)
    losses = []
    total = (len(stream) - 1) * T // (T - skip)
    with runs.Progress(model, f"windows of {T:,}", total, T) as progress:
        for x, y in windows(stream, T, piece, T - skip):
            x = torch.from_numpy(x.astype(np.int64)).to(device)
            y = torch.from_numpy(y.astype(np.int64)).to(device)
            length = x.size(1)
            cache = runs.new_cache(model, length) if length > piece else None
            loss = []
            for part, target in zip(x.split(piece, dim=1), y.split(piece, dim=1)):
                progress.batch(part.numel())
                with context:
                    logits, _ = model(part, cache=cache)
                logits = logits.float().transpose(1, 2)  # (B, vocab, piece)
                loss.append(F.cross_entropy(logits, target, reduction="none"))
            losses.append(torch.cat(loss, 1)[:, skip:].flatten().cpu())
    return torch.cat(losses).numpy()


def strided_losses(model, stream, T, longest, device, context):
    """
    stream (N + 1,) -> the losses of its tokens from longest // 2 on, the same at every T up to
    `longest`. Windows overlap by half and only their second half is scored: every token has at
    least T / 2 to look back on.
    """
    skip = T // 2
    return token_losses(model, stream[longest // 2 - skip:], T, device, context, skip)


def position_edges(T, first=16):
    """Bins of positions that grow by sqrt(2): [0, 16, 23, 32, 45, ... T]."""
    grown = (round(2 ** (i / 2)) for i in range(60))
    return sorted({0, T, *(edge for edge in grown if first <= edge < T)})


def by_position(losses, T):
    """Mean loss at the positions of a window of T, binned -> [[first, last, loss], ...]."""
    whole = len(losses) // T * T
    mean = losses[:whole].reshape(-1, T).mean(0)
    edges = position_edges(T)
    means = data.binned(mean, edges)
    return [[a, b - 1, float(loss)] for a, b, loss in zip(edges, edges[1:], means)]


def evaluate_text(args, loaded, device, context, words):
    """Text: every model at every window length -> what goes into the JSON."""
    task = text_to_score(args, loaded)
    split = args.split or "test"
    runs.check_split(split, task)
    stream = task.tokens(split)
    if args.tokens:
        stream = stream[:args.tokens + 1]
    lengths = window_lengths(args.lengths, loaded[0].config["block_size"], len(stream), split)

    N, skipped = len(stream) - 1, lengths[-1] // 2
    print(f"perplexity on {N:,} tokens of {task.meta['corpus']} ({split}), "
          f"the same at every length; {words}")
    kinds, width = dict(perplexity=token_losses), max(len(run.name) for run in loaded)
    if args.strided:
        print(f"strided: windows that overlap by half, the second halves scored: {N - skipped:,} "
              "tokens, the same at every length")
        kinds["strided"] = partial(strided_losses, longest=lengths[-1])
        width = max(width, len("  strided"))
    print(" " * width + "".join(f"{T:>10,}" for T in lengths))
    rows = []
    for run in loaded:
        row = describe(run) | dict(perplexity={}, eval_seconds={})
        for kind, losses in kinds.items():
            name = run.name if kind == "perplexity" else f"  {kind}"
            cells, note = length_row(row, kind, losses, run, stream, lengths, args.seed, device,
                                     context)
            print(f"{name:<{width}}{cells}", flush=True)  # whole: stderr may say something
        if note:
            print(note, flush=True)
        if row["perplexity"]:
            rows.append(row)
    found = dict(data=task.meta, split=split, tokens=N, lengths=lengths, runs=rows)
    return found | (dict(strided_tokens=N - skipped) if args.strided else {})


def length_row(row, kind, losses, run, stream, lengths, seed, device, context):
    """
    Perplexities into row[kind] {length: perplexity} -> the cells of the table's row, and why it
    ends early, if it does.
    """
    cells, note, row[kind] = "", "", {}
    for T in lengths:
        torch.manual_seed(seed)
        start = time.time()
        try:
            found = losses(run.model, stream, T, device=device, context=context)
        except ValueError as e:  # an encoding that ends
            note = f"  {run.name}: {runs.complaint(e)}"
            cells += f"{'-':>10}"
            continue
        row[kind][T] = float(np.exp(found.mean()))
        seconds = time.time() - start + row["eval_seconds"].get(T, 0)
        row["eval_seconds"][T] = round(seconds, 2)
        if kind == "perplexity":
            row["by_position"] = by_position(found, T)  # the longest that worked stays
        cells += f"{row[kind][T]:>10.3f}"
    return cells, note


def text_to_score(args, loaded):
    """The text that all runs are scored on; fails where their numbers would say nothing."""
    first = loaded[0]
    name = first.config["data"]
    for run in loaded:
        if not args.data and run.config["data"] != name:
            runs.fail(f"{run.path} was trained on {run.config['data']}, {first.path} on {name}: "
                      "say which to score with --data")
        if run.config["tokenizer"] != first.config["tokenizer"]:
            runs.fail("perplexities of different tokenizers cannot be compared: "
                      f"{run.path} has {run.config['tokenizer']}, "
                      f"{first.path} {first.config['tokenizer']}")
    known = [] if args.data else loaded
    for run in known:
        runs.check_text(run.path, run.checkpoint, "data")
    limits = [run.config["max_tokens"] for run in loaded]  # 0 is all
    task = runs.make_task(first.config | dict(data=args.data or name, block_size=1,
                                              max_tokens=max(limits) if all(limits) else 0))
    for run in known:
        runs.check_source(run.path, run.checkpoint, task, "data")
    return task


def window_lengths(asked, block_size, have, split):
    """The window lengths to score, given so many tokens in the split."""
    lengths = sorted(set(asked or [block_size * m for m in (1, 2, 4, 8, 16)]))
    if not asked and have <= lengths[-1]:
        lengths = [T for T in lengths if T < have] or lengths[:1]
        print(f"{have - 1:,} tokens to score: lengths up to {lengths[-1]} only")
    if have <= lengths[-1]:
        runs.fail(f"{have:,} tokens of the {split} split are too few for a window of "
                  f"{lengths[-1]}: take --tokens 0, shorter --lengths or more text")
    return lengths


# -----------------------------------------------------------------------------
# tasks: scores with intervals, on every test split

def interval(count, out_of):
    """
    count (N,) hits out of out_of (N,) trials in each of N independent sequences -> (rate, low,
    high): Wilson's 95 % interval. The trials of one sequence are not independent; it is taken for
    as many independent ones as would have the same variance.
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
    return float(p), float(low), float(high)


@torch.no_grad()
def task_scores(model, task, split, sequences, seed, device, context):
    """
    Over so many new sequences of a split, the same for every model ->
    scores     {metric: dict(value, low, high)}
    positions  {metric: (T,)}: tvd where the task knows its target, auc (NaN where it is not
               defined) where it has a contrast
    groups     {"by_answer" or "by_distance": {key: [sequences, the first metric]}}; distances are
               in powers of two: 1, 2 to 3, 4 to 7, ... tokens
    """
    counts, contrast, distance, answers, distances = {}, [], [], [], []
    for first in range(0, sequences, CHUNK):
        # training has [seed, step]
        rng = np.random.default_rng([seed, 1 << 41, task.splits.index(split), first])
        drawn = task.batch(split, min(CHUNK, sequences - first), rng)
        xs, ys = (torch.from_numpy(a).to(device) for a in drawn)
        at_once = max(1, BATCH_TOKENS // xs.size(1))
        for x, y in zip(xs.split(at_once), ys.split(at_once)):
            with context:
                logits, _ = model(x)
            for metric, pair in task.score(logits, x, y).items():
                counts.setdefault(metric, []).append([n.double().cpu().numpy() for n in pair])
            if task.contrast:
                contrast.append([a.cpu().numpy() for a in task.contrast(logits.float(), x)])
            if task.target:
                distance.append(data.tvd(logits, task.target(x)).cpu().numpy())
            if task.answer:
                answers.append(task.answer(x, y).cpu().numpy())
            if task.distance:
                _, power = np.frexp(task.distance(x, y).cpu().numpy())  # 5 is .625 * 2^3: 4 to 7
                distances.append(1 << power - 1)
    scores, positions, groups = {}, {}, {}
    for metric, pairs in counts.items():
        count, out_of = (np.concatenate(a) for a in zip(*pairs))
        value, low, high = interval(count, out_of)
        scores[metric] = dict(value=value, low=low, high=high)
    if task.target:
        positions["tvd"] = np.concatenate(distance).mean(0)
    if task.contrast:
        logit, positive = (np.concatenate(a) for a in zip(*contrast))
        positions["auc"] = data.auc(logit, positive)
    first = [np.concatenate(a) for a in zip(*next(iter(counts.values())))]
    for kind, keys in (("by_answer", answers), ("by_distance", distances)):
        if keys:
            groups[kind] = by_group(np.concatenate(keys), *first)
    return scores, positions, groups


def by_group(keys, count, out_of):
    """
    keys (N,), count (N,) hits out of out_of (N,) trials of each sequence -> {key: [sequences,
    rate]}, in order.
    """
    found = {}
    for key in np.unique(keys):
        these = keys == key
        found[int(key)] = [int(these.sum()), float(count[these].sum() / out_of[these].sum())]
    return found


NOT_FINITE = "its logits are not finite"


def logits_are_finite(model, args, output):
    """A forward hook. The largest of NaN would be an answer, though a wrong one."""
    if output[0].isnan().any() or output[0].isposinf().any():
        raise ValueError(NOT_FINITE)


def evaluate_task(args, loaded, device, context, words):
    """A task: every model, length and split -> what goes into the JSON."""
    name = loaded[0].config["data"]
    tasks = tasks_to_score(args, loaded)
    task = next(iter(tasks.values()))
    splits = list(task.splits[1:])
    if args.split:
        runs.check_split(args.split, task)
        splits = [args.split]
    print(f"{name}: {args.sequences:,} new sequences a split, % [95 % interval]; {words}")
    rows = []
    for run in loaded:
        row = describe(run) | dict(scores={})
        start = time.time()
        run.model.register_forward_hook(logits_are_finite)
        for T, task in tasks.items():
            print(f"\n{run.name}, block_size {T:,}")
            row["scores"][T] = {}
            for split in splits:
                torch.manual_seed(args.seed)
                try:
                    scores, positions, groups = task_scores(
                        run.model, task, split, args.sequences, args.seed, device, context)
                except ValueError as e:  # an encoding that ends, or logits_are_finite
                    print(f"  {split:10}-  {runs.complaint(e)}")
                    if str(e) != NOT_FINITE:
                        continue
                    row["scores"][T], row["not_finite"] = {}, True  # at this length, of no split
                    break
                row["scores"][T][split] = scores
                for metric, values in positions.items():
                    listed = [None if np.isnan(v) else float(v) for v in values]
                    row.setdefault(metric, {}).setdefault(T, {})[split] = listed
                for kind, found in groups.items():
                    row.setdefault(kind, {}).setdefault(T, {})[split] = found
                print_scores(split, scores, positions, groups)
        if any(row["scores"].values()):
            rows.append(row | dict(eval_seconds=round(time.time() - start, 2)))
    about = dict(corpus=name, source=f"data/{name}.py")
    return dict(data=about, sequences=args.sequences, splits=splits, runs=rows)


def tasks_to_score(args, loaded):
    """{block_size: the task}; fails where the runs' sequences are not the same."""
    first = loaded[0]
    name = first.config["data"]
    for run in loaded:
        if run.config["data"] != name:
            runs.fail(f"{run.path} was trained on {run.config['data']}, {first.path} on {name}: "
                      "score them one by one")
        runs.check_text(run.path, run.checkpoint)
        for field, value in runs.pick(runs.find_task(name), run.config).items():
            theirs = first.config.get(field, value)
            if value != theirs and not (field == "block_size" and args.lengths):
                runs.fail(f"{run.path} was trained with {field}={value}, {first.path} with "
                          f"{field}={theirs}: their sequences differ, score them one by one")
    trained = first.config["block_size"]
    lengths = args.lengths or [trained]
    kept = first.checkpoint["kept"]
    found = {T: runs.make_task(first.config | dict(block_size=T), kept)
             for T in dict.fromkeys([trained, *lengths])}
    for run in loaded:
        runs.check_source(run.path, run.checkpoint, found[trained])
        theirs = run.checkpoint["kept"]
        if theirs.keys() != kept.keys() or any(not torch.equal(theirs[k], kept[k]) for k in kept):
            runs.fail(f"{run.path} has another {' and '.join(theirs | kept)} than {first.path}: "
                      "score them one by one")
    widths = set()
    for task in found.values():
        x, _ = task.batch(task.splits[1], 1, np.random.default_rng(0))
        widths.add(x.shape[1])
    if args.lengths and (not task.stretches or len(widths) < len(found)):
        runs.fail(f"--lengths does not make the sequences of {name} longer: leave it out")
    return {T: found[T] for T in lengths}


def print_scores(split, scores, positions, groups):
    """The table's rows for one split: every metric, then the first by position and by group."""
    start = split
    for metric, found in scores.items():
        value, low, high = (100 * found[k] for k in ("value", "low", "high"))
        print(f"  {start:10}{metric:16}{value:8.3f}  [{low:.3f}, {high:.3f}]", flush=True)
        start = ""
    for metric, values in positions.items():
        edges = position_edges(len(values), first=1)
        cells = []
        for a, b, mean in zip(edges, edges[1:], data.binned(values, edges)):
            where = f"{a + 1}" if b == a + 1 else f"{a + 1}-{b}"
            cells.append(f"{where}=-" if np.isnan(mean) else f"{where}={mean:.4f}")
        print_list(f"{metric} by position: {', '.join(cells)}")
    for kind, found in groups.items():
        cells = [f"{key}={100 * rate:.2f} of {n:,}" for key, (n, rate) in found.items()]
        print_list(f"{next(iter(scores))} {kind.replace('_', ' ')}: {', '.join(cells)}")


def print_list(line):
    print(textwrap.fill(line, 100, initial_indent=" " * 12, subsequent_indent=" " * 14,
                        break_on_hyphens=False))


# -----------------------------------------------------------------------------
# pairs: search documents, cut to one length after the other

READINGS = dict(
    whole="one vector of all that it may read", windows="the best window of the training length",
    bm25="BM25", whole_bm25="the reciprocal ranks by whole and by BM25, added",
    windows_bm25="the reciprocal ranks by windows and by BM25, added")


def window_scores(run, documents, queries, T, device, context):
    """-> (Q, windows) scores of all windows of T tokens, (windows,) their documents, places."""
    parts, of, place = [], [], []
    for n, tokens in enumerate(documents):
        for start in range(0, max(1, len(tokens)), T):
            parts.append(tokens[start:start + T])
            of.append(n)
            place.append(start)
    scores = queries @ runs.embed(run.model, parts, device, context).T
    return scores, np.array(of), np.array(place)


def best_window(scores, of, N):
    """(Q, windows) and their documents (windows,), in order -> (Q, N), each document's best."""
    firsts = np.searchsorted(of, np.arange(N))
    return np.maximum.reduceat(scores, firsts, axis=1)


def summary(places, of, seed):
    """Places (Q,) of the right documents `of` -> {metric: dict(value, low, high)}."""
    found = {}
    measures = {"ndcg@10": ndcg(places), "recall@1": places <= 1, "recall@10": places <= 10}
    for name, values in measures.items():
        low, high = bootstrap(np.asarray(values, float), of, seed)
        found[name] = dict(value=float(np.mean(values)), low=low, high=high)
    return found


def evaluate_pairs(args, loaded, device, context, words):
    """Pairs: every model at every length of the documents -> what goes into the JSON."""
    first, split = loaded[0], args.split or "test"
    for run in loaded:
        for name in ("data", "corpus", "tokenizer", "block_size", "query_size"):
            if run.config[name] != first.config[name] and not (name == "corpus" and args.data):
                runs.fail(f"{run.path} was trained with {name}={run.config[name]}, {first.path} "
                          f"with {name}={first.config[name]}: score them one by one")
        if not args.data:
            runs.check_text(run.path, run.checkpoint, "data")
    other = dict(corpus=args.data) if args.data else {}
    tasks = [runs.make_task(run.config | other, run.checkpoint["kept"]) for run in loaded]
    if not args.data:
        for run, task in zip(loaded, tasks):
            runs.check_source(run.path, run.checkpoint, task, "data")
    runs.check_split(split, tasks[0])
    lengths = sorted(set(args.lengths or [first.config["block_size"] * m for m in LONGER]))
    if any(L % first.config["block_size"] for L in lengths):
        runs.fail("--lengths of a search must be multiples of the training length, "
                  f"{first.config['block_size']}: its windows are of that length")
    documents, queries, of, at = tasks[0].collection(split, lengths[-1])
    some = np.random.default_rng(args.seed).permutation(len(queries))[:args.queries]
    if not len(some):
        runs.fail(f"no query of {split} is answered in the first {lengths[-1]} tokens")
    queries, of, at = [queries[n] for n in some], of[some], at[some]
    chance = float(ndcg(np.arange(1, len(documents) + 1)).mean())
    print(f"nDCG@10 in % (chance {100 * chance:.1f}): {len(queries):,} queries, "
          f"{len(documents):,} documents of {tasks[0].corpus} ({split}), cut to length; {words}")

    asked, bm25 = [words_of(text) for text in tasks[0].read(queries)], {}
    for L in lengths:
        texts = (tasks[0].read([tokens[:L]])[0] for tokens in documents)  # one at a time: many
        bm25[L] = bm25_scores(asked, map(words_of, texts))
    rows = []
    for run, task in zip(loaded, tasks):
        start = time.time()
        places, by_first = search(run, task, documents, queries, of, bm25, device, context)
        row = describe(run) | dict(search={}, eval_seconds=round(time.time() - start, 2))
        for reading, found in places.items():
            row["search"][reading] = {L: summary(found[L], of, args.seed) for L in found}
        row["by_answer_at"] = None  # nobody knows
        if task.pairs[f"{split}.at"].any():
            row["by_answer_at"] = by_evidence(places, by_first, at, run.config["block_size"])
        row["places"] = {L: found.tolist() for L, found in places["whole"].items()}
        rows.append(row)
        show_search(row, lengths)
    about = dict(corpus=tasks[0].corpus, sha256=tasks[0].source)
    return dict(data=about, split=split, queries=len(queries), documents=len(documents),
                chance=chance, lengths=lengths, readings=READINGS, answers=of.tolist(), runs=rows)


def show_search(row, lengths):
    """Print one model's numbers in %, with half of their 95 % interval."""
    def line(name, cells):
        print(f"{name:<16}" + "".join(f"{cell:>13}" for cell in cells), flush=True)

    def cell(scores, metric):
        if not scores:
            return "-"
        one = scores[metric]
        return f"{100 * one['value']:.1f} ± {50 * (one['high'] - one['low']):.1f}"
    print(f"\n{row['name']}")
    line("tokens", [f"{L:,}" for L in lengths])
    for reading, scores in row["search"].items():
        line(reading, [cell(scores.get(L), "ndcg@10") for L in lengths])
    for metric in ("recall@1", "recall@10"):
        line(f"whole, {metric}", [cell(row["search"]["whole"].get(L), metric) for L in lengths])
    far = row["by_answer_at"]
    if far:
        print(f"nDCG@10 by where the answer begins, documents of {far['length']:,} tokens; first: "
              f"only their first {row['block_size']} are read")
        line("from token", [f"{n:,}" for n in far["edges"][:-1]])
        line("queries", far["queries"])
        for reading in [*READINGS, "first"]:
            if reading in far:
                line(reading, ["-" if v is None else f"{100 * v:.1f}" for v in far[reading]])


def search(run, task, documents, queries, of, bm25, device, context):
    """
    One model -> {reading: {length: (Q,) at which place the right document comes}}, and (Q,) the
    same by the first T tokens alone.
    """
    T, N, ours = run.config["block_size"], len(documents), task.ours(documents)
    vectors = runs.embed(run.model, task.ours(queries), device, context)
    scores, owner, start = window_scores(run, ours, vectors, T, device, context)
    places = {reading: {} for reading in READINGS}
    for L in bm25:
        seen = start < L
        found = dict(bm25=bm25[L], windows=best_window(scores[:, seen], owner[seen], N))
        try:
            whole = runs.embed(run.model, [tokens[:L] for tokens in ours], device, context)
            found["whole"] = vectors @ whole.T
        except ValueError as e:  # an encoding that ends
            print(f"  {run.name}: {runs.complaint(e)}")
        lexical = reciprocal_rank(bm25[L])
        for name in ("whole", "windows"):
            if name in found:
                found[f"{name}_bm25"] = reciprocal_rank(found[name]) + lexical
        for reading, score in found.items():
            places[reading][L] = ranks(score, of)
    return places, ranks(scores[:, start == 0], of)


def reciprocal_rank(scores):
    """Scores (Q, N) -> (Q, N), 1 / (60 + the document's place) (Cormack et al., 2009)."""
    return 1 / (61 + (-scores).argsort(1, kind="stable").argsort(1))


def by_evidence(places, first, at, T):
    """
    nDCG@10 by the token at which the answer begins, documents cut to 16 T (or as near as was
    scored) -> dict(length, edges, queries, and {reading: values}); first: the first T tokens only.
    """
    L = max(n for n in places["windows"] if n <= 16 * T or n == min(places["windows"]))
    edges = sorted({0, L, *(T * m for m in LONGER if T * m < L)})
    of_bin = [(at >= a) & (at < b) for a, b in zip(edges, edges[1:])]
    found = dict(length=L, edges=edges, queries=[int(these.sum()) for these in of_bin])
    known = {name: rank[L] for name, rank in places.items() if L in rank}
    for name, rank in (known | dict(first=first)).items():
        value = ndcg(rank)
        found[name] = [float(value[these].mean()) if these.any() else None for these in of_bin]
    return found


def ranks(scores, answer):
    """
    scores (Q, N) of N documents for Q queries, answer (Q,) -> (Q,), at which place from 1 the right
    document comes. Of documents with the same score the right one comes last, as does a NaN.
    """
    own = scores[np.arange(len(answer)), answer]
    return (~(scores < own[:, None])).sum(1)


def ndcg(places, k=10):
    """nDCG@k of queries with one right document each, at places (Q,) from 1 -> (Q,)."""
    return np.where(places <= k, 1 / np.log2(1 + places), 0)


def bootstrap(values, groups, seed=0, times=1000):
    """
    The 95 % interval of the mean of values (Q,): low, high. The groups (Q,) that they belong to are
    drawn anew: the queries of one document are not independent. Of a single group NaN.
    """
    _, group = np.unique(groups, return_inverse=True)
    total, size = np.bincount(group, values), np.bincount(group)
    if len(size) < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(0, len(size), (times, len(size)))
    low, high = np.quantile(total[drawn].sum(1) / size[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def words_of(text):
    """The words of a text as a search engine takes them: lower case, readLine is two."""
    parts = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    return re.findall(r"[^\W\d_]+|\d+", parts.lower())


def bm25_scores(queries, documents, k1=1.2, b=0.75):
    """
    Okapi BM25 (Robertson and Zaragoza, 2009): the words of every query (a list of lists), and of
    every document (taken one after the other) -> scores (Q, N). What most search engines rank by:
    how often a document has the query's words, rare words counting more.
    """
    terms = {}
    for word in itertools.chain(*queries):
        terms.setdefault(word, len(terms))
    found, length, has = [], [], np.zeros(len(terms))
    for document in documents:
        known = {terms[word]: n for word, n in Counter(document).items() if word in terms}
        found.append((np.array(list(known), int), np.array(list(known.values()), float)))
        length.append(len(document))
        has[found[-1][0]] += 1
    idf, mean = np.log(1 + (len(found) - has + 0.5) / (has + 0.5)), max(np.mean(length), 1)
    weight = np.zeros((len(found), len(terms)), np.float32)
    for row, (which, n), words in zip(weight, found, length):
        row[which] = idf[which] * n * (k1 + 1) / (n + k1 * (1 - b + b * words / mean))
    asked = np.zeros((len(queries), len(terms)), np.float32)
    for row, query in zip(asked, queries):
        for word, n in Counter(query).items():
            row[terms[word]] = n
    return asked @ weight.T


# -----------------------------------------------------------------------------
# both

def load(path, device, bema):
    path = runs.find_checkpoint(path)
    model, config, checkpoint = runs.load_run(path, device, bema)
    name = path.resolve().parent.name
    if bema:
        name += " (BEMA)"
    return Run(path, name, model, config, checkpoint)


def describe(run):
    """What a row of the JSON says about the run itself."""
    module, _ = runs.models()[run.config["model"]]
    return dict(
        name=run.name, model=run.config["model"], seed=run.config["seed"],
        code_version=runs.code_of(module), checkpoint=run.path.name, iter=run.checkpoint["iter"],
        train_seconds=round(run.checkpoint["seconds"]), block_size=run.config["block_size"],
        parameters=sum(p.numel() for p in run.model.parameters()), config=run.config)


def parse(argv):
    parser, usual = runs.make_parser(description=__doc__), dict(runs.SCORED.values())
    add = parser.add_argument
    add("checkpoints", nargs="*",
        help="run folders or checkpoint files; default: the newest under out/")
    add("--lengths", type=int, nargs="+",
        help="window or sequence lengths; default: 1, 2, 4, 8, 16 x the training length on text, "
             "also 32 x in a search, 1 x on a task")
    add("--tokens", type=int,
        help=f"text: how much of the split to score; 0 is all (default: {usual['tokens']})")
    add("--strided", action="store_true",
        help="text: also windows that overlap by half, only their second halves scored, so that "
             "every token has at least half a window to look back on; three times as long in all")
    add("--sequences", type=int,
        help=f"task: how many to score, per split (default: {usual['sequences']})")
    add("--queries", type=int,
        help=f"search: how many queries to ask (default: {usual['queries']})")
    add("--split", help="default: test on text and in a search, every test split of a task")
    add("--data", help="text or search: another corpus, file or folder than the run's own")
    add("--out", help="where to write, without extension; default: eval.json and eval.png, with "
                      "--bema eval.bema, in the run's folder; in out/ for several runs")
    add("--seed", type=int, default=1337,
        help="of a task's sequences, and of models that draw at test time (default: 1337)")
    runs.add_run_flags(parser, bema="score the BEMA weights of runs trained with --bema")
    args = runs.parse(parser, argv)
    sizes = list(args.lengths or [])
    sizes += [n for n in (args.sequences, args.queries) if n is not None]
    if min(sizes, default=1) < 1 or min(args.tokens or 0, args.seed) < 0 or args.seed >= 1 << 63:
        runs.fail("--lengths, --sequences and --queries must be at least 1, --tokens and --seed 0 "
                  "or more, --seed less than 2^63")
    return args


def main(argv=None):
    args = parse(argv)
    device, context, words = runs.setup(args)
    loaded = [load(path, device, args.bema) for path in args.checkpoints or [None]]

    if args.data == "":
        runs.fail("--data needs a value")
    kind = runs.kind_of(loaded[0].config)
    for run in loaded:
        name = run.config["data"]
        if runs.kind_of(run.config) != kind:
            runs.fail(f"{loaded[0].path} was trained on {CALLED[kind]}, {run.path} on {name}: "
                      "score them one by one")
        if kind == "pairs" and args.data == name:  # its --data is a corpus
            args.data = None
        if kind != "pairs" and args.data not in (None, name):
            if (kind, runs.find_task(args.data).kind) != ("text", "text"):
                runs.fail(f"{run.path} was trained on {name}, not on {args.data}: it can be "
                          f"scored on {'text' if kind == 'text' else name} only")
    own, usual = runs.SCORED[kind]
    flags = [("text", "strided"), *((other, size) for other, (size, _) in runs.SCORED.items())]
    for other, flag in flags:
        if other != kind and getattr(args, flag):
            runs.fail(f"--{flag} is for {CALLED[other]}; {CALLED[kind]} has --{own}")
    if getattr(args, own) is None:
        setattr(args, own, usual)
    folder = loaded[0].path.parent if len(loaded) == 1 else runs.ROOT / "out"
    out = Path(args.out or folder / ("eval.bema" if args.bema else "eval"))
    out.parent.mkdir(parents=True, exist_ok=True)  # before hours of scoring, not after
    evaluate = dict(text=evaluate_text, symbols=evaluate_task, pairs=evaluate_pairs)[kind]
    found = evaluate(args, loaded, device, context, words)
    if not found["runs"]:
        runs.fail("no length could be scored")

    asked = sys.argv[1:] if argv is None else map(str, argv)
    _, dtype, attention = words.split(", ", maxsplit=2)
    about = dict(
        command=shlex.join(["python", "eval.py", *asked]), environment=runs.environment(),
        dtype=dtype, bema=args.bema, attention=attention,
        peak_memory_GB=runs.peak_memory(device))
    runs.write_json(Path(f"{out}.json"), about | found)
    print(f"wrote {out}.json", flush=True)
    figure = dict(text="lengths", symbols="scores", pairs="ndcg")[kind]
    failed = runs.script("plot.py", figure, f"{out}.json")
    if failed:
        sys.exit(failed)


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: there is nothing to save
    main()
