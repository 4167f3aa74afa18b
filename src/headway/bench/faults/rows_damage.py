"""Rows about what lies on a disk or in memory and is no longer what was written, or cannot be written at all."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.account.errors import Refused
from headway.bench.faults.case import Case, Skipped
from headway.bench.faults.small_state import SmallState, forget_memory, own_memory
from headway.guard.checkpoint import CheckpointStore
from headway.guard.hashing import block_size
from headway.guard.layout import CheckpointRef
from headway.guard.manifest import MANIFEST

Change = Callable[[Case, bytearray], bytearray | None]


def row_08(case: Case) -> None:
    """A full disk: refused before writing, the old checkpoint untouched, the memory copy serves, and it is said."""
    own_memory(case)
    with _small_disk(case.folder / "disk", "size=4m") as disk:
        state = SmallState(disk)
        state.train(1)
        state.save()
        (disk / "filler").write_bytes(bytes(max(0, _free(disk) - 20_000)))
        state.train(2)
        state.save()
        why = [event.why for event in state.events if event.tier == "disk" and not event.ok]
        case.expect(len(why) == 1 and "too little space" in why[0], f"refused before writing, and said, not {why}")
        _memory_serves(case, state, 2)
        # Between the look and the write another job takes the space: found in the middle of the write.
        from headway.guard import writing

        real, writing._check_space = writing._check_space, lambda root, need: None
        state.train(3)
        state.save()
        writing._check_space = real
        why = [event.why for event in state.events if event.tier == "disk" and not event.ok]
        case.expect(len(why) == 2 and os.strerror(errno.ENOSPC) in why[1], f"the alarm says ENOSPC, not {why[1:]}")
        _memory_serves(case, state, 3)
        (disk / "filler").unlink()
        state.train(4)
        state.save()
        case.expect(state.told("disk")[-1] == (4, True), "with room again the next one succeeds")
        state.tiers.close(over=True)
    forget_memory()


def row_09(case: Case) -> None:
    """A disk that became read-only: as a full one."""
    own_memory(case)
    with _small_disk(case.folder / "disk", "size=8m") as disk:
        state = SmallState(disk)
        state.train(1)
        state.save()
        _mount("-o", "remount,ro", str(disk))
        state.train(2)
        state.save()
        why = [event.why for event in state.events if event.tier == "disk" and not event.ok]
        case.expect(len(why) == 1 and "Read-only" in why[0], f"it is said, not {why}")
        _memory_serves(case, state, 2)
        _mount("-o", "remount,rw", str(disk))
        state.train(3)
        state.save()
        case.expect(state.told("disk")[-1] == (3, True), "writable again, the next one succeeds")
        state.tiers.close(over=True)
    forget_memory()


def row_11(case: Case) -> None:
    """Truncated files: by a byte, by half, to nothing."""

    def cut(case: Case, content: bytearray) -> bytearray:
        return content[: case.dice.choice((len(content) - 1, len(content) // 2, 0))]

    _each_file(case, cut)


def row_12(case: Case) -> None:
    """One flipped bit, in each file of each tier: rejected, file and block of bytes named."""

    def flip(case: Case, content: bytearray) -> bytearray:
        content[case.dice.randrange(len(content))] ^= 1 << case.dice.randrange(8)
        return content

    _each_file(case, flip, placed=True)


def row_13(case: Case) -> None:
    """A hole of zeros (a lost page), in each file of each tier."""

    def hole(case: Case, content: bytearray) -> bytearray | None:
        start = case.dice.randrange(max(1, len(content) - 65536))
        end = min(len(content), start + 65536)
        if not any(content[start:end]):
            return None
        content[start:end] = bytes(end - start)
        return content

    _each_file(case, hole, placed=True)


def row_14(case: Case) -> None:
    """Missing, empty or half metadata; and when nothing holds, the start is refused: never from random weights."""
    own_memory(case)
    for store, older, newer in _tiers(case):
        for name in (MANIFEST, ".metadata", "meta.json", "values.pt"):
            file = newer.path / name
            content = file.read_bytes()
            for damage in (None, b"", content[: len(content) // 2]):
                file.unlink()
                if damage is not None:
                    file.write_bytes(damage)
                _falls_back(case, store, older, newer, name)
                file.write_bytes(content)
        (older.path / MANIFEST).unlink()
        (newer.path / MANIFEST).unlink()
        try:
            CheckpointStore(store.root, "small").newest_verified()
            refused = False
        except Refused:
            refused = True
        case.expect(refused, "nothing holds: the start is refused")
    forget_memory()


def row_15(case: Case) -> None:
    """A shard of the step before under the new manifest; a whole older checkpoint under a newer name."""
    own_memory(case)
    for store, older, newer in _tiers(case):
        shard = newer.path / "__0_0.distcp"
        good = shard.read_bytes()
        stale = (older.path / "__0_0.distcp").read_bytes()
        case.expect(len(good) == len(stale) and good != stale, "the stale shard has the right length")
        shard.write_bytes(stale)
        _falls_back(case, store, older, newer, "__0_0.distcp")
        shard.write_bytes(good)
        kept = {file.name: file.read_bytes() for file in newer.path.iterdir()}
        for file in older.path.iterdir():
            (newer.path / file.name).write_bytes(file.read_bytes())
        _falls_back(case, store, older, newer, "not this folder's")
        for name, content in kept.items():
            (newer.path / name).write_bytes(content)
        case.expect(CheckpointStore(store.root, "small").newest_verified() == newer, "the good one is not rejected")
    forget_memory()


def _each_file(case: Case, change: Change, *, placed: bool = False) -> None:
    """`placed`: the length stays, so that the block in which the content changed must be named, too."""
    own_memory(case)
    changed = 0
    for store, older, newer in _tiers(case):
        for file in sorted(newer.path.iterdir()):
            content = file.read_bytes()
            damaged = change(case, bytearray(content))
            if damaged is None:
                continue
            file.write_bytes(damaged)
            changed += 1
            said = _falls_back(case, store, older, newer, file.name)
            if placed and file.name != MANIFEST:
                at = next(i for i, (old, new) in enumerate(zip(content, damaged, strict=True)) if old != new)
                case.expect(_is_placed(said, at), f"{file.name}: byte {at} lies in the block that is named: {said}")
            file.write_bytes(content)
        case.expect(CheckpointStore(store.root, "small").newest_verified() == newer, "the good one is not rejected")
    case.expect(changed >= 8, f"most files of both tiers were damaged in turn: {changed}")
    forget_memory()


def _tiers(case: Case) -> Iterator[tuple[CheckpointStore, CheckpointRef, CheckpointRef]]:
    """Two checkpoints of one run, in memory and on the disk: store, older, newer."""
    state = SmallState(case.folder / "run", ballast=50_000, keep_memory=2)
    for step in (1, 2):
        state.train(step)
        state.save()
    stores = [store for store in (state.tiers.memory, state.tiers.disk) if store is not None]
    case.expect(len(stores) == 2, "both tiers are there")
    for store in stores:
        older, newer = (info.ref for info in store.list())
        yield store, older, newer
    state.tiers.close(over=True)


def _is_placed(said: str, at: int) -> bool:
    block = re.search(r"first in bytes (\d+) to (\d+)", said)
    return block is not None and int(block[1]) <= at <= int(block[2]) < int(block[1]) + block_size(0)


def _falls_back(case: Case, store: CheckpointStore, older: CheckpointRef, newer: CheckpointRef, named: str) -> str:
    found = CheckpointStore(store.root, "small").newest_verified()
    case.expect(found == older, f"{named}: {newer.name} is rejected and {older.name} taken")
    said = found.rejected if found is not None else ()
    case.expect(len(said) == 1 and named in said[0] and newer.name in said[0], f"{named} is named: {said}")
    return " ".join(said)


def _memory_serves(case: Case, state: SmallState, step: int) -> None:
    found = state.tiers.newest()
    case.expect(found is not None and (found.tier, found.ref.step) == ("memory", step), "the memory copy serves")
    sound = [info.ref.step for info in state.tiers.disk.list(verify=True) if info.verified]
    case.expect(sound == [1], f"the old checkpoint is untouched: {sound}")


@contextmanager
def _small_disk(where: Path, options: str) -> Iterator[Path]:
    where.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(where))
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=False)


def _mount(*words: str) -> None:
    try:
        done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    except OSError as problem:
        raise Skipped(f"needs mount: {problem}") from None
    if done.returncode:
        raise Skipped(f"needs the privilege to mount: {done.stderr.strip()}")


def _free(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
