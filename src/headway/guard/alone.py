"""The supervisor of a run on one machine decides by itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from headway.account.run_clock import LOST
from headway.guard import launch
from headway.guard.beacon import Pulse
from headway.guard.cards import devices_of
from headway.guard.explain import Explainer
from headway.guard.generation import Place
from headway.guard.group import Turn
from headway.guard.recovery import Recovery
from headway.guard.rendezvous import store
from headway.guard.report import Report
from headway.guard.signals import EXIT_PREEMPTED
from headway.guard.waiting import BAD_NEWS, Rank, Signals, Watched, Watcher
from headway.guard.watching import Lost, Watch, condemned, read_pulses

MakeWatch = Callable[[Sequence[str], Lost | None], Watch]


class Alone:
    """`places`: the host or device of every rank."""

    def __init__(
        self,
        places: Sequence[str],
        recovery: Recovery,
        make_watch: MakeWatch,
        signals: Signals,
        explainer: Explainer,
    ) -> None:
        self._places, self._recovery, self._make_watch, self._signals = places, recovery, make_watch, signals
        self._explainer = explainer
        self._generation = -1
        self._team: list[str] = []
        self._lost: Lost | None = None
        self._watch: Watch | None = None
        self._code: int | None = None
        self._paused = False
        self._stores = ExitStack()

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self._stores.close()

    def next(self) -> Turn | int:
        if self._code is not None:
            return self._code
        if self._signals.received and self._team:  # it came while nothing ran: all there is to save is saved
            return EXIT_PREEMPTED
        team = self._recovery.team(self._places)
        if team is None:
            launch.say(f"stopped: fewer than {self._recovery.min_ranks} ranks remain (hosts.json)")
            return 1
        self._team, self._generation, self._paused = team, self._generation + 1, False
        self._watch = self._make_watch(team, self._lost)
        self._stores.close()
        port = self._stores.enter_context(store())
        lost = {LOST: self._lost.to_json()} if self._lost is not None else {}
        return Turn(self._generation, Place(len(team), len(team), port=port), {**devices_of(team), **lost})

    def watch(self, turn: Turn, folder: Path) -> Watcher:
        watch, found = self._watch, False
        assert watch is not None

        def look(alive: Sequence[Rank]) -> Watched | None:
            nonlocal found
            if found:
                return None
            self._explainer.look(turn.place, turn.settings)
            hang = watch.look(read_pulses(folder, turn.place), {rank.rank for rank in alive})
            found = hang is not None
            if watch.evict and not found and not self._paused:
                self._paused = True  # as if the scheduler had sent it: the ranks save behind one step, and leave
                for rank in alive:
                    rank.send(signal.SIGTERM)
            return condemned(hang, alive, folder) if hang is not None else None

        return look

    def ended(self, report: Report, pulses: Mapping[int, Pulse]) -> None:
        assert self._watch is not None
        self._watch.settle(pulses)
        self._stores.close()
        if report.code == EXIT_PREEMPTED and self._paused and not self._signals.received:
            self._lost = None
            return
        # It was our wish that they leave: that the state could not be saved is no reason to end the run.
        unsaved = self._paused and not self._signals.received and report.code == BAD_NEWS and report.death is not None
        if report.code is not None and not unsaved:
            self._code = report.code
            self._recovery.leave(report, [report])
            return
        assert report.death is not None
        incident, hopeless = self._recovery.decide(report.death, self._team, report.furthest, report.link)
        if hopeless is not None:
            launch.say(f"stopped: {hopeless}; the newest checkpoint is kept")
            self._code = report.exit_code
            return
        self._lost = Lost.of(incident, report.detected_ns, pulses, self._team)
