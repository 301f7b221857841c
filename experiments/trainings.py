"""
The rows of a table, each a training and its evaluation: out/ENTRY.SCALE/ROW-SEED/ckpt.pt and
eval.json. reproduce.py runs the jobs' commands; what is there already is not made again.
"""
import dataclasses
import json
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import data
import runs


def options(words):
    """Flags -> {name: value in words}: True or False where they have none."""
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


def differing(config, words):
    """
    The first setting in which a run's config is not what train.py makes of these flags and of the
    defaults of its task and model, in words; "" where there is none.
    """
    flags = options(words)
    (module, variant), task = runs.find_model(flags["model"]), data.find(flags["data"])
    wanted = {}
    for cls in (module.GPTConfig, task):
        wanted |= {f.name: f.default for f in dataclasses.fields(cls) if f.name != "vocab_size"}
    size = flags.get("size", next(iter(task.defaults)))
    wanted |= task.defaults[size] | variant | flags
    if flags["data"] not in data.known():  # your own file or folder
        wanted["data"] = str(Path(flags["data"]).expanduser().resolve())
    for k, v in wanted.items():
        now = config.get(k, v)
        same = str(now) == str(v) or not (now or v)  # off is off: a switch may have become a choice
        if not same and not (isinstance(config[k], float) and config[k] == float(v)):
            return f"{k}={config[k]}, the entry says {v}"
    return ""


def check(out, config, words):
    """The run in out must be the entry's."""
    found = differing(config, words)
    if found:
        raise RuntimeError(f"{out} holds a run with {found}: move it away, and run this again")


def older(result, entry, scale):
    """
    Why a JSON is not of this definition of its entry: the first row, setting or length that
    differs; "" where it is. It may have fewer seeds.
    """
    missing = dict.fromkeys(scale["rows"])
    for r in result["runs"]:
        label = r.get("label", r["model"])
        if label not in scale["rows"]:
            return f"it has a row {label!r}, the entry has none"
        missing.pop(label, None)
        start, _ = words_of("", scale["rows"][label][0], r["seed"], scale, [])
        found = differing(r["config"], start[2:])
        if found:
            return f"its row {label!r} has {found}"
    for label in missing:
        return f"it has no row {label!r}"
    asked, first = options(scale["eval"].split()), result["runs"][0]
    lengths = result.get("lengths", first.get("scores", ()))
    has = dict(sequences=result.get("sequences"), lengths=" ".join(map(str, lengths)),
               strided=str("strided_tokens" in result))
    for name in has.keys() & asked.keys():
        if str(has[name]) != asked[name]:
            return f"it has {name}={has[name]}, the entry says {asked[name]}"
    return ""


def words_of(out, flags, seed, scale, device):
    """-> the words of the two commands of one row, without where and on what to train."""
    # of a flag that is there twice the last counts: the row's own
    start = ["python", "train.py", *scale["train"].split(), *flags.split(), "--seed", str(seed)]
    return start, ["python", "eval.py", str(out), *scale["eval"].split(), *device]


def training(out, label, flags, seed, scale, device, run):
    """out/{ckpt.pt,eval.json} of one row, made now or already there -> what is in eval.json."""
    folder = runs.ROOT / out
    start, command = words_of(out, flags, seed, scale, device)
    if not (folder / "ckpt.pt").exists():
        shutil.rmtree(folder, ignore_errors=True)  # killed before its first checkpoint
        run(*start, "--out_dir", str(out), "--no-evaluate", *device)
    checkpoint = runs.load_checkpoint(folder / "ckpt.pt")
    check(out, checkpoint["config"], start[2:])
    if checkpoint["iter"] < checkpoint["config"]["max_iters"]:
        run("python", "train.py", "--resume", str(out), "--no-evaluate", *device)
    evaluated = folder / "eval.json"
    try:
        newer = evaluated.stat().st_mtime >= (folder / "ckpt.pt").stat().st_mtime
        done = newer and json.loads(evaluated.read_text())["command"] == " ".join(command)
    except (OSError, ValueError, KeyError):  # not there, or half written
        done = False
    if not done:
        run(*command)
    found = json.loads(evaluated.read_text())
    history = [[r["iter"], r["scores"]] for r in runs.read_log(folder) if "scores" in r]
    found["environment"] = checkpoint.get("environment", found["environment"])  # the training's
    found["more"] = dict(label=label, train_command=shlex.join(start),
                         environment=found["environment"])
    if history:
        found["more"]["history"] = history
    return found


def folder_of(flags, seed):
    """A run's folder, named by its flags: tables of one group share the runs that they share."""
    return re.sub(r"[^\w.]+", "-", flags.replace("--model ", "")) + f"-{seed}"


def planned(args, scale, folder):
    """-> (label, flags, seed, folder of the run) of every run."""
    for label, (flags, n) in scale["rows"].items():
        for seed in range(1337, 1337 + (args.seeds or n)):
            yield label, flags, seed, folder / folder_of(flags, seed)


def jobs(args, entry, scale, folder):
    """-> {name: function(run)}, one for each row and seed."""
    device, found = on_device(args), {}
    for label, flags, seed, out in planned(args, scale, folder):
        found[out.name] = partial(training, out, label, flags, seed, scale, device)
    return found


def commands(args, scale, folder):
    """-> {label: the two commands of each run}"""
    device, found = on_device(args), {}
    for label, flags, seed, out in planned(args, scale, folder):
        start, score = words_of(out, flags, seed, scale, device)
        start += ["--out_dir", str(out), "--no-evaluate", *device]
        found.setdefault(label, []).append((start, score))
    return found


def on_device(args):
    return ["--device", args.device] if args.device != "auto" else []


def collect(entry, scale, evaluations):
    """What the jobs returned -> the entry's JSON."""
    first = evaluations[0]
    shared = ("environment", "dtype", "data", "split", "tokens", "strided_tokens", "lengths",
              "splits", "sequences")
    result = {k: first[k] for k in shared if k in first} | dict(paper=entry.get("published", {}))
    if "published_at" in scale:
        result["paper_lengths"] = scale["published_at"]
    if "columns" in entry:
        result["columns"] = entry["columns"]
    return result | dict(runs=[e["runs"][0] | e["more"] for e in evaluations])


def figures(entry):
    """What plot.py is asked for, in words, to show the JSON: of a task what its table has first."""
    if "columns" not in entry:
        return [["lengths"]]
    _, _, metric = entry["columns"][0]
    return [[kind, "--metric", metric] for kind in ("scores", "errors")]


def write_contrast(result, row):
    """results/contrast.json: one row's curve, drawn dashed beside a reader's own run."""
    r = next(r for r in result["runs"] if r["model"] == row)
    same = ("data", "tokenizer", "block_size", "n_layer", "n_head", "n_embd", "max_iters")
    settings = {k: r["config"][k] for k in same}
    settings |= dict(tokens=result["tokens"], lengths=result["lengths"])
    runs.write_json(runs.ROOT / "results" / "contrast.json", dict(
        model=r["model"], python=r["environment"]["python"], source=result["data"]["sha256"],
        settings=settings, perplexity=r["perplexity"], by_position=r["by_position"],
        command=r["train_command"]))
