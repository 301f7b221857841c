"""rivals/rope.py: each repair against a float64 double loop, whole and over a cache."""
import cmath
import math

import pytest
import torch

from rivals.rope import REPAIRS, SINKS, Cache, Turn, literal, rope_attention, turned
from tests.helpers import TINY_FLAGS, close, command, complaint, make

L = 12
LENGTHS = 5, L, 3 * L + 5


def frequencies(repair, d, T):
    """theta'_c, and the factor of the logits where it is the same for all."""
    s, base, c = max(1, T / L), 10000, range(d // 2)
    theta = [base ** (-2 * n / d) for n in c]
    if repair == "pi":
        theta = [x / s for x in theta]
    if repair == "ntk":
        theta = [(base * s ** (d / (d - 2))) ** (-2 * n / d) for n in c]
    if repair != "yarn":
        return theta, 1
    lo, hi = (d * math.log(L / (2 * math.pi * r)) / (2 * math.log(base)) for r in (32, 1))
    lo, hi = max(math.floor(lo), 0), min(math.ceil(hi), d - 1)
    share = [min(1, max(0, (n - lo) / max(hi - lo, 1e-3))) for n in c]
    return ([x * (1 - r) + r * x / s for x, r in zip(theta, share)],
            (0.1 * math.log(s) + 1) ** 2)


def by_hand(q, k, v, repair):
    """q, k, v (T, d), not turned yet -> (T, d), a key at a time."""
    T, d = q.shape
    theta, factor = frequencies(repair, d, T)
    W, out = L // 2, []
    G = max(1, math.ceil((T - W) / (L - W)))
    for i in range(T):
        m = max(1, math.log(i + 1) / math.log(L)) if repair == "log_n" else factor
        logits, values = [], []
        for j in range(i + 1):
            dist = i - j
            if repair == "window" and dist >= L:
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
    for H, d in ((2, 16), (3, 4)):
        torch.manual_seed(T)
        q, k, v = (torch.randn(1, H, T, d, dtype=torch.float64) for _ in range(3))
        at, turn = torch.arange(T), Turn(repair, d, L, T)
        spun = turned(q, turn.waves(at, turn.m(at[:, None]))), turned(k, turn.waves(at))
        want = torch.stack([by_hand(q[0, h], k[0, h], v[0, h], repair) for h in range(H)])[None]
        close(rope_attention(*spun, v, at, turn), want, 1e-9)
        close(literal(*spun, v, at, turn)[0], want, 1e-9)
        for n in (1, 9):  # fewer queries than keys, as over a cache
            fewer = spun[0][:, :, -n:], spun[1], v, at, turn
            close(rope_attention(*fewer), want[:, :, -n:], 1e-9)


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("pieces", [[1] * 41, [17, 1, 20, 3]])
def test_cached_is_whole_and_no_later_token_matters(repair, pieces):
    model = make("rope", repair=repair, block_size=L, n_head=2).double()
    idx = torch.randint(61, (2, 41))
    whole, _ = model(idx)
    cache = Cache(41)
    with torch.no_grad():
        close(torch.cat([model(x, cache=cache)[0] for x in idx.split(pieces, 1)], 1), whole, 1e-9)
        other = idx.clone()
        other[:, 30:] = 0
        assert torch.equal(model(other)[0][:, :30], whole[:, :30])


def test_frequencies_at_the_ends_of_ntk_and_yarns_ramp():
    d, T = 32, 4096
    plain, ntk, yarn = (Turn(repair, d, 256, T) for repair in ("", "ntk", "yarn"))
    assert ntk.theta[0] == plain.theta[0]
    assert ntk.theta[-1].item() == pytest.approx(plain.theta[-1].item() / 16, rel=1e-12)
    share = (1 - yarn.theta / plain.theta) / (1 - 1 / 16)
    close(share, (torch.arange(16, dtype=torch.float64) / 7).clamp(max=1), 1e-12)
    assert yarn.m(None) == pytest.approx(1.631, abs=1e-3)


@pytest.mark.parametrize("repair", ["window", "sinks"])
def test_a_window_keeps_constant_memory(repair):
    model, cache = make("rope", repair=repair, block_size=L), Cache(100)
    with torch.no_grad():
        for _ in range(40):
            model(torch.zeros(1, 7, dtype=torch.long), cache=cache)
    assert cache.t == 280 and max(x.size(2) for x in cache.buf.values()) <= L + SINKS


def test_set_changes_a_run_at_test_time(home):
    command(home, "train.py", "--model", "rope", "--data", "notes", "--max_iters", 1,
            "--no-evaluate", *TINY_FLAGS, "--out_dir", "run")
    before = (home / "run" / "ckpt.pt").read_bytes()
    said, _ = command(home, "eval.py", "run", "--set", "repair=window", "--lengths", 16, 64)
    assert "run (repair=window)" in said and (home / "run" / "eval.repair-window.json").exists()
    assert (home / "run" / "ckpt.pt").read_bytes() == before
    command(home, "sample.py", "run", "--set", "repair=sinks", "--max_new_tokens", 40)
    takes = "rivals/rope.py takes NAME=VALUE at test time, NAME one of: repair"
    for change, says in (("repiar=pi", takes), ("n_head=1", takes),
                         ("repair=yam", "is not one of pi"), ("repair", takes)):
        assert says in complaint(home, "eval.py", "run", "--set", change)
