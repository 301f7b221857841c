"""
Every table and figure that this repository reproduces, each by one command.

    python reproduce.py                                        what there is, and how much of it
    python reproduce.py cable_table1 --jobs 2                  two trainings at a time
    python reproduce.py lm --rows t5 --seeds 3                 more seeds of one row
    python reproduce.py matrix --rows mine                     your model_mine.py beside the others
    python reproduce.py cable_table1 --scale paper --dry_run   the commands that it would run

A run is a file, results/runs/TABLE.SCALE/[TASK/]ROW-SEED.json: what is there is used, what is
absent is made, so after Ctrl-C the same command continues. Trainings are in out/, and go on where
they were stopped. Then the table is printed, its figure is drawn, and the pages of results/ are
filled. Rows that a table lacks, each a model's name, are for you alone: all that they make is in
out/.
"""
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import lab
from common import ROOT
from common.exits import fail, in_one_line, nearest
from common.files import read_json, write_json
from common.flags import Parser
from lab import FOLDER, Row, find, pages, slug, tables

TRAINING = defaultdict(threading.Lock)  # by folder: rows may share a training
RUNNING = set()                         # processes


class Job(NamedTuple):
    """One run of a table: its trainings and its evaluation, or a panel of a random search."""
    path: Path       # its file
    label: str       # the row, or the panel
    task: str        # of a matrix
    trainings: list  # of (folder, words of train.py): what it begins with, and its own
    score: list      # words of eval.py, or of lab/search.py

    @property
    def name(self):
        return f"{self.task} {self.path.stem}".strip()


# -----------------------------------------------------------------------------
# which runs a table has

def plan(table, labels=(), seeds=0, text=(FOLDER, "")):
    """
    -> [Job] of a table's rows, or of these, there or not, each with so many seeds (0: its own).
    text is what --data names, and its sha256. A row that the table lacks is a model's name.
    """
    if "panels" in table.part:
        return plan_search(table)
    rows, jobs, (data, sha256) = with_rows(table, labels), [], text
    for task, own in table.part.get("tasks", {"": table.part}).items():
        flags = own["train"].replace(FOLDER, shlex.quote(data))
        for label in labels or rows:
            row = rows[label]
            trained, into, runs = rows[row.weights_of or label], table.trainings, table.runs
            if label not in table.part["rows"]:
                into, runs = table.added, ROOT / table.added / "runs" / sha256[:8]
            for seed in range(1337, 1337 + (seeds or row.seeds)):
                before = begins_with(table, trained, seed)
                last = training(into / task / sha256[:8], flags, trained.train, seed, before)
                out = str(last[0])
                score = ["python", "eval.py", out, *own["eval"].split(), *row.eval.split(),
                         "--out", f"{out}/{table.name}-{slug(label)}"]
                path = runs / task / f"{slug(label)}-{seed}.json"
                jobs.append(Job(path, label, task, [*before, last], once(score)))
    return jobs


def plan_search(table):
    """-> [Job] of a random search, a panel each; "theorem" is the hard-coded models."""
    jobs, theorem = [], ["theorem"] if "theorem" in table.part else []
    for panel in [*table.part["panels"], *theorem]:
        path = table.runs / f"{slug(panel)}.json"
        words = ["python", "-m", "lab.search", table.name, "--panel", panel, "--scale",
                 table.scale, "--out", str(path.relative_to(ROOT))]
        jobs.append(Job(path, panel, "", [], words))
    return jobs


def with_rows(table, labels):
    """A table's rows, and one for each model that it lacks."""
    rows = dict(table.part["rows"])
    for label in [label for label in labels if label not in rows]:
        from common.names import models  # and torch, which the list does without
        if label not in models():
            fail(f"{table.name} has no row {label!r}, nor is it a model: "
                 f"{nearest(label, rows | models())}")
        rows[label] = Row(f"--model {label}")
    return rows


def begins_with(table, trained, seed):
    """-> [the training of another entry that a row goes on from], or []."""
    if "begins_with" not in table.entry:
        return []
    other = find(table.entry["begins_with"], table.scale)
    row = other.part["rows"].get(trained.begins_with, trained)
    return [training(other.trainings, other.part["train"], row.train, seed)]


def training(folder, flags, own, seed, before=()):
    """-> its folder, and the words of train.py: a table's flags, then the row's own, each once."""
    words = ["python", "train.py", *shlex.split(flags), *own.split(), "--seed", str(seed)]
    for out, _ in before:
        words += ["--init_from", str(out)]
    return folder / f"{slug(own.replace('--model ', ''))}-{seed}", once(words)


def once(words):
    """The words of a command, each flag once: of one that stands there twice the last counts."""
    name, flags = "", {"": []}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").removeprefix("no-")
            flags[name] = []
        flags[name].append(word)
    return [word for part in flags.values() for word in part]


def commands_of(job, device):
    """All that it takes, were nothing there yet."""
    begin = [[*words, "--out_dir", str(out), "--no-evaluate", *device]
             for out, words in job.trainings]
    return [*begin, [*job.score, *device]]


def text_of(table, data):
    """The text that --data names, prepared once: -> where it is, and its sha256."""
    flags = table.part.get("train", "")
    if (FOLDER in flags) != bool(data):
        fail(f"--data is not for {table.name}" if data else
             f"{table.name} needs a text: --data FOLDER")
    if not data:
        return "", ""
    from common.names import make_task
    from common.settings import new_settings
    words = shlex.split(flags.replace(FOLDER, shlex.quote(data)))
    task = make_task(vars(new_settings(words)))
    for run in tables.runs_of(table):
        if run["data"]["sha256"] != task.source:
            fail(f"{table.runs.relative_to(ROOT)} is of another text, sha256 "
                 f"{run['data']['sha256']}, than yours, {task.source}: move it away, and yours is "
                 "made")
    return task.data, task.source


# -----------------------------------------------------------------------------
# making them

def make(job, device):
    """Trains what is not trained, evaluates, and writes the run's file."""
    from common.checkpoint import load_checkpoint
    *begin, score = commands_of(job, device)
    for (out, asked), words in zip(job.trainings, begin):
        path = ROOT / out / "ckpt.pt"
        with TRAINING[out]:
            if not path.exists():
                run(job.name, *words)
            checkpoint = load_checkpoint(path)
            need_same_flags(out, asked, checkpoint["config"])
            unfinished = checkpoint["iter"] < checkpoint["config"]["max_iters"]
            if unfinished or checkpoint.get("due"):  # a validation
                run(job.name, "python", "train.py", "--resume", str(out), "--no-evaluate", *device)
    run(job.name, *score)
    if job.trainings:  # a search writes its file itself
        result = read_json(ROOT / f"{job.score[-1]}.json")  # its --out
        result["runs"][0] |= about_training(job, result, checkpoint)  # of its own, the last
        job.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(job.path, result)


def need_same_flags(out, words, config):
    """Ends where a folder has a training of other flags, as it was before an edit of an entry."""
    from common.settings import RunConfig, new_settings
    asked = vars(new_settings(words[2:]))
    aside = {"data", "corpus", "vocab_size", *RunConfig.__dataclass_fields__}  # where a text is
    for name in sorted(asked.keys() & config.keys() - aside):
        if config[name] != asked[name]:
            fail(f"{out} was trained with {name} {config[name]}, not {asked[name]}: remove it, and "
                 "it is made anew")


def about_training(job, result, checkpoint):
    """What a run's file holds beside what eval.py says: its row, and its training."""
    from figures.plot import logged  # and matplotlib
    (out, words), config = job.trainings[-1], result["runs"][0]["config"]
    if Path(config["data"]).is_absolute():  # where the text lay is nobody's business
        words = [result["data"]["corpus"] if word == config["data"] else word for word in words]
        config["data"] = result["data"]["corpus"]
    about = dict(label=job.label, train_command=shlex.join(words), task=job.task,
                 environment=checkpoint.get("environment", result["environment"]))
    about |= logged(ROOT / out, job.label)  # and its curves
    return {name: value for name, value in about.items() if value}


def make_all(jobs, at_once, device):
    """
    Makes jobs, so many at a time -> the names of those that failed. Ctrl-C stops all, as it stops
    train.py: what runs is saved.
    """
    failed = []
    if at_once > 1:
        import torch  # which the list does without, and which knows what a container has
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // at_once)))

    def try_to(job):
        try:
            make(job, device)
        except (Exception, SystemExit) as e:  # the others go on
            failed.append(job.name)
            print(f"{job.name} failed: {e}")
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for n, _ in enumerate(pool.map(try_to, jobs), 1):
                print(f"[{n} of {len(jobs)} done]", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):  # which shrinks as they end
                process.terminate()  # Windows knows no SIGINT of another process
            raise
    return failed


def run(name, *command):
    """One command, printed, and its output line by line. Raises RuntimeError if it fails."""
    print("$ " + shlex.join(command), flush=True)
    with subprocess.Popen(
            [sys.executable, *command[1:]], cwd=ROOT, text=True, encoding="utf-8",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        RUNNING.add(process)
        for line in process.stdout:
            print(f"{name}: {line.rstrip()}", flush=True)
    RUNNING.discard(process)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode} of {shlex.join(command)}")


# -----------------------------------------------------------------------------
# command line

def parse(argv):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("entry", nargs="?", help="which table or figure; without it, the list")
    add("--scale", default="cpu", choices=lab.SCALES,
        help="cpu: minutes a run on two cores; gpu, and paper, the paper's sizes: most for a GPU")
    add("--data", default="", metavar="FOLDER", help="of lm_english: its text, a file or folder")
    add("--rows", nargs="+", default=(), help="only these rows, or models that the table lacks")
    add("--seeds", type=int, default=0,
        help="how many of every row (default: the entry's; of a row that it lacks, one)")
    add("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    add("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    add("--dry_run", action="store_true", help="print every command; nothing is run or written")
    args = parser.parse_args(argv)
    if args.jobs < 1 or args.seeds < 0:
        fail("--jobs must be at least 1, --seeds 0 or more")
    return args


def listing():
    """Each paper's entries, what they are, and how many of their runs are there."""
    for module in lab.files():
        print("\n" + module.__doc__.strip().partition("\n")[0])
        for name, entry in module.ENTRIES.items():
            print(f"  {name}\n      {entry['title']}")
            for scale in [scale for scale in lab.SCALES if scale in entry]:
                jobs = plan(find(name, scale))
                there = sum(job.path.exists() for job in jobs)
                print(f"      --scale {scale:5}  {there} of {len(jobs)} runs are there")
    print("\nMake one with: python reproduce.py NAME --jobs 2")


def show(table, added):
    """The table and the figure of what is there, and the pages; added rows' are in out/."""
    from lab import figures  # and matplotlib
    runs, folder = tables.runs_of(table, added), ROOT / "results"
    if added:
        folder = ROOT / table.added
        print(f"\nafter an edit of {' or '.join(added)} remove {table.added}: what is there is "
              "used")
    if runs:
        tables.show(tables.tables_of(table, runs))
        folder.mkdir(parents=True, exist_ok=True)
        figures.draw(table, runs, folder / f"{table.name}.{table.scale}", added)
    pages.fill()


def main(argv=None):
    args = parse(argv)
    if args.entry is None:
        return listing()
    table = find(args.entry, args.scale)
    if (args.rows or args.seeds) and "rows" not in table.part:
        fail(f"--rows and --seeds are not for {table.name}")
    device = [] if args.device == "auto" else ["--device", args.device]
    if args.dry_run:
        for job in plan(table, args.rows, args.seeds, (args.data or FOLDER, "")):
            for words in commands_of(job, device):
                print("$ " + shlex.join(words))
        return
    jobs = plan(table, args.rows, args.seeds, text_of(table, args.data))
    there = sum(job.path.exists() for job in jobs)
    print(f"{table.name}: {len(jobs)} runs, {there} of them there", flush=True)
    # a search looks itself which of its schemes are there
    missing = [job for job in jobs if not job.path.exists() or not job.trainings]
    try:
        failed = make_all(missing, args.jobs, device)
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept, and the same command continues", flush=True)
        sys.exit(130)
    show(table, [label for label in args.rows if label not in table.part["rows"]])
    if failed:
        fail(f"{', '.join(failed)} failed; the rest is kept, and the same command continues")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    main()
