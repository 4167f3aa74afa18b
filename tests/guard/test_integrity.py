"""Digests and votes: every flipped bit is seen, and the odd rank is named only where a majority says so."""

from __future__ import annotations

import pytest
import torch
from guard_helpers import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.guard.integrity import (
    CollectiveMismatch,
    ReplicasDiffer,
    check_collectives,
    check_replicas,
    digest,
    odd_ones_out,
    state_tensors,
)

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def slow_digest(tensors: list[Tensor]) -> int:
    """One number at a time, in Python's integers."""
    total = 0
    for place, tensor in enumerate(tensors):
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        whole = len(raw) // 8 * 8
        words = [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, whole, 8)]
        total += (2 * place + 1) * (sum(words) + sum(raw[whole:]))
    return total % (1 << 64)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_flipped_bit_changes_the_digest(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    kinds = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    tensors = [(torch.rand(3, 5, generator=generator) * 200).to(kind) for kind in kinds]
    if data.draw(st.booleans()):  # not where 8-byte words lie
        tensors = [torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:] for tensor in tensors]
    before = digest(tensors)
    assert before == slow_digest(tensors) == digest([tensor.clone() for tensor in tensors])
    victim = data.draw(st.integers(0, len(tensors) - 1))
    flat = tensors[victim].view(torch.uint8).flatten()
    at, bit = data.draw(st.integers(0, len(flat) - 1)), data.draw(st.integers(0, 7))
    tensors[victim].view(torch.uint8).flatten()[at] = int(flat[at]) ^ (1 << bit)
    assert digest(tensors) != before


def test_swapped_tensors_are_seen() -> None:
    one, two = torch.rand(4), torch.rand(4)
    assert digest([one, two]) != digest([two, one]) and digest([]) == 0


@given(st.integers(2, 9), st.data())
def test_only_a_majority_names(size: int, data: st.DataObject) -> None:
    odd = data.draw(st.sets(st.integers(0, size - 1), max_size=size))
    named = odd_ones_out({rank: f"own {rank}" if rank in odd else "same" for rank in range(size)})
    if size >= 3 and 0 < len(odd) < size / 2:
        assert named == sorted(odd)
    elif not odd or size < 3 or size - len(odd) <= size / 2:
        assert named == []


def test_numbers_of_collectives() -> None:
    check_collectives([7, 7, 7])
    with pytest.raises(CollectiveMismatch, match="rank 1 differs from the majority") as caught:
        check_collectives([7, 6, 7])
    assert caught.value.rank == 1
    with pytest.raises(CollectiveMismatch, match="none can be named") as caught:
        check_collectives([7, 6])
    assert caught.value.rank is None


def _check(rank: int, flipped: int | None, shards: int) -> str:
    torch.manual_seed(rank % shards)
    state = {"model": {"w": torch.rand(8)}, "optimizer": {"m": torch.rand(3), "step": 4}}
    if rank == flipped:
        state["optimizer"]["m"].view(torch.int32)[1] ^= 1 << 22  # type: ignore[index]
    try:
        check_replicas(state, shards, 30)
    except ReplicasDiffer as error:
        return f"{error.rank}: {error}"
    return "equal"


@pytest.mark.parametrize(
    ("ranks", "flipped", "shards", "said"),
    [
        (3, None, 1, "equal"),
        (3, 2, 1, "2: step 30: rank 2 differs from the majority in state"),
        (2, 1, 1, "None: step 30: ranks 0, 1 disagree in state; with this many, none can be named"),
        (2, 1, 2, "equal"),  # sharded: nobody has the same
        (4, 3, 2, "None: step 30: ranks 1, 3 disagree in state; with this many, none can be named"),
    ],
)
def test_all_ranks_say_the_same(ranks: int, flipped: int | None, shards: int, said: str) -> None:
    outcomes = run_ranks(ranks, _check, flipped, shards)
    assert [outcome.value for outcome in outcomes] == [said] * ranks


def test_the_state_in_the_order_of_its_keys() -> None:
    state = {"optimizer": {"b": torch.ones(1), "a": torch.zeros(1)}, "model": {"w": torch.full((1,), 2.0), "n": 3}}
    assert [float(tensor) for tensor in state_tensors(state)] == [2.0, 0.0, 1.0]
