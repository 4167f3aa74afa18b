"""The flash-attn packages (2, 3 and 4) over packed documents, where one can be imported: candidates, never the default.

Releases differ in keywords, in what they return and in what they refuse. Arguments are passed by name, as far as the
installed function's signature has them; what it then raises or gets wrong, the check before use finds.
FlashAttention-2: arXiv:2307.08691, -3: arXiv:2407.08608; 4 is the same authors' CuTe DSL version for Hopper on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headway.model.varlen_attention import shape_cannot

MODULES = {"flash2": "flash_attn", "flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
_FUNCTION = "flash_attn_varlen_func"


def flash_cannot(
    name: str,
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
    """Why the package cannot compute this call, in words, or None when it can. Any scale will do."""
    missing = flash_missing(name)
    if missing is not None:
        return missing
    accepts = _accepts(name)
    if window is not None and "window_size" not in accepts:
        return "this release has no sliding window"
    if softcap is not None and "softcap" not in accepts:
        return "this release has no logit softcap"
    return shape_cannot(query, value, sinks=sinks, dropout=dropout)


@lru_cache(maxsize=8)
def flash_missing(name: str) -> str | None:
    """Why the package cannot be used on this machine, in words, or None."""
    if not torch.cuda.is_available():
        return "its kernels are for CUDA"
    try:
        _function(name)
    except Exception as error:  # a package built for another torch or CUDA raises whatever it likes
        return f"{MODULES[name]} cannot be imported ({type(error).__name__})"
    return None


@torch.compiler.disable
def attend_flash(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention inside each document, as `attend_varlen`: [1, H, S, D], key and value [1, K, S, D], cu int32."""
    accepts = _accepts(name)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_seqlen,
        "softmax_scale": scale,
        "causal": True,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if window is not None:
        # The kernel counts the tokens to the left; models count the token itself too.
        options["window_size"] = (window - 1, 0)
    if softcap is not None:
        options["softcap"] = softcap
    out: Any = _function(name)(q, k, v, **{key: given for key, given in options.items() if key in accepts})
    out = out[0] if isinstance(out, tuple) else out  # some releases return the log-sum-exp too
    return out.transpose(0, 1)[None]


@lru_cache(maxsize=8)
def _function(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(MODULES[name]), _FUNCTION)


@lru_cache(maxsize=8)
def _accepts(name: str) -> frozenset[str]:
    return frozenset(inspect.signature(_function(name)).parameters)
