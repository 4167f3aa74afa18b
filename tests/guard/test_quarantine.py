"""The list of documents set aside: kept through resumes, lost files and releases, and never dropped without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.memory_store import random_store
from headway.account.events import Quarantined
from headway.cli.main import main
from headway.data.global_batch import Position
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View, ViewOptions, Weighted
from headway.guard.quarantine import Quarantine, Why, read_ledger, release, standing
from headway.record.folder import RunFolder


@pytest.fixture
def view() -> View:
    return View([Weighted(random_store(30, seed=1))], ViewOptions(seq_len=40, overlong="truncate"))


def quarantine(folder: Path, view: View, writes: bool = True) -> Quarantine:
    return Quarantine(folder / "quarantine.jsonl", view, writes)


def documents(stream: Stream, epoch: int) -> list[int]:
    return [int(raw) for batch in stream.epoch(epoch) for raw in batch.documents]


def stream_of(view: View, held: Quarantine) -> Stream:
    return held.stream(Stream(view, StreamOptions(slots=64, sequences_per_step=2)))


def test_a_document_is_padding_this_epoch_and_out_of_the_next_plan(tmp_path: Path, view: View) -> None:
    held = quarantine(tmp_path, view)
    before = documents(stream_of(view, held), 1)
    held.add([(7, Why("spike", 9.5))], Position(1, 4), step=12)
    assert documents(stream_of(view, held), 1) == [raw for raw in before if raw != 7]
    assert 7 not in documents(stream_of(view, held), 2)
    (line,) = read_ledger(held.path)
    assert (line.document, line.line, line.epoch, line.position, line.step, line.loss) == (7, 8, 1, 4, 12, 9.5)
    words = " ".join(map(str, view.stores[0].tokens(7)))  # shorter than an excerpt
    assert line.excerpt == words[:240] and line.store == view.stores[0].fingerprint


def test_only_one_rank_writes(tmp_path: Path, view: View) -> None:
    other = quarantine(tmp_path, view, writes=False)
    other.add([(7, Why("spike"))], Position(), step=1)
    assert not other.path.exists() and other.state() == [[0, 7, 0, -1]]


def test_a_resume_has_what_the_checkpoint_says_and_what_the_ledger_says(tmp_path: Path, view: View) -> None:
    first = quarantine(tmp_path, view)
    first.add([(3, Why("spike"))], Position(0, 2), step=5)
    saved = first.state()
    first.add([(9, Why("spike"))], Position(0, 8), step=9)  # after the checkpoint
    again = quarantine(tmp_path, view)
    notes = again.join(saved, read_ledger(again.path), epoch=0)
    assert again.state() == first.state() and notes == ["quarantine: 2 documents are set aside"]


def test_a_lost_ledger_brings_nothing_back_and_is_written_again(tmp_path: Path, view: View) -> None:
    first = quarantine(tmp_path, view)
    first.add([(3, Why("spike"))], Position(0, 2), step=5)
    first.path.unlink()
    again = quarantine(tmp_path, view)
    notes = again.join(first.state(), read_ledger(again.path), epoch=0)
    assert again.state() == first.state() and "does not list stay set aside" in notes[0]
    assert [line.document for line in standing(read_ledger(again.path))] == [3]


def test_a_released_document_comes_back_with_the_next_epoch_and_stays(tmp_path: Path, view: View) -> None:
    held = quarantine(tmp_path, view)
    held.add([(3, Why("spike")), (5, Why("spike"))], Position(0, 2), step=5)
    release(held.path, [line for line in standing(read_ledger(held.path)) if line.document == 3])
    assert [line.document for line in standing(read_ledger(held.path))] == [5]
    again = quarantine(tmp_path, view)
    notes = again.join(held.state(), read_ledger(again.path), epoch=1)
    assert "released from epoch 2 on" in notes[0]
    counts = [documents(stream_of(view, again), epoch).count(3) for epoch in (0, 1, 2, 3)]
    assert counts == [0, 0, 1, 1]
    later = quarantine(tmp_path, view)
    later.join(again.state(), read_ledger(later.path), epoch=2)
    assert later.state() == again.state(), "a release is dated once"


def test_a_document_set_aside_again_after_its_release_is_out(tmp_path: Path, view: View) -> None:
    held = quarantine(tmp_path, view)
    held.add([(3, Why("spike"))], Position(0, 2), step=5)
    release(held.path, standing(read_ledger(held.path)))
    again = quarantine(tmp_path, view)
    again.join(held.state(), read_ledger(again.path), epoch=0)
    again.add([(3, Why("spike"))], Position(1, 1), step=40)
    assert 3 not in documents(stream_of(view, again), 2)


def test_set_aside_again_it_is_padding_where_it_was_back_and_nothing_else_moves(tmp_path: Path, view: View) -> None:
    """It kept its first epoch: the epoch in progress was planned anew without it, and training met other documents."""
    held = quarantine(tmp_path, view)
    held.add([(3, Why("spike"))], Position(0, 2), step=5)
    release(held.path, standing(read_ledger(held.path)))
    again = quarantine(tmp_path, view)
    again.join(held.state(), read_ledger(again.path), epoch=2)  # back in epoch 3
    before, saved = stream_of(view, again), again.state()
    looked_at = before.with_quarantine([(0, 3)], epoch=5)  # as the guard looks at a batch without it
    again.add([(3, Why("spike"))], Position(5, 1), step=90)
    resumed = quarantine(tmp_path, view)  # from a checkpoint of before
    resumed.join(saved, read_ledger(resumed.path), epoch=5)
    assert resumed.state() == again.state() == [[0, 3, 0, 2], [0, 3, 5, -1]]
    for stream in (looked_at, stream_of(view, again), stream_of(view, resumed)):
        for epoch in range(6):
            assert [b.next for b in stream.epoch(epoch)] == [b.next for b in before.epoch(epoch)]
            assert documents(stream, epoch) == [raw for raw in documents(before, epoch) if raw != 3]
        assert not stream.plan(6).order[stream.view.pieces.raw[stream.plan(6).order] == 3].size
    release(again.path, standing(read_ledger(again.path)))
    last = quarantine(tmp_path, view)
    last.join(again.state(), read_ledger(last.path), epoch=7)
    assert last.state() == [[0, 3, 0, 2], [0, 3, 5, 7]]


def test_a_lost_ledger_does_not_set_a_released_document_aside(tmp_path: Path, view: View) -> None:
    held = quarantine(tmp_path, view)
    held.join([[0, 3, 0, 2]], [], epoch=4)
    assert held.state() == [[0, 3, 0, 2]] and not standing(read_ledger(held.path))


def test_a_line_of_other_data_is_told_of_and_left_alone(tmp_path: Path, view: View) -> None:
    held = quarantine(tmp_path, view)
    line = Quarantined(
        store="another", document=1, source="other.jsonl", line=2, reason="spike", time=0.0, step=1, number=0
    )
    assert "belongs to data that this run does not have" in held.join([], [line], epoch=0)[0] and held.state() == []


def test_ids_that_no_tokenizer_knows_are_no_reason_to_fail(tmp_path: Path, view: View) -> None:
    held = quarantine(tmp_path, view)

    def decode(ids: list[int]) -> str:
        raise OverflowError("out of range")

    held.decode = decode
    held.add([(3, Why("bad id"))], Position(), step=1)
    assert "cannot be decoded: OverflowError" in read_ledger(held.path)[0].excerpt


def test_a_release_typed_twice_frees_nobody_else(
    tmp_path: Path, view: View, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers were places in the list of those left: the same command again freed the next document."""
    folder = RunFolder(tmp_path / "run").create()
    folder.metrics.touch()
    held = quarantine(folder.root, view)
    held.add([(3, Why("spike")), (5, Why("spike"))], Position(0, 2), step=5)

    def called(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["data", "quarantine", arguments[0], str(folder.root), *arguments[1:]])
        return int(end.value.code or 0), *capsys.readouterr()

    assert called("release", "1")[0] == 0
    with held.path.open("a") as ledger:
        ledger.write("no line of ours\n")
    code, out, err = called("release", "1")
    assert code == 0 and out.startswith("released before: ") and f"{held.path}:4: cannot be read" in err
    assert [line.document for line in standing(read_ledger(held.path))] == [5]
    code, out, err = called("list", "--json")
    assert [(one["number"], one["document"]) for one in json.loads(out)] == [(2, 5)] and "quarantine.jsonl:4" in err
    code, _, err = called("release", "2", "3")
    assert code == 2 and "the number 3; set aside are 2" in err
    assert called("release", "--all")[0] == called("release", "--all")[0] == 0
    assert not standing(read_ledger(held.path))
