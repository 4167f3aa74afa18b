"""FlexAttention over packed documents: the general path on CUDA, for what the varlen kernel does not compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

BLOCK = 128
"""FlexAttention's own block. Shorter or ragged packs are padded to it: each length of its own would be compiled again,
and under 128 another kernel would run than in training."""

_MASKS: Any = WeakTensorKeyDictionary()
"""cu_seqlens tensor -> {(slots, window): BlockMask}: all layers of a step share one, and it dies with its batch."""


@torch.compiler.disable(recursive=False)
def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same function as `attend_documents` (without dropout); cu_seqlens int32 [D + 1], repeats at its end allowed.

    FlexAttention: arXiv:2412.05496. It has no backward on CPU.
    """
    heads, kv_heads, slots = query.shape[1], key.shape[1], query.shape[2]
    if padding := -slots % BLOCK:
        # Slots past the table's end are one more document.
        query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    grouped = heads != kv_heads
    if grouped and heads & (heads - 1):
        # Its grouped kernels take powers of two only.
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
        grouped = False
    attend: Any = _compiled() if query.is_cuda else flex_attention
    aux = None if sinks is None else AuxRequest(lse=True)
    out = attend(
        query,
        key,
        value,
        score_mod=_capped(softcap),
        block_mask=_block_mask(cu_seqlens, slots + padding, window),
        scale=scale,
        enable_gqa=grouped,
        return_aux=aux,
    )
    if sinks is not None:
        out, extra = out
        # A sink adds exp(sink) to the softmax's denominator exp(lse): sigmoid(lse - sink) is left for the tokens.
        kept = torch.sigmoid(extra.lse - sinks.float().view(1, -1, 1))
        out = (out * kept.unsqueeze(-1)).to(query.dtype)
    return out[:, :, :slots]


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    # Uncompiled, it writes the whole score matrix to memory.
    return torch.compile(flex_attention)


@lru_cache(maxsize=8)
def _capped(softcap: float | None) -> Callable[..., Tensor] | None:
    """One function object per cap: a new one on every call would be compiled again."""
    if softcap is None:
        return None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _block_mask(cu_seqlens: Tensor, slots: int, window: int | None) -> BlockMask:
    masks = _MASKS.setdefault(cu_seqlens, {})
    if (slots, window) not in masks:
        masks[slots, window] = _build_block_mask(cu_seqlens, slots, window)
    return masks[slots, window]


def _build_block_mask(cu_seqlens: Tensor, slots: int, window: int | None) -> BlockMask:
    document = torch.bucketize(torch.arange(slots, device=cu_seqlens.device), cu_seqlens[1:], right=True)

    def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (document[q] == document[k]) & (q >= k)
        return same if window is None else same & (q - k < window)

    device = cu_seqlens.device
    # Uncompiled it writes out slots x slots; compiling takes longer than it saves where packs are small, i.e. on CPU.
    return create_block_mask(seen, None, None, slots, slots, device=str(device), _compile=device.type == "cuda")
