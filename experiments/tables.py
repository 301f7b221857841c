"""
From JSON to markdown: the tables, and results/README.md, which has all of them with the command,
the machine and what was measured. reproduce.py and bench.py write it anew after every result.
"""
import json
import math
import statistics

import numpy as np

import experiments
import runs
from eval import bootstrap, ndcg
from experiments import matrix, minimal, speed, trainings

INTRO = """# Results

Written by `reproduce.py` and `bench.py` from the JSON files beside this page; never by hand. \
± is the standard deviation over the seeds; of rates, which may be all or nothing, the lowest and \
the highest seed stand in (round) brackets, if they differ. A row of one seed has no spread, or in \
[square] brackets the 95 % interval of its test sequences: how well that one model was measured, \
not how another seed would do. One seed claims no order between methods.

Almost everything is small (some 0.8M parameters on bytes of Python source, 1,000 to 0.5M on the \
synthetic tasks, 1.8M of encoders), because that is what two CPU cores train in minutes. It \
shows how the methods behave beyond their training length, not which is best at scale. The \
backbone is the same for all models (RMSNorm, GELU, no linear biases, tied embeddings); where a \
paper's differs, the docstring of its model file says so. `stdlib` is the source of Python's own \
standard library: another Python version is another text, with other numbers, so every result \
names its version.
"""


def row(cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def markdown(head, rows):
    return "\n".join([row(head), "|---" * len(head) + "|", *map(row, rows)])


def grouped(runs_, key):
    """{run[key]: runs}, in the order they come."""
    groups = {}
    for r in runs_:
        groups.setdefault(r[key], []).append(r)
    return groups


def spread(values, form):
    """Mean ± standard deviation; a dash where there is nothing."""
    if not values:
        return "-"
    text = format(statistics.mean(values), form)
    if len(values) > 1:
        text += f" ± {trainings.deviation(values):{form}}"
    return text


# -----------------------------------------------------------------------------
# reproduce.py's results

def table(result):
    """The markdown table of what reproduce.py wrote."""
    if "panels" in result:
        return search_table(result)
    if "losses" in result:
        return losses_table(result)
    if "cells" in result:
        return matrix_table(result)
    if "columns" in result:
        return task_table(result)
    if "readings" in result:
        return retrieval_table(result)
    return text_table(result)


MEASURES = (("whole", "ndcg@10", "nDCG@10, documents read as a whole"),
            ("windows", "ndcg@10", "nDCG@10 by a document's best window of {} tokens"),
            ("whole_bm25", "ndcg@10", "nDCG@10 by the sum of two ranks, the whole document's and "
                                      "BM25's"),
            ("windows_bm25", "ndcg@10", "nDCG@10 by the sum of two ranks, the best window's and "
                                        "BM25's"),
            ("whole", "recall@1", "Recall@1, documents read as a whole"),
            ("whole", "recall@10", "Recall@10, documents read as a whole"))


def retrieval_table(result):
    """A table for each measure, in %, by the length that documents are cut to."""
    lengths, T = [str(n) for n in result["lengths"]], result["runs"][0]["block_size"]
    heads = ["model", "seeds", *(f"{int(n):,} ({int(n) // T}x)" for n in lengths)]
    groups, texts = grouped(result["runs"], "label"), []
    for n, (reading, metric, words) in enumerate(MEASURES):
        rows = []
        for label, found in groups.items():
            searches = [r["search"][reading] for r in found]
            cells = [percent([by[T_][metric] for by in searches if T_ in by]) for T_ in lengths]
            rows.append([label, len(found), *cells])
        if not n:
            bm25 = result["runs"][0]["search"]["bm25"]
            rows.append(["BM25", "-", *(percent([bm25[T_]["ndcg@10"]]) for T_ in lengths)])
            for label in [label for label in groups if label in result["paper"]]:
                theirs = result["paper"][label]
                cells = [f"{y:.2f}" for y in theirs] + ["-"] * (len(lengths) - len(theirs))
                rows.append([f"{label}, in the paper (MLDR, 512 tokens)", "-", *cells])
        texts.append(f"{words.format(T)}:\n\n{markdown(heads, rows)}")
    return "\n\n".join(texts) + paired_table(result, T) + evidence_table(result, T)


def paired_table(result, T):
    """By how much the rows differ from the first over the same queries, documents read whole."""
    if "answers" not in result:  # of an older eval.py
        return ""
    lengths, groups = [str(n) for n in result["lengths"]], grouped(result["runs"], "label")
    first, *others = groups
    rows, known = [], {}
    for label, found in groups.items():
        places = [r["places"] for r in found if set(lengths) <= r["places"].keys()]
        if places:
            known[label] = {n: np.mean([ndcg(np.array(p[n])) for p in places], 0) for n in lengths}
    for label in others:
        if label in known and first in known:
            cells = []
            for n in lengths:
                apart = 100 * (known[label][n] - known[first][n])
                low, high = bootstrap(apart, np.array(result["answers"]))
                interval = f" [{low:.1f}, {high:.1f}]" if math.isfinite(low) else ""
                cells.append(f"{apart.mean():.1f}{interval}")
            rows.append([f"{label} - {first}", *cells])
    if not rows:  # a single row
        return ""
    heads = ["difference", *(f"{int(n):,} ({int(n) // T}x)" for n in lengths)]
    return (f"\n\nnDCG@10 of documents read as a whole, minus {first}'s over the same queries, "
            "means of each row's seeds, with 95 % intervals over documents (other seeds would add "
            f"to them):\n\n{markdown(heads, rows)}")


def evidence_table(result, T):
    """nDCG@10 in % by where the answer begins; "" where that is not known."""
    where, rows = result["runs"][0]["by_answer_at"], []
    if not where:
        return ""
    readings = dict(whole="", windows=", its best window", first=f", the first {T} tokens alone")
    for reading, words in readings.items():
        for label, found in grouped(result["runs"], "label").items():
            known = [r["by_answer_at"][reading] for r in found if reading in r["by_answer_at"]]
            if known:
                cells = [spread([100 * v for v in values if v is not None], ".1f")
                         for values in zip(*known)]
                rows.append([label + words, len(known), *cells])
    edges = [f"{a:,} to {b:,}" for a, b in zip(where["edges"], where["edges"][1:])]
    rows.append(["BM25", "-", *(f"{100 * v:.1f}" if v is not None else "-" for v in where["bm25"])])
    rows.append(["queries", "-", *map(str, where["queries"])])
    return ("\n\nnDCG@10 by the token at which the answer begins, documents of "
            f"{where['length']:,} tokens:\n\n" + markdown(["model", "seeds", *edges], rows))


def losses_table(result):
    """The loss by step: a quarter, half, and all of the training, and at its end the validation."""
    last = result["runs"][0]["iter"]
    rows, shares = [], (0.25, 0.5, 1)
    for label, found in grouped(result["runs"], "label").items():
        cells = []
        for share in shares:
            means = []
            for r in found:
                part = [y for it, y in r["loss"] if (share - 0.1) * last < it <= share * last]
                means.append(statistics.mean(part))
            cells.append(spread(means, ".3f"))
        cells.append(spread([r["val_loss"][-1][1] for r in found], ".3f"))
        rows.append([label, len(found), *cells])
    heads = [f"training, up to step {int(share * last):,}" for share in shares]
    return markdown(["model", "seeds", *heads, "validation"], rows)


def unfinished(found, longer, T):
    """What is said of a row whose perplexity falls by more than 3 % with twice the steps."""
    once, twice = ([r["perplexity"][T] for r in runs_] for runs_ in (found, longer))
    lower = 1 - statistics.mean(twice) / statistics.mean(once) if twice else 0
    return f" (unfinished: {lower:.0%} lower with x2)" if lower > 0.03 else ""


def text_table(result):
    """
    Perplexity by window length, the paper's beside it where its model was read at the same length
    after the same training; and below, where there is any, in windows that overlap by half.
    """
    lengths, published = result["lengths"], result.get("paper", {})
    ratio = any(len(theirs) > 5 for theirs in published.values())  # CABLE's Table 1 has it
    at = list(result.get("paper_lengths", ()))
    T, last = result["runs"][0]["block_size"], lengths[-1]
    rows, heads = [], []
    for n in lengths:
        heads += [f"{n:,}", "paper"] if n in at else [f"{n:,}"]
    rows_of = grouped([dict(label=r["model"]) | r for r in result["runs"]], "label")
    for model, found in rows_of.items():
        mark = unfinished(found, rows_of.get(f"{model} x2", []), str(T))
        cells, theirs = [], published.get(model, ())
        for n in lengths:
            cells.append(spread(at_length(found, "perplexity", n), ".3f"))
            if n in at:
                there = at.index(n) < len(theirs)
                cells.append(f"{theirs[at.index(n)]:.2f}" if there else "-")
        if len(lengths) > 1:
            cells.append(far_ratio(found, "perplexity", last, T))
        if ratio:
            cells.append(f"{theirs[5] / theirs[1]:.3f}" if len(theirs) > 5 else "-")
        rows.append([model + mark, len(found), *cells])
    if len(lengths) > 1:
        heads.append(f"{last:,} / {T:,}")
    if ratio:
        heads.append("paper: 15,360 / 1,024")
    return markdown(["model", "seeds", *heads], rows) + strided_table(result, rows_of, T)


def strided_table(result, rows_of, T):
    """Does it use what it sees? "" where no run was read like that."""
    if "strided_tokens" not in result:
        return ""
    lengths, last, rows = result["lengths"], result["lengths"][-1], []
    bases = [n for n in (T, 2 * T) if n in lengths[:-1]]
    for model, found in rows_of.items():
        found = [r for r in found if "strided" in r]
        if found:
            cells = [spread(at_length(found, "strided", n), ".3f") for n in lengths]
            ratios = [far_ratio(found, "strided", last, n) for n in bases]
            rows.append([model, len(found), *cells, *ratios])
    def gain(row):
        cell = row[-len(bases)]
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
    return f"\n\n{text}\n\n{markdown(['model', 'seeds', *heads], rows)}"


def at_length(found, kind, n):
    """The perplexities of runs in windows of n tokens, of those that have been read there."""
    return [r[kind][str(n)] for r in found if str(n) in r.get(kind, {})]


def far_ratio(found, kind, last, first):
    """Perplexity in windows of `last` over that in windows of `first`, mean over runs: a cell."""
    both = [r[kind] for r in found if {str(first), str(last)} <= r.get(kind, {}).keys()]
    far = [p[str(last)] / p[str(first)] for p in both]
    return f"{statistics.mean(far):.3f}" if far else "-"


REASONS = {"ends": "the method has no positions for strings of that length",
           "diverged": "the loss or the weights were NaN or infinite in training",
           "not finite": "the loss or the logits were NaN or infinite in evaluation",
           "failed": "eval.py ended in an error", "another text": "that of another Python"}


def matrix_table(result):
    """A row for each method, a column for each number; * marks runs that were not finished."""
    rows, why = [], {}
    for label, by_column in result["cells"].items():
        shown = []
        for name, cell in by_column.items():
            form = result["columns"][name]["form"]
            if "value" not in cell:
                shown.append(cell["reason"])
                why[cell["reason"]] = REASONS.get(cell["reason"], "")
                continue
            text = format(cell["value"], form)
            if "spread" in cell:
                text += f" ± {cell['spread']:{form}}"
            shown.append(f"{text} \\*" if cell["unfinished"] else text)
        rows.append([label, *shown])
    said = "\n\n\\* not finished: the validation perplexity fell by more than 1 % over the last " \
           "fifth of the steps."
    for reason, words in why.items():
        said += f" {reason.capitalize()}: {words}." if words else ""
    return markdown(["method", *result["columns"]], rows) + said


def percent(found):
    """
    Rates {value, low, high} -> in %, the mean and range of several seeds, as one may have learned
    what another has not, and no range where all are alike; or one seed and its interval. A dash
    where there is nothing.
    """
    if not found:
        return "-"
    def number(y):
        return f"{100 * y:.0f}" if y in (0, 1) else f"{100 * y:.2f}"
    values = [f["value"] for f in found]
    low, mean, high = map(number, (min(values), statistics.mean(values), max(values)))
    if len(found) == 1:
        return f"{mean} [{number(found[0]['low'])}, {number(found[0]['high'])}]"
    return mean if low == high else f"{mean} ({low} to {high})"


def task_table(result):
    """Rates in %, beside the paper's."""
    published, rows, heads = result["paper"], [], []
    first, *longer = result["runs"][0]["scores"]  # the lengths; the paper has the first alone
    for name, *_ in result["columns"]:
        heads += [name, "paper"] if published else [name]
        heads += [f"{int(T):,}" if name == first else f"{name} {int(T):,}" for T in longer]
    for label, found in grouped(result["runs"], "label").items():
        cells = []
        for n, (_, split, metric) in enumerate(result["columns"]):
            for T in (first, *longer):
                scores = [r["scores"].get(T, {}) for r in found]
                cells.append(percent([s[split][metric] for s in scores if split in s]))
                if published and T == first:
                    cells.append(f"{published[label][n]:g}" if label in published else "-")
        rows.append([label, len(found), *cells])
    text = markdown(["model", "seeds", *heads], rows)
    if any("by_answer" in r for r in result["runs"]):
        text += "\n\n" + answers_table(result)
    return text


def answers_table(result):
    """
    The error by answer, and that of a guess: always the answer that is the commonest in the same
    test set.
    """
    rows, known = [], set()
    for label, found in grouped(result["runs"], "label").items():
        for name, split, _ in result["columns"]:
            by_answer = [next(iter(r["by_answer"].values()))[split] for r in found]
            counts = {answer: n for answer, (n, _) in by_answer[0].items()}
            known |= counts.keys()
            cells = {}
            for answer, n in counts.items():
                error = statistics.mean(100 * one[answer][1] for one in by_answer)
                cells[answer] = f"{error:.1f} of {n:,}"
            guess = 100 * (1 - max(counts.values()) / sum(counts.values()))
            rows.append((label, name, guess, cells))
    answers = sorted(known, key=int)
    lines = []
    for label, name, guess, cells in rows:
        shown = [cells.get(answer, "-") for answer in answers]
        lines.append([label, name, f"{guess:.2f}", *shown])
    return ("Error (%) by the right answer, and how many programs have it; a constant guess is "
            "always the commonest of them.\n\n"
            + markdown(["model", "test set", "a constant guess", *answers], lines))


def best_trial(trials, metric, weights):
    """The one that is best on the validation sequences; None where every one has diverged."""
    sign = 1 if metric == "tvd" else -1
    known = [t for t in trials if None not in (t[metric][weights]["validation"],
                                               t[metric][weights]["test"])]
    return min(known, key=lambda t: sign * t[metric][weights]["validation"], default=None)


CONTROL = "pre_final"  # pre-norm with an ordinary final norm, as GPT-2 has it


def search_table(result):
    """
    The dots of a random search, a table for each panel: median and best of every scheme, of the
    last weights and of their averages, and in how many of their shared trials it is better than the
    first, and than the control, if there is one; of a search with EMA, also how often an average is
    better.
    """
    metric, kinds = result["metric"], weights_of(result)
    name, texts = dict(tvd="TVD", auc="AUC").get(metric, metric), []
    first, *schemes = result["panels"][0]["schemes"]
    references = [first, CONTROL] if CONTROL in schemes else [first]
    averages = kinds[1:] if "ema" in kinds else []
    head = ["scheme", "trials", "diverged", "median", "best"]
    for weights in kinds[1:]:
        head += [f"median, {weights.upper()}", f"best, {weights.upper()}"]
    head += [f"better than {reference}" for reference in references]
    head += [f"{weights.upper()} better than without" for weights in averages]
    head += [f"best / {first}'s best"] if metric == "tvd" else []
    for panel in result["panels"]:
        a, b = panel["at"]
        where = f"{panel['name']}, at {a:,}" + (f" to {b:,}" if b > a else "")
        rows = panel_rows(panel["schemes"], metric, kinds, references, averages)
        texts.append(f"{name}, {where}:\n\n{markdown(head, rows)}")
    texts.append(f"Better than {' and '.join(references)}: in so many of the shared trials (the "
                 "same hyper-parameters and initial weights; raw weights; without ties and without "
                 "trials of which one has diverged); p by a two-sided sign test, not corrected for "
                 "the number of tests here.")
    if "theorem" in result:
        texts.append(theorem_table(result["theorem"]))
    return "\n\n".join(texts)


def panel_rows(schemes, metric, kinds, references, averages):
    """A row for each scheme: what search_table says of it."""
    rows = []
    for scheme, found in schemes.items():
        trials, cells = found["trials"], []
        for weights in kinds:
            known = [t[metric][weights]["test"] for t in trials]
            known = [y for y in known if y is not None]
            best = best_trial(trials, metric, weights)
            cells.append(f"{statistics.median(known):.4f}" if known else "-")
            cells.append(f"{best[metric][weights]['test']:.4f}" if best else "-")
        for name in references:
            reference = schemes[name]["trials"]
            cells.append("-" if scheme == name else sign_cells(trials, reference, metric))
        for weights in averages:
            cells.append(sign_cells(trials, trials, metric, weights))
        if metric == "tvd":  # a distance: how many times smaller?
            cells.append(best_ratio(trials, schemes[references[0]]["trials"]))
        diverged = sum(not t["finite"] for t in trials)
        rows.append([scheme, len(trials), diverged, *cells])
    return rows


def sign_test(pairs):
    """
    (ours, theirs) of trials that two schemes share, where less is better -> how often ours is less,
    of how many, and the probability of a split as uneven as this one or more, were both sides
    equally likely: exact, two-sided. Ties, and trials of which either has diverged, are left out.
    """
    known = [(a, b) for a, b in pairs if a is not None and b is not None and a != b]
    wins, n = sum(a < b for a, b in known), len(known)
    tail = sum(math.comb(n, k) for k in range(min(wins, n - wins) + 1))
    return wins, n, min(1.0, 2 * tail / 2**n)


def weights_of(result):
    """Which of raw, ema and bema all trials of a search have numbers of."""
    trials = [t for panel in result["panels"] for found in panel["schemes"].values()
              for t in found["trials"]]
    return [name for name in ("raw", "ema", "bema")
            if all(name in t[result["metric"]] for t in trials)]


def sign_cells(trials, reference, metric, weights="raw"):
    """Wins over another scheme's raw weights and their p, by the test number: trial by trial."""
    sign = 1 if metric == "tvd" else -1
    pairs = []
    for ours, theirs in zip(trials, reference):
        both = ours[metric][weights]["test"], theirs[metric]["raw"]["test"]
        pairs.append([None if y is None else sign * y for y in both])
    wins, n, p = sign_test(pairs)
    return f"{wins} of {n}, p = {p:.2g}"


def best_ratio(trials, reference):
    a, b = best_trial(trials, "tvd", "raw"), best_trial(reference, "tvd", "raw")
    return f"{a['tvd']['raw']['test'] / b['tvd']['raw']['test']:.2f}" if a and b else "-"


def theorem_table(found):
    n = found["n"]
    lengths, rows = [length for length in (2, 8, 32, n - 1) if length < n], []
    for norm, m in found["models"].items():
        cells = [f"{m['precision'][T - 2]:.2f} ({m['tvd'][T - 2]:.3f})" for T in lengths]
        far = max(abs(a - b) for a, b in zip(m["formula"], m["precision"]))
        rows.append([norm, *cells, f"{far:.1e}"])
    return (f"Hard-coded models, n = {n}, precision (TVD) at length:\n\n"
            + markdown(["norm", *lengths, "largest difference from the formula"], rows))


# -----------------------------------------------------------------------------
# eval.py's and bench.py's results

def lengths_table(result):
    """eval.py's scores of a task at several lengths: the first metric, in %."""
    rows = []
    splits = result["splits"]
    lengths = list(result["runs"][0]["scores"])
    heads = [f"{split} {int(T):,}" for split in splits for T in lengths]
    for model, found in grouped(result["runs"], "model").items():
        cells = []
        for split in splits:
            for T in lengths:
                scores = [r["scores"][T][split] for r in found if split in r["scores"].get(T, {})]
                cells.append(percent([next(iter(s.values())) for s in scores]))
        rows.append([model, len(found), *cells])
    return markdown(["model", "runs", *heads], rows)


def papers_table(result):
    """lm's perplexities at the training length and in the longest window, beside the papers'."""
    T, last = (str(n) for n in (result["lengths"][0], result["lengths"][-1]))
    rows, published = [], result["papers"]
    read = ("perplexity", T), ("perplexity", last), ("strided", last)
    for label, found in grouped(result["runs"], "label").items():
        theirs = [numbers.get(label) for numbers in published.values()]
        ours = [spread(at_length(found, kind, n), ".3f") for kind, n in read]
        if any(theirs):
            shown = [y if isinstance(y, str) else f"{y:.2f}" if y else "-" for y in theirs]
            rows.append([label, *ours, *shown])
    return markdown(["row", f"{int(T):,}", f"{int(last):,}", f"{int(last):,}, strided",
                     *published], rows)


HEADS = dict(tok_s="tok/s in training", of_nope="of nope's", ms="ms a decoded token",
             times_nope="times nope's", peak_GB="peak memory, GB", cached_s="s with the cache",
             uncached_s="s without", times_faster="times as long without")


def bench_table(result):
    """Whatever kinds of measurement are in a JSON of bench.py."""
    text = []
    kinds = {k: result[k] for k in ("train", "decode", "memory") if k in result}
    if kinds:
        text.append(models_table(kinds))
    if "generate" in result:
        text.append(models_table({"generate": result["generate"]}))
    if "attention" in result:
        text.append(attention_table(result["attention"]))
    if "kernels" in result:
        text.append(kernels_table(result["kernels"]))
    return "\n\n".join(text)


def models_table(kinds):
    """{kind: {model: {what: number}}} -> a row for each model."""
    heads, rows = [], {}
    for found in kinds.values():
        names = list(next(iter(found.values())))
        heads += [HEADS.get(name, name.replace("_", " ")) for name in names]
        for model in found:
            rows.setdefault(model, [])
    for model, cells in rows.items():
        for found in kinds.values():
            for name in next(iter(found.values())):
                y = found.get(model, {}).get(name)
                cells.append("-" if y is None else f"{y:,}" if isinstance(y, int) else f"{y:.2f}")
    return markdown(["model", *heads], [[model, *cells] for model, cells in rows.items()])


def attention_table(found):
    """Time beside the first row's (scaled_dot_product_attention), and peak memory."""
    columns, names = [], {}
    for T, rows in found.items():
        names |= dict.fromkeys(rows)
        for kind in ("forward", "both"):
            if any(f"{kind}_ms" in r for r in rows.values()):
                columns.append((T, kind))
    reference = next(iter(names))
    heads = []
    for T, kind in columns:
        what = dict(forward="forward", both="forward and backward")[kind]
        ms = found[T][reference].get(f"{kind}_ms")
        took = f"{ms:,.0f} ms" if ms else "failed"
        heads.append(f"{what}, T = {int(T):,} ({reference}: {took})")
    lines = []
    for name in names:
        cells = []
        for T, kind in columns:
            r = found[T].get(name, {})
            cell = "failed" if f"{kind}_failed" in r else "-"
            if f"{kind}_ms" in r:  # and no time to compare it with
                cell = f"{r[f'{kind}_ms']:,.1f} ms"
            if f"{kind}_of_{reference}" in r:
                cell = f"{r[f'{kind}_of_{reference}']:.2f}"
            if f"{kind}_GB" in r:
                cell += f" ({r[f'{kind}_GB']:.2f})"
            cells.append(cell)
        lines.append([name, *cells])
    return markdown([f"times {reference} (GB)", *heads], lines)


def kernels_table(found):
    """Registers / bytes spilled / instructions, a row for each kernel."""
    rows, columns = {}, {}
    for name, r in found.items():
        kernel, _, target = name.partition(", ")
        columns[target] = None
        spilled = max(r["spill_stores"], r["spill_loads"])
        cell = f"{r['registers']} / {spilled} / {r['instructions']:,}"
        rows.setdefault(kernel, {})[target] = cell + (" C7515" if r["serialized"] else "")
    lines = [[kernel, *(cells.get(t, "-") for t in columns)] for kernel, cells in rows.items()]
    return markdown(["registers / bytes spilled / instructions a tile", *columns], lines)


def verdict(result):
    """What bench.py gpu found, against speed.TARGETS, as one page."""
    lines = ["# The kernels on a GPU", "", f"`{result['command']}`, {result['where']}", ""]
    stopped = result.get("stopped")
    lines += [f"**Stopped {stopped}.** What was measured before is below.", ""] if stopped else []
    tests = result.get("tests")
    if tests:
        lines += [f"Tests: **{'met' if tests['ok'] else 'MISSED'}** ({tests['said']})", ""]
        lines += [f"- {line}" for line in tests["failed"]]
    for name, r in result.get("repeats", {}).items():
        met = "MISSED" if r["different"] or not r["times"] else "met"
        lines.append(f"- {name}, the same bits {r['times']:,} times: **{met}**"
                     f" ({r['different']} differ)")
    rows = []
    for (name, T), most in speed.TARGETS.items():
        found = result.get("attention", {})
        row = found.get(T, found.get(str(T), {})).get(f"{name}: kernel", {})
        for key, target in zip(("forward", "both"), most):
            x = row.get(f"{key}_of_sdpa")
            said = row.get(f"{key}_failed", "not measured")
            met = said if x is None else "met" if x <= target else "MISSED"
            what = "forward" if key == "forward" else "forward and backward"
            rows.append([name, f"{T:,}", what, target, "-" if x is None else f"{x:.2f}", met])
    head = ["attention", "T", "time beside torch's own", "target, at most", "measured", "verdict"]
    return "\n".join([*lines, "", markdown(head, rows)])


def stress_table(result):
    """How many cases of every kind `python test_all.py stress` had, without a failure."""
    return markdown(["what", "how often"], [[k, f"{n:,}"] for k, n in result["counts"].items()])


# -----------------------------------------------------------------------------
# how long an entry takes

def duration(seconds):
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def kind_of(scale):
    """The file that makes the jobs of a scale, and collects what comes of them."""
    if "tasks" in scale:
        return matrix
    return minimal if "panels" in scale else trainings


def older(entry, scale, result):
    """Why a JSON is not of this definition of its entry, in words; "" where it is."""
    kind = kind_of(entry[scale])
    try:
        return kind.older(result, entry, entry[scale])
    except (KeyError, IndexError, TypeError, AttributeError) as e:
        return f"{type(e).__name__}: {e}, in it or in the entry"
    except (ValueError, SystemExit) as e:  # a task or a model that is no more
        return str(e).removeprefix("error: ")


def read(path):
    """A JSON file of results/: a dict."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError
        return found
    except ValueError:
        runs.fail(f"{path} is damaged: restore or remove it")


def measured(name, entry, scale):
    """
    Seconds of every job in an entry's committed result; [] where there is none, or one of an older
    definition.
    """
    path = runs.ROOT / "results" / f"{name}.{scale}.json"
    if not path.exists():
        return []
    result, seconds = read(path), []
    if older(entry, scale, result):
        return []
    for panel in result.get("panels", []):
        seconds += [found["seconds"] for found in panel["schemes"].values()]
    for r in result.get("runs", []):
        evaluation = r["eval_seconds"]
        if isinstance(evaluation, dict):
            evaluation = sum(evaluation.values())
        seconds.append(r["train_seconds"] + evaluation)
    return seconds


def expected(name, entry, scale, jobs=None):
    """How long an entry takes, or so many of its jobs, in words."""
    todo = entry[scale]
    if "panels" in todo:
        what = f"searches of {todo['trials']} trials"
        n = len(todo["panels"]) * len(entry["schemes"])
    else:
        n, what = sum(seeds for _, seeds in todo["rows"].values()), "runs"
        n *= len(trainings.by_task(todo))
    n = n if jobs is None else jobs
    if "first" in entry:
        what += f" (and {entry['first']}'s, with which they begin)"
    seconds, about = measured(name, entry, scale), ""
    if not seconds and "minutes" in todo:
        seconds, about = [60 * todo["minutes"]], "about "
    if not seconds:
        return f"not measured: {n} {what}"
    each = statistics.mean(seconds)
    return f"{about}{duration(n * each)}: {n} {what}, {about}{duration(each)} each"


# -----------------------------------------------------------------------------
# the page

def machines(environments):
    """On which machines, and there by which commits, something was measured."""
    commits = {}
    for e in environments:
        threads = "thread" if e["threads"] == 1 else "threads"
        where = (f"{e['gpu'] or e['cpu']}, {e['threads']} {threads}, torch {e['torch']}, "
                 f"Python {e['python']}")
        commits.setdefault(where, set()).add(e["commit"])
    return "; ".join(f"{where}, commit{'s' if len(known) > 1 else ''} {', '.join(sorted(known))}"
                     for where, known in commits.items())


def how(result):
    """On which machine, by which commits and on how much a result of reproduce.py was measured."""
    if "panels" in result:
        groups = [g for p in result["panels"] for g in p["schemes"].values()]
        fewer = " (fewer of more than 1,024 items)" if result["metric"] == "accuracy" else ""
        text = (f"{result['steps']:,} steps, {result['trials']} trials of every scheme, the same "
                f"hyper-parameters for all schemes, {result['sequences']:,} sequences{fewer}; "
                f"{sum(g['seconds'] for g in groups) / 60:,.0f} minutes of training in all. The "
                "best trial is chosen on other sequences than its number is from.")
    elif "cells" in result:
        groups = result["runs"]
        minutes = sum(g["train_seconds"] + g["eval_seconds"] for g in groups) / 60
        text = (f"{len(groups)} trainings, {minutes:,.0f} minutes with their evaluations, each as "
                f"`{groups[0]['train_command']}` and so on")
    else:
        groups = result["runs"]
        if "queries" in result:
            much = (f"{result['queries']:,} queries, {result['documents']:,} documents of "
                    f"{result['split']}, chance {100 * result['chance']:.1f}")
        elif "sequences" in result:
            much = f"{result['sequences']:,} sequences a split"
        else:
            much = f"{result['tokens']:,} tokens of {result['split']}"
        minutes = sum(r["train_seconds"] for r in groups) / 60
        name = result["data"].get("source", result["data"]["corpus"])
        text = (f"{name}, {much}; {minutes:,.0f} minutes of training in all. "
                f"Each row is `{groups[0]['train_command']}` and so on, then `eval.py`.")
    return f"{machines(g['environment'] for g in groups)}; {text}"


def part(name, about, commands, measured, text, reads, figures):
    """One section of the page."""
    lines = [f"### {name}", "", f"{about}.", ""]
    if commands:
        lines += ["```", *commands, "```", ""]
    for paragraph in (measured, text):
        if paragraph:
            lines += [paragraph, ""]
    for sentence in reads:
        lines.append(f"- {sentence}")
    if reads:
        lines.append("")
    for figure in figures:
        if (runs.ROOT / "results" / figure).exists():
            lines += [f"![{figure.removesuffix('.png')}]({figure})", ""]
    return lines


def entry_part(stem, entry, scale, result):
    """One section; of a result of an older definition only that it is one."""
    why, reads = older(entry, scale, result), entry[scale].get("reads", [])
    if why:
        said = f"Not shown: `results/{stem}.json` is of an older definition of this entry ({why})."
        command = f"python reproduce.py {stem.removesuffix(f'.{scale}')} --scale {scale}"
        return part(stem, entry["about"], [command], "", said, [], [])
    figures = [f"{stem}.png", f"{stem}.steps.png", f"{stem}.reading.png"]
    return part(stem, result["about"], [result["command"]], how(result), table(result), reads,
                figures)


def section_part(name, section, folder):
    """A section with what eval.py or bench.py wrote for it, if anything."""
    found = [read(folder / file) for file in section.get("json", [])]
    commands = section.get("commands") or [result["command"] for result in found]
    make = globals()[section.get("table", "bench_table")]
    text = "\n\n".join(map(make, found))
    measured = [r.get("environment", result["environment"]) for result in found
                for r in result.get("runs", [result])]
    return part(name, section["about"], commands, machines(measured), text,
                section.get("reads", []), section.get("figures", []))


def chapter(module, folder):
    """A file of experiments/ -> {section's name: its lines}."""
    parts = {}
    for name, entry in experiments.entries(module).items():
        for scale in ("cpu", "paper"):
            stem = f"{name}.{scale}"
            if scale in entry and (folder / f"{stem}.json").exists():
                result = read(folder / f"{stem}.json")
                parts[stem] = entry_part(stem, entry, scale, result)
    for name, section in getattr(module, "SECTIONS", {}).items():
        if all((folder / file).exists() for file in section.get("json", [])):
            parts[name] = section_part(name, section, folder)
    return parts


def others(folder):
    """What bench.py measured elsewhere, on a GPU for instance -> {section's name: its lines}."""
    known = set()
    for module in experiments.files():
        for section in getattr(module, "SECTIONS", {}).values():
            known |= set(section.get("json", []))
    parts = {}
    for path in sorted(folder.glob("bench.*.json")):
        if path.name not in known:
            figure = path.with_suffix(".png").name
            section = dict(about="Measured by bench.py", json=[path.name], figures=[figure])
            parts[path.stem] = section_part(path.stem, section, folder)
    return parts


def not_run(folder):
    """A line for each scale: the entries that have no result."""
    lines = []
    for scale in ("cpu", "paper"):
        names = [name for name, entry in experiments.known().items() if scale in entry]
        missing = [name for name in names if not (folder / f"{name}.{scale}.json").exists()]
        if missing:
            words = "every entry" if missing == names else ", ".join(missing)
            lines.append(f"- `--scale {scale}`: {words}")
    return ["## Not run yet", "", *lines, ""]


def page():
    """The whole of results/README.md: a chapter for each file of experiments/."""
    folder, contents, lines = runs.ROOT / "results", [], []
    chapters = []
    for module in experiments.files():
        title, _, intro = (module.__doc__ or module.__name__).strip().partition("\n")
        chapters.append((title.rstrip("."), intro.strip(), chapter(module, folder)))
    chapters.append(("Measured elsewhere", "", others(folder)))
    for title, intro, parts in chapters:
        if not parts:
            continue
        links = [f"[{name}](#{name.replace('.', '')})" for name in parts]
        contents.append(f"- {title}: {', '.join(links)}")
        lines += [f"## {title}", ""]
        if intro:
            lines += [intro.replace("\n", " "), ""]
        for part_lines in parts.values():
            lines += part_lines
    return "\n".join([INTRO, *contents, "", *lines, *not_run(folder)])


def write_page():
    """results/README.md, anew."""
    text = page()
    path = runs.ROOT / "results" / "README.md"
    runs.write_safely(path, lambda tmp: tmp.write_text(text))
