"""A run's folder in an fsspec store (S3, GCS, a share): every operation with retries, nothing believed unread.

    URL/step-00000100.g0003/…         the files of a checkpoint, manifest.json last
    URL/latest.json                   the newest one whose every byte was read back

No torch: the saver uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import fsspec

from headway.guard.hashing import FileEntry, Hasher, hash_bytes
from headway.guard.layout import CheckpointFailed
from headway.guard.manifest import MANIFEST

T = TypeVar("T")

LATEST = "latest.json"
_CHUNK = 8 << 20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 20.0
_NAME = re.compile(r"step-\d{8,}\.g\d{4,}")
# What trying again cannot mend.
_FINAL = (NotImplementedError, ImportError, ModuleNotFoundError, PermissionError)


_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs"}
"""Protocols without folders, of fsspec's implementations."""


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """The run's folder in a store (any fsspec URL), checkpoints that stay there, seconds that retries may wait."""

    url: str
    keep: int = 2
    budget_s: float = 300.0


class ObjectStore:
    """`budget_s`: seconds that waiting between tries may take, all operations of this object together."""

    def __init__(
        self,
        url: str,
        budget_s: float,
        *,
        dice: random.Random | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises CheckpointFailed for a URL that no installed library understands."""
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except Exception as problem:
            raise CheckpointFailed(str(problem)) from problem
        self.url = url
        known = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        self._buckets = bool(known & _BUCKETS)
        self.left_s = budget_s
        self.retries = 0
        self._dice = dice or random.Random()
        self._sleep = sleep

    def path(self, *names: str) -> str:
        return "/".join((self.root.rstrip("/"), *names))

    def put(self, path: str, content: Callable[[], Iterator[bytes]], entry: FileEntry) -> None:
        """Writes an object and reads it back, until what is read is what was meant. Raises CheckpointFailed."""

        def write() -> None:
            if not self._buckets:  # there it would make a bucket of a misspelt name
                self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self.fs.open(path, "wb") as file:
                for chunk in content():
                    file.write(chunk)
            if self._hash(path, entry) != entry:
                raise OSError(f"{path} does not read back as it was written")

        self._retry(write, f"writing {path}")

    def put_file(self, path: str, descriptor: int, entry: FileEntry) -> None:
        self.put(path, lambda: _chunks(descriptor), entry)

    def put_bytes(self, path: str, content: bytes) -> None:
        self.put(path, lambda: iter((content,)), hash_bytes(content))

    def read(self, path: str) -> bytes | None:
        """The object's bytes, None when there is none. Raises CheckpointFailed."""

        def get() -> bytes | None:
            self.fs.invalidate_cache()
            try:
                return self.fs.cat_file(path)
            except FileNotFoundError:
                return None

        return self._retry(get, f"reading {path}")

    def fetch(self, path: str, target: Path, entry: FileEntry) -> None:
        """Downloads to a new file on the disk; raises CheckpointFailed when it is not what the manifest says."""

        def get() -> None:
            hasher = Hasher(entry.size, entry.kind)
            with self.fs.open(path, "rb", cache_type="none") as source, target.open("wb") as file:
                while chunk := source.read(_CHUNK):
                    hasher.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            if hasher.entry() != entry:
                raise OSError(f"{path} does not match its {entry.kind}")

        self._retry(get, f"reading {path}")

    def names(self) -> list[str]:
        """Checkpoints in sight, finished or not: the listing may lag, so `latest.json` is asked too."""

        def ls() -> list[str]:
            self.fs.invalidate_cache()
            try:
                return [str(name).rstrip("/").rpartition("/")[2] for name in self.fs.ls(self.root, detail=False)]
            except FileNotFoundError:
                return []

        found = {name for name in self._retry(ls, f"listing {self.url}") if _NAME.fullmatch(name)}
        latest = self.latest()
        return sorted(found | ({latest} if latest else set()), key=generation)

    def latest(self) -> str | None:
        content = self.read(self.path(LATEST))
        try:
            name = json.loads(content)["name"] if content else None
        except (ValueError, KeyError, TypeError):
            return None
        return name if isinstance(name, str) and _NAME.fullmatch(name) else None

    def remove(self, name: str, files: list[str]) -> None:
        """Deletes a checkpoint's own objects, the manifest first: an interrupted deletion leaves no checkpoint."""
        self._remove(name, MANIFEST)
        for file in files:
            with contextlib.suppress(CheckpointFailed):
                self._remove(name, file)

    def _remove(self, name: str, file: str) -> None:
        def rm() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.path(name, file))

        self._retry(rm, f"removing {name}/{file}")

    def _hash(self, path: str, meant: FileEntry) -> FileEntry:
        hasher = Hasher(meant.size, meant.kind)
        self.fs.invalidate_cache()
        with self.fs.open(path, "rb", cache_type="none") as source:
            while chunk := source.read(_CHUNK):
                hasher.update(chunk)
        return hasher.entry()

    def _retry(self, work: Callable[[], T], what: str) -> T:
        """Exponential waits with full jitter (a thousand ranks must not come back at one moment), within the budget."""
        wait = _FIRST_WAIT_S
        while True:
            try:
                return work()
            except _FINAL as problem:
                raise CheckpointFailed(f"{what}: {_said(problem)}") from problem
            except Exception as problem:  # every store has errors of its own kind
                pause = self._dice.uniform(0, wait)
                if pause > self.left_s:
                    raise CheckpointFailed(
                        f"{what}: {_said(problem)}; given up after {self.retries} retries"
                    ) from problem
                self.left_s -= pause
                self.retries += 1
                self._sleep(pause)
                wait = min(2 * wait, _LONGEST_WAIT_S)


def generation(name: str) -> int:
    return int(name.rpartition(".g")[2])


def _chunks(descriptor: int) -> Iterator[bytes]:
    offset = 0
    while chunk := os.pread(descriptor, _CHUNK, offset):
        offset += len(chunk)
        yield chunk


def _said(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]
