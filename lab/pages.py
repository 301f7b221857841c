"""
The pages of results/ are written by hand, but for their tables: a block

    <!-- table NAME -->
    <!-- /table -->

is filled by reproduce.py and by

    python -m lab.pages

NAME is an entry, with all of its scales that have runs, a JSON file in results/ without its ending,
or not_run. The first table of a block is open, the others are folded. Below is the command that
makes it, where its runs are, and on what they ran.
"""
import re
import sys

from common import ROOT
from common.exits import in_one_line
from common.files import read_json, write_text
from lab import FOLDER, SCALES, entries, find, tables

BLOCK = re.compile(r"(<!-- table (\S+) -->\n)(?:(?!<!-- table ).)*?(<!-- /table -->)", re.S)


def fill():
    """Every block of every page, anew."""
    for path in sorted((ROOT / "results").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        filled = BLOCK.sub(filled_block, text)
        if filled != text:
            write_text(path, filled)
            print(f"wrote results/{path.name}")


def filled_block(found):
    begin, name, end = found.groups()
    file = ROOT / "results" / f"{name}.json"
    if name == "not_run":
        text = not_run()
    elif file.exists():
        result = read_json(file)
        text = f"{folded(tables.tables_in(result))}\n\n{where(result['command'], [result])}"
    else:
        text = of_entry(name)
    return f"{begin}\n{text}\n\n{end}"


def of_entry(name):
    """The tables of an entry at all of its scales."""
    parts = []
    scales = [scale for scale in SCALES if scale in entries().get(name, SCALES)]
    for table in [find(name, scale) for scale in scales]:
        runs = tables.runs_of(table)
        if runs:
            parts += ["At the paper's size:"] if table.scale == "paper" else []
            parts.append(folded(tables.tables_of(table, runs)))
            parts.append(where(command_of(table), runs, f"[runs](runs/{table.runs.name})",
                               table.part.get("note")))
    return "\n\n".join(parts) or f"Not run yet: `{command_of(find(name, scales[0]))}`"


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
            parts += [f"<details><summary>{summary}</summary>", more.strip(), text, "</details>"]
        else:
            parts += [caption, text]
    return "\n\n".join(filter(None, parts))


def where(command, results, *said):
    """A small line: the command, and on which machines and by which commits it was run."""
    made = []
    for result in results:
        parts = [*result.get("runs", ()), *result.get("schemes", {}).values(), result]
        made += [part["environment"] for part in parts if "environment" in part]

    def all_of(key):
        return ", ".join(sorted({str(e[key]) for e in made}))
    processors = " and ".join(sorted({e["gpu"] or e["cpu"] for e in made}))
    today = command.replace("-m kernels.bench", "-m lab.bench")  # older runs have that name
    parts = [f"`{today}`", *filter(None, said), processors,
             f"threads: {all_of('threads')}, torch {all_of('torch')}, Python {all_of('python')}, "
             f"commits {all_of('commit')}"]
    return f"<sub>{'; '.join(parts)}</sub>"


def not_run():
    """A row for each table beyond the CPU's scale that has no run yet, or a search half done."""
    rows = []
    for name, entry in entries().items():
        for scale in [scale for scale in SCALES[1:] if scale in entry and "runs" not in entry]:
            table = find(name, scale)
            runs = tables.runs_of(table)
            schemes = set(table.part.get("schemes", entry.get("schemes", ())))
            begun = any(schemes - run["schemes"].keys() for run in runs if "schemes" in run)
            if begun or not runs:
                rows.append([entry["title"].partition(":")[0], f"`{command_of(table)}`"])
    return tables.markdown(["table", "command"], rows)


if __name__ == "__main__":
    sys.excepthook = in_one_line
    fill()
