"""The host waits for the device, or stops it: `.item()` and its kin, and an allocator that calls the driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headway.diagnose.case import Case
from headway.diagnose.facts import HostKind
from headway.diagnose.finding import Finding
from headway.diagnose.view import View, ms

NOTABLE = 0.02
ALLOCATOR = (
    r"^(cuda|hip)(Malloc|Free)(Async|Host|FromPoolAsync|Managed)?$|^(cuMem(Create|Map|Unmap|Release)|cudaHostAlloc)$"
)
SYNC = r"Synchronize$|^(cuda|hip)Memcpy(Async|WithStream)?$|^(cuda|hip)StreamWaitValue"
_READS = r"^aten::(item|_local_scalar_dense|nonzero|is_nonzero|equal)$"
# A launch cannot reach the device sooner after the host wakes up.
_LATENCY_NS = 10_000
# The first call to the driver's allocator makes the context and loads modules. No later one takes so long.
_FIRST_USE_NS = 100_000_000


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: idle time under such calls. Put back: one launch latency for each call that made the device wait."""
    view = case.view
    if not view.on_gpu:
        return
    yield from _one(
        view, "allocator", "the allocator stops the device", ALLOCATOR, "keep-memory",
        "count cudaMalloc and cudaFree (hipMalloc, hipFree) after the first steps: there should be none",
    )  # fmt: skip
    yield from _one(
        view, "host-sync", "the host waits for the device", SYNC, "no-host-sync",
        "torch.cuda.set_sync_debug_mode('warn') names each line that waits",
    )  # fmt: skip


def first_uses(view: View) -> NDArray[np.intp]:
    """Rows of calls to the allocator that set the device up: the first of their name, long, in a window that is not of
    steps that someone chose to record. Start-up is no step's cost."""
    rows = view.host_rows(ALLOCATOR, (HostKind.RUNTIME,))
    host = view.rank.host
    rows = rows[host.duration[rows] >= _FIRST_USE_NS]
    if view.device.window.source == "steps" or not view.on_gpu:
        return rows[:0]
    first = [row for row in rows.tolist() if row == np.argmax(host.name == host.name[row])]
    return np.array(first, np.intp)


def first_use_ns(view: View) -> int:
    """ns that the device idles while it is set up."""
    return view.overlap_with_idle(first_uses(view), "blocking")


def first_use_note(view: View) -> list[str]:
    rows, spent = first_uses(view), first_use_ns(view)
    if spent < NOTABLE * view.wall_ns:
        return []
    names = ", ".join(sorted({view.rank.names[i] for i in view.rank.host.name[rows]}))
    return [
        f"the first {names} takes {ms(spent)} ({spent / view.wall_ns:.0%} of the window): the device is being set up, "
        "which no later step pays and no finding claims; record a few steps after some warm-up"
    ]


def _one(view: View, name: str, title: str, calls: str, remedy: str, check: str) -> Iterator[Finding]:
    rows = np.setdiff1d(view.host_rows(calls, (HostKind.RUNTIME,)), first_uses(view))
    idle = view.overlap_with_idle(rows, "blocking")
    if idle < NOTABLE * view.wall_ns:
        return
    host = view.rank.host
    names = sorted({view.rank.names[i] for i in host.name[rows]})
    waits = len(view.gap_intervals(view.gaps("blocking")))
    evidence = [f"{len(rows):,} calls in the window ({', '.join(names)}); the device idles {ms(idle)} under them"]
    reads = view.host_rows(_READS, (HostKind.OP,))
    if name == "host-sync" and len(reads):
        kinds = sorted({view.rank.names[i] for i in host.name[reads]})
        evidence.append(f"{len(reads) / view.steps:,.1f} reads of device values a step ({', '.join(kinds)})")
    yield Finding(
        name=name,
        title=title,
        claims={"idle.blocking": idle},
        lower_ns=max(0, idle - min(waits, len(rows)) * _LATENCY_NS),
        wall_ns=view.wall_ns,
        evidence=tuple(evidence),
        check=check,
        remedy=remedy,
    )
