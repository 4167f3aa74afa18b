"""Published or own runs from a CSV: one row to a case that can be predicted, or the reason why it cannot.

Columns are those of docs/plan.md; whatever is blank is inferred by one stated rule each, and the case says so.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster, find_device, make_cluster
from headway.plan.layout import RECOMPUTES, Layout
from headway.plan.memory import memory
from headway.plan.observed import observed_step
from headway.plan.profile import profile
from headway.plan.row_model import row_model
from headway.plan.stacks import layout_defaults, stack_of
from headway.plan.workload import Precision, Workload

Row = Mapping[str, str]


class CannotScore(Exception):
    """Why a row cannot be predicted, in a few words."""


@dataclass(frozen=True)
class Case:
    """One run: what it trained, how, where, and what was measured (None where a row does not say).

    `group` is what a calibration factor belongs to: (stack, device, precision). `assumed` names what was inferred.
    """

    row_id: str
    source: str
    group: tuple[str, str, str]
    role: str
    flag: str
    work: Workload
    layout: Layout
    cluster: Cluster
    step_s: float | None
    memory_gib: float | None
    oom: bool
    assumed: tuple[str, ...]
    complete: bool

    @property
    def stack(self) -> str:
        return self.group[0]

    @property
    def document(self) -> str:
        """The source without line numbers and headings: rows of one document are not independent."""
        return re.sub(r"(?: L\d+)?(?: \".*)?$", "", self.source)


@dataclass(frozen=True)
class Unscored:
    """A row that cannot be predicted, and why."""

    row_id: str
    source: str
    reason: str


def read_rows(path: Path) -> list[dict[str, str]]:
    """The CSV's rows. Raises UserError when the file is missing, is not text, or has no header of ours."""
    if path.is_dir():
        raise UserError(f"{path}: a folder; give a CSV with one row per run (docs/plan.md lists the columns)")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="_more")
            names = set(reader.fieldnames or ())
            rows = [{str(key): value for key, value in row.items() if isinstance(value, str)} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV in UTF-8 ({error})") from error
    missing = {"model", "gpu", "gpus"} - names
    if missing:
        raise UserError(f"{path}: column {sorted(missing)[0]!r} is missing; docs/plan.md lists the columns")
    return rows


def read_cases(path: Path) -> tuple[list[Case], list[Unscored]]:
    """Every row as a case or as a reason; never an exception for a row's content."""
    cases: list[Case] = []
    unscored: list[Unscored] = []
    for number, row in enumerate(read_rows(path), 2):
        row_id = row.get("row_id") or f"{path.name}:{number}"
        try:
            cases.append(make_case(row, row_id))
        except (CannotScore, UserError, ValueError, ZeroDivisionError, OverflowError) as error:
            unscored.append(Unscored(row_id, row.get("source", ""), str(error)))
    return cases, unscored


def make_case(row: Row, row_id: str = "") -> Case:
    """One row as a case. Raises CannotScore or UserError with the reason where it cannot be one."""
    assumed: list[str] = []
    stack = stack_of(row.get("source", ""))
    notes = row.get("notes", "")
    device = find_device(row.get("gpu", ""))
    gpus = _whole(row, "gpus")
    seq, batch = _whole(row, "seq_len"), _whole(row, "global_batch")
    if gpus is None or seq is None or batch is None:
        blank = next(key for key in ("gpus", "seq_len", "global_batch") if not _whole(row, key))
        raise CannotScore(f"column {blank} is blank")
    precision = _precision(row, stack.name, assumed)
    shape, about = row_model(row)
    assumed += about
    work = Workload(shape, seq, batch, precision, row.get("model", ""), lora="lora" in notes.casefold())
    cluster = _cluster(row, device.name, gpus)
    layout = _layout(row, work, cluster, layout_defaults(stack, device.name, precision, notes), assumed)
    step, how = observed_step(row, work, gpus)
    if how:
        assumed.append(how)
    mem = _number(row, "mem_gb")
    complete = all(row.get(key) for key in ("tp", "pp", "micro_batch", "layers", "hidden"))
    return Case(
        row_id=row_id or row.get("row_id", ""),
        source=row.get("source", ""),
        group=(stack.name, device.name, precision),
        role=row.get("role", ""),
        flag=row.get("flag", ""),
        work=work,
        layout=layout,
        cluster=cluster,
        step_s=step,
        memory_gib=mem,
        oom=notes.startswith("OOM"),
        assumed=tuple(assumed),
        complete=complete,
    )


def _layout(row: Row, work: Workload, cluster: Cluster, facts: Mapping[str, Any], assumed: list[str]) -> Layout:
    degrees = {key: _whole(row, key) for key in ("tp", "pp", "cp", "ep", "vpp")}
    if degrees["tp"] is None or degrees["pp"] is None:
        raise CannotScore("columns tp and pp are blank: the plan is not published")
    known = {key: value or 1 for key, value in degrees.items()}
    others = known["tp"] * known["pp"] * known["cp"]
    if cluster.gpus % others:
        raise CannotScore(f"tp·pp·cp = {others} does not divide {cluster.gpus} GPUs")
    dp = cluster.gpus // others
    if degrees["vpp"] is None and known["pp"] > 1 and "dgxc" in row.get("source", ""):
        # NVIDIA's recipes interleave as deep as layers allow, and their tables of 2025 leave the column out.
        known["vpp"] = max(1, len(work.shape.layers) // known["pp"])
        assumed.append(f"vpp {known['vpp']}")
    micro = _whole(row, "micro_batch")
    fsdp = _whole(row, "fsdp") or 0
    choices: dict[str, Any] = {**facts, **known}
    layout = replace(Layout(), **choices, dp=dp, micro_batch=micro or 1)
    if work.shape.model_type == "gpt_oss":  # learned sinks and a clamped SwiGLU: the fused kernels of 2025 lack both
        layout = replace(layout, native_attention=False, compiled=False)
    if fsdp > 1:
        layout = replace(layout, zero=3 if known["pp"] == 1 else 2, shard=0 if fsdp >= dp else fsdp)
    shard = re.search(r"zero1=(\d+)", row.get("notes", ""))
    if shard:
        layout = replace(layout, shard=int(shard[1]))
    stated = row.get("recompute", "").strip().casefold()
    if stated in RECOMPUTES:
        layout = replace(layout, recompute=stated)
    if micro is None:
        layout = most_micro_batch(work, layout, cluster)
        assumed.append(f"micro_batch {layout.micro_batch}")
    if stated in RECOMPUTES:
        return layout
    if work.lora:
        return layout
    assumed.append("recompute: the least that fits")
    return least_recompute(work, layout, cluster)


def least_recompute(work: Workload, layout: Layout, cluster: Cluster) -> Layout:
    """The one rule for a plan that does not say what it recomputes: the least that fits in memory.

    None, else selective, else full in as few eighths of the layers as will do; where even all of them do not fit, the
    same again with parameters sharded too (a plan that ran must have fitted).
    """
    model = profile(work.shape)
    stages = (layout,) if layout.zero == 3 else (layout, replace(layout, zero=3))
    for base in stages:
        tries = [replace(base, recompute=recompute) for recompute in ("none", "selective")]
        tries += [replace(base, recompute="full", recompute_share=eighths / 8) for eighths in range(1, 9)]
        for tried in tries:
            if memory(model, work, tried, cluster).fits:
                return tried
    return replace(layout, recompute="full")


def most_micro_batch(work: Workload, layout: Layout, cluster: Cluster) -> Layout:
    """The one rule for a plan that does not state its micro-batch: the largest power of two up to 8 that fits, divides
    the replica's batch and leaves at least four micro-batches for each stage.
    """
    model, best = profile(work.shape), layout
    for size in (2, 4, 8):
        tried = replace(layout, micro_batch=size)
        divides = work.global_batch % (layout.dp * size) == 0
        if divides and tried.micro_batches(work.global_batch) >= 4 * layout.pp:
            best = tried if memory(model, work, tried, cluster).fits else best
    return best


def _precision(row: Row, stack: str, assumed: list[str]) -> Precision:
    text = row.get("precision", "").casefold()
    if not text:
        # BLOOM's prequel ran in fp16 (its bf16 rows say so); everywhere else bf16 has been the habit since 2021.
        assumed.append("precision")
        return "fp16" if stack == "megatron-deepspeed" else "bf16"
    for name, sign in (("fp4", "fp4"), ("fp8", "fp8"), ("fp16", "fp16"), ("bf16", "bf16")):
        if sign in text:
            return name  # type: ignore[return-value]
    raise CannotScore(f"precision {text!r} is unknown")


def _cluster(row: Row, device_name: str, gpus: int) -> Cluster:
    device = find_device(device_name)
    cluster = make_cluster(device, gpus, _whole(row, "gpus_per_node"))
    text = row.get("interconnect", "")
    cluster = replace(cluster, onloaded="omnipath" in text.casefold().replace("-", ""))
    speed = network_of(text, cluster.gpus_per_node)
    return replace(cluster, inter_node=speed) if speed else cluster


def network_of(text: str, gpus_per_node: int) -> float | None:
    """bytes/s per GPU that a description such as `8x400Gb/s`, `1600Gb/s per node` or `400Gb/s per GPU` states."""
    ports = re.search(r"(\d+)\s*x\s*(?:\w+\s+)?(\d+)\s*Gb", text)
    if ports:
        return int(ports[1]) * int(ports[2]) / 8 * 1e9 / gpus_per_node
    node = re.search(r"(\d+)\s*Gb(?:ps|/s) per (node|GPU)", text)
    if node:
        return int(node[1]) / 8 * 1e9 / (gpus_per_node if node[2] == "node" else 1)
    return None


def _number(row: Row, key: str) -> float | None:
    try:
        value = float(row.get(key, "") or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _whole(row: Row, key: str) -> int | None:
    value = _number(row, key)
    return round(value) if value is not None and value >= 0.5 else None
