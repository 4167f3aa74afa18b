"""`headway plan calibrate`: what your own runs and measurements say, for the plans that follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from headway.account.errors import UserError
from headway.cli.output import print_json
from headway.cli.paths import in_path, is_no_input, out_path
from headway.cli.plan_options import Json, cluster_of, writing

if TYPE_CHECKING:
    from headway.plan.rows import Case, Unscored

_NAMED = 10  # skipped rows named; --json has them all


def calibrate(
    source: Annotated[
        list[Path],
        typer.Argument(
            parser=in_path, help="CSV of runs, folders of Headway runs (runs/NAME), or bench peak/comm JSON."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(parser=out_path, help="Write factors here (JSON, for --calibrate), or the cluster (YAML)."),
    ] = None,
    cluster: Annotated[str, typer.Option(help="With bench JSON: the cluster it was measured on, e.g. H100x64.")] = "",
    json: Json = False,
) -> None:
    """Fit one factor per stack, device and precision from at most three runs of each; or turn measured rates and links
    into a cluster file.

    Example: headway plan calibrate runs/first runs/second --out factors.json
    """
    from headway.plan.calibrate import is_factors

    missing = [path for path in source if not path.exists()]
    if missing:
        raise UserError(f"{missing[0]}: no such file or folder")
    source = list({path.resolve(): path for path in source}.values())  # twice the same run is one run
    is_no_input("--out", out, source, is_factors)
    if any(path.suffix == ".json" for path in source):
        _from_bench(source, cluster, out, json)
    else:
        _from_runs(source, out, json)


def _from_runs(source: list[Path], out: Path | None, json: bool) -> None:
    from headway.plan.calibrate import calibrate as run
    from headway.plan.constants import default_constants
    from headway.plan.predict import predict
    from headway.plan.rows import read_cases
    from headway.plan.run_case import case_of_run

    cases: list[Case] = []
    unread: list[Unscored] = []
    for path in source:
        if path.is_dir():
            cases.append(case_of_run(path))
        else:
            read, left = read_cases(path)
            cases += read
            unread += left
    found = run(cases, default_constants())
    if not found.factors:
        raise UserError(f"{source[0]}: nothing to calibrate by: {_nothing(cases, unread, found.skipped)}")
    skipped = [*unread, *found.skipped]
    dropped = [{"file": one.file, "line": one.line, "row": one.row_id, "reason": one.reason} for one in skipped]
    content = {"version": 1, "groups": found.to_dict(), "skipped": dropped}
    if out is not None:
        with writing("--out", out):
            out.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
    if json:
        print_json(content)
        return
    for case in cases:
        if case.source and Path(case.source).is_dir():
            seconds = predict(case.work, case.layout, case.cluster).step_s
            print(f"{case.row_id}: {case.layout.describe()}: measured {case.step_s:.4g} s, predicted {seconds:.4g} s")
            print("".join(f"  assumed: {text}\n" for text in case.assumed), end="")
    for group, factor in sorted(found.factors.items()):
        print(f"{' · '.join(group):<52} × {factor:.3f}  from {', '.join(found.rows[group])}")
    for one in skipped[:_NAMED]:
        print(f"skipped: {_place(one)}: {one.reason}")
    if len(dropped) > _NAMED:
        print(f"skipped: {len(dropped) - _NAMED} rows more (--json has them)")
    if out is not None:
        print(f"written: {out}")


def _place(one: Unscored) -> str:
    return f"{one.file}:{one.line}" if one.line else one.file


def _nothing(cases: list[Case], unread: list[Unscored], apart: Sequence[Unscored]) -> str:
    """Why no row calibrates, each reason with a count and the first row that it holds for."""
    from headway.plan.calibrate import usable

    said = [
        f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} {what}, the first {_place(rows[0])}: {rows[0].reason}"
        for rows, what in ((apart, "too far from the prediction"), (unread, "cannot be read"))
        if rows
    ]
    left = sum(not usable(case) for case in cases)
    return "; ".join(said + ([f"{left} without a plan or a speed, or flagged"] if left or not said else []))


def _from_bench(source: list[Path], cluster: str, out: Path | None, json: bool) -> None:
    import yaml

    from headway.plan.bench_file import check_measured, cluster_keys, read_bench
    from headway.plan.constants import default_constants

    read = [(path, read_bench(path)) for path in source]
    entries = [entry for _, found in read for entry in found]
    if not cluster:
        raise UserError("bench JSON needs --cluster, the machine it was measured on, e.g. --cluster H100x64")
    machines = cluster_of(cluster)
    keys = cluster_keys(entries, default_constants(), str(source[0]))
    for path, found in read:
        check_measured(found, keys, machines, str(path))
    content: dict[str, Any] = {"device": machines.device.name, "gpus": machines.gpus, **keys}
    text = yaml.safe_dump(content, sort_keys=False)
    if out is not None:
        with writing("--out", out):
            out.write_text(text, encoding="utf-8")
    print_json(content) if json else print(text, end="" if out is None else f"written: {out}\n")


def register(app: typer.Typer) -> None:
    app.command()(calibrate)
