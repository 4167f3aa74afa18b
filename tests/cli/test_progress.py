"""Progress of long work on data: a line that updates on a terminal, and now and then one where output is piped."""

from __future__ import annotations

import io

from headway.cli.progress import progress
from headway.data.manifest import Totals
from headway.data.options import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(stream: io.StringIO, seconds: int) -> str:
    """What a stage of 100 MB shows that takes some seconds and reports twice in each."""
    now = [0.0]
    show = progress(stream, clock=lambda: now[0])
    for half in range(1, 2 * seconds + 1):
        now[0] = half / 2
        show(Progress("verifying", half * 50_000_000 // seconds, 100_000_000, Totals(), now[0]))
    return stream.getvalue()


def test_a_pipe_gets_a_line_every_ten_seconds_with_rate_and_time_left() -> None:
    lines = told(io.StringIO(), 40).splitlines()
    assert len(lines) == 4
    assert lines[0] == "data: verifying  25.0%  2.5 MB/s  30 s left"
    assert told(io.StringIO(), 9) == "", "short work leaves nothing in a log"


def test_a_terminal_gets_one_line_that_updates_and_ends() -> None:
    shown = told(Terminal(), 2)
    assert shown.count("\r") == 4 and shown.count("\n") == 1 and shown.endswith("\n")
