"""Headway's own Triton kernels, behind the calls that candidates have. Nothing here is chosen unless measured fastest.

- Cross entropy over one chunk of logits: one launch reads each row twice and writes its gradient over it, where torch
  takes six passes and a float32 copy. Online softmax: Milakov and Gimelshein, arXiv:1805.02867; gradients in the
  forward pass, by chunks: Hsu et al., arXiv:2410.10989.
- Residual addition + RMS norm (Zhang and Sennrich, arXiv:1910.07467): also where the branch is bfloat16 and the
  residual stream float32, as under autocast.

The interpreter (TRITON_INTERPRET=1) runs them on a CPU for the tests; `model.fuse: auto` offers them on CUDA alone.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.data.batch import IGNORE
from headway.model.triton_attention import import_fails

MAX_WIDTH = 1 << 16
"""A row of the norm is held in one program's registers."""
_ROW_BLOCK = 1 << 14


def triton_cannot() -> str | None:
    """Why our kernels are out of the question on this machine, in words, or None."""
    if not torch.cuda.is_available():
        return "its kernels are for CUDA"
    return import_fails(_source)


def triton_cross_entropy(logits: Tensor, labels: Tensor, z_loss: float, smoothing: float, gradient: bool) -> Tensor:
    """Objective and nll of every row, float32 [n, 2]; with `gradient`, logits become their gradient.

    logits [n, V], rows apart by any stride; labels int64 [n], IGNORE where nothing is trained (such rows may hold NaN).
    """
    rows, vocabulary = logits.shape
    each = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(_ROW_BLOCK, _power(vocabulary))
        _source().cross_entropy[(rows,)](
            logits, logits.stride(0), labels, each, z_loss, smoothing,
            VOCABULARY=vocabulary, IGNORE=IGNORE, GRADIENT=gradient, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return each


def triton_residual_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * weight, x + residual), both in the wider type of x and residual; statistics float32.

    x, residual [..., H], weight [H], H up to MAX_WIDTH.
    """
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"rows of {x.shape[-1]} are wider than {MAX_WIDTH}")
    normed, total = _ResidualNorm.apply(x, residual, weight, eps)
    return normed, total


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        flat_x, flat_residual = x.reshape(-1, width).contiguous(), residual.reshape(-1, width).contiguous()
        total = torch.empty(flat_x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
        normed, scale = torch.empty_like(total), torch.empty(len(total), dtype=torch.float32, device=x.device)
        if len(total):
            block = _power(width)
            _source().residual_norm_forward[(len(total),)](
                flat_x, flat_residual, weight, total, normed, scale, width, eps, BLOCK=block, num_warps=_warps(block)
            )
        ctx.save_for_backward(total, weight, scale)
        ctx.types = x.dtype, residual.dtype
        return normed.view(x.shape), total.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor, grad_total: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight, scale = ctx.saved_tensors
        rows, width = total.shape
        grad, block = torch.empty_like(total), _power(width)
        programs = max(1, min(rows, _programs(total.device)))
        shares = torch.zeros(programs, width, dtype=torch.float32, device=total.device)
        if rows:
            _source().residual_norm_backward[(programs,)](
                grad_normed.reshape(rows, width).contiguous(), grad_total.reshape(rows, width).contiguous(),
                total, weight, scale, grad, shares, rows, width,
                TURNS=-(-rows // programs), BLOCK=block, num_warps=_warps(block),
            )  # fmt: skip
        grad = grad.view(grad_normed.shape)
        return grad.to(ctx.types[0]), grad.to(ctx.types[1]), shares.sum(0).to(weight.dtype), None


@lru_cache(maxsize=1)
def _source() -> Any:
    """The kernels' own file: importing it needs Triton."""
    return importlib.import_module("headway.model.kernels.triton_source")


def _programs(device: torch.device) -> int:
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _power(width: int) -> int:
    return 1 << max(0, width - 1).bit_length()


def _warps(block: int) -> int:
    return max(4, min(16, block // 512))
