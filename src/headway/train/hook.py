"""What may watch a run from inside its steps, on every rank. The periodic trace is one; it is handed in from `cli`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headway.account.events import Line
from headway.train.clock import StepClock


@dataclass(frozen=True)
class HookPlace:
    """Where a hook works: the run folder's root, this rank among all, the session, the clock of its steps."""

    folder: Path
    rank: int
    world_size: int
    session: int
    clock: StepClock


class StepHook(Protocol):
    """Called on every rank at the same points of the loop, so that what it does may be collective.

    It must not touch the training state. Its time in `begin_step` counts as host.logging; lines it returns are told to
    the observers (rank 0's only).
    """

    def begin_step(self, step: int) -> Sequence[Line]:
        """At the start of step `step` (counted from 1), before its batch."""
        ...

    def pause(self) -> None:
        """The steps stop for a while: evaluation or saving, which are no part of a step."""
        ...

    def close(self) -> Sequence[Line]:
        """No more steps. Must not block for long."""
        ...


HookFactory = Callable[[HookPlace], StepHook | None]
