"""Published or own runs from a CSV: one row to a case that can be predicted, or the reason why it cannot.

Columns are those of docs/plan.md; whatever is blank is inferred by one stated rule each, and the case says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster, check_precision, find_device, make_cluster
from headway.plan.layout import Layout
from headway.plan.observed import observed_step
from headway.plan.row_model import row_model
from headway.plan.row_rules import (
    batch_of,
    contradiction,
    expert_degree,
    gpus_of,
    is_lora,
    least_recompute,
    most_micro_batch,
    precision_of,
    recompute_of,
    sequence_of,
    unpublished_plan,
)
from headway.plan.row_values import Row, check_cells, check_commas, number, whole, yes
from headway.plan.stacks import layout_defaults, stack_of
from headway.plan.table import Line, read_table
from headway.plan.workload import Workload


class CannotScore(Exception):
    """Why a row cannot be predicted, in a few words."""


@dataclass(frozen=True)
class Case:
    """One run: what it trained, how, where, and what was measured (None where a row does not say).

    `group` is what a calibration factor belongs to: (stack, device, precision). `assumed` names what was inferred.
    `file` and `line` are where it was read (0 where it is from no line); the same row in two files is one run.
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
    file: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)

    @property
    def guessed(self) -> bool:
        """Whether the model's sizes or the plan itself were guessed, not only parts of them."""
        return any("from params_total" in text or text.startswith("plan not published") for text in self.assumed)

    @property
    def stack(self) -> str:
        return self.group[0]

    @property
    def document(self) -> str:
        """The source without line numbers and headings: rows of one document are not independent."""
        return re.sub(r"(?: L\d+)?(?: \".*)?$", "", self.source)


@dataclass(frozen=True)
class Unscored:
    """A row that cannot be predicted, and why; its file and the line in it (0 where it is from none)."""

    row_id: str
    source: str
    reason: str
    line: int = 0
    file: str = ""

    @property
    def where(self) -> str:
        return f"in line {self.line}" if self.line else f"row {self.row_id}"


def read_rows(path: Path) -> list[Line]:
    """The CSV's rows. Raises UserError when the file cannot be read as one, or has no header of ours."""
    what = "give a CSV with one row per run (docs/plan.md lists the columns)"
    return read_table(path, str(path), ("gpu", "gpus", "model"), what)


def read_cases(path: Path) -> tuple[list[Case], list[Unscored]]:
    """Every row as a case or as a reason; never an exception for a row's content."""
    cases: list[Case] = []
    unscored: list[Unscored] = []
    seen: set[str] = set()
    for line in read_rows(path):
        row = line.cells
        row_id = row.get("row_id") or f"{path.name}:{line.number}"
        if row_id in seen:  # a row is known by its id when it is asked whether it calibrates
            row_id += f" in line {line.number}"
        seen.add(row_id)
        try:
            if line.fault:
                raise CannotScore(line.fault)
            if line.sign == ";":
                check_commas(row)
            cases.append(replace(make_case(row, row_id), file=str(path), line=line.number))
        except (CannotScore, UserError, ValueError, ZeroDivisionError, OverflowError) as error:
            unscored.append(Unscored(row_id, row.get("source", ""), str(error), line.number, str(path)))
    return cases, unscored


def make_case(row: Row, row_id: str = "") -> Case:
    """One row as a case. Raises CannotScore, UserError or ValueError with the reason where it cannot be one."""
    check_cells(row)
    assumed: list[str] = []
    stack = stack_of(row.get("source", ""))
    notes = row.get("notes", "")
    device = find_device(row.get("gpu", ""))
    gpus = gpus_of(row, assumed)
    if gpus is None:
        raise CannotScore("column gpus is blank, and dp·tp·pp do not say how many")
    seq = sequence_of(row, gpus, assumed)
    batch = batch_of(row, gpus, seq, assumed)
    precision = precision_of(row, stack.name, device, assumed)
    check_precision(device, precision, "column precision")
    shape, about = row_model(row)
    assumed += about
    mtp = shape.mtp_layers if re.search(r"w/ mtp|with mtp", notes.casefold()) else 0
    work = Workload(shape, seq, batch, precision, row.get("model", ""), lora=is_lora(row), mtp=mtp)
    cluster = _cluster(row, device.name, gpus)
    layout = _layout(
        row, work, cluster, layout_defaults(stack, device.name, precision, notes, row.get("source", "")), assumed
    )
    step, how = observed_step(row, work, gpus)
    if how:
        assumed.append(how)
    complete = all(row.get(key) for key in ("tp", "pp", "micro_batch", "layers", "hidden"))
    return Case(
        row_id=row_id or row.get("row_id", ""),
        source=row.get("source", ""),
        group=(stack.name, device.name, precision),
        role=row.get("role", ""),
        flag=row.get("flag", "") or contradiction(row, gpus, layout.dp),
        work=work,
        layout=layout,
        cluster=cluster,
        step_s=step,
        memory_gib=number(row, "mem_gb"),
        oom=notes.startswith("OOM"),
        assumed=tuple(assumed),
        complete=complete,
    )


def _layout(row: Row, work: Workload, cluster: Cluster, facts: dict[str, Any], assumed: list[str]) -> Layout:
    degrees = {key: whole(row, key) for key in ("tp", "pp", "cp", "ep", "vpp")}
    degrees["cp"] = degrees["cp"] or whole(row, "sp")  # Ulysses and ring attention split the sequence likewise
    fsdp = cluster.gpus if yes(row, "fsdp") else whole(row, "fsdp") or 0
    if degrees["tp"] is None and degrees["pp"] is None and fsdp < 2 and facts.get("zero", 0) < 3:
        layout = unpublished_plan(row, work, cluster, facts, assumed)
        return replace(layout, recompute=recompute_of(row) or layout.recompute)
    known = {key: value or 1 for key, value in degrees.items()}
    others = known["tp"] * known["pp"] * known["cp"]
    if others > cluster.gpus:
        raise CannotScore(f"tp·pp·cp = {others} is more than {cluster.gpus} GPUs")
    dp = cluster.gpus // others
    if cluster.gpus % others:
        assumed.append(f"dp {dp}: tp·pp·cp = {others} does not divide {cluster.gpus} GPUs")
    if degrees["vpp"] is None and known["pp"] > 1 and _interleaves(row):
        known["vpp"] = max(1, len(work.shape.layers) // known["pp"])
        assumed.append(f"vpp {known['vpp']}")
    micro = whole(row, "micro_batch")
    choices: dict[str, Any] = {**facts, **known}
    layout = replace(Layout(), **choices, dp=dp, micro_batch=micro or 1)
    if work.shape.model_type == "gpt_oss":  # learned sinks and a clamped SwiGLU: the fused kernels of 2025 lack both
        layout = replace(layout, native_attention=False, compiled=False)
    if work.shape.model_type in ("deepseek_v3", "kimi_k2"):  # trained with DeepEP (2412.19437) or its like everywhere
        layout = replace(layout, dedup=True)
    if fsdp > 1:
        layout = replace(layout, zero=3 if known["pp"] == 1 else 2, shard=0 if fsdp >= dp else fsdp)
    shard = re.search(r"zero1=(\d{1,6})", row.get("notes", ""))
    if shard:
        layout = replace(layout, shard=int(shard[1]))
    if degrees["ep"] is None and any(layer.mlp and layer.mlp.experts for layer in work.shape.layers):
        layout = replace(layout, ep=expert_degree(work, layout, cluster))
        assumed.append(f"ep {layout.ep}")
    stated = recompute_of(row)
    if stated is not None:
        layout = replace(layout, recompute=stated)
    if micro is None:
        layout = most_micro_batch(work, layout, cluster)
        assumed.append(f"micro_batch {layout.micro_batch}")
    if stated is not None or work.lora:
        return layout
    assumed.append("recompute: the least that fits")
    return least_recompute(work, layout, cluster)


def _interleaves(row: Row) -> bool:
    """Whether a pipeline is interleaved though the column is blank: notes that say so, and NVIDIA's recipes, which do
    so as deep as layers allow and whose tables of 2025 leave the column out."""
    said = row.get("notes", "").casefold()
    return "dgxc" in row.get("source", "") or ("interleaved schedule" in said and "pre-interleav" not in said)


def _cluster(row: Row, device_name: str, gpus: int) -> Cluster:
    device = find_device(device_name)
    cluster = make_cluster(device, gpus, whole(row, "gpus_per_node"))
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
