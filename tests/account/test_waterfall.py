"""The waterfall is closed and refuses figures that cannot be true."""

from __future__ import annotations

import pytest

from headway.account.account import Account
from headway.account.events import Flops
from headway.account.tree import RUN, STEP
from headway.account.waterfall import render, waterfall

S = 10**9


def make(peak: float | None, useful: int = 200) -> object:
    run = Account.close(RUN, 100 * S, {"startup.model": 10 * S, "productive": 80 * S, "checkpoint_stall": 5 * S})
    step = Account.close(STEP, 85 * S, {"compute.forward": 60 * S, "data": 10 * S, "checkpoint": 5 * S})
    return waterfall(run, step, Flops(useful=useful, padding=50, recompute=50), peak)


@pytest.mark.parametrize("peak", [10.0, None])
def test_losses_and_useful_sum_to_the_top(peak: float | None) -> None:
    fall = make(peak)
    assert sum(row.share for row in fall.rows[1:]) == pytest.approx(1.0, abs=1e-12)
    assert fall.rows[0].share == 1.0


def test_useful_share_is_mfu_over_the_wall_clock() -> None:
    assert make(10.0).useful_share == pytest.approx(200 / (100 * 10.0))


def test_without_a_peak_the_picture_is_in_seconds_and_says_so() -> None:
    fall = make(None)
    assert fall.unit == "seconds" and not fall.peak_known
    assert not any(row.path == "compute.below_peak" for row in fall.rows)
    assert fall.rows[-1].seconds == pytest.approx(60 * 200 / 300)


def test_more_than_the_peak_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than the peak"):
        make(10.0, useful=2000)


def test_text_has_a_line_a_row() -> None:
    fall = make(10.0)
    lines = render(fall)
    assert len(lines) == len(fall.rows)
    assert "padding" in "\n".join(lines) and "useful FLOPs" in lines[-1]
