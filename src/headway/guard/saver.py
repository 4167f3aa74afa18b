"""The trainer's end of the saver process: one job at a time, watched by a thread, never waited for.

A saver that is killed is noticed when its pipe closes and its job is given to a new one; a job that takes longer than
`timeout_s` (a disk that hangs, a stopped process) is given up, and the process killed and left to the kernel.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import headway
from headway.guard.orphans import SAVER, is_stopped
from headway.guard.save_job import Job, Outcome, Room

_TRIES = 2
_TIERS = ("memory", "peer", "disk", "remote")
_GRACE_S = 2.0
_LOOK_S = 0.5


@dataclass(slots=True)
class _Work:
    job: Job | Room
    since: float
    left: set[str] = field(default_factory=set)
    tries: int = 1


class Saver:
    """Started with the first job. `take` returns what happened since; everything else may be called from any thread.

    `run_folder` stands in the process's command line: an orphan is known by it (`guard.orphans`)."""

    def __init__(self, run_folder: Path, timeout_s: float) -> None:
        self.run_folder, self.timeout_s = run_folder.resolve(), timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._work: _Work | None = None
        self._outcomes: deque[Outcome] = deque()
        self._idle = threading.Event()
        self._idle.set()
        self._died_idle = ""
        self._stood: subprocess.Popen[bytes] | None = None  # ended because it stood stopped

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    @property
    def left(self) -> frozenset[str]:
        """The tiers that the job in work has still to do."""
        work = self._work
        return frozenset(work.left) if work is not None else frozenset()

    def reserve(self) -> None:
        """Counts as busy from now on, e.g. while the job's files are still being staged."""
        self._idle.clear()

    def release(self) -> None:
        """Takes a reservation back."""
        self._idle.set()

    def submit(self, job: Job | Room) -> None:
        """Begins a job. Raises RuntimeError while another one is in work."""
        with self._lock:
            if self._work is not None:
                raise RuntimeError("a save is in work")
            self._idle.clear()
            self._work = _Work(job, time.monotonic(), set(job.tiers()))
            self._send()

    def tell(self, outcome: Outcome) -> None:
        """Adds an outcome that the process knows nothing of."""
        self._outcomes.append(outcome)

    def take(self) -> list[Outcome]:
        """Outcomes since the last call, in order."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._outcomes.popleft())
        return found

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when nothing is in work; waits up to `timeout_s` seconds for that."""
        return self._idle.wait(timeout_s)

    def settle(self, timeout_s: float | None = None) -> bool:
        """`wait` for somebody who has nothing else to do: a saver that stands stopped is ended, and a new one takes its
        job over; who is to end within seconds (SIGTERM) cannot wait until the job is overdue."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _LOOK_S if until is None else min(_LOOK_S, max(0.0, until - time.monotonic()))
            if self.wait(left):
                return True
            if until is not None and time.monotonic() >= until:
                return False
            self.end_stopped()

    def end_stopped(self) -> None:
        """Ends the process where it stands stopped (SIGSTOP, a debugger); its job goes to a new one."""
        with self._lock:
            process = self._process
            if process is not None and self._work is not None and is_stopped(process.pid):
                self._stood = process
                process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Lets a job in work finish (the process ends by itself when its input does), and forgets it."""
        with self._lock:
            process, self._process, self._work = self._process, None, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0 if self.busy else _GRACE_S)
        self._idle.set()

    def _send(self) -> None:
        """Under the lock: hands the job to a living process."""
        assert self._work is not None
        line = msgspec.json.encode(self._work.job) + b"\n"
        for _ in range(_TRIES):
            if self._process is not None and self._process.poll() is not None:
                self._died_idle, self._process = _cause(self._process), None
            if self._process is None:
                self._process = _start(self.run_folder)
                threading.Thread(
                    target=self._watch, args=(self._process,), name="checkpoint-saver", daemon=True
                ).start()
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except OSError:
                self._died_idle, self._process = _cause(self._process), None
                continue
            self._tell_of_an_idle_death()
            return
        self._give_up("the saver process does not start")

    def _tell_of_an_idle_death(self) -> None:
        if self._died_idle and self._work is not None:
            why = f"{self._died_idle} while it had nothing to do; a new one was started"
            self._outcomes.append(Outcome(id=self._work.job.id, tier="saver", ok=False, why=why))
        self._died_idle = ""

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        descriptor, rest = process.stdout.fileno(), b""
        while True:
            ready, _, _ = select.select([descriptor], [], [], self._seconds_left())
            if not ready:
                if self._overdue(process):
                    return
                continue
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._heard(msgspec.json.decode(line, type=Outcome))
        process.wait()
        self._died(process)

    def _seconds_left(self) -> float:
        work = self._work
        return 0.5 if work is None else max(0.0, min(0.5, work.since + self.timeout_s - time.monotonic()))

    def _heard(self, outcome: Outcome) -> None:
        with self._lock:
            work = self._work
            if work is None or outcome.id != work.job.id:
                return
            if outcome.tier:
                if outcome.tier in _TIERS and outcome.tier not in work.left:
                    return  # a second attempt passes what the first one had done
                work.left.discard(outcome.tier)
                self._outcomes.append(outcome)
            else:
                self._end()

    def _overdue(self, process: subprocess.Popen[bytes]) -> bool:
        """Gives a job up that takes too long; the process may hang in the kernel, so nobody waits for its end."""
        with self._lock:
            if self._process is not process:
                return True
            if self._work is None or time.monotonic() < self._work.since + self.timeout_s:
                return False
            self._process = None
            process.send_signal(signal.SIGKILL)
            self._give_up(f"not done within {self.timeout_s:g} s")
            return True

    def _died(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._process is not process:
                return
            self._process = None
            work = self._work
            stood = " (it stood stopped, and the training waited for it)" if self._stood is process else ""
            cause = _cause(process) + stood
            if work is None:
                self._died_idle = cause
                return
            if work.tries >= _TRIES:
                self._give_up(f"{cause}, {work.tries} times")
                return
            self._outcomes.append(Outcome(id=work.job.id, tier="saver", ok=False, why=f"{cause}; tried again"))
            work.tries += 1
            work.job = msgspec.structs.replace(work.job, attempt=work.tries - 1)
            self._send()

    def _give_up(self, why: str) -> None:
        assert self._work is not None
        for tier in sorted(self._work.left):
            self._outcomes.append(Outcome(id=self._work.job.id, tier=tier, ok=False, why=why))
        self._end()

    def _end(self) -> None:
        self._work = None
        self._idle.set()


def _cause(process: subprocess.Popen[bytes]) -> str:
    """Why a saver that is at its end has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    code = process.returncode
    if code is None:
        return "the saver process takes no more jobs"
    return f"the saver process was ended by {signal.Signals(-code).name}" if code < 0 else f"it exited {code}"


def _start(run_folder: Path) -> subprocess.Popen[bytes]:
    # A session of its own: a signal to the trainer's group (Ctrl-C, a supervisor's kill) must not take the save along.
    source = str(Path(headway.__file__).parent.parent)
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", SAVER, str(run_folder), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
