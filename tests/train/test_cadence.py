"""When saves are due: by number of steps, or as often as pays by what saves were seen to cost."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config.checkpoint import CheckpointConfig, RemoteConfig
from headway.guard.control import Control
from headway.train import places
from headway.train.cadence import FIRST_STEPS, SPIKES_A_STEP, YOUNG_S, Cadence
from headway.train.places import no_room


def cadence(said: list[str], **every: Any) -> Cadence:
    return Cadence(every, gpus=1000, failures=0, device_s=0.0, control=Control(None), say=said.append)


def run(found: Cadence, steps: int, step_s: float, cost_s: float, lag_steps: int = 3) -> list[int]:
    """Steps at which the disk was saved; a save blocks half of `cost_s` and slows steps for the rest."""
    saved: list[int] = []
    saving = 0
    for step in range(1, steps + 1):
        found.meter.step(step_s + (cost_s / 2 / lag_steps if saving else 0.0), bool(saving))
        if saving:
            saving -= 1
            if not saving:
                found.meter.published("disk", lag_steps * step_s)
        elif "disk" in found.due(step):
            found.meter.begun(cost_s / 2)
            found.decide(step, {"disk"}, step * step_s)
            saved.append(step)
            saving = lag_steps
    return saved


def test_numbers_are_kept_to() -> None:
    found = cadence([], disk=4, memory=3, remote=None)
    assert [sorted(found.due(step)) for step in (3, 4, 5, 12)] == [["memory"], ["disk"], [], ["disk", "memory"]]


@pytest.mark.parametrize("cost_s", [0.2, 5.0])
def test_auto_finds_the_interval_from_the_whole_cost_and_says_why(cost_s: float) -> None:
    said: list[str] = []
    found = cadence(said, disk="auto", memory=None, remote=None)
    saved = run(found, 6000, 2.0, cost_s)
    assert saved[0] == FIRST_STEPS, "the first comes early: it tells what a save costs"
    assert found.meter.of("disk").cost_s == pytest.approx(cost_s, rel=0.01), "the slower steps count, too"  # type: ignore[union-attr]
    assert found.advice is not None
    last = saved[-1] - saved[-2]
    assert last == pytest.approx(found.advice.steps["disk"], rel=0.02)
    assert any("Young" in line and "exact" in line for line in said)
    assert "no failure yet" in said[0]
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert all(after <= 4 * before for before, after in itertools.pairwise(gaps)), "it grows by degrees"


def test_auto_adapts_when_saves_become_dear() -> None:
    found = cadence([], disk="auto", memory=None, remote=None)
    cheap = run(found, 4000, 2.0, 0.1)
    for cost in list(found.meter.costs["disk"]):
        found.meter.costs["disk"].remove(cost)
    found.meter.costs["disk"].append(10.0)
    found.decide(5000, {"disk"}, 8000.0)
    found.decide(6000, {"disk"}, 8000.0)
    assert found._next["disk"] - 6000 > 3 * (cheap[-1] - cheap[-2])


def test_a_run_younger_than_a_minute_takes_no_memory_unasked() -> None:
    found = cadence([], disk=None, memory="auto", remote=None)
    found.meter.step(0.5, False)
    assert not found.due(1) and found.due(FIRST_STEPS) == {"memory"}
    assert found.too_early(FIRST_STEPS, {"memory"}, lambda: 5.0) == {"memory"}
    later = FIRST_STEPS + round((YOUNG_S - 5.0) / 0.5)
    assert not found.due(later - 1) and found.due(later) == {"memory"}
    assert found.too_early(later, {"memory"}, lambda: YOUNG_S + 1.0) == set()
    asked_for = cadence([], disk=None, memory=4, remote=None)
    assert asked_for.too_early(4, {"memory"}, lambda: 1.0) == set()


def test_memory_checkpoints_are_as_frequent_as_spikes_ask_for() -> None:
    said: list[str] = []
    found = cadence(said, disk=None, memory="auto", remote=None)
    found.gpus, found.spikes = 1, SPIKES_A_STEP  # one card: a failure in years
    steps = [_measured(found, number) for number in range(1, 8)]
    assert steps[-1] == pytest.approx((2 * 0.1 / SPIKES_A_STEP) ** 0.5, rel=0.05)
    assert sum("for the sake of spikes" in line for line in said) == 1, "said once"
    without = cadence([], disk=None, memory="auto", remote=None)
    without.gpus = 1
    assert [_measured(without, number) for number in range(1, 8)][-1] > 1000, "planted: failures alone ask for hours"


@pytest.mark.parametrize("memory_every", [None, 50])
def test_what_spikes_ask_for_is_said_only_where_it_is_done(memory_every: int | None) -> None:
    """A save for the disk comes by the memory, so what a memory checkpoint costs is known without any."""
    said: list[str] = []
    found = cadence(said, disk="auto", memory=memory_every, remote=None)
    found.spikes = SPIKES_A_STEP
    found.meter.step(2.0, False)
    found.meter.begun(0.2)
    for tier in ("memory", "disk"):
        found.meter.published(tier, 3.0)
    found.decide(1000, {"disk"}, 1000.0)
    assert any("disk: every" in line for line in said) and not any("for the sake of spikes" in line for line in said)


def _measured(found: Cadence, number: int) -> int:
    """Another save of 0.2 s, steps being 2 s long; the interval after it."""
    found.meter.step(2.0, False)
    found.meter.begun(0.2)
    found.meter.published("memory", 3.0)
    found.decide(1000 * number, {"memory"}, 1000.0)
    return found._next["memory"] - 1000 * number


def test_memory_that_was_not_asked_for_is_at_most_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = SimpleNamespace(root=tmp_path)
    node = SimpleNamespace(
        memory=memory, off="", node_ranks=[0, 1], has_peers=False, disk=SimpleNamespace(control=Control(None))
    )
    monkeypatch.setattr(places, "free_on_host", lambda: 10e9)
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: SimpleNamespace(free=8e9))

    def why(size: float, to_come: float = 0.0, **more: Any) -> str:
        return no_room(CheckpointConfig(), SimpleNamespace(**{**vars(node), **more}), size, to_come, ranks=4)

    assert why(4e9) == "", "two rooms of this node's half: 4 of 8 GB"
    assert "4.10 GB would be more than half of the 8.00 GB" in why(4.1e9)
    assert "more than half of the 7.00 GB" in why(4e9, to_come=3e9), "the optimizer's state is not there yet"
    assert "6.00 GB" in why(4e9, has_peers=True), "and the neighbour's part"
    assert why(1.0, memory=None, off="no shared memory") == "no shared memory"


@pytest.mark.parametrize(("free", "small"), [(8.4e6, False), (8.3e6, True)])
def test_shared_memory_that_cannot_hold_two_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, small: bool
) -> None:
    """Docker's /dev/shm has 64 MB: no save beside the training ever had room there, and each was dropped."""
    tiers: Any = SimpleNamespace(
        memory=SimpleNamespace(root=tmp_path / "run"),
        off="",
        node_ranks=[0],
        has_peers=False,
        disk=SimpleNamespace(control=Control(None), root=tmp_path),
    )
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    config = CheckpointConfig(every=4, memory_every=3, remote=RemoteConfig(url="s3://bucket"))
    tiers.remote = SimpleNamespace(url="s3://bucket/run")
    tiers.off = places.too_small(config, tiers, 4.2e6, ranks=1)
    assert bool(tiers.off) is small
    told = places.describe(config, tiers, 3, 1_400_000, 2.8e6, ranks=1)
    assert "about 4.2 MB each: model 1.4 MB, optimizer 2.8 MB" in told[0]
    if small:
        assert f"saves block: 2 x 4.2 MB are needed in {tmp_path}, 8.3 MB are free" in told[1]
    else:
        assert "2 x 4.2 MB of 8.4 MB" in told[1]
    assert ("nothing is uploaded" in told[-1]) is small


def test_what_lies_in_memory_since_before_a_restart_counts_as_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is the run's own, and new ones come in its place: else a run that fitted does not after its first death."""
    tiers = SimpleNamespace(
        memory=SimpleNamespace(root=tmp_path),
        off="",
        node_ranks=[0],
        has_peers=False,
        disk=SimpleNamespace(control=Control(None), root=tmp_path),
        remote=SimpleNamespace(url="s3://bucket/run"),
    )
    monkeypatch.setattr(places, "free_on_host", lambda: 8e6)
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: SimpleNamespace(free=8e6))

    def fits(size: float) -> bool:
        return not no_room(CheckpointConfig(), tiers, size, 0.0, ranks=1)  # type: ignore[arg-type]

    assert fits(2e6) and not fits(2.5e6)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "shard").write_bytes(bytes(1 << 22))
    assert fits(2.5e6) and not fits(3.5e6)
    (tmp_path / ".whole").mkdir()
    (tmp_path / ".whole" / "shard").hardlink_to(tmp_path / "step-1" / "shard")
    assert not fits(3.5e6), "the same bytes under another name"


def test_a_run_says_how_much_its_checkpoints_may_take(tmp_path: Path) -> None:
    tiers = SimpleNamespace(
        memory=None, off="", disk=SimpleNamespace(root=tmp_path), remote=SimpleNamespace(url="s3://bucket/run")
    )
    config = CheckpointConfig(every=10, keep=1, remote=RemoteConfig(url="s3://bucket", keep=2))
    told = places.describe(config, tiers, None, 1_000_000_000, 2e9, ranks=1)  # type: ignore[arg-type]
    assert "up to 9.00 GB of" in told[-2], "the last, the one with 32 clean steps behind it, the one being written"
    assert "up to 12.00 GB in s3://bucket/run" in told[-1]
