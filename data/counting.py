"""
Counting: run a small program in your head (CoPE section 5.3).

    a = 0 ; pass ; a ++ ; pass ; pass ; a ++ ; print a 2

A program is 3 to max_ops operations, uniformly: set a variable to 0 (weight 1; the name is
uniform), pass (weight 50), increment (weight 7; uniform over the variables already set). An
increment is drawn again, as another operation, where nothing is set or its variable is at 10; the
operations of a program that sets nothing are also drawn again. Then one of the set variables is
printed: loss and score count that one answer, a token from 0 to 10. Only the last block_size tokens
before the answer are kept, as in the authors' code: of long programs the beginning is lost, and
sometimes the setting that matters with it. In the authors' release `pass;` is one token and `a ++;`
two, so that 13 % of the paper's programs are cut instead of 53 %: --joined does the same, and
--size paper has it on. Training has n_train fixed programs; test sets are drawn anew: iid, pass100
and pass10, in which pass weighs 100 (longer contexts) and 10 (shorter ones).
"""
from functools import cached_property

import numpy as np

import data

# tokens: names are 0 to 4, numbers 10 to 20
EQUALS, PLUS, PASS, END, PRINT, NUMBER, PAD = 5, 6, 7, 8, 9, 10, 21
# operations, and the tokens of each; the name is added to the first of them
NONE, PASSES, SETS, INCREMENTS = -1, 0, 1, 2
FORMS = np.array([
    [PASS, END, PAD, PAD],
    [0, EQUALS, NUMBER, END],
    [0, PLUS, END, PAD],
    [PAD, PAD, PAD, PAD],  # NONE
], np.int8)
JOINED = np.where(FORMS == [[END], [PAD], [END], [PAD]], PAD, FORMS).astype(np.int8)  # pass; a ++;
SET_WEIGHT, INCREMENT_WEIGHT = 1, 7
PASS_WEIGHT = dict(train=50, iid=50, pass100=100, pass10=10)
LARGEST = 10


class Task(data.Task):
    block_size: int = 80  # tokens of a program that are kept, the last ones
    vars: int = 1         # variables, 1 to 5
    max_ops: int = 32     # operations in a program, 3 to this
    n_train: int = 10000  # training programs; 0 draws new ones for every batch
    joined: bool = False  # "pass;" is one token and "++;" too, as in the authors' release

    vocab_size = 22
    splits = ("train", "iid", "pass100", "pass10")
    stretches = False  # a larger block_size cuts off less, it does not make programs longer
    # paper: CoPE, section 5.3; size and training are the authors' release's (Adam, 100 epochs of
    # 10,000 programs); nano: for two CPU cores
    defaults = {
        "nano": dict(
            n_layer=2, n_head=2, n_embd=128, block_size=80, max_ops=32, n_train=0, batch_size=64,
            max_iters=1000, learning_rate=1e-3, min_lr=0.0, warmup_iters=100,
            eval_interval=100, eval_iters=10, P=33),
        "paper": dict(
            n_layer=4, n_head=4, n_embd=256, block_size=512, max_ops=512, joined=True,
            dropout=0.1, batch_size=64, max_iters=15625, learning_rate=7e-5, lr_decay="none",
            warmup_iters=0, weight_decay=0.0, beta2=0.999, grad_clip=0.0,
            eval_interval=500, eval_iters=10, P=513, share=False),
    }

    def __post_init__(self):
        if not 1 <= self.vars <= 5:
            raise ValueError(f"vars={self.vars} must be between 1 and 5")
        if not 3 <= self.max_ops <= 10000 or self.block_size < 8 or self.n_train < 0:
            raise ValueError(
                "counting needs max_ops from 3 to 10000, block_size >= 8 and n_train >= 0")

    @cached_property
    def fixed(self):
        """The training programs, the same for every model and seed."""
        return self.programs(self.n_train, PASS_WEIGHT["train"], np.random.default_rng(0))

    def batch(self, split, batch_size, rng):
        """-> x, y (B, block_size) int64: a program, padded; the answer at its end."""
        if split == "train" and self.n_train:
            rows = rng.integers(0, self.n_train, batch_size)
            x, y = self.fixed
            x, y = x[rows], y[rows]
        else:
            x, y = self.programs(batch_size, PASS_WEIGHT[split], rng)
        return x.astype(np.int64), y.astype(np.int64)

    def programs(self, count, pass_weight, rng):
        """count programs -> x, y (count, block_size) int8."""
        xs, ys = [], []
        for first in range(0, count, 1000):
            operation, name, value = self.run(min(1000, count - first), pass_weight, rng)
            x, y = self.write(operation, name, value, rng)
            xs.append(x)
            ys.append(y)
        return np.concatenate(xs), np.concatenate(ys)

    def run(self, count, pass_weight, rng):
        """
        Draw programs and run them, all at once -> operation (count, max_ops); name, the variable of
        each; value (count, vars), at the end, -1 if never set.
        """
        length = rng.integers(3, self.max_ops + 1, count)
        first_set = self.draw_first_set(length, pass_weight, rng)
        operation = np.full((count, self.max_ops), NONE, np.int8)
        name = np.zeros((count, self.max_ops), np.int8)
        value = np.full((count, self.vars), -1, np.int8)
        rows = np.arange(count)
        for t in range(self.max_ops):
            # what is drawn again has no weight: an increment keeps the share of the valid ones
            is_set = value >= 0
            ready = is_set & (value < LARGEST)
            n_ready = ready.sum(1)
            each = INCREMENT_WEIGHT / np.maximum(is_set.sum(1), 1)  # weight of one variable's
            u = rng.random(count) * (SET_WEIGHT + pass_weight + each * n_ready)
            now = np.select(
                [t >= length, t < first_set, t == first_set, u < SET_WEIGHT,
                 u < SET_WEIGHT + pass_weight],
                [NONE, PASSES, SETS, SETS, PASSES], INCREMENTS)
            nth = ((u - SET_WEIGHT - pass_weight) / each).astype(np.int64)
            nth = np.minimum(nth, n_ready - 1)  # which one of those that are ready
            incremented = (ready.cumsum(1) > nth[:, None]).argmax(1)
            which = np.where(now == SETS, rng.integers(0, self.vars, count), incremented)
            which[now < SETS] = 0
            value[rows, which] += now == INCREMENTS
            value[rows[now == SETS], which[now == SETS]] = 0
            operation[:, t] = now
            name[:, t] = which
        return operation, name, value

    def draw_first_set(self, length, pass_weight, rng):
        """
        Where each program first sets a variable. Before that there are only passes, each with
        probability r, so the place is geometric, given that it comes at all.
        """
        r = pass_weight / (pass_weight + SET_WEIGHT)
        u = rng.random(len(length)) * (1 - r**length)
        return np.floor(np.log1p(-u) / np.log(r)).clip(0, length - 1)

    def write(self, operation, name, value, rng):
        """Operations as tokens, then the query; the last block_size of these, then padding."""
        count = len(operation)
        asked = (rng.random(value.shape) * (value >= 0)).argmax(1)  # uniform over the set ones
        tokens = (JOINED if self.joined else FORMS)[operation]      # (count, max_ops, 4)
        tokens[..., 0] += name                                      # 0 where there is none
        query = np.stack((np.full(count, PRINT), asked), 1).astype(np.int8)
        tokens = np.concatenate((tokens.reshape(count, 4 * self.max_ops), query), 1)

        kept = tokens != PAD
        to = kept.cumsum(1, dtype=np.int32) - 1  # where a token goes, the padding taken out
        too_many = np.maximum(0, to[:, -1] + 1 - self.block_size)
        to -= too_many[:, None]
        row, column = np.nonzero(kept & (to >= 0))
        x = np.full((count, self.block_size), PAD, np.int8)
        x[row, to[row, column]] = tokens[row, column]

        y = np.full((count, self.block_size), -1, np.int8)
        rows = np.arange(count)
        y[rows, to[:, -1]] = NUMBER + value[rows, asked]
        return x, y

    def score(self, logits, x, y):
        """Wrong answers."""
        answer = y != -1
        wrong = (logits.argmax(-1) != y) & answer
        return dict(answer_error=(wrong.any(1), answer.any(1)))

    def answer(self, x, y):
        return y.amax(1) - NUMBER

    def show(self, x):
        numbers = [str(n) for n in range(LARGEST + 1)]
        labels = [*"abcde", "=", "++", "pass", ";", "print", *numbers, ""]
        if self.joined:
            labels[PLUS], labels[PASS] = "++;", "pass;"
        return [labels[t] for t in x]
