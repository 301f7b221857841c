"""figures/plot.py: figures of JSON; and every figure's command, on tiny runs."""
import json

import pytest

from figures import plot
from tests.helpers import ROOT, command, complaint, drawn


def lines_of(monkeypatch, tmp_path, result, *words):
    """{label: its ys} of the first panel of `lengths`."""
    figures = drawn(monkeypatch)
    (tmp_path / "eval.json").write_text(json.dumps(result))
    plot.main(["lengths", str(tmp_path), *words])
    return {line.get_label(): [*line.get_ydata()] for line in figures[0].axes[0].lines}


def test_lines_are_means_of_seeds_in_the_order_asked_for(monkeypatch, tmp_path):
    """A table's seeds share a label; one's own are those that differ in the seed alone."""
    rows = []
    for seed, value in enumerate((5, 7, 9, 2, 4)):
        rows.append(dict(model="b", name=f"b-{seed}", iter=1, config=dict(seed=seed), block_size=16,
                         checkpoint="c", perplexity={"16": value, "32": 1}, by_position=[]))
    rows[2]["set"] = dict(repair="pi")
    rows[3]["label"] = rows[4]["label"] = "a"
    lines = lines_of(monkeypatch, tmp_path, dict(runs=rows), "--rows", "b, repair=pi", "b", "a")
    assert [*lines.items()][:3] == [("b, repair=pi", [9, 1]), ("b", [6, 1]), ("a", [3, 1])]


def test_a_seed_that_was_resumed_keeps_its_own_steps():
    """Its log has a row more; of two seeds only the steps of both stayed, a straight diagonal."""
    xs, (first, second) = plot.aligned([{10: 1, 20: 3, 30: 5}, {14: 5, 30: 1}])
    assert xs == [10, 14, 20, 30]
    assert first == pytest.approx([1, 1.8, 3, 5])
    assert second == pytest.approx([float("nan"), 5, 3.5, 1], nan_ok=True)


@pytest.mark.parametrize("steps, beside", ((750, True), (10, False)))
def test_the_repositorys_rope_is_beside_runs_of_its_setting(steps, beside, monkeypatch, tmp_path):
    table = ROOT / "results" / "runs" / "cable_table1.cpu"
    mine = json.loads((table / "cable-1337.json").read_text())
    rope = json.loads((table / "rope-1337.json").read_text())["runs"][0]
    row, = mine["runs"]
    del row["label"], row["train_command"]
    row["config"]["max_iters"], mine["data"] = steps, {}  # of another Python
    lines = lines_of(monkeypatch, tmp_path, mine)
    assert ([*rope["perplexity"].values()] in lines.values()) == beside


def test_a_method_has_one_colour():
    for method, *labels in (("cable", "out/cable-stdlib-nano", "cable, 4e-3", "cable 256/4/4"),
                            ("mine", "out/mine-stdlib-nano", "mine x2"),
                            ("yarn", "rope, yarn", "rope, 2e-3, yarn")):
        assert {plot.color_of(label) for label in labels} == {plot.color_of(method)}


def test_every_command_draws_tiny_runs_and_a_mistake_is_one_line(trained, tmp_path):
    """Without a path the newest run, and of curves all."""
    assert "python train.py" in complaint(tmp_path, "figures.plot", "curves")
    (tmp_path / "out").symlink_to(trained)
    command(trained, "eval.py", "cable", "--lengths", 16, "--out", tmp_path / "text")
    command(trained, "eval.py", "rope", "tra", "--sequences", 4, "--out", tmp_path / "task")
    for words in ("plot lengths text.json", "plot scores task.json", "plot errors", "plot curves",
                  "maps attention --layer 0", "maps steps out/rope out/tra", "maps reach",
                  "maps counts"):
        script, *words = words.split()
        out, _ = command(tmp_path, f"figures.{script}", *words, "--out", "p.png", draw=True)
        assert out == "drew p.png\n"
    for words, said in (("plot lengths", "no run in out/tra has 'perplexity'"),
                        ("plot errors --rows tra", "no row 'tra': did you mean out/tra?"),
                        ("plot errors --metric exact_mach", "did you mean exact_match?"),
                        ("maps steps --prompt x", "--prompt is for models of text"),
                        ("maps steps --head 2", "--head 2: the model has heads 0 to 1"),
                        ("maps reach --split spars", "did you mean sparse?"),
                        ("maps steps out/learned --prompt 0123456789abcdefg", "positions end at")):
        script, *words = words.split()
        assert said in complaint(tmp_path, f"figures.{script}", *words), words
