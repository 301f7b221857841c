"""
The files of results/runs/, one a run, as tables: ENTRY.SCALE/[TASK/]ROW-SEED.json, and of a random
search ENTRY.SCALE/PANEL.json. A table is what its folder holds.
"""
import json
import re
import sys

from common.files import ROOT
from experiments import entries, find, matrix, papers

# what the file of a run says of its evaluation
MEASURED = ("data", "dtype", "split", "tokens", "strided_tokens", "lengths", "splits", "sequences",
            "queries", "documents", "chance", "readings", "answers")


def slug(words):
    return re.sub(r"[^\w.]+", "-", words).strip("-")


def folder_of(name, scale):
    """Where an entry's runs are: those of another entry, where it shows them in another way."""
    name = entries()[name].get("runs", name)
    return ROOT / "results" / "runs" / f"{name}.{scale}"


def added_folder(name, scale, row):
    """Where the runs of a row are that was added to a matrix."""
    return ROOT / "out" / f"{name}.{scale}" / "added" / slug(row)


def table(name, scale):
    """
    What an entry says of itself, and its runs that are there: in the order of its rows, then of
    tasks and seeds. "runs" is empty where nothing is there.
    """
    entry, part = find(name, scale)
    about = {key: entry[key] for key in ("columns", "losses", "metric") if key in entry}
    published = papers().get(entry.get("published", name), {})
    about |= dict(entry=name, title=entry["title"], paper=published)
    if "published_at" in part:
        about["paper_lengths"] = part["published_at"]
    paths = sorted(folder_of(name, scale).rglob("*.json"))
    if "panels" in part:
        return about | panels(entry, part, paths)
    rows, tasks, runs = list(part["rows"]), list(part.get("tasks", ())), []
    for run in map(read_run, paths):
        if run and run["label"] in rows:
            runs.append(run)
    runs.sort(key=lambda run: (rows.index(run["label"]),
                               tasks.index(run["task"]) if tasks else 0, run["seed"]))
    for run in reversed(runs):
        about |= {key: run[key] for key in (*MEASURED, "environment") if key in run}
    if "lengths" in about:
        about["lengths"] = sorted({n for run in runs for n in run["lengths"]})
    about |= dict(rows=list(dict.fromkeys(run["label"] for run in runs)), runs=runs)
    if tasks:
        about |= matrix.cells_of(entry["columns"], runs)
    return about


def damaged(path):
    print(f"warning: {path} is damaged: left out. Remove it, and it is made anew", file=sys.stderr)


def read_run(path):
    """
    The one row of a run's file, with what the file says of the evaluation. A damaged file is named,
    and None.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        run, = result["runs"]
        about = {key: result[key] for key in (*MEASURED, "command") if key in result}
        return about | run | dict(label=run["label"], seed=run["seed"])
    except (ValueError, KeyError, TypeError):
        return damaged(path)


def panels(entry, part, paths):
    """A random search's panels that are there, with their schemes in the order of the entry."""
    files, shown = {}, []
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            files[path.stem] = result
            if "schemes" in result:
                result["schemes"] = {s: result["schemes"][s] for s in entry["schemes"]}
        except (ValueError, KeyError, TypeError):
            damaged(path)
    theorem = files.pop("theorem", None)
    for name in part["panels"]:
        if slug(name) in files:
            shown.append(files[slug(name)])
    about = dict(panels=shown)
    if shown:
        about |= {key: shown[0][key] for key in ("steps", "sequences", "environment")}
    return about | (dict(theorem=theorem) if theorem else {})


def beside(result, jobs, name):
    """A matrix with the row that was added, of its tasks alone."""
    mine = [run for run in (read_run(job.path) for job in jobs if job.done) if run]
    texts = {run["task"]: run["data"].get("sha256") for run in mine}
    tasks, runs = {job.task for job in jobs}, []
    for run in result["runs"]:
        if run["task"] in tasks:
            same = texts.get(run["task"]) in (None, run["data"].get("sha256"))
            runs.append(run if same else run | dict(reason="another text"))
    columns = {key: column for key, column in find(result["entry"], "cpu")[0]["columns"].items()
               if column["task"] in tasks}
    return result | matrix.cells_of(columns, runs + mine) | dict(runs=runs + mine, added=name)
