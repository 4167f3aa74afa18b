"""Where a run's checkpoints lie and how much there is of them: for its start, and for people who look at it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.config.checkpoint import CheckpointConfig
from headway.config.load import load_run
from headway.guard.checkpoint import CheckpointInfo, CheckpointStore
from headway.guard.finding import RemotePlace
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import Damaged
from headway.guard.memory import memory_root
from headway.guard.object_store import ObjectStore
from headway.guard.remote import read_remote_manifest
from headway.guard.tiers import Tiers
from headway.parallel.memory import free_on_host
from headway.record.files import read_json
from headway.record.folder import RunFolder
from headway.train.resume import remote_place

_LOOK_S = 10.0
_MOST_OF_FREE = 0.5
GB = 1e9


def own_store(run_dir: Path) -> CheckpointStore:
    """The disk's checkpoints, as their run. Raises UserError where the run has no id."""
    folder = RunFolder.open(run_dir, for_checkpoints=True)
    run_id = _run_id(folder)
    if run_id is None:
        raise UserError(f"{run_dir}: it has no run_id.json, so it cannot be told which checkpoints are this run's")
    return CheckpointStore(folder.checkpoints, run_id)


def places_of(run_dir: Path) -> tuple[dict[str, list[CheckpointInfo]], list[str]]:
    """Checkpoints by tier (of this node's memory), oldest first; and what could not be looked at."""
    folder = RunFolder.open(run_dir, for_checkpoints=True)
    run_id = _run_id(folder)
    root = memory_root(run_id) if run_id is not None else None
    memory = CheckpointStore(root, None).list() if root is not None and root.is_dir() else []
    found = {"memory": memory, "disk": CheckpointStore(folder.checkpoints, None).list()}
    try:
        place = remote_place(load_run(folder.config, []).config) if folder.config.is_file() else None
        if place is not None:
            found["remote"] = _remote(place)
    except (UserError, CheckpointFailed) as problem:
        return found, [f"the store could not be looked at: {problem}"]
    return found, []


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
    free = min(free_on_host() - to_come, float(shutil.disk_usage(tiers.memory.root).free))
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
        free = shutil.disk_usage(tiers.memory.root).free
        every = f"{_every(memory_every)} and " if memory_every is not None else ""
        lines.append(
            f"memory: {every}on the way to the disk, {rooms} x {here / GB:,.2f} GB of {free / GB:,.2f} GB in "
            f"{tiers.memory.root.parent}"
        )
    when = _every(config.every) if config.every is not None else "at the end and when stopped"
    root = next(path for path in (tiers.disk.root, *tiers.disk.root.parents) if path.is_dir())
    lines.append(
        f"disk: {when}, keeps {config.keep}{f' and every {config.keep_every}' if config.keep_every else ''}: up to "
        f"{(config.keep + 1) * size / GB:,.2f} GB of {shutil.disk_usage(root).free / GB:,.2f} GB free"
    )
    if config.remote is not None and tiers.remote is not None:
        when = f"every {config.remote.every} steps" if config.remote.every is not None else "what goes to the disk"
        keep = config.remote.keep
        lines.append(f"remote: {when}, keeps {keep}: {keep * size / GB:,.2f} GB in {tiers.remote.url}")
    return lines


def _every(every: int | str) -> str:
    return f"every {every} steps" if isinstance(every, int) else "as often as pays"


def _run_id(folder: RunFolder) -> str | None:
    try:
        return str(read_json(folder.root / "run_id.json")["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remote(place: RemotePlace) -> list[CheckpointInfo]:
    store = ObjectStore(place.url, _LOOK_S)
    infos = []
    for name in store.names():
        step, _, generation = name.removeprefix("step-").partition(".g")
        ref = CheckpointRef(Path(place.url) / name, int(step), int(generation))
        infos.append(_remote_info(store, ref))
    return infos


def _remote_info(store: ObjectStore, ref: CheckpointRef) -> CheckpointInfo:
    nothing: dict[str, Any] = {"parts": {}, "created": "", "run_id": "", "world_size": 0, "verified": False}
    try:
        manifest = read_remote_manifest(store, ref.name)
    except (Damaged, CheckpointFailed) as problem:
        return CheckpointInfo(ref=ref, problems=(str(problem),), **nothing)
    if manifest is None:
        return CheckpointInfo(ref=ref, problems=("not finished: it has no manifest",), **nothing)
    return CheckpointInfo(
        ref, manifest.parts, manifest.created, manifest.run_id, manifest.world_size, verified=None, problems=()
    )
