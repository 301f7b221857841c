"""
What a task's number is: of how many trials in new sequences it is true, with the interval that the
true rate is in; where the task knows them, the distance from the true distribution and the area
under the ROC curve at every position, and the rate by answer.
"""
import dataclasses
import math
import textwrap
import time
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

import data
from scoring import check_same

UNIT, AMOUNT = "sequences", 2000  # what eval.py counts, also its flag, and how many it takes
FIGURE = "scores"                 # of figures/plot.py: what eval.py draws
CHUNK = 500                       # sequences that are drawn at once
BATCH_TOKENS = 2**14              # tokens of these that go through the model at once


class Scores:
    """The rates of runs of one task at one or more lengths, on the same new sequences for all."""
    def __init__(self, task, runs, options):
        if options.strided or options.again:
            raise ValueError(f"--strided and --again are for text, not for {task.data}")
        self.task, self.options, self.splits = task, options, list(task.splits[1:])
        if options.split:
            data.check_split(options.split, task.splits)
            self.splits = [options.split]
        self.tasks = of_lengths(task, runs, options.lengths)
        self.lengths = list(self.tasks)
        print(f"{task.data}: {options.amount:,} new sequences a split, % [95 % interval]; "
              f"{options.words}")

    def start(self, run, row):
        row["scores"], self.began = {}, time.monotonic()

    def score(self, run, row, T):
        """Every split at one length: into the run's row of the JSON, and printed."""
        print(f"\n{run.name}, block_size {T:,}")
        row["scores"][T] = {}
        for split in self.splits:
            torch.manual_seed(self.options.seed)
            try:
                scores, details = task_scores(run.model, self.tasks[T], split, self.options)
            except FloatingPointError as e:
                print(f"  {split:10}-  {e}")
                row["scores"][T], row["not_finite"] = {}, True  # at this length, of no split
                break
            except ValueError as e:  # an encoding that ends before the sequences do
                print(f"  {split:10}-  {e}")
                continue
            row["scores"][T][split] = scores
            for name, values in details.items():
                row.setdefault(name, {}).setdefault(T, {})[split] = values
            print_scores(split, scores, details)

    def finish(self, run, row):
        """-> whether the row has a number"""
        row["eval_seconds"] = round(time.monotonic() - self.began, 2)
        return any(row["scores"].values())

    def about(self):
        source = dict(corpus=self.task.data, source=f"data/{self.task.data}.py")
        return dict(data=source, sequences=self.options.amount, splits=self.splits)


def of_lengths(task, runs, lengths):
    """{block_size: the task}. Raises ValueError where the runs differ."""
    names = {field.name for field in dataclasses.fields(task)}
    check_same(runs, names - {"block_size"} if lengths else names)
    state = task.state()
    for run in runs:
        kept = run.checkpoint["kept"]
        if any(not torch.equal(kept[name], state[name]) for name in state):
            raise ValueError(f"{run.path} has another {' and '.join(kept)} than {runs[0].path}: "
                             "score them one by one")
    tasks, widths = {}, set()
    for T in [task.block_size, *(lengths or [])]:
        tasks[T] = dataclasses.replace(task, block_size=T)
        tasks[T].load(state)
        x, _ = tasks[T].batch(task.splits[1], 1, np.random.default_rng(0))
        widths.add(x.shape[1])
    if lengths and (not task.stretches or len(widths) < len(tasks)):
        raise ValueError(f"--lengths does not make the sequences of {task.data} longer: leave it "
                         "out")
    return {T: tasks[T] for T in lengths or tasks}


@torch.no_grad()
def task_scores(model, task, split, options):
    """
    Over new sequences of a split, the same for every model -> {metric: dict(value, low, high)}, and
    what of these the task knows: tvd and auc, a list by position; by_answer, {answer: [sequences,
    the first metric]}. Numbers become float64 on the CPU alone.
    """
    counts, contrast, distance, answers, details = {}, [], [], [], {}
    for x, y in new_batches(task, split, options):
        with options.context:
            logits, _ = task.forward(partial(in_full, model), x, y)
        if logits.isnan().any() or logits.isposinf().any():
            raise FloatingPointError("its logits are not finite")  # the largest of NaN is no answer
        for metric, pair in task.score(logits, x, y).items():
            counts.setdefault(metric, []).append([n.cpu().double().numpy() for n in pair])
        if task.contrast:
            contrast.append([a.cpu().numpy() for a in task.contrast(logits.float(), x)])
        if task.target:
            distance.append(data.tvd(logits, task.target(x)).cpu().numpy())
        if task.answer:
            answers.append(task.answer(x, y).cpu().numpy())

    scores = {}
    for metric, pairs in counts.items():
        count, out_of = counts[metric] = joined(pairs)
        if not out_of.any():
            raise ValueError("nothing is scored in it")
        value, low, high = interval(count, out_of)
        scores[metric] = dict(value=value, low=low, high=high)
    if task.target:
        details["tvd"] = np.concatenate(distance).mean(0).tolist()
    if task.contrast:
        details["auc"] = auc(*joined(contrast)).tolist()
    if task.answer:
        first = next(iter(counts.values()))
        details["by_answer"] = by_group(np.concatenate(answers), *first)
    return scores, details


def in_full(model, x, y):
    """What model(x, y) is, where a long x goes through it in pieces."""
    if x.size(1) <= data.piece(model, x.size(1)):
        return model(x, y)
    logits = torch.cat(list(data.in_pieces(model, x)), 1)
    return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)


def joined(pairs):
    return [np.concatenate(parts) for parts in zip(*pairs)]


def new_batches(task, split, options):
    """Batches that training, of [seed, step], has not seen."""
    for first in range(0, options.amount, CHUNK):
        rng = np.random.default_rng([options.seed, 1 << 41, task.splits.index(split), first])
        x, y = task.tensors(split, min(CHUNK, options.amount - first), rng)
        at_once = max(1, BATCH_TOKENS // x.size(1))
        yield from zip(x.to(options.device).split(at_once), y.to(options.device).split(at_once))


def print_scores(split, scores, details):
    """The table's rows for one split."""
    for n, (metric, score) in enumerate(scores.items()):
        value, low, high = (100 * score[k] for k in ("value", "low", "high"))
        start = "" if n else split
        print(f"  {start:10}{metric:16}{value:8.3f}  [{low:.3f}, {high:.3f}]", flush=True)
    if "by_answer" in details:
        rates = details["by_answer"].items()
        cells = [f"{key}={100 * rate:.2f} of {n:,}" for key, (n, rate) in rates]
        line = f"{next(iter(scores))} by answer: {', '.join(cells)}"
        print(textwrap.indent(textwrap.fill(line, 86), " " * 12))


# -----------------------------------------------------------------------------
# metrics

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
