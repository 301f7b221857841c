"""
What a text's number is: perplexity, the exponential of the mean loss of a token, in windows of
every length. Windows do not overlap; every length scores the same tokens.

Of a whole split the JSON also has each document's sum of losses, though a window may span several,
and ratios of perplexities with a 95 % interval over the documents, as [ratio, low, high].
"""
import dataclasses
import math
import time

import numpy as np
import torch
from torch.nn import functional as F

import data
from data import text
from scoring import binned, resampled

UNIT, AMOUNT = "tokens", 131072  # what eval.py counts, also its flag, and how many it takes
FIGURE = "lengths"               # of figures/plot.py: what eval.py draws
LONGER = (1, 2, 4, 8, 16)        # times the training length: the windows
BATCH_TOKENS = 2**14             # of short windows that go through the model at once
PASSAGES = 64                    # that come a second time, each of a quarter of the training length
GAPS = (0, 1, 4, 16)             # between the two, times the training length
RATIO = "  {}: {:.3f} [{:.3f}, {:.3f}]"  # with its interval, as it is printed


class Scores:
    """
    The perplexities of runs by window length. Where a tokenizer is not bytes, bits per byte, too:
    by these, runs of different tokenizers can be compared.
    """
    def __init__(self, task, runs, options):
        self.options, self.split = options, options.split or "test"
        data.check_split(self.split, task.splits)
        limits = [run.config["max_tokens"] for run in runs]  # 0 is all
        task = dataclasses.replace(task, max_tokens=max(limits) if all(limits) else 0)
        stream = task.streams[self.split]
        if options.amount:
            stream = stream[:options.amount + 1]
        tokenizers = dict.fromkeys(run.config["tokenizer"] for run in runs)
        self.streams = {name: in_tokens_of(name, stream, task.tokenizer) for name in tokenizers}
        shortest = min(map(len, self.streams.values()))
        self.lengths = window_lengths(options.lengths, runs[0].config["block_size"], shortest,
                                      self.split)
        self.meta, self.tokens = task.meta, len(stream) - 1
        self.strided_tokens = self.tokens - self.lengths[-1] // 2
        self.width = max(len("  bits/byte"), *(len(run.name) for run in runs))
        print(f"perplexity on {self.tokens:,} tokens of {task.meta['corpus']} ({self.split}), "
              f"the same at every length; {options.words}")
        if options.strided:
            print("strided: windows that overlap by half, the second halves scored: "
                  f"{self.strided_tokens:,} tokens, the same at every length")
        self.first, self.several = None, False  # the first row; whether there are intervals
        if not options.amount:
            sizes = np.bincount(documents_in(stream, task.tokenizer))
            self.several = len(sizes) > 1
            alike = sizes.sum() ** 2 / (sizes ** 2).sum()
            print(f"{len(sizes):,} documents, worth {alike:.1f} of equal length: 95 % intervals "
                  "over them" if self.several else "one document: no intervals")
        if len(tokenizers) > 1:
            print("each run has the same text in its own tokens: compare bits per byte")
        print(" " * self.width + "".join(f"{T:>10,}" for T in self.lengths))

    def start(self, run, row):
        row |= dict(perplexity={}, eval_seconds={})
        if self.options.strided:
            row["strided"] = {}
        self.tokenizer, self.note = run.config["tokenizer"], ""  # note: why a length is missing
        print(f"{run.name:<{self.width}}", end="", flush=True)

    def score(self, run, row, T):
        """
        One window length: into the run's row of the JSON, and printed. Strided windows overlap by
        half, and only their second half is scored, so every token has half a window or more to look
        back on; the tokens are the same at every length.
        """
        stream, start = self.streams[self.tokenizer], time.monotonic()
        try:
            losses = token_losses(run.model, stream, T, self.options)
            self.keep(row, "perplexity", T, losses)
            row["by_position"] = by_position(losses, T)  # the longest that worked stays
            if self.options.strided:
                first = self.lengths[-1] // 2 - T // 2
                losses = token_losses(run.model, stream[first:], T, self.options, skip=T // 2)
                self.keep(row, "strided", T, losses)
            row["eval_seconds"][T] = round(time.monotonic() - start, 2)
        except ValueError as e:  # an encoding that ends
            self.note = f"  {run.name}: {e}"
        print(cells(row["perplexity"], [T]), end="", flush=True)

    def keep(self, row, kind, T, losses):
        """The losses of a window length: as a perplexity and, of a whole split, by document."""
        row[kind][T] = float(np.exp(losses.mean()))
        if self.several:
            of = documents_in(self.streams[self.tokenizer], self.tokenizer)[-len(losses):]
            sums = row.setdefault("documents", {}).setdefault(kind, {})
            sums |= {"tokens": np.bincount(of).tolist(), T: np.bincount(of, losses).tolist()}

    def finish(self, run, row):
        """Prints what is left of a run -> whether the row has a number"""
        print()
        if self.options.strided:
            print(f"{'  strided':<{self.width}}{cells(row['strided'], self.lengths)}")
        if self.streams.keys() != {"bytes"}:
            row["bits_per_byte"] = bits_per_byte(row["perplexity"], self.tokenizer,
                                                 self.streams[self.tokenizer])
            print(f"{'  bits/byte':<{self.width}}{cells(row['bits_per_byte'], self.lengths)}")
        if self.several and row["perplexity"]:
            self.compare(row)
        if self.options.again:
            self.come_again(run, row)
        if self.note:
            print(self.note)
        return bool(row["perplexity"])

    def compare(self, row):
        """Ratios of perplexities: to the first run's, and strided ones from twice the length on."""
        self.first = first = self.first or row
        if row is not first and row["config"]["tokenizer"] == first["config"]["tokenizer"]:
            row["ratio"] = {kind: {} for kind in row["documents"]}
            for kind, ratios in row["ratio"].items():
                for T in [T for T in row[kind] if T in first[kind]]:
                    ratios[T] = ratio(row, kind, T, first, T)
                    print(RATIO.format(f"{kind} at {T:,} / {first['name']}'s", *ratios[T]))
        beyond = [T for T in row.get("strided", ()) if T >= 2 * row["block_size"]]
        if len(beyond) > 1:
            near, far = beyond[0], beyond[-1]
            gain = ratio(row, "strided", far, row, near)
            row["gain"] = dict(lengths=[far, near], ratio=gain)
            print(RATIO.format(f"strided at {far:,} / at {near:,}", *gain))

    def come_again(self, run, row):
        """{gap: [mean gain of passages that come again, its 95 % interval over them]}"""
        stream, T, row["again"] = self.streams[self.tokenizer], row["block_size"], {}
        for gap in [n * T for n in GAPS]:
            try:
                gain = gain_of_repeats(run.model, stream, max(1, T // 4), gap, self.options)
            except ValueError as e:  # an encoding that ends, or too short a text
                self.note = f"  {run.name}: {e}"
                break
            low, high = resampled(gain, np.ones(len(gain)))
            row["again"][gap] = [gain.mean(), low, high]
            print(f"  a passage again after {gap:,}: {gain.mean():.3f} nats a token cheaper "
                  f"[{low:.3f}, {high:.3f}]")

    def about(self):
        about = dict(data=self.meta, split=self.split, tokens=self.tokens, lengths=self.lengths)
        if self.options.strided:
            about["strided_tokens"] = self.strided_tokens
        return about


def in_tokens_of(tokenizer, stream, was):
    """A stream in the tokens of another tokenizer than it `was` in."""
    if tokenizer == was:
        return stream
    encoding = text.get_encoding(was)
    ends = np.flatnonzero(stream == encoding.eot_token)
    parts = []
    for ids in np.split(stream, ends):
        words = encoding.decode_bytes(ids[ids != encoding.eot_token].tolist())
        words = words.decode("utf-8", "ignore").encode()  # no half characters
        parts.append(text.encode(text.get_encoding(tokenizer), words))
    return np.concatenate(parts)[1:]  # the first has no end of text before it


def documents_in(stream, tokenizer):
    """stream (N + 1,) -> (N,): a loss is of the document of the token that it is predicted from."""
    begins = stream[:-1] == text.get_encoding(tokenizer).eot_token
    return np.cumsum(begins) - begins[0]


def ratio(row, kind, T, other, S):
    """A row's perplexity in windows of T over another's in windows of S, and its interval."""
    mine, theirs = row["documents"][kind], other["documents"][kind]
    apart, tokens = np.subtract(mine[T], theirs[S]), np.array(mine["tokens"])
    low, high = resampled(apart[tokens > 0], tokens[tokens > 0])  # strided, the first may have none
    return np.exp([apart.sum() / tokens.sum(), low, high]).tolist()


def window_lengths(asked, block_size, have, split):
    """The window lengths to score, given so many tokens in the split."""
    lengths = sorted(set(asked or [block_size * m for m in LONGER]))
    if not asked and have <= lengths[-1]:
        lengths = [T for T in lengths if T < have] or [have - 1]
        print(f"{have - 1:,} tokens to score: lengths up to {lengths[-1]} only")
    if have <= lengths[-1]:
        raise ValueError(f"{have:,} tokens of the {split} split are too few for a window of "
                         f"{lengths[-1]}: take --tokens 0, shorter --lengths or more text")
    return lengths


def cells(scores, lengths):
    """{length: score} as cells of the table."""
    return "".join(f"{scores[T]:>10.3f}" if T in scores else f"{'-':>10}" for T in lengths)


@torch.no_grad()
def token_losses(model, stream, T, options, skip=0):
    """
    stream (N + 1,) tokens -> (N - skip,) losses, each token seeing only its own window of at most T
    tokens. Of every window the first `skip` are context alone; the window before has scored them.
    """
    torch.manual_seed(options.seed)  # some models draw at test time
    losses, at_once = [], min(BATCH_TOKENS, data.LOGITS // model.config.vocab_size)
    for batch in windows(stream, T, at_once, T - skip):
        x, y = (torch.from_numpy(a.astype(np.int64)).to(options.device) for a in batch)
        targets, loss = y.split(data.piece(model, x.size(1)), dim=1), []
        with options.context:
            for logits, target in zip(data.in_pieces(model, x), targets):
                logits = logits.float().transpose(1, 2)  # (B, vocab, piece)
                loss.append(F.cross_entropy(logits, target, reduction="none"))
        losses.append(torch.cat(loss, 1)[:, skip:].flatten().cpu())
    return torch.cat(losses).double().numpy()  # beyond e^88 a perplexity needs float64


def gain_of_repeats(model, stream, size, gap, options):
    """
    -> (PASSAGES,): by how many nats a token a passage of `size` is cheaper for having stood there
    before: passage, the text that follows it, `gap` long, and the passage again; against another
    passage in the first place. A model that copies gains most of what the passage cost.
    """
    width = 2 * size + gap
    if len(stream) < width + PASSAGES + 2 * size:  # the other passage is another
        raise ValueError(f"{len(stream):,} tokens are too few for a passage again after {gap:,}")
    starts = np.linspace(0, len(stream) - width, PASSAGES).astype(int)
    same = stream[starts[:, None] + np.arange(size + gap)]
    passages, other = same[:, :size], same.copy()
    other[:, :size] = np.roll(passages, PASSAGES // 2, 0)
    strings = np.stack([np.concatenate((text, passages), 1) for text in (same, other)])
    stream = np.append(strings, strings[0, 0, 0])  # what the last token is followed by
    losses = token_losses(model, stream, width, options)
    again, without = losses.reshape(2, PASSAGES, width)[:, :, -size - 1:-1].mean(-1)
    return without - again


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
    edges = position_edges(T)
    means = binned(losses[:whole].reshape(-1, T).mean(0), edges)
    return [[a, b - 1, float(loss)] for a, b, loss in zip(edges, edges[1:], means)]


def position_edges(T, first=16):
    """Bins of positions that grow by sqrt(2): [0, 16, 23, 32, 45, ... T]."""
    grown = (round(2 ** (i / 2)) for i in range(60))
    return sorted({0, T, *(edge for edge in grown if first <= edge < T)})


def bits_per_byte(perplexity, tokenizer, stream):
    """Perplexities {length: perplexity} of a stream's tokens, of what bytes of text they are."""
    encoding = text.get_encoding(tokenizer)
    size = text.sizes_of(encoding)
    size[encoding.eot_token] = 0
    tokens_per_byte = (len(stream) - 1) / int(size[stream[1:]].sum())
    return {T: math.log2(value) * tokens_per_byte for T, value in perplexity.items()}
