"""
Set complement: which tokens have not been said yet? (Post-Norm, section 3.1.)

    3 1 5 | any of 0 2 4 6 7, each with the same probability

An input is the beginning of a permutation; after t of the n tokens the right answer is the uniform
distribution over the other n - t. Training takes the token that follows, a sample of it. Trained,
and tested in iid, on inputs of block_size tokens; half has n / 2, full n - 1.
"""
import numpy as np
import torch
from torch.nn import functional as F

import data


class Task(data.Task):
    block_size: int = 8  # tokens in a training input, less than n
    n: int = 64          # tokens there are

    splits = ("train", "iid", "half", "full")
    # sizes are ours
    nano = dict(
        n_layer=2, n_head=4, n_embd=64, block_size=8, batch_size=64, max_iters=2000,
        learning_rate=1e-3, min_lr=0.0, lr_decay="linear", warmup_iters=100,
        eval_interval=500, eval_iters=10, pe="nope")
    paper = nano | dict(max_iters=100000, warmup_iters=1000, eval_interval=5000)
    defaults = dict(nano=nano, paper=paper)

    def __post_init__(self):
        self.vocab_size = self.n
        if self.n < 2 or not 1 <= self.block_size < self.n:
            raise ValueError("set complement needs n >= 2 and block_size from 1 to n - 1")

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, T) int64, y the next token of the permutation."""
        short, half, full = self.block_size, max(1, self.n // 2), self.n - 1
        T = dict(train=short, iid=short, half=half, full=full)[split]
        permutation = rng.random((batch_size, self.n), dtype=np.float32).argsort(1)
        return permutation[:, :T], permutation[:, 1:T + 1]

    def target(self, x):
        """x (B, T) -> the next token's distribution, (B, T, n) float32."""
        absent = F.one_hot(x, self.n).cumsum(1) == 0
        return absent / absent.sum(-1, keepdim=True)

    def score(self, logits, x, y):
        """Total variation distance (Eq. 7): mean over the prefixes, and at the last one."""
        last = data.tvd(logits[:, -1], self.target(x)[:, -1])
        return super().score(logits, x, y) | dict(tvd_last=(last, torch.ones_like(last)))
