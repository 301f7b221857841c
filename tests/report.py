"""
What the compiler says about every Triton kernel, for a GPU that need not be here. jobs lists the
kernels as they run, of compiles one and reads its machine code.

    python -m tests.report     all of them, for six generations of GPUs, as JSON
"""
import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.device import environment
from kernels import cope, separable, tra
from kernels.common import constants

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SIZES = "H", "Tq", "Tk"
STRIDES = "qb", "qh", "qt", "kb", "kh", "kt", "vb", "vh", "vt"
INPUTS = "q k v gk z o do dq dk dv dgk Q K V Out dOut dQ dK dV".split()


def jobs(d, dtype=torch.bfloat16):
    """-> (name, Triton function, its constants) of every kernel as it runs for heads of size d."""
    q = torch.empty(1, 1, 1, d, dtype=dtype)
    kernels = separable.separable_forward, separable.separable_rows, separable.separable_columns
    for log in (False, True):
        for fn, tile in zip(kernels, separable.tiles(d, dtype, log)):
            name = f"{fn.__name__} log" if log else fn.__name__
            yield name, fn, dict(LOG=log, **constants(q, *tile))

    band, tail = cope.tiles(q, "band"), cope.tiles(q, "tail")
    yield "cope_counts", cope.cope_counts, band
    for sep in (False, True):
        forward = cope.tiles(q, "band_sep") if sep else band
        in_the_band = ((cope.cope_forward_band, forward), (cope.cope_rows_band, band),
                       (cope.cope_columns_band, cope.tiles_of_columns(q, sep)))
        for fn, tile in in_the_band:
            yield fn.__name__ + (" sep" if sep else ""), fn, dict(P=64, SEP=sep, **tile)
    left_of_it = ((cope.cope_forward_tail, tail), (cope.cope_rows_tail, tail),
                  (cope.cope_columns_tail, cope.tiles(q, "tail_columns")))
    for fn, tile in left_of_it:
        yield fn.__name__, fn, dict(P=64, **tile)

    for fn in (tra.tra_forward, tra.tra_rows, tra.tra_columns):
        yield fn.__name__, fn, tra.tiles(q)


def of(fn, constants, target, dtype=torch.bfloat16):
    """
    -> registers, spill_stores and spill_loads in bytes, shared_bytes; serialized: whether ptxas
    runs wgmma one after the other (C7515); and of the loop over tiles, its instructions and
    async_loads, those that fetch ahead. Sizes and strides are multiples of 16, as they mostly are.
    """
    signature = {name: kind_of(name, constants, dtype) for name in fn.arg_names}
    aligned = {}
    for n, name in enumerate(fn.arg_names):
        if signature[name].startswith("*") or name in ("Tq", "Tk", *STRIDES):
            aligned[(n,)] = [["tt.divisibility", 16]]
    given = {(n,): constants[name] for n, name in enumerate(fn.arg_names) if name in constants}
    options = {name: constants[name] for name in ("num_warps", "num_stages")}
    source = ASTSource(fn, signature, given, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    said = assemble(compiled.asm["ptx"], target)
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    instructions, async_loads = tile_loop(compiled.asm["cubin"])
    return dict(registers=int(registers[1]), spill_stores=int(spills[1]),
                spill_loads=int(spills[2]), shared_bytes=compiled.metadata.shared,
                serialized="C7515" in said, instructions=instructions, async_loads=async_loads)


def kind_of(name, constants, dtype):
    """The type of a kernel's argument, by the names that kernels/ uses."""
    if name in constants:
        return "constexpr"
    if name in SIZES or name in STRIDES:
        return "i32"
    if name == "scale":
        return "fp32"
    if name in INPUTS:
        return f"*{SHORT[dtype]}"
    integers = dict.fromkeys(("limit", "first", "last", "First", "Last"), "*i32")
    return (integers | dict(start="*i64")).get(name, "*fp32")


def assemble(ptx, target):
    """What ptxas says about a kernel; of the two that Triton brings, one knows this PTX."""
    gpu = f"sm_{target}a" if target >= 90 else f"sm_{target}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        for name in ("ptxas", "ptxas-blackwell"):
            command = [TOOLS / name, "-v", f"--gpu-name={gpu}", f.name, "-o", "/dev/null"]
            done = subprocess.run(command, capture_output=True, text=True)
            if not done.returncode:
                break
    return done.stderr


def tile_loop(cubin):
    """
    Of the loops with the most matrix products (in float32: multiplications) the shortest: how many
    instructions, and the fewest loads from memory past registers into shared memory (cp.async).
    """
    with tempfile.NamedTemporaryFile("wb", suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [TOOLS / "nvdisasm", "-c", f.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code, labels, loops = [], {}, []
    for line in text.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append(instruction[1])
            jump = re.search(r"\bBRA\S*\s.*?(\.L_\w+)", instruction[1])
            if jump and jump[1] in labels:  # backwards
                loops.append(code[labels[jump[1]]:])
    word = "MMA" if any(count(loop, "MMA") for loop in loops) else "FFMA"
    most = max(count(loop, word) for loop in loops)
    hot = [loop for loop in loops if count(loop, word) == most]
    return min(map(len, hot)), min(count(loop, "LDGSTS") for loop in hot)


def count(loop, word):
    return sum(word in instruction for instruction in loop)


def every_kernel():
    """For heads of 64 and 128, in bfloat16 and float32, on sm_80 to sm_120."""
    rows = {}
    types = torch.bfloat16, torch.float32
    for dtype, target, d in itertools.product(types, (80, 86, 89, 90, 100, 120), (64, 128)):
        for name, fn, settings in jobs(d, dtype):
            where = f"{SHORT[dtype]}, d {d}, sm_{target}"
            rows[f"{name}, {where}"] = of(fn, settings, target, dtype)
    return rows


if __name__ == "__main__":
    result = dict(command="python -m tests.report", triton=triton.__version__,
                  environment=environment())
    print(json.dumps(result | dict(kernels=every_kernel()), indent=1))
