"""
What a run is, shared by the scripts: models by name, flags, devices, checkpoints. A script's main()
takes its flags as a list, and ends with SystemExit where a user made a mistake.
"""
import argparse
import ast
import atexit
import dataclasses
import difflib
import dis
import errno
import functools
import hashlib
import importlib
import inspect
import io
import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import time
import tokenize
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import get_type_hints

import numpy as np
import torch

import data
from data import nearest

try:
    import kernels
except ImportError:  # the folder was left out: every attention runs as its model file has it
    kernels = None

ROOT = Path(__file__).resolve().parent
LIBRARIES = (sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages())


def fail(message):
    """A user's mistake: one line, exit code 1, no traceback. A bug's ValueError is raised again."""
    if isinstance(message, ValueError):
        message = complaint(message)
    sys.exit(f"error: {message}")


def complaint(error):
    """
    What a ValueError says, where a file of ours raised it for the user. Any other is a bug, perhaps
    in a file that is being changed: it is raised again, with its traceback. Whether it was a
    `raise` is read from the byte code: the source may have been edited since Python read it.
    """
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    raised = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]  # not a call that failed
    if raised and not code.co_filename.startswith(LIBRARIES):
        return str(error)
    raise error


# how torch says that a tensor is too large, for this machine or for any
NO_MEMORY = re.compile("can't allocate memory|Storage size calculation overflow|multiplication "
                       "overflow|not enough memory|Stride calculation overflow")


def in_one_line(kind, error, trace):
    """
    For sys.excepthook: Ctrl-C, a closed pipe, a full disk and a full memory end a script in one
    line or none. Anything else is a mistake of ours, and keeps its traceback.
    """
    if issubclass(kind, KeyboardInterrupt):
        sys.exit(130)
    if issubclass(kind, OSError):
        drop_output()
    if issubclass(kind, BrokenPipeError):  # `python sample.py | head`
        sys.exit(141)
    if issubclass(kind, BlockingIOError):  # a lock that is taken
        fail("another process is at work in this folder; wait for it, or name another --out_dir")
    if issubclass(kind, OSError | data.BrokenTask):
        fail(str(error))
    if issubclass(kind, MemoryError | torch.OutOfMemoryError) or NO_MEMORY.search(str(error)):
        fail("this does not fit into memory; try smaller sizes, lengths or batches")
    sys.__excepthook__(kind, error, trace)


def drop_output():
    """stdout to nowhere where it takes no more: Python would flush it at exit, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@atexit.register
def finish_output():
    """The last words of a script may meet a full disk, too."""
    try:
        sys.stdout.flush()
    except OSError as e:
        drop_output()
        print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(1)


if sys.stdout is None:  # closed, by `>&-`: print would fail, and the next file would be number 1
    sys.stdout = open(os.devnull, "w")
if hasattr(sys.stdout, "reconfigure"):
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a ?


# -----------------------------------------------------------------------------
# models by name

class Models(dict):
    """{name: (module, changed fields of its GPTConfig)}; a name not in it ends in one line."""
    owners: dict  # {name: the files that claim it}
    broken: dict  # {file: what is wrong with it}

    def __missing__(self, name):
        files = self.owners.get(name, [])
        if files:
            fail(f"{' and '.join(files)} both answer to {name!r}: change VARIANTS in one of them")
        file = f"model_{name}.py"
        if file in self.broken:
            fail(f"{file} cannot be used: {self.broken[file]}")
        answers = [other for other, files in self.owners.items() if file in files]
        if answers:
            fail(f"{file} does not answer to {name!r} but to {', '.join(answers)}: see VARIANTS")
        fail(f"unknown model {name!r}: {nearest(name, self.owners)}")


@functools.cache
def models():
    """
    Every name that can be asked for, from model_*.py and experiments/. A file's VARIANTS are the
    names it answers to; model_mine.py without VARIANTS answers to mine. A name that two files
    claim is nobody's. A file that cannot be used stops only those who need it: it is a warning.
    """
    found = Models()
    found.owners, found.broken = {}, {}
    files = sorted(ROOT.glob("model_*.py"))
    for path in sorted(ROOT.glob("experiments/*.py")):  # some have models, others only tables
        if re.search(r"^VARIANTS\b", path.read_text(errors="replace"), re.M):
            files.append(path)
    for path in files:
        file = path.relative_to(ROOT).as_posix()
        try:
            source = path.read_text()
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            module.source = source  # what was read, whatever the file becomes meanwhile
            variants = getattr(module, "VARIANTS", {path.stem.removeprefix("model_"): {}})
            for fields in variants.values():
                module.GPTConfig(**fields), module.GPT  # fails where one of them is not there
        except (Exception, SystemExit) as e:  # a copy that is being changed may fail in any way
            found.broken[file] = f"{type(e).__name__}: {e}".splitlines()[0]
            print(f"warning: {file} is left out: {found.broken[file]}", file=sys.stderr)
            continue
        for name, fields in variants.items():
            found[name] = module, fields
            found.owners.setdefault(name, []).append(file)
    for name, owners in found.owners.items():
        if len(owners) > 1:
            del found[name]
    return found


def bare(source):
    """Lines of Python without comments, docstrings and blank lines. Raises SyntaxError."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, start = token.start
            lines[row - 1] = lines[row - 1][:start]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            for row in range(node.body[0].lineno, node.body[0].end_lineno + 1):
                lines[row - 1] = ""
    return [line.rstrip() for line in lines if line.strip()]


def with_imported(module):
    """A model's module, and those of models that it builds on."""
    known, found = {m.__name__: m for m, _ in models().values()}, [module]
    for one in found:  # which grows
        for node in ast.walk(ast.parse(one.source)):
            names = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            for name in names:
                if name in known and known[name] not in found:
                    found.append(known[name])
    return found


def code_of(module):
    """12 digits for the code of a model, and of those that it builds on, as this process has it."""
    lines = [line for one in with_imported(module) for line in bare(one.source)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def pick(cls, config):
    """The fields of dataclass cls that are in the flat dict config."""
    return {f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config}


def make_model(config):
    """The model of a flat config, on torch's default device, the CPU."""
    module, _ = models()[config["model"]]
    try:
        return module.GPT(module.GPTConfig(**pick(module.GPTConfig, config)))
    except ValueError as e:
        fail(e)


def make_task(config, kept=()):
    """
    The task of a flat config, with what a checkpoint has kept for it; where the config has a
    model's vocab_size, it is the task's.
    """
    try:
        task = data.make(config, kept)
    except ValueError as e:
        fail(e)
    if "vocab_size" in config and config["vocab_size"] != task.vocab_size:
        fail(f"{config['data']} has {task.vocab_size} tokens, the model {config['vocab_size']}")
    return task


def is_encoder(model):
    """Of a model, or its class: whether a token sees later ones, too."""
    return getattr(model, "is_encoder", False)


def new_cache(model, size):
    """An empty cache of the model's own kind, for `size` tokens to come."""
    return sys.modules[type(model).__module__].Cache(size)


def find_task(name):
    """The class of a task by its name; a text's is data.text.Task."""
    try:
        return data.find(name)
    except ValueError as e:
        fail(e)


def kind_of(config):
    """Of what kind the data of a run are (see class Task). A text may have moved since."""
    if config["data"] not in data.with_a_file():
        if "tokenizer" not in config or "corpus" in config:
            fail(f"the run's task is gone: there is no data/{config['data']}.py")
        return "text"
    return find_task(config["data"]).kind


# {kind of data: how much of it eval.py scores if nothing is said, in units of this flag}
SCORED = dict(text=("tokens", 131072), symbols=("sequences", 2000), pairs=("queries", 1000))


def check_split(split, task):
    if split not in task.splits:
        fail(f"unknown split {split!r}: {nearest(split, task.splits)}")


def piece(model):
    """How many tokens to run through a model at once: so many that their logits stay small."""
    return max(256, min(16384, 2**26 // model.config.vocab_size))


# -----------------------------------------------------------------------------
# texts as vectors, of encoders

TOKENS = 2**14  # that go through an encoder at once


def batches(texts):
    """Which texts go through a model together: of like lengths, TOKENS with their padding."""
    batch = []
    for n in sorted(range(len(texts)), key=lambda n: len(texts[n])):
        if batch and (len(batch) + 1) * len(texts[n]) > TOKENS:
            yield batch
            batch = []
        batch.append(n)
    yield batch


def embed(model, texts, device, context):
    """Texts, a list of (n,) token arrays -> (N, C) unit vectors."""
    found = np.empty((len(texts), model.config.n_embd), np.float32)
    for batch in batches(texts):
        longest = max(1, len(texts[batch[-1]]))
        idx = torch.zeros(len(batch), longest, dtype=torch.long)  # 0 is padding
        for row, n in zip(idx, batch):
            row[:len(texts[n])] = torch.from_numpy(texts[n])
        with context, torch.no_grad():
            found[batch] = model.embed(idx.to(device)).float().cpu().numpy()
    return found


# -----------------------------------------------------------------------------
# what a model's attention is, and what it is called with

def attention_module(model):
    """The module that computes a model's attention: its own, or that of the model it builds on."""
    for part in model.modules():
        if type(part).__name__ == "CausalSelfAttention":
            return sys.modules[type(part).forward.__module__]
    return sys.modules[type(model).__module__]


def plain_function(module):
    """
    The function in a model's module that computes its attention: the one with the arguments of
    `literal`. Without a literal, the one whose name ends in attention. None where there is not
    exactly one.
    """
    arguments = {name: list(inspect.signature(function).parameters)
                 for name, function in inspect.getmembers(module, inspect.isfunction)}
    literal = arguments.pop("literal", None)
    if literal:
        names = [name for name in arguments if arguments[name] == literal]
    else:
        names = [name for name in arguments if name.endswith("attention")]
    return getattr(module, names[0]) if len(names) == 1 else None


@contextmanager
def spy(model):
    """
    Within it the plain function runs, and each call's arguments, defaults included, are added to
    the list that it yields: one tuple (q, k, v, ...) for every layer of every forward.
    """
    module = attention_module(model)
    plain, calls = plain_function(module), []
    if not plain:
        fail(f"{module.__name__}.py: no function, or more than one, has the arguments of literal "
             "(or, without a literal, a name that ends in attention)")
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def noted(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(tuple(bound.arguments.values()))
        return plain(*args, **kwargs)
    enabled = kernels and kernels.enabled
    name = next(name for name, value in vars(module).items() if value is plain)
    setattr(module, name, noted)
    try:
        if kernels:
            kernels.enabled = False
        yield calls
    finally:
        setattr(module, name, plain)
        if kernels:
            kernels.enabled = enabled


# -----------------------------------------------------------------------------
# flags

class Parser(argparse.ArgumentParser):
    """A mistake ends in one line, without the usage of fifty flags."""
    def print_help(self, file=None):
        print(self.format_help(), end="", file=file, flush=True)  # argparse's hides a full disk

    def error(self, message):
        _, unknown, words = message.partition("unrecognized arguments: ")
        if not unknown:
            fail(message)
        word = words.split(" ")[0].split("=")[0]
        if not word.startswith("-"):
            fail(f"unexpected argument {word!r}: see --help")
        close = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7)
        hint = "see --help"
        if close:
            hint = f"did you mean {close[0]}?"
        fail(f"unknown argument {word}: {hint}")


make_parser = functools.partial(Parser, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
LARGEST = (1 << 31) - 1  # of what is counted: tokens, sequences, lengths, repeats


def parse(parser, argv):
    """The flags of a script; a number that is too large to be meant fails in one line."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > LARGEST and name != "seed":
                fail(f"--{name} must be at most {LARGEST}")
    return args


def add_run_flags(parser, bema=""):
    """The flags of a script that runs a trained model; --bema where its help is given."""
    if bema:
        parser.add_argument("--bema", action="store_true", help=bema)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto (bfloat16 on a GPU that has it), "
                                                        "float32, bfloat16 (default: auto)")
    parser.add_argument("--kernel", default="auto", help="auto (an attention that is faster "
                        "than the model file's own, and equals it), off (default: auto)")


# -----------------------------------------------------------------------------
# where a run runs

def setup(args):
    """
    --device, --dtype and --kernel -> the device, a context to run models in, and all three in
    words.
    auto is cuda, else mps, else cpu. Under torchrun every process takes a GPU of its own.
    """
    for flag, known in (("dtype", ("auto", "float32", "bfloat16")), ("kernel", ("auto", "off"))):
        value = getattr(args, flag)
        if value not in known:
            fail(f"unknown {flag} {value!r}: {nearest(value, known)}")
    has = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    name = args.device
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if has[kind])
    try:
        device = torch.device(name)
    except RuntimeError:
        fail(f"unknown device {name!r}: use auto, cpu, cuda, cuda:1 or mps")
    if not has.get(device.type):
        fail(f"--device {name}: torch {torch.__version__} finds no {device.type} here; "
             "leave the flag out, or use --device cpu")
    if device.type != "cuda" and device.index:
        fail(f"--device {name}: there is one {device.type} here, use --device {device.type}")
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if device.index >= torch.cuda.device_count():
            fail(f"--device {device}: there are {torch.cuda.device_count()} GPUs, counted from 0")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32

    if device.type == "cpu":  # what has decayed to 1e-39 would take a CPU several times as long
        torch.set_flush_denormal(True)

    dtype, why = args.dtype, "asked for"
    if dtype == "auto":
        dtype, why = "float32", f"the default on {device.type}"
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            dtype, why = "bfloat16", "this GPU has it"
    context = nullcontext()
    if dtype == "bfloat16":
        context = torch.autocast(device.type, torch.bfloat16)

    attention = "attention as the model file has it"
    if kernels:
        kernels.enabled = args.kernel == "auto"
    if kernels and kernels.enabled:
        attention = "attention in PyTorch"
        if device.type == "cuda" or kernels.INTERPRET:
            why_not = kernels.why_no_triton(torch.empty(1, 1, 2, 64, device=device))
            attention = f"attention in PyTorch ({why_not})"
            if not why_not:
                attention = "attention by Triton kernel, where the model has one for its head size"
    place = f"{device} (threads: {torch.get_num_threads()})" if device.type == "cpu" else device
    return device, context, f"{place}, {dtype} ({why}), {attention}"


def peak_memory(device):
    """
    The most memory this process has had so far, in GB (1e9 bytes): GPU memory on cuda, else
    resident; None where it is not known.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")
    found = status.exists() and re.search(r"VmHWM:\s*(\d+)", status.read_text())
    return int(found[1]) * 1024 / 1e9 if found else None


@functools.cache
def environment():
    """What a number depends on besides the command: hardware, versions, commit."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        named = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        cpu = named.group(1) if named else cpu
    commit = changes = ""
    git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    try:
        commit = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        changes = git(["git", "status", "--porcelain", "-uno", "--", "*.py"]).stdout
    except OSError:
        pass  # no git here
    if changes:
        commit += "+changes"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None  # if it is used
    return dict(cpu=cpu, threads=torch.get_num_threads(), commit=commit or "unknown", gpu=gpu,
                torch=str(torch.__version__), python=platform.python_version(),
                os=platform.system())


# -----------------------------------------------------------------------------
# files

HALF = ".nanope-tmp"  # what a half-written file is called, with the number of its process


def write_safely(path, write, size=0):
    """
    write(tmp) and rename: a full disk or a kill leaves the file as it was. Half-written files of
    dead processes beside it are removed. size: the bytes it needs, for the message about a full
    disk. Raises OSError.
    """
    remove_strays(path.parent)
    tmp = Path(f"{path}{HALF}{os.getpid()}")
    try:
        write(tmp)
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:
        why = str(e).partition("\n")[0]
        # torch.save raises RuntimeError, about its inline_container, where there is no more room
        if getattr(e, "errno", None) == errno.ENOSPC or "inline_container" in why:
            need = f"it needs {size / 1e6:,.1f} MB, " if size else ""
            room = shutil.disk_usage(path.parent).free
            room += tmp.stat().st_size if tmp.exists() else 0
            was = "; the previous one is whole" if path.exists() else ""
            why = f"disk full, or a limit reached: {need}{room / 1e6:,.1f} MB are free{was}"
        raise OSError(f"could not write {path} ({why})") from e
    finally:
        tmp.unlink(missing_ok=True)


def remove_strays(folder):
    """Remove the half-written files of processes that are no more."""
    for tmp in folder.glob(f"*{HALF}*"):
        pid = tmp.name.rpartition(HALF)[2]
        if not pid.isdecimal() or os.name != "posix":
            continue
        try:
            os.kill(int(pid), 0)  # asks only
        except (ProcessLookupError, OverflowError):
            tmp.unlink(missing_ok=True)
        except OSError:
            pass  # another user's


class Progress:
    """
    Within it stderr says how far a model is, and how long it will take: after any of its layers, if
    two seconds have passed. `tokens` in all, in windows of `window`; the time of attention grows
    with the square of that.
    """
    def __init__(self, model, what, tokens, window):
        self.what, self.tokens, self.window = what, tokens, window
        self.done = self.coming = self.layers = 0
        self.start = self.shown = time.time()
        self.blocks = [part for part in model.modules() if type(part).__name__ == "Block"]

    def __enter__(self):
        self.hooks = [block.register_forward_hook(self.tell) for block in self.blocks]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def batch(self, n):
        """The next n tokens go through the model."""
        self.done, self.coming, self.layers = self.done + self.coming, n, 0

    def share(self, done):
        """How much of the work the first `done` tokens are, at least."""
        windows, rest = divmod(done, self.window)
        return (windows * self.window + rest * rest / self.window) / self.tokens

    def tell(self, *_):
        self.layers += 1
        now = time.time()
        if now - self.shown < 2:
            return
        self.shown = now
        before, after = self.share(self.done), self.share(self.done + self.coming)
        share = before + (after - before) * self.layers / len(self.blocks)
        left = int((now - self.start) * (1 / share - 1))
        print(f"  {self.what}: {100 * share:.0f} % of {self.tokens:,} tokens, "
              f"eta {left // 60}m{left % 60:02d}s", file=sys.stderr, flush=True)


def write_figure(fig, out):
    """Draw the picture, write it aside, then rename it."""
    out = Path(out)
    out = out if out.suffix else Path(f"{out}.png")
    if out.suffix[1:] not in fig.canvas.get_supported_filetypes():
        fail(f"cannot draw {out}: use .png, .pdf or .svg")
    drawn = io.BytesIO()  # Matplotlib's own errors about a full disk are long
    fig.savefig(drawn, format=out.suffix[1:], bbox_inches="tight")
    write_safely(out, lambda tmp: tmp.write_bytes(drawn.getvalue()))
    print(f"drew {out}")


def write_json(path, value):
    """JSON in which a run, a trial or a row of a table takes one line. Raises OSError."""
    write_safely(Path(path), lambda tmp: tmp.write_text(in_lines(value) + "\n"))


def in_lines(value, indent="", row=False):
    """
    value as JSON, a row a line. Spread over lines are the outermost dict, whatever holds a list of
    dicts (runs, trials, panels), and a dict of dicts, unless it is inside a row.
    """
    table = isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())
    if not value or not (indent == "" or has_rows(value) or table and not row):
        return json.dumps(value)
    deeper = indent + " "
    if isinstance(value, list):
        lines = [deeper + in_lines(v, deeper, row=True) for v in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    lines = [f"{deeper}{json.dumps(str(k))}: {in_lines(v, deeper, row)}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def has_rows(value):
    """Whether a value is a list of dicts, or holds one in its dicts."""
    if isinstance(value, dict):
        return any(has_rows(v) for v in value.values())
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def read_log(folder):
    """log.jsonl as dicts, without the line that a power cut left half written. Raises OSError."""
    rows = []
    for line in (Path(folder) / "log.jsonl").read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("iter"), int):
            rows.append(row)
    return rows


# -----------------------------------------------------------------------------
# checkpoints

def checkpoints():
    """The last checkpoint of every run under out/, the newest first."""
    found = sorted((ROOT / "out").rglob("ckpt.pt"), key=lambda path: path.stat().st_mtime)
    return found[::-1]


def find_checkpoint(path=None):
    """A folder's last checkpoint, a file itself, or the newest under out/ if nothing is named."""
    if path is None:
        found = checkpoints()
        if not found:
            fail("no checkpoint in out/ yet; make one with: python train.py --model cable")
        return found[0]
    path = Path(path)
    if path.is_dir():
        path = path / "ckpt.pt"
    if not path.exists():
        begun = (path.parent / "log.jsonl").exists()
        hint = f": it ended before its first; start it again with --out_dir {path.parent}"
        fail(f"no checkpoint at {path}{hint if begun else ''}")
    return path


def load_checkpoint(path):
    """
    The dict that train.py saved, on the CPU. A file that is not whole, or in which something does
    not fit, fails in one line, before anything is built from it.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, kind in CHECKPOINT.items():
            if type(checkpoint[name]) not in kind:
                raise TypeError(name)
    except PermissionError:
        raise
    except Exception:  # what is in a foreign file may fail in any way
        fail(f"{path} is not a whole checkpoint of this repository "
             "(cut off, or another program's)")
    try:
        for name in ("iter", "seconds"):
            if not 0 <= checkpoint[name] < 1 << 53:
                raise ValueError(f"it has {name}={checkpoint[name]}")
        check_config(checkpoint["config"])
        check_weights(checkpoint)
        checkpoint["kept"] = dict(checkpoint.get("kept", {}))
        for name, x in checkpoint["kept"].items():
            if not isinstance(x, torch.Tensor) or x.dtype != torch.int64:
                raise ValueError(f"what it keeps as {name!r} are no whole numbers")
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as e:
        fail(f"{path} cannot be used: {str(e).splitlines()[0]}")
    return checkpoint


# what every checkpoint has, and every config in one
CHECKPOINT = dict(config=[dict], model=[dict, OrderedDict], iter=[int], source=[str],
                  seconds=[int, float], best_val_loss=[int, float])
CONFIG = dict(model=str, data=str, seed=int, block_size=int, vocab_size=int, rho=float, eta=float)


def check_config(config):
    """Plain values, of the types that the model's and the task's fields have. Raises ValueError."""
    for name, value in config.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("help", "resume"):
            raise ValueError(f"its config has a setting called {name!r}")
        if type(value) not in (str, int, float, bool):
            raise ValueError(f"its config has {name} of type {type(value).__name__}")
        if isinstance(value, int | float) and not abs(value) < 1 << 53:
            raise ValueError(f"its config has {name}={value}")
    for name in CONFIG:
        if name not in config:
            raise ValueError(f"its config has no {name}")
    check_types(config, CONFIG)
    check_types(config, get_type_hints(models()[config["model"]][0].GPTConfig))
    try:
        task = data.find(config["data"])
    except ValueError:
        return  # a text or task that is gone: the model can still be used
    if task.kind == "numbers":
        raise ValueError(f"its data is {config['data']}: numbers, not tokens")
    check_types(config, get_type_hints(task))
    for field in dataclasses.fields(task):
        if field.name not in config:
            raise ValueError(f"its config has no {field.name}, which {config['data']} needs")


def check_types(config, types):
    """Raises ValueError where a value is not of its type; an int may stand for a float."""
    for name, kind in types.items():
        if name not in config or kind not in (bool, int, float, str):
            continue
        if type(config[name]) is not kind and (type(config[name]), kind) != (int, float):
            raise ValueError(f"{name}={config[name]!r} is no {kind.__name__}")


def check_weights(checkpoint):
    """The weights are finite, and of the shapes that the config says. Raises ValueError."""
    config, weights = checkpoint["config"], checkpoint["model"]
    found = {}
    for name, x in weights.items():
        plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.is_contiguous()
        if not plain or not x.is_floating_point():
            raise ValueError(f"its weights {name} are not a plain tensor")
        found[name] = x.shape
    if max(config.get("n_layer", 1), 1) > len(found):
        raise ValueError(f"n_layer={config['n_layer']} with {len(found)} tensors of weights")
    widest = max(max(shape, default=1) for shape in found.values())
    for name in ("n_head", "n_embd", "vocab_size"):
        if config.get(name, 1) > widest:
            raise ValueError(f"{name}={config[name]} with weights of {widest} at most")
    if found != shapes(config):
        raise ValueError(f"the weights do not fit --model {config['model']}: "
                         "they are another model's, or the model file has changed since")
    for part in (weights, *checkpoint.get("bema", {}).values()):
        for name, x in part.items():
            if x.shape != found.get(name):
                raise ValueError(f"the BEMA weights {name} do not fit its model")
            if not x.isfinite().all():
                raise ValueError(f"its weights {name} are not finite")


def on_meta(make, *args):
    """make(*args), a model, on torch's meta device: shapes, and no memory."""
    try:
        with torch.device("meta"):
            return make(*args)
    except (TypeError, RuntimeError) as e:
        if "meta" not in str(e):
            raise
    return make(*args)  # of a model file that needs numbers to be built


def shapes(config):
    """{name: shape} of the weights that a config's model has."""
    return {name: x.shape for name, x in on_meta(make_model, config).state_dict().items()}


def check_text(path, checkpoint, flag=""):
    """
    Fails unless the text that a checkpoint names is a known corpus, or was prepared here with the
    same tokens: a foreign checkpoint must not make us read any path. `flag` is the caller's flag by
    which the user may name the text instead.
    """
    config = checkpoint["config"]
    kind_of(config)  # a task that is gone ends here
    try:
        known = data.find(config["data"]).was_prepared(config, checkpoint["source"])
    except ValueError:  # it is gone
        known = False
    if not known:
        where = config[text_flag(config)]
        way = f". To use it all the same, name the text: --{flag} {where}" if flag else ""
        if not flag and "corpus" not in config:
            way = f". To prepare it: python eval.py {path} --data {where}"
        fail(f"the text behind {where} is not what {path} was trained on, or was never prepared "
             f"here{way}")


def warn_of_code(path, checkpoint):
    """One line if the model's code is not the one that was trained: old weights, new code."""
    module, _ = models()[checkpoint["config"]["model"]]
    now = code_of(module)
    if checkpoint.get("code_version", now) != now:
        print(f"warning: {Path(module.__file__).name} has changed since {path} was begun: its "
              "weights run in the new code", file=sys.stderr)


def check_source(path, checkpoint, task, flag=""):
    """Fails if the text has changed: what the run was trained on may be in the test split now."""
    if checkpoint["source"] != task.source:
        config = checkpoint["config"]
        where = config[text_flag(config)]
        way = f". To score it all the same, name the text: --{flag} {where}" if flag else ""
        fail(f"the text behind {where} is not what {path} was trained on: its training documents "
             f"may be in this split{way}")


def text_flag(config):
    """The flag that names a run's text: a task that reads one has --corpus."""
    return "corpus" if "corpus" in config else "data"


def update_ema(bema, model, t, config):
    """EMA_t = (1 - beta_t) EMA_{t-1} + beta_t theta_t, with beta_t = (rho + t)^-kappa."""
    for name, p in model.named_parameters():
        bema["ema"][name].lerp_(p.detach(), (config["rho"] + t) ** -config["kappa"])


def bema_weights(weights, bema, t, config):
    """
    BEMA_t = EMA_t + (rho + t)^-eta (theta_t - theta_0) (Block and Zhang, 2025): {name: tensor},
    for evaluation only. weights are theta_t, bema {"start": theta_0, "ema": EMA_t}.
    """
    alpha = (config["rho"] + t) ** -config["eta"]
    start = bema["start"]
    return {n: ema + alpha * (weights[n] - start[n]) for n, ema in bema["ema"].items()}


def load_run(path, device, bema=False):
    """
    A saved run -> (its model on the device in eval mode, its config, the checkpoint). The weights
    are its last ones, or their BEMA.
    """
    checkpoint = load_checkpoint(path)
    config = checkpoint["config"]
    warn_of_code(path, checkpoint)
    model = make_model(config)
    model.load_state_dict(checkpoint["model"])
    if bema:
        kept = checkpoint.get("bema", {})
        if "ema" not in kept or kept["ema"].keys() != kept.get("start", {}).keys():
            fail(f"{path} has no BEMA weights: it was trained without --bema")
        averaged = bema_weights(checkpoint["model"], kept, checkpoint["iter"], config)
        model.load_state_dict(averaged, strict=False)
    return model.to(device).eval(), config, checkpoint


def script(*args):
    """Run another script of this repository, showing the command. Returns its exit code."""
    words = [str(word) for word in args]
    print("\n$ python " + " ".join(words), flush=True)
    return subprocess.run([sys.executable, str(ROOT / words[0]), *words[1:]]).returncode
