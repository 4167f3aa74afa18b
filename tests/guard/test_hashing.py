"""Marks on the way of a hash: damage is placed in its block, however the stream was cut into pieces."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headway.guard import hashing
from headway.guard.hashing import SHA256, XXH3, FileEntry, Hasher, block_size, first_difference, hash_bytes, hash_file

SIZE = 5 * 65536 + 17
CONTENT = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)


@given(
    st.lists(st.integers(0, SIZE), max_size=6),
    st.integers(0, SIZE - 1),
    st.integers(0, 7),
    st.sampled_from([XXH3, SHA256]),
)
def test_a_flipped_bit_lies_in_the_block_that_is_named(cuts: list[int], at: int, bit: int, kind: str) -> None:
    hasher, edges = Hasher(SIZE, kind), sorted({0, *cuts, SIZE})
    for start, end in itertools.pairwise(edges):
        hasher.update(CONTENT[start:end])
    whole, meant = hasher.entry(), hash_bytes(CONTENT, kind)
    assert (whole, whole.kind, whole.marks) == (meant, kind, meant.marks)
    assert first_difference(whole, meant) is None
    damaged = bytearray(CONTENT)
    damaged[at] ^= 1 << bit
    block = first_difference(hash_bytes(bytes(damaged), kind), whole)
    assert block is not None and block.start <= at < block.end <= SIZE and block.end - block.start <= 65536


def test_a_file_is_hashed_like_its_bytes_with_either_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    new, old = hash_file(tmp_path / "file"), hash_file(tmp_path / "file", SHA256)
    assert (new.xxh3, new.sha256) == (xxhash.xxh3_128_hexdigest(CONTENT), "")
    assert (old.xxh3, old.sha256) == ("", hashlib.sha256(CONTENT).hexdigest())
    assert new != old and first_difference(new, old) is None, "kinds are never mistaken for each other"
    bare = FileEntry(old.size, old.sha256)  # of before there were marks
    assert bare == old and first_difference(FileEntry(old.size, "0" * 64), old) is None


@pytest.mark.parametrize("size", [0, 1, 16, 17, 128, 129, 240, 241, 1024, 65535, 65536, 65537])
def test_known_lengths_where_xxh3_changes_its_way(size: int) -> None:
    """By pieces as at once, and the last byte counts."""
    hasher = Hasher(size)
    for at in range(0, size, 1000):
        hasher.update(CONTENT[at : min(size, at + 1000)])
    assert hasher.entry().xxh3 == xxhash.xxh3_128_hexdigest(CONTENT[:size])
    assert hash_bytes(CONTENT[:size]) not in (hash_bytes(CONTENT[: size + 1]), hash_bytes(b"\1" + CONTENT[1:size]))


def test_there_are_never_many_blocks() -> None:
    for size in (0, 1, 65536, 16_777_216, 16_777_217, 3 << 40):
        block = block_size(size)
        assert block >= hashing._LEAST_BLOCK and block & (block - 1) == 0 and size <= block * 256
