"""The console that everything is printed on."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console


def make_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """A console on `file` (default: standard output) that cannot fail on a character.

    A log file with an old encoding would otherwise end a training run at the first dash that it does not have.
    """
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Console(file=stream, width=width, highlight=False)


class SurvivingStream:
    """A text stream whose closed reader costs the output, not the program: a run outlives `| head`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], Any]) -> Any:
        if self._gone:
            return None
        try:
            return action()
        except (BrokenPipeError, ValueError):
            self._gone = True
            # What is left in the buffer would raise again when the interpreter ends.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            return None


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Standard output and error that go on without their reader, for as long as the block lasts."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = SurvivingStream(sys.stdout), SurvivingStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
