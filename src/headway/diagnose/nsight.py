"""A Nsight Systems export (`nsys export --type sqlite`) as a trace.

Tables and columns are those of the public schema that the exporter documents; a column that a version lacks is left
out. Times are integer ns since the session's start, which TARGET_INFO_SESSION_START_TIME puts on the wall clock.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.account.errors import UserError
from headway.diagnose.facts import NONE, Damage, HostEvents, HostKind
from headway.diagnose.piece import KERNEL, MEMCPY, MEMSET, Index
from headway.diagnose.trace import GpuTable, Trace

MAGIC = b"SQLite format 3\0"
_PUSH_POP, _START_END = 59, 60  # NVTX_EVENTS.eventType of ranges; all others are marks and counters
_ID = 1 << 24  # globalTid holds the thread in its low 24 bits, the process in the next
_BATCH = 1 << 16
_COPIES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
_VERSION = re.compile(r"_v\d+(?:_ptsz|_ptds)?$")
# torch.autograd.profiler.emit_nvtx: `aten::mm, seq = 7, op_id = 12, sizes = [[2, 3], [3, 4]]`
_EMITTED = re.compile(r"^([^,]+), (?:seq|op_id|sizes) = .*?(?:sizes = (\[.*?\])(?:, input_op_ids = .*)?)?$")
_OPERATOR = re.compile(r"^(?:aten|autograd|c10d|torch|triton|flash_attn)[:\w]*::|Backward\d+$")
Column = NDArray[np.int64]


def is_sqlite(path: Path) -> bool:
    """Whether the file is a SQLite database, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_nsight(path: Path) -> Trace:
    """Reads an export.

    Raises:
        UserError: the database is damaged, is no such export, or holds no GPU work.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return _Export(path, database).trace()
    except sqlite3.Error as error:
        raise UserError(f"{path}: the Nsight Systems export cannot be read ({error}); export it again") from None


class _Export:
    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        listed = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.tables = {name for (name,) in listed}
        self.names, self.threads, self.shapes = Index(), Index(), Index()
        self._texts: dict[int, str] = {}
        self.lost = 0

    def trace(self) -> Trace:
        if not self.tables & {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"}:
            raise UserError(f"{self.path}: a SQLite database, but no Nsight Systems export (none of its tables)")
        if "StringIds" in self.tables:
            self._texts = dict(self.database.execute("SELECT id, value FROM StringIds"))
        gpu, host = self._gpu(), self._host()
        if not len(gpu):
            raise UserError(
                f"{self.path}: no GPU work in this export: record it with `nsys profile --trace=cuda,nvtx` "
                "(and --cuda-graph-trace=node, or a CUDA graph is one event)"
            )
        return Trace(
            path=self.path,
            gpu=gpu,
            host=host,
            host_comm={},
            names=tuple(self.names),
            threads=tuple(f"{number // _ID % _ID}/{number % _ID}" for number in self.threads),
            shapes=tuple(self.shapes),
            damage=Damage(kept=len(gpu) + len(host), lost={"event without an end": self.lost} if self.lost else {}),
            metadata=self._metadata(),
            notes=(f"a Nsight Systems export of {len(gpu):,} GPU events",),
        )

    def _rows(self, table: str, columns: Sequence[str], where: str = "") -> Column:
        """int64 [N, len(columns)]; NONE where a value is null or the table lacks the column. Rows without an end are
        counted and left out (the first two columns are start and end)."""
        if table not in self.tables:
            return np.empty((0, len(columns)), np.int64)
        have = {"rowid"} | {row[1] for row in self.database.execute(f"PRAGMA table_info({table})")}
        wanted = ", ".join(f"ifnull({name}, {NONE})" if name in have else str(NONE) for name in columns)
        cursor = self.database.execute(f"SELECT {wanted} FROM {table} {where}")
        pieces = []
        while batch := cursor.fetchmany(_BATCH):
            pieces.append(np.array(batch, np.int64))
        found = np.concatenate(pieces) if pieces else np.empty((0, len(columns)), np.int64)
        ended = (found[:, 1] >= found[:, 0]) & (found[:, 0] >= 0)
        self.lost += int((~ended).sum())
        return found[ended]

    def _text(self, number: int, default: str) -> str:
        return str(self._texts.get(number) or default)

    def _named(self, ids: Column, default: str) -> NDArray[np.int32]:
        """Index into `names` of texts given by their ids."""
        of = {number: self.names[_VERSION.sub("", self._text(number, default))] for number in np.unique(ids).tolist()}
        return np.array([of[number] for number in ids.tolist()], np.int32)

    def _gpu(self) -> GpuTable:
        common = ("start", "end", "deviceId", "streamId", "correlationId")
        kernels = self._rows("CUPTI_ACTIVITY_KIND_KERNEL", (*common, "demangledName", "shortName"))
        copies = self._rows("CUPTI_ACTIVITY_KIND_MEMCPY", (*common, "copyKind", "bytes"))
        fills = self._rows("CUPTI_ACTIVITY_KIND_MEMSET", (*common, "value", "bytes"))
        graphs = self._rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", (*common, "graphId", "graphExecId"))
        kernel_names = np.where(kernels[:, 5] != NONE, kernels[:, 5], kernels[:, 6])
        names = [
            self._named(kernel_names, "kernel"),
            np.array([self.names[_COPIES.get(kind, "Memcpy")] for kind in copies[:, 5].tolist()], np.int32),
            np.full(len(fills), self.names["Memset"] if len(fills) else 0, np.int32),
            np.array([self.names[f"CUDA graph {number}"] for number in graphs[:, 5].tolist()], np.int32),
        ]
        parts = (kernels, copies, fills, graphs)
        codes = (KERNEL, MEMCPY, MEMSET, KERNEL)
        every = np.concatenate([part[:, :5] for part in parts])
        sizes = np.concatenate((np.full(len(kernels), NONE), copies[:, 6], fills[:, 6], np.full(len(graphs), NONE)))
        code = np.repeat(np.array(codes, np.int8), [len(part) for part in parts])
        order = np.argsort(every[:, 0], kind="stable")
        every = every[order]
        return GpuTable(
            start=every[:, 0].copy(),
            end=every[:, 1].copy(),
            name=np.concatenate(names)[order].astype(np.int32),
            code=code[order],
            device=every[:, 2].astype(np.int32),
            stream=every[:, 3].astype(np.int32),
            correlation=every[:, 4].copy(),
            size=sizes[order].astype(np.int64),
            comm={},
        )

    def _host(self) -> HostEvents:
        calls = self._rows("CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "end", "globalTid", "correlationId", "nameId"))
        call_names = self._named(calls[:, 4], "call")
        where = f"WHERE eventType IN ({_PUSH_POP}, {_START_END})"
        ranges = self._rows("NVTX_EVENTS", ("start", "end", "globalTid", "textId", "rowid"), where)
        name, kind, shapes = self._ranges(ranges)
        both = np.concatenate((calls, ranges))
        start, end = both[:, 0], both[:, 1]
        order = np.lexsort((-end, start))
        thread = self.threads.column(both[:, 2].tolist())
        correlation = np.concatenate((calls[:, 3], np.full(len(ranges), NONE, np.int64)))
        kinds = np.concatenate((np.full(len(calls), HostKind.RUNTIME, np.int8), kind))
        none = np.full(len(calls), NONE, np.int32)
        return HostEvents(
            start=start[order],
            end=end[order],
            name=np.concatenate((call_names, name))[order].astype(np.int32),
            kind=kinds[order],
            thread=thread[order],
            correlation=correlation[order],
            shapes=np.concatenate((none, shapes))[order].astype(np.int32),
            types=np.full(len(both), NONE, np.int32),
        )

    def _ranges(self, ranges: Column) -> tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int32]]:
        """Names, kinds and shapes of NVTX ranges; what emit_nvtx wrote becomes operators with their shapes."""
        direct: dict[int, str] = {}
        if len(ranges) and "text" in {row[1] for row in self.database.execute("PRAGMA table_info(NVTX_EVENTS)")}:
            direct = dict(self.database.execute("SELECT rowid, text FROM NVTX_EVENTS WHERE text IS NOT NULL"))
        name, kind, shapes = [], [], []
        for text_id, row in ranges[:, 3:5].tolist():
            text = direct.get(row) or self._text(text_id, "range")
            emitted = _EMITTED.match(text)
            text = emitted[1] if emitted else text
            name.append(self.names[text])
            kind.append(HostKind.OP if emitted or _OPERATOR.search(text) else HostKind.ANNOTATION)
            shapes.append(self.shapes[emitted[2]] if emitted and emitted[2] else NONE)
        return np.array(name, np.int32), np.array(kind, np.int8), np.array(shapes, np.int32)

    def _metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if "TARGET_INFO_GPU" in self.tables:
            listed = self.database.execute("SELECT id, name FROM TARGET_INFO_GPU").fetchall()
            found["deviceProperties"] = [{"id": number, "name": name} for number, name in listed]
        if "TARGET_INFO_SESSION_START_TIME" in self.tables:
            row = self.database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
            if row is not None and isinstance(row[0], int):
                found["baseTimeNanoseconds"] = row[0]
        return found
