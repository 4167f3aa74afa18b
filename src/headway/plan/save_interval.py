"""How often this run should save, in each tier: from what its saves cost and how often it fails. docs/checkpoints.md.

The failure rate is a Gamma posterior per GPU-day: the prior has the mean and the variance of the published rates
(`failure_rates`), the run's own failures and device-days update it (conjugate to a Poisson count). The prior is worth
1.5 failures in 1,500 GPU-days, which a small or a young run never reaches, so that a storm of failures would be taken
for chance for months. It is therefore a power prior (Ibrahim and Chen 2000, "Power prior distributions for regression
models"): where the run fails more often than the prior expects, its weight is the share under which the run's own count
is likeliest (empirical Bayes, as Gravestock and Held 2017, "Adaptive power priors with empirical Bayes for clinical
trials"). The intervals and the predicted ETTR are those of `goodput.predict`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.plan.failure_rates import FailureRate, estimate
from headway.plan.goodput import Goodput, Reliability, Tier, predict

_Z95 = 1.6448536269514722
# Shares of the prior that are tried: down to a few logarithms below the one that weighs as much as the run.
_SEARCHED, _POINTS = 8.0, 500
_LEAST_DAYS = 1 / 86400


@dataclass(frozen=True, slots=True)
class TierCost:
    """`cost_s`: what one save takes from training, end to end (not only while it stands still).

    `lag_s`: from then until the copy can be relied on; `load_s`: reading it back; `survives`: share of failures that
    leave it readable.
    """

    name: str
    cost_s: float
    lag_s: float
    load_s: float = 0.0
    survives: float = 1.0


@dataclass(frozen=True, slots=True)
class Advice:
    """`steps` between saves by tier (None: no failure needs that tier); `goodput` with these intervals. `unit`: what
    fails, a GPU or a rank of a run without one."""

    costs: tuple[TierCost, ...]
    rate: FailureRate
    gpus: int
    step_s: float
    goodput: Goodput
    job: Reliability
    unit: str = "GPU"

    @property
    def steps(self) -> dict[str, int | None]:
        return {
            item.tier: max(1, round(item.used_s / self.step_s)) if math.isfinite(item.used_s) else None
            for item in self.goodput.intervals
        }

    def lines(self) -> list[str]:
        """The advice and what it rests on, in words."""
        said = [self.rate.line(self.gpus, self.unit)]
        for cost, item in zip(self.costs, self.goodput.intervals, strict=True):
            steps = self.steps[item.tier]
            if steps is None:
                said.append(f"{item.tier}: {item.note}")
                continue
            said.append(
                f"{item.tier}: every {steps:,} steps ({item.used_s:,.3g} s); a save costs {cost.cost_s:.3g} s, is safe "
                f"{cost.lag_s:.3g} s later, a failure needs it every {item.mtbf_s / 3600:,.3g} h: "
                f"Young {item.young_s:,.3g} s, Daly {item.daly_s:,.3g} s, exact {item.best_s:,.3g} s"
                f"{f'; {item.note}' if item.note else ''}"
            )
        return [*said, f"predicted ETTR {self.goodput.ettr:.2%}"]


def gamma_posterior(failures: int, gpu_days: float, unit: str = "GPU") -> FailureRate:
    """Failures per GPU-day after `failures` in `gpu_days` (device-days of this run), with the published rates as prior.
    `unit`: what the days are of, in words; those of a rank without a GPU count as a GPU's.

    After n failures that the prior did not expect the mean lies between (n - 1) / gpu_days and n / gpu_days. The band
    is Wilson and Hilferty's (1931) approximation of the Gamma's 5 % and 95 % points.
    """
    prior = estimate()
    # A lognormal has the variance mean² (exp(sigma²) - 1); its 90 % band is 2 z sigma wide.
    sigma = math.log(prior.high / prior.low) / (2 * _Z95)
    shape = 1 / math.expm1(sigma**2)
    days = max(gpu_days, _LEAST_DAYS)
    share = _prior_share(failures, days, shape, shape / prior.mean)
    shape, before = shape * share, shape * share / prior.mean
    after, exposure = shape + failures, before + (days if failures else gpu_days)
    seen = f"{failures} failure{'s' * (failures > 1)}" if failures else "no failure yet"
    worth = f"worth {shape:.2g} failures in {before:,.2g} {unit}-days"
    prior_of = "published rates" if unit == "GPU" else f"published rates of GPUs, taken for a {unit}'s,"
    why = "" if share == 1 else ": no more, because this run fails more often"
    basis = f"{seen} in {gpu_days:,.3g} {unit}-days of this run, {prior_of} as prior, {worth}{why}"
    low, high = (_gamma_point(after, z) / exposure for z in (-_Z95, _Z95))
    return FailureRate(after / exposure, low, high, basis)


def advise(
    costs: Sequence[TierCost],
    *,
    gpus: int,
    step_s: float,
    failures: int,
    gpu_days: float,
    detect_s: float = 5.0,
    restart_s: float = 60.0,
    unit: str = "GPU",
) -> Advice:
    """The best interval of each tier, nearest first; the last tier must survive every failure.

    Raises UserError for figures that cannot be (negative times, shares that do not rise to 1).
    """
    rate = gamma_posterior(failures, gpu_days, unit)
    tiers = tuple(Tier(cost.name, cost.cost_s, cost.lag_s, cost.load_s, cost.survives) for cost in costs)
    job = Reliability(gpus, rate, detect_s, restart_s, tiers, step_s=step_s)
    return Advice(tuple(costs), rate, gpus, step_s, predict(job), job, unit)


def _prior_share(failures: int, days: float, shape: float, exposure: float) -> float:
    """Between 0 and 1: how much of a Gamma(shape, exposure) prior counts beside `failures` in `days`.

    All of it where the run fails no more often than the prior expects: quiet is what priors are for. Else the share
    that makes the count likeliest. One failure alone says nothing against any prior.
    """
    if failures < 2 or failures / days <= shape / exposure:
        return 1.0

    def likelihood(share: float) -> float:
        """Logarithm of the negative binomial: a Poisson count, its rate drawn from the prior."""
        a, b = shape * share, exposure * share
        ways = math.lgamma(a + failures) - math.lgamma(a)
        return ways + a * math.log(b / (b + days)) + failures * math.log(days / (b + days))

    least = math.log(min(1.0, days / exposure)) - _SEARCHED
    shares = [math.exp(least * point / _POINTS) for point in range(_POINTS + 1)]
    return max(shares, key=likelihood)


def _gamma_point(shape: float, z: float) -> float:
    spread = 1 / (9 * shape)
    return shape * max(0.0, 1 - spread + z * math.sqrt(spread)) ** 3
