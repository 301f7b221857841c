"""scoring/perplexity.py: losses by window length and position, bits per byte, tokenizers."""
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import data
import data.text
import eval
import model_baseline
from common.checkpoint import Run
from data.text import Task
from scoring import Options, perplexity, resampled
from tests.helpers import close, documents, make, rng


def pieces(monkeypatch, size):
    """Once as it is, once in smaller pieces over a cache."""
    yield
    monkeypatch.setattr(data, "piece", lambda model, T: size)
    yield
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["cable", "learned"])
def test_perplexity_in_pieces_equals_one_forward(name, monkeypatch):
    """Batches of short windows, cached pieces of long ones, a shorter last one."""
    model, stream = make(name), rng().integers(0, 61, 101).astype(np.uint16)
    ids = torch.from_numpy(stream.astype(np.int64))
    for T in (1, 24) if name == "learned" else (1, 24, 64):
        want = []
        with torch.no_grad():
            for x, y in zip(ids[:-1].split(T), ids[1:].split(T)):
                want.append(F.cross_entropy(model(x[None])[0][0], y, reduction="none"))
        for _ in pieces(monkeypatch, 16):
            losses = perplexity.token_losses(model, stream, T, Options())
            close(torch.from_numpy(losses), torch.cat(want), 1e-4)


class Noted(torch.nn.Module):
    """A model that knows nothing, and which tokens it has seen."""
    config = model_baseline.GPTConfig(vocab_size=300)

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, cache=None):
        self.seen.extend(x.flatten().tolist())
        if x.size(1) > 64:
            raise ValueError(f"positions end at 64, not at {x.size(1)}")
        return torch.zeros(*x.shape, 300), None


def test_strided_perplexity_is_one_forward_for_every_token(monkeypatch):
    """Every token has T / 2 to T tokens to look back on."""
    model = make("cable")
    for N, lengths in ((40, (1, 2, 7, 24)), (24, (5, 24)), (30, (10, 20))):
        ids = torch.from_numpy(rng().integers(0, 61, N + 1))
        stream, half = ids.numpy().astype(np.uint16), max(lengths) // 2
        for _ in pieces(monkeypatch, 4):
            for T in lengths:
                skip = T // 2
                losses = perplexity.token_losses(model, stream[half - skip:], T, Options(), skip)
                want, step = [], T - T // 2
                for t in range(half, N):
                    before = T // 2 + (t - half) % step  # tokens that it looks back on
                    with torch.no_grad():
                        logits, _ = model(ids[None, t - before:t + 1])
                    want.append(F.cross_entropy(logits[0, -1], ids[t + 1]))
                    assert T / 2 - 1 < before < T and t - before >= 0
                close(torch.from_numpy(losses), torch.stack(want), 1e-4)


class Copies(torch.nn.Module):
    """What followed the token when it last came is certain, nearly."""
    config = model_baseline.GPTConfig(vocab_size=300)

    def forward(self, x, cache=None):
        logits = torch.zeros(*x.shape, 300)
        for row, out in zip(x.tolist(), logits):
            follows = {}
            for n, token in enumerate(row):
                if n:
                    follows[row[n - 1]] = token
                if token in follows:
                    out[n, follows[token]] = 20
        return logits, None


def test_a_passage_that_comes_again():
    """A copier gains what seven tokens of eight cost, ln 300 each."""
    stream = np.concatenate([rng(n).permutation(300) for n in range(4)]).astype(np.uint16)
    gain = perplexity.gain_of_repeats(Copies(), stream[:300], 8, 20, Options())
    assert gain == pytest.approx(np.full(perplexity.PASSAGES, 7 / 8 * math.log(300)), 1e-4)
    nothing = perplexity.gain_of_repeats(Noted(), stream, 8, 20, Options())
    assert (nothing == 0).all()
    with pytest.raises(ValueError, match="too few for a passage again after 1,190"):
        perplexity.gain_of_repeats(Noted(), stream, 8, 1190, Options())


def test_loss_by_position_bins_cover_the_window_once():
    losses = np.arange(4100) % 2048 * 1.0
    bins = perplexity.by_position(losses, 2048)
    assert bins[0][0] == 0 and bins[-1][1] == 2047
    assert all(after[0] == before[1] + 1 for before, after in zip(bins, bins[1:]))
    assert all(loss == pytest.approx((a + b) / 2) for a, b, loss in bins)
    assert perplexity.by_position(np.ones(10), 5) == [[0, 4, 1.0]]


def table(task, runs, **options):
    return eval.score_runs(perplexity.Scores(task, runs, Options(**options)), runs)


def run_of(task, name, model=None):
    config = dict(model="none", seed=1, block_size=16, max_tokens=0, tokenizer=task.tokenizer)
    checkpoint = dict(config=config, iter=1, seconds=1.0)
    return Run(Path(f"{name}/ckpt.pt"), name, model or Noted(), config, checkpoint)


@pytest.fixture
def texts(prepared, words, monkeypatch):
    monkeypatch.setitem(data.text.VOCABULARY, "gpt2", 300)
    return documents(prepared / "docs", [f"the the δέλτα {n} " * 60 for n in range(40)])


def test_the_table_of_runs(texts, capsys):
    task = Task(data=texts, block_size=16)
    result = table(task, [run_of(task, "a")], lengths=[96, 16, 64], amount=500, strided=True)
    said = capsys.readouterr().out
    assert "second halves scored: 452 tokens, the same at every length\n" in said
    assert said.endswith("   300.000   300.000         -\n  a: positions end at 64, not at 96\n")
    row, = result["runs"]
    assert row["perplexity"] == row["strided"] == {16: pytest.approx(300), 64: pytest.approx(300)}
    assert row["by_position"][-1][1] == 63 and "bits_per_byte" not in row
    assert (result["tokens"], result["strided_tokens"]) == (500, 452)


def test_tokenizers_are_compared_on_the_same_text_by_its_bytes(texts, capsys):
    tasks = {name: Task(data=texts, block_size=16, tokenizer=name) for name in ("bytes", "gpt2")}
    runs = [run_of(task, name) for name, task in tasks.items()]
    rows = table(tasks["bytes"], runs, lengths=[16], amount=610)["runs"]
    out = capsys.readouterr().out
    assert "compare bits per byte" in out and out.count("  bits/byte") == 2
    seen = {run.name: run.model.seen for run in runs}
    assert len(seen["bytes"]) > 1.2 * len(seen["gpt2"])
    for run, row in zip(runs, rows):  # all but the last token are seen
        stream = tasks[run.name].streams["test"]
        N = len(run.model.seen)
        assert run.model.seen == stream[:N].tolist()
        encoding = data.text.get_encoding(run.name)
        scored = [token for token in stream[1:N + 1].tolist() if token != encoding.eot_token]
        bits = math.log2(300) * N / len(encoding.decode_bytes(scored))
        assert row["bits_per_byte"] == {16: pytest.approx(bits)}


def by_hand(losses, stream, first):
    """Losses of the tokens after stream[first:-1] -> a list for each document."""
    found = []
    for t, token in enumerate(stream[:-1]):
        if token == 256:
            found.append([])
        if t >= first:
            found[-1].append(losses[t - first])
    return found


def interval_by_hand(apart, tokens):
    """Documents, drawn one after the other, in which the tokens' losses are so far apart."""
    random, means = rng(), []
    for _ in range(1000):
        drawn = random.integers(0, len(tokens), len(tokens))
        means.append(sum(apart[n] for n in drawn) / sum(tokens[n] for n in drawn))
    return np.exp(np.quantile(means, [0.025, 0.975])).tolist()


def test_losses_by_document_and_ratios_with_intervals(texts, tmp_path, capsys):
    """Windows span documents; where strided ones begin, the first has no token to be scored."""
    folder = documents(tmp_path / "short", [f"{n} words, " * (n % 5 + 2) for n in range(12)])
    task = Task(data=folder, block_size=16)
    stream, models = task.streams["train"], [make(name, vocab_size=257) for name in ("t5", "alibi")]
    runs = [run_of(task, name, model) for name, model in zip(("a", "b"), models)]
    lengths = [16, 32, 128]
    a, b = table(task, runs, lengths=lengths, strided=True, split="train")["runs"]
    for row, model in ((a, models[0]), (b, models[1])):
        for T in lengths:
            plain = perplexity.token_losses(model, stream, T, Options())
            halves = perplexity.token_losses(model, stream[64 - T // 2:], T, Options(), T // 2)
            for kind, losses, first in (("perplexity", plain, 0), ("strided", halves, 64)):
                found, want = row["documents"][kind], by_hand(losses, stream, first)
                assert len(want) == 10 and found["tokens"] == list(map(len, want))
                assert found[T] == pytest.approx(list(map(sum, want)))
    tokens = np.array(a["documents"]["strided"]["tokens"])
    assert tokens[0] == 0 and "ratio" not in a
    for kind in ("perplexity", "strided"):
        for T in lengths:
            apart = np.subtract(b["documents"][kind][T], a["documents"][kind][T])
            tokens = np.array(b["documents"][kind]["tokens"])
            want = interval_by_hand(apart[tokens > 0], tokens[tokens > 0])
            value, *ends = b["ratio"][kind][T]
            assert value == pytest.approx(b[kind][T] / a[kind][T]) and ends == pytest.approx(want)
    value, low, high = a["gain"]["ratio"]
    assert value == pytest.approx(a["strided"][128] / a["strided"][32]) and low < value < high
    assert a["gain"]["lengths"] == [128, 32]
    b["documents"]["strided"][16] = (1e6 * tokens).tolist()  # beyond e^709
    assert perplexity.ratio(b, "strided", 16, a, 16) == [math.inf] * 3
    out = capsys.readouterr().out
    assert "10 documents, worth " in out and out.count("strided at 128 / at 32: ") == 2
    assert f"  strided at 128 / a's: {b['ratio']['strided'][128][0]:.3f} [" in out


def test_an_interval_over_documents_holds_the_truth_as_often_as_it_says():
    """Taken for independent, tokens of documents that differ promise far too much."""
    held, alone, random = 0, 0, rng()
    for _ in range(200):
        sizes = random.integers(50, 500, 40)
        sums = sizes * random.normal(0.1, 0.2, 40) + random.normal(0, sizes ** 0.5)
        low, high = resampled(sums, sizes, times=300)
        held += low < 0.1 < high
        alone += abs(sums.sum() / sizes.sum() - 0.1) < 1.96 / sizes.sum() ** 0.5
    assert 0.9 < held / 200 < 0.98 and alone / 200 < 0.6
