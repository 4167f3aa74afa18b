"""The local launcher: n ranks of one command on this machine, that end together.

The meeting point (a TCPStore) lives in the launcher on a port that the kernel chose, and stays open from then on: no
moment exists in which another launch could take the port, and the store outlives any rank. Ranks sit in process groups
of their own, so that Ctrl-C at the terminal reaches them once, through the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from headway.account.errors import UserError
from headway.guard import failure
from headway.guard.ranks import LAUNCHER_VARIABLE
from headway.guard.signals import EXIT_PREEMPTED

EXIT_USER = 2
_POLL_S = 0.02
_TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1
_CLEAN = (0, EXIT_PREEMPTED)
# Deaths that a rank does not bring on itself because another one died (a watchdog's SIGABRT is such a consequence).
_FIRST_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(slots=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    log_start: int
    failure_file: Path
    died_at: float | None = None
    stopped_by_us: bool = False

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def send(self, number: int) -> None:
        if self.process.returncode is None:  # not reaped, so the group id cannot belong to anyone else
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


@dataclass(slots=True)
class _Signals:
    """What the launcher itself received."""

    received: list[int] = field(default_factory=list)

    def remember(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)


def launch_local(
    n: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    command: Sequence[str] | None = None,
    grace_s: float = 5.0,
) -> int:
    """Starts `n` ranks of `command + argv` on this machine, waits for them, and returns the exit code.

    `command`: default this Python with `-m headway`. `env`: the environment to start from, default this process's; it
    must hold no rank variables. `log_dir`: where the output of ranks 1… goes (`rank-00001.log`, appended), default a
    temporary folder that is kept when a rank fails; rank 0 writes to our own stdout and stderr.

    One rank failing ends the others (SIGTERM, after `grace_s` seconds SIGKILL); the code is that of the rank that
    failed first, 128 + number for a signal, and stderr names rank, cause and log. All ranks well: 0, or 75 when one
    said that it was preempted with its state saved. SIGINT and SIGTERM are passed on once, so that ranks can save; the
    second one kills. Ranks die with this process, also when it is killed (Linux).

    Raises UserError for n < 1 or when `env` already gives this process a rank.
    """
    if n < 1:
        raise UserError(f"{n} ranks cannot be started: at least 1")
    base = dict(os.environ if env is None else env)
    taken = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in base]
    if taken:
        raise UserError(f"{', '.join(taken)} already set: this process is a rank itself and starts none")
    with _work_folder() as work, _store() as port, _received() as signals:
        logs = work.path if log_dir is None else log_dir
        logs.mkdir(parents=True, exist_ok=True)
        ranks: list[_Rank] = []
        try:
            for rank in range(n):
                settings = _rank_settings(base, rank, n, port, work.path)
                ranks.append(_start(rank, [*(command or _DEFAULT_COMMAND), *argv], settings, logs))
            _wait(ranks, signals, grace_s)
        finally:
            for one in ranks:  # only what an exception left alive
                one.send(signal.SIGKILL)
                one.process.wait()
        code = _verdict(ranks, signals)
        work.keep = log_dir is None and code not in _CLEAN and n > 1
    return code


_DEFAULT_COMMAND = (sys.executable, "-m", "headway")


def _rank_settings(base: Mapping[str, str], rank: int, n: int, port: int, work: Path) -> dict[str, str]:
    settings = dict(base)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # n ranks that each take all cores are many times slower than one.
    settings.setdefault("OMP_NUM_THREADS", str(max(1, cores // n)))
    settings.setdefault("PYTHONFAULTHANDLER", "1")
    if sys.platform == "linux":
        # Gloo otherwise looks for the interface of the host's name, which a container often cannot resolve.
        settings.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank > 0:
        settings["PYTHONUNBUFFERED"] = "1"  # the last lines before a kill are the ones that matter
    settings.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(n),
        LOCAL_WORLD_SIZE=str(n),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # torch's name for "the store lives in the launcher: rank 0 must not open another".
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    settings[LAUNCHER_VARIABLE] = "local"
    settings[failure.VARIABLE] = str(work / f"rank-{rank:05d}.failure.json")
    return settings


def _start(rank: int, command: Sequence[str], settings: dict[str, str], logs: Path) -> _Rank:
    log = None if rank == 0 else logs / f"rank-{rank:05d}.log"
    output: IO[bytes] | None = None if log is None else log.open("ab")
    try:
        process = subprocess.Popen(
            command,
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=_die_with_parent(),
        )
    finally:
        if output is not None:
            output.close()
    start = 0 if log is None else log.stat().st_size
    return _Rank(rank, process, log, start, Path(settings[failure.VARIABLE]))


def _die_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    # Looked up here: between fork and exec nothing may be loaded or allocated that another thread could hold locked.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask


def _wait(ranks: Sequence[_Rank], signals: _Signals, grace_s: float) -> None:
    """Returns when every rank has ended, helping after a failure or a signal."""
    passed_on = 0
    terminate_at: float | None = None
    kill_at: float | None = None
    while True:
        alive = [one for one in ranks if one.process.poll() is None]
        now = time.monotonic()
        for one in ranks:
            if one.code is not None and one.died_at is None:
                one.died_at = now
                if one.code not in _CLEAN and terminate_at is None:
                    # A user's mistake is seen by all ranks at once: let rank 0 say it.
                    terminate_at = now + (grace_s if one.code == EXIT_USER else 0.0)
        if not alive:
            return
        for number in signals.received[passed_on:]:
            passed_on += 1
            for one in alive:
                one.send(number if passed_on == 1 else signal.SIGKILL)
        if terminate_at is not None and kill_at is None and now >= terminate_at:
            kill_at = now + grace_s
            for one in alive:
                one.stopped_by_us = True
                if not one.failure_file.exists():  # else it is on its way out, with an exit code of its own
                    one.send(signal.SIGTERM)
        elif kill_at is not None and now >= kill_at:
            kill_at = now + grace_s
            for one in alive:
                one.send(signal.SIGKILL)
        time.sleep(_POLL_S)


def _verdict(ranks: Sequence[_Rank], signals: _Signals) -> int:
    """The launcher's exit code; says on stderr what failed."""
    failed = [one for one in ranks if one.code not in _CLEAN]
    if not failed:
        return max(one.code or 0 for one in ranks)
    if len(signals.received) > 1:
        _say(f"killed {len(failed)} ranks on the second signal; the last checkpoint is the one before")
        return 128 + signals.received[-1]
    recorded = {one.rank: failure.read_failure(one.failure_file) for one in failed}
    first = _first_to_fail(failed, recorded)
    code = first.code or 0
    cause = recorded[first.rank]
    if code == EXIT_USER and cause is not None and cause.user:
        said = recorded.get(0)
        if said is None or said.message != cause.message:  # else rank 0 has printed it
            _say(f"rank {first.rank}: {cause.message}")
        return code
    if code < 0 and -code in signals.received:
        _say(f"rank {first.rank} was stopped by {_signal_name(-code)} before it could save")
        return 128 - code
    if cause is not None and first.stopped_by_us and code < 0:
        code = 1  # it had failed before we stopped it
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    why = f" ({cause.message})" if cause is not None else ""
    others = "; the other ranks were stopped" if len(ranks) > 1 else ""
    _say(f"rank {first.rank} {how}{why}{others}")
    if first.log is not None:
        _say(f"the end of {first.log}:\n{_tail(first.log, first.log_start)}")
    return 128 - code if code < 0 else code


def _first_to_fail(failed: Sequence[_Rank], recorded: Mapping[int, failure.RecordedFailure | None]) -> _Rank:
    killed = [one for one in failed if -(one.code or 0) in _FIRST_CAUSES and not one.stopped_by_us]
    if killed:
        return min(killed, key=lambda one: one.died_at or 0.0)
    told = [(cause.at, one.rank, one) for one in failed if (cause := recorded[one.rank]) is not None]
    if told:
        return min(told)[2]
    return min(failed, key=lambda one: (one.stopped_by_us, one.died_at or 0.0))


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as stream:
        stream.seek(start)
        lines = stream.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"{name} (out of memory, or by hand)" if number == signal.SIGKILL else name


def _say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Work:
    path: Path
    keep: bool = False


@contextlib.contextmanager
def _work_folder() -> Iterator[_Work]:
    work = _Work(Path(tempfile.mkdtemp(prefix="headway-ranks-")))
    try:
        yield work
    finally:
        if not work.keep:
            shutil.rmtree(work.path, ignore_errors=True)


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """The ranks' meeting point; yields its port."""
    import torch.distributed as dist  # seconds of import that a refused launch does not need

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        del store


@contextlib.contextmanager
def _received() -> Iterator[_Signals]:
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    former = {number: signal.signal(number, signals.remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
