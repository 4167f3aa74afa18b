"""A finished Headway run as a row that calibrates: its model, its plan and its mean step, from the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.account.flops import document_flops
from headway.account.measured_peaks import MeasuredPeaks
from headway.account.shape import ModelShape
from headway.plan.cluster import Cluster, Device, find_device, make_cluster
from headway.plan.layout import RECOMPUTES, Layout
from headway.plan.measured_run import MeasuredRun, read_measured
from headway.plan.reading import yaml_of
from headway.plan.row_rules import least_recompute
from headway.plan.rows import Case
from headway.plan.workload import Precision, Workload, load_config, shape_of
from headway.record.folder import RunFolder
from headway.record.sessions import History, read_history

STACK = "headway"
_PRECISION: Mapping[str, Precision] = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp8": "fp8", "float8": "fp8",
}  # fmt: skip
# A device that no datasheet describes: bytes/s of its memory and of what joins its ranks for each FLOP/s, where
# `headway bench peak` did not measure the first. What a desktop CPU has; the factor takes up what is wrong with it.
_BYTES_PER_FLOP, _LINK_SHARE = 0.1, 0.25


def case_of_run(path: Path) -> Case:
    """The run in a folder. Raises UserError naming the file or key that keeps it from being predicted."""
    folder = RunFolder(path)
    measured, history = read_measured(path), read_history(folder)
    config = _run_file(folder.config)
    shape, name = _shape(config, folder)
    start = history.sessions[-1].start
    precision = _PRECISION.get(str(start.facts.get("precision", "")), "bf16")
    assumed = [] if precision == start.facts.get("precision") else [f"{start.facts.get('precision')} counted as bf16"]
    cluster = _cluster(measured, start.peak_flops, str(start.facts.get("precision", "")), assumed)
    seq = int(_of(config, "data", "slots") or _of(config, "data", "seq_len") or 1)
    work = Workload(
        shape=shape,
        seq=seq,
        global_batch=max(1, round((measured.slots or seq) / seq)),
        precision=precision,
        name=name,
        mean_square=_mean_square(shape, history, seq),
        lora=bool(_of(config, "model", "lora")),
    )
    layout = _layout(config, start.facts, work, measured, cluster, assumed)
    return Case(
        row_id=str(path),
        source=str(path),
        group=(STACK, cluster.device.name, precision),
        role="calibration",
        flag="",
        work=work,
        layout=layout,
        cluster=cluster,
        step_s=measured.step_s,
        memory_gib=None,
        oom=False,
        assumed=tuple(assumed),
        complete=True,
        file=str(path),
    )


def _run_file(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml_of(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the folder of a Headway run") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a run file")
    return content


def _of(config: Mapping[str, Any], section: str, key: str) -> Any:
    inside = config.get(section)
    return inside.get(key) if isinstance(inside, dict) else None


def parameters_of(path: Path) -> int | None:
    """Parameters of a run folder's model; None for a file, or where the folder no longer says which model it was."""
    folder = RunFolder(path)
    try:
        return _shape(_run_file(folder.config), folder)[0].parameters if path.is_dir() else None
    except UserError:
        return None


def _shape(config: Mapping[str, Any], folder: RunFolder) -> tuple[ModelShape, str]:
    """Of the model that the run names, else of what it exported."""
    given = _of(config, "model", "config")
    if isinstance(given, dict):
        return shape_of(given), str(config.get("name", "run"))
    for spec in (given, _of(config, "model", "path"), str(folder.final_model)):
        if isinstance(spec, str) and Path(spec).exists():
            name, content = load_config(spec)
            return shape_of(content), name
    raise UserError(
        f"{folder.config}: model.path {_of(config, 'model', 'path')!r} is not there any more; copy its folder"
    )


def _cluster(measured: MeasuredRun, peak: float | None, precision: str, assumed: list[str]) -> Cluster:
    gpus = measured.gpus or 1
    try:
        return make_cluster(find_device(measured.device), gpus)
    except UserError:
        known = MeasuredPeaks.load().of_device(measured.device, precision)
        peak = peak or max((one.flops for one in known), default=None)
        if not peak:
            raise UserError(
                f"device {measured.device!r} is not known and has no peak; `headway bench peak` measures one"
            ) from None
    bandwidth = max((one.bandwidth or 0.0 for one in known), default=peak * _BYTES_PER_FLOP)
    assumed.append(f"device {measured.device!r} by its measured peak of {peak:.3g} FLOP/s")
    device = Device(
        name=measured.device, rates={"bf16": peak}, measured={"bf16": peak}, memory=1e15, bandwidth=bandwidth,
        link=bandwidth * _LINK_SHARE, domain=gpus, inter_node=bandwidth * _LINK_SHARE, tdp_w=None, price_low=None,
        price=None, price_high=None, source="headway bench peak",
    )  # fmt: skip
    return make_cluster(device, gpus, gpus)


def _layout(
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    work: Workload,
    measured: MeasuredRun,
    cluster: Cluster,
    assumed: list[str],
) -> Layout:
    shards = int(facts.get("fsdp") or 1)
    accumulated = measured.micro_batches or 1
    layout = Layout(
        dp=cluster.gpus,
        zero=3 if shards > 1 else 0,
        shard=shards if 1 < shards < cluster.gpus else 0,
        micro_batch=max(1, round(work.global_batch / cluster.gpus / accumulated)),
        compiled=bool(_of(config, "train", "compile")) or _of(config, "model", "fuse") == "auto",
        native_attention=False,
    )
    said = _of(config, "model", "recompute")
    if said in RECOMPUTES:
        return replace(layout, recompute=said)
    if isinstance(said, int):
        return replace(layout, recompute="full", recompute_share=min(1.0, said / len(work.shape.layers)))
    assumed.append("recompute: the least that fits")
    return least_recompute(work, layout, cluster)


def _mean_square(shape: ModelShape, history: History, seq: int) -> float | None:
    """Length whose attention costs what the run's documents did, from the useful FLOPs it counted, or None."""
    lines = [line for line in history.kept if line.tokens]
    tokens, useful = sum(line.tokens for line in lines), sum(line.flops.useful for line in lines)
    if not tokens or not useful:
        return None
    low, high = 1, 2**20
    if not _per_token(shape, low) <= useful / tokens <= _per_token(shape, high):
        return None  # adapters or a head at trained tokens only: another convention
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _per_token(shape, middle) <= useful / tokens else (low, middle)
    return float(min(low, seq))


def _per_token(shape: ModelShape, length: int) -> float:
    return document_flops(shape, [length]).total / length
