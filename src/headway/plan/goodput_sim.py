"""A discrete-event simulator of a failing run: shares no formula with the closed form, so that each checks the other.

It walks from event to event (save due, copy durable, failure, recovered, node slow, slow node noticed) and charges
every second to one category. Gaps between failures may be exponential, uniform (fault injection) or Weibull (infant
mortality: shape below 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, stdev

import numpy as np

from headway.account.account import Account
from headway.account.errors import UserError
from headway.account.tree import RUN
from headway.plan.goodput import Reliability, predict

Gap = Callable[[np.random.Generator], float]
_MOST_EVENTS = 2_000_000


def exponential(mean_s: float) -> Gap:
    return lambda random: float(random.exponential(mean_s)) if math.isfinite(mean_s) else math.inf


def uniform(low_s: float, high_s: float) -> Gap:
    return lambda random: float(random.uniform(low_s, high_s))


def weibull(mean_s: float, shape: float) -> Gap:
    """Gaps with this mean; shape 1 is exponential, below 1 failures come in clusters."""
    scale = mean_s / math.gamma(1 + 1 / shape)
    return lambda random: float(scale * random.weibull(shape))


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulated run: `work_s` seconds of healthy work took `wall_s`, charged to the categories of `parts`."""

    work_s: float
    wall_s: float
    parts: dict[str, float]
    failures: int
    planned: int

    @property
    def ettr(self) -> float:
        return self.parts["productive"] / self.wall_s

    @property
    def full_speed(self) -> float:
        return self.work_s / self.wall_s

    def account(self) -> Account:
        ns = {path: max(0, round(seconds * 1e9)) for path, seconds in self.parts.items()}
        return Account.close(RUN, max(sum(ns.values()), round(self.wall_s * 1e9)), ns)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean ETTR of several simulated runs, the standard error of that mean, and the lowest and highest run."""

    mean: float
    error: float
    low: float
    high: float
    mean_wall_s: float
    runs: int


def simulate_many(job: Reliability, work_s: float, runs: int = 8, seed: int = 0, gap: Gap | None = None) -> Spread:
    """`runs` independent runs with seeds that follow from `seed`."""
    found = [simulate(job, work_s, seed * 10_007 + run, gap) for run in range(runs)]
    ettr = [run.ettr for run in found]
    error = stdev(ettr) / math.sqrt(runs) if runs > 1 else math.nan
    return Spread(fmean(ettr), error, min(ettr), max(ettr), fmean(run.wall_s for run in found), runs)


def simulate(job: Reliability, work_s: float, seed: int, gap: Gap | None = None) -> Simulated:
    """Runs until `work_s` seconds of healthy work are done, with the intervals that `predict` uses.

    Raises UserError when the run does not get on: failures come faster than recovery.
    """
    return _Run(job, work_s, np.random.default_rng(seed), gap).finish()


@dataclass(slots=True)
class _Kept:
    """A stretch of the run that may still be lost: the work done at its end, its seconds, and whether it saved."""

    at: float
    took: float
    saving: bool


@dataclass(slots=True)
class _Run:
    """One run, event by event. Work is in seconds of healthy training; saves fall on multiples of the interval."""

    job: Reliability
    work_s: float
    random: np.random.Generator
    gap: Gap | None
    now: float = 0.0
    work: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    kept: list[_Kept] = field(default_factory=list)
    copies: list[tuple[float, int, float]] = field(default_factory=list)  # (durable at, tier, work)
    noticed_at: list[float] = field(default_factory=list)  # when each slow node in the job will be known
    failures: int = 0
    planned: int = 0
    events: int = 0
    fails_at: float = math.inf
    slow_at: float = math.inf
    planned_at: float = math.inf

    def finish(self) -> Simulated:
        job = self.job
        self.gap = self.gap or exponential(1 / job.per_s if job.per_s else math.inf)
        self.fails_at = self.gap(self.random)
        self.slow_at = self._wait(job.slow_per_s)
        self.planned_at = self._wait(job.planned_per_day / 86400)
        forecast = predict(job)
        intervals = [item.used_s for item in forecast.intervals]
        if min(intervals) <= 0:
            raise UserError("the simulator needs an interval above zero: give a step time or an interval")
        if forecast.ettr < 1e-3:
            raise self._hopeless()
        while self.work < self.work_s:
            self._count()
            due = [self._next(every) for every in intervals]
            stop = min([*due, self.work_s])
            if not self._train(stop):
                self._fail()
            elif stop < self.work_s:
                self._save_and_restart([tier for tier, at in enumerate(due) if at == stop])
        return self._result()

    def _count(self) -> None:
        self.events += 1
        if self.events > _MOST_EVENTS:
            raise self._hopeless()

    def _hopeless(self) -> UserError:
        return UserError(
            f"after {self.now / 86400:.0f} simulated days {self.work / self.work_s:.1%} of the work is done: "
            "failures come faster than the run recovers; shorten recovery or the interval"
        )

    def _result(self) -> Simulated:
        saving = sum(stretch.took for stretch in self.kept if stretch.saving)
        productive = sum(stretch.took for stretch in self.kept if not stretch.saving)
        parts = {**self.parts, "productive": productive, "checkpoint_stall": saving + self.parts.get("waiting", 0.0)}
        parts["rework"] = max(0.0, parts.pop("running", 0.0) - productive - saving)
        parts.pop("waiting", None)
        return Simulated(self.work_s, self.now, parts, self.failures, self.planned)

    def _wait(self, per_s: float) -> float:
        return float(self.random.exponential(1 / per_s)) if per_s else math.inf

    def _next(self, every: float) -> float:
        return (math.floor(self.work / every + 1e-9) + 1) * every if math.isfinite(every) else math.inf

    def _spend(self, path: str, seconds: float) -> None:
        self.parts[path] = self.parts.get(path, 0.0) + seconds
        self.now += seconds

    def _train(self, until: float) -> bool:
        """Trains until this much work is done; False when a failure came first."""
        slow = self.job.slow
        while self.work < until:
            while slow and self.slow_at <= self.now:
                self.noticed_at.append(self.slow_at + slow.notice_s)
                self.slow_at += self._wait(self.job.slow_per_s)
            pace = 1 + slow.slowdown if slow and self.noticed_at else 1.0
            whole = (until - self.work) * pace
            took = min(whole, self.fails_at - self.now, self.slow_at - self.now)
            self.work = until if took == whole else self.work + took / pace
            self.kept.append(_Kept(self.work, took, False))
            self._spend("running", took)
            if took < whole and self.now >= self.fails_at:
                return False
        return True

    def _save_and_restart(self, tiers: list[int]) -> None:
        """Saves to each tier that is due; then announced restarts, and those that replace slow nodes, take place."""
        for tier in tiers:
            spec = self.job.tiers[tier]
            took = min(spec.save_s, self.fails_at - self.now)
            self.kept.append(_Kept(self.work, took, True))
            self._spend("running", took)
            if took < spec.save_s:
                return self._fail()
            self._keep_copy(tier, self.now + spec.lag_s)
        known = [at for at in self.noticed_at if at <= self.now]
        self.noticed_at = [at for at in self.noticed_at if at > self.now]
        restarts = len(known)
        while self.planned_at <= self.now:
            restarts += 1
            self.planned_at += self._wait(self.job.planned_per_day / 86400)
        for _ in range(restarts):
            self.planned += 1
            phases = (
                ("waiting", self.job.tiers[tiers[0]].lag_s),
                ("downtime.restart", self.job.restart_s),
                ("downtime.reload", self.job.tiers[0].load_s),
            )
            if not self._pass(phases):
                return self._fail()

    def _keep_copy(self, tier: int, durable_at: float) -> None:
        """Adds a copy; of those before it in this tier only the newest durable one and those on their way matter."""
        durable = max((c[2] for c in self.copies if c[1] == tier and c[0] <= self.now), default=-1.0)
        self.copies = [c for c in self.copies if c[1] != tier or c[0] > self.now or c[2] == durable]
        self.copies.append((durable_at, tier, self.work))

    def _fail(self) -> None:
        """Loses what is not durable and recovers, however often a further failure interrupts that."""
        assert self.gap is not None
        while True:
            self._count()
            self.now = self.fails_at
            self.fails_at = self.now + self.gap(self.random)
            self.failures += 1
            chance = self.random.random()
            kind = next(i for i, tier in enumerate(self.job.tiers) if chance < tier.survives)
            # A copy on its way dies with the process that sends it; what the failure destroyed cannot be read.
            self.copies = [copy for copy in self.copies if copy[0] <= self.now and copy[1] >= kind]
            load = self.job.tiers[kind].load_s
            phases = (
                ("downtime.detect", self.job.detect_s),
                ("downtime.restart", self.job.restart_s),
                ("downtime.reload", load),
            )
            if self._pass(phases):
                break
        self._fall_back(max((work for _, _, work in self.copies), default=0.0))

    def _pass(self, phases: tuple[tuple[str, float], ...]) -> bool:
        """Spends the phases in turn; False as soon as a failure ends them."""
        for path, seconds in phases:
            took = min(seconds, self.fails_at - self.now)
            self._spend(path, took)
            if took < seconds:
                return False
        return True

    def _fall_back(self, work: float) -> None:
        """Forgets the stretches after `work`: their time becomes rework. Copies lie at the ends of stretches."""
        while self.kept and self.kept[-1].at > work:
            self.kept.pop()
        self.work = work
