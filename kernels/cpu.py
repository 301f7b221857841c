"""
CABLE, FoX and ALiBi on a CPU: hardly a bias in memory, and no work on keys that have decayed.

    logit_ij = q_i . k_j / sqrt(d) - g_i (S_i - S_j)

    keys      0 . . . . first . . . a . . . e
    queries   a |  dropped  |  far  | \
                |           |       |near\
              e |           |       |______\

A block of query rows [a, e) sees its own keys, `near`, with the bias as it is: an exact difference
in a mask, for all blocks at once. The earlier keys, `far`, it sees through one more channel: with
q' = [q, sqrt(d) g] and k' = [k, S - S_a] all logits of a row are g_i (S_i - S_a) too large, and a
softmax does not mind: plain attention, which torch runs in its fused kernel. Near and far are added
by their log-sum-exps. No row sees anything of a later token: S_a is the first row's own.

Beyond LONG keys `far` begins at the first key that can matter, as FoX's pruning has it (Lin et al.,
2025, arXiv 2504.06949). No logit is larger than |q| max|k| / sqrt(d) - g (S_i - S_j); this bound
falls with the distance. Where it is 17 + ln T below the log-sum-exp of the row's near keys, all
keys farther on weigh less, together, than float32 rounding.
A few rows of a block look much farther than the others: rows are sorted by their reach, and looked
up in groups. A head that hardly decays is one block, near and far alike through the extra channel.
What is dropped may depend on later rows of the same block, by less than rounding. All this needs
true float32: bfloat16 and TF32 are too coarse for S.
"""
import math

import torch
from torch.nn import functional as F

BLOCK = 128             # query rows in a block
GROUPS = (0, 16, 64)    # where groups of a block's rows begin, those that look farthest first
SHORT = 256             # keys: up to here one call, differentiated by torch
LONG = 1024             # keys: beyond, those that have decayed are dropped
FEW = 64                # queries of a cache: below, the bound costs more than it saves
KEEPS_MOST = 0.7        # a head that keeps more of its keys is one block, for larger products
MOST_BIAS = 100         # unless a g (S_i - S_j) is larger: float32 is right to 1e-5 of it
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cable_attention(q, k, v, S, g=None, log_kernel=""):
    """
    cable_attention of model_cable.py, or None for what this cannot do: half precision (autocast
    would round q' and k', S with them), several types, log kernels, the last queries of few keys.
    """
    Tq, Tk = q.size(2), k.size(2)
    g = S.new_ones(()).expand(q.shape[:3]) if g is None else g
    full = {x.dtype for x in (q, k, v, S, g)} in ({torch.float32}, {torch.float64})
    if not full or torch.is_autocast_enabled("cpu") or log_kernel:
        return None
    if Tq < Tk and (Tk <= LONG or Tq < FEW):
        return None
    if Tk > SHORT:
        return decaying(q, k, v, S, g)[0]
    # g_i S_j and -g_i S_i, a channel each: the first alone would do in a softmax, but dg would then
    # be a small difference of large numbers
    s = 1 / math.sqrt(q.size(3))
    S, weight = S - S[:, :, :1].detach(), g / s
    q = torch.cat((q, torch.stack((weight, -weight * S), -1)), -1)
    k = torch.cat((k, torch.stack((S, torch.ones_like(S)), -1)), -1)
    v = F.pad(v, (0, 2))  # as many channels
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=s)[..., :-2]


def fox_attention(q, k, v, F_):
    """fox_attention of model_fox.py: CABLE with S = -F and no weight."""
    return cable_attention(q, k, v, -F_)


def alibi_attention(q, k, v, slopes):
    """As in model_classics.py: S_i = i, g the slope. For few keys one mask is faster: None."""
    Tk = k.size(2)
    if Tk <= LONG:
        return None
    S = torch.arange(Tk, dtype=q.dtype).expand(k.shape[:3])
    return cable_attention(q, k, v, S, slopes.to(q.dtype)[None, :, None].expand(q.shape[:3]))


# -----------------------------------------------------------------------------
# heads in blocks of rows; N is B H, rows are padded to whole blocks

class Blocks:
    """The arguments of decaying, flat (N, T, ...) and in blocks of rows (N, blocks, size, ...)."""
    def __init__(self, q, k, v, S, g):
        (_, _, self.Tq, d), self.Tk = q.shape, k.size(2)
        self.size, self.scale = min(BLOCK, self.Tq), 1 / math.sqrt(d)
        q, k, v, self.S, self.g = (x.flatten(0, 1) for x in (q, k, v, S, g))
        self.own = slice(self.Tk - self.Tq, self.Tk)               # the keys that are queries too
        self.near = [self.blocks(x) for x in (q, k[:, self.own], v[:, self.own])]
        self.near_S, self.near_g = self.blocks(self.S[:, self.own]), self.blocks(self.g)
        self.offset = self.near_g * (self.near_S - self.near_S[..., :1])        # g_i (S_i - S_a)
        self.starts = torch.arange(self.Tk - self.Tq, self.Tk, self.size)       # a of every block
        self.q = torch.cat((q, self.g[..., None] / self.scale), -1)
        self.k, self.v = torch.cat((k, self.S[..., None]), -1), F.pad(v, (0, 1))

    def blocks(self, x):
        pad = [0, 0] * (x.dim() - 2) + [0, -self.Tq % self.size]
        return F.pad(x, pad).unflatten(1, (-1, self.size))

    def flat(self, x):
        return x.flatten(1, 2)[:, :self.Tq]

    def split(self, dq, dk, dv, shape):
        """The gradients of q', k', v' (N, T, d + 1) -> dq, dk, dv, dS, dg (B, H, T, ...)"""
        found = dq[..., :-1], dk[..., :-1], dv[..., :-1], dk[..., -1], dq[..., -1] / self.scale
        return [x.unflatten(0, shape).contiguous() for x in found]

    def near_bias(self):
        later = torch.full((self.size, self.size), -math.inf, dtype=self.S.dtype).triu(1)
        distance = self.near_S[..., None, :] - self.near_S[..., :, None]
        return distance.mul_(self.near_g[..., None]).add_(later)

    def first_keys(self, lse):
        """
        lse of the near keys -> the first key that can matter to each row, both (N, blocks, size);
        -1 for all rows of a head that hardly decays.
        """
        if self.Tk <= LONG:
            return torch.zeros(lse.shape[:2] + (0,), dtype=torch.long)
        norm = self.near[0].norm(dim=-1) * self.scale
        largest_k = self.k[..., :-1].norm(dim=-1).cummax(-1).values[:, self.starts, None]
        largest_S = self.S.cummax(-1).values  # S, where no step is negative
        margin = lse - 17 - math.log(self.Tk) - norm * largest_k
        margin = margin.masked_fill(self.near_g < 0, -math.inf)  # what grows with distance is kept
        least = self.near_S + margin / self.near_g.clamp(min=1e-30)
        first = torch.searchsorted(largest_S, least.flatten(1)).view_as(least)
        first = first.minimum(self.starts[:, None])
        first.flatten(1, 2)[:, self.Tq:] = self.starts[-1]  # padding looks nowhere
        kept = 1 - first.amin(-1).sum(-1) / self.starts.sum().clamp(min=1)
        span = self.g.abs().amax(-1) * (largest_S[:, -1] - self.S.amin(-1))
        return first.masked_fill(((kept > KEEPS_MOST) & (span < MOST_BIAS))[:, None, None], -1)

    def centre(self, n, keys, a):
        """The extra channel of head n's keys becomes S - S_a."""
        self.k[n, keys, -1] = self.S[n, keys] - self.S[n, a, None]

    def far_calls(self, first):
        """first, sorted -> head, block, its rows and keys, centred, of every call for far keys."""
        everything = slice(None)
        if self.Tk <= LONG:  # all heads at once
            for block, a in enumerate(self.starts.tolist()):
                if a:
                    self.centre(everything, slice(0, a), a)
                    yield everything, block, everything, slice(0, a)
            return
        groups = [m for m in GROUPS if m < self.size]
        starts = self.starts.tolist()
        for n, blocks in enumerate(first[..., groups].tolist()):
            for block, (a, firsts) in enumerate(zip(starts, blocks)):
                if not 0 <= firsts[0] < a:
                    continue
                self.centre(slice(n, n + 1), slice(firsts[0], a), a)
                for m, end, start in zip(groups, [*groups[1:], self.size], firsts):
                    if start < a:
                        yield slice(n, n + 1), block, slice(m, end), slice(start, a)

    def whole_calls(self, first):
        """Of heads that hardly decay: head, keys, whether these are the queries' own."""
        for n in (first[:, 0, :1] < 0).nonzero()[:, 0].tolist():
            one = slice(n, n + 1)
            self.centre(one, slice(None), self.Tk - self.Tq)
            yield one, self.own, True
            if self.Tq < self.Tk:
                yield one, slice(0, self.Tk - self.Tq), False


def in_order(x, order):
    """x (N, blocks, size, ...) with the rows of each block in this order, if there is one."""
    if not order.size(2):
        return x
    for _ in range(x.dim() - order.dim()):
        order = order[..., None]
    return x.gather(2, order.expand_as(x))


# -----------------------------------------------------------------------------
# as an operator that autograd and torch.compile know

@torch.library.custom_op("nanope::decaying", mutates_args=())
def decaying(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, S: torch.Tensor,
             g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> output (B, H, Tq, d), log-sum-exp of the logits (N, Tq), first_keys."""
    x = Blocks(q, k, v, S, g)
    y, lse = flash(*x.near, 0.0, False, attn_mask=x.near_bias(), scale=x.scale)
    first = x.first_keys(lse)
    firsts, order = first.sort(-1)
    rows = in_order(x.blocks(x.q), order)
    far, far_lse = torch.zeros_like(rows), torch.full_like(lse, -math.inf)
    for n, block, its, keys in x.far_calls(firsts):
        found = flash(rows[None, n, block, its], x.k[None, n, keys], x.v[None, n, keys], 0.0, False,
                      scale=x.scale)
        far[n, block, its], far_lse[n, block, its] = found[0][0], found[1][0]
    back = order.argsort(-1)
    y, lse, far = x.flat(y), x.flat(lse), x.flat(in_order(far, back))
    far_lse = x.flat(in_order(far_lse, back) - x.offset)
    for n, keys, own in x.whole_calls(first):
        offset = x.g[n] * (x.S[n, x.own] - x.S[n, x.own][:, :1])
        found = flash(x.q[None, n], x.k[None, n, keys], x.v[None, n, keys], 0.0, own, scale=x.scale)
        if own:
            y[n], lse[n] = found[0][0, ..., :-1], found[1][0] - offset
        else:
            far[n], far_lse[n] = found[0][0], found[1][0] - offset
    both = torch.logaddexp(lse, far_lse)
    y = y * (lse - both).exp_()[..., None]
    y.addcmul_(far[..., :-1], (far_lse - both).exp_()[..., None])
    return y.unflatten(0, q.shape[:2]), both, first


@torch.library.custom_op("nanope::decaying_backward", mutates_args=())
def decaying_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, S: torch.Tensor,
                      g: torch.Tensor, y: torch.Tensor, lse: torch.Tensor, first: torch.Tensor,
                      dy: torch.Tensor) -> list[torch.Tensor]:
    """-> dq, dk, dv, dS, dg. A row's logits' gradients add up to 0: S_i and S_a get none."""
    x, d = Blocks(q, k, v, S, g), q.size(3)
    y, dy = (F.pad(z.flatten(0, 1), (0, 1)) for z in (y, dy))

    dq, dk, dv = (torch.zeros_like(z) for z in (x.q, x.k, x.v))

    # near: the bias is in the mask; two more channels, that add 0 to the logits, collect dg and dS
    nothing, steps = torch.zeros_like(x.near_S), x.near_S - x.near_S[..., :1]
    weight = x.near_g / x.scale
    near = [F.pad(x.blocks(dy), (0, 1)),
            torch.cat((x.near[0], torch.stack((weight, nothing), -1)), -1),
            torch.cat((x.near[1], torch.stack((nothing, steps), -1)), -1),
            F.pad(x.near[2], (0, 2)), F.pad(x.blocks(y), (0, 1)), x.blocks(lse)]
    found = flash_backward(*near, 0.0, False, attn_mask=x.near_bias(), scale=x.scale)
    its_dq, its_dk, its_dv = map(x.flat, found)
    dq[..., :d], dq[..., d] = its_dq[..., :d], its_dq[..., d + 1]
    dk[:, x.own], dv[:, x.own] = its_dk[..., :-1], its_dv[..., :-1]

    firsts, order = first.sort(-1)
    far = [in_order(z, order) for z in (x.blocks(dy), x.blocks(x.q), x.blocks(y),
                                        x.blocks(lse) + x.offset)]
    far_dq = torch.zeros_like(far[0])
    for n, block, its, keys in x.far_calls(firsts):
        its_dy, its_q, its_y, its_lse = (z[None, n, block, its] for z in far)
        found = flash_backward(its_dy, its_q, x.k[None, n, keys], x.v[None, n, keys], its_y,
                               its_lse, 0.0, False, scale=x.scale)
        far_dq[n, block, its] = found[0][0]
        dk[n, keys] += found[1][0]
        dv[n, keys] += found[2][0]
    dq += x.flat(in_order(far_dq, order.argsort(-1)))

    for n, keys, own in x.whole_calls(first):
        if own:
            dq[n], dk[n], dv[n] = 0, 0, 0
        its_lse = lse[n] + x.g[n] * (x.S[n, x.own] - x.S[n, x.own][:, :1])
        found = flash_backward(dy[None, n], x.q[None, n], x.k[None, n, keys], x.v[None, n, keys],
                               y[None, n], its_lse[None], 0.0, own, scale=x.scale)
        dq[n] += found[0][0]
        dk[n, keys] += found[1][0]
        dv[n, keys] += found[2][0]
    return x.split(dq, dk, dv, q.shape[:2])


@decaying.register_fake
def _(q, k, v, S, g):
    (B, H, Tq, _), size = q.shape, min(BLOCK, q.size(2))
    return (torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(B * H, Tq),
            q.new_empty(B * H, -(-Tq // size), size if k.size(2) > LONG else 0, dtype=torch.long))


@decaying_backward.register_fake
def _(q, k, v, S, g, y, lse, first, dy):
    contiguous = torch.contiguous_format
    return [torch.empty_like(x, memory_format=contiguous) for x in (q, k, v, S, g)]


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def backward(ctx, dy, dlse, dfirst):
    return tuple(decaying_backward(*ctx.saved_tensors, dy))


decaying.register_autograd(backward, setup_context=save)
