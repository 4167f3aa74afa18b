"""What a row of the campaign works with: a folder, a seed, expectations and figures."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from headway.account.events import Incident


class Skipped(Exception):
    """The row cannot be injected here (a privilege, a missing program): says what it needs."""


@dataclass
class Case:
    """One run of one row. `folder` is its own, `material` shared by all cases of a campaign (see `material.py`)."""

    row: int
    seed: int
    folder: Path
    material: Path
    failed: list[str] = field(default_factory=list)
    expectations: int = 0
    detect_s: float | None = None
    recover_s: float | None = None
    steps_lost: int | None = None

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def expect(self, holds: bool, what: str) -> None:
        """`what` must hold; every expectation is looked at, so that a failure shows all that is wrong."""
        self.expectations += 1
        if not holds:
            self.failed.append(what)

    def measured(
        self, detect_s: float | None = None, recover_s: float | None = None, steps_lost: int | None = None
    ) -> None:
        """Figures for the table; never compared with a limit here."""
        self.detect_s = detect_s if detect_s is not None else self.detect_s
        self.recover_s = recover_s if recover_s is not None else self.recover_s
        self.steps_lost = steps_lost if steps_lost is not None else self.steps_lost

    def from_incident(self, incident: Incident) -> None:
        self.measured(incident.detect_s, incident.recover_s, incident.steps_lost)


@dataclass(frozen=True)
class Result:
    """A case, over. `why`: the expectations that did not hold, or what the row needs."""

    row: int
    name: str
    seed: int
    outcome: Literal["right", "wrong", "skipped"]
    why: tuple[str, ...]
    seconds: float
    detect_s: float | None = None
    recover_s: float | None = None
    steps_lost: int | None = None
