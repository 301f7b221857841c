"""
From JSON to markdown: the one place for means, spreads and percent.

± is the standard deviation over the seeds; of rates, which may be all or nothing, the lowest and
the highest seed stand in (round) brackets, if they differ. A row of one seed has no spread, or in
[square] brackets the 95 % interval of its test sequences.
"""
import math
import statistics

import numpy as np

from encoders.scoring import bootstrap, ndcg
from experiments import lm


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

def text_table(result):
    """
    Perplexity by window length, the paper's beside it where its model was read at the same length
    after the same training; and below, where there is any, in windows that overlap by half.
    """
    lengths, published = result["lengths"], result.get("paper", {})
    ratio = any(len(theirs) > 5 for theirs in published.values())  # CABLE's Table 1 has it
    at = list(result.get("paper_lengths", ()))
    T, last = result["runs"][0]["block_size"], lengths[-1]
    rows, heads, groups = [], [], grouped(result["runs"])
    for n in lengths:
        heads += [f"{n:,}", "paper"] if n in at else [f"{n:,}"]
    for label, runs in groups.items():
        cells, theirs = [], published.get(label, ())
        for n in lengths:
            cells.append(spread(at_length(runs, "perplexity", n), ".3f"))
            if n in at:
                there = at.index(n) < len(theirs)
                cells.append(f"{theirs[at.index(n)]:.2f}" if there else "-")
        if len(lengths) > 1:
            cells.append(far_ratio(runs, "perplexity", last, T))
        if ratio:
            cells.append(f"{theirs[5] / theirs[1]:.3f}" if len(theirs) > 5 else "-")
        mark = unfinished(runs, groups.get(f"{label} x2", []), T)
        rows.append([label + mark, len(runs), *cells])
    if len(lengths) > 1:
        heads.append(f"{last:,} / {T:,}")
    if ratio:
        heads.append("paper: 15,360 / 1,024")
    text = markdown(["model", "seeds", *heads], rows)
    if "bits_per_byte" in result["runs"][0]:  # of words: perplexities of other tokens differ
        rows = [[label, len(runs), *(spread(at_length(runs, "bits_per_byte", n), ".4f")
                                     for n in lengths)] for label, runs in groups.items()]
        heads = ["model", "seeds", *(f"{n:,}" for n in lengths)]
        text += f"\n\nBits per byte:\n\n{markdown(heads, rows)}"
    if any("strided" in run for run in result["runs"]):
        text += "\n\n" + strided_table(result, groups, T)
    return text


def unfinished(runs, longer, T):
    """What is said of a row whose perplexity falls by more than 3 % with twice the steps."""
    once, twice = (at_length(group, "perplexity", T) for group in (runs, longer))
    lower = 1 - statistics.mean(twice) / statistics.mean(once) if twice else 0
    return f" (unfinished: {lower:.0%} lower with x2)" if lower > 0.03 else ""


def strided_table(result, groups, T):
    """Does it use what it sees?"""
    lengths, last, rows = result["lengths"], result["lengths"][-1], []
    bases = [n for n in (T, 2 * T) if n in lengths[:-1]]
    for label, runs in groups.items():
        runs = [run for run in runs if "strided" in run]
        if runs:
            cells = [spread(at_length(runs, "strided", n), ".3f") for n in lengths]
            ratios = [far_ratio(runs, "strided", last, n) for n in bases]
            rows.append([label, len(runs), *cells, *ratios])

    def gain(cells):
        cell = cells[-len(bases)]
        return math.inf if cell in ("-", "nan") else float(cell)  # these come last
    if bases:
        rows.sort(key=gain)
    heads = [f"{n:,}" for n in lengths] + [f"{last:,} / {n:,}" for n in bases]
    text = ("Strided: windows that overlap by half, of which only the second half is scored, "
            f"{result['strided_tokens']:,} tokens, the same at every length: each has at least "
            "half a window to look back on.")
    if 2 * T in bases:
        text += (f" From windows of {2 * T:,} on that is all the {T:,} tokens of a training "
                 f"window, or more. The rows are sorted by {last:,} / {T:,}.")
    return f"{text}\n\n{markdown(['model', 'seeds', *heads], rows)}"


def at_length(runs, measure, n):
    """The perplexities of runs in windows of n tokens, of those that have been read there."""
    values = [run[measure][str(n)] for run in runs if str(n) in run.get(measure, {})]
    return [math.nan if y is None else y for y in values]


def far_ratio(runs, measure, last, first):
    """Perplexity in windows of `last` over that in windows of `first`, mean over runs: a cell."""
    both = [run for run in runs if {str(first), str(last)} <= run.get(measure, {}).keys()]
    ratios = [far / near for far, near in zip(at_length(both, measure, last),
                                              at_length(both, measure, first))]
    return f"{statistics.mean(ratios):.3f}" if ratios else "-"


def papers_table(result):
    """lm's perplexities at the training length and in the longest window, beside the papers'."""
    T, last = result["lengths"][0], result["lengths"][-1]
    rows, asked = [], (("perplexity", T), ("perplexity", last), ("strided", last))
    for label, runs in grouped(result["runs"]).items():
        theirs = [numbers.get(label) for numbers in lm.PAPERS.values()]
        if any(theirs):
            shown = [y if isinstance(y, str) else f"{y:.2f}" if y else "-" for y in theirs]
            ours = [spread(at_length(runs, measure, n), ".3f") for measure, n in asked]
            rows.append([label, *ours, *shown])
    return markdown(["row", f"{T:,}", f"{last:,}", f"{last:,}, strided", *lm.PAPERS], rows)


def losses_table(result):
    """The loss by step: a quarter, half, and all of the training, and at its end the validation."""
    last = result["runs"][0]["iter"]
    rows, shares = [], (0.25, 0.5, 1)
    for label, runs in grouped(result["runs"]).items():
        cells = []
        for share in shares:
            means = []
            for run in runs:
                part = [y for it, y in run["loss"] if (share - 0.1) * last < it <= share * last]
                means += [statistics.mean(part)] if part else []
            cells.append(spread(means, ".3f"))
        cells.append(spread([run["val_loss"][-1][1] for run in runs], ".3f"))
        rows.append([label, len(runs), *cells])
    heads = [f"training, up to step {int(share * last):,}" for share in shares]
    return markdown(["model", "seeds", *heads, "validation"], rows)


# -----------------------------------------------------------------------------
# search: nDCG by the length of documents

MEASURES = (("whole", "ndcg@10", "nDCG@10, documents read as a whole"),
            ("windows", "ndcg@10", "nDCG@10 by a document's best window of {} tokens"),
            ("whole", "recall@1", "Recall@1, documents read as a whole"),
            ("whole", "recall@10", "Recall@10, documents read as a whole"))


def retrieval_table(result):
    """A table for each measure, in %, by the length that documents are cut to."""
    lengths, T = [str(n) for n in result["lengths"]], result["runs"][0]["block_size"]
    heads = ["model", "seeds", *(f"{int(n):,} ({int(n) // T}x)" for n in lengths)]
    groups, texts = grouped(result["runs"]), []
    for n, (reading, metric, words) in enumerate(MEASURES):
        rows = []
        for label, runs in groups.items():
            searches = [run["search"][reading] for run in runs]
            cells = [percent([by[L][metric] for by in searches if L in by]) for L in lengths]
            rows.append([label, len(runs), *cells])
        if not n:
            bm25 = result["runs"][0]["search"]["bm25"]
            rows.append(["BM25", "-", *(percent([bm25[L]["ndcg@10"]]) for L in lengths)])
            for label in [label for label in groups if label in result["paper"]]:
                theirs = result["paper"][label]
                cells = [f"{y:.2f}" for y in theirs] + ["-"] * (len(lengths) - len(theirs))
                rows.append([f"{label}, in the paper (MLDR, 512 tokens)", "-", *cells])
        texts.append(f"{words.format(T)}:\n\n{markdown(heads, rows)}")
    return "\n\n".join([*texts, *paired_table(result, lengths, groups, heads[2:]),
                        *evidence_table(result, groups, T)])


def paired_table(result, lengths, groups, heads):
    """By how much the rows differ from the first over the same queries, documents read whole."""
    first, *others = groups
    rows, means = [], {}
    for label, runs in groups.items():
        places = [run["places"] for run in runs if set(lengths) <= run["places"].keys()]
        if places:
            means[label] = {n: np.mean([ndcg(np.array(p[n])) for p in places], 0) for n in lengths}
    for label in others:
        if label in means and first in means:
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
               f"add to them):\n\n{markdown(['difference', *heads], rows)}")


def evidence_table(result, groups, T):
    """nDCG@10 in % by where the answer begins, if that is known."""
    where, rows = result["runs"][0]["by_answer_at"], []
    if not where:
        return
    readings = dict(whole="", windows=", its best window", first=f", the first {T} tokens alone")
    for reading, words in readings.items():
        for label, runs in groups.items():
            values = [run["by_answer_at"][reading] for run in runs
                      if reading in run["by_answer_at"]]
            if values:
                cells = [spread([100 * y for y in ys if y is not None], ".1f")
                         for ys in zip(*values)]
                rows.append([label + words, len(values), *cells])
    edges = [f"{a:,} to {b:,}" for a, b in zip(where["edges"], where["edges"][1:])]
    rows.append(["BM25", "-", *(f"{100 * v:.1f}" if v is not None else "-" for v in where["bm25"])])
    rows.append(["queries", "-", *map(str, where["queries"])])
    yield ("nDCG@10 by the token at which the answer begins, documents of "
           f"{where['length']:,} tokens:\n\n" + markdown(["model", "seeds", *edges], rows))


# -----------------------------------------------------------------------------
# tasks: rates, and the matrix

def task_table(result):
    """Rates in %, beside the paper's. Without columns: the first metric of every split."""
    published, rows, heads = result.get("paper"), [], []
    columns = result.get("columns") or [(split, split, "") for split in result["splits"]]
    first, *longer = result["runs"][0]["scores"]  # the lengths; the paper has the first alone
    for name, *_ in columns:
        plain = name if "columns" in result else f"{name} {int(first):,}"
        heads += [plain, "paper"] if published else [plain]
        heads += [f"{int(T):,}" if name == first else f"{name} {int(T):,}" for T in longer]
    for label, runs in grouped(result["runs"]).items():
        cells = []
        for n, (_, split, metric) in enumerate(columns):
            for T in (first, *longer):
                scores = [run["scores"][T][split] for run in runs
                          if split in run["scores"].get(T, {})]
                cells.append(percent([by[metric or next(iter(by))] for by in scores]))
                if published and T == first:
                    cells.append(f"{published[label][n]:g}" if label in published else "-")
        rows.append([label, len(runs), *cells])
    text = markdown(["model", "seeds" if "columns" in result else "runs", *heads], rows)
    if any("by_answer" in run for run in result["runs"]):
        text += "\n\n" + answers_table(result)
    return text


def answers_table(result):
    """The error by answer, and that of always giving the answer that is the commonest."""
    rows, answers = [], set()
    for label, runs in grouped(result["runs"]).items():
        for name, split, _ in result["columns"]:
            by_answer = [next(iter(run["by_answer"].values()))[split] for run in runs]
            counts = {answer: n for answer, (n, _) in by_answer[0].items()}
            answers |= counts.keys()
            errors = {}
            for answer, n in counts.items():
                error = statistics.mean(100 * rates[answer][1] for rates in by_answer)
                errors[answer] = f"{error:.1f} of {n:,}"
            guess = 100 * (1 - max(counts.values()) / sum(counts.values()))
            rows.append((label, name, f"{guess:.2f}", errors))
    answers = sorted(answers, key=int)
    lines = [[*start, *(errors.get(answer, "-") for answer in answers)] for *start, errors in rows]
    return ("Error (%) by the right answer, and how many programs have it; a constant guess is "
            "always the commonest of them.\n\n"
            + markdown(["model", "test set", "a constant guess", *answers], lines))


REASONS = {"ends": "the method has no positions for strings of that length",
           "not finite": "the loss or the logits were NaN or infinite"}


def matrix_table(result):
    """A row for each method, a column for each number; * marks runs that were not finished."""
    rows, reasons = [], {}
    for label, by_column in result["cells"].items():
        shown = []
        for name, cell in by_column.items():
            form = result["columns"][name]["form"]
            text = cell.get("reason") or format(cell["value"], form)
            if "reason" in cell:
                reasons[text] = REASONS.get(text)
            if "spread" in cell:
                text += f" ± {cell['spread']:{form}}"
            shown.append(f"{text} \\*" if cell.get("unfinished") else text)
        rows.append([label, *shown])
    said = "\n\n\\* not finished: the validation perplexity fell by more than 1 % over the last " \
           "fifth of the steps."
    for reason, words in reasons.items():
        said += f" {reason.capitalize()}: {words}." if words else ""
    return markdown(["method", *result["columns"]], rows) + said
