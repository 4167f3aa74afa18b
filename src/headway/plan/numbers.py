"""The one place that says what a number must be: options of the command line, cells of a CSV, keys of JSON and YAML.

nan and inf lie outside every kind; a bool is no number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """Bounds of a number: `least` and `most` are in unless `open`; `whole` takes 8, 8.0 and 1e3, not 8.5."""

    least: float
    most: float
    says: str
    whole: bool = False
    open: bool = False

    def read(self, value: object) -> float:
        """`value`, a number or its text, as an int where whole, else a float. Raises ValueError saying what to give."""
        number = _number(value)
        if number is None or not self._holds(number):
            shown = value if isinstance(value, str) else f"{value!r}"
            raise ValueError(f"{shown or 'an empty value'} is not {self.says}")
        return int(number) if self.whole else float(number)

    def _holds(self, number: float) -> bool:
        inside = self.least < number < self.most if self.open else self.least <= number <= self.most
        return inside and (not self.whole or number == int(number))


def _number(value: object) -> float | None:
    """An int where it is one, so that large ones stay exact; None for what is no finite number."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = int(text) if text.lstrip("+-").isdecimal() and len(text) < 40 else float(text)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if not isinstance(value, float) or math.isfinite(value) else None


COUNT = Kind(1, 10**9, "a whole number from 1 to 1,000,000,000", whole=True)
GPUS = Kind(1, 10**7, "a whole number of GPUs from 1 to 10,000,000", whole=True)
RANKS = Kind(2, 10**7, "a whole number of ranks from 2 to 10,000,000", whole=True)
WHOLE = Kind(0, 10**15, "a whole number of zero or more", whole=True)
POSITIVE = Kind(0, 1e30, "a positive number", open=True)
AMOUNT = Kind(0, 1e30, "a number of zero or more")
SHARE = Kind(1e-12, 1, "a share above 0 and at most 1")
INSIDE = Kind(0, 1, "a share between 0 and 1", open=True)
PART = Kind(0, 1, "a share from 0 to 1")
LENGTH = Kind(1, 1e9, "a length from 1 to 1,000,000,000")
