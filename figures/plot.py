"""
JSON -> figure: draw what eval.py, reproduce.py and train.py left behind.

    python -m figures.plot lengths out/cable-stdlib-nano

    lengths      perplexity by window length
    scores       a task's scores by split
    positions    total variation distance or AUC by position
    ndcg         nDCG@10 by document length
    curves       learning curves
    errors       a task's scores by training step

A path is a JSON, a folder of them (results/runs/cable_table1.cpu) or the folder of a run; several
are drawn together. Without one it is the newest run in out/, for curves all of them. Runs that
differ only in the seed become one line, their mean, and their range or a dot for each; run folders
stay apart. The first line is the widest and lies lowest: where lines coincide, each shows below the
next. What a model attends to and counts is drawn by figures/maps.py.
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
from common.checkpoint import find_checkpoint
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
    """The rows that have `key`, all or those of --rows, each with a label."""
    rows = []
    for path in args.paths:
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if (path / "log.jsonl").exists():  # a run
            rows.append(logged(path, str(path)))
            files = [] if key in rows[-1] else path.glob("eval.json")
        for result in map(read_json, files):
            rows += [result | row for row in result.get("runs", [])]
    rows = [row for row in rows if row.get(key)]
    if not rows:
        paths = " ".join(map(str, args.paths))
        fail(f"no run in {paths} has {key!r}, which this figure is of; train.py logs losses, "
             "eval.py the rest")
    labels = named(rows)
    for label in args.rows or []:
        if label not in labels:
            fail(f"there is no row {label!r}: {nearest(label, labels)}")
    order = args.rows or labels
    rows = [row for row in rows if row["label"] in order]
    return sorted(rows, key=lambda row: order.index(row["label"]))


def named(rows):
    """
    Gives every row a label, and returns all labels. Seeds of a table's row have one; of one's own
    runs those that differ in the seed alone get one, the model's name or else a folder's.
    """
    labels = {}  # by setting
    for row in rows:
        changed = [f"{name}={value}" for name, value in row.get("set", {}).items()]
        setting = label = row.get("label") or ", ".join([row["model"], *changed])
        if "label" not in row:
            config = row["config"] | dict(seed=None, out_dir=None)
            how = "iter", "checkpoint", "set", "bema", "split", "tokens"
            read = [row.get(key) for key in how]
            setting = json.dumps([config, read], sort_keys=True)
            if label in labels.values():
                label = row["name"]
        while setting not in labels and label in labels.values():
            label += "'"
        row["label"] = labels.setdefault(setting, label)
    return [*labels.values()]


def logged(folder, label):
    """A run's log as a row: [[step, value], ...] of the losses and, of a task, the scores."""
    log, row = read_log(folder), dict(label=label)
    for key, name in (("loss", "loss"), ("val_loss", "val_loss"), ("scores", "history")):
        row[name] = [[line["iter"], line[key]] for line in log if key in line]
    return row


def series(rows, read):
    """
    Rows -> {panel: {label: [{x: y}, a seed each]}}. read(row) yields (panel, x, y), a panel being
    (its title, its unit).
    """
    panels, labels = {}, dict.fromkeys(row["label"] for row in rows)
    for row in rows:
        seed = {}
        for panel, x, y in read(row):
            seed.setdefault(panel, {})[float(x)] = y
        for panel, points in seed.items():
            lines = panels.setdefault(panel, {label: [] for label in labels})
            lines[row["label"]].append(points)
    return panels


def aligned(seeds):
    """
    [{x: y}, a seed each] -> the xs of any seed, and ys (seeds, n), on straight lines between a
    seed's own points: a run that was resumed has logged other steps than the others.
    """
    xs, ys = sorted(set().union(*seeds)), []
    for seed in seeds:
        x, y = np.array(sorted(seed.items()), float).T
        ys.append(np.interp(xs, x, y, left=np.nan, right=np.nan))
    return xs, np.array(ys)


def thinned(points, most=40):
    """At most so many points, each the mean of a stretch of the points [x, y]."""
    size = math.ceil(len(points) / most) or 1
    for first in range(0, len(points), size):
        xs, ys = np.array(points[first:first + size], float).T
        yield xs[-1], ys.mean()


def spelled(name):
    """A metric or a split in words."""
    return WORDS.get(name, name.replace("_", " "))


def percent(value):
    return math.nan if value is None else 100 * value


# -----------------------------------------------------------------------------
# panels, lines and legends

MOST_LINES = 10  # beyond, they cannot be told apart
DASHES, MARKERS = ("-", "--", "-.", ":"), "osD^vP*X<>p"
COLORS = dict(
    tra="black", rope="tab:blue", alibi="tab:orange", cope="tab:green", cable="tab:red",
    fox="tab:purple", learned="tab:brown", t5="tab:pink", nope="tab:gray", relative="tab:olive",
    diff="tab:cyan", kerple="navy", fire="lightsalmon", sinusoidal="deeppink", label="darkgreen",
    peri="goldenrod", stick="teal", path="chocolate", ssmax="limegreen", rope_nope="royalblue",
    rope_window="deepskyblue", BM25="indigo", chance="maroon",
    # where a block has its norms
    none="dimgray", pre="steelblue", pre_final="orchid", output="seagreen", post="firebrick",
    peri_init="sienna",
    # a trained RoPE, repaired
    window="#0d0887", yarn="#5002a2", pi="#8606a6", ntk="#b32c8e", rerope="#d5536f",
    selfextend="#ef7c51", sinks="#fdac33", log_n="#f7e425")
OTHERS = ("peru", "indigo", "lightcoral", "darkkhaki", "steelblue", "orchid", "maroon",
          "yellowgreen", "slateblue", "cadetblue", "olivedrab")


def color_of(label):
    """
    A method has one colour in every figure: the repair's that a label ends with, else that of the
    name that it, or the last part of a path, begins with.
    """
    *_, repair = label.split(", ")
    begins = re.findall(r"(?:^|(?<=/))\w*", label)  # the label, and each part of a path
    for name in (repair, begins[0], begins[-1]):
        if name in COLORS:
            return COLORS[name]
    return OTHERS[sum(begins[-1].encode()) % len(OTHERS)]


def subplots(columns, width, height, rows=1, **how):
    """-> (figure, axes (rows, columns))"""
    fig = Figure(figsize=(width * columns + 1, height * rows), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **how)


def figure(panels, xlabel, rows=(), dots=False):
    """
    {(title, unit): {label: [{x: y}, a seed each]}} -> a figure: a panel for each title, in
    several rows where there are many labels. Panels of one unit share an axis. If rows are
    given, x is a length, and their training lengths are marked. Dots are for rates, many of which
    are 0.
    """
    labels = list(next(iter(panels.values())))
    chunks = np.array_split(labels, math.ceil(len(labels) / MOST_LINES))
    fig, axes = subplots(len(panels), min(4, 9.6 / len(panels)), 3.6, len(chunks))
    for chunk, of_chunk in zip(chunks, axes):
        units = {}
        for ax, (title, unit) in zip(of_chunk, panels):
            ax.set(title=title, xlabel=xlabel)
            first = units.setdefault(unit, ax)
            if first is ax:
                ax.set_ylabel(unit)
            else:
                ax.sharey(first)
                ax.tick_params(labelleft=False)
            lines = panels[title, unit]
            draw(ax, {label: lines[label] for label in chunk}, dots)
            if rows:
                length_axis(ax)
                training_length(ax, [row for row in rows if row["label"] in chunk])
        legend(of_chunk)
    return fig


def draw(ax, lines, dots=False):
    """
    {label: [{x: y}, a seed each]} -> a line of means, from wide to narrow, and the range of the
    seeds as a shade; or each seed as a dot, where shades would cover the panel.
    """
    for n, (label, seeds) in enumerate(lines.items()):
        if not seeds:
            continue
        x, ys = aligned(seeds)
        color, width = color_of(label), 3.2 - 2 * n / max(1, len(lines) - 1)
        ax.plot(x, ys.mean(0), label=label, color=color, lw=width, ms=width + 3.5,
                ls=DASHES[n % 4], marker=MARKERS[n % 11], markevery=0.08 if len(x) > 12 else 1,
                clip_on=False)
        if len(seeds) > 1 and dots:
            ax.plot(x, ys.T, "o", color=color, ms=3, clip_on=False)
        elif len(seeds) > 1:
            ax.fill_between(x, ys.min(0), ys.max(0), color=color, alpha=0.15, lw=0)
    several = max(map(len, lines.values())) > 1
    if several and dots:
        ax.plot([], [], "o", color="gray", ms=3, label="a run")
    elif several:
        ax.fill_between([], [], color="gray", alpha=0.3, lw=0, label="range over runs")


def length_axis(ax):
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")


def training_length(ax, rows):
    for length in {row["block_size"] for row in rows}:
        ax.axvline(length, color="gray", lw=1, ls=":", zorder=0, label="training length")


def plain_logarithms(axis, steps):
    """Ticks at these multiples of powers of ten, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def legend(axes):
    """One legend of everything that these panels show, right of them."""
    handles = {}
    for ax in axes:
        found, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, found))
    axes[-1].legend(handles.values(), handles, loc="center left", bbox_to_anchor=(1.01, 0.5))


# -----------------------------------------------------------------------------
# the figures

def lengths(args):
    """
    Perplexity by window length; of tokens with half a window before them, after eval.py --strided;
    loss by position in the longest window. Many models take several rows of panels, the lowest
    perplexities first.
    """
    rows = load(args, "perplexity")
    longest = max(itertools.chain(*(row["perplexity"] for row in rows)), key=int)
    if len({row["label"] for row in rows}) > MOST_LINES:  # last where they end before or have none
        rows = sorted(rows, key=lambda row: row["perplexity"].get(longest) or math.inf)
    rows += committed(rows)
    panels = series(rows, perplexities)
    fig = figure(panels, "tokens", rows)
    for ax in fig.axes:
        if ax.get_ylabel():  # else it has another's axis
            leave_above(ax, ax.get_ylabel().startswith("perplexity"))
    return fig


def leave_above(ax, logarithmic):
    """Curves that break leave the picture, and those that do not can be told apart."""
    low, high = ax.dataLim.intervaly
    best = np.nanmin([line.get_ydata()[-1] for line in ax.lines if line.get_marker() != "None"])
    top = 3 * best if logarithmic else best + 1.5
    if logarithmic and high > 2 * low:
        ax.set_yscale("log")
        plain_logarithms(ax.yaxis, (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
    if high > top:
        ax.set_ylim(top=top)
        for line in itertools.chain(*(other.lines for other in ax.figure.axes)):
            line.set_clip_on(True)


def perplexities(row):
    """Of several tokenizers they do not compare, and have panels of their own."""
    tokens = row["config"].get("tokenizer", "tokens")
    for T, value in row["perplexity"].items():
        yield ("by window length", f"perplexity, {tokens}"), T, value
    for T, value in row.get("strided", {}).items():
        yield ("strided by half a window", f"perplexity, {tokens}"), T, value
    for first, last, loss in row["by_position"]:
        panel = "by position in the longest window", f"loss (nats), {tokens}"
        yield panel, (first + last) / 2 + 1, loss


SETTING = ("tokens", "lengths", "data", "tokenizer", "block_size", "n_layer", "n_head", "n_embd",
           "max_iters")


def setting_of(row):
    row = row | row["config"]
    return [row.get(name) for name in SETTING]


def committed(rows):
    """This repository's RoPE, where one's own runs have its setting; of its numbers, theirs."""
    path = ROOT / "results" / "runs" / "cable_table1.cpu" / "rope-1337.json"
    if not path.exists() or "train_command" in rows[0]:  # of a table
        return []
    result = read_json(path)
    rope = result | result["runs"][0]
    if any(setting_of(row) != setting_of(rope) for row in rows):
        return []
    python = rope["environment"]["python"]  # whose library is the text
    rope["label"] = f"rope (this repository's,\nPython {python})"
    return [{name: value for name, value in rope.items() if name in rows[0]}]


def curves(args):
    """Training and validation loss by step."""
    return figure(series(load(args, "loss"), losses), "training step")


def losses(row):
    for key, title in (("loss", "training loss (nats)"), ("val_loss", "validation loss (nats)")):
        for step, loss in thinned(row[key]):
            yield (title, ""), step, loss


def errors(args):
    """A task's scores by training step, one panel for each split."""
    rows = load(args, "history")
    panels = series(rows, lambda row: rates(row["history"], percent))
    return figure(of_metric(panels, args.metric), "training step", dots=True)


def scores(args):
    """One panel per split: at one length a row of dots per model, at several a line per model."""
    rows = load(args, "scores")
    one = all(len(row["scores"]) == 1 for row in rows)
    read = interval if one else lambda score: percent(score["value"])
    panels = series(rows, lambda row: rates(row["scores"], read))
    panels = of_metric(panels, args.metric)
    if one:
        return intervals(panels)
    return figure(panels, "string length (tokens)", rows, dots=True)


def rates(by_x, read):
    """{x: {split: {metric: score}}} of a run, x a length or a step -> what `series` reads."""
    for x, by_split in dict(by_x).items():
        for split, by_metric in by_split.items():
            for metric, score in by_metric.items():
                yield (split, metric), x, read(score)


def interval(score):
    return [percent(score[key]) for key in ("value", "low", "high")]


def of_metric(panels, asked):
    """The panels of one metric, that asked for or the first, in words."""
    metrics = dict.fromkeys(metric for _, metric in panels)
    if asked and asked not in metrics:
        fail(f"there is no {asked}: {nearest(asked, metrics)}")
    metric = asked or next(iter(metrics))
    return {(spelled(split), f"{spelled(metric)} (%)"): lines
            for (split, name), lines in panels.items() if name == metric}


def intervals(panels):
    """{panel: {label: [{length: interval}, a run each]}} -> a row of dots for each label."""
    rows = len(next(iter(panels.values())))
    fig, axes = subplots(len(panels), 2.7, 0.26 * rows + 1.6, sharex=True, sharey=True)
    for ax, ((title, unit), lines) in zip(axes[0], panels.items()):
        for n, (label, runs) in enumerate(lines.items()):
            for m, run in enumerate(runs):
                (value, low, high), = run.values()
                ax.errorbar(value, n + 0.15 * (m - len(runs) // 2), fmt="o", ms=4, clip_on=False,
                            xerr=[[value - low], [high - value]], color=color_of(label),
                            ecolor="gray")
        ax.set(title=title, xlabel=unit, ylim=(rows - 0.5, -0.5))
        ax.set_yticks(range(rows), lines)
    axes[0, 0].set_xlim(0, None)
    fig.suptitle("a dot is a run, its line the 95 % interval", fontsize="medium")
    return fig


def positions(args):
    """Of a task whose right answer is a distribution: TVD or AUC by position, a panel per split."""
    args.metric = args.metric or "tvd"
    rows = load(args, args.metric)

    def read(row):
        for T, by_split in row[args.metric].items():
            for split, ys in by_split.items():
                panel = f"{spelled(split)}, strings of {int(T):,}", spelled(args.metric)
                points = [(n, y) for n, y in enumerate(ys, 1) if y is not None]
                for x, y in thinned(points):
                    yield panel, x, y
    return figure(series(rows, read), "position (tokens)", rows)


def ndcg(args):
    """nDCG@10 by the length that documents are cut to."""
    rows = load(args, "search")
    first = rows[0]
    bm25 = first["search"]["bm25"]
    chance = {T: {"ndcg@10": dict(value=first["chance"])} for T in bm25}
    for label, found in (("BM25", bm25), ("chance", chance)):
        rows.append(first | dict(label=label, search=dict(whole=found, windows=found)))
    return figure(series(rows, searched), "document length (tokens)", rows)


def searched(row):
    for key, title in (("whole", "documents read as a whole"), ("windows", "their best window")):
        for T, found in row["search"][key].items():
            yield (title, "nDCG@10 (%)"), T, percent(found["ndcg@10"]["value"])


# -----------------------------------------------------------------------------
# command line

def default_paths(figure):
    """The newest run; of curves all runs."""
    logs = sorted(Path("out").glob("*/log.jsonl"))
    if figure == "curves" and logs:
        return [log.parent for log in logs]
    return [find_checkpoint().parent]


def beside(args):
    """Where the picture is: in the run's folder, or beside what was read."""
    first, ending = args.paths[0], f".{args.metric}.png" if args.metric else ".png"
    if (first / "log.jsonl").exists():
        folder = first if len(args.paths) == 1 else first.parent
        return folder / f"{args.figure}{ending}"
    return str(first).removesuffix(".json") + ending


def main(argv=None):
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="figure", required=True, parser_class=Parser)
    for function in (lengths, scores, positions, ndcg, curves, errors):
        p = commands.add_parser(function.__name__, description=function.__doc__)
        p.set_defaults(draw=function, metric=None)
        p.add_argument("paths", nargs="*", type=Path, help="JSONs, folders of them, or folders of "
                       "runs; default: the newest run, of curves all in out/")
        p.add_argument("--rows", nargs="+", help="draw only these, in this order")
        p.add_argument("--out", help="the picture to write, .png, .pdf or .svg")
        if function in (scores, positions, errors):
            p.add_argument("--metric", help="which; default: the task's first")
    args = parser.parse_args(argv)
    args.paths = args.paths or default_paths(args.figure)
    with rc_context(STYLE):
        write_figure(args.draw(args), args.out or beside(args))


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
