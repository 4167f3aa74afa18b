"""`headway plan --html`: one self-contained page with the plans, their accounts, the scaling curve and the frontier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway import __version__
from headway.plan.answer import Answer
from headway.plan.money import days
from headway.plan.predict import Prediction
from headway.plan.sweep import Sweep
from headway.record.files import write_atomic
from headway.watch import format as fmt
from headway.watch.palette import STEP_PAINT, Paint
from headway.watch.plot_data import Chart, Line, log_chart
from headway.watch.report import account_rows, asset, page_template, when

_BLUE, _GREY, _GREEN = (
    Paint("", "#3b6fd4", "#6b9bf2"),
    Paint("", "#b3b9c2", "#626a75"),
    Paint("", "#2e9e62", "#4cc585"),
)
_ACCOUNTS = 4


def write_plan_page(path: Path, found: Answer | None, curve: Sweep | None, title: str, reason: str = "") -> None:
    """Writes the page; `found` is None where no plan runs, and `reason` then says why. Everything is escaped.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomic(path, render_plan_page(found, curve, title, reason))


def render_plan_page(found: Answer | None, curve: Sweep | None, title: str, reason: str = "") -> str:
    best = found.plans[0] if found else None
    return page_template("plan.html.j2").render(
        css=asset("assets", "report.css") + asset("assets", "plan.css"),
        title=title,
        reason=reason,
        found=found,
        tiles=list(_tiles(found)) if found else [],
        plans=_plan_rows(found) if found else [],
        accounts=_accounts(found.plans) if found else [],
        removed=Counter(found.removed).most_common(8) if found else [],
        memory=_memory(best) if best else [],
        run_lines=found.costs[0].lines() if found and found.costs else [],
        scaling=_scaling(curve) if curve else None,
        walls=[(wall.name, wall.says) for wall in curve.walls] if curve else [],
        frontier=_frontier(found) if found and found.options else None,
        version=__version__,
        now=when(time.time()),
    )


def _tiles(found: Answer) -> Iterator[tuple[str, str, str]]:
    best = found.plans[0]
    yield "Step", fmt.seconds(best.step_s), f"{best.workload.seq:,} × {best.workload.global_batch:,} tokens"
    yield (
        "Tokens/s per GPU",
        fmt.count(best.tokens_per_s_per_gpu),
        f"{best.cluster.gpus:,} × {best.cluster.device.name}",
    )
    yield "MFU", fmt.percent(best.mfu), f"of {best.peak_name}, causal convention"
    yield "Memory", f"{best.memory.needed / 2**30:.0f} GiB", f"of {best.memory.capacity / 2**30:.0f} GiB a GPU"
    if found.costs:
        cost = found.costs[0]
        yield "Wall clock", days(cost.wall_s), f"ETTR {cost.ettr:.1%}"
        dollars = "unknown" if cost.dollars is None else f"${fmt.count(cost.dollars[1])}"
        yield "Cost", dollars, f"{cost.gpu_hours:,.0f} GPU-hours"


def _plan_rows(found: Answer) -> list[dict[str, Any]]:
    rows = []
    for rank, one in enumerate(found.plans):
        cost = found.costs[rank] if found.costs else None
        rows.append(
            {
                "where": f"{one.cluster.gpus:,} × {one.cluster.device.name}",
                "plan": one.layout.describe(),
                "step": fmt.seconds(one.step_s),
                "speed": f"{one.tokens_per_s_per_gpu:,.0f}",
                "mfu": fmt.percent(one.mfu),
                "memory": f"{one.memory.needed / 2**30:.0f} GiB",
                "days": f"{cost.wall_s / 86400:,.1f}" if cost else "",
                "dollars": f"{cost.dollars[1]:,.0f}" if cost and cost.dollars else "",
            }
        )
    return rows


def _accounts(plans: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [
        {
            "title": f"Plan {rank}:",
            "note": one.layout.describe(),
            "rows": [row for row in account_rows(one.account, STEP_PAINT) if row["label"] != "unaccounted"],
            "wall": fmt.seconds(one.step_s),
        }
        for rank, one in enumerate(plans[:_ACCOUNTS], 1)
    ]


def _memory(best: Prediction) -> list[tuple[str, str, str]]:
    """(use, GiB, width in percent of the device)."""
    capacity = best.memory.capacity
    return [
        (use, f"{size / 2**30:.1f} GiB", f"{min(100.0, 100 * size / capacity):.2f}")
        for use, size in best.memory.lines()
    ]


def _scaling(curve: Sweep) -> Chart | None:
    real = [
        (float(p.gpus), p.found.tokens_per_s, f"{p.gpus:,} GPUs: {p.found.tokens_per_s:,.0f} tokens/s, efficiency "
         f"{curve.efficiency(p):.0%}, {p.found.layout.describe()}")
        for p in curve.points if p.found
    ]  # fmt: skip
    ideal = [(gpus, curve.best_per_gpu * gpus, "") for gpus, _, _ in real]
    marks = [(wall.gpus, wall.name) for wall in curve.walls if wall.gpus]
    lines = [Line("perfect scaling", _GREY, ideal, guide=True), Line("best plan", _BLUE, real)]
    return log_chart(lines, "GPUs", "tokens/s", marks)


def _frontier(found: Answer) -> Chart | None:
    priced = [one for one in found.options if one.dollars is not None]
    edge = {id(one) for one in found.edge}
    points = [(one.wall_s / 86400, one.dollars or 0.0, one.line(), id(one) in edge) for one in priced]
    others = [(x, y, text) for x, y, text, on in points if not on]
    best = [(x, y, text) for x, y, text, on in points if on]
    lines = [Line("frontier", _GREEN, sorted(best))]
    if others:
        lines.insert(0, Line("beaten", _GREY, others))
    return log_chart(lines, "days", "dollars")
