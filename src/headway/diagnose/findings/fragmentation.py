"""Operator fragmentation: many small kernels, launched one by one, each reading and writing memory for itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headway.diagnose.case import Case
from headway.diagnose.facts import NONE, Int64
from headway.diagnose.finding import Finding
from headway.diagnose.view import Mask, View, ms, short

LAUNCH_IDLE = ("host", "launch_call", "launch_latency", "short")
FUSABLE = ("elementwise", "norm", "reduction", "softmax", "copy", "memset")
# Compilers' kernels, and Triton kernels written by hand (named like a Python function): fused already.
# So are those of serving engines that say what they join.
FUSED = r"^triton_|_fused_|[Ff]used|^_[a-z0-9_]+$|add_?rms_?norm|rms_?norm_(?:dynamic_)?quant|(?:silu|gelu|act)_and_mul"
NOTABLE_IDLE, NOTABLE_UNFUSED = 0.05, 0.10
_SHORT_BY_COUNT, _SMALL_MEDIAN_NS = 0.25, 30_000
# A compiler's kernel takes about this many of eager's in a row (norm: cast, square, mean, add, rsqrt, products).
_GROUP = 6


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: all idle time that waits for launches, and all time in unfused kernels. Surely won: the idle before
    kernels that fuse into the one before them, and what a group of kernels takes beyond its longest."""
    view = case.view
    parts = view.device.fragmentation
    if not parts.kernels or not view.on_gpu:
        return
    fusable = unfused(view)
    waits = {f"idle.{name}": view.idle.get(name, 0) - _lone_wait(view, name) for name in LAUNCH_IDLE}
    waiting, busy = sum(waits.values()), max(1, view.time(view.inside))
    small = parts.short_by_count >= _SHORT_BY_COUNT or parts.median_ns < _SMALL_MEDIAN_NS
    launch_bound = small and waiting >= NOTABLE_IDLE * view.wall_ns
    loose = view.time(fusable)
    if not launch_bound and loose < NOTABLE_UNFUSED * busy:
        return
    saved_idle, saved_time = _surely(view, fusable)
    claims: dict[str, int] = {}
    if launch_bound:
        claims |= {path: ns for path, ns in waits.items() if ns}
    for kind in FUSABLE:
        ns = view.time(fusable & view.of_kind(kind))
        if ns:
            claims[f"device.{kind}"] = ns
    lower = saved_time + (saved_idle if launch_bound else 0)
    per_step = f", {parts.kernels_per_step:,.0f} a step" if parts.kernels_per_step else ""
    evidence = [
        f"{parts.kernels:,} kernels{per_step}, median {ms(parts.median_ns)}, "
        f"{parts.short_by_count:.0%} of them under 10 µs",
        f"the device waits {ms(waiting)} ({waiting / view.wall_ns:.1%}) for launches",
        f"{ms(loose)} in {int(fusable.sum()):,} elementwise, norm and copy kernels that no compiler fused: "
        + ", ".join(f"{short(name)} {number:,}× {ms(ns)}" for name, number, ns in view.top_names(fusable)),
    ]
    unfused_title = "unfused elementwise work" if loose >= NOTABLE_UNFUSED * busy else ""
    titles = ["operator fragmentation, launch-bound"] * launch_bound + [unfused_title] * bool(unfused_title)
    yield Finding(
        name="fragmentation",
        title=" and ".join(titles),
        claims=claims,
        lower_ns=min(lower, sum(claims.values())),
        wall_ns=view.wall_ns,
        evidence=tuple(evidence),
        check="compile one transformer block and count its kernels again: a norm should be one, not seven",
        remedy="compile",
    )


def _lone_wait(view: View, name: str) -> int:
    """ns of the longest wait of a class, where it is half of the window: one pause (a first use, a request that had not
    come) is no fragmentation."""
    mask = view.gaps(name)
    longest = int((view.device.gaps.end[mask] - view.device.gaps.start[mask]).max(initial=0))
    return longest if 2 * longest >= view.wall_ns else 0


def unfused(view: View) -> Mask:
    """Device events that a compiler would fuse and none did."""
    return view.of_kind(*FUSABLE) & view.computing & ~view.named(FUSED)


def _surely(view: View, fusable: Mask) -> tuple[int, int]:
    """(idle, device) ns that fusing runs of neighbours saves, in groups of at most _GROUP kernels on one stream."""
    events = view.device.events
    spared = np.zeros(len(events), bool)  # kernels that become part of the one before them
    time = 0
    for stream in np.unique(events.stream[view.inside]):
        rows = np.flatnonzero((events.stream == stream) & view.inside)
        loose = fusable[rows]
        fresh = np.concatenate(([True], ~loose[:-1])) if len(rows) else np.empty(0, bool)
        # Place in its run of neighbours, counted from 0, then cut into groups.
        index = np.arange(len(rows))
        place = index - np.maximum.accumulate(np.where(fresh, index, 0))
        group = place % _GROUP
        spared[rows[loose & (group > 0)]] = True
        time += _beyond_longest(view.spent[rows], loose, group)
    gaps = view.device.gaps
    mask = view.gaps(*LAUNCH_IDLE) & (gaps.next_event != NONE)
    mask[mask] = spared[gaps.next_event[mask]]
    return view.gap_time(mask), time


def _beyond_longest(spent: Int64, loose: Mask, group: Int64) -> int:
    """What each group of neighbours takes beyond its longest kernel, summed."""
    spent, group = spent[loose], group[loose]
    if not len(spent):
        return 0
    starts = np.flatnonzero(group == 0)
    return int(spent.sum() - np.maximum.reduceat(spent, starts).sum())
