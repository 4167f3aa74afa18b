"""Scalars of a step that leave the device without making it wait: copied behind the step, read one step later."""

from __future__ import annotations

import torch
from torch import Tensor


class Scalars:
    """A small vector on its way to the host. `values` waits only for the step that made it."""

    def __init__(self, vector: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if vector.is_cuda:
            self._host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = vector.clone()

    def values(self) -> list[float]:
        """The numbers, as Python floats."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
