"""What a rank under a supervisor says on the terminal, and what goes to its log."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.cli.train import _COMMAND, _again, _keep_for_the_log, _typed
from headway.guard.ranks import LAUNCHER_VARIABLE

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:4711\nand more"


def test_the_command_that_goes_on_is_the_one_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["headway", "launch", "run.yaml", "--nnodes", "1:2", "name=a b"])
    monkeypatch.delenv(_COMMAND, raising=False)
    assert _again() == "headway launch run.yaml --nnodes 1:2 'name=a b'"
    monkeypatch.setenv(_COMMAND, _typed())
    monkeypatch.setattr(sys, "argv", ["headway", "train", "run.yaml"])  # what a rank of it is started with
    assert _again() == "headway launch run.yaml --nnodes 1:2 'name=a b'"


def test_a_lost_neighbour_is_a_line_here_and_a_traceback_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, rank = SimpleNamespace(folder=tmp_path), SimpleNamespace(rank=0)
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv(LAUNCHER_VARIABLE, "local")
    monkeypatch.setattr(sys, "argv", ["headway"])

    def kept(error: BaseException, rank_env: object = rank) -> bool:
        return _keep_for_the_log(config, rank_env, error)  # type: ignore[arg-type]

    assert kept(RuntimeError(GLOO))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Connection closed by peer" in said and "rank-00000.log" in said
    assert "and more" in (tmp_path / "logs" / "rank-00000.log").read_text()
    # The program's own errors, other ranks (whose terminal is their log), and a rank that nobody watches: as ever.
    assert not kept(RuntimeError("shapes do not match")) and not kept(ValueError(GLOO))
    assert not kept(RuntimeError(GLOO), SimpleNamespace(rank=1)) and not kept(RuntimeError(GLOO), None)
    monkeypatch.setattr(sys, "argv", ["headway", "--debug"])
    assert not kept(RuntimeError(GLOO))
