"""
Every claim that this repository makes, as a test. A literal form is held to its paper's formula,
one number at a time; everything faster is held to the literal form.

    pytest                 all of it
    pytest -n 2            the same on two cores
    pytest -m "not slow"   without Triton's interpreter, its compiler, and long runs of the commands
"""
import argparse
import ast
import base64
import contextlib
import difflib
import errno
import functools
import gzip
import hashlib
import http.server
import importlib
import inspect
import io
import itertools
import json
import linecache
import math
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import types
import zlib
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

import bench
import data
import data.counting
import data.dyck
import data.flipflop
import data.max_retrieval
import data.mlm
import data.recall
import data.retrieval
import data.selective_copy
import data.set_complement
import data.text
import data.tomita
import eval as evaluation
import experiments
import kernels
import maps
import model_baseline
import model_bert
import model_cable
import model_classics
import model_cope
import model_diff
import model_fox
import model_postnorm
import model_tra
import plot
import reproduce
import runs
import sample
import train
from experiments import (
    cope_cut,
    cope_variants,
    dry_run,
    learned_hard,
    matrix,
    minimal,
    tables,
    tra_variants,
    trainings,
)
from model_cable import cable_attention
from model_classics import attention
from model_cope import cope_attention, interpolate
from model_tra import tra_attention

torch.set_num_threads(1)
ROOT = Path(runs.__file__).resolve().parent
MODEL_FILES = sorted(ROOT.glob("model_*.py"))
NAMES = sorted(runs.models())
ENCODERS = [name for name in NAMES if runs.models()[name][0] is model_bert]
MODELS = [name for name in NAMES if name not in ENCODERS]
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=61)
INF = float("inf")


def make(name, **changes):
    """A small random model; what starts at zero is moved, so that a test of it can fail."""
    torch.manual_seed(0)
    fields = runs.models()[name][1] | TINY | dict(model=name, n_label=200, P=7) | changes
    model = runs.make_model(fields).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def random_qkv(B=2, H=3, Tq=37, Tk=37, d=6, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, T, d, generator=g, dtype=dtype) for T in (Tq, Tk, Tk)]


def close(a, b, tol):
    assert a.shape == b.shape, (a.shape, b.shape)
    diff = (a.double() - b.double()).abs().max().item()
    assert diff <= tol, f"largest difference {diff:.2e}, allowed {tol:.0e}"


# -----------------------------------------------------------------------------
# the papers' formulas, one number at a time in float64: what the literal forms are held to

def naive(q, k, v, bias):
    """softmax(q . k / sqrt(d) + bias(b, h, i, j)) v for j <= i; a bias of -inf drops the key."""
    B, H, Tq, d = q.shape
    Tk, out = k.size(2), v.new_zeros(B, H, Tq, v.size(3))
    for b, h, row in np.ndindex(B, H, Tq):
        i = Tk - Tq + row
        weights = {}
        for j in range(i + 1):
            logit = (q[b, h, row] @ k[b, h, j]).item() / math.sqrt(d) + float(bias(b, h, i, j))
            if logit > -INF:
                weights[j] = math.exp(logit)
        for j, weight in weights.items():
            out[b, h, row] += weight / sum(weights.values()) * v[b, h, j]
    return out


def zero(b, h, i, j):
    return 0.0


def cable_formula(q, k, v, S, g=None, log_kernel=""):
    """
    CABLE's Eq. 5 and 7: -g_i (S_i - S_j). K-CABLE: -g_i log(1 + (S_i - S_j)^2), or
    -log(1 + (g_i (S_i - S_j))^2).
    """
    first = k.size(2) - q.size(2)

    def bias(b, h, i, j):
        distance = (S[b, h, i] - S[b, h, j]).item()
        weight = 1.0 if g is None else g[b, h, i - first].item()
        if log_kernel == "inside":
            return -math.log(1 + (weight * distance)**2)
        if log_kernel == "outside":
            distance = math.log(1 + distance**2)
        return -weight * distance
    return naive(q, k, v, bias)


def fox_formula(q, k, v, F_):
    """FoX: log of the product of the forget gates from j + 1 to i."""
    f = F_.diff(dim=-1, prepend=torch.zeros_like(F_[..., :1])).exp()
    return naive(q, k, v, lambda b, h, i, j: math.log(f[b, h, j + 1:i + 1].prod()))


def cope_formula(q, k, v, pos_emb, gate_keys=None):
    """CoPE's Eq. 3, 4, 7 and 9: gates are summed from key j to query i, z is interpolated."""
    gate_keys = k if gate_keys is None else gate_keys
    first, d, P = k.size(2) - q.size(2), q.size(3), pos_emb.size(1)

    def bias(b, h, i, j):
        row = q[b, h, i - first]
        gates = [torch.sigmoid(row @ gate_keys[b, h, n] / math.sqrt(d)) for n in range(j, i + 1)]
        p = min(sum(gates).item(), P - 1)
        z = row @ pos_emb
        return z[math.floor(p)] * (1 - p + math.floor(p)) + z[math.ceil(p)] * (p - math.floor(p))
    return naive(q, k, v, bias)


def tra_formula(q, k, v, log_decay):
    """TRA's Eq. 3 to 12: keys with q . k <= 0 are dropped, then those that are left are counted."""
    first = k.size(2) - q.size(2)

    def bias(b, h, i, j):
        survivors = [n for n in range(j, i + 1) if q[b, h, i - first] @ k[b, h, n] > 0]
        return len(survivors) * log_decay[b, h, i - first] if j in survivors else -INF
    return naive(q, k, v, bias)


def diff_formula(q, k, v, lam):
    """Diff: a softmax of the first halves minus lambda times one of the second halves."""
    half = q.size(3) // 2
    first = naive(q[..., :half], k[..., :half], v, zero)
    return first - lam * naive(q[..., half:], k[..., half:], v, zero)


def encoding(name, **changes):
    """A classic encoding whose parameters are random, in float64."""
    torch.manual_seed(0)
    fields = TINY | dict(n_head=3, n_embd=18, block_size=8, n_label=100)
    config = model_classics.GPTConfig(**fields | model_classics.VARIANTS[name] | changes)
    pe = model_classics.ENCODINGS[config.pe](config)
    with torch.no_grad():
        for p in pe.parameters():
            p.add_(torch.randn_like(p))
        if name == "fire":
            pe.m.fill_(6 / 512)  # L = 6: rows before and beyond it
    return pe.double()


def classic_formula(name, q, k, v, pe):
    """The classics' biases, from each paper's formula."""
    first, last = k.size(2) - q.size(2), 7
    slopes = 2**-4, 2**-8, 2**-2  # of 3 heads: those of 2, and the first that 4 would have

    def fire(b, h, i, j):
        c, L = abs(pe.c.item()), abs(pe.m.item()) * 512
        x = math.log(c * (i - j) + 1) / (math.log(c * max(i, L) + 1) + 1e-6)
        hidden = F.relu(pe.mlp[0].weight[:, 0] * x + pe.mlp[0].bias)
        return pe.mlp[2].weight[h] @ hidden + pe.mlp[2].bias[h]

    def kerple(b, h, i, j):
        p, a = max(pe.p[h].item(), 0.01), max(pe.a[h].item(), 0.01)
        return -p * math.log(1 + a * (i - j))

    def relative(b, h, i, j):
        if i - j > last and name == "relative":
            return 0.0
        return q[b, h, i - first] @ pe.e[:, min(i - j, last)]
    bias = dict(rope=zero, alibi=lambda b, h, i, j: -slopes[h] * (i - j), kerple=kerple, fire=fire,
                t5=lambda b, h, i, j: pe.r[h, min(i - j, last)],
                relative=relative, relative_capped=relative)[name]
    return naive(q, k, v, bias)


# -----------------------------------------------------------------------------
# literal forms against those formulas, and the functions that run against the literal forms

CLASSICS = ("rope", "alibi", "t5", "kerple", "fire", "relative", "relative_capped")
COPE = [f"cope {gates} P={P}" for gates in ("key", "sep") for P in (1, 2, 5, 64)]
CASES = ["baseline", "postnorm", *CLASSICS, "cable", "cable_nw", "k_cable", "k_cable_nw",
         "k_cable_inside", "fox", *COPE, "tra", "diff"]


def example(case, Tq=37, Tk=37, B=2, H=3, d=6):
    """-> module, the formula of this case, and float64 arguments for both."""
    q, k, v = random_qkv(B, H, Tq, Tk, d)
    g = torch.Generator().manual_seed(1)
    a, z = torch.randn(2, B, H, Tk, generator=g, dtype=torch.float64)
    more = torch.randn(B, H, Tk, d, generator=g, dtype=torch.float64)
    if case in ("baseline", "postnorm"):
        module = dict(baseline=model_baseline, postnorm=model_postnorm)[case]
        return module, functools.partial(naive, bias=zero), [q, k, v]
    if case in CLASSICS:
        pe = encoding(case).requires_grad_(False)

        def formula(q, k, v, bias):
            return classic_formula(case, q, k, v, pe)
        return model_classics, formula, [q, k, v, pe.bias]
    if "cable" in case:
        weight = None if "nw" in case else F.softplus(z[..., Tk - Tq:])
        kernel = "inside" if "inside" in case else "outside" if case.startswith("k_") else ""
        return model_cable, cable_formula, [q, k, v, a.relu().cumsum(-1), weight, kernel]
    if case == "fox":
        return model_fox, fox_formula, [q, k, v, F.logsigmoid(z).cumsum(-1)]
    if case == "tra":
        q[0, 0, 0] = 0  # no score above 0: no survivor
        return model_tra, tra_formula, [q, k, v, F.logsigmoid(z[..., Tk - Tq:])]
    if case == "diff":
        return model_diff, diff_formula, [q, k, v, 0.35]
    _, gates, P = case.split()
    pos_emb = torch.randn(d, int(P.removeprefix("P=")), generator=g, dtype=torch.float64)
    return model_cope, cope_formula, [q, k, v, pos_emb, more if gates == "sep" else None]


def in_float32(args):
    return [x.float() if torch.is_tensor(x) else x for x in args]


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
        plain, want = runs.plain_function(module), module.literal(*args)[0]
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
    plain = runs.plain_function(module)
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
            return runs.plain_function(module)(*mixed)
        assert torch.autograd.gradcheck(plain, tensors, fast_mode=True), case


@pytest.mark.parametrize("name", ["t5", "kerple", "fire", "relative"])
def test_gradients_reach_the_encodings_parameters(name):
    q, k, v = random_qkv(B=1, Tq=3, Tk=5)
    pe = encoding(name)
    attention(q, k, v, pe.bias).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in pe.parameters())


# -----------------------------------------------------------------------------
# what the methods say about each other, and about precision

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


def turned(x, positions):
    """RoPE in complex numbers: channels c and c + d/2 are one, turned by position * 1e4^(-2c/d)."""
    half = x.size(-1) // 2
    freq = 10000 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * freq
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat((z.real, z.imag), -1)


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


# -----------------------------------------------------------------------------
# a layer, and where the norms sit

def by_hand(model, n, x):
    """Layer n's attention for its input x (B, T, C), from its weights and its literal form."""
    attn, config = model.h[n].attn, model.config
    B, T, C = x.shape
    module = sys.modules[type(model).__module__]

    def split(weight):    # -> (B, H, T, d)
        return (x @ weight.T).view(B, T, config.n_head, -1).transpose(1, 2)

    def per_head(linear):  # -> (B, H, T)
        return (x @ linear.weight.T + linear.bias).transpose(1, 2)
    q, k, v = (split(weight) for weight in attn.c_attn.weight.chunk(3))
    if config.qk_norm:
        q, k = (z / z.square().mean(-1, keepdim=True).sqrt() for z in (q, k))
    positions, more = list(range(T)), []
    if module is model_cable:
        step = dict(relu=F.relu, softplus=F.softplus)[config.step]
        g = F.softplus(per_head(attn.w_s)) if config.weight else None
        more = [step(per_head(attn.w_c)).cumsum(-1), g, config.log_kernel]
    elif module is model_fox:
        more = [F.logsigmoid(per_head(attn.w_f)).cumsum(-1)]
    elif module is model_tra:
        more = [F.logsigmoid(per_head(attn.w_f))]
    elif module is model_cope:
        gate_keys = dict(key=None, val=v, sep=split(attn.w_g.weight) if attn.gates == "sep" else 0)
        more = [model.pos_emb[n % len(model.pos_emb)], gate_keys[config.gates]]
    elif module is model_classics:
        pe = model.pe[n % len(model.pe)]
        more = [pe.bias]
    if getattr(config, "pe", "") == "rope":
        q, k = turned(q, positions), turned(k, positions)
    if module is model_diff:
        q, k = (torch.cat([turned(h, positions) for h in z.chunk(2, -1)], -1) for z in (q, k))
        start = 0.8 - 0.6 * math.exp(-0.3 * n)
        lam = (attn.l_q1 @ attn.l_k1).exp() - (attn.l_q2 @ attn.l_k2).exp() + start
        y = module.literal(q, k, v, lam)[0]
        y = (1 - start) * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        y = y * attn.ln_head.weight
    else:
        y = module.literal(q, k, v, *more)[0]
    return y.transpose(1, 2).reshape(B, T, C) @ attn.c_proj.weight.T


@pytest.mark.parametrize("name, changes", [
    ("nope", {}), ("nope", dict(qk_norm=True)), ("rope", {}), ("alibi", {}), ("kerple", {}),
    ("relative", {}), ("cable", {}), ("cable", dict(qk_norm=True)), ("cable_nw", {}),
    ("k_cable", {}), ("k_cable_inside", {}), ("cable_nw_softplus", {}), ("fox", {}), ("tra", {}),
    ("tra", dict(qk_norm=False)), ("cope", {}), ("cope", dict(share=False)),
    ("cope", dict(qk_norm=True)), ("cope_val", {}),
    ("cope_sep", {}), ("diff", {}), ("postnorm", {}), ("postnorm", dict(pe="nope", qk_norm=True))])
def test_a_layer_is_its_formula(name, changes):
    model = make(name, **changes).double()
    found = []
    for block in model.h:
        block.attn.register_forward_hook(lambda _, args, y: found.append((args[0], y)))
    with torch.no_grad():
        model(torch.randint(0, 61, (2, 14)))
        assert len(found) == 2
        for n, (x, y) in enumerate(found):
            close(y, by_hand(model, n, x), 1e-5)
    if name.startswith("cope"):
        assert len(model.pos_emb) == (1 if model.config.share else 2)


@pytest.mark.parametrize("name", MODELS)
def test_a_spy_sees_what_the_literal_form_explains(name):
    """What attention was called with, put into the literal form, is what the layer goes on with."""
    model, went_on = make(name), []
    module = runs.attention_module(model)
    plain, enabled = runs.plain_function(module), kernels.enabled
    for block in model.h:
        block.attn.c_proj.register_forward_pre_hook(lambda _, args: went_on.append(args[0]))
    with torch.no_grad(), runs.spy(model) as calls:
        model(torch.randint(0, 61, (2, 20)))
    assert runs.plain_function(module) is plain and kernels.enabled == enabled
    assert len(calls) == len(went_on) == 2
    for args, y in zip(calls, went_on):
        assert len(args) == len(inspect.signature(plain).parameters)
        got, parts = module.literal(*args)
        if name != "diff":  # which normalises every head afterwards
            close(got.transpose(1, 2).flatten(2), y, 1e-4)
        assert parts["attention"].shape == (2, 4, 20, 20)


def test_cable_and_fox_sum_their_steps_in_float32_under_autocast():
    for name, sums in (("cable", slice(3, 5)), ("fox", slice(3, 4)), ("tra", slice(3, 4))):
        model = make(name)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), runs.spy(model) as calls:
            model(torch.randint(0, 61, (2, 600)))
        assert calls[0][0].dtype == torch.bfloat16
        for x in calls[0][sums]:  # not a float32 of what was summed in bfloat16
            assert x.dtype == torch.float32 and (x != x.bfloat16()).any(), name


def test_what_starts_at_zero():
    torch.manual_seed(0)
    attn = model_cable.GPT(model_cable.GPTConfig()).h[0].attn
    for linear in (attn.w_c, attn.w_s):  # g starts near log 2, half of the steps at 0
        assert torch.equal(linear.bias, torch.zeros(4)) and 0.015 < linear.weight.std() < 0.025
    assert (model_fox.GPT(model_fox.GPTConfig()).h[0].attn.w_f.bias == 0).all()
    assert (model_tra.GPT(model_tra.GPTConfig()).h[0].attn.w_f.bias == 0).all()
    assert all((e == 0).all() for e in model_cope.GPT(model_cope.GPTConfig()).pos_emb)
    relative = model_classics.GPT(model_classics.GPTConfig(pe="relative"))
    assert (relative.pe[0].e == 0).all()


def test_what_does_not_start_at_zero():
    torch.manual_seed(0)
    def first(pe):
        return model_classics.GPT(model_classics.GPTConfig(pe=pe)).pe[0]
    assert 0.015 < first("t5").r.std() < 0.025
    kerple, fire = first("kerple"), first("fire")
    for x, most in ((kerple.p, 2), (kerple.a, 1)):
        assert 0 < x.min() and x.max() < most and x.unique().numel() == 4
    assert (fire.c.item(), fire.m.item()) == pytest.approx((0.1, 1))
    attn = model_diff.GPT(model_diff.GPTConfig()).h[0].attn
    lambdas = torch.cat([attn.l_q1, attn.l_k1, attn.l_q2, attn.l_k2])
    assert 0.07 < lambdas.std() < 0.13


def test_backbone_initialisation():
    torch.manual_seed(0)
    model = model_cable.GPT(model_cable.GPTConfig())
    assert model.lm_head.weight is model.wte.weight
    wanted = 0.02 / math.sqrt(8)
    assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(wanted, rel=0.05)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert sum(p.numel() for p in model.parameters()) == 824608  # "about 0.8M"


def N(x, layer, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * layer.weight


def mlp_by_hand(x, layer):
    return F.gelu(x @ layer.c_fc.weight.T) @ layer.c_proj.weight.T


@pytest.mark.parametrize("scheme", model_postnorm.SCHEMES)
def test_norm_schemes_by_hand(scheme):
    model = make("postnorm", norm=scheme).double()
    for p in model.parameters():  # gains of 1 would hide a norm that is used twice
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    idx = torch.randint(0, 61, (2, 13))
    with torch.no_grad():
        x = model.wte.weight[idx]
        if scheme == "peri_init":
            x = N(x, model.ln_0, 1e-8)
        for layer, block in enumerate(model.h):
            updates = (lambda x, layer=layer: by_hand(model, layer, x),
                       lambda x, block=block: mlp_by_hand(x, block.mlp))
            for n, f in enumerate(updates):
                if scheme in ("pre", "pre_final"):
                    x = x + f(N(x, block.before[n], 1e-8))
                elif scheme == "output":
                    x = x + (N(f(x), block.after[n], 1e-8) if n == 0 else f(x))
                elif scheme == "post":
                    x = N(x + f(x), block.after[n], 1e-8)
                else:
                    x = x + N(f(N(x, block.before[n], 1e-8)), block.after[n], 1e-8)
        if scheme in ("pre_final", "peri", "peri_init"):
            x = N(x, model.ln_f, 1e-8)
        close(model(idx)[0], x @ model.wte.weight.T, 1e-5)


@pytest.mark.parametrize("name", ["nope", "fox", "tra", "rope"])
def test_post_norm_of_the_other_files_by_hand(name):
    """TRA's authors': a norm on the embeddings, then one on every sum, the last before the head."""
    model = make(name, norm="post").double()
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    idx = torch.randint(0, 61, (2, 13))
    with torch.no_grad():
        x = N(model.wte.weight[idx], model.h[0].ln_1, 1e-6)
        for layer, block in enumerate(model.h):
            x = N(x + by_hand(model, layer, x), block.ln_2, 1e-6)
            following = model.h[layer + 1].ln_1 if layer + 1 < len(model.h) else model.ln_f
            x = N(x + mlp_by_hand(x, block.mlp), following, 1e-6)
        close(model(idx)[0], x @ model.wte.weight.T, 1e-5)


def test_pre_final_is_the_other_files_pre():
    model, other = make("postnorm", norm="pre_final"), make("rope", norm="pre")
    weights = {}
    for name, p in model.state_dict().items():
        weights[name.replace("before.0", "ln_1").replace("before.1", "ln_2")] = p
    other.load_state_dict(weights)
    idx = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        close(model(idx)[0], other(idx)[0], 1e-4)


# -----------------------------------------------------------------------------
# every model

SCHEMES = [(name, norm) for name in MODELS for norm in ("pre", "post")
           if runs.models()[name][0] is not model_postnorm]
SCHEMES += [("postnorm", norm) for norm in model_postnorm.SCHEMES]


@pytest.mark.parametrize("name, norm", SCHEMES)
def test_causality(name, norm, monkeypatch):
    """No later token changes an earlier output: not by a bit, on a GPU not beyond rounding."""
    model, T = make(name, norm=norm, qk_norm=norm == "post"), 24
    monkeypatch.setattr(runs.attention_module(model), "ROWS", 10)
    idx = torch.randint(0, 61, (2, T))
    exact = not INTERPRET and not CUDA
    for enabled, allowed in ((False, 0), (True, 0 if exact else 1e-5)):
        monkeypatch.setattr(kernels, "enabled", enabled)
        with torch.no_grad():
            torch.manual_seed(5)
            before = model(idx)[0]
            for t in (1, 12, T - 1):
                other = idx.clone()
                other[:, t] = (other[:, t] + 1) % 61
                torch.manual_seed(5)
                after = model(other)[0]
                close(after[:, :t], before[:, :t], allowed)
                assert (after[:, t] - before[:, t]).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_equals_the_full_forward(name):
    """Past the training length (24), in pieces: a prompt, single tokens, several at once."""
    model, T, cuts = make(name), 90, [0, 5, 6, 7, 40, 41, 70, 90]
    if "learned" in name:  # whose table ends
        T, cuts = 24, [0, 5, 6, 7, 19, 20, 24]
    idx = torch.randint(0, 61, (2, T))
    with torch.no_grad():
        torch.manual_seed(7)
        full = model(idx)[0]
        torch.manual_seed(7)
        cache = runs.new_cache(model, T if name == "label" else 8)  # 8: the buffers have to grow
        pieces = [model(idx[:, a:b], cache=cache)[0] for a, b in zip(cuts, cuts[1:])]
        assert cache.t == T
        close(torch.cat(pieces, 1), full, 1e-3 * full.abs().max().item())
        if name != "label":  # without a cache every forward draws its labels anew
            fast = list(sample.generate(model, idx[:1, :6], T - 6, temperature=0))
            slow = written_without_a_cache(model, idx[:1, :6], T - 6, temperature=0)
            assert torch.equal(torch.cat(fast, 1), slow)


def written_without_a_cache(model, idx, n, **how):
    """What sample.generate would write by plain forward passes, each over the whole text."""
    text = idx
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "new_cache", lambda model, size: None)
        patch.setattr(sample, "read", lambda model, idx, cache: model(idx)[0])
        for _ in range(n):
            new, = sample.generate(model, text, 1, **how)
            text = torch.cat((text, new), 1)
    return text[:, idx.size(1):]


def test_a_label_cache_announces_its_length():
    model = make("label")
    with torch.no_grad(), pytest.raises(ValueError, match="the cache announced 8 tokens, more"):
        cache = runs.new_cache(model, 8)
        model(torch.zeros(1, 6, dtype=torch.long), cache=cache)
        model(torch.zeros(1, 3, dtype=torch.long), cache=cache)


@pytest.mark.parametrize("name", MODELS)
def test_training_and_decoding_under_autocast(name):
    """bfloat16, as on a GPU: finite gradients, logits near float32's, with the cache too."""
    model, idx = make(name), torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        torch.manual_seed(1)
        want = model(idx)[0]
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        logits, loss = model(idx, idx)
        loss.backward()
        with torch.no_grad():
            torch.manual_seed(1)
            cache = runs.new_cache(model, 20)
            pieces = [model(part, cache=cache)[0] for part in idx.split([7, 1, 12], 1)]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if name not in ("tra", "learned_hard"):  # where a rounding may choose another set of keys
        for got in (logits, torch.cat(pieces, 1)):
            assert (got - want).abs().mean() < 0.1 * want.abs().mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_of_one_token_and_the_loss(name):
    model = make(name)
    logits, loss = model(torch.randint(0, 61, (3, 1)))
    assert logits.shape == (3, 1, 61) and loss is None
    idx, targets = torch.randint(0, 61, (2, 2, 11))
    targets[0, :7] = -1
    torch.manual_seed(1)
    logits, loss = model(idx, targets)
    kept = targets != -1
    close(loss, F.cross_entropy(logits[kept], targets[kept]), 1e-5)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name, fields, message", [
    ("rope", dict(pe="rop"), "pe='rop' is not one of learned, sinusoidal, rope"),
    ("cable", dict(log_kernel="yes"), "log_kernel='yes' is not one of outside, inside"),
    ("postnorm", dict(n_head=32), "rope turns pairs: head size 1 is odd"),
    ("bert_rope", dict(n_head=32), "head size 1 is odd"),
    ("bert_rope", dict(pe="x"), "pe='x' is not one of cable")])
def test_settings_that_do_not_fit(name, fields, message):
    """Those that test_train_says_what_is_wrong has not."""
    module, variant = runs.models()[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        module.GPT(module.GPTConfig(**TINY | variant | fields))


# -----------------------------------------------------------------------------
# eval.py's losses

@pytest.mark.parametrize("name", [m for m in MODELS if m != "label"])  # which draws anew each time
def test_perplexity_in_pieces_equals_one_forward(name, monkeypatch):
    """eval.py's windows: batches of short ones, cached pieces of long ones, a shorter last one."""
    model, cpu, context = make(name), torch.device("cpu"), contextlib.nullcontext()
    stream = np.random.default_rng(0).integers(0, 61, 101).astype(np.uint16)
    ids = torch.from_numpy(stream.astype(np.int64))
    for T in (10, 24) if "learned" in name else (10, 24, 64):
        want = []
        with torch.no_grad():
            for x, y in zip(ids[:-1].split(T), ids[1:].split(T)):
                want.append(F.cross_entropy(model(x[None])[0][0], y, reduction="none"))
        for piece in (runs.piece, lambda model: 16):
            monkeypatch.setattr(runs, "piece", piece)
            got = evaluation.token_losses(model, stream, T, cpu, context)
            close(torch.from_numpy(got), torch.cat(want), 1e-4)
            monkeypatch.undo()


def test_every_length_scores_the_same_tokens():
    seen = []

    class Noted(torch.nn.Module):
        config = model_baseline.GPTConfig(vocab_size=50)

        def forward(self, x, cache=None):
            seen.extend(x.flatten().tolist())
            return torch.zeros(*x.shape, 50), None
    stream, cpu = np.arange(41, dtype=np.uint16), torch.device("cpu")
    for T in (1, 7, 8, 40):
        seen.clear()
        losses = evaluation.token_losses(Noted(), stream, T, cpu, contextlib.nullcontext())
        assert sorted(seen) == list(range(40)) and losses.shape == (40,)


@pytest.mark.parametrize("name", ["cable", "nope"])
def test_strided_perplexity_is_one_forward_for_every_token(name, monkeypatch):
    """Every token from the longest window's half on, with T / 2 to T tokens to look back on."""
    model, cpu, context = make(name), torch.device("cpu"), contextlib.nullcontext()
    for N, lengths in ((61, (1, 2, 7, 10, 24)), (24, (5, 24)), (30, (10, 20))):
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 61, N + 1))
        longest = max(lengths)
        for T in lengths:
            want, step = [], T - T // 2
            for t in range(longest // 2, N):
                before = T // 2 + (t - longest // 2) % step  # tokens that it looks back on
                with torch.no_grad():
                    logits, _ = model(ids[None, t - before:t + 1])
                want.append(F.cross_entropy(logits[0, -1], ids[t + 1]))
                assert T / 2 - 1 < before < T and t - before >= 0
            for piece in (runs.piece, lambda model: 4):
                monkeypatch.setattr(runs, "piece", piece)
                got = evaluation.strided_losses(
                    model, ids.numpy().astype(np.uint16), T, longest, cpu, context)
                assert len(got) == N - longest // 2
                close(torch.from_numpy(got), torch.stack(want), 1e-4)
                monkeypatch.undo()


def test_loss_by_position_bins_cover_the_window_once():
    losses = np.arange(4100) % 2048 * 1.0
    bins = evaluation.by_position(losses, 2048)
    assert bins[0][0] == 0 and bins[-1][1] == 2047
    assert all(after[0] == before[1] + 1 for before, after in zip(bins, bins[1:]))
    assert all(loss == pytest.approx((a + b) / 2) for a, b, loss in bins)
    assert evaluation.by_position(np.ones(10), 5) == [[0, 4, 1.0]]


# -----------------------------------------------------------------------------
# faster ways: on a CPU, on CUDA, in Triton's interpreter (to be asked for before Triton's import)

INTERPRET = kernels.INTERPRET
CUDA = kernels.triton is not None and torch.cuda.is_available() and not INTERPRET
DEVICE = "cuda" if CUDA else "cpu"
WAYS = kernels.ON_GPU if INTERPRET or CUDA else kernels.ON_CPU
with_kernels = pytest.mark.skipif(
    not (INTERPRET or CUDA), reason="needs TRITON_INTERPRET=1 and Triton, or a GPU")
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="needs Triton")


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="runs those")
@pytest.mark.parametrize("group", ["kernel", "too"])
def test_in_tritons_interpreter(group):
    """Runs every test named interpreted_kernel, or interpreted_too, in a process of its own."""
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
         "-n", "0", "--durations=5", __file__, "-k", f"interpreted_{group}"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and int(passed[1]) >= 30, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


def heads(B, H, T, d, dtype=torch.float32):
    return torch.randn(B, T, H, d).transpose(1, 2).to(dtype)  # a view, as models have it


def gradients(f, inputs, dy):
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = f(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def literal_of(module):
    return lambda *args: module.literal(*args)[0]


def same_as(truth, fast, inputs, tolerance=1e-5, wrap=lambda f: f):
    """
    Output and every gradient of fast against truth in float64, at the inputs as they are rounded;
    relative where large. wrap makes both functions ones of the inputs.
    """
    dy = torch.randn(inputs[0].shape).to(inputs[0].dtype)
    got = gradients(wrap(fast), [x.to(DEVICE) for x in inputs], dy.to(DEVICE))
    for a, b in zip(got, gradients(wrap(truth), [x.double() for x in inputs], dy.double())):
        assert a.shape == b.shape and a.isfinite().all()
        close(a.cpu(), b, tolerance * max(1, b.abs().max().item()))


def steps_of(B, H, T):
    """Steps, some of them 0, whose sums are exact: float32 and float64 ask the same question."""
    return (13 * torch.randn(B, H, T)).round() / 64


def summed(log_kernel=""):
    """cable_attention as a function of its steps instead of their sum."""
    def wrap(f):
        return lambda q, k, v, step, g=None: f(q, k, v, step.relu().cumsum(-1), g, log_kernel)
    return wrap


def separable_inputs(B, Tq, Tk, d=16, rates=(1.0, 0.1, 0.0), dtype=torch.float32):
    """q, k, v, steps, the query's weight: heads that decay fast, slowly, and not at all."""
    torch.manual_seed(0)
    H = len(rates)
    steps = steps_of(B, H, Tk) * torch.tensor(rates)[None, :, None]
    inputs = *(heads(B, H, T, d) for T in (Tq, Tk, Tk)), steps, F.softplus(torch.randn(B, H, Tq))
    return [x.to(dtype) for x in inputs]


@pytest.mark.skipif(CUDA, reason="of the CPU's way")
@pytest.mark.parametrize("Tq, Tk", [
    (1, 1), (64, 64), (256, 256), (257, 257), (1000, 1000), (1025, 1025), (1500, 1500),
    (100, 1300)])
def test_the_cpus_way_is_the_literal_form(Tq, Tk):
    """Outputs and gradients, one call, blocks, and blocks without what has decayed; FoX too."""
    inputs = separable_inputs(2, Tq, Tk)
    cable, fox = kernels.cpu.cable_attention, kernels.cpu.fox_attention
    same_as(literal_of(model_cable), cable, inputs, 1e-5, summed())
    same_as(literal_of(model_fox), fox, inputs[:4], 1e-5,
            lambda f: lambda q, k, v, step: f(q, k, v, -step.abs().cumsum(-1)))


@pytest.mark.skipif(CUDA, reason="of the CPU's way")
@pytest.mark.parametrize("T", [37, 256, 300, 512, 1024, 1025])
def test_the_cpus_way_where_steps_sum_to_thousands(T):
    """As in a trained model, where a bias is a small difference of large sums."""
    inputs = separable_inputs(1, T, T, rates=(50.0, 5.0, 0.5))
    assert inputs[3].relu().sum(-1).max() > 3 * T
    tolerance = 2e-5 if T <= 256 else 1e-4
    same_as(literal_of(model_cable), kernels.cpu.cable_attention, inputs, tolerance, summed())


def test_a_model_in_bfloat16():
    for name, (module, fields) in sorted(runs.models().items()):
        if not module.__name__.startswith("model_"):
            continue
        model = runs.make_model(dict(model=name, n_layer=1, n_embd=32, n_head=2) | fields)
        logits = model.bfloat16()(torch.randint(200, (1, 20)))
        assert (logits[0] if isinstance(logits, tuple) else logits).isfinite().all(), name


@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
@pytest.mark.parametrize("name", ["cable", "cable_nw", "fox"])
def test_a_model_in_float64(name):
    """Its sums are float32: the plain function takes both, the fused kernel would read garbage."""
    torch.manual_seed(0)
    model = runs.make_model(dict(model=name, n_layer=1, n_embd=32, n_head=2))
    idx = torch.randint(257, (1, 300))
    with torch.no_grad():
        want = model(idx)[0]
        close(model.double()(idx)[0], want, 1e-4)


@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
@pytest.mark.parametrize("Tq, Tk", [(1024, 1024), (1025, 1025), (1500, 1500), (100, 1300)])
def test_alibi_on_a_cpu_is_the_literal_form(Tq, Tk):
    """Beyond 1,024 keys, where a steep slope's far keys are dropped, it has a faster way."""
    torch.manual_seed(0)
    pe = encoding("alibi")
    inputs = [heads(2, 3, T, 16) for T in (Tq, Tk, Tk)]
    fast = kernels.faster(model_classics.alibi_attention, *inputs, pe.slopes.float())
    assert fast is kernels.cpu.alibi_attention
    if Tk <= 1024:
        assert fast(*inputs, pe.slopes.float()) is None
        return
    given = {fast: pe.slopes.float()}
    same_as(literal_of(model_classics), fast, inputs,
            wrap=lambda f: lambda q, k, v: f(q, k, v, given.get(f, pe.bias)))


@pytest.mark.parametrize("Tq, Tk", [(1, 1), (2, 2), (64, 64), (65, 65), (300, 300), (5, 300),
                                    (100, 130)])
@pytest.mark.parametrize("case", ["tra", "cope key P=3", "cope key P=64", "cope val P=5",
                                  "cope sep P=3"])
def test_what_counts_on_a_cpu_is_the_literal_form(case, Tq, Tk):
    """
    Its output; gradients of the plain function, as the literal form has none in an empty row. In
    float64, where scores hardly ever lie at a step.
    """
    module, _, args = example(case, Tq, Tk)
    if case.startswith("cope val"):
        args[-1] = args[2]
    fast = kernels.ON_CPU[runs.plain_function(module).__name__]
    inputs = [x for x in args if x is not None]
    dy = torch.randn_like(args[0])
    got, want = (gradients(f, inputs, dy) for f in (fast, runs.plain_function(module)))
    for a, b in zip(got, want):
        close(a, b, 1e-12 * max(1, b.abs().max().item()))
    close(got[0], module.literal(*args)[0], 1e-12)
    with torch.no_grad():
        assert torch.equal(fast(*inputs), got[0])


@pytest.mark.parametrize("case", ["tra", "cope key P=5", "cope sep P=5"])
def test_what_counts_on_a_cpu_keeps_to_the_past(case):
    """Whatever later tokens are, NaN included, no earlier row moves by a bit."""
    module, _, args = example(case, 130, 130)
    args = in_float32(args)
    fast = kernels.ON_CPU[runs.plain_function(module).__name__]
    before = fast(*args)
    for value in (1e4, 1e30, math.inf, math.nan):
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


def test_what_counts_on_a_cpu_keeps_nothing_when_evaluating(monkeypatch):
    """A table is a parameter, which wants a gradient: not while there are none."""
    _, _, args = example("cope key P=5")
    args[3].requires_grad_()
    cope, kept = kernels.cpu_count.CoPE, []
    forward = cope.forward

    def noted(ctx, *args):
        y = forward(ctx, *args)
        kept.append(len(ctx.to_save))
        return y
    monkeypatch.setattr(cope, "forward", staticmethod(noted))
    kernels.cpu_count.cope_attention(*args)
    with torch.no_grad():
        kernels.cpu_count.cope_attention(*args)
    assert kept == [10, 5]  # one block of rows; the inputs alone


def test_what_the_cpus_way_leaves_to_the_plain_function():
    q, k, v, S, g, _ = example("cable")[2]
    cable = kernels.cpu.cable_attention
    close(cable(q, k, v, S, g), model_cable.literal(q, k, v, S, g)[0], 1e-11)
    assert cable(q[:, :, -5:], k, v, S, g[:, :, -5:]) is None
    assert cable(*(x.bfloat16() for x in (q, k, v)), S, g) is None
    assert cable(q, k, v, S, g, "outside") is None and cable(q, k, v, S, g, "inside") is None
    with torch.autocast("cpu", torch.bfloat16):  # it would round S
        assert cable(*(x.float() for x in (q, k, v, S, g))) is None


@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
@pytest.mark.parametrize("rates, sign, weight", [
    ((0.0, 0.0), 1, 1), ((30.0, 3.0), 1, 1), ((2.0, 1.0), 1, 1), ((0.05, 0.01), -1, 1),
    ((0.05, 0.01), 1, -1)], ids=["none", "huge", "most", "backwards", "growing"])
def test_dropping_what_has_decayed_changes_nothing(rates, sign, weight, monkeypatch):
    """
    Outputs to 1e-6, gradients to 1e-5 of their largest value; sequences of different decay in one
    batch; and steps or weights below 0, which a fork may have, are no reason to drop.
    """
    inputs = separable_inputs(2, 1430, 1430, rates=rates)
    inputs[3][1] *= 0.2
    inputs[4] *= weight

    def wrap(f):
        return lambda q, k, v, step, g: f(q, k, v, sign * step.abs().cumsum(-1), g)
    dy = torch.randn(inputs[0].shape)
    dropped = gradients(wrap(kernels.cpu.cable_attention), inputs, dy)
    monkeypatch.setattr(kernels.cpu.Blocks, "first_keys", nothing_dropped)
    whole = gradients(wrap(kernels.cpu.cable_attention), inputs, dy)
    close(dropped[0], whole[0], 1e-6 * max(1, whole[0].abs().max().item()))
    for a, b in zip(dropped[1:], whole[1:]):
        close(a, b, 1e-5 * max(1, b.abs().max().item()))
    close(dropped[0], wrap(model_cable.cable_attention)(*inputs), 2e-5)


@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
def test_what_may_matter_is_not_dropped():
    """A far key that outweighs its distance; a stretch of steps below 0; weights below 0."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1500, 16)
    step, g = torch.full((1, 2, 1500), 0.5), torch.ones(1, 2, 1500)
    loud, seen = k.clone(), q.clone()
    loud[..., 0], loud[:, :, 100, 0], seen[..., 0] = 0, 800, 8
    back = step.clone()
    back[:, :, 700:720] = -30
    for args in ((seen, loud, v, step, g), (q, k, v, back, g), (q, k, v, step, -g)):
        q_, k_, v_, step_, g_ = args
        y = kernels.cpu.cable_attention(q_, k_, v_, step_.cumsum(-1), g_)
        want = model_cable.literal(*(x.double() for x in (q_, k_, v_, step_.cumsum(-1), g_)))[0]
        close(y, want, 1e-4)


def nothing_dropped(self, lse):
    return torch.zeros(lse.shape, dtype=torch.long)


@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
def test_the_cpus_way_drops_much_where_much_has_decayed():
    q, k, v, step, g = separable_inputs(1, 3000, 3000, rates=(3.0, 0.2, 0.0))
    _, _, first = torch.ops.nanope.decaying(q, k, v, step.abs().cumsum(-1), g + 0.5)
    fast, slow, still = first  # (blocks, 128), the first key of each row
    starts = torch.arange(0, 3000, 128)
    assert (fast.min(-1).values[2:] > starts[2:] - 128).all()  # within the block before
    assert 0.05 < (starts - slow.float().mean(-1)).mean() / starts.float().mean() < 0.9
    assert (still == -1).all()  # in one block


@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
@pytest.mark.parametrize("T", [37, 256, 700, 1024])
def test_no_later_token_reaches_an_earlier_row_by_a_bit(T):
    def output(q, k, v, step, g):
        return kernels.cpu.cable_attention(q, k, v, step.abs().cumsum(-1), g)
    inputs = separable_inputs(1, T, T)
    for t in (1, T // 3, T - 1):
        others = []
        for x in inputs:
            others.append(torch.cat((x[:, :, :t], x[:, :, t:] + 1e3 * torch.rand(1)), 2))
        assert torch.equal(output(*others)[:, :, :t], output(*inputs)[:, :, :t])
        assert not torch.equal(output(*others)[:, :, t:], output(*inputs)[:, :, t:])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
@pytest.mark.parametrize("name", ["cable", "fox"])
def test_greedy_text_is_the_same_without_what_has_decayed(name, monkeypatch):
    """From a long prompt, in pieces, and past where its first keys matter."""
    model = make(name, n_layer=1, n_embd=32)
    idx = torch.randint(0, 61, (1, 1500))
    texts = []
    for enabled in (True, False):
        monkeypatch.setattr(kernels, "enabled", enabled)
        with torch.no_grad():
            texts.append(torch.cat(list(sample.generate(model, idx, 40, temperature=0)), 1))
    assert torch.equal(*texts)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
@pytest.mark.parametrize("T", [300, 1100])
def test_the_cpus_way_is_an_operator_like_torchs_own(T):
    inputs = separable_inputs(1, T, T, d=8)
    inputs[3] = inputs[3].abs().cumsum(-1)
    torch.library.opcheck(torch.ops.nanope.decaying.default,
                          tuple(x.requires_grad_() for x in inputs))


@pytest.mark.skipif(INTERPRET or CUDA, reason="of the CPU's way")
def test_a_way_that_drops_too_much_is_found_out(monkeypatch, capsys):
    """The bound made wrong on purpose: it is compared at this length, with steps that decay."""
    def careless(self, lse):
        return self.starts[:, None].expand(lse.shape) - torch.zeros(lse.shape, dtype=torch.long)
    monkeypatch.setattr(kernels.cpu.Blocks, "first_keys", careless)
    monkeypatch.setattr(kernels, "compared", {})
    q, k, v, step, g = separable_inputs(1, 1300, 1300)
    args = q, k, v, step.abs().cumsum(-1), g
    close(kernels.attend(model_cable.cable_attention, *args),
          model_cable.cable_attention(*args), 0)
    assert "model_cable.cable_attention runs as it is written" in capsys.readouterr().err


@with_kernels
@pytest.mark.parametrize("Tq, Tk, d, weight, log_kernel", [
    (1, 1, 16, True, ""), (7, 7, 64, False, ""), (65, 65, 24, True, "outside"),
    (150, 150, 64, True, ""), (2, 70, 80, True, ""), (33, 130, 64, True, ""),
    (30, 110, 16, False, "outside"), (70, 70, 128, True, "outside")])
def test_interpreted_kernel_cable(Tq, Tk, d, weight, log_kernel):
    torch.manual_seed(0)
    H = 2 if Tk < 70 else 1
    inputs = [*(heads(1, H, T, d) for T in (Tq, Tk, Tk)), steps_of(1, H, Tk)]
    if weight:
        inputs.append(F.softplus(torch.randn(1, H, Tq)))
    fast = kernels.separable.cable_attention
    same_as(literal_of(model_cable), fast, inputs, wrap=summed(log_kernel))


@with_kernels
@pytest.mark.parametrize("scale", [0, 30])
def test_interpreted_kernel_no_steps_and_huge_steps(scale):
    torch.manual_seed(0)
    S = (steps_of(1, 1, 130).abs() * scale).cumsum(-1)
    inputs = [*(heads(1, 1, 130, 16) for _ in range(3)), S, F.softplus(torch.randn(1, 1, 130))]
    tolerance = 1e-5 * max(1, scale)  # the gradient of g is a sum of S_i - S_j
    same_as(literal_of(model_cable), kernels.separable.cable_attention, inputs, tolerance)


@with_kernels
@pytest.mark.parametrize("Tq, Tk", [(65, 65), (5, 129)])
def test_interpreted_kernel_fox(Tq, Tk):
    torch.manual_seed(0)

    def wrap(f):
        return lambda q, k, v, gate: f(q, k, v, F.logsigmoid(gate).cumsum(-1))
    inputs = [*(heads(2, 1, T, 32) for T in (Tq, Tk, Tk)), torch.randn(2, 1, Tk)]
    same_as(literal_of(model_fox), kernels.separable.fox_attention, inputs, wrap=wrap)


@with_kernels
@pytest.mark.parametrize("Tq, Tk", [(65, 65), (5, 129)])
def test_interpreted_kernel_alibi(Tq, Tk):
    torch.manual_seed(0)
    pe, fast = encoding("alibi"), kernels.ON_GPU["alibi_attention"]
    inputs = [heads(2, 3, T, 32) for T in (Tq, Tk, Tk)]
    given = {fast: pe.slopes.to(DEVICE)}
    same_as(literal_of(model_classics), fast, inputs,
            wrap=lambda f: lambda q, k, v: f(q, k, v, given.get(f, pe.bias)))
    arguments = [x.to(DEVICE) for x in (*inputs, pe.slopes.float())]
    assert kernels.faster(model_classics.alibi_attention, *arguments) is fast


@with_kernels
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("log_kernel", ["", "outside"])
def test_interpreted_kernel_half_precision(dtype, tolerance, log_kernel):
    torch.manual_seed(0)
    S, g = steps_of(1, 2, 150).abs().cumsum(-1), F.softplus(torch.randn(1, 2, 150))
    inputs = [*(heads(1, 2, 150, 64, dtype) for _ in range(3)), S, g]
    same_as(literal_of(model_cable), kernels.separable.cable_attention, inputs, tolerance,
                    wrap=lambda f: lambda *args: f(*args, log_kernel))


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


HALF = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@with_kernels
@pytest.mark.parametrize("B, H, Tq, Tk, d, P, gates, shift, dtype", [
    (2, 1, 1, 1, 16, 8, "key", 0, torch.float32),
    (1, 2, 65, 65, 24, 8, "key", 0, torch.float32),     # band and tail
    (1, 1, 70, 70, 16, 64, "key", -3, torch.float32),   # gates near 0: all band
    (1, 1, 70, 70, 16, 4, "key", 3, torch.float32),     # gates near 1: hardly any
    (1, 1, 40, 40, 16, 1, "key", 0, torch.float32),     # a table of one
    (1, 1, 33, 70, 80, 16, "val", 0, torch.float32),    # gates from v: gradients add up
    (1, 1, 7, 50, 128, 8, "sep", 0, torch.float32),
    (1, 1, 80, 150, 64, 8, "key", 0, torch.float16),
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
                    HALF[dtype], wrap)


@with_kernels
@pytest.mark.parametrize("B, H, Tq, Tk, d, bias, dead, stops, dtype", [
    (2, 1, 1, 1, 16, 0, False, False, torch.float32),
    (1, 2, 65, 65, 24, 5, True, False, torch.float32),      # dead rows; long memory
    (1, 1, 33, 257, 128, -3, False, True, torch.float32),   # short memory: far keys are not read
    (1, 1, 150, 150, 64, -3, False, True, torch.float16),
    (1, 1, 70, 140, 64, 2, True, False, torch.bfloat16)])
def test_interpreted_kernel_tra(B, H, Tq, Tk, d, bias, dead, stops, dtype):
    torch.manual_seed(0)
    q, k, v = (heads(B, H, T, d) for T in (Tq, Tk, Tk))
    if dead:  # every third row has no survivor
        k, q[:, :, ::3] = k.abs(), -q[:, :, ::3].abs()
    log_decay = F.logsigmoid(torch.randn(B, H, Tq) + bias)
    inputs = [*(x.to(dtype) for x in (q, k, v)), log_decay]
    # the literal form's gradient is 0 / 0 where no key survives
    same_as(tra_attention, kernels.tra.tra_attention, inputs, HALF[dtype])
    y, _, limit = torch.ops.nanope.tra(*(x.contiguous().to(DEVICE) for x in inputs))
    assert (limit.amax() > 0) == stops
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
    torch.library.opcheck(ops.separable.default, (q, k, v, S, g, False))


@with_kernels
@pytest.mark.parametrize("case, most", [
    ("cable", 2), ("fox", 2), ("tra", 2), ("cope key P=5", 2), ("cope sep P=64", 4)])
def test_interpreted_kernel_rounds_like_the_plain_function(case, most):
    """
    Output and gradients in float32: the root mean square of the error against float64 is at most
    twice that of the plain function in float32. (Four times where CoPE counts to 63: on a CPU
    torch.cumsum adds float32 numbers in float64, which a GPU does not.)
    """
    module, _, args = example(case, Tq=150, Tk=150, B=1, H=1, d=24)
    inputs = [x for x in args if torch.is_tensor(x)]
    dy = torch.randn(1, 1, 150, 24)
    plain = runs.plain_function(module)
    truth = gradients(plain, inputs, dy.double())

    def error(f):
        squares = []
        got = gradients(f, [x.float().to(DEVICE) for x in inputs], dy.to(DEVICE))
        for a, b in zip(got, truth):
            squares.append(((a.cpu() - b) ** 2).mean() / (b ** 2).mean())
        return sum(squares) ** 0.5
    assert 0 < error(WAYS[plain.__name__]) <= most * error(plain)


@with_kernels
def test_interpreted_kernel_bands_and_tails():
    """Where the carries of the layout that common.bands draws lie, and where the tails begin."""
    limit = torch.tensor([[0, 0, 0, 2, 4, 6]]).repeat_interleave(2, 1)[None]  # 6 blocks of 2 rows
    first, last, start, total = kernels.common.bands(limit, 12, 2, 2)
    assert first.tolist() == [[0, 0, 0, 1, 2, 3]]
    assert last.tolist() == [[2, 3, 4, 5, 5, 5]] and total == 1 + 2 + 3 + 3 + 3 + 3
    assert (start + first).tolist() == [[0, 1, 3, 6, 9, 12]]
    tails = kernels.cope.tails(limit, 12, dict(BM=2, BN=2))
    assert tails.tolist() == [[3, 4, 5, 6, 6, 6]]  # 6: no block has a tail there
    ragged = kernels.cope.tails(limit[:, :, :5], 12, dict(BM=4, BN=4))
    assert ragged.tolist() == [[2, 2, 2]]


@with_kernels
def test_interpreted_kernel_operators_want_memory_without_gaps():
    x = torch.randn(1, 1, 16, 17, device=DEVICE)[..., :16]
    y, row = x.contiguous(), torch.zeros(1, 1, 16, device=DEVICE)
    for bad in ((x, y, y), (y, x, y), (y, y, x)):
        with pytest.raises(AssertionError, match="contiguous"):
            torch.ops.nanope.tra(*bad, row)
        with pytest.raises(AssertionError, match="contiguous"):
            torch.ops.nanope.cope(*bad, y, None)
    with pytest.raises(AssertionError, match="contiguous"):
        torch.ops.nanope.separable(y, y, y, row.repeat(1, 1, 2)[..., ::2], row, False)
    with pytest.raises(AssertionError, match="by 1"):
        torch.ops.nanope.separable(y.transpose(2, 3), y, y, row, row, False)


@needs_triton
def test_no_cuda_graph_of_an_operator_that_waits():
    for op in (torch.ops.nanope.cope_backward, torch.ops.nanope.tra_backward):
        assert torch.Tag.cudagraph_unsafe in op.default.tags


@needs_triton
def test_no_kernel_on_rocm(monkeypatch):
    """Its devices call themselves cuda, with a capability of 9."""
    cuda = torch.device("cuda", 0)
    q = types.SimpleNamespace(dtype=torch.float32, device=cuda, size=lambda _: 64)
    monkeypatch.setattr(kernels, "capability", lambda index: 9)
    assert kernels.why_no_triton(q) == ""
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert kernels.why_no_triton(q) == "ROCm"


def with_gradients(model, idx):
    """Logits of idx in three pieces over a cache, the loss, and every parameter's gradient."""
    cache = runs.new_cache(model, idx.size(1))
    with torch.no_grad():
        pieces = [model(part, cache=cache)[0] for part in idx.split([17, 12, 1], 1)]
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    return [torch.cat(pieces, 1), loss.detach(),
            *torch.autograd.grad(loss, list(model.parameters()))]


SMALL = dict(n_layer=1, n_head=1, n_embd=16)  # the interpreter is slow
FASTER = ["cable", "cable_nw", "k_cable", "fox", "cope_val", "cope_sep", "tra"]


@pytest.mark.parametrize("name", FASTER)
def test_models_take_the_faster_way_interpreted_too(name, monkeypatch, capsys):
    """It is called, and changes neither logits nor gradients; nothing is said."""
    model, idx = make(name, **SMALL).to(DEVICE), torch.randint(0, 61, (1, 30)).to(DEVICE)
    plain, called = runs.plain_function(runs.attention_module(model)), []
    fast = WAYS.get(plain.__name__)

    def counted(*args):
        called.append(args)
        return fast(*args)
    if fast:
        monkeypatch.setitem(WAYS, plain.__name__, counted)
    monkeypatch.setattr(kernels, "enabled", True)
    got = with_gradients(model, idx)
    called.clear()
    model(idx)
    assert len(called) == bool(fast)
    monkeypatch.setattr(kernels, "enabled", False)
    for a, b in zip(got, with_gradients(model, idx)):
        close(a, b, 1e-4)
    model(idx)
    assert len(called) == bool(fast) and capsys.readouterr().err == ""


@with_kernels
def test_interpreted_kernel_why_not(monkeypatch):
    q = torch.zeros(1, 1, 4, 64, device=DEVICE)
    rest = torch.zeros(1, 1, 4, device=DEVICE)
    assert kernels.why_no_triton(q) == ""
    assert kernels.faster(tra_attention, q, q, q, rest) is kernels.tra.tra_attention
    last = q[:, :, :1], q, q, rest[:, :, :1]
    assert kernels.faster(tra_attention, *last) is None  # one query of cached decoding
    assert kernels.faster(attention, q, q, q) is None    # nothing is known of it
    assert kernels.why_no_triton(q.double()) == "float64"
    head_12 = "head size 12 (the kernels take multiples of 8 from 16 to 128)"
    assert kernels.why_no_triton(q[..., :12]) == head_12
    assert kernels.why_no_triton(torch.zeros(1, 1, 4, 64, device="meta")) == "no CUDA"
    args = argparse.Namespace(device=DEVICE, dtype="float32", kernel="auto")
    assert "attention by Triton kernel" in runs.setup(args)[2]
    monkeypatch.setattr(kernels, "enabled", False)  # and afterwards as it was
    args.kernel = "off"
    assert "attention as the model file has it" in runs.setup(args)[2]


def python(code, folder):
    """What code prints, run in a process of its own in a folder, with nothing else to import."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_model_file_runs_alone(tmp_path):
    for path in MODEL_FILES:
        shutil.copy(path, tmp_path)
    code = """if True:
        import importlib, pathlib, torch
        for path in sorted(pathlib.Path(".").glob("model_*.py")):
            m = importlib.import_module(path.stem)
            y = m.GPT(m.GPTConfig(n_layer=1))(torch.zeros(1, 9, dtype=torch.long))[0]
            print(path.stem, *y.shape)"""
    wanted = [f"{path.stem} 1 9 {8195 if path.stem == 'model_bert' else 257}"
              for path in MODEL_FILES]
    assert python(code, tmp_path).splitlines() == wanted


@pytest.mark.parametrize("missing, way, words", [
    ("triton", "cable_attention", "attention in PyTorch"),
    ("kernels", "None", "attention as the model file has it")])
def test_without_triton_and_without_kernels(missing, way, words):
    """The plain functions run all the same, and a CPU keeps its way without Triton."""
    code = f"""if True:
        import argparse, sys
        sys.modules["{missing}"] = None
        import runs, torch
        q, S = torch.randn(1, 4, 9, 16), torch.rand(1, 4, 9).cumsum(-1)
        for name in ("cable", "tra", "cope"):
            m = runs.make_model(dict(model=name, n_layer=1))
            assert m(torch.zeros(1, 9, dtype=torch.long))[0].isfinite().all()
        import model_cable
        fast = runs.kernels and runs.kernels.faster(model_cable.cable_attention, q, q, q, S)
        print(fast.__name__ if fast else None)
        print(runs.kernels.why_no_triton(q) if runs.kernels else None)
        print(runs.setup(argparse.Namespace(device="cpu", dtype="auto", kernel="auto"))[2])"""
    lines = python(code, ROOT).splitlines()
    assert lines[:2] == [way, "None" if way == "None" else "no Triton"]
    assert lines[2].endswith(words)


def has_way(case):
    return f"{case.split()[0]}_attention" in WAYS


FORKED = ["cable", "fox", "tra", "cope key P=5"]
KNOWN = [case for case in FORKED if has_way(case)]


@pytest.mark.slow
@pytest.mark.parametrize("case", FORKED if INTERPRET or CUDA else FORKED[:3])
def test_attend_is_compiled_as_one_graph_interpreted_too(case, monkeypatch):
    """
    torch.compile takes in the choice of the way, and gives the same numbers with gradients. (The
    plain CoPE is more graphs than one: it stops counting where the gates are full.)
    """
    monkeypatch.setattr(kernels, "compared", {})
    module, _, (q, k, v, *more) = example(case, Tq=40, Tk=40, B=1, H=1, d=16)
    plain = runs.plain_function(module)
    more = [x for x in more if torch.is_tensor(x)]
    inputs = [x.float().to(DEVICE) for x in (q, k, v, *more)]

    def attend(*args):
        return kernels.attend(plain, *args)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    wanted = gradients(attend, inputs, inputs[0])
    for a, b in zip(wanted, gradients(compiled, inputs, inputs[0])):
        close(a, b, 1e-6)
    taken = {fast.__name__ for _, fast, *_ in kernels.compared}
    way = WAYS.get(plain.__name__)
    assert taken == ({way.__name__} if way else set())


COMPILED = {(torch.bfloat16, 80): 200, (torch.bfloat16, 90): 60,
            (torch.float32, 80): 40, (torch.float32, 90): 400}  # bytes that backward may spill


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="the interpreter does not compile")
@pytest.mark.parametrize("d", [16, 64, 128])
@pytest.mark.parametrize("dtype, target", COMPILED)
def test_what_the_machine_code_says(dtype, target, d):
    """
    No forward kernel spills, and backward little; nothing that uses wgmma is serialized (C7515);
    every pipelined loop over tiles loads ahead. (cope_rows_band's is none: it has a loop of unknown
    length inside.)
    """
    from kernels import report
    shared = 99 if target == 80 else 227  # KB; 99 is what sm_86 and sm_89 have
    jobs = list(report.jobs(d, dtype))
    assert len(jobs) >= 5
    for name, fn, constants in jobs:
        found = report.of(fn, constants, target, dtype)
        most = 0 if "forward" in name else COMPILED[dtype, target]
        assert found["registers"] > 0 and not found["serialized"], (name, found)
        assert found["spill_stores"] <= most, (name, found)
        assert found["shared_bytes"] <= shared * 1024, (name, found)
        pipelined = constants["num_stages"] > 1 and fn.__name__ != "cope_rows_band"
        assert found["async_loads"] > 0 or not pipelined, (name, found)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="the interpreter does not compile")
def test_a_tile_of_tra_is_short():
    """TRA's counting is a matrix product: with a scan these were 1163, 1131 and 1297."""
    from kernels import report
    most, seen = dict(tra_forward=960, tra_rows=840, tra_columns=830), set()
    for name, fn, constants in report.jobs(64):
        if name in most:
            seen.add(name)
            assert 400 < report.of(fn, constants, 90)["instructions"] <= 1.1 * most[name]
    assert seen == most.keys()


# -----------------------------------------------------------------------------
# safe to fork: a copy that is edited runs as it is written

@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the repository's modules, in which models are looked up."""
    for pattern in ("*.py", "data/*.py", "kernels/*.py", "experiments/*.py"):
        for path in ROOT.glob(pattern):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
    before = set(sys.modules)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    runs.models.cache_clear()
    yield tmp_path
    runs.models.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("model_"):
            del sys.modules[name]


@pytest.fixture
def fork(copy):
    """fork(name, *edits) -> model_NAME.py edited as model_mine.py, which answers to `mine`."""
    def edit(name, *edits):
        write_fork(copy, name, *edits)
        return runs.models()["mine"][0]
    return edit


def write_fork(folder, name="cable", *edits):
    source = (ROOT / f"model_{name}.py").read_text()
    variants = re.search(r"VARIANTS = .*?\n\n", source, re.S)[0]
    for old, new in [(variants, "VARIANTS = dict(mine=dict())\n\n"), *edits]:
        assert old in source, f"model_{name}.py has no {old!r} to edit"
        source = source.replace(old, new)
    (folder / "model_mine.py").write_text(source)


SEEN = ".tril(Tk - Tq)", ".tril(Tk - Tq).triu(Tk - Tq - 8)"  # a window, in the literal form
MASK = "masked_fill(j > i,", "masked_fill((j > i) | (j < i - 8),"
EDITS = dict(
    window=dict(fox=[SEEN, MASK], cable=[SEEN, MASK],
                cope=[SEEN, ("seen = (j <= i)", "seen = ((j <= i) & (j >= i - 8))")],
                tra=[SEEN, ("(j <= i)).to", "(j <= i) & (j >= i - 8)).to")]),
    bias=dict(fox=[("bias = -distance", "bias = -2 * distance"),
                   ("bias = F_[", "bias = F_[:, :, start:end, None] - F_[:, :, None, :end] + F_[")],
              cable=[("bias = -g", "bias = -2 * g")],
              cope=[("step = gates.sigmoid()", "step = (2 * gates).sigmoid()"),
                    ("(gates.sigmoid() * seen", "((2 * gates).sigmoid() * seen")],
              tra=[("bias = (distance * ", "bias = (2 * distance * "),
                   ("addcmul(s, C,", "addcmul(s, 2 * C,")]))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["fox", "cable", "tra", "cope"])
def test_an_edited_copy_runs_as_written_interpreted_too(name, edit, fork, monkeypatch, capsys):
    """Logits, the cache and training are the edited file's own; one line says what does not run."""
    module = fork(name, *EDITS[edit][name])
    mine, original = (make(n, **SMALL).to(DEVICE) for n in ("mine", name))
    assert type(mine).__module__ == "model_mine"
    idx = torch.randint(0, 61, (1, 30)).to(DEVICE)
    got = with_gradients(mine, idx)
    said = capsys.readouterr().err
    monkeypatch.setattr(kernels, "enabled", False)
    assert (got[0] - original(idx)[0]).abs().max() > 1e-2
    for a, b in zip(got, with_gradients(mine, idx)):
        assert torch.equal(a, b)
    with runs.spy(mine) as calls:
        mine(idx)
    for args in calls:
        close(runs.plain_function(module)(*args), module.literal(*args)[0], 1e-4)
    refused = ""
    if f"{name}_attention" in WAYS:
        refused = f"model_mine.{name}_attention runs as it is written: its faster way in kernels/ "
    assert said.startswith(refused) and said.count("\n") == bool(refused), said
    assert not refused or re.search(r"differs by \S+ of the largest value\n$", said), said


@pytest.mark.parametrize("T", [30, 300])
@pytest.mark.parametrize("name", ["fox", "cable", "tra", "cope"])
def test_a_copy_as_it_was_keeps_its_faster_way_interpreted_too(name, T, fork, capsys):
    module = fork(name)
    model = make("mine", **SMALL).to(DEVICE)
    with runs.spy(model) as calls:
        model(torch.randint(0, 61, (1, T)).to(DEVICE))
    plain = runs.plain_function(module)
    assert kernels.faster(plain, *calls[0]) is WAYS.get(plain.__name__)
    assert capsys.readouterr().err == ""


def arguments(case, T):
    """The plain function of a case, and arguments of T tokens in float32, for a head of 16."""
    module, _, args = example(case, T, T, B=1, H=1, d=16)
    args = [x.float().to(DEVICE) if torch.is_tensor(x) else x for x in args]
    return runs.plain_function(module), args


def test_an_edit_that_shows_late_is_caught_late_interpreted_too(fork, capsys):
    """A window of 300 tokens is full attention until a longer call comes."""
    module = fork("fox", (MASK[0], "masked_fill((j > i) | (j < i - 300),"))
    _, short = arguments("fox", 200)
    _, long = arguments("fox", 310)
    assert kernels.faster(module.fox_attention, *short) is WAYS["fox_attention"]
    assert capsys.readouterr().err == ""
    for _ in range(2):
        got = kernels.attend(module.fox_attention, *long)
        assert torch.equal(got, module.fox_attention(*long))
    kernels.attend(module.fox_attention, *(x.double() for x in long))  # not said again
    assert kernels.faster(module.fox_attention, *short) is WAYS["fox_attention"]
    assert capsys.readouterr().err.count("\n") == 1


def test_an_edit_of_large_distances_is_caught_interpreted_too(fork, capsys):
    """Steps have no bound: a road of 300 tokens can be 3,000 long."""
    far = "S[:, :, start:end, None] - S[:, :, None, :end]"
    module = fork("cable", (far, f"({far}).clamp(max=200)"))
    _, args = arguments("cable", 200)
    assert kernels.faster(module.cable_attention, *args) is None
    assert "model_mine.cable_attention runs as it is written" in capsys.readouterr().err


@pytest.mark.parametrize("name, was, now", [
    ("cable", "bias = -g[:, :, here, None] *", "bias = -g[:, :, here, None].clamp(max=1) *"),
    ("tra", "torch.addcmul(s, C,", "torch.addcmul(s.clamp(max=8), C,")])
def test_an_edit_of_large_values_is_caught_interpreted_too(name, was, now, fork, capsys):
    """Trained queries and weights are larger than those of a unit normal."""
    module = fork(name, (was, now))
    plain = runs.plain_function(module)
    assert kernels.faster(plain, *arguments(name, 30)[1]) is None
    refused = f"model_mine.{name}_attention runs as it is written"
    assert capsys.readouterr().err.startswith(refused if f"{name}_attention" in WAYS else "")


@pytest.mark.slow
def test_a_late_edit_is_caught_when_compiled_interpreted_too(fork):
    """torch.compile is the default on a GPU: a graph for longer texts compares at their length."""
    module = fork("fox", (MASK[0], "masked_fill((j > i) | (j < i - 300),"))
    compiled = torch.compile(lambda *a: kernels.attend(module.fox_attention, *a),
                             backend="aot_eager", fullgraph=True)
    for T in (40, 50, 310):  # the second length makes the graph's sizes symbols
        _, (q, k, v, F_) = arguments("fox", T)
        args = q, k, v, F_ / 1000  # what is far still matters
        close(compiled(*args), module.fox_attention(*args), 1e-5)


def test_another_signature_runs_as_written_interpreted_too(fork, capsys):
    edits = [("def fox_attention(q, k, v, F_):", "def fox_attention(q, k, v, F_, window=8):"),
             (MASK[0], "masked_fill((j > i) | (j < i - window),"),
             ("attend(fox_attention, q, k, v, F_)", "attend(fox_attention, q, k, v, F_, 5)")]
    fork("fox", *edits)
    model, idx = make("mine", **SMALL).to(DEVICE), torch.randint(0, 61, (1, 30)).to(DEVICE)
    got = with_gradients(model, idx)
    said = capsys.readouterr().err
    assert "its faster way in kernels/ could not be compared: TypeError" in said
    assert said.count("\n") == 1
    kernels.enabled = False
    try:
        for a, b in zip(got, with_gradients(model, idx)):
            assert torch.equal(a, b)
    finally:
        kernels.enabled = True


def test_a_copy_that_is_another_function_runs_as_written(fork, capsys):
    """A name that kernels/ does not know, and a file without a literal form."""
    module = fork("cable", ("cable_attention", "my_attention"))
    model = make("mine", n_embd=64)
    assert runs.plain_function(module) is module.my_attention
    with runs.spy(model) as calls:
        model(torch.randint(0, 61, (1, 9)))
    assert len(calls) == 2 and kernels.faster(module.my_attention, *calls[0]) is None
    del module.literal
    assert runs.plain_function(module) is module.my_attention
    assert capsys.readouterr().err == ""


def test_an_attention_from_elsewhere_is_seen_by_its_name_in_the_file(fork):
    fork("cable", ("attend(cable_attention", "attend(renamed"),
         ("class Cache:", "renamed = cable_attention\ndel cable_attention\n\n\nclass Cache:"))
    with runs.spy(make("mine")) as calls:
        make("mine")(torch.randint(0, 61, (1, 9)))
    assert len(calls) == 2


WRONG = dict(
    forward=lambda right, v: 1.001 * right,
    backward=lambda right, v: right + 0.01 * (v - v.detach()),
    late=lambda right, v: torch.cat((right[:, :, :90], 1.01 * right[:, :, 90:]), 2),
    late_backward=lambda right, v: right + (0.01 * (v - v.detach()) if v.size(2) > 256 else 0))


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("case", KNOWN)
def test_a_wrong_kernel_is_caught_interpreted_too(case, kind, monkeypatch, capsys):
    """On CUDA, in the interpreter and on the CPU: the plain function runs, and one line says so."""
    T = dict(late=100, late_backward=260).get(kind, 40)
    plain, args = arguments(case, T)
    right = WAYS[plain.__name__]

    def wrong(q, k, v, *more):
        return WRONG[kind](right(q, k, v, *more), v)
    monkeypatch.setattr(kernels, "compared", {})
    monkeypatch.setitem(WAYS, plain.__name__, wrong)
    for _ in range(2):
        assert torch.equal(kernels.attend(plain, *args), plain(*args))
    said = capsys.readouterr().err
    assert said.startswith(f"{plain.__module__}.{plain.__name__} runs as it is written: ")
    assert said.count("\n") == 1 and " differs by " in said
    if "late" in kind:
        assert kernels.faster(plain, *arguments(case, 40)[1]) is wrong


@pytest.fixture
def other_defaults():
    """Settings that a user may have made, put back afterwards."""
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)


def settings():
    """What the comparison must leave as it was, as text."""
    return [str(torch.get_rng_state().tolist()), str(np.random.get_state()), random.getstate(),
            torch.get_float32_matmul_precision(), torch.get_default_dtype(),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(DEVICE)]


@pytest.mark.parametrize("case", KNOWN[:2])
def test_the_comparison_leaves_no_trace_interpreted_too(case, monkeypatch, other_defaults, capsys):
    """And finds the same, whatever the settings and the mode that it runs in."""
    plain, args = arguments(case, 40)
    leaves = [x.requires_grad_() for x in args if torch.is_tensor(x)]
    right, checked = WAYS[plain.__name__], []

    def noted(*args):
        checked.append(args[0].dtype)
        return right(*args)
    monkeypatch.setitem(WAYS, plain.__name__, noted)
    modes = [contextlib.nullcontext(), torch.inference_mode(), torch.no_grad(),
             torch.autocast(DEVICE, torch.bfloat16)]
    for mode in modes[2:] if INTERPRET else modes:
        monkeypatch.setattr(kernels, "compared", {})
        with mode:
            before = settings()
            assert kernels.faster(plain, *args) is noted
            assert settings() == before
    assert set(checked) == {torch.float32}
    assert all(x.grad is None for x in leaves) and capsys.readouterr().err == ""


def test_taken_names_name_both_files_and_only_when_asked(copy, capsys):
    shutil.copy(ROOT / "model_cable.py", copy / "model_mine.py")
    assert runs.models()["rope"][0] is model_classics and "cable" not in runs.models()
    assert capsys.readouterr().err == ""
    for name in ("cable", "k_cable"):
        with pytest.raises(SystemExit, match="model_cable.py and model_mine.py both answer to"):
            runs.models()[name]
    answers = "model_mine.py does not answer to 'mine' but to cable, cable_nw"
    with pytest.raises(SystemExit, match=answers):
        runs.models()["mine"]


@pytest.mark.parametrize("broken, reason", [
    ("def literal(:", "SyntaxError: invalid syntax"), ("x = 1", "GPTConfig"),
    ("raise KeyError('step')", "KeyError: 'step'"),
    ("raise RuntimeError('not yet\\nmore')", "not yet"), ("raise SystemExit(3)", "SystemExit: 3"),
    ("class GPTConfig: pass", "no attribute 'GPT'"),
    ("import nonesuch", "ModuleNotFoundError: No module named 'nonesuch'")])
def test_a_file_that_does_not_run_stops_only_those_who_ask_for_it(copy, capsys, broken, reason):
    (copy / "model_mine.py").write_text(f"{broken}\n")
    for name in ("rope", "cable", "tra"):
        assert runs.make_model(dict(model=name, n_layer=1))
    said = capsys.readouterr().err
    assert said.startswith("warning: model_mine.py is left out: ") and reason in said
    assert said.count("\n") == 1
    with pytest.raises(SystemExit, match=r"^error: model_mine.py cannot be used: [^\n]*$"):
        runs.models()["mine"]


def test_a_file_without_variants_answers_to_its_own_name(copy):
    source = (ROOT / "model_fox.py").read_text().replace("VARIANTS = dict(fox=dict())\n", "")
    (copy / "model_mine.py").write_text(source)
    module, fields = runs.models()["mine"]
    assert module.__name__ == "model_mine" and fields == {}
    assert runs.models()["fox"][0] is model_fox
    with pytest.raises(SystemExit, match="error: unknown model 'mien': did you mean mine"):
        runs.models()["mien"]


def test_a_copy_of_the_encoder(copy):
    source = (ROOT / "model_bert.py").read_text()
    changed = re.sub(r"^VARIANTS = .*$", "VARIANTS = dict(mine=dict())", source, flags=re.M)
    (copy / "model_mine.py").write_text(changed)
    assert runs.make_model(dict(model="mine", n_layer=1)).is_encoder


def test_variants_of_fields_that_are_not_there(copy, capsys):
    source = (ROOT / "model_fox.py").read_text().replace("fox=dict()", "mine=dict(windw=8)")
    (copy / "model_mine.py").write_text(source)
    with pytest.raises(SystemExit, match="unexpected keyword argument 'windw'"):
        runs.models()["mine"]
    assert runs.models()["fox"][0] is model_fox


# -----------------------------------------------------------------------------
# the diff is the lesson: what the model files share is the same, letter for letter

# The lines of model_baseline.py that a file may change, and words that mark the lines it adds.
ATTEND = "        y = attention(q, k, v)"
FORWARD = "    def forward(self, x, cache):"
LOOP, EMBED = "            x = block(x, cache)", "        x = self.drop(self.wte(idx))"
NORM = '    norm: str = "pre"       # pre: x + f(N(x)), post: N(x) + f(N(x)); f: attention, MLP'
QK_NORM = "    qk_norm: bool = False   # RMS-normalise q and k per head, without a learned scale"
LAYERS = "        for block in self.h:"
CHECK = '        if config.norm not in ("pre", "post"):'
REFUSE = '            raise ValueError(f"norm={config.norm!r} is not one of pre, post")'
LN_F = "        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-6)"
OWN = dict(
    classics=([FORWARD, ATTEND, EMBED, LAYERS, LOOP],
              r"\bpe\b|\bpos\b|\bstart\b|capped|n_label|ENCODINGS|for layer, block"),
    cable=([ATTEND], r"w_c|w_s|step|weight: bool|log_kernel|\bS\b|if cache.t:"),
    cope=([FORWARD, ATTEND, LAYERS, LOOP],
          r"gates|gate_keys|w_g|pos_emb|\bP\b|share|tables|\bd = |for layer, block"),
    tra=([NORM, QK_NORM, ATTEND], r"w_f|log_decay|norm: str = \"post\"|qk_norm: bool = True"),
    fox=([ATTEND], r"w_f|F_|if cache.t:"),
    diff=([FORWARD, ATTEND, LOOP],
          r"l_q1|l_init|nn.Parameter|ln_head|rotate|lam\b|\bpos\b|start|\bd = "
          r"|n_head % 4|head size|divis"),
    postnorm=([NORM, FORWARD, CHECK, REFUSE, LN_F, EMBED, LOOP],
              r"norm|SCHEMES|rotate|\bpos\b|\bstart\b|final|first|ln_0|rope|\bpe\b|raise"))
SHARED = ("GPTConfig", "Cache", "CausalSelfAttention", "MLP", "Block", "GPT")
MOST_CHANGED = dict(fox=95, tra=115, diff=110, cable=125, postnorm=120, cope=230)


def source_of(path, names):
    """The lines of a file's top-level classes and functions of these names, as they stand."""
    text = path.read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if getattr(node, "name", None) in names:
            found[node.name] = lines[node.lineno - 1:node.end_lineno]
    return found


def code_of(lines, name):
    """Comments may differ, but not those of the configuration, which are a user's help."""
    return lines if name == "GPTConfig" else [line.split("  #")[0].rstrip() for line in lines]


def method_of(path):
    return path.stem.removeprefix("model_")


@pytest.mark.parametrize("path", [p for p in MODEL_FILES if method_of(p) in OWN], ids=method_of)
def test_the_shared_parts_of_the_model_files_are_the_same(path):
    """Copies are deliberate; copies that drift would be a hidden variable in every table."""
    ours, theirs = source_of(ROOT / "model_baseline.py", SHARED), source_of(path, SHARED)
    may_change, own_words = OWN[method_of(path)]
    removed = []
    for name in SHARED:
        if (method_of(path), name) == ("postnorm", "Block"):
            continue  # its subject; held to the others' by its outputs
        changes = difflib.ndiff(code_of(ours[name], name), code_of(theirs[name], name))
        changes = [line for line in changes if line[0] in "+-"]
        removed += [line[2:] for line in changes if line[0] == "-"]
        for line in changes:
            if line[0] == "+":
                assert re.search(own_words, line), f"{path.name}: {name} adds {line[2:].strip()}"
    assert removed == may_change, f"{path.name} changes other lines of model_baseline.py"


def test_what_several_model_files_have_is_the_same():
    """Their imports, the optional kernels, and rotate."""
    names = ("rotate", "Cache", "MLP")
    for name in names:
        found = [source_of(path, names).get(name) for path in MODEL_FILES]
        found = ["\n".join(lines) for lines in found if lines]
        assert len(found) >= 2 and len(set(found)) == 1, f"{name} differs between model files"
    head = re.compile(r'"""\n(import math.*?)\n@dataclass\n', re.S)
    optional = re.compile(r"try:\n    from kernels.*?\*args\)\n\n", re.S)
    heads_of, attends = set(), set()
    for path in MODEL_FILES:
        text = re.sub(r"ROWS = (64|128) .*", "ROWS", head.search(path.read_text())[1])
        attends |= set(optional.findall(text))
        heads_of.add(optional.sub("", text))
    assert len(heads_of) == 1 and len(attends) == 1


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("name, most", MOST_CHANGED.items())
def test_the_diff_is_the_lesson(name, most):
    counted = subprocess.run(
        ["git", "diff", "--no-index", "--numstat", "model_baseline.py", f"model_{name}.py"],
        cwd=ROOT, capture_output=True, text=True).stdout.split()
    added, removed = int(counted[0]), int(counted[1])
    assert added + removed <= most, f"model_{name}.py: {added} lines added, {removed} removed"


# -----------------------------------------------------------------------------
# the house

SCRIPTS = [path for path in sorted(ROOT.glob("*.py"))
           if not path.stem.startswith(("model_", "test_"))]


@functools.cache
def sources():
    """Every Python file that git knows, or, where there is no git, every one in its place."""
    try:
        listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True,
                                text=True).stdout.split()
    except OSError:
        listed = []
    folders = (".", "data", "kernels", "experiments")
    found = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    return [ROOT / name for name in listed] or found


def imports(path):
    """The names of all modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "."} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def test_lines_end_by_column_100():
    long = []
    for path in sources():
        for n, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > 100:
                long.append(f"{path.relative_to(ROOT)}:{n}: {len(line)}")
    assert not long, "\n".join(long)


def test_functions_fit_on_a_screen():
    """60 lines, the loop of train.py 120."""
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                most = 120 if (path.name, node.name) == ("train.py", "main") else 60
                if lines > most:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda p: p.stem)
def test_model_files_stand_alone_and_stay_short(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots <= {"math", "dataclasses", "torch", "kernels"}
    most = 370 if path.stem == "model_classics" else 250  # nine methods in one
    assert len(path.read_text().splitlines()) <= most


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_import_neither_each_other_nor_a_model_or_task(path):
    scripts = {p.stem for p in SCRIPTS} - {"runs"}
    models_and_tasks = {p.stem for p in MODEL_FILES}
    models_and_tasks |= {f"data.{p.stem}" for p in ROOT.glob("data/*.py")} - {"data.text"}
    assert not imports(path) & (scripts | models_and_tasks)


# Names of methods and tasks that are also words of English: they count where they stand alone,
# except for the one that is a key of many rows. A default may be named once in a script.
ENGLISH = {"learned", "relative", "fire", "diff", "counting", "label", "recall"}
DEFAULTS = {"cable", "stdlib", "nope"}
HELP = {"help", "description", "usage", "epilog"}


def named(text):
    """The methods and tasks that a string names; the usage example is the default's."""
    text = re.sub(r"--model cable\b|--data stdlib\b|\bcable-stdlib\b", "", text)
    names = set(NAMES) | set(data.known())
    if text in names - {"label"}:
        return {text}
    return (names - ENGLISH) & set(re.findall(r"[a-z0-9_]+", text.lower()))


def strings_to_check(tree):
    """String constants that are neither docstrings nor help."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # docstrings
            skipped.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in HELP:
            skipped |= set(ast.walk(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_no_script_names_a_method_or_a_task(path):
    """A new method or task is a new file, and no script changes."""
    tree, found, defaults = ast.parse(path.read_text()), [], set(DEFAULTS)
    for node in strings_to_check(tree):
        if node.value in defaults:
            defaults.remove(node.value)
        elif named(node.value):
            found.append(f"{path.name}:{node.lineno}: {', '.join(sorted(named(node.value)))}")
    for node in ast.walk(tree):
        name = getattr(node, "id", getattr(node, "name", getattr(node, "attr", None)))
        words = set(str(name).split("_")) | {name}
        if words & (set(NAMES) | set(data.known())) - ENGLISH:
            found.append(f"{path.name}:{node.lineno}: the name {name}")
    assert not found, "\n".join(found)


def snippets():
    """The Python blocks of GUIDE.md with the lines they start at."""
    text = (ROOT / "GUIDE.md").read_text()
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M):
        yield text.count("\n", 0, block.start(1)) + 1, block[1]


def test_the_guides_snippets_run(monkeypatch):
    """In order, in one namespace; a mistake is reported with its line in GUIDE.md."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    namespace, n = {}, 0
    for line, code in snippets():
        exec(compile("\n" * (line - 1) + code, "GUIDE.md", "exec"), namespace)
        n += 1
    assert n >= 5


def test_the_guides_own_row_is_a_model(copy):
    """Its diff, applied to a copy: the steps are sigmoids, and literal and plain function agree."""
    source = (ROOT / "model_cable.py").read_text()
    block, = re.findall(r"^```diff\n(.*?)^```", (ROOT / "GUIDE.md").read_text(), re.S | re.M)
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", block, re.M):
        old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in (old, new))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (copy / "model_mine.py").write_text(source)
    model = runs.make_model(dict(model="mine", n_layer=1, n_head=2, n_embd=16, vocab_size=9))
    step = model.h[0].attn.step(torch.tensor([-9.0, 0, 9]))
    close(step, torch.tensor([-9.0, 0, 9]).sigmoid(), 1e-6)
    loss = model(torch.arange(9)[None], torch.arange(9)[None])[1]
    assert loss.isfinite()


# -----------------------------------------------------------------------------
# data: text

def rng(seed=0):
    return np.random.default_rng(seed)


def test_tokenizer_round_trip_on_arbitrary_bytes():
    encoding = data.text.get_encoding("bytes")
    noise = rng().integers(0, 256, 5000).astype(np.uint8).tobytes()
    for text in (bytes(range(256)), noise, b"", "δέλτα <|endoftext|>".encode()):
        ids = data.text.encode(encoding, [text])[0]
        assert ids[0] == encoding.eot_token == 256
        assert encoding.decode_bytes(ids[1:].tolist()) == text
    ours = data.text.encode(encoding, ["δέλτα".encode()])[0]
    assert encoding.encode("δέλτα") == ours[1:].tolist()


def test_other_tokenizers_need_utf8_and_round_trip():
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    encoding = tiktoken.Encoding("merges", pat_str=r"\w+|\W", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 258})
    ids = data.text.encode(encoding, [b"the theme", "δ".encode()])
    assert ids[0].tolist()[:3] == [258, 257, 32]
    assert encoding.decode_bytes(ids[0][1:].tolist()) == b"the theme"
    with pytest.raises(ValueError, match="not UTF-8.*--tokenizer bytes"):
        data.text.encode(encoding, [b"\xff\xfe"])


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    return tmp_path


def documents(folder, texts):
    """A folder with a file for every text."""
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:02}.txt").write_text(text)
    return str(folder)


def test_text_is_split_by_document(prepared):
    docs = documents(prepared / "docs", [f"<{i:02}>" * 50 for i in range(40)])
    (prepared / "docs" / ".hidden").write_text("no")
    (prepared / "docs" / "picture.png").write_bytes(b"\x89PNG\0\0")
    task = data.text.Task(data=docs, block_size=8)
    found = {}
    for s in task.splits:
        ids = task.tokens(s).tolist()
        assert ids[0] == 256 and len(ids) == 201 * ids.count(256)  # whole documents
        found[s] = {bytes(ids[a + 1:a + 5]) for a, t in enumerate(ids) if t == 256}
    assert sum(map(len, found.values())) == 40 and len(set.union(*found.values())) == 40
    assert len(found["test"]) == len(found["val"]) == 2
    assert task.meta["tokens"] == {s: len(task.tokens(s)) for s in task.splits}
    assert task.source == task.meta["sha256"]
    (prepared / "docs" / "00.txt").write_text("<new>" * 50)  # a changed document is seen
    assert data.text.Task(data=docs, block_size=8).source != task.source


def test_a_few_long_documents_are_still_whole_and_max_tokens_is_a_limit(prepared):
    docs = documents(prepared / "six", [f"<{i}>" * 200 for i in range(6)])
    task = data.text.Task(data=docs, block_size=8)
    assert task.meta["tokens"] == dict(train=2404, val=601, test=601)
    some = data.text.Task(data=docs, block_size=8, max_tokens=1000)
    assert some.meta["tokens"] == dict(train=900, val=50, test=50)
    assert (some.tokens("val") == task.tokens("val")[:50]).all()
    with pytest.raises(ValueError, match="--max_tokens must be 0"):
        data.text.prepare(docs, "bytes", -5)


def test_a_folder_that_holds_our_own_files_and_a_name_that_is_empty(prepared, monkeypatch):
    home = Path(documents(prepared / "home", ["one", "two", "three"]))
    monkeypatch.setattr(data.text, "PREPARED", home / "data" / "prepared")
    for path in ("data/prepared/x/meta.json", "out/run/log.jsonl", ".git/config", "sub/four.txt"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text("text")
    assert list(data.text.own_files(home)) == ["00.txt", "01.txt", "02.txt", "sub/four.txt"]
    assert list(data.text.own_files(home / "out" / "run")) == ["log.jsonl"]  # where it is named
    monkeypatch.chdir(home)
    assert data.text.prepare(".", "bytes")[1]["corpus"] == "home"
    for path in ("", "gone"):
        with pytest.raises(ValueError, match="no text is named|no such corpus"):
            data.text.prepare(path, "bytes")
    with pytest.raises(ValueError, match="no text is named"):
        data.text.absolute("")


def test_one_file_is_cut_by_position(prepared):
    (prepared / "one.txt").write_bytes(bytes(range(200)) * 10)
    task = data.text.Task(data=str(prepared / "one.txt"), block_size=8)
    whole = np.concatenate([task.tokens(s) for s in task.splits])
    assert whole.tolist() == [256, *list(range(200)) * 10]
    assert [len(task.tokens(s)) for s in task.splits] == [1800, 100, 101]


def test_batches_are_windows_and_their_successors(prepared):
    (prepared / "one.txt").write_bytes(bytes(range(250)) * 20)
    task = data.text.Task(data=str(prepared / "one.txt"), block_size=8)
    x, y = task.batch("train", 5, rng(3))
    assert x.shape == y.shape == (5, 8) and x.dtype == y.dtype == np.int64
    assert (x[:, 1:] == y[:, :-1]).all()
    again, _ = task.batch("train", 5, rng(3))
    assert (x == again).all()


def test_batches_are_of_their_split_and_from_all_over_it(prepared):
    text = b"".join(b"%06d" % n for n in range(3000))
    (prepared / "one.txt").write_bytes(text)
    task = data.text.Task(data=str(prepared / "one.txt"), block_size=12)
    for split in task.splits:
        stream = task.tokens(split).tolist()
        x, _ = task.batch(split, 200, rng(3))
        starts = [next(n for n in range(len(stream)) if stream[n:n + 12] == row)
                  for row in x.tolist()]
        assert min(starts) < 0.1 * len(stream) and max(starts) > 0.9 * len(stream)


def test_the_standard_library_is_without_its_tests(prepared, monkeypatch):
    library = prepared / "library"
    for name in ("a.py", "b/c.py", "test/no.py", "b/tests/no.py", "site-packages/no.py",
                 "_sysconfigdata_x.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("# code\n" * 100_000)
    (library / "no.txt").write_text("no code")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict(stdlib=str(library)))
    _, meta = data.text.prepare("stdlib", "bytes")
    assert sum(meta["tokens"].values()) == 1 + 2 * 700_000 + 1
    shutil.rmtree(library / "b")
    with pytest.raises(ValueError, match="no standard library sources in .*--data PATH"):
        data.text.open_corpus("stdlib")


def test_a_preparation_that_breaks_leaves_nothing(prepared, monkeypatch):
    (prepared / "one.txt").write_bytes(b"some text " * 100)
    write = data.text.write

    def full(*args):
        write(*args)
        assert list((prepared / "prepared").glob("*"))
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(data.text, "write", full)
    with pytest.raises(ValueError, match="could not prepare.*No space left"):
        data.text.prepare(str(prepared / "one.txt"), "bytes")
    assert {path.suffix for path in (prepared / "prepared").glob("*")} == {".lock"}


class Server(http.server.BaseHTTPRequestHandler):
    body, breaks = b"some text " * 500, False

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body[:1000] if self.breaks else self.body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Server, "breaks", False)
    running = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def test_a_download_is_whole_and_the_right_one(tmp_path, server):
    url, path = f"http://127.0.0.1:{server.server_port}/x", tmp_path / "new" / "x"
    sha = hashlib.sha256(Server.body).hexdigest()
    with pytest.raises(ValueError, match="checksum: it is not the file it was"):
        data.text.download(url, path, "0" * 64)
    Server.breaks = True  # the line breaks after 1,000 bytes
    with pytest.raises(ValueError, match="could not download.*Offline: --data stdlib"):
        data.text.download(url, path, sha)
    assert not path.exists()
    Server.breaks = False
    assert data.text.download(url, path, sha).read_bytes() == Server.body
    server.shutdown()
    server.server_close()
    assert data.text.download(url, path, sha) == path  # it is there already
    assert [file.name for file in path.parent.iterdir()] == ["x"]
    path.unlink()
    with pytest.raises(ValueError, match="could not download.*Offline: --data stdlib"):
        data.text.download(url, path, sha)


def test_a_download_from_what_is_no_web_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def answer():
            with listening.accept()[0] as line:
                line.recv(4096)
                line.sendall(b"hello\n")
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ValueError, match="could not download.*Offline: --data stdlib"):
            data.text.download(f"http://127.0.0.1:{listening.getsockname()[1]}/x",
                               tmp_path / "x", "0" * 64)


def test_wikitext_lines_become_articles(monkeypatch):
    lines = ["", " = Valkyria = \n", "", " text one \n", " = = Plot = = \n", " more \n",
             " = Robert = \n", " text two \n"]
    monkeypatch.setattr(data.text, "hub", lambda *a, split: [{"text": line} for line in
                                                             [*lines, f" of {split} \n"]])
    got = list(data.text.wikitext())
    last = dict(train="train", val="validation", test="test")
    assert [s for s, _ in got[::3]] == list(last)
    assert all(t.endswith(f" of {last[s]} \n".encode()) for s, t in got[2::3])
    articles = [t.decode().replace(" of train \n", "") for s, t in got if s == "train"]
    titles = [a.strip().split(" \n")[0] for a in articles if a.strip()]
    assert titles == ["= Valkyria =", "= Robert ="]
    assert "= = Plot = =" in "".join(articles) and "".join(articles) == "".join(lines)


class Rows:
    """2,000 documents, and an error at these places."""
    def __init__(self, breaks):
        self.at, self.breaks = 0, breaks

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < 2000:
            if self.at in self.breaks:
                raise ConnectionError("gone")
            self.at += 1
            yield {"id": f"doc{self.at}", "text": f"text of document {self.at} "}


def test_a_hub_corpus_continues_where_it_stopped(prepared, monkeypatch, capsys):
    """A stream that breaks off twice, saved after every group, ends as one that never did."""
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(data.text.time, "time", lambda: next(clock))
    breaks = [700, 1500]
    monkeypatch.setattr(data.text, "hub", lambda *a, **k: Rows(breaks))
    for _ in (1, 2):
        with pytest.raises(ValueError, match="broke off"):
            data.text.prepare("fineweb_edu", "bytes")
        breaks.pop(0)
    folder, meta = data.text.prepare("fineweb_edu", "bytes")
    assert "continuing after" in capsys.readouterr().err
    shutil.copytree(folder, prepared / "broken")
    shutil.rmtree(folder)
    _, again = data.text.prepare("fineweb_edu", "bytes")
    assert again["sha256"] == meta["sha256"] and sum(meta["tokens"].values()) > 2000 * 18
    assert 0 < meta["tokens"]["test"] < 0.03 * meta["tokens"]["train"]
    _, some = data.text.prepare("fineweb_edu", "bytes", max_tokens=9000)
    assert some["tokens"]["train"] == 8100 and sum(some["tokens"].values()) <= 9000


def test_a_preparation_waits_for_the_one_before_it(prepared, capfd):
    """Six processes on a corpus that is new, and then on one that was touched: all succeed."""
    docs = Path(documents(prepared / "docs", [f"<{i:02}>" * 500 for i in range(40)]))
    code = f"""if True:
        import sys
        from pathlib import Path
        import data.text
        data.text.PREPARED = Path({str(prepared / "prepared")!r})
        print("ready", flush=True)
        sys.stdin.read(1)
        print(data.text.Task(data={str(docs)!r}, block_size=8).tokens("train").sum())"""
    for text in ("<new>", "<more>"):
        (docs / "00.txt").write_text(text * 500)
        found = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(6)]
        for p in found:
            assert p.stdout.readline() == "ready\n"
        for p in found:
            p.stdin.write("x")
            p.stdin.flush()
        sums = [p.communicate(timeout=60)[0] for p in found]
        assert len(set(sums)) == 1 and [p.returncode for p in found] == [0] * 6
        folder, = (prepared / "prepared").glob("docs-*-bytes")
        assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
    assert capfd.readouterr().err.count("preparing") == 2


def test_what_another_reads_is_not_removed_and_what_the_dead_left_is(prepared):
    docs = Path(documents(prepared / "docs", [f"<{i:02}>" * 50 for i in range(40)]))
    home = prepared / "prepared"
    first = data.text.Task(data=str(docs), block_size=8)
    folder, _, _ = data.text.look_up(str(docs), "bytes")
    (docs / "00.txt").touch()  # the same text again: the same streams
    assert data.text.Task(data=str(docs), block_size=8).source == first.source
    for stray in (f"{folder.name}.partial", "gone-bytes.partial", "older-bytes.partial",
                  "fineweb-bytes.partial"):
        (home / stray).mkdir()
    (home / "fineweb-bytes.partial" / "progress.json").write_text("{}")
    (home / "busy-bytes.partial").mkdir()
    (home / "a.partial-bytes").mkdir()  # a finished one: its text is called a.partial
    with data.text.locked(home / "busy-bytes"):
        (docs / "00.txt").write_text("<new>" * 50)
        second = data.text.Task(data=str(docs), block_size=8)
    left = {path.name for path in home.glob("*.partial*")}
    assert left == {"busy-bytes.partial", "fineweb-bytes.partial", "a.partial-bytes"}
    both = {first.source[:16], second.source[:16], "meta.json"}
    assert {path.name for path in folder.iterdir()} == both
    del first
    (docs / "01.txt").write_text("<new>" * 50)
    third = data.text.Task(data=str(docs), block_size=8)
    both = {second.source[:16], third.source[:16], "meta.json"}
    assert {path.name for path in folder.iterdir()} == both


def test_tokens_that_were_cut_short_are_made_anew(prepared, capsys):
    """A power cut may leave a file shorter, and meta.json with it."""
    docs = documents(prepared / "docs", [f"<{i:02}>" * 50 for i in range(40)])
    task = data.text.Task(data=docs, block_size=8)
    folder, _, _ = data.text.look_up(docs, "bytes")
    source, want = task.source, task.tokens("train").tolist()
    for left, meta_left in ((100, True), (0, True), (100, False)):
        del task  # nobody reads them
        os.truncate(folder / source[:16] / "train.bin", left)
        if not meta_left:
            (folder / "meta.json").write_text("")
        task = data.text.Task(data=docs, block_size=8)
        assert task.source == source and task.tokens("train").tolist() == want
    assert capsys.readouterr().err.count("preparing") == 4


def test_a_folder_that_grows_while_its_preparation_waits(prepared, monkeypatch):
    docs, locked = documents(prepared / "docs", ["<a>" * 50] * 40), data.text.locked

    @contextlib.contextmanager
    def grown(folder):
        (prepared / "docs" / "new.txt").write_text("<new>" * 1000)
        with locked(folder):
            yield
    monkeypatch.setattr(data.text, "locked", grown)
    _, meta = data.text.prepare(docs, "bytes")
    assert sum(meta["tokens"].values()) == 40 * 151 + 5001


def test_missing_datasets_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        next(iter(data.text.wikitext()))


def offline(*args, **kwargs):
    raise ConnectionError("no route to host\nmore words")


def test_what_cannot_be_downloaded_is_said_in_one_line(prepared, monkeypatch):
    """Tokenizer, data set and plays; where they are there, they are split."""
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match=r"gpt2 tokenizer \(ConnectionError\).*--tokenizer bytes"):
        data.text.get_encoding("gpt2")
    monkeypatch.setattr(tiktoken, "get_encoding", int)  # a ValueError, as of a damaged file
    with pytest.raises(ValueError, match=r"gpt2 tokenizer \(ValueError\).*--tokenizer bytes"):
        data.text.get_encoding("gpt2")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    for name in ("wikitext103", "fineweb_edu"):
        with pytest.raises(ValueError, match=r"\(ConnectionError: no.*Offline: --data stdlib") as e:
            data.text.prepare(name, "bytes")
        assert "\n" not in str(e.value) and not list((prepared / "prepared").glob("*/meta.json"))
    plays = prepared / "plays"
    plays.write_bytes(b"To be, or not to be. " * 100)
    monkeypatch.setattr(data.text, "download", lambda url, path, sha256: plays)
    _, meta = data.text.prepare("shakespeare", "bytes")
    assert meta["tokens"] == dict(train=1890, val=105, test=106)
    assert meta["corpus"] == "shakespeare" and meta["vocab_size"] == 257


def test_text_is_prepared_by_its_own_command(prepared, capsys):
    (prepared / "one.txt").write_text("a few words of text. " * 99)
    data.text.main([str(prepared / "one.txt"), "--max_tokens", "500"])
    out = capsys.readouterr().out
    assert json.loads(out)["tokens"] == dict(train=450, val=25, test=25)
    with pytest.raises(SystemExit):
        data.text.main(["--help"])
    assert "python data/text.py NAME" in capsys.readouterr().out
    for words, says in ((["nowhere"], "no such corpus, file or folder: nowhere"),
                        (["stdlib", "--tokenizer", "words"], "invalid choice: 'words'"),
                        (["stdlib", "--max_tokens", "-1"], "--max_tokens must be 0")):
        with pytest.raises(SystemExit) as e:
            data.text.main(words)
        assert e.value.code.startswith("error: ") and says in e.value.code


# -----------------------------------------------------------------------------
# data: the synthetic tasks

@pytest.mark.parametrize("split, reads", [
    ("train", 26), ("iid", 26), ("sparse", 3.5), ("dense", 115)])
def test_flip_flop_reads_repeat_the_last_write(split, reads):
    task = data.flipflop.Task(block_size=512)
    x, y = task.batch(split, 400, rng())
    assert x.shape == y.shape == (400, 511) and x.dtype == y.dtype == np.int64
    for row, target in zip(x[:100], y):
        text, memory = "".join(task.show(row)), None
        assert text[0] == "w" and text[-1] == "r" and re.fullmatch("([wri][01])*r", text)
        for t in range(0, 511, 2):
            if text[t] == "w":
                memory = text[t + 1]
            if text[t] == "r":
                assert "01"[target[t] - 3] == memory
                assert t + 1 == 511 or text[t + 1] == memory
            else:
                assert target[t] == -1
        assert (target[1::2] == -1).all()
    # the paper's mean reads in a string
    assert (y != -1).sum(1).mean() == pytest.approx(reads, rel=0.06)
    others = x[:, 2:510:2]
    p = dict(train=0.8, iid=0.8, sparse=0.98, dense=0.1)[split]
    assert (others == 2).mean() == pytest.approx(p, abs=0.01)
    assert (others == 0).mean() == pytest.approx((1 - p) / 2, abs=0.01)
    assert x[:, 1::2].mean() == pytest.approx(3.5, abs=0.02)


@pytest.mark.parametrize("split, blanks", [
    ("train", 16), ("iid", 16), ("dense", 8), ("sparse", 32)])
def test_selective_copy_without_blanks_is_the_output(split, blanks):
    task = data.selective_copy.Task(block_size=65)
    x, y = task.batch(split, 300, rng())
    assert x.shape == y.shape == (300, 32 + blanks)
    for row, target in zip(x, y):
        said, out = row[:16 + blanks], target[target != -1]
        assert (said == 0).sum() == blanks and said[said != 0].tolist() == out.tolist()
        assert row[16 + blanks] == 1 and row[17 + blanks:].tolist() == out[:-1].tolist()
        assert (target[:16 + blanks] == -1).all() and len(out) == 16
    symbols, counts = np.unique(y, return_counts=True)
    assert symbols.tolist() == [-1, *range(2, 16)]
    assert (abs(counts[1:] / 4800 - 1 / 14) < 0.02).all()  # all alike
    assert (x[:, :16 + blanks] == 0).mean(0).std() < 0.06  # blanks are anywhere


def recalled(words):
    """
    A recall string, answered by a reader that knows nothing of how it was written -> the pair asked
    for, and how many tokens it is back. Asserts the rules.
    """
    *said, key = words
    pairs = {word[0]: word for word in said if word != "."}
    assert len(pairs) == sum(word != "." for word in said) == 8 and re.fullmatch("[a-p]", key)
    assert all(re.fullmatch("[a-p][0-7]", pair) for pair in pairs.values())
    return pairs[key], len(said) - said.index(pairs[key])


@pytest.mark.parametrize("T", [9, 64, 256])
def test_recall_is_what_was_said_about_the_key(T):
    task = data.recall.Task(block_size=T)
    x, y = task.batch("iid", 2000, rng())
    assert x.shape == y.shape == (2000, T) and x.dtype == y.dtype == np.int64
    assert (y[:, :-1] == -1).all()
    far = task.distance(*map(torch.from_numpy, (x, y)))
    distances = []
    for row, target, d in zip(x, y, far):
        pair, distance = recalled(task.show(row))
        assert task.show(target[-1:]) == [pair] and distance == d
        distances.append(distance)
    # keys, values and places are drawn alike; a pair may be anywhere but at the question
    assert min(distances) == 1 and max(distances) >= 0.95 * (T - 1)
    assert np.mean(distances) == pytest.approx(T / 2, rel=0.05)
    assert np.bincount(x[:, -1])[1:].std() < 20 and np.bincount(y[:, -1])[17:].min() > 2
    assert (x[:, :-1] != 0).mean(0).std() < 0.05


def interpret(words):
    """
    A counting program, run by a reader that knows nothing of how it was written -> the answer, and
    how many operations there are. Asserts the rules.
    """
    value, words, ops = {}, list(words), 0
    while words[0] != "print":
        ops += 1
        if words[0] == "pass":
            assert words[1] == ";"
            words = words[2:]
        elif words[1] == "++":
            assert words[2] == ";" and value[words[0]] < 10
            value[words[0]] += 1
            words = words[3:]
        else:
            assert words[1:4] == ["=", "0", ";"]
            value[words[0]] = 0
            words = words[4:]
    assert len(words) == 2
    return value[words[1]], ops


def test_perplexity_is_e_to_the_mean_loss():
    row, losses = dict(eval_seconds={}), np.log(np.arange(1.0, 33))
    run = types.SimpleNamespace(model=None, name="run")
    evaluation.length_row(row, "strided", lambda *a, **k: losses, run, np.zeros(33), [8, 16], 0,
                          "cpu", None)
    want = math.factorial(32)**(1 / 32)  # the geometric mean
    assert row["strided"] == pytest.approx({8: want, 16: want})


def test_every_chunk_of_a_tasks_score_is_of_new_sequences():
    task, seen = data.recall.Task(block_size=64), []

    def noted(x):
        seen.append(x)
        return torch.zeros(*x.shape, task.vocab_size), None
    number = 2 * evaluation.CHUNK
    evaluation.task_scores(noted, task, "iid", number, 1, "cpu", contextlib.nullcontext())
    rows = torch.cat(seen)
    assert len(rows) == number == len(rows.unique(dim=0))


def test_scores_by_distance_are_in_powers_of_two():
    """A model that reads the last 16 tokens alone; how many strings ask for what is farther."""
    task = data.recall.Task(block_size=64)

    def near(x):
        y = torch.full_like(x, -1)
        key = x[:, -1:]
        of_key = (x > 16) & ((x - 1) % 16 == key - 1)
        of_key[:, :-17] = False
        y[:, -1] = (x * of_key).amax(1)
        return F.one_hot(y.clamp(min=0), task.vocab_size).float(), None
    scores, _, groups = evaluation.task_scores(near, task, "iid", 700, 1, "cpu",
                                               contextlib.nullcontext())
    found = groups["by_distance"]
    assert list(found) == [1, 2, 4, 8, 16, 32] and sum(n for n, _ in found.values()) == 700
    rates = [rate for _, rate in found.values()]
    assert rates[:4] == [1, 1, 1, 1] and 0 < rates[4] < 0.2 and rates[5] == 0
    total = sum(n * rate for n, rate in found.values()) / 700
    assert scores["accuracy"]["value"] == pytest.approx(total)


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("split", ["train", "iid", "pass100", "pass10"])
def test_counting_programs_replayed(split, n):
    task = data.counting.Task(vars=n, max_ops=40, block_size=162, n_train=300)
    x, y = task.batch(split, 300, rng())
    assert x.shape == y.shape == (300, 162) and x.dtype == np.int64
    lengths, names, passes = [], set(), 0
    for row, target in zip(x, y):
        words = [w for w in task.show(row) if w]
        end = len(words) - 1
        assert (row[end + 1:] == 21).all() and (target != -1).nonzero()[0].tolist() == [end]
        answer, ops = interpret(words)
        assert target[end] - 10 == answer
        lengths.append(ops)
        passes += words.count("pass")
        names |= set(words) & set("abcde")
    assert min(lengths) < 6 and max(lengths) == 40 and names == set("abcde"[:n])
    assert np.mean(lengths) == pytest.approx(21.5, abs=2.5)
    share = dict(train=0.887, iid=0.887, pass100=0.92, pass10=0.672)[split]
    assert passes / sum(lengths) == pytest.approx(share, abs=0.01)
    # the same programs, their beginnings cut off
    short = data.counting.Task(vars=n, max_ops=40, block_size=20, n_train=300)
    sx, sy = short.batch(split, 300, rng())
    for row, cut, target, cut_target in zip(x, sx, y, sy):
        whole = row[:(row != 21).sum()][-20:]
        assert cut[:len(whole)].tolist() == whole.tolist()
        assert cut_target.max() == target.max()


def test_counting_asks_for_any_variable_that_is_set():
    task = data.counting.Task(vars=3, max_ops=40, block_size=162, n_train=2000)
    asked = []
    for row in task.batch("iid", 2000, rng())[0]:
        words = [w for w in task.show(row) if w]
        known = sorted(set(words[:-1]) & set("abc"))
        if len(known) == 2:
            asked.append(known.index(words[-1]))
    assert len(asked) > 200 and 0.4 < np.mean(asked) < 0.6


def test_counting_in_the_tokens_of_the_authors_release():
    """The same programs: `pass;` is one token, `a ++;` two, and fewer programs are cut."""
    plain, joined = (data.counting.Task(vars=3, max_ops=40, block_size=162, n_train=200, joined=j)
                     for j in (False, True))
    (x, y), (jx, jy) = (task.batch("iid", 200, rng()) for task in (plain, joined))
    for row, short, target, other in zip(x, jx, y, jy):
        words, fewer = plain.show(row), [w for w in joined.show(short) if w]
        apart = " ".join(fewer).replace(";", " ;").replace("  ", " ").split()
        assert [w for w in words if w] == apart and target.max() == other.max()
        assert (other != -1).nonzero()[0].tolist() == [len(fewer) - 1]
        assert fewer.count(";") == fewer.count("=")
    paper = data.counting.Task.defaults["paper"]
    cut = []
    for j in (False, True):
        task = data.counting.Task(block_size=512, max_ops=512, joined=j)
        x, y = task.programs(2000, 50, rng())
        cut.append((y[:, -1] != -1).mean())
    assert paper["joined"] and cut == pytest.approx([0.53, 0.127], abs=0.03)
    assert paper["max_iters"] * paper["batch_size"] == 100 * data.counting.Task.n_train


def test_errors_by_answer_and_a_constant_guess(home, here):
    """Of one test set: how many programs have an answer, and how many of them are wrong."""
    answers = np.array([3, 0, 3, 3, 10])
    found = evaluation.by_group(answers, np.array([1.0, 0, 0, 1, 1]), np.ones(5))
    assert found == {0: [1, 0.0], 3: [3, pytest.approx(2 / 3)], 10: [1, 1.0]}
    x, y = (torch.from_numpy(a) for a in data.counting.Task().batch("iid", 9, rng()))
    assert data.counting.Task().answer(x, y).tolist() == [row.max() - 10 for row in y]
    columns = [("in", "iid", "answer_error"), ("pass 10", "pass10", "answer_error")]
    here(counts=entry("--data counting --n_train 20", experiments.seeds(2, "cope"),
                      eval="--sequences 100", columns=columns))
    command(home, "reproduce.py", "counts", "--device", "cpu")
    result = json.loads((home / "results" / "counts.cpu.json").read_text())
    first, second = (r["by_answer"]["16"]["pass10"] for r in result["runs"])
    n = {answer: n for answer, (n, _) in first.items()}
    assert sum(n.values()) == 100 and all(second[answer][0] == n[answer] for answer in n)
    total = sum(count * rate for count, rate in first.values()) / 100
    scores = result["runs"][0]["scores"]["16"]["pass10"]["answer_error"]
    assert scores["value"] == pytest.approx(total)
    said = (home / "out" / "counts.cpu").exists() and tables.table(result)
    row, = (line for line in said.splitlines() if line.startswith("| cope | pass 10 |"))
    assert cells(row)[2] == f"{100 - max(n.values()):.2f}"
    head, = (line for line in said.splitlines() if "a constant guess |" in line)
    for answer, cell in zip(cells(head)[3:], cells(row)[3:]):
        rates = [one[answer][1] for one in (first, second)] if answer in n else []
        assert cell == (f"{100 * np.mean(rates):.1f} of {n[answer]}" if rates else "-")


def draw_program(g, length, pass_weight):
    """A counting program of two variables, as its docstring says it -> [(what, variable)]."""
    while True:
        state, ops = [-1, -1], []
        while len(ops) < length:
            u, v = g.random() * (pass_weight + 8), int(g.random() < 0.5)
            what = 0 if u < pass_weight else 1 if u < pass_weight + 1 else 2
            if what == 0:
                v = 0
            elif what == 1:
                state[v] = 0
            else:
                alive = [v for v in (0, 1) if state[v] >= 0]
                v = alive[v % len(alive)] if alive else 0
                if not -1 < state[v] < 10:
                    continue
                state[v] += 1
            ops.append((what, v))
        if any(what == 1 for what, _ in ops):
            return ops


@pytest.mark.parametrize("pass_weight", [50, 10])
def test_counting_operations_have_their_weights(pass_weight):
    """Lengths are uniform; operations are those of plain drawing and drawing again."""
    task, count = data.counting.Task(vars=2, max_ops=30, n_train=0), 20000
    kind, name, value = task.run(count, pass_weight, rng())
    lengths = (kind >= 0).sum(1)
    assert (value <= 10).all() and (value >= 0).any(1).all()
    assert abs(chi_square(np.bincount(lengths - 3), np.ones(28) / 28)) < 4
    g = rng(5)
    plain = [draw_program(g, length, pass_weight) for length in g.integers(3, 31, 2000)]
    for t in (0, 1, 2, 5, 12, 29):  # over programs that reach it: two samples of one distribution
        reach = lengths > t
        ours = np.bincount(kind[reach, t] * 2 + name[reach, t], minlength=6)
        codes = [2 * ops[t][0] + ops[t][1] for ops in plain if len(ops) > t]
        theirs = np.bincount(codes, minlength=6)
        p = (ours + theirs) / (ours + theirs).sum()
        error = np.sqrt(p * (1 - p) * (1 / ours.sum() + 1 / theirs.sum()))
        differ = np.abs(ours / ours.sum() - theirs / theirs.sum())
        assert (differ <= 4 * error + 1e-12).all(), t


def test_training_programs_are_fixed_and_test_programs_new():
    task = data.counting.Task(n_train=50)
    seen = {tuple(row) for row in task.fixed[0]}
    assert {tuple(row) for row in task.batch("train", 200, rng(1))[0]} <= seen
    assert len({tuple(row) for row in task.batch("iid", 200, rng(1))[0]} & seen) < 20
    assert (data.counting.Task(n_train=50).fixed[0] == task.fixed[0]).all()


def chi_square(counts, p):
    """How far counts are from p, in standard deviations of the chi-square statistic's own."""
    keep = p > 0
    assert counts[~keep].sum() == 0, "an illegal token was drawn"
    expected = counts.sum() * p[keep]
    statistic = ((counts[keep] - expected) ** 2 / expected).sum()
    freedom = keep.sum() - 1
    return (statistic - freedom) / math.sqrt(2 * max(freedom, 1))


def test_set_complement():
    task = data.set_complement.Task(n=9, block_size=3)
    for split, T in (("train", 3), ("iid", 3), ("half", 4), ("full", 8)):
        x, y = task.batch(split, 2000, rng())
        assert x.shape == y.shape == (2000, T) and (x[:, 1:] == y[:, :-1]).all()
        assert all(len({*a, b}) == T + 1 for a, b in zip(x, y[:, -1]))  # without repetition
        p = task.target(torch.from_numpy(x))
        for row, target in zip(x[:20], p):
            for t in range(T):
                want = np.ones(9)
                want[row[:t + 1]] = 0
                assert target[t].numpy() == pytest.approx(want / want.sum())
    counts = np.bincount(task.batch("train", 20000, rng())[0][:, 0], minlength=9)
    assert abs(chi_square(counts, np.ones(9) / 9)) < 4
    # TVD: 0 for the target itself; a distribution that is uniform over all is too far spread
    x, y = (torch.from_numpy(a) for a in task.batch("half", 5, rng()))
    uniform = [1 / 9, 2 / 9, 3 / 9, 4 / 9]
    for logits, want in ((task.target(x).log(), [0, 0, 0, 0]), (torch.zeros(5, 4, 9), uniform)):
        scores = task.score(logits, x, y)
        close(scores["tvd"][0], torch.full((5,), sum(want)), 1e-5)
        close(scores["tvd_last"][0], torch.full((5,), want[-1]), 1e-5)
        assert scores["tvd"][1].tolist() == [4] * 5


@pytest.mark.parametrize("k, m", [(1, 1), (2, 3), (3, 2)])
def test_dyck_strings_parse_and_have_their_distribution(k, m):
    task = data.dyck.Task(block_size=24, k=k, m=m)
    seen = {}
    for split, T, n in (("train", 24, 2000), ("long", 96, 50)):
        x, y = task.batch(split, n, rng())
        assert x.shape == y.shape == (n, T) and (x[:, 0] == 0).all() and (x[:, 1:] >= 2).all()
        p = task.target(torch.from_numpy(x)).numpy()
        assert np.abs(p.sum(-1) - 1).max() < 1e-6
        wants = np.array([dyck_distributions(row, k, m) for row in x])
        assert np.abs(p - wants).max() < 1e-6
        assert ((y[:, :-1] == x[:, 1:]) | (y[:, :-1] == 1)).all()
        if split == "train":
            for want, drawn in zip(wants.reshape(-1, 2 + 2 * k), y.flatten()):
                seen.setdefault(tuple(want), np.zeros(2 + 2 * k))[drawn] += 1
    for key, counts in seen.items():
        assert abs(chi_square(counts, np.array(key))) < 5
    assert len(set(data.dyck.Task(k=k + 4).show(range(2 * k + 10)))) == 2 * k + 10


def dyck_distributions(row, k, m):
    """What may follow after each token, by the spec's three cases, from a stack of brackets."""
    stack, found = [], np.zeros((len(row), 2 + 2 * k))
    for token, want in zip(row, found):
        if token >= 2 + k:
            assert stack.pop() == token - 2 - k
        elif token >= 2:
            stack.append(token - 2)
        assert len(stack) <= m
        if not stack:
            want[1], want[2:2 + k] = 1 / 2, 1 / (2 * k)
        elif len(stack) < m:
            want[2:2 + k], want[2 + k + stack[-1]] = 1 / (2 * k), 1 / 2
        else:
            want[2 + k + stack[-1]] = 1
    return found


@pytest.mark.parametrize("language, legal, p_switch, stays", [
    (3, r"(?!.*(?<!1)1(11)*0(00)*1).*", 0, 0.8), (7, "0*1*0*1*", 0, 0.99),
    (3, r"(?!.*(?<!1)1(11)*0(00)*1).*", 0.4, 0.6)])
def test_tomita_strings_match_their_expression(language, legal, p_switch, stays):
    """Beginnings of strings, by a regular expression that knows nothing of automata."""
    task = data.tomita.Task(block_size=60, language=language, p_switch=p_switch)
    x, y = task.batch("train", 2000, rng())
    assert x.shape == y.shape == (2000, 60)
    assert task.batch("long", 3, rng())[0].shape == (3, 460)
    p = task.target(torch.from_numpy(x)).numpy()
    assert np.abs(p.sum(-1) - 1).max() < 1e-6 and (p[..., 0] == 0).all()
    logit, positive = task.contrast(torch.from_numpy(p), torch.from_numpy(x))
    symbol = {3: 1, 7: 0}[language]
    assert (logit.numpy() == p[..., 2 + symbol]).all()
    assert (positive.numpy() == (p[..., 2 + symbol] > 0)).all()
    texts = ["".join(task.show(row[1:])) for row in x]
    assert all(re.fullmatch(legal, text) for text in texts)
    for text, target in zip(texts[:60], p):
        for t in range(1, 60):
            so_far, after = text[:t], target[t]
            for s in "01":
                may_follow = bool(re.fullmatch(legal, so_far + s))
                assert (after[2 + int(s)] > 0) == may_follow, (so_far, s)
            # an odd run of 0s after an odd run of 1s is not over
            ends = language == 7 or not re.search("(?<!1)1(11)*0(00)*$", so_far)
            assert (after[1] > 0) == ends
            if (after[2:] > 0).all():
                same = after[2 + int(so_far[-1])] / after[2:].sum()
                assert same == pytest.approx(stays, abs=1e-5)
    kinds, of = np.unique(p.reshape(-1, 4).round(6), axis=0, return_inverse=True)
    for n, kind in enumerate(kinds.astype(np.float64)):
        counts = np.bincount(y.flatten()[of.flatten() == n], minlength=4)
        assert abs(chi_square(counts, kind / kind.sum())) < 5
    _, y = data.tomita.Task(language=language).batch("train", 4000, rng())
    assert (y == 1).any(1).mean() == pytest.approx(0.5, abs=0.03)  # have ended by 100


def test_max_retrieval_task():
    task = data.max_retrieval.Task()
    for split, T in (("train", 16), ("iid", 16), ("64", 64)):
        x, y = task.batch(split, 500, rng())
        assert x.shape == (500, T, 11) and x.dtype == np.float32 and y.dtype == np.int64
        items = (x[..., 0] >= 0).sum(1)
        assert set(items) == set(range(5, 17)) if T == 16 else (items == T).all()
        for row, n, label in zip(x, items, y):
            kinds = row[:n, 1:]
            assert (row[n:] == -1).all()
            assert (kinds.sum(1) == 1).all() and (kinds.max(1) == 1).all()
            assert row[max(range(n), key=lambda i: row[i, 0]), 1 + label] == 1
    x, y = task.batch("16384", 8, rng())
    assert x.shape == (8, 16384, 11) and abs(x[..., 0].mean() - 0.5) < 0.01
    x, y = task.batch("train", 4000, rng())
    assert abs(chi_square(np.bincount(y, minlength=10), np.ones(10) / 10)) < 4
    logits = torch.eye(10)[torch.from_numpy(y)]
    logits[:1000] = logits[:1000].roll(1, 1)
    assert task.score(logits, x, torch.from_numpy(y))["accuracy"][0].mean() == 0.75
    assert len(task.show(x[0])) == (x[0, :, 0] >= 0).sum()
    for wrong in (dict(classes=1), dict(block_size=4)):
        with pytest.raises(ValueError, match="at least"):
            data.max_retrieval.Task(**wrong)


TASKS = [name for name in data.with_a_file()
         if data.find(name).kind == "symbols" and not data.find(name).for_encoders]


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_reproducible_and_scores_itself(name):
    cls = data.find(name)
    task = cls(**runs.pick(cls, cls.defaults["nano"]))
    for split in task.splits:
        x, y = task.batch(split, 8, rng(3))
        again = task.batch(split, 8, rng(3))
        assert (x == again[0]).all() and (y == again[1]).all()
        assert 0 <= x.min() and max(x.max(), y.max()) < task.vocab_size
        assert y.min() >= (0 if task.target else -1)
        assert len(task.show(x[0])) == x.shape[1]
        assert len(set(task.show(range(task.vocab_size)))) == task.vocab_size
        if not task.target:
            perfect_answers_and_one_mistake(task, torch.from_numpy(x), torch.from_numpy(y))


def perfect_answers_and_one_mistake(task, x, y):
    """The scores of perfect answers, then with one wrong answer in the first sequence."""
    logits = F.one_hot(y.clamp(min=0), task.vocab_size).float()
    first = (y[0] != -1).nonzero()[0, 0]
    for wrong in (0, 1):
        for metric, (count, out_of) in task.score(logits, x, y).items():
            assert count.shape == out_of.shape == (8,)
            good = metric in ("exact_match", "accuracy")
            want = [1 - wrong] + [1] * 7 if good else [wrong] + [0] * 7
            assert count.tolist() == want
            each = metric in ("glitch_rate", "token_error")
            assert out_of.tolist() == ((y != -1).sum(1) if each else torch.ones(8)).tolist()
        logits[0, first] = -logits[0, first]


@pytest.mark.parametrize("name, least", [*((name, 1e6) for name in TASKS), ("max_retrieval", 3e5)])
def test_tasks_are_drawn_fast(name, least):
    """Tokens or items a second of CPU time; several times as many on a quiet core."""
    cls = data.find(name)
    task, generator, seconds = cls(**runs.pick(cls, cls.defaults.get("paper", {}))), rng(1), []
    for _ in range(3):
        begin = time.process_time()
        x, _ = task.batch(task.splits[1], 1000, generator)
        seconds.append(time.process_time() - begin)
    assert x.shape[0] * x.shape[1] / min(seconds) > least


# -----------------------------------------------------------------------------
# the encoder: bidirectional attention, masked tokens, retrieval

def encoder(name, **changes):
    """A small random encoder in float64, with biases and steps that do not vanish."""
    return make(name, **changes).double()


def naive_encoder_attention(q, k, v, real, S, g):
    """One query, one key, one number at a time."""
    B, H, T, d = q.shape
    y = torch.zeros_like(v)
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        weights = []
        for j in range(T):
            logit = sum(q[b, h, i, n] * k[b, h, j, n] for n in range(d)) / math.sqrt(d)
            if S is not None:
                logit -= g[b % len(g), h, i] * abs(S[b % len(S), h, i] - S[b % len(S), h, j])
            weights.append(logit.exp() if real is None or real[b, j] else 0)
        for j in range(T):
            y[b, h, i] += weights[j] / sum(weights) * v[b, h, j]
    return y


@pytest.mark.parametrize("rows", [64, 2])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoder_attends_both_ways(name, rows, monkeypatch):
    """literal and what runs, on the model's own arguments, with padding and without."""
    monkeypatch.setattr(model_bert, "ROWS", rows)
    model = encoder(name)
    for padded in (0, 2):
        idx = torch.randint(1, 61, (2, 7))
        idx[1, 7 - padded:] = 0
        with runs.spy(model) as calls:
            model(idx)
        for q, k, v, real, S, g in calls:
            assert (real is None) == (padded == 0)
            assert (S is None) == (name not in ("bert_cable", "bert_alibi"))
            want = naive_encoder_attention(q, k, v, real, S, g)
            y, parts = model_bert.literal(q, k, v, real, S, g)
            close(y, want, 1e-12)
            close(model_bert.bert_attention(q, k, v, real, S, g), want, 1e-6)  # S is float32
            assert parts["attention"].shape == (2, 4, 7, 7)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoder_by_hand(name):
    """From tokens to a vector, by the weights alone."""
    model, idx = encoder(name), torch.randint(1, 61, (7,))
    C, H, T, pe = 32, 4, 7, name.removeprefix("bert_")
    pos = torch.arange(T, dtype=torch.float64)
    x = model.wte.weight[idx]
    if pe == "learned":
        x = x + model.wpe.weight[:T]
    x = x * math.sqrt(C)
    if pe == "sinusoidal":
        waves = [(math.sin, math.cos)[c % 2] for c in range(C)]
        sines = [[wave(p / 10000 ** (c // 2 * 2 / C)) for c, wave in enumerate(waves)]
                 for p in range(T)]
        x = x + torch.tensor(sines, dtype=torch.float64)
    for block in model.h:
        attn, n = block.attn, N(x, block.ln_1, 1e-6)
        q, k, v = (n @ attn.c_attn.weight.T).view(1, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        S = g = None
        if pe == "rope":  # channels c and c + 4 are a pair
            turn = torch.exp(1j * pos[:, None] * 10000.0 ** (-torch.arange(4) / 4))
            q, k = ((torch.complex(z[..., :4], z[..., 4:]) * turn) for z in (q, k))
            q, k = (torch.cat((z.real, z.imag), -1) for z in (q, k))
        if pe == "alibi":
            S = pos.expand(1, H, T)
            g = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[None, :, None].expand(1, H, T)
        if pe == "cable":
            step = (n @ attn.w_c.weight.T + attn.w_c.bias).clamp(min=0)
            S = step.T.cumsum(-1)[None]
            g = (n @ attn.w_s.weight.T + attn.w_s.bias).exp().add(1).log().T[None]
        y = naive_encoder_attention(q, k, v, None, S, g)
        x = x + y.transpose(1, 2).reshape(T, C) @ attn.c_proj.weight.T
        x = x + mlp_by_hand(N(x, block.ln_2, 1e-6), block.mlp)
    x = N(x, model.ln_f, 1e-6)
    score = (x @ model.w_p.weight[0]).exp()
    mean = sum(s * state for s, state in zip(score, x)) / score.sum()
    assert score.max() > 1.2 * score.min()
    close(model.embed(idx[None])[0], mean / mean.norm(), 1e-5)
    model.w_p.weight.zero_()
    close(model.embed(idx[None])[0], x.mean(0) / x.mean(0).norm(), 1e-5)
    fresh = runs.make_model(dict(model=name))
    assert fresh.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 8 ** .5, rel=0.05)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_padding_changes_nothing(name):
    """Vectors and gradients of a batch are those of its texts one by one, however far padded."""
    model = encoder(name)
    texts = [torch.randint(1, 61, (n,)) for n in (1, 5, 13, 20)]
    idx = torch.zeros(4, 24, dtype=torch.long)
    for row, text in zip(idx, texts):
        row[:len(text)] = text
    for width in (20, 24):
        for row, text in zip(model.embed(idx[:, :width]), texts):
            close(row, model.embed(text[None])[0], 1e-6)
    assert (model.embed(idx).norm(dim=1) - 1).abs().max() < 1e-6
    empty = model.embed(torch.zeros(1, 5, dtype=torch.long))
    assert torch.equal(empty, torch.zeros_like(empty))
    with torch.enable_grad():  # of a text without tokens too, no NaN
        model.embed(torch.cat((idx, 0 * idx[:1]))).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_masked_tokens_are_scored_alone():
    model = encoder("bert_cable")
    idx, targets = torch.randint(1, 61, (2, 9)), torch.full((2, 9), -1)
    targets[0, 3], targets[1, 7] = 5, 6
    full, nothing = model(idx)
    logits, loss = model(idx, targets)
    assert nothing is None and logits.shape == (2, 61)
    close(logits, full[[0, 1], [3, 7]], 1e-12)
    want = -(full[0, 3].log_softmax(-1)[5] + full[1, 7].log_softmax(-1)[6]) / 2
    close(loss, want, 1e-6)
    assert model(idx, torch.full((2, 9), -1))[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("pe", [one["pe"] for one in model_bert.VARIANTS.values()])
def test_an_encoder_reads_16384_tokens(pe):
    """In less than 1.5 GB, torch and all."""
    code = f"""if True:
        import torch, model_bert, runs
        torch.set_num_threads(1)
        model = model_bert.GPT(model_bert.GPTConfig(pe="{pe}", block_size=16384))
        with torch.no_grad():
            model.embed(torch.randint(1, 8195, (1, 16384)))
        print(runs.peak_memory(torch.device("cpu")))"""
    peak = python(code, ROOT)
    assert float(peak) < 1.5


def write_package(folder, modules=22, functions=8):
    """Python files, each function with a docstring of its own words."""
    (folder / "library").mkdir()
    words = [a + b for a in ("ta", "ro", "mi", "ku", "fe") for b in ("lon", "pir", "dus", "gat")]
    for m in range(modules):
        text = f'"""Module {m}."""\n'
        for n in range(functions):
            said = " ".join(rng(100 * m + n).choice(words, 6))
            name = "_".join(said.split()[:2])
            text += (f"\n\ndef {name}_{n}(x):\n    \"\"\"{said.capitalize()}.\n\n    And more."
                     f"\n    \"\"\"\n    y = x + {n}  # {said.split()[0]}\n    return y\n")
        (folder / "library" / f"{m}.py").write_text(text)
    return folder


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    return write_package(tmp_path)


ENCODER_FLAGS = ("--corpus", "library", "--tokenizer", "bytes", "--n_layer", 1, "--n_head", 2,
                 "--n_embd", 16, "--block_size", 32, "--batch_size", 4, "--eval_iters", 1,
                 "--device", "cpu")


def test_the_share_of_masked_tokens(library):
    """15 % of the tokens, at every position alike; of them 80 % masked, 10 % another, 10 % kept."""
    task = data.mlm.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=40)
    x, y = task.batch("train", 4000, rng(0))
    told = y != -1
    assert (told.sum(1) == 6).all() and (x[~told] > data.text.UNK).all()
    by_position = told.sum(0)
    chi2 = ((by_position - 600) ** 2 / 600).sum() / (1 - 0.15)
    assert chi2 < 39 + 5 * math.sqrt(2 * 39)
    masked, kept = x == data.text.MASK, told & (x == y)
    other = 0.1 * (1 - 1 / (task.vocab_size - 3))  # another token may be the same one
    for share, want in ((masked[told].mean(), 0.8), (kept[told].mean(), 0.2 - other)):
        assert abs(share - want) < 5 * math.sqrt(want * (1 - want) / told.sum())
    assert (x[told & ~masked] > data.text.UNK).all()


def test_masked_windows_stay_in_their_document(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    (tmp_path / "notes").mkdir()
    for n in range(12):  # every document has a byte of its own
        (tmp_path / "notes" / f"{n}.txt").write_text(chr(97 + n) * (7 + 9 * n))
    task = data.mlm.Task(corpus=str(tmp_path / "notes"), tokenizer="bytes", block_size=30)
    windows = task.windows("train", 500, rng(0))
    for row in windows:
        real = row[row != data.text.PAD]
        assert len(set(real)) == 1 and (row[len(real):] == data.text.PAD).all() and len(real)
    assert (windows == data.text.PAD).any() and (windows != data.text.PAD).all(1).any()


def test_masked_windows_begin_anywhere_and_long_documents_have_more(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    (tmp_path / "notes").mkdir()
    for n in range(20):  # half of them 10 times as long, where a token is its place
        text = "".join(map(chr, range(32, 122))) if n % 2 else 9 * "~"
        (tmp_path / "notes" / f"{n}.txt").write_text(text)
    task = data.mlm.Task(corpus=str(tmp_path / "notes"), tokenizer="bytes", block_size=10)
    names = np.asarray(task.kept["vocabulary"])
    first = names[task.windows("train", 2000, rng(0))[:, 0] - data.text.UNK - 1]
    long, lengths = first != ord("~"), task.documents["train"][1]
    assert abs(long.mean() - (lengths == 90).sum() * 90 / lengths.sum()) < 0.05
    assert len(set(first[long].tolist())) == 81  # all places of a whole window


def test_the_vocabulary_is_the_commonest_tokens(library):
    task = data.mlm.Task(corpus=str(library / "library"), tokenizer="bytes", max_vocab=5)
    stream = task.text.tokens("train")
    common = [token for token, _ in sorted(
        ((t, (stream == t).sum()) for t in set(stream.tolist())), key=lambda p: (-p[1], p[0]))[:5]]
    assert task.vocab_size == 8 and task.kept["vocabulary"].tolist() == common
    assert [task.table[t] for t in common] == [3, 4, 5, 6, 7]
    assert task.table[255] == data.text.UNK
    task.adopt(dict(vocabulary=torch.tensor([9, 8])))  # a checkpoint's goes before
    assert task.vocab_size == 5 and task.table[8] == 4
    for wrong in ([-1], [70000], []):
        with pytest.raises(ValueError, match="vocabulary"):
            task.adopt(dict(vocabulary=torch.tensor(wrong, dtype=torch.long)))


def test_a_query_is_taken_out_of_its_document(library):
    """Every definition that a query belongs to is where `at` says, without its docstring."""
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=64)
    seen = set()
    for split in task.splits:
        documents, queries, of, at = task.collection(split, 10**6)
        texts, asked = task.read(documents), task.read(queries)
        assert len(asked) >= 2
        for query, n, where in zip(asked, of, at):
            assert query.lower() not in " ".join(texts[n].lower().split())
            assert texts[n][where:].startswith("def " + "_".join(query.lower().split()[:2]))
            end = task.pairs[f"{split}.end"][(task.pairs[f"{split}.of"] == n)
                                             & (task.pairs[f"{split}.at"] == where)].item()
            assert texts[n][:end].endswith("    return y\n") and "\n\n" not in texts[n][where:end]
            assert query not in seen
            seen.add(query)
    for first in range(50):
        x, _ = task.batch("train", 4, rng(first))
        q, d, _ = np.split(x, (task.query_size, task.query_size + 64), axis=1)
        back = np.append([0, 0, 0], task.kept["vocabulary"].numpy())
        for query, document in zip(q, d):
            words = bytes(back[query[query > 2]].tolist()).decode().lower().split()
            assert "def " + "_".join(words[:2]) in bytes(back[document].tolist()).decode()


def test_which_definitions_are_asked_for(library, monkeypatch):
    """No docstring of two definitions, at most ASKED of a test file, no answer beyond the limit."""
    def file(*names):
        return "\n\n".join(f'def f():\n    """It is {n} that does this."""\n    return "a"'
                           for n in names).encode()
    ten = [f"number{n}" for n in range(10)]
    still = file("three") + b"\n\n# it is THREE  that does this."
    texts = [("train", file("one", "same", "apart")), ("train", file("same", "two")),
             ("test", file(*ten)), ("val", file("apart", "four")), ("val", still)]
    with monkeypatch.context() as patch:
        patch.setattr(data.text, "open_corpus", lambda corpus: texts)
        splits = data.retrieval.from_documents("any")
    assert [(query, n) for query, n, _ in splits["train"][1]] == [
        ("It is one that does this.", 0), ("It is two that does this.", 1)]
    assert [query for query, *_ in splits["val"][1]] == ["It is four that does this."]
    assert len(splits["test"][1]) == data.retrieval.ASKED == 8
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=64)
    _, every, _, at = task.collection("train", 10**6)
    limit = int(np.median(at))
    documents, some, _, near = task.collection("train", limit)
    assert 0 < len(some) < len(every) and max(near) < limit
    assert max(map(len, documents)) == limit
    before = []
    for first in range(20):  # the definition begins anywhere in the first half of the window
        _, y = task.batch("train", 4, rng(first))
        answers = {n: at[task.pairs["train.of"] == n] for n in y[:, 0]}
        before += [min(a - start for a in answers[n] if a >= start) for n, start in y[:, :2]]
    assert max(before) > 20 and len(set(before)) > 10


def test_docstrings_that_stay_and_those_that_go():
    source = (
        'def a():\n    """Said in one place."""\n    return 1\n\n\n'
        'class B:\n    """Four words and more.\n\n    Not this.\n    """\n    x = 1\n\n'
        '    async def c(self):\n        r"""Within a class, too."""\n        pass\n\n\n'
        'def d(): """on the line of the def"""\n\n\n'
        'def e():\n    """Nothing but a docstring."""\n\n\n'
        'def f():\n    """Too short."""\n    return 2\n\n\n'
        'if x:\n    try:\n        pass\n    except E:\n        def g():\n'
        '            """Deep in other statements."""\n            return "ä"\n')
    document, asked = data.retrieval.without_queries(source)
    found = {query: document[at:].split("\n")[0].strip() for query, (at, _) in asked}
    assert found == {"Said in one place.": "def a():", "Four words and more.": "class B:",
                     "Within a class, too.": "async def c(self):",
                     "Deep in other statements.": "def g():"}
    ends = {query: document[:end].splitlines()[-1].strip() for query, (_, end) in asked}
    assert ends == {"Said in one place.": "return 1", "Four words and more.": "pass",
                    "Within a class, too.": "pass", "Deep in other statements.": 'return "ä"'}
    gone = "one place", "Four words", "Not this", "Within a", "Nothing but", "Too short", "Deep in"
    assert not any(words in document for words in gone)
    assert "on the line of the def" in document and 'return "ä"' in document


def test_prose_gives_up_some_sentences():
    sentences = [f"The {n}th sentence of this text has a word like w{n * n}." for n in range(200)]
    document, asked = data.retrieval.without_queries("Title, no sentence\n\n" + " ".join(sentences))
    assert 10 < len(asked) < 50
    for query, (at, end) in asked:
        assert at == end
        after = sentences.index(query) + 1
        assert query not in document
        if sentences[after] in document:
            assert document[at:].split()[:2] == sentences[after].split()[:2]


def test_where_a_sentence_ends():
    """Not within a number; behind the quotation mark that closes it."""
    text = ('He counted to number 2.13 on one old machine of theirs, item {0}. "It is done, maybe '
            'after all the days of work, {0}." Then came the rest, a line of words for item {0}! ')
    _, asked = data.retrieval.without_queries("".join(text.format(n) for n in range(300)))
    kinds = {re.sub(r"\d+([.!]\"?)$", r"N\1", query) for query, _ in asked}
    assert kinds == {"He counted to number 2.13 on one old machine of theirs, item N.",
                     '"It is done, maybe after all the days of work, N."',
                     "Then came the rest, a line of words for item N!"}


def test_the_document_of_a_last_sentence_is_not_empty(tmp_path, monkeypatch):
    """Its place is the end of the text: the window begins before it."""
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    texts = [f"It has a few words in its first sentence, number {n}. "
             f"It has a few more of them in its second, after number {n}." for n in range(200)]
    task = data.retrieval.Task(corpus=documents(tmp_path / "prose", texts), tokenizer="bytes",
                               block_size=32, query_size=32)
    at, of = task.pairs["train.at"], task.pairs["train.of"]
    assert (at == np.diff(task.pairs["train.documents.starts"])[of]).any()
    x, _ = task.batch("train", 400, rng())
    assert (x[:, 32:64] != 0).any(1).all()


def test_packages_are_split_as_a_whole(monkeypatch):
    """The largest is trained on, and a split's files are those of its packages."""
    found = {}
    for split, text in itertools.islice(data.text.packages(), 400):
        assert split in data.text.SPLITS and text is not None
        found[split] = found.get(split, 0) + 1
    assert set(found) == set(data.text.SPLITS)
    owners = {}
    real = data.text.choose_splits
    monkeypatch.setattr(data.text, "choose_splits",
                        lambda names, size: owners.update(real(names, size)) or owners)
    next(data.text.packages())
    assert owners["torch"] == "train" and {"json", "asyncio", "numpy"} <= set(owners)


def test_all_files_of_a_package_are_in_its_split(tmp_path, monkeypatch):
    for n in range(30):
        for part in range(4):
            path = tmp_path / f"package{n}" / f"{part}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"# package{n}\n" * 1000)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: dict(stdlib=str(tmp_path)))
    monkeypatch.setattr(data.text, "PACKAGES", ())
    splits = {}
    for split, text in data.text.packages():
        splits.setdefault(text.split(maxsplit=2)[1], []).append(split)
    assert len(splits) == 30 and all(len(s) == 4 and len(set(s)) == 1 for s in splits.values())
    assert {s[0] for s in splits.values()} == set(data.text.SPLITS)


def test_info_nce_is_what_the_loop_says(library):
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=32)
    model = encoder("bert_rope", vocab_size=task.vocab_size, block_size=64)
    task.begin(model)
    assert (task.kept["negatives"] >= 0).any()
    B = len(task.pairs["train.at"]) + 1  # more than there are pairs: some come twice
    x, y = map(torch.from_numpy, task.batch("train", B, rng(0)))
    got = task.loss(model, x, y)
    q, d, n = x.split((32, 32, 32), 1)
    has = (n > 0).any(1)

    def again(i, file, start):
        return file == y[i, 0] and abs(start - y[i, 1]) < 32
    with torch.no_grad():
        q, d, n = (model.embed(part) for part in (q, d, n))
        total, left_out = 0, 0
        for i in range(B):
            own = [j for j in range(B) if i == j or not again(i, *y[j, :2])]
            hard = [j for j in range(B) if has[j] and not again(i, *y[j, 2:])]
            left_out += B - len(own)
            mine = q[i] @ d[i] / 0.05
            others = [q[i] @ d[j] for j in own] + [q[i] @ n[j] for j in hard]
            total += sum((s / 0.05).exp() for s in others).log() - mine
            total += sum((q[j] @ d[i] / 0.05).exp() for j in own).log() - mine
    assert left_out and i in hard
    close(got, total / (2 * B), 1e-5)


@torch.no_grad()
def test_a_hard_negative_is_another_place_of_the_file(library):
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=32)
    task.begin(encoder("bert_nope", vocab_size=task.vocab_size))
    chosen = task.kept["negatives"].numpy()
    at, end, of = (task.pairs[f"train.{name}"] for name in ("at", "end", "of"))
    lengths = np.diff(task.pairs["train.documents.starts"])
    known = chosen >= 0
    assert known.mean() > 0.9 and (chosen[known] < lengths[of[known]]).all()
    assert (abs(chosen - at)[known] >= 64).all()
    model = encoder("bert_nope", vocab_size=task.vocab_size)
    for n in known.nonzero()[0][:5]:  # of the others the one most like the query
        places = np.arange(0, lengths[of[n]], 32)
        other = (places <= at[n] - 64) | (places >= max(at[n] + 64, end[n]))
        windows = task.cut("train.documents", np.full(len(places), of[n]), places, 32)
        query = task.cut("train.queries", np.array([n]), 0, task.query_size)
        scores = (model.embed(torch.from_numpy(windows)) @ model.embed(torch.from_numpy(query))[0])
        most = scores[torch.from_numpy(other)].max()
        assert scores[(places == chosen[n]).argmax()] == pytest.approx(most.item(), abs=1e-5)
    task.pairs["train.end"] = np.where(of == 0, lengths[0], end)  # definitions as long as the file
    task.begin(encoder("bert_nope", vocab_size=task.vocab_size))
    again = task.kept["negatives"].numpy()
    assert ((again < at) | (again < 0))[of == 0].all() and (again == chosen)[of > 0].all()


def test_ranking_by_a_worked_example():
    scores = np.array([[0.1, 0.9, 0.5], [0.3, 0.3, 0.2], [0.0, 0.2, 0.1]])
    places = evaluation.ranks(scores, np.array([2, 0, 0]))
    assert places.tolist() == [2, 2, 3]  # of two with one score, the right one comes last
    assert evaluation.ranks(np.full((2, 3), np.nan), np.array([0, 1])).tolist() == [3, 3]
    ndcg = evaluation.ndcg
    assert ndcg(places).tolist() == pytest.approx([1 / math.log2(3), 1 / math.log2(3), 0.5])
    assert ndcg(np.array([1, 10, 11])).tolist() == pytest.approx([1, 1 / math.log2(11), 0])
    found = evaluation.summary(np.array([1, 3, 10, 11]), np.arange(4), 0)
    assert {name: m["value"] for name, m in found.items()} == pytest.approx(
        {"ndcg@10": (1 + 0.5 + 1 / math.log2(11)) / 4, "recall@1": 0.25, "recall@10": 0.75})
    got = evaluation.reciprocal_rank(np.array([[0.1, 0.9, 0.5]]))
    assert got.tolist() == [[1 / 63, 1 / 61, 1 / 62]]
    halves = np.repeat([0.0, 1.0], 200)
    low, high = evaluation.bootstrap(halves, np.arange(400))
    assert 0.44 < low < 0.46 and 0.54 < high < 0.56
    assert evaluation.bootstrap(np.ones(9), np.arange(9) // 3) == (1, 1)
    assert np.isnan(evaluation.bootstrap(np.array([0, 1]), np.zeros(2))).all()  # one document
    low, high = evaluation.bootstrap(halves, np.arange(400) // 20)  # as 20 queries, not 400
    assert 0.25 < low < 0.35 and 0.65 < high < 0.75


def test_bm25_by_a_worked_example():
    documents = [["cat", "sat", "cat"], ["dog", "sat"], ["dog"]]
    got = evaluation.bm25_scores([["cat"], ["sat", "dog", "dog"], ["bird"]], documents)
    idf = {word: math.log(1 + (3 - n + 0.5) / (n + 0.5)) for word, n in
           (("cat", 1), ("sat", 2), ("dog", 2))}

    def weight(n, length):
        return n * 2.2 / (n + 1.2 * (0.25 + 0.75 * length / 2))
    want = [[idf["cat"] * weight(2, 3), 0, 0],
            [idf["sat"] * weight(1, 3), (idf["sat"] + 2 * idf["dog"]) * weight(1, 2),
             2 * idf["dog"] * weight(1, 1)], [0, 0, 0]]
    assert np.allclose(got, want, atol=1e-6)
    assert evaluation.words_of("readLine(read_line2)") == ["read", "line", "read", "line", "2"]


def test_windows_and_where_the_answer_begins():
    scores = np.array([[0.1, 0.9, 0.3, 0.2], [0.5, 0.1, 0.2, 0.6]])
    best = evaluation.best_window(scores, np.array([0, 0, 1, 2]), 3)
    assert best.tolist() == [[0.9, 0.3, 0.2], [0.5, 0.2, 0.6]]
    ones = {16: np.array([1, 1, 1])}
    whole = {8: np.array([1, 1, 99]), 16: np.array([1, 3, 99])}
    places = dict(whole=whole, windows=ones, bm25=ones)
    first = np.array([1, 1, 99])
    found = evaluation.by_evidence(places, first, np.array([0, 9, 12]), 8)
    assert found["edges"] == [0, 8, 16] and found["queries"] == [1, 2]
    assert found["whole"] == [1, 0.25] and found["first"] == [1, 0.5]
    places = dict(whole={12: whole[16]}, windows={12: ones[16]})  # a length that is no power of 2
    found = evaluation.by_evidence(places, first, np.array([0, 9, 11]), 4)
    assert found["edges"] == [0, 4, 8, 12] and found["queries"] == [1, 0, 2]
    both = {16: ones[16], 32: first}  # 16 times the training length, though more was read
    found = evaluation.by_evidence(dict(whole=both, windows=both), first, np.array([0, 0, 0]), 1)
    assert found["length"] == 16 and found["whole"][0] == 1


def test_the_loss_of_pairs_is_not_rounded_under_autocast(library):
    task = data.retrieval.Task(corpus=str(library / "library"), tokenizer="bytes", block_size=32)
    x, y = map(torch.from_numpy, task.batch("train", 12, rng()))

    def model(idx, pooled):
        return F.normalize(torch.randn(len(idx), 16, generator=torch.Generator().manual_seed(0)))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = task.loss(model, x, y)
    close(rounded, task.loss(model, x, y), 1e-6)


def test_a_search_by_an_oracle():
    """
    A vector says what a text begins with, longer where its second token is larger: the places of
    the right documents, read as a whole, in windows of 2 tokens, and beside BM25.
    """
    def embed(idx):
        return F.one_hot(idx[:, 0], 10) * (1 + idx[:, 1:2] / 100)
    model = types.SimpleNamespace(config=types.SimpleNamespace(n_embd=10), embed=embed)
    run = types.SimpleNamespace(name="oracle", model=model, config=dict(block_size=2))
    task = types.SimpleNamespace(ours=lambda texts: texts)
    documents = [np.array(x) for x in ([1, 2, 3, 4], [3, 1], [5, 6, 2, 7, 1, 9])]
    queries, of = [np.array([n, 0]) for n in (3, 2, 1)], np.array([1, 2, 0])
    bm25 = {L: np.array([[9, 1, 5], [2, 1, 3], [3, 2, 1]]) for L in (2, 4, 6)}
    found, first = evaluation.search(run, task, documents, queries, of, bm25, "cpu",
                                     contextlib.nullcontext())
    assert found.keys() == evaluation.READINGS.keys()
    assert first.tolist() == found["whole"][2].tolist()
    places = {name: {L: at.tolist() for L, at in by.items()} for name, by in found.items()}
    assert [at[0] for at in places["whole"].values()] == [1, 1, 1]
    assert places["windows"][4] == [2, 1, 1] and places["windows"][6] == [2, 1, 2]
    assert places["windows"][2][0] == places["windows"][2][2] == 1
    assert places["bm25"] == {L: [3, 1, 1] for L in (2, 4, 6)}
    assert places["whole_bm25"][4][0] == 2 and places["windows_bm25"][6][0] == 3


def test_the_files_that_answer_best(tmp_path, capsys):
    """A model that sees the share of z: the files in order, their best windows; blank ones not."""
    def embed(idx):
        share = (idx == data.text.UNK + 1 + ord("z")).sum(1) / (idx != 0).sum(1).clamp(min=1)
        return torch.stack((share, (1 - share**2).sqrt()), 1)
    model = types.SimpleNamespace(config=types.SimpleNamespace(n_embd=2), embed=embed)
    config = dict(tokenizer="bytes", vocab_size=256 + 3, block_size=8, query_size=4)
    checkpoint = dict(kept=dict(vocabulary=torch.arange(256)))
    texts = {"half.py": "z-z-z-z-", "lines.py": "--\n--\n--zz--\n", "blank.py": " \n",
             "none.py": "", "long.py": 200 * "-\n" + "z-z-z-z-"}  # beyond 32 x 8 tokens
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    prompt = b"zz--" + 30 * b"z"  # cut to four tokens: a share of one half
    sample.search(model, "r", config, checkpoint, prompt, tmp_path, "cpu",
                  contextlib.nullcontext())
    out, err = capsys.readouterr()

    def score(share):
        return f"{0.5 * share + math.sqrt(0.75 * (1 - share**2)):.3f}"
    assert out.splitlines() == [f"{score(.5)}  half.py:1  z-z-z-z-",
                                f"{score(2 / 13)}  lines.py:3  zz--",
                                f"{score(0)}  long.py:201  z-z-z-z-"]
    assert err == "1 of 3 files are ranked by their first 256 tokens\n"
    for name in ("half.py", "lines.py", "long.py"):
        (tmp_path / name).unlink()
    with pytest.raises(SystemExit, match="has no text in it"):
        sample.search(model, "r", config, checkpoint, prompt, tmp_path, "cpu", None)


def test_what_is_asked_in_a_search(library, monkeypatch):
    """Every query with its own document, BM25 of what is cut, the interval over documents."""
    command(library, "train.py", "--data", "retrieval", *ENCODER_FLAGS, "--query_size", 16,
            "--max_iters", 1, "--no-evaluate", "--out_dir", "r")
    asked, grouped = [], []
    search, bootstrap = evaluation.search, evaluation.bootstrap

    def noted(*args):
        asked.append(args)
        return search(*args)

    def by(values, groups, seed):
        grouped.append(groups)
        return bootstrap(values, groups, seed)
    monkeypatch.setattr(evaluation, "search", noted)
    monkeypatch.setattr(evaluation, "bootstrap", by)
    command(library, "eval.py", "r", "--lengths", 32, 512, "--queries", 4, "--split", "train",
            draw=True)
    (_, task, documents, queries, of, bm25, *_), = asked
    _, every, its, _ = task.collection("train", 512)
    pairs = {(tuple(text), n) for text, n in zip(map(np.ndarray.tolist, every), its.tolist())}
    drawn = {(tuple(text.tolist()), n) for text, n in zip(queries, of.tolist())}
    assert drawn <= pairs and len(queries) == 4 and len({n for _, n in pairs}) > 1
    words = [evaluation.words_of(text) for text in task.read(queries)]
    for L in (32, 512):
        texts = task.read([tokens[:L] for tokens in documents])
        cut = [evaluation.words_of(text) for text in texts]
        assert np.array_equal(bm25[L], evaluation.bm25_scores(words, cut))
    assert all(np.array_equal(groups, of) for groups in grouped)
    assert "must be multiples of the training length, 32" in complaint(
        library, "eval.py", "r", "--lengths", 33)
    found = json.loads((library / "r" / "eval.json").read_text())
    assert found["answers"] == of.tolist() and found["runs"][0]["by_answer_at"]["queries"]
    prepare = data.retrieval.prepare

    def without_places(*args):  # as MLDR: nobody knows where the answers are
        corpus, pairs = prepare(*args)
        return corpus, dict(pairs) | {"train.at": np.zeros_like(pairs["train.at"])}
    monkeypatch.setattr(data.retrieval, "prepare", without_places)
    command(library, "eval.py", "r", "--lengths", 32, 512, "--queries", 4, "--split", "train")
    row, = json.loads((library / "r" / "eval.json").read_text())["runs"]
    assert row["by_answer_at"] is None


def test_from_masked_tokens_to_search(library, monkeypatch):
    """mlm, retrieval, eval, search; both trainings interrupted and continued, bit for bit."""
    common = ENCODER_FLAGS
    command(library, "train.py", "--data", "mlm", *common, "--max_iters", 6, "--eval_interval", 3,
            "--out_dir", "m", "--no-evaluate")
    cases = ("mlm", ()), ("retrieval", ("--init_from", "m", "--query_size", 16))
    for name, more in cases:
        flags = "--data", name, *common, *more, "--lr_decay_iters", 4, "--eval_interval", 2
        command(library, "train.py", *flags, "--max_iters", 4, "--out_dir", f"{name}-4",
                "--no-evaluate")
        command(library, "train.py", *flags, "--max_iters", 2, "--out_dir", f"{name}-2",
                "--no-evaluate")
        command(library, "train.py", "--resume", f"{name}-2", "--max_iters", 4, "--no-evaluate")
        whole, twice = (torch.load(library / f"{name}-{n}" / "ckpt.pt") for n in (4, 2))
        assert whole["kept"].keys() == twice["kept"].keys()
        assert all(torch.equal(whole["kept"][k], twice["kept"][k]) for k in whole["kept"])
        assert all(torch.equal(whole["model"][k], twice["model"][k]) for k in whole["model"])
    command(library, "eval.py", "mlm-4", "--lengths", 32, 64, "--sequences", 8)
    out, _ = command(library, "eval.py", "retrieval-4", "--lengths", 32, 512, "--queries", 5,
                     draw=True)
    found = json.loads((library / "retrieval-4" / "eval.json").read_text())
    assert found["queries"] == 5 and found["documents"] > 1
    _, heads, *rows = out[out.index("\nretrieval-4\n"):].strip().splitlines()
    ends = [n.end() for n in re.finditer(r"[\d,.]+(?!\S)", heads)]
    assert heads.split() == ["tokens", "32", "512"] and len(ends) == 2
    assert [n.end() for n in re.finditer(r"± \d+\.\d", rows[0])] == ends
    assert re.search(r"\nwhole, recall@10( +\d+\.\d ± \d+\.\d){2}\n", out)
    assert re.search(r"\nqueries( +\d+){5}\n", out) and re.search(r"\nfirst( +[\d.-]+){5}\n", out)
    places = range(1, min(10, found["documents"]) + 1)
    chance = sum(1 / math.log2(1 + place) for place in places) / found["documents"]
    assert found["chance"] == pytest.approx(chance)
    row = found["runs"][0]
    assert set(row["search"]) == set(evaluation.READINGS)
    assert row["search"]["whole"]["32"] == row["search"]["windows"]["32"]
    for scores in row["search"]["bm25"].values():
        assert scores["ndcg@10"]["low"] <= scores["ndcg@10"]["value"] <= scores["ndcg@10"]["high"]
    assert is_png(library / "retrieval-4" / "eval.png")
    out, _ = command(library, "sample.py", "retrieval-4", "--prompt", "talon", "--data", "library")
    assert len(out.splitlines()) == 10 and re.match(r"-?\d\.\d{3}  \d+\.py:\d+  ", out)
    scores = [float(line.split()[0]) for line in out.splitlines()]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]


@pytest.mark.slow
def test_from_masked_tokens_to_search_in_processes_of_their_own(repo, tmp_path):
    """The four commands of README, on files of one's own, in the folders that they name."""
    folder = tmp_path / "clone"
    shutil.copytree(repo, folder)
    write_package(folder)
    few = *ENCODER_FLAGS, "--max_iters", 2, "--no-evaluate"
    out, _ = process(folder, "train.py", "--data", "mlm", *few)
    assert "writing to out/bert_cable-mlm-nano" in out
    process(folder, "train.py", "--data", "retrieval", "--init_from", "out/bert_cable-mlm-nano",
            *few, "--query_size", 16)
    out, _ = process(folder, "eval.py", "out/bert_cable-retrieval-nano", "--queries", 3,
                     "--lengths", 32, 64)
    assert "whole, recall@10" in out and is_png(folder / "out/bert_cable-retrieval-nano/eval.png")
    out, _ = process(folder, "sample.py", "out/bert_cable-retrieval-nano", "--data", "library",
                     "--prompt", "talon")
    assert len(out.splitlines()) == 10


def test_what_an_encoder_refuses(library, trained):
    common = *ENCODER_FLAGS, "--max_iters", 1, "--no-evaluate"
    command(library, "train.py", "--data", "mlm", *common, "--out_dir", "m")
    command(library, "train.py", "--data", "retrieval", "--model", "bert_learned", *common,
            "--query_size", 16, "--out_dir", "r")
    start = "train.py", "--data", "retrieval", "--query_size", 16, *common
    (library / "empty").mkdir()
    for words, said in (
            ((*start, "--model", "cable"), "retrieval needs an encoder, which reads both ways"),
            (("train.py", "--model", "bert_rope", "--data", "library"), "needs a causal model"),
            ((*start, "--batch_size", 1), "needs a --batch_size of at least 2 for each"),
            ((*start, "--init_from", "m", "--n_embd", 32), "its n_embd is 16, the new run's 32"),
            ((*start, "--init_from", "m", "--model", "bert_rope"), "its model is bert_cable, "),
            ((*start, "--init_from", "gone"), "no checkpoint at gone"),
            ((*start, "--init_from", trained / "cable"), "its model is cable, the new run's bert_"),
            ((*start, "--temperature", 0), "temperature=0.0 must be more than 0"),
            (("sample.py", "r"), "is an encoder, which writes no text"),
            (("sample.py", "r", "--prompt", "", "--data", "library"), "the prompt is empty: a"),
            (("sample.py", "r", "--prompt", " \n ", "--data", "library"), "the prompt is empty: a"),
            (("sample.py", "r", "--prompt", "x", "--data", "empty"), "has no text in it"),
            (("sample.py", "r", "--prompt", "x", "--data", "gone"), "no such corpus"),
            (("sample.py", "m", "--prompt", "x", "--data", "library"),
             "pairs first: train.py --model bert_cable --init_from m ..."),
            (("sample.py", "r", "--prompt", "\ufeff\xa0", "--data", "library"), "is empty: a"),
            (("sample.py", trained / "cable", "--data", "library"), "--data is for encoders"),
            (("maps.py", "attention", "m"), "is an encoder, which sees later tokens, too"),
            (("eval.py", "r", "--sequences", 3), "--sequences is for a synthetic task"),
            (("eval.py", "m", "--queries", 3), "--queries is for a search")):
        assert said in complaint(library, *words), words
    out, err = command(library, "sample.py", "r", "--prompt", "x", "--data", "library")
    assert len(out.splitlines()) == 10
    assert re.search("learned positions end at .*\n.* files are ranked by their first 32 tok", err)
    out, _ = command(library, "eval.py", "r", "--lengths", 32, 512)  # windows can be read
    assert re.search(r"\nwhole +\S+ ± \S+ +-\n", out)
    assert re.search(r"\nwindows( +\d\S+ ± \S+){2}\n", out)
    (library / "one").mkdir()
    (library / "one" / "a.py").write_text("x = 1\n")
    (library / "short").mkdir()
    for n in range(9):
        (library / "short" / f"{n}.py").write_text(f"x = {n}\n")
    (library / "few").mkdir()
    for n in range(14):  # one in val, and all that is asked is of it
        (library / "few" / f"{n}.py").write_text("\n".join(
            f'def f_{n}_{k}():\n    """Say the word {k} of the file {n}."""\n    return {k}\n'
            for k in range(2)))
    for folder, said in (("empty", "has no text in it"), ("one", "has too few documents"),
                         ("short", "has too few pairs of query and document"),
                         ("few", "has a single document to search in its test split")):
        assert said in complaint(library, *start, "--corpus", folder)
    (library / "library" / "0.py").write_text("changed = 1\n")
    assert "is not what r" in complaint(library, "eval.py", "r")
    command(library, "eval.py", "r", "--data", "library", "--lengths", 32)  # named: all the same
    found = json.loads((library / "r" / "eval.json").read_text())
    assert found["data"]["corpus"] == str(library / "library")
    assert "no such corpus" in complaint(library, "eval.py", "r", "--data", "mlm")
    assert "score them one by one" in complaint(library, "eval.py", "m", "r")
    said = complaint(library, "eval.py", trained / "cable", "r", "--data", "library")
    assert "score them one by one" in said
    assert "too large to search" in complaint(library, *start, "--corpus", "fineweb_edu")


def test_pairs_of_the_paper(tmp_path, monkeypatch):
    """MS MARCO's triples to train on, MLDR's long documents to test: small files in their form."""
    passages = [f"Passage {n} says a thing." for n in range(2100)]
    triples = [dict(query=f"what says {n % 1020}?", positive=passages[n], negative=passages[n + 1])
               for n in range(1060)]
    long = [dict(docid=str(n), text=f"Long text {n}. " * 50) for n in range(12)]
    asked = [dict(query_id="1", query="which is long?", positive_passages=[long[3]],
                  negative_passages=[long[5]]) for _ in range(3)]
    for name, rows in dict(corpus=long, test=asked).items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)

    def load_dataset(repository, config, split, data_files=None):
        assert split == "train"
        if data_files is None:
            assert (repository, config) == (data.retrieval.MSMARCO, "triplet-hard")
            return triples
        folder, _, name = data_files.rpartition("/")
        assert (repository, folder) == ("json", data.retrieval.MLDR)
        with gzip.open(tmp_path / name, "rt") as f:
            return [json.loads(line) for line in f]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(data.text, "PREPARED", tmp_path)
    task = data.retrieval.Task(corpus="msmarco", tokenizer="bytes", block_size=32)
    # 1000 to 1019 and 1020 to 1059, of which all but the last 20 + 20 ask what is held out
    assert [len(task.pairs[f"{split}.at"]) for split in task.splits] == [20, 1000, 3]
    x, y = task.batch("train", 20, rng(0))
    assert (y[:, 1] == 0).all() and (y[:, 3] == 0).all() and (y[:, 2] != y[:, 0]).all()
    back = np.append([32] * 3, task.kept["vocabulary"].numpy())
    for row in x:
        query, document, negative = (bytes(back[part].tolist()).decode().strip()
                                     for part in np.split(row, (32, 64)))
        n = int(query[10:-1])
        assert 1000 <= n < 1020 and document == passages[n] and negative == passages[n + 1]
    documents, queries, of, at = task.collection("test", 10**6)
    assert len(documents) == 12 and of.tolist() == [3, 3, 3] and not at.any()
    task.begin(None)  # mines nothing: they are given
    assert "negatives" not in task.kept


# -----------------------------------------------------------------------------
# data: the contract

def write_task(folder, name, text):
    (folder / f"{name}.py").write_text(text)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder whose files are tasks, too: data/ as it would be with a user's own in it."""
    for path in data.FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data, "__path__", [*data.__path__, str(tmp_path)])
    yield tmp_path
    known = {f"data.{path.stem}" for path in (ROOT / "data").glob("*.py")}
    for name in [name for name in sys.modules if name.startswith("data.")]:
        if name not in known:
            del sys.modules[name]


TWO_MEMBERS = """
import numpy as np
class Task:
    vocab_size = 3
    def batch(self, split, batch_size, rng):
        x = rng.integers(0, 3, (batch_size, self.block_size))
        y = np.where(x > 0, 3 - x, -1)
        return x, y
"""


def test_what_a_task_leaves_out_is_plain(tasks):
    """A class that is no dataclass and inherits nothing, with a batch and a vocab_size."""
    write_task(tasks, "bare", TWO_MEMBERS)
    cls = data.find("bare")
    task = data.make(dict(data="bare", block_size=6))
    assert issubclass(cls, data.Task) and "bare" in data.known()
    assert (task.block_size, task.kind, task.splits) == (6, "symbols", ("train", "iid"))
    assert task.defaults == {"nano": {}} and task.source == "" and task.stretches
    assert task.target is None and task.contrast is None
    x, y = map(torch.from_numpy, task.batch("iid", 4, rng()))
    logits = F.one_hot(y.clamp(min=0), 3).float()
    logits[0] = 0
    (metric, (count, out_of)), = task.score(logits, x, y).items()
    assert metric == "accuracy" and out_of.tolist() == (y != -1).sum(1).tolist()
    assert count.tolist() == [0, *out_of.tolist()[1:]]
    assert task.show(x[0].numpy()) == [str(int(t)) for t in x[0]]
    assert task.loss is None and task.begin is None  # the model's own loss, nothing before


def test_a_users_own_fields_are_kept(tasks):
    write_task(tasks, "own", TWO_MEMBERS.replace(
        "    vocab_size = 3", "    block_size = 12\n    k: int = 5  # a flag\n    vocab_size = 3"))
    task = data.make(dict(data="own", k=7))
    assert (task.block_size, task.k) == (12, 7)
    assert data.make(dict(data="own", block_size=9)).block_size == 9


@pytest.mark.parametrize("change, says", [
    (("def batch", "def batches"), "data/bad.py: class Task has no batch(self, split, batch_size"),
    (("class Task", "class Tasks"), "data/bad.py has no class Task"),
    (("import numpy", "import nunpy"), "data/bad.py cannot be used (ModuleNotFoundError"),
    (("def batch(", "def batch(("), "data/bad.py cannot be used (SyntaxError"),
    (("def batch", "def __init__"), "Task has an __init__; use fields, and __post_init__"),
    (("vocab_size = 3", "kind, vocab_size = 'tokens', 3"), "kind='tokens' is not one of text"),
    (("vocab_size = 3", "splits, vocab_size = ('train',), 3"), "splits needs two names or more"),
    (("vocab_size = 3", "defaults, vocab_size = {}, 3"), "defaults needs a size, for example"),
])
def test_a_task_that_lacks_something_is_named(tasks, change, says):
    assert change[0] in TWO_MEMBERS
    write_task(tasks, "bad", TWO_MEMBERS.replace(*change))
    with pytest.raises(ValueError) as e:
        data.make(dict(data="bad"))
    assert says in str(e.value) and "\n" not in str(e.value)
    assert data.make(dict(data="flipflop")).vocab_size == 5  # nobody else is disturbed


def test_auc_is_the_share_of_pairs():
    g = rng(1)
    logits = g.integers(0, 6, (40, 7)).astype(np.float32)  # with many ties
    positive = g.random((40, 7)) < 0.4
    positive[:, 3], positive[:, 5] = True, False
    got = data.auc(logits, positive)
    for t in range(7):
        high, low = logits[positive[:, t], t], logits[~positive[:, t], t]
        pairs = (high[:, None] > low) + (high[:, None] == low) / 2
        assert np.isnan(got[t]) if t in (3, 5) else got[t] == pytest.approx(pairs.mean())
    logits[0, 0] = np.nan
    assert np.isnan(data.auc(logits, positive)[0])


def test_binned():
    values = np.array([[1.0, np.nan, 3, 5, np.nan], [np.nan, np.nan, 2, 2, 8]])
    got = data.binned(values, [0, 2, 4, 5])
    assert got[0, :2].tolist() == [1, 4] and got[1, 1:].tolist() == [2, 8]
    assert np.isnan([got[0, 2], got[1, 0]]).all()


def test_intervals():
    one = np.ones(100)
    p, low, high = evaluation.interval(np.zeros(100), one)  # Wilson's: z^2 / (n + z^2)
    assert (p, low) == (0, 0) and high == pytest.approx(1.96**2 / (100 + 1.96**2))
    p, low, high = evaluation.interval(np.repeat([0, 1], 50), one)
    assert p == 0.5 and (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    for n in range(1, 120):  # no width lost to rounding
        _, low, high = evaluation.interval(np.array([n]), np.array([120]))
        assert high - low > 0.1
    for n in range(1, 300):  # nor beyond the rate itself
        for rate in (0, 1):
            p, low, high = evaluation.interval(np.full(n, 3 * rate), np.full(n, 3))
            assert low <= p == rate <= high
    # reads that are wrong together say less than as many independent ones
    together = evaluation.interval(np.repeat([0, 10], 50), one * 10)
    apart = evaluation.interval(np.repeat([0, 1], 500), np.ones(1000))
    assert together[2] - together[1] == pytest.approx(3.1 * (apart[2] - apart[1]), rel=0.05)
    assert together[1:] == pytest.approx((0.4038, 0.5962), abs=1e-4)
    covered = 0  # over many draws the truth lies inside about 95 times in 100
    for seed in range(400):
        out_of = rng(seed).integers(1, 9, 200)
        bad = rng(seed + 1000).beta(0.3, 2.7, 200)  # strings differ; 0.1 on average
        _, low, high = evaluation.interval(rng(seed + 2000).binomial(out_of, bad), out_of)
        covered += low <= 0.1 <= high
    assert 365 <= covered <= 395


# -----------------------------------------------------------------------------
# experiments: variants that exist for one table

def counted_layer(x, model, layer):
    """A layer that uses CoPE's count, from its paper's formulas, for every variant (B, T, C)."""
    attn, c, pos = model.h[layer].attn, model.config, model.pos_emb[layer % len(model.pos_emb)]
    without = c.first and layer > 0
    B, T, C = x.shape

    def split(weight):  # -> (B, H, T, d)
        return (x @ weight.T).view(B, T, c.n_head, -1).transpose(1, 2)
    q, k, v = (split(weight) for weight in attn.c_attn.weight.chunk(3))
    if c.qk_norm:
        q, k = (z / z.square().mean(-1, keepdim=True).sqrt() for z in (q, k))
    plain = q
    if c.plus == "rope":
        rope = model_classics.RoPE(model_classics.GPTConfig())
        q, k = rope.rotate(q, k, torch.arange(T))
    own = split(attn.w_g.weight) if c.gates == "sep" else None
    gate_keys = dict(key=k, val=v, sep=own)[c.gates]

    def bias(b, h, i, j):
        gates = torch.sigmoid(gate_keys[b, h, j:i + 1] @ q[b, h, i] / math.sqrt(q.size(3)))
        p, row = gates.sum().item(), plain[b, h, i]
        if without:
            return 0.0
        if c.position != "alibi":  # whose Eq. 10 has no p_max
            p = min(p, c.P - 1)
        if c.drop and gates.sum() > c.P - 1 or c.window and i - j >= c.window:
            return -math.inf
        if c.position == "embedding":
            z = row @ pos.pos_emb
            found = z[math.floor(p)] * (1 - p + math.floor(p))
            found = found + z[math.ceil(p)] * (p - math.floor(p))
        elif c.position == "alibi":
            found = -pos.m[h] * p
        else:
            found = row @ pos.mlp(torch.tensor([p], dtype=torch.float64))
        if c.plus == "relative" and i - j < c.block_size:
            found = found + row @ pos.relative.e[:, i - j]
        return found
    return naive(q, k, v, bias).transpose(1, 2).reshape(B, T, C) @ attn.c_proj.weight.T


@pytest.mark.parametrize("name, changes, tables_of_its_own", [
    ("cope_mlp", {}, 1), ("cope_mlp_first", {}, 2), ("cope_alibi", {}, 2),
    ("cope_relative", {}, 1), ("cope_rope", {}, 1), ("cope_mlp", dict(gates="val"), 1),
    ("cope_mlp", dict(qk_norm=True, share=False), 2), ("cope_relative", dict(gates="sep"), 1),
    ("cope_alibi", dict(slopes="1,.5,2,0.1"), 1), ("cope_drop", dict(P=4), 1),
    ("cope_window", dict(window=5), 1)])
def test_every_use_of_copes_count_is_its_formula(name, changes, tables_of_its_own):
    model, found = make(name, block_size=9, **changes).double(), []
    for block in model.h:
        block.attn.register_forward_hook(lambda _, args, y: found.append((args[0], y)))
    with torch.no_grad():
        model(torch.randint(0, 61, (1, 14)))
        for layer, (x, y) in enumerate(found):
            close(y, counted_layer(x, model, layer), 1e-5)
    assert len(found) == 2 and len(model.pos_emb) == tables_of_its_own


def test_an_mlp_of_a_count_is_a_line_between_knots():
    pos = cope_variants.Position(cope_variants.GPTConfig(n_embd=8, n_head=2, position="mlp"))
    pos.double()
    with torch.no_grad():
        for weights in pos.parameters():
            weights.normal_()
        pos.mlp[0].bias.mul_(9)                                     # knots among the counts
        pos.mlp[0].weight[:3], pos.mlp[0].bias[:3, None] = 0, torch.tensor([[-1.], [0.], [2.]])
    q = torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    p = (torch.rand(2, 2, 5, 7, dtype=torch.float64) * 20).requires_grad_()
    weights = torch.randn(p.shape, dtype=torch.float64)
    close(found := pos(q, p), wanted := (pos.mlp(p[..., None]) * q[..., None, :]).sum(-1), 1e-9)
    for mine, theirs in zip(*(torch.autograd.grad((y * weights).sum(), [q, p, *pos.parameters()])
                              for y in (found, wanted))):
        close(mine, theirs, 1e-9)


def test_a_table_is_cut_in_a_trained_run(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    for name in ("cope", "rope"):
        more = ("--P", 16) if name == "cope" else ()
        command(home, "train.py", "--model", name, *more, "--data", "flipflop", "--max_iters", 1,
                "--no-evaluate", *TINY_FLAGS, "--out_dir", name)
    checkpoint = torch.load("cope/ckpt.pt", weights_only=True)
    checkpoint["model"]["pos_emb.0"].normal_()
    torch.save(checkpoint, "cope/ckpt.pt")

    def read(P, *more):
        cope_cut.main(["cope", "--P", str(P), *more, "--out", "cut"])
        folder = capsys.readouterr().out.split()[-1]
        model, config, _ = runs.load_run(Path(folder) / "ckpt.pt", torch.device("cpu"))
        assert config["P"] == P and ("drop" in folder) == ("--drop" in more)
        with torch.no_grad():
            return model(torch.arange(30)[None] % 5)[0]
    shorter = model_cope.GPT(model_cope.GPTConfig(**runs.pick(
        model_cope.GPTConfig, checkpoint["config"] | dict(P=3)))).eval()
    weights = checkpoint["model"]
    shorter.load_state_dict(weights | {"pos_emb.0": weights["pos_emb.0"][:, :3]})
    with torch.no_grad():
        close(read(3), shorter(torch.arange(30)[None] % 5)[0], 1e-5)
    close(read(16, "--drop")[:, :15], whole := read(16)[:, :15], 1e-5)  # 15 keys count less
    close(read(16, "--window", "15")[:, :15], whole, 1e-5)
    assert (read(4, "--drop") - read(4)).abs().max() > 1e-4
    for words, says in ((["rope", "--P", "3"], "is rope, not cope"),
                        (["cope", "--P", "17"], "has 16 positions: --P must be from 2 to that"),
                        (["cope", "--P", "1"], "has 16 positions: --P must be from 2 to that"),
                        (["cope", "--window", "-1"], "--window must be 0 or more"),
                        (["cope", "--P", "3"], "cope-3 holds a run: move it away")):
        with pytest.raises(SystemExit, match=says):
            cope_cut.main([*words, "--out", "cut"])


def test_tables_of_the_variants_start_at_zero_and_learned_slopes_too():
    def made(name, **changes):
        return runs.make_model(runs.models()[name][1] | TINY | dict(model=name) | changes)
    for name in ("cope_alibi", "cope_relative"):
        assert all((p == 0).all() for p in made(name).pos_emb.parameters())
    given = made("cope_alibi", slopes="1,0.5,0.25,0.125").pos_emb[0]
    assert given.m.tolist() == [1, 0.5, 0.25, 0.125] and not list(given.parameters())


@pytest.mark.parametrize("distance", ["survivors", "plain", "none"])
@pytest.mark.parametrize("drop", [True, False])
def test_the_parts_of_tra(drop, distance, monkeypatch):
    """The threshold and the distance, each with and without the other, pair by pair."""
    q, k, v = random_qkv(1, 2, 9, 13, 6)
    q[0, 0, 0] = 0  # no score above 0
    log_decay = F.logsigmoid(torch.randn(1, 2, 9, dtype=torch.float64))
    want = torch.zeros(1, 2, 9, 6, dtype=torch.float64)
    for h, i in itertools.product(range(2), range(9)):
        scores = [(q[0, h, i] @ k[0, h, j]).item() / math.sqrt(6) for j in range(i + 5)]
        weights = {}
        for j, s in enumerate(scores):
            far = dict(plain=i + 5 - j, none=0, survivors=sum(x > 0 for x in scores[j:]))[distance]
            if s > 0 or not drop:
                weights[j] = math.exp(s + far * log_decay[0, h, i].item())
        for j, weight in weights.items():
            want[0, h, i] += weight / sum(weights.values()) * v[0, h, j]
    for rows in (128, 4, 1):
        monkeypatch.setattr(tra_variants, "ROWS", rows)
        close(tra_variants.parts_attention(q, k, v, log_decay, drop, distance), want, 1e-12)
    if drop and distance == "survivors":
        close(model_tra.tra_attention(q, k, v, log_decay), want, 1e-12)


def test_names_mean_what_the_tables_say():
    """Of each file with several, but for those that other tests tell apart."""
    means = dict(
        k_cable=dict(log_kernel="outside"), k_cable_inside=dict(log_kernel="inside"),
        cable_nw_softplus=dict(weight=False, step="softplus"), cope_val=dict(gates="val"),
        cope_sep=dict(gates="sep"), tra_kept=dict(drop=False), tra_plain=dict(distance="plain"),
        tra_no_decay=dict(distance="none"), tra_decay=dict(drop=False, distance="plain"),
        outputnorm=dict(norm="output"), prefinalnorm=dict(norm="pre_final"))
    assert {name: runs.models()[name][1] for name in means} == means


@pytest.mark.parametrize("name", ["tra_kept", "tra_plain", "tra_no_decay", "tra_decay"])
def test_a_variant_of_tra_computes_what_it_is_called(name):
    model = make(name)
    with torch.no_grad(), runs.spy(model) as calls:
        model(torch.randint(0, 61, (1, 9)))
    assert [call[4:] for call in calls] == 2 * [(model.config.drop, model.config.distance)]


def test_tra_taken_apart_and_whole_again():
    tra, parts = make("tra"), make("tra_plain", distance="survivors")
    parts.load_state_dict(tra.state_dict())
    idx = torch.randint(0, 61, (2, 30))
    with torch.no_grad():
        close(tra(idx)[0], parts(idx)[0], 1e-5)
    with pytest.raises(SystemExit, match="distance='far' is not one of survivors, plain, none"):
        make("tra_plain", distance="far")


def test_lambda_of_diff_stays_finite():
    """Both of its exponentials would be infinite, and their difference not a number."""
    model = make("diff")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(100)
        assert model(torch.randint(0, 61, (2, 30)))[0].isfinite().all()


def test_hard_attention_takes_the_best_key_and_has_the_soft_gradient(monkeypatch):
    monkeypatch.setattr(learned_hard, "ROWS", 7)
    q, k, v = (x.requires_grad_() for x in random_qkv())
    logits = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(37, 37).triu(1).bool(), -torch.inf)
    hard = F.one_hot(logits.argmax(-1), 37).double()
    close(learned_hard.hard_attention(q, k, v), hard @ v, 1e-12)
    few = learned_hard.hard_attention(q[:, :, -5:], k, v)
    close(few, (hard @ v)[:, :, -5:], 1e-12)
    soft = (logits / math.sqrt(q.size(3))).softmax(-1)
    weights = torch.randn_like(q)
    ours = torch.autograd.grad((learned_hard.hard_attention(q, k, v) * weights).sum(), (q, k, v))
    by_q_and_k = torch.autograd.grad((soft @ v * weights).sum(), (q, k))
    for a, b in zip(ours, (*by_q_and_k, hard.transpose(-1, -2) @ weights)):
        close(a, b, 1e-12)


def test_hard_attention_with_learned_positions_by_hand():
    """The first block: x + position, then every head takes the key that it likes best."""
    model = make("learned_hard").double()
    idx, attn = torch.randint(0, 61, (1, 12)), model.h[0].attn
    with torch.no_grad():
        found = []
        attn.register_forward_hook(lambda _, args, y: found.append((args[0], y)))
        model(idx)
        x, y = found[0]
        embedded = model.wte(idx) + model.pe[0].wpe(torch.arange(12))
        close(x, model.h[0].ln_1(embedded), 1e-12)
        q, k, v = ((x @ w.T).view(12, 4, 8).transpose(0, 1) for w in attn.c_attn.weight.chunk(3))
        for h, i in itertools.product(range(4), range(12)):
            best = (k[h, :i + 1] @ q[h, i]).argmax()
            q[h, i] = v[h, best]  # its row is not needed any more
        close(y[0], q.transpose(0, 1).reshape(12, 32) @ attn.c_proj.weight.T, 1e-12)


# -----------------------------------------------------------------------------
# experiments: Post-Norm's minimal models

def gaps(model, n, lengths, sets=20):
    """
    -> {length: (gap of the last token, least and largest gap of the others, TVD)}: how far present
    tokens are below absent ones.
    """
    draws = (torch.Generator().manual_seed(i) for i in range(sets))
    tokens = torch.stack([torch.randperm(n, generator=g) for g in draws])
    with torch.no_grad():
        logits = model(tokens[:, :n - 1])
    found = {}
    for length in lengths:
        here = logits[:, length - 1].gather(1, tokens)  # present tokens first
        absent = here[:, length:]
        close(absent - absent.mean(1, keepdim=True), torch.zeros_like(absent), 1e-9)
        below = absent.mean(1, keepdim=True) - here[:, :length]
        target = torch.cat((torch.zeros(length), torch.ones(n - length) / (n - length)))
        last, others = below[:, -1], below[:, :-1]
        distance = (here.softmax(-1) - target).abs().sum(1).mean() / 2
        found[length] = last.min().item(), others.min().item(), others.max().item(), distance.item()
    return found


@pytest.mark.parametrize("n", [4, 10, 64])
def test_the_hard_coded_model_has_the_theorems_gaps(n):
    c = 3.0
    for centred in (False, True):
        model = minimal.hard_coded(n, c, centred=centred)
        for length, (last, low, high, _) in gaps(model, n, range(2, n)).items():
            assert last == pytest.approx(c * (1 + 1 / length), abs=1e-6)
            assert (low, high) == pytest.approx((c / length, c / length), abs=1e-6)
    model = minimal.hard_coded(n, c, "output", centred=True)
    for length, (_, low, high, _) in gaps(model, n, range(2, n)).items():
        want = c * math.sqrt(n * (n - 1) / (length * (n - length)))
        assert (low, high) == pytest.approx((want, want), rel=1e-3)
        assert want >= 2 * c * math.sqrt((n - 1) / n) - 1e-9


def test_theorem_entry_has_the_specs_numbers():
    found = minimal.theorem()["models"]
    wanted = dict(none=((10, 2.50, 0.62, 0.32), (0.010, 0.341, 0.978)),
                  output=((10, 5.26, 3.48, 14.03), (0.001, 0.029, 0.0)))
    for norm, (precision, tvd) in wanted.items():
        m = found[norm]
        assert [round(m["precision"][n - 2], 2) for n in (2, 8, 32, 63)] == list(precision)
        assert [round(m["tvd"][n - 2], 3) for n in (8, 32, 63)] == list(tvd)
        assert m["formula"] == pytest.approx(m["precision"], abs=1e-6 if norm == "none" else 1e-3)
    for norm, at_32 in (("post", 0.96), ("pre_final", 2.64)):  # the controls, by their own formulas
        m = found[norm]
        assert m["formula"] == pytest.approx(m["precision"], abs=1e-6)
        assert m["precision"][0] == pytest.approx(10)
        assert m["precision"][30] == pytest.approx(at_32, abs=0.01)


def test_theorem_4_2():
    """
    Dimensions are minimal; precision at length 2 carries over as 2C / l when b >= 0, and fails
    with b < 0 (n = 10, g = 3, b = -.5, l = 6).
    """
    n = 10
    model = minimal.hard_coded(n, 2.0)
    B, D = model.E @ model.U, model.E @ model.W_V @ model.W_O @ model.U
    assert torch.linalg.matrix_rank(B + D) >= n - 1 and torch.linalg.matrix_rank(D) >= n - 1
    g, eye = torch.Generator().manual_seed(0), torch.eye(n, dtype=torch.float64)
    for b in (0.7, -0.5):
        r, s, delta = torch.randn(3, n, generator=g, dtype=torch.float64)
        D = r[:, None] + delta - 3 * eye
        B = s[:, None] - delta - b * eye
        free = minimal.MinimalTransformer(n, n, 1, n, constant=True).double()
        with torch.no_grad():  # E = I, U = I: B and D as they are
            for name, w in dict(E=eye, U=eye, W_V=D, W_O=eye).items():
                getattr(free, name).copy_(w)

        def forward(idx, B=B, free=free):
            return B[idx] + free.attend(free.E[idx])
        found = gaps(forward, n, range(2, n))
        for length, (last, low, high, _) in found.items():
            assert last == pytest.approx(b + 3 / length, abs=1e-9)
            assert (low, high) == pytest.approx((3 / length, 3 / length), abs=1e-9)
        C = min(found[2][:2])
        least = {length: min(last, low) for length, (last, low, *_) in found.items()}
        assert all(y >= 2 * C / length - 1e-9 for length, y in least.items()) == (b >= 0)
        if b < 0:
            assert abs(found[6][0]) < 1e-9  # the gap is gone


@pytest.mark.parametrize("norm", ["none", *minimal.SCHEMES])
@pytest.mark.parametrize("constant", [True, False])
def test_the_minimal_transformer_is_equation_3(norm, constant):
    torch.manual_seed(0)
    model = minimal.MinimalTransformer(7, 5, 2, 3, norm, constant).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))

        def N(x, layer):
            return x / (x.square().mean() + 1e-12).sqrt() * layer.weight

        def weight(query, key):
            return 1.0 if constant else math.exp((query @ model.W_Q) @ (key @ model.W_K))
        tokens = [3, 1, 6, 0]
        for t in range(4):
            xs = [model.E[i] for i in tokens[:t + 1]]
            if norm == "peri_init":
                xs = [N(x, model.first) for x in xs]
            seen = xs
            if norm in ("pre", "pre_final", "peri", "peri_init"):
                seen = [N(x, model.before) for x in xs]
            a = [weight(seen[-1], x) for x in seen]
            y = sum(w / sum(a) * (x @ model.W_V @ model.W_O) for w, x in zip(a, seen))
            if norm in ("output", "peri", "peri_init"):
                y = N(y, model.after)
            x = N(xs[-1] + y, model.after) if norm == "post" else xs[-1] + y
            x = N(x, model.last) if norm in ("pre_final", "peri", "peri_init") else x
            close(model(torch.tensor([tokens]))[0, t], x @ model.U, 1e-10)


def test_minimal_models_say_what_is_wrong():
    with pytest.raises(ValueError, match="norm='final' is not one of none, pre, pre_final, outp"):
        minimal.MinimalTransformer(7, 5, norm="final")
    for shape in (dict(n=1, d=5), dict(n=7, d=0), dict(n=7, d=5, d_k=0)):
        with pytest.raises(ValueError, match="needs n >= 2 tokens and d, d_k, d_v >= 1"):
            minimal.MinimalTransformer(**shape)
    with pytest.raises(ValueError, match="norm='final' is not one of none, pre, post, peri"):
        minimal.MaxRetrieval("final")


@pytest.mark.parametrize("norm", ["none", "pre", "post", "peri"])
def test_max_retrieval_ignores_padding_and_order(norm):
    torch.manual_seed(0)
    model = minimal.MaxRetrieval(norm)
    x = torch.cat((torch.rand(3, 9, 1), F.one_hot(torch.randint(0, 10, (3, 9)), 10)), -1)
    padded = torch.cat((x, torch.full((3, 4, 11), -1.0)), 1)
    with torch.no_grad():
        h = model.before(model.enter(x))
        a = torch.exp(h @ model.q)
        z = (a[..., None] * h).sum(1) / a.sum(1, keepdim=True)
        want = model.leave(model.after(z))
        for got in (model(x), model(padded), model(x[:, torch.randperm(9)])):
            close(got, want, 1e-5)
    assert isinstance(model.before, torch.nn.RMSNorm) == (norm in ("pre", "peri"))
    assert isinstance(model.after, torch.nn.RMSNorm) == (norm in ("post", "peri"))


# -----------------------------------------------------------------------------
# experiments: the random search

def test_random_search_draws_from_its_ranges():
    trials = [minimal.draw_trial(rng(i), peak=3e-2) for i in range(400)]
    ranges = dict(beta1=(0.8, 0.98), beta2=(0.9, 0.9999), weight_decay=(1e-4, 1),
                  grad_clip=(0.1, 10), learning_rate=(1e-4, 3e-2), warmup=(1e-3, 0.1),
                  final=(0, 0.1), eta=(0.1, 1), rho=(1, 1e3), kappa=(0.3, 1))
    assert trials[0].keys() == ranges.keys()
    assert trials[3] == minimal.draw_trial(rng(3), peak=3e-2)
    for name, (low, high) in ranges.items():
        ys = np.array([t[name] for t in trials])
        assert low <= ys.min() and ys.max() <= high, name
        assert ys.max() - ys.min() > 0.8 * (high - low), name
        if name in ("weight_decay", "grad_clip", "learning_rate", "warmup", "rho"):
            place = np.mean(np.log(ys / low)) / np.log(high / low)
            assert place == pytest.approx(0.5, abs=0.06), name  # log-uniform
    assert all(t["beta1"] < t["beta2"]**0.5 for t in trials)
    assert 0.4 < np.mean([t["final"] == 0 for t in trials]) < 0.6


def logits_of(out):
    return out[0] if isinstance(out, tuple) else out


def trained_alone(model, trial, batch, steps):
    """One trial by torch's AdamW and clip_grad_norm_ -> weights before, after, and their BEMA."""
    t, groups = trial, [dict(params=[], weight_decay=trial["weight_decay"]), dict(params=[])]
    for name, p in model.named_parameters():
        decays = p.dim() == 2 and name not in ("E", "wte.weight")
        groups[0 if decays else 1]["params"].append(p)
    optimizer = torch.optim.AdamW(groups, betas=(t["beta1"], t["beta2"]), weight_decay=0)
    start = ema = parameters_to_vector(model.parameters()).detach()
    warmup = max(1, round(t["warmup"] * steps))
    for step in range(1, steps + 1):
        x, y = map(torch.from_numpy, batch(step))
        y = y.flatten(0, -2) if y.is_floating_point() else y.flatten()  # distributions, or samples
        F.cross_entropy(logits_of(model(x)).flatten(0, -2), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t["grad_clip"])
        decay = t["final"] + (1 - t["final"]) * (steps - step) / (steps - warmup)
        for group in optimizer.param_groups:
            group["lr"] = t["learning_rate"] * min(step / warmup, decay)
        optimizer.step()
        optimizer.zero_grad()
        beta = (t["rho"] + step)**-t["kappa"]
        ema = (1 - beta) * ema + beta * parameters_to_vector(model.parameters()).detach()
    now = parameters_to_vector(model.parameters()).detach()
    return start, now, ema, ema + (t["rho"] + steps)**-t["eta"] * (now - start)


@pytest.mark.parametrize("panel, scheme, exact", [
    (dict(data="set_complement", n=8, block_size=3), "peri", False),
    (dict(data="set_complement", n=8, block_size=3), "pre", True),
    (dict(data="max_retrieval"), "post", False),
    (dict(data="dyck", block_size=8), "peri_init", False)])
def test_stacked_trials_equal_the_same_trials_one_by_one(panel, scheme, exact):
    """Other clips, decays and rates each; on samples, or on the target distribution itself."""
    task, steps = runs.make_task(panel), 20
    trials = [minimal.draw_trial(rng(i), 1e-2) for i in range(3)]

    def models():
        found = []
        for i in range(3):
            torch.manual_seed(i)
            found.append(minimal.small_model(task, scheme))
        return found

    def batch(step):
        x, y = task.batch("train", 8, rng(step))
        return x, task.target(torch.from_numpy(x)).numpy() if exact else y
    x = torch.from_numpy(task.batch("iid", 4, rng())[0])
    with sdpa_kernel(SDPBackend.MATH):
        logits, found = minimal.fit(models(), trials, batch, steps)
        for i, (model, trial) in enumerate(zip(models(), trials)):
            start, *wanted = trained_alone(model, trial, batch, steps)
            assert (wanted[0] - start).abs().max() > 1e-3
            for weights, want in zip((found["raw"], found["ema"], found["bema"]), wanted):
                close(weights[i], want, 1e-4)
            with torch.no_grad():
                close(logits(found["raw"], x)[i], logits_of(model(x)), 1e-3)


def test_measure_by_length():
    """Weights that answer with the target itself, with nothing, or with what may not follow."""
    task = runs.make_task(dict(data="set_complement", n=6, block_size=5))

    def answers(_, x):
        p = task.target(x)
        return torch.stack((p.log().clamp(min=-50), torch.zeros_like(p), (p == 0).float()))
    lengths, found = minimal.measure(task, answers, [0, 0, 0], 20, rng())
    assert lengths == [[t, t] for t in range(1, 6)]
    wanted = torch.tensor([[0.0] * 5, [t / 6 for t in range(1, 6)]])
    close(torch.from_numpy(found["tvd"][:2]), wanted, 1e-6)
    assert (found["precision"][0] > 10).all()
    assert (found["precision"][1] == 0).all() and (found["precision"][2] == -1).all()
    task = runs.make_task(dict(data="dyck", block_size=70))

    def right(_, x):
        return task.target(x)[None].log().clamp(min=-50)
    lengths, found = minimal.measure(task, right, [0], 200, rng())
    assert lengths[0] == [1, 2] and lengths[-1] == [69, 70] and np.abs(found["tvd"]).max() < 1e-6
    # at first the depth is 0, or 1, everywhere
    assert np.isnan(found["auc"][0, 0]) and (found["auc"][0, 1:] == 1).all()


def test_measure_on_sets():
    task = runs.make_task(dict(data="max_retrieval"))

    def classes(_, x):  # right, and always the first class, and diverged
        best = x[torch.arange(len(x)), x[..., 0].argmax(1), 1:]
        first = torch.eye(10)[0].expand_as(best)
        return torch.stack((best, first, torch.full_like(best, torch.nan)))
    lengths, found = minimal.measure_sets(task, classes, [0, 0, 0], 2000, rng(), [16, 32])
    assert lengths == [[16, 16], [32, 32]] and (found["accuracy"][0] == 1).all()
    assert np.abs(found["accuracy"][1] - 0.1).max() < 0.04
    assert np.isnan(found["accuracy"][2]).all()


# -----------------------------------------------------------------------------
# the commands, in this process and in a folder of their own, on a small corpus

COMMANDS = {"train.py": train, "sample.py": sample, "eval.py": evaluation, "plot.py": plot,
           "maps.py": maps, "bench.py": bench, "reproduce.py": reproduce,
           "experiments.minimal": minimal}
TINY_FLAGS = ("--n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --eval_iters 2 "
              "--log_interval 1 --device cpu").split()


def in_process(script, *words):
    """What runs.script does, in this process -> the exit code. A mistake of ours is raised."""
    print("\n$ python", script, *words, flush=True)
    return exit_code(COMMANDS[script].main, [str(word) for word in words])


def exit_code(main, argv):
    try:
        main(argv)
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
            return 1
        return e.code or 0
    return 0


def sketched(fig, path, **how):
    """In place of savefig, which takes longer than all else in these tests."""
    path.write(b"\x89PNG")


@contextlib.contextmanager
def standing_in(folder, draw=False):
    """The scripts take folder for the repository: out/, results/, prepared text are there."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    enabled = kernels.enabled
    runs.models()  # which are the repository's
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(runs, "ROOT", folder)
        patch.setattr(data.text, "PREPARED", folder / "prepared")
        patch.setattr(runs, "script", in_process)
        patch.setitem(plot.plt.rcParams, "figure.dpi", 40)
        if not draw:
            patch.setattr(plot.plt.Figure, "savefig", sketched)
        yield
    for s, handler in handlers.items():
        signal.signal(s, handler)
    kernels.enabled = enabled
    plot.plt.close("all")


def written():
    """A stream that takes what a terminal takes."""
    return io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n", write_through=True)


def command(folder, script, *words, code=0, draw=False):
    """
    Run a script in a folder; its exit code must be `code` -> stdout, stderr. Pictures are a name in
    a folder, unless they are to be drawn.
    """
    out, err = written(), written()
    argv = [str(word) for word in words]
    with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          standing_in(folder, draw)):
        got = exit_code(COMMANDS[script].main, argv)
    out, err = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert got == code, out + err
    return out, err


def complaint(folder, *words):
    """The one line that a script says before it exits with an error."""
    _, err = command(folder, *words, code=1)
    beside = "preparing", "prompt of", "choosing a hard", "making queries"
    lines = [line for line in err.splitlines() if not any(word in line for word in beside)]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def write_notes(folder):
    """Twelve documents of four words, one of them not ASCII."""
    (folder / "notes").mkdir(parents=True)
    for i in range(12):
        words = " ".join(rng(i).choice(["alpha", "beta", "gamma", "δέλτα"], 400))
        (folder / "notes" / f"{i}.txt").write_text(words)
    return folder


@pytest.fixture
def home(tmp_path):
    return write_notes(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with finished tiny runs, to be read only: two on text, two on flip-flop."""
    home = write_notes(tmp_path_factory.mktemp("trained"))
    (home / "empty.txt").write_text("")
    (home / "short.txt").write_text("too short to train on")
    (home / "odd.json").write_text('{"runs": []}')
    (home / "deep.json").write_text("[" * 100_000)
    pairs = ("cable", "notes"), ("learned", "notes"), ("rope", "flipflop"), ("tra", "flipflop")
    for name, text in pairs:
        command(home, "train.py", "--model", name, "--data", text, "--max_iters", 2,
                "--eval_interval", 1, "--no-evaluate", *TINY_FLAGS, "--out_dir", name)
    row = dict(label="x", block_size=16, perplexity={"16": 2.0}, by_position=[[0, 15, 1.0]],
               model="cable", config={}, checkpoint="ckpt.pt", iter=1, name="x")
    whole = dict(data=dict(sha256=""), tokens=16, lengths=[16], runs=[row])
    (home / "types.json").write_text(json.dumps(whole | dict(lengths=["16", "32"])))
    return home


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    """-> {iter: training loss}, {iter: validation loss}"""
    log = log_of(folder)
    return ({r["iter"]: r["loss"] for r in log if "loss" in r},
            {r["iter"]: r["val_loss"] for r in log if "val_loss" in r})


def is_png(path):
    return path.read_bytes()[:4] == b"\x89PNG"


def test_one_command_trains_evaluates_draws_and_writes(home):
    out, err = command(home, "train.py", "--model=cable", "--data", "notes", "--max_iters", 6,
                       "--eval_interval", 3, *TINY_FLAGS, draw=True)
    run = home / "out" / "cable-notes-nano"
    files = {"ckpt.pt", "best.pt", "log.jsonl", "eval.json", "eval.png", "lock"}
    assert {p.name for p in run.iterdir()} == files and is_png(run / "eval.png")
    assert "iter 6/6 | loss" in out and "tok/s | eta" in out and "val loss" in out
    settings = re.findall(r"^(\w+) +.*?(\w+)=", out, re.M)
    assert [title for title, _ in settings[:4]] == ["model", "data", "training", "run"]
    assert "--resume" not in out  # it is finished
    assert max(map(len, out.splitlines())) < 200
    result = json.loads((run / "eval.json").read_text())
    perplexity = result["runs"][0]["perplexity"]
    assert list(perplexity) == ["16", "32", "64", "128", "256"]
    assert result["data"]["corpus"] == "notes" and result["split"] == "test"
    assert all(1 < p < 400 for p in perplexity.values())
    # a short run gets a short evaluation, which its command says
    assert result["tokens"] == 1024
    assert result["command"] == "python eval.py out/cable-notes-nano --tokens 1024 --device cpu"
    assert f"$ {result['command']}" in out
    assert "32 tokens, up to position 33 (2.1 x the training length)" in err
    # a second run does not touch the first
    before = (run / "ckpt.pt").read_bytes()
    flags = "--max_iters", 2, "--no-evaluate", "--lr_decay", "linear", *TINY_FLAGS
    command(home, "train.py", "--model", "cable", "--data", "notes", *flags)
    assert (home / "out" / "cable-notes-nano-2" / "ckpt.pt").exists()
    assert (run / "ckpt.pt").read_bytes() == before


def test_a_long_run_gets_the_whole_evaluation(monkeypatch):
    """An eighth of what it was trained on, and never more than what a run has by default."""
    said = []
    monkeypatch.setattr(runs, "script", lambda *words: said.append(words) and None)
    text, task = data.text.Task, data.find("flipflop")
    for kind, iters, want in ((text, 750, ()), (text, 40, ("--tokens", 80 * 256)),
                              (task, 4000, ()), (task, 400, ("--sequences", 800)),
                              (task, 9, ("--sequences", 100))):
        said.clear()
        c = train.argparse.Namespace(
            max_iters=iters, batch_size=16, gradient_accumulation_steps=1, block_size=256,
            device="auto", dtype="bfloat16", kernel="auto")
        assert not train.final_evaluation("run", c, kind)
        assert said[0] == ("eval.py", "run", *want, "--dtype", "bfloat16")
        assert len(said) == (2 if kind is text else 1)


def test_several_checkpoints_in_one_table_and_figure(trained, tmp_path):
    """Learned positions show a dash where they end."""
    names = "cable", "learned"
    out, _ = command(trained, "eval.py", *names, "--lengths", 8, 40, "--out", tmp_path / "two",
                     draw=True)
    assert "learned positions end at block_size=16" in out and is_png(tmp_path / "two.png")
    assert re.search(r"^learned +\d+\.\d+ +-$", out, re.M)
    both = json.loads((tmp_path / "two.json").read_text())
    assert [list(r["perplexity"]) for r in both["runs"]] == [["8", "40"], ["8"]]
    # the number of a run is the same alone, and by the saved weights at the beginning of the best
    command(trained, "eval.py", "cable/best.pt", "--lengths", 8, "--out", tmp_path / "one")
    one = json.loads((tmp_path / "one.json").read_text())["runs"][0]
    assert one["checkpoint"] == "best.pt" and one["iter"] == 2
    assert one["perplexity"]["8"] == both["runs"][0]["perplexity"]["8"]


def test_strided_perplexity_beside_the_other(trained, tmp_path, monkeypatch):
    """In the JSON, a line of the table, a panel of the figure, a row on the page."""
    words = "eval.py", "cable", "learned", "--lengths", 16, 32, "--tokens", 100, "--strided"
    figures = drawn(monkeypatch)
    out, _ = command(trained, *words, "--out", tmp_path / "both")
    assert "84 tokens, the same at every length" in out
    found = json.loads((tmp_path / "both.json").read_text())
    cable, learned = found["runs"]
    assert found["strided_tokens"] == 84
    assert list(cable["strided"]) == ["16", "32"] and list(learned["strided"]) == ["16"]
    shown = [f"{y:.3f}" for y in cable["strided"].values()]
    assert re.search(rf"^cable .*\n  strided +{shown[0]} +{shown[1]}$", out, re.M)
    assert re.search(r"^  strided +\d+\.\d+ +-$", out, re.M)
    titles = [ax.get_title() for ax in figures[0].axes]
    assert len(titles) == 3 and "84 tokens" in titles[1]
    points = figures[0].axes[1].lines
    assert list(cable["strided"].values()) in [list(line.get_ydata()) for line in points]
    table = tables.text_table(found | dict(paper={}))
    _, row = (line for line in table.splitlines() if line.startswith("| cable |"))
    assert cells(row)[2:4] == shown and "84 tokens" in table
    # without it nothing is said of it
    command(trained, *words[:-1], "--out", tmp_path / "one")
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["runs"][0]["perplexity"] == cable["perplexity"] and "strided_tokens" not in one
    assert len(figures[1].axes) == 2 and "trided" not in tables.text_table(one | dict(paper={}))


def test_another_text_is_scored_when_it_is_named(trained, tmp_path):
    (tmp_path / "other.txt").write_text("omega and more of it. " * 400)
    command(trained, "eval.py", "cable", "--data", tmp_path / "other.txt", "--lengths", 16,
            "--tokens", 0, "--out", tmp_path / "other")
    result = json.loads((tmp_path / "other.json").read_text())
    assert result["data"]["corpus"] == "other.txt"
    assert result["tokens"] == result["data"]["tokens"]["test"] - 1


def test_sampling(trained, tmp_path):
    """Several samples, the same seed twice, a prompt of any bytes, longer than the context."""
    words = "sample.py", "cable", "--prompt", "alpha ", "--num_samples", 2, "--max_new_tokens", 40
    out, err = command(trained, *words, "--top_k", 5)
    again, _ = command(trained, *words, "--top_k", 5)
    assert out == again and out.count("alpha ") >= 2 and "tok/s" in err
    other, _ = command(trained, *words, "--top_k", 5, "--seed", 1)
    assert other != out
    (tmp_path / "prompt.bin").write_bytes(bytes(range(256)) * 2)
    _, err = command(trained, "sample.py", "cable", "--prompt_file", tmp_path / "prompt.bin",
                     "--max_new_tokens", 3, "--temperature", 0)
    assert "prompt of 512 tokens" in err and "up to position 515" in err


def test_sampling_with_a_cache_is_sampling_without():
    for name in ("cable", "rope"):
        model, idx = make(name), torch.randint(0, 61, (1, 5))
        for how in (dict(temperature=0), dict(temperature=1.0, top_k=7, vocab_size=50)):
            torch.manual_seed(3)
            drawn = torch.cat(list(sample.generate(model, idx, 30, **how)), 1)
            torch.manual_seed(3)
            assert torch.equal(drawn, written_without_a_cache(model, idx, 30, **how))
            assert how["temperature"] == 0 or drawn.max() < 50
            assert how["temperature"] > 0 or len(drawn.unique()) > 1


def test_what_is_sampled_follows_the_temperature_and_top_k(monkeypatch):
    logits = torch.tensor([0.0, 1, 2, 3])
    monkeypatch.setattr(runs, "new_cache", lambda model, size: None)
    monkeypatch.setattr(sample, "read", lambda model, idx, cache: logits.expand(*idx.shape, 4))
    torch.manual_seed(0)
    idx = torch.zeros(4000, 1, dtype=torch.long)
    for how, p in ((dict(temperature=2.0), (logits / 2).softmax(-1)),
                   (dict(top_k=2), torch.tensor([0, 0, 1, math.e]) / (1 + math.e))):
        new, = sample.generate(None, idx, 1, **how)
        close(new.flatten().bincount(minlength=4) / 4000, p, 0.04)
        assert new.min() >= (2 if "top_k" in how else 0)


def test_without_a_name_the_newest_text_run_is_taken(trained, home):
    for n, name in enumerate(("learned", "cable", "rope")):  # rope is the newest, and no text
        shutil.copytree(trained / name, home / "out" / name)
        os.utime(home / "out" / name / "ckpt.pt", (n, n))
    shutil.copytree(trained / "rope", home / "out" / "fork")  # newer, and its model is gone
    path = home / "out" / "fork" / "ckpt.pt"
    checkpoint = torch.load(path, weights_only=True)
    torch.save(checkpoint | dict(config=checkpoint["config"] | dict(model="gone")), path)
    _, err = command(home, "sample.py", "--max_new_tokens", 1)
    assert "out/cable/ckpt.pt" in err
    path.write_bytes(b"cut off")
    assert "fork/ckpt.pt is not a whole checkpoint" in complaint(home, "sample.py")
    shutil.rmtree(home / "out" / "fork")
    shutil.rmtree(home / "out" / "cable")
    _, err = command(home, "sample.py", "--max_new_tokens", 1)
    assert "out/learned/ckpt.pt" in err
    out, _ = command(home, "eval.py", "--sequences", 20)  # the newest of any kind
    assert (home / "out" / "rope" / "eval.json").exists() and "flipflop" in out
    shutil.rmtree(home / "out" / "learned")
    assert "text" in complaint(home, "sample.py")
    shutil.rmtree(home / "out")
    says = "no checkpoint in out/ yet; make one with: python train.py --model cable"
    assert says in complaint(home, "eval.py")


def test_a_task_from_training_to_its_scores(home):
    """Scores in the log and with intervals in the JSON; learned positions end, and say so."""
    flags = "--data", "flipflop", "--max_iters", 4, "--eval_interval", 2, *TINY_FLAGS
    out, _ = command(home, "train.py", "--model", "tra", *flags)
    run = home / "out" / "tra-flipflop-nano"
    files = {"ckpt.pt", "best.pt", "log.jsonl", "eval.json", "eval.png", "lock"}
    assert {p.name for p in run.iterdir()} == files and is_png(run / "eval.png")
    assert "$ python eval.py" in out and "sample.py" not in out
    assert re.search(r"val loss \S+ \| iid exact_match \S+ glitch_rate \S+ \| sparse exact", out)
    scores = [r["scores"] for r in log_of(run) if "scores" in r]
    assert [sorted(by_split) for by_split in scores] == [["dense", "iid", "sparse"]] * 2
    result = json.loads((run / "eval.json").read_text())
    assert result["sequences"] == 100
    for by_metric in result["runs"][0]["scores"]["16"].values():
        for m in by_metric.values():
            assert 0 <= m["low"] <= m["value"] <= m["high"] <= 1
    assert out.count("exact_match") > 3
    command(home, "train.py", "--resume", run, "--max_iters", 6, "--no-evaluate")
    assert max(losses(run)[0]) == 6


def test_many_rows_at_several_lengths_become_a_grid(tmp_path, monkeypatch):
    """Every number is in its cell, the mean over seeds; a length that a row has not is empty."""
    def run(label, seed, *values):
        scores = {str(T): dict(iid=dict(exact_match=dict(value=v, low=v, high=v)))
                  for T, v in zip((64, 256), values)}
        return dict(label=label, model="x", name="x", seed=seed, config={}, iter=1,
                    checkpoint="c", block_size=64, scores=scores)
    rows = [run(f"m{n}", 1, n / 100, n / 50) for n in range(11)]
    rows += [run("m3", 2, 0.13, 0.16), run("ends", 1, 0.5)]
    (tmp_path / "x.json").write_text(json.dumps(dict(splits=["iid"], runs=rows)))
    drawn = []
    monkeypatch.setattr(runs, "write_figure", lambda fig, *_: drawn.append(fig))
    plot.main(["scores", str(tmp_path / "x.json")])
    ax, = drawn[0].axes
    found = {tuple(t.get_position()): t.get_text() for t in ax.texts}
    want = {(x, y): f"{n:g}" for y in range(11) for x, n in ((0, y), (1, 2 * y))}
    want |= {(0, 3): "8", (1, 3): "11", (0, 11): "50", (1, 11): "-"}
    assert found == want
    assert [t.get_text() for t in ax.get_yticklabels()] == [*(f"m{n}" for n in range(11)), "ends"]
    plot.plt.close(drawn[0])


def test_a_split_without_scores_is_drawn_empty_and_small_errors_large(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    found = dict(iid=dict(answer_error=dict(value=0.02, low=0.01, high=0.05)))
    row = dict(label="m", model="x", name="x", seed=1, config={}, iter=1, checkpoint="c",
               block_size=8, scores={"8": found})
    (tmp_path / "x.json").write_text(json.dumps(dict(splits=["iid", "half"], runs=[row])))
    plot.main(["scores", str(tmp_path / "x.json")])
    iid, half = figures[0].axes
    assert iid.get_xlim()[1] == pytest.approx(5.6) and half.get_xlim()[1] > 100
    assert len(iid.lines) == 4 and len(half.lines) == 2  # two of them for the legend


def test_many_rows_by_step_become_a_grid_and_of_one_length_dots(tmp_path, monkeypatch):
    figures, path = drawn(monkeypatch), tmp_path / "x.json"
    rows = []
    for n in range(11):
        history = [[it, dict(iid=dict(answer_error=it * n / 100))] for it in (1, 2)]
        rows.append(dict(label=f"m{n}", history=history))
    path.write_text(json.dumps(dict(runs=rows)))
    plot.main(["errors", str(path)])
    ax, = figures[0].axes
    found = {tuple(t.get_position()): t.get_text() for t in ax.texts}
    assert found == {(x, y): f"{(x + 1) * y:g}" for x in (0, 1) for y in range(11)}
    seed = dict(label="m4", history=[[it, dict(iid=dict(answer_error=0.5))] for it in (1, 2)])
    path.write_text(json.dumps(dict(runs=[*rows, seed])))
    plot.main(["errors", str(path)])
    texts = figures.pop(1).axes[0].texts
    said = [t.get_text() for t in texts]
    inks = {t.get_text(): t.get_color() for t in texts}
    assert inks["4 to 50"] == inks["27"] and set(inks.values()) == {"black", "white"}
    assert "27" in said and "4 to 50" in said and "8 to 50" in said and len(said) == 24
    best = [p.get_facecolor() for p in ax.patches][0]
    assert best == plot.WORST_TO_BEST(1.0)  # of an error, 0 is the best
    rows = [dict(label=f"m{n}", model="x", name="x", seed=seed, block_size=8, config={}, iter=1,
                 checkpoint="c", perplexity={"8": 2.0 + n + seed}, by_position=[[0, 8, 1.0]])
            for n in range(11) for seed in (1, 2)]
    path.write_text(json.dumps(dict(runs=rows, lengths=[8], tokens=9, data=dict(sha256=""))))
    plot.main(["lengths", str(path)])
    ax, = figures[1].axes
    dots = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]
    assert dots == [([3.0 + n, 4.0 + n], [n, n]) for n in range(11)]
    for row in rows:  # of several lengths: rows of panels, those that end before the last one last
        row["perplexity"]["16"] = 99.0 - row["perplexity"]["8"]
    for row in rows[-2:]:
        row["perplexity"].popitem()
        row["block_size"] = 4
    path.write_text(json.dumps(dict(runs=rows, lengths=[8, 16], tokens=9, data=dict(sha256=""))))
    plot.main(["lengths", str(path)])
    above, below = ([text.get_text() for text in figures[2].axes[n].get_legend().get_texts()]
                    for n in (1, 3))
    assert above[:6] == [f"m{n}" for n in (9, 8, 7, 6, 5, 4)]
    assert below[:5] == [f"m{n}" for n in (3, 2, 1, 0, 10)]
    names = [f"m{n}" for n in range(11)]
    plot.main(["lengths", str(path), "--models", *names])
    said = [name for name in labels_of(figures[3]) if name in names]
    assert said == names
    rows[0]["perplexity"]["16"] = math.nan  # of m0
    path.write_text(json.dumps(dict(runs=rows, lengths=[8, 16], tokens=9, data=dict(sha256=""))))
    plot.main(["lengths", str(path)])
    said = [name for name in labels_of(figures[4]) if name in names]
    assert said == [f"m{n}" for n in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10)]
    titled = [bool(ax.get_title()) for ax in figures[2].axes]
    assert titled == [True, True, False, False]
    assert [ax.get_title("left") for ax in figures[2].axes] == [
        "", "", "rows 7 to 11 of 11, by perplexity at 16", ""]
    dotted = [{line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":"
               and line.get_label() == "training length"} for ax in figures[2].axes]
    assert dotted == [{8}, {8}, {8, 4}, {8, 4}]


def test_scores_of_several_runs_are_those_of_each_alone(trained, home):
    command(trained, "train.py", "--model", "learned", "--data", "flipflop", "--max_iters", 1,
            "--no-evaluate", *TINY_FLAGS, "--out_dir", home / "learned")
    lengths = "--lengths", 16, 40, "--sequences", 30
    out, _ = command(trained, "eval.py", "tra", home / "learned", *lengths, "--out", home / "two",
                     draw=True)
    assert "learned positions end at block_size=16" in out and is_png(home / "two.png")
    command(trained, "eval.py", "tra", *lengths, "--out", home / "one")
    both, one = (json.loads((home / f"{name}.json").read_text())["runs"] for name in ("two", "one"))
    assert both[0]["scores"] == one[0]["scores"] and list(one[0]["scores"]) == ["16", "40"]
    assert list(both[1]["scores"]["16"]) == ["iid", "sparse", "dense"]
    assert both[1]["scores"]["40"] == {}


@pytest.mark.parametrize("name", ["set_complement", "dyck", "tomita"])
def test_a_task_with_a_known_distribution_from_training_to_figures(name, home):
    """TVD for all, the AUC where the task has one, undefined positions as null."""
    command(home, "train.py", "--model", "perinorm", "--data", name, "--max_iters", 2,
            "--no-evaluate", *TINY_FLAGS, "--block_size", 8, "--out_dir", "run")
    out, _ = command(home, "eval.py", "run", "--sequences", 40)
    assert "tvd by position" in out and ("auc by position" in out) == (name != "set_complement")
    result = json.loads((home / "run" / "eval.json").read_text())["runs"][0]
    tvd = result["tvd"]["8"]["iid"]
    assert np.mean(tvd) == pytest.approx(result["scores"]["8"]["iid"]["tvd"]["value"], rel=1e-5)
    assert 0 < min(tvd) and max(tvd) < 1
    if name == "dyck":  # depth 0 only after an even number of brackets
        empty = [a is None for a in result["auc"]["8"]["iid"]]
        assert empty == [True, True, False] + [True, False] * 2 + [True]
    for metric in ("tvd", "auc"):
        words = "plot.py", "positions", "run/eval.json", "--metric", metric
        if metric in result:
            command(home, *words, draw=name == "dyck")
            assert is_png(home / "run" / f"eval.{metric}.png")
        else:
            assert "has no auc by position, it has tvd" in complaint(home, *words)


def interrupted(monkeypatch, at):
    """A Ctrl-C while step `at` is computed."""
    drawn, batch = [], data.text.Task.batch

    def counted(self, split, *rest):
        drawn.append(split)
        if drawn.count("train") == at and split == "train":
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, split, *rest)
    monkeypatch.setattr(data.text.Task, "batch", counted)


def same_run(a, b):
    """Two runs have the same losses, weights, averages, to the last digit."""
    assert losses(a) == losses(b)
    one, two = (torch.load(x / "ckpt.pt", weights_only=True) for x in (a, b))
    assert one["iter"] == two["iter"] and one["best_val_loss"] == two["best_val_loss"]
    for weights, others in ((one["model"], two["model"]),
                            *((one["bema"][w], two["bema"][w]) for w in ("start", "ema"))):
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


# label has what is hardest to resume: draws of its own, besides dropout
HARD = ["--model", "label", "--data", "notes", "--no-evaluate", "--dropout", "0.1", "--bema",
        "--gradient_accumulation_steps", "2", *TINY_FLAGS]


def test_a_step_is_torchs_adamw_on_the_mean_of_micro_steps_clipped(home):
    flags = ("--model cable --data notes --no-evaluate --gradient_accumulation_steps 2 --grad_clip "
             "0.1 --beta1 0.5 --beta2 0.7 --weight_decay 0.3 --learning_rate 0.01 --warmup_iters 0 "
             "--lr_decay none --max_iters 2").split()
    command(home, "train.py", *flags, *TINY_FLAGS, "--out_dir", "run")
    saved = torch.load(home / "run" / "ckpt.pt", weights_only=True)
    config = saved["config"]
    torch.manual_seed(config["seed"])
    model, task = runs.make_model(config), runs.make_task(config)
    groups = [dict(params=[p for p in model.parameters() if (p.dim() > 1) == wide],
                   weight_decay=0.3 * wide) for wide in (True, False)]
    assert all(p.dim() == 1 for p in make("kerple").pe.parameters())  # do not decay
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.5, 0.7))
    for it in range(2):
        draw = np.random.default_rng([config["seed"], it])
        both = [task.batch("train", 4, draw) for _ in range(2)]
        x, y = (torch.from_numpy(np.concatenate(z)) for z in zip(*both))
        loss = model(x, y)[1]
        loss.backward()
        assert losses(home / "run")[0][it + 1] == pytest.approx(loss.item(), abs=1e-4)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.2
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.state_dict().items():
        close(saved["model"][name], p, 1e-5)


def test_dropout_is_for_training_alone(home):
    """Every dropout of every model is passed once; a loaded model and a validation have none."""
    for name in (*MODELS, *ENCODERS):
        model, passed = make(name, dropout=0.5).train(), []
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
        for layer in layers:
            layer.register_forward_hook(lambda layer, *_, to=passed: to.append(layer))
        model(torch.randint(3, 61, (2, 9)))
        assert len(layers) == len(passed) == 5 and set(passed) == set(layers)
        assert {layer.p for layer in layers} == {0.5}
    flags = "--model cable --data notes --no-evaluate --dropout 0.5 --max_iters 1".split()
    command(home, "train.py", *flags, *TINY_FLAGS, "--out_dir", "run")
    path = home / "run" / "ckpt.pt"
    model, config, _ = runs.load_run(path, torch.device("cpu"))
    assert not model.training
    c = types.SimpleNamespace(**config)
    c.device, c.eval_iters = "cpu", 2
    model.train()
    one, two = (train.validate(model, runs.make_task(config), c, "cpu", contextlib.nullcontext())
                for _ in range(2))
    assert one == two and model.training


def test_a_resumed_run_equals_an_uninterrupted_one(home, monkeypatch):
    flags = *HARD, "--max_iters", 12, "--eval_interval", 4
    command(home, "train.py", *flags, "--out_dir", "whole")
    with monkeypatch.context() as patch:
        interrupted(patch, at=13)  # the first half of step 7
        out, _ = command(home, "train.py", *flags, "--out_dir", "broken", code=130)
    assert "interrupted after iter 7, saved; continue with: python train.py --resume broken" in out
    assert torch.load(home / "broken" / "ckpt.pt", weights_only=True)["iter"] == 7
    with open(home / "broken" / "log.jsonl", "a") as f:  # what a kill leaves: lines that the
        f.write(json.dumps(dict(iter=8, loss=99.0)) + "\n")  # checkpoint does not know
    out, _ = command(home, "train.py", "--resume", "broken", "--no-evaluate")
    assert "from iter 7" in out
    same_run(home / "whole", home / "broken")
    # once more on the finished run: nothing to do, nothing lost; and further, when asked
    command(home, "train.py", "--resume", "broken", "--no-evaluate")
    same_run(home / "whole", home / "broken")
    command(home, "train.py", "--resume", "broken", "--no-evaluate", "--max_iters", 14)
    assert list(losses(home / "broken")[0]) == list(range(1, 15))


def test_bema_is_its_formulas(home):
    def after(*flags):
        out, _ = command(home, "train.py", *flags, "--no-evaluate")
        folder = flags[flags.index("--resume") + 1] if "--resume" in flags else flags[1]
        return torch.load(home / folder / "ckpt.pt", weights_only=True), out
    new = "--model", "cable", "--data", "flipflop", "--bema", *TINY_FLAGS
    first, _ = after("--out_dir", "run", *new, "--max_iters", 1, "--eta", 0.4, "--kappa", 0.7,
                     "--rho", 3)
    second, out = after("--resume", "run", "--max_iters", 2)
    assert "with the BEMA weights" in out
    path = home / "run" / "ckpt.pt"
    loaded, *_ = runs.load_run(path, torch.device("cpu"), bema=True)
    for n, p in loaded.named_parameters():
        start, theta1, theta2 = first["bema"]["start"][n], first["model"][n], second["model"][n]
        ema = start + (3 + 1) ** -0.7 * (theta1 - start)
        ema = ema + (3 + 2) ** -0.7 * (theta2 - ema)
        close(second["bema"]["ema"][n], ema, 1e-7)
        close(p, ema + (3 + 2) ** -0.4 * (theta2 - start), 1e-7)
        assert torch.equal(start, second["bema"]["start"][n])
    command(home, "eval.py", "run", "--bema", "--sequences", 20)
    assert json.loads((home / "run" / "eval.bema.json").read_text())["bema"] is True
    # kappa 0 does not average; a large eta leaves the average alone; what stays put stays put
    plain, _ = after("--out_dir", "kappa0", *new, "--max_iters", 3, "--kappa", 0)
    ema = plain["bema"]["ema"]
    assert all(torch.equal(ema[n], plain["model"][n]) for n in ema)
    found = runs.bema_weights(second["model"], second["bema"], 2, dict(rho=10.0, eta=1e3))
    assert all(torch.equal(x, second["bema"]["ema"][n]) for n, x in found.items())
    same = dict(start=second["model"], ema=second["model"])
    found = runs.bema_weights(second["model"], same, 2, dict(rho=10.0, eta=0.2))
    assert all(torch.equal(x, second["model"][n]) for n, x in found.items())


def learning_rates(home, *flags):
    command(home, "train.py", "--data", "notes", "--no-evaluate", *TINY_FLAGS, *flags)
    folder = max((home / "out").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    return [r["lr"] for r in log_of(folder) if "lr" in r]


@pytest.mark.parametrize("decay, middle, late", [
    ("cosine", 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)), 0.1), ("linear", 0.775, 0.1),
    ("none", 1.0, 1.0)])
def test_learning_rate_schedules(decay, middle, late, home):
    """Warmup over 3 steps, decay from 1 to 0.1 until step 11, in units of 1e-3."""
    lr = learning_rates(home, "--max_iters", 14, "--learning_rate", 1e-3, "--min_lr", 1e-4,
                        "--warmup_iters", 3, "--lr_decay_iters", 11, "--lr_decay", decay)
    want = {0: 1 / 3, 2: 1.0, 3: 1.0, 5: middle, 11: late, 13: late}
    assert {n: 1000 * lr[n] for n in want} == pytest.approx(want)


def test_a_flag_comes_before_the_model_before_the_task_before_the_default(home):
    """--batch_size from the command, norm from TRA, n_embd from flip-flop, beta2 from nobody."""
    flags = ("--n_head 2 --n_layer 1 --block_size 8 --max_iters 1 --eval_iters 1 "
             "--no-evaluate").split()
    command(home, "train.py", "--model", "tra", "--data", "flipflop", "--batch_size", 3, *flags,
            "--out_dir", "a")
    config = torch.load(home / "a" / "ckpt.pt", weights_only=True)["config"]
    task = data.find("flipflop").defaults["nano"]
    assert config["batch_size"] == 3 and config["norm"] == "post" and config["qk_norm"]
    assert config["n_embd"] == task["n_embd"] != 64 and config["vocab_size"] == 5
    assert config["beta2"] == train.TrainConfig().beta2 and config["lr_decay_iters"] == 1
    command(home, "train.py", "--model", "tra", "--data", "flipflop", "--norm", "pre",
            "--no-qk_norm", *flags, "--out_dir", "b", "--size", "paper", "--n_embd", 16)
    config = torch.load(home / "b" / "ckpt.pt", weights_only=True)["config"]
    assert config["norm"] == "pre" and not config["qk_norm"] and config["n_embd"] == 16
    assert config["grad_clip"] == data.find("flipflop").defaults["paper"]["grad_clip"] == 0.0


def test_help_lists_the_models_own_flags(trained):
    cable, _ = command(trained, "train.py", "--model", "cable", "--help")
    rope, _ = command(trained, "train.py", "--help", "--model", "rope")
    assert "--log_kernel" in cable and "K-CABLE" in cable
    assert "--log_kernel" not in rope and "--capped" in rope
    for flag in ("batch_size", "max_iters", "learning_rate", "eval_interval", "out_dir",
                 "tokenizer", "norm", "qk_norm", "resume"):
        assert f"--{flag}" in cable
    assert "(default: 0.95)" in cable
    counting, _ = command(trained, "train.py", "--data", "counting", "--help")
    assert "--max_ops X" in counting and "operations in a program" in counting
    resumed, _ = command(trained, "train.py", "--resume", "cable", "--help")
    assert "--max_iters" in resumed and "--n_layer" not in resumed


@pytest.mark.parametrize("script", COMMANDS)
def test_every_script_has_help_with_examples(script, trained):
    out, _ = command(trained, script, "--help")
    assert f"python {script}" in out or f"python -m {script}" in out
    assert max(map(len, out.splitlines())) <= 120


# -----------------------------------------------------------------------------
# bad input: one clear line, exit code not 0, nothing lost

@pytest.mark.parametrize("flags, says", [
    ("--model cabel", "unknown model 'cabel': did you mean label or cable?"),
    ("--model classics", "model_classics.py does not answer to 'classics' but to learned, sinus"),
    ("--model cable --learning_rat 1", "argument --learning_rat: did you mean --learning_rate?"),
    ("--model rope --log_kernel", "unknown argument --log_kernel"),
    ("--model cable --size nanoo", "unknown size 'nanoo': did you mean nano?"),
    ("--data stdlb", "unknown corpus 'stdlb' (nor is it a file or folder): did you mean stdlib?"),
    ("--max_iters ten", "argument --max_iters: invalid int value: 'ten'"),
    ("--batch_size 0", "--batch_size must be at least 1"),
    ("--learning_rate -1", "--learning_rate must be more than 0"),
    ("--learning_rate inf", "--learning_rate must be more than 0, and finite"),
    ("--min_lr inf", "--min_lr must be 0 or more, and less"),
    ("--learning_rate 1e-4", "--min_lr 0.0004 is more than --learning_rate 0.0001: lower it, too"),
    ("--bema --rho inf", "--rho must be at least 1, and less"),
    (f"--batch_size {10**29}", "--batch_size must be at least 1, and less than 2^31"),
    (f"--gradient_accumulation_steps {10**29}", "--gradient_accumulation_steps must be at least"),
    (f"--n_layer {10**29}", "--n_layer must be at least 1, and at most 10000"),
    (f"--model cope --P {10**29}", "--P must be between -2^31 and 2^31"),
    (f"--model label --n_label {10**29}", "--n_label must be between -2^31 and 2^31"),
    ("--data set_complement --n 1000000000000", "--n must be between -2^31 and 2^31"),
    (f"--data dyck --k {10**29}", "--k must be between -2^31 and 2^31"),
    ("--data flipflop --p_ignore nan", "--p_ignore must be between"),
    ("--device cpu:99", "--device cpu:99: there is one cpu here"),
    ("--data ~nobody/x", "unknown corpus '~nobody/x' (nor is it a file or folder)"),
    ("--lr_decay cos", "--lr_decay must be one of cosine, linear, none"),
    ("--compile yes", "--compile must be one of auto, on, off"),
    ("--seed -1", "--seed must be between 0 and 8388607"),
    ("--n_layer 0", "--n_layer must be at least 1"),
    ("--n_embd 30 --n_head 4", "n_embd=30 is not divisible by n_head=4"),
    ("--model rope --n_embd 12 --n_head 4", "head size 3 is odd"),
    ("--norm peri", "norm='peri' is not one of pre, post"),
    ("--model postnorm --final_norm", "unknown argument --final_norm"),
    ("--model postnorm --norm none", "norm='none' is not one of pre, pre_final, output"),
    ("--model postnorm --pe alibi", "pe='alibi' is not one of rope, nope"),
    ("--model rope --pe abili", "pe=abili: what is called --model rope has rope"),
    ("--dropout 2", "--dropout must be in [0, 1)"),
    ("--dropout nan", "--dropout must be in [0, 1)"),
    ("--bema --kappa 2", "--kappa must be between 0 and 1"),
    ("--bema --eta -1", "--eta must be 0 or more"),
    ("--step tanh", "step='tanh' is not one of relu, softplus"),
    ("--no-causal", "unknown argument --no-causal"),
    ("--tokenizer gtp2", "unknown tokenizer 'gtp2': choose bytes or gpt2"),
    ("--dtype float16", "unknown dtype 'float16'"),
    ("--device cuda", "--device cuda: torch"),
    ("--device gpu", "unknown device 'gpu'"),
    ("--data empty.txt", "empty.txt has no text in it"),
    ("--data short.txt", "short.txt is too short: its"),
    ("--model", "argument --model: expected one argument"),
    ("--data=", "--model, --data and --size need a value"),
    ("--model label --n_label -5", "n_label must be 0"),
    ("--max_tokens -5", "--max_tokens must be 0 (all) or more"),
    ("--resume nowhere", "no checkpoint at nowhere"),
    ("--resume=", "--resume needs a run's folder"),
    ("--data flipflop --block_size 2", "block_size=2 must be even and at least 4"),
    ("--data flipflop --block_size 65", "block_size=65 must be even and at least 4"),
    ("--data flipflop --p_dense 1.5", "p_dense=1.5 must be between 0 and 1"),
    ("--data flip_flop", "unknown corpus 'flip_flop' (nor is it a file or folder): did you mean f"),
    ("--data flipflop --size tiny", "unknown size 'tiny': choose from nano, paper"),
    ("--data selective_copy --block_size 64", "block_size = 4n + 1 with n >= 2 symbols to copy"),
    ("--data recall --block_size 8", "8 pairs and a question do not fit into block_size=8"),
    ("--data recall --n_pairs 17", "n_pairs from 1 to n_keys"),
    ("--data counting --vars 0", "vars=0 must be between 1 and 5"),
    ("--data counting --max_ops 2", "counting needs max_ops from 3 to 10000"),
    ("--data set_complement --n 1", "set complement needs n >= 2"),
    ("--data set_complement --n 8 --block_size 8", "block_size from 1 to n - 1"),
    ("--data dyck --k 0", "dyck needs k, m and block_size of at least 1"),
    ("--data tomita --language 4", "language=4: choose from 3, 7"),
    ("--data tomita --p_end 1.5", "tomita needs p_switch and p_end between 0 and 1"),
    ("--data max_retrieval", "max_retrieval is numbers, not tokens"),
    ("--model cope --P 0", "P=0 must be at least 1"),
    ("--model cope --gates value", "gates='value' is not one of key, val, sep"),
    ("--model cope --slopes 1,2", "unknown argument --slopes"),
    ("--model cope_alibi --n_head 2 --slopes 1,2,3", "slopes='1,2,3' must be n_head=2 numbers"),
    ("--model cope_drop --P 1", "drop needs a table, and P of at least 2"),
    ("--model cope_mlp --drop", "drop needs a table, and P of at least 2"),
    ("--model cope_window --window -1", "window=-1 must be 0 or more"),
    ("--model cope_alibi --slopes 1,two", "slopes='1,two' must be numbers"),
    ("--model cope_alibi --slopes nan,1", "slopes='nan,1' must be numbers"),
    ("--model cope_mlp --slopes 1,2", "slopes='1,2' must be n_head=2 numbers, with position=alibi"),
    ("--model cope_mlp --plus absolute", "plus='absolute' is not one of none, relative, rope"),
    ("--model cope_rope --gates val", "plus=rope turns q and k"),
    ("--model cope_rope --n_embd 12 --n_head 4", "head size 3 is odd"),
    ("--model learned_hard --block_size 16 --data flipflop --p_ignore 2", "p_ignore=2.0 must be"),
    ("--model label --n_label 5 --n_embd 16", "tokens do not fit in n_label=5 labels"),
    ("--model diff --n_embd 16 --n_head 8", "head size 2 is not divisible by 4"),
    ("nonsense", "unexpected argument 'nonsense'"),
])
def test_train_says_what_is_wrong(trained, flags, says, tmp_path):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = ["--max_iters", 1, "--no-evaluate", "--out_dir", tmp_path / "run", *flags.split()]
    if "--data" not in flags:
        words += ["--data", "notes"]
        if "--n_" not in flags:
            words += ["--n_head", 2]
    if flags.endswith(("--model", "=")):  # their value is missing
        words = [*words[-4:], *words[:-4]]
    assert says in complaint(trained, "train.py", *words)


def damaged(trained, folder):
    """Checkpoints that are cut off, no checkpoint, another model's, of a model that is gone."""
    whole = (trained / "cable" / "ckpt.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[:len(whole) // 2])
    (folder / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": torch.ones(3)}, folder / "strange.pt")
    for name, model in (("other", "rope"), ("gone", "cabel")):
        checkpoint = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)
        checkpoint["config"]["model"] = model
        torch.save(checkpoint, folder / f"{name}.pt")


def test_bad_checkpoints(trained, tmp_path):
    damaged(trained, tmp_path)
    for name in ("cut", "text", "strange"):
        for script in ("sample.py", "eval.py"):
            said = complaint(trained, script, tmp_path / f"{name}.pt")
            assert "is not a whole checkpoint" in said
    assert "do not fit --model rope" in complaint(trained, "sample.py", tmp_path / "other.pt")
    assert "unknown model 'cabel': did" in complaint(trained, "sample.py", tmp_path / "gone.pt")
    assert "no checkpoint at nowhere" in complaint(trained, "eval.py", "nowhere")


def set_config(**changes):
    return lambda checkpoint: checkpoint["config"].update(changes)


def set_weights(change):
    """The first of the weights, changed."""
    def changed(checkpoint):
        name = next(iter(checkpoint["model"]))
        checkpoint["model"][name] = change(checkpoint["model"][name])
    return changed


FOREIGN = {  # what was changed in a checkpoint of ours, and what is said about it
    "layers": (set_config(n_layer=10**9), "n_layer=1000000000 with"),
    "width": (set_config(n_embd=10**9, n_head=1), "n_embd=1000000000 with weights of"),
    "heads": (set_config(n_head=10**15), "n_head=1000000000000000 with"),
    "one more layer": (set_config(n_layer=2), "do not fit --model cable"),
    "words for numbers": (set_config(n_layer="1"), "n_layer='1' is no int"),
    "numbers for words": (set_config(tokenizer=3), "tokenizer=3 is no str"),
    "a list": (set_config(dropout=[0.0]), "dropout of type list"),
    "a truth": (set_config(block_size=True), "block_size=True is no int"),
    "nan": (set_config(dropout=math.nan), "dropout=nan"),
    "30 digits": (set_config(block_size=10**30), "block_size=1000"),
    "numbers": (set_config(data="max_retrieval"), "its data is max_retrieval: numbers, not tokens"),
    "an odd name": (set_config(**{"a b": 1}), "a setting called 'a b'"),
    "another size": (set_config(n_embd=8), "do not fit --model cable"),
    "a bad choice": (set_config(norm="no"), "norm='no' is not one of pre, post"),
    "no seed": (lambda c: c["config"].pop("seed"), "its config has no seed"),
    "no tokenizer": (lambda c: c["config"].pop("tokenizer"), "its config has no tokenizer"),
    "no weights": (lambda c: c["model"].clear(), "with 0 tensors of weights"),
    "nan weights": (set_weights(lambda x: x * math.nan), "are not finite"),
    "another shape": (set_weights(lambda x: x[:1].contiguous()), "do not fit --model cable"),
    "one number": (set_weights(lambda x: torch.zeros(()).expand(10**9, 10**9)), "not a plain"),
    "whole numbers": (set_weights(torch.Tensor.long), "are not a plain tensor"),
    "a number": (set_weights(lambda x: 3), "are not a plain tensor"),
    "config": (lambda c: c.update(config=3), "is not a whole checkpoint"),
    "iter": (lambda c: c.update(iter="2"), "is not a whole checkpoint"),
    "a step before the first": (lambda c: c.update(iter=-1), "it has iter=-1"),
    "seconds": (lambda c: c.update(seconds=math.nan), "it has seconds=nan"),
    "bema": (lambda c: c.update(bema=3), "cannot be used"),
    "other bema": (lambda c: c.update(bema=dict(start=dict(x=torch.ones(2)))), "BEMA weights x"),
    "etc": (set_config(data="/etc/passwd"), "/etc/passwd is not what"),
    "usr": (set_config(data="/usr"), "was never prepared here"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_checkpoints_are_refused_before_anything_is_built(what, trained, tmp_path):
    change, says = FOREIGN[what]
    checkpoint = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    before = sorted((trained / "prepared").iterdir())
    scripts = [("eval.py",), ("train.py", "--resume")]
    if what not in ("etc", "usr"):  # a sample needs no text
        scripts += [("sample.py",), ("maps.py", "attention")]
    for words in scripts:
        assert says in complaint(trained, *words, tmp_path)
    assert sorted((trained / "prepared").iterdir()) == before


def test_a_foreign_optimizer_and_settings_of_training(trained, tmp_path):
    shutil.copytree(trained / "notes", tmp_path / "notes")
    for change, says in (
            (lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.ones(3)), "does not fit"),
            (lambda c: c.update(optimizer=3), "the optimizer's state in"),
            (set_config(bema=True), "the BEMA weights in"),
            (set_config(learning_rate="fast"), "learning_rate='fast' is no float"),
            (set_config(evaluate=1), "evaluate=1 is no bool")):
        checkpoint = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, tmp_path / "ckpt.pt")
        assert says in complaint(trained, "train.py", "--resume", tmp_path, "--max_iters", 3)


def test_the_text_of_a_checkpoint_from_elsewhere_has_to_be_named(trained, home):
    """Its path may be there: it is not read unless it was prepared here, or is named."""
    shutil.copytree(trained / "cable", home / "run")
    said = complaint(home, "eval.py", "run", "--lengths", 16)
    assert "name the text: --data" in said and not (home / "prepared").exists()
    command(home, "eval.py", "run", "--lengths", 16, "--data", "notes")
    command(home, "train.py", "--resume", "run", "--data", "notes", "--max_iters", 3,
            "--no-evaluate")


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_known_before_a_model_is_built(name):
    state = torch.get_rng_state()
    config = TINY | runs.models()[name][1] | dict(model=name)
    if name == "learned_hard":
        config["block_size"] = 16
    ours = runs.shapes(config)
    assert torch.equal(state, torch.get_rng_state())
    assert ours == {n: x.shape for n, x in runs.make_model(config).state_dict().items()}


@pytest.mark.parametrize("flags, says", [
    ("cable --n_layer 3", "--n_layer 3 contradicts the run being resumed, which has n_layer=1"),
    ("cable --log_interval 0", "--log_interval must be at least 1"),
    ("cable --max_iters 1", "--max_iters 1: the run is at iter 2 already"),
    ("cable --model rope", "--model rope contradicts the run being resumed, which has model=cable"),
    ("cable --seed 3", "--seed 3 contradicts the run being resumed"),
    ("cable --no_such_flag 1", "unknown argument --no_such_flag"),
    ("rope --data counting", "--data counting contradicts the run being resumed, which has data="),
])
def test_a_resumed_run_cannot_become_another(trained, flags, says):
    assert says in complaint(trained, "train.py", "--resume", *flags.split())


def test_a_folder_that_holds_a_run_is_not_overwritten(trained):
    before = (trained / "cable" / "ckpt.pt").read_bytes()
    said = complaint(trained, "train.py", "--data", "notes", *TINY_FLAGS, "--out_dir", "cable")
    assert "cable already holds a run; continue it with --resume cable" in said
    assert (trained / "cable" / "ckpt.pt").read_bytes() == before


def refused_while_locked(home, *words):
    """Another process is at work in the folder run: it is left as it was."""
    before = (home / "run" / "log.jsonl").read_text()
    with open(home / "run" / "lock", "w") as lock:
        train.fcntl.flock(lock, train.fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError) as e:
            command(home, "train.py", *words)
    with pytest.raises(SystemExit, match="error: another process is at work in this folder"):
        runs.in_one_line(e.type, e.value, None)
    assert (home / "run" / "log.jsonl").read_text() == before


def test_a_living_run_is_not_resumed_a_second_time(home):
    """Its log has lines that are newer than its checkpoint: they are the living run's."""
    command(home, "train.py", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS,
            "--out_dir", "run")
    with open(home / "run" / "log.jsonl", "a") as log:
        log.write('{"iter": 3, "loss": 1.0}\n')
    refused_while_locked(home, "--resume", "run", "--max_iters", 4)
    command(home, "train.py", "--resume", "run", "--max_iters", 4, "--no-evaluate")
    assert set(losses(home / "run")[0]) == {1, 2, 3, 4}


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(home):
    flags = "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    (home / "run").mkdir()
    for text in ("", '{"iter": 1, "loss": 9}\n'):
        (home / "run" / "log.jsonl").write_text(text)
        said = complaint(home, "train.py", "--resume", "run")
        assert "ended before its first; start it again with --out_dir run" in said
    refused_while_locked(home, *flags, "--out_dir", "run")
    command(home, "train.py", *flags, "--out_dir", "run")
    assert set(losses(home / "run")[0]) == {1, 2} and losses(home / "run")[0][1] != 9
    assert "already holds a run" in complaint(home, "train.py", *flags, "--out_dir", "run")


def test_a_checkpoint_without_its_log_is_not_overwritten(home, trained):
    flags = "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    for out in ("run", "out/cable-notes-nano"):
        (home / out).mkdir(parents=True)
        shutil.copy(trained / "cable" / "ckpt.pt", home / out)
    assert "already holds a run" in complaint(home, "train.py", *flags, "--out_dir", "run")
    command(home, "train.py", "--model", "cable", *flags)
    for out in ("run", "out/cable-notes-nano"):
        assert [path.name for path in (home / out).iterdir()] == ["ckpt.pt"]
        assert (home / out / "ckpt.pt").read_bytes() == (trained / "cable/ckpt.pt").read_bytes()
    assert (home / "out/cable-notes-nano-2/ckpt.pt").exists()


def test_a_model_whose_positions_end_is_trained_and_evaluated_without_an_error(home):
    """What it could write is written."""
    out, err = command(home, "train.py", "--model", "learned", "--data", "notes", "--max_iters", 1,
                       *TINY_FLAGS)
    assert "error" not in out + err
    assert re.search(r"--- 16 tokens, .*; learned positions end at block_size=16; 17 ", err)
    assert (home / "out/learned-notes-nano/eval.json").exists()


@pytest.mark.parametrize("model", ["learned", "relative"])
def test_a_table_of_positions_cannot_begin_with_one_of_another_length(home, trained, model):
    flags = "--model", model, "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    said = complaint(home, "train.py", *flags, "--block_size", 8, "--init_from", "run")
    assert "--init_from run: its block_size is 16, the new run's 8" in said
    said = complaint(home, "train.py", *flags, "--block_size", 8, "--n_embd", 32, "--init_from",
                     "run")
    assert "--init_from run: its n_embd is 16, the new run's 32" in said


DYCK_PANEL = json.dumps(dict(data="dyck", k=2, m=3, block_size=16, batch_size=2, longest=32,
                             at=[17, 32]))


@pytest.mark.parametrize("words, says", [
    ("sample.py cable --prompt=", "the prompt is empty"),
    ("sample.py cable --prompt_file gone.txt", "could not read gone.txt"),
    ("sample.py cable --prompt_file empty.txt", "the prompt is empty"),
    ("sample.py cable --prompt_file ''", "could not read "),
    ("sample.py cable --prompt x --prompt_file empty.txt", "--prompt or --prompt_file, not both"),
    ("sample.py cable --max_new_tokens 0", "--max_new_tokens and --num_samples must be at least 1"),
    ("sample.py cable --temperature nan", "--temperature and --top_k must be 0 or more"),
    ("sample.py cable --temperature 1e-300", "--temperature must be 0, which is greedy, or at"),
    ("sample.py cable --max_new_tokens 1000000000000", "--max_new_tokens must be at most 2147"),
    ("sample.py cable --device cpu:99", "--device cpu:99: there is one cpu here"),
    (f"eval.py cable --lengths 16 {10**29}", "--lengths must be at most 2147483647"),
    ("eval.py cable --data=", "--data needs a value"),
    (f"bench.py decode --context {10**29}", "--context must be at most 2147483647"),
    ("plot.py lengths types.json", "types.json cannot be drawn (ValueError: "),
    ("plot.py lengths deep.json", "is not a file that eval.py"),
    ("plot.py errors rope --out x ''", "unexpected argument ''"),
    ("sample.py cable --seed -1", "--seed must be 0 or more"),
    ("sample.py learned --prompt 'more than sixteen'", "learned positions end at block_size=16"),
    ("sample.py rope", "was trained on flipflop, which has no text to write"),
    ("eval.py learned --lengths 40", "no length could be scored"),
    ("eval.py cable --lengths 99999", "are too few for a window of 99999"),
    ("eval.py cable --split tset", "unknown split 'tset': did you mean test?"),
    ("eval.py tra --split desne", "unknown split 'desne': did you mean dense?"),
    ("eval.py cable --lengths 0", "--lengths, --sequences and --queries must be at least 1"),
    ("eval.py cable --tokens -1", "--tokens and --seed 0 or more"),
    ("eval.py cable --data flipflop", "notes, not on flipflop: it can be scored on"),
    ("eval.py cable --data gone", "unknown corpus 'gone' (nor is it a file or folder)"),
    ("eval.py rope --data notes", "rope/ckpt.pt was trained on flipflop, not on"),
    ("eval.py rope cable", "was trained on"),
    ("eval.py cable --sequences 5", "--sequences is for a synthetic task; text has --tokens"),
    ("eval.py cable --tokens 30 --lengths 16 32 --strided", "are too few for a window of 32"),
    ("eval.py rope --strided", "--strided is for text"),
    ("eval.py rope --tokens 100", "--tokens is for text; a synthetic task has --sequences"),
    ("eval.py rope --lengths 7", "block_size=7 must be even"),
    ("eval.py rope --bema", "has no BEMA weights: it was trained without --bema"),
    ("eval.py cable --kernel on", "unknown kernel 'on': choose from auto, off"),
    ("eval.py cable --dtype half", "unknown dtype 'half'"),
    ("plot.py", "the following arguments are required: kind"),
    ("plot.py maps", "invalid choice: 'maps'"),
    ("plot.py lengths cable/log.jsonl", "is not a file that eval.py"),
    ("plot.py lengths odd.json", "is not a file that eval.py"),
    ("plot.py scores odd.json", "is not a file that eval.py"),
    ("plot.py trials odd.json", "is not a file that eval.py"),
    ("plot.py attention odd.json", "is not a file that eval.py"),
    ("plot.py positions odd.json", "has no tvd or auc by position"),
    ("plot.py curves odd.json", "is not a file that eval.py"),
    ("plot.py curves nowhere", "could not read"),
    ("plot.py curves cable --out x.xyz", "use .png, .pdf or .svg"),
    ("plot.py errors cable", "no scores by step in there"),
    ("plot.py errors rope --metric exact_mach", "has no exact_mach: did you mean exact_match?"),
    ("maps.py attention learned", "learned positions end at block_size=16"),
    ("maps.py attention cable --split val", "--split is for synthetic tasks"),
    ("maps.py attention rope --kinds steps", "invalid choice: 'steps'"),
    ("maps.py attention rope --prompt x", "flipflop has no text: leave out --prompt"),
    ("maps.py attention rope --leng 16", "unknown argument --leng"),
    ("maps.py attention rope --split desne", "unknown split 'desne': did you mean dense?"),
    ("maps.py attention cable --layer 5", "--layer 5: the model has layers 0 to 0"),
    ("maps.py attention cable --length -1", "--seed and --length must be 0 or more"),
    ("maps.py attention cable --prompt abc --out x.xyz", "use .png, .pdf or .svg"),
    ("maps.py steps rope cable", "these runs read different sequences"),
    ("maps.py play rope cable", "these runs read different sequences"),
    ("maps.py play learned --prompt 'more than sixteen'", "learned positions end at block_size=16"),
    ("maps.py play tra --out x.png", "cannot write x.png: use .html"),
    ("maps.py play tra --length 16 -1", "--seed and --length must be 0 or more"),
    ("maps.py play tra --split iid desne", "unknown split 'desne': did you mean dense?"),
    ("maps.py play tra --heads some", "invalid choice: 'some'"),
    ("reproduce.py cable_tabel1", "unknown entry 'cable_tabel1': did you mean cable_table"),
    ("reproduce.py cable_table1 --jobs 0", "--jobs must be at least 1"),
    ("reproduce.py --rows t5 cable_table1", "name the table first: python reproduce.py ENTRY"),
    ("reproduce.py --seeds 2", "name the table first: python reproduce.py ENTRY"),
    ("reproduce.py postnorm_fig1 --seeds 2", "--seeds is not for postnorm_fig1, which has trials"),
    ("reproduce.py postnorm_fig1 --rows peri", "--rows is not for postnorm_fig1, which has trials"),
    ("reproduce.py postnorm_fig1 --compile", "--compile is not for postnorm_fig1, which has"),
    ("reproduce.py postnorm_fig1 --missing", "--missing is not for postnorm_fig1, which has"),
    ("reproduce.py cable_table1 --trials 2", "--trials is not for cable_table1, which has seeds"),
    ("experiments.minimal --scheme peri --out x.json --panel 1 --trials 0", "must be at least 1"),
    ("experiments.minimal --scheme peri --out x.json --panel '{}'", "--panel has no data"),
    ("experiments.minimal --scheme perri --out x.json --panel '{}'", "did you mean peri?"),
    ("experiments.minimal --scheme peri --out x.json --peak -1 --panel '{}'", "--peak between 0"),
    ("experiments.minimal --scheme peri --out x.json --panel "
     "'{\"data\": \"recall\", \"batch_size\": 1, \"longest\": 9, \"at\": [1, 2]}'",
     "recall has no true distribution"),
    (f"experiments.minimal --scheme none --out x.json --panel '{DYCK_PANEL}'",
     "--scheme none do not fit: norm='none' is not one of"),
    (f"experiments.minimal --scheme pre --seed -1 --out x.json --panel '{DYCK_PANEL}'",
     "--seed -1 must be from 0"),
    ("experiments.minimal --scheme pre --out x.json --panel "
     + f"'{DYCK_PANEL}'".replace("[17, 32]", "5"), "--panel and --scheme pre do not fit"),
    ("experiments.minimal --scheme pre --out x.json --panel "
     + f"'{DYCK_PANEL}'".replace("[17, 32]", "[17, 99]"), "at has to be [from, to], two lengths"),
    ("experiments.minimal --scheme pre --out x.json --panel "
     + f"'{DYCK_PANEL}'".replace('"longest": 32', '"longest": "32"'), "longest has to be a whole"),
    ("bench.py decod", "unknown 'decod': did you mean decode?"),
    ("bench.py train --models cabel", "unknown model 'cabel': did you mean label or cable?"),
    ("bench.py train --size nan", "unknown 'nan': did you mean nano?"),
    ("bench.py train --beside nop", "unknown model 'nop': did you mean nope?"),
    ("bench.py generate --length -5", "--length must be 0"),
    ("bench.py attention --length 5", "attention takes --lengths"),
    ("bench.py attention --ways compield", "unknown 'compield': did you mean compiled?"),
    ("bench.py train --run cable", "--run is for attention"),
    ("bench.py attention --run cable --models cable", "--run is a model already"),
])
def test_bad_requests(trained, words, says):
    before = sorted(path.name for path in trained.rglob("*"))
    assert says in complaint(trained, *shlex.split(words))
    if "learned" not in words:  # which is found out while it is scored
        assert sorted(path.name for path in trained.rglob("*")) == before


def test_perplexities_of_different_tokenizers_are_not_compared(trained, home, monkeypatch):
    ranks = {bytes([i]): i for i in range(256)} | {b"alpha ": 256}
    words = tiktoken.Encoding("gpt2", pat_str=r"\w+ |\W|\w", mergeable_ranks=ranks,
                              special_tokens={"<|endoftext|>": 257})
    bytes_ = data.text.get_encoding("bytes")
    monkeypatch.setattr(data.text, "get_encoding", lambda name: words if name == "gpt2" else bytes_)
    flags = "--data", trained / "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--tokenizer", "gpt2", "--out_dir", "other")
    said = complaint(home, "eval.py", trained / "cable", "other", "--lengths", 16)
    assert "perplexities of different tokenizers cannot be compared" in said
    command(home, "train.py", *flags, "--data", "notes", "--out_dir", "mine")
    said = complaint(home, "eval.py", trained / "cable", "mine", "--lengths", 16)
    assert "say which to score with --data" in said
    command(home, "eval.py", trained / "cable", "mine", "--lengths", 16, "--data", "notes")


def test_how_much_is_scored_does_not_depend_on_the_order_of_runs(trained, home):
    command(home, "train.py", "--data", trained / "notes", "--max_tokens", 2000, "--max_iters", 1,
            "--no-evaluate", *TINY_FLAGS, "--out_dir", "some")
    said = []
    for names in ((trained / "cable", "some"), ("some", trained / "cable")):
        out, _ = command(home, "eval.py", *names, "--data", trained / "notes", "--lengths", 16)
        said.append(re.search(r"perplexity on [\d,]+ tokens", out)[0])
    assert said[0] == said[1]
    out, _ = command(home, "eval.py", "some", "--data", trained / "notes", "--lengths", 16)
    assert said[0] not in out
    assert (home / "out" / "eval.json").exists()


def test_runs_whose_sequences_differ_are_not_compared(trained, home):
    command(home, "train.py", "--model", "rope", "--data", "flipflop", "--p_ignore", 0.5,
            "--max_iters", 1, "--no-evaluate", *TINY_FLAGS, "--out_dir", "half")
    said = complaint(home, "eval.py", trained / "rope", "half")
    assert "half/ckpt.pt was trained with p_ignore=0.5" in said and "one by one" in said
    command(home, "train.py", "--model", "rope", "--data", "counting", "--max_ops", 4,
            "--max_iters", 1, "--no-evaluate", *TINY_FLAGS, "--out_dir", "counting")
    said = complaint(home, "eval.py", "counting", "--lengths", 40)
    assert "--lengths does not make the sequences of counting longer" in said
    said = complaint(home, "plot.py", "errors", trained / "rope", "counting")
    assert "these runs are of different tasks" in said
    said = complaint(home, "bench.py", "attention", "--run", "counting", "--lengths", 99)
    assert "counting has no longer sequences" in said


def test_a_task_that_ends_before_a_split_is_scored_where_it_can_be(home):
    """Learned positions of 16 tokens, and splits that are longer: said, not broken."""
    flags = "--data", "dyck", "--max_iters", 2, "--eval_interval", 1, *TINY_FLAGS
    out, _ = command(home, "train.py", "--model", "learned", *flags)
    scores = log_of(home / "out" / "learned-dyck-nano")[-1]["scores"]
    assert scores["long"] == {} and scores["iid"]["tvd"] > 0
    assert re.search(r"^  long +-  learned positions end at block_size=16", out, re.M)


def test_a_small_text_of_ones_own_is_scored_as_far_as_it_goes(home, monkeypatch):
    """Its path is relative and its log damaged: the run is still resumed, from another folder."""
    (home / "small.txt").write_text("some words of my own. " * 60)
    flags = "--model", "rope", "--data", "small.txt", *TINY_FLAGS
    out, _ = command(home, "train.py", *flags, "--max_iters", 2, "--out_dir", "small")
    assert "lengths up to 64 only" in out and "$ python sample.py" in out
    with open(home / "small" / "log.jsonl", "ab") as f:
        f.write(b'5\n{"iter": 2, "lo\xff')
    other = home / "notes"
    shutil.copytree(home / "prepared", other / "prepared")
    out, _ = command(other, "train.py", "--resume", "../small", "--max_iters", 3, "--no-evaluate")
    assert "from iter 2" in out and set(losses(home / "small")[0]) == {1, 2, 3}


def test_a_changed_corpus_stops_a_resume_and_a_moved_one_does_not(home):
    flags = "--model", "cable", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    shutil.copytree(home / "notes", home / "moved")
    command(home, "train.py", "--resume", "run", "--data", "moved", "--max_iters", 3,
            "--no-evaluate")
    assert max(losses(home / "run")[0]) == 3
    (home / "moved" / "0.txt").write_text("something else " * 60)
    again = "train.py", "--resume", "run", "--max_iters", 4
    assert "has changed since" in complaint(home, *again)
    assert "is not what run/ckpt.pt was trained on" in complaint(home, "eval.py", "run")
    assert torch.load(home / "run" / "ckpt.pt", weights_only=True)["iter"] == 3


def test_a_run_whose_text_is_gone_is_scored_on_another_and_drawn(home):
    flags = "--model", "cable", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    (home / "notes").rename(home / "elsewhere")
    command(home, "eval.py", "run", "--data", "elsewhere", "--lengths", 16, "--tokens", 64)
    scored = json.loads((home / "run" / "eval.json").read_text())
    assert scored["tokens"] == 64 and scored["data"]["corpus"] == "elsewhere"
    out, _ = command(home, "maps.py", "attention", "run", "--prompt", "abc")
    assert "drew " in out


def test_every_validation_comes_with_a_line_about_the_steps_before_it(home):
    """Else the time of steps since the last line would be lost when the clock starts anew."""
    command(home, "train.py", "--data", "notes", "--max_iters", 7, "--no-evaluate", *TINY_FLAGS,
            "--eval_interval", 3, "--log_interval", 5, "--out_dir", "run")
    log = log_of(home / "run")
    assert [row["iter"] for row in log if "loss" in row] == [3, 5, 6, 7]
    assert [row["iter"] for row in log if "val_loss" in row] == [3, 6, 7]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_a_compiled_training_has_the_same_losses(home):
    """Of the models whose attention goes through kernels/ on a CPU, and of one whose does not."""
    found = {}
    for model, compiled in itertools.product(("cable", "tra", "rope"), ("on", "off")):
        run = f"{model}-{compiled}"
        said, _ = command(home, "train.py", "--model", model, "--data", "notes", "--max_iters", 3,
                          "--no-evaluate", *TINY_FLAGS, "--compile", compiled, "--out_dir", run)
        assert ("torch.compile" in said) == (compiled == "on")
        found[run] = [row["loss"] for row in log_of(home / run) if "loss" in row]
    for model in ("cable", "tra", "rope"):
        assert len(found[f"{model}-on"]) == 3
        assert found[f"{model}-on"] == pytest.approx(found[f"{model}-off"], abs=1e-3)


def test_compiling_needs_a_compiler(home, monkeypatch):
    monkeypatch.setattr(train, "CXX", "g+++")
    flags = "--data", "notes", *TINY_FLAGS, "--compile", "on", "--out_dir", "run"
    assert "there is no g+++ here" in complaint(home, "train.py", *flags)
    assert not (home / "run").exists()


def test_an_exploding_loss_is_named(home):
    flags = "--learning_rate", "1e30", "--grad_clip", 0, "--warmup_iters", 1
    said = complaint(home, "train.py", "--data", "notes", "--max_iters", 40, "--no-evaluate",
                     *TINY_FLAGS, *flags, "--out_dir", "run")
    assert "error: the loss is" in said and "try a lower --learning_rate" in said
    assert not (home / "run" / "ckpt.pt").exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The last step may break them after a loss that was finite."""
    model = make("nope")
    next(model.parameters()).data[0] = math.nan
    with pytest.raises(SystemExit, match="weights are not finite at iter 3; try a lower"):
        train.save(tmp_path, True, model, None, dict(iter=3))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(home, monkeypatch):
    flags = "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    before = {path.name: path.read_bytes() for path in (home / "run").glob("*.pt")}
    whole = torch.save

    def half(value, path):
        whole(value, path)
        path.write_bytes(path.read_bytes()[:1000])
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos\nmore lines")
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match=r"could not write run/(best|ckpt).pt \(disk full, or a "
                       r"limit reached: it needs 0.\d MB, [\d,.]+ MB are free; the previous one"):
        command(home, "train.py", "--resume", "run", "--max_iters", 5, "--no-evaluate")
    assert {path.name: path.read_bytes() for path in (home / "run").glob("*.pt")} == before
    assert not list((home / "run").glob("*tmp*"))


def test_what_ends_a_script_is_said_in_one_line_or_not_at_all(monkeypatch, capfd):
    """Ctrl-C, a full disk; a mistake of ours keeps its traceback."""
    for error, code in ((KeyboardInterrupt(), 130), (OSError("no space"), "error: no space")):
        with pytest.raises(SystemExit) as e:
            runs.in_one_line(type(error), error, None)
        assert e.value.code == code
    assert capfd.readouterr().err == ""
    for error in (MemoryError("1 TiB"), torch.OutOfMemoryError("CUDA out of memory"),
                  RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):
        with pytest.raises(SystemExit, match="error: this does not fit into memory; try smaller"):
            runs.in_one_line(type(error), error, None)
    mistake = ZeroDivisionError("ours")
    runs.in_one_line(type(mistake), mistake, None)
    assert "ZeroDivisionError: ours" in capfd.readouterr().err
    for script, module in COMMANDS.items():
        source = Path(module.__file__).read_text()
        end = source[source.index('\nif __name__ == "__main__":\n'):]
        assert end.index("sys.excepthook = runs.in_one_line\n") < end.index("    main()\n"), script


# -----------------------------------------------------------------------------
# signals, several processes, a full disk: in processes of their own, in a copy of the repository

ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


@pytest.fixture(scope="session")
def repo(tmp_path_factory):
    """A copy of the repository, with text already prepared as the standard library's."""
    folder = write_notes(tmp_path_factory.mktemp("repo"))
    for pattern in ("*.py", "data/*.py", "kernels/*.py", "experiments/*.py", "pyproject.toml"):
        for path in ROOT.glob(pattern):
            (folder / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy(path, folder / path.relative_to(ROOT))
    with standing_in(folder):
        data.text.PREPARED = folder / "data" / "prepared"
        target, source, _ = data.text.look_up("stdlib", "bytes")
        made, meta = data.text.prepare("notes", "bytes")
        shutil.copytree(made, target)
        meta |= dict(corpus="stdlib", source=source)
        (target / "meta.json").write_text(json.dumps(meta))
    return folder


def process(repo, *words, code=0, **env):
    """Run python with these words; no traceback, ever -> stdout, stderr"""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=repo, env=os.environ | ONE_THREAD | env,
        capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path):
    """Nothing is imported but what a save needs."""
    (tmp_path / "ckpt.pt").write_text("whole")
    killed = f"""if True:
        import os, signal, sys, types
        for name in ("torch", "data", "kernels"):  # they take long to import
            sys.modules[name] = types.ModuleType(name)
        sys.modules["data"].nearest = None
        import runs
        from pathlib import Path
        def half(tmp):
            tmp.write_bytes(b"half a checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)
        runs.write_safely(Path({str(tmp_path / "ckpt.pt")!r}), half)"""
    done = subprocess.run([sys.executable, "-c", killed], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "ckpt.pt").read_text() == "whole"


def test_what_dead_processes_left_half_written_goes(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = {f"y.json{runs.HALF}{os.getppid()}", f"z{runs.HALF}", f"z{runs.HALF}²",
            f"backup.tmp{dead.pid}", "notes.tmpl"}
    for name in (f"x.png{runs.HALF}{dead.pid}", *left):
        (tmp_path / name).write_text("half")
    runs.write_json(tmp_path / "x.json", {})
    assert {path.name for path in tmp_path.iterdir()} == left | {"x.json"}


def test_a_folder_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"could not write \. \("):
        runs.write_json(Path("."), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_a_full_disk_leaves_the_previous_picture(kind, tmp_path, monkeypatch):
    """savefig meets a disk with room for 1,000 bytes."""
    out = tmp_path / f"picture.{kind}"
    out.write_text("whole")
    fig, _ = plot.panels(1, 2, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=f"could not write .*picture.{kind}"):
            runs.write_figure(fig, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.read_text() == "whole" and list(tmp_path.iterdir()) == [out]
    plot.plt.close(fig)
    full = OSError(errno.ENOSPC, "No space left on device")

    def write_bytes(*args):
        raise full
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="disk full, or a limit reached: .* previous one is whole"):
        runs.write_figure(fig, out)


def test_long_prompts_and_windows_say_how_far_they_are(monkeypatch, capsys):
    """After every layer; two windows of 4 are half done when the first is, pieces by the square."""
    model = make("rope")
    monkeypatch.setattr(runs, "piece", lambda model: 2)
    monkeypatch.setattr(runs.time, "time", itertools.count(0, 3).__next__)
    sample.read(model, torch.arange(4)[None], runs.new_cache(model, 4))
    said = ["12 %", "25 %", "62 %", "100 %"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" of ")[0] for line in lines] == [f"  prompt: {share}" for share in said]
    assert lines[1] == "  prompt: 25 % of 4 tokens, eta 0m18s"
    monkeypatch.setattr(runs, "piece", lambda model: 4)
    evaluation.token_losses(model, np.arange(9), 4, "cpu", contextlib.nullcontext())
    said = ["25 %", "50 %", "75 %", "100 %"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" of 8 ")[0] for line in lines] == [f"  windows of 4: {n}" for n in said]
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.slow
def test_a_kill_during_the_last_evaluation_ends_that_too(repo, tmp_path):
    shutil.copytree(repo, tmp_path / "own")
    (tmp_path / "own" / "eval.py").write_text(
        "import os, time; print('eval is', os.getpid(), flush=True); time.sleep(60)")
    run = subprocess.Popen(
        [sys.executable, "train.py", "--data", "notes", "--max_iters", "1", *TINY_FLAGS],
        cwd=tmp_path / "own", text=True, stdout=subprocess.PIPE, env=os.environ | ONE_THREAD)
    number = next(int(line.split()[2]) for line in run.stdout if line.startswith("eval is"))
    run.terminate()
    assert run.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_more_processes_than_gpus(monkeypatch):
    for name, found in (("is_available", True), ("device_count", 4)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setenv("LOCAL_RANK", "4")
    args = argparse.Namespace(device="auto", dtype="float32", kernel="auto")
    with pytest.raises(SystemExit, match="--device cuda:4: there are 4 GPUs, counted from 0"):
        runs.setup(args)


@pytest.mark.slow
def test_ctrl_c_in_a_process_and_on(repo):
    """The same losses, to the last digit, through a real interrupt; none of it is a traceback."""
    flags = [*map(str, HARD), "--max_iters", "200", "--eval_interval", "50"]
    command(repo, "train.py", *flags, "--out_dir", "out/whole")
    broken = subprocess.Popen(
        [sys.executable, "train.py", *flags, "--out_dir", "out/broken"], cwd=repo, text=True,
        env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in broken.stdout:
        if line.startswith("iter 7/"):
            broken.send_signal(signal.SIGINT)
            break
    rest, err = broken.communicate(timeout=60)
    assert broken.returncode == 130 and "Traceback" not in err
    assert "continue with: python train.py --resume out/broken" in rest
    assert 7 <= torch.load(repo / "out/broken/ckpt.pt", weights_only=True)["iter"] < 200
    command(repo, "train.py", "--resume", "out/broken", "--no-evaluate")
    same_run(repo / "out" / "whole", repo / "out" / "broken")


@pytest.mark.slow
def test_ctrl_c_ends_a_long_prompt_and_a_long_evaluation_at_once(repo):
    command(repo, "train.py", "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
            "--out_dir", "out/long")
    (repo / "prompt.txt").write_text("word " * 100_000)
    (repo / "long.txt").write_text("word " * 2_000_000)
    for words, sign in (("sample.py out/long --prompt_file prompt.txt", "prompt: "),
                        ("eval.py out/long --data long.txt --lengths 65536", "windows of 65,5")):
        run = subprocess.Popen([sys.executable, *words.split()], cwd=repo, text=True,
                               env=os.environ | ONE_THREAD, stderr=subprocess.PIPE)
        line = next(line for line in run.stderr if sign in line and "eta" in line)
        run.send_signal(signal.SIGINT)
        start = time.time()
        _, err = run.communicate(timeout=60)
        assert run.returncode == -signal.SIGINT and not err and time.time() - start < 1, line + err


@pytest.mark.slow
def test_an_interrupted_pair_of_processes_stops_together_and_goes_on(repo):
    """A signal that reaches one process alone stops both at the same step, with a checkpoint."""
    flags = ["--model", "cable", "--data", "notes", "--max_iters", "3000", "--no-evaluate",
             *TINY_FLAGS, "--out_dir", "out/pair"]
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    # the second process interrupts itself, right after the two have agreed to go on
    (repo / "hurt.py").write_text("""if True:
        import os, signal
        import torch.distributed as dist
        import train
        original, calls = dist.all_reduce, []
        def all_reduce(*a, **k):
            original(*a, **k)
            calls.append(1)
            if len(calls) == 21 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGINT)
        dist.all_reduce = train.dist.all_reduce = all_reduce
        train.main()""")
    done = subprocess.run([sys.executable, *launch, "hurt.py", *flags], cwd=repo, text=True,
                          capture_output=True, timeout=300, env=os.environ | ONE_THREAD)
    assert "saved; continue with" in done.stdout, done.stdout + done.stderr
    assert "Connection closed" not in done.stderr
    stopped = torch.load(repo / "out/pair/ckpt.pt", weights_only=True)["iter"]
    assert 5 < stopped < 3000
    process(repo, *launch, "train.py", "--resume", "out/pair", "--max_iters", stopped + 2)
    assert max(losses(repo / "out" / "pair")[0]) == stopped + 2


@pytest.mark.slow
def test_a_killed_worker_ends_all_and_one_process_goes_on(repo):
    flags = ["--model", "cable", "--data", "notes", "--max_iters", "40", "--eval_interval", "10",
             "--no-evaluate", *TINY_FLAGS]
    (repo / "killed.py").write_text("""if True:
        import os, signal, sys, time
        import train
        original, calls = train.agreed, []
        def agreed(*a):
            calls.append(1)
            if len(calls) == 15 and os.environ["RANK"] == "1":
                print("killed at", time.time(), flush=True, file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*a)
        train.agreed = agreed
        train.main()""")
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2 killed.py".split()
    done = subprocess.run([sys.executable, *launch, *flags, "--out_dir", "out/killed"], cwd=repo,
                          capture_output=True, text=True, timeout=300, env=os.environ | ONE_THREAD)
    killed = re.search(r"killed at (\d+\.\d+)", done.stderr)
    assert done.returncode and time.time() - float(killed[1]) < 20, done.stderr
    path = repo / "out" / "killed" / "ckpt.pt"
    assert torch.load(path, weights_only=True)["iter"] == 10
    command(repo, "train.py", "--resume", "out/killed", "--data", "notes", "--no-evaluate")
    command(repo, "train.py", *flags, "--out_dir", "out/unbroken")
    one, two = (torch.load(repo / "out" / name / "ckpt.pt", weights_only=True)
                for name in ("unbroken", "killed"))
    for name, weights in one["model"].items():
        close(weights, two["model"][name], 2e-6)
    resumed, unbroken = losses(repo / "out/killed")[0], losses(repo / "out/unbroken")[0]
    assert resumed == pytest.approx(unbroken, abs=1e-5)


@pytest.mark.slow
def test_two_processes_equal_one(repo):
    flags = ["--model", "cable", "--data", "notes", "--max_iters", 8, "--eval_interval", 4,
             "--no-evaluate", *TINY_FLAGS]
    command(repo, "train.py", *flags, "--out_dir", "out/one")
    (repo / "two.py").write_text("""if True:
        import gc, train  # without what the lines below see to, one in a hundred runs never ended
        finish = train.finish
        def checked(*args):
            wrapped = [x for x in gc.get_objects() if type(x) is train.DistributedDataParallel]
            assert not wrapped and train.dist.is_initialized()
            finish(*args)
        train.finish = checked
        train.main()""")
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2 two.py".split()
    process(repo, *launch, *flags, "--out_dir", "out/two")
    (a, va), (b, vb) = losses(repo / "out" / "one"), losses(repo / "out" / "two")
    assert a == pytest.approx(b, abs=1e-4) and len(a) == 8
    assert va == pytest.approx(vb, abs=1e-4) and set(va) == {4, 8}


@pytest.mark.slow
def test_encoders_in_two_processes(repo):
    """Both phases: the tokens that are kept, and the hard negatives, are every process' own."""
    write_package(repo)
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2 train.py".split()
    flags = [*ENCODER_FLAGS, "--max_iters", 3, "--eval_interval", 3, "--no-evaluate"]
    process(repo, *launch, "--data", "mlm", *flags, "--out_dir", "out/m")
    process(repo, *launch, "--data", "retrieval", "--init_from", "out/m", "--query_size", 16,
            *flags, "--out_dir", "out/r")
    out, _ = process(repo, "eval.py", "out/r", "--lengths", 32)
    assert set(losses(repo / "out" / "r")[0]) == {3} and "\nwhole " in out


@pytest.mark.slow
def test_two_runs_started_together_take_two_folders(repo):
    flags = ["train.py", "--model", "alibi", "--data", "notes", "--max_iters", "20",
             "--no-evaluate", *TINY_FLAGS]
    pair = [subprocess.Popen([sys.executable, *flags, "--seed", seed], cwd=repo,
                             env=os.environ | ONE_THREAD, stdout=subprocess.DEVNULL)
            for seed in "12"]
    assert [p.wait(timeout=300) for p in pair] == [0, 0]
    for name in ("alibi-notes-nano", "alibi-notes-nano-2"):
        assert len(losses(repo / "out" / name)[0]) == 20


@pytest.mark.slow
def test_a_full_disk_and_a_closed_pipe_end_in_one_line_or_none(repo):
    command(repo, "train.py", "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
            "--out_dir", "out/full")
    limit = """if True:
        import resource, runpy, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        sys.argv = sys.argv[1:]
        runpy.run_path("train.py", run_name="__main__")"""
    _, err = process(repo, "-c", limit, "train.py", "--resume", "out/full", "--max_iters", 3,
                     "--no-evaluate", code=1)
    assert re.fullmatch(r"error: could not write out/full/(best|ckpt)\.pt \(.*\)\n", err)
    assert not list((repo / "out" / "full").glob("*tmp*"))
    done = subprocess.run(
        f"{sys.executable} sample.py out/full --max_new_tokens 900 | head -c 9; "
        "exit ${PIPESTATUS[0]}", cwd=repo, shell=True, executable="/bin/bash",
        env=os.environ | ONE_THREAD, capture_output=True)
    assert done.returncode == 141 and len(done.stdout) == 9 and b"Traceback" not in done.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "sample.py", "out/full"], cwd=repo, stdout=full,
                              env=os.environ | ONE_THREAD, stderr=subprocess.PIPE, text=True)
    assert done.returncode and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    for words in ("train.py --help", "reproduce.py", "data/text.py --help"):
        done = subprocess.run(f"{sys.executable} {words} >/dev/full", cwd=repo, shell=True,
                              env=os.environ | ONE_THREAD, stderr=subprocess.PIPE, text=True)
        assert done.returncode and done.stderr == "error: [Errno 28] No space left on device\n"
    for words in ("sample.py out/full --max_new_tokens 4", "eval.py out/full --lengths 16",
                  "train.py --resume out/full --max_iters 2 --no-evaluate"):
        done = subprocess.run(f"{sys.executable} {words} >&-", cwd=repo, shell=True,
                              env=os.environ | ONE_THREAD, stderr=subprocess.PIPE, text=True)
        assert not done.returncode and "Error" not in done.stderr, done.stderr
    assert torch.load(repo / "out/full/ckpt.pt", weights_only=True)["iter"] == 2


@pytest.mark.slow
def test_few_functions_from_the_command_to_the_first_loss(repo):
    """A newcomer with a debugger meets no more of ours; class bodies and lambdas do not count."""
    counted = f"""if True:
        import inspect, os, runpy, sys
        seen = set()

        def note(frame, event, argument):
            code = frame.f_code
            if event == "call" and code.co_name == "backward":  # there is a loss
                sys.setprofile(None)
                print(*sorted(seen), sep="\\n", flush=True)
                os._exit(0)
            ours = code.co_filename.startswith({str(repo)!r})
            function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
            if event == "call" and ours and function:
                name = os.path.relpath(code.co_filename, {str(repo)!r})
                seen.add(f"{{name}}:{{code.co_firstlineno}} {{code.co_qualname}}")
        sys.argv = "train.py --model cable --out_dir out/counted".split()
        sys.setprofile(note)
        runpy.run_path(os.path.abspath("train.py"), run_name="__main__")"""
    out, _ = process(repo, "-c", counted)
    found = [line for line in out.splitlines() if re.match(r"\S+\.py:\d+ ", line)]
    assert any(line.startswith("model_cable.py") for line in found)
    assert any(line.endswith(" main") for line in found)
    assert len(found) <= 26, "\n".join(found)


# -----------------------------------------------------------------------------
# a task and a model of one's own, in the commands

PARITY = '''
import numpy as np


class Task:
    """Parity: is the number of ones so far odd?"""
    vocab_size = 2
    splits = "train", "iid", "ones"

    def batch(self, split, batch_size, rng):
        share = 0.9 if split == "ones" else 0.5
        x = (rng.random((batch_size, self.block_size)) < share).astype(np.int64)
        return x, x.cumsum(1) % 2

    def score(self, logits, x, y):
        right = logits.argmax(-1) == y
        return dict(last=(right[:, -1], y[:, -1] >= 0), all=(right.sum(1), (y >= 0).sum(1)))
'''


def readmes_task():
    """The task that README.md adds as an example."""
    section = (ROOT / "README.md").read_text().partition("\n## Add your own\n")[2]
    return re.search(r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.M | re.S)[1]


@pytest.mark.parametrize("source", ["readme", "a batch and a score", "a batch alone"])
def test_a_task_of_ones_own_in_every_command(source, tasks, home):
    """Given only what it must have, or as in README.md."""
    text = readmes_task() if source == "readme" else PARITY
    if source == "a batch alone":
        text = text.partition("    def score")[0]
    write_task(tasks, "parity", text)
    flags = "--data", "parity", "--max_iters", 2, "--eval_interval", 1, *TINY_FLAGS
    out, _ = command(home, "train.py", "--model", "cable", *flags)
    run = home / "out" / "cable-parity-nano"
    assert "$ python eval.py" in out and is_png(run / "eval.png")
    found = json.loads((run / "eval.json").read_text())
    scores, task = found["runs"][0]["scores"]["16"], data.make(dict(data="parity"))
    assert list(scores) == list(task.splits[1:]) and found["data"]["source"] == "data/parity.py"
    for by_metric in scores.values():
        assert by_metric and all(0 <= m["value"] <= 1 for m in by_metric.values())
    assert source != "a batch alone" or list(scores["ones"]) == ["accuracy"]
    if source == "readme":
        command(home, "eval.py", run, "--lengths", 16, 32, "--sequences", 20, "--split", "iid",
                "--out", home / "long")
    for words in (("plot.py", "scores", "long.json" if source == "readme" else run / "eval.json"),
                  ("plot.py", "errors", run), ("maps.py", "steps", run),
                  ("maps.py", "attention", run, "--length", 6)):
        command(home, *words, "--out", "p.png", draw=source == "readme")
        assert is_png(home / "p.png")
        (home / "p.png").unlink()
    command(home, "train.py", "--resume", run, "--max_iters", 3, "--no-evaluate")
    assert "which has no text to write" in complaint(home, "sample.py", run)


def test_a_run_of_an_edited_model_says_so(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "tra", tmp_path / "tra")
    every = (("eval.py", "tra", "--lengths", 16, "--sequences", 4),
             ("maps.py", "steps", "tra", "--out", "p.png"),
             ("train.py", "--resume", "tra", "--max_iters", 3, "--no-evaluate"))
    for words in every:
        assert "warning" not in command(tmp_path, *words)[1]
    shutil.rmtree(tmp_path / "tra")
    shutil.copytree(trained / "tra", tmp_path / "tra")
    module, _ = runs.models()["tra"]
    monkeypatch.setattr(module, "source", f"{module.source}\n# a remark\n")
    assert "warning" not in command(tmp_path, *every[0])[1]
    monkeypatch.setattr(module, "source", f"{module.source}\nEDITED = True\n")
    for words in every:
        err = command(tmp_path, *words)[1]
        assert "warning: model_tra.py has changed since tra/ckpt.pt was begun: " in err
        assert err.count("\n") == 1
    err = command(tmp_path, "train.py", "--model", "tra", "--data", "flipflop", "--max_iters", 1,
                  "--no-evaluate", "--init_from", trained / "tra", *TINY_FLAGS)[1]
    assert f"warning: model_tra.py has changed since {trained / 'tra'}/ckpt.pt was begun" in err


def test_a_task_s_own_loss_is_what_training_minimises(tasks, home):
    text = PARITY + "\n    def loss(self, model, x, y):\n        return 0 * model(x, y)[1] + 7\n"
    write_task(tasks, "seven", text)
    command(home, "train.py", "--data", "seven", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS)
    training, validation = losses(home / "out" / "cable-seven-nano")
    assert training == {1: 7.0} and validation == {1: 7.0}


@pytest.mark.parametrize("change, says", [
    (("vocab_size = 2", "pass"), "data/bad.py: class Task has no vocab_size"),
    (("def batch", "def batches"), "data/bad.py: class Task has no batch("),
    (("vocab_size = 2", "vocab_size, defaults = 2, {'nano': dict(n_layers=1)}"),
     "data/bad.py: defaults sets 'n_layers', which is no flag"),
    (("vocab_size = 2", "vocab_size, kind = 2, 'numbers'"), "bad is numbers, not tokens"),
    (("vocab_size = 2", "vocab_size, defaults = 2, {'nano': dict(beta1=1)}\n    n: int = 4.0"),
     "error: n=4.0 is no int: change its default"),
    (("vocab_size = 2", "vocab_size = 2 +"), "data/bad.py cannot be used (SyntaxError"),
])
def test_a_bad_task_in_one_line(tasks, home, change, says):
    assert change[0] in PARITY
    write_task(tasks, "bad", PARITY.replace(*change))
    words = "train.py", "--model", "cable", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    assert says in complaint(home, *words, "--data", "bad")
    command(home, *words, "--data", "flipflop")  # nobody else is disturbed


def test_a_task_longer_than_a_table_in_validation(tasks, home):
    write_task(tasks, "parity", PARITY.replace("(batch_size, self.block_size)",
                                               "(batch_size, 20 if split == 'iid' else 16)"))
    said = complaint(home, "train.py", "--data", "parity", "--model", "learned", "--max_iters", 1,
                     *TINY_FLAGS)
    assert said == "error: learned positions end at block_size=16; 20 tokens do not fit"


def test_a_task_that_has_other_tokens_now_is_not_resumed(tasks, home):
    flags = "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    write_task(tasks, "parity", PARITY)
    command(home, "train.py", "--data", "parity", *flags, "--out_dir", "run")
    write_task(tasks, "parity", PARITY.replace("vocab_size = 2", "vocab_size = 2 + 3"))
    del sys.modules["data.parity"]
    said = complaint(home, "train.py", "--resume", "run", "--max_iters", 2)
    assert said == "error: parity has 5 tokens now, run was trained on 2"


def test_a_task_whose_checkpoints_could_not_be_loaded_does_not_train(tasks, home):
    begin = "    def begin(self, model):\n        self.kept = dict(table=model.wte.weight)\n"
    write_task(tasks, "keeper", f"{PARITY}\n{begin}")
    said = complaint(home, "train.py", "--data", "keeper", "--max_iters", 1, *TINY_FLAGS)
    assert "what --data keeper keeps as 'table' has to be an int64 tensor" in said
    write_task(tasks, "lister", f"{PARITY}\n{begin}".replace("dict(table=", "list("))
    said = complaint(home, "train.py", "--data", "lister", "--max_iters", 1, *TINY_FLAGS)
    assert "what --data lister keeps has to be a dict of int64 tensors" in said
    assert not (home / "out").exists()


def test_runs_of_a_task_that_keep_something_else_are_not_compared(tasks, home):
    begin = "    def begin(self, model):\n        self.kept = dict(code=torch.randperm(99))\n"
    write_task(tasks, "coded", f"import torch\n{PARITY}\n{begin}")
    for seed in (1, 2):
        command(home, "train.py", "--data", "coded", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
                "--seed", seed, "--out_dir", seed)
    assert "2/ckpt.pt has another code than 1/ckpt.pt" in complaint(home, "eval.py", "1", "2")


def test_a_task_may_have_a_field_of_any_name(tasks, home):
    write_task(tasks, "seer", PARITY.replace("vocab_size = 2", "vocab_size = 2\n    seen: int = 2"))
    command(home, "train.py", "--data", "seer", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
            "--seen", 3)


def test_a_task_may_have_a_dash_in_its_name(tasks):
    write_task(tasks, "my-task", PARITY)
    assert data.find("my-task").vocab_size == 2
    with pytest.raises(ValueError, match="did you mean my-task"):
        data.find("my-tusk")


def test_a_run_whose_task_is_gone(tasks, home):
    """Its weights can be used; what needs the task says so."""
    write_task(tasks, "mine", PARITY)
    words = "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--data", "mine", *words, "--out_dir", "out/run")
    (tasks / "mine.py").rename(tasks / "parity.py")
    for script in ("eval.py", "sample.py"):
        assert "the run's task is gone: there is no data/mine.py" in complaint(
            home, script, "out/run")
    assert "the run's task is gone" in complaint(home, "maps.py", "reach", "out/run")
    command(home, "train.py", "--data", "parity", *words, "--init_from", "out/run")


@pytest.mark.parametrize("change, says", [
    (("return x, x.cumsum(1) % 2", "return x"), "batch('train', 4, rng) must return x, y, not a n"),
    (("x.cumsum(1) % 2", "x[:, 0]"), "returns y of shape (4,); x and y must both be (4, T)"),
    (("x.cumsum(1) % 2", "x[:2]"), "returns y of shape (2, 16); x and y must both be (4, T)"),
    (("x.cumsum(1) % 2", "x.astype(np.int32)"), "returns y as int32, not NumPy int64"),
    (("return x, x.cumsum(1) % 2", "return x.tolist(), x"), "returns x as list, not NumPy int64"),
    (("x.cumsum(1) % 2", "2 - x"), "returns y with values from 1 to 2; they must be from -1 to"),
    (("return x, x", "return x - 1, x"), "returns x with values from -1 to 0; they must be from 0"),
    (("return dict(last", "return {} and dict(last"), "score must return {metric: ("),
    (("return dict(last=(right[:, -1], y[:, -1] >= 0)", "return dict(last=(right[:, -1], 1)"),
     "score returns 'last' of shapes [(4,), ()]; count and out_of must be (4,)"),
    (("return dict(last", "return [1] and dict(last=3) or dict(last"), "must return a pair"),
    (("dict(last=(right", "dict(last=(2 + right"), "a count that is not from 0 to its out_of"),
])
def test_a_task_that_breaks_the_contract_is_named_at_its_first_batch(tasks, home, change, says):
    assert change[0] in PARITY
    write_task(tasks, "bad", PARITY.replace(*change))
    words = "--max_iters", 1, "--eval_interval", 1, "--no-evaluate", *TINY_FLAGS
    with pytest.raises(data.BrokenTask) as e:
        command(home, "train.py", "--data", "bad", *words)
    assert str(e.value).startswith("data/bad.py: ") and says in str(e.value)
    with pytest.raises(SystemExit, match="error: data/bad.py: "):
        runs.in_one_line(e.type, e.value, None)


def test_a_task_that_ignores_block_size_is_not_scored_at_other_lengths(tasks, home):
    write_task(tasks, "fixed", PARITY.replace("self.block_size", "16"))
    flags = "--data", "fixed", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS, "--out_dir", "run"
    command(home, "train.py", *flags)
    for lengths in ((32,), (16, 32)):
        said = complaint(home, "eval.py", "run", "--lengths", *lengths)
        assert "--lengths does not make the sequences of fixed longer: leave it out" in said
    command(home, "eval.py", "run", "--lengths", 16, "--sequences", 5)


def test_a_task_s_defaults_may_be_for_flags_of_other_models(tasks, home):
    """P is a flag of CoPE alone; --n_layer is said, n_head comes from the task."""
    write_task(tasks, "sized", PARITY.replace(
        "vocab_size = 2", "vocab_size, defaults = 2, dict(tiny=dict(n_head=2, n_embd=16, P=5))"))
    flags = "--data", "sized", "--n_layer", 1, "--max_iters", 1, "--no-evaluate"
    for name in ("cope", "rope"):
        command(home, "train.py", "--model", name, *flags)
        path = home / "out" / f"{name}-sized-tiny" / "ckpt.pt"
        config = torch.load(path, weights_only=True)["config"]
        assert (config["size"], config["n_head"], config["n_layer"]) == ("tiny", 2, 1)
        assert config.get("P") == (5 if name == "cope" else None)
    assert "unknown size 'nano': choose from tiny" in complaint(
        home, "train.py", *flags, "--size", "nano")


TINY_RUN = ("--data", "flipflop", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS)


LAST_FIELD = 'log_kernel: str = ""'


@pytest.mark.parametrize("old, new, says", [
    (LAST_FIELD, f"{LAST_FIELD}\n    reach: int = None", "reach=None is no int: change its"),
    (LAST_FIELD, f"{LAST_FIELD}\n    window: int | None = None",
     "window of model has to be a bool, int, float or str: a flag"),
    (LAST_FIELD, f"{LAST_FIELD}\n    resume: int = 3", "two groups have a flag --resume: rename"),
    ("self.drop = ", "self.register_buffer('ids', torch.arange(8))\n        self.drop = ",
     "ids of --model mine has to be finite floats. A buffer can be"),
    ("self.drop = ", "self.register_buffer('m', torch.full((8,), -math.inf))\n        self.drop = ",
     "m of --model mine has to be finite floats. A buffer can be")])
def test_a_fork_whose_checkpoint_could_not_be_loaded_does_not_train(copy, old, new, says):
    write_fork(copy, "cable", (old, new))
    assert says in complaint(copy, "train.py", "--model", "mine", *TINY_RUN)
    assert not (copy / "out").exists()


@pytest.mark.parametrize("line, says", [
    ("B, T = idx.shape[:1]", "not enough values to unpack"),
    ("B, T = idx.shape\n        self.training or int('one')", "invalid literal"),
    ("B, T = idx.shape\n        targets is None and np.zeros(3).reshape(2, 2)", "cannot reshape")])
def test_a_fork_s_own_bug_keeps_its_traceback(copy, line, says):
    """Wherever a ValueError for the user would be one line: in training, validation, scoring."""
    write_fork(copy, "fox", ("B, T = idx.shape", line),
               ("import math", "import math\nimport numpy as np"))
    with pytest.raises(ValueError, match=says):
        command(copy, "train.py", "--model", "mine", *TINY_RUN)


COMPLAINTS = """
def bug():
    raised = int("one")

def bug_in_the_message():
    raise ValueError(f"{int('one')}")

def library():
    import statistics
    statistics.NormalDist(0, -1)

def own():
    if True: raise ValueError("a word",
                              "and another")

def chained():
    try: bug()
    except ValueError as e: raise ValueError("a word") from e
"""


def test_only_a_complaint_of_these_files_is_one_line(tmp_path):
    """Even where the file has changed since it was read."""
    file, module = tmp_path / "complaints.py", {}
    file.write_text(COMPLAINTS)
    exec(compile(COMPLAINTS, file, "exec"), module)
    file.write_text("raise this\n" * 30)
    for name in ("bug", "bug_in_the_message", "library", "own", "chained"):
        with pytest.raises(SystemExit if name in ("own", "chained") else ValueError):
            try:
                module[name]()
            except ValueError as e:
                runs.fail(e)


@pytest.mark.parametrize("task, more", [("library", TINY_FLAGS),
                                        ("retrieval", (*ENCODER_FLAGS, "--query_size", 16))])
def test_prepared_files_that_a_power_cut_left_empty_are_made_anew(library, task, more):
    flags = "train.py", "--data", task, "--max_iters", 1, "--no-evaluate", *more
    command(library, *flags, "--out_dir", "a")
    found = [*library.glob("prepared/*/meta.json"), *library.glob("prepared/*.npz")]
    for path in found:
        path.write_bytes(b"")
    command(library, *flags, "--out_dir", "b")
    assert found and all(path.stat().st_size for path in found)
    both = [torch.load(library / run / "ckpt.pt", weights_only=True)["source"] for run in "ab"]
    assert both[0] == both[1]


def test_a_run_from_before_its_variant_was_changed_is_resumed(copy):
    """The rule that a flag may not contradict the name is for new runs."""
    write_fork(copy, "cable")
    command(copy, "train.py", "--model", "mine", *TINY_RUN, "--out_dir", "run")
    source = (copy / "model_mine.py").read_text()
    new = "VARIANTS = dict(mine=dict(weight=False))"
    (copy / "model_mine.py").write_text(source.replace("VARIANTS = dict(mine=dict())", new))
    runs.models.cache_clear()
    del sys.modules["model_mine"]
    out, _ = command(copy, "train.py", "--resume", "run", "--max_iters", 2)
    assert "iter 2/2" in out


@pytest.mark.parametrize("words, says", [
    (("--model", "cable_nw", "--weight"), "weight=True: what is called --model cable_nw has"),
    (("--model", "prenorm", "--norm", "post"), "norm=post: what is called --model prenorm has")])
def test_a_flag_that_contradicts_the_model_s_name(home, words, says):
    assert says in complaint(home, "train.py", *words, *TINY_RUN)
    assert not (home / "out").exists()


@pytest.mark.parametrize("name", ["kernel", "eta", "p_ignore", "seed"])
def test_a_fork_s_setting_called_like_another_flag_is_refused(copy, name):
    write_fork(copy, "cable", (LAST_FIELD, f"{LAST_FIELD}\n    {name}: float = 3.0"))
    said = complaint(copy, "train.py", "--model", "mine", *TINY_RUN)
    assert said.startswith(f"error: two groups have a flag --{name}: rename the ")


def test_bench_measures_beside_plain_attention_in_steps():
    q, k, v = torch.randn(3, 2, 3, 150, 8, dtype=torch.float64, requires_grad=True)
    later = torch.ones(150, 150, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(8)).masked_fill(later, -math.inf)
    want = logits.softmax(-1) @ v
    gradients = torch.autograd.grad(want.square().sum(), (q, k, v))
    for f in (bench.unfused, bench.sdpa):
        y = f(q, k, v)
        close(y, want, 1e-12)
        for ours, theirs in zip(torch.autograd.grad(y.square().sum(), (q, k, v)), gradients):
            close(ours, theirs, 1e-12)


def test_maps_and_bench_see_the_edited_attention(fork, copy, monkeypatch, capsys):
    """A window of nine keys in the copy of a file: no key beyond it is shown, nor is it fast."""
    monkeypatch.setattr(bench, "extra_memory", lambda *what: None)
    figures = drawn(monkeypatch)
    for edits in ([], EDITS["window"]["fox"]):
        fork("fox", *edits)
        shutil.rmtree(copy / "out", ignore_errors=True)
        command(copy, "train.py", "--model", "mine", *TINY_RUN)
        path = copy / "out" / "mine-flipflop-nano"
        model, *_ = runs.load_run(path / "ckpt.pt", torch.device("cpu"))
        found = maps.look(model, torch.zeros(1, 14, dtype=torch.long))[0]["attention"]
        beyond = np.tril(np.ones((14, 14)), -9)
        assert (found * beyond).sum() == 0 if edits else (found * beyond).sum() > 0
        command(copy, "maps.py", "attention", path, "--length", 14)
        shown = figures.pop().axes[0].images[-1].get_array().filled(0)
        assert (shown[12, 0] == 0) == bool(edits)
        words = "--models", "mine", "--lengths", 50, "--repeats", 1, "--device", "cpu"
        command(copy, "bench.py", "attention", *words, "--out", "b.json")
        rows = json.loads((copy / "b.json").read_text())["attention"]["50"]
        assert {"mine", "mine: literal"} <= rows.keys()
        assert ("mine: kernel" in rows) == (not edits)
        runs.models.cache_clear()
        del sys.modules["model_mine"]
    capsys.readouterr()


def test_maps_of_a_model_without_a_literal_form_show_its_attention(copy):
    """The true one, said in one line; nothing else can be asked for."""
    source = (ROOT / "model_fox.py").read_text().replace("VARIANTS = dict(fox=dict())",
                                                         "VARIANTS = dict(mine=dict())")
    before, _, rest = source.partition("def literal(")
    (copy / "model_mine.py").write_text(before + rest.partition("\n\n\n")[2])
    command(copy, "train.py", "--model", "mine", *TINY_RUN)
    out, _ = command(copy, "maps.py", "attention", "out/mine-flipflop-nano")
    said = "model_mine.py has no literal form: its attention is all that can be shown"
    assert out.splitlines()[0] == said and out.count("\n") == 2
    assert is_png(copy / "out" / "mine-flipflop-nano" / "attention.png")
    said = complaint(copy, "maps.py", "attention", "out/mine-flipflop-nano", "--kinds", "step")
    assert "mine has no step to show, it has attention" in said
    command(copy, "maps.py", "steps", "out/mine-flipflop-nano", "--out", "s.png")
    mine, fox = make("mine"), make("fox")
    fox.load_state_dict(mine.state_dict())
    idx = torch.randint(0, 61, (1, 20))
    for ours, theirs in zip(maps.look(mine, idx), maps.look(fox, idx)):
        assert np.abs(ours["attention"] - theirs["attention"]).max() < 1e-6


# -----------------------------------------------------------------------------
# figures

def drawn(monkeypatch):
    """A list that the figures go to, instead of to files."""
    figures = []
    monkeypatch.setattr(runs, "write_figure", lambda fig, *out: figures.append(fig))
    return figures


def labels_of(fig):
    """What the legend of a figure says."""
    found = [ax.get_legend() for ax in fig.axes if ax.get_legend()]
    return [text.get_text() for legend in found for text in legend.get_texts()]


def test_seeds_become_one_line():
    def row(model, seed, **config):
        config = dict(seed=seed, out_dir="x", model=model) | config
        return dict(model=model, name=f"{model}-{seed}", iter=5, checkpoint="ckpt.pt",
                    config=config)
    rows = [row("cable", 1), row("cable", 2), row("rope", 1), row("cable", 3, n_layer=9)]
    groups = plot.grouped(rows)
    assert {k: len(v) for k, v in groups.items()} == {"cable": 2, "rope": 1, "cable-3": 1}
    labelled = [r | dict(label=label) for r, label in zip(rows, "abab")]
    assert {k: len(v) for k, v in plot.grouped(labelled).items()} == {"a": 2, "b": 2}


def test_every_line_looks_different_and_a_method_has_its_colour():
    for labels in ([f"cable {n}" for n in range(30)], [f"own{n}" for n in range(30)],
                   [f"{model}, P = {n}" for n in range(8) for model in ("tra", "rope", "mine")]):
        looks = plot.looks(labels).values()
        assert len({(look["color"], look["ls"], look["marker"]) for look in looks}) == len(labels)
    one = plot.looks(["cable", "rope", "mine", "out/tra-flipflop-nano", "rope (this repository's)"])
    other = plot.looks(["rope, 3M bytes", "alibi", "tra", "cable post"])
    assert one["cable"]["color"] == other["cable post"]["color"]
    assert one["rope"]["color"] == other["rope, 3M bytes"]["color"]
    assert one["out/tra-flipflop-nano"]["color"] == other["tra"]["color"] == "black"


def test_lines_that_coincide_stay_visible():
    """Of three on the same points each shows, by turns; where one leaves, it is whole again."""
    x, low = [1, 2, 3, 4], [1.0, 1, 1, 1]
    curves = {"first": (x, [low]), "second": (x, [low]), "third": (x, [[1.0, 1, 5, 9]])}
    fig, axes = plot.panels(1, 5, 4)
    plot.draw(axes[0, 0], curves, plot.looks(curves))
    plot.legend(axes)
    assert labels_of(fig) == list(curves)
    parts = {}
    for line in axes[0, 0].lines:
        if line.get_linestyle() != "None" and len(line.get_xdata()) > 1:
            parts.setdefault(plot.matplotlib.colors.to_hex(line.get_color()), []).append(line)
    first, second, third = parts.values()
    assert [line.is_dashed() for line in first] == [False] * len(first)
    assert all(line.is_dashed() for line in second)
    assert [line.is_dashed() for line in third] == [True, False]
    assert [list(line.get_xdata()) for line in third] == [[1, 2], [2, 3, 4]]
    for lines in parts.values():  # none has lost a point
        assert sorted({x for line in lines for x in line.get_xdata()}) == x
    # two dashed ones do not lie on each other: the second begins where the third pauses
    dashes = [line._unscaled_dash_pattern for line in (second[0], third[0])]
    assert dashes[0][1] == dashes[1][1] and dashes[0][0] != dashes[1][0]
    plot.plt.close(fig)


def contrast_of(result):
    """A committed curve that has the setting of a run in eval.json."""
    r = result["runs"][0]
    names = "data", "tokenizer", "block_size", "n_layer", "n_head", "n_embd", "max_iters"
    settings = {name: r["config"][name] for name in names}
    settings |= dict(tokens=result["tokens"], lengths=result["lengths"])
    return dict(model="rope", python="3.9.1", source=result["data"]["sha256"], settings=settings,
                perplexity={T: 2.0 for T in r["perplexity"]}, by_position=r["by_position"])


def test_the_committed_curve_is_drawn_dashed_where_its_setting_is_the_same(
        trained, home, monkeypatch):
    command(trained, "eval.py", "cable", "--out", home / "eval")
    contrast = contrast_of(json.loads((home / "eval.json").read_text()))
    figures = drawn(monkeypatch)

    def lines(**changes):
        (home / "results").mkdir(exist_ok=True)
        (home / "results" / "contrast.json").write_text(json.dumps(contrast | changes))
        command(home, "plot.py", "lengths", home / "eval.json")
        fig = figures.pop()
        left = fig.axes[0].lines
        dashed = [line for line in left if line.get_linestyle() == "--" and len(line.get_xdata())]
        assert all(set(line.get_ydata()) == {2.0} for line in dashed)
        return labels_of(fig), len(dashed)
    own = ["cable", "training length"]
    assert lines() == (["cable", "rope (this repository's)", "training length"], 1)
    named = "rope (this repository's,\non Python 3.9.1)"  # another version's text
    assert lines(source="other") == (["cable", named, "training length"], 1)
    for name, value in (("max_iters", 3), ("tokens", 9), ("lengths", [16]), ("n_layer", 2),
                        ("data", "stdlib"), ("block_size", 32)):
        changed = contrast["settings"] | {name: value}
        assert lines(settings=changed) == (own, 0), name
    assert lines(model="cable") == (own, 0)  # one's own run is of that model
    (home / "results" / "contrast.json").unlink()
    command(home, "plot.py", "lengths", home / "eval.json")
    assert labels_of(figures.pop()) == own


def test_the_committed_curve_is_that_of_the_first_command():
    """Its setting is what `python train.py --model cable` has, and ends up being scored on."""
    row = json.loads((ROOT / "results" / "contrast.json").read_text())
    defaults, task = data.text.Task.defaults["nano"], data.text.Task
    for name in ("n_layer", "n_head", "n_embd", "block_size", "max_iters"):
        assert row["settings"][name] == defaults[name]
    assert (row["settings"]["data"], row["settings"]["tokenizer"]) == (task.data, task.tokenizer)
    lengths = [defaults["block_size"] * m for m in (1, 2, 4, 8, 16)]
    assert row["settings"]["lengths"] == lengths and row["settings"]["tokens"] == 131072
    assert list(row["perplexity"]) == [str(T) for T in lengths]
    table = json.loads((ROOT / "results" / "cable_table1.cpu.json").read_text())
    same = [r for r in table["runs"] if r["model"] == row["model"]]
    assert row["perplexity"] in [r["perplexity"] for r in same]


@pytest.mark.parametrize("perplexity", [1e308, 1e-308, INF, 0.0])
def test_a_perplexity_beyond_all_others_is_drawn(perplexity, tmp_path):
    row = dict(block_size=16, perplexity={"16": 2.0, "32": perplexity}, model="cable", name="x",
               by_position=[[0, 15, 1.0]], config={}, checkpoint="ckpt.pt", iter=1)
    whole = dict(data=dict(sha256=""), tokens=16, lengths=[16, 32], runs=[row])
    (tmp_path / "x.json").write_text(json.dumps(whole))
    command(tmp_path, "plot.py", "lengths", "x.json", draw=True)
    assert is_png(tmp_path / "x.png")


def test_curves_and_errors_have_a_line_for_every_run(trained, monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    command(trained, "plot.py", "curves", "cable", "learned", "rope")
    assert labels_of(figures[0]) == ["cable", "learned", "rope"]
    assert [ax.get_title() for ax in figures[0].axes] == ["training", "validation"]
    command(trained, "plot.py", "errors", "tra", "rope", "--metric", "glitch_rate")
    assert labels_of(figures[1]) == ["tra", "rope"]
    assert [ax.get_title() for ax in figures[1].axes] == ["iid", "sparse", "dense"]
    assert figures[1].axes[0].get_ylabel() == "glitch rate (%)"
    points = [p for line in figures[1].axes[0].lines if line.get_linestyle() == "None"
              for p in zip(line.get_xdata(), line.get_ydata())]
    rates = [(r["iter"], 100 * r["scores"]["iid"]["glitch_rate"]) for name in ("tra", "rope")
             for r in log_of(trained / name) if "scores" in r]
    assert set(rates) <= set(points)
    shutil.copytree(trained / "cable", tmp_path / "cable-my.txt-nano")  # a folder, not a JSON
    command(trained, "plot.py", "curves", tmp_path / "cable-my.txt-nano")
    assert labels_of(figures[2]) == ["cable-my.txt-nano"]
    monkeypatch.chdir(tmp_path / "cable-my.txt-nano")
    plot.main(["curves", ".", str(tmp_path / "cable-my.txt-nano"), "--out", "x.png"])
    assert set(labels_of(figures.pop())) == {".", str(tmp_path / "cable-my.txt-nano")}
    plot.main(["curves", ".", "./", "--out", "x.png"])
    assert labels_of(figures.pop()) == ["cable-my.txt-nano"]
    shutil.copytree(trained / "tra", tmp_path / "tra")  # another run in a folder of the same name
    command(trained, "plot.py", "curves", "tra", tmp_path / "tra", "--out", tmp_path / "x.png")
    assert labels_of(figures[3]) == ["tra", str(tmp_path / "tra")]
    rows = [dict(label="tra", loss=[[1, 2.0]], val_loss=[[1, 2.0]])]  # and a row of this name
    (tmp_path / "x.json").write_text(json.dumps(dict(runs=rows)))
    plot.main(["curves", str(tmp_path / "tra"), str(tmp_path / "x.json")])
    assert labels_of(figures.pop()) == [str(tmp_path / "tra"), "tra"]


@pytest.mark.slow
def test_every_committed_result_is_drawn_with_a_whole_legend(monkeypatch, tmp_path):
    """Perplexity, scores, errors by step, searches, speed: every row has its line or its tick."""
    figures, folder = drawn(monkeypatch), ROOT / "results"
    monkeypatch.setattr(sys, "stdout", written())
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        kinds = []
        if "panels" in result:
            kinds = ["trials"]
        elif "attention" in result and "runs" not in result:
            kinds = ["attention"]
        elif "runs" in result:
            kinds = ["scores", "errors"] if "columns" in result else ["lengths"]
            kinds = ["matrix", "reading"] if "cells" in result else kinds
            kinds = ["scores"] if "scores" in result["runs"][0] and kinds == ["lengths"] else kinds
            kinds = ["ndcg"] if "search" in result["runs"][0] else kinds
            kinds = ["curves"] if "losses" in result else kinds
        assert kinds or path.name.startswith(("bench.", "contrast", "stress")), path.name
        for kind in kinds:
            plot.main([kind, str(path)])
            figures[-1].draw_without_rendering()
            said = " ".join(labels_of(figures[-1]))
            ticks = [t.get_text() for ax in figures[-1].axes for t in ax.get_yticklabels()]
            names = {r["label"] if "label" in r else r["model"] for r in result.get("runs", [])}
            for panel in result.get("panels", []):
                if "theorem" not in result:
                    names |= {f"{scheme}, median" for scheme in panel["schemes"]}
            for rows in result.get("attention", {}).values() if kind == "attention" else ():
                names |= rows.keys()
            assert all(name in said or name in ticks for name in names), (path.name, kind, said)
        plot.plt.close("all")


# -----------------------------------------------------------------------------
# maps

def test_within_is_the_share_of_the_last_tokens():
    attention = np.tri(8)[None] / np.arange(1, 9)[:, None]  # all keys alike
    want = np.mean([[n / (i + 1) for n in range(1, 5)] for i in range(4, 8)], axis=0)
    assert maps.within(attention) == pytest.approx(want[None])
    near = np.eye(9)[None]  # every query sees itself alone, and in an odd number of tokens
    assert maps.within(near).tolist() == [[1.0] * 4]


def test_maps_of_reach(home, trained, monkeypatch):
    """Of a task and of text, longer than in training; one token reaches nowhere."""
    said = complaint(home, "maps.py", "reach", trained / "cable")
    assert "was never prepared here" in said
    for run in ("tra", "learned"):
        out, _ = command(trained, "maps.py", "reach", run, "--length", 12, "--out", home / "r.png")
        assert "r.png" in out and is_png(home / "r.png")
    out, _ = command(trained, "maps.py", "reach", "cable", "learned", "--out", home / "r.png",
                     "--length", 16)
    assert out.count("tokens, trained on") == 2 and is_png(home / "r.png")
    # how much lies farther back than a window of training, 16: of the last half of 39 tokens
    out, _ = command(trained, "maps.py", "reach", "tra", "--length", 40, "--out", home / "r.png")
    _, model, config = maps.load(trained / "tra")
    x, _ = runs.make_task(config | dict(block_size=40)).batch("dense", 1, rng([0, 0]))
    a = maps.look(model, torch.from_numpy(x))[0]["attention"]
    near = sum(a[:, i, i - 15:i + 1].sum(-1) for i in range(20, 39)) / a[:, 20:].sum((1, 2))
    said = re.search(r"farther back: (.*)", out)[1].split()
    assert list(map(float, said)) == pytest.approx(100 - 100 * near, abs=0.06)
    flags = "--data", "flipflop", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--model", "rope", *flags, "--n_layer", 3, "--out_dir", home / "deep")
    figures = drawn(monkeypatch)
    command(trained, "maps.py", "reach", home / "deep", "tra")
    assert labels_of(figures[0]).count("head 0") == 2  # a legend for each model
    said = complaint(trained, "maps.py", "reach", "cable", "--length", 1)
    assert "reach needs a sequence of two tokens or more" in said


def test_maps_of_what_heads_count(home, trained, monkeypatch):
    """The mean step of every symbol, at scored queries; of text, of every sort of token."""
    path, model, config = maps.load(trained / "tra")
    args = types.SimpleNamespace(split=None, length=12, seed=3, sequences=5, kind="counts",
                                 pairs=False)
    kinds, means = maps.steps_by_kind(model, config, args)
    assert kinds == ["0", "1", "i", "r", "w"] and means.shape == (1, 2, 5)
    task = runs.make_task(config | dict(block_size=12))
    total, times = np.zeros((2, 5)), np.zeros(5)
    for n in range(5):
        x, y = task.batch(task.splits[-1], 1, np.random.default_rng([3, n]))
        step = maps.look(model, torch.from_numpy(x))[0]["step"]
        for i, j in zip(*np.tril_indices(x.shape[1])):
            if y[0, i] != -1:
                kind = kinds.index(task.show(x[0])[j])
                total[:, kind] += step[:, i, j]
                times[kind] += 1
    assert times.min() > 0 and np.allclose(means[0], total / times, atol=1e-6)
    pairs, apart = maps.steps_by_kind(model, config, types.SimpleNamespace(
        **vars(args) | dict(pairs=True)))
    zeros = [apart[0, :, n] for n, pair in enumerate(pairs) if pair in ("w 0", "i 0", "r 0")]
    assert len(zeros) > 1 and all(" " in pair for pair in pairs)
    assert (np.min(zeros, 0) - 1e-6 <= means[0, :, 0]).all()  # their mean lies between them
    assert (means[0, :, 0] <= np.max(zeros, 0) + 1e-6).all()
    labels = "\\n", "  ", "·", " def", "_", "7", "\\t", "+=", "\\n"
    assert maps.sorts_of(labels) == ["line end", "space", "signs", "letters", "letters", "digits",
                                     "space", "signs", "line end"]
    text = "\nif x:\n\ty = {\n 1:\t \r\n\n \t\x0c\n}\na: \\n\n"
    ends = ["line end", "block begins", "block begins", "block begins", "blank line", "blank line",
            "line end", "line end"]
    sorts = maps.sorts_of([repr(character)[1:-1] for character in text])
    assert [sort for sort, character in zip(sorts, text) if character == "\n"] == ends
    labels = ["x:", "\\n\\n", "y", "\\n", ":\\n", "\\n ", "\\n"]  # tokens of several characters
    assert maps.sorts_of(labels) == ["signs", "blank line", "letters", "line end", "block begins",
                                     "blank line", "blank line"]
    with pytest.raises(SystemExit, match="counts nothing"):
        maps.steps_by_kind(make("diff"), config, args)
    monkeypatch.setattr(data.flipflop.Task, "batch", lambda self, *_: (x, np.full_like(y, -1)))
    with pytest.raises(SystemExit, match="nothing is scored in"):
        maps.steps_by_kind(model, config, args)
    monkeypatch.undo()
    command(trained, "maps.py", "counts", "tra", "cable", "--sequences", 2, "--pairs",
            "--out", home / "c.png")
    assert is_png(home / "c.png")
    said = complaint(home, "maps.py", "counts", trained / "tra", "--sequences", 0)
    assert "--sequences must be at least 1" in said


def test_maps_of_a_task_and_of_text(trained, home):
    kinds = "--kinds", "qk", "bias"
    for words in (("attention", trained / "tra", "--split", "dense", "--length", 24, *kinds),
                  ("attention", trained / "cable", "--prompt", "f(x): $", "--layer", 0),
                  ("steps", trained / "tra", trained / "rope", "--length", 30, "--seed", 3),
                  ("steps", trained / "cable", "--prompt", "alpha beta")):
        command(home, "maps.py", *words, "--out", "m", draw=True)
        assert is_png(home / "m.png")
        (home / "m.png").unlink()
    shutil.copytree(trained / "tra", home / "tra")
    command(home, "maps.py", "steps", "tra", "--length", 8)
    command(home, "maps.py", "steps", "tra", trained / "rope", "--length", 8)
    assert is_png(home / "tra" / "steps.png") and is_png(home / "out" / "steps.png")


def test_a_map_of_a_long_text_marks_its_lines(trained, monkeypatch):
    figures = drawn(monkeypatch)
    text = "alpha = 1\n\n" + "b" * 40 + "\n    gamma $x\n" + "d" * 20
    command(trained, "maps.py", "attention", "cable", "--prompt", text)
    first, second = [ax for ax in figures[0].axes if ax.get_title()][:2]
    starts = [0, 11, 12, 53, 66]  # the end-of-text token is before them
    assert list(first.get_xticks()) == list(first.get_yticks()) == starts
    marks = [label.get_text() for label in first.get_xticklabels()]
    assert marks == ["", "", "¶", "", ""] and "¶" in figures[0].get_suptitle()
    said = [label.get_text() for label in first.get_yticklabels()]
    assert said == ["·alpha = 1", "", "b" * 24, r"    gamma \$x", "d" * 20]  # the second is blank
    assert not any(label.get_text() for label in second.get_yticklabels())
    command(trained, "maps.py", "attention", "cable", "--prompt", "e\n" * 60)  # no room for all
    said = figures[1].axes[0].get_yticklabels()
    assert [label.get_text() for label in said][:7] == ["·e", "e", "", "e", "", "e", ""]
    command(trained, "maps.py", "attention", "cable", "--prompt", "e" * 90)  # has no lines
    assert len(next(ax for ax in figures[2].axes if ax.get_title()).get_yticks()) > 2


def test_a_map_shows_what_the_model_computes(trained, monkeypatch):
    """Titles, tokens, and under every token the attention that the literal form has."""
    figures = drawn(monkeypatch)
    command(trained, "maps.py", "attention", "tra", "--length", 12)
    axes = [ax for ax in figures[0].axes if ax.get_title()]
    kinds = "attention", "step", "distance", "position"
    assert [ax.get_title() for ax in axes] == [f"{k}, head {h}" for k in kinds for h in (0, 1)]
    model, config, _ = runs.load_run(trained / "tra" / "ckpt.pt", torch.device("cpu"))
    task = runs.make_task(config | dict(block_size=12))
    x, _ = task.batch("iid", 1, rng(0))
    labels = [t.get_text() for t in axes[0].get_xticklabels()]
    assert labels == task.show(x[0])
    found = maps.look(model, torch.from_numpy(x))[-1]
    alive = found["step"].any(-1)  # a query without a key attends to nothing
    assert np.abs(found["attention"].sum(-1) - alive).max() < 1e-5
    for n, ax in enumerate(axes[:2]):
        shown = ax.images[-1].get_array()
        assert shown.mask[0, 1] and not shown.mask[1, 0]  # what is later is not shown
        assert np.abs(np.tril(shown.filled(0) - found["attention"][n])).max() < 1e-6


def test_position_is_the_attention_if_all_contents_were_alike():
    model, idx = make("alibi"), torch.randint(0, 61, (1, 10))
    parts = maps.look(model, idx)[0]
    steps = np.arange(10)[:, None] - np.arange(10)
    for slope, position in zip((1 / 4, 1 / 16, 1 / 64, 1 / 256), parts["position"]):
        want = np.tril(np.exp(-slope * np.abs(steps)))
        assert np.abs(position - want).max() < 1e-6
    parts = maps.look(make("tra"), idx)[0]
    dropped = np.isinf(parts["bias"]) & np.tri(10, dtype=bool)
    assert dropped.any() and (parts["position"][dropped] == 0).all()
    kept = ~dropped & np.tri(10, dtype=bool)
    tops = parts["position"].max(-1)[kept.any(-1)]
    assert tops == pytest.approx(np.ones(len(tops)))


def test_the_sharpest_head_is_that_of_the_last_query():
    a = np.full((2, 2, 3, 3), 0.1)  # layers, heads, queries, keys
    a[0, 0, -1, 0], a[1, 0, -1, 2] = 0.5, 0.9
    a[0, 1, 0, 0] = a[1, 1, 0, 0] = 1.0  # another query's
    layers = [dict(attention=x) for x in a]
    assert maps.sharpest(layers)[:2] == (1, 0)
    assert maps.heads_to_show(layers, "sharpest") == ([(0, 0), (1, 0)], 1)


def test_steps_has_a_strip_of_attention_of_its_own(trained, home, monkeypatch):
    """For every model: bars of steps, the distances, below them the attention of one head."""
    figures = drawn(monkeypatch)
    flags = "--data", "flipflop", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--model", "diff", *flags, "--n_embd", 32, "--out_dir", "diff")
    command(home, "maps.py", "steps", trained / "tra", trained / "rope", "diff", "--length", 20)
    fig = figures[0]
    lanes = [ax for ax in fig.axes if ax.get_ylabel().endswith("\nstep")]
    strips = [ax for ax in fig.axes if ax.images]
    assert [ax.get_ylabel() for ax in lanes] == ["tra\nstep", "rope\nstep", "diff\nstep"]
    assert len(strips) == 3
    said = [ax.get_xlabel() or ax.xaxis.label.get_text() for ax in strips]
    assert runs.models()["tra"][0].STEP in said and runs.models()["rope"][0].STEP in said
    for name, lane, strip in zip(("tra", "rope", "diff"), lanes, strips):
        attention = strip.images[0].get_array()
        assert attention.shape == (1, 19) and strip.images[0].get_clim() == (0, 1)
        assert name == "diff" or attention.max() <= 1
        assert len(lane.patches) == (0 if name == "diff" else 19)  # bars
        said = [t.get_text() for t in lane.texts if t.get_text().startswith("no steps")]
        assert len(said) == (name == "diff")
    said = complaint(home, "maps.py", "attention", "diff", "--kinds", "step")
    assert "diff has no step to show, it has attention" in said
    legend = [t.get_text() for t in fig.legends[0].get_texts()]
    assert len(legend) == 3


def page_data(path):
    """What maps.py play wrote into a page: its JSON, and the template around it."""
    before, rest = path.read_text().split('<script type="application/json" id="data">')
    text, _, after = rest.partition("</script>")
    return json.loads(text), before + after


def unpacked(found, string):
    """A string's numbers in a page, as the page reads them -> [lane][head][kind] (T, T)."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(string["numbers"])), np.uint8)
    flat = np.ascontiguousarray(planes.reshape(4, -1).T).view("<i4")[:, 0].astype(float)
    T, at, lanes = len(string["tokens"]), 0, []
    for lane in found["lanes"]:
        heads = []
        for _ in lane["heads"]:
            parts = {}
            for kind in lane["kinds"]:
                x = flat[at:at + T * (T + 1) // 2]
                at += len(x)
                parts[kind] = np.zeros((T, T))
                parts[kind][np.tril_indices(T)] = x
            heads.append(parts)
        lanes.append(heads)
    assert at == len(flat)
    return lanes


def batch_of_one(task, split):
    """The sequence that maps.py shows: up to the last scored token."""
    x, y = task.batch(split, 1, rng(0))
    return x[:, :np.flatnonzero(y[0] != -1)[-1] + 1]


def test_a_page_to_play_with_holds_what_literal_says(trained, home):
    """Every number to two digits, the logit too; lengths and splits crossed; one head or all."""
    for heads in ("sharpest", "all"):
        command(home, "maps.py", "play", trained / "tra", trained / "rope", "--heads", heads,
                "--length", 12, 40, "--split", "dense", "sparse", "--out", "p.html")
        found, _ = page_data(home / "p.html")
        names = [string["name"] for string in found["strings"]]
        assert [name.split()[0] for name in names] == ["dense"] * 2 + ["sparse"] * 2
        for string, (split, T) in zip(found["strings"], itertools.product(
                ("dense", "sparse"), (12, 40))):
            lanes = unpacked(found, string)
            for lane, shown, name in zip(found["lanes"], lanes, ("tra", "rope")):
                model, config, _ = runs.load_run(trained / name / "ckpt.pt", torch.device("cpu"))
                task = runs.make_task(config | dict(block_size=T))
                x = batch_of_one(task, split)
                layers = maps.look(model, torch.from_numpy(x))
                assert string["tokens"] == task.show(x[0])
                assert len(lane["heads"]) == (2 if heads == "all" else 1) == len(shown)
                for (layer, head), parts in zip(lane["heads"], shown):
                    shows_these(parts, {k: v[head] for k, v in layers[layer].items()})
                assert lane["equation"] == runs.models()[name][0].EQUATION
        assert lane["name"] == "rope" and lane["trained"] == 16 and lane["literal"]


def shows_these(parts, exact):
    """One head's whole numbers in a page are the exact ones, as far as a page shows them."""
    seen = np.tri(len(parts["attention"]), dtype=bool)
    exact = exact | dict(carry=exact["qk"] + exact["bias"]) if "bias" in exact else exact
    for kind, whole in parts.items():
        unit = 1000 if kind == "attention" else 100
        known = seen & np.isfinite(exact[kind])
        if kind == "carry":  # of the logit
            whole = np.where(known, parts["qk"] + parts["bias"] + whole, -2**31)
        assert (np.abs(whole / unit - exact[kind])[known] <= .5 / unit + 1e-9).all(), kind
        assert (whole[seen & ~known] == -2**31).all() and (known.any() or not seen.any())


def test_a_page_of_numbers_that_are_large_or_not_finite():
    """Distances of hundreds of thousands; what is infinite, or larger than all, is told apart."""
    exact = dict(qk=np.array([[1.005, 0], [-3.456, 2]]), bias=np.array([[-INF, 0], [-1e30, 7e5]]),
                 step=np.array([[1.0, 0], [np.nan, 1]]), attention=np.full((2, 2), .0004999),
                 distance=np.array([[123456.784, 0], [9e6, 0]]))
    parts = maps.in_units({kind: x[None] for kind, x in exact.items()}, 0)
    assert parts["distance"].tolist() == [12345678, 9e8, 0] and parts["qk"].tolist()[1] == -346
    assert parts["bias"].tolist() == [-2**31, -2**31, 7e7] and not parts["attention"].any()
    assert parts["step"].tolist() == [100, -2**31, 100] and parts["carry"].tolist() == [0, 0, 0]
    packed = zlib.decompress(base64.b64decode(maps.packed(parts["bias"])))
    assert packed == b"\0\0\x80\0\0\x1d\0\0\x2c\x80\x80\x04"


def test_the_page_that_is_committed_is_the_template_as_it_is():
    """And small enough; its numbers are of alibi, fox, cable, cope and tra, at 1 and 4 lengths."""
    _, template = page_data(ROOT / "play.html")
    assert template.count("\n") <= 250 and max(map(len, template.splitlines())) <= 100
    for word in ("http:", "https:", " src=", "import ", "fetch(", "@font-face", "url("):
        assert word not in template, word
    for name in ("play.html", "play_text.html"):
        path = ROOT / "results" / name
        found, ours = page_data(path)
        assert ours == template and path.stat().st_size < 2_000_000
        for string in found["strings"]:
            unpacked(found, string)
        names = [lane["name"] for lane in found["lanes"]]
        if name == "play.html":
            assert names == ["alibi", "fox", "cable", "cope", "tra"]
            assert {len(s["tokens"]) // 60 for s in found["strings"]} == {1, 4}


def test_a_page_that_would_be_too_large_says_what_to_leave_out(trained, home, monkeypatch):
    monkeypatch.setattr(maps, "PAGE_LIMIT", 1000)
    words = "maps.py", "play", trained / "tra", "--length", 12
    for more, spare in ((("--heads", "all"), "leave out --heads all"), ((), "tokens, by --length"),
                        ((20, "--split", "iid"), "leave out a string"),
                        ((20, "--heads", "all"), "leave out --heads all or a string")):
        said = complaint(home, *words, *more)
        assert "the limit is 0.001: leave out" in said and said.endswith(spare)
    assert not (home / "out").exists()


def test_a_page_of_forks(fork, copy):
    """An edited step, and a file without a literal form: its attention alone; a hostile prompt."""
    fork("fox", ("bias = -distance", "bias = -3 * distance"),
         ('STEP = "-log f_k', 'STEP = "</script><b>three</b> -log f_k'))
    command(copy, "train.py", "--model", "mine", *TINY_RUN)
    words = "maps.py", "play", "out/mine-flipflop-nano", "--length", 12, "--out", "p.html"
    command(copy, *words)
    found, _ = page_data(copy / "p.html")
    parts = unpacked(found, found["strings"][0])[0][0]
    assert np.abs(parts["bias"] + 3 * parts["distance"]).max() < 3
    assert found["lanes"][0]["step"].startswith("</script><b>three</b>")
    source = (copy / "model_mine.py").read_text()
    before, _, rest = source.partition("def literal(")
    (copy / "model_mine.py").write_text(before + rest.partition("\n\n\n")[2])
    runs.models.cache_clear()
    del sys.modules["model_mine"]
    out, _ = command(copy, *words)
    assert "model_mine.py has no literal form: its attention is all" in out
    found, _ = page_data(copy / "p.html")
    assert found["lanes"][0]["kinds"] == ["attention"] and not found["lanes"][0]["literal"]


class Browser:
    """A page in headless Chromium, which is spoken to over a pipe (the DevTools protocol)."""
    NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
    CODES = dict(Tab=9, End=35, Home=36, ArrowLeft=37, ArrowRight=39)

    def __init__(self, page, home, width=1440):
        down, self.to = os.pipe()
        self.back, up = os.pipe()
        program = next(filter(None, map(shutil.which, self.NAMES)))
        flags = ("--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe "
                 f"--user-data-dir={home / 'profile'}").split()
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{down} 4>&{up}', "bash", program, *flags],
            pass_fds=(down, up), stderr=subprocess.DEVNULL)
        os.close(down)
        os.close(up)
        self.n, self.rest, self.said, self.session = 0, b"", [], {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = dict(sessionId=found["sessionId"])
        for domain in ("Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=page.as_uri())
        self.until("document.querySelector('dd')?.textContent")

    def ask(self, method, **params):
        """A command -> its result; what the page says in between is kept in `said`."""
        self.n += 1
        message = dict(id=self.n, method=method, params=params) | self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                assert select.select([self.back], [], [], 60)[0], f"no answer to {method}"
                self.rest += os.read(self.back, 1 << 16)
            one, _, self.rest = self.rest.partition(b"\0")
            one = json.loads(one)
            if one.get("id") == self.n:
                assert "error" not in one, one
                return one["result"]
            self.said.append((one["method"], one["params"]))

    def js(self, text):
        found = self.ask("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, text):
        end = time.time() + 30
        while not self.js(text):
            assert time.time() < end, f"never: {text}"
            time.sleep(.02)

    def key(self, name, shift=False):
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                     windowsVirtualKeyCode=self.CODES[name], modifiers=8 * shift)

    def point(self, svg, token, click=False):
        """The mouse over a token of the string (svg 0) or of a lane, 1 and more."""
        box = self.js(f"(b => [b.x, b.y])(document.querySelectorAll('svg')[{svg}]"
                      ".getBoundingClientRect())")
        cell = self.js("parseFloat(page.style.getPropertyValue('--cell'))")
        where = dict(x=box[0] + (token + .5) * cell, y=box[1] + 10)
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", **where)
        for kind in ("mousePressed", "mouseReleased"):
            if click:
                self.ask("Input.dispatchMouseEvent", type=kind, **where,
                         button="left", clickCount=1)

    def numbers(self, lane):
        """What a lane's list and its equation say, by kind."""
        found = self.js(f"[...document.querySelectorAll('.lane')[{lane}].querySelectorAll("
                        "'[data-kind]')].map(x => [x.dataset.kind, x.textContent])")
        return {kind: text.replace("−", "-") for kind, text in found if kind}

    def where(self):
        """The query and the key, from 0."""
        found = re.findall(r"(?:query|key) (\d+)", self.js("where.textContent"))
        return [int(n) - 1 for n in found]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, Browser.NAMES)), reason="needs Chromium")
def test_the_page_in_a_browser(trained, home):
    """Arrow keys, pointer, tab order, head and string; the numbers that it shows are literal's."""
    flags = "--data", "flipflop", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--model", "diff", *flags, "--n_embd", 32, "--out_dir", "diff")
    command(home, "maps.py", "play", "diff", trained / "rope", trained / "tra", "--heads", "all",
            "--length", 16, 48, "--out", "p.html")
    command(home, "maps.py", "play", trained / "cable", "--prompt", "</script> $", "x\ny",
            "--out", "text.html")
    parts = []
    model, config, _ = runs.load_run(trained / "tra" / "ckpt.pt", torch.device("cpu"))
    for T in (16, 48):
        x = batch_of_one(runs.make_task(config | dict(block_size=T)), "iid")
        parts.append(maps.look(model, torch.from_numpy(x))[0])
    browser = Browser(home / "p.html", home)
    try:
        play_with(browser, parts)
        browser.ask("Page.navigate", url=(home / "text.html").as_uri())
        browser.until("document.querySelectorAll('.top text')[1]?.textContent === '<'")
        name = browser.js("document.querySelector('button').textContent")
        assert name == "</script> $ (12 tokens)"
        asked = [p["request"] for m, p in browser.said if m == "Network.requestWillBeSent"]
        assert {one["url"][:5] for one in asked} <= {"file:", "data:"} and len(asked) >= 2
        loud = "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"
        assert [said for said in browser.said if said[0] in loud] == []
    finally:
        browser.close()


def play_with(browser, parts):
    """parts: what tra's one layer, the last lane, says about both strings."""
    def shows(string, head):
        i, j = browser.where()
        found, exact = browser.numbers(2), {k: v[head, i, j] for k, v in parts[string].items()}
        assert found.pop("attention") == f"{exact['attention']:.3f}"
        dropped = np.isinf(exact["bias"])
        assert (found.pop("bias") == "dropped") == dropped == (found["logit"] == "-∞")
        exact["logit"] = exact["qk"] + exact["bias"]
        for kind in ("qk", "step", "distance", "logit")[:3 if dropped else 4]:
            assert abs(float(found[kind]) - exact[kind]) <= .005 + 1e-6 and found[kind][-3] == "."
        return dropped

    T, longer = (len(p["qk"][0]) for p in parts)
    assert browser.where()[0] == T - 1 and T > 13
    head = browser.js("document.querySelectorAll('select')[2].selectedIndex")
    kinds = [{shows(0, head)}]
    for key, shift, want in (("Home", True, [T - 1, 0]), ("ArrowRight", True, [T - 1, 1]),
                             ("ArrowLeft", False, [T - 2, 1]), ("Home", False, [0, 0]),
                             ("ArrowLeft", False, [0, 0]), ("End", False, [T - 1, 1])):
        browser.key(key, shift)
        assert browser.where() == want
        shows(0, head)
    browser.point(0, 9)                       # pointing looks, and what was held comes back
    assert browser.where() == [9, 1]
    shows(0, head)
    browser.point(3, 5)
    assert browser.where() == [T - 1, 5]
    browser.point(3, 6, click=True)
    browser.point(0, 10, click=True)
    assert browser.where() == [10, 6]
    browser.point(3, 12, click=True)          # a later key is none
    assert browser.where() == [10, 6]
    for key in range(11):
        browser.point(3, key, click=True)
        kinds.append({shows(0, head)})
    assert set().union(*kinds) == {True, False}
    browser.js("(s => { s.selectedIndex = 1 - s.selectedIndex; s.onchange(); })"
               "(document.querySelectorAll('select')[2])")
    shows(0, 1 - head)
    browser.js("document.querySelectorAll('button')[1].click()")
    browser.until(f"document.querySelectorAll('.top text').length === {longer}")
    assert browser.where()[0] == longer - 1
    shows(1, 1 - head)
    browser.js("document.activeElement.blur(); document.querySelector('main').focus()")
    order = []
    for _ in range(8):
        browser.key("Tab")
        order.append(browser.js("document.activeElement.id || document.activeElement.tagName"))
    wanted = ["BUTTON", "BUTTON", "whole", "string", "SELECT", "SELECT", "SELECT"]
    assert " ".join(wanted) in " ".join(order * 2)
    assert "no steps to show" in browser.js("document.querySelector('.lane').innerText")
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")


# -----------------------------------------------------------------------------
# speed

@pytest.fixture
def small(monkeypatch):
    """bench.py's nano size, smaller; memory is not measured in processes of their own."""
    tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2)
    monkeypatch.setitem(data.text.Task.defaults, "nano", tiny)
    monkeypatch.setattr(bench, "extra_memory", lambda *what: 0.25)


def test_bench_measures_training_and_decoding(small, home):
    flags = "--models", "cable", "tra", "--repeats", 1, "--device", "cpu"
    flags += "--context", 50
    out, _ = command(home, "bench.py", "train", "decode", *flags, "--out", "b.json")
    result = json.loads((home / "b.json").read_text())
    a, b = result["train"]["nope"], result["train"]["cable"]
    assert list(result["train"]) == list(result["decode"]) == ["nope", "cable", "tra"]
    assert a["of_nope"] == 1 and b["of_nope"] == pytest.approx(b["tok_s"] / a["tok_s"], rel=0.01)
    a, b = result["decode"]["nope"], result["decode"]["cable"]
    assert a["times_nope"] == 1 and b["times_nope"] == pytest.approx(b["ms"] / a["ms"])
    assert re.search(r"^  cable +tok_s", out, re.M) and result["command"].startswith("python ben")
    command(home, "bench.py", "decode", *flags[3:], "--out", "all.json")  # of every model file
    every = set(json.loads((home / "all.json").read_text())["decode"])
    assert {"nope", "diff", "cope_val", "perinorm", "label"} <= every and len(every) > 25
    assert not {name for name in every if name.startswith(("bert", "tra_")) or name == "cope_mlp"}
    assert "bert_rope is an encoder: only its attention is measured here" in complaint(
        home, "bench.py", "train", "--models", "bert_rope")
    command(home, "bench.py", "train", "--models", "fox", "--beside", "cable", "--repeats", 1,
            "--device", "cpu", "--out", "c.json")
    result = json.loads((home / "c.json").read_text())["train"]
    assert list(result) == ["cable", "fox"] and result["cable"]["of_cable"] == 1


def test_bench_writes_the_page_of_results(small, home):
    """Of what is measured into results/, here or on another machine, and of nothing else."""
    flags = "train", "--models", "cable", "--repeats", 1, "--device", "cpu"
    command(home, "bench.py", *flags, "--out", "b.json")
    assert not (home / "results").exists()
    command(home, "bench.py", *flags)
    command(home, "bench.py", *flags, "--out", "results/bench.other.json")
    page = (home / "results" / "README.md").read_text()
    for stem in ("train.cpu", "other"):
        result = json.loads((home / "results" / f"bench.{stem}.json").read_text())
        row = result["train"]["cable"]
        assert f"### bench.{stem}\n" in page
        assert f"| cable | {row['tok_s']:,} | {row['of_nope']:.2f} |" in page


def test_bench_measures_generating_and_memory(small, home, monkeypatch):
    def here(words, **_):
        err = written()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(written()):
            code = in_process(Path(words[1]).name, *words[2:])
        said = err.buffer.getvalue().decode()
        return subprocess.CompletedProcess(words, code, stdout="", stderr=said)
    made, meta = None, None
    with standing_in(home):  # the notes stand for the standard library
        made, meta = data.text.prepare("notes", "bytes")
        folder, source, _ = data.text.look_up("stdlib", "bytes")
        shutil.copytree(made, folder)
        (folder / "meta.json").write_text(json.dumps(meta | dict(source=source)))
    monkeypatch.setattr(bench.subprocess, "run", here)
    flags = "--models", "cable", "learned", "--device", "cpu", "--out", "b.json"
    command(home, "bench.py", "generate", "memory", *flags, "--length", 40)
    result = json.loads((home / "b.json").read_text())
    found = result["generate"]["cable"]
    assert found["times_faster"] == pytest.approx(found["uncached_s"] / found["cached_s"])
    assert list(result["memory"]) == ["nope", "cable", "learned"]  # learned is trained longer
    assert all(0.05 < row["peak_GB"] < 50 for row in result["memory"].values())


@pytest.mark.filterwarnings("error:constrained_layout")
def test_bench_measures_every_attention(small, home):
    """Of every model file, beside torch's own; its regimes; its ways where they are."""
    flags = "--lengths", 40, "--repeats", 1, "--device", "cpu"
    command(home, "bench.py", "attention", *flags, "--out", "a.json", draw=True)
    rows = json.loads((home / "a.json").read_text())["attention"]["40"]
    assert is_png(home / "a.png") and rows["sdpa"]["forward_of_sdpa"] == 1
    first = {runs.models()[name][0]: name for name in reversed(runs.models())}
    for module, name in first.items():
        attention = runs.attention_module(runs.make_model(dict(model=name, n_layer=1)))
        assert rows[name]["both_ms"] > 0 and rows[name]["forward_of_sdpa"] > 0, module
        assert (f"{name}: literal" in rows) == hasattr(attention, "literal")
        known = kernels.REGIMES.get(runs.plain_function(attention).__name__, {})
        assert all(f"{name}, {regime}" in rows for regime in known)
    assert rows["cable"]["both_GB"] == 0.25 and "cope, gates 0.03" in rows
    on_cpu = {name for name in rows if name.endswith(": kernel")}
    measured = {name.partition(":")[0].partition(",")[0] for name in on_cpu}
    assert measured == {"cable", "fox", "tra", "cope"} or kernels.INTERPRET
    assert not any("failed" in key for row in rows.values() for key in row)


def test_bench_gpu_wants_a_gpu(home, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = complaint(home, "bench.py", "gpu", "--device", "cpu")
    assert said.strip() == "error: no GPU to measure: torch finds no CUDA device here"
    monkeypatch.setattr(bench, "why_no_gpu", lambda: "")
    assert "by itself" in complaint(home, "bench.py", "gpu", "train", "--device", "cpu")


@needs_triton
def test_bench_gpu_keeps_what_was_measured_before_the_device_was_lost(home, monkeypatch):
    def tests(result):
        result["tests"] = dict(ok=True, said="60 passed", failed=[])

    def repeats(args, name, found):
        found[name] = dict(times=1000, different=int(name == "fox"))

    def times(args, name, T, ways, found):
        on_disk = json.loads((home / "g.json").read_text())
        assert on_disk["repeats"].keys() == set(bench.with_kernels())
        if (name, T) == ("fox", 4096):
            raise RuntimeError("CUDA error: unspecified launch failure\nand more")
        row = dict(forward_ms=2.0, forward_of_sdpa=0.9, both_ms=6.0, both_of_sdpa=1.2)
        found.setdefault(T, {})[f"{name}: kernel"] = row
    for f in (tests, repeats, times):
        monkeypatch.setattr(bench, "kernel_tests" if f is tests else f.__name__, f)
    monkeypatch.setattr(bench, "why_no_gpu", lambda: "")
    command(home, "bench.py", "gpu", "--device", "cpu", "--out", "g.json", code=1)
    result = json.loads((home / "g.json").read_text())
    assert result["stopped"] == "at fox at 4,096: CUDA error: unspecified launch failure"
    assert list(result["attention"]) == ["1024", "4096"]
    page = (home / "g.md").read_text()
    assert "**Stopped at fox at 4,096" in page and "Tests: **met** (60 passed)" in page
    assert "fox, the same bits 1,000 times: **MISSED** (1 differ)" in page
    assert "| cable | 4,096 | forward | 0.95 | 0.90 | met |" in page
    assert "| cable | 4,096 | forward and backward | 1.05 | 1.20 | MISSED |" in page
    assert "| cable | 16,384 | forward | 1.0 | - | not measured |" in page


@needs_triton
def test_bench_gpu_stops_in_time(home, monkeypatch):
    monkeypatch.setattr(bench, "why_no_gpu", lambda: "")
    monkeypatch.setattr(bench, "SECONDS", -1)
    command(home, "bench.py", "gpu", "--device", "cpu", "--out", "g.json", code=1)
    assert json.loads((home / "g.json").read_text())["stopped"] == "before tests, as time was up"
    assert "not measured" in (home / "g.md").read_text()


def test_bench_takes_the_attention_of_a_trained_run(small, trained, home):
    flags = "--repeats", 1, "--device", "cpu", "--ways", "plain", "kernel", "--out", home / "a.json"
    command(trained, "bench.py", "attention", "--run", "cable", "--lengths", 20, 30, *flags)
    found = json.loads((home / "a.json").read_text())["attention"]
    assert list(found) == ["20", "30"]
    assert list(found["20"]) == ["sdpa", "unfused", "cable", "cable: kernel"]
    said = complaint(trained, "bench.py", "attention", "--run", "learned", "--lengths", 20, *flags)
    assert "learned positions end at block_size=16" in said


def test_a_way_that_fails_has_the_reason_in_its_row(small, home, monkeypatch):
    def gone(*args):
        raise RuntimeError("out of memory\nand more")
    monkeypatch.setattr(runs.models()["tra"][0], "literal", gone)
    monkeypatch.setattr(runs, "plain_function", lambda module: module.tra_attention)
    command(home, "bench.py", "attention", "--models", "tra", "--lengths", 20, "--repeats", 1,
            "--device", "cpu", "--out", "a.json")
    rows = json.loads((home / "a.json").read_text())["attention"]["20"]
    assert rows["tra: literal"] == dict(forward_failed="out of memory", both_failed="out of memory")
    assert rows["tra"]["both_ms"] > 0


def test_memory_of_one_call_beyond_its_inputs():
    """In a process of its own: the literal form holds some matrices of 4,096 x 4,096 numbers."""
    q, k, v = torch.randn(3, 1, 4, 4096, 8)
    what = model_baseline.literal, torch.nn.Linear(1, 1), [(q, k, v)], False
    found = bench.extra_memory(torch.device("cpu"), *what)
    assert (found is None) == (runs.peak_memory(torch.device("cpu")) is None)
    assert found is None or 0.5 < found < 2.5  # a matrix is .27 GB


def test_memory_of_a_call_that_another_process_cannot_make_is_not_said():
    """ALiBi's arguments have a function of its own."""
    q, k, v = torch.randn(3, 1, 4, 16, 8)
    what = model_classics.attention, torch.nn.Linear(1, 1), [(q, k, v, lambda *_: 0)], False
    assert bench.extra_memory(torch.device("cpu"), *what) is None


def test_an_encoders_attention_is_measured_by_one_that_sees_both_ways(home, monkeypatch):
    monkeypatch.setattr(bench, "extra_memory", lambda *what: None)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    close(bench.sdpa_both_ways(q, k, v), model_bert.literal(q, k, v)[0], 1e-6)
    used = []
    for name in ("sdpa", "sdpa_both_ways"):
        plain = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda *x, name=name, f=plain: used.append(name) or f(*x))
    command(home, "bench.py", "attention", "--models", "bert_cable", "--lengths", 16, "--ways",
            "plain", "--repeats", 1, "--device", "cpu", "--out", "b.json")
    found = json.loads((home / "b.json").read_text())["attention"]["16"]
    assert set(used) == {"sdpa_both_ways"} and list(found) == ["sdpa", "bert_cable"]


# -----------------------------------------------------------------------------
# reproduce.py: its commands here, one after the other

class Inline(Executor):
    """Runs at once what is submitted: the commands want the main thread."""
    def __init__(self, workers):
        pass

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except BaseException as e:
            future.set_exception(e)
        return future


def run_here(board, name, *command):
    """Board.run in this process."""
    print("$ " + shlex.join(command))
    board.began.setdefault(name, time.time())
    words, out = [word for word in command[1:] if word != "-m"], written()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = in_process(*words)
    said = out.buffer.getvalue().decode()
    for line in said.splitlines():
        board.show(name, line)
    if code:
        raise RuntimeError(f"{shlex.join(command)} exited with {code}:\n{said}")


@pytest.fixture
def here(monkeypatch):
    """here(name=entry, ...): these are what reproduce.py has, and it runs its commands here."""
    monkeypatch.setattr(reproduce, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(reproduce.Board, "run", run_here)
    monkeypatch.setattr(reproduce, "EVERY", 0)

    def have(**entries):
        module = types.ModuleType("experiments.mine", "Mine.\n\nSome words.")
        module.ENTRIES = entries
        monkeypatch.setattr(experiments, "files", lambda: [module])
    return have


def entry(train_flags, rows, **more):
    """A small table: its rows' trainings have two steps."""
    flags = f"--max_iters 2 --eval_interval 1 {' '.join(TINY_FLAGS[:-2])} {train_flags}"
    scale = dict(train=flags, eval=more.pop("eval"), rows=rows)
    scale |= {k: more.pop(k) for k in ("contrast", "reads", "note") if k in more}
    return dict(about="A table", published={}, cpu=scale, paper=scale) | more


def test_a_table_of_perplexities_is_made_continued_and_not_made_again(home, here):
    rows = experiments.seeds(2, "cable") | experiments.seeds(1, "rope")
    here(texts=entry("--data notes", rows, eval="--lengths 16 32", contrast="rope",
                     published={"cable": (1, 4, 1, 1, 1, 5)}, reads=["One thing.", "Another."],
                     note="here small"))
    words = "reproduce.py", "texts", "--device", "cpu"
    out, _ = command(home, *words)
    assert out.count("$ python train.py") == out.count("$ python eval.py") == 3
    assert re.search(r"^\[0/3 done, \d+ s left\] cable-1337: iter 2/2 \| loss .* eta 0m00s$", out,
                     re.M) and "[3/3 done, 0 s left] rope-1337 is done" in out
    result = json.loads((home / "results" / "texts.cpu.json").read_text())
    trained = [(r["model"], r["seed"]) for r in result["runs"]]
    assert trained == [("cable", 1337), ("cable", 1338), ("rope", 1337)]
    assert result["command"] == "python reproduce.py texts --scale cpu"
    page = (home / "results" / "README.md").read_text()
    ys = [r["perplexity"]["16"] for r in result["runs"]]
    far = [r["perplexity"]["32"] for r in result["runs"]]
    ratio = np.mean(far[:2]) / np.mean(ys[:2])
    assert f"| cable | 2 | {np.mean(ys[:2]):.3f} ± {np.std(ys[:2], ddof=1):.3f} |" in page
    assert f"| rope | 1 | {ys[2]:.3f} | {far[2]:.3f} | {far[2] / ys[2]:.3f} | - |" in page
    assert re.search(rf"^\| cable .*\| {ratio:.2f}\d \| 1.250 \|$", page, re.M)
    for said in ("python reproduce.py texts", "A table, here small.", "- Another.", "- One thing.",
                 "![texts.cpu](texts.cpu.png)", "Python", "torch"):
        assert said in page
    assert is_png(home / "results" / "texts.cpu.png")
    contrast = json.loads((home / "results" / "contrast.json").read_text())
    assert contrast["model"] == "rope" and contrast["perplexity"] == result["runs"][2]["perplexity"]
    assert contrast["settings"]["n_layer"] == 1 and contrast["source"] == result["data"]["sha256"]
    beside = tables.text_table(result | dict(paper_lengths=[8, 32])).splitlines()
    assert cells(beside[0])[2:5] == ["16", "32", "paper"]  # whose second number is of length 32
    assert cells(beside[2])[4] == "4.00" and cells(beside[3])[4] == "-"
    # a killed run continues; lost and half written evaluations are made again; else nothing is
    folder = home / "out" / "texts.cpu"
    path = folder / "cable-1338" / "ckpt.pt"
    begun = torch.load(path, weights_only=True)
    begun |= dict(iter=1, environment=begun["environment"] | dict(commit="0000000"))
    torch.save(begun, path)
    (folder / "cable-1337" / "eval.json").write_text('{"comm')
    (folder / "rope-1337" / "ckpt.pt").unlink()  # killed before its first checkpoint
    out, _ = command(home, *words)
    assert out.count("$ python train.py --resume out/texts.cpu/cable-1338") == 1
    assert out.count("$ python train.py") == 2 and out.count("$ python eval.py") == 3
    assert torch.load(path, weights_only=True)["iter"] == 2
    again = json.loads((home / "results" / "texts.cpu.json").read_text())["runs"]
    same = [a["perplexity"] == b["perplexity"] for a, b in zip(again, result["runs"])]
    assert same == [True, False, True]  # the second took one more step than two
    assert again[1]["environment"]["commit"] != "0000000"  # but the one that finished it
    out, _ = command(home, *words)
    assert "$ python train.py" not in out and "$ python eval.py" not in out
    out, _ = command(home, *words, "--seeds", 1)
    assert "$ python train.py" not in out
    assert len(json.loads((home / "results" / "texts.cpu.json").read_text())["runs"]) == 2


def cells_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line[:2] == "| "]


def test_every_machine_is_named_with_its_commits(tmp_path):
    one = dict(gpu=None, cpu="A", threads=1, torch="2", python="3", commit="x")
    found = tables.machines([one, one | dict(cpu="B", threads=2), one | dict(commit="w")])
    assert found == ("A, 1 thread, torch 2, Python 3, commits w, x; "
                     "B, 2 threads, torch 2, Python 3, commit x")
    runs_ = [dict(model="a", block_size=8, perplexity={"8": 2.0}, environment=e)
             for e in (one, one | dict(cpu="B"))]  # a section has those of its runs
    whole = dict(runs=runs_, lengths=[8], environment=one)
    (tmp_path / "a.json").write_text(json.dumps(whole))
    section = dict(about="It.", commands=["do"], json=["a.json"], table="text_table")
    said = "\n".join(tables.section_part("a", section, tmp_path))
    assert "A, 1 thread" in said and "B, 1 thread" in said


def test_tables_of_eval_by_hand():
    """Every number of a made-up JSON in the cell where it belongs."""
    runs_ = [dict(name="a-1", model="a", label="a", block_size=8, perplexity={"8": 3.5, "16": 4.5},
                  strided={"8": 3.25, "16": 2.75}),
             dict(name="a-2", model="a", label="a", block_size=8, perplexity={"8": 5.5, "16": 6.5},
                  strided={"8": 5.25, "16": 4.75})]
    result = dict(runs=runs_, lengths=[8, 16],
                  papers={"P": dict(a=7.125), "Q": dict(b=1), "R": dict(a="Figure 4")})
    one = [["model", "seeds", "8", "16", "16 / 8"],
           ["a", "2", "4.500 ± 1.414", "5.500 ± 1.414", f"{(4.5 / 3.5 + 6.5 / 5.5) / 2:.3f}"]]
    assert cells_of(tables.text_table(result)) == one
    strided = ["a", "2", "4.250 ± 1.414", "3.750 ± 1.414"]
    assert cells_of(tables.text_table(result | dict(strided_tokens=9))) == [
        *one, one[0], [*strided, f"{(2.75 / 3.25 + 4.75 / 5.25) / 2:.3f}"]]
    assert "training window" not in tables.text_table(result | dict(strided_tokens=9))
    more = [dict(runs_[0], label="b", strided={"8": 2.0, "16": 4.0, "32": 3.0}),
            dict(runs_[0], label="c", strided={"8": 2.0, "16": 4.0, "32": math.nan}),
            dict(runs_[0], label="d", strided={"8": 4.0, "16": 2.0, "32": 1.0}), runs_[0] | dict(
                label="d", strided={"8": 2.0, "16": 2.0, "32": 1.0}), dict(runs_[0], label="e")]
    del more[-1]["strided"]
    found = tables.text_table(result | dict(lengths=[8, 16, 32], strided_tokens=9,
                                            runs=[*runs_, *more]))
    assert "From windows of 16 on that is all the 8 tokens of a training window" in found
    heads, *shown = cells_of(found)[-5:]
    assert heads == ["model", "seeds", "8", "16", "32", "32 / 8", "32 / 16"]
    assert [row[0] for row in shown] == ["d", "b", "a", "c"]  # e was not read like that
    assert shown[0][1:4] == ["2", "3.000 ± 1.414", "2.000 ± 0.000"]
    assert shown[0][4:] == ["1.000 ± 0.000", "0.375", "0.500"]
    assert shown[1][-2:] == ["1.500", "0.750"] and shown[2] == [*strided, "-", "-", "-"]
    for x2, said in ((4.3605, " (unfinished: 3% lower with x2)"), (4.3695, ""), (5, ""),
                     (3.6, " (unfinished: 20% lower with x2)")):  # the two runs' mean is 4.5
        longer = [dict(runs_[0], label="a x2", perplexity={"8": x2, "16": 1})]
        names = [row[0] for row in cells_of(tables.text_table(result | dict(runs=runs_ + longer)))]
        assert names == ["model", f"a{said}", "a x2"]
    assert cells_of(tables.papers_table(result)) == [
        ["row", "8", "16", "16, strided", "P", "Q", "R"],
        ["a", "4.500 ± 1.414", "5.500 ± 1.414", "3.750 ± 1.414", "7.12", "-", "Figure 4"]]

    def scored(*values):
        rates = iter(values)
        return {T: {split: dict(exact=dict(value=next(rates), low=0.25, high=0.75),
                                other=dict(value=0.99)) for split in ("iid", "far")}
                for T in ("8", "1024")}
    result = dict(splits=["iid", "far"], runs=[
        dict(name="a-1", model="a", scores=scored(0.5, 0.25, 0.375, 0.125)),
        dict(name="a-2", model="a", scores=scored(0.625, 0.5, 0.75, 0.25)),
        dict(name="b-1", model="b", scores=scored(0.5, 0.625, 0.25, 0.5))])
    heads = ["iid 8", "iid 1,024", "far 8", "far 1,024"]
    found = cells_of(tables.lengths_table(result))
    assert found[0] == ["model", "runs", *heads]
    assert found[1][:4] == ["a", "2", "56.25 (50.00 to 62.50)", "56.25 (37.50 to 75.00)"]
    assert tables.percent([dict(value=1.0, low=0.9, high=1.0)] * 2) == "100"
    assert found[2][:3] == ["b", "1", "50.00 [25.00, 75.00]"] and found[2][5].startswith("50.00 [")


def test_differences_of_searches_by_hand():
    """Beside the first row's mean of seeds, query by query; nDCG is 1, 1 / 2 and 0 at 1, 3, 11."""
    places = [{"8": [1, 3, 11, 11], "16": at} for at in ([11] * 4, [1] * 4, [1, 3, 11, 3])]
    result = dict(lengths=[8, 16], answers=[0, 0, 1, 1], runs=[
        dict(label=label, places=at) for label, at in zip("aab", places)])
    text = tables.paired_table(result, 8)
    b, = [row for row in cells_of(text.split(":\n\n")[1]) if row[0] == "b - a"]
    assert b[1] == "0.0 [0.0, 0.0]" and re.match(r"0\.0 \[-25\.0, 25\.0\]", b[2])
    one = tables.paired_table(result | dict(answers=[7] * 4), 8)  # a single document
    assert "| b - a | 0.0 | 0.0 |" in one
    result["runs"][2]["places"] = {"8": [1, 1, 1, 1]}  # ends there
    assert tables.paired_table(result, 8) == ""
    del result["answers"]  # of an older eval.py
    assert tables.paired_table(result, 8) == ""


def test_tables_of_the_encoders_by_hand(monkeypatch, tmp_path):
    losses_ = [[n, float(n)] for n in range(1, 41)]
    result = dict(runs=[dict(label="a", iter=40, loss=losses_, val_loss=[[20, 9.5], [40, 8.5]])])
    assert cells_of(tables.losses_table(result)) == [
        ["model", "seeds", "training, up to step 10", "training, up to step 20",
         "training, up to step 40", "validation"],
        ["a", "1", "8.500", "18.500", "38.500", "8.500"]]

    def measure(value):
        rate = dict(value=value, low=value - 0.0625, high=value + 0.0625)
        zero = dict(value=0.0, low=0.0, high=0.0)
        return {"ndcg@10": rate, "recall@1": zero, "recall@10": rate}
    found = {reading: {"8": measure(0.125 * n), "16": measure(0.125 * n + 0.0625)}
             for n, reading in enumerate(evaluation.READINGS, 1)}
    at = dict(length=16, edges=[0, 8, 16], queries=[3, 4], whole=[0.5, None], first=[0.25, 0.125],
              windows=[0.375, 0.75], bm25=[0.625, None])
    result = dict(lengths=[8, 16], paper=dict(a=[30.5]),
                  runs=[dict(label="a", block_size=8, search=found, by_answer_at=at, places={})])
    text = tables.retrieval_table(result)
    assert "documents of 16 tokens" in text and "minus" not in text  # a single row
    parts = [part.partition(":\n\n") for part in re.split(r"\n\n(?=\w)", text)]
    said = {title: cells_of(table) for title, _, table in parts}
    assert all(table[0] == ["model", "seeds", "8 (1x)", "16 (2x)"]
               for title, table in said.items() if "answer" not in title)
    whole, *others, evidence = ({row[0]: row[1:] for row in table} for table in said.values())
    assert list(whole) == ["model", "a", "BM25", "a, in the paper (MLDR, 512 tokens)"]
    assert whole["a"] == ["1", "12.50 [6.25, 18.75]", "18.75 [12.50, 25.00]"]
    assert whole["a, in the paper (MLDR, 512 tokens)"] == ["-", "30.50", "-"]
    assert whole["BM25"][1:] == ["37.50 [31.25, 43.75]", "43.75 [37.50, 50.00]"]
    want = [("nDCG@10 by a document's best window of 8 tokens", "25.00 [18.75, 31.25]"),
            ("nDCG@10 by the sum of two ranks, the whole document's and BM25's",
             "50.00 [43.75, 56.25]"),
            ("nDCG@10 by the sum of two ranks, the best window's and BM25's",
             "62.50 [56.25, 68.75]"),
            ("Recall@1, documents read as a whole", "0 [0, 0]"),
            ("Recall@10, documents read as a whole", "12.50 [6.25, 18.75]")]
    assert [(title, table["a"][1]) for title, table in zip(list(said)[1:], others)] == want
    assert evidence["model"] == ["seeds", "0 to 8", "8 to 16"]
    assert evidence["a"][1:] == ["50.0", "-"] and evidence["a, its best window"][2] == "75.0"
    assert evidence["a, the first 8 tokens alone"][1:] == ["25.0", "12.5"]
    assert evidence["BM25"][1:] == ["62.5", "-"] and evidence["queries"][1:] == ["3", "4"]
    result["runs"][0]["by_answer_at"] = None  # nobody knows where the answers are
    assert "answer" not in tables.retrieval_table(result)
    figures = drawn(monkeypatch)
    search = json.loads((ROOT / "results" / "cable_table2.cpu.json").read_text())
    for name, panels in (("known", 3), ("unknown", 2)):
        (tmp_path / "search.json").write_text(json.dumps(search))
        plot.main(["ndcg", str(tmp_path / "search.json")])
        assert len(figures[-1].axes) == panels, name
        for row in search["runs"]:
            row["by_answer_at"] = None


def test_the_colours_of_many_scores(monkeypatch):
    """The better, the bluer: an accuracy of 90 %, an error or a distance of 10 %."""
    shares = []
    monkeypatch.setattr(plot, "draw_cell", lambda *args: shares.append(args[5]))
    for metric in ("accuracy", "auc", "error", "error_rate", "tvd", "tvd_last"):
        value = 90.0 if metric in ("accuracy", "auc") else 10.0
        plot.score_grid({"test": {"a": [{32: (value, value, value)}]}}, metric, "length")
        assert shares.pop() == pytest.approx(0.9), metric
    plot.plt.close("all")


def test_tables_of_bench_by_hand():
    one = dict(sdpa=dict(forward_ms=10.0, forward_of_sdpa=1.0, forward_GB=0.5, both_ms=30.0,
                         both_of_sdpa=1.0),
               cable=dict(forward_ms=15.0, forward_of_sdpa=1.5, forward_GB=0.25, both_ms=75.0,
                          both_of_sdpa=2.5, both_GB=0.75),
               tra=dict(forward_failed="no memory"))
    two = dict(sdpa=dict(forward_ms=1234.0, forward_of_sdpa=1.0))
    assert cells_of(tables.attention_table({"64": one, "1024": two})) == [
        ["times sdpa (GB)", "forward, T = 64 (sdpa: 10 ms)",
         "forward and backward, T = 64 (sdpa: 30 ms)", "forward, T = 1,024 (sdpa: 1,234 ms)"],
        ["sdpa", "1.00 (0.50)", "1.00", "1.00"],
        ["cable", "1.50 (0.25)", "2.50 (0.75)", "-"], ["tra", "failed", "-", "-"]]
    kernel = dict(registers=64, spill_stores=4, spill_loads=8, instructions=1200, serialized=True)
    found = {"f, sm_80": kernel, "g, sm_90": kernel | dict(serialized=False, spill_loads=0)}
    assert cells_of(tables.kernels_table(found))[1:] == [
        ["f", "64 / 8 / 1,200 C7515", "-"], ["g", "-", "64 / 4 / 1,200"]]
    found = dict(train=dict(a=dict(tok_s=12345, of_nope=1.5)), memory=dict(b=dict(peak_GB=0.25)))
    assert cells_of(tables.bench_table(found)) == [
        ["model", "tok/s in training", "of nope's", "peak memory, GB"],
        ["a", "12,345", "1.50", "-"], ["b", "-", "-", "0.25"]]


def test_a_task_s_table_has_the_paper_s_numbers_beside_ours(home, here):
    columns = [("in", "iid", "exact_match"), ("dense", "dense", "exact_match")]
    rows = experiments.seeds(2, "tra") | experiments.seeds(1, "cope", flags="--P 9 --max_iters 3")
    first = entry("--data flipflop", rows, eval="--sequences 20", columns=columns, group="both",
                  published={"tra": (100, 99.5), "fox": (3, 4)})
    here(flips=first, others=first)
    command(home, "reproduce.py", "flips", "--device", "cpu")
    result = json.loads((home / "results" / "flips.cpu.json").read_text())
    assert [r["label"] for r in result["runs"]] == ["tra", "tra", "cope"]
    assert all([it for it, _ in r["history"]] == [1, 2] for r in result["runs"][:2])
    assert result["runs"][2]["iter"] == 3  # a row's own flag goes before the entry's
    page = (home / "results" / "README.md").read_text()
    scores = [r["scores"]["16"]["dense"]["exact_match"] for r in result["runs"]]

    def number(y):
        return f"{100 * y:.0f}" if y in (0, 1) else f"{100 * y:.2f}"
    ys = [s["value"] for s in scores[:2]]
    mean, low, high = map(number, (np.mean(ys), min(ys), max(ys)))
    apart = f" ({low} to {high})" if low != high else ""
    assert f"| {mean}{apart} | 99.5 |" in page
    value, low, high = (number(scores[2][name]) for name in ("value", "low", "high"))
    assert f"| {value} [{low}, {high}] | - |" in page
    assert is_png(home / "results" / "flips.cpu.png") and "flips.cpu.steps.png" in page
    # entries of one group share their runs; the figures show what the table has first
    columns = [("dense", "dense", "glitch_rate")]
    here(flips=first, others=first | dict(columns=columns, published={}))
    out, _ = command(home, "reproduce.py", "others", "--device", "cpu")
    assert out.count("--metric glitch_rate") == 2
    assert "$ python train.py" not in out and (home / "results" / "others.cpu.json").exists()
    # another experiment under the same name is not passed off as this one
    for old, new, says in (("flipflop", "flipflop --p_ignore 0.5", "p_ignore=0.8, the entry says"),
                           ("--max_iters 2", "--max_iters 9", "max_iters=2, the entry says 9")):
        changed = first["cpu"] | dict(train=first["cpu"]["train"].replace(old, new))
        here(flips=first | dict(cpu=changed))
        _, err = command(home, "reproduce.py", "flips", "--device", "cpu", code=1)
        assert re.search(f"133\\d holds a run with {says}", err) and "move it away" in err
    here(flips=first)
    path = home / "out" / "both.cpu" / "cope-P-9-max_iters-3-1337" / "ckpt.pt"
    # nor a compiled run as one that was not: its rounding is another
    checkpoint = torch.load(path)
    checkpoint["config"]["compile"] = "on"
    torch.save(checkpoint, path)
    _, err = command(home, "reproduce.py", "flips", "--device", "cpu", code=1)
    assert "1337 holds a run with compile=on, this command has auto: move it away" in err
    path.write_bytes(b"cut off")
    _, err = command(home, "reproduce.py", "flips", "--device", "cpu", code=1)
    assert "is not a whole checkpoint" in err


def test_a_result_of_an_older_definition_is_not_shown_and_not_timed(home, here):
    """The page names what differs, in one line; the list takes no time from it."""
    rows = experiments.seeds(2, "tra") | experiments.seeds(1, "cope", flags="--P 9")
    columns = [("in", "iid", "exact_match")]
    first = entry("--data flipflop", rows, eval="--sequences 20 --lengths 16 32", columns=columns)
    here(flips=first)
    command(home, "reproduce.py", "flips", "--device", "cpu")
    assert tables.older(first, "cpu", json.loads(
        (home / "results" / "flips.cpu.json").read_text())) == ""

    def page(**changes):
        now = first | dict(cpu=first["cpu"] | changes)
        here(flips=now)
        with standing_in(home):
            assert not tables.measured("flips", now, "cpu")
            text = tables.page()
        assert "| tra |" not in text and "flips.cpu.png" not in text
        return re.search(r"^Not shown: `results/flips.cpu.json` .* \((.*)\)\.$", text, re.M)[1]
    longer = first["cpu"]["train"].replace("--max_iters 2", "--max_iters 9")
    assert page(train=longer) == "its row 'tra' has max_iters=2, the entry says 9"
    other = rows | experiments.seeds(1, "cope", flags="--P 8")
    assert page(rows=other) == "its row 'cope' has P=9, the entry says 8"
    assert trainings.differing(dict(log_kernel=False), ["--model", "cable", "--data", "dyck"]) == ""
    assert page(rows=experiments.seeds(2, "tra")) == "it has a row 'cope', the entry has none"
    assert page(rows=rows | experiments.seeds(1, "fox")) == "it has no row 'fox'"
    assert page(eval="--sequences 30") == "it has sequences=20, the entry says 30"
    assert page(eval="--lengths 16 64") == "it has lengths=16 32, the entry says 16 64"
    assert page(eval="--split iid") == "it has split=iid sparse dense, the entry says iid"
    here(flips=first)
    with standing_in(home):
        assert len(tables.measured("flips", first, "cpu")) == 3 and "| tra |" in tables.page()
    # a part does not replace the whole
    path = home / "results" / "flips.cpu.json"
    whole = path.read_bytes()
    out, _ = command(home, "reproduce.py", "flips", "--device", "cpu", "--rows", "cope")
    assert "wrote out/flips.cpu/flips.json: results/flips.cpu.json keeps its tra, too" in out
    part = json.loads((home / "out" / "flips.cpu" / "flips.json").read_text())
    assert [r["label"] for r in part["runs"]] == ["cope"] and path.read_bytes() == whole
    assert is_png(home / "out" / "flips.cpu" / "flips.png")
    # made with fewer seeds or rows it is the entry's all the same
    path.unlink()
    command(home, "reproduce.py", "flips", "--device", "cpu", "--rows", "cope")
    with standing_in(home):
        assert len(tables.measured("flips", first, "cpu")) == 1
    assert "--scale cpu --rows cope\n" in (home / "results" / "README.md").read_text()
    assert "flips has no row 'rope'" in complaint(home, "reproduce.py", "flips", "--rows", "rope")
    command(home, "reproduce.py", "flips", "--device", "cpu", "--seeds", 1)
    with standing_in(home):
        assert len(tables.measured("flips", first, "cpu")) == 2


def test_a_part_of_the_page_that_is_no_table_says_how_it_is_made():
    for name in experiments.sections():
        with pytest.raises(SystemExit, match=f"{name} is no table of reproduce.py: results/README"):
            reproduce.main([name])
    with pytest.raises(SystemExit, match="did you mean .*lm_sep"):
        reproduce.main(["lm_se"])


def test_missing_makes_only_what_a_result_has_not(home, here):
    """The runs of the JSON stay as they are, their checkpoints need not be there."""
    rows = experiments.seeds(2, "tra") | experiments.seeds(1, "cope", "rope", flags="--P 9")
    rows["rope"] = "--model rope", 1
    columns = [("in", "iid", "exact_match")]
    first = entry("--data flipflop", rows, eval="--sequences 20 --lengths 16", columns=columns)
    here(flips=first)
    path = home / "results" / "flips.cpu.json"

    def reproduce(*words, **more):
        out, err = command(home, "reproduce.py", "flips", "--device", "cpu", *words, **more)
        return re.findall(r"^\$ python train.py .* --model (.*) --seed (\d+) ", out, re.M), err
    assert reproduce("--rows", "cope", "--missing")[0] == [("cope --P 9", "1337")]
    one = json.loads(path.read_text())
    shutil.rmtree(home / "out")  # another machine
    assert reproduce("--rows", "tra", "cope", "--seeds", 1, "--missing")[0] == [("tra", "1337")]
    two = json.loads(path.read_text())
    assert [r["label"] for r in two["runs"]] == ["tra", "cope"] and two["runs"][1] == one["runs"][0]
    assert two["command"].endswith("--scale cpu --seeds 1 --rows tra cope")
    assert "0 runs" in command(home, "reproduce.py", "flips", "--rows", "cope", "--missing",
                               "--dry_run")[0].splitlines()[-1]
    page = (home / "results" / "README.md").read_text()
    assert "| cope | 1 |" in page and "| tra | 1 |" in page
    assert reproduce("--missing")[0] == [("tra", "1338"), ("rope", "1337")]
    three = json.loads(path.read_text())
    assert [r["seed"] for r in three["runs"]] == [1337, 1338, 1337, 1337]
    assert three["command"].endswith("--scale cpu")
    assert reproduce("--missing")[0] == [] and json.loads(path.read_text()) == three
    # a row that the entry did not have, and one that was compiled
    here(flips=first | dict(cpu=first["cpu"] | dict(rows=rows | dict(fox=("--model fox", 2)))))
    assert reproduce("--seeds", 1, "--missing")[0] == [("fox", "1337")]
    four = json.loads(path.read_text())
    assert re.findall("--scale cpu(.*)", four["command"]) == [
        " --rows tra", " --seeds 1 --rows cope rope fox --missing"]
    four["runs"][0]["train_command"] += " --compile on"
    assert trainings.asked(four, first["cpu"] | dict(rows=rows | dict(fox=("", 2))))[0] == (
        " --rows tra --compile")
    here(flips=first)
    # what was measured in another way is not mixed with it
    runs.write_json(path, two | dict(splits=["iid"]))
    before = path.read_bytes()
    assert re.search("have another splits than out/flips.cpu/.*: one table can.t have both",
                     reproduce("--missing", code=1)[1])
    newer, older = dict(runs=[dict(by_answer={})]), dict(runs=[{}])
    trainings.measured_alike(newer, newer, "out/a")
    for found, kept in ((newer, older), (older, newer)):
        with pytest.raises(RuntimeError, match="results/ have another by_answer than out/a: one"):
            trainings.measured_alike(found, kept, "out/a")
    here(flips=first | dict(cpu=first["cpu"] | dict(eval="--sequences 30")))
    assert re.search(r"flips.cpu.json is of an older definition \(it has sequences=20, the entry "
                     r"says 30\): without --missing", reproduce("--missing", code=1)[1])
    assert path.read_bytes() == before


def test_a_search_of_an_older_definition_is_named():
    postnorm = importlib.import_module("experiments.postnorm")
    panels = postnorm.set_panels(4, (6, 2)) | postnorm.exact_panels(4, (8, 2))
    scale = dict(trials=2, steps=5, panels=panels)
    one = dict(metric="tvd", schemes=("pre", "post"), cpu=scale)
    schemes = dict(pre={}, post={})
    result = dict(metric="tvd", steps=5, trials=1, panels=json.loads(json.dumps(
        [panel | dict(name=name, lengths=[], schemes=schemes) for name, panel in panels.items()])))
    assert tables.older(one, "cpu", result) == ""
    for changes, says in (
            (dict(steps=6), "it has steps=5, the entry says 6"),
            (dict(panels=dict(list(panels.items())[:1])), "it has a panel 'n = 8, trained on 2, p* "
                                                          "itself', the entry has none"),
            (dict(panels=panels | postnorm.set_panels(4, (9, 2))), "it has no panel 'n = 9, "),
            (dict(panels=panels | postnorm.set_panels(8, (6, 2))),
             "its panel 'n = 6, trained on 2' has batch_size=4, the entry says 8")):
        assert tables.older(one | dict(cpu=scale | changes), "cpu", result).startswith(says)
    wider = one | dict(schemes=("pre", "post", "peri"))
    assert tables.older(wider, "cpu", result).endswith("has no scheme 'peri'")


def test_ctrl_c_and_failures_say_how_to_continue(home, here, monkeypatch):
    here(texts=entry("--data notes", experiments.seeds(2, "cable"), eval="--lengths 16"),
         wrong=entry("--data notes --n_embd 15", experiments.seeds(1, "cable"), eval=""))
    started = []

    def stopped(board, name, *words):
        started.append(name)
        if len(started) == 3:
            raise KeyboardInterrupt
        run_here(board, name, *words)
    monkeypatch.setattr(reproduce.Board, "run", stopped)
    out, _ = command(home, "reproduce.py", "texts", "--device", "cpu", code=130)
    again = "Continue with: python reproduce.py texts --device cpu"
    assert f"stopped; what is finished is kept. {again}" in out
    assert not (home / "results" / "texts.cpu.json").exists()
    out, _ = command(home, "reproduce.py", "texts", "--device", "cpu")
    assert out.count("$ python train.py") == 1
    _, err = command(home, "reproduce.py", "wrong", code=1)
    assert "exited with 1" in err and "n_embd=15 is not divisible by n_head=2" in err
    assert "the same command continues: python reproduce.py wrong" in err
    with reproduce.locked(home / "out" / "texts.cpu"):
        assert "another reproduce.py" in complaint(home, "reproduce.py", "texts")


def test_the_list_has_every_entry_and_its_time(home, here):
    listed, _ = command(ROOT, "reproduce.py")
    for name, one in experiments.known().items():
        shown = re.search(rf"^{name}\n(.*?)(?=^\S)", listed, re.M | re.S)[1]
        assert " ".join(shown.split()).startswith(" ".join(one["about"].split()))
        for scale in ("cpu", "paper"):
            assert bool(re.search(rf"--scale {scale} +.+", shown)) == (scale in one), name
        has = tables.measured(name, one, "cpu")
        assert not has or re.search(r"--scale cpu +[\d.]+ (s|min|h): ", shown)
    assert max(map(len, listed.splitlines())) <= 100 and "reproduce.py NAME" in listed
    # the papers' tables and figures, as they number them
    there = set(experiments.known())
    for module in experiments.files():
        there |= getattr(module, "SECTIONS", {}).keys()
    for module in experiments.files():
        for number, names in getattr(module, "NUMBERED", {}).items():
            said = names
            if not isinstance(names, str):
                said = ", ".join(name + " *" * (name not in experiments.known()) for name in names)
            assert re.search(rf"^    {number} +{re.escape(said)}$", listed, re.M)
            assert isinstance(names, str) or set(names) <= there, (number, names)
    assert "prompts of GPT-4 and Llama" in listed
    timed = entry("--data notes", experiments.seeds(3, "cable"), eval="")
    timed["cpu"] = timed["cpu"] | dict(minutes=4)
    here(timed=timed)
    listed, _ = command(home, "reproduce.py")
    assert re.search(r"--scale cpu .*12 min.*4 min", listed)
    assert re.search(r"--scale paper .*not measured", listed)
    (home / "results").mkdir()
    about = dict(model="cable", seed=1337, config={})
    seconds = [dict(about, train_seconds=30, eval_seconds={"16": 5, "32": 5.0}),
               dict(about, train_seconds=10, eval_seconds=10)]
    (home / "results" / "timed.cpu.json").write_text(json.dumps(dict(runs=seconds)))
    assert re.search(r"--scale cpu +2 min: 3 runs, 30 s each", command(home, "reproduce.py")[0])


# of each paper: how many numbered tables and figures it has
PAPERS = dict(cable=(4, 6), cope=(10, 6), tra=(2, 4), postnorm=(0, 7))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_of_a_paper_is_here_at_both_sizes(paper):
    """As an entry with a paper scale, or a section that says the command; or why it is not."""
    module, there = importlib.import_module(f"experiments.{paper}"), set()
    entries = experiments.known()
    for number, names in module.NUMBERED.items():
        kind, _, numbers = number.partition(" ")
        there |= {(kind.removesuffix("s"), n) for n in numbers.split(", ")}
        if isinstance(names, str):
            assert re.match("a drawing|not here: ", names), number
            continue
        scales = set()
        for name in names:
            if name in entries:
                scales |= entries[name].keys() & {"cpu", "paper"}
                continue
            scales.add("cpu")
            said = " ".join(experiments.sections()[name].get("reads", ()))
            if re.search(r"At the paper's sizes?.*`python [^`]* --(scale|size) ", said):
                scales.add("paper")
        assert scales == {"cpu", "paper"}, number
    tables_, figures = PAPERS[paper]
    for kind, most in (("Table", tables_), ("Figure", figures)):
        assert {n for k, n in there if k == kind} == {str(n) for n in range(1, most + 1)}


def test_what_lm_says_of_its_rates_and_rows_is_in_the_json():
    """The rate of every family has the lowest perplexity; the rows that run twice fell the most."""
    lm = importlib.import_module("experiments.lm")
    read = {name: json.loads((ROOT / "results" / f"{name}.cpu.json").read_text())["runs"]
            for name in ("lm", "lm_rates")}
    found = {}
    for r in read["lm_rates"]:
        row, rate = r["label"].split(", ")
        found.setdefault(row, {})[rate] = r["perplexity"]["256"]
    assert {row: min(by, key=by.get) for row, by in found.items()} == lm.PICKED
    whole = [r for r in read["lm"] if r["seed"] == 1337 and not re.search("x2|trained", r["label"])]
    whole.sort(key=lambda r: -r["fell"])
    assert {r["label"] for r in whole[:3]} == set(lm.TWICE)


def test_a_command_s_progress_is_shown_and_its_failure_has_its_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    board = reproduce.Board(4, 2, 60, dict(os.environ), ())
    line = "iter 5/10 | loss 1.2 | eta 1m05s"
    board.run("a", "python", "-c", f"print('{line}'); print('{line.replace('5', '6')}')")
    out = capsys.readouterr().out
    # one of four runs for 65 s more, three take about as long, two at a time; the next line waits
    assert f"[0/4 done, 2 min left] a: {line}\n" in out and out.count("iter") == 3
    code = "import sys; print('why it failed'); sys.exit(3)"
    with pytest.raises(RuntimeError, match="exited with 3:\nwhy it failed"):
        board.run("b", "python", "-c", code)
    code = "import time; print('iter 1/2 | eta 0m09s', flush=True); time.sleep(60)"
    monkeypatch.setattr(board, "show", lambda *_: board.stop())
    with pytest.raises(RuntimeError, match="exited with -2"):
        board.run("c", "python", "-c", code)
    with pytest.raises(RuntimeError, match="stopped"):
        board.run("d", "python", "-c", "pass")


def test_two_jobs_at_a_time_and_all_end_with_one_that_fails(tmp_path, monkeypatch):
    """Each of two waits for the other; a failure interrupts what runs."""
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    args = types.SimpleNamespace(jobs=2)

    def job(code):
        def work(run):
            run("python", "-c", f"import os, pathlib, sys, time\n{code}")
            return code
        return work

    def meet(own, other):
        return (f"pathlib.Path('{own}').write_text(os.environ['OMP_NUM_THREADS'])\n"
                f"while not pathlib.Path('{other}').exists():\n    time.sleep(0.01)")
    jobs = dict(a=job(meet("a", "b")), b=job(meet("b", "a")), c=lambda run: "nothing to do")
    found = reproduce.work(jobs, args, 60, ())
    assert found == [meet("a", "b"), meet("b", "a"), "nothing to do"]
    assert (tmp_path / "a").read_text() == str(max(1, os.cpu_count() // 2))
    jobs = dict(a=job("time.sleep(300)"), b=job("sys.exit('it broke')"), c=job("time.sleep(300)"))
    start = time.time()
    with pytest.raises(RuntimeError, match="exited with 1:\nit broke"):
        reproduce.work(jobs, args, 60, ())
    assert time.time() - start < 60


@pytest.mark.slow
def test_ctrl_c_saves_the_training_inside(repo):
    """An interrupt of the whole group, as a terminal sends it."""
    driver = f"""if True:
        import sys, types
        import experiments, reproduce
        mine = types.ModuleType("mine", "Mine.")
        scale = dict(train="--data notes --max_iters 5000 {' '.join(TINY_FLAGS[:-2])}", eval="",
                     rows=experiments.seeds(2, "cable"))
        mine.ENTRIES = dict(mine=dict(about="Mine", published={{}}, cpu=scale, paper=scale))
        experiments.files, reproduce.EVERY = lambda: [mine], 0
        reproduce.main(["mine"])"""
    run = subprocess.Popen([sys.executable, "-c", driver], cwd=repo, start_new_session=True,
                           env=os.environ | ONE_THREAD, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    for line in run.stdout:
        if "cable-1337: iter 9/" in line:
            os.killpg(run.pid, signal.SIGINT)
            break
    rest, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in err, rest + err
    assert "Continue with: python reproduce.py mine" in rest
    path = repo / "out" / "mine.cpu" / "cable-1337" / "ckpt.pt"
    assert 9 <= torch.load(path, weights_only=True)["iter"] < 5000
    assert not (repo / "out" / "mine.cpu" / "cable-1338").exists()


# -----------------------------------------------------------------------------
# reproduce.py: the matrix

MATRIX_COLUMNS = {
    "text: perplexity": matrix.column("text", "less", ".2f", 0.1, matrix.perplexity, 1),
    "text: strided": matrix.column("text", "less", ".2f", 0.1, matrix.reading, 2),
    "flip-flop: iid": matrix.percents("flipflop", 1, "iid", "exact_match"),
    "flip-flop: worst": matrix.column("flipflop", "more", ".1f", 10, matrix.worst, 2,
                                      "exact_match")}


def small_matrix(*models, data="notes", text=""):
    """Two tasks, two steps of each."""
    flags = f"--max_iters 2 --eval_interval 1 {' '.join(TINY_FLAGS[:-2])}"
    scale = dict(rows=experiments.seeds(1, *models), tasks=dict(
        text=dict(train=f"--data {data} {flags} {text}", eval="--lengths 16 32 --strided"),
        flipflop=dict(train=f"--data flipflop {flags}", eval="--sequences 20 --lengths 16 32")))
    return dict(about="Who can what", columns=MATRIX_COLUMNS, cpu=scale, paper=scale)


MATRIX_DRIVER = """if True:
    import sys, types
    import experiments, reproduce
    from experiments import matrix
    mine = types.ModuleType("mine", "Mine.")
    columns = {k: matrix.column(task, better, form, least, getattr(matrix, name), *asked)
               for k, (task, better, form, least, name, *asked) in %r.items()}
    mine.ENTRIES = dict(matrix=dict(about="A", columns=columns, cpu=%r))
    experiments.files = lambda: [mine]
    reproduce.main(sys.argv[1:])"""


@pytest.mark.slow
def test_a_matrix_and_a_fork_in_processes_of_their_own(repo, tmp_path):
    folder = tmp_path / "clone"
    shutil.copytree(repo, folder)
    one = small_matrix("rope", "alibi", data="stdlib")
    plain = {k: (c["task"], c["better"], c["form"], c["least"], c["read"][0].__name__,
                 *c["read"][1:]) for k, c in MATRIX_COLUMNS.items()}
    words = "-c", MATRIX_DRIVER % (plain, one["cpu"]), "matrix", "--device", "cpu", "--jobs", "2"
    run = functools.partial(process, folder, *words)
    killed = subprocess.Popen([sys.executable, *words], cwd=folder, env=os.environ | ONE_THREAD,
                              text=True, stdout=subprocess.PIPE, start_new_session=True)
    for line in killed.stdout:
        if line.startswith("$ python eval.py"):
            os.killpg(killed.pid, signal.SIGKILL)
            break
    assert killed.wait() == -signal.SIGKILL
    done = len([*folder.glob("out/matrix.cpu/*/*/ckpt.pt")])
    out, _ = run()
    assert 1 <= done < 4 and out.count("$ python train.py --data") == 4 - done
    found = json.loads((folder / "results" / "matrix.cpu.json").read_text())["cells"]
    assert all("value" in cell for row in found.values() for cell in row.values())
    assert is_png(folder / "results" / "matrix.cpu.png")
    assert "$ python train.py" not in run()[0]
    write_fork(folder)
    out, _ = run("--add", "mine")
    assert out.count("$ python train.py") == 2
    added = json.loads((folder / "out" / "matrix.cpu" / "mine.json").read_text())
    assert is_png(folder / "out" / "matrix.cpu" / "mine.png")
    assert list(added["cells"]) == ["rope", "alibi", "mine"]
    (folder / "data" / "flipflop.py").write_text("def (")
    _, err = run(code=1)
    assert "flipflop.py" in err.splitlines()[-1]


def test_a_matrix_and_a_fork_beside_it(copy, here):
    """Two methods on two tasks, then a fork: what is made, and what is as it was."""
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope", "alibi"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    planned, (out, _) = run("--dry_run")[0], run()
    assert out.count("$ python train.py") == out.count("$ python eval.py") == 4
    every = re.compile(r"^\$ python (?:train|eval)\.py .*", re.M)
    assert sorted(every.findall(planned)) == sorted(every.findall(out))
    results, mine = copy / "results" / "matrix.cpu.json", copy / "out" / "matrix.cpu" / "mine.json"
    first = json.loads(results.read_text())
    page, found = (copy / "results" / "README.md").read_text(), first["cells"]
    rows, = markdown_tables(page)
    assert list(found) == ["rope", "alibi"] and "4 trainings" in page
    for label, row in found.items():
        for name, cell in row.items():
            shown = format(cell["value"], MATRIX_COLUMNS[name]["form"])
            assert rows[label][name] == shown + r" \*" * cell["unfinished"]
    scored, = copy.glob("out/matrix.cpu/text-*/rope-1337/eval.json")
    scored = json.loads(scored.read_text())["runs"][0]
    assert found["rope"]["text: perplexity"]["value"] == scored["perplexity"]["16"]
    far = scored["strided"]["32"] / scored["strided"]["16"]
    assert found["rope"]["text: strided"]["value"] == far
    again, _ = run()
    assert "$ python train.py" not in again and "$ python eval.py" not in again
    first = json.loads(results.read_text())
    # a fork of one's own; the committed rows stay as they are
    out, _ = run("--add", "mine")
    assert out.count("$ python train.py") == 2 and "left out" not in out and "empty:" not in out
    added = json.loads(mine.read_text())
    assert list(added["cells"]) == ["rope", "alibi", "mine"] and added["added"] == "mine"
    assert {label: added["cells"][label] for label in found} == found
    assert json.loads(results.read_text()) == first
    assert added["command"] == "python reproduce.py matrix --scale cpu --add mine"
    assert "left out" not in run("--add", "mine")[0]


def test_what_a_committed_row_is_compared_by(copy, here, monkeypatch):
    """Another commit is no other definition, another metric, text or task's code is."""
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope", "alibi"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    run()
    results, mine = copy / "results" / "matrix.cpu.json", copy / "out" / "matrix.cpu" / "mine.json"
    first = json.loads(results.read_text())
    found = first["cells"]
    for r in first["runs"]:
        r["environment"] = r["environment"] | dict(commit="0000000", python="3.99")
    results.write_text(json.dumps(first))
    assert "left out" not in run("--add", "mine")[0]
    for r in first["runs"]:
        if r["task"] == "text":
            r["definition"]["text"] = "other"
        elif r["label"] == "rope":
            r["definition"]["metric"] = "other"
    results.write_text(json.dumps(first))
    out, _ = run("--add", "mine")
    assert "left out: the committed row rope, of another definition" in out
    assert "flipflop's metric has changed" in out and "is that of Python 3.99" in out
    assert "make what is missing with: python reproduce.py matrix --scale cpu --missing" in out
    shown = json.loads(mine.read_text())["cells"]
    assert list(shown) == ["alibi", "mine"]
    assert shown["alibi"]["text: perplexity"] == dict(reason="another text")
    assert shown["alibi"]["flip-flop: iid"] == found["alibi"]["flip-flop: iid"]
    assert list(plot.far_runs(mine)[0]) == ["mine"]  # nor is another text's curve drawn
    assert "the committed rows are of commits 0000000\n" in out
    # which makes no others, wherever the runs may be
    shutil.rmtree(copy / "out")
    out, _ = run("--missing")
    assert re.findall(r"\$ python train.py --data (\w+) .* --model (\w+)", out) == [
        ("notes", "rope"), ("flipflop", "rope"), ("notes", "alibi")]
    filled = json.loads(results.read_text())
    assert filled["cells"] == found and [r["label"] for r in filled["runs"]] == [
        "rope", "rope", "alibi", "alibi"]
    assert "$ python train.py" not in run("--missing")[0]
    # a row that is missing gets as many seeds as the others have
    run("--seeds", 2)
    more = json.loads(results.read_text())
    more["runs"] = [r for r in more["runs"] if r["label"] == "rope"]
    results.write_text(json.dumps(more))
    out, _ = run("--missing")
    assert "4 of 4 runs in " in out and len(json.loads(results.read_text())["runs"]) == 8
    assert json.loads(results.read_text())["command"].endswith(" --seeds 2")
    run()
    # a task's code that has changed is another task: its runs are made anew, no others
    code = matrix.code
    monkeypatch.setattr(matrix, "code", lambda *objects: code(*objects) if getattr(
        objects[0], "__name__", "") != "data.flipflop" else "other")
    out, _ = run()
    assert re.findall(r"\$ python train.py --data (\w+)", out) == ["flipflop"] * 2
    # a metric's is read anew from the same runs
    monkeypatch.setitem(matrix.METRICS, "text", (plot.draw,))
    out, _ = run()
    assert "$ python train.py" not in out and out.count("$ python eval.py") == 2
    assert "$ python eval.py" not in run()[0]


def test_an_added_row_is_of_the_method_as_it_is_now(copy, here):
    """An edit trains anew, a comment does not; what its name means goes before a task's flags."""
    def edit(*pairs):
        source = fork.read_text()
        for old, new in pairs:
            assert old in source
            source = source.replace(old, new, 1)
        fork.write_text(source)
        runs.models.cache_clear()
        del sys.modules["model_mine"]
        linecache.checkcache()
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope", text="--norm pre --qk_norm"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu", "--add")
    assert run("mine")[0].count("$ python train.py") == 2
    fork = copy / "model_mine.py"
    edit(("import math\n", "import math  # for pi\n"))
    assert "$ python train.py" not in run("mine")[0]
    edit(('{"relu": F.relu, "softplus": F.softplus}[config.step]', "torch.sigmoid"))
    assert run("mine")[0].count("$ python train.py") == 2
    edit(("mine=dict()", "mine=dict(norm='post', qk_norm=False)"))
    out, _ = run("mine")
    assert out.count("$ python train.py") == 2
    assert out.count("--model mine --norm post --no-qk_norm") == 2
    one, = (r for r in json.loads((copy / "out/matrix.cpu/mine.json").read_text())["runs"]
            if r["task"] == "text")
    assert one["config"]["norm"] == "post" and one["config"]["qk_norm"] is False
    part = copy / "model_part.py"  # an edit of what it builds on is one, too
    part.write_text("from model_fox import GPT, GPTConfig\n")
    edit(("import math  # for pi\n", "import math\n\nimport model_part\n"))
    assert run("mine")[0].count("$ python train.py") == 2
    models = runs.models()
    within = runs.with_imported(models["mine"][0])
    assert within == [models[name][0] for name in ("mine", "part", "fox")]
    within = runs.with_imported(models["cope_rope"][0])
    assert within[1:] == [models[name][0] for name in ("rope", "cope")]
    part.write_text("from model_fox import GPT, GPTConfig\nEDITED = True\n")
    del sys.modules["model_part"]
    edit()
    assert run("mine")[0].count("$ python train.py") == 2
    assert "$ python train.py" not in run("mine")[0]


def test_an_edit_while_a_row_is_made(copy, here, monkeypatch):
    """What the edited file trains or scores is made anew, even where the edit was undone."""
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu", "--add",
                            "mine")
    fork, plain = copy / "model_mine.py", reproduce.Board.run
    source, trained, said = fork.read_text(), r"\$ python train.py --data (\w+)", []
    edited, meanwhile = source.replace("F.gelu(", "F.relu("), "imports, was edited meanwhile"

    def edits(script, undone):
        """That script runs the edited file; with `undone` nobody sees it on disk afterwards."""
        def run(board, name, *words):
            mine, _ = runs.models()["mine"]
            with pytest.MonkeyPatch.context() as now:
                if words[1] == script:
                    now.setattr(mine, "source", edited)
                plain(board, name, *words)
            if words[1] == script and not undone:
                fork.write_text(edited)
        return run
    for script, undone in itertools.product(("train.py", "eval.py"), (False, True)):
        with monkeypatch.context() as patch:
            patch.setattr(reproduce.Board, "run", edits(script, undone))
            out, err = run(code=1)
        assert meanwhile in err and re.findall(trained, out) == ["notes", "flipflop"][:1 + undone]
        assert not list(copy.glob("out/matrix.cpu/mine-*/*/*/eval.json"))
        fork.write_text(source + "\n# a remark is no edit\n")
        out, _ = run()
        said.append(re.findall(trained, out))
        assert "$ python train.py" not in run()[0] and "$ python eval.py" not in run()[0]
        shutil.rmtree(copy / "out" / "matrix.cpu")
    assert said == [["notes", "flipflop"], ["notes", "flipflop"], ["flipflop"], []]
    # edited before it began; half saved, so that the evaluation fails

    def breaks(board, name, *words):
        fork.write_text(source + "def (")
        raise RuntimeError(f"{shlex.join(words)} exited with 1:\nSyntaxError")
    monkeypatch.setattr(reproduce.Board, "run", breaks)
    assert meanwhile in run(code=1)[1]
    fork.write_text(edited)  # nothing is begun
    out, err = run(code=1)
    assert meanwhile in err and "$ python" not in out


def test_an_added_row_that_cannot_be_scored_on_one_task(copy, here, monkeypatch):
    """Its cells of that task say so; the next command tries again."""
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    run()
    plain = reproduce.Board.run

    def fails(board, name, *words):
        if words[1] == "eval.py" and "/text-" in words[2]:
            raise RuntimeError(f"{shlex.join(words)} exited with {end}")
        plain(board, name, *words)
    with monkeypatch.context() as patch:
        patch.setattr(reproduce.Board, "run", fails)
        end = "1:\nA\nIndexError: too far"
        out, _ = run("--add", "mine")
        shown = json.loads((copy / "out" / "matrix.cpu" / "mine.json").read_text())["cells"]
        assert shown["mine"]["text: perplexity"] == dict(reason="failed") and "unlike" not in out
        assert "value" in shown["mine"]["flip-flop: iid"] and "IndexError: too far\n" in out
        assert "value" in shown["rope"]["text: perplexity"]
        for end in "-9:\nA", "1:\nerror: disk full":  # the machine's doing, not the method's
            assert f"exited with {end}\n" in run("--add", "mine", code=1)[1]
        shutil.rmtree(copy / "out")
        end = "1:\nIndexError: too far"  # of a row of the matrix itself: a mistake of ours
        assert "IndexError: too far" in run(code=1)[1]
    run("--add", "mine")
    shown = json.loads((copy / "out" / "matrix.cpu" / "mine.json").read_text())["cells"]
    assert all("value" in cell for cell in shown["mine"].values())


def test_logits_that_are_not_finite_are_no_answers(copy, here):
    """The largest of NaN would be one; -inf is a token that never comes."""
    write_notes(copy)
    write_fork(copy, "cable", ("logits = self.lm_head(self.ln_f(x))",
                               "logits = self.lm_head(self.ln_f(x)) / (T < 20)"))
    for name, what in (("never", "/ self.training"), ("masked", "+ masked[:V]")):
        source = (copy / "model_mine.py").read_text().replace("/ (T < 20)", what)
        source = source.replace("mine=dict()", f"{name}=dict()").replace(
            "        logits =", "        V = self.config.vocab_size\n        masked = torch.zeros("
            "999)\n        masked[0] = -math.inf if V < 99 else 0\n        logits =")
        (copy / f"model_{name}.py").write_text(source)
    here(matrix=small_matrix("rope"))
    cells = {}
    for name in ("mine", "never", "masked"):
        command(copy, "reproduce.py", "matrix", "--device", "cpu", "--add", name)
        found = json.loads((copy / "out" / "matrix.cpu" / f"{name}.json").read_text())
        cells[name] = found["cells"][name]
    not_finite = dict(reason="not finite")
    mine = cells["mine"]
    assert mine["flip-flop: worst"] == mine["text: strided"] == not_finite
    assert "value" in mine["flip-flop: iid"] and "value" in mine["text: perplexity"]
    assert set(map(json.dumps, cells["never"].values())) == {json.dumps(not_finite)}
    assert "value" in cells["masked"]["flip-flop: worst"]


def test_what_cannot_be_added_to_a_matrix(copy, here):
    write_notes(copy)
    for name, fields in (("two words", {}), ("../out2", {}), ("matrix", {}),
                         ("short", dict(block_size=8)), ("wide", dict(n_embd=32))):
        file = copy / f"model_a{len(list(copy.glob('model_a*')))}.py"
        write_fork(copy)
        source = (copy / "model_mine.py").read_text()
        file.write_text(source.replace("dict(mine=dict())", f"{ {name: fields}!r}"))
    (copy / "model_mine.py").unlink()
    here(matrix=small_matrix("rope", "alibi"))
    for name, says in (("rpoe", "unknown model 'rpoe': did you mean rope"),
                       ("rope", "rope is in matrix already: rope, alibi"),
                       ("two words", "'two words' is to be the name of a file, and cannot"),
                       ("../out2", "'../out2' is to be the name of a file, and cannot"),
                       ("matrix", "'matrix' is to be the name of a file, and cannot"),
                       ("short", "VARIANTS gives short a block_size: its texts would not be"),
                       ("bert_cable", "bert_cable is an encoder, and matrix is of causal models")):
        assert says in complaint(copy, "reproduce.py", "matrix", "--add", name)
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu", "--add")
    out, _ = run("nope")
    assert "the row stands alone" in out and "unlike" not in out
    command(copy, "reproduce.py", "matrix", "--device", "cpu")
    assert "unlike the others wide has n_embd=32\n" in run("wide")[0]
    assert "unlike" not in run("nope")[0]
    (copy / "results" / "matrix.cpu.json").write_text("{}")
    assert "is not what reproduce.py wrote: the row stands alone" in run("nope")[0]
    (copy / "results" / "matrix.cpu.json").write_text("{")
    assert "matrix.cpu.json is damaged: restore or remove it" in complaint(copy, "reproduce.py")
    for flag in ("--rows", "rope"), ("--missing",):
        assert f"{flag[0]} is not for --add" in complaint(
            copy, "reproduce.py", "matrix", "--add", "nope", *flag)
    (copy / "results" / "matrix.cpu.json").write_text('{"runs": [{"label": "rope"}]}')
    assert "matrix.cpu.json is damaged: restore or remove it" in complaint(
        copy, "reproduce.py", "matrix", "--missing")
    for flag in ("--rows", "rope"), ("--compile",), ("--dry_run",):
        assert f"{flag[0]} is not for --missing of matrix" in complaint(
            copy, "reproduce.py", "matrix", "--missing", *flag)
    here(texts=entry("--data notes", experiments.seeds(1, "rope"), eval=""))
    assert "is no matrix" in complaint(copy, "reproduce.py", "texts", "--add", "nope")


def test_a_row_that_diverges_or_ends_says_so(home, here):
    """The rest of the matrix stands."""
    one = small_matrix("learned", "rope")
    one["cpu"]["rows"]["wild"] = "--model rope --learning_rate 1e30 --grad_clip 0", 1
    here(matrix=one)
    out, _ = command(home, "reproduce.py", "matrix", "--device", "cpu")
    found = json.loads((home / "results" / "matrix.cpu.json").read_text())["cells"]
    assert set(map(json.dumps, found["wild"].values())) == {'{"reason": "diverged"}'}
    assert found["learned"]["text: strided"] == dict(reason="ends")
    assert found["learned"]["text: perplexity"]["value"] > 1
    assert all("value" in cell for cell in found["rope"].values())
    page = (home / "results" / "README.md").read_text()
    wild = next(line for line in page.splitlines() if line.startswith("| wild |"))
    assert cells(wild)[1:] == ["diverged"] * 4
    with standing_in(home):
        assert matrix.older(json.loads((home / "results" / "matrix.cpu.json").read_text()), one,
                            one["cpu"]) == ""
    # a failure of another kind is one of the whole
    del one["cpu"]["rows"]["wild"]
    one["cpu"]["rows"]["wrong"] = "--model rope --n_embd 15", 1
    _, err = command(home, "reproduce.py", "matrix", "--device", "cpu", code=1)
    assert "n_embd=15 is not divisible" in err and "the same command continues" in err


def test_a_fork_that_diverges_stands_beside_the_others(copy, here):
    write_notes(copy)
    write_fork(copy, "cable", ("bias = -g", "bias = math.nan * g"))
    here(matrix=small_matrix("rope"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    run()
    run("--add", "mine")
    committed, added = (json.loads((copy / folder).read_text())["cells"] for folder in (
        "results/matrix.cpu.json", "out/matrix.cpu/mine.json"))
    assert added.keys() == {"rope", "mine"} and added["rope"] == committed["rope"]
    assert set(map(json.dumps, added["mine"].values())) == {'{"reason": "diverged"}'}


def test_what_a_cells_definition_is(monkeypatch):
    """Its task's code, its metric's and its text; not comments, docstrings or the commit."""
    task = dict(train="--data flipflop", eval="--sequences 500")
    first = matrix.definition(task, MATRIX_COLUMNS, "a")
    assert matrix.definition(task, MATRIX_COLUMNS, "a") == first
    assert matrix.definition(task, MATRIX_COLUMNS, "b") == first | dict(text="b")
    other = task | dict(train="--data dyck")
    assert matrix.definition(other, MATRIX_COLUMNS, "a")["task"] != first["task"]
    fewer = dict(list(MATRIX_COLUMNS.items())[:3])
    for changed in (matrix.definition(task, fewer, "a"), matrix.definition(
            task | dict(eval="--sequences 5"), MATRIX_COLUMNS, "a")):
        assert changed["metric"] != first["metric"] and changed["task"] == first["task"]

    def tvd(logits, target):
        return 0
    with monkeypatch.context() as patch:
        patch.setitem(matrix.METRICS, "symbols", (tvd,))
        changed = matrix.definition(task, MATRIX_COLUMNS, "a")
    assert changed["metric"] != first["metric"] and changed["task"] == first["task"]
    # of a file: what runs, and nothing else
    body = 'def f(x):\n    return "#" + x\n'
    said = body.replace("    ret", '    """Others."""\n    ret')
    sources = [f'"""Words."""\nX = 1  # more\n\n\n{said}', f"X = 1\n\n# a note\n{body}",
               f"X = 2\n\n# a note\n{body}"]
    hashes = []
    for source in sources:
        monkeypatch.setattr(matrix.inspect, "getsource", lambda _, source=source: source)
        hashes.append(matrix.code.__wrapped__(None))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_matrix_of_another_definition_says_where():
    entry = matrix.ENTRIES["matrix"]
    for where, value, says in (
            ((), None, ""), (("config", "learning_rate"), 1.0, "its row 'nope': text has"),
            (("config", "weight_decay"), 0.0, "text has weight_decay=0.0, the entry says 0.1"),
            (("definition", "task"), "other", "the code of text's task has changed"),
            (("definition", "metric"), "other", "the code of text's metric has changed"),
            (("values",), dict(other=1.0), "its row 'nope': it has other columns of text"),
            (("label",), "mine", "it has no 'nope' on text"),
            (("task",), "other", "it has no 'nope' on text")):
        result = json.loads((ROOT / "results" / "matrix.cpu.json").read_text())
        one = result["runs"][0]
        for key in where[:-1]:
            one = one[key]
        if where:
            one[where[-1]] = value
        found = matrix.older(result, entry, entry["cpu"])
        assert says in found if says else not found


def test_the_columns_of_the_matrix_by_hand():
    scores = {T: {split: dict(exact_match=dict(value=v), sequence_error=dict(value=v / 2))
                  for split, v in values.items()}
              for T, values in (("4", dict(iid=1.0, sparse=0.5)), ("8", dict(iid=0.8, sparse=0.2)))}
    run = dict(block_size=4, perplexity={"4": 3.0, "8": 6.0}, strided={"4": 2.0, "8": 1.5},
               scores=scores, auc={"4": {"long": [0, 0, 0, 0, None, 0.5, 0.7]}})
    assert matrix.perplexity(run, 2) == 6 and matrix.perplexity(run, 4) is None
    assert matrix.reading(run, 2) == 0.75 and matrix.reading(run, 4) is None
    assert matrix.percent(run, 1, "sparse", "exact_match") == 50
    assert matrix.percent(run, 1, "sparse", "sequence_error") == 75
    assert matrix.percent(run, 1, "dense", "exact_match") is None
    assert matrix.worst(run, 2, "exact_match") == 20 and matrix.worst(run, 4, "exact_match") is None
    assert matrix.beyond(run, "auc", "long") == pytest.approx(0.6)
    assert matrix.beyond(run, "tvd", "long") is None
    # who is not done: 1 % of perplexity over the last fifth; seeds have a mean and a spread
    assert trainings.fell([[400, 3.0], [800, 2.0], [1000, 1.5]], 1000) == 0.5
    assert trainings.fell([[1000, 1.5]], 1000) is None
    two = [dict(values=dict(a=1.0), fell=0.009), dict(values=dict(a=2.0), fell=0.011)]
    assert matrix.cell("a", two) == dict(value=1.5, unfinished=True, spread=pytest.approx(0.5**0.5))
    assert matrix.cell("a", two[:1]) == dict(value=1.0, unfinished=False)
    assert matrix.cell("a", []) == dict(reason="not run")
    for value, why in ((math.nan, "not finite"), (math.inf, "not finite"), (None, "ends")):
        one = dict(values=dict(a=value), fell=0.0)
        assert matrix.cell("a", [*two, one]) == dict(reason=why)
    # every column reads what its task has, and every task has its column
    for scale in (matrix.TASKS, matrix.PAPER_TASKS):
        assert {c["task"] for c in matrix.COLUMNS.values()} == set(scale)


def test_surviving_beside_reading(monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    config = dict(block_size=16)
    runs_ = []
    for label, ys, rates in (("one", (4.0, 3.0), (1.0, 0.5)), ("two", (2.0, 8.0), (0.25, 0.0))):
        runs_.append(dict(label=label, config=config, strided=dict(zip(("16", "32"), ys))))
        far = {str(d): [30, rate] for d, rate in zip((1, 2), rates)} | {"4": [29, 0.9]}
        runs_.append(dict(label=label, config=config,
                          by_distance={"16": {"iid": {"1": [9, 0.7]}}, "128": {"iid": far}}))
    runs_.append(dict(label="wild", diverged="loss is nan", config=config))
    runs_.append(dict(label="ends", config=config, by_distance={"16": {"iid": {"1": [99, 0.5]}}}))
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps(dict(runs=runs_, added="two")))
    survived, far, trained, added = plot.far_runs(path)
    assert trained == 16 and survived["one"][0] == [16, 32] and far["two"] == ([1, 2], [[25, 0]])
    assert far["ends (strings of 16)"] == ([1], [[50]])
    assert [list(ys) for _, (ys,) in survived.values()] == [[1, 0.75], [1, 4]]
    monkeypatch.setattr(sys, "stdout", written())
    plot.main(["reading", str(path)])
    assert {"one", "two"} <= set(labels_of(figures[-1])) and added == "two"
    for ax in figures[-1].axes:
        lines = [line for line in ax.lines if len(line.get_xdata()) > 1]
        assert [line.get_linewidth() > 2 for line in lines if line.get_color() == "teal"] == [False]
    assert [name for name, look in plot.looks(survived, "two").items() if look["lw"] > 2] == ["two"]
    assert not any(look["lw"] > 2 for look in plot.looks(survived, "").values())


def test_the_heat_map_has_the_cells_of_the_json(monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    columns = {"a: less": dict(task="a", better="less", form=".2f", logarithmic=True, least=0.1),
               "a: more": dict(task="a", better="more", form=".1f", logarithmic=False, least=10),
               "a: near": dict(task="a", better="more", form=".1f", logarithmic=False, least=10),
               "b: lone": dict(task="b", better="more", form=".1f", logarithmic=False, least=10)}

    def numbers(less, more, near, unfinished=False):
        return {"a: less": dict(value=less, unfinished=unfinished),
                "a: more": dict(value=more, unfinished=unfinished),
                "a: near": dict(value=near, unfinished=False), "b: lone": dict(reason="not run")}
    found = dict(one=numbers(4.0, 100.0, 95.0), two=numbers(8.0, 50.0, 99.0, True),
                 mine=numbers(2.0, 0.0, 100.0))
    found["three"] = numbers(0.0, 12345.6, 100.0) | {"a: less": dict(reason="diverged")}
    found["three"]["b: lone"] = dict(value=7.0, unfinished=False, spread=0.25)
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps(dict(columns=columns, cells=found, added="mine")))
    monkeypatch.setattr(sys, "stdout", written())
    plot.main(["matrix", str(path)])
    ax = figures[-1].axes[0]
    said = {}
    for text in ax.texts:
        x, y = text.get_position()
        said[x, y] = text.get_text()
    want = {(0, 0): "4.00", (0, 1): "8.00", (0, 2): "2.00", (0, 3): "diverged",
            (1, 0): "100", (1, 1): "50", (1, 2): "0", (1, 3): "12,346",
            (3, 3): "7", (3, 3.33): "± 0.2"}
    assert want.items() <= said.items()
    boxes = {(p.get_x() + 0.48, p.get_y() + 0.46): p for p in ax.patches if p.get_width() < 1}
    colors = {tuple(map(round, at)): p.get_facecolor() for at, p in boxes.items()}
    best, worst = plot.WORST_TO_BEST(1.0), plot.WORST_TO_BEST(0.0)
    assert colors[0, 2] == best and colors[0, 1] == worst and colors[1, 3] == best
    assert colors[1, 2] == worst
    # by the logarithm 4 is halfway from 8 to 2; so is 95 from 90 to 100, and what stands alone
    for at in ((0, 0), (2, 0), (3, 3)):
        assert colors[at] == plot.WORST_TO_BEST(0.5)
    assert colors[2, 2] == colors[2, 3] == best
    hatched = {tuple(map(round, at)) for at, p in boxes.items() if p.get_hatch()}
    assert hatched == {(0, 1), (1, 1)}
    bold = [t.get_text() for t in ax.get_yticklabels() if t.get_weight() == "bold"]
    assert bold == ["mine"]
    rows = plot.cells(path)[1]
    assert [t.get_text() for t in ax.get_yticklabels()] == list(rows)
    # what more is better of: said of a task where it is so of all its columns
    assert [t.get_text() for t in ax.get_xticklabels()] == ["less ↓", "more", "near", "lone"]
    assert {"a", "b"} < set(said.values())
    columns["a: less"]["better"] = "more"
    for name in columns:
        columns[name]["percent"] = True
    columns["b: lone"] |= dict(percent=False, better="less")
    columns["b: other"] = columns["b: lone"]
    for row in found.values():
        row["b: other"] = row["b: lone"]
    path.write_text(json.dumps(dict(columns=columns, cells=found)))
    plot.main(["matrix", str(path)])
    ax = figures[-1].axes[0]
    assert {"a, % right", "b, less is better"} < {text.get_text() for text in ax.texts}
    assert [t.get_text() for t in ax.get_xticklabels()] == ["less", "more", "near", "lone", "other"]


# -----------------------------------------------------------------------------
# reproduce.py: random searches

def searches():
    """The papers' random searches, of two steps."""
    postnorm = importlib.import_module("experiments.postnorm")
    found = dict(postnorm.SEARCHES)
    panels = dict(
        postnorm_fig1=postnorm.set_panels(4, (6, 2)) | postnorm.exact_panels(4, (8, 2)),
        postnorm_theorem=postnorm.exact_panels(4, (8, 2)),
        postnorm_bema=postnorm.set_panels(4, (6, 2)),
        postnorm_fig3=postnorm.dyck_panels(4, (2, 2, 4)),
        postnorm_fig7=postnorm.dyck_panels(4, (2, 2, 4)),
        postnorm_fig4=postnorm.tomita_panels(4, 4, 12),
        postnorm_fig2={"small": dict(data="max_retrieval", batch_size=4, longest=32, at=(32, 32))})
    assert panels.keys() == found.keys()
    for name, small in panels.items():
        found[name] = found[name] | dict(cpu=dict(trials=2, steps=2, panels=small))
        if name in ("postnorm_fig3", "postnorm_fig7", "postnorm_fig4"):
            found[name]["schemes"] = "pre", "peri"
        if "also" in found[name]:
            found[name]["also"] = dict(theorem=functools.partial(minimal.theorem, 8, 10.0, 4))
    return found


def test_a_random_search_from_one_command(home, here):
    """Trials in the JSON with their settings, the table, the picture; nothing is made twice."""
    here(**searches())
    words = "reproduce.py", "postnorm_fig1", "--trials", 2, "--device", "cpu"
    out, _ = command(home, *words)
    assert out.count("$ python -m experiments.minimal") == 12
    assert re.search(r"done, .* left\] n-6-trained-on-2-pre: iter 2/2 \| median loss \S+ \|", out)
    result = json.loads((home / "results" / "postnorm_fig1.cpu.json").read_text())
    names = [panel["name"] for panel in result["panels"]]
    assert names == ["n = 6, trained on 2", "n = 8, trained on 2, p* itself"]
    for panel in result["panels"]:
        assert list(panel["schemes"]) == list(minimal.SCHEMES)
        assert panel["lengths"][-1] == [panel["n"] - 1] * 2
        for found in panel["schemes"].values():
            drawn_ = [minimal.draw_trial(rng([1337, i]), 3e-2) for i in range(2)]
            assert [t["hyperparameters"] for t in found["trials"]] == drawn_
            for t in found["trials"]:
                raw, middle = t["tvd"]["raw"], panel["n"] // 2 - 1
                assert t["finite"] and len(raw["by_length"]) == panel["n"] - 1
                assert raw["test"] == pytest.approx(raw["by_length"][middle], abs=1e-5)
    page = (home / "results" / "README.md").read_text()
    ys = [t["tvd"]["bema"]["test"] for t in result["panels"][0]["schemes"]["peri"]["trials"]]
    table = page.partition("TVD, n = 6, trained on 2, at 3:")[2].partition("\n\nTVD, ")[0]
    row, = re.findall(r"\| peri \| 2 \| 0 \|.*", table)
    assert f"| {np.median(ys):.4f} |" in row and is_png(home / "results" / "postnorm_fig1.cpu.png")
    out, _ = command(home, *words[:2], "--trials", 1, "--device", "cpu")  # two are there
    assert "experiments.minimal" not in out
    path = next((home / "out" / "postnorm_fig1.cpu").glob("*.json"))
    path.write_text('{"half')
    out, _ = command(home, *words)
    assert out.count("$ python -m experiments.minimal") == 1


@pytest.mark.parametrize("entry_, metric", [
    ("fig2", "accuracy"), ("fig3", "tvd"), ("fig4", "auc"), ("theorem", "precision"),
    ("bema", "tvd")])
def test_every_random_search_is_made_drawn_and_put_in_a_table(entry_, metric, home, here):
    here(**searches())
    words = "reproduce.py", f"postnorm_{entry_}", "--device", "cpu"
    out, _ = command(home, *words, draw=entry_ in ("fig3", "theorem"))
    assert "iter 2/2" in out and is_png(home / "results" / f"postnorm_{entry_}.cpu.png")
    result = json.loads((home / "results" / f"postnorm_{entry_}.cpu.json").read_text())
    assert result["metric"] == metric and result["trials"] == 2
    page = (home / "results" / "README.md").read_text()
    for panel in result["panels"]:
        for scheme, found in panel["schemes"].items():
            assert f"| {scheme} | 2 |" in page
            kinds = ["raw", "ema", "bema"] if entry_ == "bema" else ["raw", "bema"]
            assert all(list(t[metric]) == kinds for t in found["trials"])
    assert ("largest difference from the formula" in page) == (entry_ == "theorem")
    if entry_ == "fig3":  # whose trials are those of fig7
        out, _ = command(home, "reproduce.py", "postnorm_fig7", "--device", "cpu")
        assert "experiments.minimal" not in out and "\nAUC, k = 2, m = 2, " in out


def test_a_random_search_by_hand(home):
    """One panel and scheme, as reproduce.py calls it."""
    panel = dict(data="dyck", k=1, m=2, block_size=4, batch_size=4, longest=8, at=[5, 8])
    panel = json.dumps(panel)
    words = "experiments.minimal", "--panel", panel, "--scheme", "peri", "--steps", 2, "--trials", 1
    out, _ = command(home, *words, "--out", "a.json")
    assert re.search(r"^iter 2/2 \| median loss \d", out, re.M)
    found = json.loads((home / "a.json").read_text())
    assert found["lengths"][-1] == [8, 8] and len(found["trials"]) == 1
    assert found["settings"]["panel"] == json.loads(panel)
    assert command(home, *words, "--out", "a.json")[0] == ""  # it is there
    said = complaint(home, "experiments.minimal", "--panel", "{", "--scheme", "peri")
    assert "argument --panel" in said


def test_a_diverged_trial_is_counted_and_left_out():
    """In the JSON as null, in the table as a dash or a number of the others."""
    def trial(test, validation, finite=True):
        scores = dict(test=test, validation=validation, by_length=[test])
        return dict(finite=finite, tvd=dict(raw=scores, bema=scores))
    panels = [dict(name="a panel", at=[3, 3], schemes=dict(
        pre=dict(trials=[trial(0.5, 0.1), trial(0.2, 0.3), trial(None, None, False)]),
        post=dict(trials=[trial(None, None, False)]), peri=dict(trials=[trial(0.25, 0.1)])))]
    table = tables.search_table(dict(metric="tvd", panels=panels)).splitlines()
    assert table[0] == "TVD, a panel, at 3:"
    assert table[4].startswith("| pre | 3 | 1 | 0.3500 | 0.5000 |")
    assert table[5] == "| post | 1 | 1 | - | - | - | - | 0 of 0, p = 1 | - |"
    assert table[6].endswith("| 0.2500 | 0.2500 | 0.2500 | 0.2500 | 1 of 1, p = 1 | 0.50 |")


def test_the_paired_sign_test():
    """Against the tail of a fair coin counted one by one, and by hand."""
    for n in range(9):
        flips = list(itertools.product((0, 1), repeat=n))
        for wins in range(n + 1):
            uneven = [abs(sum(one) - n / 2) >= abs(wins - n / 2) for one in flips]
            pairs = [(0.0, 1.0)] * wins + [(1.0, 0.0)] * (n - wins)
            found = tables.sign_test(pairs + [(3.0, 3.0), (None, 1.0), (1.0, None)])
            assert found == (wins, n, pytest.approx(np.mean(uneven)))
    assert tables.sign_test([(1, 2)] * 8)[2] == 2 / 256  # 8 of 8
    assert tables.sign_test([(1, 2)] * 6 + [(2, 1)] * 2)[2] == pytest.approx(74 / 256)  # 6 of 8

    def trials(*values):
        return [dict(finite=True, auc=dict(raw=dict(test=y, validation=y, by_length=[y]),
                                           bema=dict(test=y, validation=y, by_length=[y])))
                for y in values]
    schemes = dict(pre=dict(trials=trials(0.5, 0.6, 0.7, 0.9, 0.4)),
                   peri=dict(trials=trials(0.6, 0.7, 0.8, 0.8, 0.4)))  # more is better: 3 of 4
    text = tables.search_table(dict(metric="auc", panels=[
        dict(name="a panel", at=[3, 3], schemes=schemes)]))
    assert text.splitlines()[4].endswith("| - |") and "better than pre |" in text
    assert text.splitlines()[5].endswith("| 3 of 4, p = 0.62 |") and "not corrected" in text
    schemes["pre_final"] = dict(trials=trials(0.5, 0.6, 0.9, 0.8, 0.4))  # a control of its own
    text = tables.search_table(dict(metric="auc", panels=[
        dict(name="a panel", at=[3, 3], schemes=schemes)]))
    assert text.splitlines()[4].endswith("| - | 1 of 2, p = 1 |")
    assert text.splitlines()[5].endswith("| 3 of 4, p = 0.62 | 2 of 3, p = 1 |")
    assert text.splitlines()[6].endswith("| 1 of 2, p = 1 | - |")
    for trial, ema in zip(schemes["pre"]["trials"], (0.6, 0.7, 0.6, None, 0.4)):  # of one alone
        trial["auc"]["ema"] = dict(test=ema, validation=ema, by_length=[ema])
    one = dict(metric="auc", panels=[dict(name="a panel", at=[3, 3], schemes=schemes)])
    assert tables.search_table(one) == text
    del schemes["peri"], schemes["pre_final"]
    head, _, row = tables.search_table(one).splitlines()[2:5]
    assert head.endswith("| median, EMA | best, EMA | median, BEMA | best, BEMA | better than pre "
                         "| EMA better than without | BEMA better than without |")
    assert row.endswith("| - | 2 of 3, p = 1 | 0 of 0, p = 1 |")


# -----------------------------------------------------------------------------
# reproduce.py: what it would do

def without_running(home, name, *words, code=0):
    """A dry run -> stdout, stderr; nothing may be written."""
    before = sorted(home.rglob("*"))
    said = command(home, "reproduce.py", name, "--dry_run", *words, code=code)
    assert sorted(home.rglob("*")) == before
    return said


def test_a_dry_run_has_the_commands_that_a_run_has_and_what_they_cost(home, here):
    rows = experiments.seeds(2, "cable") | experiments.seeds(1, "cope", flags="--n_embd 32")
    here(flips=entry("--data flipflop", rows, eval="--sequences 20", published={}, note="Small",
                     columns=[("in", "iid", "exact_match")]))
    said, _ = without_running(home, "flips", "--device", "cpu")
    assert said.startswith("A table. Here: Small\n")
    done, _ = command(home, "reproduce.py", "flips", "--device", "cpu")
    planned, run = (re.findall(r"^\$ python (?:train|eval).*", out, re.M) for out in (said, done))
    assert planned == run and len(run) == 6 and "2 runs\n" in said and "3 runs," in said
    assert "On the CPU not measured: 3 runs" in said
    # by hand: 6 N a token, and attention over 8 keys on average; 1 layer, 16 tokens, 2 steps of 4
    model = runs.make_model(dict(model="cable", block_size=16, vocab_size=5, n_layer=1, n_head=2,
                                 n_embd=16))
    N = sum(p.numel() for p in model.parameters())
    flops = 2 * 4 * 16 * (6 * N + 6 * 16 * 16)
    assert f"cable: {N:,} parameters, 2 steps, {flops:.1e} FLOPs, " in said
    cost = dry_run.estimate(model, 16, 4, 2)
    assert cost.memory == 16 * N + 64 * (34 * 16 + 10 * 5) and cost.squares == 5 * 2 * 64 * 16
    assert cost.seconds == 2 * dry_run.LAYER_SECONDS
    many = dry_run.estimate(model, 16, 4 * 2**30, 2)
    assert many.seconds == pytest.approx(2**30 * flops / dry_run.THROUGHPUT)


@pytest.mark.parametrize("flags, says", [
    ("--n_embd 15", "n_embd=15 is not divisible by n_head=2"), ("--n_hed 2", "unknown argument"),
    ("--block_size 7", "must be even"), ("--dropout 2", "--dropout must be in"),
    ("--size papre", "unknown size 'papre': did you mean paper?")])
def test_a_dry_run_names_what_cannot_be_built(flags, says, home, here):
    rows = dict(right=("--model cable", 1), wrong=(f"--model rope {flags}", 2))
    here(mine=dict(about="A", cpu=dict(train="--data flipflop --n_head 2", eval="", rows=rows)))
    out, err = without_running(home, "mine", code=1)
    assert "right: " in out and re.search(f"^wrong cannot be built: .*{re.escape(says)}", out, re.M)
    line, = err.splitlines()
    assert line.startswith("error: wrong cannot be built; wrong: ") and says in line
    assert f"--model rope {flags} --seed 1337" in line
    # what eval.py would refuse at the end is found now, too
    scale = dict(train="--data flipflop", eval="--lengths 63", rows=experiments.seeds(1, "cable"))
    here(mine=dict(about="A", cpu=scale))
    assert "block_size=63 must be even" in without_running(home, "mine", code=1)[1]


def test_a_dry_run_of_a_text_needs_no_text_and_of_a_search_no_training(home, here):
    known = experiments.known()
    here(**{name: known[name] for name in ("cable_table1", "postnorm_fig2")})
    out, _ = without_running(home, "cable_table1", "--scale", "paper")
    assert re.search(r"^cable: 44\.7M parameters, 9,000 steps", out, re.M)
    out, _ = without_running(home, "postnorm_fig2", "--scale", "paper", "--trials", 3)
    assert out.count("$ python -m experiments.minimal") == 4 and "--trials 3" in out


def paper_rows():
    """(entry, row) of all tables of trainings, the same training once."""
    found, seen = [], set()
    for name, one in experiments.known().items():
        scales = trainings.by_task(one["paper"]) if "rows" in one.get("paper", {}) else {}
        for task, scale in scales.items():
            for label, (flags, _) in scale["rows"].items():
                key = flags, trainings.options(scale["train"].split())["data"]
                if key not in seen:
                    seen.add(key)
                    slow = [pytest.mark.slow] if task else []  # as many as all others
                    found.append(pytest.param(name, task, label, marks=slow))
    return found


@pytest.mark.parametrize("name, task, label", paper_rows(), ids=lambda x: x.replace(" ", "-"))
def test_every_row_of_the_papers_sizes_is_built_and_trains(name, task, label, home):
    """Whole without memory; two steps with its sizes divided."""
    scale = trainings.by_task(experiments.known()[name]["paper"])[task]
    flags = f"{scale['train']} {scale['rows'][label][0]}".split()
    cost = dry_run.of_training(flags, scale["eval"].split())
    assert cost.parameters > 1e4 and cost.memory + cost.squares < 80e9  # an H100
    c, *_ = train.fresh(flags)
    T = max(1, c.block_size // 16) + c.block_size % 2
    less = dict(n_embd=8 * c.n_head, n_layer=min(c.n_layer, 2), block_size=T, batch_size=2,
                max_iters=2, eval_interval=2, eval_iters=1, gradient_accumulation_steps=1)
    if data.find(c.data).kind == "text":
        less |= dict(data="notes", tokenizer="bytes")
    if data.find(c.data).for_encoders:
        less |= dict(corpus=str(write_package(home) / "library"), tokenizer="bytes")
        less |= dict(query_size=T) if "query_size" in c else {}
    if "max_ops" in c:
        less |= dict(max_ops=8, n_train=min(c.n_train, 20))
    flags += [word for k, v in less.items() for word in (f"--{k}", str(v))]
    command(home, "train.py", *flags, "--out_dir", "run", "--no-evaluate", "--device", "cpu")
    assert 2 in losses(home / "run")[0] or log_of(home / "run")[-1]["iter"] == 2


@pytest.mark.parametrize("name", [name for name, one in experiments.known().items()
                                  if "rows" in one.get("paper", {})])
def test_every_table_of_the_papers_sizes_is_built(name):
    """Every row, without memory; and fits into an H100."""
    args = argparse.Namespace(seeds=0, rows=None, device="auto", scale="paper", compile=False)
    one = experiments.known()[name]
    for label, (_, cost, _) in dry_run.plan(args, one, one["paper"], Path("out")).items():
        found = cost()
        assert found.parameters > 1e4 and found.memory + found.squares < 80e9, label


def test_a_compiled_table_begins_with_compiled_runs():
    """Of cable_fig5, whose folder it shares."""
    said, _ = command(ROOT, "reproduce.py", "cable_table2", "--compile", "--dry_run", "--rows",
                      "nope")
    first, second = (line for line in said.splitlines() if line.startswith("$ python train.py"))
    assert "--compile on" in first and "--compile on" in second and "--init_from" in second


@pytest.mark.slow
@pytest.mark.parametrize("name", ["postnorm_theorem", "postnorm_bema",
                                  *(f"postnorm_fig{n}" for n in range(1, 5))])
def test_every_search_of_the_papers_sizes_is_built_and_trains(name):
    one = experiments.known()[name]
    args = argparse.Namespace(trials=0, device="auto")
    commands = minimal.commands(args, one, one["paper"], Path("out"))
    for slug, (settings, trials, _) in commands.items():
        assert dry_run.of_search(settings, trials).memory < 80e9, slug
        panel = settings["panel"] | dict(batch_size=2)
        if "block_size" in panel:
            panel["block_size"] = max(1, panel["block_size"] // 16)
        longest = 2 * panel.get("block_size", 16)
        panel |= dict(longest=longest, at=[longest, longest])
        small = settings | dict(panel=panel, steps=2, sequences=2)
        found = minimal.search(small, 1)
        assert found["trials"][0]["finite"], slug


# -----------------------------------------------------------------------------
# results/ and README.md

def test_the_page_of_results_is_written_from_the_json():
    assert tables.page() == (ROOT / "results" / "README.md").read_text()


def test_committed_json_is_compact_and_says_where_it_is_from():
    """A run or trial a line; the command, hardware, versions and commit of every measurement."""
    for path in sorted((ROOT / "results").glob("*.json")):
        text = path.read_text()
        result = json.loads(text)
        deepest = max(len(line) - len(line.lstrip(" ")) for line in text.splitlines())
        assert deepest <= 8 and text.count("\n") < 1500, path.name
        assert result["command"].startswith("python "), path.name
        if path.name != "contrast.json":
            made = result["environment"]
            assert made["torch"] and made["commit"] != "unknown" and (made["cpu"] or made["gpu"])
        assert runs.in_lines(result) + "\n" == text, f"{path.name} is not as write_json has it"


PAGES = [ROOT / name for name in ("README.md", "GUIDE.md", "results/README.md",
                                  "results/findings.md")]


def test_every_picture_of_the_pages_is_there():
    for page in PAGES[:3]:
        found = re.findall(r"!\[[^]]*\]\((\S+?)\)", page.read_text())
        assert found
        for picture in found:
            assert is_png(page.parent / picture), picture


def test_every_link_and_every_entry_that_a_page_names_is_there():
    for page in PAGES:
        text = page.read_text()
        links = re.findall(r"\]\(([^)#\s]+)", text)
        assert links
        for link in links:
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)
        named = set(re.findall(r"reproduce\.py\s+([a-z]\w+)", text))
        assert named and named <= set(experiments.known()), page


def test_the_readmes_perplexities_are_those_of_its_run():
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"about (\d\.\d\d) in windows of 256 tokens and (\d\.\d\d) in windows", text)
    found = json.loads((ROOT / "results" / "cable_table1.cpu.json").read_text())["runs"][0]
    assert found["model"] == "cable" and found["seed"] == 1337
    assert said.groups() == tuple(f"{found['perplexity'][T]:.2f}" for T in ("256", "4096"))


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def markdown_tables(text):
    """Tables of a text -> [{first cell of a row: {heading: cell}}]"""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        head, _, *rows = block.strip().splitlines()
        table = {}
        for row in rows:
            first, *rest = cells(row)
            table[first] = dict(zip(cells(head)[1:], rest))
        found.append(table)
    return found


def test_the_numbers_of_the_front_page_are_those_of_the_json():
    """Every cell of README.md's table is in the table of one result, in its row and column."""
    text = (ROOT / "README.md").read_text()
    text = text.partition("<!-- results -->")[2].partition("<!-- /results -->")[0]
    ours, = markdown_tables(text)
    assert sum(map(len, ours.values())) >= 6
    matching = []
    for path in (ROOT / "results").glob("*.json"):
        result = json.loads(path.read_text())
        if "entry" in result:
            theirs, = markdown_tables(tables.table(result))[:1]
            rows = [ours[name].items() <= theirs.get(name, {}).items() for name in ours]
            matching += [path.name] if all(rows) else []
    assert len(matching) == 1, f"a number is from {matching or 'no'} result"


def test_the_commands_of_the_front_page_have_these_flags(trained):
    """Every script that README.md calls is there, and knows the flags that it is given."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"(?:python|torchrun --nproc_per_node \d+) (\w+\.py)([^\n`#]*)", text)
    assert len(found) > 8
    for script, words in found:
        words = shlex.split(words)
        kind = [word for word in words[:1] if script in ("plot.py", "maps.py")]
        known, _ = command(trained, script, *kind, "--help")
        for flag in words:
            assert not flag.startswith("--") or f"{flag} " in known, (script, flag)

