"""Optimizers by name, their parameter groups, and a gradient norm and finite check without a host sync on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.account.errors import UserError
from headway.config.optim import OptimConfig
from headway.model.parameters import decay_groups, parameter_roles

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "eager": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"fused": True},
}
"""torch's ways to compute AdamW: the same formula and the same state, in another number of passes over memory."""


@dataclass
class Optimizers:
    """One or two torch optimizers that step together (Muon has its matrices, AdamW the rest).

    Attributes:
        items: the optimizers; every parameter that trains is in exactly one.
        lr: the first group's rate, as last set.
        skips_on_device: whether they can skip a step by a device flag (fused AdamW's found_inf), without a host sync.
    """

    items: list[torch.optim.Optimizer]
    skips_on_device: bool
    lr: float = field(init=False, default=0.0)
    _base_lr: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self._base_lr = [[float(group["lr"]) for group in item.param_groups] for item in self.items]

    def set_lr(self, factor: float) -> float:
        """Sets every group's rate to its own base rate times `factor`; returns the first group's rate."""
        for item, base in zip(self.items, self._base_lr, strict=True):
            for group, lr in zip(item.param_groups, base, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * factor)  # torchao compiles its step around this tensor
                else:
                    group["lr"] = lr * factor
        self.lr = float(self.items[0].param_groups[0]["lr"])
        return self.lr

    def zero_grad(self) -> None:
        for item in self.items:
            item.zero_grad(set_to_none=True)

    def step(self, finite: Tensor) -> None:
        """Updates the parameters, unless `finite` (a boolean scalar, the same on all ranks) is false.

        Parameters that lie on the host (offloaded) are updated there, once the device has said so.
        """
        finite = finite.to(self.items[0].param_groups[0]["params"][0].device)
        if self.skips_on_device and finite.is_cuda:
            for item in self.items:
                item.found_inf = (~finite).float()  # type: ignore[attr-defined]
                item.step()
        elif bool(finite):  # these have no such switch: the host waits for the device once a step
            for item in self.items:
                item.step()


def build_optimizers(module: nn.Module, config: OptimConfig, adamw: str = "fused") -> Optimizers:
    """Builds the optimizer that the run file names over the parameters that train; `adamw`: one of IMPLEMENTATIONS.

    Raises:
        UserError: nothing trains, or the library that the optimizer needs is not installed.
    """
    decay, plain = decay_groups(module)
    named = dict(module.named_parameters())
    if not decay and not plain:
        raise UserError("model: no parameter trains; check model.lora.targets")
    groups = [
        {"params": [named[name] for name in names], "weight_decay": weight_decay}
        for names, weight_decay in ((decay, config.weight_decay), (plain, 0.0))
        if names
    ]
    return _BUILDERS[config.name](module, groups, config, adamw)


def _adamw(module: nn.Module, groups: list[dict[str, Any]], config: OptimConfig, adamw: str) -> Optimizers:
    return Optimizers([_make_adamw(groups, config, adamw)], skips_on_device=adamw == "fused")


def _make_adamw(groups: list[dict[str, Any]], config: OptimConfig, adamw: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **IMPLEMENTATIONS[adamw])


def _muon(module: nn.Module, groups: list[dict[str, Any]], config: OptimConfig, adamw: str) -> Optimizers:
    """Muon (Jordan, 2024; torch.optim.Muon) on the hidden layers' matrices, AdamW on embeddings, head and vectors."""
    named = dict(module.named_parameters())
    roles = parameter_roles(module)
    matrices = [named[name] for name, role in roles.items() if role == "matrix" and named[name].ndim == 2]
    if not matrices:
        raise UserError("optim.name: muon needs weight matrices that train; this model has none, use adamw")
    if any(isinstance(p, DTensor) for p in matrices):
        raise UserError("optim.name: muon needs whole matrices; set parallel.fsdp=1 or use adamw")
    chosen = {id(p) for p in matrices}
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
    muon = torch.optim.Muon(
        matrices,
        lr=config.muon_lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [group for group in rest if group["params"]]
    return Optimizers([muon, *([_make_adamw(rest, config, adamw)] if rest else [])], skips_on_device=False)


def _adamw8bit(module: nn.Module, groups: list[dict[str, Any]], config: OptimConfig, adamw: str) -> Optimizers:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError("optim.name: adamw8bit needs torchao; `pip install headway[gpu]` or use adamw") from error
    return Optimizers([AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)], skips_on_device=False)


_BUILDERS: dict[str, Callable[[nn.Module, list[dict[str, Any]], OptimConfig, str], Optimizers]] = {
    "adamw": _adamw,
    "muon": _muon,
    "adamw8bit": _adamw8bit,
}


@dataclass(frozen=True)
class GradientNorms:
    """Of the gradients as they lie there. total: float32 scalar over all ranks; each: float32 [P], of this rank's shard
    of every gradient."""

    total: Tensor
    each: Tensor
    grads: list[Tensor]


def gradient_norms(module: nn.Module, clipping: str = "foreach") -> GradientNorms:
    """The global norm and every parameter's own, in one pass. Sharded and whole parameters may be mixed (FSDP with
    LoRA): each kind has its own norm, and they are combined. clipping: foreach, or eager (one call a tensor)."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    sharded: list[Tensor] = [grad for grad in grads if isinstance(grad, DTensor)]
    kinds = [sharded, [grad for grad in grads if not isinstance(grad, DTensor)]]
    norms = [norms_of(some, clipping) for some in kinds if some]
    totals = [_whole(torch.linalg.vector_norm(torch.stack(some))) for some in norms]
    each = torch.stack([_local(norm) for some in norms for norm in some])
    return GradientNorms(torch.linalg.vector_norm(torch.stack(totals)), each, [g for some in kinds for g in some])


def gradient_names(module: nn.Module) -> list[str]:
    """Names of the parameters that have a gradient, in the order of `GradientNorms.each`."""
    named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    sharded = [name for name, grad in named if isinstance(grad, DTensor)]
    return sharded + [name for name, grad in named if not isinstance(grad, DTensor)]


def norms_of(tensors: list[Tensor], clipping: str) -> list[Tensor]:
    """Every tensor's own norm, float32 at least: a norm in bfloat16 would be off by up to one part in 256."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    if clipping == "foreach":
        return list(torch._foreach_norm(tensors, 2, dtype))
    return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]


def scale_all(tensors: list[Tensor], factor: Tensor, clipping: str) -> None:
    """Multiplies all by a scalar, in place."""
    if clipping == "foreach":
        torch._foreach_mul_(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def scale_gradients(
    norms: GradientNorms, clip_norm: float | None, loss_scale: Tensor | None, clipping: str = "foreach"
) -> Tensor:
    """Clips and unscales in place; returns the norm before clipping, unscaled.

    Gradients are scaled by clip_norm / norm where the norm is larger. A non-finite gradient anywhere makes the norm
    non-finite, so this one scalar is the finite check.
    """
    total, factor = norms.total, None
    if loss_scale is not None:
        factor = 1 / loss_scale.to(total.device)
        total = total * factor
    if clip_norm is not None:
        clip = torch.clamp(clip_norm / (total + 1e-6), max=1.0)
        factor = clip if factor is None else clip * factor
    if factor is not None:
        scale_all([_local(grad) for grad in norms.grads], factor, clipping)
    return total


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
