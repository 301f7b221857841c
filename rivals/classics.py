"""
The classics: eight ways to tell a transformer where a token is, one small class each.

    logit_ij = q_i . k_j / sqrt(d) + bias_ij        for the keys j <= i

What differs from the papers, and why:
- one backbone: only the encoding differs, and sinusoidal's token embeddings, times sqrt(C)
- t5: an entry for every distance and the 1/sqrt(d); the paper has logarithmic buckets, no sqrt(d)
- kerple's p and a are each layer's own; its authors' code shares them. fire's MLP starts at
  N(0, .02), almost flat, its authors' at torch's default; their L = 512 exceeds short windows
- relative: q_i . e[i-j] without 1/sqrt(d), as in CoPE's paper; CoPE's release divides by default
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 256   # training context, in tokens; evaluation and sampling may go far beyond
    vocab_size: int = 257   # set by the tokenizer or the task
    n_layer: int = 4        # transformer blocks
    n_head: int = 4         # attention heads per block
    n_embd: int = 128       # width of the residual stream
    dropout: float = 0.0    # 0 is best for a single pass over the data
    norm: str = "pre"       # pre or post: where the norms sit, see Block
    qk_norm: bool = False   # RMS-normalise q and k per head, without a learned scale
    pe: str = "alibi"       # learned sinusoidal alibi t5 kerple fire relative label
    capped: bool = False    # relative: reuse the last entry beyond block_size, else add nothing
    n_label: int = 0        # label: size of the label table, 0 means 16 * block_size


# -----------------------------------------------------------------------------
# eight encodings. pos (T,) are positions, i (Tq, 1) and j (Tk,) those of queries and keys

class Encoding(nn.Module):
    """What an encoding may do: two hooks, both called, of which this one does nothing."""
    bias = None        # or a method (q, i, j) -> (1 or B, H, Tq, Tk), added to the logits

    def __init__(self, config):
        super().__init__()

    def embed(self, x, pos, cache):  # x (B, T, C), the token embeddings
        return x

    def attention(self, q, k, v):
        return attention(q, k, v, self.bias)


class Learned(Encoding):
    """A vector per position (Vaswani et al., 2017). The table ends, and so does the model."""
    def __init__(self, config):
        super().__init__(config)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)

    def embed(self, x, pos, cache):
        size, end = self.wpe.num_embeddings, x.size(1) + (cache.t if cache is not None else 0)
        if end > size:
            raise ValueError(f"learned positions end at block_size={size}; {end} tokens do not fit")
        return x + self.wpe(pos)


class Sinusoidal(Encoding):
    """Fixed sines and cosines added to the embedding times sqrt(C) (Vaswani et al., 2017)."""
    def embed(self, x, pos, cache):
        C = x.size(-1)
        angle = pos[:, None] * 10000.0 ** (-torch.arange(0, C, 2, device=x.device) / C)  # (T, C/2)
        waves = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :C].to(x.dtype)
        return x * math.sqrt(C) + waves


class ALiBi(Encoding):
    """-m_h (i - j), the slopes m_h fixed (Press et al., 2021)."""
    def __init__(self, config):
        super().__init__(config)
        n = 2 ** math.floor(math.log2(config.n_head))                       # a power of 2 <= n_head
        m = [2 ** (-8 * h / n) for h in range(1, n + 1)]
        m += [2 ** (-4 * h / n) for h in range(1, 2 * (config.n_head - n), 2)]  # from in between
        self.register_buffer("slopes", torch.tensor(m), persistent=False)

    def bias(self, q, i, j):
        return -self.slopes[None, :, None, None] * (i - j)

    def attention(self, q, k, v):
        return alibi_attention(q, k, v, self.slopes)


class T5(Encoding):
    """A learned scalar per head and distance, the last one reused beyond (Raffel et al., 2020)."""
    def __init__(self, config):
        super().__init__(config)
        self.r = nn.Parameter(torch.randn(config.n_head, config.block_size) * 0.02)

    def bias(self, q, i, j):
        return self.r[None, :, (i - j).clamp(0, self.r.size(1) - 1)]


class Kerple(Encoding):
    """-p log(1 + a (i - j)), p and a learned per head (Chi et al., 2022, logarithmic kernel)."""
    def __init__(self, config):
        super().__init__(config)
        self.p = nn.Parameter(torch.rand(config.n_head) * 2)
        self.a = nn.Parameter(torch.rand(config.n_head))

    def bias(self, q, i, j):
        p, a = (x.clamp(min=1e-2)[None, :, None, None] for x in (self.p, self.a))
        return -p * torch.log(1 + a * (i - j).clamp(min=0))


class FIRE(Encoding):
    """MLP(psi(i - j) / psi(max(i, L))), psi(x) = log(|c| x + 1), L = 512 |m| (Li et al., 2023)."""
    def __init__(self, config):
        super().__init__(config)
        self.mlp = nn.Sequential(nn.Linear(1, 32), nn.ReLU(True), nn.Linear(32, config.n_head))
        self.c = nn.Parameter(torch.tensor(0.1))
        self.m = nn.Parameter(torch.tensor(1.0))

    def bias(self, q, i, j):
        def psi(x):
            return torch.log(self.c.abs() * x + 1)
        x = psi((i - j).clamp(min=0)) / (psi(torch.maximum(i, self.m.abs() * 512)) + 1e-6)
        return self.mlp(x[..., None]).permute(2, 0, 1)[None]                # (1, H, Tq, Tk)


class Relative(Encoding):
    """q_i . e[i - j], one table for all heads and layers (Shaw et al., 2018; CoPE's Eq. 1)."""
    def __init__(self, config):
        super().__init__(config)
        self.e = nn.Parameter(torch.zeros(config.n_embd // config.n_head, config.block_size))
        self.capped = config.capped

    def bias(self, q, i, j):
        P = self.e.size(1)
        z = q @ self.e.to(q.dtype)                                          # (B, H, Tq, P)
        far = (i - j).clamp(0, P - 1)
        b = z.gather(-1, far.expand(*z.shape[:2], -1, -1))                  # (B, H, Tq, Tk)
        return b if self.capped else b * (i - j < P)


class Label(Encoding):
    """Vectors of random increasing labels, one draw a batch, also at test (Ruoss et al., 2023)."""
    def __init__(self, config):
        super().__init__(config)
        if config.n_label and config.n_label < config.block_size:
            raise ValueError(f"n_label={config.n_label} is not 0 (16 * block_size), nor enough "
                             f"labels for block_size={config.block_size}")
        self.wpe = nn.Embedding(config.n_label or 16 * config.block_size, config.n_embd)

    def embed(self, x, pos, cache):
        T, R = x.size(1), self.wpe.num_embeddings
        cache = Cache(T) if cache is None else cache
        if cache.t == 0:  # a new sequence: a sorted draw without replacement, for all to come
            n = max(T, cache.size)
            if n > R:
                raise ValueError(f"label: {n} tokens do not fit in n_label={R} labels")
            cache.labels = torch.randperm(R)[:n].sort().values
        if cache.t + T > len(cache.labels):
            raise ValueError(f"label: the cache announced {len(cache.labels)} tokens, more came")
        return x + self.wpe(cache.labels[cache.t:cache.t + T].to(x.device))


ENCODINGS = dict(learned=Learned, sinusoidal=Sinusoidal, alibi=ALiBi, t5=T5, kerple=Kerple,
                 fire=FIRE, relative=Relative, label=Label)
VARIANTS = {pe: dict(pe=pe) for pe in ENCODINGS}
VARIANTS["relative_capped"] = dict(pe="relative", capped=True)

# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs. EQUATION and STEP are for figures

EQUATION = {pe: "logit_ij = q_i . k_j / sqrt(d), positions in the embedding" for pe in VARIANTS} | {
    "alibi": "logit_ij = q_i . k_j / sqrt(d) - m (i - j),  m is fixed, one a head",
    "t5": "logit_ij = q_i . k_j / sqrt(d) + r[min(i - j, block_size - 1)]",
    "kerple": "logit_ij = q_i . k_j / sqrt(d) - p log(1 + a (i - j))",
    "fire": "logit_ij = q_i . k_j / sqrt(d) + MLP(log(c (i - j) + 1) / log(c max(i, L) + 1))",
    "relative": "logit_ij = q_i . k_j / sqrt(d) + q_i . e[i - j],  0 from block_size tokens on",
    "relative_capped": "logit_ij = q_i . k_j / sqrt(d) + q_i . e[min(i - j, block_size - 1)]"}
STEP = "1: every token counts the same"


def literal(q, k, v, bias=None):
    """As the paper writes it: arguments as below -> output, {its part: (B, H, Tq, Tk)}."""
    Tq, Tk, d = q.size(2), k.size(2), q.size(3)
    qk = q @ k.transpose(-1, -2) / math.sqrt(d)
    i = torch.arange(Tk - Tq, Tk, device=q.device)[:, None]
    j = torch.arange(Tk, device=q.device)
    seen = j <= i
    step = seen.to(qk.dtype).expand_as(qk)
    distance = (i - j) * step
    bias = bias(q, i, j).expand_as(qk) if bias else torch.zeros_like(qk)
    attention = (qk + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention, step=step, distance=distance)


def attention(q, k, v, bias=None):
    """
    Causal attention by torch's fused call.
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    bias: None, or a function of queries, i (Tq, 1) and j (Tk,) -> (1 or B, H, Tq, Tk).
    Returns (B, H, Tq, d).
    """
    Tq, Tk = q.size(2), k.size(2)
    if bias is None and Tq == Tk:  # a whole text, as in training
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    i = torch.arange(Tk - Tq, Tk, device=q.device)[:, None]
    j = torch.arange(Tk, device=q.device)
    bias = bias(q, i, j) if bias else q.new_zeros(())
    bias = bias.masked_fill(j > i, float("-inf")).to(q.dtype)               # (1 or B, H, Tq, Tk)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def alibi_attention(q, k, v, slopes):
    """attention with ALiBi's bias, slopes (H,). Of its own, so that a kernel can replace it."""
    return attention(q, k, v, lambda q, i, j: -slopes[None, :, None, None] * (i - j))


class Cache:
    """What all layers must remember of past tokens: buffers (B, H, T, ...), growing by doubling."""
    def __init__(self, size=256):  # size: tokens to come; labels and RoPE's repairs need it
        self.t, self.size, self.buf = 0, size, {}  # GPT.forward counts t, when all layers are done

    def append(self, name, x):     # x (B, H, n, ...) -> everything so far, (B, H, t + n, ...)
        end, buf = self.t + x.size(2), self.buf.get(name, x[:, :, :0])
        if end > buf.size(2):
            more = x.new_empty(*x.shape[:2], end, *x.shape[3:])
            self.buf[name] = buf = torch.cat((buf, more), 2)
        buf[:, :, self.t:end] = x
        return buf[:, :, :end]


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.qk_norm, self.layer = config.n_head, config.qk_norm, layer

    def forward(self, x, cache, pe):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        if self.qk_norm:  # .to: autocast would leave them in float32
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
        if cache is not None:
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
        y = pe.attention(q, k, v)
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
        if self.post:  # N(x + f(x)): what reads a sum norms it first; so are the embeddings
            x = self.ln_1(x)
            x = x + self.attn(x, *args)
            x = self.ln_2(x)
            return x + self.mlp(x)
        x = x + self.attn(self.ln_1(x), *args)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
        if config.norm not in ("pre", "post"):
            raise ValueError(f"norm={config.norm!r} is not one of pre, post")
        if config.pe not in ENCODINGS:
            raise ValueError(f"pe={config.pe!r} is not one of {', '.join(ENCODINGS)}")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
        tables = config.n_layer if config.pe in ("kerple", "fire") else 1  # these: one a layer
        self.pe = nn.ModuleList(ENCODINGS[config.pe](config) for _ in range(tables))
        # these loops set all weights, those of the blocks, too: yours go after them
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # the residual stream sums 2 n_layer of these
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            if name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T), targets (B, T), -1 where not scored -> logits (B, T, vocab), mean loss."""
        B, T = idx.shape
        start = cache.t if cache is not None else 0
        pos = torch.arange(start, start + T, device=idx.device)
        x = self.drop(self.pe[0].embed(self.wte(idx), pos, cache))
        for layer, block in enumerate(self.h):
            x = block(x, cache, self.pe[layer % len(self.pe)])
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        if cache is not None:
            cache.t += T
        return logits, loss
