"""The contract of a task, how symbols are scored, and the metrics that tasks share."""
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data.recall
import scoring
from common import names
from scoring import rates
from tests.helpers import close, make, rng, write_task

TWO_MEMBERS = """
import data
class Task(data.Task):
    vocab_size, block_size = 3, 6
    def batch(self, split, batch_size, rng):
        x = rng.integers(0, 3, (batch_size, self.block_size))
        return x[:, ::-1], (x[:, ::-1] + 1) % 3
"""


def test_what_a_task_leaves_out_is_plain(tasks):
    """Its arrays may run backwards."""
    write_task(tasks, "bare", TWO_MEMBERS)
    task = names.make_task(dict(data="bare"))
    assert (task.splits, task.validation_splits) == (("train", "iid"), ("iid",))
    x, y = task.tensors("iid", 4, rng())
    assert x.shape == (4, 6) and torch.equal(y, (x + 1) % 3)
    assert task.show(x[0].numpy()) == [str(int(t)) for t in x[0]]


@pytest.mark.parametrize("line, says", [
    ("return x, x[:, 1:]", "y as torch.int64 of shape (4, 15): x and y must both be int64 of"),
    ("return x, x - 2", "y with values from -2 to 0: they must be from -1 to 2")])
def test_a_wrong_batch_is_named_in_one_line(line, says, tasks):
    write_task(tasks, "bad", TWO_MEMBERS.replace("return x[:, ::-1], (x[:, ::-1] + 1) % 3", line))
    with pytest.raises(ValueError, match=f"^data.bad: batch.* returns {re.escape(says)}"):
        names.make_task(dict(data="bad", block_size=16)).tensors("iid", 4, rng())


def test_a_long_sequence_goes_through_in_pieces(monkeypatch):
    """Several sequences over one cache, which answer as if they were whole; so does a loss."""
    model, task = make("cable", vocab_size=145), data.recall.Task(block_size=64)
    x, y = task.tensors("iid", 3, rng())
    with torch.no_grad():
        logits, loss = model(x, y)
        monkeypatch.setattr(data, "PIECE", 20)
        assert [part.size(1) for part in data.in_pieces(model, x)] == [20, 20, 20, 4]
        got = rates.in_full(model, x, y)
    close(got[0], logits, 1e-5)
    close(got[1], loss, 1e-5)


def test_logits_that_are_not_finite_are_no_answers(capsys):
    task, row = data.recall.Task(block_size=64), {}
    run = SimpleNamespace(model=make("nope"), name="a", config={}, checkpoint=dict(kept={}))
    task.forward = lambda model, x, y: (torch.full((*x.shape, task.vocab_size), torch.nan), None)
    scores = rates.Scores(task, [run], scoring.Options(amount=3))
    scores.tasks[64] = task
    scores.start(run, row)
    scores.score(run, row, 64)
    assert "its logits are not finite" in capsys.readouterr().out
    assert row["not_finite"] and row["scores"][64] == {}


def test_auc_is_the_share_of_pairs_and_bins_are_means():
    g = rng(1)
    logits = g.integers(0, 6, (40, 7)).astype(np.float32)  # with many ties
    positive = g.random((40, 7)) < 0.4
    positive[:, 3], positive[:, 5] = True, False
    got = rates.auc(logits, positive)
    for t in range(7):
        high, low = logits[positive[:, t], t], logits[~positive[:, t], t]
        pairs = (high[:, None] > low) + (high[:, None] == low) / 2
        assert np.isnan(got[t]) if t in (3, 5) else got[t] == pytest.approx(pairs.mean())
    logits[0, 0] = np.nan
    assert np.isnan(rates.auc(logits, positive)[0])
    values = np.array([[1.0, np.nan, 3, 5, np.nan], [np.nan, np.nan, 2, 2, 8]])
    means = scoring.binned(values, [0, 2, 4, 5])
    assert means[0, :2].tolist() == [1, 4] and means[1, 1:].tolist() == [2, 8]
    assert np.isnan([means[0, 2], means[1, 0]]).all()


def test_intervals():
    p, low, high = rates.interval(np.zeros(100), np.ones(100))  # Wilson's: z^2 / (n + z^2)
    assert (p, low) == (0, 0) and high == pytest.approx(1.96**2 / (100 + 1.96**2))
    p, low, high = rates.interval(np.repeat([0, 1], 50), np.ones(100))
    assert p == 0.5 and (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    # reads that are wrong together say less than as many independent ones
    together = rates.interval(np.repeat([0, 10], 50), np.full(100, 10))
    apart = rates.interval(np.repeat([0, 1], 500), np.ones(1000))
    assert together[2] - together[1] == pytest.approx(3.1 * (apart[2] - apart[1]), rel=0.05)
    covered = 0  # over many draws the truth lies inside about 95 times in 100
    for seed in range(200):
        out_of = rng(seed).integers(1, 9, 200)
        bad = rng(seed + 1000).beta(0.3, 2.7, 200)  # strings differ; 0.1 on average
        _, low, high = rates.interval(rng(seed + 2000).binomial(out_of, bad), out_of)
        covered += low <= 0.1 <= high
    assert 182 <= covered <= 198
