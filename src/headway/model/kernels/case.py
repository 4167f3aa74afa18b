"""What is chosen between: an operation on the user's own shapes, and the candidates that may compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Run = Callable[..., Any]


def _can() -> None:
    return None


@dataclass(frozen=True)
class Candidate:
    """One implementation. `run` takes the case's inputs; `cannot` says why it is out of the question here, or None.

    `compiles`: its first call takes seconds to minutes, so that it is measured last and only where time is left.
    """

    name: str
    run: Run
    cannot: Callable[[], str | None] = _can
    compiles: bool = False


@dataclass(frozen=True)
class Case:
    """One operation on given shapes. The first candidate is the plain one, always right by definition.

    inputs: rows -> the tensors of one call (floating ones that require a gradient are differentiated), from a fixed
    seed. `rows` of the user's shape are timed, `check_rows` compared with the reference (which is slow).
    """

    operation: str
    shape: str
    candidates: Sequence[Candidate]
    inputs: Callable[[int], tuple[Any, ...]]
    rows: int
    check_rows: int


@dataclass(frozen=True)
class Result:
    """One candidate measured: relative errors against the wide reference, seconds of a forward and backward.

    reason: why it was not used (it cannot, it is wrong, it is slower or was not measured); empty for the chosen one.
    """

    name: str
    error: float | None = None
    gradient_error: float | None = None
    seconds: float | None = None
    wrong: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """What one operation runs by, and every candidate's figures."""

    operation: str
    shape: str
    dtype: str
    chosen: str
    results: tuple[Result, ...] = field(default_factory=tuple)
    cached: bool = False


def tensors(values: Any) -> list[Tensor]:
    """Tensors of a call's result, flat."""
    return [values] if isinstance(values, Tensor) else [value for value in values if isinstance(value, Tensor)]
