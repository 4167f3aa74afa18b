"""What the supervisor looks at while a generation runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.account.events import Incident
from headway.guard.beacon import Pulse, read_pulse
from headway.guard.hang import HangJudge
from headway.guard.ledger import Ledger
from headway.guard.rank_lines import RankLines
from headway.guard.stacks import with_stack
from headway.guard.straggler import StepJoin, StragglerWatch
from headway.guard.waiting import Ended, Rank, Watched

_LOOK_S = 1.0


class SlowRanks:
    """Finds stragglers in the ranks' own files and writes them down; training goes on."""

    def __init__(self, files: Sequence[Path], watch: StragglerWatch, ledger: Ledger, places: Sequence[str]) -> None:
        self._lines = [RankLines(path) for path in files]
        self._watch, self._ledger, self._places = watch, ledger, places
        self._join = StepJoin(len(files))
        self._next = 0.0

    def look(self) -> None:
        """About once a second; in between it does nothing."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        for rank, lines in enumerate(self._lines):
            for line in lines.new():
                for step, accounts in self._join.add(line.step, rank, line.account):
                    self._judge(step, accounts)

    def _judge(self, step: int, accounts: Mapping[int, Mapping[str, int]]) -> None:
        for slow in self._watch.observe(step, accounts):
            self._ledger.record(
                "slow rank",
                step,
                rank=slow.rank,
                host=self._places[slow.rank],
                phase=slow.phase,
                evidence=slow.evidence(),
                action="went on",
            )


@dataclass(frozen=True)
class Lost:
    """What a death cost so far; the next generation's account begins where the dead one's ended."""

    incident: Incident
    told_ns: int
    detected_ns: int
    furthest: int
    step_ns: int

    @classmethod
    def of(cls, incident: Incident, ended: Ended, pulses: Mapping[int, Pulse]) -> Lost:
        detected = round(ended.detected * 1e9)
        zero = pulses.get(0)
        return cls(
            incident,
            zero.told_ns if zero is not None and zero.told_ns else detected,
            detected,
            max((pulse.step for pulse in pulses.values()), default=0),
            zero.median_ns() if zero is not None else 0,
        )

    def to_json(self) -> str:
        return json.dumps({"told_ns": self.told_ns, "detected_ns": self.detected_ns})


class Watch:
    """What the supervisor looks at while a generation runs: hangs, slow ranks, and what the last death has cost."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        judge: HangJudge,
        ledger: Ledger,
        lost: Lost | None,
        slow: SlowRanks | None = None,
    ) -> None:
        self._folder, self._ranks, self._judge, self._ledger, self._lost = folder, ranks, judge, ledger, lost
        self._slow = slow

    def pulses(self) -> dict[int, Pulse]:
        found = {rank: read_pulse(self._folder, rank) for rank in range(self._ranks)}
        return {rank: pulse for rank, pulse in found.items() if pulse is not None}

    def __call__(self, alive: Sequence[Rank]) -> Watched | None:
        pulses = self.pulses()
        self._settle(pulses)
        if self._slow is not None:
            self._slow.look()
        living = {rank.rank: pulses[rank.rank] for rank in alive if rank.rank in pulses}
        if len(living) < self._ranks:  # some are still starting, or leaving
            return None
        hang = self._judge.judge(time.monotonic_ns(), living)
        if hang is None:
            return None
        process = next(rank for rank in alive if rank.rank == hang.rank)
        return Watched(hang.rank, with_stack(hang, self._folder, process))

    def settle(self) -> None:
        """The generation has ended: write down what the death before it had cost, if that is known by now."""
        self._settle(self.pulses())

    def _settle(self, pulses: Mapping[int, Pulse]) -> None:
        zero = pulses.get(0)
        if self._lost is None or zero is None or not zero.first_ns:
            return
        lost, self._lost = self._lost, None
        steps = max(0, lost.furthest - zero.resumed_from)
        recover_s = (zero.first_ns - lost.detected_ns) / 1e9
        seconds = (zero.first_ns - lost.told_ns + steps * lost.step_ns) / 1e9
        self._ledger.amend(lost.incident, steps_lost=steps, seconds_lost=seconds, recover_s=recover_s)
