"""Learning-rate schedules as pure functions of the step: a resume has nothing to restore and nothing to lose."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The factor on the learning rate at a step. kind: constant | linear | cosine | wsd.

    warmup and decay are in steps; decay is used by wsd (warm-up, stable, decay: Hu et al., MiniCPM, 2024), where the
    last `decay` steps fall linearly. min_ratio is where every decay ends.
    """

    kind: str
    total: int
    warmup: int = 0
    decay: int = 0
    min_ratio: float = 0.0

    def factor(self, step: int) -> float:
        """For the optimizer step number `step`, counted from 0. Past the end it stays at the last value."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        begin = self.total - self.decay if self.kind == "wsd" else self.warmup
        if step < begin:
            return 1.0
        # The last step (total - 1) has progress < 1, so that no step of the run is wasted at a factor of 0.
        progress = min(1.0, (step - begin) / max(1, self.total - begin))
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.min_ratio + (1 - self.min_ratio) * shape
