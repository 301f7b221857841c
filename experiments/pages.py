"""
The pages of results/ are written by hand, but for their tables: a block

    <!-- table NAME -->
    <!-- /table -->

is filled by reproduce.py NAME, and every block of every page by

    python -m experiments.pages

NAME is an entry (NAME.paper at the paper's scale), or a JSON file in results/ without its ending.
"""
import json
import re
import sys

from common.files import ROOT, in_one_line, read_json, write_safely
from experiments import by_task, entries, find, tables
from experiments.jobs import differing, start_of
from experiments.runs import table
from experiments.speed import bench_table
from experiments.trials import search_table

BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- /table -->)", re.S)
SEVERAL = dict(cope_cut=("cope_cut", "cope_cut_end", "cope_cut_window"))  # JSON files of one block


def fill():
    """Every block of every page, anew."""
    for path in sorted((ROOT / "results").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        filled = BLOCK.sub(lambda found: found[1] + block(found[2]) + found[3], text)
        if filled != text:
            write_safely(path, lambda tmp, filled=filled: tmp.write_text(filled, encoding="utf-8"))
            print(f"wrote results/{path.name}")


def block(name):
    """The tables of an entry, or of JSON files, with a line on where they are from."""
    stem, _, scale = name.rpartition(".")
    if scale != "paper":
        stem, scale = name, "cpu"
    entry = stem.removesuffix("_papers")
    if entry in entries():
        result, command = table(entry, scale), command_of(entry, scale)
        if not (result.get("runs") or result.get("panels")):
            return f"\nNot run yet: {command}\n\n"
        text = tables.papers_table(result) if stem != entry else marked(stem, scale, result)
    else:
        files = [ROOT / "results" / f"{file}.json" for file in SEVERAL.get(name, [name])]
        results = list(map(read_json, files))
        result, text = results[0], "\n\n".join(map(markdown, results))
        command = re.sub(r"(out/\w+/)\S+( \1\S+)+", r"\1*", f"`{result['command']}`")
    return f"\n{text}\n\n{small(result, command)}\n\n"


def markdown(result):
    """The tables of what experiments/runs.py, eval.py or bench.py have about something."""
    if "panels" in result:
        return search_table(result)
    if "losses" in result:
        return tables.losses_table(result)
    if "cells" in result:
        return tables.matrix_table(result)
    if "runs" not in result:
        return bench_table(result)
    run = result["runs"][0]
    if "search" in run:
        return tables.retrieval_table(result)
    return tables.task_table(result) if "scores" in run else tables.text_table(result)


def command_of(name, scale):
    _, part = find(name, scale)
    words = f"python reproduce.py {name}"
    words += "" if scale == "cpu" else f" --scale {scale}"
    return f"`{words}`" + (f"; here {part['note']}" if "note" in part else "")


def marked(name, scale, result):
    """The tables; a row whose runs are not what the entry says today has a dagger and a note."""
    text, reasons = markdown(result), {}
    _, part = find(name, scale)
    for panel in result.get("panels", []):
        now = part["panels"][panel["name"]] | dict(steps=part["steps"])
        changed = [f"{k}={panel.get(k)}, now {v}" for k, v in json.loads(json.dumps(now)).items()
                   if panel.get(k) != v]
        reasons |= {panel["name"]: ", ".join(changed)} if changed else {}
    for run in result.get("runs", []):
        reason = otherwise(name, scale, run, result["runs"])
        if reason:
            reasons.setdefault(run["label"], reason)
    for label in reasons:
        text = re.sub(rf"^\| {re.escape(label)} ", rf"| {label} † ", text, flags=re.M)
    notes = [f"† {label}: {reason}." for label, reason in reasons.items()]
    return "\n\n".join([text, *notes])


def otherwise(name, scale, run, runs):
    """In what a run is not what its entry says today, in words."""
    entry, part = find(name, scale)
    row, task = part["rows"][run["label"]], by_task(part)[run.get("task", "")]
    train = part["rows"][row.of or run["label"]].train
    first = run["config"].get("init_from", "")
    differs = differing(run["config"], start_of(task, train, run["seed"], first)[2:])
    if differs:
        return differs
    if " ".join(f"{task['eval']} {row.eval}".split()) not in run["command"]:
        return f"scored by `{run['command']}`"
    texts = [other["data"].get("sha256") for other in runs if other.get("task") == run.get("task")]
    return "" if run["data"].get("sha256") == texts[0] else "another text than the first row's"


def small(result, command):
    """A small line: the command, machines and commits, how much was scored, what was compiled."""
    runs = [scheme for panel in result.get("panels", []) for scheme in panel["schemes"].values()]
    runs = runs or result.get("runs", [])
    made = [run["environment"] for run in runs if "environment" in run] or [result["environment"]]
    parts = [command, machines(made)]
    if "steps" in result:
        parts.append(f"{result['steps']:,} steps")
    if "queries" in result:
        parts.append(f"{result['queries']:,} queries, {result['documents']:,} documents, chance "
                     f"{100 * result['chance']:.1f}")
    elif "sequences" in result:
        parts.append(f"{result['sequences']:,} sequences a test set")
    elif "tokens" in result:
        parts.append(f"{result['tokens']:,} tokens of {result['data']['source']}, "
                     f"{result['split']}")
    trained = {run.get("train_command", n): run.get("train_seconds", run.get("seconds", 0))
               for n, run in enumerate(runs)}  # once, of what is read in several ways
    seconds = sum(trained.values())
    if seconds:
        parts.append(f"{seconds / 60:,.0f} minutes of training")
    if runs and "train_command" in runs[0]:
        parts.append(f"the first run is `{runs[0]['train_command']}`")
    compiled = [run for run in runs if "--compile on" in run.get("train_command", "")]
    if compiled:
        rows = ", ".join(dict.fromkeys(run["label"] for run in compiled))
        parts.append(f"compiled: {len(compiled)} runs of {len(runs)}, of {rows}")
    return f"<sub>{'; '.join(parts)}</sub>"


def machines(environments):
    """On which machines and by which commits something was measured."""
    def all_of(key):
        return ", ".join(sorted({str(e[key]) for e in environments}))
    processors = " and ".join(sorted({e["gpu"] or e["cpu"] for e in environments}))
    return (f"{processors}, threads: {all_of('threads')}, torch {all_of('torch')}, "
            f"Python {all_of('python')}, commits {all_of('commit')}")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    fill()
