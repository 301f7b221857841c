"""
Selective copy: repeat what was said, without the blanks (Gu and Dao, 2023; CoPE section 5.2).

    _ D _ _ C F _ B | D C F B        n symbols shuffled among blanks, a separator, the n symbols again

Loss and score count the n outputs, each predicted from the true ones before it. Trained, and tested in iid, with n blanks;
dense has n / 2, sparse 2n. block_size is the length of the longest, sparse: n = (block_size - 1) / 4. Every batch is drawn anew.
"""
from dataclasses import dataclass

import numpy as np

BLANK, SEP, SYMBOLS = 0, 1, 14  # symbols are tokens 2 to 15


@dataclass
class Task:
    data: str = "selective_copy"  # a synthetic task (flipflop selective_copy counting set_complement dyck tomita), or text
    block_size: int = 65          # 4n + 1, n the symbols to copy

    splits = ("train", "iid", "dense", "sparse")
    vocab_size = 16
    # paper: CoPE, section 5.2 (it gives the model and the steps; batch and learning rate are ours); nano: for two CPU cores
    defaults = {
        "nano": dict(n_layer=2, n_head=2, n_embd=64, block_size=129, batch_size=32, max_iters=2000, learning_rate=2e-3,
                     min_lr=0.0, warmup_iters=200, eval_interval=500, eval_iters=10),
        "paper": dict(n_layer=2, n_head=2, n_embd=64, block_size=1025, batch_size=64, max_iters=100000, learning_rate=3e-4,
                      min_lr=0.0, warmup_iters=1000, eval_interval=1000, eval_iters=10),
    }

    def __post_init__(self):
        self.n = (self.block_size - 1) // 4
        if self.n < 2 or self.block_size != 4 * self.n + 1:
            raise ValueError(f"selective copy needs block_size = 4n + 1 with n >= 2 symbols to copy, not {self.block_size}")

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, 2n + blanks) int64; y is the next token where that is an output, -1 elsewhere."""
        n, blanks = self.n, dict(train=self.n, iid=self.n, dense=self.n // 2, sparse=2 * self.n)[split]
        symbols = rng.integers(2, 2 + SYMBOLS, (batch_size, n))
        where = np.argpartition(rng.random((batch_size, n + blanks), dtype=np.float32), n - 1, axis=1)[:, :n]
        said = np.full((batch_size, n + blanks), BLANK)
        np.put_along_axis(said, np.sort(where, axis=1), symbols, axis=1)
        tokens = np.concatenate((said, np.full((batch_size, 1), SEP), symbols), axis=1)
        x, y = tokens[:, :-1], tokens[:, 1:].copy()
        y[:, :n + blanks] = -1
        return x, y

    def score(self, logits, x, y):
        """logits (B, T, vocab) -> {metric: (count, out of) per sequence}: sequences with a wrong output, wrong outputs."""
        wrong = (logits.argmax(-1) != y) & (y != -1)
        return dict(sequence_error=(wrong.any(1), (y != -1).any(1)), token_error=(wrong.sum(1), (y != -1).sum(1)))

    def show(self, x):
        """One sequence's tokens as labels, for figures."""
        return ["_|ABCDEFGHIJKLMN"[t] for t in x]
