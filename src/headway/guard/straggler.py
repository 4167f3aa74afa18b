"""Which rank is slow, and in what? Decided on the part of a step that waits for nobody.

All ranks of a step end together, so the wall clock shows a straggler nowhere; its own work does. A rank is named when
its own work lies far enough above the others' over a window: in most of its steps, and by more than other ranks have
lain above the rest lately (they change places where the machine is noisy). What a rank lost because other processes
had its CPU is taken out first: a busy machine is said to be one, and no rank is blamed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 16
_DOUBT = 0.24
"""What a window may fall short of the wanted slowness, as a share of it: 16 steps tell 15 % from 11 % and no better,
and 15 % must be found. It shrinks as the root of the steps that are known."""
_SURE = 1.3
"""So much above the wanted slowness, one window is enough to blame a place; else it takes two."""
_PERSISTENT = 0.75
"""Of the window's steps, so many must be slow."""
_PERSISTENT_AT_FIRST = 0.9
"""The same before a third window tells of the noise."""
_SIGMAS = 4.5
"""Standard errors that the excess must measure."""
_HISTORY = 4
"""Windows from which the noise of single steps is read."""
_TRIMMED = 3
_ABOVE_NOISE = 1.8
_EPISODE = 10
"""Windows: a relapse within them belongs to the same episode."""
WAITED = "waited for a CPU"
"""In an account handed to the watch: ns in which the rank was ready and had no CPU, over the whole step."""
_COMPUTE = ("compute.forward", "compute.loss", "compute.recompute", "compute.optimizer")
_OWN = (*_COMPUTE, "data", "copy", "host", "checkpoint")
_WAITS_IN = {"compute.forward", "compute.recompute", "compute.optimizer"}
"""Under FSDP these hold the waiting for gathered weights and for the norm of all shards."""


Account = Mapping[str, int]
"""Nanoseconds by path of the step account."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A straggler. ratio: its own work over the other ranks'; phase: where most of the difference lies.

    busy: it waited for a CPU so long that it would not be one else. again: of an episode that was told before, with
    what is known by now. counts: so slow as was asked for, and not counted yet in this episode.
    """

    rank: int
    step: int
    phase: str
    ratio: float
    busy: bool = False
    again: bool = False
    counts: bool = False

    def evidence(self) -> str:
        slower = f"{self.ratio - 1:.0%} slower than the other ranks over {WINDOW} steps"
        if self.busy:
            return f"rank {self.rank} was {slower} while other processes had its CPU"
        return f"{slower}, mostly in {self.phase}"


@dataclass
class _Episode:
    """told_at: the step in which it was last told. over: it has recovered since. counted: against its place."""

    told_at: int
    over: bool = False
    counted: bool = False


@dataclass
class _Track:
    """The newest window of one rank: ratio of its work to the others', with and without its waits for a CPU."""

    raw: deque[float]
    net: deque[float]
    excess: deque[dict[str, float]]
    past: deque[float]
    """How far it lay above the others in the halves of windows before this step."""
    slow: _Episode | None = None
    busy: _Episode | None = None


@dataclass
class StragglerWatch:
    """Hears of each step of all ranks. `slow`: the slowness to find, e.g. 0.15; `sharded`: whether FSDP shards."""

    slow: float = 0.15
    sharded: bool = False
    window: int = WINDOW
    _tracks: dict[int, _Track] = field(default_factory=dict)
    _steps: int = 0

    def observe(self, step: int, accounts: Mapping[int, Account]) -> list[Slow]:
        """Takes the accounts (ns by path) of one step by rank; returns what is new about ranks that are slow."""
        if len(accounts) < 2:
            return []
        raw = {rank: self._own(account) for rank, account in accounts.items()}
        had = {rank: _share_with_cpu(account) for rank, account in accounts.items()}
        net = {rank: sum(parts.values()) * had[rank] for rank, parts in raw.items()}
        usual = {
            phase: medians_of_the_others({rank: parts.get(phase, 0) for rank, parts in raw.items()}) for phase in _OWN
        }
        bases = medians_of_the_others({rank: sum(parts.values()) for rank, parts in raw.items()})
        bases_net = medians_of_the_others(net)
        self._steps += 1
        for rank, mine in raw.items():
            base, base_net = bases[rank], bases_net[rank]
            if base <= 0 or base_net <= 0:
                continue
            track = self._tracks.setdefault(rank, self._new())
            half = self.window // 2
            if half and self._steps % half == 1 and len(track.net) >= half:
                track.past.append(statistics.median(list(track.net)[-half:]) - 1)
            track.raw.append(sum(mine.values()) / base)
            track.net.append(net[rank] / base_net)
            track.excess.append({phase: mine.get(phase, 0) - usual[phase][rank] for phase in _OWN})
        return [found for rank in accounts for found in self._judge(rank, step)]

    def _new(self) -> _Track:
        kept = self.window * _HISTORY
        return _Track(deque(maxlen=kept), deque(maxlen=kept), deque(maxlen=self.window), deque(maxlen=2 * _EPISODE))

    def _judge(self, rank: int, step: int) -> Iterator[Slow]:
        track = self._tracks.get(rank)
        if track is None or len(track.net) < self.window:
            return
        low = self.slow * (1 - _DOUBT) / 2
        net, raw = self._excess(track.net), self._excess(track.raw)
        track.slow, track.busy = _ended(track.slow, net < low), _ended(track.busy, raw < low)
        if max(net, raw) < low:
            return
        slow = self._stands_out(track.net) and net >= _ABOVE_NOISE * self._noise(rank, track, low)
        busy = not slow and self._stands_out(track.raw) and not self._stands_out(track.net)
        if slow:
            track.slow, again = self._told(track.slow, step)
            counts = not track.slow.counted and self._is_sure(track.net)
            track.slow.counted = track.slow.counted or counts
            if counts or again is not None:
                yield Slow(rank, step, self._phase(track), 1 + net, again=again is not False, counts=counts)
        if busy:
            track.busy, again = self._told(track.busy, step)
            if again is not None:
                yield Slow(rank, step, self._phase(track), 1 + raw, busy=True, again=again)

    def _excess(self, ratios: deque[float]) -> float:
        """How far the newest window lies above the others."""
        return _middle(list(ratios)[-self.window :]) - 1

    def _stands_out(self, ratios: deque[float]) -> bool:
        known, low = list(ratios), self.slow * (1 - _DOUBT) / 2
        if len(known) < 3 * self.window and not _persistent(known[-self.window :], low, _PERSISTENT_AT_FIRST):
            return False
        # In logarithms: a rank that is many times as slow has as many times the noise.
        error = _spread([math.log(max(ratio, 1e-9)) for ratio in known]) / math.sqrt(self.window)
        if self._excess(ratios) < 0 or math.log1p(self._excess(ratios)) < _SIGMAS * error:
            return False
        for windows in (1, 2, _HISTORY):  # as far back as it lasts: the longer, the sharper
            newest = known[-windows * self.window :]
            if len(newest) < windows * self.window or not _persistent(newest, low):
                return windows > 1
            if _middle(newest) - 1 < self.slow * (1 - _DOUBT / math.sqrt(windows)):
                return False
        return True

    def _is_sure(self, ratios: deque[float]) -> bool:
        two = list(ratios)[-2 * self.window :]
        known = len(two) == 2 * self.window and _persistent(two, self.slow / 2)
        return self._excess(ratios) >= _SURE * self.slow or (known and _middle(two) - 1 >= self.slow)

    def _noise(self, rank: int, track: _Track, low: float) -> float:
        """How far ranks that nobody calls slow have lain above the rest lately, while this one did not."""
        others = [one for other, one in self._tracks.items() if other != rank and (one.slow is None or one.slow.over)]
        return max(
            (theirs for one in others for theirs, mine in zip(one.past, track.past, strict=False) if mine < low),
            default=0.0,
        )

    def _told(self, episode: _Episode | None, step: int) -> tuple[_Episode, bool | None]:
        """The episode that this step belongs to; whether it is to be told again, None where it is to be passed over."""
        if episode is None or (episode.over and step - episode.told_at > _EPISODE * self.window):
            return _Episode(step), False
        if not episode.over:
            return episode, None
        episode.over, episode.told_at = False, step
        return episode, True

    def _phase(self, track: _Track) -> str:
        # It is named as soon as most of the window is slow: only the newer half tells of the phase.
        newer = list(track.excess)[self.window // 2 :]
        phases = {phase: statistics.median(one[phase] for one in newer) for phase in _OWN}
        return max(phases, key=lambda phase: phases[phase])

    def _own(self, account: Mapping[str, int]) -> dict[str, int]:
        paths = (path for path in _OWN if not (self.sharded and path in _WAITS_IN))
        return {path: _total(account, path) for path in paths}


def medians_of_the_others(values: Mapping[int, float]) -> dict[int, float]:
    """For each rank the median of all others' values (two or more ranks), from one sort: at thousands of ranks a sort
    for each would hold up the supervisor for seconds a step."""
    order = sorted(values, key=lambda rank: values[rank])
    known, left = [values[rank] for rank in order], len(order) - 1

    def at(index: int, without: int) -> float:
        return known[index + (index >= without)]

    return {rank: (at((left - 1) // 2, place) + at(left // 2, place)) / 2 for place, rank in enumerate(order)}


def _ended(episode: _Episode | None, recovered: bool) -> _Episode | None:
    if episode is not None and recovered:
        episode.over = True
    return episode


def _persistent(ratios: Sequence[float], low: float, share: float = _PERSISTENT) -> bool:
    return sum(ratio > 1 + low for ratio in ratios) >= share * len(ratios)


def _spread(ratios: Sequence[float]) -> float:
    """The standard deviation of single steps, by the median deviation: single slow steps do not count."""
    middle = statistics.median(ratios)
    return 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)


def _middle(ratios: Iterable[float]) -> float:
    """The mean without the outermost: nearly as sharp as a mean where noise is even, and blind to single slow steps."""
    known = sorted(ratios)
    return statistics.fmean(known[_TRIMMED:-_TRIMMED] if len(known) > 4 * _TRIMMED else known)


def _share_with_cpu(account: Mapping[str, int]) -> float:
    """Of the time in which a rank did not wait for others, the share in which it had a CPU if it wanted one."""
    busy = sum(ns for name, ns in account.items() if name not in ("host.sync", WAITED) and not name.startswith("comm"))
    return 1 - min(0.95, account.get(WAITED, 0) / busy) if busy > 0 else 1.0


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
