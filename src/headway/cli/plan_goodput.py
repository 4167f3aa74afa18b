"""`headway plan goodput`: failures, checkpoints, ETTR and the best interval."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from headway.cli.output import print_json
from headway.cli.plan_numbers import of
from headway.cli.plan_options import Json
from headway.plan.numbers import AMOUNT, GPUS, PART, POSITIVE, WHOLE


def goodput(
    gpus: Annotated[int, typer.Option(parser=of(GPUS), help="GPUs of the job.")] = 1024,
    days: Annotated[float, typer.Option(parser=of(POSITIVE), help="Days of training if nothing failed.")] = 30.0,
    rate: Annotated[str | None, typer.Option(help="Failures per GPU-day, or a published one: llama3-405b …")] = None,
    failures: Annotated[
        int | None, typer.Option(parser=of(WHOLE), help="Failures you have seen (with --gpu-days).")
    ] = None,
    gpu_days: Annotated[float | None, typer.Option(parser=of(POSITIVE), help="GPU-days you have seen them in.")] = None,
    software: Annotated[
        float, typer.Option(parser=of(AMOUNT), help="Failures per day that do not grow with the GPUs.")
    ] = 0.0,
    planned: Annotated[float, typer.Option(parser=of(AMOUNT), help="Announced restarts per day.")] = 0.0,
    detect: Annotated[float, typer.Option(parser=of(AMOUNT), help="Seconds until a failure is noticed.")] = 300.0,
    restart: Annotated[float, typer.Option(parser=of(AMOUNT), help="Seconds until ranks run again.")] = 300.0,
    save: Annotated[float, typer.Option(parser=of(AMOUNT), help="Seconds a save stops training.")] = 30.0,
    lag: Annotated[float, typer.Option(parser=of(AMOUNT), help="Seconds after that until the save is durable.")] = 0.0,
    load: Annotated[float, typer.Option(parser=of(AMOUNT), help="Seconds to read a checkpoint back.")] = 120.0,
    interval: Annotated[
        float | None, typer.Option(parser=of(POSITIVE), help="Seconds of training between saves; the best if left out.")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(help="A faster tier before it: memory:save=1,lag=5,load=20,survives=0.8[,interval=…]."),
    ] = None,
    step: Annotated[float, typer.Option(parser=of(AMOUNT), help="Seconds of a step; saves fall on steps.")] = 0.0,
    slow_rate: Annotated[float, typer.Option(parser=of(PART), help="Slow nodes per GPU-day.")] = 0.0,
    slowdown: Annotated[float, typer.Option(parser=of(AMOUNT), help="How much longer steps take with one.")] = 0.1,
    slow_notice: Annotated[
        float, typer.Option(parser=of(AMOUNT), help="Seconds until a slow node is noticed.")
    ] = 3600.0,
    price: Annotated[
        float | None, typer.Option(parser=of(POSITIVE), help="Dollars per GPU-hour, to price what is lost.")
    ] = None,
    repair: Annotated[
        float, typer.Option(parser=of(AMOUNT), help="Hours until a failed node is back, for the spares.")
    ] = 24.0,
    simulate: Annotated[bool, typer.Option("--simulate", help="Also simulate it, event by event.")] = False,
    cases: Annotated[bool, typer.Option("--cases", help="Show published runs against the model instead.")] = False,
    json: Json = False,
) -> None:
    """Say what failures cost: ETTR, where the time goes, the best checkpoint interval.

    Example: headway plan goodput --gpus 1024 --days 30 --save 30 --lag 60 --step 12
    """
    from headway.plan import failure_rates, goodput_cases, goodput_report
    from headway.plan.goodput import Reliability, SlowNodes

    if cases:
        found = goodput_cases.cases()
        print_json([asdict(case) for case in found]) if json else print(
            "\n\n".join("\n".join(c.lines()) for c in found)
        )
        return
    known = failure_rates.parse(rate) if rate is not None else failure_rates.estimate(failures, gpu_days)
    job = Reliability(
        gpus=gpus,
        rate=known,
        detect_s=detect,
        restart_s=restart,
        tiers=(*map(goodput_report.parse_tier, tier or ()), goodput_report.last_tier(save, lag, load, interval)),
        job_per_day=software,
        planned_per_day=planned,
        slow=SlowNodes(slow_rate, slowdown, slow_notice) if slow_rate else None,
        step_s=step,
    )
    report = goodput_report.report(job, days * 86400, price, repair * 3600, simulate)
    print_json(report.to_dict()) if json else print("\n".join(report.lines()))


def register(app: typer.Typer) -> None:
    app.command()(goodput)
