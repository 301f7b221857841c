"""Models and tasks by name: a file that is there can be asked for, no script has to be told."""
import dataclasses
import difflib
import functools
import importlib
import os
import re
import sys
import traceback

import data
import data.text
from common.files import ROOT, fail


def nearest(word, names):
    """What to say after an unknown word: the nearest names, else all of them."""
    close = difflib.get_close_matches(word, names, n=2, cutoff=0.7)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose from {', '.join(names)}"


# -----------------------------------------------------------------------------
# models

ROOMS = "rivals", "encoders", "experiments/variants"  # where models are, beside the root


class Models(dict):
    """{name: (module, fields of its GPTConfig that the name changes)}"""
    owners: dict  # {name: the files that claim it}
    broken: dict  # {file: the exception that its import raised}

    def __missing__(self, name):
        files = self.owners.get(name, [])
        if files:
            fail(f"{' and '.join(files)} both answer to {name!r}: change VARIANTS in one of them")
        file = f"model_{name}.py"
        if file in self.broken:
            traceback.print_exception(self.broken[file])
            fail(f"{file} cannot be imported")
        answers = [other for other, files in self.owners.items() if file in files]
        if answers:
            fail(f"{file} does not answer to {name!r} but to {', '.join(answers)}: see VARIANTS")
        fail(f"unknown model {name!r}: {nearest(name, self.owners)}")


@functools.cache
def models():
    """
    Every name that can be asked for, from model_*.py and those experiments that have VARIANTS, the
    names that a file answers to; model_mine.py without VARIANTS answers to mine. A name that two
    files claim is nobody's. A file that does not import stops only those who ask for it.
    """
    files = sorted(ROOT.glob("model_*.py"))
    for path in (path for room in ROOMS for path in sorted(ROOT.glob(f"{room}/*.py"))):
        if re.search(r"^VARIANTS\b", path.read_text(encoding="utf-8"), re.M):
            files.append(path)
    names = Models()
    names.owners, names.broken = {}, {}
    for path in files:
        file = path.relative_to(ROOT).as_posix()
        try:
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            variants = getattr(module, "VARIANTS", {path.stem.removeprefix("model_"): {}})
            for fields in variants.values():
                module.GPTConfig(**fields), module.GPT  # fails where one of them is not there
        except (Exception, SystemExit) as e:  # a copy that is being changed may fail in any way
            names.broken[file] = e
            print(f"warning: {file} is left out: {e!r}", file=sys.stderr)
            continue
        for name, fields in variants.items():
            names[name] = module, fields
            names.owners.setdefault(name, []).append(file)
    for name, owners in names.owners.items():
        if len(owners) > 1:
            del names[name]
    return names


def pick(cls, config):
    """The fields of dataclass cls that are in the flat dict config."""
    return {f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config}


def make_model(config):
    """The model of a flat config, on torch's default device. Raises ValueError."""
    module, _ = models()[config["model"]]
    return module.GPT(module.GPTConfig(**pick(module.GPTConfig, config)))


def is_encoder(model):
    """Of a model, or its class: whether a token sees later ones, too."""
    return getattr(model, "is_encoder", False)


def that_read(both_ways):
    """The names of the encoders, or of the causal models."""
    return [name for name, (module, _) in models().items() if is_encoder(module.GPT) == both_ways]


def new_cache(model, size):
    """An empty cache of the model's own kind, for `size` tokens to come."""
    return sys.modules[type(model).__module__].Cache(size)


# -----------------------------------------------------------------------------
# tasks

NOT_TASKS = {"__init__", "corpora", "text"}  # the other files of data/
OF_ENCODERS = {"mlm", "retrieval"}           # the tasks in encoders/


def task_names():
    """Every name that --data knows, paths aside: the corpora, then the tasks."""
    stems = {path.stem for path in ROOT.glob("data/*.py")}
    return [*data.text.CORPORA, *sorted(stems - NOT_TASKS | OF_ENCODERS)]


def find_task(name, gone=False):
    """The class of a task: data/NAME.py has it, and any other name is text, which may be gone."""
    if name in data.text.CORPORA:
        return data.text.Task
    if name in task_names():
        room = "encoders" if name in OF_ENCODERS else "data"
        task = getattr(importlib.import_module(f"{room}.{name}"), "Task", object)
        if not issubclass(task, data.Task):
            fail(f"data/{name}.py has no class Task that inherits from data.Task")
        return task
    if not gone and not os.path.exists(os.path.expanduser(name)):
        fail(f"unknown corpus {name!r} (nor is it a file or folder): {nearest(name, task_names())}")
    return data.text.Task


def text_setting(config):
    """Which setting names the text of a run: encoders have it in a task of its own."""
    return "corpus" if "corpus" in config else "data"


def make_task(config, kept=None):
    """
    The task of a flat config, with what a checkpoint has kept for it; where the config has a
    model's vocab_size, it is the task's. Raises ValueError.
    """
    cls = find_task(config["data"])
    task = cls(**pick(cls, config))
    if kept:
        task.load(kept)
    if config.get("vocab_size", 0) not in (0, task.vocab_size):
        fail(f"{config['data']} has {task.vocab_size} tokens, the model {config['vocab_size']}")
    return task
