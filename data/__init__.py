"""
Tasks: what every script may expect of one (class Task), how a task is found by its name, and the
metrics that several tasks share.
"""
import dataclasses
import difflib
import functools
import importlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
KINDS = ("text", "symbols", "numbers", "pairs")


@dataclass
class Task:
    """
    The contract. A task is a file data/NAME.py with a class Task, asked for as --data NAME. It must
    have `batch` and `vocab_size`; what else it leaves out is as written here. Of a task of kind
    `symbols` the scripts use nothing but these members; text.py and retrieval.py have more.

    A field, which is a member with a type, is also a flag of train.py, its comment the flag's help.
    Settings that do not fit raise ValueError, one line for the user, in __post_init__.

    Below, B is the number of sequences and T their length in tokens. Batches are NumPy arrays drawn
    from `rng` alone: the same seed gives the same batch on every machine. `score`, `target`,
    `contrast`, `answer` and `distance` are given torch tensors.
    """
    data: str = ""        # a task (a file in data/), a known corpus, or your own file or folder
    block_size: int = 64  # tokens in a training sequence

    # text: windows of a long stream, scored by perplexity; also has tokens(split), the stream, and
    #     meta, what is known about it (see text.py)
    # symbols: sequences of tokens, scored by `score`
    # numbers: x is (B, T, features) float32, which no GPT here takes
    # pairs: x holds pairs of texts that belong together, and `loss` is contrastive; also has
    #     collection(split, limit), documents to search and what to ask (see retrieval.py)
    kind = "symbols"
    splits = ("train", "iid")  # train on the first, validate on the second, test all but the first
    defaults = {"nano": {}}    # {size: {flag: value}} for train.py, the default size first
    stretches = True           # whether a larger block_size makes the sequences longer
    source = ""                # sha256 of a text: a checkpoint keeps what it was trained on
    least_batch = 1            # sequences that a batch of one process needs for a loss
    for_encoders = False       # whether its models see later tokens, too (model_bert.py)
    kept = {}                  # {name: int64 tensor} of what a checkpoint keeps for the task, so
    #     that it can be used, continued and built upon without the text that it was made from

    # target(x) -> (B, T, vocab_size), the true distribution of the token after each prefix, if it
    #     is known: gives the total variation distance by position
    # contrast(logits, x) -> a logit (B, T), and whether it should be high (B, T): gives the ROC
    #     AUC by position
    # answer(x, y) -> (B,) int64, of a task in which every sequence has one right answer: gives the
    #     first metric by answer, and what always giving the commonest one would get
    # distance(x, y) -> (B,) int64, how many tokens back lies what a sequence asks for: gives the
    #     first metric by distance, in powers of two
    target = None
    contrast = None
    answer = None
    distance = None
    # loss(model, x, y) -> what training minimises, a scalar; else it is the model's own loss
    loss = None
    # begin(model), before the first step of a new run, with its first weights; may set `self.kept`
    begin = None

    @functools.cached_property
    def vocab_size(self):
        """Tokens are from 0 to vocab_size - 1. A task may set it as it likes: `vocab_size = 5`."""
        file = type(self).__module__.replace(".", "/") + ".py"
        raise ValueError(f"{file}: class Task has no vocab_size")

    def batch(self, split, batch_size, rng):
        """
        -> x, y (B, T) int64; y is what to predict at a position, -1 where it is not scored; the
        loss of a batch in which nothing is scored would be NaN.
        """
        raise NotImplementedError

    def adopt(self, kept):
        """Take over what a checkpoint has kept. Raises ValueError."""
        self.kept = dict(kept)

    @staticmethod
    def was_prepared(config, source):
        """
        Whether the text of a checkpoint's config may be opened unasked: a corpus known by its name,
        or a text prepared on this machine, whose sha256 is `source`.
        """
        return True

    def score(self, logits, x, y):
        """
        logits (B, T, vocab_size) -> {metric: (count, out_of)}, both (B,): in each sequence, how
        many trials went well, out of how many. Here a trial is a scored position.
        """
        scored = y != -1
        right = (logits.argmax(-1) == y) & scored
        return dict(accuracy=(right.sum(1), scored.sum(1)))

    def show(self, x):
        """The tokens of one sequence x (T,) as labels, for figures."""
        return [str(token) for token in x]


# -----------------------------------------------------------------------------
# tasks by name

def known():
    """Every name that --data knows, paths aside: the corpora, then the tasks."""
    return [*importlib.import_module("data.text").CORPORA, *with_a_file()]


def with_a_file():
    """The names of the tasks that have a file of their own."""
    stems = {path.stem for path in FOLDER.glob("*.py")}
    return sorted(stems - {"__init__", "text"})


def find(name):
    """data/NAME.py has the class of the task NAME; any other name is text. Raises ValueError."""
    if name.replace("-", "_").isidentifier() and name not in ("__init__", "text"):
        if (FOLDER / f"{name}.py").exists():
            return load(name)
    text = importlib.import_module("data.text")
    if name not in text.CORPORA and not os.path.exists(os.path.expanduser(name)):
        hint = nearest(name, known())
        raise ValueError(f"unknown corpus {name!r} (nor is it a file or folder): {hint}")
    return text.Task


def nearest(word, known):
    """What to say after an unknown word: the nearest known one, else all of them."""
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.7)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose from {', '.join(known)}"


def load(name):
    """The class Task of data/NAME.py. Raises ValueError that names the file and what is wrong."""
    file = f"data/{name}.py"
    try:
        module = importlib.import_module(f"data.{name}")
        cls = complete(module.Task) if hasattr(module, "Task") else None
    except (Exception, SystemExit) as e:  # a user's file may fail in any way
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ValueError(f"{file} cannot be used ({reason})") from e
    if not cls:
        raise ValueError(f"{file} has no class Task")
    if cls.batch is Task.batch:
        raise ValueError(f"{file}: class Task has no batch(self, split, batch_size, rng)")
    if cls.vocab_size is None:
        raise ValueError(f"{file}: class Task has no vocab_size")
    if cls.kind not in KINDS:
        raise ValueError(f"{file}: kind={cls.kind!r} is not one of {', '.join(KINDS)}")
    if isinstance(cls.splits, str) or len(cls.splits) < 2:
        raise ValueError(f"{file}: splits needs two names or more, the first one to train on")
    if not isinstance(cls.least_batch, int):
        raise ValueError(f"{file}: least_batch={cls.least_batch!r} is no int")
    if not cls.defaults:
        raise ValueError(f"{file}: defaults needs a size, for example: {Task.defaults}")
    if cls.kind == "symbols" and not hasattr(cls.batch, "__wrapped__"):
        cls.batch, cls.score = checked(check_batch, cls.batch), checked(check_score, cls.score)
    return cls


def complete(cls):
    """
    A user's class as a dataclass that inherits from Task, if it is not one already. In it
    `block_size = 32` does what `block_size: int = 32` does: it changes that field's default.
    """
    if "__dataclass_fields__" not in vars(cls):
        if "__init__" in vars(cls):
            raise TypeError("Task has an __init__; use fields, and __post_init__ to check them")
        cls = dataclass(cls)
    changed = []
    fields = Task.__dataclass_fields__ | cls.__dataclass_fields__
    for name, field in fields.items():
        if name in vars(cls) and name not in cls.__annotations__:
            changed.append((name, field.type, vars(cls)[name]))
    bases = (cls,) if issubclass(cls, Task) else (cls, Task)
    if not changed and len(bases) == 1:
        return cls
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return dataclasses.make_dataclass("Task", changed, bases=bases, namespace=names)


class BrokenTask(Exception):
    """What a task's batch or score returned is not what class Task says: one line, with its file"""


def checked(check, function):
    """A task's batch or score that checks its first result; batch's for each split and size."""
    @functools.wraps(function)
    def wrapped(self, first, *rest):
        found = function(self, first, *rest)
        seen = vars(self).setdefault("_checked", set())
        about = f"batch({first!r}, {rest[0]}, rng)" if check is check_batch else "score"
        if about not in seen:
            wrong = check(self, found, rest[0])
            if wrong:
                file = type(self).__module__.replace(".", "/") + ".py"
                raise BrokenTask(f"{file}: {about} {wrong}")
            seen.add(about)
        return found
    return wrapped


def check_batch(task, found, B):
    """-> what is wrong with a batch, in words, or None."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        return f"must return x, y, not a {type(found).__name__}"
    for name, a, low in zip("xy", found, (0, -1)):
        if not isinstance(a, np.ndarray) or a.dtype != np.int64:
            return f"returns {name} as {getattr(a, 'dtype', type(a).__name__)}, not NumPy int64"
        if a.ndim != 2 or len(a) != B or not a.size or a.shape != found[0].shape:
            return f"returns {name} of shape {a.shape}; x and y must both be ({B}, T)"
        if a.min() < low or a.max() >= task.vocab_size:
            return (f"returns {name} with values from {a.min()} to {a.max()}; they must be from "
                    f"{low} to vocab_size - 1 = {task.vocab_size - 1}")


def check_score(task, found, x):
    """-> what is wrong with scores, in words, or None."""
    if not isinstance(found, dict) or not found:
        return f"must return {{metric: (count, out_of)}}, not {found!r:.40}"
    for name, pair in found.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return f"must return a pair (count, out_of) for {name!r}"
        shapes = [tuple(getattr(a, "shape", ())) for a in pair]
        if shapes != [(len(x),)] * 2:
            return f"returns {name!r} of shapes {shapes}; count and out_of must be ({len(x)},)"
        if (pair[0] < 0).any() or (pair[0] > 1.001 * pair[1]).any():  # a TVD is rounded
            return f"returns {name!r} with a count that is not from 0 to its out_of"


def make(config, kept=()):
    """
    The task config["data"], with those of its fields that config has, and with what a checkpoint
    has kept for it. Raises ValueError.
    """
    cls = find(config["data"])
    task = cls(**{f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config})
    if kept:
        task.adopt(kept)
    return task


# -----------------------------------------------------------------------------
# metrics

def tvd(logits, target):
    """
    Total variation distance, 1/2 sum |softmax(logits) - target| (Post-Norm, Eq. 7):
    logits, target (..., n) -> (...).
    """
    return (logits.float().softmax(-1) - target).abs().sum(-1) / 2


def auc(logits, positive):
    """
    ROC AUC at every position: logits, positive (N, T) -> (T,), how often a positive's logit is
    above a negative's, over all pairs of sequences, ties 1/2. NaN where there are only positives or
    only negatives, and where a logit is NaN.
    """
    found = []
    for column, good in zip(logits.T, positive.T):
        p, n = good.sum(), (~good).sum()
        if not p or not n or np.isnan(column).any():
            found.append(np.nan)
            continue
        _, where, counts = np.unique(column, return_inverse=True, return_counts=True)
        ranks = counts.cumsum() - (counts - 1) / 2  # from 1; equal logits share their mean rank
        found.append((ranks[where][good].sum() - p * (p + 1) / 2) / (p * n))
    return np.array(found)


def binned(values, edges):
    """
    Means of values (..., T) between edges (n + 1,) -> (..., n). NaNs are left out; where there is
    nothing else it stays NaN.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # mean of nothing
        means = [np.nanmean(values[..., a:b], -1) for a, b in zip(edges, edges[1:])]
        return np.stack(means, -1)
