"""
Text as one long stream of tokens per split, every document after an end-of-text token. corpora.py
says where it comes from: a known corpus, or your own file or folder.

Streams are made once: a folder of data/prepared/ has a file of uint16 for each split, and the hash
in its name is of what it was made from. Nothing there goes out of date; delete it when you like.
"""
import hashlib
import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken
import torch

import data as tasks
from data.corpora import CORPORA, FOLDER, HELD_OUT, SPLITS, absolute, documents, identify, online

PREPARED = FOLDER / "prepared"
# rows of a model's embedding: gpt2's 50257 tokens are padded for the GPU; gpt2_8k has the first
VOCABULARY = dict(bytes=257, gpt2_8k=8193, gpt2=50304)
AT_ONCE = 1 << 26  # bytes of text that are tokenized at once, where no document has more

# sizes and training of the paper (CABLE, section 4.2), 2^19 tokens a step; small has GPT-2's 12
# heads, as the paper's 10 do not divide 768; medium has 354M parameters, the paper's text 334M
LARGE = dict(
    block_size=1024, tokenizer="gpt2", max_iters=19073, learning_rate=6e-4, min_lr=6e-5,
    warmup_iters=750, eval_interval=250, eval_iters=50)


class Task(tasks.Task):
    data: str = "stdlib"      # a corpus (see data/corpora.py), your own file or folder, or a task
    block_size: int = 256     # tokens in a window
    tokenizer: str = "bytes"  # bytes (257 tokens, no download), gpt2_8k (8193) or gpt2 (50257)
    max_tokens: int = 0       # prepare only this many tokens of the corpus; 0 is all

    splits = SPLITS
    validation_splits = SPLITS[1:2]
    unit = "tokens"
    defaults = {
        "nano": dict(  # for two CPU cores
            n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=16, max_iters=750,
            learning_rate=4e-3, min_lr=4e-4, warmup_iters=50, eval_interval=250, eval_iters=20),
        "micro": dict(  # 14M parameters, for one GPU: some minutes
            n_layer=6, n_head=6, n_embd=384, block_size=512, tokenizer="gpt2_8k", batch_size=128,
            max_iters=3000, learning_rate=2e-3, min_lr=2e-4, warmup_iters=200, eval_interval=250,
            eval_iters=20),
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
        folder, self.meta = streams_of(self.data, self.tokenizer, self.max_tokens)
        self.vocab_size, self.source = VOCABULARY[self.tokenizer], self.meta["sha256"]
        self.need(2, SPLITS)
        self.streams = {split: np.memmap(folder / f"{split}.bin", np.uint16, "r")
                        for split in SPLITS}

    def need(self, tokens, splits):
        for split in splits:
            have = self.meta["tokens"][split]
            if have < tokens:
                raise ValueError(f"{self.data} is too short: its {split} split has {have} tokens "
                                 f"and needs {tokens}; give more text, a larger --max_tokens or a "
                                 "smaller --block_size")

    def prepare(self, model):
        super().prepare(model)
        self.need(self.block_size + 1, SPLITS[:2])
        have = self.meta["tokens"]["test"]
        if have <= self.block_size:
            print(f"the test split has {have} tokens, less than a window: eval.py will score it "
                  "in one that is shorter")

    @staticmethod
    def encoding(config):
        return get_encoding(config["tokenizer"])

    def show(self, x):
        return labels_of(get_encoding(self.tokenizer), x)

    def batch(self, split, batch_size, rng):
        """Random windows of a split, and their next tokens."""
        stream = self.streams[split]
        starts = rng.integers(0, len(stream) - self.block_size, size=batch_size)
        windows = stream[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]

    def score(self, logits, x, y):
        return {}


# -----------------------------------------------------------------------------
# tokens

def get_encoding(name):
    """
    A tiktoken Encoding: `bytes` is made here, tiktoken downloads `gpt2` once, and `gpt2_8k` is its
    first 8,192 tokens, which need no others: any text, in shorter words, for a small model.
    """
    if name not in VOCABULARY:
        raise ValueError(f"unknown tokenizer {name!r}: choose from {', '.join(VOCABULARY)}")
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 256})
    with online("the gpt2 tokenizer", "use --tokenizer bytes, which needs no download"):
        encoding = tiktoken.get_encoding("gpt2")
    if name == "gpt2":
        return encoding
    n = VOCABULARY[name] - 1  # in the order in which they were merged
    ranks = {word: rank for word, rank in encoding._mergeable_ranks.items() if rank < n}
    return tiktoken.Encoding(name, pat_str=encoding._pat_str, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": n})


def sizes_of(encoding):
    """How many bytes every token has."""
    return np.array([len(encoding.decode_single_token_bytes(n)) for n in range(encoding.n_vocab)])


def labels_of(encoding, ids):
    """Tokens as labels for figures: \\n is a line end, a dot the end of a text."""
    def label(token):
        if token == encoding.eot_token:
            return "·"
        there = token < encoding.n_vocab  # the others fill up the table for a GPU
        return repr(encoding.decode([token]))[1:-1] if there else f"<{token}>"
    return [label(int(token)) for token in ids]


def encode(encoding, text):
    """bytes -> uint16 array, after an end-of-text token. Raises ValueError."""
    if encoding.name == "bytes":
        ids = np.frombuffer(text, np.uint8)
    else:
        try:
            ids = encoding.encode_to_numpy(text.decode(), disallowed_special=())
        except UnicodeDecodeError as e:
            raise ValueError("the text is not UTF-8, which the gpt2 tokenizer needs; convert it "
                             "(iconv -t UTF-8), or use --tokenizer bytes") from e
    return np.concatenate(([encoding.eot_token], ids), dtype=np.uint16, casting="unsafe")


# -----------------------------------------------------------------------------
# preparation: a corpus becomes a folder of three streams and meta.json

def streams_of(data, tokenizer, max_tokens=0):
    """-> the folder of a corpus' streams, made if it is not there, and its meta.json."""
    if max_tokens < 0:
        raise ValueError("--max_tokens must be 0 (all) or more")
    name, source = identify(data)

    def make(folder):
        encoding = get_encoding(tokenizer)
        write(data, encoding, folder, max_tokens)
        tokens, digest = {}, hashlib.sha256()
        for split in SPLITS:
            with open(folder / f"{split}.bin", "rb") as file:
                hashlib.file_digest(file, lambda: digest)  # goes on with the same hash
                tokens[split] = file.tell() // 2
        return dict(corpus=name, tokenizer=tokenizer, vocab_size=encoding.n_vocab, tokens=tokens,
                    source=source, sha256=digest.hexdigest())
    return made_once(f"{name[:40]}-{tokenizer}", (source, tokenizer, max_tokens), make)


def made_once(name, source, make):
    """
    -> the folder in PREPARED of what is made of this source, and its meta.json. Where it is not
    there, make(folder) writes its files and returns meta.json. It appears as a whole or not at all.
    """
    key = hashlib.sha256(repr(source).encode()).hexdigest()
    folder = PREPARED / f"{name}-{key[:12]}"
    if not folder.exists():
        print(f"preparing {folder}", file=sys.stderr)
        PREPARED.mkdir(parents=True, exist_ok=True)
        with (at_work(PREPARED),
              tempfile.TemporaryDirectory(prefix="unfinished-", dir=PREPARED) as unfinished):
            work = Path(unfinished) / "whole"
            work.mkdir()
            try:
                meta = make(work)
            except MemoryError as e:
                raise OSError(f"{name} does not fit into memory while it is prepared: divide its "
                              "longest file, as with split -C 100M") from e
            (work / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
            try:
                work.rename(folder)
            except OSError:
                if not folder.exists():  # else another process has made the same
                    raise
    return folder, json.loads((folder / "meta.json").read_text(encoding="utf-8"))


@contextmanager
def at_work(folder):
    """What killed processes left unfinished is removed, unless another is at work, too."""
    with ExitStack() as stack:
        with suppress(ImportError, OSError):  # on Windows; of another user, a drive without locks
            import fcntl
            lock = stack.enter_context(open(folder / "lock", "w"))
            with suppress(OSError):  # another is at work
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in folder.glob("unfinished-????????"):
                    shutil.rmtree(left)
            fcntl.flock(lock, fcntl.LOCK_SH)  # until it is closed, by a kill, too
        yield


def was_prepared(sha256):
    """Whether a text with this sha256 was prepared on this machine."""
    metas = (path.read_text(encoding="utf-8") for path in PREPARED.glob("*/meta.json"))
    return any(json.loads(meta)["sha256"] == sha256 for meta in metas)


def write(data, encoding, folder, max_tokens):
    """A file of tokens for every split, max_tokens in all."""
    limit = max_tokens or sys.maxsize
    held_out = round(limit * HELD_OUT)
    room = {None: limit, "train": round(limit * (1 - 2 * HELD_OUT)), "val": held_out,
            "test": held_out}  # tokens that a split may still take
    enough = SPLITS[:1] if data == "fineweb_edu" else SPLITS  # the others would take too long
    with ExitStack() as stack:
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "wb"))
                 for split in SPLITS}
        for split, ids in tokenized(documents(data), encoding):
            ids = ids[:room[split]]
            room[split] -= len(ids)
            files[split or "train"].write(ids)
            if not room[None] or not any(room[split] for split in enough):
                break
    if room[None] < limit:  # documents of no split are in train.bin: cut them by position
        whole = np.fromfile(folder / "train.bin", np.uint16)
        ends = [int(len(whole) * (1 - 2 * HELD_OUT)), int(len(whole) * (1 - HELD_OUT))]
        for split, part in zip(SPLITS, np.split(whole, ends)):
            part.tofile(folder / f"{split}.bin")


def tokenized(documents, encoding):
    """(split, text) of every document -> (split, tokens), in their order, on all cores."""
    pool = ThreadPoolExecutor(torch.get_num_threads())  # a container has not all of a machine's
    for group in groups(documents):
        splits, texts = zip(*group)
        yield from zip(splits, pool.map(partial(encode, encoding), texts))


def groups(documents):
    """Lists of documents that are tokenized at once."""
    group, size, done = [], 0, 0
    for split, text in documents:
        group.append((split, text))
        size += len(text)
        if size > AT_ONCE:
            yield group
            done += size
            print(f"  {done:,} bytes of text", file=sys.stderr)
            group, size = [], 0
    if group:
        yield group
