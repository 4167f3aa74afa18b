"""Append-only JSON lines with a version in every line. A torn line costs itself, never its neighbours.

`JsonlWriter` raises what the disk says. `PatientWriter` never does: what a full disk does not take is kept in memory,
tried again with the next line, and said once with its file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from headway.account.errors import UserError
from headway.record.files import DISK_FULL

VERSION = 1
T = TypeVar("T")


class NewerVersion(UserError):
    """A file was written by a newer Headway than this one."""


class JsonlWriter:
    """Appends one Struct a line, each with one write call, so that a kill tears at most the last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._encoder = msgspec.json.Encoder()
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            # A killed session tore its last line. Without this newline the next good line would be lost with it.
            try:
                os.write(self._fd, b"\n")
            except OSError:
                self.close()
                raise

    def append(self, line: msgspec.Struct) -> None:
        left = memoryview(encoded(line, self._encoder))
        while left:
            # A nearly full disk takes a part; half a line must not join the next one.
            left = left[self.write(left) :]

    def write(self, content: bytes | memoryview) -> int:
        """One write call; returns how many bytes were taken."""
        return os.write(self._fd, content)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


KEPT_BYTES = 64 << 20


class PatientWriter:
    """Appends like `JsonlWriter`, and outlives a full disk: lines wait in memory, in order, and none is written twice.

    Beyond `keeps` bytes the oldest waiting lines are given up. Who cannot make the file for another reason than a full
    disk (no such folder, no permission) hears it at once, as OSError. Not shared between threads.
    """

    def __init__(self, path: Path, keeps: int = KEPT_BYTES) -> None:
        self.path, self._keeps = path, keeps
        self.lost = 0
        """Lines given up, from the first on."""
        self._writer: JsonlWriter | None = None
        self._waiting: deque[bytes | memoryview] = deque()
        self._bytes = 0
        self._late = self._given_up = 0  # since the disk last took all: lines that wait, or came late; lines given up
        self._said = self._said_unsure = False
        self._begun = False
        self._encode = msgspec.json.Encoder()
        try:
            self._writer = JsonlWriter(path)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self._complain(error)

    @property
    def waiting(self) -> int:
        """Lines that are not on the disk."""
        return len(self._waiting)

    def append(self, line: msgspec.Struct) -> None:
        self._waiting.append(encoded(line, self._encode))
        self._bytes += len(self._waiting[-1])
        if self.flush():
            return
        self._late += 1
        while self._bytes > self._keeps and len(self._waiting) > 1 + self._begun:
            # The first may be half on the disk: its rest must follow it, or the next line would be lost with it.
            self._bytes -= len(self._waiting[self._begun])
            del self._waiting[self._begun]
            self.lost += 1
            self._given_up += 1
            self._late -= 1

    def flush(self) -> bool:
        """Writes what waits; False where the disk does not take it all."""
        try:
            if self._writer is None and self._waiting:
                self._writer = JsonlWriter(self.path)
            while self._waiting:
                assert self._writer is not None
                taken = self._writer.write(self._waiting[0])
                self._bytes -= taken
                self._begun = taken < len(self._waiting[0])
                if self._begun:
                    self._waiting[0] = self._waiting[0][taken:]
                else:
                    self._waiting.popleft()
        except OSError as error:
            self._complain(error)
            return False
        if self._late:
            given_up = f", {self._given_up} had to be given up" if self._given_up else ""
            complain(f"{self.path}: written again; {self._late} lines came late{given_up}")
            self._late = self._given_up = 0
        if self._writer is not None:
            self._said = False
        return True

    def sync(self) -> None:
        """Makes what was written durable, as far as the disk lets it. What a write has taken is not kept here, so that
        a disk that then refuses it (a quota on NFS, an I/O error) may have lost it: said once."""
        try:
            if self._writer is not None:
                self._writer.sync()
            self._said_unsure = False
        except OSError as error:
            if not self._said_unsure:
                self._said_unsure = True
                complain(
                    f"{self.path}: written, but the disk does not confirm it ({error.strerror or error}): its newest "
                    "lines may be lost if this machine stops"
                )

    def close(self) -> None:
        """Tries once more, and says what is lost."""
        if not self.flush():
            self.lost += len(self._waiting)
            complain(f"{self.path}: {self.lost} lines are lost in all: there was no room for them")
        self._waiting.clear()
        if self._writer is not None:
            self._writer.close()

    def _complain(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            complain(
                f"{self.path}: not written ({error.strerror or error}); lines are kept in memory, up to "
                f"{self._keeps >> 20} MiB, and tried again at every step: free room there"
            )


def encoded(line: msgspec.Struct, encoder: msgspec.json.Encoder) -> bytes:
    """A line as it lies in the file, with its version and its end."""
    return b'{"v":%d,' % VERSION + encoder.encode(line)[1:] + b"\n"


def complain(text: str) -> None:
    """Says it on stderr, whose own disk may be full, too."""
    with contextlib.suppress(OSError, ValueError):
        print(f"headway: {text}", file=sys.stderr, flush=True)


@dataclass
class Lines(Generic[T]):
    """Decoded lines, and what could not be read: (line number, reason)."""

    items: list[T] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)


def read_jsonl(path: Path, kind: Any) -> Lines[Any]:
    """Reads every good line of `path` as `kind` (a Struct or a union of tagged ones); a missing file is empty.

    Raises:
        NewerVersion: a line carries a version this Headway does not know.
    """
    lines: Lines[Any] = Lines()
    if not path.is_file():
        return lines
    decoder = msgspec.json.Decoder(kind)
    for number, raw in _raw_lines(path):
        try:
            version = _version(raw)
            if version > VERSION:
                raise NewerVersion(
                    f"{path}:{number}: written by a newer Headway (version {version}); upgrade to read it"
                )
            lines.items.append(decoder.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            lines.bad.append((number, str(error)))
    return lines


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


class _Envelope(msgspec.Struct):
    v: int


_ENVELOPE = msgspec.json.Decoder(_Envelope)


def _version(raw: bytes) -> int:
    return _ENVELOPE.decode(raw).v
