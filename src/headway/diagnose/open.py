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
    traces = sorted(folder.glob("*.json.gz")) + sorted(folder.glob("*.json"))
    traces = [path for path in traces if path.name not in ("diagnosis.json", "environment.json", "run_id.json")]
    if not (folder / "metrics.jsonl").is_file():
        if traces:
            return diagnose_traces(traces, options, memory, said)
        below = next((path for path in sorted(folder.glob("*/*.json*")) if path.suffix in (".json", ".gz")), None)
        where = f"; traces lie further below: give them, {below.parent}/*{below.suffix}" if below else ""
        raise UserError(
            f"{folder}: neither a run folder (no metrics.jsonl) nor one of traces (no *.json or *.json.gz){where}"
        )
    run = read_run(folder)
    trace, left_out = _newest_trace(run, options)
    diagnosis = diagnose_run(run, trace, memory)
    notes = list(left_out)
    if ignored := said.about_traces():
        notes.append(f"{', '.join(ignored)}: not used, a run folder has its own count of tokens, model and device")
    if asked := options.said():
        where = "used on the folder's newest trace alone, the run's steps are counted as they were measured"
        notes.append(
            f"{', '.join(asked)}: {where if trace else 'not used, the run folder has no trace that can be read'}"
        )
    partial = diagnosis.partial or bool(left_out)
    return dataclasses.replace(diagnosis, notes=(*diagnosis.notes, *notes), partial=partial)


def _newest_trace(run: RunFacts, options: Options) -> tuple[Diagnosis | None, list[str]]:
    """The newest periodic trace that can be read; those that cannot are named."""
    notes: list[str] = []
    free, text = run.memory_free
    for folder in reversed(run.traces()):
        paths = sorted(folder.glob("rank-*.json.gz"))
        if not paths:
            continue
        try:
            return diagnose_job(read_job(paths, options), memory_free=free, memory_text=text), notes
        except UserError as error:
            notes.append(f"{folder.name} is left out: {error}")
    return None, notes
