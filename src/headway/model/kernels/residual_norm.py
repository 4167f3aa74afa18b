"""Residual addition and the RMS norm behind it, as one: in the middle of every layer written as Llama's is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.dice import Dice
from headway.model.kernels.lookup import innermost
from headway.model.kernels.norm import eps_of, norm_by_name, own_norm, plain_norm
from headway.model.kernels.peers_linear_loss import missing_on_gpu
from headway.model.kernels.triton_kernels import triton_cannot, triton_residual_norm

ResidualNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""(x [..., H], residual [..., H], weight [H], eps) -> (norm of the sum times weight, the sum)."""


def residual_layers_of(model: nn.Module, norms: list[nn.Module]) -> list[nn.Module]:
    """Decoder layers whose forward has the very code of Llama's in the installed transformers (twenty families copy
    it), and whose second norm is one of `norms`. Two equal lists of instructions compute the same."""
    known = {id(norm) for norm in norms}
    return [
        module
        for module in model.modules()
        if _is_llama_layer(module) and id(getattr(module, "post_attention_layernorm", None)) in known
    ]


def _is_llama_layer(module: nn.Module) -> bool:
    code: Any = getattr(innermost(type(module).forward), "__code__", None)
    return code is not None and _written(code) == _written(innermost(LlamaDecoderLayer.forward).__code__)


def _written(code: Any) -> tuple[Any, ...]:
    return code.co_code, code.co_names, code.co_varnames, code.co_consts[1:]


def residual_case(
    norm: nn.Module,
    chosen: str,
    rows: int,
    stream: torch.dtype,
    branch: torch.dtype,
    device: torch.device,
    cast: torch.dtype | None = None,
) -> Case:
    """branch, stream: type of what attention returns and of the residual. chosen: the norm's own choice, whose time
    with a separate addition is the one to beat. cast: the weight's type where it is not the module's own."""
    weight: Any = norm.weight
    eps = eps_of(norm)
    assert eps is not None
    own = own_norm(norm)
    width = int(weight.shape[0])

    def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
        dice = Dice(37, device)
        x, residual = (dice.normal(count, width) for _ in range(2))
        scale = dice.uniform(width) + 0.5
        return (
            x.to(branch).requires_grad_(),
            residual.to(stream).requires_grad_(),
            scale.to(cast or weight.dtype).requires_grad_(),
        )

    def call(function: ResidualNorm) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda x, residual, weight: function(x, residual, weight, eps)

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return own(total, weight), total

    def apart_cannot() -> str | None:
        return "the same as eager: the norm's own code was chosen" if chosen == "eager" else None

    candidates = [
        Candidate("eager", plain),
        Candidate("apart", call(_apart(chosen)), apart_cannot),
        Candidate("triton", call(triton_residual_norm), triton_cannot),
        Candidate("liger", call(liger_residual_norm), lambda: missing_on_gpu("liger_kernel", "liger-kernel")),
        Candidate("compile", call(_compiled()), compiles=True),
    ]
    return Case("residual_norm", f"{rows}x{width} {chosen} norm", candidates, inputs, rows, min(rows, 256))


def use_residual_norm(layers: list[nn.Module], name: str) -> None:
    """Replaces the forward of these instances; `eager` and `apart` leave addition and norm on their own."""
    functions: dict[str, ResidualNorm] = {"triton": triton_residual_norm, "liger": liger_residual_norm}
    for layer in layers:
        layer.__dict__.pop("forward", None)
        if name not in ("eager", "apart"):
            layer.__dict__["forward"] = _bound(layer, functions.get(name) or _compiled())


def _bound(layer: Any, function: ResidualNorm) -> Callable[..., Tensor]:
    norm = layer.post_attention_layernorm
    eps = float(eps_of(norm) or 0.0)

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        normed, total = function(attended, hidden_states, norm.weight, eps)
        return total + layer.mlp(normed)

    return forward


def liger_residual_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return function.apply(x, residual, weight, eps, 0.0, "llama", False)


def _apart(chosen: str) -> ResidualNorm:
    norm = norm_by_name(chosen)

    def apart(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, weight, eps), total

    return apart


def _plain(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return plain_norm(total, weight, eps), total


@lru_cache(maxsize=1)
def _compiled() -> ResidualNorm:
    return torch.compile(_plain, dynamic=False)
