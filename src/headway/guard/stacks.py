"""What a hung rank is doing: written by the rank itself on a signal, or read by py-spy where that is installed."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path

from headway.guard.beacon import STACK_SIGNAL, stack_path
from headway.guard.hang import Hang
from headway.guard.processes import state_of
from headway.guard.waiting import Rank

_STACK_WAIT_S = 0.5
_FRAMES = 3


def with_stack(hang: Hang, folder: Path, rank: Rank) -> Hang:
    """The hang with what the rank's main thread was doing: from py-spy where it is, else written by the rank itself."""
    if state_of(rank.process.pid) == "T":
        return replace(hang, evidence=f"{hang.evidence}; the process is stopped (SIGSTOP)")
    frames = _frames(folder, rank)
    told = f"{hang.evidence}; it is in {' < '.join(frames)}" if frames else hang.evidence
    return replace(hang, evidence=told)


def _frames(folder: Path, rank: Rank) -> list[str]:
    path = stack_path(folder, rank.rank)
    if not path.is_file():  # no handler is installed: the signal would kill it
        return []
    rank.send(STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_WAIT_S
    text = ""
    while time.monotonic() < deadline and "most recent call first" not in text.rpartition("Current thread")[2]:
        time.sleep(0.02)
        text = path.read_text(errors="replace")
    text = text or _py_spy(rank.process.pid)
    main = text.rpartition("Current thread")[2] or text
    lines = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    return [_short(line) for line in lines[:_FRAMES]]


def _short(line: str) -> str:
    # File "/…/torch/distributed/x.py", line 12 in f
    path, _, rest = line.removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{function} ({Path(path).name}:{number})"


def _py_spy(pid: int) -> str:
    try:
        done = subprocess.run(
            ["py-spy", "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
