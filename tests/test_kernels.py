"""The faster ways on a CPU: equal to the literal forms, and dropping only what has decayed."""
import math

import pytest
import torch
from torch.nn import functional as F

import kernels
import model_cable
from common.attention import plain_function
from rivals import fox
from tests.examples import example, in_float32
from tests.helpers import (
    CUDA,
    INTERPRET,
    close,
    far_keys_along_q,
    gradients,
    heads,
    leaves_nothing_out,
    literal_of,
    one_step,
    random_qkv,
    same_as,
    steps_of,
    summed,
)

pytestmark = pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's ways")


@pytest.mark.parametrize("Tq, Tk, d", [
    (1, 1, 16), (64, 64, 40), (257, 257, 32), (1025, 1025, 40), (1300, 1300, 32),
    (100, 1300, 16)])
def test_the_cpus_way_is_the_literal_form(Tq, Tk, d):
    """Outputs and gradients, in one call and without what has decayed; FoX too."""
    torch.manual_seed(0)
    B, H, rates = 2 if Tk < 500 else 1, 3, torch.tensor([1, 0.1, 0])  # fast, slowly, not at all
    inputs = [*(heads(B, H, T, d) for T in (Tq, Tk, Tk)), steps_of(B, H, Tk) * rates[:, None],
              F.softplus(torch.randn(B, H, Tq))]
    same_as(literal_of(model_cable), kernels.cpu.cable_attention, inputs, 1e-5, summed)
    same_as(literal_of(fox), kernels.cpu.fox_attention, inputs[:4], 1e-5,
            lambda f: lambda q, k, v, step: f(q, k, v, -step.abs().cumsum(-1)))
    # as in a trained model, where a bias is a small difference of sums of thousands
    inputs[3] = 50 * inputs[3]
    same_as(literal_of(model_cable), kernels.cpu.cable_attention, inputs, 1e-4, summed)


@pytest.mark.parametrize("Tq, Tk", [(1, 1), (64, 64), (65, 65), (300, 300), (5, 300)])
@pytest.mark.parametrize("case", ["tra", "cope key P=3", "cope key P=64", "cope val P=5",
                                  "cope sep P=3", "stick"])
def test_what_counts_on_a_cpu_is_the_literal_form(case, Tq, Tk):
    """
    Its output; gradients of the plain function, as the literal form has none in an empty row. In
    float64, where scores hardly ever lie at a step.
    """
    module, _, args = example(case, Tq, Tk)
    if case.startswith("cope val"):
        args[-1] = args[2]
    fast = kernels.ON_CPU[plain_function(module).__name__]
    inputs = [x for x in args if x is not None]
    dy = torch.randn_like(args[0])
    got, want = (gradients(f, inputs, dy) for f in (fast, plain_function(module)))
    for a, b in zip(got, want):
        close(a, b, 1e-12 * max(1, b.abs().max().item()))
    close(got[0], module.literal(*args)[0], 1e-12)
    with torch.no_grad():
        assert torch.equal(fast(*inputs), got[0])


@pytest.mark.parametrize("case", ["tra", "cope key P=5", "cope sep P=5", "stick"])
def test_what_counts_on_a_cpu_keeps_to_the_past(case):
    """Whatever later tokens are, NaN included, no earlier row moves by a bit."""
    module, _, args = example(case, 130, 130)
    args = in_float32(args)
    fast = kernels.ON_CPU[plain_function(module).__name__]
    before = fast(*args)
    for value in (1e30, math.nan):
        changed = [x.clone() if torch.is_tensor(x) else x for x in args]
        for x in changed:
            if torch.is_tensor(x) and x.dim() > 2:
                x[:, :, 70:] = value
        y = fast(*changed)
        assert torch.equal(y[:, :, :64], before[:, :, :64])
        if math.isfinite(value):
            assert torch.equal(y[:, :, :70], before[:, :, :70])
    assert fast(*(x if x is None else x.bfloat16() for x in args)) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(*args) is None


def test_what_nearly_reaches_the_bound_is_not_dropped():
    """Far logits are 4 - 24; with 17 + ln T below a row's own of 0 they would be left out."""
    inputs = *far_keys_along_q(600, 1300, far=700), one_step(1300, at=700, size=24.0)
    leaves_nothing_out(kernels.cpu.cable_attention, model_cable, inputs)


def test_how_far_later_rows_count_moves_no_bit_of_earlier_ones():
    for seed in range(30):
        q, k, v = random_qkv(Tq=130, Tk=130, dtype=torch.float32, seed=seed)
        k[..., 0] = k[..., 0].abs() + 1
        far, table = q.clone(), torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
        far[:, :, 65:] = torch.tensor([-20.0, 0, 0, 0, 0, 0])  # all gates nearly closed
        near, far = (kernels.cpu_count.cope_attention(x, k, v, table)[:, :, :65] for x in (q, far))
        assert torch.equal(near, far)


def test_what_the_cpus_way_leaves_to_the_plain_function():
    q, k, v, S, g = example("cable")[2]
    cable = kernels.cpu.cable_attention
    close(cable(q, k, v, S, g), model_cable.literal(q, k, v, S, g)[0], 1e-11)
    assert cable(q[:, :, -5:], k, v, S, g[:, :, -5:]) is None
    assert cable(*(x.bfloat16() for x in (q, k, v)), S, g) is None
    assert kernels.faster("tra_attention", q, k, v[..., :3]) is None  # as these keep their shapes
    assert kernels.faster("tra_attention", q, k[:, :1], v[:, :1]) is None
    with torch.autocast("cpu", torch.bfloat16):  # it would round S
        assert cable(*(x.float() for x in (q, k, v, S, g))) is None


def test_what_may_matter_is_not_dropped():
    """A far key that outweighs its distance; a stretch of steps below 0; weights below 0."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1500, 16)
    step, g = torch.full((1, 2, 1500), 0.5), torch.ones(1, 2, 1500)
    loud, seen = k.clone(), q.clone()
    loud[..., 0], loud[:, :, 100, 0], seen[..., 0] = 0, 800, 8
    back = step.clone()
    back[:, :, 700:720] = -30
    for tolerance, *args in ((1e-4, seen, loud, v, step, g),
                             (5e-4, q, k, v, back, g), (5e-4, q, k, v, step, -g)):
        q_, k_, v_, step_, g_ = args
        y = kernels.cpu.cable_attention(q_, k_, v_, step_.cumsum(-1), g_)
        want = model_cable.literal(*(x.double() for x in (q_, k_, v_, step_.cumsum(-1), g_)))[0]
        close(y, want, tolerance)  # 5e-4: logits of several hundreds, each a sum of 18 products
