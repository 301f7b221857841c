"""sample.py: text from a model, over a cache."""
import contextlib
import io
import math
import os
import shutil
import sys

import pytest
import torch
from torch.nn import functional as F

import sample
from tests.helpers import (
    close,
    command,
    complaint,
    exit_code,
    make,
    standing_in,
    written_without_a_cache,
)


def test_sampling(trained, tmp_path):
    """Several samples, a seed twice, a long prompt of any bytes, positions that end."""
    words = "sample.py", "cable", "--prompt", "alpha ", "--num_samples", 2, "--max_new_tokens", 20
    out, err = command(trained, *words)
    again, _ = command(trained, *words)
    other, _ = command(trained, *words, "--seed", 1)
    assert out == again != other and out.count("alpha ") >= 2 and "tok/s" in err
    (tmp_path / "prompt.bin").write_bytes(bytes(range(256)) * 2)
    _, err = command(trained, "sample.py", "cable", "--prompt_file", tmp_path / "prompt.bin",
                     "--max_new_tokens", 3, "--temperature", 0)
    assert "prompt of 512 tokens" in err and "up to position 515" in err
    _, err = command(trained, "sample.py", "learned", "--max_new_tokens", 40)
    assert "--- 16 tokens" in err and "learned positions end at block_size=16" in err


@pytest.mark.parametrize("flags, says", [
    (("--top_p", 0), "--top_p more than 0"), (("--top_k", -1), "--top_k and"),
    (("--temperature", 1e-9), "--temperature must be 0, which is greedy"),
    (("--prompt", "-foo"), "as in --prompt=-foo"), (("--prompt_file", "gone"), "No such file")])
def test_what_is_no_way_to_sample(flags, says, trained):
    assert says in complaint(trained, "sample.py", "cable", *flags)


@pytest.mark.parametrize("name", ["cable", "rope"])
def test_sampling_over_a_cache_is_sampling_without(name):
    model, idx = make(name), torch.randint(0, 61, (1, 5))
    for how in (dict(temperature=0), dict(temperature=1.0, top_k=7, vocab_size=50)):
        torch.manual_seed(3)
        new = torch.cat(list(sample.generate(model, idx, 16, **how)), 1)
        torch.manual_seed(3)
        assert torch.equal(new, written_without_a_cache(model, idx, 16, **how))
        assert new.max() < how.get("vocab_size", 61) and len(new.unique()) > 1


def test_a_cache_is_told_how_many_tokens_there_will_be(monkeypatch):
    """All of them, as what a repair of RoPE does depends on it; a billion cost nothing yet."""
    told = []
    monkeypatch.setattr(sample, "read", lambda *_: torch.zeros(1, 1, 4))
    monkeypatch.setattr(sample, "new_cache", lambda model, size: told.append(size))
    next(sample.generate(None, torch.zeros(1, 20_000, dtype=torch.long), 9))
    assert told == [20_009]
    monkeypatch.undo()
    start = torch.zeros(1, 3, dtype=torch.long)
    assert next(sample.generate(make("rope"), start, 10**9)) is not None


def test_what_is_sampled_follows_the_temperature_top_k_and_top_p(monkeypatch):
    logits = torch.tensor([0.0, 1, 2, 3])
    monkeypatch.setattr(sample, "new_cache", lambda model, size: None)
    monkeypatch.setattr(sample, "read", lambda model, idx, cache: logits.expand(*idx.shape, 4))
    torch.manual_seed(0)
    idx, p = torch.zeros(4000, 1, dtype=torch.long), logits.softmax(-1)  # .03 .09 .24 .64
    two = torch.tensor([0, 0, 1, math.e]) / (1 + math.e)
    for how, want in ((dict(temperature=2.0), (logits / 2).softmax(-1)), (dict(top_k=2), two),
                      (dict(top_p=0.7), two), (dict(top_p=0.5), F.one_hot(torch.tensor(3), 4)),
                      (dict(top_k=2, top_p=0.7), F.one_hot(torch.tensor(3), 4)),  # .73 of two
                      (dict(top_k=3, top_p=0.999), p[1:].div(p[1:].sum()))):
        new, = sample.generate(None, idx, 1, **how)
        want = F.pad(want, (4 - len(want), 0))
        close(new.flatten().bincount(minlength=4) / 4000, want, 0.04)
        assert not new.flatten().bincount(minlength=4)[want == 0].any()


def test_where_nobody_reads_any_more_it_ends_without_a_word(trained, monkeypatch, capfd):
    """`python sample.py | head`"""
    monkeypatch.setattr(os, "_exit", sys.exit)
    reader, writer = os.pipe()
    os.close(reader)
    with (open(writer, "wb", buffering=0) as pipe, standing_in(trained),
          contextlib.redirect_stdout(io.TextIOWrapper(pipe, write_through=True)),
          pytest.raises(SystemExit, match="141")):
        exit_code(sample.main, ["cable", "--prompt", "a"])
    assert "Error" not in capfd.readouterr().err


def test_a_character_of_several_tokens_is_written_whole(trained, monkeypatch):
    def generate(*_):
        for byte in "aé".encode():
            yield torch.tensor([[byte]])
    monkeypatch.setattr(sample, "generate", generate)
    out, _ = command(trained, "sample.py", "cable", "--prompt", "b")
    assert out == "baé\n"


@pytest.mark.parametrize("terminal, says", [
    (True, "b\\x0e\\x9b\t\n"), (False, "b\x0e\x9b\t\n")])
def test_a_terminal_gets_no_control_characters(terminal, says, trained, monkeypatch):
    monkeypatch.setattr(sample, "generate", lambda *_: iter([torch.tensor([[14, 194, 155, 9]])]))
    class Out(io.StringIO):
        def isatty(self):
            return terminal
    with standing_in(trained), contextlib.redirect_stdout(Out()) as out:
        assert exit_code(sample.main, ["cable", "--prompt", "b"]) == 0
    assert out.getvalue() == says


def test_without_a_name_the_newest_text_run_is_taken(trained, home):
    for n, name in enumerate(("learned", "cable", "rope")):  # rope is the newest, and no text
        shutil.copytree(trained / name, home / "out" / name)
        os.utime(home / "out" / name / "ckpt.pt", (n, n))
    shutil.rmtree(home / "notes")  # a text that is gone can still be written
    _, err = command(home, "sample.py", "--max_new_tokens", 1)
    assert "out/cable/ckpt.pt" in err
    for name in ("cable", "learned"):
        shutil.rmtree(home / "out" / name)
    assert "no run on text in out/ yet; make one" in complaint(home, "sample.py")
