"""The attention implementation `headway`: registered with transformers, exact over packed documents.

Which document a slot belongs to travels as `cu_seq_lens_q` and `max_length_q` (transformers' own names, which every
model hands through to its attention) with the call itself, so that it also reaches a recomputed or compiled layer.
A model that loses them on the way gets an error here; nothing ever attends across documents in silence.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from headway.account.errors import UserError
from headway.model.documents_attention import attend_documents
from headway.model.flash_attention import MODULES, attend_flash, flash_cannot
from headway.model.flex_attention import attend_flex
from headway.model.triton_attention import attend_triton, triton_attention_cannot
from headway.model.varlen_attention import attend_varlen, varlen_cannot

log = logging.getLogger(__name__)

NAME = "headway"
CHOSEN = "headway_attention_path"
"""Attribute of an attention module: the path that `fuse: auto` found fastest and right for its kind of call."""
Path = Literal["documents", "varlen", "triton", "flex", "flash2", "flash3", "flash4"]
PATHS: tuple[Path, ...] = ("documents", "varlen", "triton", "flex", "flash2", "flash3", "flash4")


def register() -> None:
    """Make `attn_implementation="headway"` known to transformers. Repeating it changes nothing.

    No mask is registered, and so none is made: documents, causality and windows are computed from the document table.
    For a registered one transformers looks for documents in the positions, which the host would wait for in each pass.
    """
    AttentionInterface.register(NAME, headway_attention)


def choose_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    device_type: str | None = None,
    chosen: Path | None = None,
) -> tuple[Path, str]:
    """Which computation fits this call, and why (shown once per reason). device_type: for tests without a GPU.

    chosen: the one that was measured fastest; it is taken wherever it can compute the call.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "dropout": dropout,
    }
    if chosen is not None and path_cannot(chosen, query, key, value, **options) is None:
        return chosen, "measured fastest"
    if (device_type or query.device.type) != "cuda":
        return "documents", "one SDPA call per document is the fastest exact attention off CUDA"
    reason = varlen_cannot(query, key, value, **options)
    if reason is None:
        return "varlen", "flash attention over variable lengths"
    if dropout > 0:
        return "documents", f"not varlen: {reason}; FlexAttention has none either"
    return "flex", f"not varlen: {reason}"


def path_cannot(path: Path, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str | None:
    """Why a path cannot compute this call, in words, or None. options: scale, window, softcap, sinks, dropout."""
    if path == "documents":
        return None
    if path == "triton":
        return triton_attention_cannot(query, key, value, **options)
    if query.device.type != "cuda":
        return "its kernels are for CUDA" if path != "flex" else "it has no backward on a CPU"
    if path == "varlen":
        return varlen_cannot(query, key, value, **options)
    if path == "flex":
        return "it has no dropout" if options.get("dropout") else None
    return flash_cannot(path, query, key, value, **options)


def attend(
    path: Path,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    """Causal attention inside each document by one path that can: [1, H, S, D], key and value [1, K, S, D]."""
    if path == "varlen":
        return attend_varlen(query, key, value, cu_seqlens, max_seqlen, **options)
    if path == "triton":
        return attend_triton(query, key, value, cu_seqlens, softcap=softcap, **options)
    if path == "flex":
        return attend_flex(query, key, value, cu_seqlens, sinks=sinks, softcap=softcap, **options)
    if path in MODULES:
        return attend_flash(path, query, key, value, cu_seqlens, max_seqlen, softcap=softcap, **options)
    return _attend_documents(query, key, value, cu_seqlens, sinks=sinks, dropout=dropout, softcap=softcap, **options)


def headway_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, S, D], key and value [1, K, S, D] -> ([1, S, H, D], None).

    cu_seq_lens_q int32 [N + 1]: document n is slots cu[n]..cu[n + 1]; max_length_q: at least the longest document.
    Raises UserError when the model asks for something this attention would compute wrongly.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise UserError(
            f"{type(module).__name__} got no document table: it was not called through headway, or its model does not "
            "hand keyword arguments to its attention; set model.attention to sdpa"
        )
    _refuse_what_would_be_wrong(module, query, key, attention_mask, is_causal, kwargs)
    query, key, value = _in_one_dtype(query, key, value)
    options: dict[str, Any] = {"scale": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    chosen: Path | None = getattr(module, CHOSEN, None)
    path, why = choose_path(query, key, value, dropout=dropout, chosen=chosen, **options)
    if not torch.compiler.is_compiling():
        _say_once(type(module).__name__, path, why)
    out = attend(path, query, key, value, cu_seq_lens_q, max_length_q, dropout=dropout, **options)
    return out.transpose(1, 2).contiguous(), None


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The type that the model computes in. Rotary tables and float32 norms widen queries and keys alone, and autocast
    knows nothing of the varlen kernel: unaided, half-precision training would fall back to another path or fail."""
    kind = value.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


@torch.compiler.disable
def _attend_documents(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **options: Any) -> Tensor:
    # Traced, the loop over documents would be compiled again for every new list of lengths.
    return attend_documents(query, key, value, cu_seqlens.diff().tolist(), **options)


_UNSUPPORTED = ("position_bias", "head_mask", "alibi", "sinks")


def _refuse_what_would_be_wrong(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if query.shape[0] != 1:
        raise UserError(f"{name}: the {NAME} attention takes one pack, not a batch of {query.shape[0]} rows")
    if key.shape[2] != query.shape[2]:
        raise UserError(f"{name}: keys of {key.shape[2]} slots for {query.shape[2]} queries; a key cache is in use")
    if attention_mask is not None:
        raise UserError(f"{name} brings its own attention mask, which {NAME} ignores; set model.attention to sdpa")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise UserError(f"{name} attends in both directions; {NAME} trains causal models")
    for key_name in _UNSUPPORTED:
        if kwargs.get(key_name) is not None:
            raise UserError(f"{name} needs {key_name}, which {NAME} does not compute; set model.attention to eager")


@lru_cache(maxsize=256)
def _say_once(module_name: str, path: Path, why: str) -> None:
    log.log(logging.INFO if path != "flex" else logging.WARNING, "%s: attention by %s (%s)", module_name, path, why)
