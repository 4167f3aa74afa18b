"""`headway diagnose TRACE…`: where the seconds of a profiler trace went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import print_json


def diagnose(
    traces: Annotated[list[Path], typer.Argument(help="Profiler traces (.json, .json.gz), one a rank.")],
    window: Annotated[str, typer.Option(help="auto, steps or gpu (first to last GPU event).")] = "auto",
    comm_kernel: Annotated[list[str] | None, typer.Option(help="REGEX of further communication kernels.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Say where each second of a profiler trace went. Exit code 3 where part of the trace could not be read.

    Example: headway diagnose traces/*.json.gz
    """
    from headway.diagnose.job import Options, read_job
    from headway.diagnose.summary import lines, to_dict

    job = read_job(traces, Options(window=window, comm_kernels=tuple(comm_kernel or ())))
    print_json(to_dict(job)) if json else print("\n".join(lines(job)))
    return 3 if job.partial else 0


def register(app: typer.Typer) -> None:
    app.command()(diagnose)
