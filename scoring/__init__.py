"""What a number is: perplexity.py for text, rates.py for tasks, and here what both need."""
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Options:
    """What eval.py is asked for."""
    lengths: list = None    # window or sequence lengths; None is what the task usually takes
    split: str = ""         # "" is what the task usually takes
    amount: int = 0         # how many tokens, sequences or queries to score
    strided: bool = False   # text: windows that overlap by half, too
    again: bool = False     # text: what a passage costs that comes a second time, too
    seed: int = 1337
    device: torch.device = torch.device("cpu")
    context: object = nullcontext()  # to run models in
    words: str = ""         # where all of this runs


def describe(run):
    """What a row of the JSON says about the run itself (see common/checkpoint.py)."""
    trained = run.checkpoint["config"]
    row = dict(
        name=run.name, model=run.config["model"], seed=run.config["seed"],
        checkpoint=run.path.name, iter=run.checkpoint["iter"],
        train_seconds=round(run.checkpoint["seconds"]), block_size=run.config["block_size"],
        parameters=sum(p.numel() for p in run.model.parameters()), config=trained)
    changed = {name: value for name, value in run.config.items() if trained.get(name) != value}
    return row | (dict(set=changed) if changed else {})


def check_same(runs, names):
    """Raises ValueError unless all runs have the same settings."""
    first = runs[0]
    for run in runs:
        for name in sorted(names & run.config.keys() & first.config.keys()):
            theirs, other = run.config[name], first.config[name]
            if theirs != other:
                raise ValueError(f"{run.path} was trained with {name}={theirs}, {first.path} with "
                                 f"{name}={other}: score them one by one")


def resampled(sums, sizes, seed=0, times=1000):
    """
    The 95 % interval of sum(sums) / sum(sizes), by the bootstrap: n groups, such as documents, are
    drawn anew from the n that there are, as what belongs to one is not independent. -> [low, high],
    of a single group NaN.
    """
    if len(sizes) < 2:
        return [np.nan, np.nan]
    rng, means = np.random.default_rng(seed), []
    for _ in range(times):
        drawn = rng.integers(0, len(sizes), len(sizes))
        means.append(sums[drawn].sum() / sizes[drawn].sum())
    return np.quantile(means, (0.025, 0.975)).tolist()


def binned(values, edges):
    """Means of values (..., T) between edges (n + 1,) -> (..., n), NaNs left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # mean of nothing
        means = [np.nanmean(values[..., a:b], -1) for a, b in zip(edges, edges[1:])]
        return np.stack(means, -1)
