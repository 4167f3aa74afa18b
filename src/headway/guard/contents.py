"""What is known of checkpoints' contents, so that each is read at most once, and in pieces.

Who published a checkpoint has compared every file with what was to be written: it is known, and costs nothing, as long
as no file's size, time or inode changes. One of an earlier session is read when it matters, for as long as the caller
can spare, and later on from there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.guard import layout
from headway.guard.direct import hash_by_steps
from headway.guard.layout import CheckpointRef
from headway.guard.manifest import Damaged, Manifest, read_manifest, signature


def mark_of(ref: CheckpointRef, manifest: Manifest) -> str:
    """The state of a checkpoint's files in short, the same in every process; empty where one is missing."""
    found = signature(ref.path, manifest)
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest() if found is not None else ""


@dataclass(slots=True)
class _Reading:
    """One that is being read. `steps` tell None for every piece, and at last what was found."""

    path: Path
    mark: str
    steps: Generator[bool | None, None, None]


class Contents:
    """Of the checkpoints below `root`. Not for loading: a disk that rots changes no file time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, tuple[str, bool]] = {}
        self._reading: _Reading | None = None

    def note(self, name: str, mark: str) -> None:
        """Every byte of a checkpoint was as written when its files had this mark."""
        if mark:
            self._known[name] = mark, True

    def learn(self, sound: Mapping[str, str]) -> None:
        """The same of several, from another process; what this one knows is newer."""
        self._known = {name: (mark, True) for name, mark in sound.items()} | self._known
        self._forget_missing()

    def sound(self) -> dict[str, str]:
        """What another process may `learn`."""
        self._forget_missing()
        return {name: mark for name, (mark, sound) in self._known.items() if sound}

    def is_sound(self, ref: CheckpointRef, until: float | None) -> bool | None:
        """Whether every byte is as written; None while that is not known.

        until: moment (`time.monotonic`) up to which it may be read. None: not at all.
        """
        try:
            manifest = read_manifest(ref)
        except Damaged:  # or somebody deletes it just now
            return False
        mark = mark_of(ref, manifest)
        if not mark:
            return False
        before, sound = self._known.get(ref.name, ("", False))
        if before == mark:
            return sound
        if until is None:
            return None
        return self._read(ref, mark, manifest, until)

    def _forget_missing(self) -> None:
        there = {ref.name for ref in layout.published(self.root)}
        self._known = {name: known for name, known in self._known.items() if name in there}

    def _read(self, ref: CheckpointRef, mark: str, manifest: Manifest, until: float) -> bool | None:
        if time.monotonic() >= until:
            return None  # and what was begun goes on the next time
        reading = self._reading
        if reading is None or (reading.path, reading.mark) != (ref.path, mark):
            self._reading = reading = _Reading(ref.path, mark, _pieces(ref.path, manifest))
        for sound in reading.steps:
            if sound is not None:
                self._known[ref.name], self._reading = (mark, sound), None
                return sound
            if time.monotonic() >= until:
                break
        return None


def _pieces(folder: Path, manifest: Manifest) -> Generator[bool | None, None, None]:
    for name, entry in manifest.files.items():
        try:
            found = yield from hash_by_steps(folder / name, entry.kind)
        except OSError:
            found = None
        if found != entry:
            yield False
            return
    yield True
