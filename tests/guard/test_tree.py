"""Flat keys: the same as DCP's, nothing lost, nothing merged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from headway.guard.tree import assign, flatten, part_bytes, place

leaves = st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text("abc", max_size=2)
leaves |= st.integers(0, 3).map(lambda n: torch.full((n,), 1.0)) | st.tuples(st.floats(0, 1), st.floats(0, 1))
# Keys without dots: with them two paths may join to one key, which is refused (tested below).
names = st.text("abc", min_size=1, max_size=2)
trees = st.dictionaries(
    names,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=9
    ),
    max_size=4,
)


def all_tensors(node: object) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return [tensor for child in children for tensor in all_tensors(child)]


@settings(deadline=None)
@given(trees)
def test_every_leaf_is_found_under_its_path_and_can_be_set(tree: dict) -> None:
    flat = flatten(tree)
    assert {id(tensor) for tensor in flat.tensors.values()} == {id(tensor) for tensor in all_tensors(tree)}
    assert flat.tensors.keys() | flat.values.keys() == flat.paths.keys()
    assert not flat.tensors.keys() & flat.values.keys()
    for key, path in flat.paths.items():
        leaf = place(tree, path)
        assert leaf is (flat.tensors[key] if key in flat.tensors else flat.values[key])
        assign(tree, path, "seen")
        assert place(tree, path) == "seen"


@settings(deadline=None)
@given(trees)
def test_tensor_keys_are_those_of_dcp(tree: dict) -> None:
    theirs = {key for key, value in flatten_state_dict(tree)[0].items() if isinstance(value, torch.Tensor)}
    assert flatten(tree).tensors.keys() == theirs


def test_ambiguous_and_unsupported_trees_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two entries have the key a\.b\.c"):
        flatten({"a": {"b.c": 1}, "a.b": {"c": 2}})
    with pytest.raises(TypeError, match="not text"):
        flatten({"a": {0: torch.zeros(1)}})
    with pytest.raises(TypeError, match="tuple with tensors"):
        flatten({"a": (torch.zeros(1), 1)})


def test_bytes_are_counted_by_part() -> None:
    tensors = flatten(
        {"model": {"w": torch.zeros(3, 2)}, "optimizer": {"s": torch.zeros(5, dtype=torch.bfloat16)}}
    ).tensors
    assert part_bytes(tensors) == {"model": 24, "optimizer": 10}
