"""Checkpoints: where they are, and models out of them."""
import glob
import io
import json
import re
from pathlib import Path
from typing import NamedTuple, get_type_hints

import numpy as np
import torch

from common import ROOT, names
from common.bema import BEMA
from common.exits import fail
from data.text import was_prepared

KEYS = {"config", "model", "iter", "source", "kept", "seconds", "best_val_loss"}


class Run(NamedTuple):
    path: Path
    name: str  # its folder
    model: torch.nn.Module
    config: dict
    checkpoint: dict


def checkpoints():
    """The last checkpoint of every run under out/, links followed, the newest first."""
    paths = map(Path, glob.glob("out/**/ckpt.pt", recursive=True))
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def find_checkpoint(path=None):
    """A folder's last checkpoint, a file itself, or the newest under out/ if nothing is named."""
    if path is None:
        path = next(iter(checkpoints()), "out")
    path = Path(path).expanduser()
    if path.is_dir():
        path = path / "ckpt.pt"
    if not path.exists():
        folder = path.parent if path.suffix == ".pt" else path
        model, data, *_ = *folder.name.split("-"), ""  # as train.py calls it
        how = f"--model {model if model in names.models() else 'cable'}"
        how += f" --data {data}" if data in names.task_names() else ""
        fail(f"no checkpoint at {path}; make one with: python train.py {how}")
    return path


def folder_for(runs):
    """
    The folder for what is made of runs: a run's own, or out/ for several, and for weights that the
    repository has.
    """
    folder = runs[0].path.parent
    if len(runs) > 1 or ROOT / "results" / "weights" in folder.resolve().parents:
        folder = Path("out")
        folder.mkdir(exist_ok=True)
    return folder


def plain(name, value):
    """A setting as a checkpoint and eval.py's JSON keep it; what they cannot ends in a line."""
    value = value.item() if isinstance(value, np.generic) else value
    value = str(value) if isinstance(value, Path) else value
    file = io.BytesIO()
    try:
        json.dumps(value)
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # pickle and torch have many
        words = " ".join(repr(value).split())[:60]
        fail(f"{name} is {words}, of {type(value)}; a run keeps only numbers, strings, lists and "
             "dicts of these")
    return value


def load_checkpoint(path):
    """The dict that train.py saved, on the CPU; of any other file one line."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if KEYS <= checkpoint.keys():
            return checkpoint
    except PermissionError:
        raise
    except Exception as e:  # torch has many for a foreign file
        kind = re.search(r"GLOBAL (\S+)|$", str(e))[1]
        if kind:
            fail(f"{path} holds a {kind}, which may be a program, and is not read")
    fail(f"{path} is not a whole checkpoint of this repository (cut off, or another program's)")


def load_weights(model, weights, path):
    """model.load_state_dict; weights that do not fit end in a line with the first that differs."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:
        _, first, *_ = str(e).splitlines()
        fail(f"the weights in {path} do not fit {names.file_of(model)}: {first.strip()[:160]}")


def at_test(config, changes):
    """What `--set NAME=VALUE ...` changes of a run's config: fields in its model file's AT_TEST."""
    module, _ = names.models()[config["model"]]
    choices, values = getattr(module, "AT_TEST", ()), {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or name not in choices:
            fail(f"--set {change}: {names.file_of(module.GPT)} takes NAME=VALUE at test time, "
                 f"NAME one of: {', '.join(choices) or 'none'}")
        kind = get_type_hints(module.GPTConfig)[name]
        try:
            values[name] = kind(value)
        except ValueError:
            fail(f"--set {change}: {name} takes {kind.__name__}, not {value!r}")
    return values


def load_run(path=None, device="cpu", bema=False, changes=()):
    """
    A run's folder or checkpoint file (default: the newest under out/) -> Run, its model on the
    device in eval mode, with `bema` its BEMA weights. changes are those of --set, ["repair=yarn"].
    """
    path = find_checkpoint(path)
    checkpoint = load_checkpoint(path)
    config = checkpoint["config"] | at_test(checkpoint["config"], changes)
    model = names.make_model(checkpoint["config"])
    load_weights(model, checkpoint["model"], path)
    name = path.resolve().parent.name
    if bema:
        if "bema" not in checkpoint:
            fail(f"{path} has no BEMA weights: it was trained without --bema")
        average = BEMA(model, config["rho"], config["kappa"], config["eta"])
        average.load(**checkpoint["bema"])
        model.load_state_dict(average.weights(model, checkpoint["iter"]), strict=False)
        name += " (BEMA)"
    if changes:
        name += f" ({', '.join(changes)})"
        whole, model = model.state_dict(), names.make_model(config)
        cut = {key: whole[key][tuple(map(slice, p.shape))] for key, p in model.state_dict().items()}
        load_weights(model, cut, path)  # of a table that is shorter now: its beginning
    return Run(path, name, model.to(device).eval(), config, checkpoint)


def check_same(runs, settings):
    """Fails unless all runs have the same of these settings."""
    first = runs[0]
    for run in runs:
        for name in sorted(settings & run.config.keys() & first.config.keys()):
            theirs, other = run.config[name], first.config[name]
            if theirs != other:
                fail(f"{run.path} was trained with {name}={theirs}, {first.path} with "
                     f"{name}={other}: score them one by one")


def check_text(config, source):
    """
    Fails unless a run's text is a known corpus or was prepared on this machine with the same
    tokens: a checkpoint must not make us read any path that it names.
    """
    where = config[names.text_setting(config)]
    names.trained_on(config)  # a task that is gone ends here
    if where not in ("msmarco", *names.task_names()) and not was_prepared(source):
        fail(f"the text behind {where} is not what the run was trained on, or was never prepared "
             "here: name it with --data, or resuming an encoder's run with --corpus")
