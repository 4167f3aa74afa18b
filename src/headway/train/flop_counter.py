"""FLOPs and slots of a global batch from the plan alone: no rank has to ask another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.account.events import Flops
from headway.account.flops import Recompute, SlotLayout, Trainable, step_flops
from headway.account.shape import ModelShape
from headway.data.global_batch import GlobalBatch, Micro


@dataclass(frozen=True)
class Counted:
    """Of all ranks together, the padding micro-batches included that make ranks even."""

    flops: Flops
    slots: int


@dataclass(frozen=True)
class FlopCounter:
    """Counts by the causal convention (docs/flops.md)."""

    shape: ModelShape
    trainable: Trainable
    world: int
    trained_head: bool = False  # the head runs only at slots with a label (model/head.py); the rest is no one's FLOPs

    def count(self, batch: GlobalBatch, recompute: Recompute) -> Counted:
        layout = SlotLayout(segments(batch, self.world))
        heads = batch.trained_tokens if self.trained_head else None
        found = step_flops(
            self.shape,
            batch.lengths,
            layout,
            recompute=recompute,
            trainable=self.trainable,
            head_tokens=heads,
            head_slots=heads,
        )
        return Counted(found.to_flops(), layout.slots)


def segments(batch: GlobalBatch, world: int) -> npt.NDArray[np.int64]:
    """Lengths of everything that attention runs over, padding among it, int64 [segments]."""
    lengths = batch.builder.view.pieces.length
    parts = [_segments_of(micro, lengths) for micro in batch.micro]
    missing = -len(batch.micro) % world
    rows, width = batch.micro[-1].filler
    parts.append(np.full(missing * rows, width, np.int64))
    return np.concatenate(parts)


def _segments_of(micro: Micro, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if not micro.packed:
        return np.full(micro.rows, micro.width, np.int64)
    documents = lengths[micro.pieces]
    tail = micro.width - int(documents.sum())
    return np.append(documents, tail) if tail else documents
