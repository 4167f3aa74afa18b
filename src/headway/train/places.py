"""Where a run's checkpoints lie and how much there is of them: for its start, and for people who look at it."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from headway.account.errors import UserError
from headway.config.checkpoint import CheckpointConfig
from headway.guard.checkpoint import CheckpointStore
from headway.guard.memory import SHARED_MEMORY
from headway.guard.tiers import Tiers
from headway.parallel.memory import free_on_host
from headway.record.files import DISK_FULL
from headway.record.folder import RunFolder
from headway.train.look import own_run_id

_MOST_OF_FREE = 0.5
_A_BLOCK = 4096


def own_store(run_dir: Path) -> CheckpointStore:
    """The disk's checkpoints, as their run. Raises UserError where the run has no id."""
    folder = RunFolder.open(run_dir, for_checkpoints=True)
    run_id = own_run_id(folder)
    if run_id is None:
        raise UserError(f"{run_dir}: it has no run_id.json, so it cannot be told which checkpoints are this run's")
    return CheckpointStore(folder.checkpoints, run_id)


def refuse_a_full_disk(folder: RunFolder) -> None:
    """For a start: raises UserError where the run folder's disk takes nothing at all, OSError where it fails otherwise.
    A run that begins so would leave no line of what it did."""
    probe = folder.root / f".room-{os.getpid()}"
    try:
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(_A_BLOCK))
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in DISK_FULL:
            raise UserError(
                f"{folder.root}: {error.strerror}: not one line of the run could be written; free some room there and "
                "start again, nothing is lost by waiting"
            ) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def no_room(config: CheckpointConfig, tiers: Tiers, size: float, to_come: float, ranks: int) -> str:
    """Why memory checkpoints that were not asked for would take too much of some node's memory; empty where they fit.
    Collective.

    size: bytes of the whole state. to_come: bytes that training will take on this host and has not taken yet.
    """
    return next(filter(None, tiers.disk.control.gather(_no_room_here(config, tiers, size, to_come, ranks))), "")


def _no_room_here(config: CheckpointConfig, tiers: Tiers, size: float, to_come: float, ranks: int) -> str:
    if tiers.off or tiers.memory is None:
        return tiers.off
    need = _rooms_in_memory(config, tiers) * _of_this_node(tiers, size, ranks)
    old = _taken(tiers.memory.root)
    free = min(free_on_host() - to_come, float(shutil.disk_usage(tiers.memory.root).free)) + old
    if need <= _MOST_OF_FREE * free:
        return ""
    return (
        f"no memory checkpoints: {in_bytes(need)} would be more than half of the {in_bytes(max(0.0, free))} that "
        "are free; checkpoint.memory_every: N makes them all the same"
    )


def too_small(config: CheckpointConfig, tiers: Tiers, size: float, ranks: int) -> str:
    """Why nothing can be staged in some node's shared memory, which is too small for it; empty where all have room.
    Collective. A save would find it out each time, and one that asked for several would have some.

    size: bytes of the whole state.
    """
    return next(filter(None, tiers.disk.control.gather(_too_small_here(config, tiers, size, ranks))), "")


def _too_small_here(config: CheckpointConfig, tiers: Tiers, size: float, ranks: int) -> str:
    if tiers.memory is None:
        return tiers.off
    rooms, here = _rooms_in_memory(config, tiers), _of_this_node(tiers, size, ranks)
    free = shutil.disk_usage(tiers.memory.root).free + _taken(tiers.memory.root)
    if rooms * here <= free:
        return ""
    where = tiers.memory.root.parent
    return (
        f"no memory checkpoints, and saves block: {rooms} x {in_bytes(here)} are needed in {where}, "
        f"{in_bytes(free)} are free; make it larger (docker run --shm-size), or name another place ({SHARED_MEMORY})"
    )


def in_bytes(size: float) -> str:
    """A size in the unit that shows it: 4.2 MB, 13.50 GB."""
    for unit, digits, name in ((1e9, 2, "GB"), (1e6, 1, "MB")):
        if size >= 0.95 * unit:
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size / 1e3:,.1f} kB"


def _rooms_in_memory(config: CheckpointConfig, tiers: Tiers) -> int:
    return config.keep_memory + 1 + tiers.has_peers  # a neighbour's copy lies here, too


def _of_this_node(tiers: Tiers, size: float, ranks: int) -> float:
    return size * len(tiers.node_ranks) / ranks


def describe(
    config: CheckpointConfig,
    tiers: Tiers,
    memory_every: int | str | None,
    model_bytes: int,
    optimizer_bytes: float,
    ranks: int,
) -> list[str]:
    """What each tier will hold, for a run's start; the optimizer's state is an estimate until the first save."""
    size = model_bytes + optimizer_bytes
    lines = [f"about {in_bytes(size)} each: model {in_bytes(model_bytes)}, optimizer {in_bytes(optimizer_bytes)}"]
    saves = config.every is not None or memory_every is not None
    if tiers.off or tiers.memory is None:
        lines.append(tiers.off)
    elif saves:
        rooms, here = _rooms_in_memory(config, tiers), _of_this_node(tiers, size, ranks)
        free = shutil.disk_usage(tiers.memory.root).free + _taken(tiers.memory.root)
        every = f"{_every(memory_every)} and " if memory_every is not None else ""
        lines.append(
            f"memory: {every}on the way to the disk, {rooms} x {in_bytes(here)} of {in_bytes(free)} in "
            f"{tiers.memory.root.parent}"
        )
    when = _every(config.every) if config.every is not None else "at the end and when stopped"
    root = next(path for path in (tiers.disk.root, *tiers.disk.root.parents) if path.is_dir())
    lines.append(
        f"disk: {when}, keeps {config.keep}{f' and every {config.keep_every}' if config.keep_every else ''}: up to "
        f"{in_bytes(_rooms(config.keep) * size)} of {in_bytes(shutil.disk_usage(root).free)} free"
    )
    if config.remote is not None and tiers.off:
        lines.append("remote: nothing is uploaded: what goes to the store is what was staged in memory")
    elif config.remote is not None and tiers.remote is not None:
        when = f"every {config.remote.every} steps" if config.remote.every is not None else "what goes to the disk"
        keep = config.remote.keep
        lines.append(f"remote: {when}, keeps {keep}: up to {in_bytes(_rooms(keep) * size)} in {tiers.remote.url}")
    return lines


def _rooms(keep: int) -> int:
    """Checkpoints that lie there at once: the newest, one with 32 clean steps behind it, and one that is written."""
    return keep + 2


def _taken(root: Path) -> int:
    """Bytes that this run's memory checkpoints of before a restart (its own, its neighbours') still hold: new ones come
    in their place. Files with several names count once."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                stat = os.stat(os.path.join(folder, name))
                found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def _every(every: int | str) -> str:
    return f"every {every} steps" if isinstance(every, int) else "as often as pays"
