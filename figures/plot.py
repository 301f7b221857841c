"""
JSON -> figure: draw what eval.py, reproduce.py and train.py left behind.

    python -m figures.plot lengths out/cable-stdlib-nano/eval.json

    lengths      perplexity by window length
    scores       a task's scores by split
    positions    total variation distance or AUC by position
    ndcg         nDCG@10 by document length
    curves       learning curves
    errors       a task's scores by training step

A path is a JSON, a folder of them (results/runs/cable_table1.cpu) or the folder of a run; several
are drawn together. Runs that differ only in the seed become one line, their mean, and their range
or a dot for each; run folders stay apart. The first line is the widest and lies lowest: where lines
coincide, each shows below the next. What a model attends to and counts is drawn by figures/maps.py.
"""
import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from common import ROOT
from common.exits import fail, in_one_line, nearest
from common.files import read_json, read_log, write_figure
from common.flags import Parser

STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "font.size": 10, "axes.titlesize": 11, "legend.frameon": False, "legend.handlelength": 3,
    "figure.dpi": 150, "text.parse_math": False}  # a run's name is text: a$b is no formula
WORDS = dict(
    exact_match="strings without an error",
    sequence_error="strings with an error",
    glitch_rate="wrong answers",
    answer_error="wrong answers",
    token_error="wrong tokens",
    tvd="total variation distance (TVD)",
    auc="area under the ROC curve (AUC)",
    iid="as in training (iid)",
    pass100="longer contexts (pass100)",
    pass10="shorter contexts (pass10)")


# -----------------------------------------------------------------------------
# reading

def load(args, key):
    """-> what the first JSON says, and {label: rows} of the runs that have `key`, or --rows."""
    about, rows = {}, []
    names = [Path(path).resolve().name for path in args.paths]
    for path, name in zip(map(Path, args.paths), names):
        if (path / "log.jsonl").exists():
            rows.append(logged(path, name if names.count(name) == 1 else str(path)))
            continue
        for result in results(path):
            about = about or result
            rows += result.get("runs", [])
    rows = [row for row in rows if row.get(key)]
    if not rows:
        fail(f"no run in {' '.join(args.paths)} has {key!r}, which this figure is of")
    groups = grouped(rows)
    for label in args.rows or []:
        if label not in groups:
            fail(f"there is no row {label!r}: {nearest(label, groups)}")
    return about, {label: groups[label] for label in args.rows or groups}


def results(path):
    """The JSON at a path, or all in a folder; there one that is damaged is named, and left out."""
    if not path.is_dir():
        yield read_json(path)
    for file in sorted(path.rglob("*.json")):
        try:
            yield read_json(file)
        except SystemExit as e:
            print(f"{e}: left out", file=sys.stderr)


def logged(folder, label):
    """A run's log as a row: [[step, value], ...] of the losses and, of a task, the scores."""
    log, row = read_log(folder), dict(label=label)
    for key, name in (("loss", "loss"), ("val_loss", "val_loss"), ("scores", "history")):
        row[name] = [[line["iter"], line[key]] for line in log if key in line]
    return row


def grouped(rows):
    """
    {label: rows}. A row's own label counts, if it has one. Else seeds of one setting go together,
    under their model's name; runs that differ in more go under their folder's.
    """
    settings, groups = {}, {}
    for row in rows:
        setting = row.get("label")
        if setting is None:
            config = row["config"] | dict(seed=None, out_dir=None)
            setting = json.dumps([config, row["iter"], row["checkpoint"]], sort_keys=True)
        settings.setdefault(setting, []).append(row)
    for same in settings.values():
        row = same[0]
        names = [row["label"]] if "label" in row else [row["model"], row["name"]]
        names.append(f"{names[-1]} ({len(groups)})")
        groups[next(name for name in names if name not in groups)] = same
    return groups


def by_panel(groups, titles, points):
    """-> {title: {label: [points(row, key), a seed each]}} for the {key: title} of the panels."""
    parts = {}
    for key, title in titles.items():
        parts[title] = {}
        for label, rows in groups.items():
            parts[title][label] = [points(row, key) for row in rows]
    return parts


def aligned(seeds):
    """
    [{x: y}, a seed each] -> the xs of any seed, and ys (seeds, n), on straight lines between a
    seed's own points: a run that was resumed has logged other steps than the others.
    """
    xs, ys = sorted({float(x) for x in itertools.chain(*seeds)}), []
    for seed in seeds:
        x, y = np.array(sorted(seed.items(), key=lambda point: float(point[0])), float).T
        ys.append(np.interp(xs, x, y, left=np.nan, right=np.nan))
    return xs, np.array(ys)


def names_in(by_splits, metric):
    """[{split: {metric: ...}}, ...] -> {split: in words}, and the metric asked for or the first."""
    splits, metrics = {}, {}
    for by_split in by_splits:
        for split, by_metric in by_split.items():
            splits[split] = spelled(split)
            metrics |= by_metric
    splits = {split: splits[split] for split in dense_last(splits)}
    if metric and metric not in metrics:
        fail(f"there is no {metric}: {nearest(metric, metrics)}")
    return splits, metric or next(iter(metrics))


def dense_last(splits):
    """Splits in one order for all figures: as in training, sparse, dense."""
    return sorted(splits, key=lambda split: split == "dense")


def spelled(name):
    """A metric or a split in words."""
    return WORDS.get(name, name.replace("_", " "))


# -----------------------------------------------------------------------------
# panels, lines and legends

MOST_LINES = 10  # beyond, they cannot be told apart
# a method has one colour in every figure
COLORS = dict(tra="black", rope="tab:blue", alibi="tab:orange", cope="tab:green", cable="tab:red",
              fox="tab:purple", learned="tab:brown", t5="tab:pink", nope="tab:gray",
              relative="tab:olive", diff="tab:cyan", kerple="navy", fire="lightsalmon",
              sinusoidal="deeppink", label="darkgreen", peri="goldenrod", stick="teal",
              path="chocolate", ssmax="limegreen", rope_nope="royalblue",
              rope_window="deepskyblue")
OTHERS = ("indigo", "maroon", "yellowgreen", "slateblue", "orchid", "darkkhaki", "steelblue")


def panels(columns, width, height, rows=1, sharey="row", sharex=False):
    """-> (figure, axes (rows, columns)); a row shares its y axis."""
    fig = Figure(figsize=(width * columns + 1, height * rows), layout="constrained")
    return fig, fig.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)


def color_of(label):
    """The colour of the method that a label, or the last folder in it, begins with, or None."""
    return COLORS.get(re.split(r"\W", label.split("/")[-1])[0])


def looks(labels):
    """{label: how its line looks}, from wide to narrow, all different."""
    styles, others = {}, itertools.cycle(OTHERS)
    for n, label in enumerate(labels):
        width = 3.2 - 2 * n / max(1, len(labels) - 1)
        styles[label] = dict(color=color_of(label) or next(others), lw=width, ms=width + 3.5,
                             ls=("-", "--", "-.", ":")[n % 4], marker="osD^vP*X<>p"[n % 11])
    return styles


def draw(ax, lines, look, dots=False):
    """
    {label: [{x: y}, a seed each]} -> a line of means, and the range of the seeds as a shade; or
    each seed as a dot, where shades would cover the panel.
    """
    for label, seeds in lines.items():
        seeds = [seed for seed in seeds if seed]
        if not seeds:
            continue
        x, ys = aligned(seeds)
        color = look[label]["color"]
        name = f" {label}" if label.startswith("_") else label  # which a legend would leave out
        ax.plot(x, np.mean(ys, 0), label=name, markevery=math.ceil(len(x) / 12), clip_on=False,
                **look[label])
        if len(ys) > 1 and dots:
            ax.plot(x, ys.T, "o", color=color, ms=3, clip_on=False)
            ax.plot([], [], "o", color="gray", ms=3, label="a run")
        elif len(ys) > 1:
            ax.fill_between(x, np.min(ys, 0), np.max(ys, 0), color=color, alpha=0.15, lw=0)
            ax.fill_between([], [], color="gray", alpha=0.3, lw=0, label="range over runs")


def length_axis(ax):
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")


def training_length(ax, groups):
    for length in {row["block_size"] for row in itertools.chain(*groups)}:
        ax.axvline(length, color="gray", lw=1, ls=":", zorder=0, label="training length")


def legend(axes, below=0):
    """One legend of everything that these panels show, right of them, or in columns below."""
    handles = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    last = ["a run", "range over runs", "95 % interval", "training length"]
    names = sorted(handles, key=lambda name: name in last)
    handles = [handles[name] for name in names]
    if below:
        axes[0].figure.legend(handles, names, loc="outside lower center", ncols=below)
    else:
        axes[-1].legend(handles, names, loc="center left", bbox_to_anchor=(1.01, 0.5))


def figure(parts, xlabel, ylabel="", groups=None, sharey="row", dots=False, order=""):
    """
    {title: {label: [{x: y}, a seed each]}} -> a figure, and its panels: one for each title, in
    several rows where there are many labels, and `order` says which come first. With the rows of a
    JSON, x are lengths. Dots are of rates in %, of which many are 0.
    """
    labels = list(next(iter(parts.values())))
    chunks = np.array_split(labels, math.ceil(len(labels) / MOST_LINES))
    fig, axes = panels(len(parts), min(4, 9.6 / len(parts)), 3.6, len(chunks), sharey)
    for row, chunk in zip(axes, chunks):
        for ax, (title, lines) in zip(row, parts.items()):
            draw(ax, {label: lines[label] for label in chunk}, looks(chunk), dots)
            ax.set(title=title, xlabel=xlabel)
            if groups:
                length_axis(ax)
                training_length(ax, [groups[label] for label in chunk if label in groups])
        row[0].set(ylabel=ylabel, ylim=(-2 if dots else None, None))
        if len(chunks) > 1:
            first = labels.index(chunk[0]) + 1
            row[0].set_title(f"{first} to {first + len(chunk) - 1} of {len(labels)} models{order}",
                             loc="left", y=1.12, weight="bold")
        legend(row)
    return fig, axes


def save(fig, args, ending=".png"):
    """As --out, or beside what was read."""
    first = Path(args.paths[0])
    if (first / "log.jsonl").exists():
        first, ending = first / args.figure, ".png"
    write_figure(fig, args.out or f"{str(first).removesuffix('.json')}{ending}")


# -----------------------------------------------------------------------------
# text

def lengths(args):
    """
    Perplexity by window length (left); of tokens with half a window before them, after eval.py
    --strided (middle); loss by position in the longest window (right). Many models take several
    rows of panels, the lowest perplexities first. Bits per byte alone, if tokenizers differ.
    """
    about, groups = load(args, "perplexity")
    every = list(itertools.chain(*groups.values()))
    longest = max((T for row in every for T in row["perplexity"]), key=int)
    if len(groups) > MOST_LINES:
        def last(label):  # infinite, where a model ends before them or has no number
            return np.mean([row["perplexity"].get(longest) or math.inf for row in groups[label]])
        groups = {label: groups[label] for label in sorted(groups, key=last)}
    groups |= committed(about, every)
    titles = dict(perplexity="by window length", strided="strided by half a window",
                  by_position=f"by position in windows of {int(longest):,}")
    if not any("strided" in row for row in every):
        del titles["strided"]
    if len({row["config"].get("tokenizer") for row in every}) > 1:
        titles = dict(bits_per_byte="by window length")
    parts = by_panel(groups, titles, text_points)
    order = f", lowest at {int(longest):,} first"
    fig, axes = figure(parts, "tokens", groups=groups, sharey=False, order=order)
    for first, *others in axes:
        for ax in others[:-1]:
            ax.sharey(first)
        first.autoscale(axis="y")
        perplexity_axis(first)
        for ax, key in zip((first, *others), titles):
            ax.set_ylabel(UNITS[key])
    save(fig, args)


UNITS = dict(perplexity="perplexity", strided="perplexity", by_position="loss (nats)",
             bits_per_byte="bits per byte")


def perplexity_axis(ax):
    """Logarithmic, where perplexities are far apart."""
    low, high = ax.dataLim.intervaly
    if high > 2 * low:
        ax.set_yscale("log")
        plain_logarithms(ax.yaxis, (1, 1.5, 2, 3, 5, 7))


def plain_logarithms(axis, steps):
    """Ticks at these multiples of powers of ten, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(lambda x, _: f"{x:,.9f}".rstrip("0").rstrip("."))
    axis.set_minor_locator(NullLocator())


def text_points(row, key):
    if key == "by_position":
        return {(first + last) / 2 + 1: loss for first, last, loss in row[key]}
    if key == "bits_per_byte" and key not in row:  # of a model of bytes
        return {T: math.log2(value) for T, value in row["perplexity"].items() if value}
    return row.get(key, {})


SETTING = ("data", "tokenizer", "block_size", "n_layer", "n_head", "n_embd", "max_iters")


def committed(about, rows):
    """This repository's RoPE, plain and with its window, where one's own runs have its setting."""
    groups, folder = {}, ROOT / "results" / "runs" / "cable_table1.cpu"
    if any("label" in row or row["model"] == "rope" for row in rows):
        return {}
    paths = folder / "rope-1337.json", folder / "rope-window-1337.json"
    for path in filter(Path.exists, paths):
        result = read_json(path)
        rope, = result["runs"]
        same = [about.get(key) == result[key] for key in ("tokens", "lengths")]
        for row in rows:
            same += [row["config"].get(key) == rope["config"][key] for key in SETTING]
        if all(same):
            python = rope["environment"]["python"]  # whose library is the text
            groups[f"{rope['label']} (this repository's,\nPython {python})"] = [rope]
    return groups


# -----------------------------------------------------------------------------
# learning curves

def curves(args):
    """Training and validation loss by step."""
    _, groups = load(args, "loss")
    titles = dict(loss="training loss (nats)", val_loss="validation loss (nats)")
    fig, _ = figure(by_panel(groups, titles, thinned), "training step")
    save(fig, args)


def thinned(row, key, most=40):
    """{step: loss} of `most` steps at most, each the mean since the one before."""
    points = np.array(row[key], float)
    step = max(1, math.ceil(len(points) / most))
    parts = [points[start:start + step] for start in range(0, len(points), step)]
    return {part[-1, 0]: part[:, 1].mean() for part in parts}


# -----------------------------------------------------------------------------
# tasks

def scores(args):
    """One panel per split: at one length a row of dots per model, at several a line per model."""
    _, groups = load(args, "scores")
    every = [row["scores"] for row in itertools.chain(*groups.values())]
    by_splits = itertools.chain(*(row.values() for row in every))
    titles, metric = names_in(list(by_splits), args.metric)
    words = f"{spelled(metric)} (%)"

    def found(row, split):
        scores = {T: by_split.get(split, {}) for T, by_split in row["scores"].items()}
        return {T: score[metric] for T, score in scores.items() if metric in score}

    def points(row, split):
        return {T: percent(score["value"]) for T, score in found(row, split).items()}
    if all(len(row) == 1 for row in every):
        fig = dots(by_panel(groups, titles, found), words)
    else:
        parts = by_panel(groups, titles, points)
        fig, _ = figure(parts, "string length (tokens)", words, groups, dots=True)
    save(fig, args)


def errors(args):
    """A task's scores by training step, one panel for each split."""
    _, groups = load(args, "history")
    first = next(iter(groups.values()))[0]
    titles, metric = names_in([scores for _, scores in first["history"]], args.metric)

    def points(row, split):
        history = [(step, scores.get(split, {})) for step, scores in row["history"]]
        return {step: percent(scores[metric]) for step, scores in history if metric in scores}
    parts = by_panel(groups, titles, points)
    fig, _ = figure(parts, "training step", f"{spelled(metric)} (%)", dots=True)
    save(fig, args, ".steps.png")


def percent(value):
    return math.nan if value is None else 100 * value


def dots(parts, words):
    """{split: {label: [{length: score}, a run each]}} -> a row of dots for each label."""
    labels = list(next(iter(parts.values())))
    fig, axes = panels(len(parts), 2.7, 0.26 * len(labels) + 1.6, sharex=True)
    for ax, (split, runs) in zip(axes[0], parts.items()):
        for n, label in enumerate(labels):
            for seed, run in enumerate(runs[label]):
                y = n + 0.15 * (seed - (len(runs[label]) - 1) / 2)
                for score in run.values():
                    value, *ends = [percent(score[key]) for key in ("value", "low", "high")]
                    ax.plot(ends, [y, y], color="gray", lw=1.2, label="95 % interval")
                    ax.plot(value, y, "o", color="black", ms=4, clip_on=False, label="a run")
        ax.set(title=split, xlabel=words, ylim=(len(labels) - 0.5, -0.5))
        ax.set_yticks(range(len(labels)), labels)
    axes[0, 0].set_xlim(0, None)
    legend(axes[0], below=2)
    return fig


def positions(args):
    """Of a task whose right answer is a distribution: TVD or AUC by position, a panel per split."""
    metric = args.metric or "tvd"
    _, groups = load(args, metric)
    titles = {}
    for T, by_split in next(iter(groups.values()))[0][metric].items():
        for split in by_split:
            titles[T, split] = f"{spelled(split)}, strings of {int(T):,}"

    def points(row, key):
        T, split = key
        ys = row[metric].get(T, {}).get(split, ())
        return smooth(np.array(ys, float)) if ys else {}
    parts = by_panel(groups, titles, points)
    fig, _ = figure(parts, "position (tokens)", spelled(metric), groups)
    save(fig, args, f".{metric}.png")


def binned(values, edges):
    """Means of values (T,) between edges (n + 1,), NaNs left out."""
    parts = [values[a:b][~np.isnan(values[a:b])] for a, b in zip(edges, edges[1:])]
    return [part.mean() if len(part) else math.nan for part in parts]


def smooth(ys):
    """ys (T,) by position -> {position: the mean of some}."""
    step = 1 if len(ys) <= 32 else 2 * math.ceil(len(ys) / 96)  # even: an AUC is at every other
    edges = [*range(0, len(ys), step), len(ys)]
    return {(a + b + 1) / 2: y for a, b, y in zip(edges, edges[1:], binned(ys, edges))}


def ndcg(args):
    """nDCG@10 by the length that documents are cut to."""
    about, groups = load(args, "search")
    titles = dict(whole="documents read as a whole", windows="their best window")
    parts, first = by_panel(groups, titles, searched), next(iter(groups.values()))[0]
    for lines in parts.values():
        lines["BM25"] = [searched(first, "bm25")]
        lines["chance"] = [dict.fromkeys(lines["BM25"][0], 100 * about["chance"])]
    fig, _ = figure(parts, "document length (tokens)", "nDCG@10 (%)", groups)
    save(fig, args)


def searched(row, key):
    return {T: percent(scores["ndcg@10"]["value"]) for T, scores in row["search"][key].items()}


# -----------------------------------------------------------------------------
# command line

def main(argv=None):
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="figure", required=True, parser_class=Parser)
    for function in (lengths, scores, positions, ndcg, curves, errors):
        p = commands.add_parser(function.__name__, description=function.__doc__)
        p.set_defaults(draw=function)
        p.add_argument("paths", nargs="+", help="JSONs, folders of them, or folders of runs")
        p.add_argument("--rows", nargs="+", help="draw only these, in this order")
        p.add_argument("--out", help="the picture to write, .png, .pdf or .svg")
        if function in (scores, positions, errors):
            p.add_argument("--metric", help="which; default: the task's first")
    args = parser.parse_args(argv)
    with rc_context(STYLE):
        args.draw(args)


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
