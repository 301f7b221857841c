"""
CoPE, Contextual Position Encoding: count the tokens that matter to this query instead of all of them, and look the
count up in a table of positions (Golovneva et al., 2024; Eq. 3-9, Listing 1).

    s_ij = q_i . k_j / sqrt(d)
    g_ij = sigmoid(s_ij)                        does key j count as a step for query i, softly      (Eq. 3)
    p_ij = min(g_ij + ... + g_ii, P - 1)        steps from key j to query i                         (Eq. 4)
    z_i[n] = q_i . e[n],  n = 0 ... P - 1       what query i thinks of each whole number of steps   (Eq. 7)
    logit_ij = s_ij + (1 - w) z_i[floor p] + w z_i[ceil p],   w = p - floor p                       (Eq. 8, 9)

With all gates at 1, p = i - j + 1: relative position embeddings, one entry further on. What differs from the paper, and why:
- Eq. 5 and 8 print the two weights the wrong way round (a jump at every whole number); Listing 1 has them as here
- the gates are summed leftwards from the query only until every row of the block has reached P - 1: further left the bias
  is the constant z_i[P - 1]. The listing's two flips over the whole matrix are where its time goes
- one table for all heads, and for all layers unless share=False, as in the paper's Table 8; z is not divided by sqrt(d)
- position="alibi" is -m p (Eq. 10 prints +m p, which for the m it lists would favour far keys), with p as above
- plus="rope": rotated q and k in the logits and the gates, z from the unrotated q; the paper does not say
- backbone: RMSNorm and no linear biases, the same in every model file here
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

try:
    from kernels import cope_attention as fused
    from kernels import usable
except ImportError:  # no Triton, or this file alone
    fused = None

ROWS = 128  # query rows taken at a time: without gradients, memory grows with ROWS * T, never T * T


@dataclass
class GPTConfig:
    block_size: int = 256   # training context, in tokens; evaluation and sampling may go far beyond it
    vocab_size: int = 257   # set by the tokenizer or the task
    n_layer: int = 4        # transformer blocks
    n_head: int = 4         # attention heads per block
    n_embd: int = 128       # width of the residual stream
    dropout: float = 0.0    # 0 is best for a single pass over the data
    norm: str = "pre"       # pre: x + F(N(x)), post: N(x + F(x))
    qk_norm: bool = False   # RMS-normalise q and k per head, without a learned scale
    P: int = 64                  # positions in the table: counts stop at P - 1
    gates: str = "key"           # what a query counts: key (q . k), val (q . v), sep (q . k' of a projection of its own)
    position: str = "embedding"  # embedding (a table, interpolated), mlp (of the count, no table), alibi (-m times the count)
    share: bool = True           # one table for all layers
    plus: str = "none"           # none, relative (q_i . e_rel[i - j] besides), rope (rotated q and k)
    slopes: str = ""             # alibi: n_head numbers, as 1,0.5,0.25,0.125; empty: learned per head and layer, from 0


VARIANTS = dict(cope=dict(), cope_val=dict(gates="val"), cope_sep=dict(gates="sep"), cope_mlp=dict(position="mlp"),
                cope_alibi=dict(position="alibi"), cope_relative=dict(plus="relative"), cope_rope=dict(plus="rope"))


# -----------------------------------------------------------------------------
# attention

def cope_attention(q, k, v, pos_emb, gate_keys=None):
    """
    softmax(q k^T / sqrt(d) + z[p]) v, causal, CoPE Eq. 9.
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys; pos_emb (d, P);
    gate_keys (B, H, Tk, d) are what the gates see, None for k. Returns (B, H, Tq, d).
    """
    return counting_attention(q, k, v, gate_keys, pos_emb.size(1), lambda here, p: interpolate(q[:, :, here] @ pos_emb.to(q.dtype), p))


def interpolate(z, p):
    """z (..., n, P) looked up at the fractional positions p (..., n, m) in [0, P - 1] -> (..., n, m)."""
    low = p.detach().floor()
    index = low.long().clamp(0, z.size(-1) - 1)  # a NaN, of a run that diverged, must not become an address
    a, b = z.gather(-1, index), z.gather(-1, (index + 1).clamp(max=z.size(-1) - 1))
    return torch.lerp(a.to(p.dtype), b.to(p.dtype), p - low)


def counting_attention(q, k, v, gate_keys, P, position, extra=None):
    """
    Attention with the bias position(here, p): here a slice of the query rows, p (B, H, rows, keys) their counts <= P - 1,
    float32 (or float64). extra(here, i, j), if given, is added to the logits and not seen by the gates.
    """
    Tq, Tk, y = q.size(2), k.size(2), []
    k, v, gate_keys = k.flip(2), v.flip(2), None if gate_keys is None else gate_keys.flip(2)  # nearest key first: a plain cumsum counts
    gate_keys = k if gate_keys is None else gate_keys
    for start in reversed(range(Tk - Tq, Tk, ROWS)):  # longest rows first: later ones reuse their memory
        end = min(start + ROWS, Tk)  # these rows see the keys end - 1, ..., 0
        here, seen = slice(start - (Tk - Tq), end - (Tk - Tq)), slice(Tk - end, Tk)
        i, j = torch.arange(start, end, device=q.device)[:, None], torch.arange(end - 1, -1, -1, device=q.device)
        n = 4 * ROWS
        while True:  # gates of the n nearest keys: until every row has counted to P - 1, or there are no more keys
            s = (q[:, :, here] @ gate_keys[:, :, seen][:, :, :n].transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
            p = ((s / math.sqrt(q.size(3))).sigmoid() * (j[:n] <= i)).cumsum(-1)   # (B, H, rows, n), the sum from j to i
            if n >= end or p[..., -1].detach().amin() >= P - 1:
                break
            n *= 2
        b = position(here, p.clamp(max=P - 1))
        if n < end:
            far = position(here, p.new_full((*p.shape[:3], 1), P - 1))
            b = torch.cat((b, far.expand(*p.shape[:3], end - n)), -1)
        if extra is not None:
            b = b + extra(here, i, j)
        b = b.masked_fill(j > i, float("-inf")).to(q.dtype)
        y.append(F.scaled_dot_product_attention(q[:, :, here], k[:, :, seen], v[:, :, seen], attn_mask=b))
    return torch.cat(y[::-1], dim=2)


class Position(nn.Module):
    """From a count to a bias: bias(q, p), q (B, H, n, d) unrotated, p (B, H, n, m) -> (B, H, n, m)."""
    def __init__(self, config):
        super().__init__()
        d = config.n_embd // config.n_head
        self.kind = config.position
        if self.kind == "embedding":
            self.pos_emb = nn.Parameter(torch.zeros(d, config.P))
        elif self.kind == "mlp":
            self.mlp = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, d))
        elif config.slopes:
            try:
                m = [float(m) for m in config.slopes.split(",")]
            except ValueError:
                m = [math.inf]
            if not all(map(math.isfinite, m)):
                raise ValueError(f"slopes={config.slopes!r} must be numbers, as 1,0.5,0.25,0.125")
            self.register_buffer("m", torch.tensor(m), persistent=False)
        else:
            self.m = nn.Parameter(torch.zeros(config.n_head))
        self.e_rel = nn.Parameter(torch.zeros(d, config.block_size)) if config.plus == "relative" else None

    def bias(self, q, p):
        if self.kind == "embedding":
            return interpolate(q @ self.pos_emb.to(q.dtype), p)
        if self.kind == "alibi":
            return -self.m[:, None, None] * p
        last, y = self.mlp[2], []  # q . (W h + b) = (q W) . h + q . b: never a vector of size d per pair
        with torch.autocast(p.device.type, enabled=False):  # bfloat16 would round the counts
            for rows, count in zip(q.to(p.dtype).split(16, dim=2), p.split(16, dim=2)):  # h (B, H, 16, m, 64) is large
                h = self.mlp[:2](count[..., None])
                y.append((h @ (rows @ last.weight)[..., None]).squeeze(-1) + rows @ last.bias[:, None])
        return torch.cat(y, dim=2)

    def relative(self, q, i, j):
        z = q @ self.e_rel.to(q.dtype)                                      # (B, H, n, block_size); 0 further away
        far = (i - j).clamp(0, z.size(-1) - 1)
        return z.gather(-1, far.expand(*z.shape[:2], -1, -1)) * (i - j < z.size(-1))


def rotate(x, pos):
    """RoPE (Su et al., 2021): x (B, H, T, d) turned by angles that grow with pos (T,)."""
    half = x.size(-1) // 2
    freq = 10000.0 ** (-torch.arange(half, device=x.device) / half)         # (d/2,)
    angle = pos[:, None] * freq                                             # (T, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


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
        self.w_g = nn.Linear(config.n_embd, config.n_embd, bias=False) if config.gates == "sep" else None
        self.gates, self.P, self.plus = config.gates, config.P, config.plus
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.qk_norm, self.layer = config.n_head, config.qk_norm, layer
        self.fused = fused if config.position == "embedding" and config.plus == "none" else None

    def forward(self, x, cache, position, pos):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head).transpose(1, 2).chunk(3, dim=1)  # (B, H, T, d)
        if self.qk_norm:
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))  # autocast would leave them in float32
        plain = q
        if self.plus == "rope":
            q, k = rotate(q, pos), rotate(k, pos)
        gate_keys = self.w_g(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2) if self.gates == "sep" else None
        if cache is not None:
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
            if gate_keys is not None:
                gate_keys = cache.append(f"g{self.layer}", gate_keys)
        gate_keys = v if self.gates == "val" else gate_keys
        if self.fused and usable(q):
            y = self.fused(q, k, v, position.pos_emb, gate_keys)
        else:
            y = counting_attention(q, k, v, gate_keys, self.P, lambda here, p: position.bias(plain[:, :, here], p),
                                   (lambda here, i, j: position.relative(q[:, :, here], i, j)) if self.plus == "relative" else None)
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
        self.ln_1 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.mlp = MLP(config)
        self.post = config.norm == "post"

    def forward(self, x, *args):
        if self.post:
            x = self.ln_1(x + self.attn(x, *args))
            return self.ln_2(x + self.mlp(x))
        x = x + self.attn(self.ln_1(x), *args)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
        if config.norm not in ("pre", "post"):
            raise ValueError(f"norm={config.norm!r} is not one of pre, post")
        for name, known in (("gates", ("key", "val", "sep")), ("position", ("embedding", "mlp", "alibi")),
                            ("plus", ("none", "relative", "rope"))):
            if getattr(config, name) not in known:
                raise ValueError(f"{name}={getattr(config, name)!r} is not one of {', '.join(known)}")
        if config.plus == "rope" and config.gates != "key":
            raise ValueError("plus=rope turns q and k: its gates can only be key gates")
        if config.plus == "rope" and config.n_embd // config.n_head % 2:
            raise ValueError(f"rope turns pairs of channels: head size {config.n_embd // config.n_head} is odd")
        if config.slopes and (config.position != "alibi" or len(config.slopes.split(",")) != config.n_head):
            raise ValueError(f"slopes={config.slopes!r} must be n_head={config.n_head} numbers, with position=alibi")
        if config.P < 1:
            raise ValueError(f"P={config.P} must be at least 1: the table needs a position")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-6) if config.norm == "pre" else nn.Identity()
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
        own = not config.share or (config.position == "alibi" and not config.slopes)  # learned slopes are per layer
        self.pos = nn.ModuleList(Position(config) for _ in range(config.n_layer if own else 1))
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
        x = self.drop(self.wte(idx))
        for layer, block in enumerate(self.h):
            x = block(x, cache, self.pos[layer % len(self.pos)], pos)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        if cache is not None:
            cache.t += T
        return logits, loss
