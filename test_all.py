"""
Every formula that this repository claims, as a test. A literal form is held to its paper's formula,
one number at a time; everything faster is held to the literal form.

    pytest                 this file and tests/
    pytest -n 2            the same on two cores
    pytest -m "not slow"   without Triton's interpreter, its compiler, and long runs of the commands
"""
import inspect
import math
import sys

import pytest
import torch

import kernels
import model_cable
import model_cope
import model_tra
from common.spy import plain_function
from model_cable import cable_attention
from model_classics import attention
from model_cope import cope_attention, interpolate
from model_tra import tra_attention
from tests.examples import CASES, CLASSICS, COPE, encoding, example, in_float32
from tests.helpers import INF, MODEL_FILES, close, random_qkv, turned


@pytest.mark.parametrize("Tq", [13, 5, 1])
@pytest.mark.parametrize("case", CASES)
def test_the_literal_form_is_the_papers_formula(case, Tq):
    module, formula, args = example(case, Tq, Tk=13)
    got, want = module.literal(*args)[0], formula(*args)
    assert got.shape == want.shape and want.abs().max() > 0.1
    close(got, want, 1e-6 if case == "fire" else 1e-12)  # FIRE's 512 |m| is a float32


@pytest.mark.parametrize("case", CASES)
def test_what_runs_is_the_literal_form(case, monkeypatch):
    """All queries, the last few, one; in one block of rows and in many; in float32 too."""
    for Tq in (37, 6, 1):
        module, _, args = example(case, Tq)
        plain, want = plain_function(module), module.literal(*args)[0]
        for rows in (module.ROWS, 36, 7, 1):
            monkeypatch.setattr(module, "ROWS", rows)
            close(plain(*args), want, 1e-12)
        monkeypatch.undo()
        if case not in CLASSICS:  # whose parameters are float64
            got = plain(*in_float32(args))
            assert got.dtype == torch.float32
            close(got, want, 1e-4 if case in COPE else 2e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_the_literal_form(case):
    """Attention times v is the output, later keys have none of it, steps add up to the distance."""
    for Tq in (37, 6, 1):
        module, _, args = example(case, Tq)
        y, parts = module.literal(*args)
        seen = torch.ones(Tq, 37, dtype=torch.bool).tril(37 - Tq)
        assert all(x.shape == (2, 3, Tq, 37) for x in parts.values())
        assert parts["attention"][..., ~seen].eq(0).all()
        close(parts["attention"] @ args[2], y, 1e-12)
        total = parts["attention"].sum(-1)
        if case == "diff":
            close(total, torch.full_like(total, 1 - args[3]), 1e-12)
        else:
            logits = (parts["qk"] + parts["bias"]).masked_fill(~seen, -INF)
            alive = logits.amax(-1) > -INF
            assert alive.all() != (case == "tra")  # its first row has no survivor
            close(logits.softmax(-1).nan_to_num(0), parts["attention"], 1e-12)
            close(total, alive, 1e-12)
        names = {"qk", "bias", "attention"}
        if not module.STEP.startswith("none"):
            check_steps(case, seen, parts, args)
            names |= {"step", "distance"}
        assert parts.keys() == names


def check_steps(case, seen, parts, args):
    """TRA and CoPE count from key j to the query's own key, the others from the one after j."""
    step, distance = parts["step"], parts["distance"]
    own = case in COPE or case == "tra"
    assert step[..., ~seen].eq(0).all() and distance[..., ~seen].eq(0).all()
    assert step.min() >= 0 and step.max() > 0
    sums = [step[..., j if own else j + 1:].sum(-1) for j in range(37)]
    want = torch.stack(sums, -1) * seen
    if case in COPE:
        want = want.clamp(max=args[3].size(1) - 1)
    close(distance, want, 1e-12)
    if case in ("cable_nw", "fox"):
        close(parts["bias"], -distance, 1e-12)
    if case == "tra":
        assert parts["bias"][step == 0].eq(-INF).all() and set(step.unique().tolist()) == {0, 1}


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda p: p.stem)
def test_a_model_file_says_what_it_is(path):
    module = sys.modules[path.stem]
    for line in (module.EQUATION, module.STEP):
        assert 5 < len(line) <= 100 and "\n" not in line
    fields = {f.name for f in module.GPTConfig.__dataclass_fields__.values()}
    assert module.VARIANTS and all(set(v) <= fields for v in module.VARIANTS.values())
    plain = plain_function(module)
    assert inspect.signature(plain) == inspect.signature(module.literal)
    own_name = f"{path.stem.removeprefix('model_')}_attention"
    assert plain.__name__ in ("attention", own_name)


@pytest.mark.parametrize("rows", [128, 2])
@pytest.mark.parametrize("Tq", [5, 3])
def test_gradients_of_what_runs(Tq, rows, monkeypatch):
    cases = ["baseline", "t5", "kerple", "fire", "relative", "cable", "k_cable", "fox",
             "cope key P=5", "cope sep P=2", "tra", "diff"]
    for case in cases:
        module, _, args = example(case, Tq, Tk=5, B=1, d=6)
        monkeypatch.setattr(module, "ROWS", rows)
        if case == "diff":
            args[3] = torch.tensor(0.35, dtype=torch.float64)
        if case == "tra":
            args[0][0, 0, 0] = 0.1  # away from the threshold, where the output jumps
        tensors = [x.clone().requires_grad_() for x in args if torch.is_tensor(x)]

        def plain(*given, args=args, module=module):
            given = iter(given)
            mixed = [next(given) if torch.is_tensor(x) else x for x in args]
            return plain_function(module)(*mixed)
        assert torch.autograd.gradcheck(plain, tensors, fast_mode=True), case


@pytest.mark.parametrize("name", ["t5", "kerple", "fire", "relative"])
def test_gradients_reach_the_encodings_parameters(name):
    q, k, v = random_qkv(B=1, Tq=3, Tk=5)
    pe = encoding(name)
    attention(q, k, v, pe.bias).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in pe.parameters())


def test_tra_with_every_score_positive_is_alibi():
    q, k, v = (x.abs() for x in random_qkv())
    alibi = encoding("alibi")
    decay = -alibi.slopes[None, :, None].expand(2, 3, 37)
    close(tra_attention(q, k, v, decay), attention(q, k, v, alibi.bias), 1e-12)


def test_cable_in_bfloat16_keeps_the_float32_difference():
    """S ~ 800 at the end, where bfloat16 is 4 apart: only S_i - S_j in float32 is right."""
    q, k, v = (x.bfloat16() for x in random_qkv(B=1, H=2, Tq=96, Tk=4096, d=16))
    _, _, (*_, S, g, _) = example("cable", Tq=96, Tk=4096, B=1, H=2)
    S = S / 2
    want = model_cable.literal(q.double(), k.double(), v.double(), S, g)[0]
    got = cable_attention(q, k, v, S.float(), g.float())
    assert got.dtype == torch.bfloat16
    close(got, want, 0.03)
    rounded = cable_attention(q, k, v, S.bfloat16().float(), g.float())
    assert (rounded.double() - want).abs().max() > 0.3  # so the bound above means something


def test_tra_and_cope_count_in_float32_whatever_the_dtype():
    """bfloat16 has no whole numbers between 512 and 516: counts this long would blur."""
    q, k, v = (x.abs().bfloat16() for x in random_qkv(B=1, H=1, Tq=200, Tk=1500, d=8))
    exact = q.double(), k.double(), v.double()
    decay = torch.full((1, 1, 200), 0.5)  # it grows with the count: the farthest keys matter
    got = tra_attention(q, k, v, decay)
    assert got.dtype == torch.bfloat16
    close(got, model_tra.literal(*exact, decay.double())[0], 0.02)
    e, opened = torch.zeros(8, 1500), torch.full_like(k, 100)  # every gate is 1
    e[:, 1001] = 3  # one position stands out, which bfloat16 does not have
    close(cope_attention(q, k, v, e, opened),
          model_cope.literal(*exact, e.double(), opened.double())[0], 0.03)


COPE_RUNS = cope_attention, kernels.cpu_count.cope_attention


def test_cope_far_beyond_saturation():
    """Long enough for the tail of constant bias, with a head whose gates are rarely open."""
    q, k, v = random_qkv(B=1, H=2, Tq=1500, Tk=1500, d=8)
    q[:, 1, :, 0], k[:, 1, :, 0] = 4, -2
    e = torch.randn(8, 20, dtype=torch.float64)
    want = model_cope.literal(q, k, v, e)[0]
    for f in COPE_RUNS:
        close(f(q, k, v, e), want, 1e-11)
        close(f(q[:, :, 1490:], k, v, e), want[:, :, 1490:], 1e-11)
        close(f(*in_float32((q, k, v, e))), want, 1e-4)


def test_a_diverged_cope_says_nan_instead_of_breaking():
    q, k, v = random_qkv(dtype=torch.float32)
    q[0, 0, 3, 0] = float("nan")
    for f in COPE_RUNS:
        assert f(q, k, v, torch.randn(6, 4)).isnan().any()


def test_interpolation_is_continuous_and_hits_the_table():
    z = torch.randn(1, 6, dtype=torch.float64)
    p = torch.tensor([[0, 1, 2.5, 5, 3 - 1e-9, 3 + 1e-9]], dtype=torch.float64)
    want = [z[0, 0], z[0, 1], (z[0, 2] + z[0, 3]) / 2, z[0, 5], z[0, 3], z[0, 3]]
    close(interpolate(z, p)[0], torch.stack(want), 1e-7)


def test_the_gradient_of_copes_table_sums_to_zero_over_the_positions():
    """A row's z_i[n] all moved together move nothing: softmax sees differences alone."""
    *args, e, _ = example("cope key P=5", Tq=20)[2]
    e.requires_grad_()
    y = cope_attention(*args, e)
    (y * torch.randn_like(y)).sum().backward()
    assert e.grad.abs().max() > 1e-3
    close(e.grad.sum(-1), torch.zeros(6), 1e-12)


def test_tra_distances_are_the_papers_example():
    """Eq. 5's mask gives Eq. 7's distances, and weights of delta to the power of the distance."""
    M = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]]).double()
    D = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 2, 1, 0], [2, 0, 1, 0]]).double()
    eye = torch.eye(4, dtype=torch.float64)[None, None]
    k = (2 * M - 1).T[None, None].contiguous()
    decay = torch.full((1, 1, 4), math.log(0.3), dtype=torch.float64)
    y, parts = model_tra.literal(2 * eye, k, eye, decay)
    assert torch.equal(parts["step"][0, 0], M)
    assert torch.equal(parts["distance"][0, 0] * M, D)  # printed for survivors alone
    want = torch.where(M > 0, 0.3**D, 0)
    want = want / want.sum(-1, keepdim=True)
    close(y[0, 0], want, 1e-12)
    close(tra_attention(2 * eye, k, eye, decay)[0, 0], want, 1e-12)


def test_a_tra_row_without_survivors_is_zero_and_sees_no_future():
    q, k, v = random_qkv(B=1, H=1, Tq=9, Tk=9, dtype=torch.float32)
    k[:, :, :6] = -q[:, :, 5:6]  # query 5 rejects every key so far, and would love the later ones
    k[:, :, 6:] = q[:, :, 5:6] * 9
    inputs = [x.requires_grad_() for x in (q, k, v, torch.full((1, 1, 9), -0.1))]
    y = tra_attention(*inputs)
    assert (y[0, 0, 5] == 0).all() and (y[0, 0, 6:] != 0).any()
    y[0, 0, 5].sum().backward()
    assert all((x.grad == 0).all() for x in inputs)
    v2 = v.detach().clone()
    v2[:, :, 6:] = 1e6
    assert (tra_attention(q, k, v2, inputs[3])[0, 0, :6] == y[0, 0, :6]).all()


def test_rope_logits_depend_on_the_distance_alone_and_start_as_q_k():
    pe = encoding("rope", n_embd=24)
    q, k, _ = random_qkv(B=1, H=1, Tq=1, Tk=1, d=8)

    def logit(i, j):
        a, _ = pe.rotate(q, k, torch.tensor([i]))
        _, b = pe.rotate(q, k, torch.tensor([j]))
        return (a * b).sum()
    close(logit(7, 7), (q * k).sum(), 1e-5)
    close(logit(107, 100), logit(7, 0), 1e-4)
    close(pe.rotate(q, k, torch.tensor([5]))[0], turned(q, [5]), 1e-5)


def test_sinusoidal_and_learned_and_label_embeddings():
    x = torch.zeros(1, 30, 18)
    y = encoding("sinusoidal").embed(x, torch.arange(30), None)[0]
    for t, c in ((0, 0), (7, 3), (29, 8)):
        angle = t / 10000 ** (2 * c / 18)
        close(y[t, 2 * c:2 * c + 2], torch.tensor([math.sin(angle), math.cos(angle)]), 1e-6)
    ones = encoding("sinusoidal").embed(torch.ones_like(x), torch.arange(30), None)[0]
    close(ones, y + math.sqrt(18), 1e-6)
    learned = encoding("learned")
    close(learned.embed(x[:, :8], torch.arange(8), None)[0], learned.wpe.weight, 0)
    with pytest.raises(ValueError, match="learned positions end at block_size=8"):
        learned.embed(x, torch.arange(30), None)
    label = encoding("label")
    drawn = label.embed(x, torch.arange(30), None)[0]
    rows = [int((label.wpe.weight == row).all(1).nonzero()[0]) for row in drawn]
    assert rows == sorted(set(rows)) and len(rows) == 30
    again = label.embed(x, torch.arange(30), None)[0]
    assert not torch.equal(again, drawn)  # drawn anew, at test time too
    with pytest.raises(ValueError, match="do not fit in n_label=100"):
        label.embed(torch.zeros(1, 101, 18), torch.arange(101), None)
