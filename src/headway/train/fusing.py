"""`model.fuse: auto` in a run: the shapes come from the run file and the data, the choice is said and written down."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from headway.account.errors import UserError
from headway.config.parallel import ParallelConfig
from headway.config.run import RunConfig
from headway.data.view import View
from headway.guard.process_group import control
from headway.model.kernels.cache import choice_of
from headway.model.kernels.choose import (
    BUDGET,
    NOTHING,
    Before,
    Chosen,
    Setting,
    again_or_measured,
    install_kernels,
    measure_kernels,
)
from headway.parallel.device import Device
from headway.train.decisions import Known
from headway.train.update_case import settled, update_cases

UPDATE_SHARE = 0.1
"""Each of the update's operations may take this part of the time for choosing, all others together the rest of it."""
PROOF_SHARE = 0.1
"""Part of that time that holding the whole model against itself takes."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.bfloat16}


def compute_dtype(precision: str, device_type: str) -> torch.dtype:
    """The type of matrix products that `train.precision` means on a device (float8's other parts are bfloat16)."""
    return _DTYPES.get(precision, torch.bfloat16 if device_type == "cuda" else torch.float32)


def setting_of(config: RunConfig, view: View, device: Device, dtype: torch.dtype) -> Setting:
    """Slots of a micro-batch, the share of its tokens with a label, and how the run computes."""
    slots = config.data.slots if config.data.packed else config.data.rows * config.data.seq_len
    tokens = int(view.pieces.length.sum())
    return Setting(
        slots=slots,
        trained_share=int(view.pieces.trained.sum()) / max(tokens, 1),
        compute_dtype=dtype,
        device=device.torch,
        device_name=device.name,
        z_loss=config.train.loss.z_loss,
        label_smoothing=config.train.loss.label_smoothing,
        compiled=config.train.compile is True,
        lengths=_lengths(view, slots, config.seed),
        cast=dtype if dtype != torch.float32 and _sharded(config.parallel) else None,
    )


def _sharded(parallel: ParallelConfig) -> bool:
    """Whether FSDP2 holds the model: among the ranks there are, or that the run file asks for where none run yet."""
    world = control().size
    if world > 1:
        return parallel.dims(world)[1] > 1
    return (parallel.fsdp or (parallel.ranks or 1) // parallel.replicate) > 1


def agreed(differs: str | None) -> str | None:
    """What differs on any rank: all stay plain, or their curves would part. Collective."""
    return next((each for each in control().gather(differs) if each is not None), None)


def _lengths(view: View, slots: int, seed: int) -> tuple[int, ...]:
    """Lengths of documents as they come, until they fill a micro-batch."""
    some = np.random.default_rng(seed).permutation(view.pieces.length[: 1 << 20])
    count = int(np.searchsorted(np.cumsum(some), slots)) + 1
    return tuple(some[:count].tolist())


def fuse(
    config: RunConfig,
    model: nn.Module,
    view: View,
    device: Device,
    dtype: torch.dtype,
    say: Callable[[str], None],
    known: Known,
    budget: float = BUDGET,
) -> Chosen | None:
    """Chooses and installs kernels where the run file asks for it. Collective: rank 0 measures, all use what it found.
    Call it before the model is compiled and wrapped. known: decisions of the session that this one goes on from."""
    if config.model.fuse == "none":
        return None
    setting, before = setting_of(config, view, device, dtype), before_of(known, device.name)
    if known.get("kernels") and before is NOTHING:
        say(f"kernels: the session before did not run on {device.name}: chosen anew")
    measured = control().on_main(
        lambda: measure(config, model, setting, budget, before=before), UserError, (UserError,)
    )
    chosen = install_kernels(model, setting, measured, agreed)
    say(chosen.summary())
    for warning in chosen.warnings:
        say(f"kernels: WARNING {warning}")
    return chosen


def measure(
    config: RunConfig,
    model: nn.Module,
    setting: Setting,
    budget: float,
    *,
    fresh: bool = False,
    before: Before = NOTHING,
) -> Chosen:
    """The model's own operations, and those of the update; changes nothing. fresh: measure what is known too.
    before: what is repeated unmeasured."""
    started = time.monotonic()
    dtype = next(model.parameters()).dtype
    update, warnings = [], []
    for case in update_cases(model, config.optim):
        choice, told = again_or_measured(
            case, setting.device_name, dtype, budget * UPDATE_SHARE, settled, fresh=fresh, before=before
        )
        update.append(choice)
        warnings += told
    spent = time.monotonic() - started
    found = measure_kernels(model, setting, budget=budget * (1 - PROOF_SHARE) - spent, fresh=fresh, before=before)
    return replace(
        found,
        update=tuple(update),
        warnings=(*found.warnings, *warnings),
        seconds=time.monotonic() - started,
        again=all(choice is before.choices.get(choice.operation) for choice in (*found.choices, *update)),
    )


def as_record(chosen: Chosen) -> dict[str, Any]:
    """Every operation's choice, errors and timings, the candidates not used and why."""
    return {
        "seconds": chosen.seconds,
        "warnings": list(chosen.warnings),
        "plain": chosen.plain,
        "choices": [
            {**asdict(choice), "results": [asdict(result) for result in choice.results]}
            for choice in (*chosen.choices, *chosen.update)
        ],
    }


def before_of(known: Known, device: str) -> Before:
    """What the session before ran by on such a device, from its record; nothing where that is not known."""
    try:
        record = known["kernels"]
        if record["device"] != device:
            return NOTHING
        choices = [choice_of(item) for item in record["choices"]]
        return Before({choice.operation: choice for choice in choices if choice is not None}, record.get("plain", ""))
    except (KeyError, TypeError, AttributeError):
        return NOTHING
