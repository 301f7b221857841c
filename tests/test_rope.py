"""rivals/rope.py: each repair and each kind of layer against a double loop over complex numbers."""
import math

import numpy as np
import pytest
import torch

from common import names
from common.attention import attention_inputs
from rivals.rope import REPAIRS, SINKS, literal
from tests.helpers import INF, TINY_FLAGS, close, command, complaint, make

L = 12
# block_size is L, but where a training with a repair goes on from a shorter one
LAYERS = [("rope", dict(repair=repair)) for repair in REPAIRS] + [
    ("rope", dict(base=100.0, rotary_share=3 / 8, repair="yarn")),
    ("rope", dict(block_size=48, original_length=L, repair="pi")),
    ("rope", dict(block_size=48, original_length=L, repair="yarn")),
    ("rope_window", {}), ("rope_nope", {}), ("rope_nope", dict(repair="log_n")),
    ("rope_nope", dict(window=0, repair="log_n")), ("rope_nope", dict(window=0, repair="yarn"))]


def frequencies(repair, d, s, base, share):
    """theta'_c, 0 for pairs that do not turn; and the factor of the logits where all have one."""
    theta = [base ** (-2 * c / d) for c in range(d // 2)]
    turn = round(share * d / 2)
    if repair == "pi":
        theta = [x / s for x in theta]
    if repair == "ntk":
        theta = [(base * s ** (d / (d - 2))) ** (-2 * c / d) for c in range(d // 2)]
    theta[turn:] = [0] * (d // 2 - turn)
    if repair != "yarn":
        return theta, 1
    lo, hi = (d * math.log(L / (2 * math.pi * r)) / (2 * math.log(base)) for r in (32, 1))
    lo, hi = max(math.floor(lo), 0), min(math.ceil(hi), d - 1)
    ramp = [min(1, max(0, (c - lo) / max(hi - lo, 1e-3))) for c in range(d // 2)]
    return [x * (1 - r) + r * x / s for x, r in zip(theta, ramp)], (0.1 * math.log(s) + 1) ** 2


def by_hand(q, k, v, repair, window, theta, factor):
    """One head's output for q, k, v (T, d), which are not turned yet, a key at a time."""
    T, d = q.shape
    q, k = (torch.complex(*x.chunk(2, 1)).numpy() for x in (q, k))  # channels c and c + d / 2
    W, out = L // 2, []
    G = max(1, math.ceil((T - W) / (L - W)))
    for i in range(T):
        m = max(1, math.log(i + 1) / math.log(L)) if repair == "log_n" else factor
        logits, values = [], []
        for j in range(i + 1):
            dist = i - j
            if dist >= (L if repair == "window" else window):
                continue
            if repair == "sinks" and j < SINKS:
                dist = min(i, L - 1) - j
            elif repair == "sinks" and dist >= L - SINKS:
                continue
            if repair == "rerope":
                dist = min(dist, W)
            if repair == "selfextend" and dist >= W:
                dist = i // G - j // G + W - W // G
            spun = q[i] * k[j].conj() * np.exp(1j * dist * np.array(theta))
            logits.append(m * spun.real.sum() / math.sqrt(d))
            values.append(v[j])
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        out.append(weights @ torch.stack(values))
    return torch.stack(out)


@pytest.mark.parametrize("T", [L, 41])
@pytest.mark.parametrize("name, changes", LAYERS)
@torch.no_grad()
def test_a_layer_is_its_formula(name, changes, T):
    """What runs and what is literal; in rope_nope layer 1 of 2 has no positions."""
    model = make(name, **dict(n_head=2, block_size=L) | changes).double()
    config, ran = model.config, []
    for block in model.h:
        block.attn.register_forward_pre_hook(lambda _, args: ran.append(args[0]))
        block.attn.c_proj.register_forward_pre_hook(lambda _, args: ran.append(args[0]))
    with attention_inputs(model) as calls:
        model(torch.randint(61, (1, T)))
    for layer, args in enumerate(calls):
        x, y = ran[2 * layer:2 * layer + 2]
        nope = name == "rope_nope" and layer == 1
        repair = config.repair
        if name == "rope_nope" and nope != (repair == "log_n"):
            repair = ""  # it is for the other kind
        window = config.window or INF
        theta, m = frequencies(repair, 16, max(1, max(T, config.block_size) / L), config.base,
                               config.rotary_share)
        if nope:
            theta, window = [0] * 8, INF
        qkv = (x @ model.h[layer].attn.c_attn.weight.T)[0].view(T, 3, 2, 16)
        want = torch.stack([by_hand(*head.unbind(1), repair, window, theta, m)
                            for head in qkv.unbind(2)])[None]
        close(y, want.transpose(1, 2).flatten(2), 1e-9)
        got, parts = literal(*args)
        close(got, want, 1e-9)
        assert parts["step"].any() != nope


@torch.no_grad()
def test_a_window_keeps_constant_memory():
    """Only a layer without positions keeps the keys of a whole text."""
    for model, kept in ((make("rope", repair="sinks"), [SINKS + 24, SINKS + 24]),
                        (make("rope_nope"), [7, 150])):  # it doubles
        cache = names.new_cache(model, 80)
        for _ in range(8):
            model(torch.zeros(1, 10, dtype=torch.long), cache=cache)
        assert [cache.buf[f"k{layer}"].size(2) for layer in range(2)] == kept


@pytest.mark.slow
def test_lengths_that_vary_are_compiled_as_one_graph():
    torch.compiler.reset()
    whole = dict(backend="eager", fullgraph=True)  # a break would be an error
    rope = torch.compile(make("rope"), **whole)
    bert = torch.compile(make("bert_cable").encode, **whole)  # what it scores depends on the data
    for T in (16, 12, 9):
        idx = torch.randint(3, 61, (2, T))
        rope(idx, idx), bert(idx)


def test_repairs_that_cannot_be_are_refused():
    for repair in set(REPAIRS[1:]) - {"log_n"}:
        with pytest.raises(SystemExit, match=f"repair={repair}: layers with a window see no"):
            make("rope_nope", repair=repair)
    model = make("rope", repair="yarn")
    with pytest.raises(ValueError, match="yarn: the cache announced 5 tokens, more came"):
        model(torch.zeros(1, 6, dtype=torch.long), cache=names.new_cache(model, 5))


def test_set_changes_a_run_at_test_time(home):
    command(home, "train.py", "--model", "rope", "--data", "notes", "--max_iters", 1,
            "--no-evaluate", *TINY_FLAGS, "--out_dir", "run")
    said, _ = command(home, "eval.py", "run", "--set", "repair=window", "--lengths", 16, 64)
    assert "run (repair=window)" in said
    command(home, "sample.py", "run", "--set", "repair=sinks", "--max_new_tokens", 40)
    takes = "rivals/rope.py takes NAME=VALUE at test time, NAME one of: repair"
    for change, says in (("n_head=1", takes), ("repair=yam", "is not one of pi")):
        assert says in complaint(home, "eval.py", "run", "--set", change)
