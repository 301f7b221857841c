"""What a run is, shared by the scripts: models and tasks by name, flags from dataclasses, devices, checkpoints."""
import argparse
import dataclasses
import difflib
import importlib
import inspect
import json
import os
import pickle
import platform
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent


def fail(message):
    """A user's mistake: one line, exit code 1, no traceback."""
    sys.exit(f"error: {message}")


def run(main):
    """main(), with Ctrl-C, a closed pipe and a full disk ending it in one line or none."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as e:
        fail(e)


def nearest(word, known):
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(known)}"


# -----------------------------------------------------------------------------
# models and tasks by name

def models():
    """{name: (module, config fields)}: every model_*.py lists the names it answers to in VARIANTS."""
    found = {}
    for path in sorted(ROOT.glob("model_*.py")):
        module = importlib.import_module(path.stem)
        found |= {name: (module, fields) for name, fields in module.VARIANTS.items()}
    return found


def find_model(name):
    known = models()
    if name not in known:
        fail(f"unknown model {name!r}: {nearest(name, known)}")
    return known[name]


def task_class(data):
    """data/NAME.py has the class Task of the synthetic task NAME; anything else is text."""
    synthetic = [p.stem for p in sorted((ROOT / "data").glob("*.py")) if p.stem not in ("__init__", "text")]
    if data in synthetic:
        return importlib.import_module(f"data.{data}").Task
    text = importlib.import_module("data.text")
    if data not in text.CORPORA and not Path(data).expanduser().exists():
        fail(f"unknown corpus {data!r} (nor is it a file or folder): {nearest(data, [*text.CORPORA, *synthetic])}")
    return text.Task


def absolute(data):
    """A corpus' name as it is, a path made absolute: a run can then be resumed and evaluated from any folder."""
    text = importlib.import_module("data.text")
    return str(Path(data).expanduser().resolve()) if task_class(data) is text.Task and data not in text.CORPORA else data


def pick(cls, config):
    """The fields of dataclass cls that are in the flat dict config."""
    return {f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config}


def make_task(config):
    cls = task_class(config["data"])
    try:
        return cls(**pick(cls, config))
    except ValueError as e:
        fail(e)


def make_model(config):
    module, _ = find_model(config["model"])
    try:
        return module.GPT(module.GPTConfig(**pick(module.GPTConfig, config)))
    except ValueError as e:
        fail(e)


def new_cache(model, size):
    """An empty cache of the model's own kind, for `size` tokens to come."""
    return sys.modules[type(model).__module__].Cache(size)


def piece(model):
    """How many tokens to run through a model at once: so many that their logits stay small."""
    return max(256, min(16384, 2**26 // model.config.vocab_size))


# -----------------------------------------------------------------------------
# flags from dataclasses

def add_flags(parser, title, cls, defaults, skip=()):
    """One flag per field; the field's trailing comment is its help. Flags not given stay out of the namespace."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M))
    group = parser.add_argument_group(title)
    for f in dataclasses.fields(cls):
        if f.name in skip:
            continue
        default = defaults.get(f.name, f.default)
        text = f"{comments.get(f.name, '')} (default: {default})".replace("%", "%%")
        kind = dict(action=argparse.BooleanOptionalAction) if f.type in (bool, "bool") else dict(type=f.type, metavar="X")
        group.add_argument(f"--{f.name}", help=text, default=argparse.SUPPRESS, **kind)


def parse(parser, argv=None):
    """parse_args, but an unknown flag fails in one line that names the nearest."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        close = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else "see --help"
        fail(f"unknown argument {flag}: {hint}" if flag.startswith("-") else f"unexpected argument {flag!r}: see --help")
    return args


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, without the usage of fifty flags
        fail(message)


def make_parser(description):
    return Parser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)


# -----------------------------------------------------------------------------
# device and dtype

def pick_device(name):
    """auto is cuda, else mps, else cpu. Under torchrun every process takes its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        fail(f"unknown device {name!r}: use auto, cpu, cuda, cuda:1 or mps")
    available = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    if not available.get(device.type, False):
        fail(f"--device {name}: torch {torch.__version__} finds no {device.type} here; leave the flag out, or use --device cpu")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            fail(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    return device


def autocast(device, dtype):
    """-> a context in which the model runs, and the dtype with its reason, to be printed."""
    if dtype not in ("auto", "float32", "bfloat16"):
        fail(f"unknown dtype {dtype!r}: {nearest(dtype, ['auto', 'float32', 'bfloat16'])}")
    why = "asked for"
    if dtype == "auto":
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype, why = ("bfloat16", "this GPU has it") if bf16 else ("float32", f"the default on {device.type}")
    context = nullcontext() if dtype == "float32" else torch.autocast(device.type, torch.bfloat16)
    return context, f"{dtype} ({why})"


def use_kernel(choice, model, device, dtype):
    """--kernel auto or off, for this process -> which attention the model runs with, and why, to be printed."""
    if choice not in ("auto", "off"):
        fail(f"unknown kernel {choice!r}: {nearest(choice, ['auto', 'off'])}")
    try:
        import kernels
    except ImportError:
        return "attention in plain PyTorch (no Triton)"
    kernels.enabled = choice == "auto"
    if not any(getattr(m, "fused", None) for m in model.modules()):
        return "attention in plain PyTorch (this model has no kernel)"
    q = torch.empty(1, 1, 2, model.config.n_embd // model.config.n_head, device=device, dtype=getattr(torch, dtype.split()[0]))
    why = kernels.why_not(q)
    return f"attention in plain PyTorch ({why})" if why else "attention by Triton kernel"


def peak_memory(device):
    """The most memory this process has had so far, in GB (1e9 bytes): GPU memory on cuda, else resident; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")
    return int(re.search(r"VmHWM:\s*(\d+)", status.read_text()).group(1)) * 1024 / 1e9 if status.exists() else None


def environment():
    """What a number depends on besides the command: hardware, versions, commit."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text() + "\nmodel name: " + cpu).group(1)
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        if subprocess.run([*git, "status", "--porcelain", "-uno", "--", "*.py"], capture_output=True, text=True).stdout:
            commit += "+changes"
    except OSError:
        commit = ""
    return dict(cpu=cpu, threads=torch.get_num_threads(), commit=commit or "unknown",
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                torch=str(torch.__version__), python=platform.python_version(), os=platform.system())


# -----------------------------------------------------------------------------
# checkpoints

def write_safely(path, write):
    """write(tmp) and rename: a full disk or a kill leaves the previous file as it was. Raises OSError."""
    tmp = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        write(tmp)
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # torch.save raises RuntimeError when the disk is full
        raise OSError(f"could not write {path} ({str(e).splitlines()[0]})") from e
    finally:
        tmp.unlink(missing_ok=True)


def read_log(folder):
    """log.jsonl as dicts; a line that a power cut left half written is passed over. Raises OSError."""
    rows = []
    for line in (Path(folder) / "log.jsonl").read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("iter"), int):
            rows.append(row)
    return rows


def write_json(path, obj):
    write_safely(Path(path), lambda tmp: tmp.write_text(json.dumps(obj, indent=1) + "\n"))


def find_checkpoint(path=None):
    """A folder's last checkpoint, a file itself, or the newest under out/ when nothing is named."""
    if path is None:
        found = sorted((ROOT / "out").rglob("ckpt.pt"), key=lambda p: p.stat().st_mtime)
        if not found:
            fail("no checkpoint in out/ yet; make one with: python train.py --model cable")
        return found[-1]
    path = Path(path)
    path = path / "ckpt.pt" if path.is_dir() else path
    if not path.exists():
        fail(f"no checkpoint at {path}")
    return path


def load_checkpoint(path):
    """The dict that train.py saved, on the CPU. A file that is cut off or something else fails in one line."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not {"config", "model", "iter"} <= checkpoint.keys():
            raise KeyError("config")
        return checkpoint
    except (OSError, RuntimeError, EOFError, KeyError, AttributeError, ValueError, pickle.UnpicklingError):
        fail(f"{path} is not a whole checkpoint of this repository (cut off, or another program's)")


def load_weights(model, checkpoint, path):
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError:
        fail(f"the weights in {path} do not fit --model {checkpoint['config']['model']}: "
             "they are another model's, or the model file has changed since")


def bema_weights(weights, bema, t, config):
    """BEMA_t = EMA_t + (rho + t)^-eta (theta_t - theta_0) (Block and Zhang, 2025): {name: tensor}, for evaluation only."""
    alpha = (config["rho"] + t) ** -config["eta"]
    return {n: ema + alpha * (weights[n] - bema["start"][n]) for n, ema in bema["ema"].items()}


def load_run(path, device, bema=False):
    """-> (model in eval mode on device, config, checkpoint) of a saved run, with its last weights or their BEMA."""
    checkpoint = load_checkpoint(path)
    model = make_model(checkpoint["config"])
    load_weights(model, checkpoint, path)
    if bema:
        if "bema" not in checkpoint:
            fail(f"{path} has no BEMA weights: it was trained without --bema")
        model.load_state_dict(bema_weights(checkpoint["model"], checkpoint["bema"], checkpoint["iter"], checkpoint["config"]), strict=False)
    return model.to(device).eval(), checkpoint["config"], checkpoint


def script(*args):
    """Run another script of this repository, showing the command. Returns its exit code."""
    print("\n$ python " + " ".join(map(str, args)), flush=True)
    return subprocess.run([sys.executable, str(ROOT / args[0]), *map(str, args[1:])]).returncode
