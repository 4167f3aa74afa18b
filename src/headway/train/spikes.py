"""A run's guard against spikes: limits for every step, and what happens when one is passed (docs/spikes.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headway.account.errors import Stopped
from headway.config.guard import GuardConfig
from headway.data.batch import BadDocuments
from headway.data.feed import Fed, stand_in
from headway.data.global_batch import GlobalBatch, Position
from headway.data.stream import Stream
from headway.guard.process_group import control
from headway.guard.quarantine import Quarantine, Why
from headway.guard.spikes.cause import Cause, Look, find_cause
from headway.guard.spikes.figures import GRADIENT, LOSS, UPDATE, Figures
from headway.guard.spikes.policy import Policy
from headway.guard.spikes.watcher import NOT_FINITE, Alarm, Limits, Watcher
from headway.train.controls import Controls
from headway.train.figures import Detail, Local, figures_of
from headway.train.memory import Fit, random_state, set_random_state
from headway.train.optim import gradient_names
from headway.train.rollback import Went
from headway.train.step import Learner

_TRIES = 8  # times that the same batch may turn out to have another bad document
_KEPT = 4  # steps that may still be told of after later ones were launched


@dataclass
class Launched:
    """A step on its way: what is needed to make it again."""

    step: int
    batch: GlobalBatch
    limits: Limits
    random: Any
    detail: Detail | None = None
    figures: Figures | None = None

    @property
    def position(self) -> Position:
        return self.batch.position


GoBack = Callable[[int], Went | None]
"""Puts the newest checkpoint of an earlier step into the live model; None where there is none."""
Tell = Callable[[str, int, str, str], None]
"""fault, step, evidence, action"""


@dataclass
class Spikes:
    """Watches the steps of a run; all ranks see the same figures and decide alike, without asking each other.

    rank, world: this rank among those that share the data. kind: what the batches are made of. vocabulary: of the
    model.
    """

    config: GuardConfig
    learner: Learner
    fit: Fit
    stream: Stream
    quarantine: Quarantine
    rank: int
    world: int
    kind: str
    tell: Tell
    go_back: GoBack
    clip_norm: float | None
    vocabulary: int
    newest: Callable[[], int | None] = lambda: None
    """The step of the newest checkpoint on this machine."""
    watcher: Watcher = field(init=False)
    controls: Controls = field(init=False)
    policy: Policy = field(init=False)
    alarms: list[Alarm] = field(default_factory=list)
    let_through: int = 0
    """A step whose level is accepted as the new one."""
    _launched: dict[int, Launched] = field(default_factory=dict)
    _aside_lately: list[tuple[int, int]] = field(default_factory=list)
    """(step, documents set aside)"""
    _unreadable: list[Position] = field(default_factory=list)

    def __post_init__(self) -> None:
        stores = (store.vocab_size for store in self.stream.view.stores)  # a Megatron set's is what its type can hold
        self.watcher = Watcher(uniform=math.log(min(self.vocabulary, *stores)))
        self.controls = Controls(self.stream.fingerprint)
        config = self.config
        self.policy = Policy(config.actions, config.lower_lr, config.for_steps, config.within)

    # -- every step ----------------------------------------------------------------------------------------------------

    def prepare(self, step: int, batch: GlobalBatch) -> Limits | None:
        """Before a step is made; None where nothing is to be held back."""
        self.learner.clip_norm = self.policy.clip_at(step, self.clip_norm)
        if self.config.spikes == "off":
            return None
        if step == self.let_through:
            self.watcher.accept(step)
        limits = self.watcher.limits(step, self.kind)
        self._launched[step] = Launched(step, batch, limits, random_state())
        self._launched.pop(step - _KEPT, None)
        return limits if self.config.spikes == "act" else None

    def made(self, step: int) -> None:
        """A step was launched: keeps what explains it."""
        if step in self._launched:
            self._launched[step].detail = self.learner.detail

    def observe(self, step: int, values: list[float]) -> None:
        """The figures of a step have arrived on the host."""
        launched = self._launched.get(step)
        if launched is None or self.alarms:
            return  # what came behind a spike was held back and will be made again
        launched.figures = figures = figures_of(step, values, self.kind)
        alarms = self.watcher.judge(figures, launched.limits)
        if not alarms and self.config.spikes == "act" and figures.finite and not figures.taken:
            alarms = [Alarm(step, LOSS, figures.nll, figures.nll, self.watcher.tracks[LOSS].centre)]
        if not alarms and figures.finite:
            self.controls.note(step, launched.position, launched.limits)
        if self.config.spikes == "act":
            self.alarms = alarms
        elif alarms:
            self.tell(*self._evidence(alarms, launched), "only watched (guard.spikes: watch)")

    def lr_factor(self, step: int) -> float:
        return self.policy.lr_factor(step)

    def stand_in(self, position: Position, bad: BadDocuments) -> Fed:
        """Padding for a rank that could not read its documents; raises `bad` again where nothing may be set aside."""
        if not self.config.quarantine or sum(at == position for at in self._unreadable) > _TRIES:
            raise bad
        return stand_in(self.stream, position, bad, self.rank, self.world, self.learner.device)

    def set_unreadable_aside(self, fed: Fed, step: int) -> None:
        """What any rank could not read is set aside on all of them. Collective."""
        found = sorted({one for part in control().gather(list(fed.bad)) for one in part})
        self._unreadable.append(fed.batch.position)
        self.set_aside([(raw, Why(f"cannot be read: {why}")) for raw, why in found], fed.batch.position, step)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        self.tell("bad document", step, found[0][1] + more, f"set aside {len(found)} documents")

    def went_back(self, step: int) -> None:
        """Training stands behind `step` again; steps after it are forgotten."""
        self.watcher.rewind(step + 1)
        self.controls.rewind(step + 1)
        self._launched = {at: launched for at, launched in self._launched.items() if at <= step}

    # -- what happened -------------------------------------------------------------------------------------------------

    def judge(self) -> Verdict:
        """Finds the cause of the alarm and brings the state back to before it. Collective; the alarm is over then.

        Raises Stopped on all ranks when the run must stop, after telling of it.
        """
        alarms, self.alarms = self.alarms, []
        at = self._launched[alarms[0].step]
        fault, step, evidence = self._evidence(alarms, at)
        self.learner.release()
        held = at.figures is not None and not at.figures.taken and at.limits is not None
        only_update = all(alarm.figure == UPDATE for alarm in alarms)
        cause = self.cause(at) if held and not only_update else Cause("everything")
        verdict = Verdict(fault, step, evidence, at, cause.looks)
        if cause.kind == "documents":
            return self._set_aside(verdict, cause, at)
        if cause.kind == "transient":
            if self.policy.again_too_often(step, "transient"):
                self._stop(verdict, "the same step failed again and again, each time clean when looked at once more")
            return verdict.act("transient: clean when computed again; the step is made once more")
        return self._without_documents(verdict, at, first_bad=step - 1 if only_update else step)

    def _without_documents(self, verdict: Verdict, at: Launched, first_bad: int) -> Verdict:
        """No few documents explain it: the batch is looked at again at an older state, one that is sound itself."""
        sound = self._at_older_state(verdict, at, first_bad)
        if verdict.went is None:
            return self._nothing_older(verdict, at)
        if sound is False:
            self._stop(verdict, "not the data's fault: earlier data is bad as well at every checkpoint there is")
        cause = self.cause(at)
        verdict.looks += cause.looks
        if cause.kind == "documents":
            return self._set_aside(verdict, cause, at)
        if cause.kind == "transient":
            return self._not_data(verdict, at, "the batch is clean at an older state")
        if sound is None:
            return self._not_data(verdict, at, "no earlier batch is known to judge the older state by")
        if cause.look is None or not cause.look.figures.finite:
            return self._not_data(verdict, at, "the batch is not finite at an older state either")
        if self.policy.again_too_often(at.step, "shift"):
            self._stop(verdict, "the data's level was accepted as new, and the same step failed again")
        self.let_through = at.step
        return verdict.act(
            f"the data has changed: at step {verdict.went.step}, where earlier data is as it was, all of the batch is "
            "so too; accepted as the level"
        )

    def _at_older_state(self, verdict: Verdict, at: Launched, before: int) -> bool | None:
        """Goes back, checkpoint by checkpoint, to a state at which a batch that was clean is clean still.

        The newest ones may hold what the spike has done. None: no such batch is known; False: there is no such state.
        """
        sound: bool | None = None
        while (went := self.go_back(before)) is not None:
            verdict.went = went
            if "guard" in went.meta:
                self._load(went.meta["guard"])
            sound = self._is_sound(verdict, at)
            if sound is not False:
                return sound
            verdict.harmed.append(went.step)
            before = went.step
        return sound

    def _is_sound(self, verdict: Verdict, at: Launched) -> bool | None:
        """Whether a batch that was clean is clean at the state that training is in; None where none is known."""
        for known in reversed(self.controls.kept):
            batch = self.stream.global_batch(known.position)
            if not batch.trained_tokens:
                continue
            look = self.look(Launched(known.step, batch, at.limits, at.random), frozenset())
            set_random_state(at.random)
            if look is not None:
                verdict.looks += 1
                return known.is_normal(look.figures)
        return None

    def _not_data(self, verdict: Verdict, at: Launched, because: str) -> Verdict:
        action = self.policy.next_action(at.step)
        went = verdict.went
        said = f"not the data's fault: {because}"
        if verdict.harmed:
            said += f", and the checkpoints of steps {', '.join(map(str, verdict.harmed))} were harmed and are deleted"
        if action is None or went is None:
            self._stop(verdict, f"{said}; guard.actions offers nothing more")
            raise AssertionError("unreachable")
        if action == "lower_lr":
            self.policy.lower_from(at.step)
            done = f"learning rate × {self.config.lower_lr} until step {self.policy.lr_until}"
        elif action == "clip":
            norm = math.exp(self.watcher.tracks[GRADIENT].centre)
            self.policy.clip_from(at.step, norm)
            done = f"gradients clipped at {norm:.4g} until step {self.policy.clip_until}"
        else:
            verdict.jump = at.batch.next
            done = "the batches up to the spike are left out"
        return verdict.act(f"{said}; went back to step {went.step}, {done}")

    def _nothing_older(self, verdict: Verdict, at: Launched) -> Verdict:
        finite = at.figures is not None and at.figures.finite
        if not finite or self.policy.again_too_often(at.step, "unknown"):
            self._stop(verdict, "no few documents explain it, and there is no older checkpoint to go back to")
        if self._is_sound(verdict, at) is False:
            return self._harmed(verdict, at)
        self.let_through = at.step
        return verdict.act(
            "no few documents explain it and there is no checkpoint to judge it by: accepted as the new level"
        )

    def _harmed(self, verdict: Verdict, at: Launched) -> Verdict:
        """The state is bad, and there is none to go back to: what is offered is tried from here."""
        said = "not the data's fault: earlier data is bad now as well, and there is no older checkpoint"
        action = self.policy.next_action(at.step)
        if action is None:
            self._stop(verdict, f"{said}; guard.actions offers nothing more")
        if action == "clip":
            norm = math.exp(self.watcher.tracks[GRADIENT].centre)
            self.policy.clip_from(at.step, norm)
            done = f"gradients clipped at {norm:.4g} until step {self.policy.clip_until}"
        else:  # with nothing to go back to, leaving data out mends no state
            self.policy.lower_from(at.step)
            done = f"learning rate × {self.config.lower_lr} until step {self.policy.lr_until}"
        self.let_through = at.step
        return verdict.act(f"{said}; went on, {done}")

    def _set_aside(self, verdict: Verdict, cause: Cause, at: Launched) -> Verdict:
        documents = list(cause.documents)
        named = ", ".join(self.stream.view.origin(raw) for raw in documents[:4]) + (" …" if len(documents) > 4 else "")
        if not self.config.quarantine:
            self._stop(verdict, f"caused by {named}; guard.quarantine is false")
        allowed = self.config.most_batches * max(1, len(at.batch.documents))
        happened = [documents for when, documents in self._aside_lately if when > at.step - self.config.within]
        if sum(happened) + len(documents) > allowed:
            self._stop(verdict, f"{sum(happened)} documents were set aside lately, and now {named}")
        self._aside_lately.append((at.step, len(documents)))
        self.policy.happened.append((at.step, "documents"))
        losses = cause.look.documents if cause.look is not None else {}
        reason = f"{verdict.fault}: {verdict.evidence}"
        self.set_aside(
            [(raw, Why(reason, losses.get(raw, (math.nan, 0))[0])) for raw in documents], at.position, at.step
        )
        verdict.documents = tuple(documents)
        where = f"went back to step {verdict.went.step}, " if verdict.went is not None else ""
        return verdict.act(f"{where}set aside {len(documents)} of {len(at.batch.documents)} documents: {named}")

    def set_aside(self, documents: list[tuple[int, Why]], position: Position, step: int) -> None:
        """Takes raw documents out of the stream, from this epoch on."""
        self.quarantine.add(documents, position, step)
        self.stream = self.quarantine.stream(self.stream)

    def cause(self, at: Launched) -> Cause:
        """Whose fault it is, at the state that training is in; leaves the random state as the step found it."""

        def clean(figures: Figures) -> bool:
            return figures.finite and not at.limits.beyond(figures.watched())

        try:
            return find_cause(
                lambda masked: self.look(at, masked), clean, self.watcher.tracks[LOSS].centre, self.config.most_share
            )
        finally:
            set_random_state(at.random)

    def look(self, at: Launched, masked: frozenset[int]) -> Look | None:
        """A step's batch without these raw documents; None where nothing trained is left. Collective."""
        view = self.stream.view
        stream = self.stream.with_quarantine([view.locate(raw) for raw in masked], epoch=at.position.epoch)
        batch = stream.global_batch(at.position)
        if not batch.trained_tokens:
            return None
        micro = [each.to(self.learner.device) for each in batch.micro_batches(self.rank, self.world)]
        set_random_state(at.random)
        row = self.fit.run(lambda parts: self.learner.look(parts, batch.trained_tokens), micro)
        assert self.learner.detail is not None
        figures = figures_of(at.step, row.tolist(), self.kind)
        return Look(figures, self._all_documents(self.learner.detail, batch.documents))

    def _all_documents(self, detail: Detail, everything: np.ndarray) -> dict[int, tuple[float, int]]:
        """Every document of the batch on any rank; those too short to have a loss that says something lie at the usual
        one, and are suspected last."""
        mine = list(zip(detail.documents.ids().tolist(), detail.documents.all_means().tolist(), strict=True))
        usual = self.watcher.tracks[LOSS].centre
        found = {int(raw): (usual, 0) for raw in everything.tolist()}
        broken = torch.isnan(detail.table[:, 1]).any()
        for part in control().gather(mine):
            for raw, mean in part:
                if raw in found and (not math.isnan(mean) or bool(broken)):
                    before = found[raw][0]
                    worse = math.isnan(mean) or (not math.isnan(before) and abs(mean - usual) > abs(before - usual))
                    found[raw] = (mean if worse else before, 1)
        return found

    def _evidence(self, alarms: list[Alarm], at: Launched) -> tuple[str, int, str]:
        """(fault, step, evidence) in words; names parameter, rank and documents where something is not finite."""
        said = "; ".join(str(alarm) for alarm in alarms)
        if alarms[0].figure != NOT_FINITE or at.detail is None:
            return "spike", at.step, said
        detail = at.detail
        names, norms = gradient_names(self.learner.replicas.module), detail.gradients.tolist()
        bad = [name for name, norm in zip(names, norms, strict=False) if not math.isfinite(norm)]
        rows = [Local._make(row) for row in detail.table.tolist()]
        ranks = [rank for rank, row in enumerate(rows) if not math.isfinite(row.objective)]
        gradients = [rank for rank, row in enumerate(rows) if row.broken]
        parts = control().gather(bad)
        bad = list(dict.fromkeys(name for part in parts for name in part))
        if ranks:
            said += f"; the loss of rank {', '.join(map(str, ranks))}"
        if bad:
            said += f"; the gradient of {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
            said += f" on rank {', '.join(map(str, gradients))}" if gradients else ""
        return "not finite", at.step, said

    def _stop(self, verdict: Verdict, why: str) -> None:
        self.tell(verdict.fault, verdict.step, verdict.evidence, f"stopped: {why}")
        raise Stopped(
            f"step {verdict.step}: {verdict.evidence}: {why}; stopped. Look at incidents.jsonl, lower optim.lr or "
            f"clean the data, then start again: {self._goes_on_from(verdict)}",
            told=True,
        )

    def _goes_on_from(self, verdict: Verdict) -> str:
        """What a start after a stop will do; the checkpoints behind `went` are deleted by now."""
        step = verdict.went.step if verdict.went is not None else self.newest()
        if step is None:
            return "there is no checkpoint, the run begins anew"
        if step in verdict.harmed:
            return (
                f"the only checkpoint left is that of step {step}, and it is harmed: move it away first, or the run "
                "goes on from it"
            )
        return f"the run goes on from the checkpoint of step {step}"

    # -- saved ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "watcher": self.watcher.state(),
            "policy": self.policy.state(),
            "moved": self.learner.sample.state(),
            "let_through": self.let_through,
            "controls": self.controls.state(),
            "aside_lately": [list(one) for one in self._aside_lately],
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """From a checkpoint, when a run starts; None from one that was made before there was a guard."""
        if state is None:
            return
        self._load(state)
        self.policy.load(state["policy"])
        self.let_through = state["let_through"]
        self._aside_lately = [(step, count) for step, count in state["aside_lately"]]

    def _load(self, state: dict[str, Any]) -> None:
        """What belongs to the weights. What has been tried, and what was set aside, is not taken back."""
        self.watcher.load(state["watcher"])
        self.learner.sample.load(state["moved"])
        self.controls.load(state.get("controls"))


@dataclass
class Verdict:
    """What happened and what is done; `went`: None where the state before the step was still there."""

    fault: str
    step: int
    evidence: str
    at: Launched
    looks: int = 0
    harmed: list[int] = field(default_factory=list)
    """Steps of checkpoints that hold what the spike has done."""
    action: str = ""
    documents: tuple[int, ...] = ()
    went: Went | None = None
    jump: Position | None = None
    """Where the data goes on, when batches are left out."""

    def act(self, action: str) -> Verdict:
        self.action = action
        return self
