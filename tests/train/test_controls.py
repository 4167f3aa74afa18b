"""Batches known to be clean: what they say of a state, and what is known of them after going back."""

from __future__ import annotations

import math

from headway.data.global_batch import Position
from headway.guard.spikes.figures import Figures
from headway.train.controls import Control, Controls

CLEAN = Control(7, Position(0, 40), 5.0, math.log(2.0))


def test_a_state_without_a_gradient_is_not_sound() -> None:
    """Weights that came back all zero: every token costs ln V, and nothing moves."""
    assert CLEAN.is_normal(Figures(7, nll=4.9, grad_norm=1.9, finite=True))
    assert not CLEAN.is_normal(Figures(7, nll=4.9, grad_norm=0.0, finite=True))
    assert not CLEAN.is_normal(Figures(7, nll=5.1, grad_norm=1.9, finite=True))
    assert not CLEAN.is_normal(Figures(7, nll=math.nan, grad_norm=math.nan, finite=False))


def test_after_going_back_only_what_that_checkpoint_knew_is_known() -> None:
    """Later batches kept to later, lower limits: by them an older sound state would look harmed, and be deleted."""
    saved = Controls("data")
    saved.kept.append(CLEAN)
    controls = Controls("data")
    controls.kept.append(Control(90, Position(0, 500), 2.0, -1.0))
    controls.load(saved.state())
    assert list(controls.kept) == [CLEAN]
    for state in (None, saved.state() | {"data": "other"}):
        controls.load(saved.state())
        controls.load(state)
        assert not controls.kept
