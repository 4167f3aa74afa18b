"""The ranks' control channel: small agreements over gloo, apart from the training's own collectives.

Every method is collective (all ranks call it, in the same order) and is trivial for a single process. What one rank
could not do fails on *all* ranks with the same message: a rank that raised alone would leave the others waiting in the
next collective until their timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    bug: bool


class Control:
    """Agreements among the ranks of `group` (None: this process alone)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def on_all(
        self, work: Callable[[], T], error: type[Exception], expected: tuple[type[BaseException], ...]
    ) -> list[T]:
        """Runs `work` on every rank; returns all results.

        When `work` raises one of `expected` anywhere, every rank raises `error`, naming ranks and causes. Any other
        exception is a bug: its rank raises it as it is, the others RuntimeError.
        """
        outcome, cause = _attempt(work, expected)
        outcomes = self.gather(outcome)
        self._raise_failures(dict(enumerate(outcomes)), error, cause)
        return outcomes  # type: ignore[return-value]  # no _Failure is left in it

    def on_main(self, work: Callable[[], T], error: type[Exception], expected: tuple[type[BaseException], ...]) -> T:
        """Runs `work` on rank 0 only; returns its result on every rank. Failures as in `on_all`."""
        outcome: T | _Failure | None = None
        cause: BaseException | None = None
        if self.is_main:
            outcome, cause = _attempt(work, expected)
        outcome = self.broadcast(outcome)
        self._raise_failures({0: outcome}, error, cause)
        return outcome  # type: ignore[return-value]

    def _raise_failures(self, outcomes: dict[int, Any], error: type[Exception], cause: BaseException | None) -> None:
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, _Failure)}
        if not failures:
            return
        if any(failure.bug for failure in failures.values()):
            own = failures.get(self.rank)
            if own is not None and own.bug and cause is not None:
                raise cause
            raise RuntimeError(self._named(failures))
        raise error(self._named(failures)) from cause

    def _named(self, failures: dict[int, _Failure]) -> str:
        by_message: dict[str, list[int]] = {}
        for rank, failure in failures.items():
            by_message.setdefault(failure.message, []).append(rank)
        if self.size == 1:
            return next(iter(by_message))
        return "; ".join(f"rank {', '.join(map(str, ranks))}: {message}" for message, ranks in by_message.items())


def _attempt(
    work: Callable[[], T], expected: tuple[type[BaseException], ...]
) -> tuple[T | _Failure, BaseException | None]:
    try:
        return work(), None
    except expected as problem:
        return _Failure(str(problem) or type(problem).__name__, bug=False), problem
    except Exception as problem:
        return _Failure(f"{type(problem).__name__}: {problem}", bug=True), problem
