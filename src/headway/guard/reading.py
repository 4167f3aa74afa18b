"""Reading a checkpoint: verify, compare layouts, read everything aside, then copy it over in one go.

DCP alone overwrites tensors one by one: a load that fails half-way leaves a mixture of two models, and a tensor of
another type is converted silently. Here nothing live changes before everything was read on every rank.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from headway.account.errors import UserError
from headway.guard.control import Control
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.tree import Flat, Path, Tree, assign, flatten, inner_tensors, is_text, local, place
from headway.guard.writing import META_FILE, VALUES_FILE, failure_text, quiet_dcp, rank_file

_SHOWN = 4


class Loaded(NamedTuple):
    """What `load` returns besides the tensors.

    `rank_state` is None on a rank that did not exist when the checkpoint was written. `world_size` is the one it was
    written with. `notes`: what could not be restored exactly, one line each, for the user to see.
    """

    meta: dict[str, Any]
    rank_state: dict[str, Any] | None
    world_size: int
    notes: list[str]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SavedKeys:
    """The joined keys in a checkpoint."""

    tensors: dict[str, SavedTensor]
    values: frozenset[str]

    def __contains__(self, key: object) -> bool:
        return key in self.tensors or key in self.values


def saved_tensors(folder: FilePath) -> dict[str, SavedTensor]:
    """Shape and type of every tensor in a *verified* checkpoint, by joined key (DCP's index is a pickle)."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found[key] = SavedTensor(tuple(entry.size), entry.properties.dtype)
    return found


def saved_keys(folder: FilePath) -> SavedKeys:
    """What a *verified* checkpoint holds."""
    values = torch.load(folder / VALUES_FILE, weights_only=True, map_location="cpu")["values"]
    return SavedKeys(saved_tensors(folder), frozenset(values))


def read_meta(folder: FilePath) -> dict[str, Any]:
    return json.loads((folder / META_FILE).read_bytes())


def read_rank_state(folder: FilePath, rank: int) -> dict[str, Any]:
    return torch.load(io.BytesIO((folder / rank_file(rank)).read_bytes()), weights_only=True, map_location="cpu")


def load_into(control: Control, ref: CheckpointRef, tree: Tree) -> list[str]:
    """Fills `tree` from a *verified* checkpoint; returns notes. See `CheckpointStore.load`."""
    flat = flatten(tree)

    def compare() -> tuple[list[tuple[Path, Any]], list[str]]:
        saved = torch.load(ref.path / VALUES_FILE, weights_only=True, map_location="cpu")
        assignments, problems, notes = _match_values(saved, flat, tree)
        problems = _tensor_problems(saved_tensors(ref.path), flat) + _list_problems(saved["lists"], flat) + problems
        if problems:
            hidden = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise UserError(f"{ref.name} does not fit this model: {'; '.join(problems[:_SHOWN])}{hidden}")
        return assignments, notes

    # Every rank compares its own tree: with pipeline stages they differ.
    assignments, notes = control.on_all(compare, UserError, (UserError,))[control.rank]
    aside = _read_aside(control, ref, flat.tensors)
    with torch.no_grad():
        for key, content in aside.items():
            local(flat.tensors[key]).copy_(content)
    for path, value in assignments:
        assign(tree, path, value)
    return notes


def read_full(folder: FilePath, prefix: str) -> dict[str, Tensor]:
    """Every tensor below `prefix` of a *verified* checkpoint, unsharded, on the CPU; no process group needed."""
    wanted = {key: saved for key, saved in saved_tensors(folder).items() if key.startswith(prefix)}
    tensors = {key: torch.empty(saved.shape, dtype=saved.dtype) for key, saved in wanted.items()}
    try:
        with quiet_dcp():
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except CheckpointException as problem:
        raise CheckpointFailed(failure_text(problem, folder)) from problem
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}


class _AsidePlanner(dcp.DefaultLoadPlanner):
    """Plans by the live tensors' layout, but reads into memory of our own."""

    def __init__(self, aside: dict[str, Tensor]) -> None:
        super().__init__()
        self._aside = aside

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._aside[index.fqn]


def _read_aside(control: Control, ref: CheckpointRef, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # On the CPU: a second copy of parameters and optimizer state would not fit on the device.
    aside = {key: _place_aside(local(tensor)) for key, tensor in tensors.items()}
    try:
        with quiet_dcp():
            dcp.load(
                dict(tensors),
                storage_reader=dcp.FileSystemReader(ref.path),
                planner=_AsidePlanner(aside),
                process_group=control.group,
                no_dist=control.group is None,
            )
    except CheckpointException as problem:
        raise CheckpointFailed(f"{ref.name} cannot be read: {failure_text(problem, ref.path)}") from problem
    return aside


def _place_aside(tensor: Tensor) -> Tensor:
    inner = inner_tensors(tensor)
    if not inner:
        return torch.empty_like(tensor, device="cpu")
    # E.g. torchao's 8-bit optimizer state, which has neither empty_like nor clone. Copied, not only allocated: its
    # copy_ leaves the quantisation table alone, so the table must be right here already.
    copies = {name: part.to("cpu", copy=True) for name, part in inner.items()}
    wrapper: Any = tensor
    _, context = wrapper.__tensor_flatten__()
    return type(wrapper).__tensor_unflatten__(copies, context, tensor.shape, tensor.stride())


def _tensor_problems(saved: dict[str, SavedTensor], flat: Flat) -> list[str]:
    missing = sorted(flat.tensors.keys() - saved.keys())
    unexpected = sorted(saved.keys() - flat.tensors.keys())
    problems = [f"it lacks {key}" for key in missing]
    problems += [f"it has {key}, which this model lacks" for key in unexpected]
    for key in sorted(flat.tensors.keys() & saved.keys()):
        now = SavedTensor(tuple(flat.tensors[key].shape), flat.tensors[key].dtype)
        if saved[key] != now:
            problems.append(
                f"{key} is {list(saved[key].shape)} {saved[key].dtype} there and {list(now.shape)} {now.dtype} here"
            )
    return problems


def _list_problems(saved: dict[str, int], flat: Flat) -> list[str]:
    return [
        f"{key} has {saved.get(key, 0)} entries there and {flat.lists.get(key, 0)} here"
        for key in sorted(saved.keys() | flat.lists.keys())
        if saved.get(key, 0) != flat.lists.get(key, 0)
    ]


def _match_values(saved: dict[str, Any], flat: Flat, tree: Tree) -> tuple[list[tuple[Path, Any]], list[str], list[str]]:
    """What to set in the tree, what makes the load impossible, and what the user should know.

    Saved values win, also those that this run does not have (`initial_lr` used to vanish this way). Text is layout:
    a parameter group with other names is another group.
    """
    assignments, problems, notes = [], [], []
    for key, value in saved["values"].items():
        path = saved["paths"][key]
        if key in flat.values:
            here = flat.values[key]
            if (is_text(value) or is_text(here)) and value != here:
                problems.append(f"{key} is {_brief(value)} there and {_brief(here)} here")
            else:
                assignments.append((path, value))
        elif isinstance(place(tree, path[:-1]), dict) and key not in flat.tensors:
            assignments.append((path, value))
            notes.append(f"{key} = {_brief(value)} is taken from the checkpoint; this run did not have it")
        else:
            problems.append(f"it has {key}, for which there is no place here")
    for key in sorted(flat.values.keys() - saved["values"].keys()):
        notes.append(f"{key} = {_brief(flat.values[key])} is kept from this run; the checkpoint does not have it")
    return assignments, problems, notes


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
