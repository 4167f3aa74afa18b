"""What dead runs left in shared memory goes when another run starts; what may still be taken up stays."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from headway.guard.checkpoint import CheckpointStore
from headway.guard.memory import SHARED_MEMORY, Owner, memory_root, sweep_abandoned
from headway.guard.tiers import Tiers

DAY_S = 24 * 3600.0


def left(folder: Path, run_id: str) -> Path:
    """A dead run's memory, its run folder still there."""
    folder.mkdir(parents=True)
    (folder / "run_id.json").write_text(f'{{"run_id": "{run_id}"}}')
    root = memory_root(run_id)
    assert root is not None
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
