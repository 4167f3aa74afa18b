"""Keeps a run alive: starts its ranks, watches their beacons, and starts them anew where the newest checkpoint ends.

A restart costs nothing from any budget as long as the run gets further. It stops where it cannot: a user's mistake, the
same death twice at one step, several starts without a new step. SIGTERM is not a failure: the ranks save and leave
with 75, and so does the supervisor.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.account.events import Incident
from headway.account.run_clock import LOST
from headway.guard import launch
from headway.guard.beacon import stack_path
from headway.guard.deaths import HANG, OF_THE_MACHINE, Death, Judgement, examine
from headway.guard.generation import Place, run_generation
from headway.guard.hang import HangJudge
from headway.guard.hosts import HostList
from headway.guard.ledger import Ledger
from headway.guard.oom import OomCounter
from headway.guard.processes import Start
from headway.guard.rendezvous import store
from headway.guard.signals import EXIT_PREEMPTED
from headway.guard.straggler import StragglerWatch
from headway.guard.waiting import CLEAN, EXIT_USER, Ended, Signals
from headway.guard.watching import Lost, SlowRanks, Watch

RESTART = "restarted from the newest verified checkpoint"


@dataclass
class Supervisor:
    """Runs `ranks` ranks of `start` until they are done. `ledger`: where deaths are written down.

    places: the host (or device) of every rank, by which incidents are counted; default this host for all. hosts: the
    list of those; one that it excludes takes no further part, as long as `min_ranks` ranks remain and `fits` allows
    their number. rank_files: where the ranks write their steps, to find slow ones (`slow`: how slow, as a share;
    `sharded`: under FSDP).
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
    _judge: HangJudge = field(init=False)

    def __post_init__(self) -> None:
        self._judge = HangJudge(least_s=self.hang_least_s)

    def run(self) -> int:
        """The exit code: 0, 75 when preempted with the state saved, 2 for a user's mistake, else of what failed."""
        base = launch.rankless(self.ranks, self.env)
        with launch.work_folder() as work, launch.received() as signals:
            generation = 0
            lost: Lost | None = None
            while True:
                team = self._team()
                if team is None:
                    launch.say(f"stopped: fewer than {self.min_ranks or self.ranks} ranks remain (hosts.json)")
                    return 1
                folder = work.path / f"g{generation:04d}"
                folder.mkdir()
                oom = OomCounter()
                watch = self._watch(folder, team, lost)
                settings = {**base, **devices_of(team), **({LOST: lost.to_json()} if lost is not None else {})}
                with store() as port:
                    ended = run_generation(
                        self.start, Place(len(team), len(team), port=port), settings, self.logs, folder, signals,
                        generation=generation, at_once=True, watch=watch,
                    )  # fmt: skip
                pulses = watch.pulses()
                watch.settle()
                code = self._final(ended, signals)
                if code is not None:
                    return code
                death = examine(ended, pulses, oom)
                hopeless = self.judgement.hopeless(death, max((pulse.step for pulse in pulses.values()), default=0))
                out = self._blame(death, team)
                hopeless = None if out else hopeless  # without that host, it may well go on
                incident = self._write_down(death, folder, hopeless, team, out)
                if hopeless is not None:
                    launch.say(f"stopped: {hopeless}; the newest checkpoint is kept")
                    return _exit_code(ended)
                lost = Lost.of(incident, ended, pulses)
                generation += 1
                if signals.received:  # it came while nothing ran: all there is to save is saved
                    return EXIT_PREEMPTED

    def _team(self) -> list[str] | None:
        """The places that take part: without the excluded ones, as many as fit; None when they are too few."""
        places = list(self.places) or [socket.gethostname()] * self.ranks
        excluded = self.hosts.excluded() if self.hosts is not None else set()
        able = [place for place in places if place not in excluded]
        least = self.min_ranks or self.ranks
        count = next((size for size in range(len(able), 0, -1) if size >= least and self.fits(size)), None)
        return able[:count] if count is not None else None

    def _watch(self, folder: Path, team: Sequence[str], lost: Lost | None) -> Watch:
        slow = None
        if self.slow is not None and self.rank_files is not None and len(team) > 1:
            files = [self.rank_files(rank) for rank in range(len(team))]
            slow = SlowRanks(files, StragglerWatch(self.slow, self.sharded), self.ledger, team)
        return Watch(folder, len(team), self._judge, self.ledger, lost, slow)

    def _final(self, ended: Ended, signals: Signals) -> int | None:
        """The code of a generation after which none follows; None to judge its death."""
        mistake = ended.code == EXIT_USER or (ended.cause is not None and ended.cause.user)
        if ended.first is None or mistake or signals.received:
            return launch.verdict(ended, signals)
        return None

    def _write_down(
        self, death: Death, folder: Path, hopeless: str | None, team: Sequence[str], out: str | None
    ) -> Incident:
        host = team[death.rank] if death.rank is not None else None
        action = RESTART if hopeless is None else "stopped the run"
        if out is not None:
            action += f" without {out}"
        return self.ledger.record(
            death.fault,
            death.step,
            rank=death.rank,
            host=host,
            phase=death.phase,
            evidence=death.evidence,
            action=action,
            detect_s=death.detect_s,
            link=self._keep_stack(death, folder),
        )

    def _blame(self, death: Death, team: Sequence[str]) -> str | None:
        """Counts a fault of the machine against the host of its rank; the host, when that takes it out."""
        if self.hosts is None or death.rank is None or death.fault not in OF_THE_MACHINE:
            return None
        host = team[death.rank]
        left = [place for place in team if place != host]
        enough = any(size >= (self.min_ranks or self.ranks) and self.fits(size) for size in range(1, len(left) + 1))
        evidence = f"step {death.step}: {death.fault}: {death.evidence}"
        return host if self.hosts.blame(host, evidence, may_exclude=enough) else None

    def _keep_stack(self, death: Death, folder: Path) -> str:
        """Keeps what a hung rank wrote of its threads; returns where, empty when it wrote nothing."""
        stack = stack_path(folder, death.rank or 0)
        if death.fault != HANG or not stack.is_file() or not stack.stat().st_size:
            return ""
        kept = self.logs / f"hang-{death.step:08d}-rank-{death.rank or 0:05d}.stack"
        kept.write_bytes(stack.read_bytes())
        return f"{self.logs.name}/{kept.name}"


def devices_of(team: Sequence[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for places that name a device ("host/cuda:3"); nothing for others."""
    devices = [place.rpartition("/cuda:")[2] for place in team if "/cuda:" in place]
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}


def _exit_code(ended: Ended) -> int:
    code = ended.code
    if code in CLEAN or (ended.condemned is not None):
        return 1
    return 128 - code if code < 0 else code
