"""RMS norm: the module's own forward, torch's, ours in fewer passes, a compiled one, Liger's."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.dice import Dice
from headway.model.kernels.peers_linear_loss import missing_on_gpu

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., H], weight [H], eps) -> x / sqrt(mean(x^2) + eps) * weight, in x's type."""


def norms_of(model: nn.Module) -> list[nn.Module]:
    """RMS norms over the hidden size: all of the class that most modules named like one have."""
    found = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and eps_of(m) is not None]
    found = [m for m in found if isinstance(getattr(m, "weight", None), Tensor) and m.weight.ndim == 1]
    if not found:
        return []
    kinds = [(type(m), m.weight.shape) for m in found]
    most = max(set(kinds), key=kinds.count)
    return [module for module, kind in zip(found, kinds, strict=True) if kind == most]


def norm_case(
    module: nn.Module, rows: int, dtype: torch.dtype, device: torch.device, cast: torch.dtype | None = None
) -> Case:
    """The module's own computation is the reference: a norm that scales by 1 + weight, say, fits no other candidate.

    cast: the weight's type where it is not the module's own.
    """
    width, eps = int(module.weight.shape[0]), eps_of(module)  # type: ignore[index]
    assert eps is not None
    own = own_norm(module)

    def call(function: Norm) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, weight: function(x, weight, eps)

    def inputs(count: int) -> tuple[Tensor, Tensor]:
        dice = Dice(11, device)
        x = dice.normal(count, width).to(dtype).requires_grad_()
        weight = (dice.uniform(width) + 0.5).to(cast or module.weight.dtype).requires_grad_()  # type: ignore[arg-type]
        return x, weight

    candidates = [
        Candidate("eager", own),
        Candidate("torch", call(torch_norm)),
        Candidate("lean", call(lean_norm)),
        Candidate("liger", call(liger_norm), lambda: missing_on_gpu("liger_kernel", "liger-kernel")),
        Candidate("compile", call(_compiled()), compiles=True),
    ]
    return Case("rms_norm", f"{rows}x{width}", candidates, inputs, rows, min(rows, 256))


def use_norm(modules: list[nn.Module], name: str) -> None:
    """Replaces the forward of these instances (no class, no other model); `eager` gives them their own back."""
    for module in modules:
        module.__dict__.pop("forward", None)
        if name == "eager":
            continue
        eps = eps_of(module)
        module.__dict__["forward"] = _bound(norm_by_name(name), module, float(eps))  # type: ignore[arg-type]


def norm_by_name(name: str) -> Norm:
    functions: dict[str, Norm] = {"torch": torch_norm, "lean": lean_norm, "liger": liger_norm, "eager": plain_norm}
    return functions.get(name) or _compiled()


def _bound(function: Norm, module: nn.Module, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda hidden_states: function(hidden_states, module.weight, eps)  # type: ignore[arg-type]


def torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch.nn.functional.rms_norm`, in float32 at least as models do."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def lean_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Ours: few passes over memory, keeps its input and one number a row for backward. Statistics are float32."""
    found: Any = _LeanNorm.apply(x, weight, eps)
    return found


class _LeanNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wide = scale.dtype
        unit = x.to(wide) * scale
        product = grad.to(wide) * unit
        along = (product @ weight.to(wide)).unsqueeze(-1) / x.shape[-1]
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_x = torch.mul(grad, weight, out=product) if grad.dtype == wide else grad.to(wide) * weight
        return grad_x.sub_(unit.mul_(along)).mul_(scale).to(x.dtype), grad_weight, None


def liger_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(x, weight, eps, 0.0, "llama", False)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


@lru_cache(maxsize=1)
def _compiled() -> Norm:
    return torch.compile(plain_norm, dynamic=False)


def own_norm(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    # A copy, without a replaced forward, lets the weight be an input without touching the model.
    twin = copy.copy(module)
    twin.__dict__ = {key: value for key, value in module.__dict__.items() if key != "forward"}
    return lambda x, weight: torch.func.functional_call(twin, {"weight": weight}, (x,))


def eps_of(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None
