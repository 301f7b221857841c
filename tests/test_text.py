"""data/text.py: splits, windows, tokenizers, downloads, prepared files."""
import contextlib
import hashlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import data
import data.text
from tests.helpers import ROOT, documents, rng


def test_tokenizer_round_trip_on_arbitrary_bytes():
    encoding = data.text.get_encoding("bytes")
    noise = rng().integers(0, 256, 5000).astype(np.uint8).tobytes()
    for text in (bytes(range(256)), noise, b"", "δέλτα <|endoftext|>".encode()):
        ids = data.text.encode(encoding, [text])[0]
        assert ids[0] == encoding.eot_token == 256
        assert encoding.decode_bytes(ids[1:].tolist()) == text
    ours = data.text.encode(encoding, ["δέλτα".encode()])[0]
    assert encoding.encode("δέλτα") == ours[1:].tolist()


def test_other_tokenizers_need_utf8_and_round_trip():
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    encoding = tiktoken.Encoding("merges", pat_str=r"\w+|\W", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 258})
    ids = data.text.encode(encoding, [b"the theme", "δ".encode()])
    assert ids[0].tolist()[:3] == [258, 257, 32]
    assert encoding.decode_bytes(ids[0][1:].tolist()) == b"the theme"
    with pytest.raises(ValueError, match="not UTF-8.*--tokenizer bytes"):
        data.text.encode(encoding, [b"\xff\xfe"])


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    return tmp_path


def test_text_is_split_by_document(prepared):
    docs = documents(prepared / "docs", [f"<{i:02}>" * 50 for i in range(40)])
    (prepared / "docs" / ".hidden").write_text("no")
    (prepared / "docs" / "picture.png").write_bytes(b"\x89PNG\0\0")
    task = data.text.Task(data=docs, block_size=8)
    found = {}
    for s in task.splits:
        ids = task.tokens(s).tolist()
        assert ids[0] == 256 and len(ids) == 201 * ids.count(256)  # whole documents
        found[s] = {bytes(ids[a + 1:a + 5]) for a, t in enumerate(ids) if t == 256}
    assert sum(map(len, found.values())) == 40 and len(set.union(*found.values())) == 40
    assert len(found["test"]) == len(found["val"]) == 2
    assert task.meta["tokens"] == {s: len(task.tokens(s)) for s in task.splits}
    assert task.source == task.meta["sha256"]
    (prepared / "docs" / "00.txt").write_text("<new>" * 50)  # a changed document is seen
    assert data.text.Task(data=docs, block_size=8).source != task.source


def test_a_few_long_documents_are_still_whole_and_max_tokens_is_a_limit(prepared):
    docs = documents(prepared / "six", [f"<{i}>" * 200 for i in range(6)])
    task = data.text.Task(data=docs, block_size=8)
    assert task.meta["tokens"] == dict(train=2404, val=601, test=601)
    some = data.text.Task(data=docs, block_size=8, max_tokens=1000)
    assert some.meta["tokens"] == dict(train=900, val=50, test=50)
    assert (some.tokens("val") == task.tokens("val")[:50]).all()
    with pytest.raises(ValueError, match="--max_tokens must be 0"):
        data.text.prepare(docs, "bytes", -5)


def test_a_folder_that_holds_our_own_files_and_a_name_that_is_empty(prepared, monkeypatch):
    home = Path(documents(prepared / "home", ["one", "two", "three"]))
    monkeypatch.setattr(data.text, "PREPARED", home / "data" / "prepared")
    for path in ("data/prepared/x/meta.json", "out/run/log.jsonl", ".git/config", "sub/four.txt"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text("text")
    assert list(data.text.own_files(home)) == ["00.txt", "01.txt", "02.txt", "sub/four.txt"]
    assert list(data.text.own_files(home / "out" / "run")) == ["log.jsonl"]  # where it is named
    monkeypatch.chdir(home)
    assert data.text.prepare(".", "bytes")[1]["corpus"] == "home"
    for path in ("", "gone"):
        with pytest.raises(ValueError, match="no text is named|no such corpus"):
            data.text.prepare(path, "bytes")
    with pytest.raises(ValueError, match="no text is named"):
        data.text.absolute("")


def test_one_file_is_cut_by_position(prepared):
    (prepared / "one.txt").write_bytes(bytes(range(200)) * 10)
    task = data.text.Task(data=str(prepared / "one.txt"), block_size=8)
    whole = np.concatenate([task.tokens(s) for s in task.splits])
    assert whole.tolist() == [256, *list(range(200)) * 10]
    assert [len(task.tokens(s)) for s in task.splits] == [1800, 100, 101]


def test_batches_are_windows_and_their_successors(prepared):
    (prepared / "one.txt").write_bytes(bytes(range(250)) * 20)
    task = data.text.Task(data=str(prepared / "one.txt"), block_size=8)
    x, y = task.batch("train", 5, rng(3))
    assert x.shape == y.shape == (5, 8) and x.dtype == y.dtype == np.int64
    assert (x[:, 1:] == y[:, :-1]).all()
    again, _ = task.batch("train", 5, rng(3))
    assert (x == again).all()


def test_batches_are_of_their_split_and_from_all_over_it(prepared):
    text = b"".join(b"%06d" % n for n in range(3000))
    (prepared / "one.txt").write_bytes(text)
    task = data.text.Task(data=str(prepared / "one.txt"), block_size=12)
    for split in task.splits:
        stream = task.tokens(split).tolist()
        x, _ = task.batch(split, 200, rng(3))
        starts = [next(n for n in range(len(stream)) if stream[n:n + 12] == row)
                  for row in x.tolist()]
        assert min(starts) < 0.1 * len(stream) and max(starts) > 0.9 * len(stream)


def test_the_standard_library_is_without_its_tests(prepared, monkeypatch):
    library = prepared / "library"
    for name in ("a.py", "b/c.py", "test/no.py", "b/tests/no.py", "site-packages/no.py",
                 "_sysconfigdata_x.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("# code\n" * 100_000)
    (library / "no.txt").write_text("no code")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict(stdlib=str(library)))
    _, meta = data.text.prepare("stdlib", "bytes")
    assert sum(meta["tokens"].values()) == 1 + 2 * 700_000 + 1
    shutil.rmtree(library / "b")
    with pytest.raises(ValueError, match="no standard library sources in .*--data PATH"):
        data.text.open_corpus("stdlib")


def test_a_preparation_that_breaks_leaves_nothing(prepared, monkeypatch):
    (prepared / "one.txt").write_bytes(b"some text " * 100)
    write = data.text.write

    def full(*args):
        write(*args)
        assert list((prepared / "prepared").glob("*"))
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(data.text, "write", full)
    with pytest.raises(ValueError, match="could not prepare.*No space left"):
        data.text.prepare(str(prepared / "one.txt"), "bytes")
    assert {path.suffix for path in (prepared / "prepared").glob("*")} == {".lock"}


class Server(http.server.BaseHTTPRequestHandler):
    body, breaks = b"some text " * 500, False

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body[:1000] if self.breaks else self.body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Server, "breaks", False)
    running = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def test_a_download_is_whole_and_the_right_one(tmp_path, server):
    url, path = f"http://127.0.0.1:{server.server_port}/x", tmp_path / "new" / "x"
    sha = hashlib.sha256(Server.body).hexdigest()
    with pytest.raises(ValueError, match="checksum: it is not the file it was"):
        data.text.download(url, path, "0" * 64)
    Server.breaks = True  # the line breaks after 1,000 bytes
    with pytest.raises(ValueError, match="could not download.*Offline: --data stdlib"):
        data.text.download(url, path, sha)
    assert not path.exists()
    Server.breaks = False
    assert data.text.download(url, path, sha).read_bytes() == Server.body
    server.shutdown()
    server.server_close()
    assert data.text.download(url, path, sha) == path  # it is there already
    assert [file.name for file in path.parent.iterdir()] == ["x"]
    path.unlink()
    with pytest.raises(ValueError, match="could not download.*Offline: --data stdlib"):
        data.text.download(url, path, sha)


def test_a_download_from_what_is_no_web_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def answer():
            with listening.accept()[0] as line:
                line.recv(4096)
                line.sendall(b"hello\n")
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ValueError, match="could not download.*Offline: --data stdlib"):
            data.text.download(f"http://127.0.0.1:{listening.getsockname()[1]}/x",
                               tmp_path / "x", "0" * 64)


def test_wikitext_lines_become_articles(monkeypatch):
    lines = ["", " = Valkyria = \n", "", " text one \n", " = = Plot = = \n", " more \n",
             " = Robert = \n", " text two \n"]
    monkeypatch.setattr(data.text, "hub", lambda *a, split: [{"text": line} for line in
                                                             [*lines, f" of {split} \n"]])
    got = list(data.text.wikitext())
    last = dict(train="train", val="validation", test="test")
    assert [s for s, _ in got[::3]] == list(last)
    assert all(t.endswith(f" of {last[s]} \n".encode()) for s, t in got[2::3])
    articles = [t.decode().replace(" of train \n", "") for s, t in got if s == "train"]
    titles = [a.strip().split(" \n")[0] for a in articles if a.strip()]
    assert titles == ["= Valkyria =", "= Robert ="]
    assert "= = Plot = =" in "".join(articles) and "".join(articles) == "".join(lines)


class Rows:
    """2,000 documents, and an error at these places."""
    def __init__(self, breaks):
        self.at, self.breaks = 0, breaks

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < 2000:
            if self.at in self.breaks:
                raise ConnectionError("gone")
            self.at += 1
            yield {"id": f"doc{self.at}", "text": f"text of document {self.at} "}


def test_a_hub_corpus_continues_where_it_stopped(prepared, monkeypatch, capsys):
    """A stream that breaks off twice, saved after every group, ends as one that never did."""
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(data.text.time, "time", lambda: next(clock))
    breaks = [700, 1500]
    monkeypatch.setattr(data.text, "hub", lambda *a, **k: Rows(breaks))
    for _ in (1, 2):
        with pytest.raises(ValueError, match="broke off"):
            data.text.prepare("fineweb_edu", "bytes")
        breaks.pop(0)
    folder, meta = data.text.prepare("fineweb_edu", "bytes")
    assert "continuing after" in capsys.readouterr().err
    shutil.copytree(folder, prepared / "broken")
    shutil.rmtree(folder)
    _, again = data.text.prepare("fineweb_edu", "bytes")
    assert again["sha256"] == meta["sha256"] and sum(meta["tokens"].values()) > 2000 * 18
    assert 0 < meta["tokens"]["test"] < 0.03 * meta["tokens"]["train"]
    _, some = data.text.prepare("fineweb_edu", "bytes", max_tokens=9000)
    assert some["tokens"]["train"] == 8100 and sum(some["tokens"].values()) <= 9000


def test_a_preparation_waits_for_the_one_before_it(prepared, capfd):
    """Six processes on a corpus that is new, and then on one that was touched: all succeed."""
    docs = Path(documents(prepared / "docs", [f"<{i:02}>" * 500 for i in range(40)]))
    code = f"""if True:
        import sys
        from pathlib import Path
        import data.text
        data.text.PREPARED = Path({str(prepared / "prepared")!r})
        print("ready", flush=True)
        sys.stdin.read(1)
        print(data.text.Task(data={str(docs)!r}, block_size=8).tokens("train").sum())"""
    for text in ("<new>", "<more>"):
        (docs / "00.txt").write_text(text * 500)
        found = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(6)]
        for p in found:
            assert p.stdout.readline() == "ready\n"
        for p in found:
            p.stdin.write("x")
            p.stdin.flush()
        sums = [p.communicate(timeout=60)[0] for p in found]
        assert len(set(sums)) == 1 and [p.returncode for p in found] == [0] * 6
        folder, = (prepared / "prepared").glob("docs-*-bytes")
        assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
    assert capfd.readouterr().err.count("preparing") == 2


def test_what_another_reads_is_not_removed_and_what_the_dead_left_is(prepared):
    docs = Path(documents(prepared / "docs", [f"<{i:02}>" * 50 for i in range(40)]))
    home = prepared / "prepared"
    first = data.text.Task(data=str(docs), block_size=8)
    folder, _, _ = data.text.look_up(str(docs), "bytes")
    (docs / "00.txt").touch()  # the same text again: the same streams
    assert data.text.Task(data=str(docs), block_size=8).source == first.source
    for stray in (f"{folder.name}.partial", "gone-bytes.partial", "older-bytes.partial",
                  "fineweb-bytes.partial"):
        (home / stray).mkdir()
    (home / "fineweb-bytes.partial" / "progress.json").write_text("{}")
    (home / "busy-bytes.partial").mkdir()
    (home / "a.partial-bytes").mkdir()  # a finished one: its text is called a.partial
    with data.text.locked(home / "busy-bytes"):
        (docs / "00.txt").write_text("<new>" * 50)
        second = data.text.Task(data=str(docs), block_size=8)
    left = {path.name for path in home.glob("*.partial*")}
    assert left == {"busy-bytes.partial", "fineweb-bytes.partial", "a.partial-bytes"}
    both = {first.source[:16], second.source[:16], "meta.json"}
    assert {path.name for path in folder.iterdir()} == both
    del first
    (docs / "01.txt").write_text("<new>" * 50)
    third = data.text.Task(data=str(docs), block_size=8)
    both = {second.source[:16], third.source[:16], "meta.json"}
    assert {path.name for path in folder.iterdir()} == both


def test_tokens_that_were_cut_short_are_made_anew(prepared, capsys):
    """A power cut may leave a file shorter, and meta.json with it."""
    docs = documents(prepared / "docs", [f"<{i:02}>" * 50 for i in range(40)])
    task = data.text.Task(data=docs, block_size=8)
    folder, _, _ = data.text.look_up(docs, "bytes")
    source, want = task.source, task.tokens("train").tolist()
    for left, meta_left in ((100, True), (0, True), (100, False)):
        del task  # nobody reads them
        os.truncate(folder / source[:16] / "train.bin", left)
        if not meta_left:
            (folder / "meta.json").write_text("")
        task = data.text.Task(data=docs, block_size=8)
        assert task.source == source and task.tokens("train").tolist() == want
    assert capsys.readouterr().err.count("preparing") == 4


def test_a_folder_that_grows_while_its_preparation_waits(prepared, monkeypatch):
    docs, locked = documents(prepared / "docs", ["<a>" * 50] * 40), data.text.locked

    @contextlib.contextmanager
    def grown(folder):
        (prepared / "docs" / "new.txt").write_text("<new>" * 1000)
        with locked(folder):
            yield
    monkeypatch.setattr(data.text, "locked", grown)
    _, meta = data.text.prepare(docs, "bytes")
    assert sum(meta["tokens"].values()) == 40 * 151 + 5001


def test_missing_datasets_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        next(iter(data.text.wikitext()))


def offline(*args, **kwargs):
    raise ConnectionError("no route to host\nmore words")


def test_what_cannot_be_downloaded_is_said_in_one_line(prepared, monkeypatch):
    """Tokenizer, data set and plays; where they are there, they are split."""
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match=r"gpt2 tokenizer \(ConnectionError\).*--tokenizer bytes"):
        data.text.get_encoding("gpt2")
    monkeypatch.setattr(tiktoken, "get_encoding", int)  # a ValueError, as of a damaged file
    with pytest.raises(ValueError, match=r"gpt2 tokenizer \(ValueError\).*--tokenizer bytes"):
        data.text.get_encoding("gpt2")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    for name in ("wikitext103", "fineweb_edu"):
        with pytest.raises(ValueError, match=r"\(ConnectionError: no.*Offline: --data stdlib") as e:
            data.text.prepare(name, "bytes")
        assert "\n" not in str(e.value) and not list((prepared / "prepared").glob("*/meta.json"))
    plays = prepared / "plays"
    plays.write_bytes(b"To be, or not to be. " * 100)
    monkeypatch.setattr(data.text, "download", lambda url, path, sha256: plays)
    _, meta = data.text.prepare("shakespeare", "bytes")
    assert meta["tokens"] == dict(train=1890, val=105, test=106)
    assert meta["corpus"] == "shakespeare" and meta["vocab_size"] == 257


def test_text_is_prepared_by_its_own_command(prepared, capsys):
    (prepared / "one.txt").write_text("a few words of text. " * 99)
    data.text.main([str(prepared / "one.txt"), "--max_tokens", "500"])
    out = capsys.readouterr().out
    assert json.loads(out)["tokens"] == dict(train=450, val=25, test=25)
    with pytest.raises(SystemExit):
        data.text.main(["--help"])
    assert "python data/text.py NAME" in capsys.readouterr().out
    for words, says in ((["nowhere"], "no such corpus, file or folder: nowhere"),
                        (["stdlib", "--tokenizer", "words"], "invalid choice: 'words'"),
                        (["stdlib", "--max_tokens", "-1"], "--max_tokens must be 0")):
        with pytest.raises(SystemExit) as e:
            data.text.main(words)
        assert e.value.code.startswith("error: ") and says in e.value.code
