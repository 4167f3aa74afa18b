"""What recording a trace took of its window: time that no training step without a profiler spends.

A cause that is no operator (a sleep, a write, a collection) takes as long unrecorded, so that its share of an ordinary
step is larger than its share of a recorded one. Only upper bounds leave recording out: what is surely won does not
depend on an estimate.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from headway.account.intervals import Intervals
from headway.diagnose.facts import HostKind, Int64
from headway.diagnose.finding import Finding
from headway.diagnose.view import View

# Operators that only call one other: fewer of them tell nothing.
_LEAST = 32
# What is recorded evicts what is computed with. The same 1,011 operators a step cost 2.0 µs each in a model that stays
# in the caches and 4.3 µs in one that does not, where the trace itself shows 2.3 to 3.3 µs: as much again, at most.
_COLD = 2
# Idle of a device in which its host is at work: there recording delays it, elsewhere it is hidden.
_HOST_AT_WORK = ("host", "launch_call")


def without_recording(item: Finding, view: View, taken: int) -> Finding:
    """The finding with what of `taken` (`recording`) lies beside its claims, where it has not said so itself."""
    if item.recorded_ns is not None:
        return item
    return dataclasses.replace(item, recorded_ns=_beside(view, item, taken))


def _beside(view: View, item: Finding, taken: int) -> int:
    """ns of recording outside the finding's claims, at most half of the window outside them."""
    if view.on_gpu:
        bare = sum(item.claims.get(f"idle.{name}", 0) for name in _HOST_AT_WORK)
        return max(0, taken - bare)
    share = sum(ns for path, ns in item.claims.items() if _holds_operators(path)) / max(1, view.wall_ns)
    return _bounded(int(taken * max(0.0, 1 - share)), view.wall_ns - item.upper_ns)


def outside(view: View, spans: Intervals) -> int:
    """ns of recording outside these sorted spans of the host, at most half of the window outside them. CPU only."""
    host, rows = view.rank.host, _recorded(view)
    if not len(spans):
        return recording(view)
    place = np.searchsorted(spans[:, 0], host.start[rows], "right") - 1
    within = (place >= 0) & (host.start[rows] < spans[np.maximum(place, 0), 1])
    left = view.wall_ns - int((spans[:, 1] - spans[:, 0]).sum())
    return _bounded(int(_COLD * of_one(view) * int((~within).sum())), left)


def recording(view: View) -> int:
    """ns that recording took of the window, at most; on a GPU only what the device waited for."""
    return beside_pauses(view, 0)


def beside_pauses(view: View, paused_ns: int) -> int:
    """ns of recording beside pauses of the host in which no operator runs, at most half of what lies beside them."""
    spent = int(_COLD * of_one(view) * len(_recorded(view)))
    whole = view.gap_time(view.gaps(*_HOST_AT_WORK)) if view.on_gpu else view.wall_ns
    return _bounded(spent, whole - paused_ns)


def of_one(view: View) -> float:
    """ns that recording one operator takes: the own time of those that only call one other, the lower nine tenths of
    them, the mean. Nothing but dispatch and recording happens there, once each."""
    host, window = view.rank.host, view.device.window
    found = []
    rows = np.flatnonzero((host.kind == HostKind.OP) & (host.end > window.start_ns) & (host.start < window.end_ns))
    for thread in np.unique(host.thread[rows]).tolist():
        mine = rows[host.thread[rows] == thread]
        found.append(_own_time_of_callers(host.start[mine], host.end[mine]))
    own = np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)
    return float(own[: len(own) * 9 // 10].mean()) if len(own) >= _LEAST else 0.0


def _own_time_of_callers(start: Int64, end: Int64) -> Int64:
    """Of one thread's slices, sorted by start: own time of those with exactly one slice below them."""
    if len(start) < 2:
        return np.empty(0, np.int64)
    behind_child = np.searchsorted(start, end[1:], "left")  # the first to begin once the next slice is over
    next_start = np.append(start, np.iinfo(np.int64).max)[behind_child]
    one = (end[1:] <= end[:-1]) & (start[1:] < end[:-1]) & (next_start >= end[:-1])
    own: Int64 = ((end[:-1] - start[:-1]) - (end[1:] - start[1:]))[one]
    return own


def _recorded(view: View) -> NDArray[np.intp]:
    """Rows of the operators whose recording lengthens the window."""
    host = view.rank.host
    if not view.on_gpu:
        ops = view.device.events.op[view.inside]
        return np.unique(ops[ops >= 0]).astype(np.intp)
    waits = view.gap_intervals(view.gaps(*_HOST_AT_WORK))
    rows = view.host_rows("", (HostKind.OP,))
    if not len(waits):
        return rows[:0]
    launching = np.unique(host.thread[view.device.events.launch[view.device.events.launch >= 0]])
    rows = rows[np.isin(host.thread[rows], launching)]
    place = np.searchsorted(waits[:, 0], host.start[rows], "right") - 1
    return rows[(place >= 0) & (host.start[rows] < waits[np.maximum(place, 0), 1])]


def _holds_operators(path: str) -> bool:
    return path.startswith("device.") or path in ("recompute", "padding", "idle.host")


def _bounded(spent: int, whole: int) -> int:
    return max(0, min(spent, whole // 2))
