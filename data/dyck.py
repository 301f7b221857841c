"""
Bounded Dyck language: brackets of k types, nested at most m deep (Hewitt et al., 2020; Post-Norm,
section 6.3).

    <s> ( [ ] ( ) ) [ ...        k = 2, m = 2

At depth 0 every opener has probability 1/(2k) and the end 1/2; in between every opener 1/(2k) and
the matching closer 1/2; at depth m the matching closer 1. Such strings are short: the walk goes on
where it would end, and the target keeps the true distribution, the end included.
"""
import numpy as np
import torch
from torch.nn import functional as F

import data

BOS, EOS, OPEN = 0, 1, 2  # openers are 2 to k + 1, closers k + 2 to 2k + 1


class Task(data.Task):
    block_size: int = 64  # tokens in a training input, <s> included
    k: int = 2            # types of brackets
    m: int = 3            # greatest depth

    splits = ("train", "iid", "long")
    # paper: Post-Norm, section 6.3, whose search draws the rest at random
    nano = dict(
        n_layer=2, n_head=4, n_embd=64, block_size=64, batch_size=64, max_iters=2000,
        learning_rate=1e-3, min_lr=0.0, lr_decay="linear", warmup_iters=100,
        eval_interval=500, eval_iters=10)
    paper = nano | dict(max_iters=100000, warmup_iters=1000, eval_interval=5000)
    defaults = dict(nano=nano, paper=paper)

    def __post_init__(self):
        self.vocab_size = 2 + 2 * self.k
        if self.k < 1 or self.m < 1:
            raise ValueError("dyck needs k and m of at least 1")

    def batch(self, split, batch_size, rng):
        """-> x, y (B, T): a walk from <s>; y is a sample of what may follow."""
        B, T = batch_size, self.block_size
        if split == "long":
            T = 4 * self.block_size
        up = rng.random((T, B)) < 0.5
        bracket = rng.integers(0, self.k, (T, B))
        end = rng.random((T, B)) < 0.5

        x = np.full((B, T + 1), BOS)
        y = np.empty((B, T), np.int64)
        rows = np.arange(B)
        depth = np.zeros(B, np.int64)
        stack = np.zeros((B, self.m + 1), np.int64)  # the types of the open brackets, by depth
        for t in range(T):
            opens = (depth == 0) | (up[t] & (depth < self.m))
            closer = self.k + stack[rows, depth]
            x[:, t + 1] = OPEN + np.where(opens, bracket[t], closer)
            y[:, t] = np.where((depth == 0) & end[t], EOS, x[:, t + 1])
            depth += np.where(opens, 1, -1)
            stack[rows[opens], depth[opens]] = bracket[t][opens]
        return x[:, :-1], y

    def states(self, x):
        """x -> the depth, and the type of the innermost open bracket or 0."""
        opens = (x >= OPEN) & (x < OPEN + self.k)
        closes = x >= OPEN + self.k
        depth = (opens.long() - closes.long()).cumsum(1)
        # the innermost open bracket: the last opener up to this depth
        at = torch.arange(x.size(1), device=x.device).expand_as(x)
        top = torch.zeros_like(x)
        for level in range(1, self.m + 1):
            last = torch.where(opens & (depth == level), at, -1).cummax(1).values
            opener = x.gather(1, last.clamp(min=0)) - OPEN
            top = torch.where(depth == level, opener, top)
        return depth, top

    def target(self, x):
        """x (B, T) -> the next token's distribution, (B, T, vocab) float32."""
        depth, top = self.states(x)
        p = torch.zeros(*x.shape, self.vocab_size, device=x.device)
        p[..., OPEN:OPEN + self.k] = ((depth < self.m) / (2 * self.k))[..., None]
        p[..., EOS] = (depth == 0) / 2
        close = torch.where(depth == self.m, 1.0, 0.5) * (depth > 0)
        return p + close[..., None] * F.one_hot(OPEN + self.k + top, self.vocab_size)

    def contrast(self, logits, x):
        """The end's logit, and whether the string may end there."""
        depth, _ = self.states(x)
        return logits[..., EOS], depth == 0

    def show(self, x):
        openers, closers = list("([{<")[:self.k], list(")]}>")[:self.k]
        for i in range(4, self.k):
            openers.append(f"({i}")
            closers.append(f"){i}")
        labels = ["<s>", "</s>", *openers, *closers]
        return [labels[t] for t in x]
