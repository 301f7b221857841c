"""reproduce.py: the matrix."""
import functools
import itertools
import json
import linecache
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

import experiments
import plot
import reproduce
import runs
from experiments import matrix, trainings
from tests.helpers import (
    ONE_THREAD,
    ROOT,
    TINY_FLAGS,
    cells,
    command,
    complaint,
    drawn,
    entry,
    is_png,
    labels_of,
    markdown_tables,
    process,
    standing_in,
    write_fork,
    write_notes,
    written,
)

MATRIX_COLUMNS = {
    "text: perplexity": matrix.column("text", "less", ".2f", 0.1, matrix.perplexity, 1),
    "text: strided": matrix.column("text", "less", ".2f", 0.1, matrix.reading, 2),
    "flip-flop: iid": matrix.percents("flipflop", 1, "iid", "exact_match"),
    "flip-flop: worst": matrix.column("flipflop", "more", ".1f", 10, matrix.worst, 2,
                                      "exact_match")}


def small_matrix(*models, data="notes", text=""):
    """Two tasks, two steps of each."""
    flags = f"--max_iters 2 --eval_interval 1 {' '.join(TINY_FLAGS[:-2])}"
    scale = dict(rows=experiments.seeds(1, *models), tasks=dict(
        text=dict(train=f"--data {data} {flags} {text}", eval="--lengths 16 32 --strided"),
        flipflop=dict(train=f"--data flipflop {flags}", eval="--sequences 20 --lengths 16 32")))
    return dict(about="Who can what", columns=MATRIX_COLUMNS, cpu=scale, paper=scale)


MATRIX_DRIVER = """if True:
    import sys, types
    import experiments, reproduce
    from experiments import matrix
    mine = types.ModuleType("mine", "Mine.")
    columns = {k: matrix.column(task, better, form, least, getattr(matrix, name), *asked)
               for k, (task, better, form, least, name, *asked) in %r.items()}
    mine.ENTRIES = dict(matrix=dict(about="A", columns=columns, cpu=%r))
    experiments.files = lambda: [mine]
    reproduce.main(sys.argv[1:])"""


@pytest.mark.slow
def test_a_matrix_and_a_fork_in_processes_of_their_own(repo, tmp_path):
    folder = tmp_path / "clone"
    shutil.copytree(repo, folder)
    one = small_matrix("rope", "alibi", data="stdlib")
    plain = {k: (c["task"], c["better"], c["form"], c["least"], c["read"][0].__name__,
                 *c["read"][1:]) for k, c in MATRIX_COLUMNS.items()}
    words = "-c", MATRIX_DRIVER % (plain, one["cpu"]), "matrix", "--device", "cpu", "--jobs", "2"
    run = functools.partial(process, folder, *words)
    killed = subprocess.Popen([sys.executable, *words], cwd=folder, env=os.environ | ONE_THREAD,
                              text=True, stdout=subprocess.PIPE, start_new_session=True)
    for line in killed.stdout:
        if line.startswith("$ python eval.py"):
            os.killpg(killed.pid, signal.SIGKILL)
            break
    assert killed.wait() == -signal.SIGKILL
    done = len([*folder.glob("out/matrix.cpu/*/*/ckpt.pt")])
    out, _ = run()
    assert 1 <= done < 4 and out.count("$ python train.py --data") == 4 - done
    found = json.loads((folder / "results" / "matrix.cpu.json").read_text())["cells"]
    assert all("value" in cell for row in found.values() for cell in row.values())
    assert is_png(folder / "results" / "matrix.cpu.png")
    assert "$ python train.py" not in run()[0]
    write_fork(folder)
    out, _ = run("--add", "mine")
    assert out.count("$ python train.py") == 2
    added = json.loads((folder / "out" / "matrix.cpu" / "mine.json").read_text())
    assert is_png(folder / "out" / "matrix.cpu" / "mine.png")
    assert list(added["cells"]) == ["rope", "alibi", "mine"]
    (folder / "data" / "flipflop.py").write_text("def (")
    _, err = run(code=1)
    assert "flipflop.py" in err.splitlines()[-1]


def test_a_matrix_and_a_fork_beside_it(copy, here):
    """Two methods on two tasks, then a fork: what is made, and what is as it was."""
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope", "alibi"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    planned, (out, _) = run("--dry_run")[0], run()
    assert out.count("$ python train.py") == out.count("$ python eval.py") == 4
    every = re.compile(r"^\$ python (?:train|eval)\.py .*", re.M)
    assert sorted(every.findall(planned)) == sorted(every.findall(out))
    results, mine = copy / "results" / "matrix.cpu.json", copy / "out" / "matrix.cpu" / "mine.json"
    first = json.loads(results.read_text())
    page, found = (copy / "results" / "README.md").read_text(), first["cells"]
    rows, = markdown_tables(page)
    assert list(found) == ["rope", "alibi"] and "4 trainings" in page
    for label, row in found.items():
        for name, cell in row.items():
            shown = format(cell["value"], MATRIX_COLUMNS[name]["form"])
            assert rows[label][name] == shown + r" \*" * cell["unfinished"]
    scored, = copy.glob("out/matrix.cpu/text-*/rope-1337/eval.json")
    scored = json.loads(scored.read_text())["runs"][0]
    assert found["rope"]["text: perplexity"]["value"] == scored["perplexity"]["16"]
    far = scored["strided"]["32"] / scored["strided"]["16"]
    assert found["rope"]["text: strided"]["value"] == far
    again, _ = run()
    assert "$ python train.py" not in again and "$ python eval.py" not in again
    first = json.loads(results.read_text())
    # a fork of one's own; the committed rows stay as they are
    out, _ = run("--add", "mine")
    assert out.count("$ python train.py") == 2 and "left out" not in out and "empty:" not in out
    added = json.loads(mine.read_text())
    assert list(added["cells"]) == ["rope", "alibi", "mine"] and added["added"] == "mine"
    assert {label: added["cells"][label] for label in found} == found
    assert json.loads(results.read_text()) == first
    assert added["command"] == "python reproduce.py matrix --scale cpu --add mine"
    assert "left out" not in run("--add", "mine")[0]


def test_what_a_committed_row_is_compared_by(copy, here, monkeypatch):
    """Another commit is no other definition, another metric, text or task's code is."""
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope", "alibi"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    run()
    results, mine = copy / "results" / "matrix.cpu.json", copy / "out" / "matrix.cpu" / "mine.json"
    first = json.loads(results.read_text())
    found = first["cells"]
    for r in first["runs"]:
        r["environment"] = r["environment"] | dict(commit="0000000", python="3.99")
    results.write_text(json.dumps(first))
    assert "left out" not in run("--add", "mine")[0]
    for r in first["runs"]:
        if r["task"] == "text":
            r["definition"]["text"] = "other"
        elif r["label"] == "rope":
            r["definition"]["metric"] = "other"
    results.write_text(json.dumps(first))
    out, _ = run("--add", "mine")
    assert "left out: the committed row rope, of another definition" in out
    assert "flipflop's metric has changed" in out and "is that of Python 3.99" in out
    assert "make what is missing with: python reproduce.py matrix --scale cpu --missing" in out
    shown = json.loads(mine.read_text())["cells"]
    assert list(shown) == ["alibi", "mine"]
    assert shown["alibi"]["text: perplexity"] == dict(reason="another text")
    assert shown["alibi"]["flip-flop: iid"] == found["alibi"]["flip-flop: iid"]
    assert list(plot.far_runs(mine)[0]) == ["mine"]  # nor is another text's curve drawn
    assert "the committed rows are of commits 0000000\n" in out
    # which makes no others, wherever the runs may be
    shutil.rmtree(copy / "out")
    out, _ = run("--missing")
    assert re.findall(r"\$ python train.py --data (\w+) .* --model (\w+)", out) == [
        ("notes", "rope"), ("flipflop", "rope"), ("notes", "alibi")]
    filled = json.loads(results.read_text())
    assert filled["cells"] == found and [r["label"] for r in filled["runs"]] == [
        "rope", "rope", "alibi", "alibi"]
    assert "$ python train.py" not in run("--missing")[0]
    # a row that is missing gets as many seeds as the others have
    run("--seeds", 2)
    more = json.loads(results.read_text())
    more["runs"] = [r for r in more["runs"] if r["label"] == "rope"]
    results.write_text(json.dumps(more))
    out, _ = run("--missing")
    assert "4 of 4 runs in " in out and len(json.loads(results.read_text())["runs"]) == 8
    assert json.loads(results.read_text())["command"].endswith(" --seeds 2")
    run()
    # a task's code that has changed is another task: its runs are made anew, no others
    code = matrix.code
    monkeypatch.setattr(matrix, "code", lambda *objects: code(*objects) if getattr(
        objects[0], "__name__", "") != "data.flipflop" else "other")
    out, _ = run()
    assert re.findall(r"\$ python train.py --data (\w+)", out) == ["flipflop"] * 2
    # a metric's is read anew from the same runs
    monkeypatch.setitem(matrix.METRICS, "text", (plot.draw,))
    out, _ = run()
    assert "$ python train.py" not in out and out.count("$ python eval.py") == 2
    assert "$ python eval.py" not in run()[0]


def test_an_added_row_is_of_the_method_as_it_is_now(copy, here):
    """An edit trains anew, a comment does not; what its name means goes before a task's flags."""
    def edit(*pairs):
        source = fork.read_text()
        for old, new in pairs:
            assert old in source
            source = source.replace(old, new, 1)
        fork.write_text(source)
        runs.models.cache_clear()
        del sys.modules["model_mine"]
        linecache.checkcache()
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope", text="--norm pre --qk_norm"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu", "--add")
    assert run("mine")[0].count("$ python train.py") == 2
    fork = copy / "model_mine.py"
    edit(("import math\n", "import math  # for pi\n"))
    assert "$ python train.py" not in run("mine")[0]
    edit(('{"relu": F.relu, "softplus": F.softplus}[config.step]', "torch.sigmoid"))
    assert run("mine")[0].count("$ python train.py") == 2
    edit(("mine=dict()", "mine=dict(norm='post', qk_norm=False)"))
    out, _ = run("mine")
    assert out.count("$ python train.py") == 2
    assert out.count("--model mine --norm post --no-qk_norm") == 2
    one, = (r for r in json.loads((copy / "out/matrix.cpu/mine.json").read_text())["runs"]
            if r["task"] == "text")
    assert one["config"]["norm"] == "post" and one["config"]["qk_norm"] is False
    part = copy / "model_part.py"  # an edit of what it builds on is one, too
    part.write_text("from model_fox import GPT, GPTConfig\n")
    edit(("import math  # for pi\n", "import math\n\nimport model_part\n"))
    assert run("mine")[0].count("$ python train.py") == 2
    models = runs.models()
    within = runs.with_imported(models["mine"][0])
    assert within == [models[name][0] for name in ("mine", "part", "fox")]
    within = runs.with_imported(models["cope_rope"][0])
    assert within[1:] == [models[name][0] for name in ("rope", "cope")]
    part.write_text("from model_fox import GPT, GPTConfig\nEDITED = True\n")
    del sys.modules["model_part"]
    edit()
    assert run("mine")[0].count("$ python train.py") == 2
    assert "$ python train.py" not in run("mine")[0]


def test_an_edit_while_a_row_is_made(copy, here, monkeypatch):
    """What the edited file trains or scores is made anew, even where the edit was undone."""
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu", "--add",
                            "mine")
    fork, plain = copy / "model_mine.py", reproduce.Board.run
    source, trained, said = fork.read_text(), r"\$ python train.py --data (\w+)", []
    edited, meanwhile = source.replace("F.gelu(", "F.relu("), "imports, was edited meanwhile"

    def edits(script, undone):
        """That script runs the edited file; with `undone` nobody sees it on disk afterwards."""
        def run(board, name, *words):
            mine, _ = runs.models()["mine"]
            with pytest.MonkeyPatch.context() as now:
                if words[1] == script:
                    now.setattr(mine, "source", edited)
                plain(board, name, *words)
            if words[1] == script and not undone:
                fork.write_text(edited)
        return run
    for script, undone in itertools.product(("train.py", "eval.py"), (False, True)):
        with monkeypatch.context() as patch:
            patch.setattr(reproduce.Board, "run", edits(script, undone))
            out, err = run(code=1)
        assert meanwhile in err and re.findall(trained, out) == ["notes", "flipflop"][:1 + undone]
        assert not list(copy.glob("out/matrix.cpu/mine-*/*/*/eval.json"))
        fork.write_text(source + "\n# a remark is no edit\n")
        out, _ = run()
        said.append(re.findall(trained, out))
        assert "$ python train.py" not in run()[0] and "$ python eval.py" not in run()[0]
        shutil.rmtree(copy / "out" / "matrix.cpu")
    assert said == [["notes", "flipflop"], ["notes", "flipflop"], ["flipflop"], []]
    # edited before it began; half saved, so that the evaluation fails

    def breaks(board, name, *words):
        fork.write_text(source + "def (")
        raise RuntimeError(f"{shlex.join(words)} exited with 1:\nSyntaxError")
    monkeypatch.setattr(reproduce.Board, "run", breaks)
    assert meanwhile in run(code=1)[1]
    fork.write_text(edited)  # nothing is begun
    out, err = run(code=1)
    assert meanwhile in err and "$ python" not in out


def test_an_added_row_that_cannot_be_scored_on_one_task(copy, here, monkeypatch):
    """Its cells of that task say so; the next command tries again."""
    write_notes(copy)
    write_fork(copy)
    here(matrix=small_matrix("rope"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    run()
    plain = reproduce.Board.run

    def fails(board, name, *words):
        if words[1] == "eval.py" and "/text-" in words[2]:
            raise RuntimeError(f"{shlex.join(words)} exited with {end}")
        plain(board, name, *words)
    with monkeypatch.context() as patch:
        patch.setattr(reproduce.Board, "run", fails)
        end = "1:\nA\nIndexError: too far"
        out, _ = run("--add", "mine")
        shown = json.loads((copy / "out" / "matrix.cpu" / "mine.json").read_text())["cells"]
        assert shown["mine"]["text: perplexity"] == dict(reason="failed") and "unlike" not in out
        assert "value" in shown["mine"]["flip-flop: iid"] and "IndexError: too far\n" in out
        assert "value" in shown["rope"]["text: perplexity"]
        for end in "-9:\nA", "1:\nerror: disk full":  # the machine's doing, not the method's
            assert f"exited with {end}\n" in run("--add", "mine", code=1)[1]
        shutil.rmtree(copy / "out")
        end = "1:\nIndexError: too far"  # of a row of the matrix itself: a mistake of ours
        assert "IndexError: too far" in run(code=1)[1]
    run("--add", "mine")
    shown = json.loads((copy / "out" / "matrix.cpu" / "mine.json").read_text())["cells"]
    assert all("value" in cell for cell in shown["mine"].values())


def test_logits_that_are_not_finite_are_no_answers(copy, here):
    """The largest of NaN would be one; -inf is a token that never comes."""
    write_notes(copy)
    write_fork(copy, "cable", ("logits = self.lm_head(self.ln_f(x))",
                               "logits = self.lm_head(self.ln_f(x)) / (T < 20)"))
    for name, what in (("never", "/ self.training"), ("masked", "+ masked[:V]")):
        source = (copy / "model_mine.py").read_text().replace("/ (T < 20)", what)
        source = source.replace("mine=dict()", f"{name}=dict()").replace(
            "        logits =", "        V = self.config.vocab_size\n        masked = torch.zeros("
            "999)\n        masked[0] = -math.inf if V < 99 else 0\n        logits =")
        (copy / f"model_{name}.py").write_text(source)
    here(matrix=small_matrix("rope"))
    cells = {}
    for name in ("mine", "never", "masked"):
        command(copy, "reproduce.py", "matrix", "--device", "cpu", "--add", name)
        found = json.loads((copy / "out" / "matrix.cpu" / f"{name}.json").read_text())
        cells[name] = found["cells"][name]
    not_finite = dict(reason="not finite")
    mine = cells["mine"]
    assert mine["flip-flop: worst"] == mine["text: strided"] == not_finite
    assert "value" in mine["flip-flop: iid"] and "value" in mine["text: perplexity"]
    assert set(map(json.dumps, cells["never"].values())) == {json.dumps(not_finite)}
    assert "value" in cells["masked"]["flip-flop: worst"]


def test_what_cannot_be_added_to_a_matrix(copy, here):
    write_notes(copy)
    for name, fields in (("two words", {}), ("../out2", {}), ("matrix", {}),
                         ("short", dict(block_size=8)), ("wide", dict(n_embd=32))):
        file = copy / f"model_a{len(list(copy.glob('model_a*')))}.py"
        write_fork(copy)
        source = (copy / "model_mine.py").read_text()
        file.write_text(source.replace("dict(mine=dict())", f"{ {name: fields}!r}"))
    (copy / "model_mine.py").unlink()
    here(matrix=small_matrix("rope", "alibi"))
    for name, says in (("rpoe", "unknown model 'rpoe': did you mean rope"),
                       ("rope", "rope is in matrix already: rope, alibi"),
                       ("two words", "'two words' is to be the name of a file, and cannot"),
                       ("../out2", "'../out2' is to be the name of a file, and cannot"),
                       ("matrix", "'matrix' is to be the name of a file, and cannot"),
                       ("short", "VARIANTS gives short a block_size: its texts would not be"),
                       ("bert_cable", "bert_cable is an encoder, and matrix is of causal models")):
        assert says in complaint(copy, "reproduce.py", "matrix", "--add", name)
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu", "--add")
    out, _ = run("nope")
    assert "the row stands alone" in out and "unlike" not in out
    command(copy, "reproduce.py", "matrix", "--device", "cpu")
    assert "unlike the others wide has n_embd=32\n" in run("wide")[0]
    assert "unlike" not in run("nope")[0]
    (copy / "results" / "matrix.cpu.json").write_text("{}")
    assert "is not what reproduce.py wrote: the row stands alone" in run("nope")[0]
    (copy / "results" / "matrix.cpu.json").write_text("{")
    assert "matrix.cpu.json is damaged: restore or remove it" in complaint(copy, "reproduce.py")
    for flag in ("--rows", "rope"), ("--missing",):
        assert f"{flag[0]} is not for --add" in complaint(
            copy, "reproduce.py", "matrix", "--add", "nope", *flag)
    (copy / "results" / "matrix.cpu.json").write_text('{"runs": [{"label": "rope"}]}')
    assert "matrix.cpu.json is damaged: restore or remove it" in complaint(
        copy, "reproduce.py", "matrix", "--missing")
    for flag in ("--rows", "rope"), ("--compile",), ("--dry_run",):
        assert f"{flag[0]} is not for --missing of matrix" in complaint(
            copy, "reproduce.py", "matrix", "--missing", *flag)
    here(texts=entry("--data notes", experiments.seeds(1, "rope"), eval=""))
    assert "is no matrix" in complaint(copy, "reproduce.py", "texts", "--add", "nope")


def test_a_row_that_diverges_or_ends_says_so(home, here):
    """The rest of the matrix stands."""
    one = small_matrix("learned", "rope")
    one["cpu"]["rows"]["wild"] = "--model rope --learning_rate 1e30 --grad_clip 0", 1
    here(matrix=one)
    out, _ = command(home, "reproduce.py", "matrix", "--device", "cpu")
    found = json.loads((home / "results" / "matrix.cpu.json").read_text())["cells"]
    assert set(map(json.dumps, found["wild"].values())) == {'{"reason": "diverged"}'}
    assert found["learned"]["text: strided"] == dict(reason="ends")
    assert found["learned"]["text: perplexity"]["value"] > 1
    assert all("value" in cell for cell in found["rope"].values())
    page = (home / "results" / "README.md").read_text()
    wild = next(line for line in page.splitlines() if line.startswith("| wild |"))
    assert cells(wild)[1:] == ["diverged"] * 4
    with standing_in(home):
        assert matrix.older(json.loads((home / "results" / "matrix.cpu.json").read_text()), one,
                            one["cpu"]) == ""
    # a failure of another kind is one of the whole
    del one["cpu"]["rows"]["wild"]
    one["cpu"]["rows"]["wrong"] = "--model rope --n_embd 15", 1
    _, err = command(home, "reproduce.py", "matrix", "--device", "cpu", code=1)
    assert "n_embd=15 is not divisible" in err and "the same command continues" in err


def test_a_fork_that_diverges_stands_beside_the_others(copy, here):
    write_notes(copy)
    write_fork(copy, "cable", ("bias = -g", "bias = math.nan * g"))
    here(matrix=small_matrix("rope"))
    run = functools.partial(command, copy, "reproduce.py", "matrix", "--device", "cpu")
    run()
    run("--add", "mine")
    committed, added = (json.loads((copy / folder).read_text())["cells"] for folder in (
        "results/matrix.cpu.json", "out/matrix.cpu/mine.json"))
    assert added.keys() == {"rope", "mine"} and added["rope"] == committed["rope"]
    assert set(map(json.dumps, added["mine"].values())) == {'{"reason": "diverged"}'}


def test_what_a_cells_definition_is(monkeypatch):
    """Its task's code, its metric's and its text; not comments, docstrings or the commit."""
    task = dict(train="--data flipflop", eval="--sequences 500")
    first = matrix.definition(task, MATRIX_COLUMNS, "a")
    assert matrix.definition(task, MATRIX_COLUMNS, "a") == first
    assert matrix.definition(task, MATRIX_COLUMNS, "b") == first | dict(text="b")
    other = task | dict(train="--data dyck")
    assert matrix.definition(other, MATRIX_COLUMNS, "a")["task"] != first["task"]
    fewer = dict(list(MATRIX_COLUMNS.items())[:3])
    for changed in (matrix.definition(task, fewer, "a"), matrix.definition(
            task | dict(eval="--sequences 5"), MATRIX_COLUMNS, "a")):
        assert changed["metric"] != first["metric"] and changed["task"] == first["task"]

    def tvd(logits, target):
        return 0
    with monkeypatch.context() as patch:
        patch.setitem(matrix.METRICS, "symbols", (tvd,))
        changed = matrix.definition(task, MATRIX_COLUMNS, "a")
    assert changed["metric"] != first["metric"] and changed["task"] == first["task"]
    # of a file: what runs, and nothing else
    body = 'def f(x):\n    return "#" + x\n'
    said = body.replace("    ret", '    """Others."""\n    ret')
    sources = [f'"""Words."""\nX = 1  # more\n\n\n{said}', f"X = 1\n\n# a note\n{body}",
               f"X = 2\n\n# a note\n{body}"]
    hashes = []
    for source in sources:
        monkeypatch.setattr(matrix.inspect, "getsource", lambda _, source=source: source)
        hashes.append(matrix.code.__wrapped__(None))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_matrix_of_another_definition_says_where():
    entry = matrix.ENTRIES["matrix"]
    for where, value, says in (
            ((), None, ""), (("config", "learning_rate"), 1.0, "its row 'nope': text has"),
            (("config", "weight_decay"), 0.0, "text has weight_decay=0.0, the entry says 0.1"),
            (("definition", "task"), "other", "the code of text's task has changed"),
            (("definition", "metric"), "other", "the code of text's metric has changed"),
            (("values",), dict(other=1.0), "its row 'nope': it has other columns of text"),
            (("label",), "mine", "it has no 'nope' on text"),
            (("task",), "other", "it has no 'nope' on text")):
        result = json.loads((ROOT / "results" / "matrix.cpu.json").read_text())
        one = result["runs"][0]
        for key in where[:-1]:
            one = one[key]
        if where:
            one[where[-1]] = value
        found = matrix.older(result, entry, entry["cpu"])
        assert says in found if says else not found


def test_the_columns_of_the_matrix_by_hand():
    scores = {T: {split: dict(exact_match=dict(value=v), sequence_error=dict(value=v / 2))
                  for split, v in values.items()}
              for T, values in (("4", dict(iid=1.0, sparse=0.5)), ("8", dict(iid=0.8, sparse=0.2)))}
    run = dict(block_size=4, perplexity={"4": 3.0, "8": 6.0}, strided={"4": 2.0, "8": 1.5},
               scores=scores, auc={"4": {"long": [0, 0, 0, 0, None, 0.5, 0.7]}})
    assert matrix.perplexity(run, 2) == 6 and matrix.perplexity(run, 4) is None
    assert matrix.reading(run, 2) == 0.75 and matrix.reading(run, 4) is None
    assert matrix.percent(run, 1, "sparse", "exact_match") == 50
    assert matrix.percent(run, 1, "sparse", "sequence_error") == 75
    assert matrix.percent(run, 1, "dense", "exact_match") is None
    assert matrix.worst(run, 2, "exact_match") == 20 and matrix.worst(run, 4, "exact_match") is None
    assert matrix.beyond(run, "auc", "long") == pytest.approx(0.6)
    assert matrix.beyond(run, "tvd", "long") is None
    # who is not done: 1 % of perplexity over the last fifth; seeds have a mean and a spread
    assert trainings.fell([[400, 3.0], [800, 2.0], [1000, 1.5]], 1000) == 0.5
    assert trainings.fell([[1000, 1.5]], 1000) is None
    two = [dict(values=dict(a=1.0), fell=0.009), dict(values=dict(a=2.0), fell=0.011)]
    assert matrix.cell("a", two) == dict(value=1.5, unfinished=True, spread=pytest.approx(0.5**0.5))
    assert matrix.cell("a", two[:1]) == dict(value=1.0, unfinished=False)
    assert matrix.cell("a", []) == dict(reason="not run")
    for value, why in ((math.nan, "not finite"), (math.inf, "not finite"), (None, "ends")):
        one = dict(values=dict(a=value), fell=0.0)
        assert matrix.cell("a", [*two, one]) == dict(reason=why)
    # every column reads what its task has, and every task has its column
    for scale in (matrix.TASKS, matrix.PAPER_TASKS):
        assert {c["task"] for c in matrix.COLUMNS.values()} == set(scale)


def test_surviving_beside_reading(monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    config = dict(block_size=16)
    runs_ = []
    for label, ys, rates in (("one", (4.0, 3.0), (1.0, 0.5)), ("two", (2.0, 8.0), (0.25, 0.0))):
        runs_.append(dict(label=label, config=config, strided=dict(zip(("16", "32"), ys))))
        far = {str(d): [30, rate] for d, rate in zip((1, 2), rates)} | {"4": [29, 0.9]}
        runs_.append(dict(label=label, config=config,
                          by_distance={"16": {"iid": {"1": [9, 0.7]}}, "128": {"iid": far}}))
    runs_.append(dict(label="wild", diverged="loss is nan", config=config))
    runs_.append(dict(label="ends", config=config, by_distance={"16": {"iid": {"1": [99, 0.5]}}}))
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps(dict(runs=runs_, added="two")))
    survived, far, trained, added = plot.far_runs(path)
    assert trained == 16 and survived["one"][0] == [16, 32] and far["two"] == ([1, 2], [[25, 0]])
    assert far["ends (strings of 16)"] == ([1], [[50]])
    assert [list(ys) for _, (ys,) in survived.values()] == [[1, 0.75], [1, 4]]
    monkeypatch.setattr(sys, "stdout", written())
    plot.main(["reading", str(path)])
    assert {"one", "two"} <= set(labels_of(figures[-1])) and added == "two"
    for ax in figures[-1].axes:
        lines = [line for line in ax.lines if len(line.get_xdata()) > 1]
        assert [line.get_linewidth() > 2 for line in lines if line.get_color() == "teal"] == [False]
    assert [name for name, look in plot.looks(survived, "two").items() if look["lw"] > 2] == ["two"]
    assert not any(look["lw"] > 2 for look in plot.looks(survived, "").values())


def test_the_heat_map_has_the_cells_of_the_json(monkeypatch, tmp_path):
    figures = drawn(monkeypatch)
    columns = {"a: less": dict(task="a", better="less", form=".2f", logarithmic=True, least=0.1),
               "a: more": dict(task="a", better="more", form=".1f", logarithmic=False, least=10),
               "a: near": dict(task="a", better="more", form=".1f", logarithmic=False, least=10),
               "b: lone": dict(task="b", better="more", form=".1f", logarithmic=False, least=10)}

    def numbers(less, more, near, unfinished=False):
        return {"a: less": dict(value=less, unfinished=unfinished),
                "a: more": dict(value=more, unfinished=unfinished),
                "a: near": dict(value=near, unfinished=False), "b: lone": dict(reason="not run")}
    found = dict(one=numbers(4.0, 100.0, 95.0), two=numbers(8.0, 50.0, 99.0, True),
                 mine=numbers(2.0, 0.0, 100.0))
    found["three"] = numbers(0.0, 12345.6, 100.0) | {"a: less": dict(reason="diverged")}
    found["three"]["b: lone"] = dict(value=7.0, unfinished=False, spread=0.25)
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps(dict(columns=columns, cells=found, added="mine")))
    monkeypatch.setattr(sys, "stdout", written())
    plot.main(["matrix", str(path)])
    ax = figures[-1].axes[0]
    said = {}
    for text in ax.texts:
        x, y = text.get_position()
        said[x, y] = text.get_text()
    want = {(0, 0): "4.00", (0, 1): "8.00", (0, 2): "2.00", (0, 3): "diverged",
            (1, 0): "100", (1, 1): "50", (1, 2): "0", (1, 3): "12,346",
            (3, 3): "7", (3, 3.33): "± 0.2"}
    assert want.items() <= said.items()
    boxes = {(p.get_x() + 0.48, p.get_y() + 0.46): p for p in ax.patches if p.get_width() < 1}
    colors = {tuple(map(round, at)): p.get_facecolor() for at, p in boxes.items()}
    best, worst = plot.WORST_TO_BEST(1.0), plot.WORST_TO_BEST(0.0)
    assert colors[0, 2] == best and colors[0, 1] == worst and colors[1, 3] == best
    assert colors[1, 2] == worst
    # by the logarithm 4 is halfway from 8 to 2; so is 95 from 90 to 100, and what stands alone
    for at in ((0, 0), (2, 0), (3, 3)):
        assert colors[at] == plot.WORST_TO_BEST(0.5)
    assert colors[2, 2] == colors[2, 3] == best
    hatched = {tuple(map(round, at)) for at, p in boxes.items() if p.get_hatch()}
    assert hatched == {(0, 1), (1, 1)}
    bold = [t.get_text() for t in ax.get_yticklabels() if t.get_weight() == "bold"]
    assert bold == ["mine"]
    rows = plot.cells(path)[1]
    assert [t.get_text() for t in ax.get_yticklabels()] == list(rows)
    # what more is better of: said of a task where it is so of all its columns
    assert [t.get_text() for t in ax.get_xticklabels()] == ["less ↓", "more", "near", "lone"]
    assert {"a", "b"} < set(said.values())
    columns["a: less"]["better"] = "more"
    for name in columns:
        columns[name]["percent"] = True
    columns["b: lone"] |= dict(percent=False, better="less")
    columns["b: other"] = columns["b: lone"]
    for row in found.values():
        row["b: other"] = row["b: lone"]
    path.write_text(json.dumps(dict(columns=columns, cells=found)))
    plot.main(["matrix", str(path)])
    ax = figures[-1].axes[0]
    assert {"a, % right", "b, less is better"} < {text.get_text() for text in ax.texts}
    assert [t.get_text() for t in ax.get_xticklabels()] == ["less", "more", "near", "lone", "other"]
