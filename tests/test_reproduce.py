"""reproduce.py: its commands here, one after the other; its tables by hand."""
import functools
import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import lab
from lab import Row, published, rows, tables
from tests.helpers import (
    ONE_THREAD,
    ROOT,
    TINY_FLAGS,
    command,
    complaint,
    entry,
    is_png,
    markdown_tables,
    process,
    write_fork,
    write_notes,
)

BLOCK = "# Mine\n\n<!-- table texts -->\n<!-- /table -->\n\nWords.\n"
TEXTS = entry("--data notes --norm pre", rows(2, "cable") | {
    "rope": Row("--model rope --norm post"),
    "rope, far": Row(weights_of="rope", eval="--lengths 32")}, "--lengths 16 32")
# of a text of the user's, as lm_english is
OWN = entry("--data FOLDER", rows(1, "rope"), "--lengths 16 32")


def test_a_table_is_made_continued_and_not_made_again(home, here):
    """A run is a file: there, and it is used; absent, and it is made."""
    here(texts=TEXTS)
    (home / "results").mkdir()
    (home / "results" / "mine.md").write_text(BLOCK + BLOCK.replace("texts", "not_run"))
    run = functools.partial(command, home, "reproduce.py", "texts", "--device", "cpu")
    assert run("--dry_run")[0].count("--no-evaluate --device cpu\n") == 4
    assert "0 of 4 runs are there" in command(home, "reproduce.py")[0]
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
    ys = [json.loads((folder / f"{name}.json").read_text())["runs"][0]["perplexity"]["16"]
          for name in names[:2]]
    page = (home / "results" / "mine.md").read_text()
    assert f"| cable | 2 | {np.mean(ys):.3f} ± {np.std(ys, ddof=1):.3f} |" in page
    assert "| rope, far | 1 | - |" in page and page.endswith("<!-- /table -->\n\nWords.\n")
    assert "<sub>`python reproduce.py texts`; [runs](runs/texts.cpu); " in page
    assert "\n| A table | `python reproduce.py texts --scale paper` |\n" in page
    assert f"torch {torch.__version__}" in page and is_png(home / "results" / "texts.cpu.png")
    # what is there is used; more seeds are made
    assert "4 runs, 4 of them there" in run()[0]
    out, _ = run("--rows", "rope", "--seeds", 2)
    assert out.count("$ python train.py") == 1 and "| rope | 2 |" in out
    # a lost run is scored again, a stopped one continues
    (folder / "cable-1337.json").unlink()
    assert run()[0].count("$ python") == 2  # eval.py and plot.py
    path = home / "out" / "texts.cpu" / "cable-1338" / "ckpt.pt"
    for change in (dict(iter=1), dict(due=True)):  # in a step, in the last validation
        (folder / "cable-1338.json").unlink()
        torch.save(torch.load(path, weights_only=True) | change, path)
        assert "$ python train.py --resume out/texts.cpu/cable-1338 --no-evaluate" in run()[0]
    # a training of other flags, as it was before an edit of an entry, is not used
    other = dict(TEXTS["cpu"], train=TEXTS["cpu"]["train"] + " --batch_size 3")
    here(texts=TEXTS | dict(cpu=other))
    (folder / "rope-1337.json").unlink()
    assert "rope-1337 failed" in complaint(home, "reproduce.py", "texts", "--device", "cpu")
    here(texts=TEXTS)
    assert run()[0].count("$ python train.py") == 0
    # rows of another text are left out, and named
    path = folder / "cable-1337.json"
    path.write_text(path.read_text().replace('"sha256": "', '"sha256": "0'))
    out, _ = run()
    assert "left out, as they are of another text: cable" in out and "| cable | 1 |" in out


def test_the_list_needs_neither_torch_nor_numpy():
    out, _ = process(ROOT, "-c", "import sys, reproduce; reproduce.main([]); print(*sys.modules)")
    assert not {"torch", "numpy", "tiktoken", "matplotlib"} & set(out.split())


@pytest.mark.parametrize("words, says", [
    ("text", "unknown entry 'text': did you mean texts?"),
    ("texts --rows rop", "texts has no row 'rop', nor is it a model: did you mean rope"),
    ("texts --seeds -1", "--jobs must be at least 1, --seeds 0 or more"),
    ("texts --data x", "--data is not for texts"),
    ("own", "own needs a text: --data FOLDER")])
def test_what_cannot_be_asked_for(words, says, home, here):
    here(texts=TEXTS, own=OWN)
    assert says in complaint(home, "reproduce.py", *words.split())


def test_a_table_of_a_text_of_yours(home, here):
    """Its runs hold the text's sha256 and not where it lay, and are mixed with no other text's."""
    here(own=OWN)
    words = "reproduce.py", "own", "--data", "notes", "--device", "cpu"
    out, _ = command(home, *words)
    text = (home / "results" / "runs" / "own.cpu" / "rope-1337.json").read_text()
    sha256 = json.loads(text)["data"]["sha256"]
    assert str(home) not in text and f"out/own.cpu/{sha256[:8]}/rope-1337" in out
    (home / "notes" / "more.txt").write_text("Another word. " * 99)
    assert f"own.cpu is of another text, sha256 {sha256}, than yours" in complaint(home, *words)


def test_a_row_of_yours(copy, here):
    """It stands below those of the table, and all that it makes is in out/."""
    write_notes(copy)
    write_fork(copy)
    here(texts=TEXTS)
    words = "reproduce.py", "texts", "--device", "cpu", "--rows"
    command(copy, *words, "rope")
    out, _ = command(copy, *words, "mine", "--seeds", 2)
    assert out.count("$ python train.py") == 2 and "| mine | 2 |" in out and "| rope | 1 |" in out
    assert is_png(copy / "out/texts.cpu/added/texts.cpu.png")
    assert len(list((copy / "results").rglob("*.json"))) == 1
    assert "2 runs, 2 of them there" in command(copy, *words, "mine", "--seeds", 2)[0]


@pytest.mark.slow
def test_a_kill_saves_what_runs(repo):
    """In processes of their own; that the same command continues has a test above."""
    train = " ".join(TINY_FLAGS).replace("--device cpu", "--max_iters 9000 --data flipflop")
    (repo / "lab" / "papers" / "mine.py").write_text(
        "'''Mine'''\nfrom lab import rows\nENTRIES = {'mine': dict(title='Mine', columns=["
        f"('iid', 'iid', 'exact_match')], cpu=dict(train='{train}', eval='--sequences 8', "
        "rows=rows(2, 'rope')))}\n")
    process = subprocess.Popen([sys.executable, "reproduce.py", "mine", "--device", "cpu"],
                               cwd=repo, text=True, env=ONE_THREAD, stdout=subprocess.PIPE)
    log = repo / "out" / "mine.cpu" / "rope-1337" / "log.jsonl"
    while not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.1)
    process.terminate()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "the same command continues" in out
    assert (log.parent / "ckpt.pt").exists() and log.read_text().count("\n") < 9000
    assert "rope-1338" not in out


def test_tables_of_text_by_hand():
    """Every number of a made-up JSON in the cell where it belongs."""
    def run(label, near, far, *gain):
        by_length = {"8": near, "16": 2 * near, "32": far}
        return dict(label=label, block_size=8, lengths=[8, 16, 32], perplexity=by_length,
                    strided=by_length, again={"0": gain})
    runs = [run("a", 3.5, 4.5, 0.5, 0.25, 0.75), run("a", 5.5, 6.5, 1.0, 0.5, 1.5),
            run("c", 2.0, None, 2.0, 1.5, 2.5), run("d", 4.0, 2.0, 0, -1, 1)]
    lengths = {"8": "4.500 ± 1.414", "16": "9.000 ± 2.828", "32": "5.500 ± 1.414"}
    ends = {"seeds": "2"} | {n: lengths[n] for n in ("8", "32")}
    strided = {f"strided, {n}": cell for n, cell in lengths.items()} | {
        "strided, 32 / 16": f"{(4.5 / 7 + 6.5 / 11) / 2:.3f}"}
    numbers = dict(a=[1.0, [4.0, 0.5]])
    theirs = {"paper, 8": "1.00", "paper, 16": "4.00 ± 0.50"}
    for published_at, want in (((), ends), ([8, 16], ends | lengths | theirs)):
        rows, copied = (markdown_tables(table)[0] for _, table in tables.text_tables(
            runs, numbers, published_at))
        assert rows["a"] == want | strided and rows["c"]["strided, 32"] == "nan"
    assert copied["a"]["after 0"] == "0.750 ± 0.354"
    assert copied["c"]["after 0"] == "2.000 [1.500, 2.500]"


def test_ratios_over_documents_by_hand():
    """A row that is a constant below another in each document has no interval."""
    tokens, apart = np.array([5, 8, 2, 0]), np.array([-2, 0, -1, 6])  # of a token

    def run(near, far):
        sums = {"4": (tokens * near).tolist(), "8": (tokens * far).tolist()}
        return [dict(documents=dict(strided=dict(tokens=tokens.tolist(), **sums)))]
    a, b = run(1, 2), run(1.5, 2 + apart)
    assert tables.ratio(a, "strided", 8, 4) == "2.718 [2.718, 2.718]"
    assert tables.ratio(b, "strided", 4, 4, a) == "1.649 [1.649, 1.649]"
    drawn = np.random.default_rng(0).integers(0, 3, (1000, 3))  # of the three that have tokens
    means = (tokens * apart)[drawn].sum(1) / tokens[drawn].sum(1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    want = f"{np.exp(-12 / 15):.3f} [{low:.3f}, {high:.3f}]"
    assert tables.ratio(b, "strided", 8, 8, a) == want


def test_rates_in_percent():
    """Of seeds the mean and both ends, of one its interval; all and nothing are bare."""
    half, more, all_ = (dict(value=y, low=0.25, high=0.75) for y in (0.5, 0.625, 1.0))
    shown = [tables.percent(rates) for rates in ([half, more], [all_], [all_, all_], [])]
    assert shown == ["56.25 (50.00 to 62.50)", "100 [25.00, 75.00]", "100", "-"]


def test_the_papers_numbers_are_of_entries_and_rows():
    """papers.json has no others, but for RoPE on code, which has no run."""
    for name, numbers in published().items():
        entry = lab.entries()[name]
        labels = {"rope", "cope_rope"} if name == "cope_table5" else set()
        for scale in entry.keys() & set(lab.SCALES):
            labels |= entry[scale]["rows"].keys()
        assert numbers.keys() <= labels, name
