"""What the ledger of a run says together: by cause, by host, how often it failed and what that cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from headway.account.account import Account
from headway.account.events import Incident
from headway.account.tree import RUN
from headway.record.folder import RunFolder
from headway.record.sessions import read_history
from headway.watch.summary import SessionFacts, Summary, read_summary

# A host is a lemon when so large a share of the incidents would come to it by chance less often than this.
LEMON_P = 0.01
LEMON_LEAST = 3


@dataclass(frozen=True)
class Group:
    """Incidents that have one thing in common. seconds_lost and steps_lost are sums over them."""

    name: str
    count: int
    steps_lost: int
    seconds_lost: float
    first_step: int
    last_step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Overview:
    """All incidents of a run. Times in seconds, None where there is nothing to take the mean of.

    failures: incidents after which the run had to start again (or stopped). mtbf_s: the run's wall clock over their
    number. mttr_s: mean of detection and recovery. ettr: productive share of the wall clock. lost: the run account's
    rework, downtime and stall, in seconds; rest: all of it that is not productive, the largest first. restarts: the
    sessions after the first, restart_s their start-up and compilation.
    """

    run: str
    incidents: tuple[Incident, ...]
    by_cause: tuple[Group, ...]
    by_host: tuple[Group, ...]
    lemons: tuple[str, ...]
    failures: int
    mtbf_s: float | None
    mttr_s: float | None
    ettr: float | None
    wall_s: float
    lost: dict[str, float]
    bad_lines: int
    rest: dict[str, float] = field(default_factory=dict)
    restarts: int = 0
    restart_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["incidents"] = msgspec.to_builtins(self.incidents)
        return plain


def read_overview(run: RunFolder) -> Overview:
    """Reads the ledger and the account of a run folder."""
    summary = read_summary(run, read_history(run))
    return overview(summary)


def overview(summary: Summary) -> Overview:
    incidents = tuple(_with_restarts(summary.incidents, summary.sessions))
    failures = [item for item in incidents if is_failure(item)]
    repairs = [(item.detect_s or 0.0) + item.recover_s for item in failures if item.recover_s is not None]
    account = summary.run_account
    wall = account.wall_ns / 1e9 if account is not None else 0.0
    return Overview(
        run=summary.run,
        incidents=incidents,
        by_cause=groups(incidents, lambda item: item.fault),
        by_host=groups(incidents, lambda item: item.host),
        lemons=lemons(failures),
        failures=len(failures),
        mtbf_s=wall / len(failures) if failures and wall else None,
        mttr_s=sum(repairs) / len(repairs) if repairs else None,
        ettr=summary.goodput,
        wall_s=wall,
        lost=_lost(account),
        bad_lines=len(summary.bad_lines.get("incidents.jsonl", ())),
        rest=_rest(account),
        restarts=max(0, len(summary.sessions) - 1),
        restart_s=_restart_s(account, summary.sessions),
    )


def _restart_s(account: Account | None, sessions: Sequence[SessionFacts]) -> float:
    """A supervisor's restarts count their start-up as downtime."""
    supervised = account.total("downtime.restart") if account is not None else 0
    return (supervised + sum(session.begin_ns for session in sessions[1:])) / 1e9


def _with_restarts(incidents: Iterable[Incident], sessions: Sequence[SessionFacts]) -> Iterator[Incident]:
    """With what the restart took, where nobody was left to measure it: a start that finds the session before killed
    writes that down before it has made a step, and knows only the steps that were lost."""
    left = list(incidents)
    for item in left:
        after = next((session for session in sessions[1:] if session.started >= item.time), None)
        last = after is not None and not any(item.time < other.time <= after.started for other in left)
        if after is None or not last or item.recover_s is not None or not item.action.startswith("restarted"):
            yield item
            continue
        took = after.gap_s + after.begin_ns / 1e9
        yield msgspec.structs.replace(item, recover_s=took, seconds_lost=item.seconds_lost + took)


def is_failure(incident: Incident) -> bool:
    """Whether the run had to start again, or ended, because of it."""
    return incident.recover_s is not None or incident.action.startswith(("restarted", "stopped"))


def groups(incidents: Iterable[Incident], key: Callable[[Incident], str]) -> tuple[Group, ...]:
    """Groups by `key`, the costliest first."""
    found: dict[str, list[Incident]] = defaultdict(list)
    for incident in incidents:
        found[key(incident)].append(incident)
    return tuple(sorted((_group(name, items) for name, items in found.items()), key=_cost))


def _cost(group: Group) -> tuple[float, int, str]:
    return -group.seconds_lost, -group.count, group.name


def _group(name: str, items: Sequence[Incident]) -> Group:
    return Group(
        name,
        len(items),
        sum(item.steps_lost for item in items),
        sum(item.seconds_lost for item in items),
        min(item.step for item in items),
        max(item.step for item in items),
        tuple(sorted({item.rank for item in items if item.rank is not None})),
    )


def lemons(failures: Sequence[Incident]) -> tuple[str, ...]:
    """Hosts that fail far more often (by chance less often than `LEMON_P`, corrected for their number)."""
    hosts = sorted({item.host for item in failures})
    if len(hosts) < 2:
        return ()
    counts = {host: sum(item.host == host for item in failures) for host in hosts}
    limit = LEMON_P / len(hosts)
    return tuple(
        host
        for host in hosts
        if counts[host] >= LEMON_LEAST and _tail(len(failures), counts[host], 1 / len(hosts)) < limit
    )


def _tail(trials: int, at_least: int, share: float) -> float:
    """P(X ≥ at_least) of a binomial."""
    return math.fsum(
        math.comb(trials, count) * share**count * (1 - share) ** (trials - count)
        for count in range(at_least, trials + 1)
    )


def _lost(account: Account | None) -> dict[str, float]:
    if account is None:
        return {}
    paths = ("rework", "downtime.detect", "downtime.restart", "downtime.reload", "checkpoint_stall")
    return {path: account.total(path) / 1e9 for path in paths if account.total(path)}


def _rest(account: Account | None) -> dict[str, float]:
    if account is None:
        return {}
    found = {path: account.total(path) / 1e9 for path in RUN.tops() if path != "productive"}
    return dict(sorted(((path, took) for path, took in found.items() if took), key=lambda one: -one[1]))
