"""Records become numpy columns, stretch by stretch, so that a trace costs about fifty bytes an event."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
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


class Index:
    """Numbers things in the order of their first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, key: Any) -> int:
        numbers = self.numbers
        return numbers.setdefault(key, len(numbers))

    @property
    def in_order(self) -> tuple[Any, ...]:
        return tuple(self.numbers)


@dataclass(frozen=True)
class CommArgs:
    """What a communication kernel or `record_param_comms` says about itself."""

    name: str
    elements: int
    group: str
    group_size: int
    dtype: str
    sequence: int


class Columns:
    """Fills the tables of one trace. `gpu` and `host` hold the columns named in `add`; times in ns."""

    def __init__(self) -> None:
        self.names, self.threads, self.shapes = Index(), Index(), Index()
        self.comm: dict[str, dict[int, CommArgs]] = {"gpu": {}, "host": {}}  # row as read → metadata
        self.thread_names: dict[tuple[str, str], str] = {}
        self.spans: list[tuple[int, int]] = []  # the profiler's own recording spans, ns
        self.events = 0
        self.other_phases = 0  # begin events of begin/end pairs, which are not read
        self.lost: Counter[str] = Counter()
        self.gpu, self.host = _Table(), _Table()
        self._rows = {"gpu": 0, "host": 0}
        self._codes: dict[str, int] = {}

    def add(self, records: list[Any], text: bytes = b"") -> None:
        """One stretch. `text` is the JSON list that gave the records, for times that a float cannot hold."""
        gpu: list[Complete] = []
        gpu_codes: list[int] = []
        host: list[Complete] = []
        host_codes: list[int] = []
        codes = self._codes
        exact = _exact_times(records, text)
        for record in records:
            if type(record) is Complete:
                code = codes.get(record.cat)
                if code is None:
                    code = codes[record.cat] = _code(record.cat)
                if code >= _FIRST_HOST:
                    if code == _SPAN:
                        self._span(record)
                    else:
                        host.append(record)
                        host_codes.append(code - _FIRST_HOST)
                elif code >= 0:
                    gpu.append(record)
                    gpu_codes.append(code)
                elif not record.cat and (legacy := _legacy(record)) is not None:
                    (gpu if legacy < _FIRST_HOST else host).append(record)
                    (gpu_codes if legacy < _FIRST_HOST else host_codes).append(legacy % _FIRST_HOST)
            elif type(record) is Meta and record.name == "thread_name" and record.args is not None:
                self.thread_names.setdefault((str(record.pid), str(record.tid)), str(record.args.name))
            elif type(record) is Begin:
                self.other_phases += 1
        self.events += len(gpu) + len(host)
        if gpu:
            self._add_gpu(gpu, gpu_codes, exact)
        if host:
            self._add_host(host, host_codes, exact)

    def _add_gpu(self, events: list[Complete], codes: list[int], exact: dict[int, tuple[int, int]]) -> None:
        args = [event.args or _NO_ARGS for event in events]
        name = self.names.of
        start, duration = self._times(events, exact)
        self.gpu.add(
            start=start,
            duration=duration,
            name=np.array([name(event.name) for event in events], np.int32),
            code=np.array(codes, np.int8),
            device=_integers([_either(a.device, event.pid) for a, event in zip(args, events, strict=True)], np.int32),
            stream=_integers([_either(a.stream, event.tid) for a, event in zip(args, events, strict=True)], np.int32),
            correlation=_integers([a.correlation for a in args]),
            external=_integers([_either(a.external, a.external_old) for a in args]),
            size=_integers([a.size for a in args]),
        )
        self._note_comm("gpu", args)

    def _add_host(self, events: list[Complete], codes: list[int], exact: dict[int, tuple[int, int]]) -> None:
        args = [event.args or _NO_ARGS for event in events]
        name, thread = self.names.of, self.threads.of
        start, duration = self._times(events, exact)
        self.host.add(
            start=start,
            duration=duration,
            name=np.array([name(event.name) for event in events], np.int32),
            kind=np.array(codes, np.int8),
            thread=np.array([thread((event.pid, event.tid)) for event in events], np.int32),
            correlation=_integers([a.correlation for a in args]),
            external=_integers([_either(a.external, a.external_old) for a in args]),
            shapes=np.array([self._shape(a.dims) for a in args], np.int32),
            types=np.array([self._shape(a.types) for a in args], np.int32),
        )
        self._note_comm("host", args)

    def _shape(self, raw: Any) -> int:
        return NONE if raw is ABSENT else self.shapes.of(bytes(raw))

    def _note_comm(self, table: str, args: list[Args]) -> None:
        first = self._rows[table]
        self._rows[table] = first + len(args)
        for row, found in enumerate(args, start=first):
            if found.collective is not None:
                self.comm[table][row] = _comm_args(found)

    def _span(self, record: Complete) -> None:
        if isinstance(record.ts, int | float) and 0 <= record.ts < _LATEST and 0 <= record.dur < _LATEST:
            start = _one(record.ts)
            self.spans.append((start, start + _one(record.dur)))

    def _times(self, events: list[Complete], exact: dict[int, tuple[int, int]]) -> tuple[Int64, Int64]:
        if exact:
            both = np.array([exact[id(event)] for event in events], np.int64)
            return both[:, 0], both[:, 1]
        return nanoseconds([event.ts for event in events]), nanoseconds([event.dur for event in events])


_NO_ARGS = Args()


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


def _exact_times(records: list[Any], text: bytes) -> dict[int, tuple[int, int]]:
    """Times read from the digits, by id of the record, where a clock of microseconds since 1970 has a fraction: a
    float64 would round such times to a quarter of a microsecond."""
    coarse = next((r for r in records if type(r) is Complete and type(r.ts) is float and r.ts >= _EXACT_BELOW), None)
    if coarse is None or not text:
        return {}
    raw = decode_exact_times(text)
    found = {}
    for record, times in zip(records, raw, strict=True):
        if type(record) is Complete:
            found[id(record)] = (_digits(bytes(times.ts), record.ts), _digits(bytes(times.dur), record.dur))
    return found


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


def _legacy(record: Complete) -> int | None:
    """Traces of torch's first profiler have no category; the process says what an event is."""
    if record.pid == "CUDA functions":
        return KERNEL
    return _FIRST_HOST + HostKind.OP if record.pid == "CPU functions" else None


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first


def _integers(values: list[Any], dtype: type = np.int64) -> NDArray[Any]:
    """A column of integers from what writers put there: numbers, digits in text, `stream 7`, nothing."""
    try:
        column = np.array(values)
        if column.dtype.kind == "i":
            return column.astype(dtype)
    except (ValueError, OverflowError):
        pass
    limit = np.iinfo(dtype).max
    return np.array(
        [value if type(value) is int and -limit <= value <= limit else _integer(value, limit) for value in values],
        dtype,
    )


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
    group = _either(args.group_ranks, args.group)
    return CommArgs(
        name=str(args.collective),
        elements=elements,
        group="" if group is None else str(group),
        group_size=_integer(args.group_size, _WORD),
        dtype="" if args.dtype is None else str(args.dtype),
        sequence=_integer(args.sequence, _WORD),
    )
