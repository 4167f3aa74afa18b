"""The ledger's file: several writers at once, amendments, torn lines."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.events import Incident
from headway.record.incidents import append_incident, read_incidents
from headway.record.jsonl import JsonlWriter


def incident(name: str, **changes: object) -> Incident:
    known = {"fault": "hang", "step": 3, "time": 1.0, "monotonic_ns": 5, "host": "a", "evidence": "x" * 9000}
    return Incident(id=name, **{**known, **changes})  # type: ignore[arg-type]


def write_many(path: Path, writer: int) -> None:
    for number in range(50):
        append_incident(path, incident(f"{writer}-{number}"))


def test_writers_in_several_processes_lose_and_tear_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run" / "incidents.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, writer)) for writer in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = read_incidents(path)
    assert not found.bad and {item.id for item in found.items} == {f"{w}-{n}" for w in range(3) for n in range(50)}


def test_a_torn_line_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    append_incident(path, incident("a"))
    path.write_bytes(path.read_bytes() + path.read_bytes()[:40])
    append_incident(path, incident("b"))
    found = read_incidents(path)
    assert [item.id for item in found.items] == ["a", "b"] and len(found.bad) == 1


@pytest.mark.parametrize("locks", [True, False])
def test_a_full_disk_cuts_off_no_line_of_others(locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is taken back; not where there are no locks, and another rank has written behind it."""
    path = tmp_path / "incidents.jsonl"

    def write(writer: JsonlWriter, content: bytes) -> int:
        if len(content) < 5000:
            raise OSError(errno.ENOSPC, "full")
        taken = os.write(writer._fd, content[:5000])
        if not locks:
            with path.open("ab") as other:
                other.write(b"\n" + line)
        return taken

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    append_incident(path, incident("a"))
    line = path.read_bytes().replace(b'"a"', b'"b"', 1)
    monkeypatch.setattr(JsonlWriter, "write", write)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="full"):
        append_incident(path, incident("c"))
    found = read_incidents(path)
    assert [item.id for item in found.items] == (["a"] if locks else ["a", "b"]) and len(found.bad) == (not locks)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=12))
def test_the_newest_line_of_an_id_counts_in_the_order_of_first_lines(
    tmp_path_factory: object, lines: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "incidents.jsonl"  # type: ignore[attr-defined]
    for name, lost in lines:
        append_incident(path, incident(name, steps_lost=lost, evidence=""))
    found = [(item.id, item.steps_lost) for item in read_incidents(path).items]
    assert found == list(dict(lines).items())
