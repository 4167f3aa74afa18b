"""What follows a death: who takes part next, which host is blamed, what the ledger says, whether to go on at all."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headway.account.events import Incident
from headway.guard.deaths import OF_THE_MACHINE, Death, Judgement
from headway.guard.hosts import HostList
from headway.guard.ledger import Ledger
from headway.guard.report import Report
from headway.guard.signals import EXIT_PREEMPTED
from headway.guard.waiting import EXIT_USER

_BY_THE_USER = (EXIT_USER, EXIT_PREEMPTED, 128 + signal.SIGINT, 128 + signal.SIGTERM)
RESTART = "restarted from the newest verified checkpoint"


@dataclass
class Recovery:
    """The judge of one run's deaths.

    hosts: the list of places by which incidents are counted; one that it excludes takes no further part, as long as
    `min_ranks` ranks remain and `fits` allows their number.
    """

    ledger: Ledger
    min_ranks: int
    judgement: Judgement = field(default_factory=Judgement)
    hosts: HostList | None = None
    fits: Callable[[int], bool] = lambda ranks: True

    def enough(self, ranks: int) -> bool:
        """Whether `ranks` ranks can train."""
        return ranks >= self.min_ranks and self.fits(ranks)

    def excluded(self) -> set[str]:
        return self.hosts.excluded() if self.hosts is not None else set()

    def team(self, places: Sequence[str]) -> list[str] | None:
        """Of the places of all ranks those that take part: as many as fit; None when they are too few."""
        able = [place for place in places if place not in self.excluded()]
        count = next((size for size in range(len(able), 0, -1) if self.enough(size)), None)
        return able[:count] if count is not None else None

    def decide(self, death: Death, team: Sequence[str], furthest: int, link: str = "") -> tuple[Incident, str | None]:
        """Writes a death down. Returns the incident, and why the run must stop (None: start again).

        `team`: the place of every rank. `furthest`: the newest step that any rank had finished.
        """
        hopeless = self.judgement.hopeless(death, furthest)
        host = death.host or (team[death.rank] if death.rank is not None else None)
        out = self._blame(death, host, team)
        hopeless = None if out else hopeless  # without that host, it may well go on
        action = RESTART if hopeless is None else "stopped the run"
        if out is not None:
            action += f" without {out}"
        incident = self.ledger.record(
            death.fault,
            death.step,
            rank=death.rank,
            host=host,
            phase=death.phase,
            evidence=death.evidence,
            action=action,
            detect_s=death.detect_s,
            link=link,
        )
        return incident, hopeless

    def leave(self, final: Report, reports: Iterable[Report]) -> None:
        """Writes down why a run ends, where rank 0 was killed before it could say so: else the next start takes it for
        a death, and a mistake or a second Ctrl-C for a failure. `reports`: all machines' of this generation."""
        known = list(reports)
        if final.why and any(report.cut for report in known):
            meant = final.code in _BY_THE_USER
            action = f"left with exit code {final.code}: no failure" if meant else "stopped the run"
            self.ledger.record("stopped", max(one.furthest for one in known), evidence=final.why, action=action)

    def too_slow(self, host: str, evidence: str, team: Sequence[str]) -> bool:
        """Counts a slow rank against its host; True when that takes the host out: training can go on without it."""
        return self._count(host, evidence, team) is not None

    def _blame(self, death: Death, host: str | None, team: Sequence[str]) -> str | None:
        """Counts a fault of the machine against its host; the host, when that takes it out."""
        if host is None or death.fault not in OF_THE_MACHINE:
            return None
        return self._count(host, f"step {death.step}: {death.fault}: {death.evidence}", team)

    def _count(self, host: str, evidence: str, team: Sequence[str]) -> str | None:
        if self.hosts is None:
            return None
        left = sum(place != host for place in team)
        enough = any(self.enough(size) for size in range(1, left + 1))
        return host if self.hosts.blame(host, evidence, may_exclude=enough) else None
