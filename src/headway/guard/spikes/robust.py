"""How far a figure may stray from its own recent course: limits that adapt to its noise, tails and trend."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

RECENT = 12
"""Values whose median is where the next one is expected: short, so that a falling loss is followed."""
SPREAD = 32
"""Deviations whose median size is the present noise."""
LONG = 256
"""Deviations whose median size is the noise of the course, which the present one is held to."""
WINDOW = 1536
"""Deviations, over the noise of their time, that tails are read from."""
LEAST = 12
"""Values before anything is judged."""

FAR, NEAR = 1e-6, 1e-4
"""Chances, per value and side, that a clean value lies beyond the far and beyond the near limit."""

_MAD = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_NARROWEST = 5.0  # deviations of a normal distribution; below this no figure is called a spike, whatever its tails
_TAIL_SHARE = 0.05
# Norms have power laws for tails (Zhang et al. 2020, arXiv:1912.03194), and so logarithms of norms, like losses,
# exponential ones: shape 0 of the generalised Pareto distribution. A little heavier, because 75 extremes cannot tell.
_SHAPE = 0.05
_NEAR_FLOOR = 0.6
_MARGIN = 1.15  # for the scale, which is known no better
# An excess counts as at most so many times the tail's scale: else one spike too small to be told of, and so taken for
# clean, moves a limit by a quarter, and the next spike is missed because of it.
_MOST_EXCESS = 4.0
_TAIL_LEAST, _YOUNG = 150, (14.0, 8.0)  # deviations of a normal distribution, far and near, until there are so many
# What matters least, times this, until tails are known: a course that looks even for some dozens of steps may have odd
# documents in it that come once in a hundred.
_YOUNG_FLOOR = 1.75
# The median of 32 deviations is off by a fifth, and by more where documents of two kinds take turns at the extremes:
# within this factor the long median says more. Beyond it the noise has changed.
_PRESENT = 1.6
_REFRESH = 16  # values between two looks at the tails: sorting each time would cost more than all the rest


class Range(NamedTuple):
    """Lowest and highest clean value; infinite while too little is known."""

    low: float = -math.inf
    high: float = math.inf


@dataclass
class Track:
    """One figure over the steps. Only values that were judged clean are absorbed, so no spike can widen the limits.

    The expected value is the median of the last `RECENT`, moved on by its lag behind the trend. A value's deviation
    is taken from what was expected before it came, and divided by the noise of that moment, so that a warm-up's
    turbulence is not held against later steps. Limits lie where these deviations' own tails (their mean excess over the
    outer 5 %, single ones capped) would be passed with the chances FAR and NEAR: for values too high by the upper
    tail, for values too low by the lower one. Deterministic.

    floors: the smallest deviations down and up that matter, in the figure's own unit.
    """

    floors: tuple[float, float]
    recent: list[float] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)
    relative: list[float] = field(default_factory=list)
    seen: int = 0
    centre: float = math.nan
    """The value expected next; NaN where nothing is known."""
    _noise: float | None = None
    _long: float | None = None
    _reach: list[tuple[float, float]] = field(default_factory=lambda: [(math.inf, math.inf)] * 2)

    def limits(self) -> tuple[Range, Range]:
        """The far and the near range of the value to come."""
        if not self.recent or self._noise is None:
            return Range(), Range()
        # A median of few values is itself uncertain.
        slack = 1 + 3 / len(self.recent) if len(self.recent) < RECENT else 1.0
        young = 1.0 if len(self.relative) >= _TAIL_LEAST else _YOUNG_FLOOR
        far, near = (
            Range(
                *(
                    self.centre + slack * sign * max(scale * young * floor, reach * self._noise)
                    for sign, floor, reach in zip((-1, 1), self.floors, pair, strict=True)
                )
            )
            for scale, pair in zip((1.0, _NEAR_FLOOR), self._reach, strict=True)
        )
        return far, near

    def absorb(self, value: float) -> None:
        """Takes a clean value in. Raises ValueError for one that is not finite: it would never leave the median."""
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be a clean figure")
        if self.recent:
            if self._noise is not None:
                self.relative.append((value - self.centre) / self._noise if self._noise > 0 else 0.0)
            self.deviations.append(value - _middle(self.recent))
        self.recent.append(value)
        del self.recent[:-RECENT], self.deviations[:-LONG], self.relative[:-WINDOW]
        self.seen += 1
        if self.seen % _REFRESH == 0:
            self._long = self._long_noise()
            self._reach = self._measure()
        self._look()

    def change(self) -> None:
        """A new level is expected from here (another sequence length or mixture); the noise known so far holds."""
        self.recent.clear()
        self._look()

    def state(self) -> dict[str, Any]:
        """Exact, as plain numbers."""
        return {
            "recent": list(self.recent),
            "deviations": list(self.deviations),
            "relative": list(self.relative),
            "seen": self.seen,
            "long": self._long,
            "reach": [[_written(value) for value in pair] for pair in self._reach],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.recent, self.deviations = list(state["recent"]), list(state["deviations"])
        self.relative, self.seen = list(state["relative"]), state["seen"]
        self._long = state.get("long")  # checkpoints from before it have none
        read = [[math.inf if value is None else value for value in pair] for pair in state["reach"]]
        self._reach = [(down, up) for down, up in read]
        self._look()

    def _look(self) -> None:
        """What is expected next, and the noise around it (as a normal distribution's standard deviation)."""
        lately = self.deviations[-SPREAD:]
        known = len(lately) >= LEAST
        # A median lags behind a trend by half its window: that much every deviation has in common.
        lag = _middle(lately) if known else 0.0
        self.centre = _middle(self.recent) + lag if self.recent else math.nan
        self._noise = _MAD * _middle([abs(value - lag) for value in lately]) if known else None
        if self._noise is not None and self._long is not None:
            self._noise = min(max(self._long, self._noise / _PRESENT), self._noise * _PRESENT)

    def _long_noise(self) -> float | None:
        if len(self.deviations) <= 2 * SPREAD:
            return None
        found = np.array(self.deviations)
        return _MAD * float(np.median(np.abs(found - np.median(found))))

    def _measure(self) -> list[tuple[float, float]]:
        """(down, up) far and near, in units of the present noise."""
        if len(self.relative) < _TAIL_LEAST:
            # Few values know neither their noise nor their tails, and stand in a warm-up.
            few = 1 + 0.5 * LEAST / max(LEAST, len(self.relative))
            return [(few * reach,) * 2 for reach in _YOUNG]
        rising = np.sort(np.array(self.relative))
        return [
            (max(_NARROWEST, below), max(_NARROWEST, above))
            for below, above in zip(_reach(-rising), _reach(rising[::-1]), strict=True)
        ]


def _reach(falling: np.ndarray) -> list[float]:
    """The deviations passed with the chances FAR and NEAR, from deviations sorted from the most extreme one down."""
    count = min(max(6, round(_TAIL_SHARE * len(falling))), len(falling) - 1)
    base = max(float(falling[count]), 1.0)
    excess = np.maximum(falling[:count] - base, 0.0)
    most = _MOST_EXCESS * float(np.median(excess)) / math.log(2)  # of an exponential tail, whose median that is
    scale = float(np.mean(np.minimum(excess, most))) / (1 - math.exp(-_MOST_EXCESS))
    odds = [count / len(falling) / risk for risk in (FAR, NEAR)]
    return [_MARGIN * (base + scale * (each**_SHAPE - 1) / _SHAPE) for each in odds]


def _middle(values: list[float]) -> float:
    """The median; for a few dozen numbers several times as fast as numpy's."""
    ranked, half = sorted(values), len(values) // 2
    return ranked[half] if len(values) % 2 else 0.5 * (ranked[half - 1] + ranked[half])


def _written(value: float) -> float | None:
    return None if math.isinf(value) else value  # JSON knows no infinity
