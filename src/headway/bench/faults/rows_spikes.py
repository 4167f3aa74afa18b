"""Rows about numbers that are not finite, bad documents and spikes: each against a run that was not disturbed, or that
had the same documents set aside from its start."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from headway.account.events import Quarantined
from headway.bench.faults import poison
from headway.bench.faults.case import Case
from headway.bench.faults.material import make_long_material
from headway.bench.faults.small_run import SmallRun, Strike, train_small, twin
from headway.config.load import load_run
from headway.data.global_batch import Position
from headway.record.jsonl import read_jsonl
from headway.train.data import make_stream, training_view

_AT, _STEPS = 48, 54
_DDP = ("parallel.replicate=2", "parallel.fsdp=1")
_SHORT = f"train.steps={_STEPS}"


def row_19(case: Case) -> None:
    """One NaN in one gradient on one rank: the step is skipped on all, rank and parameter named, the next is taken."""
    step, victim, names = case.dice.randint(5, 11), case.dice.randrange(2), set[str]()

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once("nan"):
            names.add(poison.nan_in_a_gradient(at.run))

    run = train_small(case, "nan", fault, *_DDP)
    _held_back(case, run, step, f"on rank {victim}", "mlp.up_proj.weight")
    case.expect(run.losses() == twin(case, *_DDP).losses(), "losses hex-equal to the twin's, after the NaN too")


def row_20(case: Case) -> None:
    """An infinite loss on one rank: the same."""
    step, victim = case.dice.randint(5, 11), case.dice.randrange(2)

    def fault(at: Strike) -> None:
        if (at.rank, at.step) == (victim, step) and at.once("infinite"):
            poison.infinite_loss()

    run = train_small(case, "infinite", fault, *_DDP)
    _held_back(case, run, step, f"the loss of rank {victim}")
    case.expect(run.losses() == twin(case, *_DDP).losses(), "losses hex-equal to the twin's")


def _held_back(case: Case, run: SmallRun, step: int, *named: str) -> None:
    case.expect(run.code == 0 and len(run.history.sessions) == 1, f"no restart, exit code 0, not {run.code}")
    case.expect(run.faults() == ["not finite"], f"one incident, not {run.faults()}")
    tries = [line.skipped for session in run.history.sessions for line in session.steps if line.step == step]
    case.expect(tries == ["not finite", None], f"skipped once, and the next clean step is taken: {tries}")
    for incident in run.incidents[:1]:
        case.expect(incident.step == step, f"in step {step}, not {incident.step}")
        case.expect(all(text in incident.evidence for text in named), f"{named} are named: {incident.evidence}")
        case.from_incident(incident)


def row_21(case: Case) -> None:
    """A document of uniform tokens."""
    _a_poisoned_document(case, poison.garbage(case.seed, vocab=200))


def row_22(case: Case) -> None:
    """A document of one token: its loss falls, what the step does to the weights does not."""
    _a_poisoned_document(case, poison.repeated(77))


def _a_poisoned_document(case: Case, how: poison.Rewrite) -> None:
    """Flagged in its step, found among the batch's documents, set aside; then as a run that never had it."""
    long, note = _long(case), case.folder / "culprit"

    def fault(at: Strike) -> None:
        if at.step == 1:
            if not note.exists():
                note.write_text(str(poison.longest_of(at.run, _AT)))
            poison.rewrite(at.run, int(note.read_text()), how)

    run = train_small(long, "poisoned", fault, _SHORT, ranks=1)
    case.expect(run.code == 0 and run.faults() == ["spike"], f"one spike, not {run.faults()}")
    for incident in run.incidents[:1]:
        case.expect(incident.step == _AT, f"flagged in its own step {_AT}, not {incident.step}")
        case.expect(incident.steps_lost == 1, f"one step lost, not {incident.steps_lost}")
        case.from_incident(incident)
    aside = _set_aside(run)
    case.expect([one.document for one in aside] == [int(note.read_text())], f"this document alone, not {aside}")
    case.expect(all(one.excerpt and one.loss is not None for one in aside), "with excerpt and loss")
    _equals_its_twin(case, long, run, fault)


def row_23(case: Case) -> None:
    """Ids beyond the vocabulary, ten times the length: in the loader, in the first batch, and before a run starts."""
    long = _long(case)
    notes = [
        (5, case.folder / "culprit-id", poison.bad_id),
        (9, case.folder / "culprit-long", poison.ten_times_as_long),
    ]

    def fault(at: Strike) -> None:
        for step, note, how in notes if at.step == 1 else ():
            if not note.exists():
                note.write_text(str(poison.longest_of(at.run, step)))
            poison.rewrite(at.run, int(note.read_text()), how)

    run = train_small(long, "unreadable", fault, "train.steps=12", ranks=1)
    _cannot_be_read(case, run, 5, 9)
    _equals_its_twin(case, long, run, fault, "train.steps=12")
    too_small = train_small(case, "small", None, "model.config.vocab_size=300", ranks=1)
    said = (case.folder / "log.txt").read_text()
    case.expect(too_small.code == 2, f"a start is refused with 2, not {too_small.code}")
    case.expect("beyond the model's vocabulary" in said and "chats.jsonl:" in said, "and the document is named")
    # Last, because it stays in this process: a bad document in the very first batch of two ranks.
    config = load_run(case.material / "run.yaml", []).config
    view = training_view(config)
    first = make_stream(config, view, 6).global_batch(Position())
    _, document = view.locate(int(first.documents[0]))
    poison.rewrite_in_every_store(document, poison.bad_id)
    run = train_small(case, "first", None)
    _cannot_be_read(case, run, 1)
    _equals_its_twin(case, case, run, None, "train.steps=12", ranks=2)


def _cannot_be_read(case: Case, run: SmallRun, *steps: int) -> None:
    case.expect(run.code == 0, f"exit code 0, not {run.code}")
    told = [(item.fault, item.step) for item in run.incidents]
    case.expect(told == [("bad document", step) for step in steps], f"a bad document each in step {steps}, not {told}")
    aside = _set_aside(run)
    case.expect([one.step for one in aside] == list(steps), f"set aside in step {steps}: {aside}")
    pairs = zip(aside, run.incidents, strict=False)
    case.expect(all(one.source in incident.evidence for one, incident in pairs), "their source is named")
    case.expect([line.step for line in run.history.kept] == list(range(1, 13)), "every step is there once")


def row_24(case: Case) -> None:
    """A learning rate that is 300 times too high for three steps: not the data's fault; nothing is set aside."""
    long = _long(case)

    def fault(at: Strike) -> None:
        if at.step == 1:
            planted = poison.TooHighARate(at.run.schedule, range(_AT - 3, _AT), 1)
            at.run.schedule = planted  # type: ignore[assignment]

    run = train_small(long, "rate", fault, _SHORT, "checkpoint.memory_every=6", ranks=1)
    case.expect(run.code == 0 and len(run.incidents) == 1, f"one incident, not {run.faults()}")
    case.expect(not run.folder.quarantine.exists(), "nothing is set aside")
    for incident in run.incidents[:1]:
        case.expect("not the data's fault" in incident.action, f"the verdict: {incident.action}")
        case.expect(1 <= incident.steps_lost <= 9, f"at most a memory interval is lost, not {incident.steps_lost}")
        case.from_incident(incident)
    undisturbed = twin(long, _SHORT, ranks=1).history.kept
    before = [line for line in run.history.kept if line.step <= _AT - 6]
    same = [line.loss for line in before] == [line.loss for line in undisturbed[: len(before)]]
    case.expect(same and len(before) == _AT - 6, "up to the checkpoint it went back to, losses are the twin's")
    case.expect(max(line.nll or 9 for line in run.history.kept[-4:]) < 4.0, "and it learns on")


def _long(case: Case) -> Case:
    """The case with the material whose runs have enough clean steps for spikes to be told from noise."""
    return Case(case.row, case.seed, case.folder, make_long_material(case.material.with_name("long")))


def _set_aside(run: SmallRun) -> list[Quarantined]:
    return read_jsonl(run.folder.quarantine, Quarantined).items


def _equals_its_twin(
    case: Case, material: Case, run: SmallRun, fault: Callable[[Strike], None] | None, *overrides: str, ranks: int = 1
) -> None:
    """Hex for hex a run that starts with the documents set aside that this one found."""
    name = f"{run.folder.root.name}-twin"
    folder = case.folder / name
    folder.mkdir()
    shutil.copy(run.folder.quarantine, folder / "quarantine.jsonl")
    other = train_small(material, name, fault, *(overrides or (_SHORT,)), ranks=ranks)
    case.expect(other.code == 0 and other.incidents == [], f"the twin with the same mask has no incident: {other.code}")
    case.expect(run.losses() == other.losses(), "losses hex-equal to a twin that started with the same mask")
