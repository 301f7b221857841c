"""
CABLE, FoX and ALiBi in Triton: flash attention whose bias is the difference of two numbers, one per
position.

    logit_ij = q_i . k_j / sqrt(d) - g_i (S_i - S_j),  j <= i

CABLE: S is the sum of the steps. FoX: S = -F, g = 1. ALiBi: S_i = i, g = m_h. S (B, H, Tk) and
g (B, H, Tq) are float32: bfloat16 is too coarse for S. A softmax does not see what is the same for
a whole row, so kernels work with

    x_ij = q_i . k_j + u_i (S_j - ref),  u_i = g_i sqrt(d)

where ref is the S of the block's first position. The difference is one number for a whole column of
a tile, so a pair of query and key costs a single fused multiply-add. Where it counts, in the stored
log-sum-exp, the row's own u_i (S_i - ref) is taken off again.

Backward, with P = softmax(logit) and dL the gradient of the logits:

    dL_ij = P_ij (dO_i . v_j - Delta_i),  Delta_i = dO_i . O_i
    along a row:      dq = dL K / sqrt(d)                      dg_i = -sum_j dL_ij (S_i - S_j)
                      dS_i -= g_i sum_j dL_ij
    along a column:   dk = dL^T Q / sqrt(d),  dv = P^T dO      dS_j += sum_i g_i dL_ij

One kernel goes along rows, one along columns, and each recomputes P: no atomics, so the same
numbers every time. (The row's part of dS is but rounding, which cancels the column's.)
"""
import torch
import triton
import triton.language as tl

from .common import (
    EDGE,
    LOG2E,
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
    write,
)
from .cpu import LONG

# -----------------------------------------------------------------------------
# kernels. q, k, v may have any strides; what they write lies in memory as (B, T, H, d), as a model
# wants it next. Tiles on the diagonal come first and are masked, the others need no mask

@triton.jit
def queries(Q, S, G, scale, H, Tq, Tk, qb, qh, qt,
            D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """This program's head and block of queries: their rows, and their q, u and S - ref."""
    bh, block = place(Tq, BM)
    r = block * BM + tl.arange(0, BM)
    q = read(head_of(Q, bh, H, qb, qh), block * BM, Tq, qt, D, C, BM)
    S += bh * Tk + Tk - Tq
    ref = tl.load(S + block * BM)
    Si = tl.load(S + r, mask=r < Tq, other=0.0) - ref
    u = tl.load(G + bh * Tq + r, mask=r < Tq, other=0.0) / scale
    return bh, block, r, q, u, Si, ref


@triton.jit
def separable_forward(Q, K, V, S, G, Kmax, Smax, Start, Out, Lse, scale, H, Tq, Tk,
                      qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr):
    """
    BM queries walk the keys, BN at a time: first those around the diagonal, then from `start` on.
    Earlier keys have decayed: the bound is like that of FoX's pruning (arXiv 2504.06949). By then
    row i has met an x as large as m_i. No key j has a larger x than |q_i| max|k| + u_i (S_j - ref).
    Where this is 17 + ln Tk (times sqrt(d), as x is) below m_i, j weighs at most e^-17 / Tk of what
    the row has, and all such keys together e^-17 = 4e-8: less than float32 can hold. For u_i > 0 it
    is so wherever S_j < least_i; so start is the first tile whose largest S reaches some least_i.
    """
    bh, block, r, q, u, Si, ref = queries(Q, S, G, scale, H, Tq, Tk, qb, qh, qt, D, C, BM)
    K, V = head_of(K, bh, H, kb, kh), head_of(V, bh, H, vb, vh)
    i = r + Tk - Tq                                  # the queries' positions among the keys
    c = scale * LOG2E                                # from x to logits in base 2: exp2 is fast
    diagonal = (block * BM + Tk - Tq) // BN * BN     # all queries here see every key before this
    start, end = diagonal, tl.minimum(block * BM + BM + Tk - Tq, Tk)
    tl.assume(start < end)                           # else ptxas (C7515) serializes the products

    acc = tl.zeros((BM, C), tl.float32)              # sum of the keys' weights times their v
    total = tl.zeros((BM,), tl.float32)              # sum of the weights
    m = tl.full((BM,), float("-inf"), tl.float32)    # the largest x so far, whose weight is 1
    for DIAGONAL in tl.static_range(1, -1, -1):      # 1, then 0
        for n in range(start, end, BN):
            j = tl.multiple_of(n, BN) + tl.arange(0, BN)
            k = read(K, n, Tk, kt, D, C, BN, DIAGONAL)
            Sj = tl.load(S + bh * Tk + j, mask=j < Tk, other=0.0) - ref
            # a plain + would join the dot, and stall it
            x = tl.fma(u[:, None], Sj[None, :], dot(q, tl.trans(k)))
            if DIAGONAL:
                x = tl.where(j[None, :] <= i[:, None], x, float("-inf"))
            larger = tl.maximum(m, tl.max(x, 1))     # finite: all see the first tile's first key
            p = tl.exp2(x * c - (larger * c)[:, None])
            shrink = tl.exp2((m - larger) * c)
            v = read(V, n, Tk, vt, D, C, BN, DIAGONAL)
            acc = acc * shrink[:, None] + dot(p.to(v.dtype), v)
            total = total * shrink + tl.sum(p, 1)
            m = larger
        if DIAGONAL:
            start, end = diagonal * 0, diagonal
            if TILES:  # 0 for few keys, of which none is left out
                tile = tl.arange(0, TILES)
                before = tile * EDGE < diagonal
                at = bh * tl.cdiv(Tk, EDGE) + tile
                most_k = tl.max(tl.load(Kmax + at, mask=before, other=0.0))
                length = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1))
                margin = (17 + tl.log(tl.cast(Tk, tl.float32))) / scale
                least = ref + (m - margin - length * most_k) / tl.maximum(u, 1e-30)
                least = tl.where(u > 0, least, float("-inf"))  # what grows with distance is kept
                least = tl.min(tl.where(r < Tq, least, float("inf")))
                reaches = before & (tl.load(Smax + at, mask=before, other=0.0) >= least)
                start = tl.min(tl.where(reaches, tile * EDGE, diagonal))

    write(out_of(Out, bh, H, Tq, D), acc / total[:, None], block * BM, Tq, H * D, D)
    tl.store(Lse + bh * Tq + r, (m - u * Si) * c + tl.log2(total), mask=r < Tq)
    tl.store(Start + bh * tl.cdiv(Tq, BM) + block, start)


@triton.jit
def separable_rows(Q, K, V, S, G, Start, Out, Lse, dOut, dQ, dG, dS, Delta, scale, H, Tq, Tk,
                   qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr):
    """dq, dg and the queries' part of dS; and Delta, for the columns."""
    bh, block, r, q, u, Si, ref = queries(Q, S, G, scale, H, Tq, Tk, qb, qh, qt, D, C, BM)
    K, V = head_of(K, bh, H, kb, kh), head_of(V, bh, H, vb, vh)
    i, row, there = r + Tk - Tq, bh * Tq + r, r < Tq
    c = scale * LOG2E
    do, delta = read_gradient(dOut, Out, bh, block, H, Tq, D, C, BM)
    tl.store(Delta + row, delta, mask=there)
    lse = tl.load(Lse + row, mask=there, other=float("inf")) + u * Si * c
    diagonal = (block * BM + Tk - Tq) // BN * BN
    start, end = diagonal, tl.minimum(block * BM + BM + Tk - Tq, Tk)
    tl.assume(start < end)

    dq = tl.zeros((BM, C), tl.float32)
    dg = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for DIAGONAL in tl.static_range(1, -1, -1):
        for n in range(start, end, BN):
            j = tl.multiple_of(n, BN) + tl.arange(0, BN)
            k = read(K, n, Tk, kt, D, C, BN, DIAGONAL)
            Sj = tl.load(S + bh * Tk + j, mask=j < Tk, other=0.0) - ref
            x = tl.fma(u[:, None], Sj[None, :], dot(q, tl.trans(k)))
            if DIAGONAL:
                x = tl.where(j[None, :] <= i[:, None], x, float("-inf"))
            p = tl.exp2(x * c - lse[:, None])
            v = read(V, n, Tk, vt, D, C, BN, DIAGONAL)
            dx = p * (dot(do, tl.trans(v)) - delta[:, None])
            dq += dot(dx.to(k.dtype), k)
            dg += tl.sum(dx * Sj[None, :], 1)
            total += tl.sum(dx, 1)
        start, end = tl.load(Start + bh * tl.cdiv(Tq, BM) + block), diagonal

    write(out_of(dQ, bh, H, Tq, D), dq * scale, block * BM, Tq, H * D, D)
    tl.store(dG + row, dg - total * Si, mask=there)
    tl.store(dS + bh * Tk + i, -scale * u * total, mask=there)


@triton.jit
def separable_columns(Q, K, V, S, G, Start, Lse, dOut, Delta, dK, dV, dS, scale, H, Tq, Tk,
                      qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr):
    """dk, dv, and the keys' part of dS. Tiles are transposed: (BN keys, BM queries)."""
    bh, tile = place_keys(tl.cdiv(Tk, BN))
    first, past = tile * BN, Tk - Tq
    j = first + tl.arange(0, BN)
    c = scale * LOG2E
    Q, dOut = head_of(Q, bh, H, qb, qh), out_of(dOut, bh, H, Tq, D)
    k = read(head_of(K, bh, H, kb, kh), first, Tk, kt, D, C, BN)
    v = read(head_of(V, bh, H, vb, vh), first, Tk, vt, D, C, BN)
    S += bh * Tk
    ref = tl.load(S + first)
    Sj = tl.load(S + j, mask=j < Tk, other=0.0) - ref
    start = tl.maximum(first - past, 0) // BM * BM    # the block of the first query to see a key
    full = tl.cdiv(tl.maximum(first + BN - 1 - past, 0), BM) * BM
    full = tl.maximum(full, start + BM)               # from here queries see all of the keys
    end = tl.minimum(full, Tq)
    tl.assume(start < end)
    last = last_block(Start, bh, first + BN, tl.cdiv(Tq, BM), BLOCKS)

    dk = tl.zeros((BN, C), tl.float32)
    dv = tl.zeros((BN, C), tl.float32)
    ds = tl.zeros((BN,), tl.float32)
    for DIAGONAL in tl.static_range(1, -1, -1):
        for n in range(start, end, BM):
            r = tl.multiple_of(n, BM) + tl.arange(0, BM)
            row, there = bh * Tq + r, r < Tq
            q = read(Q, n, Tq, qt, D, C, BM)
            u = tl.load(G + row, mask=there, other=0.0) / scale
            Si = tl.load(S + past + r, mask=there, other=0.0) - ref
            lse = tl.load(Lse + row, mask=there, other=float("inf")) + u * Si * c
            x = tl.fma(Sj[:, None], u[None, :], dot(k, tl.trans(q)))
            if DIAGONAL:
                x = tl.where(j[:, None] <= r[None, :] + past, x, float("-inf"))
            p = tl.exp2(x * c - lse[None, :])
            do = read(dOut, n, Tq, H * D, D, C, BM)
            delta = tl.load(Delta + row, mask=there, other=0.0)
            dv += dot(p.to(do.dtype), do)
            dx = p * (dot(v, tl.trans(do)) - delta[None, :])
            dk += dot(dx.to(q.dtype), q)
            ds += tl.sum(dx * u[None, :], 1)
        start, end = full, (last + 1) * BM

    write(out_of(dK, bh, H, Tk, D), dk * scale, first, Tk, H * D, D)
    write(out_of(dV, bh, H, Tk, D), dv, first, Tk, H * D, D)
    of_rows = tl.load(dS + bh * Tk + j, mask=(j >= past) & (j < Tk), other=0.0)
    tl.store(dS + bh * Tk + j, of_rows + scale * ds, mask=j < Tk)


# -----------------------------------------------------------------------------
# as an operator that autograd and torch.compile know

def tiles(q):
    """(BM queries, BN keys, warps, stages) of forward and rows, and of columns; BM is the same."""
    if q.dtype == torch.float32:
        return (32, 32, 8, 2), (32, 32, 8, 2)
    if q.size(3) > 64:
        return (64, 32, 4, 3), (64, 32, 4, 2)
    return (64, 64, 4, 3), (64, 64, 4, 2)


@operator("separable(Tensor q, Tensor k, Tensor v, Tensor S, Tensor g)"
          " -> (Tensor, Tensor, Tensor)",
          lambda q, *_: forward_outputs(q, tiles(q)[0][0]))
def separable(q, k, v, S, g):
    """S (B, H, Tk) and g (B, H, Tq) float32 and contiguous -> out, lse, start."""
    check_memory(S, g)
    tile, _ = tiles(q)
    out, lse, start = forward_outputs(q, tile[0])
    kmax, smax, n = edges(q, k, v, S) if k.size(2) > LONG else (S, S, 0)
    launch(separable_forward, tile, start.size(2), q, k, v,
           S, g, kmax, smax, start, out, lse, TILES=n)
    return out, lse, start


@operator("separable_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor S, Tensor g,"
          " Tensor out, Tensor lse, Tensor start) -> Tensor[]",
          lambda dout, q, k, v, S, g, *_: gradients(q, k, v, S, g))
def separable_backward(dout, q, k, v, S, g, out, lse, start):
    """-> dq, dk, dv, dS, dg."""
    check_memory(S, g, lse, start)
    # as the kernels read them; out, too, as a saved-tensor hook may have moved it
    out, dout = (x.transpose(1, 2).contiguous() for x in (out, dout))
    dq, dk, dv, dS, dg = grads = gradients(q, k, v, S, g)
    delta = torch.empty_like(g)
    rows, columns = tiles(q)
    launch(separable_rows, rows, start.size(2), q, k, v,
           S, g, start, out, lse, dout, dq, dg, dS, delta)
    launch(separable_columns, columns, triton.cdiv(k.size(2), columns[1]), q, k, v,
           S, g, start, lse, dout, delta, dk, dv, dS,
           BLOCKS=triton.next_power_of_2(start.size(2)))
    return grads


differentiable(separable, separable_backward)


def cable_attention(q, k, v, S, g=None):
    """cable_attention of model_cable.py."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    g = S.new_ones(q.shape[:3]) if g is None else g
    S = S.float().expand(k.shape[:3]).contiguous()
    g = g.float().expand(q.shape[:3]).contiguous()
    return separable(q, k, v, S, g)[0]


def fox_attention(q, k, v, F_):
    """fox_attention of rivals/fox.py: CABLE with S = -F and no query weight. F_ (B, H, Tk)."""
    return cable_attention(q, k, v, -F_)


def alibi_attention(q, k, v, slopes):
    """alibi_attention of rivals/classics.py, slopes (H,): CABLE with S_i = i, g the slope."""
    S = torch.arange(k.size(2), dtype=torch.float32, device=q.device)
    return cable_attention(q, k, v, S, slopes[None, :, None])
