"""
Retrieval: which document answers this query? (CABLE section 5.2, Table 2)

    query     Read one line from the file, without its end.
    document  def readline(self): ...       where the docstring was taken out

Real pairs from what every machine has: the query is the first paragraph of the docstring of a
function or class; all such docstrings on lines of their own are removed. In training the document
is a window of block_size tokens with the definition in it; in a test it is a whole file of other
packages, of which an encoder may read as much as it can, the definition anywhere in it. (Only
`packages` is split by package; stdlib and your own text are by file.) Text that is not Python gives
up some of its sentences as queries. A query that occurs twice, or still stands in its document, is
left out.
msmarco has its own queries and passages, and is tested on MLDR's long documents.

The loss is InfoNCE in both directions: among the documents of one micro-step on one process, find
the query's own, and the reverse. Beside them stands a hard negative for each query, another place
of the same file: of some, the one that the model ranks first before the training.
"""
import ast
import hashlib
import itertools
import math
import os
import re
import sys
import textwrap
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.nn import functional as F

from data import check_same, check_split, corpora, describe, text
from data.mlm import CutTask, cut_to
from data.text import PAD

ASKED = 8       # queries of one test document at most
WORDS = 4       # of a query at least
SENTENCES = 8   # prose: one sentence in so many is a query
PLACES = 16     # in a file, among which its hard negatives are chosen
TOKENS = 2**14  # that go through an encoder at once
LONGER = (1, 2, 4, 8, 16, 32)  # times the training length: what documents are cut to
READINGS = dict(
    whole="one vector of all that it may read", windows="the best window of the training length",
    bm25="BM25", whole_bm25="the reciprocal ranks by whole and by BM25, added",
    windows_bm25="the reciprocal ranks by windows and by BM25, added")


@dataclass
class Task(CutTask):
    block_size: int = 128        # tokens of a document in training
    query_size: int = 48         # tokens of a query, at most; never more than block_size
    corpus: str = "packages"     # see data/corpora.py; msmarco; or your own file or folder
    tokenizer: str = "gpt2"      # gpt2 or bytes
    max_vocab: int = 8192        # tokens of it that are kept, unless --init_from says which
    temperature: float = 0.05    # cosines are divided by it
    hard_negatives: bool = True  # also tell a definition from another place of its file

    validation_splits = corpora.SPLITS[1:2]
    least_batch = 2  # one pair has nothing to tell its document from
    unit, amount, figure = "queries", 1000, "ndcg"
    # paper: CABLE, section 5.2: 1.25 million samples once; nano: for one CPU core
    defaults = {
        "nano": dict(
            model="bert_cable", n_layer=4, n_head=4, n_embd=128, batch_size=64, max_iters=600,
            learning_rate=1e-3, min_lr=1e-4, warmup_iters=30, eval_interval=150, eval_iters=10),
        "paper": dict(
            model="bert_cable", n_layer=12, n_head=12, n_embd=768, block_size=512, query_size=512,
            corpus="msmarco", max_vocab=50257, batch_size=128, max_iters=9766, learning_rate=1e-4,
            min_lr=0.0, warmup_iters=488, weight_decay=0.0, beta2=0.999, lr_decay="linear",
            eval_interval=500, eval_iters=10),
    }

    def __post_init__(self):
        self.query_size = min(self.query_size, self.block_size)  # a learned table ends there
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be more than 0")
        self.corpus, self.pairs = prepare(self.corpus, self.tokenizer)
        self.source = str(self.pairs["sha256"])
        for split in self.splits:
            if len(self.pairs[f"{split}.at"]) < 2:
                raise ValueError(f"{self.corpus} has too few pairs of query and document: its "
                                 f"{split} split has {len(self.pairs[f'{split}.at'])}, needs 2")
        if len(self.pairs["test.documents.starts"]) - 1 < 2:  # the last is an end
            raise ValueError(f"{self.corpus} has a single document to search in its test split, "
                             "needs 2: some 20 files")
        self.adopt({})

    @staticmethod
    def was_prepared(config, source):
        files = text.PREPARED.glob("*.npz")
        return (config["corpus"] in (*corpora.CORPORA, "msmarco")
                or any(str(np.load(path)["sha256"]) == source for path in files))

    def stream(self):
        return np.concatenate([self.pairs["train.documents"], self.pairs["train.queries"]])

    def adopt(self, kept):
        super().adopt(kept)
        chosen = self.kept.get("negatives")
        if chosen is not None and chosen.shape != self.pairs["train.at"].shape:
            del self.kept["negatives"]  # of another corpus

    # ---- training

    def batch(self, split, batch_size, rng):
        """
        -> x (B, query_size + 2 block_size) int64: query, document and hard negative side by side,
        each padded (all of it, where there is no such negative), and y (B, 4), where they are: the
        document and its first token, the negative's and its first token.
        """
        at, of = self.pairs[f"{split}.at"], self.pairs[f"{split}.of"]
        n = rng.choice(len(at), batch_size, replace=batch_size > len(at))
        queries = self.cut(f"{split}.queries", n, 0, self.query_size)
        # the definition begins in the first half of the window
        starts = self.pairs[f"{split}.documents.starts"]
        last = starts[of[n] + 1] - starts[of[n]] - 1  # where prose may have its answer
        start = np.minimum(at[n] - rng.integers(0, self.block_size // 2 + 1, len(n)), last).clip(0)
        documents = self.cut(f"{split}.documents", of[n], start, self.block_size)
        other, first = self.negatives(split, n)
        negatives = self.cut(f"{split}.documents", other, first.clip(0), self.block_size)
        negatives[first < 0] = PAD
        x = np.hstack((queries, documents, negatives))
        return x, np.column_stack((of[n], start, other, first))

    def check(self, split, batch_size, x, y):
        """y are places, not tokens."""

    def negatives(self, split, n):
        """The hard negatives of pairs n: their documents and first tokens, -1 for none."""
        of, first = self.pairs[f"{split}.of"][n], np.full(len(n), -1)
        if self.hard_negatives and split == "train":
            if "negative" in self.pairs:
                return self.pairs["negative"][n], np.zeros(len(n), int)
            if "negatives" in self.kept:
                first = self.kept["negatives"].numpy()[n]
        return of, first

    def cut(self, name, n, start, size):
        """Texts n (N,) of an array, `size` tokens from `start` on -> (N, size) of our tokens."""
        stream, starts = self.pairs[name], self.pairs[f"{name}.starts"]
        where = (starts[n] + start)[:, None] + np.arange(size)
        tokens = stream[where.clip(max=len(stream) - 1)]
        return np.where(where < starts[n + 1][:, None], self.table[tokens], PAD)

    @torch.no_grad()
    def begin(self, model):
        """Choose every pair's hard negative: where its file looks most like the query's answer."""
        if not self.hard_negatives or "negative" in self.pairs:
            return
        device = next(model.parameters()).device

        def vectors(tokens):
            parts = torch.from_numpy(tokens).split(128)
            return torch.cat([model(part.to(device), pooled=True).cpu() for part in parts])
        print("choosing a hard negative for each pair", file=sys.stderr)
        model.eval()
        of, T = self.pairs["train.of"], self.block_size
        at, end = self.pairs["train.at"], self.pairs["train.end"]
        starts = self.pairs["train.documents.starts"]
        chosen = np.full(len(at), -1)
        for document in np.unique(of):
            n = np.flatnonzero(of == document)
            places = np.arange(0, starts[document + 1] - starts[document], T)
            places = places[np.linspace(0, len(places) - 1, min(PLACES, len(places))).astype(int)]
            windows = self.cut("train.documents", np.full(len(places), document), places, T)
            queries = self.cut("train.queries", n, 0, self.query_size)
            score = (vectors(queries) @ vectors(windows).T).numpy()      # (queries, places)
            before, after = at[n, None] - 2 * T, np.maximum(at + 2 * T, end)[n, None]
            score[(before < places) & (places < after)] = -np.inf        # the answer itself
            has_other = np.isfinite(score.max(1))
            chosen[n[has_other]] = places[score.argmax(1)[has_other]]
        model.train()
        self.kept["negatives"] = torch.from_numpy(chosen)

    def forward(self, model, x, y):
        """
        InfoNCE both ways (van den Oord et al., 2018). Another pair's window of the same file that
        overlaps the query's own is no negative: it may be as right. (One farther into the same
        class is, though it may answer, too.)
        """
        query, document, negative = x.split((self.query_size, self.block_size, self.block_size), 1)
        B, some = len(x), (negative != PAD).any(1)
        q = model(trim(query), pooled=True)
        d = model(trim(torch.cat((document, negative[some]))), pooled=True)
        with torch.autocast(x.device.type, enabled=False):  # what is divided is not in bfloat16
            score = q.float() @ d.float().T / self.temperature           # (B, B and negatives)
        of, start, other, first = y.T
        near = (start[:, None] - torch.cat((start, first[some]))).abs() < self.block_size
        same = near & (of[:, None] == torch.cat((of, other[some])))
        same.fill_diagonal_(False)
        score = score.masked_fill(same, -torch.inf)
        right = torch.arange(B, device=x.device)
        return score, (F.cross_entropy(score, right) + F.cross_entropy(score[:, :B].T, right)) / 2

    def score(self, logits, x, y):
        """A batch is too small to search in: evaluate does."""
        return {}

    # ---- evaluation

    def collection(self, split, limit):
        """
        What to search, and what to ask -> documents, a list of (n,) tokens of the tokenizer, at
        most `limit` each; queries, the same; of (Q,), the document that answers each; at (Q,), the
        token in it where the answer begins. Queries whose answer begins beyond are left out.
        """
        at, of = self.pairs[f"{split}.at"], self.pairs[f"{split}.of"]
        asked = np.flatnonzero(at < limit)
        documents = self.texts(f"{split}.documents", limit)
        queries = self.texts(f"{split}.queries", self.query_size)
        return documents, [queries[n] for n in asked], of[asked], at[asked]

    def texts(self, name, size):
        stream, starts = self.pairs[name], self.pairs[f"{name}.starts"]
        return [stream[a:min(a + size, b)] for a, b in zip(starts, starts[1:])]

    def read(self, texts):
        """Texts in the tokenizer's tokens -> [str]"""
        encoding = text.get_encoding(self.tokenizer)
        return [encoding.decode(tokens.tolist()) for tokens in texts]

    def evaluate(self, runs, options):
        """Search by every run, documents cut to every length -> what eval.py writes as JSON."""
        if options.strided:
            raise ValueError("--strided is for text, not for a search")
        check_same(runs, {"tokenizer", "block_size", "query_size"})
        split, T = options.split or "test", self.block_size
        check_split(split, self.splits)
        lengths = sorted(set(options.lengths or [T * m for m in LONGER]))
        if any(L % T for L in lengths):
            raise ValueError(f"--lengths of a search must be multiples of the training length, {T}:"
                             " its windows are of that length")
        documents, queries, of, at = self.collection(split, lengths[-1])
        asked = np.random.default_rng(options.seed).permutation(len(queries))[:options.amount]
        if not len(asked):
            raise ValueError(f"no query of {split} is answered in the first {lengths[-1]} tokens")
        queries, of, at = [queries[n] for n in asked], of[asked], at[asked]
        chance = float(ndcg(np.arange(1, len(documents) + 1)).mean())
        print(f"nDCG@10 in % (chance {100 * chance:.1f}): {len(queries):,} queries, "
              f"{len(documents):,} documents of {self.corpus} ({split}), cut to length; "
              f"{options.words}", flush=True)

        bm25, rows = {}, []
        words = [words_of(query) for query in self.read(queries)]
        for L in lengths:
            texts = (self.read([tokens[:L]])[0] for tokens in documents)  # one at a time: many
            bm25[L] = bm25_scores(words, map(words_of, texts))
        for run in runs:
            start = time.monotonic()
            places, by_first = ranked(run, documents, queries, of, bm25, options)
            row = describe(run) | dict(search={}, eval_seconds=round(time.monotonic() - start, 2))
            for reading, by_length in places.items():
                row["search"][reading] = {L: summary(by_length[L], of, options.seed)
                                          for L in by_length}
            row["by_answer_at"] = None  # nobody knows
            if self.pairs[f"{split}.at"].any():
                row["by_answer_at"] = by_evidence(places, by_first, at, T)
            row["places"] = {L: place.tolist() for L, place in places["whole"].items()}
            rows.append(row)
            show_row(row, lengths)
        about = dict(corpus=self.corpus, sha256=self.source)
        return dict(data=about, split=split, queries=len(queries), documents=len(documents),
                    chance=chance, lengths=lengths, readings=READINGS, answers=of.tolist(),
                    runs=rows)

    @staticmethod
    def search(run, folder, prompt, device, context, bm25=True):
        """Print the files of a folder that answer a prompt best, with up to three lines of each."""
        search_files(run, corpora.read_files(folder), prompt, device, context, bm25)


def trim(idx):
    """(B, T) without the columns at its end in which there is only padding."""
    return idx[:, :max(1, int((idx != PAD).sum(1).max()))]


# -----------------------------------------------------------------------------
# texts as vectors, and what is made of them

def embed(model, texts, device, context):
    """Texts, a list of (n,) token arrays -> (N, C) unit vectors."""
    vectors = np.empty((len(texts), model.config.n_embd), np.float32)
    for batch in batches(texts):
        longest = max(1, len(texts[batch[-1]]))
        idx = torch.zeros(len(batch), longest, dtype=torch.long)  # 0 is padding
        for row, n in zip(idx, batch):
            row[:len(texts[n])] = torch.from_numpy(texts[n])
        with context, torch.no_grad():
            vectors[batch] = model.embed(idx.to(device)).float().cpu().numpy()
    return vectors


def batches(texts):
    """Which texts go through a model together: of like lengths, TOKENS with their padding."""
    batch = []
    for n in sorted(range(len(texts)), key=lambda n: len(texts[n])):
        if batch and (len(batch) + 1) * len(texts[n]) > TOKENS:
            yield batch
            batch = []
        batch.append(n)
    yield batch


def windows_of(texts, T):
    """-> all windows of T tokens of all texts; (windows,) the text of each, and where it begins."""
    places = [(n, start) for n, tokens in enumerate(texts)
              for start in range(0, max(1, len(tokens)), T)]
    of, starts = np.array(places).T
    return [texts[n][start:start + T] for n, start in places], of, starts


def ranked(run, documents, queries, of, bm25, options):
    """
    One model -> {reading: {length: (Q,) at which place the right document comes}}, and (Q,) the
    same by the first T tokens alone.
    """
    def vectors(texts):
        return embed(run.model, texts, options.device, options.context)
    table = cut_to(run.checkpoint["kept"]["vocabulary"])
    ours = [table[tokens] for tokens in documents]
    query = vectors([table[tokens] for tokens in queries])
    windows, owner, start = windows_of(ours, run.config["block_size"])
    by_window = query @ vectors(windows).T
    places = {reading: {} for reading in READINGS}
    for L, lexical in bm25.items():
        seen = start < L
        scores = dict(bm25=lexical, windows=best_window(by_window[:, seen], owner[seen], len(ours)))
        try:
            scores["whole"] = query @ vectors([tokens[:L] for tokens in ours]).T
        except ValueError as e:  # an encoding that ends
            print(f"  {run.name}: {e}")
        for name in scores.keys() & {"whole", "windows"}:
            scores[f"{name}_bm25"] = reciprocal_rank(scores[name]) + reciprocal_rank(lexical)
        for reading, score in scores.items():
            places[reading][L] = ranks(score, of)
    return places, ranks(by_window[:, start == 0], of)


def best_window(scores, of, N):
    """(Q, windows) and their documents (windows,), in order -> (Q, N), each document's best."""
    firsts = np.searchsorted(of, np.arange(N))
    return np.maximum.reduceat(scores, firsts, axis=1)


def reciprocal_rank(scores):
    """Scores (Q, N) -> (Q, N), 1 / (60 + the document's place) (Cormack et al., 2009)."""
    return 1 / (61 + (-scores).argsort(1, kind="stable").argsort(1))


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
    scores = {}
    measures = {"ndcg@10": ndcg(places), "recall@1": places <= 1, "recall@10": places <= 10}
    for name, values in measures.items():
        low, high = bootstrap(np.asarray(values, float), of, seed)
        scores[name] = dict(value=float(np.mean(values)), low=low, high=high)
    return scores


def bootstrap(values, groups, seed=0, times=1000):
    """
    The 95 % interval of the mean of values (Q,): low, high. The groups (Q,) that they belong to are
    drawn anew: the queries of one document are not independent. Of a single group NaN.
    """
    _, group = np.unique(groups, return_inverse=True)
    total, size = np.bincount(group, values), np.bincount(group)
    if len(size) < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(0, len(size), (times, len(size)))
    low, high = np.quantile(total[drawn].sum(1) / size[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def by_evidence(places, first, at, T):
    """
    nDCG@10 by the token at which the answer begins, documents cut to 16 T (or as near as was
    scored) -> dict(length, edges, queries, and {reading: values}); first: the first T tokens only.
    """
    L = max(n for n in places["windows"] if n <= 16 * T or n == min(places["windows"]))
    edges = sorted({0, L, *(T * m for m in LONGER if T * m < L)})
    of_bin = [(at >= a) & (at < b) for a, b in zip(edges, edges[1:])]
    scores = dict(length=L, edges=edges, queries=[int(these.sum()) for these in of_bin])
    for name, by_length in (places | dict(first={L: first})).items():
        if L in by_length:
            value = ndcg(by_length[L])
            scores[name] = [float(value[these].mean()) if these.any() else None for these in of_bin]
    return scores


def show_row(row, lengths):
    """Print one model's numbers in %, with half of their 95 % interval."""
    def line(name, cells):
        print(f"{name:<16}" + "".join(f"{cell:>13}" for cell in cells), flush=True)

    def cell(score):
        if not score:
            return "-"
        return f"{100 * score['value']:.1f} ± {50 * (score['high'] - score['low']):.1f}"
    print(f"\n{row['name']}")
    line("tokens", [f"{L:,}" for L in lengths])
    lines = [(reading, reading, "ndcg@10") for reading in row["search"]]
    lines += [(f"whole, {metric}", "whole", metric) for metric in ("recall@1", "recall@10")]
    for name, reading, metric in lines:
        scores = row["search"][reading]
        line(name, [cell(scores.get(L, {}).get(metric)) for L in lengths])
    far = row["by_answer_at"]
    if far:
        print(f"nDCG@10 by where the answer begins, documents of {far['length']:,} tokens; first: "
              f"only their first {row['block_size']} are read")
        line("from token", [f"{n:,}" for n in far["edges"][:-1]])
        line("queries", far["queries"])
        for reading in [*READINGS, "first"]:
            if reading in far:
                line(reading, ["-" if v is None else f"{100 * v:.1f}" for v in far[reading]])


# -----------------------------------------------------------------------------
# BM25

def words_of(text):
    """The words of a text as a search engine takes them: lower case, readLine is two."""
    parts = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    return re.findall(r"[^\W\d_]+|\d+", parts.lower())


def bm25_scores(queries, documents, k1=1.2, b=0.75):
    """
    Okapi BM25 (Robertson and Zaragoza, 2009): the words of every query (a list of lists), and of
    every document (taken one after the other) -> scores (Q, N). What most search engines rank by:
    how often a document has the query's words, rare words counting more.
    """
    terms = {}
    for word in itertools.chain(*queries):
        terms.setdefault(word, len(terms))
    counts, length, has = [], [], np.zeros(len(terms))
    for document in documents:
        here = {terms[word]: n for word, n in Counter(document).items() if word in terms}
        counts.append((np.array(list(here), int), np.array(list(here.values()), float)))
        length.append(len(document))
        has[counts[-1][0]] += 1
    idf, mean = np.log(1 + (len(counts) - has + 0.5) / (has + 0.5)), max(np.mean(length), 1)
    weight = np.zeros((len(counts), len(terms)), np.float32)
    for row, (which, n), words in zip(weight, counts, length):
        row[which] = idf[which] * n * (k1 + 1) / (n + k1 * (1 - b + b * words / mean))
    asked = np.zeros((len(queries), len(terms)), np.float32)
    for row, query in zip(asked, queries):
        for word, n in Counter(query).items():
            row[terms[word]] = n
    return asked @ weight.T


# -----------------------------------------------------------------------------
# search in a folder of one's own

FILES, EACH, WIDTH = 10, 3, 70  # files that a search names, lines of each, characters of a line


def search_files(run, files, prompt, device, context, bm25):
    """Print which of files {name: text} answer a prompt, bytes, best, and where."""
    asked = (prompt or b"").decode("utf-8", "replace").strip("\ufeff").strip()
    if not asked:
        raise ValueError("the prompt is empty: a search needs words")
    T, names, words = run.config["block_size"], list(files), words_of(asked)
    vectors = kept_vectors(run, device, context)
    encoding = text.get_encoding(run.config["tokenizer"])
    table = cut_to(run.checkpoint["kept"]["vocabulary"])
    ids = [encoding.encode_ordinary(said) for said in files.values()]
    windows, of, start = windows_of([table[tokens] for tokens in ids], T)
    query = table[encoding.encode_ordinary(asked)][:min(run.config["query_size"], T)]
    likeness = vectors(windows) @ vectors([query])[0]
    score = best_window(likeness[None], of, len(ids))[0]
    if bm25:
        score = with_bm25(score, words, files.values())
    for n in (-score).argsort(kind="stable")[:FILES]:
        where = f"{score[n]:.3f}  {names[n]}"
        lines = files[names[n]].split("\n")
        places = lines_of(windows_in_lines(lines, ids[n], encoding, T), likeness[of == n], lines,
                          words, bm25)
        for line in places:
            print(f"{where}:{line + 1}  {snippet(lines[line], words)}")
            where = " " * len(where)


def with_bm25(score, words, texts):
    """Scores (N,) of texts -> their reciprocal ranks, BM25's added where a text has a word."""
    lexical = bm25_scores([words], map(words_of, texts))
    return (reciprocal_rank(score[None]) + reciprocal_rank(lexical) * (lexical > 0))[0]


def windows_in_lines(lines, ids, encoding, T):
    """-> the lines, a range, that each window of T of a file's tokens has a part of."""
    ends = np.cumsum([0, *(len(encoding.decode_single_token_bytes(token)) for token in ids)])
    newlines = np.cumsum([len(line.encode()) + 1 for line in lines])
    edges = np.append(ends[:-1:T], ends[-1])
    first = np.searchsorted(newlines, edges[:-1], side="right")
    last = np.searchsorted(newlines, edges[1:] - 1, side="right")
    return [range(a, b + 1) for a, b in zip(first, last)]


def lines_of(windows, likeness, lines, words, bm25):
    """Of the best windows the line with most of the words, else the longest -> line numbers."""
    if bm25:
        texts = [" ".join(lines[n] for n in window) for window in windows]
        likeness = with_bm25(likeness, words, texts)
    places = []
    for k in (-likeness).argsort(kind="stable"):
        line = max(windows[k], key=lambda n: (len({*words} & {*words_of(lines[n])}),
                                              len(lines[n].strip())))
        if line not in places:
            places.append(line)
    return places[:EACH]


def snippet(line, words):
    """A line, or of a long one the whole words around the first of `words` in it."""
    line = " ".join(line.split())
    if len(line) > WIDTH:
        at = [line.lower().find(word) for word in words if word in line.lower()]
        start = max(0, min(at, default=0) - WIDTH // 3)
        line = line[line.rfind(" ", 0, start) + 1:]
    return textwrap.shorten(line, WIDTH, placeholder=" ...")


def kept_vectors(run, device, context):
    """
    -> a function like embed, of texts. What it has computed is kept beside the run, by the hash of
    each text, in a file for these weights: a second query of a folder is fast.
    """
    weights = hashlib.sha256()
    for x in run.model.state_dict().values():
        weights.update(x.cpu().numpy().tobytes())
    path, kept = run.path.parent / f"vectors-{weights.hexdigest()[:12]}.npz", {}
    if path.exists():
        arrays = np.load(path)
        kept = dict(zip(arrays["keys"].tolist(), arrays["vectors"]))

    def vectors(texts):
        keys = [hashlib.sha256(tokens.tobytes()).hexdigest() for tokens in texts]
        missing = {key: tokens for key, tokens in zip(keys, texts) if key not in kept}
        if missing:
            kept.update(zip(missing, embed(run.model, list(missing.values()), device, context)))
            save(path, dict(keys=np.array(list(kept)), vectors=np.stack(list(kept.values()))))
        return np.stack([kept[key] for key in keys])
    return vectors


# -----------------------------------------------------------------------------
# preparation: a corpus becomes queries and documents, in one file

def prepare(corpus, tokenizer):
    """
    -> the corpus' name or absolute path, and its arrays: for every split SPLIT.documents and
    SPLIT.queries, tokens one text after the other, which begin at SPLIT.documents.starts, ...;
    SPLIT.of, SPLIT.at and SPLIT.end, the document that answers a query, and the tokens where the
    answer begins and ends.
    Raises ValueError.
    """
    if corpus == "fineweb_edu":
        raise ValueError("fineweb_edu is too large to search: choose packages, msmarco or a folder")
    if corpus == "msmarco":
        name, source = corpus, f"{MSMARCO}, {MLDR}"
    else:
        if corpus not in corpora.CORPORA:
            corpus = str(corpora.absolute(corpus))
        name, source = corpora.identify(corpus)
    digest = hashlib.sha256(f"{source} {tokenizer}".encode()).hexdigest()
    path = text.PREPARED / f"{name}-{tokenizer}-{digest[:12]}.npz"
    if not path.exists():
        encoding = text.get_encoding(tokenizer)
        print(f"making queries and documents of {corpus} in {path}", file=sys.stderr)
        splits = msmarco() if corpus == "msmarco" else from_documents(corpus)
        arrays = tokenized(splits, encoding)
        digest = hashlib.sha256()
        for name in sorted(arrays):
            digest.update(arrays[name].tobytes())
        arrays["sha256"] = np.array(digest.hexdigest())
        save(path, arrays)
    return corpus, dict(np.load(path))


def save(path, arrays):
    """All of the file or nothing of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        with open(partial, "wb") as f:
            np.savez(f, **arrays)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def tokenized(splits, encoding):
    """{split: (documents, [(query, its document, the characters of the answer)], negatives)}"""
    size = np.array([len(encoding.decode_single_token_bytes(i)) for i in range(encoding.n_vocab)])
    arrays = {}
    for split, (documents, asked, negative) in splits.items():
        for name, texts in dict(documents=documents, queries=[row[0] for row in asked]).items():
            arrays[f"{split}.{name}"], arrays[f"{split}.{name}.starts"] = encoded(texts, encoding)
        stream, starts = (arrays[f"{split}.documents{part}"] for part in ("", ".starts"))
        places, last = [], None
        for _, document, characters in asked:  # those of one document one after the other
            if document != last:
                last, ends = document, size[stream[starts[document]:starts[document + 1]]].cumsum()
            before = [len(documents[document][:n].encode()) for n in characters]
            places.append((document, *np.searchsorted(ends, before, side="right")))
        of = np.array(places, int).reshape(-1, 3).T
        arrays |= dict(zip((f"{split}.of", f"{split}.at", f"{split}.end"), of))
        if negative:
            arrays["negative"] = np.array(negative)
    return arrays


def encoded(texts, encoding, at_once=1000):
    """-> the tokens of all texts, one after the other; where each begins, and the last one ends."""
    parts = [np.zeros(0, np.uint16)]
    for n in range(0, len(texts), at_once):
        some = texts[n:n + at_once]
        for ids in encoding.encode_ordinary_batch(some, num_threads=os.cpu_count()):
            parts.append(np.array(ids, np.uint16))
    return np.concatenate(parts), np.cumsum([len(part) for part in parts])


def from_documents(corpus):
    """{split: documents and queries} of a corpus, or a user's own files."""
    rows, times = [], Counter()
    for split, raw in corpora.open_corpus(corpus):
        if split is None:
            raise ValueError(f"{corpus} has too few documents for train, val and test")
        document, asked = without_queries(raw.decode("utf-8", "replace"))
        times.update(plain(query) for query, _ in asked)
        if document.strip():
            rows.append((split, document, asked))
    splits = {split: ([], [], None) for split in corpora.SPLITS}
    for split, document, asked in rows:
        everything = plain(document)
        asked = [(query, place) for query, place in asked
                 if times[plain(query)] == 1 and plain(query) not in everything]
        documents, queries, _ = splits[split]
        if split == "test":
            asked = sorted(asked, key=lambda pair: corpora.name_hash(pair[0]))[:ASKED]
        queries += [(query, len(documents), place) for query, place in asked]
        if asked or split == "test":  # there also to be told from the others
            documents.append(document)
    return splits


def plain(words):
    return " ".join(words.lower().split())


def without_queries(document):
    """A document -> itself without its queries, and [(query, the characters of its answer)]."""
    document = document.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the file's own strings
            tree = ast.parse(document)
        return without_docstrings(document, tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the parser's, of odd files
        return without_sentences(document)


def without_docstrings(document, tree):
    """Python: the docstrings of all functions and classes are taken out."""
    lines, out, asked = document.split("\n"), set(), []
    for node in definitions(tree):
        docstring, said = node.body[0], ast.get_docstring(node)
        if not said:
            continue
        first, last = docstring.lineno - 1, docstring.end_lineno - 1
        before = lines[first].encode()[:docstring.col_offset]
        after = lines[last].encode()[docstring.end_col_offset:]
        if before.strip() or after.strip():  # more than that on its lines: it stays
            continue
        out.update(range(first, last + 1))
        query = " ".join(said.split("\n\n")[0].split())
        if len(query.split()) >= WORDS and len(node.body) > 1:
            asked.append((query, node.lineno - 1, node.end_lineno))
    kept = [0 if n in out else len(line) + 1 for n, line in enumerate(lines)]
    starts = np.cumsum([0, *kept])
    rest = "\n".join(line for n, line in enumerate(lines) if n not in out)
    return rest, [(query, (int(starts[line]), int(starts[end]))) for query, line, end in asked]


def definitions(node):
    """All functions and classes within a node. They are statements: expressions are left alone."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, ()):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield inner
            yield from definitions(inner)


def without_sentences(document):
    """Other text: about one sentence in SENTENCES is taken out, chosen by its hash."""
    parts, asked, length = [], [], 0
    end = r"(?<=[.!?])(?=\s)|(?<=[.!?][\"')])(?=\s)"  # not within 2.13
    for part in re.split(end, document):
        sentence = " ".join(part.split())
        whole = sentence.rstrip("\"')").endswith((".", "!", "?"))
        chosen = whole and corpora.name_hash(sentence)[0] % SENTENCES == 0
        if chosen and len(sentence.split()) >= 2 * WORDS:
            part = part[:len(part) - len(part.lstrip())]
            asked.append((sentence, (length + len(part), length + len(part))))
        parts.append(part)
        length += len(part)
    return "".join(parts), asked


# -----------------------------------------------------------------------------
# the paper's: MS MARCO with mined hard negatives to train on, long documents to test

MSMARCO = "sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1"
MLDR = "hf://datasets/Shitao/MLDR/mldr-v1.0-en"  # its files: `datasets` 4 runs no scripts
SAMPLES, HELD_OUT = 1_250_000, 1000


def msmarco():
    """{split: passages and queries} of the Hugging Face hub. Raises ValueError where it fails."""
    passages = {split: {} for split in corpora.SPLITS}  # the same one once, and its number
    asked, negatives = {split: [] for split in corpora.SPLITS}, []

    def number(split, passage):
        return passages[split].setdefault(passage, len(passages[split]))

    def add(split, query, passage):  # where in the passage the answer is, nobody says
        asked[split].append((query, number(split, passage), (0, 0)))

    def long(name):
        return corpora.hub("json", None, data_files=f"{MLDR}/{name}.jsonl.gz", split="train")

    for row in long("corpus"):
        number("test", row["text"])
    for row in long("test"):
        add("test", row["query"], row["positive_passages"][0]["text"])
    rows, held_out = corpora.hub(MSMARCO, "triplet-hard", split="train"), set()
    for row in islice(rows, HELD_OUT + SAMPLES):
        if len(asked["val"]) < HELD_OUT:
            held_out.add(row["query"])
            add("val", row["query"], row["positive"])
        elif row["query"] not in held_out:
            add("train", row["query"], row["positive"])
            negatives.append(number("train", row["negative"]))
    return {split: (list(passages[split]), asked[split], negatives if split == "train" else None)
            for split in corpora.SPLITS}
