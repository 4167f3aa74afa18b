"""The output head that returns the loss: the model is called as ever, and its logits never exist as one tensor.

The loss is computed where the model calls its head, so that FSDP has gathered the weight, autocast and DDP see the
call, and nothing of the model is bypassed. Slots without a label are left out before the head: in chats more than half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.data.batch import IGNORE, Batch
from headway.model.kernels.linear_loss import chunked_linear_loss
from headway.model.loss import LossSum

LinearLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor, float, float], tuple[Tensor, Tensor]]
"""(hidden [n, H], weight [V, H], bias [V] or None, labels [n], z_loss, label_smoothing) -> (loss [], nll): the sum over
the rows, and the plain cross entropy without a gradient, of every row [n] or, where a kernel sums inside, of all []."""

Phase = Callable[[], AbstractContextManager[None]]

_KEY = "_headway_loss_head"


@dataclass
class _Expected:
    labels: Tensor
    trained: int
    z_loss: float
    label_smoothing: float
    phase: Phase
    nll: Tensor | None = None
    each: Tensor | None = None  # [slots], where the implementation knows it


class LossHead:
    """Stands in for the `forward` of one nn.Linear: with a batch expected it returns its loss, else its logits."""

    def __init__(self, head: nn.Linear, implementation: LinearLoss) -> None:
        self.head, self.implementation = head, implementation
        self._logits = head.forward
        self._expected: _Expected | None = None

    @contextmanager
    def expecting(
        self, batch: Batch, z_loss: float, label_smoothing: float, phase: Phase = nullcontext
    ) -> Iterator[_Expected]:
        """Inside, one model call on `batch` has the loss (float32 []) in place of its logits."""
        self._expected = _Expected(batch.labels, batch.trained_tokens, z_loss, label_smoothing, phase)
        try:
            yield self._expected
        finally:
            self._expected = None

    def __call__(self, hidden: Tensor) -> Tensor:
        expected = self._expected
        if expected is None:
            return self._logits(hidden)
        with expected.phase():
            trained, rows, labels = _trained_rows(hidden.flatten(0, -2), expected)
            # A batch of padding has no row at all, which Liger's kernel divides by.
            implementation = self.implementation if expected.trained else chunked_linear_loss
            loss, nll = implementation(
                rows, self.head.weight, self.head.bias, labels, expected.z_loss, expected.label_smoothing
            )
            nll = nll.detach().to(torch.promote_types(nll.dtype, torch.float32))  # counts and sums rest on it
            expected.nll = nll.sum()
            if nll.ndim:
                expected.each = nll if trained is None else _spread(nll, trained, expected.labels.numel())
        return loss


def install_loss_head(model: nn.Module, implementation: LinearLoss) -> None:
    """Makes `forward_loss` compute head and loss by `implementation`; repeating it replaces the earlier choice."""
    head = output_head(model)
    assert isinstance(head, nn.Linear), "why_no_loss_head was not asked"
    remove_loss_head(model)
    stand_in = LossHead(head, implementation)
    head.__dict__[_KEY] = stand_in
    head.__dict__["forward"] = stand_in


def remove_loss_head(model: nn.Module) -> None:
    """Gives the head its own forward back."""
    head = output_head(model)
    if head is not None and head.__dict__.pop(_KEY, None) is not None:
        del head.__dict__["forward"]


def loss_head(model: nn.Module) -> LossHead | None:
    """The installed stand-in, or None where logits are computed whole."""
    head = output_head(model)
    return None if head is None else head.__dict__.get(_KEY)


def output_head(model: nn.Module) -> nn.Module | None:
    from headway.model.forward import inner_model

    found: Any = inner_model(model).get_output_embeddings()
    return found


def why_no_loss_head(model: nn.Module) -> str | None:
    """Why head and loss cannot be one in this model, in words, or None. What its class does to the logits afterwards
    (soft caps, scales) is found by comparing, in `kernels/whole.py`."""
    head = output_head(model)
    if head is None:
        return "the model has no output head"
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a plain linear layer (LoRA on the head, for instance)"
    return None


def take_loss(expected: _Expected, output: Any) -> LossSum:
    """What the call left: the loss is the model's output, so that DDP's own wrapping of outputs is kept."""
    if expected.nll is None:
        raise RuntimeError("the model did not call its output head")
    # Filled on the device: a copy from the host would wait for it.
    tokens = torch.full((), expected.trained, dtype=torch.int64, device=expected.nll.device)
    return LossSum(output.logits.reshape(()), expected.nll, tokens, expected.each)


def _spread(values: Tensor, rows: Tensor, slots: int) -> Tensor:
    """[slots], 0 where no row is."""
    return values.new_zeros(slots).index_copy_(0, rows, values)


def _trained_rows(hidden: Tensor, expected: _Expected) -> tuple[Tensor | None, Tensor, Tensor]:
    """Slots that have a label (None: all), their hidden states and labels. The count comes from the plan: no device
    sync."""
    labels = expected.labels.flatten()
    if expected.trained == len(labels):
        return None, hidden, labels
    rows = torch.nonzero_static(labels != IGNORE, size=expected.trained).squeeze(-1)
    return rows, hidden.index_select(0, rows), labels.index_select(0, rows)
