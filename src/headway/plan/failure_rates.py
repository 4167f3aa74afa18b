"""How often a GPU fails: an input with a prior, never a constant. Published rates span a factor of ten.

The prior is lognormal over the rate per GPU-day; its 90 % band is the span of the published rates in
`failure_rates.csv`. A cluster's own count of failures over its own GPU-days updates it (Poisson likelihood). Where it
fails more often than the prior allows for, the prior's band is widened until the count is likeliest (a power prior with
its weight by empirical Bayes: Ibrahim and Chen 2000; Gravestock and Held 2017): published rates are no reason to
disbelieve a storm.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np

from headway.account.errors import UserError

_Z95 = 1.6448536269514722  # the normal distribution's 95 % point
_GRID = 4001
_WIDEST, _WIDTHS = 1e4, 60


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """One published rate, failures per GPU-day, with where it is from."""

    name: str
    gpu: str
    gpus: int | None
    per_gpu_day: float
    what: str
    source: str


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Failures per GPU-day: the expected value, the 90 % band (both ends), and what it rests on."""

    mean: float
    low: float
    high: float
    basis: str

    def mtbf_s(self, gpus: int) -> float:
        """Mean seconds between failures of a job of `gpus`."""
        return 86400 / (self.mean * gpus) if self.mean > 0 else math.inf

    def line(self, gpus: int, unit: str = "GPU") -> str:
        """In words; `unit`: what fails."""
        if self.high <= 0:
            return f"failure rate 0 per {unit}-day ({self.basis}): no failure of a {unit} is expected"
        hours = [86400 / (rate * gpus) / 3600 if rate > 0 else math.inf for rate in (self.high, self.mean, self.low)]
        return (
            f"failure rate {self.mean:.2e} per {unit}-day (90 % band {self.low:.2e} … {self.high:.2e}; {self.basis}): "
            f"one failure of the job every {hours[1]:.3g} h ({hours[0]:.3g} … {hours[2]:.3g})"
        )


@lru_cache(maxsize=1)
def published_rates() -> tuple[PublishedRate, ...]:
    """The rates the prior rests on, each with its source."""
    text = resources.files("headway.plan").joinpath("failure_rates.csv").read_text(encoding="utf-8")
    return tuple(
        PublishedRate(
            row["name"],
            row["gpu"],
            int(row["gpus"]) if row["gpus"] else None,
            float(row["rate_per_gpu_day"]),
            row["what"],
            row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    )


def given(per_gpu_day: float) -> FailureRate:
    """A rate the user vouches for. Raises UserError when it is negative or above one failure per GPU-day."""
    if not 0 <= per_gpu_day <= 1:
        raise UserError(
            f"failure rate {per_gpu_day!r} per GPU-day must be between 0 and 1; published rates are {_span_text()}"
        )
    return FailureRate(per_gpu_day, per_gpu_day, per_gpu_day, "given")


def named(name: str) -> FailureRate:
    """A published rate by its name (`llama3-405b`). Raises UserError naming those that exist."""
    for row in published_rates():
        if row.name == name:
            return FailureRate(row.per_gpu_day, row.per_gpu_day, row.per_gpu_day, f"{row.what}; {row.source}")
    names = ", ".join(row.name for row in published_rates())
    raise UserError(f"no published failure rate is called {name!r}; known: {names}; or give a number per GPU-day")


def estimate(failures: int | None = None, gpu_days: float | None = None) -> FailureRate:
    """The prior, updated by `failures` seen over `gpu_days` of one's own where both are given.

    Returns the posterior's mean and its 5 % and 95 % points, by integration over a grid of log rates.
    """
    if (failures is None) != (gpu_days is None):
        raise UserError("own failures need both figures: how many failures, and over how many GPU-days")
    if failures is not None and gpu_days is not None and not (failures >= 0 and gpu_days > 0):
        raise UserError(
            f"{failures} failures over {gpu_days} GPU-days: counts of zero or more over more than zero days"
        )
    low, high = _span()
    middle, sigma = (math.log(low) + math.log(high)) / 2, (math.log(high) - math.log(low)) / (2 * _Z95)
    seen = math.log(max(failures, 1) / gpu_days) if failures is not None and gpu_days is not None else middle
    log_rate = np.linspace(min(middle - 8 * sigma, seen - 8), max(middle + 8 * sigma, seen + 8), _GRID)
    log_density = -0.5 * ((log_rate - middle) / sigma) ** 2
    basis = f"prior: published rates span {_span_text()}"
    if failures is not None and gpu_days is not None:
        own = failures * log_rate - np.exp(log_rate) * gpu_days
        log_density = log_density / _widened(log_density, own, failures > 1 and seen > middle) + own
        basis = f"{failures} own failures over {gpu_days:,.0f} GPU-days, with the published rates as prior"
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    cumulative = np.cumsum(weight)
    ends = [float(np.exp(np.interp(level, cumulative, log_rate))) for level in (0.05, 0.95)]
    return FailureRate(float(np.sum(weight * np.exp(log_rate))), ends[0], ends[1], basis)


def _widened(log_density: np.ndarray, own: np.ndarray, may: bool) -> float:
    """The factor on the prior's variance, 1 or more, that makes the own count likeliest."""
    if not may:
        return 1.0
    factors = np.geomspace(1.0, _WIDEST, _WIDTHS)
    found = [np.logaddexp.reduce(log_density / factor + own) - 0.5 * math.log(factor) for factor in factors]
    return float(factors[int(np.argmax(found))])


def _span() -> tuple[float, float]:
    rates = [row.per_gpu_day for row in published_rates()]
    return min(rates), max(rates)


def _span_text() -> str:
    low, high = _span()
    return f"{low:.2g} … {high:.2g}"


def parse(text: str) -> FailureRate:
    """A number per GPU-day, or the name of a published rate. Raises UserError naming --rate."""
    try:
        number = float(text)
    except ValueError:
        number = None
    try:
        return named(text) if number is None else given(number)
    except UserError as error:
        raise UserError(f"--rate {text!r}: {error}") from None
