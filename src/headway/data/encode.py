"""Rendered documents -> token ids and a label mask, many at once through the tokenizer's own Rust code.

A document is text with trained character spans. Tokens do not know about spans: where a token would hold characters
from both sides of a span's edge, the text is cut there and both sides are tokenised on their own, as they are when the
model is used (the prompt is tokenised before the answer exists). What cannot be cut so is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np

from headway.data.turns import BadRecord
from headway.data.widths import INSIDE, Widths


@dataclass(slots=True)
class Document:
    """What to tokenise: ``pieces`` are tokenised apart and joined.

    ``spans`` are the trained character positions of the joined text; ``head`` ids go before it, untrained; ``tail`` ids
    behind it, trained. ``check``: whether its labels are to be decoded and compared with the text.
    """

    pieces: list[str]
    spans: list[tuple[int, int]]
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    check: bool = False


@dataclass(slots=True)
class Encoded:
    """Ids [T] and mask uint8 [T] of one document; ``cut``: how many tokens had to be cut at a span's edge."""

    ids: np.ndarray
    mask: np.ndarray
    cut: int = 0


class Encoder(Protocol):
    """Turns documents into tokens; in place of one that cannot be labelled exactly comes the reason."""

    def encode(self, documents: Sequence[Document]) -> list[Encoded | BadRecord]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        ...


@dataclass
class FastEncoder:
    """For tokenizers with a Rust backend: a `tokenizers.Tokenizer` without post-processor, padding and truncation."""

    backend: Any
    dtype: type[np.unsignedinteger]
    _widths: Widths | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._widths = Widths.of(self.backend)

    def encode(self, documents: Sequence[Document]) -> list[Encoded | BadRecord]:
        # Without offsets the library is about a sixth faster; with known widths they are not needed.
        batch = self.backend.encode_batch_fast if self._widths else self.backend.encode_batch
        encodings = batch([p for d in documents for p in d.pieces], add_special_tokens=False)
        flat = Flat(documents, encodings, self.dtype)
        edges = self._edges(documents, encodings, flat)
        mask = flat.mask(documents, edges)
        results: list[Encoded | BadRecord] = []
        at = 0
        for number, document in enumerate(documents):
            positions = edges[at : at + 2 * len(document.spans)]
            at += 2 * len(document.spans)
            here = slice(flat.starts[number], flat.stops[number])
            if INSIDE in positions:
                results.append(self._cut(document, positions, flat.ids[here]))
            else:
                results.append(Encoded(flat.ids[here], mask[here]))
        return results

    def _edges(self, documents: Sequence[Document], encodings: list[Any], flat: Flat) -> np.ndarray:
        """Token index of each span's start and stop, document after document [2 * spans]; INSIDE if inside a token."""
        if self._widths is None:
            result, piece = [], 0
            for document, first in zip(documents, flat.text_starts.tolist(), strict=True):
                own = encodings[piece : piece + len(document.pieces)]
                piece += len(own)
                result += _edges_by_offset(document, own, first)
            return np.array(result, dtype=np.int64)
        edges, known = self._widths.edges(documents, flat)
        if not known.all():
            bounds = np.cumsum([0, *(2 * len(document.spans) for document in documents)])
            for number in np.flatnonzero(~known).tolist():
                document, first = documents[number], int(flat.text_starts[number])
                own = self.backend.encode_batch(document.pieces, add_special_tokens=False)
                edges[bounds[number] : bounds[number + 1]] = _edges_by_offset(document, own, first)
        return edges

    def _cut(self, document: Document, edges: np.ndarray, whole: np.ndarray) -> Encoded | BadRecord:
        """The document tokenised again, cut at the edges that fall inside a token."""
        inside = [p for p, token in zip(chain.from_iterable(document.spans), edges, strict=True) if token == INSIDE]
        pieces = _split(document.pieces, inside)
        if len(pieces) > len(document.pieces):
            again = self.encode([Document(pieces, document.spans, document.head, document.tail)])[0]
            # A tokenizer that puts a space before every text would put one into the middle of this one.
            if isinstance(again, Encoded) and self.decode(again.ids.tolist()) == self.decode(whole.tolist()):
                again.cut += len(inside)
                return again
        return _cannot_cut(document, inside[0])

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)


@dataclass
class SlowEncoder:
    """For tokenizers without a Rust backend: finds a span's edges by tokenising the text up to each of them."""

    tokenizer: Any
    dtype: type[np.unsignedinteger]

    def encode(self, documents: Sequence[Document]) -> list[Encoded | BadRecord]:
        return [self._one(document) for document in documents]

    def _one(self, document: Document) -> Encoded | BadRecord:
        pieces = [self._ids(piece) for piece in document.pieces]
        whole = list(chain.from_iterable(pieces))
        edges, inside = [], []
        for position in chain.from_iterable(document.spans):
            before = list(chain.from_iterable(self._ids(p) for p in _upto(document.pieces, position)))
            edges.append(len(before))
            if whole[: len(before)] != before:
                inside.append(position)
        ids = [*document.head, *whole, *document.tail]
        if inside:
            pieces_cut = _split(document.pieces, inside)
            if len(pieces_cut) > len(document.pieces):
                again = self._one(Document(pieces_cut, document.spans, document.head, document.tail))
                if isinstance(again, Encoded) and self.decode(again.ids.tolist()) == self.decode(ids):
                    again.cut += len(inside)
                    return again
            return _cannot_cut(document, inside[0])
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            mask[len(document.head) + start : len(document.head) + stop] = 1
        mask[len(ids) - len(document.tail) :] = 1
        mask[:1] = 0
        return Encoded(np.array(ids, dtype=self.dtype), mask)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class Flat:
    """The tokens of many documents in one array: ids [T], and per document where it and its text start and stop."""

    def __init__(self, documents: Sequence[Document], encodings: list[Any], dtype: type[np.unsignedinteger]) -> None:
        parts: list[Sequence[int]] = []
        starts, text_starts, text_stops = [], [], []
        at = piece = 0
        for document in documents:
            starts.append(at)
            parts.append(document.head)
            at += len(document.head)
            text_starts.append(at)
            for encoding in encodings[piece : piece + len(document.pieces)]:
                parts.append(encoding.ids)
                at += len(parts[-1])
            piece += len(document.pieces)
            text_stops.append(at)
            parts.append(document.tail)
            at += len(document.tail)
        self.ids = np.fromiter(chain.from_iterable(parts), dtype=dtype, count=at)
        self.starts = np.array(starts, dtype=np.int64)
        self.stops = np.array([*starts[1:], at], dtype=np.int64)
        self.text_starts = np.array(text_starts, dtype=np.int64)
        self.text_stops = np.array(text_stops, dtype=np.int64)

    def mask(self, documents: Sequence[Document], edges: np.ndarray) -> np.ndarray:
        """uint8 [T]: 1 between each pair of edges and on each tail, 0 on every document's first token."""
        steps = np.zeros(len(self.ids) + 1, dtype=np.int8)
        pairs = edges.reshape(-1, 2)
        pairs = pairs[(pairs != INSIDE).all(axis=1)]
        np.add.at(steps, pairs[:, 0], 1)
        np.add.at(steps, pairs[:, 1], -1)
        np.add.at(steps, self.text_stops, 1)
        np.add.at(steps, self.stops, -1)
        mask = np.cumsum(steps[:-1], dtype=np.int8).view(np.uint8)
        mask[self.starts[self.starts < self.stops]] = 0
        return mask


def _edges_by_offset(document: Document, encodings: list[Any], first: int) -> list[int]:
    """Token index of every edge, from the encodings' character offsets; ``first``: index of the text's first token."""
    edges = []
    for position in chain.from_iterable(document.spans):
        token = first
        for piece, encoding in zip(document.pieces, encodings, strict=True):
            if position <= len(piece):
                local = _token_at(encoding, position)
                token = token + local if local != INSIDE else INSIDE
                break
            position -= len(piece)
            token += len(encoding)
        edges.append(token)
    return edges


def _token_at(encoding: Any, position: int) -> int:
    """The first token that starts at or behind a character, by bisection; INSIDE if the one before reaches over it."""
    low, high = 0, len(encoding)
    while low < high:
        middle = (low + high) // 2
        if encoding.token_to_chars(middle)[0] < position:
            low = middle + 1
        else:
            high = middle
    return INSIDE if low and encoding.token_to_chars(low - 1)[1] > position else low


def _cannot_cut(document: Document, position: int) -> BadRecord:
    around = "".join(document.pieces)[max(0, position - 12) : position + 12]
    return BadRecord(f"a token spans the edge of the answer at {around!r} and this tokenizer cannot be cut there")


def _upto(pieces: list[str], position: int) -> list[str]:
    """The pieces of the text up to a position."""
    result = []
    for piece in pieces:
        result.append(piece[:position])
        position -= len(piece)
        if position <= 0:
            break
    return result


def _split(pieces: list[str], positions: list[int]) -> list[str]:
    """The pieces, cut at further positions of the joined text."""
    edges = {*positions}
    at = 0
    for piece in pieces:
        edges |= {at, at + len(piece)}
        at += len(piece)
    text, ordered = "".join(pieces), sorted(edges)
    return [text[a:b] for a, b in pairwise(ordered)]
