"""
TRA, Threshold Relative Attention: first drop the keys that do not matter to this query, then count
the distance over those that are left (Opper, Fernandez, Smolensky and Gao, 2025; Eq. 3-12 of the
paper in the MOSS workshop; the journal version, TMLR 2025, is arXiv 2503.23174).

    s_ij = q_i . k_j / sqrt(d)
    M_ij = 1 if s_ij > 0 else 0            who passes the paper's ReLU             (Eq. 3, 4)
    C_ij = M_ij + ... + M_ii               kept keys from j to i, the nearest is 1 (Eq. 6)
    delta_i = sigmoid(x_i W_f + b_f)       each step multiplies a weight by it     (Eq. 8)
    logit_ij = s_ij + C_ij log delta_i     where M = 1, others are removed         (Eq. 9-12)

With every score positive C = i - j + 1, and this is ALiBi with a slope per query.
What differs from the paper, and why:
- a row with no kept key outputs 0, as in the authors' notebook. The paper's -1e11 would give such
  a row equal weights on every key, those of the future included: a leak
- norm="post" and qk_norm=True are the defaults: the paper's text has neither, the authors' notebook
  has both (what they do: `python reproduce.py tra_norm`)
- every head has its own delta; Eq. 8 has one
- backbone: a GELU MLP of width 4E, tied embeddings, no biases and N(0, .02), where the paper has
  SwiGLU of width 2E, and the notebook an untied head, biases and torch's initialisation
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
    norm: str = "post"      # pre or post: where the norms sit, see Block
    qk_norm: bool = True    # RMS-normalise q and k per head, without a learned scale


VARIANTS = dict(tra=dict())

# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs. EQUATION and STEP are for figures

EQUATION = "logit_ij = q_i . k_j / sqrt(d) + C_ij log delta_i where q_i . k_j > 0, else dropped"
STEP = "1 if q_i . k_k > 0, else 0: query and key decide, all or nothing"


def literal(q, k, v, log_decay):
    """As the paper writes it: arguments as below -> output, {its part: (B, H, Tq, Tk)}."""
    Tq, Tk, d = q.size(2), k.size(2), q.size(3)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    qk = q @ k.transpose(-1, -2) / math.sqrt(d)
    step = ((qk > 0) & seen).to(log_decay.dtype)                            # M
    distance = step.flip(-1).cumsum(-1).flip(-1)                            # C, summed from j to i
    bias = (distance * log_decay[..., None]).masked_fill(step == 0, float("-inf"))
    some = distance[..., :1] > 0                                            # kept keys, or none
    attention = (qk + bias).masked_fill(~some, 0).softmax(-1) * some        # else 0 / 0
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention, step=step, distance=distance)


def tra_attention(q, k, v, log_decay):
    """
    The same, faster: softmax over the keys with q . k > 0, causal (Eq. 12).
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    log_decay (B, H, Tq), log delta, in float32 or float64.
    Returns (B, H, Tq, d).
    """
    Tq, Tk, d = q.size(2), k.size(2), q.size(3)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    s = (q / math.sqrt(d) @ k.transpose(-1, -2)).to(log_decay.dtype)
    M = ((s > 0) & seen).to(s.dtype)
    C = M.cumsum(-1)                                                        # kept keys, 0 to j
    C = C[..., -1:] - C + M                                                 # j to i; exact to 2^24
    a = torch.addcmul(s, C, log_decay[..., None])
    # not torch.where: a CPU would branch at every key; not inf: inf times 0 is NaN
    a = torch.add(a, M - 1, alpha=1e30).softmax(-1)
    some = (C[..., :1] > 0).to(v.dtype)                                     # kept keys, or none
    return some * (a.to(v.dtype) @ v)


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
        log_decay = F.logsigmoid(self.w_f(x).float()).transpose(1, 2)       # (B, H, T)
        if cache is not None:  # counts start at the query: nothing else to remember
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
        y = tra_attention(q, k, v, log_decay)
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
