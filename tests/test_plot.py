"""figures/plot.py, experiments/figures.py: figures of JSON."""
import json

import pytest

from figures import plot
from tests.helpers import complaint, drawn


def lines_of(ax):
    """{label: its points}"""
    points = {}
    for line in ax.lines:
        points[line.get_label()] = list(zip(line.get_xdata(), line.get_ydata()))
    return points


def text_row(label, perplexity, seed=1):
    return dict(label=label, model=label, name=f"{label}-{seed}", seed=seed, iter=1, config={},
                checkpoint="ckpt.pt", block_size=16, perplexity=perplexity,
                by_position=[[0, 7, 2.0], [8, 15, 1.0]])


def write(path, rows):
    path.write_text(json.dumps(dict(runs=rows)))
    return str(path)


def test_seeds_become_one_line():
    def row(model, seed, **config):
        config = dict(seed=seed, out_dir="x", model=model) | config
        return dict(model=model, name=f"{model}-{seed}", iter=5, checkpoint="c", config=config)
    rows = [row("cable", 1), row("cable", 2), row("rope", 1), row("cable", 3, n_layer=9)]
    groups = plot.grouped(rows)
    assert {k: len(v) for k, v in groups.items()} == {"cable": 2, "rope": 1, "cable-3": 1}
    labelled = [r | dict(label=label) for r, label in zip(rows, "abab")]
    assert {k: len(v) for k, v in plot.grouped(labelled).items()} == {"a": 2, "b": 2}


def test_a_seed_that_was_resumed_keeps_its_own_steps():
    """Its log has a row more; of two seeds only the steps of both stayed, a straight diagonal."""
    xs, ys = plot.aligned([{10: 1.0, 20: 3.0, 30: 5.0}, {10: 3.0, 14: 5.0, 30: 1.0}])
    assert xs == [10, 14, 20, 30]
    assert ys.tolist() == [pytest.approx([1, 1.8, 3, 5]), pytest.approx([3, 5, 3.5, 1])]


def test_files_and_folders_are_drawn_together_and_a_damaged_one_is_named(
        monkeypatch, tmp_path, capsys):
    figures, folder = drawn(monkeypatch), tmp_path / "runs" / "table.cpu"
    folder.mkdir(parents=True)
    for seed, value in ((1, 2.0), (2, 4.0)):
        write(folder / f"a-{seed}.json", [text_row("a", {"16": value, "32": 1.0}, seed)])
    (folder / "b-1.json").write_text("{")
    other = write(tmp_path / "eval.json", [text_row("b", {"16": 5.0, "32": 6.0})])
    plot.main(["lengths", str(folder), other])
    assert "b-1.json, or it is damaged" in capsys.readouterr().err
    lines = lines_of(figures[0].axes[0])
    assert lines["a"] == [(16, 3), (32, 1)] and lines["b"] == [(16, 5), (32, 6)]
    plot.main(["lengths", str(folder), other, "--rows", "b", "a"])
    assert list(lines_of(figures[1].axes[0]))[:2] == ["b", "a"]


def test_mistakes_are_one_line(trained, home):
    write(home / "text.json", [text_row("rope", {"16": 2.0})])
    for words, said in (("lengths nowhere", "could not read nowhere"),
                        ("scores text.json", "has 'scores', which this figure is of"),
                        ("lengths text.json --rows rop", "no row 'rop': did you mean rope?"),
                        ("lengths text.json --out x.xyz", "use .png, .pdf or .svg")):
        assert said in complaint(home, "figures.plot", *words.split()), words
    said = complaint(home, "figures.plot", "errors", trained / "rope", "--metric", "exact_mach")
    assert "there is no exact_mach: did you mean exact_match?" in said
