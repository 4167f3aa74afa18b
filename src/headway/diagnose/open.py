"""Paths in, a diagnosis out: traces, a run folder, or a run folder's periodic traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from headway.account.errors import UserError
from headway.diagnose.diagnosis import Diagnosis, diagnose_job, diagnose_run
from headway.diagnose.efficiency import with_efficiency
from headway.diagnose.job import Options, read_job
from headway.diagnose.run_facts import RunFacts, read_run
from headway.diagnose.said import Said
from headway.diagnose.snapshot import MemoryFacts, read_snapshot


def open_diagnosis(paths: Sequence[Path], options: Options, said: Said) -> Diagnosis:
    """Reads and diagnoses.

    Raises:
        UserError: a path that is not there or given twice, several run folders, or a file that is no trace.
    """
    memory = read_snapshot(said.memory) if said.memory is not None else None
    folders = [path for path in paths if path.is_dir()]
    if folders and len(paths) > 1:
        raise UserError(f"{folders[0]}: give one run folder, or trace files (a second run goes to --against)")
    twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
    if twice:
        raise UserError(f"{twice[0]}: given twice; each file is one rank of the job")
    if folders:
        return _of_folder(folders[0], options, memory, said)
    return diagnose_traces(paths, options, memory, said)


def diagnose_traces(paths: Sequence[Path], options: Options, memory: MemoryFacts | None, said: Said) -> Diagnosis:
    return diagnose_job(with_efficiency(read_job(paths, options), said), memory)


def _of_folder(folder: Path, options: Options, memory: MemoryFacts | None, said: Said) -> Diagnosis:
    if not (folder / "metrics.jsonl").is_file():
        if traces := _traces_in(folder):
            return diagnose_traces(traces, options, memory, said)
        raise UserError(
            f"{folder}: neither a run folder (no metrics.jsonl) nor one of traces (no *.json or *.json.gz)"
            f"{_further_below(folder)}"
        )
    run = read_run(folder)
    trace, damaged, notes = _newest_trace(run, options)
    diagnosis = diagnose_run(run, trace, memory)
    notes = [*damaged, *notes]
    if ignored := said.about_traces():
        notes.append(f"{', '.join(ignored)}: not used, a run folder has its own count of tokens, model and device")
    if asked := options.said():
        where = "used on the folder's newest trace alone, the run's steps are counted as they were measured"
        notes.append(
            f"{', '.join(asked)}: {where if trace else 'not used, the run folder has no trace that can be read'}"
        )
    partial = diagnosis.partial or bool(damaged)
    return dataclasses.replace(diagnosis, notes=(*diagnosis.notes, *notes), partial=partial)


# What Headway itself writes beside traces, and above them.
_OWN_FILES = ("diagnosis.json", "environment.json", "run_id.json")


def _traces_in(folder: Path, where: str = "") -> list[Path]:
    """Files that may be traces; `where`: a pattern before their names, of folders below."""
    found = sorted(folder.glob(f"{where}*.json.gz")) + sorted(folder.glob(f"{where}*.json"))
    return [path for path in found if path.name not in _OWN_FILES]


def _further_below(folder: Path) -> str:
    """What the user may have meant."""
    if runs := sorted(folder.glob("*/metrics.jsonl")):
        return f"; a run folder lies below: {runs[0].parent}"
    if traces := _traces_in(folder, "*/"):
        return f"; traces lie further below: give them, {traces[0].parent}/*{traces[0].suffix}"
    return ""


def _newest_trace(run: RunFacts, options: Options) -> tuple[Diagnosis | None, list[str], list[str]]:
    """The newest periodic trace that can be read, of all ranks where there is such a one.

    Returns:
        (its diagnosis, what is damaged or missing, what else to know)
    """
    damaged: list[str] = []
    notes: list[str] = []
    free, text = run.memory_free
    found = [(path, sorted(path.glob("rank-*.json.gz"))) for path in reversed(run.traces())]
    found = sorted((one for one in found if one[1]), key=lambda one: len(one[1]) < run.world_size)
    for place, (folder, paths) in enumerate(found):
        try:
            diagnosis = diagnose_job(read_job(paths, options), memory_free=free, memory_text=text)
        except UserError as error:
            damaged.append(f"{folder.name} is left out: {error}")
            continue
        if len(paths) < run.world_size:
            damaged.append(f"{folder.name} has the traces of {len(paths):,} of {run.world_size:,} ranks only")
        elif newer := [later.name for later, _ in found[place + 1 :] if later.name > folder.name]:
            notes.append(f"{', '.join(newer)}: newer, but not all ranks have a trace there")
        return diagnosis, damaged, notes
    return None, damaged, notes
