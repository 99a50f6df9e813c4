"""Statistics of order and correlation, in float64. Loads no torch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def auroc(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: the share of pairs (positive, negative) in the right order, ties counted half
    (Mann and Whitney 1947). nan where one of the two sides is empty or a score is nan."""
    above, below = int(positive.sum()), int((~positive).sum())
    if not above or not below or not comparable(scores):
        return math.nan
    rank_sum = float(midranks(scores)[positive].sum())
    return (rank_sum - above * (above + 1) / 2) / (above * below)


def midranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of their ranks."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    ends = np.append(starts[1:], len(values))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((starts + 1 + ends) / 2, ends - starts)
    return ranks


def pearson(left: Floats, right: Floats) -> float:
    """Correlation; nan where one side is constant or not finite."""
    if len(left) < 2 or not np.isfinite(left).all() or not np.isfinite(right).all():
        return math.nan
    left, right = left - left.mean(), right - right.mean()
    norms = math.sqrt(float(left @ left)) * math.sqrt(float(right @ right))
    return max(-1.0, min(1.0, float(left @ right) / norms)) if norms else math.nan


def comparable(values: Floats) -> bool:
    """True where the values have an order."""
    return len(values) > 0 and not np.isnan(values).any()
