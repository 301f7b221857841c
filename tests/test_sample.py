"""sample.py: text from a model, over a cache."""
import contextlib
import itertools
import math
import os
import shutil

import numpy as np
import torch

import eval as evaluation
import runs
import sample
from tests.helpers import close, command, complaint, make, written_without_a_cache


def test_sampling(trained, tmp_path):
    """Several samples, the same seed twice, a prompt of any bytes, longer than the context."""
    words = "sample.py", "cable", "--prompt", "alpha ", "--num_samples", 2, "--max_new_tokens", 40
    out, err = command(trained, *words, "--top_k", 5)
    again, _ = command(trained, *words, "--top_k", 5)
    assert out == again and out.count("alpha ") >= 2 and "tok/s" in err
    other, _ = command(trained, *words, "--top_k", 5, "--seed", 1)
    assert other != out
    (tmp_path / "prompt.bin").write_bytes(bytes(range(256)) * 2)
    _, err = command(trained, "sample.py", "cable", "--prompt_file", tmp_path / "prompt.bin",
                     "--max_new_tokens", 3, "--temperature", 0)
    assert "prompt of 512 tokens" in err and "up to position 515" in err


def test_sampling_with_a_cache_is_sampling_without():
    for name in ("cable", "rope"):
        model, idx = make(name), torch.randint(0, 61, (1, 5))
        for how in (dict(temperature=0), dict(temperature=1.0, top_k=7, vocab_size=50)):
            torch.manual_seed(3)
            drawn = torch.cat(list(sample.generate(model, idx, 30, **how)), 1)
            torch.manual_seed(3)
            assert torch.equal(drawn, written_without_a_cache(model, idx, 30, **how))
            assert how["temperature"] == 0 or drawn.max() < 50
            assert how["temperature"] > 0 or len(drawn.unique()) > 1


def test_what_is_sampled_follows_the_temperature_and_top_k(monkeypatch):
    logits = torch.tensor([0.0, 1, 2, 3])
    monkeypatch.setattr(runs, "new_cache", lambda model, size: None)
    monkeypatch.setattr(sample, "read", lambda model, idx, cache: logits.expand(*idx.shape, 4))
    torch.manual_seed(0)
    idx = torch.zeros(4000, 1, dtype=torch.long)
    for how, p in ((dict(temperature=2.0), (logits / 2).softmax(-1)),
                   (dict(top_k=2), torch.tensor([0, 0, 1, math.e]) / (1 + math.e))):
        new, = sample.generate(None, idx, 1, **how)
        close(new.flatten().bincount(minlength=4) / 4000, p, 0.04)
        assert new.min() >= (2 if "top_k" in how else 0)


def test_without_a_name_the_newest_text_run_is_taken(trained, home):
    for n, name in enumerate(("learned", "cable", "rope")):  # rope is the newest, and no text
        shutil.copytree(trained / name, home / "out" / name)
        os.utime(home / "out" / name / "ckpt.pt", (n, n))
    shutil.copytree(trained / "rope", home / "out" / "fork")  # newer, and its model is gone
    path = home / "out" / "fork" / "ckpt.pt"
    checkpoint = torch.load(path, weights_only=True)
    torch.save(checkpoint | dict(config=checkpoint["config"] | dict(model="gone")), path)
    _, err = command(home, "sample.py", "--max_new_tokens", 1)
    assert "out/cable/ckpt.pt" in err
    path.write_bytes(b"cut off")
    assert "fork/ckpt.pt is not a whole checkpoint" in complaint(home, "sample.py")
    shutil.rmtree(home / "out" / "fork")
    shutil.rmtree(home / "out" / "cable")
    _, err = command(home, "sample.py", "--max_new_tokens", 1)
    assert "out/learned/ckpt.pt" in err
    out, _ = command(home, "eval.py", "--sequences", 20)  # the newest of any kind
    assert (home / "out" / "rope" / "eval.json").exists() and "flipflop" in out
    shutil.rmtree(home / "out" / "learned")
    assert "text" in complaint(home, "sample.py")
    shutil.rmtree(home / "out")
    says = "no checkpoint in out/ yet; make one with: python train.py --model cable"
    assert says in complaint(home, "eval.py")


def test_long_prompts_and_windows_say_how_far_they_are(monkeypatch, capsys):
    """After every layer; two windows of 4 are half done when the first is, pieces by the square."""
    model = make("rope")
    monkeypatch.setattr(runs, "piece", lambda model: 2)
    monkeypatch.setattr(runs.time, "time", itertools.count(0, 3).__next__)
    sample.read(model, torch.arange(4)[None], runs.new_cache(model, 4))
    said = ["12 %", "25 %", "62 %", "100 %"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" of ")[0] for line in lines] == [f"  prompt: {share}" for share in said]
    assert lines[1] == "  prompt: 25 % of 4 tokens, eta 0m18s"
    monkeypatch.setattr(runs, "piece", lambda model: 4)
    evaluation.token_losses(model, np.arange(9), 4, "cpu", contextlib.nullcontext())
    said = ["25 %", "50 %", "75 %", "100 %"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" of 8 ")[0] for line in lines] == [f"  windows of 4: {n}" for n in said]
    assert not any(part._forward_hooks for part in model.modules())
