"""Labels checked by decoding: what the trained tokens say must be the text that was to be trained.

Spans are characters, labels are tokens, and between them stand a table of byte widths, or offsets that each library
counts in its own way. This asks neither: it decodes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from headway.data.encode import Document, Encoded
from headway.data.labels import some

_SHOWN = 60  # characters around a difference

Decode = Callable[[Sequence[int]], str]


def difference(document: Document, encoded: Encoded, decode: Decode) -> str | None:
    """Where the trained tokens of a document do not decode to its spans, both on one line; None where all do.

    Only for documents without ``head`` and ``tail``. A tokenizer that does not give its text back (it drops or adds
    spaces, composes characters) is held to what it does give back; where its decoding differs from the text by more
    than that, there is nothing to compare with, and the answer is None.
    """
    ids = encoded.ids.tolist()
    text, back = "".join(document.pieces), decode(ids)
    plain = next((as_said for as_said in _FORMS if as_said(back) == as_said(text)), None)
    if plain is None:
        return None
    wanted = [plain(part) for part in _spans(document, text, len(decode(ids[:1])))]
    edges = [0, *(np.flatnonzero(np.diff(encoded.mask)) + 1).tolist(), len(ids)]
    runs = [(a, b) for a, b in pairwise(edges) if a < b and encoded.mask[a]]

    def added(a: int, b: int) -> str:
        """What tokens a to b add to those before: some decoders (SentencePiece's) treat a first token apart."""
        return plain(decode(ids[:b])[len(decode(ids[:a])) :])

    if len(runs) != len(wanted):
        found, whole = "".join(added(a, b) for a, b in runs), "".join(wanted)
        return _shown(found, whole) if found != whole else None
    for (a, b), part in some(list(zip(runs, wanted, strict=True))):
        if plain(decode(ids[a:b])) != part and added(a, b) != part:
            return _shown(added(a, b), part)
    return None


def _spans(document: Document, text: str, first: int) -> list[str]:
    """The text of each span, those that touch as one. The first token (``first`` characters) is never trained."""
    joined: list[list[int]] = []
    for start, stop in document.spans:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        elif max(start, first) < stop:
            joined.append([max(start, first), stop])
    return [text[start:stop] for start, stop in joined]


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


#: What a tokenizer may lose of a text, from nothing to all white space.
_FORMS: tuple[Callable[[str], str], ...] = (
    str,
    _composed,
    lambda text: _composed(text).replace(" ", ""),
    lambda text: "".join(_composed(text).split()),
)


def _shown(found: str, wanted: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), min(len(found), len(wanted)))
    part = slice(max(0, at - _SHOWN // 2), at + _SHOWN // 2)
    return f"the trained tokens read {found[part]!r} where the text to train is {wanted[part]!r}"
