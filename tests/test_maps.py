"""figures/maps.py: pictures of what a model attends to and counts."""
import numpy as np
import pytest
import torch

from common.attention import attention_inputs, attention_module
from common.checkpoint import load_run
from figures import maps
from tests.helpers import command, drawn, make, rng


def test_a_map_shows_what_literal_says(trained, monkeypatch):
    figures = drawn(monkeypatch)
    run = load_run(trained / "tra")
    command(trained, "figures.maps", "attention", "tra", "--kinds", "bias")
    x, _ = maps.draw(maps.task_of(run, 0), "iid", 0)
    with attention_inputs(run.model) as calls:
        run.model(x)
    _, parts = attention_module(run.model).literal(*calls[0])
    for ax, bias in zip(figures[0].axes, parts["bias"][0].numpy(force=True)):
        shown = ax.images[-1].get_array()
        seen = np.tri(len(bias), dtype=bool) & np.isfinite(bias)  # not later, not dropped
        assert (shown.mask == ~seen).all()
        assert np.abs(shown - bias).max() < 1e-6


def test_within_is_how_much_is_on_the_last_tokens():
    """Of the queries of the second half."""
    a = np.tril(rng().random((39, 39)))
    near = []
    for n in range(1, 20):
        near.append(sum(a[i, i - n + 1:i + 1].sum() for i in range(20, 39)))
    share, = maps.within(a[None])
    assert share == pytest.approx(near / a[20:].sum())


def test_counts_are_the_mean_steps_of_every_sort(trained):
    """As scored queries see them."""
    run = load_run(trained / "tra")
    sorts, means = maps.steps_by_sort(run, "", 12, 3, sequences=1)
    task = maps.task_of(run, 12)
    x, y = maps.draw(task, "dense", [3, 0])
    step = maps.look(run.model, x)[0]["step"]
    scored, tokens = (y.numpy() != -1).T, np.array(task.show(x[0].numpy()))
    for sort, mean in zip(sorts, means[0].T, strict=True):
        seen = np.tril(scored & (tokens == sort))
        assert mean == pytest.approx(step[:, seen].mean(-1))


def test_position_is_the_attention_if_all_contents_were_alike():
    parts, = maps.look(make("alibi", n_layer=1), torch.randint(0, 61, (1, 10)))
    i = np.arange(10)
    for slope, position in zip((1 / 4, 1 / 16, 1 / 64, 1 / 256), parts["position"], strict=True):
        exact = np.tril(np.exp(-slope * (i[:, None] - i)))
        assert np.abs(position - exact).max() < 1e-6
