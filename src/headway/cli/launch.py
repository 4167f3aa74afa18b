"""`headway launch RUN.yaml`: `headway train` on this machine's ranks, under supervision, however few they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def launch(
    run_file: Annotated[Path, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. data.seq_len=4096.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks to start here (default: as the run file says).")] = None,
    hang_s: Annotated[float, typer.Option(help="Least seconds without progress in a step that are a hang.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Train under the supervisor: a rank that dies or hangs is noticed and all are started again, also a single one.

    `headway train` does the same by itself where it starts more than one rank. Every death is in incidents.jsonl.

    Example: headway launch run.yaml --ranks 1
    """
    from headway.cli.train import launch_supervised, ranks_to_start
    from headway.config.load import load_run

    config = load_run(run_file, overrides or []).config
    argv = ["train", str(run_file), *(overrides or []), *(["--json"] if json else [])]
    if "--debug" in sys.argv:
        argv.append("--debug")
    return launch_supervised(config, ranks or ranks_to_start(config), argv, hang_s)


def register(app: typer.Typer) -> None:
    app.command()(launch)
