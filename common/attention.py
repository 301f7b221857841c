"""What a model's attention is, and what it is called with."""
import functools
import inspect
import sys
from contextlib import contextmanager
from unittest import mock

from common.files import fail


def attention_module(model):
    """The module that computes a model's attention: its own, or that of the model it builds on."""
    for part in model.modules():
        if type(part).__name__ == "CausalSelfAttention":
            return sys.modules[type(part).forward.__module__]
    return sys.modules[type(model).__module__]


def plain_function(module):
    """
    What computes the attention in a model's module, as it is written there: the one function with
    the arguments of `literal`, without a literal the one whose name ends in attention. Else None.
    """
    arguments = {name: list(inspect.signature(function).parameters)
                 for name, function in inspect.getmembers(module, inspect.isfunction)}
    literal = arguments.pop("literal", None)
    if literal:
        names = [name for name in arguments if arguments[name] == literal]
    else:
        names = [name for name in arguments if name.endswith("attention")]
    return inspect.unwrap(getattr(module, names[0])) if len(names) == 1 else None


@contextmanager
def attention_inputs(model):
    """
    Yields a list, to which every call of the attention within adds its arguments, defaults
    included: one tuple (q, k, v, ...) for every layer of every forward.
    """
    module = attention_module(model)
    plain, calls = plain_function(module), []
    if not plain:
        fail(f"{module.__name__}.py: not one function has the arguments of literal")
    runs, signature = getattr(module, plain.__name__), inspect.signature(plain)

    @functools.wraps(runs)
    def noted(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(tuple(bound.arguments.values()))
        return runs(*args, **kwargs)
    with mock.patch.object(module, plain.__name__, noted):
        yield calls
