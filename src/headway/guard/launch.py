"""The local launcher: n ranks of one command on this machine, that end together; no restart."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.account.errors import UserError
from headway.guard import failure
from headway.guard.generation import Place, run_generation
from headway.guard.processes import Start
from headway.guard.rendezvous import store
from headway.guard.waiting import CLEAN, EXIT_USER, Ended, Rank, Signals

_TAIL_LINES = 30


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
    base = rankless(n, env)
    start = Start(argv) if command is None else Start(argv, command)
    with work_folder() as work, store() as port, received() as signals:
        logs = work.path if log_dir is None else log_dir
        ended = run_generation(start, Place(n, n, port=port), base, logs, work.path, signals, grace_s=grace_s)
        code = verdict(ended, signals)
        work.keep = log_dir is None and code not in CLEAN and n > 1
    return code


def rankless(n: int, env: Mapping[str, str] | None) -> dict[str, str]:
    """The environment to start ranks from. Raises UserError where it makes this process a rank, or n < 1."""
    if n < 1:
        raise UserError(f"{n} ranks cannot be started: at least 1")
    base = dict(os.environ if env is None else env)
    taken = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in base]
    if taken:
        raise UserError(f"{', '.join(taken)} already set: this process is a rank itself and starts none")
    return base


def verdict(ended: Ended, signals: Signals) -> int:
    """The launcher's exit code; says on stderr what failed."""
    if ended.first is None:
        return ended.code
    failed = [one for one in ended.ranks if one.code not in CLEAN]
    if len(signals.received) > 1:
        say(f"killed {len(failed)} ranks on the second signal; the last checkpoint is the one before")
        return 128 + signals.received[-1]
    first, cause = ended.first, ended.cause
    code = first.code or 0
    if code == EXIT_USER and cause is not None and cause.user:
        said = _said_by_rank_0(ended)
        if said is None or said.message != cause.message:  # else rank 0 has printed it
            say(f"rank {first.rank}: {cause.message}")
        return code
    if code < 0 and -code in signals.received:
        say(f"rank {first.rank} was stopped by {signal_name(-code)} before it could save")
        return 128 - code
    if cause is not None and first.stopped_by_us and code < 0:
        code = 1  # it had failed before we stopped it
    others = "; the other ranks were stopped" if len(ended.ranks) > 1 else ""
    say(f"{how_it_ended(first, code, cause)}{others}")
    if first.log is not None:
        say(f"the end of {first.log}:\n{_tail(first.log, first.log_start)}")
    return 128 - code if code < 0 else code


def how_it_ended(rank: Rank, code: int, cause: failure.RecordedFailure | None) -> str:
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    why = f" ({cause.message})" if cause is not None else ""
    return f"rank {rank.rank} {how}{why}"


def _said_by_rank_0(ended: Ended) -> failure.RecordedFailure | None:
    zero = next((one for one in ended.ranks if one.rank == 0), None)
    return failure.read_failure(zero.failure_file) if zero is not None and zero.code not in CLEAN else None


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as stream:
        stream.seek(start)
        lines = stream.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def signal_name(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"{name} (out of memory, or by hand)" if number == signal.SIGKILL else name


def say(text: str) -> None:
    print(f"headway: {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Work:
    path: Path
    keep: bool = False


@contextlib.contextmanager
def work_folder() -> Iterator[Work]:
    """A temporary folder, removed unless `keep` is set."""
    work = Work(Path(tempfile.mkdtemp(prefix="headway-ranks-")))
    try:
        yield work
    finally:
        if not work.keep:
            shutil.rmtree(work.path, ignore_errors=True)


@contextlib.contextmanager
def received() -> Iterator[Signals]:
    """Remembers SIGINT and SIGTERM instead of dying of them (in the main thread)."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    former = {number: signal.signal(number, signals.remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
