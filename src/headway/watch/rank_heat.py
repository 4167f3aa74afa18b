"""The ranks of traced steps against each other, as the report's heat map draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.diagnose.facts import JobFacts, RankFacts, Shares

_COLUMNS, _RANKS = 96, 64
_MAPS: tuple[tuple[str, Callable[[Shares], int]], ...] = (
    ("compute", lambda part: part.compute_ns),
    ("exposed communication", lambda part: part.exposed_comm_ns),
    ("idle", lambda part: part.idle_ns),
    ("step time", lambda part: part.wall_ns),
)


def job_heat(job: JobFacts) -> dict[str, Any] | None:
    """Seconds by rank and step, and by rank and collective what it waited for the others; None for one rank."""
    if len(job.ranks) < 2:
        return None
    ranks = _most_different(job.ranks)
    columns, per_rank = _steps(ranks)
    maps = []
    for name, read in _MAPS:
        values = np.array([[read(part) for part in rows] for rows in per_rank]) / 1e9
        if np.ptp(values, axis=0).any():
            maps.append(_map(name, values))
    waits = _waits(job, [rank.rank for rank in ranks])
    if waits is not None:
        maps.insert(0, waits)
    return {
        "step": columns,
        "ranks": [rank.rank for rank in ranks],
        "hosts": ["" for _ in ranks],
        "world": len(job.ranks),
        "wall": float(np.mean([part.wall_ns for rows in per_rank for part in rows])) / 1e9,
        "maps": maps,
    }


def _most_different(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """All of them where they fit on the page, else those furthest from the mean in what they computed or waited."""
    if len(ranks) <= _RANKS:
        return list(ranks)
    table = np.array([(one.shares.compute_ns, one.shares.exposed_comm_ns) for one in (rank.device() for rank in ranks)])
    distance = np.abs(table - table.mean(axis=0)).max(axis=1)
    return [ranks[place] for place in np.sort(np.argsort(distance, kind="stable")[-_RANKS:]).tolist()]


def _steps(ranks: Sequence[RankFacts]) -> tuple[list[str], list[list[Shares]]]:
    """The steps that all ranks have; their whole windows where there is none."""
    by_name = [{row.name.rpartition("#")[2]: row.shares for row in rank.device().steps.rows} for rank in ranks]
    common = [name for name in by_name[0] if all(name in rows for rows in by_name)][:_COLUMNS]
    if not common:
        return ["window"], [[rank.device().shares] for rank in ranks]
    return common, [[rows[name] for name in common] for rows in by_name]


def _map(name: str, values: NDArray[np.float64]) -> dict[str, Any]:
    return {
        "name": name,
        "values": [[float(f"{value:.4g}") for value in line] for line in values.tolist()],
        "mean": [float(f"{value:.4g}") for value in values.mean(axis=0).tolist()],
    }


def _waits(job: JobFacts, ranks: list[int]) -> dict[str, Any] | None:
    """What each rank waited in each collective that all of them took part in."""
    found = job.comparison
    whole = [one for one in found.matched if set(ranks) <= set(one.ranks)] if found else []
    if not whole:
        return None
    whole = sorted(whole, key=lambda one: int(one.arrival.min()))
    if len(whole) > _COLUMNS:  # the ones that cost most, in their order
        kept = set(np.argsort([-int(one.wait.sum()) for one in whole])[:_COLUMNS].tolist())
        whole = [one for place, one in enumerate(whole) if place in kept]
    values = np.array([[int(one.wait[one.ranks.index(rank)]) for one in whole] for rank in ranks]) / 1e9
    return {
        **_map("waited in collectives", values),
        "columns": [f"{place} {one.name}" for place, one in enumerate(whole, 1)],
        "word": "collective",
    }
