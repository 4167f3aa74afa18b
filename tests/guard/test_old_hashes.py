"""Checkpoints of before XXH3-128 (manifest schema 1, SHA-256) are verified, loaded, fetched and pruned like any."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from headway.guard import contents
from headway.guard.checkpoint import CheckpointRef, CheckpointStore
from headway.guard.hashing import SHA256, XXH3, hash_bytes, hash_file
from headway.guard.layout import CheckpointFailed
from headway.guard.manifest import MANIFEST, encode_manifest, read_manifest
from headway.guard.object_store import ObjectStore
from headway.guard.remote import fetch_newest


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", "run-a")


def save(store: CheckpointStore, step: int) -> CheckpointRef:
    return store.save(step, {"model": {"w": torch.full((9000,), float(step))}}, {"step": step}, {})


def save_as_before(store: CheckpointStore, step: int) -> CheckpointRef:
    ref = save(store, step)
    manifest = read_manifest(ref)
    files = {name: hash_file(ref.path / name, SHA256) for name in manifest.files}
    (ref.path / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, schema=1, files=files)))
    return ref


def damage(ref: CheckpointRef) -> None:
    path = ref.path / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[20_000] ^= 1
    path.write_bytes(content)


def test_they_are_verified_and_loaded_and_damage_is_found(store: CheckpointStore) -> None:
    older, newer = save_as_before(store, 1), save_as_before(store, 2)
    fresh = CheckpointStore(store.root, "run-a")
    assert fresh.verify(newer) == [] and fresh.newest_verified() == newer
    target = {"model": {"w": torch.zeros(9000)}}
    fresh.load(newer, target)
    assert float(target["model"]["w"].sum()) == 18_000.0
    damage(newer)
    found = CheckpointStore(store.root, "run-a").newest_verified()
    assert found == older and "__0_0.distcp does not match its SHA-256" in found.rejected[0]


def test_they_are_pruned_beside_new_ones_and_only_where_a_sound_one_stays(store: CheckpointStore) -> None:
    refs = [*(save_as_before(store, step) for step in (1, 2, 3)), save(store, 4), save(store, 5)]
    damage(refs[2])
    damage(refs[4])
    done = CheckpointStore(store.root, "run-a").prune(keep_last=2)
    assert done.removed == [refs[0].name]
    assert [text.partition(":")[0] for text in done.left] == [refs[2].name, refs[4].name]
    assert {ref.path for ref in (refs[1], refs[3])} <= set(store.root.iterdir()), "the two newest sound ones stay"


def test_they_are_read_with_their_own_kind_of_hash(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    real = contents.hash_by_steps
    monkeypatch.setattr(contents, "hash_by_steps", lambda path, kind: kinds.append(kind) or real(path, kind))
    refs = [save_as_before(store, 1), save(store, 2)]
    known = contents.Contents(store.root)
    assert [known.is_sound(ref, float("inf")) for ref in refs] == [True, True] and set(kinds) == {SHA256, XXH3}


def test_they_come_back_from_a_store_under_their_own_manifest(store: CheckpointStore, tmp_path: Path) -> None:
    remote = ObjectStore(f"file://{tmp_path}/bucket/run", 0)
    good, bad = save_as_before(store, 1), save_as_before(store, 2)
    text = (good.path / MANIFEST).read_bytes()
    for ref in (good, bad):
        for file in ref.path.iterdir():
            meant = hash_file(file, SHA256)
            remote.put(remote.path(ref.name, file.name), lambda file=file: iter((file.read_bytes(),)), meant)
    shard = remote.path(bad.name, "__0_0.distcp")
    remote.put_bytes(shard, (good.path / "__0_0.distcp").read_bytes())
    found, rejected = fetch_newest(remote, [tmp_path / "back"], "run-a", above=0)
    assert found is not None and found.step == 1 and "does not match its SHA-256" in rejected[0]
    assert (found.path / MANIFEST).read_bytes() == text
    assert CheckpointStore(found.path.parent, "run-a").verify(found) == []


def test_an_upload_is_read_back_with_the_kind_that_was_meant(tmp_path: Path) -> None:
    remote = ObjectStore(f"file://{tmp_path}/bucket/run", 0)
    for kind in (SHA256, XXH3):
        remote.put(remote.path("x"), lambda: iter((b"content",)), hash_bytes(b"content", kind))
        with pytest.raises(CheckpointFailed, match="does not read back"):
            remote.put(remote.path("x"), lambda: iter((b"content",)), hash_bytes(b"kontent", kind))
