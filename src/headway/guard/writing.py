"""Writing one checkpoint: claim a folder, write into it on every rank, publish it by one rename.

The three steps are separate so that they can later run at different times (stage, write behind the training, publish).
Each is collective. Whatever fails, the published checkpoints stay as they were.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from headway import __version__
from headway.guard import layout
from headway.guard.control import Control
from headway.guard.crash import crash_point
from headway.guard.hashing import FileEntry, hash_file
from headway.guard.layout import CheckpointFailed, CheckpointRef, NoRoom
from headway.guard.manifest import Manifest, sync_file, write_durably
from headway.guard.publishing import commit, explained, now
from headway.guard.tree import Flat, part_bytes

META_FILE = "meta.json"
VALUES_FILE = "values.pt"
_EXPECTED = (OSError, CheckpointFailed)
# Room for everything that is not a tensor: DCP's index, zip headers, the ranks' states, the manifest.
_OVERHEAD_SHARE, _OVERHEAD_BYTES, _OVERHEAD_PER_SHARD, _OVERHEAD_PER_RANK = 0.01, 1 << 20, 2560, 1 << 17


@dataclass(frozen=True, slots=True)
class Draft:
    """A claimed partial folder and what it will become."""

    partial: Path
    ref: CheckpointRef
    run_id: str


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def claim(
    control: Control,
    root: Path,
    run_id: str,
    step: int,
    flat: Flat,
    above: int,
    make_room: Callable[[], object] | None = None,
) -> Draft:
    """Makes the partial folder, of a generation over `above`, after looking whether the disk has room.

    `make_room`: deletes what is no longer needed, on rank 0, where there is too little. Raises CheckpointFailed on
    every rank.
    """

    def act() -> Draft:
        need = bytes_needed(flat, control.size)
        try:
            return claim_here(root, run_id, step, need, above)
        except NoRoom:
            if make_room is None:
                raise
            make_room()
            return claim_here(root, run_id, step, need, above)

    return control.on_main(act, CheckpointFailed, _EXPECTED)


def claim_here(root: Path, run_id: str, step: int, need: int, above: int) -> Draft:
    """The same, in this process alone, for `need` bytes. Raises CheckpointFailed (NoRoom) or OSError."""
    root.mkdir(parents=True, exist_ok=True)
    _check_space(root, need)
    while True:
        generation = max(layout.next_generation(root), above + 1)
        name = layout.published_name(step, generation)
        partial = layout.work_path(root, layout.PARTIAL, name, run_id)
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
            break
    writer = {"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid(), "started": now()}
    try:
        # Not yet durable: whoever publishes the folder waits for the disk, not whoever trains.
        with _explaining(root), (partial / layout.WRITER_FILE).open("xb") as file:
            file.write(json.dumps(writer).encode())
    except CheckpointFailed:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Draft(partial, CheckpointRef(root / name, step, generation), run_id)


@contextlib.contextmanager
def held(control: Control, folder: Path) -> Iterator[None]:
    """Marks a folder as in use by every rank. Collective on entry; raises CheckpointFailed if a rank cannot see it."""
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            try:
                stack.enter_context(layout.in_use(folder))
            except FileNotFoundError as problem:
                raise CheckpointFailed(f"{problem}: is this folder on a file system that all ranks share?") from problem

        control.on_all(hold, CheckpointFailed, _EXPECTED)
        yield


def write(
    control: Control, draft: Draft, flat: Flat, meta: dict[str, Any], rank_state: dict[str, Any]
) -> dict[str, FileEntry]:
    """Writes tensors (every rank its shards), this rank's state, and on rank 0 values and meta; returns all hashes.

    Raises CheckpointFailed on every rank when one of them cannot write, TypeError for content that could not be read
    back (meta that JSON changes, rank state or values that `torch.load(weights_only=True)` refuses).
    """
    step = draft.ref.step
    crash_point("before-write", step)
    _write_tensors(control, draft, flat.tensors)

    def write_own() -> dict[str, FileEntry]:
        folder = draft.partial
        with _explaining(folder):
            write_durably(folder / rank_file(control.rank), readable(rank_state, "rank_state"))
            if control.is_main:
                for name, content in common_files(flat, meta).items():
                    write_durably(folder / name, content)
                sync_file(folder / layout.WRITER_FILE)
            return {name: hash_file(folder / name) for name in _own_files(folder, control)}

    written: dict[str, FileEntry] = {}
    for files in control.on_all(write_own, CheckpointFailed, _EXPECTED):
        written.update(files)
    return written


def common_files(flat: Flat, meta: dict[str, Any], *, check: bool = True) -> dict[str, bytes]:
    """What rank 0 writes besides tensors: plain values and meta. Raises TypeError as `write` does."""
    paths = {key: flat.paths[key] for key in flat.values}
    values = {"values": flat.values, "paths": paths, "lists": flat.lists}
    return {VALUES_FILE: readable(values, "a plain value of the state", check=check), META_FILE: _exact_json(meta)}


def publish(control: Control, draft: Draft, flat: Flat, files: dict[str, FileEntry]) -> Manifest:
    """Writes the manifest, makes everything durable, and renames the folder to its final name. Rank 0 acts."""

    def act() -> Manifest:
        manifest = Manifest(
            step=draft.ref.step,
            generation=draft.ref.generation,
            run_id=draft.run_id,
            created=now(),
            world_size=control.size,
            headway=__version__,
            torch=str(torch.__version__),
            parts=kept_parts(flat, files),
            files=files,
        )
        with _explaining(draft.partial):
            commit(draft.partial, draft.ref.path, manifest)
        return manifest

    return control.on_main(act, CheckpointFailed, _EXPECTED)


def kept_parts(flat: Flat, files: dict[str, FileEntry]) -> dict[str, int]:
    """Bytes of the tensors under "model" and "optimizer", and of everything else in the files."""
    parts = part_bytes(flat.tensors)
    kept = {part: parts.get(part, 0) for part in ("model", "optimizer")}
    return {**kept, "rest": sum(entry.size for entry in files.values()) - sum(kept.values())}


def discard(control: Control, draft: Draft) -> None:
    """Frees the space of a failed draft, as far as possible; the next sweep finds what stays."""
    if control.is_main:
        shutil.rmtree(draft.partial, ignore_errors=True)


@contextlib.contextmanager
def quiet_dcp() -> Iterator[None]:
    """DCP warns in every single-process call that it is one; that is how we called it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*single process")
        yield


def failure_text(problem: CheckpointException, folder: Path) -> str:
    """DCP's failures in one line. KeyboardInterrupt, which DCP catches too, is raised again."""
    texts: dict[str, list[int]] = {}
    for rank, (cause, _) in problem.failures.items():
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from problem
        texts.setdefault(explained(cause, folder), []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())


class _SavePlanner(dcp.DefaultSavePlanner):
    """The default planner, without plan caching (it outlives the state dict it was made for), with a crash point."""

    def __init__(self, step: int) -> None:
        super().__init__(enable_plan_caching=False)
        self._step = step
        self._resolved = 0

    def resolve_data(self, write_item: Any) -> Any:
        self._resolved += 1
        if self._resolved == 2:
            crash_point("mid-write", self._step)
        return super().resolve_data(write_item)


def _write_tensors(control: Control, draft: Draft, tensors: dict[str, Tensor]) -> None:
    # One thread per rank: an exception in one of DCP's further threads is lost, and so is what it did not write.
    writer = dcp.FileSystemWriter(draft.partial, single_file_per_rank=True, sync_files=True, thread_count=1)
    try:
        with quiet_dcp():
            dcp.save(
                dict(tensors),
                storage_writer=writer,
                planner=_SavePlanner(draft.ref.step),
                process_group=control.group,
                no_dist=control.group is None,
            )
    except CheckpointException as problem:  # a BaseException; any other error means that a rank is gone
        raise CheckpointFailed(failure_text(problem, draft.partial)) from problem


def _own_files(folder: Path, control: Control) -> list[str]:
    """The files that this rank wrote: DCP names shards `__RANK_FILE.distcp`; rank 0 also wrote what is common."""
    shards = [path.name for path in folder.glob(f"__{control.rank}_*.distcp")]
    common = [layout.WRITER_FILE, VALUES_FILE, META_FILE, ".metadata"] if control.is_main else []
    return [*shards, rank_file(control.rank), *common]


def bytes_needed(flat: Flat, ranks: int, tensor_bytes: int | None = None) -> int:
    """An upper estimate of a checkpoint's size on disk."""
    tensors = sum(part_bytes(flat.tensors).values()) if tensor_bytes is None else tensor_bytes
    fixed = _OVERHEAD_BYTES + ranks * (len(flat.tensors) * _OVERHEAD_PER_SHARD + _OVERHEAD_PER_RANK)
    return int(tensors * (1 + _OVERHEAD_SHARE)) + fixed


def _check_space(root: Path, need: int) -> None:
    free = shutil.disk_usage(root).free
    if free < need:
        raise NoRoom(
            f"too little space for a checkpoint in {root}: about {need / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB "
            "free; make room, or set `out` elsewhere"
        )


@contextlib.contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CheckpointFailed(explained(problem, folder)) from problem


def readable(value: Any, what: str, *, check: bool = True) -> bytes:
    """`value` as torch.save writes it, after reading it back the way that a load will (`check`)."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    content = buffer.getvalue()
    if not check:
        return content
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as problem:
        raise TypeError(f"{what} holds something that cannot be loaded safely again: {problem}") from problem
    return content


def _exact_json(meta: dict[str, Any]) -> bytes:
    _refuse_inexact(meta, "meta")
    return json.dumps(meta, indent=1, sort_keys=True).encode()


def _refuse_inexact(value: Any, where: str) -> None:
    """JSON turns tuples into lists and number keys into text; a resume would then compare unequal to itself."""
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: JSON has only text keys")
            _refuse_inexact(child, f"{where}.{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _refuse_inexact(child, f"{where}[{index}]")
    elif not (value is None or isinstance(value, (str, int, float, bool))):
        raise TypeError(f"{where} is a {type(value).__name__}: JSON does not keep it")
