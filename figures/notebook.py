"""
GUIDE.md -> a notebook of the same text, whose code runs cell by cell.

    python -m figures.notebook      writes results/GUIDE.ipynb

A block of Python becomes a cell of code, and so does a picture, which the cell shows when it runs:
Colab finds no files beside a text. The address to clone is the one in GUIDE.md's link to Colab.
"""
import json
import re
import sys

from common import ROOT
from common.exits import in_one_line
from common.files import write_text

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.S | re.M)
PICTURE = re.compile(r"^!\[.*\]\((results/.*)\)\n", re.M)
FIRST = '''\
# Run this cell first. It goes to the repository's root; on Colab it fetches the repository.
import os
import subprocess
import sys
from pathlib import Path

from IPython.display import Image

here = Path.cwd()
places = [here, *here.parents, here / "nanoPE"]
found = [place for place in places if (place / "model_baseline.py").exists()]
if not found and "google.colab" in sys.modules:
    subprocess.run(["git", "clone", "--depth", "1", "https://github.com/{address}"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "tiktoken"], check=True)
    found = [here / "nanoPE"]  # Colab has torch, numpy and matplotlib
if not found:
    raise FileNotFoundError(f"{{here}} is not in nanoPE's repository: open this notebook there, "
                            "where it is results/GUIDE.ipynb")
os.chdir(found[0])
sys.path.insert(0, os.getcwd())
'''


def notebook(guide):
    """The text of GUIDE.md -> what is in the notebook's file, by nbformat 4.4."""
    address = re.search(r"colab\.research\.google\.com/github/(\S+?)/blob/", guide)[1]
    guide = PICTURE.sub(r'```python\nImage("\1")\n```\n', guide)
    guide = guide.replace("](results/", "](")  # where the notebook is
    parts = BLOCK.split(guide)                 # text, code, text, ...
    cells = [cell("code", FIRST.format(address=address))]
    for n, part in enumerate(parts):
        if n % 2:
            cells.append(cell("code", part))
        else:
            sections = re.split(r"^(?=#+ )", part, flags=re.M)
            cells += [cell("markdown", section) for section in sections if section.strip()]
    kernel = dict(name="python3", display_name="Python 3", language="python")
    return dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=4)


def cell(kind, text):
    lines = text.strip("\n").splitlines(keepends=True)
    if kind == "markdown":
        return dict(cell_type=kind, metadata={}, source=lines)
    return dict(cell_type=kind, execution_count=None, metadata={}, outputs=[], source=lines)


def main():
    out = ROOT / "results" / "GUIDE.ipynb"
    made = notebook((ROOT / "GUIDE.md").read_text(encoding="utf-8"))
    write_text(out, json.dumps(made, indent=1) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
