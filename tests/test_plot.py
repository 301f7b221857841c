"""plot.py: figures."""
import errno
import json
import math
import resource
import shutil
import sys
from pathlib import Path

import pytest

import data
import data.text
import plot
import runs
from tests.helpers import INF, ROOT, command, drawn, is_png, labels_of, log_of, written


def test_many_rows_at_several_lengths_become_a_grid(tmp_path, monkeypatch):
    """Every number is in its cell, the mean over seeds; a length that a row has not is empty."""
    def run(label, seed, *values):
        scores = {str(T): dict(iid=dict(exact_match=dict(value=v, low=v, high=v)))
                  for T, v in zip((64, 256), values)}
        return dict(label=label, model="x", name="x", seed=seed, config={}, iter=1,
                    checkpoint="c", block_size=64, scores=scores)
    rows = [run(f"m{n}", 1, n / 100, n / 50) for n in range(11)]
    rows += [run("m3", 2, 0.13, 0.16), run("ends", 1, 0.5)]
    (tmp_path / "x.json").write_text(json.dumps(dict(splits=["iid"], runs=rows)))
    drawn = []
    monkeypatch.setattr(runs, "write_figure", lambda fig, *_: drawn.append(fig))
    plot.main(["scores", str(tmp_path / "x.json")])
    ax, = drawn[0].axes
    found = {tuple(t.get_position()): t.get_text() for t in ax.texts}
    want = {(x, y): f"{n:g}" for y in range(11) for x, n in ((0, y), (1, 2 * y))}
    want |= {(0, 3): "8", (1, 3): "11", (0, 11): "50", (1, 11): "-"}
    assert found == want
    assert [t.get_text() for t in ax.get_yticklabels()] == [*(f"m{n}" for n in range(11)), "ends"]
    plot.plt.close(drawn[0])


def test_a_split_without_scores_is_drawn_empty_and_small_errors_large(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    found = dict(iid=dict(answer_error=dict(value=0.02, low=0.01, high=0.05)))
    row = dict(label="m", model="x", name="x", seed=1, config={}, iter=1, checkpoint="c",
               block_size=8, scores={"8": found})
    (tmp_path / "x.json").write_text(json.dumps(dict(splits=["iid", "half"], runs=[row])))
    plot.main(["scores", str(tmp_path / "x.json")])
    iid, half = figures[0].axes
    assert iid.get_xlim()[1] == pytest.approx(5.6) and half.get_xlim()[1] > 100
    assert len(iid.lines) == 4 and len(half.lines) == 2  # two of them for the legend


def test_many_rows_by_step_become_a_grid_and_of_one_length_dots(tmp_path, monkeypatch):
    figures, path = drawn(monkeypatch), tmp_path / "x.json"
    rows = []
    for n in range(11):
        history = [[it, dict(iid=dict(answer_error=it * n / 100))] for it in (1, 2)]
        rows.append(dict(label=f"m{n}", history=history))
    path.write_text(json.dumps(dict(runs=rows)))
    plot.main(["errors", str(path)])
    ax, = figures[0].axes
    found = {tuple(t.get_position()): t.get_text() for t in ax.texts}
    assert found == {(x, y): f"{(x + 1) * y:g}" for x in (0, 1) for y in range(11)}
    seed = dict(label="m4", history=[[it, dict(iid=dict(answer_error=0.5))] for it in (1, 2)])
    path.write_text(json.dumps(dict(runs=[*rows, seed])))
    plot.main(["errors", str(path)])
    texts = figures.pop(1).axes[0].texts
    said = [t.get_text() for t in texts]
    inks = {t.get_text(): t.get_color() for t in texts}
    assert inks["4 to 50"] == inks["27"] and set(inks.values()) == {"black", "white"}
    assert "27" in said and "4 to 50" in said and "8 to 50" in said and len(said) == 24
    best = [p.get_facecolor() for p in ax.patches][0]
    assert best == plot.WORST_TO_BEST(1.0)  # of an error, 0 is the best
    rows = [dict(label=f"m{n}", model="x", name="x", seed=seed, block_size=8, config={}, iter=1,
                 checkpoint="c", perplexity={"8": 2.0 + n + seed}, by_position=[[0, 8, 1.0]])
            for n in range(11) for seed in (1, 2)]
    path.write_text(json.dumps(dict(runs=rows, lengths=[8], tokens=9, data=dict(sha256=""))))
    plot.main(["lengths", str(path)])
    ax, = figures[1].axes
    dots = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]
    assert dots == [([3.0 + n, 4.0 + n], [n, n]) for n in range(11)]
    for row in rows:  # of several lengths: rows of panels, those that end before the last one last
        row["perplexity"]["16"] = 99.0 - row["perplexity"]["8"]
    for row in rows[-2:]:
        row["perplexity"].popitem()
        row["block_size"] = 4
    path.write_text(json.dumps(dict(runs=rows, lengths=[8, 16], tokens=9, data=dict(sha256=""))))
    plot.main(["lengths", str(path)])
    above, below = ([text.get_text() for text in figures[2].axes[n].get_legend().get_texts()]
                    for n in (1, 3))
    assert above[:6] == [f"m{n}" for n in (9, 8, 7, 6, 5, 4)]
    assert below[:5] == [f"m{n}" for n in (3, 2, 1, 0, 10)]
    names = [f"m{n}" for n in range(11)]
    plot.main(["lengths", str(path), "--models", *names])
    said = [name for name in labels_of(figures[3]) if name in names]
    assert said == names
    rows[0]["perplexity"]["16"] = math.nan  # of m0
    path.write_text(json.dumps(dict(runs=rows, lengths=[8, 16], tokens=9, data=dict(sha256=""))))
    plot.main(["lengths", str(path)])
    said = [name for name in labels_of(figures[4]) if name in names]
    assert said == [f"m{n}" for n in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10)]
    titled = [bool(ax.get_title()) for ax in figures[2].axes]
    assert titled == [True, True, False, False]
    assert [ax.get_title("left") for ax in figures[2].axes] == [
        "", "", "rows 7 to 11 of 11, by perplexity at 16", ""]
    dotted = [{line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":"
               and line.get_label() == "training length"} for ax in figures[2].axes]
    assert dotted == [{8}, {8}, {8, 4}, {8, 4}]


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_a_full_disk_leaves_the_previous_picture(kind, tmp_path, monkeypatch):
    """savefig meets a disk with room for 1,000 bytes."""
    out = tmp_path / f"picture.{kind}"
    out.write_text("whole")
    fig, _ = plot.panels(1, 2, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=f"could not write .*picture.{kind}"):
            runs.write_figure(fig, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert out.read_text() == "whole" and list(tmp_path.iterdir()) == [out]
    plot.plt.close(fig)
    full = OSError(errno.ENOSPC, "No space left on device")

    def write_bytes(*args):
        raise full
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="disk full, or a limit reached: .* previous one is whole"):
        runs.write_figure(fig, out)


def test_seeds_become_one_line():
    def row(model, seed, **config):
        config = dict(seed=seed, out_dir="x", model=model) | config
        return dict(model=model, name=f"{model}-{seed}", iter=5, checkpoint="ckpt.pt",
                    config=config)
    rows = [row("cable", 1), row("cable", 2), row("rope", 1), row("cable", 3, n_layer=9)]
    groups = plot.grouped(rows)
    assert {k: len(v) for k, v in groups.items()} == {"cable": 2, "rope": 1, "cable-3": 1}
    labelled = [r | dict(label=label) for r, label in zip(rows, "abab")]
    assert {k: len(v) for k, v in plot.grouped(labelled).items()} == {"a": 2, "b": 2}


def test_every_line_looks_different_and_a_method_has_its_colour():
    for labels in ([f"cable {n}" for n in range(30)], [f"own{n}" for n in range(30)],
                   [f"{model}, P = {n}" for n in range(8) for model in ("tra", "rope", "mine")]):
        looks = plot.looks(labels).values()
        assert len({(look["color"], look["ls"], look["marker"]) for look in looks}) == len(labels)
    one = plot.looks(["cable", "rope", "mine", "out/tra-flipflop-nano", "rope (this repository's)"])
    other = plot.looks(["rope, 3M bytes", "alibi", "tra", "cable post"])
    assert one["cable"]["color"] == other["cable post"]["color"]
    assert one["rope"]["color"] == other["rope, 3M bytes"]["color"]
    assert one["out/tra-flipflop-nano"]["color"] == other["tra"]["color"] == "black"


def test_lines_that_coincide_stay_visible():
    """Of three on the same points each shows, by turns; where one leaves, it is whole again."""
    x, low = [1, 2, 3, 4], [1.0, 1, 1, 1]
    curves = {"first": (x, [low]), "second": (x, [low]), "third": (x, [[1.0, 1, 5, 9]])}
    fig, axes = plot.panels(1, 5, 4)
    plot.draw(axes[0, 0], curves, plot.looks(curves))
    plot.legend(axes)
    assert labels_of(fig) == list(curves)
    parts = {}
    for line in axes[0, 0].lines:
        if line.get_linestyle() != "None" and len(line.get_xdata()) > 1:
            parts.setdefault(plot.matplotlib.colors.to_hex(line.get_color()), []).append(line)
    first, second, third = parts.values()
    assert [line.is_dashed() for line in first] == [False] * len(first)
    assert all(line.is_dashed() for line in second)
    assert [line.is_dashed() for line in third] == [True, False]
    assert [list(line.get_xdata()) for line in third] == [[1, 2], [2, 3, 4]]
    for lines in parts.values():  # none has lost a point
        assert sorted({x for line in lines for x in line.get_xdata()}) == x
    # two dashed ones do not lie on each other: the second begins where the third pauses
    dashes = [line._unscaled_dash_pattern for line in (second[0], third[0])]
    assert dashes[0][1] == dashes[1][1] and dashes[0][0] != dashes[1][0]
    plot.plt.close(fig)


def contrast_of(result):
    """A committed curve that has the setting of a run in eval.json."""
    r = result["runs"][0]
    names = "data", "tokenizer", "block_size", "n_layer", "n_head", "n_embd", "max_iters"
    settings = {name: r["config"][name] for name in names}
    settings |= dict(tokens=result["tokens"], lengths=result["lengths"])
    return dict(model="rope", python="3.9.1", source=result["data"]["sha256"], settings=settings,
                perplexity={T: 2.0 for T in r["perplexity"]}, by_position=r["by_position"])


def test_the_committed_curve_is_drawn_dashed_where_its_setting_is_the_same(
        trained, home, monkeypatch):
    command(trained, "eval.py", "cable", "--out", home / "eval")
    contrast = contrast_of(json.loads((home / "eval.json").read_text()))
    figures = drawn(monkeypatch)

    def lines(**changes):
        (home / "results").mkdir(exist_ok=True)
        (home / "results" / "contrast.json").write_text(json.dumps(contrast | changes))
        command(home, "plot.py", "lengths", home / "eval.json")
        fig = figures.pop()
        left = fig.axes[0].lines
        dashed = [line for line in left if line.get_linestyle() == "--" and len(line.get_xdata())]
        assert all(set(line.get_ydata()) == {2.0} for line in dashed)
        return labels_of(fig), len(dashed)
    own = ["cable", "training length"]
    assert lines() == (["cable", "rope (this repository's)", "training length"], 1)
    named = "rope (this repository's,\non Python 3.9.1)"  # another version's text
    assert lines(source="other") == (["cable", named, "training length"], 1)
    for name, value in (("max_iters", 3), ("tokens", 9), ("lengths", [16]), ("n_layer", 2),
                        ("data", "stdlib"), ("block_size", 32)):
        changed = contrast["settings"] | {name: value}
        assert lines(settings=changed) == (own, 0), name
    assert lines(model="cable") == (own, 0)  # one's own run is of that model
    (home / "results" / "contrast.json").unlink()
    command(home, "plot.py", "lengths", home / "eval.json")
    assert labels_of(figures.pop()) == own


def test_the_committed_curve_is_that_of_the_first_command():
    """Its setting is what `python train.py --model cable` has, and ends up being scored on."""
    row = json.loads((ROOT / "results" / "contrast.json").read_text())
    defaults, task = data.text.Task.defaults["nano"], data.text.Task
    for name in ("n_layer", "n_head", "n_embd", "block_size", "max_iters"):
        assert row["settings"][name] == defaults[name]
    assert (row["settings"]["data"], row["settings"]["tokenizer"]) == (task.data, task.tokenizer)
    lengths = [defaults["block_size"] * m for m in (1, 2, 4, 8, 16)]
    assert row["settings"]["lengths"] == lengths and row["settings"]["tokens"] == 131072
    assert list(row["perplexity"]) == [str(T) for T in lengths]
    table = json.loads((ROOT / "results" / "cable_table1.cpu.json").read_text())
    same = [r for r in table["runs"] if r["model"] == row["model"]]
    assert row["perplexity"] in [r["perplexity"] for r in same]


@pytest.mark.parametrize("perplexity", [1e308, 1e-308, INF, 0.0])
def test_a_perplexity_beyond_all_others_is_drawn(perplexity, tmp_path):
    row = dict(block_size=16, perplexity={"16": 2.0, "32": perplexity}, model="cable", name="x",
               by_position=[[0, 15, 1.0]], config={}, checkpoint="ckpt.pt", iter=1)
    whole = dict(data=dict(sha256=""), tokens=16, lengths=[16, 32], runs=[row])
    (tmp_path / "x.json").write_text(json.dumps(whole))
    command(tmp_path, "plot.py", "lengths", "x.json", draw=True)
    assert is_png(tmp_path / "x.png")


def test_curves_and_errors_have_a_line_for_every_run(trained, monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    command(trained, "plot.py", "curves", "cable", "learned", "rope")
    assert labels_of(figures[0]) == ["cable", "learned", "rope"]
    assert [ax.get_title() for ax in figures[0].axes] == ["training", "validation"]
    command(trained, "plot.py", "errors", "tra", "rope", "--metric", "glitch_rate")
    assert labels_of(figures[1]) == ["tra", "rope"]
    assert [ax.get_title() for ax in figures[1].axes] == ["iid", "sparse", "dense"]
    assert figures[1].axes[0].get_ylabel() == "glitch rate (%)"
    points = [p for line in figures[1].axes[0].lines if line.get_linestyle() == "None"
              for p in zip(line.get_xdata(), line.get_ydata())]
    rates = [(r["iter"], 100 * r["scores"]["iid"]["glitch_rate"]) for name in ("tra", "rope")
             for r in log_of(trained / name) if "scores" in r]
    assert set(rates) <= set(points)
    shutil.copytree(trained / "cable", tmp_path / "cable-my.txt-nano")  # a folder, not a JSON
    command(trained, "plot.py", "curves", tmp_path / "cable-my.txt-nano")
    assert labels_of(figures[2]) == ["cable-my.txt-nano"]
    monkeypatch.chdir(tmp_path / "cable-my.txt-nano")
    plot.main(["curves", ".", str(tmp_path / "cable-my.txt-nano"), "--out", "x.png"])
    assert set(labels_of(figures.pop())) == {".", str(tmp_path / "cable-my.txt-nano")}
    plot.main(["curves", ".", "./", "--out", "x.png"])
    assert labels_of(figures.pop()) == ["cable-my.txt-nano"]
    shutil.copytree(trained / "tra", tmp_path / "tra")  # another run in a folder of the same name
    command(trained, "plot.py", "curves", "tra", tmp_path / "tra", "--out", tmp_path / "x.png")
    assert labels_of(figures[3]) == ["tra", str(tmp_path / "tra")]
    rows = [dict(label="tra", loss=[[1, 2.0]], val_loss=[[1, 2.0]])]  # and a row of this name
    (tmp_path / "x.json").write_text(json.dumps(dict(runs=rows)))
    plot.main(["curves", str(tmp_path / "tra"), str(tmp_path / "x.json")])
    assert labels_of(figures.pop()) == [str(tmp_path / "tra"), "tra"]


@pytest.mark.slow
def test_every_committed_result_is_drawn_with_a_whole_legend(monkeypatch, tmp_path):
    """Perplexity, scores, errors by step, searches, speed: every row has its line or its tick."""
    figures, folder = drawn(monkeypatch), ROOT / "results"
    monkeypatch.setattr(sys, "stdout", written())
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        kinds = []
        if "panels" in result:
            kinds = ["trials"]
        elif "attention" in result and "runs" not in result:
            kinds = ["attention"]
        elif "runs" in result:
            kinds = ["scores", "errors"] if "columns" in result else ["lengths"]
            kinds = ["matrix", "reading"] if "cells" in result else kinds
            kinds = ["scores"] if "scores" in result["runs"][0] and kinds == ["lengths"] else kinds
            kinds = ["ndcg"] if "search" in result["runs"][0] else kinds
            kinds = ["curves"] if "losses" in result else kinds
        assert kinds or path.name.startswith(("bench.", "contrast", "stress")), path.name
        for kind in kinds:
            plot.main([kind, str(path)])
            figures[-1].draw_without_rendering()
            said = " ".join(labels_of(figures[-1]))
            ticks = [t.get_text() for ax in figures[-1].axes for t in ax.get_yticklabels()]
            names = {r["label"] if "label" in r else r["model"] for r in result.get("runs", [])}
            for panel in result.get("panels", []):
                if "theorem" not in result:
                    names |= {f"{scheme}, median" for scheme in panel["schemes"]}
            for rows in result.get("attention", {}).values() if kind == "attention" else ():
                names |= rows.keys()
            assert all(name in said or name in ticks for name in names), (path.name, kind, said)
        plot.plt.close("all")
