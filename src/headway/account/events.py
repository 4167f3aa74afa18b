"""What a run tells its observers, as plain data. The same types are the lines of the run folder's files.

The field names and the order of each type are frozen by golden-file tests. A field may be added at the end with a
default; anything else needs a new version and a migration in `record`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one step over all ranks, closed: `computed` is the sum of the parts."""

    useful: int = 0
    padding: int = 0
    recompute: int = 0
    rework: int = 0

    @property
    def computed(self) -> int:
        return self.useful + self.padding + self.recompute + self.rework

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            useful=self.useful + other.useful,
            padding=self.padding + other.padding,
            recompute=self.recompute + other.recompute,
            rework=self.rework + other.rework,
        )


class StepLine(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="event"):
    """One optimizer step: a line of metrics.jsonl. Counts are over all ranks; times are rank 0's.

    loss is what was minimised (with z-loss and smoothing), nll the plain cross entropy in nats; both per trained
    token. They are None in a step that was skipped because it had nothing to learn from. mfu and hfu are None when
    the device's peak is unknown. account is the step's closed account on rank 0; run_ns the session's run account
    so far, so that a killed session still has one.
    """

    session: int
    step: int
    time: float
    epoch: int
    documents: int
    loss: float | None
    nll: float | None
    grad_norm: float | None
    lr: float
    skipped: str | None = None
    sequences: int
    slots: int
    tokens: int
    trained_tokens: int
    wall_ns: int
    account: dict[str, int]
    flops: Flops
    mfu: float | None = None
    hfu: float | None = None
    run_ns: dict[str, int]
    memory_bytes: int = 0
    micro_batches: int = 0
    recompiles: int = 0
    loss_scale: float | None = None


class RankLine(msgspec.Struct, frozen=True, kw_only=True, tag="rank", tag_field="event"):
    """One step on one rank: a line of ranks/00000.jsonl. waited_ns: its main thread was ready and had no CPU."""

    session: int
    step: int
    rank: int
    wall_ns: int
    account: dict[str, int]
    tokens: int = 0
    trained_tokens: int = 0
    memory_bytes: int = 0
    host: str = ""
    waited_ns: int = 0


class EvalLine(msgspec.Struct, frozen=True, kw_only=True, tag="eval", tag_field="event"):
    """One held-out evaluation, averaged by token over all ranks: a line of metrics.jsonl."""

    session: int
    step: int
    time: float
    nll: float
    tokens: int
    documents: int
    seconds: float


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint", tag_field="event"):
    """One published checkpoint: a line of metrics.jsonl.

    seconds is from the end of its copy in memory until it was published in its tier (memory, disk, remote); where the
    trainer wrote it itself, of the whole save. blocked_s is how long training stood still to begin it, cost_s what it
    took from training in all: that, and what steps under way meanwhile were slower than usual.
    """

    session: int
    step: int
    time: float
    path: str
    bytes: int
    seconds: float
    tier: str = "disk"
    blocked_s: float = 0.0
    cost_s: float = 0.0


class SessionStart(msgspec.Struct, frozen=True, kw_only=True, tag="session_start", tag_field="event"):
    """The start of one process group's life: a line of metrics.jsonl. Step `resumed_from` is 0 for a new run."""

    session: int
    time: float
    resumed_from: int
    world_size: int
    steps: int
    device: str
    peak_flops: float | None = None
    peak_source: str = ""
    facts: dict[str, Any] = {}


class SessionEnd(msgspec.Struct, frozen=True, kw_only=True, tag="session_end", tag_field="event"):
    """The orderly end of a session: a line of metrics.jsonl. reason: done | preempted | failed |
    interrupted (by a second Ctrl-C)."""

    session: int
    time: float
    step: int
    reason: str
    wall_ns: int
    run_ns: dict[str, int]
    account_cost_ns: int = 0


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, tag="trace", tag_field="event"):
    """What a periodic trace of some steps said: a line of metrics.jsonl, told when the diagnosis is done.

    step is the first traced step, traced_steps their number; path is below the run folder. account is rank 0's over
    `wall_ns`, read from the trace, idle its waiting by cause. utilisation is the union of the device's kernels over the
    window, 0 to 1. findings holds (name, remedy, low, high) of what was found, gains as shares of the window. cost_ns
    is what starting, stopping and writing took from the loop. note says why there is no account.
    """

    session: int
    step: int
    time: float
    traced_steps: int
    path: str
    wall_ns: int = 0
    account: dict[str, int] = {}
    idle: dict[str, int] = {}
    utilisation: float | None = None
    kernels: int = 0
    findings: list[tuple[str, str, float, float]] = []
    cost_ns: int = 0
    note: str = ""


Line = StepLine | EvalLine | CheckpointLine | SessionStart | SessionEnd | TraceLine


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger, incidents.jsonl. A later line with the same id replaces it (the losses known by then).

    time is the wall clock's and may jump; monotonic_ns orders the incidents of one boot of one host. seconds_lost is
    rework, downtime and stall together. phase is where in the step the rank was, detect_s from the fault to its
    detection (None: unknown), recover_s from there to the first new step (None: nothing had to recover).
    """

    id: str
    fault: str
    step: int
    time: float
    monotonic_ns: int
    host: str
    rank: int | None = None
    evidence: str = ""
    action: str = ""
    steps_lost: int = 0
    seconds_lost: float = 0.0
    link: str = ""
    phase: str = ""
    detect_s: float | None = None
    recover_s: float | None = None


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """One document set aside: a line of quarantine.jsonl.

    store: the fingerprint of its data source, number: which source it was. epoch, position: of the batch in which it
    was found. reason "released" takes an earlier line back.
    """

    store: str
    document: int
    source: str
    line: int
    reason: str
    time: float
    step: int
    loss: float | None = None
    excerpt: str = ""
    number: int = -1
    epoch: int = 0
    position: int = 0


class Observer(Protocol):
    """What the trainer tells, in order: one SessionStart, lines, one SessionEnd. Only rank 0's observers are told.

    An observer must not touch the training state, and must not block: its time counts as host.logging.
    """

    def tell(self, line: Line) -> None: ...

    def close(self) -> None: ...
