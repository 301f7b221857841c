"""
Signals, several processes, a full disk: in processes of their own, in a copy of the repository.
"""
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time

import pytest
import torch

from common.device import choose_device
from tests.helpers import (
    ONE_THREAD,
    ROOT,
    TINY_FLAGS,
    TINY_RUN,
    command,
    losses,
    process,
)


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path):
    (tmp_path / "ckpt.pt").write_text("whole")
    killed = f"""if True:
        import os, signal
        from common.files import write_safely
        def half(tmp):
            tmp.write_bytes(b"half a checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)
        write_safely({str(tmp_path / "ckpt.pt")!r}, half)"""
    done = subprocess.run([sys.executable, "-c", killed], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "ckpt.pt").read_text() == "whole"


def test_more_processes_than_gpus(monkeypatch):
    for name, value in (("is_available", True), ("device_count", 4)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(SystemExit, match="--device cuda:4: there are 4 GPUs, counted from 0"):
        choose_device("auto")


@pytest.mark.slow
def test_an_interrupted_pair_of_processes_stops_together_and_goes_on(repo):
    """A signal that reaches one process alone stops both at the same step, with a checkpoint."""
    flags = ["--model", "cable", "--data", "notes", "--max_iters", "3000", "--no-evaluate",
             *TINY_FLAGS, "--out_dir", "out/pair"]
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    # the second process interrupts itself, right after the two have agreed to go on
    (repo / "hurt.py").write_text("""if True:
        import os, signal
        import torch.distributed as dist
        import train
        original, calls = dist.all_reduce, []
        def all_reduce(*a, **k):
            original(*a, **k)
            calls.append(1)
            if len(calls) == 21 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGINT)
        dist.all_reduce = train.dist.all_reduce = all_reduce
        train.main()""")
    done = subprocess.run([sys.executable, *launch, "hurt.py", *flags], cwd=repo, text=True,
                          capture_output=True, timeout=300, env=os.environ | ONE_THREAD)
    assert "saved; continue with" in done.stdout, done.stdout + done.stderr
    assert "Connection closed" not in done.stderr
    stopped = torch.load(repo / "out/pair/ckpt.pt", weights_only=True)["iter"]
    assert 5 < stopped < 3000
    process(repo, *launch, "train.py", "--resume", "out/pair", "--max_iters", stopped + 2)
    assert max(losses(repo / "out" / "pair")[0]) == stopped + 2


@pytest.mark.slow
def test_two_processes_equal_one(repo):
    flags = ["--model", "cable", "--data", "notes", "--max_iters", 8, "--eval_interval", 4,
             "--no-evaluate", *TINY_FLAGS]
    command(repo, "train.py", *flags, "--out_dir", "out/one")
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2 train.py".split()
    process(repo, *launch, *flags, "--out_dir", "out/two")
    (a, va), (b, vb) = losses(repo / "out" / "one"), losses(repo / "out" / "two")
    assert a == pytest.approx(b, abs=1e-4) and len(a) == 8
    assert va == pytest.approx(vb, abs=1e-4) and set(va) == {4, 8}


LONG_RUN = ["train.py", *map(str, TINY_RUN), "--max_iters", "100000", "--eval_interval", "100000"]


def started(folder, out, stdout, **how):
    """A training that is under way: it has begun its log, and no checkpoint is there."""
    training = subprocess.Popen([sys.executable, *LONG_RUN, "--out_dir", out], cwd=folder,
                                stdout=stdout, env=os.environ | ONE_THREAD, **how)
    while not (log := folder / out / "log.jsonl").exists() or not log.read_text():
        assert training.poll() is None
        time.sleep(0.1)
    return training


def saved_all(run):
    """The checkpoint is of the last step in the log."""
    last = torch.load(run / "ckpt.pt", weights_only=True)["iter"]
    return last == max(losses(run)[0]) > 0


@pytest.mark.slow
def test_a_kill_of_a_whole_group_saves_though_nobody_reads_any_more(repo):
    """`timeout 99 python train.py | tee log`: the reader may go first."""
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    training = started(repo, "out/group", reader.stdin, start_new_session=True)
    reader.kill()
    reader.wait()
    os.killpg(training.pid, signal.SIGTERM)
    assert training.wait(120) == 130 and saved_all(repo / "out/group")


@pytest.mark.slow
def test_a_closed_terminal_stops_and_saves(repo):
    ours, theirs = pty.openpty()
    training = started(repo, "out/terminal", theirs, start_new_session=True,
                       preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0))
    os.close(theirs)
    os.close(ours)
    assert training.wait(120) == 130 and saved_all(repo / "out/terminal")


@pytest.mark.slow
def test_a_log_that_cannot_be_written_costs_nothing(repo):
    """A full disk under what is printed: the training comes to its end."""
    words = [sys.executable, "train.py", *TINY_RUN, "--max_iters", 30, "--out_dir", "out/disk"]
    with open("/dev/full", "w") as full:
        subprocess.run(list(map(str, words)), cwd=repo, check=True, stdout=full,
                       env=os.environ | ONE_THREAD, timeout=300)
    assert saved_all(repo / "out/disk")


@pytest.mark.slow
def test_a_full_disk_and_a_closed_pipe_end_in_one_line_or_none(repo):
    process(repo, "train.py", "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
            "--out_dir", "out/full")
    limit = """if True:
        import resource, runpy, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        sys.argv = sys.argv[1:]
        runpy.run_path("train.py", run_name="__main__")"""
    _, err = process(repo, "-c", limit, "train.py", "--resume", "out/full", "--max_iters", 3,
                     "--no-evaluate", code=1)
    assert re.fullmatch(r"error: could not write .*(inline_container|File too large).*\n", err)
    assert not list((repo / "out" / "full").glob("*tmp*"))
    done = subprocess.run(
        f"{sys.executable} sample.py out/full --max_new_tokens 900 | head -c 9; "
        "exit ${PIPESTATUS[0]}", cwd=repo, shell=True, executable="/bin/bash",
        env=os.environ | ONE_THREAD, capture_output=True)
    assert done.returncode == 141 and len(done.stdout) == 9 and b"Traceback" not in done.stderr
