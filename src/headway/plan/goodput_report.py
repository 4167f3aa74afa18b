"""What `headway plan goodput` says: the account, intervals, what each improvement is worth, spares, assumptions."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from headway.account.account import Account
from headway.account.errors import UserError
from headway.plan.goodput import Goodput, Reliability, Tier, band, predict
from headway.plan.goodput_sim import Spread, simulate_many
from headway.plan.numbers import AMOUNT, PART, POSITIVE

_EVENTS = 100_000  # of each simulated run: about a second
_KEYS = {"save": "save_s", "lag": "lag_s", "load": "load_s", "survives": "survives", "interval": "interval_s"}


@dataclass(frozen=True, slots=True)
class Worth:
    """What one improvement would add: points of ETTR, and days off the run."""

    what: str
    points: float
    days: float


@dataclass(frozen=True, slots=True)
class GoodputReport:
    job: Reliability
    work_s: float
    found: Goodput
    worst: float
    best: float
    account: Account
    worth: tuple[Worth, ...]
    spares: int
    repair_s: float
    price: float | None
    simulated: Spread | None
    simulated_s: float | None = None  # seconds of healthy work of each simulated run

    def to_dict(self) -> dict[str, Any]:
        wall = self.found.wall * self.work_s
        return {
            "ettr": self.found.ettr,
            "ettr_worst": self.worst,
            "ettr_best": self.best,
            "full_speed": self.found.full_speed,
            "wall_s": wall,
            "failures": self.found.failures(self.work_s),
            "failure_rate": asdict(self.job.rate),
            "intervals": [asdict(item) for item in self.found.intervals],
            "account": self.account.to_dict(),
            "worth": [asdict(item) for item in self.worth],
            "spare_nodes": self.spares,
            "lost_dollars": self._lost_dollars(),
            "simulated": asdict(self.simulated) if self.simulated else None,
        }

    def _lost_dollars(self) -> float | None:
        return None if self.price is None else (self.found.wall - 1) * self.work_s / 3600 * self.job.gpus * self.price

    def lines(self) -> Iterator[str]:
        job, found, wall = self.job, self.found, self.found.wall * self.work_s
        yield job.rate.line(job.gpus)
        speed = f", {found.full_speed:.1%} at full speed" if job.slow else ""
        yield (
            f"ETTR {found.ettr:.1%} ({self.worst:.1%} … {self.best:.1%} over the rate's band){speed}: "
            f"{self.work_s / 86400:.3g} days of work take {wall / 86400:.4g}, "
            f"with {found.failures(self.work_s):.3g} failures"
        )
        if found.ettr < _HOLDS_FROM:
            how = "the simulation below decides" if self.simulated else "--simulate decides"
            yield f"rough: below {_HOLDS_FROM:.0%} the closed form can be several points off (docs/goodput.md); {how}"
        if (lost := self._lost_dollars()) is not None:
            yield f"lost: {lost:,.0f} dollars at {self.price:g} per GPU-hour"
        for path in self.account.parts:
            if self.account.parts[path]:
                yield f"  {path:<20} {self.account.share(path):7.2%} {self.account.parts[path] / 3.6e12:10.1f} h"
        for item in found.intervals:
            yield (
                f"save to {item.tier} every {_seconds(item.used_s)} (best {_seconds(item.best_s)}, Young "
                f"{_seconds(item.young_s)}, Daly {_seconds(item.daly_s)}){'; ' + item.note if item.note else ''}"
            )
        for gain in self.worth:
            yield f"  {gain.what:<32} {gain.points:+6.2f} points, {gain.days:6.2f} days"
        yield f"spare nodes: {self.spares} keep the wait for a machine under 1 % (repair {self.repair_s / 3600:g} h)"
        if self.simulated:
            s = self.simulated
            days = f", each cut off after {(self.simulated_s or 0) / 86400:.3g} days of work: {_EVENTS:,} events"
            cut = days if (self.simulated_s or 0) < self.work_s else ""
            yield f"simulated: ETTR {s.mean:.1%} ± {s.error:.2%} ({s.low:.1%} … {s.high:.1%} over {s.runs} runs{cut})"
        yield (
            f"assumed: failures Poisson and independent, also during recovery; {job.detect_s:g} s to notice, "
            f"{job.restart_s:g} s to restart; a failure before a save is durable falls back to the one before"
        )


# Recoveries then overlap with lags, announced restarts and slow nodes, which the closed form takes one by one.
_HOLDS_FROM = 0.6


def report(job: Reliability, work_s: float, price: float | None, repair_s: float, simulate: bool) -> GoodputReport:
    """Everything about one job of `work_s` seconds of healthy work. Raises UserError when it cannot get on."""
    if not (work_s > 0 and math.isfinite(work_s)):
        raise UserError(f"{work_s / 86400} days of work: give more than zero")
    found = predict(job)
    if found.ettr < 1e-3:
        raise UserError(_why_never(job))
    worst, best = band(job)
    worth = tuple(sorted(_worth(job, found, work_s), key=lambda item: -item.points))
    node_failures_s = job.rate.mean * job.gpus / 86400
    simulated_s = min(max(work_s, 200 / job.per_s if job.per_s else work_s), _EVENTS / _events(job, found))
    runs = simulate_many(job, simulated_s, 6, 1) if simulate else None
    account = found.account(work_s)
    spares = _spares(node_failures_s * repair_s)
    return GoodputReport(
        job,
        work_s,
        found,
        worst,
        best,
        account,
        worth,
        spares,
        repair_s,
        price,
        runs,
        simulated_s if simulate else None,
    )


def _events(job: Reliability, found: Goodput) -> float:
    """Failures, restarts and saves of a second of healthy work, what simulating it costs."""
    saves = sum(1 / item.used_s for item in found.intervals if item.used_s)
    repeated = 1 + found.rework / found.productive
    return (job.per_s + job.slow_per_s + job.planned_per_day / 86400) * found.wall + saves * repeated + 1e-12


def _why_never(job: Reliability) -> str:
    """What of a job that never gets on is too long for its failures: the largest of what must pass between two."""
    last = job.tiers[-1]
    recovery = job.detect_s + job.restart_s + last.load_s
    parts = {
        f"recovery takes {recovery:.3g} s": (recovery, "shorten recovery"),
        f"a step takes {job.step_s:.3g} s, and only whole ones can be saved": (job.step_s, "shorten the step"),
        f"a save is made every {last.interval_s or 0:.3g} s": (last.interval_s or 0.0, "save more often"),
        f"a save takes {last.save_s + last.lag_s:.3g} s until it is durable": (last.save_s + last.lag_s, "save faster"),
    }
    what = max(parts, key=lambda name: parts[name][0])
    every = f"one failure every {1 / job.per_s:.3g} s" if job.per_s else "announced restarts alone"
    return f"{every}, and {what}: such a run never gets on; {parts[what][1]}, or use fewer GPUs"


def parse_tier(text: str) -> Tier:
    """`memory:save=1,lag=5,load=20,survives=0.8`. Raises UserError naming the key."""
    name, colon, rest = text.partition(":")
    values: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, number = item.partition("=")
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=2, cutoff=0.3) or list(_KEYS)
            raise UserError(f"--tier {text!r}: key {key!r} is unknown; nearest: {', '.join(near)}")
        try:
            values[_KEYS[key]] = (PART if key == "survives" else POSITIVE if key == "interval" else AMOUNT).read(number)
        except ValueError as error:
            raise UserError(f"--tier {text!r}: {key}: {error}") from None
    if not name or not colon or "save_s" not in values or "survives" not in values:
        raise UserError(f"--tier {text!r}: write NAME:save=SECONDS,survives=SHARE, e.g. memory:save=1,survives=0.8")
    return Tier(name, **values)


def last_tier(save: float, lag: float, load: float, interval: float | None) -> Tier:
    """The tier that survives everything."""
    return Tier("storage", save, lag, load, 1.0, interval)


def _worth(job: Reliability, now: Goodput, work_s: float) -> Iterator[Worth]:
    """Each cost halved on its own, intervals chosen anew where they were free."""
    changes = {
        "halve the failure rate": replace(job, rate=replace(job.rate, mean=job.rate.mean / 2)),
        "halve the time to notice": replace(job, detect_s=job.detect_s / 2),
        "halve the restart": replace(job, restart_s=job.restart_s / 2),
    }
    for name, what in (("save_s", "save"), ("lag_s", "lag until durable"), ("load_s", "load")):
        tiers = tuple(replace(tier, **{name: getattr(tier, name) / 2}) for tier in job.tiers)
        changes[f"halve the {what}"] = replace(job, tiers=tiers)
    if any(tier.interval_s for tier in job.tiers):
        changes["use the best interval"] = replace(
            job, tiers=tuple(replace(tier, interval_s=None) for tier in job.tiers)
        )
    if job.slow:
        changes["halve the time to notice slow nodes"] = replace(
            job, slow=replace(job.slow, notice_s=job.slow.notice_s / 2)
        )
    for what, changed in changes.items():
        after = predict(changed)
        yield Worth(what, 100 * (after.full_speed - now.full_speed), (now.wall - after.wall) * work_s / 86400)


def _spares(mean: float) -> int:
    """Smallest n with P(more than n nodes in repair) < 1 %, repairs being Poisson with this mean."""
    if mean > 500:
        return math.ceil(mean + 2.33 * math.sqrt(mean))
    term = total = math.exp(-mean)
    n = 0
    while total < 0.99:
        n += 1
        term *= mean / n
        total += term
    return n


def _seconds(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.3g} min" if value < 6000 else f"{value / 3600:.3g} h"
