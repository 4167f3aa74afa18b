"""Accounts close exactly, whatever is put into them, and subtract at the finest level both sides know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.account.account import Account, NotClosed, over_ranks, sum_accounts
from headway.account.tree import RUN, STEP, UNACCOUNTED
from headway.account.whole_run import SessionTime, whole_run


@st.composite
def step_accounts(draw: st.DrawFn) -> Account:
    parts: dict[str, int] = {}
    for top in STEP.tops():
        if top == UNACCOUNTED:
            continue
        children = STEP.children(top)
        whole = draw(st.booleans()) if children else True
        for path in (top,) if whole else children:
            if draw(st.booleans()):
                parts[path] = draw(st.integers(0, 10**12))
    return Account.close(STEP, sum(parts.values()) + draw(st.integers(0, 10**12)), parts)


@given(step_accounts())
def test_parts_sum_to_the_wall_clock(account: Account) -> None:
    assert sum(account.parts.values()) == account.wall_ns
    assert sum(account.total(top) for top in STEP.tops()) == account.wall_ns
    assert Account.from_dict(account.to_dict()) == account


@given(step_accounts(), step_accounts())
def test_a_difference_adds_up(left: Account, right: Account) -> None:
    rows = left - right
    assert sum(row.delta_ns for row in rows) == left.wall_ns - right.wall_ns
    assert len({row.path for row in rows}) == len(rows)


@given(st.lists(step_accounts(), min_size=1, max_size=5))
def test_a_sum_is_closed_and_keeps_every_nanosecond(accounts: list[Account]) -> None:
    total = sum_accounts(accounts)
    assert total.wall_ns == sum(item.wall_ns for item in accounts)
    for top in STEP.tops():
        assert total.total(top) == sum(item.total(top) for item in accounts)


def test_time_counted_twice_is_refused() -> None:
    with pytest.raises(NotClosed, match="exceed the wall clock by 1 ns"):
        Account.close(STEP, 10, {"data": 6, "copy": 5})
    with pytest.raises(NotClosed, match="count twice"):
        Account.close(STEP, 10, {"compute": 3, "compute.loss": 2})
    with pytest.raises(NotClosed):
        Account.close(STEP, 10, {"data": -1})


def test_a_planted_gap_in_a_closed_account_is_caught() -> None:
    good = Account.close(STEP, 10, {"data": 6})
    with pytest.raises(NotClosed, match="sum to 9"):
        Account(STEP, 10, {**good.parts, "data": 5})


def test_unknown_categories_are_refused() -> None:
    with pytest.raises(KeyError, match="lunch"):
        Account.close(STEP, 10, {"lunch": 1})
    with pytest.raises(KeyError):
        Account.close(RUN, 10, {"compute.forward": 1})
    with pytest.raises(ValueError, match="cannot be subtracted"):
        _ = Account.close(STEP, 1, {}) - Account.close(RUN, 1, {})


def test_unseen_is_not_zero() -> None:
    coarse = Account.close(STEP, 100, {"compute": 80})
    fine = Account.close(STEP, 90, {"compute.forward": 30, "compute.backward": 50, "data": 0})
    rows = {row.path: row for row in coarse - fine}
    assert rows["compute"].delta_ns == 0 and rows["compute"].seen_by_both
    assert not rows["data"].seen_by_both
    assert not fine.sees("copy") and fine.sees("data")


def test_over_ranks_names_the_slowest() -> None:
    rows = {row.path: row for row in over_ranks({r: Account.close(STEP, 100 + r, {"data": 10 * r}) for r in range(4)})}
    assert rows["data"].slowest_rank == 3 and rows["data"].mean_ns == 15 and rows["data"].spread == 2.0
    assert rows["wall"].slowest_ns == 103


def test_lost_steps_become_rework_and_nothing_vanishes() -> None:
    first = SessionTime({"productive": 100, "startup.model": 10, UNACCOUNTED: 5}, lost_ns=30)
    second = SessionTime({"productive": 50, UNACCOUNTED: 0})
    total = whole_run([first, second])
    assert total is not None and total.wall_ns == 165
    assert total.total("productive") == 120 and total.total("rework") == 30
