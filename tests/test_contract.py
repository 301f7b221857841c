"""The contract of a task."""
import re

import pytest
import torch

from common import names
from tests.helpers import rng, write_task

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
def test_a_wrong_batch_is_named(line, says, tasks):
    write_task(tasks, "bad", TWO_MEMBERS.replace("return x[:, ::-1], (x[:, ::-1] + 1) % 3", line))
    with pytest.raises(ValueError, match=f"^data.bad: batch.* returns {re.escape(says)}"):
        names.make_task(dict(data="bad", block_size=16)).tensors("iid", 4, rng())
