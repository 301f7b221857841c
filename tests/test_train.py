"""train.py, by its command: losses, resuming, schedules, settings, help."""
import json
import math
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data.text
import train
from common import names
from common.checkpoint import load_run
from common.exits import asked_to_stop
from common.settings import TrainConfig, new_settings
from tests.helpers import (
    ENCODERS,
    MODELS,
    TINY_FLAGS,
    TINY_RUN,
    close,
    command,
    is_png,
    losses,
    make,
)


def saved(run):
    return torch.load(run / "ckpt.pt", weights_only=True)


def test_one_command_trains_evaluates_draws_and_writes(home):
    out, err = command(home, "train.py", "--model=cable", "--data", "notes", "--max_iters", 6,
                       "--eval_interval", 3, *TINY_FLAGS)
    run = home / "out" / "cable-notes-nano"
    written = {"ckpt.pt", "best.pt", "log.jsonl", "eval.json", "eval.png"}
    assert {p.name for p in run.iterdir()} == written and is_png(run / "eval.png")
    assert re.findall(r"^(\w+) +.*?\w+=", out, re.M)[:4] == ["model", "data", "training", "run"]
    assert "384 tokens = 0.0 passes over this text" in out
    assert "iter 6/6 | loss" in out and "tok/s | eta" in out and "val loss" in out
    result = json.loads((run / "eval.json").read_text())
    perplexity = result["runs"][0]["perplexity"]
    assert list(perplexity) == ["16", "32", "64", "128", "256"]
    assert all(1 < p < 400 for p in perplexity.values())
    assert f"$ {result['command']}" in out
    assert "32 tokens, up to position 33 (2.1 x the training length)" in err


def test_a_step_is_torchs_adamw_on_the_mean_of_micro_steps_clipped(home):
    flags = ("--model cable --data notes --no-evaluate --gradient_accumulation_steps 2 --grad_clip "
             "0.1 --beta1 0.5 --beta2 0.7 --weight_decay 0.3 --learning_rate 0.01 --warmup_iters 0 "
             "--lr_decay none --max_iters 2").split()
    command(home, "train.py", *flags, *TINY_FLAGS, "--out_dir", "run")
    after = saved(home / "run")
    config = after["config"]
    torch.manual_seed(config["seed"])
    model, task = names.make_model(config), names.make_task(config)
    wide = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([dict(params=wide, weight_decay=0.3),
                                   dict(params=rest, weight_decay=0)], lr=0.01, betas=(0.5, 0.7))
    for it in range(2):
        draw = np.random.default_rng([config["seed"], it])
        both = [task.batch("train", 4, draw) for _ in range(2)]
        x, y = (torch.from_numpy(np.concatenate(z)) for z in zip(*both))
        loss = model(x, y)[1]
        loss.backward()
        assert losses(home / "run")[0][it + 1] == pytest.approx(loss.item(), abs=1e-4)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.2
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.state_dict().items():
        close(after["model"][name], p, 1e-5)


def test_dropout_is_for_training_alone(trained):
    """Every dropout of every model is passed once; a loaded model and a validation have none."""
    for name in (*MODELS, *ENCODERS):
        model, passed = make(name, dropout=0.5).train(), []
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
        for layer in layers:
            layer.register_forward_hook(lambda layer, *_, to=passed: to.append(layer.p))
        model(torch.randint(3, 61, (2, 9)))
        assert passed == [0.5] * len(layers) == [0.5] * 5
    model, task = make("cable", dropout=0.5, vocab_size=5), names.find_task("flipflop")()
    c = SimpleNamespace(seed=1, batch_size=4, eval_iters=2)
    one, two = (train.validate(model.train(), task, c, "cpu", torch.no_grad(), lambda: False)
                for _ in range(2))
    assert one == two and model.training and not load_run(trained / "cable").model.training


@pytest.mark.parametrize("name, last", [
    ("SIGINT", 7), ("SIGTERM", 7), ("SIGHUP", 7), ("SIGINT", 8)])
def test_a_resumed_run_equals_an_uninterrupted_one(name, last, home, monkeypatch, capfd):
    """
    Ctrl-C, a kill, a closed terminal in step 7, or in the validation after step 8. In the step
    before something else takes the signal, as LLVM does where Triton compiles.
    """
    number, get_lr, batch, looks = getattr(signal, name), train.get_lr, data.text.Task.batch, []

    def interrupted(c, it):
        if it == 5:
            signal.signal(number, signal.default_int_handler)
        if it == 6 and last == 7:
            os.kill(os.getpid(), number)
        return get_lr(c, it)

    def looked_at(task, split, *args):
        looks.extend([split] * (split == "val"))
        if len(looks) == 3 and last == 8:  # the first of the second validation
            os.kill(os.getpid(), number)
        return batch(task, split, *args)
    # label has what is hardest to resume: draws of its own, besides dropout
    flags = ("--model", "label", "--data", "notes", "--no-evaluate", "--dropout", 0.1, "--bema",
             "--gradient_accumulation_steps", 2, *TINY_FLAGS, "--max_iters", 12,
             "--eval_interval", 4)
    command(home, "train.py", *flags, "--out_dir", "whole")
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(train, "get_lr", interrupted)
        patch.setattr(data.text.Task, "batch", looked_at)
        out, _ = command(home, "train.py", *flags, "--out_dir", "broken", code=130)
    said = f"interrupted after iter {last}, saved; continue with: python train.py --resume broken"
    assert said in out and len(looks) == last - 5  # of two batches each
    assert capfd.readouterr().err.count("stopping and saving; a second Ctrl-C ends at once") == 1
    assert signal.getsignal(number) is handler  # a second one ends what comes
    with open(home / "broken" / "log.jsonl", "a") as f:  # what a kill leaves: lines that the
        f.write(json.dumps(dict(iter=9, loss=99.0)) + "\n")  # checkpoint does not know
    out, _ = command(home, "train.py", "--resume", "broken", "--no-evaluate")
    assert f"from iter {last}" in out
    assert losses(home / "whole") == losses(home / "broken")
    assert "99.0" not in (home / "broken" / "log.jsonl").read_text()
    whole, broken = saved(home / "whole"), saved(home / "broken")
    for a, b in ((whole["model"], broken["model"]), (whole["bema"]["ema"], broken["bema"]["ema"])):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    del broken["config"]["qk_norm"]  # as if the model file had got this field since
    torch.save(broken, home / "broken" / "ckpt.pt")
    command(home, "train.py", "--resume", "broken", "--no-evaluate", "--max_iters", 14)
    assert list(losses(home / "broken")[0]) == list(range(1, 15))


def test_a_second_ctrl_c_ends_at_once(monkeypatch, capfd):
    """Not one of the same moment, as `timeout` sends two; nor a kill."""
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with asked_to_stop() as asked:
        assert not asked()
        for at, name in ((5.0, "SIGINT"), (5.5, "SIGINT"), (9.0, "SIGTERM")):
            now[0] = at
            os.kill(os.getpid(), getattr(signal, name))
        assert asked() and capfd.readouterr().err.count("\n") == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_where_nothing_compiles_training_goes_on(home, monkeypatch):
    def no_compiler(model):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore")
    monkeypatch.setattr(torch, "compile", no_compiler)
    out, _ = command(home, "train.py", *TINY_RUN, "--compile", "on", "--out_dir", "run")
    assert ("training goes on without it (RuntimeError: InvalidCxxCompiler: No working C++ compiler"
            " found)\n") in out and "iter 1/1" in out


def test_bema_is_its_formulas(home):
    command(home, "train.py", *TINY_RUN, "--bema", "--eta", 0.4, "--kappa", 0.7, "--rho", 3,
            "--out_dir", "run")
    first = saved(home / "run")
    command(home, "train.py", "--resume", "run", "--max_iters", 2, "--no-evaluate")
    second = saved(home / "run")
    for n, p in load_run(home / "run", bema=True).model.named_parameters():
        start, theta1, theta2 = first["bema"]["start"][n], first["model"][n], second["model"][n]
        ema = start + (3 + 1) ** -0.7 * (theta1 - start)
        ema = ema + (3 + 2) ** -0.7 * (theta2 - ema)
        close(second["bema"]["ema"][n], ema, 1e-7)
        close(p, ema + (3 + 2) ** -0.4 * (theta2 - start), 1e-7)


@pytest.mark.parametrize("decay, middle, late", [
    ("cosine", 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)), 0.1), ("linear", 0.775, 0.1),
    ("none", 1.0, 1.0)])
def test_learning_rate_schedules(decay, middle, late):
    """Warmup over 3 steps, decay from 1 to 0.1 until step 11."""
    c = SimpleNamespace(learning_rate=1.0, min_lr=0.1, warmup_iters=3, lr_decay_iters=11,
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
    assert "--step X" in cable and "CABLE_NW" in cable and "(default: 0.95)" in cable
    assert "--dtype {auto,float32,bfloat16}" in cable and "(default: )" not in cable
    assert "ssmax_ln, stick" in cable and "bert_cable" not in cable
    counting, _ = command(trained, "train.py", "--model", "relative", "--data=counting", "--help")
    assert "--step X" not in counting and "--capped" in counting and "--max_ops X" in counting


def test_positions_are_dropped(home):
    """DroPE: the weights of rope go on without positions."""
    command(home, "train.py", *TINY_RUN, "--model", "rope", "--out_dir", "rope")
    command(home, "train.py", *TINY_RUN, "--model", "nope", "--init_from", "rope",
            "--learning_rate", 0, "--min_lr", 0, "--out_dir", "nope")
    before, after = saved(home / "rope"), saved(home / "nope")
    assert all(torch.equal(after["model"][name], w) for name, w in before["model"].items())
    assert before["best_val_loss"] != after["best_val_loss"]
