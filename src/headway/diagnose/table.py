"""The kernel table, time by kind, and how finely the device's work is cut. Inside one window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.diagnose.facts import (
    IDLE_CLASSES,
    KINDS,
    NONE,
    Fragmentation,
    Gaps,
    GpuEvents,
    Int64,
    KernelRow,
    Steps,
    Window,
)

SHORT_NS = 10_000
LAUNCH_GAP_NS = 100_000  # between two kernels of one stretch of work a host needs less than this for each launch
_LAUNCHING = tuple(IDLE_CLASSES.index(name) for name in ("host", "launch_call", "launch_latency", "short"))


def inside(events: GpuEvents, window: Window) -> Int64:
    """Rows that begin in the window, or reach into it."""
    return np.flatnonzero((events.start < window.end_ns) & (events.end >= window.start_ns))


def clipped(events: GpuEvents, rows: Int64, window: Window) -> Int64:
    """Durations [len(rows)] of what lies inside the window."""
    return np.minimum(events.end[rows], window.end_ns) - np.maximum(events.start[rows], window.start_ns)


def kernel_table(events: GpuEvents, names: Sequence[str], window: Window) -> tuple[KernelRow, ...]:
    """One row a name and kind, longest total first."""
    rows = inside(events, window)
    if not len(rows):
        return ()
    durations = clipped(events, rows, window)
    keys = events.name[rows].astype(np.int64) * len(KINDS) + events.kind[rows]
    # By key, then by duration. A stable sort of 16-bit numbers is a radix sort, several times as fast as any other.
    narrow = keys.astype(np.uint16) if int(keys.max()) < 1 << 16 else keys
    order = np.argsort(durations)
    order = order[np.argsort(narrow[order], kind="stable")]
    found, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(durations[order], first)
    middles = durations[order][first + counts // 2]
    whole = max(int(durations.sum()), 1)
    table = [
        KernelRow(names[key // len(KINDS)], KINDS[key % len(KINDS)], int(count), int(total), int(middle), total / whole)
        for key, count, total, middle in zip(found.tolist(), counts, sums.tolist(), middles, strict=True)
    ]
    return tuple(sorted(table, key=lambda row: -row.total_ns))


def time_by_kind(events: GpuEvents, window: Window) -> dict[str, int]:
    """ns of every kind that occurs, longest first; overlapping streams count each."""
    rows = inside(events, window)
    sums = np.zeros(len(KINDS), np.int64)
    np.add.at(sums, events.kind[rows], clipped(events, rows, window))
    return {KINDS[kind]: int(sums[kind]) for kind in np.argsort(-sums, kind="stable").tolist() if sums[kind]}


def fragmentation(events: GpuEvents, gaps: Gaps, window: Window, steps: Steps, is_kernel: np.ndarray) -> Fragmentation:
    """`is_kernel` [N]: the event is a kernel, neither copy nor memset."""
    rows = np.flatnonzero((events.start >= window.start_ns) & (events.start <= window.end_ns))
    kernels = rows[is_kernel[rows]]
    durations = events.duration[kernels]
    short = durations < SHORT_NS
    busy = int(durations.sum())
    launching = np.isin(gaps.klass, _LAUNCHING) & (gaps.next_event != NONE) & (gaps.end - gaps.start < LAUNCH_GAP_NS)
    waited = int((gaps.end - gaps.start)[launching].sum())
    launches, owned = np.unique(events.launch[rows][events.launch[rows] != NONE], return_counts=True)
    return Fragmentation(
        kernels=len(kernels),
        kernels_per_step=_per_step(events.start[kernels], window, steps),
        median_ns=int(np.median(durations)) if len(durations) else 0,
        short_by_count=float(short.mean()) if len(durations) else 0.0,
        short_by_time=int(durations[short].sum()) / busy if busy else 0.0,
        launch_bound=waited / window.wall_ns if window.wall_ns else 0.0,
        unlinked=int((events.launch[rows] == NONE).sum()),
        graph_kernels=int(owned[owned > 1].sum()) if len(launches) else 0,
    )


def _per_step(start: Int64, window: Window, steps: Steps) -> float | None:
    """Kernels a step, of those inside the steps: a window of GPU events may hold more than them."""
    if not steps.rows:
        return None
    whole = window.source == "steps"
    first = window.start_ns if whole else steps.rows[0].start_ns
    last = window.end_ns if whole else steps.rows[-1].end_ns
    return int(((start >= first) & (start <= last)).sum()) / len(steps.rows)
