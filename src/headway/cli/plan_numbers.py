"""Types of the planner's options: numbers by the planner's own kinds, files that can be read or written.

A wrong value ends in one line that names the option. Every numeric option of a `headway plan` command is one of these
(a test walks them all).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import typer

from headway.plan.numbers import Kind


def of(kind: Kind) -> Callable[[object], float]:
    """A parser for typer.Option: the number, or a usage error that says what to give."""

    def read(value: object) -> float:
        try:
            return kind.read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    read.__name__ = "integer" if kind.whole else "number"
    return read


def in_path(value: str | Path) -> Path:
    """A path that names something; whether it is there is the reader's question."""
    if not str(value) or "\0" in str(value):
        raise typer.BadParameter("an empty name; give a file")
    return Path(value)


def out_path(value: str | Path) -> Path:
    """A file that can be written, folders for it included; said before minutes of work, not after."""
    path = in_path(value)
    if path.is_dir():
        raise typer.BadParameter(f"{value} is a folder; give a file in it")
    above = next((one for one in path.absolute().parents if one.exists()), Path("/"))
    if not above.is_dir():
        raise typer.BadParameter(f"{value} cannot be written: {above} is no folder")
    if not os.access(path if path.exists() else above, os.W_OK):
        raise typer.BadParameter(f"{value} cannot be written: permission denied")
    return path


in_path.__name__ = out_path.__name__ = "file"
