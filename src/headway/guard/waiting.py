"""Waiting until every rank of a generation has ended, and which of them failed first."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from headway.guard import failure
from headway.guard.processes import Process
from headway.guard.signals import EXIT_PREEMPTED

BAD_NEWS, EXIT_USER = 1, 2
CLEAN = (0, EXIT_PREEMPTED)
_LONGEST_WAIT_S = 0.25
_POLL_S = 0.02
# Deaths that a rank does not bring on itself because another one died (a watchdog's SIGABRT is such a consequence).
_FIRST_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(slots=True)
class Rank:
    """A started rank. Times are monotonic seconds."""

    rank: int
    process: Process
    log: Path | None
    log_start: int
    failure_file: Path
    died_at: float | None = None
    stopped_by_us: bool = False

    @property
    def code(self) -> int | None:
        return self.process.returncode

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def send(self, number: int) -> None:
        if self.process.returncode is None:  # not reaped, so the group id cannot belong to anyone else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


@dataclass(slots=True)
class Signals:
    """What the launcher itself received."""

    received: list[int] = field(default_factory=list)
    first_at: float = 0.0

    def remember(self, number: int, _frame: FrameType | None) -> None:
        self.first_at = self.first_at or time.monotonic()
        self.received.append(number)

    @property
    def since_s(self) -> float:
        """Seconds since the first one."""
        return time.monotonic() - self.first_at if self.received else 0.0

    @property
    def insists(self) -> bool:
        """Ctrl-C behind another signal: a person who will not wait. A scheduler repeats SIGTERM while ranks save."""
        return signal.SIGINT in self.received[1:]


@dataclass(frozen=True)
class Watched:
    """A rank that must be killed, and why (from the watcher)."""

    rank: int
    why: object


Watcher = Callable[[Sequence[Rank]], Watched | None]
"""Looks at the living ranks about four times a second."""


@dataclass
class Ended:
    """How a generation ended. Exit codes as of subprocess; `first` is the rank that failed first, None when none did.

    detected: monotonic seconds at which the launcher saw the first failure. condemned: what the watcher said.
    """

    ranks: Sequence[Rank]
    first: Rank | None
    cause: failure.RecordedFailure | None
    detected: float
    condemned: Watched | None = None

    @property
    def code(self) -> int:
        """0 or 75 (preempted) when all ranks did well, else that of the rank that failed first."""
        if self.first is None:
            return max(rank.code or 0 for rank in self.ranks)
        return self.first.code or 0


def _meant(one: Rank) -> bool:
    """Whether a rank that has ended with "bad news" left by itself, with a line for the user."""
    said = failure.read_failure(one.failure_file) if one.code == BAD_NEWS else None
    return said is not None and said.user


class Wait:
    """Waits until every rank has ended, helping after a failure, a hang or a signal."""

    def __init__(self, ranks: Sequence[Rank], signals: Signals, grace_s: float, watch: Watcher | None) -> None:
        self._ranks, self._signals, self._grace, self._watch = ranks, signals, grace_s, watch
        self._passed_on = 0
        self._end_at: float | None = None
        self._detected = 0.0
        self._condemned: Watched | None = None

    def run(self) -> Ended:
        with _Deaths(self._ranks) as deaths:
            while True:
                alive = [one for one in self._ranks if one.process.poll() is None]
                self._note_deaths()
                if not alive:
                    return self._ended()
                self._pass_signals_on(alive)
                self._look(alive)
                self._end_the_others(alive)
                deaths.wait(self._pause())

    def _pause(self) -> float:
        if self._end_at is None:
            return _LONGEST_WAIT_S
        return min(_LONGEST_WAIT_S, max(_POLL_S, self._end_at - time.monotonic()))

    def _note_deaths(self) -> None:
        now = time.monotonic()
        for one in self._ranks:
            if one.code is None or one.died_at is not None:
                continue
            one.died_at = now
            if one.code not in CLEAN and self._end_at is None:
                self._detected = self._detected or now
                # A user's mistake, or a stop, is seen by all ranks at once: let rank 0 say it.
                self._end_at = now + (self._grace if one.code == EXIT_USER or _meant(one) else 0.0)

    def _pass_signals_on(self, alive: Sequence[Rank]) -> None:
        for number in self._signals.received[self._passed_on :]:
            self._passed_on += 1
            if self._passed_on == 1 or self._signals.insists:
                for one in alive:
                    one.send(number if self._passed_on == 1 else signal.SIGKILL)

    def _look(self, alive: Sequence[Rank]) -> None:
        if self._watch is None:
            return
        found = self._watch(alive)  # to the end: other machines must hear that this one lives
        if found is not None and self._condemned is None and self._end_at is None:
            self._condemned = found
            self._detected = self._end_at = time.monotonic()

    def _end_the_others(self, alive: Sequence[Rank]) -> None:
        """SIGKILL and nothing before it: a stopped process takes no other signal, a hung one does not heed it, and what
        is to be kept is in the newest checkpoint."""
        if self._end_at is None or time.monotonic() < self._end_at:
            return
        for one in alive:
            one.stopped_by_us = True
            one.send(signal.SIGKILL)

    def _ended(self) -> Ended:
        failed = [one for one in self._ranks if one.code not in CLEAN]
        recorded = {one.rank: failure.read_failure(one.failure_file) for one in failed}
        first: Rank | None = None
        if self._condemned is not None:
            first = next(one for one in self._ranks if one.rank == self._condemned.rank)
        elif failed:
            first = first_to_fail(failed, recorded)
        cause = recorded.get(first.rank) if first is not None else None
        return Ended(self._ranks, first, cause, self._detected, self._condemned)


def first_to_fail(failed: Sequence[Rank], recorded: Mapping[int, failure.RecordedFailure | None]) -> Rank:
    """The rank whose failure the others' followed from."""
    killed = [one for one in failed if -(one.code or 0) in _FIRST_CAUSES and not one.stopped_by_us]
    if killed:
        return min(killed, key=lambda one: one.died_at or 0.0)
    told = [(cause.at, one.rank, one) for one in failed if (cause := recorded[one.rank]) is not None]
    if told:
        return min(told)[2]
    return min(failed, key=lambda one: (one.stopped_by_us, one.died_at or 0.0))


class _Deaths:
    """Wakes at once when a rank dies (a pidfd becomes readable) or a signal comes (it interrupts the wait)."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._fds: dict[int, Rank] = {}
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._former_wakeup = -1

    def __enter__(self) -> _Deaths:
        if hasattr(os, "pidfd_open"):
            for one in self._ranks:
                with contextlib.suppress(OSError):  # an old kernel, or it is dead already
                    self._fds[os.pidfd_open(one.process.pid)] = one
        if threading.current_thread() is threading.main_thread():
            # Python goes on waiting after a signal's handler has run; a byte in a socket ends the wait.
            self._wake = socket.socketpair()
            for end in self._wake:
                end.setblocking(False)
            self._former_wakeup = signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)
        if self._wake is not None:
            signal.set_wakeup_fd(self._former_wakeup)
            for end in self._wake:
                end.close()

    def wait(self, seconds: float) -> None:
        watched = {fd for fd, one in self._fds.items() if one.alive}
        if len(watched) < sum(one.alive for one in self._ranks):
            time.sleep(min(seconds, _POLL_S))
            return
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        if self._wake is not None:
            poll.register(self._wake[0], select.POLLIN)
        poll.poll(max(1.0, seconds * 1000))
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):
                self._wake[0].recv(4096)
