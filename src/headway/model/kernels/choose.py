"""`fuse: auto`: measures every operation's candidates on the model's own shapes and makes the model use the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headway.model.head import install_loss_head, output_head, remove_loss_head, why_no_loss_head
from headway.model.kernels.cache import cache_key, cached_choice, keep_choice
from headway.model.kernels.case import Case, Choice
from headway.model.kernels.glu import gate_case, gated_mlps_of, use_gate
from headway.model.kernels.loss_case import IMPLEMENTATIONS, loss_case
from headway.model.kernels.measure import choose
from headway.model.kernels.norm import norm_case, norms_of, use_norm
from headway.model.kernels.rotary import rotary_attentions_of, rotary_case, use_rotary
from headway.model.kernels.whole import whole_model_differs

BUDGET = 15.0
"""Seconds that choosing may take at the start of a run, all operations together."""


@dataclass(frozen=True)
class Setting:
    """What the shapes follow from: slots of a micro-batch, the share of them with a label, the compute type."""

    slots: int
    trained_share: float
    compute_dtype: torch.dtype
    device: torch.device
    device_name: str
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    compiled: bool = False  # the layers are compiled whole, which fuses what lies between their products


@dataclass(frozen=True)
class Chosen:
    """What the model runs by; `warnings` name candidates that were wrong, and what stays plain and why."""

    choices: tuple[Choice, ...]
    warnings: tuple[str, ...]
    seconds: float

    def loss_head(self) -> bool:
        """Whether slots without a label are left out of the head."""
        return any(choice.operation == "linear_loss" for choice in self.choices)

    def compiles(self) -> bool:
        """Whether torch.compile is behind one of them, so that compilations are worth counting."""
        return any(choice.chosen == "compile" for choice in self.choices)

    def summary(self) -> str:
        used = ", ".join(f"{choice.operation} {choice.chosen}" for choice in self.choices) or "nothing to choose"
        where = "from earlier measurements" if all(c.cached for c in self.choices) else f"in {self.seconds:.1f} s"
        return f"kernels: {used} (chosen {where})"


@dataclass(frozen=True)
class _Operation:
    case: Case
    use: Callable[[str], None]
    undo: Callable[[], None]


def measure_kernels(model: nn.Module, setting: Setting, *, budget: float = BUDGET, fresh: bool = False) -> Chosen:
    """Chooses, and changes nothing. budget: seconds for everything not known yet; fresh: measure what is known too."""
    started = time.monotonic()
    operations, warnings = _operations(model, setting)
    choices = []
    for index, operation in enumerate(operations):
        # The head comes last and is by far the dearest to measure: the others' share is left to it.
        left = (budget - (time.monotonic() - started)) / (2 if index + 1 < len(operations) else 1)
        choice = _choice(operation.case, setting, left, fresh)
        warnings += [
            f"{choice.operation}: {result.name} is not used, it {result.reason}"
            for result in choice.results
            if result.wrong
        ]
        choices.append(choice)
    return Chosen(tuple(choices), tuple(warnings), time.monotonic() - started)


def install_kernels(model: nn.Module, setting: Setting, chosen: Chosen) -> Chosen:
    """Makes the model use what was chosen (on rank 0, say); returns what it now uses.

    The whole model is compared with itself before, loss and gradients; where it differs, all of it stays plain.
    """
    operations, _ = _operations(model, setting)
    names = {choice.operation: choice.chosen for choice in chosen.choices}

    def install() -> None:
        for operation in operations:
            operation.use(names[operation.case.operation])

    differs = whole_model_differs(model, install, setting.device, setting.compute_dtype)
    if differs is None:
        return chosen
    for operation in operations:
        operation.undo()
    return replace(chosen, choices=(), warnings=(*chosen.warnings, f"nothing is fused: {differs}"))


def _choice(case: Case, setting: Setting, budget: float, fresh: bool) -> Choice:
    key = cache_key(case, setting.device_name, setting.compute_dtype)
    known = None if fresh else cached_choice(key)
    if known is not None:
        return known
    choice = choose(case, budget)
    keep_choice(key, choice)
    return choice


def _operations(model: nn.Module, setting: Setting) -> tuple[list[_Operation], list[str]]:
    found: list[_Operation] = []
    warnings: list[str] = []
    if not setting.compiled:
        found += _between_products(model, setting)
    reason = why_no_loss_head(model)
    if reason is None:
        found.append(_loss_operation(model, setting))
    else:
        warnings.append(f"linear_loss: the logits are computed whole, because {reason}")
    return found, warnings


def _loss_operation(model: nn.Module, setting: Setting) -> _Operation:
    head = output_head(model)
    assert isinstance(head, nn.Linear)
    rows = max(1, round(setting.slots * setting.trained_share))
    case = loss_case(head, rows, setting.compute_dtype, setting.device, setting.z_loss, setting.label_smoothing)
    return _Operation(
        case, lambda name: install_loss_head(model, IMPLEMENTATIONS[name]), lambda: remove_loss_head(model)
    )


def _between_products(model: nn.Module, setting: Setting) -> list[_Operation]:
    found = []
    # Under autocast the residual stream stays in the parameters' type, and the norms with it.
    stream = next(model.parameters()).dtype
    if norms := norms_of(model):
        case = norm_case(norms[0], setting.slots, stream, setting.device)
        found.append(_operation(case, norms, use_norm))
    if mlps := gated_mlps_of(model):
        case = gate_case(mlps[0], setting.slots, setting.compute_dtype, setting.device)
        found.append(_operation(case, mlps, use_gate))
    attentions = rotary_attentions_of(model)
    if attentions and (sizes := _heads(attentions[0])):
        heads, head_dim = sizes
        case = rotary_case(attentions[0], heads, head_dim, setting.slots, setting.compute_dtype, setting.device)
        found.append(_operation(case, attentions, use_rotary))
    return found


def _operation(case: Case, modules: list[nn.Module], use: Callable[[list[nn.Module], str], None]) -> _Operation:
    return _Operation(case, lambda name: use(modules, name), lambda: use(modules, "eager"))


def _heads(module: Any) -> tuple[tuple[int, int], int] | None:
    config = getattr(module, "config", None)
    heads, head_dim = getattr(config, "num_attention_heads", None), getattr(module, "head_dim", None)
    if heads is None or not isinstance(head_dim, int) or head_dim % 2:
        return None
    return (heads, getattr(config, "num_key_value_heads", None) or heads), head_dim
