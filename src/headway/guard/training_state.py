"""Model and optimizers as one tree, and back, bit for bit: around the traps of the state-dict helpers.

- Reading an untouched optimizer's state through torch's helper makes it take a step (its counters start at 1).
- `Optimizer.load_state_dict` casts state to the parameter's type.
- DCP fills only the entries that the target has: a scheduler's `initial_lr` vanishes where it was not set again.
- A parameter that never had a gradient has no state; torch's helper refuses to load that, or gives it some.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from headway.guard.checkpoint import CheckpointRef, CheckpointStore, Loaded
from headway.guard.tree import Tree

Optimizers = Sequence[torch.optim.Optimizer]

_STATE_PREFIX = "optimizer.state."
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def capture(model: nn.Module, optimizers: Optimizers, *, trainable_only: bool = False) -> Tree:
    """{"model": {name: tensor}, "optimizer": {"state": {name: …}, "param_groups": […]}} with the *live* tensors.

    Names are those of the bare model, for plain, DDP, FSDP2 and compiled modules alike. Optimizers that have not
    stepped yet are left untouched. `trainable_only` leaves frozen parameters out (LoRA: adapters only).
    The tree shares memory with the model: save it before the next step.

    Raises ValueError when an optimizer holds a parameter that the model does not have, or two hold the same.
    """
    options = StateDictOptions(ignore_frozen_params=trainable_only)
    weights = _without_aliases(get_model_state_dict(model, options=options))
    return {"model": weights, "optimizer": _optimizer_state(_names(model), optimizers)}


class Capture:
    """`capture` of one model and its optimizers again and again: the weights are looked up only when they moved."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, *, trainable_only: bool = False) -> None:
        self._model, self._optimizers, self._trainable_only = model, optimizers, trainable_only
        self._marks: list[tuple[int, int]] = []
        self._weights: Tree = {}
        self._names: dict[Tensor, str] = {}
        self.moving: frozenset[str] = frozenset()
        """`buffer_keys` of the model."""

    def tree(self) -> Tree:
        """What `capture` returns, with live tensors."""
        held = itertools.chain(self._model.parameters(), self._model.buffers())
        marks = [(id(tensor), _address(tensor)) for tensor in held]
        if marks != self._marks:
            options = StateDictOptions(ignore_frozen_params=self._trainable_only)
            self._weights = _without_aliases(get_model_state_dict(self._model, options=options))
            self._names, self.moving, self._marks = _names(self._model), buffer_keys(self._model), marks
        return {"model": dict(self._weights), "optimizer": _optimizer_state(self._names, self._optimizers)}


def _address(tensor: Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def _optimizer_state(names: dict[Tensor, str], optimizers: Optimizers) -> Tree:
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held = [_name(names, parameter) for parameter in group["params"]]
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": held})
            for name, parameter in zip(held, group["params"], strict=True):
                if parameter in optimizer.state:
                    if name in state:
                        raise ValueError(f"two optimizers hold the parameter {name}")
                    state[name] = optimizer.state[parameter]
    return {"state": state, "param_groups": groups}


def buffer_keys(model: nn.Module) -> frozenset[str]:
    """Keys in `capture`'s tree of what a forward pass may change."""
    names = (name for name, _ in model.named_buffers())
    return frozenset(f"model.{_bare(model, name)}" for name in names)


def _without_aliases(weights: dict[str, Any]) -> dict[str, Any]:
    """A tied head is the embedding under a second name: saved once, and filled with it when loaded in place."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    kept = {}
    for name, tensor in weights.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = (local.data_ptr(), tensor.shape, local.stride())
        if local.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor
    return kept


def restore(
    store: CheckpointStore,
    ref: CheckpointRef,
    model: nn.Module,
    optimizers: Optimizers,
    *,
    trainable_only: bool = False,
) -> Loaded:
    """Puts a checkpoint into a live model and its optimizers, in place, on any number of ranks. Collective.

    Afterwards parameters, optimizer state, counters and every entry of the parameter groups equal what `capture` saw,
    bit for bit; parameters that had no optimizer state then have none now.
    Raises like `CheckpointStore.load`; then model and optimizers hold what they held.
    """
    saved = store.saved_keys(ref)
    allocated = [(optimizer, _allocate_state(optimizer)) for optimizer in optimizers]
    try:
        tree = capture(model, optimizers, trainable_only=trainable_only)
        state = tree["optimizer"]["state"]
        unsaved = [
            name
            for name, entries in state.items()
            if entries and not any(f"{_STATE_PREFIX}{name}.{key}" in saved for key in entries)
        ]
        for name in unsaved:
            del state[name]
        loaded = store.load(ref, tree)
    except BaseException:
        for optimizer, parameters in allocated:
            for parameter in parameters:
                optimizer.state.pop(parameter, None)
        raise
    _forget(model, optimizers, set(unsaved))
    groups = iter(tree["optimizer"]["param_groups"])
    for optimizer in optimizers:
        for group, restored in zip(optimizer.param_groups, groups, strict=False):
            group.update({key: value for key, value in restored.items() if key != "params"})
    return loaded


def _allocate_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Makes an optimizer create its state, by a step with zero gradients and a zero learning rate.

    Only parameters without state take part; returns them. Their gradients are as before.
    """
    parameters = [
        parameter
        for parameter in _parameters(optimizer)
        if parameter.requires_grad and parameter not in optimizer.state
    ]
    if not parameters:
        return []
    gradients = {parameter: parameter.grad for parameter in _parameters(optimizer)}
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in gradients:
            parameter.grad = None
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    return parameters


def _forget(model: nn.Module, optimizers: Optimizers, unsaved: set[str]) -> None:
    names = _names(model)
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            if names[parameter] in unsaved:
                optimizer.state.pop(parameter, None)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: _bare(model, name) for name, parameter in model.named_parameters()}


def _bare(model: nn.Module, name: str) -> str:
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name.removeprefix("module." if isinstance(model, DistributedDataParallel) else "")


def _name(names: dict[Tensor, str], parameter: Tensor) -> str:
    if parameter not in names:
        raise ValueError(f"an optimizer holds a parameter (shape {list(parameter.shape)}) that the model lacks")
    return names[parameter]
