"""One optimizer step: micro-batches forward and backward, then the update. Nothing else happens here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.config.train import LossConfig
from headway.data.batch import Batch
from headway.model.forward import forward_loss
from headway.parallel.out_of_memory import Collectives, can_be_finished, free_memory, is_out_of_memory
from headway.parallel.wrap import Replicas
from headway.train.clock import StepClock
from headway.train.loss_scale import LossScale
from headway.train.optim import Optimizers, clip_gradients


class OutOfMemory(Exception):
    """Some rank had no memory for its micro-batches. Raised on all ranks; no gradient is left, nothing was updated."""


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
    _collectives: Collectives = field(init=False)

    def __post_init__(self) -> None:
        self._collectives = Collectives(self.replicas)

    def update(self, micro_batches: Sequence[Batch], trained_tokens: int) -> Tensor:
        """Runs forward and backward over this rank's micro-batches and updates the parameters.

        The gradient is that of the sum of the losses of all trained tokens of the global batch, over all ranks,
        divided by `trained_tokens` (> 0): it does not depend on how the batch is split.

        Returns:
            float32 [4] on the device, equal on all ranks: objective and nll per trained token, gradient norm, and 1
            where everything was finite and the update was made. With a loss scale, [5]: the scale it was made with.

        Raises:
            OutOfMemory: on all ranks, where one of them ran out of memory.
        """
        sums = self.learn(micro_batches, trained_tokens)
        if self.replicas.size > 1:
            with self.clock.phase("comm.dp"):
                self.replicas.sum_over_ranks(sums)
        if self.before_update is not None:
            with self.clock.phase("checkpoint"):
                self.before_update()
        with self.clock.phase("compute.optimizer"):
            scale = self.scale.value.clone() if self.scale else None
            norm, finite = clip_gradients(self.replicas.module, self.clip_norm, scale)
            self.optimizers.step(finite)
            if self.scale:
                self.scale.update(finite)
        return torch.stack([*(sums / trained_tokens), norm, finite.float(), *([scale] if scale is not None else [])])

    def learn(self, micro_batches: Sequence[Batch], trained_tokens: int) -> Tensor:
        """Leaves the gradients on the parameters; returns this rank's sums of objective and nll, float32 [2].

        Raises OutOfMemory as `update` does.
        """
        self.optimizers.zero_grad()
        sums, failure = self._accumulate(micro_batches, trained_tokens)
        with self.clock.phase("host.sync"):
            failure = self.agree(failure)
        if failure is not None:
            self.optimizers.zero_grad()
            free_memory(self.replicas.device_type)
            raise OutOfMemory(failure)
        return sums

    def _accumulate(self, micro_batches: Sequence[Batch], trained_tokens: int) -> tuple[Tensor, str | None]:
        """This rank's sums, and what failed; a failed rank still takes part in every collective of the others."""
        # FSDP2 and DDP both average over the ranks; the gradient wanted is the sum.
        scale = self.replicas.size / trained_tokens
        sums = torch.zeros(2, device=micro_batches[0].input_ids.device)
        failure: str | None = None
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
            with self.clock.phase("compute.backward"):
                at = "backward"
                scaled = loss.loss * scale
                (scaled * self.scale.value if self.scale else scaled).backward()
        except Exception as error:
            if not is_out_of_memory(error) or not can_be_finished(error):
                raise
            return f"out of memory in {at} of a micro-batch of {batch.slots} slots"
        return None
