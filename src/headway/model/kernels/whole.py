"""The last word on chosen kernels: the whole model, before and after, on one small pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.data.batch import IGNORE, Batch
from headway.model.forward import embedding_rows, forward_loss
from headway.model.kernels.dice import Dice

LENGTHS = (19, 1, 12)
SUMS = 1 << 16
AT_ONCE = 256
"""Rows of SUMS numbers that are added up together: 16 million numbers."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Of the loss and of the gradient's norm-wise difference: deep models amplify each layer's rounding, while a skipped
soft cap, a wrong scale or another rotation is off by tens of per cent."""


def whole_model_differs(
    model: nn.Module, install: Callable[[], None], device: torch.device, compute_dtype: torch.dtype
) -> str | None:
    """Runs the model plainly, then `install`s and runs it again; what is different, in words, or None.

    Random tokens in three documents, most with labels; gradients of all trained parameters are compared and discarded,
    one at a time: a model that is about to be sharded may have no room for all of them. Where memory ends, or the
    changed model fails, it is not proved, which is a difference too.
    """
    batch = _batch(embedding_rows(model)).to(device)
    training = model.training
    model.eval()  # dropout draws other numbers each time
    try:
        with torch.autocast(device.type, compute_dtype, enabled=compute_dtype != torch.float32):
            before, grads_before = _loss_and_gradients(model, batch)
            install()
            try:
                after, grads_after = _loss_and_gradients(model, batch)
            except RuntimeError as failure:
                if isinstance(failure, torch.OutOfMemoryError):
                    raise
                return f"the model fails with what was chosen: {' '.join(str(failure).split())[:160]}"
    except torch.OutOfMemoryError:
        return "there is no memory to hold the whole model against itself"
    finally:
        model.train(training)
    tolerance = TOLERANCE[compute_dtype]
    off = abs(after - before) / max(abs(before), 1e-12)
    if not off <= tolerance:
        return f"the model's loss would be {after:.6g} instead of {before:.6g}"
    if grads_before.keys() != grads_after.keys():
        odd = sorted(grads_before.keys() ^ grads_after.keys())
        return f"{len(odd)} parameters would have a gradient or none, {odd[0]} for one"
    least = [1e-4 * max((grad.norm for grad in grads.values()), default=0.0) for grads in (grads_before, grads_after)]
    for name, one in grads_before.items():
        other = grads_after[name]
        # Next to nothing against the rest: rounding (LoRA's A at the start).
        scale, new = (0.0 if grad.norm <= low else grad.norm for grad, low in zip((one, other), least, strict=True))
        difference = float((other.sums * (new > 0) - one.sums * (scale > 0)).norm())
        if not difference <= tolerance * max(scale, 1e-12):
            return f"the gradient of {name} would differ by {difference / max(scale, 1e-12):.1e} of its norm"
    return None


@dataclass(frozen=True)
class _Gradient:
    """norm: of all of it. sums: its numbers, or fewer that are as far from another gradient's as all of them are."""

    norm: float
    sums: Tensor


def _loss_and_gradients(model: nn.Module, batch: Batch) -> tuple[float, dict[str, _Gradient]]:
    """Every gradient is taken as soon as it is whole, and freed; what the parameters held before is theirs again."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = [parameter.grad for parameter in named.values()]
    found: dict[str, _Gradient] = {}

    def taker(name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            grad, parameter.grad = parameter.grad, None
            assert grad is not None
            norm = torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
            found[name] = _Gradient(float(norm), shortened(grad))

        return take

    hooks = [parameter.register_post_accumulate_grad_hook(taker(name)) for name, parameter in named.items()]
    try:
        for parameter in named.values():
            parameter.grad = None
        loss = forward_loss(model, batch).loss
        loss.backward()
        return float(loss.detach()), found
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, grad in zip(named.values(), held, strict=True):
            parameter.grad = grad


def shortened(grad: Tensor, whole_on: str = "cpu", sums: int = SUMS) -> Tensor:
    """The gradient, wide; away from `whole_on` in at most `sums` numbers, each the sum of some with random signs.

    The signs are the same each time, so that differences of gradients become differences of sums, whose norm is theirs
    but for a part in sqrt(sums / 2) (count sketch: Charikar et al., 2002).
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    flat = grad.detach().flatten()
    if grad.device.type == whole_on or len(flat) <= sums:
        return flat.to(wide, copy=True)
    dice, total = Dice(53, grad.device), torch.zeros(sums, dtype=wide, device=grad.device)
    for part in flat.split(sums * AT_ONCE):
        rows = F.pad(part.to(wide), (0, -len(part) % sums)).view(-1, sums)
        total += (rows * (2 * dice.below(2, *rows.shape) - 1)).sum(0)
    return total


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
