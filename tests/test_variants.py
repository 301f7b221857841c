"""lab: variants that exist for one table."""
import math

import pytest
import torch
from torch.nn import functional as F

import model_tra
from common.attention import plain_function
from lab.variants import learned_hard
from lab.variants import tra as tra_variants
from tests.examples import naive
from tests.helpers import close, make, random_qkv


def counted_layer(x, model, layer):
    """A layer that uses CoPE's count, from its paper's formulas, for every variant (B, T, C)."""
    attn = model.h[layer].attn
    c = model.config
    pos = model.pos_emb[layer % len(model.pos_emb)]
    B, T, C = x.shape
    q, k, v = ((x @ weight.T).view(B, T, c.n_head, -1).transpose(1, 2)
               for weight in attn.c_attn.weight.chunk(3))
    if c.qk_norm:
        q, k = (z / z.square().mean(-1, keepdim=True).sqrt() for z in (q, k))

    def bias(b, h, i, j):
        if c.first and layer > 0:
            return 0.0
        row = q[b, h, i]
        count = torch.sigmoid(k[b, h, j:i + 1] @ row / math.sqrt(q.size(3))).sum().item()
        p = count if c.position == "alibi" else min(count, c.P - 1)  # Eq. 10 has no p_max
        if c.drop and count > c.P - 1:
            return -math.inf
        if c.position == "embedding":
            z, w = row @ pos.pos_emb, p - math.floor(p)
            y = z[math.floor(p)] * (1 - w) + z[math.ceil(p)] * w
        elif c.position == "alibi":
            y = -pos.m[h] * p
        else:
            y = row @ pos.mlp(torch.tensor([p], dtype=torch.float64))
        if c.plus == "relative" and i - j < c.block_size:
            y = y + row @ pos.relative.e[:, i - j]
        if c.plus == "rope":  # another product in place of q . k
            turn = (i - j) * 10000.0 ** (-2 * torch.arange(4, dtype=torch.float64) / 8)
            query, key = (torch.complex(*z.chunk(2)) for z in (row, k[b, h, j]))
            product = (query * key.conj() * torch.polar(torch.ones(4).double(), turn)).real.sum()
            y = y + (product - row @ k[b, h, j]) / math.sqrt(8)
        return y
    return naive(q, k, v, bias).transpose(1, 2).reshape(B, T, C) @ attn.c_proj.weight.T


@pytest.mark.parametrize("name, changes, tables", [
    ("cope_mlp", dict(qk_norm=True, share=False), 2), ("cope_mlp_first", {}, 2),
    ("cope_alibi", {}, 2), ("cope_alibi", dict(slopes="1,.5,2,0.1"), 1),
    ("cope_relative", {}, 1), ("cope_rope", dict(qk_norm=True), 1), ("cope_drop", dict(P=4), 1)])
def test_every_use_of_copes_count_is_its_formula(name, changes, tables):
    layers = []
    model = make(name, block_size=9, **changes).double()
    for block in model.h:
        block.attn.register_forward_hook(lambda _, args, y: layers.append((args[0], y)))
    with torch.no_grad():
        model(torch.randint(0, 61, (1, 14)))
        for layer, (x, y) in enumerate(layers):
            close(y, counted_layer(x, model, layer), 1e-5)
    assert len(layers) == 2 and len(model.pos_emb) == tables


@pytest.mark.parametrize("distance", ["survivors", "plain", "none"])
@pytest.mark.parametrize("drop", [True, False])
def test_the_parts_of_tra(drop, distance):
    """The threshold and the distance, each with and without the other, pair by pair."""
    q, k, v = random_qkv(1, 2, 9, 13, 6)
    q[0, 0, 0] = 0  # no score above 0
    log_decay = F.logsigmoid(torch.randn(1, 2, 9, dtype=torch.float64))

    def bias(b, h, i, j):
        scores = q[0, h, i - 4] @ k[0, h, j:i + 1].T
        far = dict(plain=i + 1 - j, none=0, survivors=(scores > 0).sum().item())[distance]
        return far * log_decay[0, h, i - 4].item() if scores[0] > 0 or not drop else -math.inf
    want = naive(q, k, v, bias)
    close(tra_variants.parts_attention(q, k, v, log_decay, drop, distance), want, 1e-12)
    if drop and distance == "survivors":
        close(plain_function(model_tra)(q, k, v, log_decay), want, 1e-12)


def test_hard_attention_takes_the_best_key_and_has_the_soft_gradient():
    q, k, v = (x.requires_grad_() for x in random_qkv())
    logits = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(37, 37).triu(1).bool(), -torch.inf)
    hard = F.one_hot(logits.argmax(-1), 37).double()
    close(learned_hard.hard_attention(q[:, :, -5:], k, v), (hard @ v)[:, :, -5:], 1e-12)
    soft = (logits / math.sqrt(q.size(3))).softmax(-1)
    weights = torch.randn_like(q)
    ours = torch.autograd.grad((learned_hard.hard_attention(q, k, v) * weights).sum(), (q, k, v))
    by_q_and_k = torch.autograd.grad((soft @ v * weights).sum(), (q, k))
    for a, b in zip(ours, (*by_q_and_k, hard.transpose(-1, -2) @ weights)):
        close(a, b, 1e-12)


@pytest.mark.parametrize("base", ["nope", "alibi", "cable", "tra"])
def test_qk_norm_with_a_scale(base):
    """Scales of 1 are QK-norm without one; any other multiplies the norm of the queries."""
    plain, scaled = make(base, qk_norm=True, norm="pre"), make(f"{base}_qk_scale", norm="pre")
    scaled.gpt.load_state_dict(plain.state_dict() | {
        name.replace("c_attn", "c_attn.c_attn"): w for name, w in plain.state_dict().items()},
        strict=False)
    for block in scaled.h:
        block.attn.c_attn.scale.data.fill_(1)
    x = torch.randint(plain.config.vocab_size, (2, 20))
    close(scaled(x)[0], plain(x)[0], 1e-12)
    heads = scaled.h[0].attn.c_attn
    z = torch.randn(2, 5, 32)
    before = heads(z)
    heads.scale.data = torch.randn(32)
    before[..., :32] *= heads.scale
    close(heads(z), before, 1e-12)
