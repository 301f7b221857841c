"""
Draw what a run left behind.

    python plot.py lengths out/cable-stdlib-nano/eval.json    perplexity by length, loss by position (from eval.py)
    python plot.py curves out/cable-stdlib-nano out/rope-*    learning curves (from log.jsonl)

The first model named is drawn boldest. Runs of one model that differ only in the seed become one line, mean and range.
"""
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

import runs  # noqa: E402

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
                     "font.size": 10, "axes.titlesize": 11, "legend.frameon": False, "figure.dpi": 150})


def read(path, parse):
    """parse(path), or one line that says why not."""
    try:
        return parse(Path(path))
    except OSError as e:
        runs.fail(f"could not read {path}: {e.strerror}")
    except (ValueError, KeyError, TypeError, IndexError):
        runs.fail(f"{path} is not a file that eval.py wrote")


def style(n):
    """n line styles that can be told apart, the first bold and black."""
    colors = [plt.cm.tab10(i) for i in range(10)]
    return [dict(color="black", lw=2.6, zorder=5)] + [
        dict(color=colors[i % 10], lw=1.4, ls=("-", "--", ":")[i // 10 % 3]) for i in range(n - 1)]


def grouped(rows):
    """{label: rows}. Seeds of one model go together, under its name; runs that differ in more go under their folder's."""
    groups, labels = {}, []
    for r in rows:
        kind = {k: v for k, v in r["config"].items() if k not in ("seed", "out_dir")} | dict(iter=r["iter"], checkpoint=r["checkpoint"])
        groups.setdefault(json.dumps(kind, sort_keys=True), []).append(r)
    for rs in groups.values():
        names = (rs[0]["model"], rs[0]["name"], f"{rs[0]['name']}/{rs[0]['checkpoint']}")
        labels.append(next((n for n in names if n not in labels), f"{names[2]} ({len(labels)})"))
    return dict(zip(labels, groups.values()))


def band(ax, x, ys, label, **kw):
    ys = np.asarray(ys)
    ax.plot(x, ys.mean(0), label=label, **kw)
    if len(ys) > 1:
        ax.fill_between(x, ys.min(0), ys.max(0), color=kw["color"], alpha=0.15, lw=0)


def lengths(path, out, models=None):
    """eval.py's JSON -> perplexity by length (left) and loss by position in the longest window (right)."""
    def parse(path):
        data = json.loads(path.read_text())
        data["tokens"] + max(data["lengths"]) + min(r["by_position"][0][2] + r["block_size"] for r in data["runs"])  # is it all there?
        return data, grouped(data["runs"])
    data, groups = read(path, parse)
    for m in models or []:
        if m not in groups:
            runs.fail(f"{path} has no {m}: {runs.nearest(m, groups)}")
    groups = {m: groups[m] for m in models or groups}
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=(1, 1.1))
    for (label, rows), kw in zip(groups.items(), style(len(groups))):
        xs = [int(T) for T in rows[0]["perplexity"]]
        marker = dict(marker="o", ms=4 if len(xs) > 1 else 7)
        band(left, xs, [list(r["perplexity"].values()) for r in rows], label, **marker, **kw)
        bins = rows[0]["by_position"]
        band(right, [(a + b) / 2 + 1 for a, b, _ in bins], [[y for *_, y in r["by_position"]] for r in rows], label, **kw)
    block_sizes = {r["block_size"] for r in data["runs"]}
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        for T in block_sizes:
            ax.axvline(T, color="gray", lw=1, ls=":", zorder=0)
    left.annotate("training length", (max(block_sizes), 1), xycoords=("data", "axes fraction"), xytext=(3, -3),
                  textcoords="offset points", color="gray", fontsize=8, va="top", rotation=90)
    low, high = left.get_ylim()
    if high > 2 * low > 0:
        left.set_yscale("log")
        low, high = left.get_ylim()
        steps = (1, 2, 5) if high > 20 * low else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
        ticks = [m * 10**k for k in range(-1, 9) for m in steps if low <= m * 10**k <= high]
        left.set_yticks(ticks, [f"{y:,g}" for y in ticks])
        left.yaxis.set_minor_locator(plt.NullLocator())
    left.set_xticks(data["lengths"], [f"{T:,}" for T in data["lengths"]])
    left.xaxis.set_minor_locator(plt.NullLocator())
    left.set(xlabel="window length (tokens)", ylabel="perplexity", title=f"{data['tokens']:,} tokens, the same at every length")
    right.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    right.set(xlabel="position in the window", ylabel="loss (nats)", title=f"inside a window of {max(data['lengths']):,} tokens")
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    finish(fig, out or Path(path).with_suffix(".png"))


def scores(path, out, metric=None):
    """eval.py's JSON of a task -> one panel per split, one row per model: every seed a dot, its 95 % interval a line."""
    def parse(path):
        data = json.loads(path.read_text())
        groups = {}
        for r in data["runs"]:
            for T, by_split in r["scores"].items():
                label = r.get("label", r["name"]) + (f", {int(T):,}" if len(r["scores"]) > 1 else "")
                groups.setdefault(label, []).append(by_split)
        return data["splits"], groups, next(m for by_split in data["runs"][0]["scores"].values() for s in by_split.values() for m in s)
    splits, groups, headline = read(path, parse)
    metric = metric or headline
    fig, axes = plt.subplots(1, len(splits), figsize=(3.4 * len(splits) + 1, 0.3 * len(groups) + 1.3), sharey=True, squeeze=False)
    for ax, split in zip(axes[0], splits):
        for n, rows in enumerate(groups.values()):
            found = [r[split][metric] for r in rows if metric in r.get(split, {})]
            for offset, f in zip(np.linspace(-0.15, 0.15, len(found)) if len(found) > 1 else [0], found):
                ax.plot([100 * f["low"], 100 * f["high"]], [n + offset] * 2, color="black", lw=1, alpha=0.5)
                ax.plot(100 * f["value"], n + offset, "o", color="black", ms=4, clip_on=False)
        ax.set(title=split, xlabel=f"{metric.replace('_', ' ')} (%)", xlim=(-2, 102))
    axes[0, 0].set_yticks(range(len(groups)), groups)
    axes[0, 0].invert_yaxis()
    finish(fig, out or Path(path).with_suffix(".png"))


def curves(folders, out):
    """log.jsonl of every run -> training and validation loss by step."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for folder, kw in zip(folders, style(len(folders))):
        log = read(folder, runs.read_log)
        for ax, key in ((left, "loss"), (right, "val_loss")):
            points = [(r["iter"], r[key]) for r in log if key in r]
            if points:
                ax.plot(*zip(*points), label=Path(folder).resolve().name, marker="o" if len(points) < 20 else "", ms=4, **kw)
    left.set(xlabel="iter", ylabel="loss (nats)", title="training")
    right.set(xlabel="iter", title="validation")
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    finish(fig, out or Path(folders[0]) / "curves.png")


def finish(fig, out):
    out = Path(out) if Path(out).suffix else Path(f"{out}.png")
    try:
        fig.savefig(out, bbox_inches="tight")
    except ValueError:
        runs.fail(f"cannot draw {out}: use .png, .pdf or .svg")
    print(f"drew {out}")


def main():
    parser = runs.make_parser(__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    p = kinds.add_parser("lengths", help="perplexity by length and loss by position")
    p.add_argument("json", help="written by eval.py or reproduce.py")
    p.add_argument("--models", nargs="+", help="draw only these, in this order; default: all")
    p = kinds.add_parser("scores", help="a synthetic task's scores by split")
    p.add_argument("json", help="written by eval.py or reproduce.py")
    p.add_argument("--metric", help="which; default: the task's first")
    p = kinds.add_parser("curves", help="learning curves")
    p.add_argument("folders", nargs="+", help="run folders")
    for p in kinds.choices.values():
        p.add_argument("--out", help="the picture to write, .png, .pdf or .svg")
    args = runs.parse(parser)
    if args.kind == "lengths":
        lengths(args.json, args.out, args.models)
    elif args.kind == "scores":
        scores(args.json, args.out, args.metric)
    else:
        curves(args.folders, args.out)


if __name__ == "__main__":
    runs.run(main)
