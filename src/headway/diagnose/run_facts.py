"""A Headway run folder, read for diagnosis: the steps that count, every rank's accounts, what it ran on and as."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from headway.account.account import Account, NotClosed, sum_accounts
from headway.account.errors import UserError
from headway.account.events import RankLine, StepLine
from headway.account.peaks import device_row
from headway.account.tree import STEP
from headway.record.files import read_json
from headway.record.folder import RunFolder
from headway.record.jsonl import read_jsonl
from headway.record.sessions import History, read_history

# A session's first steps compile, fill caches and allocate; they are the run account's, not the step's.
_WARM_UP = 2
_FEWEST = 3  # steps that tell anything of a run
_TRACE_STEPS = 3  # of a periodic trace, where the run file does not say


@dataclass(frozen=True)
class RunFacts:
    """What a run's files say.

    steps: kept steps without each session's first and without those that a periodic trace recorded or was written in
    (all of them where a run is shorter); ranks: rank → lines of those steps, of ranks that have them all; traced: the
    steps that were left out for a trace.
    """

    folder: RunFolder
    history: History
    steps: tuple[StepLine, ...]
    ranks: Mapping[int, tuple[RankLine, ...]]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    problems: tuple[str, ...] = ()
    bad_lines: Mapping[str, int] = field(default_factory=dict)
    traced: tuple[StepLine, ...] = ()

    @property
    def device(self) -> str:
        return self.history.sessions[-1].start.device if self.history.sessions else ""

    @property
    def world_size(self) -> int:
        return self.history.sessions[-1].start.world_size if self.history.sessions else 1

    @property
    def peak_flops(self) -> float | None:
        return self.history.sessions[-1].start.peak_flops if self.history.sessions else None

    @property
    def wall_ns(self) -> int:
        return sum(line.wall_ns for line in self.steps)

    @cached_property
    def account(self) -> Account | None:
        """Sum of the steps' accounts (rank 0); None without a step that closes."""
        accounts = []
        for line in self.steps:
            try:
                accounts.append(Account(STEP, line.wall_ns, line.account))
            except (NotClosed, KeyError):
                continue
        return sum_accounts(accounts) if accounts else None

    def total(self, path: str) -> int:
        return self.account.total(path) if self.account else 0

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of run.yaml by its dotted key."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    @property
    def memory_bytes(self) -> int:
        """Peak memory of a rank (device, or the process on a CPU)."""
        lines = [line.memory_bytes for rank in self.ranks.values() for line in rank]
        return max([line.memory_bytes for line in self.steps] + lines, default=0)

    @property
    def device_memory(self) -> int | None:
        """Memory of one device in bytes; None where it is not known."""
        gpus = self.environment.get("gpus") or []
        if gpus and isinstance(gpus[0], Mapping) and gpus[0].get("memory_bytes"):
            return int(gpus[0]["memory_bytes"])
        row = device_row(self.device)
        return int(row.memory) if row and row.memory else None

    @property
    def memory_free(self) -> tuple[float | None, str]:
        """Share of the device's memory that no step used, 0 to 1, and the figures in words; None where unknown."""
        total, used = self.device_memory, self.memory_bytes
        if not total or not used or not self.on_gpu:
            return None, ""
        return max(0.0, 1 - used / total), f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB are used at the peak"

    @property
    def on_gpu(self) -> bool:
        return bool(self.environment.get("gpus")) or device_row(self.device) is not None

    @property
    def mfu(self) -> float | None:
        seconds = self.wall_ns / 1e9
        useful = sum(line.flops.useful for line in self.steps)
        return useful / seconds / self.peak_flops if self.peak_flops and seconds else None

    def traces(self) -> list[Path]:
        """Folders of periodic traces, oldest first."""
        return sorted(path for path in self.folder.traces.glob("step-*") if path.is_dir())

    def tokens_per_second(self) -> float | None:
        return sum(line.tokens for line in self.steps) / (self.wall_ns / 1e9) if self.wall_ns else None


def read_run(root: Path | str) -> RunFacts:
    """Reads a run folder. Damaged lines are counted, never an error.

    Raises:
        UserError: there is no run folder, or no session in it.
    """
    folder = RunFolder.open(root)
    history = read_history(folder)
    if not history.sessions and not history.bad:
        raise UserError(f"{folder.metrics}: is empty; no session of a run was begun here, so nothing can be said")
    notes: list[str] = []
    config = _yaml(folder.config, notes)
    steps, traced = _settled(history, _traced(folder, history, config))
    ranks, bad = _ranks(folder, steps)
    if history.bad:
        bad["metrics.jsonl"] = len(history.bad)
    problems = [f"{path}: {number:,} damaged lines are left out" for path, number in bad.items()]
    problems += notes
    if not steps:
        problems.append("no step was finished, so nothing can be said")
    return RunFacts(
        folder=folder,
        history=history,
        steps=tuple(steps),
        ranks=ranks,
        config=config,
        environment=_json(folder.environment, problems),
        problems=tuple(problems),
        bad_lines=bad,
        traced=tuple(traced),
    )


def _settled(history: History, traced: Set[int]) -> tuple[list[StepLine], list[StepLine]]:
    """Kept steps without each session's first few and without traced ones; a run too short for that keeps them.

    Returns:
        (the steps that count, the steps that were left out for a trace)
    """
    kept = history.kept
    first = {session.start.session: session.start.resumed_from for session in history.sessions}
    settled = [line for line in kept if line.step > first.get(line.session, 0) + _WARM_UP]
    settled = settled if len(settled) >= _FEWEST else kept
    plain = [line for line in settled if line.step not in traced]
    if len(plain) < _FEWEST:
        return settled, []
    return plain, [line for line in settled if line.step in traced]


def _traced(folder: RunFolder, history: History, config: Mapping[str, Any]) -> set[int]:
    """Steps that a trace recorded, and the one after them: stopping and writing it falls into that one.

    Read from the lines that diagnoses left, and from the traces' folders for those that did not end.
    """
    log = config.get("log")
    usual = log.get("profile_steps") if isinstance(log, Mapping) else None
    lengths = {line.step: line.traced_steps for line in history.traces}
    for path in folder.traces.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit():
            lengths.setdefault(int(number), usual if isinstance(usual, int) else _TRACE_STEPS)
    return {step for first, length in lengths.items() for step in range(first, first + min(length, 1000) + 1)}


def _ranks(folder: RunFolder, steps: list[StepLine]) -> tuple[dict[int, tuple[RankLine, ...]], dict[str, int]]:
    wanted = {(line.session, line.step) for line in steps}
    found: dict[int, dict[tuple[int, int], RankLine]] = {}
    bad = {}
    for rank, path in folder.ranks().items():
        lines = read_jsonl(path, RankLine)
        if lines.bad:
            bad[f"ranks/{path.name}"] = len(lines.bad)
        found[rank] = {(line.session, line.step): line for line in lines.items if (line.session, line.step) in wanted}
    # A step that one rank lacks (torn line, another world size) cannot be compared on any.
    common = set.intersection(*(set(lines) for lines in found.values())) if found else set()
    order = [(line.session, line.step) for line in steps if (line.session, line.step) in common]
    return {rank: tuple(lines[key] for key in order) for rank, lines in found.items()}, bad


def _yaml(path: Path, problems: list[str]) -> Mapping[str, Any]:
    import yaml  # takes as long as numpy to import, and the diagnosis beside a run reads none

    if not path.is_file():
        return {}
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-02-30
        problems.append(f"{path.name}: cannot be read: {str(error).splitlines()[0]}")
        return {}
    return value if isinstance(value, Mapping) else {}


def _json(path: Path, problems: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = read_json(path)
    except (orjson.JSONDecodeError, OSError) as error:
        problems.append(f"{path.name}: cannot be read: {error}")
        return {}
    return value if isinstance(value, Mapping) else {}
