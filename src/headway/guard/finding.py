"""The newest verified checkpoint, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from headway.account.errors import Refused
from headway.guard import layout, writing
from headway.guard.checkpoint import CheckpointStore
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import read_manifest
from headway.guard.object_store import ObjectStore, RemotePlace
from headway.guard.remote import fetch_newest

ALL_TIERS = frozenset({"memory", "disk", "remote"})


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint and the store to load it from; `ref.rejected` says why others were passed over."""

    tier: str
    store: CheckpointStore
    ref: CheckpointRef


@dataclass(frozen=True, slots=True)
class Finder:
    """Where a run's checkpoints may be. Collective where the stores are. `memory`: None where it is not one node's."""

    disk: CheckpointStore
    memory: CheckpointStore | None
    remote: RemotePlace | None

    def newest(
        self, before_step: int | None = None, tiers: Set[str] = ALL_TIERS, problems: Sequence[str] = ()
    ) -> Found | None:
        """The newest verified checkpoint wherever it lies; of one save the copy that is nearest. Collective.

        `before_step`: only checkpoints of an earlier step, e.g. those that a bad step cannot have touched. One that is
        only in the store is brought here first.
        `problems`: what is known already of copies that do not hold. `ref.rejected` names newer ones that do not hold,
        with their tier. None when there is none at all.

        Raises Refused when there are some and none of them holds, and when the store cannot be asked and nothing else
        is there.
        """
        rejected: list[str] = list(problems)
        local = self._newest_here(before_step, tiers, rejected)
        if "remote" in tiers and self.remote is not None:
            above = local.ref.generation if local is not None else 0
            root, failed = self.disk.control.broadcast(self._fetch_newer(above, before_step))
            rejected += failed
            if root is not None:
                store = self.memory if self.memory is not None and root == "memory" else self.disk
                fetched = self._newest_here(before_step, {root}, [])
                if fetched is not None and fetched.ref.generation > above:
                    local = Found("remote", store, fetched.ref)
        if local is not None:
            return replace(local, ref=replace(local.ref, rejected=tuple(rejected)))
        if rejected:
            raise Refused(
                f"no checkpoint of {self.disk.root} can be loaded ({' | '.join(rejected)}): "
                "repair them, or move them away to start anew"
            )
        return None

    def _newest_here(self, before_step: int | None, tiers: Set[str], rejected: list[str]) -> Found | None:
        stores = {"memory": self.memory, "disk": self.disk}
        found: list[tuple[str, CheckpointRef]] = []
        for tier, store in stores.items():
            if store is not None and tier in tiers:
                found += [(tier, ref) for ref in self.disk.control.broadcast(layout.published(store.root))]
        found = [(tier, ref) for tier, ref in found if before_step is None or ref.step < before_step]
        for tier, ref in sorted(found, key=lambda item: (-item[1].generation, item[0] != "memory")):
            store = stores[tier]
            assert store is not None
            ref = replace(ref, path=store.root / ref.name)  # rank 0's path may be another node's
            problems = store.verify(ref)
            if not problems and tier == "memory" and self.disk.control.broadcast(_is_a_part(ref)):
                continue
            if not problems:
                return Found(tier, store, ref)
            rejected.append(f"{ref.name} ({tier}): {'; '.join(problems)}")
        return None

    def _fetch_newer(self, above: int, before_step: int | None) -> tuple[str | None, list[str]]:
        """On rank 0: brings a newer checkpoint from the store; says which tier's folder it is in now."""
        if not self.disk.control.is_main or self.remote is None:
            return None, []
        roots = {"disk": self.disk.root, **({"memory": self.memory.root} if self.memory is not None else {})}
        try:
            store = ObjectStore(self.remote.url, self.remote.budget_s)
            ref, rejected = fetch_newest(store, list(roots.values()), str(self.disk.run_id), above, before_step)
        except (CheckpointFailed, OSError) as problem:
            return None, [f"the store {self.remote.url}: {problem}"]
        tier = next((name for name, root in roots.items() if ref is not None and ref.path.parent == root), None)
        return tier, rejected


def _is_a_part(ref: CheckpointRef) -> bool:
    """A node's memory holds its own ranks' part only: sound by itself, and no checkpoint where there were others."""
    manifest = read_manifest(ref)
    return any(writing.rank_file(rank) not in manifest.files for rank in range(manifest.world_size))
