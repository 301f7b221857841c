"""
Figures that figures/plot.py does not draw, four kinds: tables in colours (the matrix, and a task's
scores by length), what survives and what reads, random searches, and Theorem 4.2.

    draw(result, out)    result is what experiments/runs.py has of an entry, out a .png
"""
import itertools
import math
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rc_context
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.path import Path as Line
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from common.files import write_figure
from experiments import REPAIRS
from figures import plot

WORST_TO_BEST = ListedColormap(plt.get_cmap("RdYlBu")(np.linspace(0.08, 0.92, 256)))


@rc_context(plot.STYLE)
def draw(result, out):
    """Whether this is one of these figures: then it is drawn."""
    if "theorem" in result:
        theorem(result, out)
    elif "panels" in result:
        trials(result, out)
    elif "cells" in result:
        matrix(result, out)
    elif "beside" in result:
        grid(result, out)
        survive(result, Path(out).with_suffix(".survive.png"))
    elif "columns" in result and len(result["runs"][0].get("scores", ())) > 1:
        grid(result, out)
    else:
        return False
    return True


# -----------------------------------------------------------------------------
# tables in colours

def coloured(ax, shares, texts, columns, rows, size=9):
    """
    A table in colours: shares (rows, columns) are from 0, the worst, to 1, the best, and NaN where
    there is no number; texts has a string for each cell.
    """
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.pcolormesh(shares, cmap=WORST_TO_BEST, vmin=0, vmax=1, edgecolors="white", lw=2)
    for (y, x), share in np.ndenumerate(shares):
        color = "white" if abs(share - 0.5) > 0.39 else "black"
        small = np.isnan(share) or "\n" in texts[y, x]
        ax.text(x + 0.5, y + 0.5, texts[y, x], ha="center", va="center", color=color,
                fontsize=size - 2.5 if small else size)
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns)
    ax.set_yticks(np.arange(len(rows)) + 0.5, rows)
    ax.set_ylim(len(rows), 0)


def grid(result, out):
    """A task's scores by length, a panel for each split: means, and ranges that are wide."""
    labels, (_, _, metric) = result["rows"], result["columns"][0]
    splits = plot.dense_last(dict.fromkeys(split for _, split, _ in result["columns"]))
    lengths = sorted({T for run in result["runs"] for T in run["scores"]}, key=int)
    fig, axes = plot.panels(len(splits), 0.55 * len(lengths) + 0.6, 0.32 * len(labels) + 1.2)
    for ax, split in zip(axes[0], splits):
        means = np.full((len(labels), len(lengths)), np.nan)
        texts = np.full(means.shape, "-", object)
        for y, x in np.ndindex(means.shape):
            scores = [run["scores"].get(lengths[x], {}).get(split) for run in result["runs"]
                      if run["label"] == labels[y]]
            values = [100 * score[metric]["value"] for score in scores if score]
            if values:
                means[y, x] = np.mean(values)
                texts[y, x] = f"{means[y, x]:.1f}".removesuffix(".0")
                if max(values) - min(values) > 10:  # a mean that no seed may have
                    texts[y, x] += f"\n{min(values):.0f} to {max(values):.0f}"
        wrong = metric.endswith(("error", "glitch_rate"))
        shares = 1 - means / 100 if wrong else means / 100
        coloured(ax, shares, texts, [f"{int(T):,}" for T in lengths], labels)
        ax.set(title=plot.spelled(split), xlabel="string length (tokens)")
    fig.suptitle(f"{plot.spelled(metric)} (%), from red, the worst, to blue, the best:\n"
                 "means of seeds, and ranges wider than 10 points", fontsize=10)
    write_figure(fig, out)


NOTES = """↓: less is better, all others are % right, or AUC
colours: from the worst of a column, red, to the best, blue; they span 10 points, 10 % of a \
perplexity or 0.05 at least
ends: no positions for such lengths; iid: as in training; TVD: total variation distance; AUC: area \
under the ROC curve"""


def matrix(result, out):
    """
    A row for each method, a column for each number: its colour is its place between the column's
    worst and best. Empty: no number, and why.
    """
    columns, rows, added = result["columns"], result["cells"], result.get("added")
    shares, texts = np.empty((2, len(rows), len(columns)), object)
    fig = Figure(figsize=(0.78 * len(columns), 0.46 * len(rows)))  # the cells fill it
    ax = fig.add_axes([0, 0, 1, 1])
    for x, (name, column) in enumerate(columns.items()):
        shares[:, x] = shares_of([row[name] for row in rows.values()], column)
        for y, row in enumerate(rows.values()):
            texts[y, x] = text_of(row[name], column["form"])
    coloured(ax, shares.astype(float), texts, [], rows, size=11)
    headings(ax, columns)
    if added in rows:
        y = list(rows).index(added)
        ax.get_yticklabels()[y].set(weight="bold")
        ax.add_patch(plt.Rectangle((0, y), len(columns), 1, fill=False, ec="black", lw=2.5,
                                   clip_on=False, zorder=5))
    notes = [textwrap.fill(note, max(60, 12 * len(columns))) for note in NOTES.splitlines()]
    ax.text(0, len(rows) + 0.25, "\n".join(notes), va="top", fontsize=9)
    write_figure(fig, out)


def headings(ax, columns):
    """Over its column what a number is, and over a line what the task of these columns is."""
    x = 0
    for task, names in itertools.groupby(columns, lambda name: name.partition(": ")[0]):
        first = x
        for name in names:
            words = name.partition(": ")[2].replace(" x", "\xa0x")  # 16 x stays on one line
            number = textwrap.fill(words, 11, break_long_words=False)
            arrow = " ↓" if columns[name]["better"] == "less" else ""
            ax.text(x + 0.5, -0.15, number + arrow, ha="center", va="bottom", fontsize=8)
            x += 1
        ax.plot([first + 0.06, x - 0.06], [-1, -1], color="black", lw=1, clip_on=False)
        ax.text((first + x) / 2, -1.1, textwrap.fill(task, 11 * (x - first)), ha="center",
                va="bottom", weight="bold", fontsize=8)


def shares_of(column_cells, column):
    """How good each number of a column is, from 0, its worst, to 1; NaN where there is none."""
    values = np.array([cell.get("value") for cell in column_cells], float)
    finite = np.isfinite(values)
    if column.get("logarithmic"):
        values = np.log(np.maximum(values, 1e-9))
    if column["better"] == "less":
        values = -values
    if finite.sum() < 2:  # neither the best nor the worst
        return np.where(finite, 0.5, np.nan)
    high = values[finite].max()
    low = min(high - column["least"], values[finite].min())  # 99 is not the worst beside 99.5
    return (values - low) / (high - low)


def text_of(cell, form):
    """A number in few characters: 100.0 as 100, 12345.67 as 12,346."""
    value = cell.get("value")
    if value is None or not math.isfinite(value):
        return cell.get("reason", "-")
    text = f"{value:,.0f}" if abs(value) >= 1000 else format(value, form).removesuffix(".0")
    if "spread" in cell:  # of several seeds
        text += f"\n± {cell['spread']:{form}}"
    return text


# -----------------------------------------------------------------------------
# what survives, and what reads

def survive(result, out):
    """
    Two questions in one picture: how much worse is text in windows of 16 times the training length
    (x), and how much is recalled of strings as long (y), by runs that had learned to at the
    training length? Means of seeds, and their ranges; squares are repaired at test time.
    """
    xs, ys = {}, {}
    near, *_, far = map(str, result["beside"]["lengths"])
    for run in result["beside"]["runs"]:
        if run["perplexity"].get(near) and run["perplexity"].get(far):
            xs.setdefault(run["label"], []).append(run["perplexity"][far] / run["perplexity"][near])
    (_, split, metric), *_ = result["columns"]
    for run in result["runs"]:
        first, *_, last = (100 * by[split][metric]["value"] for by in run["scores"].values())
        if first > 80:  # %; else it cannot show what it has forgotten
            ys.setdefault(run["label"], []).append(last)
    fig, axes = plot.panels(1, 7, 4.6)
    ax = axes[0, 0]
    points = {label: (np.mean(xs[label]), np.mean(ys[label])) for label in ys if label in xs}
    notes, ranges = [], []
    for label, (x, y) in points.items():
        color = plot.color_of(label) or "dimgray"
        marker = "s" if label.rpartition(", ")[2] in REPAIRS else "o"
        ax.plot(x, y, marker, color=color, ms=7, mec="white", zorder=3)
        across = [(min(xs[label]), y), (max(xs[label]), y)]
        up = [(x, min(ys[label])), (x, max(ys[label]))]
        for ends in (across, up):
            ax.plot(*zip(*ends), color=color, lw=1.5, alpha=0.6)
            ranges.append(ends)
        notes.append(ax.annotate(label, (x, y), (0, 0), textcoords="offset points", color=color,
                                 arrowprops=dict(arrowstyle="-", color=color, lw=0.6),
                                 fontsize=9))
    ax.axvline(1, color="gray", lw=1, ls=":", zorder=0)
    ax.set(xscale="log", xlim=(0.5, None), ylim=(0, 106),
           title="up: it recalls what is far; left of the line: long text does no harm",
           xlabel="perplexity of text in windows of 4,096 tokens over that of 256, where it was "
                  "trained",
           ylabel="recall (%) in strings of 1,024 tokens,\ntrained on 64")
    plot.plain_logarithms(ax.xaxis, (1, 2, 5))
    apart(fig, ax, notes, ranges)
    write_figure(fig, out)


def apart(fig, ax, notes, ranges):
    """
    Puts each note near its point, where it covers no point and no other note, and, if there is such
    a place, where no range and no line from a note to its point crosses a note.
    """
    fig.draw_without_rendering()  # before, nothing has a place
    places = itertools.product((10, -10, 30, -30, 60, -60), range(-160, 20, 7))
    places = sorted(places, key=lambda place: math.hypot(*place))
    points = ax.transData.transform([note.xy for note in notes])
    dots = [Bbox.from_extents(x - 9, y - 9, x + 9, y + 9) for x, y in points]
    lines, boxes = [Line(ax.transData.transform(ends)) for ends in ranges], []

    for note, point in zip(notes, points):
        found = []
        for place in places:
            side = "left" if place[0] > 0 else "right"
            note.set(position=place, ha=side, va="center")
            box = Text.get_window_extent(note).padded(3)  # without its line
            line = Line([point, ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)])
            covered = sum(map(box.overlaps, dots + boxes))
            outside = box.x0 < ax.bbox.x0 or box.x1 > ax.bbox.x1
            crossed = sum(other.intersects_bbox(box) for other in lines)
            crosses = sum(map(line.intersects_bbox, boxes))
            faults = 9 * (covered + outside) + crossed + crosses
            found.append((faults, place, side, box, line))
        _, place, side, box, line = min(found, key=lambda f: f[0])  # the nearest of the best
        note.set(position=place, ha=side)
        boxes.append(box)
        lines.append(line)


# -----------------------------------------------------------------------------
# random searches

MARKERS = dict(raw="o", ema="^", bema="o")


def trials(result, out):
    """A random search: above every trial of every scheme, below the metric by length."""
    metric, panels = result["metric"], result["panels"]
    schemes = dict.fromkeys(itertools.chain(*(panel["schemes"] for panel in panels)))
    colors = dict(zip(schemes, plt.cm.tab10.colors))
    columns = min(3, len(panels))
    fig, axes = plot.panels(columns, 7.2 / columns, 3.2, rows=2 * math.ceil(len(panels) / columns))
    tops, lows = axes[::2].ravel(), axes[1::2].ravel()
    for top, low, panel in zip(tops, lows, panels):
        swarms(top, panel, metric, colors)
        by_length(low, panel, metric, colors)
    for ax in (*tops[len(panels):], *lows[len(panels):]):
        ax.axis("off")
    if metric == "tvd":
        for ax in axes.flat:
            ax.set_yscale("log")
            plot.plain_logarithms(ax.yaxis, (1, 3))
    for kind in (tops, lows):  # one y axis
        low, high = np.array([ax.get_ylim() for ax in kind]).T
        plt.setp(kind, ylim=(low.min(), high.max()))
    plt.setp(axes[:, 0], ylabel=plot.spelled(metric))
    plot.legend([lows[0], *tops], below=4)
    fig.suptitle("every trial, and medians and best trials by length", fontsize=11)
    write_figure(fig, out)


def swarms(ax, panel, metric, colors):
    """Every trial a dot, left with its last weights, right with their averages; NaN is left out."""
    every = [trial[metric] for scheme in panel["schemes"].values() for trial in scheme["trials"]]
    columns = [weights for weights in MARKERS if all(weights in scores for scores in every)]
    room = 0.8 / len(columns)
    for n, (scheme, search) in enumerate(panel["schemes"].items()):
        for place, weights in enumerate(columns):
            x = n + room * (place - (len(columns) - 1) / 2)
            ys = [trial[metric][weights]["test"] for trial in search["trials"]]
            ys = np.array([y for y in ys if y is not None])
            jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(ys)) * room
            raw = weights == "raw"
            ax.scatter(x + jitter, ys, s=12, alpha=0.7, lw=0.8, marker=MARKERS[weights],
                       edgecolors=colors[scheme], facecolors=colors[scheme] if raw else "none")
            ax.plot([], [], MARKERS[weights], color="gray", ms=4, mfc="gray" if raw else "none",
                    label="a trial" if raw else f"with its average ({weights.upper()})")
            if len(ys):
                ends = [x - 0.42 * room, x + 0.42 * room]
                ax.plot(ends, [np.median(ys)] * 2, color="black", lw=1.6, label="median")
    ax.set_xticks(range(len(panel["schemes"])), panel["schemes"], rotation=30, ha="right")
    first, last = panel["at"]
    where = f"length {first:,}" if last == first else f"length {first:,} to {last:,}"
    ax.set_title(f"{panel['name']}\nat {where}", fontsize="medium")


def by_length(ax, panel, metric, colors):
    """The median of a scheme's trials, and the one that is best in validation."""
    x = np.array(panel["lengths"], float).mean(1)
    if x[-1] > 1000:
        plot.length_axis(ax)
        ax.tick_params("x", rotation=30)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.set_xlabel("length (symbols)")
    for n, (scheme, search) in enumerate(panel["schemes"].items()):
        scores = [trial[metric]["raw"] for trial in search["trials"]]
        scores = [score for score in scores if None not in score.values()]
        if scores:
            best = (min if metric == "tvd" else max)(scores, key=lambda score: score["validation"])
            middle = np.median(np.array([score["by_length"] for score in scores], float), axis=0)
            ax.plot(x, middle, color=colors[scheme], lw=4 - n / 2, label=scheme)
            ax.plot(x, np.array(best["by_length"], float), color=colors[scheme], lw=1, ls="--")
    ax.plot([], [], color="gray", lw=3, label="median, by length")
    ax.plot([], [], color="gray", lw=1, ls="--", label="best trial, by length")
    if "block_size" in panel:
        plot.training_length(ax, [[panel]])


WHERE = dict(none="no norm", output="a norm on the attention's output",
             post="a norm on the sum", pre_final="a norm before the logits")


def theorem(result, out):
    """Precision by length, relative to length 2, and TVD: hard-coded models, and trained ones."""
    hard_coded, panel = result["theorem"], result["panels"][0]
    fig, axes = plot.panels(2, 3.9, 4.6, sharey=False)
    left, right = axes[0]
    T = hard_coded["lengths"]
    for (norm, model), color in zip(hard_coded["models"].items(), plt.cm.tab10.colors):
        formula = np.array(model["formula"]) / model["formula"][0]
        left.plot(T, formula, color=color, lw=2.4, label=f"{norm}: {WHERE[norm]}")
        measured = np.array(model["precision"]) / model["precision"][0]
        left.plot(T[::4], measured[::4], "o", color=color, ms=5, mfc="none")
        right.plot(T, model["tvd"], color=color, lw=2.4)
        trained = [trial for trial in panel["schemes"][norm]["trials"] if trial["finite"]]
        for metric, ax in (("precision", left), ("tvd", right)):
            ys = np.array([trial[metric]["raw"]["by_length"] for trial in trained], float)[:, 1:]
            if metric == "precision":
                ys = ys[ys[:, 0] > 0]  # those that tell present from absent at length 2
                ys = ys / ys[:, :1]
            if len(ys):
                ax.plot(T, np.median(ys, 0), color=color, lw=1.2, ls="--")
    right.plot([], [], "o", color="gray", mfc="none", label="weights set by hand (left)")
    right.plot([], [], color="gray", lw=2.4, label="the formula (left), by hand (right)")
    right.plot([], [], color="gray", lw=1.2, ls="--", label="trained, median of the trials")
    plot.length_axis(left)
    left.set(yscale="log", xlabel="length (symbols)", ylabel="precision, at length 2 = 1",
             title="precision falls as the theorem says")
    plot.plain_logarithms(left.yaxis, (1, 2, 5))
    right.set(yscale="log", ylim=(1e-5, 1.5), xlabel="length (symbols)",
              ylabel=plot.spelled("tvd"), title="how far from the right distribution")
    plot.plain_logarithms(right.yaxis, (1,))
    plot.legend(axes[0], below=2)
    write_figure(fig, out)
