"""The scaling curve: the best plan at each number of GPUs, and where Amdahl, communication and memory begin to bind.

A wall binds where it costs more than a stated share of the step (a fifth unless told). Amdahl's serial part S and
parallel part P are fitted to T(n) = S + P / n over the points (non-negative least squares on relative residuals), so S
is whatever does not shrink with GPUs: host work, latencies, bubbles, pipeline fill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headway.account.errors import UserError
from headway.plan.cluster import Cluster
from headway.plan.explain import communication
from headway.plan.money import RunCost
from headway.plan.predict import Prediction
from headway.plan.search import search
from headway.plan.whole_run import DEFAULT_TERMS, RunTerms, run_of
from headway.plan.workload import Workload

BIND = 0.2


@dataclass(frozen=True)
class Point:
    """One number of GPUs: the best plan, or why there is none. `unbound_s`: the fastest step if memory were free."""

    gpus: int
    found: Prediction | None
    reason: str
    unbound_s: float | None
    cost: RunCost | None = None

    @property
    def communication(self) -> float:
        """Share of the step that waits for communication, 0 to 1."""
        return communication(self.found) / self.found.step_s if self.found else math.nan

    @property
    def memory_loss(self) -> float:
        """Share of the step that the memory limit costs: how much faster the best plan would be without it."""
        if not self.found or not self.unbound_s:
            return math.nan
        return max(0.0, 1 - self.unbound_s / self.found.step_s)


@dataclass(frozen=True)
class Amdahl:
    """T(n) = serial + parallel / n, seconds; `error` is the largest relative residual."""

    serial_s: float
    parallel_s: float
    error: float

    def share(self, gpus: int) -> float:
        """Serial share of the step on that many GPUs."""
        total = self.serial_s + self.parallel_s / gpus
        return self.serial_s / total if total else 0.0

    def binds_at(self, share: float) -> float:
        """GPUs at which the serial part is that share of the step; inf where nothing is serial."""
        return self.parallel_s / self.serial_s * share / (1 - share) if self.serial_s else math.inf


@dataclass(frozen=True)
class Wall:
    """Where a limit begins (or, for memory, ceases) to bind; None: nowhere in the sweep."""

    name: str
    gpus: float | None
    says: str


@dataclass(frozen=True)
class Sweep:
    points: tuple[Point, ...]
    weak: bool
    bind: float
    amdahl: Amdahl | None
    walls: tuple[Wall, ...]

    def efficiency(self, point: Point) -> float:
        """Tokens/s per GPU against the best of the sweep, 0 to 1."""
        assert point.found
        return point.found.tokens_per_s_per_gpu / self.best_per_gpu

    @property
    def best_per_gpu(self) -> float:
        """The highest tokens/s per GPU of the sweep: what perfect scaling would keep."""
        return max(one.found.tokens_per_s_per_gpu for one in self.points if one.found)

    def to_dict(self) -> dict[str, Any]:
        return {
            "scaling": "weak" if self.weak else "strong",
            "binds_above_share": self.bind,
            "points": [self._entry(point) for point in self.points],
            "amdahl": None if self.amdahl is None else vars(self.amdahl),
            "walls": [vars(wall) for wall in self.walls],
        }

    def _entry(self, point: Point) -> dict[str, Any]:
        found = point.found
        if found is None:
            return {"gpus": point.gpus, "reason": point.reason}
        return {
            "gpus": point.gpus,
            "step_s": found.step_s,
            "tokens_per_s": found.tokens_per_s,
            "efficiency": self.efficiency(point),
            "mfu": found.mfu,
            "communication_share": point.communication,
            "bubble_share": found.terms["bubble"] / found.step_s,
            "memory_loss_share": point.memory_loss,
            "global_batch": found.workload.global_batch,
            "memory_needed_bytes": found.memory.needed,
            "plan": found.layout.to_dict(),
            "run": point.cost.to_dict() if point.cost else None,
        }


def parse_gpus(text: str) -> list[int]:
    """`8,16,64`, `8,16,…,1024` (the ratio of the last two goes on), in rising order. Raises UserError."""
    items = [item.strip() for item in text.replace("...", "…").split(",") if item.strip()]
    found: list[int] = []
    for place, item in enumerate(items):
        if item == "…":
            ends = place + 1 < len(items) and items[place + 1].isdecimal() and len(items[place + 1]) < 8
            if len(found) < 2 or not ends or found[-1] <= found[-2]:
                raise UserError(f"--gpus {text!r}: write two rising numbers, …, and the last, e.g. 8,16,…,1024")
            ratio, last = found[-1] / found[-2], int(items[place + 1])
            while round(found[-1] * ratio) < last:
                found.append(round(found[-1] * ratio))
        elif item.isdecimal() and len(item) < 8 and int(item) > 0:
            found.append(int(item))
        else:
            raise UserError(f"--gpus {text!r}: {item!r} is not a number of GPUs; e.g. 8,16,…,1024")
    if not found:
        raise UserError("--gpus is empty; e.g. 8,16,…,1024")
    if len(set(found)) > 64:
        raise UserError(f"--gpus {text!r}: {len(set(found))} sizes; give at most 64")
    return sorted(set(found))


def around(cluster: Cluster) -> list[int]:
    """Numbers of GPUs for a curve round a cluster: its halves down to a node (at most seven), and three doublings."""
    halves = [cluster.gpus // 2**power for power in range(8) if cluster.gpus % 2**power == 0]
    kept = [size for size in halves if size >= min(cluster.gpus, cluster.gpus_per_node)]
    return sorted({*kept, *(cluster.gpus * 2**power for power in (1, 2, 3))})


def sweep(
    work: Workload,
    cluster: Cluster,
    gpus: Sequence[int],
    *,
    weak: bool = False,
    bind: float = BIND,
    tokens: float = 0.0,
    terms: RunTerms = DEFAULT_TERMS,
    fixed: Mapping[str, Any] | None = None,
    factor: float = 1.0,
) -> Sweep:
    """The best plan at each number of GPUs of `cluster`'s kind.

    weak: `global_batch` is that of the smallest number, and grows with the GPUs; else it is fixed (strong scaling).
    Raises UserError where no number of GPUs runs, and for a share outside 0 to 1.
    """
    if not 0 < bind < 1:
        raise UserError(f"--bind {bind:g}: give a share between 0 and 1")
    points = []
    for count in gpus:
        batch = max(1, round(work.global_batch * count / gpus[0])) if weak else work.global_batch
        points.append(_point(replace(work, global_batch=batch), cluster.with_gpus(count), tokens, terms, fixed, factor))
    if all(point.found is None for point in points):
        raise UserError(f"no number of GPUs runs; with {points[-1].gpus}: {points[-1].reason}")
    # Where memory forces another plan, the step says nothing of what does not shrink.
    free = [point for point in points if point.found and point.memory_loss <= bind]
    amdahl = None if weak else fit_amdahl([p.gpus for p in free], [p.found.step_s for p in free if p.found])
    walls = (
        *_memory_walls(points, bind),
        _first(points, bind, "communication", lambda point: point.communication),
        *_serial_walls(points, bind, amdahl),
    )
    return Sweep(tuple(points), weak, bind, amdahl, walls)


def _point(
    work: Workload, cluster: Cluster, tokens: float, terms: RunTerms, fixed: Mapping[str, Any] | None, factor: float
) -> Point:
    try:
        found = search(work, cluster, fixed, top=1, factor=factor, unbound=True)
        cost = run_of(found.plans[0], tokens, terms) if tokens else None
    except UserError as error:
        return Point(cluster.gpus, None, str(error), None)
    return Point(cluster.gpus, found.plans[0], "", found.unbound_s, cost)


def fit_amdahl(gpus: Sequence[int], step_s: Sequence[float]) -> Amdahl | None:
    """S and P of T(n) = S + P / n, neither negative, by least squares on relative residuals; None of fewer than two."""
    if len(gpus) < 2:
        return None
    steps = np.array(step_s)
    rows = np.stack([1 / steps, 1 / np.array(gpus, dtype=float) / steps], axis=1)
    serial, parallel = np.linalg.lstsq(rows, np.ones(len(steps)), rcond=None)[0]
    if serial < 0:
        serial, parallel = 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    residual = rows @ np.array([serial, max(0.0, parallel)]) - 1
    return Amdahl(float(serial), float(max(0.0, parallel)), float(np.abs(residual).max()))


def _memory_walls(points: Sequence[Point], bind: float) -> list[Wall]:
    fits = [point.gpus for point in points if point.found]
    short = [p.gpus for p in points if not p.found and "fit" in p.reason and p.gpus < fits[0]]
    walls = []
    if short:
        walls.append(Wall("memory", float(fits[0]), f"nothing fits on {short[-1]:,} GPUs; {fits[0]:,} do"))
    bound = [point for point in points if point.memory_loss > bind]
    if bound:
        last = bound[-1]
        text = f"up to {last.gpus:,} GPUs the fastest plan does not fit, which costs {last.memory_loss:.0%} of the step"
        walls.append(Wall("memory binds until", float(last.gpus), text))
    return walls or [Wall("memory", None, f"costs less than {bind:.0%} of the step everywhere")]


def _first(points: Sequence[Point], bind: float, name: str, share: Callable[[Point], float]) -> Wall:
    """Where a share passes `bind` for good, between two points by the logarithm of GPUs."""
    known = [(point.gpus, share(point)) for point in points if point.found]
    start = len(known)
    while start and known[start - 1][1] > bind:
        start -= 1
    if start == len(known):
        most = max(value for _, value in known)
        return Wall(name, None, f"takes {most:.0%} of the step at most, {bind:.0%} nowhere for good")
    gpus, value = known[start]
    at = float(gpus)
    if start:
        before, less = known[start - 1]
        at = before * (gpus / before) ** ((bind - less) / (value - less))
    return Wall(name, at, f"takes {bind:.0%} of the step from about {at:,.0f} GPUs on, {known[-1][1]:.0%} at the end")


def _serial_walls(points: Sequence[Point], bind: float, amdahl: Amdahl | None) -> list[Wall]:
    walls = []
    if amdahl is not None:
        at = amdahl.binds_at(bind)
        last = points[-1].gpus
        inside = at <= last
        text = (
            f"{amdahl.serial_s:.3g} s of a step do not shrink: {bind:.0%} of it from about {at:,.0f} GPUs on"
            if math.isfinite(at)
            else "nothing found that does not shrink"
        )
        walls.append(Wall("amdahl", at if inside else None, f"{text} (fit within {amdahl.error:.0%})"))
    fits = [point.gpus for point in points if point.found]
    beyond = [point for point in points if not point.found and point.gpus > fits[-1]]
    if beyond:
        walls.append(Wall("batch", float(beyond[0].gpus), f"{beyond[0].gpus:,} GPUs: {beyond[0].reason}"))
    return walls
