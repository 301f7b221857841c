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

from common.checkpoint import check_same
from common.exits import fail
from data import text
from lab.bert.bm25 import bm25_scores, words_of
from lab.bert.mlm import cut_to

QUERIES = 1000                 # that are asked if --queries says nothing
LONGER = (1, 2, 4, 8, 16, 32)  # times the training length: what documents are cut to
TOKENS = 2**14                 # that go through an encoder at once


def evaluate(task, runs, args):
    """
    Every run is asked the same queries, among the same documents -> what the JSON says,
    and a row for each run.
    """
    check_same(runs, {"tokenizer", "block_size", "query_size"})
    split, T = args.split or "test", task.block_size
    lengths = sorted(set(args.lengths or [T * m for m in LONGER]))
    if any(L % T for L in lengths):
        fail(f"--lengths of a search must be multiples of the training length, {T}: its windows "
             "are of that length")
    documents, queries, of = collection(task, split, lengths[-1])
    asked = np.random.default_rng(args.seed).permutation(len(queries))[:args.queries or QUERIES]
    if not len(asked):
        fail(f"no query of {split} is answered in the first {lengths[-1]} tokens")
    queries, of = [queries[n] for n in asked], of[asked]
    chance = float(ndcg(np.arange(1, len(documents) + 1)).mean())
    print(f"nDCG@10 in % (chance {100 * chance:.1f}): {len(asked):,} queries, {len(documents):,} "
          f"documents of {task.corpus} ({split}), cut to length", flush=True)

    bm25, rows = bm25_places(task, documents, queries, of, lengths), []
    for run in runs:
        start = time.monotonic()
        places = places_of(run, task, documents, queries, of, lengths) | dict(bm25=bm25)
        row = dict(search={}, places={})
        for reading, by_length in places.items():
            row["search"][reading] = {L: summary(found, of, args.seed)
                                      for L, found in by_length.items()}
        row["places"] = {L: found.tolist() for L, found in places["whole"].items()}
        row["eval_seconds"] = round(time.monotonic() - start, 2)
        print_row(run.name, row, lengths)
        rows.append(row)
    return dict(
        data=dict(corpus=task.corpus, sha256=task.source), split=split, queries=len(queries),
        documents=len(documents), chance=chance, lengths=lengths, answers=of.tolist()), rows


def bm25_places(task, documents, queries, of, lengths):
    """{length: at which place BM25 has the right documents}"""
    decode = text.get_encoding(task.tokenizer).decode
    words, places = [words_of(decode(tokens.tolist())) for tokens in queries], {}
    for L in lengths:
        cut = (words_of(decode(tokens[:L].tolist())) for tokens in documents)
        places[L] = ranks(bm25_scores(words, cut), of)
    return places


def places_of(run, task, documents, queries, of, lengths):
    """
    {"whole" or "windows": {length: at which place the right documents come}}, all documents cut to
    that length: read as a whole, and by the best of their windows of the training length.
    """
    table = cut_to(run.checkpoint["kept"]["vocabulary"])
    ours = [table[tokens] for tokens in documents]
    asked = embed(run.model, [table[tokens] for tokens in queries])
    windows, owner, first = windows_of(ours, task.block_size)
    by_window = asked @ embed(run.model, windows).T
    places = dict(whole={}, windows={})
    for L in lengths:
        seen = first < L
        places["windows"][L] = ranks(best_window(by_window[:, seen], owner[seen]), of)
        try:
            whole = asked @ embed(run.model, [tokens[:L] for tokens in ours]).T
            places["whole"][L] = ranks(whole, of)
        except ValueError as e:  # an encoding that ends
            print(f"  {run.name}: {e}")
    return places


def print_row(name, row, lengths):
    """A run's nDCG@10 in %, ± half of the interval."""
    print(f"\n{name:<16}" + "".join(f"{L:>13,}" for L in lengths))
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

@torch.no_grad()
def embed(model, texts):
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
        idx = idx.to(next(model.parameters()).device)
        vectors[batch] = model.embed(idx).float().cpu().numpy()
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


def resampled(sums, sizes, seed=0, times=1000):
    """
    The 95 % interval of sum(sums) / sum(sizes), by the bootstrap: n groups, such as documents, are
    drawn anew from the n that there are, as what belongs to one is not independent. -> [low, high],
    of a single group NaN.
    """
    if len(sizes) < 2:
        return [np.nan, np.nan]
    rng, means = np.random.default_rng(seed), []
    for _ in range(times):
        drawn = rng.integers(0, len(sizes), len(sizes))
        means.append(sums[drawn].sum() / sizes[drawn].sum())
    return np.quantile(means, (0.025, 0.975)).tolist()
