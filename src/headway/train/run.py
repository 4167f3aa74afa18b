"""A run in progress: what the loop's words mean. Assembled by `train.build`; told to observers through the reporter."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.account.errors import Stopped
from headway.account.events import EvalLine, Line, SessionEnd, SessionStart
from headway.account.run_clock import RunClock
from headway.account.totals import Totals
from headway.config.run import RunConfig
from headway.data.batch import BadDocuments
from headway.data.feed import Fed
from headway.data.global_batch import Position
from headway.guard.beacon import AGREEING, ENDING, Beacon, collectives_entered
from headway.guard.folder_lock import FolderLock
from headway.guard.garbage import is_kept
from headway.guard.integrity import check_replicas
from headway.guard.rng import rng_state
from headway.guard.signals import StopRequest, agree_to_stop
from headway.guard.training_state import Capture
from headway.guard.tree import Tree
from headway.record.jsonl import complain
from headway.train.clock import StepClock
from headway.train.decisions import KEY
from headway.train.evaluate import Evaluator
from headway.train.fitting import parts_record
from headway.train.flop_counter import FlopCounter
from headway.train.hook import StepHook
from headway.train.memory import Fit
from headway.train.reporter import Reporter, StepFacts
from headway.train.saves import Saves, Snapshot
from headway.train.scalars import Scalars
from headway.train.schedule import Schedule
from headway.train.spikes import Spikes
from headway.train.step import Learner, Unreadable
from headway.train.supply import Supply

# Python's collector runs at fixed steps, the same on every rank: a rank that collects alone makes all others wait.
_COLLECT_EVERY = 50
_COLLECT_ALL_EVERY = 2000  # the oldest generation too: what survived long is seldom garbage, and looking takes long


@dataclass
class Run:
    """Everything one rank needs to train, and the rules of when. All ranks call the same methods in the same order.

    step counts the steps made (skipped ones included); position is where the data goes on. saved_step: the newest that
    is on the disk for certain, -1 for none. decisions: what was decided by measuring, which a resume repeats.
    """

    config: RunConfig
    session_start: SessionStart
    total_steps: int
    learner: Learner
    fit: Fit
    schedule: Schedule
    supply: Supply
    spikes: Spikes
    counter: FlopCounter
    reporter: Reporter
    run_clock: RunClock
    saves: Saves
    lock: FolderLock
    stop: StopRequest
    identity: dict[str, Any]
    decisions: dict[str, Any]
    export: Callable[[], None]
    exported: Path
    evaluator: Evaluator | None = None
    hook: StepHook | None = None
    beacon: Beacon | None = None
    shards: int = 1
    step: int = 0
    position: Position = field(default_factory=Position)
    saved_step: int = -1
    _evaluated_step: int = -1
    _frozen_before: bool = False
    _capture: Capture | None = None

    @property
    def clock(self) -> StepClock:
        return self.learner.clock

    def start(self) -> None:
        if self.beacon is not None:
            self.beacon.resumed(self.step)
        self._frozen_before = is_kept()
        gc.collect()
        gc.freeze()
        gc.disable()
        self.reporter.tell(self.session_start)
        if self.config.eval.at_start and self.step == 0:
            self.evaluate()

    def has_steps_left(self) -> bool:
        if self.step >= self.total_steps:
            self._end_step()  # the last step may have to be made again
        return self.step < self.total_steps

    def begin_step(self) -> None:
        self.clock.begin_step()
        if self.beacon is not None:
            self.beacon.begin_step(self.position.documents)
        if self.hook is not None:
            with self.clock.phase("host.logging"):
                self._tell_all(self.hook.begin_step(self.step + 1))

    def tell_finished_steps(self) -> None:
        # The device works on the newest step while the host tells of the one before it.
        in_flight = 1 if self.learner.replicas.device_type == "cuda" else 0
        with self.clock.phase("host.logging"):
            self.reporter.tell_finished(in_flight)
            self.saves.tell()
            self.reporter.flush()
            self.spikes.quarantine.flush()
        if self.spikes.alarms:
            self.clock.abandon()
            self._mend()
            self.clock.begin_step()
        if self.beacon is not None:
            self.beacon.told()

    def next_batch(self) -> Fed:
        with self.clock.phase("data"):
            try:
                return self.supply.next(self.position)
            except BadDocuments as bad:
                return self.spikes.stand_in(self.position, bad)

    def learn(self, fed: Fed) -> None:
        """Makes one step. A global batch without a trained token updates nothing and is counted as skipped."""
        lr = self.learner.optimizers.set_lr(self.schedule.factor(self.step) * self.spikes.lr_factor(self.step + 1))
        scalars = None
        while fed.batch.trained_tokens:
            try:
                scalars = Scalars(self._update(fed))
                break
            except Unreadable:
                fed = self._without_unreadable(fed)
        counted = self.counter.count(fed.batch, self.fit.level)
        self.step += 1
        self.position = fed.batch.next
        if self.beacon is not None:
            self.beacon.finish_step(self.step)
        self.reporter.launched(
            StepFacts(
                step=self.step,
                position=fed.batch.position,
                next=fed.batch.next,
                lr=lr,
                sequences=sum(micro.rows for micro in fed.batch.micro),
                slots=counted.slots,
                tokens=fed.batch.tokens,
                trained_tokens=fed.batch.trained_tokens,
                local_tokens=sum(batch.tokens for batch in fed.micro_batches),
                local_trained_tokens=sum(batch.trained_tokens for batch in fed.micro_batches),
                documents=len(fed.batch.documents),
                micro_batches=len(fed.micro_batches) * self.fit.parts,
                flops=counted.flops,
                scalars=scalars,
            )
        )

    def _update(self, fed: Fed) -> Tensor:
        trained, step = fed.batch.trained_tokens, self.step + 1
        limits = self.spikes.prepare(step, fed.batch)
        row = self.fit.run(
            lambda parts: self.learner.update(parts, trained, limits, unreadable=bool(fed.bad)), fed.micro_batches
        )
        self.spikes.made(step)
        return row

    def _without_unreadable(self, fed: Fed) -> Fed:
        """The same step's batch, with the documents that some rank could not read set aside."""
        self.spikes.set_unreadable_aside(fed, self.step + 1)
        self.supply.go_to(self.position)
        return self.next_batch()

    def _mend(self) -> None:
        """Finds out whose fault an alarm is, and puts the run back to where it is clean. All ranks alike."""
        if self.hook is not None:
            self.hook.pause()
        self.reporter.tell_finished()
        began, behind = time.perf_counter(), self.step
        with self.run_clock.phase("downtime.detect"):
            verdict = self.spikes.judge()
        went = verdict.went
        if went is None:
            self.step, self.position, totals = verdict.at.step - 1, verdict.at.position, None
        else:
            self.step, self.position = went.step, Position.from_dict(went.meta["position"])
            totals = Totals.from_dict(went.meta["totals"])
            went.put_random_state_back()
            self.saved_step = -1
        lost_s = self.reporter.go_back(self.step, totals)
        self.spikes.went_back(self.step)
        self.position = verdict.jump or self.position
        self.supply.go_to(self.position)
        self.reporter.incident(
            verdict.fault,
            verdict.step,
            verdict.evidence,
            verdict.action,
            lost_s + time.perf_counter() - began,
            steps_lost=behind - self.step,
        )

    def collect_garbage(self) -> None:
        if self.step % _COLLECT_EVERY == 0:
            with self.clock.phase("host.gc"):
                gc.collect(1 if self.step % _COLLECT_ALL_EVERY else 2)

    def agree_to_stop(self) -> bool:
        with self.clock.phase("host.sync"):
            if self.beacon is not None:
                self.beacon.enter(AGREEING)
            stop = agree_to_stop(self.stop, collectives_entered())
            if self.beacon is not None:
                self.beacon.leave()
        return stop != 0

    def check_replicas(self) -> None:
        """At set steps, and before every save: none is made from a state that a flipped bit has changed."""
        every = self.config.health.digest_every
        if every is not None and (self.step % every == 0 or self.saves.is_due(self.step)):
            with self.clock.phase("host.sync"):
                check_replicas(self._state(), self.shards, self.step)

    def evaluation_is_due(self) -> bool:
        every = self.config.eval.every
        return self.evaluator is not None and every is not None and self.step % every == 0

    def evaluate(self) -> None:
        """Evaluates and tells the result, once a step; the time is the run's, not the step's."""
        if self.evaluator is None or self._evaluated_step == self.step:
            return
        if self._end_step():
            return  # went back: what is due is due later
        self._evaluated_step = self.step
        with self.run_clock.phase("evaluation"):
            found = self.evaluator.run(self.learner.replicas)
        self.reporter.tell(
            EvalLine(
                session=self.reporter.session,
                step=self.step,
                time=time.time(),
                nll=found.nll,
                tokens=found.tokens,
                documents=found.documents,
                seconds=found.seconds,
            )
        )

    def save_is_due(self) -> bool:
        return self.saves.is_due(self.step)

    def save(self, must: bool = False) -> None:
        """Begins to save the whole training state behind the last step; the copy runs beside the next one.

        A save that fails is an incident, and training goes on with the checkpoint before; with `must` (nothing would
        come after it) this returns when the state is on the disk, and a failure is an error.
        """
        if self._end_step() and not must:
            return
        if must and self.saved_step == self.step:
            return
        with self.run_clock.phase("checkpoint_stall"):
            if must:
                self.saves.now(self.step, self._snapshot)
                self.saved_step = self.step
            else:
                self.saves.begin(self.step, self._snapshot)

    def _snapshot(self) -> Snapshot:
        tree = self._state()
        assert self._capture is not None
        return Snapshot(tree, self._capture.moving, self._meta(), {"rng": rng_state()})

    def _state(self) -> Tree:
        if self._capture is None:
            lora = self.config.model.lora is not None
            module, optimizers = self.learner.replicas.module, self.learner.optimizers.items
            self._capture = Capture(module, optimizers, trainable_only=lora)
        return self._capture.tree()

    def _meta(self) -> dict[str, Any]:
        facts = self.session_start
        return {
            "step": self.step,
            "position": self.position.to_dict(),
            "totals": self.reporter.totals.to_dict(),
            "session": self.reporter.session,
            "identity": self.identity,
            KEY: {**self.decisions, **parts_record(self.fit, facts.device, facts.world_size)},
            "loss_scale": self.learner.scale.state() if self.learner.scale else None,
            "guard": self.spikes.state(),
            "quarantine": self.spikes.quarantine.state(),
        }

    def finish(self) -> None:
        """After the last step: the model as Hugging Face tools load it, a checkpoint, and the last evaluation.

        The model comes first: it is smaller, and a full disk should leave what the run was for. The evaluation comes
        last: whatever fails in it takes nothing with it.
        """
        self._end_step()
        if self.step > self.session_start.resumed_from or not self.exported.exists():
            with self.run_clock.phase("checkpoint_stall"):
                self.export()
        if self.config.checkpoint.at_end:
            try:
                self.save(must=True)
            except Stopped as error:
                shown = f"`headway report {self.config.folder}` shows the run"
                raise Stopped(f"{error}; the trained weights are in {self.exported}, {shown}") from error
        self.evaluate()

    def _tell_all(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.reporter.tell(line)

    def _end_step(self) -> bool:
        """Closes the books on every step; True where the run had to go back for that."""
        if self.hook is not None:
            with self.clock.phase("host.logging"):
                self.hook.pause()
        self.clock.end_step()
        self.reporter.tell_finished()
        if not self.spikes.alarms:
            return False
        self._mend()
        return True

    def close(self, reason: str) -> None:
        """Tells the end, also of a failure, and lets everything go."""
        if self.beacon is not None:
            self.beacon.enter(ENDING)  # the report of a long run takes longer than any step
        broken = reason not in ("done", "preempted")
        with _as_far_as_it_goes(broken):
            if self.hook is not None:
                self._tell_all(self.hook.close())
        if broken:
            self.clock.abandon()  # closing the step would ask a device that may answer nothing any more
        else:
            self.clock.end_step()
        with _as_far_as_it_goes(broken):
            self.supply.close()
        if not broken:
            self.reporter.tell_finished()
        problem = sys.exc_info()[1]
        if isinstance(problem, Stopped) and not problem.told:
            self.reporter.incident("stopped", self.step, str(problem), "stopped the run")
        with _as_far_as_it_goes(broken):
            self.saves.close(over=not broken, wait=reason == "done")
        account = self.run_clock.account()
        self.reporter.tell(
            SessionEnd(
                session=self.reporter.session,
                time=time.time(),
                step=self.step,
                reason=reason,
                wall_ns=account.wall_ns,
                run_ns=dict(account.parts),
                account_cost_ns=self._account_cost_ns(),
            )
        )
        self.reporter.close()
        self.spikes.quarantine.close()
        self.stop.close()
        self.lock.release()
        if not self._frozen_before:  # there is one pen only: what the caller put there must stay
            gc.unfreeze()
        gc.enable()

    def _account_cost_ns(self) -> int:
        """What keeping the account cost: its marks in the stream, and closing and encoding its lines."""
        return self.reporter.cost_ns + round(self.clock.marks * self.clock.mark_cost_ns())


@contextmanager
def _as_far_as_it_goes(broken: bool) -> Iterator[None]:
    """After a failure what fails in its wake (a lost device fails every call) neither hides it nor keeps the session's
    last lines back."""
    try:
        yield
    except Exception as error:
        if not broken:
            raise
        complain(f"while the run was closed: {type(error).__name__}: {str(error).splitlines()[:1]}")
