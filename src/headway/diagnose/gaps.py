"""Why the device was idle, gap by gap, from what the thread that launched the next kernel was doing meanwhile."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from headway.account.intervals import EMPTY, Intervals, intersect, subtract, union
from headway.diagnose.facts import IDLE_CLASSES, NONE, Gaps, HostEvents, HostKind, Int64
from headway.diagnose.linking import at_rows
from headway.diagnose.trace import Trace

SHORT_NS = 10_000  # a wait below 10 µs between kernels that were queued in time is the device's own
DATA, BLOCKING, HOST, LAUNCH_CALL, LAUNCH_LATENCY, QUEUED, SHORT, UNKNOWN = range(len(IDLE_CLASSES))

DATA_NAMES = re.compile(
    r"enumerate\(DataLoader\)|dataloader|data_?load|next_batch|get_batch|^headway\.data$", re.IGNORECASE
)
# Calls that return only when the device, or the driver's allocator, is done. cudaEventQuery returns at once.
BLOCKING_NAMES = re.compile(
    r"synchroni[sz]e|^(?:cuda|hip|cu)(?:mem)?(?:Malloc|Free|Alloc)(?!.*Async)|^cuMem(?:Create|Map|Unmap|Release|SetAccess)|HostAlloc|HostRegister|HostUnregister"
    r"|^(?:cuda|hip)Memcpy(?:WithStream|2D|3D)?$|^(?:cuda|hip)MemGetInfo$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ThreadWork:
    """What one host thread did: unions of intervals, ns."""

    busy: Intervals
    data: Intervals
    blocking: Intervals


class HostWork:
    """What every launching thread was doing; unions are built once a thread."""

    def __init__(self, trace: Trace, main: int) -> None:
        self._host: HostEvents = trace.host
        self._main = main
        data = np.array([bool(DATA_NAMES.search(name)) for name in trace.names] or [False])
        blocking = np.array([bool(BLOCKING_NAMES.search(name)) for name in trace.names] or [False])
        kinds = self._host.kind
        counted = np.isin(kinds, (HostKind.OP, HostKind.ANNOTATION))
        self._data = data[self._host.name] & counted
        self._blocking = blocking[self._host.name] & (kinds == HostKind.RUNTIME)
        self._busy = counted | (kinds == HostKind.RUNTIME)
        self._threads: dict[int, ThreadWork] = {}

    def of(self, thread: int) -> ThreadWork:
        """The thread's own work, and the main thread's where this one is idle (backward runs on threads of its own)."""
        if thread not in self._threads:
            own = self._own(thread)
            if thread != self._main and self._main != NONE:
                main = self.of(self._main)
                own = ThreadWork(
                    own.busy,
                    _either(own.data, subtract(main.data, own.busy)),
                    _either(own.blocking, subtract(main.blocking, own.busy)),
                )
            self._threads[thread] = own
        return self._threads[thread]

    def _own(self, thread: int) -> ThreadWork:
        rows = self._host.thread == thread
        spans = [self._spans(rows & mask) for mask in (self._busy, self._data, self._blocking)]
        return ThreadWork(spans[0], spans[1], subtract(spans[2], spans[1]))

    def _spans(self, rows: np.ndarray) -> Intervals:
        return union(np.stack((self._host.start[rows], self._host.end[rows]), axis=1))


def _either(left: Intervals, right: Intervals) -> Intervals:
    return union(np.concatenate((left, right)))


def explain(idle: Intervals, start: Int64, end: Int64, launch: Int64, host: HostEvents, work: HostWork) -> Gaps:
    """Splits the idle intervals into pieces of one class each; the pieces cover them exactly.

    `start`, `end`, `launch` [N] are the device's events (sorted by start) and the rows of their launches. A gap ends
    at its next event E, launched by call L on thread T:
    L began before the gap → `short` under 10 µs, else `queued` (E waited in its stream); otherwise up to L the gap is
    T's: `data`, `blocking` or `host`; during L `launch_call`; from L's return to E `launch_latency`. E without a
    launch → `unknown`. An event of no length inside a gap ends one and begins the next.
    """
    if not len(idle):
        none = np.empty(0, np.int64)
        return Gaps(none, none, none.astype(np.int8), none.astype(np.int32))
    begin, stop = _cut_at_instants(idle, start[start == end])
    following = np.searchsorted(start, stop, "left")
    ended = following < len(start)
    following = np.where(ended, following, 0)
    launched_by = np.where(ended, launch[following], NONE)
    linked = launched_by != NONE
    call_start, call_end = at_rows(host.start, launched_by), at_rows(host.end, launched_by)
    early = linked & (call_start <= begin)
    late = linked & ~early
    klass = np.full(len(begin), UNKNOWN, np.int8)
    klass[early] = np.where((stop - begin)[early] < SHORT_NS, SHORT, QUEUED)
    called = np.clip(call_start, begin, stop)
    returned = np.clip(call_end, called, stop)
    parts = [
        (begin[~late], stop[~late], klass[~late]),
        (called[late], returned[late], np.full(int(late.sum()), LAUNCH_CALL, np.int8)),
        (returned[late], stop[late], np.full(int(late.sum()), LAUNCH_LATENCY, np.int8)),
    ]
    threads = np.where(linked, at_rows(host.thread, launched_by), NONE)
    for thread in np.unique(threads[late]).tolist():
        rows = late & (threads == thread)
        parts += _before_the_call(np.stack((begin[rows], called[rows]), axis=1), work.of(thread))
    starts, ends, classes = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(starts, kind="stable")
    order = order[(ends > starts)[order]]
    starts, ends, classes = starts[order], ends[order], classes[order]
    gap = np.searchsorted(begin, starts, "right") - 1
    next_event = np.where(ended[gap], following[gap], NONE)
    return Gaps(starts, ends, classes, next_event.astype(np.int32))


def _cut_at_instants(idle: Intervals, instants: Int64) -> tuple[Int64, Int64]:
    instants = np.unique(instants)
    inside = np.searchsorted(idle[:, 0], instants, "left") - 1
    within = (inside >= 0) & (instants > idle[inside, 0]) & (instants < idle[inside, 1])
    begin = np.sort(np.concatenate((idle[:, 0], instants[within])))
    stop = np.sort(np.concatenate((idle[:, 1], instants[within])))
    return begin, stop


def _before_the_call(pieces: Intervals, work: ThreadWork) -> list[tuple[Int64, Int64, np.ndarray]]:
    whole = union(pieces) if len(pieces) else EMPTY
    data = intersect(whole, work.data)
    blocking = subtract(intersect(whole, work.blocking), work.data)
    rest = subtract(subtract(whole, data), blocking)
    return [
        (part[:, 0], part[:, 1], np.full(len(part), klass, np.int8))
        for part, klass in ((data, DATA), (blocking, BLOCKING), (rest, HOST))
    ]


def idle_by_class(gaps: Gaps, start: int, end: int) -> dict[str, int]:
    """ns of every class inside [start, end)."""
    length = np.clip(np.minimum(gaps.end, end) - np.maximum(gaps.start, start), 0, None)
    return {name: int(length[gaps.klass == number].sum()) for number, name in enumerate(IDLE_CLASSES)}
