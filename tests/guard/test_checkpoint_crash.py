"""Killed with SIGKILL at every moment of a save: what was committed loads, what was not is ignored and swept."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import get_args

import pytest
import torch
from guard_helpers import full, run_ranks, same, snapshot, tiny_model, tiny_optimizer, train

from headway.guard.checkpoint import CheckpointStore
from headway.guard.crash import VARIABLE, Phase, crash_point
from headway.guard.training_state import capture, restore

PHASES = ["before-write", "mid-write", "before-manifest", "before-publish", "after-publish"]  # of a save that blocks
assert set(PHASES) < set(get_args(Phase))


def train_and_save(rank: int, root: Path, kind: str, dying_rank: int, phase: str, results: Path) -> None:
    """Steps 1–2, save, steps 3–4, save (killed on `dying_rank` at `phase`), step 5."""
    model = tiny_model(0, kind)
    optimizer = tiny_optimizer(model)
    store = CheckpointStore(root, "run-a")
    store.sweep()
    for step in (2, 4):
        train(model, optimizer, 2, step - 2)
        if rank == dying_rank and step == 4:
            os.environ[VARIABLE] = f"{phase}@4"
        if step == 4 and kind == "plain":
            torch.save(snapshot(model, optimizer), results)
        store.save(step, capture(model, [optimizer]), {"step": step}, {"rng": torch.get_rng_state()})
    train(model, optimizer, 1, 4)


def test_unknown_phases_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "before-lunch")
    with pytest.raises(ValueError, match="before-lunch"):
        crash_point("before-write", 1)
    monkeypatch.setenv(VARIABLE, "before-write@7")
    crash_point("before-write", 8)  # another step: alive


@pytest.mark.parametrize("phase", PHASES)
def test_one_process_killed_at_each_phase(tmp_path: Path, phase: str) -> None:
    root, results = tmp_path / "checkpoints", tmp_path / "results"
    outcome = run_ranks(1, train_and_save, root, "plain", 0, phase, results)[0]
    assert outcome.code == -signal.SIGKILL, outcome.error
    committed = 4 if phase == "after-publish" else 2
    store = CheckpointStore(root, "run-a")
    ref = store.newest_verified()
    assert ref is not None and ref.step == committed and ref.rejected == ()  # a partial one is not even a candidate
    partial = [entry.name for entry in root.iterdir() if entry.name.startswith(".partial-")]
    assert len(partial) == (0 if committed == 4 else 1)
    if phase == "mid-write":  # the kill really came in the middle of the shard
        assert (root / partial[0] / "__0_0.distcp").exists() and not (root / partial[0] / ".metadata").exists()
    assert store.sweep().removed == partial
    model, other = tiny_model(1), tiny_model(0)
    optimizer, other_optimizer = tiny_optimizer(model), tiny_optimizer(other)
    assert restore(store, ref, model, [optimizer]).meta == {"step": committed}
    train(other, other_optimizer, committed)
    assert same(snapshot(model, optimizer), snapshot(other, other_optimizer)) == []
    if committed == 4:
        assert same(torch.load(results, weights_only=False), snapshot(model, optimizer)) == []
    # And the next save, after the kill, takes a name that was never used.
    generation = store.save(5, capture(model, [optimizer]), {}, {}).generation
    assert generation == (3 if committed == 4 else 2)  # the swept folder's writer is dead: its number is free
    assert store.newest_verified().step == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("phase", ["mid-write", "before-manifest", "before-publish"])
def test_one_of_two_ranks_killed(tmp_path: Path, phase: str) -> None:
    dying = 1 if phase == "mid-write" else 0  # rank 1 has no part in publishing
    root = tmp_path / "checkpoints"
    outcomes = run_ranks(2, train_and_save, root, "fsdp", dying, phase, tmp_path / "none")
    assert outcomes[dying].code == -signal.SIGKILL, outcomes[dying].error
    survivor = outcomes[1 - dying]
    # A dead rank is not a failed save: the survivor ends with the collective's error, it does not train on alone.
    assert survivor.code == 1 and "\nRuntimeError: " in survivor.error, survivor.error
    assert "\nheadway.guard.layout.CheckpointFailed: " not in survivor.error, survivor.error
    store = CheckpointStore(root, "run-a")
    ref = store.newest_verified()
    assert ref is not None and ref.step == 2
    model, other = tiny_model(1), tiny_model(0)
    optimizer, other_optimizer = tiny_optimizer(model), tiny_optimizer(other)
    restore(store, ref, model, [optimizer])
    train(other, other_optimizer, ref.step)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(full(one), full(two), atol=1e-6)  # sums in another order than two ranks
    store.sweep()
    assert [entry.name for entry in root.iterdir() if entry.name.startswith(".")] == []
