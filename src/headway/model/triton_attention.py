"""Headway's own attention over packed documents, in Triton: offered on CUDA, taken only where measured fastest.

FlashAttention's computation (arXiv:2205.14135, 2307.08691) for a pack of documents of any lengths: the grid follows
from the slots alone, so that nothing waits for the host, 500 tiny documents cost no 500 tiles, and a compiled or
captured layer sees no change from pack to pack. Sums run in one order: the same inputs give the same bits.

The kernels' own file needs Triton and is imported where they are first called. TRITON_INTERPRET=1 runs them on a CPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headway.model.varlen_attention import shape_cannot

MAX_PACK = 16
"""Query heads of one key head that share a tile; larger groups take several."""
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Tile:
    """rows: query rows (slots times packed heads); keys: slots of keys; warps and pipeline stages of the program."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """One launch's tile each: forward, gradient of the queries, gradients of keys and values."""

    forward: Tile
    queries: Tile
    keys: Tile


# By padded head size. 9.0's were chosen from registers and shared memory of the compiled kernels (docs/kernels.md).
_HOPPER = {
    64: Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    256: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
_SMALL = {
    64: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 4, 2)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
_FLOAT32 = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def triton_attention_cannot(
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
    """Why the kernels cannot compute this call, in words, or None when they can. Any window and soft cap will do."""
    reason = _kernels_missing(query.device.type, query.device.index or 0)
    reason = reason or shape_cannot(query, value, sinks=sinks, dropout=dropout)
    if reason is None and scale is not None and scale <= 0:
        reason = "it takes a positive scale only"
    return reason


@torch.compiler.assume_constant_result
def _kernels_missing(kind: str, index: int) -> str | None:
    """Asked while a layer is compiled, too: the answer is taken, the question not traced."""
    return kernels_missing(kind, index)


@lru_cache(maxsize=16)
def kernels_missing(kind: str, index: int) -> str | None:
    """Why they cannot run on this device (its type and number), in words, or None."""
    if kind != "cuda" or not torch.cuda.is_available():
        return "its kernels are for CUDA"
    if torch.cuda.get_device_capability(index) < MIN_CAPABILITY:
        return "it needs compute capability 8.0"
    return import_fails(_source)


def import_fails(source: Callable[[], Any]) -> str | None:
    """Why a file of Triton kernels cannot be imported, in words, or None."""
    try:
        source()
    except Exception as error:  # a Triton built for another torch or driver raises whatever it likes
        return f"triton cannot be imported ({type(error).__name__})"
    return None


def attend_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention inside each document: query [1, H, S, D], key and value [1, K, S, D], H a multiple of K.

    cu_seqlens int32 [N + 1], repeats allowed; slots past its end are one more document. float32, or half precision with
    float32 sums. Returns [1, H, S, D], laid out as [1, S, H, D]. Deterministic. NaN in one document's values may reach
    another's output within a block of keys, since it is multiplied by zero there (as in FlexAttention).
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, _, _ = packed_attention(q, k, v, cu_seqlens, scale, window or 0, softcap or 0.0)
    return out.transpose(0, 1)[None]


@torch.library.custom_op("headway::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """query [T, H, D], key and value [T, K, D] -> output [T, H, D], log2-sum-exp2 of the scores float32 [H / P, T, P]
    with P = pack_of(H, K), bounds int32 [2, T]. window, softcap: zero for none."""
    slots, heads, _ = query.shape
    out = query.new_empty(query.shape)
    level, bounds = _level(query, key), query.new_empty(2, slots, dtype=torch.int32)
    if not slots:
        return out, level, bounds
    query, key, value = (_slots_apart(x) for x in (query, key, value))
    tile = tiles_of(query).forward
    constants = _constants(tile, window, softcap, query, key, value)
    with _on(query.device):
        entries, block = cu_seqlens.shape[0], 256
        _source().document_bounds[(-(-slots // block),)](
            cu_seqlens.contiguous(), bounds, entries, slots, STEPS=entries.bit_length(), BLOCK=block
        )
        _source().attention_forward[(_programs(slots, heads, tile.rows, constants["PACK"]),)](
            query, key, value, bounds, out, level, slots=slots, scale=scale, cap=softcap, **constants
        )
    return out, level, bounds


@packed_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), _level(query, key), query.new_empty(2, query.shape[0], dtype=torch.int32)


@torch.library.custom_op("headway::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, level: Tensor, bounds: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, contiguous, in their types and shapes."""
    slots, heads, _ = query.shape
    grads = _gradients(query, key, value)
    if not slots:
        return grads
    query, key, value, grad = (_slots_apart(x) for x in (query, key, value, grad))
    delta, tiles = torch.empty_like(level), tiles_of(query)
    with _on(query.device):
        constants = _constants(tiles.queries, window, softcap, query, key, value, grad)
        _source().attention_backward_queries[(_programs(slots, heads, tiles.queries.rows, constants["PACK"]),)](
            query, key, value, bounds, out, grad, level, delta, grads[0],
            slots=slots, scale=scale, cap=softcap, **constants,
        )  # fmt: skip
        constants = _constants(tiles.keys, window, softcap, query, key, value, grad)
        _source().attention_backward_keys[(_programs(slots, key.shape[1], tiles.keys.keys, 1),)](
            query, key, value, bounds, grad, level, delta, *grads[1:],
            slots=slots, scale=scale, cap=softcap, **constants, **_stages(tiles.keys),
        )  # fmt: skip
    return grads


@packed_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, level: Tensor, bounds: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(query, key, value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, _, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    query, key, value, out, level, bounds = ctx.saved_tensors
    grads = packed_attention_backward(grad, query, key, value, out, level, bounds, *ctx.options)
    return (*grads, None, None, None, None)


packed_attention.register_autograd(_backward, setup_context=_setup_context)


def tiles_of(query: Tensor) -> Tiles:
    """The tiles for a call with these queries [T, H, D]."""
    if query.dtype == torch.float32:
        return _FLOAT32
    size = padded(query.shape[-1])
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] in (9, 10)
    return (_HOPPER if hopper else _SMALL)[size]


def padded(head_dim: int) -> int:
    """The head size in registers: a power of two that is no smaller."""
    return max(64, 1 << (head_dim - 1).bit_length())


def pack_of(heads: int, kv_heads: int) -> int:
    """How many query heads of one key head share a tile: the largest power of two that divides them."""
    group = heads // kv_heads
    return min(group & -group, MAX_PACK)


def _constants(tile: Tile, window: int, softcap: float, *tensors: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for. Strides are among it: known, they leave twenty registers free (a spill less)."""
    query, key, *_ = tensors
    heads, head_dim = query.shape[1:]
    pack = pack_of(heads, key.shape[1])
    strides = {f"{name}_slot": _stride(x, 0) for name, x in zip("qkvg", tensors, strict=False)}
    strides |= {f"{name}_head": _stride(x, 1) for name, x in zip("qkvg", tensors, strict=False)}
    return {
        **strides,
        "HEADS": heads,
        "REST": heads // key.shape[1] // pack,
        "PACK": pack,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "WINDOW": window,
        "SOFTCAP": softcap > 0,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",  # of float32 products alone
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _stages(tile: Tile) -> dict[str, int]:
    """Of the keys' two loops: with a mask, a third stage would leave too few registers."""
    return {"STAGES": tile.stages, "MASKED_STAGES": min(2, tile.stages)}


def _programs(slots: int, heads: int, rows: int, pack: int) -> int:
    return -(-slots // (rows // pack)) * (heads // pack)


def _slots_apart(x: Tensor) -> Tensor:
    """[T, H, D] with dense rows and heads no farther apart than slots, copied where it is not: of heads that are T rows
    apart the kernels would be compiled for every T, and offsets inside a tile could pass int32."""
    return x if x.stride(2) == 1 and (x.stride(1) <= x.stride(0) or x.shape[1] == 1) else x.contiguous()


def _stride(x: Tensor, dim: int) -> int:
    """Of one slot or head it may be anything, and means nothing."""
    return x.stride(dim) if x.shape[dim] > 1 else 0


def _level(query: Tensor, key: Tensor) -> Tensor:
    slots, heads, _ = query.shape
    pack = pack_of(heads, key.shape[1])
    return query.new_empty(heads // pack, slots, pack, dtype=torch.float32)


def _gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the tensors' own is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@lru_cache(maxsize=1)
def _source() -> Any:
    return importlib.import_module("headway.model.triton_attention_source")
