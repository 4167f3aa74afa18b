"""`headway plan --model … --cluster …`: the plan itself (the command without a sub-command)."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.account.errors import UserError
from headway.cli.output import print_json
from headway.cli.paths import is_no_input, out_path
from headway.cli.plan_numbers import of
from headway.cli.plan_options import (
    Calibrate,
    Fix,
    GlobalBatch,
    Json,
    MeanSquare,
    Mtp,
    Seq,
    StackName,
    cluster_of,
    factor_of,
    make_workload,
    parse_fix,
    writing,
)
from headway.plan.numbers import AMOUNT, COUNT, POSITIVE, SHARE

if TYPE_CHECKING:
    from headway.plan.answer import Answer, Question


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="config.json, its folder, or a preset such as llama3-70b.")] = "",
    cluster: Annotated[
        list[str] | None, typer.Option(help="H100x1024, or a YAML file (docs/plan.md); again for a choice of clusters.")
    ] = None,
    seq: Seq = 8192,
    global_batch: GlobalBatch = 512,
    tokens: Annotated[
        float, typer.Option(parser=of(AMOUNT), help="Tokens to train on; gives days, GPU-hours, dollars, energy.")
    ] = 0.0,
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp8 or fp4.")] = "bf16",
    mean_square: MeanSquare = None,
    mtp: Mtp = True,
    fix: Fix = "",
    objective: Annotated[str, typer.Option(help="time, cost or memory.")] = "time",
    deadline: Annotated[str, typer.Option(help="The run must end within, e.g. 30d.")] = "",
    budget: Annotated[
        float | None, typer.Option(parser=of(POSITIVE), help="The run must cost at most so many dollars.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(parser=of(POSITIVE), help="Dollars per GPU and hour, in place of the published typical one."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Failures per GPU-day, or a published one: llama3-405b … (plan goodput).")
    ] = None,
    ettr: Annotated[
        float | None, typer.Option(parser=of(SHARE), help="Productive share of the wall clock, in place of --rate.")
    ] = None,
    trained_share: Annotated[float, typer.Option(parser=of(SHARE), help="Tokens with a label over all tokens.")] = 1.0,
    power_share: Annotated[float, typer.Option(parser=of(SHARE), help="Average draw over the GPU's TDP.")] = 0.8,
    calibrate: Calibrate = None,
    stack: StackName = "",
    top: Annotated[int, typer.Option(parser=of(COUNT), help="Plans to show.")] = 5,
    json: Json = False,
    html: Annotated[
        Path | None,
        typer.Option(
            parser=out_path, help="Also write a self-contained page: plans, accounts, scaling curve, frontier."
        ),
    ] = None,
) -> int:
    """Find the best parallel plans for a model on a cluster; say how long, how much, and what was ruled out.

    Exit code 1 when no plan meets --deadline or --budget.

    Example: headway plan --model llama3-70b --cluster H100x1024 --global-batch 512 --tokens 15e12 --deadline 200d
    """
    from headway.plan.answer import Question, answer
    from headway.plan.failure_rates import parse
    from headway.plan.money import parse_duration
    from headway.plan.search import OBJECTIVES
    from headway.plan.whole_run import RunTerms

    if context.invoked_subcommand is not None:
        return 0
    if not model or not cluster:
        raise UserError(f"{'--model' if not model else '--cluster'} is missing; `headway plan --help` has an example")
    if objective not in OBJECTIVES:
        near = difflib.get_close_matches(objective, OBJECTIVES, n=2) or OBJECTIVES
        raise UserError(f"--objective {objective!r} is unknown; nearest: {', '.join(near)}")
    if (deadline or budget is not None) and not tokens:
        raise UserError("--deadline and --budget need --tokens, the length of the run")
    is_no_input("--html", html, (Path(model), *map(Path, cluster), calibrate))
    machines = [cluster_of(spec) for spec in cluster]
    if price:
        machines = [replace(one, price_per_hour=price) for one in machines]
    terms = RunTerms(parse(rate) if rate is not None else None, ettr, trained_share, power_share)
    question = Question(
        work=make_workload(model, seq, global_batch, precision, mean_square, mtp),
        clusters=[(one, factor_of(calibrate, stack, one.device.name, precision)) for one in machines],
        tokens=tokens,
        fixed=parse_fix(fix),
        objective=objective,
        top=top,
        deadline_s=parse_duration(deadline, "--deadline") if deadline else None,
        budget=budget,
        terms=terms,
    )
    try:
        found = answer(question)
    except UserError as error:
        if html is not None:
            _write_page(html, question, None, str(error))
        raise
    if html is not None:
        _write_page(html, question, found)
    if json:
        print_json(found.to_dict())
    else:
        print("\n".join(found.lines()))
    return 0 if found.good else 1


def _write_page(path: Path, question: Question, found: Answer | None, reason: str = "") -> None:
    from headway.plan.sweep import around, sweep
    from headway.watch.plan_page import write_plan_page

    cluster, factor = question.clusters[0]
    curve = None
    if found is not None:
        cluster, factor = next(pair for pair in question.clusters if pair[0] == found.plans[0].cluster)
        free = {key: value for key, value in (question.fixed or {}).items() if key != "dp"}
        curve = sweep(question.work, cluster, around(cluster), fixed=free, factor=factor)
    title = f"{question.work.name} on {cluster.gpus:,} × {cluster.device.name}"
    with writing("--html", path):
        write_plan_page(path, found, curve, title, reason)


def register(app: typer.Typer) -> None:
    app.callback(invoke_without_command=True)(plan)
