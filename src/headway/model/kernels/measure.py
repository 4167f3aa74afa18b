"""Checks candidates against a wide reference, values and gradients, and times those that pass, interleaved."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.model.kernels.case import Candidate, Case, Choice, Result, tensors
from headway.model.kernels.dice import Dice

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative error of a row of an output or gradient: sums of thousands of terms in other orders stay well below,
a wrong term in one row well above."""

ROUNDS = 3
HOPELESS = 3.0
"""On a CPU, a candidate this many times slower than the best at the check's size is not timed at full size. On a GPU so
small a case takes what its launches take, which says nothing."""
QUICK = 0.05
"""Seconds of a first call that may be mostly what first calls do; it is made again."""
FLOAT64_ELEMENTS = 1 << 22
TURN_SECONDS = 1.0
"""On CUDA, left for timing what is right even where compiling took all the time there was: it would be for nothing."""
UNTRIED = "not measured: "
"""How the reason of every candidate begins that was not tried for want of time."""
OUT_OF_TIME = f"{UNTRIED}the time for choosing is over"
NO_MEMORY = "there was no memory for it"
"""Part of the reason where memory ended: another start may have more of it."""
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
    weights = Weights()
    try:
        reference = _reference(case, weights)
        results = {
            candidate.name: _check(case, candidate, reference, dtype, deadline, weights)
            for candidate in sorted(case.candidates, key=lambda each: each.compiles)
        }
    except torch.OutOfMemoryError:  # of the reference or of the plain candidate: nothing can be held against them
        return _plain(case, dtype, f"{UNTRIED}{NO_MEMORY}")
    del reference, weights
    plain, device = case.candidates[0].name, inputs_device(case.inputs(1))
    able = {name: result for name, result in results.items() if not result.reason}
    best = min((result.seconds or 0.0) for result in able.values())
    for name, result in able.items():
        if device == "cpu" and name != plain and (result.seconds or 0.0) > HOPELESS * best:
            results[name] = replace(result, reason=f"{(result.seconds or 0.0) / best:.1f} times slower on a small case")
    able = {name: result for name, result in results.items() if not result.reason}
    timed = {c: able[c.name].seconds or 0.0 for c in case.candidates if c.name in able}
    if device == "cuda":
        deadline = max(deadline, time.monotonic() + TURN_SECONDS)
    times, failed = _time(case, timed, deadline)
    results |= {name: replace(results[name], **why) for name, why in failed.items()}
    if times:
        missed = [name for name in able if name not in times and name not in failed]
        results |= {name: replace(results[name], reason=OUT_OF_TIME) for name in missed}
    chosen = min(times, key=lambda name: times[name]) if times else plain
    for name, seconds in times.items():
        slower = "" if name == chosen else f"{seconds / times[chosen]:.2f} times the chosen one's time"
        results[name] = replace(results[name], seconds=seconds, reason=slower)
    ordered = tuple(results[candidate.name] for candidate in case.candidates)
    return Choice(case.operation, case.shape, str(dtype).removeprefix("torch."), chosen, ordered)


def _plain(case: Case, dtype: torch.dtype, why: str = OUT_OF_TIME) -> Choice:
    plain, *others = case.candidates
    results = [Result(plain.name), *(Result(each.name, reason=each.cannot() or why) for each in others)]
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


class Weights:
    """Of the sum of outputs whose gradients are taken: drawn on the outputs' device, once for each shape and place.

    seconds: that drawing took on the host. A clock leaves them out: at full size they are many times a kernel's.
    """

    def __init__(self, seed: int = 7) -> None:
        self._seed, self._known = seed, dict[tuple[Any, ...], Tensor]()
        self.seconds = 0.0

    def of(self, outputs: list[Tensor]) -> list[Tensor]:
        started = time.perf_counter()
        found = [self._one(at, out) for at, out in enumerate(outputs)]
        self.seconds += time.perf_counter() - started
        return found

    def _one(self, at: int, out: Tensor) -> Tensor:
        key = (at, out.shape, out.dtype, out.device)
        if key not in self._known:
            # Each output has its own: with equal ones two gradients that changed places would not show.
            drawn = Dice(self._seed + at, out.device).normal(*out.shape).to(out.dtype) if out.ndim else None
            self._known[key] = torch.ones_like(out) if drawn is None else drawn
        return self._known[key]


def values_and_gradients(
    run: Any, inputs: tuple[Any, ...], weights: Weights | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of one call, and the gradients of a fixed weighted sum of them; a missing gradient is a zero one."""
    leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    outputs = tensors(run(*inputs))
    differentiable = [out for out in outputs if out.requires_grad]
    if not leaves:
        return [out.detach() for out in outputs], []
    shares = (weights or Weights()).of(differentiable)
    found = torch.autograd.grad(differentiable, leaves, shares, allow_unused=True)
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]
    return [out.detach() for out in outputs], grads


def _reference(case: Case, weights: Weights) -> tuple[list[Tensor], list[Tensor]]:
    inputs = _same_width(tuple(_widened(value) for value in case.inputs(case.check_rows)))
    return values_and_gradients(case.candidates[0].run, inputs, weights)


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
    weights: Weights,
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
        # The first call of any kernel on a GPU may compile it: Triton's do, for seconds.
        if candidate.compiles or inputs_device(inputs) == "cuda":
            values_and_gradients(candidate.run, inputs, weights)
        seconds, values, grads = _timed(candidate, inputs, weights)
        if seconds < QUICK:
            seconds = min(seconds, _timed(candidate, inputs, weights)[0])
    except Exception as failure:  # a library's kernel may fail in any way on shapes it was not made for
        if plain:
            raise
        return replace(Result(candidate.name), **_why_failed(failure, "fails"))
    error, gradient_error = compare(values, reference[0]), compare(grads, reference[1])
    wrong = not plain and max(error, gradient_error) > BOUNDS[dtype]
    reason = f"is wrong: errors {error:.1e}, {gradient_error:.1e} above {BOUNDS[dtype]:.0e}" if wrong else ""
    return Result(candidate.name, error, gradient_error, seconds, wrong, reason)


def _timed(candidate: Candidate, inputs: tuple[Any, ...], weights: Weights) -> tuple[float, list[Tensor], list[Tensor]]:
    """Seconds of a forward and backward, the outputs and the gradients."""
    before, started = weights.seconds, _now(inputs)
    values, grads = values_and_gradients(candidate.run, inputs, weights)
    return _now(inputs) - started - (weights.seconds - before), values, grads


Failed = dict[str, dict[str, Any]]
"""Candidate -> what its result says of its failure."""


def _time(case: Case, candidates: dict[Candidate, float], deadline: float) -> tuple[dict[str, float], Failed]:
    """The least of up to ROUNDS times each, in turns, so that a busy moment of the machine hits all alike; who failed.

    candidates: with the seconds of their check, from which follows what a timing will take. Only turns that all of them
    began count; of a first turn that the time does not allow whole, the first of the candidates are left.
    """
    times: dict[str, float] = {}
    failed: Failed = {}
    if len(candidates) < 2:
        return times, failed
    try:
        inputs = case.inputs(case.rows)
    except torch.OutOfMemoryError:
        return times, {each.name: {"reason": f"{UNTRIED}{NO_MEMORY}"} for each in candidates}
    weights = Weights()
    growth = case.rows / case.check_rows
    for turn in range(ROUNDS):
        if turn and time.monotonic() + sum(times.values()) > deadline:
            break
        for candidate, seconds in candidates.items():
            if turn and candidate.name not in times:
                continue
            if not turn and times and time.monotonic() + seconds * growth > deadline:
                continue
            try:
                if not turn and inputs_device(inputs) == "cuda":
                    values_and_gradients(candidate.run, inputs, weights)  # the first call tunes and allocates
                took = _timed(candidate, inputs, weights)[0]
            except Exception as failure:  # memory or a kernel's resources may end at this size only
                failed[candidate.name] = _why_failed(failure, "fails at full size")
                times.pop(candidate.name, None)
            else:
                times[candidate.name] = min(took, times.get(candidate.name, took))
            if candidate.name in failed and inputs_device(inputs) == "cuda":
                torch.cuda.empty_cache()  # what the failed one took is the others' again
        # What is fixed in a call, launches and passes over a weight, does not grow with the rows.
        grown = [times[each.name] / seconds for each, seconds in candidates.items() if each.name in times and seconds]
        growth = max(grown, default=growth)
    return times, failed


def _why_failed(failure: Exception, what: str) -> dict[str, Any]:
    """Too little memory is named, but no fault of the candidate's."""
    if isinstance(failure, torch.OutOfMemoryError) or "out of memory" in str(failure).lower():
        return {"reason": f"{what}: {NO_MEMORY}"}
    return {"wrong": True, "reason": f"{what}: {type(failure).__name__}: {' '.join(str(failure).split())[:160]}"}


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
