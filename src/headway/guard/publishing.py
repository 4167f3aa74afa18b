"""Turning a complete partial folder into a checkpoint: manifest last, then one rename. No torch: for the saver too."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from headway.guard.crash import crash_point
from headway.guard.layout import CheckpointFailed, fsync_folder
from headway.guard.manifest import Manifest, write_manifest
from headway.record.files import DISK_FULL


def commit(partial: Path, final: Path, manifest: Manifest, *, in_memory: bool = False) -> None:
    """Publishes `partial` as `final`, and waits until the disk has the names unless they are `in_memory`.

    Raises CheckpointFailed when the files are not those of the manifest or the name exists, OSError.
    """
    present = {entry.name for entry in partial.iterdir()}
    if present != manifest.files.keys():
        odd = ", ".join(sorted(present ^ manifest.files.keys()))
        raise CheckpointFailed(f"the files in {partial.name} are not those that were written: {odd}")
    crash_point("memory-before-manifest" if in_memory else "before-manifest", manifest.step)
    write_manifest(partial, manifest)
    if not in_memory:
        fsync_folder(partial)
    crash_point("memory-before-publish" if in_memory else "before-publish", manifest.step)
    if os.path.lexists(final):  # rename would replace an empty folder without a word
        raise CheckpointFailed(f"{final.name} exists already: another job writes into this folder")
    partial.rename(final)
    if not in_memory:
        fsync_folder(final.parent)
    crash_point("memory-after-publish" if in_memory else "after-publish", manifest.step)


def publish_copy(partial: Path, final: Path, manifest: Manifest) -> None:
    """Publishes files that were fetched and verified, under the manifest that they came with (its digest stays)."""
    write_manifest(partial, manifest)
    fsync_folder(partial)
    if os.path.lexists(final):
        raise CheckpointFailed(f"{final.name} exists already")
    partial.rename(final)
    fsync_folder(final.parent)


def explained(problem: BaseException, folder: Path) -> str:
    """A failed write in one line; a full disk is called one."""
    text = f"{type(problem).__name__}: {problem}".splitlines()[0]
    # torch's zip writer hides ENOSPC: it only notices that its position is not where it should be.
    if getattr(problem, "errno", None) in DISK_FULL or "unexpected pos" in text:
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free
            return f"the disk is full, or a quota is reached ({free / 1e6:,.1f} MB free in {folder.parent}): {text}"
    return text


def now() -> str:
    """UTC, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
