"""Step by step: the closed split of each, their spread, outliers, and steps in which the device did nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.account.intervals import measure
from headway.diagnose.facts import Gaps, GpuEvents, Shares, StepRow, Steps, Window
from headway.diagnose.gaps import idle_by_class
from headway.diagnose.shares import of_events
from headway.diagnose.window import HostStep

_OUTLIER = 1.5


def shares_of(events: GpuEvents, gaps: Gaps, start: int, end: int) -> Shares:
    """The closed split of [start, end), any part of the window the gaps were explained in."""
    parts = of_events(events, start, end)
    return Shares(
        wall_ns=end - start,
        compute_ns=measure(parts.compute),
        exposed_comm_ns=measure(parts.exposed_comm),
        exposed_mem_ns=measure(parts.exposed_mem),
        idle_ns=measure(parts.idle),
        idle=idle_by_class(gaps, start, end),
        comm_ns=measure(parts.comm),
        mem_ns=measure(parts.mem),
        overlap_ns=parts.overlap_ns,
    )


def step_table(events: GpuEvents, gaps: Gaps, steps: Sequence[HostStep], window: Window) -> Steps:
    """Steps that lie in the window: each from its start to the next one's, the last to the window's end, so that the
    steps of a window of steps sum to it."""
    mine = [step for step in steps if step.start >= window.start_ns and step.end <= window.end_ns]
    if not mine:
        return Steps()
    edges = [step.start for step in mine] + [window.end_ns if window.source == "steps" else mine[-1].end]
    rows = []
    for step, start, end in zip(mine, edges, edges[1:], strict=False):
        kernels = int(((events.start >= start) & (events.start < end)).sum())
        rows.append(StepRow(step.name, start, end, shares_of(events, gaps, start, end), kernels))
    lengths = np.array([step.end - step.start for step in mine])
    median = float(np.median(lengths))
    return Steps(
        rows=tuple(rows),
        median_ns=int(median),
        spread=float((lengths.max() - lengths.min()) / median) if median else 0.0,
        outliers=tuple(np.flatnonzero(lengths > _OUTLIER * median).tolist()),
        without_gpu=tuple(number for number, row in enumerate(rows) if not row.kernels and not row.shares.busy_ns),
    )
