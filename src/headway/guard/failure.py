"""How a rank tells its launcher why it ends, with the time: which failure came first cannot be seen from outside.

When one rank raises, the others fail too, in their next collective, and often leave sooner than the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from headway.account.errors import UserError

VARIABLE = "HEADWAY_FAILURE_FILE"


@dataclass(frozen=True, slots=True)
class RecordedFailure:
    """`at`: seconds since the epoch. `user`: the message is one line for the user, not a bug. `rank`: whose fault it
    is, where the exception says so (its `rank` attribute); with `collective` all ranks raise it, and None means that
    nobody can be named."""

    at: float
    user: bool
    message: str
    rank: int | None = None
    collective: bool = False


def record_failure(problem: BaseException) -> None:
    """Call it first thing where an exception ends the process; the first call counts. No launcher: nothing happens."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    message = str(problem) if isinstance(problem, UserError) else f"{type(problem).__name__}: {problem}"
    record = {"at": time.time(), "user": isinstance(problem, UserError), "message": message}
    record |= {"rank": getattr(problem, "rank", None), "collective": hasattr(problem, "rank")}
    # The process is dying of something else: a full disk must not hide that.
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as stream:
        json.dump(record, stream)


def read_failure(path: Path) -> RecordedFailure | None:
    """What a rank recorded; None if it recorded nothing (killed), or died while writing."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rank = record.get("rank")
        return RecordedFailure(
            float(record["at"]),
            bool(record["user"]),
            str(record["message"]),
            None if rank is None else int(rank),
            bool(record.get("collective")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
