"""
Every formula that this repository claims, as a test. From the papers to what runs:

1. A method's `literal` form is its paper's formula, which tests/examples.py has a number at a time.
2. Its plain function is its literal form. So are the faster ways: tests/test_kernels.py.
3. A layer is this function of its weights. Norms sit where a scheme has them.
4. Every model: no row sees the future, a cache changes nothing, the loss and its gradients.

tests/ has the rest, a file per subject: test_rope.py RoPE's repairs, test_minimal.py Post-Norm's
theorem, test_train.py the optimiser, the schedule and BEMA, test_tasks.py the tasks.

    pytest                 this file and tests/, two at a time
    pytest -k cable        what is tested of a method; -k mine of your own
    pytest -m "not slow"   without Triton's interpreter, its compiler, and long runs of the commands
"""
import math
import sys

import pytest
import torch
from torch.nn import functional as F

import kernels
import model_cable
import model_cope
import model_postnorm
import model_tra
from common import names
from common.attention import attention_inputs, attention_module, plain_function
from lab.variants import cable as k_cable
from rivals import classics, diff, fox, path, ssmax, stick
from rivals.rope import REPAIRS
from tests.examples import CASES, COPE, encoding, example
from tests.helpers import INF, MODELS, NAMES, N, close, make, mlp_by_hand, random_qkv, turned

# the plain functions: make_model puts faster ways in front of them
cable_attention, cope_attention, tra_attention = map(
    plain_function, (model_cable, model_cope, model_tra))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """PaTH goes through a text in chunks, and these texts are short."""
    monkeypatch.setattr(path, "CHUNK", 8)


# -----------------------------------------------------------------------------
# paper = literal = plain

@pytest.mark.parametrize("Tq", [13, 5, 1])
@pytest.mark.parametrize("case", CASES)
def test_paper_is_literal_is_plain(case, Tq):
    """All queries of 13 tokens, the last few, one."""
    module, formula, args = example(case, Tq, Tk=13)
    paper, literal = formula(*args), module.literal(*args)[0]
    assert paper.abs().max() > 0.1
    close(literal, paper, 1e-6 if case == "fire" else 1e-12)  # FIRE's 512 |m| is a float32
    close(plain_function(module)(*args), literal, 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_the_literal_form(case):
    """Attention times v is the output, later keys have none of it, steps add up to the distance."""
    module, _, args = example(case, Tq=6, Tk=13)
    y, parts = module.literal(*args)
    seen = torch.ones(6, 13, dtype=torch.bool).tril(7)
    assert all(x.shape == (2, 3, 6, 13) for x in parts.values())
    close(parts["attention"] @ args[2], y, 1e-12)
    assert parts["attention"][..., ~seen].eq(0).all()
    if case not in ("diff", "stick", "stick c=4"):  # which have two softmaxes, and none
        logits = (parts["qk"] + parts["bias"]).masked_fill(~seen, -INF)
        close(logits.softmax(-1).nan_to_num(0), parts["attention"], 1e-12)
    assert ("step" in parts) != module.STEP.startswith("none")
    if "step" in parts:
        assert parts["step"][..., ~seen].eq(0).all() and parts["step"].min() == 0
        distance = parts["step"].flip(-1).cumsum(-1).flip(-1)
        if module in (model_cable, k_cable, fox, classics):  # from the token after the key on
            distance = (distance - parts["step"]) * seen
        if case in COPE:
            distance = distance.clamp(max=args[3].size(1) - 1)
        close(parts["distance"], distance, 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_large_logits_have_finite_gradients(case):
    """No NaN comes of a softmax that takes one key alone, nor of a row without any key."""
    module, _, args = example(case)
    args[:2] = 50 * args[0], 50 * args[1]
    q, k, v = (x.requires_grad_() for x in args[:3])
    y = plain_function(module)(*args)
    close(y, module.literal(*args)[0], 1e-9)
    for grad in torch.autograd.grad(y.square().sum(), (q, k, v)):
        assert grad.isfinite().all()


# -----------------------------------------------------------------------------
# what the methods say about each other, and about precision

def test_alibi_is_what_cable_and_tra_are_with_equal_steps():
    """And FoX is CABLE with steps -log f, without the query's weight."""
    q, k, v = (x.abs() for x in random_qkv())  # every score is positive: TRA counts every key
    slopes = encoding("alibi").slopes
    weight = slopes[None, :, None].expand(2, 3, 37)
    alibi = classics.literal(q, k, v, encoding("alibi").bias)[0]
    close(cable_attention(q, k, v, torch.arange(37.0).expand(2, 3, 37), weight), alibi, 1e-12)
    close(tra_attention(q, k, v, -weight), alibi, 1e-12)
    F_ = example("fox")[2][3]
    close(cable_attention(q, k, v, -F_), fox.literal(q, k, v, F_)[0], 1e-12)


def test_tra_distances_are_the_papers_example():
    """Eq. 5's mask gives Eq. 7's distances, and weights of delta to the power of the distance."""
    M = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]]).double()
    D = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 2, 1, 0], [2, 0, 1, 0]]).double()
    eye = torch.eye(4, dtype=torch.float64)[None, None]
    k = (2 * M - 1).T[None, None]
    decay = torch.full((1, 1, 4), math.log(0.3), dtype=torch.float64)
    y, parts = model_tra.literal(2 * eye, k, eye, decay)
    assert torch.equal(parts["step"][0, 0], M)
    assert torch.equal(parts["distance"][0, 0] * M, D)  # printed for survivors alone
    weights = torch.where(M > 0, 0.3**D, 0)
    close(y[0, 0], weights / weights.sum(-1, keepdim=True), 1e-12)


def test_in_bfloat16_distances_are_float32():
    """CABLE's S is some 800 at the end, where bfloat16 is 4 apart, and no count has 513 in it."""
    q, k, v = (x.abs().bfloat16() for x in random_qkv(B=1, H=2, Tq=96, Tk=4096, d=16))
    _, _, (*_, S, g) = example("cable", Tq=96, Tk=4096, B=1, H=2)
    opened, e = torch.full_like(k, 100), torch.zeros(16, 4096)  # every gate is 1
    e[:, 1001] = 3  # one position stands out, which bfloat16 does not have
    decay = torch.full((1, 2, 96), 0.5)  # it grows with the count: the farthest keys matter
    for module, *rest in ((model_cable, S / 2, g), (model_tra, decay), (model_cope, e, opened)):
        want = module.literal(*(x.double() for x in (q, k, v, *rest)))[0]
        wide = [x if x.dtype == torch.bfloat16 else x.float() for x in rest]
        got = plain_function(module)(q, k, v, *wide)
        assert got.dtype == torch.bfloat16
        close(got, want, 0.03)


def test_a_diverged_cope_says_nan_instead_of_breaking():
    q, k, v = random_qkv(dtype=torch.float32)
    q[0, 0, 3, 0] = float("nan")
    for f in (cope_attention, kernels.cpu_count.cope_attention):
        assert f(q, k, v, torch.randn(6, 4)).isnan().any()


def test_embeddings_of_positions():
    x = torch.ones(1, 30, 18)
    y = encoding("sinusoidal").embed(x, torch.arange(30), None)[0] - math.sqrt(18)
    for t, c in ((0, 0), (7, 3), (29, 8)):
        angle = t / 10000 ** (2 * c / 18)
        close(y[t, 2 * c:2 * c + 2], torch.tensor([math.sin(angle), math.cos(angle)]), 1e-6)
    learned = encoding("learned")
    close(learned.embed(x[:, :8], torch.arange(8), None)[0], 1 + learned.wpe.weight, 1e-12)
    label = encoding("label")
    first, again = (label.embed(0 * x, torch.arange(30), None)[0] for _ in range(2))
    rows = [int((label.wpe.weight == row).all(1).nonzero()) for row in first]
    assert rows == sorted(set(rows))
    assert not torch.equal(first, again)  # drawn anew, at test time too


# -----------------------------------------------------------------------------
# a layer, where the norms sit, how weights start

def convolved(attn, x):
    """PaTH's directions, which are not of length 1 yet: a token's and those of a few before it."""
    u, w = x @ attn.w_down.weight.T @ attn.w_up.weight.T, torch.zeros_like(x)
    taps = attn.w_conv.weight[:, 0]  # the last is the token's own
    for n in range(taps.size(1)):
        w[:, n:] += taps[:, -1 - n] * u[:, :x.size(1) - n]
    return w


def by_hand(model, n, x):
    """Layer n's attention for its input x (B, T, C), from its weights and its literal form."""
    attn, config = model.h[n].attn, model.config
    B, T, C = x.shape
    module = sys.modules[type(model).__module__]

    def split(y):          # -> (B, H, T, d)
        return y.view(B, T, config.n_head, -1).transpose(1, 2)

    def per_head(linear):  # -> (B, H, T)
        return (x @ linear.weight.T + linear.bias).transpose(1, 2)
    q, k, v = (split(x @ weight.T) for weight in attn.c_attn.weight.chunk(3))
    if config.qk_norm:
        q, k = (z / z.square().mean(-1, keepdim=True).sqrt() for z in (q, k))
    rest = []
    if module in (model_cable, k_cable):
        step = dict(relu=F.relu, softplus=F.softplus)[config.step]
        g = F.softplus(per_head(attn.w_s)) if config.weight else None
        rest = [step(per_head(attn.w_c)).cumsum(-1), g]
        if module is k_cable:
            rest.append(config.log_kernel)
    elif module is fox:
        rest = [F.logsigmoid(per_head(attn.w_f)).cumsum(-1)]
    elif module is model_tra:
        rest = [F.logsigmoid(per_head(attn.w_f))]
    elif module is model_cope:
        own = split(x @ attn.w_g.weight.T) if config.gates == "sep" else None
        table = model.pos_emb[0 if config.share else n]
        rest = [table, dict(key=None, val=v, sep=own)[config.gates]]
    elif module is classics:
        rest = [model.pe[n if config.pe == "kerple" else 0].bias]  # kerple: a layer its own
    elif module is stick:
        rest = [config.gate_bias]
    elif module is ssmax:
        rest = [attn.s]
    elif module is path:
        rest = [F.normalize(split(convolved(attn, x)), dim=-1), 2 * per_head(attn.w_b).sigmoid()]
    elif module is model_postnorm and config.pe == "rope":
        q, k = turned(q, range(T)), turned(k, range(T))
    elif module is diff:
        q, k = (torch.cat([turned(h, range(T)) for h in z.chunk(2, -1)], -1) for z in (q, k))
        start = 0.8 - 0.6 * math.exp(-0.3 * n)
        rest = [(attn.l_q1 @ attn.l_k1).exp() - (attn.l_q2 @ attn.l_k2).exp() + start]
    y = module.literal(q, k, v, *rest)[0]
    if module is diff:
        y = (1 - start) * N(y, attn.ln_head, 1e-6)
    return y.transpose(1, 2).reshape(B, T, C) @ attn.c_proj.weight.T


@pytest.mark.parametrize("name, changes", [
    ("nope", {}),
    ("nope", dict(qk_norm=True)),
    ("alibi", {}),
    ("kerple", {}),
    ("cable", {}),
    ("cable_nw", dict(qk_norm=True)),
    ("cable_nw_softplus", {}),
    ("k_cable", {}),
    ("k_cable_inside", {}),
    ("fox", {}),
    ("tra", {}),
    ("cope", {}),
    ("cope", dict(share=False, qk_norm=True)),
    ("cope_val", {}),
    ("cope_sep", {}),
    ("diff", {}),
    ("postnorm", {}),
    ("postnorm", dict(pe="nope")),
    ("stick", dict(gate_bias=4.0)),
    ("ssmax", {}),
    ("ssmax_ln", {}),
    ("path", {}),
    ("path", dict(rank=5, conv=1))])
def test_a_layer_is_its_formula(name, changes):
    model = make(name, **changes).double()
    layers = []
    for block in model.h:
        block.attn.register_forward_hook(lambda _, args, y: layers.append((args[0], y)))
    with torch.no_grad():
        model(torch.randint(0, 61, (2, 14)))
        assert len(layers) == 2
        for n, (x, y) in enumerate(layers):
            close(y, by_hand(model, n, x), 1e-5)


def updates(model):
    """What the residual stream gets, in order: a layer's attention, its MLP, the next layer's."""
    for n, block in enumerate(model.h):
        yield lambda x, n=n: by_hand(model, n, x)
        yield lambda x, block=block: mlp_by_hand(x, block.mlp)


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_pre_and_post_norm(norm):
    """post is TRA's authors': a norm on the embeddings and one on every sum."""
    model, idx = make("tra", norm=norm).double(), torch.randint(0, 61, (2, 13))
    norms = [ln for block in model.h for ln in (block.ln_1, block.ln_2)] + [model.ln_f]
    x = model.wte.weight[idx]
    if norm == "post":
        x = N(x, norms[0], 1e-6)
    for n, f in enumerate(updates(model)):
        if norm == "post":
            x = N(x + f(x), norms[n + 1], 1e-6)
        else:
            x = x + f(N(x, norms[n], 1e-6))
    if norm == "pre":
        x = N(x, norms[-1], 1e-6)
    close(model(idx)[0], x @ model.wte.weight.T, 1e-5)


@pytest.mark.parametrize("scheme", model_postnorm.SCHEMES)
@torch.no_grad()
def test_the_schemes_of_the_post_norm_paper(scheme):
    model, idx = make("postnorm", norm=scheme).double(), torch.randint(0, 61, (2, 13))
    x = model.wte.weight[idx]
    if scheme == "peri_init":
        x = N(x, model.ln_0, 1e-8)
    for n, f in enumerate(updates(model)):
        before, after = (norms[n % 2] for norms in (model.h[n // 2].before, model.h[n // 2].after))
        if scheme in ("pre", "pre_final"):
            x = x + f(N(x, before, 1e-8))
        elif scheme == "output":
            x = x + N(f(x), after, 1e-8) if n % 2 == 0 else x + f(x)
        elif scheme == "post":
            x = N(x + f(x), after, 1e-8)
        else:
            x = x + N(f(N(x, before, 1e-8)), after, 1e-8)
    if scheme in ("pre_final", "peri", "peri_init"):
        x = N(x, model.ln_f, 1e-8)
    close(model(idx)[0], x @ model.wte.weight.T, 1e-5)


def fresh(name, **changes):
    """A model as a training starts with it."""
    torch.manual_seed(0)
    return names.make_model(names.models()[name][1] | dict(model=name) | changes)


def test_how_weights_start():
    model = fresh("cable")
    attn, std = model.h[0].attn, pytest.approx(0.02, rel=0.25)
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    into_the_stream = 0.02 / math.sqrt(2 * 4)
    assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(into_the_stream, rel=0.02)
    assert sum(p.numel() for p in model.parameters()) == 824608  # "about 0.8M"
    for linear in (attn.w_c, attn.w_s):  # g starts near log 2, half of the steps at 0
        assert (linear.bias == 0).all() and linear.weight.std().item() == std
    for name, gate_bias in (("fox", 0.0), ("fox", 4.0), ("tra", 0.0)):
        model = fresh(name, gate_bias=gate_bias)
        assert all((block.attn.w_f.bias == gate_bias).all() for block in model.h)
    assert (fresh("cope").pos_emb[0] == 0).all() and (fresh("relative").pe[0].e == 0).all()
    s = fresh("ssmax").h[0].attn.s  # the last row of a training window starts as the plain GPT's
    close(s * math.log(256), torch.ones(4), 1e-6)
    assert fresh("t5").pe[0].r.std().item() == std
    fire = fresh("fire").pe[0]
    assert (fire.c.item(), fire.m.item()) == pytest.approx((0.1, 1))


# -----------------------------------------------------------------------------
# every model, its variants, and RoPE's repairs

EVERY = [(name, {}) for name in MODELS] + [("rope", dict(repair=r)) for r in REPAIRS[1:]]
EVERY += [("rope_nope", dict(repair="log_n")), ("rope_nope", dict(window=0, repair="yarn"))]


def logits(model, idx, cuts=()):
    """Of a text (B, T): in one forward, or in pieces over a cache. A model's draws are the same."""
    torch.manual_seed(7)
    if not cuts:
        return model(idx)[0]
    cache = names.new_cache(model, idx.size(1))
    pieces = [model(piece, cache=cache)[0] for piece in idx.tensor_split(cuts, 1)]
    assert cache.t == idx.size(1)
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("name, changes", EVERY)
@torch.no_grad()
def test_causality(name, changes, monkeypatch):
    """No later token changes an earlier output, not by a bit."""
    model, idx = make(name, **changes), torch.randint(0, 61, (2, 24))
    for enabled in (False, True):
        monkeypatch.setattr(kernels, "enabled", enabled)
        before = logits(model, idx)
        for t in (1, 12, 23):
            other = idx.clone()
            other[:, t] = (other[:, t] + 1) % 61
            after = logits(model, other)
            assert torch.equal(after[:, :t], before[:, :t])
            assert (after[:, t] - before[:, t]).abs().max() > 1e-3


@pytest.mark.parametrize("name, changes", EVERY)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(name, changes):
    """Far past the training length (24): single tokens, a prompt, several at once."""
    model, T = make(name, **changes).double(), 60
    cuts = [1, 5, 6, 7, 19, 20, 24, 31, 45]
    if "learned" in name:  # whose table ends
        T, cuts = 24, cuts[:-3]
    idx = torch.randint(0, 61, (2, T))
    full = logits(model, idx)
    close(logits(model, idx, cuts), full, 1e-5 * full.abs().max().item())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_layer_goes_on_with_what_its_literal_form_gives(name):
    """What attention was called with, as pictures have it, explains what the layer goes on with."""
    model, went_on = make(name), []
    module = attention_module(model)
    assert not hasattr(plain_function(module), "__wrapped__")  # else tests of it are of a way
    for block in model.h:
        block.attn.c_proj.register_forward_pre_hook(lambda _, args: went_on.append(args[0]))
    with attention_inputs(model) as calls:
        model(torch.randint(0, 61, (2, 20)))
    assert module.EQUATION and module.STEP
    for args, y in zip(calls, went_on, strict=True):
        got, parts = module.literal(*args)
        if name != "diff":  # which normalises every head afterwards
            says = f": `literal` in {module.__file__} is not what runs; after an edit change both"
            close(got.transpose(1, 2).flatten(2), y, 1e-4, says)
        assert parts["attention"].shape == (2, 4, 20, 20)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "learned_hard"])
def test_the_loss_and_its_slope(name, enabled, monkeypatch):
    """
    The mean over what is scored; gradients are its slope where all parameters move a little, along
    one random direction. (A hard choice has no slope.)
    """
    monkeypatch.setattr(kernels, "enabled", enabled)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # gates, and the loss
    model = make(name).double()
    weights = [p for name, p in model.named_parameters() if name != "w_p.weight"]  # of searches
    moves = [torch.randn_like(p) for p in weights]
    idx, targets = torch.randint(3, 61, (2, 2, 20))
    targets[0, :7] = -1  # is not scored

    def loss():
        torch.manual_seed(7)
        return model(idx, targets)[1]
    kept, whole = targets != -1, logits(model, idx)
    close(loss(), F.cross_entropy(whole[kept], targets[kept]), 1e-12)
    grads = torch.autograd.grad(loss(), weights)
    assert name == "tra_no_decay" or all(grad.any() for grad in grads)
    values = []
    with torch.no_grad():
        for n in (1, -2):  # a step forward, then one behind the start
            for p, u in zip(weights, moves):
                p.add_(n * 1e-6 * u)
            values.append(loss().item())
    slope = sum((g * u).sum() for g, u in zip(grads, moves)).item()
    assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_training_and_decoding_under_autocast(name):
    """bfloat16, as on a GPU: finite gradients, logits near float32's, with the cache too."""
    model, idx = make(name), torch.randint(0, 61, (2, 20))
    with torch.autocast("cpu", torch.bfloat16):
        model(idx, idx)[1].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        want = logits(model, idx)
        for cuts in ((), (7, 8)):
            with torch.autocast("cpu", torch.bfloat16):
                got = logits(model, idx, cuts)
            if name not in ("tra", "learned_hard"):  # where rounding may choose another set of keys
                assert (got - want).abs().mean() < 0.1 * want.abs().mean()


@pytest.mark.parametrize("name", ["cable", "fox", "tra"])
def test_steps_and_decays_are_float32_under_autocast(name):
    model = make(name)
    with attention_inputs(model) as calls, torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(0, 61, (2, 600)))
    q, _, _, *rest = calls[0]
    assert q.dtype == torch.bfloat16
    for x in rest:  # not a float32 of what was summed in bfloat16
        assert x.dtype == torch.float32 and (x != x.bfloat16()).any()
