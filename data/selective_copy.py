"""
Selective copy: repeat what was said, without the blanks (Gu and Dao, 2023; CoPE section 5.2).

    _ D _ _ C F _ B | D C F B        n symbols shuffled among blanks, a separator, the symbols again

Loss and score count the n outputs, each predicted from the true ones before it. Trained, and tested
in iid, with n blanks, on 3n tokens; dense has n / 2 blanks, sparse 2n. block_size is the length of
the longest, sparse: n = (block_size - 1) / 4. Every batch is drawn anew.
"""
import numpy as np

import data

BLANK, SEPARATOR, SYMBOLS = 0, 1, 14  # symbols are tokens 2 to 15


class Task(data.Task):
    block_size: int = 65  # 4n + 1, n the symbols to copy

    vocab_size = 16
    splits = ("train", "iid", "dense", "sparse")
    # paper: CoPE, section 5.2, which gives the model and the steps; batch and learning rate are
    # ours. nano: for two CPU cores
    defaults = {
        "nano": dict(
            n_layer=2, n_head=2, n_embd=64, block_size=129, batch_size=32, max_iters=2000,
            learning_rate=2e-3, min_lr=0.0, warmup_iters=200, eval_interval=500, eval_iters=10),
        "paper": dict(
            n_layer=2, n_head=2, n_embd=64, block_size=1025, batch_size=64, max_iters=100000,
            learning_rate=3e-4, min_lr=0.0, warmup_iters=1000, eval_interval=1000, eval_iters=10),
    }

    def __post_init__(self):
        self.n = (self.block_size - 1) // 4
        if self.n < 2 or self.block_size != 4 * self.n + 1:
            raise ValueError(
                "selective copy needs block_size = 4n + 1 with n >= 2 symbols to copy")

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, 2n + blanks) int64; y is the next token if an output, else -1."""
        n = self.n
        blanks = dict(train=n, iid=n, dense=n // 2, sparse=2 * n)[split]

        symbols = rng.integers(2, 2 + SYMBOLS, (batch_size, n))
        u = rng.random((batch_size, n + blanks), dtype=np.float32)
        places = np.sort(np.argpartition(u, n - 1, axis=1)[:, :n], axis=1)
        said = np.full((batch_size, n + blanks), BLANK)
        np.put_along_axis(said, places, symbols, axis=1)

        separator = np.full((batch_size, 1), SEPARATOR)
        tokens = np.concatenate((said, separator, symbols), axis=1)
        x, y = tokens[:, :-1], tokens[:, 1:].copy()
        y[:, :n + blanks] = -1
        return x, y

    def score(self, logits, x, y):
        """Sequences with a wrong output, and wrong outputs."""
        output = y != -1
        wrong = (logits.argmax(-1) != y) & output
        return dict(sequence_error=(wrong.any(1), output.any(1)),
                    token_error=(wrong.sum(1), output.sum(1)))

    def show(self, x):
        return ["_|ABCDEFGHIJKLMN"[t] for t in x]
