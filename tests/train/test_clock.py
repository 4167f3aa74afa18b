"""The step clock closes every step exactly and gives time to the right name."""

from __future__ import annotations

import time

import pytest

from headway.account.tree import UNACCOUNTED
from headway.train.clock import StepClock


def busy(ms: float) -> None:
    end = time.monotonic_ns() + int(ms * 1e6)
    while time.monotonic_ns() < end:
        pass


def test_nested_phases_interrupt_each_other_and_gaps_stay_unaccounted() -> None:
    clock = StepClock("cpu")
    clock.begin_step()
    with clock.phase("compute.backward"):
        busy(4)
        with clock.phase("comm.dp"):
            busy(6)
        busy(4)
    busy(5)
    clock.begin_step()
    closed = clock.take()
    assert closed.account.wall_ns == sum(closed.account.parts.values())
    parts = closed.account.parts
    assert parts["compute.backward"] >= 8e6 and parts["comm.dp"] >= 6e6 and parts[UNACCOUNTED] >= 5e6
    with pytest.raises(IndexError):
        clock.take()  # the second step is still open


def test_an_exception_inside_a_phase_leaves_the_clock_usable() -> None:
    clock = StepClock("cpu")
    clock.begin_step()
    with pytest.raises(RuntimeError), clock.phase("data"):
        raise RuntimeError
    with clock.phase("compute.forward"):
        pass
    clock.end_step()
    closed = clock.take()
    assert set(closed.account.parts) == {"data", "compute.forward", UNACCOUNTED}


def test_steps_touch_so_that_nothing_falls_between_them() -> None:
    clock = StepClock("cpu")
    start = time.monotonic_ns()
    for _ in range(5):
        clock.begin_step()
        with clock.phase("data"):
            busy(1)
        busy(1)
    clock.end_step()
    wall = time.monotonic_ns() - start
    total = sum(clock.take().account.wall_ns for _ in range(5))
    # What lies between two steps is one mark; a planted gap of a millisecond a step would fail here.
    assert 0 <= wall - total < 1e6


def test_a_planted_misspelt_category_is_caught() -> None:
    clock = StepClock("cpu")
    clock.begin_step()
    with pytest.raises(KeyError, match=r"compute\.foward"), clock.phase("compute.foward"):
        pass


def test_between_steps_nothing_is_measured() -> None:
    clock = StepClock("cpu")
    with clock.phase("data"):
        busy(1)
    with pytest.raises(IndexError):
        clock.take()
