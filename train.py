"""
Train any model on any task.

    python train.py --model cable                          the default: minutes on two CPU cores
    python train.py --model rope --data my_notes/          a rival, on your own text
    python train.py --model cable --help                   every flag, this model's own included
    python train.py --resume out/cable-stdlib-nano         continue after Ctrl-C or a power cut
    torchrun --nproc_per_node 8 train.py --model cable --size small --data fineweb_edu

Step t draws its data from (seed, t) alone, its dropout from these and the process's number: a
resumed run goes on as if uninterrupted, on a CPU to the bit. batch_size counts the sequences of all
processes together: more GPUs see the same data. Ctrl-C saves and exits with 130; two only exit.
"""
import gc
import math
import os
import shlex
import sys
import textwrap
import time
from collections import Counter
from dataclasses import asdict, fields
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common import names
from common.batches import batches
from common.bema import BEMA
from common.checkpoint import find_checkpoint, load_checkpoint, load_weights, plain
from common.device import environment, setup
from common.exits import asked_to_stop, fail, in_one_line, say, script, value_errors_fail
from common.files import write_safely
from common.log import in_words, open_log, report
from common.settings import check, configs, first_flags, new_settings, resumed_settings


def get_lr(c, it):
    """Linear warmup, then decay to min_lr."""
    if it < c.warmup_iters:
        return c.learning_rate * (it + 1) / c.warmup_iters
    t = min(1.0, (it - c.warmup_iters) / max(1, c.lr_decay_iters - c.warmup_iters))
    way = dict(cosine=0.5 - 0.5 * math.cos(math.pi * t), linear=t, none=0.0)[c.lr_decay]
    return c.learning_rate + way * (c.min_lr - c.learning_rate)  # how much of the way is done


@torch.no_grad()
def validate(model, task, c, device, context, asked):
    """
    -> dict(val_loss=the mean loss of the first validation split) and, if the task has scores,
    scores={split: {metric: value}}: over the same batches every time. None if asked to stop.
    """
    model.eval()
    torch.manual_seed(c.seed)  # some models draw positions
    losses, scores = [], {}
    for n, split in enumerate(task.validation_splits):
        rng = np.random.default_rng([c.seed, (1 << 40) + n])  # of no step of training
        hits, trials = Counter(), Counter()
        for _ in range(c.eval_iters):
            if asked():
                return None
            x, y = (part.to(device) for part in task.tensors(split, c.batch_size, rng))
            try:
                with context:
                    logits, loss = task.forward(model, x, y)
            except ValueError:  # positions that end before the sequences of a test split do
                if n == 0:
                    raise
                break
            if n == 0:
                losses.append(loss.item())
            for metric, (count, out_of) in task.score(logits, x, y).items():
                hits[metric] += count.sum().item()
                trials[metric] += out_of.sum().item()
        scores[split] = {metric: hits[metric] / max(trials[metric], 1) for metric in hits}
    model.train()
    row = dict(val_loss=sum(losses) / len(losses))
    return row | dict(scores=scores) if any(scores.values()) else row


# -----------------------------------------------------------------------------
# before the loop

def settings_of(argv):
    """-> the settings of a new run, or of the one that --resume names; its folder; what it saved"""
    folder = first_flags(argv).resume
    if folder is not None:
        path = find_checkpoint(folder)
        saved = load_checkpoint(path)
        if "optimizer" not in saved:
            fail(f"{path} has weights alone: begin a new run with --init_from {path.parent} "
                 f"--model {saved['config']['model']}, and its norms")
        return resumed_settings(saved, argv, __doc__), path.parent, saved
    c = new_settings(argv, __doc__)
    out = Path(c.out_dir or f"out/{c.model}-{Path(c.data).resolve().name}-{c.size}").expanduser()
    if (out / "ckpt.pt").exists():
        fail(f"{out} holds a run: continue it with --resume {out}, or name another --out_dir")
    return c, out, None


def start_processes(c, device):
    """-> this process' number and how many there are: one, or under torchrun several."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return 0, 1
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if c.batch_size % world:
        fail(f"--batch_size {c.batch_size} does not divide among {world} processes")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=2))  # preparing text takes hours
    if rank:  # the first one speaks and writes
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    return rank, world


def task_and_model(c, saved, device, rank, world):
    """-> both, with what they take over from the run that is resumed, or from --init_from."""
    origin = saved
    if c.init_from and not saved:
        origin = load_checkpoint(find_checkpoint(c.init_from))
        for name in ("tokenizer", "n_head", "norm", "qk_norm", "step", "gate_bias", "base",
                     "rotary_share"):  # shapes do not show these
            theirs, ours = origin["config"].get(name), getattr(c, name, None)
            if None not in (theirs, ours) and theirs != ours:  # symbols have no tokenizer
                fail(f"--init_from {c.init_from}: its {name} is {theirs}, not {ours}")
    if rank:
        dist.barrier()  # the first one prepares the data
    task = names.make_task(vars(c), origin and origin["kept"])
    if world > 1 and not rank:
        dist.barrier()
    if saved and task.source != saved["source"]:
        fail("the text has changed since the run was trained on it; begin a new run, with "
             "--init_from to keep its weights")
    vars(c).update(asdict(task))  # the task may have changed its fields: a path is absolute now
    c.vocab_size = task.vocab_size
    vars(c).update({name: plain(name, value) for name, value in vars(c).items()})
    torch.manual_seed(c.seed)
    model = names.make_model(vars(c)).to(device)
    if origin:
        load_weights(model, origin["model"], c.init_from or "the checkpoint")
    if not saved:
        with value_errors_fail():
            task.prepare(model)
    for name, value in task.state().items():
        if not torch.is_tensor(value):
            fail(f"{type(task).__module__}: {name} in state() must be a tensor, not {type(value)}")
    return task, model


def compiled(function, device):
    """A function under torch.compile, or as it is where there is no Triton, or no C++ compiler."""
    try:
        torch.compile(lambda x: x.sin())(torch.ones(2, device=device))
        return torch.compile(function)
    except Exception as e:  # torch and its compilers have many
        why = f"{type(e).__name__}: {next(filter(None, str(e).splitlines()), '')}"
        say(f"torch.compile does not work here, so training goes on without it ({why[:200]})")
        return function


def show_settings(c, task, model, where):
    for title, cls in configs(sys.modules[type(model).__module__], type(task)).items():
        words = " ".join(f"{f.name}={getattr(c, f.name)}" for f in fields(cls))
        say(textwrap.fill(f"{title:9} {words}", 100, subsequent_indent=" " * 10))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {where}")
    if hasattr(task, "streams"):
        tokens = c.max_iters * c.gradient_accumulation_steps * c.batch_size * c.block_size
        passes = tokens / len(task.streams["train"])
        say(f"{tokens:,} tokens = {passes:.1f} passes over this text")
        if passes > 10:
            say("more than 10 passes: a model learns its text by heart; add text, or take fewer "
                "--max_iters")


def train(c, out, saved):
    """The whole run -> whether its result is to be scored here, and its task."""
    device, context, where = setup(c)
    rank, world = start_processes(c, device)
    task, raw_model = task_and_model(c, saved, device, rank, world)

    # optimizer: matrices and embeddings decay, the rest does not
    wide = [p for p in raw_model.parameters() if p.dim() >= 2]
    rest = [p for p in raw_model.parameters() if p.dim() < 2]
    groups = [dict(params=wide, weight_decay=c.weight_decay), dict(params=rest, weight_decay=0.0)]
    with value_errors_fail():
        optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=(c.beta1, c.beta2),
                                      eps=1e-8, fused=True)
    average = BEMA(raw_model, c.rho, c.kappa, c.eta) if c.bema else None

    # resume: all as it was saved
    start, best_val_loss, seconds, due = 0, math.inf, 0.0, False
    if saved:
        due = saved.get("due", False)  # a validation that was cut short
        start, best_val_loss, seconds = saved["iter"], saved["best_val_loss"], saved["seconds"]
        optimizer.load_state_dict(saved["optimizer"])
        if average:
            average.load(**saved["bema"])
    log = open(os.devnull, "w") if rank else open_log(out, start)

    # compiled, and shared
    model = raw_model
    if c.compile == "on" or (c.compile == "auto" and device.type == "cuda"):
        model = compiled(raw_model, device)
    show_settings(c, task, raw_model, where + (", torch.compile" if model is not raw_model else ""))
    if world > 1:
        model = DistributedDataParallel(model)
    say(f"writing to {out}, from iter {start}")

    # the loop: validate and save if due, then step; Ctrl-C, kill, a closed terminal ask for its end
    it, logged, clock, stopping = start, start, time.monotonic(), False
    finite = torch.zeros((), device=device)
    stream, readable = batches(task, c, start, device, rank, world), False
    with asked_to_stop() as asked, log:
        while True:
            # validate
            files = ["ckpt.pt"] if due or stopping else []
            if due and not stopping:
                cut = asked if world == 1 else lambda: False  # all processes stop, or none
                row = validate(raw_model, task, c, device, context, cut)  # uncompiled: lengths vary
                stopping = due = row is None  # if it was cut short, the resumed run begins with it
                if not due:
                    report(f"iter {it}/{c.max_iters} | {in_words(row)}", log, dict(iter=it) | row)
                    if row["val_loss"] < best_val_loss:
                        best_val_loss = row["val_loss"]
                        files.insert(0, "best.pt")  # first: ckpt.pt knows of it

            # save
            if files and not rank:
                state = dict(
                    config=vars(c), source=task.source, kept=task.state(), iter=it, due=due,
                    seconds=seconds, best_val_loss=best_val_loss, model=raw_model.state_dict(),
                    optimizer=optimizer.state_dict(), environment=environment())
                if average:
                    state["bema"] = dict(start=average.start, ema=average.ema)
                for name in files:
                    write_safely(out / name, partial(torch.save, state))
                    readable = readable or bool(load_checkpoint(out / name))
                clock = time.monotonic()  # the time until here was not training
            if stopping or it == c.max_iters:
                break

            micro_batches, lr = next(stream), get_lr(c, it)
            for group in optimizer.param_groups:
                group["lr"] = lr

            # gradients: dropout follows from (seed, it) and the process
            torch.manual_seed((c.seed << 40) + (it << 12) + rank)
            loss = torch.zeros((), device=device)
            for micro, (x, y) in enumerate(micro_batches, 1):
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                if world > 1:  # gradients are shared once a step
                    model.require_backward_grad_sync = micro == len(micro_batches)
                with context:
                    part = task.forward(model, x, y)[1] / len(micro_batches)
                part.backward()
                loss += part.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip or math.inf)

            # is it time to log, to validate, to stop?
            it += 1
            stopping = asked()
            if world > 1:  # signals come at different steps: all stop, or none, and all wait
                shared = torch.stack([loss, loss.new_tensor(stopping)])
                dist.all_reduce(shared)
                loss, stopping = shared[0] / world, bool(shared[1])
            due = it % c.eval_interval == 0 or it == c.max_iters
            logging = it % c.log_interval == 0 or due or stopping

            # step; a GPU has to wait where we read a number, so we do that where we log one
            finite += loss + norm  # a sum that is not finite, once one of them was not
            if (logging or device.type == "cpu") and not finite.isfinite():
                advice = "a lower --learning_rate may help" if it > 1 else "before any step"
                fail(f"loss {loss:.4g}, norm of its gradient {norm:.4g}: not finite by iter {it}; "
                     f"{advice}")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if average:
                average.update(raw_model, it)

            # log
            if logging:
                steps, took = it - logged, time.monotonic() - clock
                seconds += took
                row = dict(iter=it, loss=loss.item(), lr=lr, seconds=round(seconds, 2))
                words = f"iter {it}/{c.max_iters} | loss {loss:.4f} | lr {lr:.2e}"
                if logged > start:  # the first interval has the compilation in it
                    tokens = steps * len(micro_batches) * c.batch_size * x.size(1)
                    row["tok_s"] = round(tokens / took)
                    left = int((c.max_iters - it) * took / steps)
                    words += f" | {row['tok_s']:,} tok/s | eta {left // 60}m{left % 60:02d}s"
                report(words, log, row)
                logged, clock = it, time.monotonic()
        stopping |= asked()

    # the end: all processes leave together, and DDP before its process group
    model = raw_model
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if stopping:
        run = shlex.quote(str(out))
        say(f"interrupted after iter {it}, saved; continue with: python train.py --resume {run}")
        sys.exit(130)
    say(f"trained {it} iters in {seconds:.0f} s, best val loss {best_val_loss:.4f}; "
        f"{out}/ckpt.pt is the last, best.pt the best")
    return c.evaluate and not rank, task


def main(argv=None):
    c, out, saved = settings_of(sys.argv[1:] if argv is None else argv)
    check(c)
    score, task = train(c, out, saved)
    if score:
        del saved  # with the model and its optimizer: what follows may need all of the memory
        gc.collect()
        torch.cuda.empty_cache()
        told = [flag for flag in ("device", "dtype", "kernel") if getattr(c, flag) != "auto"]
        words = [f"--{flag}={getattr(c, flag)}" for flag in told]
        script("eval.py", out, *words)
        if task.encoding:
            script("sample.py", out, "--max_new_tokens", 2 * c.block_size, *words)


if __name__ == "__main__":
    sys.excepthook = in_one_line
    main()
