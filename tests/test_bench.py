"""lab/bench.py: speed and memory."""
import json

import pytest

import data.text
from lab import tables
from tests.helpers import command, markdown_tables


def test_bench_measures_and_its_json_is_a_table(home, monkeypatch):
    tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2)
    monkeypatch.setitem(data.text.Task.defaults, "nano", tiny)

    def measured(*words):
        command(home, "lab.bench", *words, "--repeats", 1, "--device", "cpu", "--out", "b.json")
        result = json.loads((home / "b.json").read_text())
        (_, table), = tables.tables_in(result)
        return result, markdown_tables(table)[0]
    result, table = measured("train", "decode", "--models", "cable", "--lengths", 50)
    plain = result["train"]["nope"]
    cable = result["train"]["cable"]
    assert cable["of_nope"] == pytest.approx(cable["tok_s"] / plain["tok_s"], rel=0.01)
    plain = result["decode"]["nope"]
    cable = result["decode"]["cable"]
    assert cable["times_nope"] == pytest.approx(cable["ms"] / plain["ms"])
    assert table["cable"]["times nope's"] == f"{cable['times_nope']:.2f}"
    _, table = measured("attention", "--models", "t5", "cable", "bert_cable", "--lengths", 20)
    assert {"sdpa", "t5", "cable", "bert_cable"} <= table.keys()
