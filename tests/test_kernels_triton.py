"""Who runs which way; Triton's kernels in its interpreter, its compiler, and torch.compile."""
import inspect
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from torch.nn import functional as F

import kernels
import model_cable
import model_cope
import model_tra
from common.attention import plain_function
from rivals import classics, fox, stick
from tests.examples import example, on_tensors
from tests.helpers import (
    CUDA,
    DEVICE,
    INTERPRET,
    ROOT,
    SMALL,
    WAYS,
    close,
    gradients,
    make,
    needs_triton,
    process,
    with_gradients,
)

with_kernels = pytest.mark.skipif(
    not (INTERPRET or CUDA), reason="needs TRITON_INTERPRET=1 and Triton, or a GPU")


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="runs those")
def test_in_tritons_interpreter():
    """Runs every test named interpreted in a process of its own."""
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    files = sorted(map(str, (ROOT / "tests").glob("test_[kf]*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
         "-n", "0", *files, "-k", "interpreted"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and int(passed[1]) >= 30, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


# -----------------------------------------------------------------------------
# who runs which way

def test_the_recorded_sources_are_those_of_the_plain_functions():
    files = dict(cable=model_cable, fox=fox, alibi=classics, tra=model_tra, cope=model_cope,
                 stick=stick)
    for short, module in files.items():
        name = f"{short}_attention"
        found = kernels.fingerprint(inspect.unwrap(getattr(module, name)))
        assert kernels.SOURCES[name] == found, (
            f"{name} was edited. Are its ways in kernels/ still equal to it? Then its hash in "
            f"SOURCES of kernels/__init__.py becomes {found}")
    assert {*kernels.ON_CPU, *kernels.ON_GPU} == {*kernels.SOURCES}
    assert len(files) == len(kernels.SOURCES)


@pytest.mark.parametrize("name", ["cable", "cope_val", "tra", "alibi_qk_scale"])
def test_models_take_the_faster_way_interpreted_too(name, monkeypatch):
    """It is called, and changes neither logits nor gradients."""
    model, idx = make(name, **SMALL).to(DEVICE), torch.randint(0, 61, (1, 30)).to(DEVICE)
    way, called = f"{name.partition('_')[0]}_attention", []
    fast = WAYS[way]

    def counted(*args):
        called.append(args)
        return fast(*args)
    monkeypatch.setitem(WAYS, way, counted)
    got = with_gradients(model, idx)
    assert len(called) == 3  # the whole text, and pieces of 17 and 12 tokens; not one token
    monkeypatch.setattr(kernels, "enabled", False)
    for a, b in zip(got, with_gradients(model, idx)):
        close(a, b, 1e-4)
    assert len(called) == 3


@needs_triton
def test_what_the_kernels_do_not_take(monkeypatch):
    """A card that is too old, one of AMD's (whose devices say cuda), other types and sizes."""
    card = types.SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)

    def queries(d=64, dtype=torch.float32, device="cuda"):
        shape = torch.Size((1, 1, 9, d))
        return types.SimpleNamespace(dtype=dtype, device=torch.device(device, 0), shape=shape,
                                     size=shape.__getitem__)
    q, half = queries(), queries(dtype=torch.bfloat16)
    assert kernels.faster("tra_attention", q, q, q) is kernels.tra.tra_attention
    assert kernels.faster("tra_attention", q, q, half) is None
    for other, why in (
            (queries(dtype=torch.float16), "torch.float16: the kernels take float32 and bfloat16"),
            (queries(24), "head size 24: the kernels take multiples of 16 from 16 to 128"),
            (queries(device="meta"), "no CUDA")):
        assert kernels.why_no_triton(other) == why
        assert kernels.faster("tra_attention", other, other, other) is None
    card.major = 7
    assert kernels.why_no_triton(q) == "compute capability below 8.0"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert kernels.why_no_triton(q) == "ROCm"


@pytest.mark.slow
def test_without_triton():
    """The plain functions run all the same, and a CPU keeps its way."""
    code = """if True:
        import argparse, sys
        sys.modules["triton"] = None
        import torch
        from common import names
        from common.device import setup
        for name in ("tra", "cope", "cable"):
            m = names.make_model(dict(model=name, n_layer=1))
            assert m(torch.zeros(1, 9, dtype=torch.long))[0].isfinite().all()
        assert hasattr(sys.modules["model_cable"].cable_attention, "__wrapped__")
        print(setup(argparse.Namespace(device="cpu", dtype="auto", kernel="auto"))[2])"""
    out, _ = process(ROOT, "-c", code)
    assert out.rstrip().endswith("attention in PyTorch")


# -----------------------------------------------------------------------------
# memory, autograd and compilers

@pytest.mark.parametrize("case", ["cable", "tra", "cope sep P=5"])
def test_tensors_may_lie_in_memory_in_any_way_interpreted_too(case):
    """Inputs, the gradient of y.sum(), what a hook on saved tensors (offloading) gives back."""
    module, _, args = example(case, Tq=20, Tk=20, B=1, H=2, d=16)
    way = WAYS[plain_function(module).__name__]
    inputs = on_tensors(lambda x: x.float().to(DEVICE), args)
    strange = on_tensors(lambda x: x.mT.contiguous().mT, inputs)
    dy = torch.ones((), device=DEVICE).expand(1, 2, 20, 16)
    wanted = gradients(way, inputs, dy.contiguous())

    def moved(x):
        return x.clone(memory_format=torch.contiguous_format)
    with torch.autograd.graph.saved_tensors_hooks(moved, moved):
        got = gradients(way, strange, dy)
    for a, b in zip(got, wanted):
        close(a, b, 1e-5)


@with_kernels
def test_the_gradients_of_steps_sum_to_0_interpreted():
    """A softmax ignores what is the same along a row: in bfloat16 this needs the row part of dS."""
    _, _, (q, k, v, S, g) = example("cable", 130, 130, B=1, H=1, d=16)
    q, k, v = (x.bfloat16().to(DEVICE) for x in (q, k, v))
    S, g = (x.float().to(DEVICE) for x in (S, g))
    _, _, _, _, dS, _ = gradients(kernels.separable.cable_attention, [q, k, v, S, g], v)
    assert dS.sum(-1).abs().max() < 1e-4 < dS.abs().max()


@with_kernels
def test_the_kernels_are_operators_interpreted():
    """Whole to torch.compile: shapes, strides and gradients are what they say."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 17, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    decay = F.logsigmoid(q[..., 0]).detach().requires_grad_()
    z = torch.randn(1, 1, 17, 4, device=DEVICE, requires_grad=True)
    for name, *rest in (("cope", z, None), ("tra", decay), ("separable", -decay.cumsum(-1), decay)):
        torch.library.opcheck(getattr(torch.ops.nanope, name).default, (q, k, v, *rest))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cable", "tra"])
def test_a_faster_way_is_compiled_as_one_graph_interpreted_too(case):
    """
    torch.compile takes in the choice of the way, and gives the same numbers with gradients. (The
    plain CoPE is more graphs than one: it stops counting where the gates are full.)
    """
    torch.compiler.reset()  # else sizes in which the cases differ become symbols
    module, _, args = example(case, Tq=40, Tk=40, B=1, H=1, d=16)
    attention = kernels.with_ways(plain_function(module))
    inputs = on_tensors(lambda x: x.float().to(DEVICE), args)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    got = gradients(compiled, inputs, inputs[0])
    for a, b in zip(gradients(attention, inputs, inputs[0]), got):
        close(a, b, 1e-6 * max(1, a.abs().max().item()))


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("target", [80, 90])  # A100, H100
@pytest.mark.parametrize("name", ["separable_forward", "separable_rows", "separable_columns",
                                  "tra_forward", "tra_rows", "tra_columns",
                                  "cope_forward", "cope_rows", "cope_columns"])
def test_kernels_compile_for_a_gpu_that_is_not_here(name, target, monkeypatch, capfd):
    """bfloat16 heads of 64 fit into registers, as good as, and no product waits (C7515)."""
    monkeypatch.setattr(kernels.triton.knobs.compilation, "always_compile", True)
    monkeypatch.setattr(kernels.triton.knobs.nvidia, "dump_ptxas_log", True)
    module = getattr(kernels, name.split("_")[0])
    q, fn = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16), getattr(module, name)
    tile = module.tile_of(q) if "tra" in name else module.tiles(q)["columns" in name]
    more = dict(TILES=32, BLOCKS=64, P=64, SEP=False)
    compiled(fn, kernels.common.constants(q, *tile) | more, target)
    said = capfd.readouterr().out
    spilled = max(map(int, re.findall(r"(\d+) bytes spill", said)))
    assert spilled <= (320 if name == "cope_columns" else 64) and "C7515" not in said


def compiled(fn, constants, target):
    """Compiles a kernel; sizes and strides are multiples of 16, as they mostly are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    types = dict.fromkeys("Q K V GK Z Out dOut dQ dK dV dGK".split(), "*bf16")
    types |= dict.fromkeys("H Tq Tk qb qh qt kb kh kt vb vh vt".split(), "i32")
    types |= dict(Start="*i32", scale="fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*fp32") for name in fn.arg_names}
    given = {(n,): constants[x] for n, x in enumerate(fn.arg_names) if x in constants}
    aligned = {(n,): [["tt.divisibility", 16]] for n, x in enumerate(fn.arg_names)
               if x not in constants and x not in ("H", "scale")}
    options = {x: constants[x] for x in ("num_warps", "num_stages")}
    kernels.triton.compile(
        ASTSource(fn, signature, given, aligned), GPUTarget("cuda", target, 32), options)
