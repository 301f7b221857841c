"""A layer and its norms by hand; every model: causality, cache, autocast, settings."""
import inspect
import math
import re
import sys

import pytest
import torch
from torch.nn import functional as F

import kernels
import model_cable
import model_classics
import model_cope
import model_diff
import model_fox
import model_postnorm
import model_tra
import sample
from common import names
from common.spy import attention_module, plain_function, spy
from tests.helpers import (
    CUDA,
    INTERPRET,
    MODELS,
    TINY,
    N,
    close,
    make,
    mlp_by_hand,
    turned,
    written_without_a_cache,
)


def by_hand(model, n, x):
    """Layer n's attention for its input x (B, T, C), from its weights and its literal form."""
    attn, config = model.h[n].attn, model.config
    B, T, C = x.shape
    module = sys.modules[type(model).__module__]

    def split(weight):    # -> (B, H, T, d)
        return (x @ weight.T).view(B, T, config.n_head, -1).transpose(1, 2)

    def per_head(linear):  # -> (B, H, T)
        return (x @ linear.weight.T + linear.bias).transpose(1, 2)
    q, k, v = (split(weight) for weight in attn.c_attn.weight.chunk(3))
    if config.qk_norm:
        q, k = (z / z.square().mean(-1, keepdim=True).sqrt() for z in (q, k))
    positions, more = list(range(T)), []
    if module is model_cable:
        step = dict(relu=F.relu, softplus=F.softplus)[config.step]
        g = F.softplus(per_head(attn.w_s)) if config.weight else None
        more = [step(per_head(attn.w_c)).cumsum(-1), g, config.log_kernel]
    elif module is model_fox:
        more = [F.logsigmoid(per_head(attn.w_f)).cumsum(-1)]
    elif module is model_tra:
        more = [F.logsigmoid(per_head(attn.w_f))]
    elif module is model_cope:
        gate_keys = dict(key=None, val=v, sep=split(attn.w_g.weight) if attn.gates == "sep" else 0)
        more = [model.pos_emb[n % len(model.pos_emb)], gate_keys[config.gates]]
    elif module is model_classics:
        pe = model.pe[n % len(model.pe)]
        more = [pe.bias]
    if getattr(config, "pe", "") == "rope":
        q, k = turned(q, positions), turned(k, positions)
    if module is model_diff:
        q, k = (torch.cat([turned(h, positions) for h in z.chunk(2, -1)], -1) for z in (q, k))
        start = 0.8 - 0.6 * math.exp(-0.3 * n)
        lam = (attn.l_q1 @ attn.l_k1).exp() - (attn.l_q2 @ attn.l_k2).exp() + start
        y = module.literal(q, k, v, lam)[0]
        y = (1 - start) * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        y = y * attn.ln_head.weight
    else:
        y = module.literal(q, k, v, *more)[0]
    return y.transpose(1, 2).reshape(B, T, C) @ attn.c_proj.weight.T


@pytest.mark.parametrize("name, changes", [
    ("nope", {}), ("nope", dict(qk_norm=True)), ("rope", {}), ("alibi", {}), ("kerple", {}),
    ("relative", {}), ("cable", {}), ("cable", dict(qk_norm=True)), ("cable_nw", {}),
    ("k_cable", {}), ("k_cable_inside", {}), ("cable_nw_softplus", {}), ("fox", {}), ("tra", {}),
    ("tra", dict(qk_norm=False)), ("cope", {}), ("cope", dict(share=False)),
    ("cope", dict(qk_norm=True)), ("cope_val", {}),
    ("cope_sep", {}), ("diff", {}), ("postnorm", {}), ("postnorm", dict(pe="nope", qk_norm=True))])
def test_a_layer_is_its_formula(name, changes):
    model = make(name, **changes).double()
    found = []
    for block in model.h:
        block.attn.register_forward_hook(lambda _, args, y: found.append((args[0], y)))
    with torch.no_grad():
        model(torch.randint(0, 61, (2, 14)))
        assert len(found) == 2
        for n, (x, y) in enumerate(found):
            close(y, by_hand(model, n, x), 1e-5)
    if name.startswith("cope"):
        assert len(model.pos_emb) == (1 if model.config.share else 2)


@pytest.mark.parametrize("name", MODELS)
def test_a_spy_sees_what_the_literal_form_explains(name):
    """What attention was called with, put into the literal form, is what the layer goes on with."""
    model, went_on = make(name), []
    module = attention_module(model)
    plain, enabled = plain_function(module), kernels.enabled
    for block in model.h:
        block.attn.c_proj.register_forward_pre_hook(lambda _, args: went_on.append(args[0]))
    with torch.no_grad(), spy(model) as calls:
        model(torch.randint(0, 61, (2, 20)))
    assert plain_function(module) is plain and kernels.enabled == enabled
    assert len(calls) == len(went_on) == 2
    for args, y in zip(calls, went_on):
        assert len(args) == len(inspect.signature(plain).parameters)
        got, parts = module.literal(*args)
        if name != "diff":  # which normalises every head afterwards
            close(got.transpose(1, 2).flatten(2), y, 1e-4)
        assert parts["attention"].shape == (2, 4, 20, 20)


def test_cable_and_fox_sum_their_steps_in_float32_under_autocast():
    for name, sums in (("cable", slice(3, 5)), ("fox", slice(3, 4)), ("tra", slice(3, 4))):
        model = make(name)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), spy(model) as calls:
            model(torch.randint(0, 61, (2, 600)))
        assert calls[0][0].dtype == torch.bfloat16
        for x in calls[0][sums]:  # not a float32 of what was summed in bfloat16
            assert x.dtype == torch.float32 and (x != x.bfloat16()).any(), name


def test_what_starts_at_zero():
    torch.manual_seed(0)
    attn = model_cable.GPT(model_cable.GPTConfig()).h[0].attn
    for linear in (attn.w_c, attn.w_s):  # g starts near log 2, half of the steps at 0
        assert torch.equal(linear.bias, torch.zeros(4)) and 0.015 < linear.weight.std() < 0.025
    assert (model_fox.GPT(model_fox.GPTConfig()).h[0].attn.w_f.bias == 0).all()
    assert (model_tra.GPT(model_tra.GPTConfig()).h[0].attn.w_f.bias == 0).all()
    assert all((e == 0).all() for e in model_cope.GPT(model_cope.GPTConfig()).pos_emb)
    relative = model_classics.GPT(model_classics.GPTConfig(pe="relative"))
    assert (relative.pe[0].e == 0).all()


def test_what_does_not_start_at_zero():
    torch.manual_seed(0)
    def first(pe):
        return model_classics.GPT(model_classics.GPTConfig(pe=pe)).pe[0]
    assert 0.015 < first("t5").r.std() < 0.025
    kerple, fire = first("kerple"), first("fire")
    for x, most in ((kerple.p, 2), (kerple.a, 1)):
        assert 0 < x.min() and x.max() < most and x.unique().numel() == 4
    assert (fire.c.item(), fire.m.item()) == pytest.approx((0.1, 1))
    attn = model_diff.GPT(model_diff.GPTConfig()).h[0].attn
    lambdas = torch.cat([attn.l_q1, attn.l_k1, attn.l_q2, attn.l_k2])
    assert 0.07 < lambdas.std() < 0.13


def test_backbone_initialisation():
    torch.manual_seed(0)
    model = model_cable.GPT(model_cable.GPTConfig())
    assert model.lm_head.weight is model.wte.weight
    wanted = 0.02 / math.sqrt(8)
    assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(wanted, rel=0.05)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert sum(p.numel() for p in model.parameters()) == 824608  # "about 0.8M"


@pytest.mark.parametrize("scheme", model_postnorm.SCHEMES)
def test_norm_schemes_by_hand(scheme):
    model = make("postnorm", norm=scheme).double()
    for p in model.parameters():  # gains of 1 would hide a norm that is used twice
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    idx = torch.randint(0, 61, (2, 13))
    with torch.no_grad():
        x = model.wte.weight[idx]
        if scheme == "peri_init":
            x = N(x, model.ln_0, 1e-8)
        for layer, block in enumerate(model.h):
            updates = (lambda x, layer=layer: by_hand(model, layer, x),
                       lambda x, block=block: mlp_by_hand(x, block.mlp))
            for n, f in enumerate(updates):
                if scheme in ("pre", "pre_final"):
                    x = x + f(N(x, block.before[n], 1e-8))
                elif scheme == "output":
                    x = x + (N(f(x), block.after[n], 1e-8) if n == 0 else f(x))
                elif scheme == "post":
                    x = N(x + f(x), block.after[n], 1e-8)
                else:
                    x = x + N(f(N(x, block.before[n], 1e-8)), block.after[n], 1e-8)
        if scheme in ("pre_final", "peri", "peri_init"):
            x = N(x, model.ln_f, 1e-8)
        close(model(idx)[0], x @ model.wte.weight.T, 1e-5)


@pytest.mark.parametrize("name", ["nope", "fox", "tra", "rope"])
def test_post_norm_of_the_other_files_by_hand(name):
    """TRA's authors': a norm on the embeddings, then one on every sum, the last before the head."""
    model = make(name, norm="post").double()
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    idx = torch.randint(0, 61, (2, 13))
    with torch.no_grad():
        x = N(model.wte.weight[idx], model.h[0].ln_1, 1e-6)
        for layer, block in enumerate(model.h):
            x = N(x + by_hand(model, layer, x), block.ln_2, 1e-6)
            following = model.h[layer + 1].ln_1 if layer + 1 < len(model.h) else model.ln_f
            x = N(x + mlp_by_hand(x, block.mlp), following, 1e-6)
        close(model(idx)[0], x @ model.wte.weight.T, 1e-5)


def test_pre_final_is_the_other_files_pre():
    model, other = make("postnorm", norm="pre_final"), make("rope", norm="pre")
    weights = {}
    for name, p in model.state_dict().items():
        weights[name.replace("before.0", "ln_1").replace("before.1", "ln_2")] = p
    other.load_state_dict(weights)
    idx = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        close(model(idx)[0], other(idx)[0], 1e-4)


SCHEMES = [(name, norm) for name in MODELS for norm in ("pre", "post")
           if names.models()[name][0] is not model_postnorm]
SCHEMES += [("postnorm", norm) for norm in model_postnorm.SCHEMES]


@pytest.mark.parametrize("name, norm", SCHEMES)
def test_causality(name, norm, monkeypatch):
    """No later token changes an earlier output: not by a bit, on a GPU not beyond rounding."""
    model, T = make(name, norm=norm, qk_norm=norm == "post"), 24
    monkeypatch.setattr(attention_module(model), "ROWS", 10)
    idx = torch.randint(0, 61, (2, T))
    exact = not INTERPRET and not CUDA
    for enabled, allowed in ((False, 0), (True, 0 if exact else 1e-5)):
        monkeypatch.setattr(kernels, "enabled", enabled)
        with torch.no_grad():
            torch.manual_seed(5)
            before = model(idx)[0]
            for t in (1, 12, T - 1):
                other = idx.clone()
                other[:, t] = (other[:, t] + 1) % 61
                torch.manual_seed(5)
                after = model(other)[0]
                close(after[:, :t], before[:, :t], allowed)
                assert (after[:, t] - before[:, t]).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_equals_the_full_forward(name):
    """Past the training length (24), in pieces: a prompt, single tokens, several at once."""
    model, T, cuts = make(name), 90, [0, 5, 6, 7, 40, 41, 70, 90]
    if "learned" in name:  # whose table ends
        T, cuts = 24, [0, 5, 6, 7, 19, 20, 24]
    idx = torch.randint(0, 61, (2, T))
    with torch.no_grad():
        torch.manual_seed(7)
        full = model(idx)[0]
        torch.manual_seed(7)
        cache = names.new_cache(model, T if name == "label" else 8)  # 8: the buffers have to grow
        pieces = [model(idx[:, a:b], cache=cache)[0] for a, b in zip(cuts, cuts[1:])]
        assert cache.t == T
        close(torch.cat(pieces, 1), full, 1e-3 * full.abs().max().item())
        if name != "label":  # without a cache every forward draws its labels anew
            fast = list(sample.generate(model, idx[:1, :6], T - 6, temperature=0))
            slow = written_without_a_cache(model, idx[:1, :6], T - 6, temperature=0)
            assert torch.equal(torch.cat(fast, 1), slow)


def test_a_label_cache_announces_its_length():
    model = make("label")
    with torch.no_grad(), pytest.raises(ValueError, match="the cache announced 8 tokens, more"):
        cache = names.new_cache(model, 8)
        model(torch.zeros(1, 6, dtype=torch.long), cache=cache)
        model(torch.zeros(1, 3, dtype=torch.long), cache=cache)


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
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name, fields, message", [
    ("rope", dict(pe="rop"), "pe='rop' is not one of learned, sinusoidal, rope"),
    ("cable", dict(log_kernel="yes"), "log_kernel='yes' is not one of outside, inside"),
    ("postnorm", dict(n_head=32), "rope turns pairs: head size 1 is odd"),
    ("bert_rope", dict(n_head=32), "head size 1 is odd"),
    ("bert_rope", dict(pe="x"), "pe='x' is not one of cable")])
def test_settings_that_do_not_fit(name, fields, message):
    """Those that test_train_says_what_is_wrong has not."""
    module, variant = names.models()[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        module.GPT(module.GPTConfig(**TINY | variant | fields))
