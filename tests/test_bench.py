"""kernels/bench.py: speed and memory."""
import json

import pytest

import data.text
from experiments import tables
from tests.helpers import command, complaint, markdown_tables

FAST = "--repeats", 1, "--device", "cpu", "--out", "b.json"


def measured(folder, *words):
    command(folder, "kernels.bench", *words, *FAST)
    return json.loads((folder / "b.json").read_text())


def test_bench_measures_training_and_decoding(home, monkeypatch):
    tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2)
    monkeypatch.setitem(data.text.Task.defaults, "nano", tiny)
    result = measured(home, "train", "--models", "cable")
    a, b = result["train"]["nope"], result["train"]["cable"]
    assert a["of_nope"] == 1
    assert b["of_nope"] == pytest.approx(b["tok_s"] / a["tok_s"], rel=0.01)
    result = measured(home, "decode", "--models", "cable", "rope, window", "--lengths", 50)
    a, b = result["decode"]["nope"], result["decode"]["rope, window"]
    assert a["times_nope"] == 1 and b["times_nope"] == pytest.approx(b["ms"] / a["ms"])
    (_, table), = tables.tables_in(result)
    table, = markdown_tables(table)
    assert list(table) == ["nope", "cable", "rope, window"]
    assert table["rope, window"]["times nope's"] == f"{b['times_nope']:.2f}"


@pytest.mark.slow
def test_bench_measures_every_attention(home):
    """Of every model file, beside torch's own."""
    result = measured(home, "attention", "--lengths", 40)
    (_, table), = tables.tables_in(result)
    table, = markdown_tables(table)
    assert {"sdpa", "nope", "learned", "path", "cable", "stick"} <= table.keys()
    for row in result["attention"]["40"].values():
        assert row["both_ms"] > 0 and row["forward_of_sdpa"] > 0


def test_bench_takes_the_attention_of_a_trained_run(trained):
    words = "attention", "--lengths", 20, "--ways", "plain", "--run"
    rows = measured(trained, *words, "cable")["attention"]["20"]
    assert list(rows) == ["sdpa", "cable"] and rows["sdpa"]["forward_of_sdpa"] == 1
    assert "learned positions end at block_size=16" in complaint(
        trained, "kernels.bench", *words, "learned", *FAST)
