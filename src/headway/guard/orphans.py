"""Helpers of a training that have outlived it and were stopped (SIGSTOP, a debugger): they can neither finish nor end.

A saver that runs on is left alone: it commits what was staged, under its own generation. No torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from headway.guard.processes import state_of

SAVER, KEEPER = "headway.guard.saver_main", "headway.guard.keeper"
_PROC = Path("/proc")
_STOPPED = ("T", "t")  # by a signal, by a debugger


def end_stopped(run_folder: Path) -> list[str]:
    """Kills this user's stopped savers and keepers of the run in `run_folder`; tells of each in one line.

    For a run's start, under the lock of its folder: no other training can own them. Linux; nothing elsewhere.
    """
    told = []
    for pid in _ours():
        kind = _kind(pid, run_folder)
        if kind and is_stopped(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                told.append(f"process {pid}, {kind} of a session before, stood stopped and was ended")
    return told


def is_stopped(pid: int) -> bool:
    """Whether a process stands still until somebody lets it go on. Linux; elsewhere none does."""
    return state_of(pid) in _STOPPED


def _ours() -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for entry in _PROC.iterdir():
            with contextlib.suppress(OSError):  # it may end meanwhile
                if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                    found.append(int(entry.name))
    return found


def _kind(pid: int, run_folder: Path) -> str:
    try:
        words = os.fsdecode((_PROC / str(pid) / "cmdline").read_bytes()).split("\0")
    except OSError:
        return ""
    if str(run_folder.resolve()) not in words:
        return ""
    return "the saver" if SAVER in words else "the keeper of memory checkpoints" if KEEPER in words else ""
