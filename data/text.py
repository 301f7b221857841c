"""
Text, from a known corpus or from your own file or folder, as one long stream of tokens per split.

    python data/text.py NAME [--tokenizer gpt2] [--max_tokens N]     prepare it (train.py does, too)

    stdlib       the Python standard library's own source: on every machine, 12 MB   (default)
    packages     the same, and the packages that requirements.txt brings (PACKAGES): 89 MB
    shakespeare  part of the plays (nanoGPT's tiny shakespeare), 1.1 MB, downloaded
    wikitext103  WikiText-103 (raw), 540 MB, needs `pip install datasets`
    fineweb_edu  FineWeb-Edu's 10-billion-token sample, needs `pip install datasets`
    PATH         a file, or a folder whose files are the documents

Every document follows an end-of-text token, and is in one split only, train, val or test; in
`packages` that holds for a whole package (`collections`, `torch`, ...). With fewer than three
documents, or where holding some out leaves less than half of the text to train on, the text is cut
by position instead: 90 %, 5 %, 5 %. Tokens lie in data/prepared/<corpus>-<tokenizer>/ as uint16:
meta.json says what they are, and a folder beside it, named by the beginning of their sha256, has a
file per split. After an edit of this file delete data/prepared/: what is there is not made anew.
"""
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import signal
import sys
import sysconfig
import time
import urllib.request
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
import tiktoken
import torch

if not __package__:  # python data/text.py looks for modules in data/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
import data as tasks

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PREPARED = Path(__file__).resolve().parent / "prepared"
SPLITS = ("train", "val", "test")
HELD_OUT = 0.05  # share of the text in val, and again in test

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SOURCES = dict(  # what identifies the version of a corpus that is downloaded
    shakespeare=SHAKESPEARE_URL,
    wikitext103="Salesforce/wikitext wikitext-103-raw-v1",
    fineweb_edu="HuggingFaceFW/fineweb-edu sample-10BT",
)
CORPORA = ("stdlib", "packages", *SOURCES)
# what requirements.txt brings to every machine
PACKAGES = ("torch", "numpy", "matplotlib", "sympy", "networkx", "fontTools", "mpmath")

# sizes and training of the paper (CABLE, section 4.2), 2^19 tokens a step; small has GPT-2's 12
# heads, as the paper's 10 do not divide 768; medium has 354M parameters, the paper's text 334M
LARGE = dict(
    block_size=1024, tokenizer="gpt2", max_iters=19073, learning_rate=6e-4, min_lr=6e-5,
    warmup_iters=750, eval_interval=250, eval_iters=50)


@dataclass
class Task(tasks.Task):
    data: str = "stdlib"      # a corpus (see data/text.py), your own file or folder, or a task
    block_size: int = 256     # tokens in a window
    tokenizer: str = "bytes"  # bytes (257 tokens, no download) or gpt2 (50257)
    max_tokens: int = 0       # prepare only this many tokens of the corpus; 0 is all

    kind = "text"
    splits = SPLITS
    defaults = {
        "nano": dict(  # for two CPU cores
            n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=16, max_iters=750,
            learning_rate=4e-3, min_lr=4e-4, warmup_iters=50, eval_interval=250, eval_iters=20),
        "tiny": LARGE | dict(
            n_layer=6, n_head=8, n_embd=512, batch_size=64, gradient_accumulation_steps=8),
        "small": LARGE | dict(
            n_layer=12, n_head=12, n_embd=768, batch_size=32, gradient_accumulation_steps=16),
        "medium": LARGE | dict(
            n_layer=24, n_head=16, n_embd=1024, batch_size=16, gradient_accumulation_steps=32),
    }

    def __post_init__(self):
        if self.data not in CORPORA:  # a run can be resumed and evaluated from any folder
            self.data = str(absolute(self.data))
        folder, _, self.meta = look_up(self.data, self.tokenizer, self.max_tokens)
        if not self.meta:
            folder, self.meta = prepare(self.data, self.tokenizer, self.max_tokens)
        self.vocab_size = VOCABULARY[self.tokenizer]
        self.source = self.meta["sha256"]
        self.streams = {}
        for split in SPLITS:
            have = self.meta["tokens"][split]
            need = 2 if split == "test" else self.block_size + 1
            if have < need:
                raise ValueError(f"{self.data} is too short: its {split} split has {have} tokens "
                                 f"and needs {need}; give more text"
                                 + (" or a smaller --block_size" if self.block_size > 1 else ""))
            with open(folder / self.source[:16] / f"{split}.bin", "rb") as f:
                if fcntl:  # as long as the stream is there, nobody removes its file
                    fcntl.flock(f, fcntl.LOCK_SH)
                self.streams[split] = np.memmap(f, dtype=np.uint16, mode="r")

    @staticmethod
    def was_prepared(config, source):
        return was_prepared(config["data"], config["tokenizer"], config["max_tokens"], source)

    def tokens(self, split):
        """The stream of a split, (N,) uint16."""
        return self.streams[split]

    def show(self, x):
        return labels_of(get_encoding(self.tokenizer), x)

    def batch(self, split, batch_size, rng):
        """Random windows of a split -> x, y (batch_size, block_size) int64, y the next tokens."""
        stream = self.streams[split]
        starts = rng.integers(0, len(stream) - self.block_size, size=batch_size)
        windows = stream[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


# -----------------------------------------------------------------------------
# tokens

# how many tokens a model has; gpt2's are 50257, padded for the GPU
VOCABULARY = dict(bytes=257, gpt2=50304)


def get_encoding(name):
    """
    A tiktoken Encoding: `bytes` is built here from 256 ranks, tiktoken downloads `gpt2` once.
    Raises ValueError.
    """
    if name not in VOCABULARY:
        raise ValueError(f"unknown tokenizer {name!r}: choose bytes or gpt2")
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as e:  # requests' errors, or a download that was cut off
        raise ValueError(f"could not download the gpt2 tokenizer ({type(e).__name__}); go online "
                         "once, or use --tokenizer bytes, which needs no download") from e


def labels_of(encoding, ids):
    """Tokens as labels for figures: \\n is a line end, a dot the end of a text."""
    labels = []
    for token in ids:
        said = repr(encoding.decode([int(token)]))[1:-1]
        labels.append("·" if token == encoding.eot_token else said)
    return labels


def encode(encoding, documents):
    """
    [bytes] -> [uint16 array], each document after its end-of-text token. Raises ValueError if gpt2
    meets non-UTF-8.
    """
    if encoding.name == "bytes":  # a byte's token is its value: nothing to look up
        found = [np.frombuffer(d, dtype=np.uint8) for d in documents]
    else:
        try:
            texts = [d.decode("utf-8") for d in documents]
        except UnicodeDecodeError as e:
            raise ValueError("the text is not UTF-8, which the gpt2 tokenizer needs; "
                             "convert it (iconv -t UTF-8), or use --tokenizer bytes") from e
        found = encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count())
    return [np.concatenate(([encoding.eot_token], ids), dtype=np.uint16, casting="unsafe")
            for ids in found]


# what encoders read: the commonest tokens of a tokenizer, after three of their own
PAD, MASK, UNK = range(3)


def cut_to(vocabulary):
    """vocabulary (n,), tokens of a tokenizer -> (65536,) int64: what each is among n + 3 tokens."""
    vocabulary = np.asarray(vocabulary)
    if vocabulary.ndim != 1 or not len(vocabulary) or vocabulary.dtype != np.int64:
        raise ValueError("the vocabulary is no list of tokens")
    if vocabulary.min() < 0 or vocabulary.max() >= 1 << 16:
        raise ValueError("the vocabulary has tokens that no tokenizer has")
    table = np.full(1 << 16, UNK)
    table[vocabulary] = UNK + 1 + np.arange(len(vocabulary))
    return table


def blocks(stream, size=1 << 24):
    """A stream of tokens that may be larger than memory -> where each block begins, and it."""
    for start in range(0, len(stream), size):
        yield start, stream[start:start + size]


class CutTask(tasks.Task):
    """
    A task of encoders, on the `max_vocab` commonest tokens of its stream(), or on the vocabulary
    that a checkpoint has kept: what was learned is of use only with the tokens it was learned on.
    """
    for_encoders = True

    def stream(self):
        """The tokens to count, (N,) uint16."""
        raise NotImplementedError

    def adopt(self, kept):
        self.kept = dict(kept)
        if "vocabulary" not in kept:
            counts = np.zeros(1 << 16, np.int64)
            for _, tokens in blocks(self.stream()):
                counts += np.bincount(tokens, minlength=1 << 16)
            order = np.argsort(-counts, kind="stable")
            commonest = order[:min(self.max_vocab, np.count_nonzero(counts))]
            self.kept["vocabulary"] = torch.from_numpy(commonest)
        self.table = cut_to(self.kept["vocabulary"])  # (65536,): which of ours a token is
        self.vocab_size = UNK + 1 + len(self.kept["vocabulary"])


# -----------------------------------------------------------------------------
# preparation: a corpus becomes a folder of three streams and meta.json

def look_up(data, tokenizer, max_tokens=0):
    """
    -> the folder of a corpus' tokens, what identifies the present version of the text, and meta,
    what was prepared: {} if nothing was, or from another version. Raises ValueError.
    """
    if max_tokens < 0:
        raise ValueError("--max_tokens must be 0 (all) or more")
    if data == "stdlib":
        version = platform.python_version()
        name, source = f"stdlib-{version}", f"Python {version} standard library"
    elif data == "packages":
        try:
            versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
        except importlib.metadata.PackageNotFoundError as e:
            raise ValueError(f"packages needs {e.name}: pip install -r requirements.txt") from e
        source = f"Python {platform.python_version()}, {', '.join(versions)}"
        name = f"packages-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    elif data in SOURCES:
        name, source = data, SOURCES[data]
    else:
        name, source = identify(data)
    limit = f"-{max_tokens}" if max_tokens else ""
    folder = PREPARED / f"{name}-{tokenizer}{limit}"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        ready = meta["source"] == source
        for split, n in meta["tokens"].items():  # a power cut may leave a file shorter
            ready &= (folder / meta["sha256"][:16] / f"{split}.bin").stat().st_size == 2 * n
    except (FileNotFoundError, ValueError, KeyError):  # not made yet, or a power cut emptied it
        ready = False
    return folder, source, meta if ready else {}


def was_prepared(data, tokenizer, max_tokens, sha256):
    """Whether a corpus is known by name, or its tokens lie here, with this sha256 of them."""
    if data in CORPORA:
        return True
    limit = f"-{max_tokens}" if max_tokens else ""
    path = PREPARED / f"{name_of(data)}-{tokenizer}{limit}" / "meta.json"
    try:
        return json.loads(path.read_text())["sha256"] == sha256
    except (FileNotFoundError, ValueError):
        return False


def prepare(data, tokenizer, max_tokens=0):
    """Tokenize a corpus once -> (folder, meta). Raises ValueError for what a user can fix."""
    folder, source, meta = look_up(data, tokenizer, max_tokens)
    if meta:
        return folder, meta
    encoding = get_encoding(tokenizer)
    try:
        with locked(folder):
            folder, source, meta = look_up(data, tokenizer, max_tokens)
            if meta:  # by the process that was waited for
                return folder, meta
            documents = open_corpus(data)
            print(f"preparing {data} with the {tokenizer} tokenizer in {folder}", file=sys.stderr)
            # a stream (fineweb_edu) takes hours: it keeps its working folder and continues there
            stream = isinstance(documents, HubStream)
            clean_up(folder.name)
            work = folder.with_name(f"{folder.name}.partial")
            try:
                counts = write(documents, encoding, work, max_tokens, stream)
                corpus = data if data in CORPORA else absolute(data).name
                meta = dict(corpus=corpus, tokenizer=tokenizer, vocab_size=encoding.n_vocab,
                            tokens=counts, source=source, sha256=checksum(work))
                switch(folder, work, meta)
            finally:
                if not stream:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise ValueError(f"could not prepare {data}: {e}") from e
    return folder, meta


@contextmanager
def locked(folder):
    """One process at a time prepares a folder; the lock ends with its process, however it ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process, which prepares {folder}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clean_up(mine):
    """
    Remove what dead processes left half done: working folders that nobody has locked, and `mine`,
    which this process has. A stream's are kept.
    """
    for work in PREPARED.glob("*.partial"):
        name = work.stem
        if (work / "progress.json").exists():
            continue
        with open(work.with_name(f"{name}.lock"), "a") as lock:
            try:
                if fcntl and name != mine:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(work, ignore_errors=True)
            except BlockingIOError:
                pass  # its process lives


def switch(folder, work, meta):
    """
    The streams become those of the folder, all at once: they get a folder of their own, named by
    their hash, and meta.json is replaced. Earlier streams go, except for those being read.
    """
    folder.mkdir(exist_ok=True)
    streams = folder / meta["sha256"][:16]
    if not being_read(streams):
        shutil.rmtree(streams, ignore_errors=True)  # the same, but it may have been cut short
        os.rename(work, streams)
    tmp = folder / "meta.json.tmp"
    tmp.write_text(json.dumps(meta, indent=1))
    os.replace(tmp, folder / "meta.json")
    for other in folder.iterdir():
        if other not in (streams, folder / "meta.json") and not being_read(other):
            if other.is_dir():
                shutil.rmtree(other, ignore_errors=True)
            else:
                other.unlink()


def being_read(streams):
    """Whether a process has these streams open: it holds a shared lock (see Task)."""
    try:
        with open(streams / "train.bin") as f:
            if fcntl:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # no streams at all
    return False


def checksum(work):
    """sha256 of the three streams, one after the other."""
    digest = hashlib.sha256()
    for split in SPLITS:
        with open(work / f"{split}.bin", "rb") as f:
            while chunk := f.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def write(documents, encoding, work, max_tokens, stream):
    """
    Append every document's tokens to its split's file, max_tokens in all -> {split: tokens
    written}. A stream's progress is saved every 30 s, so that it continues where it was.
    """
    work.mkdir(parents=True, exist_ok=True)
    progress = work / "progress.json"
    counts = dict.fromkeys(SPLITS, 0)
    quota = quotas(max_tokens)
    filled = SPLITS[:1] if stream else SPLITS  # when these are full, it is enough
    if stream and progress.exists():
        counts = restore(progress, documents)
    files = open_streams(work, counts)
    not_split = []  # the tokens of documents that are split by position
    shown = saved = time.time()
    iterator = iter(documents)
    while group := list(itertools.islice(iterator, 256)):
        splits, texts = zip(*group)
        for split, ids in zip(splits, encode(encoding, texts)):
            if split is None:
                not_split.append(ids)
                continue
            ids = ids[:quota[split] - counts[split]]
            files[split].write(ids.tobytes())
            counts[split] += len(ids)
        if time.time() - shown > 2:
            shown = time.time()
            total = sum(counts.values()) + sum(map(len, not_split))
            print(f"  {total:,} tokens", file=sys.stderr)
        if stream and time.time() - saved > 30:
            saved = time.time()
            save(progress, documents, counts, files)
        if all(counts[split] >= quota[split] for split in filled):
            break
    if not_split:
        cut(np.concatenate(not_split)[:max_tokens or None], files, counts)
    for f in files.values():
        f.close()
    progress.unlink(missing_ok=True)
    return counts


def quotas(max_tokens):
    """{split: how many tokens it takes at most}."""
    if not max_tokens:
        return dict.fromkeys(SPLITS, sys.maxsize)
    held_out = round(max_tokens * HELD_OUT)
    return dict(train=round(max_tokens * (1 - 2 * HELD_OUT)), val=held_out, test=held_out)


def open_streams(work, counts):
    """{split: its file}, open for more tokens after the first counts[split]."""
    files = {split: open(work / f"{split}.bin", "ab") for split in SPLITS}
    for split, f in files.items():
        f.truncate(2 * counts[split])
    return files


def save(progress, documents, counts, files):
    """Remember how far a stream has come."""
    for f in files.values():
        f.flush()
    tmp = progress.with_suffix(".tmp")
    tmp.write_text(json.dumps(dict(counts=counts, stream=documents.state_dict())))
    os.replace(tmp, progress)


def restore(progress, documents):
    """Put a stream where it was -> the tokens written by then."""
    state = json.loads(progress.read_text())
    documents.load_state_dict(state["stream"])
    print(f"continuing after {sum(state['counts'].values()):,} tokens", file=sys.stderr)
    return state["counts"]


def cut(ids, files, counts):
    """Split one stream of tokens by position."""
    ends = [int(len(ids) * (1 - 2 * HELD_OUT)), int(len(ids) * (1 - HELD_OUT))]
    for split, part in zip(SPLITS, np.split(ids, ends)):
        files[split].write(part.tobytes())
        counts[split] += len(part)


# -----------------------------------------------------------------------------
# documents: (split or None, bytes) one after the other

def open_corpus(data):
    """A corpus' documents, none of them read yet."""
    if data == "stdlib":
        return local(library_files(Path(sysconfig.get_paths()["stdlib"])))
    if data == "packages":
        return packages()
    if data == "shakespeare":
        return shakespeare()
    if data == "wikitext103":
        return wikitext()
    if data == "fineweb_edu":
        return HubStream("HuggingFaceFW/fineweb-edu", "sample-10BT")
    return local(own_files(absolute(data)))


def absolute(path):
    """A user's path; ~nobody stays as it is where there is no such user."""
    if not path:
        raise ValueError("no text is named")
    return Path(os.path.expanduser(path)).resolve()


def library_files(root):
    """{name: path} of a library's modules, without tests and what differs between machines."""
    left_out = {"test", "tests", "idle_test", "testing", "site-packages", "dist-packages",
                "__pycache__"}
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not left_out & set(name.parts) and not path.name.startswith("_sysconfigdata"):
            files[name.as_posix()] = path
    if sum(path.stat().st_size for path in files.values()) < 1_000_000:
        raise ValueError(f"this Python has no standard library sources in {root}; "
                         "give your own text: --data PATH")
    return files


def own_files(path):
    """
    {name: path} of a user's file, or of the text files of a folder, without hidden ones and without
    what the scripts here write.
    """
    if path.is_file():
        return {path.name: path}
    files, ours = {}, {PREPARED, PREPARED.parents[1] / "out"} - {path, *path.parents}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        hidden = any(part.startswith(".") for part in name.parts)
        if not file.is_file() or hidden or ours & set(file.parents):
            continue
        with file.open("rb") as f:
            if b"\0" not in f.read(4096):  # else no text
                files[name.as_posix()] = file
    return files


def identify(data):
    """A name for the tokens of a user's file or folder, and what identifies its present version."""
    path = absolute(data)
    if not path.exists():
        raise ValueError(f"no such corpus, file or folder: {data}")
    stats = [(name, file.stat()) for name, file in own_files(path).items()]
    stat = [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
    if not sum(s.st_size for _, s in stats):
        raise ValueError(f"{data} has no text in it")
    version = hashlib.sha256(repr(stat).encode()).hexdigest()[:16]
    return name_of(data), f"{path.name} {version}"


def name_of(data):
    """A name for the tokens of the file or folder at this path, whether it is there or not."""
    path = absolute(data)
    where = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    return f"{path.name}-{where}"


def local(files):
    """{name: path} as documents. A hash of its name decides its split: no order leaks in."""
    size = {name: path.stat().st_size for name, path in files.items()}
    by_hash = sorted(files, key=name_hash)
    split = choose_splits(by_hash, size)
    trained_on = sum(size[name] for name in files if split[name] == "train")
    by_document = trained_on >= 0.5 * sum(size.values()) and set(split.values()) == set(SPLITS)
    for name in by_hash:  # in this order: any first part of a split is a fair sample of it
        yield split[name] if by_document else None, files[name].read_bytes()


def packages():
    """The files of the standard library and of PACKAGES; a package is in one split as a whole."""
    files, size = library_files(Path(sysconfig.get_paths()["stdlib"])), Counter()
    for package in PACKAGES:
        root = Path(importlib.util.find_spec(package).origin).parent
        for name, path in library_files(root).items():
            files[f"{package}/{name}"] = path
    package_of = {name: name.partition("/")[0].removesuffix(".py") for name in files}
    for name, path in files.items():
        size[package_of[name]] += path.stat().st_size
    split = choose_splits(sorted(size, key=name_hash), size)
    for name in sorted(files, key=name_hash):
        yield split[package_of[name]], files[name].read_bytes()


def name_hash(name):
    return hashlib.sha256(os.fsencode(name)).digest()


def choose_splits(files, size):
    """
    {file: split}: test, and then val, take files until they have their share; a file that would
    make it more than three times that stays in train. At least one each.
    """
    share = HELD_OUT * sum(size.values())
    split = dict.fromkeys(files, "train")
    for name in ("test", "val"):
        held = 0
        for p in files:
            if split[p] == "train" and held < share and 0 < size[p] <= 3 * share - held:
                split[p] = name
                held += size[p]
        rest = [p for p in files if split[p] == "train" and size[p]]
        if not held and rest:  # all are long: the shortest
            split[min(rest, key=size.get)] = name
    return split


def shakespeare():
    path = download(SHAKESPEARE_URL, PREPARED / "shakespeare.txt", SHAKESPEARE_SHA256)
    yield None, path.read_bytes()


def hub(repository, config, **kwargs):
    """A data set from the Hugging Face hub. Raises ValueError where it cannot be had."""
    try:
        from datasets import load_dataset
    except ImportError as e:
        where = kwargs.get("data_files", repository)
        raise ValueError(f"{where} is read by an optional package: pip install datasets") from e
    try:
        return load_dataset(repository, config, **kwargs)
    except Exception as e:  # the library's own errors for "offline" are many
        said = (str(e).splitlines() or [""])[0]
        raise ValueError(
            f"could not load {kwargs.get('data_files', repository)} ({type(e).__name__}: {said}). "
            "A download that broke off continues when you are online again. Offline: --data "
            "stdlib, or your own file or folder (of an encoder's task --corpus)") from e


def wikitext():
    """WikiText-103's own splits, lines joined into articles; one begins with ' = Title = '."""
    for split, theirs in zip(SPLITS, ("train", "validation", "test")):
        article = []
        for row in hub("Salesforce/wikitext", "wikitext-103-raw-v1", split=theirs):
            if re.match(r" = [^=].*[^=] = \n", row["text"]) and article:
                yield split, "".join(article).encode()
                article = []
            article.append(row["text"])
        yield split, "".join(article).encode()


class HubStream:
    """
    A hub corpus read as it downloads, and resumable. 1 % of the documents (by a hash of their id)
    is held out.
    """
    def __init__(self, repository, config):
        self.repository, self.config = repository, config
        self.rows = self.state = None

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
                yield self.split(row["id"]), row["text"].encode()
        except Exception as e:  # the network went away: the library's errors are many
            raise ValueError(f"{self.repository} broke off ({type(e).__name__}); "
                             "run it again to continue") from e

    @staticmethod
    def split(name):
        u = int.from_bytes(name_hash(name)[:2], "big") / 65536
        if u < 0.005:
            return "test"
        return "val" if u < 0.01 else "train"


def download(url, path, sha256):
    """Fetch url to path, once. Raises ValueError offline, or on a wrong checksum."""
    if path.exists():
        return path
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            found = response.read()
    except (OSError, HTTPException) as e:  # offline, or cut off
        why = str(e).strip() or type(e).__name__
        raise ValueError(f"could not download {url} ({why}); try again. Offline: --data stdlib, or "
                         "your own file") from e
    if hashlib.sha256(found).hexdigest() != sha256:
        raise ValueError(f"{url} does not have the expected checksum: it is not the file it was")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(found)
    os.replace(part, path)
    return path


def main(argv=None):
    import runs  # which imports this file
    parser = runs.make_parser(description=__doc__)
    parser.add_argument("data", help="a corpus above, a file or a folder")
    parser.add_argument("--tokenizer", default="bytes", choices=["bytes", "gpt2"],
                        help="(default: bytes)")
    parser.add_argument("--max_tokens", type=int, default=0,
                        help="prepare only so many; 0 is all (default: 0)")
    try:
        args = parser.parse_args(argv)
        folder, meta = prepare(args.data, args.tokenizer, args.max_tokens)
        print(json.dumps(meta, indent=1), flush=True)
    except (ValueError, OSError) as e:
        runs.drop_output()  # a full disk is said once
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command begins or continues it")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is half done is removed
    main()
