"""Looking at a run's checkpoints, wherever they lie. No torch: `headway checkpoint list` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.config.load import load_run
from headway.config.run import RunConfig
from headway.guard.infos import CheckpointInfo, infos
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import Damaged
from headway.guard.memory import memory_root
from headway.guard.object_store import ObjectStore, RemotePlace
from headway.guard.remote import read_remote_manifest
from headway.record.files import read_json
from headway.record.folder import RunFolder

_LOOK_S = 10.0


def places_of(run_dir: Path) -> tuple[dict[str, list[CheckpointInfo]], list[str]]:
    """Checkpoints by tier (of this node's memory), oldest first; and what could not be looked at."""
    folder = RunFolder.open(run_dir, for_checkpoints=True)
    run_id = own_run_id(folder)
    claim = memory_root(run_id, folder.root) if run_id is not None else None
    memory = infos(claim.root) if claim is not None and claim.root.is_dir() else []
    found = {"memory": memory, "disk": infos(folder.checkpoints)}
    try:
        place = remote_place(load_run(folder.config, []).config) if folder.config.is_file() else None
        if place is not None:
            found["remote"] = _remote(place)
    except (UserError, CheckpointFailed) as problem:
        return found, [f"the store could not be looked at: {problem}"]
    return found, []


def remote_place(config: RunConfig) -> RemotePlace | None:
    """The run's folder in the object store, if it has one."""
    remote = config.checkpoint.remote
    if remote is None:
        return None
    return RemotePlace(f"{remote.url.rstrip('/')}/{config.name}", remote.keep, remote.budget_s)


def own_run_id(folder: RunFolder) -> str | None:
    """The run's own name, None where the folder has lost it."""
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
