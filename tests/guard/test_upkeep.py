"""Sweeping and pruning: what is ours and dead goes, everything else stays, and is counted."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_helpers import run_ranks

from headway.guard import contents, direct, layout
from headway.guard.checkpoint import CheckpointRef, CheckpointStore
from headway.guard.direct import hash_by_steps


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", "run-a")


def save(store: CheckpointStore, step: int) -> CheckpointRef:
    return store.save(step, {"model": {"w": torch.full((3,), float(step))}}, {}, {})


def damage(ref: CheckpointRef) -> None:
    """A flipped bit: the size stays right, only the hash tells."""
    path = ref.path / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def names(store: CheckpointStore) -> list[str]:
    return sorted(entry.name for entry in store.root.iterdir())


def partial(store: CheckpointStore, run_id: str, generation: int) -> Path:
    path = layout.work_path(store.root, layout.PARTIAL, layout.published_name(5, generation), run_id)
    path.mkdir(parents=True)
    (path / layout.WRITER_FILE).write_text("{}")
    (path / "__0_0.distcp").write_bytes(b"half")
    return path


def test_sweep_takes_only_this_runs_dead_folders(store: CheckpointStore) -> None:
    kept = save(store, 1)
    dead, empty = partial(store, "run-a", 7), partial(store, "run-a", 8)
    for entry in empty.iterdir():
        entry.unlink()  # killed before it could write its name
    other, prefix = partial(store, "run-b", 9), partial(store, "run-a2", 10)
    foreign = [store.root / ".partial-notes", store.root / "best", store.root / ".partial-step-1.g1-run-a"]
    for path in foreign:
        path.mkdir()
    (store.root / ".partial-step-00000005.g0011-run-a").write_text("a file")
    (store.root / ".partial-step-00000005.g0012-run-a").symlink_to(kept.path)
    done = store.sweep()
    assert sorted(done.removed) == sorted([dead.name, empty.name]) and done.left == []
    assert set(names(store)) == {kept.name, other.name, prefix.name, *(path.name for path in foreign)} | {
        ".partial-step-00000005.g0011-run-a",
        ".partial-step-00000005.g0012-run-a",
    }
    assert store.verify(kept) == []


def test_sweep_leaves_a_living_writer_and_takes_it_once_dead(store: CheckpointStore) -> None:
    path = partial(store, "run-a", 3)
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print('held', flush=True); input()"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, path / layout.WRITER_FILE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None and writer.stdin is not None
    assert writer.stdout.readline() == b"held\n"
    done = store.sweep()
    assert done.removed == [] and "a process is writing or reading it" in done.left[0] and path.exists()
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdin.close()
    writer.stdout.close()
    assert store.sweep().removed == [path.name] and not path.exists()


def test_sweep_does_not_guess_without_locks(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = partial(store, "run-a", 3)

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert "cannot be told" in store.sweep().left[0] and path.exists()
    assert save(store, 9).step == 9  # but saving goes on


def test_prune_keeps_the_last_and_every_mth(store: CheckpointStore) -> None:
    refs = [save(store, step) for step in range(1, 8)]
    done = store.prune(keep_last=2, keep_every=3)
    assert names(store) == [refs[i].name for i in (2, 5, 6)]
    assert sorted(done.removed) == [refs[i].name for i in (0, 1, 3, 4)] and done.left == []
    assert store.prune(keep_last=2, keep_every=3).removed == []
    with pytest.raises(ValueError, match="keep_last"):
        store.prune(0)


def test_prune_keeps_the_newest_that_is_proved_sound(store: CheckpointStore) -> None:
    """A spike seen at step 139 may have been in the checkpoint of 138: the last one before it must be there."""
    for step in (100, 110, 120, 137, 138):
        save(store, step)
    store.prune(keep_last=1, proven=115)
    assert [int(name[5:13]) for name in names(store)] == [110, 138]
    store.prune(keep_last=1, proven=138)
    assert [int(name[5:13]) for name in names(store)] == [138]


def test_a_damaged_one_is_neither_the_last_nor_the_proved_one(store: CheckpointStore) -> None:
    refs = {step: save(store, step) for step in (90, 100, 110, 136, 137, 138)}
    for step in (110, 138):
        damage(refs[step])
    done = CheckpointStore(store.root, "run-a").prune(keep_last=1, proven=115)
    assert [int(name[5:13]) for name in names(store)] == [100, 110, 137, 138]
    assert [text.partition(":")[0] for text in done.left] == [refs[110].name, refs[138].name]
    assert done.removed == [refs[90].name, refs[136].name]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that pruning reads, in order."""
    found: list[Path] = []

    def noted(path: Path, kind: str) -> Any:
        found.append(path)
        return hash_by_steps(path, kind)

    monkeypatch.setattr(contents, "hash_by_steps", noted)
    return found


def test_what_this_process_has_written_is_not_read_again_before_it_goes(
    store: CheckpointStore, read: list[Path]
) -> None:
    refs = [save(store, step) for step in range(1, 6)]
    assert store.prune(keep_last=2).removed == [ref.name for ref in refs[:3]] and read == []
    damage(refs[3])
    os.utime(refs[3].path / "__0_0.distcp", (1, 1))  # some other time, however coarse the clock
    assert "damaged" in store.prune(keep_last=1).left[0], "planted: a file that was touched since is read"
    assert {path.parent for path in read} == {refs[3].path}


def test_what_another_process_has_written_is_read_once_and_goes_on_where_it_was_left(
    store: CheckpointStore, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [save(store, step) for step in range(1, 4)]
    other = CheckpointStore(store.root, "run-a")
    done = other.prune(keep_last=1, read_s=0)
    assert (done.removed, done.left, done.unread, read) == ([], [], True, []), "not known, so they stay"
    now = iter(range(1_000_000))
    monkeypatch.setattr(contents.time, "monotonic", lambda: next(now))  # every look at it is a second later
    monkeypatch.setattr(direct, "_READ", 512)
    rounds = 0
    while done.unread:
        done = other.prune(keep_last=1, read_s=4)
        rounds += 1
    assert rounds > 3 and names(store) == [refs[2].name]
    assert len(read) == len(set(read)) and {path.parent for path in read} == {ref.path for ref in refs}


def test_where_room_is_needed_only_what_stays_is_read(store: CheckpointStore, read: list[Path]) -> None:
    refs = [save(store, step) for step in range(1, 5)]
    damage(refs[3])
    done = CheckpointStore(store.root, "run-a").prune(keep_last=1, unread=True)
    assert done.removed == [ref.name for ref in refs[:2]] and done.left[0].startswith(refs[3].name)
    assert {path.parent for path in read} == {refs[2].path, refs[3].path}


def test_prune_never_deletes_the_newest_verified(store: CheckpointStore) -> None:
    refs = [save(store, step) for step in range(1, 5)]
    for ref in refs[1:]:
        damage(ref)
    done = CheckpointStore(store.root, "run-a").prune(keep_last=1)
    assert names(store) == [ref.name for ref in refs], "the damaged ones stay, too: sizes alone would not have told"
    assert [text.partition(":")[0] for text in done.left] == [ref.name for ref in refs[1:]]
    assert all("content is damaged" in text for text in done.left) and done.removed == []
    newer = save(store, 5)
    assert CheckpointStore(store.root, "run-a").prune(keep_last=1).removed == [refs[0].name]
    assert newer.name in names(store) and {ref.name for ref in refs[1:]} < set(names(store))


def test_prune_deletes_nothing_while_nothing_verifies(store: CheckpointStore) -> None:
    refs = [save(store, step) for step in range(1, 4)]
    for ref in refs:
        damage(ref)
    done = CheckpointStore(store.root, "run-a").prune(keep_last=1)
    assert names(store) == [ref.name for ref in refs] and len(done.left) == 3


def test_prune_leaves_what_is_not_certainly_ours(store: CheckpointStore) -> None:
    refs = [save(store, step) for step in range(1, 8)]
    theirs = save(CheckpointStore(store.root, "run-b"), 8)
    (refs[0].path / "notes.txt").write_text("mine")
    (refs[1].path / "manifest.json").unlink()
    os.truncate(refs[2].path / "values.pt", 1)
    (store.root / "step-final").mkdir()
    with layout.in_use(refs[3].path):
        done = store.prune(keep_last=1)
    assert sorted(done.removed) == [refs[4].name, refs[5].name]
    left = {line.partition(":")[0]: line for line in done.left}
    assert left.keys() == {ref.name for ref in refs[:4]}
    assert "notes.txt" in left[refs[0].name] and "missing" in left[refs[1].name] and "bytes" in left[refs[2].name]
    assert "reading" in left[refs[3].name]
    assert set(names(store)) == {ref.name for ref in refs[:4]} | {refs[6].name, theirs.name, "step-final"}
    assert (refs[0].path / "notes.txt").read_text() == "mine"


def test_one_failed_deletion_does_not_stop_the_others(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [save(store, step) for step in range(1, 5)]
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path == refs[1].path:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    done = store.prune(keep_last=1)
    assert sorted(done.removed) == [refs[0].name, refs[2].name]
    assert len(done.left) == 1 and refs[1].name in done.left[0] and "Permission denied" in done.left[0]


def _prune(rank: int, root: Path) -> None:
    CheckpointStore(root, "run-a").prune(keep_last=1)


def test_killed_while_pruning_leaves_no_half_checkpoint(store: CheckpointStore) -> None:
    refs = [save(store, step) for step in range(1, 4)]
    outcome = run_ranks(1, _prune, store.root, env={"HEADWAY_CRASH_AT": "mid-prune"})[0]
    assert outcome.code == -signal.SIGKILL
    assert [info.ref for info in store.list(verify=True) if info.verified] == refs[1:]
    trash = f".trash-{refs[0].name}-run-a"
    assert trash in names(store)
    assert store.sweep().removed == [trash]
    assert names(store) == [ref.name for ref in refs[1:]]


def test_no_file_stays_open(store: CheckpointStore) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    save(store, 0)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(1, 6):
        save(store, step)
        store.prune(keep_last=2)
        store.load(store.list()[-1].ref, {"model": {"w": torch.zeros(3)}})
    assert len(names(store)) == 2 and len(os.listdir("/proc/self/fd")) == before
