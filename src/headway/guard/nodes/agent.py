"""The supervisor of one of several machines: follows the leading agent's orders, or leads.

Every agent hears the leader through the store at least four times a second. One that hears nothing for `lost_s`
seconds stops its ranks: on the other side of the cut the run goes on without them.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from headway.account.errors import UserError
from headway.account.run_clock import LOST
from headway.guard import launch
from headway.guard.alone import MakeWatch
from headway.guard.beacon import Pulse
from headway.guard.deaths import Death
from headway.guard.explain import Explainer
from headway.guard.generation import Place
from headway.guard.group import Elsewhere, Turn
from headway.guard.hang import Hang
from headway.guard.nodes.leader import Leader
from headway.guard.nodes.meeting import Door, Joined, Meeting, interface_of
from headway.guard.nodes.messages import Order, Seat, Status
from headway.guard.nodes.roll import Roll, compact
from headway.guard.recovery import Recovery
from headway.guard.report import Report
from headway.guard.signals import EXIT_PREEMPTED
from headway.guard.waiting import Rank, Signals, Watched, Watcher
from headway.guard.watching import Lost, Watch, condemned, lost_json, read_pulses

_TICK_S = 0.1
_WAIT_S = 0.05
_TRIAL = 3.0
_FAREWELL_S = 6.0
"""After a signal: how long an agent waits until all have heard that the run is over; it is to be gone within ten."""
_CUT_OFF = "cut off from the other machines"
_MEMBER = "member/"


class Agents:
    """This machine's part of the meeting. `ranks`: how many it can start."""

    def __init__(
        self,
        meeting: Meeting,
        ranks: int,
        recovery: Recovery,
        make_watch: MakeWatch,
        signals: Signals,
        explainer: Explainer,
    ) -> None:
        self._meeting, self._ranks, self._signals, self._explainer = meeting, ranks, signals, explainer
        self._court = _Court(recovery, make_watch)
        self._order = Order()
        self._agent = f"pid {os.getpid()}, {secrets.token_hex(4)}"
        self._beat = self._done = -1
        self._report: Report | None = None
        self._since = time.monotonic()

    def __enter__(self) -> Agents:
        self._door = Door(self._meeting)
        self._entered = False
        try:
            joined = self._door.first(lambda: bool(self._signals.received))
            if joined is not None:
                self._enter(joined)
        except BaseException:
            self._door.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._entered:
            self._status.leaving = True
            self._tick()
            self._joined.link.close()
        self._door.close()

    def next(self) -> Turn | int:
        cut_off_at: float | None = None
        round_ = 0
        while True:
            if self._signals.received:
                if not self._entered or self._seat() is None or self._signals.since_s > _FAREWELL_S:
                    return EXIT_PREEMPTED
                if self._leader is not None and self._order.phase == "gather":
                    self._leader.stop(EXIT_PREEMPTED)
            elif self._cut_off():
                cut_off_at = cut_off_at or time.monotonic()
                if time.monotonic() - cut_off_at > self._meeting.patience_s:
                    launch.say(f"stopped: {_CUT_OFF} for {self._meeting.patience_s:g} s; the newest checkpoint is kept")
                    return 1
                self._look_for_the_others(round_)
                round_ += 1
                continue
            self._tick()
            if self._joined.number in self._order.refused:
                raise UserError(self._order.refused[self._joined.number])
            if self._joined.number in self._order.gone:
                self._look_for_the_others(0)
                continue
            if self._order.phase == "over":
                return self._end()
            seat = self._seat()
            if self._order.phase == "run" and seat is not None and self._order.generation > self._done:
                return self._begin(seat)
            time.sleep(_TICK_S)

    def watch(self, turn: Turn, folder: Path) -> Watcher:
        told = False

        def look(alive: Sequence[Rank]) -> Watched | None:
            nonlocal told
            self._status.pulses = {rank: compact(pulse) for rank, pulse in read_pulses(folder, turn.place).items()}
            self._status.vitals = self._explainer.of_ranks(turn.place, turn.settings)
            if self._leader is None:  # else those of all machines are put together with every tick
                self._explainer.said = dict(self._status.vitals)
            self._tick()
            order = self._order
            if not alive or told:
                return None
            first = alive[0].rank
            if self._joined.link.closed or self._silent():
                told = True
                return Watched(first, Elsewhere(_CUT_OFF))
            if order.phase == "run" and order.generation == turn.generation:
                if order.pause and not self._signals.received:
                    self._pause(alive)
                return None
            told = True
            if order.condemned is not None and any(rank.rank == order.condemned.rank for rank in alive):
                return condemned(order.condemned, alive, folder)
            return Watched(first, Elsewhere(order.why or "the run ends"))

        return look

    def ended(self, report: Report, pulses: Mapping[int, Pulse]) -> None:
        self._court.rest()
        self._report, self._paused = report, False
        self._status.report, self._status.running = report, False
        self._status.pulses = {rank: compact(pulse) for rank, pulse in pulses.items()}
        self._tick()

    # -- the meeting -------------------------------------------------------------------------------------------------

    def _enter(self, joined: Joined) -> None:
        self._joined, self._entered = joined, True
        # Numbers of another store: here they are other agents'.
        self._order = msgspec.structs.replace(self._order, gone=(), refused={})
        self._beat = -1
        self._heard_at = time.monotonic()
        self._status = Status(
            member=joined.number,
            host=self._meeting.host,
            ranks=self._ranks,
            address=self._door.own_address,
            standby=self._door.standby,
            generation=self._done,
            report=self._report,
            agent=self._agent,
        )
        self._paused = False
        self._leader = (
            Leader(
                self._meeting.limits,
                self._court,
                joined.number,
                self._meeting.host,
                Roll(self._meeting.lost_s),
                msgspec.structs.replace(self._order, phase="gather", beat=0, pause=False, condemned=None),
                launch.say,
            )
            if joined.leads
            else None
        )
        self._members = 1

    def _tick(self) -> None:
        """Tells this agent's state and hears the others'."""
        joined, status = self._joined, self._status
        status.beat += 1
        status.now_ns = time.monotonic_ns()
        put = {f"{_MEMBER}{joined.number}": msgspec.json.encode(status).decode()}
        if self._leader is None:
            self._follow(put)
            return
        if self._order.generation >= 0 or self._leader.order.beat:
            put["order"] = msgspec.json.encode(self._leader.order).decode()
        known = [f"{_MEMBER}{number}" for number in range(1, self._members + 1)]
        answer = joined.link.exchange(put, ["joined", *known], _WAIT_S)
        if answer is None:
            return
        self._heard_at = now = time.monotonic()
        values, _ = answer
        self._members = int(values.get("joined", "1"))
        for name in known:
            if name in values:
                self._leader.roll.note(now, msgspec.json.decode(values[name], type=Status))
        before = self._order
        self._explainer.said = self._leader.vitals()
        self._order = self._leader.tick(now)
        if (before.phase, before.generation) != (self._order.phase, self._order.generation):
            self._door.tell(joined)
            joined.link.exchange({"order": msgspec.json.encode(self._order).decode()}, [], _WAIT_S)

    def _follow(self, put: Mapping[str, str]) -> None:
        answer = self._joined.link.exchange(put, ["order"], _WAIT_S)
        text = answer[0].get("order") if answer is not None else None
        if text is None:
            return
        order = msgspec.json.decode(text, type=Order)
        if order.beat != self._beat:
            self._beat, self._heard_at = order.beat, time.monotonic()
            self._order = order

    def _silent(self) -> bool:
        return time.monotonic() - self._heard_at > self._meeting.lost_s

    def _cut_off(self) -> bool:
        """Nobody answers; or this agent leads where too few come, and should look elsewhere now and then."""
        alone = self._leader is not None and bool(self._order.team) and self._order.leader != self._meeting.host
        trial = alone and time.monotonic() - self._since > _TRIAL * self._meeting.lost_s
        return self._joined.link.closed or self._silent() or trial

    def _look_for_the_others(self, round_: int) -> None:
        self._joined.link.close()
        if not round_:
            launch.say(f"{self._meeting.host}: {_CUT_OFF}; its ranks are stopped, it looks for them")
        joined = self._door.again(self._order, round_)
        if joined is not None:
            self._enter(joined)
            self._since = time.monotonic()
        else:
            time.sleep(_TICK_S)

    # -- turns -------------------------------------------------------------------------------------------------------

    def _seat(self) -> Seat | None:
        return next((seat for seat in self._order.team if seat.member == self._joined.number), None)

    def _begin(self, seat: Seat) -> Turn:
        self._court.rest()
        order = self._order
        self._done = self._status.generation = order.generation
        self._status.running, self._status.report = True, None
        self._status.pulses, self._status.vitals = {}, {}
        self._paused = False
        world = sum(one.ranks for one in order.team)
        settings = {}
        interface = interface_of(self._door.own_address)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            settings["GLOO_SOCKET_IFNAME"] = interface  # gloo would look for that of the host's name
        if order.lost_ago_ns is not None:
            now = time.monotonic_ns()
            settings[LOST] = lost_json(*(now - ago for ago in order.lost_ago_ns))
        place = Place(seat.ranks, world, seat.first, self._joined.address, self._joined.port)
        return Turn(order.generation, place, settings)

    def _pause(self, alive: Sequence[Rank]) -> None:
        """As if the scheduler had sent it: the ranks agree on a step, save, and leave."""
        if not self._paused:
            self._paused = True
            for rank in alive:
                rank.send(signal.SIGTERM)

    def _end(self) -> int:
        if self._leader is not None:
            self._door.forget()
            # The others must hear of it before the store goes.
            until = time.monotonic() + 2 * self._meeting.lost_s
            while time.monotonic() < until and any(
                heard.status.member != self._joined.number for heard in self._leader.roll.here().values()
            ):
                self._tick()
                time.sleep(_TICK_S)
        if self._order.why and self._leader is not None:
            launch.say(self._order.why)
        return self._order.code


class _Court:
    """What the leading agent's decisions are made with."""

    def __init__(self, recovery: Recovery, make_watch: MakeWatch) -> None:
        self._recovery, self._make_watch = recovery, make_watch
        self._team: list[str] = []
        self._lost: Lost | None = None
        self._watch: Watch | None = None

    def excluded(self) -> set[str]:
        return self._recovery.excluded()

    def enough(self, ranks: int) -> bool:
        return self._recovery.enough(ranks)

    def begin(self, team: Sequence[str]) -> None:
        self._team = list(team)
        self._watch = self._make_watch(team, self._lost)
        self._lost = None

    def look(self, pulses: Mapping[int, Pulse], living: set[int]) -> Hang | None:
        assert self._watch is not None
        return self._watch.look(pulses, living)

    def evict(self) -> bool:
        return self._watch is not None and self._watch.evict

    def settle(self, pulses: Mapping[int, Pulse]) -> None:
        assert self._watch is not None
        self._watch.settle(pulses)

    def rest(self) -> None:
        """Before ranks are forked: nothing may run beside it."""
        if self._watch is not None:
            self._watch.rest()

    def leave(self, final: Report, reports: Iterable[Report]) -> None:
        self._recovery.leave(final, reports)

    def decide(self, death: Death, link: str, detected_ns: int, pulses: Mapping[int, Pulse]) -> tuple[str | None, int]:
        if self._watch is not None:
            self._watch.settle(pulses)
        furthest = max((pulse.step for pulse in pulses.values()), default=death.step - 1)
        incident, hopeless = self._recovery.decide(death, self._team, furthest, link)
        self._lost = Lost.of(incident, detected_ns, pulses, self._team)
        return hopeless, self._lost.told_ns
