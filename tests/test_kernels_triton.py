"""Every way is its plain function; Triton's kernels on CUDA and in its interpreter."""
import argparse
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kernels
import model_cable
import model_cope
import model_tra
from common.attention import plain_function
from common.device import setup
from rivals import classics, fox
from tests.examples import encoding, example, in_float32
from tests.helpers import (
    CUDA,
    DEVICE,
    FORKED,
    INTERPRET,
    ORIGINALS,
    ROOT,
    SMALL,
    WAYS,
    close,
    far_keys_along_q,
    gradients,
    heads,
    leaves_nothing_out,
    literal_of,
    make,
    needs_triton,
    one_step,
    process,
    same_as,
    steps_of,
    summed,
    with_gradients,
)

tra_attention = plain_function(model_tra)
with_kernels = pytest.mark.skipif(
    not (INTERPRET or CUDA), reason="needs TRITON_INTERPRET=1 and Triton, or a GPU")


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="runs those")
@pytest.mark.parametrize("group", ["kernel", "too"])
def test_in_tritons_interpreter(group):
    """Runs every test named interpreted_kernel, or interpreted_too, in a process of its own."""
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", ROOT / ".pytest.ini",
         "-n", "0", "--durations=5", *map(str, sorted((ROOT / "tests").glob("test_[kf]*.py"))),
         "-k", f"interpreted_{group}"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and int(passed[1]) >= 30, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


def test_the_recorded_sources_are_those_of_the_plain_functions():
    for plain in ORIGINALS:
        found = kernels.fingerprint(plain)
        assert kernels.SOURCES[plain.__name__] == found, (
            f"{plain.__name__} was edited. Are its ways in kernels/ still equal to it? Then its "
            f"hash in SOURCES of kernels/__init__.py becomes {found}")
    names = {plain.__name__ for plain in ORIGINALS}
    assert names == {*kernels.ON_CPU, *kernels.ON_GPU} == {*kernels.SOURCES}


SAME = [(37, 1, 1), (37, 37, 4), (300, 1, 1), (1500, 1, 1), (1500, 1500, 1), (1500, 6000, 1)]


@pytest.mark.parametrize("T, walk, loud", SAME[:2] if INTERPRET else SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plain", ORIGINALS, ids=lambda f: f.__name__)
def test_every_way_is_its_plain_function_interpreted_too(plain, dtype, T, walk, loud):
    """
    Outputs and gradients, by the largest value, of heads in dtype and the plain function in
    float32: steps that sum to `walk`, so small that every key matters, or large; loud queries.
    """
    torch.manual_seed(0)
    q, k, v, gate_keys = (x.to(dtype) for x in torch.randn(4, 1, 2, T, 32))
    steps, weight = torch.rand(2, 1, 2, T)
    if dtype == torch.float32:  # in half precision a loud softmax is a coarse one
        q, weight = q * loud, weight * loud
    steps = steps * walk / T
    rest = dict(
        cable_attention=[steps.cumsum(-1), weight], fox_attention=[-steps.cumsum(-1)],
        alibi_attention=[steps[0, :, 0]], tra_attention=[-steps], stick_attention=[],
        cope_attention=[torch.randn(32, 16) / 32**0.5, gate_keys])[plain.__name__]
    inputs = [x.to(DEVICE) for x in (q, k, v, *rest)]
    way = WAYS.get(plain.__name__)
    if way is None or way(*inputs) is None:
        assert dtype == torch.bfloat16 or plain.__name__[:5] in ("alibi", "stick")
        return  # the plain function runs
    dy = torch.cos(torch.arange(q.numel()).float()).view(q.shape).to(DEVICE)
    got = gradients(way, inputs, dy.to(dtype))
    want = gradients(plain, [x.float() for x in inputs], dy)
    for n, (a, b) in enumerate(zip(got, want)):
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        if CUDA and plain.__name__ == "cope_attention" and n in (1, 2, 5):
            tolerance = 0.1  # where a count is whole they jump, and rounding decides where it is
        close(a, b, tolerance * max(1, b.abs().max().item()))


@with_kernels
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("Tq, Tk, d, rate", [
    (1, 1, 16, 1), (37, 37, 64, 1), (65, 65, 40, 0), (130, 130, 16, 30), (33, 130, 64, 1),
    (2, 70, 80, 1), (70, 70, 128, 1), (300, 300, 32, 1)])
def test_interpreted_kernel_cable(Tq, Tk, d, rate, dtype, tolerance):
    """Small steps, none, and huge ones; the queries of a cache; heads that fill no tile."""
    torch.manual_seed(0)
    inputs = [*(heads(1, 1, T, d, dtype) for T in (Tq, Tk, Tk)), rate * steps_of(1, 1, Tk)]
    inputs.append(F.softplus(torch.randn(1, 1, Tq)))
    tolerance *= max(1, rate)  # the gradient of g is a sum of S_i - S_j
    same_as(literal_of(model_cable), kernels.separable.cable_attention, inputs, tolerance, summed)


@with_kernels
@pytest.mark.parametrize("Tq, Tk, d, rate, dtype", [
    (200, 200, 16, 30, torch.float32), (60, 300, 40, 10, torch.float32),
    (70, 70, 16, 0, torch.float32), (260, 260, 64, 30, torch.bfloat16)])
def test_interpreted_kernel_without_what_has_decayed(Tq, Tk, d, rate, dtype, monkeypatch):
    """As in long texts: the same as if nothing were left out, and the same numbers twice."""
    torch.manual_seed(0)
    inputs = [*(heads(1, 1, T, d, dtype) for T in (Tq, Tk, Tk)), rate * steps_of(1, 1, Tk)]
    inputs = [x.to(DEVICE) for x in (*inputs, F.softplus(torch.randn(1, 1, Tq)) + 0.5)]
    inputs[4][:, :, 40] = 0  # a query that heeds no distance
    dy, way = torch.randn_like(inputs[0]), summed(kernels.separable.cable_attention)
    whole = gradients(way, inputs, dy)
    monkeypatch.setattr(kernels.separable, "LONG", 64)
    some, again = gradients(way, inputs, dy), gradients(way, inputs, dy)
    q, k, v, step, g = inputs
    rows = kernels.separable.tiles(q)[0][0]
    start = torch.ops.nanope.separable(q, k, v, step.relu().cumsum(-1), g)[2]
    assert (start.amax() > 0) == (rate > 0) and start[0, 0, 40 // rows] == 0
    for a, b, c in zip(whole, some, again):
        close(a, b, 1e-6 * max(1, a.abs().max().item()))
        assert torch.equal(b, c)


@with_kernels
def test_interpreted_kernel_drops_nothing_that_nearly_reaches_the_bound(monkeypatch):
    """CABLE's bound is on a single key, TRA's on the sum of all that a row still has to come."""
    monkeypatch.setattr(kernels.separable, "LONG", 64)
    inputs = *far_keys_along_q(132, 260, far=128), one_step(260, at=128, size=24.0)
    leaves_nothing_out(kernels.separable.cable_attention, model_cable, inputs)
    q, k, v = far_keys_along_q(16, 244, far=128)
    k[:, :, 128:, 0] = 1e-4  # near keys survive, too: the first row has counted 101
    inputs = q, k, 10 * v, torch.full((1, 1, 16), -0.2)  # without the first far keys: 0.7 off
    leaves_nothing_out(kernels.tra.tra_attention, model_tra, inputs, 5e-3)


@with_kernels
@pytest.mark.parametrize("Tq, Tk", [(65, 65), (5, 129)])
def test_interpreted_kernel_fox_and_alibi(Tq, Tk):
    torch.manual_seed(0)

    def wrap(f):
        return lambda q, k, v, gate: f(q, k, v, F.logsigmoid(gate).cumsum(-1))
    inputs = [*(heads(2, 1, T, 16) for T in (Tq, Tk, Tk)), torch.randn(2, 1, Tk)]
    same_as(literal_of(fox), kernels.separable.fox_attention, inputs, wrap=wrap)
    pe, fast = encoding("alibi"), kernels.ON_GPU["alibi_attention"]
    inputs, slopes = [heads(1, 3, T, 32) for T in (Tq, Tk, Tk)], pe.slopes.float().to(DEVICE)
    given = {fast: slopes}
    same_as(literal_of(classics), fast, inputs,
            wrap=lambda f: lambda q, k, v: f(q, k, v, given.get(f, pe.bias)))
    if Tq == Tk:
        assert kernels.faster("alibi_attention", *(x.to(DEVICE) for x in inputs)) is fast


@with_kernels
def test_interpreted_kernel_a_row_moves_no_total():
    """
    Softmax ignores what is the same along a row, so the gradients of S sum to 0: in bfloat16 this
    needs the row part of dS.
    """
    torch.manual_seed(0)
    S = steps_of(1, 2, 300).abs().cumsum(-1).to(DEVICE).requires_grad_()
    q, k, v = (heads(1, 2, 300, 16, torch.bfloat16).to(DEVICE) for _ in range(3))
    g = F.softplus(torch.randn(1, 2, 300)).to(DEVICE)
    kernels.separable.cable_attention(q, k, v, S, g).backward(torch.randn_like(q))
    assert S.grad.sum(-1).abs().max() < 1e-4 < S.grad.abs().max()


@with_kernels
def test_interpreted_kernel_strides_and_repeats():
    torch.manual_seed(0)
    S, g = steps_of(1, 2, 40).relu().cumsum(-1), F.softplus(torch.randn(1, 2, 40))
    inputs = [x.to(DEVICE) for x in (*(heads(1, 2, 40, 16) for _ in range(3)), S, g)]
    strange = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    dy = torch.ones((), device=DEVICE).expand(1, 2, 40, 16)  # one number, as from y.sum()
    fast = kernels.separable.cable_attention
    for a, b in zip(gradients(fast, inputs, dy), gradients(fast, strange, dy.contiguous())):
        assert torch.equal(a, b)


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@with_kernels
@pytest.mark.parametrize("B, H, Tq, Tk, d, P, gates, shift, dtype", [
    (2, 1, 1, 1, 16, 8, "key", 0, torch.float32),
    (1, 2, 65, 65, 24, 8, "key", 0, torch.float32),     # band and tail
    (1, 1, 70, 70, 16, 64, "key", -3, torch.float32),   # gates near 0: all band
    (1, 1, 70, 70, 16, 4, "key", 3, torch.float32),     # gates near 1: hardly any
    (1, 1, 40, 40, 16, 1, "key", 0, torch.float32),     # a table of one
    (1, 1, 33, 70, 80, 16, "val", 0, torch.float32),    # gates from v: gradients add up
    (1, 1, 7, 50, 128, 8, "sep", 0, torch.float32),
    (1, 1, 80, 150, 64, 8, "key", 0, torch.bfloat16),
    (1, 1, 70, 140, 64, 8, "sep", 0, torch.bfloat16)])
def test_interpreted_kernel_cope(B, H, Tq, Tk, d, P, gates, shift, dtype):
    torch.manual_seed(0)
    q, k, v = (heads(B, H, T, d) for T in (Tq, Tk, Tk))
    q[..., 0], k[..., 0] = 1, shift * d**0.5  # q . k / sqrt(d) is shifted
    inputs = [q, k, v, 0.1 * torch.randn(d, P)]
    if gates == "sep":
        inputs.append(heads(B, H, Tk, d))

    def wrap(f):
        return (lambda q, k, v, e: f(q, k, v, e, v)) if gates == "val" else f
    same_as(literal_of(model_cope), kernels.cope.cope_attention, [x.to(dtype) for x in inputs],
            TOLERANCE[dtype], wrap)


@with_kernels
def test_interpreted_kernel_cope_whose_later_rows_count_farther():
    """Keys in the tail of one block of rows and in the band of a later one."""
    torch.manual_seed(0)
    q, k, v = (heads(1, 1, 130, 16) for _ in range(3))
    q[..., 0], k[..., 0] = 1, 12  # gates near 1
    q[:, :, 80:, 0] = -1          # and near 0
    table = 0.1 * torch.randn(16, 8)
    same_as(literal_of(model_cope), kernels.cope.cope_attention, [q, k, v, table])
    q, k, v, z = (x.contiguous().to(DEVICE) for x in (q, k, v, q @ table))
    start = torch.ops.nanope.cope(q, k, v, z, None)[2]
    assert start[0, 0, 4] > start[0, 0, -1]


@with_kernels
@pytest.mark.parametrize("B, H, Tq, Tk, d, bias, dead, stops, dtype", [
    (2, 1, 1, 1, 16, 0, False, False, torch.float32),
    (1, 2, 65, 65, 24, 5, True, False, torch.float32),      # dead rows; long memory
    (1, 1, 33, 257, 128, -3, False, True, torch.float32),   # short memory: far keys are not read
    (1, 1, 150, 150, 64, -3, False, True, torch.bfloat16),
    (1, 1, 70, 140, 64, 2, True, False, torch.bfloat16)])
def test_interpreted_kernel_tra(B, H, Tq, Tk, d, bias, dead, stops, dtype):
    torch.manual_seed(0)
    q, k, v = (heads(B, H, T, d) for T in (Tq, Tk, Tk))
    if dead:  # every third row has no survivor
        k, q[:, :, ::3] = k.abs(), -q[:, :, ::3].abs()
    log_decay = F.logsigmoid(torch.randn(B, H, Tq) + bias)
    inputs = [*(x.to(dtype) for x in (q, k, v)), log_decay]
    same_as(literal_of(model_tra), kernels.tra.tra_attention, inputs, TOLERANCE[dtype])
    y, _, start = torch.ops.nanope.tra(*(x.to(DEVICE) for x in inputs))
    assert (start.amax() > 0) == stops
    assert not dead or (y[:, :, ::3] == 0).all()


@with_kernels
def test_interpreted_kernel_tra_whose_decay_grows():
    """A fork may drop logsigmoid: far keys weigh more then, and none may be left out."""
    torch.manual_seed(0)
    q, k, v = (heads(1, 1, T, 16) for T in (20, 400, 400))
    log_decay = torch.rand(1, 1, 20) / 10
    same_as(tra_attention, kernels.tra.tra_attention, [q, k, v, log_decay], 1e-4)
    assert not torch.ops.nanope.tra(*(x.to(DEVICE) for x in (q, k, v, log_decay)))[2].any()


@with_kernels
def test_interpreted_kernel_operators_and_checkpointing():
    """Whole operators to torch.compile; their backward runs after a checkpoint."""
    torch.manual_seed(0)
    q, k, v = (heads(1, 1, 17, 16).contiguous().to(DEVICE).requires_grad_() for _ in range(3))
    log_decay = F.logsigmoid(torch.randn(1, 1, 17)).to(DEVICE).requires_grad_()
    S = steps_of(1, 1, 17).relu().cumsum(-1).to(DEVICE).requires_grad_()
    z = torch.randn(1, 1, 17, 4).to(DEVICE).requires_grad_()
    g = torch.ones_like(S, requires_grad=True)
    table = torch.randn(16, 4).to(DEVICE)
    for f, last in ((kernels.cope.cope_attention, table), (kernels.tra.tra_attention, log_decay)):
        q.grad = None
        checkpoint(f, q, k, v, last, use_reentrant=False).sum().backward()
        assert q.grad.abs().max() > 0
    ops = torch.ops.nanope
    torch.library.opcheck(ops.cope.default, (q, k, v, z, None))
    torch.library.opcheck(ops.tra.default, (q, k, v, log_decay))
    torch.library.opcheck(ops.separable.default, (q, k, v, S, g))


@pytest.mark.parametrize("case", ["cable", "fox", "tra"])
def test_one_gate_may_be_for_all_heads_interpreted_too(case):
    module, _, args = example(case, Tq=70, Tk=70, H=2, d=16)
    args = [x.to(DEVICE) for x in in_float32(args)]
    args[3:] = [x[:, :1] for x in args[3:]]
    plain = plain_function(module)
    close(WAYS[plain.__name__](*args), plain(*args), 1e-4)


@pytest.mark.parametrize("case", [*FORKED, "cable_nw", "cope sep P=5"])
def test_saved_tensors_may_come_back_in_another_layout_interpreted_too(case):
    """A hook on saved tensors, as for offloading, may make them contiguous."""
    module, _, args = example(case, Tq=20, Tk=20, B=1, H=2, d=16)
    fast = WAYS[plain_function(module).__name__]
    inputs = [x.float().to(DEVICE) for x in args if torch.is_tensor(x)]
    inputs[:3] = [x.to(DEVICE) for x in (heads(1, 2, 20, 16) for _ in range(3))]

    def f(*tensors):
        tensors = iter(tensors)
        return fast(*(next(tensors) if torch.is_tensor(x) else x for x in args))

    def contiguous(x):
        return x.clone(memory_format=torch.contiguous_format)
    if f(*inputs) is None:
        return  # the plain function runs
    wanted = gradients(f, inputs, inputs[2])
    with torch.autograd.graph.saved_tensors_hooks(contiguous, contiguous):
        got = gradients(f, inputs, inputs[2])
    for a, b in zip(got, wanted):
        assert torch.equal(a, b)


@needs_triton
@pytest.mark.parametrize("d, dtype, of_v, why", [
    (16, "float16", "float16", "torch.float16: the kernels take float32 and bfloat16"),
    (24, "float32", "float32", "head size 24: the kernels take multiples of 16 from 16 to 128"),
    (16, "float32", "bfloat16", "")])  # as under autocast
def test_what_the_kernels_do_not_take_runs_as_it_is_written(
        d, dtype, of_v, why, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", not CUDA)
    torch.manual_seed(0)
    q, k, v = (heads(1, 1, 20, d, getattr(torch, dtype)).to(DEVICE) for _ in range(3))
    args = q, k, v.to(getattr(torch, of_v)), F.logsigmoid(torch.randn(1, 1, 20)).to(DEVICE)
    assert kernels.faster("tra_attention", *args[:3]) is None
    assert torch.equal(kernels.with_ways(tra_attention)(*args), tra_attention(*args))
    assert kernels.why_no_triton(q) == why


@needs_triton
def test_no_kernel_on_old_gpus_and_rocm(monkeypatch):
    """ROCm's devices call themselves cuda, with a capability of 9."""
    gpu, cuda = types.SimpleNamespace(major=9), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    q = types.SimpleNamespace(dtype=torch.float32, device=cuda, size=lambda _: 64,
                              shape=(1, 1, 64, 64))
    assert kernels.faster("tra_attention", q, q, q) is kernels.tra.tra_attention
    gpu.major = 7
    assert kernels.faster("tra_attention", q, q, q) is None
    assert kernels.why_no_triton(q) == "compute capability below 8.0"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert kernels.faster("tra_attention", q, q, q) is None and kernels.why_no_triton(q) == "ROCm"


SPILLS = dict(separable_columns={120: 28}, cope_forward={100: 32},
              cope_columns={80: 308, 86: 252, 89: 252, 90: 8, 100: 156, 120: 224},
              tra_forward={86: 24, 89: 24},
              tra_rows={86: 8, 89: 8}, tra_columns={86: 12, 89: 12, 120: 20})  # bytes, Triton 3.9


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="compiles")
@pytest.mark.parametrize("name", ["separable_forward", "separable_rows", "separable_columns",
                                  "tra_forward", "tra_rows", "tra_columns",
                                  "cope_forward", "cope_rows", "cope_columns"])
@pytest.mark.parametrize("target", [80, 86, 89, 90, 100, 120])
def test_kernels_compile_for_a_gpu_that_is_not_here(name, target):
    """bfloat16 heads of 64 fit into registers but for SPILLS, and no product waits (C7515)."""
    module = getattr(kernels, name.split("_")[0])
    q, fn = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16), getattr(module, name)
    tile = module.tile_of(q) if "tra" in name else module.tiles(q)["columns" in name]
    more = dict(TILES=32, BLOCKS=64, P=64, SEP=False)
    said = compiled(fn, kernels.common.constants(q, *tile) | more, target)
    spilled = max(map(int, re.findall(r"(\d+) bytes spill", said)))
    assert spilled <= SPILLS.get(name, {}).get(target, 0) and "C7515" not in said


def compiled(fn, constants, target):
    """What ptxas says; sizes and strides are multiples of 16, as they mostly are."""
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
    ptx = kernels.triton.compile(
        ASTSource(fn, signature, given, aligned), GPUTarget("cuda", target, 32), options).asm["ptx"]
    tools = Path(kernels.triton.__file__).parent / "backends/nvidia/bin"
    for tool in ("ptxas", "ptxas-blackwell"):  # one of them knows this PTX
        command = [tools / tool, "-v", f"--gpu-name=sm_{target}{'a' * (target >= 90)}", "-"]
        done = subprocess.run([*command, "-o", os.devnull], input=ptx, capture_output=True,
                              text=True)
        if not done.returncode:
            break
    return done.stderr


@pytest.mark.parametrize("name", ["cable", "cable_nw", "fox", "cope_val", "cope_sep", "tra",
                                  "alibi_qk_scale"])
def test_models_take_the_faster_way_interpreted_too(name, monkeypatch, capsys):
    """It is called, and changes neither logits nor gradients; nothing is said."""
    model, idx = make(name, **SMALL).to(DEVICE), torch.randint(0, 61, (1, 30)).to(DEVICE)
    way, called = f"{name.partition('_')[0]}_attention", []
    fast = WAYS[way]

    def counted(*args):
        called.append(args)
        return fast(*args)
    monkeypatch.setitem(WAYS, way, counted)
    monkeypatch.setattr(kernels, "enabled", True)
    got = with_gradients(model, idx)
    called.clear()
    model(idx)
    assert len(called) == 1
    monkeypatch.setattr(kernels, "enabled", False)
    for a, b in zip(got, with_gradients(model, idx)):
        close(a, b, 1e-4)
    model(idx)
    assert len(called) == 1 and capsys.readouterr().err == ""


@with_kernels
def test_interpreted_kernel_why_not(monkeypatch):
    q = torch.zeros(1, 1, 4, 64, device=DEVICE)
    assert kernels.why_no_triton(q) == ""
    assert kernels.faster("tra_attention", q, q, q) is kernels.tra.tra_attention
    assert kernels.faster("tra_attention", q[:, :, :1], q, q) is None  # a query of cached decoding
    assert kernels.why_no_triton(torch.zeros(1, 1, 4, 64, device="meta")) == "no CUDA"
    args = argparse.Namespace(device=DEVICE, dtype="float32", kernel="auto")
    assert "attention by Triton kernel" in setup(args)[2]
    torch.set_float32_matmul_precision("highest")  # on CUDA, setup lowers it
    monkeypatch.setattr(kernels, "enabled", False)  # and afterwards as it was
    args.kernel = "off"
    assert "attention as the model file has it" in setup(args)[2]


@pytest.mark.slow
def test_without_triton():
    """The plain functions run all the same, and a CPU keeps its way."""
    code = """if True:
        import argparse, sys
        sys.modules["triton"] = None
        import torch
        from common import names
        from common.device import setup
        from common.attention import kernels
        q = torch.randn(1, 4, 9, 16)
        for name in ("cable", "tra", "cope"):
            m = names.make_model(dict(model=name, n_layer=1))
            assert m(torch.zeros(1, 9, dtype=torch.long))[0].isfinite().all()
        import model_cable
        assert hasattr(model_cable.cable_attention, "__wrapped__")
        print(kernels.faster("cable_attention", q, q, q).__name__)
        print(kernels.why_no_triton(q))
        print(setup(argparse.Namespace(device="cpu", dtype="auto", kernel="auto"))[2])"""
    lines = process(ROOT, "-c", code)[0].splitlines()
    assert lines[:2] == ["cable_attention", "no Triton"]
    assert lines[2].endswith("attention in PyTorch")


@pytest.mark.slow
@pytest.mark.parametrize("case", FORKED[1::2] if INTERPRET else FORKED if CUDA else FORKED[:3])
def test_a_faster_way_is_compiled_as_one_graph_interpreted_too(case):
    """
    torch.compile takes in the choice of the way, and gives the same numbers with gradients. (The
    plain CoPE is more graphs than one: it stops counting where the gates are full.)
    """
    torch.compiler.reset()  # else sizes in which the cases differ become symbols
    module, _, args = example(case, Tq=40, Tk=40, B=1, H=1, d=16)
    attention = kernels.with_ways(plain_function(module))
    inputs = [x.float().to(DEVICE) for x in args if torch.is_tensor(x)]
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    got = gradients(compiled, inputs, inputs[0])
    for a, b in zip(gradients(attention, inputs, inputs[0]), got):
        close(a, b, 1e-6 * max(1, a.abs().max().item()))
