"""Random numbers made on the device that they are for: at full size drawing them on the host takes longer than what is
measured with them, and a copy would stand in the clock."""

from __future__ import annotations

import torch
from torch import Tensor


class Dice:
    """Numbers from a fixed seed, float32 (int64 for `below`); the same ones every time on one kind of device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Between 0 and 1."""
        return torch.rand(shape, generator=self._generator, device=self.device)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator, device=self.device)
