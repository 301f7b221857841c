"""Pairs of a query and the document that answers it, in one file of arrays."""
import ast
import hashlib
import warnings
from collections import Counter
from itertools import islice

import numpy as np

from data import corpora, text

ASKED = 8  # queries of one test document at most
WORDS = 4  # of a query at least


def prepared(corpus, tokenizer):
    """
    -> the corpus' name or absolute path; a sha256; and its arrays: for every split SPLIT.documents
    and SPLIT.queries, tokens one text after the other, which begin at SPLIT.documents.starts, ...;
    SPLIT.of, .at and .end, the document that answers a query, where the answer begins and ends.
    """
    if corpus == "fineweb_edu":
        raise ValueError("fineweb_edu is too large: choose packages or a folder")
    if corpus == "msmarco":
        name, source = corpus, f"{MSMARCO}, {MLDR}"
    else:
        if corpus not in corpora.CORPORA:
            corpus = str(corpora.absolute(corpus))
        name, source = corpora.identify(corpus)

    def make(folder):
        encoding = text.get_encoding(tokenizer)
        splits = msmarco() if corpus == "msmarco" else from_documents(corpus)
        arrays, digest = tokenized(splits, encoding), hashlib.sha256()
        for array in sorted(arrays):
            digest.update(arrays[array].tobytes())
        np.savez(folder / "pairs.npz", **arrays)
        return dict(sha256=digest.hexdigest())
    folder, meta = text.made_once(f"{name[:40]}-{tokenizer}-pairs", (source, tokenizer), make)
    return corpus, meta["sha256"], dict(np.load(folder / "pairs.npz"))


def tokenized(splits, encoding):
    """{split: (documents, [(query, document, characters of its answer)], negatives)} -> arrays"""
    size, arrays = text.sizes_of(encoding), {}
    for split, (documents, asked, negatives) in splits.items():
        queries = [query for query, *_ in asked]
        for name, texts in dict(documents=documents, queries=queries).items():
            ids = [np.zeros(0, np.uint16)]  # the first text begins at 0
            ids += [np.array(encoding.encode_ordinary(words), np.uint16) for words in texts]
            arrays[f"{split}.{name}"] = np.concatenate(ids)
            arrays[f"{split}.{name}.starts"] = np.cumsum([len(part) for part in ids])
        stream, starts = arrays[f"{split}.documents"], arrays[f"{split}.documents.starts"]
        places = np.zeros((3, len(asked)), int)
        for place, (_, n, characters) in zip(places.T, asked):
            ends = size[stream[starts[n]:starts[n + 1]]].cumsum()  # of its tokens, in bytes
            before = [len(documents[n][:end].encode()) for end in characters]
            place[:] = n, *np.searchsorted(ends, before, side="right")
        arrays |= dict(zip((f"{split}.of", f"{split}.at", f"{split}.end"), places))
        if negatives:
            arrays["negative"] = np.array(negatives)
    return arrays


# -----------------------------------------------------------------------------
# Python files: a docstring asks for its definition

def from_documents(corpus):
    """{split: documents and queries} of a corpus, or a user's own files."""
    rows, times = [], Counter()
    for split, raw in corpora.documents(corpus):
        if split is None:
            raise ValueError(f"{corpus} has too few files, or too unequal ones, to hold some out")
        document, asked = without_queries(raw.decode())
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
    """
    Python -> itself without the docstrings of its functions and classes, and
    [(query, the characters of its answer)]. Other text stays, and has no query.
    """
    document = document.replace("\r\n", "\n").replace("\r", "\n")
    try:
        with warnings.catch_warnings(action="ignore"):  # about the file's own strings
            tree = ast.parse(document)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of odd files
        return document, []
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
    """All functions and classes within a node."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, ()):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield inner
            yield from definitions(inner)


# -----------------------------------------------------------------------------
# the paper's: MS MARCO with mined hard negatives to train on, long documents to test

MSMARCO = "sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1"
MLDR = "hf://datasets/Shitao/MLDR/mldr-v1.0-en"  # its files: `datasets` 4 runs no scripts
SAMPLES, HELD_OUT = 1_250_000, 1000


def msmarco():
    """{split: passages and queries} of the Hugging Face hub. Raises ValueError where it fails."""
    numbers = {split: {} for split in corpora.SPLITS}  # {passage: its number}
    asked, negatives = {split: [] for split in corpora.SPLITS}, []

    def number(split, passage):
        return numbers[split].setdefault(passage, len(numbers[split]))

    def add(split, query, passage):  # nobody says where its answer is
        asked[split].append((query, number(split, passage), (0, 0)))

    for row in corpora.hub("json", None, data_files=f"{MLDR}/corpus.jsonl.gz", split="train"):
        number("test", row["text"])
    for row in corpora.hub("json", None, data_files=f"{MLDR}/test.jsonl.gz", split="train"):
        add("test", row["query"], row["positive_passages"][0]["text"])
    rows, held_out = corpora.hub(MSMARCO, "triplet-hard", split="train"), set()
    for n, row in enumerate(islice(rows, HELD_OUT + SAMPLES)):
        if n < HELD_OUT:
            held_out.add(row["query"])
            add("val", row["query"], row["positive"])
        elif row["query"] not in held_out:
            add("train", row["query"], row["positive"])
            negatives.append(number("train", row["negative"]))
    return {split: (list(numbers[split]), asked[split], negatives if split == "train" else None)
            for split in corpora.SPLITS}
