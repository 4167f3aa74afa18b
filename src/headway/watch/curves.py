"""The report's charts as plain data: what is drawn, in which colours, at no more points than a screen can show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.account.events import EvalLine, StepLine
from headway.account.tree import STEP
from headway.watch.downsample import bucket_edges, bucket_sums, pick, rolling_mean, rolling_median
from headway.watch.palette import STACK, STEP_PAINT, Paint
from headway.watch.ranks import Ranks, uneven

LIMIT = 2000
_STACK_BUCKETS = 400
_HEAT_BUCKETS = 96
_HEAT_RANKS = 64
_HEAT_PATHS = 6
_SMOOTH_FROM = 80
_BLUE = Paint("", "#3b6fd4", "#6b9bf2")
_GREEN = Paint("", "#2e9e62", "#4cc585")
_ORANGE = Paint("", "#d9772b", "#f09a55")
_GREY = Paint("", "#b3b9c2", "#626a75")
_PURPLE = Paint("", "#8a63c9", "#a585e0")
_RED = Paint("", "#c0392b", "#e5695c")
# The same hue for the values behind their mean.
_PALE = {"#3b6fd4": "#b3c8ee", "#6b9bf2": "#39507c", "#2e9e62": "#b5dcc6", "#4cc585": "#2b5a42"}
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One curve.

    dots: drawn as points, for values that few steps have. by_step: has a place on the step axis only. half:
    neighbours on each side that a point stands for; 0 draws the values themselves. weights: take their weighted mean
    instead of their median.
    """

    name: str
    paint: Paint
    values: Values
    dots: bool = False
    wide: bool = False
    by_step: bool = False
    half: int = 0
    weights: Values | None = None

    def at(self, rows: NDArray[np.int64]) -> Values:
        """The curve's points, float64 [len(rows)]."""
        if not self.half:
            return self.values[rows]
        if self.weights is None:
            return rolling_median(self.values, rows, self.half)
        return rolling_mean(self.values, self.weights, rows, self.half)


class Axis:
    """The x values of all kept steps, and of lost steps beyond them: step, trained tokens, hours since the start."""

    def __init__(
        self, kept: Sequence[StepLine], lost: Sequence[StepLine], evals: Sequence[EvalLine], began: float
    ) -> None:
        self.kept = kept
        copies = {line.step: line for line in lost}
        on_kept = {line.step for line in kept}
        extra = sorted((set(copies) | {line.step for line in evals}) - on_kept)
        self.steps = np.array(sorted(on_kept | set(extra)), np.int64)
        self._row = {int(step): row for row, step in enumerate(self.steps)}
        self.lost = self.column([(line.step, line.nll) for line in copies.values()])
        self.evals = self.column([(line.step, line.nll) for line in evals])
        tokens = np.cumsum([line.trained_tokens for line in kept], dtype=np.float64)
        hours = np.maximum.accumulate([(line.time - began) / 3600 for line in kept]) if kept else np.empty(0)
        # About a fortieth of the run on each curve; short runs are drawn as they are.
        self.half_window = min(100, len(kept) // 80) if len(kept) >= _SMOOTH_FROM else 0
        self.tokens = self.column(list(zip([line.step for line in kept], tokens, strict=True)))
        # A step that was never kept belongs to no session of this axis: NaN compares with nothing.
        self.sessions = self.of(lambda line: line.session)
        self.hours = self.column(list(zip([line.step for line in kept], hours, strict=True)))

    def column(self, pairs: Sequence[tuple[int, float | None]]) -> Values:
        """float64 [N] on this axis, NaN where a step has no value."""
        column = np.full(len(self.steps), np.nan)
        for step, value in pairs:
            if value is not None:
                column[self._row[step]] = value
        return column

    def of(self, value: Callable[[StepLine], float | None]) -> Values:
        return self.column([(line.step, value(line)) for line in self.kept])


def charts(axis: Axis, peak_known: bool) -> list[dict[str, Any]]:
    """The line charts, in the order of the page."""
    norm = _noisy(axis, "norm", axis.of(lambda s: s.grad_norm), _BLUE)
    made = [
        _chart(axis, "loss", "Loss", "nats a token", "loss", _loss_series(axis), log=True),
        _chart(axis, "grad_norm", "Gradient norm", "before clipping", "loss", norm, log=True),
        _chart(axis, "throughput", "Throughput", "tokens per second", "count", _throughput_series(axis)),
    ]
    if peak_known:
        made.append(_chart(axis, "mfu", "MFU and HFU", "share of the peak", "percent", _mfu_series(axis)))
    rate = [Series("learning rate", _BLUE, axis.of(lambda s: s.lr))]
    wall = [Series("wall clock", _BLUE, axis.of(lambda s: s.wall_ns / 1e9))]
    memory = [Series("memory", _BLUE, axis.of(lambda s: s.memory_bytes / 2**30 if s.memory_bytes else None))]
    made.append(_chart(axis, "lr", "Learning rate", "", "rate", rate))
    made.append(_chart(axis, "wall", "Step time", "seconds", "seconds", wall, log=True))
    if np.isfinite(memory[0].values).any():
        made.append(_chart(axis, "memory", "Memory", "GiB, peak of the step", "number", memory))
    return made


def _loss_series(axis: Axis) -> list[Series]:
    nll, loss = axis.of(lambda s: s.nll), axis.of(lambda s: s.loss)
    series = _noisy(axis, "train", nll, _BLUE, axis.of(lambda s: s.trained_tokens))
    if not np.allclose(nll, loss, rtol=1e-6, equal_nan=True):
        series.insert(1, Series("minimised (with z-loss, smoothing)", _PURPLE, loss))
    if np.isfinite(axis.lost).any():
        series.insert(1, Series("done again", _RED, axis.lost, by_step=True))
    if np.isfinite(axis.evals).any():
        series.append(Series("evaluation", _ORANGE, axis.evals, dots=True, wide=True))
    return series


def _noisy(axis: Axis, name: str, values: Values, paint: Paint, weights: Values | None = None) -> list[Series]:
    """The values as they are and, where there are enough, the typical value around each on top."""
    if not axis.half_window:
        return [Series(name, paint, values, wide=True)]
    kind = f"{'median' if weights is None else 'mean'} of {2 * axis.half_window + 1}"
    pale = Paint("", _PALE[paint.light], _PALE[paint.dark])
    top = Series(f"{name}, {kind}", paint, values, wide=True, half=axis.half_window, weights=weights)
    return [Series(name, pale, values), top]


def _throughput_series(axis: Axis) -> list[Series]:
    def per_second(count: Callable[[StepLine], int]) -> Values:
        return axis.of(lambda s: count(s) / (s.wall_ns / 1e9) if s.wall_ns else None)

    return [
        Series("slots", _GREY, per_second(lambda s: s.slots), half=axis.half_window),
        Series("real", _ORANGE, per_second(lambda s: s.tokens), half=axis.half_window),
        *_noisy(axis, "trained", per_second(lambda s: s.trained_tokens), _GREEN),
    ]


def _mfu_series(axis: Axis) -> list[Series]:
    hfu = Series("HFU", _PURPLE, axis.of(lambda s: s.hfu), half=axis.half_window)
    return [hfu, *_noisy(axis, "MFU", axis.of(lambda s: s.mfu), _GREEN)]


def _chart(
    axis: Axis, name: str, title: str, unit: str, form: str, series: list[Series], log: bool = False
) -> dict[str, Any]:
    dotted = np.zeros(len(axis.steps), bool)
    for item in series:
        dotted |= np.isfinite(item.values) & item.dots
    dots = np.flatnonzero(dotted)
    dots = dots[pick([np.zeros(len(dots))], LIMIT // 4)]
    lines = [item.values for item in series if not item.dots and not item.half]
    rows = np.union1d(pick(lines, LIMIT - len(dots)), dots).astype(np.int64)
    return {
        "id": name, "title": title, "unit": unit, "format": form, "canLog": log,
        "x": {
            "step": axis.steps[rows].tolist(),
            "tokens": _plain(axis.tokens[rows]),
            "hours": _plain(axis.hours[rows]),
        },
        "breaks": (1 + np.flatnonzero(np.diff(axis.sessions[rows]) > 0)).tolist(),
        "series": [
            {
                "name": item.name, "color": [item.paint.light, item.paint.dark], "dots": item.dots, "wide": item.wide,
                "byStep": item.by_step, "values": _plain(item.at(rows)),
            }
            for item in series
        ],
    }  # fmt: skip


def _plain(values: Values) -> list[float | None]:
    """JSON has no NaN; six digits are more than a screen shows."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def account_over_time(kept: Sequence[StepLine]) -> dict[str, Any] | None:
    """The step account as stacked shares of the wall clock; neighbouring steps are summed, so it stays closed."""
    lines = [line for line in kept if line.wall_ns and sum(line.account.values()) == line.wall_ns]
    if not lines:
        return None
    edges = bucket_edges(len(lines), _STACK_BUCKETS)
    wall = bucket_sums(np.array([line.wall_ns for line in lines], np.int64), edges)
    per_bucket = np.diff(edges)
    series = []
    for path in STACK:
        ns = np.array([_drawn_at(line, path) for line in lines], np.int64)
        if ns.any():
            paint = STEP_PAINT[path]
            shares = (bucket_sums(ns, edges) / wall).tolist()
            series.append(
                {"name": paint.label, "color": [paint.light, paint.dark], "values": [float(f"{s:.5g}") for s in shares]}
            )
    return {
        "step": [lines[index - 1].step for index in edges[1:].tolist()],
        "seconds": [float(f"{s:.5g}") for s in (wall / per_bucket / 1e9).tolist()],
        "steps": per_bucket.tolist(),
        "series": series,
    }


def _drawn_at(line: StepLine, path: str) -> int:
    """Nanoseconds that the stack draws under `path`: parts with a layer of their own are not in their parent's."""
    own = line.account.get(path, 0)
    return own + sum(line.account.get(child, 0) for child in STEP.children(path) if child not in STACK)


def rank_map(ranks: Ranks | None) -> dict[str, Any] | None:
    """Seconds a step by rank and time, for the categories in which the ranks differ most."""
    if ranks is None or ranks.world_size < 2 or not len(ranks.steps):
        return None
    edges = bucket_edges(len(ranks.steps), _HEAT_BUCKETS)
    chosen = [row for row in uneven(ranks) if row.path != "wall"][:_HEAT_PATHS]
    shown = _extreme_ranks(ranks, [row.path for row in chosen])
    maps = []
    for row in chosen:
        sums = bucket_sums(ranks.parts[row.path][shown], edges) / np.diff(edges) / 1e9
        whole = bucket_sums(ranks.parts[row.path].sum(axis=0), edges) / np.diff(edges) / 1e9 / ranks.world_size
        maps.append(
            {
                "name": STEP_PAINT[row.path].label,
                "values": [[float(f"{v:.4g}") for v in line] for line in sums.tolist()],
                "mean": [float(f"{v:.4g}") for v in whole.tolist()],
            }
        )
    return {
        "step": ranks.steps[edges[1:] - 1].tolist(),
        "ranks": shown.tolist(),
        "hosts": [ranks.hosts.get(rank, "") for rank in shown.tolist()],
        "world": ranks.world_size,
        "wall": float(f"{ranks.wall_ns.mean() / 1e9:.5g}"),
        "maps": maps,
    }


def _extreme_ranks(ranks: Ranks, paths: Sequence[str]) -> NDArray[np.int64]:
    """All ranks where they fit on the page, else those furthest from the mean in any of the categories."""
    if ranks.world_size <= _HEAT_RANKS or not paths:
        return np.arange(min(ranks.world_size, _HEAT_RANKS))
    totals = np.stack([ranks.parts[path].sum(axis=1) for path in paths])
    distance = np.abs(totals - totals.mean(axis=1, keepdims=True)).max(axis=0)
    return np.sort(np.argsort(distance, kind="stable")[-_HEAT_RANKS:])
