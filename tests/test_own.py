"""A model and a task of one's own, by GUIDE.md and README.md, in every command."""
import json
import re

import numpy as np
import pytest
import torch

import model_cable
from common import names
from common.settings import new_settings
from tests.helpers import (
    ROOT,
    TINY_FLAGS,
    close,
    command,
    complaint,
    is_png,
    losses,
    write_task,
)


def test_the_guides_own_row_is_a_model(copy):
    """model_cable.py after GUIDE.md's diff: steps are sigmoids."""
    source = (ROOT / "model_cable.py").read_text(encoding="utf-8")
    guide = (ROOT / "GUIDE.md").read_text(encoding="utf-8")
    block, = re.findall(r"^```diff\n(.*?)^```", guide, re.S | re.M)
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", block, re.M):
        old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in (old, new))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (copy / "model_mine.py").write_text(source, encoding="utf-8")
    model = names.make_model(dict(model="mine", n_layer=1, n_head=2, n_embd=16, vocab_size=9))
    step = model.h[0].attn.step(torch.tensor([-9.0, 0, 9]))
    close(step, torch.tensor([-9.0, 0, 9]).sigmoid(), 1e-6)


def readmes_task():
    """The task that README.md adds as an example."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Add your own\n")[2]
    return re.search(r"^```python\n(.*?)^```", text.partition("\n## ")[0], re.M | re.S)[1]


def test_the_readmes_task_in_every_command(tasks, home):
    write_task(tasks, "parity", readmes_task())
    assert new_settings(["--data", "parity"]).block_size == 32
    out, _ = command(home, "train.py", "--data", "parity", "--max_iters", 2, *TINY_FLAGS)
    run = home / "out" / "cable-parity-nano"
    assert "$ python eval.py" in out and is_png(run / "eval.png")
    result = json.loads((run / "eval.json").read_text())
    assert result["data"]["source"] == "data/parity.py"
    assert 0 <= result["runs"][0]["scores"]["16"]["iid"]["accuracy"]["value"] <= 1
    command(home, "figures.maps", "attention", run, "--length", 6)
    command(home, "train.py", "--resume", run, "--max_iters", 3, "--no-evaluate")
    assert "writes no text" in complaint(home, "sample.py", run)
    (tasks / "parity.py").unlink()
    assert "nor has data/parity.py a class Task" in complaint(home, "train.py", "--resume", run)


ODD = """
import numpy as np
from pathlib import Path
from typing import ClassVar
import data
class Task(data.Task):
    block_size = 8
    table: Path = Path("x")  # where
    share: float = np.float64(.5)
    n_layer: ClassVar[int] = 7  # is no setting of a task
    def __post_init__(self):
        self.vocab_size = np.max([1, 2])
        self.name = self.table.name
    def batch(self, split, batch_size, rng):
        bits = rng.integers(0, 2, (batch_size, self.block_size))
        return bits, bits
"""


def test_a_run_is_kept_as_plain_values(tasks, home):
    """A task whose settings are NumPy's, and a path."""
    write_task(tasks, "odd", ODD)
    command(home, "train.py", "--data", "odd", "--max_iters", 1, *TINY_FLAGS)
    run = home / "out" / "cable-odd-nano"
    config = torch.load(run / "ckpt.pt", weights_only=True)["config"]
    assert (config["table"], config["share"], config["vocab_size"]) == ("x", 0.5, 2)
    command(home, "train.py", "--resume", run, "--max_iters", 2, "--table", "x", "--no-evaluate")
    command(home, "eval.py", run)


@pytest.mark.parametrize("member, says", [
    ("share: set = frozenset", "error: share is <class 'frozenset'>, of <class 'type'>; a run k"),
    ("share: str = torch.float32", "error: share is torch.float32, of <class 'torch.dtype'>; a"),
    ("more: list = dataclasses.field(default_factory=lambda: [np.int64(3)])",
     "error: more is [np.int64(3)], of <class 'list'>; a run keeps only numbers, strings, "),
    ("def state(self): return dict(words=np.arange(3))",
     "error: data.odd: words in state() must be a tensor, not <class 'numpy.ndarray'>")])
def test_what_a_checkpoint_cannot_keep_is_said_at_the_start(member, says, tasks, home):
    write_task(tasks, "odd", "import dataclasses, torch" + ODD + f"    {member}\n")
    flags = "--data", "odd", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    assert says in complaint(home, "train.py", *flags)
    assert not (home / "out").exists()


def test_the_first_checkpoint_is_read_back(home, monkeypatch):
    monkeypatch.setattr(model_cable.GPT, "get_extra_state", lambda self: np.float64(1), False)
    said = complaint(home, "train.py", "--data", "notes", "--max_iters", 9, "--eval_interval", 1,
                     "--no-evaluate", "--out_dir", "run", *TINY_FLAGS)
    assert "run/best.pt holds a numpy" in said and "which may be a program, and is not read" in said
    assert len(losses(home / "run")[0]) == 1


@pytest.mark.parametrize("old, new, says", [
    ("class Task(data.Task)", "class Task", "no class Task that inherits from data.Task"),
    ("vocab_size = 32, 2", "vocab_size, defaults = 32, 2, {'nano': dict(n_layers=1)}",
     "data.bad: defaults has n_layers, which is not a flag"),
    ("class Task", "class Parity", "nor has data/bad.py a class Task")])
def test_a_bad_task_in_one_line(tasks, home, old, new, says):
    assert old in readmes_task()
    write_task(tasks, "bad", readmes_task().replace(old, new))
    assert says in complaint(home, "train.py", "--data", "bad", "--max_iters", 1, "--no-evaluate",
                             *TINY_FLAGS)


def test_the_lines_of_python_on_weights(monkeypatch):
    """Logits and loss of a text, and more of it, from a run's folder; its weights are plain."""
    page = (ROOT / "results" / "weights" / "README.md").read_text(encoding="utf-8")
    known = {}
    monkeypatch.chdir(ROOT)
    for code in re.findall(r"```python\n(.*?)```", page.partition("\n## Text\n")[0], re.S):
        exec(code, known)
    assert known["logits"].shape == (1, 2, 257) and known["loss"].isfinite()
    assert known["more"].shape == (1, 100) and known["layers"][0]["attention"].shape == (4, 3, 3)
    assert torch.equal(known["model"](known["text"])[0], known["run"].model(known["text"])[0])
