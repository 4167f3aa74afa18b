"""An object store that fails: nothing is believed unread, nothing half is ever the latest, nothing foreign goes."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from guard_helpers import same, snapshot, tiny_model, tiny_optimizer, train

from headway.account.errors import Refused
from headway.bench.faults.faulty_store import FaultyStore
from headway.guard.checkpoint import CheckpointStore
from headway.guard.hashing import hash_file
from headway.guard.layout import CheckpointFailed
from headway.guard.manifest import read_manifest
from headway.guard.object_store import ObjectStore
from headway.guard.remote import fetch_newest, prune, read_remote_manifest, upload
from headway.guard.save_job import Folder, Job, Remote
from headway.guard.tiers import RemotePlace, Tiers
from headway.guard.training_state import capture, restore

fsspec.register_implementation("faulty", FaultyStore, clobber=True)
URL = "faulty://bucket/run"


@pytest.fixture
def local(tmp_path: Path) -> list[Any]:
    """Three checkpoints of a run, and its store."""
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    store = CheckpointStore(tmp_path / "checkpoints", "run-a")
    refs = []
    for step in (1, 2, 3):
        train(model, optimizer, 1, step - 1)
        refs.append(store.save(step, capture(model, [optimizer]), {"step": step}, {}))
    return refs


def remote_store(budget_s: float = 1e9, slept: list[float] | None = None) -> ObjectStore:
    return ObjectStore(URL, budget_s, dice=random.Random(7), sleep=(slept if slept is not None else []).append)


def send(ref: Any, store: ObjectStore, keep: int = 9) -> int:
    manifest = read_manifest(ref)
    files = sorted(manifest.files)
    job = Job(id=1, rank=0, files=files, manifest=manifest, memory=Folder(partial="", final="", ranks=[0]))
    sources = {name: os.open(ref.path / name, os.O_RDONLY) for name in files}
    try:
        entries = {name: hash_file(ref.path / name) for name in files}
        return upload(job, Remote(url=URL, ranks=[0], keep=keep, budget_s=1), sources, entries, 1e12, store)
    finally:
        for descriptor in sources.values():
            os.close(descriptor)


@pytest.mark.parametrize("seed", range(4))
def test_through_errors_timeouts_torn_uploads_and_lagging_lists(local: list[Any], tmp_path: Path, seed: int) -> None:
    FaultyStore.plan(seed, errors=0.3, torn=0.3, lag=3)
    slept: list[float] = []
    store = remote_store(slept=slept)
    for ref in local:
        send(ref, store)
        assert FaultyStore.faults and store.latest() == ref.name
    assert store.retries == len(slept) > 0 and len(set(slept)) == len(slept), "jitter"
    FaultyStore.plan(seed, errors=0.3, lag=50, clear=False)  # the newest may be in no listing yet
    found, rejected = fetch_newest(remote_store(), [tmp_path / "other"], "run-a", above=0)
    assert found is not None and found.name == local[-1].name and not rejected
    for file in local[-1].path.iterdir():
        assert (found.path / file.name).read_bytes() == file.read_bytes() or file.name == "manifest.json"
    assert CheckpointStore(tmp_path / "other", "run-a").verify(found) == []


def test_a_planted_unchecked_upload_is_torn(local: list[Any]) -> None:
    FaultyStore.plan(1, torn=1.0)
    fs = fsspec.filesystem("faulty")
    with fs.open("bucket/x", "wb") as file:
        file.write(b"0123456789")
    assert fs.cat_file("bucket/x") == b"01234", "without the read-back this would have been a checkpoint"
    with pytest.raises(CheckpointFailed, match="read back as it was written; given up after"):
        send(local[0], remote_store(budget_s=3))
    assert remote_store().latest() is None


def test_what_is_unfinished_is_neither_latest_nor_fetched(
    local: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultyStore.plan(0)
    store = remote_store()
    send(local[0], store)
    # Killed before the manifest, and before `latest`: what a reader sees.
    for name in ("__0_0.distcp", "meta.json"):
        store.put_file(
            store.path(local[1].name, name), os.open(local[1].path / name, os.O_RDONLY), hash_file(local[1].path / name)
        )
    assert store.latest() == local[0].name and local[1].name in store.names()
    found, rejected = fetch_newest(store, [tmp_path / "a"], "run-a", above=0)
    assert found is not None and found.name == local[0].name and rejected == []
    # Finished but for `latest`: it counts, every byte was read back before its manifest was written.
    send(local[2], store)
    store.put_bytes(store.path("latest.json"), b'{"name": "' + local[0].name.encode() + b'"}')
    found, _ = fetch_newest(store, [tmp_path / "b"], "run-a", above=0)
    assert found is not None and found.name == local[2].name
    # Rot in the store: rejected by name, the older one is taken; another run's is none of ours.
    FaultyStore.store[f"/bucket/run/{local[2].name}/meta.json"].truncate(3)
    found, rejected = fetch_newest(remote_store(budget_s=0), [tmp_path / "c"], "run-a", above=0)
    assert found is not None and found.name == local[0].name and "meta.json does not match" in rejected[0]
    assert fetch_newest(store, [tmp_path / "d"], "run-b", above=0) == (None, [])
    assert fetch_newest(store, [tmp_path / "d"], "run-a", above=9) == (None, [])


def test_prune_keeps_the_latest_and_what_is_foreign(local: list[Any]) -> None:
    FaultyStore.plan(0)
    store = remote_store()
    for ref in local:
        send(ref, store)
    store.put_bytes(store.path("notes.txt"), b"mine")
    store.put_bytes(store.path(local[0].name, "notes.txt"), b"mine")
    store.put_bytes(store.path("step-00000000.g0000", "x"), b"unfinished, whose?")
    assert prune(store, "run-b", 1) == []
    assert prune(store, "run-a", 1) == [local[0].name, local[1].name]
    assert store.read(store.path("notes.txt")) == store.read(store.path(local[0].name, "notes.txt")) == b"mine"
    assert read_remote_manifest(store, local[2].name) is not None and read_remote_manifest(store, local[0].name) is None
    assert store.read(store.path("step-00000000.g0000", "x")) is not None


def test_a_run_goes_on_from_the_store_when_the_disk_is_gone(tmp_path: Path) -> None:
    place = RemotePlace(f"file://{tmp_path}/bucket/run", keep=2, budget_s=0)
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers = Tiers(CheckpointStore(tmp_path / "checkpoints", "run-a"), tmp_path, remote=place)
    for step in (1, 2, 3):
        train(model, optimizer, 1, step - 1)
        seen = snapshot(model, optimizer)
        assert tiers.save(step, capture(model, [optimizer]), {"step": step}, {}, disk=step != 3, remote=True)
        assert tiers.settle(60)
        assert all(event.ok for event in tiers.poll())
    assert sorted(path.name for path in (tmp_path / "bucket" / "run").glob("step-*")) == [
        "step-00000002.g0002",
        "step-00000003.g0003",
    ] or not any((tmp_path / "bucket" / "run" / "step-00000001.g0001").iterdir())
    tiers.close(over=True)
    shutil.rmtree(tmp_path / "checkpoints")
    tiers = Tiers(CheckpointStore(tmp_path / "checkpoints", "run-a"), tmp_path, remote=place)
    found = tiers.newest()
    assert found is not None and (found.tier, found.ref.step) == ("remote", 3)
    other = tiny_model(4)
    other_optimizer = tiny_optimizer(other)
    restore(found.store, found.ref, other, [other_optimizer])
    assert same(seen, snapshot(other, other_optimizer)) == []
    again = tiers.newest()
    assert again is not None and again.tier == "disk", "it is here now"
    # A copy here that rotted: the store's good one is brought in its place, beside it.
    (found.ref.path / "meta.json").write_bytes(b"{}")
    mended = tiers.newest()
    assert mended is not None and (mended.tier, mended.ref.step) == ("remote", 3)
    tiers.close(over=True)


def test_a_store_that_cannot_be_asked_is_no_empty_store(tmp_path: Path) -> None:
    FaultyStore.plan(0, errors=1.0)
    tiers = Tiers(CheckpointStore(tmp_path / "checkpoints", "run-a"), tmp_path, remote=RemotePlace(URL, budget_s=0))
    with pytest.raises(Refused, match="faulty://bucket/run"):
        tiers.newest()
    tiers.close(over=True)
    with pytest.raises(CheckpointFailed, match="nosuch"):
        ObjectStore("nosuch://x", 0)
