"""rivals/rope.py: each kind of layer against a float64 double loop, whole and over a cache."""
import cmath
import math

import pytest
import torch

from common.attention import attention_inputs
from rivals.rope import REPAIRS, SINKS, Cache, Turn, literal, rope_attention, turned
from tests.helpers import INF, TINY_FLAGS, N, close, command, complaint, make, mlp_by_hand

L = 12
LENGTHS = 5, L, 3 * L + 5
MIXED = [("rope_nope", dict()), ("rope_nope", dict(repair="log_n")),
         ("rope_nope", dict(window=0, repair="log_n")),
         ("rope_nope", dict(window=0, repair="yarn")), ("rope_window", dict())]


def frequencies(repair, d, T, base=10000, turn=99):
    """theta'_c, 0 after `turn` of them, and the factor of the logits where all have the same."""
    s, c = max(1, T / L), range(d // 2)
    theta = [base ** (-2 * n / d) for n in c]
    if repair == "pi":
        theta = [x / s for x in theta]
    if repair == "ntk":
        theta = [(base * s ** (d / (d - 2))) ** (-2 * n / d) for n in c]
    theta[turn:] = [0] * len(theta[turn:])
    if repair != "yarn":
        return theta, 1
    lo, hi = (d * math.log(L / (2 * math.pi * r)) / (2 * math.log(base)) for r in (32, 1))
    lo, hi = max(math.floor(lo), 0), min(math.ceil(hi), d - 1)
    share = [min(1, max(0, (n - lo) / max(hi - lo, 1e-3))) for n in c]
    return ([x * (1 - r) + r * x / s for x, r in zip(theta, share)],
            (0.1 * math.log(s) + 1) ** 2)


def by_hand(q, k, v, repair, window=INF, nope=False, **more):
    """q, k, v (T, d), not turned yet -> (T, d), a key at a time."""
    T, d = q.shape
    theta, factor = frequencies(repair, d, T, **more)
    if nope:
        theta = [0] * (d // 2)
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
            spun = sum((complex(q[i, c], q[i, c + d // 2]) * complex(k[j, c], -k[j, c + d // 2])
                          * cmath.exp(1j * theta[c] * dist)).real for c in range(d // 2))
            logits.append(m * spun / math.sqrt(d))
            values.append(v[j])
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        out.append(weights @ torch.stack(values))
    return torch.stack(out)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("repair", REPAIRS)
def test_a_repair_is_its_formula(repair, T):
    for H, d, base, pairs in ((2, 16, 10000.0, 8), (3, 4, 10000.0, 2), (2, 16, 100.0, 3)):
        torch.manual_seed(T)
        q, k, v = (torch.randn(1, H, T, d, dtype=torch.float64) for _ in range(3))
        at, turn = torch.arange(T), Turn(repair, d, L, T, base=base, share=2 * pairs / d)
        spun = turned(q, turn.waves(at, turn.m(at[:, None]))), turned(k, turn.waves(at))
        want = torch.stack([by_hand(q[0, h], k[0, h], v[0, h], repair, base=base, turn=pairs)
                            for h in range(H)])[None]
        close(rope_attention(*spun, v, at, turn), want, 1e-9)
        close(literal(*spun, v, at, turn)[0], want, 1e-9)
        for n in (1, 9):  # fewer queries than keys, as over a cache
            fewer = spun[0][:, :, -n:], spun[1], v, at, turn
            close(rope_attention(*fewer), want[:, :, -n:], 1e-9)


@pytest.mark.parametrize("name, changes", MIXED)
def test_a_mixture_is_its_layers(name, changes):
    """Layer 0 has RoPE, and in rope_nope layer 1 has no positions; literal says the same."""
    model = make(name, **changes, block_size=L, n_head=2, n_embd=16).double()
    config, idx = model.config, torch.randint(61, (1, 3 * L - 1))
    with attention_inputs(model) as calls, torch.no_grad():
        got = model(idx)[0]
        x = model.wte.weight[idx]
        for layer, block in enumerate(model.h):
            nope = name == "rope_nope" and layer == 1
            near = INF if nope or not config.window else config.window
            repair = config.repair if nope == (config.repair == "log_n") else ""
            qkv = (N(x, block.ln_1, 1e-6) @ block.attn.c_attn.weight.T)[0].view(-1, 3, 2, 8)
            heads = [by_hand(*qkv[:, :, head].unbind(1), repair, near, nope) for head in range(2)]
            y, parts = literal(*calls[layer])
            close(y, torch.stack(heads)[None], 1e-9)
            assert parts["step"].any() != nope
            x = x + torch.cat(heads, -1) @ block.attn.c_proj.weight.T
            x = x + mlp_by_hand(N(x, block.ln_2, 1e-6), block.mlp)
        close(got, N(x, model.ln_f, 1e-6) @ model.wte.weight.T, 2e-6)


def test_without_positions_anywhere_it_is_the_plain_gpt():
    model, plain = make("rope_nope", nope_every=1), make("nope")
    idx = torch.randint(61, (2, 40))
    with torch.no_grad():
        assert torch.equal(model(idx)[0], plain(idx)[0])


@pytest.mark.parametrize("name, changes", [("rope", dict(repair=r)) for r in REPAIRS] + MIXED)
@pytest.mark.parametrize("pieces", [[1] * 41, [17, 1, 20, 3]])
def test_cached_is_whole_and_no_later_token_matters(name, changes, pieces):
    model = make(name, **changes, block_size=L, n_head=2).double()
    idx = torch.randint(61, (2, 41))
    whole, _ = model(idx)
    cache = Cache(41)
    with torch.no_grad():
        close(torch.cat([model(x, cache=cache)[0] for x in idx.split(pieces, 1)], 1), whole, 1e-9)
        other = idx.clone()
        other[:, 30:] = 0
        assert torch.equal(model(other)[0][:, :30], whole[:, :30])


@pytest.mark.slow
def test_lengths_that_vary_are_compiled_as_one_graph():
    torch.compiler.reset()
    whole = dict(backend="eager", fullgraph=True)  # a break would be an error
    rope = torch.compile(make("rope"), **whole)
    bert = torch.compile(make("bert_cable").encode, **whole)  # what it scores depends on the data
    for T in (16, 12, 9, 14):
        idx = torch.randint(3, 61, (2, T))
        rope(idx, idx), bert(idx)


@pytest.mark.parametrize("repair", ["", "rerope", "selfextend", "sinks"])
def test_what_comes_from_the_cpu_comes_once_for_all_layers(repair, monkeypatch):
    waves, made = Turn.waves, []
    monkeypatch.setattr(Turn, "waves", lambda *args: made.append(1) or waves(*args))
    make("rope", repair=repair, n_layer=3)(torch.zeros(1, 40, dtype=torch.long))
    assert len(made) == (4 if repair else 2)


@pytest.mark.parametrize("repair", ["window", "sinks"])
def test_a_window_keeps_constant_memory(repair):
    model, cache = make("rope", repair=repair, block_size=L), Cache(100)
    with torch.no_grad():
        for _ in range(40):
            model(torch.zeros(1, 7, dtype=torch.long), cache=cache)
    assert cache.t == 280 and max(x.size(2) for x in cache.buf.values()) <= L + SINKS


def test_only_a_layer_without_positions_keeps_a_whole_text():
    model, cache = make("rope_nope", window=5), Cache(60)
    with torch.no_grad():
        for _ in range(6):
            model(torch.zeros(1, 10, dtype=torch.long), cache=cache)
    assert [cache.buf[name].size(2) for name in ("k0", "v0", "k1", "v1")] == [5, 5, 70, 70]


@pytest.mark.parametrize("repair", ["pi", "yarn"])
def test_what_is_trained_on_at_a_greater_length_is_what_was_repaired(repair):
    longer = make("rope", repair=repair, block_size=48, original_length=12)
    x = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(0))
    close(longer(x)[0], make("rope", repair=repair, block_size=12)(x)[0], 1e-6)
    assert not torch.allclose(longer(x)[0], make("rope", block_size=48)(x)[0], atol=1e-3)
    close(longer(x[:, :9])[0], longer(x)[0][:, :9], 1e-5)  # in a shorter text s stays as trained


def test_log_n_of_a_window_of_one_token_is_finite():
    model = make("rope", repair="log_n", block_size=1)
    assert model(torch.zeros(1, 9, dtype=torch.long))[0].isfinite().all()


def test_repairs_of_layers_that_see_no_new_distance_are_refused():
    for name in ("rope_nope", "rope_window"):
        for repair in set(REPAIRS[1:]) - {"log_n" if name == "rope_nope" else ""}:
            with pytest.raises(SystemExit, match=f"repair={repair}: layers with a window see no"):
                make(name, repair=repair)


def test_set_changes_a_run_at_test_time(home):
    command(home, "train.py", "--model", "rope", "--data", "notes", "--max_iters", 1,
            "--no-evaluate", *TINY_FLAGS, "--out_dir", "run")
    before = (home / "run" / "ckpt.pt").read_bytes()
    said, _ = command(home, "eval.py", "run", "--set", "repair=window", "--lengths", 16, 64)
    assert "run (repair=window)" in said and (home / "run" / "eval.json").exists()
    assert (home / "run" / "ckpt.pt").read_bytes() == before
    command(home, "sample.py", "run", "--set", "repair=sinks", "--max_new_tokens", 40)
    takes = "rivals/rope.py takes NAME=VALUE at test time, NAME one of: repair"
    for change, says in (("repiar=pi", takes), ("n_head=1", takes),
                         ("repair=yam", "is not one of pi"), ("repair", takes)):
        assert says in complaint(home, "eval.py", "run", "--set", change)
