"""
The matrix: what can each one do?

Every method on every task, on one backbone: pre-norm, on the synthetic tasks with QK-norm. Each
task but text has a budget at which the methods that are best at it are done, or nearly (FoX on
Dyck is not). A hatched cell is of a run that was not done: its validation perplexity still fell by
more than 1 % over the last fifth of its steps.
"""
import functools
import hashlib
import inspect
import math
import re
import shlex
import shutil
import statistics
import textwrap
import tokenize
from functools import partial
from pathlib import Path

import data
import eval as evaluation
import runs
import train
from experiments import seeds, trainings

FALLS = 0.01  # nats; a run whose validation loss fell by more in its last fifth is not done


# -----------------------------------------------------------------------------
# how a cell's number is read from eval.py's row of a run; None where that length was not reached

def perplexity(run, times):
    """In windows of so many times the training length."""
    return run["perplexity"].get(str(times * run["block_size"]))


def reading(run, times):
    """
    Strided perplexity in windows of so many times the training length, divided by that in windows
    of the training length: less than 1 is what farther context is worth, more what it costs.
    """
    near, far = (run["strided"].get(str(n * run["block_size"])) for n in (1, times))
    return far / near if near and far else None


def percent(run, times, split, metric):
    """A score, in %; of an error, how many are without it."""
    found = run["scores"].get(str(times * run["block_size"]), {})
    if split not in found:
        return None
    value = 100 * found[split][metric]["value"]
    return 100 - value if metric.endswith("error") else value


def worst(run, times, metric):
    """The lowest score of all test sets, in %."""
    known = run["scores"].get(str(times * run["block_size"]), {})
    return min((percent(run, times, split, metric) for split in known), default=None)


def beyond(run, metric, split):
    """What is known by position: its mean beyond the training length."""
    T = run["block_size"]
    by_position = run.get(metric, {}).get(str(T), {}).get(split, [])[T:]
    known = [y for y in by_position if y is not None]
    return statistics.mean(known) if known else None


def column(task, better, form, least, function, *asked):
    """least: colours span a column's worst to its best, and at least this difference."""
    return dict(task=task, better=better, form=form, least=least, read=(function, *asked))


def percents(task, *asked):
    return column(task, "more", ".1f", 10, percent, *asked)


# {"what the task is called: what the number is": column}; of perplexities, logarithms are compared
COLUMNS = {
    "text: perplexity": column("text", "less", ".2f", 0.1, perplexity, 1),
    "text: at 16 x": column("text", "less", ".2f", 0.1, perplexity, 16),
    "text: strided, 16 x / 1 x": column("text", "less", ".2f", 0.1, reading, 16),
    "flip-flop: iid": percents("flipflop", 1, "iid", "exact_match"),
    "flip-flop: sparse": percents("flipflop", 1, "sparse", "exact_match"),
    "flip-flop: dense": percents("flipflop", 1, "dense", "exact_match"),
    "flip-flop: worst, 16 x": column("flipflop", "more", ".1f", 10, worst, 16, "exact_match"),
    "copy: iid": percents("selective_copy", 1, "iid", "sequence_error"),
    "copy: sparse": percents("selective_copy", 1, "sparse", "sequence_error"),
    "counting: iid": percents("counting", 1, "iid", "answer_error"),
    "counting: passes, more": percents("counting", 1, "pass100", "answer_error"),
    "counting: passes, fewer": percents("counting", 1, "pass10", "answer_error"),
    "recall: iid": percents("recall", 1, "iid", "accuracy"),
    "recall: at 16 x": percents("recall", 16, "iid", "accuracy"),
    "set complement: TVD": column("set_complement", "less", ".3f", 0.05, beyond, "tvd", "full"),
    "Dyck: TVD": column("dyck", "less", ".3f", 0.05, beyond, "tvd", "long"),
    "Dyck: AUC": column("dyck", "more", ".3f", 0.05, beyond, "auc", "long"),
}
LOGARITHMIC = perplexity, reading  # so that one explosion leaves the others their colours
PERCENT = percent, worst           # of what is right

ROWS = seeds(1, "nope", "learned", "rope", "alibi", "kerple", "relative", "cable", "cope", "tra",
             "fox", "diff") | {"peri": ("--model perinorm --norm peri --pe rope", 1)}


def task(name, train, evaluate, steps):
    """Five validations: the last fifth says whether it is done."""
    return dict(train=f"--data {name} --max_iters {steps} --eval_interval {steps // 5} {train}",
                eval=evaluate)


QK = "--norm pre --qk_norm"
TASKS = dict(
    text=task("stdlib", "--size nano --norm pre --no-qk_norm", "--tokens 65536 "
              "--lengths 256 1024 4096 --strided", 750),
    flipflop=task("flipflop", QK, "--sequences 500 --lengths 64 1024", 1000),
    selective_copy=task("selective_copy", QK, "--sequences 1000", 2000),
    counting=task("counting", QK, "--sequences 2000", 1000),
    recall=task("recall", QK, "--sequences 1000 --lengths 64 1024", 500),
    set_complement=task("set_complement", f"{QK} --n 16 --block_size 4", "--sequences 1000", 2000),
    dyck=task("dyck", QK, "--sequences 1000", 1000))
PAPER = f"--size paper {QK}"
PAPER_TASKS = dict(
    text=task("wikitext103", "--size tiny --norm pre --no-qk_norm --batch_size 64 "
              "--gradient_accumulation_steps 2", "--lengths 1024 4096 16384 --strided", 9000),
    flipflop=task("flipflop", PAPER, "--sequences 2000 --lengths 512 8192", 25000),
    selective_copy=task("selective_copy", PAPER, "--sequences 10000", 100000),
    counting=task("counting", PAPER, "--sequences 10000", 15625),
    recall=task("recall", PAPER, "--sequences 2000 --lengths 512 8192", 25000),
    set_complement=task("set_complement", PAPER, "--sequences 10000", 100000),
    dyck=task("dyck", PAPER, "--sequences 10000", 100000))

ENTRIES = {
    "matrix": dict(
        about="What can each one do? Every method on every task; with --add NAME your own row "
              "beside these",
        columns=COLUMNS,
        cpu=dict(minutes=4, tasks=TASKS, rows=ROWS, reads=[
            "Text: bytes of Python source in windows of 256 and of 4,096, the first 65,536 tokens "
            "of test. cable_table1 has 131,072: there the perplexities of CABLE, ALiBi and RoPE, "
            "of the same settings and seed, are 4 to 5 % lower (RoPE's at 4,096 5 % higher; its "
            "seeds differ by 40 % there).",
            "Strided is the perplexity in windows of 4,096 over that in windows of 256, of tokens "
            "that all have half a window to look back on. At 1 the length is survived. Below 1 "
            "more context is used, which may still be context within 256 (lm tells these apart).",
            "Flip-flop, copy, counting, recall: what is right, in %. Flip-flop's last column is "
            "the worst of its three test sets at 1,024 tokens, copy's has twice the blanks of "
            "training. Counting has twice the passes of training, or a fifth of them: then there "
            "is more to count. Recall asks for one of eight pairs that are scattered through 64 "
            "tokens, and through 1,024; one of the eight values is right by chance in 12.5 %.",
            "Set complement and Dyck: the distance from the true distribution (TVD), and for Dyck "
            "the AUC of the end of a string, beyond the training length, up to nearly 4 times it.",
            "Surviving and reading are two things (the second figure): strided perplexity by "
            "window, and recall by how far back the pair is, both far beyond the training length "
            "(learned positions: within it).",
            "One seed a row: close cells claim no order. Every text row was still falling.",
            "All 84 runs were made from nothing by one command with --jobs 2, killed once and "
            "given again: 1 hour 57 minutes on two cores. An earlier table (this file at commit "
            "2e8fe59) had other kernels for CABLE, CoPE, TRA and FoX. Their cells differ from it, "
            "most of all CoPE's on Dyck (AUC .887 then, .725 now) and CABLE's of counting with "
            "fewer passes (92.3, 89.2): so far one seed can be trusted. All other rows are the "
            "same to the last digit.",
            "In copy only CoPE, Diff, peri and, in part, RoPE had more than 1.3 % of the strings "
            "right after 2,000 steps, with QK-norm; without it learned positions have 66 to 97 % "
            "(cope_table2_copy). The others' losses were still falling (hatched) or (TRA, FoX) had "
            "nearly stood still, most at 0 %: they had not learned to copy.",
            "A column's colours go from its worst to its best, or from a difference that matters: "
            "10 points, 10 % of a perplexity, .05.",
            "Learning rates are as they come with the tasks, one for all rows; that of text was "
            "chosen by CABLE and RoPE; TRA with post-norm and QK-norm did better at twice it "
            "(lm_rates). peri is RoPE with norms before and after each sublayer; all others are "
            "pre-norm.",
        ]),
        # one P for all tasks: copying 256 symbols takes more than 257 positions, counting has 513
        paper=dict(tasks=PAPER_TASKS, rows=ROWS | {"cope": ("--model cope --P 513", 1)})),
    "recall": dict(
        about="Recall: one of eight pairs is asked for at the end of more and more filler. Right "
              "answers (%), trained on 64 tokens",
        columns=[("64", "iid", "accuracy")],
        cpu=TASKS["recall"] | dict(
            minutes=1, eval="--sequences 1000 --lengths 64 128 256 512 1024",
            rows={row: (flags, 3) for row, (flags, _) in ROWS.items() if row != "learned"},
            reads=[
                "The matrix's runs of recall, in three seeds. All but FoX learned the task in 500 "
                "steps; FoX's accuracy still rose. At 1,024 tokens TRA has every answer right in "
                "each seed, none of the rest more than 96.3 % in any (p .1 beside each).",
                "CABLE (72 to 96 %), KERPLE (73 to 96), CoPE (89 to 96), relative positions (84 to "
                "91) and none at all (73 to 87) cannot be told apart there: one seed a row, as in "
                "the matrix, says little. ALiBi has 59 to 63, RoPE and Diff 22 to 30, peri 9 to "
                "10, each below all seeds of these.",
            ])),
}


# -----------------------------------------------------------------------------
# the definition of a cell: flags, the code of its task and its metric, and the text

@functools.cache
def code(*objects):
    """Modules and functions, without docstrings and comments -> 12 digits of a hash."""
    lines = []
    for one in objects:
        lines += runs.bare(textwrap.dedent(inspect.getsource(one)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


METRICS = dict(text=(evaluation.windows, evaluation.token_losses, evaluation.strided_losses,
                     evaluation.length_row),
               symbols=(evaluation.task_scores, evaluation.interval, data.Task.score, data.tvd,
                        data.auc))


def definition(task, columns, text=""):
    """
    What a number depends on besides its settings: the code of its task, that of its metric with
    eval.py's flags, and the sha256 of a text. task: one of an entry's `tasks`.
    """
    cls = runs.find_task(trainings.options(task["train"].split())["data"])
    task_code = cls.batch if cls.kind == "text" else inspect.getmodule(cls)
    reads = [spec["read"] for spec in columns.values()]
    metric = code(*METRICS[cls.kind], *(function for function, *_ in reads))
    metric += str([asked for _, *asked in reads]) + task["eval"]
    return dict(task=code(task_code), text=text,
                metric=hashlib.sha256(metric.encode()).hexdigest()[:12])


def folder_of(name, now):
    """Where a task's runs are, named by its code: where that has changed, they are made anew."""
    return f"{name}-{now['task']}"


def columns_of(entry, name):
    """A task's columns."""
    return {key: spec for key, spec in entry["columns"].items() if spec["task"] == name}


def differs(run, entry, scale):
    """
    Why a run is not what its cells would be today, its text aside: the first row, setting or code
    that differs; "" where it is.
    """
    label, name = run["label"], run["task"]
    if label not in scale["rows"] or name not in scale["tasks"]:
        return f"the entry has no {label!r} on {name}"
    flags, _ = scale["rows"][label]
    start, _ = trainings.words_of("", flags, run["seed"], scale["tasks"][name], [])
    found = trainings.differing(run["config"], start[2:])
    if found:
        return f"{name} has {found}"
    columns = columns_of(entry, name)
    if run.get("values", columns).keys() != columns.keys():
        return f"it has other columns of {name}"
    now = definition(scale["tasks"][name], columns)
    changed = [part for part in ("task", "metric") if run["definition"][part] != now[part]]
    return f"the code of {name}'s {' and '.join(changed)} has changed" if changed else ""


def older(result, entry, scale):
    """
    Why a JSON is not of this definition of its entry, in words; "" where it is. It may have fewer
    rows, where --rows asked for some.
    """
    known = {(run["label"], run["task"]) for run in result["runs"]}
    rows = scale["rows"]
    if "--rows" in result["command"]:
        rows = dict.fromkeys(run["label"] for run in result["runs"])
    for label in rows:
        for name in scale["tasks"]:
            if (label, name) not in known:
                return f"it has no {label!r} on {name}"
    for run in result["runs"]:
        why = differs(run, entry, scale)
        if why:
            return f"its row {run['label']!r}: {why}"
    return ""


# -----------------------------------------------------------------------------
# jobs and what comes of them

def jobs(args, entry, scale, folder):
    """-> {name: function(run)}, one for each row, task and seed."""
    device, found = trainings.on_device(args), {}
    folder /= scale.get("folder", "")
    kept = {(run["label"], run["task"], run["seed"]) for run in scale.get("kept", [])}
    for label, row in scale["rows"].items():
        for name, one in scale["tasks"].items():
            table, columns = one | dict(rows={label: row}), columns_of(entry, name)
            now = definition(one, columns)
            for run in trainings.planned(args, entry, table, folder / folder_of(name, now)):
                if (label, name, run.seed) in kept:
                    continue
                training = partial(evaluated, run, entry, table, now["metric"], device)
                if "fork" in scale:
                    training = partial(evaluated_fork, runs.ROOT / run.out, training,
                                       scale["fork"])
                words, _ = trainings.words_of(run.out, run.flags, run.seed, table, device)
                about = dict(label=label, task=name, seed=run.seed,
                             train_command=shlex.join(words))
                found[f"{name} {run.out.name}"] = partial(
                    numbers, training, one, columns, about, "fork" in scale)
    return found


def evaluated(row, entry, table, metric, device, run):
    """trainings.training; its evaluation is made anew where the metric's code has changed."""
    folder = runs.ROOT / row.out
    known = folder / "metric"  # whose code made eval.json
    if not known.exists() or known.read_text() != metric:
        (folder / "eval.json").unlink(missing_ok=True)
    found = trainings.training(row, entry, table, device, run)
    known.write_text(metric)
    return found


def evaluated_fork(folder, training, module, run):
    """
    training(run) of a row that was added, whose file may be edited meanwhile. Then RuntimeError:
    what another code has trained or scored does not pass for this one's.
    """
    now, path = runs.code_of(module), folder / "ckpt.pt"
    file = Path(module.__file__).name
    meanwhile = RuntimeError(f"{file}, or what it imports, was edited meanwhile")
    if trained_by(path) not in (None, now):
        shutil.rmtree(folder)
    if edited(module):
        raise meanwhile
    try:
        found = training(run)
    except RuntimeError:  # perhaps by the edit
        if edited(module) or trained_by(path) not in (None, now):
            raise meanwhile from None
        raise
    if {trained_by(path), found["runs"][0].get("code_version")} != {now}:
        for name in ("metric", "eval.json"):
            (folder / name).unlink(missing_ok=True)
        raise meanwhile
    return found


def trained_by(path):
    """The version of the code of a checkpoint's model; None where there is no checkpoint."""
    return runs.load_checkpoint(path).get("code_version", "") if path.exists() else None


def edited(module):
    """Whether a model's file, or one that it builds on, is another now than this process has."""
    try:
        return any(runs.bare(Path(one.__file__).read_text()) != runs.bare(one.source)
                   for one in runs.with_imported(module))
    except (SyntaxError, tokenize.TokenError, OSError, UnicodeDecodeError):  # half saved
        return True


DIVERGED = r"^error: the (loss is \S+|weights are not finite) at iter \d+"
FAILED = r"^python eval\.py .* exited with 1:"


def numbers(training, task, columns, about, added, run):
    """
    One training and its evaluation -> its numbers, or that it has diverged. Of a row that was added
    also that its method failed in the evaluation: the other tasks stand.
    """
    words = shlex.split(about["train_command"])
    try:
        found = training(run)
    except RuntimeError as e:
        diverged, last = re.search(DIVERGED, str(e), re.M), str(e).splitlines()[-1]
        failed = added and re.match(FAILED, str(e))
        if last.startswith("error: "):  # the machine's, a full disk for instance, or nothing at all
            failed = failed and evaluation.NOT_FINITE in str(e)
            last = evaluation.NOT_FINITE
        if not diverged and not failed:
            raise
        c, *_ = train.fresh(words[2:])
        about |= dict(config=vars(c) | dict(data=data.make(vars(c)).data),
                      definition=definition(task, columns), environment=runs.environment(),
                      train_seconds=0, eval_seconds=0)
        if diverged:
            return about | dict(diverged=diverged[0].removeprefix("error: "))
        print(f"{e}\nit has no cells in {about['task']}. Where a method ends, let it raise a "
              "ValueError: they say `ends` then", flush=True)
        return about | dict(failed=last)
    one, values = found["runs"][0], {}
    seconds = one["eval_seconds"]
    for name, spec in columns.items():
        function, *asked = spec["read"]
        values[name] = function(one, *asked)
    about |= dict(values=values, fell=found["more"].get("fell"),
                  definition=definition(task, columns, found["data"].get("sha256", "")),
                  environment=found["environment"], train_seconds=one["train_seconds"],
                  eval_seconds=sum(seconds.values()) if isinstance(seconds, dict) else seconds)
    kept = "config", "strided", "by_distance", "not_finite"
    return about | {k: one[k] for k in kept if k in one}


def collect(entry, scale, found):
    """What the jobs returned -> the entry's JSON."""
    columns = {}
    for name, spec in entry["columns"].items():
        columns[name] = dict(task=spec["task"], better=spec["better"], form=spec["form"],
                             least=spec["least"], logarithmic=spec["read"][0] in LOGARITHMIC,
                             percent=spec["read"][0] in PERCENT)
    found += scale.get("kept", [])
    rows, tasks = list(scale["rows"]), list(scale["tasks"])
    found.sort(key=lambda run: (rows.index(run["label"]), tasks.index(run["task"]), run["seed"]))
    return dict(environment=found[0]["environment"], columns=columns, cells=cells(columns, found),
                runs=found)


def kept(committed, entry, scale):
    """
    The runs of a JSON that are what they would be today, with the text that they were scored on.
    Raises KeyError, TypeError or AttributeError where it is not what reproduce.py wrote.
    """
    texts, found = {}, []
    for name, one in scale["tasks"].items():
        words = ["--model", "nope", *one["train"].split()]
        c = vars(train.fresh(words)[0])
        if runs.find_task(c["data"]).kind == "text":
            texts[name] = data.make(c).source
    for run in committed["runs"]:
        try:
            same = not differs(run, entry, scale)
        except (ValueError, SystemExit):  # a method or a task that is no more
            same = False
        text = run["definition"]["text"]
        if same and ("diverged" in run or text == texts.get(run["task"], text)):
            found.append(run)
    return found


def cells(columns, found):
    """The numbers of all runs -> {row: {column: dict(value, unfinished) or dict(reason)}}"""
    rows = {}
    for run in found:
        rows.setdefault(run["label"], {}).setdefault(run["task"], []).append(run)
    said = {}
    for label, by_task in rows.items():
        said[label] = {name: cell(name, by_task.get(column["task"], []))
                       for name, column in columns.items()}
    return said


def cell(name, found):
    """One row's runs of one task -> mean and spread over their seeds, or why there is none."""
    for run in found:
        if "diverged" in run:
            return dict(reason="diverged")
        if "failed" in run:
            nothing = run["failed"] == evaluation.NOT_FINITE
            return dict(reason="not finite" if nothing else "failed")
        if "other_text" in run:
            return dict(reason="another text")
    values = [run["values"][name] for run in found]
    if not values:
        return dict(reason="not run")
    if None in values:
        return dict(reason="not finite" if any("not_finite" in run for run in found) else "ends")
    if not all(map(math.isfinite, values)):
        return dict(reason="not finite")
    falls = max(run["fell"] or 0 for run in found) > FALLS
    said = dict(value=statistics.mean(values), unfinished=falls)
    return said | (dict(spread=trainings.deviation(values)) if len(values) > 1 else {})


def figures(entry):
    """What plot.py is asked for, in words, to show the JSON."""
    return [["matrix"], ["reading"]]


def beside(result, committed, entry, scale):
    """
    The JSON of one added row, and the committed one -> one with the rows of both that can be
    compared, and lines about those that cannot. Cells of another text stay empty.
    """
    why, texts, lines = {}, {}, []
    for run in result["runs"]:
        if "values" in run:
            texts[run["task"]] = run["definition"]["text"]
    for run in committed["runs"]:
        if not why.get(run["label"]):
            try:
                why[run["label"]] = differs(run, entry, scale)
            except (ValueError, SystemExit) as e:  # a method or a task that is no more
                why[run["label"]] = str(e).removeprefix("error: ")
    for label, reason in why.items():
        if reason:
            lines.append(f"left out: the committed row {label}, of another definition ({reason})")
    kept, pythons = [], set()
    for run in committed["runs"]:
        text = run["definition"]["text"]
        if text != texts.get(run["task"], text) and "values" in run:
            pythons.add(run["environment"]["python"])
            run = run | dict(other_text=True)
        if not why[run["label"]]:
            kept.append(run)
    if pythons:
        lines.append("empty: the committed rows' cells of text, which is that of Python "
                     f"{', '.join(sorted(pythons))} as it was, and differs from yours")
    both = kept + result["runs"]
    return result | dict(cells=cells(result["columns"], both), runs=both), lines


def of_its_own(added, found):
    """In which settings of the backbone an added row is not as the others, in a line or none."""
    fields = runs.models()["nope"][0].GPTConfig.__dataclass_fields__
    names = [*(name for name in fields if name not in train.SHARED), "compile"]
    others = {run["task"]: run["config"] for run in reversed(found) if run["label"] != added}
    own = {}
    for run in found:
        if run["label"] == added and run["task"] in others:
            one, other = run["config"], others[run["task"]]
            own |= {name: one[name] for name in names if one[name] != other[name]}
    words = ", ".join(f"{name}={value}" for name, value in own.items())
    return [f"unlike the others {added} has {words}"] if words else []
