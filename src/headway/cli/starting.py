"""SIGTERM while a run starts: no step is made, nothing is to be saved, and a scheduler must hear 75 to start it again.

Imports nothing of ours: it is in force before the libraries are loaded, which takes most of a start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

EXIT = 75
_LINE = "headway: stopped by SIGTERM during the start: nothing is lost, the same command goes on\n"
_owner = 0


def answer_sigterm(arguments: list[str]) -> None:
    """From now on SIGTERM ends this process with 75 and a line, where `arguments` start a run.

    Not in a rank whose launcher says so for all, nor where the signal has another answer already.
    """
    global _owner
    runs = not {"train", "launch"}.isdisjoint(arguments[:2])
    if runs and "HEADWAY_LAUNCHER" not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _owner = os.getpid()
        signal.signal(signal.SIGTERM, _answer)


def start_is_over() -> None:
    """From now on the system's own answer, also where somebody puts ours back later."""
    global _owner
    _owner = 0
    if signal.getsignal(signal.SIGTERM) is _answer:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave() -> None:
    """Says it and ends this process at once: whatever it was loading may wait for others."""
    with contextlib.suppress(Exception):  # we may have come in the middle of another write
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, _LINE.encode())
    os._exit(EXIT)


def _answer(number: int, _frame: FrameType | None) -> None:
    if os.getpid() == _owner:
        leave()
    signal.signal(number, signal.SIG_DFL)  # a forked child that was to be ended, or the start is over
    os.kill(os.getpid(), number)
