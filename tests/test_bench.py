"""kernels/bench.py: speed and memory."""
import json
import pickle

import pytest
import torch

import data.text
import kernels
from common.names import models
from kernels import bench
from tests.helpers import command, complaint

FAST = "--repeats", 1, "--device", "cpu", "--out", "b.json"


def measured(folder, *words):
    command(folder, "kernels.bench", *words, *FAST)
    return json.loads((folder / "b.json").read_text())


def test_bench_measures_training_and_decoding(home, monkeypatch):
    tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2)
    monkeypatch.setitem(data.text.Task.defaults, "nano", tiny)
    result = measured(home, "train", "decode", "--models", "cable", "tra", "--lengths", 50)
    assert list(result["train"]) == list(result["decode"]) == ["nope", "cable", "tra"]
    a, b = result["train"]["nope"], result["train"]["cable"]
    assert a["of_nope"] == 1
    assert b["of_nope"] == pytest.approx(b["tok_s"] / a["tok_s"], rel=0.01)
    a, b = result["decode"]["nope"], result["decode"]["cable"]
    assert a["times_nope"] == 1 and b["times_nope"] == pytest.approx(b["ms"] / a["ms"])
    assert result["command"].startswith("python -m kernels.bench train decode")


def test_models_are_compiled_in_processes_of_their_own(monkeypatch):
    """What such a process is sent it can read, and one step of training is run."""
    tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2)
    monkeypatch.setitem(data.text.Task.defaults, "nano", tiny)
    args, stepped = bench.parse(["train", "--device", "cpu"]), []
    args.device, args.vocab_size = torch.device("cpu"), 257
    monkeypatch.setattr(torch.optim.AdamW, "step", stepped.append)
    bench.compile_first(pickle.loads(pickle.dumps(args)), "cable")
    assert len(stepped) == 1


@pytest.mark.slow
def test_bench_measures_every_attention(home):
    """Of every model file, beside torch's own; what kernels/ has for it is equal to it."""
    rows = measured(home, "attention", "--lengths", 40)["attention"]["40"]
    assert rows["sdpa"]["forward_of_sdpa"] == 1
    first = {module: name for name, (module, _) in reversed(models().items())}
    for module, name in first.items():
        assert rows[name]["both_ms"] > 0 and rows[name]["forward_of_sdpa"] > 0, module
    differs = {name: row["differs"] for name, row in rows.items() if "differs" in row}
    names = {f"{name}: kernel" for name in ("cable", "fox", "tra", "cope", "stick")}
    assert names <= differs.keys() or kernels.INTERPRET
    assert max(differs.values()) < 1e-4


def test_bench_takes_the_attention_of_a_trained_run(trained, monkeypatch):
    """A way that is not equal to the plain function ends it."""
    words = "attention", "--lengths", 20, 30, "--ways", "plain", "kernel", "--run"
    rows = measured(trained, *words, "cable")["attention"]
    assert list(rows) == ["20", "30"]
    assert list(rows["20"]) == ["sdpa", "cable", "cable: kernel"]
    said = complaint(trained, "kernels.bench", *words, "learned", *FAST)
    assert "learned positions end at block_size=16" in said
    way = kernels.cpu.cable_attention
    for wrong in (1.2, float("nan")):
        monkeypatch.setitem(kernels.ON_CPU, "cable_attention",
                            lambda *args, wrong=wrong: wrong * way(*args))
        said = complaint(trained, "kernels.bench", *words, "cable", *FAST)
        assert "cable: kernel is not equal to the plain function at 20 tokens" in said


def test_bench_of_long_texts_keeps_to_what_needs_no_t_x_t(home, monkeypatch):
    """Nor are the inputs found by a plain function; what was measured is written at once."""
    monkeypatch.setattr(bench, "MANY", 30)
    monkeypatch.setattr(kernels.cpu, "LONG", 30)
    words, found = ("attention", "--models", "nope", "cable", "stick"), []
    rows = measured(home, *words, "--lengths", 20, 40)["attention"]
    assert list(rows["40"]) == ["sdpa", "cable: kernel", "stick: kernel"]
    assert {"nope", "cable"} < rows["20"].keys() and rows["40"]["sdpa"]["both_ms"]
    monkeypatch.setattr(bench, "write_json", lambda out, value: found.append(value))
    command(home, "kernels.bench", *words, "--lengths", 40, *FAST)
    assert len(found) == 5  # of two cases forward and both, and the end
