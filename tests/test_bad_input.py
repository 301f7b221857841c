"""train.py and bad input: one clear line, exit code not 0, nothing lost."""
import shutil
import sys

import pytest
import torch

from common import names
from common.exits import in_one_line
from common.log import open_log
from tests.helpers import TINY_FLAGS, TINY_RUN, command, complaint, losses


@pytest.mark.parametrize("flags, says", [
    ("--model cabel", "unknown model 'cabel': did you mean label or cable?"),
    ("--learning-rat 1", "arguments: --learning-rat 1; did you mean --learning_rate?"),
    ("--model cable --size nanoo", "unknown size 'nanoo': did you mean nano?"),
    ("--data max_retrieval", "max_retrieval is numbers: see experiments/variants/minimal.py"),
    ("--data stdlb", "nor has data/stdlb.py a class Task): did you mean stdlib?"),
    ("--max_iters ten", "argument --max_iters: invalid int value: 'ten'"),
    ("--batch_size 0", "--batch_size 0 must be at least 1"),
    ("--learning_rate nan", "--learning_rate nan must be at least 0"),
    ("--learning_rate 1e-4", "--min_lr 0.0004 is more than --learning_rate 0.0001: lower it, too"),
    ("--device cuda", "--device cuda:0: torch"),
    ("--n_embd 30 --n_head 4", "n_embd=30 is not divisible by n_head=4"),
    ("--data empty.txt", "empty.txt"),
    ("--data short.txt", "short.txt is too short"),
    ("--resume nowhere", "no checkpoint at nowhere"),
    ("--data flipflop --block_size 65", "block_size=65 must be even and at least 4"),
    ("--model label --n_label 5 --n_embd 16", "tokens do not fit in n_label=5 labels"),
    ("--model diff --n_embd 16 --n_head 8", "head size 2 is not divisible by 4"),
    ("--model rope_nope --n_layer 3", "nope_every=4 is above n_layer=3"),
    ("--model rope --repair yarn", "a repair in training needs --original_length"),
    ("--model rope --rotary_share 1.5", "rotary_share=1.5 is not within 0 to 1"),
    ("--model rope --rotary_share 0.01", "or turns no pair"),
    ("--model rope --base 1", "base=1.0 has to be above 1"),
    ("--model rope --repair pi --original_length 512", "original_length=512 up to block_size"),
    ("--model fox --gate_bias nan", "gate_bias=nan is not finite"),
    ("--model stick --gate_bias inf", "gate_bias=inf is not finite"),
    ("--model rope_nope --window 300", "window=300 is not within block_size=256"),
    ("--init_from rope", "fit model_cable.py: the shape of wte.weight is (5, 16) there, (257"),
    ("--model nope --n_layer 1 --n_head 2 --n_embd 16 --init_from cable",
     "the shape of h.0.attn.w_c.weight is (2, 16) there, none here"),
    ("--init_from cable --norm post", "its norm is pre, not post"),
])
def test_train_says_what_is_wrong(trained, flags, says, tmp_path):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = ["--max_iters", 1, "--no-evaluate", "--out_dir", tmp_path / "run"]
    if "--data" not in flags:
        words += ["--data", "notes"]
        if "--n_" not in flags:
            words += ["--n_head", 2]
    assert says in complaint(trained, "train.py", *words, *flags.split())
    assert not (tmp_path / "run" / "ckpt.pt").exists()


@pytest.mark.parametrize("flags, says", [
    ("cable --n_layer 3", "arguments: --n_layer 3. A run that is resumed keeps all other settings"),
    ("cable --max_iters 1", "--max_iters 1: the run is at iter 2 already"),
    ("rope --data notes", "notes has 257 tokens, the model 5"),
])
def test_a_resumed_run_cannot_become_another(trained, flags, says):
    assert says in complaint(trained, "train.py", "--resume", *flags.split())


def test_a_checkpoint_that_is_cut_off_or_another_programs(trained, tmp_path):
    whole = (trained / "cable" / "ckpt.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:len(whole) // 2])
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": torch.ones(3)}, tmp_path / "strange.pt")
    for name, *script in (("cut", "train.py", "--resume"), ("text", "eval.py"),
                          ("strange", "sample.py")):
        said = complaint(trained, *script, tmp_path / f"{name}.pt")
        assert f"{name}.pt is not a whole checkpoint of this repository" in said
    checkpoint = torch.load(trained / "cable" / "ckpt.pt", weights_only=True)
    checkpoint["config"]["model"] = "cabel"
    torch.save(checkpoint, tmp_path / "other.pt")
    assert ("unknown model 'cabel': did you mean label or cable? (there is no model_cabel.py)"
            in complaint(trained, "sample.py", tmp_path / "other.pt"))


def test_a_folder_that_holds_a_run_is_refused(home):
    flags = *TINY_RUN, "--out_dir", "run"
    command(home, "train.py", *flags)
    before = {path.name: path.read_bytes() for path in (home / "run").iterdir()}
    said = complaint(home, "train.py", *flags)
    assert "holds a run: continue it with --resume run, or name another --out_dir" in said
    assert {path.name: path.read_bytes() for path in (home / "run").iterdir()} == before


def test_of_two_runs_in_one_folder_the_second_is_refused(home):
    """Also before the first checkpoint; what a killed one has left stops nobody."""
    flags = *TINY_RUN, "--out_dir", "run"
    with open_log(home / "run", 0) as log:
        log.write('{"iter": 1, "loss": 2.0}\n')
        said = complaint(home, "train.py", *flags)
        assert "another training is at work in run: name another --out_dir" in said
        assert losses(home / "run")[0] == {1: 2.0}
    command(home, "train.py", *flags)
    with open_log(home / "run", 1):
        assert "another training" in complaint(home, "train.py", "--resume", "run")


def test_a_changed_text_stops_a_resume_and_a_moved_one_does_not(home):
    flags = "--model", "cable", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    shutil.copytree(home / "notes", home / "moved")
    more = "--max_iters", 3, "--no-evaluate"
    command(home, "train.py", "--resume", "run", "--data", "moved", *more)
    assert max(losses(home / "run")[0]) == 3
    (home / "moved" / "0.txt").write_text("something else " * 60)
    again = "train.py", "--resume", "run", "--max_iters", 4, "--data", "moved"
    assert "the text has changed since the run was trained on it" in complaint(home, *again)
    assert torch.load(home / "run" / "ckpt.pt", weights_only=True)["iter"] == 3


def test_the_text_of_a_checkpoint_from_elsewhere_has_to_be_named(trained, home):
    """Its path may be there: it is not read unless it was prepared here, or is named."""
    shutil.copytree(trained / "cable", home / "run")
    for script in (["eval.py", "run"], ["train.py", "--resume", "run"]):
        assert "name it with --data" in complaint(home, *script)
        assert not (home / "prepared").exists()
    command(home, "eval.py", "run", "--lengths", 16, "--data", "notes")
    command(home, "train.py", "--resume", "run", "--data", "notes", "--max_iters", 3,
            "--no-evaluate")


def test_what_is_not_finite_stops_the_run_and_is_named(home, monkeypatch):
    flags = ("--data", "notes", "--max_iters", 40, "--no-evaluate", *TINY_FLAGS, "--learning_rate",
             "1e30", "--warmup_iters", 1, "--out_dir", "run")
    said = complaint(home, "train.py", *flags)
    assert "is not finite by iter" in said and "a lower --learning_rate may help" in said
    assert not (home / "run" / "ckpt.pt").exists()

    def poisoned(config, make=names.make_model):
        model = make(config)
        model.h[0].mlp.c_fc.weight.register_hook(lambda g: g * float("inf"))
        return model
    monkeypatch.setattr(names, "make_model", poisoned)
    said = complaint(home, "train.py", *flags[:-4], "--out_dir", "run")
    assert "the gradient of h.0.mlp.c_fc.weight is not finite by iter 1" in said


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(home, monkeypatch):
    flags = "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    before = {path.name: path.read_bytes() for path in (home / "run").glob("*.pt")}
    whole = torch.save

    def half(value, path):
        whole(value, path)
        path.write_bytes(path.read_bytes()[:1000])
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos\nmore lines")
    monkeypatch.setattr(torch, "save", half)
    said = complaint(home, "train.py", "--resume", "run", "--max_iters", 5, "--no-evaluate")
    assert "error: could not write run/" in said and "MB are free there: [enforce" in said
    assert {path.name: path.read_bytes() for path in (home / "run").glob("*.pt")} == before
    assert not list((home / "run").glob("*tmp*"))


def test_what_ends_a_script_is_one_line_and_a_bug_keeps_its_traceback(capfd, monkeypatch):
    def said(error):
        try:
            raise error
        except Exception as e:
            in_one_line(type(e), e, e.__traceback__)
        return capfd.readouterr().err
    assert said(OSError("no space")) == "error: no space\n"
    for error, script, less in ((MemoryError("1 TiB"), "train.py", "halve --batch_size"),
                                (torch.OutOfMemoryError("CUDA"), "sample.py", "take a shorter")):
        monkeypatch.setattr(sys, "argv", [f"/anywhere/{script}"])
        assert said(error).startswith(f"error: this does not fit into memory: {less}")
    assert "ZeroDivisionError: ours" in said(ZeroDivisionError("ours"))
