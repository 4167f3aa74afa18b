"""What saves say, and when the next one is due after one that went wrong."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from headway.account.errors import Stopped
from headway.config.checkpoint import CheckpointConfig
from headway.guard.control import Control
from headway.guard.layout import CheckpointFailed
from headway.guard.tiers import Event
from headway.train.cadence import FIRST_STEPS, YOUNG_S, Cadence
from headway.train.saves import Saves, Snapshot


def test_what_could_not_be_removed_is_said_once() -> None:
    said, nothing = list[str](), Any
    saves = Saves(CheckpointConfig(), nothing, nothing, said.append, nothing, lambda: 0.0)  # type: ignore[arg-type]
    for why in ("step-92: holds foreign files (a)", "step-92: holds foreign files (a)", "step-96: busy"):
        saves._failed(Event("prune", 96, False, why))
    assert len(said) == 2 and "step-92" in said[0] and "step-96" in said[1]


class Tiers:
    """Found out with the first save that there can be none beside the training (`off`), or that none succeeds."""

    def __init__(self, off: str, finds: str, saves: bool) -> None:
        self.off, self._finds, self._saves = off, finds, saves
        self.saver = SimpleNamespace(busy=False)
        self.blocked: list[int] = []

    def save(self, *_: Any, **__: Any) -> bool:
        self.off = self._finds
        raise CheckpointFailed(self._finds or "no space left")

    def save_now(self, step: int, *_: Any, **__: Any) -> list[Event]:
        self.blocked.append(step)
        if not self._saves:
            raise CheckpointFailed("no space left")
        time.sleep(0.01)
        return [Event("disk", step, True)]


@pytest.mark.parametrize(
    ("off", "finds", "saves"),
    [("", "8-bit", True), ("no shared memory", "", True), ("no shared memory", "", False), ("", "", True)],
    ids=["found late", "from the start", "and it fails", "it fails in memory"],
)
def test_a_save_that_goes_wrong_leaves_no_step_at_which_the_next_is_due_at_once(
    off: str, finds: str, saves: bool
) -> None:
    told: list[Any] = []
    reporter: Any = SimpleNamespace(session=1, tell=told.append, incident=lambda *what: None)
    every: Any = {"disk": "auto", "memory": "auto", "remote": None}
    cadence = Cadence(every, gpus=1, failures=0, device_s=0.0, control=Control(None), say=lambda line: None)
    tiers = Tiers(off, finds, saves)
    config = CheckpointConfig(every="auto", max_failures=None)
    made: Any = Saves(config, tiers, reporter, lambda line: None, cadence, lambda: 2 * YOUNG_S)  # type: ignore[arg-type]
    due = []
    for step in range(1, 121):
        made.step(0.001)
        if made.is_due(step):
            due.append(step)
            made.begin(step, lambda: Snapshot({}, frozenset(), {}, {}))
    always, often = list(range(FIRST_STEPS, 121, FIRST_STEPS)), [FIRST_STEPS, 5 * FIRST_STEPS]
    assert tiers.blocked == (often if saves else always), "at first so often; where a save tells its cost, as that pays"
    assert due == (tiers.blocked if off or finds else always), "memory, where it may have room the next time"
    assert (every["memory"] is None) is bool(off or finds)
    assert not saves or all(line.cost_s >= 0.01 for line in told), "what it blocked is its cost"


def test_a_save_that_memory_has_no_room_for_counts_when_the_disk_fails_too() -> None:
    """8 of 8 failed, max_failures was 5, and the run trained on: they counted as the memory's."""
    told: list[tuple[Any, ...]] = []
    reporter: Any = SimpleNamespace(session=1, tell=told.append, incident=lambda *what: told.append(what))
    every: Any = {"disk": 1, "memory": 1, "remote": None}
    cadence = Cadence(every, gpus=1, failures=0, device_s=0.0, control=Control(None), say=lambda line: None)
    config = CheckpointConfig(every=1, max_failures=2)
    made: Any = Saves(config, Tiers("", "", False), reporter, told.append, cadence, lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(Stopped, match="more than 2 saves in a row failed"):
        for step in range(1, 9):
            assert made.is_due(step)
            made.begin(step, lambda: Snapshot({}, frozenset(), {}, {}))
    assert step == 4
    assert told[0][2:] == ("memory: no space left", "the disk's was written while training waited")
    assert told[1][2:] == ("no space left", "went on without it")
