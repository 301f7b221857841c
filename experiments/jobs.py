"""
What a table lacks, and how it is made: each run is a training and its evaluation, by the commands
that are printed. Trainings are in out/ENTRY.SCALE/, and go on where they were stopped; after an
edit of an entry's flags remove what is there, in out/ and results/runs/.
"""
import math
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common import names
from common.checkpoint import load_checkpoint
from common.files import ROOT, fail, read_json, write_json
from common.settings import new_settings
from data.text import VOCABULARY
from encoders.mlm import UNK
from experiments import find
from experiments.cells import values_of
from experiments.runs import once, slug, table
from figures.plot import logged

TRAINING = defaultdict(threading.Lock)  # by folder
FOLDER = "FOLDER"  # in an entry's flags: the text that --data names


# -----------------------------------------------------------------------------
# one run

class Job(NamedTuple):
    """One run of a table: its trainings and its evaluation, or a panel of a random search."""
    path: Path       # its file
    label: str       # the row, or the panel
    done: bool       # whether the file is there
    score: list      # words of eval.py, or of search.py
    model: Callable  # -> the model as it is before its training
    amount: tuple = None  # of a panel: steps, tokens of all steps, tokens of a sequence
    trainings: list = ()  # of (folder, words of train.py): what it begins with, and its own
    task: str = ""        # of a matrix
    columns: dict = None  # of a matrix

    @property
    def name(self):
        return f"{self.task} {self.path.stem}".strip()

    def commands(self, device):
        """All that it takes, were nothing there yet."""
        where = device_flag(device)
        words = [[*start, "--out_dir", str(out), "--no-evaluate", *where]
                 for out, start in self.trainings]
        return [*words, [*self.score, *where]]

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
        if self.trainings:  # a search writes its file itself
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, record(self))


def tokens_of(c):
    """How many a training sees."""
    return c.max_iters * c.batch_size * c.gradient_accumulation_steps * c.block_size


def model_of(words):
    """The model of train.py's words, but for the size of a vocabulary that is not here."""
    config = vars(new_settings(words[2:]))
    if "max_vocab" in config:
        config["vocab_size"] = UNK + 1 + config["max_vocab"]
    elif "tokenizer" in config:
        config["vocab_size"] = VOCABULARY[config["tokenizer"]]
    else:
        del config["vocab_size"]
        config["vocab_size"] = names.make_task(config).vocab_size
    return names.make_model(config)


def device_flag(device):
    return [] if device == "auto" else ["--device", device]


def start_of(part, flags, seed, first=""):
    """-> the words of train.py: the flags of the table, then the row's own, each once."""
    words = ["python", "train.py", *shlex.split(part["train"]), *flags.split(), "--seed", str(seed)]
    return once(words + (["--init_from", str(first)] if first else []))


def folder_of(flags, seed):
    return f"{slug(flags.replace('--model ', ''))}-{seed}"


def planned(name, entry, scale, args, folder):
    """-> [Job] of all runs of an entry, the file there or not; the files are in `folder`."""
    jobs = []
    for task, part in scale.get("tasks", {"": scale}).items():
        trained = Path("out") / f"{entry.get('group', name)}.{args.scale}" / task
        if args.add:
            trained = folder.relative_to(ROOT) / task
        trained /= args.source[:8]  # of another text there are other trainings
        part = part | dict(train=with_text(part, args.data))
        for label, row in scale["rows"].items():
            trained_as = scale["rows"][row.of or label]
            more = " --compile on" if args.compile else ""
            flags = trained_as.train + more
            for seed in range(1337, 1337 + (args.seeds or row.seeds)):
                run = folder_of(flags, seed)
                first, trainings = "", []
                if "first" in entry:
                    earlier, before = find(entry["first"], args.scale)
                    begin = flags
                    if trained_as.first:
                        begin = before["rows"][trained_as.first].train + more
                    first = Path(f"out/{earlier.get('group', entry['first'])}.{args.scale}",
                                 folder_of(begin, seed))
                    trainings.append((first, start_of(before, begin, seed)))
                trainings.append((trained / run, start_of(part, flags, seed, first)))
                score = ["python", "eval.py", str(trained / run), *part["eval"].split(),
                         *row.eval.split(), "--out", str(trained / run / f"{name}-{slug(label)}")]
                path = folder / task / f"{slug(label)}-{seed}.json"
                model = partial(model_of, trainings[-1][1])
                jobs.append(Job(path, label, path.exists(), once(score), model, None, trainings,
                                task, entry.get("columns")))
    return jobs


def record(job):
    """What a run's file holds: eval.py's JSON, and its training."""
    result, (out, start) = read_json(ROOT / f"{job.score[-1]}.json"), job.trainings[-1]
    checkpoint, curves = load_checkpoint(ROOT / out / "ckpt.pt"), logged(ROOT / out, job.label)
    row, = result["runs"]
    text = row["config"]["data"]
    if Path(text).is_absolute():  # where it lay is nobody's business
        row["config"]["data"] = name = result["data"]["corpus"]
        start = [name if word == text else word for word in start]
    row |= dict(train_command=shlex.join(start),
                environment=checkpoint.get("environment", result["environment"]))
    row |= {name: curve for name, curve in curves.items() if curve}  # and the label
    if job.task:
        values = values_of(job.columns, job.task, row)
        row |= dict(task=job.task, values=values)
        if any(value is not None and math.isnan(value) for value in values.values()):
            row["not_finite"] = True
    return result


def with_text(part, data):
    """A scale's flags of train.py, of the text that --data names."""
    return part["train"].replace(FOLDER, shlex.quote(data))


def text_of(name, scale, data):
    """
    The text that --data names, prepared once for all runs -> where it is, and its sha256. What is
    too short to be scored ends here.
    """
    _, part = find(name, scale)
    c = new_settings(shlex.split(with_text(part, data)))
    task = names.make_task(vars(c))
    have = task.meta["tokens"]
    print(f"{data}: {have['train']:,} tokens to train on, sha256 {task.source}; a training takes "
          f"{tokens_of(c):,}, {tokens_of(c) / have['train']:.1f} passes", flush=True)
    asked = max(map(int, re.findall(r"\d+", part["eval"])))
    if have["test"] <= asked:
        fail(f"{data} is too short: of its {have['test']:,} test tokens {asked:,} are to be scored")
    return task.data, task.source


def need_one_text(name, scale, data):
    """Ends where runs of another text are there: hours later their table would be refused."""
    _, part = find(name, scale)
    there = table(name, scale).get("runs", ())
    if any("perplexity" in run and "task" not in run for run in there):
        task = names.make_task(vars(new_settings(shlex.split(with_text(part, data)))))
        others = {run["data"]["sha256"] for run in there} - {task.source}
        if others:
            fail(f"results/runs/{name}.{scale} is of another text, sha256 {', '.join(others)}: "
                 "move it away, and yours is made")


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
                process.terminate()  # Windows knows no SIGINT of another process
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
