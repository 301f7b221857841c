"""
CABLE, FoX and ALiBi in Triton: flash attention whose bias is the difference of two numbers, one per
position.

    logit_ij = q_i . k_j / sqrt(d) - g_i t_ij,  t_ij = S_i - S_j,  j <= i

CABLE: S is the sum of the steps. FoX: S = -F, g = 1. ALiBi: S_i = i, g = m_h. S (B, H, Tk) and
g (B, H, Tq) are float32, and S_i - S_j is taken inside a tile: bfloat16 is too coarse for S.

Forward: one program takes BM queries and walks the keys BN at a time. It stores the output and each
row's log-sum-exp. Backward, with P = softmax(logit), dL the gradient of the logits:

    dL_ij = P_ij (dO_i . v_j - Delta_i),  Delta_i = dO_i . O_i
    dv = P^T dO
    along a row:      dq = dL K / sqrt(d)
                      dg_i = -sum_j dL_ij t_ij
                      dS_i -= g_i sum_j dL_ij
    along a column:   dk = dL^T Q / sqrt(d)
                      dS_j += sum_i g_i dL_ij

One kernel goes along rows, one along columns, and each recomputes P: no atomics, so the same
numbers every time. Beyond LONG keys those that have decayed are left out (bounds.py): a block of
queries begins at the first key that can matter to one of them, a tile of keys stops at the last
block that it can matter to. (The row's part of dS is but rounding, which cancels the column's.)
Tiles on the diagonal are masked and come first, all others need no mask. Inside, x is the logit
times sqrt(d): scale and log2(e) become one factor c in exp2(c x - ...), and the query's weight
becomes w_i = -g_i sqrt(d). q, k, v may have any strides; o, dq, dk, dv lie in memory as
(B, T, H, d), which is what a model wants next.
"""
import math

import torch
import triton
import triton.language as tl

from .bounds import LONG, first_keys
from .common import LOG2E, check_memory, constants, dot, fit, place, place_keys, reach, save

# -----------------------------------------------------------------------------
# pieces of all three kernels

@triton.jit
def load(at, stride, left, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, CHECK: tl.constexpr):
    """An (R, C) tile of rows of D numbers; with CHECK 0 beyond the `left` rows that are left."""
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, C)[None, :]
    if CHECK or D < C:
        return tl.load(at + r * stride + c, mask=(r < left) & (c < D), other=0.0)
    return tl.load(at + r * stride + c)


@triton.jit
def store(at, x, stride, left, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, C)[None, :]
    tl.store(at + r * stride + c, x.to(at.dtype.element_ty), mask=(r < left) & (c < D))


@triton.jit
def queries(Q, S, G, scale, H, Tq, Tk, qb, qh, qt,
            D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """This program's block of queries: batch, head, first row, all rows, and their q, S and w."""
    bh, block = place(Tq, BM)
    first = block * BM
    r = first + tl.arange(0, BM)
    Q += bh // H * qb + bh % H * qh + first.to(tl.int64) * qt
    q = load(Q, qt, Tq - first, D, BM, C, True)
    Si = tl.load(S + bh * Tk + r + Tk - Tq, mask=r < Tq, other=0.0)
    w = tl.load(G + bh * Tq + r, mask=r < Tq, other=0.0) * (-1 / scale)
    return bh // H, bh % H, first, r, q, Si, w


@triton.jit
def first_tile(First, there, diagonal, BN: tl.constexpr):
    """Where the tile begins that has the first key to matter to one of these rows."""
    first = tl.min(tl.load(First, mask=there, other=2**31 - 1))
    return tl.minimum(first // BN * BN, diagonal)


# -----------------------------------------------------------------------------
# forward

@triton.jit
def forward_tiles(acc, m, total, q, Si, w, c, i, K, V, S, kt, vt, start, end, Tk,
                  D: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr):
    """Keys start..end-1 for a block of queries; acc (BM, C), maximum m and sum of weights (BM)."""
    for n in range(start, end, BN):
        j = tl.multiple_of(n, BN) + tl.arange(0, BN)
        k = load(K, kt, Tk - n, D, BN, C, DIAGONAL)
        Sj = tl.load(S + j, mask=j < Tk, other=0.0) if DIAGONAL else tl.load(S + j)
        t = Si[:, None] - Sj[None, :]
        # a plain + would join the dot, and stall it
        x = tl.fma(w[:, None], t, dot(q, tl.trans(k)))
        if DIAGONAL:
            x = tl.where(j[None, :] <= i[:, None], x, float("-inf"))
        new = tl.maximum(m, tl.max(x, 1))  # finite: all queries see the first key of the first tile
        p = tl.exp2(x * c - (new * c)[:, None])
        keep = tl.exp2((m - new) * c)
        v = load(V, vt, Tk - n, D, BN, C, DIAGONAL)
        acc = acc * keep[:, None] + dot(p.to(v.dtype), v)
        total = total * keep + tl.sum(p, 1)
        m = new
        K += BN * kt
        V += BN * vt
    return acc, m, total


@triton.jit
def separable_forward(Q, K, V, S, G, First, Out, Lse, scale, H, Tq, Tk,
                      qb, qh, qt, kb, kh, kt, vb, vh, vt,
                      D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    b, h, first, r, q, Si, w = queries(Q, S, G, scale, H, Tq, Tk, qb, qh, qt, D, C, BM)
    i = r + Tk - Tq                              # a query's position among the keys
    c = scale * LOG2E
    K, V = K + b * kb + h * kh, V + b * vb + h * vh
    S += (b * H + h) * Tk
    diagonal = (first + Tk - Tq) // BN * BN      # all queries here see every key before this one
    end = tl.minimum(first + BM + Tk - Tq, Tk)
    tl.assume(diagonal < end)                    # else ptxas (C7515) serializes the products
    K2, V2 = K + diagonal.to(tl.int64) * kt, V + diagonal.to(tl.int64) * vt

    acc = tl.zeros((BM, C), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc, m, total = forward_tiles(acc, m, total, q, Si, w, c, i, K2, V2, S, kt, vt,
                                  diagonal, end, Tk, D, C, BN, True)
    start = first_tile(First + (b * H + h) * Tq + r, r < Tq, diagonal, BN)
    K, V = K + start.to(tl.int64) * kt, V + start.to(tl.int64) * vt
    acc, m, total = forward_tiles(acc, m, total, q, Si, w, c, i, K, V, S, kt, vt,
                                  start, diagonal, Tk, D, C, BN, False)

    out = ((b * Tq + first) * H + h) * D
    store(Out + out, acc / total[:, None], H * D, Tq - first, D, BM, C)
    tl.store(Lse + (b * H + h) * Tq + r, m * c + tl.log2(total), mask=r < Tq)  # base 2


# -----------------------------------------------------------------------------
# backward along rows: dq, dg, the query's part of dS. It also leaves Delta for the columns

@triton.jit
def row_tiles(dq, dg, dS, q, do, Si, w, lse, delta, c, i, K, V, S, kt, vt, start, end, Tk,
              D: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr):
    """Keys start..end-1 for one block of queries."""
    for n in range(start, end, BN):
        j = tl.multiple_of(n, BN) + tl.arange(0, BN)
        k = load(K, kt, Tk - n, D, BN, C, DIAGONAL)
        Sj = tl.load(S + j, mask=j < Tk, other=0.0) if DIAGONAL else tl.load(S + j)
        t = Si[:, None] - Sj[None, :]
        x = tl.fma(w[:, None], t, dot(q, tl.trans(k)))
        if DIAGONAL:
            x = tl.where(j[None, :] <= i[:, None], x, float("-inf"))
        p = tl.exp2(x * c - lse[:, None])
        v = load(V, vt, Tk - n, D, BN, C, DIAGONAL)
        dx = p * (dot(do, tl.trans(v)) - delta[:, None])
        dq += dot(dx.to(k.dtype), k)
        dg -= tl.sum(dx * t, 1)
        dS += tl.sum(dx, 1)
        K += BN * kt
        V += BN * vt
    return dq, dg, dS


@triton.jit
def separable_rows(Q, K, V, S, G, First, Out, Lse, dOut, dQ, dG, dSq, Delta, scale, H, Tq, Tk,
                   qb, qh, qt, kb, kh, kt, vb, vh, vt,
                   D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    b, h, first, r, q, Si, w = queries(Q, S, G, scale, H, Tq, Tk, qb, qh, qt, D, C, BM)
    i = r + Tk - Tq
    c = scale * LOG2E
    out = ((b * Tq + first) * H + h) * D
    row = (b * H + h) * Tq + r
    do = load(dOut + out, H * D, Tq - first, D, BM, C, True)
    o = load(Out + out, H * D, Tq - first, D, BM, C, True)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    lse = tl.load(Lse + row, mask=r < Tq, other=float("inf"))  # rows past the end weigh nothing
    K, V = K + b * kb + h * kh, V + b * vb + h * vh
    S += (b * H + h) * Tk
    diagonal = (first + Tk - Tq) // BN * BN
    end = tl.minimum(first + BM + Tk - Tq, Tk)
    tl.assume(diagonal < end)
    K2, V2 = K + diagonal.to(tl.int64) * kt, V + diagonal.to(tl.int64) * vt

    dq = tl.zeros((BM, C), tl.float32)
    dg = tl.zeros((BM,), tl.float32)
    dS = tl.zeros((BM,), tl.float32)
    dq, dg, dS = row_tiles(dq, dg, dS, q, do, Si, w, lse, delta, c, i, K2, V2, S, kt, vt,
                           diagonal, end, Tk, D, C, BN, True)
    start = first_tile(First + row, r < Tq, diagonal, BN)
    K, V = K + start.to(tl.int64) * kt, V + start.to(tl.int64) * vt
    dq, dg, dS = row_tiles(dq, dg, dS, q, do, Si, w, lse, delta, c, i, K, V, S, kt, vt,
                           start, diagonal, Tk, D, C, BN, False)

    store(dQ + out, dq * scale, H * D, Tq - first, D, BM, C)
    tl.store(dG + row, dg, mask=r < Tq)
    tl.store(dSq + row, dS * w * scale, mask=r < Tq)  # w scale = -g
    tl.store(Delta + row, delta, mask=r < Tq)


# -----------------------------------------------------------------------------
# backward along columns: dk, dv, the key's part of dS. Tiles are transposed: (BN keys, BM queries)

@triton.jit
def column_tiles(dk, dv, dS, k, v, Sj, c, scale, j, Q, dOut, S, G, Lse, Delta, qt, ot,
                 start, end, Tq, Tk,
                 D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, DIAGONAL: tl.constexpr):
    """Queries start..end-1 for one block of keys."""
    for n in range(start, end, BM):
        r = tl.multiple_of(n, BM) + tl.arange(0, BM)
        q = load(Q, qt, Tq - n, D, BM, C, True)
        lse = tl.load(Lse + r, mask=r < Tq, other=float("inf"))
        Si = tl.load(S + r + Tk - Tq, mask=r < Tq, other=0.0)
        w = tl.load(G + r, mask=r < Tq, other=0.0) * (-1 / scale)
        t = Si[None, :] - Sj[:, None]
        x = tl.fma(w[None, :], t, dot(k, tl.trans(q)))
        if DIAGONAL:
            x = tl.where(j[:, None] <= r[None, :] + Tk - Tq, x, float("-inf"))
        p = tl.exp2(x * c - lse[None, :])
        do = load(dOut, ot, Tq - n, D, BM, C, True)
        delta = tl.load(Delta + r, mask=r < Tq, other=0.0)
        dv += dot(p.to(do.dtype), do)
        dx = p * (dot(v, tl.trans(do)) - delta[None, :])
        dk += dot(dx.to(q.dtype), q)
        dS += tl.sum(dx * w[None, :], 1)
        Q += BM * qt
        dOut += BM * ot
    return dk, dv, dS


@triton.jit
def separable_columns(Q, K, V, S, G, Last, Lse, dOut, Delta, dK, dV, dSk, scale, H, Tq, Tk,
                      qb, qh, qt, kb, kh, kt, vb, vh, vt,
                      D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    bh, tile = place_keys(tl.cdiv(Tk, BN))
    b, h, first = bh // H, bh % H, tile * BN
    j = first + tl.arange(0, BN)
    c = scale * LOG2E
    S += bh * Tk
    G, Lse, Delta = G + bh * Tq, Lse + bh * Tq, Delta + bh * Tq
    K += b * kb + h * kh + first.to(tl.int64) * kt
    V += b * vb + h * vh + first.to(tl.int64) * vt
    k = load(K, kt, Tk - first, D, BN, C, True)
    v = load(V, vt, Tk - first, D, BN, C, True)
    Sj = tl.load(S + j, mask=j < Tk, other=0.0)
    start = tl.maximum(first - (Tk - Tq), 0) // BM * BM  # the tile of the first query to see a key
    full = tl.cdiv(tl.maximum(first + BN - 1 - (Tk - Tq), 0), BM) * BM
    full = tl.maximum(full, start + BM)                  # from here queries see all of the keys
    end = tl.minimum(full, Tq)
    tl.assume(start < end)
    Q += b * qb + h * qh + start.to(tl.int64) * qt
    dOut += ((b * Tq + start) * H + h) * D
    last = tl.load(Last + bh * tl.cdiv(Tk, BN) + tile)  # later blocks see these keys no more
    Q2, dOut2 = Q + (full - start) * qt, dOut + (full - start) * H * D

    dk = tl.zeros((BN, C), tl.float32)
    dv = tl.zeros((BN, C), tl.float32)
    dS = tl.zeros((BN,), tl.float32)
    dk, dv, dS = column_tiles(dk, dv, dS, k, v, Sj, c, scale, j, Q, dOut, S, G, Lse, Delta,
                              qt, H * D, start, end, Tq, Tk, D, C, BM, True)
    dk, dv, dS = column_tiles(dk, dv, dS, k, v, Sj, c, scale, j, Q2, dOut2, S, G, Lse, Delta,
                              qt, H * D, full, last * BM + BM, Tq, Tk, D, C, BM, False)

    out = ((b * Tk + first) * H + h) * D
    store(dK + out, dk * scale, H * D, Tk - first, D, BN, C)
    store(dV + out, dv, H * D, Tk - first, D, BN, C)
    tl.store(dSk + bh * Tk + j, dS * -scale, mask=j < Tk)  # w scale = -g


# -----------------------------------------------------------------------------
# as an operator that autograd and torch.compile know

def tiles(d, dtype):
    """(BM queries, BN keys, warps, stages) of the kernels: the largest that hardly spill."""
    if dtype == torch.float32:
        keys = 16 if 32 < d < 64 else 32  # masked heads with 32 spill 4 bytes on sm_90
        return (32, keys, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)
    if d > 64:
        return (128, 32, 8, 3), (128, 32, 8, 3), (32, 128, 8, 3)
    return (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 8, 3)


def new(x):
    """An empty tensor with the shape of x (B, H, T, d) that lies in memory as (B, T, H, d)."""
    x = x.transpose(1, 2)
    return torch.empty_like(x, memory_format=torch.contiguous_format).transpose(1, 2)


def launch(kernel, tile, blocks, q, k, v, *tensors):
    """Runs the kernel, one program for each of a head's blocks of queries or keys."""
    B, H, Tq, d = q.shape
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1, "kernels step through a head by 1"
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    with torch.cuda.device_of(q):
        kernel[(B * H * blocks,)](
            q, k, v, *tensors, 1 / math.sqrt(d), H, Tq, k.size(2), *strides,
            **constants(q, *tile))


@torch.library.custom_op("nanope::separable", mutates_args=())
def separable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, S: torch.Tensor, g: torch.Tensor,
              first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S (B, H, Tk) and g (B, H, Tq) float32, first (B, H, Tq) int32, contiguous -> o, lse."""
    check_memory(S, g, first)
    out, lse = new(q), torch.empty_like(g)
    tile = tiles(q.size(3), q.dtype)[0]
    blocks = triton.cdiv(q.size(2), tile[0])
    launch(separable_forward, tile, blocks, q, k, v, S, g, first, out, lse)
    return out, lse


@torch.library.custom_op("nanope::separable_backward", mutates_args=())
def separable_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, S: torch.Tensor,
                       g: torch.Tensor, first: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                       dout: torch.Tensor) -> list[torch.Tensor]:
    """-> dq, dk, dv, dS, dg."""
    check_memory(S, g, first, lse)
    Tq, Tk = q.size(2), k.size(2)
    # as the kernels read them; out, too, as a saved-tensor hook may have moved it
    out, dout = (x.transpose(1, 2).contiguous() for x in (out, dout))
    dq, dk, dv, dS, dg = gradients(q, k, v, S, g)
    dS_of_queries, delta = torch.empty_like(g), torch.empty_like(g)
    _, rows, columns = tiles(q.size(3), q.dtype)
    launch(separable_rows, rows, triton.cdiv(Tq, rows[0]), q, k, v,
           S, g, first, out, lse, dout, dq, dg, dS_of_queries, delta)
    _, last = reach(first, Tk, *columns[:2])
    launch(separable_columns, columns, triton.cdiv(Tk, columns[1]), q, k, v,
           S, g, last, lse, dout, delta, dk, dv, dS)
    dS[:, :, Tk - Tq:] += dS_of_queries
    return [dq, dk, dv, dS, dg]


@separable.register_fake
def _(q, k, v, S, g, first):
    return new(q), torch.empty_like(g)


@separable_backward.register_fake
def _(q, k, v, S, g, first, out, lse, dout):
    return gradients(q, k, v, S, g)


def gradients(q, k, v, S, g):
    """Empty dq, dk, dv, dS, dg."""
    return [new(q), new(k), new(v), torch.empty_like(S), torch.empty_like(g)]


def backward(ctx, dout, dlse):
    return *separable_backward(*ctx.saved_tensors, dout), None


separable.register_autograd(backward, setup_context=save)


def cable_attention(q, k, v, S, g=None):
    """cable_attention of model_cable.py; None for what it cannot do."""
    if not fit(q, k, v):
        return None
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))  # steps through d by 1
    g = S.new_ones(()) if g is None else g
    S = S.float().expand(k.shape[:3]).contiguous()
    g = g.float().expand(q.shape[:3]).contiguous()
    first = torch.zeros_like(g, dtype=torch.int32)
    if k.size(2) > LONG:
        first = first_keys(q, k, S, g).int()
    return separable(q, k, v, S, g, first)[0]


def fox_attention(q, k, v, F_):
    """fox_attention of rivals/fox.py: CABLE with S = -F and no query weight. F_ (B, H, Tk)."""
    return cable_attention(q, k, v, -F_)


def alibi_attention(q, k, v, slopes):
    """alibi_attention of rivals/classics.py, slopes (H,): CABLE with S_i = i, g the slope."""
    S = torch.arange(k.size(2), dtype=torch.float32, device=q.device)
    return cable_attention(q, k, v, S, slopes[None, :, None])
