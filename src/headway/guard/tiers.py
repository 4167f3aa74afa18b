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
import functools
import json
import os
import socket
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from headway import __version__
from headway.guard import layout, upkeep, writing
from headway.guard.checkpoint import CheckpointStore
from headway.guard.crash import crash_point
from headway.guard.finding import ALL_TIERS, Finder, Found, RemotePlace
from headway.guard.host_file import HostFile
from headway.guard.image import Bound, Image, NoImage, layout_of, marks_of, plan_image
from headway.guard.layout import CheckpointFailed, CheckpointRef
from headway.guard.manifest import Manifest
from headway.guard.node_memory import NodeMemory
from headway.guard.object_store import ObjectStore
from headway.guard.publishing import now
from headway.guard.save_job import Folder, Job, Outcome, Remote, Room, withdraw
from headway.guard.saver import Saver
from headway.guard.slots import Slot, Slots
from headway.guard.staging import Stager
from headway.guard.tree import Flat, Tree, flatten, part_bytes
from headway.guard.upkeep import Keep

_POLL_S = 0.02
_READ_S = 1.0
"""Seconds that a save which blocks may take to read checkpoints of earlier sessions, before they go."""


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


@dataclass(frozen=True, slots=True)
class _Plan:
    """Rank 0's decision about one save. `waits`: until the disk has more room."""

    generation: int
    slot: int
    disk: writing.Draft | None
    disk_error: str
    waits: bool


@dataclass(slots=True)
class _InWork:
    job: int
    step: int
    slot: int
    disk: bool


class Tiers:
    """The tiers of one run. Collective when there is a process group.

    `run_folder`: whose run it is. `keep_memory`: memory checkpoints that stay while the next is made; host memory holds
    one more. `copies`: whether each node's part also goes to the next node's memory. `timeout_s`: a save that is not
    published by then is given up. `off`: why nothing is staged (saves are then written by the trainer itself, and
    block); the same on all ranks. `memory`: where memory checkpoints are, also where none is added.
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
        copies: bool = True,
    ) -> None:
        if disk.run_id is None:
            raise ValueError("tiers save: their store needs a run id")
        self.disk, self.run_id, self.device_type = disk, disk.run_id, device_type
        self.keep_memory, self.remote = keep_memory, remote
        self.stager = Stager(device_type)
        self.saver = Saver(run_folder, timeout_s)
        self.published: dict[str, int] = {}
        """The newest published step of each tier, as rank 0 knows it."""
        self._control = disk.control
        self._here = NodeMemory(disk.control, run_folder, disk.run_id, copies=copies)
        self.off, self.memory = self._here.off, self._here.store
        self._image = Image()
        self._bound = Bound()
        self._slots = Slots()
        self._in_work: _InWork | None = None
        self._jobs = 0
        self._checked = False
        self._generation = 0
        self._made_room = False  # for the save that is tried next
        self._early: list[Event] = []

    @property
    def node_ranks(self) -> list[int]:
        """The ranks on this node, which share its memory."""
        return self._here.node.ranks

    @property
    def notes(self) -> list[str]:
        """What a person should know of whose memory checkpoints these are; the same on all ranks."""
        return self._here.notes

    @property
    def has_peers(self) -> bool:
        """Whether other nodes' parts are copied to this one's memory."""
        return self._here.has_peers

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

        Returns False when the save before is not done, or room is being made on the disk (only what `keep` names
        stays); call again at a later step. Raises CheckpointFailed on every rank when nothing could be begun: then
        training goes on, or `save_now` does it the slow way.
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
            return self._begin(step, flat, moving, meta, rank_state, disk, remote, keep)
        except NoImage as problem:
            self.off = f"no asynchronous saves: {problem}"
            raise CheckpointFailed(self.off) from problem

    def save_now(
        self,
        step: int,
        tensors: Tree,
        meta: dict[str, Any],
        rank_state: dict[str, Any],
        *,
        remote: bool = False,
        keep: Keep | None = None,
        direct: bool = False,
    ) -> list[Event]:
        """Returns when the state is on the disk, whatever it takes. Collective; raises like `CheckpointStore.save`.

        For the last save before the process ends. What the saver cannot do in time, this process does itself. With
        `remote` the upload begins; `settle` waits for it. `direct`: not through memory, which has just had no room.
        """
        self.fence()
        if self.saver.left == {"remote"}:  # an upload may take long: it goes on by itself, and another process saves
            self.saver.close()
            self.saver = Saver(self.saver.run_folder, self.saver.timeout_s)
        self.settle()
        events = self.poll()
        if self._control.broadcast(self.published.get("disk")) == step:
            return events
        begun = False
        try:
            if not direct:
                begun = self.save(step, tensors, meta, rank_state, remote=remote, keep=keep)
            if not begun and self._made_room and not direct:
                self.settle()
                begun = self.save(step, tensors, meta, rank_state, remote=remote, keep=keep)
        except CheckpointFailed:
            begun = False
        if begun:
            self.fence()
            # The events may hold what became of the save before, too.
            while self.saver.busy and not any(event.tier == "disk" and event.step == step for event in events):
                self.saver.wait(_POLL_S)
                self.saver.end_stopped()
                events += self.poll()
            events += self.poll()
            if self._control.broadcast(self.published.get("disk")) == step:
                return events
        make_room = functools.partial(self._prune, keep, unread=True)
        ref = self.disk.save(step, tensors, meta, rank_state, above=self._above(), make_room=make_room)
        self._generation = ref.generation
        self.published["disk"] = step
        size = sum(file.stat().st_size for file in ref.path.iterdir()) if self._control.is_main else 0
        if self._control.is_main:
            events += [Event("prune", step, False, text) for text in self._prune(keep)]
        return [*events, Event("disk", step, True, bytes=size, path=str(ref.path))]

    def _above(self) -> int:
        """The highest generation that was used: a start takes the highest one, so an old copy in memory counts."""
        in_memory = layout.next_generation(self.memory.root) - 1 if self.memory is not None else 0
        return max(self._generation, in_memory)

    def _prune(self, keep: Keep | None, *, unread: bool = False) -> list[str]:
        """In this process, on rank 0; what should have gone and did not."""
        if keep is None:
            return []
        read_s = self.saver.timeout_s / 2 if unread else _READ_S
        return self.disk.prune(keep.last, keep.every, keep.proven, read_s=read_s, unread=unread).left

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
        return self.saver.settle(timeout_s)

    # -- finding -----------------------------------------------------------------------------------------------------

    def newest(self, before_step: int | None = None, tiers: Set[str] = ALL_TIERS) -> Found | None:
        """The newest verified checkpoint; see `finding.Finder.newest`. Collective."""
        memory, problems = self._here.newest(before_step) if "memory" in tiers else (None, [])
        return Finder(self.disk, memory, self.remote).newest(before_step, tiers, problems)

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint that this process sees in memory or on the disk; nothing is verified."""
        roots = [self.disk.root, *([self.memory.root] if self.memory is not None else [])]
        found = [ref for root in roots for ref in layout.published(root)]
        return max(found, key=lambda ref: ref.generation).step if found else None

    def abandon(self, steps_from: int, to: CheckpointRef) -> list[str]:
        """After training has gone back to `to`: deletes the checkpoints of `steps_from` and later steps that are newer,
        in every tier, so that no start takes one. Collective. Returns those that could not be deleted, and why."""

        def here() -> list[str]:
            left = self._here.abandon(steps_from, to.generation)
            self._slots.forget_missing()
            if self._control.is_main:
                left += upkeep.abandon(self.disk.root, self.run_id, steps_from, to.generation).left
                left += self._abandon_in_store(steps_from, to)
            return left

        self.published = {tier: step for tier, step in self.published.items() if step < steps_from}
        shares = self._control.on_all(here, CheckpointFailed, (OSError,))
        return [one for share in shares for one in share]

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
        self._slots.renew(0)
        self._here.close(over=over)

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
    ) -> bool:
        plan = self._control.on_main(lambda: self._plan(step, flat, disk, keep), CheckpointFailed, (OSError,))
        self._made_room = plan.waits
        if plan.waits:
            self._make_room(step, keep)
            return False
        self._generation = plan.generation
        if plan.disk_error:
            self._early.append(Event("disk", step, False, plan.disk_error))
        slot, name = self._slots.all[plan.slot], layout.published_name(step, plan.generation)
        assert self.memory is not None
        node, root = self._here.node, self.memory.root
        partial = layout.work_path(root, layout.PARTIAL, name, self.run_id)
        slot.valid = False
        cleared = self._control.on_all(lambda: node.main and slot.clear(partial), CheckpointFailed, (OSError,))
        slot.take(partial, root / name, plan.generation, cleared=cleared[node.ranks[0]])
        try:
            names = self._control.on_all(
                lambda: self._write_small(slot, flat, meta, rank_state), CheckpointFailed, (OSError,)
            )[self._control.rank]
        except CheckpointFailed as problem:
            self._discard(plan)
            raise CheckpointFailed(f"{problem} (in {root})") from problem
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
            memory=Folder(partial=str(partial), final=str(slot.final), ranks=node.ranks),
            peer=self._here.peer(),
            disk=Folder(partial=str(draft.partial), final=str(draft.ref.path), ranks=list(range(self._control.size)))
            if draft
            else None,
            keep=keep,
            sound=self.disk.contents.sound() if draft else {},
            remote=self._remote(keep) if remote else None,
            deadline_s=self.saver.timeout_s,
        )
        self._in_work = _InWork(job.id, step, plan.slot, draft is not None)
        self.saver.reserve()
        host = self._host(slot)
        self.stager.start(self._bound.sources, moving, step, host, lambda problem: self._staged(job, host, problem))
        return True

    def _make_room(self, step: int, keep: Keep | None) -> None:
        """Rank 0's saver does it, beside the training."""
        if self._control.is_main and keep is not None:
            self._jobs += 1
            self._in_work = _InWork(self._jobs, step, slot=-1, disk=False)
            room = Room(
                id=self._jobs,
                root=str(self.disk.root),
                run_id=self.run_id,
                keep=keep,
                sound=self.disk.contents.sound(),
                deadline_s=self.saver.timeout_s,
            )
            self.saver.submit(room)

    def _remote(self, keep: Keep | None) -> Remote | None:
        place = self.remote
        if place is None:
            return None
        return Remote(
            url=place.url,
            ranks=list(range(self._control.size)),
            keep=place.keep,
            budget_s=place.budget_s,
            proven=keep.proven if keep is not None else None,
        )

    def _host(self, slot: Slot) -> HostFile:
        return slot.host if slot.host is not None else HostFile.empty()

    def _staged(self, job: Job, host: HostFile, problem: BaseException | None) -> None:
        """On the staging thread, while training goes on."""
        try:
            if problem is not None:
                raise problem
            if host.image.name:
                job = msgspec.structs.replace(job, hashed={host.image.name: host.entry()})
        except BaseException as failed:
            for tier in job.tiers():  # none of them gets the copy
                self.saver.tell(Outcome(id=job.id, tier=tier, ok=False, why=f"staging: {failed}"))
            withdraw(job, f"staging: {failed}")
            self.saver.release()
        else:
            self.saver.submit(job)

    def _plan(self, step: int, flat: Flat, disk: bool, keep: Keep | None) -> _Plan:
        """On rank 0: a generation above all in sight, the slot that is missed least, room on the disk."""
        assert self.memory is not None
        above = self._above()
        draft, error, waits = None, "", False
        if disk:
            try:
                need = writing.bytes_needed(flat, self._control.size, self._bound.tensor_bytes)
                draft = writing.claim_here(self.disk.root, self.run_id, step, need, above)
            except (CheckpointFailed, OSError) as problem:
                error = str(problem)
                # What this save makes expendable was pruned by none before it.
                short = isinstance(problem, layout.NoRoom) and not self._made_room
                waits = short and keep is not None and upkeep.may_go(self.disk.root, keep)
        generation = draft.ref.generation if draft else max(above + 1, layout.next_generation(self.disk.root))
        return _Plan(generation, self._slots.missed_least(), draft, error, waits)

    def _write_small(self, slot: Slot, flat: Flat, meta: dict[str, Any], rank_state: dict[str, Any]) -> list[str]:
        """Everything but the numbers; returns the names of all files of this rank."""
        folder = slot.partial
        assert folder is not None
        rank = self._control.rank
        check = not self._checked  # the same kinds of content as in a save before need not be read back again
        small = {writing.rank_file(rank): writing.readable(rank_state, "rank_state", check=check)}
        if self._here.node.main:
            writer = {"run_id": self.run_id, "host": socket.gethostname(), "pid": os.getpid(), "started": now()}
            (folder / layout.WRITER_FILE).write_bytes(json.dumps(writer).encode())
        if self._control.is_main:
            small |= writing.common_files(flat, meta, check=check)
            small[".metadata"] = self._image.metadata
        for name, content in small.items():
            (folder / name).write_bytes(content)
        names = [*small, *([layout.WRITER_FILE] if self._here.node.main else [])]
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
            if outcome.mark:
                self.disk.contents.note(Path(outcome.path).name, outcome.mark)
            if outcome.tier == "memory":
                self._slots.note(work.slot, outcome.ok)
                if outcome.ok:
                    self._here.keep_only(self._slots.finals())
            events.append(
                Event(outcome.tier, work.step, outcome.ok, outcome.why, outcome.seconds, outcome.bytes, outcome.path)
            )
        return events

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
        self._slots.renew(0)
        self._bound = Bound()
        self._image = plan_image(self._control, flat, self.memory.root / f".image-{self._generation}")
        self._slots.renew(self.keep_memory + 1)
        bound.sources = self._image.sources(flat)
        self._bound, self._checked = bound, False
        self._here.keep_newest()
