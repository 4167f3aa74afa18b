"""One stretch of a trace's events as numpy columns, numbered within it: small enough to send to another process."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.diagnose.facts import NONE, HostKind
from headway.diagnose.records import Args, Begin, Complete, Meta
from headway.diagnose.times import LATEST, one_time, times

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
_RUNTIME = _FIRST_HOST + HostKind.RUNTIME
_DESCRIBED = (_FIRST_HOST + HostKind.OP, _FIRST_HOST + HostKind.ANNOTATION)
_WORD = (1 << 63) - 1
_NO_TEXT = b""  # what an absent msgspec.Raw holds


class Index(dict[Any, int]):
    """Numbers keys in the order of their first appearance: looking one up gives its number."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number

    def column(self, keys: Iterable[Any], count: int = -1) -> NDArray[Any]:
        return np.fromiter(map(self.__getitem__, keys), np.int32, count)


@dataclass(frozen=True)
class CommArgs:
    """What a communication kernel or `record_param_comms` says about itself."""

    name: str
    elements: int
    group: str
    group_size: int
    dtype: str
    sequence: int


@dataclass
class Piece:
    """Columns of one stretch, in file order; times in ns.

    `gpu` and `host` map a column's name to its values. Names, threads and shapes in them are numbers into the lists of
    the same name here. `gpu_comm`, `host_comm`: row → communication metadata. `spans`: the profiler's own recording
    spans, ns. `other_phases`: begin events of begin/end pairs, which are not read.
    """

    gpu: dict[str, NDArray[Any]] = field(default_factory=dict)
    host: dict[str, NDArray[Any]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    threads: list[tuple[Any, Any]] = field(default_factory=list)
    shapes: list[bytes] = field(default_factory=list)
    gpu_comm: dict[int, CommArgs] = field(default_factory=dict)
    host_comm: dict[int, CommArgs] = field(default_factory=dict)
    thread_names: dict[tuple[str, str], str] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)
    other_phases: int = 0


class _Codes(dict[str, int]):
    """What an event is, by its category as the file writes it."""

    def __missing__(self, cat: str) -> int:
        code = self[cat] = _code(cat)
        return code


_CODES = _Codes()


def piece_of(records: list[Any], text: bytes | memoryview = b"") -> Piece:
    """One stretch. `text` is the JSON list that gave the records, for times that a float cannot hold."""
    piece = Piece()
    kinds = set(map(type, records))
    if Meta in kinds or Begin in kinds:
        _note_others(piece, records)
    events: list[Complete] = [record for record in records if type(record) is Complete]
    if not events:
        return piece
    codes = np.fromiter(map(_CODES.__getitem__, [event.cat for event in events]), np.int16, len(events))
    if not events[0].cat and "" in _CODES:
        codes = np.array(
            [_legacy(event) if not event.cat else code for event, code in zip(events, codes.tolist(), strict=True)],
            np.int16,
        )
    for place in np.flatnonzero(codes == _SPAN).tolist():
        _note_span(piece, events[place])
    kept = (codes >= 0) & (codes < _SPAN)
    if not kept.any():
        return piece
    if not kept.all():
        events, codes = list(compress(events, kept.tolist())), codes[kept]
    start, duration = times(events, records, text)
    names = Index()
    common = {"start": start, "duration": duration, "name": names.column([event.name for event in events], len(events))}
    piece.names = list(names)
    on_gpu = codes < _FIRST_HOST
    if on_gpu.any():
        _fill_gpu(piece, _rows(events, on_gpu), {key: column[on_gpu] for key, column in common.items()}, codes[on_gpu])
    if not on_gpu.all():
        mine = ~on_gpu
        _fill_host(piece, _rows(events, mine), {key: column[mine] for key, column in common.items()}, codes[mine])
    return piece


def _rows(items: list[Any], mask: NDArray[np.bool_]) -> list[Any]:
    return list(compress(items, mask.tolist()))


def _fill_gpu(piece: Piece, events: list[Complete], common: dict[str, NDArray[Any]], codes: NDArray[Any]) -> None:
    args = [event.args for event in events]
    piece.gpu = common | {
        "code": codes.astype(np.int8),
        "device": _filled(_integers([one.device for one in args], np.int32), events, "pid"),
        "stream": _filled(_integers([one.stream for one in args], np.int32), events, "tid"),
        "correlation": _integers([one.correlation for one in args]),
        "size": _integers([one.size for one in args]),
    }
    piece.gpu_comm = _comm(args, range(len(args)))


def _fill_host(piece: Piece, events: list[Complete], common: dict[str, NDArray[Any]], codes: NDArray[Any]) -> None:
    """Only runtime calls have a correlation, only operators and annotations have shapes and collectives."""
    correlation: NDArray[np.int64] = np.full(len(events), NONE, np.int64)
    calls = codes == _RUNTIME
    if calls.any():
        correlation[calls] = _integers([event.args.correlation for event in _rows(events, calls)])
    shapes, types = (np.full(len(events), NONE, np.int32) for _ in range(2))
    described = np.isin(codes, _DESCRIBED)
    if described.any():
        args = [event.args for event in _rows(events, described)]
        texts = Index({_NO_TEXT: NONE})
        shapes[described] = texts.column([bytes(one.dims) for one in args], len(args))
        types[described] = texts.column([bytes(one.types) for one in args], len(args))
        # The absent text took the first number.
        shapes[shapes > 0] -= 1
        types[types > 0] -= 1
        piece.shapes = list(texts)[1:]
        piece.host_comm = _comm(args, np.flatnonzero(described))
    threads, thread = _threads(events)
    piece.threads = threads
    piece.host = common | {
        "kind": (codes - _FIRST_HOST).astype(np.int8),
        "thread": thread,
        "correlation": correlation,
        "shapes": shapes,
        "types": types,
    }


def _threads(events: list[Complete]) -> tuple[list[tuple[Any, Any]], NDArray[Any]]:
    """(process, thread) pairs in order of appearance, and each event's number among them."""
    try:
        pid = np.fromiter([event.pid for event in events], np.int64, len(events))
        tid = np.fromiter([event.tid for event in events], np.int64, len(events))
    except (TypeError, ValueError, OverflowError):  # written as text
        index = Index()
        column = index.column([(event.pid, event.tid) for event in events], len(events))
        return list(index), column
    fresh = np.flatnonzero(np.concatenate(([True], (pid[1:] != pid[:-1]) | (tid[1:] != tid[:-1]))))
    index = Index()
    number = index.column(zip(pid[fresh].tolist(), tid[fresh].tolist(), strict=True), len(fresh))
    return list(index), np.repeat(number, np.diff(np.append(fresh, len(events))))


def _comm(args: list[Args], rows: Iterable[int]) -> dict[int, CommArgs]:
    if all([one.collective is None for one in args]):  # a list: a generator takes twice as long
        return {}
    return {int(row): _comm_args(found) for row, found in zip(rows, args, strict=True) if found.collective is not None}


def _note_others(piece: Piece, records: list[Any]) -> None:
    for record in records:
        if type(record) is Meta and record.name == "thread_name" and record.args is not None:
            piece.thread_names.setdefault((str(record.pid), str(record.tid)), str(record.args.name))
        elif type(record) is Begin:
            piece.other_phases += 1


def _note_span(piece: Piece, record: Complete) -> None:
    if isinstance(record.ts, int | float) and 0 <= record.ts < LATEST and 0 <= record.dur < LATEST:
        start = one_time(record.ts)
        piece.spans.append((start, start + one_time(record.dur)))


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


def _filled(column: NDArray[Any], events: list[Complete], key: str) -> NDArray[Any]:
    """Old files name the device by the process and the stream by the thread."""
    missing = np.flatnonzero(column == NONE)
    if len(missing):
        column[missing] = _integers([getattr(events[row], key) for row in missing.tolist()], np.int32)
    return column


def _integers(values: list[Any], dtype: type = np.int64) -> NDArray[Any]:
    """A column of integers from what writers put there: numbers, digits in text, `stream 7`, nothing."""
    try:
        return np.fromiter(values, dtype, len(values))
    except (TypeError, ValueError, OverflowError):
        limit = np.iinfo(dtype).max
        return np.array([_integer(value, limit) for value in values], dtype)


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
