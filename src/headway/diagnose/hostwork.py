"""The account of a trace without any device: the process itself is the device, its operators are the work."""

from __future__ import annotations

import re

import msgspec
import numpy as np

from headway.account.intervals import Intervals, intersect, subtract, union
from headway.diagnose.classify import kind_of
from headway.diagnose.device import account_of, canonical
from headway.diagnose.facts import (
    KINDS,
    NONE,
    Collective,
    DeviceFacts,
    Gaps,
    GpuClass,
    GpuEvents,
    HostKind,
    Int64,
)
from headway.diagnose.gaps import DATA, DATA_NAMES, HOST
from headway.diagnose.linking import innermost_open
from headway.diagnose.phases import compute_by_phase, phases
from headway.diagnose.shares import of_events
from headway.diagnose.steps import shares_of, step_table
from headway.diagnose.table import fragmentation, kernel_table, time_by_kind
from headway.diagnose.trace import Trace
from headway.diagnose.window import HostStep, host_window

_COMM = re.compile(r"^(?:gloo|mpi|ucc|nccl|xccl|hccl|ccl):|^c10d::|^record_param_comms", re.IGNORECASE)
_WAITED = re.compile(r"^(?:gloo|mpi|ucc|nccl|xccl|hccl|ccl):", re.IGNORECASE)
_COLLECTIVE = KINDS.index("collective")
_KIND_OF_OP = (
    ("attention", r"attention"),
    ("convolution", r"conv(?!ert)"),
    ("matmul", r"\bmm\b|addmm|bmm|matmul|linear|einsum|baddbmm|MmBackward|AddmmBackward"),
    ("norm", r"norm"),
    ("loss", r"nll_loss|cross_entropy|log_softmax|NllLoss|LogSoftmax"),
    ("softmax", r"softmax|SoftmaxBackward"),
    ("optimizer", r"_foreach|addcdiv|addcmul|lerp|fused_adam|Optimizer"),
    ("embedding", r"embedding|index_select|gather"),
    ("copy", r"copy_|\bto\b|_to_copy|contiguous|clone|detach|\bcat\b|stack"),
    ("reduction", r"sum|mean|\bmax\b|\bmin\b|argmax|topk|sort|cumsum"),
)
_KINDS = [(KINDS.index(kind), re.compile(pattern)) for kind, pattern in _KIND_OF_OP]
_ELEMENTWISE = KINDS.index("elementwise")


def cpu_facts(
    trace: Trace, rank: int, main: int, steps: list[HostStep], inner: list[HostStep], comm: re.Pattern[str]
) -> DeviceFacts:
    """Compute is every operator outside data loading, communication what the backends call so, the rest is the host's
    own Python or the loader. Each operator counts its own time, without what it called."""
    window = host_window(trace, steps)
    loading = _spans(trace, _named(trace, DATA_NAMES, main))
    events = _events(trace, loading, comm)
    idle = of_events(events, window.start_ns, window.end_ns).idle
    gaps = _explain(idle, loading, events)
    shares = shares_of(events, gaps, window.start_ns, window.end_ns)
    table = step_table(events, gaps, inner, window)
    phase = phases(trace.host, trace.names, events, on_gpu=False)
    return DeviceFacts(
        kind="cpu",
        index=0,
        name="CPU",
        window=window,
        shares=shares,
        account=account_of(shares, compute_by_phase(events, phase, window)),
        events=events,
        phase=phase,
        table=kernel_table(events, trace.names, window),
        by_kind=time_by_kind(events, window),
        fragmentation=fragmentation(events, gaps, window, table, events.klass == GpuClass.COMPUTE),
        steps=table,
        collectives=_collectives(trace, rank, events),
        gaps=gaps,
        notes=("no GPU work in this trace: the account is of the process's own operators",),
    )


def _named(trace: Trace, pattern: re.Pattern[str], thread: int) -> np.ndarray:
    matching = np.array([bool(pattern.search(name)) for name in trace.names] or [False])
    host = trace.host
    return matching[host.name] & np.isin(host.kind, (HostKind.OP, HostKind.ANNOTATION)) & (host.thread == thread)


def _spans(trace: Trace, rows: np.ndarray) -> Intervals:
    return union(np.stack((trace.host.start[rows], trace.host.end[rows]), axis=1))


def _events(trace: Trace, loading: Intervals, comm: re.Pattern[str]) -> GpuEvents:
    """Own time of every operator, and every communication, as events of one device."""
    host, names = trace.host, trace.names
    named = np.array([bool(_COMM.search(name)) or bool(comm.search(name)) for name in names] or [False])
    counted = np.isin(host.kind, (HostKind.OP, HostKind.ANNOTATION))
    comm_rows = np.flatnonzero(named[host.name] & counted)
    op_rows = np.flatnonzero(~named[host.name] & (host.kind == HostKind.OP))
    starts, ends, rows = [host.start[comm_rows]], [host.end[comm_rows]], [comm_rows]
    for thread in np.unique(host.thread[op_rows]).tolist():
        mine = op_rows[host.thread[op_rows] == thread]
        start, end, at = _own_time(host.start[mine], host.end[mine])
        start, end, at = _without(start, end, at, loading)
        starts.append(start)
        ends.append(end)
        rows.append(mine[at])
    start, end, row = np.concatenate(starts), np.concatenate(ends), np.concatenate(rows).astype(np.int64)
    order = np.argsort(start, kind="stable")
    start, end, row = start[order], end[order], row[order]
    is_comm = named[host.name[row]]
    by_name = np.array([_kind(name) for name in names] or [0], np.int8)
    return GpuEvents(
        start=start,
        end=end,
        name=host.name[row],
        klass=np.where(is_comm, GpuClass.COMM, GpuClass.COMPUTE).astype(np.int8),
        kind=np.where(is_comm, _COLLECTIVE, by_name[host.name[row]]).astype(np.int8),
        stream=host.thread[row],
        correlation=np.full(len(row), NONE, np.int64),
        launch=np.full(len(row), NONE, np.int32),
        op=row.astype(np.int32),
        size=np.full(len(row), NONE, np.int64),
    )


def _own_time(start: Int64, end: Int64) -> tuple[Int64, Int64, Int64]:
    """Pieces of one thread's operators in which each is the innermost: (start, end, operator), disjoint."""
    if not len(start):
        return start, end, np.empty(0, np.int64)
    edges = np.unique(np.concatenate((start, end)))
    thread = np.zeros(len(edges), np.int32)
    owner = innermost_open(edges, thread, start, end, np.zeros(len(start), np.int32))[:-1]
    kept = owner != NONE
    return edges[:-1][kept], edges[1:][kept], owner[kept]


def _without(start: Int64, end: Int64, at: Int64, taken: Intervals) -> tuple[Int64, Int64, Int64]:
    """The pieces less the intervals `taken`."""
    if not len(start) or not len(taken):
        return start, end, at
    # Touching pieces of different operators would merge, so that each is found again by where it begins.
    left = subtract(union(np.stack((start, end), axis=1)), taken)
    cuts = np.unique(np.concatenate((start, left.reshape(-1))))
    inside = np.searchsorted(left[:, 0], cuts, "right") - 1
    kept = (inside >= 0) & (cuts < left[inside, 1]) if len(left) else np.zeros(len(cuts), bool)
    cuts, inside = cuts[kept], inside[kept]
    piece = np.searchsorted(start, cuts, "right") - 1
    return cuts, np.minimum(end[piece], left[inside, 1]), at[piece]


def _kind(name: str) -> int:
    return next(
        (kind for kind, pattern in _KINDS if pattern.search(name)), _ELEMENTWISE if "::" in name else kind_of(name)
    )


def _explain(idle: Intervals, loading: Intervals, events: GpuEvents) -> Gaps:
    data = intersect(idle, loading)
    rest = subtract(idle, data)
    start = np.concatenate((data[:, 0], rest[:, 0]))
    end = np.concatenate((data[:, 1], rest[:, 1]))
    klass = np.concatenate((np.full(len(data), DATA, np.int8), np.full(len(rest), HOST, np.int8)))
    order = np.argsort(start, kind="stable")
    following = np.searchsorted(events.start, end[order], "left")
    return Gaps(
        start[order],
        end[order],
        klass[order],
        np.where(following < len(events), following, NONE).astype(np.int32),
    )


def _collectives(trace: Trace, rank: int, events: GpuEvents) -> tuple[Collective, ...]:
    """The backend's own slices: they end when the operation does, unlike the calls that start it."""
    found = []
    for event in np.flatnonzero(events.klass == GpuClass.COMM).tolist():
        row = int(events.op[event])
        name = trace.names[events.name[event]]
        if not _WAITED.search(name):
            continue
        args = trace.host_comm.get(row)
        shape = trace.shapes[trace.host.shapes[row]] if trace.host.shapes[row] != NONE else ""
        found.append(
            Collective(
                rank=rank,
                device=0,
                group=args.group if args else "",
                name=canonical(name),
                elements=args.elements if args else elements_of(shape),
                sequence=args.sequence if args else NONE,
                start_ns=int(events.start[event]),
                end_ns=int(events.end[event]),
                event=event,
            )
        )
    return tuple(found)


def elements_of(shapes: str) -> int:
    """Elements of the first tensor of an "Input Dims" text; NONE where there is none."""
    try:
        value = msgspec.json.decode(shapes)
    except msgspec.DecodeError:
        return NONE
    while isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or not value or not all(isinstance(size, int) for size in value):
        return NONE
    return int(np.prod(value))
