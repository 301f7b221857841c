"""
Flip-flop language modelling: remember one bit (Liu et al., 2023; CoPE section 5.1, TRA section
3.1).

    w 1 i 0 i 1 r 1 i 0 w 0 i 1 r 0      write a bit, ignore a bit, read: the bit of the last write

A string is block_size / 2 pairs of an instruction and a bit. The first instruction is w, the last
r; the others are i with probability p_ignore, and w and r with half of the rest each. Loss and
score count only the bit after r. Test sets: iid (as in training), sparse (few writes: far back) and
dense (many writes: many to confuse). Every batch is drawn anew.
"""
import numpy as np
import torch

import data

W, R, I, ZERO, ONE = range(5)  # noqa: E741


class Task(data.Task):
    block_size: int = 64    # tokens in a string, even
    p_ignore: float = 0.8   # share of i in training and in iid
    p_sparse: float = 0.98  # share of i in sparse
    p_dense: float = 0.1    # share of i in dense

    vocab_size = 5
    splits = ("train", "iid", "sparse", "dense")
    # paper: TRA, sections 3.1 and 3.2 and its authors' notebook; nano: for two CPU cores
    defaults = {
        "nano": dict(
            n_layer=2, n_head=2, n_embd=128, block_size=64, batch_size=64, max_iters=500,
            learning_rate=5e-4, min_lr=0.0, warmup_iters=50, eval_interval=100, eval_iters=10),
        "paper": dict(
            n_layer=4, n_head=4, n_embd=256, block_size=512, batch_size=64, max_iters=25000,
            learning_rate=1e-4, min_lr=0.0, warmup_iters=0, grad_clip=0.0,
            eval_interval=500, eval_iters=10),
    }

    def __post_init__(self):
        if self.block_size < 4 or self.block_size % 2:
            raise ValueError("a flip-flop string is pairs, from w to r: "
                             f"block_size={self.block_size} must be even and at least 4")
        for name in ("p_ignore", "p_sparse", "p_dense"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, block_size - 1) int64; y is the next token after an r, else -1."""
        p_ignore = dict(
            train=self.p_ignore, iid=self.p_ignore, sparse=self.p_sparse, dense=self.p_dense)[split]
        n = self.block_size // 2

        u = rng.random((batch_size, n), dtype=np.float32)
        write_or_read = np.where(u < (1 + p_ignore) / 2, W, R)
        instruction = np.where(u < p_ignore, I, write_or_read)
        instruction[:, 0] = W
        instruction[:, -1] = R

        bit = rng.integers(0, 2, (batch_size, n), dtype=np.int8)
        last_write = np.maximum.accumulate(np.where(instruction == W, np.arange(n), 0), 1)
        bit = np.where(instruction == R, np.take_along_axis(bit, last_write, 1), bit)

        tokens = np.stack((instruction, ZERO + bit), -1).reshape(batch_size, 2 * n).astype(np.int64)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x, np.where(x == R, y, -1)

    def score(self, logits, x, y):
        """Strings in which every read is right, and wrong reads."""
        read = y != -1
        wrong = (logits.argmax(-1) != y) & read
        return dict(exact_match=(~wrong.any(1), read.any(1)),
                    glitch_rate=(wrong.sum(1), read.sum(1)))

    def holder(self, x):
        """The bit of the last write before an r."""
        places = torch.arange(x.size(1)).expand_as(x)
        written = torch.where(x == W, places + 1, 0).cummax(1).values
        return torch.where(x == R, written, -1)

    def show(self, x):
        return ["wri01"[t] for t in x]
