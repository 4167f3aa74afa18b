"""Pipeline schedules: how long stages wait.

Two numbers are both called "the bubble": its ratio to the ideal time, (p-1)/(v·m) for 1F1B (Narayanan et al. 2021), and
its fraction of the step, ratio / (1 + ratio). Both are given by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.plan.layout import Layout


@dataclass(frozen=True)
class Bubble:
    """Seconds a stage waits in a step; `ratio` to the work, `fraction` of the whole."""

    seconds: float
    ratio: float

    @property
    def fraction(self) -> float:
        return self.ratio / (1 + self.ratio)


def bubble(layout: Layout, micro_batches: int, forward: float, backward: float, weight_share: float = 1 / 3) -> Bubble:
    """Waiting of a stage whose micro-batch takes `forward` + `backward` seconds; `weight_share` of both is the
    weights' gradient, which zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241, ZB-H1) and DualPipe
    (DeepSeek-V3, arXiv 2412.19437, table 2) use to fill the gaps.
    """
    stages = layout.pp
    both = forward + backward
    weight = weight_share * both
    if stages == 1:
        return Bubble(0.0, 0.0)
    if layout.schedule == "zero-bubble":
        wait = (stages - 1) * max(0.0, both - 2 * weight)
    elif layout.schedule == "dualpipe":
        wait = max(0.0, (stages / 2 - 1) * (both + backward - 3 * weight))
    else:
        wait = (stages - 1) * both / layout.vpp
    return Bubble(wait, wait / (micro_batches * both) if both else 0.0)
