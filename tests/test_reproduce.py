"""reproduce.py: its commands here, one after the other; what it would do."""
import argparse
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import eval as evaluation
import experiments
import plot
import reproduce
import runs
import train
from experiments import dry_run, minimal, tables, trainings
from tests.helpers import (
    ONE_THREAD,
    ROOT,
    TINY_FLAGS,
    cells,
    command,
    complaint,
    drawn,
    entry,
    is_png,
    log_of,
    losses,
    run_here,
    standing_in,
    write_package,
)


def test_a_table_of_perplexities_is_made_continued_and_not_made_again(home, here):
    rows = experiments.seeds(2, "cable") | experiments.seeds(1, "rope")
    here(texts=entry("--data notes", rows, eval="--lengths 16 32", contrast="rope",
                     published={"cable": (1, 4, 1, 1, 1, 5)}, reads=["One thing.", "Another."],
                     note="here small"))
    words = "reproduce.py", "texts", "--device", "cpu"
    out, _ = command(home, *words)
    assert out.count("$ python train.py") == out.count("$ python eval.py") == 3
    assert re.search(r"^\[0/3 done, \d+ s left\] cable-1337: iter 2/2 \| loss .* eta 0m00s$", out,
                     re.M) and "[3/3 done, 0 s left] rope-1337 is done" in out
    result = json.loads((home / "results" / "texts.cpu.json").read_text())
    trained = [(r["model"], r["seed"]) for r in result["runs"]]
    assert trained == [("cable", 1337), ("cable", 1338), ("rope", 1337)]
    assert result["command"] == "python reproduce.py texts --scale cpu"
    page = (home / "results" / "README.md").read_text()
    ys = [r["perplexity"]["16"] for r in result["runs"]]
    far = [r["perplexity"]["32"] for r in result["runs"]]
    ratio = np.mean(far[:2]) / np.mean(ys[:2])
    assert f"| cable | 2 | {np.mean(ys[:2]):.3f} ± {np.std(ys[:2], ddof=1):.3f} |" in page
    assert f"| rope | 1 | {ys[2]:.3f} | {far[2]:.3f} | {far[2] / ys[2]:.3f} | - |" in page
    assert re.search(rf"^\| cable .*\| {ratio:.2f}\d \| 1.250 \|$", page, re.M)
    for said in ("python reproduce.py texts", "A table, here small.", "- Another.", "- One thing.",
                 "![texts.cpu](texts.cpu.png)", "Python", "torch"):
        assert said in page
    assert is_png(home / "results" / "texts.cpu.png")
    contrast = json.loads((home / "results" / "contrast.json").read_text())
    assert contrast["model"] == "rope" and contrast["perplexity"] == result["runs"][2]["perplexity"]
    assert contrast["settings"]["n_layer"] == 1 and contrast["source"] == result["data"]["sha256"]
    beside = tables.text_table(result | dict(paper_lengths=[8, 32])).splitlines()
    assert cells(beside[0])[2:5] == ["16", "32", "paper"]  # whose second number is of length 32
    assert cells(beside[2])[4] == "4.00" and cells(beside[3])[4] == "-"
    # a killed run continues; lost and half written evaluations are made again; else nothing is
    folder = home / "out" / "texts.cpu"
    path = folder / "cable-1338" / "ckpt.pt"
    begun = torch.load(path, weights_only=True)
    begun |= dict(iter=1, environment=begun["environment"] | dict(commit="0000000"))
    torch.save(begun, path)
    (folder / "cable-1337" / "eval.json").write_text('{"comm')
    (folder / "rope-1337" / "ckpt.pt").unlink()  # killed before its first checkpoint
    out, _ = command(home, *words)
    assert out.count("$ python train.py --resume out/texts.cpu/cable-1338") == 1
    assert out.count("$ python train.py") == 2 and out.count("$ python eval.py") == 3
    assert torch.load(path, weights_only=True)["iter"] == 2
    again = json.loads((home / "results" / "texts.cpu.json").read_text())["runs"]
    same = [a["perplexity"] == b["perplexity"] for a, b in zip(again, result["runs"])]
    assert same == [True, False, True]  # the second took one more step than two
    assert again[1]["environment"]["commit"] != "0000000"  # but the one that finished it
    out, _ = command(home, *words)
    assert "$ python train.py" not in out and "$ python eval.py" not in out
    out, _ = command(home, *words, "--seeds", 1)
    assert "$ python train.py" not in out
    assert len(json.loads((home / "results" / "texts.cpu.json").read_text())["runs"]) == 2


def cells_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line[:2] == "| "]


def test_every_machine_is_named_with_its_commits(tmp_path):
    one = dict(gpu=None, cpu="A", threads=1, torch="2", python="3", commit="x")
    found = tables.machines([one, one | dict(cpu="B", threads=2), one | dict(commit="w")])
    assert found == ("A, 1 thread, torch 2, Python 3, commits w, x; "
                     "B, 2 threads, torch 2, Python 3, commit x")
    runs_ = [dict(model="a", block_size=8, perplexity={"8": 2.0}, environment=e)
             for e in (one, one | dict(cpu="B"))]  # a section has those of its runs
    whole = dict(runs=runs_, lengths=[8], environment=one)
    (tmp_path / "a.json").write_text(json.dumps(whole))
    section = dict(about="It.", commands=["do"], json=["a.json"], table="text_table")
    said = "\n".join(tables.section_part("a", section, tmp_path))
    assert "A, 1 thread" in said and "B, 1 thread" in said


def test_tables_of_eval_by_hand():
    """Every number of a made-up JSON in the cell where it belongs."""
    runs_ = [dict(name="a-1", model="a", label="a", block_size=8, perplexity={"8": 3.5, "16": 4.5},
                  strided={"8": 3.25, "16": 2.75}),
             dict(name="a-2", model="a", label="a", block_size=8, perplexity={"8": 5.5, "16": 6.5},
                  strided={"8": 5.25, "16": 4.75})]
    result = dict(runs=runs_, lengths=[8, 16],
                  papers={"P": dict(a=7.125), "Q": dict(b=1), "R": dict(a="Figure 4")})
    one = [["model", "seeds", "8", "16", "16 / 8"],
           ["a", "2", "4.500 ± 1.414", "5.500 ± 1.414", f"{(4.5 / 3.5 + 6.5 / 5.5) / 2:.3f}"]]
    assert cells_of(tables.text_table(result)) == one
    strided = ["a", "2", "4.250 ± 1.414", "3.750 ± 1.414"]
    assert cells_of(tables.text_table(result | dict(strided_tokens=9))) == [
        *one, one[0], [*strided, f"{(2.75 / 3.25 + 4.75 / 5.25) / 2:.3f}"]]
    assert "training window" not in tables.text_table(result | dict(strided_tokens=9))
    more = [dict(runs_[0], label="b", strided={"8": 2.0, "16": 4.0, "32": 3.0}),
            dict(runs_[0], label="c", strided={"8": 2.0, "16": 4.0, "32": math.nan}),
            dict(runs_[0], label="d", strided={"8": 4.0, "16": 2.0, "32": 1.0}), runs_[0] | dict(
                label="d", strided={"8": 2.0, "16": 2.0, "32": 1.0}), dict(runs_[0], label="e")]
    del more[-1]["strided"]
    found = tables.text_table(result | dict(lengths=[8, 16, 32], strided_tokens=9,
                                            runs=[*runs_, *more]))
    assert "From windows of 16 on that is all the 8 tokens of a training window" in found
    heads, *shown = cells_of(found)[-5:]
    assert heads == ["model", "seeds", "8", "16", "32", "32 / 8", "32 / 16"]
    assert [row[0] for row in shown] == ["d", "b", "a", "c"]  # e was not read like that
    assert shown[0][1:4] == ["2", "3.000 ± 1.414", "2.000 ± 0.000"]
    assert shown[0][4:] == ["1.000 ± 0.000", "0.375", "0.500"]
    assert shown[1][-2:] == ["1.500", "0.750"] and shown[2] == [*strided, "-", "-", "-"]
    for x2, said in ((4.3605, " (unfinished: 3% lower with x2)"), (4.3695, ""), (5, ""),
                     (3.6, " (unfinished: 20% lower with x2)")):  # the two runs' mean is 4.5
        longer = [dict(runs_[0], label="a x2", perplexity={"8": x2, "16": 1})]
        names = [row[0] for row in cells_of(tables.text_table(result | dict(runs=runs_ + longer)))]
        assert names == ["model", f"a{said}", "a x2"]
    assert cells_of(tables.papers_table(result)) == [
        ["row", "8", "16", "16, strided", "P", "Q", "R"],
        ["a", "4.500 ± 1.414", "5.500 ± 1.414", "3.750 ± 1.414", "7.12", "-", "Figure 4"]]

    def scored(*values):
        rates = iter(values)
        return {T: {split: dict(exact=dict(value=next(rates), low=0.25, high=0.75),
                                other=dict(value=0.99)) for split in ("iid", "far")}
                for T in ("8", "1024")}
    result = dict(splits=["iid", "far"], runs=[
        dict(name="a-1", model="a", scores=scored(0.5, 0.25, 0.375, 0.125)),
        dict(name="a-2", model="a", scores=scored(0.625, 0.5, 0.75, 0.25)),
        dict(name="b-1", model="b", scores=scored(0.5, 0.625, 0.25, 0.5))])
    heads = ["iid 8", "iid 1,024", "far 8", "far 1,024"]
    found = cells_of(tables.lengths_table(result))
    assert found[0] == ["model", "runs", *heads]
    assert found[1][:4] == ["a", "2", "56.25 (50.00 to 62.50)", "56.25 (37.50 to 75.00)"]
    assert tables.percent([dict(value=1.0, low=0.9, high=1.0)] * 2) == "100"
    assert found[2][:3] == ["b", "1", "50.00 [25.00, 75.00]"] and found[2][5].startswith("50.00 [")


def test_differences_of_searches_by_hand():
    """Beside the first row's mean of seeds, query by query; nDCG is 1, 1 / 2 and 0 at 1, 3, 11."""
    places = [{"8": [1, 3, 11, 11], "16": at} for at in ([11] * 4, [1] * 4, [1, 3, 11, 3])]
    result = dict(lengths=[8, 16], answers=[0, 0, 1, 1], runs=[
        dict(label=label, places=at) for label, at in zip("aab", places)])
    text = tables.paired_table(result, 8)
    b, = [row for row in cells_of(text.split(":\n\n")[1]) if row[0] == "b - a"]
    assert b[1] == "0.0 [0.0, 0.0]" and re.match(r"0\.0 \[-25\.0, 25\.0\]", b[2])
    one = tables.paired_table(result | dict(answers=[7] * 4), 8)  # a single document
    assert "| b - a | 0.0 | 0.0 |" in one
    result["runs"][2]["places"] = {"8": [1, 1, 1, 1]}  # ends there
    assert tables.paired_table(result, 8) == ""
    del result["answers"]  # of an older eval.py
    assert tables.paired_table(result, 8) == ""


def test_tables_of_the_encoders_by_hand(monkeypatch, tmp_path):
    losses_ = [[n, float(n)] for n in range(1, 41)]
    result = dict(runs=[dict(label="a", iter=40, loss=losses_, val_loss=[[20, 9.5], [40, 8.5]])])
    assert cells_of(tables.losses_table(result)) == [
        ["model", "seeds", "training, up to step 10", "training, up to step 20",
         "training, up to step 40", "validation"],
        ["a", "1", "8.500", "18.500", "38.500", "8.500"]]

    def measure(value):
        rate = dict(value=value, low=value - 0.0625, high=value + 0.0625)
        zero = dict(value=0.0, low=0.0, high=0.0)
        return {"ndcg@10": rate, "recall@1": zero, "recall@10": rate}
    found = {reading: {"8": measure(0.125 * n), "16": measure(0.125 * n + 0.0625)}
             for n, reading in enumerate(evaluation.READINGS, 1)}
    at = dict(length=16, edges=[0, 8, 16], queries=[3, 4], whole=[0.5, None], first=[0.25, 0.125],
              windows=[0.375, 0.75], bm25=[0.625, None])
    result = dict(lengths=[8, 16], paper=dict(a=[30.5]),
                  runs=[dict(label="a", block_size=8, search=found, by_answer_at=at, places={})])
    text = tables.retrieval_table(result)
    assert "documents of 16 tokens" in text and "minus" not in text  # a single row
    parts = [part.partition(":\n\n") for part in re.split(r"\n\n(?=\w)", text)]
    said = {title: cells_of(table) for title, _, table in parts}
    assert all(table[0] == ["model", "seeds", "8 (1x)", "16 (2x)"]
               for title, table in said.items() if "answer" not in title)
    whole, *others, evidence = ({row[0]: row[1:] for row in table} for table in said.values())
    assert list(whole) == ["model", "a", "BM25", "a, in the paper (MLDR, 512 tokens)"]
    assert whole["a"] == ["1", "12.50 [6.25, 18.75]", "18.75 [12.50, 25.00]"]
    assert whole["a, in the paper (MLDR, 512 tokens)"] == ["-", "30.50", "-"]
    assert whole["BM25"][1:] == ["37.50 [31.25, 43.75]", "43.75 [37.50, 50.00]"]
    want = [("nDCG@10 by a document's best window of 8 tokens", "25.00 [18.75, 31.25]"),
            ("nDCG@10 by the sum of two ranks, the whole document's and BM25's",
             "50.00 [43.75, 56.25]"),
            ("nDCG@10 by the sum of two ranks, the best window's and BM25's",
             "62.50 [56.25, 68.75]"),
            ("Recall@1, documents read as a whole", "0 [0, 0]"),
            ("Recall@10, documents read as a whole", "12.50 [6.25, 18.75]")]
    assert [(title, table["a"][1]) for title, table in zip(list(said)[1:], others)] == want
    assert evidence["model"] == ["seeds", "0 to 8", "8 to 16"]
    assert evidence["a"][1:] == ["50.0", "-"] and evidence["a, its best window"][2] == "75.0"
    assert evidence["a, the first 8 tokens alone"][1:] == ["25.0", "12.5"]
    assert evidence["BM25"][1:] == ["62.5", "-"] and evidence["queries"][1:] == ["3", "4"]
    result["runs"][0]["by_answer_at"] = None  # nobody knows where the answers are
    assert "answer" not in tables.retrieval_table(result)
    figures = drawn(monkeypatch)
    search = json.loads((ROOT / "results" / "cable_table2.cpu.json").read_text())
    for name, panels in (("known", 3), ("unknown", 2)):
        (tmp_path / "search.json").write_text(json.dumps(search))
        plot.main(["ndcg", str(tmp_path / "search.json")])
        assert len(figures[-1].axes) == panels, name
        for row in search["runs"]:
            row["by_answer_at"] = None


def test_the_colours_of_many_scores(monkeypatch):
    """The better, the bluer: an accuracy of 90 %, an error or a distance of 10 %."""
    shares = []
    monkeypatch.setattr(plot, "draw_cell", lambda *args: shares.append(args[5]))
    for metric in ("accuracy", "auc", "error", "error_rate", "tvd", "tvd_last"):
        value = 90.0 if metric in ("accuracy", "auc") else 10.0
        plot.score_grid({"test": {"a": [{32: (value, value, value)}]}}, metric, "length")
        assert shares.pop() == pytest.approx(0.9), metric
    plot.plt.close("all")


def test_tables_of_bench_by_hand():
    one = dict(sdpa=dict(forward_ms=10.0, forward_of_sdpa=1.0, forward_GB=0.5, both_ms=30.0,
                         both_of_sdpa=1.0),
               cable=dict(forward_ms=15.0, forward_of_sdpa=1.5, forward_GB=0.25, both_ms=75.0,
                          both_of_sdpa=2.5, both_GB=0.75),
               tra=dict(forward_failed="no memory"))
    two = dict(sdpa=dict(forward_ms=1234.0, forward_of_sdpa=1.0))
    assert cells_of(tables.attention_table({"64": one, "1024": two})) == [
        ["times sdpa (GB)", "forward, T = 64 (sdpa: 10 ms)",
         "forward and backward, T = 64 (sdpa: 30 ms)", "forward, T = 1,024 (sdpa: 1,234 ms)"],
        ["sdpa", "1.00 (0.50)", "1.00", "1.00"],
        ["cable", "1.50 (0.25)", "2.50 (0.75)", "-"], ["tra", "failed", "-", "-"]]
    kernel = dict(registers=64, spill_stores=4, spill_loads=8, instructions=1200, serialized=True)
    found = {"f, sm_80": kernel, "g, sm_90": kernel | dict(serialized=False, spill_loads=0)}
    assert cells_of(tables.kernels_table(found))[1:] == [
        ["f", "64 / 8 / 1,200 C7515", "-"], ["g", "-", "64 / 4 / 1,200"]]
    found = dict(train=dict(a=dict(tok_s=12345, of_nope=1.5)), memory=dict(b=dict(peak_GB=0.25)))
    assert cells_of(tables.bench_table(found)) == [
        ["model", "tok/s in training", "of nope's", "peak memory, GB"],
        ["a", "12,345", "1.50", "-"], ["b", "-", "-", "0.25"]]


def test_a_task_s_table_has_the_paper_s_numbers_beside_ours(home, here):
    columns = [("in", "iid", "exact_match"), ("dense", "dense", "exact_match")]
    rows = experiments.seeds(2, "tra") | experiments.seeds(1, "cope", flags="--P 9 --max_iters 3")
    first = entry("--data flipflop", rows, eval="--sequences 20", columns=columns, group="both",
                  published={"tra": (100, 99.5), "fox": (3, 4)})
    here(flips=first, others=first)
    command(home, "reproduce.py", "flips", "--device", "cpu")
    result = json.loads((home / "results" / "flips.cpu.json").read_text())
    assert [r["label"] for r in result["runs"]] == ["tra", "tra", "cope"]
    assert all([it for it, _ in r["history"]] == [1, 2] for r in result["runs"][:2])
    assert result["runs"][2]["iter"] == 3  # a row's own flag goes before the entry's
    page = (home / "results" / "README.md").read_text()
    scores = [r["scores"]["16"]["dense"]["exact_match"] for r in result["runs"]]

    def number(y):
        return f"{100 * y:.0f}" if y in (0, 1) else f"{100 * y:.2f}"
    ys = [s["value"] for s in scores[:2]]
    mean, low, high = map(number, (np.mean(ys), min(ys), max(ys)))
    apart = f" ({low} to {high})" if low != high else ""
    assert f"| {mean}{apart} | 99.5 |" in page
    value, low, high = (number(scores[2][name]) for name in ("value", "low", "high"))
    assert f"| {value} [{low}, {high}] | - |" in page
    assert is_png(home / "results" / "flips.cpu.png") and "flips.cpu.steps.png" in page
    # entries of one group share their runs; the figures show what the table has first
    columns = [("dense", "dense", "glitch_rate")]
    here(flips=first, others=first | dict(columns=columns, published={}))
    out, _ = command(home, "reproduce.py", "others", "--device", "cpu")
    assert out.count("--metric glitch_rate") == 2
    assert "$ python train.py" not in out and (home / "results" / "others.cpu.json").exists()
    # another experiment under the same name is not passed off as this one
    for old, new, says in (("flipflop", "flipflop --p_ignore 0.5", "p_ignore=0.8, the entry says"),
                           ("--max_iters 2", "--max_iters 9", "max_iters=2, the entry says 9")):
        changed = first["cpu"] | dict(train=first["cpu"]["train"].replace(old, new))
        here(flips=first | dict(cpu=changed))
        _, err = command(home, "reproduce.py", "flips", "--device", "cpu", code=1)
        assert re.search(f"133\\d holds a run with {says}", err) and "move it away" in err
    here(flips=first)
    path = home / "out" / "both.cpu" / "cope-P-9-max_iters-3-1337" / "ckpt.pt"
    # nor a compiled run as one that was not: its rounding is another
    checkpoint = torch.load(path)
    checkpoint["config"]["compile"] = "on"
    torch.save(checkpoint, path)
    _, err = command(home, "reproduce.py", "flips", "--device", "cpu", code=1)
    assert "1337 holds a run with compile=on, this command has auto: move it away" in err
    path.write_bytes(b"cut off")
    _, err = command(home, "reproduce.py", "flips", "--device", "cpu", code=1)
    assert "is not a whole checkpoint" in err


def test_a_result_of_an_older_definition_is_not_shown_and_not_timed(home, here):
    """The page names what differs, in one line; the list takes no time from it."""
    rows = experiments.seeds(2, "tra") | experiments.seeds(1, "cope", flags="--P 9")
    columns = [("in", "iid", "exact_match")]
    first = entry("--data flipflop", rows, eval="--sequences 20 --lengths 16 32", columns=columns)
    here(flips=first)
    command(home, "reproduce.py", "flips", "--device", "cpu")
    assert tables.older(first, "cpu", json.loads(
        (home / "results" / "flips.cpu.json").read_text())) == ""

    def page(**changes):
        now = first | dict(cpu=first["cpu"] | changes)
        here(flips=now)
        with standing_in(home):
            assert not tables.measured("flips", now, "cpu")
            text = tables.page()
        assert "| tra |" not in text and "flips.cpu.png" not in text
        return re.search(r"^Not shown: `results/flips.cpu.json` .* \((.*)\)\.$", text, re.M)[1]
    longer = first["cpu"]["train"].replace("--max_iters 2", "--max_iters 9")
    assert page(train=longer) == "its row 'tra' has max_iters=2, the entry says 9"
    other = rows | experiments.seeds(1, "cope", flags="--P 8")
    assert page(rows=other) == "its row 'cope' has P=9, the entry says 8"
    assert trainings.differing(dict(log_kernel=False), ["--model", "cable", "--data", "dyck"]) == ""
    assert page(rows=experiments.seeds(2, "tra")) == "it has a row 'cope', the entry has none"
    assert page(rows=rows | experiments.seeds(1, "fox")) == "it has no row 'fox'"
    assert page(eval="--sequences 30") == "it has sequences=20, the entry says 30"
    assert page(eval="--lengths 16 64") == "it has lengths=16 32, the entry says 16 64"
    assert page(eval="--split iid") == "it has split=iid sparse dense, the entry says iid"
    here(flips=first)
    with standing_in(home):
        assert len(tables.measured("flips", first, "cpu")) == 3 and "| tra |" in tables.page()
    # a part does not replace the whole
    path = home / "results" / "flips.cpu.json"
    whole = path.read_bytes()
    out, _ = command(home, "reproduce.py", "flips", "--device", "cpu", "--rows", "cope")
    assert "wrote out/flips.cpu/flips.json: results/flips.cpu.json keeps its tra, too" in out
    part = json.loads((home / "out" / "flips.cpu" / "flips.json").read_text())
    assert [r["label"] for r in part["runs"]] == ["cope"] and path.read_bytes() == whole
    assert is_png(home / "out" / "flips.cpu" / "flips.png")
    # made with fewer seeds or rows it is the entry's all the same
    path.unlink()
    command(home, "reproduce.py", "flips", "--device", "cpu", "--rows", "cope")
    with standing_in(home):
        assert len(tables.measured("flips", first, "cpu")) == 1
    assert "--scale cpu --rows cope\n" in (home / "results" / "README.md").read_text()
    assert "flips has no row 'rope'" in complaint(home, "reproduce.py", "flips", "--rows", "rope")
    command(home, "reproduce.py", "flips", "--device", "cpu", "--seeds", 1)
    with standing_in(home):
        assert len(tables.measured("flips", first, "cpu")) == 2


def test_a_part_of_the_page_that_is_no_table_says_how_it_is_made():
    for name in experiments.sections():
        with pytest.raises(SystemExit, match=f"{name} is no table of reproduce.py: results/README"):
            reproduce.main([name])
    with pytest.raises(SystemExit, match="did you mean .*lm_sep"):
        reproduce.main(["lm_se"])


def test_missing_makes_only_what_a_result_has_not(home, here):
    """The runs of the JSON stay as they are, their checkpoints need not be there."""
    rows = experiments.seeds(2, "tra") | experiments.seeds(1, "cope", "rope", flags="--P 9")
    rows["rope"] = "--model rope", 1
    columns = [("in", "iid", "exact_match")]
    first = entry("--data flipflop", rows, eval="--sequences 20 --lengths 16", columns=columns)
    here(flips=first)
    path = home / "results" / "flips.cpu.json"

    def reproduce(*words, **more):
        out, err = command(home, "reproduce.py", "flips", "--device", "cpu", *words, **more)
        return re.findall(r"^\$ python train.py .* --model (.*) --seed (\d+) ", out, re.M), err
    assert reproduce("--rows", "cope", "--missing")[0] == [("cope --P 9", "1337")]
    one = json.loads(path.read_text())
    shutil.rmtree(home / "out")  # another machine
    assert reproduce("--rows", "tra", "cope", "--seeds", 1, "--missing")[0] == [("tra", "1337")]
    two = json.loads(path.read_text())
    assert [r["label"] for r in two["runs"]] == ["tra", "cope"] and two["runs"][1] == one["runs"][0]
    assert two["command"].endswith("--scale cpu --seeds 1 --rows tra cope")
    assert "0 runs" in command(home, "reproduce.py", "flips", "--rows", "cope", "--missing",
                               "--dry_run")[0].splitlines()[-1]
    page = (home / "results" / "README.md").read_text()
    assert "| cope | 1 |" in page and "| tra | 1 |" in page
    assert reproduce("--missing")[0] == [("tra", "1338"), ("rope", "1337")]
    three = json.loads(path.read_text())
    assert [r["seed"] for r in three["runs"]] == [1337, 1338, 1337, 1337]
    assert three["command"].endswith("--scale cpu")
    assert reproduce("--missing")[0] == [] and json.loads(path.read_text()) == three
    # a row that the entry did not have, and one that was compiled
    here(flips=first | dict(cpu=first["cpu"] | dict(rows=rows | dict(fox=("--model fox", 2)))))
    assert reproduce("--seeds", 1, "--missing")[0] == [("fox", "1337")]
    four = json.loads(path.read_text())
    assert re.findall("--scale cpu(.*)", four["command"]) == [
        " --rows tra", " --seeds 1 --rows cope rope fox --missing"]
    four["runs"][0]["train_command"] += " --compile on"
    assert trainings.asked(four, first["cpu"] | dict(rows=rows | dict(fox=("", 2))))[0] == (
        " --rows tra --compile")
    here(flips=first)
    # what was measured in another way is not mixed with it
    runs.write_json(path, two | dict(splits=["iid"]))
    before = path.read_bytes()
    assert re.search("have another splits than out/flips.cpu/.*: one table can.t have both",
                     reproduce("--missing", code=1)[1])
    newer, older = dict(runs=[dict(by_answer={})]), dict(runs=[{}])
    trainings.measured_alike(newer, newer, "out/a")
    for found, kept in ((newer, older), (older, newer)):
        with pytest.raises(RuntimeError, match="results/ have another by_answer than out/a: one"):
            trainings.measured_alike(found, kept, "out/a")
    here(flips=first | dict(cpu=first["cpu"] | dict(eval="--sequences 30")))
    assert re.search(r"flips.cpu.json is of an older definition \(it has sequences=20, the entry "
                     r"says 30\): without --missing", reproduce("--missing", code=1)[1])
    assert path.read_bytes() == before


def test_a_search_of_an_older_definition_is_named():
    postnorm = importlib.import_module("experiments.postnorm")
    panels = postnorm.set_panels(4, (6, 2)) | postnorm.exact_panels(4, (8, 2))
    scale = dict(trials=2, steps=5, panels=panels)
    one = dict(metric="tvd", schemes=("pre", "post"), cpu=scale)
    schemes = dict(pre={}, post={})
    result = dict(metric="tvd", steps=5, trials=1, panels=json.loads(json.dumps(
        [panel | dict(name=name, lengths=[], schemes=schemes) for name, panel in panels.items()])))
    assert tables.older(one, "cpu", result) == ""
    for changes, says in (
            (dict(steps=6), "it has steps=5, the entry says 6"),
            (dict(panels=dict(list(panels.items())[:1])), "it has a panel 'n = 8, trained on 2, p* "
                                                          "itself', the entry has none"),
            (dict(panels=panels | postnorm.set_panels(4, (9, 2))), "it has no panel 'n = 9, "),
            (dict(panels=panels | postnorm.set_panels(8, (6, 2))),
             "its panel 'n = 6, trained on 2' has batch_size=4, the entry says 8")):
        assert tables.older(one | dict(cpu=scale | changes), "cpu", result).startswith(says)
    wider = one | dict(schemes=("pre", "post", "peri"))
    assert tables.older(wider, "cpu", result).endswith("has no scheme 'peri'")


def test_ctrl_c_and_failures_say_how_to_continue(home, here, monkeypatch):
    here(texts=entry("--data notes", experiments.seeds(2, "cable"), eval="--lengths 16"),
         wrong=entry("--data notes --n_embd 15", experiments.seeds(1, "cable"), eval=""))
    started = []

    def stopped(board, name, *words):
        started.append(name)
        if len(started) == 3:
            raise KeyboardInterrupt
        run_here(board, name, *words)
    monkeypatch.setattr(reproduce.Board, "run", stopped)
    out, _ = command(home, "reproduce.py", "texts", "--device", "cpu", code=130)
    again = "Continue with: python reproduce.py texts --device cpu"
    assert f"stopped; what is finished is kept. {again}" in out
    assert not (home / "results" / "texts.cpu.json").exists()
    out, _ = command(home, "reproduce.py", "texts", "--device", "cpu")
    assert out.count("$ python train.py") == 1
    _, err = command(home, "reproduce.py", "wrong", code=1)
    assert "exited with 1" in err and "n_embd=15 is not divisible by n_head=2" in err
    assert "the same command continues: python reproduce.py wrong" in err
    with reproduce.locked(home / "out" / "texts.cpu"):
        assert "another reproduce.py" in complaint(home, "reproduce.py", "texts")


def test_the_list_has_every_entry_and_its_time(home, here):
    listed, _ = command(ROOT, "reproduce.py")
    for name, one in experiments.known().items():
        shown = re.search(rf"^{name}\n(.*?)(?=^\S)", listed, re.M | re.S)[1]
        assert " ".join(shown.split()).startswith(" ".join(one["about"].split()))
        for scale in ("cpu", "paper"):
            assert bool(re.search(rf"--scale {scale} +.+", shown)) == (scale in one), name
        has = tables.measured(name, one, "cpu")
        assert not has or re.search(r"--scale cpu +[\d.]+ (s|min|h): ", shown)
    assert max(map(len, listed.splitlines())) <= 100 and "reproduce.py NAME" in listed
    # the papers' tables and figures, as they number them
    there = set(experiments.known())
    for module in experiments.files():
        there |= getattr(module, "SECTIONS", {}).keys()
    for module in experiments.files():
        for number, names in getattr(module, "NUMBERED", {}).items():
            said = names
            if not isinstance(names, str):
                said = ", ".join(name + " *" * (name not in experiments.known()) for name in names)
            assert re.search(rf"^    {number} +{re.escape(said)}$", listed, re.M)
            assert isinstance(names, str) or set(names) <= there, (number, names)
    assert "prompts of GPT-4 and Llama" in listed
    timed = entry("--data notes", experiments.seeds(3, "cable"), eval="")
    timed["cpu"] = timed["cpu"] | dict(minutes=4)
    here(timed=timed)
    listed, _ = command(home, "reproduce.py")
    assert re.search(r"--scale cpu .*12 min.*4 min", listed)
    assert re.search(r"--scale paper .*not measured", listed)
    (home / "results").mkdir()
    about = dict(model="cable", seed=1337, config={})
    seconds = [dict(about, train_seconds=30, eval_seconds={"16": 5, "32": 5.0}),
               dict(about, train_seconds=10, eval_seconds=10)]
    (home / "results" / "timed.cpu.json").write_text(json.dumps(dict(runs=seconds)))
    assert re.search(r"--scale cpu +2 min: 3 runs, 30 s each", command(home, "reproduce.py")[0])


# of each paper: how many numbered tables and figures it has
PAPERS = dict(cable=(4, 6), cope=(10, 6), tra=(2, 4), postnorm=(0, 7))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_of_a_paper_is_here_at_both_sizes(paper):
    """As an entry with a paper scale, or a section that says the command; or why it is not."""
    module, there = importlib.import_module(f"experiments.{paper}"), set()
    entries = experiments.known()
    for number, names in module.NUMBERED.items():
        kind, _, numbers = number.partition(" ")
        there |= {(kind.removesuffix("s"), n) for n in numbers.split(", ")}
        if isinstance(names, str):
            assert re.match("a drawing|not here: ", names), number
            continue
        scales = set()
        for name in names:
            if name in entries:
                scales |= entries[name].keys() & {"cpu", "paper"}
                continue
            scales.add("cpu")
            said = " ".join(experiments.sections()[name].get("reads", ()))
            if re.search(r"At the paper's sizes?.*`python [^`]* --(scale|size) ", said):
                scales.add("paper")
        assert scales == {"cpu", "paper"}, number
    tables_, figures = PAPERS[paper]
    for kind, most in (("Table", tables_), ("Figure", figures)):
        assert {n for k, n in there if k == kind} == {str(n) for n in range(1, most + 1)}


def test_what_lm_says_of_its_rates_and_rows_is_in_the_json():
    """The rate of every family has the lowest perplexity; the rows that run twice fell the most."""
    lm = importlib.import_module("experiments.lm")
    read = {name: json.loads((ROOT / "results" / f"{name}.cpu.json").read_text())["runs"]
            for name in ("lm", "lm_rates")}
    found = {}
    for r in read["lm_rates"]:
        row, rate = r["label"].split(", ")
        found.setdefault(row, {})[rate] = r["perplexity"]["256"]
    assert {row: min(by, key=by.get) for row, by in found.items()} == lm.PICKED
    whole = [r for r in read["lm"] if r["seed"] == 1337 and not re.search("x2|trained", r["label"])]
    whole.sort(key=lambda r: -r["fell"])
    assert {r["label"] for r in whole[:3]} == set(lm.TWICE)


def test_a_command_s_progress_is_shown_and_its_failure_has_its_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    board = reproduce.Board(4, 2, 60, dict(os.environ), ())
    line = "iter 5/10 | loss 1.2 | eta 1m05s"
    board.run("a", "python", "-c", f"print('{line}'); print('{line.replace('5', '6')}')")
    out = capsys.readouterr().out
    # one of four runs for 65 s more, three take about as long, two at a time; the next line waits
    assert f"[0/4 done, 2 min left] a: {line}\n" in out and out.count("iter") == 3
    code = "import sys; print('why it failed'); sys.exit(3)"
    with pytest.raises(RuntimeError, match="exited with 3:\nwhy it failed"):
        board.run("b", "python", "-c", code)
    code = "import time; print('iter 1/2 | eta 0m09s', flush=True); time.sleep(60)"
    monkeypatch.setattr(board, "show", lambda *_: board.stop())
    with pytest.raises(RuntimeError, match="exited with -2"):
        board.run("c", "python", "-c", code)
    with pytest.raises(RuntimeError, match="stopped"):
        board.run("d", "python", "-c", "pass")


def test_two_jobs_at_a_time_and_all_end_with_one_that_fails(tmp_path, monkeypatch):
    """Each of two waits for the other; a failure interrupts what runs."""
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    args = types.SimpleNamespace(jobs=2)

    def job(code):
        def work(run):
            run("python", "-c", f"import os, pathlib, sys, time\n{code}")
            return code
        return work

    def meet(own, other):
        return (f"pathlib.Path('{own}').write_text(os.environ['OMP_NUM_THREADS'])\n"
                f"while not pathlib.Path('{other}').exists():\n    time.sleep(0.01)")
    jobs = dict(a=job(meet("a", "b")), b=job(meet("b", "a")), c=lambda run: "nothing to do")
    found = reproduce.work(jobs, args, 60, ())
    assert found == [meet("a", "b"), meet("b", "a"), "nothing to do"]
    assert (tmp_path / "a").read_text() == str(max(1, os.cpu_count() // 2))
    jobs = dict(a=job("time.sleep(300)"), b=job("sys.exit('it broke')"), c=job("time.sleep(300)"))
    start = time.time()
    with pytest.raises(RuntimeError, match="exited with 1:\nit broke"):
        reproduce.work(jobs, args, 60, ())
    assert time.time() - start < 60


@pytest.mark.slow
def test_ctrl_c_saves_the_training_inside(repo):
    """An interrupt of the whole group, as a terminal sends it."""
    driver = f"""if True:
        import sys, types
        import experiments, reproduce
        mine = types.ModuleType("mine", "Mine.")
        scale = dict(train="--data notes --max_iters 5000 {' '.join(TINY_FLAGS[:-2])}", eval="",
                     rows=experiments.seeds(2, "cable"))
        mine.ENTRIES = dict(mine=dict(about="Mine", published={{}}, cpu=scale, paper=scale))
        experiments.files, reproduce.EVERY = lambda: [mine], 0
        reproduce.main(["mine"])"""
    run = subprocess.Popen([sys.executable, "-c", driver], cwd=repo, start_new_session=True,
                           env=os.environ | ONE_THREAD, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    for line in run.stdout:
        if "cable-1337: iter 9/" in line:
            os.killpg(run.pid, signal.SIGINT)
            break
    rest, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in err, rest + err
    assert "Continue with: python reproduce.py mine" in rest
    path = repo / "out" / "mine.cpu" / "cable-1337" / "ckpt.pt"
    assert 9 <= torch.load(path, weights_only=True)["iter"] < 5000
    assert not (repo / "out" / "mine.cpu" / "cable-1338").exists()


def without_running(home, name, *words, code=0):
    """A dry run -> stdout, stderr; nothing may be written."""
    before = sorted(home.rglob("*"))
    said = command(home, "reproduce.py", name, "--dry_run", *words, code=code)
    assert sorted(home.rglob("*")) == before
    return said


def test_a_dry_run_has_the_commands_that_a_run_has_and_what_they_cost(home, here):
    rows = experiments.seeds(2, "cable") | experiments.seeds(1, "cope", flags="--n_embd 32")
    here(flips=entry("--data flipflop", rows, eval="--sequences 20", published={}, note="Small",
                     columns=[("in", "iid", "exact_match")]))
    said, _ = without_running(home, "flips", "--device", "cpu")
    assert said.startswith("A table. Here: Small\n")
    done, _ = command(home, "reproduce.py", "flips", "--device", "cpu")
    planned, run = (re.findall(r"^\$ python (?:train|eval).*", out, re.M) for out in (said, done))
    assert planned == run and len(run) == 6 and "2 runs\n" in said and "3 runs," in said
    assert "On the CPU not measured: 3 runs" in said
    # by hand: 6 N a token, and attention over 8 keys on average; 1 layer, 16 tokens, 2 steps of 4
    model = runs.make_model(dict(model="cable", block_size=16, vocab_size=5, n_layer=1, n_head=2,
                                 n_embd=16))
    N = sum(p.numel() for p in model.parameters())
    flops = 2 * 4 * 16 * (6 * N + 6 * 16 * 16)
    assert f"cable: {N:,} parameters, 2 steps, {flops:.1e} FLOPs, " in said
    cost = dry_run.estimate(model, 16, 4, 2)
    assert cost.memory == 16 * N + 64 * (34 * 16 + 10 * 5) and cost.squares == 5 * 2 * 64 * 16
    assert cost.seconds == 2 * dry_run.LAYER_SECONDS
    many = dry_run.estimate(model, 16, 4 * 2**30, 2)
    assert many.seconds == pytest.approx(2**30 * flops / dry_run.THROUGHPUT)


@pytest.mark.parametrize("flags, says", [
    ("--n_embd 15", "n_embd=15 is not divisible by n_head=2"), ("--n_hed 2", "unknown argument"),
    ("--block_size 7", "must be even"), ("--dropout 2", "--dropout must be in"),
    ("--size papre", "unknown size 'papre': did you mean paper?")])
def test_a_dry_run_names_what_cannot_be_built(flags, says, home, here):
    rows = dict(right=("--model cable", 1), wrong=(f"--model rope {flags}", 2))
    here(mine=dict(about="A", cpu=dict(train="--data flipflop --n_head 2", eval="", rows=rows)))
    out, err = without_running(home, "mine", code=1)
    assert "right: " in out and re.search(f"^wrong cannot be built: .*{re.escape(says)}", out, re.M)
    line, = err.splitlines()
    assert line.startswith("error: wrong cannot be built; wrong: ") and says in line
    assert f"--model rope {flags} --seed 1337" in line
    # what eval.py would refuse at the end is found now, too
    scale = dict(train="--data flipflop", eval="--lengths 63", rows=experiments.seeds(1, "cable"))
    here(mine=dict(about="A", cpu=scale))
    assert "block_size=63 must be even" in without_running(home, "mine", code=1)[1]


def test_a_dry_run_of_a_text_needs_no_text_and_of_a_search_no_training(home, here):
    known = experiments.known()
    here(**{name: known[name] for name in ("cable_table1", "postnorm_fig2")})
    out, _ = without_running(home, "cable_table1", "--scale", "paper")
    assert re.search(r"^cable: 44\.7M parameters, 9,000 steps", out, re.M)
    out, _ = without_running(home, "postnorm_fig2", "--scale", "paper", "--trials", 3)
    assert out.count("$ python -m experiments.minimal") == 4 and "--trials 3" in out


def paper_rows():
    """(entry, row) of all tables of trainings, the same training once."""
    found, seen = [], set()
    for name, one in experiments.known().items():
        scales = trainings.by_task(one["paper"]) if "rows" in one.get("paper", {}) else {}
        for task, scale in scales.items():
            for label, (flags, _) in scale["rows"].items():
                key = flags, trainings.options(scale["train"].split())["data"]
                if key not in seen:
                    seen.add(key)
                    slow = [pytest.mark.slow] if task else []  # as many as all others
                    found.append(pytest.param(name, task, label, marks=slow))
    return found


@pytest.mark.parametrize("name, task, label", paper_rows(), ids=lambda x: x.replace(" ", "-"))
def test_every_row_of_the_papers_sizes_is_built_and_trains(name, task, label, home):
    """Whole without memory; two steps with its sizes divided."""
    scale = trainings.by_task(experiments.known()[name]["paper"])[task]
    flags = f"{scale['train']} {scale['rows'][label][0]}".split()
    cost = dry_run.of_training(flags, scale["eval"].split())
    assert cost.parameters > 1e4 and cost.memory + cost.squares < 80e9  # an H100
    c, *_ = train.fresh(flags)
    T = max(1, c.block_size // 16) + c.block_size % 2
    less = dict(n_embd=8 * c.n_head, n_layer=min(c.n_layer, 2), block_size=T, batch_size=2,
                max_iters=2, eval_interval=2, eval_iters=1, gradient_accumulation_steps=1)
    if data.find(c.data).kind == "text":
        less |= dict(data="notes", tokenizer="bytes")
    if data.find(c.data).for_encoders:
        less |= dict(corpus=str(write_package(home) / "library"), tokenizer="bytes")
        less |= dict(query_size=T) if "query_size" in c else {}
    if "max_ops" in c:
        less |= dict(max_ops=8, n_train=min(c.n_train, 20))
    flags += [word for k, v in less.items() for word in (f"--{k}", str(v))]
    command(home, "train.py", *flags, "--out_dir", "run", "--no-evaluate", "--device", "cpu")
    assert 2 in losses(home / "run")[0] or log_of(home / "run")[-1]["iter"] == 2


@pytest.mark.parametrize("name", [name for name, one in experiments.known().items()
                                  if "rows" in one.get("paper", {})])
def test_every_table_of_the_papers_sizes_is_built(name):
    """Every row, without memory; and fits into an H100."""
    args = argparse.Namespace(seeds=0, rows=None, device="auto", scale="paper", compile=False)
    one = experiments.known()[name]
    for label, (_, cost, _) in dry_run.plan(args, one, one["paper"], Path("out")).items():
        found = cost()
        assert found.parameters > 1e4 and found.memory + found.squares < 80e9, label


def test_a_compiled_table_begins_with_compiled_runs():
    """Of cable_fig5, whose folder it shares."""
    said, _ = command(ROOT, "reproduce.py", "cable_table2", "--compile", "--dry_run", "--rows",
                      "nope")
    first, second = (line for line in said.splitlines() if line.startswith("$ python train.py"))
    assert "--compile on" in first and "--compile on" in second and "--init_from" in second


@pytest.mark.slow
@pytest.mark.parametrize("name", ["postnorm_theorem", "postnorm_bema",
                                  *(f"postnorm_fig{n}" for n in range(1, 5))])
def test_every_search_of_the_papers_sizes_is_built_and_trains(name):
    one = experiments.known()[name]
    args = argparse.Namespace(trials=0, device="auto")
    commands = minimal.commands(args, one, one["paper"], Path("out"))
    for slug, (settings, trials, _) in commands.items():
        assert dry_run.of_search(settings, trials).memory < 80e9, slug
        panel = settings["panel"] | dict(batch_size=2)
        if "block_size" in panel:
            panel["block_size"] = max(1, panel["block_size"] // 16)
        longest = 2 * panel.get("block_size", 16)
        panel |= dict(longest=longest, at=[longest, longest])
        small = settings | dict(panel=panel, steps=2, sequences=2)
        found = minimal.search(small, 1)
        assert found["trials"][0]["finite"], slug
