"""The waterfall: from the FLOPs that were paid for down to the FLOPs that trained the model, each loss in turn.

The rows are closed: the losses and the useful FLOPs sum to the top. Where the device's peak is unknown the same
picture is drawn in seconds, and the step from seconds to FLOPs ("below peak") is left out and said so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.account.account import Account
from headway.account.events import Flops
from headway.account.tree import UNACCOUNTED

_RUN_LOSSES = {
    "startup": "start-up",
    "compile": "compilation, warm-up",
    "checkpoint_stall": "checkpoint stall",
    "evaluation": "evaluation",
    "downtime": "downtime",
    "rework": "rework",
    UNACCOUNTED: "unaccounted (run)",
}
_STEP_LOSSES = {
    "data": "waiting for data",
    "host": "host",
    "comm": "exposed communication",
    "bubble": "pipeline bubble",
    "straggler": "waiting for ranks",
    "copy": "copies",
    UNACCOUNTED: "unaccounted (step)",
}


@dataclass(frozen=True)
class Row:
    """One bar. share is of the top, 0 to 1; left is what remains below this row, 0 to 1."""

    label: str
    path: str
    share: float
    left: float
    seconds: float


@dataclass(frozen=True)
class Waterfall:
    """rows[0] is the whole, the last row what became a parameter update."""

    rows: tuple[Row, ...]
    unit: str
    top: float
    peak_known: bool

    @property
    def useful_share(self) -> float:
        return self.rows[-1].share


def waterfall(run: Account, step: Account, flops: Flops, peak_flops: float | None) -> Waterfall:
    """Builds the waterfall of a run.

    Args:
        run: the run's account (wall clock of one rank; the ranks run side by side).
        step: the sum of the step accounts of the steps that count.
        flops: FLOPs of those steps, over all ranks.
        peak_flops: FLOP/s of all devices together, or None where it is unknown.

    Raises:
        ValueError: more FLOPs than the compute time can hold at this peak: the peak or the FLOPs are wrong.
    """
    wall_s = run.wall_ns / 1e9
    losses = [(label, path, run.total(path) / 1e9) for path, label in _RUN_LOSSES.items()]
    productive_s = run.total("productive") / 1e9
    step_ns = step.wall_ns - step.total("checkpoint")
    per_step_ns = productive_s / step_ns if step_ns else 0.0
    losses += [(label, f"step.{path}", step.total(path) * per_step_ns) for path, label in _STEP_LOSSES.items()]
    compute_s = step.total("compute") * per_step_ns
    losses += list(_compute_losses(compute_s, flops, peak_flops))
    unit, top = ("FLOPs", wall_s * peak_flops) if peak_flops else ("seconds", wall_s)
    return Waterfall(tuple(_rows(losses, wall_s, unit, peak_flops)), unit, top, bool(peak_flops))


def _compute_losses(compute_s: float, flops: Flops, peak_flops: float | None) -> Iterator[tuple[str, str, float]]:
    """What the compute time holds besides useful FLOPs, in seconds at peak (or in seconds as they passed)."""
    computed = flops.useful + flops.padding + flops.recompute
    if not computed:
        yield "compute", "compute", compute_s
        return
    rate = peak_flops or (computed / compute_s if compute_s else float("inf"))
    slow_s = compute_s - computed / rate
    if peak_flops and slow_s < -1e-6 * compute_s:
        raise ValueError(
            f"{computed / compute_s:.3g} FLOP/s were computed, more than the peak of {peak_flops:.3g}: "
            "measure the peak again (`headway bench peak`) or correct `hardware.peak_flops`"
        )
    if peak_flops:
        yield "kernels below peak", "compute.below_peak", max(0.0, slow_s)
    yield "recompute", "flops.recompute", flops.recompute / rate
    yield "padding", "flops.padding", flops.padding / rate


def _rows(losses: Sequence[tuple[str, str, float]], wall_s: float, unit: str, peak: float | None) -> Iterator[Row]:
    yield Row("purchased peak FLOPs" if peak else "wall clock", "top", 1.0, 1.0, wall_s)
    left = 1.0
    for label, path, seconds in losses:
        share = seconds / wall_s if wall_s else 0.0
        left -= share
        if seconds > 0:
            yield Row(label, path, share, max(0.0, left), seconds)
    yield Row("useful FLOPs" if peak else "useful compute", "useful", max(0.0, left), 0.0, max(0.0, left) * wall_s)


def render(fall: Waterfall, width: int = 44) -> list[str]:
    """The waterfall as lines of plain text: label, share, bar hanging where the row before it ended."""
    scale = width / 1.0
    label_width = max(len(row.label) for row in fall.rows)
    lines = []
    for row in fall.rows:
        start = round(row.left * scale) if row.path not in ("top", "useful") else 0
        length = max(1, round((row.left + row.share) * scale) - start) if row.path not in ("top", "useful") else 0
        bar = "█" * max(1, round(row.share * scale)) if row.path in ("top", "useful") else " " * start + "░" * length
        lines.append(f"{row.label:>{label_width}} {_percent(row.share):>7} {_seconds(row.seconds):>9}  {bar}")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "<0.1 %"


def _seconds(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 36000 else f"{seconds / 3600:.1f} h"
