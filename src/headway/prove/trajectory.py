"""What is recorded of one trainee on its way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.prove.coverage import shapes_of
from headway.prove.rebatch import Steps
from headway.prove.sample import sample
from headway.prove.trainee import Trainee


@dataclass
class Trajectory:
    """losses and grad_norms per step; gradients sampled at chosen steps; update: sampled change of the weights.

    Both samples are by tensor name. tokens, held_tokens: trained tokens behind each loss and behind held_out.
    shapes: of every trained parameter, by its full name.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    update: dict[str, Tensor] = field(default_factory=dict)
    held_out: float = math.nan
    tokens: list[int] = field(default_factory=list)
    held_tokens: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def chosen_steps(steps: int) -> tuple[int, ...]:
    """The steps whose gradients are compared: the first, the middle, the last."""
    return tuple(sorted({0, steps // 2, steps - 1}))


def follow(name: str, trainee: Trainee, steps: Steps, tell: Callable[[str], None]) -> Trajectory:
    """Trains through all steps and evaluates on the held-out ones."""
    found = Trajectory(name, shapes=shapes_of(trainee.module))
    before = sample(trainee.module, "data")
    looked_at = chosen_steps(steps.trained)
    for number in range(steps.trained):
        batches = trainee.batches(steps.view, steps.pieces[number])
        found.tokens.append(sum(batch.trained_tokens for batch in batches))
        figures = trainee.update(batches)
        found.losses.append(figures.nll)
        found.grad_norms.append(figures.grad_norm)
        if number in looked_at:
            found.gradients[number] = _unclipped(trainee, figures.grad_norm)
        tell(f"{name}: step {number + 1} of {steps.trained}  nll {figures.nll:.4f}  norm {figures.grad_norm:.3f}")
    after = sample(trainee.module, "data")
    found.update = {tensor: after[tensor] - before[tensor] for tensor in before}
    parts = [trainee.evaluate(trainee.batches(steps.view, pieces)) for pieces in steps.held_out]
    found.held_tokens = tokens = sum(count for _, count in parts)
    found.held_out = sum(nll for nll, _ in parts) / tokens if tokens else math.nan
    return found


def _unclipped(trainee: Trainee, norm: float) -> dict[str, Tensor]:
    clip = trainee.config.optim.clip_norm
    factor = 1.0 if clip is None or not math.isfinite(norm) else min(1.0, clip / (norm + 1e-6))
    return {tensor: torch.div(vector, factor) for tensor, vector in sample(trainee.module, "grad").items()}
