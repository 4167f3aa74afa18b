"""Append-only JSON lines with a version in every line. A torn line costs itself, never its neighbours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from headway.account.errors import UserError

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
            os.write(self._fd, b"\n")

    def append(self, line: msgspec.Struct) -> None:
        left = memoryview(b'{"v":%d,' % VERSION + self._encoder.encode(line)[1:] + b"\n")
        while left:
            # A nearly full disk takes a part; half a line must not join the next one.
            left = left[os.write(self._fd, left) :]

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
