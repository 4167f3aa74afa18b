"""Rows about starts: in a folder that is taken, on other ranks, with other settings, after a polite stop."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from headway.bench.faults.case import Case
from headway.bench.faults.small_run import SmallRun, Strike, train_small, twin
from headway.guard import code_identity


def row_16(case: Case) -> None:
    """Two supervisors in one folder: the second is refused and writes nothing; the first one does not notice."""
    refused, reached = case.folder / "refused", case.folder / "reached"

    def waits(at: Strike) -> None:
        if at.step == 6:
            at.run.saves.tiers.settle()
            (reached if at.rank == 0 else reached.with_name("settled")).touch()
            _wait_for(refused)

    first = os.fork()
    if not first:
        os._exit(train_small(case, "taken", waits).code)
    _wait_for(reached)
    _wait_for(reached.with_name("settled"))
    before = _content(case.folder / "taken" / "checkpoints")
    second = train_small(case, "taken", None)
    case.expect(second.code == 2, f"the second job is refused with 2, not {second.code}")
    case.expect(
        second.incidents == [] and "another training runs in this folder" in _said(case), "in a line that says why"
    )
    case.expect(_content(case.folder / "taken" / "checkpoints") == before, "and writes nothing")
    refused.touch()
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    whole = SmallRun(code, second.folder)
    case.expect(code == 0 and whole.losses() == twin(case).losses(), f"the first one ends hex-equal, with 0: {code}")


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def row_31(case: Case) -> None:
    """Two ranks, then one, then four: the same documents in the same order, losses within rounding of the twin's."""
    _stop_at(case, "moved", 4, ranks=2)
    _stop_at(case, "moved", 8, ranks=1)
    last = train_small(case, "moved", None, ranks=4)
    whole = twin(case)
    case.expect(last.code == 0, f"exit code 0, not {last.code}")
    pairs = list(zip(last.history.kept, whole.history.kept, strict=False))
    case.expect(len(pairs) == 12 == len(last.history.kept), f"all steps are there once: {len(last.history.kept)}")
    case.expect(
        all((a.step, a.epoch, a.documents, a.tokens) == (b.step, b.epoch, b.documents, b.tokens) for a, b in pairs),
        "the same documents in the same order",
    )
    worst = max((abs((a.loss or 0) - (b.loss or 0)) for a, b in pairs), default=1.0)
    case.expect(worst < 1e-5, f"losses differ by no more than other orders of sums: {worst:.2e}")


def row_32(case: Case) -> None:
    """Other settings, an edited corpus, another release: refused with the difference; what is allowed by key goes on
    and is written down."""
    _stop_at(case, "changed", 4)
    edited, shards = case.folder / "edited.jsonl", case.folder / "shards"
    lines = (case.material / "chats.jsonl").read_text().splitlines(keepends=True)
    edited.write_text("".join([lines[1], lines[0], *lines[2:]]))
    corpus = (f"data.sources=[{edited}]", f"data.shards={shards}")
    changes = (
        ("data.seq_len=60", "data.seq_len: 64 → 60"),
        ("optim.lr=0.002", "optim.lr"),
        (corpus, "content of data source 0"),
    )
    for setting, said in changes:
        refused = train_small(case, "changed", None, *([setting] if isinstance(setting, str) else setting), ranks=1)
        case.expect(refused.code == 2, f"{setting}: refused with 2, not {refused.code}")
        case.expect(said in _said(case), f"{setting}: the difference is said")
    now, code_identity.headway.__version__ = code_identity.headway.__version__, "99.0"
    code_identity.code_identity.cache_clear()
    newer = train_small(case, "changed", None, ranks=1)
    case.expect(newer.code == 2 and f"code.headway: {now} → 99.0" in _said(case), f"another release: {newer.code}")
    shutil.rmtree(shards)
    words = ("optim.lr=0.002", "checkpoint.allow=[optim, code, content of data source 0]", *corpus)
    allowed = train_small(case, "changed", None, *words, ranks=1)
    case.expect(allowed.code == 0, f"allowed by key it goes on, not {allowed.code}")
    notes = [note for session in allowed.history.sessions for note in session.start.facts.get("notes", [])]
    for key in ("optim.lr", "code.headway", "content of data source 0"):
        case.expect(any(f"allowed to differ: {key}" in note for note in notes), f"{key} is written down: {notes}")


def row_33(case: Case) -> None:
    """SIGTERM to the whole job, twice: a last checkpoint of that very step, its own exit code, no incident; then
    hex-equal."""
    step = case.dice.randint(2, 10)
    stopped = _stop_at(case, "preempted", step, twice=True)
    case.expect(stopped.code == 75, f"exit code 75, not {stopped.code}")
    case.expect(stopped.faults() == [], f"not counted as a failure: {stopped.faults()}")
    kept, saved = stopped.history.kept, [line for line in stopped.history.checkpoints if line.tier == "disk"]
    case.expect(bool(saved) and saved[-1].step == kept[-1].step == step, "a checkpoint of the last step is on the disk")
    case.expect(stopped.history.sessions[-1].end is not None, "the session has an end")
    if saved:
        case.measured(recover_s=saved[-1].time - kept[-1].time, steps_lost=0)
    again = train_small(case, "preempted", None)
    case.expect(again.code == 0 and again.losses() == twin(case).losses(), "and it goes on, hex-equal")
    case.expect(not again.history.lost, "nothing was done twice")


def _stop_at(case: Case, name: str, step: int, *, ranks: int | None = None, twice: bool = False) -> SmallRun:
    """Trains until SIGTERM reaches every rank in `step`."""

    def fault(at: Strike) -> None:
        if at.step == step and at.once(f"{name}-{step}-{at.rank}"):
            for _ in range(2 if twice else 1):
                os.kill(os.getpid(), signal.SIGTERM)
                if twice and at.rank == 0:  # as a scheduler does it: all processes of the job
                    os.kill(os.getppid(), signal.SIGTERM)

    return train_small(case, name, fault, ranks=ranks or (2 if twice else 1))


def _content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def _said(case: Case) -> str:
    return (case.folder / "log.txt").read_text() if (case.folder / "log.txt").is_file() else ""
