"""reproduce.py: its commands here, one after the other; its tables by hand."""
import functools
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from experiments import Row, rows, tables
from tests.helpers import ONE_THREAD, TINY_FLAGS, cells, command, complaint, entry, is_png

BLOCK = "# Mine\n\n<!-- table texts -->\n<!-- /table -->\n\nWords.\n"


def texts(**changes):
    table = rows(2, "cable") | rows(1, "rope", flags="--norm post")
    return entry("--data notes --norm pre", table | {
        "rope, far": Row(of="rope", eval="--lengths 32")}, "--lengths 16 32", **changes)


def test_a_table_is_made_continued_and_not_made_again(home, here):
    """A run is a file: there, and it is used; absent, and it is made."""
    here(texts=texts())
    (home / "results").mkdir()
    (home / "results" / "mine.md").write_text(BLOCK)
    run = functools.partial(command, home, "reproduce.py", "texts", "--device", "cpu")
    out, _ = run("--jobs", 2)
    assert out.count("$ python train.py") == 3 and out.count("$ python eval.py") == 4
    folder = home / "results" / "runs" / "texts.cpu"
    names = sorted(path.stem for path in folder.iterdir())
    assert names == ["cable-1337", "cable-1338", "rope-1337", "rope-far-1337"]
    far = json.loads((folder / "rope-far-1337.json").read_text())
    row, = far["runs"]
    assert far["lengths"] == [32] and row["label"] == "rope, far" and row["seed"] == 1337
    # each flag once: the row's own goes before the table's
    assert "--norm post --model rope" in row["train_command"] and "pre" not in row["train_command"]
    assert far["command"].startswith(
        "python eval.py out/texts.cpu/rope-norm-post-1337 --lengths 32 --out ")
    ys = [json.loads((folder / f"{name}.json").read_text())["runs"][0]["perplexity"]["16"]
          for name in names[:2]]
    page = (home / "results" / "mine.md").read_text()
    assert f"| cable | 2 | {np.mean(ys):.3f} ± {np.std(ys, ddof=1):.3f} |" in page
    assert "| rope, far | 1 | - |" in page and page.endswith("<!-- /table -->\n\nWords.\n")
    assert re.search(r"<sub>`python train.py --max_iters 2 .* --model cable --seed 1337`", page)
    assert "above: rope: `--norm post`; rope, far: `--norm post` `--model rope` `--leng" in page
    assert "All runs: `python reproduce.py texts`; " in page
    assert is_png(home / "results" / "texts.cpu.png")
    # what is there is used; more seeds are made
    assert "4 runs, 4 of them there" in run()[0]
    out, _ = run("--rows", "rope", "--seeds", 2)
    assert out.count("$ python train.py") == 1 and "| rope | 2 |" in out
    # a lost run is scored again, a stopped one continues
    (folder / "cable-1337.json").unlink()
    assert run()[0].count("$ python") == 2  # eval.py and plot.py
    (folder / "cable-1338.json").unlink()
    path = home / "out" / "texts.cpu" / "cable-1338" / "ckpt.pt"
    torch.save(torch.load(path, weights_only=True) | dict(iter=1), path)
    assert "$ python train.py --resume out/texts.cpu/cable-1338 --no-evaluate" in run()[0]
    # a file that is cut off is named, and the rest stands; so is a block without a table
    (folder / "cable-1338.json").write_text('{"runs": [')
    out, err = run()
    assert "cable-1338.json is damaged and left out. Remove it" in err and "| cable | 1 |" in out
    (folder / "cable-1338.json").unlink()
    (home / "results" / "mine.md").write_text(BLOCK.replace("texts", "textz"))
    assert ("mine.md has a block for 'textz', which is neither an entry nor a JSON in results/: "
            "remove the block, or did you mean texts?") in complaint(
                home, "reproduce.py", "texts", "--rows", "rope")


def test_the_list_and_a_dry_run(home, here):
    here(texts=texts())
    out, _ = command(home, "reproduce.py")
    assert re.search(r"\nMine.\n  texts\n      A table\n +--scale cpu +\S+ FLOPs, \d+ % of ", out)
    out, _ = command(home, "reproduce.py", "texts", "--dry_run", "--compile", "--device", "cpu")
    assert out.count("$ python train.py") == out.count(" parameters\n") == 4
    assert out.count("--compile on --seed") == 4 and not (home / "out").exists()


@pytest.mark.parametrize("words, says", [
    ("text", "unknown entry 'text': did you mean texts?"),
    ("texts --rows rop", "texts has no 'rop' among its rows: did you mean rope?"),
    ("texts --seeds -1", "--jobs must be at least 1, --seeds 0 or more"),
    ("texts --add fox", "--add is not for texts"), ("texts --tasks x", "--tasks is not for texts"),
    ("searched --rows pre", "--rows is not for searched"),
    ("searched --scale paper", "searched has no --scale paper: choose from cpu"),
    ("texts --data x", "--data is not for texts"),
    ("own --scale gpu", "own needs a text: --data FOLDER"),
    ("own --scale gpu --data nowhere --device cpu", "unknown corpus 'nowhere'"),
    ("own --scale gpu --data short.txt --device cpu", "is too short"),
    ("--jobs 2", "name the table first: python reproduce.py NAME")])
def test_what_cannot_be_asked_for(words, says, home, here):
    (home / "short.txt").write_text("Too short. " * 99)
    here(texts=texts(), own=own(), searched=dict(
        title="A search", schemes=("pre",), metric="tvd", cpu=dict(trials=1, steps=1, panels={})))
    assert says in complaint(home, "reproduce.py", *words.split())


def own():
    """A table of a text of the user's, as lm_english is."""
    scale = texts()["cpu"]
    return dict(title="Mine", gpu=scale | dict(
        train=scale["train"].replace("notes", "FOLDER"), eval="--lengths 16 --tokens 64"))


def test_a_table_of_a_text_of_yours(home, here, monkeypatch):
    """Its runs hold the text's sha256 and not where it lay, and are mixed with no other text's."""
    here(own=own())
    (home / "results").mkdir()
    (home / "results" / "mine.md").write_text(BLOCK.replace("texts", "own"))
    (home / "notes").rename(home / "my notes")
    words = "reproduce.py", "own", "--scale", "gpu", "--data", "my notes", "--rows", "rope"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.search(r"for a CUDA GPU, .* none: \S+ FLOPs, .* \(one H100: some 0 s\), 1 runs",
                     complaint(home, *words))
    out, _ = command(home, *words, "--device", "cpu")
    path = home / "results" / "runs" / "own.gpu" / "rope-1337.json"
    text = path.read_text()
    run, sha256 = json.loads(text)["runs"][0], json.loads(text)["data"]["sha256"]
    assert f"sha256 {sha256}; a training takes 128, 0.0 passes" in out and str(home) not in text
    assert "--data 'my notes'" in run["train_command"] and run["config"]["data"] == "my notes"
    assert f"out/own.gpu/{sha256[:8]}/rope-norm-post-1337" in out
    page = (home / "results" / "mine.md").read_text()
    assert "| rope | 1 |" in page and "`python reproduce.py own --scale gpu --data FOLDER`" in page
    (home / "my notes" / "more.txt").write_text("Another word. " * 99)
    assert f"own.gpu is of another text, sha256 {sha256}: move it away" in complaint(
        home, *words, "--device", "cpu")
    path.with_stem("cable-1337").write_text(text.replace(sha256, "0").replace(
        '"label": "rope"', '"label": "cable"'))
    assert "own.gpu has runs of several texts, sha256 " in complaint(home, *words)


def test_more_seeds_on_another_text_end_before_their_training(home, here):
    """As stdlib is another with another Python; what is there is drawn all the same."""
    here(texts=texts())
    words = "reproduce.py", "texts", "--rows", "rope", "--device", "cpu"
    command(home, *words)
    (home / "notes" / "more.txt").write_text("Another word. " * 99)
    assert "1 runs, 1 of them there" in command(home, *words)[0]
    assert "texts.cpu is of another text, sha256 " in complaint(home, *words, "--seeds", 2)
    assert not (home / "out" / "texts.cpu" / "rope-norm-post-1338").exists()


def test_runs_from_elsewhere_and_what_has_none(home, here):
    """A file that is copied into results/runs is in its page; until then its table is not run."""
    here(texts=texts())
    (home / "results").mkdir()
    (home / "results" / "mine.md").write_text(BLOCK + BLOCK.replace("texts", "not_run"))
    command(home, "reproduce.py", "texts", "--rows", "cable", "--seeds", 1, "--device", "cpu")
    page = (home / "results" / "mine.md").read_text()
    assert "the paper's size" not in page
    run, = json.loads((home / "results/runs/texts.cpu/cable-1337.json").read_text())["runs"]
    # 6 N D and 12 L E T D a training: 2 steps of 4 windows of 16 tokens, a layer of width 16
    flops = (6 * run["parameters"] + 12 * 16 * 16) * 2 * 4 * 16
    assert f"| A table | `python reproduce.py texts --scale paper` | {3 * flops:.1e} | " in page
    shutil.copytree(home / "results/runs/texts.cpu", home / "results/runs/texts.paper")
    command(home, "reproduce.py", "texts", "--rows", "cable", "--seeds", 1)
    page = (home / "results" / "mine.md").read_text()
    assert page.count("| cable | 1 |") == 2 and "texts --scale paper` |" not in page
    assert "At the paper's size:" in page and "`python reproduce.py texts --scale paper`;" in page


@pytest.mark.slow
def test_a_signal_saves_what_runs(repo):
    """In processes of their own; that the same command continues has a test above."""
    train = " ".join(TINY_FLAGS).replace("--device cpu", "--max_iters 9000 --data flipflop")
    (repo / "experiments" / "papers" / "mine.py").write_text(
        "'''Mine'''\nfrom experiments import rows\nENTRIES = {'mine': dict(title='Mine', columns=["
        f"('iid', 'iid', 'exact_match')], cpu=dict(train='{train}', eval='--sequences 8', "
        "rows=rows(1, 'rope')))}\n")
    words = [sys.executable, "reproduce.py", "mine", "--device", "cpu"]
    process = subprocess.Popen(words, cwd=repo, text=True, env=ONE_THREAD, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    log = repo / "out" / "mine.cpu" / "rope-1337" / "log.jsonl"
    while not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "the same command continues" in out
    assert (log.parent / "ckpt.pt").exists()


def cells_of(table):
    return [cells(line) for line in table.splitlines() if line[:2] == "| "]


def test_tables_of_text_by_hand():
    """Every number of a made-up JSON in the cell where it belongs."""
    a, b = (dict(label="a", block_size=8, perplexity={"8": p, "16": q}, strided={"8": s, "16": t})
            for p, q, s, t in ((3.5, 4.5, 3.25, 2.75), (5.5, 6.5, 5.25, 4.75)))
    result = dict(runs=[a, b], lengths=[8, 16], strided_tokens=9)
    both = ["4.500 ± 1.414", "5.500 ± 1.414", f"{(4.5 / 3.5 + 6.5 / 5.5) / 2:.3f}"]
    strided = ["4.250 ± 1.414", "3.750 ± 1.414", f"{(2.75 / 3.25 + 4.75 / 5.25) / 2:.3f}"]
    head = ["model", "seeds", "8", "16", "16 / 8"]

    def found(**changes):
        return [cells_of(table) for _, table in tables.text_tables(result | changes)]
    assert found() == [[head, ["a", "2", *both]], [head, ["a", "2", *strided]]]
    beside, = found(paper=dict(a=(1.0, 4.0)), paper_lengths=[8, 16],
                    runs=[{key: a[key] for key in a.keys() - {"strided"}}])
    assert beside[0][2:6] == ["8", "paper", "16", "paper"] and beside[1][3:6:2] == ["1.00", "4.00"]
    again = [run | dict(again={"0": gain, "8": [0.0, -0.25, 0.25]})
             for run, gain in ((a, [0.5, 0.25, 0.75]), (a, [1.0, 0.5, 1.5]),
                               (b | dict(label="b"), [2.0, 1.5, 2.5]))]
    *_, copied = found(runs=again)
    assert copied[1:] == [["a", "2", "0.750 ± 0.354", "0.000 ± 0.000"],
                          ["b", "1", "2.000 [1.500, 2.500]", "0.000 [-0.250, 0.250]"]]
    c = a | dict(label="c", strided={"8": 2.0, "16": None}, perplexity={"8": 2.0, "16": None})
    d = a | dict(label="d", strided={"8": 4.0, "16": 2.0})
    _, strided = found(runs=[a, b, c, d])
    assert [row[0] for row in strided[1:]] == ["d", "a", "c"]  # by what is gained; NaN comes last


def test_tables_of_tasks_by_hand():
    def scored(*values):
        rates = iter(values)
        return {T: {split: dict(exact=dict(value=next(rates), low=0.25, high=0.75))
                    for split in ("iid", "far")} for T in ("8", "1024")}
    columns = [("iid", "iid", "exact"), ("far", "far", "exact")]
    result = dict(columns=columns, runs=[
        dict(model="a", scores=scored(0.5, 0.25, 0.375, 0.125)),
        dict(model="a", scores=scored(0.625, 0.5, 0.75, 0.25)),
        dict(model="b", scores=scored(0.5, 0.625, 0.25, 0.5))])
    (_, table), = tables.task_tables(result)
    found = cells_of(table)
    assert found[0] == ["model", "seeds", "iid", "iid 1,024", "far", "far 1,024"]
    assert found[1][:4] == ["a", "2", "56.25 (50.00 to 62.50)", "56.25 (37.50 to 75.00)"]
    assert found[2][:3] == ["b", "1", "50.00 [25.00, 75.00]"] and found[2][5].startswith("50.00 [")
    assert tables.percent([dict(value=1.0, low=0.9, high=1.0)] * 2) == "100"
