"""Small runs in this process with a fault in them, and what they left: for the rows of spikes and bad documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from headway.account.events import Incident, StepLine
from headway.account.run_clock import RunClock
from headway.config.load import load_run
from headway.record.folder import RunFolder
from headway.record.jsonl import read_jsonl
from headway.train.build import build_run
from headway.train.loop import train
from headway.train.run import Run
from headway.train.step_lines import StepLines
from tiny import config, make_chats, run_file

STEPS = 60
Plant = Callable[[Run], None]


@dataclass
class Ran:
    """losses: hexadecimal, by step, of the copy of each step that counts. weights: hash of the final ones."""

    folder: RunFolder
    lines: list[StepLine]
    weights: str
    reason: str = ""
    said: list[str] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, str]:
        return {line.step: line.loss.hex() for line in self.lines if line.loss is not None}

    @property
    def incidents(self) -> list[Incident]:
        return read_jsonl(self.folder.incidents, Incident).items


def material(folder: Path, **sections: Any) -> Path:
    """A run file whose runs have enough clean steps for spikes to be told from noise."""
    path = run_file(
        folder,
        model={"config": config(num_hidden_layers=1)},
        data={"slots": 512, "prefetch": 1},
        train={"steps": STEPS, "global_batch_sequences": 2},
        optim={"lr": 5e-3},
        schedule={"kind": "constant"},
        checkpoint={"at_end": False},
        **sections,
    )
    make_chats(folder / "chats.jsonl", count=700)
    return path


def build(path: Path, *overrides: str, said: list[str] | None = None) -> Run:
    config = load_run(path, list(overrides)).config
    return build_run(
        config, None, RunClock(), observers=lambda: [StepLines()], say=([] if said is None else said).append
    )


def ran(path: Path, *overrides: str, plant: Plant = lambda run: None) -> Ran:
    """A run to its end in this process; `plant` puts the fault in once it is built."""
    said: list[str] = []
    run = build(path, *overrides, said=said)
    plant(run)
    reason = train(run)
    return result(run, reason, said)


def result(run: Run, reason: str = "", said: list[str] | None = None) -> Ran:
    (lines,) = [each.steps for each in run.reporter.observers if isinstance(each, StepLines)]
    return Ran(RunFolder(run.config.folder), lines, weights(run), reason, said or [])


def weights(run: Run) -> str:
    found = hashlib.sha256()
    for parameter in run.learner.replicas.module.parameters():
        whole = parameter.detach()
        mine = whole.to_local() if isinstance(whole, DTensor) else whole
        found.update(mine.numpy().tobytes())
    return found.hexdigest()
