"""
Text as one long stream of tokens per split, every document after an end-of-text token. corpora.py
says where it comes from: a known corpus, or your own file or folder.

Streams are made once: a folder of data/prepared/ has a file of uint16 for each split, and the hash
in its name is of what it was made from. Nothing there goes out of date; delete it when you like.
"""
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

import data as tasks
from data.corpora import CORPORA, FOLDER, HELD_OUT, SPLITS, absolute, documents, identify

PREPARED = FOLDER / "prepared"
# of models; gpt2 has 50257 tokens, padded for the GPU; gpt2_8k is its first merges alone
VOCABULARY = dict(bytes=257, gpt2_8k=8193, gpt2=50304)
BLOCK = 1 << 16  # characters of text, or a few more, that are tokenized at once
AT_ONCE = 128    # such blocks that are tokenized together, on all cores

# sizes and training of the paper (CABLE, section 4.2), 2^19 tokens a step; small has GPT-2's 12
# heads, as the paper's 10 do not divide 768; medium has 354M parameters, the paper's text 334M
LARGE = dict(
    block_size=1024, tokenizer="gpt2", max_iters=19073, learning_rate=6e-4, min_lr=6e-5,
    warmup_iters=750, eval_interval=250, eval_iters=50)


@dataclass
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
        folder, self.meta = prepare(self.data, self.tokenizer, self.max_tokens)
        self.vocab_size, self.source = VOCABULARY[self.tokenizer], self.meta["sha256"]
        self.need(2, SPLITS)
        self.streams = {split: np.memmap(folder / f"{split}.bin", np.uint16, "r", shape=n)
                        for split, n in self.meta["tokens"].items()}

    def need(self, tokens, splits):
        for split in splits:
            have = self.meta["tokens"][split]
            if have < tokens:
                raise ValueError(f"{self.data} is too short: its {split} split has {have} tokens "
                                 f"and needs {tokens}; give more text or a smaller --block_size")

    def prepare(self, model):
        super().prepare(model)
        self.need(self.block_size + 1, SPLITS[:2])
        have = self.meta["tokens"]["test"]
        if have <= self.block_size:
            print(f"the test split has {have} tokens, less than a window: eval.py will score it "
                  "in one that is shorter")

    @staticmethod
    def was_prepared(config, source):
        metas = (path.read_text(encoding="utf-8") for path in PREPARED.glob("*/meta.json"))
        return (config.get("corpus", config["data"]) in CORPORA
                or any(json.loads(meta)["sha256"] == source for meta in metas))

    @staticmethod
    def encoding(config):
        return get_encoding(config["tokenizer"])

    def show(self, x):
        return labels_of(get_encoding(self.tokenizer), x)

    def sorts(self, x):
        return sorts_of(self.show(x))

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
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as e:  # requests' errors, or a download that was cut off
        raise ValueError(f"could not download the gpt2 tokenizer ({type(e).__name__}); go online "
                         "once, or use --tokenizer bytes, which needs no download") from e
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
    labels = {encoding.eot_token: "·"}
    for token in map(int, ids):
        if token not in labels:
            there = token < encoding.n_vocab  # the others fill up the table for a GPU
            labels[token] = repr(encoding.decode([token]))[1:-1] if there else f"<{token}>"
    return [labels[int(token)] for token in ids]


def sorts_of(labels):
    """What sort of token each of a text is, by its label. Of line ends there are three."""
    sorts, line = [], "."  # what the line has so far; the first may have begun before
    for label in labels:
        label = label.replace("\\\\", "/").replace("\\x0c", " ")  # \\n is not a line end
        before, end, after = label.rpartition("\\n")
        if not end:
            line += label
            sorts.append(sort_of(label))
            continue
        words = (line + before).rpartition("\\n")[2].removesuffix("\\r")
        words = words.replace("\\t", " ").strip()
        if not words:
            sorts.append("blank line")
        else:
            sorts.append("block begins" if words[-1] in ":{" else "line end")
        line = after
    return sorts


def sort_of(label):
    """Of a token without a line end; the end of a text is a sign."""
    word = label.strip()
    if word in ("", "\\t"):
        return "space"
    if word.isidentifier():
        return "letters"
    return "digits" if word.isdigit() else "signs"


def encode(encoding, text):
    """bytes -> uint16 array, after an end-of-text token. Raises ValueError."""
    parts = tokens_of([(None, "the text", text)], encoding)
    return np.concatenate([ids for _, ids in parts])


def tokens_of(texts, encoding):
    """Documents -> (split, tokens), each after an end of text; one at a time is in memory."""
    in_bytes = encoding.name == "bytes"
    pieces = pieces_of(texts, in_bytes)
    while batch := list(itertools.islice(pieces, AT_ONCE)):
        splits, parts = zip(*batch)
        if in_bytes:  # a byte's token is its value: nothing to look up
            ids = [np.frombuffer(part or b"", np.uint8) for part in parts]
        else:
            ids = encoding.encode_ordinary_batch([part or "" for part in parts],
                                                 num_threads=os.cpu_count())
        for split, part, tokens in zip(splits, parts, ids):
            yield split, np.array([encoding.eot_token] if part is None else tokens, np.uint16)


def pieces_of(texts, in_bytes):
    """(split, a piece of a text), before each text None."""
    for split, name, content in texts:
        yield split, None
        pieces = whole_words(name, content)
        if in_bytes:
            pieces = (content[n:n + BLOCK] for n in range(0, len(content), BLOCK))
        for piece in pieces:
            yield split, piece


def whole_words(name, content):
    """Bytes -> pieces of text that end where a word and a token do; after 16 BLOCK anywhere."""
    try:
        text = content.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{name} is not UTF-8, which the gpt2 tokenizer needs; convert it "
                         "(iconv -t UTF-8), or use --tokenizer bytes") from e
    start, word_end = 0, re.compile(r"\S(?=[ \n])")
    while start < len(text):
        word = word_end.search(text, start + BLOCK, start + 16 * BLOCK)
        end = word.end() if word else start + 16 * BLOCK
        yield text[start:end]
        start = end


# -----------------------------------------------------------------------------
# preparation: a corpus becomes a folder of three streams and meta.json

def prepare(data, tokenizer, max_tokens=0):
    """-> the folder of a corpus' streams, made if it is not there, and its meta.json."""
    if max_tokens < 0:
        raise ValueError("--max_tokens must be 0 (all) or more")
    name, source = identify(data)
    key = hashlib.sha256(repr((source, tokenizer, max_tokens)).encode()).hexdigest()
    folder = PREPARED / f"{name[:40]}-{tokenizer}-{key[:12]}"  # a name may be 255 bytes long
    if not folder.exists():
        encoding = get_encoding(tokenizer)
        print(f"preparing {data} with the {tokenizer} tokenizer in {folder}", file=sys.stderr)
        try:
            PREPARED.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=PREPARED) as unfinished:
                work = Path(unfinished) / "streams"
                work.mkdir()
                counts = write(data, encoding, work, max_tokens)
                meta = dict(corpus=name, tokenizer=tokenizer, vocab_size=encoding.n_vocab,
                            tokens=counts, source=source, sha256=checksum(work))
                (work / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
                for path in work.iterdir():  # on the disk before the folder has its name
                    with open(path, "rb+") as file:
                        os.fsync(file.fileno())
                work.rename(folder)
        except OSError as e:
            if not folder.exists():  # else another process has made the same
                raise ValueError(f"could not prepare {data}: {e}") from e
    return folder, json.loads((folder / "meta.json").read_text(encoding="utf-8"))


def write(data, encoding, work, max_tokens):
    """A file of tokens for every split, max_tokens in all -> {split: tokens}."""
    limit = max_tokens or sys.maxsize
    shares = {None: 1, "train": 1 - 2 * HELD_OUT, "val": HELD_OUT, "test": HELD_OUT}
    quota = {split: round(limit * share) for split, share in shares.items()}
    counts, shown = dict.fromkeys(quota, 0), time.monotonic()
    enough = SPLITS
    if data == "fineweb_edu":  # which has too much to wait for the other two
        enough = SPLITS[:1]
    with ExitStack() as stack:
        files = {split: stack.enter_context(open(work / f"{split}.bin", "wb")) for split in SPLITS}
        for split, ids in tokens_of(documents(data), encoding):
            ids = ids[:quota[split] - counts[split]]
            files[split or "train"].write(ids)
            counts[split] += len(ids)
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(f"  {sum(counts.values()):,} tokens", file=sys.stderr)
            if counts[None] == limit or all(counts[name] == quota[name] for name in enough):
                break
    whole = counts.pop(None)
    return cut(work, whole) if whole else counts


def cut(work, n):
    """A text of n tokens that lies in train.bin is cut by position -> {split: tokens}."""
    ends = [0, int(n * (1 - 2 * HELD_OUT)), int(n * (1 - HELD_OUT)), n]
    whole = np.memmap(work / "train.bin", np.uint16, "r")
    for split, start, end in zip(SPLITS[1:], ends[1:], ends[2:]):
        whole[start:end].tofile(work / f"{split}.bin")
    del whole
    os.truncate(work / "train.bin", 2 * ends[1])
    return dict(zip(SPLITS, np.diff(ends).tolist()))


def checksum(work):
    """sha256 of the three streams, one after the other."""
    digest = hashlib.sha256()
    for split in SPLITS:
        with open(work / f"{split}.bin", "rb") as f:
            hashlib.file_digest(f, lambda: digest)
    return digest.hexdigest()
