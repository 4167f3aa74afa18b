"""What is looked at while a generation runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from headway.account.events import Incident
from headway.guard.beacon import Pulse, read_pulse
from headway.guard.generation import Place
from headway.guard.hang import Hang, HangJudge
from headway.guard.ledger import Ledger
from headway.guard.rank_lines import AllLines
from headway.guard.stacks import with_stack
from headway.guard.straggler import WAITED, Slow, StepJoin, StragglerWatch
from headway.guard.waiting import Rank, Watched

_LOOK_S = 1.0
SLOW = "slow rank"
BUSY = "machine busy"


class SlowRanks:
    """Finds stragglers in the ranks' own files and writes them down, an episode once; training goes on.

    too_slow: told of a place and what was found there; True where it must train no longer. evict: whether it said so.
    explain: adds to the evidence what is known of that rank's machine. apart: as of `AllLines`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        watch: StragglerWatch,
        ledger: Ledger,
        places: Sequence[str],
        too_slow: Callable[[str, str], bool] = lambda place, evidence: False,
        explain: Callable[[int, str], str] = lambda rank, evidence: evidence,
        apart: bool = False,
    ) -> None:
        self._lines = AllLines(files, apart)
        self._watch, self._ledger, self._places = watch, ledger, places
        self._too_slow, self._explain = too_slow, explain
        self.evict = False
        self._told: dict[tuple[str, int], tuple[Incident, int]] = {}
        self._join = StepJoin(len(files))
        self._next = 0.0

    def look(self) -> None:
        """About once a second; in between it does nothing."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        for rank, line in self._lines.new():
            for step, accounts in self._join.add(line.step, rank, {**line.account, WAITED: line.waited_ns}):
                self._judge(step, accounts)

    def rest(self) -> None:
        """Ends what reads at the moment."""
        self._lines.rest()

    def _judge(self, step: int, accounts: Mapping[int, Mapping[str, int]]) -> None:
        for slow in self._watch.observe(step, accounts):
            self._write(slow)

    def _write(self, slow: Slow) -> None:
        place, evidence = self._places[slow.rank], self._explain(slow.rank, slow.evidence())
        fault = BUSY if slow.busy else SLOW
        out = slow.counts and self._too_slow(place, f"step {slow.step}: {fault}: {evidence}")
        self.evict = self.evict or out
        action = f"saved, and went on without {place}" if out else "went on"
        known = self._told.get((fault, slow.rank))
        if slow.again and known is not None:
            incident, times = known
            since = f" (told first in step {incident.step}, now in step {slow.step}; {times + 1} times)"
            changed = self._ledger.amend(incident, evidence=evidence + since, action=action)
            self._told[fault, slow.rank] = changed, times + 1
            return
        incident = self._ledger.record(
            fault, slow.step, rank=slow.rank, host=place, phase=slow.phase, evidence=evidence, action=action
        )
        self._told[fault, slow.rank] = incident, 1


@dataclass(frozen=True)
class Lost:
    """What a death cost so far; the next generation's account begins where the dead one's ended."""

    incident: Incident
    told_ns: int
    detected_ns: int
    furthest: int
    step_ns: int
    place: str = ""
    local: int = 0

    @classmethod
    def of(cls, incident: Incident, detected: int, pulses: Mapping[int, Pulse], team: Sequence[str]) -> Lost:
        """`detected`: monotonic ns. `team`: the place of every rank."""
        zero, rank = pulses.get(0), incident.rank
        place = team[rank] if rank is not None and rank < len(team) else ""
        return cls(
            incident,
            zero.told_ns if zero is not None and zero.told_ns else detected,
            detected,
            max((pulse.step for pulse in pulses.values()), default=0),
            zero.median_ns() if zero is not None else 0,
            place,
            rank - team.index(place) if place and rank is not None else 0,
        )

    def rank_in(self, team: Sequence[str]) -> int | None:
        """The rank that runs now where the dead one ran; None where none does."""
        rank = team.index(self.place) + self.local if self.place in team else len(team)
        return rank if rank < len(team) and team[rank] == self.place else None

    def to_json(self) -> str:
        return lost_json(self.told_ns, self.detected_ns)


def lost_json(told_ns: int, detected_ns: int) -> str:
    """For the ranks' clock (`account.run_clock.LOST`)."""
    return json.dumps({"told_ns": told_ns, "detected_ns": detected_ns})


class Watch:
    """What is looked at while a generation runs: hangs, slow ranks, and what the last death has cost.

    team: the places of all ranks, on all machines together. said: what the machines say of their ranks now.
    """

    def __init__(
        self,
        team: Sequence[str],
        judge: HangJudge,
        ledger: Ledger,
        lost: Lost | None = None,
        slow: SlowRanks | None = None,
        said: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._team, self._judge, self._ledger, self._lost, self._slow = team, judge, ledger, lost, slow
        self._said = said

    def look(self, pulses: Mapping[int, Pulse], living: Set[int]) -> Hang | None:
        """The hang, None while everything moves, or some ranks are still starting, or leaving."""
        self.settle(pulses)
        self._ledger.flush()
        if self._slow is not None:
            self._slow.look()
        present = {rank: pulse for rank, pulse in pulses.items() if rank in living}
        return self._judge.judge(time.monotonic_ns(), present) if len(present) == len(self._team) else None

    @property
    def evict(self) -> bool:
        """A place was slow once too often: the ranks must save, and start again without it."""
        return self._slow is not None and self._slow.evict

    def rest(self) -> None:
        """The generation is over, and ranks are forked next: nothing may run beside it."""
        if self._slow is not None:
            self._slow.rest()

    def settle(self, pulses: Mapping[int, Pulse]) -> None:
        """Writes down what the death before this generation has cost, once that is known, and what its machine says
        only now: a card may tell what it has done after the rank has died of it."""
        zero = pulses.get(0)
        if self._lost is None or zero is None or not zero.first_ns:
            return
        lost, self._lost = self._lost, None
        steps = max(0, lost.furthest - zero.resumed_from)
        recover_s = (zero.first_ns - lost.detected_ns) / 1e9
        seconds = (zero.first_ns - lost.told_ns + steps * lost.step_ns) / 1e9
        rank, evidence = lost.rank_in(self._team), lost.incident.evidence
        told = self._said().get(rank) if rank is not None else None
        if told and told not in evidence:
            evidence = f"{evidence}; later {told}"
        self._ledger.amend(
            lost.incident, steps_lost=steps, seconds_lost=seconds, recover_s=recover_s, evidence=evidence
        )


def condemned(hang: Hang, alive: Sequence[Rank], folder: Path) -> Watched:
    """The living rank that hangs, with its stack."""
    process = next(rank for rank in alive if rank.rank == hang.rank)
    return Watched(hang.rank, with_stack(hang, folder, process))


def read_pulses(folder: Path, place: Place) -> dict[int, Pulse]:
    """What the beacons of this machine's ranks say."""
    found = {rank: read_pulse(folder, rank) for rank in range(place.first, place.first + place.here)}
    return {rank: pulse for rank, pulse in found.items() if pulse is not None}
