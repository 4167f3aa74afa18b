"""`headway report RUN_DIR`: what a run did with its time, in the terminal, as JSON and as one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import print_json


def report(
    run_dir: Annotated[Path, typer.Argument(help="A run folder, e.g. runs/NAME.")],
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    html: Annotated[bool, typer.Option(help="Also write report.html into the run folder.")] = True,
) -> None:
    """Show where a run's time and FLOPs went; write report.html.

    Example: headway report runs/demo
    """
    from headway.record.folder import RunFolder
    from headway.watch.console import make_console
    from headway.watch.render import render_summary
    from headway.watch.report import write_report
    from headway.watch.summary import read_summary

    summary = read_summary(RunFolder.open(run_dir))
    written = None
    if html:
        try:
            written = write_report(run_dir)
        except OSError as error:
            print(f"headway: report.html is not written: {error}", file=sys.stderr)
    if json:
        print_json(summary.to_dict())
        return
    console = make_console()
    console.print(render_summary(summary))
    if written is not None:
        console.print(f"report: {written}", highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(report)
