"""
The cells of the matrix: how a number is read from the JSON of a run (the columns are in
papers/matrix.py), seeds taken together, and a row that is added.

A function gives None where that length was not reached, and NaN where it was and the number is not
finite, which JSON does not know.
"""
import math
import statistics

from common.files import fail
from common.names import is_encoder, models
from experiments import Row


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


def values_of(columns, task, run):
    """eval.py's row of a run -> {column: its number or None}"""
    return {name: column["read"](run, *column["asked"]) for name, column in columns.items()
            if column["task"] == task}


def cells_of(columns, runs):
    """-> {row: {column: dict(value, ...) or dict(reason)}}"""
    table = {}
    for label in dict.fromkeys(run["label"] for run in runs):
        table[label] = {}
        for name, column in columns.items():
            seeds = [run for run in runs
                     if (run["label"], run["task"]) == (label, column["task"])]
            table[label][name] = cell(name, seeds)
    return table


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
    spread = dict(spread=statistics.stdev(values)) if len(values) > 1 else {}
    return dict(value=statistics.mean(values)) | spread


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
