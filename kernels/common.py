"""
What the kernels' files share: pieces of Triton kernels, and of the code that calls them. D is the
size of a head. Tiles are powers of two wide, so a tile of heads has C columns, the next power of
two; the columns from D on hold zeros.
"""
import math

import torch
import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(math.log2(math.e))
STEP = tl.constexpr(2)  # tiles from one check to the next whether all rows of a scan may stop
EDGE = tl.constexpr(128)  # keys of which the largest |k| and S are found before forward


# -----------------------------------------------------------------------------
# pieces of kernels

@triton.jit
def dot(a, b, acc=None):
    """a b + acc in float32, and of float32 without TF32."""
    if INTERPRET:  # the interpreter multiplies bfloat16 as if it were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def triangle(N: tl.constexpr):
    """(N, N), 1 where row >= column."""
    n = tl.arange(0, N)
    return (n[:, None] >= n[None, :]).to(tl.float16)


@triton.jit
def place(n, SIZE: tl.constexpr):
    """This program's head (64 bits: B H T d may need them) and block of n rows, the last first."""
    blocks = tl.cdiv(n, SIZE)
    return (tl.program_id(0) // blocks).to(tl.int64), blocks - 1 - tl.program_id(0) % blocks


@triton.jit
def place_keys(tiles):
    """This program's head and its tile of keys, the first first: the most rows see them."""
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles


@triton.jit
def rows_of(block, head, Tq, Tk, BM: tl.constexpr):
    """Rows of a block: r in the head, i among the keys, whether real, at in a (B, H, Tq) tensor."""
    r = block * BM + tl.arange(0, BM)
    return r, r + Tk - Tq, r < Tq, head * Tq + r


@triton.jit
def top_tile(block, Tq, Tk, BM: tl.constexpr, BN: tl.constexpr):
    """The last tile of keys that a row of this block sees."""
    return (tl.minimum(block * BM + BM, Tq) + Tk - Tq - 1) // BN


@triton.jit
def read(X, first, n, stride, D: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
         CHECK: tl.constexpr = True):
    """R rows from `first` on of an (n, D) matrix; beyond its end zeros, if CHECK looks for it."""
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, C)[None, :]
    at = X + tl.cast(first, tl.int64) * stride + r * stride + c
    if D < C:
        return tl.load(at, mask=(r < n - first) & (c < D), other=0.0)
    if CHECK:  # a mask that is always true costs registers: c < D has no place here
        return tl.load(at, mask=r < n - first, other=0.0)
    return tl.load(at)


@triton.jit
def write(X, tile, first, n, stride, D: tl.constexpr):
    """tile becomes rows from `first` on of an (n, D) matrix, in its dtype."""
    r = tl.arange(0, tile.shape[0])[:, None]
    c = tl.arange(0, tile.shape[1])[None, :]
    at = X + tl.cast(first, tl.int64) * stride + r * stride + c
    tl.store(at, tile.to(X.dtype.element_ty), mask=(first + r < n) & (c < D))


@triton.jit
def head_of(X, bh, H, xb, xh):
    """Where a head begins in a tensor with these strides of batch and head."""
    return X + bh // H * xb + bh % H * xh


@triton.jit
def out_of(X, bh, H, T, D: tl.constexpr):
    """Where it begins in one that lies in memory as (B, T, H, d)."""
    return X + (bh // H * T * H + bh % H) * D


@triton.jit
def read_gradient(dOut, Out, bh, block, H, Tq, D: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """dO of a block of BM rows, and each row's dO . O."""
    do = read(out_of(dOut, bh, H, Tq, D), block * BM, Tq, H * D, D, C, BM)
    o = read(out_of(Out, bh, H, Tq, D), block * BM, Tq, H * D, D, C, BM)
    return do, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)


@triton.jit
def edges_kernel(Q, K, V, S, Kmax, Smax, scale, H, Tq, Tk,
                 qb, qh, qt, kb, kh, kt, vb, vh, vt, D: tl.constexpr, C: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr):
    """The largest |k| and, where there is an S, the largest S of BN keys."""
    bh, tile = place_keys(tl.cdiv(Tk, BN))
    k = read(head_of(K, bh, H, kb, kh), tile * BN, Tk, kt, D, C, BN).to(tl.float32)
    at = bh * tl.cdiv(Tk, BN) + tile
    tl.store(Kmax + at, tl.sqrt(tl.max(tl.sum(k * k, 1))))
    if S is not None:
        j = tile * BN + tl.arange(0, BN)
        Sj = tl.load(S + bh * Tk + j, mask=j < Tk, other=float("-inf"))
        tl.store(Smax + at, tl.max(Sj))


@triton.jit
def last_block(Start, bh, end, blocks, BLOCKS: tl.constexpr):
    """The last block of rows that reads a key before `end`, of BLOCKS or fewer."""
    n = tl.arange(0, BLOCKS)
    start = tl.load(Start + bh * blocks + n, mask=n < blocks, other=2**31 - 1)
    return tl.max(tl.where(start < end, n, 0))


@triton.jit
def attend(logits, v, m, den, acc):
    """One more tile of logits in base 2: m is a row's largest so far, den and acc its sums."""
    new = tl.maximum(m, tl.max(logits, 1))
    w = tl.exp2(logits - new[:, None])
    shrink = tl.exp2(m - new)
    return new, den * shrink + tl.sum(w, 1), dot(w.to(v.dtype), v, acc * shrink[:, None])


# -----------------------------------------------------------------------------
# pieces of what calls them

def check_memory(*tensors):
    """An AssertionError where one has strides of its own: kernels without strides assume none."""
    assert all(x.is_contiguous() for x in tensors), "the operator takes contiguous tensors"


def constants(q, BM, BN, warps, stages=2):
    """A kernel's compile-time arguments for q (B, H, Tq, d) and tiles of BM rows and BN keys."""
    D = q.size(3)
    C = triton.next_power_of_2(D)
    return dict(D=D, C=C, BM=BM, BN=BN, num_warps=warps, num_stages=stages)


LIBRARY = torch.library.Library("nanope", "FRAGMENT")


def operator(schema, fake):
    """
    Makes a function an operator, which torch.compile takes as a whole; fake makes empty outputs.
    (A call of torch.library.custom_op takes some 50 us more.)
    """
    def register(f):
        name = LIBRARY.define(schema)
        LIBRARY.impl(name, f, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nanope::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.nanope, name).default
    return register


def differentiable(op, backward):
    """Lets autograd call backward with the first output's gradient, all inputs and outputs."""
    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output)
    torch.library.register_autograd(
        op, lambda ctx, dout, *_: tuple(backward(dout, *ctx.saved_tensors)),
        setup_context=save, lib=LIBRARY)


def launch(kernel, tile, blocks, q, k, v, *tensors, **more):
    """Runs a kernel, one program for each of a head's blocks of queries or keys."""
    B, H, Tq, d = q.shape
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1, "kernels step through a head by 1"
    with torch.cuda.device_of(q):
        kernel[(B * H * blocks,)](
            q, k, v, *tensors, 1 / math.sqrt(d), H, Tq, k.size(2),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], **constants(q, *tile), **more)


def edges(q, k, v, S=None):
    """-> the largest |k| and S of every EDGE keys; the power of two that these are, or less."""
    tiles = triton.cdiv(k.size(2), EDGE.value)
    kmax, smax = k.new_empty((2, *k.shape[:2], tiles), dtype=torch.float32)
    launch(edges_kernel, (0, EDGE.value, 8), tiles, q, k, v, S, kmax, smax)
    return kmax, smax, triton.next_power_of_2(tiles)


def forward_outputs(q, BM):
    """Empty out, lse (B, H, Tq), and the first key that each block of BM queries reads."""
    B, H, Tq, _ = q.shape
    lse = q.new_empty((B, H, Tq), dtype=torch.float32)
    return new(q), lse, q.new_empty((B, H, -(-Tq // BM)), dtype=torch.int32)


def new(x):
    """An empty tensor with the shape of x (B, H, T, d) that lies in memory as (B, T, H, d)."""
    B, H, T, d = x.shape
    return x.new_empty(B, T, H, d).transpose(1, 2)


def gradients(q, k, v, *rest):
    """Empty tensors for the gradients of all of these."""
    return [new(q), new(k), new(v), *map(torch.empty_like, rest)]
