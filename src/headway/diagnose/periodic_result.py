"""What the background process of a periodic trace writes: diagnosis.json."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from headway.account.errors import UserError
from headway.diagnose.diagnosis import diagnose_job, trace_line
from headway.diagnose.job import Options, read_job
from headway.record.files import write_json

DIAGNOSIS = "diagnosis.json"


def write_diagnosis(folder: Path, paths: Sequence[Path], world_size: int) -> Path:
    """Diagnoses the ranks' traces and writes diagnosis.json; a trace that cannot be read is said there too."""
    target = folder / DIAGNOSIS
    try:
        diagnosis = diagnose_job(read_job(paths, Options(workers=0)))  # the cores belong to the training beside it
    except UserError as error:
        write_json(target, {"version": 1, "trace_line": {"note": str(error)}, "background_ns": time.process_time_ns()})
        return target
    line = trace_line(diagnosis)
    if len(paths) < world_size:
        line["note"] = f"{world_size - len(paths)} of {world_size} ranks wrote no trace; {line['note']}"
    write_json(target, {**diagnosis.to_dict(), "trace_line": line, "background_ns": time.process_time_ns()})
    return target
