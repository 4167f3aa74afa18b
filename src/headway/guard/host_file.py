"""A file in shared memory, mapped: it survives a killed rank, and is filled by memory copies."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from headway.guard.hashing import FileEntry, Hasher
from headway.guard.image import Image, address

_POPULATE_WRITE = 23  # Linux 5.14: maps every page now, so that the first copy does not stop at each


class HostFile:
    """`path`, `image.size` bytes, mapped for writing and drawn; `targets` share its memory (bytes as they lie there).

    The memory is taken at once: a write into a mapped hole of a full tmpfs would kill the process (SIGBUS).
    `pin` registers it with CUDA, so that copies from the device need no buffer between.

    Raises OSError (ENOSPC when the shared memory is too small).
    """

    def __init__(self, path: Path, image: Image, *, pin: bool) -> None:
        self.image = image
        self._pinned = False
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, image.size)
            self.memory = mmap.mmap(descriptor, image.size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        try:
            self.memory.madvise(_POPULATE_WRITE)
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
        image.draw(self.memory)
        self.targets = image.bind(self.memory)
        if pin:
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(address(self.memory), image.size, 0)) == 0

    @classmethod
    def empty(cls) -> HostFile:
        """For a rank that has nothing to write."""
        made = cls.__new__(cls)
        made.image, made.targets, made._pinned = Image(), [], False
        return made

    def entry(self) -> FileEntry:
        """The file's hash, without Python's lock, for a third of what reading costs: its pages are mapped here."""
        hasher = Hasher(self.image.size)
        with memoryview(self.memory) as view:
            hasher.update(view)
        return hasher.entry()

    def close(self) -> None:
        """Unmaps; the file stays where it is."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address(self.memory))
            self._pinned = False
        self.targets = []
        # Python unmaps with the last reference: closing now would fail while torch still holds one.
        self.__dict__.pop("memory", None)


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copies a tensor of the same shape and type, without Python's lock, on this thread alone.

    torch's own copy would start its pool of threads, which the training's products need.
    """
    if source.device.type == "cpu" and source.stride() == target.stride():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source, non_blocking=True)
