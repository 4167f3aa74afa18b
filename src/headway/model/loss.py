"""Cross entropy as a sum over trained tokens, with float32 softmax and without a float32 copy of the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.data.batch import IGNORE

CHUNK_ELEMENTS = 1 << 26
CHUNK_ELEMENTS_CPU = 1 << 18
"""Logits held in float32 at once, whatever the vocabulary: 256 MiB on an accelerator (few launches), 1 MiB on a CPU
(stays in its cache)."""


class LossSum(NamedTuple):
    """Sums over the trained tokens (labels != IGNORE) of one micro-batch, to divide by the global batch's count."""

    loss: Tensor  # float32 [], what is differentiated: cross entropy (smoothed) + z-loss
    nll_sum: Tensor  # float32 [], detached: the plain cross entropy alone, comparable between all settings
    tokens: Tensor  # int64 [], trained tokens; on the device, so that reading it is the caller's sync
    each: Tensor | None = None  # float32 [slots], detached: every slot's nll, 0 without a label; None where a kernel
    # sums inside


def loss_sum(logits: Tensor, labels: Tensor, *, z_loss: float = 0.0, label_smoothing: float = 0.0) -> LossSum:
    """Sum over trained tokens of  (1 - s) * nll + s * mean_v(-log p_v) + z_loss * logsumexp(logits) ** 2.

    logits [..., V] in any floating type; labels int64 [...], already shifted, IGNORE where nothing is trained.
    label_smoothing s in [0, 1) as `torch.nn.functional.cross_entropy` defines it; z_loss is the coefficient of PaLM's
    auxiliary loss (arXiv:2204.02311, section 5: 1e-4 * log(Z)**2), here too a sum over trained tokens.
    Softmax and sums are float32 (float64 for float64 logits); the gradient has the logits' type and is rounded once.
    Without any trained token the loss is exactly 0 and its gradient exactly zero, but still a gradient, so that a rank
    with an empty share takes part in every collective. Ignored slots may hold inf or NaN.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit labels {tuple(labels.shape)}")
    flat, flat_labels = logits.flatten(0, -2), labels.flatten()
    loss, nll, each = _CrossEntropySum.apply(flat, flat_labels, z_loss, label_smoothing)
    return LossSum(loss, nll.detach(), (flat_labels != IGNORE).sum(), each.detach())


class DocumentSums(NamedTuple):
    """Sums over the trained tokens of each document, float32 [D]: cross entropy, its squares, their number."""

    nll: Tensor
    squares: Tensor
    tokens: Tensor


def per_document_nll(each: Tensor, labels: Tensor, cu_seqlens: Tensor) -> DocumentSums:
    """The sums of each document of a micro-batch.

    each float32 [slots] from `LossSum`, labels [...] over the slots that cu_seqlens int32 [D + 1] divides. The order of
    the sum is fixed, so that it is the same bits on every run, and nothing waits for the device.
    """
    sizes = cu_seqlens.diff().long()
    trained = (labels.flatten() != IGNORE).to(each.dtype)
    columns = torch.stack([each, each * each, trained], dim=1)
    sums = torch.segment_reduce(columns, "sum", lengths=sizes, axis=0, unsafe=True)
    return DocumentSums(*sums.unbind(1))


class _Terms(NamedTuple):
    logp: Tensor  # [n, V] float32 log probabilities; meaningless in ignored rows
    trained: Tensor  # bool [n]
    nll: Tensor  # [n], 0 in ignored rows
    lse: Tensor  # [n] logsumexp of the logits, 0 in ignored rows


def _chunk_rows(logits: Tensor) -> int:
    elements = CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else CHUNK_ELEMENTS
    return max(1, elements // logits.shape[-1])


def _chunks(logits: Tensor, labels: Tensor) -> zip[tuple[Tensor, Tensor]]:
    rows = _chunk_rows(logits)
    return zip(logits.split(rows), labels.split(rows), strict=True)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _terms(logits: Tensor, labels: Tensor) -> _Terms:
    trained = labels != IGNORE
    target = labels.masked_fill(~trained, 0).unsqueeze(-1)
    logp = logits.log_softmax(-1, dtype=_wide(logits))
    at_target = logp.gather(-1, target).squeeze(-1)
    # Filled, not multiplied: an ignored row may hold NaN, and NaN * 0 is NaN.
    nll = -at_target.masked_fill(~trained, 0.0)
    lse = (logits.gather(-1, target).squeeze(-1) - at_target).masked_fill(~trained, 0.0)
    return _Terms(logp, trained, nll, lse)


class _CrossEntropySum(torch.autograd.Function):
    """Forward and backward walk over the same chunks; between them only the logits themselves are kept."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, label_smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss = torch.zeros((), dtype=_wide(logits), device=logits.device)
        nll = torch.zeros_like(loss)
        each = []
        for chunk in _chunks(logits, labels):
            terms = _terms(*chunk)
            each.append(terms.nll)
            nll += terms.nll.sum()
            loss += _objective(terms, z_loss, label_smoothing).sum()
        ctx.save_for_backward(logits, labels)
        ctx.coefficients = z_loss, label_smoothing
        slots = torch.cat(each)
        ctx.mark_non_differentiable(nll, slots)
        return loss, nll, slots

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for (chunk, target), out in zip(_chunks(logits, labels), grad.split(_chunk_rows(logits)), strict=True):
            out.copy_(_gradient(chunk, target, grad_loss, *ctx.coefficients))
        return grad, None, None, None


def _objective(terms: _Terms, z_loss: float, label_smoothing: float) -> Tensor:
    """[n], 0 in ignored rows."""
    loss = terms.nll
    if label_smoothing:
        uniform = -terms.logp.mean(-1).masked_fill(~terms.trained, 0.0)
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    if z_loss:
        loss = loss + z_loss * terms.lse.square()
    return loss


def _gradient(logits: Tensor, labels: Tensor, scale: Tensor, z_loss: float, label_smoothing: float) -> Tensor:
    """float32 [n, V]: scale * (p * (1 + 2 z lse) - (1 - s) * onehot - s / V), 0 in ignored rows."""
    trained = labels != IGNORE
    target = labels.masked_fill(~trained, 0).unsqueeze(-1)
    grad = logits.softmax(-1, dtype=_wide(logits))
    if z_loss:
        # At the most probable token: the target's own probability may be 0 in float32.
        top, at = grad.max(-1, keepdim=True)
        lse = logits.gather(-1, at) - top.log()
        grad *= 1 + 2 * z_loss * lse
    if label_smoothing:
        grad -= label_smoothing / grad.shape[-1]
    grad.scatter_add_(-1, target, grad.new_full(target.shape, label_smoothing - 1.0))
    return grad.mul_(scale).masked_fill_(~trained.unsqueeze(-1), 0.0)
