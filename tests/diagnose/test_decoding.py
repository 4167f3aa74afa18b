"""Decoding in processes beside this one gives what decoding here gives: events, order, losses, metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.bench.diagnose_fuzz import damage, make_text
from headway.diagnose import decoding, source
from headway.diagnose.columns import Columns
from headway.diagnose.decoding import Decoder, Here, Pool, Stretch, decoder_for, sound_piece
from headway.diagnose.linking import innermost_open
from headway.diagnose.piece import Piece
from headway.diagnose.source import Source
from headway.diagnose.splitting import Splitter


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


class Ahead:
    """A decoder that runs ahead as a pool does, and counts."""

    depth = 5

    def __init__(self) -> None:
        self.submitted, self.answered = 0, 0

    def submit(self, stretch: Stretch) -> bytes:
        self.submitted += 1
        return b"".join(stretch)

    def result(self, ticket: bytes) -> Piece | None:
        self.answered += 1
        return sound_piece((ticket,))


def outcome(path: Path, decoder: Decoder) -> list[Any]:
    """All that a reader says of a file, or its refusal."""
    splitter, columns = Splitter(Source(path)), Columns()
    try:
        for piece in splitter.pieces(decoder):
            columns.add(piece)
    except UserError as error:
        return [str(error)]
    tables = [
        {name: np.concatenate(pieces).tolist() for name, pieces in table.pieces.items()}
        for table in (columns.gpu, columns.host)
    ]
    return [
        tables, list(columns.names), list(columns.threads), list(columns.shapes), columns.comm, columns.thread_names,
        columns.spans, columns.other_phases, splitter.losses, splitter.truncated, splitter.metadata,
    ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(number=st.integers(0, 10**6), block=st.integers(70, 3000))
def test_processes_read_what_one_process_reads(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, number: int, block: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(damage(number, seed=7)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BLOCK", block)
        here, beside, counted = outcome(path, Here()), outcome(path, pool), Ahead()
        assert beside == here
        assert outcome(path, counted) == here
        assert counted.submitted == counted.answered  # nothing is left in a pipe


def test_whole_file_is_read_in_many_stretches(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BLOCK", 400)
    (tmp_path / "t.json").write_bytes(make_text(0))
    whole = outcome(tmp_path / "t.json", pool)
    assert len(whole[0][0]["start"]) == 60
    assert not whole[8].lost and not whole[9]


def test_a_process_that_dies_costs_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BLOCK", 400)
    (tmp_path / "t.json").write_bytes(make_text(0))
    whole = outcome(tmp_path / "t.json", Here())
    mortal = Pool(2)
    try:
        mortal._processes[0].kill()
        assert outcome(tmp_path / "t.json", mortal) == whole
        mortal._processes[1].kill()
        assert outcome(tmp_path / "t.json", mortal) == whole
    finally:
        mortal.close()


def test_a_stretch_beyond_the_shared_memory_is_decoded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_bytes(make_text(0))
    whole = outcome(tmp_path / "t.json", Here())
    monkeypatch.setattr(source, "BLOCK", 500)
    small = Pool(2, slot=450)
    try:
        assert outcome(tmp_path / "t.json", small) == whole
    finally:
        small.close()


def test_small_files_start_no_process_and_large_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(make_text(0))
    with decoder_for(path) as decoder:
        assert isinstance(decoder, Here)
    monkeypatch.setattr(decoding, "_WORTH_PLAIN", 1)
    monkeypatch.setattr(decoding.threading, "active_count", lambda: 1)
    monkeypatch.setattr(decoding.os, "sched_getaffinity", lambda _: {0, 1})
    with decoder_for(path) as decoder:
        assert isinstance(decoder, Pool) and len(decoder._processes) == 2
        processes = decoder._processes
    assert not any(process.is_alive() for process in processes)
    monkeypatch.setattr(decoding.threading, "active_count", lambda: 2)  # forking beside other threads may hang
    with decoder_for(path) as decoder:
        assert isinstance(decoder, Here)


def test_metadata_behind_the_events_is_found_whatever_it_holds(tmp_path: Path) -> None:
    footer = b'], "extra": [{"a": 1}, {"b": 2}], "baseTimeNanoseconds": 77}'
    events = make_text(0).rsplit(b"]", 1)[0]
    path = tmp_path / "t.json"
    path.write_bytes(events + footer)
    for block in (1 << 20, 300, 90):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, "BLOCK", block)
            splitter = Splitter(Source(path))
            list(splitter.pieces(Ahead()))
        assert splitter.metadata["baseTimeNanoseconds"] == 77, block
        assert splitter.metadata["extra"] == [{"a": 1}, {"b": 2}]
        assert not splitter.truncated and not splitter.losses.mended


slices = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25), st.integers(0, 1)), max_size=25)


@settings(max_examples=150, deadline=None)
@given(slices=slices, moments=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 1)), max_size=12))
def test_innermost_open_is_the_latest_that_began_and_has_not_ended(
    slices: list[tuple[int, int, int]], moments: list[tuple[int, int]]
) -> None:
    slices = sorted(slices, key=lambda item: (item[0], -item[1]))
    start = np.array([item[0] for item in slices], np.int64)
    end = start + np.array([item[1] for item in slices], np.int64)
    thread = np.array([item[2] for item in slices], np.int32)
    at = np.array([item[0] for item in moments], np.int64)
    on = np.array([item[1] for item in moments], np.int32)
    found = innermost_open(at, on, start, end, thread)
    for moment, row in zip(moments, found.tolist(), strict=True):
        inside = [
            number
            for number in range(len(slices))
            if thread[number] == moment[1] and start[number] <= moment[0] < end[number]
        ]
        assert row == (inside[-1] if inside else -1)
