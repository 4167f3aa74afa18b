"""The host is busy elsewhere: it saves, logs, reads files or sleeps, and the device waits for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.account.intervals import Intervals, subtract, union
from headway.diagnose import recording
from headway.diagnose.case import Case
from headway.diagnose.facts import NONE, HostKind
from headway.diagnose.finding import Finding
from headway.diagnose.findings.garbage import GC
from headway.diagnose.findings.recompiles import COMPILE
from headway.diagnose.linking import at_rows, innermost_open
from headway.diagnose.view import View, ms
from headway.diagnose.window import main_thread

NOTABLE, _EACH = 0.05, 0.02
# A shorter wait is one for launches, which has a finding of its own; a shorter range does not fill a longer wait.
_LONG_NS, _RANGE_NS = 1_000_000, 50_000
# Less of it idle, and the step's own work is done in a range: `forward` around a pause is not busy elsewhere. What
# the host does on a GPU may begin while the queue is still full.
_OF_RANGE_CPU, _OF_RANGE_GPU = 0.5, 0.3
_NAMED = (HostKind.ANNOTATION, HostKind.PYTHON, HostKind.OP)
# What a step is made of on every rank, as loops, PyTorch and Lightning call it (case does not matter). What backward
# waits for is not seen from outside, and an operator in which the host stands still (a collection, another process) is
# the step's own work.
STEPS_WORK = (
    r"run_backward|^nn\.Module:|^(?:Optimizer|Scheduler)\.\w+#|^\w+Backward\d|"
    r"^\W*(?:forward|backward|fwd|bwd|optimi[sz]er|loss|zero_grad|update)\b|"
    r"^(?:aten|prims?|autograd|torch|c10d?|nccl|gloo)::?|"
    r"^\[pl\](?:\[module\]|.*(?:run_training_\w+|training_step|backward|optimizer_step|optimizer_zero_grad)$)"
)
# What frames everything, and the profiler's own work, name no cause either.
_FRAMES = re.compile(
    r"^ProfilerStep#|^(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?)[ _#:=-]*\d+$|: <module>$|torch/profiler/|"
    rf"autograd/profiler|^<built-in method exec|importlib|^headway\.|{STEPS_WORK}",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class _Busy:
    """One name under which the device idles. rows: host events; ns: idle time in which they are innermost."""

    name: str
    ns: int
    count: int
    longest: int  # row of the host event that holds most


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the long waits that lie under host ranges with a name. Surely won: half of them, by doing the same
    every second step only; a thread beside the loop may win all of it, unless it needs the interpreter or the cores."""
    view = case.view
    thread = main_thread(view.rank)
    waits = _long_waits(view, thread)
    busy = [one for one in _by_name(view, thread, waits) if one.ns >= _EACH * view.wall_ns]
    total = sum(one.ns for one in busy)
    if total < NOTABLE * view.wall_ns:
        return
    yield Finding(
        name="host-busy",
        title=f"the host is busy elsewhere: {busy[0].name[:60]}",
        claims={"idle.host": total},
        lower_ns=total // 2,
        wall_ns=view.wall_ns,
        evidence=tuple(
            f"{one.name[:80]}: {one.count:,}×, the {'device idles' if view.on_gpu else 'loop computes nothing for'} "
            f"{ms(one.ns)} ({one.ns / view.wall_ns:.1%}) meanwhile{_around(view, thread, one)}"
            for one in busy[:4]
        ),
        check="leave the named call out for a few steps: the step gets shorter by this much",
        remedy="move-off-the-loop",
        within="straggler-constant",  # the same seconds, seen from the rank that others wait for
        recorded_ns=recording.beside_pauses(view, total),
    )


def _long_waits(view: View, thread: int) -> Intervals:
    """Pieces of idle in which the loop's thread had not launched what came next, without collections, compilations."""
    gaps = view.device.gaps
    mask = view.gaps("host") & (gaps.end - gaps.start >= _LONG_NS)
    if view.on_gpu:
        following = np.where(gaps.next_event == NONE, 0, gaps.next_event)
        launch = view.device.events.launch[following]
        elsewhere = (gaps.next_event != NONE) & (launch != NONE) & (at_rows(view.rank.host.thread, launch) != thread)
        mask &= ~elsewhere
    other = [view.host_intervals(view.host_rows(pattern, _NAMED)) for pattern in (GC, COMPILE)]
    return subtract(union(view.gap_intervals(mask)), union(np.concatenate(other)))


def _by_name(view: View, thread: int, waits: Intervals) -> list[_Busy]:
    """Names of the innermost ranges over the waits, most time first."""
    host = view.rank.host
    rows = _ranges(view, thread)
    if not len(rows) or not len(waits):
        return []
    edges = np.unique(np.concatenate((waits.reshape(-1), host.start[rows], host.end[rows])))
    edges = edges[(edges >= waits[0, 0]) & (edges <= waits[-1, 1])]
    zeros = np.zeros(len(edges), np.int32)
    owner = innermost_open(edges, zeros, host.start[rows], host.end[rows], np.zeros(len(rows), np.int32))[:-1]
    inside = np.searchsorted(waits[:, 0], edges[:-1], "right") - 1
    spent = np.where((inside >= 0) & (edges[:-1] < waits[np.maximum(inside, 0), 1]), np.diff(edges), 0)
    names = [_ADDRESS.sub("", name) for name in view.rank.names]
    held = (owner != NONE) & (spent > 0)
    by_row = np.bincount(owner[held], weights=spent[held].astype(np.float64), minlength=len(rows)).astype(np.int64)
    by_name: dict[str, list[int]] = {}
    for at in np.flatnonzero(by_row).tolist():
        by_name.setdefault(names[host.name[rows[at]]], []).append(at)
    least = _OF_RANGE_GPU if view.on_gpu else _OF_RANGE_CPU
    found = []
    for name, mine in by_name.items():
        ns, lasted = int(by_row[mine].sum()), int((host.end[rows[mine]] - host.start[rows[mine]]).sum())
        if not _FRAMES.search(name) and ns >= least * lasted:
            found.append(_Busy(name, ns, len(mine), int(rows[max(mine, key=lambda at: by_row[at])])))
    return sorted(found, key=lambda one: -one.ns)


def _ranges(view: View, thread: int) -> NDArray[np.intp]:
    """Rows of the loop's own ranges that could fill a wait, frames among them: they end what lies outside of them."""
    host, window = view.rank.host, view.device.window
    good = np.isin(host.kind, _NAMED) & (host.thread == thread) & (host.end - host.start >= _RANGE_NS)
    return np.flatnonzero(good & (host.end > window.start_ns) & (host.start < window.end_ns))


def _around(view: View, thread: int, one: _Busy) -> str:
    """The nearest range around the longest one, in words: which line calls it."""
    host = view.rank.host
    rows = _ranges(view, thread)
    start, end = host.start[one.longest], host.end[one.longest]
    outer = rows[(host.start[rows] <= start) & (host.end[rows] >= end) & (rows != one.longest)]
    names = [view.rank.names[host.name[row]] for row in outer.tolist()]
    names = [name for name in names if name.endswith("<module>") or not _FRAMES.search(name)]
    return f", in {names[-1][:60]}" if names else ""
