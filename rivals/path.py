"""
PaTH: what lies between a key and a query turns and mirrors the key, token by token, where RoPE
turns it by a fixed angle (Yang et al., 2025, arXiv 2505.16381).

    H_t = I - beta_t w_t w_t^T
    logit_ij = k_j^T H_{j+1} ... H_i q_i / sqrt(d)    for the keys j <= i

    beta_t = 2 sigmoid(u x_t + b): H_t takes the part of a key along w_t away at 1, mirrors it at 2
    w_t    a unit vector per head: W_2 W_1 x_t, then a causal convolution over three tokens

So a key is rewritten by every later token: k_j <- k_j - beta_t (k_j . w_t) w_t.
What differs from the paper, and why:
- backbone: ours; the release has SiLU after the convolution
- the paper's PaTH-FoX, which adds FoX's F_i - F_j to the logit, is not here
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

CHUNK = 64  # tokens whose H are made into one: at once, the work would grow with T^3


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
    rank: int = 32          # of the projection that makes w
    conv: int = 3           # tokens that w's convolution spans; 1: the token's own


VARIANTS = dict(path=dict())

# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs. EQUATION and STEP are for figures

EQUATION = "logit_ij = k_j^T H_{j+1} ... H_i q_i / sqrt(d),  H_t = I - beta_t w_t w_t^T"
STEP = "none: every token between turns and mirrors the key"


def literal(q, k, v, w, beta):
    """As the paper writes it: arguments as below -> output, {its part: (B, H, Tq, Tk)}."""
    Tq, Tk, d = q.size(2), k.size(2), q.size(3)
    i = torch.arange(Tk - Tq, Tk, device=q.device)[:, None]
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    x, qk = q, []
    for j in reversed(range(Tk)):  # x is H_{j+1} ... H_i q_i
        qk.append(x @ k[:, :, j, :, None] / math.sqrt(d))
        n = j - (Tk - Tq)
        if n >= 0:  # H_j; keys of tokens before have been through the H of their own time
            Hx = x - beta[:, :, n, None, None] * (x @ w[:, :, n, :, None]) * w[:, :, n, None]
            x = torch.where(i >= j, Hx, x)
    qk = torch.cat(qk[::-1], -1)
    attention = qk.masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=torch.zeros_like(qk), attention=attention)


def reflections(k, w, beta):
    """
    What n tokens do to keys, without a product of n matrices. Earlier keys become k - (k u^T) w,
    u (B, H, n, d); their own k - e^T w, e (B, H, n, n). Rows 0 ... i are the first tokens' alone.
    """
    beta = beta[..., None]
    L = torch.eye(w.size(2), device=w.device, dtype=w.dtype) + (beta * w @ w.mT).tril(-1)
    right = torch.cat((beta * w, (beta * w @ k.mT).tril(-1)), -1)
    x = torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
    return x.split([w.size(3), w.size(2)], -1)


def keys_after(k, w, beta):
    """All keys as they stand after the last token."""
    past, new = k.tensor_split([k.size(2) - w.size(2)], 2)
    for K, W, b in zip(*(x.split(CHUNK, 2) for x in (new, w, beta))):
        u, e = reflections(K, W, b)
        past = torch.cat((past - past @ (u.mT @ W), K - e.mT @ W), 2)
    return past


def path_attention(q, k, v, w, beta):
    """
    The same in chunks, between which the keys are rewritten, causal.
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys, and keys
    of tokens before these are as keys_after left them. w (B, H, Tq, d), beta (B, H, Tq) are the new
    tokens'; k, w and beta are in float32 or float64.
    Returns (B, H, Tq, d).
    """
    dtype, y = v.dtype, []
    q, v = q.to(k.dtype) / math.sqrt(q.size(3)), v.to(k.dtype)
    past, new = k.tensor_split([k.size(2) - w.size(2)], 2)
    for Q, K, W, b in zip(*(x.split(CHUNK, 2) for x in (q, new, w, beta))):
        u, e = reflections(K, W, b)
        a = (Q @ W.mT).tril()
        seen = torch.ones(a.shape[-2:], dtype=torch.bool, device=q.device).tril()
        near = (Q @ K.mT - a @ e).masked_fill(~seen, float("-inf"))
        logits = torch.cat(((Q - a @ u) @ past.mT, near), -1)               # (B, H, n, end)
        past = torch.cat((past - past @ (u.mT @ W), K - e.mT @ W), 2)
        y.append(logits.softmax(-1) @ v[:, :, :past.size(2)])
    return torch.cat(y, dim=2).to(dtype)


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
        self.w_down = nn.Linear(config.n_embd, config.rank, bias=False)
        self.w_up = nn.Linear(config.rank, config.n_embd, bias=False)
        self.w_conv = nn.Conv1d(config.n_embd, config.n_embd, config.conv, bias=False,
                                groups=config.n_embd)
        self.w_b = nn.Linear(config.n_embd, config.n_head)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.qk_norm, self.layer = config.n_head, config.qk_norm, layer

    def forward(self, x, cache):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        if self.qk_norm:  # .to: autocast would leave them in float32
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
        k = k.to(torch.promote_types(k.dtype, torch.float32))  # it goes through many H
        w, beta = self.reflected(x, cache, k.dtype)
        if cache is not None:
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
        with torch.autocast(x.device.type, enabled=False):
            y = path_attention(q, k, v, w, beta)
            if cache is not None:
                k.copy_(keys_after(k, w, beta))  # in the cache itself
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))

    def reflected(self, x, cache, dtype):
        """x (B, T, C) -> w (B, H, T, d), beta (B, H, T)."""
        B, T, C = x.shape
        u = self.w_up(self.w_down(x))
        past = u.new_zeros(B, self.w_conv.kernel_size[0] - 1, C)
        if cache is not None:  # keeps what the convolution has to look back on
            past = cache.buf.get(f"u{self.layer}", past)
        u = torch.cat((past, u), 1)
        if cache is not None:
            cache.buf[f"u{self.layer}"] = u[:, T:]
        w = self.w_conv(u.transpose(1, 2)).view(B, self.n_head, C // self.n_head, T).mT
        return F.normalize(w.to(dtype), dim=-1), 2 * self.w_b(x).to(dtype).sigmoid().mT


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
        if config.rank < 1 or config.conv < 1:
            raise ValueError(f"rank={config.rank} and conv={config.conv} must be at least 1")
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
