"""Global batches as a pure function of (seed, epoch) and a position in documents.

The order is decided before ranks come in: any number of ranks reads the same documents in the same global batches, and
any chain of stops and resumes continues exactly. Seeking is a binary search in the epoch's plan; no token is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from headway.account.errors import Refused, UserError
from headway.data.aside import Key, Spans, is_left_out, is_masked, set_aside
from headway.data.batch import BatchBuilder
from headway.data.epoch import EpochPlan, PlanCache, packed_plan, rectangular_plan
from headway.data.global_batch import GlobalBatch, Micro, Position
from headway.data.rectangular import micro_batch_starts
from headway.data.view import View

Packing = Literal["best_fit", "none"]
ORDER_VERSION = 1  # raise it with any change to the order of documents: old runs must not resume into another order


@dataclass(frozen=True)
class StreamOptions:
    """``pack``: "best_fit" makes packs of ``slots``; "none" makes micro-batches of ``rows`` rows, one document each,
    as wide as the longest of them (with ``pad_to_seq_len``: as the view's sequence length, and always ``rows`` rows).
    ``group_by_length`` puts documents of similar length into the same micro-batch.
    ``sequences_per_step``: packs (or rows) of a global batch.
    ``trim``: a pack ends with its last document. Nothing is computed for empty slots, but no two packs have one shape:
    for devices where shapes cost nothing. The order of documents does not depend on it.
    """

    seed: int = 0
    pack: Packing = "best_fit"
    slots: int = 0
    rows: int = 1
    sequences_per_step: int = 1
    group_by_length: bool = False
    pad_to_seq_len: bool = False
    trim: bool = False


@dataclass(frozen=True)
class PackReport:
    """What an epoch computes: ``slots`` in ``sequences`` (packs or rows) and ``micro_batches``; ``tokens`` are real."""

    algorithm: str
    sequences: int
    micro_batches: int
    documents: int
    slots: int
    tokens: int
    trained_tokens: int

    @property
    def fill(self) -> float:
        """Share of the slots that hold a real token."""
        return self.tokens / self.slots

    def __str__(self) -> str:
        return (
            f"{self.algorithm}: {self.documents} documents in {self.sequences} sequences, {self.tokens} tokens in "
            f"{self.slots} slots ({self.fill:.3%} filled), {self.trained_tokens} trained tokens"
        )


class Stream:
    """Endless epochs over a view. Immutable: `with_quarantine` makes another stream, which shares the plans."""

    def __init__(
        self,
        view: View,
        options: StreamOptions,
        *,
        quarantine: Mapping[Key, Spans] | None = None,
        plans: PlanCache | None = None,
    ) -> None:
        """``quarantine``: the documents that are or were set aside.

        Raises UserError for options that make no sense and for documents that do not exist.
        """
        _check(view, options)
        self.view = view
        self.options = options
        self.quarantine = dict(quarantine or {})
        self._aside = {view.raw_id(store, doc): spans for (store, doc), spans in self.quarantine.items()}
        self._plans = plans or PlanCache()
        self._builder = BatchBuilder(view)

    def with_quarantine(self, documents: Iterable[Key], *, epoch: int) -> Stream:
        """A stream without these (store, document) pairs, set aside during ``epoch``.

        Until that epoch ends their slots become padding and every other document stays where it was; later epochs are
        planned without them. Raises UserError for a document that does not exist.
        """
        added = {document: set_aside(self.quarantine.get(document, ()), epoch) for document in documents}
        return self.setting_aside(self.quarantine | added)

    def trimmed(self) -> Stream:
        """This stream with packs that end with their last document; what is in them, and where, stays."""
        options = replace(self.options, trim=True)
        return Stream(self.view, options, quarantine=self.quarantine, plans=self._plans)

    def setting_aside(self, quarantine: Mapping[Key, Spans]) -> Stream:
        """This stream with exactly these documents set aside, as the constructor takes them."""
        return Stream(self.view, self.options, quarantine=quarantine, plans=self._plans)

    def global_batch(self, position: Position) -> GlobalBatch:
        """The global batch that starts at ``position``; the last one of an epoch may be smaller.

        Raises:
            Refused: ``position`` is not where a sequence of this plan starts.
            UserError: the epoch is empty.
        """
        plan = self.plan(position.epoch)
        if position.documents == plan.documents:
            return self.global_batch(Position(position.epoch + 1))
        first = int(np.searchsorted(plan.offsets, position.documents))
        if first >= plan.sequences or plan.offsets[first] != position.documents:
            raise Refused(
                f"no sequence of epoch {position.epoch} starts at document {position.documents} of {plan.documents}: "
                "the data or the packing options are not those of the run that stopped there; restore them"
            )
        last = min(first + self.options.sequences_per_step, plan.sequences)
        stop = int(plan.offsets[last])
        pieces = plan.order[position.documents : stop]
        masked = np.isin(self.view.pieces.raw[pieces], self._raw(is_masked, position.epoch))
        micro = self._micro(pieces, masked, plan.offsets[first : last + 1] - position.documents)
        real = pieces[~masked]
        lengths = self.view.pieces.length[real]
        return GlobalBatch(
            position=position,
            next=Position(position.epoch, stop) if last < plan.sequences else Position(position.epoch + 1),
            trained_tokens=int(self.view.pieces.trained[real].sum()),
            tokens=int(lengths.sum()),
            slots=sum(each.slots for each in micro),
            lengths=lengths,
            documents=self.view.pieces.raw[real],
            micro=micro,
            builder=self._builder,
        )

    def epoch(self, epoch: int) -> Iterator[GlobalBatch]:
        """All global batches of one epoch (of a held-out view: one evaluation)."""
        position = Position(epoch)
        while position.epoch == epoch:
            batch = self.global_batch(position)
            yield batch
            position = batch.next

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, made when first asked for; two are kept. Raises UserError if the epoch is empty."""
        left_out = frozenset(self._raw(is_left_out, epoch))
        return self._plans.get(epoch, left_out, lambda: self._make_plan(epoch, left_out))

    def _raw(self, are: Callable[[Spans, int], bool], epoch: int) -> list[int]:
        """The raw documents that an epoch has as padding, or is planned without."""
        return sorted(raw for raw, spans in self._aside.items() if are(spans, epoch))

    def steps_in_epoch(self, epoch: int) -> int:
        """Global batches of an epoch, the smaller last one included."""
        return -(-self.plan(epoch).sequences // self.options.sequences_per_step)

    def efficiency(self, epoch: int) -> PackReport:
        """What an epoch computes, and how much of it is real, before anything of it was set aside."""
        options, plan, pieces = self.options, self.plan(epoch), self.view.pieces
        lengths = pieces.length[plan.order]
        if options.pack == "best_fit":
            micro_batches, slots = plan.sequences, plan.sequences * options.slots
        else:
            starts = micro_batch_starts(len(lengths), options.rows, options.sequences_per_step)
            micro_batches, slots = len(starts), sum(rows * width for rows, width in self._rectangles(lengths, starts))
        return PackReport(
            algorithm=plan.algorithm,
            sequences=plan.sequences,
            micro_batches=micro_batches,
            documents=plan.documents,
            slots=slots,
            tokens=int(lengths.sum()),
            trained_tokens=int(pieces.trained[plan.order].sum()),
        )

    def fingerprint_parts(self) -> dict[str, str | int]:
        """What decides the order of documents, by the names a user knows. The size of a global batch does not."""
        options = self.options
        parts = self.view.fingerprint_parts()
        parts |= {"version of the order of documents": ORDER_VERSION, "seed": options.seed, "data.pack": options.pack}
        if options.pack == "best_fit":
            parts["data.slots"] = options.slots
        else:
            parts["data.group_by_length"] = f"groups of {options.rows} rows" if options.group_by_length else "no"
        return parts

    @property
    def fingerprint(self) -> str:
        """SHA-256 of `fingerprint_parts`: equal for streams that give the same documents in the same order."""
        return hashlib.sha256(json.dumps(self.fingerprint_parts(), sort_keys=True).encode()).hexdigest()

    def refuse_if_changed(self, saved: Mapping[str, str | int]) -> None:
        """Raises Refused with every difference between ``saved`` (an earlier `fingerprint_parts`) and this stream."""
        now = self.fingerprint_parts()
        changed = [
            f"{name} {saved.get(name, '(absent)')} -> {now.get(name, '(absent)')}"
            for name in sorted(saved.keys() | now.keys())
            if saved.get(name) != now.get(name)
        ]
        if changed:
            raise Refused(
                f"this is not the data of the run to resume (saved -> now): {'; '.join(changed)}; "
                "restore what it was, or start a new run"
            )

    def _make_plan(self, epoch: int, left_out: frozenset[int]) -> EpochPlan:
        options, without = self.options, np.array(sorted(left_out), dtype=np.int64)
        if options.pack == "best_fit":
            return packed_plan(self.view, options.slots, options.seed, epoch, without)
        return rectangular_plan(self.view, options.rows, options.group_by_length, options.seed, epoch, without)

    def _micro(self, pieces: np.ndarray, masked: np.ndarray, bounds: np.ndarray) -> tuple[Micro, ...]:
        """``bounds``: of the sequences within ``pieces``."""
        if self.options.pack == "best_fit":
            spans = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
            shapes = [(1, width) for width in self._widths(pieces, spans)]
        else:
            starts = np.arange(0, len(pieces), self.options.rows)
            spans = list(zip(starts.tolist(), [*starts[1:].tolist(), len(pieces)], strict=True))
            shapes = self._rectangles(self.view.pieces.length[pieces], starts)
        packed = self.options.pack == "best_fit"
        fixed = not self.options.trim if packed else self.options.pad_to_seq_len
        return tuple(
            Micro(pieces[a:b], masked[a:b], rows, width, packed, fixed)
            for (a, b), (rows, width) in zip(spans, shapes, strict=True)
        )

    def _widths(self, pieces: np.ndarray, spans: list[tuple[int, int]]) -> list[int]:
        """Slots of the packs that hold ``pieces[a:b]``."""
        if not self.options.trim:
            return [self.options.slots] * len(spans)
        return [int(self.view.pieces.length[pieces[a:b]].sum()) for a, b in spans]

    def _rectangles(self, lengths: np.ndarray, starts: np.ndarray) -> list[tuple[int, int]]:
        """(rows, width) of the micro-batches that begin at ``starts`` of documents of ``lengths``."""
        if self.options.pad_to_seq_len:
            return [(self.options.rows, self.view.options.seq_len)] * len(starts)
        rows = np.diff(starts, append=len(lengths)).tolist()
        return list(zip(rows, np.maximum.reduceat(lengths, starts).tolist(), strict=True))


def _check(view: View, options: StreamOptions) -> None:
    if options.pack not in get_args(Packing):
        raise UserError(f"data.pack={options.pack!r} must be one of {', '.join(get_args(Packing))}")
    if options.sequences_per_step < 1:
        raise UserError(f"a global batch of {options.sequences_per_step} sequences cannot train; it needs 1 or more")
    if options.rows < 1:
        raise UserError(f"data.rows={options.rows} must be 1 or more")
    if options.pack == "none":
        return
    if options.slots < view.longest:
        raise UserError(
            f"data.slots={options.slots} cannot hold the longest document ({view.longest} tokens); "
            "raise data.slots or lower data.seq_len"
        )
    if options.group_by_length or options.pad_to_seq_len:
        raise UserError(
            "data.group_by_length and data.pad_to=seq_len mean nothing for packs; give data.pack=none or drop them"
        )
