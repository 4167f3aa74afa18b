"""Checkpoints in an object store: uploaded by the saver, fetched by a start that finds nothing newer. No torch."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.guard import layout
from headway.guard.crash import crash_point
from headway.guard.hashing import FileEntry
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    encode_manifest,
    parse_manifest,
)
from headway.guard.object_store import LATEST, ObjectStore, generation
from headway.guard.publishing import publish_copy

if TYPE_CHECKING:
    from headway.guard.save_job import Job, Remote

_POLL_S = 0.2


class _Part(msgspec.Struct):
    files: dict[str, FileEntry]


def upload(
    job: Job,
    remote: Remote,
    sources: dict[str, int],
    entries: dict[str, FileEntry],
    deadline: float,
    store: ObjectStore | None = None,
) -> int:
    """Uploads this rank's files; the first rank then writes the manifest, and `latest.json` when all is read back.

    Returns the bytes of the checkpoint (of this rank's files on other ranks). Raises CheckpointFailed.
    """
    store = store or ObjectStore(remote.url, remote.budget_s)
    if job.rank != remote.ranks[0]:  # every node has one
        entries = {file: entry for file, entry in entries.items() if file != layout.WRITER_FILE}
        sources = {file: sources[file] for file in entries}
    name = layout.published_name(job.manifest.step, job.manifest.generation)
    for count, (file, source) in enumerate(sources.items()):
        if count * 2 >= len(sources):
            crash_point("mid-upload", job.manifest.step)
        store.put_file(store.path(name, file), source, entries[file])
    if job.rank != remote.ranks[0]:
        store.put_bytes(store.path(name, _part_name(job.rank)), msgspec.json.encode(_Part(entries)))
        return sum(entry.size for entry in entries.values())
    files = dict(entries)
    for rank in remote.ranks[1:]:
        files.update(_wait_for_part(store, store.path(name, _part_name(rank)), rank, deadline))
    total = sum(entry.size for entry in files.values())
    rest = max(0, total - sum(job.manifest.parts.values()))
    manifest = msgspec.structs.replace(job.manifest, files=files, parts={**job.manifest.parts, "rest": rest})
    store.put_bytes(store.path(name, MANIFEST), encode_manifest(manifest))
    crash_point("before-latest", job.manifest.step)
    store.put_bytes(store.path(LATEST), json.dumps({"name": name, "step": manifest.step}).encode())
    prune(store, job.manifest.run_id, remote.keep, remote.proven)
    return total


def prune(store: ObjectStore, run_id: str, keep: int, proven: int | None = None) -> list[str]:
    """Deletes this run's checkpoints but the last `keep` and the newest of step `proven` or before it; never the one
    that `latest.json` names. Returns what went.

    What belongs to others, is unfinished or cannot be read stays.
    """
    latest = store.latest()
    ours: list[tuple[str, Manifest]] = []
    for name in store.names():
        with contextlib.suppress(CheckpointFailed, Damaged):
            manifest = read_remote_manifest(store, name)
            if manifest is not None and manifest.run_id == run_id:
                ours.append((name, manifest))
    gone = []
    clean = next((name for name, known in reversed(ours) if proven is not None and known.step <= proven), None)
    for name, manifest in ours[:-keep]:
        if name in (latest, clean):
            continue
        with contextlib.suppress(CheckpointFailed):
            store.remove(name, sorted(manifest.files))
            gone.append(name)
    return gone


def read_remote_manifest(store: ObjectStore, name: str) -> Manifest | None:
    """None when there is none: never finished, or deleted. Raises Damaged, CheckpointFailed."""
    content = store.read(store.path(name, MANIFEST))
    if content is None:
        return None
    step, _, number = name.removeprefix("step-").partition(".g")
    return parse_manifest(content, int(step), int(number))


def fetch_newest(
    store: ObjectStore, roots: list[Path], run_id: str, above: int, before_step: int | None = None
) -> tuple[CheckpointRef | None, list[str]]:
    """Brings the newest checkpoint of a generation over `above` here, verified, and publishes it.

    `roots`: checkpoint folders to put it in, the first where its name is free (a damaged copy may lie in one).
    Returns it, or None where the store has none that is newer, and why others were passed over. Raises CheckpointFailed
    when the store cannot be read, OSError when the disk cannot be written.
    """
    rejected: list[str] = []
    for name in reversed(store.names()):
        if generation(name) <= above:
            break
        try:
            manifest = read_remote_manifest(store, name)
            if manifest is None or manifest.run_id != run_id:
                continue
            if before_step is not None and manifest.step >= before_step:
                continue
            root = next((root for root in roots if not (root / name).exists()), None)
            if root is None:
                raise CheckpointFailed("damaged copies of it lie here under this name; move them away")
            return _fetch(store, name, manifest, root), rejected
        except (Damaged, CheckpointFailed) as problem:
            rejected.append(f"{name} (remote): {problem}")
    return None, rejected


def abandon(store: ObjectStore, run_id: str, steps_from: int, above: int) -> None:
    """Deletes a run's checkpoints of `steps_from` and later steps of generations over `above`. Raises CheckpointFailed.

    `latest.json` may go on naming one of them: without its manifest it is none.
    """
    for name in reversed(store.names()):
        if generation(name) <= above:
            return
        with contextlib.suppress(Damaged):
            manifest = read_remote_manifest(store, name)
            if manifest is not None and manifest.run_id == run_id and manifest.step >= steps_from:
                store.remove(name, list(manifest.files))


def _fetch(store: ObjectStore, name: str, manifest: Manifest, root: Path) -> CheckpointRef:
    root.mkdir(parents=True, exist_ok=True)
    final = root / name
    partial = layout.work_path(root, layout.PARTIAL, name, manifest.run_id)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        for file, entry in manifest.files.items():
            store.fetch(store.path(name, file), partial / file, entry)
        publish_copy(partial, final, manifest)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return CheckpointRef(final, manifest.step, manifest.generation)


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _wait_for_part(store: ObjectStore, path: str, rank: int, deadline: float) -> dict[str, FileEntry]:
    while True:
        content = store.read(path)
        if content is not None:
            return msgspec.json.decode(content, type=_Part).files
        if time.monotonic() > deadline:
            raise CheckpointFailed(f"rank {rank} had not uploaded its part in time")
        time.sleep(_POLL_S)
