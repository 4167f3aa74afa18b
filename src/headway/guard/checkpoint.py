"""`CheckpointStore`: save, find, verify, load, list and prune the checkpoints of one run.

A checkpoint is a folder that appears by one rename, complete, with a manifest of sizes and hashes:

    step-00000100.g0003/
      __0_0.distcp …  .metadata    tensors, sharded by rank (torch.distributed.checkpoint)
      values.pt                    plain values of the state (learning rates, betas, counters)
      rank-00000.pt …              each rank's own state (random generators)
      meta.json                    position, schedule, totals, fingerprints: whatever the loop hands in
      writer.json                  who wrote it
      manifest.json                written last: schema, step, generation, run, sizes and hashes of all files

`save`, `verify`, `newest_verified`, `load` and `read_meta` are collective: with a process group every rank calls them,
and they succeed or raise on all ranks alike. `sweep`, `prune`, `list` and `load_full_model` act in the calling process
alone; call them on rank 0 (or in a process without a group).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.account.errors import Refused, UserError
from headway.guard import layout, reading, upkeep, writing
from headway.guard.contents import Contents, mark_of
from headway.guard.control import Control
from headway.guard.infos import CheckpointInfo, infos
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import Damaged, Manifest, hash_problems, read_manifest, signature, size_problems
from headway.guard.process_group import control
from headway.guard.reading import Loaded, SavedKeys
from headway.guard.tree import Tree, flatten
from headway.guard.upkeep import Upkeep

# A start reads the same checkpoint several times (find, meta, load): hash it once. Not for longer: a disk that rots
# changes no file time.
_TRUST_S = 600.0

__all__ = ["CheckpointFailed", "CheckpointInfo", "CheckpointRef", "CheckpointStore", "Loaded", "Upkeep"]


@dataclass(frozen=True, slots=True)
class _Trust:
    """When all hashes of a folder agreed, and the state of its files then."""

    mark: tuple[tuple[str, int, int, int], ...] | None
    since: float


class CheckpointStore:
    """The checkpoints of one run in folder `root` (made by the first save).

    `run_id`: the run that saves here; checkpoints of another run in the same folder are not loaded, and never deleted.
    None reads any run's checkpoints and cannot save, sweep or prune.

    Making a store is collective when there is a process group. Raises UserError when `root` is a file.
    """

    def __init__(self, root: Path, run_id: str | None) -> None:
        self.root = Path(root)
        self.run_id = None if run_id is None else layout.check_run_id(run_id)
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self.root} is a file: checkpoints need a folder")
        self._control: Control = control()
        self._trusted: dict[Path, _Trust] = {}
        self.contents = Contents(self.root)
        """For pruning: what this process has written, verified, or been told of."""
        # Of failed saves too, whose folders are gone: something stuck in one of them must never meet a later save.
        self._last_generation = 0

    @property
    def control(self) -> Control:
        """The ranks that use this store together."""
        return self._control

    def save(
        self,
        step: int,
        tensors: Tree,
        meta: dict[str, Any],
        rank_state: dict[str, Any],
        *,
        above: int = 0,
        make_room: Callable[[], object] | None = None,
    ) -> CheckpointRef:
        """Writes and publishes one checkpoint. Collective.

        `tensors`: a nested state (e.g. from `training_state.capture`): top-level keys "model" and "optimizer" (others
        are allowed); dicts with text keys, lists, DTensors, plain tensors (taken as replicated) and plain values.
        `meta`: what JSON keeps exactly (rank 0's is written). `rank_state`: this rank's tensors and plain values.
        `above`: a generation that was used elsewhere; this one is higher. `make_room`: called on rank 0 where the disk
        has too little room, before it is looked at again.

        Raises CheckpointFailed on every rank when it could not be written (no space, I/O error); earlier checkpoints
        are untouched and the partial folder is removed. TypeError or ValueError for content that could not be loaded
        again. When another rank dies, the collective's own error comes through.
        """
        run_id = self._own_run_id()
        flat = flatten(tensors)
        above = max(above, self._last_generation)
        draft = writing.claim(self._control, self.root, run_id, step, flat, above, make_room)
        self._last_generation = draft.ref.generation
        try:
            with writing.held(self._control, draft.partial):
                files = writing.write(self._control, draft, flat, meta, rank_state)
                manifest = writing.publish(self._control, draft, flat, files)
        except Exception:
            writing.discard(self._control, draft)
            raise
        # Hashed by reading back what was written, so this is a verified checkpoint.
        self._trust(draft.ref, manifest)
        return draft.ref

    def newest_verified(self) -> CheckpointRef | None:
        """The newest checkpoint (highest generation) whose content is what was written; None if there is none at all.

        `ref.rejected` says why newer ones were passed over. Collective; the ranks share the reading.

        Raises Refused when there are checkpoints and none of them holds: starting from random weights, as if there had
        never been a run, is never the answer to that.
        """
        rejected: list[str] = []
        for ref in reversed(self._control.broadcast(layout.published(self.root))):
            problems = self.verify(ref)
            if not problems:
                return replace(ref, rejected=tuple(rejected))
            rejected.append(f"{ref.name}: {'; '.join(problems)}")
        if rejected:
            raise Refused(
                f"no checkpoint in {self.root} can be loaded ({' | '.join(rejected)}): "
                "repair them, or move them away to start anew"
            )
        return None

    def verify(self, ref: CheckpointRef) -> list[str]:
        """What is wrong with a checkpoint, one line each; empty when every byte is as written. Collective."""
        share = self._control.gather(self._local_problems(ref, self._control.rank, self._control.size))
        problems = list(dict.fromkeys(problem for part in share for problem in part))
        if not problems:
            self._trust(ref, read_manifest(ref))
        return problems

    def load(self, ref: CheckpointRef, tensors_like: Tree) -> Loaded:
        """Reads a checkpoint into the tensors of `tensors_like`, on any number of ranks. Collective.

        Tensors are filled in place (each rank its shards), plain values are replaced in the tree. Everything is
        verified, compared and read aside (on the CPU) first: after an exception `tensors_like` is as it was.

        Raises UserError naming keys that are missing, unexpected or of another shape or type, and for a checkpoint
        that does not verify; CheckpointFailed when it cannot be read.
        """
        rank = self._control.rank
        with writing.held(self._control, ref.path):
            manifest = self._require_verified(ref)
            # Before anything live changes, like all other reading.
            meta = reading.read_meta(ref.path)
            known = writing.rank_file(rank) in manifest.files
            rank_state = reading.read_rank_state(ref.path, rank) if known else None
            notes = reading.load_into(self._control, ref, tensors_like)
            if rank_state is None:
                notes.append(f"{ref.name} has no state of rank {rank}: {manifest.world_size} ranks wrote it")
            return Loaded(meta, rank_state, manifest.world_size, notes)

    def read_meta(self, ref: CheckpointRef) -> dict[str, Any]:
        """`meta` alone, e.g. to compare fingerprints before a model is built. Collective; raises like `load`."""
        self._require_verified(ref)
        return reading.read_meta(ref.path)

    def saved_keys(self, ref: CheckpointRef) -> SavedKeys:
        """Joined keys ("model.…", "optimizer.state.…") of all tensors and values. Collective; raises like `load`."""
        self._require_verified(ref)
        return reading.saved_keys(ref.path)

    def load_full_model(self, ref: CheckpointRef) -> dict[str, Tensor]:
        """The tensors under "model", unsharded on the CPU, named as in the model (adapters of LoRA too).

        For export: one process, with or without a process group. Raises like `load`.
        """
        problems = self._local_problems(ref, 0, 1)
        if problems:
            raise UserError(_not_loadable(ref, problems))
        with layout.in_use(ref.path):
            return reading.read_full(ref.path, "model.")

    def list(self, *, verify: bool = False) -> list[CheckpointInfo]:
        """Everything that is published here, oldest first, of any run. `verify` reads and hashes the contents."""
        return infos(self.root, verify=verify)

    def sweep(self) -> Upkeep:
        """Removes partial saves and half-done deletions that dead processes of this run left. Call it at start."""
        return upkeep.sweep(self.root, self._own_run_id())

    def prune(
        self,
        keep_last: int,
        keep_every: int | None = None,
        proven: int | None = None,
        *,
        read_s: float = math.inf,
        unread: bool = False,
    ) -> Upkeep:
        """Deletes this run's checkpoints except the last `keep_last` and those whose step `keep_every` divides, and
        the newest of step `proven` or before it.

        Only sound ones count, so nothing goes while none is. Damaged ones, those in use and those with foreign files
        inside stay and are reported; one failed deletion does not stop the others. What this store has not written or
        verified itself is read first, for `read_s` seconds in all, once; one that is not read by then stays, too
        (unless `unread`: then only those are read that stay in its place).
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}: at least one checkpoint must stay")
        keep = upkeep.Keep(last=keep_last, every=keep_every, proven=proven)
        until = time.monotonic() + read_s
        return upkeep.prune(self.contents, self._own_run_id(), keep, until=until, unread=unread)

    def _own_run_id(self) -> str:
        if self.run_id is None:
            raise ValueError("this store was opened without a run id: it only reads")
        return self.run_id

    def _require_verified(self, ref: CheckpointRef) -> Manifest:
        problems = self.verify(ref)
        if problems:
            raise UserError(_not_loadable(ref, problems))
        return read_manifest(ref)

    def _local_problems(self, ref: CheckpointRef, part: int, parts: int) -> Sequence[str]:
        """Problems seen by one of `parts` processes that share the hashing; all of them look at sizes."""
        try:
            manifest = read_manifest(ref)
        except Damaged as problem:
            return [str(problem)]
        if self.run_id is not None and manifest.run_id != self.run_id:
            return [f"it belongs to run {manifest.run_id}, not to {self.run_id}"]
        problems = size_problems(ref.path, manifest)
        if problems or self._is_trusted(ref, manifest):
            return problems
        by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
        problems = hash_problems(ref.path, manifest, by_size[part::parts])
        if not problems and parts == 1:
            self._trust(ref, manifest)
        return problems

    def _trust(self, ref: CheckpointRef, manifest: Manifest) -> None:
        self._trusted[ref.path] = _Trust(signature(ref.path, manifest), time.monotonic())
        if ref.path.parent == self.root:
            self.contents.note(ref.name, mark_of(ref, manifest))

    def _is_trusted(self, ref: CheckpointRef, manifest: Manifest) -> bool:
        trust = self._trusted.get(ref.path)
        if trust is None or trust.mark is None or time.monotonic() - trust.since > _TRUST_S:
            return False
        return trust.mark == signature(ref.path, manifest)


def _not_loadable(ref: CheckpointRef, problems: Iterable[str]) -> str:
    return f"{ref.name} is not loaded: {'; '.join(problems)}"
