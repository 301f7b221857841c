"""The tables of a random search: medians, best trials and sign tests."""
import math
import statistics

from experiments.tables import markdown

CONTROL = "pre_final"  # pre-norm with an ordinary final norm, as GPT-2 has it


def search_tables(result):
    """
    The dots of a random search, a table for each panel: median and best of every scheme, of the
    last weights and of their averages, and in how many of their shared trials it is better than the
    first, and than the control, if there is one; of a search with EMA, also how often an average is
    better.
    """
    metric, texts = result["metric"], []
    schemes = list(result["panels"][0]["schemes"])
    references = [schemes[0]] + [CONTROL] * schemes[1:].count(CONTROL)
    for panel in result["panels"]:
        a, b = panel["at"]
        where = f"{panel['name']}, at {a:,}" + (f" to {b:,}" if b > a else "")
        name = dict(tvd="TVD", auc="AUC").get(metric, metric)
        trials = {scheme: found["trials"] for scheme, found in panel["schemes"].items()}
        rows = [cells_of(scheme, trials, metric, references) for scheme in trials]
        texts.append((f"{name}, {where}:", markdown(rows[0], [row.values() for row in rows])))
    if "theorem" in result:
        texts.append(theorem_table(result["theorem"]))
    said = (f"Better than {' and '.join(references)}: in so many of the shared trials (the same "
            "hyper-parameters and initial weights; raw weights; without ties and without trials of "
            "which one has diverged); p by a two-sided sign test, not corrected for the number of "
            "tests here.")
    return [*texts, (said, "")]


def cells_of(name, trials, metric, references):
    """{heading: cell} of one scheme; trials of every one."""
    mine = trials[name]
    averages = list(mine[0][metric])[1:]  # after the last weights, raw
    cells = dict(scheme=name, trials=len(mine))
    cells["diverged"] = sum(not trial["finite"] for trial in mine)
    for weights in ("raw", *averages):
        values = [trial[metric][weights]["test"] for trial in mine]
        values = [y for y in values if y is not None]
        best = best_trial(mine, metric, weights)
        of = "" if weights == "raw" else f", {weights.upper()}"
        cells[f"median{of}"] = f"{statistics.median(values):.4f}" if values else "-"
        cells[f"best{of}"] = "-" if best is None else f"{best:.4f}"
    for other in references:
        cell = sign_cell(mine, trials[other], metric)
        cells[f"better than {other}"] = "-" if other == name else cell
    for weights in averages:
        if "ema" in averages:
            cell = sign_cell(mine, mine, metric, weights)
            cells[f"{weights.upper()} better than without"] = cell
    if metric == "tvd":  # a distance: how many times smaller?
        ours, theirs = (best_trial(trials[s], "tvd", "raw") for s in (name, references[0]))
        cells[f"best / {references[0]}'s best"] = (
            f"{ours / theirs:.2f}" if ours and theirs else "-")
    return cells


def best_trial(trials, metric, weights):
    """Of the trial that is best on the validation sequences; None where every one has diverged."""
    sign, numbers = 1 if metric == "tvd" else -1, []
    for trial in trials:
        scores = trial[metric][weights]
        if None not in (scores["validation"], scores["test"]):
            numbers.append((sign * scores["validation"], scores["test"]))
    return min(numbers, key=lambda pair: pair[0])[1] if numbers else None


def sign_test(pairs):
    """
    (ours, theirs) of trials that two schemes share, where less is better -> how often ours is less,
    of how many, and the probability of a split as uneven as this one or more, were both sides
    equally likely: exact, two-sided. Ties, and trials of which either has diverged, are left out.
    """
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None and a != b]
    wins, n = sum(a < b for a, b in pairs), len(pairs)
    tail = sum(math.comb(n, k) for k in range(min(wins, n - wins) + 1))
    return wins, n, min(1.0, 2 * tail / 2**n)


def sign_cell(trials, reference, metric, weights="raw"):
    """Wins over another scheme's raw weights and their p, by the test number: trial by trial."""
    sign, pairs = 1 if metric == "tvd" else -1, []
    for ours, theirs in zip(trials, reference):
        both = ours[metric][weights]["test"], theirs[metric]["raw"]["test"]
        pairs.append([None if y is None else sign * y for y in both])
    wins, n, p = sign_test(pairs)
    return f"{wins} of {n}, p = {p:.2g}"


def theorem_table(theorem):
    n = theorem["n"]
    lengths, rows = [length for length in (2, 8, 32, n - 1) if length < n], []
    for norm, m in theorem["models"].items():
        cells = [f"{m['precision'][T - 2]:.2f} ({m['tvd'][T - 2]:.3f})" for T in lengths]
        far = max(abs(a - b) for a, b in zip(m["formula"], m["precision"]))
        rows.append([norm, *cells, f"{far:.1e}"])
    return (f"Hard-coded models, n = {n}, precision (TVD) at length:",
            markdown(["norm", *lengths, "largest difference from the formula"], rows))
