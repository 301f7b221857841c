"""
CABLE, Context-aware Biases for Length Extrapolation: every token says how big a step it is, every
query how much distance matters to it (Veisi, Amirzadeh and Mansourian, 2025; Eq. 2-7).

    a_t = relu(x_t W_c + b_c)         how big a step token t is, per head        (Eq. 2)
    S_i = a_0 + ... + a_i             the road walked so far                     (Eq. 3, 4)
    g_i = softplus(x_i W_s + b_s)     how much query i minds the distance        (Eq. 6)
    logit_ij = q_i . k_j / sqrt(d) - g_i (S_i - S_j)                             (Eq. 5, 7)

With a = 1 and g = m_h this is ALiBi; without g and with softplus steps it is FoX.
What differs from the paper, and why:
- it prints Eq. 5 and 7 without the minus; its text (distance is penalised) needs it
- W_c and W_s read the whole residual stream, as in the authors' code, where Eq. 2 and 6 have one
  head's d; and they have biases, b_c and b_s, which Eq. 2 and 6 do not print
- in Eq. 1 q . k is not divided by sqrt(d), nor in the code that the authors released first; ours
  and their later code divide. That first code has softplus steps and no g: cable_nw_softplus
- decoding caches the steps a and sums them anew, where the paper caches the sums S
- backbone: ours, where the paper has GPT-2's LayerNorm and biases
- what only one table of its results needs (K-CABLE, the logarithm of the distance) is in
  lab/variants/
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
    weight: bool = True       # g, the query's own weight; without it this is CABLE_NW
    step: str = "relu"        # relu or softplus; softplus without g is the Forgetting Transformer


VARIANTS = dict(
    cable=dict(), cable_nw=dict(weight=False),
    cable_nw_softplus=dict(weight=False, step="softplus"))

# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs. EQUATION and STEP are for figures

EQUATION = dict(
    cable="logit_ij = q_i . k_j / sqrt(d) - g_i (S_i - S_j),  S = cumsum(a)",
    cable_nw="logit_ij = q_i . k_j / sqrt(d) - (S_i - S_j),  S = cumsum(a)",
    cable_nw_softplus="logit_ij = q_i . k_j / sqrt(d) - (S_i - S_j),  S = cumsum(a)")
STEP = "a_k = relu(x_k W_c), or its softplus: the key decides"


def literal(q, k, v, S, g=None):
    """As the paper writes it: arguments as below -> output, {its part: (B, H, Tq, Tk)}."""
    Tq, Tk, d = q.size(2), k.size(2), q.size(3)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    qk = q @ k.transpose(-1, -2) / math.sqrt(d)
    step = S.diff(prepend=torch.zeros_like(S[..., :1]))[:, :, None] * seen
    distance = (S[:, :, Tk - Tq:, None] - S[:, :, None, :]) * seen
    bias = -distance                                                        # Eq. 5
    if g is not None:
        bias = g[..., None] * bias                                          # Eq. 7
    attention = (qk + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention, step=step, distance=distance)


def cable_attention(q, k, v, S, g=None):
    """
    Causal attention by torch's fused call.
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    S (B, H, Tk), the cumulative sum of the steps, and g (B, H, Tq), None for 1, are float32 or
    float64 whatever the dtype of q: bfloat16 is too coarse for S.
    Returns (B, H, Tq, d).
    """
    Tq, Tk = q.size(2), k.size(2)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    bias = S[:, :, None, :] - S[:, :, Tk - Tq:, None]                       # (B, H, Tq, Tk)
    if g is not None:
        bias = g[..., None] * bias
    bias = bias.masked_fill(~seen, float("-inf")).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


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
        self.w_c = nn.Linear(config.n_embd, config.n_head)
        self.w_s = nn.Linear(config.n_embd, config.n_head) if config.weight else None
        self.step = {"relu": F.relu, "softplus": F.softplus}[config.step]
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.qk_norm, self.layer = config.n_head, config.qk_norm, layer

    def forward(self, x, cache):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        if self.qk_norm:  # .to: autocast would leave them in float32
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
        a = self.step(self.w_c(x).float()).transpose(1, 2)                  # (B, H, T)
        g = F.softplus(self.w_s(x).float()).transpose(1, 2) if self.w_s is not None else None
        if cache is not None:
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
            a = cache.append(f"a{self.layer}", a)  # the steps, whose sums are made anew
        y = cable_attention(q, k, v, a.cumsum(-1), g)
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
        if config.step not in ("relu", "softplus"):
            raise ValueError(f"step={config.step!r} is not one of relu, softplus")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-6)
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
        x = self.drop(self.wte(idx))
        for block in self.h:
            x = block(x, cache)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        if cache is not None:
            cache.t += T
        return logits, loss
