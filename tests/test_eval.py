"""eval.py: losses by length and position, several runs in a table, tasks."""
import contextlib
import json
import re
import shutil

import numpy as np
import pytest
import tiktoken
import torch
from torch.nn import functional as F

import data
import data.counting
import data.text
import eval as evaluation
import experiments
import model_baseline
import runs
import train
from experiments import tables
from tests.helpers import (
    MODELS,
    TINY_FLAGS,
    cells,
    close,
    command,
    complaint,
    drawn,
    entry,
    is_png,
    log_of,
    losses,
    make,
    rng,
)


@pytest.mark.parametrize("name", [m for m in MODELS if m != "label"])  # which draws anew each time
def test_perplexity_in_pieces_equals_one_forward(name, monkeypatch):
    """eval.py's windows: batches of short ones, cached pieces of long ones, a shorter last one."""
    model, cpu, context = make(name), torch.device("cpu"), contextlib.nullcontext()
    stream = np.random.default_rng(0).integers(0, 61, 101).astype(np.uint16)
    ids = torch.from_numpy(stream.astype(np.int64))
    for T in (10, 24) if "learned" in name else (10, 24, 64):
        want = []
        with torch.no_grad():
            for x, y in zip(ids[:-1].split(T), ids[1:].split(T)):
                want.append(F.cross_entropy(model(x[None])[0][0], y, reduction="none"))
        for piece in (runs.piece, lambda model: 16):
            monkeypatch.setattr(runs, "piece", piece)
            got = evaluation.token_losses(model, stream, T, cpu, context)
            close(torch.from_numpy(got), torch.cat(want), 1e-4)
            monkeypatch.undo()


def test_every_length_scores_the_same_tokens():
    seen = []

    class Noted(torch.nn.Module):
        config = model_baseline.GPTConfig(vocab_size=50)

        def forward(self, x, cache=None):
            seen.extend(x.flatten().tolist())
            return torch.zeros(*x.shape, 50), None
    stream, cpu = np.arange(41, dtype=np.uint16), torch.device("cpu")
    for T in (1, 7, 8, 40):
        seen.clear()
        losses = evaluation.token_losses(Noted(), stream, T, cpu, contextlib.nullcontext())
        assert sorted(seen) == list(range(40)) and losses.shape == (40,)


@pytest.mark.parametrize("name", ["cable", "nope"])
def test_strided_perplexity_is_one_forward_for_every_token(name, monkeypatch):
    """Every token from the longest window's half on, with T / 2 to T tokens to look back on."""
    model, cpu, context = make(name), torch.device("cpu"), contextlib.nullcontext()
    for N, lengths in ((61, (1, 2, 7, 10, 24)), (24, (5, 24)), (30, (10, 20))):
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 61, N + 1))
        longest = max(lengths)
        for T in lengths:
            want, step = [], T - T // 2
            for t in range(longest // 2, N):
                before = T // 2 + (t - longest // 2) % step  # tokens that it looks back on
                with torch.no_grad():
                    logits, _ = model(ids[None, t - before:t + 1])
                want.append(F.cross_entropy(logits[0, -1], ids[t + 1]))
                assert T / 2 - 1 < before < T and t - before >= 0
            for piece in (runs.piece, lambda model: 4):
                monkeypatch.setattr(runs, "piece", piece)
                got = evaluation.strided_losses(
                    model, ids.numpy().astype(np.uint16), T, longest, cpu, context)
                assert len(got) == N - longest // 2
                close(torch.from_numpy(got), torch.stack(want), 1e-4)
                monkeypatch.undo()


def test_loss_by_position_bins_cover_the_window_once():
    losses = np.arange(4100) % 2048 * 1.0
    bins = evaluation.by_position(losses, 2048)
    assert bins[0][0] == 0 and bins[-1][1] == 2047
    assert all(after[0] == before[1] + 1 for before, after in zip(bins, bins[1:]))
    assert all(loss == pytest.approx((a + b) / 2) for a, b, loss in bins)
    assert evaluation.by_position(np.ones(10), 5) == [[0, 4, 1.0]]


def test_errors_by_answer_and_a_constant_guess(home, here):
    """Of one test set: how many programs have an answer, and how many of them are wrong."""
    answers = np.array([3, 0, 3, 3, 10])
    found = evaluation.by_group(answers, np.array([1.0, 0, 0, 1, 1]), np.ones(5))
    assert found == {0: [1, 0.0], 3: [3, pytest.approx(2 / 3)], 10: [1, 1.0]}
    x, y = (torch.from_numpy(a) for a in data.counting.Task().batch("iid", 9, rng()))
    assert data.counting.Task().answer(x, y).tolist() == [row.max() - 10 for row in y]
    columns = [("in", "iid", "answer_error"), ("pass 10", "pass10", "answer_error")]
    here(counts=entry("--data counting --n_train 20", experiments.seeds(2, "cope"),
                      eval="--sequences 100", columns=columns))
    command(home, "reproduce.py", "counts", "--device", "cpu")
    result = json.loads((home / "results" / "counts.cpu.json").read_text())
    first, second = (r["by_answer"]["16"]["pass10"] for r in result["runs"])
    n = {answer: n for answer, (n, _) in first.items()}
    assert sum(n.values()) == 100 and all(second[answer][0] == n[answer] for answer in n)
    total = sum(count * rate for count, rate in first.values()) / 100
    scores = result["runs"][0]["scores"]["16"]["pass10"]["answer_error"]
    assert scores["value"] == pytest.approx(total)
    said = (home / "out" / "counts.cpu").exists() and tables.table(result)
    row, = (line for line in said.splitlines() if line.startswith("| cope | pass 10 |"))
    assert cells(row)[2] == f"{100 - max(n.values()):.2f}"
    head, = (line for line in said.splitlines() if "a constant guess |" in line)
    for answer, cell in zip(cells(head)[3:], cells(row)[3:]):
        rates = [one[answer][1] for one in (first, second)] if answer in n else []
        assert cell == (f"{100 * np.mean(rates):.1f} of {n[answer]}" if rates else "-")


def test_a_long_run_gets_the_whole_evaluation(monkeypatch):
    """An eighth of what it was trained on, and never more than what a run has by default."""
    said = []
    monkeypatch.setattr(runs, "script", lambda *words: said.append(words) and None)
    text, task = data.text.Task, data.find("flipflop")
    for kind, iters, want in ((text, 750, ()), (text, 40, ("--tokens", 80 * 256)),
                              (task, 4000, ()), (task, 400, ("--sequences", 800)),
                              (task, 9, ("--sequences", 100))):
        said.clear()
        c = train.argparse.Namespace(
            max_iters=iters, batch_size=16, gradient_accumulation_steps=1, block_size=256,
            device="auto", dtype="bfloat16", kernel="auto")
        assert not train.final_evaluation("run", c, kind)
        assert said[0] == ("eval.py", "run", *want, "--dtype", "bfloat16")
        assert len(said) == (2 if kind is text else 1)


def test_several_checkpoints_in_one_table_and_figure(trained, tmp_path):
    """Learned positions show a dash where they end."""
    names = "cable", "learned"
    out, _ = command(trained, "eval.py", *names, "--lengths", 8, 40, "--out", tmp_path / "two",
                     draw=True)
    assert "learned positions end at block_size=16" in out and is_png(tmp_path / "two.png")
    assert re.search(r"^learned +\d+\.\d+ +-$", out, re.M)
    both = json.loads((tmp_path / "two.json").read_text())
    assert [list(r["perplexity"]) for r in both["runs"]] == [["8", "40"], ["8"]]
    # the number of a run is the same alone, and by the saved weights at the beginning of the best
    command(trained, "eval.py", "cable/best.pt", "--lengths", 8, "--out", tmp_path / "one")
    one = json.loads((tmp_path / "one.json").read_text())["runs"][0]
    assert one["checkpoint"] == "best.pt" and one["iter"] == 2
    assert one["perplexity"]["8"] == both["runs"][0]["perplexity"]["8"]


def test_strided_perplexity_beside_the_other(trained, tmp_path, monkeypatch):
    """In the JSON, a line of the table, a panel of the figure, a row on the page."""
    words = "eval.py", "cable", "learned", "--lengths", 16, 32, "--tokens", 100, "--strided"
    figures = drawn(monkeypatch)
    out, _ = command(trained, *words, "--out", tmp_path / "both")
    assert "84 tokens, the same at every length" in out
    found = json.loads((tmp_path / "both.json").read_text())
    cable, learned = found["runs"]
    assert found["strided_tokens"] == 84
    assert list(cable["strided"]) == ["16", "32"] and list(learned["strided"]) == ["16"]
    shown = [f"{y:.3f}" for y in cable["strided"].values()]
    assert re.search(rf"^cable .*\n  strided +{shown[0]} +{shown[1]}$", out, re.M)
    assert re.search(r"^  strided +\d+\.\d+ +-$", out, re.M)
    titles = [ax.get_title() for ax in figures[0].axes]
    assert len(titles) == 3 and "84 tokens" in titles[1]
    points = figures[0].axes[1].lines
    assert list(cable["strided"].values()) in [list(line.get_ydata()) for line in points]
    table = tables.text_table(found | dict(paper={}))
    _, row = (line for line in table.splitlines() if line.startswith("| cable |"))
    assert cells(row)[2:4] == shown and "84 tokens" in table
    # without it nothing is said of it
    command(trained, *words[:-1], "--out", tmp_path / "one")
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["runs"][0]["perplexity"] == cable["perplexity"] and "strided_tokens" not in one
    assert len(figures[1].axes) == 2 and "trided" not in tables.text_table(one | dict(paper={}))


def test_another_text_is_scored_when_it_is_named(trained, tmp_path):
    (tmp_path / "other.txt").write_text("omega and more of it. " * 400)
    command(trained, "eval.py", "cable", "--data", tmp_path / "other.txt", "--lengths", 16,
            "--tokens", 0, "--out", tmp_path / "other")
    result = json.loads((tmp_path / "other.json").read_text())
    assert result["data"]["corpus"] == "other.txt"
    assert result["tokens"] == result["data"]["tokens"]["test"] - 1


def test_a_task_from_training_to_its_scores(home):
    """Scores in the log and with intervals in the JSON; learned positions end, and say so."""
    flags = "--data", "flipflop", "--max_iters", 4, "--eval_interval", 2, *TINY_FLAGS
    out, _ = command(home, "train.py", "--model", "tra", *flags)
    run = home / "out" / "tra-flipflop-nano"
    files = {"ckpt.pt", "best.pt", "log.jsonl", "eval.json", "eval.png", "lock"}
    assert {p.name for p in run.iterdir()} == files and is_png(run / "eval.png")
    assert "$ python eval.py" in out and "sample.py" not in out
    assert re.search(r"val loss \S+ \| iid exact_match \S+ glitch_rate \S+ \| sparse exact", out)
    scores = [r["scores"] for r in log_of(run) if "scores" in r]
    assert [sorted(by_split) for by_split in scores] == [["dense", "iid", "sparse"]] * 2
    result = json.loads((run / "eval.json").read_text())
    assert result["sequences"] == 100
    for by_metric in result["runs"][0]["scores"]["16"].values():
        for m in by_metric.values():
            assert 0 <= m["low"] <= m["value"] <= m["high"] <= 1
    assert out.count("exact_match") > 3
    command(home, "train.py", "--resume", run, "--max_iters", 6, "--no-evaluate")
    assert max(losses(run)[0]) == 6


def test_scores_of_several_runs_are_those_of_each_alone(trained, home):
    command(trained, "train.py", "--model", "learned", "--data", "flipflop", "--max_iters", 1,
            "--no-evaluate", *TINY_FLAGS, "--out_dir", home / "learned")
    lengths = "--lengths", 16, 40, "--sequences", 30
    out, _ = command(trained, "eval.py", "tra", home / "learned", *lengths, "--out", home / "two",
                     draw=True)
    assert "learned positions end at block_size=16" in out and is_png(home / "two.png")
    command(trained, "eval.py", "tra", *lengths, "--out", home / "one")
    both, one = (json.loads((home / f"{name}.json").read_text())["runs"] for name in ("two", "one"))
    assert both[0]["scores"] == one[0]["scores"] and list(one[0]["scores"]) == ["16", "40"]
    assert list(both[1]["scores"]["16"]) == ["iid", "sparse", "dense"]
    assert both[1]["scores"]["40"] == {}


@pytest.mark.parametrize("name", ["set_complement", "dyck", "tomita"])
def test_a_task_with_a_known_distribution_from_training_to_figures(name, home):
    """TVD for all, the AUC where the task has one, undefined positions as null."""
    command(home, "train.py", "--model", "perinorm", "--data", name, "--max_iters", 2,
            "--no-evaluate", *TINY_FLAGS, "--block_size", 8, "--out_dir", "run")
    out, _ = command(home, "eval.py", "run", "--sequences", 40)
    assert "tvd by position" in out and ("auc by position" in out) == (name != "set_complement")
    result = json.loads((home / "run" / "eval.json").read_text())["runs"][0]
    tvd = result["tvd"]["8"]["iid"]
    assert np.mean(tvd) == pytest.approx(result["scores"]["8"]["iid"]["tvd"]["value"], rel=1e-5)
    assert 0 < min(tvd) and max(tvd) < 1
    if name == "dyck":  # depth 0 only after an even number of brackets
        empty = [a is None for a in result["auc"]["8"]["iid"]]
        assert empty == [True, True, False] + [True, False] * 2 + [True]
    for metric in ("tvd", "auc"):
        words = "plot.py", "positions", "run/eval.json", "--metric", metric
        if metric in result:
            command(home, *words, draw=name == "dyck")
            assert is_png(home / "run" / f"eval.{metric}.png")
        else:
            assert "has no auc by position, it has tvd" in complaint(home, *words)


def test_perplexities_of_different_tokenizers_are_not_compared(trained, home, monkeypatch):
    ranks = {bytes([i]): i for i in range(256)} | {b"alpha ": 256}
    words = tiktoken.Encoding("gpt2", pat_str=r"\w+ |\W|\w", mergeable_ranks=ranks,
                              special_tokens={"<|endoftext|>": 257})
    bytes_ = data.text.get_encoding("bytes")
    monkeypatch.setattr(data.text, "get_encoding", lambda name: words if name == "gpt2" else bytes_)
    flags = "--data", trained / "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--tokenizer", "gpt2", "--out_dir", "other")
    said = complaint(home, "eval.py", trained / "cable", "other", "--lengths", 16)
    assert "perplexities of different tokenizers cannot be compared" in said
    command(home, "train.py", *flags, "--data", "notes", "--out_dir", "mine")
    said = complaint(home, "eval.py", trained / "cable", "mine", "--lengths", 16)
    assert "say which to score with --data" in said
    command(home, "eval.py", trained / "cable", "mine", "--lengths", 16, "--data", "notes")


def test_how_much_is_scored_does_not_depend_on_the_order_of_runs(trained, home):
    command(home, "train.py", "--data", trained / "notes", "--max_tokens", 2000, "--max_iters", 1,
            "--no-evaluate", *TINY_FLAGS, "--out_dir", "some")
    said = []
    for names in ((trained / "cable", "some"), ("some", trained / "cable")):
        out, _ = command(home, "eval.py", *names, "--data", trained / "notes", "--lengths", 16)
        said.append(re.search(r"perplexity on [\d,]+ tokens", out)[0])
    assert said[0] == said[1]
    out, _ = command(home, "eval.py", "some", "--data", trained / "notes", "--lengths", 16)
    assert said[0] not in out
    assert (home / "out" / "eval.json").exists()


def test_runs_whose_sequences_differ_are_not_compared(trained, home):
    command(home, "train.py", "--model", "rope", "--data", "flipflop", "--p_ignore", 0.5,
            "--max_iters", 1, "--no-evaluate", *TINY_FLAGS, "--out_dir", "half")
    said = complaint(home, "eval.py", trained / "rope", "half")
    assert "half/ckpt.pt was trained with p_ignore=0.5" in said and "one by one" in said
    command(home, "train.py", "--model", "rope", "--data", "counting", "--max_ops", 4,
            "--max_iters", 1, "--no-evaluate", *TINY_FLAGS, "--out_dir", "counting")
    said = complaint(home, "eval.py", "counting", "--lengths", 40)
    assert "--lengths does not make the sequences of counting longer" in said
    said = complaint(home, "plot.py", "errors", trained / "rope", "counting")
    assert "these runs are of different tasks" in said
    said = complaint(home, "bench.py", "attention", "--run", "counting", "--lengths", 99)
    assert "counting has no longer sequences" in said


def test_a_task_that_ends_before_a_split_is_scored_where_it_can_be(home):
    """Learned positions of 16 tokens, and splits that are longer: said, not broken."""
    flags = "--data", "dyck", "--max_iters", 2, "--eval_interval", 1, *TINY_FLAGS
    out, _ = command(home, "train.py", "--model", "learned", *flags)
    scores = log_of(home / "out" / "learned-dyck-nano")[-1]["scores"]
    assert scores["long"] == {} and scores["iid"]["tvd"] > 0
    assert re.search(r"^  long +-  learned positions end at block_size=16", out, re.M)


def test_a_small_text_of_ones_own_is_scored_as_far_as_it_goes(home, monkeypatch):
    """Its path is relative and its log damaged: the run is still resumed, from another folder."""
    (home / "small.txt").write_text("some words of my own. " * 60)
    flags = "--model", "rope", "--data", "small.txt", *TINY_FLAGS
    out, _ = command(home, "train.py", *flags, "--max_iters", 2, "--out_dir", "small")
    assert "lengths up to 64 only" in out and "$ python sample.py" in out
    with open(home / "small" / "log.jsonl", "ab") as f:
        f.write(b'5\n{"iter": 2, "lo\xff')
    other = home / "notes"
    shutil.copytree(home / "prepared", other / "prepared")
    out, _ = command(other, "train.py", "--resume", "../small", "--max_iters", 3, "--no-evaluate")
    assert "from iter 2" in out and set(losses(home / "small")[0]) == {1, 2, 3}


def test_a_run_whose_text_is_gone_is_scored_on_another_and_drawn(home):
    flags = "--model", "cable", "--data", "notes", "--max_iters", 2, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", *flags, "--out_dir", "run")
    (home / "notes").rename(home / "elsewhere")
    command(home, "eval.py", "run", "--data", "elsewhere", "--lengths", 16, "--tokens", 64)
    scored = json.loads((home / "run" / "eval.json").read_text())
    assert scored["tokens"] == 64 and scored["data"]["corpus"] == "elsewhere"
    out, _ = command(home, "maps.py", "attention", "run", "--prompt", "abc")
    assert "drew " in out
