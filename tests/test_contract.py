"""The contract of a task, and the metrics that tasks share."""
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import data
import eval as evaluation
from tests.helpers import rng, write_task

TWO_MEMBERS = """
import numpy as np
class Task:
    vocab_size = 3
    def batch(self, split, batch_size, rng):
        x = rng.integers(0, 3, (batch_size, self.block_size))
        y = np.where(x > 0, 3 - x, -1)
        return x, y
"""


def test_what_a_task_leaves_out_is_plain(tasks):
    """A class that is no dataclass and inherits nothing, with a batch and a vocab_size."""
    write_task(tasks, "bare", TWO_MEMBERS)
    cls = data.find("bare")
    task = data.make(dict(data="bare", block_size=6))
    assert issubclass(cls, data.Task) and "bare" in data.known()
    assert (task.block_size, task.kind, task.splits) == (6, "symbols", ("train", "iid"))
    assert task.defaults == {"nano": {}} and task.source == "" and task.stretches
    assert task.target is None and task.contrast is None
    x, y = map(torch.from_numpy, task.batch("iid", 4, rng()))
    logits = F.one_hot(y.clamp(min=0), 3).float()
    logits[0] = 0
    (metric, (count, out_of)), = task.score(logits, x, y).items()
    assert metric == "accuracy" and out_of.tolist() == (y != -1).sum(1).tolist()
    assert count.tolist() == [0, *out_of.tolist()[1:]]
    assert task.show(x[0].numpy()) == [str(int(t)) for t in x[0]]
    assert task.loss is None and task.begin is None  # the model's own loss, nothing before


def test_a_users_own_fields_are_kept(tasks):
    write_task(tasks, "own", TWO_MEMBERS.replace(
        "    vocab_size = 3", "    block_size = 12\n    k: int = 5  # a flag\n    vocab_size = 3"))
    task = data.make(dict(data="own", k=7))
    assert (task.block_size, task.k) == (12, 7)
    assert data.make(dict(data="own", block_size=9)).block_size == 9


@pytest.mark.parametrize("change, says", [
    (("def batch", "def batches"), "data/bad.py: class Task has no batch(self, split, batch_size"),
    (("class Task", "class Tasks"), "data/bad.py has no class Task"),
    (("import numpy", "import nunpy"), "data/bad.py cannot be used (ModuleNotFoundError"),
    (("def batch(", "def batch(("), "data/bad.py cannot be used (SyntaxError"),
    (("def batch", "def __init__"), "Task has an __init__; use fields, and __post_init__"),
    (("vocab_size = 3", "kind, vocab_size = 'tokens', 3"), "kind='tokens' is not one of text"),
    (("vocab_size = 3", "splits, vocab_size = ('train',), 3"), "splits needs two names or more"),
    (("vocab_size = 3", "defaults, vocab_size = {}, 3"), "defaults needs a size, for example"),
])
def test_a_task_that_lacks_something_is_named(tasks, change, says):
    assert change[0] in TWO_MEMBERS
    write_task(tasks, "bad", TWO_MEMBERS.replace(*change))
    with pytest.raises(ValueError) as e:
        data.make(dict(data="bad"))
    assert says in str(e.value) and "\n" not in str(e.value)
    assert data.make(dict(data="flipflop")).vocab_size == 5  # nobody else is disturbed


def test_auc_is_the_share_of_pairs():
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


def test_binned():
    values = np.array([[1.0, np.nan, 3, 5, np.nan], [np.nan, np.nan, 2, 2, 8]])
    got = data.binned(values, [0, 2, 4, 5])
    assert got[0, :2].tolist() == [1, 4] and got[1, 1:].tolist() == [2, 8]
    assert np.isnan([got[0, 2], got[1, 0]]).all()


def test_intervals():
    one = np.ones(100)
    p, low, high = evaluation.interval(np.zeros(100), one)  # Wilson's: z^2 / (n + z^2)
    assert (p, low) == (0, 0) and high == pytest.approx(1.96**2 / (100 + 1.96**2))
    p, low, high = evaluation.interval(np.repeat([0, 1], 50), one)
    assert p == 0.5 and (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    for n in range(1, 120):  # no width lost to rounding
        _, low, high = evaluation.interval(np.array([n]), np.array([120]))
        assert high - low > 0.1
    for n in range(1, 300):  # nor beyond the rate itself
        for rate in (0, 1):
            p, low, high = evaluation.interval(np.full(n, 3 * rate), np.full(n, 3))
            assert low <= p == rate <= high
    # reads that are wrong together say less than as many independent ones
    together = evaluation.interval(np.repeat([0, 10], 50), one * 10)
    apart = evaluation.interval(np.repeat([0, 1], 500), np.ones(1000))
    assert together[2] - together[1] == pytest.approx(3.1 * (apart[2] - apart[1]), rel=0.05)
    assert together[1:] == pytest.approx((0.4038, 0.5962), abs=1e-4)
    covered = 0  # over many draws the truth lies inside about 95 times in 100
    for seed in range(400):
        out_of = rng(seed).integers(1, 9, 200)
        bad = rng(seed + 1000).beta(0.3, 2.7, 200)  # strings differ; 0.1 on average
        _, low, high = evaluation.interval(rng(seed + 2000).binomial(out_of, bad), out_of)
        covered += low <= 0.1 <= high
    assert 365 <= covered <= 395
