"""A step's figures on the device: gathered from all ranks, compared with the guard's limits, read one step later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headway.data.batch import PADDING_DOC, Batch, sent_to
from headway.guard.spikes.figures import NAMES, Figures
from headway.guard.spikes.robust import Range
from headway.guard.spikes.watcher import KINDS, LOGARITHMIC, Limits
from headway.model.loss import LossSum, per_document_nll

_EVENEST = 1e-3
LEAST_LABELS = 8
"""Trained tokens of a document whose mean loss says something."""
_SAMPLE = 1024  # elements of every parameter whose update is followed: of a large model one in thousands, and enough


class Local(NamedTuple):
    """What one rank knows of a step: float32 columns of the table that all ranks get."""

    objective: Tensor  # sums over trained tokens
    nll: Tensor
    highest: Tensor  # mean nll of a single document; -inf, inf where the rank has none long enough
    lowest: Tensor
    spread: Tensor  # least deviation of the losses in a document over their mean; inf where the rank has none
    broken: Tensor  # 1 where this rank's own gradient is not finite, before it was summed with the others'
    moved: Tensor  # the last update's sampled squares over the squared learning rate, and how many
    sampled: Tensor


@dataclass
class Documents:
    """Mean losses of the documents of a step on this rank, as they come."""

    device: torch.device
    means: list[Tensor] = field(default_factory=list)
    spreads: list[Tensor] = field(default_factory=list)
    raw: list[np.ndarray] = field(default_factory=list)

    def add(self, loss: LossSum, batch: Batch) -> None:
        if loss.each is None:
            return
        nll, squares, tokens = per_document_nll(loss.each, batch.labels, batch.cu_seqlens)
        enough, mean = tokens >= LEAST_LABELS, nll / tokens
        self.means.append(torch.where(enough, mean, math.nan).float())
        deviation = (squares / tokens - mean * mean).clamp_min(0.0).sqrt()
        # Where no token costs anything there is nothing to compare; the least that float32 can tell from 0.
        even = torch.where(enough & (mean > 0), (deviation / mean).clamp_min(_EVENEST), math.nan)
        self.spreads.append(even.float())
        self.raw.append(np.where(batch.documents == PADDING_DOC, PADDING_DOC, batch.documents))

    def ids(self) -> np.ndarray:
        """int64: raw document of each mean, PADDING_DOC where there is none."""
        return np.concatenate(self.raw) if self.raw else np.zeros(0, np.int64)

    def all_means(self) -> Tensor:
        """float32 [D] in the order of `ids`; NaN where a document is too short to say something."""
        return torch.cat(self.means) if self.means else torch.zeros(0, device=self.device)

    def extremes(self) -> tuple[Tensor, Tensor, Tensor]:
        """(highest, lowest, least spread), of the documents that have one."""
        none = torch.full((), math.inf, device=self.device)
        if not self.means:
            return -none, none, none
        means, spreads = torch.cat(self.means), torch.cat(self.spreads)
        known = ~torch.isnan(means)
        return (
            torch.where(known, means, -math.inf).amax(),
            torch.where(known, means, math.inf).amin(),
            torch.where(torch.isnan(spreads), math.inf, spreads).amin(),
        )


@dataclass(frozen=True)
class Detail:
    """What explains a step's figures. table float32 [R, columns of Local]: every rank's own, equal on all ranks.
    gradients float32 [P]: norm of this rank's shard of every parameter's gradient (of the sum over ranks)."""

    documents: Documents
    gradients: Tensor
    table: Tensor


class UpdateSample:
    """How far the optimizer moves the weights: the first elements of every parameter, before and after a step."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        found = [_local(p.detach()) for p in module.parameters() if p.requires_grad]
        self._views = [p.view(-1)[:_SAMPLE] for p in found if p.is_contiguous() and p.numel()]
        self.count = torch.full((), float(sum(len(view) for view in self._views)), device=device)
        self.moved = torch.zeros((), device=device)
        self._before: Tensor | None = None

    def before(self) -> None:
        self._before = torch.cat([view.float() for view in self._views]) if self._views else None

    def after(self, lr: float, taken: Tensor) -> None:
        """A step that was not taken leaves the figure of the update before it: it will be made again."""
        if self._before is None:
            return
        after = torch.cat([view.float() for view in self._views])
        moved = (after - self._before).square_().sum() / lr**2 if lr > 0 else torch.zeros_like(self.moved)
        self.moved = torch.where(taken, moved.to(self.moved.device), self.moved)

    def state(self) -> float:
        """Exact (float32 widened); waits for the device."""
        return float(self.moved)

    def load(self, moved: float) -> None:
        self.moved = torch.full_like(self.moved, moved)


def gather(local: Local, ranks: int) -> Tensor:
    """float32 [R, columns], the same on every rank and summed in rank order wherever it is."""
    row = torch.stack([value.float() for value in local])
    if ranks == 1:
        return row[None]
    table = row.new_empty(ranks * len(row))
    dist.all_gather_into_tensor(table, row)
    return table.view(ranks, len(row))


class Row(NamedTuple):
    """A step's figures as they leave the device, float32."""

    objective: Tensor  # per trained token
    nll: Tensor
    grad_norm: Tensor
    taken: Tensor  # 1 where the update was made
    scale: Tensor  # the loss scale, NaN without one
    finite: Tensor
    update: Tensor  # of the step before
    highest: Tensor
    lowest: Tensor
    spread: Tensor


COLUMNS = Row._fields


def watched(table: Tensor, trained_tokens: int, grad_norm: Tensor) -> dict[str, Tensor]:
    """The figures by the guard's names, NaN where there is none."""
    nan = torch.full_like(grad_norm, math.nan)
    column = dict(zip(Local._fields, table.unbind(1), strict=True))
    highest, lowest, spread = column["highest"].amax(), column["lowest"].amin(), column["spread"].amin()
    moved, sampled = column["moved"].sum(), column["sampled"].sum()
    values = (
        column["nll"].sum() / trained_tokens,
        grad_norm,
        torch.where(moved > 0, (moved / sampled).sqrt(), nan),
        torch.where(highest > -math.inf, highest, nan),
        torch.where(lowest < math.inf, lowest, nan),
        torch.where(spread < math.inf, spread, nan),
    )
    return dict(zip(NAMES, values, strict=True))


def limits_on(limits: Limits, device: torch.device) -> Tensor:
    """float32 [3, 2, 6]: far, near and senseless, low and high, in the order of NAMES. The host does not wait."""
    parts = (limits.far, limits.near, limits.senseless)
    rows = [[[ranges.get(name, Range())[side] for name in NAMES] for side in (0, 1)] for ranges in parts]
    return sent_to(device, torch.tensor(rows, dtype=torch.float32))


def inside(values: dict[str, Tensor], limits: Tensor) -> Tensor:
    """Whether the step is no spike, as `Limits.beyond` has it; a boolean scalar. What is NaN is no spike."""
    listed = [values[name].log() if name in LOGARITHMIC else values[name] for name in NAMES]
    value = torch.stack(listed)
    value = torch.where(value == -math.inf, math.nan, value)  # the logarithm of 0: there was nothing
    beyond = (value < limits[:, 0]) | (value > limits[:, 1])
    far, near, senseless = beyond.unbind(0)
    each = near.unbind()  # a list as an index would be a copy to the device that the host waits for
    kinds = torch.stack([torch.stack([each[i] for i in members]).any() for members in _MEMBERS] + [senseless.any()])
    return ~far.any() & (kinds.sum() < 2)


_MEMBERS = [
    [index for index, name in enumerate(NAMES) if KINDS[name] == kind] for kind in dict.fromkeys(KINDS.values())
]


def figures_of(step: int, values: Sequence[float], kind: str) -> Figures:
    """What the guard reads, from a row that has arrived on the host."""
    row = dict(zip(COLUMNS, values, strict=True))
    return Figures(
        step=step,
        nll=row["nll"],
        grad_norm=row["grad_norm"],
        finite=bool(row["finite"]),
        update=row["update"],
        highest=row["highest"],
        lowest=row["lowest"],
        spread=row["spread"],
        loss_scale=1.0 if math.isnan(row["scale"]) else row["scale"],
        kind=kind,
        taken=bool(row["taken"]),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
