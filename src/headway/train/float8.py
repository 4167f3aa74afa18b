"""`train.precision: float8_auto`: one layer measured in float8 and in bfloat16; float8 only where it is clearly faster.

Casting to 8 bits costs passes over memory, which small layers do not win back: on an H200 a 4B model's layers gained
nothing. The decision is read back on a resume: another one would be another training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from headway.account.errors import UserError
from headway.config.run import RunConfig
from headway.data.batch import Batch
from headway.guard.process_group import control
from headway.model.kernels.measure import compare
from headway.model.precision import linear_to_float8
from headway.parallel.device import Device
from headway.parallel.wrap import transformer_blocks
from headway.train.compiling import inputs_of, least_seconds
from headway.train.decisions import Known, decided
from headway.train.memory import keep_random_state

WORTH = 1.10
"""Times as fast as bfloat16 that a layer must be in float8."""
TURNS = 3
MOST_ERROR = 0.5
"""Of a layer's output and gradients: two to three digits are lost by rounding to 8 bits; above this it is wrong."""
CAPABLE = (8, 9)


@dataclass(frozen=True)
class Float8:
    """Whether the layers run in float8, and why. Seconds of one layer's forward and backward (None: not measured)."""

    on: bool
    why: str
    bfloat16_s: float | None = None
    float8_s: float | None = None
    error: float | None = None

    def line(self) -> str:
        return f"float8_auto takes {'float8' if self.on else 'no float8'}: {self.why}"


def decide_float8(
    config: RunConfig,
    module: nn.Module,
    batch: Callable[[], Batch],
    device: Device,
    known: Known,
    copied: Callable[[nn.Module], nn.Module],
) -> Float8:
    """What rank 0 found, on all ranks; the model stays as it is. Collective; call it before the model is wrapped.

    batch: makes a typical micro-batch on the device. known: where an earlier session's decision stands. copied: copies
    a layer so that it computes as the run will, on weights of its own.
    """

    def measured() -> Float8:
        before = decided(known, "float8", device.name, Float8)
        if before is not None:
            return before
        reason = cannot(config, device)
        if reason is not None:
            return Float8(False, reason)
        with keep_random_state(), torch.autocast(device.type, torch.bfloat16):
            compiled = config.train.compile is not False
            return _measure(module, batch(), config.train.sensitive, compiled, device, copied)

    return control().on_main(measured, UserError, (UserError,))


def cannot(config: RunConfig, device: Device) -> str | None:
    """Why float8 is out of the question, in words, or None."""
    if config.model.lora is not None:
        return "it trains whole weights, and model.lora is set"
    if device.type != "cuda":
        return "this device multiplies nothing in 8 bits"
    if torch.cuda.get_device_capability(device.index) < CAPABLE:
        return f"{device.name} multiplies nothing in 8 bits"
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        return "torchao is not installed (`pip install headway[gpu]`)"
    return None


def _measure(
    module: nn.Module,
    batch: Batch,
    sensitive: Sequence[str],
    compiled: bool,
    device: Device,
    copied: Callable[[nn.Module], nn.Module],
) -> Float8:
    blocks = transformer_blocks(module)
    if not blocks:
        return Float8(False, "the model has no repeated layers")
    block = blocks[len(blocks) // 2]
    call = inputs_of(block, module, batch)
    narrow = copied(block)
    if not linear_to_float8(narrow, sensitive, emulate=device.type == "cpu"):
        return Float8(False, "no linear layer has sizes that are multiples of 16 beside train.sensitive")
    wide = copied(block)
    if compiled:  # uncompiled, the casts are kernels of their own
        wide.compile()
        narrow.compile()
    try:
        least_seconds(narrow, call, 1)
        least_seconds(wide, call, 1)
        wide_s, expected = least_seconds(wide, call, TURNS)
        narrow_s, found = least_seconds(narrow, call, TURNS)
    except Exception as failure:  # a library's kernels may fail in any way on sizes they were not made for
        return Float8(False, f"a layer fails in float8: {type(failure).__name__}")
    return judged(wide_s, narrow_s, compare(found[:1], expected[:1]))


def judged(bfloat16_s: float, float8_s: float, error: float) -> Float8:
    """error: of the layer's output against bfloat16's, relative."""
    said = f"a layer takes {float8_s * 1e3:.2f} ms in float8 and {bfloat16_s * 1e3:.2f} ms in bfloat16"
    if not error <= MOST_ERROR:
        return Float8(False, f"WARNING: a layer is wrong by {error:.1e} in float8", bfloat16_s, float8_s, error)
    if error == 0:  # 8 bits round: equal values were computed by the same code
        return Float8(False, "WARNING: the layer that was measured did not run in float8", bfloat16_s, float8_s, error)
    times = bfloat16_s / float8_s
    if times < WORTH:
        why = f"{said}, {times:.2f} times as fast where {WORTH:.2f} are asked for; bfloat16 is kept"
        return Float8(False, why, bfloat16_s, float8_s, error)
    return Float8(True, f"{said}, {times:.2f} times as fast", bfloat16_s, float8_s, error)


def as_record(decision: Float8 | None, device: str) -> dict[str, Any]:
    """For environment.json and for checkpoints, where a resume reads it."""
    return {} if decision is None else {"float8": {**asdict(decision), "device": device}}
