"""How a generation ended on one machine, as plain data: it may have to be told to another one."""

from __future__ import annotations

import msgspec

from headway.guard.deaths import Death


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Times are of this machine's clocks.

    code: the final exit code (0, 75 with the state saved, 2 for a user's mistake, …), None where another generation may
    follow. death: what it died of; None when it did not, or was ended because of another machine; with a code, what the
    ranks here ended with on purpose (a mistake, a save that failed). why: the words for an end that is neither clean
    nor a death. cut: rank 0 was here, and was killed by us with its session open. failed_at: seconds
    since the epoch at which the first rank here failed. furthest: the newest step of any rank here. exit_code: of the
    supervisor, should the run stop here. detected_ns: monotonic. link: a file that says more, below the run folder.
    """

    generation: int
    code: int | None
    death: Death | None = None
    failed_at: float = 0.0
    furthest: int = 0
    exit_code: int = 1
    detected_ns: int = 0
    link: str = ""
    why: str = ""
    cut: bool = False
