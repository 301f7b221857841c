"""results/weights: small, whole, and as good as they should be; nothing is written beside them."""
import re
import shutil

import numpy as np
import pytest
import torch

import eval
from common.checkpoint import load_run
from common.names import make_task, trained_on
from tests.helpers import ROOT, command, complaint

WEIGHTS = ROOT / "results" / "weights"
PATHS = sorted(WEIGHTS.glob("*/ckpt.pt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.parent.name)
def test_weights_are_small_and_have_learned_their_task(path):
    run = load_run(path)
    assert path.stat().st_size < 1.75e6 and "optimizer" not in run.checkpoint
    assert {w.dtype for w in run.checkpoint["model"].values()} == {torch.bfloat16}
    if trained_on(run.config).encoding:  # on Python that it has not seen
        code = np.frombuffer((ROOT / "model_baseline.py").read_bytes(), np.uint8)
        idx = torch.from_numpy(code[4000:4257].astype(np.int64))[None]
        assert run.model(idx[:, :-1], idx[:, 1:])[1] < 1.8  # nats a byte
    else:
        task = make_task(run.config, run.checkpoint["kept"])
        scores, _ = eval.task_scores(run.model, task, "iid", 200, 0)
        assert scores["exact_match"]["value"] > 0.9


def test_nothing_is_written_beside_weights_and_they_do_not_resume(home):
    folder = home / "results" / "weights" / "flipflop-tra"
    shutil.copytree(WEIGHTS / "flipflop-tra", folder)
    command(home, "eval.py", folder, "--sequences", 9)
    command(home, "figures.maps", "steps", folder)
    assert {"eval.json", "eval.png", "steps.png"} <= {p.name for p in (home / "out").iterdir()}
    assert "begin a new run with --init_from" in complaint(home, "train.py", "--resume", folder)
    assert [path.name for path in folder.iterdir()] == ["ckpt.pt"]


def test_weights_that_pages_name_are_there():
    for page in (ROOT / "README.md", ROOT / "GUIDE.md", WEIGHTS / "README.md"):
        named = r"(?:results/weights|\$W)/([a-z]+(?:-[a-z]+)?)(?![-\w])"
        for name in re.findall(named, page.read_text("utf-8")):
            assert (WEIGHTS / name).is_dir(), (page, name)
