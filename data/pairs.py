"""
Pairs of two tokens: what came after this key? (Multi-query associative recall, Arora et al., 2023,
arXiv 2312.04927; their pairs come first and their questions after, without filler.)

    . . c 7 . a 2 . . . f 0 . . a 2 . . . d 9 . c 7 .

n_pairs pairs, a key and the value behind it, are scattered through filler, each of them n_times. No
two have the same key. Loss and score count the value behind every key that has come before. That
takes two steps: a value has to note which key stands before it, and a key has to look for the value
that did. A longer string has as many pairs and more filler. Every batch is drawn anew.
"""
import numpy as np

import data

FILLER, KEYS = 0, 1  # key k is token 1 + k, value v is token 1 + n_keys + v


class Task(data.Task):
    block_size: int = 64  # tokens in a string
    n_pairs: int = 8      # pairs in a string
    n_times: int = 2      # how often each of them comes
    n_keys: int = 16      # keys there are
    n_values: int = 16    # values there are

    # for two CPU cores
    defaults = {
        "nano": dict(
            n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=64, max_iters=500,
            learning_rate=3e-3, min_lr=0.0, warmup_iters=50, eval_interval=100, eval_iters=10),
    }

    def __post_init__(self):
        if not 1 <= self.n_pairs <= self.n_keys or self.n_values < 2:
            raise ValueError("pairs needs n_pairs from 1 to n_keys and n_values of at least 2")
        if self.n_times < 2 or self.block_size < 2 * self.n_times * self.n_pairs:
            raise ValueError(f"pairs needs n_times of at least 2, and 2 x n_times={self.n_times} x "
                             f"n_pairs={self.n_pairs} tokens in block_size={self.block_size}")
        self.vocab_size = 1 + self.n_keys + self.n_values

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, block_size) int64; y is the value of a key that came before."""
        B, T, n = batch_size, self.block_size, self.n_pairs
        key = KEYS + rng.random((B, self.n_keys), dtype=np.float32).argsort(1)[:, :n]
        value = KEYS + self.n_keys + rng.integers(0, self.n_values, (B, n))

        # places of two tokens: some of T - many, each moved on by those before it
        many = n * self.n_times
        u = rng.random((B, T - many), dtype=np.float32)
        places = np.sort(u.argsort(1)[:, :many], 1) + np.arange(many)
        which = rng.permuted(np.tile(np.arange(n), (B, self.n_times)), axis=1)
        key, value = (np.take_along_axis(a, which, 1) for a in (key, value))
        before = np.tri(many, k=-1, dtype=bool)
        again = ((which[:, :, None] == which[:, None]) & before).any(2)

        x, y = np.full((B, T), FILLER), np.full((B, T), -1)
        np.put_along_axis(x, places, key, axis=1)
        np.put_along_axis(x, places + 1, value, axis=1)
        np.put_along_axis(y, places, np.where(again, value, -1), axis=1)
        return x, y

    def show(self, x):
        keys = [chr(ord("a") + k) if k < 26 else f"k{k}" for k in range(self.n_keys)]
        labels = [".", *keys, *map(str, range(self.n_values))]
        return [labels[t] for t in x]
