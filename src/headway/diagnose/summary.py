"""Facts as lines for the terminal and as plain values for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from headway.diagnose.facts import Damage, DeviceFacts, JobFacts


def lines(job: JobFacts) -> list[str]:
    """What a person reads: window, shares, idle classes, kernels, ranks, and what is missing."""
    text: list[str] = []
    for rank in job.ranks:
        text.append(f"{rank.path}: rank {rank.rank} ({rank.rank_source})")
        text += _damage(rank.damage)
        for device in rank.devices:
            text += _device(device)
    if job.comparison is not None:
        found = job.comparison
        if found.refused:
            text.append(f"ranks are not compared: {found.refused}")
        for culprit, times in sorted(found.last_arrivals.items(), key=lambda item: -item[1]):
            cost = found.caused_ns.get(culprit, 0) / 1e6
            doing = ", ".join(f"{name} {ns / 1e6:.1f} ms" for name, ns in list(found.doing[culprit].items())[:3])
            text.append(
                f"rank {culprit} came last {times} times; the others waited {cost:.1f} ms each; it did: {doing}"
            )
    return text + [f"note: {note}" for note in job.notes]


def _damage(damage: Damage) -> list[str]:
    lost = ", ".join(f"{count} {reason}" for reason, count in damage.lost.items())
    found = [part for part in (damage.truncated, f"lost: {lost}" if lost else "") if part]
    return [f"  partial answer: {'; '.join(found)}; {damage.kept:,} events kept"] if found else []


def _device(device: DeviceFacts) -> list[str]:
    shares, wall = device.shares, max(device.shares.wall_ns, 1)
    rows = [("compute", shares.compute_ns), ("exposed communication", shares.exposed_comm_ns)]
    rows += [("exposed copies", shares.exposed_mem_ns), ("idle", shares.idle_ns)]
    rows += [(f"  {name}", ns) for name, ns in shares.idle.items() if ns]
    overlap = "no communication" if shares.overlap is None else f"overlap {shares.overlap:.1%}"
    cut = device.fragmentation
    return [
        f"  {device.kind} {device.index} {device.name}: window {wall / 1e6:.3f} ms ({device.window.text})",
        *(f"    {name:<24}{ns / 1e6:>12.3f} ms {ns / wall:>7.1%}" for name, ns in rows),
        f"    utilisation as nvidia-smi would show it {shares.utilisation:.1%}; {overlap}",
        f"    {cut.kernels:,} kernels, median {cut.median_ns / 1000:.1f} µs, {cut.short_by_count:.0%} under 10 µs",
        *(
            f"    {row.total_ns / 1e6:>12.3f} ms {row.count:>7,} {row.kind:<12}{row.name[:60]}"
            for row in device.table[:8]
        ),
        *(f"    note: {note}" for note in device.notes),
    ]


def to_dict(job: JobFacts) -> dict[str, Any]:
    """Plain values, without the event columns; times in ns."""
    ranks = []
    for rank in job.ranks:
        devices = [
            {
                "kind": device.kind,
                "index": device.index,
                "name": device.name,
                "window": asdict(device.window),
                "shares": {**asdict(device.shares), "utilisation": device.shares.utilisation},
                "account": device.account.to_dict(),
                "by_kind": dict(device.by_kind),
                "kernels": [asdict(row) for row in device.table[:50]],
                "fragmentation": asdict(device.fragmentation),
                "steps": asdict(device.steps),
                "notes": list(device.notes),
            }
            for device in rank.devices
        ]
        ranks.append({"path": rank.path, "rank": rank.rank, "damage": asdict(rank.damage), "devices": devices})
    found = job.comparison
    comparison = None
    if found is not None:
        comparison = {
            "matched": len(found.matched),
            "unmatched": found.unmatched,
            "refused": found.refused,
            "last_arrivals": dict(found.last_arrivals),
            "wait_ns": dict(found.wait_ns),
            "caused_ns": dict(found.caused_ns),
            "offset_ns": dict(found.offset_ns),
            "doing": {rank: dict(what) for rank, what in found.doing.items()},
        }
    return {"ranks": ranks, "comparison": comparison, "comm_names": list(job.comm_names), "notes": list(job.notes)}
