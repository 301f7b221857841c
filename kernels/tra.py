"""
TRA in Triton, equal to tra_attention in model_tra.py, without a T x T matrix of logits.

    s_ij = q_i . k_j / sqrt(d), only keys with s_ij > 0 survive
    C_ij = survivors among keys j ... i
    logit_ij = s_ij + C_ij log delta_i             log delta (B, H, Tq) float32

A row without survivors gives 0. As in cope.py a program takes BM rows and walks the keys leftwards
from the diagonal in tiles of BN, each row carrying its count. It stops where the decay leaves too
little to matter, by a bound like that of FoX's pruning (Lin et al., 2025, arXiv 2504.06949). With c
a row's count so far and N the keys to come, those can add at most

    sum_{n>=1} exp(U + (c + n) log delta) <= exp(U + (c + 1) log delta) min(N, 1 / (1 - delta))
    U = |q_i| max|k_j| / sqrt(d)

to the sum of weights that the row already has. A block stops, for all kernels, when this is below
e^-17 of that sum for all its rows: 4e-8, less than float32 sees. (The gradient of log delta weighs
keys by their count besides: there, 4e-8 times the counts left out.) A row without survivors never
stops. Start (B, H, blocks) is the first key that a block reads.

Backward, with A = softmax(logit); the count has no gradient:

    dL_ij = A_ij (dO_i . v_j - dO_i . O_i)        dv = A^T dO
    dq = dL K / sqrt(d)     dk = dL^T Q / sqrt(d)     dlog delta_i = sum_j dL_ij C_ij

tra_rows counts again and leaves every row's count to the right of every tile to tra_columns: 4
bytes each, .27 GB a head at T = 65,536, so that nobody has to ask the GPU how many there are.
"""
import torch
import triton
import triton.language as tl

from .common import (
    EDGE,
    LOG2E,
    STEP,
    attend,
    check_memory,
    differentiable,
    dot,
    edges,
    forward_outputs,
    gradients,
    head_of,
    last_block,
    launch,
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
def tra_forward(Q, K, V, Decay, Kmax, Start, Out, Lse, scale, H, Tq, Tk,
                qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr):
    bh, block = place(Tq, BM)
    r, i, there, row = rows_of(block, bh, Tq, Tk, BM)
    K, V = head_of(K, bh, H, kb, kh), head_of(V, bh, H, vb, vh)
    q = read(head_of(Q, bh, H, qb, qh), block * BM, Tq, qt, D, C, BM)
    slope = tl.load(Decay + row, mask=there, other=0.0) * LOG2E
    c = scale * LOG2E
    end = (top_tile(block, Tq, Tk, BM, BN) + 1) * BN
    tile = tl.arange(0, TILES)
    most_k = tl.load(Kmax + bh * tl.cdiv(Tk, EDGE) + tile, mask=tile * EDGE < end, other=0.0)
    bound = c * tl.max(most_k) * tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1))
    many = 1 / (1 - tl.exp2(slope))
    m = tl.full((BM,), -1e30, tl.float32)
    den = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, C), tl.float32)
    count = tl.zeros((BM,), tl.float32)
    ones = triangle(BN)
    more = True
    while (end > 0) & more:
        for _ in range(tl.minimum(end // BN, STEP)):  # only a for loads ahead (cp.async)
            end -= BN
            j = end + tl.arange(0, BN)
            s = dot(q, tl.trans(read(K, end, Tk, kt, D, C, BN)))
            passed, p = survivors(s, j[None, :] <= i[:, None], ones)
            p += count[:, None]
            logits = tl.where(passed, s * c + p * slope[:, None], float("-inf"))
            m, den, acc = attend(logits, read(V, end, Tk, vt, D, C, BN), m, den, acc)
            count += tl.sum(passed.to(tl.float32), 1)
        rest = bound + (count + 1) * slope + tl.log2(tl.minimum(many, end.to(tl.float32)))
        rest -= m + tl.log2(den)               # what keys to come can add, of what is there
        rest = tl.where((slope > 0) | (den == 0), float("inf"), rest)  # far keys matter more; none
        more = tl.max(tl.where(there, rest, float("-inf"))) > -17 * LOG2E
    some = den > 0
    o = tl.where(some[:, None], acc / den[:, None], 0.0)
    write(out_of(Out, bh, H, Tq, D), o, block * BM, Tq, H * D, D)
    tl.store(Lse + row, tl.where(some, m + tl.log2(den), 0.0), mask=there)
    tl.store(Start + bh * tl.cdiv(Tq, BM) + block, end)


@triton.jit
def tra_rows(Q, K, V, Decay, Start, Out, Lse, dOut, dQ, dDecay, Delta, Counts, scale, H, Tq, Tk,
             qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr):
    """dq, dlog delta; for the columns Delta = dO . O, and the count to the right of every tile."""
    bh, block = place(Tq, BM)
    r, i, there, row = rows_of(block, bh, Tq, Tk, BM)
    K, V = head_of(K, bh, H, kb, kh), head_of(V, bh, H, vb, vh)
    q = read(head_of(Q, bh, H, qb, qh), block * BM, Tq, qt, D, C, BM)
    do, delta = read_gradient(dOut, Out, bh, block, H, Tq, D, C, BM)
    tl.store(Delta + row, delta, mask=there)
    slope = tl.load(Decay + row, mask=there, other=0.0) * LOG2E
    lse = tl.load(Lse + row, mask=there, other=0.0)
    c = scale * LOG2E
    top = top_tile(block, Tq, Tk, BM, BN)
    block_of_all = bh * tl.cdiv(Tq, BM) + block
    Counts += block_of_all * tl.cdiv(Tk, BN) * BM + tl.arange(0, BM)
    dq = tl.zeros((BM, C), tl.float32)
    count = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    ones = triangle(BN)
    tiles = top + 1 - tl.load(Start + block_of_all) // BN
    tl.assume(tiles > 0)  # else ptxas (C7515) runs the products one after the other
    for back in range(tiles):
        n = (top - back) * BN
        tl.store(Counts + (top - back) * BM, count)
        j = n + tl.arange(0, BN)
        k = read(K, n, Tk, kt, D, C, BN)
        s = dot(q, tl.trans(k))
        passed, p = survivors(s, j[None, :] <= i[:, None], ones)
        p += count[:, None]
        a = tl.where(passed, tl.exp2(s * c + p * slope[:, None] - lse[:, None]), 0.0)
        ds = a * (dot(do, tl.trans(read(V, n, Tk, vt, D, C, BN))) - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq)
        total += tl.sum(ds * p, 1)
        count += tl.sum(passed.to(tl.float32), 1)
    write(out_of(dQ, bh, H, Tq, D), dq * scale, block * BM, Tq, H * D, D)
    tl.store(dDecay + row, total, mask=there)


@triton.jit
def tra_columns(Q, K, V, Decay, Start, Lse, dOut, Delta, Counts, dK, dV, scale, H, Tq, Tk,
                qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr):
    """dk and dv of BN keys, from the rows that see them."""
    blocks, tiles = tl.cdiv(Tq, BM), tl.cdiv(Tk, BN)
    bh, tile = place_keys(tiles)
    first = tile * BN
    Q, dOut = head_of(Q, bh, H, qb, qh), out_of(dOut, bh, H, Tq, D)
    j = first + tl.arange(0, BN)
    # turned here: in the loop they would go to shared memory anew for every block
    kt_ = tl.trans(read(head_of(K, bh, H, kb, kh), first, Tk, kt, D, C, BN))
    vt_ = tl.trans(read(head_of(V, bh, H, vb, vh), first, Tk, vt, D, C, BN))
    c = scale * LOG2E
    dk = tl.zeros((BN, C), tl.float32)
    dv = tl.zeros((BN, C), tl.float32)
    ones = triangle(BN)
    begin = tl.maximum(first - (Tk - Tq), 0) // BM
    # one block at least, though it may find nothing here: then C7515 can be ruled out
    end = tl.maximum(last_block(Start, bh, first + BN, blocks, BLOCKS), begin) + 1
    tl.assume(begin < end)
    for block in range(begin, end):
        r, i, there, row = rows_of(block, bh, Tq, Tk, BM)
        slope = tl.load(Decay + row, mask=there, other=0.0) * LOG2E
        lse = tl.load(Lse + row, mask=there, other=0.0)
        delta = tl.load(Delta + row, mask=there, other=0.0)
        start = tl.load(Start + bh * blocks + block)  # if it is later, Counts holds anything
        here = ((bh * blocks + block) * tiles + tile) * BM + tl.arange(0, BM)
        count = tl.load(Counts + here)
        q = read(Q, block * BM, Tq, qt, D, C, BM)
        do = read(dOut, block * BM, Tq, H * D, D, C, BM)
        s = dot(q, kt_)
        passed, p = survivors(s, (j[None, :] <= i[:, None]) & (j[None, :] >= start), ones)
        p += count[:, None]
        a = tl.where(passed, tl.exp2(s * c + p * slope[:, None] - lse[:, None]), 0.0)
        dv = dot(tl.trans(a.to(do.dtype)), do, dv)
        ds = a * (dot(do, vt_) - delta[:, None])
        dk = dot(tl.trans(ds.to(q.dtype)), q, dk)
    write(out_of(dK, bh, H, Tk, D), dk * scale, first, Tk, H * D, D)
    write(out_of(dV, bh, H, Tk, D), dv, first, Tk, H * D, D)


# -----------------------------------------------------------------------------
# from tensors to kernels and back

def tile_of(q):
    """BM rows, BN keys, warps and stages of all kernels."""
    d = q.size(3)
    if q.dtype == torch.float32:
        rows = 32 if d <= 16 or 32 < d <= 64 else 16  # the largest that spills nothing, as compiled
        return rows, 16, 8, 2
    return 64, 64 if d <= 64 else 32, 4, 2


@operator("tra(Tensor q, Tensor k, Tensor v, Tensor log_decay) -> (Tensor, Tensor, Tensor)",
          lambda q, *_: forward_outputs(q, tile_of(q)[0]))
def tra(q, k, v, log_decay):
    """log_decay (B, H, Tq) float32 and contiguous -> out, lse, start."""
    check_memory(log_decay)
    tile = tile_of(q)
    out, lse, start = forward_outputs(q, tile[0])
    kmax, _, n = edges(q, k, v)
    launch(tra_forward, tile, start.size(2), q, k, v, log_decay, kmax, start, out, lse, TILES=n)
    return out, lse, start


@operator("tra_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor out,"
          " Tensor lse, Tensor start) -> Tensor[]",
          lambda dout, q, k, v, log_decay, *_: gradients(q, k, v, log_decay))
def tra_backward(dout, q, k, v, log_decay, out, lse, start):
    """-> dq, dk, dv, dlog_decay."""
    check_memory(log_decay, lse, start)
    out, dout = (x.transpose(1, 2).contiguous() for x in (out, dout))  # as the kernels read them
    dq, dk, dv, ddecay = grads = gradients(q, k, v, log_decay)
    tile, blocks = tile_of(q), start.size(2)
    tiles, delta = triton.cdiv(k.size(2), tile[1]), torch.empty_like(lse)
    counts = lse.new_empty(*start.shape, tiles, tile[0])
    launch(tra_rows, tile, blocks, q, k, v,
           log_decay, start, out, lse, dout, dq, ddecay, delta, counts)
    launch(tra_columns, tile, tiles, q, k, v,
           log_decay, start, lse, dout, delta, counts, dk, dv,
           BLOCKS=triton.next_power_of_2(blocks))
    return grads


differentiable(tra, tra_backward)


def tra_attention(q, k, v, log_decay):
    """tra_attention of model_tra.py."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    return tra(q, k, v, log_decay.float().expand(q.shape[:3]).contiguous())[0]
