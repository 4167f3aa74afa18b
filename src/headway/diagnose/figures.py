"""What the terminal prints of a trace, as plain values for `--json`: utilisation, overlap, kernels, steps, ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from headway.diagnose.facts import DeviceFacts, JobFacts, RankFacts

KERNELS = 40


def trace_figures(job: JobFacts, rank: RankFacts) -> dict[str, Any]:
    """The rank that was looked at closely, and all ranks side by side. Times in ns, shares 0 to 1."""
    device = rank.device()
    shares = device.shares
    return {
        "rank": rank.rank,
        "device_kind": device.kind,
        "utilisation": shares.utilisation if device.kind == "gpu" else None,
        "compute_ns": shares.compute_ns,
        "exposed_comm_ns": shares.exposed_comm_ns,
        "exposed_mem_ns": shares.exposed_mem_ns,
        "idle_ns": shares.idle_ns,
        "comm_ns": shares.comm_ns,
        "overlap": shares.overlap,
        "fragmentation": dataclasses.asdict(device.fragmentation),
        "kinds": dict(device.by_kind),
        "kernels": [dataclasses.asdict(row) for row in device.table[:KERNELS]],
        "kernels_left_out": max(0, len(device.table) - KERNELS),
        "steps": _steps(device),
        "ranks": [_rank(job, one) for one in job.ranks],
        "ranks_refused": job.comparison.refused if job.comparison else "",
        "collectives": {
            "matched": len(job.comparison.matched) if job.comparison else 0,
            "unmatched": job.comparison.unmatched if job.comparison else 0,
        },
        "damage": [
            {"path": one.path, "kept": one.damage.kept, "lost": dict(one.damage.lost),
             "mended": dict(one.damage.mended), "truncated": one.damage.truncated}
            for one in job.ranks
        ],
    }  # fmt: skip


def _steps(device: DeviceFacts) -> dict[str, Any]:
    steps = device.steps
    return {
        "median_ns": steps.median_ns,
        "spread": steps.spread,
        "outliers": list(steps.outliers),
        "without_gpu": list(steps.without_gpu),
        "rows": [
            {"name": row.name, "wall_ns": row.shares.wall_ns, "compute_ns": row.shares.compute_ns,
             "exposed_comm_ns": row.shares.exposed_comm_ns, "exposed_mem_ns": row.shares.exposed_mem_ns,
             "idle": {name: ns for name, ns in row.shares.idle.items() if ns}, "kernels": row.kernels}
            for row in steps.rows
        ],
    }  # fmt: skip


def _rank(job: JobFacts, rank: RankFacts) -> dict[str, Any]:
    found, shares = job.comparison, rank.device().shares
    known = found is not None and not found.refused
    return {
        "rank": rank.rank,
        "path": rank.path,
        "wall_ns": shares.wall_ns,
        "compute_ns": shares.compute_ns,
        "exposed_comm_ns": shares.exposed_comm_ns,
        "idle_ns": shares.idle_ns,
        "last": found.last_arrivals.get(rank.rank, 0) if found and known else None,
        "waited_ns": found.wait_ns.get(rank.rank) if found and known else None,
        "caused_ns": found.caused_ns.get(rank.rank) if found and known else None,
        "clock_offset_ns": found.offset_ns.get(rank.rank) if found and known else None,
        "doing": dict(found.doing.get(rank.rank, {})) if found and known else {},
    }
