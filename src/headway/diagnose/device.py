"""The facts of one GPU of a trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.account.account import Account
from headway.account.tree import STEP
from headway.diagnose import classify
from headway.diagnose.facts import (
    NONE,
    Collective,
    DeviceFacts,
    Gaps,
    GpuClass,
    GpuEvents,
    HostKind,
    Int64,
    Shares,
    Window,
)
from headway.diagnose.gaps import HostWork, explain
from headway.diagnose.linking import at_rows, innermost_open, link_launches
from headway.diagnose.phases import compute_by_phase, phases
from headway.diagnose.shares import of_events
from headway.diagnose.steps import shares_of, step_table
from headway.diagnose.table import fragmentation, inside, kernel_table, time_by_kind
from headway.diagnose.trace import Trace
from headway.diagnose.window import HostStep, choose_window, on_device

_OWNS_THE_WINDOW = 0.5


@dataclass(frozen=True)
class Linked:
    """Where each GPU event of a trace came from. Columns [N] like GpuTable's."""

    launch: Int64
    op: Int64


def link(trace: Trace) -> Linked:
    """Launches by correlation, operators by what was open on the launching thread at that moment."""
    host, gpu = trace.host, trace.gpu
    calls = np.flatnonzero((host.kind == HostKind.RUNTIME) & (host.correlation >= 0))
    found = link_launches(gpu.correlation, gpu.start, host.correlation[calls], host.start[calls])
    launch = np.where(found >= 0, calls[found], NONE) if len(calls) else found
    ops = np.flatnonzero(host.kind == HostKind.OP)
    op = np.full(len(gpu), NONE, np.int64)
    linked = np.flatnonzero(launch != NONE)
    if len(ops) and len(linked):
        at = launch[linked]
        opened = innermost_open(host.start[at], host.thread[at], host.start[ops], host.end[ops], host.thread[ops])
        op[linked] = np.where(opened >= 0, ops[opened], NONE)
    return Linked(launch, op)


def device_events(trace: Trace, linked: Linked, device: int, comm: re.Pattern[str]) -> tuple[GpuEvents, Int64]:
    """The events of one device, and their rows in the trace's table."""
    gpu = trace.gpu
    rows = np.flatnonzero(gpu.device == device)
    place = {row: at for at, row in enumerate(rows.tolist())} if gpu.comm else {}
    with_args = [place[row] for row in gpu.comm if row in place]
    klass, kind = classify.classify(trace.names, gpu.name[rows], gpu.code[rows], with_args, comm)
    return GpuEvents(
        start=gpu.start[rows],
        end=gpu.end[rows],
        name=gpu.name[rows],
        klass=klass,
        kind=kind,
        stream=gpu.stream[rows],
        correlation=gpu.correlation[rows],
        launch=linked.launch[rows].astype(np.int32),
        op=linked.op[rows].astype(np.int32),
        size=gpu.size[rows],
    ), rows


def device_facts(
    trace: Trace,
    rank: int,
    device: int,
    linked: Linked,
    work: HostWork,
    steps: list[HostStep],
    inner: list[HostStep],
    comm: re.Pattern[str],
    wanted: str,
) -> DeviceFacts:
    """Everything the trace says about one GPU. `steps` make the window; `inner` are told apart in it (the same, or
    those that only the optimizer tells, in the device's own time)."""
    events, rows = device_events(trace, linked, device, comm)
    launch = events.launch.astype(np.int64)
    window = choose_window(trace, steps, events.start, events.end, launch, wanted)
    idle = of_events(events, window.start_ns, window.end_ns).idle
    gaps = explain(idle, events.start, events.end, launch, trace.host, work)
    shares = shares_of(events, gaps, window.start_ns, window.end_ns)
    told = steps or on_device(inner, trace, events.start, events.end, launch)
    table = step_table(events, gaps, told, window)
    name = device_name(trace.metadata, device)
    phase = phases(trace.host, trace.names, events, on_gpu=True)
    return DeviceFacts(
        kind="gpu",
        index=device,
        name=name,
        window=window,
        shares=shares,
        account=account_of(shares, compute_by_phase(events, phase, window)),
        events=events,
        phase=phase,
        table=kernel_table(events, trace.names, window),
        by_kind=time_by_kind(events, window),
        fragmentation=fragmentation(events, gaps, window, table, trace.gpu.code[rows] == 0),
        steps=table,
        collectives=_collectives(trace, rank, device, events, rows),
        gaps=gaps,
        notes=tuple(_notes(trace, events, window, shares, gaps, launch, steps)),
    )


def account_of(shares: Shares, by_phase: Mapping[str, int]) -> Account:
    """The step tree as a trace sees it, compute split where the phases are known (they sum to it). A queued wait and
    what has no launch stay unaccounted."""
    idle = shares.idle
    compute = {f"compute.{name}": ns for name, ns in by_phase.items() if ns} or {"compute": shares.compute_ns}
    return Account.close(
        STEP,
        shares.wall_ns,
        {
            **compute,
            "comm": shares.exposed_comm_ns,
            "copy": shares.exposed_mem_ns,
            "data": idle["data"],
            "host.launch": idle["launch_call"] + idle["launch_latency"] + idle["short"],
            "host.sync": idle["blocking"],
            "host.other": idle["host"],
        },
    )


def device_name(metadata: Mapping[str, Any], device: int) -> str:
    properties = metadata.get("deviceProperties")
    listed = [item for item in properties if isinstance(item, dict)] if isinstance(properties, list) else []
    for item in listed:
        if item.get("id") == device:
            return str(item.get("name", ""))
    return str(listed[0].get("name", "")) if len(listed) == 1 else ""


def _collectives(trace: Trace, rank: int, device: int, events: GpuEvents, rows: Int64) -> tuple[Collective, ...]:
    found = []
    for event in np.flatnonzero(events.klass == GpuClass.COMM).tolist():
        args = trace.gpu.comm.get(int(rows[event]))
        name = trace.names[events.name[event]]
        found.append(
            Collective(
                rank=rank,
                device=device,
                group=args.group if args else "",
                name=canonical(args.name if args else name),
                elements=args.elements if args else NONE,
                sequence=args.sequence if args else NONE,
                start_ns=int(events.start[event]),
                end_ns=int(events.end[event]),
                event=event,
                dtype=args.dtype if args else "",
                group_size=args.group_size if args else NONE,
            )
        )
    return tuple(found)


_CANONICAL = (
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_reduce", r"all_?reduce|cross_device_reduce|shot"),
    ("all_to_all", r"all_?to_?all|alltoall|dispatch|combine"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send_?recv|send|recv"),
    ("reduce", r"reduce"),
    ("barrier", r"barrier"),
)


def canonical(name: str) -> str:
    """`ncclDevKernel_AllReduce_Sum_f32…`, `_allreduce_base`, `gloo:all_reduce` → all_reduce."""
    return next((kind for kind, pattern in _CANONICAL if re.search(pattern, name, re.IGNORECASE)), name)


def _notes(
    trace: Trace, events: GpuEvents, window: Window, shares: Shares, gaps: Gaps, launch: Int64, steps: list[HostStep]
) -> list[str]:
    notes = []
    rows = inside(events, window)
    if len(rows):
        longest = rows[int(np.argmax(events.duration[rows]))]
        share = int(events.duration[longest]) / max(window.wall_ns, 1)
        if share >= _OWNS_THE_WINDOW and len(rows) > 1:
            notes.append(
                f"one event owns {share:.0%} of the window: {trace.names[events.name[longest]][:80]} "
                f"({int(events.duration[longest]) / 1e6:.1f} ms)"
            )
    notes += _pause(trace, events, window, gaps)
    left_over = _left_over(trace, launch, window, steps, events)
    if left_over:
        notes.append(f"{left_over:,} events on the device were launched before the first step of the window")
    outside = len(events) - len(rows)
    if outside:
        notes.append(f"{outside:,} of {len(events):,} device events lie outside the window")
    unlinked = int((launch[rows] == NONE).sum())
    if unlinked:
        notes.append(f"{unlinked:,} of {len(rows):,} device events have no launch in the trace")
    if shares.comm_ns == 0:
        notes.append("no communication on this device, so no overlap to speak of")
    return notes


def _pause(trace: Trace, events: GpuEvents, window: Window, gaps: Gaps) -> list[str]:
    """A note where one wait is most of the window."""
    if not len(gaps.start):
        return []
    longest = int(np.argmax(gaps.end - gaps.start))
    took = int(gaps.end[longest] - gaps.start[longest])
    if took < _OWNS_THE_WINDOW * window.wall_ns:
        return []
    following = int(gaps.next_event[longest])
    before = f" before {trace.names[events.name[following]][:80]}" if following != NONE else ""
    return [
        f"one wait owns {took / window.wall_ns:.0%} of the window: {took / 1e6:.1f} ms{before}; a first use or a "
        "pause, so the shares say little of a steady state"
    ]


def _left_over(trace: Trace, launch: Int64, window: Window, steps: list[HostStep], events: GpuEvents) -> int:
    if window.source != "steps" or not steps:
        return 0
    linked = launch != NONE
    before: np.ndarray = at_rows(trace.host.start, launch) < window.start_ns
    return int((linked & before & (events.end > window.start_ns)).sum())
