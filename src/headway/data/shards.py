"""Write one shard: arrays aside, hashed, synced and renamed, so that a file under its own name is whole."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway.data.encode import Encoded
from headway.data.manifest import FileHash, Shard
from headway.data.store import part_path


@dataclass
class ShardBuilder:
    """Collects documents in order and writes them as one shard. ``dtype``: of the token ids."""

    name: str
    dtype: type[np.unsignedinteger]
    _ids: list[np.ndarray] = field(default_factory=list)
    _masks: list[np.ndarray] = field(default_factory=list)
    _lines: list[int] = field(default_factory=list)
    _files: list[int] = field(default_factory=list)

    def add(self, encoded: Encoded, file: int, line: int) -> None:
        """Add one document that came from a line of a file (index)."""
        self._ids.append(encoded.ids)
        self._masks.append(encoded.mask)
        self._files.append(file)
        self._lines.append(line)

    def write(self, folder: Path) -> tuple[Shard, np.ndarray, np.ndarray, np.ndarray]:
        """Write the shard; returns its record, and per document: length, trained tokens, index of its file [D].

        Raises:
            OSError: the disk is full, among others; what was written under temporary names is removed.
        """
        lengths = np.fromiter(map(len, self._ids), dtype=np.int64, count=len(self._ids))
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        tokens = _joined(self._ids, self.dtype)
        mask = _joined(self._masks, np.uint8)
        trained = np.diff(np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[offsets])
        files = np.array(self._files, dtype=np.int32)
        arrays = {
            "tokens": tokens,
            "mask": mask,
            "offsets": offsets,
            "trained": trained.astype(np.int64),
            "lines": np.array(self._lines, dtype=np.int64),
            "files": files,
        }
        parts = {part: write_array(part_path(folder, self.name, part), array) for part, array in arrays.items()}
        shard = Shard(
            name=self.name,
            documents=len(lengths),
            tokens=len(tokens),
            trained=int(trained.sum()),
            max_token=int(tokens.max()) if len(tokens) else -1,
            parts=parts,
        )
        return shard, lengths, trained, files


def write_array(path: Path, array: np.ndarray) -> FileHash:
    """Write a one-dimensional little-endian .npy file."""
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    return write_bytes(path, [header.getvalue(), array.view(np.uint8).data])


def write_bytes(path: Path, parts: Iterable[bytes | memoryview]) -> FileHash:
    """Write a file aside, sync it, and give it its name; its size and hash.

    The temporary name is this process's own: a worker whose parent was killed may still be writing the same file.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    digest, size = hashlib.sha256(), 0
    try:
        with aside.open("wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
                size += len(part)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return FileHash(size, digest.hexdigest())


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
