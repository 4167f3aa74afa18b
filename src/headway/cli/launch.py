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
    min_ranks: Annotated[
        int | None,
        typer.Option(help="Go on with fewer ranks, down to this number, without places that fail again and again."),
    ] = None,
    exclude_after: Annotated[int, typer.Option(help="Own incidents after which a place (GPU, host) is left out.")] = 3,
    readmit: Annotated[list[str] | None, typer.Option(help="Let an excluded place take part again.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Train under the supervisor: a rank that dies or hangs is noticed and all are started again, also a single one.

    `headway train` does the same by itself where it starts more than one rank. Every death is in incidents.jsonl.

    Example: headway launch run.yaml --ranks 1
    """
    from headway.account.errors import UserError
    from headway.cli.train import launch_supervised, ranks_to_start
    from headway.config.load import load_run
    from headway.guard.hosts import HostList
    from headway.record.folder import RunFolder

    config = load_run(run_file, overrides or []).config
    argv = ["train", str(run_file), *(overrides or []), *(["--json"] if json else [])]
    if "--debug" in sys.argv:
        argv.append("--debug")
    fixed = config.train.global_batch_sequences or config.train.global_batch_tokens
    if min_ranks is not None and not fixed:
        raise UserError("--min-ranks keeps the global batch: set train.global_batch_sequences or global_batch_tokens")
    hosts = HostList(RunFolder(config.folder).create().root / "hosts.json", exclude_after)
    for place in readmit or []:
        hosts.readmit(place)
    return launch_supervised(config, ranks or ranks_to_start(config), argv, hang_s, min_ranks, hosts)


def register(app: typer.Typer) -> None:
    app.command()(launch)
