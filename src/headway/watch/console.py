"""The console that everything is printed on."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from rich.console import Console


def make_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """A console on `file` (default: standard output) that cannot fail on a character.

    A log file with an old encoding would otherwise end a training run at the first dash that it does not have.
    """
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Console(file=stream, width=width, highlight=False)
