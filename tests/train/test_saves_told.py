"""What saves say: of a checkpoint that cannot be removed once, however often pruning finds it."""

from __future__ import annotations

from typing import Any

from headway.config.checkpoint import CheckpointConfig
from headway.guard.tiers import Event
from headway.train.saves import Saves


def test_what_could_not_be_removed_is_said_once() -> None:
    said, nothing = list[str](), Any
    saves = Saves(CheckpointConfig(), nothing, nothing, said.append, nothing, lambda: 0.0)  # type: ignore[arg-type]
    for why in ("step-92: holds foreign files (a)", "step-92: holds foreign files (a)", "step-96: busy"):
        saves._failed(Event("prune", 96, False, why))
    assert len(said) == 2 and "step-92" in said[0] and "step-96" in said[1]
