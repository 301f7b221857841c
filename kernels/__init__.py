"""
Every way to compute an attention that is faster than the plain function of its model file.

    y = attend(cable_attention, q, k, v, S, g)

attend runs the faster way where there is one: Triton on a GPU (separable.py, cope.py, tra.py), on a
CPU torch's fused attention (cpu.py), or derivatives by hand (cpu_count.py). The plain function
stays the truth. Before a way runs for the first time, it is compared with the very function it was
given, in float32 and in the dtype it will have: outputs at this length, gradients on 37 and 300
tokens; where the two differ the plain function runs, and one line says so. Beyond 1,024 tokens, TRA
on a GPU at any length, keys that have decayed may be left out, for a block of rows at a time: there
a later token may move an earlier output by 1e-7. An edit that acts only on values that are not
drawn here, such as a clamp of logits beyond 30, is not seen. torch.func and second derivatives need
the plain function: enabled = False, --kernel off.

Triton is optional. With TRITON_INTERPRET=1 its kernels run on the CPU: slowly, to be tested.
"""
import math
import os
import sys

import torch

from . import cpu, cpu_count

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where this is left open
try:
    import triton

    from . import cope, separable, tra
except ImportError:  # a Mac, say
    triton = None

enabled = True  # False: only plain functions run
INTERPRET = triton is not None and triton.knobs.runtime.interpret
# Names are those of the model files' functions. A way returns None for what it cannot do.
ON_CPU = dict(cable_attention=cpu.cable_attention, fox_attention=cpu.fox_attention,
              alibi_attention=cpu.alibi_attention, tra_attention=cpu_count.tra_attention,
              cope_attention=cpu_count.cope_attention, stick_attention=cpu_count.stick_attention)
ON_GPU = {} if triton is None else dict(
    cable_attention=separable.cable_attention, fox_attention=separable.fox_attention,
    alibi_attention=separable.alibi_attention,
    cope_attention=cope.cope_attention, tra_attention=tra.tra_attention)


def attend(plain, *args):
    """plain(*args), by a faster way if there is one that equals plain. args begin with q, k, v."""
    fast = faster(plain, *args)
    y = fast(*args) if fast else None
    return plain(*args) if y is None else y


def faster(plain, *args):
    """
    -> the function that attend would run instead of plain, or None. It was compared with plain for
    this device, dtype, kind of options, and length (rounded up to a power of 2). The length
    matters: an edit such as a window of 512 tokens changes nothing in shorter texts.
    """
    q, k, _, *options = args
    if not enabled or q.size(2) == 1:  # one query, of cached decoding, leaves most of a GPU idle
        return None
    if q.device.type == "cpu" and not INTERPRET:
        fast = ON_CPU.get(plain.__name__)
    else:
        fast = None if why_no_triton(q) else ON_GPU.get(plain.__name__)
    if fast is None:
        return None
    T, length = k.size(2), 0
    while T > 1:  # not bit_length: torch.compile then needs one graph for every power of 2 alone
        T, length = (T + 1) // 2, length + 1
    options = tuple(constant(x) for x in options)
    how = q.device, q.dtype, q.size(1), q.size(3), options, length
    return fast if equal(plain, fast, *how) else None


def constant(x):
    """An option as a constant: a 2-D table is its shape, any other tensor "tensor"."""
    if not torch.is_tensor(x):
        return x
    return tuple(x.shape) if x.dim() == 2 else "tensor"


def why_no_triton(q):
    """Why the Triton kernels cannot take queries like q (B, H, T, d), in plain words, or ""."""
    d = q.size(-1)
    if triton is None:
        return "no Triton"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return str(q.dtype).removeprefix("torch.")
    if d % 16 or not 16 <= d <= 128:  # 8 modulo 16 would load two bytes at a time
        return f"head size {d} (the kernels take multiples of 16 from 16 to 128)"
    if q.device.type == "cuda":
        if torch.version.hip:  # its devices say cuda, and 9 for their capability
            return "ROCm"
        return "compute capability below 8.0" if capability(q.device.index) < 8 else ""
    return "" if INTERPRET and q.device.type == "cpu" else "no CUDA"


@torch.compiler.assume_constant_result
def capability(index):
    """8 for an A100, 9 for an H100. A constant to torch.compile, which cannot trace this."""
    return torch.cuda.get_device_properties(index).major


# -----------------------------------------------------------------------------
# is a faster way equal to the plain function?

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}  # of the largest value
SHORT, MIDDLE = 37, 300  # tokens in the comparisons with gradients: a way may change at 256
LAST = 63         # query rows compared at long lengths
PER_QUERY = dict(cable_attention=4, tra_attention=3)  # which argument, besides q, has their rows
compared = {}     # what was compared -> whether the two were equal


@torch.compiler.assume_constant_result
def equal(plain, fast, device, dtype, H, d, options, length):
    """
    Whether fast equals plain, in float32 without TF32. On 37 and 300 tokens outputs and gradients,
    on 2 ** length tokens, where that is more, the last outputs; with steps so small that every key
    matters, with large and with very large ones; with logits as large as after training. Where it
    runs in half precision, then also whether that is near plain in float32.
    """
    key = plain, fast, device, dtype, H, d, options, length
    if key in compared:
        return compared[key]
    cases = [(SHORT, 1), (SHORT, SHORT)]
    if 2 ** length > 256:
        cases += [(MIDDLE, 1)]
    if 2 ** length > SHORT:
        cases += [(2 ** length, walk) for walk in (1, 2 ** length, 4 * 2 ** length)]
    if plain.__name__ == "cope_attention":  # it is given no steps, but makes them
        cases = [case for case in cases if case[1] == 1]
    full, half = torch.float32, {dtype} & {torch.bfloat16, torch.float16}
    cases = [(x, *case) for x in (full, *half) for case in cases] + [(full, SHORT, 1, 4)]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
            errors = [difference(plain, fast, device, H, d, options, *case) for case in cases]
            allowed = [TOLERANCE[x] for x, *_ in cases]
            why = f"differs by {max(errors):.1e} of the largest value"
    except Exception as e:  # another signature, a compiler that gives up: whatever it is, not equal
        why = f"does not take what it is given: {type(e).__name__}: {e}".splitlines()[0]
        errors, allowed = [math.inf], [0]
    finally:
        torch.set_float32_matmul_precision(precision)
    told = any(k[0] is plain and not same for k, same in compared.items())
    compared[key] = all(error <= most for error, most in zip(errors, allowed))
    if not compared[key] and not told:
        print(f"{plain.__module__}.{plain.__name__} runs as it is written: "
              f"its faster way in kernels/ {why}", file=sys.stderr)
    return compared[key]


def difference(plain, fast, device, H, d, options, dtype, T, walk, loud=1):
    """
    The largest difference between outputs, and for few tokens gradients, over the largest value,
    for B = 1 and T tokens whose steps sum to about `walk`, with queries and weights times `loud`.
    fast takes heads in dtype, plain the same in float32.
    """
    name = plain.__name__
    rng = torch.Generator("cpu").manual_seed(0)  # the caller's random numbers stay as they are
    random = dict(generator=rng, dtype=torch.float32, device="cpu")  # whatever the defaults are
    q, k, v, keys = torch.randn(4, 1, H, T, d, **random).to(dtype).float()
    steps, weight = torch.rand(2, 1, H, T, **random)
    steps, q, weight = steps * walk / T, q * loud, weight * loud
    tensors = dict(cable_attention=(steps.cumsum(-1), weight),
                   fox_attention=(-steps.cumsum(-1),),
                   alibi_attention=(steps[0, :, 0],),
                   tra_attention=(-steps,), stick_attention=(),
                   cope_attention=(None, keys))[name]
    args = [q, k, v]
    for n, option in enumerate(options):
        if option == "tensor":
            option = tensors[n]
        elif isinstance(option, tuple):
            option = torch.randn(option, **random) / math.sqrt(d)  # q . e as large as logits
        args.append(option)
    args = [x.to(device) if torch.is_tensor(x) else x for x in args]
    gradients = T in (SHORT, MIDDLE)
    rows = T if gradients else LAST
    inputs = [x.requires_grad_(gradients) for x in args if torch.is_tensor(x)]
    last = list(args)
    for n in (0, PER_QUERY.get(name, 0)):
        if n < len(args) and torch.is_tensor(args[n]):
            last[n] = args[n][:, :, -rows:]
    with torch.set_grad_enabled(gradients):
        ours = fast(*(x.to(dtype) if torch.is_tensor(x) and x.dim() == 4 else x for x in args))
        if ours is None:
            return 0.0  # it declines these options, and will not run
        theirs = plain(*last)
        pairs = [(ours[:, :, -rows:], theirs)]
        if gradients:
            dy = torch.cos(torch.arange(theirs.numel(), device=device)).view_as(theirs)
            pairs += zip(torch.autograd.grad(ours, inputs, dy.to(dtype)),
                         torch.autograd.grad(theirs, inputs, dy))
    errors = [(ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
              for ours, theirs in pairs]
    if (name, device.type, dtype, T) == ("cope_attention", "cuda", torch.float32, MIDDLE):
        # gradients of queries and keys jump where a count is whole. Rounding decides where that is,
        # and so many pairs have a few that jump apart: they are compared as in half precision
        share = TOLERANCE[torch.float32] / TOLERANCE[torch.bfloat16]
        errors = [error * share if n in (1, 2, 5) else error for n, error in enumerate(errors)]
    return max(errors)
