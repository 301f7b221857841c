"""lab: the random search, and its entries in reproduce.py."""
import functools
import itertools
import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

import train
from lab import search, tables
from lab.papers import postnorm
from tests.helpers import close, command, rng

SET = dict(data="set_complement", n=34, block_size=2, batch_size=4, longest=33, at=[3, 3])
DYCK = dict(data="dyck", k=2, m=2, block_size=4, batch_size=4, longest=16, at=[5, 16])
MAXIMUM = dict(data="max_retrieval", batch_size=4, longest=32, at=[32, 32])


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


@pytest.mark.parametrize("panel, scheme, exact, compiled", [
    (dict(data="set_complement", n=8, block_size=3), "pre", True, False),
    (dict(data="set_complement", n=8, block_size=3), "peri", False, True),
    (dict(data="max_retrieval"), "post", False, True),
    (dict(data="dyck", block_size=8), "peri_init", False, False)])
def test_stacked_trials_equal_the_same_trials_one_by_one(
        panel, scheme, exact, compiled, monkeypatch):
    """Other clips, decays and rates each; on samples, or on the target distribution itself."""
    graphs = []
    monkeypatch.setattr(train, "compiled", lambda function, device: torch.compile(
        function, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True))
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
        logits, averages = search.fit(list(models()), trials, batch, steps, compiled=compiled)
        assert len(graphs) == compiled
        for i, (model, trial) in enumerate(zip(models(), trials)):
            start, *wanted = trained_alone(model, trial, batch, steps)
            assert (wanted[0] - start).abs().max() > 1e-3
            for weights, want in zip(averages.values(), wanted):
                close(weights[i], want, 1e-4)
            with torch.no_grad():
                close(logits(averages["raw"], x)[i], logits_of(model(x)), 1e-3)


def test_a_search_that_is_stopped_goes_on_to_the_same_weights(tmp_path):
    task, trials = search.make_task(SET), [search.draw_trial(rng(i)) for i in range(2)]
    asked = []

    def searched(last, saved=None):
        torch.manual_seed(0)
        models = [search.small_model(task, "peri") for _ in trials]

        def batch(step):
            if step > last:
                raise KeyboardInterrupt
            asked.append(step)
            return task.batch("train", 4, rng(step))
        return search.fit(models, trials, batch, 8, saved=saved)[1]
    with pytest.raises(KeyboardInterrupt):
        searched(5, tmp_path / "state.pt")
    resumed = searched(8, tmp_path / "state.pt")
    assert asked == [1, 2, 3, 4, 5, 6, 7, 8]
    for name, weights in searched(8).items():
        assert weights.equal(resumed[name])
    (tmp_path / "state.pt").write_text("cut off")
    with pytest.raises(SystemExit, match="remove it"):
        searched(8, tmp_path / "state.pt")


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


@pytest.mark.parametrize("name, panel", [
    ("postnorm_fig2", MAXIMUM), ("postnorm_fig3", DYCK), ("postnorm_theorem", SET),
    ("postnorm_bema", SET)])
def test_a_random_search_is_made_and_goes_on(name, panel, home, here, monkeypatch):
    """A scheme that the entry is given later is added to the panel's file."""
    monkeypatch.setattr(search, "SEQUENCES", 16)
    monkeypatch.setattr(search, "theorem", functools.partial(search.theorem, 34, 10.0, 4))
    entry, found = postnorm.ENTRIES[name], []
    for n in (4 if "theorem" in entry["cpu"] else 2, 4, 4):  # whose figure has all four
        here(**{name: entry | dict(cpu=entry["cpu"] | dict(trials=2, steps=2, panels={"a": panel}),
                                   schemes=entry["schemes"][:n])})
        out, _ = command(home, "reproduce.py", name, "--device", "cpu")
        found.append(json.loads((home / "results/runs" / f"{name}.cpu/a.json").read_text()))
        for scheme in entry["schemes"][:n]:
            assert f"| {scheme} | " in out and len(found[-1]["schemes"][scheme]["trials"]) == 2
    assert found[1] == found[2]
    assert found[0]["schemes"].items() <= found[1]["schemes"].items()
    assert ("largest difference from the formula" in out) == (name == "postnorm_theorem")
    assert ("best, EMA" in out) == (name == "postnorm_bema")


def test_a_search_of_other_settings_ends_in_a_line(home, here):
    words = ["lab.search", "mine", "--panel", "a", "--device", "cpu", "--out", home / "a.json"]
    part = dict(trials=2, steps=2, panels={"a": SET})
    for change, wrong in (({}, ""), (dict(steps=3), "steps 2, not 3"),
                          (dict(trials=3), "trials 2, not 3"), ({}, "")):
        here(mine=dict(metric="tvd", schemes=["pre"], cpu=part | change))
        assert wrong in command(home, *words, code=bool(wrong))[1]
    here(mine=dict(cpu=dict(rows={})))
    assert "no random search" in command(home, *words, code=1)[1]


def test_the_paired_sign_test():
    """Against the tail of a fair coin counted one by one, and by hand."""
    for n in range(7):
        flips = list(itertools.product((0, 1), repeat=n))
        for wins in range(n + 1):
            uneven = [abs(sum(flip) - n / 2) >= abs(wins - n / 2) for flip in flips]
            pairs = [(0.0, 1.0)] * wins + [(1.0, 0.0)] * (n - wins)
            numbers = tables.sign_test(pairs + [(3.0, 3.0), (None, 1.0), (1.0, None)])
            assert numbers == (wins, n, pytest.approx(np.mean(uneven)))


def test_a_row_of_a_search_by_hand():
    """Less is better; the best is chosen by validation; a diverged trial is of no pair."""
    def trials(*pairs):
        return dict(trials=[dict(tvd=dict(raw=dict(validation=a, test=b))) for a, b in pairs])
    schemes = dict(pre=trials(*[(0.5, 0.9)] * 6, (None, None)),
                   post=trials((0.1, 0.4), (0.2, 0.3), *[(0.9, 0.5)] * 4, (0.9, 0.5)))
    pre, post = (row for _, row in tables.rows_of_panel("tvd", schemes, ["pre"]))
    assert pre == {"median": "0.9000", "best": "0.9000", "better than pre": "-"}
    assert post == {"median": "0.5000", "best": "0.4000", "better than pre": "6 of 6*"}
