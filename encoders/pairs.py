"""Pairs of a query and the document that answers it, in one file of arrays."""
import ast
import hashlib
import os
import re
import sys
import warnings
from collections import Counter
from itertools import islice

import numpy as np

from common.files import write_safely
from data import corpora, text

ASKED = 8      # queries of one test document at most
WORDS = 4      # of a query at least
SENTENCES = 8  # prose: one sentence in so many is a query


def prepare(corpus, tokenizer):
    """
    -> the corpus' name or absolute path, and its arrays: for every split SPLIT.documents and
    SPLIT.queries, tokens one text after the other, which begin at SPLIT.documents.starts, ...;
    SPLIT.of, .at and .end, the document that answers a query, where the answer begins and ends.
    """
    if corpus == "fineweb_edu":
        raise ValueError("fineweb_edu is too large to search: choose packages or a folder")
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
    def write(tmp):
        with open(tmp, "wb") as f:
            np.savez(f, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safely(path, write)


def tokenized(splits, encoding):
    """{split: (documents, [(query, document, place)], negatives)} -> arrays"""
    size = text.sizes_of(encoding)
    arrays = {}
    for split, (documents, asked, negative) in splits.items():
        queries = [query for query, *_ in asked]
        for name, texts in dict(documents=documents, queries=queries).items():
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
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of odd files
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
    """All functions and classes within a node."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, part, ()):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield inner
            yield from definitions(inner)


def without_sentences(document):
    """Other text: about one sentence in SENTENCES, by its hash."""
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
