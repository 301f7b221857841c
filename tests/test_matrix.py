"""reproduce.py matrix: every method on every task, and --add."""
import functools
import json
import math

import pytest

from experiments import Row, cells, rows
from experiments.papers import matrix
from tests.helpers import TINY_FLAGS, command, markdown_tables, write_fork, write_notes

COLUMNS = {
    "text: perplexity": matrix.COLUMNS["text: perplexity"],
    "text: strided": matrix.TEXT | dict(read=cells.reading, asked=(2,)),
    "flip-flop: iid": matrix.COLUMNS["flip-flop: iid"],
    "flip-flop: worst": matrix.right("flipflop", 2, "", "exact_match")}


def small_matrix(*models):
    flags = " ".join(TINY_FLAGS[:-2]) + " --max_iters 2 --eval_interval 1 --norm pre --data"
    tasks = dict(text=dict(train=f"{flags} notes", eval="--lengths 16 32 --strided"),
                 flipflop=dict(train=f"{flags} flipflop", eval="--sequences 8 --lengths 16 32"))
    return dict(title="Two tasks", columns=COLUMNS, cpu=dict(tasks=tasks, rows=rows(1, *models)))


def test_a_matrix_and_a_row_that_is_added(copy, here):
    """A file for each row and task; the added row goes to out/, and stands beside the others."""
    write_notes(copy)
    write_fork(copy)
    entry = small_matrix("rope", "learned")
    entry["cpu"]["rows"]["rope, at 32"] = Row(of="rope", eval="--lengths 32")
    here(matrix=entry)
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    out, _ = run("--jobs", 2)
    assert out.count("$ python train.py") == 4 and out.count("$ python eval.py") == 6
    folder = copy / "results" / "runs" / "matrix.cpu"
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))
    assert names == [f"{task}/{row}-1337.json" for task in ("flipflop", "text")
                     for row in ("learned", "rope", "rope-at-32")]
    row, = json.loads((folder / "text" / "rope-1337.json").read_text())["runs"]
    want = row["perplexity"]["16"], row["strided"]["32"] / row["strided"]["16"]
    assert row["values"] == dict(zip(("text: perplexity", "text: strided"), want))
    table, = markdown_tables(out)
    assert table["rope"]["text: perplexity"].startswith(f"{want[0]:.2f}")
    assert table["learned"]["text: strided"] == "ends" == table["learned"]["flip-flop: worst"]
    assert table["rope, at 32"]["text: perplexity"] == "ends"  # was not read there
    # the row of a fork
    out, _ = run("--add", "mine", "--tasks", "text", "flipflop")
    assert out.count("$ python train.py") == 2
    table, = markdown_tables(out)
    assert list(table) == ["rope", "learned", "rope, at 32", "mine"]
    added = json.loads((copy / "out" / "matrix.cpu" / "added" / "mine.json").read_text())
    assert added["added"] == "mine" and "value" in added["cells"]["mine"]["text: perplexity"]
    assert len(list(folder.rglob("*.json"))) == 6
    out, _ = run("--add", "mine", "--tasks", "flipflop")
    assert "1 runs, 1 of them there" in out and "text" not in markdown_tables(out)[0]["rope"]


def test_the_columns_of_the_matrix_by_hand():
    scores = {T: {split: dict(exact_match=dict(value=v), sequence_error=dict(value=v / 2))
                  for split, v in values.items()}
              for T, values in (("4", dict(iid=1.0, sparse=0.5)), ("8", dict(iid=0.8, sparse=0.2)))}
    run = dict(block_size=4, perplexity={"4": 3.0, "8": 6.0, "16": None},
               strided={"4": 2.0, "8": 1.5}, scores=scores,
               auc={"4": {"long": [0, 0, 0, 0, None, 0.5, 0.7]}})
    assert cells.perplexity(run, 2) == 6 and cells.perplexity(run, 8) is None
    assert math.isnan(cells.perplexity(run, 4))  # it was there, and not finite
    assert cells.reading(run, 2) == 0.75 and cells.reading(run, 4) is None
    assert cells.percent(run, 1, "sparse", "exact_match") == 50
    assert cells.percent(run, 1, "sparse", "sequence_error") == 75
    assert cells.percent(run, 1, "dense", "exact_match") is None
    assert cells.percent(run, 2, "", "exact_match") == 20
    assert cells.percent(run, 4, "", "exact_match") is None
    assert cells.beyond(run, "auc", "long") == pytest.approx(0.6)
    assert cells.beyond(run, "tvd", "long") is None
    # seeds have a mean and a spread
    two = [dict(values=dict(a=1.0)), dict(values=dict(a=2.0))]
    assert cells.cell("a", two) == dict(value=1.5, spread=pytest.approx(0.5**0.5))
    assert cells.cell("a", two[:1]) == dict(value=1.0)
    assert cells.cell("a", []) == cells.cell("b", two) == dict(reason="not run")
    ends = dict(values=dict(a=None))
    assert cells.cell("a", [*two, ends]) == dict(reason="ends")
    assert cells.cell("a", [ends | dict(not_finite=True)]) == dict(reason="not finite")
    # every column reads what its task has, and every task has its column
    assert {c["task"] for c in matrix.COLUMNS.values()} == set(matrix.TASKS)
