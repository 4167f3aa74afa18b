"""What dead runs left in shared memory goes when another run starts; what may still be taken up stays."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from guard_helpers import tiny_model, tiny_optimizer, train

from headway.guard.checkpoint import CheckpointStore
from headway.guard.memory import SHARED_MEMORY, Owner, memory_root, sweep_abandoned
from headway.guard.tiers import Tiers
from headway.guard.training_state import capture

DAY_S = 24 * 3600.0


def left(folder: Path, run_id: str) -> Path:
    """A dead run's memory, its run folder still there."""
    folder.mkdir(parents=True)
    (folder / "run_id.json").write_text(f'{{"run_id": "{run_id}"}}')
    claim = memory_root(run_id, folder)
    assert claim is not None
    root = claim.root
    Owner(root, folder, run_id).release(remove=False)
    return root


def test_a_start_frees_what_dead_runs_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY, str(tmp_path))
    gone, kept = left(tmp_path / "gone", "gone"), left(tmp_path / "kept", "kept")
    shutil.rmtree(tmp_path / "gone")
    tiers = Tiers(CheckpointStore(tmp_path / "new" / "checkpoints", "new"), tmp_path / "new")
    assert not gone.exists() and kept.exists(), "a run that was only killed may be taken up again"
    tiers.close(over=True)


def test_a_day_counts_from_the_last_save_and_the_living_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_MEMORY, str(tmp_path))
    root = left(tmp_path / "run", "run")
    long_ago = time.time() - 3 * DAY_S
    os.utime(root / "owner.json", (long_ago, long_ago))  # it ran for three days, and was killed a minute ago
    assert sweep_abandoned() == [] and root.exists()
    lives = Owner(root, tmp_path / "run", "run")
    assert sweep_abandoned(now=time.time() + 9 * DAY_S) == []
    lives.release(remove=False)
    assert sweep_abandoned(now=time.time() + 9 * DAY_S) == [root.name] and not root.exists()


def claimed(run_id: str, folder: Path) -> Path:
    """The memory of the run in `folder`, as a start that is killed leaves it."""
    claim = memory_root(run_id, folder)
    assert claim is not None
    Owner(claim.root, folder, run_id).release(remove=False)
    return claim.root


def test_a_copied_run_folder_has_a_memory_of_its_own_and_a_moved_one_keeps_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy went on from the other folder's state, and deleted it at its end: both have one run id."""
    monkeypatch.setenv(SHARED_MEMORY, str(tmp_path))
    first, copy, away = tmp_path / "v0", tmp_path / "v1", tmp_path / "v2"
    ours = left(first, "run")
    shutil.copytree(first, copy)
    claim = memory_root("run", copy)
    assert claim is not None and claim.root != ours and not claim.root.exists()
    assert f"those of {first}, which has the same run id, are not this folder's" in claim.why
    theirs = claimed("run", copy)
    assert claimed("run", copy) == theirs == claim.root and claimed("run", first) == ours, "each finds its own again"
    (tmp_path / "link").symlink_to(first)
    assert claimed("run", tmp_path / "link") == ours
    for before, memory in ((first, ours), (copy, theirs)):
        before.rename(away)
        moved = memory_root("run", away)
        assert moved is not None and moved.root == memory and f"those of {before}, which is gone" in moved.why
        away.rename(before)
    lives = Owner(ours, first, "run")
    with pytest.raises(BlockingIOError, match=f"a process that trains {first} holds"):
        Owner(ours, first, "run")
    lives.release(remove=True)
    assert memory_root("run", first).root == ours and memory_root("run", copy).root == theirs  # type: ignore[union-attr]


def test_a_copy_of_a_run_goes_on_from_its_own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY, str(tmp_path))
    model = tiny_model()
    optimizer = tiny_optimizer(model)

    def start(name: str) -> Tiers:
        return Tiers(CheckpointStore(tmp_path / name / "checkpoints", "run"), tmp_path / name)

    def save(tiers: Tiers, step: int) -> None:
        train(model, optimizer, 1)
        assert tiers.save(step, capture(model, [optimizer]), {}, {}, disk=step == 1) and tiers.settle(60)
        assert all(event.ok for event in tiers.poll())

    (tmp_path / "v0").mkdir()
    (tmp_path / "v0" / "run_id.json").write_text('{"run_id": "run"}')
    one = start("v0")
    save(one, 1)
    shutil.copytree(tmp_path / "v0", tmp_path / "v1")
    save(one, 2)  # in memory only
    two = start("v1")
    assert two.off == "" and len(two.notes) == 1, "both run at once"
    assert two.newest().ref.step == 1 and one.newest().ref.step == 2  # type: ignore[union-attr]
    save(two, 3)
    two.close(over=True)
    assert one.newest().ref.step == 2 and one.notes == [], "its end takes nothing of the other's"  # type: ignore[union-attr]
    one.close(over=True)
    assert not list(tmp_path.glob("headway-*"))
