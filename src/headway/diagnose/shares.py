"""The closed split of a window: compute, exposed communication, exposed copies, idle. Exact integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.account.intervals import Intervals, clip, complement, intersect, measure, subtract
from headway.diagnose.facts import GpuClass, GpuEvents, Int8, Int64


@dataclass(frozen=True)
class Unions:
    """The three unions of a device inside [start, end), and what they leave."""

    start: int
    end: int
    compute: Intervals
    comm: Intervals
    mem: Intervals
    exposed_comm: Intervals
    exposed_mem: Intervals
    idle: Intervals

    @property
    def overlap_ns(self) -> int:
        return measure(intersect(self.comm, self.compute))


def unions(start: Int64, end: Int64, klass: Int8, window_start: int, window_end: int) -> Unions:
    """Builds the unions from event columns [N]."""
    rows = np.stack((start, end), axis=1)
    inside = (end > window_start) & (start < window_end)
    rows, klass = rows[inside], klass[inside]
    compute, comm, mem = (clip(rows[klass == part], window_start, window_end) for part in GpuClass)
    exposed_comm = subtract(comm, compute)
    busy = clip(np.concatenate((compute, comm)), window_start, window_end)
    exposed_mem = subtract(mem, busy)
    idle = complement(np.concatenate((busy, mem)), window_start, window_end)
    return Unions(window_start, window_end, compute, comm, mem, exposed_comm, exposed_mem, idle)


def of_events(events: GpuEvents, window_start: int, window_end: int) -> Unions:
    return unions(events.start, events.end, events.klass, window_start, window_end)


def covered(intervals: Intervals, start: Int64, end: Int64) -> Int64:
    """How much of each [start, end) [N] the union `intervals` covers, ns."""
    if not len(intervals):
        return np.zeros(len(start), np.int64)
    lengths = np.concatenate(([0], np.cumsum(intervals[:, 1] - intervals[:, 0])))

    def until(moment: Int64) -> Int64:
        at = np.searchsorted(intervals[:, 0], moment, "right")
        past = np.clip(intervals[np.maximum(at - 1, 0), 1] - moment, 0, None)
        return np.asarray(lengths[at] - np.where(at > 0, past, 0), np.int64)

    return until(end) - until(start)
