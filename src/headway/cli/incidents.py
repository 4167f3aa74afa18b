"""`headway incidents RUN_DIR`: what broke in a run, why, where, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.output import print_json


def incidents(
    run_dir: Annotated[Path, typer.Argument(help="A run folder, e.g. runs/NAME.")],
    html: Annotated[bool, typer.Option("--html", help="Also write incidents.html, a post-mortem page.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a run's incidents by cause and by host, with MTBF, MTTR and ETTR, and name hosts that fail too often.

    Example: headway incidents runs/demo --html
    """
    from headway.record.folder import RunFolder
    from headway.watch.console import make_console
    from headway.watch.incidents import read_overview
    from headway.watch.incidents_text import render_overview, write_post_mortem

    run = RunFolder.open(run_dir, for_incidents=True)
    found = read_overview(run)
    written = write_post_mortem(run, found) if html else None
    if json:
        print_json(found.to_dict())
        return
    console = make_console()
    console.print(render_overview(found), highlight=False)
    if written is not None:
        console.print(f"post-mortem: {written}", highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(incidents)
