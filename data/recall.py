"""
Recall through filler: what was said about this key? (Associative recall as in Ba et al., 2016, the
task and its sizes ours.)

    . . c7 . a2 . . . f0 . . . . d9 . b4 . a      a2

n_pairs pairs of a key and a value, a token each, are scattered through filler; no two have the same
key. The last token asks for a key: loss and score count the pair that it is in, which has to be
read, however far back it is. A longer string has as many pairs and more filler, so it asks for
nothing but to look farther. Every batch is drawn anew.
"""
import numpy as np

import data

FILLER, KEYS = 0, 1  # key k is token 1 + k, the pair of key k and value v 1 + n_keys (1 + v) + k


class Task(data.Task):
    block_size: int = 64  # tokens in a string, the question at its end included
    n_pairs: int = 8      # pairs in a string
    n_keys: int = 16      # keys there are
    n_values: int = 8     # values there are

    # no paper's sizes: both are ours. nano: for two CPU cores
    defaults = {
        "nano": dict(
            n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=64, max_iters=500,
            learning_rate=3e-3, min_lr=0.0, warmup_iters=50, eval_interval=100, eval_iters=10),
        "paper": dict(
            n_layer=4, n_head=4, n_embd=256, block_size=512, batch_size=64, max_iters=25000,
            learning_rate=3e-4, min_lr=0.0, warmup_iters=500, eval_interval=500, eval_iters=10),
    }

    def __post_init__(self):
        if not 1 <= self.n_pairs <= self.n_keys or self.n_values < 2:
            raise ValueError("recall needs n_pairs from 1 to n_keys and n_values of at least 2")
        if self.block_size <= self.n_pairs:
            raise ValueError(f"{self.n_pairs} pairs and a question do not fit into "
                             f"block_size={self.block_size}")
        self.vocab_size = 1 + self.n_keys * (1 + self.n_values)

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, block_size) int64; y is the pair asked for at the end, else -1."""
        B, T, n = batch_size, self.block_size, self.n_pairs
        key = rng.random((B, self.n_keys), dtype=np.float32).argsort(1)[:, :n]
        value = rng.integers(0, self.n_values, (B, n))
        pair = KEYS + self.n_keys * (1 + value) + key
        u = rng.random((B, T - 1), dtype=np.float32)
        places = np.argpartition(u, n - 1, axis=1)[:, :n]
        row, asked = np.arange(B), rng.integers(0, n, B)

        x, y = np.full((B, T), FILLER), np.full((B, T), -1)
        np.put_along_axis(x, places, pair, axis=1)
        x[:, -1], y[:, -1] = KEYS + key[row, asked], pair[row, asked]
        return x, y

    def show(self, x):
        keys = [chr(ord("a") + k) if k < 26 else f"k{k}:" for k in range(self.n_keys)]
        labels = [".", *keys]
        for v in range(self.n_values):
            labels += [f"{key}{v}" for key in keys]
        return [labels[t] for t in x]
