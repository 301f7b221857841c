"""What a training can be told: TrainConfig, RunConfig, and the fields of its model and task."""
import math
from argparse import Namespace
from dataclasses import asdict, dataclass, fields
from typing import Literal

from common import flags, names
from common.checkpoint import check_text
from common.exits import fail, nearest


@dataclass
class TrainConfig:
    model: str = "cable"          # a name from the VARIANTS of any model file
    init_from: str = ""           # begin with the weights of this run; its model may be another
    size: str = "nano"            # preset; text: nano micro tiny small medium; tasks: nano paper
    batch_size: int = 16          # sequences per micro-step, all processes together
    gradient_accumulation_steps: int = 1  # micro-steps per step; their means count alike
    max_iters: int = 1000         # optimizer steps; after lr_decay_iters the rate stays as it is
    learning_rate: float = 1e-3   # peak
    min_lr: float = 1e-4          # at the end of the decay
    warmup_iters: int = 100       # linear warmup from 0
    lr_decay: Literal["cosine", "linear", "none"] = "cosine"  # cosine, linear or none
    lr_decay_iters: int = 0       # steps until min_lr; 0 is max_iters
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
    log_interval: int = 50        # steps between log lines; every validation has one, too
    eval_interval: int = 250      # steps between validations, each followed by a checkpoint
    eval_iters: int = 20          # batches per validation, of every split
    evaluate: bool = True         # afterwards, run eval.py (on text sample.py, too) on the result
    device: str = "auto"          # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU that has it
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile, where it works; auto: with cuda
    kernel: Literal["auto", "off"] = "auto"  # auto: a faster attention that equals the model's own


def new_settings(argv, description=None):
    """
    A new run's settings. Precedence: a flag; what the model's name means in VARIANTS; the task's
    defaults; the dataclasses'.
    """
    # these three decide which other flags there are
    task = names.find_task(flags.peek(argv, "data") or "stdlib")
    size = flags.peek(argv, "size") or next(iter(task.defaults))
    if size not in task.defaults:
        fail(f"unknown size {size!r}: {nearest(size, task.defaults)}")
    preset = task.defaults[size]
    model = flags.peek(argv, "model") or preset.get("model", TrainConfig.model)
    module, variant = names.models()[model]

    parser = training_parser(description)
    parser.set_defaults(vocab_size=0)  # the task has it
    has = {"vocab_size"}
    for title, cls in configs(module, task).items():
        flags.add_fields(parser, title, cls, skip=has)
        has |= {field.name for field in fields(cls)}
    of_models = (module.GPTConfig.__dataclass_fields__ for module, _ in names.models().values())
    for name in preset.keys() - has.union(*of_models):  # some are for some models only
        fail(f"{task.__module__}: defaults has {name}, which is not a flag")
    preset = dict(block_size=task.block_size) | preset | variant | dict(size=size, model=model)
    parser.set_defaults(**{name: value for name, value in preset.items() if name in has})
    c = parser.parse_args(argv)
    del c.resume
    c.lr_decay_iters = c.lr_decay_iters or c.max_iters
    for name, value in variant.items():  # of what a name means a number may be tuned
        if isinstance(value, str | bool) and getattr(c, name) != value:
            fail(f"{name}={getattr(c, name)}: what is called --model {model} has {value}")
    return c


def resumed_settings(saved, argv, description=None):
    """A run's that goes on; where it runs, how it reports and how far may change."""
    model, _ = names.models()[saved["config"]["model"]]  # which may have a new field since
    config = asdict(RunConfig()) | asdict(model.GPTConfig()) | saved["config"]
    text_flag = names.text_setting(config)
    parser = training_parser(description)
    parser.epilog = "A run that is resumed keeps all other settings."
    flags.add_flag(parser, text_flag, str, "where the text lies now")
    flags.add_flag(parser, "max_iters", int, "optimizer steps", config["max_iters"])
    flags.add_fields(parser, "run", RunConfig, skip=("out_dir", "dtype"))
    parser.set_defaults(**{f.name: config[f.name] for f in fields(RunConfig)})
    changes = vars(parser.parse_args(argv))
    del changes["resume"]
    if changes[text_flag] is None:
        del changes[text_flag]
        check_text(config, saved["source"])
    c = Namespace(**config | changes)
    if c.max_iters < saved["iter"]:
        fail(f"--max_iters {c.max_iters}: the run is at iter {saved['iter']} already")
    return c


def training_parser(description):
    parser = flags.Parser(description=description, usage="python train.py [--flag VALUE ...]")
    parser.add_argument("--resume", metavar="DIR", help="continue the run in this folder")
    return parser


def configs(module, task):
    return dict(model=module.GPTConfig, data=task, training=TrainConfig, run=RunConfig)


def check(c):
    """A setting out of its range ends here, in one line."""
    at_least_1 = {"batch_size", "gradient_accumulation_steps", "max_iters", "eval_interval",
                  "eval_iters", "log_interval", "block_size", "n_layer", "n_head", "n_embd", "rho"}
    below = dict(beta1=1, beta2=1, dropout=1, seed=1 << 23)
    for name in at_least_1 | {f.name for f in fields(TrainConfig)} | below.keys():
        value, least = getattr(c, name, 1), int(name in at_least_1)
        if not isinstance(value, str) and not least <= value < below.get(name, math.inf):
            fail(f"--{name} {value} must be at least {least}, and less than "
                 f"{below.get(name, 'infinity')}")
    if c.lr_decay != "none" and c.min_lr > c.learning_rate:
        fail(f"--min_lr {c.min_lr} is more than --learning_rate {c.learning_rate}: lower it, too")
