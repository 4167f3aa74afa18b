"""Causes planted in real runs of the trainer, found in the folders that they leave; each run is the other's likeness."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest

from headway.diagnose.diagnosis import Diagnosis, diagnose_run
from headway.diagnose.finding import Finding
from headway.diagnose.job import Options
from headway.diagnose.open import open_diagnosis
from headway.diagnose.run_facts import read_run
from headway.diagnose.said import Said
from headway.record.files import write_json
from headway.train.run import Run
from tiny import run_file
from train.running import run


def of_run(folder: Path, **sections: dict[str, object]) -> Diagnosis:
    common = {"train": {"steps": 10, "global_batch_sequences": 2}, "checkpoint": {"at_end": False}}
    run(run_file(folder, **{**common, **sections}))
    traces = list((folder / "runs" / "tiny").glob("traces/step-*"))
    until = time.monotonic() + 120
    # On a busy machine the background may outlive the run.
    while not all((trace / "diagnosis.json").exists() for trace in traces) and time.monotonic() < until:
        time.sleep(0.1)
    return open_diagnosis([folder / "runs" / "tiny"], Options(), Said())


def found(diagnosis: Diagnosis, name: str) -> Finding | None:
    return next((item for item in diagnosis.findings if item.name == name), None)


def test_causes_planted_in_runs_are_found_in_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next_batch, collect, learn = Run.next_batch, Run.collect_garbage, Run.learn

    def slowly(self: Run) -> object:
        with self.clock.phase("data"):
            time.sleep(0.08)
        return next_batch(self)

    with monkeypatch.context() as planted:
        planted.setattr(Run, "next_batch", slowly)
        slow = of_run(
            tmp_path / "slow",
            model={"attention": "eager", "recompute": "full"},
            data={"slots": 512},  # scores are then a fifth of the device's time: far over what is worth a finding
            log={"quiet": True, "profile_every": 5, "profile_steps": 2},
        )
    assert slow.run is not None and slow.rank is not None  # its records and its own trace
    starved = found(slow, "data-starvation")
    assert len(slow.run.steps) >= 3  # behind the first two, without the traced ones
    assert starved is not None and starved.upper_ns >= len(slow.run.steps) * 80_000_000
    assert starved.proposal().change
    assert found(slow, "attention-unfused") is not None
    assert found(slow, "garbage-collection") is None
    # The same records on a device of much memory: a process without a device has none of its own to fill.
    assert found(slow, "recompute-with-free-memory") is None
    write_json(slow.run.folder.environment, {"gpus": [{"name": "planted", "memory_bytes": 2**40}]})
    roomy = found(diagnose_run(read_run(slow.run.folder.root)), "recompute-with-free-memory")
    assert roomy is not None and "model.recompute=full" in roomy.evidence[1]

    kept: list[list[int]] = []

    def collecting(self: Run) -> None:
        if not kept:
            kept.extend([number] for number in range(300_000))
        with self.clock.phase("host.gc"):
            gc.collect()
        collect(self)

    def unevenly(self: Run, fed: object) -> None:
        if self.step == 6:
            time.sleep(2.5)
        learn(self, fed)  # type: ignore[arg-type]

    with monkeypatch.context() as planted:
        planted.setattr(Run, "collect_garbage", collecting)
        planted.setattr(Run, "learn", unevenly)
        stopped = of_run(tmp_path / "stopped", log={"quiet": True, "profile_every": None})
    assert found(stopped, "garbage-collection") is not None
    uneven = found(stopped, "unstable-steps")
    assert uneven is not None and "step 7" in uneven.evidence[0] and uneven.symptom == "unstable step time"
    waited = found(stopped, "data-starvation")
    assert waited is None or waited.upper_ns < starved.upper_ns / 2
