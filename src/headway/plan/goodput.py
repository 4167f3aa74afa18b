"""Goodput (ETTR) of a run that fails: the closed form. docs/goodput.md derives it, `goodput_sim` checks it.

Failures are Poisson over the wall clock, recovery included. The expected time to get one interval t of work past a
save is, for one tier, exactly `exp(r L) (exp(r (t + C)) - 1) / (r E[exp(-r R)])` with r the job's failure rate, C what
a save stops, L how much later it is durable, and R the time to recover. Several tiers multiply, each with the failures
that only it can serve: exact for one tier, to second order for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from headway.account.account import Account
from headway.account.checkpoint_interval import daly, exact, young
from headway.account.errors import UserError
from headway.account.tree import RUN
from headway.plan.failure_rates import FailureRate


@dataclass(frozen=True, slots=True)
class Tier:
    """One place that checkpoints go to (host memory, a neighbour, local disk, remote storage).

    Attributes:
        save_s: training stands still this long for a save.
        lag_s: after that, this long until the copy is durable; a failure before then falls back to the copy before.
        load_s: reading it back.
        survives: share of all failures after which a copy of this tier can still be read, 0 to 1; the last tier 1.
        interval_s: seconds of training between saves; None for the best.
    """

    name: str
    save_s: float
    lag_s: float = 0.0
    load_s: float = 0.0
    survives: float = 1.0
    interval_s: float | None = None


@dataclass(frozen=True, slots=True)
class SlowNodes:
    """Soft failures: a node that computes, but holds all the others up.

    rate is per GPU-day; while one is there steps take 1 + slowdown times as long; notice_s passes until it is known,
    and it is replaced at the next save (restart and load, nothing lost).
    """

    per_gpu_day: float
    slowdown: float
    notice_s: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """Everything the closed form and the simulator know of a job. Seconds, and rates per GPU-day or job-day."""

    gpus: int
    rate: FailureRate
    detect_s: float
    restart_s: float
    tiers: tuple[Tier, ...]
    job_per_day: float = 0.0  # failures that do not grow with the GPUs: software, storage, scheduler
    planned_per_day: float = 0.0  # announced restarts: saved first, so no rework
    slow: SlowNodes | None = None
    step_s: float = 0.0  # saves fall on step boundaries; 0 for any moment

    def __post_init__(self) -> None:
        times = [("detection", self.detect_s), ("restart", self.restart_s), ("step", self.step_s)]
        times += [("failures a job-day", self.job_per_day), ("planned restarts a day", self.planned_per_day)]
        for tier in self.tiers:
            times += [(f"{tier.name}: save", tier.save_s), (f"{tier.name}: lag", tier.lag_s)]
            times += [(f"{tier.name}: load", tier.load_s), (f"{tier.name}: interval", tier.interval_s or 0.0)]
        for name, value in times:
            if not (value >= 0 and math.isfinite(value)):
                raise UserError(f"{name} of {value} must be a number of zero or more")
        if self.gpus < 1:
            raise UserError(f"{self.gpus} GPUs: a job needs at least one")
        shares = [tier.survives for tier in self.tiers]
        if not shares or shares != sorted(shares) or shares[-1] != 1.0 or shares[0] < 0:
            found = ", ".join(f"{tier.name} {tier.survives:g}" for tier in self.tiers) or "none"
            raise UserError(
                f"checkpoint tiers need survives to rise from tier to tier and to end at 1 (found: {found}): "
                "the last one must be readable after any failure"
            )
        if self.slow and not (self.slow.slowdown >= 0 and self.slow.notice_s >= 0 and self.slow.per_gpu_day >= 0):
            raise UserError("slow nodes need a rate, a slowdown and a time to notice of zero or more")

    @property
    def per_s(self) -> float:
        """Hard failures of the job per second of wall clock."""
        return (self.rate.mean * self.gpus + self.job_per_day) / 86400

    @property
    def slow_per_s(self) -> float:
        return self.slow.per_gpu_day * self.gpus / 86400 if self.slow else 0.0

    def served(self) -> list[float]:
        """Share of the failures that each tier serves: those that no tier before it survives."""
        shares = [0.0, *(tier.survives for tier in self.tiers)]
        return [after - before for before, after in pairwise(shares)]


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval of one tier in seconds of training: used, best, and by the two classical formulas. inf: never."""

    tier: str
    used_s: float
    best_s: float
    young_s: float
    daly_s: float
    mtbf_s: float  # of the failures this tier serves
    note: str = ""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What the closed form says, per second of healthy work. `ettr` is productive time over wall clock, 0 to 1.

    `full_speed` also charges the slow steps of soft failures: healthy work over wall clock. Seconds are per second of
    healthy work.
    """

    wall: float
    productive: float
    rework: float
    save: float
    detect: float
    restart: float
    reload: float
    intervals: tuple[Interval, ...]
    per_s: float

    @property
    def ettr(self) -> float:
        return self.productive / self.wall if math.isfinite(self.wall) else 0.0

    @property
    def full_speed(self) -> float:
        return 1 / self.wall

    def failures(self, work_s: float) -> float:
        """Expected hard failures while `work_s` seconds of healthy work get done."""
        return self.per_s * self.wall * work_s

    def account(self, work_s: float) -> Account:
        """The run's account for `work_s` seconds of healthy work, in the same tree as a measured run's."""
        parts = {
            "productive": self.productive,
            "rework": self.rework,
            "checkpoint_stall": self.save,
            "downtime.detect": self.detect,
            "downtime.restart": self.restart,
            "downtime.reload": self.reload,
        }
        ns = {path: max(0, round(seconds * work_s * 1e9)) for path, seconds in parts.items()}
        return Account.close(RUN, max(sum(ns.values()), round(self.wall * work_s * 1e9)), ns)


def predict(job: Reliability) -> Goodput:
    """Expected goodput with each tier's interval, the best one where none is given."""
    per_s, served = job.per_s, job.served()
    intervals = tuple(_interval(job, tier, per_s * share) for tier, share in zip(job.tiers, served, strict=True))
    speed = 1.0
    if job.slow:
        shortest = min(item.used_s for item in intervals)
        noticed = job.slow.notice_s + (shortest / 2 if math.isfinite(shortest) else 0.0)
        slow_share = -math.expm1(-job.slow_per_s * noticed)
        speed = 1 - slow_share * (1 - 1 / (1 + job.slow.slowdown))
    productive = 1 / speed  # seconds of steps that count, per second of healthy work
    running = productive
    save = 0.0
    for tier, interval, share in zip(job.tiers, intervals, served, strict=True):
        running *= _stretch(per_s * share, interval.used_s / speed, tier.save_s, tier.lag_s)
        save += productive * tier.save_s / (interval.used_s / speed) if interval.used_s else 0.0
    running *= 1 - _from_farther(job, per_s, [item.used_s / speed for item in intervals])
    rework = running - productive - save
    phases = [_phases(per_s, job.detect_s, job.restart_s, tier.load_s) for tier in job.tiers]
    shares = [share if per_s else 0.0 for share in served]
    transform = sum(share * phase[3] for share, phase in zip(shares, phases, strict=True)) if per_s else 1.0
    wall = running / transform if transform > 0 else math.inf
    down = [sum(s * p[i] for s, p in zip(shares, phases, strict=True)) for i in range(3)]
    total = sum(down)
    detect, restart, reload = ((wall - running) * part / total if total else 0.0 for part in down)
    # Announced restarts, and those that replace slow nodes: nothing is lost, but the wall clock runs on.
    planned = job.planned_per_day / 86400 + job.slow_per_s
    if planned and math.isfinite(wall):
        stop = _planned_stop(job, per_s, [item.used_s / speed for item in intervals], total, transform, wall * speed)
        share = planned * sum(stop)
        wall = wall / (1 - share) if share < 1 else math.inf
    if planned and math.isfinite(wall):
        waited, stood, read, again, recovered = (planned * wall * seconds for seconds in stop)
        save += waited
        rework += again
        restart += stood + (recovered * down[1] / total if total else 0.0)
        reload += read + (recovered * down[2] / total if total else 0.0)
        detect += recovered * down[0] / total if total else 0.0
    return Goodput(
        wall=wall,
        productive=productive,
        rework=max(0.0, rework),
        save=save,
        detect=detect,
        restart=restart,
        reload=reload,
        intervals=intervals,
        per_s=per_s,
    )


def _from_farther(job: Reliability, per_s: float, running_s: list[float]) -> float:
    """Share of the running time that is not lost because a farther tier's copy is sometimes the newer one.

    Copies of two tiers are as old as U(0, t) + L and U(0, s) + M at a failure: the newest is on average
    (t + L - M)^3 / (6 t s) younger than the nearer tier's.
    """
    saved = 0.0
    tiers = list(zip(job.tiers, job.served(), running_s, strict=True))
    for (near, share, often), (far, _, seldom) in pairwise(tiers):
        if 0 < often <= seldom < math.inf:
            saved += per_s * share * max(0.0, often + near.lag_s - far.lag_s) ** 3 / (6 * often * seldom)
    return min(saved, 0.5)


def _planned_stop(
    job: Reliability, per_s: float, running_s: list[float], down: float, transform: float, stretch: float
) -> tuple[float, float, float, float, float]:
    """Expected seconds of one announced restart: (save made durable, restart, reload; work again, recovery).

    The last two are those of a hard failure that comes while it stands still (and ends it): the nearest tier has just
    been saved, but a failure that this tier does not survive goes back to a farther one's copy, half its interval and
    its lag old. `running_s` are the tiers' intervals as they run, `stretch` the wall clock of a second of steps.
    """
    saves = [1 / every if every else math.inf for every in running_s]
    every = sum(saves)
    usual = every > 0 and math.isfinite(every)
    # The restart comes at the next save, of whichever tier that is.
    lag = sum(tier.lag_s * n / every for tier, n in zip(job.tiers, saves, strict=True)) if usual else job.tiers[0].lag_s
    ends = (lag, lag + job.restart_s, lag + job.restart_s + job.tiers[0].load_s)
    waited, stood, read = (_alone(per_s, end) for end in ends)
    if not per_s:
        return waited, stood - waited, read - stood, 0.0, 0.0
    hit = -math.expm1(-per_s * ends[2])
    again = -math.expm1(-per_s * lag) * min(running_s) if math.isfinite(min(running_s)) else 0.0
    for tier, share, interval in list(zip(job.tiers, job.served(), running_s, strict=True))[1:]:
        again += hit * share * (interval / 2 + tier.save_s / 2 + tier.lag_s) if math.isfinite(interval) else 0.0
    if usual:  # the interval that follows starts with a durable copy: what its lag would have cost is saved
        for tier, share, interval, n in zip(job.tiers, job.served(), running_s, saves, strict=True):
            again -= n / every * math.expm1(per_s * share * tier.lag_s) * (interval if n else 0.0)
    return waited, stood - waited, read - stood, again * stretch, hit * down / transform


def band(job: Reliability) -> tuple[float, float]:
    """ETTR at the two ends of the failure rate's band, worst first, with the intervals of the expected rate kept."""
    used = predict(job).intervals
    tiers = tuple(
        replace(tier, interval_s=item.used_s if math.isfinite(item.used_s) else None)
        for tier, item in zip(job.tiers, used, strict=True)
    )
    ends = []
    for per_gpu_day in (job.rate.high, job.rate.low):
        rate = FailureRate(per_gpu_day, per_gpu_day, per_gpu_day, "")
        ends.append(predict(replace(job, rate=rate, tiers=tiers)).ettr)
    return ends[0], ends[1]


def _interval(job: Reliability, tier: Tier, per_s: float) -> Interval:
    """The interval used: as given, or the best, which a save in flight and whole steps hold back."""
    if per_s < 1e-30:  # not once in the age of the universe
        used = tier.interval_s if tier.interval_s else math.inf
        return Interval(tier.name, used, math.inf, math.inf, math.inf, math.inf, "no failure needs this tier")
    mtbf = 1 / per_s
    free, note = exact(tier.save_s, mtbf), ""
    best = free
    if best < tier.lag_s:
        best, note = tier.lag_s, f"held at {tier.lag_s:g} s: one save must be durable before the next begins"
    if job.step_s:
        below = max(1, math.floor(best / job.step_s)) * job.step_s
        if below < tier.lag_s:
            below += job.step_s
        above = below + job.step_s
        cost = {step: _stretch(per_s, step, tier.save_s, tier.lag_s) for step in (below, above)}
        best = min(cost, key=lambda step: cost[step])
    used = tier.interval_s if tier.interval_s else best
    if tier.interval_s and tier.interval_s < tier.lag_s:
        note = f"given {tier.interval_s:g} s, shorter than the lag of {tier.lag_s:g} s: several saves are in flight"
    return Interval(tier.name, used, best, young(tier.save_s, mtbf), daly(tier.save_s, mtbf), mtbf, note)


def _stretch(per_s: float, interval: float, save_s: float, lag_s: float) -> float:
    """Running time, saves and rework included, per second of steps that count."""
    if interval == 0:
        return math.exp(min(700.0, per_s * lag_s)) if save_s == 0 else math.inf
    if math.isinf(interval):
        return 1.0
    if per_s < 1e-30:  # not once in the age of the universe
        return (interval + save_s) / interval
    exponent = per_s * (interval + save_s)
    if exponent + per_s * lag_s > 700:
        return math.inf
    return math.exp(per_s * lag_s) * math.expm1(exponent) / (per_s * interval)


def _phases(per_s: float, detect_s: float, restart_s: float, load_s: float) -> tuple[float, float, float, float]:
    """Expected seconds in each phase of one try to recover, and the chance that no failure ends it."""
    first, second = detect_s, detect_s + restart_s
    third = second + load_s
    detect = _alone(per_s, first)
    restart = _alone(per_s, second) - detect
    load = _alone(per_s, third) - detect - restart
    return detect, restart, load, math.exp(-per_s * third)


def _alone(per_s: float, seconds: float) -> float:
    """Expected time until `seconds` have passed or a failure came, whichever is first."""
    return -math.expm1(-per_s * seconds) / per_s if per_s else seconds
