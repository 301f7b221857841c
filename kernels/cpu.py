"""
CABLE, FoX and ALiBi on a CPU: torch's own fused attention, with no bias in memory.

    logit_ij = q_i . k_j / sqrt(d) - g_i (S_i - S_j)
             = [-g_i S_i, g_i, q_i / sqrt(d)] . [1, S_j, k_j]

The two channels come first: a product adds in order, with one rounding for a multiplication and its
sum, so the large numbers have cancelled before anything is rounded to their size. (How -g_i S_i is
rounded is the same all along the row, which a softmax does not mind.) Products of few rows or keys
add in another order, so these come in sixteens. It needs true float32: bfloat16 and TF32 are too
coarse for S. Up to LONG keys this is one call, and no row sees anything of a later token. Beyond,
keys that have decayed are left out (first_keys):

    keys      0 . . . . . start . . . . end
    rows      |  not read  |  seen  \\        rows of a head that look about as far, in order
              |            |         \\

A few rows look much farther than their neighbours, so blocks are of rows whose reach is alike. What
a block leaves out may depend on later rows in it: an earlier output may move by 1e-7.
"""
import itertools
import math

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .cpu_count import apply

LONG = 1024  # keys: up to here no key is left out, and no row sees anything of a later token
BLOCK = 128  # query rows in a call
NEAR = 64    # keys: rows that look no farther are alike
FEW = 64     # queries of a cache: below, the bound costs more than it saves
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cable_attention(q, k, v, S, g=None):
    """
    cable_attention of model_cable.py, or None for what this cannot do: half precision (autocast
    would round S), several types, the last queries of few keys.
    """
    Tq, Tk = q.size(2), k.size(2)
    g = S.new_ones(()) if g is None else g
    S, g = S.expand(k.shape[:3]), g.expand(q.shape[:3])  # one for all heads, say
    full = {x.dtype for x in (q, k, v, S, g)} in ({torch.float32}, {torch.float64})
    if not full or torch.is_autocast_enabled("cpu"):
        return None
    if Tq < Tk and (Tk <= LONG or Tq < FEW):
        return None
    first = first_keys(q, k, S, g) if Tk > LONG else None
    q = torch.cat((torch.stack((-g * S[:, :, Tk - Tq:], g), -1), q / math.sqrt(q.size(3))), -1)
    k = torch.cat((torch.stack((torch.ones_like(S), S), -1), k), -1)
    v = F.pad(v, (0, 2))  # as many channels
    if Tq % 16:
        q, k, v = (F.pad(x, (0, 0, 0, -Tq % 16)) for x in (q, k, v))
    if first is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    else:
        first = F.pad(first, (0, -Tq % 16), value=Tk)
        y = apply(Decaying, *(x.flatten(0, 1) for x in (q, k, v, first))).view(q.shape)
    return y[:, :, :Tq, :-2]


def fox_attention(q, k, v, F_):
    """fox_attention of rivals/fox.py: CABLE with S = -F and no weight."""
    return cable_attention(q, k, v, -F_)


def alibi_attention(q, k, v, slopes):
    """As in rivals/classics.py: S_i = i, g the slope. For few keys one mask is faster: None."""
    Tk = k.size(2)
    if Tk <= LONG:
        return None
    S = torch.arange(Tk, dtype=q.dtype)
    return cable_attention(q, k, v, S, slopes.to(q.dtype)[None, :, None])


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
    largest_k = k.norm(dim=-1).cummax(-1).values[:, :, own]
    margin = (q.norm(dim=-1) * largest_k - (q * k[:, :, own]).sum(-1)) * scale + 17 + math.log(Tk)
    least = S[:, :, own] - margin / g.clamp(min=1e-30)
    first = torch.searchsorted(S.cummax(-1).values, least)
    first = first.minimum(torch.arange(Tk - Tq, Tk))
    return first.masked_fill(g <= 0, 0)  # what grows with the distance is kept


# -----------------------------------------------------------------------------
# many keys; N is B H, C is d + 2

class Decaying(torch.autograd.Function):
    """q (N, Tq, C), k, v (N, Tk, C), first (N, Tq) -> output (N, Tq, C)."""
    @staticmethod
    def forward(ctx, q, k, v, first):
        far, order = by_reach(first, k)
        q = rows(q, order)
        y, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for n, its, keys, how in calls(first, far, order, k):
            found = flash(q[None, n, its], k[None, n, keys], v[None, n, keys], 0.0, False, **how)
            y[n, its], lse[n, its] = found[0][0], found[1][0]
        ctx.save_for_backward(q, k, v, first, y, lse)  # with their rows in this order
        return rows(y, order.argsort(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, first, y, lse = ctx.saved_tensors
        far, order = by_reach(first, k)
        dy = rows(dy, order)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for n, its, keys, how in calls(first, far, order, k):
            found = flash_backward(
                dy[None, n, its], q[None, n, its], k[None, n, keys], v[None, n, keys],
                y[None, n, its], lse[None, n, its], 0.0, False, **how)
            dq[n, its] = found[0][0]
            dk[n, keys] += found[1][0]
            dv[n, keys] += found[2][0]
        return rows(dq, order.argsort(1)), dk, dv, None


def by_reach(first, k):
    """-> how far rows look, in powers of 4, and their order by this (N, Tq), in sixteens."""
    Tk = k.size(1)
    reach = torch.arange(Tk - first.size(1), Tk) - first
    far = (reach.clamp(min=NEAR).log2() / 2).long()
    for x in range(far.max()):  # the last that are not sixteen go with those that look farther
        alike = far == x
        left = alike.flip(1).cumsum(1).flip(1)
        far += alike & (left <= left[:, :1] % 16)
    return far, far.argsort(dim=1, stable=True)


def rows(x, order):
    """x (N, Tq, ...) with the rows of each head in this order."""
    return x[torch.arange(len(x))[:, None], order]


def calls(first, far, order, k):
    """-> head, rows in that order, keys, and the mask and scale, of every call."""
    N, Tq = order.shape
    keys, mask = torch.arange(k.size(1)), k.new_zeros(BLOCK, k.size(1))
    i = order + k.size(1) - Tq
    far, first = rows(far, order).tolist(), rows(first, order).tolist()
    for n in range(N):
        for _, alike in itertools.groupby(range(Tq), far[n].__getitem__):
            alike = list(alike)
            for a in range(alike[0], alike[-1] + 1, BLOCK):
                e = min(a + BLOCK, alike[-1] + 1)
                start, own, end = min(first[n][a:e]), i[n, a].item(), i[n, e - 1].item() + 1
                start = max(0, start - (start - end) % 16)
                its_mask = mask[:e - a, :end - start]
                late = its_mask[:, own - start:]  # all rows here see the keys before
                late.masked_fill_(keys[own:end] > i[n, a:e, None], -math.inf)
                yield (slice(n, n + 1), slice(a, e), slice(start, end),
                       dict(attn_mask=its_mask, scale=1.0))
                late.zero_()
