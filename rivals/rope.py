"""
RoPE (Su et al., 2021, arXiv 2104.09864), and repairs beyond its length, most without training.

    logit_ij = m_i Re sum_c q_ic conj(k_jc) e^{i theta'_c dist(i, j)} / sqrt(d)   for visible keys

Channels c and c + d/2 are one complex number, the half-split layout. The paper pairs 2c and 2c + 1,
interleaved: the same model, its q and k in another order. RoPE: theta_c = b^(-2c/d), b = base;
dist = i - j; m = 1; all j <= i are visible. p-RoPE turns the fastest pairs alone (Barbero et al.,
2024, arXiv 2410.06205). L = block_size, or original_length; s = max(T, block_size) / L. T is the
forward's length, or what Cache(size) announced: rows depend on that, and not on later tokens.
- pi          theta / s: position interpolation (Chen et al., 2023, arXiv 2306.15595)
- ntk         b s^(d/(d-2)) for b: the slowest pair is theta / s, the fastest stays (bloc97, 2023)
- yarn        pairs that turned 32 times in L stay, those that turned less than once are theta / s,
              a ramp between; m = (.1 ln s + 1)^2 (Peng et al., 2023, arXiv 2309.00071). The ramp
              is linear in c, as the transformers library has it; the paper's is in rotations
- rerope      dist = min(i - j, W), our W = L // 2 (Su, 2023, kexue.fm/archives/9708, with log_n)
- selfextend  dist = i - j below W, beyond it i // G - j // G + W - W // G, where
              G = ceil((T - W) / (L - W)) (Jin et al., 2024, arXiv 2401.01325)
- window      visible where i - j < L
- sinks       visible where j < 4 or i - j < L - 4; of the first four dist = min(i, L - 1) - j, by
              their place in the cache: StreamingLLM (Xiao et al., 2023, arXiv 2309.17453)
- log_n       m_i = max(1, ln(i + 1) / ln L) (Su, 2021, kexue.fm/archives/8823)
The cache has keys that are turned already, by the theta' of what was announced: turned by another
they would be wrong. With window and sinks it has only those that can still be seen.

Two more names are models of their own, trained as they are used:
- rope_window  visible where i - j < window, in all layers: the control of the next
- rope_nope    the same, but the last of every nope_every layers has no positions: theta' = 0, and
               all j <= i are visible. RNoPE-SWA (Yang et al., 2025, arXiv 2501.18795), in
               Command A; SmolLM3 has it without a window (--window 0)
A layer without positions caches the keys of the whole text, the others their last `window`:
with three of four layers local, a long text takes a quarter of rope's memory.
Repairs of rope_nope: log_n scales the layers without positions alone, as SWAN does
(Puvvada et al., 2025, arXiv 2504.08719), by a logarithm, too. Any other is for the layers
with RoPE; where these have a window, no distance is new to them, and it is refused.
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
    nope_every: int = 0     # the last of so many layers has no positions; 0: none has
    window: int = 0         # keys that a layer with RoPE sees in training, too; 0 all, -1 a quarter
    base: float = 10000.0   # b: theta_c = b^(-2c/d)
    rotary_share: float = 1.0  # share of the pairs that turn, the fastest
    original_length: int = 0   # L, where a training with a repair goes on from a shorter one
    repair: str = ""        # pi ntk yarn rerope selfextend window sinks log_n; "" is plain RoPE


VARIANTS = dict(rope=dict(), rope_window=dict(window=-1), rope_nope=dict(nope_every=4, window=-1))
AT_TEST = ("repair",)       # what may be set without training: eval.py RUN --set repair=yarn
REPAIRS = ("", "pi", "ntk", "yarn", "rerope", "selfextend", "window", "sinks", "log_n")
SINKS = 4

# -----------------------------------------------------------------------------
# the rotation and its repairs; i (Tq, 1) are positions of queries, j (Tk,) of keys

class Turn:
    """What a kind of layer makes of RoPE in T tokens: theta', m, dist, and what is visible."""
    def __init__(self, repair, d, L, T, window=0, nope=False, base=10000.0, share=1.0):
        self.repair, self.L, self.W, self.s = repair, L, L // 2, max(1.0, T / L)
        self.G = max(1, math.ceil((T - self.W) / (L - self.W)))
        self.keeps = dict(window=(0, L), sinks=(SINKS, L)).get(repair, (0, window))  # see Cache
        self.nope, self.far = nope, None                 # the far_waves, on a model's device
        base *= self.s ** (d / (d - 2)) if repair == "ntk" else 1
        c = torch.arange(d // 2, dtype=torch.float64)
        slow = torch.full_like(c, float(repair == "pi"))  # how much of theta' is theta / s
        if repair == "yarn":
            lo, hi = (d * math.log(L / (2 * math.pi * r)) / (2 * math.log(base)) for r in (32, 1))
            lo, hi = max(math.floor(lo), 0), min(math.ceil(hi), d - 1)
            slow = ((c - lo) / max(hi - lo, 1e-3)).clamp(0, 1)
        self.theta = base ** (-2 * c / d) * (1 - slow + slow / self.s)      # (d/2,)
        self.theta[0 if nope else round(share * len(c)):] = 0

    def m(self, i):
        if self.repair == "log_n":
            return ((i.double() + 1).log() / math.log(max(self.L, 2))).clamp(min=1)
        return (0.1 * math.log(self.s) + 1) ** 2 if self.repair == "yarn" else 1.0

    def visible(self, i, j):
        first, last = self.keeps
        if last:
            return (j <= i) & ((j < first) | (i - j < last - first))
        return j <= i

    def places(self, i, j):
        """Where dist is not i - j but a difference of two other places, and these; or None."""
        if self.repair == "rerope":
            return i - j >= self.W, torch.full_like(i, self.W), torch.zeros_like(j)
        if self.repair == "selfextend":
            return i - j >= self.W, i // self.G + self.W - self.W // self.G, j // self.G
        if self.repair == "sinks":
            return (j < SINKS) & (i >= self.L), torch.full_like(i, self.L - 1), j

    def waves(self, pos, m=1.0):
        """m cos and m sin of theta' pos (T,) -> (2, T, d). float64: a million has to fit."""
        angle = pos.cpu().double()[:, None] * torch.cat((-self.theta, self.theta))
        return torch.stack((angle.cos(), angle.sin())) * m

    def far_waves(self, i, j):
        """The waves that turn q and k, turned by i and j, on to the places of far keys."""
        _, at_i, at_j = self.places(i, j)
        return self.waves((at_i - i)[:, 0]), self.waves(at_j - j)


def turned(x, waves):
    """x (B, H, T, d), each pair of channels turned: roll brings a channel its partner."""
    cos, sin = (wave.to(x) for wave in waves)
    return x * cos + x.roll(x.size(-1) // 2, -1) * sin


# -----------------------------------------------------------------------------
# attention: first as the paper writes it, then as it runs. EQUATION and STEP are for figures

EQUATION = dict(
    rope="logit_ij = m_i Re sum_c q_ic conj(k_jc) e^{i theta'_c dist(i, j)} / sqrt(d)",
    rope_window="logit_ij = Re sum_c q_ic conj(k_jc) e^{i theta_c (i-j)} / sqrt(d), i - j < window",
    rope_nope="logit_ij as in rope_window; in a layer without positions m_i q_i . k_j / sqrt(d)")
STEP = "1: every token counts the same; 0 in a layer without positions"


def literal(q, k, v, at, turn):
    """As the paper writes it: arguments as below -> output, {its part: (B, H, Tq, Tk)}."""
    Tq, d = q.size(2), q.size(3)
    i, j = at[-Tq:, None], at
    dist = i - j
    if turn.places(i, j):
        far, at_i, at_j = turn.places(i, j)
        dist = torch.where(far, at_i - at_j, dist)
    q_, k_ = (torch.complex(*z.double().chunk(2, -1)) for z in (q, k))
    more = (dist - (i - j))[..., None] * turn.theta.to(q.device)  # q and k are turned by i and j
    both = q_[:, :, :, None] * k_.conj()[:, :, None] * torch.polar(torch.ones_like(more), more)
    qk = (both.real.sum(-1) / math.sqrt(d)).to(q.dtype)
    bias = torch.zeros_like(qk)
    attention = (qk + bias).masked_fill(~turn.visible(i, j), float("-inf")).softmax(-1)
    step = ((j <= i) & (not turn.nope)).to(qk.dtype).expand_as(qk)
    return attention.to(v.dtype) @ v, dict(
        qk=qk, bias=bias, attention=attention, step=step, distance=dist * step)


def rope_attention(q, k, v, at, turn):
    """
    By torch's fused call, where each dist is i - j. q (B, H, Tq, d) and k (B, H, Tk, d) are turned
    by theta' times their positions at (Tk,), and q times m; v (B, H, Tk, d); the queries are the
    last Tq of the keys; turn says what this kind of layer and the repair do.
    Returns (B, H, Tq, d).
    """
    Tq, Tk = q.size(2), k.size(2)
    plain = not turn.keeps[1] and turn.repair not in ("rerope", "selfextend")
    if plain and Tq in (1, Tk):  # under torch.compile Tq == Tk may be a symbol
        return F.scaled_dot_product_attention(q, k, v, is_causal=True if Tq == Tk else False)
    i, j = at[-Tq:, None], at
    seen, places = turn.visible(i, j), turn.places(i, j)
    if places is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    q_waves, k_waves = turn.far or turn.far_waves(i, j)
    q_far, k_far = turned(q, q_waves), turned(k, k_waves)
    logits = torch.where(places[0], q_far @ k_far.transpose(-1, -2), q @ k.transpose(-1, -2))
    logits = (logits / math.sqrt(q.size(3))).masked_fill(~seen, float("-inf"))
    return logits.softmax(-1).to(v.dtype) @ v


class Cache:
    """What all layers must remember of past tokens: buffers (B, H, T, ...), growing by doubling."""
    def __init__(self, size=256):  # size: tokens to come; labels and RoPE's repairs need it
        self.t, self.size, self.buf = 0, size, {}  # GPT.forward counts t, when all layers are done

    def append(self, name, x, first=0, last=0):
        """x (B, H, n, ...) -> what is kept so far, and x; of `last` only the first and last stay"""
        if last:
            x = torch.cat((self.buf.get(name, x[:, :, :0]), x), 2)
            gone = max(0, x.size(2) - first - last)
            self.buf[name] = torch.cat((x[:, :, :first], x[:, :, first + gone:]), 2)
            return x
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
        self.nope = config.nope_every > 0 and (layer + 1) % config.nope_every == 0

    def forward(self, x, cache, kinds):
        at, turn, q_waves, k_waves = kinds[self.nope]
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3 * self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)                       # (B, H, T, d)
        if self.qk_norm:  # .to: autocast would leave them in float32
            q, k = (F.rms_norm(z, z.shape[-1:]).to(v.dtype) for z in (q, k))
        q, k = turned(q, q_waves), turned(k, k_waves)
        if cache is not None:
            k = cache.append(f"k{self.layer}", k, *turn.keeps)
            v = cache.append(f"v{self.layer}", v, *turn.keeps)
        y = rope_attention(q, k, v, at, turn)
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
        if config.n_embd // config.n_head % 2:
            raise ValueError(f"rope turns pairs: head size {config.n_embd // config.n_head} is odd")
        if config.repair not in REPAIRS:
            raise ValueError(f"repair={config.repair!r} is not one of {', '.join(REPAIRS[1:])}")
        share, b, L = config.rotary_share, config.base, config.original_length
        if not 0 < share <= 1 <= round(share * (config.n_embd // config.n_head // 2)):
            raise ValueError(f"rotary_share={share} is not within 0 to 1, or turns no pair")
        if not (1 < b < math.inf and 0 <= L <= config.block_size):
            raise ValueError(f"base={b} has to be above 1, original_length={L} up to block_size")
        if config.repair == "ntk" and config.n_embd == 2 * config.n_head:
            raise ValueError("ntk needs heads of more than two channels")
        if not 0 <= config.nope_every <= config.n_layer:
            raise ValueError(f"nope_every={config.nope_every} is above n_layer={config.n_layer}")
        if not -1 <= config.window <= config.block_size:
            raise ValueError(f"window={config.window} is not within block_size={config.block_size}")
        self.window = config.block_size // 4 if config.window == -1 else config.window
        if self.window and config.repair and (config.repair != "log_n" or not config.nope_every):
            raise ValueError(f"repair={config.repair}: layers with a window see no new distance; "
                             "log_n is for layers without positions")
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

    def kind(self, nope, at, size, cache):
        """What all layers of a kind, with RoPE or without positions (nope), have in common."""
        config, window = self.config, 0 if nope else self.window
        repair, d = config.repair, config.n_embd // config.n_head
        if config.nope_every and nope != (repair == "log_n"):
            repair = ""  # it is for the other kind
        L, longest = config.original_length or config.block_size, max(size, config.block_size)
        turn = Turn(repair, d, L, longest, window, nope, config.base, config.rotary_share)
        here, T = self.wte.weight, len(at)  # to a GPU it is copied once, not in every layer
        waves = turn.waves(at, turn.m(at[:, None])).to(here), turn.waves(at).to(here)
        if cache is not None:
            at = cache.append(f"at{nope}", at[None, None], *turn.keeps)[0, 0]
        if repair in ("rerope", "selfextend", "sinks"):
            turn.far = [wave.to(here) for wave in turn.far_waves(at[-T:, None], at)]
        return at.to(here.device), turn, *waves

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T), targets (B, T), -1 where not scored -> logits (B, T, vocab), mean loss."""
        B, T = idx.shape
        start, size = (0, T) if cache is None else (cache.t, cache.size)
        config = self.config
        if start + T > size and config.repair in ("pi", "ntk", "yarn", "selfextend"):
            raise ValueError(f"{config.repair}: the cache announced {size} tokens, more came")
        at = torch.arange(start, start + T)
        kinds = {False: self.kind(False, at, size, cache)}
        if config.nope_every:
            kinds[True] = self.kind(True, at, size, cache)
        x = self.drop(self.wte(idx))
        for block in self.h:
            x = block(x, cache, kinds)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        if cache is not None:
            cache.t += T
        return logits, loss
