"""
Pairs of two tokens: what came after this key? (Multi-query associative recall, Arora et al., 2023,
arXiv 2312.04927; their pairs come first and their questions after, without filler.)

    . . c 7 . a 2 . . . f 0 . . a 2 . . . d 9 . c 7 .

n_pairs pairs, a key and the value behind it, are scattered through filler, each of them twice; no
two have the same key. Loss and score count the value behind a key that has come before. It takes
two steps: every value has to note the key before it, and a key has to look for the value that did.
A longer string has as many pairs and more filler. Every batch is drawn anew.
"""
from dataclasses import dataclass

import numpy as np

import data

FILLER, KEYS = 0, 1  # key k is token 1 + k, value v is token 1 + n_keys + v


@dataclass
class Task(data.Task):
    block_size: int = 64  # tokens in a string
    n_pairs: int = 8      # pairs in a string
    n_times: int = 2      # how often each of them comes
    n_keys: int = 16      # keys there are
    n_values: int = 16    # values there are

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
            raise ValueError("pairs needs n_pairs from 1 to n_keys and n_values of at least 2")
        if self.block_size < 2 * self.n_times * self.n_pairs:
            raise ValueError(f"{self.n_pairs} pairs, twice two tokens each, do not fit into "
                             f"block_size={self.block_size}")
        self.vocab_size = 1 + self.n_keys + self.n_values

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, block_size) int64; y is the value behind a second key, else -1."""
        B, T, n = batch_size, self.block_size, self.n_pairs
        key = KEYS + rng.random((B, self.n_keys), dtype=np.float32).argsort(1)[:, :n]
        value = KEYS + self.n_keys + rng.integers(0, self.n_values, (B, n))

        # m n places of two tokens: m n of T - m n, each moved on by those before it
        m = self.n_times
        u = rng.random((B, T - m * n), dtype=np.float32)
        places = np.sort(u.argsort(1)[:, :m * n], 1) + np.arange(m * n)
        pair = np.tile(np.arange(n), (B, m))
        pair = rng.permuted(pair, axis=1)     # which pair is at each of them
        key, value = (np.take_along_axis(a, pair, 1) for a in (key, value))
        again = ((pair[:, :, None] == pair[:, None]) & np.tri(m * n, k=-1, dtype=bool)).any(2)

        x, y = np.full((B, T), FILLER), np.full((B, T), -1)
        np.put_along_axis(x, places, key, axis=1)
        np.put_along_axis(x, places + 1, value, axis=1)
        np.put_along_axis(y, places, np.where(again, value, -1), axis=1)
        return x, y

    def show(self, x):
        keys = [chr(ord("a") + k) if k < 26 else f"k{k}" for k in range(self.n_keys)]
        labels = [".", *keys, *map(str, range(self.n_values))]
        return [labels[t] for t in x]
