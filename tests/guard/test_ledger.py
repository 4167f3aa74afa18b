"""The ledger: never ends a run, loses no line to a full disk, tells its listeners."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.account.events import Incident
from headway.guard import ledger as ledger_module
from headway.guard.ledger import Ledger
from headway.record.incidents import read_incidents


def test_a_line_is_written_said_and_amended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "incidents.jsonl"
    ledger = Ledger(path, rank=2, host="node7")
    found = ledger.record("hang", 12, evidence="no progress", action="restarted", phase="backward")
    assert (found.rank, found.host, found.phase, found.recover_s) == (2, "node7", "backward", None)
    ledger.amend(found, steps_lost=3, seconds_lost=4.5, recover_s=1.0)
    (read,) = read_incidents(path).items
    assert (read.id, read.steps_lost, read.seconds_lost, read.recover_s) == (found.id, 3, 4.5, 1.0)
    assert "headway: step 12: hang: no progress; restarted" in capfd.readouterr().err
    assert ledger.record("hang", 13, rank=0, host="node8").rank == 0


def test_a_full_disk_costs_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "incidents.jsonl"
    ledger = Ledger(path)
    real = ledger_module.append_incident

    def full(path: Path, incident: Incident) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger_module, "append_incident", full)
    ledger.record("checkpoint failed", 1)
    assert "not written (No space left on device); kept" in capfd.readouterr().err
    monkeypatch.setattr(ledger_module, "append_incident", real)
    ledger.record("hang", 2)
    assert [item.fault for item in read_incidents(path).items] == ["checkpoint failed", "hang"]


def test_a_listener_that_raises_stops_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []

    def broken(incident: Incident) -> None:
        raise RuntimeError("planted")

    listeners = [broken, lambda incident: heard.append(incident.fault)]
    ledger = Ledger(tmp_path / "incidents.jsonl", listeners=listeners)
    ledger.record("hang", 1)
    assert heard == ["hang"] and "alert: RuntimeError: planted" in capfd.readouterr().err
