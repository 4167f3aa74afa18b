"""All figures of a run watched together: limits for the step to come, and what is wrong with a step that was made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headway.guard.spikes.figures import GRADIENT, HIGHEST, LOSS, LOWEST, SCALE, SPREAD, UPDATE, Figures
from headway.guard.spikes.robust import Range, Track

# The smallest deviations down and up that matter: nats for losses, a factor (as its logarithm) for the rest. A small
# gradient harms little by itself, and what is learned by heart has losses near 0 without being at fault.
FLOORS = {
    LOSS: (0.1, 0.1),
    GRADIENT: (math.log(10), math.log(3)),
    UPDATE: (math.log(10), math.log(4)),
    HIGHEST: (0.25, 0.25),
    LOWEST: (math.log(4), math.log(4)),
    SPREAD: (math.log(3), math.log(10)),
}
LOGARITHMIC = (GRADIENT, UPDATE, LOWEST, SPREAD)
KINDS = {LOSS: "loss", HIGHEST: "loss", LOWEST: "loss", SPREAD: "loss", GRADIENT: "gradient", UPDATE: "update"}
LAG = 2
"""Limits of step k come from steps up to k - LAG: on a GPU no later one is known in time, and they must not depend on
how far the device was behind."""
_WELL_BELOW = 0.7
# Words differ in how well they are foreseen: losses within a fiftieth of each other are no text, once texts are told
# apart from noise at all.
_EVEN, _UNEVEN = math.log(0.02), math.log(0.1)
_OVERFLOWS, _OF_STEPS = 12, 16
NOT_FINITE = "not finite"


@dataclass(frozen=True)
class Limits:
    """The far and the near range of every watched figure, in the scale of `Figures.watched`.

    A step is a spike when one figure leaves its far range, or figures of two kinds (loss, gradient, update) leave
    their near ranges: a poisoned document moves both its loss and the gradient, clean outliers seldom do. What is
    beyond `senseless` counts as a kind of its own: it is judged by what losses mean, not by how they have scattered.
    """

    far: dict[str, Range]
    near: dict[str, Range]
    senseless: dict[str, Range] = field(default_factory=dict)

    def beyond(self, values: dict[str, float]) -> dict[str, float]:
        """The figures that make it a spike, each with the limit it passed."""
        far = {name: limit for name, value in values.items() if (limit := _passed(value, self.far[name])) is not None}
        if far:
            return far
        near = {name: limit for name, value in values.items() if (limit := _passed(value, self.near[name])) is not None}
        senseless = {
            name: limit
            for name, allowed in self.senseless.items()
            if name in values and (limit := _passed(values[name], allowed)) is not None
        }
        return {**senseless, **near} if len({KINDS[name] for name in near}) + bool(senseless) > 1 else {}


def _passed(value: float, allowed: Range) -> float | None:
    if math.isinf(value):
        return allowed.high if value > 0 else allowed.low  # also while the limits are not known
    return allowed.high if value > allowed.high else allowed.low if value < allowed.low else None


@dataclass(frozen=True)
class Alarm:
    """A figure beyond its limits. value and limit in the figure's own unit; value is NaN or infinite for NOT_FINITE."""

    step: int
    figure: str
    value: float
    limit: float
    usual: float

    def __str__(self) -> str:
        if self.figure == NOT_FINITE:
            return "loss or gradient is not finite"
        if self.figure == SCALE:
            return f"the loss scale fell to {self.value:g}: {_OVERFLOWS} of {_OF_STEPS} steps overflowed"
        side = "above" if self.value > self.limit else "below"
        return f"{self.figure} {self.value:.4g} is {side} {self.limit:.4g} (usual: {self.usual:.4g})"


@dataclass
class Watcher:
    """Tells of every step whether it is clean. Deterministic: a function of the figures it was given, in order.

    uniform: loss of guessing among all tokens alike, ln(vocabulary). Once the run is well below it, a document above it
    is no text the model could learn from, however odd the documents before were: that is senseless, whatever they say.
    """

    uniform: float = math.inf
    tracks: dict[str, Track] = field(default_factory=lambda: {name: Track(floors) for name, floors in FLOORS.items()})
    _kind: str | None = None
    _waiting: list[Figures] = field(default_factory=list)
    _overflows: list[int] = field(default_factory=list)
    _level_from: int = 0

    def limits(self, step: int, kind: str = "") -> Limits:
        """For the figures of step `step`, whose batch is of `kind`. Takes in all clean steps up to `step` - LAG."""
        while self._waiting and self._waiting[0].step <= step - LAG:
            self._absorb(self._waiting.pop(0))
        if kind != self._kind:
            self._change(kind)
        both = {name: track.limits() for name, track in self.tracks.items()}
        limits = Limits(
            {name: far for name, (far, _) in both.items()}, {name: near for name, (_, near) in both.items()}
        )
        if self.tracks[LOSS].centre < _WELL_BELOW * self.uniform:
            limits.senseless[HIGHEST] = Range(-math.inf, self.uniform)
        if self.tracks[SPREAD].centre > _UNEVEN:
            limits.senseless[SPREAD] = Range(_EVEN, math.inf)
        return limits

    def judge(self, figures: Figures, limits: Limits) -> list[Alarm]:
        """What is wrong with a step, worst known first; empty for a clean one, which is then taken in.

        A step that overflowed under a loss scale above 1 is the scale's business: neither clean nor an alarm, unless
        it goes on.
        """
        if not figures.finite:
            if figures.loss_scale > 1:
                return self._overflow(figures)
            return [Alarm(figures.step, NOT_FINITE, figures.grad_norm, math.inf, math.nan)]
        values = figures.watched()
        alarms = [
            Alarm(
                figures.step,
                name,
                *(_shown(name, value) for value in (values[name], limit, self.tracks[name].centre)),
            )
            for name, limit in limits.beyond(values).items()
        ]
        if not alarms and figures.step >= self._level_from:
            self._waiting.append(figures)
        return alarms

    def rewind(self, step: int) -> None:
        """Forgets clean steps from `step` on that are not yet taken in; they will be made again."""
        self._waiting = [figures for figures in self._waiting if figures.step < step]
        self._overflows = [at for at in self._overflows if at < step]

    def accept(self, step: int) -> None:
        """The level has changed with `step`, and stays: all tracks look for their new place.

        Clean steps before it that are not yet taken in, or whose figures come later (on a GPU), are of the old level
        and must not be the first of the new one. Those that are known by now on every device count for the noise, the
        rest for nothing: how far the device was behind must change no limit.
        """
        while self._waiting and self._waiting[0].step <= step - LAG:
            self._absorb(self._waiting.pop(0))
        self._waiting = [figures for figures in self._waiting if figures.step >= step]
        self._level_from = step
        self._move()

    def _move(self) -> None:
        for track in self.tracks.values():
            track.change()

    def state(self) -> dict[str, Any]:
        """Exact, as plain numbers and text; NaN as null."""
        return {
            "tracks": {name: track.state() for name, track in self.tracks.items()},
            "kind": self._kind,
            "waiting": [_plain(figures) for figures in self._waiting],
            "overflows": list(self._overflows),
            "level_from": self._level_from,
        }

    def load(self, state: dict[str, Any]) -> None:
        for name, track in self.tracks.items():
            if name in state["tracks"]:  # a figure that is younger than the checkpoint starts anew
                track.load(state["tracks"][name])
        self._kind = state["kind"]
        self._waiting = [_figures(plain) for plain in state["waiting"]]
        self._overflows = list(state["overflows"])
        self._level_from = state.get("level_from", 0)

    def _absorb(self, figures: Figures) -> None:
        if figures.kind != self._kind:
            self._change(figures.kind)
        for name, value in figures.watched().items():
            self.tracks[name].absorb(value)

    def _change(self, kind: str) -> None:
        if self._kind is not None:
            self._move()
        self._kind = kind

    def _overflow(self, figures: Figures) -> list[Alarm]:
        self._overflows = [at for at in self._overflows if at > figures.step - _OF_STEPS] + [figures.step]
        # A new scale starts far too high and is halved step by step; only afterwards is a row of overflows a fault.
        if len(self._overflows) < _OVERFLOWS or figures.step <= 2 * _OF_STEPS:
            return []
        return [Alarm(figures.step, SCALE, figures.loss_scale, 1.0, math.nan)]


def _shown(name: str, value: float) -> float:
    """In the figure's own unit."""
    return math.exp(min(value, 700.0)) if name in LOGARITHMIC else value


def _plain(figures: Figures) -> dict[str, Any]:
    values = {name: getattr(figures, name) for name in Figures.__dataclass_fields__}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def _figures(plain: dict[str, Any]) -> Figures:
    values: dict[str, Any] = {name: math.nan if value is None else value for name, value in plain.items()}
    return Figures(**values)
