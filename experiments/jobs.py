"""
What a table lacks, and how it is made: each run is a training and its evaluation, by the commands
that are printed. Trainings are in out/ENTRY.SCALE/, and go on where they were stopped; after an
edit of an entry's flags remove what is there, in out/ and results/runs/.
"""
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common import names
from common.checkpoint import load_checkpoint
from common.files import ROOT, read_json, read_log, write_json
from common.settings import new_settings
from data.text import VOCABULARY
from encoders.mlm import UNK
from experiments import find
from experiments.cells import values_of
from experiments.runs import once, slug, table

TRAINING = defaultdict(threading.Lock)  # by folder


# -----------------------------------------------------------------------------
# one run

class Job(NamedTuple):
    """One run of a table: its training and its evaluation."""
    path: Path       # its file
    label: str       # the row
    task: str        # of a matrix; else empty
    columns: dict    # of a matrix
    trainings: list  # of (folder, words of train.py): what it begins with, and its own
    score: list      # words of eval.py

    @property
    def name(self):
        return f"{self.task} {self.path.stem}".strip()

    @property
    def done(self):
        return self.path.exists()

    def commands(self, device):
        """All that it takes, were nothing there yet."""
        where = device_flag(device)
        words = [[*start, "--out_dir", str(out), "--no-evaluate", *where]
                 for out, start in self.trainings]
        return [*words, [*self.score, *where]]

    def model(self):
        """As it is before its training, but for the size of a vocabulary that is not here."""
        config = vars(new_settings(self.trainings[-1][1][2:]))
        if "max_vocab" in config:
            config["vocab_size"] = UNK + 1 + config["max_vocab"]
        elif "tokenizer" in config:
            config["vocab_size"] = VOCABULARY[config["tokenizer"]]
        else:
            del config["vocab_size"]
            config["vocab_size"] = names.make_task(config).vocab_size
        return names.make_model(config)

    def make(self, device, run):
        """Trains what is not trained, evaluates, and writes the run's file."""
        *begins, score = self.commands(device)
        for (out, _), begin in zip(self.trainings, begins):
            with TRAINING[out]:  # rows may share it
                if not (ROOT / out / "ckpt.pt").exists():
                    run(*begin)
                checkpoint = load_checkpoint(ROOT / out / "ckpt.pt")
                if checkpoint["iter"] < checkpoint["config"]["max_iters"]:
                    run("python", "train.py", "--resume", str(out), "--no-evaluate",
                        *device_flag(device))
        run(*score)
        result = read_json(ROOT / f"{self.score[-1]}.json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, record(result, self))


def device_flag(device):
    return [] if device == "auto" else ["--device", device]


def start_of(part, flags, seed, first=""):
    """-> the words of train.py: the flags of the table, then the row's own, each once."""
    words = ["python", "train.py", *part["train"].split(), *flags.split(), "--seed", str(seed)]
    return once(words + (["--init_from", str(first)] if first else []))


def planned(name, entry, scale, args, folder):
    """-> [Job] of all runs of an entry, the file there or not; the files are in `folder`."""
    jobs = []
    for task, part in scale.get("tasks", {"": scale}).items():
        trained = Path("out") / f"{entry.get('group', name)}.{args.scale}" / task
        if args.add:
            trained = folder.relative_to(ROOT) / task
        for label, row in scale["rows"].items():
            flags = scale["rows"][row.of or label].train
            flags += " --compile on" if args.compile else ""
            for seed in range(1337, 1337 + (args.seeds or row.seeds)):
                run = f"{slug(flags.replace('--model ', ''))}-{seed}"
                first, trainings = "", []
                if "first" in entry:
                    earlier, before = find(entry["first"], args.scale)
                    first = Path(f"out/{earlier.get('group', entry['first'])}.{args.scale}/{run}")
                    trainings.append((first, start_of(before, flags, seed)))
                trainings.append((trained / run, start_of(part, flags, seed, first)))
                score = ["python", "eval.py", str(trained / run), *part["eval"].split(),
                         *row.eval.split(), "--out", str(trained / run / f"{name}-{slug(label)}")]
                path = folder / task / f"{slug(label)}-{seed}.json"
                jobs.append(Job(path, label, task, entry.get("columns"), trainings, once(score)))
    return jobs


def record(result, job):
    """eval.py's JSON of one run -> what the run's file holds: also its training."""
    out, start = job.trainings[-1]
    checkpoint, log = load_checkpoint(ROOT / out / "ckpt.pt"), read_log(ROOT / out)
    row, = result["runs"]
    row |= dict(label=job.label, train_command=shlex.join(start),
                environment=checkpoint.get("environment", result["environment"]))
    for name, key in (("loss", "loss"), ("val_loss", "val_loss"), ("history", "scores")):
        curve = [[r["iter"], r[key]] for r in log if key in r]
        row |= {name: curve} if curve else {}
    if job.task:
        values = values_of(job.columns, job.task, row)
        row |= dict(task=job.task, values=values)
        if any(value is not None and math.isnan(value) for value in values.values()):
            row["not_finite"] = True
    return result


# -----------------------------------------------------------------------------
# several at a time

RUNNING = set()  # processes


def work(jobs, at_once, device):
    """
    Makes jobs, so many at a time -> the names of those that failed. Ctrl-C stops all, as it stops
    train.py: what runs is saved.
    """
    env, failed = dict(os.environ), []
    if at_once > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // at_once)))

    def make(job):
        try:
            job.make(device, partial(run, job.name, env))
        except (RuntimeError, SystemExit) as e:
            failed.append(job.name)
            print(f"{job.name} failed: {e}", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(make, job) for job in jobs]
        try:
            for n, future in enumerate(as_completed(futures), 1):
                future.result()
                print(f"[{n} of {len(jobs)} done]", flush=True)
        except BaseException:
            for process in list(RUNNING):
                process.send_signal(signal.SIGINT)
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def run(name, env, *command):
    """One command, printed, and its output line by line. Raises RuntimeError if it fails."""
    print("$ " + shlex.join(command), flush=True)
    process = subprocess.Popen([sys.executable, *command[1:]], cwd=ROOT, env=env, text=True,
                               encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    RUNNING.add(process)
    for line in process.stdout:
        print(f"{name}: {line.rstrip()}", flush=True)
    code = process.wait()
    RUNNING.discard(process)
    if code:
        raise RuntimeError(f"exit code {code} of {shlex.join(command)}")


# -----------------------------------------------------------------------------
# how long it takes

def measured(name, scale, task=""):
    """The mean seconds of an entry's runs, of those that are there; 0 where none is."""
    result, seconds = table(name, scale), []
    for one in result.get("runs", []):
        if task in ("", one.get("task")):
            evaluation = one["eval_seconds"]
            by_length = evaluation.values() if isinstance(evaluation, dict) else [evaluation]
            seconds.append(one["train_seconds"] + sum(by_length))
    for panel in result.get("panels", []):
        seconds.append(sum(scheme["seconds"] for scheme in panel["schemes"].values()))
    return statistics.mean(seconds) if seconds else 0


def duration(seconds):
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
