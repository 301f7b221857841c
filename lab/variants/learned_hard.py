"""
Hard attention (CoPE, Table 7 and appendix C): a query takes the one key that it likes best. The
weights' gradient is softmax's, straight-through. Positions are learned, as in rivals/classics.py.
"""
from torch.nn import functional as F

from lab.variants import heads, joined, replace_attention
from rivals import classics
from rivals.classics import Cache, GPTConfig  # noqa: F401  (asked for here)

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
    return literal(q, k, v)[0]


class CausalSelfAttention(classics.CausalSelfAttention):
    def forward(self, x, cache, pe):
        return joined(self, hard_attention(*heads(self, x, cache)))


class GPT(classics.GPT):
    def __init__(self, config):
        super().__init__(config)
        replace_attention(self, CausalSelfAttention)
