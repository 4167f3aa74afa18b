"""Fitting the constants to published runs: a pattern search on a robust loss. No per-row and no per-stack numbers.

The loss of a set of rows is half the mean |log(predicted / measured)| and half the same after each (stack, device,
precision) group's median is taken out, so that one number serves both uncalibrated and calibrated use. A source counts
with the square root of its rows: four hundred rows of one benchmark are not four hundred independent facts.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headway.plan.constants import Constants, meanings
from headway.plan.profile import profile
from headway.plan.rows import Case
from headway.plan.step import step_terms

# Shares cannot pass 1; the rest only keeps the search away from nonsense.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "gemm_bf16": (0.5, 1.0),
    "gemm_fp8": (0.3, 1.0),
    "gemm_fp4": (0.2, 1.0),
    "gemm_traffic": (0.2, 4.0),
    "elementwise": (0.7, 4.0),
    "eager": (1.0, 3.0),
    "cast": (0.3, 4.0),
    "attention": (0.2, 1.0),
    "attention_ported": (0.3, 1.0),
    "head_dim": (1.0, 200.0),
    "score_passes": (3.0, 12.0),
    "misaligned": (1.0, 40.0),
    "expert": (0.2, 1.0),
    "routing": (0.5, 6.0),
    "kernel": (5e-7, 2e-5),
    "launch": (1e-6, 2e-5),
    "expert_kernels": (1.0, 40.0),
    "inter": (0.3, 1.0),
    "onloaded": (0.1, 1.0),
    "hop": (1e-6, 6e-5),
    "tp_overlap": (0.05, 0.95),
    "pp_exposed": (0.05, 1.0),
    "pipe_sync": (0.005, 0.4),
    "ep_exposed": (0.1, 1.0),
    "ep_network": (0.1, 1.0),
    "contention": (0.02, 0.6),
    "straggler": (0.0005, 0.02),
    "step": (0.001, 0.1),
}


def log_errors(cases: Sequence[Case], constants: Constants) -> list[float]:
    """log(predicted / measured step time) of each case, which must have a measured one."""
    found = []
    for case in cases:
        terms, _ = step_terms(profile(case.work.shape), case.work, case.layout, case.cluster, constants)
        assert case.step_s
        found.append(math.log(sum(terms.values()) / case.step_s))
    return found


def loss(cases: Sequence[Case], constants: Constants) -> float:
    """The fit's objective (see above)."""
    errors = log_errors(cases, constants)
    rows = Counter((case.document, case.group) for case in cases)
    weights = [1 / math.sqrt(rows[case.document, case.group]) for case in cases]
    by_group: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for case, error in zip(cases, errors, strict=True):
        by_group[case.group].append(error)
    middle = {group: statistics.median(values) for group, values in by_group.items()}
    total = sum(
        weight * (abs(error) + abs(error - middle[case.group])) / 2
        for case, error, weight in zip(cases, errors, weights, strict=True)
    )
    return total / sum(weights)


def fit(
    cases: Sequence[Case],
    start: Constants,
    sweeps: int = 12,
    tell: Callable[[str], None] = lambda line: None,
    only: Sequence[str] = (),
) -> Constants:
    """The constants that `constants.csv` marks as fitted (or `only` some of them), moved one at a time while the loss
    falls."""
    names = [item.name for item in meanings() if item.fitted and (not only or item.name in only)]
    steps = dict.fromkeys(names, 1.25)
    best, lowest = start, loss(cases, start)
    for sweep in range(sweeps):
        for name in names:
            best, lowest, steps[name] = _move(cases, best, lowest, name, steps[name])
        tell(f"sweep {sweep + 1}: loss {lowest:.4f}")
        if max(steps.values()) < 1.01:
            break
    return best


def _move(
    cases: Sequence[Case], best: Constants, lowest: float, name: str, step: float
) -> tuple[Constants, float, float]:
    """Tries a constant larger and smaller; widens its step where that helped, narrows it where it did not."""
    low, high = BOUNDS[name]
    for factor in (step, 1 / step):
        value = min(high, max(low, getattr(best, name) * factor))
        if value == getattr(best, name):
            continue
        tried = replace(best, **{name: value})
        found = loss(cases, tried)
        if found < lowest - 1e-6:
            return tried, found, min(1.4, 1 + (step - 1) * 1.3)
    return best, lowest, 1 + (step - 1) * 0.5
