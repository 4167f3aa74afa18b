"""The books on each step: nothing counted twice, nothing shown that is not true, and a broken run is stopped."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from headway.account.errors import UserError
from headway.account.events import Flops, Line, StepLine
from headway.account.run_clock import RunClock
from headway.account.totals import Totals
from headway.data.global_batch import Position
from headway.guard.ledger import Ledger
from headway.record.jsonl import JsonlWriter
from headway.train.clock import StepClock
from headway.train.reporter import MAX_SKIPPED, Reporter, StepFacts
from headway.train.scalars import Scalars


class Heard:
    def __init__(self) -> None:
        self.lines: list[Line] = []

    def tell(self, line: Line) -> None:
        self.lines.append(line)

    def close(self) -> None: ...


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def reporter(tmp_path: Path, heard: Heard) -> Reporter:
    return Reporter(
        session=0,
        rank=0,
        clock=StepClock("cpu"),
        run_clock=RunClock(),
        totals=Totals(),
        session_totals=Totals(),
        observers=[heard],
        rank_file=JsonlWriter(tmp_path / "rank.jsonl"),
        ledger=Ledger(tmp_path / "incidents.jsonl"),
        peak_flops=None,
    )


def make(reporter: Reporter, step: int, values: tuple[float, float, float, float] | None, trained: int = 5) -> None:
    """One step as the loop makes it."""
    reporter.clock.begin_step()
    facts = StepFacts(
        step=step,
        position=Position(0, step - 1),
        next=Position(0, step),
        lr=0.1,
        sequences=1,
        slots=16,
        tokens=12,
        trained_tokens=trained,
        local_tokens=12,
        local_trained_tokens=trained,
        documents=1,
        micro_batches=1,
        flops=Flops(useful=10, padding=4),
        scalars=Scalars(torch.tensor([*values, math.nan, values[3], *[math.nan] * 3])) if values is not None else None,
    )
    reporter.launched(facts)
    reporter.clock.end_step()
    reporter.tell_finished()


def test_a_step_with_nothing_to_learn_is_skipped_and_never_a_loss_of_zero(reporter: Reporter, heard: Heard) -> None:
    make(reporter, 1, None, trained=0)
    line = heard.lines[0]
    assert isinstance(line, StepLine) and line.skipped == "no trained token"
    assert line.loss is None and line.nll is None and line.grad_norm is None
    assert reporter.totals.skipped_steps == 1 and reporter.totals.steps == 1


def test_a_step_that_is_not_finite_says_so_and_the_next_one_is_taken(reporter: Reporter, heard: Heard) -> None:
    make(reporter, 1, (math.nan, math.nan, math.inf, 0.0))
    make(reporter, 2, (2.0, 2.0, 1.0, 1.0))
    first, second = heard.lines
    assert isinstance(first, StepLine) and first.skipped == "not finite" and first.loss is None
    assert isinstance(second, StepLine) and second.skipped is None and second.nll == 2.0
    assert reporter.skipped_in_a_row == 0


def test_a_skipped_step_is_rework_and_nothing_of_it_is_useful(reporter: Reporter, heard: Heard) -> None:
    make(reporter, 1, (math.nan, math.nan, math.inf, 0.0))
    parts = reporter.run_clock.parts()
    assert parts["rework"] > 0 and "productive" not in parts
    make(reporter, 2, (2.0, 2.0, 1.0, 1.0))
    assert reporter.run_clock.parts()["productive"] > 0 and reporter.run_clock.parts()["rework"] == parts["rework"]
    first, second = heard.lines
    assert isinstance(first, StepLine) and isinstance(second, StepLine)
    assert first.flops.useful == first.flops.padding == 0 and first.flops.rework == second.flops.computed > 0
    assert reporter.totals.trained_tokens == second.trained_tokens == first.trained_tokens


def test_too_many_skipped_steps_stop_the_run(reporter: Reporter) -> None:
    with pytest.raises(UserError, match="in a row could not update"):
        for step in range(1, MAX_SKIPPED + 2):
            make(reporter, step, (math.nan, math.nan, math.nan, 0.0))
    assert reporter.totals.skipped_steps == MAX_SKIPPED + 1, "the last line is told before the run stops"


def test_a_loss_of_exactly_zero_stops_the_run(reporter: Reporter) -> None:
    with pytest.raises(UserError, match="exactly 0 over 5 trained tokens"):
        make(reporter, 1, (0.0, 0.0, 0.0, 1.0))


def test_totals_and_accounts_close(reporter: Reporter, heard: Heard) -> None:
    for step in range(1, 6):
        make(reporter, step, (1.0, 1.0, 1.0, 1.0))
    totals = reporter.totals
    assert (totals.steps, totals.slots, totals.tokens, totals.trained_tokens) == (5, 80, 60, 25)
    assert totals.flops == Flops(useful=50, padding=20)
    for line in heard.lines:
        assert isinstance(line, StepLine)
        assert sum(line.account.values()) == line.wall_ns
    run = reporter.run_clock.account()
    assert run.total("productive") + run.total("compile") == totals.step_wall_ns
    assert sum(run.parts.values()) == run.wall_ns


def test_lines_are_told_late_when_the_device_is_still_at_work(reporter: Reporter, heard: Heard) -> None:
    for step in (1, 2):
        reporter.clock.begin_step()
        reporter.launched(
            StepFacts(step, Position(), Position(0, 1), 0.1, 1, 1, 1, 1, 1, 1, 1, 1, Flops(), Scalars(torch.ones(9)))
        )
        reporter.tell_finished(in_flight=1)
    assert [line.step for line in heard.lines if isinstance(line, StepLine)] == [1]
    reporter.clock.end_step()
    reporter.tell_finished()
    assert [line.step for line in heard.lines if isinstance(line, StepLine)] == [1, 2]


def test_an_incident_is_a_line_in_the_ledger(reporter: Reporter, capsys: pytest.CaptureFixture[str]) -> None:
    reporter.incident("checkpoint failed", 7, "no space left", "went on without it")
    assert '"fault":"checkpoint failed"' in reporter.ledger.path.read_text()
    assert "step 7: checkpoint failed: no space left" in capsys.readouterr().err


def test_compiling_that_does_not_end_is_an_incident_and_said_once(reporter: Reporter, monkeypatch) -> None:
    from headway.train.reporter import COMPILING_STEPS, MAX_LATE_GRAPHS

    reporter.compiled = True
    stats = torch._dynamo.utils.counters["stats"]
    monkeypatch.setitem(stats, "unique_graphs", 0)
    graphs = 0
    for step in range(1, 12):
        # Honest: many graphs at the start, one now and then. Planted: five a step from step 6.
        graphs += 100 if step <= COMPILING_STEPS else 5 if step >= 6 else 1
        monkeypatch.setitem(stats, "unique_graphs", graphs)
        make(reporter, step, (1.0, 1.0, 1.0, 1.0))
        reporter.tell_finished()
        late = max(0, graphs - 100 * COMPILING_STEPS)
        assert reporter.ledger.path.is_file() == (late > MAX_LATE_GRAPHS)
    lines = reporter.ledger.path.read_text().splitlines()
    assert len(lines) == 1 and "recompiles" in lines[0]
