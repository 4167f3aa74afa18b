"""Points at which a test may kill the process, so that every moment of a save can be tried.

`HEADWAY_CRASH_AT=phase` or `HEADWAY_CRASH_AT=phase@step` makes the process kill itself with SIGKILL there: no handler,
no cleanup, no flush, exactly as when a machine loses its process. Unset (always, outside tests) it costs one lookup.
Phases after `staged` run in the saver process; `…+trainer` there kills the process that trains first. `…+stop` stops
the process (SIGSTOP) instead, as a disk that hangs would.
"""

from __future__ import annotations

import os
import signal
from typing import Literal, get_args

VARIABLE = "HEADWAY_CRASH_AT"
Phase = Literal[
    "before-stage",
    "mid-stage",
    "staged",
    "memory-before-manifest",
    "memory-before-publish",
    "memory-after-publish",
    "before-write",
    "mid-write",
    "before-manifest",
    "before-publish",
    "after-publish",
    "mid-upload",
    "before-latest",
    "mid-prune",
]

trainer: int = 0
"""In the saver: the process that trains."""


def crash_point(phase: Phase, step: int) -> None:
    """Kills this process if HEADWAY_CRASH_AT names this phase (and this step, when it names one).

    Raises ValueError for a phase that does not exist: an injection that silently never fires proves nothing.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    wanted, _, also = wanted.partition("+")
    name, _, at = wanted.partition("@")
    if name not in get_args(Phase):
        raise ValueError(f"{VARIABLE}={wanted}: the phases are {', '.join(get_args(Phase))}")
    if name == phase and (not at or int(at) == step):
        if also == "trainer" and trainer:
            os.kill(trainer, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP if also == "stop" else signal.SIGKILL)
