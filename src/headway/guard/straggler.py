"""Which rank is slow, and in what? Decided on the part of a step that waits for nobody.

All ranks of a step end together, so the wall clock shows a straggler nowhere; its own work does. A rank is named when
the median of its own work over a window is far enough above the median of the others': one slow step is noise, a
window of them is not.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

WINDOW = 16
_SHARE = 0.6
"""Named at this share of the wanted slowness: the median of a window after its onset passes it within 20 steps."""
_COMPUTE = ("compute.forward", "compute.loss", "compute.recompute", "compute.optimizer")
_OWN = (*_COMPUTE, "data", "copy", "host", "checkpoint")
_WAITS_IN = {"compute.forward", "compute.recompute", "compute.optimizer"}
"""Under FSDP these hold the waiting for gathered weights and for the norm of all shards."""


Account = Mapping[str, int]
"""Nanoseconds by path of the step account."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A straggler. ratio: its own work over the other ranks'; phase: where most of the difference lies."""

    rank: int
    step: int
    phase: str
    ratio: float

    def evidence(self) -> str:
        return f"{self.ratio - 1:.0%} slower than the other ranks over {WINDOW} steps, mostly in {self.phase}"


@dataclass
class StragglerWatch:
    """Hears of each step of all ranks. `slow`: the slowness to find, e.g. 0.15; `sharded`: whether FSDP shards."""

    slow: float = 0.15
    sharded: bool = False
    window: int = WINDOW
    _ratios: dict[int, deque[float]] = field(default_factory=dict)
    _excess: dict[int, deque[dict[str, float]]] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def observe(self, step: int, accounts: Mapping[int, Account]) -> list[Slow]:
        """Takes the accounts (ns by path) of one step by rank; returns ranks that are newly found to be slow."""
        own = {rank: self._own(account) for rank, account in accounts.items()}
        found = []
        for rank, mine in own.items():
            others = [parts for other, parts in own.items() if other != rank]
            if not others:
                return []
            usual = {phase: statistics.median(parts.get(phase, 0) for parts in others) for phase in _OWN}
            base = statistics.median(sum(parts.values()) for parts in others)
            if base <= 0:
                continue
            ratios = self._ratios.setdefault(rank, deque(maxlen=self.window))
            excess = self._excess.setdefault(rank, deque(maxlen=self.window))
            ratios.append(sum(mine.values()) / base)
            excess.append({phase: mine.get(phase, 0) - usual[phase] for phase in _OWN})
            verdict = self._judge(rank, step)
            if verdict is not None:
                found.append(verdict)
        return found

    def _judge(self, rank: int, step: int) -> Slow | None:
        ratios = self._ratios[rank]
        if len(ratios) < self.window:
            return None
        middle = statistics.median(ratios)
        if middle < 1 + self.slow * _SHARE / 2:
            self._named.discard(rank)  # it has recovered: a relapse is told again
        if middle < 1 + self.slow * _SHARE or rank in self._named:
            return None
        self._named.add(rank)
        # It is named as soon as a little more than half of the window is slow: only the newer half tells of the phase.
        newer = list(self._excess[rank])[self.window // 2 :]
        phases = {phase: statistics.median(one[phase] for one in newer) for phase in _OWN}
        return Slow(rank, step, max(phases, key=lambda phase: phases[phase]), middle)

    def _own(self, account: Mapping[str, int]) -> dict[str, int]:
        paths = (path for path in _OWN if not (self.sharded and path in _WAITS_IN))
        return {path: _total(account, path) for path in paths}


def _total(account: Mapping[str, int], path: str) -> int:
    # host.sync is where a rank waits for the others.
    return sum(
        ns for name, ns in account.items() if name != "host.sync" and (name == path or name.startswith(path + "."))
    )


class StepJoin:
    """Joins the ranks' lines of one step, whichever comes first; old steps that never come together are forgotten."""

    def __init__(self, ranks: int, keep: int = 64) -> None:
        self._ranks, self._keep = ranks, keep
        self._open: dict[int, dict[int, Account]] = {}

    def add(self, step: int, rank: int, account: Account) -> Iterable[tuple[int, Mapping[int, Account]]]:
        """Yields the step with all its accounts once every rank has told it."""
        waiting = self._open.setdefault(step, {})
        waiting[rank] = account
        if len(waiting) == self._ranks:
            yield step, self._open.pop(step)
        for old in sorted(self._open)[: -self._keep]:
            del self._open[old]
