"""How far long work on data is, with rate and time left: one line that updates on a terminal, else now and then one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from headway.data.options import Progress

#: Seconds between two lines of a log: work shorter than that leaves none in it.
EVERY_S = 10.0


def progress(
    stream: TextIO | None = None, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
) -> Callable[[Progress], None]:
    """What `prepare` and `prepare_sources` take: prints to ``stream`` (standard error)."""
    out = sys.stderr if stream is None else stream
    last = clock()
    terminal = out.isatty()

    def show(at: Progress) -> None:
        nonlocal last
        if terminal:
            end = "\n" if at.bytes_done >= at.bytes_total else ""
            print(f"\r{line(at)}\033[K", end=end, file=out, flush=True)
        elif clock() - last >= every_s:
            last = clock()
            print(f"data: {line(at)}", file=out, flush=True)

    return show


def line(at: Progress) -> str:
    """Stage, share, megabytes a second, time left, and documents where they are being made."""
    rate = at.bytes_done / at.seconds / 1e6 if at.seconds else 0.0
    share = at.bytes_done / at.bytes_total if at.bytes_total else 1.0
    left = f"{(at.bytes_total - at.bytes_done) / 1e6 / rate:.0f} s left" if rate else "time left unknown"
    made = f"  {at.totals.documents} documents" if at.stage == "tokenising" else ""
    return f"{at.stage} {share:6.1%}  {rate:.1f} MB/s  {left}{made}"
