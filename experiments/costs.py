"""
What runs cost: the seconds of those that are there, else FLOPs. A training of N parameters on D
tokens has 6 N D, and attention 12 L E T D: L layers of width E, T tokens a sequence, of which
nothing is left out as masked. Evaluation, some percent more, is not counted.
"""
import statistics
from argparse import Namespace

import torch

from common.files import fail
from common.settings import new_settings
from experiments import SCALES, entries, jobs, search
from experiments.runs import folder_of, table
from experiments.tables import markdown

H100 = 1.8e14  # FLOP/s, 18 % of its peak in bfloat16: five models of 14M parameters side by side
STEP = 0.005   # seconds that a step takes at least, an estimate


def command_of(name, scale):
    """What makes an entry's table."""
    words = f"python reproduce.py {name}" + (f" --scale {scale}" if scale != "cpu" else "")
    own_text = jobs.FOLDER in entries()[name][scale].get("train", "")
    return words + (" --data FOLDER" if own_text else "")


def planned(name, scale):
    """All runs of an entry."""
    entry, folder = entries()[name], folder_of(name, scale)
    if "panels" in entry[scale]:
        return search.planned(name, scale, folder)
    args = Namespace(scale=scale, seeds=0, add=None, compile=False, data="stdlib", source="")
    return jobs.planned(name, entry, entry[scale], args, folder)


def measured(name, scale, task=""):
    """The mean seconds of an entry's runs, of those that are there; 0 where none is."""
    result, seconds = table(name, scale), []
    for one in result.get("runs", []):
        if task in ("", one.get("task")):
            spent = one["eval_seconds"]
            spent = sum(spent.values()) if isinstance(spent, dict) else spent  # by length
            seconds.append(one["train_seconds"] + spent)
    for panel in result.get("panels", []):
        seconds.append(sum(scheme["seconds"] for scheme in panel["schemes"].values()))
    return statistics.mean(seconds) if seconds else 0


def counted(todo):
    """-> [(FLOPs, those of attention, seconds on one H100)] of all trainings, each once."""
    rows, trainings = {}, {}
    for job in todo:
        row = job.label, job.task
        if row not in rows:
            rows[row] = cost(job)
        out = job.trainings[-1][0] if job.trainings else job.path
        trainings[out] = rows[row]  # of every seed
    return list(trainings.values())


def cost(job):
    with torch.device("meta"):
        model = job.model()
    width, (steps, tokens, T) = 0, job.amount or (0, 0, 0)  # of a minimal transformer hardly any
    if job.trainings:
        c = new_settings(job.trainings[-1][1][2:])
        steps, tokens, T = c.max_iters, jobs.tokens_of(c), c.block_size
    if hasattr(model, "config"):
        width = model.config.n_layer * model.config.n_embd
    attention = 12 * width * T * tokens
    flops = 6 * sum(p.numel() for p in model.parameters()) * tokens + attention
    return flops, attention, max(flops / H100, STEP * steps)


def duration(seconds):
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def expected(name, scale, todo):
    """How long these runs of an entry take, and how many of them are there."""
    mean = measured(name, scale)
    took = duration(len(todo) * mean)
    if not mean:
        flops, attention, seconds = map(sum, zip(*counted(todo)))
        took = f"{flops:.1e} FLOPs, {100 * attention / flops:.0f} % of them attention"
        if scale != "cpu":
            took += f" (one H100: some {duration(seconds)})"
    there = sum(job.done for job in todo)
    return f"{took}, {len(todo)} runs" + (f", {there} of them there" if there else "")


def need_gpu(args, todo):
    """Where there is none, and no other device was asked for, ends with what it would take."""
    if args.scale != "cpu" and args.device == "auto" and not torch.cuda.is_available():
        fail(f"{args.entry} --scale {args.scale} is for a CUDA GPU, and torch finds none: "
             f"{expected(args.entry, args.scale, todo)}. --device cpu makes it here all the same")


def not_run():
    """A row for each table beyond the CPU's scale that has no run yet, the shortest first."""
    rows = []
    for name, entry in entries().items():
        for scale in SCALES[1:]:
            if scale not in entry or "runs" in entry or any(folder_of(name, scale).rglob("*.json")):
                continue
            trainings = [each for each in counted(planned(name, scale)) if each[0]]
            flops, attention, seconds = map(sum, zip(*trainings))
            share = f"{100 * attention / flops:.0f} %"
            rows.append([seconds, entry["title"].partition(":")[0], f"`{command_of(name, scale)}`",
                         f"{flops:.1e}", share, duration(seconds / len(trainings)),
                         duration(seconds)])
    heads = ["table", "command", "FLOPs", "attention", "one training", "all of them"]
    return markdown(heads, [row for _, *row in sorted(rows)])
