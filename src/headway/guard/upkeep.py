"""Removing what is no longer needed, and only what is certainly ours: by one process, without the other ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headway.guard import layout
from headway.guard.crash import crash_point
from headway.guard.layout import CheckpointRef, WorkFolder
from headway.guard.manifest import MANIFEST, Damaged, read_manifest, size_problems

DAMAGED = "its content is damaged"


@dataclass(slots=True)
class Upkeep:
    """`removed`: names of folders that are gone. `left`: "name: why" for what should have gone and did not."""

    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def sweep(root: Path, run_id: str) -> Upkeep:
    """Removes what dead processes of this run left behind: partial saves and half-done deletions.

    Other runs' folders, and those that a living process holds, stay.
    """
    done = Upkeep()
    for folder in layout.work_folders(root):
        if folder.run_id != run_id:
            continue
        reason = _cannot_sweep(folder)
        if reason is None:
            _remove(folder.path, folder.path.name, done)
        else:
            done.left.append(f"{folder.path.name}: {reason}")
    return done


def prune(
    root: Path,
    run_id: str,
    keep_last: int,
    keep_every: int | None,
    is_verified: Callable[[CheckpointRef], bool],
    proven: int | None = None,
) -> Upkeep:
    """Deletes checkpoints of this run that no rule keeps. See `CheckpointStore.prune`.

    proven: the newest one of this step or before it stays, too.
    """
    done = Upkeep()
    sound = []
    for ref in layout.published(root):
        try:
            manifest = read_manifest(ref)
        except Damaged as problem:
            done.left.append(f"{ref.name}: {problem}")
            continue
        if manifest.run_id != run_id:
            continue
        problems = size_problems(ref.path, manifest)
        if problems:
            done.left.append(f"{ref.name}: {problems[0]}")
        else:
            sound.append(ref)
    kept = set(sound[-keep_last:])
    kept |= {ref for ref in sound if keep_every and ref.step % keep_every == 0}
    kept |= set([ref for ref in sound if proven is not None and ref.step <= proven][-1:])
    expendable = [ref for ref in sound if ref not in kept]
    if not expendable:
        return done
    # Only after a newer one was verified: sizes alone would keep a corrupt one and delete the last good one.
    newest = next((ref for ref in reversed(sound) if is_verified(ref)), None)
    if newest is None:
        done.left += [f"{ref.name}: no checkpoint could be verified" for ref in expendable]
        return done
    for ref in expendable:
        if ref == newest:
            continue
        if is_verified(ref):
            _delete(ref, run_id, done)
        else:  # how it came to be so is worth a look, and it goes with one command
            done.left.append(f"{ref.name}: {DAMAGED}; `headway checkpoint verify` says where, remove it by hand")
    return done


def abandon(root: Path, run_id: str, steps_from: int, above: int) -> Upkeep:
    """Deletes this run's checkpoints of `steps_from` and later steps that are newer than generation `above`.

    They hold what a rollback has just taken back: a start would take the newest of them, and go on from the bad state.
    """
    done = Upkeep()
    for ref in layout.published(root):
        if ref.step >= steps_from and ref.generation > above:
            try:
                own = read_manifest(ref).run_id == run_id
            except Damaged:
                own = False  # no start takes it
            if own:
                _delete(ref, run_id, done)
    return done


def _delete(ref: CheckpointRef, run_id: str, done: Upkeep) -> None:
    """Renames first: a deletion that is interrupted must not leave half a checkpoint under a checkpoint's name."""
    try:
        foreign = sorted({entry.name for entry in ref.path.iterdir()} - read_manifest(ref).files.keys() - {MANIFEST})
        reason = f"holds foreign files ({', '.join(foreign)})" if foreign else layout.claimed_elsewhere(ref.path)
        if reason is not None:
            done.left.append(f"{ref.name}: {reason}")
            return
        trash = layout.work_path(ref.path.parent, layout.TRASH, ref.name, run_id)
        ref.path.rename(trash)
    except (OSError, Damaged) as problem:
        done.left.append(f"{ref.name}: {problem}")
        return
    crash_point("mid-prune", ref.step)
    _remove(trash, ref.name, done)


def _cannot_sweep(folder: WorkFolder) -> str | None:
    try:
        return layout.claimed_elsewhere(folder.path)
    except OSError as problem:
        return str(problem)


def _remove(path: Path, name: str, done: Upkeep) -> None:
    try:
        shutil.rmtree(path)
    except OSError as problem:
        done.left.append(f"{name}: {problem}")
    else:
        done.removed.append(name)
