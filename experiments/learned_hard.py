"""
Hard attention (CoPE, Table 7 and appendix C): a query takes the one key that it likes best. The
weights' gradient is softmax's, straight-through. Positions are model_classics.py's, learned unless
pe says otherwise.
"""
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import model_classics
from model_classics import Cache  # noqa: F401  (decoding asks the module for it)

ROWS = 128  # query rows at a time: without gradients, memory grows with ROWS * T, never T * T


@dataclass
class GPTConfig(model_classics.GPTConfig):
    pe: str = "learned"  # learned sinusoidal rope alibi t5 kerple fire relative label


VARIANTS = dict(learned_hard=dict(pe="learned"))

EQUATION = "attention_ij = 1 for the largest q_i . k_j / sqrt(d) + bias(i, j), j <= i, else 0"
STEP = model_classics.STEP


def literal(q, k, v, bias=None):
    """hard_attention's arguments -> its output, (B, H, Tq, Tk) parts."""
    _, parts = model_classics.literal(q, k, v, bias)
    soft = parts["attention"]
    hard = F.one_hot(soft.argmax(-1), k.size(2))
    parts["attention"] = hard + (soft - soft.detach())  # hard, with the gradient of soft
    return parts["attention"].to(v.dtype) @ v, parts


def hard_attention(q, k, v, bias=None):
    """
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    bias: None, or a function of query rows, i (n, 1) and j (m,) -> (1 or B, H, n, m).
    Returns (B, H, Tq, d).
    """
    y, before = [], k.size(2) - q.size(2)
    for a in range(0, q.size(2), ROWS):
        b = min(a + ROWS, q.size(2))
        y.append(literal(q[:, :, a:b], k[:, :, :before + b], v[:, :, :before + b], bias)[0])
    return torch.cat(y, dim=2)


class CausalSelfAttention(model_classics.CausalSelfAttention):
    def forward(self, x, cache, pe, pos):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        if self.qk_norm:  # .to: autocast would leave them in float32
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
        q, k = pe.rotate(q, k, pos)
        if cache is not None:
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
        y = hard_attention(q, k, v, pe.bias)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPT(model_classics.GPT):
    def __init__(self, config):
        super().__init__(config)
        for layer, block in enumerate(self.h):
            soft, block.attn = block.attn, CausalSelfAttention(config, layer)
            block.attn.load_state_dict(soft.state_dict())  # its initial weights
