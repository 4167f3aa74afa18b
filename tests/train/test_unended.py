"""What a start says of a session that nobody was left to end."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace as Any
from unittest.mock import MagicMock

import pytest

from headway.account.events import CheckpointLine, Incident, SessionEnd, SessionStart
from headway.account.run_clock import RunClock
from headway.config.load import load_run
from headway.guard.control import Control
from headway.record.folder import RunFolder
from headway.record.jsonl import JsonlWriter
from headway.record.sessions import History
from headway.train.build import build_run
from headway.train.loop import train
from headway.train.run import Run
from headway.train.unended import tell_of_checkpoints_gone, tell_of_the_session_before, unended
from tiny import run_file


def history(last: int, *, end: object = None, resumed_from: int = 0) -> History:
    steps = [Any(step=step, time=100.0 + step, wall_ns=int(2e9)) for step in range(resumed_from + 1, last + 1)]
    session = Any(start=Any(resumed_from=resumed_from, time=99.0), steps=steps, end=end)
    return History(sessions=[session])  # type: ignore[list-item]


def test_steps_behind_the_checkpoint_are_lost_with_the_seconds_that_they_took() -> None:
    assert unended(history(45), 3, []) == (45, 42, 84.0)
    assert unended(history(45), 45, []) == (45, 0, 0.0), "a death all the same"
    assert unended(history(3, resumed_from=3), 3, []) == (3, 0, 0.0)


def test_a_session_that_ended_or_whose_death_is_known_is_not_told_of() -> None:
    assert unended(History(), 0, []) is None
    assert unended(history(9, end=Any(reason="preempted")), 3, []) is None
    assert unended(history(9, end=Any(reason="failed")), 3, []) is None, "who ran it saw it fail"
    assert unended(history(9), 3, [109.5]) is None, "its supervisor wrote it down"
    assert unended(history(9), 3, [104.0]) == (9, 6, 12.0), "that was an earlier one"


def test_a_session_that_failed_counts_where_a_launcher_that_writes_nothing_down_started_anew() -> None:
    assert unended(history(9, end=Any(reason="failed")), 3, [], failed_too=True) == (9, 6, 12.0)
    assert unended(history(9, end=Any(reason="failed")), 3, [109.5], failed_too=True) is None, "it has said why"
    assert unended(history(9, end=Any(reason="done")), 3, [], failed_too=True) is None


def test_lost_lines_and_lost_checkpoints_are_told_of(tmp_path: Path) -> None:
    """It trained 16 → 40 beside a full disk; then somebody deleted every checkpoint."""
    folder, told = RunFolder(tmp_path).create(), list[tuple[object, ...]]()
    reporter = Any(incident=lambda *what, **more: told.append(what))
    start = SessionStart(session=0, time=9.0, resumed_from=16, world_size=1, steps=60, device="cpu")
    writer = JsonlWriter(folder.metrics)
    writer.append(start)
    tell_of_the_session_before(folder, 40, reporter, Control(None), anew=False)  # type: ignore[arg-type]
    assert "behind step 16; nothing is written of steps 17 to 40, which it made" in str(told[-1][2])
    tell_of_the_session_before(folder, 16, reporter, Control(None), anew=False)  # type: ignore[arg-type]
    assert str(told[-1][2]).endswith("behind step 16")
    assert tell_of_checkpoints_gone(folder, reporter, Control(None)) == "", "it has made none"  # type: ignore[arg-type]
    for step in (8, 16):
        writer.append(
            CheckpointLine(session=0, step=step, time=9.0 + step, path="x", bytes=1, seconds=1.0, tier="disk")
        )
    writer.close()
    said = tell_of_checkpoints_gone(folder, reporter, Control(None))  # type: ignore[arg-type]
    assert "every checkpoint of this run is gone: it has told of 2, the newest of step 16" in said
    assert told[-1][0] == "checkpoint rejected" and told[-1][3] == "began anew from step 0" and len(told) == 3


def test_listeners_hear_what_a_start_says_of_the_session_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alerts: launcher and ranks were killed at once, and something started them again. Under torchrun, too."""
    config = load_run(run_file(tmp_path, train={"steps": 1}), []).config
    heard: list[Incident] = []
    for restarts, evidence in (("0", "launcher and ranks, or their machine, died"), ("1", "started all ranks again")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        writer = JsonlWriter(RunFolder(config.folder).create().metrics)
        writer.append(SessionStart(session=8, time=time.time(), resumed_from=0, world_size=1, steps=1, device="cpu"))
        writer.close()
        run = build_run(config, None, RunClock(), list, lambda text: None, listeners=[heard.append])
        run.close("interrupted")
        assert heard[-1].fault == "run killed" and evidence in heard[-1].evidence
    assert len(heard) == 2


def test_a_session_whose_first_evaluation_fails_is_ended() -> None:
    run = MagicMock()
    run.start.side_effect = RuntimeError("no held-out document")
    with pytest.raises(RuntimeError, match="held-out"):
        train(run)
    run.close.assert_called_once_with("failed")


def test_a_device_that_is_lost_keeps_the_last_lines_back_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    """After an illegal access every call to the device raises, also those that closing makes."""
    run, lost = MagicMock(_frozen_before=True), RuntimeError("CUDA error: an illegal memory access\nmore")
    for call in (run.clock.end_step, run.hook.close, run.supply.close, run.saves.close):
        call.side_effect = lost
    Run.close(run, "failed")
    assert isinstance(run.reporter.tell.call_args.args[0], SessionEnd)
    assert run.lock.release.called and "illegal memory access" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="illegal"):
        Run.close(run, "done")
