from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.memory_store import MemoryStore, random_store
from headway.account.errors import UserError
from headway.data.view import View, ViewOptions, Weighted
from headway.data.vocabulary import check_vocabulary

DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(1, 99), st.integers(0, 1)), min_size=0, max_size=25), min_size=1, max_size=12
)


def view_of(store: MemoryStore, **options: object) -> View:
    return View([Weighted(store)], ViewOptions(**{"seq_len": 8, "overlong": "truncate", **options}))  # type: ignore[arg-type]


def spans(view: View) -> list[tuple[int, int, int]]:
    pieces = view.pieces
    return list(zip(pieces.doc.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True))


@pytest.mark.parametrize(
    ("policy", "kept", "lost"),
    [
        ("truncate", [(0, 0, 1), (1, 0, 2), (2, 0, 3), (3, 0, 3)], (1, 1, 0, 0)),
        ("split", [(0, 0, 1), (1, 0, 2), (2, 0, 3), (3, 0, 3), (3, 3, 1)], (0, 1, 0, 1)),
        ("drop", [(0, 0, 1), (1, 0, 2), (2, 0, 3)], (4, 3, 1, 0)),
    ],
)
def test_overlong_1234_at_3(policy: str, kept: list[tuple[int, int, int]], lost: tuple[int, ...]) -> None:
    """P05: documents of 1, 2, 3 and 4 tokens where 3 fit."""
    view = view_of(MemoryStore([[5] * n for n in (1, 2, 3, 4)]), seq_len=3, overlong=policy, keep_untrained=True)
    assert spans(view) == kept
    report = view.overlong
    assert (report.samples, report.affected, report.tokens_total, report.trained_total) == (4, 1, 10, 6)
    assert (report.tokens_lost, report.trained_lost, report.dropped, report.pieces_added) == lost


@pytest.mark.parametrize(("policy", "trained", "lost"), [("truncate", [3], 3), ("split", [3, 2], 1), ("drop", [], 6)])
def test_an_answer_that_crosses_the_limit(policy: str, trained: list[int], lost: int) -> None:
    """P05: five tokens of prompt, six of answer, eight fit: the labels that are lost are counted."""
    crossing = (list(range(1, 12)), [0] * 5 + [1] * 6)
    view = view_of(MemoryStore([crossing, ([1, 2], [0, 1])]), overlong=policy)
    # A split leaves an answer's token at the head of a piece, where it has nothing to be predicted from.
    assert view.pieces.trained[view.pieces.doc == 0].tolist() == trained
    assert view.overlong.trained_lost == lost


@given(DOCUMENTS, st.integers(1, 9), st.sampled_from(["truncate", "split", "drop"]))
@settings(max_examples=150, deadline=None)
def test_counts_equal_counting_token_by_token(raw: list[list[tuple[int, int]]], seq_len: int, policy: str) -> None:
    documents = [([token for token, _ in doc], [bit for _, bit in doc]) for doc in raw]
    options = {"seq_len": seq_len, "overlong": policy, "keep_untrained": True}
    try:
        view = view_of(MemoryStore(documents), keep_tails=True, **options)
    except UserError:
        assert all(not tokens or (policy == "drop" and len(tokens) > seq_len) for tokens, _ in documents)
        return
    expected, tokens_kept, trained_kept = [], 0, 0
    present = [(number, doc) for number, doc in enumerate(documents) if doc[0]]
    for number, (tokens, mask) in present:
        if policy == "drop" and len(tokens) > seq_len:
            continue
        for start in range(0, len(tokens) if policy == "split" else 1, seq_len):
            piece = mask[start : start + seq_len]
            expected.append((number, start, len(piece), sum(piece[1:])))
            tokens_kept += len(piece)
            trained_kept += sum(piece[1:])
    assert [(*span, n) for span, n in zip(spans(view), view.pieces.trained.tolist(), strict=True)] == expected
    report = view.overlong
    long = sum(len(tokens) > seq_len for _, (tokens, _) in present)
    assert (report.samples, report.affected) == (len(present), long)
    assert report.tokens_total - report.tokens_lost == tokens_kept
    assert report.trained_total - report.trained_lost == trained_kept
    assert report.dropped == (long if policy == "drop" else 0)
    assert report.pieces_added == len(expected) - (len(present) - report.dropped)
    assert view.untrained.empty == len(documents) - len(present)
    mute = [piece for piece in expected if piece[3] == 0]
    assert (view.untrained.pieces, view.untrained.tokens) == (len(mute), sum(piece[2] for piece in mute))

    without = view_of(MemoryStore(documents), **options)
    ends, cut_off = [], 0
    for number, start, length, labels in expected:
        mask = documents[number][1][start : start + length]
        cut = len(documents[number][1]) > seq_len and labels
        ends.append((number, start, max(at for at in range(1, length) if mask[at]) + 1 if cut else length))
        cut_off += length - ends[-1][2]
    assert spans(without) == ends and without.overlong.tail_tokens == cut_off
    assert (without.pieces.trained == view.pieces.trained).all()
    assert dataclasses.replace(without.overlong, tail_tokens=0) == view.overlong  # what was lost is told apart


def test_counting_catches_a_planted_label_on_a_first_token() -> None:
    """A count that forgets that a piece's first token cannot be predicted must differ from the report."""
    view = view_of(MemoryStore([([1] * 8, [0, 0, 0, 0, 1, 1, 0, 0])]), seq_len=4, overlong="split")
    naive = [0, 2]  # mask[0:4].sum(), mask[4:8].sum()
    assert view.pieces.trained.tolist() == [1] != [n for n in naive if n]
    assert view.overlong.trained_lost == 1


def test_tails_that_nothing_is_learnt_from_are_left_out_counted_and_part_of_the_fingerprint() -> None:
    answered = ([1] * 12, [0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0])
    short = ([1] * 6, [0, 1, 0, 0, 0, 0])  # not cut: its mask is not read at every start
    view, kept = (view_of(MemoryStore([answered, short]), keep_tails=keep) for keep in (False, True))
    assert spans(view) == [(0, 0, 4), (1, 0, 6)] and spans(kept) == [(0, 0, 8), (1, 0, 6)]
    assert "4 tokens left out that no label follows" in str(view.overlong) and "follows" not in str(kept.overlong)
    assert view.fingerprint_parts().items() - kept.fingerprint_parts().items() == {("data.keep_tails", "false")}
    assert view_of(MemoryStore([short])).fingerprint_parts().keys() == kept.fingerprint_parts().keys()
    split = view_of(MemoryStore([answered]), overlong="split")
    assert spans(split) == [(0, 0, 4), (0, 8, 2)]


def test_only_partly_trained_overlong_documents_need_their_mask() -> None:
    store = MemoryStore([[1] * 20, ([1] * 20, [0] * 20), ([1] * 20, [0] * 10 + [1] * 10), ([1] * 5, [0, 0, 0, 1, 1])])
    view_of(store, overlong="split", keep_untrained=True)
    assert store.mask_reads == 3  # the three pieces of document 2


def test_pieces_without_labels_are_counted_and_left_out_unless_kept() -> None:
    documents = [([1, 2, 3], [1, 0, 0]), ([1, 2], [0, 1]), ([], []), ([7], [1])]
    view = view_of(MemoryStore(documents))
    assert view.pieces.doc.tolist() == [1]
    assert (view.untrained.pieces, view.untrained.tokens, view.untrained.empty) == (2, 4, 1)
    assert not view.untrained.kept
    kept = view_of(MemoryStore(documents), keep_untrained=True)
    assert kept.pieces.doc.tolist() == [0, 1, 3] and kept.untrained.kept
    assert dataclasses.replace(kept.untrained, kept=False) == view.untrained


def two_stores(*weights: float, **options: object) -> View:
    stores = [random_store(30, seed=number, name=f"{number}.jsonl") for number in range(len(weights))]
    sources = [Weighted(store, weight) for store, weight in zip(stores, weights, strict=True)]
    return View(sources, ViewOptions(**{"seq_len": 10, "overlong": "split", **options}))  # type: ignore[arg-type]


def seen(view: View, seed: int, epoch: int) -> dict[int, int]:
    """Raw document -> how often an epoch sees it; all its pieces must agree."""
    counts = np.bincount(view.select(seed, epoch), minlength=len(view.pieces))
    result: dict[int, int] = {}
    for raw, count in zip(view.pieces.raw.tolist(), counts.tolist(), strict=True):
        assert result.setdefault(raw, count) == count, "pieces of one document were chosen apart"
    return result


def test_whole_weights_repeat_every_document() -> None:
    view = two_stores(1.0, 3.0, 0.0)
    counts = seen(view, 0, 0)
    assert counts == {raw: 1 if raw < 30 else 3 for raw in range(60)}


def test_fractions_take_the_rest_before_repeating() -> None:
    view = two_stores(0.5, 2.25)
    epochs = [seen(view, 7, epoch) for epoch in range(4)]
    assert [sum(counts[raw] for raw in range(30)) for counts in epochs] == [15] * 4
    assert all(epochs[0][raw] + epochs[1][raw] == 1 for raw in range(30))
    assert all(sum(counts[raw] for counts in epochs) == 9 for raw in range(30, 60))
    assert epochs == [seen(two_stores(0.5, 2.25), 7, epoch) for epoch in range(4)]
    assert epochs[0] != seen(view, 8, 0)


@given(st.integers(1, 40), st.integers(1, 99), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_any_fraction_is_balanced_over_any_epochs(count: int, percent: int, epochs: int) -> None:
    view = View([Weighted(random_store(count), percent / 100)], ViewOptions(10**6, "drop"))
    total = sum((np.bincount(view.select(1, epoch), minlength=count) for epoch in range(epochs)), np.zeros(count, int))
    assert total.max() - total.min() <= 1
    assert total.sum() == epochs * percent * count // 100


def test_holdout_is_exact_disjoint_and_stays_when_the_length_changes() -> None:
    view = two_stores(1.0, 2.5, 0.0, holdout=7)
    aside = view.held_out()
    chosen = set(aside.pieces.raw.tolist())
    assert len(chosen) == 7 and max(chosen) < 60
    assert chosen.isdisjoint(view.pieces.raw.tolist())
    assert len(chosen | set(view.pieces.raw.tolist())) == 60
    assert seen(aside, 0, 0) == dict.fromkeys(sorted(chosen), 1)
    longer = two_stores(1.0, 2.5, 0.0, holdout=7, seq_len=50, overlong="truncate")
    assert set(longer.held_out().pieces.raw.tolist()) == chosen
    assert set(two_stores(1.0, 2.5, 0.0, holdout=7, holdout_seed=1).held_out().pieces.raw.tolist()) != chosen
    assert view.overlong.samples == 53 and aside.overlong.samples == 7


def test_raw_ids_run_over_all_stores_and_lead_back_to_the_line() -> None:
    view = two_stores(1.0, 1.0)
    assert view.documents == 60
    assert view.raw_id(1, 4) == 34 and view.locate(34) == (1, 4) and view.locate(29) == (0, 29)
    assert view.origin(34) == "1.jsonl:5"
    assert [view.locate(view.raw_id(s, d)) for s in (0, 1) for d in range(30)] == [
        (s, d) for s in (0, 1) for d in range(30)
    ]
    for call in (
        lambda: view.raw_id(2, 0),
        lambda: view.raw_id(0, 30),
        lambda: view.locate(60),
        lambda: view.locate(-1),
    ):
        with pytest.raises(UserError):
            call()


@pytest.mark.parametrize(
    ("documents", "options", "named"),
    [
        ([[1] * 9, [1] * 10], {"overlong": "drop"}, "all 2 documents are longer than data.seq_len=8"),
        ([], {}, "hold 0 documents"),
        ([[], []], {}, "2 of them without a token"),
        ([([1] * 12, [0] * 9 + [1] * 3)], {}, "none of 1 documents has a trained token within data.seq_len=8"),
        ([[1, 2]], {"holdout": 1}, "eval.holdout=1 leaves nothing"),
        ([[1, 2]], {"holdout": -1}, "eval.holdout"),
        ([[1, 2]], {"seq_len": 0}, "data.seq_len=0"),
        ([[1, 2]], {"overlong": "wrap"}, "truncate, split, drop"),
    ],
)
def test_nothing_to_train_on_names_the_cause(documents: list, options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        view_of(MemoryStore(documents), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", [(), (0.0,), (-1.0,), (float("nan"),), (float("inf"),)])
def test_senseless_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=r"weight|source"):
        two_stores(*weights)


def test_held_out_without_holdout_is_an_error() -> None:
    with pytest.raises(UserError, match=r"eval\.holdout"):
        two_stores(1.0).held_out()


def test_fingerprint_parts_change_with_whatever_changes_the_pieces() -> None:
    base = two_stores(1.0, 2.0).fingerprint_parts()
    assert base == two_stores(1.0, 2.0).fingerprint_parts()
    for other in (
        two_stores(1.0, 2.5),
        two_stores(1.0),
        two_stores(1.0, 2.0, seq_len=11),
        two_stores(1.0, 2.0, overlong="drop", seq_len=60),
        two_stores(1.0, 2.0, holdout=1),
        two_stores(1.0, 2.0, keep_untrained=True),
    ):
        assert other.fingerprint_parts() != base
    assert all(isinstance(value, (str, int)) for value in base.values())


def test_vocabulary_larger_than_the_models_is_fine_while_unused_and_named_when_used() -> None:
    fine = MemoryStore([[1, 2], [3, 511]], vocab_size=1000, name="fine.jsonl")
    bad = MemoryStore([[1, 2], [3, 4], [5, 512, 600]], vocab_size=1000, name="bad.jsonl", first_line=10)
    check_vocabulary(View([Weighted(fine)], ViewOptions(8, "drop")), 512)
    with pytest.raises(UserError, match=r"bad\.jsonl:12 \(data source 1\): token id 600 .* vocabulary of 512"):
        check_vocabulary(View([Weighted(fine), Weighted(bad)], ViewOptions(8, "drop")), 512)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("largest", "fits"), [(511, True), (512, False)])
def test_the_first_id_beyond_the_vocabulary_is_already_too_large(known: bool, largest: int, fits: bool) -> None:
    store = MemoryStore([[1, largest]])
    if known:
        store.max_token = largest  # type: ignore[attr-defined]
    view = View([Weighted(store)], ViewOptions(8, "drop"))
    if fits:
        check_vocabulary(view, 512)
    else:
        with pytest.raises(UserError, match="token id 512"):
            check_vocabulary(view, 512)


def test_vocabulary_check_reads_no_token_where_the_largest_id_is_known() -> None:
    store = MemoryStore([[1, 2], [3, 511]])
    view = View([Weighted(store)], ViewOptions(8, "drop"))
    check_vocabulary(view, 1000)
    store.max_token = 511  # type: ignore[attr-defined]
    check_vocabulary(view, 512)
    assert store.token_reads == 0
