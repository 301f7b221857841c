"""
Signals, several processes, a full disk: in processes of their own, in a copy of the repository.
"""
import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import runs
from tests.helpers import (
    ENCODER_FLAGS,
    HARD,
    ONE_THREAD,
    ROOT,
    TINY_FLAGS,
    close,
    command,
    losses,
    process,
    same_run,
    write_package,
)


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path):
    """Nothing is imported but what a save needs."""
    (tmp_path / "ckpt.pt").write_text("whole")
    killed = f"""if True:
        import os, signal, sys, types
        for name in ("torch", "data", "kernels"):  # they take long to import
            sys.modules[name] = types.ModuleType(name)
        sys.modules["data"].nearest = None
        import runs
        from pathlib import Path
        def half(tmp):
            tmp.write_bytes(b"half a checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)
        runs.write_safely(Path({str(tmp_path / "ckpt.pt")!r}), half)"""
    done = subprocess.run([sys.executable, "-c", killed], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "ckpt.pt").read_text() == "whole"


def test_what_dead_processes_left_half_written_goes(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = {f"y.json{runs.HALF}{os.getppid()}", f"z{runs.HALF}", f"z{runs.HALF}²",
            f"backup.tmp{dead.pid}", "notes.tmpl"}
    for name in (f"x.png{runs.HALF}{dead.pid}", *left):
        (tmp_path / name).write_text("half")
    runs.write_json(tmp_path / "x.json", {})
    assert {path.name for path in tmp_path.iterdir()} == left | {"x.json"}


def test_a_folder_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"could not write \. \("):
        runs.write_json(Path("."), {})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_kill_during_the_last_evaluation_ends_that_too(repo, tmp_path):
    shutil.copytree(repo, tmp_path / "own")
    (tmp_path / "own" / "eval.py").write_text(
        "import os, time; print('eval is', os.getpid(), flush=True); time.sleep(60)")
    run = subprocess.Popen(
        [sys.executable, "train.py", "--data", "notes", "--max_iters", "1", *TINY_FLAGS],
        cwd=tmp_path / "own", text=True, stdout=subprocess.PIPE, env=os.environ | ONE_THREAD)
    number = next(int(line.split()[2]) for line in run.stdout if line.startswith("eval is"))
    run.terminate()
    assert run.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_more_processes_than_gpus(monkeypatch):
    for name, found in (("is_available", True), ("device_count", 4)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setenv("LOCAL_RANK", "4")
    args = argparse.Namespace(device="auto", dtype="float32", kernel="auto")
    with pytest.raises(SystemExit, match="--device cuda:4: there are 4 GPUs, counted from 0"):
        runs.setup(args)


@pytest.mark.slow
def test_ctrl_c_in_a_process_and_on(repo):
    """The same losses, to the last digit, through a real interrupt; none of it is a traceback."""
    flags = [*map(str, HARD), "--max_iters", "200", "--eval_interval", "50"]
    command(repo, "train.py", *flags, "--out_dir", "out/whole")
    broken = subprocess.Popen(
        [sys.executable, "train.py", *flags, "--out_dir", "out/broken"], cwd=repo, text=True,
        env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in broken.stdout:
        if line.startswith("iter 7/"):
            broken.send_signal(signal.SIGINT)
            break
    rest, err = broken.communicate(timeout=60)
    assert broken.returncode == 130 and "Traceback" not in err
    assert "continue with: python train.py --resume out/broken" in rest
    assert 7 <= torch.load(repo / "out/broken/ckpt.pt", weights_only=True)["iter"] < 200
    command(repo, "train.py", "--resume", "out/broken", "--no-evaluate")
    same_run(repo / "out" / "whole", repo / "out" / "broken")


@pytest.mark.slow
def test_ctrl_c_ends_a_long_prompt_and_a_long_evaluation_at_once(repo):
    command(repo, "train.py", "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
            "--out_dir", "out/long")
    (repo / "prompt.txt").write_text("word " * 100_000)
    (repo / "long.txt").write_text("word " * 2_000_000)
    for words, sign in (("sample.py out/long --prompt_file prompt.txt", "prompt: "),
                        ("eval.py out/long --data long.txt --lengths 65536", "windows of 65,5")):
        run = subprocess.Popen([sys.executable, *words.split()], cwd=repo, text=True,
                               env=os.environ | ONE_THREAD, stderr=subprocess.PIPE)
        line = next(line for line in run.stderr if sign in line and "eta" in line)
        run.send_signal(signal.SIGINT)
        start = time.time()
        _, err = run.communicate(timeout=60)
        assert run.returncode == -signal.SIGINT and not err and time.time() - start < 1, line + err


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
def test_a_killed_worker_ends_all_and_one_process_goes_on(repo):
    flags = ["--model", "cable", "--data", "notes", "--max_iters", "40", "--eval_interval", "10",
             "--no-evaluate", *TINY_FLAGS]
    (repo / "killed.py").write_text("""if True:
        import os, signal, sys, time
        import train
        original, calls = train.agreed, []
        def agreed(*a):
            calls.append(1)
            if len(calls) == 15 and os.environ["RANK"] == "1":
                print("killed at", time.time(), flush=True, file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*a)
        train.agreed = agreed
        train.main()""")
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2 killed.py".split()
    done = subprocess.run([sys.executable, *launch, *flags, "--out_dir", "out/killed"], cwd=repo,
                          capture_output=True, text=True, timeout=300, env=os.environ | ONE_THREAD)
    killed = re.search(r"killed at (\d+\.\d+)", done.stderr)
    assert done.returncode and time.time() - float(killed[1]) < 20, done.stderr
    path = repo / "out" / "killed" / "ckpt.pt"
    assert torch.load(path, weights_only=True)["iter"] == 10
    command(repo, "train.py", "--resume", "out/killed", "--data", "notes", "--no-evaluate")
    command(repo, "train.py", *flags, "--out_dir", "out/unbroken")
    one, two = (torch.load(repo / "out" / name / "ckpt.pt", weights_only=True)
                for name in ("unbroken", "killed"))
    for name, weights in one["model"].items():
        close(weights, two["model"][name], 2e-6)
    resumed, unbroken = losses(repo / "out/killed")[0], losses(repo / "out/unbroken")[0]
    assert resumed == pytest.approx(unbroken, abs=1e-5)


@pytest.mark.slow
def test_two_processes_equal_one(repo):
    flags = ["--model", "cable", "--data", "notes", "--max_iters", 8, "--eval_interval", 4,
             "--no-evaluate", *TINY_FLAGS]
    command(repo, "train.py", *flags, "--out_dir", "out/one")
    (repo / "two.py").write_text("""if True:
        import gc, train  # without what the lines below see to, one in a hundred runs never ended
        finish = train.finish
        def checked(*args):
            wrapped = [x for x in gc.get_objects() if type(x) is train.DistributedDataParallel]
            assert not wrapped and train.dist.is_initialized()
            finish(*args)
        train.finish = checked
        train.main()""")
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2 two.py".split()
    process(repo, *launch, *flags, "--out_dir", "out/two")
    (a, va), (b, vb) = losses(repo / "out" / "one"), losses(repo / "out" / "two")
    assert a == pytest.approx(b, abs=1e-4) and len(a) == 8
    assert va == pytest.approx(vb, abs=1e-4) and set(va) == {4, 8}


@pytest.mark.slow
def test_encoders_in_two_processes(repo):
    """Both phases: the tokens that are kept, and the hard negatives, are every process' own."""
    write_package(repo)
    launch = "-m torch.distributed.run --standalone --nproc_per_node 2 train.py".split()
    flags = [*ENCODER_FLAGS, "--max_iters", 3, "--eval_interval", 3, "--no-evaluate"]
    process(repo, *launch, "--data", "mlm", *flags, "--out_dir", "out/m")
    process(repo, *launch, "--data", "retrieval", "--init_from", "out/m", "--query_size", 16,
            *flags, "--out_dir", "out/r")
    out, _ = process(repo, "eval.py", "out/r", "--lengths", 32)
    assert set(losses(repo / "out" / "r")[0]) == {3} and "\nwhole " in out


@pytest.mark.slow
def test_two_runs_started_together_take_two_folders(repo):
    flags = ["train.py", "--model", "alibi", "--data", "notes", "--max_iters", "20",
             "--no-evaluate", *TINY_FLAGS]
    pair = [subprocess.Popen([sys.executable, *flags, "--seed", seed], cwd=repo,
                             env=os.environ | ONE_THREAD, stdout=subprocess.DEVNULL)
            for seed in "12"]
    assert [p.wait(timeout=300) for p in pair] == [0, 0]
    for name in ("alibi-notes-nano", "alibi-notes-nano-2"):
        assert len(losses(repo / "out" / name)[0]) == 20


@pytest.mark.slow
def test_a_full_disk_and_a_closed_pipe_end_in_one_line_or_none(repo):
    command(repo, "train.py", "--data", "notes", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
            "--out_dir", "out/full")
    limit = """if True:
        import resource, runpy, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        sys.argv = sys.argv[1:]
        runpy.run_path("train.py", run_name="__main__")"""
    _, err = process(repo, "-c", limit, "train.py", "--resume", "out/full", "--max_iters", 3,
                     "--no-evaluate", code=1)
    assert re.fullmatch(r"error: could not write out/full/(best|ckpt)\.pt \(.*\)\n", err)
    assert not list((repo / "out" / "full").glob("*tmp*"))
    done = subprocess.run(
        f"{sys.executable} sample.py out/full --max_new_tokens 900 | head -c 9; "
        "exit ${PIPESTATUS[0]}", cwd=repo, shell=True, executable="/bin/bash",
        env=os.environ | ONE_THREAD, capture_output=True)
    assert done.returncode == 141 and len(done.stdout) == 9 and b"Traceback" not in done.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "sample.py", "out/full"], cwd=repo, stdout=full,
                              env=os.environ | ONE_THREAD, stderr=subprocess.PIPE, text=True)
    assert done.returncode and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    for words in ("train.py --help", "reproduce.py", "data/text.py --help"):
        done = subprocess.run(f"{sys.executable} {words} >/dev/full", cwd=repo, shell=True,
                              env=os.environ | ONE_THREAD, stderr=subprocess.PIPE, text=True)
        assert done.returncode and done.stderr == "error: [Errno 28] No space left on device\n"
    for words in ("sample.py out/full --max_new_tokens 4", "eval.py out/full --lengths 16",
                  "train.py --resume out/full --max_iters 2 --no-evaluate"):
        done = subprocess.run(f"{sys.executable} {words} >&-", cwd=repo, shell=True,
                              env=os.environ | ONE_THREAD, stderr=subprocess.PIPE, text=True)
        assert not done.returncode and "Error" not in done.stderr, done.stderr
    assert torch.load(repo / "out/full/ckpt.pt", weights_only=True)["iter"] == 2


@pytest.mark.slow
def test_few_functions_from_the_command_to_the_first_loss(repo):
    """A newcomer with a debugger meets no more of ours; class bodies and lambdas do not count."""
    counted = f"""if True:
        import inspect, os, runpy, sys
        seen = set()

        def note(frame, event, argument):
            code = frame.f_code
            if event == "call" and code.co_name == "backward":  # there is a loss
                sys.setprofile(None)
                print(*sorted(seen), sep="\\n", flush=True)
                os._exit(0)
            ours = code.co_filename.startswith({str(repo)!r})
            function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
            if event == "call" and ours and function:
                name = os.path.relpath(code.co_filename, {str(repo)!r})
                seen.add(f"{{name}}:{{code.co_firstlineno}} {{code.co_qualname}}")
        sys.argv = "train.py --model cable --out_dir out/counted".split()
        sys.setprofile(note)
        runpy.run_path(os.path.abspath("train.py"), run_name="__main__")"""
    out, _ = process(repo, "-c", counted)
    found = [line for line in out.splitlines() if re.match(r"\S+\.py:\d+ ", line)]
    assert any(line.startswith("model_cable.py") for line in found)
    assert any(line.endswith(" main") for line in found)
    assert len(found) <= 26, "\n".join(found)
