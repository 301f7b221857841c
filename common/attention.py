"""What a model's attention is, what it is called with, and whether kernels/ run it."""
import functools
import inspect
import sys
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

import kernels
from common.exits import fail


def use_kernels(kernel, device):
    """Follows --kernel -> which attention runs, in words."""
    kernels.enabled = kernel == "auto"
    if not kernels.enabled:
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
    What computes the attention in a model's module, as it is written there: the one function that
    has the arguments of `literal`.
    """
    arguments = {function: list(inspect.signature(function).parameters)
                 for _, function in inspect.getmembers(module, inspect.isfunction)}
    wanted = arguments.pop(module.literal)
    found = [function for function in arguments if arguments[function] == wanted]
    if len(found) != 1:
        fail(f"{module.__name__}.py: not one function has the arguments of literal")
    return found[0].__wrapped__ if found[0] in kernels.installed else found[0]


def has_ways(model):
    """Whether kernels/ have faster ways of the plain function of this very model."""
    module = attention_module(model)
    return getattr(module, plain_function(module).__name__) in kernels.installed


@contextmanager
def attention_inputs(model):
    """
    Yields a list, to which every call of the attention within adds its arguments: one tuple
    (q, k, v, ...) for every layer of every forward.
    """
    module, calls = attention_module(model), []
    name = plain_function(module).__name__
    runs = getattr(module, name)

    @functools.wraps(runs)
    def noted(*args, **named):
        calls.append((*args, *named.values()))
        return runs(*args, **named)
    ways = nullcontext()
    if not has_ways(model):  # ALiBi's are of another function, which would pass this by
        ways = mock.patch.object(kernels, "enabled", False)
    with ways, mock.patch.object(module, name, noted):
        yield calls
