"""reproduce.py matrix: every method on every task, and a row of yours."""
import functools
import json
import math

import pytest
from matplotlib import pyplot

from experiments import Row, rows, tables
from experiments.papers import matrix
from tests.helpers import TINY_FLAGS, command, markdown_tables, write_fork, write_notes

COLUMNS = {
    "text: perplexity": matrix.COLUMNS["text: perplexity"],
    "text: strided": matrix.text(matrix.strided_ratio, 2),
    "flip-flop: iid": matrix.COLUMNS["flip-flop: iid"],
    "flip-flop: worst": matrix.column("flipflop", matrix.percent_right, 2, "", "exact_match")}


def small_matrix(*models):
    flags = " ".join(TINY_FLAGS[:-2]) + " --max_iters 2 --eval_interval 1 --norm pre --data"
    tasks = dict(text=dict(train=f"{flags} notes", eval="--lengths 16 32 --strided"),
                 flipflop=dict(train=f"{flags} flipflop", eval="--sequences 8 --lengths 16 32"))
    return dict(title="Two tasks", columns=COLUMNS, cpu=dict(tasks=tasks, rows=rows(1, *models)))


def test_a_matrix_and_a_row_that_is_added(copy, here, monkeypatch):
    """A file for each row and task; the added row goes to out/, and stands beside the others."""
    rectangle, frames = pyplot.Rectangle, []
    write_notes(copy)
    write_fork(copy)
    entry = small_matrix("rope", "learned")
    entry["cpu"]["rows"]["rope, at 32"] = Row(weights_of="rope", eval="--lengths 32")
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
    table, = markdown_tables(out)
    numbers = [table["rope"][column] for column in ("text: perplexity", "text: strided")]
    assert numbers == [f"{y:.2f}" for y in want]
    assert table["learned"]["text: strided"] == "ends" == table["learned"]["flip-flop: worst"]
    assert table["rope, at 32"]["text: perplexity"] == "ends"  # was not read there
    # the row of a fork
    monkeypatch.setattr(pyplot, "Rectangle", lambda *args, **_: frames.append(args) or rectangle(
        *args))
    out, _ = run("--rows", "mine")
    assert out.count("$ python train.py") == 2 and frames == [((0, 3), 4, 1)]  # the fourth row
    table, = markdown_tables(out)
    assert list(table) == ["rope", "learned", "rope, at 32", "mine"]
    assert float(table["mine"]["text: perplexity"]) > 1
    assert len(list(folder.rglob("*.json"))) == 6


def test_the_columns_of_the_matrix_by_hand():
    scores = {T: {split: dict(exact_match=dict(value=v), sequence_error=dict(value=v / 2))
                  for split, v in values.items()}
              for T, values in (("4", dict(iid=1.0, sparse=0.5)), ("8", dict(iid=0.8, sparse=0.2)))}
    run = dict(block_size=4, perplexity={"4": 3.0, "8": 6.0, "16": None},
               strided={"4": 2.0, "8": 1.5}, scores=scores,
               auc={"4": {"long": [0, 0, 0, 0, None, 0.5, 0.7]}})
    assert matrix.perplexity(run, 2) == 6 and matrix.perplexity(run, 8) is None
    assert math.isnan(matrix.perplexity(run, 4))  # it was there, and not finite
    assert matrix.strided_ratio(run, 2) == 0.75 and matrix.strided_ratio(run, 4) is None
    assert matrix.percent_right(run, 1, "sparse", "exact_match") == 50
    assert matrix.percent_right(run, 1, "sparse", "sequence_error") == 75
    assert matrix.percent_right(run, 1, "dense", "exact_match") is None
    assert matrix.percent_right(run, 2, "", "exact_match") == 20
    assert matrix.percent_right(run, 4, "", "exact_match") is None
    assert matrix.beyond(run, "auc", "long") == pytest.approx(0.6)
    assert matrix.beyond(run, "tvd", "long") is None
    # why there is no number; older files have their numbers alone
    said = [tables.missing(y) for y in ([1.0], [], [1.0, None], [None, math.nan])]
    assert said == ["", "not run", "ends", "not finite"]
    column = matrix.column("flipflop", matrix.percent_right, 1, "iid", "exact_match")
    old, other = dict(values={"a": 7.0}, task="flipflop"), run | dict(task="copy")
    assert tables.values_of("a", column, [run | dict(task="flipflop"), old, other]) == [100, 7]
    # every column reads what its task has, and every task has its column
    assert {c["task"] for c in matrix.COLUMNS.values()} == set(matrix.TASKS)
