"""bench.py: speed and memory."""
import contextlib
import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

import bench
import data
import data.text
import kernels
import model_baseline
import model_bert
import model_classics
import runs
from tests.helpers import (
    close,
    command,
    complaint,
    in_process,
    is_png,
    needs_triton,
    prepare_as_stdlib,
    standing_in,
    written,
)


def test_bench_measures_beside_plain_attention_in_steps():
    q, k, v = torch.randn(3, 2, 3, 150, 8, dtype=torch.float64, requires_grad=True)
    later = torch.ones(150, 150, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(8)).masked_fill(later, -math.inf)
    want = logits.softmax(-1) @ v
    gradients = torch.autograd.grad(want.square().sum(), (q, k, v))
    for f in (bench.unfused, bench.sdpa):
        y = f(q, k, v)
        close(y, want, 1e-12)
        for ours, theirs in zip(torch.autograd.grad(y.square().sum(), (q, k, v)), gradients):
            close(ours, theirs, 1e-12)


@pytest.fixture
def small(monkeypatch):
    """bench.py's nano size, smaller; memory is not measured in processes of their own."""
    tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2)
    monkeypatch.setitem(data.text.Task.defaults, "nano", tiny)
    monkeypatch.setattr(bench, "extra_memory", lambda *what: 0.25)


def test_bench_measures_training_and_decoding(small, home):
    flags = "--models", "cable", "tra", "--repeats", 1, "--device", "cpu"
    flags += "--context", 50
    out, _ = command(home, "bench.py", "train", "decode", *flags, "--out", "b.json")
    result = json.loads((home / "b.json").read_text())
    a, b = result["train"]["nope"], result["train"]["cable"]
    assert list(result["train"]) == list(result["decode"]) == ["nope", "cable", "tra"]
    assert a["of_nope"] == 1 and b["of_nope"] == pytest.approx(b["tok_s"] / a["tok_s"], rel=0.01)
    a, b = result["decode"]["nope"], result["decode"]["cable"]
    assert a["times_nope"] == 1 and b["times_nope"] == pytest.approx(b["ms"] / a["ms"])
    assert re.search(r"^  cable +tok_s", out, re.M) and result["command"].startswith("python ben")
    command(home, "bench.py", "decode", *flags[3:], "--out", "all.json")  # of every model file
    every = set(json.loads((home / "all.json").read_text())["decode"])
    assert {"nope", "diff", "cope_val", "perinorm", "label"} <= every and len(every) > 25
    assert not {name for name in every if name.startswith(("bert", "tra_")) or name == "cope_mlp"}
    assert "bert_rope is an encoder: only its attention is measured here" in complaint(
        home, "bench.py", "train", "--models", "bert_rope")
    command(home, "bench.py", "train", "--models", "fox", "--beside", "cable", "--repeats", 1,
            "--device", "cpu", "--out", "c.json")
    result = json.loads((home / "c.json").read_text())["train"]
    assert list(result) == ["cable", "fox"] and result["cable"]["of_cable"] == 1


def test_bench_writes_the_page_of_results(small, home):
    """Of what is measured into results/, here or on another machine, and of nothing else."""
    flags = "train", "--models", "cable", "--repeats", 1, "--device", "cpu"
    command(home, "bench.py", *flags, "--out", "b.json")
    assert not (home / "results").exists()
    command(home, "bench.py", *flags)
    command(home, "bench.py", *flags, "--out", "results/bench.other.json")
    page = (home / "results" / "README.md").read_text()
    for stem in ("train.cpu", "other"):
        result = json.loads((home / "results" / f"bench.{stem}.json").read_text())
        row = result["train"]["cable"]
        assert f"### bench.{stem}\n" in page
        assert f"| cable | {row['tok_s']:,} | {row['of_nope']:.2f} |" in page


def test_bench_measures_generating_and_memory(small, home, monkeypatch):
    def here(words, **_):
        err = written()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(written()):
            code = in_process(Path(words[1]).name, *words[2:])
        said = err.buffer.getvalue().decode()
        return subprocess.CompletedProcess(words, code, stdout="", stderr=said)
    with standing_in(home):
        prepare_as_stdlib(home / "notes")
    monkeypatch.setattr(bench.subprocess, "run", here)
    flags = "--models", "cable", "learned", "--device", "cpu", "--out", "b.json"
    command(home, "bench.py", "generate", "memory", *flags, "--length", 40)
    result = json.loads((home / "b.json").read_text())
    found = result["generate"]["cable"]
    assert found["times_faster"] == pytest.approx(found["uncached_s"] / found["cached_s"])
    assert list(result["memory"]) == ["nope", "cable", "learned"]  # learned is trained longer
    assert all(0.05 < row["peak_GB"] < 50 for row in result["memory"].values())


@pytest.mark.filterwarnings("error:constrained_layout")
def test_bench_measures_every_attention(small, home):
    """Of every model file, beside torch's own; its regimes; its ways where they are."""
    flags = "--lengths", 40, "--repeats", 1, "--device", "cpu"
    command(home, "bench.py", "attention", *flags, "--out", "a.json", draw=True)
    rows = json.loads((home / "a.json").read_text())["attention"]["40"]
    assert is_png(home / "a.png") and rows["sdpa"]["forward_of_sdpa"] == 1
    first = {runs.models()[name][0]: name for name in reversed(runs.models())}
    for module, name in first.items():
        attention = runs.attention_module(runs.make_model(dict(model=name, n_layer=1)))
        assert rows[name]["both_ms"] > 0 and rows[name]["forward_of_sdpa"] > 0, module
        assert (f"{name}: literal" in rows) == hasattr(attention, "literal")
        known = kernels.REGIMES.get(runs.plain_function(attention).__name__, {})
        assert all(f"{name}, {regime}" in rows for regime in known)
    assert rows["cable"]["both_GB"] == 0.25 and "cope, gates 0.03" in rows
    on_cpu = {name for name in rows if name.endswith(": kernel")}
    measured = {name.partition(":")[0].partition(",")[0] for name in on_cpu}
    assert measured == {"cable", "fox", "tra", "cope"} or kernels.INTERPRET
    assert not any("failed" in key for row in rows.values() for key in row)


def test_bench_gpu_wants_a_gpu(home, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = complaint(home, "bench.py", "gpu", "--device", "cpu")
    assert said.strip() == "error: no GPU to measure: torch finds no CUDA device here"
    monkeypatch.setattr(bench, "why_no_gpu", lambda: "")
    assert "by itself" in complaint(home, "bench.py", "gpu", "train", "--device", "cpu")


@needs_triton
def test_bench_gpu_keeps_what_was_measured_before_the_device_was_lost(home, monkeypatch):
    def tests(result):
        result["tests"] = dict(ok=True, said="60 passed", failed=[])

    def repeats(args, name, found):
        found[name] = dict(times=1000, different=int(name == "fox"))

    def times(args, name, T, ways, found):
        on_disk = json.loads((home / "g.json").read_text())
        assert on_disk["repeats"].keys() == set(bench.with_kernels())
        if (name, T) == ("fox", 4096):
            raise RuntimeError("CUDA error: unspecified launch failure\nand more")
        row = dict(forward_ms=2.0, forward_of_sdpa=0.9, both_ms=6.0, both_of_sdpa=1.2)
        found.setdefault(T, {})[f"{name}: kernel"] = row
    for f in (tests, repeats, times):
        monkeypatch.setattr(bench, "kernel_tests" if f is tests else f.__name__, f)
    monkeypatch.setattr(bench, "why_no_gpu", lambda: "")
    command(home, "bench.py", "gpu", "--device", "cpu", "--out", "g.json", code=1)
    result = json.loads((home / "g.json").read_text())
    assert result["stopped"] == "at fox at 4,096: CUDA error: unspecified launch failure"
    assert list(result["attention"]) == ["1024", "4096"]
    page = (home / "g.md").read_text()
    assert "**Stopped at fox at 4,096" in page and "Tests: **met** (60 passed)" in page
    assert "fox, the same bits 1,000 times: **MISSED** (1 differ)" in page
    assert "| cable | 4,096 | forward | 0.95 | 0.90 | met |" in page
    assert "| cable | 4,096 | forward and backward | 1.05 | 1.20 | MISSED |" in page
    assert "| cable | 16,384 | forward | 1.0 | - | not measured |" in page


@needs_triton
def test_bench_gpu_stops_in_time(home, monkeypatch):
    monkeypatch.setattr(bench, "why_no_gpu", lambda: "")
    monkeypatch.setattr(bench, "SECONDS", -1)
    command(home, "bench.py", "gpu", "--device", "cpu", "--out", "g.json", code=1)
    assert json.loads((home / "g.json").read_text())["stopped"] == "before tests, as time was up"
    assert "not measured" in (home / "g.md").read_text()


def test_bench_takes_the_attention_of_a_trained_run(small, trained, home):
    flags = "--repeats", 1, "--device", "cpu", "--ways", "plain", "kernel", "--out", home / "a.json"
    command(trained, "bench.py", "attention", "--run", "cable", "--lengths", 20, 30, *flags)
    found = json.loads((home / "a.json").read_text())["attention"]
    assert list(found) == ["20", "30"]
    assert list(found["20"]) == ["sdpa", "unfused", "cable", "cable: kernel"]
    said = complaint(trained, "bench.py", "attention", "--run", "learned", "--lengths", 20, *flags)
    assert "learned positions end at block_size=16" in said


def test_a_way_that_fails_has_the_reason_in_its_row(small, home, monkeypatch):
    def gone(*args):
        raise RuntimeError("out of memory\nand more")
    monkeypatch.setattr(runs.models()["tra"][0], "literal", gone)
    monkeypatch.setattr(runs, "plain_function", lambda module: module.tra_attention)
    command(home, "bench.py", "attention", "--models", "tra", "--lengths", 20, "--repeats", 1,
            "--device", "cpu", "--out", "a.json")
    rows = json.loads((home / "a.json").read_text())["attention"]["20"]
    assert rows["tra: literal"] == dict(forward_failed="out of memory", both_failed="out of memory")
    assert rows["tra"]["both_ms"] > 0


def test_memory_of_one_call_beyond_its_inputs():
    """In a process of its own: the literal form holds some matrices of 4,096 x 4,096 numbers."""
    q, k, v = torch.randn(3, 1, 4, 4096, 8)
    what = model_baseline.literal, torch.nn.Linear(1, 1), [(q, k, v)], False
    found = bench.extra_memory(torch.device("cpu"), *what)
    assert (found is None) == (runs.peak_memory(torch.device("cpu")) is None)
    assert found is None or 0.5 < found < 2.5  # a matrix is .27 GB


def test_memory_of_a_call_that_another_process_cannot_make_is_not_said():
    """ALiBi's arguments have a function of its own."""
    q, k, v = torch.randn(3, 1, 4, 16, 8)
    what = model_classics.attention, torch.nn.Linear(1, 1), [(q, k, v, lambda *_: 0)], False
    assert bench.extra_memory(torch.device("cpu"), *what) is None


def test_an_encoders_attention_is_measured_by_one_that_sees_both_ways(home, monkeypatch):
    monkeypatch.setattr(bench, "extra_memory", lambda *what: None)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    close(bench.sdpa_both_ways(q, k, v), model_bert.literal(q, k, v)[0], 1e-6)
    used = []
    for name in ("sdpa", "sdpa_both_ways"):
        plain = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda *x, name=name, f=plain: used.append(name) or f(*x))
    command(home, "bench.py", "attention", "--models", "bert_cable", "--lengths", 16, "--ways",
            "plain", "--repeats", 1, "--device", "cpu", "--out", "b.json")
    found = json.loads((home / "b.json").read_text())["attention"]["16"]
    assert set(used) == {"sdpa_both_ways"} and list(found) == ["sdpa", "bert_cable"]
