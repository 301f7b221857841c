"""
Every way to compute an attention that is faster than the plain function of its model file.

    y = attend(cable_attention, q, k, v, S, g)

attend runs the faster way where there is one: Triton on a GPU (separable.py, cope.py, tra.py), on a
CPU torch's fused attention (cpu.py), or derivatives by hand (cpu_count.py). The plain function
stays the truth: tests compare each way with it, and a way runs for the source that was tested, in
whatever file it stands. A copy with other comments keeps its speed. One with another formula runs
as it is written, and one line says so. After an edit of the original, mend its ways, run the tests
and record the new source: python -m kernels. A new way needs its name in ON_CPU or ON_GPU and its
plain function in SOURCES, and the model has to call attend.

Beyond 1,024 tokens, TRA on a GPU at any length, keys that have decayed may be left out, for a block
of rows at a time: there a later token may move an earlier output by 1e-7. torch.func and second
derivatives need the plain function: enabled = False, --kernel off.

Triton is optional. With TRITON_INTERPRET=1 its kernels run on the CPU: slowly, to be tested.
"""
import ast
import hashlib
import inspect
import os
import sys
from pathlib import Path

import torch

from . import cpu, cpu_count

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where this is left open
try:
    import triton

    from . import cope, separable, tra
except ImportError:  # a Mac, say
    triton = None

enabled = True  # False: only plain functions run
INTERPRET = triton is not None and triton.knobs.runtime.interpret
# Names are those of the model files' functions. A way returns None for what it cannot do.
ON_CPU = dict(cable_attention=cpu.cable_attention, fox_attention=cpu.fox_attention,
              alibi_attention=cpu.alibi_attention, tra_attention=cpu_count.tra_attention,
              cope_attention=cpu_count.cope_attention, stick_attention=cpu_count.stick_attention)
ON_GPU = {} if triton is None else dict(
    cable_attention=separable.cable_attention, fox_attention=separable.fox_attention,
    alibi_attention=separable.alibi_attention,
    cope_attention=cope.cope_attention, tra_attention=tra.tra_attention)
# The source of each plain function, as `python -m kernels` prints it, and the helpers that it calls
SOURCES = dict(
    cable_attention=("b4e6ae0099c4757a",),
    fox_attention=("b197026525aa6b17",),
    alibi_attention=("d4c97a54c91bf1ac", "attention"),
    tra_attention=("fcdf4b1369845976",),
    cope_attention=("dd7ed702cb30011b", "interpolate"),
    stick_attention=("fc4d67ef2b0bcbcd",),
)


def attend(plain, *args):
    """plain(*args), by a faster way if there is one. args begin with q, k, v."""
    fast = faster(plain, *args)
    y = fast(*args) if fast else None
    return plain(*args) if y is None else y


def faster(plain, q, k, v, *_):
    """-> the function that attend would try before plain, or None."""
    if not enabled or q.size(2) == 1:  # one query, of cached decoding, leaves most of a GPU idle
        return None
    on_cpu = q.device.type == "cpu" and not INTERPRET
    fast = (ON_CPU if on_cpu else ON_GPU).get(getattr(plain, "__name__", None))
    if not fast or not is_known(plain):
        return None
    why = "" if on_cpu else why_no_triton(q)
    if not q.dtype == k.dtype == v.dtype:
        why = "q, k and v differ in dtype"
    if why:
        say(plain, why)
    return None if why else fast


def why_no_triton(q):
    """Why the Triton kernels cannot take queries like q (B, H, T, d), in plain words, or ""."""
    d = q.size(-1)
    if triton is None:
        return "no Triton"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"{q.dtype}: the kernels take float32 and bfloat16"
    if d % 16 or not 16 <= d <= 128:  # 8 modulo 16 would load two bytes at a time
        return f"head size {d}: the kernels take multiples of 16 from 16 to 128"
    if q.device.type == "cuda":
        if torch.version.hip:  # its devices say cuda, and 9 for their capability
            return "ROCm"
        return "compute capability below 8.0" if capability(q.device.index) < 8 else ""
    return "" if INTERPRET and q.device.type == "cpu" else "no CUDA"


@torch.compiler.assume_constant_result
def capability(index):
    """8 for an A100, 9 for an H100. A constant to torch.compile, which cannot trace this."""
    return torch.cuda.get_device_properties(index).major


# -----------------------------------------------------------------------------
# is this function the one that the ways were tested against?

known = {}    # plain function -> whether it is
said = set()  # lines that need no second time


@torch.compiler.assume_constant_result
def is_known(plain):
    """Looks once at each function."""
    if plain not in known:
        recorded, *helpers = SOURCES[plain.__name__]
        try:
            same = fingerprint(plain, helpers) == recorded
            why = "" if same else "it was edited; kernels/ knows the original"
        except ValueError as e:
            why = str(e)
        except (AttributeError, OSError, SyntaxError):  # not Python's, of exec, or of a notebook
            why = "its source cannot be read"
        if why:
            say(plain, why)
        known[plain] = not why
    return known[plain]


@torch.compiler.assume_constant_result
def say(plain, why):
    """Where a way is not used, one line on stderr says why."""
    code = getattr(plain, "__code__", None)
    file = Path(code.co_filename).name if code else plain.__module__
    if (plain, why) not in said:
        print(f"{file}: {plain.__name__} runs as it is written ({why})", file=sys.stderr)
    said.add((plain, why))


def fingerprint(plain, helpers):
    """
    A hash of the source of a function and of its helpers, without comments and docstrings, and of
    which modules they use; the same in Python 3.11 to 3.13. A ValueError says what it cannot see.
    """
    text = []
    for function in filter(None, (plain, *map(plain.__globals__.get, helpers))):
        code = function.__code__
        tree = ast.parse(Path(code.co_filename).read_bytes())
        node = {x.lineno: x for x in tree.body}.get(code.co_firstlineno)
        if not node or code not in compile(tree, "", "exec").co_consts:  # it may be of another time
            raise ValueError("it is decorated, or not at the top level of its file")
        if ast.get_docstring(node):
            node.body = node.body[1:]
        text.append(ast.unparse(node))
        names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}  # of defaults, too
        for name in sorted(names.difference(code.co_varnames) & function.__globals__.keys()):
            value = function.__globals__[name]
            if name not in helpers and not inspect.ismodule(value):
                raise ValueError(f"it reads {name}, which kernels/ does not know")
            text.append(f"{name} is {value.__name__}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
