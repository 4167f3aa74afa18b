"""Young, Daly and the exact optimum: against the definition, a slow search and each other's limits."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.account.checkpoint_interval import daly, exact, lambert_w0, young


@given(st.floats(min_value=-math.exp(-1) + 1e-12, max_value=1e12))
def test_lambert_w_solves_its_definition(x: float) -> None:
    w = lambert_w0(x)
    assert w >= -1
    assert w * math.exp(w) == pytest.approx(x, rel=1e-9, abs=1e-12)


def test_lambert_w_at_known_points() -> None:
    assert lambert_w0(0) == 0
    assert lambert_w0(1) == pytest.approx(0.5671432904097838)  # the omega constant
    assert lambert_w0(math.e) == pytest.approx(1)
    assert lambert_w0(-math.exp(-1)) == pytest.approx(-1, abs=1e-7)
    with pytest.raises(ValueError, match="below -1/e"):
        lambert_w0(-0.4)


costs = st.floats(min_value=1e-3, max_value=1e5)
mtbfs = st.floats(min_value=60, max_value=1e8)


def wall_per_second(interval: float, cost: float, mtbf: float) -> float:
    """Expected wall clock per second of training without recovery (Daly's complete model)."""
    return math.expm1((interval + cost) / mtbf) * mtbf / interval


@given(costs, mtbfs)
def test_the_exact_interval_is_a_minimum(cost: float, mtbf: float) -> None:
    if cost > 20 * mtbf:
        return
    best = exact(cost, mtbf)
    at_best = wall_per_second(best, cost, mtbf)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert wall_per_second(best * factor, cost, mtbf) >= at_best * (1 - 1e-12)


@given(costs, mtbfs)
def test_the_exact_interval_agrees_with_lambert_w(cost: float, mtbf: float) -> None:
    if not 1e-4 < cost / mtbf < 30:  # below, 1 + W loses the digits that exact() keeps
        return
    assert exact(cost, mtbf) == pytest.approx(mtbf * (1 + lambert_w0(-math.exp(-1 - cost / mtbf))), rel=1e-6)


@pytest.mark.parametrize("ratio", ["1e-12", "1e-8", "1e-4", "0.01", "0.3", "2"])
def test_the_exact_interval_against_forty_digits(ratio: str) -> None:
    getcontext().prec = 60
    r, low, high = Decimal(ratio), Decimal(0), Decimal(1) - Decimal(10) ** -50
    for _ in range(180):  # bisection of y + ln(1 - y) = -r, which falls from 0
        middle = (low + high) / 2
        low, high = (middle, high) if middle + (1 - middle).ln() > -r else (low, middle)
    assert exact(float(r), 1.0) == pytest.approx(float(low), rel=1e-13)


def test_young_and_daly_are_its_limits() -> None:
    assert young(60, 86400) == pytest.approx(math.sqrt(2 * 60 * 86400))
    assert exact(0.01, 1e8) == pytest.approx(young(0.01, 1e8), rel=1e-4)
    assert daly(300, 86400) == pytest.approx(exact(300, 86400), rel=1e-5)
    assert daly(500, 200) == 200  # a save that costs more than two MTBFs
    assert abs(daly(600, 6000) - exact(600, 6000)) < abs(young(600, 6000) - exact(600, 6000)) / 10


def test_daly_of_the_paper() -> None:
    # Daly 2006, figures 3 to 5: M = 24 h, 6 h, 15 min and a save of 5 min.
    assert daly(300, 24 * 3600) / 60 == pytest.approx(117, abs=0.6)
    assert daly(300, 6 * 3600) / 60 == pytest.approx(57, abs=0.6)
    assert daly(300, 15 * 60) / 60 == pytest.approx(9.1, abs=0.1)


def test_a_free_save_is_made_always() -> None:
    assert exact(0, 3600) == 0


@pytest.mark.parametrize(("cost", "mtbf"), [(-1, 10), (1, 0), (float("nan"), 1), (1, float("inf"))])
def test_bad_figures_are_named(cost: float, mtbf: float) -> None:
    for function in (young, daly, exact):
        with pytest.raises(ValueError, match="positive MTBF"):
            function(cost, mtbf)
