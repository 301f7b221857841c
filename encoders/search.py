"""
Search: texts as vectors, BM25, and which files of a folder answer a prompt.
"""
import hashlib
import itertools
import re
import textwrap
from collections import Counter

import numpy as np
import torch

from data.corpora import read_files
from data.text import get_encoding
from encoders.mlm import cut_to
from encoders.pairs import save

TOKENS = 2**14  # that go through an encoder at once
FILES, EACH, WIDTH = 10, 3, 70  # files that are named, lines of each, characters of a line


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


def best_window(scores, of, N):
    """(Q, windows) and their documents (windows,), in order -> (Q, N), each document's best."""
    firsts = np.searchsorted(of, np.arange(N))
    return np.maximum.reduceat(scores, firsts, axis=1)


def reciprocal_rank(scores):
    """Scores (Q, N) -> (Q, N), 1 / (60 + the document's place) (Cormack et al., 2009)."""
    return 1 / (61 + (-scores).argsort(1, kind="stable").argsort(1))


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

def search_folder(run, folder, prompt, device, context, bm25=True):
    """Print which files of a folder answer a prompt, bytes, best, and up to three lines of each."""
    asked = (prompt or b"").decode("utf-8", "replace").strip("\ufeff").strip()
    words = words_of(asked)
    if not words:
        raise ValueError("the prompt has no word: a search needs one")
    T, files = run.config["block_size"], read_files(folder)
    names, vectors = list(files), kept_vectors(run, device, context)
    encoding = get_encoding(run.config["tokenizer"])
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
