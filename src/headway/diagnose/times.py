"""Times of a trace as integer nanoseconds, exact also for clocks whose microseconds a float64 cannot hold."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.diagnose.facts import Int64
from headway.diagnose.records import Complete, decode_exact_times

IMPOSSIBLE = -(2**63)
LATEST = 2**62 // 1000  # microseconds: anything later is no time
_EXACT_BELOW = 2.0**53 / 1000  # microseconds that a float64 still tells apart to the nanosecond


def times(events: list[Complete], records: list[Any], text: bytes | memoryview) -> tuple[Int64, Int64]:
    """(start, duration) of each event [N] in ns; a time that cannot be one is IMPOSSIBLE.

    A float64 rounds microseconds since 1970 to a quarter of one: where such a clock has a fraction, times are read from
    the digits in `text`, the JSON list that gave `records` (empty where there is none).
    """
    try:
        start = np.fromiter([event.ts for event in events], np.float64, len(events))
        duration = np.fromiter([event.dur for event in events], np.float64, len(events))
    except OverflowError:  # an integer beyond any float
        return _one_by_one(events, records, text)
    if max(np.abs(start).max(), np.abs(duration).max()) < _EXACT_BELOW:
        return np.rint(start * 1000.0).astype(np.int64), np.rint(duration * 1000.0).astype(np.int64)
    return _one_by_one(events, records, text)


def _one_by_one(events: list[Complete], records: list[Any], text: bytes | memoryview) -> tuple[Int64, Int64]:
    values = [event.ts for event in events]
    if text and float in set(map(type, values)) and max(values) >= _EXACT_BELOW:
        found = {
            id(record): (_digits(bytes(raw.ts), record.ts), _digits(bytes(raw.dur), record.dur))
            for record, raw in zip(records, decode_exact_times(text), strict=True)
            if type(record) is Complete
        }
        both = np.array([found[id(event)] for event in events], np.int64)
        return both[:, 0], both[:, 1]
    return nanoseconds(values), nanoseconds([event.dur for event in events])


def nanoseconds(microseconds: list[int | float]) -> Int64:
    """``round(us * 1000)`` in exact integers; a time that cannot be one becomes IMPOSSIBLE, to be dropped."""
    column: NDArray[Any]
    try:
        column = np.array(microseconds)
    except OverflowError:
        column = np.array(microseconds, object)
    if column.dtype.kind == "i" and (not len(column) or max(abs(int(column.min())), int(column.max())) < LATEST):
        return column.astype(np.int64, copy=False) * 1000
    if column.dtype.kind == "f" and float(np.abs(column).max()) < _EXACT_BELOW:
        return np.rint(column * 1000.0).astype(np.int64)
    return np.array([one_time(value) for value in microseconds], np.int64)


def one_time(value: int | float) -> int:
    if not -LATEST < value < LATEST:
        return IMPOSSIBLE
    if isinstance(value, int):
        return value * 1000
    whole = int(value)
    return whole * 1000 + round((value - whole) * 1000)


_DECIMAL = re.compile(rb"(-?)(\d+)(?:\.(\d+))?")


def _digits(text: bytes, value: int | float) -> int:
    match = _DECIMAL.fullmatch(text)
    if match is None or not -LATEST < value < LATEST:
        return one_time(value)
    fraction = (match[3] or b"") + b"0000"
    nanos = int(match[2]) * 1000 + int(fraction[:3]) + (fraction[3:4] >= b"5")
    return -nanos if match[1] else nanos
