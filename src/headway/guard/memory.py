"""The memory tier's folder on a node: who owns it, and when it goes.

It lies in shared memory under the run's name, so it survives a killed rank and a restarted job, but not the node. The
format is that of any checkpoint folder: `CheckpointStore` reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = "HEADWAY_SHARED_MEMORY"
"""Where memory checkpoints go; default /dev/shm."""
NODE = "HEADWAY_NODE"
"""A name for this node, so that one machine can play several."""

_OWNER = "owner.json"
_MARK = 8
"""Hexadecimal digits of a folder's mark in the name of its memory, where it has not the run's own."""
_ABANDONED_S = 24 * 3600.0


class Claim(NamedTuple):
    """A run folder's place in this node's memory. `why`: what a person should know of the choice, in one line."""

    root: Path
    why: str = ""


def memory_root(run_id: str, run_folder: Path) -> Claim | None:
    """Where the memory checkpoints of the run in `run_folder` lie on this node, or would; None where there is no shared
    memory.

    They are the folder's: a copy of it has the same run id, and may have gone another way since. A folder that was
    moved is known by nobody else being where it was.
    """
    base = Path(os.environ.get(SHARED_MEMORY, "/dev/shm"))
    if not base.is_dir() or not os.access(base, os.W_OK):
        return None
    node = os.environ.get(NODE)
    suffix = f"-{node}" if node else ""
    first = base / f"headway-{os.getuid()}-{run_id}{suffix}"
    mark = hashlib.sha256(os.fsencode(run_folder.resolve())).hexdigest()[:_MARK]
    own = base / f"headway-{os.getuid()}-{run_id}.{mark}{suffix}"
    others = sorted(base.glob(f"headway-{os.getuid()}-{glob.escape(run_id)}.{'[0-9a-f]' * _MARK}{glob.escape(suffix)}"))
    there = {root: _owner_of(root) for root in [first, *others] if root.is_dir()}
    for root, owner in there.items():
        if owner is not None and _is_same(owner, run_folder):
            return Claim(root)
    moved = [root for root, owner in there.items() if owner is not None and not _is_run(owner, run_id)]
    if moved:
        return Claim(
            moved[0], f"memory checkpoints: those of {there[moved[0]]}, which is gone, are taken for this run's"
        )
    if there.get(first) is None:
        return Claim(first)
    return Claim(own, f"memory checkpoints: those of {there[first]}, which has the same run id, are not this folder's")


def _owner_of(root: Path) -> Path | None:
    """The run folder that a memory folder was last claimed for; None where it does not say."""
    try:
        return Path(json.loads((root / _OWNER).read_bytes())["run_folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_same(one: Path, other: Path) -> bool:
    """Whether two names lead to one folder, mounted in two places perhaps."""
    if one == other.resolve():
        return True
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return False


class Owner:
    """The lease of one process on a memory folder, for as long as it lives (a kernel lock)."""

    def __init__(self, root: Path, run_folder: Path, run_id: str) -> None:
        """Raises OSError; BlockingIOError when another living process owns it."""
        self.root = root
        root.mkdir(mode=0o700, exist_ok=True)
        self._file = (root / _OWNER).open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            self._file.close()
            raise BlockingIOError(problem.errno, f"a process that trains {_owner_of(root)} holds {root}") from problem
        run = {"run_folder": str(run_folder.resolve()), "run_id": run_id, "pid": os.getpid()}
        self._file.truncate(0)
        self._file.write(json.dumps(run).encode())
        self._file.flush()

    def release(self, *, remove: bool) -> None:
        """Gives the lease back; `remove`: the run is over, and its memory with it."""
        if remove:
            shutil.rmtree(self.root, ignore_errors=True)
        self._file.close()


def sweep_abandoned(now: float | None = None) -> list[str]:
    """Frees what runs left here whose process is gone, and whose run folder is gone too or which nobody took up for a
    day. Returns the names."""
    base = Path(os.environ.get(SHARED_MEMORY, "/dev/shm"))
    gone = []
    for root in base.glob(f"headway-{os.getuid()}-*"):
        with contextlib.suppress(OSError, ValueError, KeyError), (root / _OWNER).open("rb") as file:
            run = json.load(file)
            # The folder changes with every save, its owner's file only at a start.
            touched = max(root.stat().st_mtime, (root / _OWNER).stat().st_mtime)
            idle_s = (time.time() if now is None else now) - touched
            if idle_s > _ABANDONED_S or not _is_run(Path(run["run_folder"]), run["run_id"]):
                # Only now: a run that starts must never find its lock taken by somebody who only looks.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody lives
                shutil.rmtree(root, ignore_errors=True)
                gone.append(root.name)
    return gone


def _is_run(folder: Path, run_id: str) -> bool:
    """Whether a run folder still is that run's: it may have been removed and made anew."""
    try:
        return run_id in (folder / "run_id.json").read_text()
    except OSError:
        return False
