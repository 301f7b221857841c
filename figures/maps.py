"""
Model -> figure: what a trained model attends to, and what counts as a step for it.

    python -m figures.maps attention out/tra-flipflop-nano --split sparse
    python -m figures.maps attention out/cope-stdlib-nano --prompt "def f(x):" --layer 0 --head 2
        every head of a layer, or one: of every query (down) and key (across) what the model file's
        `literal` says: the attention, the step that the key counts as, its distance, and the
        position, exp(bias) scaled to 1 in each row: the attention if all contents were alike
    python -m figures.maps steps out/{alibi,fox,cable,cope,tra}-flipflop-nano
    python -m figures.maps steps out/tra-flipflop-nano --layer 1 --head 0
        the same of the last query, one model a lane: in the head that looks the hardest at one key,
        or in the layer or head that is asked for
    python -m figures.maps reach out/cable-stdlib-nano --length 2048
        the share of the attention on the last n tokens, for every n
    python -m figures.maps counts out/{cope,tra}-flipflop-nano
        the mean step of every sort of token, as the queries see it whose answer is scored
"""
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from common import ROOT
from common.attention import attention_inputs, attention_module, plain_function
from common.checkpoint import check_text, load_run
from common.exits import fail, in_one_line
from common.files import write_figure
from common.flags import Parser, add_set
from common.names import is_encoder, make_task, trained_on
from data import check_split
from data.text import encode, labels_of
from figures import plot
from figures.sorts import sorts_of

STYLE = plot.STYLE | {"axes.grid": False}
PARTS = ("attention", "step", "distance", "position", "qk", "bias")
MOST_SORTS = 12  # of tokens in a figure


# -----------------------------------------------------------------------------
# what a model reads, and what it does

def load_runs(args):
    runs = [load_run(path, changes=args.set) for path in args.runs or [None]]
    for run in runs:
        if is_encoder(run.model):
            fail(f"{run.path} is an encoder: maps are of causal models")
    return runs


def beside(runs, name):
    """A file in a run's folder, or in out/ where it is of several runs."""
    folder = runs[0].path.parent if len(runs) == 1 else ROOT / "out"
    folder.mkdir(exist_ok=True)
    return folder / name


def task_of(run, length):
    """The task of a run; its sequences have `length` tokens, 0: as many as in training."""
    check_text(run.config, run.checkpoint["source"])
    changes = dict(block_size=length) if length else {}
    return make_task(run.config | changes, run.checkpoint["kept"])


def draw(task, split, seed):
    """One sequence of a task -> x, y (1, T)."""
    check_split(split, task.splits)
    return task.tensors(split, 1, np.random.default_rng(seed))


class Sequence(NamedTuple):
    ids: torch.Tensor     # (1, T)
    y: torch.Tensor       # (1, T), what to predict at each, -1: nothing
    holder: torch.Tensor  # (1, T), which token says what that is, -1: none
    show: Callable        # ids (T,) -> labels

    @property
    def labels(self):
        return self.show(self.ids[0].numpy())


def sequence(run, prompt, split, length, seed):
    """The prompt, or a sequence of the run's own task."""
    if not prompt:
        task = task_of(run, length)
        x, y = draw(task, split or task.splits[1], seed)
        scored = np.flatnonzero(y[0] != -1)
        end = scored[-1] + 1 if len(scored) else None  # without the padding
        holder = task.holder(x) if task.holder else torch.full_like(x, -1)
        return Sequence(x[:, :end], y[:, :end], holder[:, :end], task.show)
    task = trained_on(run.config)
    if split or not task.encoding:
        fail(f"{run.path}: --prompt is for models of text, and without --split")
    encoding = task.encoding(run.config)
    ids = torch.tensor(encode(encoding, os.fsencode(prompt)).tolist()[:length or None])[None]
    nothing = torch.full_like(ids, -1)
    y = torch.cat((ids[:, 1:], nothing[:, :1]), 1)
    return Sequence(ids, y, nothing, lambda ids: labels_of(encoding, ids))


def same_sequence(runs, *which):
    """-> a Sequence for each run, whose labels are the same."""
    sequences = [sequence(run, *which) for run in runs]
    if any(other.labels != sequences[0].labels for other in sequences):
        fail("these runs read different sequences: take runs of one task, and one --length")
    return sequences


@torch.no_grad()
def look(model, idx):
    """
    idx (1, T) -> a dict per layer of (H, T, T) arrays by head, query and key: what the model file's
    `literal` says about the arguments of the layer's own attention.
    """
    module, layers = attention_module(model), []
    plain = plain_function(module)
    torch.manual_seed(0)  # some models draw their positions
    with attention_inputs(model) as calls:
        model(idx)
    for args in calls:
        y, parts = module.literal(*args)
        layers.append(with_position(parts))
        if (y - plain(*args)).abs().max() > 1e-3:
            print(f"{module.__name__}.py: literal, which is drawn, is not what "
                  f"{plain.__name__} computes")
    return layers


def with_position(parts):
    """The parts as arrays, with the position: exp(bias), the largest of a row 1, dropped keys 0."""
    later = torch.ones_like(parts["bias"], dtype=torch.bool).triu(1)
    bias = parts["bias"].masked_fill(later, float("-inf"))
    top = bias.amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)
    parts = parts | dict(bias=bias, position=(bias - top).exp())
    return {name: x[0].float().numpy() for name, x in parts.items()}


def asked_for(name, n, size):
    """The numbers of all layers or heads, or the one that is asked for, below 0 from the end."""
    if n is None:
        return range(size)
    if not -size <= n < size:
        fail(f"--{name} {n}: the model has {name}s 0 to {size - 1}")
    return [n % size]


def sharpest(layers, layer=None, head=None):
    """
    -> of these, or of all, the layer and the head that look the hardest at one key, from the last
    query; its rows.
    """
    peaks = []
    for n in asked_for("layer", layer, len(layers)):
        for m in asked_for("head", head, len(layers[n]["attention"])):
            peaks.append((layers[n]["attention"][m, -1].max(), n, m))
    _, layer, head = max(peaks)
    return layer, head, {name: x[head, -1] for name, x in layers[layer].items()}


# -----------------------------------------------------------------------------
# the figures

def panels(rows, columns, width, height, **how):
    """-> (figure, axes (rows, columns))"""
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **how)


def attention(runs, args):
    """One column per head of a layer (or one), one row per part of what `literal` says."""
    run = runs[0]
    if len(runs) > 1:
        fail("attention draws one run, in which every head has a map")
    text = sequence(run, args.prompt, args.split, args.length, args.seed)
    layers, labels = look(run.model, text.ids), text.labels
    layer, = asked_for("layer", -1 if args.layer is None else args.layer, len(layers))
    parts = layers[layer]
    heads = asked_for("head", args.head, len(parts["attention"]))
    for name in args.kinds or []:
        if name not in parts:
            fail(f"{run.config['model']} has no {name} to show, it has "
                 f"{', '.join(part for part in PARTS if part in parts)}")
    names = args.kinds or [name for name in PARTS[:4] if name in parts]
    if not args.kinds and np.nanmax(np.tril(abs(parts["bias"]))) == 0:
        names.remove("position")  # all positions alike
    H, size = len(heads), min(5.0, max(2.4, len(labels) / 14))
    fig, axes = panels(len(names), H, size * H + 1, size * len(names) + 0.4)
    for row, name in zip(axes, names):
        for head, ax in zip(heads, row):
            image = heads_map(ax, name, parts[name], head)
            ax.set_title(f"{name}, head {head}")
            for axis in (ax.xaxis, ax.yaxis):
                token_ticks(axis, labels, min(7, 60 * size / len(labels)))
        fig.colorbar(image, ax=row[-1], shrink=0.8)
    fig.suptitle(f"{run.config['model']}, layer {layer}: queries down, keys "
                 "across", fontsize=11)
    return fig


def heads_map(ax, name, values, head):
    """A head of values (H, T, T), in the colours of all. Dropped keys are grey."""
    seen = np.tri(values.shape[-1], dtype=bool)
    finite = seen & np.isfinite(values)
    low, high = values.min(where=finite, initial=0), values.max(where=finite, initial=0)
    colors = "viridis"
    if low < -1e-6:  # red and blue: 0 is white
        high = max(high, -low)
        low, colors = -high, "RdBu"
    elif name in ("attention", "position"):
        high, colors = 1, "magma"
    ax.imshow(np.where(seen & np.isinf(values[head]), 1, np.nan), cmap="Greys", vmin=0, vmax=3)
    shown = np.where(finite[head], values[head], np.nan)
    return ax.imshow(shown, vmin=low, vmax=high, cmap=colors, interpolation="nearest")


def token_ticks(axis, labels, size):
    if len(labels) > 160:  # more do not fit
        labels = []
    long = axis.axis_name == "x" and max(map(len, labels), default=0) > 2
    axis.set_ticks(range(len(labels)), labels, fontsize=size, rotation=90 if long else 0)
    axis.set_tick_params(length=0, pad=2)


def steps(runs, args):
    """For the last query of one sequence: every key's step, its distance, the attention it gets."""
    texts = same_sequence(runs, args.prompt, args.split, args.length, args.seed)
    labels = texts[0].labels
    T, width = len(labels), min(30, max(8.5, 0.19 * len(labels)))
    fig, axes = panels(2 * len(runs), 1, width, 1.8 * len(runs) + 0.6,
                       height_ratios=[6, 1] * len(runs))
    fig.get_layout_engine().set(h_pad=0.02, hspace=0)
    for run, text, lane, strip in zip(runs, texts, axes[::2, 0], axes[1::2, 0]):
        layer, head, parts = sharpest(look(run.model, text.ids), args.layer, args.head)
        lane.set(xlim=(-0.7, T - 0.3), xticks=[], ylabel=f"{run.config['model']}\nstep")
        lane.set_title(f"layer {layer}, head {head}", loc="right", fontsize=7, color="gray", pad=2)
        if "step" in parts:
            draw_steps(lane, parts)
        else:
            lane.set_yticks([])
            lane.text(0.5, 0.5, "no steps to show", transform=lane.transAxes, ha="center",
                      color="gray")
        strip.imshow(abs(parts["attention"])[None], cmap="Reds", vmin=0, vmax=1, aspect="auto",
                     interpolation="nearest")
        strip.set(xlim=(-0.7, T - 0.3), yticks=[])
        strip.spines[:].set(visible=True, color="0.7")
        token_ticks(strip.xaxis, labels, 7)
        strip.set_xlabel(attention_module(run.model).STEP, loc="left", fontsize=8, color="0.3")
    fig.suptitle("What counts as one step? Seen from the last token: a bar is a key's step,\n"
                 "the line its distance, red the attention that it gets", fontsize=11)
    return fig


def draw_steps(ax, parts):
    """Bars for the steps; a line for the distances, with a gap where a key is dropped."""
    T, far = range(len(parts["step"])), ax.twinx()
    ax.bar(T, parts["step"], color="#9ecae1", edgecolor="#6baed6", lw=0.4, width=0.85)
    low, high = min(0, parts["step"].min()), max(parts["step"].max(), 1e-9)
    ax.set_ylim(1.15 * low, 1.15 * high)  # of a fork a step may be below 0
    distance = np.where(np.isinf(parts["bias"]), np.nan, parts["distance"])
    far.plot(T, distance, color="black", lw=1, marker=".", ms=4)
    far.set_ylim(0, 1.15 * max(parts["distance"].max(), 1e-9))
    far.set_ylabel("distance")
    far.spines["right"].set_visible(True)


def reach(runs, args):
    """A row per run, a panel per layer: how much of each head's attention is on so many tokens."""
    rows = []
    for run in runs:
        task = task_of(run, args.length)
        x, _ = draw(task, args.split or task.splits[-1], [args.seed, 0])
        if x.size(1) < 2:
            fail("reach needs a sequence of two tokens or more")
        rows.append(look(run.model, x))
    columns = max(map(len, rows))
    fig, axes = panels(len(rows), columns, 2.6 * columns + 1, 2.6 * len(rows) + 0.4,
                       sharex="row", sharey=True)
    for row, run, layers in zip(axes, runs, rows):
        trained = run.config["block_size"]
        for layer, (ax, parts) in enumerate(zip(row, layers)):
            shares = within(abs(parts["attention"]))
            for head, share in enumerate(shares):
                ax.plot(range(1, len(share) + 1), share, lw=1.5, label=f"head {head}")
            ax.set(xscale="log", title=f"{run.config['model']}, layer {layer}", ylim=(0, 1.03))
            ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.grid(alpha=0.3)
            if shares.shape[1] >= trained:  # from sequences of twice that length on
                ax.axvline(trained, color="gray", ls=":", lw=1, label="training length")
                rest = " ".join(f"{max(0, 100 - 100 * s[trained - 1]):5.1f}" for s in shares)
                print(f"{run.name}, layer {layer}, % of each head's attention farther back than "
                      f"{trained:,} tokens: {rest}")
        for ax in row[len(layers):]:
            ax.axis("off")
        row[0].set_ylabel("share of the attention")
        row[len(layers) - 1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for ax in axes[-1]:
        ax.set_xlabel("last n tokens")
    return fig


def within(attention):
    """
    attention (H, T, T) -> (H, n): the share on the last 1, 2, ... n tokens, mean over the queries
    of the second half, for the n = T / 2 tokens that all of them have.
    """
    T = attention.shape[-1]
    n = T // 2
    near = np.stack([attention[:, i, i - n + 1:i + 1][:, ::-1] for i in range(T - n, T)])
    total = attention[:, T - n:].sum(-1).mean(-1, keepdims=True)
    return near.mean(0).cumsum(-1) / np.maximum(total, 1e-9)


def counts(runs, args):
    """A row per run, a panel per layer: the mean step of every sort of token, head by head."""
    rows = [steps_by_sort(run, args) for run in runs]
    longest = max(len(sorts) for sorts, _ in rows)
    columns, H = np.max([means.shape[:2] for _, means in rows], axis=0)
    width, height = columns * (0.5 * H + 0.7) + 1, len(rows) * (0.24 * longest + 0.7)
    fig, axes = panels(len(rows), columns, width, height, sharey="row")
    for row, run, (sorts, means) in zip(axes, runs, rows):
        for layer, (ax, mean) in enumerate(zip(row, means)):  # mean (H, sorts)
            ax.imshow(mean.T, cmap="viridis", vmin=0, vmax=means.max(), aspect="auto")
            ax.set_title(f"layer {layer}", fontsize=9)
            ax.set_xticks(range(len(mean)), [f"head {n}" for n in range(len(mean))], fontsize=7)
            for (head, n), value in np.ndenumerate(mean):
                color = "black" if value > 0.6 * means.max() else "white"
                ax.text(head, n, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
        for ax in row[len(means):]:
            ax.axis("off")
        row[0].set_yticks(range(len(sorts)), sorts, fontsize=8)
        row[0].set_ylabel(f"{run.config['model']}, seed {run.config['seed']}")
    fig.suptitle("mean step of a token of each sort", fontsize=9)
    return fig


def steps_by_sort(run, args):
    """-> the commonest sorts of tokens, and their mean steps (layers, H, sorts)."""
    task, total, times = task_of(run, args.length), defaultdict(float), Counter()
    split = args.split or task.splits[-1]
    for n in range(args.sequences):
        x, y = draw(task, split, [args.seed, n])
        layers = look(run.model, x)
        if "step" not in layers[0]:
            fail(f"{run.config['model']} counts nothing: its file says of no step")
        seen = np.tri(x.size(1), dtype=bool) & (y[0] != -1).numpy()[:, None]  # (T, T)
        steps = [np.where(seen, parts["step"], 0).sum(1) for parts in layers]
        labels = task.show(x[0].numpy())
        sorts = sorts_of(labels) if task.encoding else labels
        for sort, step, queries in zip(sorts, np.moveaxis(steps, -1, 0), seen.sum(0)):
            total[sort] += step  # (layers, H)
            times[sort] += queries
    sorts = sorted(sort for sort, queries in times.most_common(MOST_SORTS) if queries)
    if not sorts:
        fail(f"nothing is scored in {split}: no query to look from")
    return sorts, np.stack([total[sort] / times[sort] for sort in sorts], -1)


# -----------------------------------------------------------------------------
# command line

def main(argv=None):
    parser = Parser(description=__doc__)
    figures = parser.add_subparsers(dest="figure", required=True, parser_class=Parser)
    for figure in (attention, steps, reach, counts):
        p = figures.add_parser(figure.__name__, description=figure.__doc__)
        p.set_defaults(draw=figure)
        add_set(p)
        p.add_argument("runs", nargs="*", help="run folders or checkpoints; default: the newest")
        p.add_argument("--split", help="default: the first test split; in reach, counts the last")
        p.add_argument("--length", type=int, default=0, help="tokens of a sequence, or of a prompt "
                       "at most; default: as in training, or all")
        p.add_argument("--seed", type=int, default=0, help="which sequence to draw (default: 0)")
        p.add_argument("--out", help="the picture to write, .png, .pdf or .svg")
        if figure in (attention, steps):
            p.add_argument("--prompt", help="models of text: what to read")
            p.add_argument("--layer", type=int, help="default: the last; of steps the sharpest")
            p.add_argument("--head", type=int, help="default: all; of steps the sharpest")
        if figure is attention:
            p.add_argument("--kinds", nargs="+", choices=PARTS, help="default: the first four")
        if figure is counts:
            p.add_argument("--sequences", type=int, default=200, help="how many (default: 200)")
    args = parser.parse_args(argv)
    if min(args.seed, args.length, vars(args).get("sequences", 1) - 1) < 0:
        fail("--seed and --length must be 0 or more, --sequences at least 1")
    runs = load_runs(args)
    with rc_context(STYLE):
        write_figure(args.draw(runs, args), args.out or beside(runs, f"{args.figure}.png"))


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
