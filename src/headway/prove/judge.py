"""The verdict: is B the same training as A, within what rounding and the order of sums do to A itself?

The band comes from running A a second time in the coarser arithmetic of the two, with its documents in another order
and its first weights shaken by one unit of rounding. What two such runs differ by, no comparison can see; what lies
well outside is another training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.prove.sample import apart, cosine, gain
from headway.prove.trajectory import Trajectory

WIDTH = 8.0
"""How many bands wide honest differences may be: one run of A is a single draw of its noise."""

FLOOR = 2e-5
"""Relative difference that is never held against B: a few hundred roundings of float32."""

GAIN = 0.002
UPDATE_GAIN = 0.05
"""Share by which a layer's gradient, and the whole way of its weights, may be longer or shorter."""


@dataclass(frozen=True)
class Test:
    """One comparison: value against limit; where: step or layer with the worst ratio of both."""

    name: str
    value: float
    limit: float
    where: str
    band: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # false for NaN


@dataclass(frozen=True)
class Verdict:
    """Everything `headway verify` found. loss and norm: per step (B's relative difference, the band's)."""

    tests: tuple[Test, ...]
    loss: tuple[tuple[float, float], ...]
    norm: tuple[tuple[float, float], ...]
    cosines: tuple[tuple[int, str, float, float], ...]
    held_out: tuple[float, float]
    seed_band: float | None

    @property
    def same(self) -> bool:
        return all(test.passed for test in self.tests)

    @property
    def failed(self) -> list[Test]:
        return [test for test in self.tests if not test.passed]


def judge(a: Trajectory, b: Trajectory, twin: Trajectory, seed_band: float | None = None) -> Verdict:
    """Holds B against A; `twin` is A's own second run."""
    loss = _relative(a.losses, b.losses, twin.losses)
    norm = _relative(a.grad_norms, b.grad_norms, twin.grad_norms)
    held = abs(b.held_out - a.held_out) / abs(a.held_out)
    held_band = max(abs(twin.held_out - a.held_out) / abs(a.held_out), max(band for _, band in loss))
    tests = [
        _over_steps("loss per step", loss),
        _over_steps("gradient norm per step", norm),
        *_gradients(a, b, twin),
        _update(a, b, twin),
        Test("held-out loss", held, max(WIDTH * held_band, FLOOR), "end", held_band),
    ]
    return Verdict(
        tuple(tests), tuple(loss), tuple(norm), tuple(_cosines(a, b, twin)), (a.held_out, b.held_out), seed_band
    )


def _relative(a: Sequence[float], b: Sequence[float], twin: Sequence[float]) -> list[tuple[float, float]]:
    """Per step: B's relative difference from A, and the largest of A's twin so far (one step may agree by luck)."""
    bands = itertools.accumulate((_apart(x, z) for x, z in zip(a, twin, strict=True)), max)
    return [(_apart(x, y), band) for x, y, band in zip(a, b, bands, strict=True)]


def _apart(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), 1e-30) if math.isfinite(a) and math.isfinite(b) else math.inf


def _over_steps(name: str, pairs: Sequence[tuple[float, float]]) -> Test:
    rows = [Test(name, value, max(WIDTH * band, FLOOR), f"step {n + 1}", band) for n, (value, band) in enumerate(pairs)]
    return _worst(rows)


def _gradients(a: Trajectory, b: Trajectory, twin: Trajectory) -> Iterator[Test]:
    turned, longer = [], []
    for step, layers in a.gradients.items():
        for layer, vector in layers.items():
            other, own = b.gradients[step][layer], twin.gradients[step][layer]
            where, band = f"{layer}, step {step + 1}", apart(vector, own)
            turned.append(Test("gradient per layer", apart(vector, other), max(WIDTH * band, 10 * FLOOR), where, band))
            # Independent noise of relative size r hardly moves the length as the twin sees it; rounding to a half type
            # is not independent of what it rounds, and may move it by a share of r.
            off = abs(gain(other, vector, own) - 1)
            longer.append(Test("gradient length per layer", off, max(GAIN, band), where, band))
    yield _worst(turned)
    yield _worst(longer)


def _update(a: Trajectory, b: Trajectory, twin: Trajectory) -> Test:
    """Each layer whose way A's two runs agree on, and all layers as one vector: noise hides what a small layer did."""
    layers = [layer for layer, vector in a.update.items() if vector.any() or b.update[layer].any()]
    rows = [_way(layer, a.update[layer], b.update[layer], twin.update[layer]) for layer in layers]
    whole = [torch.cat([side.update[layer] for layer in layers]) for side in (a, b, twin)]
    return _worst([*(row for row in rows if row.band < 0.5), _way("all layers", *whole)])


def _way(layer: str, a: Tensor, b: Tensor, twin: Tensor) -> Test:
    band = 1 - cosine(a, twin)
    return Test("way of the weights", abs(gain(b, a, twin) - 1), max(UPDATE_GAIN, band / 2), layer, band)


def _cosines(a: Trajectory, b: Trajectory, twin: Trajectory) -> Iterator[tuple[int, str, float, float]]:
    for step, layers in a.gradients.items():
        for layer, vector in layers.items():
            yield (
                step + 1,
                layer,
                cosine(vector, b.gradients[step][layer]),
                cosine(vector, twin.gradients[step][layer]),
            )


def _worst(rows: Sequence[Test]) -> Test:
    return max(rows, key=lambda row: (not row.passed, row.value / row.limit if math.isfinite(row.value) else math.inf))
