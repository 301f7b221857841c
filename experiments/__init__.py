"""
Every table and figure of the papers, one file for each paper: python reproduce.py NAME makes one.

A file has ENTRIES = {name: entry}, or SEARCHES for random searches (see minimal.py). An entry has

    about       what the paper's table is, and in which unit
    published   {row: the paper's numbers} (optional)
    columns     [(heading, split, metric)] of a task's table, in the order of published, all in %;
                without it the table is perplexity by window length. Of a matrix: {heading:
                column(...)}, see matrix.py
    cpu, paper  two scales, or one of them: minutes a run on two CPU cores, and the paper's own size
    losses      True: the table and the figure are of the loss by step (optional)
    first       the entry whose runs of the same rows and seeds the runs begin with (optional)
    group       entries of one group share their runs (optional)
    also        {key: function}: what else the JSON holds (optional)

A scale of an ENTRY has train and eval (the flags of train.py and eval.py for all rows) and rows,
{row: (its own flags for train.py, how many seeds)}. A matrix (matrix.py) has in their place tasks,
{task: both}: every row on every task. One of a SEARCH has trials, steps and panels; its entry has

    metric      tvd, auc, accuracy or precision
    schemes     where the norms sit, as in model_postnorm.SCHEMES; none is no norm
    peak        the highest learning rate that a trial draws (optional)
    ema         True: the moving average of the weights beside them and BEMA (optional)

All scales may have

    note         what differs from the paper
    reads        sentences that say what the result shows
    minutes      of one run, where no result says how long it takes
    contrast     the row whose curve is drawn dashed beside a reader's own run
    published_at the window lengths of published, whose numbers then stand beside ours

NUMBERED = {"Table 1": names} says what each of a paper's tables and figures is here: its entries
and sections, or in words why there is none.

SECTIONS = {name: section} are other parts of results/README.md: JSON and pictures that eval.py,
bench.py or maps.py made. A section has about, commands, reads; json, names of files in results/,
with the function of tables.py that makes markdown of them; figures, also in results/.

reads are sentences under the table: what was measured, and what was not. The file's docstring heads
its part of the page.
"""
import functools
import importlib
import sys
from pathlib import Path

ORDER = ("matrix", "lm", "cable", "tra", "cope", "postnorm", "speed", "reliability")


@functools.cache
def files():
    """Every module here that imports; one that does not is named on stderr."""
    names = [p.stem for p in Path(__file__).parent.glob("*.py") if p.stem != "__init__"]
    found = []
    for name in sorted(names, key=lambda name: ((*ORDER, name).index(name), name)):
        try:
            found.append(importlib.import_module(f"experiments.{name}"))
        except (Exception, SystemExit) as e:
            print(f"warning: experiments/{name}.py does not import: {e}", file=sys.stderr)
    return found


def entries(module):
    """{name: entry} of one file."""
    return getattr(module, "ENTRIES", {}) | getattr(module, "SEARCHES", {})


def known():
    """{name: entry} of all files."""
    found = {}
    for module in files():
        found |= entries(module)
    return found


def sections():
    """{name: section} of all files."""
    found = {}
    for module in files():
        found |= getattr(module, "SECTIONS", {})
    return found


def owners(name):
    """The files that have an entry of this name."""
    return [f"{m.__name__.replace('.', '/')}.py" for m in files() if name in entries(m)]


def seeds(n, *models, flags=""):
    """{model: (its flags for train.py, how many seeds)}"""
    return {m: (f"--model {m} {flags}".strip(), n) for m in models}
