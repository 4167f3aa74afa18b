"""Seconds of a step from whatever speed a row publishes. MFU is never used: its conventions differ by a third."""

from __future__ import annotations

from collections.abc import Mapping

from headway.account.shape import ModelShape
from headway.plan.row_values import number
from headway.plan.workload import Workload


def observed_step(row: Mapping[str, str], work: Workload, gpus: int) -> tuple[float | None, str]:
    """(seconds or None, how it was derived; "" where it was published as step time or tokens/s)."""
    step = number(row, "step_time_s")
    if step:
        return step, ""
    rate = number(row, "tokens_per_s_per_gpu")
    if rate:
        return work.tokens / (rate * gpus), ""
    tflops, convention = number(row, "tflops_per_gpu"), row.get("flops_convention", "")
    flops = _flops_of(convention, work) if tflops else None
    if tflops and flops:
        return flops / (tflops * 1e12 * gpus), "step time from TFLOP/s by its stated convention"
    return None, ""


def _flops_of(convention: str, work: Workload) -> float | None:
    """FLOPs of a step as the source counted them; None for a convention that is not stated or not known."""
    text = convention.casefold().replace(" ", "")
    shape, seq, tokens = work.shape, work.seq, work.tokens
    if not text or "notstated" in text:
        return None
    if text.startswith("narayanan") or "96bslh^2" in text:
        return 4 / 3 * _megatron(shape, seq, tokens)  # forward once more: full recompute
    if "megatron" in text or text.startswith("72bl"):
        return _megatron(shape, seq, tokens)
    if text.startswith("8*n"):
        return 8.0 * shape.parameters * tokens
    if text.startswith("6n"):
        causal = "causal" in text and "non-causal" not in text
        attention = (6 if causal else 12) * len(shape.layers) * shape.hidden * seq
        return (6.0 * shape.active_matmul_parameters + attention) * tokens
    return None


def _megatron(shape: ModelShape, seq: int, tokens: int) -> float:
    """72·B·s·L·h²(1 + s/6h + V/12Lh) of the model's real matrices (Narayanan et al. 2021, without recompute)."""
    return (6.0 * shape.active_matmul_parameters + 12.0 * len(shape.layers) * shape.hidden * seq) * tokens
