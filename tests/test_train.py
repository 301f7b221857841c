"""train.py, by its command: losses, resuming, schedules, settings, help."""
import contextlib
import json
import math
import os
import re
import signal
import types
import weakref

import numpy as np
import pytest
import torch

import train
from common import names
from common.batches import batches
from common.checkpoint import load_run
from common.device import choose_device
from common.settings import TrainConfig, new_settings
from tests.helpers import (
    ENCODERS,
    HARD,
    MODELS,
    TINY_FLAGS,
    TINY_RUN,
    close,
    command,
    exit_code,
    is_png,
    losses,
    make,
    standing_in,
)


def test_one_command_trains_evaluates_draws_and_writes(home):
    out, err = command(home, "train.py", "--model=cable", "--data", "notes", "--max_iters", 6,
                       "--eval_interval", 3, *TINY_FLAGS)
    run = home / "out" / "cable-notes-nano"
    written = {"ckpt.pt", "best.pt", "log.jsonl", "eval.json", "eval.png"}
    assert {p.name for p in run.iterdir()} == written and is_png(run / "eval.png")
    assert "iter 6/6 | loss" in out and "tok/s | eta" in out and "val loss" in out
    assert re.findall(r"^(\w+) +.*?\w+=", out, re.M)[:4] == ["model", "data", "training", "run"]
    result = json.loads((run / "eval.json").read_text())
    perplexity = result["runs"][0]["perplexity"]
    assert list(perplexity) == ["16", "32", "64", "128", "256"]
    assert result["data"]["corpus"] == "notes" and result["split"] == "test"
    assert all(1 < p < 400 for p in perplexity.values())
    assert f"$ {result['command']}" in out
    assert "32 tokens, up to position 33 (2.1 x the training length)" in err


@pytest.mark.parametrize("pair", [os.pipe, os.openpty])
def test_training_goes_on_where_nobody_reads_any_more(home, pair):
    """`python train.py | head`, and a terminal that was closed."""
    reader, writer = pair()
    os.close(reader)
    with open(writer, "w") as out, contextlib.redirect_stdout(out), standing_in(home):
        assert exit_code(train.main, [*map(str, TINY_RUN), "--out_dir", "run"]) == 0
    assert torch.load(home / "run" / "ckpt.pt", weights_only=True)["iter"] == 1


def interrupted(monkeypatch, name, at):
    """
    A Ctrl-C, a kill or a closed terminal at the beginning of step `at`, counted from 1. In the step
    before something else takes the signal, as LLVM does where Triton compiles.
    """
    get_lr = train.get_lr

    def counted(c, it):
        if it + 2 == at:
            signal.signal(getattr(signal, name), signal.default_int_handler)
        if it + 1 == at:
            os.kill(os.getpid(), getattr(signal, name))
        return get_lr(c, it)
    monkeypatch.setattr(train, "get_lr", counted)


def test_a_step_is_torchs_adamw_on_the_mean_of_micro_steps_clipped(home):
    flags = ("--model cable --data notes --no-evaluate --gradient_accumulation_steps 2 --grad_clip "
             "0.1 --beta1 0.5 --beta2 0.7 --weight_decay 0.3 --learning_rate 0.01 --warmup_iters 0 "
             "--lr_decay none --max_iters 2").split()
    command(home, "train.py", *flags, *TINY_FLAGS, "--out_dir", "run")
    saved = torch.load(home / "run" / "ckpt.pt", weights_only=True)
    config = saved["config"]
    torch.manual_seed(config["seed"])
    model, task = names.make_model(config), names.make_task(config)
    groups = [dict(params=[p for p in model.parameters() if (p.dim() > 1) == wide],
                   weight_decay=0.3 * wide) for wide in (True, False)]
    assert all(p.dim() == 1 for p in make("kerple").pe.parameters())  # do not decay
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.5, 0.7))
    for it in range(2):
        draw = np.random.default_rng([config["seed"], it])
        both = [task.batch("train", 4, draw) for _ in range(2)]
        x, y = (torch.from_numpy(np.concatenate(z)) for z in zip(*both))
        loss = model(x, y)[1]
        loss.backward()
        assert losses(home / "run")[0][it + 1] == pytest.approx(loss.item(), abs=1e-4)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.2
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.state_dict().items():
        close(saved["model"][name], p, 1e-5)


def test_dropout_is_for_training_alone(home):
    """Every dropout of every model is passed once; a loaded model and a validation have none."""
    for name in (*MODELS, *ENCODERS):
        model, passed = make(name, dropout=0.5).train(), []
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
        for layer in layers:
            layer.register_forward_hook(lambda layer, *_, to=passed: to.append(layer))
        model(torch.randint(3, 61, (2, 9)))
        assert len(layers) == len(passed) == 5 and set(passed) == set(layers)
        assert {layer.p for layer in layers} == {0.5}
    flags = "--model cable --data notes --no-evaluate --dropout 0.5 --max_iters 1".split()
    command(home, "train.py", *flags, *TINY_FLAGS, "--out_dir", "run")
    run = load_run(home / "run")
    assert not run.model.training
    c = types.SimpleNamespace(**run.config)
    c.eval_iters = 2
    run.model.train()
    one, two = (train.validate(run.model, names.make_task(run.config), c, "cpu",
                               contextlib.nullcontext()) for _ in range(2))
    assert one == two and run.model.training


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_resumed_run_equals_an_uninterrupted_one(name, home, monkeypatch):
    flags = *HARD, "--max_iters", 12, "--eval_interval", 4
    command(home, "train.py", *flags, "--out_dir", "whole")
    with monkeypatch.context() as patch:
        interrupted(patch, name, at=7)
        handler = signal.getsignal(getattr(signal, name))
        out, _ = command(home, "train.py", *flags, "--out_dir", "broken", code=130)
    assert "interrupted after iter 7, saved; continue with: python train.py --resume broken" in out
    assert signal.getsignal(getattr(signal, name)) is handler  # a second one ends what comes
    assert torch.load(home / "broken" / "ckpt.pt", weights_only=True)["iter"] == 7
    with open(home / "broken" / "log.jsonl", "a") as f:  # what a kill leaves: lines that the
        f.write(json.dumps(dict(iter=8, loss=99.0)) + "\n")  # checkpoint does not know
    out, _ = command(home, "train.py", "--resume", "broken", "--no-evaluate")
    assert "from iter 7" in out
    assert losses(home / "whole") == losses(home / "broken")
    whole, broken = (torch.load(home / name / "ckpt.pt") for name in ("whole", "broken"))
    for a, b in ((whole["model"], broken["model"]), (whole["bema"]["ema"], broken["bema"]["ema"])):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    del broken["config"]["qk_norm"]  # as if the model file had got this field since
    torch.save(broken, home / "broken" / "ckpt.pt")
    command(home, "train.py", "--resume", "broken", "--no-evaluate", "--max_iters", 14)
    assert list(losses(home / "broken")[0]) == list(range(1, 15))


def test_scores_have_the_memory_of_the_training(home, monkeypatch):
    """Model and optimizer are gone when eval.py and sample.py start."""
    ran, there = [], []

    def watched(make):
        def kept(*args, **how):
            thing = make(*args, **how)
            there.append(weakref.ref(thing))
            return thing
        return kept
    monkeypatch.setattr(names, "make_model", watched(names.make_model))
    monkeypatch.setattr(torch.optim, "AdamW", watched(torch.optim.AdamW))
    with standing_in(home), monkeypatch.context() as patch:
        patch.setattr(train, "script", lambda *_: ran.append([ref() for ref in there]))
        train.main(["--data", "notes", "--max_iters", "2", *TINY_FLAGS])
    assert ran == [[None, None]] * 2


def test_a_process_takes_the_one_gpu_that_it_is_shown(monkeypatch):
    """By `srun --gpus-per-task=1`; torchrun shows all of them to every process."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert choose_device("cuda") == choose_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="--device cuda:3: torch .* finds 1 of these"):
        choose_device("cuda")


def test_where_nothing_compiles_training_goes_on(home, monkeypatch):
    def no_compiler(model):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore")
    monkeypatch.setattr(torch, "compile", no_compiler)
    out, _ = command(home, "train.py", *TINY_RUN, "--compile", "on", "--out_dir", "run")
    assert ("torch.compile does not work here, so training goes on without it (RuntimeError: "
            "InvalidCxxCompiler: No working C++ compiler found)") in out
    assert "attention in PyTorch\n" in out and "iter 1/1" in out


def test_validation_compiles_nothing(home, monkeypatch):
    """A task's validation may have other lengths than its training."""
    class Compiled(torch.nn.Sequential):
        def forward(self, *args):
            assert torch.is_grad_enabled()
            return self[0](*args)
    monkeypatch.setattr(torch, "compile",
                        lambda f: Compiled(f) if isinstance(f, torch.nn.Module) else f)
    out, _ = command(home, "train.py", *TINY_RUN, "--compile", "on", "--out_dir", "run")
    assert "torch.compile\n" in out and "val loss" in out


def test_how_often_a_text_is_read_is_said(home):
    (home / "short.txt").write_text("a word" * 333 + "\n")  # 1,999 bytes, and a token before them
    words = "train.py", "--data", "short.txt", "--no-evaluate", *TINY_FLAGS, "--max_iters", 1
    out, _ = command(home, *words, "--out_dir", "once")
    assert "\n64 tokens = 0.0 passes over this text\n" in out and "by heart" not in out
    out, _ = command(home, *words, "--batch_size", 1200, "--out_dir", "often")
    assert "\n19,200 tokens = 10.7 passes over this text\nmore than 10 passes: a model" in out


def test_batches_are_drawn_ahead_and_are_those_of_their_step(monkeypatch):
    """A process takes every second row; what is raised in the other thread is raised here."""
    task = names.make_task(dict(data="flipflop", block_size=8))
    c = types.SimpleNamespace(seed=7, batch_size=4, max_iters=5, gradient_accumulation_steps=2)
    steps = list(batches(task, c, 3, torch.device("cpu"), rank=1, world=2))
    assert len(steps) == 2
    for it, step in enumerate(steps, 3):
        draw = np.random.default_rng([7, it])
        for x, y in step:
            all_x, all_y = task.tensors("train", 4, draw)
            assert torch.equal(x, all_x[1::2]) and torch.equal(y, all_y[1::2])
    monkeypatch.setattr(task, "tensors", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(batches(task, c, 0, torch.device("cpu")))


def test_bema_is_its_formulas(home):
    saved = []
    for words in (("--model", "cable", "--data", "flipflop", "--bema", *TINY_FLAGS, "--max_iters",
                   1, "--eta", 0.4, "--kappa", 0.7, "--rho", 3, "--out_dir", "run"),
                  ("--resume", "run", "--max_iters", 2)):
        command(home, "train.py", *words, "--no-evaluate")
        saved.append(torch.load(home / "run" / "ckpt.pt", weights_only=True))
    first, second = saved
    for n, p in load_run(home / "run", bema=True).model.named_parameters():
        start, theta1, theta2 = first["bema"]["start"][n], first["model"][n], second["model"][n]
        ema = start + (3 + 1) ** -0.7 * (theta1 - start)
        ema = ema + (3 + 2) ** -0.7 * (theta2 - ema)
        close(second["bema"]["ema"][n], ema, 1e-7)
        close(p, ema + (3 + 2) ** -0.4 * (theta2 - start), 1e-7)
        assert torch.equal(start, second["bema"]["start"][n])


@pytest.mark.parametrize("decay, middle, late", [
    ("cosine", 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)), 0.1), ("linear", 0.775, 0.1),
    ("none", 1.0, 1.0)])
def test_learning_rate_schedules(decay, middle, late):
    """Warmup over 3 steps, decay from 1 to 0.1 until step 11."""
    c = types.SimpleNamespace(learning_rate=1.0, min_lr=0.1, warmup_iters=3, lr_decay_iters=11,
                              lr_decay=decay)
    want = {0: 1 / 3, 2: 1.0, 3: 1.0, 5: middle, 11: late, 13: late}
    assert {it: train.get_lr(c, it) for it in want} == pytest.approx(want)


def test_a_flag_comes_before_the_model_before_the_task_before_the_default():
    """--batch_size from the command, norm from TRA, n_embd from flip-flop, beta2 from nobody."""
    c = new_settings("--model tra --data flipflop --batch_size 3".split())
    task = names.find_task("flipflop").defaults
    assert c.batch_size == 3 and c.norm == "post" and c.qk_norm
    assert c.n_embd == task["nano"]["n_embd"] != 64
    assert c.beta2 == TrainConfig().beta2
    c = new_settings("--model tra --data flipflop --norm pre --no-qk_norm --size paper".split())
    assert c.norm == "pre" and not c.qk_norm
    assert c.grad_clip == task["paper"]["grad_clip"] == 0.0


def test_help_lists_the_models_own_flags(trained):
    cable, _ = command(trained, "train.py", "--model", "cable", "--help")
    relative, _ = command(trained, "train.py", "--help", "--model", "relative")
    assert "--step X" in cable and "CABLE_NW" in cable and "(default: 0.95)" in cable
    assert "--step X" not in relative and "--capped" in relative
    counting, _ = command(trained, "train.py", "--data", "counting", "--help")
    assert "--max_ops X" in counting and "operations in a program" in counting
    resumed, _ = command(trained, "train.py", "--resume", "cable", "--help")
    assert "--max_iters" in resumed and "--n_layer" not in resumed


def test_positions_are_dropped_and_taken_back(home):
    """DroPE: the weights of rope go on without positions; and the other way round."""
    flags = "--data", "notes", "--no-evaluate", *TINY_FLAGS, "--eval_interval", 1
    command(home, "train.py", *flags, "--model", "rope", "--max_iters", 5, "--out_dir", "rope")
    still, before = ("--max_iters", 1, "--learning_rate", 0, "--min_lr", 0), "rope"
    for model in ("nope", "rope_window"):
        said, _ = command(home, "train.py", *flags, *still, "--model", model, "--init_from", before,
                          "--out_dir", model, *(["--window", 16] if "window" in model else []))
        iters = dict(rope=5, nope=1)[before]
        assert f"takes over the weights of {before}, a {before}, at iter {iters}" in said
        before = model
    runs = [torch.load(home / name / "ckpt.pt", weights_only=True)
            for name in ("rope", "nope", "rope_window")]
    for run in runs:
        assert all(torch.equal(x, runs[0]["model"][name]) for name, x in run["model"].items())
    with_rope, without, again = (losses(home / run["config"]["model"])[1] for run in runs)
    assert again[1] == with_rope[5] != without[1]
