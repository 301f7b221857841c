"""
The pages of results/ are written by hand, but for their tables: a block

    <!-- table NAME -->
    <!-- /table -->

is filled by reproduce.py and by

    python -m experiments.pages

NAME is an entry, with all of its scales that have runs, a JSON file in results/ without its ending,
or not_run. The first table of a block is open, the others are folded. Below is the command that
makes it, where its runs are, and on what they ran.
"""
import re
import sys

from common import ROOT
from common.exits import fail, in_one_line, nearest
from common.files import read_json, write_text
from experiments import FOLDER, SCALES, entries, find, tables

BLOCK = re.compile(r"(<!-- table (\S+) -->\n)(?:(?!<!-- table ).)*?(<!-- /table -->)", re.S)


def fill():
    """Every block of every page, anew."""
    for path in sorted((ROOT / "results").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if text.count("\n<!-- table ") > len(BLOCK.findall(text)):
            fail(f"results/{path.name}: a block has no <!-- /table -->")
        filled = BLOCK.sub(lambda found, page=path.name: filled_block(found, page), text)
        if filled != text:
            write_text(path, filled)
            print(f"wrote results/{path.name}")


def filled_block(found, page):
    name = found[2]
    file = ROOT / "results" / f"{name}.json"
    if name == "not_run":
        text = f"\n{not_run()}\n\n"
    elif name in entries():
        text = "\n" + of_entry(name)
    elif file.exists():
        result = read_json(file)
        text = f"\n{folded(tables.tables_in(result))}\n\n{where(result['command'], [result])}\n\n"
    else:
        fail(f"results/{page} has a block for {name!r}, which is neither an entry nor a JSON in "
             f"results/: remove the block, or {nearest(name, entries())}")
    return found[1] + text + found[3]


def of_entry(name):
    """The tables of an entry at all of its scales."""
    parts, found = [], [find(name, scale) for scale in SCALES if scale in entries()[name]]
    for table in found:
        runs = tables.runs_of(table)
        if runs:
            texts = tables.tables_of(table, runs)
            said = where(command_of(table), runs, f"[runs](runs/{table.runs.name})",
                         table.part.get("note"))
            head = "At the paper's size:\n\n" if table.scale == "paper" else ""
            parts.append(f"{head}{folded(texts)}\n\n{said}\n\n")
    return "".join(parts) or f"Not run yet: `{command_of(found[0])}`\n\n"


def command_of(table):
    words = f"python reproduce.py {table.name}"
    words += f" --scale {table.scale}" if table.scale != "cpu" else ""
    return words + (f" --data {FOLDER}" if FOLDER in table.part.get("train", "") else "")


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


def where(command, results, *said):
    """A small line: the command, and on which machines and by which commits it was run."""
    made = []
    for result in results:
        parts = [*result.get("runs", ()), *result.get("schemes", {}).values(), result]
        made += [part["environment"] for part in parts if "environment" in part]

    def all_of(key):
        return ", ".join(sorted({str(e[key]) for e in made}))
    processors = " and ".join(sorted({e["gpu"] or e["cpu"] for e in made}))
    parts = [f"`{command}`", *filter(None, said), processors,
             f"threads: {all_of('threads')}, torch {all_of('torch')}, Python {all_of('python')}, "
             f"commits {all_of('commit')}"]
    return f"<sub>{'; '.join(parts)}</sub>"


def not_run():
    """A row for each table beyond the CPU's scale that has no run yet."""
    rows = []
    for name, entry in entries().items():
        for scale in [scale for scale in SCALES[1:] if scale in entry and "runs" not in entry]:
            table = find(name, scale)
            if not any(table.runs.rglob("*.json")):
                rows.append([entry["title"].partition(":")[0], f"`{command_of(table)}`"])
    return tables.markdown(["table", "command"], rows)


if __name__ == "__main__":
    sys.excepthook = in_one_line
    fill()
