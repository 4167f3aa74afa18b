"""Loss from size and tokens: L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556).

For given exponents L is linear in E, A and B, so a grid of exponents with exact solutions (non-negative least squares)
finds where to start, and damped Gauss-Newton steps on Huber's loss of log L end it. Uncertainty is the bootstrap's: the
same fit on resampled runs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.account.errors import UserError
from headway.plan.numbers import POSITIVE
from headway.plan.table import Line, read_table

Array = NDArray[np.float64]
_HUBER = 1e-3  # relative residual above which a run is an outlier, as in the paper
_LEAST = 6  # runs; five constants
_EXPONENTS = (0.05, 1.2)
_SAME = 1e-6  # losses this near to each other are one number, written with rounding


@dataclass(frozen=True)
class Law:
    """The five constants; N in parameters, D in tokens, loss in nats."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def best_split(self, flops: float) -> tuple[float, float]:
        """(parameters, tokens) that reach the lowest loss with 6·N·D FLOPs (the paper's equation 4)."""
        both = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        return g * (flops / 6) ** (self.beta / both), (flops / 6) ** (self.alpha / both) / g


@dataclass(frozen=True)
class Fit:
    """The law fitted to all runs and its bootstrap copies; `error` is the largest relative residual."""

    law: Law
    copies: tuple[Law, ...]
    runs: int
    error: float
    reach: tuple[float, float]  # how many times larger N and D of the target are than the largest of the runs
    warnings: tuple[str, ...] = ()  # what these runs do not tell

    def band(self, parameters: float, tokens: float, share: float = 0.9) -> tuple[float, float]:
        """The middle `share` of the copies' losses there."""
        found = [law.loss(parameters, tokens) for law in self.copies]
        return float(np.quantile(found, (1 - share) / 2)), float(np.quantile(found, (1 + share) / 2))

    def interval(self, name: str, share: float = 0.9) -> tuple[float, float]:
        """The same of one constant."""
        found = [getattr(law, name) for law in self.copies]
        return float(np.quantile(found, (1 - share) / 2)), float(np.quantile(found, (1 + share) / 2))

    def to_dict(self) -> dict[str, Any]:
        bands = {name: self.interval(name) for name in ("e", "a", "b", "alpha", "beta")}
        said = {"runs": self.runs, "largest_residual": self.error, "warnings": list(self.warnings)}
        return {**vars(self.law), "intervals_90": bands, **said}


def read_losses(path: Path) -> tuple[Array, Array, Array]:
    """(N, D, L) of a CSV with the columns N, D and loss. Raises UserError naming file, line and column."""
    rows = []
    for line in read_table(path, f"--losses {path}", ("n", "d", "loss"), "write the columns N,D,loss"):
        if line.fault:
            raise UserError(f"--losses {path}:{line.number}: {line.fault}")
        rows.append([_cell(line, key, path) for key in ("n", "d", "loss")])
    n, d, loss = np.array(rows).T
    return n, d, loss


def _cell(line: Line, key: str, path: Path) -> float:
    try:
        return POSITIVE.read(line.cells[key])
    except ValueError as error:
        raise UserError(f"--losses {path}:{line.number}: column {key}: {error}") from None


def fit_law(n: Array, d: Array, loss: Array, target: tuple[float, float], copies: int = 100, seed: int = 0) -> Fit:
    """Fits the law to runs of `n` parameters, `d` tokens and final `loss`; `target` is (N, D) to be predicted.

    Raises UserError with fewer than six runs, or where all runs share one size, one number of tokens or one loss.
    """
    if len(n) < _LEAST:
        raise UserError(f"--losses: {len(n)} runs; five constants need at least {_LEAST}")
    for values, name in ((n, "N"), (d, "D")):
        if len(np.unique(values)) < 3:
            raise UserError(f"--losses: column {name} holds {len(np.unique(values))} values; give runs of at least 3")
    if loss.max() / loss.min() - 1 < _SAME:
        raise UserError(f"--losses: column loss is {loss[0]:g} in every run; nothing can be learnt from equal losses")
    law = _fit(n, d, loss)
    rng = np.random.default_rng(seed)
    found: list[Law] = []
    while len(found) < copies:
        pick = rng.integers(0, len(n), len(n))
        if min(len(np.unique(n[pick])), len(np.unique(d[pick]))) >= 2:
            found.append(_fit(n[pick], d[pick], loss[pick], start=law))
    fitted = law.e + law.a / n**law.alpha + law.b / d**law.beta
    error = float(np.max(np.abs(fitted / loss - 1)))
    reach = target[0] / float(n.max()), target[1] / float(d.max())
    return Fit(law, tuple(found), len(n), error, reach, _warnings(law, n, d, loss))


def _warnings(law: Law, n: Array, d: Array, loss: Array) -> tuple[str, ...]:
    """Which of N and D the runs say nothing of: what it changes in the fitted loss is within the noise of a run."""
    said = []
    for name, scale, exponent, values in (("N", law.a, law.alpha, n), ("D", law.b, law.beta, d)):
        change = scale * (float(values.min()) ** -exponent - float(values.max()) ** -exponent)
        if change < _HUBER * float(loss.mean()):
            said.append(
                f"the losses hardly fall with {name}, by {change:.2g} from {values.min():.3g} to {values.max():.3g}: "
                f"what larger {name} would bring is not in these runs"
            )
    return tuple(said)


def _fit(n: Array, d: Array, loss: Array, start: Law | None = None) -> Law:
    """The best of a grid of exponents, or `start`, made exact by damped Gauss-Newton steps."""
    if start is None:
        grid = np.linspace(*_EXPONENTS, 14)
        start = min((_solve(n, d, loss, x, y) for x, y in itertools.product(grid, grid)), key=lambda pair: pair[0])[1]
    return _polish(n, d, loss, start)


def _polish(n: Array, d: Array, loss: Array, start: Law) -> Law:
    """Levenberg and Marquardt on Huber's loss of log(predicted / measured), in log E, log A, log B and the exponents.

    N and D are measured from their geometric means, or A and alpha could hardly be told apart.
    """
    log_n, log_d = np.log(n), np.log(d)
    mid_n, mid_d = float(log_n.mean()), float(log_d.mean())
    x, y, goal = log_n - mid_n, log_d - mid_d, np.log(loss)
    least = float(loss.min()) * 1e-6  # a part of the loss that vanished must be able to come back
    at = np.array(
        [
            math.log(max(least, start.e)),
            math.log(max(least, start.a * math.exp(-start.alpha * mid_n))),
            math.log(max(least, start.b * math.exp(-start.beta * mid_d))),
            start.alpha,
            start.beta,
        ]
    )

    def parts(p: Array) -> Array:
        return np.exp(np.stack([np.full_like(x, p[0]), p[1] - p[3] * x, p[2] - p[4] * y]))

    def cost(p: Array) -> float:
        size = np.abs(np.log(parts(p).sum(axis=0)) - goal)
        return float(np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())

    now, damping = cost(at), 1e-3
    for _ in range(200):
        e, a, b = parts(at)
        total = e + a + b
        residual = np.log(total) - goal
        slope = np.stack([e, a, b, -a * x, -b * y], axis=1) / total[:, None]
        weight = np.minimum(1.0, _HUBER / np.maximum(np.abs(residual), 1e-15))
        normal = slope.T @ (slope * weight[:, None])
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -slope.T @ (weight * residual))
        tried = at + np.clip(step, -2.0, 2.0)
        tried[3:] = np.clip(tried[3:], *_EXPONENTS)
        then = cost(tried)
        if then < now:
            done = now - then < 1e-12 * now
            at, now, damping = tried, then, max(1e-9, damping / 5)
            if done:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    e, a, b, alpha, beta = (float(value) for value in at)
    return Law(math.exp(e), math.exp(a + alpha * mid_n), math.exp(b + beta * mid_d), alpha, beta)


def _solve(n: Array, d: Array, loss: Array, alpha: float, beta: float) -> tuple[float, Law]:
    """(Huber loss, law) with the best non-negative E, A and B for these exponents."""
    unit = float(np.exp(np.mean(np.log(n)))), float(np.exp(np.mean(np.log(d))))
    columns = np.stack([np.ones_like(loss), (n / unit[0]) ** -alpha, (d / unit[1]) ** -beta], axis=1) / loss[:, None]
    weight = np.ones_like(loss)
    values = np.zeros(3)
    for _ in range(4):
        values = _non_negative(columns * weight[:, None], weight)
        residual = np.abs(columns @ values - 1)
        weight = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(residual, 1e-12)))
    residual = np.abs(columns @ values - 1)
    huber = np.where(residual < _HUBER, residual**2 / 2, _HUBER * (residual - _HUBER / 2))
    e, a, b = (float(value) for value in values)
    return float(huber.sum()), Law(e, a * unit[0] ** alpha, b * unit[1] ** beta, alpha, beta)


def _non_negative(rows: Array, goal: Array) -> Array:
    """Least squares with three unknowns, none negative: the best of all subsets."""
    best, least = np.zeros(3), math.inf
    for used in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        part = np.linalg.lstsq(rows[:, used], goal, rcond=None)[0]
        if (part < 0).any():
            continue
        values = np.zeros(3)
        values[list(used)] = part
        error = float(((rows @ values - goal) ** 2).sum())
        if len(used) == 3:
            return values  # no bound is active
        if error < least:
            best, least = values, error
    return best
