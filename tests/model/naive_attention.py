"""The slow, obvious attention: one query at a time, float64, a Python list of the keys it may see."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[1, H, S, D], [1, K, S, D], [1, K, S, E] -> [1, H, S, E], all float64."""
    _, heads, slots, head_dim = query.shape
    group = heads // key.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    out = []
    for head in range(heads):
        rows = []
        start = 0
        for length in lengths:
            for i in range(length):
                first = 0 if window is None else max(0, i - window + 1)
                keys = key[0, head // group, start + first : start + i + 1]
                values = value[0, head // group, start + first : start + i + 1]
                scores = keys @ query[0, head, start + i] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                rows.append(scores.softmax(0)[: len(values)] @ values)
            start += length
        out.append(torch.stack(rows))
    assert start == slots
    return torch.stack(out)[None]


def random_qkv(
    heads: int, kv_heads: int, slots: int, head_dim: int, value_dim: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim or head_dim))
    q, k, v = (torch.randn(1, h, slots, d, dtype=torch.float64, generator=generator) for h, d in shapes)
    return q, k, v


def with_gradients(attend, tensors: tuple[Tensor, ...], seed: int = 1) -> list[Tensor]:
    """[output, gradient of each tensor] under a fixed random cotangent, all float64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    cotangent = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gradients = torch.autograd.grad(out, leaves, cotangent.to(out))
    return [tensor.detach().double().cpu() for tensor in (out, *gradients)]


def worst(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest ||a - b|| / ||b||; absolute where b is nearly nothing (one-token documents have no query gradient)."""
    return max(float((x - y).norm() / y.norm().clamp_min(1.0)) for x, y in zip(a, b, strict=True))
