"""One optimizer step: micro-batches forward and backward, then the update. Nothing else happens here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.config.train import LossConfig
from headway.data.batch import Batch
from headway.model.forward import forward_logits
from headway.model.loss import loss_sum
from headway.parallel.wrap import Replicas
from headway.train.clock import StepClock
from headway.train.optim import Optimizers, clip_gradients


@dataclass(frozen=True)
class Learner:
    """What a step needs: the wrapped model, its optimizers, the loss options, the clock."""

    replicas: Replicas
    optimizers: Optimizers
    loss: LossConfig
    clip_norm: float | None
    clock: StepClock

    def update(self, micro_batches: Sequence[Batch], trained_tokens: int) -> Tensor:
        """Runs forward and backward over this rank's micro-batches and updates the parameters.

        The gradient is that of the sum of the losses of all trained tokens of the global batch, over all ranks,
        divided by `trained_tokens` (> 0): it does not depend on how the batch is split.

        Returns:
            float32 [4] on the device, equal on all ranks: objective and nll per trained token, gradient norm, and 1
            where everything was finite and the update was made.
        """
        self.optimizers.zero_grad()
        sums = self._accumulate(micro_batches, trained_tokens)
        if self.replicas.size > 1:
            with self.clock.phase("comm.dp"):
                self.replicas.sum_over_ranks(sums)
        with self.clock.phase("compute.optimizer"):
            norm, finite = clip_gradients(self.replicas.module, self.clip_norm)
            self.optimizers.step(finite)
        return torch.stack([*(sums / trained_tokens), norm, finite.float()])

    def _accumulate(self, micro_batches: Sequence[Batch], trained_tokens: int) -> Tensor:
        """Leaves the gradients on the parameters; returns this rank's sums of objective and nll, float32 [2]."""
        # FSDP2 and DDP both average over the ranks; the gradient wanted is the sum.
        scale = self.replicas.size / trained_tokens
        sums = torch.zeros(2, device=micro_batches[0].input_ids.device)
        for batch in micro_batches:
            with self.replicas.accumulate(last=batch is micro_batches[-1]):
                with self.clock.phase("compute.forward"), self.replicas.autocast():
                    logits = forward_logits(self.replicas.call, batch)
                with self.clock.phase("compute.loss"):
                    loss = loss_sum(
                        logits, batch.labels, z_loss=self.loss.z_loss, label_smoothing=self.loss.label_smoothing
                    )
                    sums += torch.stack([loss.loss.detach(), loss.nll_sum])
                    del logits
                with self.clock.phase("compute.backward"):
                    (loss.loss * scale).backward()
        return sums
