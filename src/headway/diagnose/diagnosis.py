"""The answer: account, waterfall, ranked findings, what is left. One type for traces, run folders and both."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.account.account import Account
from headway.account.events import Flops
from headway.account.tree import RUN
from headway.account.waterfall import Waterfall, waterfall
from headway.diagnose.case import Case, Finder, case_of
from headway.diagnose.facts import DeviceFacts, HostKind, JobFacts, RankFacts
from headway.diagnose.figures import trace_figures
from headway.diagnose.finding import OF_TRACE, Finding, rank, top_remedies
from headway.diagnose.findings import (
    attention,
    communication,
    data_loading,
    fragmentation,
    garbage,
    host_busy,
    host_sync,
    link,
    loss,
    optimizer,
    padding,
    pipeline,
    precision,
    prefill,
    ranks,
    recompiles,
    recompute,
    steps,
)
from headway.diagnose.findings.memory import of_snapshot
from headway.diagnose.findings.of_run import available, findings_of_run
from headway.diagnose.recording import recording, without_recording
from headway.diagnose.run_facts import RunFacts
from headway.diagnose.snapshot import MemoryFacts
from headway.diagnose.view import View, ms

FINDERS: tuple[Finder, ...] = (
    padding.find,
    fragmentation.find,
    optimizer.find,
    loss.find,
    attention.find,
    host_sync.find,
    data_loading.find,
    communication.find,
    link.find,
    ranks.find,
    pipeline.find,
    recompute.find,
    precision.find,
    recompiles.find,
    garbage.find,
    host_busy.find,
    prefill.find,
    steps.find,
)

# Below these shares of the window, what is surely won together, and what could be, is not worth an evening.
NEARLY_CLEAN, NEARLY_CLEAN_AT_MOST = 0.05, 0.15
NOTABLE_RECORDING = 0.02
# An idle device without a cause is not a clean one.
UNEXPLAINED = 0.20
_BACKWARD = re.compile(r"bwd|backward|bprop|dq_dk|dot_do_o|convert_dq", re.IGNORECASE)


@dataclass(frozen=True)
class Largest:
    """One kind of work that holds much of the window. share is of the window, 0 to 1."""

    label: str
    ns: int
    share: float


@dataclass(frozen=True)
class Diagnosis:
    """What was found. All times are of a window of `wall_ns`; `job` or `run` (or both) is what it was read from."""

    source: str
    kind: str
    device: str
    window: str
    wall_ns: int
    account: Account | None
    idle: Mapping[str, int]
    fall: Waterfall | None
    findings: tuple[Finding, ...]
    largest: tuple[Largest, ...]
    notes: tuple[str, ...] = ()
    partial: bool = False
    job: JobFacts | None = field(default=None, repr=False)
    run: RunFacts | None = field(default=None, repr=False)
    memory: MemoryFacts | None = None

    @property
    def rank(self) -> RankFacts | None:
        """The rank that was looked at closely; None without a trace."""
        return case_of(self.job).view.rank if self.job else None

    @property
    def won_low(self) -> float:
        """Share of the window that all findings together surely win back."""
        return min(1.0, sum(item.gain[0] for item in self.findings if not item.within))

    @property
    def unexplained(self) -> float:
        """Share of the window in which the device was idle, for which no finding claims the time. 0 to 1."""
        if self.kind != "trace" or not self.wall_ns:
            return 0.0
        claimed = sum(ns for path, ns in self._claimed().items() if path.startswith(("idle.", "host.", "compile")))
        known = claimed + (host_sync.first_use_ns(case_of(self.job).view) if self.job else 0)
        return max(0.0, (sum(self.idle.values()) - known) / self.wall_ns)

    def _claimed(self) -> Counter[str]:
        """ns by class of time; of a finding and those within it the one that claims most of a class counts."""
        claimed: Counter[str] = Counter()
        for item in self.findings:
            if not item.within:
                together = Counter(item.claims)
                for part in self.findings:
                    if part.within == item.name:
                        together |= Counter(part.claims)
                claimed.update(together)
        return claimed

    @property
    def advice(self) -> str:
        """Where the device idles much and no finding claims it: what to record, so that a cause can be named."""
        if self.run is not None and not self.run.steps:
            return "nothing can be said: no step was finished"
        if self.unexplained < UNEXPLAINED:
            return ""
        host = self.rank.host if self.rank else None
        ranges = 'put `torch.profiler.record_function("save")` and the like around what the loop does'
        if 2 * self.idle.get("unknown", 0) >= sum(self.idle.values()):
            how = "the trace lacks what the host did: record again with `ProfilerActivity.CPU` beside `.CUDA`"
        elif host is not None and bool((host.kind == HostKind.PYTHON).any()):
            how = f"{ranges}: no Python function of the trace fills it"
        else:
            how = f"record again with `with_stack=True`, or {ranges}"
        return f"the device idles {self.unexplained:.1%} of the window, which no finding claims: {how}"

    @property
    def clean(self) -> bool:
        high = sum(item.gain[1] for item in self.findings if not item.within)
        known = all(item.gain_known for item in self.findings)
        return known and self.unexplained < UNEXPLAINED and self.won_low < NEARLY_CLEAN and high < NEARLY_CLEAN_AT_MOST

    @property
    def verdict(self) -> str:
        """One sentence: what to think of it."""
        if not self.wall_ns:
            return "nothing can be said: no step was finished" if self.run else "nothing to account for"
        rest = ", ".join(f"{item.label} {item.share:.1%}" for item in self.largest[:2])
        what = "the largest things left beside matrix products" if self.job else "most of it"
        what += " in its newest trace" if self.job and self.run else ""
        left = f"; {what}: {rest}" if rest else ""
        if self.unexplained >= UNEXPLAINED and not self.findings:
            return f"the device is idle for {self.unexplained:.1%} of the window, and no cause was found{left}"
        if not self.findings:
            return f"clean: nothing found that would win time{left}"
        if self.clean:
            return f"nearly clean: {self.won_low:.1%} to win{left}"
        first = next(item for item in self.findings if not item.within)
        return f"first of all: {first.title}{' (seen in its newest trace)' if first.of_trace else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for --json, diagnosis.json and the page."""
        return {
            "version": 1,
            "source": self.source,
            "kind": self.kind,
            "device": self.device,
            "window": self.window,
            "wall_ns": self.wall_ns,
            "verdict": self.verdict,
            "account": self.account.to_dict() if self.account else None,
            "idle": dict(self.idle),
            "waterfall": [dataclasses.asdict(row) for row in self.fall.rows] if self.fall else [],
            "findings": [item.to_dict() for item in self.findings],
            "remedies": [
                {"name": remedy.name, "low": remedy.gain[0], "high": remedy.gain[1], "change": dict(remedy.change),
                 "setting": remedy.setting, "check": remedy.check, "for": [item.name for item in items]}
                for remedy, items in top_remedies(self.findings)
            ],
            "advice": self.advice,
            "largest": [dataclasses.asdict(item) for item in self.largest],
            "trace": trace_figures(self.job, self.rank) if self.job and self.rank else None,
            "steps_counted": len(self.run.steps) if self.run else None,
            "efficiency": _efficiency_dict(self.rank),
            "memory": _memory_dict(self.memory),
            "communication_names": list(self.job.comm_names) if self.job else [],
            "notes": list(self.notes),
            "partial": self.partial,
        }  # fmt: skip


def diagnose_job(
    job: JobFacts,
    memory: MemoryFacts | None = None,
    memory_free: float | None = None,
    memory_text: str = "",
) -> Diagnosis:
    """Diagnoses traces that were read and accounted (one rank or all of a job)."""
    case = case_of(job, memory_free, memory_text)
    view = case.view
    device = view.device
    notes = [*job.notes, *view.rank.notes, *device.notes]
    if job.comparison is not None and job.comparison.refused:
        notes.append(f"ranks are not compared: {job.comparison.refused}")
    notes += host_sync.first_use_note(view)
    found = [*findings_of(case), *(of_snapshot(memory, view.wall_ns) if memory else ())]
    source = view.rank.path if len(job.ranks) == 1 else f"{len(job.ranks)} ranks, looked at closely: {view.rank.path}"
    return Diagnosis(
        source=source,
        kind="trace",
        device=device.name or ("CPU" if device.kind == "cpu" else "unknown device"),
        window=f"{device.window.text}",
        wall_ns=view.wall_ns,
        account=device.account,
        idle={name: ns for name, ns in device.shares.idle.items() if ns},
        fall=_fall(device.account, _flops(device), _peak(device)),
        findings=tuple(rank(found, view.available())),
        largest=largest(view),
        notes=tuple(dict.fromkeys([*notes, *_recorded(found, view.wall_ns)])),
        partial=job.partial,
        job=job,
        memory=memory,
    )


def _recorded(found: Sequence[Finding], wall_ns: int) -> list[str]:
    """A note where recording matters to an upper bound."""
    most = max((item.recorded_ns or 0 for item in found), default=0)
    if most < NOTABLE_RECORDING * wall_ns:
        return []
    return [
        f"recording the trace took up to {most / wall_ns:.0%} of the window (estimated from its operators): the upper "
        "bounds are shares of the rest"
    ]


def _flops(device: DeviceFacts) -> Flops:
    """FLOPs of the window; where they are unknown, proportions that split compute as far as padding is known."""
    known = device.efficiency
    if known is not None and known.flops is not None:
        return known.flops
    if known is not None and known.tokens is not None and known.slots is not None:
        return Flops(useful=known.tokens, padding=known.slots - known.tokens)
    return Flops(useful=1)


def _peak(device: DeviceFacts) -> float | None:
    """The peak, where MFU is known: only then are there FLOPs to hold against it."""
    known = device.efficiency
    return known.peak_flops if known is not None and known.mfu is not None else None


def findings_of(case: Case) -> list[Finding]:
    found = [finding for find in FINDERS for finding in find(case)]
    taken = recording(case.view) if found else 0
    return [without_recording(finding, case.view, taken) for finding in found]


def diagnose_run(
    run: RunFacts,
    trace: Diagnosis | None = None,
    memory: MemoryFacts | None = None,
    more: Sequence[Finding] = (),
) -> Diagnosis:
    """Diagnoses a run folder, with the diagnosis of its newest periodic trace where there is one.

    A cause that the run's own records show is taken from them (they cover every step); what only a trace can see is
    scaled from the trace's window to the run's steps.
    """
    found = [*findings_of_run(run), *more]
    have = {item.name for item in found}
    if trace is not None:
        found += [scaled_to(item, run.wall_ns) for item in trace.findings if item.name not in have]
    if memory is not None:
        found += of_snapshot(memory, run.wall_ns)
    account = run.account
    flops = sum((line.flops for line in run.steps), Flops())
    first, last = (run.steps[0].step, run.steps[-1].step) if run.steps else (0, 0)
    notes = list(run.problems)
    if trace is None:
        notes.append("no periodic trace in the run folder: what only kernels show (fusing, overlap) is not looked for")
    else:
        notes.append(f"kernels from {trace.source}")
    if run.traced:
        spent = sum(line.cost_ns for line in run.history.traces)
        cost = f"; recording and writing took the loop {ms(spent)}" if spent else ""
        notes.append(f"{len(run.traced):,} steps of periodic traces are left out: a trace makes them longer{cost}")
    return Diagnosis(
        source=str(run.folder.root),
        kind="run",
        device=run.device,
        window=f"steps {first:,} to {last:,}, rank 0, without each session's first steps" if run.steps else "no step",
        wall_ns=run.wall_ns,
        account=account,
        idle=trace.idle if trace else {},
        fall=_fall(account, flops, run.peak_flops) if account else None,
        findings=tuple(rank(found, available(run))),
        largest=trace.largest if trace else _largest_of_run(account),
        notes=tuple(notes),
        partial=bool(run.bad_lines) or not run.steps or (trace is not None and trace.partial),
        job=trace.job if trace else None,
        run=run,
        memory=memory,
    )


def scaled_to(item: Finding, wall_ns: int) -> Finding:
    """The same shares of another window. Its classes are the trace's own, so they are named apart."""
    factor = wall_ns / item.wall_ns if item.wall_ns else 0.0
    claims = {f"{OF_TRACE}{path}": int(ns * factor) for path, ns in item.claims.items()}
    lower = min(int(item.lower_ns * factor), sum(claims.values()))
    recorded = int((item.recorded_ns or 0) * factor)
    return dataclasses.replace(item, claims=claims, lower_ns=lower, wall_ns=wall_ns, recorded_ns=recorded)


def _fall(account: Account, flops: Flops, peak: float | None = None) -> Waterfall | None:
    """The waterfall of a window: all of it counts as productive, the losses are the step's. With `peak`, in FLOPs."""
    run = Account.close(RUN, account.wall_ns, {"productive": account.wall_ns})
    try:
        return waterfall(run, account, flops, peak if flops.computed else None)
    except ValueError:
        return waterfall(run, account, flops, None)


def largest(view: View, count: int = 6) -> tuple[Largest, ...]:
    """What holds most of the window beside matrix products, which are the work itself."""
    events = view.device.events
    parts: dict[str, int] = {}
    backward = view.named(_BACKWARD.pattern) | view.from_op(r"[Bb]ackward")
    for kind in view.device.by_kind:
        mask = view.of_kind(kind) & view.computing
        if kind in ("matmul", "convolution") or not mask.any():
            continue
        if kind == "attention":
            parts["attention forward"] = view.time(mask & ~backward)
            parts["attention backward"] = view.time(mask & backward)
        else:
            parts[kind] = view.time(mask)
    shares = view.device.shares
    parts |= {"exposed communication": shares.exposed_comm_ns, "idle": shares.idle_ns, "copies": shares.exposed_mem_ns}
    wall = max(1, view.wall_ns)
    order = sorted((item for item in parts.items() if item[1] > 0), key=lambda item: -item[1])
    return tuple(Largest(label, ns, ns / wall) for label, ns in order[:count]) if len(events) else ()


def _largest_of_run(account: Account | None) -> tuple[Largest, ...]:
    if account is None:
        return ()
    leaves = [(path, account.total(path)) for path in account.tree.leaves() if account.total(path)]
    leaves.sort(key=lambda item: -item[1])
    return tuple(Largest(path, ns, ns / account.wall_ns) for path, ns in leaves[:6])


def _efficiency_dict(rank: RankFacts | None) -> dict[str, Any] | None:
    known = rank.device().efficiency if rank else None
    if known is None:
        return None
    flops = msgspec.structs.asdict(known.flops) if known.flops is not None else None
    if flops is not None:  # JSON's readers have 64 bits for a whole number
        flops = {name: value if value < 2**63 else float(value) for name, value in flops.items()}
    return {**dataclasses.asdict(dataclasses.replace(known, flops=None)), "flops": flops}


def _memory_dict(memory: MemoryFacts | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    return {**dataclasses.asdict(memory), "fragmentation": memory.fragmentation}


def trace_line(diagnosis: Diagnosis) -> dict[str, Any]:
    """The part of a `TraceLine` that a diagnosis knows."""
    device = diagnosis.rank.device() if diagnosis.rank else None
    return {
        "wall_ns": diagnosis.wall_ns,
        "account": dict(diagnosis.account.parts) if diagnosis.account else {},
        "idle": dict(diagnosis.idle),
        "utilisation": device.shares.utilisation if device else None,
        "kernels": device.fragmentation.kernels if device else 0,
        "findings": [[item.name, item.remedy, *item.gain] for item in _first(diagnosis.findings)],
        "note": "; ".join(diagnosis.notes[:3]),
    }


def _first(findings: Iterable[Finding], count: int = 8) -> list[Finding]:
    return [item for item in findings if not item.within][:count]
