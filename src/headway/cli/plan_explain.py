"""`headway plan explain`: one plan, term by term."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.cli.output import print_json
from headway.cli.plan_options import (
    ClusterSpec,
    Fix,
    GlobalBatch,
    Json,
    Model,
    PrecisionName,
    Seq,
    cluster_of,
    fixed_layout,
    make_workload,
    parse_fix,
)  # fmt: skip


def explain(
    model: Model,
    cluster: ClusterSpec,
    seq: Seq = 8192,
    global_batch: GlobalBatch = 512,
    precision: PrecisionName = "bf16",
    fix: Fix = "",
    json: Json = False,
    top: Annotated[int, typer.Option(help="Terms to show.")] = 20,
) -> None:
    """Show one plan's step, term by term.

    Example: headway plan explain --model llama3-70b --cluster H100x64 --fix tp=4,pp=4
    """
    from headway.plan.layout import check
    from headway.plan.predict import predict

    machines = cluster_of(cluster)
    work = make_workload(model, seq, global_batch, precision)
    layout = fixed_layout(parse_fix(fix), machines)
    check(layout, work.shape, machines, seq, global_batch)
    found = predict(work, layout, machines)
    if json:
        print_json(found.to_dict())
        return
    print(f"{layout.describe()}: step {found.step_s:.3f} s, {found.tokens_per_s_per_gpu:,.0f} tokens/s/GPU")
    for name, seconds in sorted(found.terms.items(), key=lambda item: -item[1])[:top]:
        print(f"  {name:<10} {seconds:9.4f} s  {seconds / found.step_s:6.1%}")


def register(app: typer.Typer) -> None:
    app.command()(explain)
