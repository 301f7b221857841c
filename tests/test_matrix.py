"""reproduce.py matrix: every method on every task, and a row of yours."""
import json
import math

import pytest

from lab import Row, rows, tables
from lab.papers import matrix
from tests.helpers import ROOT, TINY_FLAGS, command, markdown_tables, write_fork, write_notes


def test_a_matrix_and_a_row_that_is_added(copy, here):
    """A file for each row and task; the added row goes to out/, and stands beside the others."""
    write_notes(copy)
    write_fork(copy)
    flags = " ".join(TINY_FLAGS[:-2]) + " --max_iters 2 --eval_interval 1 --norm pre --data"
    columns = {
        "text: perplexity": matrix.COLUMNS["text: perplexity"],
        "flip-flop: worst": matrix.column("flipflop", matrix.percent_right, 2, "", "exact_match")}
    here(matrix=dict(title="Two tasks", columns=columns, cpu=dict(
        tasks=dict(text=dict(train=f"{flags} notes", eval="--lengths 16 32"),
                   flipflop=dict(train=f"{flags} flipflop", eval="--sequences 8 --lengths 16 32")),
        rows=rows(1, "rope", "learned") | {
            "rope, at 32": Row(weights_of="rope", eval="--lengths 32")})))
    words = "reproduce.py", "matrix", "--device", "cpu"
    out, _ = command(copy, *words, "--jobs", 2)
    assert out.count("$ python train.py") == 4 and out.count("$ python eval.py") == 6
    folder = copy / "results" / "runs" / "matrix.cpu"
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.json"))]
    assert names == [f"{task}/{row}-1337.json" for task in ("flipflop", "text")
                     for row in ("learned", "rope", "rope-at-32")]
    out, _ = command(copy, *words, "--rows", "mine")
    assert out.count("$ python train.py") == 2
    row, = json.loads((folder / "text" / "rope-1337.json").read_text())["runs"]
    table, = markdown_tables(out)
    assert list(table) == ["rope", "learned", "rope, at 32", "mine"]
    assert table["rope"]["text: perplexity"] == f"{row['perplexity']['16']:.2f}"
    assert table["learned"]["flip-flop: worst"] == "ends"
    assert float(table["mine"]["text: perplexity"]) > 1
    assert len(list(folder.rglob("*.json"))) == len(names)


def test_the_columns_of_the_matrix_are_what_older_files_say():
    """These have the numbers that were read when they were made; some the scores, too."""
    seen = set()
    for path in sorted((ROOT / "results/runs/matrix.cpu").rglob("*.json")):
        run, = json.loads(path.read_text(encoding="utf-8"))["runs"]
        for name, column in matrix.COLUMNS.items():
            if column["task"] == run["task"] and run.keys() & {"scores", "perplexity"}:
                seen.add(name)
                assert column["read"](run) == pytest.approx(run["values"][name]), (path, name)
    assert seen == matrix.COLUMNS.keys()


def test_why_there_is_no_number():
    said = [tables.missing(y) for y in ([1.0], [], [1.0, None], [None, math.nan])]
    assert said == ["", "not run", "ends", "not finite"]
