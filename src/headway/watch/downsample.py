"""Fewer points for a picture, without losing what a person looks for: the extremes stay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pick(series: Sequence[NDArray[np.float64]], limit: int) -> NDArray[np.int64]:
    """Indices of the points to draw, ascending: the first, the last, and each series' extremes in every bucket.

    Args:
        series: float64 [N] each, NaN where there is no value.
        limit: how many points at most.

    Returns:
        int64 [M], M ≤ max(limit, 2): all of them where N ≤ limit. Every series' overall minimum and maximum are among
        them as long as limit ≥ 2 + 2 · len(series).
    """
    total = len(series[0]) if series else 0
    if total <= limit:
        return np.arange(total)
    buckets = max(1, (limit - 2) // (2 * len(series)))
    edges = np.linspace(0, total, buckets + 1).astype(np.int64)
    chosen = {0, total - 1}
    for values in series:
        low = np.where(np.isnan(values), np.inf, values)
        high = np.where(np.isnan(values), -np.inf, values)
        for start, stop in itertools.pairwise(edges.tolist()):
            if stop > start and not np.isnan(values[start:stop]).all():
                chosen.add(start + int(low[start:stop].argmin()))
                chosen.add(start + int(high[start:stop].argmax()))
    return np.array(sorted(chosen), np.int64)


def bucket_edges(total: int, limit: int) -> NDArray[np.int64]:
    """Edges int64 [B+1] that cut `total` items into B ≤ limit runs whose lengths differ by one at most."""
    buckets = min(total, limit)
    return (np.arange(buckets + 1, dtype=np.int64) * total) // max(1, buckets)


def bucket_sums(values: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums along the last axis between the edges: [..., N] to [..., B]. Exact, so that closed accounts stay closed."""
    sums = np.concatenate((np.zeros((*values.shape[:-1], 1), np.int64), np.cumsum(values, axis=-1)), axis=-1)
    return np.asarray(sums[..., edges[1:]] - sums[..., edges[:-1]], np.int64)


def window(row: int, half: int, total: int) -> slice:
    """Up to `half` neighbours on each side of a row.

    At the start the window is symmetric, so that a falling loss does not look as if it fell later; at the end it
    looks back only.
    """
    return slice(max(0, row - half), row + 1 + min(half, row, total - 1 - row))


def rolling_median(values: NDArray[np.float64], rows: NDArray[np.int64], half: int) -> NDArray[np.float64]:
    """The median around each of `rows`, float64 [len(rows)]: the typical step, whatever one odd step did. NaN stays."""
    out = np.full(len(rows), np.nan)
    for place, row in enumerate(rows.tolist()):
        if np.isfinite(values[row]):
            near = values[window(row, half, len(values))]
            out[place] = np.median(near[np.isfinite(near)])
    return out


def rolling_mean(
    values: NDArray[np.float64], weights: NDArray[np.float64], rows: NDArray[np.int64], half: int
) -> NDArray[np.float64]:
    """The weighted mean around each of `rows`, float64 [len(rows)]. NaN stays; weights of 0 have no say."""
    out = np.full(len(rows), np.nan)
    for place, row in enumerate(rows.tolist()):
        near = window(row, half, len(values))
        known = np.isfinite(values[near]) & (weights[near] > 0)
        if np.isfinite(values[row]) and known.any():
            out[place] = np.average(values[near][known], weights=weights[near][known])
    return out
