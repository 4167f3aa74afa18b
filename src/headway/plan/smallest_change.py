"""Where no plan fits into memory: the one change that would make one fit, found by searching with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster
from headway.plan.predict import Prediction
from headway.plan.search import search
from headway.plan.workload import Workload

# What a user may have given that memory depends on.
_GIVEN = (
    "recompute",
    "micro_batch",
    "zero",
    "shard",
    "sequence_parallel",
    "flash",
    "vpp",
    "cp",
    "ep",
    "pp",
    "tp",
    "dp",
)
# What nobody gave and costs least first: 8-bit moments, then optimizer state that leaves the device.
_ADDED: tuple[tuple[str, Any], ...] = (("optimizer_bits", 8), ("offload", "host"), ("offload", "nvme"))
_DOUBLINGS = 9


def smallest_change(work: Workload, cluster: Cluster, fixed: Mapping[str, Any]) -> str:
    """One given part of the plan let go (the fastest plan that one such change allows), else 8-bit optimizer state or
    offload, else the least doubling of the GPUs; with the step time that it leads to."""
    freed = [
        (key, _best(work, cluster, {k: v for k, v in fixed.items() if k != key})) for key in _GIVEN if key in fixed
    ]
    fits = [(plan.step_s, key, plan) for key, plan in freed if plan is not None]
    if fits:
        _, key, plan = min(fits, key=lambda one: one[0])
        return f"{key}={_text(getattr(plan.layout, key))} instead of {_text(fixed[key])} ({_described(plan)})"
    for key, value in _ADDED:
        found = _best(work, cluster, {**fixed, key: value}) if key not in fixed else None
        if found is not None:
            return f"{key}={value} ({_described(found)})"
    free = {key: value for key, value in fixed.items() if key != "dp"}
    gpus = cluster.gpus
    for _ in range(_DOUBLINGS):
        gpus *= 2
        found = _best(work, cluster.with_gpus(gpus), free)
        if found is not None:
            return f"{gpus:,} GPUs ({_described(found)})"
    return f"more than {gpus:,} GPUs, a smaller model or shorter sequences"


def _best(work: Workload, cluster: Cluster, fixed: Mapping[str, Any]) -> Prediction | None:
    try:
        return search(work, cluster, fixed, top=1).plans[0]
    except UserError:
        return None


def _described(plan: Prediction) -> str:
    return f"{plan.layout.describe()}: {plan.step_s:.3g} s a step"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
