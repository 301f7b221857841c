"""
What a retrieval's number is: how far ahead the right document comes, by the length that documents
are cut to.

    nDCG@10 = 1 / log2(1 + place) of the right document, 0 where its place is after the tenth

An encoder reads a document as a whole, one vector for all its tokens. Beside that stands what a
practitioner would do instead: the best of its windows of the training length, and BM25. The JSON
also has each query's place.
"""
import time

import numpy as np
import torch

from data import check_split, text
from encoders.bm25 import bm25_scores, words_of
from encoders.mlm import cut_to
from scoring import check_same, resampled

UNIT, AMOUNT = "queries", 1000  # what eval.py counts, also its flag, and how many it takes
FIGURE = "ndcg"                 # of figures/plot.py: what eval.py draws
LONGER = (1, 2, 4, 8, 16, 32)   # times the training length: what documents are cut to
TOKENS = 2**14                  # that go through an encoder at once


class Scores:
    """Every run is asked the same queries, among the same documents."""
    def __init__(self, task, runs, options):
        if options.strided or options.again:
            raise ValueError("--strided and --again are for text, not for a search")
        check_same(runs, {"tokenizer", "block_size", "query_size"})
        split, T = options.split or "test", task.block_size
        check_split(split, task.splits)
        self.lengths = sorted(set(options.lengths or [T * m for m in LONGER]))
        if any(L % T for L in self.lengths):
            raise ValueError(f"--lengths of a search must be multiples of the training length, {T}:"
                             " its windows are of that length")
        self.task, self.options, self.split = task, options, split
        self.documents, queries, of = collection(task, split, self.lengths[-1])
        asked = np.random.default_rng(options.seed).permutation(len(queries))[:options.amount]
        if not len(asked):
            raise ValueError(f"no query of {split} is answered in the first {self.lengths[-1]} "
                             "tokens")
        self.queries, self.of = [queries[n] for n in asked], of[asked]
        self.chance = float(ndcg(np.arange(1, len(self.documents) + 1)).mean())
        print(f"nDCG@10 in % (chance {100 * self.chance:.1f}): {len(asked):,} queries, "
              f"{len(self.documents):,} documents of {task.corpus} ({split}), cut to length; "
              f"{options.words}", flush=True)

        decode = text.get_encoding(task.tokenizer).decode
        words = [words_of(decode(tokens.tolist())) for tokens in self.queries]
        self.bm25 = {}
        for L in self.lengths:
            cut = (words_of(decode(tokens[:L].tolist())) for tokens in self.documents)
            self.bm25[L] = ranks(bm25_scores(words, cut), self.of)

    def start(self, run, row):
        """A run's vectors of every query, and of every window of every document."""
        self.began = time.monotonic()
        table = cut_to(run.checkpoint["kept"]["vocabulary"])
        self.ours = [table[tokens] for tokens in self.documents]
        self.asked = embed(run.model, [table[tokens] for tokens in self.queries], self.options)
        windows, self.owner, self.first = windows_of(self.ours, self.task.block_size)
        self.by_window = self.asked @ embed(run.model, windows, self.options).T
        self.places = dict(whole={}, windows={}, bm25=self.bm25)

    def score(self, run, row, T):
        """At which place the right documents come when all are cut to T tokens."""
        seen = self.first < T
        best = best_window(self.by_window[:, seen], self.owner[seen])
        self.places["windows"][T] = ranks(best, self.of)
        try:
            cut = [tokens[:T] for tokens in self.ours]
            whole = self.asked @ embed(run.model, cut, self.options).T
            self.places["whole"][T] = ranks(whole, self.of)
        except ValueError as e:  # an encoding that ends
            print(f"  {run.name}: {e}")

    def finish(self, run, row):
        """From places to numbers -> True: the best window always has one."""
        row["search"] = {}
        for reading, by_length in self.places.items():
            row["search"][reading] = {L: summary(places, self.of, self.options.seed)
                                      for L, places in by_length.items()}
        row["places"] = {L: places.tolist() for L, places in self.places["whole"].items()}
        row["eval_seconds"] = round(time.monotonic() - self.began, 2)
        print_row(row, self.lengths)
        return True

    def about(self):
        return dict(
            data=dict(corpus=self.task.corpus, sha256=self.task.source), split=self.split,
            queries=len(self.queries), documents=len(self.documents), chance=self.chance,
            lengths=self.lengths, answers=self.of.tolist())


def print_row(row, lengths):
    """A run's nDCG@10 in %, ± half of the interval."""
    print(f"\n{row['name']:<16}" + "".join(f"{L:>13,}" for L in lengths))
    for reading, by_length in row["search"].items():
        line = f"{reading:<16}"
        for L in lengths:
            cell = "-"
            if L in by_length:
                score = by_length[L]["ndcg@10"]
                half = 50 * (score["high"] - score["low"])
                cell = f"{100 * score['value']:.1f} ± {half:.1f}"
            line += f"{cell:>13}"
        print(line, flush=True)


def collection(task, split, limit):
    """
    -> documents, a list of (n,) tokens of the tokenizer, at most `limit` each; queries, those
    that are answered there; of (Q,), the document.
    """
    def texts(name, size):
        stream, starts = task.pairs[name], task.pairs[f"{name}.starts"]
        return [stream[a:min(a + size, b)] for a, b in zip(starts, starts[1:])]
    at, of = task.pairs[f"{split}.at"], task.pairs[f"{split}.of"]
    asked = np.flatnonzero(at < limit)
    queries = texts(f"{split}.queries", task.asked)
    return texts(f"{split}.documents", limit), [queries[n] for n in asked], of[asked]


# -----------------------------------------------------------------------------
# texts as vectors

def embed(model, texts, options):
    """
    Texts, a list of (n,) token arrays -> (N, C) unit vectors. Those of like lengths go through the
    model together, TOKENS with their padding.
    """
    vectors = np.empty((len(texts), model.config.n_embd), np.float32)
    left = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    while left:
        longest = max(1, len(texts[left[-1]]))
        size = max(1, TOKENS // longest)
        batch, left = left[-size:], left[:-size]
        idx = torch.zeros(len(batch), longest, dtype=torch.long)  # 0 is padding
        for row, n in zip(idx, batch):
            row[:len(texts[n])] = torch.from_numpy(texts[n])
        with options.context, torch.no_grad():
            vectors[batch] = model.embed(idx.to(options.device)).float().cpu().numpy()
    return vectors


def windows_of(texts, T):
    """-> all windows of T tokens of all texts; (windows,) the text of each, and where it begins."""
    places = [(n, start) for n, tokens in enumerate(texts)
              for start in range(0, max(1, len(tokens)), T)]
    of, starts = np.array(places).T
    return [texts[n][start:start + T] for n, start in places], of, starts


def best_window(scores, of):
    """(Q, windows) and their documents (windows,), in order -> (Q, N), each document's best."""
    _, firsts = np.unique(of, return_index=True)
    return np.maximum.reduceat(scores, firsts, axis=1)


# -----------------------------------------------------------------------------
# at which place the right document comes

def ranks(scores, answer):
    """
    scores (Q, N) of N documents for Q queries, answer (Q,) -> (Q,), at which place from 1 the right
    document comes. Of documents with the same score the right one comes last, as does a NaN.
    """
    right = scores[np.arange(len(answer)), answer]
    return (~(scores < right[:, None])).sum(1)


def ndcg(places, k=10):
    """nDCG@k of queries with one right document each, at places (Q,) from 1 -> (Q,)."""
    return np.where(places <= k, 1 / np.log2(1 + places), 0)


def summary(places, of, seed):
    """Places (Q,) of the right documents `of` -> {metric: dict(value, low, high)}."""
    values = ndcg(places)
    low, high = bootstrap(values, of, seed)
    return {"ndcg@10": dict(value=float(np.mean(values)), low=low, high=high)}


def bootstrap(values, groups, seed=0):
    """The 95 % interval of the mean of values (Q,) in groups (Q,): low, high. Of one group NaN."""
    _, group = np.unique(groups, return_inverse=True)
    return resampled(np.bincount(group, values), np.bincount(group), seed)
