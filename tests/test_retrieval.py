"""Retrieval: pairs, ranking, BM25, search."""
import contextlib
import gzip
import itertools
import json
import math
import re
import shutil
import sys
import sysconfig
import types

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import data
import data.retrieval
import data.text
import eval as evaluation
import sample
from tests.helpers import (
    ENCODER_FLAGS,
    close,
    command,
    complaint,
    documents,
    encoder,
    is_png,
    process,
    rng,
    write_package,
)


def test_a_query_is_taken_out_of_its_document(library):
    """Every definition that a query belongs to is where `at` says, without its docstring."""
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=64)
    seen = set()
    for split in task.splits:
        documents, queries, of, at = task.collection(split, 10**6)
        texts, asked = task.read(documents), task.read(queries)
        assert len(asked) >= 2
        for query, n, where in zip(asked, of, at):
            assert query.lower() not in " ".join(texts[n].lower().split())
            assert texts[n][where:].startswith("def " + "_".join(query.lower().split()[:2]))
            end = task.pairs[f"{split}.end"][(task.pairs[f"{split}.of"] == n)
                                             & (task.pairs[f"{split}.at"] == where)].item()
            assert texts[n][:end].endswith("    return y\n") and "\n\n" not in texts[n][where:end]
            assert query not in seen
            seen.add(query)
    for first in range(50):
        x, _ = task.batch("train", 4, rng(first))
        q, d, _ = np.split(x, (task.query_size, task.query_size + 64), axis=1)
        back = np.append([0, 0, 0], task.kept["vocabulary"].numpy())
        for query, document in zip(q, d):
            words = bytes(back[query[query > 2]].tolist()).decode().lower().split()
            assert "def " + "_".join(words[:2]) in bytes(back[document].tolist()).decode()


def test_which_definitions_are_asked_for(library, monkeypatch):
    """No docstring of two definitions, at most ASKED of a test file, no answer beyond the limit."""
    def file(*names):
        return "\n\n".join(f'def f():\n    """It is {n} that does this."""\n    return "a"'
                           for n in names).encode()
    ten = [f"number{n}" for n in range(10)]
    still = file("three") + b"\n\n# it is THREE  that does this."
    texts = [("train", file("one", "same", "apart")), ("train", file("same", "two")),
             ("test", file(*ten)), ("val", file("apart", "four")), ("val", still)]
    with monkeypatch.context() as patch:
        patch.setattr(data.text, "open_corpus", lambda corpus: texts)
        splits = data.retrieval.from_documents("any")
    assert [(query, n) for query, n, _ in splits["train"][1]] == [
        ("It is one that does this.", 0), ("It is two that does this.", 1)]
    assert [query for query, *_ in splits["val"][1]] == ["It is four that does this."]
    assert len(splits["test"][1]) == data.retrieval.ASKED == 8
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=64)
    _, every, _, at = task.collection("train", 10**6)
    limit = int(np.median(at))
    documents, some, _, near = task.collection("train", limit)
    assert 0 < len(some) < len(every) and max(near) < limit
    assert max(map(len, documents)) == limit
    before = []
    for first in range(20):  # the definition begins anywhere in the first half of the window
        _, y = task.batch("train", 4, rng(first))
        answers = {n: at[task.pairs["train.of"] == n] for n in y[:, 0]}
        before += [min(a - start for a in answers[n] if a >= start) for n, start in y[:, :2]]
    assert max(before) > 20 and len(set(before)) > 10


def test_docstrings_that_stay_and_those_that_go():
    source = (
        'def a():\n    """Said in one place."""\n    return 1\n\n\n'
        'class B:\n    """Four words and more.\n\n    Not this.\n    """\n    x = 1\n\n'
        '    async def c(self):\n        r"""Within a class, too."""\n        pass\n\n\n'
        'def d(): """on the line of the def"""\n\n\n'
        'def e():\n    """Nothing but a docstring."""\n\n\n'
        'def f():\n    """Too short."""\n    return 2\n\n\n'
        'if x:\n    try:\n        pass\n    except E:\n        def g():\n'
        '            """Deep in other statements."""\n            return "ä"\n')
    document, asked = data.retrieval.without_queries(source)
    found = {query: document[at:].split("\n")[0].strip() for query, (at, _) in asked}
    assert found == {"Said in one place.": "def a():", "Four words and more.": "class B:",
                     "Within a class, too.": "async def c(self):",
                     "Deep in other statements.": "def g():"}
    ends = {query: document[:end].splitlines()[-1].strip() for query, (_, end) in asked}
    assert ends == {"Said in one place.": "return 1", "Four words and more.": "pass",
                    "Within a class, too.": "pass", "Deep in other statements.": 'return "ä"'}
    gone = "one place", "Four words", "Not this", "Within a", "Nothing but", "Too short", "Deep in"
    assert not any(words in document for words in gone)
    assert "on the line of the def" in document and 'return "ä"' in document


def test_prose_gives_up_some_sentences():
    sentences = [f"The {n}th sentence of this text has a word like w{n * n}." for n in range(200)]
    document, asked = data.retrieval.without_queries("Title, no sentence\n\n" + " ".join(sentences))
    assert 10 < len(asked) < 50
    for query, (at, end) in asked:
        assert at == end
        after = sentences.index(query) + 1
        assert query not in document
        if sentences[after] in document:
            assert document[at:].split()[:2] == sentences[after].split()[:2]


def test_where_a_sentence_ends():
    """Not within a number; behind the quotation mark that closes it."""
    text = ('He counted to number 2.13 on one old machine of theirs, item {0}. "It is done, maybe '
            'after all the days of work, {0}." Then came the rest, a line of words for item {0}! ')
    _, asked = data.retrieval.without_queries("".join(text.format(n) for n in range(300)))
    kinds = {re.sub(r"\d+([.!]\"?)$", r"N\1", query) for query, _ in asked}
    assert kinds == {"He counted to number 2.13 on one old machine of theirs, item N.",
                     '"It is done, maybe after all the days of work, N."',
                     "Then came the rest, a line of words for item N!"}


def test_the_document_of_a_last_sentence_is_not_empty(tmp_path, monkeypatch):
    """Its place is the end of the text: the window begins before it."""
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    texts = [f"It has a few words in its first sentence, number {n}. "
             f"It has a few more of them in its second, after number {n}." for n in range(200)]
    task = data.retrieval.Task(corpus=documents(tmp_path / "prose", texts), tokenizer="bytes",
                               block_size=32, query_size=32)
    at, of = task.pairs["train.at"], task.pairs["train.of"]
    assert (at == np.diff(task.pairs["train.documents.starts"])[of]).any()
    x, _ = task.batch("train", 400, rng())
    assert (x[:, 32:64] != 0).any(1).all()


def test_packages_are_split_as_a_whole(monkeypatch):
    """The largest is trained on, and a split's files are those of its packages."""
    found = {}
    for split, text in itertools.islice(data.text.packages(), 400):
        assert split in data.text.SPLITS and text is not None
        found[split] = found.get(split, 0) + 1
    assert set(found) == set(data.text.SPLITS)
    owners = {}
    real = data.text.choose_splits
    monkeypatch.setattr(data.text, "choose_splits",
                        lambda names, size: owners.update(real(names, size)) or owners)
    next(data.text.packages())
    assert owners["torch"] == "train" and {"json", "asyncio", "numpy"} <= set(owners)


def test_all_files_of_a_package_are_in_its_split(tmp_path, monkeypatch):
    for n in range(30):
        for part in range(4):
            path = tmp_path / f"package{n}" / f"{part}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"# package{n}\n" * 1000)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict(stdlib=str(tmp_path)))
    monkeypatch.setattr(data.text, "PACKAGES", ())
    splits = {}
    for split, text in data.text.packages():
        splits.setdefault(text.split(maxsplit=2)[1], []).append(split)
    assert len(splits) == 30 and all(len(s) == 4 and len(set(s)) == 1 for s in splits.values())
    assert {s[0] for s in splits.values()} == set(data.text.SPLITS)


def test_info_nce_is_what_the_loop_says(library):
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=32)
    model = encoder("bert_rope", vocab_size=task.vocab_size, block_size=64)
    task.begin(model)
    assert (task.kept["negatives"] >= 0).any()
    B = len(task.pairs["train.at"]) + 1  # more than there are pairs: some come twice
    x, y = map(torch.from_numpy, task.batch("train", B, rng(0)))
    got = task.loss(model, x, y)
    q, d, n = x.split((32, 32, 32), 1)
    has = (n > 0).any(1)

    def again(i, file, start):
        return file == y[i, 0] and abs(start - y[i, 1]) < 32
    with torch.no_grad():
        q, d, n = (model.embed(part) for part in (q, d, n))
        total, left_out = 0, 0
        for i in range(B):
            own = [j for j in range(B) if i == j or not again(i, *y[j, :2])]
            hard = [j for j in range(B) if has[j] and not again(i, *y[j, 2:])]
            left_out += B - len(own)
            mine = q[i] @ d[i] / 0.05
            others = [q[i] @ d[j] for j in own] + [q[i] @ n[j] for j in hard]
            total += sum((s / 0.05).exp() for s in others).log() - mine
            total += sum((q[j] @ d[i] / 0.05).exp() for j in own).log() - mine
    assert left_out and i in hard
    close(got, total / (2 * B), 1e-5)


@torch.no_grad()
def test_a_hard_negative_is_another_place_of_the_file(library):
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=32)
    task.begin(encoder("bert_nope", vocab_size=task.vocab_size))
    chosen = task.kept["negatives"].numpy()
    at, end, of = (task.pairs[f"train.{name}"] for name in ("at", "end", "of"))
    lengths = np.diff(task.pairs["train.documents.starts"])
    known = chosen >= 0
    assert known.mean() > 0.9 and (chosen[known] < lengths[of[known]]).all()
    assert (abs(chosen - at)[known] >= 64).all()
    model = encoder("bert_nope", vocab_size=task.vocab_size)
    for n in known.nonzero()[0][:5]:  # of the others the one most like the query
        places = np.arange(0, lengths[of[n]], 32)
        other = (places <= at[n] - 64) | (places >= max(at[n] + 64, end[n]))
        windows = task.cut("train.documents", np.full(len(places), of[n]), places, 32)
        query = task.cut("train.queries", np.array([n]), 0, task.query_size)
        scores = (model.embed(torch.from_numpy(windows)) @ model.embed(torch.from_numpy(query))[0])
        most = scores[torch.from_numpy(other)].max()
        assert scores[(places == chosen[n]).argmax()] == pytest.approx(most.item(), abs=1e-5)
    task.pairs["train.end"] = np.where(of == 0, lengths[0], end)  # definitions as long as the file
    task.begin(encoder("bert_nope", vocab_size=task.vocab_size))
    again = task.kept["negatives"].numpy()
    assert ((again < at) | (again < 0))[of == 0].all() and (again == chosen)[of > 0].all()


def test_ranking_by_a_worked_example():
    scores = np.array([[0.1, 0.9, 0.5], [0.3, 0.3, 0.2], [0.0, 0.2, 0.1]])
    places = evaluation.ranks(scores, np.array([2, 0, 0]))
    assert places.tolist() == [2, 2, 3]  # of two with one score, the right one comes last
    assert evaluation.ranks(np.full((2, 3), np.nan), np.array([0, 1])).tolist() == [3, 3]
    ndcg = evaluation.ndcg
    assert ndcg(places).tolist() == pytest.approx([1 / math.log2(3), 1 / math.log2(3), 0.5])
    assert ndcg(np.array([1, 10, 11])).tolist() == pytest.approx([1, 1 / math.log2(11), 0])
    found = evaluation.summary(np.array([1, 3, 10, 11]), np.arange(4), 0)
    assert {name: m["value"] for name, m in found.items()} == pytest.approx(
        {"ndcg@10": (1 + 0.5 + 1 / math.log2(11)) / 4, "recall@1": 0.25, "recall@10": 0.75})
    got = evaluation.reciprocal_rank(np.array([[0.1, 0.9, 0.5]]))
    assert got.tolist() == [[1 / 63, 1 / 61, 1 / 62]]
    halves = np.repeat([0.0, 1.0], 200)
    low, high = evaluation.bootstrap(halves, np.arange(400))
    assert 0.44 < low < 0.46 and 0.54 < high < 0.56
    assert evaluation.bootstrap(np.ones(9), np.arange(9) // 3) == (1, 1)
    assert np.isnan(evaluation.bootstrap(np.array([0, 1]), np.zeros(2))).all()  # one document
    low, high = evaluation.bootstrap(halves, np.arange(400) // 20)  # as 20 queries, not 400
    assert 0.25 < low < 0.35 and 0.65 < high < 0.75


def test_bm25_by_a_worked_example():
    documents = [["cat", "sat", "cat"], ["dog", "sat"], ["dog"]]
    got = evaluation.bm25_scores([["cat"], ["sat", "dog", "dog"], ["bird"]], documents)
    idf = {word: math.log(1 + (3 - n + 0.5) / (n + 0.5)) for word, n in
           (("cat", 1), ("sat", 2), ("dog", 2))}

    def weight(n, length):
        return n * 2.2 / (n + 1.2 * (0.25 + 0.75 * length / 2))
    want = [[idf["cat"] * weight(2, 3), 0, 0],
            [idf["sat"] * weight(1, 3), (idf["sat"] + 2 * idf["dog"]) * weight(1, 2),
             2 * idf["dog"] * weight(1, 1)], [0, 0, 0]]
    assert np.allclose(got, want, atol=1e-6)
    assert evaluation.words_of("readLine(read_line2)") == ["read", "line", "read", "line", "2"]


def test_windows_and_where_the_answer_begins():
    scores = np.array([[0.1, 0.9, 0.3, 0.2], [0.5, 0.1, 0.2, 0.6]])
    best = evaluation.best_window(scores, np.array([0, 0, 1, 2]), 3)
    assert best.tolist() == [[0.9, 0.3, 0.2], [0.5, 0.2, 0.6]]
    ones = {16: np.array([1, 1, 1])}
    whole = {8: np.array([1, 1, 99]), 16: np.array([1, 3, 99])}
    places = dict(whole=whole, windows=ones, bm25=ones)
    first = np.array([1, 1, 99])
    found = evaluation.by_evidence(places, first, np.array([0, 9, 12]), 8)
    assert found["edges"] == [0, 8, 16] and found["queries"] == [1, 2]
    assert found["whole"] == [1, 0.25] and found["first"] == [1, 0.5]
    places = dict(whole={12: whole[16]}, windows={12: ones[16]})  # a length that is no power of 2
    found = evaluation.by_evidence(places, first, np.array([0, 9, 11]), 4)
    assert found["edges"] == [0, 4, 8, 12] and found["queries"] == [1, 0, 2]
    both = {16: ones[16], 32: first}  # 16 times the training length, though more was read
    found = evaluation.by_evidence(dict(whole=both, windows=both), first, np.array([0, 0, 0]), 1)
    assert found["length"] == 16 and found["whole"][0] == 1


def test_the_loss_of_pairs_is_not_rounded_under_autocast(library):
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=32)
    x, y = map(torch.from_numpy, task.batch("train", 12, rng()))

    def model(idx, pooled):
        return F.normalize(torch.randn(len(idx), 16, generator=torch.Generator().manual_seed(0)))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = task.loss(model, x, y)
    close(rounded, task.loss(model, x, y), 1e-6)


def test_a_search_by_an_oracle():
    """
    A vector says what a text begins with, longer where its second token is larger: the places of
    the right documents, read as a whole, in windows of 2 tokens, and beside BM25.
    """
    def embed(idx):
        return F.one_hot(idx[:, 0], 10) * (1 + idx[:, 1:2] / 100)
    model = types.SimpleNamespace(config=types.SimpleNamespace(n_embd=10), embed=embed)
    run = types.SimpleNamespace(name="oracle", model=model, config=dict(block_size=2))
    task = types.SimpleNamespace(ours=lambda texts: texts)
    documents = [np.array(x) for x in ([1, 2, 3, 4], [3, 1], [5, 6, 2, 7, 1, 9])]
    queries, of = [np.array([n, 0]) for n in (3, 2, 1)], np.array([1, 2, 0])
    bm25 = {L: np.array([[9, 1, 5], [2, 1, 3], [3, 2, 1]]) for L in (2, 4, 6)}
    found, first = evaluation.search(run, task, documents, queries, of, bm25, "cpu",
                                     contextlib.nullcontext())
    assert found.keys() == evaluation.READINGS.keys()
    assert first.tolist() == found["whole"][2].tolist()
    places = {name: {L: at.tolist() for L, at in by.items()} for name, by in found.items()}
    assert [at[0] for at in places["whole"].values()] == [1, 1, 1]
    assert places["windows"][4] == [2, 1, 1] and places["windows"][6] == [2, 1, 2]
    assert places["windows"][2][0] == places["windows"][2][2] == 1
    assert places["bm25"] == {L: [3, 1, 1] for L in (2, 4, 6)}
    assert places["whole_bm25"][4][0] == 2 and places["windows_bm25"][6][0] == 3


def test_the_files_that_answer_best(tmp_path, capsys):
    """A model that sees the share of z: the files in order, their best windows; blank ones not."""
    def embed(idx):
        share = (idx == data.text.UNK + 1 + ord("z")).sum(1) / (idx != 0).sum(1).clamp(min=1)
        return torch.stack((share, (1 - share**2).sqrt()), 1)
    model = types.SimpleNamespace(config=types.SimpleNamespace(n_embd=2), embed=embed)
    config = dict(tokenizer="bytes", vocab_size=256 + 3, block_size=8, query_size=4)
    checkpoint = dict(kept=dict(vocabulary=torch.arange(256)))
    texts = {"half.py": "z-z-z-z-", "lines.py": "--\n--\n--zz--\n", "blank.py": " \n",
             "none.py": "", "long.py": 200 * "-\n" + "z-z-z-z-"}  # beyond 32 x 8 tokens
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    prompt = b"zz--" + 30 * b"z"  # cut to four tokens: a share of one half
    sample.search(model, "r", config, checkpoint, prompt, tmp_path, "cpu",
                  contextlib.nullcontext())
    out, err = capsys.readouterr()

    def score(share):
        return f"{0.5 * share + math.sqrt(0.75 * (1 - share**2)):.3f}"
    assert out.splitlines() == [f"{score(.5)}  half.py:1  z-z-z-z-",
                                f"{score(2 / 13)}  lines.py:3  zz--",
                                f"{score(0)}  long.py:201  z-z-z-z-"]
    assert err == "1 of 3 files are ranked by their first 256 tokens\n"
    for name in ("half.py", "lines.py", "long.py"):
        (tmp_path / name).unlink()
    with pytest.raises(SystemExit, match="has no text in it"):
        sample.search(model, "r", config, checkpoint, prompt, tmp_path, "cpu", None)


def test_what_is_asked_in_a_search(library, monkeypatch):
    """Every query with its own document, BM25 of what is cut, the interval over documents."""
    command(library, "train.py", "--data", "retrieval", *ENCODER_FLAGS, "--query_size", 16,
            "--max_iters", 1, "--no-evaluate", "--out_dir", "r")
    asked, grouped = [], []
    search, bootstrap = evaluation.search, evaluation.bootstrap

    def noted(*args):
        asked.append(args)
        return search(*args)

    def by(values, groups, seed):
        grouped.append(groups)
        return bootstrap(values, groups, seed)
    monkeypatch.setattr(evaluation, "search", noted)
    monkeypatch.setattr(evaluation, "bootstrap", by)
    command(library, "eval.py", "r", "--lengths", 32, 512, "--queries", 4, "--split", "train",
            draw=True)
    (_, task, documents, queries, of, bm25, *_), = asked
    _, every, its, _ = task.collection("train", 512)
    pairs = {(tuple(text), n) for text, n in zip(map(np.ndarray.tolist, every), its.tolist())}
    drawn = {(tuple(text.tolist()), n) for text, n in zip(queries, of.tolist())}
    assert drawn <= pairs and len(queries) == 4 and len({n for _, n in pairs}) > 1
    words = [evaluation.words_of(text) for text in task.read(queries)]
    for L in (32, 512):
        texts = task.read([tokens[:L] for tokens in documents])
        cut = [evaluation.words_of(text) for text in texts]
        assert np.array_equal(bm25[L], evaluation.bm25_scores(words, cut))
    assert all(np.array_equal(groups, of) for groups in grouped)
    assert "must be multiples of the training length, 32" in complaint(
        library, "eval.py", "r", "--lengths", 33)
    found = json.loads((library / "r" / "eval.json").read_text())
    assert found["answers"] == of.tolist() and found["runs"][0]["by_answer_at"]["queries"]
    prepare = data.retrieval.prepare

    def without_places(*args):  # as MLDR: nobody knows where the answers are
        corpus, pairs = prepare(*args)
        return corpus, dict(pairs) | {"train.at": np.zeros_like(pairs["train.at"])}
    monkeypatch.setattr(data.retrieval, "prepare", without_places)
    command(library, "eval.py", "r", "--lengths", 32, 512, "--queries", 4, "--split", "train")
    row, = json.loads((library / "r" / "eval.json").read_text())["runs"]
    assert row["by_answer_at"] is None


def test_from_masked_tokens_to_search(library, monkeypatch):
    """mlm, retrieval, eval, search; both trainings interrupted and continued, bit for bit."""
    common = ENCODER_FLAGS
    command(library, "train.py", "--data", "mlm", *common, "--max_iters", 6, "--eval_interval", 3,
            "--out_dir", "m", "--no-evaluate")
    cases = ("mlm", ()), ("retrieval", ("--init_from", "m", "--query_size", 16))
    for name, more in cases:
        flags = "--data", name, *common, *more, "--lr_decay_iters", 4, "--eval_interval", 2
        command(library, "train.py", *flags, "--max_iters", 4, "--out_dir", f"{name}-4",
                "--no-evaluate")
        command(library, "train.py", *flags, "--max_iters", 2, "--out_dir", f"{name}-2",
                "--no-evaluate")
        command(library, "train.py", "--resume", f"{name}-2", "--max_iters", 4, "--no-evaluate")
        whole, twice = (torch.load(library / f"{name}-{n}" / "ckpt.pt") for n in (4, 2))
        assert whole["kept"].keys() == twice["kept"].keys()
        assert all(torch.equal(whole["kept"][k], twice["kept"][k]) for k in whole["kept"])
        assert all(torch.equal(whole["model"][k], twice["model"][k]) for k in whole["model"])
    command(library, "eval.py", "mlm-4", "--lengths", 32, 64, "--sequences", 8)
    out, _ = command(library, "eval.py", "retrieval-4", "--lengths", 32, 512, "--queries", 5,
                     draw=True)
    found = json.loads((library / "retrieval-4" / "eval.json").read_text())
    assert found["queries"] == 5 and found["documents"] > 1
    _, heads, *rows = out[out.index("\nretrieval-4\n"):].strip().splitlines()
    ends = [n.end() for n in re.finditer(r"[\d,.]+(?!\S)", heads)]
    assert heads.split() == ["tokens", "32", "512"] and len(ends) == 2
    assert [n.end() for n in re.finditer(r"± \d+\.\d", rows[0])] == ends
    assert re.search(r"\nwhole, recall@10( +\d+\.\d ± \d+\.\d){2}\n", out)
    assert re.search(r"\nqueries( +\d+){5}\n", out) and re.search(r"\nfirst( +[\d.-]+){5}\n", out)
    places = range(1, min(10, found["documents"]) + 1)
    chance = sum(1 / math.log2(1 + place) for place in places) / found["documents"]
    assert found["chance"] == pytest.approx(chance)
    row = found["runs"][0]
    assert set(row["search"]) == set(evaluation.READINGS)
    assert row["search"]["whole"]["32"] == row["search"]["windows"]["32"]
    for scores in row["search"]["bm25"].values():
        assert scores["ndcg@10"]["low"] <= scores["ndcg@10"]["value"] <= scores["ndcg@10"]["high"]
    assert is_png(library / "retrieval-4" / "eval.png")
    out, _ = command(library, "sample.py", "retrieval-4", "--prompt", "talon", "--data", "library")
    assert len(out.splitlines()) == 10 and re.match(r"-?\d\.\d{3}  \d+\.py:\d+  ", out)
    scores = [float(line.split()[0]) for line in out.splitlines()]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]


@pytest.mark.slow
def test_from_masked_tokens_to_search_in_processes_of_their_own(repo, tmp_path):
    """The four commands of README, on files of one's own, in the folders that they name."""
    folder = tmp_path / "clone"
    shutil.copytree(repo, folder)
    write_package(folder)
    few = *ENCODER_FLAGS, "--max_iters", 2, "--no-evaluate"
    out, _ = process(folder, "train.py", "--data", "mlm", *few)
    assert "writing to out/bert_cable-mlm-nano" in out
    process(folder, "train.py", "--data", "retrieval", "--init_from", "out/bert_cable-mlm-nano",
            *few, "--query_size", 16)
    out, _ = process(folder, "eval.py", "out/bert_cable-retrieval-nano", "--queries", 3,
                     "--lengths", 32, 64)
    assert "whole, recall@10" in out and is_png(folder / "out/bert_cable-retrieval-nano/eval.png")
    out, _ = process(folder, "sample.py", "out/bert_cable-retrieval-nano", "--data", "library",
                     "--prompt", "talon")
    assert len(out.splitlines()) == 10


def test_pairs_of_the_paper(tmp_path, monkeypatch):
    """MS MARCO's triples to train on, MLDR's long documents to test: small files in their form."""
    passages = [f"Passage {n} says a thing." for n in range(2100)]
    triples = [dict(query=f"what says {n % 1020}?", positive=passages[n], negative=passages[n + 1])
               for n in range(1060)]
    long = [dict(docid=str(n), text=f"Long text {n}. " * 50) for n in range(12)]
    asked = [dict(query_id="1", query="which is long?", positive_passages=[long[3]],
                  negative_passages=[long[5]]) for _ in range(3)]
    for name, rows in dict(corpus=long, test=asked).items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)

    def load_dataset(repository, config, split, data_files=None):
        assert split == "train"
        if data_files is None:
            assert (repository, config) == (data.retrieval.MSMARCO, "triplet-hard")
            return triples
        folder, _, name = data_files.rpartition("/")
        assert (repository, folder) == ("json", data.retrieval.MLDR)
        with gzip.open(tmp_path / name, "rt") as f:
            return [json.loads(line) for line in f]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(data.text, "PREPARED", tmp_path)
    task = data.retrieval.Task(corpus="msmarco", tokenizer="bytes", block_size=32)
    # 1000 to 1019 and 1020 to 1059, of which all but the last 20 + 20 ask what is held out
    assert [len(task.pairs[f"{split}.at"]) for split in task.splits] == [20, 1000, 3]
    x, y = task.batch("train", 20, rng(0))
    assert (y[:, 1] == 0).all() and (y[:, 3] == 0).all() and (y[:, 2] != y[:, 0]).all()
    back = np.append([32] * 3, task.kept["vocabulary"].numpy())
    for row in x:
        query, document, negative = (bytes(back[part].tolist()).decode().strip()
                                     for part in np.split(row, (32, 64)))
        n = int(query[10:-1])
        assert 1000 <= n < 1020 and document == passages[n] and negative == passages[n + 1]
    documents, queries, of, at = task.collection("test", 10**6)
    assert len(documents) == 12 and of.tolist() == [3, 3, 3] and not at.any()
    task.begin(None)  # mines nothing: they are given
    assert "negatives" not in task.kept
