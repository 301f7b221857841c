"""
K-CABLE: CABLE whose bias grows with the logarithm of the distance, for shallow models. The paper's
-log(b^2 + 1) has two readings, with b_ij = S_i - S_j:

    outside    -g_i log(1 + b_ij^2)      as in the authors' later code
    inside     -log(1 + (g_i b_ij)^2)

Read model_cable.py first.
"""
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

import model_cable
from lab.variants import heads, joined, replace_attention
from model_cable import Cache  # noqa: F401  (decoding asks the module for it)


@dataclass
class GPTConfig(model_cable.GPTConfig):
    log_kernel: Literal["outside", "inside"] = "outside"  # where g is, of the logarithm


VARIANTS = dict(k_cable=dict(log_kernel="outside"), k_cable_inside=dict(log_kernel="inside"))

EQUATION = dict(
    k_cable="logit_ij = q_i . k_j / sqrt(d) - g_i log(1 + (S_i - S_j)^2),  S = cumsum(a)",
    k_cable_inside="logit_ij = q_i . k_j / sqrt(d) - log(1 + (g_i (S_i - S_j))^2),  S = cumsum(a)")
STEP = model_cable.STEP


def literal(q, k, v, S, g=None, log_kernel="outside"):
    """As the paper writes it, T x T: arguments as below -> its output, (B, H, Tq, Tk) parts."""
    _, parts = model_cable.literal(q, k, v, S)
    seen = torch.ones_like(parts["qk"], dtype=torch.bool).tril(k.size(2) - q.size(2))  # j <= i
    g = 1 if g is None else g[..., None]
    if log_kernel == "outside":
        bias = -g * torch.log1p(parts["distance"]**2)
    else:
        bias = -torch.log1p((g * parts["distance"])**2)
    attention = (parts["qk"] + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, parts | dict(bias=bias, attention=attention)


def k_cable_attention(q, k, v, S, g=None, log_kernel="outside"):
    """
    The same: here plainness comes before speed.
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    S (B, H, Tk), the cumulative sum of the steps, and g (B, H, Tq), None for 1, are float32 or
    float64. Returns (B, H, Tq, d).
    """
    return literal(q, k, v, S, g, log_kernel)[0]


class CausalSelfAttention(model_cable.CausalSelfAttention):
    def forward(self, x, cache):
        q, k, v = heads(self, x, cache)
        a = self.step(self.w_c(x).float()).transpose(1, 2)                  # (B, H, T)
        g = F.softplus(self.w_s(x).float()).transpose(1, 2) if self.w_s else None
        if cache is not None:
            a = cache.append(f"a{self.layer}", a)
        y = k_cable_attention(q, k, v, a.cumsum(-1), g, self.config.log_kernel)
        return joined(self, y)


class GPT(model_cable.GPT):
    def __init__(self, config):
        super().__init__(config)
        replace_attention(self, CausalSelfAttention)
