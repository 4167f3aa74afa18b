"""Which time an account covers, and the steps in it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np

from headway.account.errors import UserError
from headway.diagnose.facts import NONE, HostEvents, HostKind, Int64, RankFacts, Window
from headway.diagnose.linking import at_rows
from headway.diagnose.trace import Trace

STEP_PREFIX = "ProfilerStep#"
WINDOWS = ("auto", "steps", "gpu")


@dataclass(frozen=True)
class HostStep:
    """A `ProfilerStep` as the host saw it, ns."""

    name: str
    start: int
    end: int


def host_steps(trace: Trace) -> list[HostStep]:
    """Complete steps of the thread that has most of them, in time; doubles (one per thread or device) counted once.

    `ProfilerStep#N`, else ranges that a loop calls so itself (`step 7`, `iteration_7`, NVTX or record_function).
    """
    for pattern in _STEP_NAMES:
        if steps := _named_steps(trace, pattern):
            return steps
    return []


_STEP_NAMES = (
    re.compile(re.escape(STEP_PREFIX)),
    re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?)[ _#:=-]*\d+$", re.IGNORECASE),
)


def optimizer_steps(trace: Trace) -> list[HostStep]:
    """Where no range says what a step is: from the end of one `Optimizer.step#` to the end of the next.

    What lies before the first is a step too where as much was done in it as in a typical other one; else it was
    recorded from its middle on.
    """
    host = trace.host
    numbers = [number for number, name in enumerate(trace.names) if name.startswith("Optimizer.step#")]
    rows = np.flatnonzero(np.isin(host.name, numbers) & (host.end > host.start))
    if not len(rows):
        return []
    rows = rows[host.thread[rows] == host.thread[rows[0]]]
    ends = host.end[rows]
    if len(rows) > 2:
        # Several optimizers of one step follow on each other's heels: hardly an operator lies between.
        ops = host.start[host.kind == HostKind.OP]
        between = np.searchsorted(ops, host.start[rows[1:]]) - np.searchsorted(ops, ends[:-1])
        ends = ends[np.append(between > 0.05 * between.max(), True)]
    done = np.diff(np.searchsorted(host.start, ends), prepend=0)
    whole = len(done) == 1 or done[0] >= 0.8 * np.median(done[1:])
    edges = np.append(host.start[0] - 1, ends) if whole else ends
    name = trace.names[host.name[rows[0]]].partition("#")[0]
    return [
        HostStep(f"{name}#{number}", start, end)
        for number, (start, end) in enumerate(itertools.pairwise(edges.tolist()), 1)
    ]


def on_device(steps: list[HostStep], trace: Trace, start: Int64, end: Int64, launch: Int64) -> list[HostStep]:
    """Host steps in a device's time: each boundary moves to the end of the last event that was launched before it."""
    if not steps or not len(start):
        return []
    launched = np.where(launch != NONE, at_rows(trace.host.start, launch), start)
    order = np.argsort(launched, kind="stable")
    until = np.maximum.accumulate(end[order])
    edges = []
    for boundary in [steps[0].start] + [step.end for step in steps]:
        before = int(np.searchsorted(launched[order], boundary, "left"))
        edges.append(int(until[before - 1]) if before else int(start.min()))
    return [
        HostStep(step.name, first, last)
        for step, first, last in zip(steps, edges[:-1], edges[1:], strict=True)
        if last > first
    ]


def _named_steps(trace: Trace, pattern: re.Pattern[str]) -> list[HostStep]:
    numbers = [number for number, name in enumerate(trace.names) if pattern.match(name)]
    host = trace.host
    rows = np.flatnonzero(np.isin(host.name, numbers) & (host.end > host.start) & (host.kind != HostKind.RUNTIME))
    if not len(rows):
        return []
    threads, counts = np.unique(host.thread[rows], return_counts=True)
    rows = rows[host.thread[rows] == threads[np.argmax(counts)]]
    steps: list[HostStep] = []
    for row in rows.tolist():
        step = HostStep(trace.names[host.name[row]], int(host.start[row]), int(host.end[row]))
        if not steps or step.start >= steps[-1].end - 1000:  # neighbours may share a rounding
            steps.append(step)
    return steps


def main_thread(trace: Trace | RankFacts) -> int:
    """The thread that drives training: the one with the steps, else with the loader or optimizer, else the busiest."""
    host = trace.host
    for prefix in (STEP_PREFIX, "enumerate(DataLoader)", "Optimizer."):
        numbers = [number for number, name in enumerate(trace.names) if name.startswith(prefix)]
        rows = np.flatnonzero(np.isin(host.name, numbers))
        if len(rows):
            return int(np.bincount(host.thread[rows]).argmax())
    own = [number for number, text in enumerate(trace.threads) if _is_main(text)]
    rows = np.flatnonzero(np.isin(host.thread, own)) if own else np.empty(0, np.int64)
    if not len(rows):
        rows = np.flatnonzero(np.isin(host.kind, (HostKind.OP, HostKind.RUNTIME, HostKind.ANNOTATION)))
    return int(np.bincount(host.thread[rows]).argmax()) if len(rows) else NONE


def _is_main(text: str) -> bool:
    """On Linux the main thread's number is the process's."""
    pid, _, rest = text.partition("/")
    return rest.split(" ")[0] == pid


def choose_window(trace: Trace, steps: list[HostStep], start: Int64, end: Int64, launch: Int64, wanted: str) -> Window:
    """The window of one device. `start`, `end` [N] are its GPU events, `launch` their rows in the host table.

    `steps`: first step start to last step end, and on to the end of the last kernel launched in them. `gpu`: first to
    last GPU event. `auto`: steps where there are some.
    """
    gpu = (int(start.min()), int(end.max()))
    if wanted == "gpu":
        return Window(*gpu, "gpu", "first to last GPU event")
    if not steps:
        if wanted == "steps":
            raise UserError(
                f"{trace.path}: --window steps, but the trace has no {STEP_PREFIX}N; call prof.step() after every "
                "step, or use --window gpu"
            )
        return Window(*gpu, "gpu", f"first to last GPU event; the trace has no {STEP_PREFIX}N")
    first, last = steps[0].start, steps[-1].end
    linked = launch != NONE
    launched = at_rows(trace.host.start, launch)
    ours = linked & (launched >= first) & (launched < last)
    if not ((end > first) & (start < last)).any() and not ours.any():
        return Window(*gpu, "gpu", f"first to last GPU event; no GPU event lies in {_span(steps)}")
    until = max(last, int(end[ours].max())) if ours.any() else last
    extended = f", to the last kernel launched in it (+{(until - last) / 1e6:.3f} ms)" if until > last else ""
    return Window(first, until, "steps", f"{_span(steps)}{extended}")


def _span(steps: list[HostStep]) -> str:
    return steps[0].name if len(steps) == 1 else f"{steps[0].name} to {steps[-1].name.removeprefix(STEP_PREFIX)}"


def host_window(trace: Trace, steps: list[HostStep]) -> Window:
    """For a trace without a device: the steps, or everything the host did."""
    if steps:
        return Window(steps[0].start, steps[-1].end, "steps", _span(steps))
    host: HostEvents = trace.host
    rows = np.isin(host.kind, (HostKind.OP, HostKind.ANNOTATION, HostKind.RUNTIME))
    rows = rows if rows.any() else np.ones(len(host), bool)
    begin, end = int(host.start[rows].min()), int(host.end[rows].max())
    return Window(begin, end, "host", f"first to last host event; the trace has no {STEP_PREFIX}N")
