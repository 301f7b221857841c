"""
Post-Norm can Resharpen Attention (anonymous ACL submission, 2026): attention averages, so what one token adds to the output
shrinks like 1 / T as the text grows. A norm after the attention undoes the shrinking; the question is where the norms sit.

    x = Emb(t);  if peri_init: x = N(x)
    for F in [Attn, MLP] * n_layer:
      pre:              x = x + F(N(x))
      post:             x = N(x + F(x))
      peri, peri_init:  x = x + N(F(N(x)))
    logits = (N(x) if peri or peri_init else x) U

Three models: the GPT of every other file with these four schemes; the paper's minimal transformer for the set complement
task (Eq. 2, 3), with the hard-coded solution of its Example 4.1; its max retrieval. What differs from the paper, and why:
- "pre" has no norm before the unembedding, which would resharpen by itself; final_norm=True adds it: then "pre" is the other
  files' "pre", as "post" is their "post", but for eps
- norms have eps = 1e-8 (1e-12 in the minimal transformer): at the start the attention output's mean square is about 1e-7
- the minimal transformer's matrices start at std 0.02, cut off at 2 std; the GPT starts, and its embedding decays, as in every other file
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

ROWS = 128  # query rows taken at a time: without gradients, memory grows with ROWS * T, never T * T
SCHEMES = ("pre", "post", "peri", "peri_init")


@dataclass
class GPTConfig:
    block_size: int = 256   # training context, in tokens; evaluation and sampling may go far beyond it
    vocab_size: int = 257   # set by the tokenizer or the task
    n_layer: int = 4        # transformer blocks
    n_head: int = 4         # attention heads per block
    n_embd: int = 128       # width of the residual stream
    dropout: float = 0.0    # 0 is best for a single pass over the data
    norm: str = "post"      # pre, post, peri, peri_init
    qk_norm: bool = False   # RMS-normalise q and k per head, without a learned scale
    pe: str = "rope"          # rope or nope
    final_norm: bool = False  # pre: a norm before the unembedding


VARIANTS = dict(postnorm=dict(), prenorm=dict(norm="pre"), perinorm=dict(norm="peri"), periinitnorm=dict(norm="peri_init"))


def residual(x, f, scheme, before, after):
    """One update of the residual stream by f, with the norms where the scheme has them."""
    if scheme == "post":
        return after(x + f(x))
    if scheme == "pre":
        return x + f(before(x))
    if scheme in ("peri", "peri_init"):
        return x + after(f(before(x)).to(x.dtype))  # under autocast f gives bfloat16: too coarse for a norm
    return x + (after(f(x)) if scheme == "output" else f(x))  # of the minimal transformer alone: output, none


# -----------------------------------------------------------------------------
# the minimal transformer of the set complement task, and its hard-coded solution

class MinimalTransformer(nn.Module):
    """
    One layer, one head, no MLP, no positions (Eq. 3): f(t) = B_last + sum_i a_i D_{t_i} / sum_i a_i, B = E U the embedding
    times the unembedding, a = exp(E W_Q (E W_K)^T) the weights, D = E W_V W_O U. n tokens; d, d_k, d_v are free.
    norm: none, output (on what the attention adds, nowhere else: Theorem 4.2's remedy alone) or one of SCHEMES.
    constant=True gives every token the same weight, as the theorem assumes.
    """
    def __init__(self, n, d, d_k=1, d_v=None, norm="none", constant=False):
        super().__init__()
        if norm not in ("none", "output", *SCHEMES):
            raise ValueError(f"norm={norm!r} is not one of none, output, {', '.join(SCHEMES)}")
        if n < 2 or min(d, d_k, d_v or d) < 1:
            raise ValueError("a minimal transformer needs n >= 2 tokens and d, d_k, d_v >= 1")
        d_v = d if d_v is None else d_v
        shapes = dict(E=(n, d), W_Q=(d, d_k), W_K=(d, d_k), W_V=(d, d_v), W_O=(d_v, d), U=(d, n))
        for name, shape in shapes.items():
            w = torch.empty(shape)
            self.register_parameter(name, nn.Parameter(nn.init.trunc_normal_(w, std=0.02, a=-0.04, b=0.04)))
        self.norm, self.constant = norm, constant
        self.first, self.before, self.after, self.last = (nn.RMSNorm(d, eps=1e-12) for _ in range(4))

    def attend(self, x):
        v = x @ (self.W_V @ self.W_O)
        if self.constant:
            return v.cumsum(-2) / torch.arange(1, x.size(-2) + 1, device=x.device)[:, None]
        q, k = (x @ w for w in (self.W_Q, self.W_K))
        a = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(x.size(-2), x.size(-2), device=x.device).triu(1).bool(), float("-inf"))
        return a.softmax(-1) @ v

    def forward(self, idx):
        """idx (B, T) -> logits (B, T, n): row t is what follows the set of the first t + 1 tokens."""
        x = self.E[idx]
        x = self.first(x) if self.norm == "peri_init" else x
        x = residual(x, self.attend, self.norm, self.before, self.after)
        return (self.last(x) if self.norm in ("peri", "peri_init") else x) @ self.U


def hard_coded(n, c, norm="none", centred=False):
    """
    Example 4.1, in float64: d = d_v = n - 1, constant attention, E = [I; -1^T], U = c [-I | 0]. A set's last token is c (1 + 1/l)
    below the absent ones, its others c / l: diluted. centred=True has E E^T = I - J/n and U = -c E^T instead, for which a norm on
    the attention output gives gaps of c sqrt(n (n - 1) / (l (n - l))): bounded from below at every length.
    """
    model = MinimalTransformer(n, n - 1, 1, n - 1, norm, constant=True).double()
    eye = torch.eye(n - 1, dtype=torch.float64)
    if centred:  # n points in n - 1 dimensions: the eigenvectors of I - J/n whose eigenvalue is 1
        E = torch.linalg.eigh(torch.eye(n, dtype=torch.float64) - 1 / n).eigenvectors[:, 1:]
        U = -c * E.T
    else:
        E = torch.cat((eye, -torch.ones(1, n - 1, dtype=torch.float64)))
        U = c * torch.cat((-eye, torch.zeros(n - 1, 1, dtype=torch.float64)), 1)
    with torch.no_grad():
        for name, w in dict(E=E, U=U, W_V=eye, W_O=eye).items():
            getattr(model, name).copy_(w)
        model.W_Q.zero_(), model.W_K.zero_()
    return model


# -----------------------------------------------------------------------------
# max retrieval

class MaxRetrieval(nn.Module):
    """
    The class of the item with the largest priority (Velickovic et al., 2025; section 6.2): h = MLP(x), weights softmax(q . h) with a
    parameter q, z their mean of h, logits MLP(z). norm: none, pre (on h), post (on z), peri (both).
    """
    def __init__(self, norm="none", classes=10, width=128):
        super().__init__()
        if norm not in ("none", "pre", "post", "peri"):
            raise ValueError(f"norm={norm!r} is not one of none, pre, post, peri")
        self.enter = nn.Sequential(nn.Linear(1 + classes, width), nn.GELU(), nn.Linear(width, width))
        self.leave = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
        self.q = nn.Parameter(torch.randn(width) / math.sqrt(width))
        self.before = nn.RMSNorm(width, eps=1e-8) if norm in ("pre", "peri") else nn.Identity()
        self.after = nn.RMSNorm(width, eps=1e-8) if norm in ("post", "peri") else nn.Identity()

    def forward(self, x):
        """x (B, T, 1 + classes), the priority first, -1 where an item is padding -> logits (B, classes)."""
        h = self.before(self.enter(x))
        a = (h @ self.q).masked_fill(x[..., 0] < 0, float("-inf")).softmax(-1)
        return self.leave(self.after((a[..., None] * h).sum(-2)))


# -----------------------------------------------------------------------------
# the GPT

def rotate(x, pos):
    """RoPE (Su et al., 2021): x (B, H, T, d) turned by angles that grow with pos (T,)."""
    half = x.size(-1) // 2
    freq = 10000.0 ** (-torch.arange(half, device=x.device) / half)         # (d/2,)
    angle = pos[:, None] * freq                                             # (T, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(q, k, v):
    """softmax(q k^T / sqrt(d)) v, causal. q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys."""
    Tq, Tk, y = q.size(2), k.size(2), []
    if Tq in (1, Tk):
        return F.scaled_dot_product_attention(q, k, v, is_causal=Tq > 1)
    for start in reversed(range(Tk - Tq, Tk, ROWS)):  # longest rows first: later ones reuse their memory
        end = min(start + ROWS, Tk)  # these rows see the first `end` keys
        seen = torch.arange(end, device=q.device) <= torch.arange(start, end, device=q.device)[:, None]
        rows = q[:, :, start - (Tk - Tq):end - (Tk - Tq)]
        y.append(F.scaled_dot_product_attention(rows, k[:, :, :end], v[:, :, :end], attn_mask=seen))
    return torch.cat(y[::-1], dim=2)


class Cache:
    """What a layer must remember of past tokens: named buffers (B, H, T, ...) that grow by doubling."""
    def __init__(self, size=256):  # size: how many tokens are to come, if known
        self.t, self.size, self.buf = 0, size, {}

    def append(self, name, x):     # x (B, H, n, ...) -> everything so far, (B, H, t + n, ...)
        end, buf = self.t + x.size(2), self.buf.get(name)
        if buf is None or end > buf.size(2):
            grown = x.new_empty(*x.shape[:2], max(end, 2 * self.t, self.size), *x.shape[3:])
            if buf is not None:
                grown[:, :, :self.t] = buf[:, :, :self.t]
            self.buf[name] = buf = grown
        buf[:, :, self.t:end] = x
        return buf[:, :, :end]


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.qk_norm, self.layer = config.n_head, config.qk_norm, layer
        self.rope = config.pe == "rope"

    def forward(self, x, cache, pos):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head).transpose(1, 2).chunk(3, dim=1)  # (B, H, T, d)
        if self.qk_norm:
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))  # autocast would leave them in float32
        if self.rope:
            q, k = rotate(q, pos), rotate(k, pos)
        if cache is not None:
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
        y = attention(q, k, v)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)
        self.scheme = config.norm
        norms = [[nn.RMSNorm(config.n_embd, eps=1e-8) if has else nn.Identity() for _ in range(2)]
                 for has in (config.norm != "post", config.norm != "pre")]
        self.before, self.after = map(nn.ModuleList, norms)

    def forward(self, x, *args):
        x = residual(x, lambda x: self.attn(x, *args), self.scheme, self.before[0], self.after[0])
        return residual(x, self.mlp, self.scheme, self.before[1], self.after[1])


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
        if config.norm not in SCHEMES:
            raise ValueError(f"norm={config.norm!r} is not one of {', '.join(SCHEMES)}")
        if config.final_norm and config.norm != "pre":
            raise ValueError(f"final_norm is for norm=pre; norm={config.norm} has the norms of its scheme")
        if config.pe not in ("rope", "nope"):
            raise ValueError(f"pe={config.pe!r} is not one of rope, nope")
        if config.pe == "rope" and config.n_embd // config.n_head % 2:
            raise ValueError(f"rope turns pairs of channels: head size {config.n_embd // config.n_head} is odd")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.ln_0 = nn.RMSNorm(config.n_embd, eps=1e-8) if config.norm == "peri_init" else nn.Identity()
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        final = config.norm in ("peri", "peri_init") or (config.norm == "pre" and config.final_norm)
        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-8) if final else nn.Identity()
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # the residual stream sums 2 n_layer of these
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids; targets (B, T), -1 where not scored -> logits (B, T, vocab), mean loss or None."""
        B, T = idx.shape
        start = cache.t if cache is not None else 0
        pos = torch.arange(start, start + T, device=idx.device)
        x = self.ln_0(self.drop(self.wte(idx)))
        for block in self.h:
            x = block(x, cache, pos)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        if cache is not None:
            cache.t += T
        return logits, loss
