"""`headway plan --model … --cluster …`: the plan itself (the command without a sub-command)."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headway.account.errors import UserError
from headway.cli.output import print_json
from headway.cli.plan_options import Fix, Json, MeanSquare, cluster_of, make_workload, parse_fix


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="config.json, its folder, or a preset such as llama3-70b.")] = "",
    cluster: Annotated[str, typer.Option(help="H100x1024, or a YAML file (docs/plan.md has its keys).")] = "",
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 8192,
    global_batch: Annotated[int, typer.Option(help="Sequences per optimizer step.")] = 512,
    tokens: Annotated[float, typer.Option(help="Tokens to train on; gives days, GPU-hours and dollars.")] = 0.0,
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp8 or fp4.")] = "bf16",
    mean_square: MeanSquare = None,
    fix: Fix = "",
    objective: Annotated[str, typer.Option(help="time, cost or memory.")] = "time",
    deadline: Annotated[str, typer.Option(help="The run must end within, e.g. 30d.")] = "",
    budget: Annotated[float, typer.Option(help="The run must cost at most so many dollars.")] = 0.0,
    price: Annotated[
        float, typer.Option(help="Dollars per GPU and hour, in place of the published typical one.")
    ] = 0.0,
    calibrate: Annotated[Path | None, typer.Option(help="Rows or factors of your own stack (docs/plan.md).")] = None,
    stack: Annotated[str, typer.Option(help="Whose factor of --calibrate to use, e.g. nemo.")] = "",
    top: Annotated[int, typer.Option(help="Plans to show.")] = 5,
    json: Json = False,
) -> int:
    """Find the best parallel plans for a model on a cluster; say how long, how much, and what was ruled out.

    Exit code 1 when no plan meets --deadline or --budget.

    Example: headway plan --model llama3-70b --cluster H100x1024 --global-batch 512 --tokens 15e12
    """
    from headway.plan.decision import bottlenecks, cost_of, parse_deadline
    from headway.plan.search import OBJECTIVES, search

    if context.invoked_subcommand is not None:
        return 0
    if not model or not cluster:
        raise UserError(f"{'--model' if not model else '--cluster'} is missing; `headway plan --help` has an example")
    if objective not in OBJECTIVES:
        near = difflib.get_close_matches(objective, OBJECTIVES, n=2) or OBJECTIVES
        raise UserError(f"--objective {objective!r} is unknown; nearest: {', '.join(near)}")
    if (deadline or budget) and not tokens:
        raise UserError("--deadline and --budget need --tokens, the length of the run")
    limit = parse_deadline(deadline) if deadline else None
    work = make_workload(model, seq, global_batch, precision, mean_square)
    machines = cluster_of(cluster)
    if price:
        machines = replace(machines, price_per_hour=price)
    factor = _factor(calibrate, stack, machines.device.name, precision)
    found = search(work, machines, parse_fix(fix), objective=objective, top=top, factor=factor)
    costs = [cost_of(one, tokens) for one in found.plans] if tokens else []
    best = costs[0] if costs else None
    late = limit is not None and best is not None and best.seconds > limit
    dear = bool(budget) and best is not None and (best.dollars is None or best.dollars > budget)
    if json:
        plans = [one.to_dict() for one in found.plans]
        for entry, cost in zip(plans, costs, strict=False):
            entry["run"] = {"days": cost.days, "gpu_hours": cost.gpu_hours, "dollars": cost.dollars}
        print_json({"plans": plans, "priced": found.priced, "removed": found.removed, "factor": factor})
        return 1 if late or dear else 0
    size = f"{work.shape.parameters / 1e9:.2f}B parameters, {seq} × {global_batch} tokens a step, {precision}"
    print(f"{work.name}: {size}, {machines.gpus} × {machines.device.name} ({found.priced} plans fit)")
    for rank, one in enumerate(found.plans, 1):
        memory = f"needs {one.memory.needed / 2**30:.0f} of {one.memory.capacity / 2**30:.0f} GiB"
        print(f"{rank}. {one.layout.describe()}")
        speed = f"step {one.step_s:.3f} s · {one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        print(f"   {speed} · MFU {one.mfu:.1%} (causal) · {memory}")
        if costs:
            cost = costs[rank - 1]
            money = "price unknown (--price)" if cost.dollars is None else f"{cost.dollars:,.0f} dollars"
            print(
                f"   {cost.days:,.1f} days · {cost.gpu_hours:,.0f} GPU-hours · {money}, before failures (plan goodput)"
            )
    shares = " · ".join(f"{name} {share:.1%}" for name, share in bottlenecks(found.plans[0])[:6])
    print(f"where the first one's step goes: {shares}")
    ruled_out = sorted(found.removed.items(), key=lambda item: -item[1])[:4]
    if ruled_out:
        print("ruled out: " + "; ".join(f"{reason} ({count})" for reason, count in ruled_out))
    if late and best is not None:
        print(f"no plan meets the deadline: the fastest takes {best.days:,.1f} days")
    if dear and best is not None:
        price_text = "has no price" if best.dollars is None else f"costs {best.dollars:,.0f} dollars"
        print(f"no plan meets the budget: the best {price_text}")
    return 1 if late or dear else 0


def _factor(path: Path | None, stack: str, device: str, precision: str) -> float:
    from headway.plan.calibrate import load_calibration
    from headway.plan.constants import default_constants

    if path is None:
        return 1.0
    found = load_calibration(path, default_constants())
    stacks = sorted({group[0] for group in found.factors})
    name = stack or (stacks[0] if len(stacks) == 1 else "")
    if name not in stacks:
        raise UserError(f"--stack {stack!r} is not in {path}; there are: {', '.join(stacks)}")
    return found.factor((name, device, precision))


def register(app: typer.Typer) -> None:
    app.callback(invoke_without_command=True)(plan)
