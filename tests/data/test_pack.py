from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.data import pack
from headway.data.order import hash_keys, permutation, stable_order
from headway.data.pack import FITS, Packs, best_fit

LENGTHS = st.integers(1, 60).flatmap(lambda cap: st.tuples(st.just(cap), st.lists(st.integers(1, cap), max_size=120)))
SPARSE = st.integers(1, 10**6).flatmap(lambda cap: st.tuples(st.just(cap), st.lists(st.integers(1, cap), max_size=60)))


def obvious_decreasing(lengths: list[int], capacity: int, *, first_fit: bool) -> list[int]:
    """Free slots of the packs of BFD or FFD, one document and one pack at a time."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = [number for number, left in enumerate(free) if left >= length]
        if not room:
            free.append(capacity - length)
        else:
            free[room[0] if first_fit else min(room, key=lambda number: free[number])] -= length
    return free


def check_packs(packs: Packs, lengths: np.ndarray) -> None:
    """No pack overfilled or empty, every document exactly once."""
    assert Counter(packs.order.tolist()) == Counter(range(len(lengths)))
    assert packs.offsets[0] == 0 and packs.offsets[-1] == len(lengths)
    assert (np.diff(packs.offsets) > 0).all()
    for begin, end in zip(packs.offsets[:-1], packs.offsets[1:], strict=True):
        assert lengths[packs.order[begin:end]].sum() <= packs.capacity
    assert packs.tokens == lengths.sum()


def free_slots(packs: Packs, lengths: np.ndarray) -> list[int]:
    spans = zip(packs.offsets[:-1], packs.offsets[1:], strict=True)
    return sorted(packs.capacity - int(lengths[packs.order[a:b]].sum()) for a, b in spans)


@given(st.one_of(LENGTHS, SPARSE), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_packs_are_sound_and_as_few_as_the_better_of_both(case: tuple[int, list[int]], seed: int) -> None:
    capacity, values = case
    lengths = np.array(values, dtype=np.int64)
    packs = best_fit(lengths, capacity, seed=seed)
    check_packs(packs, lengths)
    best = obvious_decreasing(values, capacity, first_fit=False)
    first = obvious_decreasing(values, capacity, first_fit=True)
    assert len(packs) == min(len(best), len(first))


@pytest.mark.parametrize("algorithm", FITS)
@given(case=st.one_of(LENGTHS, SPARSE))
@settings(max_examples=80, deadline=None)
def test_both_algorithms_leave_exactly_what_the_obvious_ones_leave(algorithm: str, case: tuple[int, list[int]]) -> None:
    capacity, values = case
    packer = pack._Packer(capacity, FITS[algorithm])
    for size, count in sorted(Counter(values).items(), reverse=True):
        packer.place(size, count)
    descending = np.array(sorted(values, reverse=True), dtype=np.int64)
    filled = np.bincount(packer.pack_of_each(), weights=descending, minlength=packer.opened)
    expected = obvious_decreasing(values, capacity, first_fit=algorithm.startswith("first"))
    # Packs of equal free space are interchangeable, so best fit fixes them only up to their numbers.
    assert sorted((capacity - filled).astype(int).tolist()) == sorted(expected)


def test_first_fit_is_kept_where_it_needs_fewer_packs() -> None:
    lengths = np.array([20, 12, 11, 4, 4, 3, 2])
    assert len(obvious_decreasing(lengths.tolist(), 28, first_fit=False)) == 3
    packs = best_fit(lengths, 28)
    check_packs(packs, lengths)
    assert len(packs) == 2 and packs.algorithm == "first-fit decreasing"


def test_same_seed_and_epoch_same_packs_others_differ_in_all_three_ways() -> None:
    lengths = np.repeat(np.arange(1, 41), 25)
    first, again = best_fit(lengths, 97, seed=3, epoch=1), best_fit(lengths, 97, seed=3, epoch=1)
    assert (first.order == again.order).all() and (first.offsets == again.offsets).all()
    for other in (best_fit(lengths, 97, seed=4, epoch=1), best_fit(lengths, 97, seed=3, epoch=2)):
        assert len(other) == len(first)
        members = [
            {frozenset(p.order[a:b].tolist()) for a, b in zip(p.offsets[:-1], p.offsets[1:], strict=True)}
            for p in (first, other)
        ]
        assert members[0] != members[1], "equal lengths were not dealt out anew"
        assert (np.diff(first.offsets)[:50] != np.diff(other.offsets)[:50]).any(), "the packs come in the same order"
    inside = [lengths[first.order[a:b]] for a, b in zip(first.offsets[:-1], first.offsets[1:], strict=True)]
    assert any((np.diff(part) > 0).any() for part in inside), "documents lie by length inside packs"


def test_the_order_is_frozen() -> None:
    """A run resumed with a later release must read the same documents: a change here needs a new ORDER_VERSION."""
    assert hash_keys(2, "a", 1).tolist() == [15850276798307135188, 5981875991538768345]
    assert permutation(8, "rows", 7, 0).tolist() == [7, 3, 1, 4, 6, 5, 2, 0]
    assert best_fit(np.array([5, 3, 8, 2, 2, 7, 1, 4]), 9, seed=1, epoch=2).order.tolist() == [7, 0, 6, 2, 3, 1, 5, 4]


@given(st.lists(st.integers(0, 9), max_size=50), st.integers(0, 3))
def test_orders_are_permutations_and_stable(groups: list[int], seed: int) -> None:
    assert sorted(permutation(len(groups), seed).tolist()) == list(range(len(groups)))
    expected = np.argsort(np.array(groups, dtype=np.int64), kind="stable")
    assert stable_order(np.array(groups, dtype=np.int64)).tolist() == expected.tolist()


def test_permutations_are_uniform() -> None:
    first = np.bincount([permutation(4, "uniform", seed)[0] for seed in range(4000)], minlength=4)
    assert (np.abs(first - 1000) < 150).all(), first


@pytest.mark.parametrize("capacity", [8192, 8193])
def test_chat_like_lengths_fill_995_permille(capacity: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(700), 1.1, 100_000)), 16, 8192).astype(np.int64)
    packs = best_fit(lengths, capacity)
    check_packs(packs, lengths)
    assert packs.fill >= 0.995
    assert packs.fill == lengths.sum() / (len(packs) * capacity)


def test_real_chat_lengths_fill_995_permille(shared: Path) -> None:
    lengths = np.loadtxt(shared / "bench" / "chat_lengths_20k.txt", dtype=np.int64)
    packs = best_fit(lengths, 8192)
    check_packs(packs, lengths)
    assert packs.fill >= 0.995


def test_edges() -> None:
    nothing = best_fit(np.zeros(0, dtype=np.int64), 10)
    assert len(nothing) == 0 and nothing.fill == 0.0
    assert len(best_fit(np.ones(5, dtype=np.int64), 1)) == 5
    assert best_fit(np.array([7]), 7).fill == 1.0
    assert len(best_fit(np.ones(500, dtype=np.int64), 2**31 - 1)) == 1


@pytest.mark.parametrize(
    ("lengths", "capacity", "named"),
    [
        ([3, 9], 8, "document 1 has 9 tokens"),
        ([0, 3], 8, "document 0 has 0"),
        ([1], 0, "0 slots"),
        ([1], 2**31, "slots"),
    ],
)
def test_what_cannot_be_packed_is_named(lengths: list[int], capacity: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        best_fit(np.array(lengths), capacity)


def test_check_catches_planted_overfilled_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = pack._Packer._keep
    # Free space that is one slot too large: sooner or later a pack takes a token too many.
    monkeypatch.setattr(
        pack._Packer, "_keep", lambda self, first, packs, free, size: keep(self, first, packs, free + 1, size)
    )
    lengths = np.repeat(np.arange(1, 20), 3)
    with pytest.raises(AssertionError):
        check_packs(best_fit(lengths, 20), lengths)


def test_check_catches_planted_lost_document() -> None:
    lengths = np.arange(1, 20)
    packs = best_fit(lengths, 20)
    repeated = packs.order.copy()
    repeated[3] = repeated[4]  # one document twice, another one never
    shorter = replace(packs, order=packs.order[:-1], offsets=np.minimum(packs.offsets, len(lengths) - 1))
    for broken in (replace(packs, order=repeated), shorter):
        with pytest.raises(AssertionError):
            check_packs(broken, lengths)


def test_reference_catches_planted_worst_fit() -> None:
    """An algorithm that is sound but wasteful must not pass for best fit."""
    packer = pack._Packer(10, lambda first, free: -free)
    for size, count in ((6, 1), (5, 1), (4, 1), (3, 1), (2, 1)):
        packer.place(size, count)
    assert packer.opened > len(obvious_decreasing([6, 5, 4, 3, 2], 10, first_fit=False))
