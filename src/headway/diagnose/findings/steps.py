"""Step time that varies: which category grows in the slow steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headway.account.tree import UNACCOUNTED
from headway.diagnose import cold
from headway.diagnose.case import Case
from headway.diagnose.finding import Finding
from headway.diagnose.findings.host_sync import first_uses
from headway.diagnose.view import ms

NOTABLE = 0.03
_SLOW, _LEAST = 1.3, 4


def find(case: Case) -> Iterator[Finding]:
    setting_up = case.view.rank.host.start[first_uses(case.view)]
    rows = [
        row
        for row in case.view.device.steps.rows
        if not ((setting_up >= row.start_ns) & (setting_up < row.end_ns)).any()
    ]
    walls = [row.shares.wall_ns for row in rows]
    parts: list[Mapping[str, int]] = [
        {"compute": row.shares.compute_ns, "comm": row.shares.exposed_comm_ns, "copy": row.shares.exposed_mem_ns}
        | {f"idle.{name}": ns for name, ns in row.shares.idle.items()}
        for row in rows
    ]
    view = case.view
    yield from unstable(walls, parts, [row.name for row in rows], view.wall_ns, view.on_gpu)


def unstable(
    walls: Sequence[int], parts: Sequence[Mapping[str, int]], names: Sequence[str], wall_ns: int, on_gpu: bool = True
) -> Iterator[Finding]:
    """From the steps' lengths and accounts (ns): what slow steps take beyond the median one.

    Upper bound: all of the excess, on a CPU also what it leaves cold. Surely won: half of it, since the next slowest
    cause then shows.
    """
    if len(walls) < _LEAST:
        return
    median = float(np.median(walls))
    slow = [i for i, wall in enumerate(walls) if wall > _SLOW * median]
    excess = int(sum(walls[i] - median for i in slow))
    if not slow or excess < NOTABLE * sum(walls):
        return
    paths = sorted({path for part in parts for path in part})
    grown = {}
    for path in paths:
        typical = float(np.median([part.get(path, 0) for part in parts]))
        grown[path] = sum(parts[i].get(path, 0) - typical for i in slow)
    causes = [(path, ns) for path, ns in sorted(grown.items(), key=lambda item: -item[1]) if ns > 0.1 * excess][:3]
    within = {**_CAUSES, "idle.host": "host-busy"}.get(causes[0][0], "") if causes else ""
    # What has a finding of its own is claimed there; here it would halve that one's claim.
    mine = [(path, ns) for path, ns in causes if within or path not in _CAUSES]
    whole = sum(max(0.0, ns) for _, ns in causes)
    claims = {path: int(excess * ns / whole) for path, ns in mine} or {UNACCOUNTED: excess}
    lower = sum(claims.values()) // 2
    if not on_gpu:
        claims["caches"] = cold.after_waits(len(slow), sum(claims.values()), wall_ns)
    # What grows is only the rest that no category explains: looking at categories again would tell nothing.
    unnamed = not causes or causes[0][0] == UNACCOUNTED
    yield Finding(
        name="unstable-steps",
        title="the step time varies, and no category says why" if unnamed else "the step time varies",
        claims=claims,
        lower_ns=lower,
        wall_ns=wall_ns,
        evidence=(
            f"{len(slow)} of {len(walls)} steps take over {_SLOW}× the median of {ms(median)}: "
            + ", ".join(str(names[i]) for i in slow[:6]),
            "in them grows: " + ", ".join(f"{path} {ms(ns)}" for path, ns in causes) if not unnamed else
            f"what grows in them is outside all that is measured ({ms(excess)})",
        ),
        check="plot the step time: a period points to logging, saving or the collector; none points to data or a rank",
        remedy="find-pauses" if unnamed else "steady-steps",
        # What grows may be a finding of its own; this one then only says when.
        within=within,
        symptom="unstable step time",
    )  # fmt: skip


_CAUSES = {
    "data": "data-jitter",
    "idle.data": "data-jitter",
    "host.gc": "garbage-collection",
    "straggler": "straggler-wandering",
}
