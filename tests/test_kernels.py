"""
Every way in kernels/ against the literal form, with gradients: on a CPU its own, on CUDA Triton's.
Tests with "interpreted" in their names are run in Triton's interpreter, too, for a machine without
a GPU (tests/test_kernels_triton.py).
"""
import pytest
import torch

import kernels
import model_cable
import model_tra
from common.attention import plain_function
from tests.examples import encoding, example, on_tensors
from tests.helpers import CUDA, DEVICE, INTERPRET, WAYS, close, gradients, random_qkv

WITH_KERNELS = INTERPRET or CUDA
on_a_cpu = pytest.mark.skipif(WITH_KERNELS, reason="of the CPU's ways")


@pytest.fixture(autouse=True)
def not_so_long(monkeypatch):
    """From 64 keys on, not from 1,024, keys that have decayed are left out."""
    monkeypatch.setattr(kernels.cpu, "LONG", 64)
    if kernels.triton:
        monkeypatch.setattr(kernels.separable, "LONG", 64)


def harder(how, q, k, v, *rest):
    """Inputs with a name -> the arguments, changed so."""
    rest = list(rest)
    if how == "grows":   # a fork without logsigmoid: far keys weigh more
        rest[0] = -rest[0] / 10
    elif how in LARGE:   # steps so large that far keys decay
        rest[0] = 10 * rest[0]
    if how == "far":     # TRA's query without a survivor comes last, and looks farther
        q = q.flip(2)
    if how == "loud":    # a key that outweighs its distance
        q[..., 0], k[..., 0], k[:, :, 3, 0] = 8, 0, 150
    if how == "back":    # a step far below 0
        rest[0][..., k.size(2) // 3:] -= 3 * k.size(2)
    if how == "minus":   # what grows with the distance; a query that heeds none
        rest[1] = -rest[1]
        rest[1][:, :, 40] = 0
    if how == "shared":  # one gate for all heads
        rest = [x[:, :1] for x in rest]
    if how == "dead":    # every third query has no survivor
        k, q[:, :, ::3] = k.abs(), -q[:, :, ::3].abs()
    if how == "gates":   # nearly all are open, then, of later queries, closed: these count farther
        q[..., 0], q[:, :, 80:, 0], k[..., 0] = 1, -1, 12
    if how == "huge":
        q, k = 50 * q, 50 * k
    return [q, k, v, *rest]


LARGE = "far", "loud", "back", "minus", "grows"
# the interpreter of Triton 3.6 and 3.7 rounds an fma twice, which shows in `back`
ROUNDS_TWICE = INTERPRET and not hasattr(kernels.triton._C.libtriton.interpreter, "fma_fp32")
ROWS = [  # how the inputs are changed, queries, keys, size of a head
    ("cable", "", 1, 1, 16),
    ("cable", "", 37, 37, 24),
    ("cable", "shared", 37, 37, 16),
    ("cable", "far", 70, 200, 40),
    ("cable", "loud", 70, 200, 16),
    ("cable", "back", 70, 200, 16),
    ("cable", "minus", 70, 200, 16),
    ("cable_nw", "far", 200, 200, 80),
    ("fox", "", 65, 65, 16),
    ("alibi", "", 70, 130, 32),
    ("tra", "far", 33, 257, 128),
    ("tra", "dead", 65, 65, 24),
    ("tra", "shared", 37, 37, 16),
    ("tra", "grows", 40, 260, 16),
    ("cope key P=1", "", 40, 40, 16),
    ("cope key P=8", "", 65, 65, 24),
    ("cope key P=64", "", 70, 70, 16),
    ("cope key P=8", "gates", 130, 130, 16),
    ("cope sep P=16", "", 33, 70, 80)]
if not WITH_KERNELS:
    ROWS += [("cable", "", 600, 600, 16), ("cable", "back", 600, 600, 16),
             ("cable", "far", 200, 600, 16),
             ("cope key P=3", "gates", 300, 300, 16), ("stick", "", 5, 70, 16),
             ("stick c=4", "", 130, 130, 16), ("stick", "huge", 130, 130, 16)]
HALF = [
    ("cable", "far", 70, 200, 64), ("fox", "", 33, 130, 128), ("tra", "dead", 70, 140, 64),
    ("cope key P=8", "", 80, 150, 64), ("cope sep P=8", "", 70, 70, 64)]
if CUDA:
    HALF += [(case, "", 1500, 1500, 64) for case in ("cable", "alibi", "tra", "cope key P=8")]


def check(case, how, Tq, Tk, d, dtype, tolerance):
    """Output and gradients, relative where large; the literal form in float64."""
    heads = 2 if Tk == 37 else 1
    module, _, args = example(case, Tq, Tk, B=heads, H=heads, d=d)
    name = plain_function(module).__name__
    if case == "alibi":  # of whose ways the slopes are an argument
        name, args[3] = "alibi_attention", encoding("alibi").slopes[1:2].clone()

    def literal(q, k, v, *rest):
        if case == "alibi":
            slopes, = rest
            rest = [lambda q, i, j: -slopes[:, None, None] * (i - j)]
        return module.literal(q, k, v, *rest)[0]
    args = harder(how, *args)
    wide = torch.promote_types(dtype, torch.float32)  # of steps and decays
    rounded = [x.to(dtype) for x in args[:3]]
    rounded = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rounded]  # as models have it
    rounded += on_tensors(lambda x: x.to(dtype if "cope" in case else wide), args[3:])
    dy = torch.randn(args[0].shape).to(dtype)
    want = gradients(literal, on_tensors(torch.Tensor.double, rounded), dy.double())
    got = gradients(WAYS[name], on_tensors(lambda x: x.to(DEVICE), rounded), dy.to(DEVICE))
    for a, b in zip(got, want, strict=True):
        close(a.cpu(), b, tolerance * max(1, b.abs().max().item()))


@pytest.mark.parametrize("case, how, Tq, Tk, d", ROWS)
def test_a_way_is_the_literal_form_interpreted(case, how, Tq, Tk, d):
    torch.manual_seed(0)
    if WITH_KERNELS:
        tolerance = 5e-4 if how in LARGE else 2e-5
        if how == "back" and ROUNDS_TWICE:
            tolerance = 2e-3
        check(case, how, Tq, Tk, d, torch.float32, tolerance)
    else:  # in float64 scores hardly ever lie at a step
        check(case, how, Tq, Tk, d, torch.float64, 1e-6)
        if "cable" in case and how in ("", "far"):  # a bias is a small difference of large numbers
            check(case, how, Tq, Tk, d, torch.float32, 1e-4)


@pytest.mark.skipif(not WITH_KERNELS, reason="of the kernels")
@pytest.mark.parametrize("case, how, Tq, Tk, d", HALF)
def test_a_kernel_in_bfloat16_is_the_literal_form_interpreted(case, how, Tq, Tk, d):
    torch.manual_seed(0)
    check(case, how, Tq, Tk, d, torch.bfloat16, 3e-2)


def test_what_nearly_reaches_the_bound_is_not_left_out_interpreted():
    """
    The first 128 keys lie along the queries, the others across, so that first logits are as large
    as |q| |k| allows. Their values are a million: even e^-20 of one shows.
    """
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 132, 16), torch.zeros(1, 1, 260, 16), torch.randn(1, 1, 260, 16)
    q[..., 0], k[:, :, :128, 0], k[:, :, 128:, 1] = 4, 4, 4
    v[:, :, :128] *= 1e6
    S = torch.where(torch.arange(260) < 128, 0.0, 24.0).expand(1, 1, 260)  # logits are 4 - 24
    g, decay = torch.ones(1, 1, 132), torch.full((1, 1, 16), -0.2)
    near = k.clone()
    near[:, :, 128:, 0] = 1e-4  # near keys survive, too: the first row has counted 101
    cases = [(model_cable, 1e-5, q, k, v, S, g),
             (model_tra, 5e-3, q[:, :, :16], near[:, :, :244], 10 * v[:, :, :244], decay)]
    for module, tolerance, *args in cases:
        want = module.literal(*(x.double() for x in args))[0]
        way = WAYS[plain_function(module).__name__]
        close(way(*(x.to(DEVICE) for x in args)).cpu(), want, tolerance)
    steeper = [x.to(DEVICE) for x in (q, k, v, 3 * S, g)]  # left out: the test is about the bound
    if WITH_KERNELS:
        assert torch.ops.nanope.separable(*steeper)[2].amax() > 0
    else:
        assert kernels.cpu.first_keys(q, k, 3 * S, g).amax() > 0


@on_a_cpu
@pytest.mark.parametrize("case", ["tra", "cope key P=5", "cope sep P=5", "stick"])
def test_what_counts_on_a_cpu_keeps_to_the_past(case):
    """Whatever later tokens are, no earlier row moves by a bit, nor where they count farther."""
    module, _, args = example(case, 130, 130)
    args = on_tensors(torch.Tensor.float, args)
    args[1][..., 0] = args[1][..., 0].abs() + 1
    way = kernels.ON_CPU[plain_function(module).__name__]
    before = way(*args)
    for later in (1e30, torch.tensor([-20.0, 0, 0, 0, 0, 0])):  # which closes the gates
        changed = on_tensors(torch.clone, args)
        for x in changed[:3]:
            x[:, :, 70:] = later
        assert torch.equal(way(*changed)[:, :, :70], before[:, :, :70])


@on_a_cpu
def test_what_the_cpus_ways_leave_to_the_plain_function():
    """Half precision, also under autocast, which would round S; and the last of few keys."""
    for case in ("cable", "tra", "cope key P=5"):
        module, _, args = example(case, 60, 60)
        args = on_tensors(torch.Tensor.float, args)
        way = kernels.ON_CPU[plain_function(module).__name__]
        assert way(*args) is not None
        assert way(*on_tensors(torch.Tensor.bfloat16, args)) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert way(*args) is None
    q, k, v, S, g = example("cable", 5, 60)[2]
    assert kernels.cpu.cable_attention(q, k, v, S, g) is None
    q, k, v = random_qkv()
    for others in ((k, v[..., :3]), (k[:, :1], v[:, :1])):  # plain functions broadcast
        assert kernels.faster("tra_attention", q, *others) is None
