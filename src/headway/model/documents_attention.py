"""Attention over packed documents, one document at a time: exact on every device, the fast path on CPU.

`torch.split` and one SDPA call per document beat every alternative measured on CPU (padding documents of similar
length together, slicing, a custom autograd node around the flash kernel, one masked call over the whole pack).
Slices instead of `split` cost a full-size zero gradient per document.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512
"""Query rows per block where a mask or the scores must be written out; bounds memory at BLOCK x (keys in reach)."""


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention inside each of the documents that fill the pack.

    query [1, H, S, D], key [1, K, S, D], value [1, K, S, E], H a multiple of K (grouped queries; key and value are not
    repeated); lengths: documents' lengths in slots, sum S, zeros allowed. Returns [1, H, S, E] in query's dtype.

    scale:   factor on the scores, default D ** -0.5.
    window:  a token sees itself and the window - 1 tokens before it.
    softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118).
    sinks:   [H], one learned extra score per head that takes probability and gives nothing (gpt-oss).
    dropout: probability, applied to the attention weights.
    """
    if sum(lengths) != query.shape[2]:
        raise ValueError(f"documents of {sum(lengths)} slots do not fill a pack of {query.shape[2]}")
    dtype = query.dtype
    if _compute_in_float32(query):
        query, key, value = query.float(), key.float(), value.float()
    lengths = [length for length in lengths if length]
    documents = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    with torch.autocast(query.device.type, enabled=False):  # it would undo the choice of type made here
        out = [_one_document(q, k, v, scale, window, softcap, sinks, dropout) for q, k, v in documents]
    return torch.cat(out, 2).to(dtype)


def _one_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    length = q.shape[2]
    plain = softcap is None and sinks is None
    if plain and (window is None or length <= window):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    out = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        block = (q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop])
        seen = _seen(start, stop, first, window, q.device)
        if plain:
            out.append(
                F.scaled_dot_product_attention(
                    *block, attn_mask=seen, dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
                )
            )
        else:
            out.append(_written_out(*block, seen, scale, softcap, sinks, dropout))
    return torch.cat(out, 2)


def _seen(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """bool [stop - start, stop - first]: which keys first..stop the queries start..stop see."""
    behind = torch.arange(start, stop, device=device)[:, None] - torch.arange(first, stop, device=device)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """The textbook computation, in float32 or wider, for what no fused CPU kernel does."""
    kv_heads, rows = k.shape[1], q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (kv_heads, -1))  # [1, K, H/K, rows, D]
    scores = grouped @ k.to(wide).unsqueeze(2).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide).view(1, kv_heads, -1, 1, 1).expand(-1, -1, -1, rows, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return (weights @ v.to(wide).unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _compute_in_float32(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16) and not _cpu_has_bf16()


@lru_cache(maxsize=1)
def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 natively. Without that its attention kernel is several times slower in
    bfloat16 than in float32."""
    return any(
        getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ) or torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2", "AVX512")
