"""One micro-batch: documents of a pack, or rows of a rectangle, as the tensors a model is given.

`Batch.cu_seqlens` is the one table of documents. Positions and attention come from it, never from ids, so a padding id
that is also a real token (pad = eos) can neither hide a label nor join two documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headway.account.errors import UserError
from headway.data.view import View

IGNORE = -100  # the label of a slot that predicts nothing (torch's own default)
PADDING_DOC = -1
PAD_ID = 0  # any id that every model has; nothing looks at it

MAX_SLOTS = 2**31 - 1  # cu_seqlens are int32


class BadDocuments(UserError):
    """Documents whose stored tokens cannot be trained on. documents: (raw id, what is wrong), of one micro-batch."""

    def __init__(self, documents: list[tuple[int, str]]) -> None:
        super().__init__(f"{documents[0][1]}; its files are damaged, prepare the data again")
        self.documents = documents


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows of S slots; R == 1 when ``packed``.

    ``input_ids`` int64 [R, S]. ``labels`` int64 [R, S], already shifted: the token that a slot must predict, IGNORE
    where there is none (a document's last token, context, padding). ``position_ids`` int64 [R, S], from 0 in every
    document. ``cu_seqlens`` int32 [D + 1]: document ``d`` has slots ``cu_seqlens[d] : cu_seqlens[d + 1]`` of the R * S
    in row-major order; padding and documents set aside are documents of their own, and no document crosses a row.
    ``max_seqlen``: slots of the longest one. ``documents`` int64 [D]: raw document ids, PADDING_DOC for padding.
    ``lengths`` int64: of the real documents only. ``tokens``: real ones. ``trained_tokens``: labels that count.
    ``host``: of a batch on a device, the one it was copied from, to be read without a wait for the device.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    packed: bool
    documents: np.ndarray
    lengths: np.ndarray
    tokens: int
    trained_tokens: int
    host: Batch | None = None

    @property
    def slots(self) -> int:
        """Slots computed: R * S."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with its tensors on ``device``; what follows from the table of documents is made there."""
        if torch.device(device).type == "cpu":
            return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        table = self.cu_seqlens.to(device, non_blocking=non_blocking)
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            position_ids=positions_of(table, self.slots).view(self.input_ids.shape),
            cu_seqlens=table,
            host=self if self.input_ids.device.type == "cpu" else self.host,
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a non-blocking copy to a GPU really does not block."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """The memory is in use on ``stream`` until it has passed this point."""
        self._map(lambda tensor: tensor.record_stream(stream) or tensor)  # type: ignore[func-returns-value]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            input_ids=function(self.input_ids),
            labels=function(self.labels),
            position_ids=function(self.position_ids),
            cu_seqlens=function(self.cu_seqlens),
        )


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A small tensor of the host's on a device. The host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def positions_of(cu_seqlens: Tensor, slots: int) -> Tensor:
    """int64 [slots]: each slot's place in its document, from 0, on the table's device and without a wait for it."""
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=slots)
    return torch.arange(slots, device=cu_seqlens.device) - starts


class BatchBuilder:
    """Builds batches of rows of ``view.pieces``. ``masked`` (bool, one a piece) turns pieces into padding in place."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._smallest_vocabulary = min(store.vocab_size for store in view.stores)

    def packed(self, pieces: np.ndarray, masked: np.ndarray, slots: int) -> Batch:
        """One pack: the pieces one after the other, then padding up to ``slots``."""
        ends = np.cumsum(self.view.pieces.length[pieces])
        if ends[-1] > slots:
            raise ValueError(f"a pack of {ends[-1]} tokens does not fit {slots} slots")
        return self._build(pieces, masked, ends - self.view.pieces.length[pieces], 1, slots, packed=True)

    def rectangular(self, pieces: np.ndarray, masked: np.ndarray, rows: int, width: int) -> Batch:
        """``rows`` rows of ``width`` slots: one piece each, rows without a piece are padding."""
        starts = np.arange(len(pieces), dtype=np.int64) * width
        return self._build(pieces, masked, starts, rows, width, packed=False)

    def padding(self, rows: int, width: int, *, packed: bool) -> Batch:
        """A batch that teaches nothing, for a rank that has no micro-batch when the others do."""
        nothing = np.zeros(0, dtype=np.int64)
        return self._build(nothing, nothing.astype(bool), nothing, rows, width, packed=packed)

    def _build(
        self, pieces: np.ndarray, masked: np.ndarray, starts: np.ndarray, rows: int, width: int, *, packed: bool
    ) -> Batch:
        slots = rows * width
        if slots > MAX_SLOTS:
            raise UserError(
                f"a batch of {rows} x {width} slots is too large for int32 offsets; lower data.slots or rows"
            )
        length = self.view.pieces.length[pieces]
        row_bounds = np.arange(rows + 1, dtype=np.int64) * width
        table = np.unique(np.concatenate([row_bounds, starts, starts + length]))
        documents = np.full(len(table) - 1, PADDING_DOC, dtype=np.int64)
        documents[np.searchsorted(table, starts[~masked])] = self.view.pieces.raw[pieces[~masked]]

        ids, trained = self._gather(pieces[~masked], starts[~masked], slots)
        labels = np.full(slots, IGNORE, dtype=np.int64)
        # Documents' first tokens are never `trained`, so the last slot of the document before gets no label.
        np.copyto(labels[:-1], ids[1:], where=trained[1:])
        sizes = np.diff(table)
        positions = np.arange(slots, dtype=np.int64) - np.repeat(table[:-1], sizes)
        return Batch(
            input_ids=torch.from_numpy(ids.reshape(rows, width)),
            labels=torch.from_numpy(labels.reshape(rows, width)),
            position_ids=torch.from_numpy(positions.reshape(rows, width)),
            cu_seqlens=torch.from_numpy(table.astype(np.int32)),
            max_seqlen=int(sizes.max()),
            packed=packed,
            documents=documents,
            lengths=length[~masked],
            tokens=int(length[~masked].sum()),
            trained_tokens=int(np.count_nonzero(trained)),
        )

    def _gather(self, pieces: np.ndarray, starts: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int64 [slots], PAD_ID elsewhere) and whether each must be learned (bool [slots])."""
        ids = np.full(slots, PAD_ID, dtype=np.int64)
        trained = np.zeros(slots, dtype=bool)
        table = self.view.pieces
        rows = zip(
            table.store[pieces].tolist(),
            table.doc[pieces].tolist(),
            table.start[pieces].tolist(),
            table.length[pieces].tolist(),
            starts.tolist(),
            strict=True,
        )
        for store, doc, begin, length, slot in rows:
            source = self.view.stores[store]
            ids[slot : slot + length] = self._exactly(source.tokens(doc, begin, begin + length), length, store, doc)
            mask = self._exactly(source.mask(doc, begin, begin + length), length, store, doc)
            trained[slot + 1 : slot + length] = mask[1:]
        self._check(ids, trained, pieces, starts)
        return ids, trained

    def _exactly(self, values: np.ndarray, length: int, store: int, doc: int) -> np.ndarray:
        if len(values) != length:  # numpy would spread a single value over the whole document
            raw = self.view.raw_id(store, doc)
            said = f"data source {store} returned {len(values)} tokens of {length} for document {doc}"
            raise BadDocuments([(raw, f"{self.view.origin(raw)}: {said}")])
        return values

    def _check(self, ids: np.ndarray, trained: np.ndarray, pieces: np.ndarray, starts: np.ndarray) -> None:
        table = self.view.pieces
        in_range = ids.min(initial=0) >= 0 and ids.max(initial=0) < self._smallest_vocabulary
        if in_range and np.count_nonzero(trained) == table.trained[pieces].sum():
            return
        bad = []
        for piece, slot in zip(pieces.tolist(), starts.tolist(), strict=True):
            here = slice(slot, slot + int(table.length[piece]))
            wrong = self._wrong(piece, ids[here], trained[here])
            if wrong is not None:
                raw = int(table.raw[piece])
                bad.append((raw, f"{self.view.origin(raw)}: {wrong}"))
        if bad:
            raise BadDocuments(bad)

    def _wrong(self, piece: int, ids: np.ndarray, trained: np.ndarray) -> str | None:
        table = self.view.pieces
        vocabulary = self.view.stores[int(table.store[piece])].vocab_size
        outside = ids[(ids < 0) | (ids >= vocabulary)]
        if len(outside):
            return f"token id {int(outside[0])} is outside the vocabulary of {vocabulary} that its data source declares"
        # The loss of a step is divided by the labels that the plan counts: they must be those of the mask.
        labels = np.count_nonzero(trained)
        if labels != table.trained[piece]:
            return f"the mask has {labels} trained tokens where its data source counts {int(table.trained[piece])}"
        return None
