"""A remedy: one registered way to win time back. `diagnose` ranks them, `tune` tries them one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remedy:
    """One change and what it is expected to buy.

    Attributes:
        name: stable identifier, e.g. ``pack``.
        shrinks: paths of the step tree (or FLOP categories) that it makes smaller.
        gain: predicted share of the wall clock won back, (low, high), 0 to 1.
        evidence: the facts the prediction rests on, one a line.
        change: run-file keys and the values to give them.
        check: how to see that training is unchanged.
        setting: the same change outside Headway: a PyTorch call, a setting or an environment variable.
    """

    name: str
    shrinks: tuple[str, ...]
    gain: tuple[float, float]
    evidence: tuple[str, ...]
    change: Mapping[str, Any]
    check: str
    setting: str = ""

    def __post_init__(self) -> None:
        low, high = self.gain
        if not 0 <= low <= high <= 1:
            raise ValueError(f"remedy {self.name}: gain {self.gain} must be 0 ≤ low ≤ high ≤ 1")
