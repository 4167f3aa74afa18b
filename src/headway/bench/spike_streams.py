"""Generated courses of a training's figures, with heavy tails, a warm-up, and planted spikes: what detection is scored
on. Every number comes from the seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headway.guard.spikes.figures import Figures
from headway.guard.spikes.watcher import Watcher

NOISES = ("normal", "t5", "t3", "laplace", "changing")
"""How norms scatter: normal and laplace in their logarithm (a power law in the norm itself), t5 and t3 (Student's) as
a share of the norm, changing: t5 whose width itself wanders."""
PLANTS = ("not finite", "gradient", "update", "garbage document", "repeated token", "repeated word")

_UNIFORM = math.log(50_000)
_CHUNK = 4096
_DOCUMENTS = 48


@dataclass(frozen=True)
class Score:
    """What a watcher made of one stream. missed: planted spikes that were not told of at their own step."""

    noise: str
    steps: int
    false_alarms: int
    planted: int
    missed: int
    by_figure: dict[str, int]


def clean_steps(noise: str, steps: int, seed: int) -> Iterator[Figures]:
    """A run of `steps`: 100 steps of warm-up, a falling loss, and a mixture that changes (as is known) every 5,000."""
    dice, inner = (np.random.default_rng((seed, NOISES.index(noise), *more)) for more in ((), (1,)))
    for first in range(0, steps, _CHUNK):
        at = np.arange(first, min(first + _CHUNK, steps))
        mixture = at // 5000
        level = 1.8 + 9.0 * (1 + at / 60) ** -0.6 + 0.25 * (mixture % 3)
        warm = np.minimum(1.0, (at + 1) / 100)
        course = math.log(0.4) + 2.5 * np.exp(-at / 400) * warm + 0.3 * (mixture % 2)
        gradient = np.exp(course) * _noise(dice, noise, at, 0.15)
        update = 0.2 * _noise(dice, noise, at, 0.06)
        # Single documents scatter, and a few in a hundred are odd: tables and hashes above, boilerplate below.
        documents = level[:, None] + 0.4 * dice.standard_normal((len(at), _DOCUMENTS))
        odd = dice.random((len(at), _DOCUMENTS))
        documents += np.where(odd < 0.02, dice.uniform(0.5, 3.0, odd.shape), 0.0)
        documents -= np.where(odd > 0.98, level[:, None] * dice.uniform(0.2, 0.6, odd.shape), 0.0)
        documents = documents.clip(0.2)
        nll = documents.mean(axis=1)
        # Inside a document losses are even while all tokens are guessed alike, and scatter as they are learned; lists
        # and boilerplate are evener than prose.
        spreads = np.exp(-0.35 - 3.0 * np.exp(-at / 25)[:, None] + 0.25 * inner.standard_normal(documents.shape))
        spreads *= np.where(inner.random(documents.shape) < 0.01, inner.uniform(0.3, 1.0, documents.shape), 1.0)
        for row, step in enumerate(at.tolist()):
            yield Figures(
                step=step + 1,
                nll=float(nll[row]),
                grad_norm=float(gradient[row]),
                finite=True,
                update=float(update[row]),
                highest=float(documents[row].max()),
                lowest=float(documents[row].min()),
                spread=float(spreads[row].min()),
                kind=f"mixture {mixture[row]}",
            )


def plant(figures: Figures, spike: str, dice: np.random.Generator) -> Figures:
    """The same step with a spike in it, as large as those that small runs showed when a document was poisoned."""
    if spike == "not finite":
        return replace(figures, grad_norm=math.nan, finite=False)
    if spike == "gradient":
        return replace(figures, grad_norm=figures.grad_norm * 10 ** dice.uniform(1.5, 3.0))
    if spike == "update":
        return replace(figures, update=figures.update * 10 ** dice.uniform(1.0, 2.0))
    if spike == "garbage document":
        share = 1 / dice.uniform(4, 24)
        return replace(
            figures,
            nll=figures.nll + share * 10.0,
            highest=max(figures.highest, _UNIFORM + dice.uniform(0.1, 4)),
            grad_norm=figures.grad_norm * dice.uniform(4, 10),
        )
    if spike == "repeated word":  # an ordinary one, before the run has learned that what came before comes again
        return replace(figures, spread=10 ** dice.uniform(-3, -2), grad_norm=figures.grad_norm * dice.uniform(1, 3))
    return replace(
        figures,
        nll=figures.nll * (1 - 1 / dice.uniform(4, 24)),
        lowest=min(figures.lowest, 10 ** dice.uniform(-4, -2.5)),
        grad_norm=figures.grad_norm * dice.uniform(4, 10),
    )


def score(noise: str, steps: int, seed: int, planted_every: int = 0) -> Score:
    """Feeds a stream to a new watcher; with `planted_every`, a spike at about every so many steps from step 200 on."""
    watcher, dice = Watcher(uniform=_UNIFORM), np.random.default_rng((seed, 77))
    false_alarms = planted = missed = 0
    by_figure: dict[str, int] = {}
    for figures in clean_steps(noise, steps, seed):
        limits = watcher.limits(figures.step, figures.kind)
        if planted_every and figures.step > 200 and dice.random() < 1 / planted_every:
            spike = PLANTS[planted % len(PLANTS)]
            alarms = watcher.judge(plant(figures, spike, dice), limits)
            planted += 1
            missed += not alarms
            if not alarms:
                by_figure[f"missed: {spike}"] = by_figure.get(f"missed: {spike}", 0) + 1
            continue
        alarms = watcher.judge(figures, limits)
        false_alarms += bool(alarms)
        for alarm in alarms:
            by_figure[alarm.figure] = by_figure.get(alarm.figure, 0) + 1
    return Score(noise, steps, false_alarms, planted, missed, by_figure)


def _noise(dice: np.random.Generator, noise: str, at: np.ndarray, width: float) -> np.ndarray:
    """Positive factors around 1."""
    if noise == "normal":
        return np.exp(width * dice.standard_normal(len(at)))
    if noise == "laplace":
        return np.exp(width * dice.laplace(size=len(at)))
    if noise == "changing":
        return (1 + width * np.exp(0.7 * np.sin(at / 230)) * dice.standard_t(5, len(at))).clip(0.3)
    return (1 + width * dice.standard_t(3 if noise == "t3" else 5, len(at))).clip(0.3)
