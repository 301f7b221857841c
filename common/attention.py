"""What a model's attention is, what it is called with, and whether kernels/ run it."""
import functools
import inspect
import sys
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from common.exits import fail

try:
    import kernels
    from kernels import install, installed
except ImportError:  # the folder was left out: every attention runs as its model file has it
    kernels, installed = None, []

    def install(module):
        pass


def use_kernels(kernel, device):
    """Follows --kernel -> which attention runs, in words."""
    if kernels:
        kernels.enabled = kernel == "auto"
    if not kernels or not kernels.enabled:
        return "attention as the model file has it"
    why_not = kernels.why_no_triton(torch.empty(1, 1, 2, 64, device=device))
    if not why_not:
        return "attention by Triton kernel, where there is one, for heads of 16, 32, 48 ... 128"
    return f"attention in PyTorch ({why_not})" if device.type == "cuda" else "attention in PyTorch"


def attention_module(model):
    """The module that computes a model's attention: its own, or that of the model it builds on."""
    for part in model.modules():
        if type(part).__name__ == "CausalSelfAttention":
            return sys.modules[type(part).forward.__module__]
    return sys.modules[type(model).__module__]


def plain_function(module):
    """
    What computes the attention in a model's module, as it is written there: the one function with
    the arguments of `literal`, without a literal the one whose name ends in attention.
    """
    arguments = {name: list(inspect.signature(function).parameters)
                 for name, function in inspect.getmembers(module, inspect.isfunction)}
    literal = arguments.pop("literal", None)
    if literal:
        names = [name for name in arguments if arguments[name] == literal]
    else:
        names = [name for name in arguments if name.endswith("attention")]
    if len(names) != 1:
        fail(f"{module.__name__}.py: not one function has the arguments of literal")
    runs = getattr(module, names[0])
    return runs.__wrapped__ if runs in installed else runs


def has_ways(model):
    """Whether kernels/ have faster ways of the plain function of this very model."""
    module = attention_module(model)
    return getattr(module, plain_function(module).__name__) in installed


@contextmanager
def attention_inputs(model):
    """
    Yields a list, to which every call of the attention within adds its arguments, defaults
    included: one tuple (q, k, v, ...) for every layer of every forward.
    """
    module = attention_module(model)
    plain, calls = plain_function(module), []
    runs, signature = getattr(module, plain.__name__), inspect.signature(plain)

    @functools.wraps(runs)
    def noted(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(tuple(bound.arguments.values()))
        return runs(*args, **kwargs)
    ways = nullcontext()
    if kernels and not has_ways(model):  # ALiBi's are of another function, which would pass this by
        ways = mock.patch.object(kernels, "enabled", False)
    with ways, mock.patch.object(module, plain.__name__, noted):
        yield calls
