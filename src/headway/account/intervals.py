"""Interval algebra over integer nanoseconds: the base of every share read from a trace.

A set of intervals is an int64 array [N, 2] of half-open [start, end) rows. All functions return a *union*:
sorted, disjoint, non-empty rows, so that measures are exact integers and never count a nanosecond twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]
EMPTY: Intervals = np.empty((0, 2), np.int64)


def union(intervals: Intervals) -> Intervals:
    """Merges overlapping and touching intervals. Shape [N, 2] in, [M, 2] out, M ≤ N."""
    rows = np.asarray(intervals, np.int64).reshape(-1, 2)
    rows = rows[rows[:, 1] > rows[:, 0]]
    if not len(rows):
        return EMPTY
    if (rows[1:, 0] > rows[:-1, 1]).all():  # it is one already
        return rows
    if (rows[1:, 0] < rows[:-1, 0]).any():
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    furthest = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate(([True], rows[1:, 0] > furthest[:-1]))
    starts = rows[first, 0]
    ends = furthest[np.concatenate((np.flatnonzero(first)[1:] - 1, [len(rows) - 1]))]
    return np.stack((starts, ends), axis=1)


def measure(intervals: Intervals) -> int:
    """Total length of the union, in nanoseconds."""
    merged = union(intervals)
    return int((merged[:, 1] - merged[:, 0]).sum())


def complement(intervals: Intervals, start: int, end: int) -> Intervals:
    """What of [start, end) the union leaves free."""
    merged = clip(intervals, start, end)
    edges = np.concatenate(([start], merged.reshape(-1), [end])).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def clip(intervals: Intervals, start: int, end: int) -> Intervals:
    """The union, cut to [start, end)."""
    return union(np.clip(np.asarray(intervals, np.int64).reshape(-1, 2), start, end))


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """The union of `left` without anything in `right`."""
    merged = union(left)
    if not len(merged):
        return EMPTY
    return intersect(merged, complement(right, int(merged[0, 0]), int(merged[-1, 1])))


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """What is in both unions: |A| + |B| - |A ∪ B| nanoseconds."""
    a, b = union(left), union(right)
    if not len(a) or not len(b):
        return EMPTY
    # Sweep over all edges: inside both where two intervals are open at once.
    times = np.concatenate((a[:, 0], b[:, 0], a[:, 1], b[:, 1]))
    steps = np.concatenate((np.ones(len(a) + len(b), np.int64), -np.ones(len(a) + len(b), np.int64)))
    order = np.lexsort((steps, times))
    open_now = np.cumsum(steps[order])
    edges = times[order]
    both = open_now[:-1] == 2
    return union(np.stack((edges[:-1][both], edges[1:][both]), axis=1))
