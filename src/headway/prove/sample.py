"""Large vectors held against each other through a fixed sample of their elements, parameter by parameter."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

ELEMENTS = 1 << 16
"""Elements kept of one parameter. A cosine from 65,536 of them is within about 0.4 % of the whole vector's."""

Sample = Mapping[str, Tensor]
"""Tensor name (or layer name, from `by_layer`) -> float64 vector."""


def sample(module: nn.Module, of: str) -> dict[str, Tensor]:
    """The sampled elements of every trained parameter's `grad` or `data`, by tensor name, on the CPU.

    A sample is scaled so that its length estimates the whole parameter's: lengths of tensors may be added up. A
    parameter without a gradient counts as zeros: what stopped learning must not go unseen.
    """
    found: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        value = parameter.grad if of == "grad" else parameter
        flat = torch.zeros(parameter.numel()) if value is None else value.detach().flatten()
        index = _index(name, flat.numel()).to(flat.device)
        part = flat[index].double().cpu().mul_(math.sqrt(flat.numel() / max(index.numel(), 1)))
        found.setdefault(tensor_of(name), []).append(part)
    return {name: torch.cat(parts) for name, parts in found.items()}


def by_layer(tensors: Sample) -> dict[str, Tensor]:
    """The same vectors, those of one layer (self_attn, mlp, one norm, …) as one."""
    found: dict[str, list[Tensor]] = {}
    for name, vector in tensors.items():
        found.setdefault(layer_of(name), []).append(vector)
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def tensor_of(name: str) -> str:
    """The parameter's name; one for all experts of a layer: an expert with few tokens has no band of its own."""
    return re.sub(r"\bexperts\.\d+\.", "experts.*.", name).removeprefix("model.")


def layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `layers.3.mlp`; outside the layers the module's own name."""
    match = re.search(r"([A-Za-z_]+\.\d+)\.([A-Za-z_0-9]+)", name)
    if match:
        return f"{match[1]}.{match[2]}"
    return name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]


def _index(name: str, size: int) -> Tensor:
    if size <= ELEMENTS:
        return torch.arange(size)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return torch.randint(size, (ELEMENTS,), generator=torch.Generator().manual_seed(seed))


def cosine(a: Tensor, b: Tensor) -> float:
    """1 for two zero vectors, 0 where only one is."""
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else float(not a.any() and not b.any())


def apart(a: Tensor, b: Tensor) -> float:
    """|a - b| / |a|; 0 for two zero vectors."""
    difference, norm = float((a - b).norm()), float(a.norm())
    return difference / norm if norm else (0.0 if not difference else float("inf"))


def gain(of: Tensor, against: Tensor, probe: Tensor) -> float:
    """How long `of` is in units of `against`, both seen by `probe`, a third vector with noise of its own.

    1 where `of` and `against` hold the same signal under independent noise of any size: plain norms would count the
    noise, so that stochastic rounding would look like a longer update.
    """
    base = float(against @ probe)
    return float(of @ probe) / base if base else (1.0 if not of.any() else float("inf"))
