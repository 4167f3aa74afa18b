"""A run traces itself every so many steps; the diagnosis reaches metrics.jsonl and every sink."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.account.events import StepLine, TraceLine
from headway.account.tree import STEP
from headway.diagnose import periodic
from headway.diagnose.announcement import Announcement
from headway.diagnose.background import compress, wait_for_ranks
from headway.diagnose.job import Options, read_job
from headway.diagnose.open import open_diagnosis
from headway.diagnose.periodic import PeriodicTrace
from headway.diagnose.said import Said
from headway.train.clock import StepClock
from headway.train.hook import HookPlace
from headway.train.run import Run
from headway.watch.tensorboard_sink import trace_scalars
from tiny import run_file
from train.running import history, run


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps that traces from steps 4 and 8 on; an evaluation ends the second trace early."""
    file = run_file(
        tmp_path_factory.mktemp("periodic"),
        train={"steps": 12, "global_batch_sequences": 2},
        log={"quiet": True, "profile_every": 4, "profile_steps": 2},
        checkpoint={"at_end": False},
    )
    run(file)
    return file


def test_the_breakdown_reaches_metrics(traced: Path) -> None:
    lines = history(traced).traces
    assert lines[0].step == 4
    for line in lines:
        assert line.note != "" or line.wall_ns > 0
        assert line.wall_ns == sum(line.account.values()) > 0
        assert all(path in STEP for path in line.account)
        # The run's last step ends the trace that began with it, where the one before was diagnosed in time.
        assert line.traced_steps == (1 if line.step == 12 else 2) and line.cost_ns > 0 and line.kernels > 0


def test_traces_are_whole_and_compressed(traced: Path) -> None:
    folder = traced.parent / "runs" / "tiny" / "traces" / "step-00000004"
    assert sorted(path.name for path in folder.iterdir()) == ["diagnosis.json", "diagnosis.log", "rank-00000.json.gz"]
    assert json.loads((folder / "diagnosis.json").read_text())["verdict"]
    device = read_job([folder / "rank-00000.json.gz"]).ranks[0].device()
    assert [row.name for row in device.steps.rows] == ["ProfilerStep#4", "ProfilerStep#5"]
    assert device.shares.idle["data"] > 0  # the loop's own phase is seen as loading


def test_every_step_is_still_accounted_and_closed(traced: Path) -> None:
    kept = history(traced).kept
    assert [line.step for line in kept] == list(range(1, 13))
    assert all(sum(line.account.values()) == line.wall_ns for line in kept)


def test_the_run_folder_is_diagnosed_with_its_newest_trace(traced: Path) -> None:
    diagnosis = open_diagnosis([traced.parent / "runs" / "tiny"], Options(), Said())
    assert diagnosis.kind == "run" and any("kernels from" in note for note in diagnosis.notes)


def test_a_sink_gets_shares() -> None:
    line = TraceLine(session=0, step=4, time=0.0, traced_steps=2, path="traces/x", wall_ns=100,
                     account={"compute": 60, "data": 40}, idle={"data": 40}, utilisation=0.6, kernels=9)  # fmt: skip
    values = trace_scalars(line)
    assert values["trace/account/compute"] == 0.6 and values["trace/idle/data"] == 0.4
    assert trace_scalars(TraceLine(session=0, step=4, time=0.0, traced_steps=2, path="x", note="unreadable")) == {}


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")
    hook = PeriodicTrace(HookPlace(tmp_path, 0, 1, 0, StepClock("cpu")), every=1, steps=1)
    for step in (1, 2):
        assert hook.begin_step(step) == []
    hook.pause()
    assert hook.close() == []
    assert "was not written" in capsys.readouterr().err


def test_a_trace_that_is_skipped_for_a_diagnosis_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Running:
        def poll(self) -> None:
            return None

    for rank in (0, 1):
        hook = PeriodicTrace(HookPlace(tmp_path, rank, 2, 0, StepClock("cpu")), every=4, steps=1)
        begun: list[int] = []
        monkeypatch.setattr(hook, "_begin", begun.append)
        hook.begin_step(4)
        assert begun == [4] and capsys.readouterr().err == ""
        hook._job = periodic._Job(4, tmp_path, Running(), 0)  # type: ignore[arg-type]
        for step in range(5, 20):
            hook.begin_step(step)
        said = capsys.readouterr().err
        assert begun == [4] and said.count("no trace, the one of step 4") == (rank == 0)


class Diagnosing:
    """A process that ends between two steps."""

    over: int | None = None

    def poll(self) -> int | None:
        return self.over


def test_a_diagnosis_that_has_ended_makes_room_in_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = PeriodicTrace(HookPlace(tmp_path, 0, 1, 0, StepClock("cpu")), every=4, steps=3)
    begun: list[int] = []
    monkeypatch.setattr(hook, "_begin", begun.append)
    process = Diagnosing()
    hook._job = periodic._Job(4, tmp_path, process, 0)  # type: ignore[arg-type]
    assert hook.begin_step(7) == [] and begun == []
    process.over = 0
    (line,) = hook.begin_step(8)
    assert isinstance(line, TraceLine) and line.step == 4 and begun == [8]


def test_no_trace_is_announced_while_the_first_rank_still_diagnoses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = [PeriodicTrace(HookPlace(tmp_path, rank, 2, 0, StepClock("cpu")), 1000, 1) for rank in range(2)]
    begun: list[int] = []
    process = Diagnosing()
    hooks[0]._job = periodic._Job(1000, tmp_path, process, 0)  # type: ignore[arg-type]
    for hook in hooks:
        hook._began -= 10**15  # a long run: each trace is within its share
        monkeypatch.setattr(hook, "_begin", begun.append)
    for step in range(1900, 3001):
        process.over = 0 if step > 1960 else None  # ends after the others were told, before the trace is due
        for hook in hooks:
            hook.begin_step(step)
    assert begun == [3000, 3000]
    assert "step 2000: no trace, the one of step 1000" in capsys.readouterr().err


def test_a_trace_that_ends_with_its_step_has_a_place_in_the_steps_account() -> None:
    """An evaluation ends a trace inside the step before it: writing is logging, not unaccounted."""
    spent: list[int] = []

    def pause() -> None:
        began = time.monotonic_ns()
        time.sleep(0.02)
        spent.append(time.monotonic_ns() - began)

    told = SimpleNamespace(tell_finished=lambda: None)
    clock = StepClock("cpu")
    run = SimpleNamespace(
        hook=SimpleNamespace(pause=pause), clock=clock, reporter=told, spikes=SimpleNamespace(alarms=())
    )
    clock.begin_step()
    assert Run._end_step(run) is False  # type: ignore[arg-type]
    assert clock.take().account.total("host.logging") >= spent[0]


@pytest.mark.parametrize(
    ("every", "ranks", "step_ms", "cost_s", "traced"),
    [
        (1000, 1, 400, 1.0, [1000, 2000, 3000, 4000, 5000]),  # 0.25 %
        (1000, 1, 40, 1.0, [3000, 5000]),  # 40 s a thousand steps: the first 100 s are too short for any
        (1000, 1, 40, 3.0, [3000]),
        (1000, 2, 400, 1.0, [1000, 2000, 3000, 4000, 5000]),
        (1000, 2, 40, 3.0, [3000]),  # the first rank decides, the second follows
        (50, 1, 400, 9.0, list(range(50, 5001, 50))),  # who asks for so many gets them
    ],
)
def test_traces_stay_within_their_share_of_a_long_run(
    every: int,
    ranks: int,
    step_ms: int,
    cost_s: float,
    traced: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0]
    monkeypatch.setattr(periodic.time, "perf_counter_ns", lambda: now[0])
    hooks = [PeriodicTrace(HookPlace(tmp_path, rank, ranks, 0, StepClock("cpu")), every, 1) for rank in range(ranks)]
    begun: list[list[int]] = [[] for _ in hooks]

    def begin(rank: int, step: int) -> None:
        begun[rank].append(step)
        if rank == 0:  # the others never learn what traces cost
            hooks[0]._spent_ns += int(cost_s * 1e9)
            hooks[0]._expected_ns = int(cost_s * 1e9)

    for rank, hook in enumerate(hooks):
        monkeypatch.setattr(hook, "_begin", partial(begin, rank))
    for step in range(1, 5001):
        now[0] += step_ms * 1_000_000
        for rank in sorted(range(ranks), reverse=step % 2 == 0):  # whoever comes first
            hooks[rank].begin_step(step)
    assert begun == [traced] * ranks
    if every >= 100:
        assert len(traced) * cost_s <= 0.01 * now[0] / 1e9 + cost_s


def test_an_announcement_of_an_earlier_session_is_taken_back(tmp_path: Path) -> None:
    said = Announcement(tmp_path / "traces")
    said.decide(2000, True)
    assert said.is_for(2000) and not said.is_for(1000)
    Announcement(tmp_path / "traces").decide(2000, False)
    assert not said.is_for(2000)
    (tmp_path / "traces" / "next").write_text("half a li")
    assert not said.is_for(2000)


def test_what_the_background_took_is_written_down(traced: Path) -> None:
    folder = traced.parent / "runs" / "tiny" / "traces" / "step-00000004"
    assert periodic._background_ns(folder) > 10_000_000
    assert periodic._background_ns(folder / "nothing") == 0


def test_a_naive_run_is_told_of_its_padding(tmp_path: Path) -> None:
    """Through the trainer: rows padded to the longest; the range follows from the tokens that the run counted."""
    file = run_file(
        tmp_path, train={"steps": 5, "global_batch_sequences": 8}, checkpoint={"at_end": False},
        data={"slots": None}, log={"quiet": True, "profile_every": 4, "profile_steps": 1},
    )  # fmt: skip
    file.write_text("preset: naive\n" + file.read_text().replace("  slots: null\n", ""))
    run(file)
    naive = open_diagnosis([tmp_path / "runs" / "tiny"], Options(), Said())
    finding = next(item for item in naive.findings if item.name == "padding")
    assert naive.run is not None
    share = 1 - sum(line.tokens for line in naive.run.steps) / sum(line.slots for line in naive.run.steps)
    assert share > 0.1 and finding.gain[0] <= share and finding.gain[1] == pytest.approx(share, abs=0.02)
    assert finding.proposal().change["data.pack"] == "best_fit"
    assert naive.rank is not None  # its own periodic trace was read with it


def test_a_missing_rank_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.json").write_text("{}")
    assert compress(tmp_path / "rank-00000.json").is_file()
    assert len(wait_for_ranks(tmp_path, 2, wait_s=0.1)) == 1


def test_profiling_can_be_switched_off(tmp_path: Path) -> None:
    file = run_file(tmp_path, train={"steps": 3}, log={"quiet": True, "profile_every": None})
    run(file)
    assert history(file).traces == [] and not (tmp_path / "runs" / "tiny" / "traces").exists()
    assert isinstance(history(file).kept[0], StepLine)
