"""`headway plan calibrate`: factors of a software stack from a few of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from headway.account.errors import UserError
from headway.cli.output import print_json
from headway.cli.plan_options import Json


def calibrate(
    rows: Annotated[Path, typer.Argument(help="CSV of runs; docs/plan.md lists the columns.")],
    out: Annotated[Path | None, typer.Option(help="Write the factors here (JSON), for --calibrate.")] = None,
    json: Json = False,
) -> None:
    """Fit one factor per stack, device and precision from at most three rows of each.

    Example: headway plan calibrate rows.csv --out factors.json
    """
    from headway.plan.calibrate import calibrate as run
    from headway.plan.constants import default_constants
    from headway.plan.rows import read_cases

    cases, unscored = read_cases(rows)
    found = run(cases, default_constants())
    if not found.factors:
        raise UserError(f"{rows}: no row has a plan and a speed ({len(unscored)} could not be read)")
    content = {"version": 1, "groups": found.to_dict()}
    if out is not None:
        out.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
    if json:
        print_json(content)
        return
    for group, factor in sorted(found.factors.items()):
        print(f"{' · '.join(group):<52} × {factor:.3f}  from {', '.join(found.rows[group])}")
    if out is not None:
        print(f"written: {out}")


def register(app: typer.Typer) -> None:
    app.command()(calibrate)
