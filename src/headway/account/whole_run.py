"""One account for all sessions of a run: steps that a stop lost move from productive to rework."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway.account.account import Account, sum_accounts
from headway.account.tree import RUN, UNACCOUNTED


@dataclass(frozen=True)
class SessionTime:
    """A session's run account as last heard of (`unaccounted` included), and the nanoseconds of its lost steps."""

    run_ns: dict[str, int]
    lost_ns: int = 0

    def account(self) -> Account:
        parts: dict[str, Any] = {path: ns for path, ns in self.run_ns.items() if path != UNACCOUNTED}
        moved = min(self.lost_ns, parts.get("productive", 0))
        if moved:
            parts["productive"] -= moved
            parts["rework"] = parts.get("rework", 0) + moved
        return Account.close(RUN, sum(self.run_ns.values()), parts)


def whole_run(sessions: Iterable[SessionTime]) -> Account | None:
    """Sums the sessions' wall clocks. The time between two sessions belongs to nobody and is not in it."""
    accounts = [session.account() for session in sessions if session.run_ns]
    return sum_accounts(accounts) if accounts else None
