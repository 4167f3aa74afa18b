"""The gate of a gated MLP (SwiGLU, GeGLU): act(gate) * up, between the layer's matrix products."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headway.model.dropout import dropouts
from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.dice import Dice
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
    if any(True for _ in dropouts(module)):
        return False  # in evaluation mode the call below would not show it
    with torch.no_grad():
        expected = module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
        return torch.equal(type(module).forward(module, x), expected)


def gate_case(module: nn.Module, rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    width: int = module.gate_proj.out_features  # type: ignore[union-attr, assignment]
    act: Any = module.act_fn

    def inputs(count: int) -> tuple[Tensor, Tensor]:
        dice = Dice(13, device)
        pair = [dice.normal(count, width).to(dtype) for _ in range(2)]
        return pair[0].requires_grad_(), pair[1].requires_grad_()

    def known_only() -> str | None:
        return None if is_silu(act) or is_gelu(act) else f"it knows SiLU and tanh GELU, not {type(act).__name__}"

    candidates = [
        Candidate("eager", eager_gate(act)),
        Candidate("lean", lean_gate(act), known_only),
        Candidate("liger", liger_gate(act), lambda: known_only() or missing_on_gpu("liger_kernel", "liger-kernel")),
        Candidate("compile", compiled_gate(act), compiles=True),
    ]
    return Case("gated_mlp", f"{rows}x{width} {type(act).__name__}", candidates, inputs, rows, min(rows, 256))


def use_gate(modules: list[nn.Module], name: str) -> None:
    """Replaces the forward of these instances; `eager` gives them their own back."""
    for module in modules:
        module.__dict__.pop("forward", None)
        if name == "eager":
            continue
        makers = {"lean": lean_gate, "liger": liger_gate}
        module.__dict__["forward"] = _bound(module, makers.get(name, compiled_gate)(module.act_fn))  # type: ignore[arg-type]


def _bound(module: Any, gate: Gate) -> Callable[[Tensor], Tensor]:
    return lambda x: module.down_proj(gate(module.gate_proj(x), module.up_proj(x)))


def eager_gate(act: Callable[[Tensor], Tensor]) -> Gate:
    return lambda gate, up: act(gate) * up


def lean_gate(act: Callable[[Tensor], Tensor]) -> Gate:
    """Ours: keeps only its two inputs for backward (a third less memory than the plain one)."""
    approximate = None if is_silu(act) else "tanh"

    def gate_of(gate: Tensor, up: Tensor) -> Tensor:
        found: Any = _LeanGate.apply(gate, up, approximate)
        return found

    return gate_of


class _LeanGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: str | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return _act(gate, gelu).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_up, wide = _act(gate, ctx.gelu).mul_(grad), grad * up
        if ctx.gelu is None:
            return torch.ops.aten.silu_backward(wide, gate), grad_up, None
        return torch.ops.aten.gelu_backward(wide, gate, approximate=ctx.gelu), grad_up, None


def _act(gate: Tensor, gelu: str | None) -> Tensor:
    return F.silu(gate) if gelu is None else F.gelu(gate, approximate=gelu)


def liger_gate(act: Callable[[Tensor], Tensor]) -> Gate:
    module, function = ("swiglu", "LigerSiLUMulFunction") if is_silu(act) else ("geglu", "LigerGELUMulFunction")

    def gate_of(gate: Tensor, up: Tensor) -> Tensor:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply(gate, up)

    return gate_of


@lru_cache(maxsize=4)
def compiled_gate(act: Callable[[Tensor], Tensor]) -> Gate:
    return torch.compile(eager_gate(act), dynamic=False)


def is_silu(act: Any) -> bool:
    x = torch.linspace(-4, 4, 9)
    return bool(torch.allclose(act(x), F.silu(x)))


def is_gelu(act: Any) -> bool:
    """GELU by tanh (Hendrycks and Gimpel, arXiv:1606.08415), as Gemma has it; the exact one is another function."""
    x = torch.linspace(-4, 4, 9)
    return bool(torch.allclose(act(x), F.gelu(x, approximate="tanh"), rtol=1e-6, atol=1e-7))
