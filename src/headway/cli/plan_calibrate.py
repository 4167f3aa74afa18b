"""`headway plan calibrate`: what your own runs and measurements say, for the plans that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
import yaml

from headway.account.errors import UserError
from headway.cli.output import print_json
from headway.cli.paths import in_path, is_no_input, out_path
from headway.cli.plan_options import Json, cluster_of, writing

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
    missing = [path for path in source if not path.exists()]
    if missing:
        raise UserError(f"{missing[0]}: no such file or folder")
    is_no_input("--out", out, source)
    if any(path.suffix == ".json" for path in source):
        _from_bench(source, cluster, out, json)
    else:
        _from_runs(source, out, json)


def _from_runs(source: list[Path], out: Path | None, json: bool) -> None:
    from headway.plan.calibrate import calibrate as run
    from headway.plan.constants import default_constants
    from headway.plan.predict import predict
    from headway.plan.rows import Case, Unscored, read_cases
    from headway.plan.run_case import case_of_run

    cases: list[Case] = []
    skipped: list[tuple[Path, Unscored]] = []
    for path in source:
        if path.is_dir():
            cases.append(case_of_run(path))
        else:
            read, left = read_cases(path)
            cases += read
            skipped += [(path, one) for one in left]
    found = run(cases, default_constants())
    skipped += [(source[0], one) for one in found.skipped]
    if not found.factors:
        first = f"; the first {skipped[0][1].where}: {skipped[0][1].reason}" if skipped else ""
        raise UserError(f"{source[0]}: no row has a plan and a speed ({len(skipped)} could not be read{first})")
    dropped = [{"file": str(path), "line": one.line, "row": one.row_id, "reason": one.reason} for path, one in skipped]
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
    for item in dropped[:_NAMED]:
        where = f"{item['file']}:{item['line']}" if item["line"] else f"{item['file']}, row {item['row']}"
        print(f"skipped: {where}: {item['reason']}")
    if len(dropped) > _NAMED:
        print(f"skipped: {len(dropped) - _NAMED} rows more (--json has them)")
    if out is not None:
        print(f"written: {out}")


def _from_bench(source: list[Path], cluster: str, out: Path | None, json: bool) -> None:
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
