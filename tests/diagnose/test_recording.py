"""What recording took is left out of upper bounds, where it lengthened the window and nowhere else."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from diagnose import causes
from diagnose.kineto_maker import Kineto
from diagnose.test_findings import diagnosed, found
from headway.diagnose import cold, recording
from headway.diagnose.case import case_of
from headway.diagnose.diagnosis import diagnose_job
from headway.diagnose.job import read_job


def test_own_time_of_callers_is_of_slices_with_exactly_one_below_them() -> None:
    # 0–100 holds 20–70, which holds two; 200–230 holds 210–220, 300–400 holds none, 500–600 is crossed by 550–650.
    rows = [(0, 100), (20, 70), (25, 35), (40, 60), (200, 230), (210, 220), (300, 400), (500, 600), (550, 650)]
    start, end = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    assert recording._own_time_of_callers(start, end).tolist() == [100 - 50, 30 - 10]


def test_a_sleep_beside_recorded_operators_is_a_larger_share_of_an_ordinary_step(tmp_path: Path) -> None:
    x = torch.ones(4, 4)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for step in range(4):
            with record_function(f"ProfilerStep#{step}"):
                with record_function("enumerate(DataLoader)"):
                    time.sleep(0.002)
                for _ in range(200):
                    x.t().reshape(4, 4)
    recorded.export_chrome_trace(str(tmp_path / "t.json"))
    job = read_job([tmp_path / "t.json"])
    view = case_of(job).view
    item = found(diagnose_job(job), "data-starvation")
    assert item is not None and item.recorded_ns is not None
    assert 200 < recording.of_one(view) < 100_000  # ns an operator
    assert 0 < item.recorded_ns <= (item.wall_ns - item.upper_ns) // 2
    assert item.gain[1] == pytest.approx(item.upper_ns / (item.wall_ns - item.recorded_ns))
    assert item.gain[0] == item.lower_ns / item.wall_ns  # what is sure rests on no estimate
    assert item.to_dict()["recorded_ns"] == item.recorded_ns


def test_where_the_device_hides_it_recording_changes_nothing(tmp_path: Path) -> None:
    for name, trace in (("data-starvation", causes.loader([3000.0])), ("optimizer-not-fused", causes.optimizer(causes.EAGER, "aten::addcdiv_", 60))):  # fmt: skip
        item = found(diagnosed(tmp_path / name, trace), name)
        assert item is not None and item.recorded_ns == 0
        assert item.gain[1] == item.upper_ns / item.wall_ns


def test_a_launch_bound_claim_holds_its_recording_already(tmp_path: Path) -> None:
    item = found(diagnosed(tmp_path, causes.fragmented()), "fragmentation")
    assert item is not None and item.recorded_ns == 0 and item.gain[1] <= 1


def test_a_write_holds_no_operator_and_so_no_recording(tmp_path: Path) -> None:
    """Half of each step writes: all of its operators are recorded in the other half."""

    def work(trace: Kineto, _: int) -> None:
        for _ in range(12):  # operators that only call one other
            with trace.annotated("aten::reshape", "cpu_op"):
                with trace.annotated("aten::view", "cpu_op"):
                    trace.host(120.0)
                trace.host(5.0)
        with trace.annotated("<built-in function urandom>", "python_function"):
            trace.host(1500.0)

    trace = causes.each_step(work)
    job = read_job([trace.write(tmp_path / "t.json.gz")])
    item, view = found(diagnose_job(job), "host-busy"), case_of(job).view
    assert item is not None and 0.45 < item.upper_ns / item.wall_ns < 0.55
    assert item.recorded_ns == recording.recording(view) == pytest.approx(2 * 5000 * 4 * 24, rel=0.01)


@pytest.mark.parametrize(("pause", "wall", "most"), [(100, 1000, 10), (900, 1000, 25), (0, 1000, 0), (1000, 1000, 0)])
def test_cold_caches_cost_little_after_little_and_never_more_than_a_part_of_the_rest(
    pause: int, wall: int, most: int
) -> None:
    assert cold.after_work(pause, wall) == most


def test_a_wait_costs_at_most_a_switch_and_never_more_than_itself() -> None:
    assert cold.after_waits(2, 50_000_000, 10**9) == 3_000_000
    assert cold.after_waits(2, 1_000_000, 10**9) == 1_000_000
    assert cold.after_waits(100, 900_000_000, 10**9) == 25_000_000
