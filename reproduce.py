"""
Every table and figure that this repository reproduces, each by one command.

    python reproduce.py                                 lists what there is
    python reproduce.py cable_table1 --scale cpu        trains, evaluates, writes results/cable_table1.cpu.{json,png}
    python reproduce.py cable_table1 --scale cpu --jobs 2   two trainings at a time
    python reproduce.py postnorm_fig1 --trials 25       a random search: 25 trials of every norm scheme, trained together

It runs the commands it prints, skips what is already done, goes on where a killed run stopped (a random search: after the last
scheme that was finished), and rewrites results/README.md, where our numbers stand beside the paper's.
"""
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

import model_postnorm
import runs
from data import auc, binned, tvd

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# CABLE, Table 1, lower half: perplexity on WikiText-103 by window length, trained on windows of 1024
CABLE_TABLE1 = {
    "cable": (23.70, 22.32, 21.48, 20.94, 20.65, 20.33), "cable_nw": (24.32, 23.01, 22.19, 21.70, 21.46, 21.13),
    "alibi": (24.09, 22.74, 22.05, 21.73, 21.58, 21.30), "fire": (24.34, 22.90, 22.68, 29.57, 54.89, 104.79),
    "t5": (25.06, 23.60, 27.64, 73.99, 198.64, 411.09), "kerple": (23.95, 22.56, 21.72, 21.32, 21.33, 21.58),
    "rope": (23.66, 22.26, 41.40, 114.77, 220.56, 375.62), "learned": (24.94, 23.53),
    "sinusoidal": (25.18, 23.73, 172.33, 607.48, 1348.23, 2017.42)}
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)

# TRA, Table 1: exact match in % on iid, dense, sparse
TRA_TABLE1 = {
    "nope": (100, 0.15, 99.97), "learned": (100, 27.38, 90.61), "t5": (100, 41.2, 70.48), "rope": (100, 100, 72.82),
    "label": (100, 12.58, 86.93), "fox": (100, 100, 93.4), "diff": (100, 100, 77.8), "cope": (100, 100, 95.1), "tra": (100, 100, 100)}
# CoPE, Table 7: error in % in distribution and out of it; the row's name is dimension, layers, heads
COPE_TABLE7 = {
    "cope 256/4/4": (0.03, 4.9), "cope 256/2/4": (0.0, 13.2), "cope 256/4/2": (0.0, 3.0), "cope 256/2/2": (0.0, 14.6),
    "cope 128/4/4": (0.2, 33.2), "cope 128/2/4": (0.03, 22.3), "cope 128/4/2": (0.03, 14.5), "cope 128/2/2": (0.02, 24.5),
    "learned, hard attention": (50.7, 49.1), "cope_mlp": (0.03, 5.9), "alibi 1": (0.0, 11.4),
    "alibi 1/4": (0.0, 8.7), "alibi 1/16": (0.0, 17.1), "alibi learned": (0.0, 11.4)}
NORMS = {f"{m} {norm}{' qk-norm' * qk}": f"--model {m} --norm {norm} --{'' if qk else 'no-'}qk_norm"
         for m in ("tra", "fox", "cope", "rope") for norm in ("pre", "post") for qk in (True, False)}
# CoPE's flip-flop setting (appendix C): 10,000 steps, linear decay; "batch size 16" on 8 GPUs is read as 16 on each
COPE_FLIPFLOP = "--data flipflop --size paper --max_iters 10000 --batch_size 128 --learning_rate 3e-4 --lr_decay linear --beta2 0.999"


def seeds(n, *models, flags=""):
    """{model: (its train.py flags, how many seeds)}"""
    return {m: (f"--model {m} {flags}".strip(), n) for m in models}


def cope_table7(divide, n):
    """The rows of CoPE's Table 7 with the dimension divided; n seeds where the paper gives a spread."""
    def flags(model, C=256, L=4, H=4):
        return f"--model {model} --n_embd {C // divide} --n_layer {L} --n_head {H}"
    rows = {f"cope {C}/{L}/{H}": (flags("cope", C, L, H), n if (C, L, H) == (256, 4, 4) else 1)
            for C in (256, 128) for L in (4, 2) for H in (4, 2)}
    rows |= {"learned, hard attention": (flags("learned_hard"), 1), "cope_mlp": (flags("cope_mlp"), 1)}
    for name, m in (("1", 1), ("1/4", 1 / 4), ("1/16", 1 / 16)):
        rows[f"alibi {name}"] = flags("cope_alibi") + " --slopes " + ",".join(str(m / 2**h) for h in range(4)), n
    return rows | {"alibi learned": (flags("cope_alibi"), n)}


# What each entry runs: train.py's and eval.py's flags for all its rows, and {row: (train.py's flags for it, seeds)}.
# columns: heading, split and metric of a synthetic task's table, in the order of the paper's numbers (all in %).
# Entries of one group share their runs.
ENTRIES = {
    "cable_table1": dict(
        about="CABLE, Table 1: perplexity far beyond the training length, every encoding on one backbone",
        paper=CABLE_TABLE1,
        cpu=dict(train="--size nano --data stdlib", eval="",
                 rows=seeds(3, "cable", "alibi", "rope") | seeds(1, "cable_nw", "k_cable", "nope", "learned", "sinusoidal", "t5", "kerple",
                                                                  "fire", "relative", "relative_capped", "label")),
        paper_scale=dict(train="--size tiny --data wikitext103 --max_iters 9000 --batch_size 64 --gradient_accumulation_steps 2",
                         eval="--tokens 0 --lengths " + " ".join(map(str, PAPER_LENGTHS)), rows=seeds(1, *CABLE_TABLE1, "k_cable")),
    ),
    "tra_table1": dict(
        about="TRA, Table 1: flip-flop, exact match (%)",
        paper=TRA_TABLE1, columns=[("iid", "iid", "exact_match"), ("dense", "dense", "exact_match"), ("sparse", "sparse", "exact_match")],
        cpu=dict(train="--data flipflop", eval="--sequences 2000",
                 rows=seeds(3, "tra", "cope", "fox", "rope", "cable") | seeds(1, "diff", "t5", "learned", "label", "nope", "alibi")),
        paper_scale=dict(train="--data flipflop --size paper", eval="--sequences 10000", rows=seeds(4, *reversed(TRA_TABLE1))),
    ),
    "tra_norm": dict(
        about="What of TRA's result is TRA, what post-norm and QK-norm? Flip-flop, exact match (%), at one budget; no paper has this table",
        paper={}, columns=[("iid", "iid", "exact_match"), ("dense", "dense", "exact_match"), ("sparse", "sparse", "exact_match")],
        cpu=dict(train="--data flipflop", eval="--sequences 2000", rows={label: (flags, 1) for label, flags in NORMS.items()}),
        paper_scale=dict(train="--data flipflop --size paper", eval="--sequences 10000",
                         rows={label: (flags, 2) for label, flags in NORMS.items()}),
    ),
    "cope_table2_flipflop": dict(
        about="CoPE, Table 2, left: flip-flop, error (%); the paper does not say whether of reads or of strings, these are wrong reads",
        paper={"learned": (6.8, 21.7), "rope": (1.8, 20.3), "cope": (0.0, 4.9)},
        columns=[("in distribution", "iid", "glitch_rate"), ("out (sparse)", "sparse", "glitch_rate")],
        cpu=dict(train="--data flipflop --lr_decay linear --beta2 0.999", eval="--sequences 2000",
                 rows=seeds(1, "cope", "rope", "learned")),
        paper_scale=dict(train=COPE_FLIPFLOP, eval="--sequences 10000", rows=seeds(3, "cope", "rope", "learned")),
    ),
    "cope_table2_copy": dict(
        about="CoPE, Table 2, right: selective copy, sequences with an error (%)",
        paper={"learned": (16.9, 25.6, 85.2), "rope": (40.1, 100, 100), "cope": (0.0, 0.0, 0.0)},
        columns=[("iid", "iid", "sequence_error"), ("dense", "dense", "sequence_error"), ("sparse", "sparse", "sequence_error")],
        cpu=dict(train="--data selective_copy", eval="--sequences 2000",
                 rows=seeds(1, "cope", flags="--P 64") | seeds(1, "rope", "learned")),
        paper_scale=dict(train="--data selective_copy --size paper", eval="--sequences 10000",
                         rows=seeds(3, "cope", flags="--P 512") | seeds(3, "rope", "learned")),
    ),
    "cope_table3": dict(
        about="CoPE, Table 3: counting with 1, 3 and 5 variables, wrong answers (%)", group="counting",
        paper={f"{m} {v} var": (y,) for m, ys in dict(cope=(0.0, 1.2, 7.4), relative=(1.1, 17.8, 22.4), learned=(5.3, 67.6, 71.5)).items()
               for v, y in zip((1, 3, 5), ys)},
        columns=[("in distribution", "iid", "answer_error")],
        cpu=dict(note="here one variable, programs of up to 32 operations, never the same one twice",
                 train="--data counting", eval="--sequences 2000",
                 rows={f"{m} 1 var": (f"--model {m} --vars 1", 1) for m in ("cope", "relative")}),
        paper_scale=dict(train="--data counting --size paper", eval="--sequences 10000",
                         rows={f"{m} {v} var": (f"--model {m} --vars {v}", 3) for v in (1, 3, 5) for m in ("cope", "relative", "learned")}),
    ),
    "cope_table4": dict(
        about="CoPE, Table 4: counting one variable with more or fewer passes than in training, wrong answers (%)", group="counting",
        paper={"cope 1 var": (0.0, 0.0, 4.0), "relative 1 var": (1.1, 8.8, 34.1)},
        columns=[("pass 50", "iid", "answer_error"), ("pass 100", "pass100", "answer_error"), ("pass 10", "pass10", "answer_error")],
        cpu=dict(train="--data counting", eval="--sequences 2000",
                 rows={f"{m} 1 var": (f"--model {m} --vars 1", 1) for m in ("cope", "relative")}),
        paper_scale=dict(train="--data counting --size paper", eval="--sequences 10000",
                         rows={f"{m} 1 var": (f"--model {m} --vars 1", 3) for m in ("cope", "relative")}),
    ),
    "cope_table7": dict(
        about="CoPE, Table 7: flip-flop, wrong reads (%), by dimension/layers/heads, and other ways to use the count (without the rows of "
              "absolute PE and RoPE by size, and of the MLP in the first layer alone: the paper does not say what its other layers have)",
        paper=COPE_TABLE7, columns=[("in distribution", "iid", "glitch_rate"), ("out (sparse)", "sparse", "glitch_rate")],
        cpu=dict(note="here with a quarter of the dimensions",
                 train="--data flipflop --lr_decay linear --beta2 0.999", eval="--sequences 2000",
                 rows=cope_table7(divide=4, n=1)),
        paper_scale=dict(train=COPE_FLIPFLOP, eval="--sequences 10000", rows=cope_table7(divide=1, n=3)),
    ),
}


# Random searches (Post-Norm, section 5.2): trials of every scheme, each panel another task. A panel is what its task needs, how many
# sequences make a batch, up to which length it is measured, and `at`: a figure's dots are means over these lengths (from, to).
# exact: trained on the target distribution itself, the mean of the samples that are drawn elsewhere: it needs far fewer steps.
def set_panels(batch_size, *pairs, **exact):
    return {f"n = {n}, trained on {L}{', p* itself' * bool(exact)}": dict(
        data="set_complement", n=n, block_size=L, batch_size=batch_size, longest=n - 1, at=(n // 2, n // 2), **exact) for n, L in pairs}


def dyck_panels(batch_size, *kinds):
    return {f"k = {k}, m = {m}, trained on {T}": dict(data="dyck", k=k, m=m, block_size=T, batch_size=batch_size,
                                                      longest=4 * T, at=(T + 1, 4 * T)) for k, m, T in kinds}


def tomita_panels(batch_size, T, longest):
    return {f"Tomita {n}, trained on {T}": dict(data="tomita", language=n, block_size=T, batch_size=batch_size, longest=longest,
                                                at=(T + 1, longest)) for n in (3, 7)}


MAX_PANEL = {"trained on 5 to 16": dict(data="max_retrieval", batch_size=128, longest=2**14, at=(1024, 1024))}
DYCK = dict(group="postnorm_dyck", schemes=model_postnorm.SCHEMES,
            cpu=dict(trials=8, steps=1000, panels=dyck_panels(32, (2, 3, 32)), note="here trained on 32 tokens"),
            paper_scale=dict(trials=100, steps=100000, panels=dyck_panels(64, (2, 3, 64), (8, 3, 64), (2, 5, 128), (8, 5, 128))))
SEARCHES = {
    "postnorm_fig1": dict(
        about="Post-Norm, Figure 1: set complement by minimal transformers, total variation distance, dots at length n / 2",
        metric="tvd", schemes=model_postnorm.SCHEMES, peak=3e-2,
        cpu=dict(trials=25, steps=20000,
                 panels=set_panels(32, (16, 1), (16, 2)) | set_panels(16, (16, 1), (16, 2), (64, 2), (64, 8), exact=True)),
        paper_scale=dict(trials=100, steps=100000, panels=set_panels(128, (16, 1), (16, 2), (16, 4), (64, 1), (64, 2), (64, 8)),
                         note="a tenth of the paper's steps"),
    ),
    "postnorm_fig2": dict(
        about="Post-Norm, Figure 2: max retrieval, accuracy, dots at 1,024 items",
        metric="accuracy", schemes=("none", "pre", "post", "peri"),
        cpu=dict(trials=8, steps=2000, panels=MAX_PANEL), paper_scale=dict(trials=100, steps=100000, panels=MAX_PANEL),
    ),
    "postnorm_fig3": DYCK | dict(
        about="Post-Norm, Figure 3: bounded Dyck languages, total variation distance, dots beyond the training length", metric="tvd"),
    "postnorm_fig4": dict(
        about="Post-Norm, Figure 4: Tomita languages, ROC AUC of the token that may be illegal, dots beyond the training length",
        metric="auc", schemes=model_postnorm.SCHEMES,
        cpu=dict(trials=8, steps=1000, panels=tomita_panels(16, 32, 147), note="here trained on 32 tokens and measured to 147"),
        paper_scale=dict(trials=100, steps=100000, panels=tomita_panels(64, 100, 460)),
    ),
    "postnorm_fig7": DYCK | dict(
        about="Post-Norm, Figure 7: bounded Dyck languages, ROC AUC of the end, dots beyond the training length", metric="auc"),
    "postnorm_theorem": dict(
        about="Post-Norm, Theorem 4.2: precision of minimal transformers by length, without a norm and with one on the attention output: "
              "formula, the hard-coded solutions, trained models",
        metric="precision", schemes=("none", "output"), peak=3e-2,
        cpu=dict(trials=8, steps=20000, panels=set_panels(16, (64, 2), exact=True)),
        paper_scale=dict(trials=100, steps=100000, panels=set_panels(128, (64, 2))),
    ),
}


def run(command, env):
    """One command, printed; the output of a failed one is shown. Raises RuntimeError when it fails."""
    print("$ " + shlex.join(command), flush=True)
    done = subprocess.run([sys.executable, *command[1:]], cwd=runs.ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def check(out, config, words):
    """The run in out must be the entry's: its flags, and the defaults of its task and model. After a change it is another experiment."""
    flags = {}
    for word in words:
        if word.startswith("--"):
            key, flags[key] = (word[5:], "False") if word.startswith("--no-") else (word[2:], "True")
        else:
            flags[key] = word
    (module, variant), task = runs.find_model(flags["model"]), runs.task_class(flags["data"])
    wanted = {f.name: f.default for cls in (module.GPTConfig, task) for f in dataclasses.fields(cls) if f.name != "vocab_size"}
    wanted |= task.defaults[flags.get("size", next(iter(task.defaults)))] | variant | flags | dict(data=runs.absolute(flags["data"]))
    for k, v in wanted.items():
        if k in config and str(config[k]) != str(v) and not (isinstance(config[k], float) and config[k] == float(v)):
            raise RuntimeError(f"{out} holds a run with {k}={config[k]}, the entry says {v}: move it away, and run this again")


def train_and_eval(out, flags, seed, scale, args, env):
    """One row of a table: out/{ckpt.pt,eval.json}, made now or already there. -> eval.json's dict."""
    device = ["--device", args.device] if args.device != "auto" else []
    start = ["python", "train.py", *flags.split(), *scale["train"].split(), "--seed", str(seed)]
    where = ["--out_dir", str(out), "--no-evaluate"]
    checkpoint = runs.load_checkpoint(out / "ckpt.pt") if (out / "ckpt.pt").exists() else None
    if checkpoint is None:
        shutil.rmtree(out, ignore_errors=True)  # killed before its first checkpoint
        run(start + where + device, env)
        checkpoint = runs.load_checkpoint(out / "ckpt.pt")
    check(out, checkpoint["config"], start[2:])
    if checkpoint["iter"] < checkpoint["config"]["max_iters"]:
        run(["python", "train.py", "--resume", str(out), "--no-evaluate", *device], env)
    evaluated, command = out / "eval.json", ["python", "eval.py", str(out), *scale["eval"].split(), *device]
    try:
        newer = evaluated.stat().st_mtime >= (out / "ckpt.pt").stat().st_mtime
        done = newer and json.loads(evaluated.read_text())["command"] == " ".join(command)
    except (OSError, ValueError, KeyError):  # not there, or half written
        done = False
    if not done:
        run(command, env)
    history = [[r["iter"], r["scores"]] for r in runs.read_log(out) if "scores" in r]
    found = json.loads(evaluated.read_text()) | dict(train_command=shlex.join(start), history=history)
    return found | dict(environment=checkpoint.get("environment", found["environment"]))  # where it was trained, and by which commit


# -----------------------------------------------------------------------------
# random search: many small models at once, stacked

def draw_trial(rng, peak=1e-2):
    """One trial's hyper-parameters. Post-Norm, appendix B, has this table, but its numbers are lost: these are ours."""
    def log_uniform(low, high):
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))
    beta1, beta2 = 1 - log_uniform(0.02, 0.2), 1 - log_uniform(1e-4, 1e-1)
    while beta1 >= beta2**0.5:
        beta1, beta2 = 1 - log_uniform(0.02, 0.2), 1 - log_uniform(1e-4, 1e-1)
    return dict(beta1=beta1, beta2=beta2, weight_decay=log_uniform(1e-4, 1), grad_clip=log_uniform(0.1, 10),
                learning_rate=log_uniform(1e-4, peak), warmup=log_uniform(1e-3, 1e-1),
                final=float(rng.random() < 0.5) * log_uniform(1e-3, 1e-1),  # of the peak, at the end
                eta=rng.uniform(0.1, 1), rho=log_uniform(1, 1e3), kappa=rng.uniform(0.3, 1))


def small_model(task, scheme):
    """The paper's model for a task: minimal transformer, max retrieval, or a GPT of 2 layers, 4 heads, 64 channels and RoPE."""
    if task.data == "set_complement":
        return model_postnorm.MinimalTransformer(task.n, task.n - 1, 1, task.n - 1, scheme)
    if task.data == "max_retrieval":
        return model_postnorm.MaxRetrieval(scheme, task.classes)
    return model_postnorm.GPT(model_postnorm.GPTConfig(task.block_size, task.vocab_size, n_layer=2, n_embd=64, norm=scheme))


def stacked(model):
    """-> logits(weights (K, N), x): what K models of this shape answer to the same x, (K, ...)."""
    names, sizes = zip(*((n, p.numel()) for n, p in model.named_parameters()))
    shapes = [p.shape for p in model.parameters()]

    def one(row, x):
        found = functional_call(model, {n: w.view(s) for n, w, s in zip(names, row.split(sizes), shapes)}, (x,))
        return found[0] if isinstance(found, tuple) else found
    return vmap(one, in_dims=(0, None))


def fit(models, trials, batch, steps, device="cpu", tell=lambda step, losses: None):
    """
    Trains K models of one shape at once, model i with the hyper-parameters trials[i], all on the same batches: batch(step) -> x, y.
    AdamW, linear warmup and decay, as torch has them. -> logits(weights, x), weights (K, N), their BEMA (K, N).
    """
    logits = stacked(models[0].to(device))
    theta = torch.stack([parameters_to_vector(m.parameters()).detach().to(device) for m in models]).requires_grad_()
    matrix = torch.cat([torch.full((p.numel(),), float(p.dim() >= 2 and n not in ("E", "wte.weight")), device=device)
                        for n, p in models[0].named_parameters()])  # embeddings, gains and vectors do not decay
    h = {k: torch.tensor([[t[k]] for t in trials], device=device) for k in trials[0]}  # (K, 1)
    warmup = (h["warmup"] * steps).round().clamp(min=1)
    m, v, start, ema = torch.zeros_like(theta), torch.zeros_like(theta), theta.detach().clone(), theta.detach().clone()
    for step in range(1, steps + 1):
        x, y = (torch.from_numpy(a).to(device) for a in batch(step))
        theta.grad = None
        out = logits(theta, x)                                               # (K, ..., classes)
        p = y if y.is_floating_point() else F.one_hot(y, out.size(-1))       # a distribution, or a sample of it
        losses = -(out.log_softmax(-1) * p).sum(-1).flatten(1).mean(1)
        losses.sum().backward()
        with torch.no_grad():
            g = theta.grad * (h["grad_clip"] / (theta.grad.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)
            left = (steps - step) / (steps - warmup).clamp(min=1)
            lr = h["learning_rate"] * torch.minimum(step / warmup, h["final"] + (1 - h["final"]) * left.clamp(max=1))
            m.lerp_(g, 1 - h["beta1"])
            v.lerp_(g * g, 1 - h["beta2"])
            update = m / (1 - h["beta1"]**step) / ((v / (1 - h["beta2"]**step)).sqrt() + 1e-8)
            theta -= lr * (update + h["weight_decay"] * matrix * theta)
            ema.lerp_(theta, (h["rho"] + step)**-h["kappa"])
        if step % max(1, steps // 5) == 0:
            tell(step, losses)
    theta = theta.detach()
    return logits, theta, runs.bema_weights(dict(w=theta), dict(start=dict(w=start), ema=dict(w=ema)), steps, h)["w"]


@torch.no_grad()
def measure(task, logits, weights, sequences, rng, lengths=None, device="cpu"):
    """
    -> lengths [[first, last], ...] and {metric: (K, n) array}, on new sequences: TVD, AUC and precision at every position of the task's
    sequences, binned; accuracy at every given length.
    """
    found, K = {}, len(weights)
    for T in lengths or [task.block_size]:
        B = max(16, min(sequences, 2**19 // T))
        draw = task.batch(str(T) if lengths else "iid", B, rng)
        for x, y in zip(*(torch.from_numpy(a).to(device).split(max(1, 2**13 // (K * T))) for a in draw)):
            z = logits(weights, x)                                           # (K, B, T, vocab), or (K, B, classes)
            if lengths:
                found.setdefault(T, []).append(torch.where(z.isnan().any(-1), torch.nan, (z.argmax(-1) == y).float()))
                continue
            target = task.target(x)
            found.setdefault("tvd", []).append(tvd(z, target))
            if task.data == "set_complement":
                present, absent = z.masked_fill(target > 0, -torch.inf), z.masked_fill(target == 0, torch.inf)
                found.setdefault("precision", []).append(absent.amin(-1) - present.amax(-1))
            if hasattr(task, "contrast"):
                for name, value in zip(("score", "good"), task.contrast(z, x)):  # (K, B, T) and (B, T)
                    found.setdefault(name, []).append(value)
    if lengths:
        return [[T, T] for T in lengths], dict(accuracy=np.stack([torch.cat(found[T], 1).mean(1).cpu().numpy() for T in lengths], 1))
    score, good = (found.pop(k, None) for k in ("score", "good"))
    curves = {k: torch.cat(v, 1).mean(1).cpu().numpy() for k, v in found.items()}
    if score:
        good = torch.cat(good).cpu().numpy()
        curves["auc"] = np.stack([auc(one, good) for one in torch.cat(score, 1).cpu().numpy()])
    edges = [*range(0, task.block_size, 1 if task.block_size < 64 else max(2, task.block_size // 64 * 2)), task.block_size]
    return [[a + 1, b] for a, b in zip(edges, edges[1:])], {k: binned(v, edges) for k, v in curves.items()}


def search(panel, scheme, n, steps, peak, seed, sequences, path, device, threads, tell):
    """
    n trials of one scheme on one panel's task -> a dict for the JSON, also kept at path: it is not run again with the same settings
    and as many trials or fewer.
    """
    settings = dict(panel=panel, scheme=scheme, steps=steps, peak=peak, seed=seed, sequences=sequences)
    try:
        found = json.loads(path.read_text())
        if found["settings"] == json.loads(json.dumps(settings)) and len(found["trials"]) >= n:
            return found | dict(trials=found["trials"][:n])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or half written
        pass
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")  # no TF32
    task, begin, models = runs.make_task(panel), time.time(), []
    far = runs.make_task(panel | dict(block_size=panel["longest"]))
    sets = {} if getattr(task, "tokens", True) else dict(
        validation=[panel["at"][0]], test=[T for T in map(int, task.splits[2:]) if T <= panel["longest"]])
    trials = [draw_trial(np.random.default_rng([seed, i]), peak) for i in range(n)]  # the same for every scheme
    for i in range(n):
        torch.manual_seed((seed << 20) + i)
        models.append(small_model(task, scheme))

    def say(step, losses):
        print(f"  {tell}, {scheme}: step {step:,} of {steps:,}, {time.time() - begin:.0f} s, "
              f"median training loss {losses.nanmedian().item():.4f}", flush=True)

    def batch(step):
        x, y = task.batch("train", panel["batch_size"], np.random.default_rng([seed, step]))
        return x, task.target(torch.from_numpy(x)).numpy() if panel.get("exact") else y
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be stacked
        logits, theta, bema = fit(models, trials, batch, steps, device, say)
        seconds = time.time() - begin
        rows = [dict(hyperparameters=t, finite=bool(w.isfinite().all())) for t, w in zip(trials, theta)]
        for name, weights in dict(raw=theta, bema=bema).items():
            for kind in ("validation", "test"):  # the best trial is chosen on the first, its number is from the second
                rng = np.random.default_rng([seed, 1 << 40, kind == "test"])
                lengths, measured = measure(far, logits, weights, sequences, rng, sets.get(kind), device)
                at = [i for i, (a, b) in enumerate(lengths) if panel["at"][0] <= a and b <= panel["at"][1]]
                for metric, values in measured.items():
                    for row, y, dot in zip(rows, values, binned(values[:, at], [0, len(at)])[:, 0]):
                        kept = row.setdefault(metric, {}).setdefault(name, {})
                        kept[kind] = None if np.isnan(dot) else float(dot)
                        kept["by_length"] = [None if np.isnan(v) else round(float(v), 6) for v in y]
    found = dict(settings=settings, environment=runs.environment(), seconds=round(seconds, 1), lengths=lengths, trials=rows)
    runs.write_json(path, found)
    return found


def best_trial(trials, metric, weights):
    """The trial that is best on the validation sequences; None where every one has diverged."""
    sign = 1 if metric == "tvd" else -1
    known = [t for t in trials if None not in (t[metric][weights]["validation"], t[metric][weights]["test"])]
    return min(known, key=lambda t: sign * t[metric][weights]["validation"], default=None)


def random_search(args, entry, scale, folder):
    """All panels and schemes of one entry -> its result, for the JSON."""
    sequences, n = 512, args.trials or scale["trials"]
    device, threads = str(runs.pick_device(args.device)), max(1, torch.get_num_threads() // args.jobs)
    todo = [(name, panel, scheme) for name, panel in scale["panels"].items() for scheme in entry["schemes"]]
    calls = [(panel, scheme, n, scale["steps"], entry.get("peak", 1e-2), 1337, sequences,
              folder / (re.sub("[^a-z0-9]+", "-", f"{name} {scheme}".lower()) + ".json"), device, threads, name)
             for name, panel, scheme in todo]
    if args.jobs == 1:
        found = [search(*call) for call in calls]
    else:
        with ProcessPoolExecutor(args.jobs, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            workers = pool._processes
            try:
                found = [f.result() for f in [pool.submit(search, *call) for call in calls]]
            except BaseException as e:  # Ctrl-C, or a worker that was killed: what is finished is kept
                for worker in list(workers.values()):
                    worker.terminate()
                pool.shutdown(cancel_futures=True)
                if isinstance(e, BrokenProcessPool):
                    runs.fail("a worker process was killed (out of memory?); run this again, with fewer --jobs")
                raise
    panels = {}
    for (name, panel, scheme), f in zip(todo, found):
        p = panels.setdefault(name, dict(panel, name=name, lengths=f["lengths"], schemes={}))
        p["schemes"][scheme] = dict(seconds=f["seconds"], environment=f["environment"], trials=[
            {k: v for k, v in t.items() if k in ("hyperparameters", "finite", entry["metric"], "tvd")} for t in f["trials"]])
    return dict(environment=found[0]["environment"], metric=entry["metric"], steps=scale["steps"], trials=n, sequences=sequences,
                panels=list(panels.values()))


def theorem(n=64, gap=10.0, sequences=64):
    """
    Theorem 4.2 at lengths 2 ... n - 1, scaled to a precision of `gap` at 2: the formula's precision, and what the hard-coded models
    have, with their TVD -> {norm: {name: [...]}}.
    """
    assert n <= 64  # beyond, measure would bin
    task, found, lengths = runs.make_task(dict(data="set_complement", n=n, block_size=n - 1)), {}, np.arange(2, n)
    for norm, formula in (("none", 1 / lengths), ("output", np.sqrt(n * (n - 1) / (lengths * (n - lengths))))):
        c = gap / formula[0]
        model = model_postnorm.hard_coded(n, c, norm, centred=norm == "output")
        _, measured = measure(task, lambda _, x, model=model: model(x)[None], [0], sequences, np.random.default_rng(0))
        found[norm] = dict(formula=(c * formula).tolist(), **{k: y[0, 1:].tolist() for k, y in measured.items()})
    return dict(n=n, lengths=lengths.tolist(), models=found)


# -----------------------------------------------------------------------------
# tables

def table(result):
    """A result's JSON -> markdown: mean +- standard deviation over the seeds, the paper's number beside it."""
    return (search_table if "panels" in result else task_table if "columns" in result else text_table)(result)


def search_table(result):
    """The dots of a random search: median and best of every scheme, raw and BEMA."""
    metric = result["metric"]
    name = dict(tvd="TVD", auc="AUC", accuracy="accuracy", precision="precision")[metric]
    text = [f"| {name} at length | scheme | trials | diverged | median | best | median, BEMA | best, BEMA |", "|---" * 8 + "|"]
    for panel in result["panels"]:
        a, b = panel["at"]
        for scheme, found in panel["schemes"].items():
            cells = []
            for weights in ("raw", "bema"):
                known = [y for t in found["trials"] if (y := t[metric][weights]["test"]) is not None]
                best = best_trial(found["trials"], metric, weights)
                cells += [f"{statistics.median(known):.4f}" if known else "-", f"{best[metric][weights]['test']:.4f}" if best else "-"]
            where = f"{a:,}" + f" to {b:,}" * (b > a)
            text.append(f"| {panel['name']}, at {where} | {scheme} | {len(found['trials'])} | "
                        f"{sum(not t['finite'] for t in found['trials'])} | {' | '.join(cells)} |")
    if "theorem" in result:
        t = result["theorem"]
        lengths = [length for length in (2, 8, 32, t["n"] - 1) if length < t["n"]]
        text += ["", f"Hard-coded models, n = {t['n']}, precision (TVD) at length:", "",
                 f"| norm | {' | '.join(map(str, lengths))} | largest difference from the formula |", "|---" * (len(lengths) + 2) + "|"]
        for norm, m in t["models"].items():
            cells = [f"{m['precision'][length - 2]:.2f} ({m['tvd'][length - 2]:.3f})" for length in lengths]
            far = max(abs(a - b) for a, b in zip(m["formula"], m["precision"]))
            text.append(f"| {norm} | {' | '.join(cells)} | {far:.1e} |")
    return "\n".join(text)


def task_table(result):
    """Rates in %. A row of one seed has the 95 % interval that its test sequences allow."""
    rows, paper = {}, result["paper"]
    for r in result["runs"]:
        rows.setdefault(r["label"], []).append(r)
    heads = [h for name, *_ in result["columns"] for h in ([name, "paper"] if paper else [name])]
    text = ["| model | seeds | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for label, rs in rows.items():
        cells = []
        for n, (_, split, metric) in enumerate(result["columns"]):
            found = [scores[split][metric] for r in rs for scores in r["scores"].values() if split in scores]
            ys = [100 * f["value"] for f in found]
            cell = "-" if not ys else f"{statistics.mean(ys):.2f}"
            if len(ys) > 1:
                cell += f" ± {statistics.stdev(ys):.2f}"
            elif ys:
                cell += f" [{100 * found[0]['low']:.2f}, {100 * found[0]['high']:.2f}]"
            cells += [cell, f"{paper[label][n]:g}" if label in paper else "-"] if paper else [cell]
        text.append(f"| {label} | {len(rs)} | {' | '.join(cells)} |")
    return "\n".join(text)


def text_table(result):
    """Perplexity by window length."""
    lengths, paper, rows = result["lengths"], result["paper"], {}
    for r in result["runs"]:
        rows.setdefault(r["model"], []).append(r)
    T = result["runs"][0]["block_size"]
    text = ["| model | seeds | " + " | ".join(f"{n:,}" for n in lengths) + f" | {lengths[-1]:,} / {T:,} | paper: 15,360 / 1,024 |",
            "|---" * (len(lengths) + 4) + "|"]
    for model, rs in rows.items():
        cells = []
        for n in map(str, lengths):
            ys = [r["perplexity"][n] for r in rs if n in r["perplexity"]]
            cells.append("-" if not ys else f"{statistics.mean(ys):.3f}" + (f" ± {statistics.stdev(ys):.3f}" if len(ys) > 1 else ""))
        ratio = [r["perplexity"][str(lengths[-1])] / r["perplexity"][str(T)] for r in rs if str(lengths[-1]) in r["perplexity"]]
        ratio = f"{statistics.mean(ratio):.3f}" if ratio else "-"
        theirs = paper.get(model, ())
        theirs = f"{theirs[5] / theirs[1]:.3f}" if len(theirs) > 5 else "-"
        text.append(f"| {model} | {len(rs)} | {' | '.join(cells)} | {ratio} | {theirs} |")
    return "\n".join(text)


def write_page():
    """results/README.md: every result's command, hardware and table, from the JSON files beside it."""
    page = ["# Results", "", "Written by `reproduce.py` from the JSON files beside this page. ± is the standard deviation over the seeds; "
            "a row of one seed has no spread, or in brackets the 95 % interval of its test sequences.", ""]
    for path in sorted((runs.ROOT / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "entry" not in result:
            continue
        e = result["environment"]
        if "panels" in result:
            groups = [g for p in result["panels"] for g in p["schemes"].values()]
            fewer = " (fewer of more than 1,024 items)" * (result["metric"] == "accuracy")
            minutes = sum(g["seconds"] for g in groups) / 60
            how = (f"{result['steps']:,} steps, {result['trials']} trials of every scheme, the same hyper-parameters for all schemes, "
                   f"{result['sequences']:,} sequences{fewer}; {minutes:,.0f} minutes of training in all, of one "
                   "process. The best trial is chosen on other sequences than its number is from.")
        else:
            groups = result["runs"]
            n = result.get("sequences") or result["tokens"]
            unit = "sequences a split" if "sequences" in result else f"tokens of {result['split']}"
            how = f"{result['data']['source']}, {n:,} {unit}. Each row is `{groups[0]['train_command']}` and so on, then `eval.py`."
        commits = ", ".join(sorted({g["environment"]["commit"] for g in groups}))
        page += [f"## {path.stem}", "", f"{result['about']}.", "", "```", result["command"], "```", "",
                 f"{e['gpu'] or e['cpu']}, {e['threads']} thread{'s' * (e['threads'] > 1)} a run, torch {e['torch']}, "
                 f"Python {e['python']}, commit {commits}; {how}", "", table(result), ""]
        if path.with_suffix(".png").exists():
            page += [f"![{path.stem}]({path.with_suffix('.png').name})", ""]
        if path.with_suffix(".steps.png").exists():
            page += [f"![by training step]({path.with_suffix('.steps.png').name})", ""]
    runs.write_safely(runs.ROOT / "results" / "README.md", lambda tmp: tmp.write_text("\n".join(page)))


def trainings(args, entry, scale, folder):
    """All rows of one entry, trained and evaluated -> its result, for the JSON."""
    todo = [(label, flags, 1337 + s) for label, (flags, n) in scale["rows"].items() for s in range(args.seeds or n)]
    env = os.environ | ({"OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs))} if args.jobs > 1 else {})

    def one(row):
        label, flags, seed = row
        return train_and_eval(folder / f"{label}-{seed}".replace(" ", "-").replace("/", "_"), flags, seed, scale, args, env)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(one, m) for m in todo]
        try:
            evals = [f.result() for f in futures]
        except BaseException as e:  # a failed command, or Ctrl-C: what runs is saved, what waits does not begin
            pool.shutdown(cancel_futures=True)
            if isinstance(e, RuntimeError):
                runs.fail(e)
            raise
    shared = ("environment", "dtype", "data", "split", "tokens", "lengths", "splits", "sequences")
    result = {k: evals[0][k] for k in shared if k in evals[0]} | {k: entry[k] for k in ("paper", "columns") if k in entry}
    return result | dict(runs=[e["runs"][0] | dict(label=label, **{k: e[k] for k in ("train_command", "environment", "history") if e[k]})
                               for (label, *_), e in zip(todo, evals)])


def main():
    parser = runs.make_parser(__doc__)
    parser.add_argument("entry", nargs="?", help="which table or figure; without it, the list")
    parser.add_argument("--scale", default="cpu", choices=["cpu", "paper"],
                        help="cpu: minutes a run on two cores; paper: the paper's sizes, for a GPU (default: cpu)")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of every model; default: as the entry says")
    parser.add_argument("--trials", type=int, default=0, help="of every scheme in a random search; default: as the entry says")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    args = runs.parse(parser)
    entries = ENTRIES | SEARCHES
    if args.entry is None:
        for name, e in entries.items():
            print(f"{name}\n    {e['about']}")
            for scale in ("cpu", "paper"):
                todo = e["cpu" if scale == "cpu" else "paper_scale"]
                how = (f"{todo['trials']:3} trials of {len(e['schemes'])} schemes, {todo['steps']:,} steps: {'; '.join(todo['panels'])}"
                       if name in SEARCHES else
                       f"{sum(n for _, n in todo['rows'].values()):3} runs of: train.py --model ... {todo['train']}")
                print(f"    --scale {scale:6} {how}")
        return
    if args.entry not in entries:
        runs.fail(f"unknown entry {args.entry!r}: {runs.nearest(args.entry, entries)}")
    if args.jobs < 1 or args.seeds < 0 or args.trials < 0:
        runs.fail("--jobs must be at least 1, --seeds and --trials 0 or more")
    searching = args.entry in SEARCHES
    for flag, kind in (("seeds", searching), ("trials", not searching)):
        if getattr(args, flag) and kind:
            runs.fail(f"--{flag} is not for {args.entry}, which has {'trials' if searching else 'seeds'}")
    entry = entries[args.entry]
    scale = entry["cpu" if args.scale == "cpu" else "paper_scale"]
    name = f"{args.entry}.{args.scale}"
    os.chdir(runs.ROOT)
    folder = Path("out") / f"{entry.get('group', args.entry)}.{args.scale}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            runs.fail(f"another reproduce.py is at work in {folder}; wait for it")
        result = (random_search if searching else trainings)(args, entry, scale, folder)
    command = f"python reproduce.py {args.entry} --scale {args.scale}"
    command += f" --seeds {args.seeds}" * bool(args.seeds) + f" --trials {args.trials}" * bool(args.trials)
    result |= dict(entry=args.entry, about=", ".join(filter(None, (entry["about"], scale.get("note")))), command=command)
    if args.entry == "postnorm_theorem":
        result["theorem"] = theorem()
    Path("results").mkdir(exist_ok=True)
    runs.write_json(f"results/{name}.json", result)
    failed = runs.script("plot.py", "trials" if searching else "scores" if "columns" in entry else "lengths", f"results/{name}.json")
    if "columns" in entry:
        failed = runs.script("plot.py", "errors", f"results/{name}.json") or failed
    write_page()
    print(table(result) + f"\n\nwrote results/{name}.json and results/README.md")
    sys.exit(failed)


if __name__ == "__main__":
    runs.run(main)
