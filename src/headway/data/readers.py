"""Read source files as chunks of whole records, with flat memory, and find out the format of each file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from headway.account.errors import UserError
from headway.data.chunks import Chunk, Kind, records
from headway.data.formats import FORMATS, detect_format, mistyped
from headway.data.readers_json import json_layout, value_chunks
from headway.data.sources import Source
from headway.data.store import hash_file
from headway.data.streams import Filled, open_stream, reading
from headway.data.turns import BadRecord

#: The longest record read. A file without line ends would otherwise be taken into memory whole.
MAX_RECORD = 256 << 20

#: How many records are looked at to find a file's format; more bad ones in a row than this are no accident.
_LOOK_AT = 200


class FileReader:
    """Reads one file once.

    ``format``, ``size``, ``sha256`` are known when `chunks` is exhausted; ``position`` is the number of bytes of the
    file read so far.
    """

    def __init__(self, source: Source, index: int, *, fmt: str = "auto", target: int = 1 << 20) -> None:
        self.source = source
        self.index = index
        self.format = fmt
        self.target = target
        self.size = 0
        self.sha256 = ""

    def chunks(self) -> Iterator[Chunk]:
        """Chunks of about ``target`` bytes.

        Raises:
            UserError: the file cannot be read, is damaged, or its format is not given and cannot be told.
        """
        held: list[Chunk] = []
        for chunk in self._raw():
            held.append(chunk)
            if self.format == "auto":
                self.format = find_format(self.source, held) or "auto"
            if self.format != "auto":
                yield from self._named(held)
                held = []
        if self.format == "auto":
            if any(True for chunk in held for _ in records(chunk)):
                raise _no_format(self.source, held)
            self.format = "empty"

    def _named(self, chunks: list[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            chunk.format = self.format
            yield chunk

    def _raw(self) -> Iterator[Chunk]:
        if self.source.container in ("parquet", "arrow"):
            from headway.data.readers_arrow import arrow_chunks, parquet_chunks  # here: pyarrow is slow to import

            with reading(self.source.path):
                self.size = self.source.path.stat().st_size
            self.sha256 = hash_file(self.source.path)
            read = parquet_chunks if self.source.container == "parquet" else arrow_chunks
            for first, data in read(self.source, self.target):
                yield Chunk(self.index, "rows", first, data)
            return
        with open_stream(self.source) as (stream, file):
            for kind, first, data in _pieces(self.source, stream, self.target):
                self.size = file.size
                yield Chunk(self.index, kind, first, data)
            self.sha256 = file.finish()
            self.size = file.size


def find_format(source: Source, chunks: list[Chunk]) -> str | None:
    """The format of the first record that has one; None as long as there are few records and none has.

    Raises:
        UserError: none of the records looked at has a format; says what the first one holds.
    """
    seen = 0
    for chunk in chunks:
        if chunk.kind == "document":
            return "text"
        for _, record in islice(records(chunk), _LOOK_AT):
            fmt = detect_format(record)
            if fmt:
                return fmt
            seen += 1
    if seen >= _LOOK_AT or sum(len(chunk.data) for chunk in chunks) > MAX_RECORD:
        raise _no_format(source, chunks)
    return None


def _no_format(source: Source, chunks: list[Chunk]) -> UserError:
    seen = list(islice((pair for chunk in chunks for pair in records(chunk)), _LOOK_AT))
    number, record = next((pair for pair in seen if not isinstance(pair[1], BadRecord)), seen[0])
    if isinstance(record, BadRecord):
        return UserError(f"{source}:{number}: {record}; no readable record among the first {len(seen)}")
    known = "; ".join(f"{name} ({' + '.join('/'.join(keys) for keys in needed)})" for name, needed in FORMATS.items())
    wrong = mistyped(record)
    if wrong:
        return UserError(f"{source}:{number}: {wrong}")
    holds = f"keys {', '.join(map(repr, list(record)[:10]))}" if isinstance(record, dict) else "no object"
    return UserError(f"{source}:{number}: holds {holds}, which is none of the formats {known}; give data.format")


def _pieces(source: Source, stream: Filled, target: int) -> Iterator[tuple[Kind, int, bytes]]:
    if source.container == "document":
        text = stream.read(MAX_RECORD + 1)
        if len(text) > MAX_RECORD:
            raise UserError(
                f"{source}: a text file is one document, and this one is longer than {MAX_RECORD >> 20} MiB; "
                'split it, or write JSON lines with a "text" key'
            )
        if text.strip():
            yield "document", 1, text
        return
    layout = json_layout(source, stream)
    if layout == "lines":
        for first, data in line_chunks(source, stream, target):
            yield "lines", first, data
    elif layout:
        for first, data in value_chunks(source, stream, target, array=layout == "array", limit=MAX_RECORD):
            yield "values", first, data


def line_chunks(source: Source, stream: Filled, target: int, limit: int = MAX_RECORD) -> Iterator[tuple[int, bytes]]:
    """Chunks of whole lines with the number of their first line; the cut does not depend on who reads them.

    Raises:
        UserError: a line is longer than ``limit`` bytes.
    """
    first = 1
    rest: list[bytes] = []
    held = 0
    while data := stream.read(target):
        cut = data.rfind(b"\n") + 1
        if not cut:
            rest.append(data)
            held += len(data)
            if held > limit:
                raise UserError(f"{source}:{first}: line longer than {limit >> 20} MiB; is this file JSON lines?")
            continue
        chunk = b"".join([*rest, data[:cut]])
        rest, held = [data[cut:]], len(data) - cut
        yield first, chunk
        first += chunk.count(b"\n")
    if held:
        yield first, b"".join(rest)
