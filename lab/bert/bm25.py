"""BM25, what most search engines rank by: the measure that an encoder has to be held against."""
import itertools
import re
from collections import Counter

import numpy as np


def words_of(text):
    """The words of a text as a search engine takes them: lower case, readLine is two."""
    parts = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    return re.findall(r"[^\W\d_]+|\d+", parts.lower())


def bm25_scores(queries, documents, k1=1.2, b=0.75):
    """
    Okapi BM25 (Robertson and Zaragoza, 2009): the words of every query (a list of lists), and of
    every document (taken one after the other) -> scores (Q, N). A document scores high that has the
    query's words often for its length; rare words count more.
    """
    terms = {word: n for n, word in enumerate(dict.fromkeys(itertools.chain(*queries)))}

    def counted(words):
        row = np.zeros(len(terms), np.float32)
        for word, n in Counter(words).items():
            if word in terms:
                row[terms[word]] = n
        return row
    asked = np.stack([counted(words) for words in queries])
    rows, length = [], []
    for words in documents:
        rows.append(counted(words))
        length.append(len(words))
    weight = np.stack(rows)
    has = (weight > 0).sum(0)
    idf, mean = np.log(1 + (len(weight) - has + 0.5) / (has + 0.5)), max(np.mean(length), 1)
    for n, words in zip(weight, length):  # from counts to weights, in place: there may be many
        n[:] = idf * n * (k1 + 1) / (n + k1 * (1 - b + b * words / mean))
    return asked @ weight.T
