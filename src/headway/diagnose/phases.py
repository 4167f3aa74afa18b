"""Which part of the step each event of a device belongs to, by what the host had open when it was launched."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from headway.account.intervals import measure, subtract, union
from headway.diagnose.facts import KINDS, NONE, GpuClass, GpuEvents, HostEvents, HostKind, Int8, Int64, Window
from headway.diagnose.linking import innermost_open
from headway.diagnose.shares import of_events

PHASES = ("forward", "backward", "recompute", "loss", "optimizer")
"""Parts of compute in the step tree; an event's phase is an index into them, NONE where the trace does not tell."""

FORWARD, BACKWARD, RECOMPUTE, LOSS, OPTIMIZER = range(len(PHASES))
_REGIONS = (
    (
        RECOMPUTE,
        r"CheckpointFunctionBackward|_checkpoint_hook|checkpoint\.py.*(?:unpack_hook|backward)|## recompute|"
        r"headway\.compute\.recompute",
    ),
    (BACKWARD, r"^autograd::engine::evaluate_function: |## backward ##|headway\.compute\.backward"),
    (OPTIMIZER, r"^Optimizer\.step#|headway\.compute\.optimizer|## optimizer ##"),
    (LOSS, r"headway\.compute\.loss"),
    (FORWARD, r"headway\.compute\.forward|## forward ##|DataParallel\.forward"),
)
_BUILT_IN = re.compile(r"^autograd::engine::evaluate_function: \w+Backward\d+$")
# No formula of a built-in backward calls these: under one, they are a checkpoint's forward.
_FORWARD_ONLY = re.compile(r"^aten::(?:linear|scaled_dot_product_attention|layer_norm|rms_norm|gelu|silu|relu)$")
_OPTIMIZER_KIND, _LOSS_KIND = KINDS.index("optimizer"), KINDS.index("loss")


def phases(host: HostEvents, names: Sequence[str], events: GpuEvents, on_gpu: bool) -> Int8:
    """int8 [N], an index into PHASES or NONE.

    The innermost region open on the launching thread decides. Outside of all regions an event is forward, as long as
    the trace has a backward at all; what has no launch takes the phase of the event before it.
    """
    unknown: Int8 = np.full(len(events), NONE, np.int8)
    row, region = _regions(host, names)
    if not len(events) or not np.isin(region, (BACKWARD, RECOMPUTE)).any():
        return unknown
    launched = events.launch if on_gpu else events.op
    known = np.flatnonzero(launched != NONE)
    if not len(known):
        return unknown
    at = launched[known]
    starts, ends, threads, region = _with_checkpoints(host, names, row, region)
    # On a CPU an event is a piece of its operator; a node's later pieces may lie in a checkpoint that ran under it.
    moment = host.start[at] if on_gpu else events.start[known]
    inside = innermost_open(moment, host.thread[at], starts, ends, threads)
    found = np.where(inside == NONE, FORWARD, region[inside]).astype(np.int8)
    kind = events.kind[known]
    found[(kind == _OPTIMIZER_KIND) & (found == FORWARD)] = OPTIMIZER
    found[(kind == _LOSS_KIND) & (found == FORWARD)] = LOSS
    phase = unknown.copy()
    phase[known] = found
    before = np.maximum.accumulate(np.where(phase == NONE, 0, np.arange(len(phase))))
    phase = phase[before]
    phase[phase == NONE] = FORWARD
    return phase


def _regions(host: HostEvents, names: Sequence[str]) -> tuple[Int64, Int8]:
    """Rows of host events that say which phase runs, and the phase."""
    by_name = np.full(max(1, len(names)), NONE, np.int8)
    for number, name in enumerate(names):
        by_name[number] = next((phase for phase, pattern in _PATTERNS if pattern.search(name)), NONE)
    found = by_name[host.name] if len(host) else np.empty(0, np.int8)
    wanted = (found != NONE) & np.isin(host.kind, (HostKind.OP, HostKind.ANNOTATION, HostKind.PYTHON))
    rows = np.flatnonzero(wanted)
    return rows, found[rows]


_PATTERNS = [(phase, re.compile(pattern)) for phase, pattern in _REGIONS]


def _with_checkpoints(
    host: HostEvents, names: Sequence[str], row: Int64, region: Int8
) -> tuple[Int64, Int64, np.ndarray, Int8]:
    """The regions, and a checkpoint's forward inside a built-in backward. Sorted by start, an enclosing one first.

    A node asks for its saved tensors before it computes anything, so the recompute begins with the node; it is over
    where the first operator behind the last forward-only one begins.
    """
    starts, ends, threads = host.start[row], host.end[row], host.thread[row]
    built_in = np.array([bool(_BUILT_IN.match(name)) for name in names] or [False])
    only = np.array([bool(_FORWARD_ONLY.match(name)) for name in names] or [False])
    nodes = row[built_in[host.name[row]]]
    ops = np.flatnonzero(only[host.name] & (host.kind == HostKind.OP))
    if len(nodes) and len(ops):
        node = innermost_open(host.start[ops], host.thread[ops], host.start[nodes], host.end[nodes], host.thread[nodes])
        within, node = ops[node != NONE], node[node != NONE]
        if len(node):
            last = np.full(len(nodes), -1, np.int64)
            np.maximum.at(last, node, host.end[within])
            used = np.flatnonzero(last >= 0)
            until = np.minimum(_next_start(host, last[used], host.thread[nodes[used]]), host.end[nodes[used]])
            starts = np.concatenate((starts, host.start[nodes[used]]))
            ends = np.concatenate((ends, until))
            threads = np.concatenate((threads, host.thread[nodes[used]]))
            region = np.concatenate((region, np.full(len(used), RECOMPUTE, np.int8)))
    # Where a checkpoint begins with its node, the node encloses it.
    order = np.lexsort((region == RECOMPUTE, -ends, starts))
    return starts[order], ends[order], threads[order], region[order]


def _next_start(host: HostEvents, after: Int64, thread: np.ndarray) -> Int64:
    """Start of the first operator on the same thread at or after each moment; the end of time where there is none."""
    found = np.full(len(after), np.iinfo(np.int64).max)
    for one in np.unique(thread).tolist():
        starts = host.start[(host.thread == one) & (host.kind == HostKind.OP)]
        asked = np.flatnonzero(thread == one)
        at = np.searchsorted(starts, after[asked], "left")
        there = at < len(starts)
        found[asked[there]] = starts[at[there]]
    return found


def compute_by_phase(events: GpuEvents, phase: Int8, window: Window) -> dict[str, int]:
    """ns of compute of each phase inside the window; they sum to compute. Empty where there is no backward.

    Events of two phases that run at once count once, under the phase that stands later in PHASES.
    """
    computing = events.klass == GpuClass.COMPUTE
    if not (computing & np.isin(phase, (BACKWARD, RECOMPUTE))).any():
        return {}
    left = of_events(events, window.start_ns, window.end_ns).compute
    found: dict[str, int] = {}
    for number in reversed(range(len(PHASES))):
        rows = computing & (phase == number)
        rest = subtract(left, union(np.stack((events.start[rows], events.end[rows]), axis=1)))
        found[PHASES[number]] = measure(left) - measure(rest)
        left = rest
    return found
