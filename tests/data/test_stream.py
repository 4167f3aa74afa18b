from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch_check import check_batch
from data.memory_store import MemoryStore, random_store
from headway.account.errors import Refused, UserError
from headway.data import stream as stream_module
from headway.data.aside import FOREVER
from headway.data.batch import IGNORE, PADDING_DOC
from headway.data.global_batch import GlobalBatch, Position
from headway.data.rectangular import GROUP, row_order
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View, ViewOptions, Weighted

PACKED = {"pack": "best_fit", "slots": 64}
ROWS = {"pack": "none", "rows": 3}
GROUPED = {"pack": "none", "rows": 2, "group_by_length": True}
FIXED = {"pack": "none", "rows": 3, "pad_to_seq_len": True}


def make(
    count: int = 40, *, seq_len: int = 30, overlong: str = "split", weight: float = 1.0, **options: object
) -> Stream:
    sources = [Weighted(random_store(count, 1, name="a"), weight), Weighted(random_store(count // 2, 2, name="b"))]
    view = View(sources, ViewOptions(seq_len, overlong))  # type: ignore[arg-type]
    return Stream(view, StreamOptions(**{"seed": 5, "sequences_per_step": 4, **PACKED, **options}))  # type: ignore[arg-type]


def ids(batch: GlobalBatch, world: int = 1) -> list[int]:
    """Raw documents in global order as the ranks see them: micro-batches dealt out in turn."""
    ranks = [batch.micro_batches(rank, world) for rank in range(world)]
    assert len({len(mine) for mine in ranks}) == 1, "ranks have different numbers of micro-batches"
    in_turn = [micro for turn in zip(*ranks, strict=True) for micro in turn]
    documents = np.concatenate([micro.documents for micro in in_turn])
    return documents[documents != PADDING_DOC].tolist()


def walk(stream: Stream, position: Position, steps: int, world: int = 1) -> tuple[list[list[int]], Position]:
    seen = []
    for _ in range(steps):
        batch = stream.global_batch(position)
        seen.append(ids(batch, world))
        position = batch.next
    return seen, position


@pytest.mark.parametrize("options", [PACKED, ROWS, GROUPED, FIXED])
def test_an_epoch_trains_every_piece_once_and_counts_itself(options: dict[str, object]) -> None:
    stream = make(**options)
    view, report = stream.view, stream.efficiency(0)
    batches = list(stream.epoch(0))
    assert len(batches) == stream.steps_in_epoch(0)
    assert Counter(raw for batch in batches for raw in ids(batch)) == Counter(view.pieces.raw.tolist())
    for batch in batches:
        micro = batch.micro_batches(0, 1)
        for each in micro:
            check_batch(each, view)
        # The plan knows the normaliser of the whole step without reading a token; the labels must agree.
        assert batch.trained_tokens == sum(int((each.labels != IGNORE).sum()) for each in micro)
        assert batch.tokens == sum(each.tokens for each in micro) == batch.lengths.sum()
        assert batch.slots == sum(each.slots for each in micro)
        assert batch.documents.tolist() == ids(batch)
    assert report.slots == sum(batch.slots for batch in batches)
    assert report.tokens == sum(batch.tokens for batch in batches) == view.pieces.length.sum()
    assert report.trained_tokens == sum(batch.trained_tokens for batch in batches)
    assert report.micro_batches == sum(len(batch.micro) for batch in batches)
    assert report.documents == len(view.pieces) == sum(len(batch.documents) for batch in batches)
    assert report.fill == report.tokens / report.slots
    assert batches[-1].next == Position(1, 0)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 7), st.sampled_from([PACKED, ROWS, GROUPED, FIXED]))
@settings(max_examples=40, deadline=None)
def test_any_number_of_ranks_reads_the_same_order(
    count: int, per_step: int, world: int, options: dict[str, object]
) -> None:
    stream = make(2 * count, sequences_per_step=per_step, **options)
    for batch in stream.epoch(0):
        alone, together = batch.micro_batches(0, 1), [batch.micro_batches(rank, world) for rank in range(world)]
        assert ids(batch, world) == ids(batch) == batch.documents.tolist()
        trained = sum(micro.trained_tokens for mine in together for micro in mine)
        assert trained == batch.trained_tokens == sum(micro.trained_tokens for micro in alone)


def test_three_ranks_ten_documents() -> None:
    view = View([Weighted(MemoryStore([[1, 2, 3]] * 10))], ViewOptions(3, "drop"))
    stream = Stream(view, StreamOptions(slots=3, sequences_per_step=4))
    counts = [[len(batch.micro_batches(rank, 3)) for rank in range(3)] for batch in stream.epoch(0)]
    assert counts == [[2, 2, 2], [2, 2, 2], [1, 1, 1]]
    assert sorted(raw for batch in stream.epoch(0) for raw in ids(batch, 3)) == list(range(10))
    last = list(stream.epoch(0))[-1]
    assert [micro.tokens for rank in range(3) for micro in last.micro_batches(rank, 3)] == [3, 3, 0]
    filler = last.micro_batches(2, 3)[0]
    assert filler.slots == 3 and (filler.labels == IGNORE).all()


def test_rank_dependent_order_is_caught_when_planted() -> None:
    """A rank that shuffles for itself (the classic: seed + rank) must not pass the comparison above."""
    batch = make().global_batch(Position())
    other = make(seed=6).global_batch(Position())

    class Planted:
        def micro_batches(self, rank: int, world: int):  # type: ignore[no-untyped-def]
            return (other if rank else batch).micro_batches(rank, world)

    assert ids(Planted(), 2) != batch.documents.tolist()  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=8), st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_chain_of_stops_and_resumes_equals_one_run(legs: list[tuple[int, int]], rows: bool) -> None:
    """P26, P27, P31: every leg starts a new process with another number of ranks from the written record alone."""
    options = ROWS if rows else PACKED
    steps = sum(steps for steps, _ in legs)
    expected, end = walk(make(16, weight=1.5, **options), Position(), steps)
    seen, record = [], Position().to_dict()
    for leg, world in legs:
        part, position = walk(make(16, weight=1.5, **options), Position.from_dict(record), leg, world)
        seen += part
        record = position.to_dict()
    assert seen == expected and Position.from_dict(record) == end


def test_chains_reach_the_third_epoch() -> None:
    stream = make()
    steps = stream.steps_in_epoch(0) + stream.steps_in_epoch(1)
    _, position = walk(stream, Position(), steps)
    assert position == Position(2, 0)
    third = [ids(batch) for batch in stream.epoch(2)]
    assert walk(make(), Position(2, 0), len(third))[0] == third
    assert third != [ids(batch) for batch in make().epoch(0)]


def test_the_position_counts_documents_not_packs() -> None:
    """P27: three documents a pack; after two packs the position is six."""
    view = View([Weighted(MemoryStore([[1, 2, 3]] * 30))], ViewOptions(3, "drop"))
    stream = Stream(view, StreamOptions(slots=9, sequences_per_step=2))
    assert stream.global_batch(Position()).next == Position(0, 6)


def test_a_position_that_advances_by_packs_is_caught_when_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stream.global_batch

    def planted(self: Stream, position: Position) -> GlobalBatch:
        batch = original(self, position)
        return replace(batch, next=Position(position.epoch, position.documents + len(batch.micro)))

    monkeypatch.setattr(Stream, "global_batch", planted)
    view = View([Weighted(MemoryStore([[1, 2, 3]] * 30))], ViewOptions(3, "drop"))
    with pytest.raises(Refused, match="no sequence of epoch 0 starts at document 2 of 30"):
        walk(Stream(view, StreamOptions(slots=9, sequences_per_step=2)), Position(), 2)


def test_seeking_reads_no_token() -> None:
    stream = make()
    batch = stream.global_batch(Position())
    for _ in range(7):
        batch = stream.global_batch(batch.next)
    assert batch.trained_tokens and sum(store.token_reads for store in stream.view.stores) == 0  # type: ignore[attr-defined]


def test_another_size_of_step_may_continue_another_packing_may_not() -> None:
    stream = make(sequences_per_step=4)
    position = stream.global_batch(Position()).next
    rest = [raw for batch in walk_epoch(stream, position) for raw in ids(batch)]
    assert [raw for batch in walk_epoch(make(sequences_per_step=3), position) for raw in ids(batch)] == rest
    for beyond in (Position(0, position.documents + 10**6), Position(0, stream.plan(0).documents + 1)):
        with pytest.raises(Refused, match="packing options"):
            stream.global_batch(beyond)
    assert stream.global_batch(Position(0, stream.plan(0).documents)).position == Position(1, 0)


def walk_epoch(stream: Stream, position: Position) -> list[GlobalBatch]:
    batches = [stream.global_batch(position)]
    while batches[-1].next.epoch == position.epoch:
        batches.append(stream.global_batch(batches[-1].next))
    return batches


def test_slots_are_kept_packs_times_capacity() -> None:
    """P07: 5 packs, 4 a step: the last step is smaller and says so. 1 pack, 4 a step: no crash."""
    view = View([Weighted(MemoryStore([[1, 2, 3]] * 5))], ViewOptions(3, "drop"))
    five = Stream(view, StreamOptions(slots=4, sequences_per_step=4))
    assert [batch.slots for batch in five.epoch(0)] == [16, 4]
    assert (five.efficiency(0).slots, five.efficiency(0).sequences, five.efficiency(0).fill) == (20, 5, 0.75)
    one = Stream(
        View([Weighted(MemoryStore([[1, 2, 3]]))], ViewOptions(3, "drop")), StreamOptions(slots=4, sequences_per_step=4)
    )
    assert [batch.slots for batch in one.epoch(0)] == [4] and one.steps_in_epoch(0) == 1
    assert "75.000% filled" in str(one.efficiency(0))


def test_trimmed_packs_hold_the_same_documents_and_no_empty_slot() -> None:
    whole = make(60, **PACKED)
    trimmed = whole.trimmed()
    for one, other in zip(whole.epoch(0), trimmed.epoch(0), strict=True):
        assert one.documents.tolist() == other.documents.tolist()
        assert (one.position, one.next) == (other.position, other.next) and other.slots == other.tokens <= one.slots
        for a, b in zip(one.micro_batches(0, 1), other.micro_batches(0, 1), strict=True):
            assert (a.input_ids[:, : b.slots] == b.input_ids).all() and (a.labels[:, : b.slots] == b.labels).all()
    assert trimmed.fingerprint == whole.fingerprint, "a run may go on under the other shape"
    first = int(next(trimmed.epoch(0)).documents[0])
    aside = trimmed.with_quarantine([trimmed.view.locate(first)], epoch=0)
    batch = next(aside.epoch(0))
    assert batch.slots > batch.tokens, "a document set aside stays as padding in its place"


def test_rectangles_are_as_wide_as_their_longest_row() -> None:
    documents = [[1] * n for n in (2, 9, 4, 7, 3, 8, 5, 6)]
    view = View([Weighted(MemoryStore(documents))], ViewOptions(10, "drop"))
    plain = Stream(view, StreamOptions(pack="none", rows=3, sequences_per_step=8))
    batch = plain.global_batch(Position())
    shapes = [tuple(micro.input_ids.shape) for micro in batch.micro_batches(0, 1)]
    assert [rows for rows, _ in shapes] == [3, 3, 2]
    assert [width for _, width in shapes] == [max(batch.lengths[i : i + 3]) for i in (0, 3, 6)]
    fixed = Stream(view, StreamOptions(pack="none", rows=3, sequences_per_step=8, pad_to_seq_len=True))
    shapes = [
        tuple(micro.input_ids.shape)
        for rank in range(2)
        for micro in fixed.global_batch(Position()).micro_batches(rank, 2)
    ]
    assert shapes == [(3, 10)] * 4


def test_grouping_by_length_saves_slots_and_loses_nothing() -> None:
    plain, grouped = make(200, **{**GROUPED, "group_by_length": False}), make(200, **GROUPED)
    assert grouped.efficiency(0).slots < plain.efficiency(0).slots
    assert grouped.efficiency(0).tokens == plain.efficiency(0).tokens
    widths = [batch.lengths.max() for batch in grouped.epoch(0)]
    assert np.any(np.diff(widths) > 0) and np.any(np.diff(widths) < 0), "length drifts along the epoch"


@pytest.mark.parametrize("count", [3, 98, 301])
def test_micro_batches_of_a_group_hold_neighbours_in_length(count: int) -> None:
    """A short micro-batch anywhere but last would shift those after it, and pair long rows with short ones."""
    lengths = np.random.default_rng(0).permutation(count) + 1
    for epoch in range(5):
        order = row_order(lengths, 4, True, epoch=epoch)
        assert sorted(order.tolist()) == list(range(count))
        for begin in range(0, count, 4 * GROUP):
            group = lengths[order[begin : begin + 4 * GROUP]]
            rank = np.empty(len(group), dtype=int)
            rank[np.argsort(group)] = np.arange(len(group))
            rows = [set(rank[at : at + 4].tolist()) for at in range(0, len(group), 4)]
            assert sorted(rows, key=min) == [set(range(at, min(at + 4, len(group)))) for at in range(0, len(group), 4)]


def test_packing_saves_slots_against_rectangles() -> None:
    assert make(200).efficiency(0).slots < make(200, **ROWS).efficiency(0).slots


def test_documents_in_quarantine_are_masked_now_and_left_out_later() -> None:
    stream = make()
    bad = [stream.view.locate(raw) for raw in stream.global_batch(Position()).documents[[1, 3]].tolist()]
    raws = {stream.view.raw_id(*document) for document in bad}
    clean = stream.with_quarantine(bad, epoch=0)
    for before, after in zip(stream.epoch(0), clean.epoch(0), strict=True):
        assert (before.position, before.next, before.slots) == (after.position, after.next, after.slots)
        assert after.documents.tolist() == [raw for raw in before.documents.tolist() if raw not in raws]
        pairs = list(zip(before.micro_batches(0, 1), after.micro_batches(0, 1), strict=True))
        assert all(old.cu_seqlens.equal(new.cu_seqlens) for old, new in pairs)
        assert after.trained_tokens == sum(int((new.labels != IGNORE).sum()) for _, new in pairs)
        for _, new in pairs:
            check_batch(new, stream.view)
    later = {raw for batch in clean.epoch(1) for raw in ids(batch)}
    assert later == set(stream.view.pieces.raw.tolist()) - raws
    assert clean.efficiency(1).tokens < stream.efficiency(1).tokens
    assert {raw for batch in stream.epoch(1) for raw in ids(batch)} >= raws, "the stream before was changed"


def test_quarantine_is_restored_from_its_record_alone() -> None:
    stream = make()
    first = stream.view.locate(int(stream.global_batch(Position()).documents[0]))
    second = stream.view.locate(int(stream.global_batch(Position(1)).documents[0]))
    live = stream.with_quarantine([first], epoch=0).with_quarantine([second, first], epoch=1)
    assert live.quarantine == {first: ((0, FOREVER),), second: ((1, FOREVER),)}, (
        "a document set aside twice stays set aside since the first time"
    )
    restored = Stream(stream.view, stream.options, quarantine=live.quarantine)
    for epoch in range(3):
        assert [ids(b) for b in restored.epoch(epoch)] == [ids(b) for b in live.epoch(epoch)]
    # During epoch 1 the second document is masked in place, so the plan is the one made when epoch 1 began.
    assert (
        restored.plan(1).documents
        == live.plan(1).documents
        == stream.with_quarantine([first], epoch=0).plan(1).documents
    )


def test_quarantine_of_everything_or_of_nothing_known_is_named() -> None:
    stream = make(4)
    everything = [stream.view.locate(raw) for raw in set(stream.view.pieces.raw.tolist())]
    empty = stream.with_quarantine(everything, epoch=0)
    assert sum(batch.trained_tokens for batch in empty.epoch(0)) == 0
    with pytest.raises(UserError, match=r"epoch 1 has nothing to train on.*quarantine"):
        empty.global_batch(Position(1))
    with pytest.raises(UserError, match="data source 1 has no document 99"):
        stream.with_quarantine([(1, 99)], epoch=0)


def test_an_epoch_that_a_small_weight_leaves_empty_is_named() -> None:
    view = View([Weighted(MemoryStore([[1, 2, 3]]), 0.25)], ViewOptions(3, "drop"))
    with pytest.raises(UserError, match="weights of the data sources select 0 documents"):
        Stream(view, StreamOptions(slots=4)).global_batch(Position())


def test_two_plans_are_kept_and_each_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = stream_module.packed_plan

    def counted(view, slots, seed, epoch, left_out):  # type: ignore[no-untyped-def]
        made.append(epoch)
        return original(view, slots, seed, epoch, left_out)

    monkeypatch.setattr(stream_module, "packed_plan", counted)
    stream = make()
    for epoch in (0, 1, 0, 1, 2, 1, 2, 0):
        stream.plan(epoch)
    stream.with_quarantine([(0, 0)], epoch=2).plan(2)
    assert made == [0, 1, 2, 0]
    threads = [threading.Thread(target=stream.plan, args=(9,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [0, 1, 2, 0, 9]


def test_a_resume_with_other_data_or_options_is_refused_with_the_difference() -> None:
    saved = make().fingerprint_parts()
    make(sequences_per_step=9).refuse_if_changed(saved)
    assert make(sequences_per_step=9).fingerprint == make().fingerprint
    for other, named in (
        (make(seq_len=20), r"data\.seq_len 30 -> 20"),
        (make(slots=65), r"data\.slots 64 -> 65"),
        (make(seed=6), "seed 5 -> 6"),
        (make(41), r"documents of data source 0 40 -> 41"),
        (make(weight=2.0), r"weight of data source 0 1\.0 -> 2\.0"),
        (make(overlong="truncate"), "data.overlong split -> truncate"),
        (make(**ROWS), r"data\.pack best_fit -> none; data\.slots 64 -> \(absent\)"),
    ):
        assert other.fingerprint != make().fingerprint
        with pytest.raises(Refused, match=named) as caught:
            other.refuse_if_changed(saved)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"slots": 29}, r"data\.slots=29 cannot hold the longest document \(30 tokens\)"),
        ({"sequences_per_step": 0}, "global batch of 0 sequences"),
        ({"pack": "none", "rows": 0}, "rows=0"),
        ({"pack": "first"}, "best_fit, none"),
        ({"group_by_length": True}, "mean nothing for packs"),
        ({"pad_to_seq_len": True}, "mean nothing for packs"),
    ],
)
def test_options_that_make_no_sense_are_errors_not_silence(options: dict[str, object], named: str) -> None:
    """P06: nothing that was asked for is switched off silently."""
    with pytest.raises(UserError, match=named):
        make(**options)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"epoch": 0},
        {"epoch": -1, "documents": 0},
        {"epoch": 0, "documents": 1.0},
        {"epoch": 0, "documents": 0, "packs": 1},
    ],
)
def test_a_damaged_position_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(UserError, match="not a data position"):
        Position.from_dict(record)


def test_a_rank_outside_the_world_is_a_bug() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        make().global_batch(Position()).micro_batches(2, 2)
