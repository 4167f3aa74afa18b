"""The update's own operations as choices: AdamW's implementations, and norm and scaling of all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.config.optim import OptimConfig
from headway.model.kernels.case import Candidate, Case, Choice
from headway.model.kernels.dice import Dice
from headway.train.optim import IMPLEMENTATIONS, norms_of, scale_all

MOST_ELEMENTS = 1 << 22
"""Elements of the model's own tensors that are measured on: past the caches, and a moment's work."""
STEPS = 3
DEFAULTS = {"optimizer": "fused", "clipping": "foreach"}


def update_cases(module: nn.Module, config: OptimConfig) -> list[Case]:
    """The optimizer (where AdamW is used) and clipping, on shapes of the model's trained parameters."""
    shapes = _shapes(module)
    parameter = next(p for p in module.parameters() if p.requires_grad)
    dtype, device = parameter.dtype, parameter.device
    cases = [] if config.name == "adamw8bit" else [_optimizer_case(shapes, config, dtype, device)]
    return [*cases, _clipping_case(shapes, dtype, device)]


def _shapes(module: nn.Module) -> list[torch.Size]:
    """Of the trained parameters, the smallest, then the largest of those that MOST_ELEMENTS still hold."""
    sizes = sorted((p.shape for p in module.parameters() if p.requires_grad), key=lambda shape: shape.numel())
    kept, total = sizes[:1], sizes[0].numel()
    for shape in reversed(sizes[1:]):
        if total + shape.numel() <= MOST_ELEMENTS:
            kept.append(shape)
            total += shape.numel()
    return kept


def _optimizer_case(shapes: list[torch.Size], config: OptimConfig, dtype: torch.dtype, device: torch.device) -> Case:
    """Updates (not weights, which hide them) after a few steps on fixed gradients, in units of the learning rate."""
    lr = 1.0  # as large as the weights, whose own rounding would hide a bfloat16 update

    def run(options: dict[str, bool], *tensors: Tensor) -> list[Tensor]:
        half = len(tensors) // 2
        weights = [nn.Parameter(tensor.clone()) for tensor in tensors[:half]]
        made = torch.optim.AdamW(
            weights, lr=lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, **options
        )
        for step in range(STEPS):
            for weight, grad in zip(weights, tensors[half:], strict=True):
                weight.grad = grad * (1.0 - 0.5 * step)
            made.step()
        return [(weight.detach() - before) / lr for weight, before in zip(weights, tensors[:half], strict=True)]

    def cannot(name: str) -> str | None:
        # Only the fused one can be told on the device to skip a step; the others would make the host wait for it.
        return (
            "it cannot skip a step without waiting for the host" if device.type == "cuda" and name != "fused" else None
        )

    candidates = [Candidate("eager", partial(run, IMPLEMENTATIONS["eager"]))]
    candidates += [
        Candidate(name, partial(run, IMPLEMENTATIONS[name]), partial(cannot, name)) for name in ("foreach", "fused")
    ]
    return Case("optimizer", _told(shapes), candidates, _inputs(shapes, 2, dtype, device), 1, 1)


def _clipping_case(shapes: list[torch.Size], dtype: torch.dtype, device: torch.device) -> Case:
    def run(name: str, *grads: Tensor) -> list[Tensor]:
        mine = [grad.clone() for grad in grads]
        total = torch.linalg.vector_norm(torch.stack(norms_of(mine, name)))
        scale_all(mine, 1.0 / total, name)
        return [total, *mine]

    candidates = [Candidate(name, partial(run, name)) for name in ("eager", "foreach")]
    return Case("clipping", _told(shapes), candidates, _inputs(shapes, 1, dtype, device), 1, 1)


def _inputs(
    shapes: list[torch.Size], sets: int, dtype: torch.dtype, device: torch.device
) -> Callable[[int], tuple[Any, ...]]:
    dice = Dice(43, device)
    # Drawn once: that takes longer than an update, and no candidate writes to them.
    made = tuple(dice.normal(*shape).to(dtype) for shape in shapes * sets)
    return lambda rows: made


def settled(choice: Choice) -> Choice:
    """What was not measured for want of time does not change what is used: the default stays."""
    default = next(result for result in choice.results if result.name == DEFAULTS[choice.operation])
    unknown = default.error is None and not default.wrong and default.name != choice.chosen
    return replace(choice, chosen=default.name) if unknown and not default.reason.startswith("it ") else choice


def _told(shapes: list[torch.Size]) -> str:
    return f"{len(shapes)} tensors of {sum(shape.numel() for shape in shapes)} elements"
