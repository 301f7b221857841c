"""
The figure of an entry: figures/plot.py draws it, or one of four kinds is drawn here: a table in
colours (the matrix, and a task's scores by length), what survives and what reads, random searches,
and Theorem 4.2.
"""
import itertools
import math
import os
import statistics
import textwrap
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rc_context
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from common import ROOT
from common.exits import script
from common.files import write_figure
from figures import plot
from lab import REPAIRS, find, tables

WORST_TO_BEST = ListedColormap(plt.get_cmap("RdYlBu")(np.linspace(0.08, 0.92, 256)))


@rc_context(plot.STYLE)
def draw(table, runs, out, added=()):
    """The figures of a table's runs, some of rows that were added: OUT.png, or another ending."""
    entry = table.entry
    if "models" in runs[-1]:
        theorem(*runs, f"{out}.png")
    elif "panels" in table.part:
        trials(entry["metric"], runs, f"{out}.png")
    elif "tasks" in table.part:
        heat_map(runs, entry["columns"], MATRIX, f"{out}.png", added)
    elif "columns" in entry and len(runs[0]["scores"]) > 1:
        columns = columns_by_length(runs, entry["columns"])
        heat_map(runs, columns, SCORES, f"{out}.png", added)
    else:
        plotted(table, runs, out, added)
    if "plotted_against" in entry:
        of_text = tables.runs_of(find(entry["plotted_against"], table.scale))
        if of_text:
            survive(runs, of_text, entry["columns"], f"{out}.survive.png")


def plotted(table, runs, out, added):
    """What figures/plot.py draws of folders of runs."""
    entry, folders = table.entry, (table.runs, ROOT / table.added / "runs")
    words = [os.path.relpath(folder) for folder in folders if folder.exists()]
    rows = tables.grouped(runs)
    drawn = [*entry.get("drawn", rows), *added]
    shown = [row for row in rows if row in drawn]
    words += ["--rows", *shown, "--out", f"{os.path.relpath(out)}.png"]
    if "columns" in entry:
        kind, words = "scores", [*words, "--metric", entry["columns"][0][2]]
    else:
        kind = "curves" if "losses" in entry else "ndcg" if "search" in runs[0] else "lengths"
    script("figures.plot", kind, *words)
    if "steps" in entry:
        script("figures.plot", "errors", *words, "--out", f"{os.path.relpath(out)}.steps.png")


# -----------------------------------------------------------------------------
# tables in colours

MATRIX = """colours: from the worst of a column, red, to the best, blue; they span 10 points, \
10 % of a perplexity or 0.05 at least
↓: less is better, all others are % right, or AUC; ends: no positions for such lengths
iid: as in training; TVD: total variation distance; AUC: area under the ROC curve
"""
SCORES = "colours: from all wrong, red, to all right, blue\n"
SEEDS = "small: the lowest and the highest of several seeds"


def columns_by_length(runs, columns):
    """A task's scores in %, as columns of a matrix: a test set, and the length of its strings."""
    found, metric = {}, columns[0][2]
    better = "less" if metric.endswith(("error", "glitch_rate")) else "more"
    splits = sorted(dict.fromkeys(split for _, split, _ in columns), key="dense".__eq__)
    for split, T in itertools.product(splits, runs[0]["scores"]):
        def read(run, split=split, T=T):
            scores = run["scores"].get(T, {}).get(split)
            return 100 * scores[metric]["value"] if scores else None
        found[f"{plot.spelled(split)}: {int(T):,}"] = dict(
            task=None, read=read, form=".1f", better=better, ends=(0, 100))
    return found


def heat_map(runs, columns, words, out, added=()):
    """
    A row for each method, a column for each number: its colour is its place between the column's
    worst and best. Empty: no number, and why. Added rows are framed.
    """
    rows = tables.grouped(runs)
    shares = np.empty((len(rows), len(columns)))
    fig = Figure(figsize=(0.78 * len(columns), 0.4 * len(rows)))  # the cells fill it
    ax = fig.add_axes([0, 0, 1, 1])
    ax.axis("off")
    for x, (name, column) in enumerate(columns.items()):
        cells = [tables.values_of(name, column, same) for same in rows.values()]
        shares[:, x] = shares_of(cells, column)
        for y, values in enumerate(cells):
            text, share = text_of(values, column["form"]), shares[y, x]
            small = np.isnan(share) or "\n" in text
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8 if small else 11,
                    color="white" if abs(share - 0.5) > 0.39 else "black")
    ax.pcolormesh(shares, cmap=WORST_TO_BEST, vmin=0, vmax=1, edgecolors="white", lw=2)
    for y, label in enumerate(rows):
        ax.text(-0.1, y + 0.5, label, ha="right", va="center")
        if label in added:
            ax.add_patch(plt.Rectangle((0, y), len(columns), 1, fill=False, lw=2.5, clip_on=False))
    ax.set_ylim(len(rows), 0)
    headings(ax, columns)
    ax.text(0, len(rows) + 0.25, words + SEEDS, va="top", fontsize=9)
    write_figure(fig, out)


def headings(ax, columns):
    """Over its column what a number is, and over a line what the task of these columns is."""
    style, first = dict(ha="center", va="bottom", fontsize=8), 0
    for x, (name, column) in enumerate(columns.items()):
        words = name.split(": ")[1].replace(" x", "\xa0x")  # 16 x stays on one line
        number = textwrap.fill(words, 11, break_long_words=False)
        arrow = " ↓" if column["better"] == "less" else ""
        ax.text(x + 0.5, -0.15, number + arrow, **style)
    for task, n in Counter(name.split(": ")[0] for name in columns).items():
        ax.plot([first + 0.06, first + n - 0.06], [-1, -1], color="black", lw=1, clip_on=False)
        ax.text(first + n / 2, -1.1, textwrap.fill(task, 11 * n), weight="bold", **style)
        first += n


def shares_of(cells, column):
    """How good the mean of each cell's values is, from 0, the worst, to 1; NaN: there is none."""
    values = np.array([math.nan if tables.missing(y) else statistics.mean(y) for y in cells])
    if column.get("logarithmic"):
        values = np.log(values)
    if "ends" in column:
        worst, best = column["ends"]
    elif np.isfinite(values).sum() < 2:  # neither the best nor the worst
        return 0.5 + 0 * values
    else:
        worst, best = np.nanmin(values), np.nanmax(values)
    if column["better"] == "less":
        values, worst, best = -values, -best, -worst
    if "least" in column:
        worst = min(worst, best - column["least"])  # 99 is not the worst beside 99.5
    return (values - worst) / (best - worst)


def text_of(values, form):
    """Their mean in few characters: 100.0 as 100, 12345.67 as 12,346; below, the ends of seeds."""
    def short(y):
        return f"{y:,.0f}" if abs(y) >= 1000 else format(y, form).removesuffix(".0")
    if tables.missing(values):
        return tables.missing(values)
    low, high = short(min(values)), short(max(values))
    return short(statistics.mean(values)) + (f"\n{low} to {high}" if low != high else "")


# -----------------------------------------------------------------------------
# what survives, and what reads

def survive(runs, of_text, columns, out):
    """
    Two questions in one picture: how much worse is text in windows of 16 times the training length
    (x), and how much is recalled of strings as long (y), by runs that had learned to at the
    training length? Means of seeds, and their ranges; squares are repaired at test time.
    """
    xs, ys = {}, {}
    near, *_, far = sorted({n for run in of_text for n in run["lengths"]})
    for run in of_text:
        if ratio := tables.over(run, "perplexity", far, near):
            xs.setdefault(run["label"], []).append(ratio)
    first, *_, last = columns_by_length(runs, columns).values()
    for run in runs:
        if (first["read"](run) or 0) > 80:  # %; else it cannot show what it has forgotten
            ys.setdefault(run["label"], []).append(last["read"](run) or 0)
    fig, axes = plot.subplots(1, 7, 5)
    ax, both = axes[0, 0], [label for label in ys if label in xs]
    upper_left = ax.inset_axes([0.3, 0.45, 0.28, 0.4], xlim=(0.88, 1.17), ylim=(85, 102),
                               xticks=(0.9, 1, 1.1), yticks=(90, 100))  # where most are
    for where in (ax, upper_left):
        for n, label in enumerate(both):
            repaired = label.rpartition(", ")[2] in REPAIRS
            (x, across), (y, up) = mean_and_range(xs[label]), mean_and_range(ys[label])
            where.errorbar(x, y, up, across, marker="s" if repaired else "oD^vP*X<>p"[n % 10],
                           color=plot.color_of(label), mec="white", ls="",
                           ms=12 - 6 * n / len(both), label=label)  # where they meet, all show
        where.axvline(1, color="gray", lw=1, ls=":", zorder=0)
    ax.indicate_inset_zoom(upper_left)
    ax.set(xscale="log", xlim=(0.5, None), ylim=(0, 106),
           title="up: it recalls what is far; left of the line: long text does no harm",
           xlabel="perplexity of text in windows of 4,096 tokens over that of 256, where it was "
                  "trained",
           ylabel="recall (%) in strings of 1,024 tokens,\ntrained on 64")
    plot.plain_logarithms(ax.xaxis, (1, 2, 5))
    plot.legend([ax])
    write_figure(fig, out)


def mean_and_range(seeds):
    """The range as errorbar has it: how far below and above."""
    mean = np.mean(seeds)
    return mean, [[mean - min(seeds)], [max(seeds) - mean]]


# -----------------------------------------------------------------------------
# random searches

def trials(metric, panels, out):
    """A random search: above every trial of every scheme, below the metric by length."""
    columns = 1 if len(panels) == 1 else 2 if len(panels) % 3 else 3
    rows = 2 * math.ceil(len(panels) / columns)
    fig, axes = plot.subplots(columns, 7.2 / columns, 3.2, rows, sharey="row")
    tops, lows = axes[::2].ravel(), axes[1::2].ravel()
    for top, low, panel in zip(tops, lows, panels):
        top.set_title(f"{panel['name']}\nat length {tables.lengths_of(panel)}", fontsize="medium")
        top.set_xticks(range(len(panel["schemes"])), panel["schemes"], rotation=30, ha="right")
        low.set_xlabel("length (symbols)")
        lengths = np.array(panel["lengths"], float).mean(1)
        if lengths[-1] > 1000:
            plot.length_axis(low)
        for n, (scheme, search) in enumerate(panel["schemes"].items()):
            swarm(top, n, scheme, search["trials"], metric)
            scores = [trial[metric]["raw"] for trial in search["trials"]]
            curves = [score["by_length"] for score in scores if None not in score.values()]
            if curves:
                low.plot(lengths, np.median(np.array(curves, float), 0), label=scheme,
                         color=plot.color_of(scheme), lw=3 - n / 3, ls=plot.DASHES[n % 4])
        if "block_size" in panel:
            plot.training_length(low, [panel])
    for kind in (tops, lows):
        for ax in kind:
            if metric == "tvd":
                ax.set_yscale("log")
                plot.plain_logarithms(ax.yaxis, (1, 3))
        low, high = np.array([ax.get_ylim() for ax in kind]).T
        plt.setp(kind, ylim=(low.min(), high.max()))  # one y axis
    plt.setp(axes[:, 0], ylabel=plot.spelled(metric))
    handles, labels = lows[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4)
    fig.suptitle("above: every trial (open: with averaged weights, triangles: EMA) and medians\n"
                 "below: medians by length", fontsize="medium")
    write_figure(fig, out)


LOOKS = dict(raw=dict(marker="o", ls=""), ema=dict(marker="^", ls="", mfc="none"),
             bema=dict(marker="o", ls="", mfc="none"))


def swarm(ax, n, scheme, trials, metric):
    """Every trial a dot, left with its last weights, right with their averages; NaN is left out."""
    kinds = trials[0][metric]  # of weights
    room = 0.8 / len(kinds)
    for place, weights in enumerate(kinds):
        ys = np.array(tables.tests_of(trials, metric, weights), float)
        ys = ys[np.isfinite(ys)]
        left = n - 0.4 + room * place
        x = np.linspace(left + 0.1 * room, left + 0.9 * room, len(ys))
        ax.plot(x, ys, color=plot.color_of(scheme), ms=3.5, alpha=0.7, **LOOKS[weights])
        if len(ys):
            ax.hlines(np.median(ys), x[0], x[-1], color="black", lw=1.6, zorder=3)


WHERE = dict(none="no norm", output="a norm on the attention's output",
             post="a norm on the sum", pre_final="a norm before the logits")


def theorem(panel, hard_coded, out):
    """Precision by length, relative to length 2, and TVD: hard-coded models, and trained ones."""
    fig, axes = plot.subplots(2, 3.9, 4.6)
    T, (left, right) = hard_coded["lengths"], axes[0]
    for norm, model in hard_coded["models"].items():
        color = plot.color_of(norm)
        search = panel["schemes"].get(norm, dict(trials=[]))  # if half done
        trained = [trial for trial in search["trials"] if trial["finite"]]
        formula, measured = np.array([model["formula"], model["precision"]])
        left.plot(T, formula / formula[0], color=color, lw=2.4, label=f"{norm}: {WHERE[norm]}")
        left.plot(T[::4], measured[::4] / measured[0], "o", color=color, ms=5, mfc="none")
        right.plot(T, model["tvd"], color=color, lw=2.4)
        if not trained:
            continue
        precision, tvd = (by_trial(trained, metric) for metric in ("precision", "tvd"))
        precision = precision[precision[:, 0] > 0]  # that tell present from absent at length 2
        if len(precision):
            left.plot(T, np.median(precision / precision[:, :1], 0), color=color, lw=1.2, ls="--")
        right.plot(T, np.median(tvd, 0), color=color, lw=1.2, ls="--")
    plot.length_axis(left)
    left.set(yscale="log", xlabel="length (symbols)", ylabel="precision, at length 2 = 1",
             title="precision falls as the theorem says")
    plot.plain_logarithms(left.yaxis, (1, 2, 5))
    right.set(yscale="log", ylim=(1e-5, 1.5), xlabel="length (symbols)",
              ylabel=plot.spelled("tvd"), title="how far from the right distribution")
    plot.plain_logarithms(right.yaxis, (1,))
    fig.legend(loc="outside lower center", ncols=2)
    fig.suptitle("thick: the formula (left), weights set by hand (right; measured: circles)\n"
                 "dashed: trained, medians of the trials", fontsize="medium")
    write_figure(fig, out)


def by_trial(trials, metric):
    """(trials, lengths), from length 2 on."""
    return np.array([trial[metric]["raw"]["by_length"][1:] for trial in trials], float)
