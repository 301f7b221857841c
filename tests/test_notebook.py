"""results/GUIDE.ipynb: it is made of GUIDE.md, and its cells run in order."""
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from figures.notebook import notebook
from tests.helpers import ROOT, is_png
from tests.test_house import imports

FILE = ROOT / "results" / "GUIDE.ipynb"


@pytest.fixture
def cells(monkeypatch):
    """The cells of code. Pictures are looked for, not shown; folder and path are restored."""
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
    namespace = {}
    for n, cell in enumerate(cells, 1):
        exec(compile(cell, f"cell {n} of GUIDE.ipynb", "exec"), namespace)
    assert len(cells) > 40 and Path.cwd() == ROOT


def test_in_another_folder_its_first_cell_says_so(cells, tmp_path):
    os.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not in nanoPE's repository"):
        exec(cells[0], {})


def test_figures_leave_a_notebooks_own_alone():
    """They are drawn without pyplot: no backend is switched, and none is left open."""
    for path in (ROOT / "figures").glob("*.py"):
        assert "matplotlib.pyplot" not in imports(path), path
