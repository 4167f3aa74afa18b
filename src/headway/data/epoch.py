"""The plan of one epoch: which pieces, in which order, in which packs. Arrays of numbers; no token is read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from headway.account.errors import UserError
from headway.data.pack import best_fit
from headway.data.rectangular import row_order
from headway.data.view import View


@dataclass(frozen=True)
class EpochPlan:
    """Sequence ``s`` (a pack, or a row) holds rows ``order[offsets[s]:offsets[s + 1]]`` of the view's pieces.

    ``order`` int64 [N], ``offsets`` int64 [S + 1]. A position within the epoch is a number of entries of ``order``.
    """

    order: np.ndarray
    offsets: np.ndarray
    algorithm: str

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def documents(self) -> int:
        return len(self.order)


def packed_plan(view: View, slots: int, seed: int, epoch: int, left_out: np.ndarray) -> EpochPlan:
    """Packs of ``slots``. ``left_out``: raw document ids that this epoch does without. Raises UserError if empty."""
    rows = _rows(view, seed, epoch, left_out)
    packs = best_fit(view.pieces.length[rows], slots, seed=seed, epoch=epoch)
    return EpochPlan(rows[packs.order], packs.offsets, packs.algorithm)


def rectangular_plan(
    view: View, rows_per_batch: int, group_by_length: bool, seed: int, epoch: int, left_out: np.ndarray
) -> EpochPlan:
    """One piece a sequence. ``left_out``: raw document ids that this epoch does without. Raises UserError if empty."""
    rows = _rows(view, seed, epoch, left_out)
    order = row_order(view.pieces.length[rows], rows_per_batch, group_by_length, seed=seed, epoch=epoch)
    algorithm = "rectangular, grouped by length" if group_by_length else "rectangular"
    return EpochPlan(rows[order], np.arange(len(rows) + 1), algorithm)


def _rows(view: View, seed: int, epoch: int, left_out: np.ndarray) -> np.ndarray:
    selected = view.select(seed, epoch)
    rows = selected[~np.isin(view.pieces.raw[selected], left_out)]
    if not len(rows):
        raise UserError(
            f"epoch {epoch} has nothing to train on: the weights of the data sources select {len(selected)} documents, "
            f"{len(selected) - len(rows)} of them in quarantine; raise data weights or look at the quarantine"
        )
    return rows


class PlanCache:
    """Keeps the two plans used last: an epoch's end needs its own and the next one's. Safe between threads."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[int, frozenset[int]], Future[EpochPlan]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, epoch: int, left_out: frozenset[int], build: Callable[[], EpochPlan]) -> EpochPlan:
        """The plan of this epoch without these documents; built once, others who want it meanwhile wait for it."""
        key = (epoch, left_out)
        with self._lock:
            future = self._plans.get(key)
            mine = future is None
            if future is None:
                future = self._plans[key] = Future()
            self._plans.move_to_end(key)
            while len(self._plans) > 2:
                self._plans.popitem(last=False)
        if mine:
            # Outside the lock: a plan that is being made ahead must not hold up batches of the present epoch.
            try:
                future.set_result(build())
            except BaseException as error:
                with self._lock:
                    self._plans.pop(key, None)
                future.set_exception(error)
        return future.result()
