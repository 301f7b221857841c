"""Retrieval: pairs, the loss, ranking, BM25, evaluation."""
import json
import math

import numpy as np
import pytest
import torch

from lab.bert import bm25, pairs, retrieval, scoring
from tests.helpers import ENCODER_FLAGS, close, command, complaint, make, rng


def task_of(library):
    return retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=32)


def test_a_query_is_taken_out_of_its_document(library):
    """The definition is where `at` says, without its docstring; none that comes twice is asked."""
    twin = (library / "library" / "0.py").read_text().replace("return y", "return y + 1")
    (library / "library" / "twin.py").write_text(twin)
    task = task_of(library)
    seen = []
    for split in task.splits:
        texts, asked, of = scoring.collection(task, split, 10**6)
        texts, asked = ([bytes(part.tolist()).decode() for part in parts]
                        for parts in (texts, asked))
        places = task.pairs[f"{split}.at"], task.pairs[f"{split}.end"]
        for query, n, where, end in zip(asked, of, *places):
            assert query.lower() not in " ".join(texts[n].lower().split())
            assert texts[n][where:].startswith("def " + "_".join(query.lower().split()[:2]))
            assert texts[n][:end].splitlines()[-1].startswith("    return y")
            assert "\n\n" not in texts[n][where:end]
        seen += asked
    assert len(seen) == len(set(seen)) > 100


def test_docstrings_that_stay_and_those_that_go():
    source = (
        'def a():\n    """Said in one place."""\n    return 1\n\n\n'
        'class B:\n    """Four words and more.\n\n    Not this.\n    """\n    x = 1\n\n'
        '    async def c(self):\n        r"""Within a class, too."""\n        pass\n\n\n'
        'def d(): """on the line of the def"""\n\n\n'
        'def e():\n    """Nothing but a docstring."""\n\n\n'
        'def f():\n    """Too short."""\n    return 2\n')
    document, asked = pairs.without_queries(source)
    assert [(query, document[at:end].split()[1], document[at:end].split()[-1])
            for query, (at, end) in asked] == [
        ("Said in one place.", "a():", "1"), ("Four words and more.", "B:", "pass"),
        ("Within a class, too.", "def", "pass")]
    assert document.count('"""') == 2 and "on the line of the def" in document


def test_info_nce_is_what_the_loop_says(library):
    task = task_of(library)
    model = make("bert_rope", vocab_size=task.vocab_size, block_size=64).double()
    task.prepare(model)
    # more than there are pairs: some come twice
    x, y = task.tensors("train", len(task.pairs["train.at"]) + 1, rng(0))
    x, y = x[:40], y[:40]
    _, got = task.forward(model, x, y)
    has = (x[:, 64:] > 0).any(1)
    with torch.no_grad():
        q, d, n = (model.embed(part) for part in x.split((32, 32, 32), 1))
    to_document, to_negative = ((q @ texts.T / 0.05).exp() for texts in (d, n))

    def again(i, file, start):
        return file == y[i, 0] and abs(start - y[i, 1]) < 32
    total = 0
    left_out = 0
    for i in range(40):
        others = [j for j in range(40) if i == j or not again(i, *y[j, :2])]
        hard = [j for j in range(40) if has[j] and not again(i, *y[j, 2:])]
        left_out += 40 - len(others)
        both = to_document[i, others].sum() + to_negative[i, hard].sum()
        total -= (to_document[i, i]**2 / both / to_document[others, i].sum()).log()
    assert left_out and i in hard
    close(got, total / 80, 1e-5)


@torch.no_grad()
def test_a_hard_negative_is_another_place_of_the_file(library):
    """Of the others the one most like the query."""
    task = task_of(library)
    model = make("bert_nope", vocab_size=task.vocab_size).double()
    task.prepare(model)
    chosen = task.kept["negatives"].numpy()
    at, end, of = (task.pairs[f"train.{name}"] for name in ("at", "end", "of"))
    lengths = np.diff(task.pairs["train.documents.starts"])
    some = chosen >= 0
    assert some.mean() > 0.9
    assert (abs(chosen - at)[some] >= 64).all()
    for n in some.nonzero()[0][:5]:
        places = np.arange(0, lengths[of[n]], 32)
        other = (places <= at[n] - 64) | (places >= max(at[n] + 64, end[n]))
        windows = task.cut("train.documents", np.full(len(places), of[n]), places, 32)
        query = task.cut("train.queries", np.array([n]), 0, task.asked)
        windows, query = (model.embed(torch.from_numpy(tokens)) for tokens in (windows, query))
        scores = (windows @ query[0]).numpy()
        assert scores[places == chosen[n]] == pytest.approx(scores[other].max(), abs=1e-5)


def test_ranks_and_their_measures():
    scores = np.array([[0.1, 0.9, 0.5], [0.3, 0.3, 0.2], [0.0, 0.2, 0.1]])
    places = scoring.ranks(scores, np.array([2, 0, 0]))
    assert places.tolist() == [2, 2, 3]  # of two with one score, the right one comes last
    assert scoring.ndcg(np.array([1, 3, 10, 11])).tolist() == [1, 0.5, 1 / math.log2(11), 0]
    best = scoring.best_window(scores[:2], np.array([0, 0, 1]))
    assert best.tolist() == [[0.9, 0.5], [0.3, 0.2]]
    halves = np.repeat([0.0, 1.0], 200)
    assert scoring.bootstrap(halves, np.arange(400)) == pytest.approx([0.45, 0.55], abs=0.01)
    few = scoring.bootstrap(halves, np.arange(400) // 20)  # as 20 queries, not 400
    assert few == pytest.approx([0.3, 0.7], abs=0.05)


def test_bm25_by_a_worked_example():
    documents = [["cat", "sat", "cat"], ["dog", "sat"], ["dog"]]
    got = bm25.bm25_scores([["cat"], ["sat", "dog", "dog"]], documents)

    def weight(n, length):
        return n * 2.2 / (n + 1.2 * (0.25 + 0.75 * length / 2))
    one, two = (math.log(1 + (3 - n + 0.5) / (n + 0.5)) for n in (1, 2))  # of so many documents
    want = [[one * weight(2, 3), 0, 0],
            [two * weight(1, 3), 3 * two * weight(1, 2), 2 * two * weight(1, 1)]]
    assert np.allclose(got, want, atol=1e-6)
    assert bm25.words_of("readLine(read_line2)") == ["read", "line", "read", "line", "2"]


def test_from_masked_tokens_to_search(library):
    """Interrupted and continued, bit for bit; scored, the learned table up to where it ends."""
    for name, more in (("mlm", ()), ("retrieval", ("--init_from", "mlm-4", "--query_size", 16))):
        flags = "--data", name, *ENCODER_FLAGS, "--no-evaluate", *more, "--lr_decay_iters", 4
        for steps in (4, 2):
            command(library, "train.py", *flags, "--model", "bert_learned", "--max_iters", steps,
                    "--out_dir", f"{name}-{steps}")
        command(library, "train.py", "--resume", f"{name}-2", "--max_iters", 4, "--no-evaluate")
        whole, twice = (torch.load(library / f"{name}-{n}" / "ckpt.pt") for n in (4, 2))
        for part in ("kept", "model"):
            assert all(torch.equal(whole[part][k], w) for k, w in twice[part].items())
    out, _ = command(library, "eval.py", "retrieval-4", "--lengths", 32, 512, "--queries", 5)
    assert "  retrieval-4: learned positions end at" in out
    row, = json.loads((library / "retrieval-4" / "eval.json").read_text())["runs"]
    assert list(row["places"]) == ["32"]
    assert list(row["search"]["windows"]) == ["32", "512"]


def test_what_an_encoder_refuses(library):
    start = "train.py", "--data", "retrieval", "--query_size", 16, *ENCODER_FLAGS
    for words, says in (
            ((*start, "--model", "cable"), "retrieval needs an encoder"),
            (("train.py", "--model", "bert_rope", "--data", "library"), "needs a causal model"),
            ((*start, "--corpus", "fineweb_edu"), "too large: choose packages")):
        assert says in complaint(library, *words), words
