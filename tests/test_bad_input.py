"""What a user is owed of train.py: one clear line, exit code not 0, nothing lost."""
import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import model_cable
import train
from common.exits import in_one_line
from common.log import open_log
from tests.helpers import (
    TINY_FLAGS,
    TINY_RUN,
    command,
    complaint,
    exit_code,
    losses,
    standing_in,
)

OWED = {
    # a typo
    "--learning-rat 1": "arguments: --learning-rat 1; did you mean --learning_rate?",
    "--model cabel": "unknown model 'cabel', in no file's VARIANTS: did you mean label or cable?",
    "--model baseline": "model_baseline.py answers to nope: see VARIANTS in it",
    "--model xyz": "choose from nope, cable, cable_nw, ",
    "--data stdlb": "nor has data/stdlb.py a class Task): did you mean stdlib?",
    "--size nanoo": "unknown size 'nanoo': did you mean nano?",
    # a file, a package or a device that is not there
    "--resume nowhere": "no checkpoint at nowhere; make one with: python train.py --model cable",
    "--resume out/rope-recall-nano": "make one with: python train.py --model rope --data recall",
    "--init_from out/rope-mine/ckpt.pt": "make one with: python train.py --model rope",
    "--init_from nowhere": "no checkpoint at nowhere",
    "--data wikitext103": "pip install datasets",
    "--device cuda:7": "--device cuda:7: torch",
    # a value out of range, of a training, a model, a task
    "--max_iters ten": "argument --max_iters: invalid int value: 'ten'",
    "--dtype half": "argument --dtype: invalid choice: 'half' (choose from 'auto', 'float32'",
    "--batch_size 0": "--batch_size 0 must be at least 1",
    "--seed -1": "--seed -1 and --grad_clip 1.0 must be at least 0",
    "--weight_decay -1": "--weight_decay -1.0 must be at least 0, and finite",
    "--dropout 1": "--dropout 1.0 must be at least 0, and less than 1",
    "--bema --rho nan": "--rho nan must be at least 1",
    "--learning_rate 1e-4": "--min_lr 0.0004 is more than --learning_rate 0.0001",
    "--learning_rate -1 --lr_decay none": "Invalid learning rate: -1.0",
    "--learning_rate 1e30 --max_iters 9": "not finite by iter",
    "--n_embd 30 --n_head 4": "n_embd=30 is not divisible by n_head=4",
    "--model label --n_label 5": "n_label=5 is not 0",
    "--model rope --repair yarn": "a repair in training needs --original_length",
    "--data flipflop --block_size 65": "block_size=65 must be even and at least 4",
    "--data flipflop --model bert_cable": "flipflop needs a causal model, such as cable",
    "--data max_retrieval": "max_retrieval is numbers: see lab/variants/minimal.py",
    # a name that means something else
    "--model cable_nw --weight": "--weight True: the run, or what --model names, has False",
    # a text too short
    "--data empty.txt": "empty.txt",
    "--data short.txt": "short.txt is too short",
    # a checkpoint of other settings, or none
    "--init_from rope": "the weights in rope do not fit model_cable.py: Missing key",
    "--init_from cable --norm post": "its norm is pre, not post",
    "--resume cable --n_layer 3": "--n_layer 3: the run, or what --model names, has 1",
    "--resume rope --data recall": "--data recall: the run, or what --model names, has 'flipflop'",
    "--resume cable --max_iters 1": "--max_iters 1: the run is at iter 2 already",
    "--resume short.txt": "short.txt is not a whole checkpoint of this repository",
    "--resume strange.pt": "strange.pt is not a whole checkpoint of this repository",
}


@pytest.mark.parametrize("flags", OWED)
def test_train_says_what_is_wrong(trained, flags, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    words = flags.split()
    if words[0] != "--resume":
        words = ["--data", "notes", "--n_head", 2, "--max_iters", 1, "--warmup_iters", 0,
                 "--no-evaluate", "--out_dir", "new", *words]
    assert OWED[flags] in complaint(trained, "train.py", *words)
    assert not (trained / "new" / "ckpt.pt").exists()


def test_a_folder_that_holds_a_run_is_refused_and_one_where_another_is_at_work(home):
    flags = *TINY_RUN, "--out_dir", "run"
    with open_log(home / "run", 0) as log:
        log.write('{"iter": 1, "loss": 2.0}\n')
        assert "another training is at work in run" in complaint(home, "train.py", *flags)
        assert losses(home / "run")[0] == {1: 2.0}
    command(home, "train.py", *flags)
    before = contents(home / "run")
    said = complaint(home, "train.py", *flags)
    assert "holds a run: continue it with --resume run, or name another --out_dir" in said
    assert contents(home / "run") == before


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_changed_text_stops_a_resume_and_a_moved_one_does_not(trained, home):
    """A text that was never prepared here is not read unless it is named."""
    shutil.copytree(trained / "cable", home / "run")
    resume = "train.py", "--resume", "run", "--no-evaluate", "--max_iters"
    assert "name it with --data" in complaint(home, *resume, 3)
    (home / "notes").rename(home / "moved")  # and touched
    os.utime(home / "moved" / "0.txt")
    command(home, *resume, 3, "--data", "moved")
    assert max(losses(home / "run")[0]) == 3
    (home / "moved" / "0.txt").write_text("something else " * 60)
    said = complaint(home, *resume, 4, "--data", "moved")
    assert "the text has changed since the run was trained on it" in said


@pytest.mark.parametrize("pair", [os.pipe, os.openpty])
def test_training_goes_on_where_nobody_reads_any_more(home, pair):
    """`python train.py | head`, and a terminal that was closed."""
    reader, writer = pair()
    os.close(reader)
    with open(writer, "w") as out, contextlib.redirect_stdout(out), standing_in(home):
        assert exit_code(train.main, [*map(str, TINY_RUN), "--out_dir", "run"]) == 0
    assert torch.load(home / "run" / "ckpt.pt", weights_only=True)["iter"] == 1


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(home, monkeypatch):
    flags = "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    before = contents(home / "run")
    whole = torch.save

    def half(value, path):
        whole(value, path)
        if not isinstance(path, Path):  # of a setting, to see whether it can be saved
            return
        path.write_bytes(path.read_bytes()[:1000])
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos\nmore lines")
    monkeypatch.setattr(torch, "save", half)
    said = complaint(home, "train.py", "--resume", "run", "--max_iters", 5, "--no-evaluate")
    assert "error: could not write run/" in said and "MB are free there: [enforce" in said
    after = contents(home / "run")
    assert after.keys() == before.keys() and after["ckpt.pt"] == before["ckpt.pt"]


def test_what_ends_a_script_is_one_line_and_a_bug_keeps_its_traceback(home, capfd, monkeypatch):
    for error, says in (
            (OSError("no space"), "error: no space\n"),
            (MemoryError(), "error: this does not fit into memory: halve --batch_size"),
            (torch.OutOfMemoryError("CUDA"), "error: this does not fit into memory: halve"),
            (ZeroDivisionError("ours"), "ZeroDivisionError: ours")):
        monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
        in_one_line(type(error), error, None)
        assert capfd.readouterr().err.startswith(says)

    def forward(*args):
        raise ValueError("a bug")
    monkeypatch.setattr(model_cable.GPT, "forward", forward)
    with pytest.raises(ValueError, match="a bug"):
        command(home, "train.py", *TINY_RUN, "--out_dir", "run")
