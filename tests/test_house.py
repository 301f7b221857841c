"""The house: lines, functions, imports, names; the guide's snippets."""
import ast
import functools
import re
import subprocess

import pytest
import torch

import data
from tests.helpers import MODEL_FILES, NAMES, ROOT

SCRIPTS = [path for path in sorted(ROOT.glob("*.py"))
           if not path.stem.startswith(("model_", "test_"))]


@functools.cache
def sources():
    """Every Python file that git knows, or, where there is no git, every one in its place."""
    try:
        listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True,
                                text=True).stdout.split()
    except OSError:
        listed = []
    folders = (".", "data", "kernels", "experiments")
    found = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    return [ROOT / name for name in listed] or found


def imports(path):
    """The names of all modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "."} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def test_lines_end_by_column_100():
    long = []
    for path in sources():
        for n, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > 100:
                long.append(f"{path.relative_to(ROOT)}:{n}: {len(line)}")
    assert not long, "\n".join(long)


def test_functions_fit_on_a_screen():
    """60 lines, the loop of train.py 120."""
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                most = 120 if (path.name, node.name) == ("train.py", "main") else 60
                if lines > most:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda p: p.stem)
def test_model_files_stand_alone_and_stay_short(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots <= {"math", "dataclasses", "torch", "kernels"}
    most = 370 if path.stem == "model_classics" else 250  # nine methods in one
    assert len(path.read_text().splitlines()) <= most


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_import_neither_each_other_nor_a_model_or_task(path):
    scripts = {p.stem for p in SCRIPTS} - {"runs"}
    models_and_tasks = {p.stem for p in MODEL_FILES}
    models_and_tasks |= {f"data.{p.stem}" for p in ROOT.glob("data/*.py")} - {"data.text"}
    assert not imports(path) & (scripts | models_and_tasks)


# Names of methods and tasks that are also words of English: they count where they stand alone,
# except for the one that is a key of many rows. A default may be named once in a script.
ENGLISH = {"learned", "relative", "fire", "diff", "counting", "label", "recall"}
DEFAULTS = {"cable", "stdlib", "nope"}
HELP = {"help", "description", "usage", "epilog"}


def named(text):
    """The methods and tasks that a string names; the usage example is the default's."""
    text = re.sub(r"--model cable\b|--data stdlib\b|\bcable-stdlib\b", "", text)
    names = set(NAMES) | set(data.known())
    if text in names - {"label"}:
        return {text}
    return (names - ENGLISH) & set(re.findall(r"[a-z0-9_]+", text.lower()))


def strings_to_check(tree):
    """String constants that are neither docstrings nor help."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # docstrings
            skipped.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in HELP:
            skipped |= set(ast.walk(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_no_script_names_a_method_or_a_task(path):
    """A new method or task is a new file, and no script changes."""
    tree, found, defaults = ast.parse(path.read_text()), [], set(DEFAULTS)
    for node in strings_to_check(tree):
        if node.value in defaults:
            defaults.remove(node.value)
        elif named(node.value):
            found.append(f"{path.name}:{node.lineno}: {', '.join(sorted(named(node.value)))}")
    for node in ast.walk(tree):
        name = getattr(node, "id", getattr(node, "name", getattr(node, "attr", None)))
        words = set(str(name).split("_")) | {name}
        if words & (set(NAMES) | set(data.known())) - ENGLISH:
            found.append(f"{path.name}:{node.lineno}: the name {name}")
    assert not found, "\n".join(found)


def snippets():
    """The Python blocks of GUIDE.md with the lines they start at."""
    text = (ROOT / "GUIDE.md").read_text()
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M):
        yield text.count("\n", 0, block.start(1)) + 1, block[1]


def test_the_guides_snippets_run(monkeypatch):
    """In order, in one namespace; a mistake is reported with its line in GUIDE.md."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    namespace, n = {}, 0
    for line, code in snippets():
        exec(compile("\n" * (line - 1) + code, "GUIDE.md", "exec"), namespace)
        n += 1
    assert n >= 5
