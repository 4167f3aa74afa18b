"""One trace file read into sorted tables, with everything that cannot be true taken out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.account.errors import UserError
from headway.diagnose.columns import Columns
from headway.diagnose.decoding import decoder_for
from headway.diagnose.facts import Damage, HostEvents, HostKind, Int8, Int32, Int64
from headway.diagnose.piece import CommArgs
from headway.diagnose.source import Source
from headway.diagnose.splitting import Splitter

_DAY = 86_400 * 10**9
_LONGEST = 7 * _DAY  # no slice of a profile lasts longer
_LAUNCHES_WITHOUT_GPU = 8


@dataclass(frozen=True)
class GpuTable:
    """GPU events of all devices, sorted by start (in file order where equal). Columns of length N."""

    start: Int64
    end: Int64
    name: Int32
    code: Int8  # piece.KERNEL, MEMCPY, MEMSET
    device: Int32
    stream: Int32
    correlation: Int64
    size: Int64
    comm: Mapping[int, CommArgs]  # row → communication metadata

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Trace:
    """A file as read: tables, texts, and what was lost."""

    path: Path
    gpu: GpuTable
    host: HostEvents
    host_comm: Mapping[int, CommArgs]
    names: tuple[str, ...]
    threads: tuple[str, ...]
    shapes: tuple[str, ...]
    damage: Damage
    metadata: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def base_ns(self) -> int:
        base = self.metadata.get("baseTimeNanoseconds")
        return base if isinstance(base, int) and abs(base) < 2**62 else 0


def read_trace(path: Path, workers: int | None = None) -> Trace:
    """Reads a Kineto or Chrome trace, plain or gzip, with `workers` processes beside this one (None: as the file is
    worth). Raises UserError where it holds nothing to account."""
    splitter, columns = Splitter(Source(path)), Columns()
    with decoder_for(path, workers) as decoder:
        for piece in splitter.pieces(decoder):
            columns.add(piece)
    lost, mended = splitter.losses.lost, splitter.losses.mended
    gpu, kept_gpu = _gpu_table(columns, lost)
    host, kept_host = _host_table(columns, lost)
    damage = Damage(
        kept=len(gpu) + len(host),
        lost={reason: count for reason, count in lost.items() if count},
        mended={reason: count for reason, count in mended.items() if count},
        truncated=splitter.truncated,
    )
    if not damage.kept:
        raise UserError(_nothing(path, damage))
    if not len(gpu) and (launches := _launches(columns, host)) >= _LAUNCHES_WITHOUT_GPU:
        raise UserError(
            f"{path}: the trace is missing its GPU events: {launches:,} kernel launches and not one GPU event. "
            "The device was busy, but the profiler recorded nothing of it: profile again with ProfilerActivity.CUDA, "
            "after a warm-up step, with no other profiler (nsys, DCGM profiling) attached"
        )
    if not len(gpu) and damage.truncated and (devices := _devices(splitter.metadata)):
        raise UserError(
            f"{path}: the trace is cut off before its GPU events ({damage.truncated}): {devices} is named, and not one "
            "event of it is left; copy or export the file again"
        )
    notes = []
    if columns.other_phases and not damage.lost:
        notes.append(f"{columns.other_phases} begin/end pairs of events were not read: only complete slices count")
    return Trace(
        path=path,
        gpu=_with_comm(gpu, columns.comm["gpu"], kept_gpu),
        host=host,
        host_comm=_renumbered(columns.comm["host"], kept_host),
        names=tuple(columns.names),
        threads=_thread_texts(columns),
        shapes=tuple(raw.decode("utf-8", "replace") for raw in columns.shapes),
        damage=damage,
        metadata=splitter.metadata,
        notes=tuple(notes),
    )


def _devices(metadata: Mapping[str, Any]) -> str:
    """What the trace says it was recorded on; a CPU-only one names no device."""
    devices = metadata.get("deviceProperties")
    if not isinstance(devices, list) or not devices:
        return ""
    return str(devices[0].get("name", "a GPU")) if isinstance(devices[0], dict) else "a GPU"


def _nothing(path: Path, damage: Damage) -> str:
    lost = sum(damage.lost.values())
    if lost:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(damage.lost.items()))
        return f"{path}: none of its {lost} events can be read ({reasons})"
    if damage.truncated:
        return f"{path}: no events in this trace: {damage.truncated}"
    return f"{path}: no events in this trace: the profiler recorded nothing (was prof.step() called, did it start?)"


def _launches(columns: Columns, host: HostEvents) -> int:
    names = tuple(columns.names)
    launching = [number for number, name in enumerate(names) if is_launch(name)]
    return int((np.isin(host.name, launching) & (host.kind == HostKind.RUNTIME)).sum())


def is_launch(name: str) -> bool:
    """Whether a runtime call starts a kernel (or a graph of them)."""
    return "Launch" in name and "LaunchHostFunc" not in name


def _gpu_table(columns: Columns, lost: Counter[str]) -> tuple[GpuTable, Int64]:
    table = columns.gpu
    start, duration = table.joined("start", np.int64), table.joined("duration", np.int64)
    kept = _possible(start, duration, columns, lost, "GPU event")
    order = kept[np.argsort(start[kept], kind="stable")]
    start = start[order]
    return GpuTable(
        start=start,
        end=start + duration[order],
        name=table.joined("name", np.int32)[order],
        code=table.joined("code", np.int8)[order],
        device=table.joined("device", np.int32)[order],
        stream=table.joined("stream", np.int32)[order],
        correlation=table.joined("correlation", np.int64)[order],
        size=table.joined("size", np.int64)[order],
        comm={},
    ), order


def _host_table(columns: Columns, lost: Counter[str]) -> tuple[HostEvents, Int64]:
    table = columns.host
    start, duration = table.joined("start", np.int64), table.joined("duration", np.int64)
    kept = _possible(start, duration, columns, lost, "host event")
    order = kept[_outer_first(start[kept], duration[kept])]
    start = start[order]
    return HostEvents(
        start=start,
        end=start + duration[order],
        name=table.joined("name", np.int32)[order],
        kind=table.joined("kind", np.int8)[order],
        thread=table.joined("thread", np.int32)[order],
        correlation=table.joined("correlation", np.int64)[order],
        shapes=table.joined("shapes", np.int32)[order],
        types=table.joined("types", np.int32)[order],
    ), order


def _outer_first(start: Int64, duration: Int64) -> Int64:
    """Rows by start; of those that start together the longest first (in file order where equal)."""
    order = np.argsort(start, kind="stable")
    tied = start[order[1:]] == start[order[:-1]]
    together = np.flatnonzero(np.append(tied, False) | np.append(False, tied))
    rows = order[together]
    order[together] = rows[np.lexsort((-duration[rows], start[rows]))]
    return order


def _possible(start: Int64, duration: Int64, columns: Columns, lost: Counter[str], what: str) -> Int64:
    """Rows whose times can be true. A few events at time 0 in a trace that begins much later have lost theirs."""
    longest = _LONGEST
    if columns.spans:
        span = max(end for _, end in columns.spans) - min(begin for begin, _ in columns.spans)
        longest = min(longest, 2 * span + 60 * 10**9)
    timed = start > -_LONGEST
    lasting = (duration >= 0) & (duration <= longest)
    possible = timed & lasting
    positive = start[possible & (start > 0)]
    if len(positive) and int(np.median(positive)) > 60 * 10**9:
        timed &= start > 0
    lost[f"{what}s with an impossible duration"] += int((timed & ~lasting).sum())
    lost[f"{what}s without a time"] += int((~timed).sum())
    return np.flatnonzero(timed & lasting)


def _renumbered(comm: dict[int, CommArgs], order: Int64) -> dict[int, CommArgs]:
    """Metadata by row as read → by row of the sorted table."""
    if not comm:
        return {}
    place: NDArray[np.int64] = np.full(int(max(order.max(initial=0), max(comm))) + 1, -1, np.int64)
    place[order] = np.arange(len(order))
    return {int(place[row]): args for row, args in comm.items() if place[row] >= 0}


def _with_comm(gpu: GpuTable, comm: dict[int, CommArgs], order: Int64) -> GpuTable:
    return GpuTable(**{**gpu.__dict__, "comm": _renumbered(comm, order)})


def _thread_texts(columns: Columns) -> tuple[str, ...]:
    names = columns.thread_names
    return tuple(f"{pid}/{tid} {names.get((str(pid), str(tid)), '')}".rstrip() for pid, tid in columns.threads)
