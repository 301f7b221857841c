"""
Every way to compute an attention that is faster than the plain function of its model file.

    import kernels, model_cable
    kernels.install(model_cable)

puts a faster way in front of each plain function of a module: Triton on a GPU (separable.py,
cope.py, tra.py), on a CPU torch's fused attention (cpu.py), or derivatives by hand (cpu_count.py).
The scripts do this for every model. The plain function stays the truth: tests compare each way with
it, and a way runs for the source that was tested, in whatever file it stands. A copy with other
comments keeps its speed. One with another formula runs as it is written, and one line says so.
After an edit of an original, mend its ways, run the tests and record the hash that they print. A
new way needs its name in ON_CPU or ON_GPU and the hash of its plain function in SOURCES.

Beyond 1,024 tokens, TRA on a GPU at any length, keys that have decayed may be left out, for a block
of rows at a time: there a later token may move an earlier output by 1e-7. torch.func and second
derivatives need the plain function: enabled = False, --kernel off.

Triton is optional. With TRITON_INTERPRET=1 its kernels run on the CPU: slowly, to be tested.
"""
import ast
import functools
import hashlib
import inspect
import os
import sys
import textwrap

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
SOURCES = dict(  # the fingerprint of each plain function with which its ways were tested
    cable_attention="b4e6ae0099c4757a",
    fox_attention="b197026525aa6b17",
    alibi_attention="fe8b73a95fc9f379",
    tra_attention="fcdf4b1369845976",
    cope_attention="b363786d759ebe8d",
    stick_attention="0581784ab6848c94",
)
installed = []  # what install has put in front of plain functions
edited = []     # functions that have a known name and another source


def install(module):
    """Puts faster ways in front of a module's plain functions; an edited one is named, once."""
    for name, tested in SOURCES.items():
        plain = getattr(module, name, None)
        if plain is None or plain in installed or plain in edited:
            continue
        if fingerprint(plain) == tested:
            installed.append(with_ways(plain))
            setattr(module, name, installed[-1])
        else:
            edited.append(plain)
            print(f"{module.__name__.replace('.', '/')}.py: {name} runs as it is written (it is "
                  "not the one that kernels/ knows)", file=sys.stderr)


def with_ways(plain):
    """plain, by a faster way where there is one for its arguments, which begin with q, k, v."""
    @functools.wraps(plain)
    def attention(q, k, v, *rest, **named):
        way = faster(plain.__name__, q, k, v)
        y = way(q, k, v, *rest, **named) if way else None
        return plain(q, k, v, *rest, **named) if y is None else y
    return attention


def faster(name, q, k, v):
    """-> what is tried before the plain function of this name, or None."""
    if not enabled or q.size(2) == 1:  # one query, of cached decoding, leaves most of a GPU idle
        return None
    if k.shape != v.shape or k.shape[:2] != q.shape[:2]:  # plain functions broadcast
        return None
    if q.device.type == "cpu" and not INTERPRET:
        return ON_CPU.get(name)
    if why_no_triton(q) or not q.dtype == k.dtype == v.dtype:
        return None
    return ON_GPU.get(name)


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
        major = torch.cuda.get_device_properties(q.device.index).major  # 8: A100, 9: H100
        return "compute capability below 8.0" if major < 8 else ""
    return "" if INTERPRET and q.device.type == "cpu" else "no CUDA"


def fingerprint(plain):
    """
    A hash of the source of a function, and of the functions of its file that it uses, without
    comments and docstrings; of the numbers, strings and tuples that they read, and the names of
    modules. None where it reads anything else, or has no source. The same in Python 3.11 to 3.13.
    """
    functions, parts = [plain], []
    for function in functions:  # which grow
        if hasattr(function, "__wrapped__"):  # its source would be that of what it wraps
            return None
        try:
            node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except Exception:  # not Python's, of exec, or of a file that is being edited
            return None
        if not isinstance(node, ast.FunctionDef) or function.__closure__:
            return None
        if ast.get_docstring(node):
            node.body = node.body[1:]
        parts.append(ast.unparse(node))
        names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}  # of defaults, too
        names = names.difference(function.__code__.co_varnames) & function.__globals__.keys()
        for name in sorted(names):
            value = function.__globals__[name]
            if inspect.ismodule(value):
                parts.append(f"{name} is {value.__name__}")
            elif isinstance(value, int | float | str | tuple):
                parts.append(f"{name} = {value!r}")
            elif not inspect.isfunction(value) or value.__globals__ is not function.__globals__:
                return None
            elif value not in functions:
                functions.append(value)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
