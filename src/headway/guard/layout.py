"""Names in a checkpoints folder, and who may touch what.

    checkpoints/
      step-00000100.g0003/                     published by one rename; never written to again
      .partial-step-00000200.g0004-RUN_ID/     being written, or left by a dead process
      .trash-step-00000050.g0001-RUN_ID/       being deleted

The generation counts saves in this folder (whatever their step), so the newest checkpoint is the one with the highest
generation, also after a rollback to an earlier step, and no directory name is ever used twice.
Everything else in the folder belongs to somebody else and is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PARTIAL, TRASH = ".partial-", ".trash-"
WRITER_FILE = "writer.json"
"""Who wrote it; also the file whose lock says that somebody is writing or reading."""

_PUBLISHED_NAME = re.compile(r"step-(\d{8,})\.g(\d{4,})")
_WORK_NAME = re.compile(rf"({re.escape(PARTIAL)}|{re.escape(TRASH)})step-(\d{{8,}})\.g(\d{{4,}})-(.+)")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class CheckpointFailed(Exception):
    """A save or a read did not succeed (disk full, I/O error, too little space). What existed before is untouched.

    Not a UserError: the loop decides whether the run goes on without this checkpoint.
    """


class NoRoom(CheckpointFailed):
    """The disk has too little space, and nothing was begun: what is no longer needed may make room."""


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A published checkpoint. `rejected`: why newer ones were passed over, one line each (from `newest_verified`)."""

    path: Path
    step: int
    generation: int
    rejected: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """A `.partial-` or `.trash-` folder."""

    path: Path
    kind: str
    generation: int
    run_id: str


def check_run_id(run_id: str) -> str:
    """Returns `run_id`; raises ValueError unless it can be part of a file name."""
    if _RUN_ID.fullmatch(run_id) is None:
        raise ValueError(
            f"run id {run_id!r} must be 1 to 64 of letters, digits, '.', '_', '-'; first a letter or digit"
        )
    return run_id


def published_name(step: int, generation: int) -> str:
    return f"step-{step:08d}.g{generation:04d}"


def work_path(root: Path, kind: str, name: str, run_id: str) -> Path:
    return root / f"{kind}{name}-{run_id}"


def published(root: Path) -> list[CheckpointRef]:
    """Folders with a checkpoint's name, oldest generation first. Nothing is said about their content."""
    refs = []
    for entry in _folders(root):
        match = _PUBLISHED_NAME.fullmatch(entry.name)
        if match is not None:
            refs.append(CheckpointRef(entry, int(match[1]), int(match[2])))
    return sorted(refs, key=lambda ref: (ref.generation, ref.step))


def work_folders(root: Path) -> list[WorkFolder]:
    found = []
    for entry in _folders(root):
        match = _WORK_NAME.fullmatch(entry.name)
        if match is not None:
            found.append(WorkFolder(entry, match[1], int(match[3]), match[4]))
    return sorted(found, key=lambda folder: folder.generation)


def next_generation(root: Path) -> int:
    """One more than any generation in sight, also of folders being written or deleted."""
    taken = [ref.generation for ref in published(root)] + [folder.generation for folder in work_folders(root)]
    return max(taken, default=0) + 1


def fsync_folder(folder: Path) -> None:
    """Makes names in `folder` durable: without it a power loss can forget a rename that was already reported."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Marks a checkpoint folder as being written or read by this process, until the block or the process ends.

    The kernel drops the mark with the process, also after kill -9. A file system without locks goes unmarked.
    """
    descriptor = os.open(folder / WRITER_FILE, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def claimed_elsewhere(folder: Path) -> str | None:
    """Why `folder` must be left alone: somebody holds it, or it cannot be told. None when nobody does."""
    try:
        descriptor = os.open(folder / WRITER_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return "this file system has no locks, so a living writer cannot be told from a dead one"
    except BlockingIOError:
        return "a process is writing or reading it"
    finally:
        os.close(descriptor)
    return None


def _lock(descriptor: int, operation: int) -> bool:
    """False where the file system has no locks; BlockingIOError when somebody else holds it."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        raise
    except OSError as problem:
        if problem.errno in _NO_LOCKS:
            return False
        raise
    return True


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return [root / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
