"""Retrieval: pairs, the loss, ranking, BM25, evaluation."""
import json
import math
import re

import numpy as np
import pytest
import torch

from data import corpora
from encoders import bm25, pairs, retrieval, scoring
from tests.helpers import ENCODER_FLAGS, close, command, complaint, documents, is_png, make, rng


def read(texts):
    """Texts in the tokens of `bytes` -> [str]"""
    return [bytes(tokens.tolist()).decode() for tokens in texts]


def task_of(library, **fields):
    fields = dict(tokenizer="bytes", block_size=32) | fields
    return retrieval.Task(corpus=str(library / "library"), **fields)


def test_a_query_is_taken_out_of_its_document(library):
    """The definition is where `at` says, without its docstring."""
    task, seen = task_of(library, block_size=64), []
    for split in task.splits:
        documents, queries, of = scoring.collection(task, split, 10**6)
        texts, asked = read(documents), read(queries)
        places = task.pairs[f"{split}.at"], task.pairs[f"{split}.end"]
        for query, n, where, end in zip(asked, of, *places):
            assert query.lower() not in " ".join(texts[n].lower().split())
            assert texts[n][where:].startswith("def " + "_".join(query.lower().split()[:2]))
            assert texts[n][:end].endswith("    return y\n") and "\n\n" not in texts[n][where:end]
        seen += asked
    assert len(seen) == len(set(seen)) > 100


def test_which_definitions_are_asked_for(monkeypatch):
    """None twice, at most ASKED of a test file."""
    def file(*names):
        return "\n\n".join(f'def f():\n    """It is {n} that does this."""\n    return "a"'
                           for n in names).encode()
    texts = [("train", file("one", "same", "apart")), ("train", file("same", "two")),
             ("test", file(*(f"number{n}" for n in range(10)))), ("val", file("apart", "four"))]
    monkeypatch.setattr(corpora, "documents", lambda corpus: texts)
    splits = pairs.from_documents("any")
    assert [(query, n) for query, n, _ in splits["train"][1]] == [
        ("It is one that does this.", 0), ("It is two that does this.", 1)]
    assert [query for query, *_ in splits["val"][1]] == ["It is four that does this."]
    assert len(splits["test"][1]) == pairs.ASKED == 8


def test_docstrings_that_stay_and_those_that_go():
    source = (
        'def a():\n    """Said in one place."""\n    return 1\n\n\n'
        'class B:\n    """Four words and more.\n\n    Not this.\n    """\n    x = 1\n\n'
        '    async def c(self):\n        r"""Within a class, too."""\n        pass\n\n\n'
        'def d(): """on the line of the def"""\n\n\n'
        'def e():\n    """Nothing but a docstring."""\n\n\n'
        'def f():\n    """Too short."""\n    return 2\n')
    document, asked = pairs.without_queries(source)
    answers = {query: document[at:end].strip().split("\n") for query, (at, end) in asked}
    ends = {query: (lines[0].strip(), lines[-1].strip()) for query, lines in answers.items()}
    assert ends == {"Said in one place.": ("def a():", "return 1"),
                    "Four words and more.": ("class B:", "pass"),
                    "Within a class, too.": ("async def c(self):", "pass")}
    gone = "one place", "Four words", "Not this", "Within a", "Nothing but", "Too short"
    assert not any(words in document for words in gone)
    assert "on the line of the def" in document


def test_info_nce_is_what_the_loop_says(library):
    task = task_of(library)
    model = make("bert_rope", vocab_size=task.vocab_size, block_size=64).double()
    task.prepare(model)
    # more than there are pairs: some come twice
    x, y = task.tensors("train", len(task.pairs["train.at"]) + 1, rng(0))
    x, y = x[:40], y[:40]
    _, got = task.forward(model, x, y)
    has, B = (x[:, 64:] > 0).any(1), len(x)
    with torch.no_grad():
        q, d, n = (model.embed(part) for part in x.split((32, 32, 32), 1))
    to_document, to_negative = ((q @ texts.T / 0.05).exp() for texts in (d, n))

    def again(i, file, start):
        return file == y[i, 0] and abs(start - y[i, 1]) < 32
    total, left_out = 0, 0
    for i in range(B):
        others = [j for j in range(B) if i == j or not again(i, *y[j, :2])]
        hard = [j for j in range(B) if has[j] and not again(i, *y[j, 2:])]
        left_out += B - len(others)
        both = to_document[i, others].sum() + to_negative[i, hard].sum()
        total -= (to_document[i, i] / both).log()
        total -= (to_document[i, i] / to_document[others, i].sum()).log()
    assert left_out and i in hard
    close(got, total / (2 * B), 1e-5)


@torch.no_grad()
def test_a_hard_negative_is_another_place_of_the_file(library):
    task = task_of(library)
    model = make("bert_nope", vocab_size=task.vocab_size).double()
    task.prepare(model)
    chosen = task.kept["negatives"].numpy()
    at, end, of = (task.pairs[f"train.{name}"] for name in ("at", "end", "of"))
    lengths = np.diff(task.pairs["train.documents.starts"])
    some = chosen >= 0
    assert some.mean() > 0.9 and (chosen[some] < lengths[of[some]]).all()
    assert (abs(chosen - at)[some] >= 64).all()
    for n in some.nonzero()[0][:5]:  # of the others the one most like the query
        places = np.arange(0, lengths[of[n]], 32)
        other = (places <= at[n] - 64) | (places >= max(at[n] + 64, end[n]))
        windows = task.cut("train.documents", np.full(len(places), of[n]), places, 32)
        query = task.cut("train.queries", np.array([n]), 0, task.asked)
        scores = (model.embed(torch.from_numpy(windows)) @ model.embed(torch.from_numpy(query))[0])
        most = scores[torch.from_numpy(other)].max()
        assert scores[(places == chosen[n]).argmax()] == pytest.approx(most.item(), abs=1e-5)


def test_ranks_and_their_measures():
    scores = np.array([[0.1, 0.9, 0.5], [0.3, 0.3, 0.2], [0.0, 0.2, 0.1]])
    places = scoring.ranks(scores, np.array([2, 0, 0]))
    assert places.tolist() == [2, 2, 3]  # of two with one score, the right one comes last
    third = 1 / math.log2(3)
    assert scoring.ndcg(places).tolist() == pytest.approx([third, third, 0.5])
    found = scoring.summary(np.array([1, 3, 10, 11]), np.arange(4), 0)
    assert found["ndcg@10"]["value"] == pytest.approx((1 + 0.5 + 1 / math.log2(11)) / 4)
    best = scoring.best_window(scores[:2], np.array([0, 0, 1]))
    assert best.tolist() == [[0.9, 0.5], [0.3, 0.2]]
    halves = np.repeat([0.0, 1.0], 200)
    low, high = scoring.bootstrap(halves, np.arange(400))
    assert 0.44 < low < 0.46 and 0.54 < high < 0.56
    low, high = scoring.bootstrap(halves, np.arange(400) // 20)  # as 20 queries, not 400
    assert 0.25 < low < 0.35 and 0.65 < high < 0.75


def test_bm25_by_a_worked_example():
    documents = [["cat", "sat", "cat"], ["dog", "sat"], ["dog"]]
    got = bm25.bm25_scores([["cat"], ["sat", "dog", "dog"], ["bird"]], documents)
    idf = {word: math.log(1 + (3 - n + 0.5) / (n + 0.5)) for word, n in
           (("cat", 1), ("sat", 2), ("dog", 2))}

    def weight(n, length):
        return n * 2.2 / (n + 1.2 * (0.25 + 0.75 * length / 2))
    want = [[idf["cat"] * weight(2, 3), 0, 0],
            [idf["sat"] * weight(1, 3), (idf["sat"] + 2 * idf["dog"]) * weight(1, 2),
             2 * idf["dog"] * weight(1, 1)], [0, 0, 0]]
    assert np.allclose(got, want, atol=1e-6)
    assert bm25.words_of("readLine(read_line2)") == ["read", "line", "read", "line", "2"]


def test_from_masked_tokens_to_search(library):
    """Both trainings interrupted and continued, bit for bit; the table has what was found."""
    begin = "--init_from", "mlm-4", "--query_size", 16
    for name, more in (("mlm", ()), ("retrieval", begin)):
        flags = "--data", name, *ENCODER_FLAGS, "--no-evaluate", *more, "--lr_decay_iters", 4
        command(library, "train.py", *flags, "--max_iters", 4, "--out_dir", f"{name}-4")
        command(library, "train.py", *flags, "--max_iters", 2, "--out_dir", f"{name}-2")
        command(library, "train.py", "--resume", f"{name}-2", "--max_iters", 4, "--no-evaluate")
        whole, twice = (torch.load(library / f"{name}-{n}" / "ckpt.pt") for n in (4, 2))
        for part in ("kept", "model"):
            assert whole[part].keys() == twice[part].keys()
            assert all(torch.equal(whole[part][k], twice[part][k]) for k in whole[part])
    out, _ = command(library, "eval.py", "retrieval-4", "--lengths", 32, 512, "--queries", 5)
    assert re.search(r"\nretrieval-4 +32 +512\n", out)
    assert re.search(r"\nwhole( +\d+\.\d ± \d+\.\d){2}\n", out)
    result = json.loads((library / "retrieval-4" / "eval.json").read_text())
    n = result["documents"]
    chance = sum(1 / math.log2(1 + place) for place in range(1, min(10, n) + 1)) / n
    assert result["queries"] == 5 and result["chance"] == pytest.approx(chance)
    assert set(result["runs"][0]["search"]) == {"whole", "windows", "bm25"}
    assert is_png(library / "retrieval-4" / "eval.png")


def test_what_an_encoder_refuses(library):
    common = *ENCODER_FLAGS, "--max_iters", 1, "--no-evaluate"
    command(library, "train.py", "--data", "mlm", *common, "--out_dir", "m")
    start = "train.py", "--data", "retrieval", "--query_size", 16, *common
    command(library, *start, "--model", "bert_learned", "--out_dir", "r")
    documents(library / "short", [f"x = {i}\n" for i in range(9)])
    for words, says in (
            ((*start, "--model", "cable"), "retrieval needs an encoder"),
            (("train.py", "--model", "bert_rope", "--data", "library"), "needs a causal model"),
            ((*start, "--batch_size", 1), "needs a --batch_size of at least 2 for each"),
            ((*start, "--init_from", "m", "--n_embd", 32), "do not fit encoders/bert.py"),
            (("figures.maps", "attention", "m"), "is an encoder: maps are of causal models"),
            ((*start, "--corpus", "short"), "has 0 queries and 0 documents in its train split"),
            ((*start, "--corpus", "fineweb_edu"), "too large: choose packages"),
            (("sample.py", "r"), "was trained on retrieval and writes no text"),
            (("eval.py", "r", "--lengths", 33), "must be multiples of the training length, 32"),
            (("eval.py", "m", "r"), "score them one by one")):
        assert says in complaint(library, *words), words
    out, _ = command(library, "eval.py", "r", "--lengths", 32, 512)  # windows can be read
    assert "  r: learned positions end at" in out
    assert re.search(r"\nwhole +\S+ ± \S+ +-\n", out)
    assert re.search(r"\nwindows( +\d\S+ ± \S+){2}\n", out)
    (library / "library" / "0.py").write_text("changed = 1\n")
    assert "is not what r" in complaint(library, "eval.py", "r")
