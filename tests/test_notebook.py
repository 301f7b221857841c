"""results/GUIDE.ipynb: it is made of GUIDE.md, and its cells run in order."""
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.helpers import ROOT, is_png

FILE = ROOT / "results" / "GUIDE.ipynb"
NOTEBOOK = json.loads(FILE.read_text(encoding="utf-8"))


def test_the_notebook_is_what_the_guide_says():
    """Word for word; a picture is in the output of its cell."""
    guide = (ROOT / "GUIDE.md").read_text(encoding="utf-8").replace("](results/", "](")
    guide = re.sub(r"^!\[.*\]\((.*)\)$", r'Image("results/\1")', guide, flags=re.M)
    said = "\n".join("".join(cell["source"]) for cell in NOTEBOOK["cells"])
    said = said[said.index("# Guide: "):]  # after the first cell, and a badge
    said, guide = (re.sub("^```.*", "", text, flags=re.M).split() for text in (said, guide))
    assert said == guide, "run python -m figures.notebook"
    shown = [out["data"] for cell in NOTEBOOK["cells"] for out in cell.get("outputs", [])
             if "data" in out]
    assert len(shown) == sum(word.startswith("Image(") for word in guide)
    assert all("image/png" in data for data in shown)


def test_its_cells_run_in_order_from_its_own_folder(monkeypatch):
    """Pictures are looked for, not shown."""
    def look(picture):
        assert is_png(Path(picture)), picture
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=look))
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(FILE.parent)
    namespace = {}
    for n, cell in enumerate(cells, 1):
        exec(compile(cell, f"cell {n} of GUIDE.ipynb", "exec"), namespace)
    assert len(cells) > 40 and Path.cwd() == ROOT
