"""
FIRE whose MLP starts as PyTorch has it, as its authors' does. In model_classics.py all weights
start alike, and its biases are much closer together. Read that file first.
"""
from torch import nn

import model_classics
from model_classics import Cache, GPTConfig  # noqa: F401  (asked for here)

VARIANTS = dict(fire_torch_init=dict(pe="fire"))
EQUATION, STEP = model_classics.EQUATION, model_classics.STEP


class GPT(model_classics.GPT):
    def __init__(self, config):
        super().__init__(config)
        for module in self.pe.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
