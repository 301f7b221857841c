"""The house: how long files and functions are, and who imports whom."""
import ast
import graphlib

from tests.helpers import MODEL_FILES, ROOT

ROOMS = ("common", "data", "figures", "kernels", "lab", "lab/bert", "lab/papers", "lab/variants",
         "rivals", "tests")
SOURCES = [path for room in (".", *ROOMS) for path in sorted((ROOT / room).glob("*.py"))]
# From the ground up: what stands on a floor may import from its own and from those below
FLOORS = ("kernels rivals", "data", "common", "figures train sample eval", "lab", "reproduce",
          "tests test_all")
MODELS = [*MODEL_FILES, ROOT / "lab/bert/bert.py"]
LONG = dict(classics=340, rope=332)        # lines of a model file; of any other 250
SCREEN = {("train.py", "train"): 140}      # lines of a function; of any other 60


def name_of(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_no_file_is_too_long():
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").count("\n")
        most = LONG.get(path.stem, 250) if path in MODELS else 700
        assert lines <= most, f"{path} has {lines} lines"


def test_functions_fit_on_a_screen():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                most = SCREEN.get((path.name, node.name), 60)
                assert lines <= most, f"{path}: {node.name} has {lines} lines"


def imports(path):
    """The names of all that a file imports when it is imported itself."""
    tree, names = ast.parse(path.read_bytes()), set()
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in tree.body + [node for part in tree.body for node in getattr(part, "body", ())]:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            start = f"{package}.{node.module or ''}".strip(".") if node.level else node.module
            names |= {start} | {f"{start}.{alias.name}" for alias in node.names}
    return names


def graph():
    """{module: the repository's modules that it imports}"""
    paths = {name_of(path): path for path in SOURCES}
    return {name: imports(path) & paths.keys() - {name} for name, path in paths.items()}


def test_imports_have_no_circle():
    tuple(graphlib.TopologicalSorter(graph()).static_order())


def test_who_imports_whom():
    """A new model or task is a new file; scripts find it by its name."""
    models = {name_of(path) for path in MODELS}
    floors = {name: n for n, rooms in enumerate(FLOORS) for name in rooms.split()}
    tasks = {name_of(path) for path in SOURCES if "\nclass Task(" in path.read_text("utf-8")}
    for module, others in graph().items():
        room = module.partition(".")[0]
        if module in models:
            assert not others, module
        else:
            others = {name for name in others if name.partition(".")[0] != room}
            above = {name for name in others - models
                     if floors[name.partition(".")[0]] > floors[room]}
            assert not above, f"{module} imports {above}"
            if floors[room] < floors["lab"]:
                assert not others & (models | tasks - {"data.text"}), module
