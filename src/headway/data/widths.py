"""How many bytes each token stands for, where that is fixed: finds span edges for a whole batch in a few numpy calls.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM…) spells every byte as one character, so a running sum over the tokens'
lengths is the byte position in the text. Asking the tokenizer for character offsets instead costs about a tenth of the
tokenisation. A document whose sum does not come out at its text's length is left to the offsets.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

if TYPE_CHECKING:
    from headway.data.encode import Document, Flat

INSIDE = -1


@dataclass(frozen=True)
class Widths:
    """``table`` int64 [vocabulary]: bytes per token. ``nfc``: the tokenizer composes characters (NFC) first."""

    table: np.ndarray
    nfc: bool

    @classmethod
    def of(cls, backend: Any) -> Widths | None:
        """The table of a `tokenizers.Tokenizer`, or None when its tokens do not have fixed widths."""
        normalizer = _spec(backend.normalizer).get("type")
        if not _byte_level(_spec(backend.pre_tokenizer)) or normalizer not in (None, "NFC"):
            return None
        added = {int(i): token.content for i, token in backend.get_added_tokens_decoder().items()}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        table = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int64)
        for token, index in vocabulary.items():
            table[index] = len(token.encode()) if index in added else len(token)
        return cls(table, normalizer == "NFC")

    def edges(self, documents: Sequence[Document], flat: Flat) -> tuple[np.ndarray, np.ndarray]:
        """Token index of each span's start and stop [2 * spans], INSIDE where it lies inside a token; and per document
        [D] whether these are right (False: the sum of widths is not the length of the text)."""
        before = np.zeros(len(flat.ids) + 1, dtype=np.int64)  # bytes before each token
        np.cumsum(self.table[flat.ids], out=before[1:])
        base = before[flat.text_starts]
        lengths, positions, owners = [], [], []
        for number, document in enumerate(documents):
            length, local = _byte_positions(document)
            lengths.append(length if not self.nfc or _is_nfc(document) else -1)
            positions += local
            owners += [number] * len(local)
        known = before[flat.text_stops] - base == np.array(lengths, dtype=np.int64)
        wanted = np.array(positions, dtype=np.int64) + base[np.array(owners, dtype=np.int64)]
        edges = np.searchsorted(before, wanted)
        inside = before[np.minimum(edges, len(flat.ids))] != wanted
        edges[inside] = INSIDE
        return edges, known


def _spec(part: Any) -> dict[str, Any]:
    """One part of a tokenizer as tokenizer.json spells it (how it pickles); {} where there is none."""
    return orjson.loads(part.__getstate__()) if part is not None else {}


def _byte_level(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer.get("type") == "Sequence":
        return any(_byte_level(step) for step in pre_tokenizer["pretokenizers"])
    return pre_tokenizer.get("type") == "ByteLevel"


def _byte_positions(document: Document) -> tuple[int, list[int]]:
    """UTF-8 length of a document's text, and of the text before each edge of its spans."""
    edges = [edge for span in document.spans for edge in span]
    if all(piece.isascii() for piece in document.pieces):
        return sum(map(len, document.pieces)), edges
    text = "".join(document.pieces)
    total = at = 0
    positions = []
    for edge in edges:
        total += len(text[at:edge].encode())
        positions.append(total)
        at = edge
    return total + len(text[at:].encode()), positions


def _is_nfc(document: Document) -> bool:
    return all(piece.isascii() or unicodedata.is_normalized("NFC", piece) for piece in document.pieces)
