"""What a launcher says and returns: the environment that ranks start from, exit codes, and who failed in words."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from headway.account.errors import UserError
from headway.guard import failure
from headway.guard.signals import EXIT_PREEMPTED
from headway.guard.waiting import BAD_NEWS, CLEAN, EXIT_USER, Ended, Rank, Signals

_TAIL_LINES = 30


def rankless(n: int, env: Mapping[str, str] | None) -> dict[str, str]:
    """The environment to start ranks from. Raises UserError where it makes this process a rank, or n < 1."""
    if n < 1:
        raise UserError(f"{n} ranks cannot be started: at least 1")
    base = dict(os.environ if env is None else env)
    taken = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in base]
    if taken:
        raise UserError(f"{', '.join(taken)} already set: this process is a rank itself and starts none")
    return base


def verdict(ended: Ended, signals: Signals, begun: Collection[int]) -> int:
    """The launcher's exit code; says on stderr what failed. `begun`: the ranks that had begun a step."""
    if ended.first is None:
        return ended.code
    failed = [one for one in ended.ranks if one.code not in CLEAN]
    if signals.insists:
        say(f"killed {len(failed)} ranks on the second Ctrl-C; the last checkpoint is the one before")
        return 128 + signals.received[-1]
    first, cause = ended.first, ended.cause
    code = first.code or 0
    if code in (BAD_NEWS, EXIT_USER) and cause is not None and cause.user:
        said = _said_by_rank_0(ended)
        if said is None or said.message != cause.message:  # else rank 0 has printed it
            say(f"rank {first.rank}: {cause.message}")
        return code
    if code == -signal.SIGTERM and signal.SIGTERM in signals.received and first.rank not in begun:
        # No rank can have finished a step without it: there is nothing to save, and nothing is lost.
        say("stopped by SIGTERM during the start: nothing is lost, the same command goes on")
        return EXIT_PREEMPTED
    if code < 0 and -code in signals.received:
        say(f"rank {first.rank} was stopped by {signal_name(-code)} before it could save")
        return 128 - code
    say(f"{how_it_ended(ended)}{'; the other ranks were stopped' if len(ended.ranks) > 1 else ''}")
    show_log(first)
    code = own_code(ended)
    return 128 - code if code < 0 else code


def show_log(rank: Rank) -> None:
    """The end of a failed rank's log, where it did not write to the terminal."""
    if rank.log is not None:
        say(f"the end of {rank.log}:\n{_tail(rank.log, rank.log_start)}")


def own_code(ended: Ended) -> int:
    """The exit code of the rank that failed first; 1 where it had failed already when we stopped it."""
    code = ended.code
    stopped = code < 0 and ended.cause is not None and ended.first is not None and ended.first.stopped_by_us
    return 1 if stopped else code


def how_it_ended(ended: Ended) -> str:
    """The rank that failed first, in words."""
    assert ended.first is not None
    code, cause = own_code(ended), ended.cause
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    why = f" ({cause.message})" if cause is not None else ""
    return f"rank {ended.first.rank} {how}{why}"


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


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder for what ranks and launcher tell each other."""
    with tempfile.TemporaryDirectory(prefix="headway-ranks-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


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
