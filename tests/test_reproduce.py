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

import experiments
from experiments import Row, published, rows, tables
from tests.helpers import (
    ONE_THREAD,
    ROOT,
    TINY_FLAGS,
    cells,
    command,
    complaint,
    entry,
    is_png,
    process,
    write_fork,
    write_notes,
)

BLOCK = "# Mine\n\n<!-- table texts -->\n<!-- /table -->\n\nWords.\n"


def texts(**changes):
    table = rows(2, "cable") | rows(1, "rope", flags="--norm post")
    return entry("--data notes --norm pre", table | {
        "rope, far": Row(weights_of="rope", eval="--lengths 32")}, "--lengths 16 32", **changes)


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
    assert "<sub>`python reproduce.py texts`; [runs](runs/texts.cpu); " in page
    assert f"torch {torch.__version__}" in page and "commits " in page
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
    # a file that is cut off is named, and made anew from its training
    (folder / "cable-1338.json").write_text('{"runs": [')
    out, err = run()
    assert "cable-1338.json is damaged" in err and "| cable | 2 |" in out
    assert "4 runs, 3 of them there" in out and "train.py" not in out
    # so is a block without a table
    (home / "results" / "mine.md").write_text(BLOCK.replace("texts", "textz"))
    assert ("mine.md has a block for 'textz', which is neither an entry nor a JSON in results/: "
            "remove the block, or did you mean texts?") in complaint(
                home, "reproduce.py", "texts", "--rows", "rope")


def test_what_an_edit_of_an_entry_breaks_is_named(home, here, monkeypatch):
    """A training of other flags; a file of another JSON; a column, an entry, the end of a block."""
    run = functools.partial(complaint, home, "reproduce.py", "texts", "--device", "cpu", "--rows")
    changed, task = texts(), texts(columns=[("iid", "iid", "exact_mach")])
    changed["cpu"] = changed["cpu"] | dict(train=changed["cpu"]["train"] + " --batch_size 3")
    task["cpu"]["train"] = task["cpu"]["train"].replace("notes", "flipflop")
    here(texts=texts())
    command(home, "reproduce.py", "texts", "--device", "cpu", "--rows", "rope")
    path = home / "results" / "runs" / "texts.cpu" / "rope-1337.json"
    here(texts=changed)
    path.unlink()
    assert "rope-1337 failed; the rest is kept" in run("rope")
    here(texts=texts())
    for text in ("{}", "[]", "null", '{"runs": [{}]}'):
        path.write_text(text)
        out, err = command(home, "reproduce.py", "texts", "--device", "cpu", "--rows", "rope")
        assert "rope-1337.json is damaged" in err and "1 runs, 0 of them there" in out
    here(task=task)
    assert "column 'iid': there is no iid exact_mach: did you mean iid exact_match" in complaint(
        home, "reproduce.py", "task", "--rows", "rope", "--device", "cpu")
    (home / "results" / "mine.md").write_text(BLOCK.replace("<!-- /table -->", ""))
    here(texts=texts())
    assert "results/mine.md: a block has no <!-- /table -->" in run("rope")
    twice = 2 * experiments.files()
    monkeypatch.setattr(experiments, "files", lambda: twice)
    assert "has an entry 'texts', and so has another file" in run("rope")


def test_the_list_and_a_dry_run(home, here):
    here(texts=texts())
    out, _ = command(home, "reproduce.py")
    assert "\nMine.\n  texts\n      A table\n      --scale cpu    0 of 4 runs are there\n" in out
    out, _ = command(home, "reproduce.py", "texts", "--dry_run", "--device", "cpu")
    assert out.count("$ python train.py") == out.count("$ python eval.py") == 4
    assert out.count("--no-evaluate --device cpu\n") == 4 and not (home / "out").exists()


def test_the_list_needs_neither_torch_nor_numpy():
    code = "import sys, reproduce; reproduce.main([]); print(*sys.modules)"
    *_, modules = process(ROOT, "-c", code)[0].splitlines()
    assert not {"torch", "numpy", "tiktoken", "matplotlib"} & set(modules.split())


@pytest.mark.parametrize("words, says", [
    ("text", "unknown entry 'text': did you mean texts?"),
    ("texts --rows rop", "texts has no row 'rop', nor is it a model: did you mean rope"),
    ("texts --seeds -1", "--jobs must be at least 1, --seeds 0 or more"),
    ("searched --rows pre", "--rows and --seeds are not for searched"),
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
    assert "own --scale gpu is for a CUDA GPU, and torch finds none" in complaint(home, *words)
    out, _ = command(home, *words, "--device", "cpu")
    path = home / "results" / "runs" / "own.gpu" / "rope-1337.json"
    text = path.read_text()
    run, sha256 = json.loads(text)["runs"][0], json.loads(text)["data"]["sha256"]
    assert f"tokens to train on, sha256 {sha256}" in out and str(home) not in text
    assert "--data 'my notes'" in run["train_command"] and run["config"]["data"] == "my notes"
    assert f"out/own.gpu/{sha256[:8]}/rope-norm-post-1337" in out
    page = (home / "results" / "mine.md").read_text()
    assert "| rope | 1 |" in page and "`python reproduce.py own --scale gpu --data FOLDER`" in page
    (home / "my notes" / "more.txt").write_text("Another word. " * 99)
    assert re.search(f"own.gpu is of another text, sha256 {sha256}, than yours, [0-9a-f]+: move",
                     complaint(home, *words, "--seeds", 2, "--device", "cpu"))
    path.with_stem("cable-1337").write_text(text.replace(sha256, "0").replace(
        '"label": "rope"', '"label": "cable"'))
    assert f"own.gpu has runs of several texts, sha256 0, {sha256}: move" in complaint(
        home, *words, "--device", "cpu")


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
    assert "\n| A table | `python reproduce.py texts --scale paper` |\n" in page
    shutil.copytree(home / "results/runs/texts.cpu", home / "results/runs/texts.paper")
    command(home, "reproduce.py", "texts", "--rows", "cable", "--seeds", 1)
    page = (home / "results" / "mine.md").read_text()
    assert page.count("| cable | 1 |") == 2 and "texts --scale paper` |" not in page
    assert "At the paper's size:" in page and "`python reproduce.py texts --scale paper`;" in page


def test_a_row_of_yours(copy, here):
    """It stands below those of the table, and all that it makes is in out/."""
    write_notes(copy)
    write_fork(copy)
    here(texts=texts())
    run = functools.partial(command, copy, "reproduce.py", "texts", "--device", "cpu", "--rows")
    run("rope")
    out, _ = run("mine", "--seeds", 2)
    assert out.count("$ python train.py") == 2 and "| mine | 2 |" in out and "| rope | 1 |" in out
    names = sorted(path.name for path in (copy / "out/texts.cpu/added/runs").iterdir())
    assert names == ["mine-1337.json", "mine-1338.json"]
    assert "after an edit of mine remove out/texts.cpu/added: what is there is used" in out
    assert is_png(copy / "out/texts.cpu/added/texts.cpu.png")
    assert len(list((copy / "results").rglob("*.json"))) == 1
    assert "2 runs, 2 of them there" in run("mine", "--seeds", 2)[0]
    # beside rows of another text it stands alone, as with another Python's library
    path = copy / "results/runs/texts.cpu/rope-1337.json"
    path.write_text(re.sub('"sha256": ".*"', '"sha256": "0"', path.read_text()))
    out, _ = run("mine", "--seeds", 2)
    assert "the other rows are of another text than mine, and left out there" in out
    assert "| mine | 2 |" in out and "| rope |" not in out


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
    a, b = (dict(label="a", block_size=8, lengths=[8, 16], strided_tokens=9,
                 perplexity={"8": p, "16": q}, strided={"8": s, "16": t})
            for p, q, s, t in ((3.5, 4.5, 3.25, 2.75), (5.5, 6.5, 5.25, 4.75)))
    both = ["4.500 ± 1.414", "5.500 ± 1.414", f"{(4.5 / 3.5 + 6.5 / 5.5) / 2:.3f}"]
    strided = ["4.250 ± 1.414", "3.750 ± 1.414", f"{(2.75 / 3.25 + 4.75 / 5.25) / 2:.3f}"]
    head = ["model", "seeds", "8", "16", "16 / 8"]

    def found(runs, numbers=(), lengths=()):
        texts = tables.text_tables(runs, dict(numbers), lengths)
        return [cells_of(table) for _, table in texts]
    assert found([a, b]) == [[head, ["a", "2", *both]], [head, ["a", "2", *strided]]]
    beside, = found([{key: a[key] for key in a.keys() - {"strided"}}],
                    dict(a=[1.0, [4.0, 0.5]]), [8, 16])
    assert beside[0][2:] == ["8", "16", "16 / 8", "paper, 8", "paper, 16"]
    assert beside[1][5:] == ["1.00", "4.00 ± 0.50"]
    again = [run | dict(again={"0": gain, "8": [0.0, -0.25, 0.25]})
             for run, gain in ((a, [0.5, 0.25, 0.75]), (a, [1.0, 0.5, 1.5]),
                               (b | dict(label="b"), [2.0, 1.5, 2.5]))]
    *_, copied = found(again)
    assert copied[1:] == [["a", "2", "0.750 ± 0.354", "0.000 ± 0.000"],
                          ["b", "1", "2.000 [1.500, 2.500]", "0.000 [-0.250, 0.250]"]]
    c = a | dict(label="c", strided={"8": 2.0, "16": None}, perplexity={"8": 2.0, "16": None})
    d = a | dict(label="d", strided={"8": 4.0, "16": 2.0})
    _, strided = found([a, b, c, d])
    assert [row[0] for row in strided[1:]] == ["d", "a", "c"]  # by what is gained; NaN comes last


def test_tables_of_tasks_by_hand():
    def scored(*values):
        rates = iter(values)
        return {T: {split: dict(exact=dict(value=next(rates), low=0.25, high=0.75))
                    for split in ("iid", "far")} for T in ("8", "1024")}
    columns = [("iid", "iid", "exact"), ("far", "far", "exact")]
    _, table = tables.task_table(columns, numbers={}, runs=[
        dict(model="a", scores=scored(0.5, 0.25, 0.375, 0.125)),
        dict(model="a", scores=scored(0.625, 0.5, 0.75, 0.25)),
        dict(model="b", scores=scored(0.5, 0.625, 0.25, 0.5))])
    found = cells_of(table)
    assert found[0] == ["model", "seeds", "iid", "iid 1,024", "far", "far 1,024"]
    assert found[1][:4] == ["a", "2", "56.25 (50.00 to 62.50)", "56.25 (37.50 to 75.00)"]
    assert found[2][:3] == ["b", "1", "50.00 [25.00, 75.00]"] and found[2][5].startswith("50.00 [")
    assert tables.percent([dict(value=1.0, low=0.9, high=1.0)] * 2) == "100"


def test_the_papers_numbers_are_of_entries_and_rows():
    """papers.json has no others, but for RoPE on code, which has no run."""
    for name, numbers in published().items():
        entry = experiments.entries()[name]
        labels = {label for scale in ("cpu", "paper")
                  for label in entry.get(scale, {}).get("rows", {})}
        assert numbers.keys() - labels <= ({"rope"} if name == "cope_table5" else set()), name
