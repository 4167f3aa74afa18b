"""Keeps a run alive: starts its ranks, watches their beacons, and starts them anew where the newest checkpoint ends.

A restart costs nothing from any budget as long as the run gets further. It stops where it cannot: a user's mistake, the
same death twice at one step, several starts without a new step. SIGTERM is not a failure: the ranks save and leave
with 75, and so does the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from headway.guard import launch
from headway.guard.alone import Alone
from headway.guard.beacon import Pulse, stack_path
from headway.guard.deaths import FAILED, HANG, Death, Judgement, examine
from headway.guard.explain import Explainer
from headway.guard.generation import run_generation
from headway.guard.group import Elsewhere, Group
from headway.guard.hang import HangJudge
from headway.guard.hosts import HostList
from headway.guard.ledger import Ledger
from headway.guard.nodes.agent import Agents
from headway.guard.nodes.meeting import Meeting, agentless
from headway.guard.oom import OomCounter
from headway.guard.processes import Start
from headway.guard.recovery import Recovery
from headway.guard.report import Report
from headway.guard.straggler import StragglerWatch
from headway.guard.vitals_main import Reader
from headway.guard.waiting import BAD_NEWS, CLEAN, EXIT_USER, Ended, Signals
from headway.guard.watching import Lost, SlowRanks, Watch, read_pulses


@dataclass
class Supervisor:
    """Runs `ranks` ranks of `start` until they are done. `ledger`: where deaths are written down.

    places: the host (or device) of every rank, by which incidents are counted; default this host for all. hosts: the
    list of those; one that it excludes takes no further part, as long as `min_ranks` ranks remain and `fits` allows
    their number. rank_files: where the ranks write their steps, to find slow ones (`slow`: how slow, as a share;
    `sharded`: under FSDP). meeting: where the supervisors of several machines meet (`ranks` of each may differ);
    incidents are then counted by machine. grace_s: how long rank 0 has to say what a user did wrong.
    """

    start: Start
    ranks: int
    ledger: Ledger
    logs: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    hang_least_s: float = 5.0
    judgement: Judgement = field(default_factory=Judgement)
    places: Sequence[str] = ()
    hosts: HostList | None = None
    min_ranks: int | None = None
    fits: Callable[[int], bool] = lambda ranks: True
    rank_files: Callable[[int], Path] | None = None
    slow: float | None = None
    sharded: bool = False
    meeting: Meeting | None = None
    grace_s: float = 5.0
    _judge: HangJudge = field(init=False)
    _recovery: Recovery = field(init=False)
    _explainer: Explainer = field(init=False)

    def __post_init__(self) -> None:
        self._judge = HangJudge(least_s=self.hang_least_s)

    def run(self) -> int:
        """The exit code: 0, 75 when preempted with the state saved, 2 for a user's mistake, else of what failed."""
        base = launch.rankless(self.ranks, self.env if self.meeting is None else agentless(self.env))
        self.logs.mkdir(parents=True, exist_ok=True)
        with (
            launch.work_folder() as work,
            launch.received() as signals,
            Reader(work, self.logs),
            contextlib.closing(self.ledger),
            self._group(signals, Explainer(work, base)) as group,
        ):
            while True:
                turn = group.next()
                if isinstance(turn, int):
                    return turn
                folder = work / f"g{turn.generation:04d}"
                folder.mkdir()
                oom = OomCounter()
                ended = run_generation(
                    self.start, turn.place, {**base, **turn.settings}, self.logs, folder, signals,
                    generation=turn.generation, grace_s=self.grace_s, watch=group.watch(turn, folder),
                )  # fmt: skip
                pulses = read_pulses(folder, turn.place)
                self._explainer.look(turn.place, turn.settings)
                group.ended(self._report(turn.generation, ended, pulses, oom, folder, signals), pulses)

    def _group(self, signals: Signals, explainer: Explainer) -> AbstractContextManager[Group]:
        least = self.min_ranks or (self.ranks if self.meeting is None else 1)
        self._recovery = Recovery(self.ledger, least, self.judgement, self.hosts, self.fits)
        self._explainer = explainer
        if self.meeting is not None:
            return Agents(self.meeting, self.ranks, self._recovery, self._watch, signals, explainer)
        places = list(self.places) or [socket.gethostname()] * self.ranks
        return Alone(places, self._recovery, self._watch, signals, explainer)

    def _watch(self, team: Sequence[str], lost: Lost | None) -> Watch:
        slow = None
        if self.slow is not None and self.rank_files is not None and len(team) > 1:
            files = [self.rank_files(rank) for rank in range(len(team))]
            slow = SlowRanks(
                files, StragglerWatch(self.slow, self.sharded), self.ledger, team,
                lambda place, evidence: self._recovery.too_slow(place, evidence, team), self._explainer.add,
                apart=self.meeting is not None,
            )  # fmt: skip
        return Watch(team, self._judge, self.ledger, lost, slow, lambda: self._explainer.said)

    def _report(
        self,
        generation: int,
        ended: Ended,
        pulses: Mapping[int, Pulse],
        oom: OomCounter,
        folder: Path,
        signals: Signals,
    ) -> Report:
        code = self._final(ended, signals, pulses)
        elsewhere = ended.condemned is not None and isinstance(ended.condemned.why, Elsewhere)
        on_purpose = code in (BAD_NEWS, EXIT_USER) and _on_purpose(ended) and not signals.received
        death = examine(ended, pulses, oom) if (code is None or on_purpose) and not elsewhere else None
        if death is not None:
            death = replace(death, evidence=self._explainer.add(death.rank, death.evidence))
        if death is not None and death.fault == FAILED and ended.first is not None and not on_purpose:
            launch.show_log(ended.first)
        return Report(
            generation=generation,
            code=code,
            death=death,
            failed_at=ended.cause.at if ended.cause is not None else 0.0,
            furthest=max((pulse.step for pulse in pulses.values()), default=0),
            exit_code=_exit_code(ended),
            detected_ns=round(ended.detected * 1e9),
            link=self._keep_stack(death, folder) if death is not None else "",
            why=_why(ended, signals) if code is not None else "",
            cut=_is_cut(ended, pulses, signals),
        )

    def _final(self, ended: Ended, signals: Signals, pulses: Mapping[int, Pulse]) -> int | None:
        """The code of a generation after which none follows; None to judge its death."""
        if ended.first is None or _on_purpose(ended) or signals.received:
            return launch.verdict(ended, signals, {rank for rank, pulse in pulses.items() if pulse.begun})
        return None

    def _keep_stack(self, death: Death, folder: Path) -> str:
        """Keeps what a hung rank wrote of its threads; returns where, empty when it wrote nothing."""
        stack = stack_path(folder, death.rank or 0)
        if death.fault != HANG or not stack.is_file() or not stack.stat().st_size:
            return ""
        kept = self.logs / f"hang-{death.step:08d}-rank-{death.rank or 0:05d}.stack"
        try:
            kept.write_bytes(stack.read_bytes())
        except OSError:  # a full disk: the death itself is in the ledger
            return ""
        return f"{self.logs.name}/{kept.name}"


def _on_purpose(ended: Ended) -> bool:
    """Whether a rank left by itself, with a line for the user."""
    return ended.code == EXIT_USER or (ended.cause is not None and ended.cause.user)


def _why(ended: Ended, signals: Signals) -> str:
    if ended.first is None:
        return ""
    return "the ranks were killed on the second Ctrl-C" if signals.insists else launch.how_it_ended(ended)


def _is_cut(ended: Ended, pulses: Mapping[int, Pulse], signals: Signals) -> bool:
    """Whether rank 0 was here, had begun to train, and was killed by us."""
    zero = next((one for one in ended.ranks if one.rank == 0), None)
    killed = zero is not None and zero.code == -signal.SIGKILL and (zero.stopped_by_us or signals.insists)
    return killed and 0 in pulses and pulses[0].begun


def _exit_code(ended: Ended) -> int:
    code = launch.own_code(ended)
    if code in CLEAN or (ended.condemned is not None):
        return 1
    return 128 - code if code < 0 else code
