"""
Post-Norm's small models: the minimal transformer of the set complement task (Eq. 2, 3), hard-coded
solutions, and max retrieval (section 6.2). search.py trains them.

What differs from the paper, or is not named there: norms have eps = 1e-12 in the minimal
transformer, whose matrices start at std 0.02, cut off at 2 std. The hard-coded matrices are ours.
"""
import torch
import torch.nn as nn

from model_postnorm import SCHEMES, residual  # noqa: F401  (tests ask for the schemes here)


def norm_if(wanted, width, eps):
    return nn.RMSNorm(width, eps=eps) if wanted else nn.Identity()


def cut_off(*shape):
    """A matrix with std 0.02, cut off at 2 std."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02, a=-0.04, b=0.04))


# -----------------------------------------------------------------------------
# the minimal transformer of the set complement task, and its hard-coded solution

class MinimalTransformer(nn.Module):
    """
    One layer, one head, no MLP, no positions (Eq. 3):
    f(t) = B_last + sum_i a_i D_{t_i} / sum_i a_i, with B = E U the embedding times the unembedding,
    a = exp(E W_Q (E W_K)^T) the weights, D = E W_V W_O U. n tokens; d, d_k, d_v are free.
    norm: none or one of SCHEMES; output is section 4.3's remedy alone; ssmax is pre_final with
    logits times s ln l of the l tokens so far (rivals/ssmax.py).
    """
    def __init__(self, n, d, d_k=1, d_v=None, norm="none"):
        super().__init__()
        d_v = d if d_v is None else d_v
        self.E = cut_off(n, d)
        self.W_Q = cut_off(d, d_k)
        self.W_K = cut_off(d, d_k)
        self.W_V = cut_off(d, d_v)
        self.W_O = cut_off(d_v, d)
        self.U = cut_off(d, n)
        self.norm = norm
        self.s = nn.Parameter(torch.ones(1)) if norm == "ssmax" else None
        before = norm in ("pre", "pre_final", "ssmax")
        peri = norm in ("peri", "peri_init")
        self.first = norm_if(norm == "peri_init", d, 1e-12)
        self.before = norm_if(before or peri, d, 1e-12)
        self.after = norm_if(norm in ("output", "post") or peri, d, 1e-12)
        self.last = norm_if(norm in ("pre_final", "ssmax") or peri, d, 1e-12)

    def attend(self, x):
        T = x.size(-2)
        v = x @ (self.W_V @ self.W_O)
        later = torch.ones(T, T, device=x.device).triu(1).bool()
        a = (x @ self.W_Q) @ (x @ self.W_K).transpose(-1, -2)
        if self.s is not None:
            a = a * self.s * torch.arange(1.0, T + 1, device=x.device).log()[:, None]
        return a.masked_fill(later, float("-inf")).softmax(-1) @ v

    def forward(self, idx):
        """idx (B, T) -> logits (B, T, n): row t is what follows the first t + 1 tokens."""
        x = self.first(self.E[idx])
        return self.last(residual(x, self.attend, self.norm, self.before, self.after)) @ self.U


def hard_coded(n, c, norm="none", centred=False):
    """
    In the manner of Example 4.1, in float64: d = d_v = n - 1, W_Q = 0, so that every token has the
    same weight, E = [I; -1^T], U = c [-I | 0]. A set's last token is c (1 + 1/l) below the absent
    ones, its others c / l: diluted. centred=True has E E^T = I - J/n and U = -c E^T instead, for
    which a norm on the attention output gives gaps of c sqrt(n (n - 1) / (l (n - l))): bounded from
    below at every length.
    """
    model = MinimalTransformer(n, n - 1, 1, n - 1, norm).double()
    eye = torch.eye(n - 1, dtype=torch.float64)
    if centred:  # n points in n - 1 dimensions: the eigenvectors of I - J/n whose eigenvalue is 1
        E = torch.linalg.eigh(torch.eye(n, dtype=torch.float64) - 1 / n).eigenvectors[:, 1:]
        U = -c * E.T
    else:
        E = torch.cat((eye, -torch.ones(1, n - 1, dtype=torch.float64)))
        U = c * torch.cat((-eye, torch.zeros(n - 1, 1, dtype=torch.float64)), 1)
    zero = torch.zeros(n - 1, 1, dtype=torch.float64)
    with torch.no_grad():
        for name, w in dict(E=E, U=U, W_V=eye, W_O=eye, W_Q=zero, W_K=zero).items():
            getattr(model, name).copy_(w)
    return model


# -----------------------------------------------------------------------------
# max retrieval

class MaxRetrieval(nn.Module):
    """
    The class of the item with the largest priority (Velickovic et al., 2025; section 6.2):
    h = MLP(x), weights softmax(q . h) with a parameter q, z their mean of h, logits MLP(z).
    norm: none, pre (on h), post (on z), peri (both).
    """
    def __init__(self, norm="none", classes=10, width=128):
        super().__init__()
        self.enter = nn.Sequential(
            nn.Linear(1 + classes, width), nn.GELU(), nn.Linear(width, width))
        self.leave = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
        self.q = nn.Parameter(torch.empty(width))
        self.before = norm_if(norm in ("pre", "peri"), width, 1e-8)
        self.after = norm_if(norm in ("post", "peri"), width, 1e-8)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif name == "q" or p.dim() == 2:
                nn.init.trunc_normal_(p, std=0.02, a=-0.04, b=0.04)

    def forward(self, x):
        """
        x (B, T, 1 + classes), the priority first, -1 where an item is padding
        -> logits (B, classes).
        """
        h = self.before(self.enter(x))
        a = (h @ self.q).masked_fill(x[..., 0] < 0, float("-inf")).softmax(-1)
        return self.leave(self.after((a[..., None] * h).sum(-2)))
