"""eval.py: losses by window length and position, several runs in a table, and where it writes."""
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import data
import data.recall
import eval
import model_baseline
from common.checkpoint import load_run
from data.text import Task
from tests.helpers import (
    TINY_FLAGS,
    close,
    command,
    complaint,
    documents,
    is_png,
    losses,
    make,
    rng,
)


def written(path):
    return json.loads(path.read_text(encoding="utf-8"))


def in_pieces(monkeypatch, size):
    """Once as it is, once in smaller pieces over a cache."""
    yield
    monkeypatch.setattr(data, "piece", lambda model, T: size)
    yield
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["cable", "learned"])
def test_losses_in_pieces_equal_one_forward(name, monkeypatch):
    """Batches of short windows, cached pieces of long ones, a shorter last one."""
    model, stream = make(name), rng().integers(0, 61, 101).astype(np.uint16)
    ids = torch.from_numpy(stream.astype(np.int64))
    for T in (1, 24) if name == "learned" else (1, 24, 64):
        want = []
        with torch.no_grad():
            for x, y in zip(ids[:-1].split(T), ids[1:].split(T)):
                want.append(F.cross_entropy(model(x[None])[0][0], y, reduction="none"))
        for _ in in_pieces(monkeypatch, 16):
            close(torch.from_numpy(eval.token_losses(model, stream, T)), torch.cat(want), 1e-4)


def test_strided_losses_are_one_forward_for_every_token(monkeypatch):
    """Every token has T / 2 to T tokens to look back on."""
    model = make("cable")
    for N, lengths in ((40, (1, 2, 7, 24)), (24, (5, 24)), (30, (10, 20))):
        ids = torch.from_numpy(rng().integers(0, 61, N + 1))
        stream, half = ids.numpy().astype(np.uint16), max(lengths) // 2
        for _ in in_pieces(monkeypatch, 4):
            for T in lengths:
                skip = T // 2
                got = eval.token_losses(model, stream[half - skip:], T, skip)
                want, step = [], T - T // 2
                for t in range(half, N):
                    before = T // 2 + (t - half) % step  # tokens that it looks back on
                    with torch.no_grad():
                        logits, _ = model(ids[None, t - before:t + 1])
                    want.append(F.cross_entropy(logits[0, -1], ids[t + 1]))
                    assert T / 2 - 1 < before < T and t - before >= 0
                close(torch.from_numpy(got), torch.stack(want), 1e-4)


class Copies(torch.nn.Module):
    """What followed the token when it last came is certain, nearly; or it knows nothing."""
    config = model_baseline.GPTConfig(vocab_size=300)

    def __init__(self, certain):
        super().__init__()
        self.certain = torch.nn.Parameter(torch.tensor(float(certain)))

    def forward(self, x, cache=None):
        logits = torch.zeros(*x.shape, 300)
        for row, out in zip(x.tolist(), logits):
            follows = {}
            for n, token in enumerate(row):
                if n:
                    follows[row[n - 1]] = token
                if token in follows:
                    out[n, follows[token]] = self.certain
        return logits, None


def test_a_passage_that_comes_again():
    """A copier gains what seven tokens of eight cost, ln 300 each."""
    stream = np.concatenate([rng(n).permutation(300) for n in range(4)]).astype(np.uint16)
    gain = eval.gain_of_repeats(Copies(20), stream[:300], 8, 20)
    assert gain == pytest.approx(np.full(eval.PASSAGES, 7 / 8 * math.log(300)), 1e-4)
    assert (eval.gain_of_repeats(Copies(0), stream, 8, 20) == 0).all()
    with pytest.raises(ValueError, match="too few for a passage again after 1,190"):
        eval.gain_of_repeats(Copies(0), stream, 8, 1190)


def test_loss_by_position_bins_cover_the_window_once():
    bins = eval.by_position(np.arange(4100) % 2048 * 1.0, 2048)
    assert bins[0][0] == 0 and bins[-1][1] == 2047
    assert all(after[0] == before[1] + 1 for before, after in zip(bins, bins[1:]))
    assert all(loss == pytest.approx((a + b) / 2) for a, b, loss in bins)
    assert eval.by_position(np.ones(10), 5) == [[0, 4, 1.0]]


def test_losses_by_document(prepared):
    """Windows span documents; where strided ones begin, the first has no token to be scored."""
    folder = documents(prepared / "short", [f"{n} words, " * (n % 5 + 2) for n in range(12)])
    stream = Task(data=folder, block_size=16).streams["train"]
    for first in (0, 64):
        values = rng().random(len(stream) - 1 - first)
        sizes, sums = [], []
        for t, token in enumerate(stream[:-1]):
            if token == 256:
                sizes.append(0), sums.append(0.0)
            if t >= first:
                sizes[-1] += 1
                sums[-1] += values[t - first]
        row = {}
        eval.add_windows(row, 16, dict(perplexity=values), stream, "bytes", by_document=True)
        found = row["documents"]["perplexity"]
        assert found["tokens"] == sizes and found[16] == pytest.approx(sums) and len(sums) == 10
        assert row["perplexity"][16] == pytest.approx(math.exp(sum(sums) / sum(sizes)))
        assert (sizes[0] == 0) == (first > 0)


def test_bits_per_byte_are_of_the_bytes_of_the_tokens(prepared, words):
    stream = np.array([259, 258, 257, 97, 259, 104], np.uint16)  # " the" + "the" + "a" + "h"
    bits = eval.bits_per_byte({16: 8.0}, stream, "gpt2")
    assert bits == {16: pytest.approx(3 * 5 / 9)}


def test_a_long_sequence_of_a_task_goes_through_in_pieces(monkeypatch):
    """Several sequences over one cache, which answer as if they were whole; so does a loss."""
    model, task = make("cable", vocab_size=145), data.recall.Task(block_size=64)
    x, y = task.tensors("iid", 3, rng())
    with torch.no_grad():
        logits, loss = model(x, y)
        monkeypatch.setattr(data, "PIECE", 20)
        assert [part.size(1) for part in data.in_pieces(model, x)] == [20, 20, 20, 4]
        got = eval.in_full(model, x, y)
    close(got[0], logits, 1e-5)
    close(got[1], loss, 1e-5)


def test_logits_that_are_not_finite_are_no_answers():
    task = data.recall.Task(block_size=64)
    task.forward = lambda model, x, y: (torch.full((*x.shape, task.vocab_size), torch.nan), None)
    with pytest.raises(FloatingPointError, match="its logits are not finite"):
        eval.task_scores(make("nope"), task, "iid", 3)


def test_auc_is_the_share_of_pairs():
    g = rng(1)
    logits = g.integers(0, 6, (40, 7)).astype(np.float32)  # with many ties
    positive = g.random((40, 7)) < 0.4
    positive[:, 3], positive[:, 5] = True, False
    got = eval.auc(logits, positive)
    for t in range(7):
        high, low = logits[positive[:, t], t], logits[~positive[:, t], t]
        pairs = (high[:, None] > low) + (high[:, None] == low) / 2
        assert np.isnan(got[t]) if t in (3, 5) else got[t] == pytest.approx(pairs.mean())
    logits[0, 0] = np.nan
    assert np.isnan(eval.auc(logits, positive)[0])


def test_intervals():
    def interval(count, out_of):
        return eval.interval(count, out_of).values()
    p, low, high = interval(np.zeros(100), np.ones(100))  # Wilson's: z^2 / (n + z^2)
    assert (p, low) == (0, 0) and high == pytest.approx(1.96**2 / (100 + 1.96**2))
    p, low, high = interval(np.repeat([0, 1], 50), np.ones(100))
    assert p == 0.5 and (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    # reads that are wrong together say less than as many independent ones
    _, low, high = interval(np.repeat([0, 10], 50), np.full(100, 10))
    _, a, b = interval(np.repeat([0, 1], 500), np.ones(1000))
    assert high - low == pytest.approx(3.1 * (b - a), rel=0.05)
    covered = 0  # over many draws the truth lies inside about 95 times in 100
    for seed in range(200):
        out_of = rng(seed).integers(1, 9, 200)
        bad = rng(seed + 1000).beta(0.3, 2.7, 200)  # strings differ; 0.1 on average
        _, low, high = interval(rng(seed + 2000).binomial(out_of, bad), out_of)
        covered += low <= 0.1 <= high
    assert 182 <= covered <= 198


def test_several_runs_in_one_table_and_figure(trained, tmp_path):
    """Positions that end show a dash."""
    names = "cable", "learned"
    out, _ = command(trained, "eval.py", *names, "--lengths", 40, 8, "--strided", "--tokens", 500,
                     "--out", tmp_path / "two")
    assert "second halves scored: 480 tokens, the same at every length\n" in out
    assert "learned positions end at block_size=16" in out and is_png(tmp_path / "two.png")
    assert re.search(r"^learned +\d+\.\d+ +-$", out, re.M)
    both = written(tmp_path / "two.json")
    assert [list(r["perplexity"]) for r in both["runs"]] == [["8", "40"], ["8"]]
    assert [r["by_position"][-1][1] for r in both["runs"]] == [39, 7]
    assert both["command"].startswith("python eval.py cable learned --lengths 40 8 ")


def test_another_evaluation_does_not_replace_the_first(trained, home):
    """Scores have intervals in the JSON."""
    shutil.copytree(trained / "rope", home / "run")
    few = "eval.py", "run", "--sequences", 5
    out, _ = command(home, *few)
    first = written(home / "run" / "eval.json")
    assert first["sequences"] == 5 and out.count("exact_match") == 3
    for by_metric in first["runs"][0]["scores"]["16"].values():
        for m in by_metric.values():
            assert 0 <= m["low"] <= m["value"] <= m["high"] <= 1
    for _ in range(2):  # the same command writes the same file
        command(home, *few, "--lengths", 16, 32, "--split", "iid")
    files = sorted(path.name for path in (home / "run").glob("eval*.json"))
    assert files == ["eval-2.json", "eval.json"]
    assert written(home / "run" / "eval.json") == first
    assert list(written(home / "run" / "eval-2.json")["runs"][0]["scores"]) == ["16", "32"]
    command(home, "eval.py", "run", trained / "tra", "--sequences", 5)  # several: in out/
    rows = written(home / "out" / "eval.json")["runs"]
    assert [row["model"] for row in rows] == ["rope", "tra"]


def test_a_task_with_a_known_distribution_from_training_to_figures(home):
    """TVD, the AUC where it is defined, undefined positions as null."""
    command(home, "train.py", "--model", "perinorm", "--data", "dyck", "--max_iters", 2,
            "--no-evaluate", *TINY_FLAGS, "--block_size", 8, "--out_dir", "run")
    command(home, "eval.py", "run", "--sequences", 40)
    assert "NaN" not in (home / "run" / "eval.json").read_text()
    result = written(home / "run" / "eval.json")["runs"][0]
    tvd = result["tvd"]["8"]["iid"]
    assert np.mean(tvd) == pytest.approx(result["scores"]["8"]["iid"]["tvd"]["value"], rel=1e-5)
    assert 0 < min(tvd) and max(tvd) < 1
    # depth 0 only after an even number of brackets
    empty = [a is None for a in result["auc"]["8"]["iid"]]
    assert empty == [True, True, False] + [True, False] * 2 + [True]
    command(home, "figures.plot", "positions", "run/eval.json", "--metric", "auc")
    assert is_png(home / "run" / "eval.auc.png")


def test_what_cannot_be_scored_or_not_together(trained, home):
    more = "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--model", "rope", "--data", "flipflop", "--p_ignore", 0.5, *more,
            "--out_dir", "half")
    command(home, "train.py", "--data", "notes", *more, "--out_dir", "mine")
    text, task = trained / "cable", trained / "rope"
    for words, says in (
            ((task, "half"), "half/ckpt.pt was trained with p_ignore=0.5"),
            ((task, text), "score them one by one"),
            ((text, "mine"), "say which to score with --data"),
            ((task, "--again"), "--strided and --again are for text"),
            ((task, "--tokens", 9), "--tokens is not for flipflop, which has --sequences"),
            ((task, "--split", "idd"), "unknown split 'idd': choose from train"),
            ((text, "--data", "flipflop"), "it cannot be scored on flipflop"),
            ((task, "--lengths", 0), "--lengths, --sequences and --queries must be at least 1"),
            ((text, "--lengths", 10**6), "too few for a window of 1000000"),
            (("gone",), "no checkpoint at gone"), ((task, "--bema"), "has no BEMA weights")):
        assert says in complaint(home, "eval.py", *words), words
    command(home, "eval.py", text, "mine", "--lengths", 16, "--data", "notes", "--tokens", 40)


def test_a_small_text_of_ones_own_is_scored_as_far_as_it_goes(home):
    """Its path is relative: the run is still resumed, from another folder."""
    (home / "small.txt").write_text("some words of my own. " * 60)
    flags = "--model", "rope", "--data", "small.txt", *TINY_FLAGS
    out, _ = command(home, "train.py", *flags, "--max_iters", 2, "--out_dir", "small")
    assert "lengths up to 64 only" in out and "$ python sample.py" in out
    shutil.copytree(home / "prepared", home / "notes" / "prepared")
    out, _ = command(home / "notes", "train.py", "--resume", "../small", "--max_iters", 3,
                     "--no-evaluate")
    assert "from iter 2" in out and set(losses(home / "small")[0]) == {1, 2, 3}
    (home / "small.txt").unlink()
    assert "nor is it a file or folder" in complaint(home, "eval.py", "small")


def test_set_cuts_the_table_of_cope(home):
    command(home, "train.py", "--model", "cope", "--P", 7, "--data", "notes", "--max_iters", 1,
            "--no-evaluate", *TINY_FLAGS, "--out_dir", "run")
    whole = load_run(home / "run").model.state_dict()
    cut = load_run(home / "run", changes=["P=4"]).model.state_dict()
    assert whole["pos_emb.0"].any() and whole.keys() == cut.keys()
    for name, p in cut.items():
        assert p.equal(whole[name][:, :4] if name == "pos_emb.0" else whole[name])
    said, _ = command(home, "eval.py", "run", "--set", "P=4", "--lengths", 16)
    assert "run (P=4)" in said
    for change, says in (("P=9", "do not fit"), ("P=a", "takes int"), ("P=0", "at least 1")):
        assert says in complaint(home, "eval.py", "run", "--set", change)
