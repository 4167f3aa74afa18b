"""One optimizer step: micro-batches forward and backward, then the update. Nothing else happens here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.config.train import LossConfig
from headway.data.batch import Batch
from headway.guard.spikes.watcher import Limits
from headway.model.forward import forward_loss
from headway.parallel.broken import BrokenGradients
from headway.parallel.out_of_memory import Collectives, can_be_finished, free_memory, is_out_of_memory
from headway.parallel.wrap import Replicas
from headway.train.clock import StepClock
from headway.train.figures import Detail, Documents, Local, Row, UpdateSample, gather, inside, limits_on, watched
from headway.train.loss_scale import LossScale
from headway.train.optim import Optimizers, gradient_norms, scale_gradients


class OutOfMemory(Exception):
    """Some rank had no memory for its micro-batches. Raised on all ranks; no gradient is left, nothing was updated."""


class Unreadable(Exception):
    """Some rank could not read its documents. Raised on all ranks; no gradient is left, nothing was updated."""


_UNREADABLE = "unreadable documents"


def _mine_alone(failure: str | None) -> str | None:
    return failure


@dataclass
class Learner:
    """What a step needs: the wrapped model, its optimizers, the loss options, the clock.

    agree: what failed on any rank, in words, on all ranks (None: nothing); called once a step.
    before_update: called before the parameters change; a checkpoint that is still being copied makes it wait.
    """

    replicas: Replicas
    optimizers: Optimizers
    loss: LossConfig
    clip_norm: float | None
    clock: StepClock
    scale: LossScale | None = None
    agree: Callable[[str | None], str | None] = _mine_alone
    before_update: Callable[[], None] | None = None
    detail: Detail | None = None
    clipping: str = "foreach"
    sample: UpdateSample = field(init=False)
    _collectives: Collectives = field(init=False)
    _broken: BrokenGradients = field(init=False)
    _hold: Tensor = field(init=False)
    _documents: Documents = field(init=False)

    def __post_init__(self) -> None:
        self._collectives = Collectives(self.replicas)
        self.sample = UpdateSample(self.replicas.module, self.device)
        self._broken = BrokenGradients(self.replicas.call, self.device)
        self._documents = Documents(self.device)
        self.release()

    @property
    def device(self) -> torch.device:
        return self.replicas.device

    def release(self) -> None:
        """Lets updates be made again after a step that was held back."""
        self._hold = torch.zeros((), dtype=torch.bool, device=self.device)

    def update(
        self,
        micro_batches: Sequence[Batch],
        trained_tokens: int,
        limits: Limits | None = None,
        *,
        unreadable: bool = False,
    ) -> Tensor:
        """Runs forward and backward over this rank's micro-batches and updates the parameters.

        The gradient is that of the sum of the losses of all trained tokens of the global batch, over all ranks,
        divided by `trained_tokens` (> 0): it does not depend on how the batch is split.

        With `limits`, a step beyond them (or not finite) updates nothing on any rank, and neither does a later one
        until `release`: when the host reads of it, the device may be a step further, and the weights are still those
        before it.

        Returns:
            float32 [10] on the device, equal on all ranks: a `figures.Row`. `detail` has what explains it.

        Raises:
            OutOfMemory: on all ranks, where one of them ran out of memory.
            Unreadable: on all ranks, where one of them is `unreadable`: its micro-batches are only stand-ins.
        """
        sums = self.learn(micro_batches, trained_tokens, unreadable)
        with self.clock.phase("comm.dp" if self.replicas.size > 1 else "compute.optimizer"):
            table = gather(self._local(sums), self.replicas.size)
        if self.before_update is not None:
            with self.clock.phase("checkpoint"):
                self.before_update()
        with self.clock.phase("compute.optimizer"):
            scale = self.scale.value.clone() if self.scale else None
            norms = gradient_norms(self.replicas.module, self.clipping)
            norm = scale_gradients(norms, self.clip_norm, scale, self.clipping).to(self.device)
            row, values = self._row(table, trained_tokens, norm, scale)
            finite = row.finite.bool()
            held = self._gate(finite, values, limits, scale) if limits is not None else None
            taken = finite if held is None else finite & ~held
            if held is not None:
                self.sample.before()
            self.optimizers.step(taken)
            if held is not None:
                self.sample.after(self.optimizers.lr, taken)
            if self.scale:
                self.scale.update(finite, held)
        self.detail = Detail(self._documents, norms.each, table)
        return torch.stack(row._replace(taken=taken.float()))

    def look(self, micro_batches: Sequence[Batch], trained_tokens: int) -> Tensor:
        """The figures that a step on these micro-batches would have, as `update` returns them; nothing is updated.

        `detail` is the look's afterwards; no gradient is left.
        """
        sums = self.learn(micro_batches, trained_tokens)
        table = gather(self._local(sums), self.replicas.size)
        scale = self.scale.value.clone() if self.scale else None
        norms = gradient_norms(self.replicas.module, self.clipping)
        total = norms.total.to(self.device)
        norm = total if scale is None else total / scale
        row, _ = self._row(table, trained_tokens, norm, scale)
        self.detail = Detail(self._documents, norms.each, table)
        self.optimizers.zero_grad()
        return torch.stack(row)

    def _local(self, sums: Tensor) -> Local:
        extremes = self._documents.extremes()
        return Local(sums[0], sums[1], *extremes, self._broken.take(), self.sample.moved, self.sample.count)

    def _row(
        self, table: Tensor, trained_tokens: int, norm: Tensor, scale: Tensor | None
    ) -> tuple[Row, dict[str, Tensor]]:
        values = watched(table, trained_tokens, norm)
        nll, _, update, *documents = values.values()
        objective = table[:, 0].sum() / trained_tokens
        finite = (torch.isfinite(norm) & torch.isfinite(objective)).float()
        shown = torch.full_like(norm, float("nan")) if scale is None else scale
        return Row(objective, nll, norm, finite, shown, finite, update, *documents), values

    def _gate(self, finite: Tensor, values: dict[str, Tensor], limits: Limits, scale: Tensor | None) -> Tensor:
        """Whether this step is held back; an overflow under a loss scale above 1 is only skipped."""
        spike = finite & ~inside(values, limits_on(limits, self.device))
        broken = ~finite if scale is None else ~finite & (scale <= 1)
        self._hold = self._hold | spike | broken
        return self._hold

    def learn(
        self,
        micro_batches: Sequence[Batch],
        trained_tokens: int,
        unreadable: bool = False,
        failure: str | None = None,
    ) -> Tensor:
        """Leaves the gradients on the parameters; returns this rank's sums of objective and nll, float32 [2].

        `failure`: memory has run out before; then this rank only takes part in what the others do. Raises as
        `update` does.
        """
        self.optimizers.zero_grad()
        self._documents = Documents(self.device)
        self._broken.forget()  # what a pass that was made again, or a rehearsal, has seen
        sums, failure = self._accumulate(micro_batches, trained_tokens, failure)
        with self.clock.phase("host.sync"):
            failure = self.agree(_UNREADABLE if unreadable else failure)
        if failure is not None and _UNREADABLE in failure:
            self.optimizers.zero_grad()
            raise Unreadable(failure)
        if failure is not None:
            self.optimizers.zero_grad()
            free_memory(self.replicas.device_type)
            raise OutOfMemory(failure)
        return sums

    def _accumulate(
        self, micro_batches: Sequence[Batch], trained_tokens: int, failure: str | None = None
    ) -> tuple[Tensor, str | None]:
        """This rank's sums, and what failed; a failed rank still takes part in every collective of the others."""
        # FSDP2 and DDP both average over the ranks; the gradient wanted is the sum.
        scale = self.replicas.size / trained_tokens
        sums = torch.zeros(2, device=micro_batches[0].input_ids.device)
        for batch in micro_batches:
            with self.replicas.accumulate(last=batch is micro_batches[-1]):
                self._collectives.begin()
                failure = failure or self._forward_backward(batch, scale, sums)
                if failure is not None:
                    self._collectives.finish()
        return sums, failure

    def _forward_backward(self, batch: Batch, scale: float, sums: Tensor) -> str | None:
        """Returns where memory ran out, if it did; by then everything that the pass held is let go."""
        at = "forward"

        def in_loss() -> AbstractContextManager[None]:
            nonlocal at
            at = "loss"
            return self.clock.phase("compute.loss")

        try:
            with self.clock.phase("compute.forward"), self.replicas.autocast():
                loss = forward_loss(
                    self.replicas.call,
                    batch,
                    z_loss=self.loss.z_loss,
                    label_smoothing=self.loss.label_smoothing,
                    phase=in_loss,
                )
                sums += torch.stack([loss.loss.detach(), loss.nll_sum])
                self._documents.add(loss, batch)
            with self.clock.phase("compute.backward"):
                at = "backward"
                scaled = loss.loss * scale
                (scaled * self.scale.value if self.scale else scaled).backward()
        except Exception as error:
            if not is_out_of_memory(error) or not can_be_finished(error):
                raise
            return f"out of memory in {at} of a micro-batch of {batch.slots} slots"
        return None
