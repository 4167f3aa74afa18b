"""What a run takes: days, GPU-hours, dollars with a band, energy; and what one improvement is worth.

Prices are an input. Where none is given, the device's published band is used (low: long-tail providers, typical:
specialised clouds, high: hyperscalers on demand) and named with its source.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
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

    def to_dict(self) -> dict[str, Any]:
        return {
            "days": self.wall_s / 86400,
            "days_of_steps": self.work_s / 86400,
            "steps": self.steps,
            "ettr": self.ettr,
            "gpu_hours": self.gpu_hours,
            "dollars": self.dollars[1] if self.dollars else None,
            "dollars_band": self.dollars,
            "energy_kwh": self.energy_kwh,
            "dollars_per_million_trained_tokens": self.dollars_per_million,
            "assumed": self.assumptions,
        }

    def line(self) -> str:
        """One line: time, GPU-hours, dollars, energy."""
        money = "price unknown (--price)" if self.dollars is None else f"{self.dollars[1]:,.0f} dollars"
        energy = "" if self.energy_kwh is None else f" · {self.energy_kwh / 1000:,.0f} MWh"
        return f"{days(self.wall_s)} · {self.gpu_hours:,.0f} GPU-hours · {money}{energy}"

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
    notes: tuple[str, ...] = (),
) -> RunCost:
    """Time, money and energy of training on `tokens` tokens.

    Args:
        ettr: productive share of the wall clock, 0 to 1 (`headway plan goodput`).
        trained_share: tokens with a label over all tokens, 0 to 1 (chats train on answers only).
        power_share: average draw over TDP, 0 to 1.
        notes: what the ETTR rests on, kept with the other assumptions.

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
    assumptions = list(notes) or [f"ETTR {ettr:.1%}, given"]
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


def parse_duration(text: str, name: str = "duration") -> float:
    """`30d`, `12h`, `90m`, `2w`, `3.5d` in seconds. Raises UserError with `name`."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhdw])\s*", text)
    if not match or float(match[1]) <= 0:
        raise UserError(f"{name} {text!r}: write a number and a unit, e.g. 30d, 12h, 90m or 2w")
    return float(match[1]) * _UNITS[match[2]]


def days(seconds: float) -> str:
    """`34.2 days`, hours below two days, minutes below two hours, seconds below two minutes."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} seconds" if seconds != 1 else "1 second"
