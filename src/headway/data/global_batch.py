"""A position in the data, and the global batch that starts there: the same for every rank, without reading a token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway.account.errors import UserError
from headway.data.batch import Batch, BatchBuilder


@dataclass(frozen=True, order=True)
class Position:
    """How far training has come: ``documents`` entries of epoch ``epoch``'s order have been consumed.

    The unit is the document (a piece, where long ones are split; once per repetition, where a source has a weight),
    never a pack or a row, whose numbers mean nothing once packing options change.
    """

    epoch: int = 0
    documents: int = 0

    def to_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "documents": self.documents}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """Raises UserError unless ``values`` is what `to_dict` makes."""
        sound = [name for name in ("epoch", "documents") if type(values.get(name)) is int and values[name] >= 0]
        if len(sound) != 2 or len(values) != 2:
            raise UserError(
                f"not a data position: {values}; it needs two whole numbers, epoch and documents, 0 or more"
            )
        return cls(values["epoch"], values["documents"])


@dataclass(frozen=True)
class Micro:
    """A micro-batch to be: rows of the view's pieces, which of them are masked, and the shape.

    ``fixed``: every micro-batch of the stream has this shape.
    """

    pieces: np.ndarray
    masked: np.ndarray
    rows: int
    width: int
    packed: bool
    fixed: bool

    @property
    def slots(self) -> int:
        return self.rows * self.width

    def build(self, builder: BatchBuilder) -> Batch:
        if self.packed:
            return builder.packed(self.pieces, self.masked, self.width)
        return builder.rectangular(self.pieces, self.masked, self.rows, self.width)

    @property
    def filler(self) -> tuple[int, int]:
        """(rows, width) of the padding batch for a rank that has no micro-batch when this one's rank has."""
        # Where shapes are fixed another shape would cost a compilation; elsewhere one slot is enough.
        return (self.rows, self.width) if self.fixed else (1, 1)

    def padding(self, builder: BatchBuilder) -> Batch:
        return builder.padding(*self.filler, packed=self.packed)


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The documents of one optimizer step.

    ``position``: where it starts; ``next``: where the following one starts. ``tokens`` real; ``trained_tokens`` with a
    label (what the loss of the whole step is divided by); ``slots`` computed, without the padding batches that make
    ranks even. ``lengths``, ``documents`` int64: real documents' lengths and raw ids, in order. Documents in
    quarantine count in none of these but ``slots``.
    """

    position: Position
    next: Position
    trained_tokens: int
    tokens: int
    slots: int
    lengths: np.ndarray
    documents: np.ndarray
    micro: tuple[Micro, ...] = field(repr=False)
    builder: BatchBuilder = field(repr=False)

    def micro_batches(self, rank: int, world: int) -> list[Batch]:
        """This rank's micro-batches, dealt out in turn. Every rank gets the same number; padding fills up.

        Raises UserError where a store returns something else than it declared (damaged files).
        """
        mine, padding = self.share(rank, world)
        return [micro.build(self.builder) for micro in mine] + [micro.padding(self.builder) for micro in padding]

    def share(self, rank: int, world: int) -> tuple[tuple[Micro, ...], tuple[Micro, ...]]:
        """What `micro_batches` builds: this rank's own, and those whose shape its padding has."""
        if not 0 <= rank < world:
            raise ValueError(f"there is no rank {rank} of {world}")
        mine = self.micro[rank::world]
        return mine, (self.micro[-1],) * (-(-len(self.micro) // world) - len(mine))
