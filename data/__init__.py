"""
Tasks: what a batch is (class Task), and how a long one goes through a model.
"""
import dataclasses
import sys
from dataclasses import dataclass

import numpy as np
import torch

# how much of a long sequence goes through a model at once:
PIECE = 1024     # tokens, where it sees up to 16,384
CELLS = 2**23    # where it sees more, queries times keys: a head of CoPE makes eight such matrices
LOGITS = 2**26   # logits, tokens times vocabulary


@dataclass
class Task:
    """
    The contract. A task is a file data/NAME.py with a class Task(data.Task), asked for as --data
    NAME. It must have `batch` and `vocab_size`, which may be set in __post_init__; tokens are from
    0 to vocab_size - 1. What else it leaves out is as written here.

    A field, which is a member with a type, is also a flag of train.py, its comment the flag's help
    (at --block_size stands the model's). Settings that do not fit raise ValueError, one line for
    the user, in __post_init__.

    Below, B is the number of sequences and T their length in tokens. Batches are NumPy arrays drawn
    from `rng` alone: the same seed gives the same batch on every machine. `forward`, `score`,
    `contrast`, `target`, `answer` and `holder` are given torch tensors.
    """
    data: str = ""        # a task (a file in data/), a known corpus, or your own file or folder
    block_size: int = 64  # tokens in a training sequence

    splits = ("train", "iid")  # trained on the first, validated and tested on the others
    defaults = {"nano": {}}    # {size: {flag: value}} for train.py, the default size first
    unit = "sequences"         # what eval.py counts: its flag --sequences says how many
    stretches = True           # whether a larger block_size makes the sequences longer
    source = ""                # sha256 of a text: a checkpoint keeps what it was trained on

    # target(x) -> (B, T, vocab_size), the true distribution of the token after each prefix: gives
    #     the total variation distance by position
    # contrast(logits, x) -> a logit (B, T), and whether it should be high: gives the ROC AUC
    # answer(x, y) -> (B,) int64, a sequence's one right answer: gives the first metric by answer,
    #     and what always giving the commonest one would get
    # holder(x) -> (B, T) int64, the position of the token that has the answer at each, -1 where
    #     nothing is asked: figures/page.py opens a page at the head that looks there
    # evaluate(runs, args) -> what eval.py's JSON says, and a row of numbers for each run: of a task
    #     that is not scored by `score` (lab/bert/retrieval.py)
    # encoding(config) -> the tiktoken Encoding in which a model writes text; called on the class
    target = contrast = answer = holder = evaluate = encoding = None

    @property
    def validation_splits(self):
        """Looked at during training; the loss of the first says which is best.pt."""
        return self.splits[1:]

    def __init_subclass__(cls):
        """A subclass is a dataclass, decorated or not; `block_size = 32` in it needs no type."""
        for field in dataclasses.fields(cls):
            if field.name in vars(cls):
                cls.__annotations__.setdefault(field.name, field.type)
        dataclass(cls)

    def batch(self, split, batch_size, rng):
        """
        -> x, y (B, T) int64; y is what to predict at a position, -1 where it is not scored. The
        loss of a batch in which nothing is scored is NaN.
        """
        raise NotImplementedError

    def tensors(self, split, batch_size, rng):
        """batch() as torch tensors. Raises ValueError where it is not what `batch` says."""
        batch = self.batch(split, batch_size, rng)
        x, y = (torch.from_numpy(np.ascontiguousarray(a)) for a in batch)
        check_batch(self, f"batch({split!r}, {batch_size}, rng)", batch_size, x, y)
        return x, y

    def prepare(self, model):
        """Called once, before the first step of a new run. Raises ValueError if they do not fit."""
        if getattr(model, "is_encoder", False):
            raise ValueError(f"{self.data} needs a causal model, such as cable: an encoder sees "
                             "the tokens that it is to predict")

    def state(self):
        """{name: int64 tensor} of what a checkpoint keeps for the task, beside its fields."""
        return {}

    def load(self, state):
        """Take over what a checkpoint has kept. Raises ValueError."""

    def forward(self, model, x, y):
        """-> logits, which `score` is given, and what training minimises, a scalar."""
        return model(x, y)

    def score(self, logits, x, y):
        """
        logits (B, T, vocab_size) -> {metric: (count, out_of)}, both (B,), of each sequence: the
        metric is the sum of the counts over the sum of out_of. {} where the loss says all.
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


def check_batch(task, what, B, x, y):
    for name, a, least in (("x", x, 0), ("y", y, -1)):
        says = f"{type(task).__module__}: {what} returns {name}"
        if a.dtype != torch.int64 or a.shape != (B, x.shape[-1]):
            raise ValueError(f"{says} as {a.dtype} of shape {tuple(a.shape)}: x and y must both be "
                             f"int64 of shape ({B}, T)")
        if a.min() < least or a.max() >= task.vocab_size:
            raise ValueError(f"{says} with values from {a.min()} to {a.max()}: they must be from "
                             f"{least} to {task.vocab_size - 1}")


def tvd(logits, target):
    """Total variation distance (Post-Norm, Eq. 7): logits, target (..., n) -> (...)."""
    return (logits.float().softmax(-1) - target).abs().sum(-1) / 2


# -----------------------------------------------------------------------------
# long sequences

def piece(model, T):
    """
    How many tokens of a sequence go through a model at once where it sees T: memory grows neither
    with T x T nor with T x vocabulary. An encoder, which has no cache, takes all of them.
    """
    if getattr(model, "is_encoder", False):
        return T
    tokens = PIECE if T <= 16384 else CELLS // T
    return max(1, min(tokens, LOGITS // model.config.vocab_size))


def in_pieces(model, x, cache=None):
    """Yields the logits of x (B, T), piece after piece, which go through the model over a cache."""
    T = x.size(1)
    parts = x.split(piece(model, T), dim=1)
    if cache is None and len(parts) > 1:
        cache = sys.modules[type(model).__module__].Cache(T)
    for part in parts:
        yield model(part, cache=cache)[0]
