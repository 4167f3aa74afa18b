"""The last word on chosen kernels: the whole model, before and after, on one small pack."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from headway.data.batch import IGNORE, Batch
from headway.model.forward import embedding_rows, forward_loss

LENGTHS = (19, 1, 12)
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Of the loss and of the gradient's norm-wise difference: deep models amplify each layer's rounding, while a skipped
soft cap, a wrong scale or another rotation is off by tens of per cent."""


def whole_model_differs(
    model: nn.Module, install: Callable[[], None], device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    """Runs the model plainly, then `install`s and runs it again; what is different, in words, or None.

    Random tokens in three documents, most with labels; gradients of all trained parameters are compared and discarded.
    """
    batch = _batch(embedding_rows(model)).to(device)
    training = model.training
    model.eval()  # dropout draws other numbers each time
    try:
        with torch.autocast(device.type, compute_dtype, enabled=compute_dtype != torch.float32):
            before, grads_before = _loss_and_gradients(model, batch)
            install()
            after, grads_after = _loss_and_gradients(model, batch)
    finally:
        model.train(training)
    tolerance = TOLERANCE[compute_dtype]
    off = abs(after - before) / max(abs(before), 1e-12)
    if not off <= tolerance:
        return f"the model's loss would be {after:.6g} instead of {before:.6g}"
    for (name, one), other in zip(grads_before.items(), grads_after.values(), strict=True):
        scale = float(one.float().norm())
        difference = float((other.float() - one.float()).norm())
        if not difference <= tolerance * max(scale, 1e-12):
            return f"the gradient of {name} would differ by {difference / max(scale, 1e-12):.1e} of its norm"
    return None


def _loss_and_gradients(model: nn.Module, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss = forward_loss(model, batch).loss
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}
    return float(loss.detach()), _largest_share(found)


def _largest_share(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but those that are next to nothing against the rest: their gradients are rounding (LoRA's A at the start)."""
    norms = {name: float(grad.float().norm()) for name, grad in grads.items()}
    largest = max(norms.values(), default=0.0)
    return {name: grad if norms[name] > 1e-4 * largest else torch.zeros_like(grad) for name, grad in grads.items()}


def _batch(vocabulary: int) -> Batch:
    dice = np.random.default_rng(23)
    slots = sum(LENGTHS)
    ids = torch.from_numpy(dice.integers(0, vocabulary, slots))
    labels = torch.from_numpy(dice.integers(0, vocabulary, slots))
    labels[::3] = IGNORE
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)])
    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in LENGTHS]))
    return Batch(
        input_ids=ids[None],
        labels=labels[None],
        position_ids=positions[None],
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(LENGTHS),
        packed=True,
        documents=np.arange(len(LENGTHS)),
        lengths=np.array(LENGTHS),
        tokens=slots,
        trained_tokens=int((labels != IGNORE).sum()),
    )
