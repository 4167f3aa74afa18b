"""Rows 19 to 24 of the fault catalogue: spikes and bad documents, each against an uninterrupted twin."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from faults.spike_runs import Plant, Ran, build, garbage, longest_of, material, ran, repeated, rewrite
from faults.two_ranks import ran_on_two
from headway.account.errors import UserError
from headway.account.events import Incident, Quarantined
from headway.record.jsonl import read_jsonl
from headway.train import step as step_module
from headway.train.run import Run

pytestmark = pytest.mark.timeout(600)

AT = 48
SHORT = "train.steps=54"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return material(tmp_path_factory.mktemp("spikes"))


@pytest.fixture(scope="module")
def clean(path: Path) -> Ran:
    found = ran(path, "name=clean", SHORT)
    assert found.incidents == [] and not found.folder.quarantine.exists()
    return found


def twin_with_the_same_mask(path: Path, of: Ran, plant: Plant) -> Ran:
    """A run that starts with the documents set aside that the other one found."""
    folder = of.folder.root.with_name(f"{of.folder.root.name}-twin")
    folder.mkdir()
    shutil.copy(of.folder.quarantine, folder / "quarantine.jsonl")
    twin = ran(path, f"name={folder.name}", SHORT, plant=plant)
    assert twin.incidents == []
    return twin


def equal(one: Ran, other: Ran) -> None:
    assert one.losses == other.losses and one.weights == other.weights


def once(at: int, work: Callable[[Run], None]) -> Plant:
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


def one_nan(run: Run) -> None:
    weight = run.learner.replicas.module.model.layers[0].mlp.up_proj.weight

    def poison(grad: torch.Tensor) -> torch.Tensor:
        hook.remove()
        grad = grad.clone()
        grad[3, 4] = math.nan
        return grad

    hook = weight.register_hook(poison)


def test_row_19_one_nan_in_one_gradient(path: Path, clean: Ran) -> None:
    found = ran(path, "name=row19", SHORT, plant=once(AT, one_nan))
    (incident,) = found.incidents
    assert incident.fault == "not finite" and incident.step == AT and incident.steps_lost == 1
    assert "model.layers.0.mlp.up_proj.weight" in incident.evidence and "transient" in incident.action
    tries = [line for line in found.lines if line.step == AT]
    assert [line.skipped for line in tries] == ["not finite", None], "the next clean step is taken"
    equal(found, clean)
    assert not found.folder.quarantine.exists()


def test_row_20_an_infinite_loss(path: Path, clean: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    real, broken = step_module.forward_loss, []

    def overflow(run: Run) -> None:
        def once_infinite(*args: object, **options: object) -> object:
            found = real(*args, **options)  # type: ignore[arg-type]
            if broken:
                return found
            broken.append(1)
            return found._replace(loss=found.loss * math.inf)

        monkeypatch.setattr(step_module, "forward_loss", once_infinite)

    found = ran(path, "name=row20", SHORT, plant=once(AT, overflow))
    (incident,) = found.incidents
    assert incident.fault == "not finite" and "the loss of rank 0" in incident.evidence
    equal(found, clean)


@pytest.mark.parametrize(("name", "how"), [("21", garbage()), ("22", repeated())])
def test_row_21_and_22_a_poisoned_document(path: Path, name: str, how: Callable[[np.ndarray], np.ndarray]) -> None:
    culprit: list[int] = []

    def plant(run: Run) -> None:
        culprit.append(culprit[0] if culprit else longest_of(run, AT))
        rewrite(run, culprit[0], how)

    found = ran(path, f"name=row{name}", SHORT, plant=plant)
    (incident,) = found.incidents
    assert incident.fault == "spike" and incident.step == AT, "flagged at its own step"
    assert incident.steps_lost == 1
    (document,) = found.quarantined
    assert document.document == culprit[0] and document.line == culprit[0] + 1 and document.excerpt
    assert document.step == AT and document.loss is not None
    equal(found, twin_with_the_same_mask(path, found, plant))


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


def bad_id(ids: np.ndarray) -> np.ndarray:
    ids[len(ids) // 2] = 9999
    return ids


@pytest.mark.parametrize("how", [bad_id, lambda ids: np.tile(ids, 10)], ids=["bad id", "ten times as long"])
def test_row_23_a_document_that_cannot_be_read(path: Path, how: Callable[[np.ndarray], np.ndarray]) -> None:
    name, culprit = f"row23-{len(how(np.arange(4)))}", []

    def plant(run: Run) -> None:
        culprit.append(culprit[0] if culprit else longest_of(run, AT))
        rewrite(run, culprit[0], how)

    found = ran(path, f"name={name}", SHORT, plant=plant)
    (incident,) = found.incidents
    assert incident.fault == "bad document" and incident.step == AT
    assert [document.step for document in found.quarantined] == [AT]
    assert found.quarantined[0].source.endswith("chats.jsonl") and found.quarantined[0].source in incident.evidence
    equal(found, twin_with_the_same_mask(path, found, plant))


def too_high_a_rate(times: int) -> Plant:
    """The learning rate is 300 times too high for three steps, the first `times` times that training comes there."""

    def plant(run: Run) -> None:
        factor, came = run.schedule.factor, []

        class Planted:
            def factor(self, step: int) -> float:
                came.extend([step] * (step == AT - 3))
                high = AT - 3 <= step < AT and len(came) <= times
                return 300.0 * factor(step) if high else factor(step)

        run.schedule = Planted()  # type: ignore[assignment]

    return plant


def test_row_24_a_learning_rate_that_is_too_high_is_not_the_data_s_fault(path: Path) -> None:
    found = ran(path, "name=row24", SHORT, "checkpoint.memory_every=6", plant=too_high_a_rate(1))
    (incident,) = found.incidents
    assert "not the data's fault" in incident.action and "learning rate × 0.5" in incident.action
    assert not found.folder.quarantine.exists() and 1 <= incident.steps_lost <= 6 + 3
    assert found.lines[-1].step == 54 and max(line.nll or 0 for line in found.lines[-4:]) < 4.0
    rates = {line.step: line.lr for line in found.lines}
    assert rates[53] == pytest.approx(0.5 * rates[20]), "the offered action lasts"


def test_row_24_a_spike_that_keeps_coming_back_escalates_and_stops(path: Path) -> None:
    run = build(path, "name=row24-again", SHORT, "checkpoint.memory_every=6")
    too_high_a_rate(9)(run)
    from faults.spike_runs import result
    from headway.train.loop import train

    with pytest.raises(UserError, match="not the data's fault"):
        train(run)
    actions = [incident.action for incident in result(run).incidents]
    assert "learning rate" in actions[0] and "left out" in actions[1] and actions[-1].startswith("stopped")


@pytest.mark.parametrize("sharded", [1, 2], ids=["ddp", "fsdp"])
def test_row_19_two_ranks_skip_together_and_the_one_with_the_nan_is_named(path: Path, sharded: int) -> None:
    layout = (f"parallel.fsdp={sharded}", f"parallel.replicate={2 // sharded}", "train.steps=16")

    def plant(run: Run, rank: int) -> None:
        if rank == 1:
            once(12, nan_in_activations if sharded == 2 else one_nan)(run)

    name = f"two-{sharded}"
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


def test_row_21_two_ranks_set_the_same_document_aside(path: Path) -> None:
    culprit: list[int] = []

    def plant(run: Run, rank: int) -> None:
        culprit.append(culprit[0] if culprit else longest_of(run, AT))
        rewrite(run, culprit[0], garbage())

    found = ran_on_two(path, "name=two-poisoned", "parallel.fsdp=2", SHORT, plant=plant)
    (document,) = read_jsonl(path.parent / "runs" / "two-poisoned" / "quarantine.jsonl", Quarantined).items
    assert document.step == AT and found[0]["step"] == found[1]["step"] == 54
