"""A rank's shard file as an image: laid out once, so that each later save is one copy of the numbers.

DCP pickles every tensor at every save, holding Python's lock: seconds, in which training stands still or runs slowly.
As long as names, shapes, types and placement stay the same, only the numbers inside the file change. So DCP plans once,
the bytes around the numbers are kept, and an image in memory *is* the `__RANK_0.distcp` file that DCP would have
written: `dcp.load` reads it, and a copy of it on a disk is a checkpoint.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor
from torch.futures import Future

from headway.guard.control import Control
from headway.guard.layout import CheckpointFailed
from headway.guard.tree import Flat, inner_tensors, local
from headway.guard.writing import failure_text, quiet_dcp

_ALIGN = 64  # torch.save aligns the numbers inside a blob to this; aligned blobs keep every dtype aligned in the file


class NoImage(Exception):
    """This state cannot be laid out as an image (a tensor made of several); the ordinary save can write it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor's numbers lie: `offset` bytes into the file, dense, with this shape and stride (elements)."""

    index: MetadataIndex
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(slots=True)
class Image:
    """The layout of this rank's file. `name` is empty on a rank that DCP gives nothing to write."""

    name: str = ""
    size: int = 0
    skeleton: list[tuple[int, bytes]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    metadata: bytes = b""
    """DCP's index (`.metadata`), on rank 0."""

    def draw(self, memory: mmap.mmap) -> None:
        """Writes everything but the numbers."""
        for offset, content in self.skeleton:
            memory[offset : offset + len(content)] = content

    def bind(self, memory: mmap.mmap) -> list[Tensor]:
        """One tensor per place, that shares the memory."""
        return [
            torch.frombuffer(memory, dtype=place.dtype, count=place.shape.numel(), offset=place.offset).as_strided(
                place.shape, place.stride
            )
            for place in self.places
        ]

    def sources(self, flat: Flat) -> list[Tensor]:
        """The live tensors of a state with this layout, in the order of the places."""
        return [find_state_dict_object(flat.tensors, place.index).detach() for place in self.places]


@dataclass(slots=True)
class Bound:
    """A state whose tensors were looked at: found again by where they lie, in a thousandth of the time.

    `sources` keep their memory alive, so that no other tensor can come to lie in the same place meanwhile.
    """

    marks: tuple[tuple[object, ...], ...] = ()
    layout: tuple[object, ...] | None = None
    sources: list[Tensor] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    tensor_bytes: int = 0


def marks_of(flat: Flat) -> tuple[tuple[object, ...], ...]:
    """Where each tensor of a state lies."""
    return tuple(
        (key, (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr(), tensor.dtype, tensor.shape)
        for key, tensor in flat.tensors.items()
    )


def layout_of(flat: Flat) -> tuple[object, ...]:
    """What an image depends on: names, shapes, types, and where each tensor's shards lie. Comparable, not hashable."""
    marks: list[tuple[object, ...]] = []
    for key, tensor in flat.tensors.items():
        here = local(tensor)
        marks.append((key, tuple(tensor.shape), tensor.dtype, tuple(here.shape), _dense_stride(here), _mesh(tensor)))
    return tuple(marks)


def plan_image(control: Control, flat: Flat, scratch: Path) -> Image:
    """Plans with DCP who writes what, and lays this rank's file out. Collective. `scratch`: a new folder in memory.

    Raises NoImage on every rank when some tensor is made of several, CheckpointFailed when the folder cannot be used.
    """

    def check() -> None:
        odd = next((key for key, tensor in flat.tensors.items() if inner_tensors(local(tensor))), None)
        if odd is not None:
            raise NoImage(f"{odd} is made of several tensors")

    control.on_all(check, NoImage, (NoImage,))
    writer = _ImageWriter(scratch)
    try:
        with quiet_dcp():
            dcp.save(
                dict(flat.tensors),
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(enable_plan_caching=False),
                process_group=control.group,
                no_dist=control.group is None,
            )
        if control.is_main:
            writer.image.metadata = (scratch / ".metadata").read_bytes()
    except CheckpointException as problem:
        raise CheckpointFailed(failure_text(problem, scratch)) from problem
    finally:
        if control.is_main:
            shutil.rmtree(scratch, ignore_errors=True)
    return writer.image


def address(memory: mmap.mmap) -> int:
    """Where a mapping lies, e.g. to register it with CUDA."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _ImageWriter(dcp.FileSystemWriter):
    """Lays out what DCP's own writer would write, without the numbers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1)
        self._folder = folder
        self.image = Image()
        self._blobs: dict[tuple[object, ...], tuple[bytes, bytes, int]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{item.index.fqn} is no tensor")
            results.append(self._add(name, item.index, tensor))
        if results:
            self.image.name = name
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _add(self, name: str, index: MetadataIndex, tensor: Tensor) -> WriteResult:
        shape, stride, dtype = tensor.shape, _dense_stride(tensor), tensor.dtype
        key = (tuple(shape), stride, dtype)
        if key not in self._blobs:
            like = torch.empty_strided(shape, stride, dtype=dtype)
            self._blobs[key] = _blob(like, self._folder / f"blob-{os.getpid()}")  # the ranks of a node share the folder
        head, tail, nbytes = self._blobs[key]
        start = -(-self.image.size // _ALIGN) * _ALIGN
        length = len(head) + nbytes + len(tail)
        self.image.skeleton += [(start, head), (start + len(head) + nbytes, tail)]
        if nbytes:
            self.image.places.append(Place(index, start + len(head), shape, stride, dtype))
        self.image.size = start + length
        return WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(name, start, length))


def _blob(like: Tensor, path: Path) -> tuple[bytes, bytes, int]:
    """What torch.save writes before and after the numbers, and their number of bytes."""
    with torch.serialization.skip_data():  # leaves a hole in the file
        torch.save(like, path)
    nbytes = like.numel() * like.element_size()
    size = path.stat().st_size
    with path.open("rb") as file:
        if not nbytes:
            return file.read(), b"", 0
        reader: Any = torch._C.PyTorchFileReader(str(path))
        at = reader.get_record_offset("data/0")
        head = file.read(at)
        file.seek(at + nbytes)
        tail = file.read()
    if len(head) + nbytes + len(tail) != size:
        raise RuntimeError(f"torch.save laid a tensor of {nbytes} bytes out in a way that is not understood")
    return head, tail, nbytes


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The stride of a copy: as torch.clone makes it, permuted where the tensor is."""
    if inner_tensors(tensor):  # `plan_image` refuses it, and it need not know how to be copied
        return tuple(tensor.stride())
    return tuple(torch.empty_like(tensor, device="meta").stride())


def _mesh(tensor: Tensor) -> object:
    if not isinstance(tensor, DTensor):
        return None
    return (tuple(tensor.device_mesh.mesh.shape), tuple(map(str, tensor.placements)))
