"""
Post-Norm's small models, and the random search that trains many of them at once: the minimal
transformer of the set complement task (Eq. 2, 3), its hard-coded solution (Example 4.1), and max
retrieval (section 6.2). Dyck and Tomita strings go to the GPT of model_postnorm.py.

    python -m experiments.minimal --panel '{"data": "dyck", "k": 2, "m": 3, "block_size": 32,
        "batch_size": 32, "longest": 128, "at": [33, 128]}' --scheme peri --out peri.json

A panel is a task (data and its fields) with the batch size, the greatest length to measure, and
`at`, the lengths [from, to] over which a trial's number is the mean. All trials of one scheme are
stacked and take their steps together. reproduce.py runs one such command for every panel and scheme
of a table; the result goes to --out, and is not made again with the same settings.

What differs from the paper: norms have eps = 1e-12 in the minimal transformer, whose matrices start
at std 0.02, cut off at 2 std; the ranges of the hyper-parameters are ours (our copy of the
paper has none).
"""
import argparse
import json
import re
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

import model_postnorm
import runs
from data import auc, binned, tvd

SCHEMES = model_postnorm.SCHEMES

# -----------------------------------------------------------------------------
# the minimal transformer of the set complement task, and its hard-coded solution


def residual(x, f, scheme, before, after):
    """x with f added, and the norms where the scheme has them."""
    if scheme == "post":
        return after(x + f(x))
    if scheme in ("pre", "pre_final"):
        return x + f(before(x))
    if scheme in ("peri", "peri_init"):
        return x + after(f(before(x)))
    return x + (after(f(x)) if scheme == "output" else f(x))


class MinimalTransformer(nn.Module):
    """
    One layer, one head, no MLP, no positions (Eq. 3):
    f(t) = B_last + sum_i a_i D_{t_i} / sum_i a_i, with B = E U the embedding times the unembedding,
    a = exp(E W_Q (E W_K)^T) the weights, D = E W_V W_O U. n tokens; d, d_k, d_v are free.
    norm: none or one of SCHEMES; output is section 4.3's remedy alone. constant=True gives every
    token the same weight, as the theorem assumes.
    """
    def __init__(self, n, d, d_k=1, d_v=None, norm="none", constant=False):
        super().__init__()
        if norm not in ("none", *SCHEMES):
            raise ValueError(f"norm={norm!r} is not one of none, {', '.join(SCHEMES)}")
        d_v = d if d_v is None else d_v
        if n < 2 or min(d, d_k, d_v) < 1:
            raise ValueError("a minimal transformer needs n >= 2 tokens and d, d_k, d_v >= 1")
        shapes = dict(E=(n, d), W_Q=(d, d_k), W_K=(d, d_k), W_V=(d, d_v), W_O=(d_v, d), U=(d, n))
        for name, shape in shapes.items():
            w = nn.init.trunc_normal_(torch.empty(shape), std=0.02, a=-0.04, b=0.04)
            self.register_parameter(name, nn.Parameter(w))
        self.norm, self.constant = norm, constant
        norms = [nn.RMSNorm(d, eps=1e-12) for _ in range(4)]
        self.first, self.before, self.after, self.last = norms

    def attend(self, x):
        T = x.size(-2)
        v = x @ (self.W_V @ self.W_O)
        if self.constant:
            return v.cumsum(-2) / torch.arange(1, T + 1, device=x.device)[:, None]
        q, k = x @ self.W_Q, x @ self.W_K
        later = torch.ones(T, T, device=x.device).triu(1).bool()
        a = (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf"))
        return a.softmax(-1) @ v

    def forward(self, idx):
        """idx (B, T) -> logits (B, T, n): row t is what follows the first t + 1 tokens."""
        x = self.E[idx]
        x = self.first(x) if self.norm == "peri_init" else x
        x = residual(x, self.attend, self.norm, self.before, self.after)
        final = self.norm in ("pre_final", "peri", "peri_init")
        return (self.last(x) if final else x) @ self.U


def hard_coded(n, c, norm="none", centred=False):
    """
    Example 4.1, in float64: d = d_v = n - 1, constant attention, E = [I; -1^T], U = c [-I | 0]. A
    set's last token is c (1 + 1/l) below the absent ones, its others c / l: diluted. centred=True
    has E E^T = I - J/n and U = -c E^T instead, for which a norm on the attention output gives gaps
    of c sqrt(n (n - 1) / (l (n - l))): bounded from below at every length.
    """
    model = MinimalTransformer(n, n - 1, 1, n - 1, norm, constant=True).double()
    eye = torch.eye(n - 1, dtype=torch.float64)
    if centred:  # n points in n - 1 dimensions: the eigenvectors of I - J/n whose eigenvalue is 1
        E = torch.linalg.eigh(torch.eye(n, dtype=torch.float64) - 1 / n).eigenvectors[:, 1:]
        U = -c * E.T
    else:
        E = torch.cat((eye, -torch.ones(1, n - 1, dtype=torch.float64)))
        U = c * torch.cat((-eye, torch.zeros(n - 1, 1, dtype=torch.float64)), 1)
    zero = torch.zeros(n - 1, 1, dtype=torch.float64)
    with torch.no_grad():
        for name, w in dict(E=E, U=U, W_V=eye, W_O=eye, W_Q=zero, W_K=zero).items():
            getattr(model, name).copy_(w)
    return model


# -----------------------------------------------------------------------------
# max retrieval

class MaxRetrieval(nn.Module):
    """
    The class of the item with the largest priority (Velickovic et al., 2025; section 6.2):
    h = MLP(x), weights softmax(q . h) with a parameter q, z their mean of h, logits MLP(z).
    norm: none, pre (on h), post (on z), peri (both).
    """
    def __init__(self, norm="none", classes=10, width=128):
        super().__init__()
        if norm not in ("none", "pre", "post", "peri"):
            raise ValueError(f"norm={norm!r} is not one of none, pre, post, peri")
        self.enter = nn.Sequential(
            nn.Linear(1 + classes, width), nn.GELU(), nn.Linear(width, width))
        self.leave = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
        self.q = nn.Parameter(torch.empty(width))
        self.before = nn.RMSNorm(width, eps=1e-8) if norm in ("pre", "peri") else nn.Identity()
        self.after = nn.RMSNorm(width, eps=1e-8) if norm in ("post", "peri") else nn.Identity()
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif name == "q" or p.dim() == 2:
                nn.init.trunc_normal_(p, std=0.02, a=-0.04, b=0.04)

    def forward(self, x):
        """
        x (B, T, 1 + classes), the priority first, -1 where an item is padding
        -> logits (B, classes).
        """
        h = self.before(self.enter(x))
        a = (h @ self.q).masked_fill(x[..., 0] < 0, float("-inf")).softmax(-1)
        return self.leave(self.after((a[..., None] * h).sum(-2)))


# -----------------------------------------------------------------------------
# random search: many small models at once, stacked

def small_model(task, scheme):
    """The paper's model for a task, with norms as the scheme has them."""
    if task.data == "set_complement":
        return MinimalTransformer(task.n, task.n - 1, 1, task.n - 1, scheme)
    if task.data == "max_retrieval":
        return MaxRetrieval(scheme, task.classes)
    shape = dict(n_layer=2, n_embd=64, norm=scheme)
    return model_postnorm.GPT(model_postnorm.GPTConfig(task.block_size, task.vocab_size, **shape))


def draw_trial(rng, peak=1e-2):
    """One trial's hyper-parameters, in ranges that are ours: our copy of the paper has none."""
    def log_uniform(low, high):
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    beta1, beta2 = 1 - log_uniform(0.02, 0.2), 1 - log_uniform(1e-4, 1e-1)
    while beta1 >= beta2**0.5:
        beta1, beta2 = 1 - log_uniform(0.02, 0.2), 1 - log_uniform(1e-4, 1e-1)
    return dict(
        beta1=beta1, beta2=beta2, weight_decay=log_uniform(1e-4, 1), grad_clip=log_uniform(0.1, 10),
        learning_rate=log_uniform(1e-4, peak), warmup=log_uniform(1e-3, 1e-1),
        final=float(rng.random() < 0.5) * log_uniform(1e-3, 1e-1),  # of the peak, at the end
        eta=rng.uniform(0.1, 1), rho=log_uniform(1, 1e3), kappa=rng.uniform(0.3, 1))


def stacked(model):
    """-> logits(weights (K, N), x): what K models of this shape answer to the same x, (K, ...)."""
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def one(row, x):
        parts = row.split([shape.numel() for shape in shapes.values()])
        weights = {n: w.view(shapes[n]) for n, w in zip(shapes, parts)}
        found = functional_call(model, weights, (x,))
        return found[0] if isinstance(found, tuple) else found
    return vmap(one, in_dims=(0, None))


def decays(model, device):
    """(N,): 1 where a weight decays, 0 for embeddings, gains and vectors."""
    parts = []
    for name, p in model.named_parameters():
        matrix = p.dim() >= 2 and name not in ("E", "wte.weight")
        parts.append(torch.full((p.numel(),), float(matrix), device=device))
    return torch.cat(parts)


def fit(models, trials, batch, steps, device="cpu", tell=lambda step, losses: None):
    """
    Trains K models of one shape at once, model i with the hyper-parameters trials[i], all on the
    same batches: batch(step) -> x, y. AdamW, linear warmup and decay, as torch has them.
    -> logits(weights, x), {raw, ema, bema: weights (K, N)}: the last ones, their moving average,
    and that without its lag (BEMA, section 4.5).
    """
    logits = stacked(models[0].to(device))
    start = torch.stack([parameters_to_vector(m.parameters()).detach().to(device) for m in models])
    theta = start.clone().requires_grad_()
    matrix = decays(models[0], device)
    h = {k: torch.tensor([[t[k]] for t in trials], device=device) for k in trials[0]}  # (K, 1)
    warmup = (h["warmup"] * steps).round().clamp(min=1)
    m, v, ema = torch.zeros_like(theta), torch.zeros_like(theta), start.clone()
    for step in range(1, steps + 1):
        x, y = (torch.from_numpy(a).to(device) for a in batch(step))
        theta.grad = None
        out = logits(theta, x)                                          # (K, ..., classes)
        p = y if y.is_floating_point() else F.one_hot(y, out.size(-1))  # of y, or a sample of it
        losses = -(out.log_softmax(-1) * p).sum(-1).flatten(1).mean(1)
        losses.sum().backward()
        with torch.no_grad():
            norm = theta.grad.norm(dim=1, keepdim=True)
            g = theta.grad * (h["grad_clip"] / (norm + 1e-6)).clamp(max=1)
            left = ((steps - step) / (steps - warmup).clamp(min=1)).clamp(max=1)
            decay = h["final"] + (1 - h["final"]) * left
            lr = h["learning_rate"] * torch.minimum(step / warmup, decay)
            m.lerp_(g, 1 - h["beta1"])
            v.lerp_(g * g, 1 - h["beta2"])
            update = m / (1 - h["beta1"]**step) / ((v / (1 - h["beta2"]**step)).sqrt() + 1e-8)
            theta -= lr * (update + h["weight_decay"] * matrix * theta)
            ema.lerp_(theta, (h["rho"] + step)**-h["kappa"])
        tell(step, losses)
    theta = theta.detach()
    bema = runs.bema_weights(dict(w=theta), dict(start=dict(w=start), ema=dict(w=ema)), steps, h)
    return logits, dict(raw=theta, ema=ema, bema=bema["w"])


def pieces(task, split, sequences, T, K, rng, device):
    """New sequences of a split, drawn at once and given in pieces that K models can take."""
    x, y = (torch.from_numpy(a).to(device) for a in task.batch(split, sequences, rng))
    size = max(1, 2**13 // (K * T))
    return zip(x.split(size), y.split(size))


@torch.no_grad()
def measure_sets(task, logits, weights, sequences, rng, lengths, device="cpu"):
    """-> lengths [[T, T], ...] and {accuracy: (K, n)}: at every given length, on new sets."""
    columns, K = [], len(weights)
    for T in lengths:
        right = []
        for x, y in pieces(task, str(T), max(16, min(sequences, 2**19 // T)), T, K, rng, device):
            z = logits(weights, x)                                      # (K, B, classes)
            right.append(torch.where(z.isnan().any(-1), torch.nan, (z.argmax(-1) == y).float()))
        columns.append(torch.cat(right, 1).mean(1).cpu().numpy())
    return [[T, T] for T in lengths], dict(accuracy=np.stack(columns, 1))


@torch.no_grad()
def measure(task, logits, weights, sequences, rng, device="cpu"):
    """
    -> lengths [[first, last], ...] and {metric: (K, n)}, on new sequences: TVD, and where the task
    has them AUC and precision, at every position, binned.
    """
    found, K, T = {}, len(weights), task.block_size
    sequences = max(16, min(sequences, 2**19 // T))
    for x, _ in pieces(task, "iid", sequences, T, K, rng, device):
        z, target = logits(weights, x), task.target(x)                  # (K, B, T, vocab)
        found.setdefault("tvd", []).append(tvd(z, target))
        if task.data == "set_complement":  # an absent token's logit over any present one's
            present = z.masked_fill(target > 0, -torch.inf).amax(-1)
            absent = z.masked_fill(target == 0, torch.inf).amin(-1)
            found.setdefault("precision", []).append(absent - present)
        if task.contrast is not None:
            score, good = task.contrast(z, x)                           # (K, B, T), (B, T)
            found.setdefault("score", []).append(score)
            found.setdefault("good", []).append(good)
    score, good = found.pop("score", None), found.pop("good", None)
    curves = {k: torch.cat(v, 1).mean(1).cpu().numpy() for k, v in found.items()}
    if score:
        good = torch.cat(good).cpu().numpy()
        curves["auc"] = np.stack([auc(one, good) for one in torch.cat(score, 1).cpu().numpy()])
    width = 1 if T < 64 else max(2, T // 64 * 2)
    edges = [*range(0, T, width), T]
    lengths = [[a + 1, b] for a, b in zip(edges, edges[1:])]
    return lengths, {k: binned(v, edges) for k, v in curves.items()}


def note(rows, weights, kind, lengths, measured, at):
    """Every trial's mean over the lengths from at[0] to at[1], and its curve, into rows."""
    inside = [i for i, (a, b) in enumerate(lengths) if at[0] <= a and b <= at[1]]
    for metric, values in measured.items():
        means = binned(values[:, inside], [0, len(inside)])[:, 0]
        for row, curve, mean in zip(rows, values, means):
            kept = row.setdefault(metric, {}).setdefault(weights, {})
            kept[kind] = None if np.isnan(mean) else float(mean)
            kept["by_length"] = [None if np.isnan(y) else round(float(y), 6) for y in curve]


def search(settings, n, device="cpu", tell=lambda step, losses: None):
    """n trials of one scheme on one panel's task -> a dict for the JSON."""
    panel, scheme, steps, seed = (settings[k] for k in ("panel", "scheme", "steps", "seed"))
    torch.set_float32_matmul_precision("highest")  # no TF32
    begin, models = time.time(), []
    task = runs.make_task(panel)
    far = runs.make_task(panel | dict(block_size=panel["longest"]))
    trials = [draw_trial(np.random.default_rng([seed, i]), settings["peak"]) for i in range(n)]
    for i in range(n):
        torch.manual_seed((seed << 20) + i)
        models.append(small_model(task, scheme))

    def batch(step):
        x, y = task.batch("train", panel["batch_size"], np.random.default_rng([seed, step]))
        return x, task.target(torch.from_numpy(x)).numpy() if panel.get("exact") else y

    lengths = dict(validation=[panel["at"][0]], test=[])
    for split in task.splits[2:] if task.kind == "numbers" else ():
        if int(split) <= panel["longest"]:
            lengths["test"].append(int(split))
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be stacked
        logits, found = fit(models, trials, batch, steps, device, tell)
        seconds = time.time() - begin
        finite = found["raw"].isfinite().all(1).tolist()
        rows = [dict(hyperparameters=t, finite=f) for t, f in zip(trials, finite)]
        for name, weights in found.items():
            for kind in ("validation", "test"):  # the best trial is chosen on the first alone
                rng = np.random.default_rng([seed, 1 << 40, kind == "test"])
                arguments = (far, logits, weights, settings["sequences"], rng)
                if task.kind == "numbers":
                    bins, measured = measure_sets(*arguments, lengths[kind], device)
                else:
                    bins, measured = measure(*arguments, device)
                note(rows, name, kind, bins, measured, panel["at"])
    return dict(settings=settings, environment=runs.environment(), seconds=round(seconds, 1),
                lengths=bins, trials=rows)


def kept(path, settings, n):
    """What an earlier search with these settings and as many trials wrote to path, or None."""
    try:
        found = json.loads(Path(path).read_text())
        if found["settings"] == settings and len(found["trials"]) >= n:
            return found | dict(trials=found["trials"][:n])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or half written
        pass
    return None


def theorem(n=64, gap=10.0, sequences=64):
    """
    Theorem 4.2 at lengths 2 ... n - 1, scaled to a precision of `gap` at 2: the formula's
    precision, and what the hard-coded models have, with their TVD -> {norm: {name: [...]}}.
    """
    assert n <= 64  # beyond, measure would bin
    task = runs.make_task(dict(data="set_complement", n=n, block_size=n - 1))
    lengths, found = np.arange(2, n), {}
    share = 1 / lengths - 1 / n   # E_i . mean of E, for a token that is present and centred E
    post = np.sqrt((n - 1) / (1 - 1 / n + 3 * share)) / lengths
    final = np.sqrt((n - 1) / (1 - 1 / n + (2 * n**0.5 + n) * share)) * n**0.5 / lengths
    formulas = dict(none=1 / lengths, output=np.sqrt(n * (n - 1) / (lengths * (n - lengths))),
                    post=post, pre_final=final)
    for norm, formula in formulas.items():
        c = gap / formula[0]
        model = hard_coded(n, c, norm, centred=norm != "none")
        _, measured = measure(task, lambda _, x, model=model: model(x)[None], [0], sequences,
                              np.random.default_rng(0))
        rows = {k: y[0, 1:].tolist() for k, y in measured.items()}
        found[norm] = dict(formula=(c * formula).tolist(), **rows)
    return dict(n=n, lengths=lengths.tolist(), models=found)


# -----------------------------------------------------------------------------
# for reproduce.py: one command for every panel and scheme

def commands(args, entry, scale, folder):
    """-> {name: (settings, how many trials, the command)}"""
    found = {}
    for name, panel in scale["panels"].items():
        for scheme in entry["schemes"]:
            settings = dict(panel=panel, scheme=scheme, steps=scale["steps"],
                            peak=entry.get("peak", 1e-2), seed=1337, sequences=512)
            settings = json.loads(json.dumps(settings))
            slug = re.sub("[^a-z0-9]+", "-", f"{name} {scheme}".lower())
            trials = args.trials or scale["trials"]
            words = ["python", "-m", "experiments.minimal", "--panel", json.dumps(panel)]
            for flag in ("scheme", "steps", "peak", "seed", "sequences"):
                words += [f"--{flag}", str(settings[flag])]
            words += ["--trials", str(trials), "--out", str(folder / f"{slug}.json")]
            if args.device != "auto":
                words += ["--device", args.device]
            found[slug] = settings, trials, words
    return found


def jobs(args, entry, scale, folder):
    """-> {name: function(run)}"""
    found = {}
    for slug, one in commands(args, entry, scale, folder).items():
        found[slug] = partial(one_search, *one, folder / f"{slug}.json")
    return found


def one_search(settings, trials, words, path, run):
    """The search in path, made now or already there."""
    if not kept(runs.ROOT / path, settings, trials):
        run(*words)
    return kept(runs.ROOT / path, settings, trials)


def collect(entry, scale, searches):
    """What the jobs returned -> the entry's JSON."""
    panels, found = [], iter(searches)
    for name, panel in scale["panels"].items():
        schemes = {}
        for scheme in entry["schemes"]:
            one = next(found)
            trials = [shown(t, entry) for t in one["trials"]]
            schemes[scheme] = dict(seconds=one["seconds"], environment=one["environment"],
                                   trials=trials)
        panels.append(dict(panel, name=name, lengths=one["lengths"], schemes=schemes))
    first = searches[0]
    return dict(environment=first["environment"], metric=entry["metric"], steps=scale["steps"],
                trials=len(first["trials"]), sequences=first["settings"]["sequences"],
                panels=panels)


def shown(trial, entry):
    """What an entry's JSON has of a trial: the entry's metric and TVD, of the weights it shows."""
    found = dict(hyperparameters=trial["hyperparameters"], finite=trial["finite"])
    for metric in (entry["metric"], "tvd"):
        if metric in trial:
            found[metric] = {weights: scores for weights, scores in trial[metric].items()
                             if weights != "ema" or entry.get("ema")}
    return found


def older(result, entry, scale):
    """
    Why a JSON is not of this definition of its entry: the first panel, scheme or setting that
    differs; "" where it is. It may have fewer trials.
    """
    has = {panel["name"]: panel for panel in result["panels"]}
    for name in [*has, *scale["panels"]]:
        if name not in scale["panels"]:
            return f"it has a panel {name!r}, the entry has none"
        if name not in has:
            return f"it has no panel {name!r}"
        missing = [scheme for scheme in entry["schemes"] if scheme not in has[name]["schemes"]]
        if missing:
            return f"its panel {name!r} has no scheme {missing[0]!r}"
    wanted = {"": dict(steps=scale["steps"], metric=entry["metric"])} | scale["panels"]
    for name, settings in wanted.items():
        for k, v in json.loads(json.dumps(settings)).items():
            found = has.get(name, result).get(k)
            if found != v:
                where = f"its panel {name!r}" if name else "it"
                return f"{where} has {k}={found}, the entry says {v}"
    return ""


def figures(entry):
    """What plot.py is asked for, in words, to show the JSON."""
    return [["trials"]]


def check(args):
    """What no search can mean ends in one line."""
    if min(args.trials, args.steps, args.sequences) < 1 or not 0 < args.peak < 100:
        runs.fail("--trials, --steps and --sequences must be at least 1, --peak between 0 and 100")
    if not 0 <= args.seed < 1 << 23:
        runs.fail(f"--seed {args.seed} must be from 0 to {(1 << 23) - 1}")
    if args.scheme not in ("none", *SCHEMES):
        runs.fail(f"unknown scheme {args.scheme!r}: {runs.nearest(args.scheme, SCHEMES)}")
    panel = args.panel if isinstance(args.panel, dict) else {}
    missing = [name for name in ("data", "batch_size", "longest", "at") if name not in panel]
    if missing:
        runs.fail(f"--panel has no {missing[0]}")
    for name in ("batch_size", "longest"):
        if type(panel[name]) is not int or panel[name] < 1:
            runs.fail(f"--panel: {name} has to be a whole number from 1 on")
    try:
        first, last = panel["at"]
        if not 1 <= first <= last <= panel["longest"]:
            raise ValueError("at has to be [from, to], two lengths up to longest")
        task = runs.make_task(panel)
        if task.kind != "numbers" and not task.target:
            runs.fail(f"{task.data} has no true distribution to measure by")
        small_model(task, args.scheme)
    except (TypeError, ValueError, AttributeError) as e:
        runs.fail(f"--panel and --scheme {args.scheme} do not fit: {e}")


def main(argv=None):
    parser = runs.make_parser(description=__doc__)
    parser.add_argument("--panel", type=json.loads, required=True, help="the task, as JSON")
    parser.add_argument("--scheme", required=True, help="where the norms sit: none, pre, post ...")
    parser.add_argument("--steps", type=int, default=1000, help="of training (default: 1000)")
    parser.add_argument("--trials", type=int, default=8, help="models (default: 8)")
    parser.add_argument("--peak", type=float, default=1e-2, help="highest learning rate drawn")
    parser.add_argument("--seed", type=int, default=1337, help="(default: 1337)")
    parser.add_argument("--sequences", type=int, default=512, help="to measure on (default: 512)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    parser.add_argument("--out", required=True,
                        help="a JSON; if it has these settings, nothing is trained")
    args = runs.parse(parser, argv)
    names = ("panel", "scheme", "steps", "peak", "seed", "sequences")
    settings = {name: getattr(args, name) for name in names}
    check(args)
    if kept(args.out, settings, args.trials):
        return
    begin = time.time()

    def tell(step, losses):
        if step % max(1, args.steps // 50) and step != args.steps:
            return
        eta = (time.time() - begin) / step * (args.steps - step)
        loss = losses.nanmedian().item()
        print(f"iter {step}/{args.steps} | median loss {loss:.4f} | "
              f"eta {int(eta) // 60}m{int(eta) % 60:02d}s", flush=True)

    how = argparse.Namespace(device=args.device, dtype="float32", kernel="off")
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    runs.write_json(args.out, search(settings, args.trials, str(runs.setup(how)[0]), tell))


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    main()
