"""When saves are due: by number of steps, or as often as pays by what saves were seen to cost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headway.guard.control import Control
from headway.train.cadence import FIRST_STEPS, Cadence


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
