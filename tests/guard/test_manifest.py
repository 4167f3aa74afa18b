"""The manifest: believed only when every byte of it is as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_file import GOLDEN
from headway.guard.hashing import FileEntry, hash_file
from headway.guard.layout import CheckpointRef
from headway.guard.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    encode_manifest,
    hash_problems,
    parse_manifest,
    read_manifest,
    size_problems,
    write_manifest,
)


def make(folder: Path, **changes: object) -> CheckpointRef:
    folder.mkdir(exist_ok=True)
    (folder / "data").write_bytes(b"content")
    values = {
        "step": 5,
        "generation": 2,
        "run_id": "r",
        "created": "2026-01-01T00:00:00Z",
        "world_size": 1,
        "headway": "0",
        "torch": "0",
        "parts": {"model": 1, "optimizer": 2, "rest": 3},
        "files": {"data": hash_file(folder / "data")},
    }
    write_manifest(folder, Manifest(**(values | changes)))  # type: ignore[arg-type]
    return CheckpointRef(folder, 5, 2)


def test_round_trip(tmp_path: Path) -> None:
    ref = make(tmp_path / "c")
    manifest = read_manifest(ref)
    assert manifest.files == {"data": FileEntry(7, xxh3="917e1274274fc195b27a2d2388d9568c")}
    assert manifest.size == 7 and size_problems(ref.path, manifest) == hash_problems(ref.path, manifest, ["data"]) == []
    assert json.loads((ref.path / MANIFEST).read_text())["schema"] == 2


def test_any_flipped_bit_is_refused(tmp_path: Path) -> None:
    ref = make(tmp_path / "c")
    text = (ref.path / MANIFEST).read_bytes()
    for position in range(len(text)):
        flipped = bytearray(text)
        flipped[position] ^= 1 << (position % 8)
        (ref.path / MANIFEST).write_bytes(flipped)
        with pytest.raises(Damaged):
            read_manifest(ref)


def test_any_truncation_is_refused(tmp_path: Path) -> None:
    ref = make(tmp_path / "c")
    text = (ref.path / MANIFEST).read_bytes()
    for length in range(len(text)):
        (ref.path / MANIFEST).write_bytes(text[:length])
        with pytest.raises(Damaged):
            read_manifest(ref)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 6}, "step 6, generation 2: not this folder's"),
        ({"generation": 3}, "not this folder's"),
        ({"schema": 3}, "schema 3.*update headway"),
        ({"files": {"../outside": FileEntry(1, "a" * 64)}}, "outside its folder"),
    ],
)
def test_a_sound_manifest_of_something_else_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        read_manifest(make(tmp_path / "c", **change))


def test_a_newer_schema_is_called_one_whatever_its_fields() -> None:
    with pytest.raises(Damaged, match="schema 9, this headway reads up to 2"):
        parse_manifest(b'{"schema": 9, "files": 3}', 5, 2)


def test_a_manifest_of_before_is_read_and_checked_with_its_own_hashes(tmp_path: Path) -> None:
    """Frozen: written by the last headway that hashed with SHA-256, of files made here."""
    text = (GOLDEN / "checkpoint_manifest_schema_1.json").read_bytes()
    manifest = parse_manifest(text, 5, 2)
    assert encode_manifest(manifest) == text, "copied, it stays the same"
    size = 5 * 65536 + 17
    shard = tmp_path / "__0_0.distcp"
    shard.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))
    (tmp_path / "meta.json").write_bytes(b'{"step": 5}')
    assert size_problems(tmp_path, manifest) == hash_problems(tmp_path, manifest, manifest.files) == []
    with shard.open("r+b") as file:
        file.seek(140_000)
        file.write(b"x")
    (problem,) = hash_problems(tmp_path, manifest, manifest.files)
    assert problem.startswith("__0_0.distcp does not match its SHA-256") and "bytes 131072 to 196607" in problem


def test_a_missing_manifest_says_so(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="never finished"):
        read_manifest(CheckpointRef(tmp_path, 5, 2))
