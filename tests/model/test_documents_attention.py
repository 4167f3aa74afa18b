from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.model import documents_attention
from headway.model.documents_attention import attend_documents
from model.naive_attention import naive_attention, random_qkv, with_gradients, worst


def check(lengths, heads, kv_heads, head_dim, value_dim=None, seed=0, tolerance=1e-5, dtype=torch.float32, **options):
    qkv = random_qkv(heads, kv_heads, sum(lengths), head_dim, value_dim, seed)
    reference = with_gradients(lambda q, k, v: naive_attention(q, k, v, lengths, **options), qkv)
    narrow = {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    result = with_gradients(lambda q, k, v: attend_documents(q, k, v, lengths, **narrow), [x.to(dtype) for x in qkv])
    assert worst(result, reference) < tolerance


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 19), min_size=1, max_size=6).filter(any),
    group=st.sampled_from([1, 2, 3]),
    window=st.one_of(st.none(), st.integers(1, 22)),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    scale=st.sampled_from([None, 0.7]),
    block=st.sampled_from([4, 512]),
    seed=st.integers(0, 99),
)
def test_every_combination_equals_the_naive_reference(lengths, group, window, softcap, sinks, scale, block, seed):
    sink = torch.linspace(-1, 1, 2 * group, dtype=torch.float64) if sinks else None
    before, documents_attention.BLOCK = documents_attention.BLOCK, block  # several blocks in a short document
    try:
        check(lengths, 2 * group, 2, 8, seed=seed, window=window, softcap=softcap, sinks=sink, scale=scale)
    finally:
        documents_attention.BLOCK = before


@pytest.mark.parametrize("head_dim", [64, 80, 33])
@pytest.mark.parametrize(
    "lengths", [[37], [1] * 23, [16, 1, 20], [1] * 499 + [2]], ids=["one", "single tokens", "mixed", "500 tiny ones"]
)
def test_odd_head_sizes_and_packs(head_dim, lengths):
    check(lengths, 3, 1, head_dim, tolerance=3e-5)


def test_value_heads_of_another_size():
    check([5, 12], 4, 4, 24, 16)
    check([5, 12], 4, 2, 24, 16, window=4)


def test_bfloat16_is_close_and_keeps_its_type():
    check([9, 21], 4, 2, 16, dtype=torch.bfloat16, tolerance=1e-2)
    q, k, v = (x.bfloat16() for x in random_qkv(4, 2, 30, 16))
    assert attend_documents(q, k, v, [9, 21]).dtype == torch.bfloat16


def test_bfloat16_without_hardware_support_is_computed_in_float32(monkeypatch):
    monkeypatch.setattr(documents_attention, "_cpu_has_bf16", lambda: False)
    q, k, v = (x.bfloat16() for x in random_qkv(4, 2, 30, 16))
    assert torch.equal(
        attend_documents(q, k, v, [9, 21]), attend_documents(q.float(), k.float(), v.float(), [9, 21]).bfloat16()
    )


def test_documents_that_do_not_fill_the_pack_are_an_error():
    q, k, v = random_qkv(2, 2, 10, 8)
    with pytest.raises(ValueError, match="9 slots do not fill a pack of 10"):
        attend_documents(q, k, v, [4, 5])


@pytest.mark.parametrize("window", [None, 4])
def test_dropout_drops_weights_and_keeps_the_mean(window):
    q, k, v = (x.float() for x in random_qkv(2, 2, 12, 8))
    torch.manual_seed(0)
    for softcap in (None, 5.0):
        plain = attend_documents(q, k, v, [12], window=window, softcap=softcap)
        dropped = torch.stack(
            [attend_documents(q, k, v, [12], window=window, softcap=softcap, dropout=0.3) for _ in range(400)]
        )
        assert not torch.allclose(dropped[0], plain)
        assert float((dropped.mean(0) - plain).norm() / plain.norm()) < 0.1


def test_the_comparison_catches_two_merged_documents_and_a_window_off_by_one():
    qkv = random_qkv(2, 2, 20, 8)
    reference = with_gradients(lambda q, k, v: naive_attention(q, k, v, [8, 12], window=4), qkv)
    for lengths, window in (([20], 4), ([8, 12], 5), ([8, 12], 3), ([8, 12], None)):
        planted = with_gradients(lambda q, k, v, n=lengths, w=window: attend_documents(q, k, v, n, window=w), qkv)
        assert worst(planted, reference) > 1e-2
