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
import os
import re
import sys
import warnings
import zipfile
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from data import text
from data.text import PAD

ASKED = 8      # queries of one test document at most
WORDS = 4      # of a query at least
SENTENCES = 8  # prose: one sentence in so many is a query
PLACES = 16    # in a file, among which its hard negatives are chosen


@dataclass
class Task(text.CutTask):
    block_size: int = 128        # tokens of a document in training
    query_size: int = 48         # tokens of a query, at most; never more than block_size
    corpus: str = "packages"     # see data/text.py; msmarco; or your own file or folder
    tokenizer: str = "gpt2"      # gpt2 or bytes
    max_vocab: int = 8192        # tokens of it that are kept, unless --init_from says which
    temperature: float = 0.05    # cosines are divided by it
    hard_negatives: bool = True  # also tell a definition from another place of its file

    kind = "pairs"
    splits = text.SPLITS
    least_batch = 2  # one pair has nothing to tell its document from
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
        corpus = config["corpus"]
        if corpus in (*text.CORPORA, "msmarco"):
            return True
        path = pairs_file(text.PREPARED / f"{text.name_of(corpus)}-{config['tokenizer']}")
        return str(load(path).get("sha256")) == source

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

        def embed(tokens):
            found = [model(part.to(device), pooled=True).cpu()
                     for part in torch.from_numpy(tokens).split(128)]
            return torch.cat(found)
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
            score = (embed(queries) @ embed(windows).T).numpy()          # (queries, places)
            before, after = at[n, None] - 2 * T, np.maximum(at + 2 * T, end)[n, None]
            score[(before < places) & (places < after)] = -np.inf        # the answer itself
            best = score.argmax(1)
            known = np.isfinite(score.max(1))
            chosen[n[known]] = places[best[known]]
        model.train()
        self.kept["negatives"] = torch.from_numpy(chosen)

    def loss(self, model, x, y):
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
        own = torch.arange(B, device=x.device)
        return (F.cross_entropy(score, own) + F.cross_entropy(score[:, :B].T, own)) / 2

    # ---- search

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

    def ours(self, texts):
        """Texts in the tokenizer's tokens -> in ours, which the model knows."""
        return [self.table[tokens] for tokens in texts]

    def read(self, texts):
        """Texts in the tokenizer's tokens -> [str]"""
        encoding = text.get_encoding(self.tokenizer)
        return [encoding.decode(tokens.tolist()) for tokens in texts]


def trim(idx):
    """(B, T) without the columns at its end in which there is only padding."""
    return idx[:, :max(1, int((idx != PAD).sum(1).max()))]


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
        folder, source = text.PREPARED / f"msmarco-{tokenizer}", f"{MSMARCO}, {MLDR}"
    else:
        if corpus not in text.CORPORA:
            corpus = str(text.absolute(corpus))
        folder, source, _ = text.look_up(corpus, tokenizer)
    code = Path(__file__).read_bytes()
    if corpus != "msmarco":  # whose documents and splits are text.py's
        code += Path(text.__file__).read_bytes()
    made_by = hashlib.sha256(code).hexdigest()[:8]
    source = f"{source}, made by {made_by}"  # an edit of these files makes them anew
    path = pairs_file(folder)
    with text.locked(path):
        arrays = load(path)
        if str(arrays.get("source")) == source:
            return corpus, arrays
        encoding = text.get_encoding(tokenizer)
        print(f"making queries and documents of {corpus} in {path}", file=sys.stderr)
        splits = msmarco() if corpus == "msmarco" else from_documents(corpus)
        arrays = tokenized(splits, encoding)
        digest = hashlib.sha256()
        for name in sorted(arrays):
            digest.update(arrays[name].tobytes())
        arrays |= dict(source=np.array(source), sha256=np.array(digest.hexdigest()))
        try:
            save(path, arrays)
        except OSError as e:
            raise ValueError(f"could not prepare {corpus}: {e}") from e
    return corpus, arrays


def load(path):
    """The arrays of a prepared file; {} if there is none, or a power cut left it damaged."""
    try:
        return dict(np.load(path))
    except (FileNotFoundError, ValueError, EOFError, zipfile.BadZipFile):
        return {}


def pairs_file(folder):
    """Beside the folder of a corpus' tokens."""
    return folder.with_name(f"{folder.name}.pairs.npz")


def save(path, arrays):
    """All of the file or nothing of it. What a killed process left is written over."""
    tmp = path.with_name(f"{path.name}.partial")
    try:
        with open(tmp, "wb") as f:
            np.savez(f, **arrays)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


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
    """{split: documents and queries} of a corpus of text.py, or a user's own files."""
    found, times = [], Counter()
    for split, raw in text.open_corpus(corpus):
        if split is None:
            raise ValueError(f"{corpus} has too few documents for train, val and test")
        document, asked = without_queries(raw.decode("utf-8", "replace"))
        times.update(plain(query) for query, _ in asked)
        if document.strip():
            found.append((split, document, asked))
    splits = {split: ([], [], None) for split in text.SPLITS}
    for split, document, asked in found:
        everything = plain(document)
        known = [(query, place) for query, place in asked
                 if times[plain(query)] == 1 and plain(query) not in everything]
        documents, queries, _ = splits[split]
        if split == "test":
            known = sorted(known, key=lambda pair: text.name_hash(pair[0]))[:ASKED]
        queries += [(query, len(documents), place) for query, place in known]
        if known or split == "test":  # there also to be told from the others
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
    lines, out, found = document.split("\n"), set(), []
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
            found.append((query, node.lineno - 1, node.end_lineno))
    kept = [0 if n in out else len(line) + 1 for n, line in enumerate(lines)]
    starts = np.cumsum([0, *kept])
    rest = "\n".join(line for n, line in enumerate(lines) if n not in out)
    places = [(query, (int(starts[line]), int(starts[end]))) for query, line, end in found]
    return rest, places


def definitions(node):
    """All functions and classes within a node. They are statements: expressions are left alone."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, ()):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield inner
            yield from definitions(inner)


def without_sentences(document):
    """Other text: about one sentence in SENTENCES is taken out, chosen by its hash."""
    parts, found, length = [], [], 0
    end = r"(?<=[.!?])(?=\s)|(?<=[.!?][\"')])(?=\s)"  # not within 2.13
    for part in re.split(end, document):
        sentence = " ".join(part.split())
        whole = sentence.rstrip("\"')").endswith((".", "!", "?"))
        chosen = whole and text.name_hash(sentence)[0] % SENTENCES == 0
        if chosen and len(sentence.split()) >= 2 * WORDS:
            part = part[:len(part) - len(part.lstrip())]
            found.append((sentence, (length + len(part), length + len(part))))
        parts.append(part)
        length += len(part)
    return "".join(parts), found


# -----------------------------------------------------------------------------
# the paper's: MS MARCO with mined hard negatives to train on, long documents to test

MSMARCO = "sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1"
MLDR = "hf://datasets/Shitao/MLDR/mldr-v1.0-en"  # its files: `datasets` 4 runs no scripts
SAMPLES, HELD_OUT = 1_250_000, 1000


def msmarco():
    """{split: passages and queries} of the Hugging Face hub. Raises ValueError where it fails."""
    splits = dict(train=([], [], []), val=([], [], None), test=([], [], None))
    numbers = {split: {} for split in splits}

    def number(split, passage):
        """The same passage once."""
        known = numbers[split]
        if passage not in known:
            known[passage] = len(known)
            splits[split][0].append(passage)
        return known[passage]

    def long(name):
        return text.hub("json", None, data_files=f"{MLDR}/{name}.jsonl.gz", split="train")

    for row in long("corpus"):
        number("test", row["text"])
    for row in long("test"):  # where in its document the answer is, nobody says
        passage = row["positive_passages"][0]["text"]
        splits["test"][1].append((row["query"], number("test", passage), (0, 0)))
    rows, held_out = text.hub(MSMARCO, "triplet-hard", split="train"), set()
    for row in islice(rows, HELD_OUT + SAMPLES):
        split = "train" if len(splits["val"][1]) == HELD_OUT else "val"
        if split == "val":
            held_out.add(row["query"])
        elif row["query"] in held_out:
            continue
        splits[split][1].append((row["query"], number(split, row["positive"]), (0, 0)))
        if split == "train":
            splits[split][2].append(number(split, row["negative"]))
    return splits
