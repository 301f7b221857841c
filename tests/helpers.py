"""What several files of tests use: small models, random inputs, commands run in this process."""
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import data.text
import kernels
from common import ROOT, exits, files, names
from common.exits import in_one_line

torch.set_num_threads(1)
MODEL_FILES = [*sorted(ROOT.glob("model_*.py")), *sorted(ROOT.glob("rivals/[a-z]*.py"))]
NAMES = sorted(names.models())
ENCODERS = [name for name in NAMES if names.is_encoder(names.models()[name][0].GPT)]
MODELS = [name for name in NAMES if name not in ENCODERS]
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=61)
SMALLER = dict(nope_every=2, window=7)  # of what a name means, to fit into TINY
INF = float("inf")


def module_of(path):
    return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def make(name, **changes):
    """A small random model; what starts at zero is moved, so that a test of it can fail."""
    torch.manual_seed(0)
    fields = names.models()[name][1] | TINY | dict(model=name, n_label=200, P=7)
    fields |= {field: small for field, small in SMALLER.items() if field in fields} | changes
    model = names.make_model(fields).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def random_qkv(B=2, H=3, Tq=37, Tk=37, d=6, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, T, d, generator=g, dtype=dtype) for T in (Tq, Tk, Tk)]


def close(a, b, tol, says=""):
    assert a.shape == b.shape, (a.shape, b.shape)
    diff = (a.double() - b.double()).abs().max().item()
    assert diff <= tol, f"largest difference {diff:.2e}, allowed {tol:.0e}{says}"


def turned(x, positions):
    """RoPE in complex numbers: channels c and c + d/2 are one, turned by position * 1e4^(-2c/d)."""
    half = x.size(-1) // 2
    freq = 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * freq
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat((z.real, z.imag), -1)


def N(x, layer, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * layer.weight


def mlp_by_hand(x, layer):
    return F.gelu(x @ layer.c_fc.weight.T) @ layer.c_proj.weight.T


def written_without_a_cache(model, idx, n, **how):
    """What sample.generate would write by plain forward passes, each over the whole text."""
    import sample
    text = idx
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "new_cache", lambda model, size: None)
        patch.setattr(sample, "read", lambda model, idx, cache: model(idx)[0])
        for _ in range(n):
            new, = sample.generate(model, text, 1, **how)
            text = torch.cat((text, new), 1)
    return text[:, idx.size(1):]


INTERPRET = kernels.INTERPRET
CUDA = kernels.triton is not None and torch.cuda.is_available() and not INTERPRET
DEVICE = "cuda" if CUDA else "cpu"
WAYS = kernels.ON_GPU if INTERPRET or CUDA else kernels.ON_CPU
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="needs Triton")


def gradients(f, inputs, dy):
    """f's output, and its gradients for the tensors among its inputs."""
    inputs = [x.detach().requires_grad_() if torch.is_tensor(x) else x for x in inputs]
    tensors = [x for x in inputs if torch.is_tensor(x)]
    y = f(*inputs)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def with_gradients(model, idx):
    """Logits of idx in three pieces over a cache, the loss, and every parameter's gradient."""
    cache = names.new_cache(model, idx.size(1))
    with torch.no_grad():
        pieces = [model(part, cache=cache)[0] for part in idx.split([17, 12, 1], 1)]
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    return [torch.cat(pieces, 1), loss.detach(),
            *torch.autograd.grad(loss, list(model.parameters()))]


SMALL = dict(n_layer=1, n_head=1, n_embd=16)  # the interpreter is slow


def write_fork(folder, name="cable", *edits):
    file, = [*ROOT.glob(f"model_{name}.py"), *ROOT.glob(f"rivals/{name}.py")]
    source = file.read_text(encoding="utf-8")
    variants = re.search(r"VARIANTS = .*?\n\n", source, re.S)[0]
    for old, new in [(variants, "VARIANTS = dict(mine=dict())\n\n"), *edits]:
        assert old in source, f"model_{name}.py has no {old!r} to edit"
        source = source.replace(old, new)
    (folder / "model_mine.py").write_text(source, encoding="utf-8")


def rng(seed=0):
    return np.random.default_rng(seed)


def documents(folder, texts):
    """A folder with a file for every text."""
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:02}.txt").write_text(text)
    return str(folder)


def write_package(folder, modules=22, functions=8):
    """Python files, each function with a docstring of its own words."""
    (folder / "library").mkdir()
    words = [a + b for a in ("ta", "ro", "mi", "ku", "fe") for b in ("lon", "pir", "dus", "gat")]
    for m in range(modules):
        text = f'"""Module {m}."""\n'
        for n in range(functions):
            said = " ".join(rng(100 * m + n).choice(words, 6))
            name = "_".join(said.split()[:2])
            text += (f"\n\ndef {name}_{n}(x):\n    \"\"\"{said.capitalize()}.\n\n    And more."
                     f"\n    \"\"\"\n    y = x + {n}  # {said.split()[0]}\n    return y\n")
        (folder / "library" / f"{m}.py").write_text(text)
    return folder


ENCODER_FLAGS = ("--corpus", "library", "--tokenizer", "bytes", "--n_layer", 1, "--n_head", 2,
                 "--n_embd", 16, "--block_size", 32, "--batch_size", 4, "--eval_iters", 1,
                 "--device", "cpu")


def write_task(folder, name, text):
    """A task in place of the one that had this name."""
    (folder / f"{name}.py").write_text(text)
    sys.modules.pop(f"data.{name}", None)


TINY_FLAGS = ("--n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --eval_iters 2 "
              "--log_interval 1 --device cpu").split()


def main_of(script):
    """main() of "train.py" or "lab.search"."""
    return importlib.import_module(script.removesuffix(".py")).main


def in_process(script, *words):
    """What exits.script does, in this process."""
    print("\n$ python", script, *words, flush=True)
    code = exit_code(main_of(script), [str(word) for word in words])
    if code:
        sys.exit(code)


def exit_code(main, argv):
    """How a script ends: a mistake of the user's is one line; a bug is raised."""
    try:
        main(argv)
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
            return 1
        return e.code or 0
    except OSError as e:
        in_one_line(type(e), e, e.__traceback__)
        return 1
    return 0


def sketched(fig, path, **how):
    """In place of savefig, which takes longer than all else in these tests."""
    (path.write_bytes if isinstance(path, Path) else path.write)(b"\x89PNG")


def patch_everywhere(patch, name, value, new):
    """Every module of the repository that has imported this value by this name gets a new one."""
    stays = "tests.", "common.exits", "common.names"  # complaints, models and tasks: the repository
    for module in list(sys.modules.values()):
        of_ours = str(getattr(module, "__file__", "")).startswith(str(ROOT))
        if of_ours and module.__name__ != "common" and not module.__name__.startswith(stays):
            if vars(module).get(name) == value:
                patch.setattr(module, name, new)


@contextlib.contextmanager
def standing_in(folder, draw=False):
    """The scripts take folder for the repository: out/, results/, prepared text are there."""
    from matplotlib import pyplot
    enabled, precision = kernels.enabled, torch.get_float32_matmul_precision()
    names.models()  # which are the repository's
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch_everywhere(patch, "ROOT", ROOT, folder)
        patch_everywhere(patch, "script", exits.script, in_process)
        patch.setattr(data.text, "PREPARED", folder / "prepared")
        patch.setitem(pyplot.rcParams, "figure.dpi", 40)
        if not draw:
            patch.setattr(pyplot.Figure, "savefig", sketched)
        yield
    kernels.enabled = enabled
    torch.set_float32_matmul_precision(precision)
    pyplot.close("all")


def written():
    """A stream that takes what a terminal takes."""
    return io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n", write_through=True)


def command(folder, script, *words, code=0, draw=False):
    """
    Run a script in a folder; its exit code must be `code` -> stdout, stderr. Pictures are a name in
    a folder, unless they are to be drawn.
    """
    out, err = written(), written()
    argv, main = [str(word) for word in words], main_of(script)
    with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          standing_in(folder, draw)):
        got = exit_code(main, argv)
    out, err = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert got == code, out + err
    return out, err


def complaint(folder, *words):
    """The one line that a script says before it exits with an error."""
    _, err = command(folder, *words, code=1)
    beside = ("preparing", "read ", "files of each split", "the text is cut", "prompt of",
              "choosing a hard")
    lines = [line for line in err.splitlines() if not line.startswith(beside)]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def write_notes(folder):
    """Twelve documents of four words, one of them not ASCII."""
    (folder / "notes").mkdir(parents=True)
    for i in range(12):
        words = " ".join(rng(i).choice(["alpha", "beta", "gamma", "δέλτα"], 400))
        (folder / "notes" / f"{i}.txt").write_text(words, encoding="utf-8")
    return folder


def losses(folder):
    """-> {iter: training loss}, {iter: validation loss}"""
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return ({r["iter"]: r["loss"] for r in log if "loss" in r},
            {r["iter"]: r["val_loss"] for r in log if "val_loss" in r})


def is_png(path):
    return path.read_bytes()[:4] == b"\x89PNG"


ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


def process(repo, *words, code=0, **env):
    """Run python with these words; no traceback, ever -> stdout, stderr"""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=repo, env=os.environ | ONE_THREAD | env,
        capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr


TINY_RUN = ("--data", "flipflop", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS)


def drawn(monkeypatch):
    """A list that the figures go to, instead of to files."""
    figures = []
    patch_everywhere(monkeypatch, "write_figure", files.write_figure,
                     lambda fig, *out: figures.append(fig))
    return figures


class Inline(Executor):
    """Runs at once what is submitted: the commands want the main thread."""
    def __init__(self, workers):
        pass

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except (Exception, SystemExit) as e:
            future.set_exception(e)
        return future


def run_here(name, *command):
    """reproduce.run in this process."""
    print("$ " + shlex.join(command))
    words, out = [word for word in command[1:] if word != "-m"], written()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = exit_code(main_of(words[0]), words[1:])
    said = out.buffer.getvalue().decode()
    if code:
        raise RuntimeError(said)


def entry(train_flags, rows, evaluation, **changes):
    """A small table: its rows' trainings have two steps."""
    flags = f"--max_iters 2 --eval_interval 1 {' '.join(TINY_FLAGS[:-2])} {train_flags}"
    scale = dict(train=flags, eval=evaluation, rows=rows)
    return dict(title="A table", cpu=scale, paper=scale) | changes


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def markdown_tables(text):
    """Tables of a text -> [{first cell of a row: {heading: cell}}]"""
    tables = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        head, _, *rows = block.strip().splitlines()
        table = {}
        for row in rows:
            first, *rest = cells(row)
            table[first] = dict(zip(cells(head)[1:], rest))
        tables.append(table)
    return tables
