"""Rectangular batches (``pack: none``): one document a row, rows padded to one width. What most trainers do."""

from __future__ import annotations

import numpy as np

from headway.data.order import permutation

GROUP = 64  # micro-batches that are sorted by length together: enough to save padding, few enough to keep the mixing


def row_order(lengths: np.ndarray, rows: int, group_by_length: bool, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    """The order of documents of ``lengths`` (int [N]) for micro-batches of ``rows`` rows: a permutation, int64 [N].

    ``group_by_length``: documents are shuffled, then sorted by length within groups of `GROUP` micro-batches, and the
    micro-batches of each group are shuffled, so that the length does not drift along a group.
    """
    order = permutation(len(lengths), "rows", seed, epoch)
    if not group_by_length or not len(order):
        return order
    rank = np.arange(len(order))
    group, micro_batch = rank // (GROUP * rows), rank // rows
    order = order[np.lexsort((lengths[order], group))]
    place = permutation(int(micro_batch[-1]) + 1, "micro-batches of similar length", seed, epoch)
    if len(order) % rows:
        place[-1] = len(place)  # a short micro-batch anywhere but last would misalign those after it
    return order[np.lexsort((place[micro_batch], group))]


def micro_batch_starts(documents: int, rows: int, rows_per_step: int) -> np.ndarray:
    """The first row of every micro-batch (int64) when each step of ``rows_per_step`` rows is cut by ``rows``."""
    return np.flatnonzero(np.arange(documents) % rows_per_step % rows == 0)
