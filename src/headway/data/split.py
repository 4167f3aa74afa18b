"""A micro-batch as several smaller ones that teach the same: cut between documents, never through one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headway.data.batch import IGNORE, PAD_ID, PADDING_DOC, Batch


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Exactly `parts` batches whose losses sum to that of `batch`; those that would be empty hold one slot of padding.

    Every rank must make the same number, so a batch of fewer documents than parts is filled up. Packs are cut between
    documents, rectangles between rows.
    """
    if parts == 1:
        return [batch]
    if not batch.packed:
        return _split_rows(batch, parts)
    ends = batch.cu_seqlens[1:].tolist()
    documents = _groups(np.diff(batch.cu_seqlens.cpu().numpy()), parts)
    pieces = []
    for first, last in documents:
        if first == last:
            pieces.append(_padding(batch))
            continue
        start, end = (ends[first - 1] if first else 0), ends[last - 1]
        pieces.append(
            _part(batch, slice(None), slice(start, end), batch.cu_seqlens[first : last + 1] - start, first, last)
        )
    return pieces


def most_parts(batch: Batch) -> int:
    """Into how many parts the batch can usefully be cut: its documents with a token, or its rows."""
    if not batch.packed:
        return batch.input_ids.shape[0]
    return max(1, int(np.count_nonzero(batch.documents != PADDING_DOC)))


def _groups(lengths: np.ndarray, parts: int) -> list[tuple[int, int]]:
    """`parts` runs of neighbours of nearly equal total length, as (first, last) with last excluded."""
    ends = np.cumsum(lengths)
    bounds = np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts, side="left") + 1
    cuts = [0, *np.minimum(bounds, len(lengths)).tolist(), len(lengths)]
    return [(cuts[i], max(cuts[i], cuts[i + 1])) for i in range(parts)]


def _split_rows(batch: Batch, parts: int) -> list[Batch]:
    rows, width = batch.input_ids.shape
    cuts = [rows * i // parts for i in range(parts + 1)]
    table = batch.cu_seqlens
    pieces = []
    for top, bottom in itertools.pairwise(cuts):
        if top == bottom:
            pieces.append(_padding(batch))
            continue
        first, last = (int(torch.searchsorted(table, edge * width)) for edge in (top, bottom))
        pieces.append(_part(batch, slice(top, bottom), slice(None), table[first : last + 1] - top * width, first, last))
    return pieces


def _part(batch: Batch, rows: slice, slots: slice, table: Tensor, first: int, last: int) -> Batch:
    labels = batch.labels[rows, slots].contiguous()
    sizes = np.diff(table.cpu().numpy())
    documents = batch.documents[first:last]
    lengths = sizes[documents != PADDING_DOC].astype(np.int64)
    return replace(
        batch,
        input_ids=batch.input_ids[rows, slots].contiguous(),
        labels=labels,
        position_ids=batch.position_ids[rows, slots].contiguous(),
        cu_seqlens=table.contiguous(),
        max_seqlen=int(sizes.max()),
        documents=documents,
        lengths=lengths,
        tokens=int(lengths.sum()),
        trained_tokens=int((labels != IGNORE).sum()),
    )


def _padding(batch: Batch) -> Batch:
    one = batch.input_ids.new_full((1, 1), PAD_ID)
    return replace(
        batch,
        input_ids=one,
        labels=torch.full_like(one, IGNORE),
        position_ids=torch.zeros_like(one),
        cu_seqlens=batch.cu_seqlens.new_tensor([0, 1]),
        max_seqlen=1,
        documents=np.full(1, PADDING_DOC, dtype=np.int64),
        lengths=np.zeros(0, dtype=np.int64),
        tokens=0,
        trained_tokens=0,
    )
