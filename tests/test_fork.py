"""Safe to fork: a copy that is edited runs as it is written, and a name belongs to one file."""
import importlib
import re
import shutil

import pytest
import torch

import kernels
from common import names
from common.attention import attention_inputs, plain_function
from rivals import classics, fox
from tests.examples import example
from tests.helpers import DEVICE, ROOT, SMALL, WAYS, close, make, with_gradients

WINDOW = ".tril(Tk - Tq)", ".tril(Tk - Tq).triu(Tk - Tq - 8)"  # an edit: a query sees 9 keys


def line(name):
    return (f"model_mine.py: {name}_attention runs as it is written (it is not the one that "
            "kernels/ knows)\n")


@pytest.mark.parametrize("name", ["fox", "cable", "tra", "cope"])
def test_an_edited_copy_runs_as_written_interpreted_too(name, fork, monkeypatch, capsys):
    """Logits, the cache and training are the edited file's own; one line says so, once."""
    module = fork(name, WINDOW)
    mine, original = (make(n, **SMALL).to(DEVICE) for n in ("mine", name))
    assert type(mine).__module__ == "model_mine"
    idx = torch.randint(0, 61, (1, 30)).to(DEVICE)
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


COMMENT = "    Tq, Tk = ", "    # of mine\n    Tq, Tk = "
SPACES = "k, v, attn_mask", "k, v,\n attn_mask"
DOCSTRING = "S (B, H, Tk), the cumulative", "S, the"


@pytest.mark.parametrize("edits", [(), (COMMENT, SPACES, DOCSTRING)])
def test_a_copy_with_other_words_keeps_its_faster_way_interpreted_too(
        edits, fork, monkeypatch, capsys):
    module, called = fork("cable", *edits), []
    monkeypatch.setitem(WAYS, "cable_attention", lambda *args: called.append(args))
    kernels.install(module)
    _, _, args = example("cable", 30, 30, B=1, H=1, d=16)
    module.cable_attention(*(x.float().to(DEVICE) for x in args))
    assert len(called) == 1 and capsys.readouterr().err == ""


def test_a_helper_is_a_part_of_what_calls_it_interpreted_too(fork, capsys):
    module = fork("cope", ("z = z.to(p.dtype)", "z = 2 * z.to(p.dtype)"))
    plain = module.cope_attention
    kernels.install(module)
    assert module.cope_attention is plain and capsys.readouterr().err == line("cope")


FOX = (ROOT / "rivals/fox.py").read_text(encoding="utf-8")
FOX = FOX[FOX.index("def fox_attention"):FOX.index("\n\n\nclass Cache")] + "\n"


@pytest.mark.parametrize("text", [
    FOX.replace("bias.mask", "(FACTOR * bias).mask"), FOX.replace("F_):", "F_, factor=FACTOR):"),
    "@same\n" + FOX, FOX + "import lab as F\n",
    FOX + "original = fox_attention\n@functools.wraps(original)\n"
          "def fox_attention(*args):\n    return 2 * original(*args)\n",
    f"exec({FOX!r})\n", FOX.replace("bias = ", "bias = 0 * fox_attention or "),
], ids=["constant", "default", "decorated", "module", "wrapped", "executed", "recursive"])
def test_what_is_not_the_original_runs_as_written_interpreted_too(text, copy, capsys):
    """One line says so, once, also where the text of the function is the original's."""
    around = "import functools\nfrom rivals.fox import *\nFACTOR = 2\ndef same(f):\n    return f\n"
    (copy / "model_mine.py").write_text(around + text)
    module = importlib.import_module("model_mine")
    plain = module.fox_attention
    for _ in range(2):
        kernels.install(module)
    assert module.fox_attention is plain and capsys.readouterr().err == line("fox")


def test_taken_names_name_both_files_and_only_when_asked(copy, capsys):
    shutil.copy(ROOT / "model_cable.py", copy / "model_mine.py")
    assert names.models()["t5"][0] is classics and "cable" not in names.models()
    assert capsys.readouterr().err == ""
    for name in ("cable", "cable_nw"):
        with pytest.raises(SystemExit, match="model_cable.py and model_mine.py both answer to"):
            names.models()[name]
    with pytest.raises(SystemExit, match="model_mine.py answers to cable, cable_nw"):
        names.models()["mine"]


@pytest.mark.parametrize("source, error", [
    ("def literal(:", SyntaxError), ("raise SystemExit(3)", SystemExit),
    ("class GPTConfig: pass", AttributeError),
    ("from rivals.fox import *\nVARIANTS = dict(mine=dict(windw=8))", TypeError)])
def test_a_file_that_does_not_run_stops_only_those_who_ask_for_it(copy, capsys, source, error):
    (copy / "model_mine.py").write_text(f"{source}\n")
    assert names.make_model(dict(model="rope", n_layer=1))
    said = capsys.readouterr().err
    assert said.startswith(f"warning: model_mine.py is left out: {error.__name__}(")
    assert said.count("\n") == 1
    with pytest.raises(error):
        names.models()["mine"]


@pytest.mark.parametrize("file, variants", [
    ("rivals/fox.py", ""), ("lab/bert/bert.py", "VARIANTS = dict(mine=dict())")])
def test_a_copy_answers_to_its_own_name(copy, file, variants):
    """Also without VARIANTS."""
    source = (ROOT / file).read_text(encoding="utf-8")
    (copy / "model_mine.py").write_text(re.sub(r"^VARIANTS = .*$", variants, source, flags=re.M))
    model = names.make_model(dict(model="mine", n_layer=1))
    assert type(model).__module__ == "model_mine"
    assert names.is_encoder(model) == ("bert" in file) and names.models()["fox"][0] is fox
