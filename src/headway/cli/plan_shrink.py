"""`headway plan shrink`: the small run that stands for a large one, and how to read it back up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from headway.account.errors import UserError
from headway.cli.output import print_json
from headway.cli.paths import in_path, out_path
from headway.cli.plan_numbers import of
from headway.cli.plan_options import (
    ClusterSpec,
    Fix,
    GlobalBatch,
    Json,
    MeanSquare,
    PrecisionName,
    Seq,
    cluster_of,
    make_workload,
    parse_fix,
    writing,
)  # fmt: skip
from headway.plan.numbers import COUNT, GPUS, POSITIVE

if TYPE_CHECKING:
    from headway.plan.measured_run import MeasuredRun
    from headway.plan.read_back import Corrected
    from headway.plan.scaling_law import Fit
    from headway.plan.shrink import Shrunk


def shrink(
    target: Annotated[str, typer.Option(help="The large model: config.json, its folder, or a preset.")],
    cluster: ClusterSpec,
    gpus: Annotated[int, typer.Option(parser=of(GPUS), help="GPUs of the small run.")] = 16,
    seq: Seq = 8192,
    global_batch: GlobalBatch = 512,
    precision: PrecisionName = "bf16",
    mean_square: MeanSquare = None,
    fix: Fix = "",
    measured: Annotated[
        Path | None,
        typer.Option(
            parser=in_path, help="The small run's folder, or its account (JSON): corrects the large prediction."
        ),
    ] = None,
    write_config: Annotated[
        Path | None, typer.Option(parser=out_path, help="Write the small model's config.json here.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(parser=of(POSITIVE), help="Best learning rate of the small run (or of --proxy).")
    ] = None,
    proxy: Annotated[str, typer.Option(help="The model --lr was found with, if it is another (narrower) one.")] = "",
    proxy_batch: Annotated[int | None, typer.Option(parser=of(COUNT), help="Its sequences a step.")] = None,
    losses: Annotated[
        Path | None, typer.Option(parser=in_path, help="CSV of small runs, columns N,D,loss: fits L(N, D).")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(parser=of(POSITIVE), help="Tokens of the large run, for the loss.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the small run with the large one's time breakdown; with --measured, correct the large prediction by it.

    Example: headway plan shrink --target llama3-70b --cluster H100x1024 --gpus 16 --measured runs/small --lr 3e-4
    """
    from headway.plan.measured_run import read_measured
    from headway.plan.read_back import check_small, correct
    from headway.plan.run_case import parameters_of
    from headway.plan.search import search
    from headway.plan.shrink import shrink as run
    from headway.plan.transfer import scale_of, transfer
    from headway.plan.workload import load_config, load_model

    if losses is not None and tokens is None:
        raise UserError("--losses needs --tokens, what the large run is to be trained on, e.g. 15e12")
    if proxy and lr is None:
        raise UserError("--proxy needs --lr, the best learning rate found with it")
    if write_config is not None and write_config.exists():
        raise UserError(f"--write-config {write_config}: this file exists; give a new one")
    machines = cluster_of(cluster)
    work = make_workload(target, seq, global_batch, precision, mean_square)
    large = search(work, machines, parse_fix(fix), top=1).plans[0]
    found = run(load_config(target)[1], large, machines.with_gpus(gpus))
    small = found.small.workload
    content: dict[str, Any] = found.to_dict()
    lines = _shrunk_lines(found)
    if write_config is not None:
        with writing("--write-config", write_config):
            write_config.write_bytes(orjson.dumps(dict(found.config), option=orjson.OPT_INDENT_2))
        lines.append(f"written: {write_config}")
    if measured is not None:
        seen = read_measured(measured)
        check_small(found, seen, parameters_of(measured), f"--measured {measured}")
        better = correct(found, seen)
        content["corrected"] = better.to_dict()
        lines += _corrected_lines(found, seen, better)
    if lr is not None:
        shape = load_model(proxy)[1] if proxy else small.shape
        batch = proxy_batch or small.global_batch
        moved = transfer(scale_of(shape, work.shape, batch * seq, work.tokens), lr)
        content["transfer"] = moved.to_dict()
        lines += moved.lines()
    if losses is not None and tokens is not None:
        law = _law(losses, float(work.shape.parameters), tokens)
        content["scaling_law"] = law.to_dict() | {"target_loss": law.law.loss(work.shape.parameters, tokens)}
        content["scaling_law"]["target_band_90"] = law.band(work.shape.parameters, tokens)
        lines += _law_lines(law, float(work.shape.parameters), tokens)
    print_json(content) if json else print("\n".join(lines))


def _shrunk_lines(found: Shrunk) -> list[str]:
    from headway.plan.shrink import NEVER

    rows = []
    for name, one in (("target", found.target), ("small", found.small)):
        shape, work = one.workload.shape, one.workload
        size = f"{shape.parameters / 1e9:.2f}B, {len(shape.layers)} layers, vocabulary {shape.vocab:,}"
        rows.append(
            f"{name}: {size}, {work.seq} × {work.global_batch} on {one.cluster.gpus:,} {one.cluster.device.name}"
        )
        rows.append(f"  {one.layout.describe()}: step {one.step_s:.3f} s, {one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU")
    rows.append(f"share of the step         target   small   ({found.distance:.1%} of the step stands elsewhere)")
    rows += [f"  {term:<22} {large:7.1%} {small:7.1%}" for term, large, small in found.shares()]
    rows += [f"not preserved: {term} ({large:.1%} → {small:.1%}): {why}" for term, large, small, why in found.lost()]
    rows += [f"never preserved: {text}" for text in NEVER]
    return rows


def _corrected_lines(found: Shrunk, seen: MeasuredRun, better: Corrected) -> list[str]:
    rows = [
        f"measured: step {seen.step_s:.3f} s, mean of {seen.steps} steps (predicted {found.small.step_s:.3f} s)",
        f"  {'':<20} {'small':>9} {'measured':>9} {'ratio':>6} {'target':>9} {'corrected':>9}",
    ]
    for line in better.lines:
        rows.append(
            f"  {line.path:<20} {line.small_predicted:9.4f} {line.small_measured:9.4f} {line.ratio:6.2f} "
            f"{line.target_predicted:9.4f} {line.target_corrected:9.4f}"
        )
    speed = found.target.workload.tokens / better.step_s / found.target.cluster.gpus
    band = f"{better.low_s:.3f} … {better.high_s:.3f} over its steps"
    return [*rows, f"target corrected: step {better.step_s:.3f} s ({band}), {speed:,.0f} tokens/s/GPU"]


def _law(path: Path, parameters: float, tokens: float) -> Fit:
    from headway.plan.scaling_law import fit_law, read_losses

    return fit_law(*read_losses(path), (parameters, tokens))


def _law_lines(fit: Fit, parameters: float, tokens: float) -> list[str]:
    law = fit.law
    bands = {name: fit.interval(name) for name in ("e", "alpha", "beta")}
    low, high = fit.band(parameters, tokens)
    size, data = law.best_split(6 * parameters * tokens)
    return [
        f"loss: L = {law.e:.4g} + {law.a:.4g} / N^{law.alpha:.3f} + {law.b:.4g} / D^{law.beta:.3f}  "
        f"({fit.runs} runs, within {fit.error:.2%}; Hoffmann et al. 2022)",
        "  90 % of bootstraps: " + ", ".join(f"{name} {a:.3g} … {b:.3g}" for name, (a, b) in bands.items()),
        f"  target: {law.loss(parameters, tokens):.4f} nats ({low:.4f} … {high:.4f}), "
        f"extrapolated {fit.reach[0]:.3g} × in parameters and {fit.reach[1]:.3g} × in tokens",
        f"  the same FLOPs are spent best on {size / 1e9:.3g}B parameters and {data:.3g} tokens",
        *(f"  warning: {text}" for text in fit.warnings),
    ]


def register(app: typer.Typer) -> None:
    app.command()(shrink)
