"""Where a run runs: --device, --dtype, --kernel, and what its numbers depend on."""
import functools
import os
import platform
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import torch

from common import ROOT
from common.attention import use_kernels
from common.exits import fail


def setup(args):
    """
    args.device, .dtype, .kernel -> the device, a context to run models in, and all of it in words.
    Under torchrun every process takes a GPU of its own.
    """
    device = choose_device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    if device.type == "cpu":  # numbers like 1e-39 are slow there
        torch.set_flush_denormal(True)

    dtype = args.dtype
    if dtype == "auto":
        has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if has else "float32"
    context = nullcontext()
    if dtype == "bfloat16":
        context = torch.autocast(device.type, torch.bfloat16)
    why = "asked for" if dtype == args.dtype else f"the default on {device.type}"

    attention = use_kernels(args.kernel, device)
    place = f"{device} (threads: {torch.get_num_threads()})" if device.type == "cpu" else device
    return device, context, f"{place}, {dtype} ({why}), {attention}"


def choose_device(name):
    """The torch.device of a --device flag; one that is not there ends in one line."""
    there = dict(cuda=torch.cuda.device_count(), mps=int(torch.backends.mps.is_available()), cpu=1)
    if name == "auto":
        name = next(kind for kind, number in there.items() if number)
    try:
        device = torch.device(name)
    except RuntimeError:
        fail(f"unknown device {name!r}: use auto, cpu, cuda, cuda:1 or mps")
    if name == "cuda":
        rank = int(os.environ.get("LOCAL_RANK", 0))
        if there["cuda"] == 1 and "LOCAL_WORLD_SIZE" not in os.environ:
            rank = 0  # srun shows each process a GPU of its own; torchrun shows all to each
        device = torch.device("cuda", rank)
    number = there.get(device.type, 0)
    if (device.index or 0) >= number:
        fail(f"--device {device}: torch {torch.__version__} finds {number} of these, counted from "
             "0; use --device cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@functools.cache
def environment():
    """What a number depends on besides the command: hardware, versions, commit."""
    info = Path("/proc/cpuinfo")  # Linux's; platform has no name there
    found = info.exists() and re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8"))
    cpu = found[1] if found else platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None  # if it is used
    return dict(cpu=cpu, threads=torch.get_num_threads(), commit=commit(),
                gpu=gpu, torch=str(torch.__version__), python=platform.python_version(),
                os=platform.system())


def commit():
    """The short hash of HEAD, +changes where a .py file differs; else unknown."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout
    try:
        changes = git("status", "--porcelain", "-uno", "--", "*.py") and "+changes"
        return (git("rev-parse", "--short", "HEAD").strip() + changes) or "unknown"
    except OSError:
        return "unknown"  # no git here
