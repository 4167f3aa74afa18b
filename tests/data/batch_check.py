"""What every batch must be, built slot by slot from the documents: the slow and obvious reference."""

from __future__ import annotations

import numpy as np

from headway.data.batch import IGNORE, PADDING_DOC, Batch
from headway.data.view import View


def check_batch(batch: Batch, view: View) -> None:
    """Every tensor against the documents that the batch says it holds."""
    shape = batch.input_ids.shape
    assert batch.labels.shape == batch.position_ids.shape == shape, "token-aligned columns differ in length"
    table = batch.cu_seqlens.tolist()
    assert table[0] == 0 and table[-1] == batch.slots == batch.input_ids.numel()
    assert len(batch.documents) == len(table) - 1
    ids, labels, positions = (t.reshape(-1).tolist() for t in (batch.input_ids, batch.labels, batch.position_ids))
    tokens = trained = 0
    lengths = []
    for begin, end, raw in zip(table[:-1], table[1:], batch.documents.tolist(), strict=True):
        assert begin < end
        assert begin // shape[1] == (end - 1) // shape[1], "a document crosses rows"
        assert positions[begin:end] == list(range(end - begin)), "positions do not restart"
        if raw == PADDING_DOC:
            assert labels[begin:end] == [IGNORE] * (end - begin), "padding has labels"
            continue
        wanted = [piece(view, raw, start, end - begin) for start in starts_of(view, raw, end - begin)]
        assert (ids[begin:end], labels[begin:end]) in wanted, f"document {raw} is not what the store holds"
        tokens += end - begin
        trained += sum(label != IGNORE for label in labels[begin:end])
        lengths.append(end - begin)
    assert (batch.tokens, batch.trained_tokens, batch.lengths.tolist()) == (tokens, trained, lengths)
    assert batch.max_seqlen == int(np.diff(table).max())


def starts_of(view: View, raw: int, length: int) -> list[int]:
    """Where the pieces of this document that have this length start."""
    rows = np.flatnonzero((view.pieces.raw == raw) & (view.pieces.length == length))
    return view.pieces.start[rows].tolist()


def piece(view: View, raw: int, start: int, length: int) -> tuple[list[int], list[int]]:
    """Ids and shifted labels of one piece, token by token."""
    store, doc = view.locate(raw)
    tokens, mask = view.stores[store].tokens(doc).tolist(), view.stores[store].mask(doc).tolist()
    ids, labels = [], []
    for at in range(start, start + length):
        ids.append(tokens[at])
        following = at + 1
        labels.append(tokens[following] if following < start + length and mask[following] else IGNORE)
    return ids, labels
