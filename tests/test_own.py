"""A model and a task of one's own, by GUIDE.md and README.md, in every command."""
import json
import re
import shutil

import pytest
import torch

from common.settings import new_settings
from tests.helpers import (
    ROOT,
    TINY_FLAGS,
    TINY_RUN,
    command,
    complaint,
    is_png,
    process,
    write_task,
)

# -----------------------------------------------------------------------------
# a model

def guides_own_row():
    """model_cable.py after the diff of GUIDE.md."""
    source = (ROOT / "model_cable.py").read_text(encoding="utf-8")
    guide = (ROOT / "GUIDE.md").read_text(encoding="utf-8")
    block, = re.findall(r"^```diff\n(.*?)^```", guide, re.S | re.M)
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", block, re.M):
        old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in (old, new))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@pytest.mark.slow
def test_the_guides_own_row_passes_the_tests(copy):
    """Its steps are sigmoids. Beside the other models, in a copy of the repository."""
    (copy / "model_mine.py").write_text(guides_own_row(), encoding="utf-8")
    shutil.copytree(ROOT / "tests", copy / "tests")
    for name in ("GUIDE.md", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    out, _ = process(copy, "-m", "pytest", "-n", 0, "-p", "no:cacheprovider", "test_all.py",
                     "tests/test_models.py", "tests/test_drift.py", "tests/test_house.py",
                     "-k", "mine or (model_file or several or whom or circle)")
    assert int(re.search(r"(\d+) passed", out)[1]) > 20


def test_what_a_model_s_name_means(copy):
    """A flag may not contradict it."""
    for name, flag, says in (("cable_nw", ("--weight",), "weight=True: what is called --model cab"),
                             ("prenorm", ("--norm", "post"), "norm=post: what is called --model")):
        assert says in complaint(copy, "train.py", "--model", name, *flag, *TINY_RUN)
    assert not (copy / "out").exists()


# -----------------------------------------------------------------------------
# a task

PARITY = '''
import numpy as np
import torch

import data


class Task(data.Task):
    """Parity: is the number of ones so far odd?"""
    vocab_size = 2
    splits = "train", "iid", "ones"

    def batch(self, split, batch_size, rng):
        share = 0.9 if split == "ones" else 0.5
        x = (rng.random((batch_size, self.block_size)) < share).astype(np.int64)
        return x, x.cumsum(1) % 2
'''
FLAGS = "--max_iters", 1, "--no-evaluate", *TINY_FLAGS


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
    (split, scores), = result["runs"][0]["scores"]["16"].items()
    assert split == "iid" and 0 <= scores["accuracy"]["value"] <= 1
    for words in (("figures.plot", "errors", run),
                  ("figures.maps", "attention", run, "--length", 6)):
        command(home, *words, "--out", "p.png")
        assert is_png(home / "p.png")
        (home / "p.png").unlink()
    command(home, "train.py", "--resume", run, "--max_iters", 3, "--no-evaluate")
    assert "writes no text" in complaint(home, "sample.py", run)


@pytest.mark.parametrize("old, new, says", [
    ("class Task(data.Task)", "class Task", "no class Task that inherits from data.Task"),
    ("class Task", "class Parity", "nor has data/bad.py a class Task"),
    ("vocab_size = 2", "vocab_size, defaults = 2, {'nano': dict(n_layers=1)}",
     "data.bad: defaults has n_layers, which is not a flag"),
    ("(batch_size, self.block_size)", "(batch_size, 20 if split == 'iid' else 16)",
     "learned positions end at block_size=16; 20 tokens do not fit")])
def test_a_bad_task_in_one_line(tasks, home, old, new, says):
    write_task(tasks, "bad", PARITY.replace(old, new))
    words = "train.py", "--model", "learned", *FLAGS
    assert says in complaint(home, *words, "--data", "bad")


def test_what_a_task_keeps(tasks, home):
    """It goes into the checkpoint and back; runs that keep something else are not compared."""
    write_task(tasks, "coded", PARITY + """
    def prepare(self, model):
        self.code = torch.randperm(99)

    def state(self):
        return dict(code=self.code)

    def load(self, state):
        self.code = state["code"]
""")
    for seed in (1, 2):
        command(home, "train.py", "--data", "coded", *FLAGS, "--seed", seed, "--out_dir", seed)
    command(home, "train.py", "--resume", "1", "--max_iters", 2, "--no-evaluate")
    kept = torch.load(home / "1" / "ckpt.pt", weights_only=True)["kept"]
    assert kept["code"].sort().values.tolist() == list(range(99))
    assert "2/ckpt.pt has another code than 1/ckpt.pt" in complaint(home, "eval.py", "1", "2")


def test_a_task_s_defaults_may_be_for_flags_of_other_models(tasks):
    """P is a flag of CoPE alone; --n_layer is said, n_head comes from the task."""
    write_task(tasks, "my-task", PARITY.replace(
        "vocab_size = 2", "vocab_size, defaults = 2, dict(tiny=dict(n_head=2, n_embd=16, P=5))"))
    for name in ("cope", "rope"):
        c = new_settings(["--data", "my-task", "--n_layer", "1", "--model", name])
        assert (c.size, c.n_head, c.n_layer) == ("tiny", 2, 1)
        assert getattr(c, "P", None) == (5 if name == "cope" else None)
