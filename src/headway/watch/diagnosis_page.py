"""`headway diagnose --html`: one self-contained file with the timeline, the waterfall, the ranks and the findings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway import __version__
from headway.diagnose.compare import Change, Comparison
from headway.diagnose.diagnosis import Diagnosis
from headway.diagnose.facts import DeviceFacts, Steps
from headway.diagnose.finding import Finding, top_remedies
from headway.diagnose.run_facts import RunFacts
from headway.diagnose.view import ms, short
from headway.record.files import write_atomic
from headway.watch import format as fmt
from headway.watch.curves import account_over_time, rank_map
from headway.watch.device_timeline import kinds_painted, timeline
from headway.watch.diagnosis_text import change_text, facts, gain_text
from headway.watch.palette import STEP_PAINT
from headway.watch.rank_heat import job_heat
from headway.watch.ranks import read_ranks
from headway.watch.report import account_rows, asset, fall_rows, json_for_html, page_template, when
from headway.watch.trace_palette import TRACE_PAINT

_KERNELS, _STEPS, _HOLDERS = 40, 48, 30


def write_page(path: Path, item: Diagnosis, compared: Comparison | None = None) -> None:
    """Writes the page. Everything that comes from a trace or a run is escaped.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomic(path, render_page(item, compared))


def render_page(item: Diagnosis, compared: Comparison | None = None) -> str:
    rank = item.rank
    device = rank.device() if rank else None
    return page_template("diagnosis.html.j2").render(
        d=item,
        css=asset("assets", "report.css") + asset("assets", "diagnosis.css"),
        script=asset("assets", "heat.js") + asset("assets", "diagnosis.js"),
        data=json_for_html(_data(item)),
        name=_name(item),
        tiles=list(_tiles(item, device)),
        facts=list(facts(item)),
        fall=fall_rows(item.fall) if item.fall else [],
        account=account_rows(item.account, STEP_PAINT) if item.account else [],
        wall=fmt.seconds(item.wall_ns / 1e9),
        findings=[_finding(one, item.findings) for one in item.findings if not one.within],
        remedies=[_remedy(*pair) for pair in top_remedies(item.findings, 8)],
        kinds=_kinds(device) if device else [],
        kernels=_kernels(device) if device else [],
        steps=_steps(device.steps) if device and len(device.steps.rows) > 1 else [],
        rank_rows=_rank_rows(item),
        looked_at=f"rank {rank.rank}" if rank and item.job and len(item.job.ranks) > 1 else "",
        memory=item.memory,
        holders=item.memory.holders[:_HOLDERS] if item.memory else [],
        compared=compared,
        changes=[_change(row) for row in _changes(compared)],
        now=when(time.time()),
        version=__version__,
    )


def _name(item: Diagnosis) -> str:
    if item.run is not None:
        return item.run.folder.root.resolve().name
    if item.job is not None and len(item.job.ranks) > 1:
        folders = {Path(rank.path).resolve().parent.name for rank in item.job.ranks}
        return f"{folders.pop()}: {len(item.job.ranks)} ranks" if len(folders) == 1 else f"{len(item.job.ranks)} ranks"
    return Path(item.source).name


def _data(item: Diagnosis) -> dict[str, Any]:
    """What the scripts draw."""
    rank = item.rank
    run = item.run
    return {
        "account": account_over_time(run.steps) if run else None,
        "timeline": timeline(rank, rank.device()) if rank else None,
        "kinds": kinds_painted(),
        "ranks": _run_heat(run) if run else job_heat(item.job) if item.job else None,
    }


def _run_heat(run: RunFacts) -> dict[str, Any] | None:
    return rank_map(read_ranks(run.folder, {(line.session, line.step) for line in run.steps}, run.world_size))


def _tiles(item: Diagnosis, device: DeviceFacts | None) -> Iterator[tuple[str, str, str]]:
    """The few figures of the header: name, value, what it is."""
    yield "Surely won back", fmt.percent(item.won_low), "by all findings together"
    if device is not None and device.kind == "gpu":
        of_trace = " (in its newest trace)" if item.run else ""
        yield "Utilisation", fmt.percent(device.shares.utilisation), f"as nvidia-smi would show it{of_trace}"
    if item.run is not None:
        yield "MFU", fmt.percent(item.run.mfu), "of the steps" if item.run.mfu else "the peak is unknown"
    elif device is not None and device.efficiency is not None and device.efficiency.mfu is not None:
        yield "MFU", fmt.percent(device.efficiency.mfu), f"HFU {fmt.percent(device.efficiency.hfu)}"
    if item.account is not None:
        yield "Computing", fmt.percent(item.account.share("compute")), f"of {fmt.seconds(item.wall_ns / 1e9)}"
        hidden = ""
        if device is not None and not item.run:
            overlap = device.shares.overlap
            hidden = "none in this trace" if overlap is None else f"{fmt.percent(overlap)} of it is hidden"
        bare = item.account.share("comm") + item.account.share("straggler")
        yield "Bare communication", fmt.percent(bare), hidden
    if device is not None and device.fragmentation.kernels and not item.run:
        median = f"median {device.fragmentation.median_ns / 1e3:.1f} µs"
        yield "Kernels" if device.kind == "gpu" else "Operators", f"{device.fragmentation.kernels:,}", median


def _finding(item: Finding, every: tuple[Finding, ...]) -> dict[str, Any]:
    remedy = item.proposal()
    low, high = item.gain
    return {
        "title": item.title,
        "symptom": item.symptom,
        "of_trace": item.of_trace,
        "gain": gain_text(item.gain, item.gain_known),
        "low": f"{100 * low:.3f}",
        "high": f"{100 * high:.3f}",
        "known": item.gain_known,
        "evidence": item.evidence,
        "check": item.check,
        "remedy": remedy.name,
        "change": change_text(item.change or remedy.change),
        "setting": remedy.setting,
        "within": [_finding(one, ()) for one in every if one.within == item.name],
    }


def _remedy(remedy: Any, found: list[Finding]) -> dict[str, Any]:
    return {
        "name": remedy.name,
        "gain": gain_text(remedy.gain, any(one.gain_known for one in found)),
        "change": change_text(remedy.change),
        "setting": remedy.setting,
        "check": remedy.check,
        "for": ", ".join(one.name for one in found),
    }


def _kinds(device: DeviceFacts) -> list[dict[str, Any]]:
    busy = max(1, sum(device.by_kind.values()))
    rows = []
    for kind, ns in device.by_kind.items():
        number = sum(row.count for row in device.table if row.kind == kind)
        rows.append(
            {
                "label": TRACE_PAINT[kind].label,
                "paint": TRACE_PAINT[kind],
                "share": fmt.percent(ns / busy),
                "width": f"{100 * ns / busy:.3f}",
                "seconds": ms(ns),
                "count": f"{number:,}",
            }
        )
    return rows


def _kernels(device: DeviceFacts) -> list[dict[str, Any]]:
    return [
        {
            "name": short(row.name, 90),
            "full": row.name[:1000],
            "kind": TRACE_PAINT[row.kind].label,
            "share": fmt.percent(row.share),
            "seconds": ms(row.total_ns),
            "count": f"{row.count:,}",
            "median": f"{row.median_ns / 1e3:,.1f} µs",
        }
        for row in device.table[:_KERNELS]
    ]


def _steps(steps: Steps) -> list[dict[str, Any]]:
    rows = []
    for place, row in enumerate(steps.rows[:_STEPS]):
        shares, wall = row.shares, max(1, row.shares.wall_ns)
        parts = (("compute", shares.compute_ns), ("comm", shares.exposed_comm_ns), ("copy", shares.exposed_mem_ns))
        bars, left = [], 0.0
        for path, ns in (*parts, ("unaccounted", shares.idle_ns)):
            bars.append({"left": f"{left:.3f}", "width": f"{100 * ns / wall:.3f}", "paint": STEP_PAINT[path]})
            left += 100 * ns / wall
        rows.append(
            {
                "name": row.name,
                "seconds": fmt.seconds(wall / 1e9),
                "compute": fmt.percent(shares.compute_ns / wall),
                "comm": fmt.percent(shares.exposed_comm_ns / wall),
                "idle": fmt.percent(shares.idle_ns / wall),
                "kernels": f"{row.kernels:,}",
                "mark": "slow" if place in steps.outliers else "no work" if place in steps.without_gpu else "",
                "bars": bars,
            }
        )
    return rows


def _rank_rows(item: Diagnosis) -> list[dict[str, Any]]:
    if item.run is not None or item.job is None or len(item.job.ranks) < 2:
        return []
    found = item.job.comparison
    rows = []
    for rank in item.job.ranks:
        shares = rank.device().shares
        wall = max(1, shares.wall_ns)
        doing = found.doing.get(rank.rank, {}) if found else {}
        rows.append(
            {
                "rank": rank.rank,
                "compute": fmt.percent(shares.compute_ns / wall),
                "comm": fmt.percent(shares.exposed_comm_ns / wall),
                "idle": fmt.percent(shares.idle_ns / wall),
                "last": f"{found.last_arrivals.get(rank.rank, 0):,}×" if found and found.matched else fmt.UNKNOWN,
                "waited": fmt.seconds(found.wait_ns[rank.rank] / 1e9) if found and rank.rank in found.wait_ns else "",
                "caused": fmt.seconds(found.caused_ns.get(rank.rank, 0) / 1e9) if found and found.caused_ns else "",
                "doing": ", ".join(f"{name} {fmt.seconds(ns / 1e9)}" for name, ns in list(doing.items())[:3]),
            }
        )
    return rows


def _changes(compared: Comparison | None) -> list[Change]:
    if compared is None:
        return []
    least = 0.0005 * compared.wall.ns
    return [row for row in (compared.wall, *compared.account) if max(row.ns, row.against_ns) >= least]


def _change(row: Change) -> dict[str, Any]:
    return {
        "label": STEP_PAINT[row.label].label if row.label in STEP_PAINT else row.label,
        "this": fmt.seconds(row.ns / 1e9),
        "other": fmt.seconds(row.against_ns / 1e9),
        "difference": ("+" if row.delta_ns > 0 else "") + fmt.seconds(row.delta_ns / 1e9),
        "worse": row.delta_ns > 0,
    }
