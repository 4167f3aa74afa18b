"""Cuts the list of events of a trace into stretches that decode by themselves, block by block."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.account.errors import UserError
from headway.diagnose.decoding import SPACE, Decoder, Stretch, sound_piece
from headway.diagnose.mending import ARRAY_END, Losses, mend, mended_text
from headway.diagnose.piece import Piece, piece_of
from headway.diagnose.records import UNDECODABLE
from headway.diagnose.source import Source, without_bom

_EVENTS_KEY = re.compile(rb"\"traceEvents\"\s*:\s*\[")
_PATIENCE = 8  # unsound stretches after which none is decoded ahead any more
_LOOK_BACK = 64  # bytes before a brace that tell whether an event begins there
_KEEP_AT_MOST = 1 << 24  # bytes of header or footer, and of one event


@dataclass
class _Ahead:
    """A stretch handed to the decoder, and what is needed to go back to behind it: the text that followed it in its
    last block, and the blocks that were read for it."""

    ticket: Any
    stretch: Stretch
    rest: bytes
    blocks: list[bytes]


class Splitter:
    """Reads the list of events of a trace as pieces, one stretch of the file after the other.

    Stretches are cut ahead of their decoding, as if each were sound. One that is not is mended here; what was cut
    behind it is then cut again, so that the pieces, and the account of what is lost, are those of reading one by one.
    Afterwards `metadata` holds the trace's own fields, `losses` and `truncated` what is missing.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.losses = Losses()
        self.truncated = ""
        self.metadata: dict[str, Any] = {}
        self._footer: bytes | None = None  # set once the list of events has ended
        self._bare = False

    def pieces(self, decoder: Decoder) -> Iterator[Piece]:
        source = self.source.blocks()
        text = self._enter_list(source)
        blocks = _Blocks(source)
        ahead: deque[_Ahead] = deque()
        taken: list[bytes] = []
        depth = decoder.depth
        unsound = 0
        while True:
            while len(ahead) < depth and (block := blocks.next()) is not None:
                if self._footer is not None:
                    self._footer = (self._footer + block)[:_KEEP_AT_MOST]
                    continue
                taken.append(block)
                found = _cut(text, block)
                if found is None:
                    text += block
                    continue
                stretch, text = found
                ahead.append(_Ahead(decoder.submit(stretch), stretch, text, taken))
                taken = []
            if not ahead:
                break
            first = ahead.popleft()
            piece = decoder.result(first.ticket)
            if piece is None:
                unsound += 1
                depth = decoder.depth if unsound < _PATIENCE else 1
                for item in ahead:
                    decoder.result(item.ticket)
                blocks.put_back([block for item in ahead for block in item.blocks] + taken)
                ahead.clear()
                taken = []
                piece, carry = self._mend(b"".join(first.stretch), last=False)
                text = carry + first.rest
                if self._footer is not None:
                    self._footer, text = self._footer + text, b""
            yield piece
        if self._footer is None and text.strip(SPACE):
            last = sound_piece((text,))
            yield last if last is not None else self._mend(text, last=True)[0]
        self._finish()

    def _enter_list(self, blocks: Iterator[bytes]) -> bytes:
        """Reads up to the list of events; returns what was read of it."""
        text = b""
        first = True
        for block in blocks:
            text += without_bom(block) if first else block
            first = False
            start = text.lstrip(SPACE)
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
        stripped = text.lstrip(SPACE + b",")
        if stripped[:1] == b"]":
            self._footer = stripped[1:]
            return b""
        return text

    def _mend(self, text: bytes, last: bool) -> tuple[Piece, bytes]:
        """(what can be read of a stretch that does not decode whole, bytes to put before the next stretch)."""
        for match in list(ARRAY_END.finditer(text))[-3:]:
            if (piece := sound_piece((text[: match.start() + 1],))) is not None:
                self._footer = text[match.end() :]
                return piece, b""
        mended = mend(text, self.losses, last)
        self._footer = mended.footer
        return piece_of(mended.events), mended.carry

    def _finish(self) -> None:
        self.truncated = self.source.truncated
        if self._footer is None and not (self._bare or self.truncated):
            self.truncated = "the file ends inside its list of events"
        footer = (self._footer or b"").strip(SPACE)
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


def _cut(text: bytes, block: bytes) -> tuple[Stretch, bytes] | None:
    """(the events complete in `text` and the `block` after it, what follows them); None where more is needed."""
    cut = _last_boundary(block)
    if cut is not None and cut >= _LOOK_BACK:  # what is looked at lies in the block, so that nothing need be copied
        return (text, memoryview(block)[:cut]), block[cut:]
    text += block
    cut = _last_boundary(text)
    if cut is not None:
        return (text[:cut],), text[cut:]
    return ((text,), b"") if len(text) >= _KEEP_AT_MOST else None


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
        before = text[max(0, brace - _LOOK_BACK) : brace].rstrip(SPACE)
        if before[-1:] == b"," and before[:-1].rstrip(SPACE)[-1:] == b"}":
            return brace
    return None


class _Blocks:
    """Blocks of a source, some of which are read again."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._again: deque[bytes] = deque()

    def next(self) -> bytes | None:
        return self._again.popleft() if self._again else next(self._source, None)

    def put_back(self, blocks: list[bytes]) -> None:
        """In the order in which they were read; more than once, in between and at the end of the source too."""
        self._again.extendleft(reversed(blocks))
