"""
TRA, CoPE and stick-breaking on a CPU: the plain functions, with their derivatives by hand.

What counts from the query to the key has no fused attention in torch: every step is a pass over a
matrix of logits, and the passes take the time. autograd adds some: zeros for every slice of the
keys, and it overwrites nothing. Here forward works in place and keeps the least that backward
needs. Blocks of query rows see their keys nearest first, as in the model files.
"""
import math

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ROWS = 64     # query rows in a block
MANY = 1024   # keys from which CoPE is ahead of its plain function, compiled
FAR = -1e30   # a logit that weighs exactly 0; in a row of minus infinities the weights are NaN
sigmoid_backward = torch.ops.aten.sigmoid_backward


def tra_attention(q, k, v, log_decay):
    """tra_attention of model_tra.py, or None for what is left to that."""
    return run(TRA, q, k, v, log_decay.expand(q.shape[:3]))


def cope_attention(q, k, v, pos_emb, gate_keys=None):
    """cope_attention of model_cope.py, or None for what is left to that."""
    return run(CoPE, q, k, v, pos_emb, gate_keys, compiled_from=MANY)


def stick_attention(q, k, v, c=0.0):
    """stick_attention of rivals/stick.py, or None for what is left to that."""
    return run(Stick, q, k, v, c)


def run(function, *args, compiled_from=math.inf):
    """
    None in half precision, and under torch.compile, which does better with plain functions of fewer
    than compiled_from keys.
    """
    if torch.is_autocast_enabled("cpu"):
        return None
    if torch.compiler.is_compiling() and args[1].size(2) < compiled_from:
        return None
    types = {x.dtype for x in args if isinstance(x, torch.Tensor)}
    if types not in ({torch.float32}, {torch.float64}):
        return None
    if not torch.is_grad_enabled():  # then nothing is kept
        args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    return apply(function, *args)


def apply(function, *args):
    """Under torch.compile its graph ends here and begins anew."""
    if torch.compiler.is_compiling():  # a decorator would import torch._dynamo at every start
        return torch.compiler.disable(function.apply)(*args)
    return function.apply(*args)


def blocks(q, k, own=1):
    """
    The longest first: rows of q, their keys, nearest first, and which of the first are later; with
    own=0 a row's own key, too.
    """
    Tq, Tk = q.size(2), k.size(2)
    for start in reversed(range(Tk - Tq, Tk, ROWS)):
        end = min(start + ROWS, Tk)
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(own).flip(-1)
        yield slice(start - Tk + Tq, end - Tk + Tq), slice(Tk - end, Tk), later


def through_softmax(dy, a, v, dv):
    """Adds to dv what y = a v gives it. -> the gradient of the logits whose softmax is a."""
    dv += a.mT @ dy
    return torch.ops.aten._softmax_backward_data(dy @ v.mT, a, -1, a.dtype)


class TRA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay):
        q, k, v = q.contiguous() / math.sqrt(q.size(3)), k.flip(2), v.flip(2)
        y, kept = torch.empty_like(q), []
        for here, keys, later in blocks(q, k):
            s = q[:, :, here] @ k[:, :, keys].mT
            s[..., :len(later)].masked_fill_(later, FAR)
            F.threshold_(s, 0, FAR)
            C = torch.gt(s, 0, out=torch.empty_like(s)).cumsum_(-1)
            a = s.addcmul_(C, log_decay[:, :, here, None]).softmax(-1)
            some = C[..., -1:] > 0                                          # survivors, or none
            y[:, :, here] = (a @ v[:, :, keys]).mul_(some)
            if any(ctx.needs_input_grad):
                kept += C, a, some
        ctx.save_for_backward(q, k, v, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, *kept = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dy, dlog_decay, kept = dy.contiguous(), q.new_empty(q.shape[:3]), iter(kept)
        for here, keys, _ in blocks(q, k):
            C, a, some = next(kept), next(kept), next(kept)
            ds = through_softmax(dy[:, :, here] * some, a, v[:, :, keys], dv[:, :, keys])
            dq[:, :, here] = ds @ k[:, :, keys]
            dk[:, :, keys] += ds.mT @ q[:, :, here]
            dlog_decay[:, :, here] = ds.mul_(C).sum(-1)
        return dq / math.sqrt(q.size(3)), dk.flip(2), dv.flip(2), dlog_decay


class Stick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, c):
        q, k, v = q.contiguous() / math.sqrt(q.size(3)), k.flip(2), v.flip(2)
        y, kept = torch.empty_like(q), []
        for here, keys, later in blocks(q, k, own=0):
            s = (q[:, :, here] @ k[:, :, keys].mT).sub_(c)
            s[..., :len(later)].masked_fill_(later, FAR)
            s.sigmoid_()
            left = (1 - s).cumprod_(-1)  # after each key; its derivative would divide by 0
            a = s.clone()
            a[..., 1:] *= left[..., :-1]
            y[:, :, here] = a @ v[:, :, keys]
            if any(ctx.needs_input_grad):
                kept += s, a
        ctx.save_for_backward(q, k, v, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, *kept = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dy, kept = dy.contiguous(), iter(kept)
        for here, keys, _ in blocks(q, k):
            s, a = next(kept), next(kept)
            dv[:, :, keys] += a.mT @ dy[:, :, here]
            dlog = (dy[:, :, here] @ v[:, :, keys].mT).mul_(a)              # of log a
            behind = dlog.cumsum(-1).neg_().add_(dlog).add_(dlog.sum(-1, keepdim=True))
            ds = dlog.addcmul_(s, behind, value=-1)  # a key is in its own share and all behind it
            dq[:, :, here] = ds @ k[:, :, keys]
            dk[:, :, keys] += ds.mT @ q[:, :, here]
        return dq / math.sqrt(q.size(3)), dk.flip(2), dv.flip(2), None


class CoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, pos_emb, gate_keys):
        P, scale = pos_emb.size(1), 1 / math.sqrt(q.size(3))
        q, k, v = q.contiguous(), k.flip(2) * scale, v.flip(2)
        gate_k = k if gate_keys is None else gate_keys.flip(2) * scale
        z = q @ pos_emb                                                     # (B, H, Tq, P)
        slope = F.pad(z.diff(dim=-1), (0, 1))
        y, kept = torch.empty_like(q), []
        for here, keys, later in blocks(q, k):
            s = q[:, :, here] @ k[:, :, keys].mT
            s[..., :len(later)].masked_fill_(later, FAR)
            # keys to count over: a guess, doubled until every count is full. A later row may make
            # it larger, which changes no bit of an earlier row, as n is a multiple of ROWS
            n = ROWS * math.ceil(1 + 3 * P / ROWS)
            while True:
                gates = s[..., :n]
                if gate_keys is not None:
                    gates = q[:, :, here] @ gate_k[:, :, keys][:, :, :n].mT
                    gates[..., :len(later)].masked_fill_(later, FAR)
                gates = gates.sigmoid()
                p = gates.cumsum(-1)
                least = p[..., -1].amin()
                if n >= s.size(-1) or least >= P - 1:
                    break
                n *= 2
            if least.isnan():  # in a run that diverged: it must not become an address
                p.nan_to_num_()
            p.clamp_(max=P - 1)
            low, w = p.long(), p.frac_()
            steep = slope[:, :, here].gather(-1, low)
            s[..., :n].add_(z[:, :, here].gather(-1, low)).addcmul_(steep, w)
            s[..., n:] += z[:, :, here, P - 1:]
            a = s.softmax(-1)
            y[:, :, here] = a @ v[:, :, keys]
            if any(ctx.needs_input_grad):
                kept += gates, low, w, steep, a
        ctx.save_for_backward(q, k, v, pos_emb, gate_k, *kept)
        ctx.own_gates = gate_keys is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, pos_emb, gate_k, *kept = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dgate_k = torch.zeros_like(gate_k) if ctx.own_gates else None
        dz = q.new_zeros(*q.shape[:3], pos_emb.size(1))
        dy, dslope, kept = dy.contiguous(), torch.zeros_like(dz), iter(kept)
        for here, keys, _ in blocks(q, k):
            gates, low, w, steep, a = (next(kept) for _ in range(5))
            n = gates.size(-1)
            ds = through_softmax(dy[:, :, here], a, v[:, :, keys], dv[:, :, keys])
            near = ds[..., :n]
            dz[:, :, here].scatter_add_(-1, low, near)
            dz[:, :, here, -1] += ds[..., n:].sum(-1)
            dslope[:, :, here].scatter_add_(-1, low, near * w)
            dp = near * steep
            dp = dp.sum(-1, keepdim=True) - dp.cumsum(-1) + dp  # a gate is in its own p and farther
            dgates = sigmoid_backward(dp, gates)
            if ctx.own_gates:
                dgate_k[:, :, keys][:, :, :n] += dgates.mT @ q[:, :, here]
                dq[:, :, here] += dgates @ gate_k[:, :, keys][:, :, :n]
            else:
                near += dgates
            dq[:, :, here] += ds @ k[:, :, keys]
            dk[:, :, keys] += ds.mT @ q[:, :, here]
        dz[..., 1:] += dslope[..., :-1]
        dz[..., :-1] -= dslope[..., :-1]
        dq += dz @ pos_emb.mT
        scale = 1 / math.sqrt(q.size(3))
        dgate_k = dgate_k.flip(2) * scale if ctx.own_gates else None
        return dq, dk.flip(2) * scale, dv.flip(2), (q.mT @ dz).sum((0, 1)), dgate_k
