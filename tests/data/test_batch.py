from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch_check import check_batch
from data.memory_store import MemoryStore, random_store
from headway.account.errors import UserError
from headway.data.batch import IGNORE, PADDING_DOC, Batch, BatchBuilder, sent_to
from headway.data.split import split_batch
from headway.data.view import View, ViewOptions, Weighted


def view_of(*stores: MemoryStore, seq_len: int = 40, overlong: str = "split") -> View:
    options = ViewOptions(seq_len, overlong, keep_untrained=True)  # type: ignore[arg-type]
    return View([Weighted(store) for store in stores], options)


def no(rows: list[int] | np.ndarray) -> np.ndarray:
    return np.zeros(len(rows), dtype=bool)


def packed(view: View, rows: list[int], slots: int, masked: list[bool] | None = None) -> Batch:
    mask = no(rows) if masked is None else np.array(masked)
    return BatchBuilder(view).packed(np.array(rows), mask, slots)


def test_a_pack_slot_by_slot() -> None:
    store = MemoryStore([([11, 12, 13, 14], [0, 0, 1, 1]), ([21, 22], [1, 1]), ([31, 32, 33], [1, 0, 1])])
    batch = packed(view_of(store), [1, 0, 2], 12)
    assert batch.input_ids.tolist() == [[21, 22, 11, 12, 13, 14, 31, 32, 33, 0, 0, 0]]
    x = IGNORE
    assert batch.labels.tolist() == [[22, x, x, 13, 14, x, x, 33, x, x, x, x]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 2, 6, 9, 12]
    assert batch.documents.tolist() == [1, 0, 2, PADDING_DOC]
    assert (batch.tokens, batch.trained_tokens, batch.slots, batch.max_seqlen) == (9, 4, 12, 4)
    assert batch.lengths.tolist() == [2, 4, 3] and batch.packed
    dtypes = [t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids, batch.cu_seqlens)]
    assert dtypes == [torch.int64, torch.int64, torch.int64, torch.int32]


def test_a_rectangle_slot_by_slot() -> None:
    store = MemoryStore([([11, 12, 13, 14], [0, 0, 1, 1]), ([21, 22], [1, 1])])
    batch = BatchBuilder(view_of(store)).rectangular(np.array([1, 0]), no([1, 0]), 3, 4)
    x = IGNORE
    assert batch.input_ids.tolist() == [[21, 22, 0, 0], [11, 12, 13, 14], [0, 0, 0, 0]]
    assert batch.labels.tolist() == [[22, x, x, x], [x, 13, 14, x], [x, x, x, x]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 8, 12]
    assert batch.documents.tolist() == [1, PADDING_DOC, 0, PADDING_DOC]
    assert (batch.tokens, batch.trained_tokens, batch.slots, batch.packed) == (6, 3, 12, False)


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(0, 30), st.integers(3, 40))
@settings(max_examples=100, deadline=None)
def test_batches_equal_the_slow_reference(seed: int, count: int, tail: int, seq_len: int) -> None:
    view = view_of(random_store(count, seed, name="a"), random_store(count, seed + 1, name="b"), seq_len=seq_len)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(view.pieces))[: 1 + seed % len(view.pieces)]
    masked = rng.random(len(rows)) < 0.2
    lengths = view.pieces.length[rows]
    builder = BatchBuilder(view)
    for batch in (
        builder.packed(rows, masked, int(lengths.sum()) + tail),
        builder.rectangular(rows, masked, len(rows) + tail % 3, int(lengths.max()) + tail),
    ):
        check_batch(batch, view)
        real = batch.documents[batch.documents != PADDING_DOC]
        assert real.tolist() == view.pieces.raw[rows[~masked]].tolist()
        assert batch.trained_tokens == view.pieces.trained[rows[~masked]].sum()


def test_a_full_pack_has_no_padding_document() -> None:
    batch = packed(view_of(MemoryStore([[1, 2, 3], [4, 5]])), [0, 1], 5)
    assert batch.cu_seqlens.tolist() == [0, 3, 5] and PADDING_DOC not in batch.documents


def test_positions_and_table_agree_whatever_the_ids() -> None:
    """P02: documents made of ids that look like masks ([1, 1, 2, 2, 2, 0]) get positions from the one table."""
    batch = packed(view_of(MemoryStore([[1, 1], [2, 2, 2], [0]])), [0, 1, 2], 6)
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 6]


@pytest.mark.parametrize("pad_like", [0, 7])
def test_an_end_token_that_is_also_the_padding_id_is_learned(pad_like: int) -> None:
    """P15: labels are ignored by position, never by id."""
    batch = packed(view_of(MemoryStore([[5, 6, pad_like], [pad_like, 8, pad_like]])), [0, 1], 9)
    assert batch.labels[0, :6].tolist() == [6, pad_like, IGNORE, 8, pad_like, IGNORE]
    assert (batch.labels[0, 6:] == IGNORE).all()


def test_a_document_set_aside_becomes_padding_where_it_was() -> None:
    view = view_of(random_store(3))
    whole, without = packed(view, [0, 1, 2], 150), packed(view, [0, 1, 2], 150, [False, True, False])
    assert without.cu_seqlens.equal(whole.cu_seqlens) and without.position_ids.equal(whole.position_ids)
    assert without.documents.tolist() == [0, PADDING_DOC, 2, PADDING_DOC]
    begin, end = whole.cu_seqlens[1:3].tolist()
    for name, filler in (("input_ids", 0), ("labels", IGNORE)):
        mine, original = getattr(without, name)[0], getattr(whole, name)[0]
        assert (mine[begin:end] == filler).all()
        assert mine[:begin].equal(original[:begin]) and mine[end:].equal(original[end:])
    check_batch(without, view)


def test_a_padding_batch_teaches_nothing() -> None:
    view = view_of(random_store(2))
    for batch in (
        BatchBuilder(view).padding(1, 16, packed=True),
        BatchBuilder(view).padding(2, 8, packed=False),
        packed(view, [0, 1], 90, [True, True]),
    ):
        check_batch(batch, view)
        assert (batch.tokens, batch.trained_tokens, len(batch.lengths)) == (0, 0, 0)
        assert (batch.labels == IGNORE).all() and (batch.documents == PADDING_DOC).all()


def test_moving_keeps_everything() -> None:
    batch = packed(view_of(random_store(3)), [0, 1, 2], 128)
    moved = batch.to("cpu", non_blocking=True)
    for field in dataclasses.fields(Batch):
        mine, other = getattr(moved, field.name), getattr(batch, field.name)
        assert mine.equal(other) if isinstance(mine, torch.Tensor) else np.array_equal(mine, other)
    assert batch.to("meta").cu_seqlens.device.type == "meta"


def test_ids_outside_the_declared_vocabulary_are_named() -> None:
    fine = MemoryStore([[1, 999]], vocab_size=1000, name="fine")
    bad = MemoryStore([[1, 2], [3, 50, 4]], vocab_size=50, name="bad.jsonl", first_line=7)
    view = view_of(fine, bad)
    assert packed(view, [0, 1], 6).tokens == 4
    with pytest.raises(UserError, match=r"bad\.jsonl:8: token id 50 is outside the vocabulary of 50"):
        packed(view, [0, 1, 2], 8)
    bad._tokens[1] = np.array([3, -1, 4])  # what a damaged file of signed ids holds
    with pytest.raises(UserError, match=r"bad\.jsonl:8: token id -1"):
        packed(view, [1, 2], 8)


def test_a_mask_that_is_not_what_the_store_counted_is_named() -> None:
    """The step's loss is divided by the count: a wrong one would scale every gradient, silently."""
    store = MemoryStore([[1, 2, 3], ([4, 5, 6], [0, 0, 1])], name="masks.jsonl")
    view = view_of(store)
    store._masks[1] = np.array([0, 1, 1], dtype=np.uint8)
    with pytest.raises(UserError, match=r"masks\.jsonl:2: the mask has 2 trained tokens where .* counts 1"):
        packed(view, [0, 1], 8)


def test_a_store_that_returns_too_little_is_named() -> None:
    store = MemoryStore([[1, 2, 3]], name="cut.jsonl")
    view = view_of(store)
    store._tokens[0] = store._tokens[0][:1]  # numpy would spread this one id over the whole document
    with pytest.raises(UserError, match=r"cut\.jsonl:1: .* returned 1 tokens of 3"):
        packed(view, [0], 4)


def test_too_many_slots_or_tokens_are_refused() -> None:
    view = view_of(MemoryStore([[1, 2, 3]]))
    with pytest.raises(UserError, match="int32"):
        BatchBuilder(view).padding(2, 2**30, packed=False)
    with pytest.raises(ValueError, match="does not fit"):
        packed(view, [0], 2)


def shifted_without_documents(batch: Batch) -> Batch:
    """The library's own shift: the first token of the next document becomes a label."""
    labels = torch.full_like(batch.labels, IGNORE)
    labels[0, :-1] = batch.input_ids[0, 1:]
    return dataclasses.replace(batch, labels=labels)


def padding_joins_the_last_document(batch: Batch) -> Batch:
    table = torch.cat([batch.cu_seqlens[:-2], batch.cu_seqlens[-1:]])
    return dataclasses.replace(batch, cu_seqlens=table, documents=batch.documents[:-1])


def positions_run_on(batch: Batch) -> Batch:
    return dataclasses.replace(batch, position_ids=torch.arange(batch.slots)[None])


def masked_by_id(batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=batch.labels.masked_fill(batch.labels == 7, IGNORE))


def counts_padding(batch: Batch) -> Batch:
    return dataclasses.replace(batch, tokens=batch.slots)


def one_column_longer(batch: Batch) -> Batch:
    return dataclasses.replace(batch, position_ids=torch.cat([batch.position_ids, batch.position_ids[:, :1]], 1))


@pytest.mark.parametrize(
    "plant",
    [
        shifted_without_documents,
        padding_joins_the_last_document,
        positions_run_on,
        masked_by_id,
        counts_padding,
        one_column_longer,
    ],
)
def test_check_catches_planted(plant) -> None:  # type: ignore[no-untyped-def]
    view = view_of(MemoryStore([[5, 6, 7], [8, 9, 7, 7]]))
    batch = packed(view, [0, 1], 10)
    check_batch(batch, view)
    with pytest.raises(AssertionError):
        check_batch(plant(batch), view)


def test_a_batch_on_a_device_is_cut_without_a_wait_for_it() -> None:
    """On the meta device, whose values nobody can read."""
    view = view_of(MemoryStore([list(range(1, n)) for n in (9, 4, 17, 3)]))
    builder, pieces = BatchBuilder(view), np.arange(4)
    masked = np.array([False, True, False, False])
    packed, rows = builder.packed(pieces, masked, 48), builder.rectangular(pieces, masked, 4, 20)
    for batch in (packed, rows):
        for parts in (2, 3, 5):
            for here, there in zip(split_batch(batch, parts), split_batch(batch.to("meta"), parts), strict=True):
                assert there.input_ids.device.type == there.cu_seqlens.device.type == "meta"
                shapes = [(one.input_ids.shape, one.labels.shape, one.cu_seqlens.shape) for one in (here, there)]
                assert shapes[0] == shapes[1]
                facts = [
                    (one.trained_tokens, one.tokens, one.max_seqlen, one.documents.tolist()) for one in (here, there)
                ]
                assert facts[0] == facts[1]


def test_what_is_sent_to_a_gpu_lies_in_pinned_memory() -> None:
    """Else the host waits for the copy, in every step."""
    told: list[object] = []

    class Sent:
        def pin_memory(self) -> Sent:
            told.append("pinned")
            return self

        def to(self, device: object, non_blocking: bool = False) -> Sent:
            told.append(non_blocking)
            return self

    sent_to(torch.device("cuda", 0), Sent())  # type: ignore[arg-type]
    assert told == ["pinned", True]
