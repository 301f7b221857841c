"""The inputs at which formulas, literal forms, plain functions and kernels are compared."""
import math

import numpy as np
import torch
from torch.nn import functional as F

import model_baseline
import model_cable
import model_cope
import model_tra
from lab.variants import cable as k_cable
from rivals import classics, diff, fox, path, ssmax, stick
from tests.helpers import INF, TINY, random_qkv


def naive(q, k, v, bias=lambda b, h, i, j: 0.0):
    """softmax(q . k / sqrt(d) + bias(b, h, i, j)) v for j <= i; a bias of -inf drops the key."""
    B, H, Tq, d = q.shape
    Tk, out = k.size(2), v.new_zeros(B, H, Tq, v.size(3))
    for b, h, row in np.ndindex(B, H, Tq):
        i = Tk - Tq + row
        weights = {}
        for j in range(i + 1):
            logit = (q[b, h, row] @ k[b, h, j]).item() / math.sqrt(d) + float(bias(b, h, i, j))
            if logit > -INF:
                weights[j] = math.exp(logit)
        for j, weight in weights.items():
            out[b, h, row] += weight / sum(weights.values()) * v[b, h, j]
    return out


def cable_formula(q, k, v, S, g=None, log_kernel=""):
    """CABLE's Eq. 5 and 7, and K-CABLE's -g log(1 + (S_i - S_j)^2), -log(1 + (g (S_i - S_j))^2)."""
    first = k.size(2) - q.size(2)

    def bias(b, h, i, j):
        distance = (S[b, h, i] - S[b, h, j]).item()
        weight = 1.0 if g is None else g[b, h, i - first].item()
        if log_kernel == "inside":
            return -math.log(1 + (weight * distance)**2)
        if log_kernel == "outside":
            distance = math.log(1 + distance**2)
        return -weight * distance
    return naive(q, k, v, bias)


def fox_formula(q, k, v, F_):
    """FoX: log of the product of the forget gates from j + 1 to i."""
    f = F_.diff(dim=-1, prepend=torch.zeros_like(F_[..., :1])).exp()
    return naive(q, k, v, lambda b, h, i, j: math.log(f[b, h, j + 1:i + 1].prod()))


def cope_formula(q, k, v, pos_emb, gate_keys=None):
    """CoPE's Eq. 3, 4, 7 and 9: gates are summed from key j to query i, z is interpolated."""
    gate_keys = k if gate_keys is None else gate_keys
    first, d, P = k.size(2) - q.size(2), q.size(3), pos_emb.size(1)

    def bias(b, h, i, j):
        row = q[b, h, i - first]
        gates = [torch.sigmoid(row @ gate_keys[b, h, n] / math.sqrt(d)) for n in range(j, i + 1)]
        p = min(sum(gates).item(), P - 1)
        z = row @ pos_emb
        return z[math.floor(p)] * (1 - p + math.floor(p)) + z[math.ceil(p)] * (p - math.floor(p))
    return naive(q, k, v, bias)


def tra_formula(q, k, v, log_decay):
    """TRA's Eq. 3 to 12: keys with q . k <= 0 are dropped, then those that are left are counted."""
    first = k.size(2) - q.size(2)

    def bias(b, h, i, j):
        survivors = [n for n in range(j, i + 1) if q[b, h, i - first] @ k[b, h, n] > 0]
        return len(survivors) * log_decay[b, h, i - first] if j in survivors else -INF
    return naive(q, k, v, bias)


def diff_formula(q, k, v, lam):
    """Diff: a softmax of the first halves minus lambda times one of the second halves."""
    half = q.size(3) // 2
    first = naive(q[..., :half], k[..., :half], v)
    return first - lam * naive(q[..., half:], k[..., half:], v)


def ssmax_formula(q, k, v, s):
    """SSMax: the logits times s ln n, n the number of keys."""
    first, d = k.size(2) - q.size(2), q.size(3)

    def bias(b, h, i, j):
        return (s[h] * math.log(i + 1) - 1) * (q[b, h, i - first] @ k[b, h, j]) / math.sqrt(d)
    return naive(q, k, v, bias)


def stick_formula(q, k, v, c=0.0):
    """Stick-breaking: from the nearest key on, each takes its share of what is left."""
    B, H, Tq, d = q.shape
    first, out = k.size(2) - Tq, v.new_zeros(B, H, Tq, v.size(3))
    for b, h, row in np.ndindex(B, H, Tq):
        left = 1.0
        for j in reversed(range(first + row)):
            z = (q[b, h, row] @ k[b, h, j]).item() / math.sqrt(d) - c
            share = 1 / (1 + math.exp(-z))
            out[b, h, row] += left * share * v[b, h, j]
            left *= 1 - share
    return out


def path_formula(q, k, v, w, beta):
    """PaTH: k_j H_{j+1} ... H_i q_i, the matrices of the new tokens alone."""
    first, d = k.size(2) - q.size(2), q.size(3)

    def bias(b, h, i, j):
        product = torch.eye(d, dtype=q.dtype)
        for t in range(max(j + 1, first) - first, i + 1 - first):
            product = product @ (torch.eye(d, dtype=q.dtype)
                                 - beta[b, h, t] * torch.outer(w[b, h, t], w[b, h, t]))
        row = q[b, h, i - first]
        return k[b, h, j] @ (product @ row - row) / math.sqrt(d)  # beside q . k
    return naive(q, k, v, bias)


def encoding(name):
    """A classic encoding whose parameters are random, in float64."""
    torch.manual_seed(0)
    fields = TINY | dict(n_head=3, n_embd=18, block_size=8, n_label=100)
    config = classics.GPTConfig(**fields | classics.VARIANTS[name])
    pe = classics.ENCODINGS[config.pe](config)
    with torch.no_grad():
        for p in pe.parameters():
            p.add_(torch.randn_like(p))
        if name == "fire":
            pe.m.fill_(6 / 512)  # L = 6: rows before and beyond it
    return pe.double()


def classic_formula(name, q, k, v, pe):
    """The classics' biases, from each paper's formula."""
    first, last = k.size(2) - q.size(2), 7
    slopes = 2**-4, 2**-8, 2**-2  # of 3 heads: those of 2, and the first that 4 would have

    def fire(b, h, i, j):
        c, L = abs(pe.c.item()), abs(pe.m.item()) * 512
        x = math.log(c * (i - j) + 1) / (math.log(c * max(i, L) + 1) + 1e-6)
        hidden = F.relu(pe.mlp[0].weight[:, 0] * x + pe.mlp[0].bias)
        return pe.mlp[2].weight[h] @ hidden + pe.mlp[2].bias[h]

    def kerple(b, h, i, j):
        p, a = max(pe.p[h].item(), 0.01), max(pe.a[h].item(), 0.01)
        return -p * math.log(1 + a * (i - j))

    def relative(b, h, i, j):
        if i - j > last and name == "relative":
            return 0.0
        return q[b, h, i - first] @ pe.e[:, min(i - j, last)]
    bias = dict(alibi=lambda b, h, i, j: -slopes[h] * (i - j), kerple=kerple, fire=fire,
                t5=lambda b, h, i, j: pe.r[h, min(i - j, last)],
                relative=relative, relative_capped=relative)[name]
    return naive(q, k, v, bias)


CLASSICS = ("alibi", "t5", "kerple", "fire", "relative", "relative_capped")
COPE = [f"cope {gates} P={P}" for gates in ("key", "sep") for P in (1, 2, 5, 64)]
CASES = [
    "baseline", *CLASSICS,
    "cable", "cable_nw", "k_cable", "k_cable_inside", "fox",
    *COPE, "tra",
    "diff", "stick", "stick c=4", "path", "ssmax"]


def example(case, Tq=37, Tk=37, B=2, H=3, d=6):
    """-> module, the formula of this case, and float64 arguments for both."""
    q, k, v = random_qkv(B, H, Tq, Tk, d)
    g = torch.Generator().manual_seed(1)
    a, z = torch.randn(2, B, H, Tk, generator=g, dtype=torch.float64)
    gate_keys = torch.randn(B, H, Tk, d, generator=g, dtype=torch.float64)
    if case == "baseline":
        return model_baseline, naive, [q, k, v]
    if case in CLASSICS:
        pe = encoding(case).requires_grad_(False)

        def formula(q, k, v, bias):
            return classic_formula(case, q, k, v, pe)
        return classics, formula, [q, k, v, pe.bias]
    if "cable" in case:
        weight = None if "nw" in case else F.softplus(z[..., Tk - Tq:])
        args = [q, k, v, a.relu().cumsum(-1), weight]
        if case.startswith("k_"):
            return k_cable, cable_formula, [*args, "inside" if "inside" in case else "outside"]
        return model_cable, cable_formula, args
    if case == "fox":
        return fox, fox_formula, [q, k, v, F.logsigmoid(z).cumsum(-1)]
    if case == "tra":
        q[0, 0, 0] = 0  # no score above 0: no survivor
        return model_tra, tra_formula, [q, k, v, F.logsigmoid(z[..., Tk - Tq:])]
    if case == "diff":
        return diff, diff_formula, [q, k, v, 0.35]
    if case.startswith("stick"):
        return stick, stick_formula, [q, k, v, 4.0 if "c=4" in case else 0.0]
    if case == "ssmax":
        return ssmax, ssmax_formula, [q, k, v, torch.tensor([0.2, 0.7, 1.5]).double()[:H]]
    if case == "path":
        w, beta = F.normalize(gate_keys[:, :, Tk - Tq:], dim=-1), 2 * a[..., Tk - Tq:].sigmoid()
        return path, path_formula, [q, k, v, w, beta]
    _, gates, P = case.split()
    pos_emb = torch.randn(d, int(P.removeprefix("P=")), generator=g, dtype=torch.float64)
    return model_cope, cope_formula, [q, k, v, pos_emb, gate_keys if gates == "sep" else None]


def on_tensors(f, args):
    """f of those arguments that are tensors; numbers, functions and None stay."""
    return [f(x) if torch.is_tensor(x) else x for x in args]
