"""
A table: rows of runs, and columns of (heading, function, words): function(a row's runs, *words) is
a cell.

    runs_of(table)          the runs that are there
    tables_of(table, runs)  [(caption, Markdown), ...] of them
    tables_in(result)       the same of one JSON that eval.py or kernels/bench.py wrote

± is the standard deviation over seeds. Rates may be all or nothing: after their mean the lowest
and the highest seed stand in (round) brackets, if they differ. A row of one seed has no spread, or
in [square] brackets the 95 % interval of its test sequences.
"""
import json
import math
import statistics
import sys

from common import ROOT
from common.exits import fail, nearest
from experiments import published, slug


def tables_of(table, runs):
    entry, part = table.entry, table.part
    numbers = published().get(entry.get("published", table.name), {})
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
    rows, tasks = [*table.part["rows"], *added], [*table.part.get("tasks", [None])]
    paths, runs = sorted(table.runs.rglob("*.json")), []
    if added:
        paths += sorted((ROOT / table.added / "runs").rglob("*.json"))
    for result in filter(None, map(read_run, paths)):
        run = result | result["runs"][0]
        if run["label"] in rows and run.get("task") in tasks:
            runs.append(run)
    runs.sort(key=lambda run: (rows.index(run["label"]), tasks.index(run.get("task")),
                               run["seed"]))
    return of_one_text(runs, added, table)


def of_one_text(runs, added, table):
    """All of one text, and those of no text; of several texts the added rows' counts, or none."""
    texts = texts_of(runs)
    mine = texts_of([run for run in runs if run["label"] in added])
    if len(texts) < 2:
        return runs
    if len(mine) != 1:
        folder = table.added if added else table.runs.relative_to(ROOT)
        fail(f"{folder} has runs of several texts, sha256 {', '.join(texts)}: move away all but "
             "one's")
    print(f"the other rows are of another text than {' and '.join(added)}, and left out there")
    return [run for run in runs if run["data"].get("sha256") in (None, *mine)]


def texts_of(runs):
    """The sha256 of each text, in the order they come."""
    return list(dict.fromkeys(run["data"]["sha256"] for run in runs if "sha256" in run["data"]))


def panels_of(table):
    """A random search's panels, with the entry's schemes, and last its hard-coded models."""
    shown, theorem = [], read_run(table.runs / "theorem.json")
    for words in table.part["panels"]:
        panel = read_run(table.runs / f"{slug(words)}.json") or dict(schemes={})
        there = [scheme for scheme in table.entry["schemes"] if scheme in panel["schemes"]]
        if there:
            shown.append(panel | dict(schemes={s: panel["schemes"][s] for s in there}))
    return shown + ([theorem] if shown and theorem else [])


# -----------------------------------------------------------------------------
# rows and cells

def markdown(head, rows):
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def grouped(runs):
    """{row: its runs}, in the order they come."""
    groups = {}
    for run in runs:
        groups.setdefault(run.get("label") or run["model"], []).append(run)
    return groups


def by_row(runs, columns, key=None, more=()):
    """A row for each label, sorted by key, if there is one, then more rows."""
    rows = []
    for label, same in grouped(runs).items():
        cells = [cell(same, *words) for _, cell, *words in columns]
        rows.append([label, len(same), *cells])
    rows = sorted(rows, key=key) if key else rows
    return markdown(["model", "seeds", *(column[0] for column in columns)], [*rows, *more])


def number(runs, form, read, *words):
    """Mean ± standard deviation of what is read of each run, of those that have it."""
    values = [read(run, *words) for run in runs]
    return spread([y for y in values if y is not None], form)


def mean_of(runs, *words):
    return number(runs, *words).partition(" ± ")[0]


def spread(values, form):
    """Mean ± standard deviation; a dash where there is nothing."""
    if not values:
        return "-"
    text = format(statistics.mean(values), form)
    if len(values) > 1:
        text += f" ± {math.sqrt(statistics.variance(values)):{form}}"  # stdev refuses NaN
    return text


def percent(rates):
    """Rates {value, low, high} of seeds, or of one seed with its interval -> in %."""
    if not rates:
        return "-"

    def shown(y):
        return format(100 * y, ".0f" if y in (0, 1) else ".2f")
    values = [rate["value"] for rate in rates]
    low, mean, high = map(shown, (min(values), statistics.mean(values), max(values)))
    if len(rates) == 1:
        return f"{mean} [{shown(rates[0]['low'])}, {shown(rates[0]['high'])}]"
    return mean if low == high else f"{mean} ({low} to {high})"


def of_paper(runs, numbers, n, form=".2f"):
    """The paper's n-th number of a row, or mean and standard deviation."""
    theirs = numbers.get(runs[0]["label"], ())
    return in_paper(theirs[n], form) if n < len(theirs) else "-"


def in_paper(number, form=".2f"):
    both = number if isinstance(number, list) else [number]
    return "-" if number is None else " ± ".join(format(y, form) for y in both)


# -----------------------------------------------------------------------------
# text: perplexity by window length

def at(run, measure, n):
    """In windows of n tokens: None where they were not read, NaN where JSON has null."""
    values = run.get(measure, {})
    if str(n) in values:
        return math.nan if values[str(n)] is None else values[str(n)]


def over(run, measure, last, first):
    """Perplexity in windows of `last` over that in windows of `first`."""
    near, far = at(run, measure, first), at(run, measure, last)
    return None if None in (near, far) else far / near


def by_length(measure, lengths, form=".3f"):
    return [(f"{n:,}", number, form, at, measure, n) for n in lengths]


def text_tables(runs, numbers, published_at):
    """
    Perplexity by window length, the paper's beside it where its model was read at the same length
    after the same training; bits per byte of words; strided; and of what comes a second time.
    """
    lengths, T = sorted({n for run in runs for n in run["lengths"]}), runs[0]["block_size"]
    columns = by_length("perplexity", lengths) + quotients("perplexity", lengths, [T])
    for k, n in enumerate(published_at):
        columns.append((f"paper, {n:,}", of_paper, numbers, k))
    ratios = {label: [ys[5] / ys[1]] for label, ys in numbers.items() if len(ys) > 5}
    if ratios:  # CABLE's Table 1
        columns.append(("paper: 15,360 / 1,024", of_paper, ratios, 0, ".3f"))
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
    return [(f"{last:,} / {n:,}", mean_of, ".3f", over, measure, last, n)
            for n in bases if n in shorter]


def strided_table(runs, lengths):
    """Does it use what it sees?"""
    T, last = runs[0]["block_size"], lengths[-1]
    gains = quotients("strided", lengths, [T, 2 * T])

    def gain(cells):
        cell = cells[-len(gains)]  # these come last
        return math.inf if cell in ("-", "nan") else float(cell)
    text = ("Strided: windows that overlap by half, of which only the second half is scored, "
            f"{runs[0]['strided_tokens']:,} tokens, the same at every length: each has at least "
            "half a window to look back on.")
    if len(gains) > 1:
        text += (f" From windows of {2 * T:,} on that is all the {T:,} tokens of a training "
                 f"window, or more. The rows are sorted by {last:,} / {T:,}.")
    columns = by_length("strided", lengths) + gains
    return text, by_row(runs, columns, key=gain if gains else None)


def again_table(runs, _):
    """Does it copy?"""
    gaps = dict.fromkeys(gap for run in runs for gap in run["again"])
    columns = [(f"after {int(gap):,}", gain_after, gap) for gap in gaps]
    size = runs[0]["block_size"] // 4
    return (f"A passage again: {size} tokens come a second time, after so many others. By how many "
            "nats a token they are cheaper; of one seed with a 95 % interval over 64 passages."
            ), by_row(runs, columns)


def gain_after(runs, gap):
    gains = [run["again"][gap] for run in runs if gap in run["again"]]
    if len(gains) == 1:
        return "{:.3f} [{:.3f}, {:.3f}]".format(*gains[0])
    return spread([gain for gain, _, _ in gains], ".3f")


def papers_table(papers, runs):
    """Perplexities at the training length and the longest, beside those of several papers."""
    T, *_, last = sorted({n for run in runs for n in run["lengths"]})
    columns, rows = by_length("perplexity", (T, last)) + by_length("strided", (last,)), []
    for label, same in grouped(runs).items():
        theirs = [elsewhere.get(label) or of_paper(same, published()[entry], n)
                  for entry, n, elsewhere in papers.values()]
        if set(theirs) != {"-"}:
            ours = [cell(same, *words) for _, cell, *words in columns]
            rows.append([label, *ours, *theirs])
    return ("Our rows beside the papers' numbers: other models, trained on other texts.",
            markdown(["row", f"{T:,}", f"{last:,}", f"{last:,}, strided", *papers], rows))


def losses_table(runs):
    """The loss by step: a quarter, half, and all of the training, and at its end the validation."""
    last, columns = runs[0]["iter"], []
    for share in (0.25, 0.5, 1):
        columns.append((f"training, up to step {int(share * last):,}", number, ".3f", mean_loss,
                        (share - 0.1) * last, share * last))
    columns.append(("validation", number, ".3f", lambda run: run["val_loss"][-1][1]))
    return "", by_row(runs, columns)


def mean_loss(run, after, until):
    part = [y for it, y in run["loss"] if after < it <= until]
    return statistics.mean(part) if part else None


# -----------------------------------------------------------------------------
# search: nDCG by the length of documents

def retrieval_tables(runs, numbers):
    """nDCG@10 in % by the length that documents are cut to, and by how much rows differ."""
    T, bm25 = runs[0]["block_size"], runs[0]["search"]["bm25"]
    heads = {str(n): f"{n:,} ({n // T}x)" for n in runs[0]["lengths"]}
    others = [["BM25", "-", *(percent([bm25[n]["ndcg@10"]]) for n in heads)]]
    for label, same in grouped(runs).items():
        if label in numbers:
            theirs = [of_paper(same, numbers, n) for n in range(len(heads))]
            others.append([f"{label}, in the paper (MLDR, 512 tokens)", "-", *theirs])
    texts = []
    for reading, words, more in (("whole", ", documents read as a whole:", others),
                                 ("windows", f" by a document's best window of {T} tokens:", ())):
        columns = [(head, found, reading, n) for n, head in heads.items()]
        texts.append((f"nDCG@10{words}", by_row(runs, columns, more=more)))
    return [*texts, *paired_table(runs, heads)]


def found(runs, reading, n):
    searches = [run["search"][reading] for run in runs]
    return percent([by[n]["ndcg@10"] for by in searches if n in by])


def paired_table(runs, heads):
    """By how much the rows differ from the first over the same queries, documents read whole."""
    import numpy as np

    from encoders.scoring import bootstrap, ndcg  # and torch, which all other tables do without
    means, rows = {}, []
    for label, same in grouped(runs).items():
        places = [run["places"] for run in same if heads.keys() <= run["places"].keys()]
        if places:
            means[label] = {n: np.mean([ndcg(np.array(p[n])) for p in places], 0) for n in heads}
    first, *labels = means or [""]
    for label in labels:
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
    for n, (name, *asked) in enumerate(columns):
        words = " ".join(asked)
        if words not in have:
            fail(f"column {name!r}: there is no {words}: {nearest(words, have)}")
        heads.append((name, rate, first, *asked))
        if numbers:
            heads.append(("paper", of_paper, numbers, n, "g"))
        for T in longer:
            head = f"{int(T):,}" if name == first else f"{name} {int(T):,}"
            heads.append((head, rate, T, *asked))
    return "", by_row(runs, heads)


def rate(runs, T, split, metric):
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
        text = panel_table(metric, panel["schemes"], references)
        texts.append((f"{name}, {panel['name']}, at {lengths_of(panel)}:", text))
    said = (f"Better than {' and '.join(references)}: in so many of the shared trials (the same "
            "hyper-parameters and initial weights; raw weights; without ties and without trials of "
            "which one has diverged); p by a two-sided sign test, not corrected for the number of "
            "tests here.")
    return [*texts, (said, "")]


def lengths_of(panel):
    """Over which a trial's number is the mean."""
    return " to ".join(f"{n:,}" for n in dict.fromkeys(panel["at"]))


def panel_table(metric, schemes, references):
    trials, rows = {scheme: found["trials"] for scheme, found in schemes.items()}, []
    first = best_trial(trials[references[0]], metric, "raw")
    for scheme, mine in trials.items():
        row = dict(scheme=scheme, trials=len(mine))
        row["diverged"] = sum(not trial["finite"] for trial in mine)
        tests = {weights: tests_of(mine, metric, weights) for weights in mine[0][metric]}
        for weights, ys in tests.items():  # raw, the last weights, comes first
            of = "" if weights == "raw" else f", {weights.upper()}"
            finite, best = [y for y in ys if y is not None], best_trial(mine, metric, weights)
            row[f"median{of}"] = f"{statistics.median(finite):.4f}" if finite else "-"
            row[f"best{of}"] = f"{best['test']:.4f}" if best else "-"
        for other in references:
            theirs = tests_of(trials[other], metric, "raw")
            wins = wins_of(metric, tests["raw"], theirs)
            row[f"better than {other}"] = "-" if other == scheme else wins
        for weights in ("ema", "bema") if "ema" in tests else ():
            wins = wins_of(metric, tests[weights], tests["raw"])
            row[f"{weights.upper()} better than without"] = wins
        if metric == "tvd":  # a distance: how many times smaller?
            best = best_trial(mine, metric, "raw")
            times = f"{best['test'] / first['test']:.2f}" if best and first else "-"
            row[f"best / {references[0]}'s best"] = times
        rows.append(row)
    return markdown(rows[0], [row.values() for row in rows])


def tests_of(trials, metric, weights):
    return [trial[metric][weights]["test"] for trial in trials]


def best_trial(trials, metric, weights):
    """The scores of the trial that is best in validation; None where every one has diverged."""
    best, scores = min if metric == "tvd" else max, [trial[metric][weights] for trial in trials]
    scores = [score for score in scores if None not in (score["validation"], score["test"])]
    return best(scores, key=lambda score: score["validation"], default=None)


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


def wins_of(metric, ours, theirs):
    pairs = zip(ours, theirs) if metric == "tvd" else zip(theirs, ours)  # where less is better
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
    rows = {}
    for by_model in measured.values():
        for model, numbers in by_model.items():
            row = rows.setdefault(model, dict(model=model))
            for name, y in numbers.items():
                row[HEADS.get(name, name)] = f"{y:,}" if isinstance(y, int) else f"{y:.2f}"
    heads, *_ = rows.values()  # of nope, which everything is measured of
    return markdown(heads, [[row.get(head, "-") for head in heads] for row in rows.values()])


def attention_table(by_length):
    """Time beside the first row's (scaled_dot_product_attention), and peak memory."""
    lines = {name: [name] for rows in by_length.values() for name in rows}
    reference, *_ = lines
    heads = [f"times {reference} (GB)"]
    for T, rows in by_length.items():
        for way, words in dict(forward="forward", both="forward and backward").items():
            if f"{way}_ms" in rows[reference]:
                ms = rows[reference][f"{way}_ms"]
                time = f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"
                heads.append(f"{words}, T = {int(T):,} ({reference}: {time} ms)")
                for name, line in lines.items():
                    line.append(attention_cell(rows.get(name, {}), way, reference))
    return markdown(heads, lines.values())


def attention_cell(row, way, reference):
    if f"{way}_ms" not in row:
        return "-"
    memory = f" ({row[f'{way}_GB']:.2f})" if f"{way}_GB" in row else ""
    return f"{row[f'{way}_of_{reference}']:.2f}{memory}"
