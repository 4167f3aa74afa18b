"""Checks candidates against a wide reference, values and gradients, and times those that pass, interleaved."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.model.kernels.case import Candidate, Case, Choice, Result, tensors

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative error of a row of an output or gradient: sums of thousands of terms in other orders stay well below,
a wrong term in one row well above."""

ROUNDS = 3
HOPELESS = 3.0
"""A candidate this many times slower than the best at the check's size is not timed at full size."""
QUICK = 0.05
"""Seconds of a first call that may be mostly what first calls do; it is made again."""
FLOAT64_ELEMENTS = 1 << 22
UNTRIED = "not measured: "
"""How the reason of every candidate begins that was not tried for want of time."""
OUT_OF_TIME = f"{UNTRIED}the time for choosing is over"
COMPILE_SECONDS = {"cpu": 30.0, "cuda": 6.0}
"""Time that must be left before a candidate that compiles is tried; on a CPU only `headway bench kernels` has it."""


def choose(case: Case, budget: float) -> Choice:
    """Measures a case within about `budget` seconds and keeps the fastest candidate that is right.

    What is under way when the time is over is finished, nothing else is begun; what was not compared stays out, so that
    without any time the plain candidate is chosen. `Choice.results` names what was not tried.
    """
    deadline = time.monotonic() + budget
    dtype = _dtype(case.inputs(1))
    if budget <= 0:
        return _plain(case, dtype)
    reference = _reference(case)
    results: dict[str, Result] = {}
    for candidate in sorted(case.candidates, key=lambda each: each.compiles):
        results[candidate.name] = _check(case, candidate, reference, dtype, deadline)
    plain = case.candidates[0].name
    able = {name: result for name, result in results.items() if not result.reason}
    best = min((result.seconds or 0.0) for result in able.values())
    for name, result in able.items():
        if name != plain and (result.seconds or 0.0) > HOPELESS * best:
            results[name] = replace(result, reason=f"{(result.seconds or 0.0) / best:.1f} times slower on a small case")
    able = {name: result for name, result in results.items() if not result.reason}
    times = _time(case, {c: able[c.name].seconds or 0.0 for c in case.candidates if c.name in able}, deadline)
    if times:
        missed = [name for name in able if name not in times]
        results |= {name: replace(results[name], reason=OUT_OF_TIME) for name in missed}
    chosen = min(times, key=lambda name: times[name]) if times else plain
    for name, seconds in times.items():
        slower = "" if name == chosen else f"{seconds / times[chosen]:.2f} times the chosen one's time"
        results[name] = replace(results[name], seconds=seconds, reason=slower)
    ordered = tuple(results[candidate.name] for candidate in case.candidates)
    return Choice(case.operation, case.shape, str(dtype).removeprefix("torch."), chosen, ordered)


def _plain(case: Case, dtype: torch.dtype) -> Choice:
    plain, *others = case.candidates
    results = [Result(plain.name), *(Result(each.name, reason=each.cannot() or OUT_OF_TIME) for each in others)]
    return Choice(case.operation, case.shape, str(dtype).removeprefix("torch."), plain.name, tuple(results))


def compare(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest relative error over the rows (last dimension) of all tensors; infinite where one is missing or NaN.

    A row's error is divided by its own norm, but at least by the tensor's mean row norm: near-zero rows (unseen words)
    are rounding only, while one wrong row among thousands still stands out.
    """
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return float("inf")
        rows = other.reshape(-1, other.shape[-1]) if other.ndim else other.reshape(1, 1)
        error = (one.to(other.dtype).reshape(rows.shape) - rows).norm(dim=-1)
        norms = rows.norm(dim=-1)
        scale = torch.maximum(norms, norms.square().mean().sqrt()).clamp_min(1e-30)
        share = float((error / scale).max())
        worst = max(worst, share if share == share else float("inf"))
    return worst


def values_and_gradients(run: Any, inputs: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of one call, and the gradients of a fixed weighted sum of them; a missing gradient is a zero one."""
    leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    outputs = tensors(run(*inputs))
    differentiable = [out for out in outputs if out.requires_grad]
    if not leaves:
        return [out.detach() for out in outputs], []
    weights = [_weights(out) for out in differentiable]
    found = torch.autograd.grad(differentiable, leaves, weights, allow_unused=True)
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]
    return [out.detach() for out in outputs], grads


def _weights(out: Tensor) -> Tensor:
    if out.ndim == 0:
        return torch.ones_like(out)
    generator = torch.Generator().manual_seed(7)
    return torch.randn(out.shape, generator=generator).to(out.device, out.dtype)


def _reference(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    inputs = case.inputs(case.check_rows)
    return values_and_gradients(case.candidates[0].run, _same_width(tuple(_widened(value) for value in inputs)))


def _widened(value: Any) -> Any:
    """float64 where it is cheap; a head of tens of millions of weights, and any GPU, is compared in float32."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    cheap = value.device.type == "cpu" and value.numel() <= FLOAT64_ELEMENTS
    wide = value.detach().to(torch.promote_types(value.dtype, torch.float64 if cheap else torch.float32))
    return wide.requires_grad_(value.requires_grad)


def _same_width(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """One type for all: the narrower of the wide ones, so that a product of two inputs is possible."""
    floats = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    if len({value.dtype for value in floats}) < 2:
        return values
    return tuple(
        value.detach().float().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in values
    )


def _check(
    case: Case,
    candidate: Candidate,
    reference: tuple[list[Tensor], list[Tensor]],
    dtype: torch.dtype,
    deadline: float,
) -> Result:
    if reason := candidate.cannot():
        return Result(candidate.name, reason=reason)
    if candidate.compiles and time.monotonic() + COMPILE_SECONDS[inputs_device(case.inputs(1))] > deadline:
        return Result(candidate.name, reason=f"{UNTRIED}compiling it would pass the time for choosing")
    plain = candidate is case.candidates[0]
    if not plain and time.monotonic() > deadline:
        return Result(candidate.name, reason=OUT_OF_TIME)
    try:
        inputs = case.inputs(case.check_rows)
        if candidate.compiles:
            values_and_gradients(candidate.run, inputs)
        started = _now(inputs)
        values, grads = values_and_gradients(candidate.run, inputs)
        seconds = _now(inputs) - started
        if seconds < QUICK:
            started = _now(inputs)
            values_and_gradients(candidate.run, inputs)
            seconds = min(seconds, _now(inputs) - started)
    except Exception as failure:  # a library's kernel may fail in any way on shapes it was not made for
        if plain:
            raise
        text = " ".join(str(failure).split())[:160]
        return Result(candidate.name, wrong=True, reason=f"fails: {type(failure).__name__}: {text}")
    error, gradient_error = compare(values, reference[0]), compare(grads, reference[1])
    wrong = not plain and max(error, gradient_error) > BOUNDS[dtype]
    reason = f"is wrong: errors {error:.1e}, {gradient_error:.1e} above {BOUNDS[dtype]:.0e}" if wrong else ""
    return Result(candidate.name, error, gradient_error, seconds, wrong, reason)


def _time(case: Case, candidates: dict[Candidate, float], deadline: float) -> dict[str, float]:
    """The least of up to ROUNDS times each, in turns, so that a busy moment of the machine hits all alike.

    candidates: with the seconds of their check, from which follows what a timing will take. Only turns that all of them
    began count; of a first turn that the time does not allow whole, the first of the candidates are left.
    """
    times: dict[str, float] = {}
    if len(candidates) < 2:
        return times
    inputs = case.inputs(case.rows)
    growth = case.rows / case.check_rows
    for turn in range(ROUNDS):
        ahead = sum(candidates.values()) * growth if turn else 0.0
        if turn and time.monotonic() + ahead > deadline:
            break
        for candidate, seconds in candidates.items():
            if not turn and times and time.monotonic() + seconds * growth > deadline:
                continue
            if not turn and inputs_device(inputs) == "cuda":
                values_and_gradients(candidate.run, inputs)  # the first call tunes and allocates
            started = _now(inputs)
            values_and_gradients(candidate.run, inputs)
            took = _now(inputs) - started
            times[candidate.name] = min(took, times.get(candidate.name, took))
        candidates = {candidate: times[candidate.name] / growth for candidate in candidates if candidate.name in times}
    return times


def _now(inputs: tuple[Any, ...]) -> float:
    if inputs_device(inputs) == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def inputs_device(inputs: tuple[Any, ...]) -> str:
    return next(value.device.type for value in inputs if isinstance(value, Tensor))


def dtype_of(case: Case) -> str:
    """The type that a case is computed in, as its choice names it."""
    return str(_dtype(case.inputs(1))).removeprefix("torch.")


def _dtype(inputs: tuple[Any, ...]) -> torch.dtype:
    return next(value.dtype for value in inputs if isinstance(value, Tensor) and value.is_floating_point())
