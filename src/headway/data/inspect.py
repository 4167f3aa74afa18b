"""Look into a folder of shards: what it was made from, and samples with their trained tokens highlighted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text as RichText
from tokenizers import Tokenizer

from headway.account.errors import UserError
from headway.data.manifest import Manifest, Totals
from headway.data.store import DocumentStore, ShardFolder, open_store
from headway.data.tokenizer import TokenizerInfo, open_tokenizer, take_apart

TOKENIZER = "tokenizer.json"

Decoder = Callable[[list[int]], str]

_TRAINED_STYLE = "black on green"
_CONTEXT_STYLE = "dim"


@dataclass(frozen=True)
class SampleView:
    """One document: where it came from, its size, and its text as (part, trained) in order."""

    document: int
    file: str
    line: int
    tokens: int
    trained: int
    segments: list[tuple[str, bool]]

    @property
    def plain(self) -> str:
        """The text with trained parts between ⟦ and ⟧."""
        return "".join(f"⟦{part}⟧" if trained else part for part, trained in self.segments)


@dataclass(frozen=True)
class InspectReport:
    """What prepared data holds: counts, the lengths of its documents at the quantiles 0, 50, 90, 99, 100 %, samples.

    ``manifest``: None for a Megatron data set. ``all_lengths``: int64 [D] tokens per document.
    """

    path: Path
    manifest: Manifest | None
    totals: Totals
    lengths: tuple[int, int, int, int, int]
    all_lengths: np.ndarray
    samples: list[SampleView]


def inspect_folder(path: str | Path, show: int = 3, tokenizer: Any = None) -> InspectReport:
    """Open a folder (or a Megatron data set) and decode ``show`` of its documents, evenly spread, from the first.

    ``tokenizer``: a path or object; by default the one stored in the folder, or at the path that the manifest records.
    A Megatron data set names none: without one, samples are shown as token ids.

    Raises:
        UserError: the folder cannot be opened, or another tokenizer is given than the one it was made with.
    """
    store: Any = open_store(path)
    lengths = np.quantile(store.lengths, [0, 0.5, 0.9, 0.99, 1], method="lower") if len(store) else np.zeros(5)
    count = min(show, len(store))
    decode = (_decoder(store, tokenizer) if isinstance(store, ShardFolder) else _said(tokenizer)) if count else None
    samples = [_sample(store, decode, i * len(store) // count) for i in range(count)] if decode else []
    quantiles = tuple(int(length) for length in lengths)
    manifest = getattr(store, "manifest", None)
    totals = manifest.totals if manifest else _totals(store)
    return InspectReport(store.path, manifest, totals, quantiles, store.lengths, samples)  # type: ignore[arg-type]


def render_sample(sample: SampleView) -> RichText:
    """A sample for the terminal: its origin and size, then its text with trained tokens highlighted."""
    text = RichText()
    head = f"{sample.file}:{sample.line}  {sample.tokens} tokens, {sample.trained} trained\n"
    text.append(head, style="bold")
    for part, trained in sample.segments:
        # Data may hold escape sequences, and a terminal would obey them.
        text.append(part.replace("\x1b", "␛"), style=_TRAINED_STYLE if trained else _CONTEXT_STYLE)
    return text


def segments(decode: Decoder, tokens: np.ndarray, mask: np.ndarray) -> list[tuple[str, bool]]:
    """The text of a document as (part, trained), parts joined as long as the mask does not change."""
    ids = tokens.tolist()
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    spans = [(a, b) for a, b in pairwise(edges) if a < b]
    parts = [decode(ids[a:b]) for a, b in spans]
    if "".join(parts) != decode(ids):
        # A decoder that treats the first token apart (SentencePiece drops its space): show what each part adds.
        upto = [decode(ids[:b]) for _, b in spans]
        parts = [text[len(before) :] for before, text in zip(["", *upto], upto, strict=False)]
    return [(part, bool(mask[a])) for part, (a, _) in zip(parts, spans, strict=True)]


def decoder_of(info: TokenizerInfo, tokenizer: Any) -> Decoder:
    """Ids to text, special tokens included."""
    if info.spec:
        backend = Tokenizer.from_str(info.spec)
        return lambda ids: backend.decode(ids, skip_special_tokens=False)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _decoder(store: ShardFolder, tokenizer: Any) -> Decoder:
    record = store.manifest.tokenizer
    stored = store.path / TOKENIZER
    if tokenizer is None and stored.exists():
        backend = Tokenizer.from_file(str(stored))
        return lambda ids: backend.decode(ids, skip_special_tokens=False)
    opened = open_tokenizer(record.path if tokenizer is None else tokenizer, key="--tokenizer")
    info = take_apart(opened)
    if info.sha256 != record.sha256:
        raise UserError(f"{store.path}: was made with the tokenizer {record.path}, which is not the one given")
    return decoder_of(info, opened)


def _said(tokenizer: Any) -> Decoder:
    """How a store that names no tokenizer is shown: by the one given, else as numbers."""
    if tokenizer is None:
        return lambda ids: "".join(f"{number} " for number in ids)
    opened = open_tokenizer(tokenizer, key="--tokenizer")
    return decoder_of(take_apart(opened), opened)


def _totals(store: DocumentStore) -> Totals:
    trained = store.trained
    return Totals(len(store.lengths), int(store.lengths.sum()), int(trained.sum()), int((trained == 0).sum()))


def _sample(store: DocumentStore, decode: Decoder, document: int) -> SampleView:
    file, line = store.source(document)
    tokens, mask = store.tokens(document), store.mask(document)
    return SampleView(document, file, line, len(tokens), int(store.trained[document]), segments(decode, tokens, mask))
