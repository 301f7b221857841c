"""
Model -> figure: what a trained model attends to, and what counts as a step for it.

    python maps.py attention out/tra-flipflop-nano --split sparse    every head of a layer
    python maps.py attention out/cope-stdlib-nano --prompt "def f(x):"
    python maps.py steps out/{alibi,fox,cable,cope,tra}-flipflop-nano    what counts as one step?
    python maps.py reach out/cable-stdlib-nano --length 2048    how far does each head look?
    python maps.py counts out/{cope,tra}-flipflop-nano    what does each head count?
    python maps.py play out/{fox,tra}-flipflop-nano --length 64 256    a page to play with

    attention  for every query (down) and key (across) what the model file's `literal` says: the
               attention; the step that the key counts as; its distance, the steps from the key to
               the query; and the position, exp(bias) scaled to 1 in each row: the attention if all
               contents were alike. --kinds also has qk and bias, the two parts of the logits
    steps      the same for the last query alone, in the head that looks the hardest, one model
               below the other
    reach      the share of the attention that lies on the last n tokens, for every n, mean over the
               second half of a test sequence
    counts     the mean step of every kind of token, as the queries see it whose answer is scored
    play       the numbers of steps, but for every query, in one HTML file that needs no network:
               play.html, filled
"""
import argparse
import base64
import itertools
import json
import os
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402

import runs  # noqa: E402
from data.text import encode, get_encoding, labels_of  # noqa: E402

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10,
                     "axes.titlesize": 11, "legend.frameon": False, "figure.dpi": 150})

REDS = LinearSegmentedColormap.from_list("reds", ["white", "#ef3b2c", "#67000d"])
KINDS = ("attention", "step", "distance", "position", "qk", "bias")
MARKS = {"blank line": "¶", "block begins": ":"}  # in a map of a long text
MOST_KINDS = 12  # of tokens in a figure
# in a page: the units in 1, what stands for a number that is not finite, and what is too large
UNITS = dict(qk=100, bias=100, step=100, distance=100, attention=1000, logit=100)
NOT_FINITE = -2**31
PAGE_LIMIT = 2_000_000  # bytes


# -----------------------------------------------------------------------------
# what a model does

@torch.no_grad()
def look(model, idx):
    """
    idx (1, T) -> a dict per layer of (H, T, T) arrays by head, query and key: what the model file's
    `literal` says about the arguments of the layer's own attention. Without a literal it holds the
    attention alone.
    """
    module = runs.attention_module(model)
    literal = getattr(module, "literal", None)
    try:
        with runs.spy(model) as calls:
            model(idx)
    except ValueError as e:  # an encoding that ends
        runs.fail(e)
    plain = runs.plain_function(module)
    if literal is None:
        print(f"{module.__name__}.py has no literal form: its attention is all that can be shown")
        return [as_arrays(dict(attention=with_identity(plain, *args))) for args in calls]
    found = [literal(*args) for args in calls]
    if any((y - plain(*args)).abs().max() > 1e-3 for (y, _), args in zip(found, calls)):
        print(f"{module.__name__}.py: literal is not what {plain.__name__} computes; "
              "literal is drawn")
    return [as_arrays(with_position(parts)) for _, parts in found]


def with_identity(plain, q, k, v, *options):
    """With the identity as values, the output of an attention is the attention itself."""
    T = q.size(2)
    return plain(q, k, torch.eye(T, dtype=v.dtype).expand(*q.shape[:2], T, T), *options)


def with_position(parts):
    """The parts, and the position: exp(bias), the largest of a row 1, dropped keys 0."""
    later = torch.ones_like(parts["bias"], dtype=torch.bool).triu(1)
    bias = parts["bias"].masked_fill(later, float("-inf"))
    top = bias.amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)
    return parts | dict(bias=bias, position=(bias - top).exp())


def as_arrays(parts):
    return {kind: x[0].float().numpy() for kind, x in parts.items()}


def sequence(path, config, args):
    """-> ids (1, T), their labels: the prompt, or a sequence of the model's task."""
    kind = runs.kind_of(config)
    if kind == "text":
        return prompt(path, config, args)
    if kind != "symbols":
        runs.fail(f"{config['data']} is made of {kind}: there are no tokens to show")
    if args.prompt:
        runs.fail(f"{config['data']} has no text: leave out --prompt, "
                  "and choose a sequence by --split and --seed")
    longer = dict(block_size=args.length) if args.length else {}
    task = runs.make_task(config | longer)
    split = args.split or task.splits[1]
    runs.check_split(split, task)
    x, y = task.batch(split, 1, np.random.default_rng(args.seed))
    scored = np.flatnonzero(y[0] != -1)
    end = scored[-1] + 1 if len(scored) else None  # without the padding
    return torch.from_numpy(x[:, :end]), task.show(x[0, :end])


def prompt(path, config, args):
    if args.split:
        runs.fail(f"--split is for synthetic tasks; {path} was trained on text, give it a --prompt")
    text = args.prompt or "def length(x):\n    return len(x)\n"
    try:
        encoding = get_encoding(config["tokenizer"])
        ids = encode(encoding, [os.fsencode(text)])[0].tolist()[:args.length or None]
    except ValueError as e:  # the tokenizer cannot be had, or cannot take these bytes
        runs.fail(e)
    return torch.tensor([ids]), labels_of(encoding, ids)


def load(path, draws=False):
    """-> where it is, the model, its config; draws: its own text or task will be drawn from."""
    path = runs.find_checkpoint(path)
    model, config, checkpoint = runs.load_run(path, torch.device("cpu"))
    if runs.is_encoder(model):
        runs.fail(f"{path} is an encoder, which sees later tokens, too: maps are of causal models")
    if draws:
        runs.check_text(path, checkpoint)
    torch.manual_seed(0)  # some models draw their positions
    return path, model, config


# -----------------------------------------------------------------------------
# the figures

def attention(args):
    """One column per head of one layer, one row per kind."""
    path, model, config = load(args.run)
    idx, labels = sequence(path, config, args)
    layers = look(model, idx)
    if not -len(layers) <= args.layer < len(layers):
        runs.fail(f"--layer {args.layer}: the model has layers 0 to {len(layers) - 1}")
    found = layers[args.layer]
    for kind in args.kinds or []:
        if kind not in found:
            has = ", ".join(kind for kind in KINDS if kind in found)
            runs.fail(f"{config['model']} has no {kind} to show, it has {has}")
    kinds = args.kinds or [kind for kind in KINDS[:4] if kind in found]
    if not args.kinds and "bias" in found and np.nanmax(np.tril(abs(found["bias"]))) == 0:
        kinds.remove("position")  # all positions alike
    ends = sorts_of(labels)
    H, size = len(found["attention"]), min(5.0, max(2.4, len(labels) / 14))
    fig, axes = plt.subplots(len(kinds), H, figsize=(size * H + 1, size * len(kinds) + 0.4),
                             squeeze=False, layout="constrained")
    for row, kind in zip(axes, kinds):
        for head, ax in enumerate(row):
            image = heads_map(ax, kind, found[kind], head)
            ax.set_title(f"{kind}, head {head}")
            if len(labels) <= 70:
                token_ticks(ax.xaxis, labels, min(7, 60 * size / len(labels)))
                token_ticks(ax.yaxis, labels, min(7, 60 * size / len(labels)))
            else:
                line_ticks(ax, labels, ends, head == 0)
        fig.colorbar(image, ax=row[-1], shrink=0.8)
    title = f"{config['model']}, layer {args.layer % len(layers)}: queries down, keys across"
    if len(labels) > 70 and set(MARKS) & set(ends[:-1]):
        title += "\na tick: a line begins, after a blank one (¶), as a block (:)"
    fig.suptitle(title, fontsize=11)
    runs.write_figure(fig, args.out or path.parent / "attention.png")


def heads_map(ax, kind, values, head):
    """One head of values (H, T, T); all have the same colours. Dropped keys are grey."""
    seen = np.tri(values.shape[-1], dtype=bool)
    known = values[:, seen]
    known = known[np.isfinite(known)]
    low, high = known.min(initial=0), known.max(initial=0)
    if low < -1e-6:  # Red and blue: 0 is white
        high = max(high, -low)
        low, colors = -high, "RdBu"
    else:
        low, colors = 0, "magma" if kind in ("attention", "position") else "viridis"
        high = 1 if kind in ("attention", "position") else high
    ax.imshow(np.where(seen & np.isinf(values[head]), 1, np.nan), cmap="Greys", vmin=0, vmax=3)
    shown = np.where(seen & np.isfinite(values[head]), values[head], np.nan)
    return ax.imshow(shown, vmin=low, vmax=high, cmap=colors, interpolation="nearest")


def token_ticks(axis, labels, size):
    labels = [label.replace("$", r"\$") for label in labels]  # $ begins a formula
    long = axis.axis_name == "x" and max(map(len, labels)) > 2
    axis.set_ticks(range(len(labels)), labels, fontsize=size, rotation=90 if long else 0)
    axis.set_tick_params(length=0, pad=2)


def line_ticks(ax, labels, ends, words):
    """
    In a text too long for a tick a token: where lines begin, across with a mark after what ended
    there (ends, MARKS), down, with words, with what they say.
    """
    starts = [0] + [n + 1 for n, label in enumerate(labels[:-1]) if label.endswith("\\n")]
    if len(starts) == 1:
        return
    said, free = [], 0  # the first token whose line has room for words
    for start, end in zip(starts, starts[1:] + [len(labels)]):
        line = "".join(labels[start:end]).removesuffix("\\n").removesuffix("\\r")
        room = words and line and start >= free
        said.append(line[:24].replace("$", r"\$") if room else "")
        free = start + len(labels) / 55 if room else free
    marks = ["", *(MARKS.get(ends[start - 1], "") for start in starts[1:])]
    ax.set_xticks(starts, marks, fontsize=6)
    ax.set_yticks(starts, said, fontsize=6)


def steps(args):
    """For the last query of one sequence: every key's step, its distance, the attention it gets."""
    lanes, labels = [], None
    for run in args.runs:
        path, model, config = load(run)
        idx, own = sequence(path, config, args)
        labels = same_tokens(labels, own)
        layer, head, parts = sharpest(look(model, idx))
        said = getattr(runs.attention_module(model), "STEP", "")
        lanes.append((config["model"], f"layer {layer}, head {head}", said, parts))
    T, width = len(labels), min(30, max(8.5, 0.19 * len(labels)))
    fig, axes = plt.subplots(2 * len(lanes), 1, figsize=(width, 1.8 * len(lanes) + 0.6),
                             height_ratios=[6, 1] * len(lanes), layout="constrained")
    fig.get_layout_engine().set(h_pad=0.02, hspace=0)
    for (name, where, said, parts), lane, strip in zip(lanes, axes[::2], axes[1::2]):
        lane.set(xlim=(-0.7, T - 0.3), xticks=[], ylabel=f"{name}\nstep")
        lane.set_title(where, loc="right", fontsize=7, color="gray", pad=2)
        if "step" in parts:
            draw_steps(lane, parts)
        else:
            lane.set_yticks([])
            lane.text(0.5, 0.5, "no steps to show", transform=lane.transAxes, ha="center",
                      color="gray")
        strip.imshow(abs(parts["attention"])[None], cmap=REDS, vmin=0, vmax=1, aspect="auto",
                     interpolation="nearest")
        strip.set(xlim=(-0.7, T - 0.3), yticks=[])
        strip.spines[:].set(visible=True, color="0.7")
        if T <= 160:  # more do not fit
            token_ticks(strip.xaxis, labels, 7)
        else:
            strip.set_xticks([])
        strip.set_xlabel(said, loc="left", fontsize=8, color="0.3")
    fig.suptitle("What counts as one step? Seen from the last token", fontsize=11)
    steps_legend(fig)
    runs.write_figure(fig, args.out or figure_of(path, lanes, "steps.png"))


def same_tokens(known, own):
    """What the runs so far have read, if any, is what this one reads."""
    if known and known != own:
        runs.fail("these runs read different sequences: take runs of one task, and --length "
                  "where their block_size differs")
    return own


def sharpest(layers):
    """-> the layer and the head that look the hardest at one key, from the last query; its rows."""
    found = []
    for layer, parts in enumerate(layers):
        for head, rows in enumerate(parts["attention"]):
            found.append((rows[-1].max(), layer, head))
    _, layer, head = max(found)
    return layer, head, {kind: x[head, -1] for kind, x in layers[layer].items()}


def draw_steps(ax, parts):
    """Bars for the steps; a line for the distances, with a gap where a key is dropped."""
    T, far = range(len(parts["step"])), ax.twinx()
    ax.bar(T, parts["step"], color="#9ecae1", edgecolor="#6baed6", lw=0.4, width=0.85)
    ax.set_ylim(0, 1.15 * max(parts["step"].max(), 1e-9))
    distance = np.where(np.isinf(parts["bias"]), np.nan, parts["distance"])
    far.plot(T, distance, color="black", lw=1, marker=".", ms=4)
    far.set_ylim(0, 1.15 * max(parts["distance"].max(), 1e-9))
    far.set_ylabel("distance")
    far.spines["right"].set_visible(True)


def steps_legend(fig):
    handles = [plt.Rectangle((0, 0), 1, 1, fc="#9ecae1", ec="#6baed6"),
               plt.Line2D([], [], color="black", lw=1, marker=".", ms=4),
               plt.Rectangle((0, 0), 1, 1, fc=REDS(1.0))]
    names = ["the key's step (left)", "its distance (right), the steps from it to the last token",
             "the attention it gets: 0 white, 1 dark red"]
    fig.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)


def reach(args):
    """A row per run, a panel per layer: how much of each head's attention is on so many tokens."""
    found = []
    for run in args.runs or [None]:
        path, model, config = load(run, draws=True)
        x, _, _ = next(drawn(config, args, 1))  # x, y, task
        found.append((config, x, look(model, torch.from_numpy(x))))
    columns = max(len(layers) for _, _, layers in found)
    size = 2.6 * columns + 1, 2.6 * len(found) + 0.4
    fig, axes = plt.subplots(len(found), columns, figsize=size, sharex="row", sharey=True,
                             squeeze=False, layout="constrained")
    for row, (config, x, layers) in zip(axes, found):
        trained = config["block_size"]
        print(f"{config['model']}: {x.shape[1]:,} tokens, trained on {trained:,}")
        for layer, (ax, parts) in enumerate(zip(row, layers)):
            shares = within(abs(parts["attention"]))
            for head, share in enumerate(shares):
                ax.plot(range(1, len(share) + 1), share, lw=1.5, label=f"head {head}")
            ax.set(xscale="log", title=f"{config['model']}, layer {layer}", ylim=(0, 1.03))
            ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.grid(alpha=0.3)
            if shares.shape[1] >= trained:  # from sequences of twice that length on
                ax.axvline(trained, color="gray", ls=":", lw=1, label="training length")
                rest = " ".join(f"{max(0, 100 - 100 * s[trained - 1]):5.1f}" for s in shares)
                print(f"  layer {layer}, % of each head's attention farther back: {rest}")
        for ax in row[len(layers):]:
            ax.axis("off")
        row[0].set_ylabel("share of the attention")
        row[len(layers) - 1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for ax in axes[-1]:
        ax.set_xlabel("last n tokens")
    runs.write_figure(fig, args.out or figure_of(path, found, "reach.png"))


def figure_of(path, found, name):
    """Where a figure goes: into the run's folder, that of several runs into out/."""
    folder = path.parent if len(found) == 1 else runs.ROOT / "out"
    folder.mkdir(exist_ok=True)
    return folder / name


def drawn(config, args, times):
    """So many sequences of a run's own task or text -> x, y (1, T), the task."""
    task = runs.make_task(config | dict(block_size=args.length or config["block_size"]))
    split = args.split or task.splits[-1]
    runs.check_split(split, task)
    for n in range(times):
        x, y = task.batch(split, 1, np.random.default_rng([args.seed, n]))
        if x.ndim != 2 or x.shape[1] < 2:
            runs.fail(f"{args.kind} needs a sequence of two tokens or more, {config['data']} gave "
                      f"{' x '.join(map(str, x.shape[1:]))}")
        yield x, y, task


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


def counts(args):
    """A row per run, a panel per layer: the mean step of every kind of token, head by head."""
    found = []
    for run in args.runs:
        path, model, config = load(run, draws=True)
        kinds, means = steps_by_kind(model, config, args)
        found.append((f"{config['model']}, seed {config['seed']}", kinds, means))
    rows = max(len(kinds) for _, kinds, _ in found)
    columns, H = np.max([means.shape[:2] for _, _, means in found], axis=0)
    size = columns * (0.5 * H + 0.7) + 1, len(found) * (0.24 * rows + 0.7)
    fig, axes = plt.subplots(len(found), columns, figsize=size, squeeze=False, sharey="row",
                             layout="constrained")
    for row, (name, kinds, means) in zip(axes, found):
        for layer, (ax, mean) in enumerate(zip(row, means)):   # mean (H, kinds)
            ax.imshow(mean.T, cmap="viridis", vmin=0, vmax=means.max(), aspect="auto")
            ax.set_title(f"layer {layer}", fontsize=9)
            ax.set_xticks(range(len(mean)), [f"head {n}" for n in range(len(mean))], fontsize=7)
            for (head, kind), value in np.ndenumerate(mean):
                color = "black" if value > 0.6 * means.max() else "white"
                ax.text(head, kind, f"{value:.2f}", ha="center", va="center", fontsize=7,
                        color=color)
        for ax in row[len(means):]:
            ax.axis("off")
        row[0].set_yticks(range(len(kinds)), kinds, fontsize=8)
        row[0].set_ylabel(name)
    fig.suptitle("mean step of a token of each kind", fontsize=9)
    runs.write_figure(fig, args.out or figure_of(path, found, "counts.png"))


def steps_by_kind(model, config, args):
    """-> the commonest kinds of tokens, and their mean steps (layers, H, kinds)."""
    total, times = defaultdict(float), Counter()
    for x, y, task in drawn(config, args, args.sequences):
        try:
            labels = task.show(x[0])
        except ValueError as e:  # a tokenizer that cannot be had
            runs.fail(e)
        layers = look(model, torch.from_numpy(x))
        if "step" not in layers[0]:
            runs.fail(f"{config['model']} counts nothing: its file says of no step")
        seen = np.tri(x.shape[1], dtype=bool) & (y[0] != -1)[:, None]               # (T, T)
        steps = [np.where(seen, parts["step"], 0).sum(1) for parts in layers]
        if runs.kind_of(config) == "text":
            labels = sorts_of(labels)
        if args.pairs:  # the first token has none before it
            labels = [None, *map(" ".join, zip(labels, labels[1:]))]
        for kind, step, queries in zip(labels, np.moveaxis(steps, -1, 0), seen.sum(0)):
            total[kind] += step                                                     # (layers, H)
            times[kind] += queries
    times.pop(None, None)
    kinds = sorted(kind for kind, queries in times.most_common(MOST_KINDS) if queries)
    if len(times) > len(kinds):
        print(f"{len(times) - len(kinds)} rarer kinds are not shown")
    if not kinds:
        runs.fail(f"nothing is scored in {args.split or task.splits[-1]}: no query to look from")
    return kinds, np.stack([total[kind] / times[kind] for kind in kinds], -1)


def sorts_of(labels):
    """What sort of token each of a text is, by its label. Of line ends there are three."""
    sorts, line = [], "."  # what the line has so far; the first may have begun before
    for label in labels:
        label = label.replace("\\\\", "/").replace("\\x0c", " ")  # \\n is no line end
        before, end, after = label.rpartition("\\n")
        if not end:
            line += label
            sorts.append(sort_of(label))
            continue
        words = (line + before).rpartition("\\n")[2].removesuffix("\\r")
        words = words.replace("\\t", " ").strip()
        if not words:
            sorts.append("blank line")
        else:
            sorts.append("block begins" if words[-1] in ":{" else "line end")
        line = after
    return sorts


def sort_of(label):
    """Of a token without a line end; the end of a text is a sign."""
    word = label.strip()
    if word in ("", "\\t"):
        return "space"
    if word.isidentifier():
        return "letters"
    return "digits" if word.isdigit() else "signs"


# -----------------------------------------------------------------------------
# the page to play with

def play(args):
    """One HTML page: what several models make of the same strings, for every query and key."""
    lanes, strings, numbers = [], None, defaultdict(list)
    for run in args.runs:
        path, model, config = load(run)
        asked = list(asked_for(path, config, args))
        strings = same_tokens(strings, [dict(name=name, tokens=own) for name, _, own in asked])
        found = [look(model, idx) for _, idx, _ in asked]
        heads, first = heads_to_show(found[0], args.heads)
        for n, layers in enumerate(found):
            for layer, head in heads:
                whole = in_units(layers[layer], head)
                numbers[n] += whole.values()
        module = runs.attention_module(model)
        lanes.append(dict(
            name=config["model"], run=path.parent.name, trained=config["block_size"], heads=heads,
            first=first, kinds=list(whole), literal=hasattr(module, "literal"),
            step=getattr(module, "STEP", ""), equation=getattr(module, "EQUATION", "")))
    for n, string in enumerate(strings):
        string["numbers"] = packed(np.concatenate(numbers[n]))
    page = filled(dict(strings=strings, units=UNITS, lanes=lanes))
    if len(page) > PAGE_LIMIT:
        there = {"--heads all": args.heads == "all", "a string": len(strings) > 1,
                 "a run": len(lanes) > 1}
        spare = [what for what, is_there in there.items() if is_there]
        runs.fail(f"the page would have {len(page) / 1e6:.1f} MB, the limit is "
                  f"{PAGE_LIMIT / 1e6:g}: leave out {' or '.join(spare) or 'tokens, by --length'}")
    out = Path(args.out or runs.ROOT / "out" / "play.html")
    if out.suffix != ".html":
        runs.fail(f"cannot write {out}: use .html")
    out.parent.mkdir(exist_ok=True)
    runs.write_safely(out, lambda tmp: tmp.write_bytes(page), len(page))
    print(f"wrote {out}, {len(page) / 1e6:.2f} MB: open it in a browser")


def asked_for(path, config, args):
    """-> name, ids (1, T) and labels of every string: a prompt each, or every split and length."""
    for prompt, split, length in itertools.product(
            args.prompt or [None], args.split or [None], args.length):
        one = argparse.Namespace(prompt=prompt, split=split, length=length, seed=args.seed)
        idx, labels = sequence(path, config, one)
        name = f"{len(labels)} tokens"
        if prompt or split:
            name = f"{(split or prompt.lstrip()).partition(chr(10))[0][:24]} ({name})"
        yield name, idx, labels


def heads_to_show(layers, which):
    """-> (layer, head) pairs, and the place of the first to be shown: the last layer's sharpest."""
    pairs = []
    for layer, parts in enumerate(layers):
        best = sharpest([parts])[1]
        heads = range(len(parts["attention"])) if which == "all" else [best]
        pairs += [(layer, head) for head in heads]
    return pairs, pairs.index((layer, best))


def in_units(parts, head):
    """
    {kind: whole hundredths, of attention thousandths} of one head, for every query and the keys up
    to it. Each kind is rounded alone, so qk + bias may miss the rounded logit: carry is what is
    left.
    """
    seen = np.tril_indices(parts["attention"].shape[-1])
    exact = {kind: parts[kind][head][seen].astype(np.float64) for kind in UNITS if kind in parts}
    if "bias" in exact:
        exact["carry"] = exact["qk"] + exact["bias"]
    for kind, x in exact.items():
        x = np.rint(x * UNITS.get(kind, 100))
        exact[kind] = np.where(abs(x) < 2**31, x, NOT_FINITE)
    if "carry" in exact:
        logit = exact["carry"]
        exact["carry"] = np.where(logit == NOT_FINITE, 0, logit - exact["qk"] - exact["bias"])
    return exact


def packed(numbers):
    """int32, all the lowest bytes, then the next ones; deflated; as text."""
    planes = numbers.astype("<i4").view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()


def filled(content):
    """play.html with its content, bytes."""
    page = Path(__file__).with_name("play.html").read_text(encoding="utf-8")
    before, mark, rest = page.partition('<script type="application/json" id="data">')
    text = json.dumps(content).replace("<", r"\u003c")  # which could end the script
    return (before + mark + text + rest[rest.index("</script>"):]).encode()


# -----------------------------------------------------------------------------
# command line

def main(argv=None):
    parser = runs.make_parser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=runs.make_parser)
    p = kinds.add_parser("attention", help="attention, steps, distance and position by head")
    p.set_defaults(figure=attention)
    p.add_argument("run", nargs="?", help="run folder or checkpoint; default: the newest")
    p.add_argument("--layer", type=int, default=-1, help="default: the last")
    p.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND",
                   help=f"which of {' '.join(KINDS)}; default: the first four, as far as the model "
                        "has them")
    p = kinds.add_parser("steps", help="what counts as one step: several models on one sequence")
    p.set_defaults(figure=steps)
    p.add_argument("runs", nargs="+", help="run folders or checkpoints, of one task")
    p = kinds.add_parser("reach", help="how far each head looks")
    p.set_defaults(figure=reach)
    p.add_argument("runs", nargs="*", help="run folders or checkpoints; default: the newest")
    p = kinds.add_parser("counts", help="what each head counts: the mean step of kinds of tokens")
    p.set_defaults(figure=counts)
    p.add_argument("runs", nargs="+", help="run folders or checkpoints")
    p.add_argument("--sequences", type=int, default=200, help="how many (default: 200)")
    p.add_argument("--pairs", action="store_true",
                   help="a kind is a token and the one before it: `w 0` apart from `i 0`")
    p = kinds.add_parser("play", help="an HTML page: drag a query along strings, several models")
    p.set_defaults(figure=play)
    p.add_argument("runs", nargs="+", help="run folders or checkpoints, of one task or of text")
    p.add_argument("--heads", choices=("sharpest", "all"), default="sharpest",
                   help="all, or of every layer the one whose last query attends most to one key "
                        "(default: sharpest)")
    for name, p in kinds.choices.items():
        several = dict(nargs="+") if name == "play" else {}  # every split in every length
        if name not in ("reach", "counts"):
            p.add_argument("--prompt", **several, help="text models: what to read")
        at = "last" if name in ("reach", "counts") else "first test"
        what = "" if at == "last" else "task models: "
        p.add_argument("--split", **several,
                       help=f"{what}where sequences come from; default: the {at} split")
        p.add_argument("--length", type=int, default=[0] if several else 0, **several,
                       help="tokens of a task's sequence, or of the prompt at most; default: as in "
                            "training, or the whole prompt")
        p.add_argument("--seed", type=int, default=0, help="which sequence to draw (default: 0)")
        p.add_argument("--out", help="the page to write, .html" if several else
                       "the picture to write, .png, .pdf or .svg")
    args = runs.parse(parser, argv)
    if args.seed < 0 or np.min(args.length) < 0:
        runs.fail("--seed and --length must be 0 or more")
    if getattr(args, "sequences", 1) < 1:
        runs.fail("--sequences must be at least 1")
    args.figure(args)


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    main()
