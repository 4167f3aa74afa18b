"""What a row leaves blank, by one stated rule each (docs/plan.md lists them); every guess is named in `assumed`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from headway.account.errors import UserError
from headway.plan.cluster import Cluster, Device
from headway.plan.layout import Layout, Recompute
from headway.plan.memory import memory
from headway.plan.profile import profile
from headway.plan.row_values import Row, number, whole
from headway.plan.search import search
from headway.plan.workload import Precision, Workload

SEQ = 2048  # what GPT-3 trained with, and most tables that leave it out
ACCUMULATION = 8  # micro-batches a replica, where nothing says how many
_LORA = re.compile(r"(?<![a-z])(?:q|d|rs)?lora(?![a-z])|(?<![a-z])peft|(?<![a-z])dora(?![a-z])")


def gpus_of(row: Row, assumed: list[str]) -> int | None:
    """GPUs as published, else the product of the degrees where all of them are there."""
    given = whole(row, "gpus")
    degrees = [whole(row, key) for key in ("dp", "tp", "pp")]
    if given is not None or None in degrees:
        return given
    found = (whole(row, "cp") or 1) * (degrees[0] or 1) * (degrees[1] or 1) * (degrees[2] or 1)
    assumed.append(f"gpus {found} = dp·tp·pp·cp")
    return found


def contradiction(row: Row, gpus: int, dp: int) -> str:
    """Where a row's own figures exclude each other, which; "" where they do not. `dp` is what the GPUs leave over, for
    where none is published (some tables count context parallel ranks in it, some do not)."""
    said, micro, batch = whole(row, "dp"), whole(row, "micro_batch"), whole(row, "global_batch")
    tp, pp, cp = whole(row, "tp"), whole(row, "pp"), whole(row, "cp") or whole(row, "sp") or 1
    if said and tp and pp and gpus not in (said * tp * pp, said * tp * pp * cp):
        return f"dp·tp·pp·cp = {said * tp * pp * cp} is not its {gpus} GPUs"
    if micro and batch and micro * (said or dp) > batch:
        return f"dp·micro_batch = {micro * (said or dp)} is more than its global_batch of {batch}"
    return ""


def sequence_of(row: Row, gpus: int, assumed: list[str]) -> int:
    """As published, else what step time and tokens/s make it, else 2,048."""
    given = whole(row, "seq_len")
    if given is not None:
        return given
    tokens, batch = tokens_of(row, gpus), whole(row, "global_batch")
    found = round(tokens / batch) if tokens and batch and tokens >= batch else SEQ
    assumed.append(f"seq_len {found}")
    return found


def batch_of(row: Row, gpus: int, seq: int, assumed: list[str]) -> int:
    """As published, else what step time and tokens/s make it, else dp · micro_batch · accumulated micro-batches."""
    given = whole(row, "global_batch")
    if given is not None:
        return given
    tokens = tokens_of(row, gpus)
    if tokens and tokens >= seq:
        found = round(tokens / seq)
    else:
        others = (whole(row, "tp") or 1) * (whole(row, "pp") or 1) * (whole(row, "cp") or 1)
        replicas = whole(row, "dp") or max(1, gpus // others)
        said = re.search(
            r"(?:grad_?accum\w*|gradient accumulation|\bga)\D{0,3}(\d{1,4})\b", row.get("notes", "").casefold()
        )
        found = replicas * (whole(row, "micro_batch") or 1) * (max(1, int(said[1])) if said else ACCUMULATION)
    assumed.append(f"global_batch {found}")
    return found


def tokens_of(row: Row, gpus: int) -> float | None:
    """Tokens of a step where both step time and tokens/s/GPU are published."""
    step, rate = number(row, "step_time_s"), number(row, "tokens_per_s_per_gpu")
    return step * rate * gpus if step and rate else None


def precision_of(row: Row, stack: str, device: Device, assumed: list[str]) -> Precision:
    """fp4, fp8, fp16 or bf16 by what the text contains; blank and anything else: bf16 (fp16 for BLOOM's old logs, and
    where the device has no bf16: V100, T4)."""
    text = re.sub(r"[\s_\-]+", "", row.get("precision", "").casefold())
    signs = (
        ("fp4", ("fp4",)),
        ("fp8", ("fp8", "float8", "e4m3")),
        ("bf16", ("bf16", "bfloat16")),
        ("fp16", ("fp16", "float16", "half")),
    )
    for name, pieces in signs:
        if any(piece in text for piece in pieces):
            return name  # type: ignore[return-value]
    # BLOOM's prequel ran in fp16 (its bf16 rows say so); everywhere else bf16 has been the habit since 2021.
    old = (stack == "megatron-deepspeed" and not text) or ("bf16" not in device.rates and "fp16" in device.rates)
    found: Precision = "fp16" if old else "bf16"
    assumed.append(f"precision {found}" + (f" for {text!r}" if text else ""))
    return found


def is_lora(row: Row) -> bool:
    """Whether a row trains low-rank adapters, by its notes, model or family."""
    return any(_LORA.search(row.get(key, "").casefold()) for key in ("notes", "model", "family"))


def recompute_of(row: Row) -> Recompute | None:
    """none, selective or full from the words people use; None where nothing usable is said."""
    text = row.get("recompute", "").strip().casefold()
    if not text:
        return None
    if "sel" in text or "sac" in text or "attn" in text or "attention" in text:
        return "selective"
    if re.match(r"(no|none|off|false|disabled|0)\b", text):
        return "none"
    if re.search(r"full|block|uniform|\ball\b|\byes\b|\bon\b|true|layer|1", text):
        return "full"
    return None


def expert_degree(work: Workload, layout: Layout, cluster: Cluster) -> int:
    """EP that a mixture of experts has where a row leaves it blank: as many experts' ranks as the fast domain and the
    replicas allow; 1 where parameters are sharded whole (FSDP stacks gather experts like everything else)."""
    experts = max((layer.mlp.experts for layer in work.shape.layers if layer.mlp), default=0)
    if not experts or layout.zero == 3:
        return 1
    ranks = layout.replicas * layout.tp
    most = min(experts, cluster.domain, ranks)
    return next(n for n in range(most, 0, -1) if experts % n == 0 and ranks % n == 0)


def unpublished_plan(row: Row, work: Workload, cluster: Cluster, facts: dict[str, Any], assumed: list[str]) -> Layout:
    """Where neither tp nor pp is published: the search's best plan with what is (published runs are tuned), else plain
    data parallelism with as much sharding as it needs."""
    given = {key: value for key in ("cp", "ep", "micro_batch") if (value := whole(row, key))}
    given |= {key: value for key, value in facts.items() if key not in ("zero", "overlap_tp", "buckets")}
    try:
        found = search(work, cluster, given, top=1).plans[0].layout
    except UserError:
        found = Layout(dp=cluster.gpus, zero=3)
    assumed.append(f"plan not published: {found.describe()}")
    return found


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
