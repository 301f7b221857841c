"""
Tasks: the contract (class Task), how a task of symbols is scored, and the metrics.
"""
import dataclasses
import math
import textwrap
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

CHUNK = 500           # sequences that are drawn at once
BATCH_TOKENS = 2**14  # tokens of these that go through the model at once


@dataclass
class Options:
    """What eval.py is asked for."""
    lengths: list = None    # window or sequence lengths; None is what the task usually takes
    split: str = ""         # "" is what the task usually takes
    amount: int = 0         # how many of Task.unit to score
    strided: bool = False   # text: windows that overlap by half, too
    seed: int = 1337
    device: torch.device = torch.device("cpu")
    context: object = nullcontext()  # to run models in
    words: str = ""         # where all of this runs


@dataclass
class Task:
    """
    The contract. A task is a file data/NAME.py with a class Task(data.Task), asked for as --data
    NAME. It must have `batch` and `vocab_size`, which may be set in __post_init__; tokens are from
    0 to vocab_size - 1. What else it leaves out is as written here.

    A field, which is a member with a type, is also a flag of train.py, its comment the flag's help.
    Settings that do not fit raise ValueError, one line for the user, in __post_init__.

    Below, B is the number of sequences and T their length in tokens. Batches are NumPy arrays drawn
    from `rng` alone: the same seed gives the same batch on every machine. `forward`, `score`,
    `contrast`, `target`, `answer` and `holder` are given torch tensors.
    """
    data: str = ""        # a task (a file in data/), a known corpus, or your own file or folder
    block_size: int = 64  # tokens in a training sequence

    splits = ("train", "iid")  # train on the first, validate on the second, test all but the first
    defaults = {"nano": {}}    # {size: {flag: value}} for train.py, the default size first
    stretches = True           # whether a larger block_size makes the sequences longer
    least_batch = 1            # sequences that a batch of one process needs for a loss
    for_encoders = False       # whether its models see later tokens, too (encoders/bert.py)
    source = ""                # sha256 of a text: a checkpoint keeps what it was trained on
    kept = {}                  # {name: int64 tensor} of what a checkpoint keeps for the task, so
    #     that it can be used, continued and built upon without the text that it was made from
    unit = "sequences"         # what eval.py counts, also its flag, and how many it usually takes
    amount = 2000
    figure = "scores"          # of plot.py: what eval.py draws
    afterwards = (("eval.py",),)  # what train.py runs on the result: a script and its flags
    text_flag = "data"         # the flag that names its text, where it has one

    # target(x) -> (B, T, vocab_size), the true distribution of the token after each prefix: gives
    #     the total variation distance by position
    # contrast(logits, x) -> a logit (B, T), and whether it should be high: gives the ROC AUC
    # answer(x, y) -> (B,) int64, a sequence's one right answer: gives the first metric by answer,
    #     and what always giving the commonest one would get
    # holder(x) -> (B, T) int64, which token says what is asked for at each, -1 where nothing is:
    #     maps.py opens a page at the head that looks there
    target = None
    contrast = None
    answer = None
    holder = None
    # for sample.py: encoding(config), the tiktoken Encoding in which a model writes text, or
    # search(run, folder, prompt, ...), see encoders/retrieval.py; both are called on the class
    encoding = None
    search = None

    @property
    def validation_splits(self):
        """Looked at during training; the loss of the first says which is best.pt."""
        return self.splits[1:]

    def __init_subclass__(cls):
        """A subclass is a dataclass, decorated or not, and in it `block_size = 32` has a type."""
        for field in dataclasses.fields(Task):
            if field.name in vars(cls):
                cls.__annotations__.setdefault(field.name, field.type)
        dataclass(cls)

    def batch(self, split, batch_size, rng):
        """
        -> x, y (B, T) int64; y is what to predict at a position, -1 where it is not scored. Where
        nothing is, the loss is NaN.
        """
        raise NotImplementedError

    def tensors(self, split, batch_size, rng):
        """batch() as torch tensors; the first one of a split is checked."""
        batch = self.batch(split, batch_size, rng)
        x, y = (torch.from_numpy(np.ascontiguousarray(a)) for a in batch)
        checked = vars(self).setdefault("checked", set())
        if split not in checked:
            self.check(split, batch_size, x, y)
            checked.add(split)
        return x, y

    def check(self, split, batch_size, x, y):
        """Raises ValueError where a batch is not what `batch` says."""
        what = f"{type(self).__module__}: batch({split!r}, {batch_size}, rng) returns"
        for name, a, least in (("x", x, 0), ("y", y, -1)):
            if a.dtype != torch.int64 or a.shape != (batch_size, x.shape[-1]):
                raise ValueError(f"{what} {name} as {a.dtype} of shape {tuple(a.shape)}: x and y "
                                 f"must both be int64 of shape ({batch_size}, T)")
            if a.min() < least or a.max() >= self.vocab_size:
                raise ValueError(f"{what} {name} with values from {a.min()} to {a.max()}: they "
                                 f"must be from {least} to {self.vocab_size - 1}")

    def begin(self, model):
        """Before the first step of a new run; may set `self.kept`."""

    def adopt(self, kept):
        """Take over what a checkpoint has kept. Raises ValueError."""
        self.kept = dict(kept)

    @staticmethod
    def was_prepared(config, source):
        """
        Whether the text of a checkpoint may be opened unasked: a corpus known by its name, or one
        prepared on this machine, of sha256 `source`.
        """
        return True

    def forward(self, model, x, y):
        """-> logits, which `score` is given, and what training minimises, a scalar."""
        return model(x, y)

    def score(self, logits, x, y):
        """
        logits (B, T, vocab_size) -> {metric: (count, out_of)}, both (B,): in each sequence, how
        many trials went well, out of how many. {} where a loss says all.
        """
        if self.target:
            distance = tvd(logits, self.target(x))
            return dict(tvd=(distance.sum(1), torch.ones_like(distance).sum(1)))
        scored = y != -1
        right = (logits.argmax(-1) == y) & scored
        return dict(accuracy=(right.sum(1), scored.sum(1)))

    def show(self, x):
        """The tokens of one sequence x (T,) as labels, for figures."""
        return [str(token) for token in x]

    def sorts(self, x):
        """What sort of token each of x (T,) is, for figures that take those of a sort together."""
        return self.show(x)

    def evaluate(self, runs, options):
        """
        Print the scores of every run (see common/checkpoint.py), at every length and split, on the
        same new sequences -> what eval.py writes as JSON. Text and retrieval have their own.
        """
        if options.strided:
            raise ValueError(f"--strided is for text, not for {self.data}")
        splits = list(self.splits[1:])
        if options.split:
            check_split(options.split, self.splits)
            splits = [options.split]
        tasks, rows = self.of_lengths(runs, options.lengths), []
        print(f"{self.data}: {options.amount:,} new sequences a split, % [95 % interval]; "
              f"{options.words}")
        for run in runs:
            row, start = describe(run) | dict(scores={}), time.monotonic()
            for T, task in tasks.items():
                print(f"\n{run.name}, block_size {T:,}")
                score_splits(row, run, task, T, splits, options)
            if any(row["scores"].values()):
                rows.append(row | dict(eval_seconds=round(time.monotonic() - start, 2)))
        about = dict(corpus=self.data, source=f"data/{self.data}.py")
        return dict(data=about, sequences=options.amount, splits=splits, runs=rows)

    def of_lengths(self, runs, lengths):
        """{block_size: the task}. Raises ValueError where the runs differ."""
        names = {field.name for field in dataclasses.fields(self)}
        check_same(runs, names - {"block_size"} if lengths else names)
        for run in runs:
            kept = run.checkpoint["kept"]
            if any(not torch.equal(kept[name], self.kept[name]) for name in self.kept):
                raise ValueError(f"{run.path} has another {' and '.join(kept)} than {runs[0].path}"
                                 ": score them one by one")
        tasks, widths = {}, set()
        for T in [self.block_size, *(lengths or [])]:
            tasks[T] = dataclasses.replace(self, block_size=T)
            tasks[T].adopt(self.kept)
            x, _ = tasks[T].batch(self.splits[1], 1, np.random.default_rng(0))
            widths.add(x.shape[1])
        if lengths and (not self.stretches or len(widths) < len(tasks)):
            raise ValueError(f"--lengths does not make the sequences of {self.data} longer: leave "
                             "it out")
        return {T: tasks[T] for T in lengths or tasks}


# -----------------------------------------------------------------------------
# evaluation: of any task

def describe(run):
    """What a row of the JSON says about the run itself."""
    trained = run.checkpoint["config"]
    row = dict(
        name=run.name, model=run.config["model"], seed=run.config["seed"],
        checkpoint=run.path.name, iter=run.checkpoint["iter"],
        train_seconds=round(run.checkpoint["seconds"]), block_size=run.config["block_size"],
        parameters=sum(p.numel() for p in run.model.parameters()), config=trained)
    changed = {name: value for name, value in run.config.items() if trained.get(name) != value}
    return row | (dict(set=changed) if changed else {})


def piece(model):
    """How many tokens to run through a model at once: logits stay small."""
    return max(256, min(16384, 2**26 // model.config.vocab_size))


def check_split(split, splits):
    if split not in splits:
        raise ValueError(f"unknown split {split!r}: choose from {', '.join(splits)}")


def check_same(runs, names):
    """Raises ValueError unless all runs have the same settings."""
    first = runs[0]
    for run in runs:
        for name in sorted(names & run.config.keys() & first.config.keys()):
            theirs, other = run.config[name], first.config[name]
            if theirs != other:
                raise ValueError(f"{run.path} was trained with {name}={theirs}, {first.path} with "
                                 f"{name}={other}: score them one by one")


# -----------------------------------------------------------------------------
# evaluation: of symbols

def score_splits(row, run, task, T, splits, options):
    """One run at one length: into its row of the JSON, and printed."""
    row["scores"][T] = {}
    for split in splits:
        torch.manual_seed(options.seed)
        try:
            scores, details = task_scores(run.model, task, split, options)
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
            logits, _ = task.forward(model, x, y)
        if logits.isnan().any() or logits.isposinf().any():
            raise FloatingPointError("its logits are not finite")  # the largest of NaN is no answer
        for metric, pair in task.score(logits, x, y).items():
            counts.setdefault(metric, []).append([n.cpu().double().numpy() for n in pair])
        if task.contrast:
            contrast.append([a.cpu().numpy() for a in task.contrast(logits.float(), x)])
        if task.target:
            distance.append(tvd(logits, task.target(x)).cpu().numpy())
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


def joined(pairs):
    return [np.concatenate(parts) for parts in zip(*pairs)]


def new_batches(task, split, options):
    """Batches that training, of [seed, step], has not seen."""
    for first in range(0, options.amount, CHUNK):
        rng = np.random.default_rng([options.seed, 1 << 41, task.splits.index(split), first])
        x, y = task.tensors(split, min(CHUNK, options.amount - first), rng)
        at_once = max(1, BATCH_TOKENS // x.size(1))
        yield from zip(x.to(options.device).split(at_once), y.to(options.device).split(at_once))


def by_group(keys, count, out_of):
    """keys, count, out_of (N,) -> {key: [sequences, rate]}, in order."""
    rates = {}
    for key in np.unique(keys):
        these = keys == key
        rates[int(key)] = [int(these.sum()), float(count[these].sum() / out_of[these].sum())]
    return rates


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


def tvd(logits, target):
    """Total variation distance (Post-Norm, Eq. 7): logits, target (..., n) -> (...)."""
    return (logits.float().softmax(-1) - target).abs().sum(-1) / 2


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


def binned(values, edges):
    """Means of values (..., T) between edges (n + 1,) -> (..., n), NaNs left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # mean of nothing
        means = [np.nanmean(values[..., a:b], -1) for a, b in zip(edges, edges[1:])]
        return np.stack(means, -1)


def position_edges(T, first=16):
    """Bins of positions that grow by sqrt(2): [0, 16, 23, 32, 45, ... T]."""
    grown = (round(2 ** (i / 2)) for i in range(60))
    return sorted({0, T, *(edge for edge in grown if first <= edge < T)})
