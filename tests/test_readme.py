"""README.md: its lines of Python, the section that a GPU's owner is sent to."""
import re

import torch

import train
from common import names
from common.settings import new_settings
from tests.helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_lines_of_python(trained):
    """Logits and loss of a text, and more of it, from a run's folder; its weights are plain."""
    code = re.search(r"From Python:\n```python\n(.*?)```", README, re.S)[1]
    assert code.count("\n") == 4
    known = {}
    exec(code.replace("out/cable-stdlib-nano", str(trained / "cable")), known)
    assert known["logits"].shape == (1, 2, 257) and known["loss"].isfinite()
    assert known["more"].shape == (1, 100)
    weights = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)["model"]
    known["run"].model.load_state_dict(weights)


def test_a_nano_model_on_a_gpu_points_to_its_section(capsys):
    c = new_settings("--model cable --data flipflop".split())
    task = names.make_task(vars(c))
    c.vocab_size = task.vocab_size
    model = names.make_model(vars(c))
    for where, times in (("cuda:0, bfloat16", 1), ("cpu (threads: 1), float32", 0)):
        train.show_settings(c, task, model, where)
        assert capsys.readouterr().out.count("With a GPU") == times
    c.size = "paper"
    train.show_settings(c, task, model, "cuda:0, bfloat16")
    assert "With a GPU" not in capsys.readouterr().out and "\n## With a GPU\n" in README
