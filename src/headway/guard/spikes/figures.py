"""What a step says of itself, as the guard sees it: the same numbers on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOSS, GRADIENT, UPDATE = "loss", "gradient norm", "update norm"
HIGHEST, LOWEST, SCALE = "highest document loss", "lowest document loss", "loss scale"
SPREAD = "least spread of a document's losses"
NAMES = (LOSS, GRADIENT, UPDATE, HIGHEST, LOWEST, SPREAD)
"""The figures that have a course."""


@dataclass(frozen=True)
class Figures:
    """One step's figures; NaN where a figure does not exist (no document long enough, no update made).

    nll: nats per trained token of the global batch. grad_norm: global, before clipping. update: root mean square of
    the *previous* step's update over its learning rate. highest, lowest: mean nll of single documents. spread: standard
    deviation of the losses inside a document over their mean, where it is least: one token over and over costs the same
    each time, whatever it costs.
    loss_scale: 1 where there is none. finite: loss and gradient are finite on all ranks. kind: what the batch is made
    of (a name for sequence length and mixture); figures of another kind may lie elsewhere. taken: the update was made.
    """

    step: int
    nll: float
    grad_norm: float
    finite: bool
    update: float = math.nan
    highest: float = math.nan
    lowest: float = math.nan
    loss_scale: float = 1.0
    kind: str = ""
    taken: bool = True
    spread: float = math.nan

    def watched(self) -> dict[str, float]:
        """The figures that have a course, in the scale in which their noise is even: norms (and what goes
        down to 0) as logarithms."""
        found = {
            LOSS: self.nll,
            GRADIENT: _log(self.grad_norm),
            UPDATE: _log(self.update),
            HIGHEST: self.highest,
            LOWEST: _log(self.lowest),
            SPREAD: _log(self.spread),
        }
        return {name: value for name, value in found.items() if not math.isnan(value)}


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan
