"""
CoPE in Triton, equal to cope_attention in model_cope.py, without a T x T matrix of logits.

    g_ij = sigmoid(q_i . k'_j / sqrt(d))          k' the gate keys, k if there are none
    p_ij = min(g_ij + ... + g_ii, P - 1)
    logit_ij = q_i . k_j / sqrt(d) + bias_ij      bias_ij = z_i at p_ij, interpolated

with z = q E (B, H, Tq, P) and E the table. A program takes BM rows and walks the keys leftwards
from the diagonal in tiles of BN. Each row carries its count from tile to tile. Once all rows have
counted to P - 1 the bias of every key further left is z_i[P - 1], and no gate matters: plain
attention. So every pass is two kernels, one for this band next to the diagonal, one for the tail.
limit (B, H, Tq) is where they meet: keys j >= limit_i are in the band of row i. Forward stores it
and lse, the log2 of the sum of exp(logit).

Backward, with A = softmax(logit), and e the hat function 1 - |p - n| where that is positive:

    delta_i = dO_i . O_i
    dL_ij = A_ij (dO_i . v_j - delta_i)
    dv = A^T dO
    dz_i[n] = sum_j dL_ij e(p_ij - n)             dE and z's share of dq: autograd, outside
    dg_ik = sum_{j<=k} dL_ij (z_i[floor p + 1] - z_i[floor p])
                                                  a scan from left to right; 0 in the tail
    ds = dL + g (1 - g) dg                        with k' apart, its share has its own products
    dq = ds K / sqrt(d), dk = ds^T Q / sqrt(d)

cope_rows_* go along rows (dq, dz), cope_columns_* down the keys (dk, dv, dk'); neither needs
atomics, so gradients repeat bit for bit. A column cannot scan along rows: for every row and tile it
needs the count to the tile's right and the sum of dL (z[floor p + 1] - z[floor p]) to its left.
Backward counts again (cope_counts) and packs these carries, 8 bytes for a row and band tile
(common.bands draws it); how many there are comes from limit, for one wait for the GPU. Where no row
counts to P - 1, all tiles are band, and the carries .54 GB a head at T = 65,536.

Logits are in base 2: scale is log2(e) / sqrt(d), and exp2 is what the hardware has.
"""
import math

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from .common import (
    LOG2E,
    STEP,
    attend,
    bands,
    check_memory,
    constants,
    differentiable,
    dot,
    fit,
    load,
    operator,
    outputs,
    place,
    place_keys,
    rows_of,
    store,
    top_tile,
    triangle,
)

# -----------------------------------------------------------------------------
# pieces of kernels

@triton.jit
def in_band(i, j, limit):
    """Which keys j the rows at positions i see in their band, (rows, keys)."""
    return (j[None, :] <= i[:, None]) & (j[None, :] >= limit[:, None])


@triton.jit
def gates(s, scale, seen):
    """sigmoid(q . k / sqrt(d)) of a tile, and 0 for keys that are not seen."""
    return tl.where(seen, 1 / (1 + tl.exp2(-scale * s)), 0.0)


@triton.jit
def look_up(z, count, g, ones, P: tl.constexpr):
    """A tile's positions p, `count` beyond its right end, their bias, and the bias's slope."""
    p = tl.minimum(count[:, None] + count_gates(g, ones), P - 1)
    low = p.to(tl.int32)
    a = tl.load(z[:, None] + low).to(tl.float32)
    b = tl.load(z[:, None] + tl.minimum(low + 1, P - 1)).to(tl.float32)
    return p, a + (p - low) * (b - a), b - a


@triton.jit
def count_gates(g, ones):
    """
    The sum of gates from each key to the tile's right end: a product with a triangle of ones. Two
    16-bit numbers hold a gate to 2^-25, what float32 holds of one near 1. (tl.cumsum needs rows of
    its own layout. The scan of gradients, which may be far below 2^-25, keeps it.)
    """
    high = g.to(tl.float16)
    low = (g - high.to(tl.float32)).to(tl.float16)
    return dot(low, ones, dot(high, ones))


# -----------------------------------------------------------------------------
# forward

@triton.jit
def cope_forward_band(q, k, v, gk, z, o, lse, limit, Tq, Tk, scale,
                      P: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SEP: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr):
    """o and lse of the band alone, and limit. With SEP there are gate keys gk beside the keys."""
    head, block = place(Tq, BM)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, o = q + in_q, o + in_q
    k, v, gk = k + in_k, v + in_k, gk + in_k
    r, i, real, at = rows_of(block, head, Tq, Tk, BM)
    keys = tl.arange(0, BN)
    z += (head * Tq + tl.minimum(r, Tq - 1)) * P
    qi = load(q, r, Tq, D, C)
    m = tl.full((BM,), -1e30, tl.float32)  # not -inf: in a tile all masked -inf - -inf would be NaN
    den = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, C), tl.float32)
    count = tl.where(real, 0.0, P)
    ones = triangle(BN)
    end = tl.cdiv(tl.minimum(block * BM + BM, Tq) + Tk - Tq, BN) * BN
    # the diagonal's tiles, and until all are at P - 1
    while (end > 0) & ((end > block * BM + Tk - Tq) | (tl.min(count) < P - 1)):
        for _ in range(tl.minimum(end // BN, STEP)):  # only a for loads ahead (cp.async)
            end -= BN
            j = end + keys
            seen = j[None, :] <= i[:, None]
            kt = tl.trans(load(k, j, Tk, D, C))
            vj = load(v, j, Tk, D, C)
            s = dot(qi, kt)
            g = gates(dot(qi, tl.trans(load(gk, j, Tk, D, C))) if SEP else s, scale, seen)
            p, bias, slope = look_up(z, count, g, ones, P)
            count += tl.sum(g, 1)
            # q . k anew on top of the bias: a plain sum's layout takes every exp2 twice
            s = dot(qi, kt, bias * (LOG2E / scale)) * scale
            m, den, acc = attend(tl.where(seen, s, float("-inf")), vj, m, den, acc)
    tl.store(limit + at, tl.zeros((BM,), tl.int32) + end, mask=real)
    store(o, r, Tq, acc / den[:, None], D, C)
    tl.store(lse + at, m + tl.log2(den), mask=real)


@triton.jit
def cope_forward_tail(q, k, v, z, o, lse, limit, Tq, Tk, scale,
                      P: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr):
    """o and lse of all keys, beginning with the band's, as a sum of weights 1 at the level lse."""
    head, block = place(Tq, BM)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, o = q + in_q, o + in_q
    k, v = k + in_k, v + in_k
    r, i, real, at = rows_of(block, head, Tq, Tk, BM)
    keys = tl.arange(0, BN)
    z += (head * Tq + tl.minimum(r, Tq - 1)) * P
    qi = load(q, r, Tq, D, C)
    m = tl.load(lse + at, mask=real, other=0.0)
    den = tl.full((BM,), 1.0, tl.float32)
    acc = load(o, r, Tq, D, C).to(tl.float32)
    far = tl.load(z + P - 1).to(tl.float32) * LOG2E
    lim = tl.load(limit + at, mask=real, other=0)
    for n in range(tl.cdiv(tl.max(lim), BN)):
        j = n * BN + keys
        s = dot(qi, tl.trans(load(k, j, Tk, D, C))) * scale + far[:, None]
        logits = tl.where(j[None, :] < lim[:, None], s, float("-inf"))
        m, den, acc = attend(logits, load(v, j, Tk, D, C), m, den, acc)
    store(o, r, Tq, acc / den[:, None], D, C)
    tl.store(lse + at, m + tl.log2(den), mask=real)


# -----------------------------------------------------------------------------
# backward: what rows and columns both need

@triton.jit
def cope_counts(q, gk, o, do, delta, limit, first, start, counts, Tq, Tk, scale,
                D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """delta, and for every row and band tile the count to the tile's right."""
    head, block = place(Tq, BM)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, o, do = q + in_q, o + in_q, do + in_q
    gk += in_k
    r, i, real, at = rows_of(block, head, Tq, Tk, BM)
    keys = tl.arange(0, BN)
    qi = load(q, r, Tq, D, C)
    oi = load(o, r, Tq, D, C)
    doi = load(do, r, Tq, D, C)
    tl.store(delta + at, tl.sum(oi.to(tl.float32) * doi.to(tl.float32), 1), mask=real)
    lim = tl.load(limit + at, mask=real, other=Tk)
    top = top_tile(block, Tq, Tk, BM, BN)
    block += head * tl.cdiv(Tq, BM)
    counts += tl.load(start + block) * BM + tl.arange(0, BM)
    count = tl.zeros((BM,), tl.float32)
    for back in range(top - tl.load(first + block) + 1):
        j = (top - back) * BN + keys
        tl.store(counts + (top - back) * BM, count)
        s = dot(qi, tl.trans(load(gk, j, Tk, D, C)))
        count += tl.sum(gates(s, scale, in_band(i, j, lim)), 1)


# -----------------------------------------------------------------------------
# backward along rows: dq and dz (B, H, P, Tq). The tail comes first and the band adds to it: left
# to right

@triton.jit
def cope_rows_tail(q, k, v, z, do, lse, delta, limit, dq, dz, Tq, Tk, scale,
                   P: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr):
    head, block = place(Tq, BM)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, do, dq = q + in_q, do + in_q, dq + in_q
    k, v = k + in_k, v + in_k
    r, i, real, at = rows_of(block, head, Tq, Tk, BM)
    keys = tl.arange(0, BN)
    z += (head * Tq + tl.minimum(r, Tq - 1)) * P
    dz += head * Tq * P + r
    qi = load(q, r, Tq, D, C)
    doi = load(do, r, Tq, D, C)
    lsei = tl.load(lse + at, mask=real, other=0.0)
    deltai = tl.load(delta + at, mask=real, other=0.0)
    acc = tl.zeros((BM, C), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    far = tl.load(z + P - 1).to(tl.float32) * LOG2E - lsei
    lim = tl.load(limit + at, mask=real, other=0)
    for n in range(tl.cdiv(tl.max(lim), BN)):
        j = n * BN + keys
        kj = load(k, j, Tk, D, C)
        seen = j[None, :] < lim[:, None]
        a = tl.where(seen, tl.exp2(dot(qi, tl.trans(kj)) * scale + far[:, None]), 0.0)
        ds = a * (dot(doi, tl.trans(load(v, j, Tk, D, C))) - deltai[:, None])
        total += tl.sum(ds, 1)
        acc = dot(ds.to(kj.dtype), kj, acc)
    acc *= scale / LOG2E
    tl.store(dz + (P - 1) * Tq, total, mask=real)
    store(dq, r, Tq, acc, D, C)


@triton.jit
def cope_rows_band(q, k, v, gk, z, do, lse, delta, limit, first, start, counts, sums, dq, dz,
                   Tq, Tk, scale,
                   P: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SEP: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr):
    head, block = place(Tq, BM)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, do, dq = q + in_q, do + in_q, dq + in_q
    k, v, gk = k + in_k, v + in_k, gk + in_k
    r, i, real, at = rows_of(block, head, Tq, Tk, BM)
    keys = tl.arange(0, BN)
    z += (head * Tq + tl.minimum(r, Tq - 1)) * P
    dz += head * Tq * P + r
    qi = load(q, r, Tq, D, C)
    doi = load(do, r, Tq, D, C)
    lsei = tl.load(lse + at, mask=real, other=0.0)
    deltai = tl.load(delta + at, mask=real, other=0.0)
    acc = tl.zeros((BM, C), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    lim = tl.load(limit + at, mask=real, other=Tk)
    top = top_tile(block, Tq, Tk, BM, BN)
    block += head * tl.cdiv(Tq, BM)
    here = tl.load(start + block) * BM + tl.arange(0, BM)
    ones = triangle(BN)
    for n in range(tl.load(first + block), top + 1):
        j = n * BN + keys
        seen = in_band(i, j, lim)
        kj = load(k, j, Tk, D, C)
        gkj = load(gk, j, Tk, D, C) if SEP else kj
        s = dot(qi, tl.trans(kj))
        g = gates(dot(qi, tl.trans(gkj)) if SEP else s, scale, seen)
        p, bias, slope = look_up(z, tl.load(counts + here + n * BM), g, ones, P)
        a = tl.where(seen, tl.exp2(s * scale + LOG2E * bias - lsei[:, None]), 0.0)
        ds = a * (dot(doi, tl.trans(load(v, j, Tk, D, C))) - deltai[:, None])
        dg = g * (1 - g) * (total[:, None] + tl.cumsum(ds * slope, 1))
        tl.store(sums + here + n * BM, total)
        total += tl.sum(ds * slope, 1)
        add_to_dz(dz, p, ds, real, Tq, P)
        if SEP:
            acc = dot(dg.to(gkj.dtype), gkj, acc)
        else:
            ds += dg
        acc = dot(ds.to(kj.dtype), kj, acc)
    acc = acc * (scale / LOG2E) + load(dq, r, Tq, D, C).to(tl.float32)
    store(dq, r, Tq, acc, D, C)


@triton.jit
def add_to_dz(dz, p, ds, real, Tq, P: tl.constexpr):
    """The columns of dz that a tile's p reach, one by one. No other program has these rows."""
    for e in range(tl.min(p).to(tl.int32), tl.minimum(tl.max(p).to(tl.int32) + 2, P)):
        part = tl.sum(tl.maximum(1 - tl.abs(p - e), 0.0) * ds, 1)
        tl.store(dz + e * Tq, tl.load(dz + e * Tq, mask=real, other=0.0) + part, mask=real)
    tl.debug_barrier()  # the next tile's loads come after these stores, whichever thread does them


# -----------------------------------------------------------------------------
# backward down the keys: dk, dv and dgk of BN keys, from the rows that see them. The tail comes
# first and the band adds to it

@triton.jit
def cope_columns_tail(q, k, v, z, do, lse, delta, limit, first, dk, dv, Tq, Tk, scale,
                      P: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr):
    """Tiles lie as (keys, rows). first (B H, tiles): the first block with these in its tail."""
    tiles = tl.cdiv(Tk, BN)
    blocks = tl.cdiv(Tq, BM)
    head, n = place_keys(tiles)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, do = q + in_q, do + in_q
    k, v, dk, dv = k + in_k, v + in_k, dk + in_k, dv + in_k
    j = n * BN + tl.arange(0, BN)
    kj = load(k, j, Tk, D, C)
    vj = load(v, j, Tk, D, C)
    dkj = tl.zeros((BN, C), tl.float32)
    dvj = tl.zeros((BN, C), tl.float32)
    for block in range(tl.load(first + head * tiles + n), blocks):
        r, i, real, at = rows_of(block, head, Tq, Tk, BM)
        lim = tl.load(limit + at, mask=real, other=0)
        far = tl.load(z + at * P + P - 1, mask=real, other=0.0).to(tl.float32) * LOG2E
        far = far - tl.load(lse + at, mask=real, other=0.0)
        qi = load(q, r, Tq, D, C)
        doi = load(do, r, Tq, D, C)
        seen = j[:, None] < lim[None, :]
        a = tl.where(seen, tl.exp2(dot(kj, tl.trans(qi)) * scale + far[None, :]), 0.0)
        dvj = dot(a.to(doi.dtype), doi, dvj)
        da = dot(vj, tl.trans(doi))
        ds = a * (da - tl.load(delta + at, mask=real, other=0.0)[None, :])
        dkj = dot(ds.to(qi.dtype), qi, dkj)
    dkj *= scale / LOG2E
    store(dk, j, Tk, dkj, D, C)
    store(dv, j, Tk, dvj, D, C)


@triton.jit
def cope_columns_band(q, k, v, gk, z, do, lse, delta, limit, last, start, counts, sums,
                      dk, dv, dgk, Tq, Tk, scale,
                      P: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SEP: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr):
    tiles = tl.cdiv(Tk, BN)
    blocks = tl.cdiv(Tq, BM)
    head, n = place_keys(tiles)
    in_q, in_k = head * Tq * D, head * Tk * D
    q, do = q + in_q, do + in_q
    k, v, gk, dk, dv, dgk = k + in_k, v + in_k, gk + in_k, dk + in_k, dv + in_k, dgk + in_k
    j = n * BN + tl.arange(0, BN)
    kj = load(k, j, Tk, D, C)
    vj = load(v, j, Tk, D, C)
    gkj = load(gk, j, Tk, D, C) if SEP else kj
    dkj = tl.zeros((BN, C), tl.float32)
    dvj = tl.zeros((BN, C), tl.float32)
    dgkj = tl.zeros((BN, C), tl.float32)
    ones = triangle(BN)
    # turned here: in the loop they would go to shared memory anew for every block
    kt = tl.trans(kj)
    vt = tl.trans(vj)
    gkt = tl.trans(gkj)
    begin = tl.maximum(n * BN - (Tk - Tq), 0) // BM
    for block in range(begin, tl.load(last + head * tiles + n) + 1):
        r, i, real, at = rows_of(block, head, Tq, Tk, BM)
        lim = tl.load(limit + at, mask=real, other=Tk)
        mine = lim < n * BN + BN  # not every block up to the last has this tile in its band
        here = (tl.load(start + head * blocks + block) + n) * BM + tl.arange(0, BM)
        qi = load(q, r, Tq, D, C)
        doi = load(do, r, Tq, D, C)
        lsei = tl.load(lse + at, mask=real, other=0.0)
        deltai = tl.load(delta + at, mask=real, other=0.0)
        seen = in_band(i, j, lim)
        s = dot(qi, kt)
        g = gates(dot(qi, gkt) if SEP else s, scale, seen)
        zi = z + (head * Tq + tl.minimum(r, Tq - 1)) * P
        p, bias, slope = look_up(zi, tl.load(counts + here, mask=mine, other=0.0), g, ones, P)
        a = tl.where(seen, tl.exp2(s * scale + LOG2E * bias - lsei[:, None]), 0.0)
        dvj = dot(tl.trans(a.to(doi.dtype)), doi, dvj)
        ds = a * (dot(doi, vt) - deltai[:, None])
        left = tl.load(sums + here, mask=mine, other=0.0)
        dg = g * (1 - g) * (left[:, None] + tl.cumsum(ds * slope, 1))
        if SEP:
            dgkj = dot(tl.trans(dg.to(qi.dtype)), qi, dgkj)
        else:
            ds += dg
        dkj = dot(tl.trans(ds.to(qi.dtype)), qi, dkj)
    dkj = dkj * (scale / LOG2E) + load(dk, j, Tk, D, C).to(tl.float32)
    dvj += load(dv, j, Tk, D, C).to(tl.float32)
    if SEP:
        store(dgk, j, Tk, dgkj * (scale / LOG2E), D, C)
    store(dk, j, Tk, dkj, D, C)
    store(dv, j, Tk, dvj, D, C)


# -----------------------------------------------------------------------------
# from tensors to kernels and back

def tiles(q, kind):
    """
    The largest tiles that do not spill in forward, and little in backward, on sm_80 and sm_90.
    band_sep is forward's band with gate keys.
    """
    d = q.size(3)
    if q.dtype == torch.float32:
        return constants(q, 32 if 16 < d <= 64 else 16, 16, 8)
    if d <= 64:
        sizes = dict(band=(64, 32 if d > 16 else 16, 4), band_sep=(64, 16, 4),
                     tail=(128, 64, 8), tail_columns=(64, 64, 4))
    else:
        sizes = dict(band=(32, 32, 4), band_sep=(32, 32, 4),
                     tail=(64, 32, 4), tail_columns=(64, 64, 8))
    return constants(q, *sizes[kind])


def tiles_of_columns(q, sep):
    """cope_columns_band's: in float32 or with gate keys loading ahead would spill."""
    return tiles(q, "band") | dict(num_stages=1 if sep or q.dtype == torch.float32 else 2)


def tails(limit, Tk, tile):
    """(B H, tiles) int32: the first block of rows with keys of this tile in its tail."""
    BM, BN = tile["BM"], tile["BN"]
    limit = limit.flatten(0, 1)
    limit = F.pad(limit, (0, -limit.size(1) % BM)).unflatten(1, (-1, BM)).amax(2)
    count = (limit + BN - 1) // BN  # of a block's tiles with a tail: all those on the left
    blocks = count.size(1)
    block = torch.arange(blocks, device=limit.device).expand_as(count)
    first = block.new_full((count.size(0), triton.cdiv(Tk, BN) + 1), blocks)
    first = first.scatter_reduce(1, count.long(), block, "amin")
    return first.flip(1).cummin(1)[0].flip(1)[:, 1:].int().contiguous()


@operator("cope(Tensor q, Tensor k, Tensor v, Tensor z, Tensor? gate_keys)"
          " -> (Tensor, Tensor, Tensor)",
          lambda q, *_: outputs(q))
def cope(q, k, v, z, gate_keys):
    """All contiguous -> o, lse, limit."""
    B, H, Tq, d = q.shape
    Tk, P = k.size(2), z.size(3)
    sep = gate_keys is not None
    gk = gate_keys if sep else k
    check_memory(q, k, v, z, gk)
    scale = LOG2E.value / math.sqrt(d)
    o, lse, limit = outputs(q)
    band, tail = tiles(q, "band_sep" if sep else "band"), tiles(q, "tail")
    with torch.cuda.device_of(q):
        cope_forward_band[B * H * triton.cdiv(Tq, band["BM"]),](
            q, k, v, gk, z, o, lse, limit, Tq, Tk, scale, P=P, SEP=sep, **band)
        cope_forward_tail[B * H * triton.cdiv(Tq, tail["BM"]),](
            q, k, v, z, o, lse, limit, Tq, Tk, scale, P=P, **tail)
    return o, lse, limit


@operator("cope_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor z, Tensor? gate_keys,"
          " Tensor o, Tensor lse, Tensor limit) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
          lambda do, q, k, v, z, gate_keys, *_: all_gradients(q, k, v, z, gate_keys),
          tags=torch.Tag.cudagraph_unsafe)  # it waits for the GPU: no CUDA graph may
def cope_backward(do, q, k, v, z, gate_keys, o, lse, limit):
    """-> dq, dk, dv, dz, dgk; an empty dgk where there are no gate keys."""
    B, H, Tq, d = q.shape
    Tk, P = k.size(2), z.size(3)
    sep = gate_keys is not None
    gk = gate_keys if sep else k
    scale = LOG2E.value / math.sqrt(d)
    band, band_columns = tiles(q, "band"), tiles_of_columns(q, sep)
    tail, tail_columns = tiles(q, "tail"), tiles(q, "tail_columns")
    do = do.contiguous()
    check_memory(q, k, v, z, gk, o, lse, limit)
    dq, dk, dv, dz, dgk = all_gradients(q, k, v, z, gate_keys)
    dz_turned = lse.new_zeros(B, H, P, Tq)
    first, last, start, total = bands(limit, Tk, band["BM"], band["BN"])
    delta = torch.empty_like(lse)
    counts = lse.new_empty(total, band["BM"])
    sums = torch.empty_like(counts)
    with torch.cuda.device_of(q):
        cope_counts[start.numel(),](
            q, gk, o, do, delta, limit, first, start, counts, Tq, Tk, scale, **band)
        cope_rows_tail[B * H * triton.cdiv(Tq, tail["BM"]),](
            q, k, v, z, do, lse, delta, limit, dq, dz_turned, Tq, Tk, scale, P=P, **tail)
        cope_columns_tail[B * H * triton.cdiv(Tk, tail_columns["BN"]),](
            q, k, v, z, do, lse, delta, limit, tails(limit, Tk, tail_columns), dk, dv,
            Tq, Tk, scale, P=P, **tail_columns)
        cope_rows_band[start.numel(),](
            q, k, v, gk, z, do, lse, delta, limit, first, start, counts, sums, dq, dz_turned,
            Tq, Tk, scale, P=P, SEP=sep, **band)
        cope_columns_band[last.numel(),](
            q, k, v, gk, z, do, lse, delta, limit, last, start, counts, sums, dk, dv, dgk,
            Tq, Tk, scale, P=P, SEP=sep, **band_columns)
    return dq, dk, dv, dz.copy_(dz_turned.transpose(2, 3)), dgk


def all_gradients(q, k, v, z, gate_keys):
    """Empty dq, dk, dv, dz, dgk; with no gate keys dgk has no numbers."""
    dgk = k.new_empty(0) if gate_keys is None else torch.empty_like(gate_keys)
    return *map(torch.empty_like, (q, k, v, z)), dgk


def backward(do, *saved):
    *grads, dgk = cope_backward(do, *saved)
    return *grads, None if saved[4] is None else dgk


differentiable(cope, backward)


def cope_attention(q, k, v, pos_emb, gate_keys=None):
    """cope_attention of model_cope.py; None for what it cannot do."""
    if not fit(q, k, v):
        return None
    z = q @ pos_emb.to(q.dtype)
    gate_keys = None if gate_keys is None else gate_keys.contiguous()
    # contiguous: kernels then need no strides
    return cope(q.contiguous(), k.contiguous(), v.contiguous(), z.contiguous(), gate_keys)[0]
