"""Steps of traces without ProfilerStep: named by the loop itself, or told by the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.kineto_maker import Kineto, clean_step
from diagnose.real_traces import rank
from headway.diagnose.facts import DeviceFacts
from headway.diagnose.job import read_job


def of(path: Path, trace: Kineto) -> DeviceFacts:
    return read_job([trace.write(path / "t.json.gz")]).ranks[0].device()


def loop(steps: int, optimizers: int = 1, first: int = 12) -> Kineto:
    """Steps of twelve products, the first recorded from its middle on where `first` is less."""
    trace = Kineto()
    for number in range(steps):
        for _ in range(first if number == 0 else 12):
            trace.matmul(300.0)
        for _ in range(optimizers):
            with trace.annotated("Optimizer.step#AdamW.step"):
                for _ in range(3):
                    trace.elementwise(30.0)
            trace.host(10.0)
    return trace


def test_the_optimizer_tells_steps(tmp_path: Path) -> None:
    device = of(tmp_path, loop(4))
    assert [row.name for row in device.steps.rows] == [f"Optimizer.step#{number}" for number in (1, 2, 3, 4)]
    assert len({row.kernels for row in device.steps.rows}) == 1
    assert device.fragmentation.kernels_per_step == device.steps.rows[0].kernels
    assert device.window.source == "gpu"
    assert sum(row.shares.wall_ns for row in device.steps.rows) == device.window.wall_ns


def test_a_step_recorded_from_its_middle_on_does_not_count(tmp_path: Path) -> None:
    device = of(tmp_path, loop(4, first=2))
    assert len(device.steps.rows) == 3 and len({row.kernels for row in device.steps.rows}) == 1


def test_two_optimizers_of_one_step_are_one_step(tmp_path: Path) -> None:
    device = of(tmp_path, loop(4, optimizers=2))
    assert len(device.steps.rows) == 4 and len({row.kernels for row in device.steps.rows}) == 1


@pytest.mark.parametrize("name", ["step {}", "train_step#{}", "iteration_{}", "Step {}", "iter={}"])
def test_a_loops_own_ranges_are_steps_and_make_the_window(name: str, tmp_path: Path) -> None:
    trace = Kineto()
    for number in range(3):
        with trace.annotated(name.format(number)):
            clean_step(trace)
            trace.wait()
    device = of(tmp_path, trace)
    assert [row.name for row in device.steps.rows] == [name.format(number) for number in range(3)]
    assert device.window.source == "steps"


@pytest.mark.parametrize("name", ["stepping stone", "Optimizer.zero_grad#AdamW", "aten::step 3x"])
def test_what_only_sounds_like_a_step_is_none(name: str, tmp_path: Path) -> None:
    trace = Kineto()
    for _ in range(3):
        with trace.annotated(name):
            trace.matmul()
    assert of(tmp_path, trace).steps.rows == ()


def test_the_two_steps_of_the_naive_loop(shared: Path) -> None:
    device = rank(shared / "traces" / "h200" / "trace_naive_sdpa.json.gz").device()
    assert len(device.steps.rows) == 2
    assert device.fragmentation.kernels_per_step == pytest.approx(22_656 / 2, rel=0.01)
