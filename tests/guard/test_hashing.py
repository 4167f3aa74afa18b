"""Marks on the way of a hash: damage is placed in its block, however the stream was cut into pieces."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headway.guard import hashing
from headway.guard.hashing import FileEntry, Hasher, block_size, first_difference, hash_bytes, hash_file

SIZE = 5 * 65536 + 17
CONTENT = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)


@given(st.lists(st.integers(0, SIZE), max_size=6), st.integers(0, SIZE - 1), st.integers(0, 7))
def test_a_flipped_bit_lies_in_the_block_that_is_named(cuts: list[int], at: int, bit: int) -> None:
    hasher, edges = Hasher(SIZE), sorted({0, *cuts, SIZE})
    for start, end in itertools.pairwise(edges):
        hasher.update(CONTENT[start:end])
    whole = hasher.entry()
    assert whole.sha256 == hashlib.sha256(CONTENT).hexdigest() and whole.marks == hash_bytes(CONTENT).marks
    assert first_difference(whole, hash_bytes(CONTENT)) is None
    damaged = bytearray(CONTENT)
    damaged[at] ^= 1 << bit
    block = first_difference(hash_bytes(bytes(damaged)), whole)
    assert block is not None and block.start <= at < block.end <= SIZE and block.end - block.start <= 65536


def test_a_file_is_hashed_like_its_bytes_and_old_entries_stay_equal(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    found = hash_file(tmp_path / "file")
    assert (found, found.marks) == (hash_bytes(CONTENT), hash_bytes(CONTENT).marks)
    old = FileEntry(found.size, found.sha256)
    assert old == found and first_difference(FileEntry(found.size, "0" * 64), found) is None


def test_there_are_never_many_blocks() -> None:
    for size in (0, 1, 65536, 16_777_216, 16_777_217, 3 << 40):
        block = block_size(size)
        assert block >= hashing._LEAST_BLOCK and block & (block - 1) == 0 and size <= block * 256
