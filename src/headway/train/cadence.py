"""When the next save is due: a number of steps, or what the measured cost of saves and the failures advise."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from headway.account.errors import UserError
from headway.guard.control import Control
from headway.plan.save_interval import Advice, TierCost, advise
from headway.record.folder import RunFolder
from headway.record.sessions import History, Session, read_history

Every = int | Literal["auto"] | None

# The first save of `auto` comes early, because only a save tells what one costs.
FIRST_STEPS = 10
# A memory checkpoint takes its room with the first one; a run that is younger than this has little to lose.
YOUNG_S = 60.0
# Spikes that need an older state, a step: some 20 in the 255,000 of PaLM 540B (Chowdhery et al. 2022, section 5.1).
SPIKES_A_STEP = 20 / 255_000
_MOST_GROWTH = 4
_SURVIVES = 0.5
_SAMPLE = 64
TIERS = ("memory", "disk", "remote")  # nearest first


@dataclass(slots=True)
class CostMeter:
    """What saves take from training, seconds: standing still, and steps that are slower while one is under way."""

    idle: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLE))
    costs: dict[str, deque[float]] = field(default_factory=dict)
    lags: dict[str, deque[float]] = field(default_factory=dict)
    _blocked_s: float = 0.0
    _slower_s: float = 0.0

    @property
    def step_s(self) -> float | None:
        """Median of the steps that no save disturbed."""
        return statistics.median(self.idle) if self.idle else None

    def begun(self, blocked_s: float) -> None:
        self._blocked_s, self._slower_s = blocked_s, 0.0

    def step(self, wall_s: float, saving: bool) -> None:
        usual = self.step_s
        if not saving:
            self.idle.append(wall_s)
        elif usual is not None:
            self._slower_s += wall_s - usual

    def published(self, tier: str, lag_s: float) -> float:
        """Returns the cost of this save up to here, and keeps it."""
        cost = self._blocked_s + max(0.0, self._slower_s)
        self.costs.setdefault(tier, deque(maxlen=_SAMPLE)).append(cost)
        self.lags.setdefault(tier, deque(maxlen=_SAMPLE)).append(lag_s)
        return cost

    def of(self, tier: str) -> TierCost | None:
        """The medians of a tier, None before its first save."""
        if tier not in self.costs:
            return None
        return TierCost(tier, statistics.median(self.costs[tier]), statistics.median(self.lags[tier]))


def with_survival(costs: Sequence[TierCost]) -> list[TierCost]:
    """With the share of failures that each tier outlives: memory half (assumed: a process died, not its node), the
    disk half of the rest where there is a store behind it, the last one all."""
    found, survives = [], 0.0
    for cost in costs:
        survives = 1.0 if cost is costs[-1] else survives + (1 - survives) * _SURVIVES
        found.append(replace(cost, survives=survives))
    return found


def advise_run(folder: RunFolder) -> Advice:
    """The advice that a run's own lines give. Raises UserError for a run that has told of no save or no step."""
    history = read_history(folder)
    steps = [line for session in history.sessions for line in session.steps]
    told = {tier: [line for line in history.checkpoints if line.tier == tier and line.cost_s] for tier in TIERS}
    costs = [
        TierCost(tier, statistics.median(o.cost_s for o in lines), statistics.median(o.seconds for o in lines))
        for tier, lines in told.items()
        if lines
    ]
    if not costs or not steps:
        raise UserError(f"{folder.root}: it has not saved beside its training yet, so what a save costs is not known")
    failed, device_s = sessions_so_far(history)
    return advise(
        with_survival(costs),
        gpus=history.sessions[-1].start.world_size,
        step_s=statistics.median(line.wall_ns for line in steps) / 1e9,
        failures=failed,
        gpu_days=device_s / 86400,
        unit=unit_of(history.sessions[-1].start.device),
    )


def unit_of(device: str) -> str:
    """What fails there, in words: a run on a CPU has no GPU-days."""
    return "rank" if device.startswith("cpu") else "GPU"


def sessions_so_far(history: History) -> tuple[int, float]:
    """Sessions that failed or ended without a word, and the device-seconds of all."""
    sessions = history.sessions
    failed = sum(session.end is None or session.end.reason == "failed" for session in sessions)
    return failed, sum(_wall_s(session) * max(1, session.start.world_size) for session in sessions)


def _wall_s(session: Session) -> float:
    """A session's length in seconds; of one that was killed, up to the last step that it told of."""
    if session.end is not None:
        return session.end.wall_ns / 1e9
    return sum(session.steps[-1].run_ns.values()) / 1e9 if session.steps else 0.0


@dataclass
class Cadence:
    """Which tiers are due at a step. The same on every rank: `auto` is decided by rank 0 and told when a save begins.

    failures and device_s: of the run before this session; `device_s` grows with `spent_s` times `gpus`.
    """

    every: dict[str, Every]
    gpus: int
    failures: int
    device_s: float
    control: Control
    say: Callable[[str], None]
    meter: CostMeter = field(default_factory=CostMeter)
    advice: Advice | None = None
    spikes: float = 0.0
    """How often a step is a spike that goes back to a memory checkpoint; 0 where none does."""
    unit: str = "GPU"
    _next: dict[str, int] = field(default_factory=dict)
    _interval: dict[str, int] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)

    def due(self, step: int) -> set[str]:
        found = set()
        for tier, every in self.every.items():
            if every == "auto":
                if step >= self._next.setdefault(tier, step - 1 + FIRST_STEPS):
                    found.add(tier)
            elif every is not None and step % every == 0:
                found.add(tier)
        return found

    def too_early(self, step: int, tiers: set[str], session_s: Callable[[], float]) -> set[str]:
        """Of `tiers`, what `auto` puts off because the run is young. Collective where memory is `auto` and was not yet
        saved."""
        if self.every.get("memory") != "auto" or "memory" not in tiers or "memory" in self._interval:
            return set()
        left_s = self.control.broadcast(YOUNG_S - session_s())
        if left_s <= 0:
            return set()
        step_s = self.control.broadcast(self.meter.step_s) or left_s
        self._next["memory"] = step + max(1, math.ceil(left_s / step_s))
        return {"memory"}

    def decide(self, step: int, tiers: set[str], spent_s: float) -> None:
        """After a save of `tiers` has begun at `step`: when their next one is due. Collective where one is `auto`."""
        auto = {tier for tier, every in self.every.items() if every == "auto"}
        if not auto & tiers:
            return
        advised = self.control.broadcast(self._advise(auto, spent_s) if self.control.is_main else {})
        for tier in auto & tiers:
            before = self._interval.get(tier, FIRST_STEPS)
            self._interval[tier] = max(1, min(advised.get(tier, before), before * _MOST_GROWTH))
            self._next[tier] = step + self._interval[tier]

    def _advise(self, auto: set[str], spent_s: float) -> dict[str, int]:
        """Rank 0's advice in steps; empty until a save of the last tier has been measured."""
        step_s = self.meter.step_s
        costs = with_survival([cost for tier in TIERS if (cost := self.meter.of(tier)) and self.every.get(tier)])
        if not costs or not step_s:
            return {}
        days = (self.device_s + spent_s * self.gpus) / 86400
        self.advice = advise(
            costs, gpus=self.gpus, step_s=step_s, failures=self.failures, gpu_days=days, unit=self.unit
        )
        steps = {tier: count for tier, count in self.advice.steps.items() if count is not None}
        why = self._for_spikes(steps)
        told, self._told = self._told, steps
        if any(abs(count - told.get(tier, 0)) > 0.2 * count for tier, count in steps.items() if tier in auto):
            for line in [*self.advice.lines(), *why]:
                self.say(f"checkpoints: {line}")
        return steps

    def _for_spikes(self, steps: dict[str, int]) -> list[str]:
        """Shortens the memory's interval to what spikes ask for, where it is ours to choose; why, where it does."""
        cost, step_s = self.meter.of("memory"), self.meter.step_s
        if self.every.get("memory") != "auto" or not self.spikes or cost is None or not step_s:
            return []
        # Young's: a step is lost on average for every two between saves.
        best = math.sqrt(2 * cost.cost_s / step_s / self.spikes)
        wanted = max(1, round(best), math.ceil(cost.lag_s / step_s))
        if wanted >= steps.get("memory", wanted + 1):
            return []
        steps["memory"] = wanted
        share = cost.cost_s / (wanted * step_s + cost.cost_s)
        return [
            f"memory: every {wanted:,} steps for the sake of spikes: one in {1 / self.spikes:,.0f} steps goes back to "
            f"an older state (PaLM's rate); the saves take {share:.2%} of the time"
        ]
