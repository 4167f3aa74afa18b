"""Bars for the terminal, exact to an eighth of a character, that keep their place in any width."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Bar:
    """A bar from `start` to `end` of the width (0 to 1). Anything above zero shows at least an eighth."""

    start: float
    end: float
    color: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        cells = ascii_cells if options.ascii_only else cells_of
        yield from cells(self.start, self.end, width, Style(color=self.color))
        yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)


def cells_of(start: float, end: float, width: int, style: Style) -> list[Segment]:
    """Segments of exactly `width` cells. A left edge inside a cell is drawn with the colours turned round."""
    first, last = _span(start, end, width * 8)
    cells: list[Segment] = []
    for cell in range(width):
        left = max(0, first - cell * 8)
        right = min(8, last - cell * 8)
        if left >= 8 or right <= 0:
            cells.append(Segment(" "))
        elif left == 0:
            cells.append(Segment(_EIGHTHS[right], style))
        elif right == 8:
            cells.append(Segment(_EIGHTHS[left], style + Style(reverse=True)))
        else:
            # Both edges in one cell: no character shows that, so the bar starts at the cell's left.
            cells.append(Segment(_EIGHTHS[max(1, right - left)], style))
    return list(Segment.simplify(cells))


def ascii_cells(start: float, end: float, width: int, style: Style) -> list[Segment]:
    """The same for a terminal without block characters."""
    first, last = _span(start, end, width)
    return [Segment(" " * first), Segment("#" * (last - first), style), Segment(" " * (width - last))]


def _span(start: float, end: float, units: int) -> tuple[int, int]:
    first = min(max(0, round(start * units)), units - 1)
    last = min(max(first + (end > start), round(end * units)), units)
    return first, last
