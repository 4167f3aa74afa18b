"""What a run takes: days, GPU-hours, dollars with a band, energy; and which plan to buy for a date or a budget.

Prices are an input. Where none is given, the device's published band is used (low: long-tail providers, typical:
specialised clouds, high: hyperscalers on demand) and named with its source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
POWER_SHARE = 0.8  # of TDP that training draws on average, where nothing was measured; an assumption, printed as one


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per GPU and hour: the band and where it is from."""

    low: float
    typical: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run. Dollars are (low, typical, high), None where the price is unknown; energy in kWh of the GPUs alone."""

    gpus: int
    steps: float
    tokens: float
    work_s: float
    wall_s: float
    ettr: float
    gpu_hours: float
    price: Price | None
    dollars: tuple[float, float, float] | None
    energy_kwh: float | None
    dollars_per_million: float | None
    assumptions: tuple[str, ...]

    def lines(self) -> list[str]:
        found = [
            f"{self.tokens:.3g} tokens in {self.steps:,.0f} steps: {days(self.wall_s)} on {self.gpus:,} GPUs "
            f"({days(self.work_s)} of steps, ETTR {self.ettr:.1%}), {self.gpu_hours:,.0f} GPU-hours"
        ]
        if self.price and self.dollars:
            low, typical, high = self.dollars
            band = f" ({low:,.0f} … {high:,.0f})" if low < high else ""
            per = (
                f"; {self.dollars_per_million:.3g} dollars per million trained tokens"
                if self.dollars_per_million
                else ""
            )
            found.append(f"{typical:,.0f} dollars{band} at {self.price.typical:g} per GPU-hour{per}")
        else:
            found.append("no price known for this device: give price_per_hour in the cluster file, or --price")
        if self.energy_kwh is not None:
            found.append(f"{self.energy_kwh / 1000:,.1f} MWh drawn by the GPUs")
        return found + [f"  assumed: {text}" for text in self.assumptions]


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that could be bought: seconds of wall clock and typical dollars, both of the whole run."""

    label: str
    gpus: int
    wall_s: float
    dollars: float | None
    detail: Any = None


@dataclass(frozen=True, slots=True)
class Gain:
    """What one improvement is worth over the run."""

    what: str
    days: float
    dollars: float | None

    def line(self) -> str:
        money = "" if self.dollars is None else f", {self.dollars:,.0f} dollars"
        return f"{self.what}: {self.days:.2f} days{money}"


def price_of(cluster: Cluster) -> Price | None:
    """The user's price, else the device's published band, else None."""
    device = cluster.device
    if cluster.price_per_hour is not None:
        return Price(cluster.price_per_hour, cluster.price_per_hour, cluster.price_per_hour, "given")
    if device.price is None:
        return None
    return Price(
        device.price if device.price_low is None else device.price_low,
        device.price,
        device.price if device.price_high is None else device.price_high,
        device.price_source,
    )


def run_cost(
    cluster: Cluster,
    step_s: float,
    tokens_per_step: float,
    tokens: float,
    *,
    ettr: float = 1.0,
    trained_share: float = 1.0,
    power_share: float = POWER_SHARE,
) -> RunCost:
    """Time, money and energy of training on `tokens` tokens.

    Args:
        ettr: productive share of the wall clock, 0 to 1 (`headway plan goodput`).
        trained_share: tokens with a label over all tokens, 0 to 1 (chats train on answers only).
        power_share: average draw over TDP, 0 to 1.

    Raises:
        UserError: a share outside 0 to 1, or tokens that are not positive.
    """
    for name, share in (("ETTR", ettr), ("trained share", trained_share), ("power share", power_share)):
        if not 0 < share <= 1:
            raise UserError(f"{name} of {share:g} must be above 0 and at most 1")
    if not (tokens > 0 and math.isfinite(tokens)):
        raise UserError(f"--tokens {tokens:g}: give a positive number, e.g. 15e12")
    steps = math.ceil(tokens / tokens_per_step)
    work_s = steps * step_s
    wall_s = work_s / ettr
    hours = wall_s / 3600 * cluster.gpus
    price = price_of(cluster)
    tdp = cluster.device.tdp_w
    assumptions = [f"ETTR {ettr:.1%}"]
    if price:
        assumptions.append(f"price per GPU-hour {price.low:g} / {price.typical:g} / {price.high:g} ({price.source})")
    if tdp:
        assumptions.append(f"{power_share:.0%} of {tdp:g} W a GPU; hosts, network and cooling not counted")
    if trained_share < 1:
        assumptions.append(f"{trained_share:.0%} of the tokens carry a label")
    return RunCost(
        gpus=cluster.gpus,
        steps=steps,
        tokens=tokens,
        work_s=work_s,
        wall_s=wall_s,
        ettr=ettr,
        gpu_hours=hours,
        price=price,
        dollars=(hours * price.low, hours * price.typical, hours * price.high) if price else None,
        energy_kwh=hours * tdp * power_share / 1000 if tdp else None,
        dollars_per_million=hours * price.typical / (tokens * trained_share / 1e6) if price else None,
        assumptions=tuple(assumptions),
    )


def worth(cost: RunCost, mfu: float, step_s: float, communication_s: float) -> tuple[Gain, ...]:
    """What one more point of MFU, and half the exposed communication, are worth in days and dollars.

    `communication_s` is the exposed part of one step; at the same price and the same ETTR.
    """
    one_point = cost.wall_s * (1 - mfu / (mfu + 0.01))
    halved = cost.wall_s * (communication_s / 2 / step_s)
    typical = cost.dollars[1] / cost.wall_s if cost.dollars else None
    return tuple(
        Gain(what, saved / 86400, None if typical is None else saved * typical)
        for what, saved in (
            (f"one more point of MFU ({mfu:.1%} now)", one_point),
            (f"half the exposed communication ({communication_s / step_s:.1%} of the step now)", halved),
        )
    )


def cheapest_by(options: Sequence[Option], deadline_s: float) -> Option | None:
    """The cheapest option that is done in time; ties go to the faster. None when none is."""
    fits = [option for option in options if option.wall_s <= deadline_s and option.dollars is not None]
    return min(fits, key=lambda option: (option.dollars or 0.0, option.wall_s), default=None)


def fastest_within(options: Sequence[Option], budget: float) -> Option | None:
    """The fastest option that costs no more than the budget; ties go to the cheaper. None when none does."""
    fits = [option for option in options if option.dollars is not None and option.dollars <= budget]
    return min(fits, key=lambda option: (option.wall_s, option.dollars or 0.0), default=None)


def frontier(options: Iterable[Option]) -> list[Option]:
    """Options that no other beats in both time and money, fastest first."""
    priced = sorted(
        (option for option in options if option.dollars is not None),
        key=lambda option: (option.wall_s, option.dollars or 0.0),
    )
    found: list[Option] = []
    least = math.inf
    for option in priced:
        assert option.dollars is not None
        if option.dollars < least:
            found.append(option)
            least = option.dollars
    return found


def parse_duration(text: str) -> float:
    """`30d`, `12h`, `90m`, `2w`, `3.5d` in seconds. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([mhdw])\s*", text)
    if not match or float(match[1]) <= 0:
        raise UserError(f"duration {text!r}: write a number and a unit, e.g. 30d, 12h, 90m or 2w")
    return float(match[1]) * _UNITS[match[2]]


def days(seconds: float) -> str:
    """`34.2 days`, or hours below two days."""
    return f"{seconds / 86400:.1f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.1f} hours"
