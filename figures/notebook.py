"""
GUIDE.md -> a notebook of the same text, with what its code prints and its pictures.

    pip install -e ".[notebook]" && python -m figures.notebook      writes results/GUIDE.ipynb

A block of Python becomes a cell of code, and so does a picture: Colab finds no files beside a text.
Where `git remote get-url origin` is on GitHub, the notebook has a badge for Colab, and its first
cell fetches the repository there.
"""
import re
import subprocess
import sys

from common import ROOT
from common.exits import fail, in_one_line
from common.files import write_text

try:
    import jupytext
    from nbclient import NotebookClient
except ModuleNotFoundError as e:
    fail(f'{e}: pip install -e ".[notebook]"')

PICTURE = re.compile(r"^!\[.*\]\((results/.*)\)\n", re.M)
FIRST = '''\
# Run this cell first. It goes to the repository's root{fetches}.
import os
import subprocess
import sys
from pathlib import Path

from IPython.display import Image

here = Path.cwd()
places = [here, *here.parents, here / "nanoPE"]
found = [place for place in places if (place / "model_baseline.py").exists()]
{clone}if not found:
    raise FileNotFoundError(f"{{here}} is not in nanoPE's repository: open this notebook there, "
                            "where it is results/GUIDE.ipynb")
os.chdir(found[0])
sys.path.insert(0, os.getcwd())
'''
CLONE = '''\
if not found and "google.colab" in sys.modules:
    subprocess.run(["git", "clone", "--depth", "1", "https://github.com/{}", "nanoPE"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "tiktoken"], check=True)
    found = [here / "nanoPE"]  # Colab has torch, numpy and matplotlib
'''
BADGE = ("[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
         "(https://colab.research.google.com/github/{}/blob/main/results/GUIDE.ipynb)\n\n")


def address():
    """owner/name of this clone's origin on GitHub, or nothing."""
    origin = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, text=True,
                            capture_output=True).stdout.strip()
    match = re.search(r"(?:://|@)github\.com(?::\d+)?[:/]([\w.-]+/[\w.-]+?)(\.git)?/?$", origin)
    return match and match[1]


def notebook(guide, address):
    """The text of GUIDE.md -> an nbformat notebook, not run."""
    guide = PICTURE.sub(r'```python\nImage("\1")\n```\n', guide)
    guide = guide.replace("](results/", "](")  # where the notebook is
    first = FIRST.format(fetches="; on Colab it fetches the repository" if address else "",
                         clone=CLONE.format(address) if address else "")
    badge = BADGE.format(address) if address else ""
    text = f"{badge}```python\n{first}```\n\n{guide}"
    made = jupytext.reads(text, dict(extension=".md", split_at_heading=True))
    made.metadata = dict(kernelspec=dict(name="python3", display_name="Python 3"))
    for n, cell in enumerate(made.cells):
        cell.id = f"cell-{n}"
    return made


def main():
    out = ROOT / "results" / "GUIDE.ipynb"
    made = notebook((ROOT / "GUIDE.md").read_text(encoding="utf-8"), address())
    NotebookClient(made, record_timing=False, coalesce_streams=True,
                   resources=dict(metadata=dict(path=ROOT))).execute()
    write_text(out, jupytext.writes(made, "ipynb") + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
