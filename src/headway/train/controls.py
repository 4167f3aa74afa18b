"""Batches that are known to be normal: what tells a state that a spike has harmed from data that has changed.

A checkpoint that was made between the fault and its discovery holds what the spike has done to the weights. At such a
state *every* batch is bad, so a bad one there says nothing of the data. Looked at again at a sound state, a batch that
was clean when it was trained is clean still.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from headway.data.global_batch import Position
from headway.guard.spikes.figures import GRADIENT, LOSS, Figures
from headway.guard.spikes.watcher import Limits

_KEPT = 4


@dataclass(frozen=True)
class Control:
    """The batch of a clean step, and the far limits that it kept to, in the scale of `Figures.watched`.

    Only their upper ends count: what was learned may lie far below.
    """

    step: int
    position: Position
    loss: float
    gradient: float

    def is_normal(self, figures: Figures) -> bool:
        if not figures.finite:
            return False
        # No gradient at all is none to go on from: weights that came back all zero have a finite loss, and that.
        seen = figures.watched()
        return seen.get(LOSS, math.inf) <= self.loss and seen.get(GRADIENT, math.inf) <= self.gradient


@dataclass
class Controls:
    """The newest of them. `data`: what identifies the data that positions count in."""

    data: str
    kept: deque[Control] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def note(self, step: int, position: Position, limits: Limits) -> None:
        """A step was clean. One whose limits are not yet known says nothing."""
        loss, gradient = (limits.far[name].high for name in (LOSS, GRADIENT))
        if math.isfinite(loss) and math.isfinite(gradient):
            self.kept.append(Control(step, position, loss, gradient))

    def rewind(self, step: int) -> None:
        """Steps from `step` on will be made again."""
        self.kept = deque((one for one in self.kept if one.step < step), _KEPT)

    def state(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "kept": [[one.step, one.position.to_dict(), one.loss, one.gradient] for one in self.kept],
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """What a checkpoint knows, and no more: later batches kept to limits that an older state need not keep to.

        Positions in other data mean other documents; None: made before there were controls.
        """
        known = state["kept"] if state is not None and state["data"] == self.data else []
        kept = (Control(step, Position.from_dict(position), loss, gradient) for step, position, loss, gradient in known)
        self.kept = deque(kept, _KEPT)
