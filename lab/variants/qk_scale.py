"""
QK-norm with a learned scale: the control of recall's QK-norm, which has none. Per head and channel,

    q = RMSNorm(q) * scale,  k = RMSNorm(k)

A scale on k, too, would add nothing: logits have only the product of the two. The norm stands
behind the projection c_attn, so every attention of the list below runs as its file has it.
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import model_baseline
import model_cable
import model_tra
from common.names import pick
from model_baseline import Cache  # noqa: F401  (decoding asks the module for it)
from rivals import classics

FILES = dict(nope=model_baseline, alibi=classics, cable=model_cable, tra=model_tra)
VARIANTS = {f"{base}_qk_scale": dict(base=base) for base in FILES}


@dataclass
class GPTConfig(model_baseline.GPTConfig):
    base: str = "nope"  # the model whose queries and keys are normalised: nope alibi cable tra


class NormalisedHeads(nn.Module):
    """c_attn, whose queries and keys have a norm. x (B, T, C) -> (B, T, 3 C)."""

    def __init__(self, c_attn, n_head):
        super().__init__()
        self.c_attn, self.n_head = c_attn, n_head
        self.scale = nn.Parameter(torch.ones(c_attn.in_features))  # one dimension: no weight decay

    def forward(self, x):
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q, k = (z.unflatten(-1, (self.n_head, -1)) for z in (q, k))         # (B, T, H, d)
        q, k = (F.rms_norm(z, z.shape[-1:]).flatten(-2) for z in (q, k))
        return torch.cat(((q * self.scale).to(v.dtype), k.to(v.dtype), v), dim=-1)


class GPT(nn.Module):
    """The base's own GPT, without its QK-norm and with this one."""

    def __init__(self, config):
        super().__init__()
        module = FILES[config.base]
        settings = vars(config) | module.VARIANTS[config.base] | dict(qk_norm=False)
        self.config = config
        self.gpt = module.GPT(module.GPTConfig(**pick(module.GPTConfig, settings)))
        for block in self.h:
            block.attn.c_attn = NormalisedHeads(block.attn.c_attn, config.n_head)

    @property
    def h(self):
        """The blocks, for pictures."""
        return self.gpt.h

    def forward(self, idx, targets=None, cache=None):
        return self.gpt(idx, targets, cache)
