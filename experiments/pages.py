"""
The pages of results/ are written by hand, but for their tables: a block

    <!-- table NAME -->
    <!-- /table -->

is filled by reproduce.py NAME, and every block of every page by

    python -m experiments.pages

NAME is an entry, with all of its scales that have runs, a JSON file in results/ without its ending,
methods (methods.py) or not_run (costs.py). The first table of a block is open, the others are
folded. Below is the first run's command, and folded where and by which commits all runs were made,
and in which flags rows differ.
"""
import re
import shlex
import sys

from common.files import ROOT, fail, in_one_line, read_json, write_text
from common.names import nearest
from experiments import SCALES, costs, entries, find, methods, speed, tables, trials
from experiments.runs import once, table

BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- /table -->)", re.S)


def fill():
    """Every block of every page, anew."""
    for path in sorted((ROOT / "results").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        filled = BLOCK.sub(lambda found, page=path.name: filled_block(found, page), text)
        if filled != text:
            write_text(path, filled)
            print(f"wrote results/{path.name}")


def filled_block(found, page):
    name = found[2]
    known = name.removesuffix("_papers") in entries() or name in ("methods", "not_run")
    if not known and not (ROOT / "results" / f"{name}.json").exists():
        fail(f"results/{page} has a block for {name!r}, which is neither an entry nor a JSON in "
             f"results/: remove the block, or {nearest(name, entries())}")
    return found[1] + block(name) + found[3]


def block(name):
    """The tables of an entry, or of a JSON file, with a small line on where they are from."""
    if name == "methods":
        return f"\n{methods.methods_table()}\n\n"
    if name == "not_run":
        return f"\n{costs.not_run()}\n\n"
    entry = name.removesuffix("_papers")
    if entry not in entries():
        result = read_json(ROOT / "results" / f"{name}.json")
        return f"\n{folded(written(result))}\n\n{footer(result)}\n\n"
    scales = [scale for scale in SCALES if scale in entries()[entry]]
    if name != entry:
        scales = scales[:1]
    parts = [at_scale(name, entry, scale) for scale in scales]
    return "\n" + ("".join(parts) or f"Not run yet: `{costs.command_of(entry, scales[0])}`\n\n")


def at_scale(name, entry, scale):
    """The tables of an entry at one of its scales; nothing where it has no run."""
    result = table(entry, scale)
    if not (result.get("runs") or result.get("panels")):
        return ""
    texts = written(result) if name == entry else tables.papers_tables(result, of_papers())
    note = find(entry, scale)[1].get("note")
    said = [f"All runs: `{costs.command_of(entry, scale)}`", *([note] if note else [])]
    head = "At the paper's size:\n\n" if scale == "paper" else ""
    return f"{head}{folded(texts)}\n\n{footer(result, said)}\n\n"


def written(result):
    """-> [(caption, table), ...] of what experiments/runs.py, eval.py or kernels/bench.py have."""
    if "panels" in result:
        return trials.search_tables(result)
    if "losses" in result:
        return tables.losses_tables(result)
    if "cells" in result:
        return tables.matrix_tables(result)
    if "runs" not in result:
        return speed.bench_tables(result)
    run = result["runs"][0]
    if "search" in run:
        return tables.retrieval_tables(result)
    return tables.task_tables(result) if "scores" in run else tables.text_tables(result)


def show(result):
    """The tables, on the terminal."""
    print("\n\n".join(part for pair in written(result) for part in pair if part))


def of_papers():
    """{heading: {row of lm: the n-th of an entry's numbers, or what has none of its own}}"""
    columns = {}
    for heading, (name, n, words) in entries()["lm"]["papers"].items():
        numbers = entries()[name]["numbers"]
        columns[heading] = {row: ys[n] for row, ys in numbers.items() if n < len(ys)} | words
    return columns


def folded(texts):
    """The first table, the others behind their captions."""
    parts = []
    for n, (caption, text) in enumerate(texts):
        if n and text:
            summary, _, more = caption.partition(":")
            parts += [f"<details><summary>{summary}</summary>", *filter(None, [more.strip()]),
                      text, "</details>"]
        else:
            parts += [part for part in (caption, text) if part]
    return "\n\n".join(parts)


# -----------------------------------------------------------------------------
# where a table is from

def footer(result, said=()):
    """The first run's command in a small line; folded, what else is known of all of them."""
    runs = [scheme for panel in result.get("panels", []) for scheme in panel["schemes"].values()]
    runs = runs or result.get("runs", [])
    first = (result.get("panels") or runs or [result])[0]
    command = first.get("train_command") or first.get("command") or result["command"]
    said = [*said, *amounts(result, runs)]
    said.append(machines([run["environment"] for run in runs if "environment" in run]
                         or [result["environment"]]))
    if "train_command" in first:
        rows = [f"{label}: {words}" for label, words in differing(runs).items() if words]
        said += ["and beside the command above: " + "; ".join(rows)] if rows else []
    return (f"<sub>`{shlex.join(once(shlex.split(command)))}`</sub>\n\n"
            "<details><summary>How it was run, and on what</summary>\n\n"
            f"{'; '.join(said)}\n\n</details>")


def amounts(result, runs):
    """How much was scored, and how long all of it was trained."""
    if "queries" in result:
        yield f"{result['queries']:,} queries, {result['documents']:,} documents"
        yield f"chance {100 * result['chance']:.1f}"
    elif "sequences" in result:
        yield f"{result['sequences']:,} sequences a test set"
    elif "tokens" in result:
        yield f"{result['tokens']:,} tokens of {result['data']['source']}, {result['split']}"
    trained = {run.get("train_command", n): run.get("train_seconds", run.get("seconds", 0))
               for n, run in enumerate(runs)}  # once, of what is read in several ways
    if trained:
        yield f"{sum(trained.values()) / 60:,.0f} minutes of training"


def machines(environments):
    """On which machines and by which commits something was measured."""
    def all_of(key):
        return ", ".join(sorted({str(e[key]) for e in environments}))
    processors = " and ".join(sorted({e["gpu"] or e["cpu"] for e in environments}))
    return (f"{processors}, threads: {all_of('threads')}, torch {all_of('torch')}, "
            f"Python {all_of('python')}, commits {all_of('commit')}")


def differing(runs):
    """{row: the flags of its commands that the first run, of a matrix each task's, has not}"""
    first, own = {}, {}
    for run in runs:
        flags = flags_of(run["train_command"]) + flags_of(run["command"])
        before = [*first.setdefault(run.get("task"), flags), f"--model {run['label']}"]
        mine = own.setdefault(run["label"], {})
        mine |= {f"`{flag}`": None for flag in flags if flag not in before}
    return {label: " ".join(flags) for label, flags in own.items()}


def flags_of(command):
    """["--name value", ...], but for seeds and folders."""
    flags = re.split(r" (?=--)", shlex.join(once(shlex.split(command))))[1:]
    aside = "--seed", "--out", "--out_dir", "--init_from"
    return [flag for flag in flags if flag.split()[0] not in aside]


if __name__ == "__main__":
    sys.excepthook = in_one_line
    fill()
