"""
The matrix: what can each one do?

Every method on every task, on one backbone: pre-norm, on the synthetic tasks with QK-norm. Each
task but text has a budget at which the methods that are best at it are done, or nearly.
"""
import math
import statistics

from common.files import fail
from common.names import is_encoder, models
from experiments import Row, repaired, rows

FALLS = 0.01  # nats; a run whose validation loss fell by more in its last fifth is not done


# -----------------------------------------------------------------------------
# how a cell's number is read from eval.py's row of a run: None where that length was not reached,
# NaN where it was and the number is not finite, which JSON does not know

def perplexity(run, times, measure="perplexity"):
    """In windows of so many times the training length."""
    value = run[measure].get(str(times * run["block_size"]), "not reached")
    return math.nan if value is None else None if value == "not reached" else value


def reading(run, times):
    """
    Strided perplexity in windows of so many times the training length, divided by that in windows
    of the training length: less than 1 is what farther context is worth, more what it costs.
    """
    near, far = (perplexity(run, n, "strided") for n in (1, times))
    return far / near if near and far else None


def percent(run, times, split, metric):
    """A score, in %; of an error, how many are without it."""
    scores = run["scores"].get(str(times * run["block_size"]), {})
    if split not in scores:
        return None
    value = 100 * scores[split][metric]["value"]
    return 100 - value if metric.endswith("error") else value


def worst(run, times, metric):
    """The lowest score of all test sets, in %."""
    scores = run["scores"].get(str(times * run["block_size"]), {})
    return min((percent(run, times, split, metric) for split in scores), default=None)


def beyond(run, metric, split):
    """The mean, beyond the training length, of what is known by position."""
    T = run["block_size"]
    by_position = run.get(metric, {}).get(str(T), {}).get(split, [])
    values = [y for y in by_position[T:] if y is not None]
    return statistics.mean(values) if values else None


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

ROWS = rows(1, "nope", "learned", "rope", "alibi", "kerple", "relative", "cable", "cope", "tra",
            "fox", "diff", "stick", "path", "path_fox", "ssmax") | {
    "peri": Row("--model perinorm --norm peri --pe rope")}
ROWS |= repaired(1, "window", "yarn")


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

# those that recall's rate of 3e-3 does not teach it in time
SLOW = {f"{name}, {rate}": Row(f"--model {name} --learning_rate {rate}")
        for name in ("fox", "stick", "path_fox") for rate in ("1e-3", "1e-2")}
LONGER = "--sequences 1000 --lengths 64 128 256 512 1024"
ASKED = {label: row._replace(seeds=3) for label, row in ROWS.items() if label != "learned"}
ASKED |= rows(3, "ssmax_ln")

ENTRIES = {
    "matrix": dict(
        title="What can each one do? Every method on every task",
        columns=COLUMNS,
        cpu=dict(minutes=4, tasks=TASKS, rows=ROWS)),
    "recall": dict(
        title="Recall: one of eight pairs is asked for at the end of more and more filler. Right "
              "answers (%), trained on 64 tokens",
        columns=[("64", "iid", "accuracy")],
        cpu=task("recall", QK, LONGER, 500) | dict(minutes=1, rows=ASKED | SLOW)),
    # QK-norm bounds the logits, and so how sharp attention can be among many keys
    "recall_no_qk_norm": dict(
        title="Recall without QK-norm. Right answers (%), trained on 64 tokens",
        columns=[("64", "iid", "accuracy")], beside="lm",
        cpu=task("recall", "--norm pre --no-qk_norm", LONGER, 500)
        | dict(minutes=1, rows=ASKED)),
}


# -----------------------------------------------------------------------------
# cells

def values_of(columns, task, run):
    """eval.py's row of a run -> {column: its number or None}"""
    values = {}
    for name, column in columns.items():
        if column["task"] == task:
            function, *asked = column["read"]
            values[name] = function(run, *asked)
    return values


def cells_of(columns, runs):
    """The columns as they are shown, and {row: {column: dict(value, ...) or dict(reason)}}"""
    shown, cells = {}, {}
    for name, column in columns.items():
        function = column["read"][0]
        shown[name] = {key: column[key] for key in ("task", "better", "form", "least")}
        shown[name] |= dict(logarithmic=function in LOGARITHMIC, percent=function in PERCENT)
    for label in dict.fromkeys(run["label"] for run in runs):
        cells[label] = {}
        for name, column in columns.items():
            seeds = [run for run in runs
                     if (run["label"], run["task"]) == (label, column["task"])]
            cells[label][name] = cell(name, seeds)
    return dict(columns=shown, cells=cells)


def cell(name, seeds):
    """One row's runs of one task -> mean and spread over their seeds, or why there is none."""
    for run in seeds:
        if "reason" in run:
            return dict(reason=run["reason"])
    values = [run["values"][name] for run in seeds if name in run["values"]]
    if not values:
        return dict(reason="not run")
    if None in values:
        return dict(reason="not finite" if any("not_finite" in run for run in seeds) else "ends")
    falls = max(run["fell"] or 0 for run in seeds) > FALLS
    said = dict(value=statistics.mean(values), unfinished=falls)
    return said | (dict(spread=statistics.stdev(values)) if len(values) > 1 else {})


def with_row(name, scale):
    """A matrix' scale with the row of one more model alone. What cannot be added ends here."""
    module, variant = models()[name]
    if is_encoder(module.GPT):
        fail(f"{name} is an encoder, and the matrix is of causal models")
    if name in scale["rows"]:
        fail(f"{name} is in the matrix already")
    flags = f"--model {name}"
    for field, value in variant.items():  # what the name means goes before what a task asks of all
        switch = f"--{field}" if value else f"--no-{field}"
        flags += " " + (switch if isinstance(value, bool) else f"--{field} {value}")
    return scale | dict(rows={name: Row(flags)})
