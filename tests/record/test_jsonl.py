"""A torn or damaged line costs itself only; sessions join without counting a step twice."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.account.events import Flops, Line, SessionEnd, SessionStart, StepLine
from headway.record.files import read_json, write_atomic, write_json
from headway.record.folder import RunFolder
from headway.record.jsonl import JsonlWriter, NewerVersion, PatientWriter, read_jsonl
from headway.record.sessions import read_history


def start(session: int, resumed_from: int = 0) -> SessionStart:
    return SessionStart(session=session, time=0.0, resumed_from=resumed_from, world_size=1, steps=9, device="cpu")


def step(session: int, number: int) -> StepLine:
    return StepLine(
        session=session, step=number, time=0.0, epoch=0, documents=number, loss=1.0, nll=1.0, grad_norm=1.0, lr=0.1,
        sequences=1, slots=8, tokens=7, trained_tokens=3, wall_ns=5, account={"data": 5}, flops=Flops(useful=1), run_ns={},
    )  # fmt: skip


def write(path: Path, *lines: Line) -> None:
    writer = JsonlWriter(path)
    for line in lines:
        writer.append(line)
    writer.close()


def test_lines_come_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    end = SessionEnd(session=0, time=1.0, step=1, reason="done", wall_ns=9, run_ns={"productive": 9})
    write(path, start(0), step(0, 1), end)
    assert read_jsonl(path, Line).items == [start(0), step(0, 1), end]


@settings(max_examples=60)
@given(cut=st.integers(1, 400), flip=st.one_of(st.none(), st.integers(0, 399)))
def test_damage_costs_only_the_lines_it_hits(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int | None
) -> None:
    path = tmp_path_factory.mktemp("damage") / "metrics.jsonl"
    write(path, start(0), step(0, 1), step(0, 2))
    whole = path.read_bytes()
    damaged = bytearray(whole[: len(whole) - cut % len(whole)])
    if flip is not None and damaged:
        damaged[flip % len(damaged)] = 0
    path.write_bytes(damaged)
    write(path, step(1, 3))
    lines = read_jsonl(path, Line)
    assert lines.items[-1] == step(1, 3), "the line after a torn one is lost"
    intact = [raw for raw in damaged.split(b"\n")[:-1] if raw and raw + b"\n" in whole and b"\0" not in raw]
    assert len(lines.items) >= len(intact) + 1
    assert len(lines.items) + len(lines.bad) <= 4


def test_kill_minus_nine_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = (
        "import sys; from pathlib import Path; from headway.record.jsonl import JsonlWriter;"
        "from headway.account.events import SessionStart\n"
        "w = JsonlWriter(Path(sys.argv[1])); n = 0\n"
        "while True:\n"
        "    w.append(SessionStart(session=n, time=0.0, resumed_from=0, world_size=1, steps=1, device='cpu')); n += 1\n"
        "    if n == 50: print('go', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    lines = read_jsonl(path, Line)
    assert [line.session for line in lines.items] == list(range(len(lines.items))) and len(lines.items) >= 50
    assert len(lines.bad) <= 1


def test_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"v":99,"event":"step"}\n')
    with pytest.raises(NewerVersion, match=r"metrics.jsonl:1: .*version 99"):
        read_jsonl(path, Line)


def test_a_resume_counts_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # Killed after step 4 with its last checkpoint at 2; killed again after 5 (checkpoint 4); then done.
    first = [start(0), *(step(0, n) for n in (1, 2, 3, 4))]
    second = [start(1, resumed_from=2), *(step(1, n) for n in (3, 4, 5))]
    third = [start(2, resumed_from=4), step(2, 5)]
    write(path, *first, *second, *third)
    history = read_history(path)
    assert [(line.session, line.step) for line in history.kept] == [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]
    assert [(line.session, line.step) for line in history.lost] == [(0, 3), (0, 4), (1, 5)]


def test_steps_beyond_a_resume_point_are_lost_even_if_never_redone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, start(0), step(0, 1), step(0, 2), step(0, 3), start(1, resumed_from=1), step(1, 2))
    assert [line.step for line in read_history(path).kept] == [1, 2]


def test_write_atomic_never_shows_half(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    write_json(path, {"a": 1})
    write_atomic(path, b'{"a": 2}')
    assert read_json(path) == {"a": 2} and [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_run_folder_errors_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        RunFolder.open(tmp_path)
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(UserError, match="set `out` elsewhere"):
        RunFolder(blocker / "run").create()


def half_full(takes: list[int | None]) -> Callable[[JsonlWriter, bytes], int]:
    """A disk that takes so many bytes of each write; None: it is full; everything once the list is over."""
    left = list(takes)

    def write(writer: JsonlWriter, content: bytes) -> int:
        most = left.pop(0) if left else len(content)
        if most is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(writer._fd, content[:most])

    return write


@settings(max_examples=60)
@given(takes=st.lists(st.one_of(st.none(), st.integers(1, 300)), max_size=30))
def test_a_patient_writer_loses_and_doubles_no_line(
    tmp_path_factory: pytest.TempPathFactory, takes: list[int | None]
) -> None:
    path = tmp_path_factory.mktemp("full") / "metrics.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonlWriter, "write", half_full(takes))
        writer = PatientWriter(path)
        for number in range(1, 9):
            writer.append(step(0, number))
        for _ in takes:
            writer.flush()
        writer.close()
    found = read_jsonl(path, Line)
    assert found.bad == [] and [line.step for line in found.items] == list(range(1, 9)) and writer.lost == 0


def test_what_waits_for_room_is_bounded_said_once_and_said_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(JsonlWriter, "write", half_full([7] + [None] * 1000))
    writer = PatientWriter(path, keeps=2000)
    for number in range(1, 31):
        writer.append(step(0, number))
    held = writer.waiting
    assert 2 < held < 10 and writer.lost == 30 - held
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said and "No space left" in said and "free room" in said
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonlWriter, "write", half_full([]))
        writer.flush()
    steps = [line.step for line in read_jsonl(path, Line).items]
    assert steps == [1, *range(31 - held + 1, 31)], "the first was half written; then the newest"
    writer.append(step(0, 31))
    writer.close()
    assert f"{path}: {30 - held + 1} lines are lost" in capsys.readouterr().err
    with pytest.raises(FileExistsError):
        PatientWriter(path / "below")


def test_each_full_disk_counts_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was given up did not come late, and what was given up before is not said again."""
    writer = PatientWriter(tmp_path / "metrics.jsonl", keeps=1000)
    for given_up, lines in ((4, 6), (0, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(JsonlWriter, "write", half_full([None] * 1000))
            for number in range(lines):
                writer.append(step(0, number))
        kept = writer.waiting
        assert "not written" in capsys.readouterr().err and kept == lines - given_up
        writer.append(step(0, 9))
        said = capsys.readouterr().err
        assert f"written again; {kept} lines came late" in said
        assert (f", {given_up} had to be given up" in said) == bool(given_up) == ("given up" in said)
    assert writer.lost == 4
    writer.close()


def test_a_disk_that_does_not_confirm_what_it_took_is_said_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = PatientWriter(tmp_path / "metrics.jsonl")

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer.append(step(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        writer.sync()
        writer.sync()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "may be lost" in said and "kept in memory" not in said
    monkeypatch.setattr(JsonlWriter, "write", half_full([None] * 9))
    writer.append(step(0, 2))
    assert "lines are kept in memory" in capsys.readouterr().err, "a full disk after it is said, too"


def test_a_disk_that_was_full_at_first_is_said_to_be_full_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        writer = PatientWriter(tmp_path / "metrics.jsonl")
    writer.append(step(0, 1))
    assert capsys.readouterr().err.count("not written") == 1
    monkeypatch.setattr(JsonlWriter, "write", half_full([None]))
    writer.append(step(0, 2))
    assert capsys.readouterr().err.count("not written") == 1
