"""Models and tasks by name: a file that is there can be asked for, no script has to be told."""
import dataclasses
import functools
import importlib
import re
import sys
import traceback
from pathlib import Path

import data
import data.text
from common import ROOT
from common.attention import install
from common.exits import fail, nearest

# -----------------------------------------------------------------------------
# models

ROOMS = "rivals", "encoders", "experiments/variants"  # where models are, beside the root


class Models(dict):
    """{name: (module, fields of its GPTConfig that the name changes)}"""
    why_not: dict  # {name: why it is not among them}

    def __missing__(self, name):
        unknown = f"unknown model {name!r}: {nearest(name, self)} (there is no model_{name}.py)"
        fail(self.why_not.get(name, unknown))


@functools.cache
def models():
    """
    Every name that can be asked for: model_*.py, and what has VARIANTS in ROOMS. VARIANTS are the
    names that a file answers to; model_mine.py without them answers to mine. A name that two files
    claim is nobody's. A file that does not import stops only those who ask for it.
    """
    files = sorted(ROOT.glob("model_*.py"))
    for room in ROOMS:
        files += files_with("VARIANTS", room)
    names, claimed = Models(), {}
    names.why_not = {}
    for path in files:
        file, own = path.relative_to(ROOT).as_posix(), path.stem.removeprefix("model_")
        try:
            module = import_file(file)
            variants = getattr(module, "VARIANTS", {own: {}})
            for fields in variants.values():
                module.GPTConfig(**fields), module.GPT  # fails where one of them is not there
        except (Exception, SystemExit) as e:  # a copy that is being changed may fail in any way
            names.why_not[own] = f"{file} cannot be imported:\n{traceback.format_exc()}"
            print(f"warning: {file} is left out: {e!r}", file=sys.stderr)
            continue
        for name, fields in variants.items():
            names[name] = module, fields
            claimed.setdefault(name, []).append(file)
        names.why_not[own] = (f"{file} does not answer to {own!r} but to {', '.join(variants)}: "
                              "see VARIANTS")
    for name, files in claimed.items():
        if len(files) > 1:
            del names[name]
            names.why_not[name] = (f"{' and '.join(files)} both answer to {name!r}: change "
                                   "VARIANTS in one of them")
    return names


def files_with(word, room):
    """The files of a room in which a line begins with `word`; none is imported."""
    begins = re.compile(rf"^{word}\b", re.M)
    return [path for path in sorted(ROOT.glob(f"{room}/*.py"))
            if begins.search(path.read_text(encoding="utf-8", errors="replace"))]


def import_file(file):
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


def pick(cls, config):
    """The fields of dataclass cls that are in the flat dict config."""
    return {f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config}


def make_model(config):
    """The model of a flat config, on torch's default device. Raises ValueError."""
    module, _ = models()[config["model"]]
    model = module.GPT(module.GPTConfig(**pick(module.GPTConfig, config)))
    for part in model.modules():
        for cls in type(part).__mro__:  # its parts, and what they inherit, may be of other files
            install(sys.modules[cls.__module__])
    return model


def is_encoder(model):
    """Of a model, or its class: whether a token sees later ones, too."""
    return getattr(model, "is_encoder", False)


def that_read(both_ways):
    """The names of the encoders, or of the causal models."""
    return [name for name, (module, _) in models().items() if is_encoder(module.GPT) == both_ways]


def file_of(model):
    """The file of a model, or of its class."""
    return model.__module__.replace(".", "/") + ".py"


def new_cache(model, size):
    """An empty cache of the model's own kind, for `size` tokens to come."""
    return sys.modules[type(model).__module__].Cache(size)


# -----------------------------------------------------------------------------
# tasks

def tasks():
    """
    {name: its files}: NAME.py in data/ or encoders/ with a class Task, but for the contract itself
    and data/text.py, which is the task of every other name.
    """
    files = {}
    for path in files_with("class Task", "data") + files_with("class Task", "encoders"):
        if path.stem not in ("__init__", "text"):
            files.setdefault(path.stem, []).append(path.relative_to(ROOT).as_posix())
    return files


def task_names():
    """Every name that --data knows, paths aside: the corpora, then the tasks."""
    return [*data.text.CORPORA, *sorted(tasks())]


def find_task(name, gone=False):
    """The class of a task; any other name is text, a corpus or a path, which may be gone."""
    files = tasks().get(name, [])
    if len(files) > 1:
        fail(f"{' and '.join(files)} are both called {name!r}: rename one of them")
    if files:
        task = import_file(files[0]).Task
        if not issubclass(task, data.Task):
            fail(f"{files[0]} has no class Task that inherits from data.Task")
        return task
    if not (gone or name in data.text.CORPORA or Path(name).expanduser().exists()):
        fail(f"unknown corpus {name!r} (nor is it a file or folder, nor has data/{name}.py a class "
             f"Task): {nearest(name, task_names())}")
    return data.text.Task


def trained_on(config):
    """The class of the task that a run was trained on. A text, with a tokenizer, may be gone."""
    return find_task(config["data"], gone="tokenizer" in config)


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
