"""
Text as one long stream of tokens per split, every document after an end-of-text token. corpora.py
says where it comes from: a known corpus, or your own file or folder.

Streams are made once: a folder of data/prepared/ has a file of uint16 for each split, and the hash
in its name is of what it was made from. Nothing there goes out of date; delete it when you like.
"""
import codecs
import hashlib
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch.nn import functional as F

import data as tasks
from data.corpora import BLOCK, CORPORA, FOLDER, HELD_OUT, SPLITS, absolute, documents, identify

PREPARED = FOLDER / "prepared"
# of models; gpt2 has 50257 tokens, padded for the GPU; gpt2_8k is its first merges alone
VOCABULARY = dict(bytes=257, gpt2_8k=8193, gpt2=50304)
AT_ONCE = 128  # blocks of text that are tokenized together, on all cores
PAD, MASK, UNK = range(3)  # what encoders read besides the tokens that they keep

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
    unit, amount, figure = "tokens", 131072, "lengths"
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
        folder, self.meta = prepare(self.data, self.tokenizer, self.max_tokens)
        self.vocab_size, self.source = VOCABULARY[self.tokenizer], self.meta["sha256"]
        self.need(2, SPLITS)
        self.streams = {split: np.memmap(folder / f"{split}.bin", np.uint16, "r", shape=n)
                        for split, n in self.meta["tokens"].items()}
        self.afterwards = ("eval.py",), ("sample.py", "--max_new_tokens", 2 * self.block_size)

    def need(self, tokens, splits):
        for split in splits:
            have = self.meta["tokens"][split]
            if have < tokens:
                raise ValueError(f"{self.data} is too short: its {split} split has {have} tokens "
                                 f"and needs {tokens}; give more text or a smaller --block_size")

    def begin(self, model):
        self.need(self.block_size + 1, SPLITS[:2])  # to be scored, a text may be shorter

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

    def evaluate(self, runs, options):
        """
        Print perplexities by window length, on the same tokens at every length -> what eval.py
        writes as JSON. Where a tokenizer is not bytes, bits per byte, too: by these, runs of
        different tokenizers can be compared.
        """
        split = options.split or "test"
        tasks.check_split(split, SPLITS)
        limits = [run.config["max_tokens"] for run in runs]  # 0 is all
        task = replace(self, max_tokens=max(limits) if all(limits) else 0)
        stream = task.streams[split]
        if options.amount:
            stream = stream[:options.amount + 1]
        tokenizers = dict.fromkeys(run.config["tokenizer"] for run in runs)
        streams = {name: in_tokens_of(name, stream, self.tokenizer) for name in tokenizers}
        shortest = min(map(len, streams.values()))
        lengths = window_lengths(options.lengths, runs[0].config["block_size"], shortest, split)

        N = len(stream) - 1
        strided_tokens = N - lengths[-1] // 2
        width = max(len("  bits/byte"), *(len(run.name) for run in runs))
        print(f"perplexity on {N:,} tokens of {task.meta['corpus']} ({split}), "
              f"the same at every length; {options.words}")
        if options.strided:
            print("strided: windows that overlap by half, the second halves scored: "
                  f"{strided_tokens:,} tokens, the same at every length")
        if len(tokenizers) > 1:
            print("each run has the same text in its own tokens: compare bits per byte")
        print(" " * width + "".join(f"{T:>10,}" for T in lengths))
        rows = []
        for run in runs:
            row = tasks.describe(run) | dict(perplexity={}, eval_seconds={})
            tokenizer = run.config["tokenizer"]
            stream = streams[tokenizer]
            print(f"{run.name:<{width}}", end="", flush=True)
            note = score_lengths(row, "perplexity", run, stream, lengths, options)
            if options.strided:
                print(f"{'  strided':<{width}}", end="", flush=True)
                score_lengths(row, "strided", run, stream, lengths, options)
            if tokenizers.keys() != {"bytes"}:
                row["bits_per_byte"] = bits_per_byte(row["perplexity"], tokenizer, stream)
                print(f"{'  bits/byte':<{width}}{cells(row['bits_per_byte'], lengths)}")
            if note:
                print(note, flush=True)
            if row["perplexity"]:
                rows.append(row)
        result = dict(data=task.meta, split=split, tokens=N, lengths=lengths, runs=rows)
        return result | (dict(strided_tokens=strided_tokens) if options.strided else {})


# -----------------------------------------------------------------------------
# evaluation: loss by token, at every window length

def in_tokens_of(tokenizer, stream, was):
    """A stream in the tokens of another tokenizer than it `was` in."""
    if tokenizer == was:
        return stream
    encoding = get_encoding(was)
    ends = np.flatnonzero(stream == encoding.eot_token)
    parts = []
    for ids in np.split(stream, ends):
        text = encoding.decode_bytes(ids[ids != encoding.eot_token].tolist())
        text = text.decode("utf-8", "ignore").encode()  # no half characters
        parts.append(encode(get_encoding(tokenizer), text))
    return np.concatenate(parts)[1:]  # the first has no end of text before it


def window_lengths(asked, block_size, have, split):
    """The window lengths to score, given so many tokens in the split."""
    lengths = sorted(set(asked or [block_size * m for m in (1, 2, 4, 8, 16)]))
    if not asked and have <= lengths[-1]:
        lengths = [T for T in lengths if T < have] or lengths[:1]
        print(f"{have - 1:,} tokens to score: lengths up to {lengths[-1]} only")
    if have <= lengths[-1]:
        raise ValueError(f"{have:,} tokens of the {split} split are too few for a window of "
                         f"{lengths[-1]}: take --tokens 0, shorter --lengths or more text")
    return lengths


def cells(scores, lengths):
    """{length: score} as cells of the table."""
    return "".join(f"{scores[T]:>10.3f}" if T in scores else f"{'-':>10}" for T in lengths)


def score_lengths(row, name, run, stream, lengths, options):
    """
    Perplexities into row[name], {length: perplexity}, printed -> why one is missing, or nothing.
    `strided`: windows overlap by half and only their second half is scored, so every token has half
    a window or more to look back on; the tokens are the same at every length.
    """
    row[name], note = {}, ""
    for T in lengths:
        torch.manual_seed(options.seed)
        start, first, skip = time.monotonic(), 0, 0
        if name == "strided":
            first, skip = lengths[-1] // 2 - T // 2, T // 2
        try:
            losses = token_losses(run.model, stream[first:], T, options, skip)
            row[name][T] = float(np.exp(losses.mean()))
            seconds = time.monotonic() - start + row["eval_seconds"].get(T, 0)
            row["eval_seconds"][T] = round(seconds, 2)
            if name == "perplexity":
                row["by_position"] = by_position(losses, T)  # the longest that worked stays
        except ValueError as e:  # an encoding that ends
            note = f"  {run.name}: {e}"
        print(cells(row[name], [T]), end="", flush=True)
    print()
    return note


@torch.no_grad()
def token_losses(model, stream, T, options, skip=0):
    """
    stream (N + 1,) tokens -> (N - skip,) losses, each token seeing only its own window of at most T
    tokens. Of every window the first `skip` are context alone; the window before has scored them.
    Long windows go through in pieces, over a cache: memory grows neither with T T nor T vocabulary.
    """
    piece, losses = tasks.piece(model), []
    for batch in windows(stream, T, piece, T - skip):
        x, y = (torch.from_numpy(a.astype(np.int64)).to(options.device) for a in batch)
        cache, loss = None, []
        if x.size(1) > piece:
            cache = sys.modules[type(model).__module__].Cache(x.size(1))
        for part, target in zip(x.split(piece, dim=1), y.split(piece, dim=1)):
            with options.context:
                logits, _ = model(part, cache=cache)
            logits = logits.float().transpose(1, 2)  # (B, vocab, piece)
            loss.append(F.cross_entropy(logits, target, reduction="none"))
        losses.append(torch.cat(loss, 1)[:, skip:].flatten().cpu())
    return torch.cat(losses).numpy()


def windows(stream, T, tokens, step):
    """
    Windows of T tokens of stream (N + 1,), one every `step` -> batches x, y (B, T) of about
    `tokens` tokens, y the next ones. What is left at the end is a shorter window, alone.
    """
    N = len(stream) - 1
    starts = np.arange(0, N - T + 1, step)  # of whole windows
    group = max(1, tokens // T)
    for n in range(0, len(starts), group):
        at = starts[n:n + group, None] + np.arange(T)
        yield stream[at], stream[at + 1]
    rest = len(starts) * step
    if rest + T - step < N:
        yield stream[None, rest:N], stream[None, rest + 1:]


def by_position(losses, T):
    """Mean loss at the positions of a window of T, binned -> [[first, last, loss], ...]."""
    whole = len(losses) // T * T
    edges = tasks.position_edges(T)
    means = tasks.binned(losses[:whole].reshape(-1, T).mean(0), edges)
    return [[a, b - 1, float(loss)] for a, b, loss in zip(edges, edges[1:], means)]


def bits_per_byte(perplexity, tokenizer, stream):
    """Perplexities {length: perplexity} of a stream's tokens, of what bytes of text they are."""
    encoding = get_encoding(tokenizer)
    size = sizes_of(encoding)
    size[encoding.eot_token] = 0
    tokens_per_byte = (len(stream) - 1) / int(size[stream[1:]].sum())
    return {T: math.log2(value) * tokens_per_byte for T, value in perplexity.items()}


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
    labels = {int(token): repr(encoding.decode([int(token)]))[1:-1] for token in ids}
    labels[encoding.eot_token] = "·"
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
    parts = tokens_of([(None, "the text", [text])], encoding)
    return np.concatenate([ids for _, ids in parts])


def tokens_of(texts, encoding):
    """Documents -> (split, tokens), each after an end of text, in bounded memory."""
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
    for split, name, blocks in texts:
        yield split, None
        for piece in blocks if in_bytes else whole_words(name, blocks):
            yield split, piece


def whole_words(name, blocks):
    """Blocks of bytes -> text, cut where a word and a token end."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    try:
        for block in blocks:
            rest += decoder.decode(block)
            if len(rest) < BLOCK:
                continue
            # where there is no such place for a million characters, it is cut anywhere
            word = re.match(r"(?s:.*)\S(?=[ \n])", rest)
            if word or len(rest) >= 16 * BLOCK:
                end = word.end() if word else len(rest)
                yield rest[:end]
                rest = rest[end:]
        yield rest + decoder.decode(b"", final=True)
    except UnicodeDecodeError as e:
        raise ValueError(f"{name} is not UTF-8, which the gpt2 tokenizer needs; convert it "
                         "(iconv -t UTF-8), or use --tokenizer bytes") from e


# -----------------------------------------------------------------------------
# preparation: a corpus becomes a folder of three streams and meta.json

def prepare(data, tokenizer, max_tokens=0):
    """-> the folder of a corpus' streams, made if it is not there, and its meta.json."""
    if max_tokens < 0:
        raise ValueError("--max_tokens must be 0 (all) or more")
    name, source = identify(data)
    key = hashlib.sha256(repr((source, tokenizer, max_tokens)).encode()).hexdigest()
    folder = PREPARED / f"{name}-{tokenizer}-{key[:12]}"
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
