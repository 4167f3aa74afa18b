"""Types of the planner's options: numbers by the planner's own kinds.

A wrong value ends in one line that names the option. Every numeric option of a `headway plan` command is one of these
(a test walks them all).
"""

from __future__ import annotations

from collections.abc import Callable

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
