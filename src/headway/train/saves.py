"""When a run saves and where to, and what is told of it. The saving itself is `guard.tiers`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headway.account.errors import Stopped
from headway.account.events import CheckpointLine
from headway.config.checkpoint import CheckpointConfig
from headway.guard.layout import CheckpointFailed
from headway.guard.process_group import control, is_main
from headway.guard.tiers import Event, Tiers
from headway.guard.tree import Tree
from headway.guard.upkeep import Keep
from headway.train.cadence import Cadence, Every
from headway.train.reporter import Reporter

HEALTHY_STEPS = 32
"""Steps without a spike after which a state counts as sound: the newest such checkpoint stays on the disk."""
_WITHOUT = "went on without it"


class Snapshot(NamedTuple):
    """Everything that a checkpoint holds. `moving`: keys of what changes between optimizer steps."""

    tensors: Tree
    moving: frozenset[str]
    meta: dict[str, Any]
    rank_state: dict[str, Any]


@dataclass
class Saves:
    """The saving policy of one run. All ranks call the same methods in the same order, except `tell` and `fence`."""

    config: CheckpointConfig
    tiers: Tiers
    reporter: Reporter
    say: Callable[[str], None]
    cadence: Cadence
    session_s: Callable[[], float]
    _owed: set[str] = field(default_factory=set)
    _failures: int = 0
    _not_removed: set[str] = field(default_factory=set)
    _blocked_s: float = 0.0

    @property
    def fence(self) -> Callable[[], None]:
        return self.tiers.fence

    def is_due(self, step: int) -> bool:
        """Whether a save is due, or was and had to wait for the one before."""
        self._owed |= self.cadence.due(step)
        if "disk" in self._owed and self.config.remote is not None and self.config.remote.every is None:
            self._owed.add("remote")
        return bool(self._owed)

    def begin(self, step: int, snapshot: Callable[[], Snapshot]) -> None:
        """Starts what is due. A save that fails is an incident, and training goes on with the checkpoint before.

        Raises Stopped on every rank when more saves in a row failed than `checkpoint.max_failures` allows.
        """
        self._stop_when_hopeless()
        self._owed -= self.cadence.too_early(step, self._owed, self.session_s)
        if not self._owed:
            return
        blocks = bool(self.tiers.off)
        if not blocks:
            try:
                if not self._stage(step, snapshot):
                    return  # the save before is not done
            except CheckpointFailed as failure:
                blocks = True
                self._not_staged(step, str(failure))
        if self.tiers.off:
            self.cadence.every["memory"] = None  # it would be due for ever
        if blocks and "disk" in self._owed:
            self._block(step, snapshot)
        # Of a save that failed, too: else the next one is due at the next step.
        self.cadence.decide(step, self._owed, self.session_s())
        self._owed = set()

    def _stage(self, step: int, snapshot: Callable[[], Snapshot]) -> bool:
        """Begins the save beside the training; False while it has to wait. Raises CheckpointFailed where it cannot be
        made so."""
        started = time.perf_counter()
        state = snapshot()
        begun = self.tiers.save(
            step,
            state.tensors,
            state.meta,
            state.rank_state,
            moving=state.moving,
            disk="disk" in self._owed,
            remote="remote" in self._owed,
            keep=self._keep(step),
        )
        if begun:
            self._begun(started)
        return begun

    def _not_staged(self, step: int, why: str) -> None:
        """There can be none beside the training (`off`), or this one had no room in memory."""
        if self.tiers.off:
            self.say(f"checkpoints: {self.tiers.off}")
            return
        instead = "the disk's was written while training waited" if "disk" in self._owed else _WITHOUT
        self._failed(Event("memory", step, False, why), instead)

    def _begun(self, started: float) -> None:
        self._blocked_s = time.perf_counter() - started
        self.cadence.meter.begun(self._blocked_s)

    def now(self, step: int, snapshot: Callable[[], Snapshot]) -> None:
        """Returns when the state is on the disk; nothing would come after it, so a failure is an error (Stopped).

        Its upload begins; `close` waits for it at the end of a run, not when the run is preempted.
        """
        state = snapshot()
        remote = self.config.remote is not None
        try:
            events = self.tiers.save_now(
                step, state.tensors, state.meta, state.rank_state, remote=remote, keep=self._keep(step)
            )
        except CheckpointFailed as failure:
            raise Stopped(f"step {step} could not be saved: {failure}") from failure
        for event in events:
            self._tell(event)

    def tell(self) -> None:
        """Tells what was published or failed since the last call. Never waits."""
        for event in self.tiers.poll():
            self._tell(event)

    def step(self, wall_s: float) -> None:
        """Told of every step's length: those beside a save show what it costs."""
        self.cadence.meter.step(wall_s, self.tiers.saver.busy)

    def close(self, *, over: bool, wait: bool) -> None:
        """`over`: the run goes on from no memory checkpoint. `wait`: until an upload in work is done, too."""
        if wait:
            self.tiers.settle(self.config.timeout_s)
        self.tell()
        self.tiers.close(over=over)

    def _block(self, step: int, snapshot: Callable[[], Snapshot]) -> None:
        started = time.perf_counter()
        state = snapshot()
        try:
            events = self.tiers.save_now(
                step, state.tensors, state.meta, state.rank_state, keep=self._keep(step), direct=True
            )
        except CheckpointFailed as failure:
            self._failed(Event("disk", step, False, str(failure)))
            return
        self._begun(started)
        for event in events:
            self._tell(event)

    def _keep(self, step: int) -> Keep:
        return Keep(last=self.config.keep, every=self.config.keep_every, proven=step - HEALTHY_STEPS)

    def _tell(self, event: Event) -> None:
        if not event.ok:
            self._failed(event)
            return
        if event.tier == "disk":
            self._failures = 0
        self.reporter.tell(
            CheckpointLine(
                session=self.reporter.session,
                step=event.step,
                time=time.time(),
                path=event.path,
                bytes=event.bytes,
                seconds=event.seconds,
                tier=event.tier,
                blocked_s=self._blocked_s,
                cost_s=self.cadence.meter.published(event.tier, event.seconds),
            )
        )

    def _failed(self, event: Event, action: str = _WITHOUT) -> None:
        if event.tier == "prune":
            if event.why not in self._not_removed:  # every save tries again
                self._not_removed.add(event.why)
                self.say(f"checkpoints: not removed: {event.why}")
            return
        if event.tier == "saver":
            fault, action = "checkpoint saver died", "a new one took the save over"
        else:
            fault = "checkpoint failed"
            if event.tier == "disk":
                self._failures += 1
        evidence = event.why if event.tier in ("disk", "saver") else f"{event.tier}: {event.why}"
        if is_main():
            self.reporter.incident(fault, event.step, evidence, action)
        elif event.tier in ("saver", "peer"):  # every rank's, every node's
            self.reporter.local_incident(fault, evidence, action, 0.0)

    def _stop_when_hopeless(self) -> None:
        allowed = self.config.max_failures
        if allowed is not None and control().broadcast(self._failures) > allowed:
            raise Stopped(
                f"checkpoint.max_failures: more than {allowed} saves in a row failed (causes: incidents.jsonl); "
                "stopped rather than train on without a checkpoint"
            )


def every_of(config: CheckpointConfig) -> dict[str, Every]:
    """The interval of each tier; uploads without one of their own go with the disk's."""
    uploads = config.remote.every if config.remote is not None else None
    return {"memory": config.memory_every, "disk": config.every, "remote": uploads}
