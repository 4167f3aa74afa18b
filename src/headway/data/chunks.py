"""Bytes of a source, cut between records: what the reading process hands to a worker, and what the worker reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from headway.data.formats import parse_json
from headway.data.turns import BadRecord

#: Between JSON values of one chunk: a control character, which JSON forbids everywhere (RFC 7464 uses it the same way).
RECORD_SEPARATOR = b"\x1e"

Kind = Literal["lines", "values", "rows", "document"]


@dataclass(slots=True)
class Chunk:
    """Whole records of one file.

    ``file``: index of the file. ``format``: how its records are to be read. ``kind``: ``lines`` (JSON lines),
    ``values`` (JSON values between separators), ``rows`` (an Arrow IPC stream), ``document`` (the text of one
    document). ``first``: 1-based line, or record number, of the first record.
    """

    file: int
    kind: Kind
    first: int
    data: bytes
    format: str = ""


def digest(chunks: list[Chunk]) -> str:
    """Hash of everything that decides what a worker makes of these chunks."""
    total = hashlib.sha256()
    for chunk in chunks:
        total.update(f"{chunk.file} {chunk.kind} {chunk.first} {chunk.format} {len(chunk.data)}\n".encode())
        total.update(chunk.data)
    return total.hexdigest()


def records(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """Each record with its number: a decoded value, or the `BadRecord` that says why there is none.

    Blank lines are no records, but count as lines.
    """
    if chunk.kind == "rows":
        yield from _rows(chunk)
    elif chunk.kind == "document":
        try:
            yield chunk.first, {"text": chunk.data.decode("utf-8")}
        except UnicodeDecodeError as error:
            yield chunk.first, BadRecord(f"not UTF-8: byte 0x{chunk.data[error.start]:02x} at offset {error.start}")
    else:
        separator = b"\n" if chunk.kind == "lines" else RECORD_SEPARATOR
        for number, raw in enumerate(chunk.data.split(separator), start=chunk.first):
            if not raw or raw.isspace():
                continue
            try:
                yield number, parse_json(raw)
            except BadRecord as error:
                yield number, error


def _rows(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa  # here, because a worker that reads only JSON need not pay for it

    number = chunk.first
    for batch in pa.ipc.open_stream(chunk.data):
        for row in range(batch.num_rows):
            try:
                yield number, without_nulls(batch.slice(row, 1).to_pylist()[0])
            except UnicodeDecodeError:
                yield number, BadRecord("not UTF-8")
            number += 1


def without_nulls(value: Any) -> Any:
    """Drop null fields: Arrow gives every struct of a column the fields of all others, filled with nulls."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value
