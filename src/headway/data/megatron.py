"""Megatron's indexed data sets (``PREFIX.bin`` + ``PREFIX.idx``) as a `DocumentStore`: every token is trained.

The format is that of Megatron-LM's ``IndexedDataset`` (``MMIDIDX``, version 1), little-endian. ``.idx``: 9 bytes of
magic, uint64 version, uint8 code of the token type, uint64 number of sequences S, uint64 number of document bounds
D + 1; then int32 [S] tokens per sequence, int64 [S] byte offset of each in ``.bin``, int64 [D + 1] first sequence of
each document. ``.bin``: the token ids, nothing else.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from headway.account.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Signed types are read as unsigned: the ids are the same, and a damaged negative one is then beyond any vocabulary.
_TOKEN_TYPES = {1: "<u1", 2: "<u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}
_CHUNK = 1 << 24
_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16


@dataclass(frozen=True)
class _Index:
    dtype: np.dtype
    sizes: np.ndarray  # int32 [S] tokens
    pointers: np.ndarray  # int64 [S] bytes
    documents: np.ndarray  # int64 [D + 1] sequences


class MegatronStore:
    """An indexed data set, memory-mapped. Its tokenizer is unknown: ``vocab_size`` is what the token type can hold."""

    def __init__(self, prefix: Path) -> None:
        """Raises UserError where a file is missing, not of this format, cut short, or the two do not fit."""
        self.path = prefix
        self._bin, self._idx = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        index = _read_index(self._idx)
        self._tokens = _map(self._bin, index.dtype)
        first, stop = _document_bounds(self._idx, self._bin, index, len(self._tokens))
        self._start = first
        self.lengths: np.ndarray = stop - first
        self.trained: np.ndarray = np.maximum(self.lengths - 1, 0)

    @classmethod
    def open(cls, prefix: str | Path) -> MegatronStore:
        """Open ``PREFIX.bin`` and ``PREFIX.idx``. Raises UserError as the constructor does."""
        return cls(Path(prefix))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def vocab_size(self) -> int:
        return 1 << (8 * self._tokens.dtype.itemsize)

    @cached_property
    def max_token(self) -> int:
        """The largest token id, -1 without tokens. Reads the whole file once."""
        chunks = range(0, len(self._tokens), _CHUNK)
        return max((int(self._tokens[begin : begin + _CHUNK].max()) for begin in chunks), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the index, the size of the token file, and 256 evenly spread blocks of 64 KiB of it.

        Such files can be terabytes, so this is not proof against a change of single tokens between those blocks.
        """
        digest = hashlib.sha256(self._idx.read_bytes())
        size = self._bin.stat().st_size
        digest.update(str(size).encode())
        with self._bin.open("rb") as file:
            for offset in np.unique(np.linspace(0, max(size - _SAMPLE_BYTES, 0), _SAMPLES).astype(np.int64)).tolist():
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        first, last = self._span(doc, start, stop)
        base = int(self._start[doc])
        return self._tokens[base + first : base + last]

    def mask(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        first, last = self._span(doc, start, stop)
        return np.ones(last - first, dtype=np.uint8)

    def source(self, doc: int) -> tuple[str, int]:
        """The token file, and the document's number in it (from 1)."""
        return str(self._bin), doc + 1

    def _span(self, doc: int, start: int, stop: int | None) -> tuple[int, int]:
        length = int(self.lengths[doc])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:  # a slice past the end would hand out the next document's tokens
            raise IndexError(f"document {doc} has {length} tokens, asked for [{start}:{stop}]")
        return start, stop


def _read_index(path: Path) -> _Index:
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); a Megatron data set is a .bin and an .idx"
        ) from None
    if len(content) < _HEADER.size or content[: len(MAGIC)].tobytes() != MAGIC:
        raise UserError(
            f"{path}: not a Megatron index (it does not begin with MMIDIDX); give the prefix of .bin and .idx"
        )
    _, version, code, sequences, bounds = _HEADER.unpack(content[: _HEADER.size].tobytes())
    if version != 1:
        raise UserError(
            f"{path}: version {version} of Megatron's index is unknown, only 1 is; preprocess the data again"
        )
    if code not in _TOKEN_TYPES:
        raise UserError(f"{path}: token type {code} is not one of integers; preprocess the data again")
    # A multimodal set has one more byte per sequence at the end; its text is read all the same.
    needed = _HEADER.size + 12 * sequences + 8 * bounds
    if len(content) not in (needed, needed + sequences):
        raise UserError(
            f"{path}: {len(content)} bytes where {sequences} sequences and {bounds} document bounds take {needed}; "
            "it was cut short or damaged, copy or preprocess it again"
        )
    parts = np.split(content[_HEADER.size : needed], [4 * sequences, 12 * sequences])
    sizes, pointers, documents = (part.view(kind) for part, kind in zip(parts, ("<i4", "<i8", "<i8"), strict=True))
    if bounds < 1 or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise UserError(f"{path}: its documents do not cover its {sequences} sequences; preprocess the data again")
    return _Index(np.dtype(_TOKEN_TYPES[code]), sizes, pointers, documents)


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size < dtype.itemsize:  # an empty file cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r", shape=(size // dtype.itemsize,)).view(np.ndarray)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); a Megatron data set is a .bin and an .idx"
        ) from None


def _document_bounds(idx: Path, bin_: Path, index: _Index, available: int) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last token (int64 [D]) of every document, checked against the token file."""
    begin = index.pointers // index.dtype.itemsize
    end = begin + index.sizes
    unsound = (index.pointers < 0) | (index.pointers % index.dtype.itemsize != 0) | (index.sizes < 0)
    # A document of several sequences (sentences) is one only where they lie one after the other.
    inner = np.ones(max(len(begin) - 1, 0), dtype=bool)
    inner[index.documents[(index.documents > 0) & (index.documents < len(begin))] - 1] = False
    if unsound.any() or (begin[1:] != end[:-1])[inner].any():
        raise UserError(f"{idx}: its offsets do not describe documents in one piece; preprocess the data again")
    if len(end) and end.max() > available:
        raise UserError(
            f"{bin_}: {available} tokens where its index needs {int(end.max())}; "
            "it was cut short, copy or preprocess it again"
        )
    bounds = np.append(begin, end[-1:])  # where a document without sequences begins does not matter
    first = bounds[index.documents[:-1]] if len(begin) else np.zeros(len(index.documents) - 1, np.int64)
    sizes = np.concatenate([[0], np.cumsum(index.sizes, dtype=np.int64)])
    return first, first + np.diff(sizes[index.documents])
