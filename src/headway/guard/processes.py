"""One rank as a process: executed as a command, or forked from this one, which has the libraries loaded already.

A fork is ready in milliseconds where a new interpreter needs seconds to import torch. It is safe only from a process
with one thread and no device context: what other threads held locked stays locked in the child for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from headway.guard.garbage import is_kept, keep

_PR_SET_PDEATHSIG = 1

Entry = Callable[[Sequence[str]], object]
"""What a forked rank runs: takes the arguments, returns or raises SystemExit like a command's main function."""


class Process(Protocol):
    """A started rank. `returncode` as in subprocess: None while it runs, negative for a signal."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Forked:
    """A forked child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        code = self._reap(0)
        assert code is not None
        return code

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # somebody else took its status
                self.returncode = 1
                return 1
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass(frozen=True)
class Start:
    """How ranks are started: `command` is executed, or `entry` called in a fork, with `argv`."""

    argv: Sequence[str]
    command: Sequence[str] = (sys.executable, "-m", "headway")
    entry: Entry | None = None

    def rank(self, settings: Mapping[str, str], log: Path | None) -> Process:
        """Starts one rank in a process group of its own that dies with this process (Linux).

        `log`: where its output is appended, None for our own stdout and stderr.
        """
        if self.entry is not None and can_fork():
            return _fork(self.entry, self.argv, settings, log)
        return _execute([*self.command, *self.argv], settings, log)


def can_fork() -> bool:
    """Whether this process may fork ranks: Linux, one thread (Python's and the system's), no CUDA in use."""
    if sys.platform != "linux" or threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def _execute(command: Sequence[str], settings: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    output: IO[bytes] | None = None if log is None else log.open("ab")
    try:
        return subprocess.Popen(
            command,
            env=dict(settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=die_with_parent(),
        )
    finally:
        if output is not None:
            output.close()


def _fork(entry: Entry, argv: Sequence[str], settings: Mapping[str, str], log: Path | None) -> Forked:
    sys.stdout.flush()
    sys.stderr.flush()  # or the child would write what waits in the buffers once more
    ask = die_with_parent()
    kept = is_kept()
    gc.freeze()  # else the child's first collection would copy all that it shares with this process
    pid = os.fork()
    if pid:
        if not kept:
            gc.unfreeze()
        return Forked(pid)
    code = 1
    try:
        keep()
        _become_rank(ask, settings, log)
        sys.argv = [sys.argv[0], *argv]
        code = _exit_code(entry, argv)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)  # never back into the parent's code, nor through its exit handlers


def _become_rank(ask: Callable[[], None] | None, settings: Mapping[str, str], log: Path | None) -> None:
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if ask is not None:
        ask()
    os.environ.clear()
    os.environ.update(settings)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
    torch = sys.modules.get("torch")
    if torch is not None:  # libgomp read the variable when the parent loaded it
        torch.set_num_threads(max(1, int(settings.get("OMP_NUM_THREADS", "1") or 1)))


def _exit_code(entry: Entry, argv: Sequence[str]) -> int:
    try:
        result = entry(argv)
    except SystemExit as end:
        result = end.code
        if isinstance(result, str):
            print(result, file=sys.stderr)
            return 1
    return result if isinstance(result, int) else 0


def die_with_parent() -> Callable[[], None] | None:
    """A function for the new process that asks the kernel for SIGKILL when this process ends; None where it cannot."""
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


def in_child(work: Callable[[], int]) -> int:
    """Runs `work` in a forked child, so that threads it starts are not ours; returns what it returned."""
    child = _fork(lambda argv: work(), [], dict(os.environ), None)
    return child.wait()


def state_of(pid: int) -> str:
    """The letter that the system gives a process's state ("T": stopped by a signal); empty where it does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
