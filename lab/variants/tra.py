"""
TRA taken apart: its threshold and its distance, each without the other. Which does the work?

    logit_ij = q_i . k_j / sqrt(d) + distance_ij log delta_i

    drop      keep only the keys with q_i . k_j > 0, as TRA does, or all of them
    distance  survivors: keys with q . k > 0 from j to i (TRA's C); plain: i - j + 1; none: 0

    tra_plain       drop, plain            the threshold, and an ordinary distance
    tra_kept        no drop, survivors     the contextual distance, and no threshold
    tra_no_decay    drop, none             the threshold alone
    tra_decay       no drop, plain         neither: ALiBi with a slope for each query

Read model_tra.py first.
"""
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

import model_tra
from lab.variants import heads, joined, replace_attention
from model_tra import Cache  # noqa: F401  (decoding asks the module for it)


@dataclass
class GPTConfig(model_tra.GPTConfig):
    drop: bool = True  # remove the keys that do not pass the threshold
    distance: Literal["survivors", "plain", "none"] = "survivors"  # what is counted


VARIANTS = dict(tra_plain=dict(distance="plain"), tra_kept=dict(drop=False),
                tra_no_decay=dict(distance="none"), tra_decay=dict(drop=False, distance="plain"))

EQUATION = ("logit_ij = q_i . k_j / sqrt(d) + distance_ij log delta_i; "
            "with drop only where q_i . k_j > 0")
STEP = "1 if q_i . k_k > 0, or 1, or 0"


def literal(q, k, v, log_decay, drop=True, distance="survivors"):
    """parts_attention's arguments -> its output, (B, H, Tq, Tk) parts."""
    qk = q @ k.transpose(-1, -2) / q.size(3)**0.5
    seen = torch.ones_like(qk, dtype=torch.bool).tril(k.size(2) - q.size(2))  # j <= i
    passed = (qk > 0) & seen
    step = dict(survivors=passed, plain=seen, none=seen & False)[distance].to(log_decay.dtype)
    far = step.flip(-1).cumsum(-1).flip(-1)  # summed from j to i
    kept = passed if drop else seen
    bias = (far * log_decay[..., None]).masked_fill(~kept, float("-inf"))
    attention = (qk + bias).masked_fill(~kept, -1e30).softmax(-1) * kept  # no survivor: 0
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention, step=step, distance=far)


def parts_attention(q, k, v, log_decay, drop=True, distance="survivors"):
    """
    The same: here plainness comes before speed.
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    log_decay (B, H, Tq), log delta. Returns (B, H, Tq, d).
    """
    return literal(q, k, v, log_decay, drop, distance)[0]


class CausalSelfAttention(model_tra.CausalSelfAttention):
    def forward(self, x, cache):
        q, k, v = heads(self, x, cache)
        log_decay = F.logsigmoid(self.w_f(x).float()).transpose(1, 2)       # (B, H, T)
        y = parts_attention(q, k, v, log_decay, self.config.drop, self.config.distance)
        return joined(self, y)


class GPT(model_tra.GPT):
    def __init__(self, config):
        super().__init__(config)
        replace_attention(self, CausalSelfAttention)
