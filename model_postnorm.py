"""
Post-Norm can Resharpen Attention (Zsámboki, Levi, Smith, Kagalwala, Kell, Liechty and Wang, arXiv
2510.08341): attention averages, so what one token adds to the output shrinks like 1 / T as the text
grows. A norm after the attention can undo the shrinking; the question is where the norms sit.

    x = Emb(t);  if peri_init: x = N(x)
    for F in [Attn, MLP] * n_layer:
      pre, pre_final:   x = x + F(N(x))
      output:           x = x + N(Attn(x)),  x = x + MLP(x)
      post:             x = N(x + F(x))
      peri, peri_init:  x = x + N(F(N(x)))
    logits = (N(x) if pre_final, peri or peri_init else x) U

As we read its section 5.1, the paper's "pre" has no norm before the unembedding U, and each of its
other schemes has a norm somewhere after the attention. So two controls belong beside them:
pre_final, GPT-2's pre-norm, and output, a norm on the attention's output alone, with which the
theorem's symmetric hard-coded weights (not any weights) stay sharp at every length.

What differs from the paper, and why:
- pre_final and output are ours; "pre_final" is the other files' "pre". Their "post" has a norm on
  the embeddings too, as TRA's authors have it
- norms have eps = 1e-8, not 1e-6: with "output" a norm sees the attention's output alone, and the
  first layer's starts at a mean square of 1e-7 (first token) to 1e-9 (256th), so far out even this
  norm at first comes out below 1
- weights start from a normal distribution that is not cut off at 2 std, c_proj's smaller; U is the
  embedding, and both decay under train.py
- RoPE, as in the paper's Dyck models; the set complement task has no positions
- its small models, with the theorem's hard-coded weights, are in lab/variants/minimal.py
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
    norm: str = "post"      # one of SCHEMES, as above
    qk_norm: bool = False   # RMS-normalise q and k per head, without a learned scale
    pe: str = "rope"         # or nope, as the set complement task has it


SCHEMES = ("pre", "pre_final", "output", "post", "peri", "peri_init")
VARIANTS = dict(postnorm=dict(), prenorm=dict(norm="pre"), prefinalnorm=dict(norm="pre_final"),
                outputnorm=dict(norm="output"), perinorm=dict(norm="peri"),
                periinitnorm=dict(norm="peri_init"))


def norm_if(wanted, config):
    return nn.RMSNorm(config.n_embd, eps=1e-8) if wanted else nn.Identity()


def residual(x, f, scheme, before, after):
    """One update of the residual stream by f, with the norms where the scheme has them."""
    if scheme == "post":
        return after(x + f(x))
    return x + after(f(before(x)).to(x.dtype))  # .to: on a CPU autocast's norm would round again


# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs. EQUATION and STEP are for figures

EQUATION = "logit_ij = q_i . k_j / sqrt(d), with RoPE; the schemes differ in their norms"
STEP = "none: position only turns q and k (RoPE)"


def literal(q, k, v):
    """As the paper writes it: arguments as below -> output, {its part: (B, H, Tq, Tk)}."""
    Tq, Tk, d = q.size(2), k.size(2), q.size(3)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    qk = q @ k.transpose(-1, -2) / math.sqrt(d)
    bias = torch.zeros_like(qk)
    attention = (qk + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention)


def attention(q, k, v):
    """
    Causal attention by torch's fused call.
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    Returns (B, H, Tq, d).
    """
    Tq, Tk = q.size(2), k.size(2)
    if Tq == Tk:  # a whole text, as in training
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def rotate(x, pos):
    """RoPE (Su et al., 2021): x (B, H, T, d) turned by angles that grow with pos (T,)."""
    half = x.size(-1) // 2
    freq = 10000.0 ** (-torch.arange(half, device=x.device) / half)         # (d/2,)
    angle = pos[..., None] * torch.cat((-freq, freq))                       # (T, d)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return x * cos + x.roll(half, -1) * sin  # each half meets the other


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
        self.rope = config.pe == "rope"

    def forward(self, x, cache, pos):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        if self.qk_norm:  # .to: autocast would leave them in float32
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
        if self.rope:
            q, k = rotate(q, pos), rotate(k, pos)  # before the cache: keys are kept turned
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
        before = config.norm not in ("output", "post")
        after = config.norm in ("post", "peri", "peri_init")
        self.before = nn.ModuleList(norm_if(before, config) for _ in range(2))
        self.after = nn.ModuleList([norm_if(after or config.norm == "output", config),
                                    norm_if(after, config)])

    def forward(self, x, *args):
        x = residual(x, lambda h: self.attn(h, *args), self.scheme, self.before[0], self.after[0])
        return residual(x, self.mlp, self.scheme, self.before[1], self.after[1])


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
        if config.norm not in SCHEMES:
            raise ValueError(f"norm={config.norm!r} is not one of {', '.join(SCHEMES)}")
        if config.pe not in ("rope", "nope"):
            raise ValueError(f"pe={config.pe!r} is not one of rope, nope")
        if config.pe == "rope" and config.n_embd // config.n_head % 2:
            raise ValueError(f"rope turns pairs: head size {config.n_embd // config.n_head} is odd")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.ln_0 = norm_if(config.norm == "peri_init", config)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = norm_if(config.norm in ("pre_final", "peri", "peri_init"), config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
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
