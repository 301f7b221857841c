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
    device = choose_device(str(args.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    if device.type == "cpu":  # numbers like 1e-39 are slow there
        torch.set_flush_denormal(True)

    dtype, why = args.dtype, "asked for"
    if dtype == "auto":
        has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype, why = "bfloat16" if has else "float32", f"the default on {device.type}"
    context = nullcontext()
    if dtype == "bfloat16":
        context = torch.autocast(device.type, torch.bfloat16)

    attention = use_kernels(args.kernel, device)
    place = f"{device} (threads: {torch.get_num_threads()})" if device.type == "cpu" else device
    return device, context, f"{place}, {dtype} ({why}), {attention}"


def choose_device(name):
    """The torch.device of a --device flag; one that is not there ends in one line."""
    there = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        there.append("mps")
    there.append("cpu")
    if name == "auto":
        name, _, _ = there[0].partition(":")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if name not in there:
        fail(f"--device {name}: torch {torch.__version__} finds here {', '.join(there)}")
    return torch.device(name)


@functools.cache
def environment():
    """What a number depends on besides the command: hardware, versions, commit."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")  # Linux's; platform has no name there
    if info.exists():
        cpu = re.findall(r"model name\s*: (.*)|$", info.read_text(encoding="utf-8"))[0] or cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None  # if it is used
    return dict(cpu=cpu, threads=torch.get_num_threads(), commit=commit(),
                gpu=gpu, torch=str(torch.__version__), python=platform.python_version(),
                os=platform.system())


def commit():
    """The short hash of HEAD, +changes where a .py file differs; else unknown."""
    git = f'git -C "{ROOT}"'
    failed, head = subprocess.getstatusoutput(f"{git} rev-parse --short HEAD")
    changes = subprocess.getoutput(f'{git} status --porcelain -uno -- "*.py"')
    if failed:
        return "unknown"
    return f"{head}+changes" if changes else head
