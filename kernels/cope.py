"""
CoPE in Triton, equal to cope_attention in model_cope.py, without a T x T matrix.

    g_ij = sigmoid(q_i . k'_j / sqrt(d))          k' the gate keys, k if there are none
    p_ij = min(g_ij + ... + g_ii, P - 1)
    logit_ij = q_i . k_j / sqrt(d) + bias_ij      bias_ij = z_i at p_ij, interpolated; z = q E (B, H, Tq, P), E the table

A program takes BM rows and walks the keys leftwards from the diagonal in tiles of BN. Each row carries its count from tile
to tile. Once all rows have counted to P - 1 the bias of every key further left is z_i[P - 1], and no gate matters: what is
left is plain attention. So every pass is two kernels, one for this `band` next to the diagonal and one for the `tail`, which
is flash attention and needs no registers for gates. `limit` (B, H, Tq) is where they meet: keys j >= limit_i are in the band of row i.
Forward stores it and lse, the log2 of the sum of exp(logit).

Backward, with A = softmax(logit), and e the hat function 1 - |p - n| where that is positive:

    dL_ij = A_ij (dO_i . v_j - delta_i), delta_i = dO_i . O_i          dv = A^T dO
    dz_i[n] = sum_j dL_ij e(p_ij - n)                                  dE and z's share of dq: autograd, outside
    dg_ik = sum_{j<=k} dL_ij (z_i[floor p + 1] - z_i[floor p])         a scan from left to right; 0 in the tail
    ds = dL + g (1 - g) dg, dq = ds K / sqrt(d), dk = ds^T Q / sqrt(d) with k' apart, its share has its own matrix products

`backward_rows` goes along rows (dq, dz), `backward_columns` down the keys (dk, dv, dk'); neither needs atomics, so gradients
repeat bit for bit. A column cannot scan along rows: for every row and tile it needs the count to the tile's right and the sum
of dL (z[floor p + 1] - z[floor p]) to its left. Kept from the forward pass, these would take room in every layer, and for all
T / BN tiles, as nobody knows the bands beforehand. So backward counts again (`prepare`, one matrix product per band tile) and
packs the carries of band tiles only; how many there are comes from `limit`, for one wait for the GPU. Where gates are so
small that no row ever counts to P - 1, all tiles are band, and the carries are 2 / BN floats for every pair.

Logits are in base 2: `scale` is log2(e) / sqrt(d), and exp2 is what the hardware has.
"""
import math

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from .separable import LOG2E, dot

# -----------------------------------------------------------------------------
# pieces of kernels

@triton.jit
def place(n, SIZE: tl.constexpr):
    """Which head this program works on and which block of its n rows. The last rows see the most keys and go first."""
    blocks = tl.cdiv(n, SIZE)
    return (tl.program_id(0) // blocks).to(tl.int64), blocks - 1 - tl.program_id(0) % blocks


@triton.jit
def load(x, rows, n, d: tl.constexpr, D: tl.constexpr):
    """These rows of an (n, d) matrix; zeros for rows that do not exist, and from d up to the power of two D."""
    cols = tl.arange(0, D)
    there = rows[:, None] < n
    if d < D:
        there = there & (cols[None, :] < d)
    return tl.load(x + rows[:, None] * d + cols[None, :], mask=there, other=0.0)


@triton.jit
def store(x, rows, n, tile, d: tl.constexpr, D: tl.constexpr):
    cols = tl.arange(0, D)
    tl.store(x + rows[:, None] * d + cols[None, :], tile.to(x.dtype.element_ty), mask=(rows[:, None] < n) & (cols[None, :] < d))


@triton.jit
def attend(logits, v, m, den, acc):
    """One more tile of softmax(logits) v. m: a row's largest logit so far, den: the sum of weights, acc: of values."""
    new = tl.maximum(m, tl.max(logits, 1))
    w, shrink = tl.exp2(logits - new[:, None]), tl.exp2(m - new)
    return new, den * shrink + tl.sum(w, 1), dot(w.to(v.dtype), v, acc * shrink[:, None])


@triton.jit
def gates(s, scale, seen):
    return tl.where(seen, 1 / (1 + tl.exp2(-scale * s)), 0.0)


@triton.jit
def look_up(z, count, g, P: tl.constexpr):
    """Positions p of a tile's keys, their bias, and its slope, which is 0 at P - 1. z points at rows, count is what lies to the right."""
    p = tl.minimum(count[:, None] + tl.cumsum(g, 1, reverse=True), P - 1)
    low = p.to(tl.int32)
    a = tl.load(z[:, None] + low).to(tl.float32)
    b = tl.load(z[:, None] + tl.minimum(low + 1, P - 1)).to(tl.float32)
    return p, a + (p - low) * (b - a), b - a


# -----------------------------------------------------------------------------
# forward

@triton.jit
def forward(q, k, v, gk, z, o, lse, limit, Tq, Tk, scale, P: tl.constexpr, d: tl.constexpr, D: tl.constexpr, SEP: tl.constexpr,
            BAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head, block = place(Tq, BM)
    q, o, k, v, gk = q + head * Tq * d, o + head * Tq * d, k + head * Tk * d, v + head * Tk * d, gk + head * Tk * d
    r, keys = block * BM + tl.arange(0, BM), tl.arange(0, BN)
    i, real, at = r + Tk - Tq, r < Tq, head * Tq + r
    z += (head * Tq + tl.minimum(r, Tq - 1)) * P
    qi = load(q, r, Tq, d, D)
    if BAND:
        m = tl.full((BM,), -1e30, tl.float32)  # not -inf: where a tile is all masked, -inf - -inf would be NaN
        den = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, D), tl.float32)
        count = tl.where(real, 0.0, P)
        end = tl.cdiv(tl.minimum(block * BM + BM, Tq) + Tk - Tq, BN) * BN
        while (end > 0) & ((end > block * BM + Tk - Tq) | (tl.min(count) < P - 1)):  # the diagonal's tiles, and until all are at P - 1
            j = end - BN + keys
            seen = j[None, :] <= i[:, None]
            kj, vj = load(k, j, Tk, d, D), load(v, j, Tk, d, D)
            s = dot(qi, tl.trans(load(gk, j, Tk, d, D) if SEP else kj))
            g = gates(s, scale, seen)
            p, bias, slope = look_up(z, count, g, P)
            # q . k once more on top of the bias: a sum done by tensor cores leaves the logits, and with them all of
            # softmax, in their layout; a plain sum had the layout of the look-up, which took every exp2 twice
            s = dot(qi, tl.trans(kj), bias * (LOG2E / scale)) * scale
            m, den, acc = attend(tl.where(seen, s, float("-inf")), vj, m, den, acc)
            count += tl.sum(g, 1)
            end -= BN
        tl.store(limit + at, tl.zeros((BM,), tl.int32) + end, mask=real)
    else:  # goes on from what the band left: its output is a sum of weights 1 at the level lse
        m = tl.load(lse + at, mask=real, other=0.0)
        den = tl.full((BM,), 1.0, tl.float32)
        acc = load(o, r, Tq, d, D).to(tl.float32)
        far = tl.load(z + P - 1).to(tl.float32) * LOG2E
        lim = tl.load(limit + at, mask=real, other=0)
        for n in range(tl.cdiv(tl.max(lim), BN)):
            j = n * BN + keys
            s = dot(qi, tl.trans(load(k, j, Tk, d, D))) * scale + far[:, None]
            m, den, acc = attend(tl.where(j[None, :] < lim[:, None], s, float("-inf")), load(v, j, Tk, d, D), m, den, acc)
    store(o, r, Tq, acc / den[:, None], d, D)
    tl.store(lse + at, m + tl.log2(den), mask=real)


# -----------------------------------------------------------------------------
# backward

@triton.jit
def prepare(q, gk, o, do, delta, limit, first, start, counts, Tq, Tk, scale, d: tl.constexpr, D: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr):
    """delta, and for every row and band tile the count to the tile's right."""
    head, block = place(Tq, BM)
    q, o, do, gk = q + head * Tq * d, o + head * Tq * d, do + head * Tq * d, gk + head * Tk * d
    r, keys = block * BM + tl.arange(0, BM), tl.arange(0, BN)
    i, real, at = r + Tk - Tq, r < Tq, head * Tq + r
    qi, oi, doi = load(q, r, Tq, d, D), load(o, r, Tq, d, D), load(do, r, Tq, d, D)
    tl.store(delta + at, tl.sum(oi.to(tl.float32) * doi.to(tl.float32), 1), mask=real)
    lim = tl.load(limit + at, mask=real, other=Tk)
    top = (tl.minimum(block * BM + BM, Tq) + Tk - Tq - 1) // BN
    block += head * tl.cdiv(Tq, BM)
    counts += tl.load(start + block) * BM + tl.arange(0, BM)
    count = tl.zeros((BM,), tl.float32)
    for back in range(top - tl.load(first + block) + 1):
        j = (top - back) * BN + keys
        tl.store(counts + (top - back) * BM, count)
        s = dot(qi, tl.trans(load(gk, j, Tk, d, D)))
        count += tl.sum(gates(s, scale, (j[None, :] <= i[:, None]) & (j[None, :] >= lim[:, None])), 1)


@triton.jit
def backward_rows(q, k, v, gk, z, do, lse, delta, limit, first, start, counts, sums, dq, dz, Tq, Tk, scale, P: tl.constexpr,
                  d: tl.constexpr, D: tl.constexpr, SEP: tl.constexpr, BAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dq and dz (B, H, P, Tq). The tail comes first and the band adds to it: left to right."""
    head, block = place(Tq, BM)
    q, do, dq = q + head * Tq * d, do + head * Tq * d, dq + head * Tq * d
    k, v, gk = k + head * Tk * d, v + head * Tk * d, gk + head * Tk * d
    r, keys = block * BM + tl.arange(0, BM), tl.arange(0, BN)
    i, real, at = r + Tk - Tq, r < Tq, head * Tq + r
    z += (head * Tq + tl.minimum(r, Tq - 1)) * P
    dz += head * Tq * P + r
    qi, doi = load(q, r, Tq, d, D), load(do, r, Tq, d, D)
    lsei, deltai = tl.load(lse + at, mask=real, other=0.0), tl.load(delta + at, mask=real, other=0.0)
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if BAND:
        lim = tl.load(limit + at, mask=real, other=Tk)
        top = (tl.minimum(block * BM + BM, Tq) + Tk - Tq - 1) // BN
        block += head * tl.cdiv(Tq, BM)
        here = tl.load(start + block) * BM + tl.arange(0, BM)
        for n in range(tl.load(first + block), top + 1):
            j = n * BN + keys
            seen = (j[None, :] <= i[:, None]) & (j[None, :] >= lim[:, None])
            kj = load(k, j, Tk, d, D)
            gkj = load(gk, j, Tk, d, D) if SEP else kj
            s = dot(qi, tl.trans(kj))
            g = gates(dot(qi, tl.trans(gkj)) if SEP else s, scale, seen)
            p, bias, slope = look_up(z, tl.load(counts + here + n * BM), g, P)
            a = tl.where(seen, tl.exp2(s * scale + LOG2E * bias - lsei[:, None]), 0.0)
            ds = a * (dot(doi, tl.trans(load(v, j, Tk, d, D))) - deltai[:, None])
            dg = g * (1 - g) * (total[:, None] + tl.cumsum(ds * slope, 1))
            tl.store(sums + here + n * BM, total)
            total += tl.sum(ds * slope, 1)
            # dz: one column of it at a time, those that the tile reaches. Rows are this program's own: it may add in memory
            for e in range(tl.min(p).to(tl.int32), tl.minimum(tl.max(p).to(tl.int32) + 2, P)):
                part = tl.sum(tl.maximum(1 - tl.abs(p - e), 0.0) * ds, 1)
                tl.store(dz + e * Tq, tl.load(dz + e * Tq, mask=real, other=0.0) + part, mask=real)
            tl.debug_barrier()  # the next tile's loads come after these stores, whichever thread does them
            if SEP:
                acc = dot(dg.to(gkj.dtype), gkj, acc)
            else:
                ds += dg
            acc = dot(ds.to(kj.dtype), kj, acc)
        acc = acc * (scale / LOG2E) + load(dq, r, Tq, d, D).to(tl.float32)
    else:
        far = tl.load(z + P - 1).to(tl.float32) * LOG2E - lsei
        lim = tl.load(limit + at, mask=real, other=0)
        for n in range(tl.cdiv(tl.max(lim), BN)):
            j = n * BN + keys
            kj = load(k, j, Tk, d, D)
            a = tl.where(j[None, :] < lim[:, None], tl.exp2(dot(qi, tl.trans(kj)) * scale + far[:, None]), 0.0)
            ds = a * (dot(doi, tl.trans(load(v, j, Tk, d, D))) - deltai[:, None])
            total += tl.sum(ds, 1)
            acc = dot(ds.to(kj.dtype), kj, acc)
        acc *= scale / LOG2E
        tl.store(dz + (P - 1) * Tq, total, mask=real)
    store(dq, r, Tq, acc, d, D)


@triton.jit
def backward_columns(q, k, v, gk, z, do, lse, delta, limit, last, start, counts, sums, dk, dv, dgk, Tq, Tk, scale, P: tl.constexpr,
                     d: tl.constexpr, D: tl.constexpr, SEP: tl.constexpr, BAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dk, dv and dgk of BN keys, from the rows that see them. The tail comes first and the band adds to it."""
    tiles, blocks = tl.cdiv(Tk, BN), tl.cdiv(Tq, BM)
    head, n = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    q, do, k, v, gk = q + head * Tq * d, do + head * Tq * d, k + head * Tk * d, v + head * Tk * d, gk + head * Tk * d
    dk, dv, dgk = dk + head * Tk * d, dv + head * Tk * d, dgk + head * Tk * d
    j = n * BN + tl.arange(0, BN)
    kj, vj = load(k, j, Tk, d, D), load(v, j, Tk, d, D)
    dkj = tl.zeros((BN, D), tl.float32)
    dvj = tl.zeros((BN, D), tl.float32)
    begin = tl.maximum(n * BN - (Tk - Tq), 0) // BM
    if BAND:
        gkj = load(gk, j, Tk, d, D) if SEP else kj
        dgkj = tl.zeros((BN, D), tl.float32)
        for block in range(begin, tl.load(last + head * tiles + n) + 1):
            r = block * BM + tl.arange(0, BM)
            i, real, at = r + Tk - Tq, r < Tq, head * Tq + r
            lim = tl.load(limit + at, mask=real, other=Tk)
            if tl.min(lim) < n * BN + BN:  # not every block up to the last has this tile in its band
                here = (tl.load(start + head * blocks + block) + n) * BM + tl.arange(0, BM)
                qi, doi = load(q, r, Tq, d, D), load(do, r, Tq, d, D)
                lsei, deltai = tl.load(lse + at, mask=real, other=0.0), tl.load(delta + at, mask=real, other=0.0)
                seen = (j[None, :] <= i[:, None]) & (j[None, :] >= lim[:, None])
                s = dot(qi, tl.trans(kj))
                g = gates(dot(qi, tl.trans(gkj)) if SEP else s, scale, seen)
                p, bias, slope = look_up(z + (head * Tq + tl.minimum(r, Tq - 1)) * P, tl.load(counts + here), g, P)
                a = tl.where(seen, tl.exp2(s * scale + LOG2E * bias - lsei[:, None]), 0.0)
                dvj = dot(tl.trans(a.to(doi.dtype)), doi, dvj)
                ds = a * (dot(doi, tl.trans(vj)) - deltai[:, None])
                dg = g * (1 - g) * (tl.load(sums + here)[:, None] + tl.cumsum(ds * slope, 1))
                if SEP:
                    dgkj = dot(tl.trans(dg.to(qi.dtype)), qi, dgkj)
                else:
                    ds += dg
                dkj = dot(tl.trans(ds.to(qi.dtype)), qi, dkj)
        dkj = dkj * (scale / LOG2E) + load(dk, j, Tk, d, D).to(tl.float32)
        dvj += load(dv, j, Tk, d, D).to(tl.float32)
        if SEP:
            store(dgk, j, Tk, dgkj * (scale / LOG2E), d, D)
    else:  # tiles lie as (keys, rows): nothing is scanned, and the weights need not be turned round for the products
        for block in range(begin, blocks):
            r = block * BM + tl.arange(0, BM)
            real, at = r < Tq, head * Tq + r
            lim = tl.load(limit + at, mask=real, other=0)
            far = tl.load(z + at * P + P - 1, mask=real, other=0.0).to(tl.float32) * LOG2E - tl.load(lse + at, mask=real, other=0.0)
            qi, doi = load(q, r, Tq, d, D), load(do, r, Tq, d, D)
            a = tl.where(j[:, None] < lim[None, :], tl.exp2(dot(kj, tl.trans(qi)) * scale + far[None, :]), 0.0)
            dvj = dot(a.to(doi.dtype), doi, dvj)
            ds = a * (dot(vj, tl.trans(doi)) - tl.load(delta + at, mask=real, other=0.0)[None, :])
            dkj = dot(ds.to(qi.dtype), qi, dkj)
        dkj *= scale / LOG2E
    store(dk, j, Tk, dkj, d, D)
    store(dv, j, Tk, dvj, d, D)


# -----------------------------------------------------------------------------
# from tensors to kernels and back

def tiles(q, kind):
    """
    Tiles of BM rows and BN keys: the largest for which the compiler's reports for sm_80 and sm_90 have no spills in forward and few
    in backward (bench.py kernels). Any would be right.
    """
    if q.dtype == torch.float32:
        BM, BN, warps = 32, 16, 8
    elif q.size(3) <= 64:
        BM, BN, warps = dict(band=(64, 32, 4), tail=(128, 64, 8), tail_columns=(64, 64, 4))[kind]
    else:
        BM, BN, warps = dict(band=(32, 32, 4), tail=(64, 32, 4), tail_columns=(64, 64, 8))[kind]
    return dict(d=q.size(3), D=triton.next_power_of_2(q.size(3)), BM=BM, BN=BN, num_warps=warps, num_stages=2)


def bands(limit, Tk, BM, BN):
    """
    Where the bands lie if rows come in blocks of BM and keys in tiles of BN. first (B H, blocks): a block's leftmost tile;
    last (B H, tiles): the last block with this tile in its band; start (B H, blocks) + tile: its place among all band tiles; how
    many there are, for which we must wait for the GPU.
    """
    Tq, limit = limit.size(2), limit.flatten(0, 1)
    block = torch.arange(triton.cdiv(Tq, BM), device=limit.device).expand(limit.size(0), -1)
    first = F.pad(limit, (0, block.size(1) * BM - Tq), value=Tk).unflatten(1, (-1, BM)).amin(2) // BN
    last = block.new_full((limit.size(0), triton.cdiv(Tk, BN)), -1).scatter_reduce(1, first.long(), block, "amax").cummax(1)[0]
    size = ((block + 1) * BM).clamp(max=Tq).add(Tk - Tq - 1) // BN - first + 1
    end = size.flatten().cumsum(0).view_as(size)
    return first, last, end - size - first, int(end[-1, -1])


@torch.library.custom_op("nanope::cope", mutates_args=())
def cope(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, gate_keys: torch.Tensor | None
         ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All contiguous -> o, lse, limit."""
    (B, H, Tq, d), Tk = q.shape, k.size(2)
    o, lse, limit = torch.empty_like(q), q.new_empty(B, H, Tq, dtype=torch.float32), q.new_empty(B, H, Tq, dtype=torch.int32)
    with torch.cuda.device_of(q):
        for band in (True, False):
            t = tiles(q, "band" if band else "tail")
            forward[triton.cdiv(Tq, t["BM"]) * B * H,](
                q, k, v, k if gate_keys is None else gate_keys, z, o, lse, limit, Tq, Tk, LOG2E.value / math.sqrt(d),
                P=z.size(3), SEP=gate_keys is not None, BAND=band, **t)
    return o, lse, limit


@cope.register_fake
def _(q, k, v, z, gate_keys):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.int32)


@torch.library.custom_op("nanope::cope_backward", mutates_args=())
def cope_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, gate_keys: torch.Tensor | None,
                  o: torch.Tensor, lse: torch.Tensor, limit: torch.Tensor
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq, dk, dv, dz, dgk; an empty dgk where there are no gate keys."""
    (B, H, Tq, d), Tk, P, do = q.shape, k.size(2), z.size(3), do.contiguous()
    gk, scale = k if gate_keys is None else gate_keys, LOG2E.value / math.sqrt(d)
    dq, dk, dv, dz = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), lse.new_zeros(B, H, P, Tq)
    dgk = k.new_empty(0) if gate_keys is None else torch.empty_like(gate_keys)
    t = tiles(q, "band")
    first, last, start, total = bands(limit, Tk, t["BM"], t["BN"])
    delta, counts, sums = torch.empty_like(lse), lse.new_empty(total, t["BM"]), lse.new_empty(total, t["BM"])
    with torch.cuda.device_of(q):
        prepare[start.numel(),](q, gk, o, do, delta, limit, first, start, counts, Tq, Tk, scale, **t)
        for band in (False, True):
            t = dict(P=P, SEP=gate_keys is not None, BAND=band, **tiles(q, "band" if band else "tail"))
            backward_rows[triton.cdiv(Tq, t["BM"]) * B * H,](
                q, k, v, gk, z, do, lse, delta, limit, first, start, counts, sums, dq, dz, Tq, Tk, scale, **t)
            t |= tiles(q, "band" if band else "tail_columns")
            backward_columns[triton.cdiv(Tk, t["BN"]) * B * H,](
                q, k, v, gk, z, do, lse, delta, limit, last, start, counts, sums, dk, dv, dgk, Tq, Tk, scale, **t)
    return dq, dk, dv, torch.empty_like(z).copy_(dz.transpose(2, 3)), dgk


@cope_backward.register_fake
def _(do, q, k, v, z, gate_keys, o, lse, limit):
    dgk = k.new_empty(0) if gate_keys is None else torch.empty_like(gate_keys)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(z), dgk


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def backward(ctx, do, dlse, dlimit):
    saved = ctx.saved_tensors  # once: checkpointing does not hand them out twice
    *grads, dgk = cope_backward(do, *saved)
    return *grads, None if saved[4] is None else dgk


cope.register_autograd(backward, setup_context=save)


def cope_attention(q, k, v, pos_emb, gate_keys=None):
    """As in model_cope.py: q (B, H, Tq, d); k, v, gate_keys (B, H, Tk, d); pos_emb (d, P) -> (B, H, Tq, d)."""
    assert q.size(2) <= k.size(2) and q.dtype == k.dtype == v.dtype, "the queries are the last of the keys, of one dtype"
    z = q @ pos_emb.to(q.dtype)
    gate_keys = None if gate_keys is None else gate_keys.contiguous()
    return cope(q.contiguous(), k.contiguous(), v.contiguous(), z.contiguous(), gate_keys)[0]  # kernels then need no strides
