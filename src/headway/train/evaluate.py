"""Held-out loss, averaged by token over all ranks: a mean of batch means would weigh short batches too much."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.account.errors import UserError
from headway.data.batch import Batch
from headway.data.global_batch import Position
from headway.data.stream import Stream
from headway.model.forward import forward_loss
from headway.parallel.wrap import Replicas


@dataclass(frozen=True)
class Evaluation:
    """nll in nats per trained token."""

    nll: float
    tokens: int
    documents: int
    seconds: float


@dataclass(frozen=True)
class Evaluator:
    """Evaluates on a stream of its own; `batches` bounds the micro-batches a rank takes (None: all)."""

    stream: Stream
    rank: int
    world: int
    device: torch.device
    batches: int | None = None

    def run(self, replicas: Replicas) -> Evaluation:
        """Leaves the model in the mode it was in. Every rank takes part: FSDP gathers weights in the forward pass."""
        started = time.perf_counter()
        sums = held_out_sums(replicas, self._micro_batches(), self.device)
        replicas.sum_over_ranks(sums)
        nll, tokens, documents = sums.tolist()
        if not tokens:
            raise UserError("eval: no held-out document has a trained token; check eval.data")
        return Evaluation(nll / tokens, int(tokens), int(documents), time.perf_counter() - started)

    def _micro_batches(self) -> Iterator[Batch]:
        position, taken = Position(), 0
        while position.epoch == 0:
            fed = self.stream.global_batch(position)
            for batch in fed.micro_batches(self.rank, self.world):
                if self.batches is not None and taken >= self.batches:
                    return
                taken += 1
                yield batch.to(self.device)
            position = fed.next


def held_out_sums(replicas: Replicas, batches: Iterable[Batch], device: torch.device) -> Tensor:
    """This rank's sums without a gradient: float64 [3] of nll, trained tokens and documents.

    Leaves the model in the mode it was in.
    """
    training = replicas.module.training
    replicas.call.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # holds the counts exactly
    with torch.no_grad():
        for batch in batches:
            with replicas.autocast():
                loss = forward_loss(replicas.call, batch)
            sums += torch.stack([loss.nll_sum.double(), loss.tokens.double(), sums.new_tensor(len(batch.lengths))])
    replicas.call.train(training)
    return sums
