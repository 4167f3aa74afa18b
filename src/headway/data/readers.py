"""Read source files as chunks of whole records, with flat memory, and find out the format of each file."""

from __future__ import annotations

from collections.abc import Iterator

from headway.account.errors import UserError
from headway.data.chunks import Chunk, Kind, records
from headway.data.formats import NO_FORMAT, detect_format
from headway.data.readers_json import json_layout, value_chunks
from headway.data.sources import Source
from headway.data.store import hash_file
from headway.data.streams import Filled, open_stream, reading

#: The longest record read. A file without line ends would otherwise be taken into memory whole.
MAX_RECORD = 256 << 20


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
        """Chunks of about ``target`` bytes; those before the first record that has a format are of `NO_FORMAT`.

        Their records are bad ones like others: whether the data is acceptable with them, `max_bad` decides.

        Raises:
            UserError: the file cannot be read, or is damaged.
        """
        sought, any_record = self.format == "auto", False
        for chunk in self._raw():
            if sought:
                found, holds_records = find_format(chunk)
                self.format = found or NO_FORMAT
                sought, any_record = found is None, any_record or holds_records
            chunk.format = self.format
            yield chunk
        if sought:
            self.format = NO_FORMAT if any_record else "empty"

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


def find_format(chunk: Chunk) -> tuple[str | None, bool]:
    """The format of the first record that has one, None where none has; and whether there is any record."""
    if chunk.kind == "document":
        return "text", True
    any_record = False
    for _, record in records(chunk):
        any_record = True
        fmt = detect_format(record)
        if fmt:
            return fmt, True
    return None, any_record


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
