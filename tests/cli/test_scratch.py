"""A command's scratch folder: nothing of it stays, whatever ends the command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli.scratch import scratch_folder

KILLED = """
import os, signal
from headway.cli.scratch import scratch_folder
with scratch_folder("killed") as folder:
    (folder / "large").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_what_a_kill_left_goes_with_the_next_command_and_a_living_one_keeps_its_own(base: Path) -> None:
    (base / "headway-scratch-of-somebody").mkdir()
    with scratch_folder("living") as living:
        assert subprocess.run([sys.executable, "-c", KILLED], check=False).returncode == -signal.SIGKILL
        (left,) = base.glob("headway-scratch-killed-*/large")
        with scratch_folder("next"):
            assert not left.parent.exists() and living.is_dir()
        assert living.is_dir()
    assert [path.name for path in base.iterdir()] == ["headway-scratch-of-somebody"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_takes_it_away(base: Path, number: signal.Signals) -> None:
    former = signal.getsignal(number)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as end, scratch_folder("ended"):
        signal.raise_signal(number)
    assert not list(base.iterdir()) and signal.getsignal(number) is former
    assert end.type is KeyboardInterrupt or end.value.code == 128 + number  # type: ignore[attr-defined]


def test_a_signal_that_is_ignored_stays_so(base: Path) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with scratch_folder("goes-on"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, former)
