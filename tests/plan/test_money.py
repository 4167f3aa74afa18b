"""Money: arithmetic by hand, and the decision views as properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.plan.cluster import load_cluster
from headway.plan.money import Option, cheapest_by, fastest_within, frontier, parse_duration, price_of, run_cost, worth

H100 = load_cluster("H100x1024")


def test_cost_by_hand() -> None:
    cost = run_cost(H100, step_s=10, tokens_per_step=4e6, tokens=4e12, ettr=0.9, trained_share=0.5, power_share=0.75)
    hours = 1e6 * 10 / 0.9 / 3600 * 1024
    assert cost.steps == 1e6
    assert cost.gpu_hours == pytest.approx(hours)
    assert cost.dollars == pytest.approx((hours * 1.99, hours * 2.95, hours * 6.88))
    assert cost.energy_kwh == pytest.approx(hours * 0.7 * 0.75)
    assert cost.dollars_per_million == pytest.approx(hours * 2.95 / 2e6)
    text = "\n".join(cost.lines())
    assert "aimultiple" in text and "75% of 700 W" in text and "50% of the tokens carry a label" in text


def test_a_given_price_replaces_the_band() -> None:
    price = price_of(replace(H100, price_per_hour=2.0))
    assert price is not None and (price.low, price.high, price.source) == (2.0, 2.0, "given")


def test_a_device_without_a_price_says_so() -> None:
    cost = run_cost(load_cluster("H800x8"), 1, 1e6, 1e9)
    assert cost.dollars is None and cost.dollars_per_million is None
    assert any("no price known" in line for line in cost.lines())


def test_what_a_point_of_mfu_is_worth() -> None:
    cost = run_cost(H100, 10, 4e6, 4e12)
    point, half = worth(cost, mfu=0.40, step_s=10, communication_s=2)
    assert point.days == pytest.approx(cost.wall_s / 86400 / 41)
    assert half.days == pytest.approx(cost.wall_s / 86400 / 10)
    assert point.dollars == pytest.approx(cost.dollars[1] / 41) if cost.dollars else False


options = st.lists(
    st.builds(
        Option,
        label=st.just(""),
        gpus=st.integers(8, 4096),
        wall_s=st.floats(1, 1e7),
        dollars=st.one_of(st.none(), st.floats(1, 1e9)),
    ),
    max_size=30,
)


@given(options)
def test_the_frontier_holds_no_option_that_another_beats(found: list[Option]) -> None:
    kept = frontier(found)
    for option in (o for o in found if o.dollars is not None):
        beaten = [k for k in kept if k.wall_s <= option.wall_s and k.dollars <= option.dollars]  # type: ignore[operator]
        assert beaten, "every option is on the frontier or beaten by one that is"
    for one in kept:
        assert not any(
            o.wall_s <= one.wall_s and o.dollars <= one.dollars and (o.wall_s, o.dollars) != (one.wall_s, one.dollars)  # type: ignore[operator]
            for o in found
            if o.dollars is not None
        )
    assert [o.wall_s for o in kept] == sorted(o.wall_s for o in kept)


@given(options, st.floats(1, 1e7), st.floats(1, 1e9))
def test_answers_to_a_date_and_a_budget_are_on_the_frontier(
    found: list[Option], deadline: float, budget: float
) -> None:
    cheap, fast = cheapest_by(found, deadline), fastest_within(found, budget)
    if cheap is not None:
        assert cheap.wall_s <= deadline and cheap in frontier(found)
    else:
        assert all(o.wall_s > deadline or o.dollars is None for o in found)
    if fast is not None:
        assert fast.dollars is not None and fast.dollars <= budget and fast in frontier(found)


def test_durations() -> None:
    assert parse_duration("30d") == 30 * 86400
    assert parse_duration("1.5h") == 5400
    for bad in ("30", "d", "-3d", "0h", "3y"):
        with pytest.raises(UserError, match="write a number and a unit"):
            parse_duration(bad)


@pytest.mark.parametrize(
    "wrong", [{"ettr": 0.0}, {"ettr": 1.2}, {"trained_share": 0.0}, {"power_share": -1.0}, {"tokens": 0.0}]
)
def test_impossible_shares_are_named(wrong: dict[str, float]) -> None:
    values = {"tokens": 1e9, **wrong}
    with pytest.raises(UserError):
        run_cost(H100, 1, 1e6, **values)
