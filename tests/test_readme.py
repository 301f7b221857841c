"""README.md: its lines of Python, the section that a GPU's owner is sent to."""
import re

import torch

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
