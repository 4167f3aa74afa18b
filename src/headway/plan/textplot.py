"""Curves as text: points of named series on logarithmic axes, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Series = Sequence[tuple[float, float]]


def log_plot(
    series: Mapping[str, Series],
    x_name: str,
    y_name: str,
    width: int = 60,
    height: int = 14,
    marks: Mapping[str, float] | None = None,
) -> list[str]:
    """Lines of a log-log plot; the first letter of a series' name marks its points, later series lie below earlier.

    `marks` are places on the x axis, each its name's first letter below it (left out where it lies outside).
    """
    points = [(x, y) for values in series.values() for x, y in values if x > 0 and y > 0 and math.isfinite(x * y)]
    if not points:
        return []
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    grid = [[" "] * width for _ in range(height)]
    for name, values in reversed(list(series.items())):
        for x, y in values:
            if x > 0 and y > 0 and math.isfinite(x * y):
                grid[-1 - _cell(math.log(y), ys, height)][_cell(math.log(x), xs, width)] = name[0]
    top, bottom = math.exp(max(ys)), math.exp(min(ys))
    labels = [f"{top:,.3g}", *[""] * (height - 2), f"{bottom:,.3g}"]
    margin = max(map(len, labels))
    rows = [f"{label:>{margin}} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    left, right = f"{math.exp(min(xs)):,.0f}", f"{math.exp(max(xs)):,.0f}"
    foot = " " * (margin + 2) + left + f"{x_name}".center(width - len(left) - len(right)) + right
    inside = {name: math.log(x) for name, x in (marks or {}).items() if x > 0 and min(xs) <= math.log(x) <= max(xs)}
    below = [" "] * width
    for name, x in inside.items():
        below[_cell(x, xs, width)] = name[0].upper()
    under = [" " * (margin + 2) + "".join(below).rstrip()] if inside else []
    legend = ", ".join([f"{name[0]} {name}" for name in series] + [f"{name[0].upper()} {name}" for name in inside])
    return [f"{y_name} ({legend})", *rows, " " * (margin + 1) + "+" + "-" * width, *under, foot]


def _cell(value: float, values: Sequence[float], cells: int) -> int:
    low, high = min(values), max(values)
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0
