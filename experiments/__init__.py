"""
Every table and figure of the papers: python reproduce.py NAME makes one.

    papers/     what is run, a file a paper: rows and flags; papers.json has the papers' own sizes
                and numbers
    variants/   models that exist for one table
    jobs.py     the engine: is the JSON of a run there? Else train.py and eval.py make it
    costs.py    how long it takes, and what of it has not been run
    search.py   Post-Norm's random search
    runs.py     the JSON in results/runs/ -> tables.py (Markdown), figures.py, pages.py

A table of your own is a file in papers/, or an entry in one:

    ENTRIES = {"mine": dict(title="Mine on flip-flop", columns=[("iid", "iid", "exact_match")],
                            cpu=dict(train="--data flipflop --max_iters 1000",
                                     eval="--sequences 500", rows=rows(3, "fox", "mine")))}

An entry has

    title       what the paper calls it, and in which unit
    columns     [(heading, split, metric)] of a task's table, in the order of the paper's numbers,
                all in %; without it the table is perplexity by window length
    cpu, gpu, paper
                its scales: minutes a run on two CPU cores, on one GPU, and the paper's own size

and where it needs them

    losses      True: the table and the figure are of the loss by step
    steps       True: a second figure, of the scores by step
    first       the entry whose runs of the same rows (or Row.first) and seeds the runs begin with
    group       entries of one group share their trainings
    runs        the entry whose runs these are, shown in another way; it has its scales, too
    published   the entry whose numbers of the paper it has
    beside      an entry of text, for a second figure: what survives, and what reads
    papers      {heading: (entry, n, more)}: whose n-th numbers stand beside lm's in a second table

A scale has train and eval (flags of train.py and eval.py for all rows) and rows, {row: Row}; a
matrix has tasks, {task: train and eval}; a random search panels (search.py). It may have a note
(what differs from the paper) and published_at (the window lengths of the paper's numbers). In its
flags FOLDER is the text that reproduce.py --data names.
"""
import functools
import importlib
import json
from pathlib import Path
from typing import NamedTuple

from common.files import fail
from common.names import nearest

PAPERS = Path(__file__).parent / "papers"
SCALES = "cpu", "gpu", "paper"
REPAIRS = "pi", "ntk", "yarn", "rerope", "selfextend", "window", "sinks", "log_n"  # of RoPE


class Row(NamedTuple):
    """A row of a table. With `of` it evaluates the trainings of another row, as `eval` says."""
    train: str = ""  # its own flags for train.py
    seeds: int = 1   # how many
    of: str = ""     # the row whose trainings it evaluates
    eval: str = ""   # its own flags for eval.py
    first: str = ""  # the row of the entry's `first` that it begins with, where it is another


def rows(n, *models, flags=""):
    """{model: Row} with n seeds each."""
    return {m: Row(f"--model {m} {flags}".strip(), n) for m in models}


def repaired(seeds, *repairs):
    """The trainings of the row rope, repaired at test time (rivals/rope.py)."""
    return {f"rope, {repair}": Row(seeds=seeds, of="rope", eval=f"--set repair={repair}")
            for repair in repairs}


@functools.cache
def added():
    """{file: {entry: what papers.json adds}}: a paper's numbers, and its own size as a scale."""
    parts = json.loads((PAPERS / "papers.json").read_text(encoding="utf-8"))
    for entry in (entry for part in parts.values() for entry in part.values()):
        scale = entry.get("paper", {})
        if "train" in scale:
            n = scale.get("seeds", 1)
            table = rows(n, *scale.get("models", ()))
            table |= {label: Row(flags, n) for label, flags in scale.get("rows", {}).items()}
            table |= {label: Row(flags) for label, flags in scale.get("once", {}).items()}
            scale["rows"] = table
    return parts


@functools.cache
def files():
    """Every module of papers/."""
    return [importlib.import_module(f"experiments.papers.{path.stem}")
            for path in sorted(PAPERS.glob("[!_]*.py"))]


def of_file(module):
    """{name: entry} of one file, with what papers.json adds."""
    more = added().get(module.__name__.rpartition(".")[2], {})
    names = dict.fromkeys([*module.ENTRIES, *more])
    parts = {name: module.ENTRIES.get(name, {}) | more.get(name, {}) for name in names}
    for name, entry in parts.items():
        shown = parts.get(entry.get("runs"), {})
        parts[name] = {scale: shown[scale] for scale in SCALES if scale in shown} | entry
    return parts


def entries():
    """{name: entry} of all files."""
    return {name: entry for module in files() for name, entry in of_file(module).items()}


def find(name, scale):
    """-> an entry and one of its scales. What is not there ends here."""
    if name not in entries():
        fail(f"unknown entry {name!r}: {nearest(name, entries())}")
    entry = entries()[name]
    if scale not in entry:
        fail(f"{name} has no --scale {scale}: {nearest(scale, [s for s in SCALES if s in entry])}")
    return entry, entry[scale]
