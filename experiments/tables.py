"""
A table: rows of runs, and columns of (heading, function of a row's runs -> its cell).

    runs_of(table)          the runs that are there
    tables_of(table, runs)  [(caption, Markdown), ...] of them
    tables_in(result)       the same of one JSON that eval.py or kernels/bench.py wrote

± is the standard deviation over seeds. Rates may be all or nothing: after their mean the lowest and
the highest seed stand in (round) brackets, if they differ. A row of one seed has no spread, or in
[square] brackets the 95 % interval of its test sequences.
"""
import json
import math
import statistics
import sys
from functools import partial

from common.files import ROOT, fail, nearest
from experiments import published, slug


def tables_of(table, runs):
    entry, part = table.entry, table.part
    numbers = published().get(entry.get("published", table.name), {})
    if not runs:
        return []
    if "panels" in part:
        return search_tables(entry["metric"], runs)
    if "losses" in entry:
        return [losses_table(runs)]
    if "tasks" in part:
        return [matrix_table(entry["columns"], runs)]
    if "scores" in runs[0]:
        return [task_table(entry.get("columns", ()), runs, numbers)]
    if "search" in runs[0]:
        return retrieval_tables(runs, numbers)
    texts = text_tables(runs, numbers, part.get("published_at", ()))
    return texts + ([papers_table(entry["papers"], runs)] if "papers" in entry else [])


def tables_in(result):
    if "runs" in result:
        return text_tables([result | run for run in result["runs"]], {}, ())
    by_model = {k: result[k] for k in ("train", "decode", "generate") if k in result}
    texts = [("", speed_table(by_model))] if by_model else []
    return texts + [("", attention_table(result[k])) for k in ("attention", "gpu") if k in result]


# -----------------------------------------------------------------------------
# reading: a table is what its folder holds

def read_run(path):
    """A run's JSON; None where there is none, or a damaged one, which is said."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if "schemes" in result or "models" in result or result["runs"][0]["label"]:
            return result
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError):  # cut off, or another JSON
        pass
    print(f"warning: {path} is damaged; the command of its table makes it anew", file=sys.stderr)


def runs_of(table, added=()):
    """
    The runs that are there, in the order of the entry's rows, then of those added, of tasks and of
    seeds; each with what its file says of the evaluation. Of a random search its panels.
    """
    if "panels" in table.part:
        return panels_of(table)
    rows, tasks, runs = [*table.part["rows"], *added], [*table.part.get("tasks", [None])], []
    paths = list(table.runs.rglob("*.json"))
    if added:
        paths += (ROOT / table.added / "runs").rglob("*.json")
    for path in sorted(paths):
        result = read_run(path) or dict(runs=[])
        runs += [result | run for run in result["runs"]
                 if run["label"] in rows and run.get("task") in tasks]
    runs.sort(key=lambda run: (rows.index(run["label"]), tasks.index(run.get("task")),
                               run["seed"]))
    return of_one_text(runs, added, table)


def of_one_text(runs, added, table):
    """All of one text, and those of no text; of several texts the added rows' counts, or none."""
    texts = {}
    for run in [run for run in runs if "sha256" in run["data"]]:
        texts.setdefault(run["data"]["sha256"], set()).add(run["label"])
    mine = [text for text, labels in texts.items() if labels & set(added)]
    if len(texts) < 2:
        return runs
    if len(mine) != 1:
        folder = table.added if added else table.runs.relative_to(ROOT)
        fail(f"{folder} has runs of several texts, sha256 {', '.join(texts)}: move away all but "
             "one's")
    print(f"the other rows are of another text than {' and '.join(added)}, and left out there")
    return [run for run in runs if run["data"].get("sha256") in (None, mine[0])]


def panels_of(table):
    """A random search's panels, with the entry's schemes, and last its hard-coded models."""
    shown = []
    for words in [*table.part["panels"], "theorem"]:
        panel = read_run(table.runs / f"{slug(words)}.json")
        if panel and "schemes" in panel:
            there = [scheme for scheme in table.entry["schemes"] if scheme in panel["schemes"]]
            panel["schemes"] = {scheme: panel["schemes"][scheme] for scheme in there}
        shown += [panel] if panel else []
    return shown


# -----------------------------------------------------------------------------
# rows and cells

def markdown(head, rows):
    lines = []
    for cells in (head, *rows):
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def grouped(runs):
    """{row: its runs}, in the order they come."""
    groups = {}
    for run in runs:
        groups.setdefault(run["label"] if "label" in run else run["model"], []).append(run)
    return groups


def by_row(runs, columns, key=None, more=(), heads=("model", "seeds")):
    """A row for each label, sorted by key, if there is one, then more rows."""
    rows = [[label, len(same), *(cell(same) for _, cell in columns)]
            for label, same in grouped(runs).items()]
    rows = sorted(rows, key=key) if key else rows
    return markdown([*heads, *(head for head, _ in columns)], [*rows, *more])


def number(read, form, runs):
    """Mean ± standard deviation of what is read of each run, of those that have it."""
    return spread([y for y in map(read, runs) if y is not None], form)


def mean_of(read, form, runs):
    return number(read, form, runs).partition(" ± ")[0]


def spread(values, form):
    """Mean ± standard deviation; a dash where there is nothing."""
    if not values:
        return "-"
    text = format(statistics.mean(values), form)
    if len(values) > 1:
        finite = all(map(math.isfinite, values))
        text += f" ± {statistics.stdev(values) if finite else math.nan:{form}}"
    return text


def percent(rates):
    """Rates {value, low, high} of seeds, or of one seed with its interval -> in %."""
    if not rates:
        return "-"

    def shown(y):
        return f"{100 * y:.0f}" if y in (0, 1) else f"{100 * y:.2f}"
    values = [rate["value"] for rate in rates]
    low, mean, high = map(shown, (min(values), statistics.mean(values), max(values)))
    if len(rates) == 1:
        return f"{mean} [{shown(rates[0]['low'])}, {shown(rates[0]['high'])}]"
    return mean if low == high else f"{mean} ({low} to {high})"


def of_paper(numbers, n, runs, form=".2f"):
    """The paper's n-th number of a row, or mean and standard deviation."""
    theirs = numbers.get(runs[0]["label"], ())
    return in_paper(theirs[n], form) if n < len(theirs) else "-"


def in_paper(number, form=".2f"):
    if number is None:
        return "-"
    both = number if isinstance(number, list) else [number]
    return " ± ".join(format(y, form) for y in both)


# -----------------------------------------------------------------------------
# text: perplexity by window length

def at(measure, n, run):
    """In windows of n tokens: None where they were not read, NaN where JSON has null."""
    values = run.get(measure, {})
    if str(n) in values:
        return math.nan if values[str(n)] is None else values[str(n)]


def over(measure, last, first, run):
    """Perplexity in windows of `last` over that in windows of `first`."""
    near, far = at(measure, first, run), at(measure, last, run)
    return None if None in (near, far) else far / near


def by_length(measure, lengths, form=".3f"):
    return [(f"{n:,}", partial(number, partial(at, measure, n), form)) for n in lengths]


def text_tables(runs, numbers, published_at):
    """
    Perplexity by window length, the paper's beside it where its model was read at the same length
    after the same training; bits per byte of words; strided; and of what comes a second time.
    """
    lengths, T = sorted({n for run in runs for n in run["lengths"]}), runs[0]["block_size"]
    columns = by_length("perplexity", lengths) + quotients("perplexity", lengths, [T])
    for k, n in enumerate(published_at):
        columns.append((f"paper, {n:,}", partial(of_paper, numbers, k)))
    ratios = {label: [ys[5] / ys[1]] for label, ys in numbers.items() if len(ys) > 5}
    if ratios:  # CABLE's Table 1
        columns.append(("paper: 15,360 / 1,024", partial(of_paper, ratios, 0, form=".3f")))
    texts = [("", by_row(runs, columns))]
    if "bits_per_byte" in runs[0]:  # of words: perplexities of other tokens differ
        texts.append(("Bits per byte:", by_row(runs, by_length("bits_per_byte", lengths, ".4f"))))
    for measure, table in dict(strided=strided_table, again=again_table).items():
        have = [run for run in runs if measure in run]
        if have:
            texts.append(table(have, lengths))
    return texts


def quotients(measure, lengths, bases):
    """The perplexity in the longest windows over that in windows of each of these lengths."""
    *shorter, last = lengths
    return [(f"{last:,} / {n:,}", partial(mean_of, partial(over, measure, last, n), ".3f"))
            for n in bases if n in shorter]


def strided_table(runs, lengths):
    """Does it use what it sees?"""
    T, last = runs[0]["block_size"], lengths[-1]
    gains = quotients("strided", lengths, [T, 2 * T])

    def gain(cells):
        cell = cells[-len(gains)] if gains else "-"  # these come last
        return math.inf if cell in ("-", "nan") else float(cell)
    text = ("Strided: windows that overlap by half, of which only the second half is scored, "
            f"{runs[0]['strided_tokens']:,} tokens, the same at every length: each has at least "
            "half a window to look back on.")
    if len(gains) > 1:
        text += (f" From windows of {2 * T:,} on that is all the {T:,} tokens of a training "
                 f"window, or more. The rows are sorted by {last:,} / {T:,}.")
    return text, by_row(runs, by_length("strided", lengths) + gains, key=gain)


def again_table(runs, _):
    """Does it copy?"""
    def gain_at(gap, runs):
        gains = [run["again"][gap] for run in runs if gap in run["again"]]
        if len(gains) == 1:
            return "{:.3f} [{:.3f}, {:.3f}]".format(*gains[0])
        return spread([gain for gain, _, _ in gains], ".3f")
    gaps = dict.fromkeys(gap for run in runs for gap in run["again"])
    columns = [(f"after {int(gap):,}", partial(gain_at, gap)) for gap in gaps]
    size = runs[0]["block_size"] // 4
    return (f"A passage again: {size} tokens come a second time, after so many others. By how many "
            "nats a token they are cheaper; of one seed with a 95 % interval over 64 passages."
            ), by_row(runs, columns)


def papers_table(papers, runs):
    """Perplexities at the training length and the longest, beside those of several papers."""
    columns = {}
    for heading, (entry, n, words) in papers.items():
        numbers = published()[entry]
        columns[heading] = {row: in_paper(ys[n]) for row, ys in numbers.items() if n < len(ys)}
        columns[heading] |= words
    T, *_, last = sorted({n for run in runs for n in run["lengths"]})
    rows, asked = [], by_length("perplexity", (T, last)) + by_length("strided", (last,))
    for label, same in grouped(runs).items():
        if any(label in column for column in columns.values()):
            theirs = [column.get(label, "-") for column in columns.values()]
            rows.append([label, *(cell(same) for _, cell in asked), *theirs])
    return ("Our rows beside the papers' numbers: other models, trained on other texts.",
            markdown(["row", f"{T:,}", f"{last:,}", f"{last:,}, strided", *columns], rows))


def losses_table(runs):
    """The loss by step: a quarter, half, and all of the training, and at its end the validation."""
    last, columns = runs[0]["iter"], []

    def until(share, run):
        part = [y for it, y in run["loss"] if (share - 0.1) * last < it <= share * last]
        return statistics.mean(part) if part else None
    for share in (0.25, 0.5, 1):
        columns.append((f"training, up to step {int(share * last):,}",
                        partial(number, partial(until, share), ".3f")))
    columns.append(("validation", partial(number, lambda run: run["val_loss"][-1][1], ".3f")))
    return "", by_row(runs, columns)


# -----------------------------------------------------------------------------
# search: nDCG by the length of documents

def retrieval_tables(runs, numbers):
    """nDCG@10 in % by the length that documents are cut to, and by how much rows differ."""
    lengths, T, bm25 = runs[0]["lengths"], runs[0]["block_size"], runs[0]["search"]["bm25"]
    heads = {str(n): f"{n:,} ({n // T}x)" for n in lengths}

    def found(reading, n, runs):
        searches = [run["search"][reading] for run in runs]
        return percent([by[n]["ndcg@10"] for by in searches if n in by])

    others = [["BM25", "-", *(percent([bm25[n]["ndcg@10"]]) for n in heads)]]
    for label in grouped(runs):
        if label in numbers:
            theirs = [f"{y:.2f}" for y in numbers[label]]
            others.append([f"{label}, in the paper (MLDR, 512 tokens)", "-", *theirs,
                           *["-"] * (len(lengths) - len(theirs))])
    texts = []
    for reading, words, more in (("whole", ", documents read as a whole:", others),
                                 ("windows", f" by a document's best window of {T} tokens:", ())):
        columns = [(head, partial(found, reading, n)) for n, head in heads.items()]
        texts.append((f"nDCG@10{words}", by_row(runs, columns, more=more)))
    return [*texts, *paired_table(runs, heads)]


def paired_table(runs, heads):
    """By how much the rows differ from the first over the same queries, documents read whole."""
    import numpy as np

    from encoders.scoring import bootstrap, ndcg  # and torch, which all other tables do without
    means = {}
    for label, same in grouped(runs).items():
        places = [run["places"] for run in same if heads.keys() <= run["places"].keys()]
        if places:
            means[label] = {n: np.mean([ndcg(np.array(p[n])) for p in places], 0) for n in heads}
    first, rows = runs[0]["label"], []
    for label in [label for label in means if first in means and label != first]:
        cells = []
        for n in heads:
            apart = 100 * (means[label][n] - means[first][n])
            low, high = bootstrap(apart, np.array(runs[0]["answers"]))
            interval = f" [{low:.1f}, {high:.1f}]" if math.isfinite(low) else ""
            cells.append(f"{apart.mean():.1f}{interval}")
        rows.append([f"{label} - {first}", *cells])
    if rows:
        yield (f"nDCG@10 of documents read as a whole, minus {first}'s over the same queries, "
               "means of each row's seeds, with 95 % intervals over documents (other seeds would "
               "add to them):", markdown(["difference", *heads.values()], rows))


# -----------------------------------------------------------------------------
# tasks: rates, and the matrix

def task_table(columns, runs, numbers):
    """Rates in %, beside the paper's."""
    first, *longer = runs[0]["scores"]  # the lengths; the paper has the first alone
    have = [f"{split} {metric}" for split, by in runs[0]["scores"][first].items() for metric in by]
    if not columns:
        fail(f"a task's entry needs columns, of {', '.join(have)}")
    heads = []
    for n, (name, split, metric) in enumerate(columns):
        if f"{split} {metric}" not in have:
            asked = f"{split} {metric}"
            fail(f"column {name!r}: there is no {asked}: {nearest(asked, have)}")
        heads.append((name, partial(rate, first, split, metric)))
        if numbers:
            heads.append(("paper", partial(of_paper, numbers, n, form="g")))
        for T in longer:
            head = f"{int(T):,}" if name == first else f"{name} {int(T):,}"
            heads.append((head, partial(rate, T, split, metric)))
    return "", by_row(runs, heads)


def rate(T, split, metric, runs):
    scores = [run["scores"].get(T, {}).get(split, {}) for run in runs]
    return percent([score[metric] for score in scores if metric in score])


NOTES = ("Ends: the method has no positions for strings of that length. Not finite: the loss or "
         "the logits were NaN or infinite.")


def matrix_table(columns, runs):
    """A row for each method, a column for each number."""
    rows = []
    for label, same in grouped(runs).items():
        rows.append([label])
        for name, column in columns.items():
            values = values_of(name, column, same)
            rows[-1].append(missing(values) or spread(values, column["form"]))
    return "", markdown(["method", *columns], rows) + f"\n\n{NOTES}"


def values_of(name, column, runs):
    """A matrix' number of each of a row's runs of that task; older files have it, and no more."""
    runs = [run for run in runs if run.get("task") == column["task"]]
    return [run["values"][name] if "values" in run else column["read"](run) for run in runs]


def missing(values):
    """Why a row has no number, or "": numbers are None where a method ends."""
    if any(y is not None and math.isnan(y) for y in values):
        return "not finite"
    if None in values:
        return "ends"
    return "" if values else "not run"


# -----------------------------------------------------------------------------
# random searches: medians, best trials and sign tests

CONTROL = "pre_final"  # pre-norm with an ordinary final norm, as GPT-2 has it


def search_tables(metric, panels):
    """
    A table for each panel: median and best of every scheme, of the last weights and of their
    averages, and in how many of their shared trials it is better than the first, and than the
    control, if there is one; of a search with EMA, also how often an average is better.
    """
    schemes, texts = list(panels[0]["schemes"]), []
    references = [schemes[0]] + [CONTROL] * schemes[1:].count(CONTROL)
    name = metric if metric in ("precision", "accuracy") else metric.upper()
    for panel in panels:
        if "models" in panel:
            texts.append(theorem_table(panel))
            continue
        a, b = panel["at"]
        where = f"{panel['name']}, at {a:,}" + (f" to {b:,}" if b > a else "")
        texts.append((f"{name}, {where}:", panel_table(metric, panel["schemes"], references)))
    said = (f"Better than {' and '.join(references)}: in so many of the shared trials (the same "
            "hyper-parameters and initial weights; raw weights; without ties and without trials of "
            "which one has diverged); p by a two-sided sign test, not corrected for the number of "
            "tests here.")
    return [*texts, (said, "")]


def panel_table(metric, schemes, references):
    trials = {scheme: found["trials"] for scheme, found in schemes.items()}
    runs = [trial | dict(label=scheme) for scheme in trials for trial in trials[scheme]]
    averages = list(runs[0][metric])[1:]  # after the last weights, raw
    columns = [("diverged", lambda mine: sum(not trial["finite"] for trial in mine))]
    for weights in ("raw", *averages):
        of = "" if weights == "raw" else f", {weights.upper()}"
        columns.append((f"median{of}", partial(median_of, metric, weights)))
        columns.append((f"best{of}", partial(best_of, metric, weights)))
    for other in references:
        columns.append((f"better than {other}", partial(sign_cell, metric, trials[other], other)))
    for weights in averages if "ema" in averages else ():
        columns.append((f"{weights.upper()} better than without",
                        partial(sign_cell, metric, None, "", weights=weights)))
    if metric == "tvd":  # a distance: how many times smaller?
        first = best_trial(trials[references[0]], metric, "raw")
        columns.append((f"best / {references[0]}'s best", partial(best_over, metric, first)))
    return by_row(runs, columns, heads=("scheme", "trials"))


def median_of(metric, weights, trials):
    values = [trial[metric][weights]["test"] for trial in trials]
    values = [y for y in values if y is not None]
    return f"{statistics.median(values):.4f}" if values else "-"


def best_of(metric, weights, trials):
    best = best_trial(trials, metric, weights)
    return f"{best['test']:.4f}" if best else "-"


def best_over(metric, other, trials):
    best = best_trial(trials, metric, "raw")
    return f"{best['test'] / other['test']:.2f}" if best and other else "-"


def best_trial(trials, metric, weights):
    """The scores of the trial that is best in validation; None where every one has diverged."""
    sign, scores = 1 if metric == "tvd" else -1, [trial[metric][weights] for trial in trials]
    scores = [score for score in scores if None not in (score["validation"], score["test"])]
    return min(scores, key=lambda score: sign * score["validation"], default=None)


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


def sign_cell(metric, reference, name, trials, weights="raw"):
    """Wins over a reference's raw weights (by default its own) and their p, trial by trial."""
    if trials[0]["label"] == name:
        return "-"
    pairs = []
    for ours, theirs in zip(trials, reference or trials):
        pairs.append((ours[metric][weights]["test"], theirs[metric]["raw"]["test"]))
    if metric != "tvd":  # more is better
        pairs = [(b, a) for a, b in pairs]
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


# -----------------------------------------------------------------------------
# speed: what kernels/bench.py measures

HEADS = dict(tok_s="tok/s in training", of_nope="of nope's", ms="ms a decoded token",
             times_nope="times nope's", cached_s="s with the cache", uncached_s="s without",
             times_faster="times as long without")


def speed_table(measured):
    """{what was measured: {model: {what: number}}} -> a row for each model."""
    heads, rows = [], {}
    for by_model in measured.values():
        heads += next(iter(by_model.values()))
        for model, numbers in by_model.items():
            rows.setdefault(model, {}).update(numbers)
    lines = []
    for model, numbers in rows.items():
        cells = [numbers.get(name) for name in heads]
        lines.append([model, *("-" if y is None else f"{y:,}" if isinstance(y, int) else f"{y:.2f}"
                               for y in cells)])
    return markdown(["model", *(HEADS.get(name, name) for name in heads)], lines)


def attention_table(by_length):
    """Time beside the first row's (scaled_dot_product_attention), and peak memory."""
    names = {name: None for rows in by_length.values() for name in rows}
    reference, heads, lines = next(iter(names)), [], {name: [name] for name in names}
    for T, rows in by_length.items():
        for way, words in dict(forward="forward", both="forward and backward").items():
            ms = rows[reference].get(f"{way}_ms")
            if ms is None:
                continue
            time = f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"
            heads.append(f"{words}, T = {int(T):,} ({reference}: {time} ms)")
            for name in names:
                lines[name].append(attention_cell(rows.get(name, {}), way, reference))
    return markdown([f"times {reference} (GB)", *heads], lines.values())


def attention_cell(row, way, reference):
    if f"{way}_ms" not in row:
        return "-"
    memory = f" ({row[f'{way}_GB']:.2f})" if f"{way}_GB" in row else ""
    return f"{row[f'{way}_of_{reference}']:.2f}{memory}"
