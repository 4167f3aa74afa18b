"""Spikes and bad documents beyond the rows of the campaign (19 to 24): on two ranks, at a resume, again and again."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from faults.spike_runs import Plant, Ran, build, material, ran, result
from faults.two_ranks import ran_on_two
from headway.account.errors import Stopped
from headway.account.events import Incident, Quarantined
from headway.bench.faults.poison import TooHighARate, garbage, longest_of, rewrite
from headway.record.jsonl import read_jsonl
from headway.train.loop import train
from headway.train.run import Run
from headway.watch.incidents import read_overview

pytestmark = pytest.mark.timeout(600)

AT, END = 38, 43
SHORT = f"train.steps={END}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return material(tmp_path_factory.mktemp("spikes"))


@pytest.fixture(scope="module")
def clean(path: Path) -> Ran:
    found = ran(path, "name=clean", SHORT)
    assert found.incidents == [] and not found.folder.quarantine.exists()
    assert any("memory: as often as pays" in line for line in found.said), "by default there is something to go back to"
    return found


def once(at: int, work: Callable[[Run], object]) -> Plant:
    """`work` when step `at` is about to be made for the first time."""

    def plant(run: Run) -> None:
        inner, fired = run.spikes.prepare, []

        def prepare(step: int, batch: object) -> object:
            if step == at and not fired:
                fired.append(step)
                work(run)
            return inner(step, batch)  # type: ignore[arg-type]

        run.spikes.prepare = prepare  # type: ignore[method-assign]

    return plant


def test_after_going_back_and_setting_aside_the_run_is_its_twin(path: Path) -> None:
    """The state breaks and a poisoned document comes at once: only at the older state does the document explain it."""
    culprit: list[int] = []

    def poison(run: Run) -> None:
        culprit.append(culprit[0] if culprit else longest_of(run, AT))
        rewrite(run, culprit[0], garbage(0, vocab=320))

    def plant(run: Run) -> None:
        poison(run)
        once(AT, scale_weights)(run)

    run = build(path, "name=both", SHORT, "checkpoint.memory_every=6")
    plant(run)
    train(run)
    found = result(run)
    (incident,) = found.incidents
    assert incident.step == AT and "went back to step 36, set aside 1 of" in incident.action
    assert incident.steps_lost == AT - 36, "one memory interval at most"
    lost = run.run_clock.parts()
    assert min(lost[part] for part in ("rework", "downtime.detect", "downtime.reload")) > 0, "all is in the account"
    aside = read_jsonl(found.folder.quarantine, Quarantined).items
    assert [document.document for document in aside] == culprit
    twin = found.folder.root.with_name("both-twin")
    twin.mkdir()
    shutil.copy(found.folder.quarantine, twin / "quarantine.jsonl")
    never_bad = ran(path, "name=both-twin", SHORT, plant=poison)
    assert never_bad.incidents == []
    assert found.losses == never_bad.losses and found.weights == never_bad.weights


def scale_weights(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.learner.replicas.module.parameters():
            parameter.mul_(3.0)


def test_weights_that_came_back_wrong_make_no_update(path: Path, clean: Ran) -> None:
    """P31: a resume whose weights lie in other places is seen by the loss of its first step, before it is made."""
    stopped = ran(path, "name=wrong", SHORT, plant=once(AT, lambda run: os.kill(os.getpid(), signal.SIGTERM)))
    assert stopped.reason == "preempted" and stopped.lines[-1].step == AT

    def scramble(run: Run) -> None:
        with torch.no_grad():
            for parameter in run.learner.replicas.module.parameters():
                parameter.copy_(parameter.roll(1, 0))

    found = ran(path, "name=wrong", SHORT, plant=scramble)
    (incident,) = found.incidents
    assert incident.fault == "spike" and incident.step == AT + 1 and incident.steps_lost == 1
    assert "not the data's fault" in incident.action and not found.folder.quarantine.exists()
    assert found.lines[-1].loss == pytest.approx(clean.lines[-1].loss, rel=0.1), "it went on from the right weights"


def test_a_rate_far_too_high_is_never_taken_for_new_data(path: Path) -> None:
    """From step 39 on every update wrecks the weights, and step 39 is saved before step 40 shows it: the verdict must
    not come from that checkpoint. What is offered does not help, so it escalates, and stops with a report."""
    said: list[str] = []
    run = build(path, "name=row24-again", "train.steps=54", "checkpoint.memory_every=3", said=said)
    run.schedule = TooHighARate(run.schedule, range(38, 99), 99)  # type: ignore[assignment]
    with pytest.raises(Stopped, match="not the data's fault") as stopped:
        train(run)
    found = result(run)
    actions = [incident.action for incident in found.incidents]
    assert "learning rate" in actions[0] and "left out" in actions[1] and actions[-1].startswith("stopped")
    assert not any("data has changed" in action for action in actions)
    assert "went back to step 36" in actions[0] and "steps 39 were harmed" in actions[0]
    assert "the run goes on from the checkpoint of step 36" in str(stopped.value)
    assert read_overview(found.folder).failures == 1, "the ledger says that it stopped"
    again = build(path, "name=row24-again", "train.steps=54", "checkpoint.memory_every=3")
    assert again.step == 36, "as it was said"
    again.close("failed")


def test_data_that_really_changes_is_accepted_where_earlier_data_is_as_it_was(path: Path) -> None:
    def plant(run: Run) -> None:
        batch = run.spikes.stream.global_batch(run.position)
        for step in range(1, END + 1):
            for raw in batch.documents if step >= AT else ():
                rewrite(run, int(raw), garbage(int(raw), vocab=320))
            batch = run.spikes.stream.global_batch(batch.next)

    found = ran(path, "name=changed", SHORT, "checkpoint.memory_every=3", plant=plant)
    (incident,) = found.incidents
    assert incident.step == AT and "the data has changed: at step 36" in incident.action
    assert not found.folder.quarantine.exists() and found.lines[-1].step == END and found.lines[-1].skipped is None


def test_two_shards_skip_together_and_the_one_with_the_nan_is_named(path: Path) -> None:
    layout = ("parallel.fsdp=2", "train.steps=16")

    def plant(run: Run, rank: int) -> None:
        if rank == 1:
            once(12, nan_in_activations)(run)

    name = "two"
    found = ran_on_two(path, f"name={name}", *layout, plant=plant)
    twin = ran_on_two(path, f"name={name}-twin", *layout, plant=lambda run, rank: None)
    assert [one["weights"] for one in found] == [one["weights"] for one in twin]
    assert found[0]["losses"] == twin[0]["losses"]
    (incident,) = read_jsonl(path.parent / "runs" / name / "incidents.jsonl", Incident).items
    assert incident.step == 12 and "on rank 1" in incident.evidence and "weight" in incident.evidence


def nan_in_activations(run: Run) -> None:
    """FSDP's own backward hooks see sharded parameters: the NaN goes in where the gradient is made."""
    layer = run.learner.replicas.module.model.layers[0].mlp

    def poison(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        hook.remove()
        output.register_hook(lambda grad: grad * math.nan)

    hook = layer.register_forward_hook(poison)


def test_two_ranks_set_the_same_document_aside(path: Path) -> None:
    culprit: list[int] = []

    def plant(run: Run, rank: int) -> None:
        culprit.append(culprit[0] if culprit else longest_of(run, AT))
        rewrite(run, culprit[0], garbage(0, vocab=320))

    found = ran_on_two(path, "name=two-poisoned", "parallel.fsdp=2", SHORT, plant=plant)
    (document,) = read_jsonl(path.parent / "runs" / "two-poisoned" / "quarantine.jsonl", Quarantined).items
    assert document.step == AT and found[0]["step"] == found[1]["step"] == END
