"""
CoPE's count put to other uses (its Tables 5, 7 and 8): an MLP or ALiBi instead of the table of
positions, relative embeddings or RoPE beside it. The count p_ij is model_cope.py's.

    mlp        q_i . MLP(p_ij)                 scalar -> 64 -> d, no interpolation; or in the first
                                               layer alone, the others without any position
    alibi      -m_h p_ij, p not cut off        slopes m_h given, or learned, from 0
    relative   q_i . e[p_ij] + q_i . r[i - j]  the gates see q . k alone
    rope       q_i . e[p_ij], q and k turned   only for their product: gates and e see them unturned
    drop       q_i . e[p_ij], p <= P - 1       ours: keys that are farther have no weight at all

What differs from the paper: Eq. 10 prints +m p, which for the m it lists would favour far keys; it
does not say what position the layers without the MLP have, here none, nor what of CoPE sees RoPE,
here nothing. Gates see keys alone. Read model_cope.py first.
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn

import model_cope
from lab.variants import heads, joined, replace_attention
from model_cope import Cache  # noqa: F401  (decoding asks the module for it)
from rivals import classics, rope


@dataclass
class GPTConfig(model_cope.GPTConfig):
    position: Literal["embedding", "mlp", "alibi"] = "embedding"  # from a count to a bias
    plus: Literal["none", "relative", "rope"] = "none"  # beside the count
    slopes: str = ""     # alibi: n_head numbers, as 1,0.5,0.25,0.125; empty: learned
    first: bool = False  # position in the first layer alone
    drop: bool = False   # keys whose count is past the table's end have no weight


VARIANTS = dict(cope_mlp=dict(position="mlp"), cope_mlp_first=dict(position="mlp", first=True),
                cope_alibi=dict(position="alibi"),
                cope_relative=dict(plus="relative"), cope_rope=dict(plus="rope"),
                cope_drop=dict(drop=True))

# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs

EQUATION = dict.fromkeys(
    VARIANTS, "logit_ij = q_i . k_j / sqrt(d) + bias(q_i, p_ij),  p_ij = sum of steps from j to i")
EQUATION["cope_rope"] = ("logit_ij = R_i q_i . R_j k_j / sqrt(d) + q_i . e[p_ij],  p_ij = sum of "
                         "steps from j to i")
STEP = model_cope.STEP


def literal(q, k, v, position):
    """counting_attention's arguments -> its output, (B, H, Tq, Tk) parts."""
    float_type = torch.promote_types(q.dtype, torch.float32)  # bfloat16 is too coarse to count in
    qk = q @ k.transpose(-1, -2) / math.sqrt(q.size(3))
    seen = torch.ones_like(qk, dtype=torch.bool).tril(k.size(2) - q.size(2))  # j <= i
    step = qk.to(float_type).sigmoid() * seen
    distance = step.flip(-1).cumsum(-1).flip(-1).clamp(max=position.most)
    bias = position(q, distance)
    if position.turns:
        q_turned, k_turned = turned(q, k)
        qk = q_turned @ k_turned.transpose(-1, -2) / math.sqrt(q.size(3))
    attention = (qk + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention, step=step, distance=distance)


def counting_attention(q, k, v, position):
    """
    The same: here plainness comes before speed. With RoPE it is cope_attention's, in twice the
    channels: logits are of [q turned, q] and [k turned, 0], gates of [q turned, q] and [0, k].
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    position: a Position. Returns (B, H, Tq, d).
    """
    if not position.turns:
        return literal(q, k, v, position)[0]
    # sqrt(2), as it divides by the root of 2 d
    q_turned, k_turned = turned(q, k)
    e, none, root = position.pos_emb, torch.zeros_like(k), math.sqrt(2)
    y = model_cope.cope_attention(
        root * torch.cat((q_turned, q), -1), torch.cat((k_turned, none), -1),
        torch.cat((v, none), -1), torch.cat((torch.zeros_like(e), e)) / root,
        torch.cat((none, k), -1))
    return y[..., :v.size(3)]


def turned(q, k):
    """q and k, turned by RoPE to their positions."""
    Tq, Tk = q.size(2), k.size(2)
    cos, sin = rope.Turn("", q.size(3), Tk, Tk).waves(torch.arange(Tk))
    return rope.turned(q, (cos[Tk - Tq:], sin[Tk - Tq:])), rope.turned(k, (cos, sin))


class Position(nn.Module):
    """
    From counts p (B, H, n, m) and queries q (B, H, n, d) to the bias (B, H, n, m). use: a
    config.position, or none, of a layer whose logits are q . k alone.
    """
    def __init__(self, config, use):
        super().__init__()
        d = config.n_embd // config.n_head
        self.use, self.turns = use, config.plus == "rope"
        self.most = config.P - 1
        if use == "embedding":
            self.pos_emb = nn.Parameter(torch.zeros(d, config.P))
        if use == "mlp":
            self.mlp = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, d))
        if use == "alibi" and config.slopes:
            slopes = [float(m) for m in config.slopes.split(",")]
            if len(slopes) != config.n_head:
                raise ValueError(f"slopes={config.slopes!r} must be n_head={config.n_head} numbers")
            self.register_buffer("m", torch.tensor(slopes), persistent=False)
        elif use == "alibi":
            self.m = nn.Parameter(torch.zeros(config.n_head))
        if use == "alibi" or config.drop:  # Eq. 10 has no p_max
            self.most = math.inf
        self.relative = None
        if config.plus == "relative":
            self.relative = classics.Relative(classics.GPTConfig(
                block_size=config.block_size, n_embd=config.n_embd, n_head=config.n_head))

    def forward(self, q, p):
        bias = torch.zeros_like(p)
        if self.use == "embedding":
            bias = model_cope.interpolate(q @ self.pos_emb.to(q.dtype), p)
            bias = bias.masked_fill(p > self.pos_emb.size(1) - 1, float("-inf"))  # if p is not cut
        if self.use == "alibi":
            bias = -self.m[:, None, None] * p
        if self.use == "mlp":
            with torch.autocast(p.device.type, enabled=False):  # bfloat16 would round the counts
                bias = mlp_bias(self.mlp, q.to(p.dtype), p)
        if self.relative is not None:
            j = torch.arange(p.size(3), device=p.device)
            bias = bias + self.relative.bias(q, j[-p.size(2):, None], j)
        return bias


def mlp_bias(mlp, q, p):
    """
    q_i . MLP(p_ij) with no more than a number for a pair. Of one number, a layer of ReLUs is a line
    between its knots -b / a; so each query has 65 lines, and a pair looks up its own.
    q (B, H, n, d), p (B, H, n, m) -> (B, H, n, m)
    """
    a, b = mlp[0].weight[:, 0], mlp[0].bias
    knots, order = torch.where(a == 0, math.inf, -b / a).detach().sort()
    terms = (q @ mlp[2].weight) * torch.stack((a, b))[:, None, None, None]  # (2, B, H, n, 64)
    begin = (terms * ((a < 0) | (a == 0) & (b > 0))).sum(-1, keepdim=True)  # left of every knot
    lines = torch.cat((begin, begin + (terms * a.sign())[..., order].cumsum(-1)), dim=-1)
    slope, offset = lines                                                   # (B, H, n, 65)
    line = torch.bucketize(p.detach(), knots)
    offset = offset + q @ mlp[2].bias[:, None]
    return slope.gather(-1, line) * p + offset.gather(-1, line)


class CausalSelfAttention(model_cope.CausalSelfAttention):
    def forward(self, x, cache, position):
        return joined(self, counting_attention(*heads(self, x, cache), position))


class GPT(model_cope.GPT):
    """model_cope.py's, with a Position for every table."""
    def __init__(self, config):
        if config.gates != "key" or config.drop and config.P < 2:  # a query's own key stays
            raise ValueError(f"gates={config.gates} must be key, and with drop P at least 2")
        if config.plus == "rope" and (config.position != "embedding" or config.drop or config.first
                                      or config.n_embd // config.n_head % 2):
            raise ValueError("plus=rope: not with position, first or drop, nor with odd heads")
        super().__init__(config)
        replace_attention(self, CausalSelfAttention)
        shared = config.share and (config.position != "alibi" or config.slopes)
        uses = [config.position] * (1 if shared else config.n_layer)
        if config.first:
            uses = [config.position] + ["none"] * (config.n_layer - 1)
        self.pos_emb = nn.ModuleList(Position(config, use) for use in uses)
        for module in self.pos_emb.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
