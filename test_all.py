"""
Every formula that this repository claims, as a test. A literal form is held to its paper's formula,
one number at a time; everything faster is held to the literal form. At the end one tiny run.

    pytest                 this file and tests/
    pytest -n 2            the same on two cores
    pytest -m "not slow"   without Triton's interpreter, its compiler, and long runs of the commands
"""
import inspect
import json
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
import sample
from common import names
from common.attention import plain_function
from experiments.variants import cable as k_cable
from rivals import classics, diff, fox, path, rope, ssmax
from rivals.classics import attention
from tests.examples import CASES, CLASSICS, COPE, encoding, example, in_float32
from tests.helpers import (
    CUDA,
    DEVICE,
    INF,
    INTERPRET,
    MODEL_FILES,
    MODELS,
    TINY_FLAGS,
    N,
    close,
    command,
    losses,
    make,
    mlp_by_hand,
    module_of,
    random_qkv,
    turned,
    write_notes,
    written_without_a_cache,
)

# the plain functions: make_model puts faster ways in front of them
cable_attention, cope_attention, tra_attention = map(
    plain_function, (model_cable, model_cope, model_tra))

# -----------------------------------------------------------------------------
# paper = literal = plain = kernel

@pytest.mark.parametrize("Tq", [13, 5, 1])
@pytest.mark.parametrize("case", CASES)
def test_the_literal_form_is_the_papers_formula(case, Tq):
    module, formula, args = example(case, Tq, Tk=13)
    got, want = module.literal(*args)[0], formula(*args)
    assert got.shape == want.shape and want.abs().max() > 0.1
    close(got, want, 1e-6 if case == "fire" else 1e-12)  # FIRE's 512 |m| is a float32


@pytest.mark.parametrize("case", CASES)
def test_what_runs_is_the_literal_form(case):
    """All queries, the last few, one; in float32 too."""
    for Tq in (37, 6, 1):
        module, _, args = example(case, Tq)
        plain, want = plain_function(module), module.literal(*args)[0]
        close(plain(*args), want, 1e-12)
        if case not in CLASSICS:  # whose parameters are float64
            got = plain(*in_float32(args))
            assert got.dtype == torch.float32
            close(got, want, 1e-4 if case in COPE else 2e-5)


@pytest.mark.parametrize("case", [*COPE, "cable", "cable_nw", "fox", "tra", "stick"])
def test_a_faster_way_is_the_literal_form(case):
    """On a CPU or CUDA, whichever is here; tests/test_kernels.py has their corners."""
    module, _, args = example(case, 130, 130, d=16)
    on_device = [x.to(DEVICE) if torch.is_tensor(x) else x for x in in_float32(args)]
    plain = plain_function(module)
    close(kernels.with_ways(plain)(*on_device).cpu(), module.literal(*args)[0], 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_the_literal_form(case):
    """Attention times v is the output, later keys have none of it, steps add up to the distance."""
    for Tq in (37, 6, 1):
        module, _, args = example(case, Tq)
        y, parts = module.literal(*args)
        seen = torch.ones(Tq, 37, dtype=torch.bool).tril(37 - Tq)
        assert all(x.shape == (2, 3, Tq, 37) for x in parts.values())
        assert parts["attention"][..., ~seen].eq(0).all()
        close(parts["attention"] @ args[2], y, 1e-12)
        total = parts["attention"].sum(-1)
        if case == "diff":
            close(total, torch.full_like(total, 1 - args[3]), 1e-12)
        elif case == "stick":  # no softmax: what no key takes is left
            left = (1 - parts["qk"].sigmoid()).masked_fill(~seen.tril(36 - Tq), 1).prod(-1)
            close(total, 1 - left, 1e-12)
        else:
            logits = (parts["qk"] + parts["bias"]).masked_fill(~seen, -INF)
            alive = logits.amax(-1) > -INF
            assert alive.all() != (case == "tra")  # its first row has no survivor
            close(logits.softmax(-1).nan_to_num(0), parts["attention"], 1e-12)
            close(total, alive, 1e-12)
        names = {"qk", "bias", "attention"}
        if not module.STEP.startswith("none"):
            check_steps(case, seen, parts, args)
            names |= {"step", "distance"}
        assert parts.keys() == names


def check_steps(case, seen, parts, args):
    """TRA, CoPE and stick-breaking count key j too, the others from the one after it."""
    step, distance = parts["step"], parts["distance"]
    first = 0 if case in COPE or case in ("tra", "stick") else 1
    assert step[..., ~seen].eq(0).all() and distance[..., ~seen].eq(0).all()
    assert step.min() >= 0 and step.max() > 0
    sums = [step[..., j + first:].sum(-1) for j in range(37)]
    want = torch.stack(sums, -1) * seen
    if case in COPE:
        want = want.clamp(max=args[3].size(1) - 1)
    close(distance, want, 1e-12)
    if case == "stick":
        close(parts["bias"].masked_fill(~seen.tril(36 - len(seen)), 0), -distance, 1e-12)
    if case in ("cable_nw", "fox"):
        close(parts["bias"], -distance, 1e-12)
    if case == "tra":
        assert parts["bias"][step == 0].eq(-INF).all() and set(step.unique().tolist()) == {0, 1}


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda p: p.stem)
def test_a_model_file_says_what_it_is(path):
    module = module_of(path)
    equations = module.EQUATION  # a line, or one for each variant
    if isinstance(equations, str):
        equations = dict(all=equations)
    for line in (*equations.values(), module.STEP):
        assert 5 < len(line) <= 100 and "\n" not in line
    fields = {f.name for f in module.GPTConfig.__dataclass_fields__.values()}
    assert module.VARIANTS and all(set(v) <= fields for v in module.VARIANTS.values())
    plain = plain_function(module)
    assert inspect.signature(plain) == inspect.signature(module.literal)
    assert plain.__name__.endswith("attention")


@pytest.mark.parametrize("Tq", [5, 3])
def test_gradients_of_what_runs(Tq):
    cases = ["baseline", "t5", "kerple", "fire", "relative", "cable", "k_cable", "fox",
             "cope key P=5", "cope sep P=2", "tra", "diff", "stick", "path", "ssmax"]
    for case in cases:
        module, _, args = example(case, Tq, Tk=5, B=1, d=6)
        if case == "diff":
            args[3] = torch.tensor(0.35, dtype=torch.float64)
        if case == "tra":
            args[0][0, 0, 0] = 0.1  # away from the threshold, where the output jumps
        tensors = [x.clone().requires_grad_() for x in args if torch.is_tensor(x)]

        def plain(*given, args=args, module=module):
            given = iter(given)
            mixed = [next(given) if torch.is_tensor(x) else x for x in args]
            return plain_function(module)(*mixed)
        assert torch.autograd.gradcheck(plain, tensors, fast_mode=True), case


# -----------------------------------------------------------------------------
# what the methods say about each other, and about precision

def test_tra_with_every_score_positive_is_alibi():
    q, k, v = (x.abs() for x in random_qkv())
    alibi = encoding("alibi")
    decay = -alibi.slopes[None, :, None].expand(2, 3, 37)
    close(tra_attention(q, k, v, decay), attention(q, k, v, alibi.bias), 1e-12)


def test_cable_in_bfloat16_keeps_the_float32_difference():
    """S ~ 800 at the end, where bfloat16 is 4 apart: only S_i - S_j in float32 is right."""
    q, k, v = (x.bfloat16() for x in random_qkv(B=1, H=2, Tq=96, Tk=4096, d=16))
    _, _, (*_, S, g) = example("cable", Tq=96, Tk=4096, B=1, H=2)
    S = S / 2
    want = model_cable.literal(q.double(), k.double(), v.double(), S, g)[0]
    got = cable_attention(q, k, v, S.float(), g.float())
    assert got.dtype == torch.bfloat16
    close(got, want, 0.03)
    rounded = cable_attention(q, k, v, S.bfloat16().float(), g.float())
    assert (rounded.double() - want).abs().max() > 0.3  # so the bound above means something


def test_tra_and_cope_count_in_float32_whatever_the_dtype():
    """bfloat16 has no whole numbers between 512 and 516: counts this long would blur."""
    q, k, v = (x.abs().bfloat16() for x in random_qkv(B=1, H=1, Tq=200, Tk=1500, d=8))
    exact = q.double(), k.double(), v.double()
    decay = torch.full((1, 1, 200), 0.5)  # it grows with the count: the farthest keys matter
    got = tra_attention(q, k, v, decay)
    assert got.dtype == torch.bfloat16
    close(got, model_tra.literal(*exact, decay.double())[0], 0.02)
    e, opened = torch.zeros(8, 1500), torch.full_like(k, 100)  # every gate is 1
    e[:, 1001] = 3  # one position stands out, which bfloat16 does not have
    close(cope_attention(q, k, v, e, opened),
          model_cope.literal(*exact, e.double(), opened.double())[0], 0.03)


COPE_RUNS = cope_attention, kernels.cpu_count.cope_attention


def test_cope_far_beyond_saturation():
    """Long enough for the tail of constant bias, with a head whose gates are rarely open."""
    q, k, v = random_qkv(B=1, H=2, Tq=1500, Tk=1500, d=8)
    q[:, 1, :, 0], k[:, 1, :, 0] = 4, -2
    e = torch.randn(8, 20, dtype=torch.float64)
    want = model_cope.literal(q, k, v, e)[0]
    for f in COPE_RUNS:
        close(f(q, k, v, e), want, 1e-11)
        close(f(q[:, :, 1490:], k, v, e), want[:, :, 1490:], 1e-11)
        close(f(*in_float32((q, k, v, e))), want, 1e-4)


def test_a_diverged_cope_says_nan_instead_of_breaking():
    q, k, v = random_qkv(dtype=torch.float32)
    q[0, 0, 3, 0] = float("nan")
    for f in COPE_RUNS:
        assert f(q, k, v, torch.randn(6, 4)).isnan().any()


def test_tra_distances_are_the_papers_example():
    """Eq. 5's mask gives Eq. 7's distances, and weights of delta to the power of the distance."""
    M = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]]).double()
    D = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 2, 1, 0], [2, 0, 1, 0]]).double()
    eye = torch.eye(4, dtype=torch.float64)[None, None]
    k = (2 * M - 1).T[None, None].contiguous()
    decay = torch.full((1, 1, 4), math.log(0.3), dtype=torch.float64)
    y, parts = model_tra.literal(2 * eye, k, eye, decay)
    assert torch.equal(parts["step"][0, 0], M)
    assert torch.equal(parts["distance"][0, 0] * M, D)  # printed for survivors alone
    want = torch.where(M > 0, 0.3**D, 0)
    want = want / want.sum(-1, keepdim=True)
    close(y[0, 0], want, 1e-12)
    close(tra_attention(2 * eye, k, eye, decay)[0, 0], want, 1e-12)


def test_a_tra_row_without_survivors_is_zero_and_sees_no_future():
    q, k, v = random_qkv(B=1, H=1, Tq=9, Tk=9, dtype=torch.float32)
    k[:, :, :6] = -q[:, :, 5:6]  # query 5 rejects every key so far, and would love the later ones
    k[:, :, 6:] = q[:, :, 5:6] * 9
    inputs = [x.requires_grad_() for x in (q, k, v, torch.full((1, 1, 9), -0.1))]
    y = tra_attention(*inputs)
    assert (y[0, 0, 5] == 0).all() and (y[0, 0, 6:] != 0).any()
    y[0, 0, 5].sum().backward()
    assert all((x.grad == 0).all() for x in inputs)
    v2 = v.detach().clone()
    v2[:, :, 6:] = 1e6
    assert (tra_attention(q, k, v2, inputs[3])[0, 0, :6] == y[0, 0, :6]).all()


def test_rope_logits_depend_on_the_distance_alone_and_start_as_q_k():
    turn = rope.Turn("", 8, 16, 16)
    q, k, _ = random_qkv(B=1, H=1, Tq=1, Tk=1, d=8)

    def at(x, i):
        return rope.turned(x, turn.waves(torch.tensor([i])))

    def logit(i, j):
        return (at(q, i) * at(k, j)).sum()
    close(logit(7, 7), (q * k).sum(), 1e-5)
    close(logit(107, 100), logit(7, 0), 1e-4)
    close(at(q, 5), turned(q, [5]), 1e-12)


def test_sinusoidal_and_learned_and_label_embeddings():
    x = torch.zeros(1, 30, 18)
    y = encoding("sinusoidal").embed(x, torch.arange(30), None)[0]
    for t, c in ((0, 0), (7, 3), (29, 8)):
        angle = t / 10000 ** (2 * c / 18)
        close(y[t, 2 * c:2 * c + 2], torch.tensor([math.sin(angle), math.cos(angle)]), 1e-6)
    ones = encoding("sinusoidal").embed(torch.ones_like(x), torch.arange(30), None)[0]
    close(ones, y + math.sqrt(18), 1e-6)
    learned = encoding("learned")
    close(learned.embed(x[:, :8], torch.arange(8), None)[0], learned.wpe.weight, 0)
    with pytest.raises(ValueError, match="learned positions end at block_size=8"):
        learned.embed(x, torch.arange(30), None)
    label = encoding("label")
    drawn = label.embed(x, torch.arange(30), None)[0]
    rows = [int((label.wpe.weight == row).all(1).nonzero()[0]) for row in drawn]
    assert rows == sorted(set(rows)) and len(rows) == 30
    again = label.embed(x, torch.arange(30), None)[0]
    assert not torch.equal(again, drawn)  # drawn anew, at test time too
    with pytest.raises(ValueError, match="do not fit in n_label=100"):
        label.embed(torch.zeros(1, 101, 18), torch.arange(101), None)


# -----------------------------------------------------------------------------
# a layer, and where the norms sit

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
    positions, rest = list(range(T)), []
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
        rest = [model.pos_emb[n % len(model.pos_emb)], dict(key=None, val=v, sep=own)[config.gates]]
    elif module is classics:
        rest = [model.pe[n % len(model.pe)].bias]
    elif module is ssmax:
        rest = [attn.s]
    elif module is path:
        w, beta = F.normalize(split(convolved(attn, x)), dim=-1), 2 * per_head(attn.w_b).sigmoid()
        rest = [w, beta]
    if module is rope:
        at = torch.arange(k.size(2))
        near = 0 if attn.nope else model.window
        rest = [at, rope.Turn("", q.size(-1), config.block_size, len(at), near, attn.nope)]
    if (module is rope and not attn.nope) or getattr(config, "pe", "") == "rope":
        q, k = turned(q, positions), turned(k, positions)
    if module is diff:
        q, k = (torch.cat([turned(h, positions) for h in z.chunk(2, -1)], -1) for z in (q, k))
        start = 0.8 - 0.6 * math.exp(-0.3 * n)
        lam = (attn.l_q1 @ attn.l_k1).exp() - (attn.l_q2 @ attn.l_k2).exp() + start
        y = module.literal(q, k, v, lam)[0]
        y = (1 - start) * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        y = y * attn.ln_head.weight
    else:
        y = module.literal(q, k, v, *rest)[0]
    return y.transpose(1, 2).reshape(B, T, C) @ attn.c_proj.weight.T


@pytest.mark.parametrize("name, changes", [
    ("nope", {}), ("nope", dict(qk_norm=True)), ("rope", {}), ("rope_nope", {}),
    ("alibi", {}), ("kerple", {}),
    ("relative", {}), ("cable", {}), ("cable", dict(qk_norm=True)), ("cable_nw", {}),
    ("k_cable", {}), ("k_cable_inside", {}), ("cable_nw_softplus", {}), ("fox", {}), ("tra", {}),
    ("tra", dict(qk_norm=False)), ("cope", {}), ("cope", dict(share=False)),
    ("cope", dict(qk_norm=True)), ("cope_val", {}),
    ("cope_sep", {}), ("diff", {}), ("postnorm", {}), ("postnorm", dict(pe="nope", qk_norm=True)),
    ("stick", {}), ("stick", dict(qk_norm=True)), ("ssmax", {}), ("ssmax", dict(qk_norm=True)),
    ("ssmax_ln", {}), ("path", {}), ("path", dict(qk_norm=True, rank=5, conv=1)),
    ("path", dict(conv=2))])
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
    if name.startswith("cope"):
        assert len(model.pos_emb) == (1 if model.config.share else 2)


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


@pytest.mark.parametrize("name", ["nope", "fox", "tra", "rope", "path"])
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


# -----------------------------------------------------------------------------
# every model: no row sees the future, and a cache changes nothing

SCHEMES = [(name, norm) for name in MODELS for norm in ("pre", "post")
           if names.models()[name][0] is not model_postnorm]
SCHEMES += [("postnorm", norm) for norm in model_postnorm.SCHEMES]


@pytest.mark.parametrize("name, norm", SCHEMES)
def test_causality(name, norm, monkeypatch):
    """No later token changes an earlier output: not by a bit, on a GPU not beyond rounding."""
    model, T = make(name, norm=norm, qk_norm=norm == "post"), 24
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
    model, T, cuts = make(name), 60, [0, 5, 6, 7, 30, 31, 45, 60]
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
            prompt, n = idx[:1, :T - 18], 18
            fast = list(sample.generate(model, prompt, n, temperature=0))
            slow = written_without_a_cache(model, prompt, n, temperature=0)
            assert torch.equal(torch.cat(fast, 1), slow)


# -----------------------------------------------------------------------------
# one tiny run

def test_train_resume_sample_eval(tmp_path):
    home = write_notes(tmp_path)
    out, _ = command(home, "train.py", "--data", "notes", "--max_iters", 2, "--eval_interval", 1,
                     "--no-evaluate", *TINY_FLAGS, "--out_dir", "run")
    assert "val loss" in out and (home / "run" / "best.pt").exists()
    out, _ = command(home, "train.py", "--resume", "run", "--max_iters", 3, "--no-evaluate")
    assert "iter 3/3" in out
    assert list(losses(home / "run")[0]) == [1, 2, 3]
    out, _ = command(home, "sample.py", "run", "--prompt", "alpha", "--max_new_tokens", 4)
    assert out.startswith("alpha")
    command(home, "eval.py", "run", "--lengths", 16, 32, "--tokens", 256)
    row, = json.loads((home / "run" / "eval.json").read_text())["runs"]
    assert row["iter"] == 3 and set(row["perplexity"]) == {"16", "32"}
    assert 1 < row["perplexity"]["16"] < 300
