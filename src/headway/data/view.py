"""What one run trains on: stored documents seen through a sequence length, a policy for overlong ones, and weights.

Stores keep documents whole. A `View` turns them into *pieces*, the training documents: one per stored document, or
several where a long one is split. Nothing is copied, so one folder of shards serves every sequence length.

Every stored document has a **raw document id**: its number counted over all stores, in the order in which they are
given. Batches, positions and quarantine speak of raw documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import get_args

import numpy as np

from headway.account.errors import UserError
from headway.data.order import hash_keys, permutation
from headway.data.pieces import Overlong, Pieces, cut, whole_documents
from headway.data.store import DocumentStore


@dataclass(frozen=True)
class Weighted:
    """A store, and how many times an epoch sees each of its documents. 0.5: half of them, another half next epoch."""

    store: DocumentStore
    weight: float = 1.0


@dataclass(frozen=True)
class ViewOptions:
    """``seq_len``: most tokens of a piece. ``overlong``: what happens to longer documents; there is no default.

    ``holdout``: this many documents are never trained on, they make up `View.held_out`. Which ones depends on
    ``holdout_seed`` and the stores alone: evaluations stay comparable when the sequence length or the policy changes.
    ``keep_untrained``: train on pieces without a single label too (they cost time and teach nothing).
    ``keep_tails``: keep the tokens behind the last label of a document that was cut (likewise).
    ``default_overlong``: nobody chose ``overlong``, which the report then says.
    """

    seq_len: int
    overlong: Overlong
    holdout: int = 0
    holdout_seed: int = 0
    keep_untrained: bool = False
    keep_tails: bool = False
    default_overlong: bool = False


@dataclass(frozen=True)
class UntrainedReport:
    """Pieces without a label: how many, their tokens, whether they were kept. ``empty``: documents without a token."""

    pieces: int
    tokens: int
    kept: bool
    empty: int

    def __str__(self) -> str:
        fate = "kept" if self.kept else "left out"
        return f"without a trained token: {self.pieces} pieces, {self.tokens} tokens ({fate}); empty: {self.empty}"


class View:
    """The training documents of some stores under some options; with ``held_out``, the documents set aside instead."""

    def __init__(self, sources: Sequence[Weighted], options: ViewOptions, *, held_out: bool = False) -> None:
        """Raises UserError where an option makes no sense, and where no piece is left, naming the cause."""
        _check(sources, options)
        self.options = options
        self.stores = tuple(source.store for source in sources)
        # Evaluation looks at each document once, however often training would have.
        self.weights = tuple(float(source.weight > 0) if held_out else float(source.weight) for source in sources)
        self.base = np.concatenate([[0], np.cumsum([len(store.lengths) for store in self.stores])]).astype(np.int64)

        whole = whole_documents(self.stores, self.base[:-1], self._raw_documents(held_out))
        present = whole[whole.length > 0]
        pieces, counts = cut(present, self.stores, options.seq_len, options.overlong, keep_tails=options.keep_tails)
        self.overlong = replace(counts, default=options.default_overlong)
        mute = pieces.trained == 0
        self.untrained = UntrainedReport(
            int(mute.sum()), int(pieces.length[mute].sum()), options.keep_untrained, len(whole) - len(present)
        )
        self.pieces: Pieces = pieces if options.keep_untrained else pieces[~mute]
        if not len(self.pieces):
            raise UserError(self._why_empty(len(pieces)))

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return int(self.pieces.length.max())

    @property
    def documents(self) -> int:
        """Documents of all stores, trained on or not; raw ids lie below it."""
        return int(self.base[-1])

    def held_out(self) -> View:
        """The view of the documents set aside for evaluation, each once. Raises UserError if there are none."""
        if not self.options.holdout:
            raise UserError("no documents were set aside for evaluation; give eval.holdout a number above 0")
        sources = [Weighted(store, weight) for store, weight in zip(self.stores, self.weights, strict=True)]
        return View(sources, self.options, held_out=True)

    def select(self, seed: int, epoch: int) -> np.ndarray:
        """The rows of `pieces` that one epoch trains on (int64), each as often as its store's weight says.

        A fractional weight takes a slice of the store's documents in a random order, the next epoch the next slice:
        a pure function of (seed, epoch), and every document is seen before any is seen again.
        """
        bounds = np.searchsorted(self.pieces.store, np.arange(len(self.stores) + 1))
        chosen = [np.zeros(0, np.int64)]
        for number, weight in enumerate(self.weights):
            rows = np.arange(bounds[number], bounds[number + 1])
            times, share = divmod(Fraction(repr(weight)), 1)
            chosen += [rows] * int(times)
            if share and len(rows):
                chosen.append(rows[_in_slice(self.pieces.doc[rows], share, epoch, (seed, number))])
        return np.concatenate(chosen)

    def raw_id(self, store: int, doc: int) -> int:
        """The raw id of document ``doc`` of store number ``store``. Raises UserError if there is no such document."""
        if not 0 <= store < len(self.stores) or not 0 <= doc < len(self.stores[store].lengths):
            raise UserError(f"data source {store} has no document {doc}; was this recorded with other data?")
        return int(self.base[store]) + doc

    def locate(self, raw: int) -> tuple[int, int]:
        """(number of the store, document in it) of a raw id. Raises UserError if there is no such document."""
        if not 0 <= raw < self.documents:
            raise UserError(f"there is no document {raw}, the data sources hold {self.documents}")
        store = int(np.searchsorted(self.base, raw, side="right")) - 1
        return store, raw - int(self.base[store])

    def origin(self, raw: int) -> str:
        """``file:line`` that a raw document came from."""
        store, doc = self.locate(raw)
        file, line = self.stores[store].source(doc)
        return f"{file}:{line}"

    def fingerprint_parts(self) -> dict[str, str | int]:
        """Everything that decides which pieces there are, under the name that a user knows it by."""
        parts: dict[str, str | int] = {
            "data.seq_len": self.options.seq_len,
            "data.overlong": self.options.overlong,
            "eval.holdout": self.options.holdout,
            "eval.holdout seed": self.options.holdout_seed,
            "data.keep_untrained": int(self.options.keep_untrained),
            "number of data sources": len(self.stores),
        }
        if self.overlong.tail_tokens:  # else nothing differs; checkpoints of before there was a choice kept them
            parts["data.keep_tails"] = "false"
        for number, (store, weight) in enumerate(zip(self.stores, self.weights, strict=True)):
            parts[f"content of data source {number}"] = store.fingerprint
            parts[f"documents of data source {number}"] = len(store.lengths)
            parts[f"weight of data source {number}"] = repr(weight)
        return parts

    def _raw_documents(self, held_out: bool) -> np.ndarray:
        """Raw ids, ascending, of the documents set aside (``held_out``) or of all others with a weight."""
        weighty = np.repeat(np.array(self.weights) > 0, np.diff(self.base))
        aside = np.zeros(self.documents, dtype=bool)
        if self.options.holdout:
            trained = np.concatenate([store.trained for store in self.stores])
            candidates = np.flatnonzero(weighty & (trained > 0))
            if self.options.holdout >= len(candidates):
                raise UserError(
                    f"eval.holdout={self.options.holdout} leaves nothing to train on: only {len(candidates)} documents "
                    "have a trained token; lower eval.holdout"
                )
            keys = hash_keys(self.documents, "holdout", self.options.holdout_seed)[candidates]
            aside[candidates[np.argsort(keys, kind="stable")[: self.options.holdout]]] = True
        return np.flatnonzero(aside if held_out else weighty & ~aside)

    def _why_empty(self, pieces: int) -> str:
        report = self.overlong
        if not report.samples:
            return (
                f"nothing to train on: the data sources hold {self.documents} documents, "
                f"{self.untrained.empty} of them without a token, the others of weight 0 or set aside by eval.holdout"
            )
        if not pieces:
            return (
                f"nothing to train on: all {report.samples} documents are longer than data.seq_len={report.seq_len} "
                "and data.overlong is drop; raise data.seq_len, or choose truncate or split"
            )
        return (
            f"nothing to train on: none of {report.samples} documents has a trained token within "
            f"data.seq_len={report.seq_len} tokens ({report.trained_lost} were lost to data.overlong={report.policy}); "
            f"look at some with `headway data inspect {self._folder()} --show 3`"
        )

    def _folder(self) -> str:
        """Where the first store lies, as far as it lies anywhere."""
        return str(getattr(self.stores[0], "path", "FOLDER"))


def _check(sources: Sequence[Weighted], options: ViewOptions) -> None:
    if not sources:
        raise UserError("nothing to train on: no data source is given")
    for number, source in enumerate(sources):
        if not (math.isfinite(source.weight) and source.weight >= 0):
            raise UserError(f"weight {source.weight} of data source {number} must be a number that is 0 or more")
    if not any(source.weight for source in sources):
        raise UserError("nothing to train on: every data source has weight 0")
    if options.seq_len < 1:
        raise UserError(f"data.seq_len={options.seq_len} must be 1 or more")
    if options.overlong not in get_args(Overlong):
        raise UserError(f"data.overlong={options.overlong!r} must be one of {', '.join(get_args(Overlong))}")
    if options.holdout < 0:
        raise UserError(f"eval.holdout={options.holdout} must be 0 or more")


def _in_slice(doc: np.ndarray, share: Fraction, epoch: int, seeds: tuple[int, int]) -> np.ndarray:
    """bool [P]: whether a piece's document (``doc``, sorted) is in the slice that this epoch takes."""
    number = np.cumsum(np.diff(doc, prepend=doc[0]) != 0)
    count = int(number[-1]) + 1
    # Exact fractions: with floats the slices of a long run would drift apart and skip or repeat a document.
    first, stop = math.floor(epoch * share * count), math.floor((epoch + 1) * share * count)
    taken = np.zeros(count, dtype=bool)
    taken[permutation(count, "slices of a weighted source", *seeds)[np.arange(first, stop) % count]] = True
    return taken[number]
