"""Where a run goes on: the run's identity, its newest verified checkpoint, and the state put back bit for bit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.account.errors import Refused, UserError
from headway.account.totals import Totals
from headway.config.diff import identity as config_identity
from headway.config.diff import without_effect
from headway.config.run import RunConfig
from headway.config.schema import all_keys
from headway.data.global_batch import Position
from headway.data.stream import Stream
from headway.guard.checkpoint import CheckpointStore
from headway.guard.code_identity import SOURCE, code_identity
from headway.guard.finding import Found
from headway.guard.fingerprint import refuse_changed
from headway.guard.layout import CheckpointFailed
from headway.guard.manifest import Damaged
from headway.guard.object_store import ObjectStore, RemotePlace
from headway.guard.process_group import control
from headway.guard.remote import read_remote_manifest
from headway.guard.rng import set_rng_state
from headway.guard.tiers import Tiers
from headway.guard.training_state import restore
from headway.parallel.wrap import Replicas
from headway.record.files import read_json, write_json
from headway.record.folder import RunFolder
from headway.record.sessions import read_history
from headway.train.cadence import sessions_so_far
from headway.train.optim import Optimizers

# Where files lie is not what they hold: the stream's fingerprint has the content, the checkpoint has the weights.
_PLACES = ("model.path", "model.tokenizer", "data.sources", "data.chat_template")


START = Position()


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint gives back besides tensors. step 0 and an empty position for a new run."""

    step: int = 0
    position: Position = START
    totals: Totals | None = None
    notes: tuple[str, ...] = ()
    loss_scale: dict[str, Any] | None = None
    guard: dict[str, Any] | None = None
    quarantine: tuple[tuple[int, int, int, int], ...] = ()


def run_identity(config: RunConfig, stream: Stream, model_config: dict[str, Any], base_digest: str) -> dict[str, Any]:
    """What makes this training the one it is: settings, data, architecture, code. A resume must agree with it."""
    settings = {key: value for key, value in config_identity(config).items() if not key.startswith(_PLACES)}
    drift = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "_attn_implementation")
    as_json = json.loads(json.dumps(model_config, default=str))
    architecture = {key: value for key, value in as_json.items() if key not in drift}
    step: dict[str, Any] = {"sequences per step": stream.options.sequences_per_step}
    if base_digest:
        step["frozen base weights"] = base_digest
    return {**settings, **stream.fingerprint_parts(), **step, "architecture": architecture, _CODE: code_identity()}


_KNOWN_LATE = ("architecture", "frozen base weights")
_CODE = "code"
_HOLDOUT_SEED = "eval.holdout seed"
"""The run's seed once more: who allows another one is not asked twice."""


def compare(saved: dict[str, Any], now: dict[str, Any], allow: set[str], sources: Sequence[str] = ()) -> list[str]:
    """The differences that were allowed, and a change of Headway's own source between two releases (told, not refused:
    a run must not end at a restart because somebody has edited a checkout). `sources`: where the data lies, to name it.
    Raises Refused."""
    before, here = dict(saved.get(_CODE, {})), dict(now[_CODE])
    source = before.pop(SOURCE, None), here.pop(SOURCE)
    silent = without_effect(saved, now) | {_HOLDOUT_SEED}
    older = {key: value for key, value in saved.items() if key not in silent}
    newer = {key: value for key, value in now.items() if key not in silent}
    older[_CODE], newer[_CODE] = before or here, here  # a checkpoint of before the code was kept says nothing of it
    told = refuse_changed(
        older,
        newer,
        allow=_spelt_out(allow, saved.keys() | now.keys()),
        known=allow & all_keys().keys(),
        meant={f"content of data source {number}": path for number, path in enumerate(sources)},
    )
    return told + ([f"code.{SOURCE}: {source[0]} → {source[1]}"] if source[0] not in (None, source[1]) else [])


def _spelt_out(allow: set[str], keys: Set[str]) -> set[str]:
    """With the names under which the contents of an allowed key's files are compared."""
    found = set(allow)
    if found & {"data", "data.sources"}:
        found |= {key for key in keys if " data source" in key}
    if found & {"model", "model.path", "model.config"}:
        found |= set(_KNOWN_LATE)
    return found


def refuse_early(config: RunConfig, stream: Stream, found: Found | None) -> None:
    """Refuses what settings and data alone tell, before minutes go into loading a model. Raises Refused."""
    if found is None:
        return
    saved = found.store.read_meta(found.ref)["identity"]
    late = {key: saved[key] for key in _KNOWN_LATE if key in saved}
    now = {**run_identity(config, stream, {}, ""), **late}
    compare(saved, now, set(config.checkpoint.allow), [source.path for source in config.data.sources])


def run_id(folder: RunFolder, remote: RemotePlace | None = None) -> str:
    """The run's own name, made once and kept in the run folder; the same on every rank.

    A run folder that lost it takes it from the newest checkpoint, also from the one in the store.
    """
    return control().on_main(lambda: _run_id(folder, remote), UserError, (OSError, UserError))


def _run_id(folder: RunFolder, remote: RemotePlace | None) -> str:
    path = folder.root / "run_id.json"
    if path.is_file():
        try:
            return str(read_json(path)["run_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: damaged; remove it, and the id is taken from the newest checkpoint") from error
    known = [info.run_id for info in CheckpointStore(folder.checkpoints, None).list() if info.run_id]
    made = known[-1] if known else _stored_run_id(remote) or uuid.uuid4().hex
    write_json(path, {"run_id": made})
    return made


def _stored_run_id(remote: RemotePlace | None) -> str | None:
    """Whose the newest checkpoint in the store is. Raises UserError when it cannot be asked: it may hold the run."""
    if remote is None:
        return None
    try:
        store = ObjectStore(remote.url, remote.budget_s)
        name = store.latest()
        manifest = read_remote_manifest(store, name) if name is not None else None
    except (CheckpointFailed, Damaged) as problem:
        raise UserError(f"checkpoint.remote: {remote.url}: {problem}") from problem
    return manifest.run_id if manifest is not None else None


def next_session(folder: RunFolder) -> int:
    """Sessions are counted from 0 over the run folder's whole life."""
    return control().on_main(lambda: len(read_history(folder).sessions), UserError, (OSError, UserError))


def failures_so_far(folder: RunFolder) -> tuple[int, float]:
    """Sessions that ended without a word or failed, and the device-seconds of all of them; the same on every rank."""

    return control().on_main(lambda: sessions_so_far(read_history(folder)), UserError, (OSError, UserError))


def find_checkpoint(config: RunConfig, tiers: Tiers) -> Found | None:
    """The checkpoint that `checkpoint.resume` means, wherever it lies; None starts anew.

    Raises:
        Refused: `never` is set and the folder has one, or there are checkpoints and none of them holds.
        UserError: the named path is not a checkpoint of this run.
    """
    wanted, store = config.checkpoint.resume, tiers.disk
    if wanted not in ("auto", "never"):
        named = [info.ref for info in store.list() if info.ref.path.resolve() == Path(wanted).resolve()]
        if not named:
            raise UserError(f"checkpoint.resume: {wanted} is not a checkpoint in {store.root}")
        return Found("disk", store, named[0])
    newest = tiers.newest()
    if newest is not None and wanted == "never":
        raise Refused(
            f"checkpoint.resume is never, but {newest.store.root} holds {newest.ref.name}; give the run another name"
        )
    return newest


def resume(
    config: RunConfig,
    found: Found | None,
    replicas: Replicas,
    optimizers: Optimizers,
    identity: dict[str, Any],
) -> Resumed:
    """Restores everything, in place. Refuses another run's identity with the difference. Collective."""
    if found is None:
        return Resumed()
    store, ref = found.store, found.ref
    meta = store.read_meta(ref)
    sources = [source.path for source in config.data.sources]
    allowed = compare(meta["identity"], identity, set(config.checkpoint.allow), sources)
    lora = config.model.lora is not None
    loaded = restore(store, ref, replicas.module, optimizers.items, trainable_only=lora)
    notes = [f"newer checkpoint not used: {reason}" for reason in ref.rejected]
    if found.tier != "disk":
        notes.append(f"resumed from {ref.name} in {found.tier}")
    if loaded.rank_state is not None:
        notes += set_rng_state(loaded.rank_state["rng"])
    notes += [f"allowed to differ: {line}" for line in allowed]
    return Resumed(
        step=meta["step"],
        position=Position.from_dict(meta["position"]),
        totals=Totals.from_dict(meta["totals"]),
        notes=(*notes, *loaded.notes),
        loss_scale=meta.get("loss_scale"),
        guard=meta.get("guard"),
        quarantine=tuple(tuple(one) for one in meta.get("quarantine", ())),
    )
