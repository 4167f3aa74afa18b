"""Removing what is no longer needed, and only what is certainly ours: by one process, without the other ranks."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headway.guard import layout
from headway.guard.contents import Contents
from headway.guard.crash import crash_point
from headway.guard.layout import CheckpointRef, WorkFolder
from headway.guard.manifest import MANIFEST, Damaged, read_manifest, size_problems

DAMAGED = "its content is damaged"


@dataclass(slots=True)
class Upkeep:
    """`removed`: names of folders that are gone. `left`: "name: why" for what should have gone and did not. `unread`:
    some stay only because nobody has read them yet."""

    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unread: bool = False


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """What stays: the last `last`, on the disk also steps that `every` divides, and the newest of step `proven` or
    before it: what came after that may yet turn out to be harmed by a spike.

    Only a checkpoint that is sound fills a place: a damaged one in it would let the last good one go.
    """

    last: int
    every: int | None = None
    proven: int | None = None

    def of(self, refs: Sequence[CheckpointRef], is_sound: Callable[[CheckpointRef], bool | None]) -> set[CheckpointRef]:
        """Of `refs`, oldest first. One that is not known (None) stays beside the one that fills the place."""
        found = {ref for ref in refs if self.every and ref.step % self.every == 0}
        found |= _newest(refs, self.last, is_sound)
        if self.proven is not None:
            found |= _newest([ref for ref in refs if ref.step <= self.proven], 1, is_sound)
        return found


def _newest(
    refs: Sequence[CheckpointRef], count: int, is_sound: Callable[[CheckpointRef], bool | None]
) -> set[CheckpointRef]:
    found = set()
    for ref in reversed(refs):
        if not count:
            break
        sound = is_sound(ref)
        if sound is not False:
            found.add(ref)
            count -= bool(sound)
    return found


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
    contents: Contents,
    run_id: str,
    keep: Keep,
    *,
    until: float | None = math.inf,
    unread: bool = False,
) -> Upkeep:
    """Deletes checkpoints of this run that `keep` does not name. See `CheckpointStore.prune`.

    until: moment (`time.monotonic`) up to which those that `contents` does not know are read; None reads nothing. One
    that is not known by then stays, and fills no place.
    unread: one to be deleted need not be known, where the next save has no room; those that stay in its place are.
    """
    done = Upkeep()
    whole = []
    for ref in layout.published(contents.root):
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
            whole.append(ref)

    @functools.cache
    def is_sound(ref: CheckpointRef) -> bool | None:
        sound = contents.is_sound(ref, until)
        done.unread |= sound is None
        return sound

    kept = keep.of(whole, is_sound)
    for ref in whole:
        if ref in kept:
            continue
        sound = contents.is_sound(ref, None) if unread else is_sound(ref)
        if sound or (unread and sound is None):
            _delete(ref, run_id, done)
        elif sound is False:  # how it came to be so is worth a look, and it goes with one command
            done.left.append(f"{ref.name}: {DAMAGED}; `headway checkpoint verify` says where, remove it by hand")
    return done


def may_go(root: Path, keep: Keep) -> bool:
    """Whether there is more than what stays, going by names alone."""
    refs = layout.published(root)
    return len(keep.of(refs, lambda ref: True)) < len(refs)


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
