"""Fixtures that several files of tests use."""
import contextlib
import importlib
import shutil
import signal
import sys
import types

import pytest
import tiktoken
import torch

import data
import data.text
from common import names
from tests.helpers import (
    ROOT,
    TINY_FLAGS,
    Inline,
    command,
    main_of,
    run_here,
    write_fork,
    write_notes,
    write_package,
)

torch.backends.mps.is_available = lambda: False  # tests are of a CPU, or of CUDA
# a shell in the background has the tests ignore Ctrl-C, nohup a closed terminal: some send these
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):  # not on Windows
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def copy_repository(folder):
    """Every module."""
    unwanted = shutil.ignore_patterns("prepared", "__pycache__")
    for path in ROOT.iterdir():
        if path.suffix == ".py":
            shutil.copy(path, folder)
        if (path / "__init__.py").exists():
            shutil.copytree(path, folder / path.name, ignore=unwanted)


@contextlib.contextmanager
def modules_put_back(start):
    """Afterwards the modules whose names begin so are those that they were."""
    before = {name: module for name, module in sys.modules.items() if name.startswith(start)}
    yield
    for name in [name for name in sys.modules if name.startswith(start)]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the repository's modules, in which models are looked up; it has no model_mine."""
    for path in ROOT.glob("*.py"):  # of the repository, as the copy is the first on the path
        if not path.stem.startswith(("model_", "test_")):
            main_of(path.name)
    names.models()
    copy_repository(tmp_path)
    (tmp_path / "model_mine.py").unlink(missing_ok=True)
    with modules_put_back("model_"):
        sys.modules.pop("model_mine", None)
        monkeypatch.setattr(names, "ROOT", tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        names.models.cache_clear()
        yield tmp_path
    names.models.cache_clear()


@pytest.fixture
def fork(copy):
    """fork(name, *edits) -> model_NAME.py edited as model_mine.py, which answers to `mine`."""
    def edit(name, *edits):
        write_fork(copy, name, *edits)
        return names.models()["mine"][0]
    return edit


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A folder, in which prepared text is kept, too."""
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    return tmp_path


@pytest.fixture
def words(monkeypatch):
    """A tokenizer that stands for gpt2: it splits text as gpt2 does, and knows three words."""
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    from tiktoken_ext.openai_public import r50k_pat_str
    encoding = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 259})
    get = data.text.get_encoding
    monkeypatch.setattr(data.text, "get_encoding",
                        lambda name: encoding if name == "gpt2" else get(name))
    return encoding


@pytest.fixture
def library(prepared):
    return write_package(prepared)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder whose files are tasks, too: data/ as it would be with a user's own in it."""
    names.models()  # which are the repository's
    for path in (ROOT / "data").glob("*.py"):
        importlib.import_module(f"data.{path.stem}".removesuffix(".__init__"))
    folder = tmp_path / "data"
    shutil.copytree(ROOT / "data", folder, ignore=shutil.ignore_patterns("prepared"))
    monkeypatch.setattr(names, "ROOT", tmp_path)
    monkeypatch.setattr(data, "__path__", [str(folder), *data.__path__])
    with modules_put_back("data."):
        yield folder


@pytest.fixture
def home(tmp_path):
    return write_notes(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with finished tiny runs, to be read only: two on text, two on flip-flop."""
    home = write_notes(tmp_path_factory.mktemp("trained"))
    (home / "empty.txt").write_text("")
    (home / "short.txt").write_text("too short to train on")
    torch.save(dict(weights=1), home / "strange.pt")
    pairs = ("cable", "notes"), ("learned", "notes"), ("rope", "flipflop"), ("tra", "flipflop")
    for name, text in pairs:
        command(home, "train.py", "--model", name, "--data", text, "--max_iters", 2,
                "--eval_interval", 1, "--no-evaluate", *TINY_FLAGS, "--out_dir", name)
    return home


@pytest.fixture(scope="session")
def repo(tmp_path_factory):
    folder = write_notes(tmp_path_factory.mktemp("repo"))
    copy_repository(folder)
    return folder


@pytest.fixture
def here(monkeypatch):
    """here(name=entry, ...): these are what reproduce.py has, and it runs its commands here."""
    import lab.figures
    import reproduce
    monkeypatch.setattr(reproduce, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(reproduce, "run", run_here)

    def have(**entries):
        module = types.ModuleType("lab.papers.mine", "Mine.\n\nSome words.")
        module.ENTRIES = entries
        monkeypatch.setattr(lab, "files", lambda: [module])
    return have
