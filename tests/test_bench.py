"""bench.py: speed and memory."""
import json

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import data.text
import kernels
import model_baseline
from common.device import peak_memory
from common.names import is_encoder, make_model, models
from common.spy import attention_module, plain_function
from encoders import bert
from kernels import bench
from tests.examples import example, in_float32
from tests.helpers import close, command, complaint

FAST = "--repeats", 1, "--device", "cpu", "--out", "b.json"


@pytest.fixture
def small(monkeypatch):
    """bench.py's nano size, smaller."""
    tiny = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2)
    monkeypatch.setitem(data.text.Task.defaults, "nano", tiny)


def measured(home, *words):
    out, _ = command(home, "kernels.bench", *words, *FAST)
    return json.loads((home / "b.json").read_text()), out


def test_bench_measures_training_and_decoding(small, home):
    result, out = measured(home, "train", "decode", "--models", "cable", "tra", "--lengths", 50)
    a, b = result["train"]["nope"], result["train"]["cable"]
    assert list(result["train"]) == list(result["decode"]) == ["nope", "cable", "tra"]
    assert a["of_nope"] == 1
    assert b["of_nope"] == pytest.approx(b["tok_s"] / a["tok_s"], rel=0.01)
    a, b = result["decode"]["nope"], result["decode"]["cable"]
    assert a["times_nope"] == 1 and b["times_nope"] == pytest.approx(b["ms"] / a["ms"])
    assert "\n  cable " in out
    assert result["command"].startswith("python -m kernels.bench train decode")


def test_bench_measures_every_model_file(small, home):
    result, _ = measured(home, "decode", "--lengths", 20)
    names = result["decode"].keys()
    assert {"nope", "diff", "cope_val", "perinorm", "label"} <= names and len(names) > 25
    assert not any(name.startswith(("bert", "tra_")) or name == "cope_mlp" for name in names)


def test_bench_measures_generating(small, home):
    result, _ = measured(home, "generate", "--models", "cable", "learned", "--lengths", 40)
    row = result["generate"]["cable"]
    assert row["times_faster"] == pytest.approx(row["uncached_s"] / row["cached_s"])


def test_token_by_token_a_cache_writes_what_whole_texts_do(small, monkeypatch):
    seen = []
    model = make_model(dict(model="cable", n_layer=1, n_embd=16, n_head=2)).eval()
    model.register_forward_hook(lambda model, args, output: seen.append(output[0][:, -1]))
    idx = torch.randint(0, 257, (1, 6))
    bench.token_by_token(model, idx)
    bench.token_by_token(model, idx, bench.new_cache(model, 6))
    for whole, cached in zip(seen[:6], seen[6:], strict=True):
        close(cached, whole, 1e-5)


@pytest.mark.slow
def test_bench_measures_every_attention(home):
    """Of every model file, beside torch's own; its ways where they are."""
    command(home, "kernels.bench", "attention", "--lengths", 40, *FAST)
    rows = json.loads((home / "b.json").read_text())["attention"]["40"]
    assert rows["sdpa"]["forward_of_sdpa"] == 1
    first = {module: name for name, (module, _) in reversed(models().items())}
    for module, name in first.items():
        attention = attention_module(make_model(dict(model=name, n_layer=1)))
        assert rows[name]["both_ms"] > 0 and rows[name]["forward_of_sdpa"] > 0, module
        assert (f"{name}: literal" in rows) == hasattr(attention, "literal")
    differs = {name: row["differs"] for name, row in rows.items() if "differs" in row}
    names = {f"{name}: kernel" for name in ("cable", "fox", "tra", "cope", "stick")}
    assert differs.keys() == names or kernels.INTERPRET
    assert max(differs.values()) < 1e-4


def test_bench_takes_the_attention_of_a_trained_run(trained, home):
    words = "--repeats", 1, "--device", "cpu", "--ways", "plain", "kernel"
    words += "--out", home / "a.json"
    command(trained, "kernels.bench", "attention", "--run", "cable", "--lengths", 20, 30, *words)
    rows = json.loads((home / "a.json").read_text())["attention"]
    assert list(rows) == ["20", "30"]
    assert list(rows["20"]) == ["sdpa", "cable", "cable: kernel"]
    words = "--run", "learned", "--lengths", 20, *words
    said = complaint(trained, "kernels.bench", "attention", *words)
    assert "learned positions end at block_size=16" in said


def test_what_was_measured_before_a_failure_is_kept(home, monkeypatch):
    def gone(q, k, v, F_):
        raise RuntimeError("CUDA error: unspecified launch failure")
    monkeypatch.setattr(models()["fox"][0], "literal", gone)
    with pytest.raises(RuntimeError):
        measured(home, "attention", "--models", "cable", "fox", "--lengths", 20)
    rows = json.loads((home / "b.json").read_text())["attention"]["20"]
    assert rows["cable"]["both_ms"] > 0


def test_a_way_that_is_not_equal_differs():
    q = torch.randn(1, 2, 8, 4)
    plain = bench.step_of(model_baseline.attention, torch.nn.Linear(1, 1), [(q, q, q)], True)
    wrong = bench.step_of(lambda q, k, v: 2 * model_baseline.attention(q, k, v),
                          torch.nn.Linear(1, 1), [(q, q, q)], True)
    assert bench.difference(plain(), plain()) == 0
    assert bench.difference(wrong(), plain()) == pytest.approx(1)


def test_bench_gpu_wants_a_gpu_and_equal_kernels(home, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu needs a CUDA device" in complaint(home, "kernels.bench", "gpu", "--device", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "ON_GPU", dict(fox_attention=None))
    asked, row = [], {}

    def attention(args):
        asked.extend(args.models)
        return {1024: {"fox: kernel": row}}
    monkeypatch.setattr(bench, "attention", attention)
    for row["differs"] in (0.2, float("nan")):
        said = complaint(home, "kernels.bench", "gpu", "--device", "cpu", "--out", "g.json")
        assert "fox: kernel is not equal to the plain function at 1,024 tokens" in said
    assert set(asked) == {"fox"}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("case", ["cable", "cable_nw", "fox"])
def test_flex_attention_is_the_plain_function(case):
    module, _, args = example(case)
    plain = plain_function(module)
    args = in_float32(args)
    way = bench.flex(plain.__name__, 37, "cpu", flex_attention)
    close(way(*args), plain(*args), 1e-5)


def test_memory_of_one_call_beyond_its_inputs():
    """The literal form holds some matrices of 4,096 x 4,096 numbers, .27 GB each."""
    q, k, v = torch.randn(3, 1, 4, 4096, 8)
    cpu = torch.device("cpu")
    extra = bench.extra_memory(cpu, model_baseline.literal, q, k, v)
    assert (extra is None) == (peak_memory(cpu) is None)
    assert extra is None or 0.5 < extra < 2.5


def test_an_encoders_attention_is_measured_by_one_that_sees_both_ways():
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    args = type("Args", (), dict(ways=("plain",), device=torch.device("cpu")))
    for name, literal in (("bert_nope", bert.literal), ("nope", model_baseline.literal)):
        model = make_model(dict(model=name, n_layer=1) | models()[name][1])
        functions = bench.ways(args, name, model, [(q, k, v)])
        close(functions["sdpa"](q, k, v), literal(q, k, v)[0], 1e-6)
        assert is_encoder(model) == (name == "bert_nope") and list(functions) == ["sdpa", name]
