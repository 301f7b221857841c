"""
Every claim this repository makes, as a test: formulas against naive loops in float64, causality, caches, resuming,
the commands themselves, and what they say to bad input.    Run with: pytest
"""
import ast
import contextlib
import hashlib
import http.server
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
import data.counting
import data.dyck
import data.flipflop
import data.max_retrieval
import data.selective_copy
import data.set_complement
import data.text
import data.tomita
import eval as evaluation
import model_baseline
import model_cable
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
from model_baseline import attention
from model_cable import cable_attention
from model_cope import cope_attention, counting_attention, interpolate
from model_diff import diff_attention
from model_fox import fox_attention
from model_tra import tra_attention

try:
    import kernels
except ImportError:  # no Triton
    kernels = None

torch.set_num_threads(2)
ROOT = Path(__file__).resolve().parent
MODEL_FILES = sorted(ROOT.glob("model_*.py"))
MODELS = sorted(runs.models())
TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=61)
TINY_FLAGS = "--n_layer 2 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --eval_iters 2 --log_interval 1 --device cpu".split()


def make(name, **changes):
    """A small random model; the encodings that start at zero are moved, so that a test of them can fail."""
    torch.manual_seed(0)
    model = runs.make_model(runs.find_model(name)[1] | TINY | dict(model=name, n_label=200, P=7) | changes).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def random_qkv(B=2, H=3, Tq=37, Tk=37, d=5, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, T, d, generator=g, dtype=dtype) for T in (Tq, Tk, Tk)]


def naive(q, k, v, bias, causal=True):
    """softmax(q k / sqrt(d) + bias(b, h, i, j)) v, one query and one key at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    B, H, Tq, d = q.shape
    Tk, out = k.size(2), torch.zeros(B, H, Tq, v.size(3), dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for r in range(Tq):
                i = Tk - Tq + r
                keys = range(i + 1) if causal else range(Tk)
                logits = torch.stack([q[b, h, r] @ k[b, h, j] / math.sqrt(d) + bias(b, h, i, j) for j in keys])
                out[b, h, r] = sum(w * v[b, h, j] for w, j in zip(logits.softmax(0), keys))
    return out


def close(a, b, tol):
    diff = (a.double() - b.double()).abs().max().item()
    assert diff <= tol, f"largest difference {diff:.2e}, allowed {tol:.0e}"


# -----------------------------------------------------------------------------
# CABLE against its equations

def steps_and_weights(H=3, Tk=37, Tq=37, B=2, seed=1, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    a = F.relu(torch.randn(B, H, Tk, generator=g, dtype=torch.float64)) * scale
    return a.cumsum(-1), F.softplus(torch.randn(B, H, Tq, generator=g, dtype=torch.float64))


@pytest.mark.parametrize("Tq", [1, 6, 37])
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("log_kernel", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_cable_attention_is_equation_7(Tq, weight, log_kernel, causal):
    q, k, v = random_qkv(Tq=Tq)
    S, g = steps_and_weights(Tq=Tq)
    g = g if weight else None

    def bias(b, h, i, j):
        distance = (S[b, h, i] - S[b, h, j]).abs()
        distance = torch.log(1 + distance**2) if log_kernel else distance
        return -distance * (g[b, h, i - (37 - Tq)] if weight else 1)
    want = naive(q, k, v, bias, causal)
    close(cable_attention(q, k, v, S, g, log_kernel, causal), want, 1e-12)
    short = [x.float() for x in (q, k, v, S)]
    close(cable_attention(*short, None if g is None else g.float(), log_kernel, causal), want, 2e-5)


@pytest.mark.parametrize("kind", [dict(), dict(log_kernel=True), dict(causal=False)])
def test_cable_blocks_of_rows_equal_one_block(kind, monkeypatch):
    for Tq in (37, 20):
        q, k, v = random_qkv(Tq=Tq)
        S, g = steps_and_weights(Tq=Tq)
        want = cable_attention(q, k, v, S, g, **kind)
        for rows in (1, 7, 36):
            monkeypatch.setattr(model_cable, "ROWS", rows)
            close(cable_attention(q, k, v, S, g, **kind), want, 1e-12)
        monkeypatch.undo()


def test_cable_with_equal_steps_is_alibi():
    q, k, v = random_qkv()
    alibi = model_baseline.ALiBi(model_baseline.GPTConfig(n_head=3)).double()
    S, g = torch.arange(1, 38, dtype=torch.float64).expand(2, 3, 37), alibi.m[None, :, None].expand(2, 3, 37)
    close(cable_attention(q, k, v, S, g), attention(q, k, v, alibi.bias), 1e-12)


def test_cable_nw_with_softplus_steps_is_the_forgetting_transformer():
    q, k, v = random_qkv()
    z = torch.randn(2, 3, 37, dtype=torch.float64)
    f = torch.sigmoid(-z)  # the forget gate, with the gate's sign flipped
    want = naive(q, k, v, lambda b, h, i, j: f[b, h, j + 1:i + 1].prod().log())
    close(cable_attention(q, k, v, F.softplus(z).cumsum(-1)), want, 1e-12)


def test_cable_in_bfloat16_keeps_the_float32_difference():
    """S ~ 800 at the end: bfloat16 is 4 apart there. Only the float32 difference S_i - S_j gives the right attention."""
    q, k, v = random_qkv(B=1, H=2, Tq=4096, Tk=4096, d=16, dtype=torch.float32)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    S, g = steps_and_weights(B=1, H=2, Tk=4096, Tq=4096, scale=0.5)
    rows = slice(4000, 4096)
    logits = q[:, :, rows].double() @ k.double().transpose(-1, -2) / 4 - g[:, :, rows, None] * (S[:, :, rows, None] - S[:, :, None])
    logits = logits.masked_fill(torch.arange(4096) > torch.arange(4000, 4096)[:, None], float("-inf"))
    want = logits.softmax(-1) @ v.double()
    got = cable_attention(q, k, v, S.float(), g.float())[:, :, rows]
    assert got.dtype == torch.bfloat16
    close(got, want, 0.03)
    rounded = cable_attention(q, k, v, S.bfloat16().float(), g.float())[:, :, rows]
    assert (rounded.double() - want).abs().max() > 0.3  # so the bound above means something


@pytest.mark.parametrize("kind", [dict(), dict(log_kernel=True), dict(causal=False)])
@pytest.mark.parametrize("Tq", [5, 3])
def test_cable_gradients(kind, Tq):
    q, k, v = random_qkv(B=1, H=2, Tq=Tq, Tk=5, d=3)
    S, g = steps_and_weights(B=1, H=2, Tk=5, Tq=Tq)
    inputs = [x.requires_grad_() for x in (q, k, v, S + 0.1 * torch.arange(5), g)]  # apart: |S_i - S_j| has a corner at 0
    assert torch.autograd.gradcheck(lambda *x: cable_attention(*x, **kind), inputs)


def test_cable_steps_come_from_the_whole_width_and_are_summed_in_float32():
    model = make("cable")
    attn = model.h[0].attn
    x = torch.randn(2, 9, 32)
    seen = {}

    def spy(q, k, v, S, g, *rest):
        seen.update(S=S, g=g)
        return v
    original, model_cable.cable_attention = model_cable.cable_attention, spy
    try:
        attn(x, None)
    finally:
        model_cable.cable_attention = original
    a = torch.relu(x @ attn.w_c.weight.T + attn.w_c.bias)
    close(seen["S"], a.transpose(1, 2).cumsum(-1), 1e-6)
    close(seen["g"], F.softplus(x @ attn.w_s.weight.T + attn.w_s.bias).transpose(1, 2), 1e-6)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model_cable.cable_attention = spy
        try:
            attn(x, None)
        finally:
            model_cable.cable_attention = original
    assert seen["S"].dtype == seen["g"].dtype == torch.float32


def test_cable_starts_with_g_near_ln_2():
    torch.manual_seed(0)
    attn = model_cable.GPT(model_cable.GPTConfig()).h[0].attn
    assert torch.equal(attn.w_s.bias, torch.zeros(4)) and torch.equal(attn.w_c.bias, torch.zeros(4))
    assert 0.015 < attn.w_c.weight.std() < 0.025


def test_cable_both_directions_sees_the_future():
    model = make("cable", causal=False)
    idx = torch.randint(0, 61, (1, 20))
    other = idx.clone()
    other[0, -1] += 1
    assert (model(idx)[0][0, 0] - model(other % 61)[0][0, 0]).abs().max() > 1e-4
    with pytest.raises(ValueError, match="causal=False has no cache"):
        model(idx, cache=model_cable.Cache())


# -----------------------------------------------------------------------------
# CoPE, TRA, FoX and Diff against their equations

def naive_count(q, gate_keys, P, b, h, i, j, Tq):
    """CoPE Eq. 3 and 4: the gates from key j to query i, one by one."""
    row = q[b, h, i - (gate_keys.size(2) - Tq)]
    gates = [torch.sigmoid(row @ gate_keys[b, h, n] / math.sqrt(q.size(3))) for n in range(j, i + 1)]
    return min(sum(gates).item(), P - 1)


def naive_cope(q, k, v, e, gate_keys=None):
    gate_keys, Tq, Tk = k if gate_keys is None else gate_keys, q.size(2), k.size(2)

    def bias(b, h, i, j):
        p = naive_count(q, gate_keys, e.size(1), b, h, i, j, Tq)
        z = q[b, h, i - (Tk - Tq)] @ e
        return z[math.floor(p)] * (1 - p + math.floor(p)) + z[math.ceil(p)] * (p - math.floor(p))
    return naive(q, k, v, bias)


@pytest.mark.parametrize("Tq", [1, 6, 37])
@pytest.mark.parametrize("P", [1, 2, 5, 64])
@pytest.mark.parametrize("gates", ["key", "val", "sep"])
def test_cope_attention_is_equation_9(Tq, P, gates, monkeypatch):
    q, k, v = random_qkv(Tq=Tq)
    e = torch.randn(5, P, dtype=torch.float64)
    gate_keys = dict(key=None, val=v, sep=random_qkv(seed=3)[1])[gates]
    want = naive_cope(q, k, v, e, gate_keys)
    close(cope_attention(q, k, v, e, gate_keys), want, 1e-12)
    short = [x if x is None else x.float() for x in (q, k, v, e, gate_keys)]
    close(cope_attention(*short), want, 1e-4)
    for rows in (1, 3, 36):  # the gates are summed in steps of 4 * ROWS keys: saturated soon, late and never
        monkeypatch.setattr(model_cope, "ROWS", rows)
        close(cope_attention(q, k, v, e, gate_keys), want, 1e-12)


def test_cope_far_beyond_saturation_is_the_listing():
    """Long enough for the tail of constant bias, at all three block positions: the whole matrix in float64, gates flipped and summed."""
    q, k, v = random_qkv(B=1, H=2, Tq=1500, Tk=1500, d=8)
    q[:, 1, :, 0], k[:, 1, :, 0] = 4, -2  # a head whose gates are rarely open
    e = torch.randn(8, 20, dtype=torch.float64)
    s = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(torch.ones(1500, 1500).triu(1).bool(), float("-inf"))
    p = s.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=19)
    z, low = q @ e, p.floor().long()
    want = (s + torch.lerp(z.gather(-1, low), z.gather(-1, p.ceil().long()), p - low)).softmax(-1) @ v
    close(cope_attention(q, k, v, e), want, 1e-11)
    close(cope_attention(q[:, :, 1490:], k, v, e), want[:, :, 1490:], 1e-11)
    close(cope_attention(*(x.float() for x in (q, k, v, e))), want, 1e-4)


def test_cope_with_open_gates_is_relative_pe():
    q, k, v = random_qkv(d=6)
    q[..., 0], e = 1.0, torch.randn(6, 24, dtype=torch.float64)
    gate_keys = torch.zeros_like(k)
    gate_keys[..., 0] = 1e4
    pe = encoding("relative_capped")
    with torch.no_grad():
        pe.e.copy_(torch.cat((e[:, 1:], e[:, -1:]), 1))  # p = i - j + 1: the table moves by one
    close(cope_attention(q, k, v, e, gate_keys), attention(q, k, v, pe.bias), 1e-12)


def test_a_diverged_cope_says_nan_instead_of_breaking():
    q, k, v = random_qkv(dtype=torch.float32)
    q[0, 0, 3, 0] = float("nan")
    assert cope_attention(q, k, v, torch.randn(5, 4)).isnan().any()


def test_cope_mlp_keeps_its_counts_under_autocast():
    model = make("cope_mlp")
    p = torch.tensor([256.0, 256.5, 257.0, 300.25]).expand(1, 4, 1, 4)
    q = torch.randn(1, 4, 1, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = model.pos[0].bias(q.bfloat16(), p)
    with torch.no_grad():
        close(got, model.pos[0].bias(q.bfloat16().float(), p), 1e-5 * got.abs().max().item())


def test_interpolation_is_continuous_and_hits_the_table():
    z = torch.randn(1, 1, 1, 6, dtype=torch.float64)
    p = torch.tensor([0, 1, 2.5, 5, 3 - 1e-9, 3 + 1e-9], dtype=torch.float64)[None, None, None]
    got = interpolate(z, p)[0, 0, 0]
    close(got, torch.stack([z[..., 0], z[..., 1], (z[..., 2] + z[..., 3]) / 2, z[..., 5], z[..., 3], z[..., 3]]).flatten(), 1e-7)


def test_the_gradient_of_z_sums_to_zero_over_the_positions():
    q, k, v = random_qkv(Tq=20)
    z = torch.randn(2, 3, 20, 9, dtype=torch.float64, requires_grad=True)
    y = counting_attention(q, k, v, None, 9, lambda here, p: interpolate(z[:, :, here], p))
    (y * torch.randn_like(y)).sum().backward()
    assert z.grad.abs().max() > 1e-3
    close(z.grad.sum(-1), torch.zeros(2, 3, 20), 1e-14)


@pytest.mark.parametrize("rows", [128, 2])
@pytest.mark.parametrize("Tq", [5, 3])
def test_gradients_of_the_counting_methods(Tq, rows, monkeypatch):
    q, k, v = random_qkv(B=1, H=2, Tq=Tq, Tk=5, d=4)
    more, e = random_qkv(B=1, H=2, Tk=5, d=4, seed=4)[1], torch.randn(4, 3, dtype=torch.float64)
    F_ = F.logsigmoid(torch.randn(1, 2, 5, dtype=torch.float64)).cumsum(-1)
    decay = F.logsigmoid(torch.randn(1, 2, Tq, dtype=torch.float64))
    for module, f, inputs in ((model_cope, cope_attention, (q, k, v, e, more)), (model_cope, cope_attention, (q, k, v, e)),
                              (model_tra, tra_attention, (q, k, v, decay)), (model_fox, fox_attention, (q, k, v, F_)),
                              (model_diff, diff_attention, (q, k, v, torch.tensor(0.4, dtype=torch.float64)))):
        monkeypatch.setattr(module, "ROWS", rows)
        assert torch.autograd.gradcheck(f, [x.clone().requires_grad_() for x in inputs])


def cope_layer(x, model, layer=0):
    """One CoPE layer written from the spec's formulas with naive loops, for every variant."""
    attn, c, pos = model.h[layer].attn, model.config, model.pos[layer % len(model.pos)]
    B, T, C = x.shape
    q, k, v = ((x @ w.T).view(B, T, c.n_head, -1).transpose(1, 2) for w in attn.c_attn.weight.chunk(3))
    if c.qk_norm:
        q, k = (z / (z.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() for z in (q, k))
    plain = q
    if c.plus == "rope":
        q, k = model_baseline.RoPE(model_baseline.GPTConfig()).rotate(q, k, torch.arange(T))
    gate_keys = dict(key=k, val=v, sep=(x @ attn.w_g.weight.T).view(B, T, c.n_head, -1).transpose(1, 2) if attn.w_g else None)[c.gates]

    def bias(b, h, i, j):
        p, row = naive_count(q, gate_keys, c.P, b, h, i, j, T), plain[b, h, i]
        if c.position == "embedding":
            e = pos.pos_emb
            found = row @ (e[:, math.floor(p)] * (1 - p + math.floor(p)) + e[:, math.ceil(p)] * (p - math.floor(p)))
        elif c.position == "alibi":
            found = -pos.m[h] * p
        else:
            found = row @ pos.mlp(torch.tensor([p], dtype=torch.float64))
        if c.plus == "relative" and i - j < c.block_size:
            found = found + row @ pos.e_rel[:, i - j]
        return found
    return naive(q, k, v, bias).transpose(1, 2).reshape(B, T, C) @ attn.c_proj.weight.T


@pytest.mark.parametrize("name, changes", [
    ("cope", {}), ("cope", dict(share=False)), ("cope", dict(qk_norm=True)), ("cope_val", {}), ("cope_sep", {}), ("cope_mlp", {}),
    ("cope_alibi", {}), ("cope_alibi", dict(slopes="1,.5,2,0.1")), ("cope_relative", {}), ("cope_rope", {}),
    ("cope_sep", dict(plus="relative"))])
def test_every_variant_of_cope_is_its_formula(name, changes):
    model = make(name, block_size=9, **changes).double()
    x = torch.randn(2, 14, 32, dtype=torch.float64)
    for layer in (0, 1):
        pos = model.pos[layer % len(model.pos)]
        with torch.no_grad():
            close(model.h[layer].attn(x, None, pos, torch.arange(14)), cope_layer(x, model, layer), 1e-5)
    assert len(model.pos) == (2 if changes.get("share") is False or (name == "cope_alibi" and not changes) else 1)


def test_cope_tables_start_at_zero_and_learned_slopes_too():
    for name in ("cope", "cope_alibi", "cope_relative"):
        torch.manual_seed(0)
        model = runs.make_model(runs.find_model(name)[1] | TINY | dict(model=name))
        assert all((p == 0).all() for p in model.pos.parameters())
    slopes = model_cope.GPT(model_cope.GPTConfig(position="alibi", slopes="1,0.5,0.25,0.125")).pos[0]
    assert slopes.m.tolist() == [1, 0.5, 0.25, 0.125] and not list(slopes.parameters())


@pytest.mark.parametrize("Tq", [1, 6, 37])
def test_tra_attention_is_equation_12(Tq, monkeypatch):
    q, k, v = random_qkv(Tq=Tq)
    q[0, 0, 0] = k[0, 0].mean(0) * 0  # no score above 0: no survivor
    decay = F.logsigmoid(torch.randn(2, 3, Tq, dtype=torch.float64))
    want = torch.zeros_like(q)
    for b in range(2):
        for h in range(3):
            for r in range(Tq):
                i = 37 - Tq + r
                s = [(q[b, h, r] @ k[b, h, j] / math.sqrt(5)).item() for j in range(i + 1)]
                alive = [j for j in range(i + 1) if s[j] > 0]
                a = [math.exp(s[j] + sum(n >= j for n in alive) * decay[b, h, r].item()) for j in alive]
                for j, w in zip(alive, a):
                    want[b, h, r] += w / sum(a) * v[b, h, j]
    for rows in (64, 36, 7, 1):
        monkeypatch.setattr(model_tra, "ROWS", rows)
        close(tra_attention(q, k, v, decay), want, 1e-12)
    close(tra_attention(*(x.float() for x in (q, k, v, decay))), want, 1e-5)


def test_tra_distances_are_the_papers_example():
    """Eq. 5's mask gives Eq. 7's distances: with v = I and equal scores, weights are delta to the power of the distance."""
    M = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]], dtype=torch.float64)
    D = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 2, 1, 0], [2, 0, 1, 0]], dtype=torch.float64)
    eye = torch.eye(4, dtype=torch.float64)[None, None]
    scores, delta = 2 * M - 1, 0.3
    got = tra_attention(eye * 2, scores.T[None, None].contiguous(), eye, torch.full((1, 1, 4), math.log(delta), dtype=torch.float64))[0, 0]
    want = torch.where(M > 0, delta**D, 0)
    close(got, want / want.sum(-1, keepdim=True), 1e-12)


def test_a_tra_row_without_survivors_is_zero_and_sees_no_future():
    q, k, v = random_qkv(B=1, H=1, Tq=9, Tk=9, dtype=torch.float32)
    k[:, :, :6] = -q[:, :, 5:6]  # query 5 rejects every key up to itself, and would love the later ones
    k[:, :, 6:] = q[:, :, 5:6] * 9
    inputs = [x.requires_grad_() for x in (q, k, v, torch.full((1, 1, 9), -0.1))]
    y = tra_attention(*inputs)
    assert (y[0, 0, 5] == 0).all() and (y[0, 0, 6:] != 0).any()
    y[0, 0, 5].sum().backward()
    assert all((x.grad == 0).all() for x in inputs)
    v2 = v.detach().clone()
    v2[:, :, 6:] = 1e6
    assert (tra_attention(q, k, v2, inputs[3])[0, 0, :6] == y[0, 0, :6]).all()


def test_tra_with_every_score_positive_is_alibi():
    q, k, v = (x.abs() for x in random_qkv())
    m = torch.tensor([0.5, 0.1, 0.02], dtype=torch.float64)
    want = naive(q, k, v, lambda b, h, i, j: -m[h] * (i - j + 1))
    close(tra_attention(q, k, v, -m[None, :, None].expand(2, 3, 37)), want, 1e-12)


def test_tra_and_cope_count_in_float32_whatever_the_dtype():
    """bfloat16 has no whole numbers between 512 and 516: counts this long would blur."""
    q, k, v = (x.abs().bfloat16() for x in random_qkv(B=1, H=1, Tq=1500, Tk=1500, d=8))
    decay = torch.full((1, 1, 1500), -0.01)
    want = tra_attention(q.double(), k.double(), v.double(), decay.double())
    got = tra_attention(q, k, v, decay)
    assert got.dtype == torch.bfloat16
    close(got, want, 0.02)
    e = torch.linspace(0, -20, 1500).expand(8, 1500) / 8
    close(cope_attention(q, k, v, e), cope_attention(q.double(), k.double(), v.double(), e.double()), 0.03)


@pytest.mark.parametrize("Tq", [1, 6, 37])
def test_fox_attention_is_its_formula_and_cables(Tq, monkeypatch):
    q, k, v = random_qkv(Tq=Tq)
    z = torch.randn(2, 3, 37, dtype=torch.float64)
    f = torch.sigmoid(z)
    want = naive(q, k, v, lambda b, h, i, j: f[b, h, j + 1:i + 1].log().sum())
    for rows in (128, 7):
        monkeypatch.setattr(model_fox, "ROWS", rows)
        close(fox_attention(q, k, v, F.logsigmoid(z).cumsum(-1)), want, 1e-12)
    close(fox_attention(*(x.float() for x in (q, k, v, F.logsigmoid(z).cumsum(-1)))), want, 1e-5)
    close(cable_attention(q, k, v, F.softplus(-z).cumsum(-1)), want, 1e-12)  # CABLE_NW with softplus steps


@pytest.mark.parametrize("Tq", [1, 6, 37])
def test_diff_attention_is_its_formula(Tq, monkeypatch):
    q, k, v = random_qkv(Tq=Tq, d=8)
    want = 0
    for half, weight in ((slice(0, 4), 1), (slice(4, 8), -0.35)):
        want = want + weight * naive(q[..., half], k[..., half], v, lambda b, h, i, j: 0.0)
    for rows in (128, 7):
        monkeypatch.setattr(model_diff, "ROWS", rows)
        close(diff_attention(q, k, v, 0.35), want, 1e-12)


def test_a_diff_layer_is_its_formula():
    model = make("diff").double()
    attn, x = model.h[1].attn, torch.randn(2, 11, 32, dtype=torch.float64)
    q, k, v = ((x @ w.T).view(2, 11, 4, 8).transpose(1, 2) for w in attn.c_attn.weight.chunk(3))
    rope = model_baseline.RoPE(model_baseline.GPTConfig())
    start = 0.8 - 0.6 * math.exp(-0.3)  # of the second layer
    lam = ((attn.l_q1 @ attn.l_k1).exp() - (attn.l_q2 @ attn.l_k2).exp() + start).item()
    y = 0
    for half, weight in ((slice(0, 4), 1), (slice(4, 8), -lam)):
        y = y + weight * naive(*rope.rotate(q[..., half], k[..., half], torch.arange(11)), v, lambda b, h, i, j: 0.0)
    y = (1 - start) * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * attn.ln_head.weight
    with torch.no_grad():
        close(attn(x, None, torch.arange(11)), y.transpose(1, 2).reshape(2, 11, 32) @ attn.c_proj.weight.T, 1e-5)


@pytest.mark.parametrize("name", ["cope", "cope_sep", "tra", "fox", "cable", "k_cable", "alibi", "rope", "diff", "relative", "postnorm",
                                  "learned_hard"])
def test_maps_are_what_the_model_does(name):
    """The attention shown, times the values, is the layer's output; steps add up to the distance shown."""
    model = make(name, norm="pre", P=50)
    idx = torch.randint(0, 61, (1, 20))
    layers = plot.look(model, idx)
    assert len(layers) == 2 and layers[0]["attention"].shape == (4, 20, 20)
    if name != "diff":  # whose heads are normalised afterwards
        attn, pos = model.h[0].attn, torch.arange(20)
        x = model.wte(idx) + (model.pe[0].wpe(pos) if name == "learned_hard" else 0)
        x = model.h[0].before[0](x) if name == "postnorm" else model.h[0].ln_1(x)
        v = (x @ attn.c_attn.weight.chunk(3)[2].T).view(1, 20, 4, 8).transpose(1, 2)
        y = (torch.from_numpy(layers[0]["attention"])[None] @ v).transpose(1, 2).reshape(1, 20, 32) @ attn.c_proj.weight.T
        rest = (model.pos[0], pos) if "cope" in name else (model.pe[0], pos) if hasattr(model, "pe") else ()
        rest = (pos,) if name == "postnorm" else rest
        close(attn(x, None, *rest), y, 1e-4)
    if name in ("rope", "diff", "relative", "postnorm", "learned_hard"):
        assert list(layers[0]) == ["attention"]
        return
    step, distance, position = (torch.from_numpy(layers[0][m]) for m in ("step", "distance", "position"))
    if name in ("cope", "cope_sep", "tra"):  # the query's own key counts
        want = torch.stack([step[..., j:].sum(-1) for j in range(20)], -1)
    else:
        want = torch.stack([step.tril()[..., j + 1:].sum(-1) for j in range(20)], -1)
    close(distance, want.tril(), 1e-4)
    assert ((position.amax(-1) - 1).abs() < 1e-6).logical_or(position.amax(-1) == 0).all() and (position.triu(1) == 0).all()


# -----------------------------------------------------------------------------
# Post-Norm: the schemes, the theorem

@pytest.mark.parametrize("scheme", ["pre", "post", "peri", "peri_init"])
@pytest.mark.parametrize("pe", ["rope", "nope"])
def test_norm_schemes_by_hand(scheme, pe):
    model = make("postnorm", norm=scheme, pe=pe).double()
    idx = torch.randint(0, 61, (2, 13))

    def N(x, layer):
        return x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt() * layer.weight

    def attn(x, layer):
        q, k, v = ((x @ w.T).view(2, 13, 4, 8).transpose(1, 2) for w in layer.c_attn.weight.chunk(3))
        if pe == "rope":
            q, k = model_baseline.RoPE(model_baseline.GPTConfig()).rotate(q, k, torch.arange(13))
        return naive(q, k, v, lambda b, h, i, j: 0.0).transpose(1, 2).reshape(2, 13, 32) @ layer.c_proj.weight.T

    def mlp(x, layer):
        return F.gelu(x @ layer.c_fc.weight.T) @ layer.c_proj.weight.T
    with torch.no_grad():
        x = model.wte.weight[idx]
        if scheme == "peri_init":
            x = N(x, model.ln_0)
        for block in model.h:
            for n, (f, layer) in enumerate(((attn, block.attn), (mlp, block.mlp))):
                if scheme == "pre":
                    x = x + f(N(x, block.before[n]), layer)
                elif scheme == "post":
                    x = N(x + f(x, layer), block.after[n])
                else:
                    x = x + N(f(N(x, block.before[n]), layer), block.after[n])
        if scheme.startswith("peri"):
            x = N(x, model.ln_f)
        close(model(idx)[0], x @ model.wte.weight.T, 1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_pre_and_post_are_those_of_the_other_files(norm):
    model, other = make("postnorm", norm=norm, final_norm=norm == "pre"), make("rope", norm=norm)
    names = {"before.0": "ln_1", "before.1": "ln_2"} if norm == "pre" else {"after.0": "ln_1", "after.1": "ln_2"}
    weights = {re.sub("|".join(map(re.escape, names)), lambda m: names[m[0]], n): p for n, p in model.state_dict().items()}
    other.load_state_dict(weights)
    idx = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        close(model(idx)[0], other(idx)[0], 1e-4)


def gaps(model, n, lengths, sets=40):
    """-> {length: (gap of the last token, least and largest gap of the others, TVD)}: how far present tokens are below absent ones."""
    tokens = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(i)) for i in range(sets)])
    with torch.no_grad():
        logits = model(tokens[:, :n - 1])
    found = {}
    for length in lengths:
        here = logits[:, length - 1].gather(1, tokens)  # present tokens first
        absent = here[:, length:]
        close(absent - absent.mean(1, keepdim=True), torch.zeros_like(absent), 1e-9)
        below = absent.mean(1, keepdim=True) - here[:, :length]
        p = here.softmax(-1)
        target = torch.cat((torch.zeros(length), torch.ones(n - length) / (n - length)))
        last, others, tvd = below[:, -1], below[:, :-1], (p - target).abs().sum(1) / 2
        found[length] = last.min().item(), others.min().item(), others.max().item(), tvd.mean().item()
    return found


@pytest.mark.parametrize("n", [4, 10, 64])
def test_the_hard_coded_model_has_the_theorems_gaps(n):
    c, lengths = 3.0, range(2, n)
    for centred in (False, True):
        for length, (last, low, high, _) in gaps(model_postnorm.hard_coded(n, c, centred=centred), n, lengths).items():
            assert max(abs(last - c * (1 + 1 / length)), abs(low - c / length), abs(high - c / length)) < 1e-6
    for length, (_, low, high, _) in gaps(model_postnorm.hard_coded(n, c, "output", centred=True), n, lengths).items():
        want = c * math.sqrt(n * (n - 1) / (length * (n - length)))
        assert abs(low - want) < 1e-3 * want and abs(high - want) < 1e-3 * want and want >= 2 * c * math.sqrt((n - 1) / n) - 1e-9


def test_dilution_and_its_remedy_in_the_specs_numbers():
    """n = 64, the gap at length 2 scaled to 10: gap and TVD at 8, 32 and 63, without a norm and with one on the attention's output."""
    plain = gaps(model_postnorm.hard_coded(64, 20.0), 64, (2, 8, 32, 63))
    normed = gaps(model_postnorm.hard_coded(64, 10 / math.sqrt(64 * 63 / (2 * 62)), "output", centred=True), 64, (2, 8, 32, 63))
    assert [round(plain[n][1], 2) for n in (2, 8, 32, 63)] == [10, 2.5, 0.62, 0.32]
    assert [round(plain[n][3], 3) for n in (8, 32, 63)] == [0.010, 0.341, 0.978]
    assert [round(normed[n][1], 2) for n in (2, 8, 32, 63)] == [10, 5.26, 3.48, 14.03]
    assert [round(normed[n][3], 3) for n in (8, 32, 63)] == [0.001, 0.029, 0.000]


def test_theorem_4_2():
    """Dimensions are minimal; precision at length 2 carries over as 2C / l when b >= 0, and fails with b < 0 (n=10, g=3, b=-.5, l=6)."""
    n = 10
    model = model_postnorm.hard_coded(n, 2.0)
    B, D = model.E @ model.U, model.E @ model.W_V @ model.W_O @ model.U
    assert torch.linalg.matrix_rank(B + D) >= n - 1 and torch.linalg.matrix_rank(D) >= n - 1
    g = torch.Generator().manual_seed(0)
    for b in (0.7, -0.5):
        r, s, delta = torch.randn(3, n, generator=g, dtype=torch.float64)
        D = r[:, None] + delta - 3 * torch.eye(n, dtype=torch.float64)
        B = s[:, None] - delta - b * torch.eye(n, dtype=torch.float64)
        free = model_postnorm.MinimalTransformer(n, n, 1, n, constant=True).double()  # E = I, U = I: B and D as they are
        with torch.no_grad():
            free.E.copy_(torch.eye(n)), free.U.copy_(torch.eye(n)), free.W_V.copy_(D), free.W_O.copy_(torch.eye(n))
            direct = free.attend

            def forward(idx, B=B, free=free, direct=direct):
                return B[idx] + direct(free.E[idx])
        found = gaps(forward, n, range(2, n))
        for length, (last, low, high, _) in found.items():
            assert abs(last - (b + 3 / length)) < 1e-9 and abs(low - 3 / length) < 1e-9 and abs(high - 3 / length) < 1e-9
        C = min(found[2][:2])
        holds = all(min(last, low) >= 2 * C / length - 1e-9 for length, (last, low, *_) in found.items())
        assert holds == (b >= 0)
        if b < 0:
            assert abs(found[6][0]) < 1e-9  # the gap is gone


@pytest.mark.parametrize("norm", ["none", "output", "pre", "post", "peri", "peri_init"])
@pytest.mark.parametrize("constant", [True, False])
def test_the_minimal_transformer_is_equation_3(norm, constant):
    torch.manual_seed(0)
    model = model_postnorm.MinimalTransformer(7, 5, 2, 3, norm, constant).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))

        def N(x, layer):
            return x / (x.square().mean() + 1e-12).sqrt() * layer.weight
        tokens = torch.tensor([[3, 1, 6, 0]])
        for t in range(4):
            xs = [model.E[i] for i in tokens[0, :t + 1]]
            if norm == "peri_init":
                xs = [N(x, model.first) for x in xs]
            seen = [N(x, model.before) for x in xs] if norm in ("pre", "peri", "peri_init") else xs
            a = torch.stack([torch.exp((seen[-1] @ model.W_Q) @ (x @ model.W_K)) * (not constant) + constant for x in seen])
            y = sum(w / a.sum() * (x @ model.W_V @ model.W_O) for w, x in zip(a, seen))
            y = N(y, model.after) if norm in ("output", "peri", "peri_init") else y
            x = N(xs[-1] + y, model.after) if norm == "post" else xs[-1] + y
            x = N(x, model.last) if norm in ("peri", "peri_init") else x
            close(model(tokens)[0, t], x @ model.U, 1e-10)


def test_max_retrieval_ignores_padding_and_order():
    for norm in ("none", "pre", "post", "peri"):
        torch.manual_seed(0)
        model = model_postnorm.MaxRetrieval(norm)
        x = torch.cat((torch.rand(3, 9, 1), F.one_hot(torch.randint(0, 10, (3, 9)), 10).float()), -1)
        padded = torch.cat((x, torch.full((3, 4, 11), -1.0)), 1)
        with torch.no_grad():
            h = model.before(model.enter(x))
            a = torch.exp(h @ model.q)
            want = model.leave(model.after((a[..., None] * h).sum(1) / a.sum(1, keepdim=True)))
            for got in (model(x), model(padded), model(x[:, torch.randperm(9)])):
                close(got, want, 1e-5)
        assert isinstance(model.before, torch.nn.RMSNorm) == (norm in ("pre", "peri"))
        assert isinstance(model.after, torch.nn.RMSNorm) == (norm in ("post", "peri"))
    with pytest.raises(ValueError, match="norm='final' is not one of none, pre, post, peri"):
        model_postnorm.MaxRetrieval("final")


# -----------------------------------------------------------------------------
# the classics against their formulas

def encoding(name, **changes):
    torch.manual_seed(0)
    config = model_baseline.GPTConfig(**(TINY | dict(n_head=3, n_embd=18, n_label=100) | model_baseline.VARIANTS[name] | changes))
    pe = model_baseline.ENCODINGS[config.pe](config)
    with torch.no_grad():
        for p in pe.parameters():
            p.add_(torch.randn_like(p))
    return pe.double()


def formula(name, pe, q):
    """The spec's bias, one entry at a time, written independently of the classes."""
    relu = torch.nn.functional.relu
    if name == "alibi":
        m = [2 ** (-8 * h / 2) for h in (1, 2)] + [2 ** (-8 * 1 / 4)]  # 3 heads: 2's slopes, and the first of 4's
        return lambda b, h, i, j: -m[h] * (i - j)
    if name == "t5":
        return lambda b, h, i, j: pe.r[h, min(i - j, 23)]
    if name == "kerple":
        return lambda b, h, i, j: -max(pe.p[h].item(), 0.01) * math.log(1 + max(pe.a[h].item(), 0.01) * (i - j))
    if name == "fire":
        def bias(b, h, i, j):
            c, L = abs(pe.c.item()), abs(pe.m.item()) * 512
            x = math.log(c * (i - j) + 1) / (math.log(c * max(i, L) + 1) + 1e-6)
            hidden = relu(pe.mlp[0].weight[:, 0] * x + pe.mlp[0].bias)
            return pe.mlp[2].weight[h] @ hidden + pe.mlp[2].bias[h]
        return bias
    if name in ("relative", "relative_capped"):
        def bias(b, h, i, j):
            if i - j >= 24 and name == "relative":
                return 0.0
            return q[b, h, i - 37 + q.size(2)] @ pe.e[:, min(i - j, 23)]
        return bias
    return lambda b, h, i, j: 0.0


@pytest.mark.parametrize("Tq", [1, 6, 37])
@pytest.mark.parametrize("name", ["nope", "alibi", "t5", "kerple", "fire", "relative", "relative_capped"])
def test_biases_are_their_formulas(name, Tq, monkeypatch):
    q, k, v = random_qkv(Tq=Tq, d=6)
    pe = encoding(name)
    want = naive(q, k, v, formula(name, pe, q))
    for rows in (256, 7):
        monkeypatch.setattr(model_baseline, "ROWS", rows)
        close(attention(q, k, v, pe.bias), want, 1e-6 if name == "fire" else 1e-12)


def test_rope_logits_depend_on_the_distance_alone_and_start_as_q_k():
    pe = encoding("rope", n_embd=24)
    q, k, _ = random_qkv(B=1, H=1, Tq=1, Tk=1, d=8)

    def logit(i, j):
        a, _ = pe.rotate(q, k, torch.tensor([i]))
        _, b = pe.rotate(q, k, torch.tensor([j]))
        return (a * b).sum()
    close(logit(7, 7), (q * k).sum(), 1e-5)
    close(logit(107, 100), logit(7, 0), 1e-4)
    want = sum((complex(q[0, 0, 0, c], q[0, 0, 0, c + 4]) * complex(k[0, 0, 0, c], -k[0, 0, 0, c + 4])
                * np.exp(1j * 5 * 10000 ** (-c / 4))).real for c in range(4))  # as complex numbers, base 1e4
    close(logit(5, 0), torch.tensor(want), 1e-5)


def test_sinusoidal_and_learned_and_label_embeddings():
    x = torch.zeros(1, 30, 18)
    y = encoding("sinusoidal").embed(x, torch.arange(30), None)[0]
    for t, c in ((0, 0), (7, 3), (29, 8)):
        close(y[t, 2 * c], torch.tensor(math.sin(t / 10000 ** (2 * c / 18))), 1e-6)
        close(y[t, 2 * c + 1], torch.tensor(math.cos(t / 10000 ** (2 * c / 18))), 1e-6)
    learned = encoding("learned")
    close(learned.embed(x[:, :24], torch.arange(24), None)[0], learned.wpe.weight, 0)
    with pytest.raises(ValueError, match="learned positions end at block_size=24"):
        learned.embed(x, torch.arange(30), None)
    label = encoding("label")
    rows = [int((label.wpe.weight == row).all(1).nonzero()[0]) for row in label.embed(x, torch.arange(30), None)[0]]
    assert rows == sorted(set(rows)) and len(rows) == 30
    again = label.embed(x, torch.arange(30), None)[0]
    assert not torch.equal(again, label.wpe.weight[rows])  # drawn anew, at test time too
    with pytest.raises(ValueError, match="do not fit in n_label=100"):
        label.embed(torch.zeros(1, 101, 18), torch.arange(101), None)


def test_hard_attention_takes_the_best_key_and_has_the_soft_gradient(monkeypatch):
    q, k, v = (x.requires_grad_() for x in random_qkv(Tq=12))
    s = (q @ k.transpose(-1, -2) / math.sqrt(5)).masked_fill(torch.ones(12, 37).triu(26).bool(), float("-inf"))
    best = v.gather(2, s.argmax(-1)[..., None].expand(-1, -1, -1, 5))
    for rows in (128, 5):
        monkeypatch.setattr(model_baseline, "ROWS", rows)
        close(attention(q, k, v, hard=True), best, 1e-12)
    weights = torch.randn(2, 3, 12, 5, dtype=torch.float64)
    hard = torch.autograd.grad((attention(q, k, v, hard=True) * weights).sum(), (q, k))
    soft = torch.autograd.grad((s.softmax(-1) @ v * weights).sum(), (q, k))
    for a, b in zip(hard, soft):
        close(a, b, 1e-12)
    by_v, = torch.autograd.grad((attention(q, k, v, hard=True) * weights).sum(), v)
    want = torch.zeros_like(v).scatter_add(2, s.argmax(-1)[..., None].expand(-1, -1, -1, 5), weights)
    close(by_v, want, 1e-12)  # values are taken, or not


def test_baseline_gradients():
    for name in ("t5", "kerple", "fire", "relative"):
        q, k, v = random_qkv(B=1, H=3, Tq=3, Tk=5, d=6)
        pe = encoding(name)
        assert torch.autograd.gradcheck(lambda *x, pe=pe: attention(*x, pe.bias), [x.requires_grad_() for x in (q, k, v)])
        attention(q, k, v, pe.bias).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in pe.parameters()), name


# -----------------------------------------------------------------------------
# every model

@pytest.mark.parametrize("name, norm", [(name, norm) for name in MODELS for norm in ("pre", "post")]
                         + [("postnorm", "peri"), ("postnorm", "peri_init")])
def test_causality(name, norm):
    model, T = make(name, norm=norm, qk_norm=norm == "post"), 24
    idx = torch.randint(0, 61, (2, T))
    with torch.no_grad():
        torch.manual_seed(5)
        before = model(idx)[0]
        for t in (1, 12, T - 1):
            other = idx.clone()
            other[:, t] = (other[:, t] + 1) % 61
            torch.manual_seed(5)
            after = model(other)[0]
            close(after[:, :t], before[:, :t], 1e-5)
            assert (after[:, t] - before[:, t]).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_equals_the_full_forward(name):
    """Past the training length (24), in pieces of every kind: a prompt, single tokens, several at once."""
    model, T = make(name), 24 if "learned" in name else 90
    idx = torch.randint(0, 61, (2, T))
    cuts = [0, 5, 6, 7, 19, 20, T] if T == 24 else [0, 5, 6, 7, 40, 41, 70, T]
    with torch.no_grad():
        torch.manual_seed(7)
        full = model(idx)[0]
        torch.manual_seed(7)
        cache = runs.new_cache(model, T if name == "label" else 8)  # 8: the buffers have to grow
        pieces = torch.cat([model(idx[:, a:b], cache=cache)[0] for a, b in zip(cuts, cuts[1:])], 1)
        assert cache.t == T
        close(pieces, full, 1e-3 * full.abs().max().item())
        torch.manual_seed(7)
        fast = torch.cat(list(sample.generate(model, idx[:1, :6], T - 6, temperature=0)), 1)
        if name != "label":  # without a cache every forward draws its labels anew
            slow = torch.cat(list(sample.generate(model, idx[:1, :6], T - 6, temperature=0, cached=False)), 1)
            assert torch.equal(fast, slow)


@pytest.mark.parametrize("name", MODELS)
def test_training_and_decoding_under_autocast(name):
    """bfloat16, as on a GPU: finite gradients, and logits near float32's, with and without the cache."""
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
            pieces = torch.cat([model(idx[:, a:b], cache=cache)[0] for a, b in ((0, 7), (7, 8), (8, 20))], 1)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if name != "tra":  # whose threshold turns a rounding into another set of keys
        for got in (logits, pieces):
            assert (got - want).abs().mean() < 0.1 * want.abs().mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_of_one_token_and_the_loss(name):
    model = make(name)
    idx = torch.randint(0, 61, (3, 1))
    logits, loss = model(idx)
    assert logits.shape == (3, 1, 61) and loss is None
    idx = torch.randint(0, 61, (2, 11))
    targets = torch.randint(0, 61, (2, 11))
    targets[0, :7] = -1
    torch.manual_seed(1)
    logits, loss = model(idx, targets)
    kept = targets != -1
    close(loss, F.cross_entropy(logits[kept], targets[kept]), 1e-5)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", [m for m in MODELS if m != "label"])  # label draws anew in every forward
def test_perplexity_in_pieces_equals_one_forward(name, monkeypatch):
    """eval.py's windows: batches of short ones, cached pieces of long ones, a shorter last one."""
    model, cpu, context = make(name), torch.device("cpu"), contextlib.nullcontext()
    stream = np.random.default_rng(0).integers(0, 61, 101).astype(np.uint16)
    ids = torch.from_numpy(stream.astype(np.int64))
    for T in (10, 24) if "learned" in name else (10, 24, 64):
        with torch.no_grad():
            want = torch.cat([F.cross_entropy(model(ids[None, a:min(a + T, 100)])[0][0], ids[a + 1:min(a + T, 100) + 1],
                                              reduction="none") for a in range(0, 100, T)])
        close(torch.from_numpy(evaluation.token_losses(model, stream, T, cpu, context)), want, 1e-4)
        monkeypatch.setattr(runs, "piece", lambda model: 16)
        close(torch.from_numpy(evaluation.token_losses(model, stream, T, cpu, context)), want, 1e-4)
        monkeypatch.undo()


def test_every_length_scores_the_same_tokens():
    seen = []

    class Spy(torch.nn.Module):
        config = model_baseline.GPTConfig(vocab_size=50)

        def forward(self, x, cache=None):
            seen.append(x.clone())
            return torch.zeros(*x.shape, 50), None
    stream = np.arange(41, dtype=np.uint16)
    for T in (1, 7, 8, 40):
        seen.clear()
        losses = evaluation.token_losses(Spy(), stream, T, torch.device("cpu"), contextlib.nullcontext())
        assert sorted(int(t) for x in seen for t in x.flatten()) == list(range(40)) and losses.shape == (40,)


def test_loss_by_position_bins_cover_the_window_once():
    losses = np.arange(4100) % 2048 * 1.0
    bins = evaluation.by_position(losses, 2048)
    assert bins[0][0] == 0 and bins[-1][1] == 2047 and all(b[0] == a[1] + 1 for a, b in zip(bins, bins[1:]))
    assert all(loss == pytest.approx((a + b) / 2) for a, b, loss in bins)
    assert evaluation.by_position(np.ones(10), 5) == [[0, 4, 1.0]]


def parts(path):
    """{name: source without comments} of a file's top-level classes, methods as Class.method."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = ast.unparse(node)
            found |= {f"{node.name}.{m.name}": ast.unparse(m) for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("path", [p for p in MODEL_FILES if p.stem != "model_baseline"], ids=lambda p: p.name)
def test_the_shared_parts_of_the_model_files_are_the_same(path):
    """Copies are deliberate here; copies that differ would be a second, hidden variable in every table."""
    ours, theirs = parts(ROOT / "model_baseline.py"), parts(path)
    for name in ("Cache", "MLP", "Block", "GPT._init_weights"):
        if (path.stem, name) != ("model_postnorm", "Block"):  # its subject: held to the others by its outputs, below
            assert theirs[name] == ours[name], f"{path.name}: {name} has drifted from model_baseline.py"
    head = inspect.getsource(model_baseline.GPTConfig).split("    pe:")[0]
    if path.stem == "model_tra":  # the one file with other defaults, and says so
        head = head.replace('norm: str = "pre" ', 'norm: str = "post"').replace("qk_norm: bool = False", "qk_norm: bool = True ")
    if path.stem == "model_postnorm":
        head = head.replace('norm: str = "pre"       # pre: x + F(N(x)), post: N(x + F(x))',
                            'norm: str = "post"      # pre, post, peri, peri_init')
    assert head in path.read_text(), f"{path.name}: GPTConfig has drifted"
    # where a method adds its own lines, the baseline's others must all be there, in their order
    for name in ("CausalSelfAttention.__init__", "CausalSelfAttention.forward", "GPT.__init__", "GPT.forward"):
        lines = iter(theirs[name].splitlines())
        for line in ours[name].splitlines():
            if not re.search(r"\bpe\b|\bpos\b|ENCODINGS|start|enumerate|cache\.append|\bhard\b", line) and not (
                    path.stem == "model_postnorm" and re.search(r"norm|ln_f|self\.drop\(|x = block", line)):
                assert line in lines, f"{path.name}: {name} lacks, or has elsewhere: {line.strip()}"


def test_the_rotations_are_the_same():
    assert inspect.getsource(model_cope.rotate) == inspect.getsource(model_diff.rotate) == inspect.getsource(model_postnorm.rotate)
    x, pos = torch.randn(1, 1, 5, 8), torch.arange(5)
    close(model_cope.rotate(x, pos), model_baseline.RoPE(model_baseline.GPTConfig()).rotate(x, x, pos)[0], 0)


def test_model_files_stand_alone_and_stay_short():
    for path in MODEL_FILES:
        lines = path.read_text().splitlines()
        assert len(lines) <= 350, f"{path.name} has {len(lines)} lines"
        ours = {p.stem for p in ROOT.glob("*.py")} | {"data"}
        imported = {alias.name.split(".")[0] for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Import)
                    for alias in node.names} | {node.module.split(".")[0] for node in ast.walk(ast.parse("\n".join(lines)))
                                                if isinstance(node, ast.ImportFrom)}
        assert not imported & ours, f"{path.name} imports {imported & ours}"


def test_backbone_initialisation():
    torch.manual_seed(0)
    model = model_cable.GPT(model_cable.GPTConfig())
    assert model.lm_head.weight is model.wte.weight
    assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert sum(p.numel() for p in model.parameters()) == 824608  # "about 0.8M"


def test_scripts_do_not_import_each_other():
    scripts = {"train", "sample", "eval", "plot", "bench", "reproduce"}
    for name in scripts | {"runs"}:
        tree = ast.parse((ROOT / f"{name}.py").read_text())
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not imported & scripts, f"{name}.py imports {imported & scripts}"


# -----------------------------------------------------------------------------
# the commands, in a copy of the repository, on a small corpus

@pytest.fixture(scope="session")
def repo(tmp_path_factory):
    copy = tmp_path_factory.mktemp("repo")
    for pattern in ("*.py", "data/*.py", "kernels/*.py"):
        for path in ROOT.glob(pattern):
            (copy / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy(path, copy / path.relative_to(ROOT))
    rng = np.random.default_rng(0)
    (copy / "notes").mkdir()
    for i in range(12):
        (copy / "notes" / f"{i}.txt").write_text(" ".join(rng.choice(["alpha", "beta", "gamma", "δέλτα"], 400)))
    return copy


def command(repo, *words, code=0, **kwargs):
    """Run a script; its exit code must be `code`. No traceback ever. -> stdout, stderr"""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=repo, capture_output=True, text=True, timeout=300, **kwargs)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr


def losses(folder):
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {r["iter"]: r["loss"] for r in log if "loss" in r}, {r["iter"]: r["val_loss"] for r in log if "val_loss" in r}


def test_train_eval_plot_and_sample_from_one_command(repo):
    out, err = command(repo, "train.py", "--model=cable", "--data", "notes", "--max_iters", 6, "--eval_interval", 3, *TINY_FLAGS)
    run = repo / "out" / "cable-notes-nano"
    assert {p.name for p in run.iterdir()} == {"ckpt.pt", "best.pt", "log.jsonl", "eval.json", "eval.png"}
    assert "iter 6/6 | loss" in out and "tok/s | eta" in out and "val loss" in out
    assert f"python train.py --resume {Path('out') / 'cable-notes-nano'}" not in out
    result = json.loads((run / "eval.json").read_text())
    assert list(result["runs"][0]["perplexity"]) == ["16", "32", "64", "128", "256"] and result["data"]["corpus"] == "notes"
    assert all(1 < p < 400 for p in result["runs"][0]["perplexity"].values())
    assert (run / "eval.png").read_bytes()[:4] == b"\x89PNG"
    assert "32 tokens, up to position 33 (2.1 x the training length)" in err
    # a second run does not touch the first
    command(repo, "train.py", "--model", "rope", "--data", "notes", "--max_iters", 2, "--no-evaluate", "--lr_decay", "linear", *TINY_FLAGS)
    before = (run / "ckpt.pt").read_bytes()
    command(repo, "train.py", "--model", "cable", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS)
    assert (repo / "out" / "cable-notes-nano-2" / "ckpt.pt").exists() and (run / "ckpt.pt").read_bytes() == before
    # many checkpoints, one figure; learned positions show a dash where they end
    command(repo, "train.py", "--model", "learned", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS)
    out, _ = command(repo, "eval.py", *sorted((repo / "out").glob("*-notes-nano")), "--lengths", 8, 40, "--out", repo / "three")
    assert "learned positions end at block_size=16" in out and (repo / "three.png").exists()
    three = json.loads((repo / "three.json").read_text())
    assert [list(r["perplexity"]) for r in three["runs"]] == [["8", "40"], ["8"], ["8", "40"]]
    command(repo, "plot.py", "curves", *sorted((repo / "out").glob("*-notes-nano")), "--out", repo / "curves.png")
    assert (repo / "curves.png").read_bytes()[:4] == b"\x89PNG"
    # sampling: several, from the newest, the same seed twice, a prompt of any bytes from a file, longer than the context
    out, err = command(repo, "sample.py", run, "--prompt", "alpha ", "--num_samples", 2, "--max_new_tokens", 40, "--top_k", 5)
    again, _ = command(repo, "sample.py", run, "--prompt", "alpha ", "--num_samples", 2, "--max_new_tokens", 40, "--top_k", 5)
    assert out == again and out.count("alpha ") >= 2 and "tok/s" in err
    (repo / "prompt.bin").write_bytes(bytes(range(256)) * 2)
    _, err = command(repo, "sample.py", run, "--prompt_file", "prompt.bin", "--max_new_tokens", 3, "--temperature", 0)
    assert "prompt of 512 tokens" in err and "up to position 515" in err
    os.utime(run / "ckpt.pt")
    assert "cable-notes-nano/ckpt.pt" in command(repo, "sample.py", "--max_new_tokens", 1)[1]


def test_a_task_from_training_to_figures(repo):
    """Flip-flop: scores in the log and with intervals in the JSON, the figures, the maps; learned positions end, and say so."""
    tiny = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --eval_iters 2 --log_interval 2 --device cpu".split()
    out, _ = command(repo, "train.py", "--model", "tra", "--data", "flipflop", "--max_iters", 4, "--eval_interval", 2, *tiny)
    run = repo / "out" / "tra-flipflop-nano"
    assert {p.name for p in run.iterdir()} == {"ckpt.pt", "best.pt", "log.jsonl", "eval.json", "eval.png"}
    assert "exact_match" in out and "$ python eval.py" in out and "sample.py" not in out
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [sorted(r["scores"]) for r in log if "scores" in r] == [["dense", "iid", "sparse"]] * 2
    result = json.loads((run / "eval.json").read_text())
    for by_metric in result["runs"][0]["scores"]["16"].values():
        assert all(0 <= m["low"] <= m["value"] <= m["high"] <= 1 for m in by_metric.values())
    command(repo, "train.py", "--model", "learned", "--data", "flipflop", "--max_iters", 2, "--no-evaluate", *tiny)
    out, _ = command(repo, "eval.py", run, repo / "out" / "learned-flipflop-nano", "--lengths", 16, 40, "--sequences", 30, "--out", "tasks")
    assert "learned positions end at block_size=16" in out and (repo / "tasks.png").exists()
    command(repo, "eval.py", run, "--lengths", 16, 40, "--sequences", 30, "--out", "again")
    both, again = (json.loads((repo / f"{name}.json").read_text())["runs"][0]["scores"] for name in ("tasks", "again"))
    assert both == again and list(both) == ["16", "40"]
    command(repo, "train.py", "--resume", run, "--max_iters", 6, "--no-evaluate")
    drawings = [("maps", run, "--split", "dense", "--out", "m.png"), ("steps", run, run, "--length", 30, "--out", "s.png"),
                ("errors", run, repo / "out" / "learned-flipflop-nano", "--out", "e.png"), ("scores", "tasks.json", "--out", "t.png")]
    with ThreadPoolExecutor(2) as pool:
        for words, _ in zip(drawings, pool.map(lambda words: command(repo, "plot.py", *words), drawings)):
            assert (repo / words[-1]).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["label"])  # it has what is hardest to resume: draws of its own, besides dropout
def test_a_resumed_run_equals_an_uninterrupted_one(repo, name):
    """Interrupted by Ctrl-C in the middle, and gone on with: the same losses, to the last digit, dropout and label draws included."""
    flags = ["--model", name, "--data", "notes", "--max_iters", 60, "--eval_interval", 20, "--no-evaluate", "--dropout", 0.1,
             "--gradient_accumulation_steps", 2, "--bema", *TINY_FLAGS]
    command(repo, "train.py", *flags, "--out_dir", f"out/whole-{name}")
    out = repo / "out" / f"broken-{name}"
    process = subprocess.Popen([sys.executable, "train.py", *map(str, flags), "--out_dir", str(out)], cwd=repo, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:
        if line.startswith("iter 7/"):
            process.send_signal(signal.SIGINT)
            break
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "go on with: python train.py --resume" in rest
    stopped = torch.load(out / "ckpt.pt", weights_only=True)["iter"]
    assert 7 <= stopped < 60
    with open(out / "log.jsonl", "a") as f:  # a kill leaves lines that the checkpoint does not know
        f.write(json.dumps(dict(iter=stopped + 1, loss=99.0)) + "\n")
    command(repo, "train.py", "--resume", out, "--no-evaluate")
    assert losses(out) == losses(repo / "out" / f"whole-{name}")
    a, b = (torch.load(repo / "out" / f"{x}-{name}" / "ckpt.pt", weights_only=True) for x in ("whole", "broken"))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"]) and a["best_val_loss"] == b["best_val_loss"]
    assert all(torch.equal(a["bema"][w][k], b["bema"][w][k]) for w in ("start", "ema") for k in a["bema"][w])
    # once more on the finished run: nothing to do, nothing lost; and further, when asked
    command(repo, "train.py", "--resume", out, "--no-evaluate")
    command(repo, "train.py", "--resume", out, "--no-evaluate", "--max_iters", 63)
    assert max(losses(out)[0]) == 63


def test_bema_is_its_formulas(repo, monkeypatch, capsys):
    monkeypatch.chdir(repo)
    flags = ["train.py", "--model", "cable", "--data", "flipflop", "--bema", "--no-evaluate", *TINY_FLAGS]

    def train_on(*more):
        monkeypatch.setattr(sys, "argv", [*flags, *more] if "--resume" not in more else ["train.py", "--no-evaluate", *more])
        train.main()
        return torch.load(repo / more[1] / "ckpt.pt", weights_only=True)
    first = train_on("--out_dir", "out/bema", "--max_iters", "1", "--eta", "0.4", "--kappa", "0.7", "--rho", "3")
    second = train_on("--resume", "out/bema", "--max_iters", "2")
    assert "with the BEMA weights" in capsys.readouterr().out
    loaded, *_ = runs.load_run(repo / "out" / "bema" / "ckpt.pt", torch.device("cpu"), bema=True)
    for n, p in loaded.named_parameters():
        start, theta1, theta2 = first["bema"]["start"][n], first["model"][n], second["model"][n]
        ema = start + (3 + 1) ** -0.7 * (theta1 - start)
        ema = ema + (3 + 2) ** -0.7 * (theta2 - ema)
        close(second["bema"]["ema"][n], ema, 1e-7)
        close(p, ema + (3 + 2) ** -0.4 * (theta2 - start), 1e-7)
        assert torch.equal(start, second["bema"]["start"][n])
    # kappa 0 does not average; a large eta leaves the average alone; weights that stay put stay put
    plain = train_on("--out_dir", "out/kappa0", "--max_iters", "3", "--kappa", "0")
    assert all(torch.equal(plain["bema"]["ema"][n], plain["model"][n]) for n in plain["bema"]["ema"])
    c = dict(rho=10.0, eta=1e3)
    assert all(torch.equal(x, second["bema"]["ema"][n]) for n, x in runs.bema_weights(second["model"], second["bema"], 2, c).items())
    same = dict(start=second["model"], ema=second["model"])
    assert all(torch.equal(x, second["model"][n]) for n, x in runs.bema_weights(second["model"], same, 2, dict(rho=10.0, eta=0.2)).items())


def test_an_interrupted_pair_of_processes_stops_together_and_goes_on(repo):
    """A signal that reaches one process alone stops both at the same step, with a checkpoint."""
    flags = ["--model", "cable", "--data", "notes", "--max_iters", "3000", "--no-evaluate", *TINY_FLAGS, "--out_dir", "out/pair"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    hurt = repo / "hurt.py"  # the second process interrupts itself, right after the two have agreed to go on
    hurt.write_text("""
import os, signal, sys
import torch.distributed as dist
import train
original, calls = dist.all_reduce, []
def all_reduce(*a, **k):
    original(*a, **k)
    calls.append(1)
    if len(calls) == 21 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGINT)
dist.all_reduce = train.dist.all_reduce = all_reduce
train.main()
""")
    done = subprocess.run([*launch[:-1], "hurt.py", *flags], cwd=repo, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert "saved; go on with" in done.stdout and "Connection closed" not in done.stderr, done.stdout + done.stderr
    stopped = torch.load(repo / "out" / "pair" / "ckpt.pt", weights_only=True)["iter"]
    assert 5 < stopped < 3000
    command(repo, *launch[1:], "--resume", "out/pair", "--max_iters", stopped + 2, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert max(losses(repo / "out" / "pair")[0]) == stopped + 2


def test_two_processes_equal_one(repo):
    flags = ["--model", "cable", "--data", "notes", "--max_iters", "8", "--eval_interval", "4", "--no-evaluate", *TINY_FLAGS]
    command(repo, "train.py", *flags, "--out_dir", "out/one")
    command(repo, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "train.py", *flags, "--out_dir", "out/two",
            env=os.environ | {"OMP_NUM_THREADS": "1"})
    (a, va), (b, vb) = losses(repo / "out" / "one"), losses(repo / "out" / "two")
    assert a.keys() == b.keys() and all(a[i] == pytest.approx(b[i], abs=1e-4) for i in a)
    assert va.keys() == vb.keys() == {4, 8} and all(va[i] == pytest.approx(vb[i], abs=1e-4) for i in va)


# -----------------------------------------------------------------------------
# bad input: one clear line, exit code not 0, nothing lost

@pytest.fixture(scope="session")
def trained(repo):
    """Finished tiny runs: of cable and learned on text, of rope on flip-flop."""
    for name, text in (("cable", "notes"), ("learned", "notes"), ("rope", "flipflop")):
        command(repo, "train.py", "--model", name, "--data", text, "--max_iters", 2, "--no-evaluate", *TINY_FLAGS,
                "--out_dir", f"done/{name}")
    return repo / "done"


def complaint(repo, *words):
    """The one line a script says before it exits with an error."""
    out, err = command(repo, *words, code=1)
    lines = [line for line in err.splitlines() if not line.startswith("preparing") and "trained on windows" not in line]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


@pytest.mark.parametrize("flags, says", [
    ("--model cabel", "unknown model 'cabel': did you mean label or cable?"),
    ("--model cable --learning_rat 1", "unknown argument --learning_rat: did you mean --learning_rate?"),
    ("--model rope --log_kernel", "unknown argument --log_kernel"),
    ("--model cable --size nanoo", "unknown size 'nanoo': did you mean nano?"),
    ("--data stdlb", "unknown corpus 'stdlb' (nor is it a file or folder): did you mean stdlib?"),
    ("--max_iters ten", "argument --max_iters: invalid int value: 'ten'"),
    ("--batch_size 0", "--batch_size must be at least 1"),
    ("--learning_rate -1", "--learning_rate must be more than 0"),
    ("--lr_decay cos", "--lr_decay cos: choose from cosine, linear, none"),
    ("--n_layer 0", "--n_layer must be at least 1"),
    ("--n_embd 30 --n_head 4", "n_embd=30 is not divisible by n_head=4"),
    ("--model rope --n_embd 12 --n_head 4", "head size 3 is odd"),
    ("--norm peri", "norm='peri' is not one of pre, post"),
    ("--model postnorm --final_norm", "final_norm is for norm=pre"),
    ("--model postnorm --norm none", "norm='none' is not one of pre, post, peri, peri_init"),
    ("--model postnorm --pe alibi", "pe='alibi' is not one of rope, nope"),
    ("--dropout 2", "--dropout must be in [0, 1)"),
    ("--bema --kappa 2", "--kappa between 0 and 1"),
    ("--bema --eta -1", "--eta 0 or more"),
    ("--step tanh", "step='tanh' is not one of relu, softplus"),
    ("--no-causal", "--no-causal sees the very token it should predict"),
    ("--tokenizer gtp2", "unknown tokenizer 'gtp2': choose bytes or gpt2"),
    ("--dtype float16", "unknown dtype 'float16'"),
    ("--device cuda", "--device cuda: torch"),
    ("--device gpu", "unknown device 'gpu'"),
    ("--data empty.txt", "empty.txt has no text in it"),
    ("--data short.txt", "short.txt is too short: its"),
    ("--dropout nan", "--dropout must be in [0, 1)"),
    ("--model", "argument --model: expected one argument"),
    ("--model label --n_label -5", "n_label must be 0"),
    ("--max_tokens -5", "--max_tokens must be 0 (all) or more"),
    ("--resume nowhere", "no checkpoint at nowhere"),
    ("--data flipflop --block_size 2", "block_size=2 must be even and at least 4"),
    ("--data flipflop --block_size 65", "block_size=65 must be even and at least 4"),
    ("--data flipflop --p_dense 1.5", "p_dense=1.5 must be between 0 and 1"),
    ("--data flip_flop", "unknown corpus 'flip_flop' (nor is it a file or folder): did you mean flipflop?"),
    ("--data flipflop --size tiny", "unknown size 'tiny': choose from nano, paper"),
    ("--data selective_copy --block_size 64", "block_size = 4n + 1 with n >= 2 symbols to copy, not 64"),
    ("--data counting --vars 0", "vars=0 must be between 1 and 5"),
    ("--data counting --max_ops 2", "counting needs max_ops from 3 to 10000"),
    ("--data set_complement --n 1", "set complement needs n >= 2"),
    ("--data set_complement --n 8 --block_size 8", "block_size from 1 to n - 1"),
    ("--data dyck --k 0", "dyck needs k, m and block_size of at least 1"),
    ("--data tomita --language 4", "language=4: choose from 3, 7"),
    ("--data tomita --p_end 1.5", "tomita needs p_switch and p_end between 0 and 1"),
    ("--model cope --P 0", "P=0 must be at least 1"),
    ("--model cope --gates value", "gates='value' is not one of key, val, sep"),
    ("--model cope_alibi --n_head 2 --slopes 1,2,3", "slopes='1,2,3' must be n_head=2 numbers"),
    ("--model cope_alibi --slopes 1,two", "slopes='1,two' must be numbers"),
    ("--model cope --slopes 1,2", "slopes='1,2' must be n_head=2 numbers, with position=alibi"),
    ("--model cope_rope --gates val", "plus=rope turns q and k"),
    ("--model cope_rope --n_embd 12 --n_head 4", "head size 3 is odd"),
    ("--model cope_alibi --slopes nan,1", "slopes='nan,1' must be numbers"),
    ("--model label --n_label 5 --n_embd 16", "tokens do not fit in n_label=5 labels"),
    ("--model diff --n_embd 16 --n_head 8", "head size 2 is not divisible by 4"),
    ("nonsense", "unexpected argument 'nonsense'"),
])
def test_train_says_what_is_wrong(repo, monkeypatch, capsys, flags, says):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (repo / "empty.txt").write_text("")
    (repo / "short.txt").write_text("too short to train on")
    monkeypatch.chdir(repo)
    monkeypatch.setattr(data.text, "PREPARED", repo / "data" / "prepared")
    where = [] if "--data" in flags else ["--data", "notes"]
    small = [] if "--data" in flags or "--n_" in flags else ["--n_head", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--max_iters", "1", *where, *small, "--no-evaluate", *flags.split()])
    with pytest.raises(SystemExit) as e:
        train.main()
    assert str(e.value.code).startswith("error: ") and says in e.value.code and "\n" not in e.value.code


def test_bad_checkpoints_and_contradictions(repo, trained):
    whole = (trained / "cable" / "ckpt.pt").read_bytes()
    (repo / "cut.pt").write_bytes(whole[:len(whole) // 2])
    (repo / "text.pt").write_text("not a checkpoint")
    other = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)
    other["config"]["model"] = "rope"
    torch.save(other, repo / "other.pt")
    for path in ("cut.pt", "text.pt"):
        assert "is not a whole checkpoint" in complaint(repo, "sample.py", path)
    assert "do not fit --model rope" in complaint(repo, "sample.py", "other.pt")
    assert "no checkpoint at nowhere" in complaint(repo, "eval.py", "nowhere")
    assert "--n_layer 3 contradicts the run being resumed, which has n_layer=2" in complaint(
        repo, "train.py", "--resume", trained / "cable", "--n_layer", 3)
    assert "--log_interval must be at least 1" in complaint(repo, "train.py", "--resume", trained / "cable", "--log_interval", 0)
    assert "the run is at iter 2 already" in complaint(repo, "train.py", "--resume", trained / "cable", "--max_iters", 1)
    assert "--model rope contradicts" in complaint(repo, "train.py", "--resume", trained / "cable", "--model", "rope")
    assert "already holds a run" in complaint(repo, "train.py", "--model", "cable", "--data", "notes", "--out_dir", trained / "cable")
    assert (trained / "cable" / "ckpt.pt").read_bytes() == whole


def test_bad_requests(repo, trained, monkeypatch):
    """In this process: most of a command's time is the import of torch."""
    monkeypatch.chdir(repo)
    monkeypatch.setattr(data.text, "PREPARED", repo / "data" / "prepared")
    (repo / "odd.json").write_text('{"runs": []}')
    cases = [
        ("the prompt is empty", "sample.py", trained / "cable", "--prompt", ""),
        ("could not read gone.txt", "sample.py", trained / "cable", "--prompt_file", "gone.txt"),
        ("--max_new_tokens", "sample.py", trained / "cable", "--max_new_tokens", 0),
        ("--temperature", "sample.py", trained / "cable", "--temperature", "nan"),
        ("learned positions end at block_size=16", "sample.py", trained / "learned", "--max_new_tokens", 40),
        ("no length could be scored", "eval.py", trained / "learned", "--lengths", 40),
        ("too few for a window of 99999", "eval.py", trained / "cable", "--lengths", 99999),
        ("unknown split 'tset': did you mean test?", "eval.py", trained / "cable", "--split", "tset"),
        ("--lengths and --sequences must be at least 1", "eval.py", trained / "cable", "--lengths", 0),
        ("is not a file that eval.py", "plot.py", "lengths", trained / "cable" / "log.jsonl"),
        ("is not a file that eval.py", "plot.py", "lengths", "odd.json"),
        ("could not read", "plot.py", "curves", "nowhere"),
        ("use .png, .pdf or .svg", "plot.py", "curves", trained / "cable", "--out", "x.xyz"),
        ("unknown entry 'cable_tabel1': did you mean cable_table1?", "reproduce.py", "cable_tabel1"),
        ("unknown 'decod': did you mean decode?", "bench.py", "decod"),
        ("notes, not on flipflop: it can be scored on", "eval.py", trained / "cable", "--data", "flipflop"),
        ("rope/ckpt.pt was trained on flipflop, not on", "eval.py", trained / "rope", "--data", "notes"),
        ("was trained on", "eval.py", trained / "rope", trained / "cable"),
        ("--sequences is for synthetic tasks; text has --tokens", "eval.py", trained / "cable", "--sequences", 5),
        ("--data counting contradicts the run being resumed, which is on flipflop", "train.py", "--resume",
         trained / "rope", "--data", "counting"),
        ("learned positions end at block_size=16", "plot.py", "maps", trained / "learned"),
        ("--split is for synthetic tasks", "plot.py", "maps", trained / "cable", "--split", "val"),
        ("--length must be 0", "bench.py", "generate", "--length", -5),
        ("unknown 'compield': did you mean compiled?", "bench.py", "attention", "--ways", "compield"),
        ("unknown kernel 'on': choose from auto, off", "eval.py", trained / "cable", "--kernel", "on"),
        ("has no tvd or auc by position", "plot.py", "positions", "odd.json"),
        ("is not a file that eval.py", "plot.py", "trials", "odd.json"),
        ("--tokens is for text; flipflop has --sequences", "eval.py", trained / "rope", "--tokens", 100),
        ("block_size=7 must be even", "eval.py", trained / "rope", "--lengths", 7),
        ("was trained on flipflop, which has no text to write", "sample.py", trained / "rope"),
        ("rope has no step to show, it has attention", "plot.py", "maps", trained / "rope", "--kinds", "step"),
        ("rope has no step to show, it has attention", "plot.py", "steps", trained / "rope"),
        ("has no BEMA weights: it was trained without --bema", "eval.py", trained / "rope", "--bema"),
        ("--layer 5: the model has layers 0 to 1", "plot.py", "maps", trained / "cable", "--layer", 5),
        ("flipflop has no text: leave out --prompt", "plot.py", "maps", trained / "rope", "--prompt", "x"),
        ("no scores by step in there", "plot.py", "errors", trained / "cable"),
        ("no exact_mach in there: did you mean exact_match?", "plot.py", "errors", trained / "rope", "--metric", "exact_mach"),
    ]
    scripts = {f"{m.__name__}.py": m for m in (train, sample, evaluation, plot, bench, reproduce)}
    for says, script, *words in cases:
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        with pytest.raises(SystemExit) as e:
            runs.run(scripts[script].main)
        assert str(e.value.code).startswith("error: ") and says in e.value.code and "\n" not in e.value.code, (says, e.value.code)


def test_a_full_disk_leaves_the_previous_checkpoint(repo, trained):
    before = (trained / "cable" / "ckpt.pt").read_bytes()
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); " \
            "sys.argv = sys.argv[1:]; runpy.run_path('train.py', run_name='__main__')"
    _, err = command(repo, "-c", limit, "train.py", "--resume", trained / "cable", "--max_iters", 5, "--no-evaluate", code=1)
    assert "could not write" in err and ("ckpt.pt" in err or "best.pt" in err)
    assert (trained / "cable" / "ckpt.pt").read_bytes() == before
    assert not list((trained / "cable").glob("*.tmp*"))


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path):
    runs.write_safely(tmp_path / "ckpt.pt", lambda tmp: torch.save({"a": torch.ones(3)}, tmp))
    killed = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import runs
from pathlib import Path
def half(tmp):
    tmp.write_bytes(b"half a checkpoint")
    os.kill(os.getpid(), signal.SIGKILL)
runs.write_safely(Path({str(tmp_path / "ckpt.pt")!r}), half)
"""
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -signal.SIGKILL
    assert torch.equal(torch.load(tmp_path / "ckpt.pt", weights_only=True)["a"], torch.ones(3))


def test_two_runs_started_together_take_two_folders(repo):
    flags = ["train.py", "--model", "alibi", "--data", "notes", "--max_iters", "40", "--no-evaluate", *TINY_FLAGS]
    pair = [subprocess.Popen([sys.executable, *flags, "--seed", str(s)], cwd=repo, stdout=subprocess.DEVNULL) for s in (1, 2)]
    assert [p.wait(timeout=300) for p in pair] == [0, 0]
    for name in ("alibi-notes-nano", "alibi-notes-nano-2"):
        assert len(losses(repo / "out" / name)[0]) == 40


def test_a_small_text_of_ones_own_is_scored_as_far_as_it_goes(repo):
    """Its path is relative and its log damaged: the run is still resumed, from another folder, and scored where it can be."""
    (repo / "small.txt").write_text("some words of my own. " * 60)
    flags = ["--model", "rope", "--data", "small.txt", "--max_iters", 2, *TINY_FLAGS, "--out_dir", "out/small"]
    out, _ = command(repo, "train.py", *flags)
    assert "lengths up to 64 only" in out and "$ python sample.py" in out
    with open(repo / "out" / "small" / "log.jsonl", "ab") as f:
        f.write(b'5\n{"iter": 2, "lo\xff')
    out, _ = command(repo / "notes", repo / "train.py", "--resume", repo / "out" / "small", "--max_iters", 3, "--no-evaluate")
    assert "going on at iter 2" in out and set(losses(repo / "out" / "small")[0]) == {1, 2, 3}


def test_a_changed_corpus_stops_a_resume(repo):
    (repo / "mine").mkdir()
    for i in range(6):
        (repo / "mine" / f"{i}.txt").write_text(f"document {i} " * 60)
    flags = ["--model", "cable", "--data", "mine", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS]
    command(repo, "train.py", *flags, "--out_dir", "done/mine")
    (repo / "mine" / "0.txt").write_text("something else " * 60)
    assert "has changed since" in complaint(repo, "train.py", "--resume", "done/mine", "--max_iters", 4)
    assert "is not what done/mine/ckpt.pt was trained on" in complaint(repo, "eval.py", "done/mine")


def test_an_exploding_loss_is_named(repo):
    for i, interval in enumerate((1, 30)):  # found by the log; or by the save, where the log comes later
        _, err = command(repo, "train.py", "--model", "cable", "--data", "notes", "--max_iters", 40, "--learning_rate", "1e30",
                         "--grad_clip", 0, "--warmup_iters", 1, "--no-evaluate", "--eval_interval", 2, *TINY_FLAGS,
                         "--log_interval", interval, "--out_dir", f"done/nan{i}", code=1)
        assert "try a lower --learning_rate" in err
        assert not (repo / "done" / f"nan{i}" / "ckpt.pt").exists()


# -----------------------------------------------------------------------------
# data

def test_tokenizer_round_trip_on_arbitrary_bytes():
    encoding = data.text.get_encoding("bytes")
    rng = np.random.default_rng(0)
    for text in (bytes(range(256)), rng.integers(0, 256, 5000).astype(np.uint8).tobytes(), b"", "δέλτα <|endoftext|>".encode()):
        ids = data.text.encode(encoding, [text])[0]
        assert ids[0] == encoding.eot_token == 256 and encoding.decode_bytes(ids[1:].tolist()) == text
    assert encoding.encode("δέλτα") == data.text.encode(encoding, ["δέλτα".encode()])[0][1:].tolist()


def test_other_tokenizers_need_utf8_and_round_trip():
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    encoding = tiktoken.Encoding("merges", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    ids = data.text.encode(encoding, [b"the theme", "δ".encode()])
    assert ids[0].tolist()[:3] == [258, 257, 32] and encoding.decode_bytes(ids[0][1:].tolist()) == b"the theme"
    with pytest.raises(ValueError, match="not UTF-8.*--tokenizer bytes"):
        data.text.encode(encoding, [b"\xff\xfe"])


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(data.text, "PREPARED", tmp_path / "prepared")
    return tmp_path


def test_text_is_split_by_document(prepared):
    (prepared / "docs").mkdir()
    for i in range(40):
        (prepared / "docs" / f"{i:02}.txt").write_text(f"<{i:02}>" * 50)
    (prepared / "docs" / ".hidden").write_text("no")
    (prepared / "docs" / "picture.png").write_bytes(b"\x89PNG\0\0")
    task = data.text.Task(data=str(prepared / "docs"), block_size=8)
    found = {}
    for s in task.splits:
        ids = task.tokens(s).tolist()
        assert ids[0] == 256 and len(ids) == 201 * ids.count(256)  # every document whole, after its end-of-text
        found[s] = {bytes(ids[a + 1:a + 5]) for a, t in enumerate(ids) if t == 256}
    assert sum(map(len, found.values())) == 40 and len(set.union(*found.values())) == 40
    assert len(found["test"]) == len(found["val"]) == 2
    assert task.meta["tokens"] == {s: len(task.tokens(s)) for s in task.splits}
    # a changed document is seen
    (prepared / "docs" / "00.txt").write_text("<new>" * 50)
    assert data.text.Task(data=str(prepared / "docs"), block_size=8).meta["sha256"] != task.meta["sha256"]


def test_a_few_long_documents_are_still_whole_and_max_tokens_is_a_limit(prepared):
    (prepared / "six").mkdir()
    for i in range(6):
        (prepared / "six" / f"{i}").write_text(f"<{i}>" * 200)
    task = data.text.Task(data=str(prepared / "six"), block_size=8)
    assert task.meta["tokens"] == dict(train=2404, val=601, test=601)
    some = data.text.Task(data=str(prepared / "six"), block_size=8, max_tokens=1000)
    assert some.meta["tokens"] == dict(train=900, val=50, test=50)
    assert (some.tokens("val") == task.tokens("val")[:50]).all()
    with pytest.raises(ValueError, match="--max_tokens must be 0"):
        data.text.prepare(str(prepared / "six"), "bytes", -5)


def test_one_file_is_cut_by_position(prepared):
    (prepared / "one.txt").write_bytes(bytes(range(200)) * 10)
    task = data.text.Task(data=str(prepared / "one.txt"), block_size=8)
    assert np.concatenate([task.tokens(s) for s in task.splits]).tolist() == [256, *list(range(200)) * 10]
    assert [len(task.tokens(s)) for s in task.splits] == [1800, 100, 101]


def test_batches_are_windows_and_their_successors(prepared):
    (prepared / "one.txt").write_bytes(bytes(range(250)) * 20)
    task = data.text.Task(data=str(prepared / "one.txt"), block_size=8)
    x, y = task.batch("train", 5, np.random.default_rng(3))
    assert x.shape == y.shape == (5, 8) and x.dtype == y.dtype == np.int64
    assert (x[:, 1:] == y[:, :-1]).all()
    again, _ = task.batch("train", 5, np.random.default_rng(3))
    assert (x == again).all()


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
    assert not list((prepared / "prepared").glob("*"))


class Server(http.server.BaseHTTPRequestHandler):
    body, ranges, breaks = b"", True, False

    def do_GET(self):
        start = int(self.headers["Range"].split("=")[1][:-1]) if self.headers["Range"] and self.ranges else 0
        if start >= len(self.body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.body) - start))
        self.end_headers()
        self.wfile.write(self.body[start:start + 1000] if self.breaks else self.body[start:])

    def log_message(self, *args):
        pass


def test_downloads_go_on_and_are_checked(tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, path = f"http://127.0.0.1:{server.server_port}/x", tmp_path / "x"
    Server.body = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8).tobytes()
    sha = hashlib.sha256(Server.body).hexdigest()
    try:
        Server.breaks = True  # the line breaks every 1,000 bytes: three times in vain
        for n in (1000, 2000, 3000):
            with pytest.raises(ValueError, match="run it again to go on"):
                data.text.download(url, path, sha)
            assert (tmp_path / "x.part").stat().st_size == n and not path.exists()
        Server.breaks = False
        assert data.text.download(url, path, sha).read_bytes() == Server.body
        path.unlink()
        Server.ranges = False  # a server that cannot go on: from the beginning
        (tmp_path / "x.part").write_bytes(b"old" * 9)
        assert data.text.download(url, path, sha).read_bytes() == Server.body
        path.unlink()
        Server.ranges = True
        (tmp_path / "x.part").write_bytes(b"old" * 9)  # another file's beginning
        with pytest.raises(ValueError, match="checksum"):
            data.text.download(url, path, sha)
        assert not path.exists() and data.text.download(url, path, sha).read_bytes() == Server.body
    finally:
        server.shutdown()
        server.server_close()
    path.unlink()
    with pytest.raises(ValueError, match="could not download.*Offline: --data stdlib"):
        data.text.download(url, path, sha)


def test_wikitext_lines_become_articles(monkeypatch):
    lines = ["", " = Valkyria = \n", "", " text one \n", " = = Plot = = \n", " more \n", " = Robert = \n", " text two \n"]
    monkeypatch.setattr(data.text, "hub", lambda *a, split: [{"text": t} for t in lines])
    got = list(data.text.wikitext())
    assert [s for s, _ in got[::3]] == ["train", "val", "test"]
    articles = [t.decode() for s, t in got if s == "train"]
    assert [a.strip().split(" \n")[0] for a in articles if a.strip()] == ["= Valkyria =", "= Robert ="]
    assert "= = Plot = =" in "".join(articles) and "".join(articles) == "".join(lines)


def test_a_hub_corpus_goes_on_where_it_stopped(prepared, monkeypatch):
    """A stream that breaks off twice, with its progress saved after every group, ends as one that never did."""
    class Rows:
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
    clock = iter(range(0, 10**9, 100))
    monkeypatch.setattr(data.text.time, "time", lambda: next(clock))
    breaks = [700, 1500]
    monkeypatch.setattr(data.text, "hub", lambda *a, **k: Rows(breaks))
    for _ in (1, 2):
        with pytest.raises(ValueError, match="broke off"):
            data.text.prepare("fineweb_edu", "bytes")
        breaks.pop(0)
    folder, meta = data.text.prepare("fineweb_edu", "bytes")
    shutil.copytree(folder, prepared / "broken")
    shutil.rmtree(folder)
    _, again = data.text.prepare("fineweb_edu", "bytes")
    assert again["sha256"] == meta["sha256"] and sum(meta["tokens"].values()) > 2000 * 18
    assert 0 < meta["tokens"]["test"] < 0.03 * meta["tokens"]["train"]
    _, some = data.text.prepare("fineweb_edu", "bytes", max_tokens=9000)
    assert some["tokens"]["train"] == 8100 and sum(some["tokens"].values()) <= 9000


def test_missing_datasets_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        next(iter(data.text.wikitext()))


# -----------------------------------------------------------------------------
# the synthetic tasks

def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("split, reads", [("train", 26), ("iid", 26), ("sparse", 3.5), ("dense", 115)])
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
                assert "01"[target[t] - 3] == memory and (t + 1 == 511 or text[t + 1] == memory)
            else:
                assert target[t] == -1
        assert (target[1::2] == -1).all()
    assert (y != -1).sum(1).mean() == pytest.approx(reads, rel=0.06)  # the paper's mean reads in a string
    others = x[:, 2:510:2]
    p = dict(train=0.8, iid=0.8, sparse=0.98, dense=0.1)[split]
    assert (others == 2).mean() == pytest.approx(p, abs=0.01) and (others == 0).mean() == pytest.approx((1 - p) / 2, abs=0.01)
    assert x[:, 1::2].mean() == pytest.approx(3.5, abs=0.02)


@pytest.mark.parametrize("split, blanks", [("train", 16), ("iid", 16), ("dense", 8), ("sparse", 32)])
def test_selective_copy_without_blanks_is_the_output(split, blanks):
    task = data.selective_copy.Task(block_size=65)
    x, y = task.batch(split, 300, rng())
    assert x.shape == y.shape == (300, 32 + blanks)
    for row, target in zip(x, y):
        said, out = row[:16 + blanks], target[target != -1]
        assert (said == 0).sum() == blanks and said[said != 0].tolist() == out.tolist()
        assert row[16 + blanks] == 1 and row[17 + blanks:].tolist() == out[:-1].tolist()  # teacher-forced
        assert (target[:16 + blanks] == -1).all() and len(out) == 16
    assert sorted(set(y.flatten())) == [-1, *range(2, 16)]
    assert (x[:, :16 + blanks] == 0).mean(0).std() < 0.06  # blanks are anywhere


def interpret(words):
    """A counting program, run by a reader that knows nothing of how it was written. Returns the answer; asserts its rules."""
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


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("split", ["train", "iid", "pass100", "pass10"])
def test_counting_programs_replayed(split, n):
    task = data.counting.Task(vars=n, max_ops=40, block_size=162, n_train=300)
    x, y = task.batch(split, 300, rng())
    assert x.shape == y.shape == (300, 162) and x.dtype == np.int64
    lengths, names = [], set()
    for row, target in zip(x, y):
        words = [w for w in task.show(row) if w]
        end = len(words) - 1
        assert (row[end + 1:] == 21).all() and (target != -1).nonzero()[0].tolist() == [end]
        answer, ops = interpret(words)
        assert target[end] - 10 == answer
        lengths.append(ops)
        names |= set(words) & set("abcde")
    assert min(lengths) < 6 and max(lengths) == 40 and np.mean(lengths) == pytest.approx(21.5, abs=2.5) and names == set("abcde"[:n])
    short = data.counting.Task(vars=n, max_ops=40, block_size=20, n_train=300)  # the same programs, their beginnings cut off
    sx, sy = short.batch(split, 300, rng())
    for row, cut, target, cut_target in zip(x, sx, y, sy):
        whole = row[:(row != 21).sum()][-20:]
        assert cut[:len(whole)].tolist() == whole.tolist() and cut_target.max() == target.max()


@pytest.mark.parametrize("pass_weight", [50, 10])
def test_counting_operations_have_their_weights(pass_weight):
    """Lengths are uniform; operations are those of plain drawing and drawing again, replayed here one by one."""
    task, count = data.counting.Task(vars=2, max_ops=30, n_train=0), 20000
    kind, name, value = task.run(count, pass_weight, rng())
    lengths = (kind >= 0).sum(1)
    assert (value <= 10).all() and (value >= 0).any(1).all() and abs(chi_square(np.bincount(lengths - 3), np.ones(28) / 28)) < 4
    g, plain = rng(5), []  # whole programs, written as the docstring says it
    for length in g.integers(3, 31, 4000):
        while True:
            state, ops = [-1, -1], []
            while len(ops) < length:
                what = g.choice(3, p=np.array([pass_weight, 1, 7]) / (pass_weight + 8))
                if what == 2:
                    alive = [v for v in (0, 1) if state[v] >= 0]
                    v = g.choice(alive) if alive else None
                    if v is None or state[v] == 10:
                        continue
                    state[v] += 1
                elif what == 1:
                    v = g.integers(0, 2)
                    state[v] = 0
                ops.append((what, v if what else 0))
            if any(what == 1 for what, _ in ops):
                break
        plain.append(ops)
    for t in (0, 1, 2, 5, 12, 29):  # by place and kind, over the programs that reach it: two samples of one distribution
        ours = np.bincount(kind[lengths > t, t] * 2 + name[lengths > t, t], minlength=6)
        theirs = np.bincount([2 * ops[t][0] + ops[t][1] for ops in plain if len(ops) > t], minlength=6)
        p = (ours + theirs) / (ours + theirs).sum()
        error = np.sqrt(p * (1 - p) * (1 / ours.sum() + 1 / theirs.sum()))
        assert (np.abs(ours / ours.sum() - theirs / theirs.sum()) <= 4 * error + 1e-12).all(), t


def test_training_programs_are_fixed_and_test_programs_new():
    task = data.counting.Task(n_train=50)
    seen = {tuple(row) for row in task.fixed[0]}
    assert {tuple(row) for row in task.batch("train", 200, rng(1))[0]} <= seen
    assert len({tuple(row) for row in task.batch("iid", 200, rng(1))[0]} & seen) < 20
    assert (data.counting.Task(n_train=50).fixed[0] == task.fixed[0]).all()


def chi_square(counts, p):
    """How far counts are from what p says, in standard deviations of the chi-square statistic's own distribution."""
    keep = p > 0
    assert counts[~keep].sum() == 0, "an illegal token was drawn"
    expected = counts.sum() * p[keep]
    return (((counts[keep] - expected) ** 2 / expected).sum() - (keep.sum() - 1)) / math.sqrt(2 * max(keep.sum() - 1, 1))


def test_set_complement():
    task = data.set_complement.Task(n=9, block_size=3)
    for split, T in (("train", 3), ("iid", 3), ("half", 4), ("full", 8)):
        x, y = task.batch(split, 2000, rng())
        assert x.shape == y.shape == (2000, T) and (x[:, 1:] == y[:, :-1]).all()
        assert all(len({*a, b}) == T + 1 for a, b in zip(x, y[:, -1]))  # without repetition
        p = task.target(torch.from_numpy(x))
        for row, target in zip(x[:20], p):
            for t in range(T):
                absent = set(range(9)) - set(row[:t + 1].tolist())
                assert all(target[t, i] == pytest.approx(1 / len(absent) if i in absent else 0) for i in range(9))
    counts = np.bincount(task.batch("train", 20000, rng())[0][:, 0], minlength=9)
    assert abs(chi_square(counts, np.ones(9) / 9)) < 4
    # TVD: 0 for the target itself, |absent| / n too far spread for the uniform distribution over all
    x, y = (torch.from_numpy(a) for a in task.batch("half", 5, rng()))
    for logits, want in ((task.target(x).log(), [0, 0, 0, 0]), (torch.zeros(5, 4, 9), [1 / 9, 2 / 9, 3 / 9, 4 / 9])):
        scores = task.score(logits, x, y)
        close(scores["tvd"][0], torch.full((5,), sum(want)), 1e-5)
        close(scores["tvd_last"][0], torch.full((5,), want[-1]), 1e-5)
        assert scores["tvd"][1].tolist() == [4] * 5


@pytest.mark.parametrize("k, m", [(1, 1), (2, 3), (3, 2)])
def test_dyck_strings_parse_and_have_their_distribution(k, m):
    task = data.dyck.Task(block_size=24, k=k, m=m)
    seen = {}
    for split, T in (("train", 24), ("long", 96)):
        x, y = task.batch(split, 3000 if split == "train" else 50, rng())
        assert x.shape == y.shape == (len(x), T) and (x[:, 0] == 0).all() and (x[:, 1:] >= 2).all()
        p = task.target(torch.from_numpy(x)).numpy()
        assert np.abs(p.sum(-1) - 1).max() < 1e-6
        for row, drawn, target in zip(x, y, p):
            stack = []
            for t in range(T):
                if row[t] >= 2 + k:
                    assert stack.pop() == row[t] - 2 - k
                elif row[t] >= 2:
                    stack.append(row[t] - 2)
                assert len(stack) <= m
                want = np.zeros(2 + 2 * k)  # the spec's three cases
                if not stack:
                    want[1], want[2:2 + k] = 1 / 2, 1 / (2 * k)
                elif len(stack) < m:
                    want[2:2 + k], want[2 + k + stack[-1]] = 1 / (2 * k), 1 / 2
                else:
                    want[2 + k + stack[-1]] = 1
                assert np.abs(target[t] - want).max() < 1e-6
                if split == "train":
                    key = tuple(want)
                    seen.setdefault(key, np.zeros(2 + 2 * k))[drawn[t]] += 1
                assert t + 1 == T or drawn[t] in (row[t + 1], 1)
    for key, counts in seen.items():
        assert abs(chi_square(counts, np.array(key))) < 5


@pytest.mark.parametrize("language, legal", [(3, r"(?!.*(?<!1)1(11)*0(00)*1).*"), (7, "0*1*0*1*")])
def test_tomita_strings_match_their_expression(language, legal):
    """Beginnings of strings of the language, by a regular expression that knows nothing of automata."""
    task = data.tomita.Task(block_size=60, language=language)
    seen = {}
    x, y = task.batch("train", 2000, rng())
    assert x.shape == y.shape == (2000, 60) and task.batch("long", 3, rng())[0].shape == (3, 460)
    p = task.target(torch.from_numpy(x)).numpy()
    assert np.abs(p.sum(-1) - 1).max() < 1e-6 and (p[..., 0] == 0).all()
    logit, positive = task.contrast(torch.from_numpy(p), torch.from_numpy(x))
    symbol = {3: 1, 7: 0}[language]
    assert (logit.numpy() == p[..., 2 + symbol]).all() and (positive.numpy() == (p[..., 2 + symbol] > 0)).all()
    for n, (row, drawn, target) in enumerate(zip(x, y, p)):
        text = "".join(task.show(row[1:]))
        assert re.fullmatch(legal, text)
        if n < 60:
            for t in range(1, 60):
                so_far = text[:t]
                for s in "01":
                    assert (target[t, 2 + int(s)] > 0) == bool(re.fullmatch(legal, so_far + s)), (so_far, s)
                ends = language == 7 or not re.search("(?<!1)1(11)*0(00)*$", so_far)  # an odd run of 0s after an odd run of 1s is not over
                assert (target[t, 1] > 0) == ends
                if (target[t, 2:] > 0).all():
                    assert target[t, 2 + int(so_far[-1])] / target[t, 2:].sum() == pytest.approx({3: 0.8, 7: 0.99}[language], abs=1e-5)
        for t in range(60):
            seen.setdefault(tuple(target[t].round(6)), np.zeros(4))[drawn[t]] += 1
    for key, counts in seen.items():
        assert abs(chi_square(counts, np.array(key, np.float64) / sum(key))) < 5
    ended = (y[:, :] == 1).any(1).mean()
    assert 0.2 < ended < 0.5  # about half by 100


def test_auc_is_the_share_of_pairs():
    g = rng(1)
    logits, positive = g.integers(0, 6, (40, 7)).astype(np.float32), g.random((40, 7)) < 0.4  # with many ties
    positive[:, 3], positive[:, 5] = True, False
    got = evaluation.auc(logits, positive)
    for t in range(7):
        pairs = [(a > b) + (a == b) / 2 for a, p in zip(logits[:, t], positive[:, t]) if p
                 for b, q in zip(logits[:, t], positive[:, t]) if not q]
        assert np.isnan(got[t]) if t in (3, 5) else got[t] == pytest.approx(np.mean(pairs))


def test_distributions_from_training_to_eval(repo):
    """Every task of Post-Norm is trained and scored; the AUC is there where the task has one, undefined positions as null."""
    tiny = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 8 --batch_size 4 --eval_iters 2 --max_iters 2 --no-evaluate".split()

    def train_and_score(name):
        command(repo, "train.py", "--model", "perinorm", "--data", name, *tiny, "--out_dir", f"out/dist-{name}")
        return command(repo, "eval.py", f"out/dist-{name}", "--sequences", 40)[0]
    names = ("set_complement", "dyck", "tomita")
    with ThreadPoolExecutor(2) as pool:
        for name, out in zip(names, pool.map(train_and_score, names)):
            assert "tvd by position" in out and ("auc by position" in out) == (name != "set_complement")
            result = json.loads((repo / "out" / f"dist-{name}" / "eval.json").read_text())["runs"][0]
            assert np.mean(result["tvd"]["8"]["iid"]) == pytest.approx(result["scores"]["8"]["iid"]["tvd"]["value"], rel=1e-5)
            assert 0 < min(result["tvd"]["8"]["iid"]) and max(result["tvd"]["8"]["iid"]) < 1
            if name == "dyck":  # depth 0 only after an even number of brackets
                assert [a is None for a in result["auc"]["8"]["iid"]] == [True, True, False] + [True, False] * 2 + [True]


def test_binned():
    values = np.array([[1.0, np.nan, 3, 5, np.nan], [np.nan, np.nan, 2, 2, 8]])
    got = data.binned(values, [0, 2, 4, 5])
    assert got[0, :2].tolist() == [1, 4] and got[1, 1:].tolist() == [2, 8] and np.isnan([got[0, 2], got[1, 0]]).all()


def test_max_retrieval_task():
    task = data.max_retrieval.Task()
    for split, T in (("train", 16), ("iid", 16), ("64", 64)):
        x, y = task.batch(split, 500, rng())
        assert x.shape == (500, T, 11) and x.dtype == np.float32 and y.dtype == np.int64
        items = (x[..., 0] >= 0).sum(1)
        assert set(items) == set(range(5, 17)) if T == 16 else (items == T).all()
        for row, n, label in zip(x, items, y):
            assert (row[n:] == -1).all() and (row[:n, 1:].sum(1) == 1).all() and (row[:n, 1:].max(1) == 1).all()
            assert row[max(range(n), key=lambda i: row[i, 0]), 1 + label] == 1
    x, y = task.batch("16384", 8, rng())
    assert x.shape == (8, 16384, 11) and abs(x[..., 0].mean() - 0.5) < 0.01
    x, y = task.batch("train", 4000, rng())
    assert abs(chi_square(np.bincount(y, minlength=10), np.ones(10) / 10)) < 4
    logits = torch.eye(10)[torch.from_numpy(y)]
    logits[:1000] = logits[:1000].roll(1, 1)
    assert task.score(logits, x, torch.from_numpy(y))["accuracy"][0].mean() == 0.75
    assert len(task.show(x[0])) == (x[0, :, 0] >= 0).sum()
    start = time.perf_counter()
    items = sum(task.batch("train", 1000, rng(i))[0].shape[0] * 16 for i in range(10))
    assert items / (time.perf_counter() - start) > 3e5  # 1e6 and more where nothing else runs
    for wrong in (dict(classes=1), dict(block_size=4)):
        with pytest.raises(ValueError, match="at least"):
            data.max_retrieval.Task(**wrong)


def test_random_search_draws_from_its_ranges():
    trials = [reproduce.draw_trial(rng(i), peak=3e-2) for i in range(400)]
    ranges = dict(beta1=(0.8, 0.98), beta2=(0.9, 0.9999), weight_decay=(1e-4, 1), grad_clip=(0.1, 10), learning_rate=(1e-4, 3e-2),
                  warmup=(1e-3, 0.1), final=(0, 0.1), eta=(0.1, 1), rho=(1, 1e3), kappa=(0.3, 1))
    assert trials[0].keys() == ranges.keys() and trials[3] == reproduce.draw_trial(rng(3), peak=3e-2)
    for name, (low, high) in ranges.items():
        ys = np.array([t[name] for t in trials])
        assert low <= ys.min() and ys.max() <= high and ys.max() - ys.min() > 0.8 * (high - low), name
    assert all(t["beta1"] < t["beta2"]**0.5 for t in trials)
    assert 0.4 < np.mean([t["final"] == 0 for t in trials]) < 0.6


@pytest.mark.parametrize("panel, scheme", [(dict(data="set_complement", n=8, block_size=3), "peri"), (dict(data="max_retrieval"), "post"),
                                           (dict(data="dyck", block_size=12), "peri_init")])
def test_stacked_trials_equal_the_same_trials_one_by_one(panel, scheme):
    """Against torch's AdamW, clip_grad_norm_ and BEMA's recursion; the stacked trials have other clips, decays and rates each."""
    task, steps = runs.make_task(panel), 25
    trials = [reproduce.draw_trial(rng(i), 1e-2) for i in range(3)]

    def models():
        return [torch.manual_seed(i) and reproduce.small_model(task, scheme) for i in range(3)]

    def batch(step):
        return task.batch("train", 8, rng(step))
    with sdpa_kernel(SDPBackend.MATH):
        logits, theta, bema = reproduce.fit(models(), trials, batch, steps)
    x = torch.from_numpy(task.batch("iid", 4, rng())[0])
    for i, (model, t) in enumerate(zip(models(), trials)):
        decays = [n for n, p in model.named_parameters() if p.dim() == 2 and n not in ("E", "wte.weight")]
        groups = [dict(params=[p for n, p in model.named_parameters() if (n in decays) == yes], weight_decay=t["weight_decay"] * yes)
                  for yes in (True, False)]
        optimizer = torch.optim.AdamW(groups, betas=(t["beta1"], t["beta2"]))
        start = ema = parameters_to_vector(model.parameters()).detach()
        warmup = max(1, round(t["warmup"] * steps))
        for step in range(1, steps + 1):
            a, b = map(torch.from_numpy, batch(step))
            out = model(a)
            F.cross_entropy((out[0] if isinstance(out, tuple) else out).flatten(0, -2), b.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), t["grad_clip"])
            for group in optimizer.param_groups:
                group["lr"] = t["learning_rate"] * min(step / warmup, t["final"] + (1 - t["final"]) * (steps - step) / (steps - warmup))
            optimizer.step()
            optimizer.zero_grad()
            beta = (t["rho"] + step)**-t["kappa"]
            ema = (1 - beta) * ema + beta * parameters_to_vector(model.parameters()).detach()
        now = parameters_to_vector(model.parameters()).detach()
        assert (now - start).abs().max() > 1e-3
        close(theta[i], now, 1e-4)
        close(bema[i], ema + (t["rho"] + steps)**-t["eta"] * (now - start), 1e-4)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            out = model(x)
            close(logits(theta, x)[i], out[0] if isinstance(out, tuple) else out, 1e-3)


def test_measure_by_length():
    """Weights that answer with the target itself, with nothing, or with what may not follow: TVD, precision and AUC at every length."""
    task = runs.make_task(dict(data="set_complement", n=6, block_size=5))

    def answers(_, x):
        p = task.target(x)
        return torch.stack((p.log().clamp(min=-50), torch.zeros_like(p), (p == 0).float()))
    lengths, found = reproduce.measure(task, answers, [0, 0, 0], 20, rng())
    assert lengths == [[t, t] for t in range(1, 6)]
    close(torch.from_numpy(found["tvd"][:2]), torch.tensor([[0.0] * 5, [t / 6 for t in range(1, 6)]]), 1e-6)
    assert (found["precision"][0] > 10).all() and (found["precision"][1] == 0).all() and (found["precision"][2] == -1).all()
    task = runs.make_task(dict(data="dyck", block_size=70))
    lengths, found = reproduce.measure(task, lambda _, x: task.target(x)[None].log().clamp(min=-50), [0], 200, rng())
    assert lengths[0] == [1, 2] and lengths[-1] == [69, 70] and np.abs(found["tvd"]).max() < 1e-6
    assert np.isnan(found["auc"][0, 0]) and (found["auc"][0, 1:] == 1).all()  # at first the depth is 0, or 1, everywhere
    task = runs.make_task(dict(data="max_retrieval"))

    def classes(_, x):  # right, and always the first class
        best = x[torch.arange(len(x)), x[..., 0].argmax(1), 1:]
        return torch.stack((best, torch.eye(10)[0].expand_as(best)))
    lengths, found = reproduce.measure(task, classes, [0, 0], 3000, rng(), lengths=[16, 32])
    assert lengths == [[16, 16], [32, 32]] and (found["accuracy"][0] == 1).all() and np.abs(found["accuracy"][1] - 0.1).max() < 0.03


def test_theorem_entry_has_the_specs_numbers():
    found = reproduce.theorem()
    for norm, gaps, tvds in (("none", (10, 2.50, 0.62, 0.32), (0.010, 0.341, 0.978)),
                             ("output", (10, 5.26, 3.48, 14.03), (0.001, 0.029, 0.0))):
        m = found["models"][norm]
        assert [round(m["precision"][n - 2], 2) for n in (2, 8, 32, 63)] == list(gaps)
        assert [round(m["tvd"][n - 2], 3) for n in (8, 32, 63)] == list(tvds)
        assert max(abs(a - b) for a, b in zip(m["formula"], m["precision"])) < (1e-6 if norm == "none" else 1e-3)


def test_random_search_from_one_command(repo, monkeypatch, capfd):
    """Trials in the JSON with their settings, the table, the picture; a second time nothing is trained again."""
    (repo / "results").mkdir(exist_ok=True)
    for name, panels in (("postnorm_fig1", reproduce.set_panels(4, (6, 2)) | reproduce.set_panels(4, (8, 2), exact=True)),
                         ("postnorm_theorem", reproduce.set_panels(4, (8, 2), exact=True)),
                         ("postnorm_fig3", reproduce.dyck_panels(4, (2, 2, 4))), ("postnorm_fig7", reproduce.dyck_panels(4, (2, 2, 4))),
                         ("postnorm_fig4", reproduce.tomita_panels(4, 4, 12)),
                         ("postnorm_fig2", {"small": dict(data="max_retrieval", batch_size=4, longest=32, at=(32, 32))})):
        monkeypatch.setitem(reproduce.SEARCHES[name], "cpu", dict(trials=3, steps=2, panels=panels))
    monkeypatch.setattr(reproduce.theorem, "__defaults__", (8, 10.0, 4))
    monkeypatch.setattr(runs, "ROOT", repo)
    monkeypatch.chdir(repo)

    def script(*words):
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        return plot.main()
    monkeypatch.setattr(runs, "script", script)

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *map(str, words)])
        with pytest.raises(SystemExit) as e:
            reproduce.main()
        out = capfd.readouterr().out
        return e.value.code or out
    assert main("postnorm_fig1", "--trials", 2, "--jobs", 2, "--device", "cpu").count("step 2 of 2") == 8
    result = json.loads((repo / "results" / "postnorm_fig1.cpu.json").read_text())
    assert [p["name"] for p in result["panels"]] == ["n = 6, trained on 2", "n = 8, trained on 2, p* itself"]
    for panel in result["panels"]:
        assert list(panel["schemes"]) == list(model_postnorm.SCHEMES) and panel["lengths"][-1] == [panel["n"] - 1] * 2
        for found in panel["schemes"].values():
            assert [t["hyperparameters"] for t in found["trials"]] == [reproduce.draw_trial(rng([1337, i]), 3e-2) for i in range(2)]
            for t in found["trials"]:
                assert t["finite"] and t["tvd"]["raw"]["test"] == pytest.approx(t["tvd"]["raw"]["by_length"][panel["n"] // 2 - 1], abs=1e-5)
    page = (repo / "results" / "README.md").read_text()
    ys = [t["tvd"]["bema"]["test"] for t in result["panels"][0]["schemes"]["peri"]["trials"]]
    assert "n = 6, trained on 2, at 3 | peri | 2 | 0 |" in page and f"| {np.median(ys):.4f} |" in page
    assert (repo / "results" / "postnorm_fig1.cpu.png").exists()
    assert "step 2" not in main("postnorm_fig1", "--trials", 1, "--device", "cpu")  # two are there
    for entry, metric in (("fig2", "accuracy"), ("fig3", "tvd"), ("fig7", "auc"), ("fig4", "auc"), ("theorem", "precision")):
        assert ("step 2 of 2" in main(f"postnorm_{entry}", "--device", "cpu")) == (entry != "fig7")  # whose trials are fig3's
        result = json.loads((repo / "results" / f"postnorm_{entry}.cpu.json").read_text())
        assert result["metric"] == metric and all(metric in t for p in result["panels"] for f in p["schemes"].values() for t in f["trials"])
    assert "--seeds is not for postnorm_fig1, which has trials" in main("postnorm_fig1", "--seeds", 2)
    assert "--trials is not for cable_table1, which has seeds" in main("cable_table1", "--trials", 2)


def test_positions_are_drawn(repo, tmp_path):
    path = repo / "out" / "dist-dyck" / "eval.json"
    if not path.exists():
        test_distributions_from_training_to_eval(repo)
    for flags in ((), ("--metric", "auc")):
        out, _ = command(repo, "plot.py", "positions", path, *flags)
        assert path.with_suffix(".auc.png" if flags else ".tvd.png").exists()
    assert "has no auc by position, it has tvd" in complaint(
        repo, "plot.py", "positions", repo / "out" / "dist-set_complement" / "eval.json", "--metric", "auc")


@pytest.mark.parametrize("name", ["flipflop", "selective_copy", "counting", "set_complement", "dyck", "tomita"])
def test_every_task_is_reproducible_fast_and_scores_itself(name):
    cls = runs.task_class(name)
    task, exact = cls(**runs.pick(cls, cls.defaults["paper"])), hasattr(cls, "target")
    for split in task.splits:
        x, y = task.batch(split, 8, rng(3))
        assert all((a == b).all() for a, b in zip((x, y), task.batch(split, 8, rng(3))))
        assert 0 <= x.min() and x.max() < task.vocab_size and y.max() < task.vocab_size and y.min() >= (0 if exact else -1)
        assert len(task.show(x[0])) == x.shape[1] and len(set(task.show(range(task.vocab_size)))) == task.vocab_size
        if exact:
            continue
        # perfect answers, then one wrong answer in the first sequence
        y = torch.from_numpy(y)
        logits = F.one_hot(y.clamp(min=0), task.vocab_size).float()
        first = (y[0] != -1).nonzero()[0, 0]
        for wrong in (0, 1):
            for metric, (count, out_of) in task.score(logits, torch.from_numpy(x), y).items():
                assert count.shape == out_of.shape == (8,)
                good = metric == "exact_match"
                assert count.tolist() == [1 - wrong] + [1] * 7 if good else count.tolist() == [wrong] + [0] * 7
                assert out_of.tolist() == ((y != -1).sum(1) if metric in ("glitch_rate", "token_error") else torch.ones(8)).tolist()
            logits[0, first] = -logits[0, first]
    start, seconds, n = rng(1), [], 1000
    for _ in range(3):
        begin = time.perf_counter()
        task.batch(task.splits[1], n, start)
        seconds.append(time.perf_counter() - begin)
    assert n * task.block_size / min(seconds) > 1e6  # 2 million a second on a quiet core


def test_intervals():
    one = np.ones(100)
    p, low, high = evaluation.interval(np.zeros(100), one)  # Wilson's, from his formula: z^2 / (n + z^2)
    assert (p, low) == (0, 0) and high == pytest.approx(1.96**2 / (100 + 1.96**2))
    p, low, high = evaluation.interval(np.repeat([0, 1], 50), one)
    assert p == 0.5 and low == pytest.approx(0.4038, abs=1e-4) and high == pytest.approx(0.5962, abs=1e-4)
    # reads that are wrong together say less than as many independent ones
    for n in range(1, 120):  # no width lost to rounding
        _, low, high = evaluation.interval(np.array([n]), np.array([120]))
        assert high - low > 0.1
    together = evaluation.interval(np.repeat([0, 10], 50), one * 10)
    apart = evaluation.interval(np.repeat([0, 1], 500), np.ones(1000))
    assert together[2] - together[1] == pytest.approx(3.1 * (apart[2] - apart[1]), rel=0.05)
    assert together[1:] == pytest.approx((0.4038, 0.5962), abs=1e-4)
    covered = 0  # over many draws the truth lies inside about 95 times in 100
    for seed in range(400):
        out_of = rng(seed).integers(1, 9, 200)
        bad = rng(seed + 1000).beta(0.3, 2.7, 200)  # strings differ in how hard they are; 0.1 on average
        _, low, high = evaluation.interval(rng(seed + 2000).binomial(out_of, bad), out_of)
        covered += low <= 0.1 <= high
    assert 365 <= covered <= 395


# -----------------------------------------------------------------------------
# training, plotting, reproducing, measuring

def test_learning_rate_schedules():
    c = dict(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110, lr_decay="cosine")
    assert train.get_lr(0, c) == 0.1 and train.get_lr(9, c) == 1.0 and train.get_lr(10, c) == 1.0
    assert train.get_lr(60, c) == pytest.approx(0.55) and train.get_lr(110, c) == train.get_lr(500, c) == pytest.approx(0.1)
    assert train.get_lr(35, c) == pytest.approx(0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)))
    assert train.get_lr(35, c | dict(lr_decay="linear")) == pytest.approx(0.775)
    assert train.get_lr(500, c | dict(lr_decay="none")) == 1.0


def test_decay_groups():
    for name in ("cable", "kerple"):
        model = make(name)
        decayed, rest = train.make_optimizer(model, dict(weight_decay=0.1, learning_rate=1, beta1=0.9, beta2=0.95),
                                             torch.device("cpu")).param_groups
        names = {id(p): n for n, p in model.named_parameters()}
        assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0
        assert all(p.dim() >= 2 for p in decayed["params"]) and all(p.dim() < 2 for p in rest["params"])
        assert len(decayed["params"]) + len(rest["params"]) == len(names)
        assert all(not names[id(p)].startswith("pe.") for p in decayed["params"])  # kerple's p and a do not decay


def test_help_lists_the_models_own_flags(repo):
    cable, _ = command(repo, "train.py", "--model", "cable", "--help")
    rope, _ = command(repo, "train.py", "--help", "--model", "rope")
    assert "--log_kernel" in cable and "K-CABLE" in cable and "--log_kernel" not in rope and "--capped" in rope
    for flag in ("batch_size", "max_iters", "learning_rate", "eval_interval", "out_dir", "tokenizer", "norm", "qk_norm"):
        assert f"--{flag}" in cable
    scripts = ("sample.py", "eval.py", "plot.py", "bench.py", "reproduce.py", "data/text.py")
    with ThreadPoolExecutor(2) as pool:
        for script, (out, _) in zip(scripts, pool.map(lambda script: command(repo, script, "--help"), scripts)):
            assert f"python {script}" in out


def test_seeds_become_one_line():
    def row(model, seed, **config):
        config = dict(seed=seed, out_dir="x", model=model) | config
        return dict(model=model, name=f"{model}-{seed}", iter=5, checkpoint="ckpt.pt", config=config)
    groups = plot.grouped([row("cable", 1), row("cable", 2), row("rope", 1), row("cable", 3, n_layer=9)])
    assert {k: len(v) for k, v in groups.items()} == {"cable": 2, "rope": 1, "cable-3": 1}


def test_reproduce_runs_skips_and_goes_on(repo):
    driver = """
import sys, reproduce
train, rows = sys.argv.pop(1), reproduce.seeds(2, "cable")
reproduce.ENTRIES["cable_table1"]["cpu"] = dict(train="--data notes " + train, eval="--lengths 16 32", rows=rows)
reproduce.ENTRIES["tra_table1"]["cpu"] = dict(train="--data flipflop " + train, eval="--sequences 20",
                                              rows=reproduce.seeds(2, "tra") | reproduce.seeds(1, "cope", flags="--P 9"))
reproduce.main()
"""
    flags = "--max_iters 2 " + " ".join(TINY_FLAGS[:-2])
    words = ("-c", driver, flags, "cable_table1", "--jobs", 2, "--device", "cpu")
    out, _ = command(repo, *words)
    assert out.count("$ python train.py") == 2 and out.count("$ python eval.py") == 2
    result = json.loads((repo / "results" / "cable_table1.cpu.json").read_text())
    assert [(r["model"], r["seed"]) for r in result["runs"]] == [("cable", 1337), ("cable", 1338)]
    page = (repo / "results" / "README.md").read_text()
    ys = [r["perplexity"]["16"] for r in result["runs"]]
    assert f"| cable | 2 | {np.mean(ys):.3f} ± {np.std(ys, ddof=1):.3f} |" in page and "python reproduce.py cable_table1" in page
    assert (repo / "results" / "cable_table1.cpu.png").exists()
    # a run that was killed goes on; a lost evaluation is made again, a half written one too; the other is left alone
    path = repo / "out" / "cable_table1.cpu" / "cable-1338" / "ckpt.pt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["iter"] = 1
    torch.save(checkpoint, path)
    (path.parent.parent / "cable-1337" / "eval.json").write_text('{"comm')
    out, _ = command(repo, *words)
    assert out.count("$ python train.py --resume") == out.count("$ python train.py") == 1 and out.count("$ python eval.py") == 2
    assert torch.load(path, weights_only=True)["iter"] == 2
    # a synthetic task: the paper's numbers beside ours, the scores by step; again: nothing to do
    words = ("-c", driver, flags, "tra_table1", "--device", "cpu")
    command(repo, *words)
    result = json.loads((repo / "results" / "tra_table1.cpu.json").read_text())
    assert [r["label"] for r in result["runs"]] == ["tra", "tra", "cope"] and all(r["history"][-1][0] == 2 for r in result["runs"])
    page = (repo / "results" / "README.md").read_text()
    ys = [100 * r["scores"]["16"]["dense"]["exact_match"]["value"] for r in result["runs"]]
    assert f"| {np.mean(ys[:2]):.2f} ± {np.std(ys[:2], ddof=1):.2f} | 100 |" in page and f"| {ys[2]:.2f} [" in page and "steps.png" in page
    out, _ = command(repo, *words)
    assert "$ python train.py" not in out and "$ python eval.py" not in out
    # another experiment under the same name is not passed off as this one
    _, err = command(repo, "-c", driver, flags + " --p_ignore 0.5", "tra_table1", "--device", "cpu", code=1)
    assert "tra-1337 holds a run with p_ignore=0.8, the entry says 0.5: move it away" in err
    _, err = command(repo, "-c", driver, flags.replace("--max_iters 2", "--max_iters 9"), "tra_table1", "--device", "cpu", code=1)
    assert "holds a run with max_iters=2, the entry says 9" in err
    (repo / "out" / "tra_table1.cpu" / "cope-1337" / "ckpt.pt").write_bytes(b"cut off")
    _, err = command(repo, *words, code=1)
    assert "is not a whole checkpoint" in err
    assert "Table 1" in command(repo, "reproduce.py")[0]


def test_bench_measures_what_it_says(repo):
    command(repo, "bench.py", "train", "decode", "--models", "cable", "--repeats", 1, "--context", 50, "--device", "cpu", "--out", "b.json")
    result = json.loads((repo / "b.json").read_text())
    assert result["train"]["nope"]["of_nope"] == 1 and result["decode"]["nope"]["times_nope"] == 1
    assert result["train"]["cable"]["of_nope"] == pytest.approx(
        result["train"]["cable"]["tok_s"] / result["train"]["nope"]["tok_s"], rel=1e-3)
    assert result["decode"]["cable"]["ms"] > 0
    command(repo, "bench.py", "attention", "--lengths", 70, "--ways", "listing", "--repeats", 1, "--device", "cpu",
            "--out", "a.json")
    rows = json.loads((repo / "a.json").read_text())["attention"]["70"]
    assert rows["sdpa"]["forward_of_sdpa"] == rows["sdpa"]["both_of_sdpa"] == 1 and (repo / "a.png").exists()
    assert rows["cope, gates 0.5: listing"]["both_ms"] > 0 and rows["cope, gates 0.5: listing"]["forward_GB"] >= 0
    for method in bench.METHODS:
        for way in ("plain", "kernel", "listing"):
            made = bench.case(method, way, 40, torch.device("cpu"), torch.float32)
            assert (made is None) == (way == "kernel" or way == "listing" and method != "cope, gates 0.5")
            assert made is None or bench.call(*made, True)()[0].shape == (1, 8, 40, 64)


def test_the_listing_is_cope():
    q, k, v = random_qkv(d=6)
    e = torch.randn(6, 9, dtype=torch.float64)
    close(bench.listing_attention(q, k, v, e), cope_attention(q, k, v, e), 1e-12)


# -----------------------------------------------------------------------------
# kernels: in Triton's interpreter, which must be asked for before Triton is imported, and compiled with no GPU

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not (kernels and INTERPRET), reason="needs Triton and TRITON_INTERPRET=1")
needs_triton = pytest.mark.skipif(not kernels, reason="needs Triton")


@needs_triton
@pytest.mark.skipif(INTERPRET, reason="these are those")
def test_kernels_equal_the_plain_functions():
    """Runs every test named test_interpreted_... in a process of its own."""
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "interpreted"], env=env,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "skipped" not in done.stdout and re.search(r"\b[3-9]\d passed", done.stdout), done.stdout


def heads(B, H, T, d):
    return torch.randn(B, T, H, d).transpose(1, 2)  # a view, as models have it


def gradients(f, inputs, dy):
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = f(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def same_as_plain(fused, plain, inputs, tolerance=1e-5):
    """Output and every gradient against the plain function in float64, at the inputs as they are rounded; relative where large."""
    dy = torch.randn(inputs[0].shape).to(inputs[0].dtype)
    got = gradients(fused, inputs, dy)
    for a, b in zip(got, gradients(plain, [x.double() for x in inputs], dy.double())):
        assert a.shape == b.shape and a.isfinite().all()
        assert (a - b).abs().max() < tolerance * b.abs().max().clamp(min=1)


def steps_of(B, H, T, scale=1.0):
    """Steps, some of them 0, whose sums are exact: float32 and float64 then ask the same question."""
    return (13 * scale * torch.randn(B, H, T)).round() / 64


@interpreted
@pytest.mark.parametrize("Tq, Tk, d, weight, log_kernel", [
    (1, 1, 16, True, False), (7, 7, 64, False, False), (65, 65, 24, True, True), (130, 130, 64, True, False), (257, 257, 64, True, False),
    (2, 70, 80, True, False), (33, 130, 64, True, False), (70, 150, 16, False, True), (100, 100, 128, True, True)])
def test_interpreted_cable(Tq, Tk, d, weight, log_kernel):
    """The gradient is taken to the steps: where two sums are equal, the plain function's |S_i - S_j| has none."""
    torch.manual_seed(0)

    def through(f):
        return lambda q, k, v, step, *g: f(q, k, v, step.relu().cumsum(-1), *g, log_kernel=log_kernel)
    inputs = [heads(1, 2, Tq, d), heads(1, 2, Tk, d), heads(1, 2, Tk, d), steps_of(1, 2, Tk)]
    same_as_plain(through(kernels.cable_attention), through(cable_attention), inputs + [F.softplus(torch.randn(1, 2, Tq))] * weight)


@interpreted
@pytest.mark.parametrize("scale", [0, 1e-3, 30])
def test_interpreted_no_steps_and_huge_steps(scale):
    torch.manual_seed(0)
    S = (steps_of(1, 2, 130).abs() * scale).cumsum(-1)
    inputs = [*(heads(1, 2, 130, 16) for _ in range(3)), S, F.softplus(torch.randn(1, 2, 130))]
    same_as_plain(kernels.cable_attention, cable_attention, inputs, 1e-5 * max(1, scale))  # dg is a sum of S_i - S_j


@interpreted
@pytest.mark.parametrize("Tq, Tk", [(65, 65), (5, 129)])
def test_interpreted_fox(Tq, Tk):
    torch.manual_seed(0)

    def through(f):
        return lambda q, k, v, gate: f(q, k, v, F.logsigmoid(gate).cumsum(-1))
    inputs = [heads(2, 1, T, 32) for T in (Tq, Tk, Tk)] + [torch.randn(2, 1, Tk)]
    same_as_plain(through(kernels.fox_attention), through(fox_attention), inputs)


@interpreted
def test_interpreted_alibi_is_cable_with_equal_steps():
    torch.manual_seed(0)
    alibi = model_baseline.ALiBi(model_baseline.GPTConfig(n_head=2))
    S, g = torch.arange(70.0).expand(1, 2, 70), alibi.m[None, :, None].expand(1, 2, 70)
    same_as_plain(lambda *qkv: kernels.cable_attention(*qkv, S, g), lambda *qkv: attention(*qkv, alibi.bias),
                  [heads(1, 2, 70, 32) for _ in range(3)])


@interpreted
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("log_kernel", [False, True])
def test_interpreted_half_precision(dtype, tolerance, log_kernel):
    torch.manual_seed(0)
    S, g = steps_of(1, 2, 150).abs().cumsum(-1), F.softplus(torch.randn(1, 2, 150))
    inputs = [*(heads(1, 2, 150, 64).to(dtype) for _ in range(3)), S, g]
    same_as_plain(lambda *x: kernels.cable_attention(*x, log_kernel), lambda *x: cable_attention(*x, log_kernel), inputs, tolerance)


@interpreted
def test_interpreted_a_row_moves_no_total():
    """Softmax ignores what is the same along a row, so the gradients of S sum to 0; in bfloat16 this needs the row part of dS."""
    torch.manual_seed(0)
    S = steps_of(1, 2, 300).abs().cumsum(-1).requires_grad_()
    q, k, v = (heads(1, 2, 300, 16).bfloat16() for _ in range(3))
    kernels.cable_attention(q, k, v, S, F.softplus(torch.randn(1, 2, 300))).backward(torch.randn_like(q))
    assert S.grad.sum(-1).abs().max() < 1e-4 < S.grad.abs().max()


@interpreted
@pytest.mark.parametrize("B, H, Tq, Tk, d, P, gates, shift, dtype", [
    (2, 1, 1, 1, 16, 8, "key", 0, torch.float32),
    (1, 2, 65, 65, 24, 8, "key", 0, torch.float32),     # band and tail
    (1, 1, 70, 70, 16, 64, "key", -3, torch.float32),   # gates near 0: all band
    (1, 1, 70, 70, 16, 4, "key", 3, torch.float32),     # gates near 1: hardly any
    (1, 1, 40, 40, 16, 1, "key", 0, torch.float32),     # a table of one
    (1, 1, 33, 130, 80, 16, "val", 0, torch.float32),   # gates from v: gradients add up
    (1, 1, 7, 50, 128, 8, "sep", 0, torch.float32),
    (1, 1, 150, 257, 64, 8, "key", 0, torch.float16),
    (1, 1, 70, 140, 64, 8, "sep", 0, torch.bfloat16)])
def test_interpreted_cope(B, H, Tq, Tk, d, P, gates, shift, dtype):
    torch.manual_seed(0)
    q, k, v, pos_emb = heads(B, H, Tq, d), heads(B, H, Tk, d), heads(B, H, Tk, d), 0.1 * torch.randn(d, P)
    q[..., 0], k[..., 0] = 1, shift * d**0.5  # q . k / sqrt(d) is shifted
    inputs = [q.to(dtype), k.to(dtype), v.to(dtype), pos_emb.to(dtype)] + ([heads(B, H, Tk, d).to(dtype)] if gates == "sep" else [])

    def with_gates(f):
        return (lambda q, k, v, e: f(q, k, v, e, v)) if gates == "val" else f
    same_as_plain(with_gates(kernels.cope_attention), with_gates(cope_attention), inputs,
                  {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype])


@interpreted
@pytest.mark.parametrize("B, H, Tq, Tk, d, bias, dead, stops, dtype", [
    (2, 1, 1, 1, 16, 0, False, False, torch.float32),
    (1, 2, 65, 65, 24, 5, True, False, torch.float32),      # every third row has no survivor; long memory
    (1, 1, 33, 257, 128, -3, False, True, torch.float32),   # short memory: far keys are not read
    (1, 1, 150, 150, 64, -3, False, True, torch.float16),
    (1, 1, 70, 140, 64, 2, True, False, torch.bfloat16)])
def test_interpreted_tra(B, H, Tq, Tk, d, bias, dead, stops, dtype):
    torch.manual_seed(0)
    q, k, v = (heads(B, H, T, d) for T in (Tq, Tk, Tk))
    if dead:
        k, q[:, :, ::3] = k.abs(), -q[:, :, ::3].abs()
    log_decay, (q, k, v) = F.logsigmoid(torch.randn(B, H, Tq) + bias), (x.to(dtype) for x in (q, k, v))
    same_as_plain(kernels.tra_attention, tra_attention, [q, k, v, log_decay],
                  {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype])
    y, _, limit = torch.ops.nanope.tra(*(x.contiguous() for x in (q, k, v)), log_decay)
    assert (limit.amax() > 0) == stops
    assert not dead or (y[:, :, ::3] == 0).all()


@interpreted
def test_interpreted_strides_and_repeats():
    torch.manual_seed(0)
    inputs = [*(heads(1, 2, 40, 16) for _ in range(3)), steps_of(1, 2, 40).relu().cumsum(-1), F.softplus(torch.randn(1, 2, 40))]
    dy = torch.ones(()).expand(1, 2, 40, 16)  # a gradient that is one number, as from y.sum()
    y = gradients(kernels.cable_attention, inputs, dy)
    strange = gradients(kernels.cable_attention, [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs], dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(y, strange))


@interpreted
def test_interpreted_operators_and_compile():
    """They are whole ops to torch.compile, forward and backward, with the choice of path, and give the same numbers every time."""
    torch.manual_seed(0)
    q, k, v = (heads(1, 1, 40, 16) for _ in range(3))
    log_decay, pos_emb, S = F.logsigmoid(torch.randn(1, 1, 40)), torch.randn(16, 4), steps_of(1, 1, 40).relu().cumsum(-1)
    for f, last in ((kernels.cope_attention, pos_emb), (kernels.tra_attention, log_decay), (kernels.cable_attention, S),
                    (kernels.fox_attention, -S)):
        def model(q, *x, f=f):
            return f(q, *x) if kernels.usable(q) else q * 0
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for a, b in zip(gradients(f, [q, k, v, last], q), gradients(compiled, [q, k, v, last], q)):
            assert torch.equal(a, b)
    x = [t.contiguous().requires_grad_() for t in (q, k, v)]
    for f, last in ((kernels.cope_attention, pos_emb), (kernels.tra_attention, log_decay)):  # backward after checkpointing
        q.requires_grad_().grad = None
        checkpoint(f, q, k, v, last, use_reentrant=False).sum().backward()
        assert q.grad.abs().max() > 0
    q = q.detach()
    torch.library.opcheck(torch.ops.nanope.cope.default, (*x, torch.randn(1, 1, 40, 4, requires_grad=True), None))
    torch.library.opcheck(torch.ops.nanope.tra.default, (*x, log_decay.requires_grad_()))
    torch.library.opcheck(torch.ops.nanope.separable.default, (*x, S.requires_grad_(), torch.ones(1, 1, 40, requires_grad=True), False))


@interpreted
@pytest.mark.parametrize("name", ["cable", "cable_nw", "k_cable", "fox", "cope", "cope_val", "cope_sep", "tra"])
def test_interpreted_models_take_their_kernel(name, monkeypatch):
    """The same loss, gradients and cached logits with the kernel and without it."""
    model, idx = make(name, n_embd=64), torch.randint(0, 61, (2, 30))
    found = {}
    monkeypatch.setattr(kernels, "enabled", True)  # and again afterwards
    for choice, says in (("auto", "by Triton kernel"), ("off", "in plain PyTorch (turned off)")):
        assert says in runs.use_kernel(choice, model, torch.device("cpu"), "float32 (asked for)")
        cache = runs.new_cache(model, 30)
        with torch.no_grad():
            pieces = torch.cat([model(part, cache=cache)[0] for part in idx.split([17, 12, 1], 1)], 1)
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        found[choice] = [pieces, loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for a, b in zip(*found.values()):
        close(a, b, 1e-4)


@interpreted
def test_interpreted_why_not(monkeypatch):
    q = torch.zeros(1, 1, 4, 64)
    assert kernels.usable(q) and kernels.why_not(q) == "" and not kernels.usable(q[:, :, :1])
    assert kernels.why_not(q.double()) == "float64"
    assert kernels.why_not(q[..., :12]) == "head size 12 (the kernels take multiples of 8 from 16 to 128)"
    assert kernels.why_not(torch.zeros(1, 1, 4, 64, device="meta")) == "no CUDA"
    monkeypatch.setattr(kernels, "enabled", False)
    assert kernels.why_not(q) == "turned off"
    cable = make("cable", n_embd=32)  # heads of 8: the plain path, and it says why
    assert "(head size 8 (the kernels" in runs.use_kernel("auto", cable, torch.device("cpu"), "float32")
    assert "(this model has no kernel)" in runs.use_kernel("auto", make("rope"), torch.device("cpu"), "float32")


def test_without_triton_the_plain_path_runs(tmp_path):
    """A model file alone in a folder, and the repository where Triton cannot be imported."""
    shutil.copy(ROOT / "model_cable.py", tmp_path)
    alone = "import torch, model_cable as m; print(m.fused, m.GPT(m.GPTConfig(n_layer=1))(torch.zeros(1, 9, dtype=torch.long))[0].shape)"
    done = subprocess.run([sys.executable, "-c", alone], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "None torch.Size([1, 9, 257])\n", done.stderr
    without = "import sys; sys.modules['triton'] = None; import runs, torch; m = runs.make_model(dict(model='tra', n_layer=1)); " \
              "print(runs.use_kernel('auto', m, torch.device('cpu'), 'float32'))"
    done = subprocess.run([sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "attention in plain PyTorch (no Triton)\n", done.stderr


@needs_triton
@pytest.mark.skipif(INTERPRET, reason="the interpreter does not compile")
@pytest.mark.parametrize("target", [80, 90])
def test_kernels_compile_and_forward_spills_nothing(target):
    for d in (64, 128):
        for name, fn, constants in bench.kernel_jobs(d):
            if "forward" in name or d == 64 or target == 80:
                report = bench.kernel_report(fn, constants, target)
                most = 0 if "forward" in name else 260 if target == 80 else 100
                assert report["spill_stores"] <= most and 0 < report["registers"], (name, d, report)
                assert report["shared_bytes"] <= (99 if target == 80 else 227) * 1024, (name, d, report)  # 99 KB: sm_86 and sm_89
