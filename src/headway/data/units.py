"""The unit of work: some chunks of source that become one shard, and the record that it is done."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import orjson

from headway.account.errors import UserError
from headway.data.chunks import Chunk, digest
from headway.data.convert import Converter
from headway.data.encode import Encoded, Encoder
from headway.data.manifest import FileHash, Shard, Totals
from headway.data.readers import FileReader
from headway.data.shards import ShardBuilder, write_bytes
from headway.data.store import hash_file, part_path
from headway.data.templates import ChatTemplate
from headway.data.tokenizer import TokenizerInfo

RECORDS = "units"

_SMALLEST, _LARGEST, _SHARDS = 1 << 20, 32 << 20, 128


class UnitRecord(msgspec.Struct, frozen=True):
    """A finished unit: the hash of what went in, the shard that came out, and its counts per file."""

    index: int
    source: str
    shard: Shard
    files: dict[int, Totals]
    notes: dict[str, int]
    label_source: str
    rejected: FileHash


@dataclass(slots=True)
class Unit:
    """``bytes``: of the source files, read for this unit (compressed bytes where the file is)."""

    index: int
    chunks: list[Chunk]
    bytes: int


@dataclass(frozen=True)
class Recipe:
    """Everything a worker needs to turn units into shards; pickles.

    The encoder is made once, in the parent: forked workers share its tables, in memory and in the processor's caches
    (two copies cost a third more time on two cores that share a cache).
    """

    folder: Path
    info: TokenizerInfo
    encoder: Encoder
    templates: dict[str, ChatTemplate]
    labels: str
    text_eos: bool
    paths: list[str]

    def converter(self) -> Converter:
        return Converter(self.info, self.encoder, self.templates, self.labels, self.text_eos, self.paths)


def unit_bytes(total: int) -> int:
    """Source bytes per shard: a power of two, about 128 shards, between 1 and 32 MiB.

    It depends on the data alone, so that any number of workers gives the same shards.
    """
    return min(_LARGEST, max(_SMALLEST, 1 << max(0, (total // _SHARDS).bit_length())))


def cut_units(readers: list[FileReader], target: int) -> Iterator[Unit]:
    """Read the files in order and group their chunks into units of about ``target`` bytes."""
    index, chunks, held, read_before, read = 0, [], 0, 0, 0
    for reader in readers:
        for chunk in reader.chunks():
            chunks.append(chunk)
            held += len(chunk.data)
            if held >= target:
                yield Unit(index, chunks, read + reader.size - read_before)
                read_before = read + reader.size
                index, chunks, held = index + 1, [], 0
        read += reader.size
    if chunks:
        yield Unit(index, chunks, read - read_before)


def shard_name(index: int) -> str:
    return f"shard-{index:05d}"


def record_path(folder: Path, index: int) -> Path:
    return folder / RECORDS / f"{index:05d}.json"


def rejected_path(folder: Path, index: int) -> Path:
    return folder / RECORDS / f"{index:05d}.rejected.jsonl"


def finished(folder: Path, unit: Unit) -> UnitRecord | None:
    """The record of a unit that was finished before from the very same source, and whose files are whole; else None."""
    try:
        record = msgspec.json.decode(record_path(folder, unit.index).read_bytes(), type=UnitRecord)
        if record.source != digest(unit.chunks):
            return None
        for part, expected in record.shard.parts.items():
            if hash_file(part_path(folder, record.shard.name, part)) != expected.sha256:
                return None
        if hash_file(rejected_path(folder, unit.index)) != record.rejected.sha256:
            return None
    except (OSError, UserError, msgspec.DecodeError):  # missing, torn, or of another version: the work is done again
        return None
    return record


def do_unit(recipe: Recipe, converter: Converter, unit: Unit) -> UnitRecord:
    """Tokenise a unit and write its shard, its rejected records, and last the record that says so."""
    builder = ShardBuilder(shard_name(unit.index), recipe.info.dtype)
    converter.notes.clear()
    rejected: list[bytes] = []
    bad: dict[int, int] = {}
    for item in converter.convert(unit.chunks):
        if isinstance(item.result, Encoded):
            builder.add(item.result, item.file, item.line)
        else:
            bad[item.file] = bad.get(item.file, 0) + 1
            line = {"file": recipe.paths[item.file], "line": item.line, "reason": str(item.result)}
            rejected.append(orjson.dumps(line) + b"\n")
    shard, lengths, trained, files = builder.write(recipe.folder)
    record = UnitRecord(
        index=unit.index,
        source=digest(unit.chunks),
        shard=shard,
        files={i: _totals(files == i, lengths, trained, bad.get(i, 0)) for i in sorted({c.file for c in unit.chunks})},
        notes={name: count for name, count in sorted(converter.notes.items()) if count},
        label_source=converter.label_source,
        rejected=write_bytes(rejected_path(recipe.folder, unit.index), rejected),
    )
    write_bytes(record_path(recipe.folder, unit.index), [msgspec.json.encode(record)])
    return record


def _totals(mine: np.ndarray, lengths: np.ndarray, trained: np.ndarray, rejected: int) -> Totals:
    return Totals(
        documents=int(mine.sum()),
        tokens=int(lengths[mine].sum()),
        trained=int(trained[mine].sum()),
        untrained=int((trained[mine] == 0).sum()),
        rejected=rejected,
    )


# -- in a worker process ---------------------------------------------------------------------------------------------

_here: tuple[Recipe, Converter] | None = None
_thread: ThreadPoolExecutor | None = None


def start_worker(recipe: Recipe, parent: int) -> None:
    """Set a worker process up. It tokenises on one core, and ends at once with Ctrl-C or when its parent is gone.

    At once is safe: what it was writing has no name yet, and the next run does the unit again.
    """
    global _here, _thread
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # else a collection writes to, and so copies, every page inherited from the parent
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _here = recipe, recipe.converter()
    # A thread of its own, because it brings a memory arena of its own: on the main thread's, which the interpreter has
    # left full of holes, the tokenizer's many small allocations took 10 to 25 % longer.
    _thread = ThreadPoolExecutor(1)


def work(unit: Unit) -> UnitRecord:
    """Do one unit in a worker process."""
    assert _here is not None and _thread is not None
    return _thread.submit(do_unit, *_here, unit).result()


def _end_with(parent: int) -> None:
    # A killed parent cannot tell its workers, and they would wait for it for ever, holding its lock.
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)
