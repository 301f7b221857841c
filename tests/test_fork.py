"""Safe to fork: a copy that is edited runs as it is written."""
import contextlib
import random
import re
import shutil

import numpy as np
import pytest
import torch

import kernels
import model_classics
import model_fox
from common import names
from common.spy import plain_function, spy
from tests.examples import example
from tests.helpers import (
    DEVICE,
    EDITS,
    FORKED,
    INTERPRET,
    MASK,
    ROOT,
    SMALL,
    WAYS,
    close,
    make,
    with_gradients,
)


def has_way(case):
    return f"{case.split()[0]}_attention" in WAYS


KNOWN = [case for case in FORKED if has_way(case)]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["fox", "cable", "tra", "cope"])
def test_an_edited_copy_runs_as_written_interpreted_too(name, edit, fork, monkeypatch, capsys):
    """Logits, the cache and training are the edited file's own; one line says what does not run."""
    module = fork(name, *EDITS[edit][name])
    mine, original = (make(n, **SMALL).to(DEVICE) for n in ("mine", name))
    assert type(mine).__module__ == "model_mine"
    idx = torch.randint(0, 61, (1, 30)).to(DEVICE)
    got = with_gradients(mine, idx)
    said = capsys.readouterr().err
    monkeypatch.setattr(kernels, "enabled", False)
    assert (got[0] - original(idx)[0]).abs().max() > 1e-2
    for a, b in zip(got, with_gradients(mine, idx)):
        assert torch.equal(a, b)
    with spy(mine) as calls:
        mine(idx)
    for args in calls:
        close(plain_function(module)(*args), module.literal(*args)[0], 1e-4)
    refused = ""
    if f"{name}_attention" in WAYS:
        refused = f"model_mine.{name}_attention runs as it is written: its faster way in kernels/ "
    assert said.startswith(refused) and said.count("\n") == bool(refused), said
    assert not refused or re.search(r"differs by \S+ of the largest value\n$", said), said


@pytest.mark.parametrize("T", [30, 300])
@pytest.mark.parametrize("name", ["fox", "cable", "tra", "cope"])
def test_a_copy_as_it_was_keeps_its_faster_way_interpreted_too(name, T, fork, capsys):
    module = fork(name)
    model = make("mine", **SMALL).to(DEVICE)
    with spy(model) as calls:
        model(torch.randint(0, 61, (1, T)).to(DEVICE))
    plain = plain_function(module)
    assert kernels.faster(plain, *calls[0]) is WAYS.get(plain.__name__)
    assert capsys.readouterr().err == ""


def arguments(case, T):
    """The plain function of a case, and arguments of T tokens in float32, for a head of 16."""
    module, _, args = example(case, T, T, B=1, H=1, d=16)
    args = [x.float().to(DEVICE) if torch.is_tensor(x) else x for x in args]
    return plain_function(module), args


def test_an_edit_that_shows_late_is_caught_late_interpreted_too(fork, capsys):
    """A window of 300 tokens is full attention until a longer call comes."""
    module = fork("fox", (MASK[0], "masked_fill((j > i) | (j < i - 300),"))
    _, short = arguments("fox", 200)
    _, long = arguments("fox", 310)
    assert kernels.faster(module.fox_attention, *short) is WAYS["fox_attention"]
    assert capsys.readouterr().err == ""
    for _ in range(2):
        got = kernels.attend(module.fox_attention, *long)
        assert torch.equal(got, module.fox_attention(*long))
    kernels.attend(module.fox_attention, *(x.double() for x in long))  # not said again
    assert kernels.faster(module.fox_attention, *short) is WAYS["fox_attention"]
    assert capsys.readouterr().err.count("\n") == 1


def test_an_edit_of_large_distances_is_caught_interpreted_too(fork, capsys):
    """Steps have no bound: a road of 300 tokens can be 3,000 long."""
    far = "S[:, :, start:end, None] - S[:, :, None, :end]"
    module = fork("cable", (far, f"({far}).clamp(max=200)"))
    _, args = arguments("cable", 200)
    assert kernels.faster(module.cable_attention, *args) is None
    assert "model_mine.cable_attention runs as it is written" in capsys.readouterr().err


@pytest.mark.parametrize("name, was, now", [
    ("cable", "bias = -g[:, :, here, None] *", "bias = -g[:, :, here, None].clamp(max=1) *"),
    ("tra", "torch.addcmul(s, C,", "torch.addcmul(s.clamp(max=8), C,")])
def test_an_edit_of_large_values_is_caught_interpreted_too(name, was, now, fork, capsys):
    """Trained queries and weights are larger than those of a unit normal."""
    module = fork(name, (was, now))
    plain = plain_function(module)
    assert kernels.faster(plain, *arguments(name, 30)[1]) is None
    refused = f"model_mine.{name}_attention runs as it is written"
    assert capsys.readouterr().err.startswith(refused if f"{name}_attention" in WAYS else "")


@pytest.mark.slow
def test_a_late_edit_is_caught_when_compiled_interpreted_too(fork):
    """torch.compile is the default on a GPU: a graph for longer texts compares at their length."""
    module = fork("fox", (MASK[0], "masked_fill((j > i) | (j < i - 300),"))
    compiled = torch.compile(lambda *a: kernels.attend(module.fox_attention, *a),
                             backend="aot_eager", fullgraph=True)
    for T in (40, 50, 310):  # the second length makes the graph's sizes symbols
        _, (q, k, v, F_) = arguments("fox", T)
        args = q, k, v, F_ / 1000  # what is far still matters
        close(compiled(*args), module.fox_attention(*args), 1e-5)


def test_another_signature_runs_as_written_interpreted_too(fork, capsys):
    edits = [("def fox_attention(q, k, v, F_):", "def fox_attention(q, k, v, F_, window=8):"),
             (MASK[0], "masked_fill((j > i) | (j < i - window),"),
             ("attend(fox_attention, q, k, v, F_)", "attend(fox_attention, q, k, v, F_, 5)")]
    fork("fox", *edits)
    model, idx = make("mine", **SMALL).to(DEVICE), torch.randint(0, 61, (1, 30)).to(DEVICE)
    got = with_gradients(model, idx)
    said = capsys.readouterr().err
    assert "its faster way in kernels/ could not be compared: TypeError" in said
    assert said.count("\n") == 1
    kernels.enabled = False
    try:
        for a, b in zip(got, with_gradients(model, idx)):
            assert torch.equal(a, b)
    finally:
        kernels.enabled = True


def test_a_copy_that_is_another_function_runs_as_written(fork, capsys):
    """A name that kernels/ does not know, and a file without a literal form."""
    module = fork("cable", ("cable_attention", "my_attention"))
    model = make("mine", n_embd=64)
    assert plain_function(module) is module.my_attention
    with spy(model) as calls:
        model(torch.randint(0, 61, (1, 9)))
    assert len(calls) == 2 and kernels.faster(module.my_attention, *calls[0]) is None
    del module.literal
    assert plain_function(module) is module.my_attention
    assert capsys.readouterr().err == ""


def test_an_attention_from_elsewhere_is_seen_by_its_name_in_the_file(fork):
    fork("cable", ("attend(cable_attention", "attend(renamed"),
         ("class Cache:", "renamed = cable_attention\ndel cable_attention\n\n\nclass Cache:"))
    with spy(make("mine")) as calls:
        make("mine")(torch.randint(0, 61, (1, 9)))
    assert len(calls) == 2


WRONG = dict(
    forward=lambda right, v: 1.001 * right,
    backward=lambda right, v: right + 0.01 * (v - v.detach()),
    late=lambda right, v: torch.cat((right[:, :, :90], 1.01 * right[:, :, 90:]), 2),
    late_backward=lambda right, v: right + (0.01 * (v - v.detach()) if v.size(2) > 256 else 0))


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("case", KNOWN)
def test_a_wrong_kernel_is_caught_interpreted_too(case, kind, monkeypatch, capsys):
    """On CUDA, in the interpreter and on the CPU: the plain function runs, and one line says so."""
    T = dict(late=100, late_backward=260).get(kind, 40)
    plain, args = arguments(case, T)
    right = WAYS[plain.__name__]

    def wrong(q, k, v, *more):
        return WRONG[kind](right(q, k, v, *more), v)
    monkeypatch.setattr(kernels, "compared", {})
    monkeypatch.setitem(WAYS, plain.__name__, wrong)
    for _ in range(2):
        assert torch.equal(kernels.attend(plain, *args), plain(*args))
    said = capsys.readouterr().err
    assert said.startswith(f"{plain.__module__}.{plain.__name__} runs as it is written: ")
    assert said.count("\n") == 1 and " differs by " in said
    if "late" in kind:
        assert kernels.faster(plain, *arguments(case, 40)[1]) is wrong


@pytest.fixture
def other_defaults():
    """Settings that a user may have made, put back afterwards."""
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)


def settings():
    """What the comparison must leave as it was, as text."""
    return [str(torch.get_rng_state().tolist()), str(np.random.get_state()), random.getstate(),
            torch.get_float32_matmul_precision(), torch.get_default_dtype(),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(DEVICE)]


@pytest.mark.parametrize("case", KNOWN[:2])
def test_the_comparison_leaves_no_trace_interpreted_too(case, monkeypatch, other_defaults, capsys):
    """And finds the same, whatever the settings and the mode that it runs in."""
    plain, args = arguments(case, 40)
    leaves = [x.requires_grad_() for x in args if torch.is_tensor(x)]
    right, checked = WAYS[plain.__name__], []

    def noted(*args):
        checked.append(args[0].dtype)
        return right(*args)
    monkeypatch.setitem(WAYS, plain.__name__, noted)
    modes = [contextlib.nullcontext(), torch.inference_mode(), torch.no_grad(),
             torch.autocast(DEVICE, torch.bfloat16)]
    for mode in modes[2:] if INTERPRET else modes:
        monkeypatch.setattr(kernels, "compared", {})
        with mode:
            before = settings()
            assert kernels.faster(plain, *args) is noted
            assert settings() == before
    assert set(checked) == {torch.float32}
    assert all(x.grad is None for x in leaves) and capsys.readouterr().err == ""


def test_taken_names_name_both_files_and_only_when_asked(copy, capsys):
    shutil.copy(ROOT / "model_cable.py", copy / "model_mine.py")
    assert names.models()["rope"][0] is model_classics and "cable" not in names.models()
    assert capsys.readouterr().err == ""
    for name in ("cable", "k_cable"):
        with pytest.raises(SystemExit, match="model_cable.py and model_mine.py both answer to"):
            names.models()[name]
    answers = "model_mine.py does not answer to 'mine' but to cable, cable_nw"
    with pytest.raises(SystemExit, match=answers):
        names.models()["mine"]


@pytest.mark.parametrize("broken, reason", [
    ("def literal(:", "SyntaxError: invalid syntax"), ("x = 1", "GPTConfig"),
    ("raise KeyError('step')", "KeyError: 'step'"),
    ("raise RuntimeError('not yet\\nmore')", "not yet"), ("raise SystemExit(3)", "SystemExit: 3"),
    ("class GPTConfig: pass", "no attribute 'GPT'"),
    ("import nonesuch", "ModuleNotFoundError: No module named 'nonesuch'")])
def test_a_file_that_does_not_run_stops_only_those_who_ask_for_it(copy, capsys, broken, reason):
    (copy / "model_mine.py").write_text(f"{broken}\n")
    for name in ("rope", "cable", "tra"):
        assert names.make_model(dict(model=name, n_layer=1))
    said = capsys.readouterr().err
    assert said.startswith("warning: model_mine.py is left out: ") and reason in said
    assert said.count("\n") == 1
    with pytest.raises(SystemExit, match=r"^error: model_mine.py cannot be used: [^\n]*$"):
        names.models()["mine"]


def test_a_file_without_variants_answers_to_its_own_name(copy):
    source = (ROOT / "model_fox.py").read_text().replace("VARIANTS = dict(fox=dict())\n", "")
    (copy / "model_mine.py").write_text(source)
    module, fields = names.models()["mine"]
    assert module.__name__ == "model_mine" and fields == {}
    assert names.models()["fox"][0] is model_fox
    with pytest.raises(SystemExit, match="error: unknown model 'mien': did you mean mine"):
        names.models()["mien"]


def test_a_copy_of_the_encoder(copy):
    source = (ROOT / "model_bert.py").read_text()
    changed = re.sub(r"^VARIANTS = .*$", "VARIANTS = dict(mine=dict())", source, flags=re.M)
    (copy / "model_mine.py").write_text(changed)
    assert names.make_model(dict(model="mine", n_layer=1)).is_encoder


def test_variants_of_fields_that_are_not_there(copy, capsys):
    source = (ROOT / "model_fox.py").read_text().replace("fox=dict()", "mine=dict(windw=8)")
    (copy / "model_mine.py").write_text(source)
    with pytest.raises(SystemExit, match="unexpected keyword argument 'windw'"):
        names.models()["mine"]
    assert names.models()["fox"][0] is model_fox
