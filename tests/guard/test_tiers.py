"""Saves beside the training: what is staged is the state of its step, whatever the training does meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_helpers import full, on_ranks, same, snapshot, tiny_model, tiny_optimizer, train

from headway.account.errors import Refused
from headway.guard import contents, direct, layout, remote, save_job, saver, staging, writing
from headway.guard.checkpoint import CheckpointFailed, CheckpointStore
from headway.guard.host_file import HostFile
from headway.guard.object_store import ObjectStore
from headway.guard.peers import PEERS
from headway.guard.remote import fetch_newest, read_remote_manifest
from headway.guard.save_job import Job, Outcome, Room, make_room, run_job
from headway.guard.saver import Saver
from headway.guard.tiers import RemotePlace, Tiers
from headway.guard.training_state import buffer_keys, capture, restore
from headway.guard.upkeep import Keep


def make(root: Path, **options: Any) -> Tiers:
    return Tiers(CheckpointStore(root / "checkpoints", "run-a"), root, **options)


def begin(tiers: Tiers, model: Any, optimizer: Any, step: int, **options: Any) -> bool:
    tree = capture(model, [optimizer])
    return tiers.save(step, tree, {"step": step}, {"n": step}, moving=buffer_keys(model), **options)


def every_tier(rank: int, root: Path, kind: str) -> list[Any]:
    """Saves at every step, on disk at every second one; each copy in each tier is compared with what was there."""
    model = tiny_model(0, kind)
    optimizer = tiny_optimizer(model)
    tiers = make(root, keep_memory=2)
    assert tiers.off == ""
    seen, odd = {}, []
    for step in range(1, 7):
        tiers.fence()
        train(model, optimizer, 1, step - 1)
        seen[step] = snapshot(model, optimizer)
        assert begin(tiers, model, optimizer, step, disk=step % 2 == 0, keep=Keep(last=2))
        assert tiers.settle(60)
        events = tiers.poll()
        assert [(event.tier, event.ok) for event in events] == [("memory", True), ("disk", True)][: 2 - step % 2], (
            events
        )
    for tier, before, expected in (("memory", None, 6), ("memory", 6, 5), ("memory", 5, 4), ("disk", 6, 4)):
        found = tiers.newest(before, {tier})
        assert found is not None and (found.ref.step, found.ref.generation) == (expected, expected)
        other = tiny_model(5, kind)
        other_optimizer = tiny_optimizer(other)
        loaded = restore(found.store, found.ref, other, [other_optimizer])
        odd += same(seen[expected], snapshot(other, other_optimizer))
        assert loaded.meta == {"step": expected} and loaded.rank_state == {"n": expected}
    found = tiers.newest()
    assert found is not None and (found.tier, found.ref.step) == ("memory", 6)
    assert tiers.newest(5, {"memory"}).ref.step == 4 and tiers.newest(4, {"memory"}) is None  # type: ignore[union-attr]
    assert [info.ref.step for info in tiers.disk.list(verify=True) if info.verified] == [4, 6]
    assert tiers.memory is not None
    memory = tiers.memory.root
    tiers.close(over=True)
    tiers.disk.control.gather(None)
    return [odd, memory.exists()]


@pytest.mark.parametrize(("ranks", "kind"), [(1, "plain"), (2, "fsdp"), (2, "ddp")])
def test_every_copy_is_the_state_of_its_step(tmp_path: Path, ranks: int, kind: str) -> None:
    assert on_ranks(ranks, every_tier, tmp_path, kind) == [[[], False]] * ranks


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies stop half-way until the event is set."""
    go = threading.Event()
    real = staging.copy_bytes

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        go.wait(60)
        real(target, source)

    monkeypatch.setattr(staging, "copy_bytes", slow)
    return go


@pytest.mark.parametrize("planted", [False, True])
def test_the_optimizer_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    seen = snapshot(model, optimizer)
    go = slow_copies(monkeypatch)
    tiers = make(tmp_path)
    optimizer.register_step_pre_hook(lambda *_: None if planted else tiers.fence())
    assert begin(tiers, model, optimizer, 1)
    with torch.no_grad():
        model.counter.add_(7)  # a buffer may change at once: it was copied before `save` returned
    assert not begin(tiers, model, optimizer, 1), "one save at a time"
    threading.Timer(0.2, go.set).start()
    train(model, optimizer, 1, 1)
    go.set()
    assert tiers.settle(60) and all(event.ok for event in tiers.poll())
    found = tiers.newest()
    assert found is not None
    other = tiny_model(3)
    restore(found.store, found.ref, other, [tiny_optimizer(other)])
    changed = not torch.equal(full(other.embed.weight), seen["tensors"]["model.embed.weight"])
    assert changed is planted, "a copy that the optimizer does not wait for is of no step at all"
    assert torch.equal(other.counter, torch.zeros(2))
    tiers.close(over=True)


@pytest.mark.parametrize("stopped", [True, False], ids=["a stopped saver", "one that hangs in the kernel"])
def test_the_last_save_is_on_the_disk_even_when_the_saver_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """A stopped one is not waited for until the job is overdue (600 s): a SIGTERM leaves seconds."""
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    tiers = make(tmp_path)
    assert begin(tiers, model, optimizer, 1, disk=False) and tiers.settle(60)
    if not stopped:
        tiers.saver.timeout_s = 0.5
        monkeypatch.setattr(saver, "is_stopped", lambda pid: False)
    assert tiers.saver.pid is not None
    os.kill(tiers.saver.pid, signal.SIGSTOP)
    if stopped:
        assert begin(tiers, model, optimizer, 1), "it stood stopped before the last save, too"
    events = tiers.save_now(2, capture(model, [optimizer]), {}, {})
    told = [(event.tier, event.step, event.ok) for event in events if event.tier in ("disk", "saver")]
    if stopped:
        assert told == [("saver", 1, False), ("disk", 1, True), ("disk", 2, True)]
        (why,) = [event.why for event in events if event.tier == "saver"]
        assert "it stood stopped, and the training waited for it); tried again" in why
    else:
        assert told == [("disk", 2, False), ("disk", 2, True)]
    assert tiers.disk.newest_verified().step == 2  # type: ignore[union-attr]
    tiers.close(over=True)


def test_the_last_save_behind_one_under_way_is_made_once(tmp_path: Path) -> None:
    model = tiny_model(0)
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    tiers = make(tmp_path)
    assert begin(tiers, model, optimizer, 1, disk=True)
    tiers.fence()
    train(model, optimizer, 1)
    events = tiers.save_now(2, capture(model, [optimizer]), {"step": 2}, {"n": 2})
    assert [event.step for event in events if event.tier == "disk"] == [1, 2]
    assert [info.ref.step for info in tiers.disk.list()] == [1, 2]
    tiers.close(over=True)


def test_without_shared_memory_saves_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SHARED_MEMORY", str(tmp_path / "nowhere"))
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers = make(tmp_path)
    assert "no shared memory" in tiers.off
    with pytest.raises(CheckpointFailed, match="no shared memory"):
        begin(tiers, model, optimizer, 1)
    (event,) = tiers.save_now(1, capture(model, [optimizer]), {}, {}, keep=Keep(last=1))
    assert event.ok and tiers.newest().tier == "disk"  # type: ignore[union-attr]
    tiers.close(over=True)


def test_memory_with_room_for_one_of_two_leaves_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers = make(tmp_path)
    assert begin(tiers, model, optimizer, 1, disk=False) and tiers.settle(60)
    assert tiers.memory is not None
    (tiers.memory.root / "step-00000001.g0001").rename(tiers.memory.root / "step-00000001.g0009")  # an earlier start's

    def full_memory(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full_memory)
    with pytest.raises(CheckpointFailed, match="no space left"):
        begin(tiers, model, optimizer, 2)
    (event,) = [
        one for one in tiers.save_now(2, capture(model, [optimizer]), {}, {}, direct=True) if one.tier == "disk"
    ]
    assert event.ok and tiers.newest().ref.step == 2, "the older copy in memory is not taken for the newer one"  # type: ignore[union-attr]
    assert not layout.work_folders(tiers.disk.root), "what the failed save had claimed is gone"
    monkeypatch.undo()
    assert begin(tiers, model, optimizer, 3) and tiers.settle(60), "once there is room, beside the training again"
    assert all(one.ok for one in tiers.poll()) and tiers.newest().ref.step == 3  # type: ignore[union-attr]
    tiers.close(over=True)


def test_a_full_disk_leaves_the_memory_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise CheckpointFailed("too little space")

    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers = make(tmp_path)
    monkeypatch.setattr(writing, "_check_space", full_disk)
    assert begin(tiers, model, optimizer, 3) and tiers.settle(60)
    events = {event.tier: event for event in tiers.poll()}
    assert not events["disk"].ok and events["disk"].why == "too little space" and events["memory"].ok
    found = tiers.newest()
    assert found is not None and (found.tier, found.ref.step) == ("memory", 3)
    monkeypatch.undo()
    tiers.close(over=True)


class Inline(Saver):
    """Does its work in this process, where a test can look at it."""

    def submit(self, job: Job | Room) -> None:
        self.reserve()
        if isinstance(job, Room):
            make_room(job, self._told)
        else:
            run_job(job, self._told)
        self.release()

    def _told(self, outcome: Outcome) -> None:
        if outcome.tier:
            self.tell(outcome)


@pytest.mark.parametrize("read_s", [60.0, 0.0])
def test_pruning_costs_neither_the_upload_nor_a_second_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_s: float
) -> None:
    """Two checkpoints of the session before: `read_s` is too short to read them, or not."""
    model, keep = tiny_model(), Keep(last=1)
    optimizer = tiny_optimizer(model)
    before = CheckpointStore(tmp_path / "checkpoints", "run-a")
    for step in (1, 2):
        before.save(step, capture(model, [optimizer]), {}, {})
    read, uploads, hash_by_steps = list[Path](), list[tuple[list[int], int]](), contents.hash_by_steps
    monkeypatch.setattr(contents, "hash_by_steps", lambda path, kind: read.append(path) or hash_by_steps(path, kind))
    monkeypatch.setattr(save_job, "_READ_S", read_s)
    tiers = make(tmp_path, remote=RemotePlace(f"file://{tmp_path}/bucket/run", budget_s=0))
    tiers.saver = Inline(tmp_path, 600.0)

    def steps() -> list[int]:
        return [ref.step for ref in layout.published(tiers.disk.root)]

    def upload(*_: Any) -> int:
        uploads.append((steps(), len(read)))
        return 0

    monkeypatch.setattr(remote, "upload", upload)
    for step in (3, 4, 5):
        monkeypatch.setattr(save_job, "_contents", {})  # as a new saver: the trainer tells it what is known
        assert begin(tiers, model, optimizer, step, remote=True, keep=keep) and tiers.settle(60)
        assert [(event.tier, event.ok) for event in tiers.poll()] == [(t, True) for t in ("memory", "disk", "remote")]
    if read_s:
        assert uploads[0] == ([1, 2, 3], 0) and [there for there, _ in uploads[1:]] == [[4], [5]]
        assert uploads[1][1] == uploads[2][1] == len(read), "what this process has written is not read again"
        assert len(read) == len(set(read)) and {path.parent.name[:13] for path in read} == {
            "step-00000001",
            "step-00000002",
        }
    else:
        assert uploads == [([1, 2, 3], 0), ([1, 2, 4], 0), ([1, 2, 5], 0)] and read == []
    tiers.close(over=True)


def test_the_optimizer_does_not_wait_for_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers, gate, real = make(tmp_path), threading.Event(), HostFile.entry

    def slow(host: HostFile) -> Any:
        assert gate.wait(60)
        return real(host)

    monkeypatch.setattr(HostFile, "entry", slow)
    assert begin(tiers, model, optimizer, 1)
    tiers.fence()
    train(model, optimizer, 1, 1)
    assert tiers.saver.busy and not begin(tiers, model, optimizer, 2), "but the next save does"
    gate.set()
    assert tiers.settle(60) and [event.ok for event in tiers.poll()] == [True, True]
    assert tiers.disk.verify(layout.published(tiers.disk.root)[0]) == []

    def broken(host: HostFile) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(HostFile, "entry", broken)
    assert begin(tiers, model, optimizer, 3) and tiers.settle(60)
    failed = [(event.tier, event.ok, event.why) for event in tiers.poll()]
    assert failed == [("memory", False, "staging: planted"), ("disk", False, "staging: planted")], "the disk's counts"
    assert not layout.work_folders(tiers.disk.root), "what it had claimed is free"
    tiers.close(over=True)


class Rotting(Inline):
    """A bit of what was staged turns before the saver has it."""

    def submit(self, job: Job | Room) -> None:
        assert isinstance(job, Job)
        (name,) = job.hashed
        path = Path(job.memory.partial, name)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        super().submit(job)


def test_what_turned_in_memory_after_it_was_staged_is_never_believed(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers = make(tmp_path)
    tiers.saver = Rotting(tmp_path, 600.0)
    assert begin(tiers, model, optimizer, 1) and tiers.settle(60)
    assert {event.tier: event.ok for event in tiers.poll()} == {"memory": True, "disk": False}
    assert layout.published(tiers.disk.root) == []
    with pytest.raises(Refused, match="does not match its XXH3-128"):
        tiers.newest()
    tiers.close(over=True)


def test_what_the_disk_does_not_give_back_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers = make(tmp_path)
    tiers.saver = Inline(tmp_path, 600.0)
    real = direct.copy

    def planted(source: int, target: Path, progress: Any) -> None:
        real(source, target, progress)
        if target.suffix == ".distcp":
            content = bytearray(target.read_bytes())
            content[100] ^= 1
            target.write_bytes(content)

    monkeypatch.setattr(direct, "copy", planted)
    assert begin(tiers, model, optimizer, 1) and tiers.settle(60)
    memory, disk = tiers.poll()
    assert (memory.ok, disk.ok) == (True, False)
    assert "__0_0.distcp does not read back as it was written, first in bytes 0" in disk.why
    assert layout.published(tiers.disk.root) == []
    monkeypatch.undo()
    assert begin(tiers, model, optimizer, 2) and tiers.settle(60)
    assert all(event.ok for event in tiers.poll()) and [ref.step for ref in layout.published(tiers.disk.root)] == [2]
    tiers.close(over=True)


def room_for(count: int, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """A disk that holds so many checkpoints."""
    usage = shutil.disk_usage(root)

    def free(path: Path) -> Any:
        return usage._replace(free=1 << 40 if len(layout.published(path)) < count else 0)

    monkeypatch.setattr(writing.shutil, "disk_usage", free)


def keep(step: int) -> Keep:
    return Keep(last=1, proven=step - 32)


def test_a_disk_with_room_for_two_is_enough_to_keep_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before the last is needed until there are 32 steps behind the last: until the very save that comes next."""
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers = make(tmp_path)
    room_for(2, monkeypatch, tmp_path)
    for step in (1000, 2000):
        assert begin(tiers, model, optimizer, step, keep=keep(step)) and tiers.settle(60)
        assert all(event.ok for event in tiers.poll())
    assert not begin(tiers, model, optimizer, 3000, keep=keep(3000)), "room is made beside the training"
    assert tiers.settle(60) and tiers.poll() == []
    assert begin(tiers, model, optimizer, 3000, keep=keep(3000)) and tiers.settle(60)
    assert [(event.tier, event.ok) for event in tiers.poll()] == [("memory", True), ("disk", True)]
    assert [ref.step for ref in layout.published(tiers.disk.root)] == [2000, 3000]
    tree = capture(model, [optimizer])
    events = tiers.save_now(4000, tree, {}, {}, keep=keep(4000))
    assert [(event.tier, event.step, event.ok) for event in events if event.tier != "memory"] == [("disk", 4000, True)]
    assert tiers.settle(60), "it returns once the disk has it: the saver still prunes"
    assert [ref.step for ref in layout.published(tiers.disk.root)] == [3000, 4000]
    assert begin(tiers, model, optimizer, 4010, keep=keep(4010)), (
        "3000 is needed: planted, there is nothing to wait for"
    )
    assert tiers.settle(60)
    told = {event.tier: event for event in tiers.poll()}
    assert "too little space" in told["disk"].why and told["memory"].ok
    tiers.off = "planted"  # the saves that block, too
    events = tiers.save_now(5000, tree, {}, {}, keep=keep(5000))
    assert [(event.tier, event.step, event.ok) for event in events] == [("disk", 5000, True)]
    assert [ref.step for ref in layout.published(tiers.disk.root)] == [4000, 5000]
    tiers.close(over=True)


def test_memory_is_reused_not_grown(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    tiers = make(tmp_path)
    inodes = set()
    for step in range(1, 9):
        assert begin(tiers, model, optimizer, step, disk=False) and tiers.settle(60)
        tiers.poll()
        assert tiers.memory is not None
        inodes |= {file.stat().st_ino for file in tiers.memory.root.rglob("*.distcp")}
    assert len(inodes) == 2, "two rooms, used in turn"
    tiers.close(over=True)


def test_a_changed_layout_is_laid_out_anew(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    tiers = make(tmp_path)
    assert begin(tiers, model, optimizer, 1) and tiers.settle(60)  # no optimizer state yet
    train(model, optimizer, 1)
    seen = snapshot(model, optimizer)
    tiers.poll()
    assert begin(tiers, model, optimizer, 2) and tiers.settle(60)
    tiers.poll()
    found = tiers.newest()
    assert found is not None and found.ref.step == 2
    other = tiny_model(2)
    other_optimizer = tiny_optimizer(other)
    restore(found.store, found.ref, other, [other_optimizer])
    assert same(seen, snapshot(other, other_optimizer)) == []
    assert tiers.memory is not None and len(list(tiers.memory.root.glob("step-*"))) == 1
    tiers.close(over=True)


def two_nodes(rank: int, root: Path) -> list[Any]:
    """Two ranks that each believe to be alone on their node."""
    os.environ["HEADWAY_NODE"] = f"node-{rank}"
    model = tiny_model(0, "fsdp")
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    tiers = make(root, remote=RemotePlace(f"file://{root}/bucket/run", budget_s=0))
    seen = snapshot(model, optimizer)
    assert begin(tiers, model, optimizer, 1, remote=True)
    assert tiers.settle(60) and all(event.ok for event in tiers.poll())
    tiers.disk.control.gather(None)
    found = tiers.newest()
    assert found is not None and tiers.memory is not None and tiers.memory.root.name.endswith(f"node-{rank}")
    assert found.ref.path.parent == tiers.memory.root / ".whole"
    other = tiny_model(3, "fsdp")
    other_optimizer = tiny_optimizer(other)
    restore(found.store, found.ref, other, [other_optimizer])
    store = ObjectStore(f"file://{root}/bucket/run", 0)
    whole, rejected = fetch_newest(store, [root / f"fetched-{rank}"], "run-a", above=0)
    tiers.disk.control.gather(None)
    tiers.close(over=True)
    return [found.tier, same(seen, snapshot(other, other_optimizer)), whole is not None, rejected]


def test_on_two_nodes_their_memories_serve_together_and_the_store_is_whole(tmp_path: Path) -> None:
    assert on_ranks(2, two_nodes, tmp_path) == [["memory", [], True, []]] * 2


def test_a_nodes_part_is_no_checkpoint_for_whoever_is_alone_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, then one: its memory holds sound files of one rank, which must not be taken for the state."""
    on_ranks(2, half_of_it, tmp_path, False)
    monkeypatch.setenv("HEADWAY_NODE", "node-0")
    tiers = make(tmp_path)
    assert tiers.memory is not None and not (tiers.memory.root / PEERS).exists()
    assert len(list(tiers.memory.root.glob("step-*"))) == 1
    assert tiers.newest() is None
    tiers.close(over=True)


def half_of_it(rank: int, root: Path, copies: bool = True) -> dict[str, Any]:
    """What the state was; both nodes' parts, and their copies, stay where they are."""
    os.environ["HEADWAY_NODE"] = f"node-{rank}"
    model = tiny_model(0, "fsdp")
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    tiers = make(root, copies=copies)
    assert begin(tiers, model, optimizer, 1, disk=False) and tiers.settle(60)
    assert [(event.tier, event.ok) for event in tiers.poll()] == [("memory", True), ("peer", True)][: 1 + copies]
    tiers.disk.control.gather(None)
    tiers.close(over=False)
    return snapshot(model, optimizer)


def test_after_a_node_is_lost_the_other_has_its_part_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = on_ranks(2, half_of_it, tmp_path)[0]
    monkeypatch.setenv("HEADWAY_NODE", "node-0")
    shutil.rmtree(next(Path(os.environ["HEADWAY_SHARED_MEMORY"]).glob("*-node-1")))
    tiers = make(tmp_path)
    found = tiers.newest()
    assert found is not None and (found.tier, found.ref.step) == ("memory", 1)
    model = tiny_model(5)
    optimizer = tiny_optimizer(model)
    restore(found.store, found.ref, model, [optimizer])
    assert same(seen, snapshot(model, optimizer)) == []
    kept = next(found.ref.path.parents[1].glob(f"{PEERS}/node-1/step-*/__*.distcp"))
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.unlink()  # what was put together shares its bytes
    kept.write_bytes(content)
    with pytest.raises(Refused, match=r"in the memory of node-0: .*XXH3-128"):
        tiers.newest()
    tiers.close(over=True)


def test_what_a_rollback_took_back_is_taken_by_no_start(tmp_path: Path) -> None:
    """The bad update is seen two steps later, when it has been saved everywhere: a crash now must not bring it back."""
    model = tiny_model(0)
    optimizer = tiny_optimizer(model)
    place = RemotePlace(f"file://{tmp_path}/bucket/run", keep=9, budget_s=0)
    tiers = make(tmp_path, keep_memory=1, remote=place)
    for step in (1, 2, 3):
        train(model, optimizer, 1, step)
        assert begin(tiers, model, optimizer, step, remote=True, keep=Keep(last=9)) and tiers.settle(60)
        assert all(event.ok for event in tiers.poll())
    (tiers.disk.root / "step-00000003.g0009").mkdir()  # somebody else's
    newest = tiers.newest()
    assert newest is not None and newest.ref.step == 3  # what a start would take
    good = tiers.newest(before_step=2)
    assert good is not None and good.ref.step == 1
    assert tiers.abandon(2, good.ref) == []
    assert [ref.name for ref in layout.published(tiers.disk.root)] == ["step-00000001.g0001", "step-00000003.g0009"]
    (tiers.disk.root / "step-00000003.g0009").rmdir()
    store = ObjectStore(place.url, 0)
    assert [name for name in store.names() if read_remote_manifest(store, name)] == ["step-00000001.g0001"]
    tiers.close(over=False)
    for name in ("checkpoints", "bucket"):
        again = Tiers(CheckpointStore(tmp_path / "checkpoints", "run-a"), tmp_path, remote=place)
        found = again.newest()
        assert found is not None and found.ref.step == 1, name
        again.close(over=True)
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)


def test_a_step_that_is_made_again_is_saved_again(tmp_path: Path) -> None:
    model = tiny_model(0)
    optimizer = tiny_optimizer(model)
    tiers = make(tmp_path)
    for step in (1, 2):
        assert begin(tiers, model, optimizer, step) and tiers.settle(60)
        tiers.poll()
    good = tiers.newest(before_step=2)
    assert good is not None
    tiers.abandon(2, good.ref)
    train(model, optimizer, 1)
    seen = snapshot(model, optimizer)
    tiers.save_now(2, capture(model, [optimizer]), {"step": 2}, {"n": 2})
    found = tiers.newest()
    assert found is not None and found.ref.step == 2
    other = tiny_model(3)
    other_optimizer = tiny_optimizer(other)
    restore(found.store, found.ref, other, [other_optimizer])
    assert same(seen, snapshot(other, other_optimizer)) == []
    tiers.close(over=True)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_saver_killed_while_it_had_nothing_to_do_is_told_of_with_the_next_save(tmp_path: Path, at_once: bool) -> None:
    """`at_once`: the next save comes before anybody has noticed."""
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    train(model, optimizer, 1)
    tiers = make(tmp_path)
    assert begin(tiers, model, optimizer, 1, disk=False) and tiers.settle(60)
    assert [event.tier for event in tiers.poll()] == ["memory"] and tiers.saver.pid is not None
    os.kill(tiers.saver.pid, signal.SIGKILL)
    while not at_once and tiers.saver.pid is not None:
        time.sleep(0.01)
    assert begin(tiers, model, optimizer, 2, disk=False) and tiers.settle(60)
    events = tiers.poll()
    assert [(event.tier, event.step, event.ok) for event in events] == [("saver", 2, False), ("memory", 2, True)]
    assert "SIGKILL" in events[0].why
    tiers.close(over=True)
