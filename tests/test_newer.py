"""Stick-breaking, PaTH and scalable softmax: PaTH's forms, hard inputs."""
import math

import pytest
import torch
from torch.nn import functional as F

import kernels
from common import names
from common.attention import plain_function
from rivals import fox, path, ssmax, stick
from rivals.path import path_attention
from tests.examples import example, path_formula
from tests.helpers import close, gradients, make, random_qkv


@pytest.mark.parametrize("changes", [{}, dict(conv=1), dict(conv=2)])
def test_the_chunks_of_path_over_a_cache(changes, monkeypatch):
    """In uneven pieces, which chunks cross."""
    model, idx = make("path", **changes).double(), torch.randint(0, 61, (1, 25))
    with torch.no_grad():
        want, cache = model(idx)[0], names.new_cache(model, 8)
        monkeypatch.setattr(path, "CHUNK", 8)
        pieces = [model(part, cache=cache)[0] for part in idx.split([5, 1, 1, 12, 3, 3], 1)]
    close(torch.cat(pieces, 1), want, 2e-6)


def test_the_forms_of_path(monkeypatch):
    """The product, and token by token; in chunks it is what runs."""
    _, _, (q, k, v, w, beta) = example("path", 37, 37)
    keys, rows = k[:, :, :0], []
    for i in range(37):
        along = (keys * w[:, :, i, None]).sum(-1, keepdim=True)
        keys = keys - beta[:, :, i, None, None] * along * w[:, :, i, None]
        keys = torch.cat((keys, k[:, :, i, None]), 2)
        logits = (keys * q[:, :, i, None]).sum(-1) / math.sqrt(6)
        rows.append((logits.softmax(-1)[..., None] * v[:, :, :i + 1]).sum(2))
    token_by_token = torch.stack(rows, 2)
    product = path_formula(q, k, v, w, beta)
    close(token_by_token, product, 1e-12)
    for tokens in (64, 8, 1):
        monkeypatch.setattr(path, "CHUNK", tokens)
        close(path_attention(q, k, v, w, beta), product, 1e-12)
        close(path.keys_after(k, w, beta), keys, 1e-12)


def test_what_ssmax_and_stick_say():
    """Training windows' last rows start as the plain GPT's; a key that takes all hides the rest."""
    model = ssmax.GPT(ssmax.GPTConfig(block_size=24, n_layer=1))
    q, k, v = random_qkv(H=4, Tq=24, Tk=24, dtype=torch.float32)
    with torch.no_grad():
        y = ssmax.ssmax_attention(q, k, v, model.h[0].attn.s)
    close(y[:, :, -1:], F.scaled_dot_product_attention(q[:, :, -1:], k, v), 1e-6)
    q, k, v = random_qkv()
    k[:, :, 20] = 1e5 * q[:, :, 30]  # row 30 takes all of it, and nothing behind
    y, parts = stick.literal(q, k, v)
    assert parts["attention"][:, :, 30, :20].eq(0).all() and y[:, :, 0].eq(0).all()
    close(parts["attention"][:, :, 30].sum(-1), torch.ones(2, 3), 1e-12)


def test_gates_that_start_open():
    """FoX: f = sigmoid(4) for a token of zeros. Stick-breaking: a channel more says the same."""
    for gate_bias in (0.0, 4.0):
        model = fox.GPT(fox.GPTConfig(gate_bias=gate_bias))
        assert all((block.attn.w_f.bias == gate_bias).all() for block in model.h)
    q, k, v = random_qkv(Tq=130, Tk=130)
    one = torch.ones_like(q[..., :1])
    d, dy = q.size(3), torch.randn_like(v)
    longer = torch.cat((q, -4 * math.sqrt(d) * one), 3) * math.sqrt((d + 1) / d)
    want = stick.stick_attention(longer, torch.cat((k, one), 3), v)
    close(stick.literal(q, k, v, 4.0)[0], want, 1e-12)
    close(stick.literal(q, k, v, 4.0)[1]["attention"][0, 0, 1, 0],
          (q[0, 0, 1] @ k[0, 0, 0] / math.sqrt(d) - 4).sigmoid(), 1e-12)
    ways = kernels.cpu_count.stick_attention, stick.stick_attention
    fast, plain = (gradients(lambda *x, f=f: f(*x, 4.0), [q, k, v], dy) for f in ways)
    for a, b in zip(fast, plain):
        close(a, b, 1e-12)
    x = torch.randint(61, (1, 24), generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(make("stick", gate_bias=4.0)(x)[0], make("stick")(x)[0], atol=1e-3)


HARD = dict(equal=lambda q, k: (q, 0 * k + 1), huge=lambda q, k: (100 * q, 100 * k),
            none=lambda q, k: (0 * q, 0 * k))


@pytest.mark.parametrize("case", ["stick", "path", "ssmax"])
@pytest.mark.parametrize("kind", HARD)
def test_gradients_are_finite(case, kind):
    """Keys that are all equal, logits of 1e4; PaTH's directions all equal, too."""
    module, _, args = example(case, 130, 130)
    args[:2] = HARD[kind](*args[:2])
    if "path" in case and kind == "equal":
        args[3] = torch.ones_like(args[3]) / math.sqrt(6)
    given = [x.float().requires_grad_() if torch.is_tensor(x) else x for x in args]
    plain = plain_function(module)
    ways = [plain, kernels.ON_CPU[plain.__name__]] if plain.__name__ in kernels.ON_CPU else [plain]
    for way in ways:
        y = way(*given)
        grads = torch.autograd.grad(y.square().sum(), [x for x in given if torch.is_tensor(x)])
        assert y.isfinite().all() and all(g.isfinite().all() for g in grads)
        close(y, module.literal(*args)[0], 1e-4 if kind != "huge" else math.inf)
