"""torch's variable-length flash attention over packed documents: the fast path on CUDA (it has no CPU kernel)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_ACCEPTS = frozenset(inspect.signature(varlen_attn).parameters)
"""Its keywords changed between torch releases: causality was a flag before it became a window, grouped queries and
the scale came later. What is passed is decided by the signature, never by a version number."""

MAX_HEAD_DIM = 256


def varlen_cannot(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> str | None:
    """Why the kernel cannot compute this call, in words, or None when it can."""
    head_dim = query.shape[-1]
    reason = shape_cannot(query, value, sinks=sinks, dropout=dropout)
    if reason is not None:
        return reason
    if softcap is not None:
        return "it has no logit softcap"
    if window is not None and "window_size" not in _ACCEPTS:
        return "this torch release's kernel has no sliding window"
    if scale is not None and "scale" not in _ACCEPTS and abs(scale * head_dim**0.5 - 1) > 1e-6:
        return "this torch release's kernel has a fixed scale"
    return None


def shape_cannot(query: Tensor, value: Tensor, *, sinks: Tensor | None, dropout: float) -> str | None:
    """What no flash kernel over variable lengths computes, in words, or None."""
    head_dim = query.shape[-1]
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {str(query.dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"head_dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if value.shape[-1] != head_dim:
        return f"value heads have another size ({value.shape[-1]}) than query heads ({head_dim})"
    if sinks is not None:
        return "it has no attention sinks"
    return "it has no dropout" if dropout > 0 else None


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside each document: query [1, H, S, D], key and value [1, K, S, D], cu_seqlens int32 [N + 1].

    max_seqlen: at least the longest document, in slots (a larger value launches blocks that end at once).
    Returns [1, H, S, D]. FlashAttention-2: arXiv:2307.08691.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _ACCEPTS:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if "window_size" in _ACCEPTS:
        # The kernel counts the tokens to the left; models count the token itself too.
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        options["is_causal"] = True
    if "scale" in _ACCEPTS:
        options["scale"] = scale
    out: Any = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    return out.transpose(0, 1)[None]
