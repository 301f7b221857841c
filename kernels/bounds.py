"""
Which keys have decayed so far that they do not matter: for CABLE, FoX and ALiBi on a CPU. On a GPU
the kernel finds them itself (separable_forward).
"""
import math

import torch

LONG = 1024  # keys: up to here no key is left out, and no row sees anything of a later token


@torch.no_grad()
def first_keys(q, k, S, g):
    """
    The first key that can matter to each row, (B, H, Tq). The bound is like that of FoX's pruning
    (Lin et al., 2025, arXiv 2504.06949). No logit of row i is larger than

        |q_i| max|k_j| / sqrt(d) - g_i (S_i - S_j)

    and where no step is negative this falls with the distance. Keys for which it is 17 + ln T below
    the logit of the row's own key weigh less, together, than float32 rounding.
    """
    Tq, Tk, scale = q.size(2), k.size(2), 1 / math.sqrt(q.size(3))
    own = slice(Tk - Tq, Tk)
    q, k = q.to(S.dtype), k.to(S.dtype)
    largest_k = k.norm(dim=-1).cummax(-1).values[:, :, own]
    margin = (q.norm(dim=-1) * largest_k - (q * k[:, :, own]).sum(-1)) * scale + 17 + math.log(Tk)
    least = S[:, :, own] - margin / g.clamp(min=1e-30)
    first = torch.searchsorted(S.cummax(-1).values, least)
    first = first.minimum(torch.arange(Tk - Tq, Tk, device=q.device))
    return first.masked_fill(g <= 0, 0)  # what grows with the distance is kept
