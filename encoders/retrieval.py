"""
Retrieval: which document answers this query? (CABLE section 5.2, Table 2)

    query     Read one line from the file, without its end.
    document  def readline(self): ...       where the docstring was taken out

Real pairs from what every machine has: the query is the first paragraph of the docstring of a
function or class; all such docstrings on lines of their own are removed. In training the document
is a window of block_size tokens with the definition in it; in a test it is a whole file, of which
an encoder may read as much as it can. Text that is not Python gives up some of its sentences as
queries. A query that occurs twice, or still stands in its document, is left out.
msmarco has its own queries and passages, and is tested on MLDR's long documents.

The loss is InfoNCE in both directions: among the documents of one micro-step on one process, find
the query's own, and the reverse. Beside them stands a hard negative for each query, another place
of the same file: of some, the one that the model ranks first before the training.
"""
import math
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from data import check_same, check_split, corpora, describe, text
from data.text import PAD
from encoders.mlm import CutTask, cut_to
from encoders.pairs import prepare
from encoders.search import (
    best_window,
    bm25_scores,
    embed,
    reciprocal_rank,
    search_folder,
    windows_of,
    words_of,
)

PLACES = 16  # in a file, among which its hard negatives are chosen
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
    search = staticmethod(search_folder)
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
            n = len(self.pairs[f"{split}.at"])
            if n < 2:
                raise ValueError(f"{self.corpus} has too few pairs of query and document: its "
                                 f"{split} split has {n}, needs 2")
        if len(self.pairs["test.documents.starts"]) < 3:  # the last is an end
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
        -> x (B, query_size + 2 block_size) int64: query, document and hard negative, each padded,
        and y (B, 4): the document, its first token, the negative's document, its first token.
        """
        at, of = self.pairs[f"{split}.at"], self.pairs[f"{split}.of"]
        n = rng.choice(len(at), batch_size, replace=batch_size > len(at))
        queries = self.cut(f"{split}.queries", n, 0, self.query_size)
        # the definition begins in the first half of the window
        starts = self.pairs[f"{split}.documents.starts"]
        last = starts[of[n] + 1] - starts[of[n]] - 1  # where prose may have its answer
        before = rng.integers(0, self.block_size // 2 + 1, len(n))
        start = np.minimum(at[n] - before, last).clip(0)
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
        if not self.hard_negatives or split != "train":
            return of, first
        if "negative" in self.pairs:  # the corpus has its own
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
            some = np.linspace(0, len(places) - 1, min(PLACES, len(places)))
            places = places[some.astype(int)]
            windows = self.cut("train.documents", np.full(len(places), document), places, T)
            queries = self.cut("train.queries", n, 0, self.query_size)
            score = (vectors(queries) @ vectors(windows).T).numpy()  # (queries, places)
            before = at[n, None] - 2 * T
            after = np.maximum(at + 2 * T, end)[n, None]
            score[(before < places) & (places < after)] = -np.inf    # the answer itself
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
        B, T = len(x), self.block_size
        query, document, negative = x.split((self.query_size, T, T), 1)
        some = (negative != PAD).any(1)
        q = model(trim(query), pooled=True)
        d = model(trim(torch.cat((document, negative[some]))), pooled=True)
        with torch.autocast(x.device.type, enabled=False):  # what is divided is not in bfloat16
            score = q.float() @ d.float().T / self.temperature  # (B, B and negatives)
        of, start, other, first = y.T
        near = (start[:, None] - torch.cat((start, first[some]))).abs() < T
        same = near & (of[:, None] == torch.cat((of, other[some])))
        same.fill_diagonal_(False)
        score = score.masked_fill(same, -torch.inf)
        right = torch.arange(B, device=x.device)
        to_document = F.cross_entropy(score, right)
        to_query = F.cross_entropy(score[:, :B].T, right)
        return score, (to_document + to_query) / 2

    def score(self, logits, x, y):
        """A batch is too small to search in: evaluate does."""
        return {}

    # ---- evaluation

    def collection(self, split, limit):
        """
        -> documents, a list of (n,) tokens of the tokenizer, at most `limit` each; queries, those
        that are answered there; of (Q,), the document; at (Q,), the token where the answer begins.
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
            row = describe(run) | dict(search={})
            row["eval_seconds"] = round(time.monotonic() - start, 2)
            for name, by_length in places.items():
                row["search"][name] = {L: summary(by_length[L], of, options.seed)
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


def trim(idx):
    """(B, T) without the columns at its end in which there is only padding."""
    return idx[:, :max(1, int((idx != PAD).sum(1).max()))]


# -----------------------------------------------------------------------------
# evaluation: at which place the right document comes

def ranked(run, documents, queries, of, bm25, options):
    """-> {reading: {length: (Q,) places}}, and those by the first T tokens alone."""
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
        scores = dict(bm25=lexical)
        scores["windows"] = best_window(by_window[:, seen], owner[seen], len(ours))
        try:
            scores["whole"] = query @ vectors([tokens[:L] for tokens in ours]).T
        except ValueError as e:  # an encoding that ends
            print(f"  {run.name}: {e}")
        for name in scores.keys() & {"whole", "windows"}:
            scores[f"{name}_bm25"] = reciprocal_rank(scores[name]) + reciprocal_rank(lexical)
        for reading, score in scores.items():
            places[reading][L] = ranks(score, of)
    return places, ranks(by_window[:, start == 0], of)


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
    The 95 % interval of the mean of values (Q,): low, high. Their groups (Q,) are drawn anew: the
    queries of one document are not independent. Of a single group NaN.
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
    nDCG@10 by where the answer begins, documents cut to 16 T (or as near as was scored) ->
    dict(length, edges, queries, and {reading: values}); first: the first T tokens only.
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
    """Print one model's numbers in %, ± half of their interval."""
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
