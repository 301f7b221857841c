"""
CoPE in Triton, equal to cope_attention in model_cope.py, without a T x T matrix of logits.

    g_ij = sigmoid(q_i . k'_j / sqrt(d))          k' the gate keys, k if there are none
    p_ij = min(g_ij + ... + g_ii, P - 1)
    logit_ij = q_i . k_j / sqrt(d) + bias_ij      bias_ij = z_i at p_ij, interpolated

with z = q E (B, H, Tq, P) and E the table. A program takes BM rows and walks the keys leftwards
from the diagonal in tiles of BN. Each row carries its count from tile to tile. Once all rows have
counted to P - 1 the bias of every key further left is z_i[P - 1], and no gate matters: plain
attention. So every kernel has two loops, one for this band next to the diagonal, one for the tail.
Start (B, H, blocks) is where they meet: the first key in the band of a block of rows.

Backward, with A = softmax(logit), and e the hat function 1 - |p - n| where that is positive:

    delta_i = dO_i . O_i
    dL_ij = A_ij (dO_i . v_j - delta_i)
    dv = A^T dO
    dz_i[n] = sum_j dL_ij e(p_ij - n)             dE and z's share of dq: autograd, outside
    dg_ik = sum_{j<=k} dL_ij (z_i[floor p + 1] - z_i[floor p])
                                                  a scan from left to right; 0 in the tail
    ds = dL + g (1 - g) dg                        with k' apart, its share has its own products
    dq = ds K / sqrt(d), dk = ds^T Q / sqrt(d)

cope_rows goes along rows (dq, dz), cope_columns down the keys (dk, dv, dk'); neither needs atomics,
so gradients repeat bit for bit. A column cannot scan along rows: for every row and tile of the band
it needs the count to the tile's right and the sum of dL (z[floor p + 1] - z[floor p]) to its left.
cope_rows leaves it these carries. There is room for all tiles, so that the GPU need not be asked
how wide the bands are: 8 bytes a row and tile; with tiles of 32 keys, 1.07 GB a head at T = 65,536.
"""
import torch
import triton
import triton.language as tl

from .common import (
    LOG2E,
    STEP,
    attend,
    check_memory,
    differentiable,
    dot,
    forward_outputs,
    gradients,
    head_of,
    last_block,
    launch,
    new,
    operator,
    out_of,
    place,
    place_keys,
    read,
    read_gradient,
    rows_of,
    top_tile,
    triangle,
    write,
)

# -----------------------------------------------------------------------------
# pieces of kernels

@triton.jit
def gates(s, c, seen):
    """sigmoid(q . k / sqrt(d)) of a tile, and 0 for keys that are not seen."""
    return tl.where(seen, 1 / (1 + tl.exp2(-c * s)), 0.0)


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


@triton.jit
def add_to_dz(dz, p, ds, there, Tq, P: tl.constexpr):
    """The columns of dz that a tile's p reach, one by one. No other program has these rows."""
    for e in range(tl.min(p).to(tl.int32), tl.minimum(tl.max(p).to(tl.int32) + 2, P)):
        part = tl.sum(tl.maximum(1 - tl.abs(p - e), 0.0) * ds, 1)
        tl.store(dz + e * Tq, tl.load(dz + e * Tq, mask=there, other=0.0) + part, mask=there)
    tl.debug_barrier()  # the next tile's loads come after these stores, whichever thread does them


# -----------------------------------------------------------------------------
# kernels. With SEP there are gate keys GK beside the keys, with strides like theirs

@triton.jit
def cope_forward(Q, K, V, GK, Z, Start, Out, Lse, scale, H, Tq, Tk,
                 qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, SEP: tl.constexpr):
    bh, block = place(Tq, BM)
    r, i, there, row = rows_of(block, bh, Tq, Tk, BM)
    K, V, GK = head_of(K, bh, H, kb, kh), head_of(V, bh, H, vb, vh), head_of(GK, bh, H, kb, kh)
    q = read(head_of(Q, bh, H, qb, qh), block * BM, Tq, qt, D, C, BM)
    z = Z + (bh * Tq + tl.minimum(r, Tq - 1)) * P
    c = scale * LOG2E
    m = tl.full((BM,), -1e30, tl.float32)  # not -inf: in a tile all masked -inf - -inf would be NaN
    den = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, C), tl.float32)
    count = tl.where(there, 0.0, P)
    ones = triangle(BN)
    end = (top_tile(block, Tq, Tk, BM, BN) + 1) * BN
    # the band: the diagonal's tiles, and until all are at P - 1
    while (end > 0) & ((end > block * BM + Tk - Tq) | (tl.min(count) < P - 1)):
        for _ in range(tl.minimum(end // BN, STEP)):  # only a for loads ahead (cp.async)
            end -= BN
            j = end + tl.arange(0, BN)
            seen = j[None, :] <= i[:, None]
            k = tl.trans(read(K, end, Tk, kt, D, C, BN))
            s = dot(q, k)
            if SEP:
                s = dot(q, tl.trans(read(GK, end, Tk, kt, D, C, BN)))
            g = gates(s, c, seen)
            p, bias, slope = look_up(z, count, g, ones, P)
            count += tl.sum(g, 1)
            # q . k anew on top of the bias: a plain sum's layout takes every exp2 twice
            s = tl.where(seen, dot(q, k, bias / scale) * c, float("-inf"))
            m, den, acc = attend(s, read(V, end, Tk, vt, D, C, BN), m, den, acc)
    far = tl.load(z + P - 1).to(tl.float32) * LOG2E
    for n in range(0, end, BN):  # the tail
        s = dot(q, tl.trans(read(K, n, Tk, kt, D, C, BN))) * c + far[:, None]
        m, den, acc = attend(s, read(V, n, Tk, vt, D, C, BN), m, den, acc)
    write(out_of(Out, bh, H, Tq, D), acc / den[:, None], block * BM, Tq, H * D, D)
    tl.store(Lse + row, m + tl.log2(den), mask=there)
    tl.store(Start + bh * tl.cdiv(Tq, BM) + block, end)


@triton.jit
def cope_rows(Q, K, V, GK, Z, Start, Out, Lse, dOut, dQ, dZ, Delta, Counts, Sums, scale, H, Tq, Tk,
              qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, SEP: tl.constexpr):
    """dq, dz (B, H, P, Tq), and for the columns delta and the carries, of every row and tile."""
    bh, block = place(Tq, BM)
    r, i, there, row = rows_of(block, bh, Tq, Tk, BM)
    K, V, GK = head_of(K, bh, H, kb, kh), head_of(V, bh, H, vb, vh), head_of(GK, bh, H, kb, kh)
    q = read(head_of(Q, bh, H, qb, qh), block * BM, Tq, qt, D, C, BM)
    do, delta = read_gradient(dOut, Out, bh, block, H, Tq, D, C, BM)
    tl.store(Delta + row, delta, mask=there)
    lse = tl.load(Lse + row, mask=there, other=float("inf"))
    z = Z + (bh * Tq + tl.minimum(r, Tq - 1)) * P
    dZ += bh * P * Tq + r
    c = scale * LOG2E
    block_of_all = bh * tl.cdiv(Tq, BM) + block
    start = tl.load(Start + block_of_all)
    end = (top_tile(block, Tq, Tk, BM, BN) + 1) * BN
    here = block_of_all * tl.cdiv(Tk, BN) * BM + tl.arange(0, BM)
    ones = triangle(BN)

    count = tl.zeros((BM,), tl.float32)
    for back in range(BN, end - start + BN, BN):  # the band leftwards, as forward counted
        n = end - back
        tl.store(Counts + here + n // BN * BM, count)
        s = dot(q, tl.trans(read(GK, n, Tk, kt, D, C, BN)))
        count += tl.sum(gates(s, c, n + tl.arange(0, BN)[None, :] <= i[:, None]), 1)
    tl.debug_barrier()

    dq = tl.zeros((BM, C), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    far = tl.load(z + P - 1).to(tl.float32) * LOG2E - lse
    for n in range(0, start, BN):  # the tail
        k = read(K, n, Tk, kt, D, C, BN)
        a = tl.exp2(dot(q, tl.trans(k)) * c + far[:, None])
        ds = a * (dot(do, tl.trans(read(V, n, Tk, vt, D, C, BN))) - delta[:, None])
        total += tl.sum(ds, 1)
        dq = dot(ds.to(k.dtype), k, dq)
    tl.store(dZ + (P - 1) * Tq, total, mask=there)
    tl.debug_barrier()

    left = tl.zeros((BM,), tl.float32)
    for n in range(start, end, BN):  # the band
        seen = n + tl.arange(0, BN)[None, :] <= i[:, None]
        k = read(K, n, Tk, kt, D, C, BN)
        s = dot(q, tl.trans(k))
        gk = read(GK, n, Tk, kt, D, C, BN) if SEP else k
        g = gates(dot(q, tl.trans(gk)) if SEP else s, c, seen)
        p, bias, slope = look_up(z, tl.load(Counts + here + n // BN * BM), g, ones, P)
        a = tl.where(seen, tl.exp2(s * c + bias * LOG2E - lse[:, None]), 0.0)
        ds = a * (dot(do, tl.trans(read(V, n, Tk, vt, D, C, BN))) - delta[:, None])
        dg = g * (1 - g) * (left[:, None] + tl.cumsum(ds * slope, 1))
        tl.store(Sums + here + n // BN * BM, left)
        left += tl.sum(ds * slope, 1)
        add_to_dz(dZ, p, ds, there, Tq, P)
        if SEP:
            dq = dot(dg.to(gk.dtype), gk, dq)
        else:
            ds += dg
        dq = dot(ds.to(k.dtype), k, dq)
    write(out_of(dQ, bh, H, Tq, D), dq * scale, block * BM, Tq, H * D, D)


@triton.jit
def cope_columns(Q, K, V, GK, Z, Start, Lse, dOut, Delta, Counts, Sums, dK, dV, dGK, scale,
                 H, Tq, Tk, qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, SEP: tl.constexpr,
                 BLOCKS: tl.constexpr):
    """dk, dv and dgk of BN keys, from the rows that see them."""
    blocks, tiles = tl.cdiv(Tq, BM), tl.cdiv(Tk, BN)
    bh, tile = place_keys(tiles)
    first = tile * BN
    Q, dOut = head_of(Q, bh, H, qb, qh), out_of(dOut, bh, H, Tq, D)
    j = first + tl.arange(0, BN)
    # turned here: in the loop they would go to shared memory anew for every block
    kt_ = tl.trans(read(head_of(K, bh, H, kb, kh), first, Tk, kt, D, C, BN))
    vt_ = tl.trans(read(head_of(V, bh, H, vb, vh), first, Tk, vt, D, C, BN))
    gkt = tl.trans(read(head_of(GK, bh, H, kb, kh), first, Tk, kt, D, C, BN))
    dk = tl.zeros((BN, C), tl.float32)
    dv = tl.zeros((BN, C), tl.float32)
    dgk = tl.zeros((BN, C), tl.float32)
    c = scale * LOG2E
    ones = triangle(BN)
    begin = tl.maximum(first - (Tk - Tq), 0) // BM
    end = tl.maximum(last_block(Start, bh, first + BN, blocks, BLOCKS), begin) + 1
    for BAND in tl.static_range(1, -1, -1):
        for block in range(begin, end):
            r, i, there, row = rows_of(block, bh, Tq, Tk, BM)
            seen = j[None, :] <= i[:, None]
            lse = tl.load(Lse + row, mask=there, other=float("inf"))
            delta = tl.load(Delta + row, mask=there, other=0.0)
            z = Z + (bh * Tq + tl.minimum(r, Tq - 1)) * P
            q = read(Q, block * BM, Tq, qt, D, C, BM)
            do = read(dOut, block * BM, Tq, H * D, D, C, BM)
            s = dot(q, kt_)
            if BAND:  # not every block up to the last has this tile in its band
                mine = tl.where(there, tl.load(Start + bh * blocks + block), Tk) <= first
                here = ((bh * blocks + block) * tiles + tile) * BM + tl.arange(0, BM)
                count = tl.load(Counts + here, mask=mine, other=P)
                left = tl.load(Sums + here, mask=mine, other=0.0)
                g = gates(dot(q, gkt) if SEP else s, c, seen)
                p, bias, slope = look_up(z, count, g, ones, P)
            else:
                bias = tl.load(z + P - 1).to(tl.float32)[:, None]
            a = tl.where(seen, tl.exp2(s * c + bias * LOG2E - lse[:, None]), 0.0)
            dv = dot(tl.trans(a.to(do.dtype)), do, dv)
            ds = a * (dot(do, vt_) - delta[:, None])
            if BAND:
                dg = g * (1 - g) * (left[:, None] + tl.cumsum(ds * slope, 1))
                if SEP:
                    dgk = dot(tl.trans(dg.to(q.dtype)), q, dgk)
                else:
                    ds += dg
            dk = dot(tl.trans(ds.to(q.dtype)), q, dk)
        begin, end = end, blocks
    write(out_of(dK, bh, H, Tk, D), dk * scale, first, Tk, H * D, D)
    write(out_of(dV, bh, H, Tk, D), dv, first, Tk, H * D, D)
    if SEP:
        write(out_of(dGK, bh, H, Tk, D), dgk * scale, first, Tk, H * D, D)


# -----------------------------------------------------------------------------
# from tensors to kernels and back

def tiles(q, sep=False):
    """(BM rows, BN keys, warps, stages) of forward and rows, and of columns: with gate keys."""
    d = q.size(3)
    if q.dtype == torch.float32:
        rows = 32 if 16 < d <= 64 else 16
        return (rows, 16, 8, 2), (rows, 16, 8, 1)
    if d > 64:
        return (32, 32, 4, 2), (32, 32, 4, 1 if sep else 2)
    keys = 16 if sep or d <= 16 else 32
    return (64, keys, 4, 2), (64, keys, 4, 1 if sep else 2)


@operator("cope(Tensor q, Tensor k, Tensor v, Tensor z, Tensor? gate_keys)"
          " -> (Tensor, Tensor, Tensor)",
          lambda q, k, v, z, gate_keys: forward_outputs(q, tiles(q, gate_keys is not None)[0][0]))
def cope(q, k, v, z, gate_keys):
    """z contiguous, gate keys with the strides of k -> out, lse, start."""
    check_memory(z)
    sep = gate_keys is not None
    gk = gate_keys if sep else k
    assert gk.stride() == k.stride(), "kernels step through gate keys as through keys"
    tile, _ = tiles(q, sep)
    out, lse, start = forward_outputs(q, tile[0])
    launch(cope_forward, tile, start.size(2), q, k, v, gk, z, start, out, lse, P=z.size(3), SEP=sep)
    return out, lse, start


@operator("cope_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor z, Tensor? gate_keys,"
          " Tensor out, Tensor lse, Tensor start) -> Tensor[]",
          lambda dout, q, k, v, z, gate_keys, *_: all_gradients(q, k, v, z, gate_keys))
def cope_backward(dout, q, k, v, z, gate_keys, out, lse, start):
    """-> dq, dk, dv, dz and, where there are gate keys, dgk."""
    check_memory(z, lse, start)
    sep = gate_keys is not None
    gk = gate_keys if sep else k
    out, dout = (x.transpose(1, 2).contiguous() for x in (out, dout))  # as the kernels read them
    dq, dk, dv, dz, *dgk = grads = all_gradients(q, k, v, z, gate_keys)
    rows, columns = tiles(q, sep)
    B, H, blocks = start.shape
    keys, delta = triton.cdiv(k.size(2), rows[1]), torch.empty_like(lse)
    counts, sums = lse.new_empty(2, B, H, blocks, keys, rows[0])
    dz_turned = lse.new_zeros(B, H, z.size(3), q.size(2))
    launch(cope_rows, rows, blocks, q, k, v, gk, z, start, out, lse, dout,
           dq, dz_turned, delta, counts, sums, P=z.size(3), SEP=sep)
    launch(cope_columns, columns, keys, q, k, v, gk, z, start, lse, dout, delta, counts, sums,
           dk, dv, dgk[0] if sep else dk, P=z.size(3), SEP=sep,
           BLOCKS=triton.next_power_of_2(blocks))
    dz.copy_(dz_turned.transpose(2, 3))
    return grads


def all_gradients(q, k, v, z, gate_keys):
    """Empty dq, dk, dv, dz and, where there are gate keys, dgk."""
    return gradients(q, k, v, z) + ([] if gate_keys is None else [new(gate_keys)])


differentiable(cope, lambda *args: (*cope_backward(*args), None)[:5])  # None for no gate keys


def cope_attention(q, k, v, pos_emb, gate_keys=None):
    """cope_attention of model_cope.py."""
    z = (q @ pos_emb.to(q.dtype)).contiguous()
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    if gate_keys is not None:
        k, gate_keys = torch.stack((k, gate_keys))
    return cope(q, k, v, z, gate_keys)[0]
