"""
JSON -> figure: draw what eval.py, reproduce.py, bench.py and train.py left behind.

    python plot.py lengths out/cable-stdlib-nano/eval.json     perplexity by length (eval.py)
    python plot.py scores out/tra-flipflop-nano/eval.json      a task's scores by split (eval.py)
    python plot.py positions out/postnorm-dyck-nano/eval.json  TVD or AUC by position (eval.py)
    python plot.py trials results/postnorm_fig1.cpu.json       a random search (reproduce.py)
    python plot.py attention results/bench.attention.cpu.json  time by length (bench.py)
    python plot.py ndcg out/bert_cable-retrieval-nano/eval.json    nDCG by length (eval.py)
    python plot.py matrix results/matrix.cpu.json              methods x tasks (reproduce.py)
    python plot.py reading results/matrix.cpu.json             does it use what it sees?
    python plot.py curves out/cable-stdlib-nano out/rope-*     learning curves (log.jsonl)
    python plot.py errors out/tra-flipflop-* out/cope-*        a task's scores by training step

The first model named is drawn boldest. Runs in a JSON that differ only in the seed become one line
(mean and range) or one row of dots; run folders stay apart. Where lines coincide, each shows
through: by turns, in dashes and markers.
What a model attends to and counts is drawn by maps.py.
"""
import itertools
import json
import math
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.colors import ListedColormap  # noqa: E402
from matplotlib.transforms import offset_copy  # noqa: E402

import runs  # noqa: E402
from data import binned  # noqa: E402

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                     "grid.alpha": 0.25, "font.size": 10, "axes.titlesize": 11,
                     "legend.frameon": False, "figure.dpi": 150})

METRICS = dict(tvd="total variation distance", auc="ROC AUC")


# -----------------------------------------------------------------------------
# reading

def read(path, parse):
    """parse(path), or one line that says why not."""
    try:
        return parse(Path(path))
    except OSError as e:
        runs.fail(f"could not read {e.filename or path}: {e.strerror}")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        runs.fail(f"{path} is not a file that eval.py, reproduce.py or bench.py wrote "
                  "for this kind of figure")


def read_json(path):
    return json.loads(path.read_text())


def choose(metric, known, path):
    """The metric asked for, or the first."""
    if metric and metric not in known:
        runs.fail(f"{path} has no {metric}: {runs.nearest(metric, known)}")
    return metric or known[0]


def metric_label(metric):
    return METRICS.get(metric, metric.replace("_", " "))


def grouped(rows):
    """
    {label: rows}. A row's own label counts, if it has one. Else seeds of one model go together,
    under its name; runs that differ in more go under their folder's.
    """
    groups, labels = {}, []
    for r in rows:
        kind = {k: v for k, v in r["config"].items() if k not in ("seed", "out_dir")}
        kind |= dict(iter=r["iter"], checkpoint=r["checkpoint"])
        key = r["label"] if "label" in r else json.dumps(kind, sort_keys=True)
        groups.setdefault(key, []).append(r)
    for rs in groups.values():
        r = rs[0]
        names = [r["model"], r["name"], f"{r['name']}/{r['checkpoint']}"]
        names = [r["label"]] if "label" in r else names
        free = [name for name in names if name not in labels]
        labels.append(free[0] if free else f"{names[-1]} ({len(labels)})")
    return dict(zip(labels, groups.values()))


# -----------------------------------------------------------------------------
# panels, lines and legends

def panels(columns, width, height, rows=1, sharey="row"):
    """-> (figure, axes (rows, columns)); a row shares its y axis."""
    return plt.subplots(rows, columns, figsize=(width * columns + 1, height), sharey=sharey,
                        squeeze=False, layout="constrained")


MOST_LINES = 10  # beyond, they cannot be told apart
# a method has one colour in every figure
COLORS = dict(tra="black", rope="tab:blue", alibi="tab:orange", cope="tab:green", cable="tab:red",
              fox="tab:purple", learned="tab:brown", t5="tab:pink", nope="tab:gray",
              relative="tab:olive", diff="tab:cyan", kerple="navy", fire="lightsalmon",
              sinusoidal="deeppink", label="darkgreen", peri="gold")
OTHERS = ("teal", "indigo", "maroon", "yellowgreen", "slateblue", "peru", "orchid", "chocolate")


def looks(labels, bold=None):
    """{label: how its line looks}, all different: the method's colour, `bold` or the first bold."""
    found, others = {}, itertools.cycle(OTHERS)
    for n, label in enumerate(labels):
        color = color_of(label) or next(others)
        alike = sum(look["color"] == color for look in found.values())
        found[label] = dict(color=color, lw=1.5, ls=("-", "-.", ":")[alike % 3])
        found[label]["marker"] = "osD^vP*X<>p"[n % 11]
    bold = list(labels)[0] if bold is None else bold
    if bold in found:
        found[bold] |= dict(lw=2.6, zorder=3)
    return found


def color_of(label):
    """The colour of the method that a label, or the last folder in it, begins with, or None."""
    return COLORS.get(re.split(r"\W", label.split("/")[-1])[0])


def draw(ax, curves, look):
    """
    {label: (x (n,), ys (seeds, n))} -> a line of means and a shade from the lowest to the highest.
    Points without a mean are left out, and lines without points. Set the axis' scale and limits
    first: which lines coincide is judged on the page, in points.
    """
    means = {}
    for label, (x, ys) in curves.items():
        if not len(x):
            continue
        x, y = np.asarray(x), np.mean(ys, 0)
        known = np.isfinite(y)
        means[label] = x[known], y[known]
        ax.plot(*means[label], ls="")  # for the limits
        if len(ys) > 1:
            color = look[label]["color"]
            ax.fill_between(x, np.min(ys, 0), np.max(ys, 0), color=color, alpha=0.15, lw=0)
            ax.fill_between([], [], color="gray", alpha=0.3, lw=0, label="range over runs")
    xs, near = coinciding(ax, means.values())
    for own, (label, (x, y)) in enumerate(means.items()):
        row = near[own][:, np.searchsorted(xs, x)]
        draw_line(ax, label, x, y, row, own, look[label])


def draw_line(ax, label, x, y, near, own, kind):
    """
    One line, which is number `own`. near (lines, n): which lines lie on it at its n-th point? They
    take turns with their markers; up to five, if they are more than there are points, stand side by
    side.
    """
    ax.plot([], [], label=label, ms=5, **kind)
    for part, lines in stretches(near):
        changes = dashes(lines.index(own), len(lines)) | dict(marker="")
        ax.plot(x[part], y[part], **kind | changes)
    marked = range(0, len(x), math.ceil(len(x) / 12) or 1)
    for turn, n in enumerate(marked):
        lines, aside = list(np.flatnonzero(near[:, n])), 0
        if len(marked) < len(lines) < 6:
            aside = 4.5 * (lines.index(own) - (len(lines) - 1) / 2)
        elif lines[turn % len(lines)] != own:
            continue
        where = offset_copy(ax.transData, ax.figure, aside, 0, "points")
        changes = dict(ls="", zorder=5)
        ax.plot(x[n], y[n], ms=5, clip_on=False, transform=where, **kind | changes)


def coinciding(ax, lines):
    """-> every x (m,), and which two lines cannot be told apart there, (lines, lines, m)."""
    ax.autoscale_view()
    xs = np.unique(np.concatenate([[], *(x for x, _ in lines)]))
    heights = np.full((len(lines), len(xs)), np.nan)
    for row, (x, y) in zip(heights, lines):
        pixels = ax.transData.transform(np.column_stack([x, y]))[:, 1]
        row[np.searchsorted(xs, x)] = pixels / ax.figure.dpi * 72
    near = abs(heights[:, None] - heights) < 1.2  # points
    near[range(len(lines)), range(len(lines))] = True
    return xs, near


def stretches(near):
    """
    Cuts a line where other lines begin or cease to lie on it -> (slice of its points, which lines
    lie there, itself included).
    """
    company = [tuple(np.flatnonzero(both)) for both in (near[:, 1:] & near[:, :-1]).T]
    start = 0
    for lines, same in itertools.groupby(company):
        end = start + len(list(same))
        yield slice(start, end + 1), lines
        start = end


def dashes(turn, lines):
    """The first of coinciding lines stays as it is, the others lie on it in dashes, by turns."""
    if turn == 0:
        return {}
    length = 2.5  # in line widths
    return dict(ls=((lines - turn) * length, (length, (lines - 1) * length)), lw=2.2, zorder=4)


def legend(axes):
    """One legend, right of the panels, of everything that they show."""
    found = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            found.setdefault(label, handle)
    last = ["training length", "range over runs", "95 % interval"]
    names = [name for name in found if name not in last] + [name for name in last if name in found]
    axes[-1, -1].legend([found[name] for name in names], names, loc="center left",
                        bbox_to_anchor=(1.01, 0.5))


def training_length(ax, length):
    ax.axvline(length, color="gray", lw=1, ls=":", zorder=0, label="training length")


def length_axis(ax, lengths):
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
    ax.set_xlim(min(lengths) / 1.15, max(lengths) * 1.15)
    ax.xaxis.set_minor_locator(plt.NullLocator())


# -----------------------------------------------------------------------------
# text

def lengths(args):
    """
    Perplexity by window length (left); of tokens with half a window before them, after eval.py
    --strided (middle); loss by position in the longest window (right). Many models take several
    rows of panels, each with its own axes: first those with the lowest perplexity in the longest
    windows, if --models does not say otherwise.
    """
    data, groups = read(args.json, text_runs)
    for model in args.models or []:
        if model not in groups:
            runs.fail(f"{args.json} has no {model}: {runs.nearest(model, groups)}")
    groups = {label: groups[label] for label in args.models or groups}
    if len(data["lengths"]) == 1 and len(groups) > MOST_LINES:
        return perplexity_dots(args, data, groups)
    if len(groups) > MOST_LINES and not args.models:
        order = sorted(groups, key=lambda label: last_perplexity(groups[label], data["lengths"]))
        groups = {label: groups[label] for label in order}
    look, contrast = looks(groups), committed(data)
    for label in contrast:
        look[label] = dict(color=color_of(label), lw=1.8, ls="--", marker="s", zorder=2)
    titles = dict(perplexity=f"{data['tokens']:,} tokens, the same at every length")
    if any("strided" in lines for lines in groups.values()):
        titles["strided"] = (f"{data['strided_tokens']:,} tokens, each with half a window\n"
                             "or more to look back on")
    if len(data["lengths"]) == 1:  # a dot for each would say no more than the numbers
        titles = {}
    parts = np.array_split(list(groups), math.ceil(len(groups) / MOST_LINES))
    fig, axes = panels(len(titles) + 1, 5.2, 4.4 * len(parts), len(parts), sharey=False)
    for row, part in zip(axes, parts):
        draw_lengths(row, {label: groups[label] for label in part} | contrast, look, titles, data)
        legend(row[None])
    for ax in axes[1:].flat:
        ax.set_title("")  # as in the first row
    if not args.models:
        for n, part in enumerate(parts[1:], 1):
            first = 1 + sum(map(len, parts[:n]))
            axes[n, 0].set_title(f"rows {first} to {first + len(part) - 1} of {len(groups)}, by "
                                 f"perplexity at {max(data['lengths']):,}", loc="left")
    runs.write_figure(fig, args.out or Path(args.json).with_suffix(".png"))


def last_perplexity(lines, lengths):
    """In the longest windows; infinite, where a model ends before them or has no number."""
    x, ys = lines["perplexity"]
    last = np.mean(ys, 0)[x.index(max(lengths))] if max(lengths) in x else math.inf
    return math.inf if math.isnan(last) else last


def draw_lengths(axes, groups, look, titles, data):
    """One row of panels: a panel for each kind of perplexity, then the loss by position."""
    *by_length, right = axes
    for ax, title in zip(by_length, titles.values()):
        length_axis(ax, data["lengths"])
        found = [lines[k] for lines in groups.values() for k in titles if k in lines]
        perplexity_axis(ax, [y for _, ys in found for y in ys])  # one range for both kinds
        ax.sharey(by_length[0])
        ax.set(xlabel="window length (tokens)", ylabel="perplexity", title=title)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.set(xlabel="position in the window", ylabel="loss (nats)",
              title=f"inside a window of {max(data['lengths']):,} tokens")
    trained = {data["trained"][label] for label in groups if label in data["trained"]}
    for ax, kind in zip(axes, (*titles, "loss")):
        for length in trained:
            training_length(ax, length)
        known = {label: lines[kind] for label, lines in groups.items() if kind in lines}
        draw(ax, known, look)


def perplexity_dots(args, data, groups):
    """One length and many rows: a dot for each run."""
    fig, axes = panels(1, 5.2, 0.24 * len(groups) + 1)
    ax = axes[0, 0]
    for n, lines in enumerate(groups.values()):
        _, seeds = lines["perplexity"]
        ax.plot(np.ravel(seeds), [n] * len(seeds), "o", color="black", ms=4)
    ax.set_yticks(range(len(groups)), groups)
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel="perplexity",
           title=f"{data['tokens']:,} tokens, in windows of {data['lengths'][0]:,}")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("{x:g}")
    runs.write_figure(fig, args.out or Path(args.json).with_suffix(".png"))


def text_runs(path):
    """-> what eval.py says about all runs and their training lengths, and {label: its lines}."""
    data = read_json(path)
    groups = grouped(data["runs"])
    data["trained"] = {label: rows[0]["block_size"] for label, rows in groups.items()}
    return data, {label: text_lines(rows) for label, rows in groups.items()}


def text_lines(rows):
    """
    Runs that differ in the seed -> (x, ys) of the perplexity by length, of the strided one where
    all have it, and of the loss by position.
    """
    found, kinds = {}, ["perplexity"]
    if all("strided" in r for r in rows):
        kinds.append("strided")
    for kind in kinds:
        T = [int(T) for T in rows[0][kind]]
        ys = np.array([list(r[kind].values()) for r in rows], float)
        ys[ys > 1e30] = np.inf  # no axis for it
        found[kind] = T, ys
    position = [(first + last) / 2 + 1 for first, last, _ in rows[0]["by_position"]]
    loss = np.array([r["by_position"] for r in rows], float)[:, :, 2]
    return found | dict(loss=(position, loss))


def committed(data):
    """
    {label: its lines} of the run in results/contrast.json, to be seen beside one's own: if it
    has their setting, and none of them is of its model.
    """
    def parse(path):
        row = read_json(path)
        for own in data["runs"]:
            setting = data | own["config"]
            differs = [k for k, value in row["settings"].items() if setting.get(k) != value]
            if differs or own["model"] == row["model"]:
                return {}
        label = f"{row['model']} (this repository's)"
        if row["source"] != data["data"]["sha256"]:
            label = f"{row['model']} (this repository's,\non Python {row['python']})"
        return {label: text_lines([row])}
    path = runs.ROOT / "results" / "contrast.json"
    return read(path, parse) if path.exists() else {}


def perplexity_axis(ax, ys):
    """Logarithmic, with plain numbers as ticks, where the perplexities are far apart."""
    ys = np.concatenate(ys)
    ys = ys[np.isfinite(ys) & (ys > 0)]
    if not len(ys) or ys.max() <= 2 * ys.min():
        return
    low, high = ys.min(), ys.max()
    ax.set_yscale("log")
    steps = (1, 2, 3, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    ticks = [step * 10.0**power for power in range(-1, 9) for step in steps]
    ticks = [y for y in ticks if 0.95 * low <= y <= 1.05 * high]
    ax.set_yticks(ticks, [f"{y:,g}" for y in ticks])
    ax.yaxis.set_minor_locator(plt.NullLocator())


def curves(args):
    """Training and validation loss by step, of run folders or of a results/*.json."""
    groups = named(args.paths, losses)
    look = looks(groups)
    fig, axes = panels(2, 5, 4)
    for ax, key, title in zip(axes[0], ("loss", "val_loss"), ("training", "validation")):
        ax.set(xlabel="iter", title=title)
        lines = {}
        for label, found in groups.items():
            lines[label] = shared([{it: (value,) for it, value in run[key]} for run in found])
        draw(ax, lines, look)
    axes[0, 0].set_ylabel("loss (nats)")
    legend(axes)
    first = Path(args.paths[0])
    default = first.with_suffix(".png") if first.suffix == ".json" else first / "curves.png"
    runs.write_figure(fig, args.out or default)


def named(paths, parse):
    """
    {label: what was read}. Labels are a JSON's own; a run folder's is its name, or its path where
    another has that name, too.
    """
    found = {path: read(path, parse) for path in map(Path, paths)}
    names = [path.resolve().name for path in found]
    names += {label for rows in found.values() for label, _ in rows if label}
    groups = {}
    for path, rows in found.items():
        folder = path.resolve().name
        own = folder if names.count(folder) == 1 else str(path)
        for label, run in rows:
            groups.setdefault(label or own, []).append(run)
    return groups


def losses(path):
    """
    A run folder or a results/*.json -> [(label, dict(loss, val_loss): [[step, loss], ...])]; a
    folder's label is None.
    """
    keys = ("loss", "val_loss")
    if path.suffix == ".json":
        found = read_json(path)["runs"]
        return [(r["label"], {key: thinned(r[key]) for key in keys}) for r in found]
    log = runs.read_log(path)
    found = {key: [[row["iter"], row[key]] for row in log if key in row] for key in keys}
    return [(None, found)]


def thinned(points, most=40):
    """[[step, loss], ...] -> `most` of them at most, each the mean since the one before."""
    n = max(1, -(-len(points) // most))
    found = []
    for start in range(0, len(points), n):
        part = points[start:start + n]
        found.append([part[-1][0], sum(loss for _, loss in part) / len(part)])
    return found


# -----------------------------------------------------------------------------
# search

def ndcg(args):
    """nDCG@10 by the length that documents are cut to (left), and by where answers begin."""
    data, groups = read(args.json, searches)
    look = looks(groups)
    lengths, where = data["lengths"], data["runs"][0]["by_answer_at"]
    fig, axes = panels(3 if where else 2, 4.2, 4)
    for ax, reading, title in zip(axes[0], ("whole", "windows"), (
            "read as a whole", "best window of the training length")):
        length_axis(ax, lengths)
        ax.set(xlabel="tokens of a document", title=title)
        lines = {label: searched(rows, reading) for label, rows in groups.items()}
        draw(ax, lines, look)
        for label, rows in groups.items():
            if len(rows) == 1:  # of several, the range over seeds is drawn
                x, (low,) = searched(rows, reading, "low")
                _, (high,) = searched(rows, reading, "high")
                ax.fill_between(x, low, high, color=look[label]["color"], alpha=0.15, lw=0)
                ax.fill_between([], [], color="gray", alpha=0.3, lw=0, label="95 % interval")
        x, (bm25,) = searched(next(iter(groups.values()))[:1], "bm25")
        ax.plot(x, bm25, color="gray", ls="--", label="BM25")
        ax.axhline(100 * data["chance"], color="gray", lw=1, ls="-.", label="chance")
        for length in {r["block_size"] for rows in groups.values() for r in rows}:
            training_length(ax, length)
    if where:
        evidence(axes[0, 2], where, groups, look)
    axes[0, 0].set_ylabel("nDCG@10 (%)")
    legend(axes)
    runs.write_figure(fig, args.out or Path(args.json).with_suffix(".png"))


DASH_DOT_DOT = (0, (4, 1, 1, 1, 1, 1))


def evidence(ax, where, groups, look):
    """nDCG@10 by where answers begin, documents read as a whole; dashed: their beginning alone."""
    places, lines = range(len(where["queries"])), {}
    ax.set(title=f"read as a whole, {where['length']:,} tokens",
           xlabel="token at which the answer begins, from ... on\n(queries; one seed: no interval)")
    ticks = [f"{a:,}\n({n})" for a, n in zip(where["edges"], where["queries"])]
    ax.set_xticks(places, ticks)
    for label, rows in groups.items():
        known = [r["by_answer_at"]["whole"] for r in rows if "whole" in r["by_answer_at"]]
        if known:
            lines[label] = places, 100 * np.array(known, float)
        first = [r["by_answer_at"]["first"] for r in rows]
        ax.plot(places, 100 * np.array(first, float).mean(0), color=look[label]["color"],
                ls=DASH_DOT_DOT)
    draw(ax, lines, look)
    T = next(iter(groups.values()))[0]["block_size"]
    ax.plot([], [], color="gray", ls=DASH_DOT_DOT, label=f"their first {T} tokens alone")
    ax.plot(places, 100 * np.array(where["bm25"], float), color="gray", ls="--")


def searches(path):
    data = read_json(path)
    return data, grouped(data["runs"])


def searched(rows, reading, bound="value"):
    """Runs that differ in the seed -> lengths (n,), nDCG@10 in % (seeds, n), or a bound of it."""
    return shared([{int(L): (100 * found["ndcg@10"][bound],)
                    for L, found in r["search"][reading].items()} for r in rows])


# -----------------------------------------------------------------------------
# tasks: scores

def scores(args):
    """One panel per split: at one length a row of dots per model, at several a line per model."""
    splits, groups, metrics, trained = read(args.json, task_runs)
    metric = choose(args.metric, metrics, args.json)
    look = looks(groups)
    lengths = sorted({T for rows in groups.values() for row in rows for T in row})
    flat = all(len(row) == 1 for rows in groups.values() for row in rows)
    found = {}
    for split in splits:
        found[split] = {label: [scored(row, split, metric) for row in rows]
                        for label, rows in groups.items()}
    if not flat and len(groups) > MOST_LINES:
        fig = score_grid(found, metric, "string length (tokens)")
        return runs.write_figure(fig, args.out or Path(args.json).with_suffix(".png"))
    fig, axes = panels(len(splits), 3.4, 0.3 * len(groups) + 1.4 if flat else 3.3)
    for ax, (split, by_label) in zip(axes[0], found.items()):
        ax.set_title(split)
        if flat:
            dots(ax, by_label)
            points = [p for rows in by_label.values() for row in rows for p in row.values()]
            top = max((high for _, _, high in points), default=100)  # a method may end
            right = 102 if top > 50 else 1.1 * top + 0.1
            ax.set(xlabel=f"{metric_label(metric)} (%)", xlim=(-right / 50, right))
            continue
        length_axis(ax, lengths)
        ax.set(xlabel="string length (tokens)", ylim=(-2, 102))
        for length in trained:
            training_length(ax, length)
        draw(ax, {label: shared(rows) for label, rows in by_label.items()}, look)
    if flat:
        axes[0, 0].set_yticks(range(len(groups)), groups)
        axes[0, 0].invert_yaxis()
    else:
        axes[0, 0].set_ylabel(f"{metric_label(metric)} (%)")
    legend(axes)
    runs.write_figure(fig, args.out or Path(args.json).with_suffix(".png"))


def score_grid(found, metric, xlabel):
    """
    Too many lines to tell apart: {split: {label: [{x: (%, ...)}, a seed each]}} -> means in colours
    from red, the worst that can be, to blue; a panel for each split, wide ones below each other.
    """
    labels, lower = next(iter(found.values())), ("error", "rate", "tvd", "tvd_last")
    more_is_better = not metric.endswith(lower)
    seeds = [row for by_label in found.values() for rows in by_label.values() for row in rows]
    xs = sorted(set().union(*seeds))
    width, height = 0.55 * len(xs) + 0.6, 0.32 * len(labels) + 1.2
    if len(found) * len(xs) > 24:
        fig, axes = panels(1, width, height * len(found), rows=len(found))
    else:
        fig, axes = panels(len(found), width, height)
    for ax, (split, by_label) in zip(axes.flat, found.items()):
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
        for y, rows in enumerate(by_label.values()):
            for x, at in enumerate(xs):
                known = [row[at][0] for row in rows if at in row]
                value = share = float(np.mean(known)) if known else None
                if known:
                    share = value / 100 if more_is_better else 1 - value / 100
                apart = known and max(known) - min(known) > 10  # a mean that no seed may have
                small = f"{min(known):.0f} to {max(known):.0f}" if apart else ""
                draw_cell(ax, x, y, dict(value=value, unfinished=False), ".1f", share, small)
        ax.set_xticks(range(len(xs)), [f"{x:,}" for x in xs])
        ax.set_yticks(range(len(labels)), labels)
        ax.set(title=f"{split}, {metric_label(metric)} (%)", xlabel=xlabel,
               xlim=(-0.5, len(xs) - 0.5), ylim=(len(labels) - 0.5, -0.5))
    fig.supxlabel("blue is good; a mean over seeds, small: their range", fontsize=9, color="gray")
    return fig


def task_runs(path):
    """-> splits, {label: [{length: {split: scores}}, a run each]}, metrics, training lengths."""
    data = read_json(path)
    groups, metrics = {}, {}
    for label, rows in grouped(data["runs"]).items():
        groups[label] = [{int(T): by_split for T, by_split in r["scores"].items()} for r in rows]
        for by_split in groups[label][0].values():
            for found in by_split.values():
                metrics |= found
    trained = {r["block_size"] for r in data["runs"]}
    return data["splits"], groups, list(metrics), trained


def scored(row, split, metric):
    """A run's {length: (value, low, high)} in percent, of the lengths that have this score."""
    found = {}
    for T, by_split in row.items():
        if metric in by_split.get(split, {}):
            score = by_split[split][metric]
            found[T] = [100 * score[key] for key in ("value", "low", "high")]
    return found


def shared(rows):
    """[{x: (y, ...)}, a seed each] -> the xs that all have, and their ys (seeds, n)."""
    xs = sorted(set.intersection(*map(set, rows)))
    return xs, [[row[x][0] for x in xs] for row in rows]


def dots(ax, found):
    """{label: [{length: (value, low, high)}, a seed each]} -> a row per label."""
    for n, rows in enumerate(found.values()):
        points = [point for row in rows for point in row.values()]
        places = n + np.linspace(-0.15, 0.15, len(points)) if len(points) > 1 else [n]
        for place, (value, low, high) in zip(places, points):
            ax.plot([low, high], [place, place], color="gray", lw=1.2)
            ax.plot(value, place, "o", color="black", ms=4, clip_on=False)
    ax.plot([], [], "o", color="black", ms=4, label="a run")
    ax.plot([], [], color="gray", lw=1.2, label="its 95 % interval")


def errors(args):
    """Scores by training step, one panel per split: of run folders, or of a results/*.json."""
    groups = named(args.paths, score_history)
    found = [history for histories in groups.values() for history in histories]
    if not found or not all(found):
        runs.fail("no scores by step in there: "
                  "only runs on a synthetic task have them, from the first validation on")
    splits = list(found[0][0][1])
    if any(list(by_split) != splits for history in found for _, by_split in history):
        runs.fail("these runs are of different tasks: draw them one by one")
    metrics = {}
    for by_metric in found[0][0][1].values():
        metrics |= by_metric
    metric = choose(args.metric, list(metrics), args.paths[0])
    first = Path(args.paths[0])
    default = first.with_suffix(".steps.png") if first.suffix == ".json" else first / "errors.png"
    by_step = {}
    for split in splits:
        by_step[split] = {label: [steps(history, split, metric) for history in histories]
                          for label, histories in groups.items()}
    if len(groups) > MOST_LINES:
        return runs.write_figure(score_grid(by_step, metric, "iter"), args.out or default)
    look = looks(groups)
    fig, axes = panels(len(splits), 3.6, 3.2)
    for ax, (split, by_label) in zip(axes[0], by_step.items()):
        ax.set(title=split, xlabel="iter", ylim=(-2, 102))
        draw(ax, {label: shared(rows) for label, rows in by_label.items()}, look)
    axes[0, 0].set_ylabel(f"{metric_label(metric)} (%)")
    legend(axes)
    runs.write_figure(fig, args.out or default)


def score_history(path):
    """
    A results/*.json or a run folder -> [(label, [(iter, {split: {metric: value}}), ...])]; a
    folder's label is None.
    """
    if path.suffix == ".json":
        return [(r["label"], r["history"]) for r in read_json(path)["runs"]]
    rows = [(row["iter"], row["scores"]) for row in runs.read_log(path) if "scores" in row]
    return [(None, rows)]


def steps(history, split, metric):
    found = {}
    for it, by_split in history:
        if metric in by_split[split]:
            found[it] = [100 * by_split[split][metric]]
    return found


# -----------------------------------------------------------------------------
# tasks: distributions and random searches

def positions(args):
    """Of a task whose right answer is a distribution: TVD or AUC by position, a panel per split."""
    data, groups = read(args.json, searches)
    rows = data["runs"]
    known = [metric for metric in METRICS if rows and all(metric in row for row in rows)]
    if not known or (args.metric and args.metric not in known):
        has = f", it has {', '.join(known)}" if known else ""
        runs.fail(f"{args.json} has no {args.metric or 'tvd or auc'} by position{has}")
    metric = args.metric or known[0]
    look = looks(groups)
    wanted = [(T, split) for T, by_split in rows[0][metric].items() for split in by_split]
    fig, axes = panels(len(wanted), 3.6, 3.2)
    for ax, (T, split) in zip(axes[0], wanted):
        training_length(ax, rows[0]["block_size"])
        ax.set(title=f"{split}, strings of {int(T):,}", xlabel="position (tokens)")
        lines = {}
        for label, found in groups.items():
            ys = [row[metric][T][split] for row in found if split in row[metric].get(T, {})]
            if ys:
                lines[label] = smooth(np.array(ys, float))
        draw(ax, lines, look)
    axes[0, 0].set_ylabel(metric_label(metric))
    legend(axes)
    runs.write_figure(fig, args.out or Path(args.json).with_suffix(f".{metric}.png"))


def smooth(ys):
    """ys (seeds, T) by position -> (x, means of some positions each)."""
    T, step = ys.shape[1], 1
    if T > 32:
        step = 2 * math.ceil(T / 96)  # even: only every other position may have an AUC
    edges = np.array([*range(0, T, step), T])
    return (edges[1:] + edges[:-1] + 1) / 2, binned(ys, edges)


def trials(args):
    """A random search: above every trial of every scheme, below the metric by length."""
    data = read(args.json, read_json)
    default = Path(args.json).with_suffix(".png")
    if "theorem" in data:
        return theorem(data, args.out or default)
    schemes = {}
    for panel in data["panels"]:
        schemes |= panel["schemes"]
    colors = dict(zip(schemes, plt.cm.tab10.colors))
    fig, axes = panels(len(data["panels"]), 3.3 if len(data["panels"]) > 1 else 5.5, 6.4, rows=2)
    for (top, low), panel in zip(axes.T, data["panels"]):
        if data["metric"] == "tvd":
            top.set_yscale("log")
            low.set_yscale("log")
        swarms(top, panel, data["metric"], colors)
        medians(low, panel, data["metric"], colors)
    for ax in axes[:, 0]:
        ax.set_ylabel(metric_label(data["metric"]))
    legend(axes[:1])
    legend(axes[1:])
    runs.write_figure(fig, args.out or default)


MARKERS = dict(raw="o", ema="^", bema="o")


def swarms(ax, panel, metric, colors):
    """Every trial a dot, left with its last weights, right with their averages; NaN is left out."""
    every = [trial for found in panel["schemes"].values() for trial in found["trials"]]
    kinds = [kind for kind in MARKERS if all(kind in trial[metric] for trial in every)]
    room = 0.8 / len(kinds)
    for n, (scheme, found) in enumerate(panel["schemes"].items()):
        for place, weights in enumerate(kinds):
            x = n + room * (place - (len(kinds) - 1) / 2)
            ys = np.array([trial[metric][weights]["test"] for trial in found["trials"]], float)
            ys = ys[~np.isnan(ys)]
            jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(ys)) * room
            face = colors[scheme] if weights == "raw" else "none"
            ax.scatter(x + jitter, ys, s=12, alpha=0.7, lw=0.8, marker=MARKERS[weights],
                       edgecolors=colors[scheme], facecolors=face)
            if len(ys):
                ends = [x - 0.42 * room, x + 0.42 * room]
                ax.plot(ends, [np.median(ys)] * 2, color="black", lw=1.6)
    crowded = dict(rotation=30, ha="right") if len(panel["schemes"]) > 4 else {}
    ax.set_xticks(range(len(panel["schemes"])), panel["schemes"], **crowded)
    first, last = panel["at"]
    where = f"length {first:,}" if last == first else f"length {first:,} to {last:,}"
    ax.set_title(f"{panel['name']}\nat {where}")
    ax.scatter([], [], color="gray", s=12, label="a trial")
    for weights in kinds[1:]:
        ax.scatter([], [], facecolors="none", edgecolors="gray", s=12, marker=MARKERS[weights],
                   label=f"its {weights.upper()}")
    ax.plot([], [], color="black", lw=1.6, label="median")


def medians(ax, panel, metric, colors):
    """By length: the median of a scheme's trials, and the one that is best in validation."""
    x = np.array(panel["lengths"], float).mean(1)
    if x[-1] > 1000:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.tick_params("x", rotation=30)
    else:
        ax.xaxis.set_major_locator(plt.MaxNLocator(5, integer=True))
    ax.set_xlabel("length (symbols)")
    if "block_size" in panel:
        training_length(ax, panel["block_size"])
    lines, look = {}, {}
    for scheme, found in panel["schemes"].items():
        known = [trial[metric]["raw"] for trial in found["trials"]]
        known = [scores for scores in known if None not in scores.values()]
        if not known:
            continue
        best = (min if metric == "tvd" else max)(known, key=lambda scores: scores["validation"])
        middle, best_trial = f"{scheme}, median", f"{scheme}, best trial"
        kind = dict(color=colors[scheme], marker="")
        lines[middle] = x, [np.median(np.array([k["by_length"] for k in known], float), axis=0)]
        lines[best_trial] = x, [np.array(best["by_length"], float)]
        look |= {middle: kind | dict(lw=2, ls="-"), best_trial: kind | dict(lw=1, ls="--")}
    draw(ax, lines, look)


def theorem(data, out):
    """Precision by length, relative to length 2, and TVD: hard-coded and trained models."""
    found, panel = data["theorem"], data["panels"][0]
    fig, axes = panels(2, 5.2, 4, sharey=False)
    left, right = axes[0]
    T = found["lengths"]
    for (norm, model), color in zip(found["models"].items(), plt.cm.tab10.colors):
        formula = np.array(model["formula"]) / model["formula"][0]
        left.plot(T, formula, color=color, lw=2.4, label=f"norm {norm}: formula")
        measured = np.array(model["precision"]) / model["precision"][0]
        left.plot(T[::4], measured[::4], "o", color=color, ms=5, mfc="none",
                  label=f"norm {norm}: hard-coded")
        right.plot(T, model["tvd"], color=color, lw=2.4, label=f"norm {norm}: hard-coded")
        trained = [t for t in panel["schemes"][norm]["trials"] if t["finite"]]
        for metric, ax in (("precision", left), ("tvd", right)):
            ys = np.array([t[metric]["raw"]["by_length"] for t in trained], float)[:, 1:]
            if metric == "precision":
                ys = ys[ys[:, 0] > 0]  # those that tell present from absent at length 2
                ys = ys / ys[:, :1]
            ax.plot(T, ys.T, color=color, lw=0.7, alpha=0.6)
            ax.plot([], [], color=color, lw=0.7, label=f"norm {norm}: trained, a line each")
    left.set_xscale("log", base=2)
    left.set_yscale("symlog", linthresh=0.02)
    left.xaxis.set_major_formatter("{x:g}")
    left.set(xlabel="length (symbols)", ylabel="precision, at length 2 = 1", title=panel["name"])
    right.set(yscale="log", ylim=(1e-5, 1.5), xlabel="length (symbols)", ylabel=METRICS["tvd"],
              title=panel["name"])
    for ax in (left, right):
        ax.legend(fontsize=7)
    runs.write_figure(fig, out)


# -----------------------------------------------------------------------------
# the matrix

def matrix(args):
    """
    A row for each method, a column for each number: its colour is its place between the column's
    worst and best. A hatched edge: a run that was not finished. Empty: no number, and why.
    """
    columns, rows, added = read(args.json, cells)
    fig = plt.figure(figsize=(0.78 * len(columns), 0.46 * len(rows)))  # the cells fill it
    ax = fig.add_axes([0, 0, 1, 1])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    for x, (name, column) in enumerate(columns.items()):
        known = {y: goodness(row[name], column) for y, row in enumerate(rows.values())}
        known = {y: good for y, good in known.items() if good is not None}
        high = max(known.values(), default=0)
        low = min([high - column["least"], *known.values()])  # 99 is not the worst beside 99.5
        for y, row in enumerate(rows.values()):
            share = (known[y] - low) / (high - low) if y in known else None
            if share and len(known) == 1:  # neither the best nor the worst
                share = 0.5
            apart = row[name].get("spread")  # of several seeds
            small = "" if apart is None else f"± {apart:{column['form']}}"
            draw_cell(ax, x, y, row[name], column["form"], share, small)
    names = [name.partition(": ") for name in columns]
    specs, heads = list(columns.values()), [name.replace(", ", ",\n") for _, _, name in names]
    for task, group in itertools.groupby(enumerate(names), lambda pair: pair[1][0]):
        at = [x for x, _ in group]
        title = task if len(at) > 1 else task.replace(" ", "\n")
        less = [x for x in at if specs[x]["better"] == "less"]
        if all(specs[x].get("percent") for x in at):
            title += ", % right"
        elif less == at and len(at) > 1:
            title += ", less is better"
        else:
            for x in less:
                heads[x] += " ↓"
        ax.text(sum(at) / len(at), -1.55, title, ha="center", weight="bold")
        ax.plot([at[0] - 0.45, at[-1] + 0.45], [-1.42] * 2, color="black", lw=0.8, clip_on=False)
    ax.set_xticks(range(len(columns)), heads)
    ax.xaxis.tick_top()
    ax.set_yticks(range(len(rows)), rows)
    if added in rows:
        y = list(rows).index(added)
        ax.get_yticklabels()[y].set(weight="bold")
        ax.add_patch(plt.Rectangle((-0.5, y - 0.5), len(columns), 1, fill=False, ec="black", lw=2.5,
                                   clip_on=False, zorder=5))
    ax.tick_params(length=0)
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    matrix_legend(fig, ax, 1 / len(rows))
    runs.write_figure(fig, args.out or Path(args.json).with_suffix(".png"))


WORST_TO_BEST = ListedColormap(plt.get_cmap("RdYlBu")(np.linspace(0.08, 0.92, 256)))


def cells(path):
    """-> {column: what it is}, {row: {column: cell}}, the row that was added, if any."""
    data = read_json(path)
    return data["columns"], data["cells"], data.get("added")


def goodness(cell, column):
    """What more of is better, or None. Perplexities are compared by their logarithms."""
    value = cell.get("value")
    if value is None or not math.isfinite(value):
        return None
    if column["logarithmic"]:
        value = math.log(max(value, 1e-9))
    return value if column["better"] == "more" else -value


def draw_cell(ax, x, y, cell, form, share, small=""):
    """
    One number, on its colour: share is 0 for the column's worst, 1 for its best. Below it, in small
    print, what more there is to say.
    """
    if share is None:
        ax.text(x, y, cell.get("reason", "-"), ha="center", va="center", fontsize=7, color="gray")
        return
    color = WORST_TO_BEST(float(share))  # an int would be an index
    ax.add_patch(plt.Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, fc=color, lw=0))
    if cell["unfinished"]:  # an edge: over the whole cell the number could not be read
        ax.add_patch(plt.Rectangle((x - 0.48, y - 0.46), 0.96, 0.2, fc=color, ec="white", lw=0,
                                   hatch="//////"))
    dark = np.dot(color[:3], (0.3, 0.59, 0.11)) < 0.55
    centred = dict(ha="center", va="center", color="white" if dark else "black")
    ax.text(x, y, short(cell["value"], form), fontsize=9, **centred)
    if small:
        ax.text(x, y + 0.33, small, fontsize=5.5, **centred)


def short(value, form):
    """A number in few characters: 100.0 as 100, 12345.67 as 12,346."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return format(value, form).removesuffix(".0")


def matrix_legend(fig, ax, row):
    """Below the last row; row is the height of one, as a share of all."""
    box = ax.inset_axes([0.66, -0.8 * row, 0.24, 0.24 * row])
    bar = fig.colorbar(plt.cm.ScalarMappable(cmap=WORST_TO_BEST), cax=box,
                       orientation="horizontal")
    bar.set_ticks([0, 1], labels=["worst of its column", "best"])
    bar.outline.set_visible(False)
    ax.text(0.78, -1.5 * row, "colours span 10 points, 10 % of a perplexity or .05 at least",
            transform=ax.transAxes, ha="center", va="top", fontsize=9)
    hatched = plt.Rectangle((0, 0), 1, 1, fc="lightgray", ec="white", hatch="////", lw=0)
    nothing = plt.Rectangle((0, 0), 1, 1, fc="none", lw=0)
    ax.legend([hatched, nothing],
              ["not finished: validation perplexity fell by more than\n1 % over the last fifth of "
               "its training", "↓: less is better; ends: no positions for such lengths"],
              loc="upper left", bbox_to_anchor=(0, -0.12 * row), fontsize=9)


FEWEST = 30  # questions, for a point


def reading(args):
    """
    Surviving and reading: strided perplexity by window, in the first window = 1 (left), and the
    share of right answers by how far back they lie, in the longest strings (right).
    """
    survived, read_far, trained, added = read(args.json, far_runs)
    if not survived and not read_far:
        runs.fail(f"{args.json} has neither strided perplexity nor answers by distance")
    look = looks(survived | read_far, added)
    fig, axes = panels(2, 5.4, 4.4, sharey=False)
    left, right = axes[0]
    lengths = sorted({T for xs, _ in survived.values() for T in xs})
    if lengths:
        length_axis(left, lengths)
        perplexity_axis(left, [y for _, ys in survived.values() for y in ys])
    left.set(xlabel="window length (tokens), each token with half of it to look back on",
             ylabel="strided perplexity, shortest window = 1", title="surviving: text")
    draw(left, survived, look)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.set(xlabel="distance to the answer, d to 2 d - 1 tokens (30 questions or more)",
              ylabel="right answers (%)", ylim=(-2, 102), title="reading: what was said far back")
    if trained:
        training_length(right, trained)
    draw(right, read_far, look)
    legend(axes)
    runs.write_figure(fig, args.out or Path(args.json).with_suffix(".reading.png"))


def far_runs(path):
    """
    -> {row: (windows, ratios of seeds)}, {row: (distances, % of seeds)}, the training length of
    the latter, and the row that was added, if any.
    """
    data, survived, far, trained = read_json(path), {}, {}, 0
    for r in data["runs"]:
        if len(r.get("strided", {})) > 1 and "other_text" not in r:
            ys = np.array(list(r["strided"].values()), float)
            _, seeds = survived.setdefault(r["label"], (list(map(int, r["strided"])), []))
            seeds.append(ys / ys[0])
        if r.get("by_distance"):
            T = max(r["by_distance"], key=int)
            asked = next(iter(r["by_distance"][T].values()))
            found = {int(d): 100 * rate for d, (n, rate) in asked.items() if n >= FEWEST}
            trained = r["config"]["block_size"]
            label = r["label"] if int(T) > trained else f"{r['label']} (strings of {T})"
            _, seeds = far.setdefault(label, (list(found), []))
            seeds.append(list(found.values()))
    return survived, far, trained, data.get("added", "")


# -----------------------------------------------------------------------------
# speed

def attention(args):
    """Time beside scaled_dot_product_attention's, by length: forward, and with backward."""
    found, environment = read(args.json, times)
    names = list(dict.fromkeys(itertools.chain(*found.values())))
    methods = list(dict.fromkeys(name.partition(":")[0] for name in names))
    ways = list(dict.fromkeys(name.partition(": ")[2] for name in names))
    look, colors, others = looks(names), {}, itertools.cycle(OTHERS)
    for method in methods:  # of several settings of a method the first has its colour
        own = color_of(method)
        colors[method] = next(others) if own in (None, *colors.values()) else own
    for name in names:
        method, _, way = name.partition(": ")
        style = ("-", "--", ":", "-.", (0, (1, 0.6)))[ways.index(way) % 5]
        style = style if len(ways) > 1 else look[name]["ls"]
        look[name] |= dict(color=colors[method], ls=style, lw=1.5)
    measured = {key for rows in found.values() for row in rows.values() for key in row}
    kinds = [kind for kind in ("forward", "both") if f"{kind}_of_sdpa" in measured]
    if not kinds:
        runs.fail(f"{args.json} has no time of scaled_dot_product_attention to measure by")
    fig, axes = panels(len(kinds), 4.6, max(4.2, 0.22 * len(names) + 1))  # the legend's height
    for ax, kind in zip(axes[0], kinds):
        length_axis(ax, list(found))
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
        title = "forward" if kind == "forward" else "forward and backward"
        ax.set(xlabel="length (tokens)", title=title)
        lines = {}
        for name in names:
            xs = [T for T in found if f"{kind}_of_sdpa" in found[T].get(name, {})]
            lines[name] = xs, [[found[T][name][f"{kind}_of_sdpa"] for T in xs]]
        draw(ax, lines, look)
    axes[0, 0].set_ylabel("time, scaled_dot_product_attention = 1")
    legend(axes)
    fig.suptitle(environment["gpu"] or environment["cpu"], fontsize=10)
    runs.write_figure(fig, args.out or Path(args.json).with_suffix(".png"))


def times(path):
    data = read_json(path)
    found = {int(T): rows for T, rows in data["attention"].items()}
    return dict(sorted(found.items())), data["environment"]


# -----------------------------------------------------------------------------
# command line

def main(argv=None):
    parser = runs.make_parser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=runs.make_parser)

    def add(figure, what, written_by=None):
        p = kinds.add_parser(figure.__name__, help=what)
        p.set_defaults(figure=figure)
        p.add_argument("--out", help="the picture to write, .png, .pdf or .svg")
        if written_by:
            p.add_argument("json", help=f"written by {written_by}")
        return p
    p = add(lengths, "perplexity by length and loss by position", "eval.py or reproduce.py")
    p.add_argument("--models", nargs="+", help="draw only these, in this order; default: all")
    p = add(scores, "a synthetic task's scores by split", "eval.py or reproduce.py")
    p.add_argument("--metric", help="which; default: the task's first")
    p = add(positions, "a task's total variation distance or AUC by position", "eval.py")
    p.add_argument("--metric", help="tvd or auc; default: what there is")
    add(trials, "a random search: every trial, and the metric by length", "reproduce.py")
    add(matrix, "every method on every task, worst to best", "reproduce.py")
    add(reading, "strided perplexity by length beside right answers by distance", "reproduce.py")
    add(attention, "the attention functions' time by length", "bench.py attention")
    add(ndcg, "how well documents are found, by length", "eval.py or reproduce.py")
    p = add(curves, "learning curves")
    p.add_argument("paths", nargs="+", help="run folders, or a results/*.json")
    p = add(errors, "a synthetic task's scores by training step")
    p.add_argument("paths", nargs="+", help="run folders, or a results/*.json")
    p.add_argument("--metric", help="which; default: the task's first")
    args = runs.parse(parser, argv)
    try:
        args.figure(args)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
            MemoryError) as e:
        paths = " ".join(args.paths if "paths" in args else [args.json])
        if isinstance(e, LookupError | TypeError | AttributeError):
            runs.fail(f"{paths} is not a file that eval.py, reproduce.py or bench.py wrote for "
                      f"this kind of figure ({type(e).__name__}: {e})")
        why = str(e).partition("\n")[0]
        runs.fail(f"{paths} cannot be drawn ({type(e).__name__}: {why})")


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    main()
