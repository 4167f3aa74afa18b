"""A micro-batch as several smaller ones that teach the same: cut between documents, never through one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch

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
    host = _on_host(batch)
    ends = host.cu_seqlens[1:].tolist()
    documents = _groups(np.diff(host.cu_seqlens.numpy()), parts)
    pieces = []
    for first, last in documents:
        if first == last:
            pieces.append(_padding(batch))
            continue
        start, end = (ends[first - 1] if first else 0), ends[last - 1]
        pieces.append(_part(batch, host, (slice(None), slice(start, end)), start, first, last))
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
    host = _on_host(batch)
    table = host.cu_seqlens.numpy()
    pieces = []
    for top, bottom in itertools.pairwise(cuts):
        if top == bottom:
            pieces.append(_padding(batch))
            continue
        first, last = (int(np.searchsorted(table, edge * width)) for edge in (top, bottom))
        pieces.append(_part(batch, host, (slice(top, bottom), slice(None)), top * width, first, last))
    return pieces


def _on_host(batch: Batch) -> Batch:
    """Where what is cut can be read without a wait for the device."""
    return batch.host or batch.to("cpu")


def _part(batch: Batch, host: Batch, where: tuple[slice, slice], start: int, first: int, last: int) -> Batch:
    sizes = np.diff(host.cu_seqlens[first : last + 1].numpy())
    documents = batch.documents[first:last]
    lengths = sizes[documents != PADDING_DOC].astype(np.int64)
    return replace(
        batch,
        input_ids=batch.input_ids[where].contiguous(),
        labels=batch.labels[where].contiguous(),
        position_ids=batch.position_ids[where].contiguous(),
        cu_seqlens=batch.cu_seqlens[first : last + 1] - start,
        max_seqlen=int(sizes.max()),
        documents=documents,
        lengths=lengths,
        tokens=int(lengths.sum()),
        trained_tokens=int((host.labels[where] != IGNORE).sum()),
        host=None,
    )


def _padding(batch: Batch) -> Batch:
    one = batch.input_ids.new_full((1, 1), PAD_ID)
    return replace(
        batch,
        input_ids=one,
        labels=torch.full_like(one, IGNORE),
        position_ids=torch.zeros_like(one),
        cu_seqlens=torch.arange(2, dtype=batch.cu_seqlens.dtype, device=one.device),
        max_seqlen=1,
        documents=np.full(1, PADDING_DOC, dtype=np.int64),
        lengths=np.zeros(0, dtype=np.int64),
        tokens=0,
        trained_tokens=0,
        host=None,
    )
