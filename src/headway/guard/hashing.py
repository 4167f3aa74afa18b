"""A hash of a file with marks on the way, so that damage is not only found but placed.

The running hash of a stream can be read without ending it. Its first bytes behind every block are kept: the first mark
that differs tells the block in which the content began to differ, at no second pass and no second hash.

Files are hashed with XXH3-128 (what `xxh128sum` prints): it misses one of 2¹²⁸ accidents, at memory's speed, and is no
protection against somebody who wants to deceive. Checkpoints of before have SHA-256, which costs many times the
processor time; they are read with the kind of hash that they were written with.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import xxhash

XXH3, SHA256 = "XXH3-128", "SHA-256"
"""Kinds of hashes, as messages name them."""
_LEAST_BLOCK = 1 << 16
_MOST_BLOCKS = 256
_MARK = 8
"""Hexadecimal digits of a mark: it places damage that the whole hash has found, and proves nothing by itself."""
_CHUNK = 1 << 18  # stays in a core's own cache between the read and the hash


class FileEntry(msgspec.Struct, frozen=True, eq=False, omit_defaults=True):
    """`size` in bytes, `sha256` or `xxh3` (128 bits) as hex; two entries are equal when these are. `marks`: see above,
    one a whole block; empty in checkpoints of before there were any."""

    size: int
    sha256: str = ""
    marks: str = ""
    xxh3: str = ""

    @property
    def kind(self) -> str:
        """Of its hash."""
        return SHA256 if self.sha256 else XXH3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileEntry) and self._content() == other._content()

    def __ne__(self, other: object) -> bool:  # the base class has one of its own, which is not the opposite of ours
        return not self == other

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[int, str, str]:
        return self.size, self.sha256, self.xxh3


class Block(NamedTuple):
    """Bytes `start` … `end - 1`."""

    start: int
    end: int


def block_size(size: int) -> int:
    """Bytes a block of a file of `size` bytes: a power of two, so that there are at most 256."""
    return max(_LEAST_BLOCK, 1 << (max(1, -(-size // _MOST_BLOCKS)) - 1).bit_length())


class _Hash(Protocol):
    def update(self, piece: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Hasher:
    """Takes a stream of `size` bytes, in pieces of any length."""

    def __init__(self, size: int, kind: str = XXH3) -> None:
        self._block, self._done, self._kind = block_size(size), 0, kind
        self._hash: _Hash = xxhash.xxh3_128() if kind == XXH3 else hashlib.sha256()
        self._marks = bytearray()

    def update(self, piece: bytes | memoryview) -> None:
        with memoryview(piece) as whole:
            at = 0
            while at < len(whole):
                room = self._block - self._done % self._block
                with whole[at : at + room] as part:
                    self._hash.update(part)
                    at += len(part)
                    self._done += len(part)
                if self._done % self._block == 0:
                    self._marks += self._hash.hexdigest()[:_MARK].encode()

    def entry(self) -> FileEntry:
        sha256, xxh3 = (self._hash.hexdigest(), "") if self._kind == SHA256 else ("", self._hash.hexdigest())
        return FileEntry(self._done, sha256, self._marks.decode(), xxh3)


def hash_file(path: Path, kind: str = XXH3) -> FileEntry:
    """Size and hash of a file as it reads now, with its marks."""
    with path.open("rb", buffering=0) as stream:
        hasher, buffer = Hasher(os.fstat(stream.fileno()).st_size, kind), memoryview(mmap.mmap(-1, _CHUNK))
        while count := stream.readinto(buffer):
            hasher.update(buffer[:count])
        return hasher.entry()


def finished(steps: Generator[None, None, FileEntry]) -> FileEntry:
    """What steps come to, done at once."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            entry: FileEntry = done.value
            return entry


def hash_bytes(content: bytes, kind: str = XXH3) -> FileEntry:
    hasher = Hasher(len(content), kind)
    hasher.update(content)
    return hasher.entry()


def first_difference(one: FileEntry, other: FileEntry) -> Block | None:
    """The block in which two files of one length begin to differ; None where marks or lengths do not tell."""
    if (one.size, one.kind) != (other.size, other.kind) or one == other or len(one.marks) != len(other.marks):
        return None
    block = block_size(one.size)
    if one.size >= block and not one.marks:
        return None
    places = range(0, len(one.marks), _MARK)
    number = next(
        (i for i, at in enumerate(places) if one.marks[at : at + _MARK] != other.marks[at : at + _MARK]), len(places)
    )
    return Block(number * block, min(one.size, (number + 1) * block))


def where_changed(found: FileEntry, meant: FileEntry) -> str:
    """The end of a sentence: ", first in bytes 0 to 65535"; empty where marks or lengths do not tell."""
    block = first_difference(found, meant)
    return f", first in bytes {block.start} to {block.end - 1}" if block is not None else ""
