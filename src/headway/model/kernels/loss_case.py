"""Head and cross entropy as a choice."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.data.batch import IGNORE
from headway.model.head import LinearLoss
from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.dice import Dice
from headway.model.kernels.linear_loss import chunked_linear_loss, eager_linear_loss, triton_linear_loss
from headway.model.kernels.peers_linear_loss import (
    cut_cannot,
    cut_linear_loss,
    liger_cannot,
    liger_linear_loss,
    torch_cannot,
    torch_linear_loss,
)
from headway.model.kernels.triton_kernels import triton_cannot

IMPLEMENTATIONS: dict[str, LinearLoss] = {
    "eager": eager_linear_loss,
    "chunked": chunked_linear_loss,
    "triton": triton_linear_loss,
    "torch": torch_linear_loss,
    "liger": liger_linear_loss,
    "cut": cut_linear_loss,
}

CHECK_ROWS = 32
FLOPS_TIMED = {"cpu": 3e10, "cuda": 4e13}
"""Enough for a stable time; a whole pack's head takes seconds on a CPU."""


def loss_case(
    head: nn.Linear,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    z_loss: float,
    label_smoothing: float,
    cast: torch.dtype | None = None,
) -> Case:
    """Random hidden states and labels (a tenth without one) through the head's own sizes, in the run's own mode.

    cast: the weight's type where it is not the head's own.
    """
    (vocabulary, width), weight_dtype = head.weight.shape, cast or head.weight.dtype
    flops = FLOPS_TIMED["cpu" if device.type == "cpu" else "cuda"]
    rows = max(CHECK_ROWS, min(rows, int(flops / (6 * vocabulary * width))))

    # Made once: drawing tens of millions of numbers takes longer than the loss. Neighbours differ, and rows repeat.
    pattern = (Dice(19, device).normal(min(vocabulary, 4099), width) * width**-0.5).to(weight_dtype)
    weight = pattern[torch.arange(vocabulary, device=device) % len(pattern)]
    weight.requires_grad_(head.weight.requires_grad)

    def inputs(count: int) -> tuple[Any, ...]:
        dice = Dice(29, device)
        hidden = dice.normal(count, width).to(dtype).requires_grad_()
        bias = None if head.bias is None else torch.zeros(vocabulary, device=device, dtype=weight_dtype)
        labels = dice.below(vocabulary, count)
        labels[::10] = IGNORE
        return hidden, weight, bias, labels

    def call(name: str) -> Any:
        function = IMPLEMENTATIONS[name]

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
            autocast = hidden.dtype != weight.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
            with torch.autocast(device.type, hidden.dtype, enabled=autocast):
                loss, nll = function(hidden, weight, bias, labels, z_loss, label_smoothing)
            return loss, nll.sum()  # some know no row's own

        return run

    modes = {"z_loss": z_loss, "label_smoothing": label_smoothing}
    candidates = [
        Candidate("eager", call("eager")),
        Candidate("chunked", call("chunked")),
        Candidate("triton", call("triton"), triton_cannot),
        Candidate("torch", call("torch"), partial(torch_cannot, **modes)),
        Candidate("liger", call("liger"), partial(liger_cannot, **modes)),
        Candidate("cut", call("cut"), partial(cut_cannot, **modes)),
    ]
    shape = f"{width}->{vocabulary} z_loss={z_loss:g} label_smoothing={label_smoothing:g}"
    return Case("linear_loss", shape, candidates, inputs, rows, CHECK_ROWS)
