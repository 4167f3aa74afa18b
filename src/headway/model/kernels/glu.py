"""The gate of a gated MLP (SwiGLU, GeGLU): act(gate) * up, between the layer's matrix products."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.peers_linear_loss import missing_on_gpu

Gate = Callable[[Tensor, Tensor], Tensor]
"""(gate [..., F], up [..., F]) -> act(gate) * up."""


def gated_mlps_of(model: nn.Module) -> list[nn.Module]:
    """Modules with gate_proj, up_proj, down_proj and act_fn whose forward is down(act(gate(x)) * up(x)): proved by
    calling them, since a class may do more (dropout, caps)."""
    named = [m for m in model.modules() if all(hasattr(m, name) for name in ("gate_proj", "up_proj", "down_proj"))]
    found = [m for m in named if callable(getattr(m, "act_fn", None)) and isinstance(m.gate_proj, nn.Module)]
    return found if found and all(_is_plain(module) for module in found[:1]) else []


def _is_plain(module: Any) -> bool:
    weight = next(module.gate_proj.parameters())
    x = torch.randn(2, module.gate_proj.in_features, generator=torch.Generator().manual_seed(3))
    x = x.to(weight.device, weight.dtype)
    with torch.no_grad():
        expected = module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
        return torch.equal(type(module).forward(module, x), expected)


def gate_case(module: nn.Module, rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    width: int = module.gate_proj.out_features  # type: ignore[union-attr, assignment]
    act: Any = module.act_fn

    def inputs(count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(13)
        pair = [torch.randn(count, width, generator=generator).to(device, dtype) for _ in range(2)]
        return pair[0].requires_grad_(), pair[1].requires_grad_()

    def silu_only() -> str | None:
        return None if is_silu(act) else f"it computes SwiGLU only, not {type(act).__name__}"

    candidates = [
        Candidate("eager", eager_gate(act)),
        Candidate("lean", lean_gate, silu_only),
        Candidate("liger", liger_gate, lambda: silu_only() or missing_on_gpu("liger_kernel", "liger-kernel")),
        Candidate("compile", compiled_gate(act), compiles=True),
    ]
    return Case("gated_mlp", f"{rows}x{width} {type(act).__name__}", candidates, inputs, rows, min(rows, 256))


def use_gate(modules: list[nn.Module], name: str) -> None:
    """Replaces the forward of these instances; `eager` gives them their own back."""
    for module in modules:
        module.__dict__.pop("forward", None)
        if name == "eager":
            continue
        gate = {"lean": lean_gate, "liger": liger_gate}.get(name) or compiled_gate(module.act_fn)
        module.__dict__["forward"] = _bound(module, gate)


def _bound(module: Any, gate: Gate) -> Callable[[Tensor], Tensor]:
    return lambda x: module.down_proj(gate(module.gate_proj(x), module.up_proj(x)))


def eager_gate(act: Callable[[Tensor], Tensor]) -> Gate:
    return lambda gate, up: act(gate) * up


def lean_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Ours: SwiGLU that keeps only its two inputs for backward (a third less memory than the plain one)."""
    found: Any = _LeanGate.apply(gate, up)
    return found


class _LeanGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = torch.nn.functional.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


def liger_gate(gate: Tensor, up: Tensor) -> Tensor:
    return importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply(gate, up)


@lru_cache(maxsize=4)
def compiled_gate(act: Callable[[Tensor], Tensor]) -> Gate:
    return torch.compile(eager_gate(act), dynamic=False)


def is_silu(act: Any) -> bool:
    x = torch.linspace(-4, 4, 9)
    return bool(torch.allclose(act(x), torch.nn.functional.silu(x)))
