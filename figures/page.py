"""
Models -> a page to play with: drag a query along strings, and see what each model counts.

    python -m figures.page out/{fox,tra}-flipflop-nano --length 64 256

One HTML file that needs no network: for every string, head, query and key the numbers that
figures/maps.py draws, and what each model predicts. The n-th --prompt, --split and --length are of
the n-th string; the last of a list stands for all that follow. --guide FILE.md: words and scenes
(results/play.md).
"""
import base64
import json
import math
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import torch

from common.attention import attention_module
from common.checkpoint import folder_for
from common.exits import fail, in_one_line
from common.files import write_text
from common.flags import Parser, add_set
from figures.maps import load_runs, look, same_sequence, sharpest

DIGITS = dict(qk=2, bias=2, step=2, distance=2, attention=3)  # behind the point


def content_of(runs, args):
    """All that a page shows: a lane for each model, strings, and their numbers in every lane."""
    lanes, strings = [lane_of(run) for run in runs], []
    lists = args.prompt, args.split, args.length
    for n in range(max(map(len, lists))):
        prompt, split, length = (values[min(n, len(values) - 1)] for values in lists)
        texts = same_sequence(runs, prompt, split, length, args.seed)
        holder, numbers = texts[0].holder[0].numpy(), []
        for lane, run, text in zip(lanes, runs, texts):
            layers = look(run.model, text.ids)
            if "heads" not in lane:
                lane.update(heads_of(layers, holder))
            numbers.append([numbers_of(layers[layer], head) for layer, head in lane["heads"]])
        name = f"{len(holder)} tokens"
        if prompt or split:
            name = f"{(split or prompt.lstrip()).partition(chr(10))[0][:16]} ({len(holder)})"
        strings.append(dict(
            name=name, tokens=texts[0].labels, answers=spoken(texts[0]), holder=holder.tolist(),
            predictions=[predicted(run.model, text) for run, text in zip(runs, texts)],
            numbers=packed(numbers)))
    return dict(strings=strings, lanes=lanes)


def lane_of(run):
    """What a page says of a model. EQUATION is a line, or {variant: line}: a fork has the first."""
    name, module = run.config["model"], attention_module(run.model)
    equation = module.EQUATION
    if isinstance(equation, dict):
        equation = equation.get(name, next(iter(equation.values())))
    return dict(name=name, run=run.name, trained=run.config["block_size"], step=module.STEP,
                equation=equation)


def heads_of(layers, holder):
    """
    -> every (layer, head); how much of its attention the queries give to the token that holds their
    answer, in %; and the place of the head that gives most. Without holders, of the last layer's
    sharpest.
    """
    heads = [*np.ndindex(len(layers), len(layers[0]["attention"]))]
    queries, reads = np.flatnonzero(holder >= 0), []
    if not len(queries):
        return dict(heads=heads, reads=reads, first=heads.index(sharpest(layers, -1)[:2]))
    for layer, head in heads:
        found = layers[layer]["attention"][head, queries, holder[queries]]
        reads.append(round(100 * float(found.mean())))
    return dict(heads=heads, reads=reads, first=reads.index(max(reads)))


@torch.no_grad()
def predicted(model, text):
    """The likeliest token at each place, as labels, and how likely it is, in %."""
    logits, _ = model(text.ids)
    sure, best = logits[0].float().softmax(-1).max(-1)
    return dict(said=text.show(best.numpy()), sure=(100 * sure).round().int().tolist())


def spoken(text):
    """The labels of what a text asks for, empty where that is nothing."""
    labels = text.show(text.y[0].clamp(0).numpy())
    return [label if token >= 0 else "" for label, token in zip(labels, text.y[0])]


# -----------------------------------------------------------------------------
# numbers

def numbers_of(parts, head):
    """
    {part: a row for every query, with the keys up to it} of a head; and the rate, for every query,
    by which its bias is the distance.
    """
    numbers = {}
    for name, digits in DIGITS.items():
        if name in parts:
            rows = enumerate(parts[name][head])
            numbers[name] = [rounded(row[:i + 1], digits) for i, row in rows]
    if "distance" in parts:
        rate = rate_of(parts["bias"][head], parts["distance"][head])
        numbers["rate"] = rounded(rate, 4)
    return numbers


def rounded(row, digits):
    """For JSON: None where a number is not finite."""
    return [round(x, digits) if math.isfinite(x) else None for x in row.tolist()]


def rate_of(bias, distance):
    """(T, T) both -> (T,), a query's bias over its distance, -inf where keys differ in it."""
    bias = np.ma.masked_where(np.isinf(bias) | (distance <= 0), bias.astype(float))
    rate = (bias / distance).max(1)
    error = abs(bias - rate[:, None] * distance).max()
    of_products = error < 1e-3 * abs(bias).max()
    return rate.filled(-np.inf) if of_products else np.full(len(bias), -np.inf)


def packed(numbers):
    """As JSON, deflated: some millions of numbers are 1 MB."""
    text = json.dumps(numbers, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


# -----------------------------------------------------------------------------
# the page

def guide_of(path):
    """
    A page's words: a title, an introduction, and under every further heading a scene: a link with
    the page's state, and words.
    """
    start, *parts = Path(path).read_text(encoding="utf-8").split("\n## ")
    scenes = []
    try:
        title, intro = start.split("\n\n", 1)
        for part in parts:
            name, link, words = part.split("\n\n", 2)
            state = re.search(r"#([^)]*)", link)[1]
            scenes.append(dict(title=name, state=state, words=" ".join(words.split())))
    except (ValueError, TypeError):
        fail(f"{path} has a heading without a link or words: results/play.md is an example")
    return dict(title=title.strip("# "), intro=" ".join(intro.split()), scenes=scenes)


def filled(content):
    """page.html with its content."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    before, mark, rest = page.partition('<script type="application/json" id="data">')
    text = json.dumps(content).replace("<", r"\u003c")  # which could end the script
    return before + mark + text + rest[rest.index("</script>"):]


def main(argv=None):
    parser = Parser(description=__doc__)
    add_set(parser)
    add = parser.add_argument
    add("runs", nargs="*", help="run folders or checkpoints; default: the newest")
    add("--prompt", nargs="+", default=[""], help="models of text: what to read")
    add("--split", nargs="+", default=[""], help="default: the first test split")
    add("--length", nargs="+", type=int, default=[0],
        help="tokens of a sequence, or of a prompt at most; default: as in training, or all")
    add("--seed", type=int, default=0, help="which sequences to draw (default: 0)")
    add("--guide", help="Markdown: the page's introduction and scenes")
    add("--out", help="the page to write, .html")
    args = parser.parse_args(argv)
    if min(args.seed, *args.length) < 0:
        fail("--seed and --length must be 0 or more")
    if Path(args.out or ".html").suffix not in (".html", ""):
        fail(f"cannot write {args.out}: use .html")
    guide, runs = guide_of(args.guide) if args.guide else {}, load_runs(args)
    out = args.out or folder_for(runs) / "play.html"
    page = filled(content_of(runs, args) | guide)
    write_text(out, page)
    print(f"wrote {out}, {len(page) / 1e6:.2f} MB: open it in a browser")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
