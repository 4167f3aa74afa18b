"""Bytes of a trace file, decompressed on the way, in blocks: no file is ever whole in memory."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from headway.account.errors import UserError

BLOCK = 1 << 20  # bytes of JSON a time: larger costs memory, smaller costs time
_GZIP = b"\x1f\x8b"
_BOMS = (b"\xef\xbb\xbf",)
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_QUEUED = 4
_FEED = 1 << 17
_BITE = 64


class Source:
    """A trace file as blocks of JSON text, plain or gzip by its first bytes, whatever its name says.

    After the blocks are used up, `truncated` says why the end is missing (a cut or damaged gzip stream), if it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truncated = ""

    def blocks(self) -> Iterator[bytes]:
        """Raises UserError where the file cannot be opened, is empty, or is no text of a known encoding."""
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or error}") from None
        with file:
            head = file.read(4)
            if not head:
                raise UserError(f"{self.path}: the file is empty (0 bytes); the export may have failed or still run")
            file.seek(0)
            if self.path.suffix == ".nsys-rep":
                raise UserError(
                    f"{self.path}: a Nsight Systems report; export it first: nsys export --type sqlite {self.path.name}"
                )
            if head[:2] in _WIDE_BOMS:
                raise UserError(f"{self.path}: the text is UTF-16; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)")
            blocks = self._threaded(file) if head[:2] == _GZIP else self._plain(file)
            yield from blocks

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        while block := file.read(BLOCK):
            yield block

    def _threaded(self, file: BinaryIO) -> Iterator[bytes]:
        """Decompresses in a thread of its own: zlib leaves the interpreter free to decode meanwhile."""
        ready: queue.Queue[bytes | BaseException | None] = queue.Queue(_QUEUED)
        stop = threading.Event()

        def work() -> None:
            end: BaseException | None = None
            try:
                for block in self._gunzip(file):
                    if stop.is_set():
                        return
                    ready.put(block)
            except BaseException as error:
                end = error
            ready.put(end)

        thread = threading.Thread(target=work, daemon=True, name="gunzip")
        thread.start()
        try:
            while (block := ready.get()) is not None:
                if isinstance(block, BaseException):
                    raise block
                yield block
        finally:
            stop.set()
            while thread.is_alive():
                while not ready.empty():
                    ready.get_nowait()
                thread.join(0.01)

    def _gunzip(self, file: BinaryIO) -> Iterator[bytes]:
        """All members of a gzip file. What decompresses before a fault is kept, the fault goes to `truncated`."""
        inflate = zlib.decompressobj(31)
        feed = b""
        while True:
            feed = feed or file.read(_FEED)
            if not feed:
                self.truncated = "the gzip stream is cut off"
                return
            before = inflate.copy()
            try:
                block = inflate.decompress(feed, BLOCK)
            except zlib.error as error:
                yield from _bites(before, feed)
                self.truncated = f"the gzip stream is damaged ({error})"
                return
            feed = inflate.unconsumed_tail
            if block:
                yield block
            if inflate.eof:
                rest = inflate.unused_data or file.read(_FEED)
                if not rest.strip(b"\0"):
                    return
                if rest[:2] != _GZIP:
                    self.truncated = "bytes that are no gzip follow the gzip stream"
                    return
                inflate, feed = zlib.decompressobj(31), rest


def _bites(inflate: zlib._Decompress, feed: bytes) -> Iterator[bytes]:
    """What of `feed` decompresses before its fault: zlib hands out nothing of a call that fails, so calls are small."""
    try:
        for start in range(0, len(feed), _BITE):
            if block := inflate.decompress(feed[start : start + _BITE]):
                yield block
    except zlib.error:
        return


def is_gzip(path: Path) -> bool:
    """By the first bytes. Raises OSError."""
    with path.open("rb") as file:
        return file.read(2) == _GZIP


def without_bom(text: bytes) -> bytes:
    for bom in _BOMS:
        text = text.removeprefix(bom)
    return text
