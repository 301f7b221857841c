"""
The files of results/runs/, one a run, as tables: ENTRY.SCALE/[TASK/]ROW-SEED.json, and of a random
search ENTRY.SCALE/PANEL.json. A table is what its folder holds.
"""
import json
import re
import sys

from common.files import ROOT, fail
from experiments import entries, find
from experiments.cells import cells_of


def slug(words):
    return re.sub(r"[^\w.]+", "-", words).strip("-")


def once(words):
    """The words of a command, each flag once: of one that stands there twice the last counts."""
    name, flags = "", {"": []}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").removeprefix("no-")
            flags[name] = []
        flags[name].append(word)
    return [word for part in flags.values() for word in part]


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
    numbers = entries().get(entry.get("published"), entry).get("numbers", {})
    about = {key: entry[key] for key in ("columns", "losses", "metric") if key in entry}
    about |= dict(entry=name, title=entry["title"], paper=numbers,
                  paper_lengths=part.get("published_at", ()))
    if "panels" in part:
        return about | panels(entry, part, folder_of(name, scale))
    rows, tasks, runs = list(part["rows"]), list(part.get("tasks", ())), []
    for path in sorted(folder_of(name, scale).rglob("*.json")):
        runs += [run for run in rows_of(path) if run["label"] in rows]
    runs.sort(key=lambda run: (rows.index(run["label"]),
                               tasks.index(run["task"]) if tasks else 0, run["seed"]))
    texts = {run["data"]["sha256"] for run in runs if "perplexity" in run and "task" not in run}
    if len(texts) > 1:
        fail(f"results/runs/{name}.{scale} has runs of several texts, sha256 {', '.join(texts)}: "
             "move away all but one's")
    for run in runs:  # what is not said of the entry is said of its first run
        about = run | about
    about |= dict(rows=list(dict.fromkeys(run["label"] for run in runs)), runs=runs,
                  lengths=sorted({n for run in runs for n in run.get("lengths", ())}))
    if tasks:
        about["cells"] = cells_of(entry["columns"], runs)
    if "beside" in entry:
        about["beside"] = table(entry["beside"], scale)
    return about


def read(path):
    """A run's JSON, or None where there is none, or a damaged one, which is said."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        print(f"warning: {path} is damaged and left out. Remove it, and it is made anew",
              file=sys.stderr)


def rows_of(path):
    """[the one row of a run's file, with what the file says of the evaluation], or []."""
    result = read(path)
    return [result | row for row in result["runs"]] if result else []


def panels(entry, part, folder):
    """A random search's panels that are there, with their schemes in the order of the entry."""
    shown, about = [], {}
    for name in part["panels"]:
        panel = read(folder / f"{slug(name)}.json")
        if panel:
            schemes = {s: panel["schemes"][s] for s in entry["schemes"] if s in panel["schemes"]}
            shown.append(panel | dict(schemes=schemes))
            about = {key: panel[key] for key in ("steps", "sequences", "environment")}
    hard_coded = read(folder / "theorem.json")
    return about | dict(panels=shown) | (dict(theorem=hard_coded) if hard_coded else {})


def beside(result, jobs, name):
    """A matrix with the row that was added, of its tasks alone."""
    tasks, mine = {job.task for job in jobs}, []
    for job in jobs:
        mine += rows_of(job.path)
    texts, runs = {run["task"]: run["data"].get("sha256") for run in mine}, []
    for run in result["runs"]:
        if run["task"] in tasks:
            same = texts.get(run["task"]) in (None, run["data"].get("sha256"))
            runs.append(run if same else run | dict(reason="another text"))
    columns = {key: column for key, column in result["columns"].items() if column["task"] in tasks}
    cells = cells_of(columns, runs + mine)
    return result | dict(columns=columns, cells=cells, runs=runs + mine, added=name)
