"""A nested state ("tree") as flat tensors and flat plain values, and back, with nothing lost on the way.

Keys are the path joined with ".", the same that torch.distributed.checkpoint makes, so its own tools can read our
folders. Tensors go to DCP; plain values (learning rates, betas, counters) do not: DCP would pickle each of them, and
read them back with an unpickler that runs code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Tree = dict[str, Any]
"""Nested dicts (text keys) and lists; leaves are tensors, DTensors or plain values."""

Path = tuple[str | int, ...]


@dataclass(slots=True)
class Flat:
    """`tensors` and `values` by joined key; `lists`: length of every list that was walked into; `paths` of all keys."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, int] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def flatten(tree: Tree) -> Flat:
    """Tensors stay the live ones. Raises TypeError for keys that are not text and for tensors inside tuples,
    ValueError when two paths join to one key.
    """
    flat = Flat()
    _walk(tree, (), flat)
    return flat


def assign(tree: Tree, path: Path, value: Any) -> None:
    """Sets the leaf at `path`; raises KeyError, IndexError or TypeError where there is no such place."""
    node: Any = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def place(tree: Tree, path: Path) -> Any:
    """The node at `path`, or None where there is none."""
    node: Any = tree
    for key in path:
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_bytes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Bytes per top-level key ("model", "optimizer", …), each tensor counted once in its full (unsharded) shape."""
    parts: dict[str, int] = {}
    for key, tensor in tensors.items():
        part = key.partition(".")[0]
        parts[part] = parts.get(part, 0) + _full_bytes(tensor)
    return parts


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that a wrapper subclass (e.g. torchao's 8-bit state) is made of; empty for plain tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def _full_bytes(tensor: Tensor) -> int:
    """Of the unsharded tensor; from this rank's share where the storage is not what the dtype says."""
    here = local(tensor)
    inner = inner_tensors(here)
    elements = math.prod(tensor.shape)
    if not inner or here.numel() == 0:
        return elements * tensor.element_size()
    return sum(part.nbytes for part in inner.values()) * elements // here.numel()


def is_text(value: Any) -> bool:
    """Text and lists of text name things (parameters of a group); they are layout, not state."""
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    )


def _walk(node: Any, path: Path, flat: Flat) -> None:
    if isinstance(node, Mapping) and (node or not path):
        for key, child in node.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} under {_join(path) or 'the root'} is not text")
            _walk(child, (*path, key), flat)
    elif isinstance(node, list) and any(isinstance(child, (Mapping, list, Tensor)) for child in node):
        flat.lists[_join(path)] = len(node)
        for index, child in enumerate(node):
            _walk(child, (*path, index), flat)
    else:
        key = _join(path)
        if key in flat.paths:
            raise ValueError(f"two entries have the key {key}")
        flat.paths[key] = path
        if isinstance(node, Tensor):
            flat.tensors[key] = node
        elif isinstance(node, tuple) and any(isinstance(child, torch.Tensor) for child in node):
            raise TypeError(f"{key} is a tuple with tensors: use a list")
        else:
            flat.values[key] = node


def _join(path: Path) -> str:
    return ".".join(map(str, path))
