"""What is done about spikes that are not the data's fault, and when to give up. Plain numbers, saved in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Action = Literal["lower_lr", "clip", "skip"]
"""lower_lr: a smaller learning rate for a while. clip: clipping at the usual gradient norm for a while. skip: the
batches up to and including the spike are left out (PaLM, Chowdhery et al. 2022, section 5.1)."""

_SAME_STEP = 3


@dataclass
class Policy:
    """Counts spikes and says what comes next: the first offered action for the first, the second for a repeated one …

    actions: in this order. within: steps after which a spike is a new one, not a repeated one.
    """

    actions: Sequence[Action]
    lower_lr: float
    for_steps: int
    within: int
    happened: list[tuple[int, str]] = field(default_factory=list)
    lr_until: int = 0
    clip_until: int = 0
    clip_norm: float | None = None

    def next_action(self, step: int) -> Action | None:
        """For a spike at `step` that is not the data's fault; None: nothing offered is left, the run must stop."""
        before = self._lately(step, "state")
        self.happened.append((step, "state"))
        return self.actions[before] if before < len(self.actions) else None

    def again_too_often(self, step: int, kind: str) -> bool:
        """Notes a spike of another kind; True when the same step keeps failing whatever is done."""
        self.happened.append((step, kind))
        return sum(at == step for at, _ in self.happened) > _SAME_STEP

    def lower_from(self, step: int) -> None:
        self.lr_until = step + self.for_steps

    def clip_from(self, step: int, norm: float) -> None:
        self.clip_until, self.clip_norm = step + self.for_steps, norm

    def lr_factor(self, step: int) -> float:
        """For the step number `step`, counted from 1."""
        return self.lower_lr if step <= self.lr_until else 1.0

    def clip_at(self, step: int, configured: float | None) -> float | None:
        if step > self.clip_until or self.clip_norm is None:
            return configured
        return self.clip_norm if configured is None else min(configured, self.clip_norm)

    def state(self) -> dict[str, Any]:
        return {
            "happened": [list(one) for one in self.happened],
            "lr_until": self.lr_until,
            "clip_until": self.clip_until,
            "clip_norm": self.clip_norm,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.happened = [(int(step), str(kind)) for step, kind in state["happened"]]
        self.lr_until, self.clip_until = state["lr_until"], state["clip_until"]
        self.clip_norm = state["clip_norm"]

    def _lately(self, step: int, kind: str) -> int:
        return sum(at > step - self.within and what == kind for at, what in self.happened)
