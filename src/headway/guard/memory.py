"""The memory tier's folder on a node: who owns it, and when it goes.

It lies in shared memory under the run's name, so it survives a killed rank and a restarted job, but not the node. The
format is that of any checkpoint folder: `CheckpointStore` reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from pathlib import Path

SHARED_MEMORY = "HEADWAY_SHARED_MEMORY"
"""Where memory checkpoints go; default /dev/shm."""
NODE = "HEADWAY_NODE"
"""A name for this node, so that one machine can play several."""

_OWNER = "owner.json"
_ABANDONED_S = 24 * 3600.0


def memory_root(run_id: str) -> Path | None:
    """This node's folder for a run; None where there is no shared memory."""
    base = Path(os.environ.get(SHARED_MEMORY, "/dev/shm"))
    if not base.is_dir() or not os.access(base, os.W_OK):
        return None
    node = os.environ.get(NODE)
    return base / f"headway-{os.getuid()}-{run_id}{f'-{node}' if node else ''}"


class Owner:
    """The lease of one process on a memory folder, for as long as it lives (a kernel lock)."""

    def __init__(self, root: Path, run_folder: Path, run_id: str) -> None:
        """Raises OSError; BlockingIOError when another living process owns it."""
        self.root = root
        root.mkdir(mode=0o700, exist_ok=True)
        self._file = (root / _OWNER).open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise
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
