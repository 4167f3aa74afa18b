"""The manifest: believed only when every byte of it is as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.guard.hashing import FileEntry, hash_file
from headway.guard.layout import CheckpointRef
from headway.guard.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    hash_problems,
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
    assert manifest.files == {"data": FileEntry(7, "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73")}
    assert manifest.size == 7 and size_problems(ref.path, manifest) == hash_problems(ref.path, manifest, ["data"]) == []
    assert json.loads((ref.path / MANIFEST).read_text())["schema"] == 1


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
        ({"schema": 2}, "schema 2"),
        ({"files": {"../outside": FileEntry(1, "a" * 64)}}, "outside its folder"),
    ],
)
def test_a_sound_manifest_of_something_else_is_refused(tmp_path: Path, change: dict, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        read_manifest(make(tmp_path / "c", **change))


def test_a_missing_manifest_says_so(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="never finished"):
        read_manifest(CheckpointRef(tmp_path, 5, 2))
