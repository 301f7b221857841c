"""Every model: what a layer was called with, initialisation, autocast, bfloat16, settings."""
import inspect
import math

import pytest
import torch
from torch.nn import functional as F

import kernels
import model_cable
import model_cope
import model_tra
from common import names
from common.attention import attention_inputs, attention_module, plain_function
from rivals import classics, fox
from tests.helpers import MODELS, NAMES, close, make


@pytest.mark.parametrize("name", MODELS)
def test_attention_inputs_are_what_the_literal_form_explains(name):
    """What attention was called with, put into the literal form, is what the layer goes on with."""
    model, went_on = make(name), []
    module = attention_module(model)
    plain = plain_function(module)
    before = getattr(module, plain.__name__)
    assert not hasattr(plain, "__wrapped__")  # else tests of plain functions would be of these
    for block in model.h:
        block.attn.c_proj.register_forward_pre_hook(lambda _, args: went_on.append(args[0]))
    with torch.no_grad(), attention_inputs(model) as calls:
        model(torch.randint(0, 61, (2, 20)))
    assert getattr(module, plain.__name__) is before
    assert len(calls) == len(went_on) == 2
    for args, y in zip(calls, went_on):
        assert len(args) == len(inspect.signature(plain).parameters)
        got, parts = module.literal(*args)
        if name != "diff":  # which normalises every head afterwards
            close(got.transpose(1, 2).flatten(2), y, 1e-4)
        assert parts["attention"].shape == (2, 4, 20, 20)


def test_attention_inputs_of_alibi_are_those_that_its_faster_way_would_have(monkeypatch):
    monkeypatch.setattr(kernels.cpu, "LONG", 9)  # from here on it does without the plain function
    model = make("alibi")
    with attention_inputs(model) as calls:
        model(torch.randint(0, 61, (1, 20)))
    assert len(calls) == 2


def test_cable_and_fox_sum_their_steps_in_float32_under_autocast():
    for name, sums in (("cable", slice(3, 5)), ("fox", slice(3, 4)), ("tra", slice(3, 4))):
        model = make(name)
        with attention_inputs(model) as calls, torch.autocast("cpu", torch.bfloat16):
            model(torch.randint(0, 61, (2, 600)))
        assert calls[0][0].dtype == torch.bfloat16
        for x in calls[0][sums]:  # not a float32 of what was summed in bfloat16
            assert x.dtype == torch.float32 and (x != x.bfloat16()).any(), name


def fresh(module, **fields):
    torch.manual_seed(0)
    return module.GPT(module.GPTConfig(**fields))


def test_how_parameters_start():
    attn = fresh(model_cable).h[0].attn
    for linear in (attn.w_c, attn.w_s):  # g starts near log 2, half of the steps at 0
        assert torch.equal(linear.bias, torch.zeros(4)) and 0.015 < linear.weight.std() < 0.025
    for module in (fox, model_tra):
        assert (fresh(module).h[0].attn.w_f.bias == 0).all()
    assert all((table == 0).all() for table in fresh(model_cope).pos_emb)
    assert (fresh(classics, pe="relative").pe[0].e == 0).all()
    t5, kerple, fire = (fresh(classics, pe=pe).pe[0] for pe in ("t5", "kerple", "fire"))
    assert 0.015 < t5.r.std() < 0.025
    for x, most in ((kerple.p, 2), (kerple.a, 1)):
        assert 0 < x.min() and x.max() < most and x.unique().numel() == 4
    assert (fire.c.item(), fire.m.item()) == pytest.approx((0.1, 1))
    model = fresh(model_cable)
    assert model.lm_head.weight is model.wte.weight
    wanted = 0.02 / math.sqrt(8)
    assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(wanted, rel=0.05)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert sum(p.numel() for p in model.parameters()) == 824608  # "about 0.8M"


@pytest.mark.parametrize("name", MODELS)
def test_training_and_decoding_under_autocast(name):
    """bfloat16, as on a GPU: finite gradients, logits near float32's, with the cache too."""
    model, idx = make(name), torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        torch.manual_seed(1)
        want = model(idx)[0]
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        logits, loss = model(idx, idx)
        loss.backward()
        with torch.no_grad():
            torch.manual_seed(1)
            cache = names.new_cache(model, 20)
            pieces = [model(part, cache=cache)[0] for part in idx.split([7, 1, 12], 1)]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if name not in ("tra", "learned_hard"):  # where a rounding may choose another set of keys
        for got in (logits, torch.cat(pieces, 1)):
            assert (got - want).abs().mean() < 0.1 * want.abs().mean()


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "learned_hard"])
def test_gradients_are_slopes_of_the_loss(name, enabled, monkeypatch):
    """All parameters move a little, along one random direction. (A hard choice has no slope.)"""
    monkeypatch.setattr(kernels, "enabled", enabled)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # gates, and the loss
    model = make(name).double()
    weights = [p for name, p in model.named_parameters() if name != "w_p.weight"]  # of searches
    moves = [torch.randn_like(p) for p in weights]
    idx = torch.randint(3, 61, (2, 2, 20))

    def value():
        torch.manual_seed(1)
        return model(*idx)[1]
    slope = sum((g * u).sum() for g, u in zip(torch.autograd.grad(value(), weights), moves))
    values = []
    with torch.no_grad():
        for n in (1, -2):  # a step forward, then one behind the start
            for p, u in zip(weights, moves):
                p.add_(n * 1e-6 * u)
            values.append(value().item())
    assert slope.item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_of_one_token_and_the_loss(name):
    model = make(name)
    logits, loss = model(torch.randint(0, 61, (3, 1)))
    assert logits.shape == (3, 1, 61) and loss is None
    idx, targets = torch.randint(0, 61, (2, 2, 11))
    targets[0, :7] = -1
    torch.manual_seed(1)
    logits, loss = model(idx, targets)
    kept = targets != -1
    close(loss, F.cross_entropy(logits[kept], targets[kept]), 1e-5)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert name == "tra_no_decay" or all(p.grad.any() for p in model.parameters())
