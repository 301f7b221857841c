"""
Every table and figure of the papers: python reproduce.py NAME makes one.

    ENTRIES = {"mine": dict(title="Mine on flip-flop", columns=[("iid", "iid", "exact_match")],
                            cpu=dict(train="--data flipflop --max_iters 1000", minutes=3,
                                     eval="--sequences 500", rows=rows(3, "fox", "mine")))}

A file here has ENTRIES = {name: entry}, and NUMBERED = {"Table 1": names}: what a paper's tables
and figures are here, or in words why they are not. The papers' numbers are in papers.json, by
entry. An entry has

    title       what the paper calls it, and in which unit
    columns     [(heading, split, metric)] of a task's table, in the order of the paper's numbers,
                all in %; without it the table is perplexity by window length. See also matrix.py
    cpu, paper  its scales: minutes a run on two CPU cores, and the paper's own size

and where it needs them

    losses      True: the table and the figure are of the loss by step
    steps       True: a second figure, of the scores by step
    first       the entry whose runs of the same rows and seeds the runs begin with
    group       entries of one group share their trainings
    runs        the entry whose runs these are, shown in another way
    published   the entry whose numbers in papers.json it has
    beside      an entry of text, for a second figure: what survives, and what reads

A scale has train and eval (flags of train.py and eval.py for all rows) and rows, {row: Row}; a
matrix has tasks, {task: train and eval}; a random search panels (search.py). It may have a note
(what differs from the paper), minutes (of a run that was not measured yet) and published_at (the
window lengths of the paper's numbers, which then stand beside ours).
"""
import functools
import importlib
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from common.files import fail
from common.names import nearest

HERE = Path(__file__).parent
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


def repaired(seeds, *repairs):
    """The trainings of the row rope, repaired at test time (rivals/rope.py)."""
    return {f"rope, {repair}": Row(seeds=seeds, of="rope", eval=f"--set repair={repair}")
            for repair in repairs}


@functools.cache
def papers():
    """{entry: {row: the paper's numbers}}"""
    return json.loads((HERE / "papers.json").read_text(encoding="utf-8"))


@functools.cache
def files():
    """Every module here with ENTRIES. One that does not import is named on stderr."""
    modules = []
    paths = sorted(HERE.glob("*.py"))
    for path in sorted(paths, key=lambda path: (*ORDER, path.stem).index(path.stem)):
        if re.search(r"^ENTRIES\b", path.read_text(encoding="utf-8"), re.M):
            try:
                modules.append(importlib.import_module(f"experiments.{path.stem}"))
            except (Exception, SystemExit) as e:  # a file of yours may fail in any way
                print(f"warning: experiments/{path.name} is left out: {e!r}", file=sys.stderr)
    return modules


def entries():
    """{name: entry} of all files."""
    return {name: entry for module in files() for name, entry in module.ENTRIES.items()}


def find(name, scale):
    """-> an entry and one of its scales. What is not there ends here."""
    if name not in entries():
        fail(f"unknown entry {name!r}: {nearest(name, entries())}")
    entry = entries()[name]
    if scale not in entry:
        fail(f"{name} has no --scale {scale}")
    return entry, entry[scale]


def by_task(scale):
    """A scale of several tasks as one of each: {task: scale}."""
    if "tasks" not in scale:
        return {"": scale}
    return {name: part | dict(rows=scale["rows"]) for name, part in scale["tasks"].items()}
