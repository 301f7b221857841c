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
    python -m figures.maps counts out/tra-flipflop-nano
        the mean step of every sort of token, as the queries see it whose answer is scored
"""
import functools
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch
from matplotlib import rc_context

from common.attention import attention_inputs, attention_module, plain_function
from common.checkpoint import check_text, folder_for, load_run
from common.exits import fail, in_one_line, nearest
from common.files import write_figure
from common.flags import Parser, add_set
from common.names import is_encoder, make_task, trained_on
from data.text import encode, labels_of
from figures import plot
from figures.sorts import sorts_of

STYLE = plot.STYLE | {"axes.grid": False}
PARTS = ("attention", "step", "distance", "position", "qk", "bias")


# -----------------------------------------------------------------------------
# what a model reads, and what it does

def load_runs(args):
    runs = [load_run(path, changes=args.set) for path in args.runs or [None]]
    for run in runs:
        if is_encoder(run.model):
            fail(f"{run.path} is an encoder: maps are of causal models")
    return runs


def task_of(run, length):
    """The task of a run; its sequences have `length` tokens, 0: as many as in training."""
    check_text(run.config, run.checkpoint["source"])
    changes = dict(block_size=length) if length else {}
    return make_task(run.config | changes, run.checkpoint["kept"])


def draw(task, split, seed):
    """One sequence of a task -> x, y (1, T)."""
    if split not in task.splits:
        fail(f"unknown split {split!r}: {nearest(split, task.splits)}")
    try:
        return task.tensors(split, 1, np.random.default_rng(seed))
    except ValueError as e:
        fail(f"{split} has no sequence of {task.block_size} tokens: {e}")


def sequence(run, prompt, split, length, seed):
    """
    The prompt, or a sequence of the run's own task: ids (1, T), their labels, y (1, T), what to
    predict at each (-1: nothing), holder (1, T), which token says what that is (-1: none), and
    show, which makes labels of ids (T,).
    """
    if not prompt:
        task = task_of(run, length)
        ids, y = draw(task, split or task.splits[1], seed)
        end = 1 + max(np.flatnonzero(y[0] != -1), default=ids.size(1))  # without the padding
        ids, y, show = ids[:, :end], y[:, :end], task.show
        holder = task.holder(ids) if task.holder else torch.full_like(ids, -1)
    else:
        task = trained_on(run.config)
        if split or not task.encoding:
            fail(f"{run.path}: --prompt is for models of text, and without --split")
        encoding = task.encoding(run.config)
        show = functools.partial(labels_of, encoding)
        ids = torch.tensor(encode(encoding, os.fsencode(prompt)).tolist()[:length or None])[None]
        holder = torch.full_like(ids, -1)
        y = torch.cat((ids[:, 1:], holder[:, :1]), 1)
    return SimpleNamespace(ids=ids, labels=show(ids[0].numpy()), y=y, holder=holder, show=show)


def same_sequence(runs, *which):
    """A sequence for each run, whose labels are the same."""
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
        try:
            model(idx)
        except ValueError as e:  # of a model whose positions end
            fail(e)
    for args in calls:
        y, parts = module.literal(*args)
        layers.append(with_position(parts))
        if (y - plain(*args)).abs().max() > 1e-3:
            print(f"{module.__name__}.py: literal, which is drawn, is not what "
                  f"{plain.__name__} computes")
    return layers


def with_position(parts):
    """The parts as arrays, with the position: exp(bias), the largest of a row 1, dropped keys 0."""
    parts = {name: x[0].float().numpy() for name, x in parts.items()}
    bias = parts["bias"]
    bias = np.where(np.tri(bias.shape[-1], dtype=bool), bias, -np.inf)
    top = bias.max(-1, keepdims=True)
    position = np.exp(bias - np.where(np.isinf(top), 0, top))
    return parts | dict(bias=bias, position=position)


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

def attention(runs, args):
    """Every part that `literal` names (down), in every head of a layer (across)."""
    run, = runs
    text = sequence(run, args.prompt, args.split, args.length, args.seed)
    layers, labels = look(run.model, text.ids), text.labels
    layer = asked_for("layer", args.layer, len(layers))[-1]
    parts = layers[layer]
    heads = asked_for("head", args.head, len(parts["attention"]))
    for name in args.kinds or []:
        if name not in parts:
            fail(f"{run.name} has no {name} to show, it has {', '.join(parts)}")
    names = args.kinds or [name for name in PARTS[:4] if name in parts]
    size = min(6.0, max(2.4, len(labels) / 9))
    fig, axes = plot.subplots(len(heads), size, size, len(names))
    for row, name in zip(axes, names):
        for head, ax in zip(heads, row):
            image = draw_map(ax, parts[name], head)
            ax.set_title(f"{name}, head {head}")
            for axis in (ax.xaxis, ax.yaxis):
                token_ticks(axis, labels, min(7, 60 * size / len(labels)))
        fig.colorbar(image, ax=row[-1], shrink=0.8)
    fig.suptitle(f"{run.config['model']}, layer {layer}: queries down, keys across")
    return fig


def draw_map(ax, values, head):
    """A head of values (H, T, T), in the colours of all heads. Dropped keys are grey."""
    values = np.where(np.tri(values.shape[-1], dtype=bool), values, np.nan)
    ax.imshow(np.where(np.isinf(values[head]), 1, np.nan), cmap="Greys", vmin=0, vmax=3)
    values = np.ma.masked_invalid(values)
    top = abs(values).max()
    if values.min() < -1e-6:  # red and blue: 0 is white
        return ax.imshow(values[head], vmin=-top, vmax=top, cmap="RdBu")
    return ax.imshow(values[head], vmin=0, vmax=top or 1, cmap="magma")


def token_ticks(axis, labels, size):
    if len(labels) > 160:  # more do not fit
        labels = []
    long = axis.axis_name == "x" and max(map(len, labels), default=0) > 2
    axis.set_ticks(range(len(labels)), labels, fontsize=size, rotation=90 if long else 0)
    axis.set_tick_params(length=0)


def steps(runs, args):
    """For the last query of one sequence: every key's step, its distance, the attention it gets."""
    texts = same_sequence(runs, args.prompt, args.split, args.length, args.seed)
    labels = texts[0].labels
    width = min(30, max(8.5, 0.19 * len(labels)))
    fig, axes = plot.subplots(1, width, 0.8, 2 * len(runs), height_ratios=[5, 1] * len(runs))
    for run, text, lane, strip in zip(runs, texts, axes[::2, 0], axes[1::2, 0]):
        layer, head, parts = sharpest(look(run.model, text.ids), args.layer, args.head)
        lane.set_title(f"layer {layer}, head {head}", loc="right", fontsize=7)
        lane.set_ylabel(f"{run.config['model']}\nstep")
        if "step" in parts:
            draw_steps(lane, parts)
        strip.imshow(abs(parts["attention"])[None], cmap="Reds", vmin=0, vmax=1, aspect="auto")
        lane.set(xlim=strip.get_xlim(), xticks=[])
        strip.set_yticks([])
        token_ticks(strip.xaxis, labels, min(11, 34 * width / len(labels)))
        strip.set_xlabel(attention_module(run.model).STEP, loc="left", fontsize=8)
    fig.suptitle("What counts as one step? Seen from the last token: a bar is a key's step,\n"
                 "the line its distance, red the attention that it gets")
    return fig


def draw_steps(ax, parts):
    """Bars for the steps; a line for the distances, with a gap where a key is dropped."""
    T, far = range(len(parts["step"])), ax.twinx()
    ax.bar(T, parts["step"], color="#9ecae1", edgecolor="#6baed6", lw=0.4, width=0.85)
    distance = np.where(np.isinf(parts["bias"]), np.nan, parts["distance"])
    far.plot(T, distance, color="black", lw=1, marker=".", ms=4)
    far.set(ylabel="distance", ylim=(0, 1.15 * parts["distance"].max() or 1))
    far.spines["right"].set_visible(True)


def reach(runs, args):
    """A panel per layer: how much of each head's attention is on the last n tokens."""
    run, = runs
    task, panels = task_of(run, args.length), {}
    x, _ = draw(task, args.split or task.splits[-1], [args.seed, 0])
    for layer, parts in enumerate(look(run.model, x)):
        shares = within(abs(parts["attention"]))
        lines = {f"head{n}": [dict(enumerate(share, 1))] for n, share in enumerate(shares)}
        panels[f"{run.config['model']}, layer {layer}", "share of the attention"] = lines
    trained = run.config["block_size"]
    rows = [dict(label=label, block_size=trained) for label in lines]
    return plot.figure(panels, "last n tokens", rows)


def within(attention):
    """
    attention (H, T, T) -> (H, n): the share on the last 1, 2, ... n tokens, mean over the queries
    of the second half, for the n = T / 2 tokens that all of them have.
    """
    n = attention.shape[-1] // 2
    near = [np.diagonal(attention, -back, 1, 2)[:, -n:].mean(-1) for back in range(n)]
    total = attention[:, -n:].sum(-1).mean(-1)
    return (np.cumsum(near, 0) / np.maximum(total, 1e-9)).T


def counts(runs, args):
    """A panel per layer: the mean step of every sort of token (down), by head (across)."""
    run, = runs
    sorts, means = steps_by_sort(run, args.split, args.length, args.seed)
    H = means.shape[1]
    columns = min(2, len(means))
    fig, axes = plot.subplots(columns, 0.5 * H + 0.7, 0.24 * len(sorts) + 0.7,
                              math.ceil(len(means) / columns), sharex=True, sharey=True)
    for layer, (ax, mean) in enumerate(zip(axes.flat, means)):  # mean (H, sorts)
        ax.imshow(mean.T, vmin=0, vmax=means.max(), aspect="auto")
        ax.set(title=f"layer {layer}", xlabel="head", xticks=range(H))
        for (head, n), value in np.ndenumerate(mean):
            color = "black" if value > 0.6 * means.max() else "white"
            ax.text(head, n, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    for ax in axes.flat[len(means):]:
        ax.remove()
    axes[0, 0].set_yticks(range(len(sorts)), sorts)
    fig.suptitle(f"{run.name}: mean step of a token of each sort")
    return fig


def steps_by_sort(run, split, length, seed, sequences=200):
    """-> the sorts of tokens, and their mean steps (layers, H, sorts), seen from scored queries."""
    task, sorts, steps, times = task_of(run, length), [], [], []
    for n in range(sequences):
        x, y = draw(task, split or task.splits[-1], [seed, n])
        layers = look(run.model, x)
        if "step" not in layers[0]:
            fail(f"{run.name} counts nothing: its file says of no step")
        seen = np.tri(x.size(1)) * (y[0] != -1).numpy()[:, None]  # (T, T)
        steps.append([(parts["step"] * seen).sum(1) for parts in layers])  # (layers, H, T)
        times.append(seen.sum(0))
        labels = task.show(x[0].numpy())
        sorts += sorts_of(labels) if task.encoding else labels
    sorts, steps, times = np.array(sorts), np.concatenate(steps, -1), np.concatenate(times)
    names, means = sorted(set(sorts[times > 0])), []
    for name in names:
        means.append(steps[..., sorts == name].sum(-1) / times[sorts == name].sum())
    return names, np.stack(means, -1)


# -----------------------------------------------------------------------------
# command line

def main(argv=None):
    parser = Parser(description=__doc__)
    figures = parser.add_subparsers(dest="figure", required=True, parser_class=Parser)
    for figure in (attention, steps, reach, counts):
        p = figures.add_parser(figure.__name__, description=figure.__doc__)
        p.set_defaults(draw=figure)
        add_set(p)
        p.add_argument("runs", nargs="*", help="a run's folder or checkpoint, for steps several; "
                                               "default: the newest")
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
    args = parser.parse_args(argv)
    if min(args.seed, args.length) < 0 or args.length == 1:
        fail("--seed must be 0 or more, --length 2 or more")
    if len(args.runs) > 1 and args.draw is not steps:
        fail(f"{args.figure} draws one run")
    runs = load_runs(args)
    with rc_context(STYLE):
        write_figure(args.draw(runs, args), args.out or folder_for(runs) / f"{args.figure}.png")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
