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
from common.exits import fail, in_one_line
from common.files import write_text
from common.flags import Parser, add_set
from data import in_pieces
from figures.maps import beside, load_runs, look, same_sequence, sharpest

DIGITS = dict(qk=2, bias=2, step=2, distance=2, attention=3)  # behind the point


def content_of(runs, args):
    """All that a page shows: a lane for each model, strings, and their numbers in every lane."""
    lanes, strings = [lane_of(run) for run in runs], []
    lists = args.prompt, args.split, args.length
    for n in range(max(map(len, lists))):
        prompt, split, length = (values[min(n, len(values) - 1)] for values in lists)
        texts = same_sequence(runs, prompt, split, length, args.seed)
        text, numbers, predictions = texts[0], [], []
        holder = text.holder[0].numpy()
        for lane, run, own in zip(lanes, runs, texts):
            layers = look(run.model, own.ids)
            if "heads" not in lane:
                lane.update(heads_of(layers, holder))
            numbers.append([numbers_of(layers[layer], head) for layer, head in lane["heads"]])
            predictions.append(predicted(run.model, own))
        name = f"{len(holder)} tokens"
        if prompt or split:
            name = f"{(split or prompt.lstrip()).partition(chr(10))[0][:24]} ({name})"
        strings.append(dict(name=name, tokens=text.labels, answers=spoken(text, text.y[0]),
                            holder=holder.tolist(), predictions=predictions,
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
    heads, reads, queries = [], [], np.flatnonzero(holder >= 0)
    for layer, parts in enumerate(layers):
        for head, rows in enumerate(parts["attention"]):
            heads.append((layer, head))
            if len(queries):
                reads.append(round(100 * float(rows[queries, holder[queries]].mean())))
    first = heads.index((layer, sharpest(layers[-1:])[1]))
    return dict(heads=heads, reads=reads, first=reads.index(max(reads)) if reads else first)


@torch.no_grad()
def predicted(model, text):
    """The likeliest token at each place, as labels, and how likely it is, in %."""
    logits = torch.cat(list(in_pieces(model, text.ids)), 1)[0]
    sure, best = logits.float().softmax(-1).max(-1)
    return dict(said=text.show(best.numpy()), sure=(100 * sure).round().int().tolist())


def spoken(text, y):
    """Labels of y (T,), empty where it is -1."""
    return [label if token >= 0 else "" for label, token in zip(text.show(y.clamp(0).numpy()), y)]


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
    far = np.isfinite(bias) & (distance > 0) & np.tri(len(bias), dtype=bool)
    ratio = np.divide(bias, distance, out=np.full(bias.shape, -np.inf), where=far, dtype=float)
    rate = ratio.max(1)
    error = abs(bias - np.where(np.isfinite(rate), rate, 0)[:, None] * distance)[far]
    of_products = bias[far].any() and error.max() < 1e-3 * abs(bias[far]).max()
    return rate if of_products else np.full(len(bias), -np.inf)


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
    text = Path(path).read_text(encoding="utf-8")
    (title, intro), *scenes = (part.strip().split("\n\n", 1) for part in text.split("\n#"))
    found = [dict(title=name.strip("# "), state=re.search(r"#([^)]*)\)", words)[1],
                  words=" ".join(words.split("\n\n", 1)[1].split())) for name, words in scenes]
    return dict(title=title.strip("# "), intro=" ".join(intro.split()), scenes=found)


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
    out = args.out or beside(runs, "play.html")
    page = filled(content_of(runs, args) | guide)
    write_text(out, page)
    print(f"wrote {out}, {len(page) / 1e6:.2f} MB: open it in a browser")


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
