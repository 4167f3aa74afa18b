"""One comparison of two trainings, and how far honest ones may lie apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 8.0
"""How many bands wide honest differences may be: one run of A is a single draw of its noise."""

FLOOR = 2e-5
"""Relative difference that is never held against B: a few hundred roundings of float32."""


@dataclass(frozen=True)
class Test:
    """One comparison: value against limit; where: step, layer or tensor with the worst ratio of both."""

    __test__ = False  # of pytest's it is none

    name: str
    value: float
    limit: float
    where: str
    band: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # false for NaN


def worst(rows: Sequence[Test]) -> Test:
    """The row that fails by the most, or passes by the least."""
    return max(rows, key=lambda row: (not row.passed, row.value / row.limit if math.isfinite(row.value) else math.inf))
