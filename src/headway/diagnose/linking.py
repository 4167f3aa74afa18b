"""Which launch each GPU event came from, and which operator was open on that thread then."""

from __future__ import annotations

import numpy as np

from headway.diagnose.facts import NONE, Int32, Int64


def at_rows(column: Int64 | Int32, rows: Int64 | Int32) -> Int64:
    """The column's value at each row, 0 where the row is NONE (a trace may have no host event at all)."""
    if not len(column):
        return np.zeros(len(rows), np.int64)
    return np.where(rows == NONE, 0, column[rows])


def link_launches(correlation: Int64, start: Int64, launch_correlation: Int64, launch_start: Int64) -> Int64:
    """Row of the launch of each event [N], NONE where the trace has none.

    A correlation may occur more than once (processes merged into one file, a counter that wrapped): then the last
    launch that began before the event is the one, or the first of all where clocks disagree.
    """
    found = np.full(len(correlation), NONE, np.int64)
    usable = launch_correlation >= 0
    rows = np.flatnonzero(usable)
    if not len(rows) or not len(correlation):
        return found
    order = rows[np.lexsort((launch_start[rows], launch_correlation[rows]))]
    keys = launch_correlation[order]
    first = np.searchsorted(keys, correlation, "left")
    last = np.searchsorted(keys, correlation, "right") - 1
    linked = (last >= first) & (correlation >= 0)
    found[linked] = order[first[linked]]
    # Only correlations with several launches need the times looked at, one by one.
    for event in np.flatnonzero(linked & (last > first)).tolist():
        candidates = order[first[event] : last[event] + 1]
        before = int(np.searchsorted(launch_start[candidates], start[event], "right")) - 1
        found[event] = candidates[max(before, 0)]
    return found


def innermost_open(at: Int64, thread: Int32, start: Int64, end: Int64, on_thread: Int32) -> Int64:
    """Row of the innermost host event open at each moment [M] on the thread given with it; NONE where none is.

    Host events [N] are sorted by start, an enclosing one before what it holds. Slices that cross (profilers write
    them) are tolerated: the latest one that began and has not ended counts.
    """
    found = np.full(len(at), NONE, np.int64)
    for number in np.unique(thread).tolist():
        moments = np.flatnonzero(thread == number)
        rows = np.flatnonzero(on_thread == number)
        if not len(rows):
            continue
        found[moments] = _innermost(at[moments], rows, start[rows], end[rows])
    return found


def _innermost(at: Int64, rows: Int64, start: Int64, end: Int64) -> Int64:
    """One thread: from the last to begin outwards, as long as what was come to has ended already."""
    lasting = end > start
    rows, start, end = rows[lasting], start[lasting], end[lasting]
    if not len(rows):
        return np.full(len(at), NONE, np.int64)
    outer = _ends_later(end)
    found = np.searchsorted(start, at, "right") - 1
    left = np.flatnonzero(found != NONE)
    while len(left := left[end[found[left]] <= at[left]]):
        found[left] = outer[found[left]]
        left = left[found[left] != NONE]
    return np.where(found != NONE, rows[found], NONE)


def _ends_later(end: Int64) -> Int64:
    """The nearest slice before each one that ends later than it does, NONE where there is none: what encloses it, and
    where slices cross what it cannot hide."""
    before = np.arange(-1, len(end) - 1)
    left = np.arange(1, len(end))
    # All between `before` and a slice end no later than it, so its own `before` may be skipped to.
    while len(left := left[end[before[left]] <= end[left]]):
        before[left] = before[before[left]]
        left = left[before[left] != NONE]
    return before
