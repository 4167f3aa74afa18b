"""Turns finished steps into lines for the observers and the rank's own file, one step late so that nobody waits."""

from __future__ import annotations

import math
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headway.account.account import Account
from headway.account.errors import Stopped
from headway.account.events import Flops, Line, Observer, RankLine, StepLine
from headway.account.run_clock import RunClock
from headway.account.totals import Totals
from headway.data.global_batch import Position
from headway.guard.contention import CpuWait
from headway.guard.ledger import Ledger
from headway.record.jsonl import PatientWriter, complain
from headway.train.clock import ClosedStep, StepClock
from headway.train.figures import COLUMNS
from headway.train.scalars import Scalars

# The first steps compile; later ones meet a new bucket of table size or longest length now and then.
COMPILING_STEPS = 2
MAX_LATE_GRAPHS = 16
# Ten let a stray bad batch pass, but not a broken run.
MAX_SKIPPED = 10
SPIKE = "spike"
_REMEMBERED = 10_000  # steps: more than lie between two checkpoints that one goes back to
OVERFLOW = "float16 overflow, loss scale halved"


@dataclass(frozen=True)
class StepFacts:
    """What is known about a step when the host has launched it. scalars is None where nothing was learned."""

    step: int
    position: Position
    next: Position
    lr: float
    sequences: int
    slots: int
    tokens: int
    trained_tokens: int
    local_tokens: int
    local_trained_tokens: int
    documents: int
    micro_batches: int
    flops: Flops
    scalars: Scalars | None


@dataclass
class Reporter:
    """Closes the books on each step: totals, the run's clock, the observers (rank 0) and the rank's file."""

    session: int
    rank: int
    clock: StepClock
    run_clock: RunClock
    totals: Totals
    session_totals: Totals
    observers: Sequence[Observer]
    rank_file: PatientWriter
    ledger: Ledger
    peak_flops: float | None
    compiled: bool = False
    watch: Callable[[int, list[float]], None] | None = None
    """Hears a step's number and the values of its `figures.Row`, before anything is told."""
    skipped_in_a_row: int = 0
    cost_ns: int = 0
    on_step: Callable[[float], None] | None = None
    cpu_wait: CpuWait = field(default_factory=CpuWait)
    _pending: deque[StepFacts] = field(default_factory=deque)
    _complained: set[str] = field(default_factory=set)
    _before: deque[tuple[int, Totals, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _graphs: int = 0
    _steps_told: int = 0
    _late_graphs: int = 0

    def launched(self, facts: StepFacts) -> None:
        self._pending.append(facts)

    def tell_finished(self, in_flight: int = 0) -> None:
        """Tells all steps but the `in_flight` newest, waiting for the device where it has not finished one.

        Every rank tells the same steps at the same point of the loop, so that all stop together where one must.
        """
        while len(self._pending) > in_flight:
            facts = self._pending[0]
            closed = self.clock.take()
            started = time.perf_counter_ns()
            self._pending.popleft()
            skipped = self._skipped(facts)
            self._remember(facts.step, closed, skipped)
            if self.watch is not None and facts.scalars is not None:
                self.watch(facts.step, facts.scalars.values())
            self.run_clock.step(closed.host_wall_ns, closed.account.total("checkpoint"), wasted=skipped is not None)
            if self.on_step is not None:
                self.on_step(closed.host_wall_ns / 1e9)
            line = self._line(facts, closed.account, skipped)
            self.totals.add(line, facts.documents)
            self.session_totals.add(line, facts.documents)
            self._tell_rank(facts, closed.account)
            self.cost_ns += time.perf_counter_ns() - started
            self.tell(line)
            self._judge(line)

    def _remember(self, step: int, closed: ClosedStep, skipped: str | None) -> None:
        productive = closed.host_wall_ns - closed.account.total("checkpoint") if skipped is None else 0
        self._before.append((step, self.totals.copy(), productive))

    def go_back(self, step: int, totals: Totals | None = None) -> float:
        """Steps behind `step` do not count: they will be made again. Returns the seconds that they took.

        totals: those of the state that training goes back to, where it is further back than the last steps.
        """
        lost = [before for before in self._before if before[0] > step]
        if totals is not None:
            self.totals = totals
        elif lost:
            self.totals = lost[0][1]
        lost_ns = sum(wall for _, _, wall in lost)
        self.run_clock.lose(lost_ns)
        self._before = deque((before for before in self._before if before[0] <= step), self._before.maxlen)
        self.skipped_in_a_row = 0
        return lost_ns / 1e9

    def tell(self, line: Line) -> None:
        """An observer whose disk is full costs its lines, not the run; said once."""
        for observer in self.observers:
            try:
                observer.tell(line)
            except OSError as error:
                self._complain(observer, error)

    def _complain(self, observer: Observer, error: OSError) -> None:
        name = type(observer).__name__
        if name not in self._complained:
            self._complained.add(name)
            where = f"{error.filename}: " if error.filename else ""
            complain(f"{name}: lines are lost ({where}{error.strerror or error}); free room there")

    def flush(self) -> None:
        """Tries again what a full disk did not take; costs nothing where nothing waits."""
        self.ledger.flush()
        if self.rank_file.waiting:
            self.rank_file.flush()

    def close(self) -> None:
        """Lets the observers, the rank's file and the ledger go; what could not be written is said."""
        for observer in self.observers:
            try:
                observer.close()
            except OSError as error:
                self._complain(observer, error)
        self.rank_file.close()
        self.ledger.close()

    def incident(
        self, fault: str, step: int, evidence: str, action: str, seconds_lost: float = 0.0, steps_lost: int = 0
    ) -> None:
        """Adds a line to the ledger (rank 0) and says it aloud."""
        if self.rank == 0:
            self._write_incident(fault, step, evidence, action, seconds_lost, steps_lost)

    def local_incident(self, fault: str, evidence: str, action: str, seconds_lost: float) -> None:
        """The same for what one rank alone has met, whichever it is, in the step that it works on."""
        self._write_incident(fault, self._step_in_work(), evidence, action, seconds_lost)

    def _step_in_work(self) -> int:
        return self.totals.steps + len(self._pending) + 1

    def _write_incident(
        self, fault: str, step: int, evidence: str, action: str, seconds_lost: float, steps_lost: int = 0
    ) -> None:
        self.ledger.record(
            fault, step, evidence=evidence, action=action, seconds_lost=seconds_lost, steps_lost=steps_lost
        )

    def out_of_memory(self, evidence: str, action: str, seconds: float) -> None:
        """Tells of an attempt at a step that some rank had no memory for."""
        self.incident("out of memory", self._step_in_work(), evidence, action, seconds)

    def _skipped(self, facts: StepFacts) -> str | None:
        """Why the step updated nothing; None when it did."""
        _, _, _, taken, scale, finite, *_ = self._values(facts)
        if facts.scalars is None:
            return "no trained token"
        if taken:
            return None
        if finite:
            return SPIKE
        return OVERFLOW if scale is not None and scale > 1 else "not finite"

    def _line(self, facts: StepFacts, account: Account, skipped: str | None) -> StepLine:
        loss, nll, norm, _, scale, *_ = self._values(facts)
        seconds = account.wall_ns / 1e9
        # What no update came of was not useful, however real its tokens were.
        flops = facts.flops if skipped is None else Flops(rework=facts.flops.computed)
        computed = flops.useful + flops.recompute
        return StepLine(
            session=self.session,
            step=facts.step,
            time=time.time(),
            epoch=facts.position.epoch,
            documents=facts.next.documents if facts.next.epoch == facts.position.epoch else facts.documents,
            loss=_finite(loss),
            nll=_finite(nll),
            grad_norm=_finite(norm),
            lr=facts.lr,
            skipped=skipped,
            sequences=facts.sequences,
            slots=facts.slots,
            tokens=facts.tokens,
            trained_tokens=facts.trained_tokens,
            wall_ns=account.wall_ns,
            account=dict(account.parts),
            flops=flops,
            mfu=flops.useful / seconds / self.peak_flops if self.peak_flops and seconds else None,
            hfu=computed / seconds / self.peak_flops if self.peak_flops and seconds else None,
            run_ns=dict(self.run_clock.account().parts),
            memory_bytes=memory_bytes(),
            micro_batches=facts.micro_batches,
            recompiles=self._recompiles(),
            loss_scale=_finite(scale),
        )

    @staticmethod
    def _values(facts: StepFacts) -> list[float] | list[None]:
        return facts.scalars.values() if facts.scalars is not None else [None] * len(COLUMNS)

    def _tell_rank(self, facts: StepFacts, account: Account) -> None:
        self.rank_file.append(
            RankLine(
                session=self.session,
                step=facts.step,
                rank=self.rank,
                wall_ns=account.wall_ns,
                account=dict(account.parts),
                tokens=facts.local_tokens,
                trained_tokens=facts.local_trained_tokens,
                memory_bytes=memory_bytes(),
                host=socket.gethostname(),
                waited_ns=self.cpu_wait.since_last(),
            )
        )

    def _recompiles(self) -> int:
        if not self.compiled:
            return 0
        before, self._graphs = self._graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return self._graphs - before

    def _watch_compilations(self, line: StepLine) -> None:
        """Says once when compiling does not end: buckets bound the cases that a layer meets, so a storm has a cause."""
        self._steps_told += 1
        if self._steps_told <= COMPILING_STEPS:
            return
        before, self._late_graphs = self._late_graphs, self._late_graphs + line.recompiles
        if before <= MAX_LATE_GRAPHS < self._late_graphs:
            self.incident(
                "recompiles",
                line.step,
                f"{self._late_graphs} graphs compiled after the session's first {COMPILING_STEPS} steps, "
                f"{MAX_LATE_GRAPHS} are expected at most",
                "training goes on, slower; TORCH_LOGS=recompiles names the cause, train.compile=false avoids it",
            )

    def _judge(self, line: StepLine) -> None:
        """Stops a run that no longer learns; its checkpoints stay as they are."""
        self._watch_compilations(line)
        if line.nll == 0.0:
            raise Stopped(
                f"step {line.step}: the loss is exactly 0 over {line.trained_tokens} trained tokens: the model sees "
                "its answers (documents leak, or labels are the inputs); stopped"
            )
        # A loss scale that is still above 1 is being lowered: it finds its place within 16 steps of its start.
        if line.skipped != OVERFLOW:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if line.skipped else 0
        if self.skipped_in_a_row > MAX_SKIPPED:
            raise Stopped(
                f"step {line.step}: {self.skipped_in_a_row} steps in a row could not update the weights "
                f"({line.skipped}); lower optim.lr or look at the data, then resume from the newest checkpoint"
            )


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; a step whose figures are not finite says so in `skipped`."""
    return value if value is not None and math.isfinite(value) else None


def memory_bytes() -> int:
    """Peak memory so far: of the CUDA device (allocated), else the process's resident set."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
