"""Why a plan wins: its terms by size, and where another loses to it, second by second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.plan.layout import Layout
from headway.plan.predict import Prediction, predict


def bottlenecks(found: Prediction) -> list[tuple[str, float]]:
    """Terms and the share of the step each takes, largest first, zeros left out."""
    terms = sorted(found.terms.items(), key=lambda item: -item[1])
    return [(name, seconds / found.step_s) for name, seconds in terms if seconds > 0]


def loses(winner: Prediction, other: Prediction) -> list[tuple[str, float]]:
    """Where `other` loses to `winner`: seconds by term, largest loss first; what it wins back has a minus."""
    gaps = [(name, other.terms[name] - winner.terms[name]) for name in winner.terms]
    return sorted((gap for gap in gaps if abs(gap[1]) > 1e-6), key=lambda gap: -gap[1])


_DEGREES = ("dp", "tp", "pp", "cp", "ep", "micro_batch")
# What a part of a plan needs before it changes anything.
_NEEDS = {
    "dedup": "needs experts on several nodes (ep beyond the fast domain)",
    "etp": "needs experts, and is what tp gives them already where ep fits beside it",
    "recompute_share": "needs recompute=full",
    "buckets": "needs zero=1 on several replicas",
    "overlap_wgrad": "needs tp above 1 and overlap_tp=false",
    "overlap_tp": "needs tp above 1",
    "overlap_dp": "needs several replicas",
    "shard": "needs more replicas than that",
    "optimizer_bits": "needs optimizer state on the device",
    "sequence_parallel": "needs tp above 1",
}


def idle(found: Prediction, fixed: Mapping[str, Any]) -> list[str]:
    """Parts that were given and change neither time nor memory of this plan, each with what it would need."""
    said = []
    for key, value in fixed.items():
        usual = getattr(Layout(), key)
        if key in _DEGREES or value == usual:
            continue
        other = predict(found.workload, replace(found.layout, **{key: usual}), found.cluster)
        mine = predict(found.workload, found.layout, found.cluster)
        if other.terms == mine.terms and other.memory == mine.memory:
            shown = str(value).lower() if isinstance(value, bool) else value
            said.append(
                f"{key}={shown} changes nothing in this plan" + (f": it {_NEEDS[key]}" if key in _NEEDS else "")
            )
    return said


def communication(found: Prediction) -> float:
    """Seconds of a step in which devices wait for communication: TP, DP, PP, CP, EP and what it slows."""
    return sum(found.terms[name] for name in ("tp", "dp", "pp", "cp", "ep"))
