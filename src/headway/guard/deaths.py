"""What a generation died of, in words that group; and whether it is worth starting another one."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from headway.guard.beacon import OUTSIDE, Pulse
from headway.guard.hang import Hang
from headway.guard.launch import how_it_ended
from headway.guard.oom import OomCounter
from headway.guard.waiting import Ended

SAME_DEATHS = 2
STUCK = 3
HANG, KILLED, OOM_KILL, FAILED, ELSEWHERE = "hang", "rank killed", "killed for memory", "rank failed", "host lost"
MISMATCH, CORRUPTION, PARTITION = "collective mismatch", "silent corruption", "network partition"
OF_THE_MACHINE = (HANG, KILLED, OOM_KILL, ELSEWHERE, CORRUPTION)
"""Faults that are counted against the host; an exception or a wrong collective is the program's."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why a generation ended. step: the one in work; begun: whether the rank had begun to train at all.

    signature: equal for deaths that are alike; numbers and addresses, which differ each time, are left out. host: whose
    it was, where that is more than the place of `rank`.
    """

    fault: str
    rank: int | None
    step: int
    phase: str
    evidence: str
    signature: str
    begun: bool
    documents: int
    detect_s: float | None = None
    host: str | None = None


def examine(ended: Ended, pulses: Mapping[int, Pulse], oom: OomCounter) -> Death:
    """Names the death of a generation that did not end well."""
    assert ended.first is not None
    rank: int | None = ended.first.rank
    code = ended.first.code or 0
    pulse = pulses.get(ended.first.rank)
    step = (pulse.step if pulse else 0) + 1
    phase = pulse.phase if pulse else OUTSIDE
    begun = pulse is not None and pulse.begun
    documents = pulse.documents if pulse else 0
    why = ended.condemned.why if ended.condemned is not None else None
    if isinstance(why, Hang):
        place = f"hang in {why.phase}"
        fault = MISMATCH if why.mismatch else HANG
        return Death(fault, rank, why.step, why.phase, why.evidence, place, begun, documents, why.silent_s)
    if why is not None:
        return Death(ELSEWHERE, rank, step, phase, str(why), str(why), begun, documents)
    if code == -signal.SIGKILL and oom.new_kills():
        evidence = f"rank {rank}: exit 137 and an oom_kill event of the control group"
        return Death(OOM_KILL, rank, step, phase, evidence, "oom", begun, documents)
    told = ended.cause.message if ended.cause is not None else ""
    evidence = how_it_ended(ended)
    if code < 0 and not told:
        return Death(KILLED, rank, step, phase, evidence, f"signal {-code} of rank {rank}", begun, documents)
    fault = told.partition(":")[0] if told else FAILED
    if ended.cause is not None and ended.cause.collective:  # all ranks raise it: it says itself whose fault it is
        rank, evidence = ended.cause.rank, told
    signature = _shape(told) or f"exit {code}"
    return Death(_FAULTS.get(fault, FAILED), rank, step, phase, evidence, signature, begun, documents)


_FAULTS = {"CollectiveMismatch": MISMATCH, "ReplicasDiffer": CORRUPTION}
"""Exceptions that are faults of their own; any other is a rank that failed."""


def _shape(message: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", message)


@dataclass
class Judgement:
    """Remembers deaths and steps; says when another start would only burn time."""

    same_deaths: int = SAME_DEATHS
    stuck: int = STUCK
    _last: tuple[int, str] | None = None
    _same: int = 0
    _furthest: int = -1
    _without_progress: int = 0

    def hopeless(self, death: Death, furthest: int) -> str | None:
        """Why not to start again, None to do so. `furthest`: the newest step that any rank had finished."""
        progress = furthest > self._furthest
        self._furthest = max(furthest, self._furthest)
        self._without_progress = 0 if progress else self._without_progress + 1
        if death.begun:
            key = (death.step, death.signature)
            self._same = self._same + 1 if key == self._last else 1
            self._last = key
            if self._same >= self.same_deaths:
                whose = "the run" if death.rank is None else f"rank {death.rank}"
                return (
                    f"{whose} died the same way {self._same} times at step {death.step}, in the batch from "
                    f"document {death.documents} of its epoch on ({death.evidence})"
                )
        if self._without_progress >= self.stuck:
            return f"{self._without_progress + 1} starts without a new step ({death.evidence})"
        return None
