"""Safe to fork: a copy that is edited runs as it is written, and a name belongs to one file."""
import contextlib
import random
import re
import shutil

import numpy as np
import pytest
import torch

import kernels
from common import names
from common.spy import plain_function, spy
from rivals import classics, fox
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

WITH_A_WAY = [case for case in FORKED if f"{case.split()[0]}_attention" in WAYS]
FOX_WINDOW = MASK[0], "masked_fill((j > i) | (j < i - 300),"
AS_WRITTEN = "runs as it is written: its faster way in kernels/ "


def ids(*shape):
    return torch.randint(0, 61, shape).to(DEVICE)


def arguments(case, T):
    """The plain function of a case, and arguments of T tokens in float32, for a head of 16."""
    module, _, args = example(case, T, T, B=1, H=1, d=16)
    args = [x.float().to(DEVICE) if torch.is_tensor(x) else x for x in args]
    return plain_function(module), args


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["fox", "cable", "tra", "cope"])
def test_an_edited_copy_runs_as_written_interpreted_too(name, edit, fork, monkeypatch, capsys):
    """Logits, the cache and training are the edited file's own; one line says what does not run."""
    module = fork(name, *EDITS[edit][name])
    mine, original = (make(n, **SMALL).to(DEVICE) for n in ("mine", name))
    assert type(mine).__module__ == "model_mine"
    idx = ids(1, 30)
    got = with_gradients(mine, idx)
    said = capsys.readouterr().err
    monkeypatch.setattr(kernels, "enabled", False)
    assert (got[0] - original(idx)[0]).abs().max() > 1e-2
    for a, b in zip(got, with_gradients(mine, idx)):
        # on CUDA CoPE's gather adds its gradients in any order
        close(a, b, 1e-4 if (name, DEVICE) == ("cope", "cuda") else 0)
    with spy(mine) as calls:
        mine(idx)
    for args in calls:
        close(plain_function(module)(*args), module.literal(*args)[0], 1e-4)
    if f"{name}_attention" in WAYS:
        line = rf"model_mine.{name}_attention {AS_WRITTEN}differs by \S+ of the largest value\n"
        assert re.fullmatch(line, said), said
    else:
        assert said == ""


LENGTHS = [(name, T) for name in ("fox", "cable", "tra", "cope") for T in (30, 300)
           if T == 30 or not INTERPRET]  # the interpreter is slow


@pytest.mark.parametrize("name, T", LENGTHS)
def test_a_copy_as_it_was_keeps_its_faster_way_interpreted_too(name, T, fork, capsys):
    module = fork(name)
    model = make("mine", **SMALL).to(DEVICE)
    with spy(model) as calls:
        model(ids(1, T))
    plain = plain_function(module)
    assert kernels.faster(plain, *calls[0]) is WAYS.get(plain.__name__)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_late_edit_is_caught_when_compiled(fork):
    """The default on a GPU: a graph for longer texts compares at their length."""
    module = fork("fox", FOX_WINDOW)
    compiled = torch.compile(lambda *a: kernels.attend(module.fox_attention, *a),
                             backend="aot_eager", fullgraph=True)
    for T in (40, 50, 310):  # the second length makes the graph's sizes symbols
        _, (q, k, v, F_) = arguments("fox", T)
        args = q, k, v, F_ / 1000  # what is far still matters
        close(compiled(*args), module.fox_attention(*args), 1e-5)


FAR = "S[:, :, start:end, None] - S[:, :, None, :end]"


@pytest.mark.parametrize("name, T, was, now", [
    ("cable", 200, FAR, f"({FAR}).clamp(max=200)"),  # a road of 300 tokens can be 3,000 long
    ("cable", 30, "bias = -g[:, :, here, None] *", "bias = -g[:, :, here, None].clamp(max=1) *"),
    ("tra", 30, "torch.addcmul(s, C,", "torch.addcmul(s.clamp(max=8), C,")])
def test_an_edit_of_large_values_is_caught_interpreted_too(name, T, was, now, fork, capsys):
    """Steps have no bound, and trained queries and weights are larger than a unit normal's."""
    plain = plain_function(fork(name, (was, now)))
    assert kernels.faster(plain, *arguments(name, T)[1]) is None
    refused = f"model_mine.{name}_attention {AS_WRITTEN}"
    assert capsys.readouterr().err.startswith(refused if plain.__name__ in WAYS else "")


def test_another_signature_runs_as_written_interpreted_too(fork, monkeypatch, capsys):
    fork("fox", ("def fox_attention(q, k, v, F_):", "def fox_attention(q, k, v, F_, window=8):"),
         (MASK[0], "masked_fill((j > i) | (j < i - window),"),
         ("attend(fox_attention, q, k, v, F_)", "attend(fox_attention, q, k, v, F_, 5)"))
    model, idx = make("mine", **SMALL).to(DEVICE), ids(1, 30)
    got = with_gradients(model, idx)
    said = capsys.readouterr().err
    assert "its faster way in kernels/ does not take what it is given: TypeError" in said
    assert said.count("\n") == 1
    monkeypatch.setattr(kernels, "enabled", False)
    assert all(map(torch.equal, got, with_gradients(model, idx)))


def test_a_copy_that_is_another_function_runs_as_written(fork, capsys):
    """A name that kernels/ does not know; a file without a literal form."""
    module = fork("cable", ("cable_attention", "my_attention"))
    model = make("mine", n_embd=64)
    with spy(model) as calls:
        model(ids(1, 9).cpu())
    assert len(calls) == 2 and kernels.faster(module.my_attention, *calls[0]) is None
    del module.literal
    assert plain_function(module) is module.my_attention
    assert capsys.readouterr().err == ""


WRONG = dict(
    forward=lambda right, v: 1.001 * right,
    backward=lambda right, v: right + 0.01 * (v - v.detach()),
    late=lambda right, v: torch.cat((right[:, :, :90], 1.01 * right[:, :, 90:]), 2),
    late_backward=lambda right, v: right + (0.01 * (v - v.detach()) if v.size(2) > 256 else 0))


@pytest.mark.parametrize("fault", list(WRONG)[:2] if INTERPRET else WRONG)
@pytest.mark.parametrize("case", WITH_A_WAY)
def test_a_wrong_kernel_is_caught_interpreted_too(case, fault, monkeypatch, capsys):
    """On CUDA, in the interpreter and on the CPU: the plain function runs, and one line says so."""
    T = dict(late=100, late_backward=260).get(fault, 40)
    plain, args = arguments(case, T)
    right = WAYS[plain.__name__]

    def wrong(q, k, v, *rest):
        return WRONG[fault](right(q, k, v, *rest), v)
    monkeypatch.setattr(kernels, "compared", {})
    monkeypatch.setitem(WAYS, plain.__name__, wrong)
    for _ in range(2):
        assert torch.equal(kernels.attend(plain, *args), plain(*args))
    said = capsys.readouterr().err
    assert said.startswith(f"{plain.__module__}.{plain.__name__} {AS_WRITTEN}differs by ")
    assert said.count("\n") == 1
    if "late" in fault:
        assert kernels.faster(plain, *arguments(case, 40)[1]) is wrong


def settings():
    """What the comparison must leave as it was, as text."""
    return [str(torch.get_rng_state().tolist()), str(np.random.get_state()), random.getstate(),
            torch.get_float32_matmul_precision(), torch.get_default_dtype(),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(DEVICE)]


@pytest.mark.parametrize("case", WITH_A_WAY[:2])
def test_the_comparison_leaves_no_trace_interpreted_too(case, monkeypatch, capsys):
    """And comes to the same, whatever the settings and the mode that it runs in."""
    plain, args = arguments(case, 40)
    leaves = [x.requires_grad_() for x in args if torch.is_tensor(x)]
    right, checked = WAYS[plain.__name__], []

    def noted(*args):
        checked.append(args[0].dtype)
        return right(*args)
    monkeypatch.setitem(WAYS, plain.__name__, noted)
    modes = [contextlib.nullcontext(), torch.inference_mode(), torch.no_grad(),
             torch.autocast(DEVICE, torch.bfloat16)]
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    try:
        for mode in modes[2:] if INTERPRET else modes:
            monkeypatch.setattr(kernels, "compared", {})
            with mode:
                before = settings()
                assert kernels.faster(plain, *args) is noted
                assert settings() == before
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
    assert set(checked) == {torch.float32}
    assert all(x.grad is None for x in leaves) and capsys.readouterr().err == ""


# -----------------------------------------------------------------------------
# names

def test_taken_names_name_both_files_and_only_when_asked(copy, capsys):
    shutil.copy(ROOT / "model_cable.py", copy / "model_mine.py")
    assert names.models()["t5"][0] is classics and "cable" not in names.models()
    assert capsys.readouterr().err == ""
    for name in ("cable", "k_cable"):
        with pytest.raises(SystemExit, match="model_cable.py and model_mine.py both answer to"):
            names.models()[name]
    answers = "model_mine.py does not answer to 'mine' but to cable, cable_nw"
    with pytest.raises(SystemExit, match=answers):
        names.models()["mine"]


@pytest.mark.parametrize("source, reason", [
    ("def literal(:", "SyntaxError"), ("x = 1", "GPTConfig"),
    ("raise SystemExit(3)", "SystemExit"), ("class GPTConfig: pass", "no attribute 'GPT'"),
    ("import nonesuch", "No module named 'nonesuch'"),
    ("from rivals.fox import *\nVARIANTS = dict(mine=dict(windw=8))", "argument 'windw'")])
def test_a_file_that_does_not_run_stops_only_those_who_ask_for_it(copy, capsys, source, reason):
    (copy / "model_mine.py").write_text(f"{source}\n")
    for name in ("rope", "cable", "tra"):
        assert names.make_model(dict(model=name, n_layer=1))
    said = capsys.readouterr().err
    assert said.startswith("warning: model_mine.py is left out: ") and reason in said
    assert said.count("\n") == 1
    with pytest.raises(SystemExit, match="^error: model_mine.py cannot be imported$"):
        names.models()["mine"]
    assert reason in capsys.readouterr().err  # the traceback, which names the line


@pytest.mark.parametrize("name, variants", [("fox", ""), ("bert", "VARIANTS = dict(mine=dict())")])
def test_a_copy_answers_to_its_own_name(copy, name, variants):
    """Also without VARIANTS."""
    source = (ROOT / f"model_{name}.py").read_text()
    (copy / "model_mine.py").write_text(re.sub(r"^VARIANTS = .*$", variants, source, flags=re.M))
    model = names.make_model(dict(model="mine", n_layer=1))
    assert type(model).__module__ == "model_mine"
    assert names.is_encoder(model) == (name == "bert")
    assert names.models()["fox"][0] is fox
    with pytest.raises(SystemExit, match="error: unknown model 'mien': did you mean mine"):
        names.models()["mien"]
