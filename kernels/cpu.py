"""
CABLE and FoX on a CPU, without a bias in memory.

    logit_ij = q_i . k_j / sqrt(d) - g_i (S_i - S_j)

g_i S_i is the same for a whole row and falls out of the softmax. What is left is one more channel,
q' = [q, sqrt(d) g] and k' = [k, S]: plain attention, which torch runs in its fused kernel.
This needs true float32: bfloat16 and TF32 are too coarse for S.
"""
import math

import torch
from torch.nn import functional as F


def column(q, k, v, S, g=None, log_kernel=""):
    """
    cable_attention of model_cable.py. q, k, v (B, H, T, d); S, g (B, H, T).
    Returns None for what it cannot do: fewer queries than keys, half precision (autocast would
    round q' and k', S with them), the log kernel.
    """
    half = q.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu")
    if half or q.size(2) != k.size(2) or log_kernel:
        return None
    d = q.size(3)
    g = S.new_ones(()).expand(q.shape[:3]) if g is None else g
    S = S - S[:, :, S.size(2) // 2, None].detach()  # half the range keeps digits
    q = torch.cat((q, math.sqrt(d) * g[..., None]), -1)
    k = torch.cat((k, S[..., None]), -1)
    v = F.pad(v, (0, 1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(d))
    return y[..., :-1]


def fox_column(q, k, v, F_):
    """fox_attention of model_fox.py: CABLE with S = -F and no weight."""
    return column(q, k, v, -F_)
