"""
Draw what a run left behind, and what a model does.

    python plot.py lengths out/cable-stdlib-nano/eval.json    perplexity by length, loss by position (from eval.py)
    python plot.py scores out/tra-flipflop-nano/eval.json     a synthetic task's scores by split (from eval.py)
    python plot.py positions out/postnorm-dyck-nano/eval.json a task's total variation distance or AUC by position (from eval.py)
    python plot.py trials results/postnorm_fig1.cpu.json      a random search: every trial, and the metric by length (from reproduce.py)
    python plot.py attention results/bench.attention.cpu.json  the attention functions' time by length (from bench.py)
    python plot.py curves out/cable-stdlib-nano out/rope-*    learning curves (from log.jsonl)
    python plot.py errors out/tra-flipflop-* out/cope-*       a task's scores by training step (from log.jsonl, or a results/*.json)
    python plot.py maps out/tra-flipflop-nano --split sparse  attention, steps, distance and position by head, on one sequence
    python plot.py steps out/{alibi,fox,cable,cope,tra}-flipflop-nano    what counts as one step? every model on the same sequence

The first model named is drawn boldest. In lengths, scores and a results/*.json, runs that differ only in the seed become one line
(mean and range) or one row of dots.
"""
import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import runs  # noqa: E402
from data import binned  # noqa: E402
from data.text import encode, get_encoding  # noqa: E402

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
                     "font.size": 10, "axes.titlesize": 11, "legend.frameon": False, "figure.dpi": 150})


def read(path, parse):
    """parse(path), or one line that says why not."""
    try:
        return parse(Path(path))
    except OSError as e:
        runs.fail(f"could not read {path}: {e.strerror}")
    except (ValueError, KeyError, TypeError, IndexError):
        runs.fail(f"{path} is not a file that eval.py, reproduce.py or bench.py wrote for this kind of figure")


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
    """
    eval.py's JSON of a task, one panel per split. At one length a row per model, every seed a dot with its 95 % interval;
    at several lengths a line per model.
    """
    def parse(path):
        data = json.loads(path.read_text())
        metrics = [m for r in data["runs"] for by_split in r["scores"].values() for s in by_split.values() for m in s]
        if "label" not in data["runs"][0]:
            return data["splits"], grouped(data["runs"]), list(dict.fromkeys(metrics))
        groups = {}
        for r in data["runs"]:
            groups.setdefault(r["label"], []).append(r)
        return data["splits"], groups, list(dict.fromkeys(metrics))
    splits, groups, metrics = read(path, parse)
    if metric and metric not in metrics:
        runs.fail(f"{path} has no {metric}: {runs.nearest(metric, metrics)}")
    metric = metric or metrics[0]
    lengths = sorted({int(T) for rows in groups.values() for r in rows for T in r["scores"]})
    flat = all(len(r["scores"]) == 1 for rows in groups.values() for r in rows)
    height = 0.3 * len(groups) + 1.3 if flat else 3.2
    fig, axes = plt.subplots(1, len(splits), figsize=(3.4 * len(splits) + 1, height), sharey=True, squeeze=False)
    for ax, split in zip(axes[0], splits):
        for n, ((label, rows), kw) in enumerate(zip(groups.items(), style(len(groups)))):
            points = [{int(T): by[split][metric] for T, by in r["scores"].items() if metric in by.get(split, {})} for r in rows]
            if flat:
                found = [f for by_length in points for f in by_length.values()]
                for offset, f in zip(np.linspace(-0.15, 0.15, len(found)) if len(found) > 1 else [0], found):
                    ax.plot([100 * f["low"], 100 * f["high"]], [n + offset] * 2, color="black", lw=1, alpha=0.5)
                    ax.plot(100 * f["value"], n + offset, "o", color="black", ms=4, clip_on=False)
            elif xs := sorted(set.intersection(*map(set, points))):
                band(ax, xs, [[100 * p[T]["value"] for T in xs] for p in points], label, marker="o", ms=4, **kw)
        ax.set(title=split)
        if flat:
            ax.set(xlabel=f"{metric.replace('_', ' ')} (%)", xlim=(-2, 102))
        else:
            ax.set_xscale("log", base=2)
            ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
            ax.set(xlabel="block_size (tokens)", ylim=(-2, 102))
    if flat:
        axes[0, 0].set_yticks(range(len(groups)), groups)
        axes[0, 0].invert_yaxis()
    else:
        axes[0, 0].set_ylabel(f"{metric.replace('_', ' ')} (%)")
        axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
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


def errors(paths, out, metric=None):
    """Scores by training step, one panel per split: run folders, or the JSON of a task that reproduce.py wrote."""
    groups = {}
    for path in paths:
        if Path(path).suffix == ".json":
            found = read(path, lambda p: [(r["label"], r["history"]) for r in json.loads(p.read_text())["runs"]])
        else:
            log = read(path, runs.read_log)
            found = [(Path(path).resolve().name, [[r["iter"], r["scores"]] for r in log if "scores" in r])]
        for label, history in found:
            groups.setdefault(label, []).append(history)
    if not all(h for histories in groups.values() for h in histories):
        runs.fail("no scores by step in there: only runs on a synthetic task have them, from the first validation on")
    scored = next(iter(groups.values()))[0][0][1]
    if any(s.keys() != scored.keys() for histories in groups.values() for h in histories for _, s in h):
        runs.fail("these runs are of different tasks: draw them one by one")
    metrics = list(dict.fromkeys(m for by_metric in scored.values() for m in by_metric))
    if metric and metric not in metrics:
        runs.fail(f"no {metric} in there: {runs.nearest(metric, metrics)}")
    metric = metric or metrics[0]
    fig, axes = plt.subplots(1, len(scored), figsize=(3.6 * len(scored) + 1, 3.2), sharey=True, squeeze=False)
    for ax, split in zip(axes[0], scored):
        for (label, histories), kw in zip(groups.items(), style(len(groups))):
            points = [{it: 100 * s[split][metric] for it, s in h if metric in s.get(split, {})} for h in histories]
            steps = sorted(set.intersection(*map(set, points)))
            if steps:
                band(ax, steps, [[p[it] for it in steps] for p in points], label, **kw)
        ax.set(title=split, xlabel="iter")
    axes[0, 0].set_ylabel(f"{metric.replace('_', ' ')} (%)")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    finish(fig, out or (Path(paths[0]).with_suffix(".steps.png") if Path(paths[0]).suffix else Path(paths[0]) / "errors.png"))


METRICS = dict(tvd="total variation distance", auc="ROC AUC", accuracy="accuracy", precision="precision")


def positions(path, out, metric=None):
    """eval.py's JSON of a task whose right answer is a distribution -> TVD or AUC by position, one panel per split."""
    def parse(path):
        rows = json.loads(path.read_text())["runs"]
        return rows, [m for m in ("tvd", "auc") if rows and all(m in r for r in rows)], grouped(rows)
    rows, known, groups = read(path, parse)
    if not known or (metric and metric not in known):
        runs.fail(f"{path} has no {metric or 'tvd or auc'} by position" + f", it has {', '.join(known)}" * bool(known))
    metric = metric or known[0]
    panels = [(T, split) for T, by_split in rows[0][metric].items() for split in by_split]
    fig, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels) + 1, 3.2), sharey=True, squeeze=False)
    for ax, (T, split) in zip(axes[0], panels):
        for (label, rs), kw in zip(groups.items(), style(len(groups))):
            ys = np.array([r[metric][T][split] for r in rs if split in r[metric].get(T, {})], float)
            if len(ys):
                step = 1 if ys.shape[1] <= 32 else 2 * math.ceil(ys.shape[1] / 96)  # even: only every other position may have an AUC
                edges = np.array([*range(0, ys.shape[1], step), ys.shape[1]])
                band(ax, (edges[1:] + edges[:-1] + 1) / 2, binned(ys, edges), label, **kw)
        ax.axvline(rows[0]["block_size"], color="gray", lw=1, ls=":", zorder=0)
        ax.set(title=f"{split}, block_size {int(T):,}", xlabel="position (tokens)")
    axes[0, 0].set_ylabel(METRICS[metric])
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    finish(fig, out or Path(path).with_suffix(f".{metric}.png"))


def trials(path, out):
    """reproduce.py's JSON of a random search: above every trial of every scheme (left raw, right BEMA), below the metric by length."""
    def parse(path):
        data = json.loads(path.read_text())
        data["panels"][0]["lengths"][0][1] + len(data["panels"][0]["schemes"]) + len(METRICS[data["metric"]])  # is it all there?
        return data
    data = read(path, parse)
    metric, panels = data["metric"], data["panels"]
    if "theorem" in data:
        return theorem(data, out or Path(path).with_suffix(".png"))
    width = max(3.3 * len(panels), 5.5) + 1
    fig, axes = plt.subplots(2, len(panels), figsize=(width, 6.4), squeeze=False, sharey="row", layout="constrained")
    for (top, low), panel in zip(axes.T, panels):
        x = np.array(panel["lengths"], float).mean(1)
        for s, ((scheme, found), color) in enumerate(zip(panel["schemes"].items(), plt.cm.tab10.colors)):
            for side, weights in ((-0.2, "raw"), (0.2, "bema")):
                ys = np.array([t[metric][weights]["test"] for t in found["trials"]], float)
                ys, where = ys[~np.isnan(ys)], s + side + np.random.default_rng(0).uniform(-0.12, 0.12, len(ys))
                face = color if weights == "raw" else "none"
                top.scatter(where[:len(ys)], ys, s=12, alpha=0.7, edgecolors=color, facecolors=face, lw=0.8)
                if len(ys):
                    top.plot([s + side - 0.17, s + side + 0.17], [np.median(ys)] * 2, color="black", lw=1.6)
            known = [t[metric]["raw"] for t in found["trials"] if None not in t[metric]["raw"].values()]
            if known:
                curves = np.array([t["by_length"] for t in known], float)
                low.plot(x, np.median(curves, axis=0), color=color, lw=2, label=f"{scheme}, median")
                best = (min if metric == "tvd" else max)(known, key=lambda t: t["validation"])
                low.plot(x, np.array(best["by_length"], float), color=color, lw=1, ls="--", label="best trial")
        a, b = panel["at"]
        top.set_xticks(range(len(panel["schemes"])), panel["schemes"])
        top.set(title=f"{panel['name']}\nat length {a:,}" + f" to {b:,}" * (b > a))
        low.set(xlabel="length")
        if x[-1] > 1000:
            low.set_xscale("log", base=2)
        else:
            low.xaxis.set_major_locator(plt.MaxNLocator(5, integer=True))
        if "block_size" in panel:
            low.axvline(panel["block_size"], color="gray", lw=1, ls=":", zorder=0)
        if metric == "tvd":
            top.set_yscale("log")
            low.set_yscale("log")
    axes[0, 0].set_ylabel(METRICS[metric])
    axes[1, 0].set_ylabel(METRICS[metric])
    axes[1, -1].legend(*axes[1, 0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    axes[0, -1].scatter([], [], color="gray", s=12, label="a trial")
    axes[0, -1].scatter([], [], facecolors="none", edgecolors="gray", s=12, label="its BEMA")
    axes[0, -1].plot([], [], color="black", lw=1.6, label="median")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    finish(fig, out or Path(path).with_suffix(".png"))


def theorem(data, out):
    """Precision by length, relative to length 2: the formula, the hard-coded models, every trained model; and the TVD of the models."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    t, panel, names = data["theorem"], data["panels"][0], dict(none="no norm", output="norm on the attention output")
    for (norm, m), color in zip(t["models"].items(), plt.cm.tab10.colors):
        left.plot(t["lengths"], np.array(m["formula"]) / m["formula"][0], color=color, lw=2.4, label=f"{names[norm]}: formula")
        measured = np.array(m["precision"])[::4] / m["precision"][0]
        left.plot(t["lengths"][::4], measured, "o", color=color, ms=5, mfc="none", label="hard-coded")
        trained = panel["schemes"][norm]["trials"]
        for metric, ax in (("precision", left), ("tvd", right)):
            curves = np.array([x[metric]["raw"]["by_length"] for x in trained], float)[:, 1:]
            curves = curves[np.array([x["finite"] for x in trained])]
            if metric == "precision":
                curves = curves[curves[:, 0] > 0]  # those that tell present from absent at length 2
                curves = curves / curves[:, :1]
            for i, y in enumerate(curves):
                ax.plot(t["lengths"], y, color=color, lw=0.7, alpha=0.6, label="trained, a line each" if not i else None)
        right.plot(t["lengths"], m["tvd"], color=color, lw=2.4, label=f"{names[norm]}: hard-coded")
    left.set_xscale("log", base=2)
    left.set_yscale("symlog", linthresh=0.02)
    left.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    left.set(xlabel="length", ylabel="precision, 1 at length 2", title=f"n = {t['n']}, {panel['name'].partition(', ')[2]}")
    right.set(yscale="log", ylim=(1e-5, 1.5), xlabel="length", ylabel=METRICS["tvd"], title=panel["name"])
    for ax in (left, right):
        ax.legend(fontsize=7)
    finish(fig, out)


def attention(path, out):
    """bench.py's JSON -> time beside scaled_dot_product_attention's in the same run, by length: forward, and forward with backward."""
    def parse(path):
        found = json.loads(path.read_text())
        return {int(T): rows for T, rows in found["attention"].items()}, found["environment"]["gpu"] or found["environment"]["cpu"]
    found, where = read(path, parse)
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    methods = list(dict.fromkeys(name.partition(":")[0] for name in names))
    ways = dict(plain="-", kernel=(0, (1, 0.6)), compiled="--", flex=":", listing="-.")
    kinds = [k for k in ("forward", "both") if any(f"{k}_of_sdpa" in row for rows in found.values() for row in rows.values())]
    fig, axes = plt.subplots(1, len(kinds), figsize=(4.6 * len(kinds) + 2, 4.2), sharey=True, squeeze=False)
    for ax, kind in zip(axes[0], kinds):
        for name in names:
            method, _, way = name.partition(": ")
            points = [(T, rows[name][f"{kind}_of_sdpa"]) for T, rows in sorted(found.items()) if f"{kind}_of_sdpa" in rows.get(name, {})]
            if points:
                color = plt.cm.tab10(methods.index(method) % 10)
                ax.plot(*zip(*points), color=color, ls=ways[way or "plain"], marker="o", ms=4, label=name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.set_xticks(list(found), [f"{T:,}" for T in found])
        ax.set(xlabel="length (tokens)", title=dict(forward="forward", both="forward and backward")[kind])
    axes[0, 0].set_ylabel("time, scaled_dot_product_attention = 1")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    fig.suptitle(where, fontsize=10)
    finish(fig, out or Path(path).with_suffix(".png"))


# -----------------------------------------------------------------------------
# what a model does: its attention function is called once more, with what it was called with

@torch.no_grad()
def look(model, idx):
    """
    idx (1, T) -> one dict per layer of (H, T, T) arrays, by (head, query, key). attention always; and where the method has steps:
    step (how far key j moves query i), distance (from j to i), position (softmax of the distance's bias alone, the largest 1).
    """
    module, seen = sys.modules[type(model).__module__], []
    name = dict(model_baseline="attention", model_postnorm="attention", model_cope="counting_attention").get(
        module.__name__, f"{module.__name__[6:]}_attention")
    original = getattr(module, name)

    def spy(*args):
        seen.append(args)
        return original(*args)
    setattr(module, name, spy)
    try:
        model(idx)
    except ValueError as e:  # an encoding that ends
        runs.fail(e)
    finally:
        setattr(module, name, original)
    layers = []
    for q, k, _, *rest in seen:
        T, later = q.size(2), torch.ones(q.size(2), q.size(2)).triu(1).bool()
        eye = torch.eye(T).expand(*q.shape[:2], T, T)
        if name == "counting_attention" and rest[0] is None:
            rest[0] = k
        found = dict(attention=original(q, k, eye, *rest))  # with v = I the output is the attention itself
        s = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if name == "counting_attention":
            gate_keys, P, position, *_ = rest
            step = (q @ gate_keys.transpose(-1, -2) / math.sqrt(q.size(-1))).sigmoid().masked_fill(later, 0)
            distance = step.flip(-1).cumsum(-1).flip(-1).clamp(max=P - 1)
            bias = position(slice(None), distance)
        elif name == "tra_attention":
            step = ((s > 0) & ~later).float()
            distance = step.flip(-1).cumsum(-1).flip(-1)
            bias = (distance * rest[0][..., None]).masked_fill(step == 0, -1e30)
        elif name in ("cable_attention", "fox_attention"):
            S = rest[0] if name == "cable_attention" else -rest[0]
            distance = S[..., None] - S[:, :, None]
            step = torch.diff(S, prepend=torch.zeros_like(S[..., :1]))[:, :, None].expand_as(distance)
            weight = rest[1][..., None] if name == "cable_attention" and rest[1] is not None else 1
            bias = -weight * (torch.log1p(distance**2) if name == "cable_attention" and rest[2] else distance)
        elif rest and type(getattr(rest[0], "__self__", None)).__name__ == "ALiBi":
            i, j = torch.arange(T)[:, None], torch.arange(T)
            distance, bias = (i - j).float().expand_as(s), rest[0](q, i, j).expand_as(s)
            step = torch.ones_like(distance)
        else:
            layers.append({m: x[0].numpy() for m, x in found.items()})
            continue
        bias = bias.masked_fill(later, -1e30)
        position = torch.where(bias > -1e29, (bias - bias.amax(-1, keepdim=True)).exp(), 0)
        found |= dict(step=step.masked_fill(later, 0), distance=distance.masked_fill(later, 0), position=position)
        layers.append({m: x[0].numpy() for m, x in found.items()})
    return layers


def sequence(path, config, args):
    """-> ids (1, T), their labels: the prompt, or a sequence of the model's task."""
    task = runs.task_class(config["data"])
    if hasattr(task, "score"):
        if args.prompt:
            runs.fail(f"{config['data']} has no text: leave out --prompt, and choose a sequence by --split and --seed")
        task = runs.make_task(config | (dict(block_size=args.length) if args.length else {}))
        split = args.split or task.splits[1]
        if split not in task.splits:
            runs.fail(f"unknown split {split!r}: {runs.nearest(split, task.splits)}")
        x, y = task.batch(split, 1, np.random.default_rng(args.seed))
        x = x[:, :(y[0] != -1).nonzero()[0][-1] + 1]  # to the last token that is scored: no padding
        return torch.from_numpy(x), task.show(x[0])
    if args.split:
        runs.fail(f"--split is for synthetic tasks; {path} was trained on text, give it a --prompt")
    try:
        encoding = get_encoding(config["tokenizer"])
        ids = encode(encoding, [(args.prompt or "def length(x):\n    return len(x)\n").encode()])[0].tolist()[:args.length or None]
    except ValueError as e:
        runs.fail(e)
    return torch.tensor([ids]), ["·" if i == encoding.eot_token else repr(encoding.decode([i]))[1:-1].replace("$", r"\$") for i in ids]


def load(path):
    path = runs.find_checkpoint(path)
    model, config, _ = runs.load_run(path, torch.device("cpu"))
    runs.use_kernel("off", model, torch.device("cpu"), "float32")  # the plain function is what we look at
    return path, model, config


def maps(args):
    """Attention, steps, distance and attention by position alone, one column per head of one layer, one row per kind."""
    path, model, config = load(args.run)
    idx, labels = sequence(path, config, args)
    layers = look(model, idx)
    if not -len(layers) <= args.layer < len(layers):
        runs.fail(f"--layer {args.layer}: the model has layers 0 to {len(layers) - 1}")
    found = layers[args.layer]
    for kind in args.kinds or []:
        if kind not in found:
            runs.fail(f"{config['model']} has no {kind} to show, it has {', '.join(found)}")
    kinds, H, T = args.kinds or list(found), len(found["attention"]), len(labels)
    size = min(5.0, max(2.2, T / 14))
    fig, axes = plt.subplots(len(kinds), H, figsize=(size * H + 1, size * len(kinds)), squeeze=False, layout="constrained")
    for row, kind in zip(axes, kinds):
        top, low = found[kind].max(), min(0, found[kind].min())
        colors = "RdBu" if low < -1e-6 else "magma" if kind in ("attention", "position") else "viridis"  # diff subtracts attention
        top = max(top, -low) if low < -1e-6 else 1 if kind == "attention" else top
        for h, ax in enumerate(row):
            ax.grid(False)
            image = ax.imshow(np.where(np.tri(T) > 0, found[kind][h], np.nan), vmin=-top if low < -1e-6 else 0, vmax=top,
                              cmap=colors, interpolation="nearest")
            ax.set(title=f"{kind}, head {h}")
            if T <= 70:
                ax.set_xticks(range(T), labels, fontsize=min(7, 60 * size / T))
                ax.set_yticks(range(T), labels, fontsize=min(7, 60 * size / T))
        fig.colorbar(image, ax=row[-1], shrink=0.8)
    fig.suptitle(f"{config['model']}, layer {args.layer % len(layers)}: queries down, keys across", fontsize=11)
    finish(fig, args.out or path.parent / "maps.png")


def steps(args):
    """What counts as one step? For the last query of one sequence: every key's step, its distance, and the attention it gets."""
    shown = []
    for run in args.runs:
        path, model, config = load(run)
        idx, labels = sequence(path, config, args)
        found = [(x["attention"][h, -1].max(), x, h) for x in look(model, idx) for h in range(len(x["attention"]))]
        if "step" not in found[0][1]:
            runs.fail(f"{config['model']} has no step to show, it has {', '.join(found[0][1])}")
        _, x, h = max(found, key=lambda f: f[0])  # the head that looks the hardest
        shown.append((config["model"], labels, *(x[kind][h, -1] for kind in ("step", "distance", "attention"))))
    if any(labels != shown[0][1] for _, labels, *_ in shown):
        runs.fail("these runs read different sequences: take runs of one task, and --length where their block_size differs")
    labels, T = shown[0][1], len(shown[0][1])
    fig, axes = plt.subplots(len(shown), 1, figsize=(max(6, 0.19 * T), 1.35 * len(shown)), sharex=True, squeeze=False,
                             layout="constrained")
    for ax, (name, _, step, distance, attention) in zip(axes[:, 0], shown):
        ax.bar(range(T), step, color=plt.cm.Reds(0.12 + 0.88 * attention), edgecolor="gray", lw=0.4, width=0.85)
        ax.set(ylabel=f"{name}\nstep", xlim=(-1, T), ylim=(0, 1.15 * max(step.max(), 1e-9)))
        ax.grid(False)
        far = ax.twinx()
        far.plot(range(T), np.where((name == "tra") & (step == 0), np.nan, distance), color="black", lw=1, marker=".", ms=3)
        far.set(ylabel="distance", ylim=(0, 1.15 * max(distance.max(), 1e-9)))
        far.grid(False)
    axes[-1, 0].set_xticks(range(T), labels, fontsize=7)
    fig.suptitle("What counts as one step? Seen from the last token: bars are every key's step, the line its distance, "
                 "red the attention it gets", fontsize=9)
    finish(fig, args.out or "steps.png")


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
    p = kinds.add_parser("positions", help="a synthetic task's total variation distance or AUC by position")
    p.add_argument("json", help="written by eval.py")
    p.add_argument("--metric", help="tvd or auc; default: what there is")
    p = kinds.add_parser("trials", help="a random search: every trial, and the metric by length")
    p.add_argument("json", help="written by reproduce.py")
    p = kinds.add_parser("attention", help="the attention functions' time by length")
    p.add_argument("json", help="written by bench.py attention")
    p = kinds.add_parser("curves", help="learning curves")
    p.add_argument("folders", nargs="+", help="run folders")
    p = kinds.add_parser("errors", help="a synthetic task's scores by training step")
    p.add_argument("paths", nargs="+", help="run folders, or a results/*.json")
    p.add_argument("--metric", help="which; default: the task's first")
    m = kinds.add_parser("maps", help="attention, steps, distance and position by head")
    m.add_argument("run", nargs="?", help="run folder or checkpoint; default: the newest")
    m.add_argument("--layer", type=int, default=-1, help="default: the last")
    m.add_argument("--kinds", nargs="+", help="which of attention step distance position; default: all the model has")
    p = kinds.add_parser("steps", help="what counts as one step: several models on one sequence")
    p.add_argument("runs", nargs="+", help="run folders or checkpoints, of one task")
    for p in (m, kinds.choices["steps"]):
        p.add_argument("--prompt", help="text models: what to read")
        p.add_argument("--split", help="task models: where the sequence comes from")
        p.add_argument("--length", type=int, default=0, help="tokens; default: as in training, or the whole prompt")
        p.add_argument("--seed", type=int, default=0, help="task models: which sequence")
    for p in kinds.choices.values():
        p.add_argument("--out", help="the picture to write, .png, .pdf or .svg")
    args = runs.parse(parser)
    if args.kind in ("maps", "steps") and (args.seed < 0 or args.length < 0):
        runs.fail("--seed and --length must be 0 or more")
    if args.kind == "lengths":
        lengths(args.json, args.out, args.models)
    elif args.kind == "scores":
        scores(args.json, args.out, args.metric)
    elif args.kind == "positions":
        positions(args.json, args.out, args.metric)
    elif args.kind == "attention":
        attention(args.json, args.out)
    elif args.kind == "trials":
        trials(args.json, args.out)
    elif args.kind == "curves":
        curves(args.folders, args.out)
    elif args.kind == "errors":
        errors(args.paths, args.out, args.metric)
    else:
        (maps if args.kind == "maps" else steps)(args)


if __name__ == "__main__":
    runs.run(main)
