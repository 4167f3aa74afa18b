"""What a run did, read from its folder: every figure of the terminal's summary and of the report.

Pure reading: no torch, nothing written. A resume inflates nothing: only the copy of a step that is in the final
weights counts, and what was done twice is shown as lost.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from headway.account.account import Account
from headway.account.events import CheckpointLine, EvalLine, Flops, Incident, Quarantined, StepLine
from headway.account.waterfall import Waterfall, waterfall
from headway.account.whole_run import SessionTime, whole_run
from headway.record.folder import RunFolder
from headway.record.incidents import read_incidents
from headway.record.jsonl import read_jsonl
from headway.record.sessions import History, Session, read_history
from headway.watch.checks import add_up, problems_of, run_ns_of, stepped_ns
from headway.watch.ranks import Ranks, read_ranks

CONVENTION = (
    "MFU: useful FLOPs (real document tokens, attention per document; no padding, no recompute) / (step wall clock x "
    "peak). HFU adds recompute. Padded counts padding as if it were useful, as many trainers do."
)
RUNNING = "running or killed"
_NO_FLOPS = Flops()


@dataclass(frozen=True)
class Counts:
    """Sums over steps. The three token counts are never mixed; trained_tokens are of steps that updated something."""

    steps: int = 0
    skipped_steps: int = 0
    sequences: int = 0
    slots: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    wall_ns: int = 0
    flops: Flops = _NO_FLOPS

    @classmethod
    def of(cls, lines: Iterable[StepLine]) -> Counts:
        items = list(lines)
        return cls(
            steps=len(items),
            skipped_steps=sum(line.skipped is not None for line in items),
            sequences=sum(line.sequences for line in items),
            slots=sum(line.slots for line in items),
            tokens=sum(line.tokens for line in items),
            trained_tokens=sum(line.trained_tokens for line in items if line.skipped is None),
            wall_ns=sum(line.wall_ns for line in items),
            flops=sum((line.flops for line in items), _NO_FLOPS),
        )

    @property
    def fill(self) -> float | None:
        """Real tokens a slot."""
        return self.tokens / self.slots if self.slots else None


@dataclass(frozen=True)
class SessionFacts:
    """One session. wall_ns is its run account's whole; gap_s the time nobody ran before it; begin_ns what it took from
    there to its first step (start-up and compilation)."""

    session: int
    started: float
    gap_s: float
    resumed_from: int
    world_size: int
    device: str
    peak_flops: float | None
    peak_source: str
    reason: str
    wall_ns: int
    kept: Counts
    lost: Counts
    account_cost_ns: int | None
    begin_ns: int = 0


@dataclass(frozen=True)
class Utilisation:
    """Shares of the peak, 0 to 1. All None, with the reason, where the peak of a session is unknown.

    mfu, hfu and padded are over the wall clock of the kept steps; mfu_wall is over the whole run's.
    """

    mfu: float | None = None
    hfu: float | None = None
    padded: float | None = None
    mfu_wall: float | None = None
    reason: str = ""
    convention: str = CONVENTION


@dataclass(frozen=True)
class Summary:
    """A run, read. `problems` holds what does not add up; `bad_lines` what could not be read, by file."""

    run: str
    status: str
    step: int
    planned_steps: int
    sessions: tuple[SessionFacts, ...]
    kept: Counts
    lost: Counts
    run_account: Account | None
    step_account: Account | None
    utilisation: Utilisation
    fall: Waterfall | None
    first_loss: float | None
    last_loss: float | None
    last_loss_steps: int
    evals: tuple[EvalLine, ...]
    checkpoints: tuple[CheckpointLine, ...]
    skipped: dict[str, int]
    ranks: Ranks | None
    incidents: tuple[Incident, ...]
    quarantined: int
    peak_memory_bytes: int
    problems: tuple[str, ...]
    bad_lines: dict[str, list[tuple[int, str]]]
    idle_tail: int = 0
    """Steps at the end that updated nothing: the weights are those from before them."""

    @property
    def goodput(self) -> float | None:
        """Productive steps' share of the wall clock (ETTR)."""
        return self.run_account.share("productive") if self.run_account else None

    @property
    def account_cost(self) -> float | None:
        """What the account itself took, as a share of the wall clock, over the sessions that ended in order."""
        ended = [item for item in self.sessions if item.account_cost_ns is not None and item.wall_ns]
        wall_ns = sum(item.wall_ns for item in ended)
        return sum(item.account_cost_ns or 0 for item in ended) / wall_ns if wall_ns else None

    def per_second(self, kind: str, over: str = "steps") -> float | None:
        """Rate of ``slots``, ``tokens`` or ``trained_tokens``, over the kept steps' wall clock or the ``run``'s."""
        wall_ns = self.kept.wall_ns if over == "steps" else self.run_account.wall_ns if self.run_account else 0
        return int(getattr(self.kept, kind)) / (wall_ns / 1e9) if wall_ns else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for --json. The ranks' tables stay in their files; their spread is here."""
        skip = {"run_account", "step_account", "ranks"}
        plain: dict[str, Any] = msgspec.to_builtins(
            {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in skip}
        )
        plain["run_account"] = self.run_account.to_dict() if self.run_account else None
        plain["step_account"] = self.step_account.to_dict() if self.step_account else None
        plain["goodput"] = self.goodput
        plain["account_cost"] = self.account_cost
        for kind in ("slots", "tokens", "trained_tokens"):
            plain[f"{kind}_per_s"] = self.per_second(kind)
            plain[f"{kind}_per_s_of_run"] = self.per_second(kind, "run")
        plain["ranks"] = _ranks_dict(self.ranks)
        return plain


def _ranks_dict(ranks: Ranks | None) -> dict[str, Any] | None:
    if ranks is None:
        return None
    spread = [{**dataclasses.asdict(row), "spread": row.spread} for row in ranks.spread]
    return {"world_size": ranks.world_size, "steps": len(ranks.steps), "left_out": ranks.left_out, "spread": spread}


def read_summary(run: RunFolder, history: History | None = None) -> Summary:
    """Reads everything a run folder says. Damaged lines are listed, never an error.

    Args:
        run: an existing run folder.
        history: its metrics.jsonl, where the caller has read it already.
    """
    history = history or read_history(run)
    kept, lost = history.kept, history.lost
    sessions = _sessions(history, kept, lost)
    step_account, problems = add_up(kept)
    run_account = whole_run(_session_times(history.sessions, lost))
    counts = Counts.of(kept)
    said = str(history.sessions[-1].start.facts.get("convention", "")) if history.sessions else ""
    utilisation = _utilisation(sessions, counts, run_account, f"{CONVENTION} {said}".rstrip())
    problems = problems_of(history, kept) + problems
    fall = None
    if run_account is not None and step_account is not None:
        fall, trouble = _fall(run_account, step_account, counts.flops, _mean_peak(sessions))
        problems += trouble
    ranks = read_ranks(run, {(line.session, line.step) for line in kept}, sessions[-1].world_size if sessions else 0)
    incidents = read_incidents(run.incidents)
    quarantined = read_jsonl(run.quarantine, Quarantined)
    bad = {"metrics.jsonl": history.bad, "incidents.jsonl": incidents.bad, "quarantine.jsonl": quarantined.bad}
    bad.update(ranks.bad if ranks else {})
    learned = [line for line in kept if line.nll is not None]
    # A tenth of the run at most: in a short one, the last ten steps would still hold the first.
    last = learned[-max(1, min(10, len(learned) // 10)) :]
    return Summary(
        run=str(run.root),
        status=sessions[-1].reason if sessions else RUNNING,
        step=kept[-1].step if kept else 0,
        planned_steps=max((session.start.steps for session in history.sessions[-1:]), default=0),
        sessions=sessions,
        kept=counts,
        lost=Counts.of(lost),
        run_account=run_account,
        step_account=step_account,
        utilisation=utilisation,
        fall=fall,
        first_loss=next((line.nll for line in kept if line.nll is not None), None),
        last_loss=_mean_nll(last),
        last_loss_steps=len(last),
        evals=tuple(kept_evals(history)),
        checkpoints=tuple(history.checkpoints),
        skipped=dict(Counter(line.skipped for line in kept if line.skipped is not None)),
        ranks=ranks,
        incidents=tuple(incidents.items),
        quarantined=len(quarantined.items),
        peak_memory_bytes=max((line.memory_bytes for line in kept), default=0),
        problems=tuple(problems) + (ranks.problems if ranks else ()),
        bad_lines={file: lines for file, lines in bad.items() if lines},
        idle_tail=sum(1 for _ in takewhile(lambda line: line.skipped is not None, reversed(kept))),
    )


def kept_evals(history: History) -> list[EvalLine]:
    """Evaluations of weights that the run went on from: those after a later session's resume point are dropped."""
    kept = []
    for line in history.evals:
        later = [session.start.resumed_from for session in history.sessions if session.start.session > line.session]
        if all(line.step <= resumed_from for resumed_from in later):
            kept.append(line)
    return kept


def _mean_nll(lines: list[StepLine]) -> float | None:
    """By trained token: a mean of the steps' means would weigh short steps too much."""
    tokens = sum(line.trained_tokens for line in lines)
    return sum((line.nll or 0.0) * line.trained_tokens for line in lines) / tokens if tokens else None


def _session_times(sessions: Iterable[Session], lost: Iterable[StepLine]) -> list[SessionTime]:
    lost_ns: Counter[int] = Counter()
    for line in lost:
        # A step that was skipped is rework already.
        lost_ns[line.session] += stepped_ns(line) if line.skipped is None else 0
    times = []
    for session in sessions:
        run_ns = run_ns_of(session)
        skipped_ns = sum(stepped_ns(line) for line in session.steps if line.skipped is not None)
        # A session that rolled back by itself has charged those steps to rework already.
        charged_ns = max(0, run_ns.get("rework", 0) - skipped_ns)
        times.append(SessionTime(run_ns, max(0, lost_ns[session.start.session] - charged_ns)))
    return times


def _sessions(history: History, kept: list[StepLine], lost: list[StepLine]) -> tuple[SessionFacts, ...]:
    facts = []
    heard: float | None = None
    for session in history.sessions:
        start, end = session.start, session.end
        # The start line is written when the session is ready to train; its own start-up is not idle time.
        run_ns = run_ns_of(session)
        startup_s = sum(ns for path, ns in run_ns.items() if path.startswith("startup.")) / 1e9
        facts.append(
            SessionFacts(
                session=start.session,
                started=start.time,
                gap_s=max(0.0, start.time - heard - startup_s) if heard is not None else 0.0,
                resumed_from=start.resumed_from,
                world_size=start.world_size,
                device=start.device,
                peak_flops=start.peak_flops,
                peak_source=start.peak_source,
                reason=end.reason if end else RUNNING if session is history.sessions[-1] else "killed",
                wall_ns=sum(run_ns.values()),
                kept=Counts.of(line for line in kept if line.session == start.session),
                lost=Counts.of(line for line in lost if line.session == start.session),
                account_cost_ns=end.account_cost_ns if end else None,
                begin_ns=round(startup_s * 1e9) + run_ns.get("compile", 0),
            )
        )
        heard = end.time if end else session.steps[-1].time if session.steps else start.time
    return tuple(facts)


def _utilisation(sessions: tuple[SessionFacts, ...], kept: Counts, run: Account | None, convention: str) -> Utilisation:
    stepped = [item for item in sessions if item.kept.wall_ns]
    if not stepped:
        return Utilisation(reason="no step was done")
    unknown = next((item for item in stepped if not item.peak_flops), None)
    if unknown is not None:
        where = unknown.device or "an unknown device"
        return Utilisation(reason=f"the peak of {where} (session {unknown.session}) is unknown; `headway bench peak`")
    paid = sum(item.kept.wall_ns / 1e9 * (item.peak_flops or 0.0) for item in stepped)
    peak = _mean_peak(sessions)
    flops = kept.flops
    return Utilisation(
        mfu=flops.useful / paid,
        hfu=(flops.useful + flops.recompute) / paid,
        padded=(flops.useful + flops.padding) / paid,
        mfu_wall=flops.useful / (run.wall_ns / 1e9 * peak) if run and run.wall_ns and peak else None,
        convention=convention,
    )


def _mean_peak(sessions: tuple[SessionFacts, ...]) -> float | None:
    """The peak that was paid for, on average over the wall clock: sessions may have run on different machines."""
    timed = [item for item in sessions if item.wall_ns]
    if not timed or any(not item.peak_flops for item in timed):
        return None
    wall_ns = sum(item.wall_ns for item in timed)
    return sum(item.wall_ns * (item.peak_flops or 0.0) for item in timed) / wall_ns


def _fall(run: Account, step: Account, flops: Flops, peak: float | None) -> tuple[Waterfall, list[str]]:
    try:
        return waterfall(run, step, flops, peak), []
    except ValueError as error:
        return waterfall(run, step, flops, None), [f"the waterfall is drawn in seconds: {error}"]
