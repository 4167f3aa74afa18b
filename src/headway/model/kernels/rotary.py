"""Rotary position embedding of queries and keys (Su et al., arXiv:2104.09864), halves rotated as in Llama."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.dice import Dice
from headway.model.kernels.lookup import innermost, looks_up
from headway.model.kernels.peers_linear_loss import missing_on_gpu

Rotary = Callable[..., tuple[Tensor, Tensor]]
"""(q [1, H, S, D], k [1, K, S, D], cos [1, S, D], sin [1, S, D]) -> the two, rotated."""

_NAME = "apply_rotary_pos_emb"


def rotary_attentions_of(model: nn.Module) -> list[nn.Module]:
    """Attention modules whose forward looks `apply_rotary_pos_emb` up in its own file, where that turns halves."""
    return [module for module in model.modules() if looks_up(module, _NAME) and _turns_halves(own_rotary(module))]


def _turns_halves(function: Rotary) -> bool:
    """Some families have tables of half the width, or other arguments (gpt-oss): nothing here fits them."""
    q, k = torch.arange(48.0).view(1, 2, 3, 8), torch.arange(24.0).view(1, 1, 3, 8)
    angle = torch.arange(12.0).view(1, 3, 4).repeat(1, 1, 2)
    try:
        found = function(q, k, angle.cos(), angle.sin())
    except Exception:  # it takes other arguments, or other shapes
        return False
    return all(
        torch.allclose(one, other, atol=1e-4)
        for one, other in zip(found, _plain(q, k, angle.cos(), angle.sin()), strict=True)
    )


def rotary_case(
    module: nn.Module, heads: tuple[int, int], head_dim: int, rows: int, dtype: torch.dtype, device: torch.device
) -> Case:
    def inputs(count: int) -> tuple[Tensor, ...]:
        dice = Dice(17, device)
        # As projections leave them: [1, S, H, D], seen as [1, H, S, D].
        pair = [dice.normal(1, count, n, head_dim).to(dtype) for n in heads]
        turns = 1e4 ** -(torch.arange(head_dim // 2, device=device) / (head_dim // 2))
        angle = torch.arange(count, device=device)[:, None] * turns
        angle = torch.cat([angle, angle], -1)[None]
        q, k = (x.transpose(1, 2).requires_grad_() for x in pair)
        return q, k, angle.cos().to(dtype), angle.sin().to(dtype)

    def liger_cannot() -> str | None:
        return missing_on_gpu("liger_kernel", "liger-kernel")

    candidates = [
        Candidate("eager", own_rotary(module)),
        Candidate("lean", lean_rotary),
        Candidate("liger", liger_rotary, liger_cannot),
        Candidate("compile", _compiled(), compiles=True),
    ]
    shape = f"{rows}x({heads[0]}+{heads[1]})x{head_dim}"
    return Case("rotary", shape, candidates, inputs, rows, min(rows, 256))


def use_rotary(modules: list[nn.Module], name: str) -> None:
    """Gives these instances a forward that looks another rotary function up; their class's file stays as it is."""
    for module in modules:
        module.__dict__.pop("forward", None)
        if name == "eager":
            continue
        function = {"lean": lean_rotary, "liger": liger_rotary}.get(name) or _compiled()
        module.__dict__["forward"] = types.MethodType(_rebound(type(module).forward, function), module)


def _rebound(forward: Any, function: Rotary) -> Any:
    """A copy of the (possibly decorated) forward whose innermost function sees `function` under the plain name."""
    inner = innermost(forward)
    copy = types.FunctionType(
        inner.__code__, {**inner.__globals__, _NAME: function}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy


def lean_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Ours: two passes over each half instead of five over the whole; backward is the rotation by the other sign."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned: Any = (_LeanRotary.apply(q, cos, sin), _LeanRotary.apply(k, cos, sin))
    return turned


class _LeanRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """cos and sin repeat their halves, as every model's tables of this kind do; only the first is read."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    # In the projections' own order in memory, which attention reads as it is.
    out = torch.empty_like(x)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


def liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    # Its kernel writes over its inputs, which autograd may still need.
    return function.apply(q.clone(), k.clone(), cos, sin)


def _plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turn(q), turn(k)


@lru_cache(maxsize=1)
def _compiled() -> Rotary:
    return torch.compile(_plain, dynamic=False)


def own_rotary(module: nn.Module) -> Rotary:
    function: Rotary = innermost(type(module).forward).__globals__[_NAME]
    return function
