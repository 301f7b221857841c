"""
TRA in Triton, equal to tra_attention in model_tra.py, without a T x T matrix of logits.

    s_ij = q_i . k_j / sqrt(d), only keys with s_ij > 0 survive
    C_ij = survivors among keys j ... i
    logit_ij = s_ij + C_ij log delta_i            log delta (B, H, Tq) float32

A row without survivors gives 0. As in cope.py a program takes BM rows and walks the keys leftwards
from the diagonal in tiles of BN, each row carrying its count. It stops where the decay leaves too
little to matter, by a bound like that of FoX's pruning (Lin et al., 2025, arXiv 2504.06949). With m
the row's largest logit so far, c its count and N the keys to come, those can add at most

    sum_{n>=1} exp(U + (c + n) log delta) <= exp(U + (c + 1) log delta) min(N, 1 / (1 - delta))
    U = |q_i| max_{j<=i} |k_j| / sqrt(d)

to a sum of at least exp(m). A block stops when this is below e^-17 of it for all its rows: 4e-8,
less than float32 sees. (The gradient of log delta weighs keys by their count besides: there, 4e-8
times the counts left out.) A row without survivors never stops. limit (B, H, Tq) is where a row
stopped: keys j >= limit_i were seen.

Backward, with A = softmax(logit); the count has no gradient:

    dL_ij = A_ij (dO_i . v_j - dO_i . O_i)        dv = A^T dO
    dq = dL K / sqrt(d)     dk = dL^T Q / sqrt(d)     dlog delta_i = sum_j dL_ij C_ij

tra_rows counts again and leaves every tile's carry to tra_columns, packed as common.bands draws it:
4 bytes for a row and tile that was read, .13 GB a head at T = 65,536 where nothing is left out.
"""
import math

import torch
import triton
import triton.language as tl

from .common import (
    LOG2E,
    STEP,
    WAITS,
    attend,
    bands,
    check_memory,
    constants,
    dot,
    fit,
    load,
    outputs,
    place,
    place_keys,
    rows_of,
    save,
    store,
    top_tile,
    triangle,
)

# -----------------------------------------------------------------------------
# kernels

@triton.jit
def survivors(s, seen, ones):
    """
    Which of the keys seen have s > 0, and how many of these from each key to the tile's right end:
    a product with a triangle of ones, exact up to 2048. (tl.cumsum needs rows of its own layout.)
    All three kernels must agree on s > 0: they form s by one product, rows times keys.
    """
    passed = (s > 0) & seen
    return passed, dot(passed.to(tl.float16), ones)


@triton.jit
def tra_forward(q, k, v, decay, bound, o, lse, limit, Tq, Tk, scale,
                D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """o, lse and limit. bound is U in base 2."""
    head, block = place(Tq, BM)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, o = q + in_q, o + in_q
    k, v = k + in_k, v + in_k
    r, i, real, at = rows_of(block, head, Tq, Tk, BM)
    keys = tl.arange(0, BN)
    qi = load(q, r, Tq, D, C)
    slope = tl.load(decay + at, mask=real, other=0.0) * LOG2E
    most = tl.load(bound + at, mask=real, other=float("-inf"))
    many = 1 / (1 - tl.exp2(slope))
    m = tl.full((BM,), -1e30, tl.float32)
    den = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, C), tl.float32)
    count = tl.zeros((BM,), tl.float32)
    ones = triangle(BN)
    end = tl.cdiv(tl.minimum(block * BM + BM, Tq) + Tk - Tq, BN) * BN
    more = True
    while (end > 0) & more:
        for _ in range(tl.minimum(end // BN, STEP)):  # only a for loads ahead (cp.async)
            end -= BN
            j = end + keys
            s = dot(qi, tl.trans(load(k, j, Tk, D, C)))
            passed, p = survivors(s, j[None, :] <= i[:, None], ones)
            p += count[:, None]
            logits = tl.where(passed, s * scale + p * slope[:, None], float("-inf"))
            m, den, acc = attend(logits, load(v, j, Tk, D, C), m, den, acc)
            count += tl.sum(passed.to(tl.float32), 1)
        rest = most - m + (count + 1) * slope  # what the keys to come can add to
        rest += tl.log2(tl.minimum(many, end.to(tl.float32)))
        rest = tl.where(slope > 0, float("inf"), rest)  # a fork's, perhaps: far keys matter more
        more = tl.max(rest) > -17 * LOG2E
    some = den > 0
    store(o, r, Tq, tl.where(some[:, None], acc / den[:, None], 0.0), D, C)
    tl.store(lse + at, tl.where(some, m + tl.log2(den), 0.0), mask=real)
    tl.store(limit + at, tl.zeros((BM,), tl.int32) + end, mask=real)


@triton.jit
def tra_rows(q, k, v, decay, o, do, lse, delta, limit, first, start, counts, dq, ddecay,
             Tq, Tk, scale,
             D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dq, dlog delta; for the columns delta = dO . O, and the count to the right of every tile."""
    head, block = place(Tq, BM)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, o, do, dq = q + in_q, o + in_q, do + in_q, dq + in_q
    k, v = k + in_k, v + in_k
    r, i, real, at = rows_of(block, head, Tq, Tk, BM)
    keys = tl.arange(0, BN)
    qi = load(q, r, Tq, D, C)
    doi = load(do, r, Tq, D, C)
    slope = tl.load(decay + at, mask=real, other=0.0) * LOG2E
    lsei = tl.load(lse + at, mask=real, other=0.0)
    deltai = tl.sum(load(o, r, Tq, D, C).to(tl.float32) * doi.to(tl.float32), 1)
    tl.store(delta + at, deltai, mask=real)
    lim = tl.load(limit + at, mask=real, other=Tk)
    top = top_tile(block, Tq, Tk, BM, BN)
    block += head * tl.cdiv(Tq, BM)
    counts += tl.load(start + block) * BM + tl.arange(0, BM)
    acc = tl.zeros((BM, C), tl.float32)
    count = tl.zeros((BM,), tl.float32)
    ones = triangle(BN)
    total = tl.zeros((BM,), tl.float32)
    tiles = top - tl.load(first + block) + 1
    tl.assume(tiles > 0)  # else ptxas (C7515) runs the products one after the other
    for back in range(tiles):
        tl.store(counts + (top - back) * BM, count)
        j = (top - back) * BN + keys
        kj = load(k, j, Tk, D, C)
        s = dot(qi, tl.trans(kj))
        passed, p = survivors(s, (j[None, :] <= i[:, None]) & (j[None, :] >= lim[:, None]), ones)
        p += count[:, None]
        a = tl.where(passed, tl.exp2(s * scale + p * slope[:, None] - lsei[:, None]), 0.0)
        ds = a * (dot(doi, tl.trans(load(v, j, Tk, D, C))) - deltai[:, None])
        acc = dot(ds.to(kj.dtype), kj, acc)
        total += tl.sum(ds * p, 1)
        count += tl.sum(passed.to(tl.float32), 1)
    store(dq, r, Tq, acc * (scale / LOG2E), D, C)
    tl.store(ddecay + at, total, mask=real)


@triton.jit
def tra_columns(q, k, v, decay, do, lse, delta, limit, last, start, counts, dk, dv,
                Tq, Tk, scale,
                D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dk and dv of BN keys, from the rows that see them."""
    blocks = tl.cdiv(Tq, BM)
    tiles = tl.cdiv(Tk, BN)
    head, n = place_keys(tiles)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, do = q + in_q, do + in_q
    k, v = k + in_k, v + in_k
    j = n * BN + tl.arange(0, BN)
    kj = load(k, j, Tk, D, C)
    vj = load(v, j, Tk, D, C)
    ones = triangle(BN)
    # turned here: in the loop they would go to shared memory anew for every block
    kt = tl.trans(kj)
    vt = tl.trans(vj)
    dkj = tl.zeros((BN, C), tl.float32)
    dvj = tl.zeros((BN, C), tl.float32)
    begin = tl.maximum(n * BN - (Tk - Tq), 0) // BM
    # one block at least, though it may find nothing here: then C7515 can be ruled out
    end = tl.maximum(tl.load(last + head * tiles + n), begin) + 1
    tl.assume(begin < end)
    for block in range(begin, end):
        r, i, real, at = rows_of(block, head, Tq, Tk, BM)
        lim = tl.load(limit + at, mask=real, other=Tk)
        slope = tl.load(decay + at, mask=real, other=0.0) * LOG2E
        lsei = tl.load(lse + at, mask=real, other=0.0)
        deltai = tl.load(delta + at, mask=real, other=0.0)
        here = (tl.load(start + head * blocks + block) + n) * BM + tl.arange(0, BM)
        count = tl.load(counts + here, mask=lim < n * BN + BN, other=0.0)
        qi = load(q, r, Tq, D, C)
        doi = load(do, r, Tq, D, C)
        s = dot(qi, kt)
        passed, p = survivors(s, (j[None, :] <= i[:, None]) & (j[None, :] >= lim[:, None]), ones)
        p += count[:, None]
        a = tl.where(passed, tl.exp2(s * scale + p * slope[:, None] - lsei[:, None]), 0.0)
        dvj = dot(tl.trans(a.to(doi.dtype)), doi, dvj)
        ds = a * (dot(doi, vt) - deltai[:, None])
        dkj = dot(tl.trans(ds.to(qi.dtype)), qi, dkj)
    store(dk + in_k, j, Tk, dkj * (scale / LOG2E), D, C)
    store(dv + in_k, j, Tk, dvj, D, C)


# -----------------------------------------------------------------------------
# from tensors to kernels and back

def tiles(q):
    """Rows, keys and warps of a program, chosen as in cope.py."""
    d = q.size(3)
    if q.dtype == torch.float32:
        rows = 32 if d <= 16 or 32 < d <= 64 else 16  # the largest that spills nothing, as compiled
        return constants(q, rows, 16, 8)
    return constants(q, 64, 64 if d <= 64 else 32, 4)


@torch.library.custom_op("nanope::tra", mutates_args=())
def tra(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All contiguous, log_decay float32 -> o, lse, limit."""
    check_memory(q, k, v, log_decay)
    B, H, Tq, d = q.shape
    Tk = k.size(2)
    scale = LOG2E.value / math.sqrt(d)
    t = tiles(q)
    norm_q = torch.linalg.vector_norm(q, dim=-1, dtype=torch.float32)
    norm_k = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32)
    # of no later key: the future must not even decide where we stop
    bound = scale * norm_q * norm_k.cummax(-1)[0][..., Tk - Tq:]
    o, lse, limit = outputs(q)
    with torch.cuda.device_of(q):
        tra_forward[B * H * triton.cdiv(Tq, t["BM"]),](
            q, k, v, log_decay, bound, o, lse, limit, Tq, Tk, scale, **t)
    return o, lse, limit


@tra.register_fake
def _(q, k, v, log_decay):
    return outputs(q)


@torch.library.custom_op("nanope::tra_backward", mutates_args=(), tags=WAITS)
def tra_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 log_decay: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, limit: torch.Tensor
                 ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq, dk, dv, dlog_decay."""
    Tq, Tk = q.size(2), k.size(2)
    scale = LOG2E.value / math.sqrt(q.size(3))
    t = tiles(q)
    do = do.contiguous()
    check_memory(q, k, v, log_decay, o, lse, limit)
    dq, dk, dv, ddecay = map(torch.empty_like, (q, k, v, log_decay))
    delta = torch.empty_like(lse)
    first, last, start, total = bands(limit, Tk, t["BM"], t["BN"])
    counts = lse.new_empty(total, t["BM"])
    with torch.cuda.device_of(q):
        tra_rows[start.numel(),](
            q, k, v, log_decay, o, do, lse, delta, limit, first, start, counts, dq, ddecay,
            Tq, Tk, scale, **t)
        tra_columns[last.numel(),](
            q, k, v, log_decay, do, lse, delta, limit, last, start, counts, dk, dv,
            Tq, Tk, scale, **t)
    return dq, dk, dv, ddecay


@tra_backward.register_fake
def _(do, q, k, v, log_decay, o, lse, limit):
    return tuple(map(torch.empty_like, (q, k, v, log_decay)))


def backward(ctx, do, dlse, dlimit):
    return tra_backward(do, *ctx.saved_tensors)


tra.register_autograd(backward, setup_context=save)


def tra_attention(q, k, v, log_decay):
    """tra_attention of model_tra.py; None for what it cannot do."""
    if not fit(q, k, v):
        return None
    log_decay = log_decay.float().contiguous()
    return tra(q.contiguous(), k.contiguous(), v.contiguous(), log_decay)[0]
