"""What findings ask of one device's trace, computed once: events by name and region, their time inside the window."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headway.account.intervals import Intervals, clip, intersect, measure
from headway.diagnose.facts import (
    IDLE_CLASSES,
    KINDS,
    NONE,
    Collective,
    DeviceFacts,
    GpuClass,
    HostKind,
    Int64,
    RankFacts,
)

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class View:
    """One device of one rank. Times are ns inside the device's window."""

    rank: RankFacts
    device: DeviceFacts

    @property
    def wall_ns(self) -> int:
        return self.device.window.wall_ns

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def idle(self) -> dict[str, int]:
        return dict(self.device.shares.idle)

    @cached_property
    def steps(self) -> int:
        """Complete steps in the window; 1 where the trace has none."""
        return len(self.device.steps.rows) or 1

    # --- device events

    @cached_property
    def inside(self) -> Mask:
        """Device events that touch the window."""
        events, window = self.device.events, self.device.window
        return (events.end > window.start_ns) & (events.start < window.end_ns)

    @cached_property
    def spent(self) -> Int64:
        """Each device event's ns inside the window."""
        events, window = self.device.events, self.device.window
        start = np.clip(events.start, window.start_ns, window.end_ns)
        return np.maximum(np.clip(events.end, window.start_ns, window.end_ns) - start, 0)

    def named(self, pattern: str) -> Mask:
        """Device events inside the window whose name matches the regular expression."""
        return self._names_match(pattern)[self.device.events.name] & self.inside

    def of_kind(self, *kinds: str) -> Mask:
        wanted = [KINDS.index(kind) for kind in kinds]
        return np.isin(self.device.events.kind, wanted) & self.inside

    def from_op(self, pattern: str) -> Mask:
        """Device events inside the window whose innermost launching operator's name matches.

        On a CPU the events are the operators themselves.
        """
        events = self.device.events
        if not self.on_gpu:
            return self.named(pattern)
        known = events.op >= 0
        result = np.zeros(len(events), bool)
        match = self._names_match(pattern)
        result[known] = match[self.rank.host.name[events.op[known]]]
        return result & self.inside

    def under(self, pattern: str, kinds: Sequence[HostKind] = (HostKind.ANNOTATION, HostKind.OP)) -> Mask:
        """Device events inside the window that were launched (on a CPU: ran) during a host event whose name matches,
        on the thread of that host event."""
        events, host = self.device.events, self.rank.host
        result = np.zeros(len(events), bool)
        regions = self.host_rows(pattern, kinds)
        if not len(regions):
            return result
        rows = events.launch if self.on_gpu else events.op
        known = np.flatnonzero((rows >= 0) & self.inside)
        launched, thread = host.start[rows[known]], host.thread[rows[known]]
        for one in np.unique(host.thread[regions]):
            mine = regions[host.thread[regions] == one]
            starts = host.start[mine]
            ends = np.maximum.accumulate(host.end[mine])
            at = np.searchsorted(starts, launched, side="right") - 1
            hit = (at >= 0) & (launched < ends[np.maximum(at, 0)]) & (thread == one)
            result[known[hit]] = True
        return result

    def time(self, mask: Mask) -> int:
        """Summed ns of these device events inside the window."""
        return int(self.spent[mask].sum())

    def near(self, rows: Mask, places: int, measure_by: Mask | None = None) -> Mask:
        """Device events at most so many places from one of `rows`.

        On a CPU an operator is many pieces, most of them of no length to speak of: those below a twentieth of the
        longest of `measure_by` (`rows` where it is not given) are no places.
        """
        longest = int(self.spent[rows if measure_by is None else measure_by].max(initial=0))
        counted = np.ones(len(rows), bool) if self.on_gpu else self.spent * 20 >= longest
        rows = rows & counted
        order = np.flatnonzero(counted)
        found = np.zeros(len(rows), bool)
        for place in np.flatnonzero(rows[order]).tolist():
            found[order[max(0, place - places) : place + places + 1]] = True
        return found

    def union(self, mask: Mask) -> Intervals:
        """Where these device events ran, inside the window."""
        events, window = self.device.events, self.device.window
        return clip(np.stack((events.start[mask], events.end[mask]), axis=1), window.start_ns, window.end_ns)

    @cached_property
    def computing(self) -> Mask:
        return (self.device.events.klass == GpuClass.COMPUTE) & self.inside

    def top_names(self, mask: Mask, count: int = 3) -> list[tuple[str, int, int]]:
        """(name, events, ns) of the names that take most time."""
        names = self.device.events.name[mask]
        if not len(names):
            return []
        number = np.bincount(names, minlength=len(self.rank.names))
        spent = np.bincount(names, weights=self.spent[mask].astype(np.float64), minlength=len(self.rank.names))
        order = np.argsort(-spent)[:count]
        return [(self.rank.names[i], int(number[i]), int(spent[i])) for i in order if number[i]]

    # --- idle gaps

    def gaps(self, *classes: str) -> Mask:
        wanted = [IDLE_CLASSES.index(name) for name in classes]
        return np.isin(self.device.gaps.klass, wanted)

    def gap_intervals(self, mask: Mask) -> Intervals:
        gaps = self.device.gaps
        return np.stack((gaps.start[mask], gaps.end[mask]), axis=1)

    def gap_time(self, mask: Mask) -> int:
        return int((self.device.gaps.end[mask] - self.device.gaps.start[mask]).sum())

    # --- host events

    def host_rows(self, pattern: str, kinds: Sequence[HostKind]) -> NDArray[np.intp]:
        """Rows of host events that touch the window and whose name matches."""
        host, window = self.rank.host, self.device.window
        good = self._names_match(pattern)[host.name] & np.isin(host.kind, [int(kind) for kind in kinds])
        good &= (host.end > window.start_ns) & (host.start < window.end_ns)
        return np.flatnonzero(good)

    def host_intervals(self, rows: NDArray[np.intp]) -> Intervals:
        host, window = self.rank.host, self.device.window
        return clip(np.stack((host.start[rows], host.end[rows]), axis=1), window.start_ns, window.end_ns)

    def overlap_with_idle(self, rows: NDArray[np.intp], *classes: str) -> int:
        """ns of idle (of these classes; all where none is named) that lie under these host events."""
        mask = self.gaps(*(classes or IDLE_CLASSES))
        return measure(intersect(self.gap_intervals(mask), self.host_intervals(rows)))

    def shapes_of(self, row: int) -> str:
        index = self.rank.host.shapes[row]
        return self.rank.shapes[index] if index != NONE else ""

    def types_of(self, row: int) -> str:
        index = self.rank.host.types[row]
        return self.rank.shapes[index] if index != NONE else ""

    @cached_property
    def collectives(self) -> list[Collective]:
        window = self.device.window
        return [one for one in self.device.collectives if one.end_ns > window.start_ns and one.start_ns < window.end_ns]

    def _names_match(self, pattern: str) -> Mask:
        found = re.compile(pattern)
        return np.fromiter((bool(found.search(name)) for name in self.rank.names), bool, len(self.rank.names))

    def available(self) -> dict[str, int]:
        """What there is of each class of time that findings claim."""
        shares = self.device.shares
        classes = {f"idle.{name}": ns for name, ns in shares.idle.items()}
        classes |= {f"device.{kind}": ns for kind, ns in self.device.by_kind.items()}
        classes["comm"] = shares.exposed_comm_ns
        classes["copy"] = shares.exposed_mem_ns
        return classes


# What PyTorch's generic kernels are instantiated with: the telling part of their names.
_FUNCTOR = re.compile(
    r"(\w*(?:Mul|Add|Div|Sub|Norm|Mean|Sum|Binary|Unary)\w*Functor|CUDAFunctor\w+|MeanOps|\w+_kernel_cuda)"
)


def short(name: str, limit: int = 60) -> str:
    """A kernel's name without template arguments, for evidence."""
    inner = _FUNCTOR.search(name) if "at::native" in name else None
    name = re.sub(r"^void ", "", name).split("<")[0].split("(anonymous namespace)::")[-1].split("(")[0] or name
    name = name.removeprefix("at::native::")
    if inner is not None and inner[1] not in name:
        name = f"{name} ({inner[1]})"
    return name if len(name) <= limit else name[: limit - 1] + "…"


def ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms" if ns >= 1e5 else f"{ns / 1e3:.1f} µs"
