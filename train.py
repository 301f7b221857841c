"""
Train any model on any task.

    python train.py --model cable                          the default: 4 minutes on two CPU cores
    python train.py --model rope --data my_notes/          a rival, on your own text
    python train.py --model cable --help                   every flag, this model's own included
    python train.py --resume out/cable-stdlib-nano         continue after Ctrl-C or a power cut
    torchrun --nproc_per_node 8 train.py --model cable --size small --data fineweb_edu

Step t draws its data from (seed, t) alone, its dropout from these and the process's number, so a
resumed run sees what an uninterrupted one would have seen. batch_size counts the sequences of all
processes together, so more GPUs see the same data. (Each process's mean loss counts alike, however
many tokens it scored.) Ctrl-C saves and exits with 130.
"""
import argparse
import inspect
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import get_type_hints

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
import runs

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@dataclass
class TrainConfig:
    model: str = "cable"          # a name from the VARIANTS of any model_*.py
    init_from: str = ""           # begin with the weights of this run, of the same model
    size: str = "nano"            # preset; text: nano tiny small medium; tasks: nano paper
    batch_size: int = 16          # sequences per micro-step, all processes together
    gradient_accumulation_steps: int = 1  # micro-steps per optimizer step
    max_iters: int = 1000         # optimizer steps; after lr_decay_iters the rate stays as it is
    learning_rate: float = 1e-3   # peak
    min_lr: float = 1e-4          # at the end of the decay
    warmup_iters: int = 100       # linear warmup from 0
    lr_decay: str = "cosine"      # cosine, linear or none
    lr_decay_iters: int = 0       # steps until min_lr is reached; 0 is max_iters
    weight_decay: float = 0.1     # on tensors with two or more dimensions
    beta1: float = 0.9            # AdamW
    beta2: float = 0.95           # AdamW
    grad_clip: float = 1.0        # largest gradient norm; 0 is no clipping
    bema: bool = False            # also keep BEMA weights (Post-Norm, 4.5), for eval.py --bema
    rho: float = 10.0             # BEMA: lag, added to the step t before both powers
    kappa: float = 0.5            # BEMA: weight (rho + t)^-kappa in the average; 0: last weights
    eta: float = 0.2              # BEMA: correction (rho + t)^-eta; large: no correction, plain EMA
    seed: int = 1337              # of weights, data and dropout


@dataclass
class RunConfig:
    out_dir: str = ""             # for checkpoints and log; default out/<model>-<data>-<size>
    log_interval: int = 10        # steps between log lines; every validation has one, too
    eval_interval: int = 250      # steps between validations, each followed by a checkpoint
    eval_iters: int = 20          # batches per validation, of every split
    evaluate: bool = True         # afterwards, run eval.py (on text sample.py, too) on the result
    device: str = "auto"          # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: str = "auto"           # auto (bfloat16 on a GPU that has it), float32, bfloat16
    compile: str = "auto"         # torch.compile: auto (on with cuda), on, off; a CPU needs g++
    kernel: str = "auto"          # auto (a faster attention that equals the model's own), off


# what settings must be, in words and as a test
AT_LEAST_1 = "at least 1, and less than 2^31", lambda x: 1 <= x < 1 << 31
NOT_NEGATIVE = "0 or more, and less than 2^31", lambda x: 0 <= x < 1 << 31
BELOW_1 = "in [0, 1)", lambda x: 0 <= x < 1
NUMBER = "between -2^31 and 2^31", lambda x: not isinstance(x, int | float) or abs(x) < 1 << 31
RULES = dict(
    batch_size=AT_LEAST_1, gradient_accumulation_steps=AT_LEAST_1, max_iters=AT_LEAST_1,
    eval_interval=AT_LEAST_1, eval_iters=AT_LEAST_1, log_interval=AT_LEAST_1,
    block_size=AT_LEAST_1, query_size=AT_LEAST_1, max_vocab=AT_LEAST_1,
    n_layer=("at least 1, and at most 10000", lambda x: 1 <= x <= 10000),
    n_head=AT_LEAST_1, n_embd=AT_LEAST_1,
    max_tokens=("0 (all) or more, and less than 2^53", lambda x: 0 <= x < 1 << 53),
    dropout=BELOW_1, beta1=BELOW_1, beta2=BELOW_1, weight_decay=NOT_NEGATIVE,
    learning_rate=("more than 0, and finite", lambda x: 0 < x < math.inf), min_lr=NOT_NEGATIVE,
    warmup_iters=NOT_NEGATIVE, lr_decay_iters=NOT_NEGATIVE, grad_clip=NOT_NEGATIVE,
    rho=AT_LEAST_1, kappa=("between 0 and 1", lambda x: 0 <= x <= 1), eta=NOT_NEGATIVE,
    seed=("between 0 and 8388607", lambda x: 0 <= x < 1 << 23),
    lr_decay=("one of cosine, linear, none", lambda x: x in LR_DECAY),
    compile=("one of auto, on, off", lambda x: x in ("auto", "on", "off")),
)
# how much of the way from learning_rate to min_lr is done after a share x of the decay
LR_DECAY = dict(cosine=lambda x: 0.5 - 0.5 * math.cos(math.pi * x), linear=lambda x: x,
                none=lambda x: 0.0)
# what a resumed run may change: where it runs, how it reports and how far it goes, never what it
# computes; also --data or --corpus, if a text has moved: its tokens are compared
MAY_CHANGE = ("device", "compile", "kernel", "max_iters", "eval_interval", "eval_iters",
              "log_interval", "evaluate")
SHARED = {"block_size", "vocab_size"}  # settings of the model and of the data
CXX = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch has it
COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.M)  # behind a dataclass field: a flag's help


# -----------------------------------------------------------------------------
# settings

def fresh(argv):
    """
    -> a new run's settings; no checkpoint, no folder yet. Precedence: a flag; what the model's name
    means in VARIANTS (a flag may change its numbers); the task's defaults; the dataclasses'.
    """
    early = runs.make_parser(add_help=False)  # these three decide which other flags there are
    for flag, default in (("--model", None), ("--data", "stdlib"), ("--size", None)):
        early.add_argument(flag, default=default)
    asked, _ = early.parse_known_args(argv)
    if "" in (asked.model, asked.data, asked.size):
        runs.fail("--model, --data and --size need a value")
    try:
        task = data.find(asked.data)
    except ValueError as e:
        runs.fail(e)
    if task.kind == "numbers":
        runs.fail(f"{asked.data} is numbers, not tokens: no model here takes them")
    size = asked.size or next(iter(task.defaults))
    if size not in task.defaults:
        runs.fail(f"unknown size {size!r}: {runs.nearest(size, task.defaults)}")
    models, usual = runs.models(), task.defaults[size].get("model", TrainConfig.model)
    module, variant = models[asked.model or usual]
    if getattr(module.GPT, "is_encoder", False) != task.for_encoders:
        wrong_direction(asked.data, task)

    # a flag for every field, the comment behind the field its help
    parser, settings, kinds = runs.make_parser(description=__doc__), {}, {}
    parser.add_argument("--resume", metavar="DIR", default=argparse.SUPPRESS,
                        help="continue the run in this folder")
    parser.usage = "python train.py [--flag VALUE ...]"
    groups = dict(model=module.GPTConfig, data=task, training=TrainConfig, run=RunConfig)
    for title, cls in groups.items():
        group = parser.add_argument_group(f"{title} ({Path(inspect.getfile(cls)).name})")
        types, comments = get_type_hints(cls), {}
        kinds |= types
        for base in reversed(cls.__mro__[:-1]):  # object has none
            comments |= dict(COMMENT.findall(Path(inspect.getfile(base)).read_text()))
        for field in fields(cls):
            if types[field.name] not in (bool, int, float, str):
                runs.fail(f"{field.name} of {title} has to be a bool, int, float or str: a flag")
            if field.name in (settings.keys() - SHARED) | {"help", "resume"}:
                runs.fail(f"two groups have a flag --{field.name}: rename the model's or task's")
            if field.name not in settings and field.name != "vocab_size":
                about = comments.get(field.name, "").replace("%", "%%") + " (default: %(default)s)"
                kind = dict(type=types[field.name], metavar="X")
                if types[field.name] is bool:
                    kind = dict(action=argparse.BooleanOptionalAction)
                group.add_argument(f"--{field.name}", help=about, **kind)
            settings[field.name] = field.default

    preset = task.defaults[size] | variant | dict(size=size)
    parser.set_defaults(**settings | {k: v for k, v in preset.items() if k in settings})
    c = parser.parse_args(argv)
    check_defaults(c, kinds, task)
    c.lr_decay_iters = c.lr_decay_iters or c.max_iters
    return c, None, None


def check_defaults(c, kinds, task):
    """A task's defaults may be for flags that only some models have; all are of the flag's type."""
    models = runs.models()
    known = set(kinds).union(*(m.GPTConfig.__dataclass_fields__ for m, _ in models.values()))
    for name in task.defaults[c.size]:
        if name not in known and not models.broken:
            file = Path(inspect.getfile(task)).name
            runs.fail(f"data/{file}: defaults sets {name!r}, which is no flag")
    for name, value in vars(c).items():  # argparse has checked those of flags
        if type(value) is not kinds[name] and (type(value), kinds[name]) != (int, float):
            runs.fail(f"{name}={value!r} is no {kinds[name].__name__}: change its default")


def wrong_direction(name, task):
    """
    Fails: on a causal task an encoder would see the answer, on an encoder's task a causal model
    would miss what comes after.
    """
    names = [name for name, (module, _) in runs.models().items()
             if runs.is_encoder(module.GPT) == task.for_encoders]
    kind = "an encoder, which reads both ways" if task.for_encoders else "a causal model"
    runs.fail(f"{name} needs {kind}: choose from {', '.join(names)}")


def resume(argv):
    """-> a saved run's settings with what flags change of them, its last checkpoint, its folder."""
    early = runs.make_parser(add_help=False)
    early.add_argument("--resume")
    asked, _ = early.parse_known_args(argv)
    if not asked.resume:
        runs.fail("--resume needs a run's folder")
    path = runs.find_checkpoint(asked.resume)
    checkpoint = runs.load_checkpoint(path)
    saved = asdict(TrainConfig()) | asdict(RunConfig()) | checkpoint["config"]
    try:
        runs.check_types(saved, get_type_hints(TrainConfig) | get_type_hints(RunConfig))
    except ValueError as e:
        runs.fail(f"{path} cannot be used: {e}")

    # every setting is a flag; help shows those that may change
    parser = runs.make_parser(description=__doc__)
    parser.usage = "python train.py --resume DIR [--flag VALUE ...]"
    parser.add_argument("--resume", metavar="DIR", help="continue the run in this folder")
    comments = dict(COMMENT.findall(Path(__file__).read_text()))
    may_change, text_flag = dict.fromkeys(MAY_CHANGE, ""), runs.text_flag(saved)
    if checkpoint["source"]:
        may_change[text_flag] = "where the text lies now"
    for name, value in saved.items():
        about = argparse.SUPPRESS
        if name in may_change:
            about = comments.get(name, may_change[name]) + " (so far: %(default)s)"
        kind = dict(type=type(value), metavar="X")
        if isinstance(value, bool):
            kind = dict(action=argparse.BooleanOptionalAction)
        parser.add_argument(f"--{name}", help=about, **kind)
    parser.set_defaults(**saved)
    c = parser.parse_args(argv)
    del c.resume
    for name, value in saved.items():
        now = getattr(c, name)
        if now != value and name not in may_change:
            runs.fail(f"--{name} {now} contradicts the run being resumed, which has "
                      f"{name}={value}; leave it out")
    if not any(word.split("=")[0] == f"--{text_flag}" for word in argv):
        runs.check_text(path, checkpoint, text_flag)
    runs.warn_of_code(path, checkpoint)
    if c.max_iters < checkpoint["iter"]:
        runs.fail(f"--max_iters {c.max_iters}: the run is at iter {checkpoint['iter']} already")
    return c, checkpoint, path.parent


def check_rules(c, resuming):
    """A setting out of its range, or against the model's name, fails in one line."""
    for name, value in vars(c).items():
        words, fits = RULES.get(name, NUMBER)
        if not fits(value):
            runs.fail(f"--{name} must be {words}")
    if resuming:
        return
    for name, value in runs.models()[c.model][1].items():
        if isinstance(value, str | bool) and getattr(c, name) != value:  # a number may be tuned
            runs.fail(f"{name}={getattr(c, name)}: what is called --model {c.model} has {value}")
    if c.lr_decay != "none" and c.min_lr > c.learning_rate:
        runs.fail(f"--min_lr {c.min_lr} is more than --learning_rate {c.learning_rate}: lower it, "
                  "too")


# -----------------------------------------------------------------------------
# log and evaluation

def report(state, c, loss, lr, length, clock, logged, log):
    """A log line about the steps since `logged` and the time `clock`. -> the step and time now"""
    it, now = state["iter"], time.time()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    loss = loss.item()
    if not math.isfinite(loss):
        runs.fail(f"the loss is {loss} at iter {it}; try a lower --learning_rate. The checkpoints "
                  "are as they were")
    steps, took = it - logged, now - clock
    rate = steps * c.gradient_accumulation_steps * c.batch_size * length / took
    left = int((c.max_iters - it) * took / steps)
    state["seconds"] += took
    print(f"iter {it}/{c.max_iters} | loss {loss:.4f} | lr {lr:.2e} | {rate:,.0f} tok/s | "
          f"eta {left // 60}m{left % 60:02d}s", flush=True)
    row = dict(iter=it, loss=loss, lr=lr, tok_s=round(rate), seconds=round(state["seconds"], 2))
    log.write(json.dumps(row) + "\n")
    return it, now


@torch.no_grad()
def validate(model, task, c, device, context):
    """
    -> dict(val_loss=the mean loss over the same eval_iters batches of the first split after the
    training split, every time), and for a task also scores={split: {metric: value}}, on as many
    batches of every split. best.pt goes by the loss: that split is like the training split. Under
    torchrun every process does all of it.
    """
    def batches(n, split):
        rng = np.random.default_rng([c.seed, (1 << 40) + n])
        for _ in range(c.eval_iters):
            x, y = task.batch(split, c.batch_size, rng)
            yield torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)

    model.eval()
    splits, losses = task.splits[1:], []
    for x, y in batches(0, splits[0]):
        with context:
            loss = task.loss(model, x, y) if task.loss else model(x, y)[1]
        losses.append(loss.item())
    found = dict(val_loss=sum(losses) / len(losses))
    if task.kind == "symbols":
        found["scores"] = {}
        for n, split in enumerate(splits):
            totals = {}
            for x, y in batches(n, split):
                try:
                    with context:
                        logits = model(x)[0]
                except ValueError as e:  # an encoding that ends before this split's sequences do
                    runs.complaint(e)
                    break
                for metric, (count, out_of) in task.score(logits, x, y).items():
                    a, b = totals.get(metric, (0, 0))
                    totals[metric] = a + count.sum().item(), b + out_of.sum().item()
            found["scores"][split] = {m: a / max(b, 1) for m, (a, b) in totals.items()}
    model.train()
    return found


def validate_and_log(model, state, task, c, device, context, log):
    """Validate the last weights, and their BEMA where it is kept. -> whether they are the best."""
    it, bema = state["iter"], state.get("bema")
    try:
        found = validate(model, task, c, device, context)
    except ValueError as e:  # an encoding that ends before this split's sequences do
        runs.fail(e)
    if bema:
        last = copy_weights(model)
        model.load_state_dict(runs.bema_weights(last, bema, it, vars(c)), strict=False)
        found["bema"] = validate(model, task, c, device, context)
        model.load_state_dict(last, strict=False)
        loss = found["bema"]["val_loss"]
        print(f"iter {it}/{c.max_iters} | val loss {loss:.4f} with the BEMA weights")
    words = f"iter {it}/{c.max_iters} | val loss {found['val_loss']:.4f}"
    for split, scores in found.get("scores", {}).items():
        if scores:
            words += f" | {split}"
        for metric, value in scores.items():
            words += f" {metric} {value:.4f}"
    print(words, flush=True)
    log.write(json.dumps(dict(iter=it) | found) + "\n")
    best = found["val_loss"] < state["best_val_loss"]
    if best:
        state["best_val_loss"] = found["val_loss"]
    return best


def final_evaluation(out, c, task):
    """eval.py, and sample.py on text, each in a process of its own. -> their exit code."""
    more = []
    for name in ("device", "dtype", "kernel"):
        if getattr(c, name) != "auto":
            more += [f"--{name}", getattr(c, name)]
    # a run that has seen little is scored on little
    eighth = c.max_iters * c.gradient_accumulation_steps * c.batch_size // 8
    flag, usual = runs.SCORED[task.kind]
    enough = max(dict(text=64, symbols=100, pairs=50)[task.kind], eighth)
    if task.kind == "text":
        enough *= c.block_size
    less = [f"--{flag}", enough] if enough < usual else []
    failed = runs.script("eval.py", out, *less, *more)
    if task.kind == "text":
        unwritten = runs.script("sample.py", out, "--max_new_tokens", 2 * c.block_size, *more)
        failed = failed or unwritten
    return failed


# -----------------------------------------------------------------------------
# checkpoints

def save(out, best, model, optimizer, state):
    """
    All that a resumed run needs in ckpt.pt, the best so far in best.pt. A full disk or a kill
    leaves the files that were there.
    """
    if not all(p.isfinite().all() for p in model.parameters()):
        runs.fail(f"the weights are not finite at iter {state['iter']}; try a lower "
                  f"--learning_rate. {out}'s checkpoints are as they were")
    module, _ = runs.models()[state["config"]["model"]]
    checkpoint = state | dict(model=model.state_dict(), optimizer=optimizer.state_dict(),
                              environment=runs.environment(), code_version=runs.code_of(module))
    copies = 5 if "bema" in state else 3  # weights and two moments; BEMA has two more
    size = copies * sum(p.nbytes for p in model.parameters())
    for name in ("best.pt", "ckpt.pt") if best else ("ckpt.pt",):
        runs.write_safely(out / name, lambda tmp: torch.save(checkpoint, tmp), size)


def restore(checkpoint, out, model, optimizer, state, rank):
    """Everything as it was saved. The log loses the lines that are newer than the checkpoint."""
    if checkpoint["source"] != state["source"]:
        flag = runs.text_flag(state["config"])
        runs.fail(f"the text behind --{flag} {state['config'][flag]} has changed since {out} was "
                  "trained on it")
    had, has = checkpoint["config"]["vocab_size"], state["config"]["vocab_size"]
    if had != has:
        runs.fail(f"{state['config']['data']} has {has} tokens now, {out} was trained on {had}")
    model.load_state_dict(checkpoint["model"])
    load_optimizer(optimizer, checkpoint, out)
    state |= {name: checkpoint[name] for name in ("iter", "best_val_loss", "seconds")}
    for when, weights in state.get("bema", {}).items():
        kept = checkpoint.get("bema", {}).get(when, {})
        if kept.keys() != weights.keys():
            runs.fail(f"the BEMA weights in {out} do not fit its model")
        for name, x in kept.items():
            weights[name].copy_(x)
    if not rank and (out / "log.jsonl").exists():
        rows = [row for row in runs.read_log(out) if row["iter"] <= state["iter"]]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        runs.write_safely(out / "log.jsonl", lambda tmp: tmp.write_text(text))


def task_and_model(c, module, checkpoint, device, world):
    """-> both, with what they take over from the checkpoint that is resumed, or --init_from."""
    first = checkpoint
    if c.init_from and not checkpoint:
        path = runs.find_checkpoint(c.init_from)
        first = runs.load_checkpoint(path)
        runs.warn_of_code(path, first)
    try:
        task = data.make(vars(c), first["kept"] if first else ())
        c.data, c.vocab_size = task.data, task.vocab_size
        if "corpus" in c:
            c.corpus = task.corpus  # a path is absolute now
        if c.batch_size < task.least_batch * world:
            runs.fail(f"this task needs a --batch_size of at least {task.least_batch} for each "
                      "process")
        torch.manual_seed(c.seed)
        shape = {f.name: getattr(c, f.name) for f in fields(module.GPTConfig) if f.name in c}
        model = module.GPT(module.GPTConfig(**shape)).to(device)
        if first and not checkpoint:
            begin_with(model, first, c)
        if task.begin and not checkpoint:
            task.begin(model)
    except ValueError as e:
        runs.fail(e)
    for name, x in model.state_dict().items():  # else no checkpoint of it could be loaded
        if not x.is_floating_point() or not x.isfinite().all():
            runs.fail(f"{name} of --model {c.model} has to be finite floats. A buffer can be left "
                      "out of checkpoints: register_buffer(..., persistent=False)")
    if not isinstance(task.kept, dict):
        runs.fail(f"what --data {c.data} keeps has to be a dict of int64 tensors")
    for name, x in task.kept.items():
        if getattr(x, "dtype", None) != torch.int64:
            runs.fail(f"what --data {c.data} keeps as {name!r} has to be an int64 tensor")
    return task, model


def begin_with(model, first, c):
    """The weights of the run `first` into a new one of the same model and tokens."""
    shapes = [{name: x.shape for name, x in weights.items()}
              for weights in (model.state_dict(), first["model"])]
    free = {"dropout", "block_size"} if shapes[0] == shapes[1] else {"dropout"}
    # what is to blame comes first: the model, and last block_size, where nothing else is
    order = {"model": 0, "block_size": 2}
    for name, theirs in sorted(first["config"].items(), key=lambda kv: order.get(kv[0], 1)):
        ours = getattr(model.config, name, theirs)
        if name in ("model", "tokenizer"):
            ours = getattr(c, name, theirs)
        if ours != theirs and name not in free:
            runs.fail(f"--init_from {c.init_from}: its {name} is {theirs}, the new run's {ours}")
    if shapes[0] != shapes[1]:  # by a setting that is newer than the run
        runs.fail(f"--init_from {c.init_from}: its weights are not of the new run's shapes")
    model.load_state_dict(first["model"])


def load_optimizer(optimizer, checkpoint, out):
    """Its moments and step counts; learning rate, betas and decay come from the settings."""
    groups = optimizer.state_dict()["param_groups"]
    try:
        optimizer.load_state_dict(dict(state=checkpoint["optimizer"]["state"], param_groups=groups))
        for p, moments in optimizer.state.items():
            if {moments[name].shape for name in ("exp_avg", "exp_avg_sq")} != {p.shape}:
                raise ValueError("shapes")
    except (ValueError, LookupError, TypeError, AttributeError):
        runs.fail(f"the optimizer's state in {out} does not fit the weights")


def another_folder(out, c):
    """
    The usual folder is in use: the first free of out-2, out-3, ... A folder named by --out_dir that
    has a checkpoint is an error; without one its run ended before the first, and starts again.
    """
    if c.out_dir and (out / "ckpt.pt").exists():
        runs.fail(f"{out} already holds a run; continue it with --resume {out}, or name another "
                  "--out_dir")
    if c.out_dir:
        return out
    for n in itertools.count(2):
        other = out.with_name(f"{out.name}-{n}")
        try:
            other.mkdir(exist_ok=True)
            if not (other / "ckpt.pt").exists():
                (other / "log.jsonl").touch(exist_ok=False)
                return other
        except FileExistsError:  # a run that has just begun, or a file
            continue


def copy_weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# -----------------------------------------------------------------------------
# several processes, under torchrun

def start_processes(c, device):
    """
    -> this process' number and how many there are. Only the first, number 0, speaks and writes; it
    prepares the data, which the others then find ready.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if c.batch_size % world:
        runs.fail(f"--batch_size {c.batch_size} does not divide among {world} processes")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=2))  # preparing can take hours
    if rank:
        sys.stdout = open(os.devnull, "w")
    else:
        print(f"{world} processes")
        runs.make_task({name: value for name, value in vars(c).items() if name != "vocab_size"})
    dist.barrier()
    return rank, world


def agreed(stop, device):
    """Whether a signal came. It reaches the processes at different steps: all stop, or none."""
    if not dist.is_initialized():
        return bool(stop)
    stops = torch.tensor(len(stop), device=device)
    dist.all_reduce(stops)
    return bool(stops)


def finish(c, task, out, state, rank, stop):
    """The end of a run: leave the group of processes, then score what was trained."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, ended)
    # Nobody leaves early: gloo's threads in another process could wait for ever. And the group
    # outlives DistributedDataParallel (see main), which as its last owner would wait for a thread
    # while it holds Python's lock, which that thread may need.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if state["iter"] < c.max_iters:
        print(f"interrupted after iter {state['iter']}, saved; "
              f"continue with: python train.py --resume {out}")
        sys.exit(130)
    if rank:
        return
    best = ", best.pt the best" if (out / "best.pt").exists() else ""
    print(f"trained {state['iter']} iters in {state['seconds']:.0f} s, best val loss "
          f"{state['best_val_loss']:.4f}; {out}/ckpt.pt is the last{best}")
    if stop:  # an interrupt during the last evaluation
        sys.exit(130)
    if c.evaluate:
        failed = final_evaluation(out, c, task)
        if failed:
            sys.exit(failed)


# -----------------------------------------------------------------------------

def main(argv=None):
    # settings: of a new run, or of a saved one
    argv = sys.argv[1:] if argv is None else argv
    resuming = any(word.split("=")[0] == "--resume" for word in argv)
    c, checkpoint, out = resume(argv) if resuming else fresh(argv)
    check_rules(c, resuming)

    # where it runs: in one process, or in one of several under torchrun
    device, context, where = runs.setup(c)
    compiling = c.compile == "on" or (c.compile == "auto" and device.type == "cuda")
    if compiling and device.type == "cpu" and not shutil.which(CXX):
        runs.fail(f"--compile on: there is no {CXX} here; set CXX to your C++ compiler's name")
    rank, world = start_processes(c, device) if "RANK" in os.environ else (0, 1)

    # data and model
    module, _ = runs.models()[c.model]
    task, raw_model = task_and_model(c, module, checkpoint, device, world)

    # optimizer: matrices and embeddings decay; gains, biases and scalars do not
    wide = [p for p in raw_model.parameters() if p.dim() >= 2]
    rest = [p for p in raw_model.parameters() if p.dim() < 2]
    groups = [dict(params=wide, weight_decay=c.weight_decay), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2), eps=1e-8,
                                  fused=device.type in ("cpu", "cuda"))

    # what it has so far, and a folder of its own, locked until this process ends
    state = dict(config=vars(c), source=task.source, kept=task.kept, iter=0,
                 best_val_loss=math.inf, seconds=0.0)
    if c.bema:
        state["bema"] = dict(start=copy_weights(raw_model), ema=copy_weights(raw_model))
    if not checkpoint and not rank:
        usual = runs.ROOT / "out" / f"{c.model}-{Path(c.data).name}-{c.size}"
        out = Path(c.out_dir or os.path.relpath(usual))
        out.mkdir(parents=True, exist_ok=True)
        try:
            if (out / "ckpt.pt").exists():  # whose log may be gone
                raise FileExistsError
            (out / "log.jsonl").touch(exist_ok=False)
        except FileExistsError:
            out = another_folder(out, c)
    if fcntl and not rank:  # before anything in it is changed
        lock = open(out / "lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if checkpoint:
        restore(checkpoint, out, raw_model, optimizer, state, rank)
    log = open(os.devnull if rank else out / "log.jsonl", "a" if checkpoint else "w", buffering=1)

    # compiled, and shared by the processes
    model = torch.compile(raw_model) if compiling else raw_model
    if world > 1:
        model = DistributedDataParallel(model)

    # say what runs
    groups = dict(model=module.GPTConfig, data=type(task), training=TrainConfig, run=RunConfig)
    for title, cls in groups.items():
        words = " ".join(f"{f.name}={getattr(c, f.name)}" for f in fields(cls) if f.name in c)
        print(textwrap.fill(f"{title:9} {words}", 100, subsequent_indent=" " * 10))
    print(f"{sum(p.numel() for p in raw_model.parameters()):,} parameters on {where}"
          f"{', torch.compile' if compiling else ''}")
    print(f"writing to {out}, from iter {state['iter']}", flush=True)

    # the loop; Ctrl-C and kill only ask for its end
    stop, clock, logged = [], time.time(), state["iter"]
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda *_: stop.append(1))
    for it in range(state["iter"], c.max_iters):
        # learning rate: linear warmup, then decay to min_lr
        if it < c.warmup_iters:
            lr = c.learning_rate * (it + 1) / c.warmup_iters
        else:
            done = (it - c.warmup_iters) / max(1, c.lr_decay_iters - c.warmup_iters)
            decayed = LR_DECAY[c.lr_decay](min(1.0, done))
            lr = c.learning_rate + decayed * (c.min_lr - c.learning_rate)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # gradients: data, dropout and random labels follow from (seed, it) and the process
        rng = np.random.default_rng([c.seed, it])
        torch.manual_seed((c.seed << 40) + (it << 12) + rank)
        loss = torch.zeros((), device=device)
        for micro in range(1, c.gradient_accumulation_steps + 1):
            batch = task.batch(task.splits[0], c.batch_size, rng)
            x, y = (torch.from_numpy(a[rank::world]).to(device) for a in batch)
            if world > 1:  # gradients are shared once a step
                model.require_backward_grad_sync = micro == c.gradient_accumulation_steps
            try:
                with context:
                    part = task.loss(model, x, y) if task.loss else model(x, y)[1]
                    part = part / c.gradient_accumulation_steps
            except ValueError as e:  # an encoding that ends before the sequences do
                runs.fail(e)
            part.backward()
            loss += part.detach()

        # step
        if c.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state["iter"] = it + 1
        if c.bema:
            runs.update_ema(state["bema"], raw_model, it + 1, vars(c))

        # log
        stopping = agreed(stop, device)
        validating = (it + 1) % c.eval_interval == 0 or it + 1 == c.max_iters
        if (it + 1) % c.log_interval == 0 or validating or stopping:
            logged, clock = report(state, c, loss, lr, x.size(1), clock, logged, log)

        # validation
        best = validating and validate_and_log(raw_model, state, task, c, device, context, log)

        # saving
        if (validating or stopping) and not rank:
            save(out, best, raw_model, optimizer, state)
            clock = time.time()  # the time until here was not training
        if stopping:
            break
    model = raw_model  # what wrapped it for several processes must end before their group does
    finish(c, task, out, state, rank, stop)


def ended(*_):
    """Of SIGTERM: what is half done is removed, and the evaluation that runs ends, too."""
    sys.exit(143)


if __name__ == "__main__":
    sys.excepthook = runs.in_one_line
    signal.signal(signal.SIGTERM, ended)
    main()
