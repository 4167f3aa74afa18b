"""Is a rank hung, and which one? Decided from beacons, on the monotonic clock: a jump of the wall clock is nothing.

All ranks of a hung run stand still, most of them waiting in a collective for the one that is behind: the one with the
fewest steps, then the fewest collectives. How long it may be silent depends on where *it* is: in a step, three times
the 99th percentile of the steps; in what takes long by nature (start, compilation, evaluation, saving), far more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.guard.beacon import AGREEING, LISTEN_S, OUTSIDE, Pulse

LEAST_S = 5.0
FACTOR = 3.0
MISMATCH_S = 2.0
"""For ranks whose collectives do not match: only long enough that all have said where they are."""
WARM_STEPS = 3
"""Steps of a process before its step times mean anything: the first ones compile and allocate."""
LONG_S = 1800.0
"""For the start and the first of everything that takes long: as long as the process group itself would wait."""
_LONG_LEAST_S, _LONG_FACTOR = 60.0, 5.0
UNHEARD_S = 6 * LISTEN_S
_IN_STEP = ("compute", "comm", "bubble", "straggler", "copy", "data", "host", "step")


@dataclass(frozen=True, slots=True)
class Hang:
    """The rank that holds up the others, where, and for how long nothing has moved (seconds)."""

    rank: int
    step: int
    phase: str
    silent_s: float
    limit_s: float
    evidence: str
    mismatch: bool = False


@dataclass
class HangJudge:
    """Looks at all ranks' beacons now and then. Remembers how long the long phases took, over all generations."""

    least_s: float = LEAST_S
    factor: float = FACTOR
    long_s: float = LONG_S
    _seen: dict[int, Pulse] = field(default_factory=dict)
    _longest: dict[str, float] = field(default_factory=dict)

    def judge(self, now_ns: int, pulses: Mapping[int, Pulse]) -> Hang | None:
        """The hang, None while everything moves. `pulses`: of all living ranks, by rank."""
        for rank, pulse in pulses.items():
            self._learn(rank, pulse)
        if not pulses:
            return None
        newest = max(pulse.beat_ns for pulse in pulses.values())
        silent = (now_ns - newest) / 1e9
        odd = left_one_out(pulses)
        rank = behind(pulses, now_ns) if odd is None else odd
        limit = self.limit_s(pulses[rank]) if odd is None else MISMATCH_S
        if silent <= limit:
            return None
        pulse = pulses[rank]
        if odd is not None:
            most = max(pulse.sequence for pulse in pulses.values())
            text = f"collective {pulse.sequence} was the last of step {pulse.step} here, another rank waits in {most}"
            return Hang(rank, pulse.step, pulse.phase, silent, limit, text, mismatch=True)
        return Hang(rank, pulse.step + 1, pulse.phase, silent, limit, describe(pulses, rank, silent))

    def limit_s(self, pulse: Pulse) -> float:
        """How long a rank may show no progress where it is, in seconds."""
        if is_in_step(pulse.phase):
            if pulse.steps < WARM_STEPS:
                return self.long_s
            return max(self.least_s, self.factor * pulse.p99_ns() / 1e9)
        known = self._longest.get(_kind(pulse.phase))
        return self.long_s if known is None else max(_LONG_LEAST_S, self.least_s, _LONG_FACTOR * known)

    def _learn(self, rank: int, pulse: Pulse) -> None:
        before = self._seen.get(rank)
        self._seen[rank] = pulse
        if before is None or before.pid != pulse.pid or is_in_step(before.phase) or before.beat_ns == pulse.beat_ns:
            return
        kind = _kind(before.phase)
        self._longest[kind] = max((pulse.beat_ns - before.beat_ns) / 1e9, self._longest.get(kind, 0.0))


def _kind(phase: str) -> str:
    """Starting is one thing, whether for the first time or after a death: a restart that takes far longer hangs."""
    return "start" if phase == OUTSIDE or phase.partition(".")[0] in ("startup", "downtime") else phase


def left_one_out(pulses: Mapping[int, Pulse]) -> int | None:
    """A rank that is through with a step after fewer collectives than another has entered in it: it left one out,
    however long the other has waited."""
    for rank, pulse in pulses.items():
        others = [other for other in pulses.values() if other.sequence > pulse.sequence]
        if pulse.phase == AGREEING and any(other.step < pulse.step for other in others):
            return rank
    return None


def is_in_step(phase: str) -> bool:
    return phase.partition(".")[0] in _IN_STEP


def behind(pulses: Mapping[int, Pulse], now_ns: int) -> int:
    """The rank that the others wait for: not even heard of (stopped), else fewest steps, then fewest collectives."""

    def order(rank: int) -> tuple[bool, int, int, int]:
        pulse = pulses[rank]
        return now_ns - pulse.heard_ns < UNHEARD_S * 1e9, pulse.step, pulse.sequence, pulse.beat_ns

    return min(pulses, key=order)


def describe(pulses: Mapping[int, Pulse], rank: int, silent_s: float) -> str:
    """One line: where the rank is, and that the others wait; or that the collectives do not match."""
    mine = pulses[rank]
    others = [pulse for other, pulse in pulses.items() if other != rank]
    text = f"no progress for {silent_s:.1f} s in {mine.phase} of step {mine.step + 1}, collective {mine.sequence}"
    ahead = [pulse.sequence for pulse in others if pulse.step == mine.step and pulse.sequence > mine.sequence]
    if ahead and not mine.phase.startswith(("compute.backward", "comm")) and any(
        pulse.phase.startswith(("compute.backward", "comm")) for pulse in others
    ):  # fmt: skip
        text += f"; the others wait in collective {max(ahead)}, which it has not entered"
    return text
