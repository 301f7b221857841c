"""
Every table and figure of the papers: python reproduce.py NAME makes one.

    papers/       what is run, a file a paper: rows and flags; papers.json has the papers' numbers
    variants/     models that exist for one table
    bert/         CABLE's section 5.2: an encoder, masked tokens, a search for documents
    search.py     Post-Norm's random search
    bench.py      speed and memory
    tables.py     the JSON in results/ -> Markdown; figures.py draws it, pages.py fills the pages
    exercises.py  for readers: a method's logits, written by you and checked

A table of your own is a file in papers/, or an entry in one:

    '''What I try'''
    from lab import Row, rows

    ENTRIES = {"mine": dict(title="Mine on flip-flop, exact match (%)",
                            columns=[("iid", "iid", "exact_match")],
                            cpu=dict(train="--data flipflop --max_iters 1000",
                                     eval="--sequences 500", rows=rows(3, "fox", "mine") | {
                                         "slower": Row("--model mine --learning_rate 1e-3")}))}

The file's docstring heads it in the list. `python reproduce.py mine` makes it: its runs are in
results/runs/mine.cpu, its trainings in out/mine.cpu, its picture is results/mine.cpu.png. A page
in results/ shows it where it has the lines <!-- table mine --> and <!-- /table -->. After an edit
of its flags remove the runs and the trainings that these change: what is there is used.

An entry has

    title       what the paper calls it, and in which unit
    columns     [(heading, split, metric)] of a task's table, all in %, in the order of the paper's
                numbers: splits and metrics are those that eval.py prints, and the longest
                length has a column, too; without it the table is perplexity by window length.
                A matrix has {heading: column} (papers/matrix.py)
    cpu, gpu, paper
                its scales: minutes a run on two CPU cores, on one GPU, and the paper's own size

and where it needs them

    losses      True: the table is of the last losses, the figure of the loss by step
    steps       True: a second figure, of the scores by step
    begins_with the entry whose runs of the same rows (or Row.begins_with) and seeds the runs go
                on from
    trained_in  its folder in out/ (default: its name, or that of `runs`): entries that name the
                same one share their trainings
    runs        the entry whose runs these are, shown in another way
    published   the entry whose numbers of the paper it has
    papers      {heading: (entry, n)}: whose n-th numbers stand beside it in a second table
    drawn       the rows of its picture (default: all)
    plotted_against
                an entry of text, for a second figure: what survives, and what reads

A scale has train and eval (flags of train.py and eval.py for all rows) and rows, {row: Row}; a
matrix has tasks, {task: train and eval}; a random search panels (search.py). It may have a note
(what differs from the paper) and published_at (the window lengths of the paper's numbers). In its
flags FOLDER is the text that reproduce.py --data names.
"""
import functools
import importlib
import re
from pathlib import Path
from typing import NamedTuple

from common import ROOT
from common.exits import fail, nearest
from common.files import read_json

PAPERS = Path(__file__).parent / "papers"
SCALES = "cpu", "gpu", "paper"
FOLDER = "FOLDER"  # in flags: the text that --data names
REPAIRS = "pi", "ntk", "yarn", "rerope", "selfextend", "window", "sinks", "log_n"  # of RoPE


class Row(NamedTuple):
    """A row of a table."""
    train: str = ""        # its own flags for train.py
    seeds: int = 1         # how many
    weights_of: str = ""   # the row whose trainings it evaluates instead, as `eval` says
    eval: str = ""         # its own flags for eval.py
    begins_with: str = ""  # the row of the entry's `begins_with`, where it is another


def rows(n, *models, flags=""):
    """{model: Row} with n seeds each."""
    return {m: Row(f"--model {m} {flags}".strip(), n) for m in models}


def repaired(seeds, *repairs):
    """The trainings of the row rope, repaired at test time (rivals/rope.py)."""
    return {f"rope, {repair}": Row(seeds=seeds, weights_of="rope", eval=f"--set repair={repair}")
            for repair in repairs}


def files():
    """Every module of papers/."""
    return [importlib.import_module(f"lab.papers.{path.stem}")
            for path in sorted(PAPERS.glob("[!_]*.py"))]


def entries():
    """{name: entry} of all files."""
    found = {}
    for module in files():
        for name in found.keys() & module.ENTRIES.keys():
            fail(f"{module.__name__} has an entry {name!r}, and so has another file: rename yours")
        found |= module.ENTRIES
    return found


class Table(NamedTuple):
    """An entry at one of its scales."""
    name: str
    scale: str
    entry: dict
    part: dict   # of the entry, what the scale has

    @property
    def runs(self):
        """The folder of its runs: that of another entry, where it shows these in another way."""
        return ROOT / "results" / "runs" / f"{self.entry.get('runs', self.name)}.{self.scale}"

    @property
    def trainings(self):
        name = self.entry.get("trained_in", self.entry.get("runs", self.name))
        return Path("out") / f"{name}.{self.scale}"

    @property
    def added(self):
        """Where everything is that rows make which the entry lacks."""
        return Path("out") / f"{self.name}.{self.scale}" / "added"


def find(name, scale):
    """-> Table. What is not there ends here."""
    known = entries()
    if name not in known:
        fail(f"unknown entry {name!r}: {nearest(name, known)}")
    entry = known[name]
    if scale not in entry:
        fail(f"{name} has no --scale {scale}: {nearest(scale, [s for s in SCALES if s in entry])}")
    return Table(name, scale, entry, entry[scale])


@functools.cache
def published():
    """{entry: {row: its numbers, or [mean, standard deviation]}} of the papers."""
    return read_json(PAPERS / "papers.json")


def slug(words):
    """As a file is called."""
    return re.sub(r"[^\w.]+", "-", words).strip("-")
