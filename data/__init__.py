"""Text and synthetic tasks, one file each, and here the metrics that several of them share."""
import warnings

import numpy as np


def tvd(logits, target):
    """Total variation distance, 1/2 sum |softmax(logits) - target| (Post-Norm, Eq. 7): logits, target (..., n) -> (...)."""
    return (logits.float().softmax(-1) - target).abs().sum(-1) / 2


def auc(logits, positive):
    """
    ROC AUC at every position: logits, positive (N, T) -> (T,), how often a positive's logit is above a negative's, over all pairs
    of sequences, ties 1/2. NaN where there are only positives or only negatives, and where a logit is NaN.
    """
    found = []
    for column, good in zip(logits.T, positive.T):
        _, where, counts = np.unique(column, return_inverse=True, return_counts=True)
        rank = (counts.cumsum() - (counts - 1) / 2)[where]  # from 1; equal logits share the mean of their ranks
        p, n = good.sum(), (~good).sum()
        found.append((rank[good].sum() - p * (p + 1) / 2) / (p * n) if p and n and not np.isnan(column).any() else np.nan)
    return np.array(found)


def binned(values, edges):
    """Means of values (..., T) between edges (n + 1,) -> (..., n). NaNs are left out; where there is nothing else it stays NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # mean of nothing
        return np.stack([np.nanmean(values[..., a:b], -1) for a, b in zip(edges, edges[1:])], -1)
