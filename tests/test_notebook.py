"""results/GUIDE.ipynb: it is made of GUIDE.md, and its cells run in order."""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from figures.notebook import notebook
from tests.helpers import ROOT, is_png

FILE = ROOT / "results" / "GUIDE.ipynb"


@pytest.fixture
def cells(monkeypatch):
    """The cells of code. A picture is looked at, not shown; folder and path are restored."""
    def look(picture):
        assert is_png(Path(picture)), picture
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=look))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    cells = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_what_the_guide_says():
    made = notebook((ROOT / "GUIDE.md").read_text(encoding="utf-8"))
    assert json.loads(FILE.read_text(encoding="utf-8")) == made, (
        "run python -m figures.notebook")


def test_its_cells_run_in_order_from_its_own_folder(cells):
    os.chdir(FILE.parent)
    torch.manual_seed(0)
    namespace = {}
    for n, cell in enumerate(cells):
        exec(compile(cell, f"cell {n}:\n{cell}", "exec"), namespace)
    assert len(cells) > 40 and Path.cwd() == ROOT


def test_in_another_folder_its_first_cell_says_so(cells, tmp_path):
    os.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not in nanoPE's repository"):
        exec(cells[0], {})


def test_the_figures_leave_a_notebooks_backend_alone():
    """A user's own plt.show() works after them: they draw without pyplot."""
    imports = "import sys, figures.maps, figures.page, figures.plot"
    command = [sys.executable, "-c", f"{imports}; sys.exit('matplotlib.pyplot' in sys.modules)"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
