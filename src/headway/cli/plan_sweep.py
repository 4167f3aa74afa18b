"""`headway plan sweep`: the scaling curve and the walls it runs into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.output import print_json
from headway.cli.plan_numbers import of
from headway.cli.plan_options import (
    Calibrate,
    Fix,
    GlobalBatch,
    Json,
    MeanSquare,
    Model,
    PrecisionName,
    Seq,
    StackName,
    factor_of,
    kind_of,
    make_workload,
    parse_fix,
)  # fmt: skip
from headway.plan.numbers import AMOUNT, INSIDE

if TYPE_CHECKING:
    from headway.plan.sweep import Sweep


def sweep(
    model: Model,
    cluster: Annotated[str, typer.Option(help="The kind of machine: H100, H100x8, or a YAML file.")],
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, e.g. 8,16,…,16384 (the ratio goes on).")] = "8,16,…,4096",
    seq: Seq = 8192,
    global_batch: GlobalBatch = 512,
    precision: PrecisionName = "bf16",
    mean_square: MeanSquare = None,
    fix: Fix = "",
    weak: Annotated[
        bool, typer.Option("--weak", help="The batch grows with the GPUs (from the first number).")
    ] = False,
    bind: Annotated[
        float, typer.Option(parser=of(INSIDE), help="A wall binds where it costs this share of the step.")
    ] = 0.2,
    tokens: Annotated[float, typer.Option(parser=of(AMOUNT), help="Tokens to train on; adds days and dollars.")] = 0.0,
    calibrate: Calibrate = None,
    stack: StackName = "",
    json: Json = False,
) -> None:
    """Plan each number of GPUs; show the scaling curve and where Amdahl, communication and memory begin to bind.

    Example: headway plan sweep --model llama3-70b --cluster H100 --gpus 8,16,…,16384 --global-batch 1024
    """
    from headway.plan.sweep import parse_gpus
    from headway.plan.sweep import sweep as run

    work = make_workload(model, seq, global_batch, precision, mean_square)
    counts = parse_gpus(gpus)
    machines = kind_of(cluster, counts[-1])
    factor = factor_of(calibrate, stack, machines.device.name, precision)
    found = run(work, machines, counts, weak=weak, bind=bind, tokens=tokens, fixed=parse_fix(fix), factor=factor)
    if json:
        print_json(found.to_dict())
        return
    kind = "weak scaling, the batch grows" if weak else f"strong scaling, {work.global_batch} sequences a step"
    print(f"{work.name} on {machines.device.name}: {kind}")
    print("\n".join(_lines(found)))


def _lines(found: Sweep) -> list[str]:
    from headway.plan.textplot import log_plot

    rows = [f"{'GPUs':>7} {'step s':>9} {'tokens/s':>12} {'effic.':>7} {'MFU':>6} {'comm.':>6} {'bubble':>7}  plan"]
    for point in found.points:
        one = point.found
        if one is None:
            rows.append(f"{point.gpus:>7,}  {point.reason}")
            continue
        run = f"  ({point.cost.line()})" if point.cost else ""
        bubble = one.terms["bubble"] / one.step_s
        rows.append(
            f"{point.gpus:>7,} {one.step_s:>9.3f} {one.tokens_per_s:>12,.0f} {found.efficiency(point):>7.1%} "
            f"{one.mfu:>6.1%} {point.communication:>6.1%} {bubble:>7.1%}  {one.layout.describe()}{run}"
        )
    real = [(float(p.gpus), p.found.tokens_per_s) for p in found.points if p.found]
    walls = {wall.name: wall.gpus for wall in found.walls if wall.gpus is not None}
    ideal = [(gpus, found.best_per_gpu * gpus) for gpus, _ in real]
    rows += ["", *log_plot({"plan": real, "ideal": ideal}, "GPUs", "tokens/s", marks=walls), ""]
    rows += [f"{wall.name}: {wall.says}" for wall in found.walls]
    return rows


def register(app: typer.Typer) -> None:
    app.command()(sweep)
