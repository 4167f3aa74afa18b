"""An optimizer step that is not one fused kernel a list of parameters."""

from __future__ import annotations

from collections.abc import Iterator

from headway.account.intervals import intersect, measure
from headway.diagnose.case import Case
from headway.diagnose.facts import HostKind
from headway.diagnose.finding import Finding
from headway.diagnose.findings.fragmentation import LAUNCH_IDLE, unfused
from headway.diagnose.view import ms, short

REGION = r"^Optimizer\.step#"
NOTABLE = 0.02
# AdamW moves 4 reads and 3 writes a parameter; its addcdiv pass alone 3 and 1.
_FUSED_PASSES = 7 / 4


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the region's kernels and its waits for launches, on a CPU the Python of the loop. Put back: one pass
    over parameters, gradients and moments, at the speed of the longest pass that was measured."""
    view = case.view
    region = view.under(REGION, (HostKind.ANNOTATION,)) & ~view.of_kind("collective")
    fused = region & view.named(r"[Ff]usedOptimizer|fused_adam|_fused_|^triton_|FusedAdam")
    spent, fused_ns = view.time(region), view.time(fused)
    rows = view.host_rows(REGION, (HostKind.ANNOTATION,))
    waits = {}
    for name in LAUNCH_IDLE if view.on_gpu else ("host",):
        idle = measure(intersect(view.gap_intervals(view.gaps(name)), view.host_intervals(rows)))
        if idle:
            waits[f"idle.{name}"] = idle
    if not spent or fused_ns > 0.5 * spent or spent < NOTABLE * view.wall_ns:
        return
    passes = view.top_names(region & ~fused, 1)
    floor = int(_FUSED_PASSES * passes[0][2]) if passes else spent
    claims = {f"device.{kind}": ns for kind in view.device.by_kind if (ns := view.time(region & view.of_kind(kind)))}
    number = int(region.sum())
    eager = number > 0 and view.time(region & unfused(view)) > 0.5 * spent
    yield Finding(
        name="optimizer-not-fused",
        title="the optimizer is not fused",
        claims=claims | waits,
        lower_ns=min(max(0, spent - floor), sum(claims.values())),
        wall_ns=view.wall_ns,
        evidence=(
            f"Optimizer.step: {number / max(1, len(rows)):,.0f} kernels and {ms(spent / max(1, len(rows)))} each time",
            *(f"{short(name)}: {count:,}×, {ms(ns)}" for name, count, ns in view.top_names(region)),
        ),
        check="`torch.optim.AdamW(..., fused=True)` makes a handful of kernels (FusedOptimizerTensorListMetadata)",
        remedy="fuse-optimizer",
        # A loop over parameters is launch-bound elementwise work, and its time is in that finding already.
        within="fragmentation" if eager and view.on_gpu else "",
    )
