"""The output head and the cross entropy in one: chunk by chunk, the logits of a whole pack never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.data.batch import IGNORE
from headway.model.kernels.triton_kernels import triton_cross_entropy
from headway.model.loss import loss_sum

Rows = Callable[[Tensor, Tensor, float, float, bool], Tensor]
"""(logits [n, V], labels [n], z_loss, smoothing, gradient) -> wide [n, 2]: objective and nll of every row, 0 where it
is ignored; with `gradient`, the logits are overwritten with their gradient."""

CHUNK_ELEMENTS = 1 << 28
CHUNK_ELEMENTS_CPU = 1 << 24
"""Logits of one chunk: on an accelerator 1 GiB in float32 (few launches), on a CPU 64 MiB (rows enough for the matrix
product to run at its peak; half and twice of it were 8 to 10 % slower)."""
CHUNK_ELEMENTS_TRITON = 1 << 29
"""The same memory where nothing is copied in float32: 1 GiB in bfloat16."""
CACHED_ELEMENTS_CPU = 1 << 18
"""Logits that the softmax turns into their gradient at a time on a CPU: 1 MiB stays in its cache between the passes."""


def eager_linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """The obvious way: all logits, then `loss_sum`. (loss [], nll [n]); see `chunked_linear_loss`."""
    found = loss_sum(F.linear(hidden, weight, bias), labels, z_loss=z_loss, label_smoothing=label_smoothing)
    assert found.each is not None
    return found.loss, found.each


def chunked_linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """`loss_sum(linear(hidden, weight, bias), labels)` with its gradients computed in the forward pass, by chunks.

    hidden [n, H], weight [V, H], bias [V] or None, labels int64 [n] with IGNORE where nothing is trained. Products run
    in autocast's type, else in hidden's; softmax, sums over tokens and over chunks are float32 (float64 for float64).
    Returns (loss [], nll [n]): the sum over trained tokens, and every row's own cross entropy without a gradient.
    Nothing is computed that needs no gradient (a frozen head, evaluation). The idea is Liger's (Hsu et al.,
    arXiv:2410.10989, section 3.2).
    """
    chunk = CHUNK_ELEMENTS_CPU if hidden.device.type == "cpu" else CHUNK_ELEMENTS
    return _by_chunks(hidden, weight, bias, labels, z_loss, label_smoothing, _loss_and_gradient, chunk)


def triton_linear_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """`chunked_linear_loss` with softmax, loss and gradient of a chunk in one Triton kernel, and so larger chunks:
    fewer of the products that add up the weight's gradient."""
    chunk = CHUNK_ELEMENTS_TRITON
    return _by_chunks(hidden, weight, bias, labels, z_loss, label_smoothing, triton_cross_entropy, chunk)


def _by_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    z_loss: float,
    label_smoothing: float,
    rows: Rows,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        wanted = torch.is_grad_enabled()
        loss, nll = _LinearLoss.apply(
            hidden.to(dtype), weight, bias, labels, z_loss, label_smoothing, wanted, rows, chunk
        )
    return loss, nll


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        z_loss: float,
        label_smoothing: float,
        grads_wanted: bool,
        rows_loss: Rows,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs = [grads_wanted and need for need in ctx.needs_input_grad[:3]]
        cast, cast_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        each = torch.zeros(len(hidden), 2, dtype=wide, device=hidden.device)
        grads = [
            torch.zeros_like(hidden) if needs[0] else None,
            torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None,
            torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and needs[2] else None,
        ]
        step = max(1, chunk // weight.shape[0])
        # One piece of memory for every chunk: fresh pages cost a CPU as much as the softmax.
        memory = hidden.new_empty(min(step, len(hidden)), weight.shape[0])
        for rows in range(0, len(hidden), step):
            part = slice(rows, rows + step)
            logits = _logits(hidden[part], cast, cast_bias, memory)
            each[part] = rows_loss(logits, labels[part], z_loss, label_smoothing, any(needs))
            # `logits` is now their gradient.
            if grads[0] is not None:
                torch.mm(logits, cast, out=grads[0][part])
            if grads[1] is not None:
                _add_product(grads[1], logits, hidden[part])
            if grads[2] is not None:
                grads[2] += logits.sum(0, dtype=wide)
        ctx.grads = grads
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        loss, nll = each[:, 0].sum(), each[:, 1].contiguous()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        scaled = [
            None if grad is None else grad.mul_(grad_loss).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None, None, None)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor) -> Tensor:
    """linear(hidden, weight, bias), written into the first rows of `memory`."""
    out = memory[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """total += grad.T @ hidden; in a narrow type each chunk's product is rounded once, the sum over chunks is wide."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden


def _loss_and_gradient(logits: Tensor, labels: Tensor, z_loss: float, label_smoothing: float, gradient: bool) -> Tensor:
    """Objective and nll, wide [n, 2]; with `gradient`, the logits are overwritten with their gradient."""
    at_once = max(1, CACHED_ELEMENTS_CPU // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(logits))
    parts = zip(logits.split(at_once), labels.split(at_once), strict=True)
    return torch.cat([_rows_loss_and_gradient(*part, z_loss, label_smoothing, gradient) for part in parts])


def _rows_loss_and_gradient(logits: Tensor, labels: Tensor, z_loss: float, smoothing: float, gradient: bool) -> Tensor:
    trained = labels != IGNORE
    target = labels.masked_fill(~trained, 0).unsqueeze(-1)
    logp = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    at_target = logp.gather(-1, target).squeeze(-1)
    # Filled, not multiplied: an ignored row may hold NaN, and NaN * 0 is NaN.
    nll = -at_target.masked_fill(~trained, 0.0)
    loss = nll
    if smoothing:
        loss = (1 - smoothing) * nll - smoothing * logp.mean(-1).masked_fill(~trained, 0.0)
    if z_loss:
        lse = (logits.gather(-1, target).squeeze(-1) - at_target).masked_fill(~trained, 0.0)
        loss = loss + z_loss * lse.square()
    if gradient:
        grad = logp.exp_()
        if z_loss:
            grad *= (1 + 2 * z_loss * lse).unsqueeze(-1)
        if smoothing:
            grad -= smoothing / grad.shape[-1]
        grad.scatter_add_(-1, target, grad.new_full(target.shape, smoothing - 1.0))
        logits.copy_(grad.masked_fill_(~trained.unsqueeze(-1), 0.0))
    return torch.stack([loss, nll], dim=1)
