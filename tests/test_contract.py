"""The contract of a task, how symbols are scored, and the metrics that tasks share."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import data
import data.recall
from common import names
from tests.helpers import rng, write_task

TWO_MEMBERS = """
import data
class Task(data.Task):
    vocab_size = 3
    def batch(self, split, batch_size, rng):
        x = rng.integers(0, 3, (batch_size, self.block_size))
        return x[:, ::-1], (x[:, ::-1] + 1) % 3
"""


def test_what_a_task_leaves_out_is_plain(tasks):
    """No decorator; a vocab_size; a batch, of arrays that run backwards."""
    write_task(tasks, "bare", TWO_MEMBERS)
    task = names.make_task(dict(data="bare", block_size=6))
    assert "bare" in names.task_names()
    assert (task.block_size, task.splits, task.validation_splits) == (6, ("train", "iid"), ("iid",))
    assert task.defaults == {"nano": {}} and task.source == "" and task.kept == {}
    x, y = task.tensors("iid", 4, rng())
    assert torch.equal(y, (x + 1) % 3)
    y[0, 2:] = -1
    logits = F.one_hot(y.clamp(min=0), 3).float()
    logits[1] = 0
    (metric, (count, out_of)), = task.score(logits, x, y).items()
    assert metric == "accuracy" and out_of.tolist() == [2, 6, 6, 6]
    assert count[0] == 2 and count[1] < 6 and count[2:].tolist() == [6, 6]
    assert task.show(x[0].numpy()) == [str(int(t)) for t in x[0]]
    assert task.forward(lambda *batch: batch, x, y) == (x, y)


@pytest.mark.parametrize("decorator", ["", "@dataclasses.dataclass\n"])
def test_fields_are_flags_and_a_default_needs_no_type(decorator, tasks):
    members = "    block_size = 12\n    k: int = 5\n    vocab_size = 3\n"
    write_task(tasks, "own", "import dataclasses\nimport data\n"
                             f"{decorator}class Task(data.Task):\n{members}")
    task = names.make_task(dict(data="own", k=7))
    assert (task.block_size, task.k, task.vocab_size) == (12, 7, 3)
    assert names.make_task(dict(data="own", block_size=9)).block_size == 9
    assert names.make_task(dict(data="flipflop")).block_size == 64  # nobody else is changed


@pytest.mark.parametrize("line, says", [
    ("return x, x[:, 1:]", "y as torch.int64 of shape (4, 15): x and y must both be int64 of"),
    ("return x[:1], x[:1]", "x as torch.int64 of shape (1, 16): x and y must both be int64 of"),
    ("return x, x.astype('int32')", "y as torch.int32 of shape (4, 16)"),
    ("return x, x - 2", "y with values from -2 to 0: they must be from -1 to 2"),
    ("return x + 1, x", "x with values from 1 to 3: they must be from 0 to 2"),
])
def test_a_wrong_batch_is_named_in_one_line(line, says, tasks):
    write_task(tasks, "bad", TWO_MEMBERS.replace("return x[:, ::-1], (x[:, ::-1] + 1) % 3", line))
    task = names.make_task(dict(data="bad", block_size=16))
    for _ in range(2):
        with pytest.raises(ValueError, match="^data.bad: batch") as e:
            task.tensors("iid", 4, rng())
        assert says in str(e.value) and "\n" not in str(e.value)


# -----------------------------------------------------------------------------
# scores

def scored(model, task, number, split="iid"):
    """task_scores of a function from tokens to logits."""
    def forward(model, x, y):
        return model(x), None
    task.forward = forward
    return rates.task_scores(model, task, split, scoring.Options(amount=number, seed=1))


def test_every_chunk_of_a_tasks_score_is_of_new_sequences():
    task, seen = data.recall.Task(block_size=64), []

    def noted(x):
        seen.append(x)
        return torch.zeros(*x.shape, task.vocab_size)
    scored(noted, task, 2 * data.CHUNK)
    rows = torch.cat(seen)
    assert len(rows) == 2 * data.CHUNK == len(rows.unique(dim=0))


def test_scores_by_answer():
    by_answer = data.by_group(np.array([3, 0, 3, 3]), np.array([1.0, 0, 0, 1]), np.ones(4))
    assert by_answer == {0: [1, 0.0], 3: [3, pytest.approx(2 / 3)]}


def test_what_is_no_score(capsys):
    """Logits that are not finite are no answers, at this length of no split; nor is nothing."""
    task, row = data.recall.Task(block_size=64), {"scores": {}}
    run = SimpleNamespace(model=None)
    for value, wrong in ((float("nan"), True), (float("inf"), True), (float("-inf"), False)):
        task.forward = lambda model, x, y, value=value: (
            torch.full((*x.shape, task.vocab_size), value), None)
        row.pop("not_finite", 0)
        data.score_splits(row, run, task, 64, ["iid"], scoring.Options(amount=3))
        assert row.get("not_finite", False) == wrong and (row["scores"][64] == {}) == wrong
        assert ("its logits are not finite" in capsys.readouterr().out) == wrong
    task.score = lambda logits, x, y: dict(accuracy=(y[:, 0] * 0, y[:, 0] * 0))
    data.score_splits(row, run, task, 64, ["iid"], scoring.Options(amount=3))
    assert row["scores"][64] == {} and "nothing is scored in it" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# metrics

def test_auc_is_the_share_of_pairs_and_bins_are_means():
    g = rng(1)
    logits = g.integers(0, 6, (40, 7)).astype(np.float32)  # with many ties
    positive = g.random((40, 7)) < 0.4
    positive[:, 3], positive[:, 5] = True, False
    got = data.auc(logits, positive)
    for t in range(7):
        high, low = logits[positive[:, t], t], logits[~positive[:, t], t]
        pairs = (high[:, None] > low) + (high[:, None] == low) / 2
        assert np.isnan(got[t]) if t in (3, 5) else got[t] == pytest.approx(pairs.mean())
    logits[0, 0] = np.nan
    assert np.isnan(data.auc(logits, positive)[0])
    values = np.array([[1.0, np.nan, 3, 5, np.nan], [np.nan, np.nan, 2, 2, 8]])
    means = data.binned(values, [0, 2, 4, 5])
    assert means[0, :2].tolist() == [1, 4] and means[1, 1:].tolist() == [2, 8]
    assert np.isnan([means[0, 2], means[1, 0]]).all()


def test_intervals():
    p, low, high = data.interval(np.zeros(100), np.ones(100))  # Wilson's: z^2 / (n + z^2)
    assert (p, low) == (0, 0) and high == pytest.approx(1.96**2 / (100 + 1.96**2))
    p, low, high = data.interval(np.repeat([0, 1], 50), np.ones(100))
    assert p == 0.5 and (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    for n in range(1, 120):  # no width lost to rounding, nor beyond the rate itself
        _, low, high = data.interval(np.array([n]), np.array([120]))
        assert high - low > 0.1
        for rate in (0, 1):
            p, low, high = data.interval(np.full(n, 3 * rate), np.full(n, 3))
            assert low <= p == rate <= high
    # reads that are wrong together say less than as many independent ones
    together = data.interval(np.repeat([0, 10], 50), np.full(100, 10))
    apart = data.interval(np.repeat([0, 1], 500), np.ones(1000))
    assert together[2] - together[1] == pytest.approx(3.1 * (apart[2] - apart[1]), rel=0.05)
    covered = 0  # over many draws the truth lies inside about 95 times in 100
    for seed in range(400):
        out_of = rng(seed).integers(1, 9, 200)
        bad = rng(seed + 1000).beta(0.3, 2.7, 200)  # strings differ; 0.1 on average
        _, low, high = data.interval(rng(seed + 2000).binomial(out_of, bad), out_of)
        covered += low <= 0.1 <= high
    assert 365 <= covered <= 395
