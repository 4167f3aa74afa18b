"""The planner's constants: few, named, physical, in one file (`constants.csv`), fitted by `scripts/fit_plan.py`."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources


@dataclass(frozen=True)
class Constants:
    """Every number of the step model that is not a fact of the hardware, the model or the plan.

    `constants.csv` beside this file gives each one's unit, meaning and whether it was fitted.
    """

    gemm_bf16: float
    gemm_fp8: float
    gemm_fp4: float
    ceiling: float
    gemm_traffic: float
    elementwise: float
    eager: float
    hbm: float
    cast: float
    attention: float
    attention_backward: float
    attention_ported: float
    head_dim: float
    score_passes: float
    misaligned: float
    expert: float
    routing: float
    kernel: float
    launch: float
    expert_kernels: float
    intra: float
    inter: float
    onloaded: float
    hop: float
    hop_inside: float
    tp_overlap: float
    pp_exposed: float
    pipe_sync: float
    ep_exposed: float
    ep_network: float
    contention: float
    optimizer_bytes: float
    straggler: float
    step: float
    imbalance: float

    def gemm(self, precision: str) -> float:
        """Share of the measured matrix rate reached inside a layer, by precision of the products."""
        return {"fp8": self.gemm_fp8, "fp4": self.gemm_fp4}.get(precision, self.gemm_bf16)


@dataclass(frozen=True)
class Meaning:
    """What `constants.csv` says about a constant beside its value."""

    name: str
    value: float
    unit: str
    fitted: bool
    meaning: str


@lru_cache(maxsize=1)
def meanings() -> tuple[Meaning, ...]:
    """Every constant with unit and meaning, in file order."""
    text = resources.files("headway.plan").joinpath("constants.csv").read_text(encoding="utf-8")
    return tuple(
        Meaning(row["name"], float(row["value"]), row["unit"], row["fitted"] == "yes", row["meaning"])
        for row in csv.DictReader(text.splitlines())
    )


@lru_cache(maxsize=1)
def default_constants() -> Constants:
    """The fitted constants that ship with Headway."""
    values = {item.name: item.value for item in meanings()}
    return Constants(**{field.name: values[field.name] for field in fields(Constants)})
