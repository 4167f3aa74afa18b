"""LayerNorm (Ba et al., arXiv:1607.06450): torch's own kernel, Liger's, a compiled one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.dice import Dice
from headway.model.kernels.peers_linear_loss import missing_on_gpu

LayerNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(x [..., H], weight [H], bias [H], eps) -> [..., H] in x's type."""


def layer_norms_of(model: nn.Module) -> list[nn.LayerNorm]:
    """Plain nn.LayerNorm over the width that most of them have, with weight and bias."""
    found = [m for m in model.modules() if type(m) is nn.LayerNorm and m.elementwise_affine and m.bias is not None]
    found = [m for m in found if len(m.normalized_shape) == 1]
    if not found:
        return []
    widths = [m.normalized_shape for m in found]
    most = max(set(widths), key=widths.count)
    return [m for m in found if m.normalized_shape == most]


def layer_norm_case(
    module: nn.LayerNorm, rows: int, dtype: torch.dtype, device: torch.device, cast: torch.dtype | None = None
) -> Case:
    """cast: type of weight and bias where it is not the module's own."""
    width, eps = module.normalized_shape[0], module.eps

    def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
        dice = Dice(41, device)
        x = dice.normal(count, width) + 1.0
        weight, bias = dice.uniform(width) + 0.5, dice.normal(width)
        kinds = (dtype, cast or module.weight.dtype, cast or module.bias.dtype)
        made = [value.to(kind) for value, kind in zip((x, weight, bias), kinds, strict=True)]
        return made[0].requires_grad_(), made[1].requires_grad_(), made[2].requires_grad_()

    def call(function: LayerNorm) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda x, weight, bias: function(x, weight, bias, eps)

    candidates = [
        Candidate("eager", call(torch_layer_norm)),
        Candidate("liger", call(liger_layer_norm), lambda: missing_on_gpu("liger_kernel", "liger-kernel")),
        Candidate("compile", call(_compiled()), compiles=True),
    ]
    return Case("layer_norm", f"{rows}x{width}", candidates, inputs, rows, min(rows, 256))


def use_layer_norm(modules: list[nn.LayerNorm], name: str) -> None:
    """Replaces the forward of these instances; `eager` gives them their own back."""
    for module in modules:
        module.__dict__.pop("forward", None)
        if name != "eager":
            module.__dict__["forward"] = _bound(module, liger_layer_norm if name == "liger" else _compiled())


def _bound(module: nn.LayerNorm, function: LayerNorm) -> Callable[[Tensor], Tensor]:
    return lambda input: function(input, module.weight, module.bias, module.eps)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply(x, weight, bias, eps)


@lru_cache(maxsize=1)
def _compiled() -> LayerNorm:
    return torch.compile(torch_layer_norm, dynamic=False)
