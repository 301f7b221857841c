"""Signals and several processes: in processes of their own, in a copy of the repository."""
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.helpers import (
    ONE_THREAD,
    ROOT,
    TINY_FLAGS,
    TINY_RUN,
    command,
    losses,
    needs_triton,
    process,
)


@pytest.mark.slow
def test_two_processes_that_are_interrupted_equal_one(repo):
    """A signal that reaches one of them alone stops both at the same step, with a checkpoint."""
    flags = ["--model", "cable", "--data", "notes", "--max_iters", "8", "--eval_interval", "4",
             "--no-evaluate", *TINY_FLAGS]
    command(repo, "train.py", *flags, "--out_dir", "out/one")
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
            if len(calls) == 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGINT)
        dist.all_reduce = train.dist.all_reduce = all_reduce
        train.main()""")
    subprocess.run([sys.executable, *launch, "hurt.py", *flags, "--out_dir", "out/two"], cwd=repo,
                   env=os.environ | ONE_THREAD, capture_output=True, timeout=300)
    assert 2 < torch.load(repo / "out/two/ckpt.pt", weights_only=True)["iter"] < 8
    process(repo, *launch, "train.py", "--resume", "out/two", "--no-evaluate")
    (a, va), (b, vb) = losses(repo / "out" / "one"), losses(repo / "out" / "two")
    assert a == pytest.approx(b, abs=1e-4) and len(a) == 8
    assert va == pytest.approx(vb, abs=1e-4) and set(va) == {4, 8}


def test_a_start_imports_no_compiler():
    """It takes over a second; what imports it are decorators such as torch.compiler.disable."""
    code = "import sys, train, eval, sample; print('torch._dynamo' in sys.modules)"
    assert process(ROOT, "-c", code)[0] == "False\n"


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads sigaction")
def test_signals_that_a_compilation_takes_are_taken_back(tmp_path):
    """`timeout` sends two: LLVM's handler would leave the second one to the system's."""
    code = """if True:
        import ctypes, signal, torch
        from common.exits import asked_to_stop
        from kernels.common import constants, edges_kernel
        from tests.test_kernels_triton import compiled
        def handler():
            now = ctypes.create_string_buffer(256)  # of struct sigaction, in which it comes first
            ctypes.CDLL(None).sigaction(signal.SIGTERM, None, now)
            return now.raw[:8]
        with asked_to_stop() as asked:
            handlers = [handler()]
            for n in (16, 32):
                compiled(edges_kernel, constants(torch.empty(1, 1, 1, 16), 16, n, 4), 90)
                handlers.append(handler())
                asked()
                handlers.append(handler())
        print(*(handler == handlers[0] for handler in handlers))"""
    said, _ = process(ROOT, "-c", code, TRITON_CACHE_DIR=str(tmp_path))
    start, taken, back, _, again = said.split()
    assert (start, taken, back, again) == ("True", "False", "True", "True")


@pytest.mark.slow
def test_a_kill_of_a_whole_group_saves_though_nobody_reads_any_more(repo):
    """`timeout 99 python train.py | tee log`: the reader may go first."""
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    words = [*TINY_RUN, "--max_iters", 100000, "--eval_interval", 100000, "--out_dir", "out/group"]
    training = subprocess.Popen([sys.executable, "train.py", *map(str, words)], cwd=repo,
                                stdout=reader.stdin, env=os.environ | ONE_THREAD,
                                start_new_session=True)
    run = repo / "out" / "group"
    while not (run / "log.jsonl").exists() or not (run / "log.jsonl").read_text():
        assert training.poll() is None
        time.sleep(0.1)
    reader.kill()
    reader.wait()
    os.killpg(training.pid, signal.SIGTERM)
    assert training.wait(120) == 130
    assert torch.load(run / "ckpt.pt", weights_only=True)["iter"] == max(losses(run)[0]) > 0
