"""experiments: the random search, and its entries in reproduce.py."""
import functools
import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

import experiments
from experiments import search, tables
from experiments.papers import postnorm
from tests.helpers import close, command, rng


def test_random_search_draws_from_its_ranges():
    trials = [search.draw_trial(rng(i), peak=3e-2) for i in range(400)]
    ranges = dict(beta1=(0.8, 0.98), beta2=(0.9, 0.9999), weight_decay=(1e-4, 1),
                  grad_clip=(0.1, 10), learning_rate=(1e-4, 3e-2), warmup=(1e-3, 0.1),
                  final=(0, 0.1), eta=(0.1, 1), rho=(1, 1e3), kappa=(0.3, 1))
    assert trials[0].keys() == ranges.keys()
    assert trials[3] == search.draw_trial(rng(3), peak=3e-2)
    for name, (low, high) in ranges.items():
        ys = np.array([t[name] for t in trials])
        assert low <= ys.min() and ys.max() <= high, name
        assert ys.max() - ys.min() > 0.8 * (high - low), name
        if name in ("weight_decay", "grad_clip", "learning_rate", "warmup", "rho"):
            place = np.mean(np.log(ys / low)) / np.log(high / low)
            assert place == pytest.approx(0.5, abs=0.06), name  # log-uniform
    assert all(t["beta1"] < t["beta2"]**0.5 for t in trials)
    assert 0.4 < np.mean([t["final"] == 0 for t in trials]) < 0.6


def logits_of(out):
    return out[0] if isinstance(out, tuple) else out


def trained_alone(model, trial, batch, steps):
    """One trial by torch's AdamW and clip_grad_norm_ -> weights before, after, and their BEMA."""
    t, groups = trial, [dict(params=[], weight_decay=trial["weight_decay"]), dict(params=[])]
    for name, p in model.named_parameters():
        decays = p.dim() == 2 and name not in ("E", "wte.weight")
        groups[0 if decays else 1]["params"].append(p)
    optimizer = torch.optim.AdamW(groups, betas=(t["beta1"], t["beta2"]), weight_decay=0)
    start = ema = parameters_to_vector(model.parameters()).detach()
    warmup = max(1, round(t["warmup"] * steps))
    for step in range(1, steps + 1):
        x, y = map(torch.from_numpy, batch(step))
        y = y.flatten(0, -2) if y.is_floating_point() else y.flatten()  # distributions, or samples
        F.cross_entropy(logits_of(model(x)).flatten(0, -2), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t["grad_clip"])
        decay = t["final"] + (1 - t["final"]) * (steps - step) / (steps - warmup)
        for group in optimizer.param_groups:
            group["lr"] = t["learning_rate"] * min(step / warmup, decay)
        optimizer.step()
        optimizer.zero_grad()
        beta = (t["rho"] + step)**-t["kappa"]
        ema = (1 - beta) * ema + beta * parameters_to_vector(model.parameters()).detach()
    now = parameters_to_vector(model.parameters()).detach()
    return start, now, ema, ema + (t["rho"] + steps)**-t["eta"] * (now - start)


@pytest.mark.parametrize("panel, scheme, exact", [
    (dict(data="set_complement", n=8, block_size=3), "peri", False),
    (dict(data="set_complement", n=8, block_size=3), "pre", True),
    (dict(data="max_retrieval"), "post", False),
    (dict(data="dyck", block_size=8), "peri_init", False)])
def test_stacked_trials_equal_the_same_trials_one_by_one(panel, scheme, exact):
    """Other clips, decays and rates each; on samples, or on the target distribution itself."""
    task, steps = search.make_task(panel), 8
    trials = [search.draw_trial(rng(i), 1e-2) for i in range(3)]

    def models():
        for i in range(3):
            torch.manual_seed(i)
            yield search.small_model(task, scheme)

    def batch(step):
        x, y = task.batch("train", 8, rng(step))
        return x, task.target(torch.from_numpy(x)).numpy() if exact else y
    x = torch.from_numpy(task.batch("iid", 4, rng())[0])
    with sdpa_kernel(SDPBackend.MATH):
        logits, averages = search.fit(list(models()), trials, batch, steps)
        for i, (model, trial) in enumerate(zip(models(), trials)):
            start, *wanted = trained_alone(model, trial, batch, steps)
            assert (wanted[0] - start).abs().max() > 1e-3
            for weights, want in zip(averages.values(), wanted):
                close(weights[i], want, 1e-4)
            with torch.no_grad():
                close(logits(averages["raw"], x)[i], logits_of(model(x)), 1e-3)


def test_measure_by_length():
    """Weights that answer with the target itself, with nothing, or with what may not follow."""
    task = search.make_task(dict(data="set_complement", n=6, block_size=5))

    def answers(_, x):
        p = task.target(x)
        return torch.stack((p.log().clamp(min=-50), torch.zeros_like(p), (p == 0).float()))
    lengths, scores = search.measure(task, answers, [0, 0, 0], 20, rng())
    assert lengths == [[t, t] for t in range(1, 6)]
    wanted = torch.tensor([[0.0] * 5, [t / 6 for t in range(1, 6)]])
    close(torch.from_numpy(scores["tvd"][:2]), wanted, 1e-6)
    assert (scores["precision"][0] > 10).all()
    assert (scores["precision"][1] == 0).all() and (scores["precision"][2] == -1).all()


SET = dict(data="set_complement", n=6, block_size=2, batch_size=4, longest=5, at=[3, 3])
EXACT = SET | dict(n=8, longest=7, at=[4, 4], exact=True)
DYCK = dict(data="dyck", k=2, m=2, block_size=4, batch_size=4, longest=16, at=[5, 16])
MAXIMUM = dict(data="max_retrieval", batch_size=4, longest=32, at=[32, 32])


def small(name, panels):
    """One of the papers' random searches, of two steps."""
    entry = postnorm.ENTRIES[name]
    schemes = entry["schemes"] if "none" in entry["schemes"] else ("pre", "peri")
    return entry | dict(cpu=dict(trials=2, steps=2, panels=panels), schemes=schemes)


@pytest.mark.parametrize("name, panels", [
    ("postnorm_fig2", {"a": MAXIMUM}), ("postnorm_fig3", {"a": DYCK}),
    ("postnorm_theorem", {"a": EXACT}), ("postnorm_bema", {"a": SET})])
def test_every_random_search_is_made_and_put_in_a_table(name, panels, home, here, monkeypatch):
    monkeypatch.setattr(search, "SEQUENCES", 16)
    monkeypatch.setattr(search, "theorem", functools.partial(search.theorem, 8, 10.0, 4))
    here(**{name: small(name, panels)})
    out, _ = command(home, "reproduce.py", name, "--device", "cpu")
    for scheme in experiments.find(name, "cpu").entry["schemes"]:
        assert f"| {scheme} | 2 |" in out
    assert ("largest difference from the formula" in out) == (name == "postnorm_theorem")
    assert ("median, EMA" in out) == (name == "postnorm_bema")


def trial(metric, test, validation=None):
    scores = dict(test=test, validation=test if validation is None else validation)
    return {"finite": True, metric: dict(raw=scores, bema=scores)}


def table_of(metric, **schemes):
    schemes = {name: dict(trials=trials) for name, trials in schemes.items()}
    panels = [dict(name="a panel", at=[3, 3], schemes=schemes)]
    texts = tables.search_tables(metric, panels)
    return "\n\n".join(part for pair in texts for part in pair).splitlines()


def test_the_paired_sign_test():
    """Against the tail of a fair coin counted one by one, and by hand."""
    for n in range(7):
        flips = list(itertools.product((0, 1), repeat=n))
        for wins in range(n + 1):
            uneven = [abs(sum(flip) - n / 2) >= abs(wins - n / 2) for flip in flips]
            pairs = [(0.0, 1.0)] * wins + [(1.0, 0.0)] * (n - wins)
            numbers = tables.sign_test(pairs + [(3.0, 3.0), (None, 1.0), (1.0, None)])
            assert numbers == (wins, n, pytest.approx(np.mean(uneven)))
    assert tables.sign_test([(1, 2)] * 6 + [(2, 1)] * 2)[2] == pytest.approx(74 / 256)  # 6 of 8
    pre = [trial("auc", y) for y in (0.5, 0.6, 0.7, 0.9, 0.4)]
    peri = [trial("auc", y) for y in (0.6, 0.7, 0.8, 0.8, 0.4)]  # more is better: 3 of 4
    control = [trial("auc", y) for y in (0.5, 0.6, 0.9, 0.8, 0.4)]
    table = table_of("auc", pre=pre, peri=peri, pre_final=control)
    assert table[4].endswith("| - | 1 of 2, p = 1 |") and table[6].endswith("| 1 of 2, p = 1 | - |")
    assert table[5].endswith("| 3 of 4, p = 0.62 | 2 of 3, p = 1 |")
