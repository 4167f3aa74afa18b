"""`manifest.json` of a checkpoint: what belongs to it, how long it is, and its hash. Written last.

A folder is a checkpoint exactly when its manifest holds. torch.distributed.checkpoint itself reads a flipped bit, a
zeroed block or another step's shard without a word, so nothing is read before the hashes agree.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from headway.guard.hashing import FileEntry, hash_file, where_changed
from headway.guard.layout import CheckpointRef

MANIFEST = "manifest.json"
SCHEMA = 2
"""1: files have SHA-256. 2: XXH3-128 (`guard.hashing`); 1 is read like 2."""

_NO_DIGEST = "0" * 64


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of `manifest.json`. `parts`: bytes of tensors under "model" and "optimizer", and "rest" of all files.

    `digest` is the SHA-256 of the file's own bytes with these 64 characters replaced by zeros.
    """

    schema: int = SCHEMA
    step: int
    generation: int
    run_id: str
    created: str
    world_size: int
    headway: str
    torch: str
    parts: dict[str, int]
    files: dict[str, FileEntry]
    digest: str = _NO_DIGEST

    @property
    def size(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(entry.size for entry in self.files.values())


class _Schema(msgspec.Struct):
    schema: int


class Damaged(Exception):
    """A manifest that cannot be believed; the message says why."""


def write_durably(path: Path, content: bytes) -> None:
    """Writes a new file and waits until the disk has it. Raises FileExistsError rather than replace one."""
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """Waits until the disk has a file's content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_durably(folder / MANIFEST, encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's bytes, with their digest."""
    text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, digest=_NO_DIGEST)), indent=1)
    digest = hashlib.sha256(text).hexdigest()
    return text.replace(_NO_DIGEST.encode(), digest.encode())


def read_manifest(ref: CheckpointRef) -> Manifest:
    """Raises Damaged when the manifest is missing, torn, altered, of a newer schema, or not this folder's own."""
    try:
        text = (ref.path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing: the checkpoint was never finished, or files were removed") from None
    except OSError as problem:
        raise Damaged(f"{MANIFEST} cannot be read: {problem}") from problem
    return parse_manifest(text, ref.step, ref.generation)


def parse_manifest(text: bytes, step: int, generation: int) -> Manifest:
    """Raises Damaged as `read_manifest` does; `step` and `generation` are those of the folder's name."""
    try:
        schema = msgspec.json.decode(text, type=_Schema).schema
        if schema > SCHEMA:  # before its fields, which may be others
            raise Damaged(f"{MANIFEST} has schema {schema}, this headway reads up to {SCHEMA}: update headway")
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Damaged(f"{MANIFEST} is damaged: {problem}") from None
    blank = text.replace(manifest.digest.encode(), _NO_DIGEST.encode())
    if text.count(manifest.digest.encode()) != 1 or hashlib.sha256(blank).hexdigest() != manifest.digest:
        raise Damaged(f"{MANIFEST} is damaged: it does not match its own digest")
    if (manifest.step, manifest.generation) != (step, generation):
        raise Damaged(f"{MANIFEST} is of step {manifest.step}, generation {manifest.generation}: not this folder's")
    if any("/" in name or name in ("", ".", "..", MANIFEST) for name in manifest.files):
        raise Damaged(f"{MANIFEST} names files outside its folder")
    return manifest


def size_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Missing files and wrong sizes, without reading any content."""
    problems = []
    for name, entry in sorted(manifest.files.items()):
        try:
            size = (folder / name).stat().st_size
        except OSError as problem:
            problems.append(f"{name} is missing" if isinstance(problem, FileNotFoundError) else f"{name}: {problem}")
            continue
        if size != entry.size:
            problems.append(f"{name} has {size} bytes, should have {entry.size}")
    return problems


def hash_problems(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Files among `names` whose content is not what was written."""
    problems = []
    for name in names:
        try:
            meant = manifest.files[name]
            found = hash_file(folder / name, meant.kind)
            if found != meant:
                where = where_changed(found, meant)
                problems.append(
                    f"{name} does not match its {meant.kind}: its content changed after it was written{where}"
                )
        except OSError as problem:
            problems.append(f"{name} cannot be read: {problem}")
    return problems


def signature(folder: Path, manifest: Manifest) -> tuple[tuple[str, int, int, int], ...] | None:
    """A cheap mark of the files' state (size, mtime, inode); None when one is missing.

    A folder whose hashes agreed under this mark need not be read again in the same process.
    """
    marks = []
    with contextlib.suppress(OSError):
        for name in (*sorted(manifest.files), MANIFEST):
            stat = (folder / name).stat()
            marks.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
        return tuple(marks)
    return None
