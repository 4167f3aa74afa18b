"""`train.compile: auto`: one layer measured with and without torch.compile, its compilation held against the run.

All layers of a kind share what was compiled for one. The decision rests on the whole run's length, never on what is
left of it, and is read back on a resume: sums in another order would otherwise part the curves.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.account.errors import UserError
from headway.data.batch import Batch
from headway.guard.process_group import control
from headway.model.attention import CHOSEN
from headway.model.dropout import dropouts
from headway.model.forward import attention_of, call_arguments
from headway.model.kernels.case import tensors
from headway.model.kernels.measure import BOUNDS, Weights, compare
from headway.parallel.wrap import transformer_blocks
from headway.train.decisions import Known, decided
from headway.train.memory import keep_random_state

EXPECTED_S = {"cpu": 60.0, "cuda": 30.0}
"""What compiling a layer commonly takes: a run that could not win it back in the best case does not try."""
AT_BEST = 0.4
"""Share of a layer's time that compiling could win at the very best: products stay as they are."""
WORTH = 0.01
TURNS = 3
BOUND_8_BITS = 0.1
"""In float8 compiled layers are held against eager ones: where a value lies between two of 8 bits, another order of
sums rounds it the other way, by a part in sixteen. A wrong term is off by the whole."""
GRAPHS = 2
"""Times that a layer is compiled in a run: for the first bucket of the document table, and once more for any."""


@dataclass(frozen=True)
class Decision:
    """Seconds of one layer's forward and backward (None: not measured) and of compiling it; errors against the wide
    reference."""

    on: bool
    why: str
    eager_s: float | None = None
    compiled_s: float | None = None
    compile_s: float | None = None
    eager_error: float | None = None
    compiled_error: float | None = None

    def line(self) -> str:
        return f"compile: {'on' if self.on else 'off'}, {self.why}"


@dataclass(frozen=True)
class Length:
    """How often a layer runs: optimizer steps of the whole run, micro-batches of a rank in each."""

    steps: int
    micro_batches: int


def decide(
    module: nn.Module,
    batch: Batch,
    length: Length,
    dtype: torch.dtype,
    known: Known,
    device: str,
    *,
    exact: bool,
    plain: Callable[[], None],
    fused: Callable[[], None],
) -> Decision:
    """What rank 0 found, on all ranks; nothing stays compiled and the model's kernels are as before. Collective.

    Call it before the model is wrapped. known: where an earlier session's decision stands.
    exact: whether the layers can be computed in a wider type (not in float8). plain, fused: take back and put back the
    kernels between a layer's products, which compiling replaces.
    """

    def measured() -> Decision:
        before = decided(known, "compile", device, Decision)
        if before is not None:
            return before
        with keep_random_state():
            try:
                return _measure(module, batch, length, dtype, exact, plain)
            finally:
                fused()

    return control().on_main(measured, UserError, (UserError,))


def _measure(
    module: nn.Module, batch: Batch, length: Length, dtype: torch.dtype, exact: bool, plain: Callable[[], None]
) -> Decision:
    blocks = transformer_blocks(module)
    if not blocks:
        return Decision(False, "the model has no repeated layers")
    if any(True for _ in dropouts(module)):
        return Decision(False, "the layers have dropout, so that what is compiled cannot be compared")
    device = next(module.parameters()).device
    block = blocks[len(blocks) // 2]
    times = len(blocks) * length.micro_batches * length.steps
    autocast = _autocast(device.type, dtype)
    with autocast():
        call = inputs_of(block, module, batch)
        eager_s, eager = least_seconds(block, call, TURNS)
        at_best = AT_BEST * eager_s * times
        if at_best < EXPECTED_S[device.type]:
            why = f"{length.steps} steps could win back {at_best:.0f} s at the very best, compiling takes longer"
            return Decision(False, why, eager_s)
        plain()
        expected = _wide(block, call, dtype) if exact else eager
        block.compile()
        try:
            compile_s, _ = least_seconds(block, call, 1)
            compiled_s, compiled = least_seconds(block, call, TURNS)
        except Exception as failure:  # the compiler may fail in any way on code that it was not made for
            return Decision(False, f"compiling fails: {type(failure).__name__}", eager_s)
        finally:
            block._compiled_call_impl = None
    errors = compare(eager, expected), compare(compiled, expected)
    bound = BOUNDS[dtype] if exact else BOUND_8_BITS
    return judged(eager_s, compiled_s, max(0.0, compile_s - compiled_s), errors, bound, times)


def judged(
    eager_s: float, compiled_s: float, compile_s: float, errors: tuple[float, float], bound: float, times: int
) -> Decision:
    """errors: of eager and compiled results; times: how often the run computes a layer."""
    figures = (eager_s, compiled_s, compile_s, *errors)
    won = (eager_s - compiled_s) * times
    found = f"a layer takes {compiled_s * 1e3:.1f} ms compiled and {eager_s * 1e3:.1f} ms not"
    if not math.isfinite(errors[0]):  # three times as much would allow anything
        return Decision(False, "WARNING: the layers cannot be held against a wider computation", *figures)
    if not errors[1] <= max(bound, 3 * errors[0]):
        return Decision(
            False, f"WARNING: compiled layers are wrong by {errors[1]:.1e}, {errors[0]:.1e} without", *figures
        )
    if compiled_s > (1 - WORTH) * eager_s:
        return Decision(False, found, *figures)
    if won < GRAPHS * compile_s:
        return Decision(False, f"{found}; the run wins {won:.0f} s, compiling takes {compile_s:.0f} s", *figures)
    return Decision(True, f"{found}; {won:.0f} s won in the run for {compile_s:.0f} s of compiling", *figures)


Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Reached(Exception):
    """The layer was called: what it was called with is known, and the rest of the pass is not needed."""


def inputs_of(block: nn.Module, module: nn.Module, batch: Batch) -> Call:
    """What the model calls the layer with on this batch."""
    seen: list[Call] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))
        raise _Reached

    hook = block.register_forward_pre_hook(before, with_kwargs=True)
    try:
        with torch.no_grad():
            module(**call_arguments(attention_of(module), batch))
    except _Reached:
        pass
    finally:
        hook.remove()
    return _mapped(seen[0], lambda tensor: tensor.detach())


def least_seconds(block: nn.Module, call: Call, turns: int) -> tuple[float, list[Tensor]]:
    """Least seconds of a forward and backward of the layer, and its output and gradients."""
    best, values, weights = float("inf"), [], Weights()
    for _ in range(turns):
        drawn, started = weights.seconds, _now(call)
        values = _values(block, call, weights)
        best = min(best, _now(call) - started - (weights.seconds - drawn))
    return best, values


def _values(block: nn.Module, call: Call, weights: Weights) -> list[Tensor]:
    """The layer's output and all gradients of a fixed weighted sum of it, zero where there is none."""
    args, kwargs = call
    hidden = args[0].detach().requires_grad_()
    out = tensors(block(hidden, *args[1:], **kwargs))[0]
    leaves = [hidden, *(p for p in block.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(out, leaves, weights.of([out]), allow_unused=True)
    # None left out: a list that is shorter by one cannot be compared.
    found = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True))
    return [out.detach(), *found]


def _wide(block: nn.Module, call: Call, dtype: torch.dtype) -> list[Tensor]:
    """The same in float64 for float32 on a CPU where the layer's products know it, else in float32, one document at a
    time."""
    if dtype == torch.float32 and call[0][0].device.type == "cpu":
        with suppress(RuntimeError):  # torch's product of experts does not
            return _in(torch.float64, block, call)
    return _in(torch.float32, block, call)


def _in(wide: torch.dtype, block: nn.Module, call: Call) -> list[Tensor]:
    hidden: Tensor = call[0][0]
    twin = copy.deepcopy(block).to(wide)
    for module in twin.modules():
        module.__dict__[CHOSEN] = "documents"
        # What stands in for a forward (`train.sensitive`'s, say) is of the layer that was copied, and uses its weights.
        module.__dict__.pop("forward", None)
    with torch.autocast(hidden.device.type, enabled=False):
        return _values(twin, _mapped(call, lambda x: x.to(wide) if x.is_floating_point() else x), Weights())


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _autocast(kind: str, dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    return nullcontext if dtype == torch.float32 else lambda: torch.autocast(kind, dtype)


def _now(call: Call) -> float:
    if call[0][0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def compile_layers(blocks: Sequence[nn.Module]) -> None:
    for block in blocks:
        block.compile()


def as_record(decision: Decision, device: str) -> dict[str, Any]:
    """For environment.json and for checkpoints, where a resume reads it."""
    return {"compile": {**asdict(decision), "device": device}}
