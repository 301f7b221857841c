"""
The attention of CABLE, FoX, CoPE and TRA as Triton kernels, forward and backward: the same functions as in the model
files, with no T x T matrix in memory. A model file does without them where they cannot run:

    try:
        from kernels import cable_attention as fused
        from kernels import usable
    except ImportError:  # no Triton: a Mac, say
        fused = None

With TRITON_INTERPRET=1 in the environment they run on the CPU: slowly, to be tested.
"""
import os

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c as one instruction: Triton 3.9 warns where this is left open
import triton  # noqa: E402

from .cope import cope_attention
from .separable import cable_attention, fox_attention
from .tra import tra_attention

__all__ = ["cable_attention", "fox_attention", "cope_attention", "tra_attention", "usable", "why_not"]

enabled = True  # --kernel off makes it False
INTERPRET = triton.knobs.runtime.interpret


@torch.compiler.assume_constant_result
def capability(index):
    """8 for an A100, 9 for an H100. A constant to torch.compile, which cannot trace the question."""
    return torch.cuda.get_device_properties(index).major


def why_not(q):
    """Why the kernels cannot take queries like q (B, H, T, d), in plain words; "" if they can."""
    d = q.size(-1)
    if not enabled:
        return "turned off"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return str(q.dtype).removeprefix("torch.")
    if d % 8 or not 16 <= d <= 128:
        return f"head size {d} (the kernels take multiples of 8 from 16 to 128)"
    if q.device.type == "cuda":
        return "compute capability below 8.0" if capability(q.device.index) < 8 else ""
    return "" if INTERPRET and q.device.type == "cpu" else "no CUDA"


def usable(q):
    """Whether to call a kernel for q. Not for the one query of cached decoding: a program per head leaves most of a GPU idle."""
    return q.size(2) > 1 and not why_not(q)
