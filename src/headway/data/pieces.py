"""Stored documents cut to a sequence length: the training documents, and an exact count of what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from headway.data.store import DocumentStore

Overlong = Literal["truncate", "split", "drop"]


@dataclass(frozen=True)
class Pieces:
    """Training documents, sorted by (store, doc, start): ``store`` int32 [P], all others int64 [P].

    Piece ``p`` is tokens ``start[p] : start[p] + length[p]`` of document ``doc[p]`` of store ``store[p]``.
    ``raw``: its raw document id. ``trained``: its labels; a piece's first token cannot be one.
    """

    store: np.ndarray
    doc: np.ndarray
    raw: np.ndarray
    start: np.ndarray
    length: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.doc)

    def __getitem__(self, rows: np.ndarray) -> Pieces:
        return Pieces(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class OverlongReport:
    """What the overlong policy did, every stored document of the view counted once (whatever its weight).

    ``affected`` documents of ``samples`` were longer than ``seq_len``. ``tokens_lost`` of ``tokens_total`` tokens and
    ``trained_lost`` of ``trained_total`` labels are not trained on because of it; a split loses no token, but the
    labels of its pieces' first tokens. ``dropped`` documents are gone, ``pieces_added`` by splitting.
    ``tail_tokens``: tokens of cut documents behind their last label, left out of their pieces beside what was lost: no
    label is predicted from them, so nothing learns from them. ``default``: nobody chose the policy.
    """

    policy: Overlong
    seq_len: int
    samples: int
    affected: int
    tokens_total: int
    tokens_lost: int
    trained_total: int
    trained_lost: int
    dropped: int
    pieces_added: int
    tail_tokens: int = 0
    default: bool = False

    def __str__(self) -> str:
        # Whoever did not choose what is lost must be told that there was a choice, and where.
        chosen = " (default of data.overlong)" if self.default and self.affected else ""
        tails = f", {self.tail_tokens} tokens left out that no label follows" if self.tail_tokens else ""
        return (
            f"overlong ({self.policy}{chosen} at {self.seq_len}): {self.affected} of {self.samples} documents, "
            f"{self.tokens_lost} of {self.tokens_total} tokens lost, "
            f"{self.trained_lost} of {self.trained_total} trained tokens lost, "
            f"{self.dropped} documents dropped, {self.pieces_added} pieces added{tails}"
        )


def whole_documents(stores: Sequence[DocumentStore], base: np.ndarray, raw: np.ndarray) -> Pieces:
    """The documents ``raw`` (ascending raw ids) uncut, one piece each; ``base``: first raw id of each store."""
    store = (np.searchsorted(base, raw, side="right") - 1).astype(np.int32)
    lengths = np.concatenate([each.lengths for each in stores])[raw]
    trained = np.concatenate([each.trained for each in stores])[raw]
    return Pieces(store, raw - base[store], raw, np.zeros_like(raw), lengths, trained)


def cut(
    whole: Pieces, stores: Sequence[DocumentStore], seq_len: int, policy: Overlong, *, keep_tails: bool = False
) -> tuple[Pieces, OverlongReport]:
    """Apply the overlong policy to uncut documents: pieces of at most ``seq_len`` tokens, and what it cost.

    Pieces of a document that was cut end with their last label, unless ``keep_tails``: under causal attention what
    comes behind it reaches no loss and no gradient, and where answers are short and what they answer is long (tools,
    retrieved text) it is a large part of a cut document.
    """
    overlong, tails = whole.length > seq_len, 0
    if policy == "drop":
        pieces = whole[~overlong]
    else:
        count = -(-whole.length // seq_len) if policy == "split" else np.ones_like(whole.length)
        pieces, ends = _cut_up(whole, stores, seq_len, count)
        if not keep_tails:
            tails = int((pieces.length - ends).sum())
            pieces = replace(pieces, length=ends)
    dropped = int(overlong.sum()) if policy == "drop" else 0
    report = OverlongReport(
        policy=policy,
        seq_len=seq_len,
        samples=len(whole),
        affected=int(overlong.sum()),
        tokens_total=int(whole.length.sum()),
        tokens_lost=int(whole.length.sum() - pieces.length.sum()) - tails,
        trained_total=int(whole.trained.sum()),
        trained_lost=int(whole.trained.sum() - pieces.trained.sum()),
        dropped=dropped,
        pieces_added=len(pieces) - (len(whole) - dropped),
        tail_tokens=tails,
    )
    return pieces, report


def _cut_up(
    whole: Pieces, stores: Sequence[DocumentStore], seq_len: int, count: np.ndarray
) -> tuple[Pieces, np.ndarray]:
    """Each document as its first ``count`` pieces of ``seq_len`` tokens (the last one may be shorter), and the length
    (int64 [P]) with which each would end with its last label. Pieces without one, and documents that fit, stay whole.
    """
    parent = whole[np.repeat(np.arange(len(whole)), count)]
    start = (np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)) * seq_len
    length = np.minimum(parent.length - start, seq_len)
    # A document trained everywhere or nowhere has pieces trained everywhere or nowhere; only the others need their
    # mask, which lies on disk.
    everywhere = parent.trained == parent.length - 1
    trained, ends = np.where(everywhere, length - 1, parent.trained), length.copy()
    for row in np.flatnonzero((parent.length > seq_len) & ~everywhere & (parent.trained > 0)).tolist():
        first, stop = int(start[row]) + 1, int(start[row] + length[row])
        labels = np.flatnonzero(stores[parent.store[row]].mask(int(parent.doc[row]), first, stop))
        trained[row] = len(labels)
        if len(labels):
            ends[row] = labels[-1] + 2  # the piece's first token, which no mask was read for, and the label itself
    return Pieces(parent.store, parent.doc, parent.raw, start, length, trained), ends
