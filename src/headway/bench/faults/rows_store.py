"""Row 30: an object store that fails as real ones do."""

from __future__ import annotations

import os
import random
import time

import fsspec

from headway.bench.faults.case import Case
from headway.bench.faults.faulty_store import FaultyStore
from headway.bench.faults.small_state import SmallState, forget_memory, own_memory
from headway.guard.checkpoint import CheckpointStore
from headway.guard.hashing import hash_file
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import read_manifest
from headway.guard.object_store import ObjectStore
from headway.guard.remote import fetch_newest, upload
from headway.guard.save_job import Folder, Job, Remote

URL = "faulty://bucket/run"


def row_30(case: Case) -> None:
    """503 storms, timeouts, torn uploads, lagging lists: retried within the budget; `latest` is what was read back."""
    own_memory(case)
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    state = SmallState(case.folder)
    for step in (1, 2, 3):
        state.train(step)
        state.save()
    refs = [info.ref for info in state.tiers.disk.list()]
    FaultyStore.plan(case.seed, errors=0.3, torn=0.3, lag=3)
    slept: list[float] = []
    store = ObjectStore(URL, 1e9, dice=random.Random(case.seed), sleep=slept.append)
    for ref in refs:
        _send(store, ref)
        case.expect(store.latest() == ref.name, f"{ref.name} is the latest when it is whole")
    case.expect(FaultyStore.faults > 0 and len(set(slept)) == len(slept) > 0, "it failed, and waits have jitter")
    # A storm that does not end: the budget does, and nothing half becomes the latest.
    FaultyStore.plan(case.seed, torn=1.0, clear=False)
    begun, failed = time.monotonic(), False
    try:
        _send(ObjectStore(URL, 5.0, dice=random.Random(case.seed), sleep=slept.append), refs[0], generation=99)
    except CheckpointFailed:
        failed = True
    case.measured(detect_s=time.monotonic() - begun)
    case.expect(failed, "the budget ends the retries")
    FaultyStore.plan(case.seed, errors=0.3, lag=1000, clear=False)
    found, rejected = fetch_newest(store, [case.folder / "other"], "small", above=0)
    case.expect(found is not None and found.step == 3 and not rejected, "the newest whole one comes back, list or not")
    if found is not None:
        case.expect(CheckpointStore(case.folder / "other", "small").verify(found) == [], "every byte as it was")
    state.tiers.close(over=True)
    forget_memory()


def _send(store: ObjectStore, ref: CheckpointRef, generation: int | None = None) -> None:
    import msgspec

    manifest = read_manifest(ref)
    if generation is not None:
        manifest = msgspec.structs.replace(manifest, generation=generation)
    files = sorted(manifest.files)
    job = Job(id=1, rank=0, files=files, manifest=manifest, memory=Folder(partial="", final="", ranks=[0]))
    sources = {name: os.open(ref.path / name, os.O_RDONLY) for name in files}
    entries = {name: hash_file(ref.path / name) for name in files}
    try:
        upload(job, Remote(url=URL, ranks=[0], keep=9, budget_s=0), sources, entries, time.monotonic() + 1e6, store)
    finally:
        for descriptor in sources.values():
            os.close(descriptor)
