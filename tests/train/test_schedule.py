"""The schedule is a pure function: its shape, its ends, and nothing else."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.train.schedule import Schedule


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(1, 500),
    st.integers(0, 100),
    st.integers(0, 100),
    st.floats(0, 1),
)
def test_stays_between_zero_and_one_and_never_rises_after_warm_up(
    kind: str, total: int, warmup: int, decay: int, low: float
) -> None:
    schedule = Schedule(kind, total, min(warmup, total), min(decay, total), low)
    factors = [schedule.factor(step) for step in range(total + 10)]
    assert all(0 <= f <= 1 + 1e-12 for f in factors)
    after = factors[schedule.warmup :]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(after))
    assert all(f >= low - 1e-12 for f in after)


def test_known_points() -> None:
    cosine = Schedule("cosine", total=110, warmup=10, min_ratio=0.1)
    assert cosine.factor(0) == pytest.approx(0.1) and cosine.factor(9) == 1.0 and cosine.factor(10) == 1.0
    assert cosine.factor(60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert cosine.factor(10_000) == pytest.approx(0.1)
    assert Schedule("linear", 100).factor(25) == pytest.approx(0.75)
    wsd = Schedule("wsd", total=100, warmup=5, decay=20)
    assert wsd.factor(79) == 1.0 and wsd.factor(90) == pytest.approx(0.5)
    assert cosine.factor(85) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 0.75)))


def test_no_step_of_the_run_is_wasted_at_zero() -> None:
    for kind in ("linear", "cosine", "wsd"):
        assert Schedule(kind, total=10, warmup=2, decay=5).factor(9) > 0
