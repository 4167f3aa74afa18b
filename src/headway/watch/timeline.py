"""A window as strips: for each kind of work, how much of each small piece of time it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.account.tree import STEP, UNACCOUNTED
from headway.diagnose.facts import IDLE_CLASSES, KINDS, DeviceFacts
from headway.diagnose.run_facts import RunFacts
from headway.watch import format as fmt
from headway.watch.palette import STEP_PAINT, Paint
from headway.watch.trace_palette import IDLE_PAINT, TRACE_PAINT

COLUMNS = 720
_LEVELS = 99


def device_timeline(device: DeviceFacts, columns: int = COLUMNS) -> dict[str, Any]:
    """Strips of one device's window: kinds of kernels, then causes of idling; marks where steps begin."""
    window = device.window
    edges = np.linspace(window.start_ns, window.end_ns, columns + 1)
    rows = []
    for number, kind in enumerate(KINDS):
        mine = device.events.kind == number
        shares = covered(device.events.start[mine], device.events.end[mine], edges)
        rows += _row(TRACE_PAINT[kind], shares)
    for number, name in enumerate(IDLE_CLASSES):
        mine = device.gaps.klass == number
        shares = covered(device.gaps.start[mine], device.gaps.end[mine], edges)
        rows += _row(IDLE_PAINT[name], shares)
    wall = max(1, window.wall_ns)
    marks = [
        {"at": (step.start_ns - window.start_ns) / wall, "label": step.name.replace("ProfilerStep#", "step ")}
        for step in device.steps.rows
    ]
    until = fmt.seconds(wall / 1e9)
    return {
        "rows": rows, "columns": columns, "marks": marks, "from": "0", "to": until, "unit": wall / columns / 1e9,
    }  # fmt: skip


def run_timeline(run: RunFacts, columns: int = COLUMNS) -> dict[str, Any]:
    """Strips of a run's steps: each category's share of each step (of neighbouring steps, where there are many)."""
    lines = run.steps
    if not lines:
        return {"rows": [], "columns": 0, "marks": [], "from": "", "to": "", "unit": 0.0}
    columns = min(columns, len(lines))
    place = np.arange(len(lines)) * columns // len(lines)
    wall = np.bincount(place, [line.wall_ns for line in lines], columns)
    rows = []
    for path in STEP.paths():
        if path in STEP_PAINT and any(path in line.account for line in lines):
            spent = np.bincount(place, [line.account.get(path, 0) for line in lines], columns)
            rows += _row(STEP_PAINT[path], spent / np.maximum(wall, 1), always=path == UNACCOUNTED)
    first, last = lines[0].step, lines[-1].step
    return {"rows": rows, "columns": columns, "marks": [], "from": f"step {first:,}", "to": f"{last:,}", "unit": 0.0}


def covered(start: NDArray[np.int64], end: NDArray[np.int64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of each piece between two edges that the intervals cover, 0 to 1; intervals that overlap count once each,
    cut at 1. Exact by differences of the integral, at a cost of N + columns."""
    if not len(start):
        return np.zeros(len(edges) - 1)
    width = np.diff(edges)
    integral = _integral(start.astype(float), edges) - _integral(end.astype(float), edges)
    return np.clip(np.diff(integral) / np.maximum(width, 1e-9), 0.0, 1.0)


def _integral(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """At each edge e, the sum over all times t < e of (e - t)."""
    times = np.sort(times)
    before = np.searchsorted(times, edges, "left")
    origin = edges[0]  # sums of differences: absolute times would lose the small digits
    total = np.concatenate(([0.0], np.cumsum(times - origin)))
    return before * (edges - origin) - total[before]


def _row(paint: Paint, shares: NDArray[np.float64], always: bool = False) -> list[dict[str, Any]]:
    mean = float(shares.mean()) if len(shares) else 0.0
    if mean < 0.0005 and not always:
        return []
    # A piece that holds something must show: a kernel of 3 µs in a bucket of 2 ms would round away.
    levels = np.where(shares > 0, np.maximum(1, np.round(shares * _LEVELS)), 0).astype(int)
    return [{"label": paint.label, "color": [paint.light, paint.dark], "share": mean, "values": levels.tolist()}]


def rank_table(ranks: Sequence[DeviceFacts]) -> list[tuple[str, list[int]]]:
    """(category, ns on each rank) of what the ranks' traces say, categories that nobody has left out."""
    rows: list[tuple[str, list[int]]] = [
        ("compute", [item.shares.compute_ns for item in ranks]),
        ("communication", [item.shares.exposed_comm_ns for item in ranks]),
        ("copies", [item.shares.exposed_mem_ns for item in ranks]),
    ]
    for name in IDLE_CLASSES:
        rows.append((IDLE_PAINT[name].label, [item.shares.idle.get(name, 0) for item in ranks]))
    return [(label, values) for label, values in rows if any(values)]
