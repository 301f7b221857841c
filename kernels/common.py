"""
What the kernels' files share: pieces of Triton kernels, pieces of the code that calls them, and
jobs, the list of all kernels.

D is the size of a head. Tiles in Triton are powers of two wide, so a tile of heads has C columns,
the next power of two; the columns from D on hold zeros.
"""
import math

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(math.log2(math.e))


# -----------------------------------------------------------------------------
# pieces of kernels

@triton.jit
def dot(a, b, acc=None):
    """a b + acc in float32, and of float32 without TF32."""
    if INTERPRET:  # the interpreter multiplies bfloat16 as if it were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def place(n, SIZE: tl.constexpr):
    """
    Which head this program works on and which block of its n rows. The last rows see the most keys
    and go first. A head is a 64-bit number, as B H T d can be more than 2^31.
    """
    blocks = tl.cdiv(n, SIZE)
    return (tl.program_id(0) // blocks).to(tl.int64), blocks - 1 - tl.program_id(0) % blocks


@triton.jit
def place_keys(tiles):
    """
    Which head this program works on and which of its tiles of keys. The first keys are seen by the
    most rows and go first.
    """
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles


@triton.jit
def rows_of(block, head, Tq, Tk, BM: tl.constexpr):
    """
    The rows of a block: r within the head, i their positions among the keys, whether they are real
    (the last block may have fewer), and at, where their numbers are in a (B, H, Tq) tensor.
    """
    r = block * BM + tl.arange(0, BM)
    return r, r + Tk - Tq, r < Tq, head * Tq + r


@triton.jit
def top_tile(block, Tq, Tk, BM: tl.constexpr, BN: tl.constexpr):
    """The last tile of keys that a row of this block sees."""
    return (tl.minimum(block * BM + BM, Tq) + Tk - Tq - 1) // BN


@triton.jit
def load(x, rows, n, D: tl.constexpr, C: tl.constexpr):
    """These rows of an (n, D) matrix; zeros for rows that do not exist."""
    cols = tl.arange(0, C)
    there = rows[:, None] < n
    if D < C:
        there = there & (cols[None, :] < D)
    return tl.load(x + rows[:, None] * D + cols[None, :], mask=there, other=0.0)


@triton.jit
def store(x, rows, n, tile, D: tl.constexpr, C: tl.constexpr):
    """tile becomes these rows of an (n, D) matrix, in its dtype."""
    cols = tl.arange(0, C)
    there = (rows[:, None] < n) & (cols[None, :] < D)
    tl.store(x + rows[:, None] * D + cols[None, :], tile.to(x.dtype.element_ty), mask=there)


@triton.jit
def attend(logits, v, m, den, acc):
    """
    One more tile of softmax(logits) v, with logits in base 2. m is a row's largest logit so far,
    den the sum of its weights, acc the sum of its values.
    """
    new = tl.maximum(m, tl.max(logits, 1))
    w = tl.exp2(logits - new[:, None])
    shrink = tl.exp2(m - new)
    return new, den * shrink + tl.sum(w, 1), dot(w.to(v.dtype), v, acc * shrink[:, None])


# -----------------------------------------------------------------------------
# pieces of what calls them

def check(q, k, v):
    """An AssertionError where q (B, H, Tq, d) and k, v (B, H, Tk, d) do not fit each other."""
    fit = q.size(2) <= k.size(2) and q.dtype == k.dtype == v.dtype
    assert fit, "the queries are the last of the keys, of one dtype"


def constants(q, BM, BN, warps):
    """A kernel's compile-time arguments for q (B, H, Tq, d) and tiles of BM rows and BN keys."""
    D = q.size(3)
    C = triton.next_power_of_2(D)
    return dict(D=D, C=C, BM=BM, BN=BN, num_warps=warps, num_stages=2)


def outputs(q):
    """Empty o like q (B, H, Tq, d), lse float32 and limit int32, both (B, H, Tq)."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    limit = q.new_empty(q.shape[:3], dtype=torch.int32)
    return torch.empty_like(q), lse, limit


def gradients(*inputs):
    """Empty tensors for the gradients of these."""
    return tuple(torch.empty_like(x) for x in inputs)


def save(ctx, inputs, output):
    """For register_autograd: backward needs all inputs and outputs."""
    ctx.save_for_backward(*inputs, *output)


def bands(limit, Tk, BM, BN):
    """
    Where the bands lie if rows come in blocks of BM and keys in tiles of BN. limit (B, H, Tq) is
    the first key in each row's band. -> first (B H, blocks): a block's leftmost tile; last (B H,
    tiles): the last block with this tile in its band; start (B H, blocks): start + tile is that
    tile's place among all band tiles; and how many there are, for which we must wait for the GPU.
    """
    Tq = limit.size(2)
    limit = limit.flatten(0, 1)
    heads = limit.size(0)
    block = torch.arange(triton.cdiv(Tq, BM), device=limit.device).expand(heads, -1)
    limit = F.pad(limit, (0, block.size(1) * BM - Tq), value=Tk)
    first = limit.unflatten(1, (-1, BM)).amin(2) // BN
    last = block.new_full((heads, triton.cdiv(Tk, BN)), -1)
    last = last.scatter_reduce(1, first.long(), block, "amax").cummax(1)[0]
    top = ((block + 1) * BM).clamp(max=Tq).add(Tk - Tq - 1) // BN
    size = top - first + 1
    end = size.flatten().cumsum(0).view_as(size)
    return first, last, end - size - first, int(end[-1, -1])


# -----------------------------------------------------------------------------
# for bench.py

def jobs(d, dtype=torch.bfloat16):
    """-> (name, Triton function, its constants) of every kernel as it runs for heads of size d."""
    from . import cope, separable, tra  # not above: they import this file

    q = torch.empty(1, 1, 1, d, dtype=dtype)
    kernels = separable.forward_kernel, separable.row_kernel, separable.column_kernel
    for log in (False, True):
        for fn, tile in zip(kernels, separable.tiles(d, dtype, log)):
            name = f"separable {fn.__name__} log" if log else f"separable {fn.__name__}"
            yield name, fn, separable.constants(d, tile, log)

    band = cope.tiles(q, "band")
    tail = cope.tiles(q, "tail")
    tail_columns = cope.tiles(q, "tail_columns")
    passes = (("forward", cope.forward_band, cope.forward_tail, tail),
              ("backward_rows", cope.rows_band, cope.rows_tail, tail),
              ("backward_columns", cope.columns_band, cope.columns_tail, tail_columns))
    yield "cope prepare band", cope.prepare, band
    for name, in_the_band, left_of_it, tiles in passes:
        yield f"cope {name} band", in_the_band, dict(P=64, SEP=False, **band)
        yield f"cope {name} band sep", in_the_band, dict(P=64, SEP=True, **band)
        yield f"cope {name} tail", left_of_it, dict(P=64, **tiles)

    for fn in (tra.forward, tra.backward_rows, tra.backward_columns):
        yield f"tra {fn.__name__}", fn, tra.tiles(q)
