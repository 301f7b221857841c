"""
Retrieval: which document answers this query? (CABLE section 5.2, Table 2)

    query     Read one line from the file, without its end.
    document  def readline(self): ...       where the docstring was taken out

Real pairs from what every machine has: the query is the first paragraph of the docstring of a
function or class.
- All such docstrings on lines of their own are taken out of the documents.
- In training the document is a window of block_size tokens with the definition in it.
- In a test it is a whole file, of which an encoder may read as much as it can (scoring.py).
- A query that occurs twice, or still stands in its document, is left out.
- msmarco has queries and passages of its own, and is tested on MLDR's long documents.

The loss is InfoNCE in both directions: find the query's own among the documents of one micro-step
on one process, and the reverse. Beside them stands a hard negative for each query, another place
of the same file: of some, the one that the model ranks first before the training.
"""
import sys

import numpy as np
import torch
from torch.nn import functional as F

from common.exits import fail
from data import corpora
from lab.bert import pairs, scoring
from lab.bert.mlm import PAD, CutTask

PLACES = 16         # in a file, among which its hard negatives are chosen
TEMPERATURE = 0.05  # cosines are divided by it


class Task(CutTask):
    block_size: int = 128        # tokens of a document in training
    query_size: int = 48         # tokens of a query, at most; never more than block_size
    corpus: str = "packages"     # see data/corpora.py; msmarco; or your own file or folder
    tokenizer: str = "gpt2"      # gpt2 or bytes
    max_vocab: int = 8192        # tokens of it that are kept, unless --init_from says which

    validation_splits = corpora.SPLITS[1:2]
    unit = "queries"
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
        self.asked = min(self.query_size, self.block_size)  # a learned table ends there
        self.corpus, self.source, self.pairs = pairs.prepared(self.corpus, self.tokenizer)
        for split in self.splits:
            queries = len(self.pairs[f"{split}.at"])
            documents = len(self.pairs[f"{split}.documents.starts"]) - 1
            if queries < 2 or (split == "test" and documents < 2):
                raise ValueError(f"{self.corpus} has {queries} queries and {documents} documents "
                                 f"in its {split} split, needs 2: some 20 files")
        self.count(self.pairs["train.documents"], self.pairs["train.queries"])

    @torch.no_grad()
    def prepare(self, model):
        """Choose every pair's hard negative: where its file looks most like the query's answer."""
        super().prepare(model)
        if "negative" in self.pairs:  # the corpus has its own
            return
        device = next(model.parameters()).device

        def vectors(tokens):
            parts = torch.from_numpy(tokens).split(128)
            return torch.cat([model(part.to(device), pooled=True).cpu() for part in parts])
        print("choosing a hard negative for each pair", file=sys.stderr)
        model.eval()
        T = self.block_size
        of = self.pairs["train.of"]
        at = self.pairs["train.at"]
        end = self.pairs["train.end"]
        starts = self.pairs["train.documents.starts"]
        chosen = np.full(len(at), -1)
        for document in np.unique(of):
            n = np.flatnonzero(of == document)
            places = np.arange(0, starts[document + 1] - starts[document], T)
            some = np.linspace(0, len(places) - 1, min(PLACES, len(places)))
            places = places[some.astype(int)]
            windows = self.cut("train.documents", np.full(len(places), document), places, T)
            queries = self.cut("train.queries", n, 0, self.asked)
            score = (vectors(queries) @ vectors(windows).T).numpy()  # (queries, places)
            before = at[n, None] - 2 * T
            after = np.maximum(at + 2 * T, end)[n, None]
            score[(before < places) & (places < after)] = -np.inf    # the answer itself
            has_other = np.isfinite(score.max(1))
            chosen[n[has_other]] = places[score.argmax(1)[has_other]]
        model.train()
        self.kept["negatives"] = torch.from_numpy(chosen)

    def batch(self, split, batch_size, rng):
        """
        -> x (B, asked + 2 block_size) int64: query, document, hard negative, each padded;
        y (B, 4): the document, its first token, the negative's document, its first token.
        """
        at = self.pairs[f"{split}.at"]
        of = self.pairs[f"{split}.of"]
        n = rng.choice(len(at), batch_size, replace=batch_size > len(at))
        queries = self.cut(f"{split}.queries", n, 0, self.asked)
        # the definition begins in the first half of the window
        start = (at[n] - rng.integers(0, self.block_size // 2 + 1, len(n))).clip(0)
        documents = self.cut(f"{split}.documents", of[n], start, self.block_size)
        other, first = of[n], np.full(len(n), -1)  # no hard negative
        if split == "train":
            if "negative" in self.pairs:
                other, first = self.pairs["negative"][n], np.zeros(len(n), int)
            elif "negatives" in self.kept:
                first = self.kept["negatives"].numpy()[n]
        negatives = self.cut(f"{split}.documents", other, first.clip(0), self.block_size)
        negatives[first < 0] = PAD
        x = np.hstack((queries, documents, negatives))
        return x, np.column_stack((of[n], start, other, first))

    def tensors(self, split, batch_size, rng):
        """y are places, not tokens: nothing to check."""
        x, y = self.batch(split, batch_size, rng)
        return torch.from_numpy(x), torch.from_numpy(y)

    def cut(self, name, n, start, size):
        """Texts n (N,) of an array, `size` tokens from `start` on -> (N, size) of our tokens."""
        stream, starts = self.pairs[name], self.pairs[f"{name}.starts"]
        where = (starts[n] + start)[:, None] + np.arange(size)
        tokens = stream[where.clip(max=len(stream) - 1)]
        return np.where(where < starts[n + 1][:, None], self.table[tokens], PAD)

    def forward(self, model, x, y):
        """
        InfoNCE both ways (van den Oord et al., 2018).
        Another pair's window that overlaps the query's own is no negative: it may be as right.
        (One farther into the same class is, though it may answer, too.)
        """
        B, T = len(x), self.block_size
        if B < 2:  # one pair has nothing to tell its document from
            fail("this task needs a --batch_size of at least 2 for each process")
        query, document, negative = x.split((self.asked, T, T), 1)
        some = (negative != PAD).any(1)
        q = model(trim(query), pooled=True)
        d = model(trim(torch.cat((document, negative[some]))), pooled=True)
        with torch.autocast(x.device.type, enabled=False):  # what is divided is not in bfloat16
            score = q.float() @ d.float().T / TEMPERATURE  # (B, B and negatives)
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
        """A batch is too small to search in."""
        return {}

    def evaluate(self, runs, args):
        return scoring.evaluate(self, runs, args)


def trim(idx):
    """(B, T) without the columns at its end in which there is only padding."""
    return idx[:, :max(1, int((idx != PAD).sum(1).max()))]
