"""Models and tasks by name: a file that is there can be asked for, no script has to be told."""
import dataclasses
import functools
import importlib
import re
import sys
from pathlib import Path
from typing import get_type_hints

import data
import data.text
from common import ROOT
from common.exits import fail, nearest, value_errors_fail
from kernels import install

# -----------------------------------------------------------------------------
# models

class Models(dict):
    """{name: (module, fields of its GPTConfig that the name changes)}"""
    why_not: dict  # {name: what is raised where it is asked for}

    def __missing__(self, name):
        if name in self.why_not:
            raise self.why_not[name]
        fail(f"unknown model {name!r}, in no file's VARIANTS: {nearest(name, self, main_models())}")


@functools.cache
def models():
    """
    Every name that can be asked for: model_*.py, and what has VARIANTS in other rooms. VARIANTS are
    the names that a file answers to; model_mine.py without them answers to mine. A name that two
    files claim is nobody's. A file that does not import stops only those who ask for it.
    """
    found = Models()
    found.why_not = {}
    rooms = files_with("VARIANTS", "rivals", "lab/bert", "lab/variants")
    for path in [*sorted(ROOT.glob("model_*.py")), *rooms]:
        own = path.stem.removeprefix("model_")
        try:
            module = import_file(path)
            variants = getattr(module, "VARIANTS", {own: {}})
            for fields in variants.values():
                module.GPTConfig(**fields), module.GPT  # fails where one of them is not there
        except (Exception, SystemExit) as e:  # a copy that is being changed may fail in any way
            found.why_not[own] = e
            print(f"warning: {path.name} is left out: {e!r}", file=sys.stderr)
            continue
        if path.parent == ROOT and own not in variants:
            answers = f"error: {path.name} answers to {', '.join(variants)}: see VARIANTS in it"
            found.why_not[own] = SystemExit(answers)
        for name, fields in variants.items():
            if name in found:
                found.why_not[name] = SystemExit(
                    f"error: {found[name][0].__name__}.py and {module.__name__}.py both answer to "
                    f"{name!r}: change VARIANTS in one of them")
            found[name] = module, fields
    for name in found.keys() & found.why_not.keys():
        del found[name]
    return found


def files_with(word, *rooms):
    """Yields the files of these folders in which a line begins with `word`; none is imported."""
    begins = re.compile(rf"^{word}\b", re.M)
    for room in rooms:
        for path in sorted(ROOT.glob(f"{room}/*.py")):
            if begins.search(path.read_text(encoding="utf-8", errors="replace")):
                yield path


def import_file(path):
    return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def main_models():
    """The names of the root and of rivals/: what --model is mostly asked for."""
    return [name for name, (module, _) in models().items()
            if not module.__name__.startswith("lab.")]


def fields_of_models():
    modules = {module for module, _ in models().values()}
    return set().union(*(module.GPTConfig.__dataclass_fields__ for module in modules))


def pick(cls, config):
    """The fields of dataclass cls that are in the flat dict config, in which a path is a string."""
    types = get_type_hints(cls)
    found = {f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config}
    return {name: Path(x) if types[name] is Path else x for name, x in found.items()}


@value_errors_fail()
def make_model(config):
    """The model of a flat config, on torch's default device; one that cannot be ends in a line."""
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
    The files of tasks: those in data/ or lab/bert/ with a class Task, but for the contract itself
    and data/text.py, which is the task of every other name.
    """
    paths = files_with("class Task", "data", "lab/bert")
    return [path for path in paths if path.stem not in ("__init__", "text")]


def task_names():
    """Every name that --data knows, paths aside: the corpora, then the tasks."""
    return [*data.text.CORPORA, *sorted(path.stem for path in tasks())]


def find_task(name, gone=False):
    """The class of a task; any other name is text: a corpus, or a path that `gone` allows."""
    files = [path for path in tasks() if path.stem == name]
    if len(files) > 1:
        fail(f"{' and '.join(map(str, files))} are both called {name!r}: rename one of them")
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


@value_errors_fail()
def make_task(config, kept=None):
    """The task of a flat config, with what a checkpoint has kept for it; or a line, why not."""
    cls = find_task(config["data"])
    task = cls(**pick(cls, config))
    if kept:
        task.load(kept)
    return task
