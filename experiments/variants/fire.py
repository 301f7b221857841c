"""
FIRE whose MLP starts as PyTorch has it, as its authors' does. In rivals/classics.py all weights
start alike, and its biases are much closer together. Read that file first.
"""
from torch import nn

from rivals import classics
from rivals.classics import Cache, GPTConfig  # noqa: F401  (asked for here)

VARIANTS = dict(fire_torch_init=dict(pe="fire"))
EQUATION, STEP = classics.EQUATION, classics.STEP


class GPT(classics.GPT):
    def __init__(self, config):
        super().__init__(config)
        for module in self.pe.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
