"""What the saver does with one staged checkpoint: hash it, publish it in memory, copy it to the disk, upload it.

Without torch, so that the process starts in a moment and holds little. Ranks meet through files in the folder that they
write (`.part-00001.json`), not through collectives: a saver may outlive its trainer, and then commits what it has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from headway.guard import crash, direct, layout, upkeep
from headway.guard.contents import Contents, mark_of
from headway.guard.crash import crash_point
from headway.guard.hashing import FileEntry, hash_file, where_changed
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import Damaged, Manifest, read_manifest, sync_file
from headway.guard.peers import Peer, send_part
from headway.guard.publishing import commit, explained
from headway.guard.upkeep import Keep, Upkeep

_CHUNK = 16 << 20
_PART = ".part-"
_POLL_S = 0.02
_ORPHAN_S = 10.0
_READ_S = 5.0
"""Seconds that one save may take to read checkpoints of earlier sessions, before they go."""
_contents: dict[Path, Contents] = {}  # of one folder, in a saver


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """Where a checkpoint comes to be: written in `partial` by `ranks`, published as `final` by the first of them."""

    partial: str
    final: str
    ranks: list[int]


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """`url`: the run's folder in the store; `keep`: checkpoints that stay there, and `proven` as in `Keep`; `budget_s`:
    what retries may wait."""

    url: str
    ranks: list[int]
    keep: int
    budget_s: float
    proven: int | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One save of one rank.

    `keep`: what stays on the disk once this save is published. `peer`: the node that gets a copy of this node's
    memory. `files`: this rank's, in the memory folder; `hashed`: those of them that the trainer has hashed.
    `manifest`: complete but for files and the bytes of "rest".
    `sound`: marks of checkpoints on the disk that the trainer knows to be sound (`guard.contents`).
    `deadline_s`: from the start; what waits for other ranks gives up then.
    """

    id: int
    attempt: int = 0
    rank: int
    files: list[str]
    manifest: Manifest
    memory: Folder
    peer: Peer | None = None
    disk: Folder | None = None
    keep: Keep | None = None
    sound: dict[str, str] = {}
    remote: Remote | None = None
    deadline_s: float = 600.0
    hashed: dict[str, FileEntry] = {}

    def tiers(self) -> list[str]:
        """What it is for, in order."""
        further = {"peer": self.peer, "disk": self.disk, "remote": self.remote}
        return ["memory", *(tier for tier, wanted in further.items() if wanted is not None)]


class Room(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Before a save that found too little space on the disk: everything goes that `keep` does not name. `root`: the
    checkpoints' folder. `sound`: as in `Job`."""

    id: int
    attempt: int = 0
    root: str
    run_id: str
    keep: Keep
    sound: dict[str, str] = {}
    deadline_s: float = 600.0

    def tiers(self) -> list[str]:
        """None: it saves nothing."""
        return []


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one tier of a job, `seconds` after the job's start.

    `tier`: memory, peer, disk or remote; prune or saver for what happened beside them; empty when the job is over.
    `mark`: of the whole checkpoint that was published on the disk (`guard.contents`).
    """

    id: int
    tier: str = ""
    ok: bool = True
    why: str = ""
    seconds: float = 0.0
    bytes: int = 0
    path: str = ""
    mark: str = ""


Tell = Callable[[Outcome], None]


def run_job(job: Job, tell: Tell) -> None:
    """Does what the job asks, tier by tier; a tier that fails does not keep the next from being tried."""
    started = time.monotonic()
    deadline = started + job.deadline_s

    def attempt(tier: str, path: str, work: Callable[[], int]) -> None:
        try:
            size = work()
        except (OSError, CheckpointFailed) as problem:
            why = str(problem) if isinstance(problem, CheckpointFailed) else explained(problem, Path(path).parent)
            tell(Outcome(id=job.id, tier=tier, ok=False, why=why, seconds=time.monotonic() - started))
        else:
            mark = _mark(job) if tier == "disk" else ""
            tell(Outcome(id=job.id, tier=tier, seconds=time.monotonic() - started, bytes=size, path=path, mark=mark))

    with _opened(job) as sources:
        if sources is None:
            for tier in job.tiers():
                tell(Outcome(id=job.id, tier=tier, ok=False, why="the staged copy is gone"))
        else:
            entries = {
                name: job.hashed.get(name) or hash_file(Path(f"/proc/self/fd/{fd}")) for name, fd in sources.items()
            }
            attempt("memory", job.memory.final, lambda: _to_memory(job, entries, deadline))
            peer, disk, remote = job.peer, job.disk, job.remote
            if peer is not None:
                attempt("peer", job.memory.final, lambda: send_part(peer, Path(job.memory.final)))
            if disk is not None:
                attempt("disk", disk.final, lambda: _to_disk(job, disk, sources, entries, deadline))
            # What is known goes before an upload, that may end with this process; reading others waits until after it.
            pruned = _prune(job, None, tell)
            if remote is not None:
                from headway.guard.remote import upload

                attempt("remote", remote.url, lambda: upload(job, remote, sources, entries, deadline))
            if pruned.unread and not _is_orphan():
                _prune(job, min(time.monotonic() + _READ_S, deadline - _READ_S), tell, pruned.left)
    tell(Outcome(id=job.id, seconds=time.monotonic() - started))


def withdraw(job: Job, why: str) -> None:
    """Gives up a job that was not begun: frees what it had claimed, or tells whoever waits for this rank's part."""
    for folder in filter(None, (job.memory, job.disk)):
        with contextlib.suppress(OSError):
            if job.rank != folder.ranks[0]:
                _write_part(Path(folder.partial), job.rank, {}, why)
            elif folder is job.disk:  # the memory's is filled again by the next save
                shutil.rmtree(folder.partial)


def make_room(room: Room, tell: Tell) -> None:
    """Does it; what stays beyond `keep` is told of."""
    started = time.monotonic()
    until = started + room.deadline_s / 2
    done = _pruned(Path(room.root), room, room.run_id, room.keep, until)
    for left in done.left:
        tell(Outcome(id=room.id, tier="prune", ok=False, why=left))
    tell(Outcome(id=room.id, seconds=time.monotonic() - started))


@contextlib.contextmanager
def _opened(job: Job) -> Iterator[dict[str, int] | None]:
    """This rank's staged files, open: whoever publishes the folder renames it under the others' hands."""
    with contextlib.ExitStack() as stack:
        for folder in (job.memory.partial, job.memory.final):
            with contextlib.suppress(FileNotFoundError):
                sources = {}
                for name in job.files:
                    sources[name] = os.open(Path(folder, name), os.O_RDONLY)
                    stack.callback(os.close, sources[name])
                if job.rank == job.memory.ranks[0]:
                    stack.enter_context(layout.in_use(Path(folder)))
                break
        else:
            sources = None
        yield sources


def _to_memory(job: Job, entries: dict[str, FileEntry], deadline: float) -> int:
    if Path(job.memory.final).is_dir():  # a second attempt: the first one came this far
        return sum(entry.size for entry in entries.values())
    return _publish(job, job.memory, entries, deadline, in_memory=True)


def _to_disk(job: Job, folder: Folder, sources: dict[str, int], entries: dict[str, FileEntry], deadline: float) -> int:
    partial = Path(folder.partial)
    if Path(folder.final).is_dir():
        return sum(entry.size for entry in entries.values())
    crash_point("before-write", job.manifest.step)
    try:
        with layout.in_use(partial):
            written = {}
            for name, source in sources.items():
                if name == layout.WRITER_FILE:  # the disk's own, written when the folder was claimed
                    sync_file(partial / name)
                    written[name] = hash_file(partial / name)
                    continue
                _copy(source, partial / name, job.manifest.step)
                written[name] = direct.hash_file(partial / name)
                if written[name] != entries[name]:
                    where = where_changed(written[name], entries[name])
                    raise CheckpointFailed(f"{name} does not read back as it was written{where}")
            return _publish(job, folder, written, deadline, in_memory=False)
    except (OSError, CheckpointFailed) as problem:
        if job.rank == folder.ranks[0]:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                _write_part(partial, job.rank, {}, str(problem))
        raise


def _prune(job: Job, until: float | None, tell: Tell, told: Sequence[str] = ()) -> Upkeep:
    """Only what a newer verified checkpoint makes expendable: the one that was just read back, by every rank.

    until: as in `upkeep.prune`. told: what has been told of already.
    """
    mark = _mark(job)
    if job.disk is None or job.keep is None or not mark:
        return Upkeep()
    final = Path(job.disk.final)
    _contents_of(final.parent).note(final.name, mark)
    done = _pruned(final.parent, job, job.manifest.run_id, job.keep, until)
    for left in done.left:
        if left not in told:
            tell(Outcome(id=job.id, tier="prune", ok=False, why=left))
    return done


def _mark(job: Job) -> str:
    """Of what was published on the disk; empty on ranks that do not publish, and where nothing was."""
    if job.disk is None or job.rank != job.disk.ranks[0]:
        return ""
    ref = CheckpointRef(Path(job.disk.final), job.manifest.step, job.manifest.generation)
    try:
        return mark_of(ref, read_manifest(ref))
    except Damaged:
        return ""


def _contents_of(root: Path) -> Contents:
    return _contents.setdefault(root, Contents(root))


def _pruned(root: Path, job: Job | Room, run_id: str, keep: Keep, until: float | None) -> Upkeep:
    contents = _contents_of(root)
    try:
        contents.learn(job.sound)
        return upkeep.prune(contents, run_id, keep, until=until, unread=isinstance(job, Room))
    except OSError as problem:
        return Upkeep(left=[f"{root}: {problem}"])


def _is_orphan() -> bool:
    """The trainer is dead, or has left: what is not urgent is left to the next one."""
    return crash.trainer != 0 and os.getppid() != crash.trainer


def _copy(source: int, target: Path, step: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # of an attempt that was killed
        target.unlink()

    def progress(done: int, size: int) -> None:
        if target.suffix == ".distcp" and done * 2 >= size - _CHUNK:
            crash_point("mid-write", step)

    direct.copy(source, target, progress)


def _publish(job: Job, folder: Folder, entries: dict[str, FileEntry], deadline: float, *, in_memory: bool) -> int:
    """Adds this rank's entries; the first rank waits for all and publishes. Returns the bytes of what was added."""
    partial = Path(folder.partial)
    size = sum(entry.size for entry in entries.values())
    if job.rank != folder.ranks[0]:
        _write_part(partial, job.rank, entries, "")
        return size
    files = dict(entries)
    for rank in folder.ranks[1:]:
        files.update(_wait_for_part(partial, rank, deadline))
    for rank in folder.ranks[1:]:
        (partial / _part_name(rank)).unlink()
    known = sum(job.manifest.parts.values())
    total = sum(entry.size for entry in files.values())
    parts = {**job.manifest.parts, "rest": max(0, total - known)}
    commit(
        partial,
        Path(folder.final),
        msgspec.structs.replace(job.manifest, files=files, parts=parts),
        in_memory=in_memory,
    )
    return total


class _Part(msgspec.Struct):
    files: dict[str, FileEntry]
    error: str = ""


def _part_name(rank: int) -> str:
    return f"{_PART}{rank:05d}.json"


def _write_part(partial: Path, rank: int, entries: dict[str, FileEntry], error: str) -> None:
    ready = partial / f"{_part_name(rank)}.new"
    ready.write_bytes(msgspec.json.encode(_Part(entries, error)))
    ready.rename(partial / _part_name(rank))


def _wait_for_part(partial: Path, rank: int, deadline: float) -> dict[str, FileEntry]:
    orphaned = False
    while True:
        with contextlib.suppress(FileNotFoundError):
            part = msgspec.json.decode((partial / _part_name(rank)).read_bytes(), type=_Part)
            if part.error:
                raise CheckpointFailed(f"rank {rank}: {part.error}")
            return part.files
        if not partial.is_dir():  # another start has cleared it away
            raise CheckpointFailed(f"{partial.name} is gone")
        if time.monotonic() > deadline:
            raise CheckpointFailed(f"rank {rank} had not written its part in time")
        if not orphaned and _is_orphan():
            # Ours is dead, so the other rank is likely to have died before its part was begun.
            orphaned, deadline = True, min(deadline, time.monotonic() + _ORPHAN_S)
        time.sleep(_POLL_S)
