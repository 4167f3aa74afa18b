"""`model.fuse: auto` in a run: the shapes come from the run file and the data, the choice is said and written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from headway.account.errors import UserError
from headway.config.run import RunConfig
from headway.data.view import View
from headway.guard.process_group import control
from headway.model.kernels.choose import BUDGET, Chosen, Setting, install_kernels, measure_kernels
from headway.parallel.device import Device

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
        compiled=config.train.compile,
    )


def fuse(
    config: RunConfig,
    model: nn.Module,
    view: View,
    device: Device,
    dtype: torch.dtype,
    say: Callable[[str], None],
    budget: float = BUDGET,
) -> Chosen | None:
    """Chooses and installs kernels where the run file asks for it. Collective: rank 0 measures, all use what it found.
    Call it before the model is compiled and wrapped."""
    if config.model.fuse == "none":
        return None
    setting = setting_of(config, view, device, dtype)
    measured = control().on_main(lambda: measure_kernels(model, setting, budget=budget), UserError, (UserError,))
    chosen = install_kernels(model, setting, measured)
    say(chosen.summary())
    for warning in chosen.warnings:
        say(f"kernels: WARNING {warning}")
    return chosen


def as_record(chosen: Chosen) -> dict[str, Any]:
    """For environment.json: every operation's choice, errors and timings, the candidates not used and why."""
    return {
        "seconds": chosen.seconds,
        "warnings": list(chosen.warnings),
        "choices": [asdict(choice) for choice in chosen.choices],
    }
