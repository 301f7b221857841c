"""
The encoder: BERT (Devlin et al., 2019) as CABLE uses it for retrieval (section 5.2). Every token
sees all others, before it and after it, so that a bias goes by the distance in both directions:

    cable   logit_ij = q_i . k_j / sqrt(d) - g_i |S_i - S_j|,  S = cumsum(relu(x W_c + b_c))
    alibi   logit_ij = q_i . k_j / sqrt(d) - m_h |i - j|

It is trained to name masked tokens (`--data mlm`), then to put texts that belong together side by
side (`--data retrieval`). A text's vector is a mean of the last states x_t of its tokens, with
weights that the model learns: which tokens say what a text is about?

    v = sum_t w_t x_t,  w = softmax_t(x_t . w_p),  then scaled to length 1

Token 0 is padding, after the end of a text: it is no key, takes no step and has no weight, so it
changes nothing.
What differs from the paper, and why:
- it gives no equation for two directions: this is its Eq. 5 to 7 with the distance's absolute value
- nor does it say how a text becomes a vector; sentence-transformers, which it uses, has the plain
  mean by default, here --pool mean. In long documents CABLE and ALiBi find more with these weights,
  RoPE less (three seeds, of the plain mean one, and other pretrainings): see cable_table2_mean
- backbone: that of the other files, RMSNorm before each part, no biases but those of w_c and w_s,
  dropout 0; no segments, no [CLS]
- the masked-token head is the tied embedding alone, without BERT's extra layer
- embeddings are times sqrt(C), as Vaswani et al. (2017) have them, with bert_learned its table of
  positions, too: search finds more, we suppose because what a token is then stays visible in the
  mean of the states
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

ROWS = 64  # query rows at a time: without gradients, memory grows with ROWS * T, never T * T


@dataclass
class GPTConfig:
    block_size: int = 128   # training context, in tokens; documents may be far longer
    vocab_size: int = 8195  # set by the task
    n_layer: int = 4        # transformer blocks
    n_head: int = 4         # attention heads per block
    n_embd: int = 128       # width of the residual stream
    dropout: float = 0.0    # 0 is best for a single pass over the data
    pe: str = "cable"       # cable alibi rope learned sinusoidal nope
    pool: str = "weighted"  # a text's vector: weighted, or the plain mean of its last states


ENCODINGS = "cable", "alibi", "rope", "learned", "sinusoidal", "nope"
VARIANTS = {f"bert_{pe}": dict(pe=pe) for pe in ENCODINGS}
PAD = 0

# -----------------------------------------------------------------------------
# attention: first as the equation says, then as it runs

EQUATION = "logit_ij = q_i . k_j / sqrt(d) - g_i |S_i - S_j|,  S = cumsum(a)"
STEP = "a_k = relu(x_k W_c): the key decides (cable); 1 (alibi)"


def literal(q, k, v, real=None, S=None, g=None):
    """The equation as written, T x T: bert_attention's arguments -> its output, its parts."""
    qk = q @ k.transpose(-1, -2) / math.sqrt(q.size(3))
    parts, bias = {}, torch.zeros_like(qk)
    if S is not None:
        parts["step"] = S.diff(prepend=torch.zeros_like(S[..., :1]))[:, :, None].expand_as(qk)
        parts["distance"] = (S[..., :, None] - S[..., None, :]).abs().expand_as(qk)
        bias = -g[..., None] * parts["distance"]
    seen = torch.ones_like(qk, dtype=torch.bool)
    if real is not None:
        seen = real[:, None, None, :].expand_as(qk)
    attention = (qk + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, parts | dict(qk=qk, bias=bias, attention=attention)


def bert_attention(q, k, v, real=None, S=None, g=None):
    """
    The same in blocks of query rows: softmax(q k^T / sqrt(d) - g_i |S_i - S_j|) v, both ways.
    q, k, v (B, H, T, d). real (B, T) bool: which keys are not padding, None where all are. S, g
    (1 or B, H, T) float32: positions by the encoding, and what they cost; None: no bias.
    Returns (B, H, T, d).
    """
    mask = None if real is None else real[:, None, None, :]                 # (B, 1, 1, T)
    if S is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    y = torch.empty_like(v)  # filled in place: a list of parts would leave the heap in pieces
    for start in range(0, q.size(2), ROWS):
        rows = slice(start, start + ROWS)
        bias = -g[:, :, rows, None] * (S[:, :, rows, None] - S[:, :, None, :]).abs()
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))                   # (B, H, rows, T)
        y[:, :, rows] = F.scaled_dot_product_attention(
            q[:, :, rows], k, v, attn_mask=bias.to(q.dtype))
    return y


def rotate(x, pos):
    """RoPE (Su et al., 2021): x (B, H, T, d) turned by angles that grow with pos (T,)."""
    half = x.size(-1) // 2
    freq = 10000.0 ** (-torch.arange(half, device=x.device) / half)         # (d/2,)
    angle = pos[..., None] * torch.cat((-freq, freq))                       # (T, d)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return x * cos + x.roll(half, -1) * sin  # each half meets the other


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        if config.pe == "cable":
            self.w_c = nn.Linear(config.n_embd, config.n_head)
            self.w_s = nn.Linear(config.n_embd, config.n_head)
        n = 2 ** math.floor(math.log2(config.n_head))                       # a power of 2 <= n_head
        m = [2 ** (-8 * h / n) for h in range(1, n + 1)]
        m += [2 ** (-4 * h / n) for h in range(1, 2 * (config.n_head - n), 2)]  # from in between
        self.register_buffer("m", torch.tensor(m), persistent=False)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.pe = config.n_head, config.pe

    def forward(self, x, real, pos):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        S = g = None
        if self.pe == "rope":
            q, k = rotate(q, pos), rotate(k, pos)
        if self.pe == "alibi":  # every token is one step
            S = pos.expand(1, self.n_head, T).float()
            g = self.m[None, :, None].expand(1, self.n_head, T)
        if self.pe == "cable":
            a = F.relu(self.w_c(x).float())                                 # (B, T, H)
            if real is not None:
                a = a * real[:, :, None]
            S = a.transpose(1, 2).cumsum(-1)
            g = F.softplus(self.w_s(x).float()).transpose(1, 2)
        y = bert_attention(q, k, v, real, S, g)
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
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x, *args):
        x = x + self.attn(self.ln_1(x), *args)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):  # the scripts look for this name; it is a BERT
    is_encoder = True

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
        if config.pe not in ENCODINGS:
            raise ValueError(f"pe={config.pe!r} is not one of {', '.join(ENCODINGS)}")
        if config.pool not in ("weighted", "mean"):
            raise ValueError(f"pool={config.pool!r} is not one of weighted, mean")
        if config.pe == "rope" and config.n_embd // config.n_head % 2:
            raise ValueError("rope turns pairs of channels: head size "
                             f"{config.n_embd // config.n_head} is odd")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        learned = config.pe == "learned"
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if learned else None
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
        self.w_p = nn.Linear(config.n_embd, 1, bias=False)
        # these loops set all weights, those of the blocks, too: yours go after them
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # the residual stream sums 2 n_layer of these
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            if name.endswith("bias") or name == "w_p.weight":  # at first all tokens count alike
                nn.init.zeros_(p)

    def forward(self, idx, targets=None, pooled=False):
        """
        idx (B, T), PAD after the end of a text; targets (B, T), -1 where not scored ->
        logits, mean loss: without targets (B, T, vocab), None; with them (N, vocab) of the N scored
        tokens alone. pooled: (B, C) unit vectors instead, the texts' (see embed).
        """
        x, real = self.encode(idx)
        if pooled:
            score = self.w_p(x).float()
            if self.config.pool == "mean":  # all tokens count alike
                score = 0 * score
            score = score.masked_fill(~real[:, :, None], -1e9)
            weight = score.softmax(1) * real[:, :, None]                    # (B, T, 1)
            return F.normalize((x * weight).sum(1), dim=-1)
        if targets is None:
            return self.lm_head(x), None
        scored = targets != -1
        logits = self.lm_head(x[scored])                                    # (N, vocab)
        loss = F.cross_entropy(logits.float(), targets[scored], reduction="sum")
        unused = 0 * self.w_p.weight.sum()  # several GPUs wait for a gradient of every weight
        return logits, loss / scored.sum().clamp(min=1) + unused

    def encode(self, idx):
        """idx (B, T) -> the last layer's normed states (B, T, C), which tokens are no padding."""
        B, T = idx.shape
        pos = torch.arange(T, device=idx.device)
        x, C = self.wte(idx), self.config.n_embd
        if self.wpe:
            if T > self.wpe.num_embeddings:
                raise ValueError(f"learned positions end at block_size={self.wpe.num_embeddings}; "
                                 f"{T} tokens do not fit")
            x = x + self.wpe(pos)
        x = x * math.sqrt(C)
        if self.config.pe == "sinusoidal":
            freq = 10000.0 ** (-torch.arange(0, C, 2, device=x.device) / C)     # (C/2,)
            angle = pos[:, None] * freq                                         # (T, C/2)
            x = x + torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :C].to(x.dtype)
        real = idx != PAD
        keys = None  # a batch without padding needs no mask; a compiled graph does not look
        if torch.compiler.is_compiling() or not real.all():
            keys = real | ~real.any(1, keepdim=True)  # a softmax needs a key, also in an empty text
        x = self.drop(x)
        for block in self.h:
            x = block(x, keys, pos)
        return self.ln_f(x), real

    def embed(self, idx):
        """Texts idx (B, T), PAD after their ends -> (B, C) unit vectors; 0 for an empty text."""
        return self(idx, pooled=True)
