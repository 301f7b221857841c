"""
What an entry of reproduce.py would do, before a GPU is rented for it: every command, and for every
row its model, built without memory (torch's meta device), with an estimate of FLOPs, memory and
time. What the flags mean is asked of train.py and eval.py themselves, so that a setting that cannot
run is found here.

    FLOPs    of training alone: 6 N a token for N parameters, and 6 layers x width x T for causal
             attention, which sees T / 2 keys on average, twice that for an encoder
    memory   weights, gradients and two moments in float32; 34 bytes per token, layer and channel
             (Korthikanti et al., 2022, Eq. 1, without its T x T part) and 10 per token and entry
             of the vocabulary; the T x T part is 5 bytes per head and pair, where no kernel avoids
             it. Everything twice as much in float32
"""
import shlex
import textwrap
from functools import partial
from typing import NamedTuple

import data
import eval as evaluation
import runs
import train
from data import text
from experiments import matrix, minimal, tables, trainings

# FLOP/s, assumed, not measured: a fifth of the dense bfloat16 peak in an H100's data sheet, 989
# TFLOP/s, since models of 256 to 1,024 channels are too narrow to fill it
THROUGHPUT = 2e14
# seconds of a layer's step, assumed to be no less however small it is: some 50 kernels forward and
# twice as many backward, 10 us each to launch
LAYER_SECONDS = 1.5e-3


class Cost(NamedTuple):
    """Of one run, or of all stacked trials of one scheme."""
    parameters: int  # of one model
    steps: int
    flops: float
    memory: float    # bytes, without attention's T x T part
    squares: float   # bytes of that part
    seconds: float   # on the GPU assumed above


def estimate(model, T, sequences, steps, micro_steps=1, models=1, numbers=4, precision=1):
    """
    T tokens in a sequence; sequences at a time, micro_steps times a step, for so many models of
    this kind at once; numbers in float32 kept for every parameter; precision 2 is float32.
    """
    config = getattr(model, "config", None)
    N = sum(p.numel() for p in model.parameters())
    layers, heads = getattr(config, "n_layer", 1), getattr(config, "n_head", 1)
    sizes = [size for p in model.parameters() for size in p.shape]
    width = getattr(config, "n_embd", max(sizes))
    vocabulary = getattr(config, "vocab_size", 0)
    tokens = models * sequences * T
    seen = 12 if runs.is_encoder(model) else 6
    flops = steps * micro_steps * tokens * (6 * N + seen * layers * width * T)
    memory = 4 * numbers * N * models
    memory += precision * tokens * (34 * layers * width + 10 * vocabulary)
    squares = precision * 5 * layers * heads * tokens * T
    least = steps * micro_steps * layers * LAYER_SECONDS
    return Cost(N, steps, flops, memory, squares, max(flops / THROUGHPUT, least))


def of_training(words, evaluation_words):
    """The flags of train.py and eval.py -> Cost. What is wrong with them ends as it does there."""
    c, *_ = train.fresh(words)
    train.check_rules(c, resuming=False)
    asked = evaluation.parse(evaluation_words)
    config = vars(c)
    config.pop("vocab_size", None)  # a class's default: the task has it
    if data.find(c.data).kind == "text":  # whose tokens need not be here yet
        config["vocab_size"] = text.VOCABULARY[c.tokenizer]
    elif data.find(c.data).for_encoders:  # nor those of encoders
        config["vocab_size"] = text.UNK + 1 + c.max_vocab
    else:
        for T in [c.block_size, *(asked.lengths or [])]:
            task = runs.make_task(config | dict(block_size=T))
        config["vocab_size"] = task.vocab_size
    model = runs.on_meta(runs.make_model, config)
    return estimate(model, c.block_size, c.batch_size, c.max_iters, c.gradient_accumulation_steps,
                    numbers=6 if c.bema else 4)


def of_search(settings, trials):
    """All trials of one scheme -> Cost."""
    panel = settings["panel"]
    runs.make_task(panel | dict(block_size=panel["longest"]))
    task = runs.make_task(panel)
    model = runs.on_meta(minimal.small_model, task, settings["scheme"])
    return estimate(model, task.block_size, panel["batch_size"], settings["steps"], models=trials,
                    numbers=6, precision=2)


def plan(args, entry, scale, folder):
    """-> {row: (its commands, a function that gives the Cost of one run, how many runs)}"""
    found = {}
    folder /= scale.get("folder", "")
    if "panels" in scale:
        for slug, (settings, trials, words) in minimal.commands(args, entry, scale, folder).items():
            found[slug] = [words], partial(of_search, settings, trials), 1
        return found
    for task, one in trainings.by_task(scale).items():
        where = folder
        if task:
            now = matrix.definition(one, matrix.columns_of(entry, task))
            where = folder / matrix.folder_of(task, now)
        for label, jobs in trainings.commands(args, entry, one, where).items():
            *_, start, score = jobs[0]
            words = [command for pair in jobs for command in pair]
            label = f"{label}, {task}" if task else label
            found[label] = words, partial(of_training, start[2:], score[2:]), len(jobs)
    return found


def show(args, entry, scale):
    """Print all of it. A setting that cannot be built ends in an error that names it."""
    folder = trainings.folder_for(args.entry, entry, args.scale)
    about = ". Here: ".join(filter(None, (entry["about"], scale.get("note"))))
    print(textwrap.fill(about, 100, break_on_hyphens=False) + "\n")
    broken, costs = {}, []
    for label, (commands, cost, n) in plan(args, entry, scale, folder).items():
        for command in commands:
            print("$ " + shlex.join(command))
        try:
            one = cost()
        except (SystemExit, Exception) as e:  # a model file may fail in any way
            broken[label] = str(e).removeprefix("error: ").partition("\n")[0], commands[0]
            print(f"{label} cannot be built: {broken[label][0]}\n")
            continue
        costs += n * [one]
        print(f"{label}: {in_words(one)}" + (f", {n} runs" if n > 1 else "") + "\n")
    largest = max((one.memory + one.squares for one in costs), default=0)
    print(f"{args.entry}, --scale {args.scale}: {len(costs)} runs, "
          f"{sum(one.flops for one in costs):.1e} FLOPs, at most {largest / 1e9:,.1f} GB, "
          f"{sum(one.seconds for one in costs) / 3600:,.1f} GPU hours of training,\n"
          f"at {THROUGHPUT / 1e12:.0f} TFLOP/s and {1000 * LAYER_SECONDS:g} ms or more for a "
          "layer's step, both assumed. Nothing was run.", flush=True)
    if args.scale == "cpu":
        took = tables.expected(args.entry, entry, args.scale, len(costs))
        print(f"On the CPU {took}.", flush=True)
    if broken:
        label, (reason, command) = next(iter(broken.items()))
        runs.fail(f"{', '.join(broken)} cannot be built; {label}: {reason}; {shlex.join(command)}")


def in_words(cost):
    size = f"{cost.parameters / 1e6:,.1f}M" if cost.parameters > 1e5 else f"{cost.parameters:,}"
    return (f"{size} parameters, {cost.steps:,} steps, {cost.flops:.1e} FLOPs, "
            f"{cost.memory / 1e9:,.1f} GB ({cost.squares / 1e9:,.1f} more for T x T matrices), "
            f"{cost.seconds / 3600:,.2f} GPU hours")
