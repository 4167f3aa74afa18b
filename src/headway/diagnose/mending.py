"""Events of a damaged stretch of JSON, one by one: what can be read is kept, what cannot is counted by reason."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.diagnose.records import NO_ARGS, UNDECODABLE, Complete, decode_args, decode_event

# Between two events. Inside an event it may also occur (a list of objects in `args`, braces of C++ names): then
# neither side decodes and the pieces are joined again.
BETWEEN = re.compile(rb"\}[\s,]*(?=\{\s*\")")
ARRAY_END = re.compile(rb"\}[\s,]*\]\s*(?=[,}]|\Z)")
_EVENT_START = re.compile(rb"\{\s*\"(?:ph|name|cat|ts|dur|pid|tid|s|id)\"\s*:")
_JOIN_AT_MOST = 64

_CONTROL = re.compile(rb"[\x00-\x1f]")
_BAD_ESCAPE = re.compile(rb"\\(?:u(?![0-9a-fA-F]{4})|(?![\"\\/bfnrtu]))")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\)\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_NO_NUMBER = re.compile(rb"(?<=[:\[,])\s*[-+]?(?:nan|inf(?:inity)?)(?:\(.{0,9}?\))?(?=\s*[,}\]])", re.IGNORECASE)
_TRAILING_COMMA = re.compile(rb",\s*(?=[}\]])")
_STRING_VALUE = re.compile(
    rb"(\"[^\"\\\n]{1,80}\"\s*:\s*\")(.*?)(\"\s*(?:,\s*(?=\"[^\"\n]{1,80}\"\s*:)|(?=[}\]])))", re.DOTALL
)
_HUGE_NUMBER = re.compile(rb"(?<=[:\[,])(\s*)-?\d+(?:\.\d+)?[eE]\+?\d{3,}(?=\s*[,}\]])")


@dataclass
class Losses:
    """Counts by reason (see facts.Damage)."""

    lost: Counter[str] = field(default_factory=Counter)
    mended: Counter[str] = field(default_factory=Counter)


@dataclass
class Mended:
    """What a damaged stretch held.

    `carry` are bytes that may belong to an event which goes on behind the stretch; `footer` is what follows the end of
    the list of events, None while that has not come.
    """

    events: list[Any]
    carry: bytes = b""
    footer: bytes | None = None


def mend(text: bytes, losses: Losses, last: bool) -> Mended:
    """Decodes `text` event by event. `last`: nothing follows, so that an open event at the end is cut off."""
    pieces = _pieces(text)
    events: list[Any] = []
    at = 0
    while at < len(pieces):
        piece = pieces[at]
        at += 1
        event = _decode(piece)
        if event is None and (end := _array_end(piece)) is not None:
            event, rest = end
            events.append(event)
            return Mended(events, footer=rest + b"".join(pieces[at:]))
        if event is None and _open(piece):
            joined, used = _joined(piece, pieces[at:])
            if joined is not None:
                event, at = joined, at + used
            elif at >= len(pieces) - _JOIN_AT_MOST and not last and used == len(pieces) - at:
                return Mended(events, carry=piece + b"".join(pieces[at:]))
        if event is None:
            event = _repaired(piece, losses, last and at == len(pieces))
        if event is not None:
            events.append(event)
    return Mended(events)


def _pieces(text: bytes) -> list[bytes]:
    """Cuts behind every `}` of BETWEEN; separators stay with the piece before, so that joining gives `text` again."""
    pieces, start = [], 0
    for match in BETWEEN.finditer(text):
        pieces.append(text[start : match.end()])
        start = match.end()
    if text[start:].strip(b" \t\r\n,"):
        pieces.append(text[start:])
    return pieces


def _decode(piece: bytes) -> Any:
    try:
        return decode_event(piece.rstrip(b" \t\r\n,"))
    except UNDECODABLE:
        return None


def _open(piece: bytes) -> bool:
    return piece.count(b"{") + piece.count(b"[") > piece.count(b"}") + piece.count(b"]")


def _joined(piece: bytes, rest: list[bytes]) -> tuple[Any, int]:
    """The event that `piece` begins, when later pieces close it, and how many it took; (None, all tried) if none do."""
    text = piece
    for used, following in enumerate(rest[:_JOIN_AT_MOST], start=1):
        text += following
        if not _open(text) and (event := _decode(text)) is not None:
            return event, used
    return None, min(len(rest), _JOIN_AT_MOST)


def _array_end(piece: bytes) -> tuple[Any, bytes] | None:
    for match in ARRAY_END.finditer(piece):
        if (event := _decode(piece[: match.start() + 1])) is not None:
            return event, piece[match.end() :]
    return None


def _repaired(piece: bytes, losses: Losses, at_end: bool) -> Any:
    """The event of a piece that does not decode, after the repairs it needs; None (and a count) where nothing helps."""
    text = piece.rstrip(b" \t\r\n,")
    reasons: list[str] = []
    for reason, fix in _FIXES:
        fixed = fix(text)
        if fixed != text:
            text = fixed
            reasons.append(reason)
            if (event := _decode(text)) is not None:
                losses.mended.update(reasons[-1:])
                return event
    if (value := _object(text)) is not None:
        return _coerced(value, losses, reasons)
    for start in [match.start() for match in _EVENT_START.finditer(text)][-8:]:
        if start and (event := _decode(text[start:])) is not None:
            losses.lost["undecodable"] += 1
            return event
    losses.lost["cut off" if at_end else "undecodable"] += 1
    return None


def _utf8(text: bytes) -> bytes:
    return text.decode("utf-8", "replace").encode()


def _escape_inner_quotes(text: bytes) -> bytes:
    def value(match: re.Match[bytes]) -> bytes:
        inner = re.sub(rb"(?<!\\)((?:\\\\)*)\"", rb'\1\\"', match[2])
        if (len(inner) - len(inner.rstrip(b"\\"))) % 2:  # a path that ends in a backslash swallows its closing quote
            inner += b"\\"
        return match[1] + inner + match[3]

    return _STRING_VALUE.sub(value, text)


_FIXES = (
    ("bad encoding", _utf8),
    ("control character", lambda text: _CONTROL.sub(b" ", text)),
    ("backslash", lambda text: _LONE_SURROGATE.sub(rb"?", _BAD_ESCAPE.sub(rb"\\\g<0>", text))),
    ("not a number", lambda text: _NO_NUMBER.sub(b"null", text)),
    ("number out of range", lambda text: _HUGE_NUMBER.sub(rb"\1null", text)),
    ("trailing comma", lambda text: _TRAILING_COMMA.sub(b"", text)),
    ("unescaped quote", _escape_inner_quotes),
)


def mended_text(text: bytes) -> bytes:
    """All repairs at once, for the header and the footer of a trace."""
    for _, fix in _FIXES:
        text = fix(text)
    return text


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except UNDECODABLE:
        return None
    return value if isinstance(value, dict) else None


def _coerced(value: dict[str, Any], losses: Losses, reasons: list[str]) -> Any:
    """An event whose fields have other types than usual, e.g. times as text."""
    if value.get("ph") != "X":
        if "ph" not in value:
            losses.lost["no phase"] += 1
        return None
    start, duration = _number(value.get("ts")), _number(value.get("dur"))
    if start is None or duration is None:
        losses.lost["no timestamp" if start is None else "no duration"] += 1
        return None
    args = value.get("args")
    pid, tid = (value.get(key, "") for key in ("pid", "tid"))
    losses.mended.update(reasons[-1:] or ["unusual type"])
    return Complete(
        name=str(value.get("name", "")),
        ts=start,
        dur=duration,
        pid=pid if isinstance(pid, int) else str(pid),
        tid=tid if isinstance(tid, int) else str(tid),
        cat=str(value.get("cat", "")),
        args=decode_args(msgspec.json.encode(args)) if isinstance(args, dict) else NO_ARGS,
    )


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, float):
        return value if abs(value) < 1e300 else None
    return value if isinstance(value, int) else None
