"""`headway plan explain`: why the best plan wins, term by term, and what the runner-up loses."""

from __future__ import annotations

import typer

from headway.cli.output import print_json
from headway.cli.plan_options import (
    Calibrate,
    ClusterSpec,
    Fix,
    GlobalBatch,
    Json,
    MeanSquare,
    Model,
    Mtp,
    PrecisionName,
    Seq,
    StackName,
    cluster_of,
    factor_of,
    make_workload,
    parse_fix,
)  # fmt: skip


def explain(
    model: Model,
    cluster: ClusterSpec,
    seq: Seq = 8192,
    global_batch: GlobalBatch = 512,
    precision: PrecisionName = "bf16",
    mean_square: MeanSquare = None,
    mtp: Mtp = True,
    fix: Fix = "",
    calibrate: Calibrate = None,
    stack: StackName = "",
    json: Json = False,
) -> None:
    """Show the best plan's step term by term, its memory by use, and where the runner-up loses.

    Example: headway plan explain --model llama3-70b --cluster H100x64 --fix tp=4,pp=4
    """
    from headway.plan.explain import bottlenecks, idle, loses
    from headway.plan.search import search

    work = make_workload(model, seq, global_batch, precision, mean_square, mtp)
    machines = cluster_of(cluster)
    factor = factor_of(calibrate, stack, machines.device.name, precision)
    fixed = parse_fix(fix)
    found = search(work, machines, fixed, top=2, factor=factor)
    best, second = found.plans[0], (found.plans[1] if len(found.plans) > 1 else None)
    if json:
        gaps = dict(loses(best, second)) if second else {}
        print_json(
            {
                "best": best.to_dict(),
                "runner_up": second.to_dict() if second else None,
                "runner_up_loses_s": gaps,
                "removed": found.removed,
                "without_effect": idle(best, fixed),
            }
        )
        return
    for text in idle(best, fixed):
        print(text)
    print(f"{best.layout.describe()}: step {best.step_s:.3f} s, {best.tokens_per_s_per_gpu:,.0f} tokens/s/GPU")
    shares = best.conventions
    if factor != 1.0:
        print(f"every time × {factor:.3f}, the factor of {machines.device.name} · {precision} in {calibrate}")
    print(
        f"of the {best.peak_name} peak: MFU {shares['causal']:.1%} (causal), "
        f"{shares['full_attention']:.1%} (full attention), {shares['hardware']:.1%} (hardware FLOPs)"
    )
    for name, share in bottlenecks(best):
        print(f"  {name:<12} {best.terms[name]:10.4f} s {share:7.1%}")
    ratio, fraction = best.facts["bubble_ratio"], best.facts["bubble_fraction"]
    print(f"bubble: {ratio:.1%} of the work (ratio), {fraction:.1%} of work and bubble (fraction)")
    print(f"gradients and parameters hidden behind kernels: {best.facts['dp_hidden_s']:.4f} s")
    held = best.memory
    fits = "fits" if held.fits else "does not fit"
    print(f"memory: needs {held.needed / 2**30:.1f} of {held.capacity / 2**30:.1f} GiB ({fits}): ", end="")
    print(" · ".join(f"{name} {size / 2**30:.1f}" for name, size in held.lines()))
    if best.layout.zero == 3:
        print("  (the parameters themselves are the optimizer's fp32 shards)")
    print(
        f"  tools may report up to {held.shown / 2**30:.1f} GiB: with blocks the allocator keeps, which it gives back "
        "when memory is short; what the plan needs decides"
    )
    if second is not None:
        slower = second.step_s / best.step_s - 1
        print(f"runner-up: {second.layout.describe()}: step {second.step_s:.3f} s ({slower:+.1%})")
        for name, seconds in loses(best, second):
            print(f"  {name:<12} {seconds:+10.4f} s")
    for reason, count in sorted(found.removed.items(), key=lambda item: -item[1])[:6]:
        print(f"ruled out: {reason} ({count})")


def register(app: typer.Typer) -> None:
    app.command()(explain)
