"""
Post-Norm's random search: many small models of one shape are stacked, and take their steps
together. The minimal transformer and max retrieval are variants/minimal.py's; Dyck and Tomita
strings go to the GPT of model_postnorm.py.

    python -m lab.search postnorm_fig2 --panel "trained on 5 to 16" --out panel.json

An entry of a random search has metric (tvd, auc, accuracy or precision), schemes (where the norms
sit, as in model_postnorm.SCHEMES; none is no norm), and perhaps ema (the moving average of the
weights, too). A scale has trials, steps and panels: a panel is a task (data and its fields) with
the batch size, the greatest length to measure, and `at`, the lengths [from, to] over which a
trial's number is the mean. It may have theorem (the hard-coded models, too), schemes of its own,
and compile (gradients by torch.compile). The ranges of the hyper-parameters are ours.
"""
import argparse
import functools
import sys
import warnings
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

import model_postnorm
import train
from common import ROOT
from common.device import environment, setup
from common.exits import fail, in_one_line, nearest
from common.files import read_json, write_json, write_safely
from common.flags import Parser
from common.names import find_task, pick
from data import tvd
from eval import auc
from lab import find, slug
from lab.variants.minimal import MaxRetrieval, MinimalTransformer, hard_coded

SEED, SEQUENCES = 1337, 512  # of all searches; sequences to measure on


def make_task(panel, **changes):
    """The task of a panel. max_retrieval, which is numbers, has no vocabulary to ask for."""
    cls = find_task(panel["data"])
    return cls(**pick(cls, panel | changes))


# -----------------------------------------------------------------------------
# many small models at once, stacked

def small_model(task, scheme):
    """The paper's model for a task, with norms as the scheme has them."""
    if task.data == "set_complement":
        return MinimalTransformer(task.n, task.n - 1, norm=scheme)
    if task.data == "max_retrieval":
        return MaxRetrieval(scheme, task.classes)
    return model_postnorm.GPT(model_postnorm.GPTConfig(
        task.block_size, task.vocab_size, n_layer=2, n_embd=64, norm=scheme))


def draw_trial(rng, peak=1e-2):
    """One trial's hyper-parameters, in ranges that are ours."""
    def log_uniform(low, high):
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    beta1 = beta2 = 1.0
    while beta1 >= beta2**0.5:
        beta1 = 1 - log_uniform(0.02, 0.2)
        beta2 = 1 - log_uniform(1e-4, 1e-1)
    return dict(
        beta1=beta1, beta2=beta2, weight_decay=log_uniform(1e-4, 1), grad_clip=log_uniform(0.1, 10),
        learning_rate=log_uniform(1e-4, peak), warmup=log_uniform(1e-3, 1e-1),
        final=float(rng.random() < 0.5) * log_uniform(1e-3, 1e-1),  # of the peak, at the end
        eta=rng.uniform(0.1, 1), rho=log_uniform(1, 1e3), kappa=rng.uniform(0.3, 1))


def stacked(model):
    """-> logits(weights (K, N), x): what K models of this shape answer to the same x, (K, ...)."""
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def answer(row, x):
        parts = row.split([shape.numel() for shape in shapes.values()])
        weights = {n: w.view(shapes[n]) for n, w in zip(shapes, parts)}
        output = functional_call(model, weights, (x,))
        return output[0] if isinstance(output, tuple) else output
    return vmap(answer, in_dims=(0, None))


def decays(model):
    """(N,): 1 where a weight decays, 0 for embeddings, gains and vectors."""
    parts = []
    for name, p in model.named_parameters():
        matrix = p.dim() >= 2 and name not in ("E", "wte.weight")
        parts.append(torch.full_like(p, matrix))
    return parameters_to_vector(parts).detach()


def fit(models, trials, batch, steps, device="cpu", saved=None, compiled=False):
    """
    Trains K models of one shape at once, model i with the hyper-parameters trials[i], all on the
    same batches: batch(step) -> x, y. AdamW, linear warmup and decay, as torch has them.
    -> logits(weights, x), {raw, ema, bema: weights (K, N)}: the last ones, their moving average,
    and that without its lag (BEMA, section 4.5). It goes on from the file saved, if there is one,
    which it writes after each fiftieth of the steps.
    """
    logits = stacked(models[0].to(device))
    start = torch.stack([parameters_to_vector(m.parameters()).detach().to(device) for m in models])
    matrix = decays(models[0])
    h = SimpleNamespace(**{name: torch.tensor([[trial[name]] for trial in trials], device=device)
                           for name in trials[0]})                      # (K, 1)
    warmup = (h.warmup * steps).round().clamp(min=1)
    done, theta, ema = 0, start.clone(), start.clone()
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    if saved and saved.exists():
        try:
            done, theta, ema, m, v = torch.load(saved, map_location=device)
        except Exception:  # torch has many for a foreign file
            fail(f"{saved} cannot be read (cut off?): remove it, and this scheme begins anew")
        print(f"from iter {done}", flush=True)

    def loss(theta, x, y):
        out = logits(theta, x)                                          # (K, ..., classes)
        p = y if y.is_floating_point() else F.one_hot(y, out.size(-1))  # of y, or a sample of it
        losses = -(out.log_softmax(-1) * p).sum(-1).flatten(1).mean(1)
        return losses.sum(), losses  # a model's weights are in its own loss alone
    gradient = grad(loss, has_aux=True)
    if compiled:
        gradient = train.compiled(gradient, device)
    for step in range(done + 1, steps + 1):
        g, losses = gradient(theta, *(torch.from_numpy(a).to(device) for a in batch(step)))
        g = g * (h.grad_clip / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
        left = ((steps - step) / (steps - warmup).clamp(min=1)).clamp(max=1)
        decay = h.final + (1 - h.final) * left
        lr = h.learning_rate * torch.minimum(step / warmup, decay)
        m.lerp_(g, 1 - h.beta1)
        v.lerp_(g * g, 1 - h.beta2)
        update = m / (1 - h.beta1**step) / ((v / (1 - h.beta2**step)).sqrt() + 1e-8)
        theta -= lr * (update + h.weight_decay * matrix * theta)
        ema.lerp_(theta, (h.rho + step)**-h.kappa)
        if step % max(1, steps // 50) == 0:
            print(f"iter {step}/{steps} | median loss {losses.nanmedian().item():.4f}", flush=True)
            if saved:
                state = step, theta, ema, m, v
                write_safely(saved, functools.partial(torch.save, state))
    bema = ema + (h.rho + steps)**-h.eta * (theta - start)
    return logits, dict(raw=theta, ema=ema, bema=bema)


# -----------------------------------------------------------------------------
# how good they are, by length

@torch.no_grad()
def measure(task, logits, weights, sequences, rng, splits=("iid",), device="cpu"):
    """
    -> lengths [[first, last], ...] and {metric: (K, n)}, on new sequences: the accuracy in sets of
    each split's size; of other tasks TVD, AUC and precision where they have them, by position.
    """
    lengths, found = [], defaultdict(list)
    for split in splits:
        T = int(split) if split.isdigit() else task.block_size
        width = 1 if T < 64 else max(2, T // 64 * 2)
        edges = [*range(0, T, width), T]
        spans = [[a + 1, b] for a, b in zip(edges, edges[1:])]
        if split.isdigit():  # of a set one answer
            spans, edges = [[T, T]], [0, 1]
        lengths += spans
        # drawn at once, and given in pieces that K models can take
        x, y = task.batch(split, max(16, min(sequences, 2**19 // T)), rng)
        size = max(1, 2**13 // (len(weights) * T))
        parts = defaultdict(list)
        for piece in zip(*(torch.from_numpy(a).to(device).split(size) for a in (x, y))):
            for name, part in judged(task, logits(weights, piece[0]), *piece).items():
                parts[name].append(part)
        every = {name: torch.cat(part, -2) for name, part in parts.items()}
        if "good" in every:
            good, scores = (every.pop(name).cpu().numpy() for name in ("good", "score"))
            found["auc"].append(binned(np.stack([auc(score, good) for score in scores]), edges))
        for name, y in every.items():
            found[name].append(binned(y.mean(1).cpu().numpy(), edges))
    return lengths, {name: np.concatenate(y, 1) for name, y in found.items()}


def judged(task, z, x, y):
    """K models' logits z -> {name: (K, B, T)} of one piece, of sets (K, B, 1)."""
    if task.data == "max_retrieval":                                    # z (K, B, classes)
        right = (z.argmax(-1) == y).float()
        return dict(accuracy=torch.where(z.isnan().any(-1), torch.nan, right)[..., None])
    target = task.target(x)                                             # z (K, B, T, vocab)
    parts = dict(tvd=tvd(z, target))
    if task.data == "set_complement":  # an absent token's logit over any present one's
        absent = z.masked_fill(target == 0, torch.inf).amin(-1)
        parts["precision"] = absent - z.masked_fill(target > 0, -torch.inf).amax(-1)
    if task.contrast is not None:
        parts["score"], parts["good"] = task.contrast(z, x)             # (K, B, T), (B, T)
    return parts


def binned(values, edges):
    """Means of values (..., T) between edges (n + 1,) -> (..., n), NaNs left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # mean of nothing
        means = [np.nanmean(values[..., a:b], -1) for a, b in zip(edges, edges[1:])]
        return np.stack(means, -1)


def note(trials, weights, split, lengths, measured, at):
    """Every trial's mean over the lengths from at[0] to at[1], and its curve, into trials."""
    inside = [i for i, (a, b) in enumerate(lengths) if at[0] <= a and b <= at[1]]
    for metric, values in measured.items():
        means = binned(values[:, inside], [0, len(inside)])[:, 0]
        for trial, curve, mean in zip(trials, values, means):
            numbers = trial.setdefault(metric, {}).setdefault(weights, {})
            numbers[split] = float(mean)
            numbers["by_length"] = [round(float(y), 6) for y in curve]


def search(entry, part, panel, scheme, device="cpu", saved=None):
    """All trials of one scheme on one panel's task -> lengths, and a dict for the JSON."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    task = make_task(panel)
    far = make_task(panel, block_size=panel["longest"])
    drawn, models = [], []
    peak = 3e-2 if task.data == "set_complement" else 1e-2
    for i in range(part["trials"]):
        drawn.append(draw_trial(np.random.default_rng([SEED, i]), peak))
        torch.manual_seed((SEED << 20) + i)
        models.append(small_model(task, scheme))

    def batch(step):
        x, y = task.batch("train", panel["batch_size"], np.random.default_rng([SEED, step]))
        return x, task.target(torch.from_numpy(x)).numpy() if panel.get("exact") else y

    splits = dict(validation=["iid"], test=["iid"])
    if task.data == "max_retrieval":  # of sets, a split for each size
        splits["validation"] = [str(panel["at"][0])]
        splits["test"] = [T for T in task.splits[2:] if int(T) <= panel["longest"]]
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be stacked
        logits, by_weights = fit(models, drawn, batch, part["steps"], device, saved,
                                 part.get("compile", False))
        finite = by_weights["raw"].isfinite().all(1).tolist()
        trials = [dict(hyperparameters=t, finite=f) for t, f in zip(drawn, finite)]
        if not entry.get("ema"):
            del by_weights["ema"]
        for name, weights in by_weights.items():
            for split, tests in splits.items():  # the best trial is chosen on the first alone
                rng = np.random.default_rng([SEED, 1 << 40, split == "test"])
                bins, measured = measure(far, logits, weights, SEQUENCES, rng, tests, device)
                shown = measured.keys() & {"tvd", "auc", entry["metric"]}
                note(trials, name, split, bins, {m: measured[m] for m in shown}, panel["at"])
    return bins, dict(trials=trials, environment=environment())


def theorem(n=64, gap=10.0, sequences=64):
    """
    Theorem 4.2 at lengths 2 ... n - 1, scaled to a precision of `gap` at 2: the formula's
    precision, and what the hard-coded models have, with their TVD, and the ranks of D and of B + D:
    at least n - 1, where a model without a norm is precise at 1 and 2 -> {norm: {name: [...]}}.
    """
    task = make_task(dict(data="set_complement", n=n, block_size=n - 1))
    lengths, models = np.arange(2, n), {}
    share = n / lengths - 1  # n E_i . mean of E, for a token that is present and centred E
    squares = dict(none=n * (n - 1), output=share, post=n - 1 + 3 * share,
                   pre_final=(n - 1 + (2 * n**0.5 + n) * share) / n)
    for norm, square in squares.items():
        formula = np.sqrt(n * (n - 1) / square) / lengths
        c = gap / formula[0]
        model = hard_coded(n, c, norm, centred=norm != "none")

        def logits(_, x, model=model):
            return model(x)[None]
        _, measured = measure(task, logits, [0], sequences, np.random.default_rng(0))
        D = model.E @ model.W_V @ model.W_O @ model.U
        both = torch.stack((D, model.E @ model.U + D))
        models[norm] = dict(formula=(c * formula).tolist(),
                            ranks=torch.linalg.matrix_rank(both).tolist())
        for metric, y in measured.items():
            models[norm][metric] = y[0, 1:].tolist()
    return dict(n=n, lengths=lengths.tolist(), models=models)


# -----------------------------------------------------------------------------
# for reproduce.py: one command for every panel

def main(argv=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("entry", help="of lab/papers/postnorm.py")
    add("--panel", required=True, help="one of the entry's, or theorem")
    add("--scale", default="cpu", help="cpu or paper (default: cpu)")
    add("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    add("--out", required=True, type=Path, help="a JSON; schemes that it has are left")
    args = parser.parse_args(argv)
    table = find(args.entry, args.scale)
    entry, part = table.entry, table.part
    if "panels" not in part:
        fail(f"{args.entry} is no random search")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.panel == "theorem":
        return args.out.exists() or write_json(args.out, theorem())
    if args.panel not in part["panels"]:
        fail(f"{args.entry} has no panel {args.panel!r}: {nearest(args.panel, part['panels'])}")
    panel = part["panels"][args.panel]
    settings = dict(trials=part["trials"], steps=part["steps"], sequences=SEQUENCES, **panel)
    result = read_json(args.out) if args.out.exists() else dict(
        command=f"python reproduce.py {args.entry} --scale {args.scale}", schemes={},
        environment=environment(), **settings, name=args.panel)
    for name, value in settings.items():
        if result.get(name, value) != value:
            fail(f"{args.out} has {name} {result[name]}, not {value}: remove it to make it anew")
    device, *_ = setup(argparse.Namespace(device=args.device, dtype="float32", kernel="off"))
    for scheme in part.get("schemes", entry["schemes"]):
        if scheme not in result["schemes"]:
            print(f"{args.panel}: {scheme}", flush=True)
            # another name after an edit of the entry
            code = sha256(str(settings).encode()).hexdigest()[:8]
            name = f"{slug(args.panel)}-{scheme}-{code}.pt"
            saved = ROOT / table.trainings / name
            saved.parent.mkdir(parents=True, exist_ok=True)
            searched = search(entry, part, panel, scheme, str(device), saved)
            result["lengths"], result["schemes"][scheme] = searched
            write_json(args.out, result)
            saved.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
