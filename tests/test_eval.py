"""eval.py: several runs in a table, on text and on tasks, and where it writes."""
import json
import re
import shutil

import numpy as np
import pytest

from tests.helpers import TINY_FLAGS, command, complaint, documents, is_png, losses


def written(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_several_checkpoints_in_one_table_and_figure(trained, tmp_path):
    """Positions that end show a dash."""
    names = "cable", "learned"
    out, _ = command(trained, "eval.py", *names, "--lengths", 8, 40, "--out", tmp_path / "two")
    assert "learned positions end at block_size=16" in out and is_png(tmp_path / "two.png")
    assert re.search(r"^learned +\d+\.\d+ +-$", out, re.M)
    both = written(tmp_path / "two.json")
    assert [list(r["perplexity"]) for r in both["runs"]] == [["8", "40"], ["8"]]
    assert both["command"].startswith("python eval.py cable learned --lengths 8 40 --out ")


def test_another_evaluation_does_not_replace_the_first(trained, home):
    """Scores have intervals in the JSON."""
    shutil.copytree(trained / "rope", home / "run")
    few = "eval.py", "run", "--sequences", 5
    out, _ = command(home, *few)
    first = written(home / "run" / "eval.json")
    assert first["sequences"] == 5 and out.count("exact_match") == 3
    for by_metric in first["runs"][0]["scores"]["16"].values():
        for m in by_metric.values():
            assert 0 <= m["low"] <= m["value"] <= m["high"] <= 1
    for _ in range(2):  # the same command writes the same file
        command(home, *few, "--lengths", 16, 32, "--split", "iid")
    files = sorted(path.name for path in (home / "run").glob("eval*.json"))
    assert files == ["eval-2.json", "eval.json"]
    assert written(home / "run" / "eval.json") == first
    assert list(written(home / "run" / "eval-2.json")["runs"][0]["scores"]) == ["16", "32"]
    command(home, "eval.py", "run", trained / "tra", "--sequences", 5)  # several: in out/
    rows = written(home / "out" / "eval.json")["runs"]
    assert [row["model"] for row in rows] == ["rope", "tra"]


def test_a_task_with_a_known_distribution_from_training_to_figures(home):
    """TVD, the AUC where it is defined, undefined positions as null."""
    command(home, "train.py", "--model", "perinorm", "--data", "dyck", "--max_iters", 2,
            "--no-evaluate", *TINY_FLAGS, "--block_size", 8, "--out_dir", "run")
    command(home, "eval.py", "run", "--sequences", 40)
    assert "NaN" not in (home / "run" / "eval.json").read_text()
    result = written(home / "run" / "eval.json")["runs"][0]
    tvd = result["tvd"]["8"]["iid"]
    assert np.mean(tvd) == pytest.approx(result["scores"]["8"]["iid"]["tvd"]["value"], rel=1e-5)
    assert 0 < min(tvd) and max(tvd) < 1
    # depth 0 only after an even number of brackets
    empty = [a is None for a in result["auc"]["8"]["iid"]]
    assert empty == [True, True, False] + [True, False] * 2 + [True]
    command(home, "figures.plot", "positions", "run/eval.json", "--metric", "auc")
    assert is_png(home / "run" / "eval.auc.png")


def test_what_cannot_be_scored_or_not_together(trained, home):
    more = "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--model", "rope", "--data", "flipflop", "--p_ignore", 0.5, *more,
            "--out_dir", "half")
    command(home, "train.py", "--data", "notes", *more, "--out_dir", "mine")
    text, task = trained / "cable", trained / "rope"
    for words, says in (
            ((task, "half"), "half/ckpt.pt was trained with p_ignore=0.5"),
            ((task, text), "score them one by one"),
            ((text, "mine"), "say which to score with --data"),
            ((task, "--again"), "--strided and --again are for text"),
            ((task, "--split", "idd"), "unknown split 'idd': choose from train"),
            ((text, "--data", "flipflop"), "it cannot be scored on flipflop"),
            ((task, "--lengths", 0), "--lengths, --sequences and --queries must be at least 1"),
            ((text, "--lengths", 10**6), "too few for a window of 1000000"),
            (("gone",), "no checkpoint at gone"), ((task, "--bema"), "has no BEMA weights")):
        assert says in complaint(home, "eval.py", *words), words
    command(home, "eval.py", text, "mine", "--lengths", 16, "--data", "notes", "--tokens", 40)


def test_a_test_split_that_is_shorter_than_a_window(home):
    """It is said before training, and scored on what there is."""
    documents(home / "docs", ["too short", *("of these there are more " * 20 + c for c in "abcd")])
    out, _ = command(home, "train.py", "--model", "nope", "--data", "docs", *TINY_FLAGS,
                     "--max_iters", 1, "--no-evaluate", "--out_dir", "run")
    said = out.partition("iter 1/1")[0]
    assert "the test split has 10 tokens, less than a window: eval.py will score it" in said
    out, _ = command(home, "eval.py", "run")
    assert "9 tokens to score: lengths up to 9 only" in out
    assert list(written(home / "run" / "eval.json")["runs"][0]["perplexity"]) == ["9"]


def test_a_small_text_of_ones_own_is_scored_as_far_as_it_goes(home):
    """Its path is relative: the run is still resumed, from another folder."""
    (home / "small.txt").write_text("some words of my own. " * 60)
    flags = "--model", "rope", "--data", "small.txt", *TINY_FLAGS
    out, _ = command(home, "train.py", *flags, "--max_iters", 2, "--out_dir", "small")
    assert "lengths up to 64 only" in out and "$ python sample.py" in out
    shutil.copytree(home / "prepared", home / "notes" / "prepared")
    out, _ = command(home / "notes", "train.py", "--resume", "../small", "--max_iters", 3,
                     "--no-evaluate")
    assert "from iter 2" in out and set(losses(home / "small")[0]) == {1, 2, 3}
    out, _ = command(home, "eval.py", "small", "--strided", "--tokens", 0)
    assert "one document: no intervals" in out
    (home / "small.txt").unlink()
    assert "nor is it a file or folder" in complaint(home, "eval.py", "small")
