"""
Max retrieval: which class has the item with the highest priority? (Velickovic et al., 2025;
Post-Norm, section 6.2.)

    (.31, b) (.94, d) (.07, a) | d

A set of items in no order, each its priority, uniform in (0, 1), and one of so many classes,
one-hot. Trained on 5 to 16 items, mixed in a batch; tested on 16, 32, ... 16,384. The inputs are
not tokens, and the model is not a GPT but the small one in lab/variants/minimal.py.
"""
import numpy as np
import torch

import data

SHORTEST, LONGEST = 5, 16  # of the training sets


class Task(data.Task):
    block_size: int = LONGEST  # items in the longest training input
    classes: int = 10          # of items

    splits = ("train", "iid", *(str(2**i) for i in range(4, 15)))
    vocab_size = 1  # of no use: see prepare

    def __post_init__(self):
        if self.classes < 2 or self.block_size < SHORTEST:
            raise ValueError(f"max_retrieval needs at least 2 classes and {SHORTEST} items")

    def prepare(self, model):
        raise ValueError("max_retrieval is numbers: see lab/variants/minimal.py")

    def batch(self, split, batch_size, rng):
        """
        -> x (batch_size, T, 1 + classes) float32: the priority, then the class as one-hot; all -1
        where an item is padding; y (batch_size,) int64: the class of the highest priority.
        """
        short = split in ("train", "iid")
        T = self.block_size if short else int(split)
        x = np.zeros((batch_size, T, 1 + self.classes), np.float32)
        x[..., 0] = rng.random((batch_size, T), dtype=np.float32)
        label = rng.integers(0, self.classes, (batch_size, T))
        np.put_along_axis(x[..., 1:], label[..., None], 1, -1)
        if short:
            items = rng.integers(SHORTEST, T + 1, batch_size)
            x[np.arange(T) >= items[:, None]] = -1
        highest = x[..., 0].argmax(1)
        return x, label[np.arange(batch_size), highest]

    def score(self, logits, x, y):
        """logits (B, classes): whether the likeliest class is the right one."""
        right = logits.argmax(-1) == y
        return dict(accuracy=(right, torch.ones_like(right)))

    def show(self, x):
        return [f"{item[0]:.2f} {item[1:].argmax()}" for item in x if item[0] >= 0]
