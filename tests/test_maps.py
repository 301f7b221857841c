"""figures/maps.py: pictures of what a model attends to and counts."""
import re
import types

import numpy as np
import pytest
import torch

from common.checkpoint import load_run
from common.names import make_task
from figures import maps
from tests.helpers import command, complaint, drawn, is_png, make, rng


def test_maps_of_reach(home, trained):
    """How much lies farther back than a window of training, 16: of the last half of 39 tokens."""
    out, _ = command(trained, "figures.maps", "reach", "tra", "--length", 40,
                     "--out", home / "r.png")
    run = load_run(trained / "tra")
    x, _ = make_task(run.config | dict(block_size=40)).batch("dense", 1, rng([0, 0]))
    a = maps.look(run.model, torch.from_numpy(x))[0]["attention"]
    near = sum(a[:, i, i - 15:i + 1].sum(-1) for i in range(20, 39)) / a[:, 20:].sum((1, 2))
    shares = re.search(r"farther back than 16 tokens: (.*)", out)[1].split()
    assert list(map(float, shares)) == pytest.approx(100 - 100 * near, abs=0.06)


def test_maps_of_what_heads_count(home, trained):
    """The mean step of every symbol, at scored queries."""
    run = load_run(trained / "tra")
    args = types.SimpleNamespace(split=None, length=12, seed=3, sequences=5)
    sorts, means = maps.steps_by_sort(run, args)
    assert sorts == ["0", "1", "i", "r", "w"] and means.shape == (1, 2, 5)
    task = make_task(run.config | dict(block_size=12))
    total, times = np.zeros((2, 5)), np.zeros(5)
    for n in range(5):
        x, y = task.batch(task.splits[-1], 1, np.random.default_rng([3, n]))
        step = maps.look(run.model, torch.from_numpy(x))[0]["step"]
        for i, j in zip(*np.tril_indices(x.shape[1])):
            if y[0, i] != -1:
                sort = sorts.index(task.show(x[0])[j])
                total[:, sort] += step[:, i, j]
                times[sort] += 1
    assert times.min() > 0 and np.allclose(means[0], total / times, atol=1e-6)
    command(trained, "figures.maps", "counts", "tra", "cable", "--sequences", 2,
            "--out", home / "c.png")
    assert is_png(home / "c.png")


def test_maps_of_a_task_and_of_text(trained, home, monkeypatch):
    monkeypatch.setitem(maps.STYLE, "figure.dpi", 30)
    for words in (("attention", trained / "tra", "--split", "dense", "--kinds", "qk", "bias"),
                  ("steps", trained / "cable", "--prompt", "alpha beta")):
        command(home, "figures.maps", *words, "--out", "m", draw=True)
        assert is_png(home / "m.png")
        (home / "m.png").unlink()
    said = complaint(home, "figures.maps", "steps", trained / "tra", "--prompt", "x")
    assert "--prompt is for models of text" in said
    said = complaint(home, "figures.maps", "steps", trained / "tra", "--head", 2)
    assert "--head 2: the model has heads 0 to 1" in said


def test_a_map_shows_what_the_model_computes(trained, monkeypatch):
    """Titles, tokens, and under every token the attention that the literal form has."""
    figures = drawn(monkeypatch)
    command(trained, "figures.maps", "attention", "tra", "--length", 12)
    axes = [ax for ax in figures[0].axes if ax.get_title()]
    parts = "attention", "step", "distance", "position"
    assert [ax.get_title() for ax in axes] == [f"{p}, head {h}" for p in parts for h in (0, 1)]
    run = load_run(trained / "tra")
    task = make_task(run.config | dict(block_size=12))
    x, _ = task.batch("iid", 1, rng(0))
    assert [t.get_text() for t in axes[0].get_xticklabels()] == task.show(x[0])
    layer = maps.look(run.model, torch.from_numpy(x))[-1]
    alive = layer["step"].any(-1)  # a query without a key attends to nothing
    assert np.abs(layer["attention"].sum(-1) - alive).max() < 1e-5
    for n, ax in enumerate(axes[:2]):
        shown = ax.images[-1].get_array()
        assert shown.mask[0, 1] and not shown.mask[1, 0]  # what is later is not shown
        assert np.abs(np.tril(shown.filled(0) - layer["attention"][n])).max() < 1e-6
    command(trained, "figures.maps", "attention", "tra", "--head", 1, "--kinds", "step")
    command(trained, "figures.maps", "steps", "tra", "--layer", -1, "--head", 1)
    assert figures[1].axes[0].get_title() == "step, head 1"
    assert figures[2].axes[0].get_title("right") == "layer 0, head 1"


def test_position_is_the_attention_if_all_contents_were_alike():
    model, idx = make("alibi"), torch.randint(0, 61, (1, 10))
    steps = np.arange(10)[:, None] - np.arange(10)
    for slope, position in zip((1 / 4, 1 / 16, 1 / 64, 1 / 256),
                               maps.look(model, idx)[0]["position"]):
        assert np.abs(position - np.tril(np.exp(-slope * np.abs(steps)))).max() < 1e-6
    parts = maps.look(make("tra"), idx)[0]
    dropped = np.isinf(parts["bias"]) & np.tri(10, dtype=bool)
    assert dropped.any() and (parts["position"][dropped] == 0).all()
