"""
Masked tokens: what an encoder learns its language from (Devlin et al., 2019; CABLE section 5.2).

    def [MASK](x): return [MASK](x)      which tokens were there?

A sequence is a window of one document, cut anywhere, padded where the document is shorter. 15 % of
its tokens are to be predicted: 80 % of these are masked, 10 % are replaced by any token, 10 % stay
as they are. Documents and splits are those of data/corpora.py; the tokens are the commonest of
its training split, after three of their own: 0 PAD, 1 MASK, 2 UNK.
"""
import functools

import numpy as np
import torch

import data
from common import names
from data import text

PAD, MASK, UNK = range(3)  # the tokens that are kept come after
TOLD = 0.15  # share of tokens to predict


class CutTask(data.Task):
    """
    A task of encoders, on the `max_vocab` commonest tokens of its text.
    A checkpoint keeps them: what was learned is of use only with these tokens.
    """
    splits = text.SPLITS

    def prepare(self, model):
        if not names.is_encoder(model):
            choices = ", ".join(names.that_read(both_ways=True))
            raise ValueError(f"{self.data} needs an encoder: choose from {choices}")

    def state(self):
        return self.kept

    def load(self, state):
        self.kept = dict(state)
        self.table = cut_to(self.kept["vocabulary"])  # (65536,): which of ours a token is
        self.vocab_size = UNK + 1 + len(self.kept["vocabulary"])

    def count(self, *streams):
        """Begin with the vocabulary of these texts, (N,) uint16."""
        counts = np.zeros(1 << 16, np.int64)
        for stream in streams:
            for _, tokens in blocks(stream):
                counts += np.bincount(tokens, minlength=1 << 16)
        order = np.argsort(-counts, kind="stable")
        commonest = order[:min(self.max_vocab, np.count_nonzero(counts))]
        self.load(dict(vocabulary=torch.from_numpy(commonest)))


def cut_to(vocabulary):
    """vocabulary (n,) -> (65536,), a tokenizer's tokens among n + 3."""
    table = np.full(1 << 16, UNK)
    table[np.asarray(vocabulary)] = UNK + 1 + np.arange(len(vocabulary))
    return table


def blocks(stream, size=1 << 22):
    """A stream that may be larger than memory -> where each block begins, and it."""
    for start in range(0, len(stream), size):
        yield start, stream[start:start + size]


class Task(CutTask):
    block_size: int = 128     # tokens in a window
    corpus: str = "packages"  # a corpus (see data/corpora.py), or your own file or folder
    tokenizer: str = "gpt2"   # gpt2 or bytes
    max_vocab: int = 8192     # tokens of it that are kept, the commonest
    max_tokens: int = 0       # prepare only this many tokens of the corpus; 0 is all

    # paper: CABLE, section 5.2 (bert-base); nano: for one CPU core
    defaults = {
        "nano": dict(
            model="bert_cable", n_layer=4, n_head=4, n_embd=128, batch_size=32, max_iters=1500,
            learning_rate=2e-3, min_lr=2e-4, warmup_iters=75, eval_interval=250, eval_iters=20),
        "paper": dict(
            model="bert_cable", n_layer=12, n_head=12, n_embd=768, block_size=512, batch_size=32,
            corpus="fineweb_edu", max_vocab=50257, max_iters=14000, learning_rate=1e-4, min_lr=0.0,
            warmup_iters=500, weight_decay=0.0, beta2=0.999, eval_interval=500, eval_iters=50),
    }

    def __post_init__(self):
        self.text = text.Task(data=self.corpus, tokenizer=self.tokenizer, block_size=1,
                              max_tokens=self.max_tokens)
        self.corpus, self.source = self.text.data, self.text.source
        self.count(self.text.streams["train"])

    @functools.cached_property
    def documents(self):
        """{split: where its documents start in its stream, and how long they are}."""
        places = {}
        end_of_text = text.get_encoding(self.tokenizer).eot_token
        for split in self.splits:
            stream = self.text.streams[split]
            ends = [at + np.flatnonzero(tokens == end_of_text) for at, tokens in blocks(stream)]
            ends = np.concatenate([*ends, [len(stream)]])
            starts = np.append(0, ends[:-1] + 1)
            places[split] = starts, ends - starts
        return places

    def windows(self, split, batch_size, rng):
        """Windows of documents, each drawn in proportion to its length -> (B, T) int64."""
        stream, T = self.text.streams[split], self.block_size
        starts, lengths = self.documents[split]
        ends = lengths.cumsum()
        at = rng.integers(0, ends[-1], batch_size)  # a token of a document, not an end-of-text
        n = np.searchsorted(ends, at, side="right")
        first = at - (ends - lengths)[n] - rng.integers(0, T, batch_size)
        first = first.clip(0, (lengths[n] - T).clip(0))
        where = first[:, None] + np.arange(T)
        inside = where < lengths[n, None]
        tokens = stream[(starts[n, None] + where).clip(max=len(stream) - 1)]
        return np.where(inside, self.table[tokens], PAD)

    def batch(self, split, batch_size, rng):
        """-> x, y (B, T) int64; y is what was there, -1 where nothing is to be predicted."""
        tokens = self.windows(split, batch_size, rng)
        real = tokens != PAD
        # of every sequence the same share
        turn = np.where(real, rng.random(tokens.shape), 2).argsort(1).argsort(1)
        told = turn < np.round(TOLD * real.sum(1)).clip(1)[:, None]
        other = rng.integers(UNK + 1, self.vocab_size, tokens.shape)
        u = rng.random(tokens.shape)
        hidden = np.where(u < 0.8, MASK, np.where(u < 0.9, other, tokens))
        return np.where(told, hidden, tokens), np.where(told, tokens, -1)

    def score(self, logits, x, y):
        """logits (N, vocab_size): lab/bert/bert.py gives those of the N tokens to predict."""
        told = y != -1
        right = torch.zeros_like(told)
        right[told] = logits.argmax(-1) == y[told]
        return dict(accuracy=(right.sum(1), told.sum(1)))
