"""
CoPE, Contextual Position Encoding: count the tokens that matter to this query instead of all of
them, and look the count up in a table of positions (Golovneva et al., 2024; Eq. 3-9, Listing 1).

    s_ij = q_i . k_j / sqrt(d)
    g_ij = sigmoid(s_ij)                     does key j count as a step for query i    (Eq. 3)
    p_ij = min(g_ij + ... + g_ii, P - 1)     steps from key j to query i    (Eq. 4, Listing 1)
    z_i[n] = q_i . e[n],  n = 0 ... P - 1    what query i thinks of n steps            (Eq. 7)
    logit_ij = s_ij + (1 - w) z_i[floor p] + w z_i[ceil p],  w = p - floor p           (Eq. 8, 9)

With all gates at 1, p = i - j + 1: relative position embeddings, one entry further on. One table e
serves all heads. z is not divided by sqrt(d), as in Listing 1; the authors' release divides it by
default.
What differs from the paper, and why:
- Eq. 5 and 8 print the two weights the wrong way round (a jump at every whole number); Listing 1
  has them as here
- Eq. 3 and 9 print s without its 1/sqrt(d); Listing 1 has it. The text below Eq. 3 has j < i;
  Eq. 4 and Listing 1 count the query's own step, too, as here
- the table serves all layers, too, as in Table 8's first row; section 4 has one a layer, as with
  share=False, and so has the release, with block_size + 1 entries by default
- backbone: ours, where the paper has GPT-2's (text), Llama's (code) and its release's (counting)
- what only one table of its results needs (MLP, ALiBi, relative, RoPE) is in
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
    P: int = 64             # positions in the table: counts stop at P - 1
    gates: str = "key"      # what is counted: key (q . k), val (q . v), sep (q . k' of its own W_g)
    share: bool = True      # one table for all layers


VARIANTS = dict(cope=dict(), cope_val=dict(gates="val"), cope_sep=dict(gates="sep"))
AT_TEST = ("P",)            # at test time eval.py RUN --set P=32 cuts the table

# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs. EQUATION and STEP are for figures

EQUATION = "logit_ij = q_i . k_j / sqrt(d) + q_i . e[p_ij],  p_ij = sum of steps from j to i"
STEP = "sigmoid(q_i . k_k / sqrt(d)): query and key decide, softly"


def literal(q, k, v, pos_emb, gate_keys=None):
    """As the paper writes it: arguments as below -> output, {its part: (B, H, Tq, Tk)}."""
    Tq, Tk, d, P = q.size(2), k.size(2), q.size(3), pos_emb.size(1)
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    qk = q @ k.transpose(-1, -2) / math.sqrt(d)
    gates = qk if gate_keys is None else q @ gate_keys.transpose(-1, -2) / math.sqrt(d)
    step = gates.sigmoid() * seen                                           # g
    distance = step.flip(-1).cumsum(-1).flip(-1).clamp(max=P - 1)           # p, summed from j to i
    z = q @ pos_emb.to(q.dtype)                                             # (B, H, Tq, P)
    low, high = distance.floor(), distance.ceil()
    w = distance - low
    bias = (1 - w) * z.gather(-1, low.long()) + w * z.gather(-1, high.long())
    attention = (qk + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention, step=step, distance=distance)


def interpolate(z, p):
    """z (..., n, P) at fractional positions min(p, P - 1), p (..., n, m) >= 0 -> (..., n, m)."""
    z = z.to(p.dtype)
    slope = F.pad(z.diff(dim=-1), (0, 1))  # from one position to the next; none beyond the last
    low = p.detach().long().clamp(0, z.size(-1) - 1)  # in the table, even if p is NaN
    return torch.addcmul(z.gather(-1, low), slope.gather(-1, low), p - low.to(p.dtype))


def cope_attention(q, k, v, pos_emb, gate_keys=None):
    """
    The same, faster: softmax(q k^T / sqrt(d) + z[p]) v, causal (Eq. 9).
    q (B, H, Tq, d); k, v (B, H, Tk, d); the queries are the last Tq positions of the keys.
    pos_emb (d, P); gate_keys (B, H, Tk, d) are what the gates see, None for k.
    Returns (B, H, Tq, d).
    """
    Tq, Tk, d = q.size(2), k.size(2), q.size(3)
    float_type = torch.promote_types(q.dtype, torch.float32)  # bfloat16 is too coarse to count in
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)  # j <= i
    seen, k, v = seen.flip(1), k.flip(2), v.flip(2)  # last key first: cumsum counts from i to j
    qk = (q / math.sqrt(d) @ k.transpose(-1, -2)).to(float_type)            # (B, H, Tq, Tk)
    gates = qk
    if gate_keys is not None:
        gates = (q / math.sqrt(d) @ gate_keys.flip(2).transpose(-1, -2)).to(float_type)
    p = (gates.sigmoid() * seen).cumsum(-1)  # later keys, which come first, count 0
    bias = interpolate(q @ pos_emb.to(q.dtype), p)
    a = torch.where(seen, qk + bias, -1e30).softmax(-1)
    return a.to(v.dtype) @ v


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
        if config.gates == "sep":
            self.w_g = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.gates = config.gates
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.qk_norm, self.layer = config.n_head, config.qk_norm, layer

    def forward(self, x, cache, pos_emb):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        if self.qk_norm:  # .to: autocast would leave them in float32
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
        gate_keys = None
        if self.gates == "sep":
            gate_keys = self.w_g(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if cache is not None:  # counts start at the query: nothing else to remember
            k, v = cache.append(f"k{self.layer}", k), cache.append(f"v{self.layer}", v)
            if gate_keys is not None:
                gate_keys = cache.append(f"g{self.layer}", gate_keys)
        if self.gates == "val":
            gate_keys = v  # those of past tokens, too
        y = cope_attention(q, k, v, pos_emb, gate_keys)
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
        if config.gates not in ("key", "val", "sep"):
            raise ValueError(f"gates={config.gates!r} is not one of key, val, sep")
        if config.P < 1:
            raise ValueError(f"P={config.P} must be at least 1: the table needs a position")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
        tables = 1 if config.share else config.n_layer
        d = config.n_embd // config.n_head
        self.pos_emb = nn.ParameterList(torch.zeros(d, config.P) for _ in range(tables))
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
        for layer, block in enumerate(self.h):
            x = block(x, cache, self.pos_emb[layer % len(self.pos_emb)])  # one for all, or its own
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        if cache is not None:
            cache.t += T
        return logits, loss
