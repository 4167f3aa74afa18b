"""JSON files that are not one record a line: arrays, and objects written one after another over many lines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Literal

import orjson

from headway.account.errors import UserError
from headway.data.chunks import RECORD_SEPARATOR
from headway.data.sources import Source
from headway.data.streams import Filled

Layout = Literal["lines", "array", "objects"]

_HEAD = 1 << 16
_LONGEST_HEAD = 16 << 20
_WHITESPACE = " \t\r\n"


def json_layout(source: Source, stream: Filled) -> Layout | None:
    """How a JSON file holds its records, from its beginning (which is put back); None when the file is blank.

    Raises:
        UserError: a .json file that begins with neither ``[`` nor ``{``.
    """
    head = stream.read(_HEAD)
    stream.unread(head)
    first = head.lstrip()[:1]
    if not first:
        return "lines" if head else None
    if source.container == "jsonl":
        # An array saved under the wrong suffix; a first line that is merely broken stays a line, to be named.
        return "array" if first == b"[" and not _one_a_line(stream) else "lines"
    if first == b"[":
        return "array"
    if first == b"{":
        return "lines" if _one_a_line(stream) else "objects"
    raise UserError(f"{source}: begins with {first.decode('latin-1')!r}, not with a JSON array or object")


def value_chunks(
    source: Source, stream: Filled, target: int, *, array: bool, limit: int
) -> Iterator[tuple[int, bytes]]:
    """The elements of an array (or objects in a row), about ``target`` bytes at a time, between record separators.

    Memory holds one chunk and one element, whatever the size of the file. Bytes that are not UTF-8 pass through, so
    that the record that holds them can be named.

    Raises:
        UserError: the JSON itself is broken: behind that point no record can be told from another.
    """
    scanner = _Scanner(source, stream, limit)
    if array:
        scanner.skip("[")
    number, parts, size = 1, [], 0
    while (value := scanner.next_value(array)) is not None:
        parts.append(value)
        size += len(value) + 1
        if size >= target:
            yield number, RECORD_SEPARATOR.join(parts)
            number, parts, size = number + len(parts), [], 0
    if parts:
        yield number, RECORD_SEPARATOR.join(parts)


class _Scanner:
    """Finds where each JSON value ends by parsing it, reading on while it is incomplete."""

    def __init__(self, source: Source, stream: Filled, limit: int) -> None:
        self._source = source
        self._stream = stream
        self._limit = limit
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._line = 1
        self._count = 0
        self._ended = False

    def skip(self, expected: str) -> None:
        """Step over one character that is known to come next."""
        assert self._peek() == expected
        self._at += 1

    def next_value(self, array: bool) -> bytes | None:
        """The next value as it is written, or None at the end."""
        char = self._peek()
        if array:
            if self._count and char == ",":
                self._at += 1
                char = self._peek()
            elif self._count and char != "]":
                raise self._broken(f"expected ',' or ']', found {char!r}" if char else "the array is not closed")
            if char == "]":
                self._at += 1
                if self._peek():
                    raise self._broken("text behind the end of the array")
                return None
        if not char:
            if array:
                raise self._broken("the array is not closed")
            return None
        return self._value()

    def _value(self) -> bytes:
        size = _HEAD
        while True:
            try:
                _, end = self._parse(self._text, self._at)
                if end < len(self._text) or self._ended:
                    break
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > self._limit:
                    raise self._broken(error.msg, error.pos) from None
            self._read(size)
            size *= 2  # an element of n bytes is parsed at most about 2n bytes deep in all
        value = self._text[self._at : end].encode("utf-8", "surrogateescape")
        self._at = end
        self._count += 1
        return value

    def _peek(self) -> str:
        while True:
            while self._at < len(self._text) and self._text[self._at] in _WHITESPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read(_HEAD)

    def _read(self, size: int) -> None:
        data = self._stream.read(size)
        self._ended = not data
        self._line += self._text.count("\n", 0, self._at)
        self._text = self._text[self._at :] + self._decode(data, self._ended)
        self._at = 0

    def _broken(self, why: str, position: int | None = None) -> UserError:
        line = self._line + self._text.count("\n", 0, self._at if position is None else position)
        return UserError(f"{self._source}:{line}: not JSON in record {self._count + 1}: {why}; mend the file there")


def _one_a_line(stream: Filled) -> bool:
    """Whether the first line is a JSON value of its own. An array that is the only line is taken for the whole file."""
    head = stream.read(_HEAD)
    while b"\n" not in head.lstrip() and len(head) < _LONGEST_HEAD:
        more = stream.read(len(head) or _HEAD)
        if not more:
            break
        head += more
    stream.unread(head)
    line, _, after = head.lstrip().partition(b"\n")
    if line[:1] == b"[" and not after.strip():
        return False
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True
