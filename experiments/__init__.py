"""
Every table and figure of the papers: python reproduce.py NAME makes one.

A file here has ENTRIES = {name: entry}, and NUMBERED = {"Table 1": names}, which entries, or other
results, a paper's tables and figures are; or in words why there is none. An entry has

    title       what the paper calls it, and in which unit
    published   {row: the paper's numbers} (optional)
    columns     [(heading, split, metric)] of a task's table, in the order of published, all in %;
                without it the table is perplexity by window length. Of a matrix: {heading:
                column(...)}, see matrix.py
    losses      True: the table and the figure are of the loss by step (optional)
    first       the entry whose runs of the same rows and seeds the runs begin with (optional)
    group       entries of one group share their trainings (optional)
    runs        the entry whose runs these are, shown in another way (optional)
    cpu, paper  two scales, or one of them: minutes a run on two CPU cores, and the paper's own size

A scale has train and eval (flags of train.py and eval.py for all rows) and rows, {row: Row or a
tuple of its fields}. A matrix (matrix.py) has in place of the first two tasks, {task: both}: every
row on every task. A random search (search.py) has trials, steps and panels; its entry has

    metric      tvd, auc, accuracy or precision
    schemes     where the norms sit, as in model_postnorm.SCHEMES; none is no norm
    peak        the highest learning rate that a trial draws (optional)
    ema         True: the moving average of the weights beside them and BEMA (optional)

All scales may have

    note         what differs from the paper
    minutes      of one run, where no result says how long it takes
    published_at the window lengths of published, whose numbers then stand beside ours
    gone         which commits made it, where the code of today cannot any more

A run is a file, results/runs/ENTRY.SCALE/[TASK/]ROW-SEED.json, or of a search ENTRY.SCALE/PANEL
.json. What is there is used, what is absent is made.
"""
import functools
import importlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

from common.files import fail
from common.names import nearest

ORDER = ("matrix", "lm", "cable", "tra", "cope", "postnorm")


class Row(NamedTuple):
    """A row of a table. With `of` it evaluates the trainings of another row, as `eval` says."""
    train: str = ""  # its own flags for train.py
    seeds: int = 1   # how many
    of: str = ""     # the row whose trainings it evaluates
    eval: str = ""   # its own flags for eval.py


def rows(n, *models, flags=""):
    """{model: Row} with n seeds each."""
    return {m: Row(f"--model {m} {flags}".strip(), n) for m in models}


# -----------------------------------------------------------------------------
# entries

@functools.cache
def files():
    """Every module here with ENTRIES. One that does not import is named on stderr."""
    modules = []
    paths = sorted(Path(__file__).parent.glob("*.py"))
    paths.sort(key=lambda path: (*ORDER, path.stem).index(path.stem))
    for path in paths:
        if re.search(r"^ENTRIES\b", path.read_text(encoding="utf-8"), re.M):
            try:
                modules.append(importlib.import_module(f"experiments.{path.stem}"))
            except (Exception, SystemExit) as e:  # a file of yours may fail in any way
                print(f"warning: experiments/{path.name} is left out: {e!r}", file=sys.stderr)
    return modules


def entries():
    """{name: entry} of all files."""
    both = {}
    for module in files():
        for name, entry in module.ENTRIES.items():
            if name in both:
                fail(f"two files of experiments/ have an entry {name}: rename it in one of them")
            both[name] = entry
    return both


def find(name, scale):
    """-> an entry and one of its scales, the rows being Rows. What is not there ends here."""
    if name not in entries():
        fail(f"unknown entry {name!r}: {nearest(name, entries())}")
    entry = entries()[name]
    if scale not in entry:
        fail(f"{name} has no --scale {scale}")
    part = entry[scale]
    if "rows" in part:
        part = part | dict(rows={label: Row(*row) for label, row in part["rows"].items()})
    return entry, part


def by_task(scale):
    """A scale of several tasks as one of each: {task: scale}."""
    if "tasks" not in scale:
        return {"": scale}
    return {name: part | dict(rows=scale["rows"]) for name, part in scale["tasks"].items()}
