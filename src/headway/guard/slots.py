"""Rooms for memory checkpoints: taken once, then filled again and again under new names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headway.guard.host_file import HostFile


@dataclass(slots=True)
class Slot:
    """One memory checkpoint's room. `host`: this rank's file in it."""

    partial: Path | None = None
    final: Path | None = None
    host: HostFile | None = None
    generation: int = 0
    valid: bool = False

    def folder(self) -> Path | None:
        """Where it lies now."""
        return next((path for path in (self.final, self.partial) if path is not None and path.is_dir()), None)

    def clear(self, partial: Path) -> bool:
        """Gives the folder its new name; the shard files in it stay, to be written over. False where there was none."""
        old = self.folder()
        if old is None:
            partial.mkdir(mode=0o700)
            return False
        old.rename(partial)
        for entry in partial.iterdir():
            if not entry.name.endswith(".distcp"):
                entry.unlink()
        return True

    def take(self, partial: Path, final: Path, generation: int, *, cleared: bool) -> None:
        """It is the next save's. `cleared`: the folder was there, and so is this rank's file."""
        if not cleared and self.host is not None:
            self.host.close()
            self.host = None
        self.partial, self.final, self.generation = partial, final, generation


@dataclass(slots=True)
class Slots:
    all: list[Slot] = field(default_factory=list)

    def renew(self, count: int) -> None:
        """Lets go of all, for `count` empty ones."""
        for slot in self.all:
            if slot.host is not None:
                slot.host.close()
        self.all = [Slot() for _ in range(count)]

    def missed_least(self) -> int:
        """The number of the one to fill next: one that holds nothing, else the oldest."""
        return min(range(len(self.all)), key=lambda number: (self.all[number].valid, self.all[number].generation))

    def forget_missing(self) -> None:
        """After folders were deleted."""
        for slot in self.all:
            slot.valid = slot.valid and slot.folder() is not None

    def note(self, number: int, valid: bool) -> None:
        if number < len(self.all):
            self.all[number].valid = valid

    def finals(self) -> set[Path]:
        return {slot.final for slot in self.all if slot.final is not None}
