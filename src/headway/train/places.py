"""Where a run's checkpoints lie and how much there is of them: for its start, and for people who look at it."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from headway.account.errors import UserError
from headway.config.checkpoint import CheckpointConfig
from headway.guard.checkpoint import CheckpointStore
from headway.guard.tiers import Tiers
from headway.parallel.memory import free_on_host
from headway.record.folder import RunFolder
from headway.train.look import own_run_id

_MOST_OF_FREE = 0.5
GB = 1e9


def own_store(run_dir: Path) -> CheckpointStore:
    """The disk's checkpoints, as their run. Raises UserError where the run has no id."""
    folder = RunFolder.open(run_dir, for_checkpoints=True)
    run_id = own_run_id(folder)
    if run_id is None:
        raise UserError(f"{run_dir}: it has no run_id.json, so it cannot be told which checkpoints are this run's")
    return CheckpointStore(folder.checkpoints, run_id)


def no_room(config: CheckpointConfig, tiers: Tiers, size: float, to_come: float, ranks: int) -> str:
    """Why memory checkpoints that were not asked for would take too much of some node's memory; empty where they fit.
    Collective.

    size: bytes of the whole state. to_come: bytes that training will take on this host and has not taken yet.
    """
    return next(filter(None, tiers.disk.control.gather(_no_room_here(config, tiers, size, to_come, ranks))), "")


def _no_room_here(config: CheckpointConfig, tiers: Tiers, size: float, to_come: float, ranks: int) -> str:
    if tiers.memory is None:
        return tiers.off
    rooms = config.keep_memory + 1 + tiers.has_peers  # a neighbour's copy lies here, too
    need = rooms * size * len(tiers.node_ranks) / ranks
    old = _taken(tiers.memory.root)
    free = min(free_on_host() - to_come, float(shutil.disk_usage(tiers.memory.root).free)) + old
    if need <= _MOST_OF_FREE * free:
        return ""
    return (
        f"no memory checkpoints: {need / GB:,.2f} GB would be more than half of the {max(0.0, free) / GB:,.2f} GB that "
        "are free; checkpoint.memory_every: N makes them all the same"
    )


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
    lines = [
        f"about {size / GB:,.2f} GB each: model {model_bytes / GB:,.2f} GB, optimizer {optimizer_bytes / GB:,.2f} GB"
    ]
    saves = config.every is not None or memory_every is not None
    if tiers.memory is None:
        lines.append(tiers.off)
    elif saves:
        rooms = config.keep_memory + 1 + tiers.has_peers
        here = size * len(tiers.node_ranks) / ranks
        free = shutil.disk_usage(tiers.memory.root).free + _taken(tiers.memory.root)
        every = f"{_every(memory_every)} and " if memory_every is not None else ""
        lines.append(
            f"memory: {every}on the way to the disk, {rooms} x {here / GB:,.2f} GB of {free / GB:,.2f} GB in "
            f"{tiers.memory.root.parent}"
        )
    when = _every(config.every) if config.every is not None else "at the end and when stopped"
    root = next(path for path in (tiers.disk.root, *tiers.disk.root.parents) if path.is_dir())
    lines.append(
        f"disk: {when}, keeps {config.keep}{f' and every {config.keep_every}' if config.keep_every else ''}: up to "
        f"{_rooms(config.keep) * size / GB:,.2f} GB of {shutil.disk_usage(root).free / GB:,.2f} GB free"
    )
    if config.remote is not None and tiers.remote is not None:
        when = f"every {config.remote.every} steps" if config.remote.every is not None else "what goes to the disk"
        keep = config.remote.keep
        lines.append(f"remote: {when}, keeps {keep}: up to {_rooms(keep) * size / GB:,.2f} GB in {tiers.remote.url}")
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
