"""How far the weights went: what has the right gradient may still be left out by the optimizer, or updated otherwise.

Three views, because each is blind where another sees. A layer's way along A's second run is exact however noisy single
updates are, but v and o drown a bias. A tensor's length shows what did not move, moved half as far or decayed alone;
an update of the right length may point elsewhere. The middle element's difference shows that, and stays still where a
few elements of near-zero gradient go the other way, as they do under Adam, whose first updates are signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headway.prove.comparison import FLOOR, WIDTH, Test, worst
from headway.prove.sample import apart, by_layer, cosine, gain, layer_of
from headway.prove.trajectory import Trajectory

UPDATE_GAIN = 0.05
"""Share by which the whole way of a layer's or a tensor's weights may be longer or shorter."""

TURNED = 2
"""Elements that may go the other way, which the twin need not show. Of n, each takes 2 / n from what the way is along
the twin's, and at most 1 / n from its length."""


def ways(a: Trajectory, b: Trajectory, twin: Trajectory, shared: float) -> Iterator[Test]:
    """shared: what a length may differ by through rounding alone (two units of it)."""
    if not any(vector.any() for side in (a, b) for vector in side.update.values()):
        return  # no step was taken on either side: each overflowed, or the rate is zero
    yield _layers(a, b, twin)
    lengths, elements = [], []
    largest = _largest_shares(a)
    # A small tensor's twin may agree by luck: its band is no less than its layer's.
    layers = {
        layer: _middle(way, other)
        for (layer, way), other in zip(by_layer(a.update).items(), by_layer(twin.update).values(), strict=True)
    }
    for name, way in a.update.items():
        other, own, share = b.update[name], twin.update[name], largest[name]
        if not (way.any() or other.any()) or 0 < share <= FLOOR:
            continue  # it did not move, or by rounding only: Adam makes full steps of that, in any direction
        vanishes = 0 < share <= shared
        length = _length(name, way, other, own, vanishes)
        if WIDTH * length.band >= 1:
            continue  # chance decides what moves at all: a norm under stochastic rounding
        lengths.append(length)
        if not vanishes:
            band = max(_middle(way, own), layers[layer_of(name)])
            limit = max(WIDTH * band, 10 * FLOOR, shared)
            elements.append(Test("way per tensor", _middle(way, other), limit, name, band))
    yield from (worst(rows) for rows in (lengths, elements) if rows)


def _layers(a: Trajectory, b: Trajectory, twin: Trajectory) -> Test:
    """Each layer whose way A's two runs agree on, and all layers as one vector: noise hides what a small layer did."""
    ways, other, own = (by_layer(side.update) for side in (a, b, twin))
    layers = [layer for layer, vector in ways.items() if vector.any() or other[layer].any()]
    rows = [_along(layer, ways[layer], other[layer], own[layer]) for layer in layers if ways[layer].any()]
    whole = [torch.cat([side[layer] for layer in layers]) for side in (ways, other, own)]
    return worst([*(row for row in rows if row.band < 0.5), _along("all layers", *whole)])


def _along(layer: str, a: Tensor, b: Tensor, twin: Tensor) -> Test:
    band = 1 - cosine(a, twin)
    limit = max(UPDATE_GAIN, 2 * TURNED / max(a.numel(), 1), band / 2)
    return Test("way of the weights", abs(gain(b, a, twin) - 1), limit, layer, band)


def _length(name: str, a: Tensor, b: Tensor, twin: Tensor, vanishes: bool) -> Test:
    """|ln(|b| / |a|)|, infinite where one of them did not move. Independent noise of relative size r moves the length
    of n elements by r / sqrt(n); what vanishes but for rounding may be of any length, but does not stand still."""
    elements = max(a.numel(), 1)
    band = max(_longer(a, twin), apart(a, twin) / math.sqrt(elements))
    limit = max(UPDATE_GAIN, TURNED / elements, WIDTH * band, math.log(WIDTH) if vanishes else 0.0)
    return Test("length of the way per tensor", _longer(a, b), limit, name, band)


def _longer(a: Tensor, b: Tensor) -> float:
    lengths = float(a.norm()), float(b.norm())
    if not all(lengths):
        return math.inf if any(lengths) else 0.0
    return abs(math.log(lengths[1] / lengths[0]))


def _middle(a: Tensor, b: Tensor) -> float:
    """Median of |a - b| over the elements that moved, in units of a's root mean square there."""
    moved = (a != 0) | (b != 0)
    if not moved.any():
        return 0.0
    size = float(a[moved].square().mean().sqrt())
    return float((a - b)[moved].abs().median()) / size if size else math.inf


def _largest_shares(a: Trajectory) -> dict[str, float]:
    """Each tensor's gradient in units of its layer's, at the sampled step where that is largest."""
    shares = dict.fromkeys(a.update, 0.0)
    for tensors in a.gradients.values():
        layers = {layer: float(vector.norm()) for layer, vector in by_layer(tensors).items()}
        for name, vector in tensors.items():
            if whole := layers[layer_of(name)]:
                shares[name] = max(shares[name], float(vector.norm()) / whole)
    return shares
