"""Checkpoints in several places: staged beside the training into this node's memory, from there to disk and store.

    tiers = Tiers(store, run_folder, keep_memory=2, device_type="cuda")
    tiers.save(step, tree, meta, rank_state, disk=True)   # returns at once; False: the save before is still under way
    tiers.fence()                                         # before every optimizer step
    for event in tiers.poll(): ...                        # what was published or failed since
    found = tiers.newest(before_step=120)                 # newest verified copy, memory first
    restore(found.store, found.ref, model, optimizers)    # guard.training_state

A memory checkpoint is a folder like any other, in shared memory; all tiers of one save share its name. `save`,
`save_now`, `newest` and `close` are collective; `fence` and `poll` are not.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from headway import __version__
from headway.guard import layout, upkeep, writing
from headway.guard.address import own_address
from headway.guard.checkpoint import CheckpointStore
from headway.guard.crash import crash_point
from headway.guard.finding import ALL_TIERS, Finder, Found, RemotePlace
from headway.guard.host_file import HostFile
from headway.guard.image import Bound, Image, NoImage, layout_of, marks_of, plan_image
from headway.guard.keeper import Keeper
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import Manifest
from headway.guard.memory import NODE, Owner, memory_root
from headway.guard.object_store import ObjectStore
from headway.guard.parts import WHOLE, Memory, assemble
from headway.guard.peers import PEERS, Peer
from headway.guard.publishing import now
from headway.guard.save_job import Folder, Job, Keep, Outcome, Remote
from headway.guard.saver import Saver
from headway.guard.staging import Stager
from headway.guard.tree import Flat, Tree, flatten, part_bytes

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Event:
    """What became of one save in one tier. `seconds` from the end of staging; `path`: where it lies, if it does.

    `tier`: "memory", "peer" (another node's memory), "disk", "remote"; "saver" when the saving process died and was
    replaced; "prune" for a checkpoint that should have gone and did not.
    """

    tier: str
    step: int
    ok: bool
    why: str = ""
    seconds: float = 0.0
    bytes: int = 0
    path: str = ""


@dataclass(slots=True)
class _Slot:
    """One memory checkpoint's room: taken once, then filled again and again under new names."""

    partial: Path | None = None
    final: Path | None = None
    host: HostFile | None = None
    generation: int = 0
    valid: bool = False

    def folder(self) -> Path | None:
        """Where it lies now."""
        return next((path for path in (self.final, self.partial) if path is not None and path.is_dir()), None)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Rank 0's decision about one save."""

    generation: int
    slot: int
    disk: writing.Draft | None
    disk_error: str


@dataclass(slots=True)
class _InWork:
    job: int
    step: int
    slot: int
    disk: bool


@dataclass(slots=True)
class _Node:
    """This node: its ranks, whether this one acts for it; and the first rank of every node by name."""

    name: str = ""
    ranks: list[int] = field(default_factory=list)
    main: bool = True
    firsts: dict[str, int] = field(default_factory=dict)


class Tiers:
    """The tiers of one run. Collective when there is a process group.

    `run_folder`: whose run it is. `keep_memory`: memory checkpoints that stay while the next is made; host memory holds
    one more. `timeout_s`: a save that is not published by then is given up. `off`: why there is no memory tier (saves
    are then written by the trainer itself, and block).
    """

    def __init__(
        self,
        disk: CheckpointStore,
        run_folder: Path,
        *,
        keep_memory: int = 1,
        device_type: str = "cpu",
        timeout_s: float = 600.0,
        remote: RemotePlace | None = None,
    ) -> None:
        if disk.run_id is None:
            raise ValueError("tiers save: their store needs a run id")
        self.disk, self.run_id, self.device_type = disk, disk.run_id, device_type
        self.keep_memory, self.remote = keep_memory, remote
        self.off = ""
        self.memory: CheckpointStore | None = None
        self.stager = Stager(device_type)
        self.saver = Saver(timeout_s)
        self.published: dict[str, int] = {}
        """The newest published step of each tier, as rank 0 knows it."""
        self._control = disk.control
        self._owner: Owner | None = None
        self._node = self._find_node()
        self._image = Image()
        self._bound = Bound()
        self._slots: list[_Slot] = []
        self._in_work: _InWork | None = None
        self._jobs = 0
        self._checked = False
        self._generation = 0
        self._early: list[Event] = []
        self._keeper: Keeper | None = None
        self._keepers: dict[str, Peer] = {}
        self._open_memory(run_folder)
        if self.memory is not None and len(self._node.firsts) > 1:
            self._open_keepers(self.memory.root)

    @property
    def node_ranks(self) -> list[int]:
        """The ranks on this node, which share its memory."""
        return self._node.ranks

    @property
    def has_peers(self) -> bool:
        """Whether other nodes' parts are copied to this one's memory."""
        return len(self._node.firsts) > 1

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tensors: Tree,
        meta: dict[str, Any],
        rank_state: dict[str, Any],
        *,
        moving: Set[str] = frozenset(),
        disk: bool = True,
        remote: bool = False,
        keep: Keep | None = None,
    ) -> bool:
        """Begins a save; the copy runs beside what follows, up to the next `fence`. Collective.

        Arguments as for `CheckpointStore.save`; `moving`: joined keys of buffers, which a forward pass may change.
        `disk`: also to the disk, which then keeps what `keep` says. `remote`: also to the store.

        Returns False when the save before is not done; call again at a later step. Raises CheckpointFailed on every
        rank when nothing could be begun: then training goes on, or `save_now` does it the slow way.
        """
        if self.off:
            raise CheckpointFailed(self.off)
        crash_point("before-stage", step)
        flat = flatten(tensors)
        bound = self._bind(flat)
        views = self._control.gather((self.saver.busy, bound.layout != self._bound.layout))
        if any(busy for busy, _ in views):
            return False
        self._early += self._note(self.saver.take())
        try:
            if any(changed for _, changed in views):
                self._lay_out(flat, bound)
            elif bound is not self._bound:
                bound.sources = self._image.sources(flat)
                self._bound = bound
            self._begin(step, flat, moving, meta, rank_state, disk, remote, keep)
        except NoImage as problem:
            self.off = f"no asynchronous saves: {problem}"
            raise CheckpointFailed(self.off) from problem
        return True

    def save_now(
        self,
        step: int,
        tensors: Tree,
        meta: dict[str, Any],
        rank_state: dict[str, Any],
        *,
        remote: bool = False,
        keep: Keep | None = None,
    ) -> list[Event]:
        """Returns when the state is on the disk, whatever it takes. Collective; raises like `CheckpointStore.save`.

        For the last save before the process ends. What the saver cannot do in time, this process does itself. With
        `remote` the upload begins; `settle` waits for it.
        """
        self.fence()
        if self.saver.left == {"remote"}:  # an upload may take long: it goes on by itself, and another process saves
            self.saver.close()
            self.saver = Saver(self.saver.timeout_s)
        self.settle()
        events = self.poll()
        if self._control.broadcast(self.published.get("disk")) == step:
            return events
        try:
            begun = self.save(step, tensors, meta, rank_state, remote=remote, keep=keep)
        except CheckpointFailed:
            begun = False
        if begun:
            self.fence()
            # The events may hold what became of the save before, too.
            while self.saver.busy and not any(event.tier == "disk" and event.step == step for event in events):
                self.saver.wait(_POLL_S)
                events += self.poll()
            events += self.poll()
            if self._control.broadcast(self.published.get("disk")) == step:
                return events
        ref = self.disk.save(step, tensors, meta, rank_state, above=self._generation)
        self._generation = ref.generation
        self.published["disk"] = step
        size = sum(file.stat().st_size for file in ref.path.iterdir()) if self._control.is_main else 0
        if self._control.is_main and keep is not None:
            left = self.disk.prune(keep.last, keep.every).left
            events += [Event("prune", step, False, text) for text in left]
        return [*events, Event("disk", step, True, bytes=size, path=str(ref.path))]

    def fence(self) -> None:
        """Returns when the state may change: call it before the optimizer steps, or anything else changes it."""
        self.stager.fence()

    def poll(self) -> list[Event]:
        """What was published or failed since the last call, on this rank. Never waits."""
        events, self._early = self._early, []
        return events + self._note(self.saver.take())

    def settle(self, timeout_s: float | None = None) -> bool:
        """Waits until no save is under way on this rank; False when `timeout_s` seconds were not enough."""
        self.fence()
        return self.saver.wait(timeout_s)

    # -- finding -----------------------------------------------------------------------------------------------------

    def newest(self, before_step: int | None = None, tiers: Set[str] = ALL_TIERS) -> Found | None:
        """The newest verified checkpoint; see `finding.Finder.newest`. Collective."""
        # Each node's memory holds its own ranks' shards: alone they are no checkpoint.
        memory = self.memory if len(self._node.firsts) == 1 else None
        problems: list[str] = []
        if self.memory is not None and "memory" in tiers:
            here = Memory(self.memory.root, self._node.name, self._node.main, self._keepers)
            try:
                whole = assemble(self._control, here, len(self._node.firsts), before_step)
            except CheckpointFailed as problem:
                problems, whole = [f"the nodes' memories: {problem}"], None
            memory = CheckpointStore(whole, self.run_id) if whole is not None else memory
        return Finder(self.disk, memory, self.remote).newest(before_step, tiers, problems)

    def abandon(self, steps_from: int, to: CheckpointRef) -> list[str]:
        """After training has gone back to `to`: deletes the checkpoints of `steps_from` and later steps that are newer,
        in every tier, so that no start takes one. Collective. Returns those that could not be deleted, and why."""

        def here() -> list[str]:
            left: list[str] = []
            if self._node.main and self.memory is not None:
                shutil.rmtree(self.memory.root / WHOLE, ignore_errors=True)
                roots = [self.memory.root, *(self.memory.root / PEERS).glob("*")]
                left += [one for root in roots for one in self._abandon_in(root, steps_from, to)]
                for slot in self._slots:
                    slot.valid = slot.valid and slot.folder() is not None
            if self._control.is_main:
                left += self._abandon_in(self.disk.root, steps_from, to)
                left += self._abandon_in_store(steps_from, to)
            return left

        self.published = {tier: step for tier, step in self.published.items() if step < steps_from}
        shares = self._control.on_all(here, CheckpointFailed, (OSError,))
        return [one for share in shares for one in share]

    def _abandon_in(self, root: Path, steps_from: int, to: CheckpointRef) -> list[str]:
        return upkeep.abandon(root, self.run_id, steps_from, to.generation).left

    def _abandon_in_store(self, steps_from: int, to: CheckpointRef) -> list[str]:
        if self.remote is None:
            return []
        from headway.guard.remote import abandon

        try:
            abandon(ObjectStore(self.remote.url, self.remote.budget_s), self.run_id, steps_from, to.generation)
        except CheckpointFailed as problem:
            return [f"the store {self.remote.url}: {problem}"]
        return []

    def close(self, *, over: bool) -> None:
        """Ends the saving; `over`: the run needs no memory checkpoint any more (it is done, or all is on the disk).

        A save that is under way is finished by its process, also after this one has ended.
        """
        with contextlib.suppress(Exception):
            self.stager.close()
        self.saver.close()
        self._drop_slots()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._owner is not None:
            self._owner.release(remove=over)
            self._owner = None

    # -- one save ----------------------------------------------------------------------------------------------------

    def _begin(
        self,
        step: int,
        flat: Flat,
        moving: Set[str],
        meta: dict[str, Any],
        rank_state: dict[str, Any],
        disk: bool,
        remote: bool,
        keep: Keep | None,
    ) -> None:
        plan = self._control.on_main(lambda: self._plan(step, flat, disk), CheckpointFailed, (OSError,))
        self._generation = plan.generation
        if plan.disk_error:
            self._early.append(Event("disk", step, False, plan.disk_error))
        slot, name = self._slots[plan.slot], layout.published_name(step, plan.generation)
        assert self.memory is not None
        partial = layout.work_path(self.memory.root, layout.PARTIAL, name, self.run_id)
        slot.valid = False
        cleared = self._control.on_all(lambda: self._clear(slot, partial), CheckpointFailed, (OSError,))
        if not cleared[self._node.ranks[0]] and slot.host is not None:
            slot.host.close()
            slot.host = None
        slot.partial, slot.final, slot.generation = partial, self.memory.root / name, plan.generation
        try:
            names = self._control.on_all(
                lambda: self._write_small(slot, flat, meta, rank_state), CheckpointFailed, (OSError,)
            )[self._control.rank]
        except CheckpointFailed as problem:
            self._discard(plan)
            raise CheckpointFailed(f"{problem} (in {self.memory.root})") from problem
        except BaseException:
            self._discard(plan)
            raise
        self._checked = True
        self._jobs += 1
        draft = plan.disk
        job = Job(
            id=self._jobs,
            rank=self._control.rank,
            files=names,
            manifest=Manifest(
                step=step,
                generation=plan.generation,
                run_id=self.run_id,
                created=now(),
                world_size=self._control.size,
                headway=__version__,
                torch=str(torch.__version__),
                parts=self._bound.parts,
                files={},
            ),
            memory=Folder(partial=str(partial), final=str(slot.final), ranks=self._node.ranks),
            peer=self._peer() if self._node.main else None,
            disk=Folder(partial=str(draft.partial), final=str(draft.ref.path), ranks=list(range(self._control.size)))
            if draft
            else None,
            keep=keep,
            remote=self._remote() if remote else None,
            deadline_s=self.saver.timeout_s,
        )
        self._in_work = _InWork(job.id, step, plan.slot, draft is not None)
        self.saver.reserve()
        self.stager.start(
            self._bound.sources, moving, step, self._host(slot), lambda problem: self._staged(job, problem)
        )

    def _peer(self) -> Peer | None:
        """The keeper of the next node in a ring; it is told whose part it gets."""
        names = list(self._node.firsts)
        following = names[(names.index(self._node.name) + 1) % len(names)]
        keeper = self._keepers.get(following)
        return msgspec.structs.replace(keeper, node=self._node.name) if keeper is not None else None

    def _remote(self) -> Remote | None:
        place = self.remote
        if place is None:
            return None
        return Remote(url=place.url, ranks=list(range(self._control.size)), keep=place.keep, budget_s=place.budget_s)

    def _host(self, slot: _Slot) -> HostFile:
        return slot.host if slot.host is not None else HostFile.empty()

    def _staged(self, job: Job, problem: BaseException | None) -> None:
        """On the staging thread."""
        if problem is None:
            self.saver.submit(job)
            return
        self.saver.tell(Outcome(id=job.id, tier="memory", ok=False, why=f"staging: {problem}"))
        self.saver.release()

    def _plan(self, step: int, flat: Flat, disk: bool) -> _Plan:
        """On rank 0: a generation above all in sight, the slot that is missed least, room on the disk."""
        assert self.memory is not None
        above = max(self._generation, layout.next_generation(self.memory.root) - 1)
        draft, error = None, ""
        if disk:
            try:
                need = writing.bytes_needed(flat, self._control.size, self._bound.tensor_bytes)
                draft = writing.claim_here(self.disk.root, self.run_id, step, need, above)
            except (CheckpointFailed, OSError) as problem:
                error = str(problem)
        generation = draft.ref.generation if draft else max(above + 1, layout.next_generation(self.disk.root))
        order = sorted(range(len(self._slots)), key=lambda i: (self._slots[i].valid, self._slots[i].generation))
        return _Plan(generation, order[0], draft, error)

    def _clear(self, slot: _Slot, partial: Path) -> bool:
        """The node's main rank gives the slot's folder its new name; the shard files in it stay, to be written over.

        False where there was none.
        """
        if not self._node.main:
            return False
        old = slot.folder()
        if old is None:
            partial.mkdir(mode=0o700)
            return False
        old.rename(partial)
        for entry in partial.iterdir():
            if not entry.name.endswith(".distcp"):
                entry.unlink()
        return True

    def _write_small(self, slot: _Slot, flat: Flat, meta: dict[str, Any], rank_state: dict[str, Any]) -> list[str]:
        """Everything but the numbers; returns the names of all files of this rank."""
        folder = slot.partial
        assert folder is not None
        rank = self._control.rank
        check = not self._checked  # the same kinds of content as in a save before need not be read back again
        small = {writing.rank_file(rank): writing.readable(rank_state, "rank_state", check=check)}
        if self._node.main:
            writer = {"run_id": self.run_id, "host": socket.gethostname(), "pid": os.getpid(), "started": now()}
            (folder / layout.WRITER_FILE).write_bytes(json.dumps(writer).encode())
        if self._control.is_main:
            small |= writing.common_files(flat, meta, check=check)
            small[".metadata"] = self._image.metadata
        for name, content in small.items():
            (folder / name).write_bytes(content)
        names = [*small, *([layout.WRITER_FILE] if self._node.main else [])]
        if self._image.name:
            if slot.host is None:
                slot.host = HostFile(folder / self._image.name, self._image, pin=self.device_type == "cuda")
            names.append(self._image.name)
        return names

    def _discard(self, plan: _Plan) -> None:
        if plan.disk is not None:
            writing.discard(self._control, plan.disk)

    def _note(self, outcomes: list[Outcome]) -> list[Event]:
        """Outcomes as events; keeps which slots hold."""
        events = []
        for outcome in outcomes:
            work = self._in_work
            if work is None or outcome.id != work.job:
                continue
            if outcome.ok and outcome.tier in ("memory", "disk", "remote"):
                self.published[outcome.tier] = work.step
            if outcome.tier == "memory" and work.slot < len(self._slots):
                self._slots[work.slot].valid = outcome.ok
                if outcome.ok:
                    self._forget_old()
            events.append(
                Event(outcome.tier, work.step, outcome.ok, outcome.why, outcome.seconds, outcome.bytes, outcome.path)
            )
        return events

    # -- memory ------------------------------------------------------------------------------------------------------

    def _find_node(self) -> _Node:
        names = self._control.gather(os.environ.get(NODE) or socket.gethostname())
        name = names[self._control.rank]
        ranks = [rank for rank, other in enumerate(names) if other == name]
        firsts = {other: names.index(other) for other in dict.fromkeys(names)}
        return _Node(name, ranks, ranks[0] == self._control.rank, firsts)

    def _open_memory(self, run_folder: Path) -> None:
        root = memory_root(self.run_id)

        def own() -> None:
            if root is None:
                raise CheckpointFailed("this machine has no shared memory")
            if self._node.main:
                self._owner = Owner(root, run_folder, self.run_id)
                upkeep.sweep(root, self.run_id)

        try:
            self._control.on_all(own, CheckpointFailed, (OSError, CheckpointFailed))
        except CheckpointFailed as problem:
            self.off = f"no memory checkpoints, and saves block: {problem}"
            return
        assert root is not None
        self.memory = CheckpointStore(root, self.run_id)

    def _open_keepers(self, root: Path) -> None:
        """A keeper on every node, known to all. Without one, that node's copy is missing; nothing else."""
        secret = self._control.broadcast(secrets.token_hex(16))
        mine: Peer | None = None
        if self._node.main:
            with contextlib.suppress(OSError):
                self._keeper = Keeper(root, self._node.name, secret)
                address = own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"), 9)
                mine = Peer(address=address, port=self._keeper.port, secret=secret, node=self._node.name)
        self._keepers = {peer.node: peer for peer in self._control.gather(mine) if peer is not None}

    def _bind(self, flat: Flat) -> Bound:
        """The state as it was bound the last time, when every tensor still lies where it did; else looked at anew."""
        marks = marks_of(flat)
        if marks == self._bound.marks:
            return self._bound
        parts = part_bytes(flat.tensors)
        kept = {part: parts.get(part, 0) for part in ("model", "optimizer")}
        return Bound(marks, layout_of(flat), [], kept, sum(parts.values()))

    def _lay_out(self, flat: Flat, bound: Bound) -> None:
        """Plans the shard files and takes the memory for them. Collective."""
        assert self.memory is not None
        self._drop_slots()
        self._bound = Bound()
        self._image = plan_image(self._control, flat, self.memory.root / f".image-{self._generation}")
        self._slots = [_Slot() for _ in range(self.keep_memory + 1)]
        bound.sources = self._image.sources(flat)
        self._bound, self._checked = bound, False
        if self._node.main:  # a run that was killed left its own; the newest stays until a new one is published
            for ref in layout.published(self.memory.root)[:-1]:
                shutil.rmtree(ref.path, ignore_errors=True)

    def _forget_old(self) -> None:
        """Memory checkpoints of an earlier process or layout go once there is a new one."""
        if self._node.main and self.memory is not None:
            ours = {slot.final for slot in self._slots}
            for ref in layout.published(self.memory.root):
                if ref.path not in ours:
                    shutil.rmtree(ref.path, ignore_errors=True)
            shutil.rmtree(self.memory.root / WHOLE, ignore_errors=True)

    def _drop_slots(self) -> None:
        for slot in self._slots:
            if slot.host is not None:
                slot.host.close()
        self._slots = []
