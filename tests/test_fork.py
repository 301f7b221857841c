"""Safe to fork: a copy that is edited runs as it is written, and a name belongs to one file."""
import importlib
import re
import shutil
import textwrap

import pytest
import torch

import kernels
from common import names
from common.attention import attention_inputs, plain_function
from rivals import classics, fox
from tests.examples import example
from tests.helpers import DEVICE, EDITS, ROOT, SMALL, WAYS, close, make, with_gradients


def ids(*shape):
    return torch.randint(0, 61, shape).to(DEVICE)


def arguments(case, T=30):
    """What a plain function is called with, in float32, for a head of 16."""
    _, _, args = example(case, T, T, B=1, H=1, d=16)
    return [x.float().to(DEVICE) if torch.is_tensor(x) else x for x in args]


def line(name):
    return (f"model_mine.py: {name}_attention runs as it is written (it is not the one that "
            "kernels/ knows)\n")


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["fox", "cable", "tra", "cope"])
def test_an_edited_copy_runs_as_written_interpreted_too(name, edit, fork, monkeypatch, capsys):
    """Logits, the cache and training are the edited file's own; one line says so, once."""
    module = fork(name, *EDITS[edit][name])
    mine, original = (make(n, **SMALL).to(DEVICE) for n in ("mine", name))
    assert type(mine).__module__ == "model_mine"
    idx = ids(1, 30)
    got = with_gradients(mine, idx)
    assert capsys.readouterr().err == line(name)
    monkeypatch.setattr(kernels, "enabled", False)
    assert (got[0] - original(idx)[0]).abs().max() > 1e-2
    for a, b in zip(got, with_gradients(mine, idx)):
        # on CUDA CoPE's gather adds its gradients in any order
        close(a, b, 1e-4 if (name, DEVICE) == ("cope", "cuda") else 0)
    with attention_inputs(mine) as calls:
        mine(idx)
    for args in calls:
        close(plain_function(module)(*args), module.literal(*args)[0], 1e-4)


OTHER_WORDS = [
    (), [("    Tq, Tk = ", "    # of mine\n    Tq, Tk = ")],
    [("S (B, H, Tk), the cumulative", "S, the"), ("k, v, attn_mask", "k, v,\n attn_mask")]]


@pytest.mark.parametrize("edits", OTHER_WORDS, ids=["none", "a comment", "docstring, spaces"])
def test_a_copy_with_other_words_keeps_its_faster_way_interpreted_too(
        edits, fork, monkeypatch, capsys):
    module, called = fork("cable", *edits), []
    monkeypatch.setitem(WAYS, "cable_attention", lambda *args: called.append(args))
    kernels.install(module)
    module.cable_attention(*arguments("cable"))
    assert len(called) == 1 and capsys.readouterr().err == ""


HELPERS = dict(
    edited=[("z = z.to(p.dtype)", "z = 2 * z.to(p.dtype)")],
    wrapped=[("import math\n", "import functools\nimport math\n"),
             ("def cope_attention", "plain = interpolate\n@functools.wraps(plain)\n"
              "def interpolate(z, p):\n    return 2 * plain(z, p)\n\n\ndef cope_attention")])


@pytest.mark.parametrize("how", HELPERS)
def test_a_helper_is_a_part_of_what_calls_it_interpreted_too(how, fork, capsys):
    module = fork("cope", *HELPERS[how])
    plain = module.cope_attention
    kernels.install(module)
    assert module.cope_attention is plain and capsys.readouterr().err == line("cope")


HEAD = "def fox_attention(q, k, v, F_):"


def strange(folder, how):
    """A module of its own with FoX's attention, made in another way."""
    text = (ROOT / "rivals/fox.py").read_text()
    text = text[text.index(HEAD):text.index("\n\n\nclass Cache")] + "\n"
    made = dict(
        constant=text.replace("bias.mask", "(FACTOR * bias).mask"),
        default=text.replace("F_):", "F_, factor=FACTOR):"),
        decorated="@same\n" + text,
        inside="def make(F):\n" + textwrap.indent(text, "    ") + "    return fox_attention\n"
               "fox_attention = make(F)\n",
        module=text + "import experiments as F\n",
        wrapper=text + "original = fox_attention\n@functools.wraps(original)\n"
                "def fox_attention(*args):\n    return 2 * original(*args)\n",
        no_function="fox_attention = print\n",
        executed=f"exec({text!r})\n",
        recursive=text.replace("bias = ", "bias = 0 * fox_attention or "))[how]
    around = "import functools\nfrom rivals.fox import *\nFACTOR = 2\ndef same(f):\n    return f\n"
    (folder / "model_mine.py").write_text(around + made)
    return importlib.import_module("model_mine")


@pytest.mark.parametrize("how", ["constant", "default", "decorated", "inside", "module",
                                 "wrapper", "no_function", "executed", "recursive"])
def test_what_is_not_the_original_runs_as_written_interpreted_too(how, copy, capsys):
    """One line says so, once, also where the text of the function is the original's."""
    module = strange(copy, how)
    plain = module.fox_attention
    for _ in range(2):
        kernels.install(module)
    assert module.fox_attention is plain and capsys.readouterr().err == line("fox")


def test_a_hash_sees_the_numbers_that_a_function_reads(copy):
    text = "N = {}\ndef half(x):\n    return x / N\ndef f(x):\n    return half(\n{}\n)\n"
    found = []
    cases = ("2", "x"), ("2.0", "x"), ("2", "x  # y"), ("[2]", "x"), ("2", "f(x)")
    for n, words in enumerate(cases):
        (copy / f"made_{n}.py").write_text(text.format(*words))
        found.append(kernels.fingerprint(importlib.import_module(f"made_{n}").f))
    assert found[0] == found[2] and len(set(found)) == 4 and found[3] is None


def test_taken_names_name_both_files_and_only_when_asked(copy, capsys):
    shutil.copy(ROOT / "model_cable.py", copy / "model_mine.py")
    assert names.models()["t5"][0] is classics and "cable" not in names.models()
    assert capsys.readouterr().err == ""
    for name in ("cable", "cable_nw"):
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
    with pytest.raises(SystemExit, match="^error: model_mine.py cannot be imported:\n") as e:
        names.models()["mine"]
    assert "Traceback" in str(e.value) and reason in str(e.value)  # it names the line


@pytest.mark.parametrize("file, variants", [
    ("rivals/fox.py", ""), ("encoders/bert.py", "VARIANTS = dict(mine=dict())")])
def test_a_copy_answers_to_its_own_name(copy, file, variants):
    """Also without VARIANTS."""
    source = (ROOT / file).read_text()
    (copy / "model_mine.py").write_text(re.sub(r"^VARIANTS = .*$", variants, source, flags=re.M))
    model = names.make_model(dict(model="mine", n_layer=1))
    assert type(model).__module__ == "model_mine"
    assert names.is_encoder(model) == ("bert" in file) and names.models()["fox"][0] is fox
