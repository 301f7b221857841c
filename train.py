"""
Train any model on any task.

    python train.py --model cable                          the default: 4 minutes on two CPU cores
    python train.py --model rope --data my_notes/          a rival, on your own text
    python train.py --model cable --help                   every flag, this model's own included
    python train.py --resume out/cable-stdlib-nano         go on after Ctrl-C, a kill or a power cut
    torchrun --nproc_per_node 8 train.py --model cable --size small --data fineweb_edu

Step t draws its data and its dropout from (seed, t) alone, so a resumed run sees what an uninterrupted one would have
seen; batch_size counts the sequences of all processes together, so more GPUs see the same data.
Ctrl-C saves and exits with 130.
"""
import itertools
import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import runs


@dataclass
class TrainConfig:
    model: str = "cable"          # a name from any model_*.py: cable cable_nw k_cable rope alibi nope ...
    size: str = "nano"            # preset of model and training sizes; the task has them
    out_dir: str = ""             # where checkpoints and log.jsonl go; default out/<model>-<data>-<size>
    batch_size: int = 16          # sequences per micro-step, all processes together
    gradient_accumulation_steps: int = 1  # micro-steps per optimizer step
    max_iters: int = 1000         # optimizer steps
    learning_rate: float = 1e-3   # peak
    min_lr: float = 1e-4          # at the end of the decay
    warmup_iters: int = 100       # linear warmup from 0
    lr_decay: str = "cosine"      # cosine, linear or none
    lr_decay_iters: int = 0       # steps until min_lr is reached; 0 is max_iters
    weight_decay: float = 0.1     # on tensors with two or more dimensions
    beta1: float = 0.9            # AdamW
    beta2: float = 0.95           # AdamW
    grad_clip: float = 1.0        # largest gradient norm; 0 is no clipping
    bema: bool = False            # keep BEMA weights besides (Post-Norm, 4.5); validated here, used by eval.py and sample.py --bema
    rho: float = 10.0             # BEMA: lag
    kappa: float = 0.5            # BEMA: power of the average, 0 to 1; 0 does not average
    eta: float = 0.2              # BEMA: power of the bias correction; large is plain EMA
    eval_interval: int = 250      # steps between validations, each followed by a checkpoint
    eval_iters: int = 20          # batches per validation
    log_interval: int = 10        # steps between log lines
    seed: int = 1337              # of weights, data and dropout
    device: str = "auto"          # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: str = "auto"           # auto (bfloat16 on a GPU that has it), float32, bfloat16
    compile: str = "auto"         # torch.compile: auto (on with cuda), on, off
    kernel: str = "auto"          # Triton attention: auto (on with cuda, where the model has one), off
    evaluate: bool = True         # afterwards, run eval.py and sample.py on the result

    def __post_init__(self):
        for name in ("batch_size", "gradient_accumulation_steps", "max_iters", "eval_interval", "eval_iters", "log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1")
        for name in ("min_lr", "weight_decay", "grad_clip", "warmup_iters", "lr_decay_iters"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name} must be 0 or more")
        if not self.learning_rate > 0:
            raise ValueError("--learning_rate must be more than 0")
        if not (self.rho >= 1 and 0 <= self.kappa <= 1 and 0 <= self.eta < float("inf")):
            raise ValueError("--rho must be at least 1, --kappa between 0 and 1, --eta 0 or more")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("--beta1 and --beta2 must be in [0, 1)")
        if not 0 <= self.seed < 1 << 23:
            raise ValueError("--seed must be between 0 and 8388607")
        for name, known in (("lr_decay", ("cosine", "linear", "none")), ("compile", ("auto", "on", "off")), ("kernel", ("auto", "off"))):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: choose from {', '.join(known)}")


# what a resumed run may change: where and how it runs and reports, and how far it goes, never what it computes
# (data may have moved: its tokens are checked)
MAY_CHANGE = {"data", "device", "compile", "kernel", "max_iters", "eval_interval", "eval_iters", "log_interval", "evaluate"}


def resolve(argv):
    """
    Flags -> (config, checkpoint or None, folder). config is one flat dict:
    flag > what the model's name means > the task's defaults > the dataclass; in a resumed run, what it began with.
    """
    parser = runs.make_parser(__doc__)
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    early = runs.make_parser(None)
    for flag in ("resume", "model", "data", "size"):
        early.add_argument(f"--{flag}")
    early = vars(early.parse_known_args([a for a in argv if a not in ("-h", "--help")])[0])
    early = {k: v for k, v in early.items() if v is not None}
    if "" in early.values():
        runs.fail("--resume, --model, --data and --size need a value")
    checkpoint = None
    if "resume" in early:
        path = runs.find_checkpoint(early["resume"])
        checkpoint = runs.load_checkpoint(path)
        early = checkpoint["config"] | {k: v for k, v in early.items() if k == "data"}
    module, variant = runs.find_model(early.get("model", TrainConfig.model))
    task = runs.task_class(early.get("data", "stdlib"))
    if not getattr(task, "tokens", True):
        runs.fail(f"{early['data']} is numbers, not tokens, and has a model of its own; see python reproduce.py")
    size = early.get("size", next(iter(task.defaults)))
    if size not in task.defaults:
        runs.fail(f"unknown size {size!r}: {runs.nearest(size, task.defaults)}")
    config = {"size": size} | task.defaults[size] | variant
    groups = {"training": TrainConfig, f"model ({module.__name__}.py)": module.GPTConfig, f"data ({task.__module__})": task}
    seen = {"vocab_size"}
    for title, cls in groups.items():
        runs.add_flags(parser, title, cls, config, skip=seen)
        seen |= {f for f in cls.__dataclass_fields__}
    given = vars(runs.parse(parser, argv))
    given.pop("resume", None)
    if "data" in given:
        given["data"] = runs.absolute(given["data"])
    if checkpoint:
        saved = checkpoint["config"]
        for k, v in given.items():
            if k not in MAY_CHANGE and v != saved.get(k):
                runs.fail(f"--{k} {v} contradicts the run being resumed, which has {k}={saved.get(k)}; leave it out")
        config = saved
    config = config | given
    if not checkpoint:  # a task's defaults may be for flags that only some models have
        config = {k: v for k, v in config.items() if k in seen}
    elif config["data"] != (was := checkpoint["config"]["data"]) and (hasattr(task, "score") or "tokenizer" not in checkpoint["config"]):
        runs.fail(f"--data {config['data']} contradicts the run being resumed, which is on {was}; leave it out")
    try:
        config = asdict(TrainConfig(**runs.pick(TrainConfig, config))) | config
    except ValueError as e:
        runs.fail(e)
    if checkpoint:
        if config["max_iters"] < checkpoint["iter"]:
            runs.fail(f"--max_iters {config['max_iters']}: the run is at iter {checkpoint['iter']} already")
        return config, checkpoint, path.parent
    for cls in (module.GPTConfig, task):
        config = {f.name: f.default for f in cls.__dataclass_fields__.values()} | config
    for name in ("block_size", "n_layer", "n_head", "n_embd"):
        if config[name] < 1:
            runs.fail(f"--{name} must be at least 1")
    if not 0 <= config["dropout"] < 1:
        runs.fail("--dropout must be in [0, 1)")
    if config.get("causal") is False:
        runs.fail("--no-causal sees the very token it should predict: the tasks here are next-token tasks. "
                  "causal=False is for your own masked-token training")
    config["lr_decay_iters"] = config["lr_decay_iters"] or config["max_iters"]
    return config, None, None


def new_out_dir(config):
    """
    The folder asked for, or the first free out/<model>-<data>-<size>, -2, -3 ...: no run is ever overwritten.
    The log is created at once, so that a second run, started now, finds the folder taken.
    """
    name = f"{config['model']}-{Path(config['data']).name}-{config['size']}"
    names = [config["out_dir"]] if config["out_dir"] else (
        os.path.relpath(runs.ROOT / "out" / name) + (f"-{i}" if i > 1 else "") for i in itertools.count(1))
    for out in map(Path, names):
        out.mkdir(parents=True, exist_ok=True)
        try:
            (out / "log.jsonl").open("x").close()
            return out
        except FileExistsError:
            pass
    runs.fail(f"{out} already holds a run; go on with --resume {out}, or name another --out_dir")


def get_lr(it, c):
    """Warmup, then decay from learning_rate to min_lr at lr_decay_iters."""
    if it < c["warmup_iters"]:
        return c["learning_rate"] * (it + 1) / c["warmup_iters"]
    if c["lr_decay"] == "none":
        return c["learning_rate"]
    x = min(1.0, (it - c["warmup_iters"]) / max(1, c["lr_decay_iters"] - c["warmup_iters"]))
    x = x if c["lr_decay"] == "linear" else 0.5 - 0.5 * math.cos(math.pi * x)
    return c["learning_rate"] + x * (c["min_lr"] - c["learning_rate"])


def make_optimizer(model, c, device):
    """AdamW; matrices and embeddings decay, gains, biases and scalars do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=c["weight_decay"]),
              dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=c["learning_rate"], betas=(c["beta1"], c["beta2"]), eps=1e-8,
                             fused=device.type in ("cpu", "cuda"))


@torch.no_grad()
def validate(model, task, c, device, context):
    """
    -> mean loss over the same eval_iters batches of the validation split, every time, and for a synthetic task
    {split: {metric: value}} on as many of each test split. best.pt goes by the loss, on what is distributed like the training data.
    """
    model.eval()
    splits = [s for s in task.splits if s != "train"] if hasattr(task, "score") else ["val"]
    losses, scores = [], {s: {} for s in splits if s != "val"}
    for n, split in enumerate(splits):
        rng = np.random.default_rng([c["seed"], (1 << 40) + n])
        for _ in range(c["eval_iters"]):
            x, y = (torch.from_numpy(a).to(device) for a in task.batch(split, c["batch_size"], rng))
            try:
                with context:
                    logits, loss = model(x, y)
            except ValueError:  # an encoding that ends before this split's sequences do
                break
            if n == 0:
                losses.append(loss.item())
            if split in scores:
                for metric, (count, out_of) in task.score(logits, x, y).items():
                    a, b = scores[split].get(metric, (0, 0))
                    scores[split][metric] = a + count.sum().item(), b + out_of.sum().item()
    model.train()
    return sum(losses) / len(losses), {s: {m: a / max(b, 1) for m, (a, b) in ms.items()} for s, ms in scores.items()}


def main():
    config, checkpoint, out = resolve(sys.argv[1:])
    c = config

    # one process, or one of several under torchrun
    ddp = "RANK" in os.environ
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if c["batch_size"] % world:
        runs.fail(f"--batch_size {c['batch_size']} does not divide among {world} processes")
    device = runs.pick_device(c["device"])
    context, dtype = runs.autocast(device, c["dtype"])
    if ddp:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=2))  # data can take hours
        if rank:
            sys.stdout = open(os.devnull, "w")
            dist.barrier()  # the first process prepares the data, the others then find it ready
    task = runs.make_task(c)
    if ddp and not rank:
        dist.barrier()
    c["vocab_size"] = task.vocab_size

    torch.manual_seed(c["seed"])
    raw_model = model = runs.make_model(c).to(device)
    optimizer = make_optimizer(model, c, device)
    start, best, seconds = 0, float("inf"), 0.0
    source = getattr(task, "meta", {}).get("sha256", "")
    bema = {w: {n: p.detach().clone() for n, p in raw_model.named_parameters()} for w in ("start", "ema")} if c["bema"] else None
    if checkpoint:
        if checkpoint["source"] != source:
            runs.fail(f"the text behind --data {c['data']} has changed since {out} was trained on it")
        runs.load_weights(model, checkpoint, out)
        optimizer.load_state_dict(checkpoint["optimizer"])
        start, best, seconds = checkpoint["iter"], checkpoint["best_val_loss"], checkpoint["seconds"]
        if bema:
            bema = {w: {n: p.to(device) for n, p in ps.items()} for w, ps in checkpoint["bema"].items()}
    del checkpoint
    kernel = runs.use_kernel(c["kernel"], model, device, dtype)
    compiled = c["compile"] == "on" or (c["compile"] == "auto" and device.type == "cuda")
    if compiled:
        model = torch.compile(model)
    if ddp:
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)

    print(" ".join(f"{k}={v}" for k, v in c.items() if v != ""))
    print(f"{sum(p.numel() for p in raw_model.parameters()):,} parameters on {device}, {dtype}, {kernel}, "
          f"torch.compile {'on' if compiled else 'off'}, {world} process{'es' * (world > 1)}, {torch.get_num_threads()} threads")
    if not rank:
        out = out or new_out_dir(c)
        if start and (out / "log.jsonl").exists():  # the log keeps only what the checkpoint knows
            known = "".join(json.dumps(row) + "\n" for row in runs.read_log(out) if row["iter"] <= start)
            runs.write_safely(out / "log.jsonl", lambda tmp: tmp.write_text(known))
    log = open(os.devnull if rank else out / "log.jsonl", "a", buffering=1)
    print(f"writing to {out}" + f", going on at iter {start}" * (start > 0), flush=True)

    def save(it, name="ckpt.pt"):
        if rank:
            return
        if not all(p.isfinite().all() for p in raw_model.parameters()):
            runs.fail(f"the weights are not finite at iter {it}; try a lower --learning_rate. {out}'s checkpoints are as they were")
        state = dict(config=c, model=raw_model.state_dict(), optimizer=optimizer.state_dict(), iter=it,
                     best_val_loss=best, seconds=seconds, source=source, environment=environment) | (dict(bema=bema) if bema else {})
        runs.write_safely(out / name, lambda tmp: torch.save(state, tmp))

    environment, stop = runs.environment(), []
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda number, frame: stop.append(number))

    model.train()
    clock, logged = time.time(), start
    for it in range(start, c["max_iters"]):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it, c)
        rng = np.random.default_rng([c["seed"], it])
        torch.manual_seed((c["seed"] << 40) + (it << 12) + rank)  # dropout, and random labels
        total = torch.zeros((), device=device)
        for micro in range(c["gradient_accumulation_steps"]):
            x, y = (torch.from_numpy(a[rank::world]).to(device) for a in task.batch("train", c["batch_size"], rng))
            last = micro + 1 == c["gradient_accumulation_steps"]
            with nullcontext() if last or not ddp else model.no_sync():  # gradients are shared once a step
                try:
                    with context:
                        loss = model(x, y)[1] / c["gradient_accumulation_steps"]
                except ValueError as e:  # an encoding that ends before the sequences do
                    runs.fail(e)
                loss.backward()
            total += loss.detach()
        if c["grad_clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), c["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        done = it + 1
        if bema:  # EMA_t = (1 - beta_t) EMA_{t-1} + beta_t theta_t, beta_t = (rho + t)^-kappa
            for n, p in raw_model.named_parameters():
                bema["ema"][n].lerp_(p.detach(), (c["rho"] + done) ** -c["kappa"])
        stopping = bool(stop)
        if ddp:  # an interrupt reaches the processes at different steps: all stop at this one, or none
            flag = torch.tensor(int(stopping), device=device)
            dist.all_reduce(flag)
            stopping = bool(flag)
        end = done == c["max_iters"]
        if done % c["log_interval"] == 0 or end or stopping:
            if ddp:
                dist.all_reduce(total)
                total /= world
            loss, now = total.item(), time.time()
            if not math.isfinite(loss):
                runs.fail(f"the loss is {loss} at iter {done}; try a lower --learning_rate. {out}'s checkpoints are as they were")
            tokens = (done - logged) * c["gradient_accumulation_steps"] * c["batch_size"] * x.size(1)
            rate, eta = tokens / (now - clock), (c["max_iters"] - done) * (now - clock) / (done - logged)
            seconds, clock, logged = seconds + now - clock, now, done
            print(f"iter {done}/{c['max_iters']} | loss {loss:.4f} | lr {get_lr(it, c):.2e} | {rate:,.0f} tok/s | "
                  f"eta {int(eta) // 60}m{int(eta) % 60:02d}s", flush=True)
            log.write(json.dumps(dict(iter=done, loss=loss, lr=get_lr(it, c), tok_s=round(rate), seconds=round(seconds, 2))) + "\n")
        if done % c["eval_interval"] == 0 or end:
            val, scores = validate(raw_model, task, c, device, context)
            averaged = {}
            if bema:
                raw = {n: p.detach().clone() for n, p in raw_model.named_parameters()}
                raw_model.load_state_dict(runs.bema_weights(raw, bema, done, c), strict=False)
                averaged = dict(zip(("val_loss", "scores"), validate(raw_model, task, c, device, context)))
                raw_model.load_state_dict(raw, strict=False)
                print(f"iter {done}/{c['max_iters']} | val loss {averaged['val_loss']:.4f} with the BEMA weights")
            print(f"iter {done}/{c['max_iters']} | val loss {val:.4f}"
                  + "".join(f" | {s} " + " ".join(f"{m} {v:.4f}" for m, v in ms.items()) for s, ms in scores.items() if ms), flush=True)
            log.write(json.dumps(dict(iter=done, val_loss=val) | (dict(scores=scores) if scores else {})
                                 | (dict(bema=averaged) if averaged else {})) + "\n")
            if val < best:
                best = val
                save(done, "best.pt")
            save(done)
            clock = time.time()  # validation is not training time
        if stopping and not end:
            save(done)
            print(f"interrupted after iter {done}, saved; go on with: python train.py --resume {out}")
            sys.exit(130)

    if ddp:
        dist.barrier()  # gloo's threads let go of the last tensors meanwhile; ended at once, a process can wait for them for ever
        dist.destroy_process_group()
    if rank:
        return
    print(f"trained {c['max_iters']} iters in {seconds:.0f} s, best val loss {best:.4f}; {out}/ckpt.pt is the last, best.pt the best")
    if stop:
        sys.exit(130)  # an interrupt during the last validation
    if c["evaluate"]:
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, signal.SIG_DFL)
        where = [w for name in ("device", "dtype") if c[name] != "auto" for w in (f"--{name}", c[name])]
        failed = runs.script("eval.py", out, *where)
        if not hasattr(task, "score"):  # a synthetic task has nothing to write
            failed = runs.script("sample.py", out, "--max_new_tokens", 2 * c["block_size"], *where) or failed
        sys.exit(failed)


if __name__ == "__main__":
    runs.run(main)
