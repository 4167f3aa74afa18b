"""Which launch each GPU event came from, and which operator was open on that thread then."""

from __future__ import annotations

import numpy as np

from headway.diagnose.facts import NONE, Int32, Int64


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
    """One thread. `parent` chains each event to the nearest earlier one that is still open when it starts."""
    parent = _parents(start, end)
    current = np.searchsorted(start, at, "right") - 1
    while True:
        over = (current >= 0) & (end[np.maximum(current, 0)] <= at)
        if not over.any():
            break
        current[over] = parent[current[over]]
    return np.where(current >= 0, rows[np.maximum(current, 0)], NONE)


def _parents(start: Int64, end: Int64) -> Int64:
    parent = np.full(len(start), NONE, np.int64)
    stack: list[int] = []
    ends = end.tolist()
    for row, begin in enumerate(start.tolist()):
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        if stack:
            parent[row] = stack[-1]
        stack.append(row)
    return parent
