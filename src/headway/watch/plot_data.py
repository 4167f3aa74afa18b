"""Points of a logarithmic chart as places in an SVG, with ticks: for pages whose charts need no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.watch.palette import Paint

WIDTH, HEIGHT = 560.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 14.0, 40.0


@dataclass(frozen=True)
class Line:
    """One series: its name, colour, points (x, y, what to say of it), and whether it is only a dashed guide."""

    name: str
    paint: Paint
    points: Sequence[tuple[float, float, str]]
    guide: bool = False


@dataclass(frozen=True)
class Chart:
    """Everything a template draws: lines as (line, path, dots), ticks as (place, label), names of the axes."""

    lines: tuple[tuple[Line, str, tuple[tuple[float, float, str], ...]], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_name: str
    y_name: str
    marks: tuple[tuple[float, str], ...] = ()

    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def log_chart(lines: Sequence[Line], x_name: str, y_name: str, marks: Sequence[tuple[float, str]] = ()) -> Chart | None:
    """A log-log chart of positive points, None where there are none; `marks` are vertical lines at an x."""
    xs = [x for line in lines for x, _, _ in line.points]
    ys = [y for line in lines for _, y, _ in line.points]
    if not xs or min(xs) <= 0 or min(ys) <= 0:
        return None
    x_range, y_range = _range(xs), _range(ys)
    drawn = []
    for line in lines:
        dots = tuple((_place(x, x_range, _LEFT, WIDTH - _RIGHT), _place(y, y_range, HEIGHT - _BOTTOM, _TOP), text)
                     for x, y, text in line.points)  # fmt: skip
        path = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y, _ in dots)
        drawn.append((line, path, dots))
    inside = [(x, text) for x, text in marks if x_range[0] <= math.log(x) <= x_range[1]]
    return Chart(
        lines=tuple(drawn),
        x_ticks=tuple((_place(x, x_range, _LEFT, WIDTH - _RIGHT), _label(x)) for x in _ticks(x_range)),
        y_ticks=tuple((_place(y, y_range, HEIGHT - _BOTTOM, _TOP), _label(y)) for y in _ticks(y_range)),
        x_name=x_name,
        y_name=y_name,
        marks=tuple((_place(x, x_range, _LEFT, WIDTH - _RIGHT), text) for x, text in inside),
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Logarithms of the ends, with a little room; a single value stands in the middle."""
    low, high = math.log(min(values)), math.log(max(values))
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def _place(value: float, ends: tuple[float, float], first: float, last: float) -> float:
    return first + (math.log(value) - ends[0]) / (ends[1] - ends[0]) * (last - first)


def _ticks(ends: tuple[float, float]) -> list[float]:
    """At most seven round numbers: powers of ten, else also halves and fifths, else even steps of the last digit."""
    low, high = math.exp(ends[0]), math.exp(ends[1])
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)):
        first = math.floor(math.log10(low))
        found = [step * 10.0**power for power in range(first, first + 30) for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            break
    if len(found) < 3:
        step = 10.0 ** math.floor(math.log10((high - low) / 2))
        step *= max(factor for factor in (1, 2, 5) if (high - low) / (factor * step) >= 2)
        found = [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return found[:: -(-len(found) // 7)]


def _label(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
