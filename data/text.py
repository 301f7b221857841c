"""
Text, from a known corpus or from your own file or folder, as one long stream of tokens per split.

    python data/text.py NAME [--tokenizer gpt2] [--max_tokens N]     prepare it now (train.py does so by itself)

    stdlib       the Python standard library's own source: on every machine already, 12 MB   (default)
    shakespeare  the complete plays in one file, 1.1 MB, downloaded
    wikitext103  WikiText-103 (raw), 540 MB, needs `pip install datasets`
    fineweb_edu  FineWeb-Edu's 10-billion-token sample, needs `pip install datasets`
    PATH         a file, or a folder whose files are the documents

Every document follows an end-of-text token. Train, val and test never share a document; only where there are fewer than
three, or holding some out leaves less than half of the text to train on, is it cut by position: 90 %, 5 %, 5 %.
Tokens lie in data/prepared/<corpus>-<tokenizer>/{train,val,test}.bin as uint16, meta.json beside them.
"""
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PREPARED = Path(__file__).resolve().parent / "prepared"
CORPORA = ("stdlib", "shakespeare", "wikitext103", "fineweb_edu")
SPLITS = ("train", "val", "test")
HELD_OUT = 0.05  # share of the text in val, and again in test
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
               "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")


@dataclass
class Task:
    data: str = "stdlib"      # stdlib shakespeare wikitext103 fineweb_edu, your own file or folder, or a synthetic task
    block_size: int = 256
    tokenizer: str = "bytes"  # bytes (257 tokens, no download) or gpt2 (50257)
    max_tokens: int = 0       # prepare only this many tokens of the corpus; 0 is all

    splits = SPLITS
    # the paper's sizes (CABLE, section 4.2; d = 64) train on 2^19 tokens a step; nano is for two CPU cores
    defaults = {
        "nano": dict(n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=16, max_iters=750,
                     learning_rate=4e-3, min_lr=4e-4, warmup_iters=50, eval_interval=250, eval_iters=20),
        **{size: dict(n_layer=L, n_head=H, n_embd=E, block_size=1024, batch_size=B, tokenizer="gpt2",
                      gradient_accumulation_steps=512 // B, max_iters=19073, learning_rate=6e-4, min_lr=6e-5,
                      warmup_iters=750, eval_interval=250, eval_iters=50)
           for size, L, H, E, B in (("tiny", 6, 8, 512, 64), ("small", 12, 12, 768, 32), ("medium", 24, 16, 1024, 16))},
    }

    def __post_init__(self):
        self.encoding = get_encoding(self.tokenizer)
        self.vocab_size = 50304 if self.tokenizer == "gpt2" else 257  # gpt2's 50257, padded for the GPU
        self.folder, self.meta = prepare(self.data, self.tokenizer, self.max_tokens)
        for s, need in zip(SPLITS, (self.block_size + 1, self.block_size + 1, 2)):
            if self.meta["tokens"][s] < need:
                raise ValueError(f"{self.data} is too short: its {s} split has {self.meta['tokens'][s]} tokens and needs {need}; "
                                 "give more text or a smaller --block_size")
        self.streams = {s: np.memmap(self.folder / f"{s}.bin", dtype=np.uint16, mode="r") for s in SPLITS}

    def tokens(self, split):
        return self.streams[split]

    def batch(self, split, batch_size, rng):
        """Random windows of a split -> x, y (batch_size, block_size) int64, y the next tokens."""
        stream, T = self.streams[split], self.block_size
        starts = rng.integers(0, len(stream) - T, size=batch_size)
        windows = np.stack([stream[s:s + T + 1] for s in starts]).astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


# -----------------------------------------------------------------------------
# tokens

def get_encoding(name):
    """A tiktoken Encoding: `bytes` is built here from 256 one-byte ranks, `gpt2` is downloaded once by tiktoken."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    if name != "gpt2":
        raise ValueError(f"unknown tokenizer {name!r}: choose bytes or gpt2")
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as e:  # requests' errors are OSErrors
        raise ValueError(f"could not download the gpt2 tokenizer ({type(e).__name__}); "
                         "go online once, or use --tokenizer bytes, which needs no download") from e


def encode(encoding, documents):
    """[bytes] -> [uint16 array], each document after its end-of-text token. Raises ValueError if gpt2 meets non-UTF-8."""
    if encoding.name == "bytes":  # a byte's token is its value: nothing to look up
        ids = [np.frombuffer(d, dtype=np.uint8) for d in documents]
    else:
        try:
            ids = encoding.encode_ordinary_batch([d.decode("utf-8") for d in documents], num_threads=os.cpu_count())
        except UnicodeDecodeError as e:
            raise ValueError("the text is not UTF-8, which the gpt2 tokenizer needs; "
                             "convert it (iconv -t UTF-8), or use --tokenizer bytes") from e
    return [np.concatenate(([encoding.eot_token], x)).astype(np.uint16) for x in ids]


def prepare(data, tokenizer, max_tokens=0):
    """Tokenize a corpus once -> (folder, meta). Raises ValueError, in one line, for what a user can mend."""
    if max_tokens < 0:
        raise ValueError("--max_tokens must be 0 (all) or more")
    name, documents, source = open_corpus(data)
    folder = PREPARED / "-".join(filter(None, (name, tokenizer, max_tokens and f"{max_tokens}")))
    meta = read_meta(folder)
    if meta.get("source") == source:
        return folder, meta
    encoding = get_encoding(tokenizer)
    print(f"preparing {data} with the {tokenizer} tokenizer in {folder}", file=sys.stderr)
    # write beside the final place and rename, so that a killed run leaves nothing half done. A stream (fineweb_edu)
    # is hours long: it keeps one working folder and goes on where it was
    stream = hasattr(documents, "state_dict")
    work = folder.with_name(folder.name + (".partial" if stream else f".partial{os.getpid()}"))
    try:
        counts = write(documents, encoding, work, max_tokens, stream)
        digest = hashlib.sha256()
        for s in SPLITS:
            with open(work / f"{s}.bin", "rb") as f:
                while chunk := f.read(1 << 24):
                    digest.update(chunk)
        meta = dict(corpus=data if data in CORPORA else Path(data).name, tokenizer=tokenizer, vocab_size=encoding.n_vocab,
                    tokens=counts, source=source, sha256=digest.hexdigest())
        (work / "meta.json").write_text(json.dumps(meta, indent=1))
        if read_meta(folder).get("source") != source:  # else another process was faster, with the same tokens
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(work, folder)
    except OSError as e:
        raise ValueError(f"could not prepare {data}: {e}") from e
    finally:
        if not stream:
            shutil.rmtree(work, ignore_errors=True)
    return folder, meta


def read_meta(folder):
    path = folder / "meta.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(documents, encoding, work, max_tokens, stream):
    """Append every document's tokens to its split's file, max_tokens in all. Returns the tokens written per split."""
    work.mkdir(parents=True, exist_ok=True)
    progress, counts, cut = work / "progress.json", dict.fromkeys(SPLITS, 0), []
    share = dict(train=1 - 2 * HELD_OUT, val=HELD_OUT, test=HELD_OUT)
    quota = {s: round(max_tokens * share[s]) if max_tokens else 1 << 62 for s in SPLITS}
    if stream and fcntl:  # two processes would mix their tokens
        lock = open(work / "lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ValueError(f"another process is preparing this corpus in {work}; wait for it") from e
    if stream and progress.exists():
        state = json.loads(progress.read_text())
        counts = state["counts"]
        documents.load_state_dict(state["stream"])
        print(f"going on after {sum(counts.values()):,} tokens", file=sys.stderr)
    files = {}
    for s in SPLITS:
        (work / f"{s}.bin").touch()
        files[s] = open(work / f"{s}.bin", "r+b")
        files[s].truncate(2 * counts[s])
        files[s].seek(0, os.SEEK_END)
    shown = saved = time.time()
    iterator = iter(documents)
    while group := list(itertools.islice(iterator, 256)):
        for (split, _), ids in zip(group, encode(encoding, [text for split, text in group])):
            if split is None:
                cut.append(ids)
            else:
                ids = ids[:quota[split] - counts[split]]
                files[split].write(ids.tobytes())
                counts[split] += len(ids)
        total = sum(counts.values()) + sum(map(len, cut))
        if time.time() - shown > 2:
            shown = time.time()
            print(f"  {total:,} tokens", file=sys.stderr)
        if stream and time.time() - saved > 30:
            saved = time.time()
            for f in files.values():
                f.flush()
            tmp = progress.with_suffix(".tmp")
            tmp.write_text(json.dumps(dict(counts=counts, stream=documents.state_dict())))
            os.replace(tmp, progress)
        if all(counts[s] >= quota[s] for s in (SPLITS[:1] if stream else SPLITS)):
            break
    if cut:  # not split by document: by position
        ids = np.concatenate(cut)[:max_tokens or None]
        a, b = int(len(ids) * (1 - 2 * HELD_OUT)), int(len(ids) * (1 - HELD_OUT))
        for s, part in zip(SPLITS, (ids[:a], ids[a:b], ids[b:])):
            files[s].write(part.tobytes())
            counts[s] += len(part)
    for f in files.values():
        f.close()
    for leftover in (progress, work / "lock"):
        leftover.unlink(missing_ok=True)
    return counts


# -----------------------------------------------------------------------------
# documents: (split or None, bytes) one after the other

def open_corpus(data):
    """-> a name for the folder, an iterable of (split or None, bytes), and what identifies this version of the source."""
    if data == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        files = [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)
                 and not p.name.startswith("_sysconfigdata")]  # that one differs from machine to machine
        if sum(p.stat().st_size for p in files) < 1_000_000:
            raise ValueError(f"this Python has no standard library sources in {root}; give your own text: --data PATH")
        return f"stdlib-{platform.python_version()}", local(files, root), f"Python {platform.python_version()} standard library"
    if data == "shakespeare":
        url, sha256 = SHAKESPEARE
        path = PREPARED / "shakespeare.txt"
        return data, map(lambda p: (None, download(url, p, sha256).read_bytes()), [path]), url
    if data == "wikitext103":
        return data, wikitext(), "Salesforce/wikitext wikitext-103-raw-v1"
    if data == "fineweb_edu":
        return data, HubStream("HuggingFaceFW/fineweb-edu", "sample-10BT"), "HuggingFaceFW/fineweb-edu sample-10BT"
    path = Path(data).expanduser().resolve()
    if not path.exists():
        raise ValueError(f"no such corpus, file or folder: {data}")
    files = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()
                                           and not any(part.startswith(".") for part in p.relative_to(path).parts)]
    files = [p for p in files if path.is_file() or b"\0" not in p.open("rb").read(4096)]  # a folder's binaries are no text
    if not any(p.stat().st_size for p in files):
        raise ValueError(f"{data} has no text in it")
    root = path.parent if path.is_file() else path
    stat = repr([(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in files])
    where = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    return f"{path.name}-{where}", local(files, root), f"{path.name} {hashlib.sha256(stat.encode()).hexdigest()[:16]}"


def local(files, root):
    """Files as documents. A document's split follows from a hash of its name: no order of the folder leaks in."""
    size = {p: p.stat().st_size for p in files}
    share, split = HELD_OUT * sum(size.values()), dict.fromkeys(files, "train")
    by_hash = sorted(files, key=lambda p: hashlib.sha256(os.fsencode(p.relative_to(root).as_posix())).digest())
    for s in ("test", "val"):
        held = 0
        for p in by_hash:
            if split[p] == "train" and held < share and 0 < size[p] <= 3 * share - held:
                split[p], held = s, held + size[p]
        rest = [p for p in by_hash if split[p] == "train" and size[p]]
        if not held and rest:  # all are long: the shortest
            split[min(rest, key=size.get)] = s
    by_document = sum(size[p] for p in files if split[p] == "train") >= 0.5 * sum(size.values()) and set(split.values()) == set(SPLITS)
    for p in by_hash:  # in this order, so that any first part of a split is a fair sample of it
        yield split[p] if by_document else None, p.read_bytes()


def hub(repository, config, **kwargs):
    try:
        from datasets import load_dataset
    except ImportError as e:
        raise ValueError(f"{repository} comes as parquet files: pip install datasets") from e
    try:
        return load_dataset(repository, config, **kwargs)
    except Exception as e:  # the library's own errors for "offline" are many
        raise ValueError(f"could not download {repository} ({type(e).__name__}); it goes on where it was when you are "
                         "online again. Offline: --data stdlib, or your own file or folder") from e


def wikitext():
    """WikiText-103's own splits, lines joined into articles; an article begins with ' = Title = '."""
    for split, theirs in zip(SPLITS, ("train", "validation", "test")):
        article = []
        for row in hub("Salesforce/wikitext", "wikitext-103-raw-v1", split=theirs):
            if re.match(r" = [^=].*[^=] = \n", row["text"]) and article:
                yield split, "".join(article).encode()
                article = []
            article.append(row["text"])
        yield split, "".join(article).encode()


class HubStream:
    """A hub corpus read as it downloads, and resumable. 1 % of the documents (by a hash of their id) is held out."""
    def __init__(self, repository, config):
        self.repository, self.config, self.rows, self.state = repository, config, None, None

    def load_state_dict(self, state):
        self.state = state

    def state_dict(self):
        return self.rows.state_dict()

    def __iter__(self):
        self.rows = hub(self.repository, self.config, split="train", streaming=True)
        if self.state:
            self.rows.load_state_dict(self.state)
        try:
            for row in self.rows:
                u = int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:2], "big") / 65536
                yield "test" if u < 0.005 else "val" if u < 0.01 else "train", row["text"].encode()
        except Exception as e:  # the network went away: the library's errors are many
            raise ValueError(f"{self.repository} broke off ({type(e).__name__}); run it again to go on") from e


def download(url, path, sha256=None):
    """Fetch url to path, going on with a partial download if the server can. Raises ValueError offline or on a wrong checksum."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=30) as r, open(part, "ab" if r.status == 206 else "wb") as f:
            have, shown = f.tell(), time.time()
            total = have + int(r.headers.get("Content-Length") or 0)
            while chunk := r.read(1 << 16):
                f.write(chunk)
                if time.time() - shown > 2:
                    shown = time.time()
                    print(f"  {f.tell():,} of {total:,} bytes", file=sys.stderr)
            complete = f.tell() >= total
    except (OSError, urllib.error.URLError) as e:
        if getattr(e, "code", None) == 416:  # the partial file is not a beginning of this one
            part.unlink()
            return download(url, path, sha256)
        raise ValueError(f"could not download {url} ({e}); run it again to go on. Offline: --data stdlib, or your own file") from e
    if not complete:
        raise ValueError(f"the download of {url} stopped half-way; run it again to go on")
    if sha256 and hashlib.sha256(part.read_bytes()).hexdigest() != sha256:
        part.unlink()
        raise ValueError(f"{url} does not have the expected checksum; the download was thrown away, run it again")
    os.replace(part, path)
    return path


if __name__ == "__main__":
    import argparse
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--tokenizer", default="bytes", choices=["bytes", "gpt2"])
    parser.add_argument("--max_tokens", type=int, default=0)
    parser.error = lambda message: sys.exit(f"error: {message}")
    a = parser.parse_args()
    try:
        print(json.dumps(prepare(a.data, a.tokenizer, a.max_tokens)[1], indent=1))
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; nothing half done is left behind")
