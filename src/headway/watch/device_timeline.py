"""What one device did over its window, in slices narrow enough for a screen; every slice adds up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.account.intervals import Intervals, union
from headway.diagnose.facts import IDLE_CLASSES, KINDS, DeviceFacts, GpuClass, RankFacts
from headway.diagnose.shares import Unions, covered, of_events
from headway.watch.palette import Paint
from headway.watch.trace_palette import IDLE_PAINT, TRACE_PAINT

SLICES = 560
_LANES = 8
Slices = NDArray[np.int64]


def timeline(rank: RankFacts, device: DeviceFacts) -> dict[str, Any] | None:
    """Layers (kinds of kernels, communication, copies, causes of idling) as shares of each slice; lanes (one a stream)
    with the kind that holds most of each slice; and where the steps lie. None for a window without length."""
    window = device.window
    edges = slice_edges(window.start_ns, window.end_ns)
    if len(edges) < 2:
        return None
    layers = _layers(device, edges)
    length = np.diff(edges)
    return {
        "seconds": window.wall_ns / 1e9,
        "layers": [_layer(paint, ns / length) for paint, ns in layers],
        "lanes": _lanes(rank, device, edges),
        "steps": [
            {
                "name": row.name.removeprefix("ProfilerStep#"),
                "from": _plain((row.start_ns - window.start_ns) / window.wall_ns),
                "to": _plain((row.end_ns - window.start_ns) / window.wall_ns),
            }
            for row in device.steps.rows
        ],
    }


def slice_edges(start: int, end: int) -> Slices:
    """int64 [B+1], B ≤ SLICES slices of at least a nanosecond."""
    number = min(SLICES, max(0, end - start))
    return start + np.arange(number + 1, dtype=np.int64) * (end - start) // max(1, number)


def _inside(intervals: Intervals, edges: Slices) -> Slices:
    return covered(intervals, edges[:-1], edges[1:])


def _layers(device: DeviceFacts, edges: Slices) -> list[tuple[Paint, NDArray[np.float64]]]:
    """(paint, ns [B]) from the bottom up. Kernels of different kinds that run at once share the time they cover."""
    events = device.events
    parts = of_events(events, int(edges[0]), int(edges[-1]))
    computing = _inside(parts.compute, edges)
    kinds = {}
    for kind in np.unique(events.kind[events.klass == GpuClass.COMPUTE]).tolist():
        rows = (events.kind == kind) & (events.klass == GpuClass.COMPUTE)
        kinds[kind] = _inside(_union(device, rows), edges)
    together = np.maximum(np.sum(list(kinds.values()), axis=0), 1) if kinds else np.ones(len(edges) - 1)
    order = sorted(kinds, key=lambda kind: -int(kinds[kind].sum()))
    found = [(TRACE_PAINT[KINDS[kind]], computing * kinds[kind] / together) for kind in order]
    found += [(paint, ns.astype(np.float64)) for paint, ns in _rest(device, parts, edges)]
    return [(paint, ns) for paint, ns in found if ns.any()]


def _rest(device: DeviceFacts, parts: Unions, edges: Slices) -> list[tuple[Paint, Slices]]:
    comm = Paint("exposed communication", TRACE_PAINT["collective"].light, TRACE_PAINT["collective"].dark)
    copies = Paint("exposed copies", TRACE_PAINT["copy"].light, TRACE_PAINT["copy"].dark)
    rest = [(comm, _inside(parts.exposed_comm, edges)), (copies, _inside(parts.exposed_mem, edges))]
    gaps = device.gaps
    for number, name in enumerate(IDLE_CLASSES):
        rows = gaps.klass == number
        pieces = np.stack((gaps.start[rows], gaps.end[rows]), axis=1)
        rest.append((IDLE_PAINT[name], _inside(union(pieces), edges)))
    return rest


def _union(device: DeviceFacts, rows: NDArray[np.bool_]) -> Intervals:
    events = device.events
    return union(np.stack((events.start[rows], events.end[rows]), axis=1))


def _lanes(rank: RankFacts, device: DeviceFacts, edges: Slices) -> list[dict[str, Any]]:
    """The busiest streams (threads on a CPU): how full each slice is, and of what mostly."""
    events = device.events
    streams, place = np.unique(events.stream, return_inverse=True)
    busy = np.bincount(place, weights=(events.end - events.start).astype(np.float64)) if len(events) else np.empty(0)
    length = np.diff(edges)
    lanes = []
    for at in np.argsort(-busy)[:_LANES].tolist():
        on = place == at
        kinds = np.unique(events.kind[on]).tolist()
        held = np.stack([_inside(_union(device, on & (events.kind == kind)), edges) for kind in kinds])
        full = _inside(_union(device, on), edges) / length
        if not full.any():
            continue
        stream = int(streams[at])
        name = f"stream {stream}" if device.kind == "gpu" else _thread(rank, stream)
        lanes.append(
            {
                "name": name,
                "full": [_plain(value) for value in full.tolist()],
                "of": [kinds[int(i)] for i in held.argmax(axis=0).tolist()],
            }
        )
    return lanes


def kinds_painted() -> list[dict[str, Any]]:
    """Names and colours that lanes refer to by number."""
    return [_named(TRACE_PAINT[kind]) for kind in KINDS]


def _thread(rank: RankFacts, number: int) -> str:
    text = rank.threads[number] if 0 <= number < len(rank.threads) else str(number)
    return "thread " + text.partition("/")[2][:24]


def _named(paint: Paint) -> dict[str, Any]:
    return {"name": paint.label, "color": [paint.light, paint.dark]}


def _layer(paint: Paint, shares: NDArray[np.float64]) -> dict[str, Any]:
    return {**_named(paint), "values": [_plain(value) for value in shares.tolist()]}


def _plain(value: float) -> float:
    return float(f"{value:.4g}")
