"""Parquet and Arrow files as Arrow IPC streams of rows, read with pyarrow alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headway.account.errors import UserError
from headway.data.sources import Source

#: The columns that any format reads; others (embeddings, images) can be much larger and are left on disk.
COLUMNS = (
    "messages", "conversations", "conversation", "tools", "functions", "system", "instruction", "input", "output",
    "history", "prompt", "completion", "response", "text",
)  # fmt: skip

_MOST_ROWS = 4096


def parquet_chunks(source: Source, target: int) -> Iterator[tuple[int, bytes]]:
    """Rows, about ``target`` bytes at a time, with the number of the first.

    Raises:
        UserError: not a Parquet file, or damaged.
    """
    _refuse_compressed(source)
    try:
        with pq.ParquetFile(source.path) as file:
            metadata = file.metadata
            size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            rows = max(1, min(_MOST_ROWS, target * max(1, metadata.num_rows) // max(1, 4 * size)))
            columns = _columns(file.schema_arrow)
            yield from _grouped(file.iter_batches(batch_size=rows, columns=columns), target)
    except (pa.ArrowInvalid, pa.ArrowException) as error:
        raise _damaged(source, error) from None


def arrow_chunks(source: Source, target: int) -> Iterator[tuple[int, bytes]]:
    """The same for an Arrow file, in the stream form (as `datasets` writes) or the file form.

    Raises:
        UserError: not an Arrow file, or damaged.
    """
    _refuse_compressed(source)
    try:
        with pa.memory_map(str(source.path)) as mapped:
            yield from _grouped(_arrow_batches(mapped), target)
    except (pa.ArrowInvalid, pa.ArrowException) as error:
        raise _damaged(source, error) from None


def _arrow_batches(mapped: Any) -> Iterator[pa.RecordBatch]:
    if mapped.size() == 0:
        return
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    if is_file:
        file = pa.ipc.open_file(mapped)
        columns = _columns(file.schema)
        for index in range(file.num_record_batches):
            yield file.get_batch(index).select(columns)
    else:
        stream = pa.ipc.open_stream(mapped)
        columns = _columns(stream.schema)
        for batch in stream:
            yield batch.select(columns)


def _grouped(batches: Iterator[pa.RecordBatch], target: int) -> Iterator[tuple[int, bytes]]:
    first, held, size, rows = 1, [], 0, 0
    for whole in batches:
        for batch in _cut(whole, target):
            held.append(batch)
            size += batch.nbytes
            rows += batch.num_rows
            if size >= target:
                yield first, _serialised(held)
                first, held, size, rows = first + rows, [], 0, 0
    if rows:
        yield first, _serialised(held)


def _cut(batch: pa.RecordBatch, target: int) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of about ``target`` bytes: a writer may have put a whole data set into one batch."""
    rows = max(1, batch.num_rows * target // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _serialised(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _columns(schema: pa.Schema) -> list[str]:
    known = [name for name in schema.names if name in COLUMNS]
    return known or list(schema.names)  # with none of them, the error about the format names what is there


def _refuse_compressed(source: Source) -> None:
    if source.compression:
        raise UserError(f"{source}: decompress it first; Parquet and Arrow files are read in place")


def _damaged(source: Source, error: Exception) -> UserError:
    return UserError(f"{source}: cannot be read as {source.container} ({str(error).splitlines()[0]})")
