"""Savers that outlived their trainer and stand stopped are ended by the next start; nobody else is."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from headway.guard import layout
from headway.guard.hashing import hash_file
from headway.guard.manifest import Manifest
from headway.guard.orphans import KEEPER, SAVER, end_stopped
from headway.guard.save_job import Folder, Job, Outcome
from headway.guard.saver import _start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def stop(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 30
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until
        time.sleep(0.01)


def until_it_reads(pid: int, folder: Path) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if entry.readlink().is_relative_to(folder):
                    return
        time.sleep(0.01)
    raise AssertionError("it never opened the staged files")


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


@pytest.mark.parametrize(
    "end", ["trainer dead before the saver is up", "folder cleared away", "planted: trainer lives"]
)
def test_an_orphan_waits_for_another_ranks_part_no_longer_than_it_may_come(tmp_path: Path, end: str) -> None:
    partial = tmp_path / ".partial"
    partial.mkdir()
    for name in ("a.distcp", layout.WRITER_FILE):
        (partial / name).write_bytes(b"{}")
    manifest = Manifest(step=1, generation=1, run_id="r", created="", world_size=2, headway="", torch="", parts={},
                        files={"a.distcp": hash_file(partial / "a.distcp")})  # fmt: skip
    job = Job(id=1, rank=0, files=["a.distcp"], manifest=manifest,
              memory=Folder(partial=str(partial), final=str(tmp_path / "final"), ranks=[0, 1]))  # fmt: skip
    dead = subprocess.Popen(["true"])
    dead.wait()
    trainer = dead.pid if end.startswith("trainer") else os.getpid()
    soon = "import headway.guard.save_job as s; s._ORPHAN_S = 0.3; from headway.guard.saver_main import main; main()"
    saver = subprocess.Popen([sys.executable, "-c", soon, str(tmp_path), str(trainer)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)  # fmt: skip
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            said = b""
            saver.stdin.write(msgspec.json.encode(job) + b"\n")  # type: ignore[union-attr]
            saver.stdin.flush()  # type: ignore[union-attr]
            if not end.startswith("trainer"):
                until_it_reads(saver.pid, partial)
            if end.startswith("folder"):
                shutil.rmtree(partial)
            said, _ = saver.communicate(timeout=1.0 if end.startswith("planted") else 60.0)
        if end.startswith("planted"):
            assert saver.poll() is None, "its trainer lives, so the part may still come"
            return
        first, last = (msgspec.json.decode(line, type=Outcome) for line in said.splitlines())
        why = "had not written its part" if end.startswith("trainer") else "is gone"  # it, or already the files in it
        assert not first.ok and first.tier == "memory" and why in first.why and last.tier == ""
    finally:
        saver.kill()
        saver.wait()
