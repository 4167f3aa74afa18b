"""Savers that outlived their trainer and stand stopped are ended by the next start; nobody else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.guard.orphans import KEEPER, SAVER, end_stopped
from headway.guard.saver import _start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def stop(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 30
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until
        time.sleep(0.01)


def sleeper(*words: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-Sc", "print(flush=True); input()", *words], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_a_stopped_saver_of_this_run_is_ended_and_told_of(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    saver = _start(mine)
    spared = [
        sleeper("-m", SAVER, str(mine)),  # runs: it may commit what was staged
        sleeper("-m", SAVER, str(other)),
        sleeper("-m", "editor", str(mine)),
        sleeper("-m", f"{SAVER} {mine}"),
    ]
    keeper = sleeper("-m", KEEPER, str(mine))
    try:
        for process in (saver, keeper, *spared[1:]):
            stop(process)
        (tmp_path / "link").symlink_to(mine)
        told = sorted(end_stopped(tmp_path / "link"))
        assert saver.wait(30) == keeper.wait(30) == -signal.SIGKILL
        assert [(f"{process.pid}, " in line) for process in (saver, keeper) for line in told].count(True) == 2
        assert len(told) == 2 and any("the saver" in line for line in told)
        assert end_stopped(mine) == [] and [process.poll() for process in spared] == [None] * 4
    finally:
        for process in (saver, keeper, *spared):
            process.kill()
            process.wait()
