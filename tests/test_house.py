"""The house: how long files and functions are, who imports whom, and the guide's snippets."""
import graphlib
import re

import torch

from common import names
from tests.helpers import MODEL_FILES, ROOT

FOLDERS = (".", "common", "data", "kernels", "experiments", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
LINES = {"rivals.classics": 360, "model_": 300, "common/": 160, "test_all": 600, "tests/": 700}
IMPORT = re.compile(r"^(?:try:\n +)?((?:from|import) [^\n(]*(?:\([^)]*\))?)", re.M)
MAY_IMPORT = "data", "kernels", "experiments", "exercises", "test_all"  # models, tasks
SCREEN = {("train.py", "main"): 140}  # lines of a function; of any other 60


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def test_no_file_is_too_long():
    """Nine methods share rivals/classics.py."""
    for path in SOURCES:
        most = [most for start, most in LINES.items() if name_of(path).startswith(start)]
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert not most or lines <= most[0], f"{name_of(path)} has {lines} lines"


def test_functions_fit_on_a_screen():
    """A function ends before the next line that is not indented more than it is."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for function in re.finditer(r"^( *)def (\w+).*\n(?:\1[ )].*\n|\n)*", text, re.M):
            lines = function[0].rstrip().count("\n") + 1
            most = SCREEN.get((path.name, function[2]), 60)
            assert lines <= most, f"{name_of(path)}: {function[2]} has {lines} lines"


def imports():
    """{module: the modules of the repository that it imports when it is imported}"""
    graph = {}
    for path in SOURCES:
        module = name_of(path).removesuffix(".py").replace("/", ".")
        package = module.rpartition(".")[0]
        text = path.read_text(encoding="utf-8")
        others = graph.setdefault(module.removesuffix(".__init__"), set())
        for line in IMPORT.findall(text):
            start, _, members = line.split(maxsplit=1)[1].partition(" import ")
            start = start.split()[0]  # without `as`
            if start.startswith("."):
                start = (package + start).rstrip(".")
            others.add(start)
            others |= {f"{start}.{member}" for member in re.findall(r"\w+", members)}
    return {module: others & graph.keys() - {module} for module, others in graph.items()}


def test_imports_have_no_circle():
    tuple(graphlib.TopologicalSorter(imports()).static_order())


def test_who_imports_whom():
    """A new model or task is a new file; scripts find it by its name."""
    models = {path.stem for path in MODEL_FILES}
    tasks = {f"data.{path.stem}" for path in (ROOT / "data").glob("*.py")} - {
        f"data.{name}" for name in names.NOT_TASKS}
    for module, others in imports().items():
        if module in models:
            assert others <= {"kernels"}, module
        elif "." not in module and module not in MAY_IMPORT:
            assert not others & (models | tasks), module


def test_the_guides_snippets_run(monkeypatch):
    """In order, in one namespace; a mistake is reported with its line in GUIDE.md."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    text, namespace = (ROOT / "GUIDE.md").read_text(encoding="utf-8"), {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M))
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], "GUIDE.md", "exec"), namespace)
    assert len(blocks) >= 5
