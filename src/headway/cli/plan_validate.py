"""`headway plan validate`: how far predictions are from published or own runs."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.account.errors import UserError
from headway.cli.output import print_json
from headway.cli.paths import in_path
from headway.cli.plan_numbers import of
from headway.cli.plan_options import Json, skipped_line
from headway.plan.numbers import WHOLE

_NAMED = 4  # rows named for each reason; --json has them all


def validate(
    rows: Annotated[Path, typer.Argument(parser=in_path, help="CSV of runs; docs/plan.md lists the columns.")],
    calibrate: Annotated[
        Path | None,
        typer.Option(
            parser=in_path, help="CSV whose rows may calibrate (at most 3 a stack, device and precision), or JSON."
        ),
    ] = None,
    by: Annotated[str, typer.Option(help="source, stack, device, precision, model or group.")] = "source",
    worst: Annotated[int, typer.Option(parser=of(WHOLE), help="Also list the rows with the largest errors.")] = 0,
    json: Json = False,
) -> None:
    """Predict every row of a CSV and show the errors: step time, memory, and what could not be scored and why.

    Example: headway plan validate rows.csv --calibrate throughput.csv --by source
    """
    from headway.plan.calibrate import NONE, load_calibration
    from headway.plan.constants import default_constants
    from headway.plan.validate import KEYS
    from headway.plan.validate import validate as run

    if by not in KEYS:
        near = difflib.get_close_matches(by, KEYS, n=3, cutoff=0.3) or list(KEYS)
        raise UserError(f"--by {by!r} is unknown; nearest: {', '.join(near)}")
    factors = load_calibration(calibrate, default_constants()) if calibrate else NONE
    found = run(rows, factors)
    if json:
        print_json(
            {
                "headline": [asdict(row) for row in found.headline()],
                "table": [asdict(row) for row in found.table(by)],
                "memory": found.memory_summary(),
                "rows_read": len(found.scored) + len(found.unscored),
                "not_judged": dict(found.reasons()),
                "left_out": found.left_out(),
                "calibration": factors.to_dict(),
                "rows": [one.to_dict() for one in found.scored],
                "unscored": [asdict(one) for one in found.unscored],
            }
        )
        return
    print(f"{'step time, |error|':<72} rows  median     p90    bias")
    for row in (*found.headline(), *found.table(by)):
        print(f"{row.name[:72]:<72} {row.rows:4d} {row.median:7.1%} {row.p90:7.1%} {row.bias:+7.1%}")
    held = found.memory_summary()
    if held["rows"]:
        print(f"memory: {held['rows']} rows, median |error| {held['median']:.1%}, p90 {held['p90']:.1%}")
    print(
        f"out of memory: {held['oom_called']} of {held['oom_rows']} called; "
        f"false alarms {held['false_oom']} of {held['ran_rows']} that ran"
    )
    left = found.left_out()
    print(
        f"rows: {len(found.scored) + len(found.unscored)} read, {len(found.judged())} judged, "
        f"{len(found.unscored)} skipped because they cannot be predicted, "
        f"{sum(map(len, left.values())) - len(found.unscored)} predicted but not judged"
    )
    lines = {one.row_id: f"{one.row_id} in line {one.line}" for one in found.unscored if rows.name not in one.row_id}
    for reason, ids in left.items():
        named = [lines.get(one, one) for one in ids[:_NAMED]]
        more = ", …" if len(ids) > _NAMED else ""
        print(f"not judged: {len(ids):4d}  {reason} ({', '.join(named)}{more})")
    if factors.skipped:
        print(f"calibration: {skipped_line(factors)}")
    ordered = sorted(found.judged(), key=lambda one: -abs(one.error or 0))
    for one in ordered[:worst]:
        print(f"{one.case.row_id} {one.case.work.name} {one.case.layout.describe()}: {one.error:+.0%}")


def register(app: typer.Typer) -> None:
    app.command()(validate)
