"""The benches of diagnose on small inputs: what they report follows from what was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.bench.diagnose_calibration import Calibrated, calibrate_one, chosen, line
from headway.bench.diagnose_cost import Cost, cost_of
from headway.bench.diagnose_reader import Compared, Reading, write_trace
from headway.bench.planted_causes import CAUSES
from headway.diagnose.job import read_job
from watch.run_maker import plain_run


def test_a_made_trace_is_read_whole(tmp_path: Path) -> None:
    write_trace(tmp_path / "made.json", 300_000)
    rank = read_job([tmp_path / "made.json"]).ranks[0]
    assert not rank.damage.partial and not rank.damage.mended
    events = rank.device().events
    assert len(events) > 150 and (events.op >= 0).all() and rank.device().name == "NVIDIA H200"


def test_readers_are_compared_round_by_round() -> None:
    mine = Reading("headway", (1.0, 2.0, 3.0), (1.0, 2.0, 4.0), 10**8)
    peer = Reading("hta", (9.0, 9.0, 9.0), (10.0, 22.0, 36.0), 10**9)
    found = Compared("t.json", 10**9, (mine, peer))
    assert found.ratio("hta") == 10.0 and found.ratio("msgspec") is None
    assert any("10.00 ×" in text for text in found.lines())


def test_a_cause_is_found_and_measured() -> None:
    """Whether the figures agree is the bench's business; here all of it runs once on a real loop."""
    cause = next(cause for cause in CAUSES if cause.finding == "optimizer-not-fused")
    found = calibrate_one(cause, rounds=2)
    assert found.predicted is not None and 0 < found.predicted[0] <= found.predicted[1] <= 1
    assert len(found.measured) == 2 and found.step_ms > 0
    assert "optimizer-not-fused" in line(found) and found.record()["holds"] == found.holds


@pytest.mark.parametrize(
    ("predicted", "measured", "holds"),
    [((0.1, 0.3), (0.2, 0.9, 0.0), True), ((0.1, 0.3), (0.31, 0.4, 0.2), False), (None, (0.2,), False)],
)
def test_a_prediction_holds_where_its_range_contains_the_median(
    predicted: tuple[float, float] | None, measured: tuple[float, ...], holds: bool
) -> None:
    assert Calibrated("x", "y", predicted, measured, 1.0).holds == holds


def test_every_cause_is_a_finding_and_unknown_names_are_refused() -> None:
    assert len({cause.finding for cause in CAUSES}) == len(CAUSES) >= 10
    assert [cause.finding for cause in chosen("padding, loss-unfused")] == ["padding", "loss-unfused"]
    with pytest.raises(UserError, match="colic"):
        chosen("colic")


def test_what_a_trace_costs_is_spread_over_the_steps_between() -> None:
    cost = Cost(100, 0.5, 0.6, 2, 1.0, 0.3, 0.7, 0.0001)
    assert cost.share(1000) == pytest.approx(2.0 / 501.3)
    assert cost.shortest_step(1000, 0.01) == pytest.approx(0.2)


def test_a_run_that_never_traced_itself_has_no_cost_to_tell(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="profile_every"):
        cost_of(plain_run(tmp_path).root)
