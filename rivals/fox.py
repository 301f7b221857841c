"""
FoX, the Forgetting Transformer (Lin et al., 2025): a token says how much of the past passes it.

    f_t = sigmoid(x_t W_f + b_f)                   the forget gate of token t, per head
    F_i = log f_0 + ... + log f_i
    logit_ij = q_i . k_j / sqrt(d) + F_i - F_j     the sum of log f from j + 1 to i

So the tokens in between multiply the weight of key j by f_(j+1) ... f_i. It is CABLE's formula with
other steps, -log f_t. Of the paper's model this is the attention alone; TRA calls it "FoT".
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
    gate_bias: float = 0.0  # where b_f starts: 0 is f = 1/2 as in the release, 4 is f = 0.98


VARIANTS = dict(fox=dict())

# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs. EQUATION and STEP are for figures

EQUATION = "logit_ij = q_i . k_j / sqrt(d) + F_i - F_j,  F = cumsum(log f)"
STEP = "-log f_k, f_k = sigmoid(x_k W_f + b_f): the key decides"


def literal(q, k, v, F_):
    """As the paper writes it: arguments as below -> output, {its part: (B, H, Tq, Tk)}."""
    Tq, Tk, d = q.size(2), k.size(2), q.size(3)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    qk = q @ k.transpose(-1, -2) / math.sqrt(d)
    step = -F_.diff(prepend=torch.zeros_like(F_[..., :1]))[:, :, None] * seen
    distance = (F_[:, :, None, :] - F_[:, :, Tk - Tq:, None]) * seen
    bias = -distance
    attention = (qk + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention, step=step, distance=distance)


def fox_attention(q, k, v, F_):
    """
    Causal attention by torch's fused call.
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    F_ (B, H, Tk), the cumulative sum of log f, in float32 or float64.
    Returns (B, H, Tq, d).
    """
    Tq, Tk = q.size(2), k.size(2)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    bias = F_[:, :, Tk - Tq:, None] - F_[:, :, None, :]                     # (B, H, Tq, Tk)
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
        self.w_f = nn.Linear(config.n_embd, config.n_head)  # reads the whole width
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.qk_norm, self.layer = config.n_head, config.qk_norm, layer

    def forward(self, x, cache):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        if self.qk_norm:  # .to: autocast would leave them in float32
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
        log_f = F.logsigmoid(self.w_f(x).float()).transpose(1, 2)           # (B, H, T)
        if cache is not None:
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
            log_f = cache.append(f"f{self.layer}", log_f)
        y = fox_attention(q, k, v, log_f.cumsum(-1))
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
        if not math.isfinite(config.gate_bias):
            raise ValueError(f"gate_bias={config.gate_bias} is not finite")
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
                nn.init.constant_(p, config.gate_bias)  # w_f's, there is no other

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
