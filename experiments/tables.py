"""
From JSON to Markdown: the one place for means, spreads and percent.

    text_tables(result) -> [(caption, table), ...]    and so on; result is what runs.py has

± is the standard deviation over the seeds; of rates, which may be all or nothing, the lowest and
the highest seed stand in (round) brackets, if they differ. A row of one seed has no spread, or in
[square] brackets the 95 % interval of its test sequences.
"""
import math
import statistics
from functools import partial

import numpy as np

from encoders.scoring import bootstrap, ndcg


def markdown(head, rows):
    lines = []
    for cells in (head, *rows):
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def label_of(run):
    return run["label"] if "label" in run else run["model"]


def grouped(runs):
    """{row: its runs}, in the order they come."""
    groups = {}
    for run in runs:
        groups.setdefault(label_of(run), []).append(run)
    return groups


def by_row(runs, columns, key=None, more=()):
    """
    A row for each label, a cell for each of [(heading, function of the label's runs)]: sorted by
    key, if there is one, then more rows.
    """
    rows = [[label, len(same), *(cell(same) for _, cell in columns)]
            for label, same in grouped(runs).items()]
    rows = sorted(rows, key=key) if key else rows
    return markdown(["model", "seeds", *(head for head, _ in columns)], [*rows, *more])


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

    def number(y):
        return f"{100 * y:.0f}" if y in (0, 1) else f"{100 * y:.2f}"
    values = [rate["value"] for rate in rates]
    low, mean, high = map(number, (min(values), statistics.mean(values), max(values)))
    if len(rates) == 1:
        return f"{mean} [{number(rates[0]['low'])}, {number(rates[0]['high'])}]"
    return mean if low == high else f"{mean} ({low} to {high})"


# -----------------------------------------------------------------------------
# text: perplexity by window length

def text_tables(result):
    """
    Perplexity by window length, the paper's beside it where its model was read at the same length
    after the same training; bits per byte of words; and in windows that overlap by half.
    """
    runs, lengths, numbers = result["runs"], result["lengths"], result.get("paper", {})
    T, last, at = runs[0]["block_size"], lengths[-1], list(result.get("paper_lengths", ()))
    columns = []
    for n in lengths:
        columns.append((f"{n:,}", partial(mean_at, "perplexity", n)))
        if n in at:
            columns.append(("paper", partial(published, numbers, at.index(n))))
    if len(lengths) > 1:
        columns.append((f"{last:,} / {T:,}", partial(ratio, "perplexity", last, T)))
    ratios = {label: [ys[5] / ys[1]] for label, ys in numbers.items() if len(ys) > 5}
    if ratios:  # CABLE's Table 1
        columns.append(("paper: 15,360 / 1,024", partial(published, ratios, 0, form=".3f")))
    texts = [("", by_row(runs, columns))]
    if "bits_per_byte" in runs[0]:  # of words: perplexities of other tokens differ
        columns = [(f"{n:,}", partial(mean_at, "bits_per_byte", n, form=".4f")) for n in lengths]
        texts.append(("Bits per byte:", by_row(runs, columns)))
    if any("strided" in run for run in runs):
        texts.append(strided_table(result, T))
    again = [run for run in runs if "again" in run]
    if again:
        texts.append(again_table(again))
    return texts


def again_table(runs):
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


def strided_table(result, T):
    """Does it use what it sees?"""
    lengths, last = result["lengths"], result["lengths"][-1]
    bases = [n for n in (T, 2 * T) if n in lengths[:-1]]
    columns = [(f"{n:,}", partial(mean_at, "strided", n)) for n in lengths]
    columns += [(f"{last:,} / {n:,}", partial(ratio, "strided", last, n)) for n in bases]

    def gain(cells):
        cell = cells[-len(bases)] if bases else "-"  # these come last
        return math.inf if cell in ("-", "nan") else float(cell)
    text = ("Strided: windows that overlap by half, of which only the second half is scored, "
            f"{result['strided_tokens']:,} tokens, the same at every length: each has at least "
            "half a window to look back on.")
    if 2 * T in bases:
        text += (f" From windows of {2 * T:,} on that is all the {T:,} tokens of a training "
                 f"window, or more. The rows are sorted by {last:,} / {T:,}.")
    return text, by_row([run for run in result["runs"] if "strided" in run], columns, key=gain)


def at_length(runs, measure, n):
    """The perplexities of runs in windows of n tokens, of those that have been read there."""
    values = [run[measure][str(n)] for run in runs if str(n) in run.get(measure, {})]
    return [math.nan if y is None else y for y in values]


def mean_at(measure, n, runs, form=".3f"):
    return spread(at_length(runs, measure, n), form)


def ratio(measure, last, first, runs):
    """Perplexity in windows of `last` over that in windows of `first`, mean over runs: a cell."""
    both = [run for run in runs if {str(first), str(last)} <= run.get(measure, {}).keys()]
    near, far = (at_length(both, measure, n) for n in (first, last))
    ratios = [y / x for x, y in zip(near, far)]
    return f"{statistics.mean(ratios):.3f}" if ratios else "-"


def published(numbers, n, runs, form=".2f"):
    """The paper's n-th number of a row, or mean and standard deviation: a cell."""
    theirs = numbers.get(label_of(runs[0]), ())
    if n >= len(theirs):
        return "-"
    both = theirs[n] if isinstance(theirs[n], list) else [theirs[n]]
    return " ± ".join(format(y, form) for y in both)


def papers_tables(result, papers):
    """
    Perplexities at the training length and in the longest window, beside those of several papers:
    {heading: {row: number, or in words where it is}}.
    """
    T, last = result["lengths"][0], result["lengths"][-1]
    rows, asked = [], (("perplexity", T), ("perplexity", last), ("strided", last))
    for label, runs in grouped(result["runs"]).items():
        theirs = [numbers.get(label) for numbers in papers.values()]
        if any(theirs):
            shown = [y if isinstance(y, str) else f"{y:.2f}" if y else "-" for y in theirs]
            rows.append([label, *(mean_at(measure, n, runs) for measure, n in asked), *shown])
    return [("", markdown(["row", f"{T:,}", f"{last:,}", f"{last:,}, strided", *papers], rows))]


def losses_tables(result):
    """The loss by step: a quarter, half, and all of the training, and at its end the validation."""
    last = result["runs"][0]["iter"]

    def until(share, runs):
        parts = [[y for it, y in run["loss"] if (share - 0.1) * last < it <= share * last]
                 for run in runs]
        return spread([statistics.mean(part) for part in parts if part], ".3f")

    def validation(runs):
        return spread([run["val_loss"][-1][1] for run in runs], ".3f")

    columns = [(f"training, up to step {int(share * last):,}", partial(until, share))
               for share in (0.25, 0.5, 1)]
    return [("", by_row(result["runs"], [*columns, ("validation", validation)]))]


# -----------------------------------------------------------------------------
# search: nDCG by the length of documents

MEASURES = (("whole", "ndcg@10", "nDCG@10, documents read as a whole"),
            ("windows", "ndcg@10", "nDCG@10 by a document's best window of {} tokens"),
            ("whole", "recall@1", "Recall@1, documents read as a whole"),
            ("whole", "recall@10", "Recall@10, documents read as a whole"))


def retrieval_tables(result):
    """A table for each measure, in %, by the length that documents are cut to."""
    runs, lengths = result["runs"], [str(n) for n in result["lengths"]]
    T, bm25, texts = runs[0]["block_size"], runs[0]["search"]["bm25"], []
    heads = [f"{int(n):,} ({int(n) // T}x)" for n in lengths]

    def found(reading, metric, n, runs):
        searches = [run["search"][reading] for run in runs]
        return percent([by[n][metric] for by in searches if n in by])

    others = [["BM25", "-", *(percent([bm25[n]["ndcg@10"]]) for n in lengths)]]
    for label in grouped(runs):
        if label in result["paper"]:
            theirs = [f"{y:.2f}" for y in result["paper"][label]]
            others.append([f"{label}, in the paper (MLDR, 512 tokens)", "-", *theirs,
                           *["-"] * (len(lengths) - len(theirs))])
    for reading, metric, words in MEASURES:
        columns = [(head, partial(found, reading, metric, n)) for head, n in zip(heads, lengths)]
        texts.append((f"{words.format(T)}:", by_row(runs, columns, more=others)))
        others = []  # below the first alone
    return [*texts, *paired_table(result, lengths, heads), *evidence_table(runs, T)]


def paired_table(result, lengths, heads):
    """By how much the rows differ from the first over the same queries, documents read whole."""
    means = {}
    for label, runs in grouped(result["runs"]).items():
        places = [run["places"] for run in runs if set(lengths) <= run["places"].keys()]
        if places:
            means[label] = {n: np.mean([ndcg(np.array(p[n])) for p in places], 0) for n in lengths}
    first, rows = label_of(result["runs"][0]), []
    for label in [label for label in means if first in means and label != first]:
        cells = []
        for n in lengths:
            apart = 100 * (means[label][n] - means[first][n])
            low, high = bootstrap(apart, np.array(result["answers"]))
            interval = f" [{low:.1f}, {high:.1f}]" if math.isfinite(low) else ""
            cells.append(f"{apart.mean():.1f}{interval}")
        rows.append([f"{label} - {first}", *cells])
    if rows:
        yield (f"nDCG@10 of documents read as a whole, minus {first}'s over the same queries, "
               "means of each row's seeds, with 95 % intervals over documents (other seeds would "
               "add to them):", markdown(["difference", *heads], rows))


def evidence_table(runs, T):
    """nDCG@10 in % by where the answer begins, if that is known."""
    where, rows = runs[0]["by_answer_at"], []
    if not where:
        return
    readings = dict(whole="", windows=", its best window", first=f", the first {T} tokens alone")
    for reading, words in readings.items():
        for label, same in grouped(runs).items():
            values = [run["by_answer_at"][reading] for run in same
                      if reading in run["by_answer_at"]]
            if values:
                cells = [spread([100 * y for y in ys if y is not None], ".1f")
                         for ys in zip(*values)]
                rows.append([label + words, len(values), *cells])
    edges = [f"{a:,} to {b:,}" for a, b in zip(where["edges"], where["edges"][1:])]
    rows.append(["BM25", "-", *(f"{100 * v:.1f}" if v is not None else "-" for v in where["bm25"])])
    rows.append(["queries", "-", *map(str, where["queries"])])
    yield ("nDCG@10 by the token at which the answer begins, documents of "
           f"{where['length']:,} tokens:", markdown(["model", "seeds", *edges], rows))


# -----------------------------------------------------------------------------
# tasks: rates, and the matrix

def task_tables(result):
    """Rates in %, beside the paper's."""
    runs, numbers = result["runs"], result.get("paper")
    first, *longer = runs[0]["scores"]  # the lengths; the paper has the first alone

    def rate(T, split, metric, runs):
        scores = [run["scores"][T][split] for run in runs if split in run["scores"].get(T, {})]
        return percent([by[metric] for by in scores])

    columns = []
    for n, (name, split, metric) in enumerate(result["columns"]):
        columns.append((name, partial(rate, first, split, metric)))
        if numbers:
            columns.append(("paper", partial(published, numbers, n, form="g")))
        for T in longer:
            head = f"{int(T):,}" if name == first else f"{name} {int(T):,}"
            columns.append((head, partial(rate, T, split, metric)))
    texts = [("", by_row(runs, columns))]
    if any("by_answer" in run for run in runs):
        texts.append(answers_table(result))
    return texts


def answers_table(result):
    """The error by answer, and that of always giving the answer that is the commonest."""
    rows, answers = {}, set()
    for label, runs in grouped(result["runs"]).items():
        for name, split, _ in result["columns"]:
            seeds = [next(iter(run["by_answer"].values()))[split] for run in runs]
            counts = {answer: n for answer, (n, _) in seeds[0].items()}
            guess = 100 * (1 - max(counts.values()) / sum(counts.values()))
            cells = rows[label, name] = {"a constant guess": f"{guess:.2f}"}
            for answer, n in counts.items():
                error = statistics.mean(100 * rates[answer][1] for rates in seeds)
                cells[answer] = f"{error:.1f} of {n:,}"
            answers |= counts.keys()
    heads = ["a constant guess", *sorted(answers, key=int)]
    lines = [[*where, *(cells.get(head, "-") for head in heads)] for where, cells in rows.items()]
    return ("Error (%) by the right answer: beside it how many programs have it; a constant guess "
            "is always the commonest of them.", markdown(["model", "test set", *heads], lines))


NOTES = ("Ends: the method has no positions for strings of that length. Not finite: the loss or "
         "the logits were NaN or infinite.")


def matrix_tables(result):
    """A row for each method, a column for each number."""
    rows = []
    for label, by_column in result["cells"].items():
        rows.append([label])
        for name, cell in by_column.items():
            form = result["columns"][name]["form"]
            text = cell.get("reason") or format(cell["value"], form)
            rows[-1].append(text + (f" ± {cell['spread']:{form}}" if "spread" in cell else ""))
    return [("", markdown(["method", *result["columns"]], rows) + f"\n\n{NOTES}")]
