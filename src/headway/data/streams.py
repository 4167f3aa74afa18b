"""A source file as a stream of bytes: hashed as it is read, decompressed, never wholly in memory."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import zstandard

from headway.account.errors import UserError
from headway.data.sources import Source

_BLOCK = 1 << 20

UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


class Readable(Protocol):
    """What decompressors read from and chunkers read."""

    def read(self, size: int = -1, /) -> bytes: ...


class HashedFile:
    """A file that counts and hashes the bytes read through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        self.size += len(data)
        return data

    def finish(self) -> str:
        """Read what is left and return the SHA-256 of the whole file."""
        while self.read(_BLOCK):
            pass
        return self._digest.hexdigest()


class _Zstd:
    """Decompress zstandard frames one after another; a frame that is cut short is an error, not an early end."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        while True:
            data = self._left or self._file.read(_BLOCK)
            self._left = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame is cut short")
                return b""
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            out = self._frame.decompress(data)
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
            if out:
                return out


class Filled:
    """A stream whose ``read(n)`` gives exactly n bytes until the end.

    Chunk boundaries, and so shards, must not depend on how much a decompressor happens to hand out at once.
    """

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._head = b""

    def read(self, size: int = -1) -> bytes:
        parts, missing = [self._head[:size]], size - len(self._head[:size])
        self._head = self._head[size:]
        while missing > 0:
            data = self._stream.read(missing)
            if not data:
                break
            parts.append(data[:missing])
            self._head = data[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)

    def unread(self, data: bytes) -> None:
        """Put bytes back in front."""
        self._head = data + self._head


@contextmanager
def open_stream(source: Source) -> Iterator[tuple[Filled, HashedFile]]:
    """The decompressed content of a file, without a UTF-8 byte order mark, and the file underneath.

    Raises:
        UserError: the file cannot be read, is damaged, or is UTF-16.
    """
    with reading(source.path), source.path.open("rb") as raw:
        hashed = HashedFile(raw)
        stream: Readable = hashed
        if source.compression == "gzip":
            stream = gzip.GzipFile(fileobj=hashed)  # type: ignore[call-overload]
        elif source.compression == "zstd":
            stream = _Zstd(hashed)
        filled = Filled(stream)
        head = filled.read(len(UTF8_BOM))
        if head[:2] in _UTF16_BOMS:
            raise UserError(f"{source}: is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
        if head != UTF8_BOM:
            filled.unread(head)
        yield filled, hashed


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while reading a file into one line that names it."""
    try:
        yield
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: its compression is damaged ({error}); restore the file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
