"""What must add up in a run folder, checked when it is read. A figure that does not is named, never smoothed over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from headway.account.account import Account, NotClosed, sum_accounts
from headway.account.events import RankLine, StepLine
from headway.account.tree import STEP
from headway.record.sessions import History, Session

_SHOWN = 3


def add_up(lines: Iterable[StepLine | RankLine]) -> tuple[Account | None, list[str]]:
    """The sum of the lines' step accounts, and what was wrong with those that had to be left out.

    Lines that saw the same categories are summed first, so that a million steps cost one pass.
    """
    groups: dict[frozenset[str], Counter[str]] = {}
    walls: Counter[frozenset[str]] = Counter()
    wrong = []
    for line in lines:
        reason = not_closed(line)
        if reason:
            wrong.append(f"step {line.step:,} (session {line.session}): {reason}")
            continue
        seen = frozenset(line.account)
        groups.setdefault(seen, Counter()).update(line.account)
        walls[seen] += line.wall_ns
    accounts = [Account(STEP, walls[seen], dict(parts)) for seen, parts in groups.items() if walls[seen]]
    total = sum_accounts(accounts) if accounts else None
    return total, shortened(wrong, "step account does not close and is left out of the sum: ")


def not_closed(line: StepLine | RankLine) -> str:
    """Why a line's account is not a closed one; empty when it is."""
    if not line.account:
        return "it has no account"
    try:
        Account(STEP, line.wall_ns, line.account)
    except (NotClosed, KeyError) as error:
        return str(error.args[0])
    return ""


def shortened(items: Sequence[str], what: str) -> list[str]:
    """The first few problems of a kind, and the number of the others."""
    rows = [what + item for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        rows.append(f"{what}{len(items) - _SHOWN:,} more like these")
    return rows


def problems_of(history: History, kept: Sequence[StepLine]) -> list[str]:
    """Everything in metrics.jsonl that contradicts itself, one line each."""
    found = []
    for session in history.sessions:
        found += _session_problems(session)
    found += _holes(history, kept)
    over = [f"step {line.step:,} says {line.mfu:.0%}" for line in kept if line.mfu is not None and line.mfu > 1]
    return found + shortened(over, "MFU over 100 %: the peak or the FLOPs are wrong: ")


def _session_problems(session: Session) -> list[str]:
    number = session.start.session
    found = []
    if session.start_lost:
        found.append(f"session {number}: its start line is damaged; device, ranks and peak are unknown")
    twice = [step for step, n in Counter(line.step for line in session.steps).items() if n > 1]
    found += shortened(
        [f"step {step:,}" for step in twice], f"session {number} did a step twice, the last copy counts: "
    )
    if session.end is not None and sum(session.end.run_ns.values()) != session.end.wall_ns:
        off_s = (session.end.wall_ns - sum(session.end.run_ns.values())) / 1e9
        found.append(f"session {number}: the run account does not close, it is {off_s:.3f} s off the wall clock")
    run_ns = run_ns_of(session)
    stepped = sum(stepped_ns(line) for line in session.steps)
    excess_s = (run_ns.get("productive", 0) - stepped) / 1e9
    if excess_s > 0 and not session.start_lost:
        found.append(f"session {number}: productive time exceeds its steps' wall clocks by {excess_s:.3f} s")
    return found


def stepped_ns(line: StepLine) -> int:
    """What the run account takes for a step's own time: its wall clock without the checkpoint's share, a stall."""
    return line.wall_ns - line.account.get("checkpoint", 0)


def run_ns_of(session: Session) -> dict[str, int]:
    """The session's run account as last heard of: its end line's, else its last step's."""
    if session.end is not None:
        return session.end.run_ns
    return session.steps[-1].run_ns if session.steps else {}


def _holes(history: History, kept: Sequence[StepLine]) -> list[str]:
    if not kept:
        return []
    first = history.sessions[0].start.resumed_from + 1
    have = {line.step for line in kept}
    missing = [step for step in range(first, kept[-1].step) if step not in have]
    return shortened(
        [f"step {step:,}" for step in missing], "a step has no line, its time and tokens are in no total: "
    )
