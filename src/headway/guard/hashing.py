"""SHA-256 of a file with marks on the way, so that damage is not only found but placed.

The running hash of a stream can be read without ending it. Its first bytes behind every block are kept: the first mark
that differs tells the block in which the content began to differ, at no second pass and no second hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import msgspec

_LEAST_BLOCK = 1 << 16
_MOST_BLOCKS = 256
_MARK = 8
"""Hexadecimal digits of a mark: it places damage that the whole hash has found, and proves nothing by itself."""
_CHUNK = 1 << 20


class FileEntry(msgspec.Struct, frozen=True, eq=False, omit_defaults=True):
    """`size` in bytes, `sha256` as hex; two entries are equal when these are. `marks`: see above, one a whole block;
    empty in checkpoints of before there were any."""

    size: int
    sha256: str
    marks: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileEntry) and (self.size, self.sha256) == (other.size, other.sha256)

    def __ne__(self, other: object) -> bool:  # the base class has one of its own, which is not the opposite of ours
        return not self == other

    def __hash__(self) -> int:
        return hash((self.size, self.sha256))


class Block(NamedTuple):
    """Bytes `start` … `end - 1`."""

    start: int
    end: int


def block_size(size: int) -> int:
    """Bytes a block of a file of `size` bytes: a power of two, so that there are at most 256."""
    return max(_LEAST_BLOCK, 1 << (max(1, -(-size // _MOST_BLOCKS)) - 1).bit_length())


class Hasher:
    """Takes a stream of `size` bytes, in pieces of any length."""

    def __init__(self, size: int) -> None:
        self._block, self._done = block_size(size), 0
        self._hash, self._marks = hashlib.sha256(), bytearray()

    def update(self, piece: bytes | memoryview) -> None:
        rest = memoryview(piece)
        while len(rest):
            room = self._block - self._done % self._block
            self._hash.update(rest[:room])
            self._done += len(rest[:room])
            if self._done % self._block == 0:
                self._marks += self._hash.hexdigest()[:_MARK].encode()
            rest = rest[room:]

    def entry(self) -> FileEntry:
        return FileEntry(self._done, self._hash.hexdigest(), self._marks.decode())


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of a file as it reads now, with its marks."""
    steps = hash_by_steps(path)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            entry: FileEntry = done.value
            return entry


def hash_by_steps(path: Path) -> Generator[None, None, FileEntry]:
    """The same with a pause after every piece, for whoever has to leave off; returns the entry."""
    with path.open("rb", buffering=0) as stream:
        hasher, buffer = Hasher(os.fstat(stream.fileno()).st_size), memoryview(bytearray(_CHUNK))
        while count := stream.readinto(buffer):
            hasher.update(buffer[:count])
            yield
        return hasher.entry()


def hash_bytes(content: bytes) -> FileEntry:
    hasher = Hasher(len(content))
    hasher.update(content)
    return hasher.entry()


def first_difference(one: FileEntry, other: FileEntry) -> Block | None:
    """The block in which two files of one length begin to differ; None where marks or lengths do not tell."""
    if one.size != other.size or one == other or len(one.marks) != len(other.marks):
        return None
    block = block_size(one.size)
    if one.size >= block and not one.marks:
        return None
    places = range(0, len(one.marks), _MARK)
    number = next(
        (i for i, at in enumerate(places) if one.marks[at : at + _MARK] != other.marks[at : at + _MARK]), len(places)
    )
    return Block(number * block, min(one.size, (number + 1) * block))
