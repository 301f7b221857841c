"""
The rows of a table, each a training and its evaluation: out/ENTRY.SCALE/ROW-SEED/ckpt.pt and
eval.json. reproduce.py runs the jobs' commands; what is there already is not made again.
"""
import json
import math
import re
import shlex
import statistics
from functools import partial
from pathlib import Path
from typing import NamedTuple

import data
import experiments
import runs
import train as train_py
from data.text import absolute


def options(words):
    """Flags -> {name: value}, both strings; a flag without a value is "True" or "False"."""
    found, last = {}, None
    for word in words:
        if word.startswith("--no-"):
            found[word[5:]] = "False"
        elif word.startswith("--"):
            last = word[2:]
            found[last] = "True"
        else:
            found[last] = word if found[last] == "True" else f"{found[last]} {word}"
    return found


def flag(name, value):
    """A setting as train.py takes it, with a space before."""
    if isinstance(value, bool):
        return f" --{name}" if value else f" --no-{name}"
    return f" --{name} {value}"


# settings that say where and how it is run, not what it computes; the task sets vocab_size
WHERE = "out_dir", "log_interval", "evaluate", "device", "compile", "kernel", "vocab_size"


def differing(config, words):
    """
    The first setting in which a run's config is not what train.py makes of these flags today, in
    words; "" where there is none.
    """
    wanted = vars(train_py.fresh(words)[0])
    for name in ("data", "corpus"):  # your own file or folder
        if name in wanted and wanted[name] not in [*data.known(), "msmarco"]:
            wanted[name] = str(absolute(wanted[name]))
    for k, v in wanted.items():
        now = config.get(k, v)  # an older run may lack it
        if k not in WHERE and now != v and (now or v):  # off is off: a switch may become a choice
            return f"{k}={now}, the entry says {v}"
    return ""


def check(out, config, words):
    """The run in out must be the entry's."""
    found = differing(config, words)
    has, asked = config.get("compile", "auto"), options(words).get("compile", "auto")
    if not found and (has == "on") != (asked == "on"):
        found = f"compile={has}, this command has {asked}"
    if found:
        raise RuntimeError(f"{out} holds a run with {found}: move it away, and run this again")


def older(result, entry, scale):
    """
    Why a JSON is not of this definition of its entry: the first row, setting or length that
    differs; "" where it is. It may have fewer seeds, and where --rows asked for some, fewer rows.
    """
    missing = dict.fromkeys(scale["rows"])
    for r in result["runs"]:
        label = r.get("label", r["model"])
        if label not in scale["rows"]:
            return f"it has a row {label!r}, the entry has none"
        missing.pop(label, None)
        first = r["config"].get("init_from", "") if "first" in entry else ""
        start, _ = words_of("", scale["rows"][label][0], r["seed"], scale, [], first)
        found = differing(r["config"], start[2:])
        if found:
            return f"its row {label!r} has {found}"
    if missing and "--rows" not in result["command"]:
        return f"it has no row {next(iter(missing))!r}"
    asked, first = options(scale["eval"].split()), result["runs"][0]
    lengths = result.get("lengths", first.get("scores", ()))
    has = dict(sequences=result.get("sequences"), lengths=" ".join(map(str, lengths)),
               strided=str("strided_tokens" in result),
               split=result.get("split", " ".join(result.get("splits", ()))),
               tokens=result.get("tokens"))
    if asked.get("tokens") == "0":  # all
        del asked["tokens"]
    for name in has:
        if str(has[name]) != asked.get(name, str(has[name])):
            return f"it has {name}={has[name]}, the entry says {asked[name]}"
    return ""


def words_of(out, flags, seed, scale, device, first=""):
    """
    -> the words of the two commands of one row, without where and on what to train. first: the
    folder of the run that it begins with.
    """
    # of a flag that is there twice the last counts: the row's own
    start = ["python", "train.py", *scale["train"].split(), *flags.split(), "--seed", str(seed)]
    if first:
        start += ["--init_from", str(first)]
    return start, ["python", "eval.py", str(out), *scale["eval"].split(), *device]


def train(out, start, device, run):
    """out/ckpt.pt of one row, made now, finished, or there already -> the checkpoint."""
    folder = runs.ROOT / out
    if not (folder / "ckpt.pt").exists():
        run(*start, "--out_dir", str(out), "--no-evaluate", *device)
    checkpoint = runs.load_checkpoint(folder / "ckpt.pt")
    check(out, checkpoint["config"], start[2:])
    runs.warn_of_code(folder / "ckpt.pt", checkpoint)
    if checkpoint["iter"] < checkpoint["config"]["max_iters"]:
        run("python", "train.py", "--resume", str(out), "--no-evaluate", *device)
        checkpoint = runs.load_checkpoint(folder / "ckpt.pt")  # of the commit that finished it
    return checkpoint


# what all runs of a table must have alike
MEASURED = ("data", "dtype", "split", "tokens", "strided_tokens", "lengths", "splits", "sequences",
            "queries", "documents", "chance", "readings", "answers")


def training(row, entry, scale, device, run):
    """out/{ckpt.pt,eval.json} of one row, made now or already there -> what is in eval.json."""
    folder, first = runs.ROOT / row.out, ""
    if row.first:
        earlier, first = row.first
        start, _ = words_of(first, row.flags, row.seed, earlier, device)
        train(first, start, device, run)
    start, command = words_of(row.out, row.flags, row.seed, scale, device, first)
    checkpoint = train(row.out, start, device, run)
    evaluated = folder / "eval.json"
    try:
        newer = evaluated.stat().st_mtime >= (folder / "ckpt.pt").stat().st_mtime
        done = newer and json.loads(evaluated.read_text())["command"] == shlex.join(command)
    except (OSError, ValueError, KeyError):  # not there, or half written
        done = False
    if not done:
        run(*command)
    found, log = json.loads(evaluated.read_text()), runs.read_log(folder)

    def curve(key):
        return [[r["iter"], r[key]] for r in log if key in r]
    if "kept" in scale:
        measured_alike(found, scale["kept"], row.out)
    found["environment"] = checkpoint.get("environment", found["environment"])  # the training's
    found["more"] = dict(label=row.label, train_command=shlex.join(start),
                         environment=found["environment"])
    if curve("scores"):
        found["more"]["history"] = curve("scores")
    if "losses" in entry:
        found["more"] |= dict(loss=curve("loss"), val_loss=curve("val_loss"))
    found["more"]["fell"] = fell(curve("val_loss"), checkpoint["config"]["max_iters"])
    return found


def measured_alike(found, kept, out):
    """Raises RuntimeError where the runs that are kept were not measured as out's was."""
    differ = [key for key in MEASURED if found.get(key) != kept.get(key)]
    for key in ("by_answer", "by_distance"):
        if any((key in r) != (key in found["runs"][0]) for r in kept["runs"]):
            differ.append(key)
    if differ:
        raise RuntimeError(f"the runs of results/ have another {differ[0]} than {out}: one table "
                           "can't have both; without --missing all are made anew")


def fell(losses, steps):
    """
    [[iter, validation loss], ...] -> by how many nats it fell over the last fifth of the steps, or
    since the last validation before; None where there is none.
    """
    before = [loss for it, loss in losses if it <= 0.8 * steps]
    return before[-1] - losses[-1][1] if before else None


def deviation(values):
    """The standard deviation of two numbers or more; of one that is not finite, NaN."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def by_task(scale):
    """A scale of several tasks as one of each: {task: scale}."""
    if "tasks" not in scale:
        return {"": scale}
    return {name: one | dict(rows=scale["rows"]) for name, one in scale["tasks"].items()}


def folder_of(flags, seed):
    """A run's folder, named by its flags: tables of one group share the runs that they share."""
    return re.sub(r"[^\w.]+", "-", flags.replace("--model ", "")) + f"-{seed}"


class Row(NamedTuple):
    """One run of a table."""
    label: str
    flags: str    # its own, for train.py
    seed: int
    out: Path
    first: tuple  # the scale of the entry and the folder of the run that it begins with, if any


def folder_for(name, entry, scale):
    """Where an entry's runs are, from the repository's root; a group's entries share theirs."""
    return Path("out") / f"{entry.get('group', name)}.{scale}"


def planned(args, entry, scale, folder):
    """-> Row of every run that is not kept."""
    kept = {(r["label"], r["seed"]) for r in scale.get("kept", {}).get("runs", [])}
    for label, (flags, n) in scale["rows"].items():
        if args.rows and label not in args.rows:
            continue
        for seed in range(1337, 1337 + (args.seeds or n)):
            if (label, seed) in kept:
                continue
            name, first = folder_of(flags, seed), ()
            if "first" in entry:
                earlier = experiments.known()[entry["first"]]
                before = earlier[args.scale]
                before = compiled(before) if args.compile else before
                first = before, folder_for(entry["first"], earlier, args.scale) / name
            yield Row(label, flags, seed, folder / name, first)


def jobs(args, entry, scale, folder):
    """-> {name: function(run)}, one for each row and seed."""
    device, found = on_device(args), {}
    for row in planned(args, entry, scale, folder):
        found[row.out.name] = partial(training, row, entry, scale, device)
    return found


def commands(args, entry, scale, folder):
    """-> {label: the commands of each run}: of the run that it begins with, and its own two."""
    device, found = on_device(args), {}
    for row in planned(args, entry, scale, folder):
        earlier, first = row.first or (None, "")
        words = []
        if row.first:
            before, _ = words_of(first, row.flags, row.seed, earlier, device)
            words.append(before + ["--out_dir", str(first), "--no-evaluate", *device])
        start, score = words_of(row.out, row.flags, row.seed, scale, device, first)
        words += [start + ["--out_dir", str(row.out), "--no-evaluate", *device], score]
        found.setdefault(row.label, []).append(words)
    return found


def compiled(scale):
    """The same with torch.compile in every training."""
    if "tasks" in scale:
        return scale | dict(tasks={name: compiled(one) for name, one in scale["tasks"].items()})
    return scale | dict(train=f"{scale['train']} --compile on")


def on_device(args):
    return ["--device", args.device] if args.device != "auto" else []


def collect(entry, scale, evaluations):
    """What the jobs returned, and what is kept -> the entry's JSON."""
    kept = scale.get("kept", {})
    first = evaluations[0] if evaluations else kept
    result = {k: first[k] for k in ("environment", *MEASURED) if k in first}
    result["paper"] = entry.get("published", {})
    if "published_at" in scale:
        result["paper_lengths"] = scale["published_at"]
    for key in ("columns", "losses"):
        if key in entry:
            result[key] = entry[key]
    found = kept.get("runs", []) + [e["runs"][0] | e["more"] for e in evaluations]
    rows = list(scale["rows"])
    found.sort(key=lambda r: (rows.index(r["label"]), r["seed"]))
    return result | dict(runs=found)


def asked(result, scale):
    """
    The flags that make what is in an entry's JSON, from nothing: of one command, or of several,
    where rows have more seeds than others, or were compiled.
    """
    rows, groups = {}, {}
    for r in result["runs"]:
        rows.setdefault(r["label"], []).append("--compile on" in r["train_command"])
    fewer = {len(found) for row, found in rows.items() if len(found) != scale["rows"][row][1]}
    for row, found in rows.items():
        seeds = len(found) if len(found) in fewer else 0  # 0: the entry's own
        groups.setdefault((seeds, any(found)), []).append(row)
    commands = []
    for (seeds, compiled), some in groups.items():
        flags = f" --seeds {seeds}" if seeds else ""
        flags += f" --rows {shlex.join(some)}" if len(some) < len(scale["rows"]) else ""
        flags += " --compile" if compiled else ""
        commands.append(flags + (" --missing" if commands else ""))
    return commands


def figures(entry):
    """What plot.py is asked for, in words, to show the JSON: of a task what its table has first."""
    if "losses" in entry:
        return [["curves"]]
    if "first" in entry:
        return [["ndcg"]]
    if "columns" not in entry:
        return [["lengths"]]
    _, _, metric = entry["columns"][0]
    return [[kind, "--metric", metric] for kind in ("scores", "errors")]


def write_contrast(result, row):
    """results/contrast.json: one row's curve, drawn dashed beside a reader's own run."""
    r = next((r for r in result["runs"] if r["model"] == row), None)
    if r is None:  # not among --rows
        return
    same = ("data", "tokenizer", "block_size", "n_layer", "n_head", "n_embd", "max_iters")
    settings = {k: r["config"][k] for k in same}
    settings |= dict(tokens=result["tokens"], lengths=result["lengths"])
    runs.write_json(runs.ROOT / "results" / "contrast.json", dict(
        model=r["model"], python=r["environment"]["python"], source=result["data"]["sha256"],
        settings=settings, perplexity=r["perplexity"], by_position=r["by_position"],
        command=r["train_command"]))
