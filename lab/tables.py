"""
A table: rows of runs, and columns of (heading, function, words): function(a row's runs, *words) is
a cell.

    runs_of(table)          the runs that are there
    tables_of(table, runs)  [(caption, Markdown), ...] of them
    tables_in(result)       the same of one JSON that eval.py or lab/bench.py wrote

    python -m lab.tables out/cable-stdlib-nano/eval.json     prints it

± is the standard deviation over seeds. Rates may be all or nothing: after their mean the lowest
and the highest seed stand in (round) brackets, if they differ. A row of one seed has no spread, or
in [square] brackets the 95 % interval of its test sequences.
"""
import math
import statistics
import sys
from itertools import product
from pathlib import Path

from common import ROOT
from common.exits import in_one_line
from common.files import read_json
from lab import Table, published, slug


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
        return tables_of(Table("", "", {}, {}), [result | run for run in result["runs"]])
    if "attention" in result:
        return [("", attention_table(result["attention"]))]
    return [("", speed_table([result[k] for k in ("train", "decode", "generate") if k in result]))]


def show(texts):
    print("\n\n".join(part for pair in texts for part in pair if part))


# -----------------------------------------------------------------------------
# reading: a table is what its folder holds

def runs_of(table, added=()):
    """
    The runs that are there, in the order of the entry's rows, then of those added, of tasks and of
    seeds; each with what its file says of the evaluation. Of a random search its panels.
    """
    if "panels" in table.part:
        return panels_of(table)
    runs = []
    for label, task in product([*table.part["rows"], *added], table.part.get("tasks", [""])):
        folder = ROOT / table.added / "runs" if label in added else table.runs
        for path in sorted(folder.rglob(str(Path(task, f"{slug(label)}-????.json")))):
            result = read_json(path)
            runs.append(result | result["runs"][0])
    texts = [run["data"].get("sha256") for run in runs]
    mine = [None, *filter(None, texts)][-1]  # added rows come last
    other = {run["label"]: text for run, text in zip(runs, texts) if text not in (None, mine)}
    if other:
        print(f"left out, as they are of another text: {', '.join(other)}")
    return [run for run, text in zip(runs, texts) if text in (None, mine)]


def panels_of(table):
    """A random search's panels, with the entry's schemes, and last its hard-coded models."""
    shown = []
    for name in [*table.part["panels"], "theorem"]:
        path = table.runs / f"{slug(name)}.json"
        panel = read_json(path) if path.exists() else {}
        schemes = panel.get("schemes", {})
        there = {scheme: schemes[scheme] for scheme in table.entry["schemes"] if scheme in schemes}
        if there:
            panel["schemes"] = there
        if there or shown and "models" in panel:
            shown.append(panel)
    return shown


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


def by_row(runs, columns):
    """A row for each label."""
    rows = []
    for label, same in grouped(runs).items():
        cells = [cell(same, *words) for _, cell, *words in columns]
        rows.append([label, len(same), *cells])
    return markdown(["model", "seeds", *(column[0] for column in columns)], rows)


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
    theirs = numbers.get(runs[0]["label"], ())[n:n + 1]
    both = theirs[0] if theirs and isinstance(theirs[0], list) else theirs
    return " ± ".join(format(y, form) for y in both if y is not None) or "-"


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


def in_windows(measure, lengths):
    """Columns of these lengths."""
    of = "" if measure == "perplexity" else f"{measure}, "
    return [(f"{of}{n:,}", number, ".3f", at, measure, n) for n in lengths]


def text_tables(runs, numbers, published_at):
    """
    Perplexity at the training length and in the longest windows, or at all lengths if the paper's
    is beside it, whose model was read at the same length after the same training; strided, which
    says whether a model uses what it sees; of what comes a second time; and over other documents.
    """
    lengths = sorted({n for run in runs for n in run["lengths"]})
    T, last = runs[0]["block_size"], lengths[-1]
    every = published_at or T not in lengths
    columns = in_windows("perplexity", [n for n in lengths if every or n in (T, last)])
    columns += [(f"paper, {n:,}", of_paper, numbers, k) for k, n in enumerate(published_at)]
    if any("strided" in run for run in runs):
        columns += in_windows("strided", [n for n in lengths if every or n in (T, 2 * T, last)])
        if 2 * T in lengths[:-1]:
            columns.append((f"strided, {last:,} / {2 * T:,}", mean_of, ".3f", over, "strided",
                            last, 2 * T))
    texts = [("", by_row(runs, columns))]
    for name, table in dict(again=again_table, documents=documents_table).items():
        have = [run for run in runs if name in run]
        if have:
            texts.append(table(have, lengths))
    return texts


def again_table(runs, _):
    """Does it copy?"""
    columns = [(f"after {int(gap):,}", gain_after, gap) for gap in runs[0]["again"]]
    return (f"A passage again: {runs[0]['block_size'] // 4} tokens come a second time, after so "
            "many others. By how many nats a token they are cheaper; of one seed with a 95 % "
            "interval over 64 passages."), by_row(runs, columns)


def gain_after(runs, gap):
    gains = [run["again"][gap] for run in runs if gap in run["again"]]
    if len(gains) == 1:
        return WITH_INTERVAL.format(*gains[0])
    return spread([gain for gain, _, _ in gains], ".3f")


WITH_INTERVAL = "{:.3f} [{:.3f}, {:.3f}]"


def documents_table(runs, lengths):
    """What would differ with other documents? Of a single one nobody knows."""
    (first, same), *_ = grouped(runs).items()
    T, last = same[0]["block_size"], lengths[-1]
    T = T if T in lengths else lengths[0]
    columns = []
    for measure, by in same[0]["documents"].items():
        if len(by["tokens"]) < 2:
            return "", ""
        for n in dict.fromkeys((T, last)):
            columns.append((f"{measure}, {n:,}, over {first}'s", ratio, measure, n, n, same))
        if measure == "strided" and 2 * T in lengths:
            columns.append((f"strided, {last:,} / {2 * T:,}", ratio, "strided", last, 2 * T))
    return ("Over other documents: ratios of perplexities, with 95 % intervals by a bootstrap over "
            "the documents, which say nothing of other seeds."), by_row(runs, columns)


def ratio(runs, measure, n, m, others=None):
    """Perplexity in windows of n over the same runs', or others', in windows of m."""
    import numpy as np

    from lab.bert.scoring import resampled  # and torch, which most tables do without
    far, near = ([run["documents"][measure] for run in rows] for rows in (runs, others or runs))
    losses = [[by.get(str(length)) for by in rows] for rows, length in ((far, n), (near, m))]
    if None in losses[0] + losses[1] or far[0]["tokens"] != near[0]["tokens"]:  # other tokens
        return "-"
    apart = np.subtract(*(np.mean(seeds, 0) for seeds in losses))
    tokens = np.array(far[0]["tokens"])
    some = tokens > 0  # strided, the first may have none
    return WITH_INTERVAL.format(*np.exp([apart.sum() / tokens.sum(),
                                         *resampled(apart[some], tokens[some])]))


def papers_table(papers, runs):
    """Perplexities at the training length and the longest, beside those of several papers."""
    T, *_, last = sorted({n for run in runs for n in run["lengths"]})
    columns = in_windows("perplexity", (T, last))
    known = set()
    for heading, (entry, n) in papers.items():
        columns.append((heading, of_paper, published()[entry], n))
        known |= published()[entry].keys()
    runs = [run for run in runs if run["label"] in known]
    return ("Our rows beside the papers' numbers: other models, trained on other texts.",
            by_row(runs, columns))


def losses_table(runs):
    """The loss of training, the mean of its last tenth, and of the validation at the end."""
    return "", by_row(runs, [("training, its last tenth", number, ".3f", last_losses),
                             ("validation", number, ".3f", lambda run: run["val_loss"][-1][1])])


def last_losses(run):
    return statistics.mean(y for it, y in run["loss"] if it > 0.9 * run["iter"])


# -----------------------------------------------------------------------------
# search: nDCG by the length of documents

def retrieval_tables(runs, numbers):
    """nDCG@10 in % by the length that documents are cut to; what rows differ by; the paper's."""
    T, lengths = runs[0]["block_size"], runs[0]["lengths"]
    heads = [f"{n:,} ({n // T}x)" for n in lengths]

    def table(runs, cell, *words):
        return by_row(runs, [(head, cell, str(n), *words) for head, n in zip(heads, lengths)])
    bm25 = dict(label="BM25", search=dict(whole=runs[0]["search"]["bm25"]))
    (first, same), *_ = grouped(runs).items()
    texts = [("nDCG@10, documents read as a whole:", table([*runs, bm25], found)),
             (f"nDCG@10 of documents read as a whole, minus {first}'s over the same queries, means "
              "of each row's seeds, with 95 % intervals over documents (other seeds would add to "
              "them):", table(runs[len(same):], apart, same))]
    if numbers:
        theirs = [[label, *(f"{y:.2f}" for y in ys)] for label, ys in numbers.items()]
        texts.append(("nDCG@10 in the paper (MLDR, 512 tokens):",
                      markdown(["model", *heads], theirs)))
    return texts


def found(runs, n):
    searches = [run["search"]["whole"] for run in runs]
    return percent([by[n]["ndcg@10"] for by in searches if n in by])


def apart(runs, n, others):
    """By how much rows differ from others, in points, with its interval."""
    import numpy as np

    from lab.bert.scoring import bootstrap, ndcg  # and torch, which most tables do without
    places = [[run["places"].get(n) for run in rows] for rows in (runs, others)]
    if None in places[0] + places[1]:
        return "-"
    points = 100 * np.subtract(*(ndcg(np.array(seeds)).mean(0) for seeds in places))
    low, high = bootstrap(points, np.array(runs[0]["answers"]))
    return f"{points.mean():.1f} [{low:.1f}, {high:.1f}]"


# -----------------------------------------------------------------------------
# tasks: rates, and the matrix

def task_table(columns, runs, numbers):
    """
    Rates in % at each run's first length, beside the paper's, and at the last; without columns all
    that there is.
    """
    first, *longer = runs[0]["scores"]
    if not columns:
        columns = [(f"{split} {metric}", split, metric)
                   for split, by in runs[0]["scores"][first].items() for metric in by]
    heads = []
    for n, (name, *asked) in enumerate(columns):
        heads.append((name, rate, None, *asked))
        if numbers:
            heads.append(("paper", of_paper, numbers, n, "g"))
        for T in longer[-1:]:
            head = f"{int(T):,}" if name == first else f"{name} {int(T):,}"
            heads.append((head, rate, T, *asked))
    return "", by_row(runs, heads)


def rate(runs, T, split, metric):
    scores = [run["scores"].get(T or next(iter(run["scores"])), {}).get(split, {}) for run in runs]
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
    A row for every scheme of every panel: median and best of the last weights, the best of their
    averages; in how many trials an average is better than the last weights, and a scheme than the
    first, and than the control, if there is one. And the theorem's hard-coded models.
    """
    schemes, rows, theorems = list(panels[0]["schemes"]), [], []
    references = [schemes[0]] + [CONTROL] * schemes[1:].count(CONTROL)
    for panel in panels:
        if "models" in panel:
            theorems.append(theorem_table(panel))
            continue
        name = f"{panel['name']}, at {lengths_of(panel)}"
        for scheme, row in rows_of_panel(metric, panel["schemes"], references):
            rows.append(dict(panel=name, scheme=scheme) | row)
            name = ""  # once
    measure = metric if metric in ("precision", "accuracy") else metric.upper()
    said = (f"{measure[0].upper()}{measure[1:]} of the last weights, but for averages. Better: in "
            "so many shared trials, without ties and diverged ones; *: p < 0.05, either way, by "
            "a two-sided sign test, not corrected.")
    return [("", f"{markdown(rows[0], [row.values() for row in rows])}\n\n{said}"), *theorems]


def lengths_of(panel):
    """Over which a trial's number is the mean."""
    return " to ".join(f"{n:,}" for n in dict.fromkeys(panel["at"]))


def rows_of_panel(metric, schemes, references):
    trials = {scheme: found["trials"] for scheme, found in schemes.items()}
    for scheme, mine in trials.items():
        row, raw = {}, tests_of(mine, metric, "raw")
        finite = [y for y in raw if y is not None]
        row["median"] = f"{statistics.median(finite):.4f}" if finite else "-"
        for weights in mine[0][metric]:  # raw, the last weights, comes first
            best = best_trial(mine, metric, weights)
            of = "" if weights == "raw" else f", {weights.upper()}"
            row[f"best{of}"] = f"{best['test']:.4f}" if best else "-"
            if of:
                wins = wins_of(metric, tests_of(mine, metric, weights), raw)
                row[f"{weights.upper()} better"] = wins
        for other in references:
            missing = other == scheme or other not in trials  # if half done
            row[f"better than {other}"] = "-" if missing else wins_of(
                metric, raw, tests_of(trials[other], metric, "raw"))
        yield scheme, row


def tests_of(trials, metric, weights):
    return [trial[metric][weights]["test"] for trial in trials]


def best_trial(trials, metric, weights):
    """The scores of the trial that is best in validation; None where every one has diverged."""
    best, scores = min if metric == "tvd" else max, [trial[metric][weights] for trial in trials]
    scores = [score for score in scores if None not in (score["validation"], score["test"])]
    return best(scores, key=lambda score: score["validation"], default=None)


def wins_of(metric, ours, theirs):
    """In how many trials ours is better; less is, of a distance."""
    wins, n, p = sign_test(zip(ours, theirs) if metric == "tvd" else zip(theirs, ours))
    return f"{wins} of {n}" + ("*" if p < 0.05 else "")


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


def theorem_table(theorem):
    n = theorem["n"]
    lengths, rows = (2, 8, 32, n - 1), []
    for norm, m in theorem["models"].items():
        cells = [f"{m['precision'][T - 2]:.2f} ({m['tvd'][T - 2]:.3f})" for T in lengths]
        far = max(abs(a - b) for a, b in zip(m["formula"], m["precision"]))
        rows.append([norm, *cells, f"{far:.1e}"])
    return (f"Hard-coded models, n = {n}, precision (TVD) at length:",
            markdown(["norm", *lengths, "largest difference from the formula"], rows))


# -----------------------------------------------------------------------------
# speed: what lab/bench.py measures

HEADS = dict(tok_s="tok/s in training", of_nope="of nope's", ms="ms a decoded token",
             times_nope="times nope's", cached_s="s with the cache", uncached_s="s without",
             times_faster="times as long without")


def speed_table(measured):
    """[{model: {what: number}}] -> a row for each model."""
    rows = {}
    for by_model in measured:
        for model, numbers in by_model.items():
            row = rows.setdefault(model, dict(model=model))
            for name, y in numbers.items():
                row[HEADS[name]] = f"{y:,}" if isinstance(y, int) else f"{y:.2f}"
    heads, *_ = rows.values()
    return markdown(heads, [row.values() for row in rows.values()])


def attention_table(by_length):
    """Time beside that of scaled_dot_product_attention, and peak memory where it was measured."""
    heads, lines = ["times sdpa (GB)"], {}
    for T, rows in by_length.items():
        for way, words in dict(forward="forward", both="forward and backward").items():
            heads.append(f"{words}, T = {int(T):,} (sdpa: {rows['sdpa'][f'{way}_ms']:,.1f} ms)")
            for name, row in rows.items():
                memory = f" ({row[f'{way}_GB']:.2f})" if f"{way}_GB" in row else ""
                cell = f"{row[f'{way}_of_sdpa']:.2f}{memory}"
                lines.setdefault(name, [name]).append(cell)
    return markdown(heads, lines.values())


def main():
    for path in sys.argv[1:]:
        show(tables_in(read_json(path)))


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
