"""
The matrix: what can each one do?

Every method on every task, on one backbone: pre-norm, on the synthetic tasks with QK-norm. Each
task but text has a budget at which the methods that are best at it are done, or nearly.
"""
import statistics
from functools import partial

from lab import REPAIRS, Row, repaired, rows
from lab.tables import at, over

# A column's `read` gives a run's number: None where that length was not reached, NaN where it was
# and the number, which JSON then does not have, is not finite.


def perplexity(run, times):
    """In windows of so many times the training length."""
    return at(run, "perplexity", times * run["block_size"])


def strided_ratio(run, times):
    """
    Strided perplexity in windows of so many times the training length, divided by that in windows
    of the training length: less than 1 is what farther context is worth, more what it costs.
    """
    return over(run, "strided", times * run["block_size"], run["block_size"])


def percent_right(run, times, split, metric):
    """A score, in %, of no split the lowest of all; of an error, how many are without it."""
    by_split = run["scores"].get(str(times * run["block_size"]), {})
    rates = [by_split[name][metric]["value"] for name in by_split if split in ("", name)]
    return min((100 * (1 - y if metric.endswith("error") else y) for y in rates), default=None)


def beyond(run, metric, split):
    """The mean, beyond the training length, of what is known by position."""
    T = run["block_size"]
    by_position = run.get(metric, {}).get(str(T), {}).get(split, [])
    values = [y for y in by_position[T:] if y is not None]
    return statistics.mean(values) if values else None


def column(task, read, *asked, form=".1f", better="more", least=10, logarithmic=False):
    """
    A number of a task's runs. In the figure colours span its worst to its best, and `least` at
    least.
    """
    return dict(task=task, read=lambda run: read(run, *asked), form=form, better=better,
                least=least, logarithmic=logarithmic)


text = partial(column, "text", form=".2f", better="less", least=0.1, logarithmic=True)
distance = partial(column, form=".3f", better="less", least=0.05)

COLUMNS = {  # "what the task is called: what the number is"
    "text: perplexity": text(perplexity, 1),
    "text: at 16 x": text(perplexity, 16),
    "text: strided, 16 x / 1 x": text(strided_ratio, 16),
    "flip-flop: iid": column("flipflop", percent_right, 1, "iid", "exact_match"),
    "flip-flop: sparse": column("flipflop", percent_right, 1, "sparse", "exact_match"),
    "flip-flop: dense": column("flipflop", percent_right, 1, "dense", "exact_match"),
    "flip-flop: worst, 16 x": column("flipflop", percent_right, 16, "", "exact_match"),
    "copy: iid": column("selective_copy", percent_right, 1, "iid", "sequence_error"),
    "copy: sparse": column("selective_copy", percent_right, 1, "sparse", "sequence_error"),
    "counting: iid": column("counting", percent_right, 1, "iid", "answer_error"),
    "counting: passes, more": column("counting", percent_right, 1, "pass100", "answer_error"),
    "counting: passes, fewer": column("counting", percent_right, 1, "pass10", "answer_error"),
    "recall: iid": column("recall", percent_right, 1, "iid", "accuracy"),
    "recall: at 16 x": column("recall", percent_right, 16, "iid", "accuracy"),
    "set complement: TVD": distance("set_complement", beyond, "tvd", "full"),
    "Dyck: TVD": distance("dyck", beyond, "tvd", "long"),
    "Dyck: AUC": distance("dyck", beyond, "auc", "long", better="more"),
}

ROWS = rows(1, "nope", "learned", "rope", "alibi", "kerple", "relative", "cable", "cope", "tra",
            "fox", "diff", "stick", "path", "ssmax")
ROWS |= {"peri": Row("--model perinorm --norm peri --pe rope")} | repaired(1, "window", "yarn")
# every task but text has two layers
ROWS |= {"rope_nope": Row("--model rope_nope --nope_every 2")}


def task(name, train, evaluate, steps):
    """Five validations: the last fifth says whether it is done."""
    return dict(train=f"--data {name} --max_iters {steps} --eval_interval {steps // 5} {train}",
                eval=evaluate)


QK, PLAIN = "--norm pre --qk_norm", "--norm pre --no-qk_norm"
TASKS = dict(
    text=task("stdlib", f"--size nano {PLAIN}", "--tokens 65536 --lengths 256 1024 4096 --strided",
              750),
    flipflop=task("flipflop", QK, "--sequences 500 --lengths 64 1024", 1000),
    selective_copy=task("selective_copy", QK, "--sequences 1000", 2000),
    counting=task("counting", QK, "--sequences 2000", 1000),
    recall=task("recall", QK, "--sequences 1000 --lengths 64 1024", 500),
    set_complement=task("set_complement", f"{QK} --n 16 --block_size 4", "--sequences 1000", 2000),
    dyck=task("dyck", QK, "--sequences 1000", 1000))

# recall in three seeds, and those that its rate of 3e-3 does not teach it in time, or not all of it
RECALL = {label: row._replace(seeds=3) for label, row in ROWS.items() if label != "learned"}
RECALL |= rows(3, "ssmax_ln")
RATES = {f"{name}, {rate}": Row(f"--model {name} --learning_rate {rate}", 3)
         for name in ("fox", "stick", "kerple", "tra") for rate in ("1e-3", "1e-2")}
SCALED = {f"{name}, scaled": Row(f"--model {name}_qk_scale", 3)
          for name in ("nope", "cable", "alibi", "tra")}
OPEN = {f"{name} open, {rate}": Row(f"--model {name} --gate_bias 4 --learning_rate {rate}", 3)
        for name in ("fox", "stick") for rate in ("1e-3", "3e-3", "1e-2")}
# at two layers and 64 tokens: one layer of two without positions, a window of a quarter
MIXED = {"rope_nope": Row("--model rope_nope --nope_every 2 --window 16", 3),
         "rope_nope, no window": Row("--model rope_nope --nope_every 2 --window 0", 3),
         "rope_window": Row("--model rope_window --window 16", 3)}
LONGER = "--block_size 256"
FAR = "--sequences 1000 --lengths 64 128 256 512 1024"


def four_times(steps):
    more = f"--max_iters {4 * steps} --eval_interval {4 * steps // 5}"
    return {"rope_nope x4": Row(f"{MIXED['rope_nope'].train} {more}", 3)}


def trained_on():
    table = {row: Row(f"--model {row} {LONGER}", 3, begins_with=row)
             for row in ("cable", "alibi", "rope")}
    for repair in ("pi", "yarn"):
        table[f"rope, {repair}"] = Row(
            f"--model rope --repair {repair} --original_length 64 {LONGER}", 3, begins_with="rope")
    return table


ENTRIES = {
    "matrix": dict(
        title="What can each one do? Every method on every task",
        columns=COLUMNS, cpu=dict(tasks=TASKS, rows=ROWS)),
    "recall": dict(
        title="Recall: one of eight pairs is asked for at the end of more and more filler. Right "
              "answers (%), trained on 64 tokens",
        columns=[("64", "iid", "accuracy")],
        cpu=task("recall", QK, FAR, 500) | dict(rows=RECALL | MIXED | RATES | OPEN | SCALED)),
    # QK-norm bounds the logits, and so how sharp attention can be among many keys
    "recall_no_qk_norm": dict(
        title="Recall without QK-norm. Right answers (%), trained on 64 tokens",
        columns=[("64", "iid", "accuracy")], plotted_against="lm",
        cpu=task("recall", PLAIN, FAR, 500) | dict(
            rows=RECALL | MIXED | four_times(500) | RATES | OPEN | repaired(3, *REPAIRS))),
    "recall_trained_on": dict(
        title="Recall, trained on at a greater length: 100 steps in strings of 256 tokens after "
              "500 in strings of 64. Right answers (%)",
        columns=[("64", "iid", "accuracy")], begins_with="recall_no_qk_norm",
        cpu=task("recall", PLAIN, FAR, 100) | dict(rows=trained_on())),
    "flipflop_rope": dict(
        title="Flip-flop by RoPE: as it is, repaired at test time, mixed with a layer without "
              "positions. Exact match (%), trained on 64 tokens",
        columns=[(split, split, "exact_match") for split in ("iid", "dense", "sparse")],
        cpu=TASKS["flipflop"] | dict(
            train=TASKS["flipflop"]["train"].replace(QK, PLAIN),
            rows=rows(3, "rope") | MIXED | four_times(1000) | repaired(3, *REPAIRS))),
}
