"""A task and a model of one's own, in the commands."""
import json
import re
import shutil
import sys

import pytest
import torch

import data
from tests.helpers import (
    ENCODER_FLAGS,
    ROOT,
    TINY_FLAGS,
    TINY_RUN,
    close,
    command,
    complaint,
    is_png,
    losses,
    write_fork,
    write_task,
)


def test_the_guides_own_row_is_a_model(copy):
    """Its diff, applied to a copy: the steps are sigmoids, and literal and plain function agree."""
    source = (ROOT / "model_cable.py").read_text()
    block, = re.findall(r"^```diff\n(.*?)^```", (ROOT / "GUIDE.md").read_text(), re.S | re.M)
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", block, re.M):
        old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in (old, new))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (copy / "model_mine.py").write_text(source)
    model = names.make_model(dict(model="mine", n_layer=1, n_head=2, n_embd=16, vocab_size=9))
    step = model.h[0].attn.step(torch.tensor([-9.0, 0, 9]))
    close(step, torch.tensor([-9.0, 0, 9]).sigmoid(), 1e-6)
    loss = model(torch.arange(9)[None], torch.arange(9)[None])[1]
    assert loss.isfinite()


PARITY = '''
import numpy as np


class Task:
    """Parity: is the number of ones so far odd?"""
    vocab_size = 2
    splits = "train", "iid", "ones"

    def batch(self, split, batch_size, rng):
        share = 0.9 if split == "ones" else 0.5
        x = (rng.random((batch_size, self.block_size)) < share).astype(np.int64)
        return x, x.cumsum(1) % 2

    def score(self, logits, x, y):
        right = logits.argmax(-1) == y
        return dict(last=(right[:, -1], y[:, -1] >= 0), all=(right.sum(1), (y >= 0).sum(1)))
'''


def readmes_task():
    """The task that README.md adds as an example."""
    section = (ROOT / "README.md").read_text().partition("\n## Add your own\n")[2]
    return re.search(r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.M | re.S)[1]


@pytest.mark.parametrize("source", ["readme", "a batch and a score", "a batch alone"])
def test_a_task_of_ones_own_in_every_command(source, tasks, home):
    """Given only what it must have, or as in README.md."""
    text = readmes_task() if source == "readme" else PARITY
    if source == "a batch alone":
        text = text.partition("    def score")[0]
    write_task(tasks, "parity", text)
    flags = "--data", "parity", "--max_iters", 2, "--eval_interval", 1, *TINY_FLAGS
    out, _ = command(home, "train.py", "--model", "cable", *flags)
    run = home / "out" / "cable-parity-nano"
    assert "$ python eval.py" in out and is_png(run / "eval.png")
    found = json.loads((run / "eval.json").read_text())
    scores, task = found["runs"][0]["scores"]["16"], data.make(dict(data="parity"))
    assert list(scores) == list(task.splits[1:]) and found["data"]["source"] == "data/parity.py"
    for by_metric in scores.values():
        assert by_metric and all(0 <= m["value"] <= 1 for m in by_metric.values())
    assert source != "a batch alone" or list(scores["ones"]) == ["accuracy"]
    if source == "readme":
        command(home, "eval.py", run, "--lengths", 16, 32, "--sequences", 20, "--split", "iid",
                "--out", home / "long")
    for words in (("plot.py", "scores", "long.json" if source == "readme" else run / "eval.json"),
                  ("plot.py", "errors", run), ("maps.py", "steps", run),
                  ("maps.py", "attention", run, "--length", 6)):
        command(home, *words, "--out", "p.png", draw=source == "readme")
        assert is_png(home / "p.png")
        (home / "p.png").unlink()
    command(home, "train.py", "--resume", run, "--max_iters", 3, "--no-evaluate")
    assert "which has no text to write" in complaint(home, "sample.py", run)


def test_a_run_of_an_edited_model_says_so(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "tra", tmp_path / "tra")
    every = (("eval.py", "tra", "--lengths", 16, "--sequences", 4),
             ("maps.py", "steps", "tra", "--out", "p.png"),
             ("train.py", "--resume", "tra", "--max_iters", 3, "--no-evaluate"))
    for words in every:
        assert "warning" not in command(tmp_path, *words)[1]
    shutil.rmtree(tmp_path / "tra")
    shutil.copytree(trained / "tra", tmp_path / "tra")
    module, _ = names.models()["tra"]
    monkeypatch.setattr(module, "source", f"{module.source}\n# a remark\n")
    assert "warning" not in command(tmp_path, *every[0])[1]
    monkeypatch.setattr(module, "source", f"{module.source}\nEDITED = True\n")
    for words in every:
        err = command(tmp_path, *words)[1]
        assert "warning: model_tra.py has changed since tra/ckpt.pt was begun: " in err
        assert err.count("\n") == 1
    err = command(tmp_path, "train.py", "--model", "tra", "--data", "flipflop", "--max_iters", 1,
                  "--no-evaluate", "--init_from", trained / "tra", *TINY_FLAGS)[1]
    assert f"warning: model_tra.py has changed since {trained / 'tra'}/ckpt.pt was begun" in err


def test_a_task_s_own_loss_is_what_training_minimises(tasks, home):
    text = PARITY + "\n    def loss(self, model, x, y):\n        return 0 * model(x, y)[1] + 7\n"
    write_task(tasks, "seven", text)
    command(home, "train.py", "--data", "seven", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS)
    training, validation = losses(home / "out" / "cable-seven-nano")
    assert training == {1: 7.0} and validation == {1: 7.0}


@pytest.mark.parametrize("change, says", [
    (("vocab_size = 2", "pass"), "data/bad.py: class Task has no vocab_size"),
    (("def batch", "def batches"), "data/bad.py: class Task has no batch("),
    (("vocab_size = 2", "vocab_size, defaults = 2, {'nano': dict(n_layers=1)}"),
     "data/bad.py: defaults sets 'n_layers', which is no flag"),
    (("vocab_size = 2", "vocab_size, kind = 2, 'numbers'"), "bad is numbers, not tokens"),
    (("vocab_size = 2", "vocab_size, defaults = 2, {'nano': dict(beta1=1)}\n    n: int = 4.0"),
     "error: n=4.0 is no int: change its default"),
    (("vocab_size = 2", "vocab_size = 2 +"), "data/bad.py cannot be used (SyntaxError"),
])
def test_a_bad_task_in_one_line(tasks, home, change, says):
    assert change[0] in PARITY
    write_task(tasks, "bad", PARITY.replace(*change))
    words = "train.py", "--model", "cable", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    assert says in complaint(home, *words, "--data", "bad")
    command(home, *words, "--data", "flipflop")  # nobody else is disturbed


def test_a_task_longer_than_a_table_in_validation(tasks, home):
    write_task(tasks, "parity", PARITY.replace("(batch_size, self.block_size)",
                                               "(batch_size, 20 if split == 'iid' else 16)"))
    said = complaint(home, "train.py", "--data", "parity", "--model", "learned", "--max_iters", 1,
                     *TINY_FLAGS)
    assert said == "error: learned positions end at block_size=16; 20 tokens do not fit"


def test_a_task_that_has_other_tokens_now_is_not_resumed(tasks, home):
    flags = "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    write_task(tasks, "parity", PARITY)
    command(home, "train.py", "--data", "parity", *flags, "--out_dir", "run")
    write_task(tasks, "parity", PARITY.replace("vocab_size = 2", "vocab_size = 2 + 3"))
    del sys.modules["data.parity"]
    said = complaint(home, "train.py", "--resume", "run", "--max_iters", 2)
    assert said == "error: parity has 5 tokens now, run was trained on 2"


def test_a_task_whose_checkpoints_could_not_be_loaded_does_not_train(tasks, home):
    begin = "    def begin(self, model):\n        self.kept = dict(table=model.wte.weight)\n"
    write_task(tasks, "keeper", f"{PARITY}\n{begin}")
    said = complaint(home, "train.py", "--data", "keeper", "--max_iters", 1, *TINY_FLAGS)
    assert "what --data keeper keeps as 'table' has to be an int64 tensor" in said
    write_task(tasks, "lister", f"{PARITY}\n{begin}".replace("dict(table=", "list("))
    said = complaint(home, "train.py", "--data", "lister", "--max_iters", 1, *TINY_FLAGS)
    assert "what --data lister keeps has to be a dict of int64 tensors" in said
    assert not (home / "out").exists()


def test_runs_of_a_task_that_keep_something_else_are_not_compared(tasks, home):
    begin = "    def begin(self, model):\n        self.kept = dict(code=torch.randperm(99))\n"
    write_task(tasks, "coded", f"import torch\n{PARITY}\n{begin}")
    for seed in (1, 2):
        command(home, "train.py", "--data", "coded", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
                "--seed", seed, "--out_dir", seed)
    assert "2/ckpt.pt has another code than 1/ckpt.pt" in complaint(home, "eval.py", "1", "2")


def test_a_task_may_have_a_field_of_any_name(tasks, home):
    write_task(tasks, "seer", PARITY.replace("vocab_size = 2", "vocab_size = 2\n    seen: int = 2"))
    command(home, "train.py", "--data", "seer", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS,
            "--seen", 3)


def test_a_task_may_have_a_dash_in_its_name(tasks):
    write_task(tasks, "my-task", PARITY)
    assert data.find("my-task").vocab_size == 2
    with pytest.raises(ValueError, match="did you mean my-task"):
        data.find("my-tusk")


def test_a_run_whose_task_is_gone(tasks, home):
    """Its weights can be used; what needs the task says so."""
    write_task(tasks, "mine", PARITY)
    words = "--max_iters", 1, "--no-evaluate", *TINY_FLAGS
    command(home, "train.py", "--data", "mine", *words, "--out_dir", "out/run")
    (tasks / "mine.py").rename(tasks / "parity.py")
    for script in ("eval.py", "sample.py"):
        assert "the run's task is gone: there is no data/mine.py" in complaint(
            home, script, "out/run")
    assert "the run's task is gone" in complaint(home, "maps.py", "reach", "out/run")
    command(home, "train.py", "--data", "parity", *words, "--init_from", "out/run")


@pytest.mark.parametrize("change, says", [
    (("return x, x.cumsum(1) % 2", "return x"), "batch('train', 4, rng) must return x, y, not a n"),
    (("x.cumsum(1) % 2", "x[:, 0]"), "returns y of shape (4,); x and y must both be (4, T)"),
    (("x.cumsum(1) % 2", "x[:2]"), "returns y of shape (2, 16); x and y must both be (4, T)"),
    (("x.cumsum(1) % 2", "x.astype(np.int32)"), "returns y as int32, not NumPy int64"),
    (("return x, x.cumsum(1) % 2", "return x.tolist(), x"), "returns x as list, not NumPy int64"),
    (("x.cumsum(1) % 2", "2 - x"), "returns y with values from 1 to 2; they must be from -1 to"),
    (("return x, x", "return x - 1, x"), "returns x with values from -1 to 0; they must be from 0"),
    (("return dict(last", "return {} and dict(last"), "score must return {metric: ("),
    (("return dict(last=(right[:, -1], y[:, -1] >= 0)", "return dict(last=(right[:, -1], 1)"),
     "score returns 'last' of shapes [(4,), ()]; count and out_of must be (4,)"),
    (("return dict(last", "return [1] and dict(last=3) or dict(last"), "must return a pair"),
    (("dict(last=(right", "dict(last=(2 + right"), "a count that is not from 0 to its out_of"),
])
def test_a_task_that_breaks_the_contract_is_named_at_its_first_batch(tasks, home, change, says):
    assert change[0] in PARITY
    write_task(tasks, "bad", PARITY.replace(*change))
    words = "--max_iters", 1, "--eval_interval", 1, "--no-evaluate", *TINY_FLAGS
    with pytest.raises(data.BrokenTask) as e:
        command(home, "train.py", "--data", "bad", *words)
    assert str(e.value).startswith("data/bad.py: ") and says in str(e.value)
    with pytest.raises(SystemExit, match="error: data/bad.py: "):
        runs.in_one_line(e.type, e.value, None)


def test_a_task_that_ignores_block_size_is_not_scored_at_other_lengths(tasks, home):
    write_task(tasks, "fixed", PARITY.replace("self.block_size", "16"))
    flags = "--data", "fixed", "--max_iters", 1, "--no-evaluate", *TINY_FLAGS, "--out_dir", "run"
    command(home, "train.py", *flags)
    for lengths in ((32,), (16, 32)):
        said = complaint(home, "eval.py", "run", "--lengths", *lengths)
        assert "--lengths does not make the sequences of fixed longer: leave it out" in said
    command(home, "eval.py", "run", "--lengths", 16, "--sequences", 5)


def test_a_task_s_defaults_may_be_for_flags_of_other_models(tasks, home):
    """P is a flag of CoPE alone; --n_layer is said, n_head comes from the task."""
    write_task(tasks, "sized", PARITY.replace(
        "vocab_size = 2", "vocab_size, defaults = 2, dict(tiny=dict(n_head=2, n_embd=16, P=5))"))
    flags = "--data", "sized", "--n_layer", 1, "--max_iters", 1, "--no-evaluate"
    for name in ("cope", "rope"):
        command(home, "train.py", "--model", name, *flags)
        path = home / "out" / f"{name}-sized-tiny" / "ckpt.pt"
        config = torch.load(path, weights_only=True)["config"]
        assert (config["size"], config["n_head"], config["n_layer"]) == ("tiny", 2, 1)
        assert config.get("P") == (5 if name == "cope" else None)
    assert "unknown size 'nano': choose from tiny" in complaint(
        home, "train.py", *flags, "--size", "nano")


LAST_FIELD = 'log_kernel: str = ""'


@pytest.mark.parametrize("old, new, says", [
    (LAST_FIELD, f"{LAST_FIELD}\n    reach: int = None", "reach=None is no int: change its"),
    (LAST_FIELD, f"{LAST_FIELD}\n    window: int | None = None",
     "window of model has to be a bool, int, float or str: a flag"),
    (LAST_FIELD, f"{LAST_FIELD}\n    resume: int = 3", "two groups have a flag --resume: rename"),
    ("self.drop = ", "self.register_buffer('ids', torch.arange(8))\n        self.drop = ",
     "ids of --model mine has to be finite floats. A buffer can be"),
    ("self.drop = ", "self.register_buffer('m', torch.full((8,), -math.inf))\n        self.drop = ",
     "m of --model mine has to be finite floats. A buffer can be")])
def test_a_fork_whose_checkpoint_could_not_be_loaded_does_not_train(copy, old, new, says):
    write_fork(copy, "cable", (old, new))
    assert says in complaint(copy, "train.py", "--model", "mine", *TINY_RUN)
    assert not (copy / "out").exists()


@pytest.mark.parametrize("line, says", [
    ("B, T = idx.shape[:1]", "not enough values to unpack"),
    ("B, T = idx.shape\n        self.training or int('one')", "invalid literal"),
    ("B, T = idx.shape\n        targets is None and np.zeros(3).reshape(2, 2)", "cannot reshape")])
def test_a_fork_s_own_bug_keeps_its_traceback(copy, line, says):
    """Wherever a ValueError for the user would be one line: in training, validation, scoring."""
    write_fork(copy, "fox", ("B, T = idx.shape", line),
               ("import math", "import math\nimport numpy as np"))
    with pytest.raises(ValueError, match=says):
        command(copy, "train.py", "--model", "mine", *TINY_RUN)


COMPLAINTS = """
def bug():
    raised = int("one")

def bug_in_the_message():
    raise ValueError(f"{int('one')}")

def library():
    import statistics
    statistics.NormalDist(0, -1)

def own():
    if True: raise ValueError("a word",
                              "and another")

def chained():
    try: bug()
    except ValueError as e: raise ValueError("a word") from e
"""


def test_only_a_complaint_of_these_files_is_one_line(tmp_path):
    """Even where the file has changed since it was read."""
    file, module = tmp_path / "complaints.py", {}
    file.write_text(COMPLAINTS)
    exec(compile(COMPLAINTS, file, "exec"), module)
    file.write_text("raise this\n" * 30)
    for name in ("bug", "bug_in_the_message", "library", "own", "chained"):
        with pytest.raises(SystemExit if name in ("own", "chained") else ValueError):
            try:
                module[name]()
            except ValueError as e:
                runs.fail(e)


@pytest.mark.parametrize("task, more", [("library", TINY_FLAGS),
                                        ("retrieval", (*ENCODER_FLAGS, "--query_size", 16))])
def test_prepared_files_that_a_power_cut_left_empty_are_made_anew(library, task, more):
    flags = "train.py", "--data", task, "--max_iters", 1, "--no-evaluate", *more
    command(library, *flags, "--out_dir", "a")
    found = [*library.glob("prepared/*/meta.json"), *library.glob("prepared/*.npz")]
    for path in found:
        path.write_bytes(b"")
    command(library, *flags, "--out_dir", "b")
    assert found and all(path.stat().st_size for path in found)
    both = [torch.load(library / run / "ckpt.pt", weights_only=True)["source"] for run in "ab"]
    assert both[0] == both[1]


def test_a_run_from_before_its_variant_was_changed_is_resumed(copy):
    """The rule that a flag may not contradict the name is for new runs."""
    write_fork(copy, "cable")
    command(copy, "train.py", "--model", "mine", *TINY_RUN, "--out_dir", "run")
    source = (copy / "model_mine.py").read_text()
    new = "VARIANTS = dict(mine=dict(weight=False))"
    (copy / "model_mine.py").write_text(source.replace("VARIANTS = dict(mine=dict())", new))
    names.models.cache_clear()
    del sys.modules["model_mine"]
    out, _ = command(copy, "train.py", "--resume", "run", "--max_iters", 2)
    assert "iter 2/2" in out


@pytest.mark.parametrize("words, says", [
    (("--model", "cable_nw", "--weight"), "weight=True: what is called --model cable_nw has"),
    (("--model", "prenorm", "--norm", "post"), "norm=post: what is called --model prenorm has")])
def test_a_flag_that_contradicts_the_model_s_name(home, words, says):
    assert says in complaint(home, "train.py", *words, *TINY_RUN)
    assert not (home / "out").exists()


@pytest.mark.parametrize("name", ["kernel", "eta", "p_ignore", "seed"])
def test_a_fork_s_setting_called_like_another_flag_is_refused(copy, name):
    write_fork(copy, "cable", (LAST_FIELD, f"{LAST_FIELD}\n    {name}: float = 3.0"))
    said = complaint(copy, "train.py", "--model", "mine", *TINY_RUN)
    assert said.startswith(f"error: two groups have a flag --{name}: rename the ")
