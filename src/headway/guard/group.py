"""What a supervisor asks between two generations: of itself alone, or of the other machines' supervisors too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headway.guard.beacon import Pulse
from headway.guard.generation import Place
from headway.guard.report import Report
from headway.guard.waiting import Watcher


@dataclass(frozen=True)
class Turn:
    """A generation to run here. `settings`: additions to the ranks' environment."""

    generation: int
    place: Place
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Why the ranks here must end, though nothing is wrong with them."""

    why: str


class Group(Protocol):
    """Decides about generations. Used as a context, in which the places where ranks meet stay open."""

    def next(self) -> Turn | int:
        """The next generation, or the exit code; waits where others must be waited for."""

    def watch(self, turn: Turn, folder: Path) -> Watcher: ...

    def ended(self, report: Report, pulses: Mapping[int, Pulse]) -> None:
        """The generation has ended here. `pulses`: the last ones of the ranks here."""
