"""experiments: the random search, and its entries in reproduce.py."""
import functools
import importlib
import itertools
import json
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

import runs
from experiments import minimal, tables
from tests.helpers import close, command, complaint, is_png, rng


def test_random_search_draws_from_its_ranges():
    trials = [minimal.draw_trial(rng(i), peak=3e-2) for i in range(400)]
    ranges = dict(beta1=(0.8, 0.98), beta2=(0.9, 0.9999), weight_decay=(1e-4, 1),
                  grad_clip=(0.1, 10), learning_rate=(1e-4, 3e-2), warmup=(1e-3, 0.1),
                  final=(0, 0.1), eta=(0.1, 1), rho=(1, 1e3), kappa=(0.3, 1))
    assert trials[0].keys() == ranges.keys()
    assert trials[3] == minimal.draw_trial(rng(3), peak=3e-2)
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
    task, steps = runs.make_task(panel), 20
    trials = [minimal.draw_trial(rng(i), 1e-2) for i in range(3)]

    def models():
        found = []
        for i in range(3):
            torch.manual_seed(i)
            found.append(minimal.small_model(task, scheme))
        return found

    def batch(step):
        x, y = task.batch("train", 8, rng(step))
        return x, task.target(torch.from_numpy(x)).numpy() if exact else y
    x = torch.from_numpy(task.batch("iid", 4, rng())[0])
    with sdpa_kernel(SDPBackend.MATH):
        logits, found = minimal.fit(models(), trials, batch, steps)
        for i, (model, trial) in enumerate(zip(models(), trials)):
            start, *wanted = trained_alone(model, trial, batch, steps)
            assert (wanted[0] - start).abs().max() > 1e-3
            for weights, want in zip((found["raw"], found["ema"], found["bema"]), wanted):
                close(weights[i], want, 1e-4)
            with torch.no_grad():
                close(logits(found["raw"], x)[i], logits_of(model(x)), 1e-3)


def test_measure_by_length():
    """Weights that answer with the target itself, with nothing, or with what may not follow."""
    task = runs.make_task(dict(data="set_complement", n=6, block_size=5))

    def answers(_, x):
        p = task.target(x)
        return torch.stack((p.log().clamp(min=-50), torch.zeros_like(p), (p == 0).float()))
    lengths, found = minimal.measure(task, answers, [0, 0, 0], 20, rng())
    assert lengths == [[t, t] for t in range(1, 6)]
    wanted = torch.tensor([[0.0] * 5, [t / 6 for t in range(1, 6)]])
    close(torch.from_numpy(found["tvd"][:2]), wanted, 1e-6)
    assert (found["precision"][0] > 10).all()
    assert (found["precision"][1] == 0).all() and (found["precision"][2] == -1).all()
    task = runs.make_task(dict(data="dyck", block_size=70))

    def right(_, x):
        return task.target(x)[None].log().clamp(min=-50)
    lengths, found = minimal.measure(task, right, [0], 200, rng())
    assert lengths[0] == [1, 2] and lengths[-1] == [69, 70] and np.abs(found["tvd"]).max() < 1e-6
    # at first the depth is 0, or 1, everywhere
    assert np.isnan(found["auc"][0, 0]) and (found["auc"][0, 1:] == 1).all()


def test_measure_on_sets():
    task = runs.make_task(dict(data="max_retrieval"))

    def classes(_, x):  # right, and always the first class, and diverged
        best = x[torch.arange(len(x)), x[..., 0].argmax(1), 1:]
        first = torch.eye(10)[0].expand_as(best)
        return torch.stack((best, first, torch.full_like(best, torch.nan)))
    lengths, found = minimal.measure_sets(task, classes, [0, 0, 0], 2000, rng(), [16, 32])
    assert lengths == [[16, 16], [32, 32]] and (found["accuracy"][0] == 1).all()
    assert np.abs(found["accuracy"][1] - 0.1).max() < 0.04
    assert np.isnan(found["accuracy"][2]).all()


def searches():
    """The papers' random searches, of two steps."""
    postnorm = importlib.import_module("experiments.postnorm")
    found = dict(postnorm.SEARCHES)
    panels = dict(
        postnorm_fig1=postnorm.set_panels(4, (6, 2)) | postnorm.exact_panels(4, (8, 2)),
        postnorm_theorem=postnorm.exact_panels(4, (8, 2)),
        postnorm_bema=postnorm.set_panels(4, (6, 2)),
        postnorm_fig3=postnorm.dyck_panels(4, (2, 2, 4)),
        postnorm_fig7=postnorm.dyck_panels(4, (2, 2, 4)),
        postnorm_fig4=postnorm.tomita_panels(4, 4, 12),
        postnorm_fig2={"small": dict(data="max_retrieval", batch_size=4, longest=32, at=(32, 32))})
    assert panels.keys() == found.keys()
    for name, small in panels.items():
        found[name] = found[name] | dict(cpu=dict(trials=2, steps=2, panels=small))
        if name in ("postnorm_fig3", "postnorm_fig7", "postnorm_fig4"):
            found[name]["schemes"] = "pre", "peri"
        if "also" in found[name]:
            found[name]["also"] = dict(theorem=functools.partial(minimal.theorem, 8, 10.0, 4))
    return found


def test_a_random_search_from_one_command(home, here):
    """Trials in the JSON with their settings, the table, the picture; nothing is made twice."""
    here(**searches())
    words = "reproduce.py", "postnorm_fig1", "--trials", 2, "--device", "cpu"
    out, _ = command(home, *words)
    assert out.count("$ python -m experiments.minimal") == 12
    assert re.search(r"done, .* left\] n-6-trained-on-2-pre: iter 2/2 \| median loss \S+ \|", out)
    result = json.loads((home / "results" / "postnorm_fig1.cpu.json").read_text())
    names = [panel["name"] for panel in result["panels"]]
    assert names == ["n = 6, trained on 2", "n = 8, trained on 2, p* itself"]
    for panel in result["panels"]:
        assert list(panel["schemes"]) == list(minimal.SCHEMES)
        assert panel["lengths"][-1] == [panel["n"] - 1] * 2
        for found in panel["schemes"].values():
            drawn_ = [minimal.draw_trial(rng([1337, i]), 3e-2) for i in range(2)]
            assert [t["hyperparameters"] for t in found["trials"]] == drawn_
            for t in found["trials"]:
                raw, middle = t["tvd"]["raw"], panel["n"] // 2 - 1
                assert t["finite"] and len(raw["by_length"]) == panel["n"] - 1
                assert raw["test"] == pytest.approx(raw["by_length"][middle], abs=1e-5)
    page = (home / "results" / "README.md").read_text()
    ys = [t["tvd"]["bema"]["test"] for t in result["panels"][0]["schemes"]["peri"]["trials"]]
    table = page.partition("TVD, n = 6, trained on 2, at 3:")[2].partition("\n\nTVD, ")[0]
    row, = re.findall(r"\| peri \| 2 \| 0 \|.*", table)
    assert f"| {np.median(ys):.4f} |" in row and is_png(home / "results" / "postnorm_fig1.cpu.png")
    out, _ = command(home, *words[:2], "--trials", 1, "--device", "cpu")  # two are there
    assert "experiments.minimal" not in out
    path = next((home / "out" / "postnorm_fig1.cpu").glob("*.json"))
    path.write_text('{"half')
    out, _ = command(home, *words)
    assert out.count("$ python -m experiments.minimal") == 1


@pytest.mark.parametrize("entry_, metric", [
    ("fig2", "accuracy"), ("fig3", "tvd"), ("fig4", "auc"), ("theorem", "precision"),
    ("bema", "tvd")])
def test_every_random_search_is_made_drawn_and_put_in_a_table(entry_, metric, home, here):
    here(**searches())
    words = "reproduce.py", f"postnorm_{entry_}", "--device", "cpu"
    out, _ = command(home, *words, draw=entry_ in ("fig3", "theorem"))
    assert "iter 2/2" in out and is_png(home / "results" / f"postnorm_{entry_}.cpu.png")
    result = json.loads((home / "results" / f"postnorm_{entry_}.cpu.json").read_text())
    assert result["metric"] == metric and result["trials"] == 2
    page = (home / "results" / "README.md").read_text()
    for panel in result["panels"]:
        for scheme, found in panel["schemes"].items():
            assert f"| {scheme} | 2 |" in page
            kinds = ["raw", "ema", "bema"] if entry_ == "bema" else ["raw", "bema"]
            assert all(list(t[metric]) == kinds for t in found["trials"])
    assert ("largest difference from the formula" in page) == (entry_ == "theorem")
    if entry_ == "fig3":  # whose trials are those of fig7
        out, _ = command(home, "reproduce.py", "postnorm_fig7", "--device", "cpu")
        assert "experiments.minimal" not in out and "\nAUC, k = 2, m = 2, " in out


def test_a_random_search_by_hand(home):
    """One panel and scheme, as reproduce.py calls it."""
    panel = dict(data="dyck", k=1, m=2, block_size=4, batch_size=4, longest=8, at=[5, 8])
    panel = json.dumps(panel)
    words = "experiments.minimal", "--panel", panel, "--scheme", "peri", "--steps", 2, "--trials", 1
    out, _ = command(home, *words, "--out", "a.json")
    assert re.search(r"^iter 2/2 \| median loss \d", out, re.M)
    found = json.loads((home / "a.json").read_text())
    assert found["lengths"][-1] == [8, 8] and len(found["trials"]) == 1
    assert found["settings"]["panel"] == json.loads(panel)
    assert command(home, *words, "--out", "a.json")[0] == ""  # it is there
    said = complaint(home, "experiments.minimal", "--panel", "{", "--scheme", "peri")
    assert "argument --panel" in said


def test_a_diverged_trial_is_counted_and_left_out():
    """In the JSON as null, in the table as a dash or a number of the others."""
    def trial(test, validation, finite=True):
        scores = dict(test=test, validation=validation, by_length=[test])
        return dict(finite=finite, tvd=dict(raw=scores, bema=scores))
    panels = [dict(name="a panel", at=[3, 3], schemes=dict(
        pre=dict(trials=[trial(0.5, 0.1), trial(0.2, 0.3), trial(None, None, False)]),
        post=dict(trials=[trial(None, None, False)]), peri=dict(trials=[trial(0.25, 0.1)])))]
    table = tables.search_table(dict(metric="tvd", panels=panels)).splitlines()
    assert table[0] == "TVD, a panel, at 3:"
    assert table[4].startswith("| pre | 3 | 1 | 0.3500 | 0.5000 |")
    assert table[5] == "| post | 1 | 1 | - | - | - | - | 0 of 0, p = 1 | - |"
    assert table[6].endswith("| 0.2500 | 0.2500 | 0.2500 | 0.2500 | 1 of 1, p = 1 | 0.50 |")


def test_the_paired_sign_test():
    """Against the tail of a fair coin counted one by one, and by hand."""
    for n in range(9):
        flips = list(itertools.product((0, 1), repeat=n))
        for wins in range(n + 1):
            uneven = [abs(sum(one) - n / 2) >= abs(wins - n / 2) for one in flips]
            pairs = [(0.0, 1.0)] * wins + [(1.0, 0.0)] * (n - wins)
            found = tables.sign_test(pairs + [(3.0, 3.0), (None, 1.0), (1.0, None)])
            assert found == (wins, n, pytest.approx(np.mean(uneven)))
    assert tables.sign_test([(1, 2)] * 8)[2] == 2 / 256  # 8 of 8
    assert tables.sign_test([(1, 2)] * 6 + [(2, 1)] * 2)[2] == pytest.approx(74 / 256)  # 6 of 8

    def trials(*values):
        return [dict(finite=True, auc=dict(raw=dict(test=y, validation=y, by_length=[y]),
                                           bema=dict(test=y, validation=y, by_length=[y])))
                for y in values]
    schemes = dict(pre=dict(trials=trials(0.5, 0.6, 0.7, 0.9, 0.4)),
                   peri=dict(trials=trials(0.6, 0.7, 0.8, 0.8, 0.4)))  # more is better: 3 of 4
    text = tables.search_table(dict(metric="auc", panels=[
        dict(name="a panel", at=[3, 3], schemes=schemes)]))
    assert text.splitlines()[4].endswith("| - |") and "better than pre |" in text
    assert text.splitlines()[5].endswith("| 3 of 4, p = 0.62 |") and "not corrected" in text
    schemes["pre_final"] = dict(trials=trials(0.5, 0.6, 0.9, 0.8, 0.4))  # a control of its own
    text = tables.search_table(dict(metric="auc", panels=[
        dict(name="a panel", at=[3, 3], schemes=schemes)]))
    assert text.splitlines()[4].endswith("| - | 1 of 2, p = 1 |")
    assert text.splitlines()[5].endswith("| 3 of 4, p = 0.62 | 2 of 3, p = 1 |")
    assert text.splitlines()[6].endswith("| 1 of 2, p = 1 | - |")
    for trial, ema in zip(schemes["pre"]["trials"], (0.6, 0.7, 0.6, None, 0.4)):  # of one alone
        trial["auc"]["ema"] = dict(test=ema, validation=ema, by_length=[ema])
    one = dict(metric="auc", panels=[dict(name="a panel", at=[3, 3], schemes=schemes)])
    assert tables.search_table(one) == text
    del schemes["peri"], schemes["pre_final"]
    head, _, row = tables.search_table(one).splitlines()[2:5]
    assert head.endswith("| median, EMA | best, EMA | median, BEMA | best, BEMA | better than pre "
                         "| EMA better than without | BEMA better than without |")
    assert row.endswith("| - | 2 of 3, p = 1 | 0 of 0, p = 1 |")
