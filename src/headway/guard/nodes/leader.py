"""The leading agent's decisions: who trains, when a generation ends, what it died of. No clock, no socket, no process.

A machine that is cut off must not train on as if it were the run. So a new generation needs more than half of the
machines of the last one, or half of them with the leader that they had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headway.guard.beacon import Pulse
from headway.guard.deaths import ELSEWHERE, PARTITION, Death
from headway.guard.hang import Hang
from headway.guard.nodes.cause import of_a_lost_host, of_reports
from headway.guard.nodes.messages import Order, Seat, places
from headway.guard.nodes.roll import Heard, Roll
from headway.guard.report import Report
from headway.guard.signals import EXIT_PREEMPTED
from headway.guard.waiting import BAD_NEWS, CLEAN


@dataclass(frozen=True, slots=True)
class Limits:
    """How many machines take part. Seconds that the first start waits for more than the fewest, and that the run waits
    for those that are missing before it gives up."""

    fewest: int
    most: int
    wait_s: float = 30.0
    patience_s: float = 600.0
    steady_s: float = 3.0
    """How long a machine that came must have been there before a running generation is interrupted for it."""


class Court(Protocol):
    """What the leader asks of the rest of the supervisor."""

    def excluded(self) -> set[str]: ...

    def enough(self, ranks: int) -> bool: ...

    def begin(self, team: Sequence[str]) -> None:
        """A generation begins on these places."""

    def look(self, pulses: Mapping[int, Pulse], living: set[int]) -> Hang | None: ...

    def evict(self) -> bool:
        """A place that takes part must do so no longer."""

    def settle(self, pulses: Mapping[int, Pulse]) -> None:
        """Writes down what the last death has cost, where these pulses tell."""

    def decide(self, death: Death, link: str, detected_ns: int, pulses: Mapping[int, Pulse]) -> tuple[str | None, int]:
        """Writes a death down: why to stop (None: go on), and when (monotonic ns) the run's account ended."""

    def leave(self, final: Report, reports: Iterable[Report]) -> None:
        """Writes down why the run ends, where rank 0 could not."""


@dataclass
class Leader:
    """Steps through gather → run → end → gather … → over. `own`: the leading agent's number; `host`: its name."""

    limits: Limits
    court: Court
    own: int
    host: str
    roll: Roll
    order: Order = field(default_factory=Order)
    say: Callable[[str], None] = lambda text: None
    _last_came: float = 0.0
    _known: set[int] = field(default_factory=set)
    _lost: dict[int, float] = field(default_factory=dict)
    _lost_ns: tuple[int, int] | None = None
    _clock: float = 0.0
    _stopped_at: float = 0.0
    _gathers_since: float = 0.0
    _said: str = ""

    def tick(self, now: float) -> Order:
        """What all shall do now. `roll` has heard the newest statuses."""
        self._clock = now
        self.roll.sweep(now)
        here = self.roll.here()
        if here.keys() - self._known:
            self._known |= here.keys()
            self._last_came = now
        before = self.order
        step = {"gather": self._gather, "run": self._run, "end": self._end, "over": lambda *_: None}
        step[self.order.phase](now, here)
        changed = self._now(before, now)
        refused = {member: _double(self.roll.heard[member].status.host, of) for member, of in self._doubles(now)}
        self.order = _with(changed, beat=before.beat + 1, gone=tuple(self.roll.gone), refused=refused)
        return self.order

    def _doubles(self, now: float) -> Iterable[tuple[int, str]]:
        return ((member, of) for member, of in self.roll.doubles(now).items() if member != self.own)

    def _now(self, before: Order, now: float) -> Order:
        """The order with its ages brought up to date."""
        if self.order.phase != "run" or self._lost_ns is None:
            return self.order
        told, detected = self._lost_ns
        return _with(self.order, lost_ago_ns=(round(now * 1e9) - told, round(now * 1e9) - detected))

    # -- before a generation -----------------------------------------------------------------------------------------

    def stop(self, code: int) -> None:
        """Ends the run where nothing is running."""
        if self.order.phase in ("gather", "over"):
            self._over(code, "")

    def _gather(self, now: float, here: Mapping[int, Heard]) -> None:
        self._gathers_since = self._gathers_since or now
        if now - self._gathers_since > self.limits.patience_s:
            self._over(1, f"stopped: {self._said}, for {self.limits.patience_s:g} s; the newest checkpoint is kept")
            return None
        first = not self.order.team
        if not first and not self._quorum(here):
            return self._tell_once(f"waiting: not half of the {_machines(len(self.order.team))} are here")
        if not first and self.order.leader != self.host:
            return self._take_over(here)
        team = self.choose()
        if not team:
            return self._tell_once(f"waiting: {_machines(len(self.roll.by_host()))} here, {self.limits.fewest} needed")
        if first and len(team) < self.limits.most and now - self._last_came < self.limits.wait_s:
            return self._tell_once(f"waiting: {_machines(len(team))} here, for up to {self.limits.most}")
        self._start(team)
        return None

    def _start(self, team: Sequence[Heard]) -> None:
        seats: list[Seat] = []
        for heard in team:
            status = heard.status
            first = seats[-1].first + seats[-1].ranks if seats else 0
            seats.append(
                Seat(
                    member=status.member,
                    host=status.host,
                    ranks=status.ranks,
                    first=first,
                    address=status.address,
                    standby=status.standby,
                )
            )
        self._lost, self._gathers_since = {}, 0.0
        self.order = Order(
            beat=self.order.beat,
            phase="run",
            generation=self.order.generation + 1,
            leader=self.host,
            team=tuple(seats),
        )
        self.court.begin(places(self.order.team))
        self._tell_once(f"generation {self.order.generation} on {', '.join(seat.host for seat in seats)}")

    def _take_over(self, here: Mapping[int, Heard]) -> None:
        """The leader of the last generation is gone: its death is written down before another one begins."""
        self.court.begin(places(self.order.team))
        former, self._stopped_at = self.order.leader, self._clock
        self.order = _with(self.order, leader=self.host)
        furthest = max((h.status.report.furthest for h in here.values() if h.status.report is not None), default=0)
        evidence = f"the leading machine {former} was not heard of; {self.host} leads now"
        seen = any(heard.status.host == former for heard in here.values())
        fault = PARTITION if seen else ELSEWHERE
        death = Death(fault, None, furthest + 1, "", evidence, f"{former} lost", furthest > 0, 0, None, former)
        self._decide(death, "", 1, {})

    def _quorum(self, here: Mapping[int, Heard]) -> bool:
        hosts = {heard.status.host for heard in here.values()}
        last = {seat.host for seat in self.order.team}
        present = len(last & hosts)
        return 2 * present > len(last) or (2 * present == len(last) and self.order.leader == self.host)

    def choose(self) -> list[Heard]:
        """The machines that take part: those of the last generation first, the leader's before all; empty when they
        are too few."""
        excluded = self.court.excluded()
        former = [seat.member for seat in self.order.team]

        def order(heard: Heard) -> tuple[bool, int, int]:
            member = heard.status.member
            return member != self.own, former.index(member) if member in former else len(former), member

        able = sorted((heard for host, heard in self.roll.by_host().items() if host not in excluded), key=order)
        for size in range(min(self.limits.most, len(able)), self.limits.fewest - 1, -1):
            if self.court.enough(sum(heard.status.ranks for heard in able[:size])):
                return able[:size]
        return []

    # -- while it runs -----------------------------------------------------------------------------------------------

    def _run(self, now: float, here: Mapping[int, Heard]) -> None:
        reports = self._reports(here)
        self._note_lost(now, here)
        failed = next((one for one in reports.values() if one.code not in CLEAN), None)
        if self._lost:
            self._stop(f"{', '.join(self._host(member) for member in self._lost)} lost")
        elif failed is not None:
            self._stop(failed.death.evidence if failed.death is not None else "a rank failed")
        elif len(reports) == len(self.order.team):
            self.court.settle(self._pulses(here))  # all can be over before anybody looked
            self._finished(reports)
        elif not reports:
            self._look(now, here)

    def _look(self, now: float, here: Mapping[int, Heard]) -> None:
        pulses = self._pulses(here)
        hang = self.court.look(pulses, set(pulses))
        if hang is not None:
            self._stop(hang.evidence, hang)
        elif self.order.pause:
            return
        elif self.court.evict():
            self.say("a machine was slow again and again: the state is saved, and training goes on without it")
            self.order = _with(self.order, pause=True)
        elif self._may_grow(now, pulses):
            self.say("more machines have come: the state is saved, and training goes on with them")
            self.order = _with(self.order, pause=True)

    def _may_grow(self, now: float, pulses: Mapping[int, Pulse]) -> bool:
        if len(self.order.team) >= self.limits.most or now - self._last_came < self.limits.steady_s:
            return False
        ranks = sum(seat.ranks for seat in self.order.team)
        if len(pulses) < ranks or any(not pulse.steps for pulse in pulses.values()):
            return False  # a signal would kill what has not yet begun to train
        return sum(heard.status.ranks for heard in self.choose()) > ranks

    def _finished(self, reports: Mapping[int, Report]) -> None:
        code = max(report.code or 0 for report in reports.values())
        if code == EXIT_PREEMPTED and self.order.pause:
            self._lost_ns = None
            self.order = _with(self.order, phase="gather", pause=False)
        else:
            self._over(code, "")

    def _stop(self, why: str, condemned: Hang | None = None) -> None:
        self._stopped_at = self._clock
        self.order = _with(self.order, phase="end", why=why, condemned=condemned)

    # -- after it ----------------------------------------------------------------------------------------------------

    def _end(self, now: float, here: Mapping[int, Heard]) -> None:
        reports = self._reports(here)
        self._suspect(now, reports)
        self._note_lost(now, self.roll.here())
        if any(seat.member not in reports and seat.member not in self._lost for seat in self.order.team):
            return
        final = next((one for one in reports.values() if self._is_final(one)), None)
        if final is not None:  # a user's mistake, or killed by the user
            self.court.leave(final, reports.values())
            self._over(final.code or 1, "")
            return
        pulses = self._pulses(here)
        link = ""
        if self._lost:
            member, silent = next(iter(self._lost.items()))
            death = of_a_lost_host(next(seat for seat in self.order.team if seat.member == member), silent, pulses)
        else:
            death, link = of_reports(reports.values(), self.order.condemned)
        code = next((report.exit_code for report in reports.values() if report.death is death), 1)
        self._decide(death, link, code, pulses)

    def _is_final(self, report: Report) -> bool:
        """Not where it was our wish that the ranks leave, and they could not save: that is no reason to end the run."""
        unsaved = self.order.pause and report.code == BAD_NEWS and report.death is not None
        return report.code not in (None, *CLEAN) and not unsaved

    def _suspect(self, now: float, reports: Mapping[int, Report]) -> None:
        """Where ranks have failed, a machine need be silent for half as long to count as lost: their collectives failed
        because it went. The generation is over anyway; one that lives after all joins anew."""
        if not any(report.death is not None for report in reports.values()):
            return
        for seat in self.order.team:
            if seat.member not in reports and self.roll.silent_s(now, seat.member) > self.roll.lost_s / 2:
                self.roll.gone.add(seat.member)

    def _decide(self, death: Death, link: str, code: int, pulses: Mapping[int, Pulse]) -> None:
        stop, told_ns = self.court.decide(death, link, round(self._stopped_at * 1e9), pulses)
        self._lost_ns = (told_ns, round(self._stopped_at * 1e9))
        if stop is not None:
            self._over(code, f"stopped: {stop}; the newest checkpoint is kept")
        else:
            self.order = _with(self.order, phase="gather", condemned=None, why="", pause=False)

    def _over(self, code: int, why: str) -> None:
        self.order = _with(self.order, phase="over", code=code, why=why)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _reports(self, here: Mapping[int, Heard]) -> dict[int, Report]:
        found = {}
        for seat in self.order.team:
            heard = here.get(seat.member)
            report = heard.status.report if heard is not None else None
            if report is not None and report.generation == self.order.generation:
                found[seat.member] = report
        return found

    def _note_lost(self, now: float, here: Mapping[int, Heard]) -> None:
        for seat in self.order.team:
            if seat.member not in here and seat.member not in self._lost:
                self._lost[seat.member] = self.roll.silent_s(now, seat.member)

    def _pulses(self, here: Mapping[int, Heard]) -> dict[int, Pulse]:
        return {
            rank: pulse
            for seat in self.order.team
            if (heard := self.roll.heard.get(seat.member)) is not None
            for rank, pulse in heard.pulses().items()
            if heard.status.generation == self.order.generation
        }

    def vitals(self) -> dict[int, str]:
        """What the machines of this generation say of its ranks; a spare's numbers are of another one."""
        return {
            rank: text
            for seat in self.order.team
            if (heard := self.roll.heard.get(seat.member)) is not None
            and heard.status.generation == self.order.generation
            for rank, text in heard.status.vitals.items()
        }

    def _host(self, member: int) -> str:
        return next(seat.host for seat in self.order.team if seat.member == member)

    def _tell_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.say(text)


def _double(host: str, other: str) -> str:
    return (
        f"--node: an agent of this run ({other}) is called {host} already; give each of several agents on one machine "
        f"a name of its own: --node {host}-1, --node {host}-2"
    )


def _machines(count: int) -> str:
    return f"{count} machine{'s' * (count != 1)}"


def _with(order: Order, **changes: object) -> Order:
    return msgspec.structs.replace(order, **changes)
