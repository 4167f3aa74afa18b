"""Cuts the list of events of a trace into stretches that decode by themselves, block by block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from headway.account.errors import UserError
from headway.diagnose.mending import ARRAY_END, Losses, mend, mended_text
from headway.diagnose.records import UNDECODABLE, decode_list
from headway.diagnose.source import Source, without_bom

_EVENTS_KEY = re.compile(rb"\"traceEvents\"\s*:\s*\[")
_KEEP_AT_MOST = 1 << 24  # bytes of header or footer, and of one event
_SPACE = b" \t\r\n"


class Splitter:
    """Iterates over (text, records): one stretch of events after the other, decoded.

    `text` is the JSON list the records came from, empty where they were mended one by one. Afterwards `metadata`
    holds the trace's own fields, `losses` and `truncated` what is missing.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.losses = Losses()
        self.truncated = ""
        self.metadata: dict[str, Any] = {}
        self._footer: bytes | None = None  # set once the list of events has ended
        self._bare = False

    def __iter__(self) -> Iterator[tuple[bytes, list[Any]]]:
        blocks = self.source.blocks()
        text = self._enter_list(blocks)
        for block in blocks:
            if self._footer is not None:
                self._footer = (self._footer + block)[:_KEEP_AT_MOST]
                continue
            text += block
            cut = _last_boundary(text)
            if cut is None and len(text) < _KEEP_AT_MOST:
                continue
            stretch, rest = (text, b"") if cut is None else (text[:cut], text[cut:])
            decoded, records, carry = self._decode(stretch, last=False)
            text = carry + rest
            yield decoded, records
        if self._footer is None and text.strip(_SPACE):
            decoded, records, _ = self._decode(text, last=True)
            yield decoded, records
        self._finish()

    def _enter_list(self, blocks: Iterator[bytes]) -> bytes:
        """Reads up to the list of events; returns what was read of it."""
        text = b""
        first = True
        for block in blocks:
            text += without_bom(block) if first else block
            first = False
            start = text.lstrip(_SPACE)
            if start[:1] == b"[":
                self._bare = True
                return self._begin(start[1:])
            if start[:1] not in (b"{", b""):
                raise UserError(
                    f"{self.source.path}: not JSON: a trace begins with {{ or [, this file with {start[:12]!r}"
                )
            if match := _EVENTS_KEY.search(text):
                self._read_metadata(text[: match.start()] + b'"_":0}')
                return self._begin(text[match.end() :])
            if len(text) > _KEEP_AT_MOST:
                text = text[:64] + text[-(1 << 20) :]
        cut = f" ({self.source.truncated})" if self.source.truncated else ""
        raise UserError(
            f'{self.source.path}: no "traceEvents" in this file{cut}: it is not a profiler trace; '
            "write one with prof.export_chrome_trace(path)"
        )

    def _begin(self, text: bytes) -> bytes:
        stripped = text.lstrip(_SPACE + b",")
        if stripped[:1] == b"]":
            self._footer = stripped[1:]
            return b""
        return text

    def _decode(self, text: bytes, last: bool) -> tuple[bytes, list[Any], bytes]:
        """(JSON list or nothing, records, bytes to put before the next stretch)."""
        stretch = b"[" + text.strip(_SPACE + b",") + b"]"
        try:
            return stretch, decode_list(stretch), b""
        except UNDECODABLE:
            pass
        for match in list(ARRAY_END.finditer(text))[-3:]:
            stretch = b"[" + text[: match.start() + 1] + b"]"
            try:
                records = decode_list(stretch)
            except UNDECODABLE:
                continue
            self._footer = text[match.end() :]
            return stretch, records, b""
        mended = mend(text, self.losses, last)
        self._footer = mended.footer
        return b"", mended.events, mended.carry

    def _finish(self) -> None:
        self.truncated = self.source.truncated
        if self._footer is None and not (self._bare or self.truncated):
            self.truncated = "the file ends inside its list of events"
        footer = (self._footer or b"").strip(_SPACE)
        if footer[:1] == b",":
            self._read_metadata(b'{"_":0' + footer)

    def _read_metadata(self, text: bytes) -> None:
        for candidate in (text, mended_text(text)):
            try:
                found = msgspec.json.decode(candidate)
            except UNDECODABLE:
                continue
            if isinstance(found, dict):
                found.pop("_", None)
                self.metadata.update(found)
                return
        # A damaged header still gives up the two numbers that times and ranks depend on.
        if match := re.search(rb"\"baseTimeNanoseconds\"\s*:\s*(\d{1,19})", text):
            self.metadata["baseTimeNanoseconds"] = int(match[1])
        if match := re.search(rb"\"rank\"\s*:\s*(\d{1,7})", text):
            self.metadata["distributedInfo"] = {"rank": int(match[1])}
        self.losses.mended["header"] += 1


def _last_boundary(text: bytes) -> int | None:
    """Where the last event that begins in `text` begins, behind a complete one; None where there is no such place.

    A brace in the text of a name can look like one; then the stretch does not decode and mending joins it again.
    """
    end = len(text)
    for _ in range(4096):
        brace = text.rfind(b"{", 0, end)
        if brace < 0:
            return None
        end = brace
        before = text[max(0, brace - 64) : brace].rstrip(_SPACE)
        if before[-1:] == b"," and before[:-1].rstrip(_SPACE)[-1:] == b"}":
            return brace
    return None
