"""
Hard attention (CoPE, Table 7 and appendix C): a query takes the one key that it likes best. The
weights' gradient is softmax's, straight-through. Positions are learned, as in rivals/classics.py.
"""
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from rivals import classics
from rivals.classics import Cache  # noqa: F401  (decoding asks the module for it)

ROWS = 128  # query rows at a time: without gradients, memory grows with ROWS * T, never T * T


@dataclass
class GPTConfig(classics.GPTConfig):
    pe: str = "learned"  # no other


VARIANTS = dict(learned_hard=dict(pe="learned"))

EQUATION = "attention_ij = 1 for the largest q_i . k_j / sqrt(d), j <= i, else 0"
STEP = classics.STEP


def literal(q, k, v):
    """hard_attention's arguments -> its output, (B, H, Tq, Tk) parts."""
    _, parts = classics.literal(q, k, v)
    soft = parts["attention"]
    hard = F.one_hot(soft.argmax(-1), k.size(2))
    parts["attention"] = hard + (soft - soft.detach())  # hard, with the gradient of soft
    return parts["attention"].to(v.dtype) @ v, parts


def hard_attention(q, k, v):
    """
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    Returns (B, H, Tq, d).
    """
    y, before = [], k.size(2) - q.size(2)
    for a in range(0, q.size(2), ROWS):
        keys = slice(before + a + ROWS)
        y.append(literal(q[:, :, a:a + ROWS], k[:, :, keys], v[:, :, keys])[0])
    return torch.cat(y, dim=2)


class Hard(classics.Learned):
    def attention(self, q, k, v):
        return hard_attention(q, k, v)


class CausalSelfAttention(classics.CausalSelfAttention):
    def forward(self, *args):  # the attention is this file's: common/spy.py asks
        return super().forward(*args)


class GPT(classics.GPT):
    def __init__(self, config):
        super().__init__(config)
        weights = self.state_dict()
        self.pe[0] = Hard(config)
        for layer, block in enumerate(self.h):
            block.attn = CausalSelfAttention(config, layer)
        self.load_state_dict(weights)  # as they start there
