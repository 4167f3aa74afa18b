"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740), on the device, without a host sync."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FIRST = 2.0**16
_GROWTH, _BACKOFF = 2.0, 0.5
_AFTER = 2000  # finite steps in a row before the scale is doubled; torch's GradScaler has the same figures


class LossScale:
    """A power of two that the loss is multiplied with, so that small gradients do not vanish in float16.

    Halved (and the step skipped) when a gradient overflows, doubled after 2,000 finite steps. `value` is a float32
    scalar on the device, the same on every rank because the global gradient norm decides.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.value: Tensor = torch.full((), _FIRST, device=device)
        self._good_steps: Tensor = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, finite: Tensor, held: Tensor | None = None) -> None:
        """After a step; `finite` is the boolean scalar that decided on the update. A step that was `held` back is made
        again and leaves the scale as it was."""
        before = self.value.clone(), self._good_steps.clone()
        overflow = (~finite).float()
        torch._amp_update_scale_(self.value, self._good_steps, overflow, _GROWTH, _BACKOFF, _AFTER)
        if held is not None:
            for now, then in zip((self.value, self._good_steps), before, strict=True):
                now.copy_(torch.where(held, then, now))

    def state(self) -> dict[str, Any]:
        """Exact, as plain numbers; waits for the device."""
        return {"scale": float(self.value), "good_steps": int(self._good_steps)}

    def load(self, state: dict[str, Any]) -> None:
        self.value.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])
