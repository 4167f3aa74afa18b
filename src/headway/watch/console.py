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

    A log file with an old encoding would otherwise end a training run at the first dash that it does not have. Neither
    markup nor emoji codes are read: a path or an override in brackets is the user's text, and must come out as it is.
    """
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


class SurvivingStream:
    """A text stream whose closed reader (`| head`) or full disk costs the output, not the program."""

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
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                return None  # a log on a full disk: what fits its buffer comes once there is room
            self._leave()
        except ValueError:
            self._leave()
        return None

    def _leave(self) -> None:
        self._gone = True
        # What is left in the buffer would raise again when the interpreter ends.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def end(self) -> None:
        """What a full disk has not taken by now must not turn the program's exit code into the interpreter's."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._leave()


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Standard output and error that go on without their reader, for as long as the block lasts."""
    before = sys.stdout, sys.stderr
    here = SurvivingStream(sys.stdout), SurvivingStream(sys.stderr)
    sys.stdout, sys.stderr = here
    try:
        yield
    finally:
        for stream in here:
            stream.end()
        sys.stdout, sys.stderr = before
