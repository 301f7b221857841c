"""What a training can be told: TrainConfig, RunConfig, and the fields of its model and task."""
import math
from dataclasses import dataclass
from typing import Literal

from common import flags, names
from common.checkpoint import check_text
from common.exits import fail, nearest


@dataclass
class TrainConfig:
    model: str = "cable"          # a name from the VARIANTS of a model file
    init_from: str = ""           # begin with the weights of this run; its model may be another
    size: str = "nano"            # preset; text: nano micro tiny small medium; tasks: nano paper
    batch_size: int = 16          # sequences per micro-step, all processes together
    gradient_accumulation_steps: int = 1  # micro-steps per step; their means count alike
    max_iters: int = 1000         # optimizer steps; after lr_decay_iters the rate stays as it is
    learning_rate: float = 1e-3   # peak
    min_lr: float = 1e-4          # at the end of the decay
    warmup_iters: int = 100       # linear warmup from 0
    lr_decay: Literal["cosine", "linear", "none"] = "cosine"  # how the rate falls
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
class RunConfig(flags.RunFlags):
    out_dir: str = ""             # for checkpoints and log; default out/<model>-<data>-<size>
    log_interval: int = 50        # steps between log lines; every validation has one, too
    eval_interval: int = 250      # steps between validations, each followed by a checkpoint
    eval_iters: int = 20          # batches per validation, of every split
    evaluate: bool = True         # afterwards, run eval.py (on text sample.py, too) on the result
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile, where it works; auto: with cuda


def first_flags(argv):
    """The values of the flags that decide which other flags there are, None where not given."""
    parser = flags.Parser(add_help=False)
    for name in ("resume", "model", "data", "size"):
        parser.add_argument(f"--{name}")
    return parser.parse_known_args(argv)[0]


def new_settings(argv, description=None):
    """
    A new run's settings. Precedence: a flag; what the model's name means in VARIANTS; the task's
    defaults; the dataclasses'.
    """
    first = first_flags(argv)
    task = names.find_task(first.data or "stdlib")
    size = first.size or next(iter(task.defaults))
    if size not in task.defaults:
        fail(f"unknown size {size!r}: {nearest(size, task.defaults)}")
    defaults = dict(block_size=task.block_size, model=TrainConfig.model) | task.defaults[size]
    model = first.model or defaults["model"]
    module, variant = names.models()[model]
    defaults |= variant | dict(size=size, model=model)
    # of what a name means a number may be tuned
    fixed = {name for name, value in variant.items() if isinstance(value, str | bool)}
    c = parsed(argv, description, module, task, defaults, fixed)
    c.lr_decay_iters = c.lr_decay_iters or c.max_iters
    known = vars(c).keys() | names.fields_of_models()
    for name in task.defaults[size].keys() - known:
        fail(f"{task.__module__}: defaults has {name}, which is not a flag")
    return c


def resumed_settings(saved, argv, description=None):
    """A run's that goes on; where it runs, how it reports and how far may change."""
    config = saved["config"]
    text = names.text_setting(config)
    moved = {text: ""} if "tokenizer" in config else {}  # where a text lies may change, no task
    module, _ = names.models()[config["model"]]
    changing = {*moved, "max_iters", *RunConfig.__dataclass_fields__} - {"out_dir", "dtype"}
    c = parsed(argv, description, module, names.trained_on(config), config | moved,
               config.keys() - changing)
    if moved and not getattr(c, text):
        check_text(config, saved["source"])
        setattr(c, text, config[text])
    if c.max_iters < saved["iter"]:
        fail(f"--max_iters {c.max_iters}: the run is at iter {saved['iter']} already")
    return c


def parsed(argv, description, module, task, defaults, fixed):
    """The settings of a model and a task: flags, else defaults, which those in `fixed` keep."""
    parser = flags.Parser(description=description, usage="python train.py [--flag VALUE ...]")
    parser.add_argument("--resume", metavar="DIR", help="continue the run in this folder; only its "
                        "max_iters, where its text lies, and where and how it runs may change")
    about = f"from the VARIANTS of a model file: {', '.join(names.main_models())}"
    flags.add_flag(parser, "model", str, about, TrainConfig.model)
    parser.set_defaults(vocab_size=0)  # no flag: the task has it
    for title, cls in configs(module, task).items():
        flags.add_fields(parser, title, cls)
    for name, value in defaults.items():  # a task's may be of other models
        if parser.has(name):
            parser.set_defaults(**{name: value})
    c = parser.parse_args(argv)
    del c.resume
    for name in vars(c).keys() & fixed:
        asked, has = getattr(c, name), defaults[name]
        if asked != has and str(asked) != str(has):  # a path is kept as a string
            fail(f"--{name} {asked}: the run, or what --model names, has {has!r}")
    return c


def configs(module, task):
    return dict(model=module.GPTConfig, data=task, training=TrainConfig, run=RunConfig)


def check(c):
    """A setting out of its range ends here, in one line."""
    for name in ("batch_size", "gradient_accumulation_steps", "max_iters", "eval_interval",
                 "eval_iters", "log_interval", "block_size", "n_layer", "n_head", "n_embd", "rho"):
        if not getattr(c, name, 1) >= 1:  # as NaN is not
            fail(f"--{name} {getattr(c, name)} must be at least 1")
    if not (0 <= c.seed < 1 << 23 and c.grad_clip >= 0):
        fail(f"--seed {c.seed} and --grad_clip {c.grad_clip} must be at least 0, a seed below 2^23")
    for name in "weight_decay", "warmup_iters", "lr_decay_iters", "kappa", "eta":
        if not 0 <= getattr(c, name) < math.inf:
            fail(f"--{name} {getattr(c, name)} must be at least 0, and finite")
    if not 0 <= getattr(c, "dropout", 0) < 1:
        fail(f"--dropout {c.dropout} must be at least 0, and less than 1")
    if c.lr_decay != "none" and not 0 <= c.min_lr <= c.learning_rate:
        fail(f"--min_lr {c.min_lr} is more than --learning_rate {c.learning_rate}, or below 0")
    if getattr(c, "repair", "") and not c.original_length:
        fail("a repair in training needs --original_length: the block_size before it")
