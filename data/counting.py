"""
Counting: run a small program in your head (CoPE section 5.3).

    a = 0 ; pass ; a ++ ; pass ; pass ; a ++ ; print a 2

A program is 3 to max_ops operations, uniformly: set a variable to 0 (weight 1; the name is uniform), pass (weight 50), increment
(weight 7; uniform over the variables already set). An increment is drawn again, as another operation, where nothing is set or its
variable is at 10; the operations of a program that sets nothing are drawn again, too. Then one of the set variables is printed:
loss and score count that one answer, a token from 0 to 10. Only the last block_size tokens before the answer are kept, as in the
paper: of long programs the beginning is lost, and sometimes the setting that matters with it. Training has n_train fixed
programs; test sets are drawn anew: iid, pass100 and pass10, in which pass weighs 100 (longer contexts) and 10 (shorter ones).
"""
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NAMES, EQUALS, PLUS, PASS, END, PRINT, NUMBER, PAD = 0, 5, 6, 7, 8, 9, 10, 21  # names 0 to 4, numbers 10 to 20
SET_WEIGHT, INCREMENT_WEIGHT, LARGEST = 1, 7, 10


@dataclass
class Task:
    data: str = "counting"  # a synthetic task (flipflop selective_copy counting set_complement dyck tomita), or text
    block_size: int = 80    # tokens of a program that are kept, the last ones
    vars: int = 1           # variables, 1 to 5
    max_ops: int = 32       # operations in a program, 3 to this
    n_train: int = 10000    # training programs; 0 draws new ones for every batch

    splits = ("train", "iid", "pass100", "pass10")
    vocab_size = 22
    stretches = False  # a larger block_size cuts off less, it does not make programs longer
    # paper: CoPE, section 5.3 (batch and learning rate are ours); nano: for two CPU cores
    defaults = {
        "nano": dict(n_layer=2, n_head=2, n_embd=128, block_size=80, max_ops=32, n_train=0, batch_size=64, max_iters=1000,
                     learning_rate=1e-3, min_lr=0.0, warmup_iters=100, eval_interval=100, eval_iters=10, P=33),
        "paper": dict(n_layer=4, n_head=4, n_embd=256, block_size=512, max_ops=512, batch_size=64, max_iters=50000,
                      learning_rate=3e-4, min_lr=0.0, warmup_iters=1000, eval_interval=500, eval_iters=10, P=513, share=False),
    }

    def __post_init__(self):
        if not 1 <= self.vars <= 5:
            raise ValueError(f"vars={self.vars} must be between 1 and 5")
        if not 3 <= self.max_ops <= 10000 or self.block_size < 8 or self.n_train < 0:
            raise ValueError("counting needs max_ops from 3 to 10000, block_size >= 8 and n_train >= 0")

    @cached_property
    def fixed(self):
        """The training programs, the same for every model and seed."""
        return self.programs(self.n_train, 50, np.random.default_rng(0))

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, block_size) int64: a program, padded on the right; y the answer at its last token, -1 elsewhere."""
        if split == "train" and self.n_train:
            rows = rng.integers(0, self.n_train, batch_size)
            x, y = self.fixed[0][rows], self.fixed[1][rows]
        else:
            x, y = self.programs(batch_size, dict(train=50, iid=50, pass100=100, pass10=10)[split], rng)
        return x.astype(np.int64), y.astype(np.int64)

    def programs(self, count, pass_weight, rng):
        """count programs -> x, y (count, block_size) int8."""
        chunks = [self.write(*self.run(min(1000, count - n), pass_weight, rng), rng) for n in range(0, count, 1000)]
        return tuple(np.concatenate(a) for a in zip(*chunks))

    def run(self, count, pass_weight, rng):
        """-> kind (count, max_ops): -1 none, 0 pass, 1 set, 2 increment; name (count, max_ops); final values (count, vars), -1 unset."""
        length = rng.integers(3, self.max_ops + 1, count)
        kind, name = np.full((count, self.max_ops), -1, np.int8), np.zeros((count, self.max_ops), np.int8)
        value, rows = np.full((count, self.vars), -1, np.int8), np.arange(count)
        # before the first set there are only passes, each of probability r: its place is geometric, given that it comes at all
        r = pass_weight / (pass_weight + SET_WEIGHT)
        first = np.floor(np.log1p(-rng.random(count) * (1 - r**length)) / np.log(r)).clip(0, length - 1)
        for t in range(self.max_ops):
            # drawing an invalid operation again = giving it no weight: an increment keeps the share of its valid variables
            n_set, ready = (value >= 0).sum(1), (value >= 0) & (value < LARGEST)
            each = INCREMENT_WEIGHT / np.maximum(n_set, 1)  # an increment's weight, per variable
            u = rng.random(count) * (SET_WEIGHT + pass_weight + each * ready.sum(1))
            v = np.minimum(((u - SET_WEIGHT - pass_weight) / each).astype(np.int64), ready.sum(1) - 1)  # the v-th that is ready
            now = np.where(u < SET_WEIGHT, 1, np.where(u < SET_WEIGHT + pass_weight, 0, 2))
            now = np.where(t <= first, t == first, now)
            now[t >= length] = -1
            which = np.where(now == 1, rng.integers(0, self.vars, count), (ready.cumsum(1) > v[:, None]).argmax(1))
            which[now < 1] = 0
            value[rows, which] = np.where(now == 1, 0, value[rows, which] + (now == 2))
            kind[:, t], name[:, t] = now, which
        return kind, name, value

    def write(self, kind, name, value, rng):
        """Operations as tokens, the query after them, trimmed on the left to block_size and padded on the right."""
        count = len(kind)
        asked = (rng.random(value.shape) * (value >= 0)).argmax(1)  # uniform over the set ones
        forms = np.array([[PASS, END, PAD, PAD], [0, EQUALS, NUMBER, END], [0, PLUS, END, PAD], [PAD] * 4], np.int8)  # -1 is the last
        tokens = forms[kind]
        tokens[..., 0] += name  # 0 where there is none
        query = np.stack((np.full(count, PRINT), asked), 1).astype(np.int8)
        tokens = np.concatenate((tokens.reshape(count, 4 * self.max_ops), query), 1)
        kept = tokens != PAD
        to = kept.cumsum(1, dtype=np.int32) - 1
        to -= np.maximum(0, to[:, -1:] + 1 - self.block_size)
        row, column = np.nonzero(kept & (to >= 0))
        x, y = np.full((count, self.block_size), PAD, np.int8), np.full((count, self.block_size), -1, np.int8)
        x[row, to[row, column]] = tokens[row, column]
        y[np.arange(count), to[:, -1]] = value[np.arange(count), asked]
        y[y >= 0] += NUMBER
        return x, y

    def score(self, logits, x, y):
        """logits (B, T, vocab) -> {metric: (count, out of) per program}: wrong answers."""
        wrong = (logits.argmax(-1) != y) & (y != -1)
        return dict(answer_error=(wrong.any(1), (y != -1).any(1)))

    def show(self, x):
        """One program's tokens as labels, for figures."""
        return [[*"abcde", "=", "++", "pass", ";", "print", *map(str, range(11)), ""][t] for t in x]
