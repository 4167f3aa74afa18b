"""Records become numpy columns, stretch by stretch, so that a trace costs about fifty bytes an event."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.diagnose.facts import NONE, HostKind, Int64
from headway.diagnose.records import ABSENT, Args, Begin, Complete, Meta, decode_exact_times

KERNEL, MEMCPY, MEMSET = 0, 1, 2
_GPU = {"kernel": KERNEL, "concurrent_kernel": KERNEL, "gpu_memcpy": MEMCPY, "memcpy": MEMCPY}
_GPU |= {"gpu_memset": MEMSET, "memset": MEMSET}
_HOST = {
    "cpu_op": HostKind.OP,
    "operator": HostKind.OP,
    "user_annotation": HostKind.ANNOTATION,
    "python_function": HostKind.PYTHON,
    "overhead": HostKind.OVERHEAD,
} | {f"{api}_{level}": HostKind.RUNTIME for api in ("cuda", "hip", "xpu", "mtia") for level in ("runtime", "driver")}
_HOST["runtime"] = HostKind.RUNTIME
_SKIP, _FIRST_HOST, _SPAN = -1, 16, 99
_EXACT_BELOW = 2.0**53 / 1000  # microseconds that a float64 still tells apart to the nanosecond
_LATEST = 2**62 // 1000  # microseconds: anything later is no time
_WORD = (1 << 63) - 1


@dataclass
class _Table:
    """Columns in pieces, one array per stretch; joined once at the end, each column's pieces freed as it is."""

    pieces: dict[str, list[NDArray[Any]]] = field(default_factory=dict)

    def add(self, **columns: NDArray[Any]) -> None:
        for name, column in columns.items():
            self.pieces.setdefault(name, []).append(column)

    def joined(self, name: str, dtype: type) -> NDArray[Any]:
        pieces = self.pieces.pop(name, [])
        return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)


class Index(dict[Any, int]):
    """Numbers keys in the order of their first appearance: looking one up gives its number."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number

    def column(self, keys: Iterable[Any], count: int = -1) -> NDArray[Any]:
        return np.fromiter(map(self.__getitem__, keys), np.int32, count)


class _Codes(dict[str, int]):
    """What an event is, by its category as the file writes it."""

    def __missing__(self, cat: str) -> int:
        code = self[cat] = _code(cat)
        return code


@dataclass(frozen=True)
class CommArgs:
    """What a communication kernel or `record_param_comms` says about itself."""

    name: str
    elements: int
    group: str
    group_size: int
    dtype: str
    sequence: int


_NAME, _CAT, _ARGS, _TS, _DUR = (attrgetter(field) for field in ("name", "cat", "args", "ts", "dur"))
_THREAD = attrgetter("pid", "tid")
_CORRELATION, _STREAM, _DEVICE, _SIZE = (attrgetter(key) for key in ("correlation", "stream", "device", "size"))
_COLLECTIVE, _DIMS, _TYPES = attrgetter("collective"), attrgetter("dims"), attrgetter("types")


class Columns:
    """Fills the tables of one trace. `gpu` and `host` hold the columns named in `add`; times in ns."""

    def __init__(self) -> None:
        self.names, self.threads, self.shapes = Index(), Index(), Index()
        self.comm: dict[str, dict[int, CommArgs]] = {"gpu": {}, "host": {}}  # row as read → metadata
        self.thread_names: dict[tuple[str, str], str] = {}
        self.spans: list[tuple[int, int]] = []  # the profiler's own recording spans, ns
        self.other_phases = 0  # begin events of begin/end pairs, which are not read
        self.gpu, self.host = _Table(), _Table()
        self._rows = {"gpu": 0, "host": 0}
        self._codes = _Codes()

    def add(self, records: list[Any], text: bytes = b"") -> None:
        """One stretch. `text` is the JSON list that gave the records, for times that a float cannot hold."""
        if not {Meta, Begin}.isdisjoint(map(type, records)):
            self._note_others(records)
        events = [record for record in records if type(record) is Complete]
        if not events:
            return
        codes = np.fromiter(map(self._codes.__getitem__, map(_CAT, events)), np.int64, len(events))
        if not events[0].cat and "" in self._codes:
            codes = np.array(
                [_legacy(event) if not event.cat else code for event, code in zip(events, codes.tolist(), strict=True)]
            )
        for place in np.flatnonzero(codes == _SPAN).tolist():
            self._span(events[place])
        exact = _Exact(records, text)
        in_gpu, in_host = (codes >= 0) & (codes < _FIRST_HOST), (codes >= _FIRST_HOST) & (codes < _SPAN)
        if in_gpu.any():
            self._add_gpu(list(compress(events, in_gpu.tolist())), codes[in_gpu], exact)
        if in_host.any():
            self._add_host(list(compress(events, in_host.tolist())), codes[in_host] - _FIRST_HOST, exact)

    def _note_others(self, records: list[Any]) -> None:
        for record in records:
            if type(record) is Meta and record.name == "thread_name" and record.args is not None:
                self.thread_names.setdefault((str(record.pid), str(record.tid)), str(record.args.name))
            elif type(record) is Begin:
                self.other_phases += 1

    def _add_gpu(self, events: list[Complete], codes: NDArray[Any], exact: _Exact) -> None:
        args = list(map(_ARGS, events))
        start, duration = exact.times(events)
        device, stream = _integers(_DEVICE, args, np.int32), _integers(_STREAM, args, np.int32)
        self.gpu.add(
            start=start,
            duration=duration,
            name=self.names.column(map(_NAME, events), len(events)),
            code=codes.astype(np.int8),
            device=_filled(device, events, "pid"),
            stream=_filled(stream, events, "tid"),
            correlation=_integers(_CORRELATION, args),
            size=_integers(_SIZE, args),
        )
        self._note_comm("gpu", args)

    def _add_host(self, events: list[Complete], codes: NDArray[Any], exact: _Exact) -> None:
        args = list(map(_ARGS, events))
        start, duration = exact.times(events)
        self.host.add(
            start=start,
            duration=duration,
            name=self.names.column(map(_NAME, events), len(events)),
            kind=codes.astype(np.int8),
            thread=self.threads.column(map(_THREAD, events), len(events)),
            correlation=_integers(_CORRELATION, args),
            shapes=self._texts(list(map(_DIMS, args))),
            types=self._texts(list(map(_TYPES, args))),
        )
        self._note_comm("host", args)

    def _texts(self, raws: list[Any]) -> NDArray[Any]:
        if raws.count(ABSENT) == len(raws):
            return np.full(len(raws), NONE, np.int32)
        return np.array([NONE if raw is ABSENT else self.shapes[bytes(raw)] for raw in raws], np.int32)

    def _note_comm(self, table: str, args: list[Args]) -> None:
        first = self._rows[table]
        self._rows[table] = first + len(args)
        names = list(map(_COLLECTIVE, args))
        if names.count(None) == len(names):
            return
        for row, found in enumerate(args, start=first):
            if found.collective is not None:
                self.comm[table][row] = _comm_args(found)

    def _span(self, record: Complete) -> None:
        if isinstance(record.ts, int | float) and 0 <= record.ts < _LATEST and 0 <= record.dur < _LATEST:
            start = _one(record.ts)
            self.spans.append((start, start + _one(record.dur)))


def nanoseconds(microseconds: list[int | float]) -> Int64:
    """``round(us * 1000)`` in exact integers; a time that cannot be one becomes the smallest int64, to be dropped."""
    column: NDArray[Any]
    try:
        column = np.array(microseconds)
    except OverflowError:
        column = np.array(microseconds, object)
    if column.dtype.kind == "i" and (not len(column) or max(abs(int(column.min())), int(column.max())) < _LATEST):
        return column.astype(np.int64, copy=False) * 1000
    if column.dtype.kind == "f" and float(np.abs(column).max()) < _EXACT_BELOW:
        return np.rint(column * 1000.0).astype(np.int64)
    return np.array([_one(value) for value in microseconds], np.int64)


IMPOSSIBLE = -(2**63)


def _one(value: int | float) -> int:
    if not -_LATEST < value < _LATEST:
        return IMPOSSIBLE
    if isinstance(value, int):
        return value * 1000
    whole = int(value)
    return whole * 1000 + round((value - whole) * 1000)


class _Exact:
    """Times of a stretch. A float64 rounds microseconds since 1970 to a quarter of one: where such a clock has a
    fraction, times are read from the digits in the text."""

    def __init__(self, records: list[Any], text: bytes) -> None:
        self._records, self._text = records, text
        self._found: dict[int, tuple[int, int]] = {}

    def times(self, events: list[Complete]) -> tuple[Int64, Int64]:
        try:
            start = np.fromiter(map(_TS, events), np.float64, len(events))
            duration = np.fromiter(map(_DUR, events), np.float64, len(events))
        except OverflowError:  # an integer beyond any float
            return self._one_by_one(events)
        if max(np.abs(start).max(), np.abs(duration).max()) < _EXACT_BELOW:
            return np.rint(start * 1000.0).astype(np.int64), np.rint(duration * 1000.0).astype(np.int64)
        return self._one_by_one(events)

    def _one_by_one(self, events: list[Complete]) -> tuple[Int64, Int64]:
        values = list(map(_TS, events))
        if self._text and float in set(map(type, values)) and max(values) >= _EXACT_BELOW:
            if not self._found:
                self._read_digits()
            both = np.array([self._found[id(event)] for event in events], np.int64)
            return both[:, 0], both[:, 1]
        return nanoseconds(values), nanoseconds(list(map(_DUR, events)))

    def _read_digits(self) -> None:
        for record, raw in zip(self._records, decode_exact_times(self._text), strict=True):
            if type(record) is Complete:
                self._found[id(record)] = _digits(bytes(raw.ts), record.ts), _digits(bytes(raw.dur), record.dur)


_DECIMAL = re.compile(rb"(-?)(\d+)(?:\.(\d+))?")


def _digits(text: bytes, value: int | float) -> int:
    match = _DECIMAL.fullmatch(text)
    if match is None or not -_LATEST < value < _LATEST:
        return _one(value)
    fraction = (match[3] or b"") + b"0000"
    nanos = int(match[2]) * 1000 + int(fraction[:3]) + (fraction[3:4] >= b"5")
    return -nanos if match[1] else nanos


def _code(cat: str) -> int:
    low = cat.lower()
    if low in _GPU:
        return _GPU[low]
    if low in _HOST:
        return _FIRST_HOST + _HOST[low]
    return _SPAN if low == "trace" else _SKIP


def _legacy(record: Complete) -> int:
    """Traces of torch's first profiler have no category; the process says what an event is."""
    if record.pid == "CUDA functions":
        return KERNEL
    return _FIRST_HOST + HostKind.OP if record.pid == "CPU functions" else _SKIP


def _filled(column: NDArray[Any], events: list[Complete], field: str) -> NDArray[Any]:
    """Old files name the device by the process and the stream by the thread."""
    missing = np.flatnonzero(column == NONE)
    if len(missing):
        column[missing] = _integers(attrgetter(field), [events[row] for row in missing.tolist()], np.int32)
    return column


def _integers(get: Callable[[Any], Any], items: list[Any], dtype: type = np.int64) -> NDArray[Any]:
    """A column of integers from what writers put there: numbers, digits in text, `stream 7`, nothing."""
    try:
        return np.fromiter(map(get, items), dtype, len(items))
    except (TypeError, ValueError, OverflowError):
        limit = np.iinfo(dtype).max
        return np.array([_integer(get(item), limit) for item in items], dtype)


def _integer(value: Any, limit: int) -> int:
    if value is None or isinstance(value, bool | list | dict):
        return NONE
    if isinstance(value, str):
        match = re.search(r"-?\d+", value)
        value = int(match[0]) if match else NONE
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return NONE
    return number if -limit <= number <= limit else number & limit


def _comm_args(args: Args) -> CommArgs:
    elements = max(_integer(args.elements, _WORD), _integer(args.out_elements, _WORD))
    group = args.group if args.group_ranks is None else args.group_ranks
    return CommArgs(
        name=str(args.collective),
        elements=elements,
        group="" if group is None else str(group),
        group_size=_integer(args.group_size, _WORD),
        dtype="" if args.dtype is None else str(args.dtype),
        sequence=_integer(args.sequence, _WORD),
    )
