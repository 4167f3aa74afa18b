"""One generation: n ranks of one command, that meet at a store of their own and end together.

The store (a TCPStore) lives outside the ranks on a port that the kernel chose, and stays open from then on: no moment
exists in which another launch could take the port, and the store outlives any rank. A new generation gets a new store:
keys of a dead one made the next one hang. Ranks sit in process groups of their own, so that Ctrl-C at the terminal
reaches them once, through the launcher.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from headway.guard import failure
from headway.guard.beacon import VARIABLE as BEACONS
from headway.guard.processes import Process, Start, can_fork, die_with_parent
from headway.guard.ranks import GENERATION_VARIABLE, LAUNCHER_VARIABLE
from headway.guard.signals import EXIT_PREEMPTED

EXIT_USER = 2
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

    def remember(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this machine's ranks stand among all: `first` is the global rank of the first one here."""

    here: int
    world: int
    first: int = 0
    address: str = "127.0.0.1"
    port: int = 0


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


def run_generation(
    start: Start,
    place: Place,
    base: Mapping[str, str],
    logs: Path,
    work: Path,
    signals: Signals,
    *,
    generation: int = 0,
    grace_s: float = 5.0,
    at_once: bool = False,
    watch: Watcher | None = None,
) -> Ended:
    """Starts the ranks, waits for all of them and says how they ended.

    `work`: a folder for this generation's beacons and failure files. One rank failing ends the others: SIGTERM, and
    SIGKILL after `grace_s` seconds; with `at_once` SIGKILL at once (a stopped process takes no other signal).
    `signals`: passed on once, the second one kills.
    """
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[Rank] = []
    try:
        for local in range(place.here):
            settings = rank_settings(base, local, place, work, generation)
            log = None if place.first + local == 0 else logs / f"rank-{place.first + local:05d}.log"
            size = log.stat().st_size if log is not None and log.exists() else 0
            process = start.rank(settings, log)
            ranks.append(Rank(place.first + local, process, log, size, Path(settings[failure.VARIABLE])))
        return _Wait(ranks, signals, grace_s, at_once, watch).run()
    finally:
        for one in ranks:  # only what an exception left alive
            one.send(signal.SIGKILL)
            one.process.wait()


def rank_settings(base: Mapping[str, str], local: int, place: Place, work: Path, generation: int) -> dict[str, str]:
    """The environment of one rank."""
    settings = dict(base)
    rank = place.first + local
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # n ranks that each take all cores are many times slower than one.
    settings.setdefault("OMP_NUM_THREADS", str(max(1, cores // place.here)))
    settings.setdefault("PYTHONFAULTHANDLER", "1")
    if sys.platform == "linux" and place.address == "127.0.0.1":
        # Gloo otherwise looks for the interface of the host's name, which a container often cannot resolve.
        settings.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank > 0:
        settings["PYTHONUNBUFFERED"] = "1"  # the last lines before a kill are the ones that matter
    settings.update(
        RANK=str(rank),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(place.world),
        LOCAL_WORLD_SIZE=str(place.here),
        MASTER_ADDR=place.address,
        MASTER_PORT=str(place.port),
        # torch's name for "the store lives in the launcher: rank 0 must not open another".
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    settings[LAUNCHER_VARIABLE] = "local"
    settings[GENERATION_VARIABLE] = str(generation)
    settings[BEACONS] = str(work)
    settings[failure.VARIABLE] = str(work / f"rank-{rank:05d}.failure.json")
    return settings


class _Wait:
    """Waits until every rank has ended, helping after a failure, a hang or a signal."""

    def __init__(
        self, ranks: Sequence[Rank], signals: Signals, grace_s: float, at_once: bool, watch: Watcher | None
    ) -> None:
        self._ranks, self._signals, self._grace, self._at_once = ranks, signals, grace_s, at_once
        self._watch = watch
        self._passed_on = 0
        self._terminate_at: float | None = None
        self._kill_at: float | None = None
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
        due = [at for at in (self._terminate_at, self._kill_at) if at is not None]
        return min([_LONGEST_WAIT_S, *(max(0.0, at - time.monotonic()) for at in due)]) if due else _LONGEST_WAIT_S

    def _note_deaths(self) -> None:
        now = time.monotonic()
        for one in self._ranks:
            if one.code is None or one.died_at is not None:
                continue
            one.died_at = now
            if one.code not in CLEAN and self._terminate_at is None:
                self._detected = self._detected or now
                # A user's mistake is seen by all ranks at once: let rank 0 say it.
                self._terminate_at = now + (self._grace if one.code == EXIT_USER else 0.0)

    def _pass_signals_on(self, alive: Sequence[Rank]) -> None:
        for number in self._signals.received[self._passed_on :]:
            self._passed_on += 1
            for one in alive:
                one.send(number if self._passed_on == 1 else signal.SIGKILL)

    def _look(self, alive: Sequence[Rank]) -> None:
        if self._watch is None or self._condemned is not None or self._terminate_at is not None:
            return
        self._condemned = self._watch(alive)
        if self._condemned is not None:
            self._detected = self._terminate_at = time.monotonic()

    def _end_the_others(self, alive: Sequence[Rank]) -> None:
        now = time.monotonic()
        if self._terminate_at is not None and self._kill_at is None and now >= self._terminate_at:
            self._kill_at = now + self._grace
            for one in alive:
                one.stopped_by_us = True
                if self._at_once:
                    one.send(signal.SIGKILL)
                elif not one.failure_file.exists():  # else it is on its way out, with an exit code of its own
                    one.send(signal.SIGTERM)
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + self._grace
            for one in alive:
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


@contextlib.contextmanager
def store(address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """The ranks' meeting point; yields its port. In a process of its own where this one forks ranks: its thread would
    forbid that."""
    if not can_fork() or "torch" not in sys.modules:
        import torch.distributed as dist  # seconds of import that a refused launch does not need

        inner = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        try:
            yield inner.port
        finally:
            del inner
        return
    read, write = os.pipe()
    ask = die_with_parent()
    pid = os.fork()
    if not pid:
        _serve_store(address, port, write, ask)
    os.close(write)
    try:
        with os.fdopen(read) as stream:
            text = stream.read()
        if not text.isdigit():
            raise OSError(f"no store could be opened on {address}:{port}: {text}")
        yield int(text)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve_store(address: str, port: int, write: int, ask: Callable[[], None] | None) -> None:
    try:
        os.setpgid(0, 0)
        if ask is not None:
            ask()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends with its parent, after the ranks
        import torch.distributed as dist

        inner = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
        os.write(write, str(inner.port).encode())
        os.close(write)
        while True:
            signal.pause()
    except BaseException as problem:
        with contextlib.suppress(OSError):
            os.write(write, str(problem).encode()[:400])
    finally:
        os._exit(1)
