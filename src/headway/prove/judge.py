"""The verdict: is B the same training as A, within what rounding and the order of sums do to A itself?

The band comes from running A a second time in the coarser arithmetic of the two, with its documents in another order
and its first weights shaken by one unit of rounding. What two such runs differ by, no comparison can see; what lies
well outside is another training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from headway.prove.comparison import FLOOR, WIDTH, Test, worst
from headway.prove.sample import apart, by_layer, cosine, gain, layer_of
from headway.prove.trajectory import Trajectory
from headway.prove.way import ways

GAIN = 0.002
"""Share by which a layer's gradient may be longer or shorter."""


@dataclass(frozen=True)
class Verdict:
    """Everything `headway verify` found. loss and norm: per step (B's relative difference, the band's).

    Where A and B are both not finite, as where float16 overflows and the step is not taken, the difference is NaN, and
    the step is left out and named.
    """

    tests: tuple[Test, ...]
    loss: tuple[tuple[float, float], ...]
    norm: tuple[tuple[float, float], ...]
    cosines: tuple[tuple[int, str, float, float], ...]
    held_out: tuple[float, float]
    seed_band: float | None
    left_out: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return all(test.passed for test in self.tests)

    @property
    def failed(self) -> list[Test]:
        return [test for test in self.tests if not test.passed]


def judge(
    a: Trajectory, b: Trajectory, twin: Trajectory, seed_band: float | None = None, *, rounding: float = 2.0**-24
) -> Verdict:
    """Holds B against A; `twin` is A's own second run.

    rounding: one unit of it, relative, in the coarser type that gradients between layers are kept in. What the twin
    cannot show, or shows in one number that may be small by luck, has a floor from it:

    - Each side may have rounded a number that all of its gradient is multiplied by: two units of length. The twin
      rounds it as A does (at step 1 the logits' gradients are p/n and (p-1)/n for each of n tokens, p about the same).
    - Each token's loss is rounded by itself on each side: two units / sqrt(tokens) of their mean.
    """
    shared = 2 * rounding
    left_out = tuple(_left_out(a, b, twin))
    a, b, twin = (_where_finite(side, (a, b, twin)) for side in (a, b, twin))
    loss = _relative(a.losses, b.losses, twin.losses)
    norm = _relative(a.grad_norms, b.grad_norms, twin.grad_norms, _norm_bands(a, twin))
    held = abs(b.held_out - a.held_out) / abs(a.held_out)
    held_band = max(abs(twin.held_out - a.held_out) / abs(a.held_out), max(band for _, band in loss))
    tests = [
        _over_steps("loss per step", loss, [_of_mean(shared, count) for count in a.tokens]),
        _over_steps("gradient norm per step", norm, [shared] * len(norm)),
        *_gradients(a, b, twin, shared),
        *ways(a, b, twin, shared),
        Test("held-out loss", held, max(WIDTH * held_band, FLOOR, _of_mean(shared, a.held_tokens)), "end", held_band),
    ]
    return Verdict(
        tuple(tests),
        tuple(loss),
        tuple(norm),
        tuple(_cosines(a, b, twin)),
        (a.held_out, b.held_out),
        seed_band,
        left_out,
    )


def _left_out(*sides: Trajectory) -> Iterator[str]:
    """The steps, or their gradients, that cannot be compared."""
    figures = [list(map(_finite, side.losses, side.grad_norms)) for side in sides]
    for step, (a, b, twin) in enumerate(zip(*figures, strict=True)):
        if not a and not b:
            yield f"step {step + 1}: not finite in A and in B"
        elif a and b and not twin and step in sides[0].gradients:
            yield f"gradients of step {step + 1}: not finite in A's second run, which measures the band"


def _where_finite(side: Trajectory, all_sides: Sequence[Trajectory]) -> Trajectory:
    """The same with the gradients of those steps alone that are finite everywhere; figures of a step still count."""
    kept = {
        step: tensors
        for step, tensors in side.gradients.items()
        if all(_finite(one.losses[step], one.grad_norms[step]) for one in all_sides)
    }
    return replace(side, gradients=kept)


def _finite(*figures: float) -> bool:
    return all(map(math.isfinite, figures))


def _relative(
    a: Sequence[float], b: Sequence[float], twin: Sequence[float], floors: Mapping[int, float] | None = None
) -> list[tuple[float, float]]:
    """Per step: B's relative difference from A, and the largest of A's twin so far (one step may agree by luck).

    floors: band of a step that is known from more than its one number.
    """
    pairs, band = [], 0.0
    for step, (one, other, own) in enumerate(zip(a, b, twin, strict=True)):
        if _finite(one, own):  # else it would be infinite for good, and no difference outside it
            band = max(band, _apart(one, own), (floors or {}).get(step, 0.0))
        pairs.append((_apart(one, other), band))
    return pairs


def _norm_bands(a: Trajectory, twin: Trajectory) -> dict[int, float]:
    """Band of the global gradient norm at the sampled steps, from the bands of all tensors' lengths.

    As |g|² = Σ |g_t|², relative changes d_t of the tensors' lengths change |g| by Σ w_t d_t with w_t = |g_t|² / |g|².
    The d_t of one twin may cancel by luck, and its norm then looks exact; another run's need not. Σ w_t |d_t| is what
    they reach when none cancels.
    """
    bands = {}
    for step, tensors in a.gradients.items():
        lengths = [(float(vector.norm()), float(twin.gradients[step][name].norm())) for name, vector in tensors.items()]
        square = sum(own * own for own, _ in lengths)
        bands[step] = sum(own * abs(own - other) for own, other in lengths) / square if square else 0.0
    return bands


def _apart(a: float, b: float) -> float:
    """Relative; infinite where one of them is not finite, NaN where both are not."""
    if not _finite(a, b):
        return math.inf if _finite(a) or _finite(b) else math.nan
    return abs(a - b) / max(abs(a), 1e-30)


def _over_steps(name: str, pairs: Sequence[tuple[float, float]], floors: Sequence[float]) -> Test:
    rows = [
        Test(name, value, max(WIDTH * band, FLOOR, floor), f"step {n + 1}", band)
        for n, ((value, band), floor) in enumerate(zip(pairs, floors, strict=True))
        if not math.isnan(value)
    ]
    return worst(rows) if rows else Test(name, math.nan, FLOOR, "no step is finite", math.nan)


def _of_mean(each: float, count: int) -> float:
    return each / math.sqrt(max(count, 1))


def _gradients(a: Trajectory, b: Trajectory, twin: Trajectory, shared: float) -> Iterator[Test]:
    turned, longer, tensors_turned, tensors_longer = [], [], [], []
    known: dict[str, float] = {}
    for step, tensors in a.gradients.items():
        # Once the weights have parted, what they change in a gradient may be all length (one element of LoRA's B that
        # goes the other way): only at the first step is the length known better than the direction.
        parted = WIDTH if step else 1.0
        layers, other, own = (by_layer(side.gradients[step]) for side in (a, b, twin))
        bands = {layer: apart(vector, own[layer]) for layer, vector in layers.items()}
        for layer, vector in layers.items():
            where, band = f"{layer}, step {step + 1}", bands[layer]
            value = apart(vector, other[layer])
            turned.append(Test("gradient per layer", value, max(WIDTH * band, 10 * FLOOR), where, band))
            # Independent noise of relative size r hardly moves the length as the twin sees it; rounding to a half type
            # is not independent of what it rounds, and may move it by a share of r.
            off = abs(gain(other[layer], vector, own[layer]) - 1)
            longer.append(Test("gradient length per layer", off, max(GAIN, parted * band, shared), where, band))
        for name, vector in tensors.items():
            layer = layer_of(name)
            floor = max(FLOOR, shared) * float(layers[layer].norm())
            sides = (vector, b.gradients[step][name], twin.gradients[step][name])
            # A small tensor's twin may agree by luck: its band is no less than the layer's, nor than at earlier steps.
            known[name] = max(known.get(name, 0.0), bands[layer], _noise(vector, sides[2], floor))
            rows = _tensor(f"{name}, step {step + 1}", sides, floor, known[name], shared, parted)
            tensors_turned.append(rows[0])
            tensors_longer.extend(rows[1:])
    if not turned:
        yield Test("gradient per layer", math.nan, 10 * FLOOR, "no step looked at is finite", math.nan)
    yield from (worst(rows) for rows in (turned, longer, tensors_turned, tensors_longer) if rows)


def _noise(a: Tensor, other: Tensor, floor: float) -> float:
    """|a - other| in units of |a|, or of `floor` where a vanishes but for rounding (the bias of k, a top-1 router)."""
    return float((a - other).norm()) / max(float(a.norm()), floor, 1e-300)


def _tensor(
    where: str, sides: tuple[Tensor, Tensor, Tensor], floor: float, band: float, shared: float, parted: float
) -> list[Test]:
    """One tensor of A, B and the twin: a layer's other tensors drown what happens to q, k, a router or a bias."""
    a, b, twin = sides
    limit = max(WIDTH * band, 10 * FLOOR, floor / max(float(a.norm()), floor, 1e-300))
    rows = [Test("gradient per tensor", _noise(a, b, floor), limit, where, band)]
    band = max(band, apart(a, twin))  # in units of its own length, however small that is
    if band < 0.5:  # above, its direction is noise, and length along it means nothing
        off = abs(gain(b, a, twin) - 1)
        limit = max(GAIN, _few(a, band, parted), shared)
        rows.append(Test("gradient length per tensor", off, limit, where, band))
    return rows


def _few(vector: Tensor, band: float, parted: float) -> float:
    """How far noise of relative size WIDTH * band may move the length: with few elements it does not average out."""
    return band * (parted + WIDTH / math.sqrt(max(vector.numel(), 1)))


def _cosines(a: Trajectory, b: Trajectory, twin: Trajectory) -> Iterator[tuple[int, str, float, float]]:
    for step in a.gradients:
        layers, other, own = (by_layer(side.gradients[step]) for side in (a, b, twin))
        for layer, vector in layers.items():
            yield step + 1, layer, cosine(vector, other[layer]), cosine(vector, own[layer])
